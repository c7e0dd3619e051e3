"""Means without some rows, in one pass, against the same written out."""

from pathlib import Path
from typing import Any

import emulate
import pytest
import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.kernels import compiled, row_average
from idiolect.kernels.deferred import DeferredTensor

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Take every leaf for one on a GPU; return what is launched."""
    emulate.use(monkeypatch, tmp_path)
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
    least, most = row_average.extremes([leaf[[0, 2]], leaf[[3, 5]]])
    both = torch.stack([leaf[[0, 2]], leaf[[3, 5]]]).flatten(2)
    torch.testing.assert_close(least, both.amin((0, 2)))
    torch.testing.assert_close(most, both.amax((0, 2)))
    assert gpu == ["average", "extremes"] and not any(copied)


def test_other_readers_see_zeros(gpu: list[str]) -> None:
    leaf, gone, weight = drawn(6, 8)
    late, expected = row_average.without(gone, leaf), leaf.clone()
    expected[gone] = 0
    assert torch.equal(late.sum(1), expected.sum(1))
    assert torch.equal(late.median(0).values, expected.median(0).values)
    torch.testing.assert_close(row_average.averages(weight, [late])[0], weight @ expected)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_found(gpu: list[str], spoilt: float) -> None:
    torch.manual_seed(0)
    every = {"a": torch.randn(5, 20_000), "b": torch.randn(5, 3, 7), "c": torch.randn(5)}
    every["a"][1, 17_001] = every["b"][2, 2, 6] = every["c"][4] = spoilt
    every["a"][0, 0] = -3e38
    every["a"][0, 1] = 3e38
    least, most = row_average.extremes(list(every.values()))
    assert (least.isfinite() & most.isfinite()).tolist() == [True, False, False, True, False]
    assert least.isnan().tolist() == [
        False,
        spoilt != spoilt,
        spoilt != spoilt,
        False,
        spoilt != spoilt,
    ]
    assert gpu == ["extremes"]
