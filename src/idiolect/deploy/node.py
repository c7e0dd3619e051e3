"""One node: answers the hub's messages with its own data, and keeps its personal state.

Only answers leave: yes with the trees a method reports or with scores, or no with one word. What
went wrong in detail is in the node's own log.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.core import capabilities, tree
from idiolect.core.batches import Request
from idiolect.core.capabilities import FinalExchange, Privacy, has
from idiolect.core.method import Report, Sent
from idiolect.core.tree import Tree
from idiolect.deploy import (
    compression,
    handshake,
    limits,
    node_records,
    personal_models,
    protocol,
    secure_aggregation,
    secure_sum,
    server,
)
from idiolect.deploy.data_summary import ExampleForm
from idiolect.deploy.node_records import PersonalState, StateOwner, SumLog, report_digest
from idiolect.deploy.protocol import (
    Message,
    Refused,
    bound_of,
    method_seed_round,
    names_in,
    read_field,
    read_shares,
    sample_of,
    sum_id,
    write_shares,
)
from idiolect.deploy.site import NodeData, Site, load_node_data
from idiolect.engine.backend import Backend
from idiolect.engine.deployment_runtime import ClientIdentity, ClientRuntime
from idiolect.engine.final_exchange import Sums
from idiolect.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Diverged,
    IdiolectError,
    ModelError,
)
from idiolect.experiment.components import assign_networks
from idiolect.experiment.components import build_method as made_method
from idiolect.version import VERSION

log = logging.getLogger("idiolect.node")

_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch has no class of its own for it
_FLAGS = ("only_global", "keep", "newcomers")


class _Spoken(NamedTuple):
    """What a node told the others, and what it would use if it heard nothing of them."""

    about: tuple[str, int, int]  # label, seed, round
    sent: Sent  # with which it came to that
    told: Tree
    deployed: Tree


class _Sum(NamedTuple):
    """A secure sum, this node's part in it, and the record of what it gave to sums."""

    participant: secure_aggregation.Participant
    report: Report
    digest: str
    log: SumLog


@dataclass(eq=False)
class _Opened:
    """An experiment a node has joined."""

    run: str
    text: str
    clients: int
    newcomer: bool  # the run is over: adapt to what is there
    holding: NodeData
    agreed: bool = False
    desks: dict[tuple[str, int], tuple[ClientRuntime, PersonalState]] = field(default_factory=dict)
    sum: _Sum | None = None  # the secure sum at hand
    log: SumLog | None = None  # which reports were in sums, of this run and of others
    spoken: "_Spoken | None" = None  # what was told last

    @property
    def secure(self) -> bool:
        """Whether reports leave under masks only."""
        return self.holding.experiment.deploy.secure


