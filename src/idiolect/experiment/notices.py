"""What a user should hear of a run besides its figures: who was left out, who never took part."""

from collections.abc import Mapping, Sequence

import numpy as np

from idiolect.core.method import Method
from idiolect.engine.outcome import Members, Scores
from idiolect.experiment.job import planned
from idiolect.experiment.protocols import Course, Rounds
from idiolect.experiment.run_state import Memory
from idiolect.experiment.sampled_scores import light


def counted(
    job: Course, memory: Memory, clients_of: Sequence[np.ndarray]
) -> tuple[Mapping[str, int], ...]:
    """Add a round to the count of who was left out, by name."""
    counts = [dict(own) for own in memory.left_out] or [{} for _ in job.seeds]
    for own, members, clients in zip(counts, job.members, clients_of, strict=bool(clients_of)):
        for name in (members.names[client] for client in clients):
            own[name] = own.get(name, 0) + 1
    return tuple(counts)


def newly_left_out(job: Course, before: Memory, after: Memory) -> list[str]:
    """Tell of each client when it is left out for the first time."""
    return [
        f"round {after.round}, seed {seed}: {name} reported NaN or infinity and was left out"
        for place, seed in enumerate(job.seeds)
        for name in after.left_out[place]
        if not before.left_out or name not in before.left_out[place]
    ]


def strangers(job: Course, simulation: Rounds) -> list[str]:
    """Tell of clients that took part in no round, and how they come to their models."""
    told = []
    for run, members in enumerate(job.members):
        never = simulation.strangers(run)
        if len(never):
            told.append(
                f"seed {members.seed}: {len(never)} of {len(members.names)} clients took part in "
                f"no round, first {members.names[never[0]]}; they got their models as newcomers do "
                "(adapt), and means are given with and without them"
            )
    return told


def reasons(
    method: Method, facts: Mapping[str, np.ndarray], members: Sequence[Members]
) -> tuple[tuple[str, ...], ...]:
    """Put every client's facts into words; () where the method has none to say."""
    told = tuple(
        tuple(
            method.reason({name: values[place, client] for name, values in facts.items()})
            for client in range(len(own.names))
        )
        for place, own in enumerate(members)
    )
    return told if facts and any(map(any, told)) else ()


def models(job: Course, simulation: Rounds) -> list[str]:
    """Tell where personal models were too many to keep."""
    if light(job, simulation):
        return []
    return [
        f"the personal models of {len(job.members[0].names)} clients take too much room and were "
        "not kept; evaluate.final_clients keeps those of a sample"
    ]


def left_out(job: Course, memory: Memory) -> list[str]:
    """Name the clients whose reports were not used, and how often."""
    told = []
    for seed, counts in zip(job.seeds, memory.left_out, strict=False):
        if counts:
            named = [f"{name} ({count})" for name, count in counts.items()][:8]
            more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
            told.append(
                f"seed {seed}: {len(counts)} clients reported NaN or infinity and were left out of "
                f"rounds, so often: {', '.join(named)}{more}; lower lr, or set clip"
            )
    return told


def privacy(job: Course, memory: Memory) -> list[str]:
    """Repeat a promise of privacy in words."""
    promised = job.method.promise(planned(job, memory.round)).get("privacy")
    return [str(promised["statement"])] if promised else []


def broken(job: Course, final: Scores, scored: Sequence[np.ndarray] | None = None) -> list[str]:
    """Tell of models that were scored though their loss is no number: `deploy` may diverge too."""
    told = []
    tested = np.array([members.test for members in job.members]) > 0
    if scored is not None:
        chosen = np.zeros_like(tested)
        for own, clients in zip(chosen, scored, strict=True):
            own[clients] = True
        tested &= chosen
    for model in sorted({key.split("/")[0] for key in final}):
        rows = np.argwhere(tested & ~np.isfinite(final[f"{model}/loss"]))
        if len(rows):
            seed, client = rows[0]
            told.append(
                f"the {model} model of {len(rows)} of {int(tested.sum())} clients has no finite "
                f"test loss, first {job.members[seed].names[client]} under seed "
                f"{job.seeds[seed]}; its training after the rounds diverged: lower its rate"
            )
    return told
