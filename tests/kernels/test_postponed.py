"""Choices made meanwhile: the plain form first, the fastest once it was compiled and timed.

A stand-in is taken for a tensor on a GPU, and forms take as long as they say.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idiolect.kernels import (
    attention,
    autotune,
    compiled,
    convolution,
    group_norm,
    layer_norm,
    linear,
    postponed,
)
from idiolect.kernels.attention import AttentionSizes
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.deferred import computed
from idiolect.kernels.group_norm import GroupNormSizes
from idiolect.kernels.layer_norm import LayerNormSizes
from idiolect.kernels.linear import LinearSizes

SIZES = LinearSizes(4, 1, 5, 5)


class OnChip(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Form:
    """Takes so many milliseconds; launches a kernel that is told by its name."""

    def __init__(self, name: str, takes: float, wrong: float = 0.0) -> None:
        self.name, self.takes, self.wrong, self.calls = name, takes, wrong, 0

    def __call__(self, x: Tensor, *sizes: object) -> Tensor:
        if self.name != "plain":
            compiled.launch("file", self.name, {}, (1, 1, 1), 1, [x])
        self.calls += not x.is_meta
        return x * (1 + self.wrong)


class Compiler:
    """Compiles when it is told to go on; notes what, and in which thread."""

    def __init__(self) -> None:
        self.go_on, self.done = threading.Event(), list[str]()
        self.threads = set[int]()

    def at_hand(self, which: compiled.Kernel) -> bool:
        return which[1] in self.done

    def compile(self, which: compiled.Kernel) -> None:
        assert self.go_on.wait(20)
        self.threads.add(threading.get_ident())
        self.done.append(which[1])


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    found = Compiler()
    monkeypatch.setattr(postponed, "compile_ahead", found.compile)
    monkeypatch.setattr(autotune, "at_hand", found.at_hand)
    monkeypatch.setattr(compiled, "make_current", lambda: None)
    monkeypatch.setattr(compiled, "kernel", lambda *which: lambda *given: None)
    monkeypatch.setattr(autotune, "milliseconds", lambda form, *inputs: form.takes)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    autotune.forget()
    autotune.set_cache(tmp_path / "kernels.json", meanwhile=True)
    yield found
    found.go_on.set()
    autotune.set_cache(None)
    autotune.forget()


def forms() -> dict[str, Form]:
    return {"plain": Form("plain", 3), "quick": Form("quick", 1), "slow": Form("slow", 4)}


def use(known: dict[str, Form], sizes: LinearSizes = SIZES) -> None:
    x = torch.ones(sizes.groups, 5).as_subclass(OnChip)
    autotune.fastest("relu", sizes, lambda: known, x)


def until(ready: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.001)


def between_rounds() -> None:
    autotune.settle(autotune._Choosing.turn + 1)


def settled(compiler: Compiler) -> None:
    compiler.go_on.set()
    until(lambda: all(own.compiled for own in autotune._waiting.values()))
    between_rounds()


def calls(known: dict[str, Form]) -> list[int]:
    return [form.calls for form in known.values()]


def test_the_plain_form_is_used_until_the_fastest_was_compiled_and_timed(
    compiler: Compiler,
) -> None:
    known = forms()
    use(known)
    between_rounds()  # nothing is compiled yet
    use(known)
    assert calls(known) == [2, 0, 0] and not compiler.done
    settled(compiler)
    assert sorted(compiler.done) == ["quick", "slow"]
    assert threading.get_ident() not in compiler.threads
    before = calls(known)
    use(known)
    assert [now - then for now, then in zip(calls(known), before, strict=True)] == [0, 1, 0]
    again = forms()  # in another run: compared, and used at once
    autotune.forget()
    use(again)
    assert calls(again) == [1, 2, 0] and not autotune._waiting


def test_a_known_choice_that_is_not_compiled_waits_for_that_form_alone(compiler: Compiler) -> None:
    """A choice that came with the package, say."""
    what = autotune.problem("relu", SIZES, torch.float32)
    autotune.add_to_cache(autotune._file, {autotune._entry(what): "slow"})
    known = forms()
    use(known)
    assert calls(known) == [1, 0, 0]
    settled(compiler)
    assert compiler.done == ["slow"]
    assert calls(known) == [2, 0, 1]  # compared, not timed


def test_a_form_with_other_results_is_not_switched_to(compiler: Compiler) -> None:
    known = forms() | {"quick": Form("quick", 1, wrong=1e-3)}
    recorded = autotune.recording()
    use(known)
    outdated = recorded()
    settled(compiler)
    assert not outdated()  # as it was plain, so it is
    before = calls(known)
    use(known)
    assert calls(known)[0] == before[0] + 1


def test_what_fails_between_rounds_leaves_the_plain_form(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    known = forms()
    use(known)
    monkeypatch.setattr(autotune, "choose", full)
    settled(compiler)
    before = known["plain"].calls
    use(known)
    assert known["plain"].calls == before + 1


def test_recordings_are_outdated_when_all_that_waited_was_chosen(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while some is left, since each new recording takes a while; nor those without it."""
    known, others = forms(), forms()
    without = autotune.recording()()
    recorded = autotune.recording()
    use(known)
    use(others, LinearSizes(9, 1, 5, 5))
    outdated = recorded()
    compiler.go_on.set()
    until(lambda: all(own.compiled for own in autotune._waiting.values()))
    monkeypatch.setattr(time, "perf_counter", iter(range(100)).__next__)
    monkeypatch.setattr(autotune, "_SLOT", (1.5, 1.5))  # time for one
    between_rounds()
    assert len(autotune._waiting) == 1 and not outdated()
    between_rounds()
    assert outdated() and not without()
    recorded = autotune.recording()
    use(known)
    assert not recorded()()


