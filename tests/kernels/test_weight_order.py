"""Orders in memory of weights against torch's copies."""

from pathlib import Path

import emulate
import pytest
import torch

from idiolect.kernels import weight_order


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(2, 6, 3, 3, 3), (1, 72, 20, 3, 3), (3, 16, 40, 1, 1)])
def test_kernels_equal_copies(
    sizes: tuple[int, ...], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emulate.use(monkeypatch, tmp_path)
    torch.manual_seed(0)
    w, like = torch.randn(sizes), torch.empty(0, dtype=kind)
    channels = sizes[2] + sizes[2] % 4
    wide = torch.zeros(*sizes[:2], *sizes[3:], channels, dtype=kind)
    wide[..., : sizes[2]] = w.permute(0, 1, 3, 4, 2)
    assert torch.equal(weight_order.by_taps(w, like, channels), wide)
    assert torch.equal(weight_order.turned(w, like), w.permute(0, 2, 3, 4, 1).to(kind))
    parts = torch.randn(3, *wide.shape).to(kind)
    back = weight_order.put_back(parts, sizes[2])
    assert back.is_contiguous() and back.dtype == torch.float32
    total = parts[0].float() + parts[1] + parts[2]
    assert torch.equal(back, total[..., : sizes[2]].permute(0, 1, 4, 2, 3))


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_rounded_weights_are_numbers_of_tf32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Larger by what the other factor, cut off to TF32, is less: products are right on average."""
    emulate.use(monkeypatch, tmp_path)
    torch.manual_seed(0)
    w, x = torch.randn(1, 64, 64, 3, 3), torch.randn(1, 64, 3, 3, 64)
    laid = weight_order.turned(w, torch.empty(0), rounded=True)
    assert not (laid.view(torch.int32) & 0x1FFF).any()
    cut = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    off = laid.double() * cut / (w.permute(0, 2, 3, 4, 1).double() * x) - 1
    assert float(off.abs().max()) < 2**-9
    assert abs(float(off.mean())) < 2e-5
