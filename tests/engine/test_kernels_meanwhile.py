"""Whole rounds while forms are compiled: the plain form until a round's end, then the chosen one.

On a CPU, where dense layers are taken to be on a GPU. Their other form is the plain one again, with
a kernel that a slow compiler makes.
"""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import worlds
from idiolect.engine import local_group
from idiolect.engine.backend import Backend
from idiolect.kernels import autotune, compiled, linear, postponed
from test_laws import made

MS = {"plain": 3.0, "quick": 1.0}


class World:
    """Counts how often a form was used, and has a compiler that takes its time, or fails."""

    def __init__(self) -> None:
        self.used = dict.fromkeys(MS, 0)
        self.go_on, self.compiled, self.fails = threading.Event(), set[str](), False

    def forms(self, task: str, sizes: Any, own: bool = True) -> dict[str, Any]:
        plain = FORMS(task, sizes)["plain"]

        def form(name: str) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                if name != "plain":
                    compiled.launch("file", f"{task} {sizes}", {}, (1, 1, 1), 1, [])
                self.used[name] += not given[0].is_meta
                return plain(*given)

            run.takes = MS[name]  # type: ignore[attr-defined]
            return run

        return {name: form(name) for name in MS}

    def compile(self, which: compiled.Kernel) -> None:
        assert self.go_on.wait(20)
        if self.fails:
            raise RuntimeError("no such header")
        self.compiled.add(which[1])

    def launched(self, *which: Any) -> Callable[..., None]:
        if which[1] not in self.compiled:
            raise RuntimeError("no such header")
        return lambda *given: None


FORMS = linear.forms


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    found = World()
    for name in ("_on_cuda", "float32_on_cuda"):
        monkeypatch.setattr(linear, name, lambda x: True)
    monkeypatch.setattr(linear, "forms", found.forms)
    monkeypatch.setattr(local_group, "_has_kernels", lambda device: True)
    monkeypatch.setattr(autotune, "_has_forms", lambda x: True)
    monkeypatch.setattr(autotune, "at_hand", lambda which: which[1] in found.compiled)
    monkeypatch.setattr(autotune, "milliseconds", lambda form, *inputs: form.takes)
    monkeypatch.setattr(postponed, "compile_ahead", found.compile)
    monkeypatch.setattr(compiled, "kernel", found.launched)
    monkeypatch.setattr(compiled, "make_current", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    autotune.forget()
    autotune.set_cache(None, meanwhile=True)
    yield found
    found.go_on.set()
    autotune.set_cache(None)
    autotune.forget()


def compiled_by_now() -> bool:
    return all(own.compiled for own in autotune._waiting.values())


def advance(sim: Any, world: World) -> dict[str, int]:
    """Return how often each form was used in a round, apart from what choosing used."""
    settle, before = autotune.settle, dict(world.used)

    def apart(turn: int) -> None:
        used = dict(world.used)
        settle(turn)
        for name in used:
            before[name] += world.used[name] - used[name]

    stand_in = SimpleNamespace(settle=apart, set_cache=autotune.set_cache)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_group, "autotune", stand_in)
        sim.advance()
    return {name: world.used[name] - before[name] for name in before}


def simulation(kind: str = "vectorised") -> Any:
    data = worlds.federation()
    return worlds.simulation(made("fedavg"), data, build=worlds.Normed, kind=kind, width=8)


def test_rounds_go_on_in_the_plain_form_and_switch_between_two(world: World) -> None:
    sim = simulation()
    rounds = [advance(sim, world) for _ in range(3)]
    assert all(own["plain"] > 0 and own["quick"] == 0 for own in rounds)
    assert autotune._waiting
    world.go_on.set()
    deadline = time.monotonic() + 20
    while not compiled_by_now():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    after = [advance(sim, world) for _ in range(2)]
    assert all(own["plain"] == 0 and own["quick"] > 0 for own in after)
    other = simulation("sequential")
    for _ in range(5):
        other.advance()
    assert not worlds.differing(other.tree["server"], sim.tree["server"], 1e-5)


def test_what_cannot_be_compiled_leaves_the_plain_form(world: World) -> None:
    sim = simulation()
    advance(sim, world)
    world.fails = True
    world.go_on.set()
    deadline = time.monotonic() + 20
    while not compiled_by_now():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.warns(UserWarning, match="no such header"):
        used = advance(sim, world)
    assert used["plain"] > 0 and used["quick"] == 0 and not autotune._waiting
    assert autotune._Choosing.changed is False


def test_it_is_how_rounds_run_unless_told_otherwise() -> None:
    assert Backend().kernels == "meanwhile"


def test_a_process_ends_while_much_is_left_to_compile() -> None:
    """What has begun is waited for, the rest is not begun."""
    script = """
        import time
        from idiolect.kernels import postponed
        for n in range(2000):
            postponed._compilers.add(lambda: time.sleep(0.2))
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr
    assert time.monotonic() - began < 30  # all of them would take 2000 * 0.2 / 8 s
