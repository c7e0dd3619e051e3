"""What nodes tell each other by way of the hub when training is over: on the wire, and in sum."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.core import capabilities, tree
from idiolect.core.capabilities import ArchitectureState, FinalExchange, Privacy, Tampering, has
from idiolect.core.method import Method, Report, Sent
from idiolect.core.tree import Tree
from idiolect.data import Dataset
from idiolect.data.federation import TestData
from idiolect.deploy import compression, protocol, secure_sum
from idiolect.deploy.handshake import NodeRegistry, RunSummary
from idiolect.deploy.message_templates import MessageTemplates
from idiolect.deploy.messenger import Answer, Messenger
from idiolect.deploy.protocol import CODES, POLICY_LIMITS, Message, Refused
from idiolect.deploy.secure_aggregation import FEWEST
from idiolect.deploy.secure_sum import SumFailed, run_secure_sum
from idiolect.engine import sampling, server_update
from idiolect.engine.architecture import Architecture, blank, refuse_unequal_states
from idiolect.engine.deployment_runtime import ServerRuntime
from idiolect.engine.evaluation import ClientScores, mixed
from idiolect.engine.final_exchange import Sums, added, fair, without
from idiolect.engine.rounds import Round
from idiolect.engine.server_update import Traffic, refuse_unequal
from idiolect.errors import ConfigError, DataError, DeployError, MethodError
from idiolect.experiment.schema import Deployment

MOST_EXCHANGED = 100_000  # numbers; sums cross as text in a message's head, which has a limit


class ExchangedSums(NamedTuple):
    """What nodes are to hear: a sum, whose numbers are in it, and what crossed for it."""

    sums: Sums
    counted: frozenset[int] = frozenset()
    traffic: Traffic = Traffic(0, 0, 0)

    @property
    def plain(self) -> dict[str, Any]:
        """The sums as JSON has them, to the last digit; compression would round them."""
        return {"sums": {name: leaf.tolist() for name, leaf in self.sums.items()}}


def sums_of_messages(found: Mapping[int, Tree], up: int) -> ExchangedSums | None:
    """Add up what nodes told."""
    if not found:
        return None
    present = sorted(found)
    sums = added(tree.stack([found[client] for client in present]))
    return ExchangedSums(sums, frozenset(present), _traffic(sums, len(present), (0, up)))


def sums_of_secure_sum(
    present: Sequence[int], mean: Report, up: int, more: Sequence[int]
) -> ExchangedSums:
    """Read the same out of a sum under masks."""
    sums = {name: leaf * mean.size for name, leaf in tree.named(mean.params).items()}
    crossed = (more[0], up + more[1])
    return ExchangedSums(sums, frozenset(present), _traffic(sums, len(present), crossed))


def _traffic(sums: Sums, nodes: int, more: Sequence[int]) -> Traffic:
    # Models that are sent to be scored are not counted, here or in a simulation.
    return Traffic(0, nodes * tree.nbytes(dict(sums)) + more[0], more[1])


def summand(told: Tree) -> Report:
    """Make of what a node tells what it adds to a sum under masks; nothing if it is not fair."""
    rows = tree.map(lambda leaf: leaf.unsqueeze(0), told)
    named = {name: leaf.double() for name, leaf in tree.named(told).items()}
    if not bool(fair(rows)):
        named = tree.zeros_like(named)
    return Report(named, torch.ones((), dtype=torch.float64))


def read_sums(plain: Any) -> Sums:
    """Read sums as the hub wrote them."""
    try:
        sums = {str(name): torch.tensor(own, dtype=torch.float64) for name, own in plain.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise Refused("format", "sums that are no numbers") from error
    protocol.refuse_nonfinite(sums)
    return sums


def sums_of_others(sums: Sums, told: Tree) -> Sums:
    """Take a node's own numbers off sums that have them."""
    rows = tree.map(lambda leaf: leaf.unsqueeze(0).cpu(), told)
    form = {name: leaf.shape for name, leaf in tree.named(told).items()}
    if {name: leaf.shape for name, leaf in sums.items()} != form:
        raise Refused("structure", f"expected sums of {', '.join(form)}, of what this node told")
    return {name: leaf[0] for name, leaf in without(sums, rows).items()}


