"""The loop of rounds: sample, send, train every client, aggregate; and judge when asked.

Runs of several seeds advance together: their clients share blocks, each with its own server state,
data and batches, so that a run's result does not depend on its company. (Networks with dropout are
the exception: layers draw for a block as a whole, repeatably, but not the same at another width.)
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from idiolect import tree
from idiolect.data.federation import Exam, Lessons
from idiolect.errors import ConfigError, DataError, Diverged, MethodError
from idiolect.local import Local, Network
from idiolect.method import Method, Sent, Setup
from idiolect.simulate import sampling
from idiolect.simulate.architecture import Architecture, make, refuse_unequal_states
from idiolect.simulate.backend import Backend
from idiolect.simulate.crew import Call, Crew, Seat
from idiolect.simulate.judging import marking
from idiolect.simulate.pools import Library
from idiolect.simulate.store import Store
from idiolect.tree import Tree


class Run(NamedTuple):
    """One run: a seed and what the clients may learn from."""

    seed: int
    lessons: Lessons


class Traffic(NamedTuple):
    """What crossed the network in one round of one run."""

    clients: int
    bytes_down: int
    bytes_up: int


class Round(NamedTuple):
    """What one round did: traffic of each run, and the examples trained on by all together."""

    traffic: list[Traffic]
    examples: int


class Verdict(NamedTuple):
    """Scores of every client of one run."""

    scores: dict[str, dict[str, np.ndarray]]  # model -> metric -> [client]
    facts: dict[str, np.ndarray]  # what the method tells of its choices, [client, ...]
    deployed: list[tuple[np.ndarray, Tree]]  # per architecture: clients, personal models; if kept


class Simulation:
    """A method on one or several seeded runs, round by round."""

    def __init__(
        self,
        method: Method,
        runs: Sequence[Run],
        architectures: Mapping[str, Architecture],
        *,
        cohort: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.method = method
        self.round = 0
        self.runs = runs
        self.notices: list[str] = []  # what the user should know, in words
        backend = backend or Backend()
        self._device = backend.place
        if self._device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = False  # convolutions in full fp32, like products
        self._cohort = cohort
        self._library = Library([run.lessons for run in runs], self._device)
        self._clients = len(runs[0].lessons.names)
        if any(len(run.lessons.names) != self._clients for run in runs):
            raise ConfigError(
                f"runs have {sorted({len(run.lessons.names) for run in runs})} clients; runs that "
                "are trained together need equally many"
            )
        trained = [run.lessons.pooled() if method.pooled else run.lessons for run in runs]
        self._trained = [
            self._library.members(n, runs[n].seed, own) for n, own in enumerate(trained)
        ]
        self._judged = [self._library.members(n, r.seed, r.lessons) for n, r in enumerate(runs)]
        self._eligible = [_eligible(lessons) for lessons in trained]
        self._crews, self.states = self._hire(architectures, trained, backend)

    def _hire(
        self, architectures: Mapping[str, Architecture], trained: list[Lessons], backend: Backend
    ) -> tuple[list[Crew], list[Tree]]:
        """Make networks, personal state and server states, each from its run's seed."""
        crews: list[Crew] = []
        first: list[Setup] = []
        seeds = [run.seed for run in self.runs]
        examples = self._library.examples()
        for name, architecture in architectures.items():
            own = architecture.clients
            clients = np.arange(self._clients) if own is None else np.array(own)
            made = make(name, architecture, seeds, trained, examples, self._device)
            first = first or made.setups
            refuse_unequal_states(self.method, name, first[0], made.setups[0])
            if made.unmappable and backend.kind == "vectorised":
                self.notices.append(f"architecture {name!r}: {made.unmappable}")
            one_by_one = backend.kind == "sequential" or bool(made.unmappable)
            personal = [(self.method.init_personal(setup), len(clients)) for setup in made.setups]
            crews.append(
                Crew(
                    clients,
                    made.networks,
                    Store(personal, self._device),
                    self._library.pools,
                    self._library.exam_pools,
                    self._device,
                    1 if one_by_one else backend.width,
                    1 if backend.kind == "sequential" else _hands(self._device, made.networks),
                    not one_by_one,
                    backend.cache,
                )
            )
        if sorted(int(c) for crew in crews for c in crew.clients) != list(range(self._clients)):
            raise ConfigError("the architectures must name every client exactly once")
        states = [tree.to(self.method.init_server(setup), self._device) for setup in first]
        return crews, states

    @property
    def widths(self) -> dict[str, int]:
        """Measured block widths, to be kept with a checkpoint: rounding depends on them."""
        return {
            f"{place} {kind}": width
            for place, crew in enumerate(self._crews)
            for kind, width in crew.widths.items()
        }

    @widths.setter
    def widths(self, known: Mapping[str, int]) -> None:
        for key, width in known.items():
            place, kind = key.split(" ", 1)
            self._crews[int(place)].widths[kind] = width

    @property
    def tree(self) -> Tree:
        """All state there is between rounds, as one tree: servers' and personal."""
        return {"server": tuple(self.states), "personal": tuple(c.store.rows for c in self._crews)}

    @tree.setter
    def tree(self, kept: Tree) -> None:
        kept = tree.to(kept, self._device)
        self.states = list(kept["server"])
        for crew, rows in zip(self._crews, kept["personal"], strict=True):
            crew.store.rows = rows

    # One round.

    def cohort(self, run: int) -> np.ndarray:
        """Return who takes part in the coming round of one run."""
        return self._drawn(run, self.round)

    def _drawn(self, run: int, round: int) -> np.ndarray:
        eligible = self._eligible[run]
        size = len(eligible) if self._cohort is None else self._cohort
        return sampling.cohort(self.runs[run].seed, round, eligible, size)

    def strangers(self, run: int) -> np.ndarray:
        """Return the clients whose personal state no round has touched, where there is any."""
        waiting = np.arange(self._clients)
        if self.method.pooled or not tree.leaves([crew.store.rows for crew in self._crews]):
            return waiting[:0]
        for round in range(self.round):
            waiting = np.setdiff1d(waiting, self._drawn(run, round), assume_unique=True)
            if len(waiting) <= self._clients - len(self._eligible[run]):
                break  # the rest have nothing to train on
        return waiting

    def advance(self) -> Round:
        """Do one round of every run."""
        method = self.method

        def step(sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
            return method.client_step(sent, personal, local)

        calls = [
            Call(cohort, method.send(state, self._tensor(cohort)), members, even=method.steps > 0)
            for cohort, state, members in zip(
                [self.cohort(n) for n in range(len(self.runs))],
                self.states,
                self._trained,
                strict=True,
            )
        ]
        seats: list[Seat] = []
        parts: list[Tree] = []
        for crew in self._crews:
            present, result = crew.run("step", step, calls, self.round)
            if not present:
                continue
            reports, personal = result
            self._refuse_nonfinite(present, reports, personal)
            crew.store.put(crew.rows(present), personal)
            seats += present
            parts.append(reports)
        _refuse_unequal(parts)
        reports = tree.concat(parts)
        place = {seat: number for number, seat in enumerate(seats)}
        traffic = []
        for run, call in enumerate(calls):
            rows = [place[Seat(run, int(client))] for client in call.cohort]
            own = tree.take(reports, self._tensor(np.array(rows)))
            traffic.append(Traffic(1, 0, 0) if method.pooled else _traffic(call, own))
            cohort = self._tensor(call.cohort)
            self.states[run] = method.server_step(self.states[run], cohort, own)
        self.round += 1
        return Round(traffic, sum(crew.examples("step") for crew in self._crews))

    def padding(self) -> float:
        """Return the largest share of padding in any architecture's last round."""
        return max(crew.padding("step") for crew in self._crews)

    def _refuse_nonfinite(self, seats: list[Seat], reports: Tree, personal: Tree) -> None:
        """Stop before rubbish reaches the server; infinity may stand for "not yet" at a client."""
        broken = [
            tree.rows_where(lambda leaf: ~torch.isfinite(leaf), reports),
            tree.rows_where(torch.isnan, personal),
        ]
        told = [found for found in broken if found is not None]
        if not told or not bool(torch.stack(told).any()):
            return
        rows = torch.stack(told).any(0)
        seat = seats[int(rows.nonzero()[0])]
        run = self.runs[seat.run]
        raise Diverged(
            f"round {self.round + 1}, seed {run.seed}: {run.lessons.names[seat.client]} produced "
            f"NaN or infinity ({int(rows.sum())} of {len(seats)} clients did); lower lr (now "
            f"{self.method.lr}) or set clip, and start again"
        )

    # Judging.

    def judge(
        self,
        exams: Sequence[Exam] | None = None,
        *,
        only_global: bool = False,
        keep: bool = False,
        newcomers: bool = False,
    ) -> list[Verdict]:
        """Score every client's models on validation data, or on an exam and validation data both.

        `only_global` skips `deploy`, which may train; `keep` returns the personal models; clients
        that are `newcomers` adapt instead of deploying.
        """
        mark = marking(
            self.method,
            beside=exams is not None,
            only_global=only_global,
            keep=keep,
            newcomers=newcomers,
        )
        rows = [run.lessons.val for run in self.runs] if exams is None else [e.test for e in exams]
        calls = [
            call._replace(exams=self._library.examined(n, self.runs[n].seed, rows[n]))
            for n, call in enumerate(self._everyone())
        ]
        kind = " ".join(
            name
            for name, chosen in {
                "judge": True,
                "val": exams is None,
                "global": only_global,
                "keep": keep,
                "newcomers": newcomers,
            }.items()
            if chosen
        )
        results = [crew.run(kind, mark, calls, self.round) for crew in self._crews]
        return [self._verdict(run, results) for run in range(len(self.runs))]

    def meet(self) -> None:
        """Let every client look at the present state without training: newcomers catching up."""
        method = self.method

        def look(sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
            return method.meet(sent, personal, local)

        for crew in self._crews:
            seats, personal = crew.run("meet", look, self._everyone(), self.round)
            crew.store.put(crew.rows(seats), personal)

    def _everyone(self) -> list[Call]:
        """Call every client of every run, with its own data."""
        clients = np.arange(self._clients)
        return [
            Call(clients, self.method.send(state, self._tensor(clients)), members)
            for state, members in zip(self.states, self._judged, strict=True)
        ]

    def _verdict(self, run: int, results: list[tuple[list[Seat], Tree]]) -> Verdict:
        """Bring one run's results into the order of its clients."""
        clients, parts, deployed = [], [], []
        for seats, (scores, facts, kept) in results:
            mine = sorted((seat.client, n) for n, seat in enumerate(seats) if seat.run == run)
            rows = self._tensor(np.array([n for _, n in mine]))
            clients += [client for client, _ in mine]
            parts.append(
                tree.map(lambda leaf: leaf.cpu().numpy(), tree.take((scores, facts), rows))
            )
            if tree.leaves(kept):
                deployed.append((np.array([client for client, _ in mine]), tree.take(kept, rows)))
        order = np.argsort(clients)
        scores, facts = tree.map(lambda *leaves: np.concatenate(leaves)[order], *parts)
        return Verdict(scores, facts, deployed)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _hands(device: torch.device, networks: Mapping[str, Network]) -> int:
    """Return over how many threads single clients are spread.

    Threads share torch's random numbers, so networks that draw some keep to one.
    """
    draws = any(network.draws for network in networks.values())
    return torch.get_num_threads() if device.type == "cpu" and not draws else 1


def _eligible(lessons: Lessons) -> np.ndarray:
    """Return the clients that have something to train on: the others cannot change anything."""
    able = np.array([n for n, rows in enumerate(lessons.train) if len(rows)])
    if not len(able):
        raise DataError("no client has a training example; check the partition and the split")
    return able


def _traffic(call: Call, reports: Tree) -> Traffic:
    """Count exactly what would cross the network: trees down and up, leaf by leaf."""
    clients = len(call.cohort)
    down = clients * tree.nbytes(call.sent.shared) + tree.nbytes(call.sent.own)
    return Traffic(clients, down, tree.nbytes(reports))


def _refuse_unequal(parts: list[Tree]) -> None:
    """Across architectures only equal shapes can be aggregated; name the leaf that differs."""
    named = [tree.named(part) for part in parts]
    for other in named[1:]:
        for name in sorted(set(named[0]) | set(other)):
            shapes = [
                tuple(leaves[name].shape[1:]) if name in leaves else "absent"
                for leaves in (named[0], other)
            ]
            if shapes[0] != shapes[1]:
                raise MethodError(
                    f"report leaf {name!r} is {shapes[0]} for one architecture and {shapes[1]} for "
                    "another; across architectures report only tensors of equal shape, such as "
                    "soft predictions"
                )
