"""One node: answers the server's messages with its own data, and keeps its personal state.

Only answers leave: "yes" with the trees a method reports or with scores, or "no" with one word.
The details of a failure are in the node's own log.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.core import capabilities, tree
from idiolect.core.capabilities import FinalExchange, Privacy, has
from idiolect.core.method import Method, Report, Sent
from idiolect.core.tree import Tree
from idiolect.deploy import (
    compression,
    disclosure,
    encoder_agreement,
    gate,
    limits,
    node_records,
    personal_models,
    protocol,
    secure_aggregation,
    secure_sum,
)
from idiolect.deploy.data_summary import ExampleForm
from idiolect.deploy.handshake import features_fingerprint, method_fingerprint
from idiolect.deploy.node_records import PersonalState, ReleaseLog, StateOwner
from idiolect.deploy.protocol import MOST_EXCHANGED, Message, Refused
from idiolect.deploy.site import NodeData, NodeSettings, load_node_data
from idiolect.engine.backend import Backend
from idiolect.engine.deployment_runtime import ClientIdentity, ClientRuntime
from idiolect.engine.final_exchange import Sums, without
from idiolect.engine.row_metrics import MetricChoice
from idiolect.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Diverged,
    IdiolectError,
    ModelError,
)
from idiolect.experiment.components import assign_networks, build_method
from idiolect.experiment.job import Evaluate
from idiolect.experiment.schema import MethodTable
from idiolect.experiment.stored_models import ModelInfo
from idiolect.results import document
from idiolect.version import VERSION, series

log = logging.getLogger("idiolect.node")

_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch has no class of its own for it
_RUNS = 4  # at a time; of more the one that was asked for longest ago is joined anew
_PATIENT = ("closed", "approval", "hours")
_FLAGS = ("only_global", "keep", "newcomers")

Work = Callable[[ClientRuntime, Sent, int], tuple[Tree, Tree]]
"""Returns the report and the new personal state of a round."""


class _Reported(NamedTuple):
    """A node's part in the final exchange, and the model it would use without the others'."""

    about: tuple[str, int, int]  # label, seed, round
    sent: Sent
    numbers: Tree
    deployed: Tree


@dataclass(eq=False)
class _JoinedRun:
    """A run this node has joined."""

    run: str
    text: str
    place: int  # of this node in the list of sites
    clients: int
    newcomer: bool  # the run is over: adapt to its result
    read: NodeData  # as it was read
    data: NodeData  # as all agreed to scale and encode it
    admitted: gate.Admitted
    sums: secure_sum.NodeSums
    codec: protocol.Codec  # of its messages
    agreed: bool = False  # on the scaling of examples
    runtimes: dict[tuple[str, int], tuple[ClientRuntime, PersonalState]] = field(
        default_factory=dict
    )
    reported: _Reported | None = None  # in the last final exchange

    @property
    def secure(self) -> bool:
        """Whether reports leave in secure sums only."""
        return self.data.experiment.deploy.secure

    @property
    def choice(self) -> MetricChoice:
        """What is measured: as the experiment says, whatever a message asks for."""
        asked = Evaluate(**self.data.experiment.evaluate.of_job())
        return asked.choice(self.data.dataset.task.kind)

    def method(self, label: str) -> Method:
        """Return the experiment's method of that label."""
        return build_method(self._table(label))

    def rounds(self, label: str) -> int:
        """Return how many rounds of a method the run was let in for."""
        return self._table(label).rounds or self.data.experiment.rounds

    def _table(self, label: str) -> MethodTable:
        for table in self.data.experiment.methods:
            if table.label_or_name == label:
                return table
        raise Refused("experiment", f"the experiment has no method {label!r}")


