"""Batches that a GPU draws are NumPy's, and examples taken at once are those of two steps.

All through an emulator.
"""

import emulate
import numpy as np
import pytest
import torch

from idiolect.core.batches import Pool, Request
from idiolect.engine.batch_plan import BatchPlanner, ClientRows, DeviceShuffler, laid_out
from idiolect.kernels import compiled, gpu_batches

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate.use(monkeypatch)
    monkeypatch.setattr(compiled, "_failed", set())


def members(counts: list[int], seed: int = 3) -> list[ClientRows]:
    starts = np.cumsum([0, *counts])
    return [
        ClientRows(seed, 7 * n, {"train": np.arange(starts[n], starts[n + 1])[::-1]})
        for n in range(len(counts))
    ]


def book(dealt: bool) -> BatchPlanner:
    made = BatchPlanner({"train": Pool(torch.zeros(400, 2), torch.zeros(400))}, torch.device("cpu"))
    made._shuffler = DeviceShuffler(torch.device("cpu")) if dealt else None
    return made


@pytest.mark.parametrize(
    "request_, counts",
    [
        (Request("train", 8, 1, 0, True, 0), [70, 33, 8, 1, 0]),
        (Request("train", 8, 3, 0, True, 2), [9, 16, 24]),  # epochs go on with the same draws
        (Request("train", 5, 1, 7, True, 1), [40, 4, 11]),  # steps, of part of an epoch or of many
        (Request("train", 64, 1, 0, True, 0), [9, 3]),  # fewer examples than a batch: narrowed
    ],
)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_dealt_batches_are_numpys(request_: Request, counts: list[int], kind: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        plans = {}
        for dealt in (False, True):
            own, who = book(dealt), members(counts)
            own.turn(who, 0)
            plan = own.ask(request_)
            for round in (1, 2, 3):
                assert own.turn(who, round)
            assert own.ask(request_) is plan
            plans[dealt] = (plan.rows.clone(), plan.weight.clone(), own.examples, own.planned)
    finally:
        torch.set_default_dtype(before)
    host, device = plans[False], plans[True]
    assert torch.equal(host[0], device[0]) and torch.equal(host[1], device[1])
    assert host[2:] == device[2:] and host[2] == int(host[1].sum())


def test_only_what_numpy_would_draw_is_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they differ the host goes on drawing, and says so."""
    asked = Request("train", 4, 1, 0, True, 0)
    plain, wrong = book(False), book(True)
    real = gpu_batches.shuffle
    monkeypatch.setattr(
        gpu_batches,
        "shuffle",
        lambda *own: real(*own[:5], (own[5][0], own[5][1] + 1, 0), *own[6:]),
    )
    for own in (plain, wrong):
        own.turn(members([9, 6]), 0)
        own.ask(asked)
    plain.turn(members([9, 6]), 1)
    with pytest.warns(UserWarning, match="no kernel for batches"):
        assert wrong.turn(members([9, 6]), 1)
    assert torch.equal(plain.ask(asked).rows, wrong.ask(asked).rows)


def test_other_clients_and_other_shapes() -> None:
    asked = Request("train", 4, 1, 0, True, 0)
    dealt, plain = book(True), book(False)
    for own in (dealt, plain):
        own.turn(members([9, 6]), 0)
        own.ask(asked)
        assert own.turn(members([5, 10], seed=5), 1)  # as many steps: filled in place
    assert torch.equal(dealt.ask(asked).rows, plain.ask(asked).rows)
    assert not dealt.turn(members([9, 6, 2]), 2)  # another client is another shape


def test_what_the_host_must_draw() -> None:
    shuffler, own = DeviceShuffler(torch.device("cpu")), book(False)
    own.turn(members([9, 6]), 0)
    asked = Request("train", 4, 1, 0, True, 0)
    plan = own.ask(asked)
    assert shuffler.supports(asked, plan, 9)
    assert not shuffler.supports(asked._replace(shuffled=False), plan, 9)
    assert not shuffler.supports(asked._replace(sample=3), plan, 9)
    assert not shuffler.supports(asked._replace(epochs=2000), plan, 9)
    assert not shuffler.supports(asked._replace(steps=5000), plan, 9)
    assert not shuffler.supports(asked, plan._replace(places=plan.rows), 9)
    steps = Request("train", 4, 1, 3, True, 0)
    own.ask(steps)
    layout, _ = laid_out([9000], steps)  # of the same shape, but more than a thread would shuffle
    one = own.ask(steps)._replace(rows=torch.zeros(1, 3, 4, dtype=torch.int64))
    many = [ClientRows(0, 0, {"train": np.arange(9000)})]
    assert shuffler.fill(many, 0, steps, one, lambda *_: layout) is layout
    far = [ClientRows(1 << 40, n, {"train": np.arange(9)}) for n in (0, 1)]  # a seed of two words
    layout, _ = laid_out([9, 9], asked)
    assert shuffler.fill(far, 0, asked, plan, lambda *_: layout) is layout


@pytest.mark.parametrize(
    "shape, shifts",
    [((3, 4, 4), (3, 1, 1)), ((1, 5, 7), (1,)), ((20,), (1,)), ((3, 3, 3), (3, 1, 1))],
)
def test_taken_and_decoded(
    shape: tuple[int, ...],
    shifts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    x = torch.randint(256, (9, *shape), dtype=torch.uint8)
    y = torch.arange(9)
    pool = Pool(x, y, 100 * torch.rand(shifts), 0.01 + torch.rand(shifts))
    rows = torch.randint(9, (2, 3, 4))
    expected = pool.decode(x[rows])

    def take(rows: torch.Tensor) -> torch.Tensor:
        return gpu_batches.take(x, rows, *pool[2:4])

    got = torch.vmap(take)(rows)
    by_step = torch.vmap(torch.vmap(take), (1,))(rows)
    assert all(step.is_contiguous() for step in got.unbind(1))  # for all clients
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(by_step, expected.transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_what_has_no_kernel_is_told() -> None:
    """No GPU here, so it is asked of tensors that say they are on one."""

    class Far(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    def far(*shape: int, kind: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind).as_subclass(Far)

    def suits(x: torch.Tensor, shift: torch.Tensor) -> bool:
        return gpu_batches.suits_take(x, shift, torch.zeros_like(shift))

    shift = torch.zeros(3, 1, 1)
    assert suits(far(5, 3, 8, 8), shift) and suits(far(5, 3, 8, 8), torch.zeros(1))
    assert not gpu_batches.suits_take(far(5, 3, 8, 8), shift, torch.zeros(1))
    assert not suits(far(5, 3, 8, 8, kind=torch.float32), shift)
    assert not suits(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), shift)
    assert not suits(far(5, 3, 8, 8), torch.zeros(8))
    assert not suits(far(5, 3, 8, 8), torch.zeros(1, 8, 1))
    assert not suits(far(5, 3, 8, 8), torch.zeros(3))
    assert not suits(far(5, 3, 8, 8), shift.double())
