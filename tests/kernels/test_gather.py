"""Examples taken and decoded at once against the same in two steps."""

from pathlib import Path

import emulate
import pytest
import torch

from idiolect.core.batches import Pool
from idiolect.kernels import gpu_batches

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")


@pytest.mark.parametrize(
    "shape, shifts",
    [((3, 4, 4), (3, 1, 1)), ((1, 5, 7), (1,)), ((20,), (1,)), ((3, 3, 3), (3, 1, 1))],
)
def test_taken_and_decoded(
    shape: tuple[int, ...],
    shifts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    emulate.use(monkeypatch, tmp_path)
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
