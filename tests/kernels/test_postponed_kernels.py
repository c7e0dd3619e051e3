"""Kernels without a choice that are missing: torch does their work until the next round."""

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from idiolect.kernels import autotune, compiled


class Chip:
    """Compiles when told to, or fails; a kernel that was loaded notes its launches."""

    def __init__(self) -> None:
        self.go_on, self.threads, self.launches = threading.Event(), set[int](), 0
        self.fails = False

    def compile(self, text: str, name: str) -> tuple[bytes, str]:
        assert self.go_on.wait(20)
        self.threads.add(threading.get_ident())
        if self.fails:
            raise RuntimeError("no such header")
        return text.encode(), name

    def load(self, binary: bytes, names: list[str]) -> dict[str, "Chip"]:
        return {names[0]: self}

    def set_shared_memory_config(self, shared: int) -> None:
        pass

    def __call__(self, *given: Any) -> None:
        self.launches += 1


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Chip]:
    found = Chip()
    monkeypatch.setattr(compiled, "_tools", lambda: (found.compile, found.load))
    monkeypatch.setattr(compiled, "make_current", lambda: None)
    monkeypatch.setattr(compiled, "_binaries", {})
    monkeypatch.setattr(compiled, "_failed", set())
    monkeypatch.setattr(compiled, "_tried", set())
    monkeypatch.setattr(compiled, "_folder", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compiled.kernel.cache_clear()
    autotune.forget()
    autotune.set_cache(None, meanwhile=True)
    yield found
    found.go_on.set()
    autotune.set_cache(None)
    autotune.forget()
    compiled.kernel.cache_clear()


def mask() -> str:
    """Say who did the work."""

    def own() -> str:
        compiled.launch("gather.cu", "take", {"NUMBERS": 4}, (1, 1, 1), 32, [])
        return "ours"

    return compiled.attempt("masks", own, lambda: "torch's")


def next_round() -> None:
    autotune.settle(autotune._Choosing.turn + 1)


def until_compiled() -> None:
    end = time.monotonic() + 20
    while not all(own.done for own in autotune._ahead.values()):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_torch_does_the_work_till_the_next_round(chip: Chip) -> None:
    recorded = autotune.recording()
    assert [mask(), mask()] == ["torch's"] * 2 and len(autotune._ahead) == 1
    outdated = recorded()
    next_round()
    assert mask() == "torch's" and not outdated()
    chip.go_on.set()
    until_compiled()
    assert mask() == "torch's" and not outdated()  # a round is in one form
    next_round()
    assert mask() == "ours" and outdated() and chip.launches == 1
    assert threading.get_ident() not in chip.threads and not autotune._ahead


def test_what_cannot_be_compiled_is_told_once_and_left_to_torch(chip: Chip) -> None:
    chip.fails = True
    chip.go_on.set()
    assert mask() == "torch's"
    until_compiled()
    next_round()
    with pytest.warns(UserWarning, match="masks here, so slower: no such header"):
        assert mask() == "torch's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mask() == "torch's"


def test_what_was_compiled_by_an_earlier_run_is_used_at_once(chip: Chip) -> None:
    chip.go_on.set()
    mask()
    until_compiled()
    autotune.forget()
    compiled._binaries.clear()
    compiled._tried.clear()
    chip.go_on.clear()
    assert mask() == "ours"


def test_chosen_first_all_is_compiled_where_it_is_launched(chip: Chip) -> None:
    autotune.set_cache(None)
    chip.go_on.set()
    assert mask() == "ours" and chip.threads == {threading.get_ident()}