class Node:
    """Whoever holds one client's data."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._opened: _Opened | None = None
        # Without a kit (within a process, or `--on local`) keys of secure sums are not signed.
        self._signer = None if site.kit is None else secure_aggregation.KitSigner.of(site.kit)
        self._released: node_records.ReleaseLog | None = None
        self._device = Backend(device=site.device).place

    def answer(self, blob: bytes) -> bytes:
        """Answer one message; never raises, and never tells more than a code."""
        try:
            message = protocol.unpack(blob, self._site.limit)
            handle: Callable[[Message, bytes], bytes] | None = {
                "open": self._open,
                "agree": self._agree,
                "step": self._step,
                "meet": self._meet,
                "keys": self._keys,
                "shares": self._shares,
                "mask": self._mask,
                "confirm": self._confirm,
                "unmask": self._unmask,
                "tell": self._tell,
                "judge": self._judge,
            }.get(message.kind)
            if handle is None:
                raise Refused("protocol", f"unknown kind of message {message.kind!r}")
            return handle(message, blob)
        except BaseException as error:
            reason = reason_of(error)
            log.error("refused with %r: %s", reason, error, exc_info=reason == "failed")
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return protocol.refusal(reason)

    # Joining.

    def _open(self, message: Message, blob: bytes) -> bytes:
        """Compare versions and methods, read the data, and tell its size and form."""
        head = message.head
        if read_field(head, "version", str) != VERSION:
            raise Refused("version", f"the hub runs {head['version']}, this node {VERSION}")
        text, place = read_field(head, "experiment", str), read_field(head, "place", int)
        newcomer = read_field(head, "newcomer", bool)
        holding = load_node_data(self._site, text, place, newcomer)
        for label, digest in read_field(head, "methods", dict).items():
            own = handshake.method_fingerprint(_method(holding, label))
            if own != digest:
                raise Refused("method", f"{label}: the hub's copy is {digest}, this one {own}")
            if holding.experiment.deploy.secure:
                secure_sum.refuse_unfit(label, _method(holding, label))
        policy, clients = self._site.policy, read_field(head, "clients", int)
        sizes = [
            [len(part[0]) for part in (held.train, held.val, held.test)]
            for held in holding.federations
        ]
        spent: dict[str, float] = {}
        if newcomer:
            # It reports nothing but its scores: no statistics either.
            if holding.seen is not None:
                raise Refused("newcomer", "statistics were asked for in a run that is over")
            limits.refuse_seeds(policy, holding.experiment)
            limits.refuse_scores(policy, sizes)
        elif self._secured and not holding.experiment.deploy.secure:
            raise Refused("open", "this site requires secure aggregation, and the run has none")
        else:
            spent = limits.refuse_run(policy, holding.experiment, clients, sizes)
        run = read_field(head, "run", str)
        self._claim(run, read_field(head, "submitter", str))
        division = protocol.digest(repr(holding.experiment.data).encode())
        self._releases.begin(run, holding.experiment.seeds, division, spent)
        if holding.seen is not None:
            self._releases.divide([held.train[0] for held in holding.federations])
        self._opened = _Opened(run, text, clients, newcomer, holding)
        told: dict[str, Any] = {
            "client": holding.client,
            "name": holding.federations[0].names[0],
            "clients": holding.clients,
            "source": holding.source,
            "descriptions": [h.description if holding.source else "" for h in holding.federations],
            "sizes": sizes,
            "least": [policy.min_sites, policy.min_cohort],
            "form": ExampleForm.of(holding.federations[0]).plain(),
            "features": handshake.features_fingerprint(holding.federations),
        }
        log.info("opened run %s as client %d: %s", run, holding.client, told["sizes"])
        if holding.seen is None:
            each = [held.dataset for held in holding.federations]
            scaling = {
                "shift": np.stack([own.shift for own in each]),
                "scale": np.stack([own.scale for own in each]),
            }
        else:  # of training rows alone, which differ by seed
            scaling = {
                "mean": np.stack([own.mean for own in holding.seen]),
                "squares": np.stack([own.squares for own in holding.seen]),
            }
            told["count"] = [float(own.seen) for own in holding.seen]
        return protocol.pack("yes", told, {k: torch.tensor(v) for k, v in scaling.items()})

    def _claim(self, run: str, submitter: str) -> None:
        """Refuse a run of which this node holds state for another submitter."""
        if not run.isascii() or not run.isalnum():
            raise Refused("format", "a run is named by letters and digits")
        home = self._site.home
        traces = (home / "models" / run, *home.glob(f"state/*/*/{run}"))
        node_records.claim_run(home, run, submitter, *traces)

    def _agree(self, message: Message, blob: bytes) -> bytes:
        """Scale examples as all nodes do."""
        opened = self._of(message)
        leaves = message.leaves
        if set(leaves) != {"shift", "scale"}:
            raise Refused("structure", f"expected shift and scale, got {sorted(leaves)}")
        protocol.refuse_nonfinite(leaves)
        classes = read_field(message.head, "classes", list)
        if classes != list(opened.holding.dataset.classes):
            raise Refused("classes", f"the federation's classes are {classes}")
        shift, scale = (leaves[name].to(torch.float32).numpy() for name in ("shift", "scale"))
        if len(shift) != len(opened.holding.federations) or shift.shape != scale.shape:
            raise Refused("structure", f"expected a shift and a scale a seed, got {shift.shape}")
        opened.holding = opened.holding.scaled(shift, scale)
        opened.agreed = True
        opened.desks.clear()
        return protocol.pack("yes")

    # Working.

    def _step(self, message: Message, blob: bytes) -> bytes:
        self._refuse_reporting(message)
        _, drawer = self._desk(message)
        rounds = drawer.kept.round

        secure, bound = self._of(message).secure, bound_of(message)
        sample = sample_of(message)

        def work(alone: ClientRuntime, sent: Sent, round: int) -> tuple[Tree, Tree]:
            work = alone.step if alone.prepared(rounds) else alone.first
            done = work(sent, round, sample)
            if not secure:
                return done
            return secure_sum.contribution(alone.method, sent, done[0], bound), done[1]

        answer = self._once(message, blob, work)
        # A bystander's report stays here; one under masks leaves when all keys are known.
        heard = message.head.get("heard", True) is True
        return answer if heard and not secure else _yes(message, ())

    def _meet(self, message: Message, blob: bytes) -> bytes:
        return self._once(message, blob, lambda alone, sent, round: ((), alone.meet(sent, round)))

    def _once(
        self,
        message: Message,
        blob: bytes,
        work: Callable[[ClientRuntime, Sent, int], tuple[Tree, Tree]],
    ) -> bytes:
        """Do what changes personal state, once; the same message again gets the same answer."""
        alone, drawer = self._desk(message)
        round, request = read_field(message.head, "round", int), protocol.digest(blob)
        kept = drawer.kept
        if kept.round == round + 1 and kept.request == request:
            log.info("round %d was answered before; the answer is repeated", round + 1)
            return _yes(message, kept.report)
        if kept.round == round + 1:
            raise Refused("conflict", f"round {round + 1} was done for another message")
        if kept.round > round:
            raise Refused("round", f"round {round + 1} is over; this node has done {kept.round}")
        sent = self._sent(alone, message)
        report, personal = work(alone, sent, round)
        _refuse_diverged(report, personal)
        if tree.leaves(report):
            self._releases.count(self._of(message).run, "reports")
        told, left = tree.named(report), kept.left
        if told:
            codec = compression.up(self._of(message).holding.experiment.deploy, sent, left)
            told = codec.encode({name: leaf.cpu() for name, leaf in told.items()})
            left = dict(codec.left) if isinstance(codec, compression.TopK) else left
        drawer.put(round + 1, request, personal, told, left)
        alone.personal = personal
        log.info("round %d of %s is done", round + 1, message.head["label"])
        return _yes(message, told)

    def _keys(self, message: Message, blob: bytes) -> bytes:
        """Begin a secure sum of the round's report: publish keys for it."""
        opened, context = self._of(message), sum_id(message)
        opened.sum = None
        report = self._summand(message)
        # The same numbers, however many nodes there will be.
        named = report_digest(secure_sum.fixed(report, secure_aggregation.FEWEST))
        if opened.log is None:
            opened.log = SumLog(self._site.home / "sums.log")
        opened.log.check(named)
        participant = secure_aggregation.Participant(context, self._site.name, self._signer)
        opened.sum = _Sum(participant, report, named, opened.log)
        return _yes(message, (), keys=list(participant.keys()))

    def _shares(self, message: Message, blob: bytes) -> bytes:
        """Share the secrets of this node's masks among the members of the sum."""
        at = self._sum(message)
        plain = read_field(message.head, "members", dict)
        members = {name: secure_aggregation.Keys.read(keys) for name, keys in plain.items()}
        self._refuse_lonely(len(members))
        at.log.check(at.digest, members)
        boxes = at.participant.shares(members)
        return _yes(message, write_shares(sorted(members), boxes, secure_aggregation.BOX))

    def _mask(self, message: Message, blob: bytes) -> bytes:
        """Send the report under masks, in one sum only."""
        at, sharing = self._sum(message), names_in(message, "sharing")
        at.log.check(at.digest, sharing)
        boxes = read_shares(message, sharing, secure_aggregation.BOX)
        boxes.pop(self._site.name, None)
        hidden = at.participant.masked(secure_sum.fixed(at.report, len(sharing)), boxes)
        at.log.masked(at.digest)
        return _yes(message, {"masked": torch.from_numpy(hidden.view("int64"))})

    def _confirm(self, message: Message, blob: bytes) -> bytes:
        """Sign whose reports the sum is of, so that the others see that all were told the same."""
        at, survivors = self._sum(message), names_in(message, "survivors")
        self._refuse_lonely(len(survivors))
        signature = at.participant.confirm(survivors)
        at.log.survived(at.digest, survivors)
        return _yes(message, (), signature=signature)

    def _unmask(self, message: Message, blob: bytes) -> bytes:
        """Reveal what takes the masks off the sum of the survivors, and off no other."""
        at, survivors = self._sum(message), names_in(message, "survivors")
        signatures = message.head.get("signatures", {})
        if not isinstance(signatures, dict) or not all(
            isinstance(one, str) for one in signatures.values()
        ):
            raise Refused("format", "signatures of another form")
        self._refuse_lonely(len(survivors))
        shares = at.participant.unmask(survivors, signatures)
        at.log.survived(at.digest, survivors)
        self._of(message).sum = None
        return _yes(message, write_shares(sorted(shares), shares, secure_aggregation.SHARE))

    def _sum(self, message: Message) -> "_Sum":
        """Return the sum that a message is about."""
        at = self._of(message).sum
        if at is None or at.participant.context != sum_id(message):
            raise Refused("keys", "a message of a sum that this node has no part in")
        return at

    def _summand(self, message: Message) -> Report:
        """Return what this node adds to the sum that a message is about."""
        opened = self._of(message)
        _, drawer = self._desk(message)
        if not opened.secure:
            raise Refused("keys", "a secure sum in a run without deploy.secure")
        of = read_field(message.head, "of", str)
        if of == "tell":
            spoken = opened.spoken
            if spoken is None or spoken.about != method_seed_round(message):
                raise Refused("round", "this node has told nothing after that round")
            return server.summand(spoken.told)
        if of != "step" or drawer.kept.round != read_field(message.head, "round", int) + 1:
            raise Refused("round", f"this node has done {drawer.kept.round} rounds")
        return _report(drawer.kept.report)

    def _tell(self, message: Message, blob: bytes) -> bytes:
        """Tell a few numbers that are added up over nodes; under masks they follow later."""
        self._refuse_reporting(message)
        alone, _ = self._desk(message)
        if not has(alone.method, FinalExchange):
            raise Refused("protocol", "this method tells nothing")
        told = self._spoken(message, alone, self._sent(alone, message)).told
        if (count := sum(leaf.numel() for leaf in tree.leaves(told))) > server.MOST_EXCHANGED:
            raise Refused(
                "structure", f"{count:,} numbers to tell, above {server.MOST_EXCHANGED:,}"
            )
        return _yes(message, () if self._of(message).secure else told)

    def _spoken(self, message: Message, alone: ClientRuntime, sent: Sent) -> _Spoken:
        """Settle what to use by itself, or remember that."""
        opened, now = self._of(message), method_seed_round(message)
        known = opened.spoken
        if known is None or known.about != now or not tree.equal(known.sent, sent):
            if message.kind == "tell":
                self._releases.count(opened.run, "told")
            known = _Spoken(now, sent, *alone.tell(sent, now[-1]))
            opened.spoken = known
        return known

    def _judge(self, message: Message, blob: bytes) -> bytes:
        """Score this node's models on its own data; the model stays here, the scores leave."""
        alone, drawer = self._desk(message)
        opened, head = self._of(message), message.head
        flags = [flag for flag in _FLAGS if read_field(head, flag, bool)]
        if has(alone.method, Privacy) and not drawer.kept.round and "only_global" not in flags:
            flags = [*dict.fromkeys((*flags, "newcomers"))]  # the hub does not know who came
        round, tested = read_field(head, "round", int), read_field(head, "tested", bool)
        sent = self._sent(alone, message)
        self._releases.count(opened.run, "scores")
        others, deployed = self._others(message, alone, sent)
        marks, facts, kept = alone.judge(
            sent,
            round,
            tested=tested,
            flags=flags,
            others=others,
            deployed=deployed,
            sample=sample_of(message),
        )
        if "keep" in flags:
            reason = capabilities.reason(
                alone.method, tree.map(lambda leaf: leaf.cpu().numpy(), facts)
            )
            if reason:
                log.info("%s, seed %d, chose: %s", head["label"], head["seed"], reason)
            about = personal_models.ModelInfo(
                opened.run,
                head["label"],
                head["seed"],
                round,
                opened.holding.client,
                opened.text,
                opened.newcomer,
                reason,
            )
            held = opened.holding.federations[opened.holding.experiment.seeds.index(head["seed"])]
            personal_models.save_personal_model(self._site.home, about, held, opened.clients, kept)
        return _yes(message, {"marks": marks, "facts": facts})

    def _others(
        self, message: Message, alone: ClientRuntime, sent: Sent
    ) -> tuple[Sums | None, Tree]:
        """Return what the others told, if the hub says, and what this node would use without."""
        if "sums" not in message.head:
            return None, ()
        sums = server.read_sums(message.head["sums"])
        if read_field(
            message.head, "newcomers", bool
        ):  # it told nothing, so nothing of it is in there
            return sums, ()
        spoken = self._spoken(message, alone, sent)
        if read_field(message.head, "counted", bool):
            sums = server.sums_of_others(sums, spoken.told)
        return sums, spoken.deployed

    # Limits.

    @property
    def _secured(self) -> bool:
        return self._site.secure or self._site.policy.require_secure

    @property
    def _releases(self) -> node_records.ReleaseLog:
        """What has left this site so far; read when it is first needed."""
        if self._released is None:
            self._released = node_records.ReleaseLog(self._site.home, self._site.policy)
        return self._released

    def _refuse_reporting(self, message: Message) -> None:
        """Refuse to report where nothing but scores may leave, and after too many rounds."""
        if self._of(message).newcomer:
            raise Refused("newcomer", "a report was asked for in a run that is over")
        round, most = read_field(message.head, "round", int), self._site.policy.max_rounds
        if round >= most + (message.kind == "tell"):  # which comes after the last round
            raise Refused("max_rounds", f"round {round + 1}; max_rounds is {most}")

    def _refuse_lonely(self, members: int) -> None:
        """Refuse a part in a sum of too few sites: here the members are known by their keys."""
        if members < self._site.policy.min_cohort:
            least = self._site.policy.min_cohort
            raise Refused("min_cohort", f"a sum over {members} sites; min_cohort is {least}")

    def _look(self, request: Request, held: int) -> None:
        """Refuse, as it is asked for, a training that would show too few rows."""
        limits.refuse_training(self._site.policy, request, held)

    # Parts.

    def _of(self, message: Message) -> _Opened:
        """Return the joined experiment that a message is about."""
        if self._opened is None or message.head.get("run") != self._opened.run:
            raise Refused("closed", "a message of an experiment this process has not joined")
        return self._opened

    def _desk(self, message: Message) -> tuple[ClientRuntime, PersonalState]:
        """Return where a method's work of one seed is done, with its state from disk."""
        opened, head = self._of(message), message.head
        if not opened.agreed:
            raise Refused("closed", "a task before the scaling was agreed on")
        label, seed = read_field(head, "label", str), read_field(head, "seed", int)
        key = (label, seed)
        if key not in opened.desks:
            if any(other != label for other, _ in opened.desks):
                opened.desks.clear()  # one method at a time is kept in memory
            opened.desks[key] = self._made(opened, label, seed)
        return opened.desks[key]

    def _made(self, opened: _Opened, label: str, seed: int) -> tuple[ClientRuntime, PersonalState]:
        holding = opened.holding
        seeds = holding.experiment.seeds
        if seed not in seeds:
            raise Refused("experiment", f"seed {seed} is none of the experiment's {seeds}")
        held = holding.federations[seeds.index(seed)]
        shape, classes = tuple(held.dataset.x.shape[1:]), len(held.dataset.classes)
        words, reach = held.dataset.words, self._site.reach
        bound = assign_networks(
            holding.experiment, shape, classes, opened.clients, words, reach=reach
        )
        architecture = next(
            own for own in bound.values() if own.clients is None or holding.client in own.clients
        )
        place = ClientIdentity(holding.client, opened.clients, seed, opened.newcomer)
        method = _method(holding, label)
        alone = ClientRuntime(
            method,
            place,
            held.train_data,
            held.test[0],
            architecture,
            self._device,
            look=None if method.alone else self._look,
            # A share of a dataset that anyone can have is trained on as a simulation does.
            short_batches=self._site.policy.short_batches or self._site.client is not None,
        )
        owner = StateOwner(self._site.federation, holding.client, opened.run, label, seed)
        drawer = PersonalState(self._site.home, owner, alone.personal)
        alone.personal = drawer.kept.personal
        return alone, drawer

    def _sent(self, alone: ClientRuntime, message: Message) -> Sent:
        """Check what the hub sent against what this method's servers send."""
        codec = compression.down(self._of(message).holding.experiment.deploy)
        guest = message.kind == "judge" and read_field(message.head, "newcomers", bool)
        form = alone.guest_form if guest else alone.form
        sent: Sent = protocol.fitted(form, message.leaves, codec)
        protocol.refuse_nonfinite(sent, form)
        return sent


