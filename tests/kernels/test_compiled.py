"""Launches on threads that have no context yet, and what is done where a kernel fails."""

from typing import Any

import pytest
import torch

from idiolect.kernels import compiled


class Driver:
    """The part of a CUDA driver that knows which context a thread has."""

    def __init__(self, current: int | None, fails: str = "") -> None:
        self.current, self.fails, self.calls = current, fails, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(target: Any, *rest: Any) -> int:
            self.calls.append(name)
            if name == self.fails:
                return 201
            if name == "cuCtxGetCurrent":
                target._obj.value = self.current
            if name == "cuDevicePrimaryCtxRetain":
                target._obj.value = 70 + rest[0].value
            if name == "cuDeviceGet":
                target._obj.value = rest[0]
            if name == "cuCtxSetCurrent":
                self.current = target.value
            return 0

        return call


def test_a_thread_without_context_gets_that_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    driver = Driver(None)
    compiled.make_current(driver)
    assert driver.current == 73
    compiled.make_current(driver)  # has one now
    assert driver.calls.count("cuCtxSetCurrent") == 1
    other = Driver(5)
    compiled.make_current(other)
    assert other.current == 5 and other.calls == ["cuCtxGetCurrent"]


def test_a_driver_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match="error 201"):
        compiled.make_current(Driver(None, fails="cuDevicePrimaryCtxRetain"))


def test_the_context_is_made_current_before_each_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(compiled, "make_current", lambda: told.append("current"))
    monkeypatch.setattr(compiled, "kernel", lambda *key: lambda *given: told.append((key, given)))
    compiled.launch("thin.cu", "convolve", {"C": 3}, (1, 2, 3), 64, ["x"], 128)
    given = ((1, 2, 3), (64, 1, 1), ["x"], 128)
    assert told == ["current", (("thin.cu", "convolve", (("C", 3),), 128), given)]


def test_what_fails_once_is_done_plainly_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_failed", set())
    tried: list[str] = []

    def own() -> str:
        tried.append("own")
        raise RuntimeError("CUDA error: invalid device context\nmore")

    with pytest.warns(UserWarning, match="no kernel for sums here, so slower: CUDA error: invalid"):
        assert compiled.attempt("sums", own, lambda: "plain") == "plain"
    assert compiled.attempt("sums", own, lambda: "plain") == "plain" and tried == ["own"]
    assert compiled.attempt("others", lambda: "own", lambda: "plain") == "own"


def test_too_little_memory_is_no_reason_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine halves its blocks then, and the plain form would need more."""
    monkeypatch.setattr(compiled, "_failed", set())

    def own() -> str:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        compiled.attempt("sums", own, lambda: "plain")
    assert not compiled._failed


def test_a_tensor_without_kernels_is_left_to_torch() -> None:
    def own() -> str:
        raise AssertionError

    assert compiled.attempt("sums", own, lambda: "plain", on=torch.zeros(1)) == "plain"
