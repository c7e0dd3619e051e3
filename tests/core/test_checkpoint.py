"""Checkpoints: what is written comes back, whole, or is refused with a remedy."""

import errno
import os
import stat
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.core import checkpoint, tree
from idiolect.errors import CheckpointError, IdiolectError

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]


class Pair(NamedTuple):
    left: Any
    right: Any


leaves = st.builds(
    lambda shape, dtype, seed: (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
trees = st.recursive(
    leaves | st.just(()),
    lambda inner: (
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)
metas = st.dictionaries(
    st.text(max_size=5), st.integers() | st.text() | st.floats(allow_nan=False), max_size=3
)


def load(path, template):
    """Read a checkpoint into the template's form."""
    named, meta = checkpoint.read(path)
    return checkpoint.fitted(template, named, path), meta


@settings(max_examples=40, deadline=None)
@given(kept=trees, meta=metas)
def test_a_tree_comes_back_as_it_was(tmp_path_factory, kept, meta):
    path = tmp_path_factory.mktemp("kept") / "a.safetensors"
    checkpoint.save(path, kept, meta)
    found, about = load(path, tree.zeros_like(kept))
    assert about == meta
    assert tree.named(found).keys() == tree.named(kept).keys()
    for left, right in zip(tree.leaves(found), tree.leaves(kept), strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


def test_views_of_one_stack_are_written_apart(tmp_path):
    stack = torch.arange(6.0).reshape(2, 3)
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, (stack[0], stack[1], stack.T), {})
    found, _ = load(path, (stack[0], stack[1], stack.T))
    assert torch.equal(found[2], stack.T)


@pytest.mark.parametrize("size", [0, 3, 40, 100])
def test_a_damaged_file_is_told(tmp_path, size):
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"w": torch.zeros(50)}, {"round": 1})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(path)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"w": torch.zeros(4)}, r"w is float32 \(3,\), expected float32 \(4,\)"),
        ({"w": torch.zeros(3, dtype=torch.int64)}, "expected int64"),
        ({"w": torch.zeros(3), "v": torch.zeros(1)}, "no value for 'v'"),
        ({}, "unknown value 'w'"),
    ],
)
def test_another_network_is_refused(tmp_path, template, words):
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"w": torch.zeros(3)}, {})
    with pytest.raises(CheckpointError, match=words):
        load(path, template)


def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"w": torch.ones(3)}, {})

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IdiolectError, match="No space left on device") as caught:
        checkpoint.save(path, {"w": torch.zeros(3)}, {})
    assert "\n" not in str(caught.value)
    assert torch.equal(load(path, {"w": torch.ones(3)})[0]["w"], torch.ones(3))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_the_folder_is_synced_after_the_file_has_its_name(tmp_path, monkeypatch):
    """A power cut after a save must not undo the renaming."""
    synced, fsync = [], os.fsync

    def noted(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        synced.append((kind, (tmp_path / "a.safetensors").exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    checkpoint.save(tmp_path / "a.safetensors", {"w": torch.ones(3)}, {})
    assert synced == [("file", False), ("folder", True)]
