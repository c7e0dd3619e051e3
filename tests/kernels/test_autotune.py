"""Choices among forms: measured once, kept, and measured again only where they do not hold."""

import re
import runpy
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from idiolect.kernels import attention, autotune, convolution, group_norm, layer_norm, linear
from idiolect.kernels.attention import AttentionSizes
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.group_norm import GroupNormSizes
from idiolect.kernels.layer_norm import LayerNormSizes
from idiolect.kernels.linear import LinearSizes


class Form:
    """Takes so many milliseconds, or fails; counts how often it was called."""

    def __init__(self, takes: float, fails: bool = False, wrong: float = 0.0) -> None:
        self.takes, self.fails, self.wrong, self.calls = takes, fails, wrong, 0

    def __call__(self, x: Tensor, *sizes: object) -> Tensor:
        self.calls += 1
        if self.fails:
            raise RuntimeError("too little memory on the chip")
        return x * (1 + self.wrong)


shipping = runpy.run_path(str(Path(__file__).parents[2] / "scripts/ship_choices.py"))
ZEROS = (torch.zeros(4, 5), LinearSizes(4, 1, 5, 5))


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(
        autotune,
        "milliseconds",
        lambda form, *inputs: form.takes if form(*inputs) is not None else 0,
    )
    monkeypatch.setattr(autotune, "_file", tmp_path / "kernels.json")
    autotune.forget()
    return tmp_path / "kernels.json"


def test_the_fastest_that_runs_is_chosen_and_kept(timed: Path) -> None:
    known = {"plain": Form(3), "quick": Form(2), "broken": Form(1, fails=True)}
    assert autotune.choose("key", known, ZEROS) is known["quick"]
    again = {"plain": Form(1), "quick": Form(2)}
    autotune.forget()
    assert autotune.choose("key", again, ZEROS) is again["quick"]  # as kept, not measured
    assert again["plain"].calls == again["quick"].calls == 1  # compared
    assert autotune.choose("another key", again, ZEROS) is again["plain"]
    assert sorted(autotune.read_cache(timed).values()) == ["plain", "quick"]


