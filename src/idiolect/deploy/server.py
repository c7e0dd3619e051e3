"""The server of a federation: the rounds of a simulation, with messages to nodes in between.

It samples a cohort, sends, waits for the reports, checks them and updates its state; nodes return
scores as numbers. It never sees data or personal state. Its interface is that of `Simulation`.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from idiolect.core import capabilities, tree
from idiolect.core.capabilities import ArchitectureState, FinalExchange, Privacy, Tampering, has
from idiolect.core.method import Method, Report, Sent
from idiolect.core.tree import Tree
from idiolect.data import Dataset
from idiolect.data.federation import TestData
from idiolect.deploy import buffered, compression, secure_sum
from idiolect.deploy.buffered import ReportBuffer
from idiolect.deploy.exchange import MessageTemplates, NodeExchange
from idiolect.deploy.handshake import NodeRegistry
from idiolect.deploy.messenger import Answer, Stopped
from idiolect.deploy.protocol import CODES, MOST_EXCHANGED
from idiolect.deploy.secure_aggregation import FEWEST
from idiolect.deploy.secure_sum import SumFailed
from idiolect.engine import sampling, server_update
from idiolect.engine.architecture import Architecture, blank, refuse_unequal_states
from idiolect.engine.deployment_runtime import ServerRuntime
from idiolect.engine.evaluation import ClientScores, mixed
from idiolect.engine.final_exchange import Sums, added
from idiolect.engine.rounds import Round
from idiolect.engine.row_metrics import MetricChoice
from idiolect.engine.server_update import Traffic
from idiolect.errors import ConfigError, DataError, DeployError, MethodError
from idiolect.experiment.schema import Deployment
from idiolect.results import attendance

log = logging.getLogger("idiolect.hub")

_CPU = torch.device("cpu")
_LAST_CALL = 30.0  # seconds that lost sites have to come back before the last scoring
_IN_A_ROW = 3  # rounds without a sum that are tolerated one after the other


class RestartNeeded(DeployError):
    """The run should be restarted from its checkpoint: a lost node is back."""


class _SeedRound(NamedTuple):
    """One round of one seed: the new state, and who took part."""

    state: Tree
    trained: list[int]  # clients that answered
    reported: list[int]  # those whose reports the update used
    traffic: Traffic
    did: dict[str, str]  # by site: whether it took part, or why not


class _Exchanged(NamedTuple):
    """Sums of the final exchange, whose numbers are in them, and the bytes they cost."""

    sums: Sums
    counted: frozenset[int] = frozenset()
    traffic: Traffic = Traffic(0, 0, 0)


class Server:
    """One method on all seeds, its clients being nodes."""

    def __init__(
        self,
        label: str,
        method: Method,
        seeds: Sequence[int],
        run: str,
        registry: NodeRegistry,
        architectures: Mapping[str, Architecture],
        cohort: int | None,
        draw: str,
        deploy: Deployment,
        public: Sequence[Dataset] | None = None,
        bystanders: str = "rest",
        hides: bool = False,
    ) -> None:
        """`public`: the server's own examples under each seed, where its method needs some.

        `hides`: the method's noise hides each client, by a promise that means something.
        """
        refuse_pooled(label, method)
        if deploy.secure:
            secure_sum.require_cryptography()
            secure_sum.refuse_small(registry.clients if cohort is None else cohort, ConfigError)
            if draw != "fixed":
                raise ConfigError(
                    f"draw is {draw!r}, which may draw fewer than {FEWEST} nodes, too few "
                    'for deploy.secure; use draw = "fixed"'
                )
        self.round = 0
        self.notices: list[str] = []
        self.exchange_sums: Sequence[
            Sums
        ] = ()  # for newcomers: sums of the final exchange before them
        self.widths: Mapping[str, int] = {}
        self._label, self._run, self._method = label, run, method
        self._seeds = tuple(seeds)
        self._secure = deploy.secure
        self._messenger, self._registry = registry.messenger, registry
        self._cohort, self._draw = (None, "fixed") if method.alone else (cohort, draw)
        self._templates = MessageTemplates(method, registry, architectures, self._seeds)
        self._nodes = NodeExchange(registry, self._templates, deploy, hides)
        self._buffer = ReportBuffer(self._messenger) if deploy.buffer else None
        self._filled = buffered.needed(deploy, registry.clients)
        self._failed_sums = 0  # in a row
        self._remarks: list[str] = []  # rounds and exchanges that failed
        self._idle = [0 for _ in seeds]  # rounds of each seed in which nobody reported
        self._took_part = np.zeros((len(seeds), registry.clients), bool)  # in some round
        self.states: list[Tree] = []
        self._runtimes: list[list[ServerRuntime]] = []  # for each seed and architecture
        for number in range(len(self._seeds)):
            own = None if public is None else public[number]
            self.states.append(self._initial_state(number, architectures, deploy, own))
            if has(method, ArchitectureState):
                self._runtimes.append(self._templates.server_runtimes(number, own))
        # Training that leaves no trace need not be done.
        personal = tree.leaves(self._templates.runtimes[0][0].personal)
        self._all_train = bystanders == "train" and bool(personal)
        # The cohort of the current round under each seed, where it must stay secret.
        self._secret: dict[int, sampling.SecretCohort] = {}
        self._messenger.discreet = has(method, Privacy)
        # A draw that protects its clients is not written down; that all take part is no secret.
        self._secretive = has(method, Privacy) and (self._cohort is not None or draw != "fixed")
        self._unscored: list[np.ndarray] = [np.empty(0, np.int64) for _ in seeds]

    def _initial_state(
        self,
        run: int,
        architectures: Mapping[str, Architecture],
        deploy: Deployment,
        public: Dataset | None,
    ) -> Tree:
        setups = self._templates.setups(run)
        if self._registry.finished is not None:  # replaced by the states of the finished run
            sizes = torch.empty(self._registry.finished.clients)
            return self._method.init_server(blank(setups[0]._replace(sizes=sizes)))
        sizes = torch.tensor([float(size) for size in self._registry.sizes(0, run)])
        # Nodes know the run's seed. What the server draws to hide them, they must not.
        known: dict[str, Any] = {"sizes": sizes, "federated": True}
        if public is not None:
            known["public"] = len(public)
        setups = [one._replace(**known) for one in setups]
        for name, other in zip(architectures, setups, strict=True):
            refuse_unequal_states(self._method, name, setups[0], other)
        if deploy.buffer:
            first = self._templates.runtimes[run][0]
            report = first.step(first.form, 0)[0]
            method, seeds, cohort = self._method, len(self._seeds), self._cohort
            buffered.refuse_unfit(self._label, method, seeds, cohort, first.form, report)
        if deploy.compress == "topk":
            first = self._templates.runtimes[run][0]
            report = first.step(first.form, 0)[0]
            compression.refuse_unfit(self._label, deploy, first.form, report)
        return self._method.init_server(setups[0])

    @property
    def tree(self) -> Tree:
        """All state of the server between rounds; nodes keep the personal state."""
        kept: dict[str, Tree] = {"server": tuple(self.states), "personal": ()}
        if self._runtimes:
            # By architecture and then by seed, as a simulation has it.
            by_architecture = zip(*self._runtimes, strict=True)
            kept["groups"] = tuple(tuple(one.group for one in own) for own in by_architecture)
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
            for runtimes, group in zip(self._runtimes, own, strict=True):
                runtimes[place].group = group
        if "attended" in kept:
            self._idle = kept["attended"]["idle"].tolist()
            self._took_part = kept["attended"]["clients"].numpy()

    def padding(self) -> float:
        """Return 0: every node has its own batches, so none are padded."""
        return 0.0

    def remarks(self) -> list[str]:
        """Return what failed along the way."""
        missed = [
            f"seed {seed}: {text}"
            for seed, record in zip(self._seeds, self._attended(), strict=True)
            for text in attendance.words(attendance.by_site(record))
        ]
        return [*self._registry.remarks, *missed, *self._remarks]

    def _attended(self) -> list[list[Mapping[str, str]]]:
        return self._registry.attendance.read(self._label, self.round, len(self._seeds))

    # Who takes part.

    def cohort(self, run: int) -> np.ndarray:
        """Return the cohort of the coming round, as a simulation would choose it."""
        return self._attendance(run).reporting(self.round)

    def _attendance(self, run: int) -> sampling.Attendance:
        able = np.flatnonzero(self._registry.sizes(0, run)).astype(np.int64)
        if not len(able):
            raise DataError("no node has a training example; check the split")
        own: Any = (self._cohort, self._draw, self._all_train)
        if not has(self._method, Privacy):
            return sampling.Attendance(self._seeds[run], able, *own)
        if run not in self._secret:
            self._secret[run] = sampling.SecretCohort(able, *own)
        return self._secret[run]

    def unscored(self, run: int) -> np.ndarray:
        """Return the clients that were not there at the last evaluation."""
        return self._unscored[run]

    def strangers(self, run: int) -> np.ndarray:
        """Return the clients that answered in no round so far.

        None are named, or kept, where cohorts are secret: the published list of who was never drawn
        would reveal much of the draw. Each node knows by itself whether it took part, and adapts if
        it did not.
        """
        if has(self._method, Privacy):
            return np.empty(0, np.int64)
        return np.flatnonzero(~self._took_part[run])

    # One round.

    def advance(self) -> Round:
        """Do one round of every seed; nothing is kept of it unless all succeed."""
        if self._messenger.transport.stopped():
            raise Stopped("the run was stopped")
        if back := self._messenger.waiting_outside():
            raise RestartNeeded(f"{', '.join(back)} can take part again; the run is started anew")
        train = self._train if self._buffer is None else partial(self._train_buffered, self._buffer)
        done = [train(run) for run in range(len(self._seeds))]
        self._took_part, examples = self._took_part.copy(), 0
        for run, own in enumerate(done):
            self._took_part[run, own.trained] = True
            sizes = self._registry.sizes(0, run)
            examples += sum(sizes[client] for client in own.reported)
        self._idle = [n + (not own.reported) for n, own in zip(self._idle, done, strict=True)]
        self.states = [own.state for own in done]
        self.round += 1
        if not self._secretive:
            self._registry.attendance.add(self._label, self.round, [own.did for own in done])
        self._secret = {}
        return Round([own.traffic for own in done], examples)

    def _train(self, run: int) -> _SeedRound:
        """Send the state, wait for the reports and update the state of one seed."""
        state, attendance = self.states[run], self._attendance(run)
        cohort, training = attendance.reporting(self.round), attendance.training(self.round)
        heard = set(cohort.tolist())
        found: dict[int, Tree] = {}
        self._nodes.taken_bytes()
        if len(training):
            sent = self._method.send(state, torch.from_numpy(training))
            head, own = self._head(run), self._groups(run)
            rule = secure_sum.rule_of(self._method) if self._secure else None
            if rule is not None:
                head["bound"] = float(rule.by.longest(state.memory))
            found = self._nodes.collect(
                "step", run, head, training, sent, own, true_for={"heard": heard}
            )
        reports = {client: report for client, report in found.items() if client in heard}
        present: list[int] = []
        if heard:  # else bystanders may have trained all the same
            self._nodes.refuse_few(self.round, cohort, reports)
            present, state = self._updated(run, cohort, reports)
        else:
            state = capabilities.idle(self._method, state)
        traffic = Traffic(len(present), *self._nodes.taken_bytes())
        did = self._record(training, heard, found, present)
        return _SeedRound(state, sorted(found), present, traffic, did)

    def _train_buffered(self, buffer: ReportBuffer, run: int) -> _SeedRound:
        """Send the state to all who are not at work, and update it when enough reports are in."""
        state, everyone = self.states[run], self._attendance(run).reporting(self.round)
        sites, head = self._registry.sites, self._head(run)
        sent = self._method.send(state, torch.from_numpy(everyone))
        self._nodes.taken_bytes()
        buffer.ask(self._nodes.packed(head, everyone, sent), self.round, sent.shared)

        def read(site: str, answer: Answer, version: int, shared: Tree) -> Report:
            asked = {**head, "round": version}
            return self._nodes.read_report(asked, run, sites.index(site), answer)

        found, failed = buffer.take(self._filled, self.round, read)
        reports = {
            sites.index(site): buffered.rebased(report, self.round - version, then, sent.shared)
            for site, (report, version, then) in found.items()
        }
        passed = {site: self._messenger.absence(site) for site in sites}
        self._nodes.failed = passed | {site: why.reason for site, why in failed.items()}
        if len(reports) < max(self._filled, self._registry.least_cohort[1]):
            self._nodes.refuse_few(self.round, everyone, reports)
        present, state = self._updated(run, everyone, reports)
        did = self._record(everyone, set(everyone.tolist()), reports, present)
        did |= {site: attendance.WORKING for site in buffer.at_work()}
        traffic = Traffic(len(present), *self._nodes.taken_bytes())
        return _SeedRound(state, present, present, traffic, did)

    def _record(
        self, training: np.ndarray, heard: set[int], found: Mapping[int, Tree], present: list[int]
    ) -> dict[str, str]:
        """Say of each site what it did in a round, or why it did not."""
        asked, did = set(training.tolist()), {}
        for client, site in enumerate(self._registry.sites):
            if client in present:
                did[site] = attendance.REPORTED
            elif client in found and client not in heard:
                did[site] = attendance.TRAINED
            elif client in found and not present:
                did[site] = attendance.VOID
            elif client in asked:
                did[site] = CODES[self._nodes.failed.get(site) or "unreachable"]
            else:  # of one that has not joined no rows are known, so that it is not drawn
                why = "" if site in self._registry.entries else self._messenger.absence(site)
                did[site] = CODES[why] if why else attendance.NOT_DRAWN
        return did

    def _updated(
        self, run: int, cohort: np.ndarray, reports: Mapping[int, Tree]
    ) -> tuple[list[int], Tree]:
        """Return whose reports were used, and the state after the server's update."""
        state, present = self.states[run], sorted(reports)
        rows = [reports[client] for client in present]
        if self._secure:
            template = self._templates.answer(present[0], "step")
            form = secure_sum.contribution_form(self._method, template)
            head = {**self._head(run), "of": "step"}
            try:
                present, mean = self._nodes.secure_sum(head, cohort, present, form)
            except SumFailed as error:
                self._note_failed_sum(error)
                return [], capabilities.idle(self._method, state)
            self._failed_sums = 0
            return present, apply_sum(self._method, state, present, mean)
        if self._runtimes:
            return present, self._updated_by_architecture(run, present, rows)
        return present, apply_reports(self._method, state, present, tree.stack(rows))

    def _updated_by_architecture(
        self, run: int, present: Sequence[int], reports: Sequence[Tree]
    ) -> Tree:
        """Read reports with the server's own examples, join those of an architecture, and train.

        Reports may differ in structure between architectures; what is read in them does not.
        Without a usable report nothing is joined or trained.
        """
        runtimes, sample = self._runtimes[run], self.round - self._idle[run]
        places = [self._templates.architecture(client) for client in present]
        pairs = zip(places, reports, strict=True)
        read = [runtimes[place].read(report, self.round, sample) for place, report in pairs]
        server_update.refuse_unequal([tree.stack([one]) for one in read])
        stacked = tree.stack(read)
        new = apply_reports(self._method, self.states[run], present, stacked)
        good = (~server_update.rows_to_leave_out(stacked, None, len(read), _CPU)).tolist()
        for place, runtime in enumerate(runtimes if any(good) else ()):
            rows = zip(places, reports, good, strict=True)
            runtime.join([one for at, one, fine in rows if at == place and fine])
            runtime.fuse(new, self.round, sample)
        return new

    def _note_failed_sum(self, error: SumFailed) -> None:
        """Note a round without a sum; end the run if there are too many in a row."""
        if self._failed_sums == _IN_A_ROW:
            raise DeployError(f"{_IN_A_ROW + 1} secure sums in a row could not be had: {error}")
        self._failed_sums += 1
        text = f"round {self.round + 1} was given up, its secure sum could not be had: {error}"
        log.warning(text)
        self._remarks.append(text)

    def meet(self) -> None:
        """Send every node the present state without training: newcomers catching up."""
        everyone = np.arange(self._registry.clients)
        for run, state in enumerate(self.states):
            sent = capabilities.welcome(self._method, state, torch.from_numpy(everyone))
            own = self._groups(run)
            self._nodes.collect("meet", run, self._head(run), everyone, sent, own)

    def _head(self, run: int) -> dict[str, Any]:
        head = {"run": self._run, "label": self._label, "seed": self._seeds[run]}
        head["round"] = self.round
        if self._method.public and self._idle[run]:
            # Samples of public examples are numbered by the rounds in which somebody reported.
            head["sample"] = self.round - self._idle[run]
        return head

    def _groups(self, run: int) -> list[Tree]:
        """Return the server's state for each architecture."""
        return [runtime.group for runtime in self._runtimes[run]] if self._runtimes else []

    # Evaluation.

    def evaluate(
        self,
        test_data: Sequence[TestData] | None = None,
        *,
        only_global: bool = False,
        keep: bool = False,
        newcomers: bool = False,
        adapt: bool = True,
        choice: MetricChoice | None = None,
        detail: bool = False,
    ) -> list[ClientScores]:
        """Let every node score its models on its own data; `keep` stores the model on the node.

        Nodes that took part in no round adapt as newcomers do; without `adapt` their personal
        models have no score. With a `choice` each node measures what the experiment chooses, with
        `detail` all metrics of its task; outputs of rows stay there.
        """
        self._templates.choice, self._templates.detail = choice, detail
        flags = {
            "tested": test_data is not None,
            "only_global": only_global,
            "keep": keep,
            "newcomers": newcomers,
        }
        if keep:  # who is away for a moment should not be without a model
            self._messenger.wait_for(min(self._messenger.policy.join, _LAST_CALL))
        everyone = np.arange(self._registry.clients)
        self._unscored = [np.empty(0, np.int64) for _ in self.states]
        scores = []
        for run in range(len(self.states)):
            never = self.strangers(run)
            if newcomers or only_global or not (self.round and capabilities.adapts(self._method)):
                never = never[:0]
            took = np.setdiff1d(everyone, never)
            sums = self.exchange_sums[run] if self.exchange_sums else None
            first = self._scored(run, took, flags, sums)
            if not len(never):
                scores.append(first)
                continue
            if has(self._method, FinalExchange):
                sums = first.exchange_sums or None
            guests = {**flags, "only_global": not adapt, "keep": keep and adapt, "newcomers": adapt}
            scores.append(mixed((took, first), (never, self._scored(run, never, guests, sums))))
        if not any(own.scores for own in scores):
            raise DeployError(f"after round {self.round}, no node was there to be scored")
        return scores

    def _scored(
        self, run: int, clients: np.ndarray, flags: Mapping[str, bool], sums: Sums | None
    ) -> ClientScores:
        """Let some nodes score their models; newcomers get the sums of an earlier exchange."""
        newcomers = flags["newcomers"]
        send = partial(capabilities.welcome, self._method) if newcomers else self._method.send
        found: dict[int, Tree] = {}
        exchanged = None
        if len(clients):
            sent = send(self.states[run], torch.from_numpy(clients))
            if has(self._method, FinalExchange) and not flags["only_global"]:
                if newcomers:
                    exchanged = _Exchanged(sums) if sums else None
                else:
                    exchanged = self._exchanged(run, clients, sent)
            head, true_for = self._head(run), {}
            head["measured"] = self._templates.choice is not None
            head["detail"] = self._templates.detail
            if exchanged is not None:
                # As text, to the last digit: compression would round tensors.
                head["sums"] = {name: leaf.tolist() for name, leaf in exchanged.sums.items()}
                true_for = {"counted": exchanged.counted}
            own = self._groups(run)
            found = self._nodes.collect("judge", run, head, clients, sent, own, flags, true_for)
        missing = np.setdiff1d(clients, np.fromiter(found, np.int64, len(found)))
        self._unscored[run] = np.union1d(self._unscored[run], missing)
        if not found:
            return ClientScores({}, {}, [])
        rows = _filled(found, clients.tolist())
        scores = tree.map(lambda leaf: leaf.numpy(), tree.stack(rows))
        more = (exchanged.sums, exchanged.traffic) if exchanged and exchanged.counted else ()
        return ClientScores(scores["marks"], scores["facts"], [], *more)

    def _exchanged(self, run: int, clients: np.ndarray, sent: Sent) -> _Exchanged | None:
        """Do the final exchange: return the sums of what nodes report to each other."""
        template = self._templates.answer(0, "tell")
        count = sum(leaf.numel() for leaf in tree.leaves(template))
        if count > MOST_EXCHANGED:
            self._remarks.append(
                f"what nodes would tell each other is {count:,} numbers, above "
                f"{MOST_EXCHANGED:,}, so each went by its own; for elastic weights that is "
                'ewc_fisher = "client"'
            )
            return None
        self._nodes.taken_bytes()
        head = self._head(run)
        found = self._nodes.collect("tell", run, head, clients, sent, self._groups(run))
        if not found:
            return None
        # Models that are sent to be scored are not counted, here or in a simulation.
        _, up = self._nodes.taken_bytes()
        present = sorted(found)
        if self._secure:
            form, head = secure_sum.summand(template), {**head, "of": "tell"}
            try:
                present, mean = self._nodes.secure_sum(head, clients, present, form)
            except DeployError as error:
                text = f"nodes heard nothing of each other, so each chose alone: {error}"
                self._remarks.append(text)
                return None
            named = tree.named(mean.params)
            sums: Sums = {name: leaf * mean.size for name, leaf in named.items()}
        else:
            sums = added(tree.stack([found[client] for client in present]))
        down, more = self._nodes.taken_bytes()
        traffic = Traffic(0, len(present) * tree.nbytes(dict(sums)) + down, up + more)
        return _Exchanged(sums, frozenset(present), traffic)