class Node:
    """Answers messages with one client's data."""

    def __init__(self, site: NodeSettings) -> None:
        self._site = site
        self._runs: OrderedDict[str, _JoinedRun] = OrderedDict()  # the last used one last
        # Without a kit (within a process, or `--on local`) keys of secure sums are not signed.
        self._signer = None if site.kit is None else secure_aggregation.KitSigner.of(site.kit)
        self._released: ReleaseLog | None = None
        self._gate = gate.Gate(site, lambda: self._releases)
        self._device = Backend(device=site.device).place

    def answer(self, blob: bytes) -> bytes:
        """Answer one message; never raises, and reveals of a failure only its code."""
        try:
            message = protocol.unpack(blob, self._site.limit)
            answers: dict[str, Callable[[Message, bytes], bytes]] = {
                "open": self._open,
                "agree": self._agree,
                "step": self._step,
                "meet": self._meet,
                "keys": self._keys,
                "shares": self._sum_stage,
                "mask": self._sum_stage,
                "confirm": self._sum_stage,
                "unmask": self._sum_stage,
                "tell": self._tell,
                "judge": self._judge,
                "columns": self._columns,
                "describe": self._describe,
                "remark": self._remark,
                "close": self._close,
            }
            if message.kind not in answers:
                raise Refused("protocol", f"unknown kind of message {message.kind!r}")
            return answers[message.kind](message, blob)
        except BaseException as error:
            reason = reason_of(error)
            level = logging.INFO if reason in _PATIENT else logging.ERROR  # asked again
            log.log(level, "refused with %r: %s", reason, error, exc_info=reason == "failed")
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return protocol.refusal(reason, str(error) if reason == "declined" else "")

    # Joining.

    def _open(self, message: Message, blob: bytes) -> bytes:
        """Compare versions and methods, load the data, and return its size and form."""
        if series(message.field("version", str)) != series(VERSION):
            version = message.head["version"]
            raise Refused("version", f"the server runs {version}, this node {VERSION}")
        text, newcomer = message.field("experiment", str), message.field("newcomer", bool)
        run, clients = message.field("run", str), message.field("clients", int)
        admitted = self._gate.admit(message, "adapt" if newcomer else "run")
        known, place = self._runs.get(run), message.field("place", int)
        if known is not None and (known.text, known.place) == (text, place):
            data = known.read  # started anew by the server; reading may take minutes
        else:
            data = load_node_data(self._site, text, place, newcomer)
        home, policy = self._site.home, self._site.policy
        sums = secure_sum.NodeSums(self._site.name, self._signer, home, policy.min_cohort)
        codec = compression.codec_of(data.experiment.deploy)
        joined = _JoinedRun(run, text, place, clients, newcomer, data, data, admitted, sums, codec)
        for label, digest in message.field("methods", dict).items():
            own = method_fingerprint(joined.method(label))
            if own != digest:
                raise Refused("method", f"{label}: the server's copy is {digest}, this one {own}")
            if joined.secure:
                secure_sum.refuse_unfit(label, joined.method(label))
        sizes = [
            [len(part[0]) for part in (held.train, held.val, held.test)]
            for held in data.federations
        ]
        spent: dict[str, float] = {}
        if newcomer:
            # It reports nothing but its scores: no statistics either.
            if data.seen is not None:
                raise Refused("newcomer", "statistics were asked for in a run that is over")
            limits.refuse_methods(policy, data.experiment)
            limits.refuse_seeds(policy, data.experiment)
            limits.refuse_scores(policy, sizes)
        elif (self._site.secure or policy.require_secure) and not joined.secure:
            raise Refused("open", "this site requires secure aggregation, and the run has none")
        else:
            spent = limits.refuse_run(policy, data.experiment, clients, sizes)
        promise = limits.promises(data.experiment, clients)
        asked = self._gate.asked(message, data.experiment.name, sizes[0][0], promise, spent)
        approved = self._gate.approved(message, asked, admitted)
        if not run.isascii() or not run.isalnum():
            raise Refused("format", "a run is named by letters and digits")
        traces = (home / "models" / run, *home.glob(f"state/*/*/{run}"))
        node_records.claim_run(home, run, message.field("submitter", str), *traces)
        division = protocol.digest(repr(data.experiment.data).encode())
        client = None if newcomer else data.client  # who reports nothing does no round twice
        self._releases.begin(run, data.experiment.seeds, division, spent, client)
        if data.seen is not None:
            self._refuse_difference(data)
        self._gate.opened(message, promise, approved)
        self._runs[run] = joined
        self._runs.move_to_end(run)
        while len(self._runs) > _RUNS:
            self._runs.popitem(last=False)
        log.info("opened run %s as client %d: %s", run, data.client, sizes)
        entry: dict[str, Any] = {
            "client": data.client,
            "name": data.federations[0].names[0],
            "clients": data.clients,
            "source": data.source,
            "descriptions": [h.description if data.source else "" for h in data.federations],
            "sizes": sizes,
            "least": [policy.min_sites, policy.min_cohort],
            "shown": policy.describe == "all",
            "form": ExampleForm.of(data.federations[0], data.task).plain(),
            "features": features_fingerprint(data.federations),
            "table": data.table,
        }
        if data.seen is None:
            each = [(held.dataset.shift, held.dataset.scale) for held in data.federations]
            names = ("shift", "scale")
        else:  # of training rows alone, which differ by seed
            each = [(own.mean, own.squares) for own in data.seen]
            names = ("mean", "squares")
            entry["count"] = [float(own.seen) for own in data.seen]
        stacked = (torch.tensor(np.stack(part)) for part in zip(*each, strict=True))
        return protocol.pack("yes", entry, dict(zip(names, stacked, strict=True)))

    def _refuse_difference(self, data: NodeData) -> None:
        """Refuse statistics whose difference from others that were told would tell of few rows."""
        self._releases.divide([held.train[0] for held in data.federations])
        told = disclosure.DescriptionLog(self._site.home, self._site.policy)
        for held in data.federations:
            told.refuse_difference(held.dataset, held.train[0])

    def _columns(self, message: Message, blob: bytes) -> bytes:
        """Tell sums of the table's columns, and of the target: for one encoder of all sites."""
        joined, data = self._run_of(message), self._run_of(message).data
        if joined.newcomer:
            raise Refused("newcomer", "statistics were asked for in a run that is over")
        if not (data.table or data.task.waiting) or data.source:
            raise Refused("columns", "this site's data is no table")
        self._refuse_difference(data)
        table = message.field("table", bool)
        sums = encoder_agreement.told_columns(data, table, self._site.policy.min_cell)
        plans = encoder_agreement.stated_plans(data) if table else []
        return protocol.pack("yes", {"plans": plans}, sums)

    def _agree(self, message: Message, blob: bytes) -> bytes:
        """Scale examples, encode tables and measure targets as all nodes do."""
        joined, leaves = self._run_of(message), dict(message.leaves)
        agreement = encoder_agreement.Agreement()
        if "agreed" in leaves:
            seeds = len(joined.data.federations)
            agreement = encoder_agreement.Agreement.read(leaves.pop("agreed"), seeds)
        if set(leaves) != {"shift", "scale"}:
            raise Refused("structure", f"expected shift and scale, got {sorted(leaves)}")
        protocol.refuse_nonfinite(leaves)
        classes = message.field("classes", list)
        if classes != list(joined.data.dataset.classes):
            raise Refused("classes", f"the federation's classes are {classes}")
        shift, scale = (leaves[name].to(torch.float32).numpy() for name in ("shift", "scale"))
        if len(shift) != len(joined.data.federations) or shift.shape != scale.shape:
            raise Refused("structure", f"expected a shift and a scale a seed, got {shift.shape}")
        data = joined.data.scaled(shift, scale)
        joined.data = data.agreed(agreement.encoders, agreement.tasks)
        if agreement.encoders and data.dataset.table is not None:
            for name in agreement.encoders[0].absent(data.dataset.table):
                log.warning("%sthis site has no column %r", disclosure.REMARK, name)
        joined.agreed = True
        joined.runtimes.clear()
        return protocol.pack("yes")

    def _describe(self, message: Message, blob: bytes) -> bytes:
        """Tell what the site allows of its columns, before any training."""
        admitted = self._gate.admit(message, "describe")
        approved = self._gate.approved(message, self._gate.asked(message), admitted)
        answer = disclosure.described(self._site, message, self._releases)
        self._gate.opened(message, {}, approved)
        return answer

    def _remark(self, message: Message, blob: bytes) -> bytes:
        """Show this site's people what is odd about their data beside the others'."""
        disclosure.log_remarks(log, message.head.get("remarks"))
        return protocol.pack("yes")

    def _close(self, message: Message, blob: bytes) -> bytes:
        """Forget a run that is over; its state and models stay on disk."""
        joined = self._run_of(message)
        del self._runs[joined.run]
        log.info("run %s is over", joined.run)
        return protocol.pack("yes")

    # Rounds.

    def _step(self, message: Message, blob: bytes) -> bytes:
        """Train; return the report, unless it stays here or leaves in a secure sum."""
        self._refuse_reporting(message)
        secure, bound = self._run_of(message).secure, message.bound()
        sample, rounds = message.sample(), self._runtime(message)[1].kept.round

        def train(runtime: ClientRuntime, sent: Sent, round: int) -> tuple[Tree, Tree]:
            train = runtime.step if runtime.prepared(rounds) else runtime.first
            report, personal = train(sent, round, sample)
            if secure:
                report = secure_sum.contribution(runtime.method, sent, report, bound)
            return report, personal

        answer = self._once(message, blob, train)
        heard = message.head.get("heard", True) is True  # else a bystander
        return answer if heard and not secure else _yes(message, ())

    def _meet(self, message: Message, blob: bytes) -> bytes:
        """Look at a state without training."""

        def meet(runtime: ClientRuntime, sent: Sent, round: int) -> tuple[Tree, Tree]:
            return (), runtime.meet(sent, round)

        return self._once(message, blob, meet)

    def _once(self, message: Message, blob: bytes, work: Work) -> bytes:
        """Change personal state once; the same message again gets the same answer."""
        runtime, state = self._runtime(message)
        round, request = message.field("round", int), protocol.digest(blob)
        kept = state.kept
        if kept.round == round + 1 and kept.request == request:
            log.info("round %d was answered before; the answer is repeated", round + 1)
            return _yes(message, kept.report)
        if kept.round == round + 1:
            raise Refused("conflict", f"round {round + 1} was done for another message")
        if kept.round > round:
            raise Refused("ahead", f"round {round + 1} is over; this node has done {kept.round}")
        sent = self._sent(runtime, message)
        report, personal = work(runtime, sent, round)
        _refuse_diverged(report, personal)
        joined, leaves, left = self._run_of(message), tree.named(report), kept.left
        if leaves:
            self._releases.count(joined.run, "reports")
            codec, deploy = joined.codec, joined.data.experiment.deploy
            if deploy.compress == "topk":
                codec = compression.TopK(deploy.keep, sent.shared, left)
            leaves = codec.encode({name: leaf.cpu() for name, leaf in leaves.items()})
            left = dict(codec.left) if isinstance(codec, compression.TopK) else left
        state.put(round + 1, request, personal, leaves, left)
        runtime.personal = personal
        log.info("round %d of %s is done", round + 1, message.head["label"])
        return _yes(message, leaves)

    # Secure sums.

    def _keys(self, message: Message, blob: bytes) -> bytes:
        """Begin a secure sum of a report or of the numbers of the final exchange."""
        joined, (_, state) = self._run_of(message), self._runtime(message)
        if not joined.secure:
            raise Refused("keys", "a secure sum in a run without deploy.secure")
        of = message.field("of", str)
        if of == "tell":
            if joined.reported is None or joined.reported.about != message.about():
                raise Refused("round", "this node has told nothing after that round")
            summand = secure_sum.summand(joined.reported.numbers)
        elif of == "step" and state.kept.round == message.field("round", int) + 1:
            summand = _report(state.kept.report)
        else:
            raise Refused("round", f"this node has done {state.kept.round} rounds")
        return _yes(message, (), keys=joined.sums.begin(message, summand))

    def _sum_stage(self, message: Message, blob: bytes) -> bytes:
        """Do the next stage of a secure sum."""
        content, fields = self._run_of(message).sums.stage(message)
        return _yes(message, content, **fields)

    # Final exchange and evaluation.

    def _tell(self, message: Message, blob: bytes) -> bytes:
        """Return a few numbers that are added up over nodes; in a secure run they follow later."""
        self._refuse_reporting(message)
        runtime, _ = self._runtime(message)
        if not has(runtime.method, FinalExchange):
            raise Refused("protocol", "this method tells nothing")
        numbers = self._reported(message, runtime, self._sent(runtime, message)).numbers
        if (count := sum(leaf.numel() for leaf in tree.leaves(numbers))) > MOST_EXCHANGED:
            raise Refused("structure", f"{count:,} numbers to tell, above {MOST_EXCHANGED:,}")
        return _yes(message, () if self._run_of(message).secure else numbers)

    def _reported(self, message: Message, runtime: ClientRuntime, sent: Sent) -> _Reported:
        """Return this node's part in the final exchange, computed once."""
        joined, now = self._run_of(message), message.about()
        known = joined.reported
        if known is None or known.about != now or not tree.equal(known.sent, sent):
            if message.kind == "tell":
                self._releases.count(joined.run, "told")
            known = joined.reported = _Reported(now, sent, *runtime.tell(sent, now[-1]))
        return known

    def _judge(self, message: Message, blob: bytes) -> bytes:
        """Score this node's models on its own data; the model stays here, the scores leave."""
        runtime, state = self._runtime(message)
        joined, (label, seed, round) = self._run_of(message), message.about()
        flags = [flag for flag in _FLAGS if message.field(flag, bool)]
        if has(runtime.method, Privacy) and not state.kept.round and "only_global" not in flags:
            flags = [*dict.fromkeys((*flags, "newcomers"))]  # the server does not know who came
        tested, sent = message.field("tested", bool), self._sent(runtime, message)
        self._releases.count(joined.run, "scores")
        others, deployed = self._others(message, runtime, sent)
        marks, facts, kept = runtime.evaluate(
            sent,
            round,
            tested=tested,
            flags=flags,
            others=others,
            deployed=deployed,
            sample=message.sample(),
            choice=joined.choice if message.head.get("measured") is True else None,
            detail=message.head.get("detail") is True,
        )
        if "keep" in flags:
            numbers = tree.map(lambda leaf: leaf.cpu().numpy(), facts)
            reason = capabilities.reason(runtime.method, numbers)
            if reason:
                log.info("%s, seed %d, chose: %s", label, seed, reason)
            client, newcomer = joined.data.client, joined.newcomer
            info = ModelInfo(joined.run, label, seed, round, client, joined.text, newcomer, reason)
            held, home = joined.data.of_seed(seed), self._site.home
            found = {
                "client": {
                    **{part: len(getattr(held, part)[0]) for part in ("train", "test")},
                    **tree.map(lambda leaf: float(leaf) if leaf.dim() == 0 else None, marks),
                },
                "privacy": has(runtime.method, Privacy) and "see the server's result",
            }
            personal_models.save_personal_model(
                home, info, held, joined.clients, kept, document.plain(found), self._site.options
            )
        return _yes(message, {"marks": marks, "facts": facts})

    def _others(
        self, message: Message, runtime: ClientRuntime, sent: Sent
    ) -> tuple[Sums | None, Tree]:
        """Return the others' sums, if the server sent some, and the model without them."""
        if "sums" not in message.head:
            return None, ()
        sums = _read_sums(message.head["sums"])
        if message.field("newcomers", bool):  # it reported nothing, so the sums are of others
            return sums, ()
        reported = self._reported(message, runtime, sent)
        if message.field("counted", bool):
            rows = tree.map(lambda leaf: leaf.unsqueeze(0).cpu(), reported.numbers)
            form = {name: leaf.shape for name, leaf in tree.named(reported.numbers).items()}
            if {name: leaf.shape for name, leaf in sums.items()} != form:
                raise Refused("structure", f"expected sums of {', '.join(form)}")
            sums = {name: leaf[0] for name, leaf in without(sums, rows).items()}
        return sums, reported.deployed

    # Parts.

    @property
    def _releases(self) -> ReleaseLog:
        """What has left this site so far; read when it is first needed."""
        if self._released is None:
            self._released = ReleaseLog(self._site.home, self._site.policy)
        return self._released

    def _refuse_reporting(self, message: Message) -> None:
        """Refuse to report where nothing but scores may leave, and after too many rounds."""
        joined, (label, _, round) = self._run_of(message), message.about()
        if joined.newcomer:
            raise Refused("newcomer", "a report was asked for in a run that is over")
        most = min(self._site.policy.max_rounds, joined.rounds(label))
        if round >= most + (message.kind == "tell"):  # which comes after the last round
            raise Refused("max_rounds", f"round {round + 1} of at most {most}")

    def _run_of(self, message: Message) -> _JoinedRun:
        """Return the joined run that a message is about."""
        run = message.head.get("run")
        if not isinstance(run, str) or run not in self._runs:
            raise Refused("closed", "a message of an experiment this process has not joined")
        self._gate.refuse_withdrawn(message, run, self._runs[run].admitted)
        self._runs.move_to_end(run)
        return self._runs[run]

    @property
    def _joined(self) -> _JoinedRun:
        """The run that was asked for last."""
        return next(reversed(self._runs.values()))

    def _runtime(self, message: Message) -> tuple[ClientRuntime, PersonalState]:
        """Return the client runtime of a method and seed, with its state from disk."""
        joined = self._run_of(message)
        if not joined.agreed:
            raise Refused("closed", "a task before the scaling was agreed on")
        label, seed = message.field("label", str), message.field("seed", int)
        if (label, seed) not in joined.runtimes:
            if any(other != label for other, _ in joined.runtimes):
                joined.runtimes.clear()  # one method at a time is kept in memory
            joined.runtimes[label, seed] = self._made_runtime(joined, label, seed)
        return joined.runtimes[label, seed]

    def _made_runtime(
        self, joined: _JoinedRun, label: str, seed: int
    ) -> tuple[ClientRuntime, PersonalState]:
        data, site, method = joined.data, self._site, joined.method(label)
        held = data.of_seed(seed)
        shape, classes = tuple(held.dataset.x.shape[1:]), len(held.dataset.classes)
        bound = assign_networks(
            data.experiment,
            shape,
            classes,
            joined.clients,
            held.dataset.words,
            reach=site.reach,
            blocks=held.dataset.embedded,
        )
        runtime = ClientRuntime(
            method,
            ClientIdentity(data.client, joined.clients, seed, joined.newcomer),
            held.train_data,
            held.test[0],
            next(a for a in bound.values() if a.clients is None or data.client in a.clients),
            self._device,
            # Refuses, when it is asked for, a training that would reveal too few rows.
            None
            if method.alone
            else lambda request, rows: limits.refuse_training(site.policy, request, rows),
            # A share of a dataset that anyone can have is trained on as a simulation does.
            least_rows=0
            if site.policy.short_batches or site.client is not None
            else site.policy.min_batch,
        )
        owner = StateOwner(site.federation, data.client, joined.run, label, seed)
        state = PersonalState(site.home, owner, runtime.personal)
        runtime.personal = state.kept.personal
        return runtime, state

    def _sent(self, runtime: ClientRuntime, message: Message) -> Sent:
        """Check the server's message against what this method's servers send."""
        guest = message.kind == "judge" and message.field("newcomers", bool)
        form = runtime.guest_form if guest else runtime.form
        sent: Sent = protocol.fitted(form, message.leaves, self._run_of(message).codec)
        protocol.refuse_nonfinite(sent, form)
        return sent