def test_a_lack_of_memory_says_nothing_about_a_form(timed: Path) -> None:
    """Whoever asked makes smaller blocks; that a form found no room is not kept."""

    def full(x: Tensor, *sizes: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        autotune.choose("key", {"plain": Form(3), "full": full}, ZEROS)
    assert not autotune.read_cache(timed)


def test_a_form_with_other_results_is_never_chosen() -> None:
    """On random numbers, whatever it is called with; and none of torch's own are used up."""
    known = {
        "plain": Form(3), "wrong": Form(1, wrong=1e-3), "broken": Form(1, wrong=float("nan")),
        "rounded": Form(2, wrong=1e-6),
    }  # fmt: skip
    before = torch.get_rng_state()
    assert autotune.choose("key", known, ZEROS) is known["rounded"]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_plain_form_need_not_be_exact() -> None:
    """The library may round in single precision; what it gives in double precision counts."""

    class Rounded(Form):
        def __call__(self, x: Tensor, *sizes: object) -> Tensor:
            return super().__call__(x) * (1 if x.dtype == torch.float64 else 1 + 1e-3)

    known = {"plain": Rounded(3), "exact": Form(2), "alike": Form(1, wrong=1e-3)}
    assert autotune.choose("key", known, ZEROS) is known["exact"]


def test_nothing_is_chosen_while_a_network_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its few examples are of sizes that no round has; to choose for them would take seconds."""
    monkeypatch.setattr(autotune, "_has_forms", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    known = {"plain": Form(3), "quick": Form(2)}
    with autotune.trial():
        autotune.fastest("relu", ZEROS[1], lambda: known, ZEROS[0])
    assert (known["plain"].calls, known["quick"].calls) == (1, 0)
    autotune.fastest("relu", ZEROS[1], lambda: known, ZEROS[0])
    assert known["quick"].calls


def test_clients_that_are_compared() -> None:
    given = (torch.randn(4, 5), torch.randn(4, 2, 3), LinearSizes(4, 1, 5, 5))
    x, w, sizes = autotune.few(given)
    assert torch.equal(x, given[0][:2].double()) and torch.equal(w, given[1][:2].double())
    assert sizes == LinearSizes(2, 1, 5, 5)
    assert autotune.few((given[0][:1], LinearSizes(1, 1, 5, 5)))[1].groups == 1


def test_where_no_kernel_runs_it_is_said_why() -> None:
    known = {"plain": Form(3), "broken": Form(1, fails=True), "other": Form(1, fails=True)}
    with pytest.warns(UserWarning, match="no kernel for LinearSizes.*broken: too little memory"):
        assert autotune.choose("key", known, ZEROS) is known["plain"]


@pytest.mark.parametrize("why", ["gone", "fails", "wrong"])
def test_a_choice_that_does_not_hold_is_made_again(timed: Path, why: str) -> None:
    autotune.choose("key", {"plain": Form(3), "quick": Form(2)}, ZEROS)
    known = {"plain": Form(3), "slow": Form(4)}
    if why != "gone":
        known["quick"] = Form(2, fails=why == "fails", wrong=1e-3)
    assert autotune.choose("key", known, ZEROS) is known["plain"]
    assert list(autotune.read_cache(timed).values()) == ["plain"]


class FailsInSingle(Form):
    """As a kernel of the library that does not take numbers as they lie in memory."""

    def __call__(self, x: Tensor, *sizes: object) -> Tensor:
        self.fails = x.dtype != torch.float64
        return super().__call__(x)


def test_where_the_plain_form_fails_another_that_is_right_is_chosen(timed: Path) -> None:
    """One that is wrong is not, though nothing else runs; then the error is told."""
    known = {"plain": FailsInSingle(1), "wrong": Form(2, wrong=1e-3), "right": Form(3)}
    assert autotune.choose("key", known, ZEROS) is known["right"]
    assert "too little memory" in autotune.trials["key"]["plain"]
    autotune.forget()
    assert autotune.choose("key", known, ZEROS) is known["right"]  # as kept: it is compared
    only = autotune.choose("another", {"plain": FailsInSingle(1), "wrong": known["wrong"]}, ZEROS)
    with pytest.raises(RuntimeError, match="too little memory"):
        only(*ZEROS)


def test_nothing_is_compared_with_a_form_that_failed() -> None:
    """Without a result in double precision no form can be called right."""
    known = {"plain": Form(1, fails=True), "other": Form(2)}
    assert autotune.choose("key", known, ZEROS) is known["plain"]
    assert known["other"].calls == 0


def test_everything_that_a_form_makes_is_compared() -> None:
    """A gradient by weights may be right and that by biases wrong; masks are no numbers."""

    def form(wrong: float, flip: bool = False) -> Form:
        class Several(Form):
            def __call__(self, x: Tensor, *rest: object) -> Tensor:
                made = super().__call__(x)
                return made, made * (1 + wrong), (x > 0) ^ flip  # type: ignore[return-value]

        return Several(1 if wrong else 2)

    known = {"plain": form(0.0), "wrong": form(1e-2), "right": form(0.0, flip=True)}
    known["plain"].takes = 3
    assert autotune.choose("key", known, ZEROS) is known["right"]


def test_masks_are_drawn_too() -> None:
    """What is given may hold no mask yet; no place may see nothing."""
    sizes = LinearSizes(3, 1, 5, 5)
    given = autotune.random_like((torch.zeros(3, 5), torch.zeros(3, 9).bool(), sizes))
    mask = given[1]
    assert given[0].norm() > 0 and mask[:, 0].all() and 0 < mask[:, 1:].sum() < mask[:, 1:].numel()
    assert torch.equal(autotune.few(given)[1], mask[:2])


def test_a_damaged_file_costs_a_measurement_not_the_run(timed: Path) -> None:
    for text in ("{", "[1, 2]"):
        timed.write_text(text)
        known = {"plain": Form(3), "quick": Form(2)}
        assert autotune.choose("key", known, ZEROS) is known["quick"]
    autotune.set_cache(None)
    assert autotune.choose("key", {"plain": Form(3)}, ZEROS).takes == 3


def test_forms_are_compiled_side_by_side_and_what_fails_is_left_for_later() -> None:
    """Each waits for the others: one after the other, they would wait for ever."""
    meet = threading.Barrier(2, timeout=20)

    class Waiting(Form):
        def __call__(self, x: Tensor, *sizes: object) -> Tensor:
            meet.wait()
            return super().__call__(x)

    known = {"plain": Waiting(1), "own": Waiting(1), "broken": Form(1, fails=True)}
    autotune.compile_all(known, ZEROS)
    assert [form.calls for form in known.values()] == [1, 1, 1]


def test_sizes_that_are_alike_share_a_choice() -> None:
    """Up to twice as many clients, or images; examples of a dense layer are its kernels'."""
    blocks = [autotune.problem("relu", LinearSizes(n, 10, 5, 3), "tf32") for n in range(1, 10)]
    assert [blocks.index(one) + 1 for one in blocks] == [1, 2, 3, 3, 5, 5, 5, 5, 9]
    images = {autotune.problem("convolve", ConvShape(3, n, *[5] * 8), "tf32") for n in (9, 12, 16)}
    assert len(images) == 1
    assert autotune.problem("relu", LinearSizes(4, 12, 5, 3), "tf32") not in blocks


def test_choices_come_with_the_package(timed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give way to one's own."""
    cache = {
        "no GPU | torch 2.1 | 00 3 | key": "quick",
        "a chip | torch 2.1 | 00 3 | key": "plain",
        "no GPU | torch 2.1 | 00 2 | older": "quick",
    }
    table, stale = shipping["shipped"]([cache], {"no GPU": {"older": "plain"}}, "00 3")
    assert table["no GPU"] == {"key": "quick", "older": "plain"} and stale == 1
    monkeypatch.setattr(autotune, "_shipped", lambda: table)
    known = {"plain": Form(1), "quick": Form(2), "slow": Form(3)}
    assert autotune.choose("key", known, ZEROS) is known["quick"]
    assert known["slow"].calls == 0 and not timed.exists()
    autotune.add_to_cache(timed, {autotune._entry("key"): "slow"})
    autotune.forget()
    assert autotune.choose("key", known, ZEROS) is known["slow"]


def test_a_runs_cache_becomes_what_the_package_brings(
    timed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the script, from the file that a run on a chip left to what another one there reads."""
    monkeypatch.setattr(autotune, "_chip", lambda: "a chip")
    what = autotune.problem("relu", LinearSizes(20, 1, 5, 5), torch.float32)
    autotune.choose(what, {"plain": Form(3), "quick": Form(2)}, ZEROS)
    autotune.add_to_cache(timed, {"a chip | torch 2.1 | 00 1 | older": "quick"})
    monkeypatch.setattr(sys, "argv", ["ship_choices.py", str(timed)])
    place = SimpleNamespace(files=lambda package: tmp_path)
    version = autotune.version()
    monkeypatch.setattr(autotune, "version", lambda: version)
    main = shipping["main"]
    monkeypatch.setitem(main.__globals__, "TABLE", tmp_path / "choices.json")
    main()
    assert capsys.readouterr().out == "{'a chip': 1} 1 stale, left out\n"
    monkeypatch.setattr(autotune, "resources", place)
    monkeypatch.setattr(autotune, "_file", tmp_path / "of another run.json")
    autotune.forget()
    autotune._shipped.cache_clear()
    known = {"plain": Form(1), "quick": Form(2), "slow": Form(3)}
    same = autotune.problem("relu", LinearSizes(32, 1, 5, 5), torch.float32)
    assert autotune.choose(same, known, ZEROS) is known["quick"] and not known["slow"].calls
    autotune._shipped.cache_clear()


SIZES = {
    kind.__name__: kind
    for kind in (ConvShape, LinearSizes, GroupNormSizes, LayerNormSizes, AttentionSizes)
}


def forms_of(what: str) -> Mapping[str, Any]:
    """Return the forms of a problem, as a layer lists them."""
    found = re.fullmatch(r"(\w+)(, channels last)? ((\w+)\(.*\)) (\S+)", what)
    assert found, what
    task, sizes, kind, precision = (found[n] for n in (1, 3, 4, 5))
    shape, half = eval(sizes, SIZES), precision == "torch.bfloat16"
    if kind == "ConvShape":
        return convolution.forms(task, shape, own=not half, rounded=half or precision == "tf32")
    if kind == "LinearSizes":
        return linear.forms(task, shape, own=not half)
    if kind == "GroupNormSizes":
        like = torch.empty(shape[:4], dtype=getattr(torch, precision.split(".")[-1]), device="meta")
        return group_norm.forms(task, shape, like, last=found[2] is not None)
    return (attention if kind == "AttentionSizes" else layer_norm).forms(task, shape)


@pytest.mark.parametrize(
    ("task", "sizes", "precision"),
    [
        ("convolve", ConvShape(20, 32, 3, 8, 8, 16, 3, 3, 1, 1), "tf32"),
        ("weight_gradient", LinearSizes(20, 32, 8, 4), torch.bfloat16),
        ("normalise, channels last", GroupNormSizes(2, 3, 8, 16, 2, 1e-5, True), torch.float32),
        ("layer_norm_gradient", LayerNormSizes(2, 3, 16, 1e-5), torch.float32),
        ("attend", AttentionSizes(2, 3, 9, 9, 8, True, 1.0), torch.bfloat16),
    ],
)
def test_the_forms_of_every_kind_of_problem_can_be_listed(
    task: str, sizes: Any, precision: Any
) -> None:
    assert "plain" in forms_of(autotune.problem(task, sizes, precision))


def test_every_choice_of_the_package_is_a_form_that_exists() -> None:
    """A kernel that was renamed would be measured again on every new machine."""
    for choices in autotune._shipped().values():
        for what, name in choices.items():
            assert name in forms_of(what), what
