"""Means without some rows, in one pass, against the same written out."""

from pathlib import Path

import emulate
import pytest
import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.kernels import row_average
from idiolect.kernels.deferred import DeferredTensor

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Take every leaf for a large one on a GPU."""
    emulate.use(monkeypatch, tmp_path)
    monkeypatch.setattr(row_average, "_LARGE", 0)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    leaf, gone = torch.randn(shape, dtype=dtype), torch.zeros(shape[0], dtype=torch.bool)
    gone[[1, 4]] = True
    leaf[1] = float("nan")
    return leaf, gone, torch.rand(shape[0], dtype=dtype) * ~gone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 4), (6, 12, 7), (6, 1100)])
def test_a_mean_leaves_rows_out(large: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    leaf, gone, weight = drawn(*shape, dtype=dtype)
    late = row_average.without(gone, leaf)
    assert isinstance(late, DeferredTensor)
    kept = torch.tensordot((weight / weight.sum())[~gone], leaf[~gone], dims=1)
    torch.testing.assert_close(tree.mean({"a": late}, weight)["a"], kept)
    assert late.deferred.waits  # it was not copied


def test_other_readers_see_zeros(large: None) -> None:
    leaf, gone, weight = drawn(6, 8)
    late, expected = row_average.without(gone, leaf), leaf.clone()
    expected[gone] = 0
    assert torch.equal(late.sum(1), expected.sum(1))
    assert torch.equal(late.median(0).values, expected.median(0).values)
    torch.testing.assert_close(row_average.average(weight, late), weight @ expected)


def test_odd_rows_are_copied(large: None) -> None:
    """Of 16 bytes at a time a row must be whole."""
    leaf, gone, _ = drawn(6, 3)
    assert type(row_average.without(gone, leaf)) is Tensor
