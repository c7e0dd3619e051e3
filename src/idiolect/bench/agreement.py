"""Right before fast: every workload's backend against the sequential one, on a few rounds."""

from dataclasses import replace

import torch

from idiolect.bench.random_images import federation
from idiolect.bench.sides import simulation
from idiolect.bench.workloads import Workload
from idiolect.core import tree
from idiolect.engine.backend import Backend

ROUNDS = 4  # on CUDA: one eager, one captured, two replayed
LARGEST = 1e-9  # difference in float64 that rounding explains


def differences(work: Workload, backend: Backend) -> tuple[float, float]:
    """Return how far a backend is from the sequential CPU one after a few rounds.

    First with both in float64, then in single precision against float64. The clients are few and
    ragged; the network, the method and its batch are the workload's own.
    """
    batch = work.method.batch
    small = replace(
        work, sizes=(2 * batch + 1, batch, batch // 2 + 1, 2 * batch), cohort=None,
        build=work.steady or work.build,
    )  # fmt: skip
    right = _trained(small, Backend("sequential", "cpu"), torch.float64)
    backend = replace(backend, width=len(small.sizes))  # stacked, though so few may not pay
    exact, single = (
        _distance(right, _trained(small, backend, kind)) for kind in (torch.float64, torch.float32)
    )
    return exact, single


def _trained(work: Workload, backend: Backend, kind: torch.dtype) -> list[torch.Tensor]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        fed = federation(work.sizes, work.shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            start = work.build().state_dict()

        def build() -> torch.nn.Module:
            """Start from the same numbers, whatever the precision."""
            model = work.build()
            model.load_state_dict(start)
            return model

        torch.set_default_dtype(kind)
        sim = simulation(work, fed, backend, build)
        for _ in range(ROUNDS):
            sim.advance()
        return [leaf.cpu().double() for leaf in tree.leaves(sim.tree)]
    finally:
        torch.set_default_dtype(before)


def _distance(right: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """Return the largest difference of any tensor, relative to its largest value."""
    pairs = [(a, b) for a, b in zip(right, found, strict=True) if a.numel()]
    return max(float((a - b).abs().max() / (1e-3 + a.abs().max())) for a, b in pairs)
