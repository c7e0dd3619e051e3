"""Means without some rows, in one pass, against the same written out."""

from typing import Any

import emulate
import pytest
import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.kernels import compiled, linear, row_average
from idiolect.kernels.deferred import DeferredTensor

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take every leaf for one on a GPU; return what is launched."""
    emulate.use(monkeypatch)
    launched: list[str] = []

    def launch(file: str, name: str, *given: Any) -> None:
        launched.append(name)
        compiled.launch(file, name, *given)

    monkeypatch.setattr(row_average, "launch", launch)
    monkeypatch.setattr(row_average, "_has_kernels", lambda leaf: True)
    return launched


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    leaf, gone = torch.randn(shape, dtype=dtype), torch.zeros(shape[0], dtype=torch.bool)
    gone[[1, 4]] = True
    leaf[1] = float("nan")
    return leaf, gone, torch.rand(shape[0], dtype=dtype) * ~gone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_leaves_rows_out(gpu: list[str], dtype: torch.dtype) -> None:
    shapes = [(6, 4), (6, 12, 7), (6, 1100), (6, 3), (6,)]
    every = [drawn(*shape, dtype=dtype) for shape in shapes]
    _, gone, weight = every[0]
    late = {str(n): row_average.without(gone, leaf) for n, (leaf, *_) in enumerate(every)}
    found = tree.mean(late, weight)
    assert gpu == ["average"]
    for mean, leaf, (whole, *_) in zip(found.values(), late.values(), every, strict=True):
        kept = torch.tensordot((weight / weight.sum())[~gone], whole[~gone], dims=1)
        torch.testing.assert_close(mean, kept)
        assert isinstance(leaf, DeferredTensor)
        assert leaf.deferred.waits  # it was not copied


def test_weights_are_read_as_they_lie(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may leave them with channels last: no row of all clients is copied for it."""
    laid, gone, weight = drawn(6, 5, 3, 3, 8)
    leaf, copied = laid.permute(0, 1, 4, 2, 3), list[bool]()
    own = row_average.aligned
    monkeypatch.setattr(
        row_average, "aligned", lambda one: copied.append(not one.is_contiguous()) or own(one)
    )
    late = {"w": row_average.without(gone, leaf)}
    mean = tree.mean(late, weight)["w"]
    torch.testing.assert_close(mean, tree.mean({"w": leaf[~gone]}, weight[~gone])["w"])
    assert mean.is_contiguous()
    leaf[3, 4, 7, 2, 2] = float("-inf")
    marks = row_average.unsound([leaf[[0, 2]], leaf[[3, 5]]], finite=True)
    assert marks.tolist() == [True, False]
    assert gpu == ["average", "unsound"] and not any(copied)


def test_other_readers_see_zeros(gpu: list[str]) -> None:
    leaf, gone, weight = drawn(6, 8)
    late, expected = row_average.without(gone, leaf), leaf.clone()
    expected[gone] = 0
    assert torch.equal(late.sum(1), expected.sum(1))
    assert torch.equal(late.median(0).values, expected.median(0).values)
    torch.testing.assert_close(row_average.averages(weight, [late])[0], weight @ expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_found(
    gpu: list[str], spoilt: float, dtype: torch.dtype
) -> None:
    """In one launch; the largest numbers that there are count as finite."""
    torch.manual_seed(0)
    shapes = {"a": (6, 20_000), "b": (6, 3, 7), "c": (6,), "d": (6, 33_000)}
    every = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    every["a"][1, 17_001] = every["b"][2, 2, 6] = every["c"][4] = every["d"][5, -1] = spoilt
    every["a"][0, 0], every["a"][0, 1] = -torch.finfo(dtype).max, torch.finfo(dtype).max
    broken = [False, True, True, False, True, True]
    leaves = list(every.values())
    assert row_average.unsound(leaves, finite=True).tolist() == broken
    assert gpu == ["unsound"]
    nan = [one and spoilt != spoilt for one in broken]
    assert row_average.unsound(leaves, finite=False).tolist() == nan
    assert tree.unsound_rows(every, finite=True).tolist() == broken  # on a CPU
    assert tree.unsound_rows(every, finite=False).tolist() == nan


def weights(dtype: torch.dtype = torch.float32) -> linear._FactoredWeights:
    """Make weights of 5 clients that took three steps."""
    torch.manual_seed(0)
    found = linear._FactoredWeights.at(torch.randn(1, 24, 12, dtype=dtype), 5)
    for examples in (4, 3, 4):
        both = torch.randn(5, examples, 24, dtype=dtype), torch.randn(5, examples, 12, dtype=dtype)
        found = found.plus(-0.5, *both) or found
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_are_averaged_as_what_they_make(gpu: list[str], dtype: torch.dtype) -> None:
    made = weights(dtype)
    late: Tensor = DeferredTensor(made)
    whole, share = weights(dtype).make(), torch.rand(5, dtype=dtype)
    gone = torch.tensor([False, True, False, False, True])
    other = torch.randn(5, 7, dtype=dtype)
    made._right[2, 1, 5] = made._left[0, 4, 3] = float("nan")  # of clients that are left out
    found = row_average.averages(share, [row_average.without(gone, one) for one in (late, other)])
    assert gpu == ["average"] and made.waits
    for mean, rows in zip(found, (whole, other), strict=True):
        torch.testing.assert_close(mean, torch.tensordot(share[~gone], rows[~gone], dims=1))


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf"), 1e38])
def test_factors_tell_whether_a_row_is_sound(gpu: list[str], spoilt: float) -> None:
    """Those of which a product may be infinite are not."""
    for side, row in (("_left", 3), ("_right", 2)):
        made = weights()
        getattr(made, side)[6, row, 5] = spoilt
        late: Tensor = DeferredTensor(made)
        marks = row_average.unsound([torch.randn(5, 3), late], finite=True)
        assert marks.tolist() == [n == row for n in range(5)]
        assert made.waits
    assert gpu == ["unsound"] * 2


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_a_large_factor_times_a_small_one_is_sound(gpu: list[str], scale: float) -> None:
    """A client with inputs in odd units is not broken; its weights are as any others."""
    made = weights()
    made._left[:, 2] *= scale
    made._right[:, 2] /= scale
    late: Tensor = DeferredTensor(made)
    assert not row_average.unsound([late], finite=True).any()
    assert made.waits and made.make().isfinite().all()


def test_rows_that_lie_in_another_order_are_seen_in_any_shape(gpu: list[str]) -> None:
    """As norms and medians see weights that a step left with channels last."""
    leaf, gone, _ = drawn(6, 4, 5, 3, 3)
    lain = leaf.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    late = row_average.without(gone, lain)
    assert isinstance(late, DeferredTensor)
    exact = torch.where(gone[:, None], 0.0, leaf.flatten(1))
    assert torch.equal(late.flatten(1) * 1.0, exact)
