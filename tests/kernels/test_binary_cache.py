"""Compiled kernels kept between runs; the compiler and the loader are counted, not torch's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from idiolect.kernels import compiled

Load = Callable[[str, str], Any]


class Tools:
    """A compiler that turns text into capitals, and a loader that refuses anything else."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, text: str, name: str) -> tuple[bytes, str]:
        self.compiled.append(text)
        return f"{text.upper()} {name.upper()}".encode(), name

    def load(self, binary: bytes, names: Sequence[str]) -> dict[str, str]:
        if not binary.isupper():
            raise RuntimeError("device kernel image is invalid")
        return {names[0]: binary.decode()}


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tools:
    found = Tools()
    monkeypatch.setattr(compiled, "_tools", lambda: (found.compile, found.load))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(compiled, "_folder", tmp_path / "kernels")
    return found


def test_a_kernel_is_compiled_once(tools: Tools, tmp_path: Path) -> None:
    assert [compiled.load("add", "f") for _ in range(2)] == ["ADD F"] * 2
    assert tools.compiled == ["add"]
    assert [file.suffix for file in (tmp_path / "kernels").iterdir()] == [".cubin"]


def test_another_text_name_or_chip_is_another_kernel(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, name in (("add", "f"), ("add", "g"), ("sub", "f")):
        compiled.load(text, name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    compiled.load("add", "f")
    assert tools.compiled == ["add", "add", "sub", "add"]


def test_a_damaged_file_is_compiled_anew(tools: Tools, tmp_path: Path) -> None:
    compiled.load("add", "f")
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_bytes(b"half of i")
    assert compiled.load("add", "f") == "ADD F"
    assert compiled.load("add", "f") == "ADD F"
    assert tools.compiled == ["add", "add"]


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr(compiled, "_folder", tmp_path / "taken")
    assert [compiled.load("add", "f") for _ in range(2)] == ["ADD F"] * 2
    assert len(tools.compiled) == 2


@pytest.mark.parametrize("folder", [True, False])
def test_torch_does_it_alone_where_nothing_is_kept_or_known(
    folder: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none() -> Any:
        raise ImportError

    monkeypatch.setattr(compiled, "_tools", none)
    monkeypatch.setattr(compiled, "_folder", tmp_path if folder else None)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda text, name: (text, name))
    assert compiled.load("add", "f") == ("add", "f")


def test_torch_still_has_these_tools() -> None:
    compiler, loader = compiled._tools()
    assert callable(compiler) and callable(loader)


def test_kernels_are_compiled_ahead_and_loaded_later(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder or, where there is none, from memory."""
    monkeypatch.setattr(compiled, "_binaries", {})
    monkeypatch.setattr(compiled, "_text", lambda file: file)
    which: compiled.Kernel = ("add", "f", (("N", 3),), 0)
    for _ in range(2):
        assert compiled.at_hand(which) == bool(tools.compiled)
        compiled.compile_ahead(which)
    text = compiled.source("add", {"N": 3})
    assert tools.compiled == [text]
    monkeypatch.setattr(compiled, "_folder", None)
    assert compiled.load(text, "f") == f"{text.upper()} F" and len(tools.compiled) == 1
    compiled._binaries.clear()
    assert not compiled.at_hand(which)


def test_what_would_be_launched_is_listed(tools: Tools) -> None:
    """Forms of all kinds of layers, told without a GPU from inputs that hold no numbers."""

    def work(x: torch.Tensor) -> None:
        compiled.launch("thin.cu", "convolve", {"C": len(x)}, (1, 1, 1), 64, [x], 128)

    x = torch.empty(3, 2, device="meta")
    assert compiled.launched_by(work, x) == [("thin.cu", "convolve", (("C", 3),), 128)]

    def fails(x: torch.Tensor) -> None:
        work(x)
        raise RuntimeError("needs numbers")

    assert compiled.launched_by(fails, x) == []
    assert compiled._thread.kernels is None