def reason_of(error: BaseException) -> str:
    """Choose the one word that the other side is told."""
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
    return next((word for kind, word in kinds.items() if isinstance(error, kind)), "failed")


def _yes(message: Message, content: Tree, **told: Any) -> bytes:
    """Answer, saying to what."""
    echo = {key: message.head[key] for key in ("run", "label", "seed", "round")}
    return protocol.pack("yes", {**echo, "to": message.kind, **told}, content)


def _report(named: dict[str, torch.Tensor]) -> Report:
    """Take a kept report by its names; a method that reports a mean has these two parts."""
    params = {name: leaf for name, leaf in named.items() if name != "size"}
    if "size" not in named or not all(name.startswith("params") for name in params):
        raise Refused("structure", "a report without parameters and size cannot be summed")
    return Report(params, named["size"])


def _method(holding: NodeData, label: str) -> Any:
    for table in holding.experiment.methods:
        if (table.label or table.name) == label:
            return made_method(table)
    raise Refused("experiment", f"the experiment has no method {label!r}")


def _refuse_diverged(report: Tree, personal: Tree) -> None:
    """Keep rubbish here, and the state as it was; infinity may stand for "not yet" at a client."""
    broken = any(not bool(torch.isfinite(leaf).all()) for leaf in tree.leaves(report))
    broken |= any(bool(torch.isnan(leaf).any()) for leaf in tree.leaves(personal))
    if broken:
        raise Refused("diverged", "training produced NaN or infinity; lower lr or set clip")
