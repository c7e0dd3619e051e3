"""Orders in memory of weights against torch's copies."""

from pathlib import Path
from typing import Any

import emulate
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from idiolect.engine import block_runner
from idiolect.kernels import fused_tree_ops, weight_order
from idiolect.kernels.deferred import DeferredTensor


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(2, 6, 3, 3, 3), (1, 72, 20, 3, 3), (3, 16, 40, 1, 1)])
def test_kernels_equal_copies(
    sizes: tuple[int, ...], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    w, like = torch.randn(sizes), torch.empty(0, dtype=kind)
    channels = sizes[2] + sizes[2] % 4
    wide = torch.zeros(*sizes[:2], *sizes[3:], channels, dtype=kind)
    wide[..., : sizes[2]] = w.permute(0, 1, 3, 4, 2)
    assert torch.equal(weight_order.by_taps(w, like, channels), wide)
    assert torch.equal(weight_order.turned(w, like), w.permute(0, 2, 3, 4, 1).to(kind))
    back = w.flip(3, 4).permute(0, 2, 3, 4, 1).to(kind)
    assert torch.equal(weight_order.turned(w, like, flipped=True), back)
    parts = torch.randn(3, *wide.shape).to(kind)
    back = weight_order.put_back(parts, sizes[2])
    assert back.is_contiguous() and back.dtype == torch.float32
    total = parts[0].float() + parts[1] + parts[2]
    assert torch.equal(back, total[..., : sizes[2]].permute(0, 1, 4, 2, 3))


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_rounded_weights_are_numbers_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger by what the other factor, cut off to TF32, is less: products are right on average."""
    emulate.use(monkeypatch)
    torch.manual_seed(0)
    w, x = torch.randn(1, 64, 64, 3, 3), torch.randn(1, 64, 3, 3, 64)
    laid = weight_order.turned(w, torch.empty(0), rounded=True)
    assert not (laid.view(torch.int32) & 0x1FFF).any()
    cut = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    off = laid.double() * cut / (w.permute(0, 2, 3, 4, 1).double() * x) - 1
    assert float(off.abs().max()) < 2**-9
    assert abs(float(off.mean())) < 2e-5


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("half", [True, False])
def test_a_step_leaves_weights_in_the_order_of_their_gradient(
    kind: torch.dtype, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first from weights that all clients share, in torch's order; nothing is put back."""
    if kind == torch.bfloat16 and not half:
        return  # parts are single precision where products are not bfloat16
    emulate.use(monkeypatch)
    monkeypatch.setattr(weight_order, "put_back", None)
    torch.manual_seed(0)
    w, other = torch.randn(8, 6, 3, 3), torch.randn(4, 3)
    parts = torch.randn(2, 4, 8, 3, 3, 6).to(kind)
    like = torch.empty(0, dtype=torch.bfloat16 if half else torch.float32)

    def stepped(w: Tensor, dw: Tensor, other: Tensor) -> Tensor:
        return fused_tree_ops.step(-0.5, [dw, other], [w, other])[0]

    total = (parts[0].float() + parts[1]).permute(0, 1, 4, 2, 3)
    for rows in (None, 0):  # shared, then a row for each client
        dw = weight_order.gradient(parts, 6, half)
        assert isinstance(dw, DeferredTensor) and dw.dtype == torch.float32
        new = vmap(stepped, (rows, 0, 0))(w, dw, other)
        assert torch.equal(new, w - 0.5 * total)
        laid = new.permute(0, 1, 3, 4, 2)
        assert laid.is_contiguous()
        found = weight_order.by_taps(new, like, 6)
        assert torch.equal(found, laid.to(like.dtype))
        assert found.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()  # no copy
        exact = new.permute(0, 2, 3, 4, 1).to(like.dtype)
        assert torch.equal(weight_order.turned(new, like), exact)
        assert torch.equal(weight_order.turned(new.contiguous(), like), exact)
        assert torch.equal(weight_order.turned(new, like, flipped=True), exact.flip(2, 3))
        w = new


def test_weights_that_were_changed_have_no_copy_any_more() -> None:
    """Nor have some of their rows, or a clone: each is rounded anew."""
    like = torch.empty(0, dtype=torch.bfloat16)
    w = weight_order.as_stepped(torch.randn(3, 8, 6, 3, 3), half=True)

    def has_copy(w: Tensor) -> bool:
        found = weight_order.by_taps(w, like, 6)
        assert torch.equal(found, w.permute(0, 1, 3, 4, 2).bfloat16())
        return found.untyped_storage().data_ptr() == w.untyped_storage().data_ptr()

    assert has_copy(w) and has_copy(w.detach().view(1, 3, 8, 6, 3, 3)[0])
    assert not has_copy(w[:2]) and not has_copy(w[1:]) and not has_copy(w.clone())
    w[:1].mul_(2)
    assert not has_copy(w)


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_one_row_for_all_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate.use(monkeypatch)
    w, like = torch.randn(1, 8, 6, 3, 3), torch.empty(0, dtype=torch.bfloat16)
    shared = w.expand(3, *w.shape[1:])
    exact = shared.permute(0, 1, 3, 4, 2).bfloat16()
    assert torch.equal(weight_order.by_taps(shared, like, 6), exact)
    exact = shared.permute(0, 2, 3, 4, 1).bfloat16()
    assert torch.equal(weight_order.turned(shared, like), exact)
    assert torch.equal(weight_order.turned(shared, like, flipped=True), exact.flip(2, 3))


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_a_gradient_is_put_back_for_whatever_else_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for a step, where channels were filled up."""
    emulate.use(monkeypatch)
    parts = torch.randn(2, 3, 8, 3, 3, 8)
    dw = weight_order.gradient(parts, 6, half=True)
    exact = parts.sum(0)[..., :6].permute(0, 1, 4, 2, 3)
    assert dw.shape == exact.shape
    torch.testing.assert_close(dw * 1.0, exact)
    dw = weight_order.gradient(parts, 6, half=True)
    made, _ = vmap(lambda *given: fused_tree_ops.step(1.0, given[:2], given[2:]))(dw, *[exact] * 3)
    torch.testing.assert_close(made, 2 * exact)


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
def test_weights_may_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As parts of a longer row do, while kernels read 8 or 16 bytes at a time."""
    emulate.use(monkeypatch)
    own = weight_order.launch

    def watched(file: str, name: str, *rest: Any) -> None:
        assert not any(one.data_ptr() % 16 for one in rest[3] if isinstance(one, Tensor)), name
        own(file, name, *rest)

    monkeypatch.setattr(weight_order, "launch", watched)
    w, parts = torch.randn(1 + 2 * 64)[1:].view(2, 8, 8, 1, 1), torch.randn(1, 2, 8, 1, 1, 8)
    assert w.data_ptr() % 16
    total = parts[0].permute(0, 1, 4, 2, 3)
    new = weight_order.gradient(parts, 8, half=True).deferred.added(0.5, w)
    assert torch.equal(new, w + 0.5 * total)
    assert torch.equal(weight_order.turned(w, torch.empty(0)), w.permute(0, 2, 3, 4, 1))
    back = w.flip(3, 4).permute(0, 2, 3, 4, 1)
    assert torch.equal(weight_order.turned(w, torch.empty(0), flipped=True), back)


def test_what_a_round_gives_away_can_be_saved(tmp_path: Path) -> None:
    """Without the copy, whose memory torch.load refuses."""
    w = weight_order.as_stepped(torch.randn(3, 8, 6, 3, 3), half=True)
    given = block_runner._own(w)
    torch.save(given[1], tmp_path / "w")
    assert torch.equal(torch.load(tmp_path / "w"), w[1])
    assert given.untyped_storage().nbytes() == 4 * w.numel()
    assert block_runner._own(given) is given