_CPU = torch.device("cpu")


def apply_reports(method: Method, state: Tree, present: Sequence[int], reports: Tree) -> Tree:
    """Take the server's step with reports of those present, guarded as the simulation's is."""
    cohort = torch.tensor(present)
    arrived = reports
    if has(method, Tampering):
        arrived = method.arrive(state, cohort, reports)
    bad = server_update.rows_to_leave_out(arrived, None, len(cohort), _CPU)
    return server_update.guarded_server_step(method, state, cohort, arrived, bad)


def apply_sum(method: Method, state: Tree, present: Sequence[int], mean: Report) -> Tree:
    """Take the server's step with what a sum told: its mean, as one client's report."""
    rule = secure_sum.rule_of(method)
    if rule is None:
        return apply_reports(method, state, present[:1], tree.stack([mean]))
    total = tree.scale(float(len(present)), mean.params)
    return rule.sum_step(state, torch.tensor(present), total)


def apply_reports_by_architecture(
    method: Method,
    state: Tree,
    present: Sequence[int],
    reports: Sequence[Tree],
    servings: Sequence[ServerRuntime],
    kinds: Sequence[int],
    round: int,
    sample: int | None = None,
) -> Tree:
    """Let the server read reports with its own examples, join each architecture's, and train.

    Reports may differ in form from architecture to architecture; what is read in them does not.
    `sample` is the number of the public sample. Without a report that can be used nothing is joined
    or trained.
    """
    pairs = zip(kinds, reports, strict=True)
    read = [servings[kind].read(report, round, sample) for kind, report in pairs]
    refuse_unequal([tree.stack([one]) for one in read])
    new = apply_reports(method, state, present, tree.stack(read))
    good = (~server_update.rows_to_leave_out(tree.stack(read), None, len(read), _CPU)).tolist()
    for place, serving in enumerate(servings if any(good) else ()):
        rows = zip(kinds, reports, good, strict=True)
        own = [one for kind, one, fine in rows if kind == place and fine]
        if own:
            serving.join(tree.stack(own))
        serving.fuse(new, round, sample)
    return new


log = logging.getLogger("idiolect.hub")
_IN_A_ROW = 3  # rounds that may be given up one after the other
_NONE: Mapping[str, bool] = MappingProxyType({})


class RestartNeeded(DeployError):
    """The run should be started anew from its checkpoint: a node that was lost is back."""