def apply_reports(method: Method, state: Tree, present: Sequence[int], reports: Tree) -> Tree:
    """Update the server's state with reports, guarded as in a simulation."""
    cohort = torch.tensor(present)
    arrived = method.arrive(state, cohort, reports) if has(method, Tampering) else reports
    bad = server_update.rows_to_leave_out(arrived, None, len(cohort), _CPU)
    return server_update.guarded_server_step(method, state, cohort, arrived, bad)


def apply_sum(method: Method, state: Tree, present: Sequence[int], mean: Report) -> Tree:
    """Update the server's state with a secure sum: its mean, as one client's report."""
    rule = secure_sum.rule_of(method)
    if rule is None:
        return apply_reports(method, state, present[:1], tree.stack([mean]))
    total = tree.scale(float(len(present)), mean.params)
    return rule.sum_step(state, torch.tensor(present), total)


def refuse_pooled(label: str, method: Method) -> None:
    """Refuse a method that no federation of nodes can run."""
    if method.pooled:
        raise MethodError(
            f"{label} trains on everyone's data in one place, which a federation of nodes "
            "cannot; leave it out, or run it in the simulator"
        )


def _filled(found: Mapping[int, Tree], clients: Sequence[int]) -> list[Tree]:
    """Return a row of scores for every client; those of absent ones are NaN."""
    if len(found) == len(clients):
        return [found[client] for client in clients]
    known = {client: tree.map(lambda leaf: leaf.double(), own) for client, own in found.items()}
    nothing = tree.map(lambda leaf: torch.full_like(leaf, float("nan")), next(iter(known.values())))
    return [known.get(client, nothing) for client in clients]