def reason_of(error: BaseException) -> str:
    """Return the code that the other side gets for an error."""
    if isinstance(error, Refused):
        return error.reason
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error):
        return "memory"
    if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
        return "data" if isinstance(error, DataError) else "disk"
    kinds: dict[type[IdiolectError], str] = {
        DataError: "data",
        node_records.NotOwner: "owner",
        ModelError: "model",
        Diverged: "diverged",
        CheckpointError: "state",
        ConfigError: "experiment",
        IdiolectError: "experiment",
    }
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), "failed")


def _yes(message: Message, content: Tree, **fields: Any) -> bytes:
    """Pack an answer that names its question."""
    echo = {key: message.head[key] for key in ("run", "label", "seed", "round")}
    return protocol.pack("yes", {**echo, "to": message.kind, **fields}, content)


def _report(named: dict[str, torch.Tensor]) -> Report:
    """Return a kept report; a method that reports a mean has these two parts."""
    params = {name: leaf for name, leaf in named.items() if name != "size"}
    if "size" not in named or not all(name.startswith("params") for name in params):
        raise Refused("structure", "a report without parameters and size cannot be summed")
    return Report(params, named["size"])


def _read_sums(plain: Any) -> Sums:
    try:
        sums = {str(name): torch.tensor(own, dtype=torch.float64) for name, own in plain.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise Refused("format", "sums that are no numbers") from error
    protocol.refuse_nonfinite(sums)
    return sums


def _refuse_diverged(report: Tree, personal: Tree) -> None:
    """Refuse NaN, keeping the old state; infinity may stand for "not yet" at a client."""
    broken = any(not bool(torch.isfinite(leaf).all()) for leaf in tree.leaves(report))
    broken |= any(bool(torch.isnan(leaf).any()) for leaf in tree.leaves(personal))
    if broken:
        raise Refused("diverged", "training produced NaN or infinity; lower lr or set clip")