class FederationServer:
    """One method on all seeds, its clients being nodes."""

    def __init__(
        self,
        label: str,
        method: Method,
        seeds: Sequence[int],
        run: str,
        post: Messenger,
        roster: NodeRegistry,
        architectures: Mapping[str, Architecture],
        cohort: int | None,
        draw: str,
        deploy: Deployment,
        public: Sequence[Dataset] | None = None,
        bystanders: str = "rest",
    ) -> None:
        """`public`: the server's own examples under each seed, where its method needs some."""
        refuse_pooled(label, method)
        if deploy.secure:
            secure_sum.require_cryptography()
            secure_sum.refuse_small(roster.clients if cohort is None else cohort, ConfigError)
            if draw != "fixed":
                raise ConfigError(
                    f"draw is {draw!r}, which may draw fewer than {FEWEST} nodes, too few "
                    'for deploy.secure; use draw = "fixed"'
                )
        self._secure = deploy.secure
        self._deploy = deploy
        self.round = 0
        self.notices: list[str] = []
        self.told: Sequence[Sums] = ()  # for newcomers: what those told who were there before
        self._given_up = 0  # secure sums in a row that could not be had
        self._idle = [0 for _ in seeds]  # rounds of each seed in which nobody reported
        self._limited: dict[str, str] = {}  # sites whose policy refused what was asked last
        self._took_part = np.zeros((len(seeds), roster.clients), bool)  # in some round
        if method.alone:
            cohort, draw = None, "fixed"
        self._untold: list[str] = []  # why nodes heard nothing of each other
        self.widths: Mapping[str, int] = {}
        self._label, self._run = label, run
        self._method = method
        self._seeds = tuple(seeds)
        self._post = post
        self._roster = roster
        self._cohort, self._draw = cohort, draw
        self._rehearsal = MessageTemplates(method, roster, architectures, self._seeds)
        self.states = []
        self._servings: list[list[ServerRuntime]] = []  # for each seed and architecture
        for number in range(len(self._seeds) if roster.model is None else 0):
            sizes = [float(size) for size in roster.sizes(0, number)]
            # Nodes know the run's seed. What the server draws to hide them, they must not.
            known: dict[str, Any] = {"sizes": torch.tensor(sizes), "federated": True}
            known_public = None if public is None else public[number]
            if known_public is not None:
                known["public"] = len(known_public)
            setups = [one._replace(**known) for one in self._rehearsal.setups(number)]
            for name, other in zip(architectures, setups, strict=True):
                refuse_unequal_states(method, name, setups[0], other)
            if deploy.compress == "topk":
                first = self._rehearsal.stand_ins[number][0]
                compression.refuse_unfit(label, deploy, first.form, first.step(first.form, 0)[0])
            self.states.append(method.init_server(setups[0]))
            if has(method, ArchitectureState):
                self._servings.append(self._rehearsal.servings(number, known_public))
        # Training that leaves no trace need not be done.
        personal = tree.leaves(self._rehearsal.stand_ins[0][0].personal)
        self._all_train = bystanders == "train" and bool(personal)
        # Who is heard in the round at hand, for each seed, where that must stay secret.
        self._secret: dict[int, sampling.SecretCohort] = {}
        self._post.discreet = has(method, Privacy)
        if roster.model is not None:
            self._expect_guests(roster.model)

    def _expect_guests(self, model: RunSummary) -> None:
        """Make room for the states of a run that is over: newcomers are to adapt to them."""
        for number in range(len(self._seeds)):
            setup = self._rehearsal.setups(number)[0]._replace(sizes=torch.empty(model.clients))
            self.states.append(self._method.init_server(blank(setup)))
            if has(self._method, ArchitectureState):
                self._servings.append(self._rehearsal.servings(number, None))

    @property
    def tree(self) -> Tree:
        """All state the hub has between rounds; personal state is with the nodes."""
        kept: dict[str, Tree] = {"server": tuple(self.states), "personal": ()}
        if self._servings:
            # By architecture and then by seed, as a simulation has it.
            kinds = zip(*self._servings, strict=True)
            kept["groups"] = tuple(tuple(one.group for one in own) for own in kinds)
        if not has(self._method, Privacy):  # who came, and whether anybody did, is secret then
            kept["attended"] = {
                "idle": torch.tensor(self._idle),
                "clients": torch.from_numpy(self._took_part),
            }
        return kept

    @tree.setter
    def tree(self, kept: Tree) -> None:
        self.states = list(kept["server"])
        for place, own in enumerate(kept.get("groups", ())):
            for servings, group in zip(self._servings, own, strict=True):
                servings[place].group = group
        if "attended" in kept:
            self._idle = kept["attended"]["idle"].tolist()
            self._took_part = kept["attended"]["clients"].numpy()

    # One round.

    def cohort(self, run: int) -> np.ndarray:
        """Return who should take part in the coming round, as a simulation would choose."""
        return self._attendance(run).heard(self.round)

    def _attendance(self, run: int) -> sampling.Attendance:
        able = np.flatnonzero(self._roster.sizes(0, run)).astype(np.int64)
        if not len(able):
            raise DataError("no node has a training example; check the split")
        own: Any = (self._cohort, self._draw, self._all_train)
        if not has(self._method, Privacy):
            return sampling.Attendance(self._seeds[run], able, *own)
        if run not in self._secret:
            self._secret[run] = sampling.SecretCohort(able, *own)
        return self._secret[run]

    def strangers(self, run: int) -> np.ndarray:
        """Return the clients that answered in no round so far.

        Nobody is named where cohorts are secret: a list of who was never drawn, published with
        the result, would tell much of the draw. Nothing is kept of it either: each node knows by
        itself whether it took part, and adapts if it did not.
        """
        if has(self._method, Privacy):
            return np.empty(0, np.int64)
        return np.flatnonzero(~self._took_part[run])

    def padding(self) -> float:
        """Say that nothing is padded: every node has its own batches."""
        return 0.0

    def remarks(self) -> list[str]:
        """Tell of nodes that failed along the way."""
        return [*self._roster.remarks, *self._post.ledger.told(), *self._untold]

    def advance(self) -> Round:
        """Do one round of every seed."""
        self._refresh()
        traffic, states, examples = [], [], 0
        idle, took_part = list(self._idle), self._took_part.copy()
        for run, state in enumerate(self.states):
            cohort = self.cohort(run)
            called = self._attendance(run).training(self.round)
            found: dict[int, Tree] = {}
            down = up = 0
            heard = set(cohort.tolist())
            if len(called):
                sent = self._method.send(state, torch.from_numpy(called))
                found, down, up = self._collect(run, called, sent, "step", heard=heard)
                took_part[run, sorted(found)] = True
            if not heard:  # bystanders may have trained all the same
                states.append(capabilities.idle(self._method, state))
                traffic.append(Traffic(0, down, up))
                idle[run] += 1
                continue
            reports = {client: one for client, one in found.items() if client in heard}
            self._refuse_few(cohort, reports)
            present, rows = sorted(reports), [reports[client] for client in sorted(reports)]
            if self._secure:
                form = secure_sum.contributed(
                    self._method, self._rehearsal.form(present[0], "step")
                )
                more = [0, 0]
                try:
                    present, mean = self._summed(run, cohort, present, form, more)
                    states.append(apply_sum(self._method, state, present, mean))
                    self._given_up = 0
                except SumFailed as error:
                    present = []
                    self._note_given_up(error)
                    states.append(capabilities.idle(self._method, state))
                    idle[run] += 1
                down, up = down + more[0], up + more[1]
            elif self._servings:
                kinds = [self._rehearsal.kind(client) for client in present]
                own = self._servings[run]
                states.append(
                    apply_reports_by_architecture(
                        self._method,
                        state,
                        present,
                        rows,
                        own,
                        kinds,
                        self.round,
                        self.round - idle[run],
                    )
                )
            else:
                states.append(apply_reports(self._method, state, present, tree.stack(rows)))
            traffic.append(Traffic(len(present), down, up))
            sizes = self._roster.sizes(0, run)
            examples += sum(sizes[client] for client in present)
        self.states, self._idle, self._took_part = states, idle, took_part
        self.round += 1
        self._secret = {}
        return Round(traffic, examples)

    def _summed(
        self,
        run: int,
        cohort: np.ndarray,
        done: Sequence[int],
        form: Report,
        traffic: list[int],
        of: str = "step",
    ) -> tuple[list[int], Report]:
        """Add up securely what those contribute who did something; return who, and the mean."""
        context = {**self._head(run), "of": of}
        failed: dict[str, Refused] = {}

        def ask(
            kind: str,
            clients: Sequence[int],
            more: Mapping[str, Any],
            read: Callable[[int, Message], Any],
            content: Mapping[int, Tree] | None = None,
        ) -> dict[int, Any]:
            head = {**context, **more}
            same = protocol.pack(kind, head) if content is None else b""
            letters = {
                client: same if content is None else protocol.pack(kind, head, content[client])
                for client in clients
            }
            found, down, up = self._exchange(kind, head, letters, read, failed)
            traffic[0] += down
            traffic[1] += up
            self._refuse_few(cohort, found)
            return found

        try:
            return run_secure_sum(ask, context, done, self._roster.sites, form)
        except DeployError as error:
            # Nodes never mask a report for a second sum, so starting anew would not help.
            if any(why.reason == "summed" for why in failed.values()):
                raise SumFailed(str(error)) from error
            raise

    def _note_given_up(self, error: SumFailed) -> None:
        """Tell of a round without a sum; end the run if that happens again and again."""
        if self._given_up == _IN_A_ROW:
            raise DeployError(f"{_IN_A_ROW + 1} secure sums in a row could not be had: {error}")
        self._given_up += 1
        text = f"round {self.round + 1} was given up, its secure sum could not be had: {error}"
        log.warning(text)
        self._untold.append(text)

    def meet(self) -> None:
        """Let every node look at the present state without training: newcomers catching up."""
        everyone = np.arange(self._roster.clients)
        for run, state in enumerate(self.states):
            sent = capabilities.welcome(self._method, state, torch.from_numpy(everyone))
            self._collect(run, everyone, sent, "meet")

    def _refresh(self) -> None:
        """End here if a node that was lost waits outside: only a new start can let it in."""
        if self._post.transport.stopped():
            raise DeployError("the run was stopped")
        if back := self._post.waiting_outside():
            raise RestartNeeded(f"{', '.join(back)} can take part again; the run is started anew")

    def _refuse_few(self, cohort: np.ndarray, reports: Mapping[int, Tree]) -> None:
        strictest, least = self._roster.least_cohort
        needed = max(self._post.policy.needed(len(cohort)), least)
        if len(reports) >= needed:
            return
        if self._limited:
            told = [f"{site}: {CODES[reason]}" for site, reason in sorted(self._limited.items())]
            raise ConfigError(f"round {self.round + 1} cannot be done: {'; '.join(told)}")
        if len(cohort) < least:
            raise ConfigError(
                f"round {self.round + 1} has {len(cohort)} sites; "
                f"{strictest}: {CODES['min_cohort']}"
            )
        sites = self._roster.sites
        missing = [sites[int(client)] for client in cohort if int(client) not in reports]
        raise DeployError(
            f"round {self.round + 1}: {len(reports)} of {len(cohort)} nodes reported, {needed} "
            f"needed (deploy.minimum, or min_cohort of a site); without {', '.join(missing)}"
        )

    def _collect(
        self,
        run: int,
        cohort: np.ndarray,
        sent: Sent,
        kind: str,
        flags: Mapping[str, bool] = _NONE,
        heard: set[int] | None = None,
        hears: ExchangedSums | None = None,
    ) -> tuple[dict[int, Tree], int, int]:
        """Send every node its part and gather the answers that are in order.

        In a round, who is not `heard` trains and answers with nothing. Who is scored `hears` what
        the others told.
        """
        head = {**self._head(run), **flags, **(hears.plain if hears else {})}
        rule = secure_sum.rule_of(self._method) if self._secure and kind == "step" else None
        if rule is not None:
            head["bound"] = float(rule.by.longest(self.states[run].memory))
        letters, made = {}, {}
        for place, client in enumerate(cohort.tolist()):
            # Where nobody gets anything of its own, one letter does for all of an architecture.
            kin = (place, -1) if tree.leaves(sent.own) else (-1, self._rehearsal.kind(client))
            told = {} if heard is None else {"heard": client in heard}
            if hears is not None:
                told = {"counted": client in hears.counted}
            key = (*kin, *told.values())
            if key not in made:
                own = tree.map(lambda leaf, row=place: leaf[row : row + 1], sent.own)
                whole = Sent(sent.shared, own, self._group(run, client))
                made[key] = protocol.pack(
                    kind, {**head, **told}, whole, compression.down(self._deploy)
                )
            letters[client] = made[key]

        def read(client: int, message: Message) -> Tree:
            # Of a bystander there is no report; under masks it follows later.
            hidden = kind == "step" and (self._secure or client not in (heard or ()))
            hidden |= kind == "tell" and self._secure
            form = () if hidden else self._rehearsal.form(client, kind, **flags)
            codec = (
                compression.up(self._deploy, sent)
                if kind == "step" and not hidden
                else protocol.UNCOMPRESSED
            )
            content = protocol.fitted(form, message.leaves, codec)
            if kind == "step":
                protocol.refuse_nonfinite(content)
                self._refuse_other_size(run, client, content, codec)
            return content

        return self._exchange(kind, head, letters, read)

    def _refuse_other_size(
        self, run: int, client: int, report: Tree, codec: protocol.Codec
    ) -> None:
        """Refuse a report that claims more or fewer examples than its node told when joining."""
        told = getattr(report, "size", None)
        if not isinstance(told, torch.Tensor):
            return
        rows = self._roster.sizes(0, run)[client]
        expected = torch.full_like(told, rows)
        if isinstance(codec, compression.Half):
            expected = expected.half().to(told.dtype)
        if not torch.equal(told, expected):
            raise Refused("sizes", f"a report of {told.tolist()} examples; {rows} when joining")

    def _group(self, run: int, client: int) -> Tree:
        """Return what the server keeps for a client's architecture."""
        return self._servings[run][self._rehearsal.kind(client)].group if self._servings else ()

    def _head(self, run: int) -> dict[str, Any]:
        about = {"run": self._run, "label": self._label, "seed": self._seeds[run]}
        if not (self._method.public and self._idle[run]):
            return {**about, "round": self.round}
        # Samples of public examples are numbered by the rounds in which somebody reported.
        return {**about, "round": self.round, "sample": self.round - self._idle[run]}

    def _exchange(
        self,
        kind: str,
        head: Mapping[str, Any],
        letters: Mapping[int, bytes],
        read: Callable[[int, Message], Any],
        failed: dict[str, Refused] | None = None,
    ) -> tuple[dict[int, Any], int, int]:
        """Ask clients, and read the answers to this very question; return them with the bytes.

        Why someone gave none is added to `failed`.
        """
        sites = self._roster.sites
        number = {sites[client]: client for client in letters}
        found: dict[int, Any] = {}
        traffic = [0, 0]

        def take(site: str, answer: Answer) -> None:
            told = answer.message.head
            echo = {key: told.get(key) for key in ("run", "label", "seed", "round")}
            if echo != {key: head[key] for key in echo} or told.get("to") != kind:
                raise Refused("round", f"{site} answered to {echo}")
            found[number[site]] = read(number[site], answer.message)
            traffic[0] += answer.bytes_down
            traffic[1] += answer.bytes_up

        named = {sites[client]: letter for client, letter in letters.items()}
        refused = self._post.ask(named, self._post.policy.timeout, take)
        if failed is not None:
            failed.update(refused)
        self._limited = {s: why.reason for s, why in refused.items() if why.reason in POLICY_LIMITS}
        return found, traffic[0], traffic[1]

    # Judging.

    def judge(
        self,
        exams: Sequence[TestData] | None = None,
        *,
        only_global: bool = False,
        keep: bool = False,
        newcomers: bool = False,
        adapt: bool = True,
    ) -> list[ClientScores]:
        """Let every node score its models on its own data; `keep` leaves the model on the node.

        Nodes that took part in no round adapt as newcomers do; without `adapt` their personal
        models have no score.
        """
        flags = {
            "tested": exams is not None,
            "only_global": only_global,
            "keep": keep,
            "newcomers": newcomers,
        }
        everyone = np.arange(self._roster.clients)
        verdicts = []
        for run in range(len(self.states)):
            never = self.strangers(run)
            if newcomers or only_global or not (self.round and capabilities.adapts(self._method)):
                never = never[:0]
            took = np.setdiff1d(everyone, never)
            told = self.told[run] if self.told else None
            first = self._scored(run, took, flags, told)
            if not len(never):
                verdicts.append(first)
                continue
            if has(self._method, FinalExchange):
                told = first.told or None
            guests = {**flags, "only_global": not adapt, "keep": keep and adapt, "newcomers": adapt}
            verdicts.append(mixed((took, first), (never, self._scored(run, never, guests, told))))
        if not any(own.scores for own in verdicts):
            raise DeployError(f"after round {self.round}, no node was there to be scored")
        return verdicts

    def _scored(
        self, run: int, clients: np.ndarray, flags: Mapping[str, bool], told: Sums | None
    ) -> ClientScores:
        """Let some nodes score their models; newcomers hear what others told."""
        newcomers = flags["newcomers"]
        send = partial(capabilities.welcome, self._method) if newcomers else self._method.send
        found: dict[int, Tree] = {}
        hears = None
        if len(clients):
            sent = send(self.states[run], torch.from_numpy(clients))
            if has(self._method, FinalExchange) and not flags["only_global"]:
                hears = self._told(run, clients, sent, newcomers, told)
            found, _, _ = self._collect(run, clients, sent, "judge", flags, hears=hears)
        if not found:
            return ClientScores({}, {}, [])
        rows = _filled(found, clients.tolist())
        scores = tree.map(lambda leaf: leaf.numpy(), tree.stack(rows))
        exchanged = (hears.sums, hears.traffic) if hears and hears.counted else ()
        return ClientScores(scores["marks"], scores["facts"], [], *exchanged)

    def _told(
        self, run: int, everyone: np.ndarray, sent: Sent, newcomers: bool, told: Sums | None
    ) -> ExchangedSums | None:
        """Let nodes tell, in sum, what their method tells; who is silent is left out of it."""
        if newcomers:
            return ExchangedSums(told) if told else None
        count = sum(leaf.numel() for leaf in tree.leaves(self._rehearsal.form(0, "tell")))
        if count > MOST_EXCHANGED:
            self._untold.append(
                f"what nodes would tell each other is {count:,} numbers, above "
                f"{MOST_EXCHANGED:,}, so "
                'each went by its own; for elastic weights that is ewc_fisher = "client"'
            )
            return None
        found, _, up = self._collect(run, everyone, sent, "tell")
        if not found or not self._secure:
            return sums_of_messages(found, up)
        form = summand(self._rehearsal.form(0, "tell"))
        more = [0, 0]
        try:
            present, mean = self._summed(run, everyone, sorted(found), form, more, "tell")
        except DeployError as error:
            self._untold.append(f"nodes heard nothing of each other, so each chose alone: {error}")
            return None
        return sums_of_secure_sum(present, mean, up, more)


def _filled(found: Mapping[int, Tree], clients: Sequence[int]) -> list[Tree]:
    """Give everyone a row of scores; who was not there has NaN in its place."""
    if len(found) == len(clients):
        return [found[client] for client in clients]
    known = {client: tree.map(lambda leaf: leaf.double(), own) for client, own in found.items()}
    nothing = tree.map(lambda leaf: torch.full_like(leaf, float("nan")), next(iter(known.values())))
    return [known.get(client, nothing) for client in clients]


def refuse_pooled(label: str, method: Method) -> None:
    """Refuse what no federation of nodes can do."""
    if method.pooled:
        raise MethodError(
            f"{label} trains on everyone's data in one place, which a federation of nodes "
            "cannot; leave it out, or run it in the simulator"
        )