def test_a_round_of_many_tasks_is_held_up_once(compiler: Compiler) -> None:
    """Before its first: the others are of other architectures, for example."""
    known = forms()
    between_rounds()
    use(known)
    compiler.go_on.set()
    until(lambda: all(own.compiled for own in autotune._waiting.values()))
    autotune.settle(autotune._Choosing.turn)
    assert autotune._waiting
    between_rounds()
    assert not autotune._waiting


def test_jobs_that_have_not_begun_are_dropped_when_choices_are_forgotten() -> None:
    pool, done, go_on = postponed._Compilers(), list[int](), threading.Event()

    def job(n: int) -> None:
        go_on.wait(20)
        done.append(n)

    for n in range(50):
        pool.add(partial(job, n))
    began = pool._busy
    threading.Timer(0.05, go_on.set).start()
    pool.drop()
    assert len(done) <= began and pool._busy == 0
    pool.add(partial(job, 50))
    until(lambda: 50 in done)


def test_what_is_met_while_capturing_waits_even_if_it_is_known(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = forms()
    use(known)
    settled(compiler)
    autotune._chosen.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = known["plain"].calls
    use(known)
    assert known["plain"].calls == before + 1 and len(autotune._waiting) == 1


def test_where_there_is_only_the_plain_form_nothing_waits() -> None:
    use({"plain": Form("plain", 1)})
    assert not autotune._waiting


def test_another_precision_is_not_timed_now(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products would be rounded otherwise."""
    use(forms())
    monkeypatch.setattr(autotune, "_precision", lambda tensor: "tf32")
    settled(compiler)
    assert len(autotune._waiting) == 1


THIN, WIDE = ConvShape(2, 3, 3, 8, 8, 16, 3, 3, 1, 1), ConvShape(2, 3, 32, 8, 8, 32, 3, 3, 1, 1)
NORM, ATTEND = GroupNormSizes(2, 3, 8, 16, 2, 1e-5, True), AttentionSizes(2, 3, 9, 9, 8, True, 1.0)
DENSE, LAYER = LinearSizes(2, 3, 8, 4), LayerNormSizes(2, 3, 16, 1e-5)
IMAGES = torch.empty(2, 3, 32, 8, 8)
FORMS: list[tuple[Any, list[Tensor], Any]] = [
    (convolution.forms("weight_gradient", WIDE, rounded=True), [IMAGES, IMAGES], WIDE),
    (
        convolution.forms("convolve", WIDE, rounded=True),
        [IMAGES, torch.empty(2, 32, 32, 3, 3)],
        WIDE,
    ),
    (
        convolution.forms("conv_relu_pool", THIN),
        [torch.empty(2, 3, 3, 8, 8), torch.empty(2, 16, 3, 3, 3), torch.empty(2, 16)],
        THIN,
    ),
    (
        linear.forms("relu", DENSE),
        [torch.empty(2, 3, 8), torch.empty(2, 4, 8), torch.empty(2, 4)],
        DENSE,
    ),
    (group_norm._FORMS["normalise"], [torch.empty(2, 3, 8, 16), *torch.empty(2, 2, 8)], NORM),
    (
        group_norm._FORMS["normalise"],
        [torch.empty(3, 16, 2, 8).permute(2, 0, 3, 1), *torch.empty(2, 2, 8)],
        NORM,
    ),
    (layer_norm.forms("layer_norm", LAYER), [torch.empty(2, 3, 16), *torch.empty(2, 2, 16)], LAYER),
    (attention.forms("attend", ATTEND), [*torch.empty(3, 2, 3, 9, 8)], ATTEND),
]


@pytest.mark.parametrize(("known", "tensors", "sizes"), FORMS)
def test_kernels_of_our_forms_are_told_without_a_gpu(
    known: dict[str, Any], tensors: list[Tensor], sizes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those that a launch compiles, for images in the same order in memory."""

    class Properties:
        multi_processor_count = 100

    noted: list[compiled.Kernel] = []

    def kernel(*which: Any) -> Callable[..., None]:
        noted.append(which)
        return lambda *given: None

    monkeypatch.setattr(compiled, "kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    given = (*tensors, sizes)
    ours = {
        name: form
        for name, form in known.items()
        if name != "plain" and not name.startswith("last")  # which launch ours on a GPU alone
    }
    assert ours
    for name, form in ours.items():
        told = compiled.launched_by(form, *postponed.on_meta(given))
        noted.clear()
        computed(form(*given))
        assert told == noted and 1 <= len(told) <= 2, name


def test_jobs_are_done_in_turn_by_a_few_threads() -> None:
    pool, done = postponed._Compilers(), list[int]()
    for n in range(50):
        pool.add(lambda n=n: done.append(n))  # type: ignore[misc]
    until(lambda: len(done) == 50)
    assert sorted(done) == list(range(50))
    until(lambda: pool._busy == 0)
    pool.add(lambda: done.append(50))
    until(lambda: 50 in done)
