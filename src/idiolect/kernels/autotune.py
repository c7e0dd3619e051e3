"""The fastest form of a stacked layer on this GPU: measured once a shape, then remembered.

With a cache file, choices are kept between runs, so that a run that is repeated or resumed need
neither measure nor compile what it does not use. For common shapes and chips choices come with the
package. A file that is damaged, or cannot be written, costs a measurement, never a run.

To choose takes seconds, most of them for compiling. If it is done `meanwhile`, the plain form is
used first while threads compile the others. They are timed between rounds, and what was recorded is
recorded anew. Kernels that are no matter of choice wait for the next round likewise.
"""

import contextlib
import functools
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idiolect.kernels.compiled import (
    FAILURES,
    Kernel,
    at_hand,
    attempt,
    begin_to_wait,
    launched_by,
    set_postponed,
    summary,
    use_from_now,
    write_cache,
)
from idiolect.kernels.cuda_graph import GraphSequence
from idiolect.kernels.deferred import computed
from idiolect.kernels.postponed import Compilation, Postponed, drop_jobs, on_meta

Form = Callable[..., Any]
FEW = 2  # images of all clients together, for which no form is worth choosing
_TRIALS = 3
# Relative differences that rounding explains in single precision, in TF32 and in bfloat16.
_TOLERANCES = {torch.float32: 2e-5, "tf32": 2e-3, torch.bfloat16: 1e-2}
_RULE = 5  # version of how a form is chosen; choices of other versions are stale
_ROUNDER = 10
_COMPARED = 2  # clients whose results are compared
_COMPILERS = 16  # threads that compile
_ALIKE = {"groups", "images"}  # sizes of which a choice depends but little
_SLOT = (0.3, 2.0)  # seconds between two rounds in which forms are timed, at least and at most
Which = tuple[str, Any, Any]  # task, sizes and precision
_chosen: dict[Which, Form] = {}
_names: dict[str, str] = {}  # by problem
_file: Path | None = None
trials: dict[str, dict[str, Any]] = {}
"""Of each problem that was measured in this process: a form's difference and ms, or its failure."""
_meanwhile = False
_waiting: dict[Which, Postponed] = {}
_ahead: dict[Kernel, Compilation] = {}  # kernels that are no matter of choice


class _Choosing:
    """How far postponed choices are."""

    ended = float("-inf")  # when forms were timed last
    turn = -1  # the round before which that was
    changed = False  # whether a form other than the plain one was chosen since the last switch
    trial = False  # whether a network is being tried, in the plain form alone
    switches = 0  # how often all that waited had been chosen
    plain = 0  # how often the plain form was used in place of a choice


def set_cache(file: Path | None, meanwhile: bool = False) -> None:
    """Keep choices in a file from now on; make them `meanwhile` or before a form is first used."""
    global _file, _meanwhile
    _file, _meanwhile = file, meanwhile
    set_postponed(_compile_later if meanwhile else None)


def forget() -> None:
    """Choose again, for measuring how long that takes."""
    _chosen.clear()
    _names.clear()
    _waiting.clear()
    drop_jobs()
    for which in [*_ahead]:
        use_from_now(which)
    _ahead.clear()


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Choose nothing while a network is tried on a few examples, whose sizes no round has."""
    before, _Choosing.trial = _Choosing.trial, True
    try:
        yield
    finally:
        _Choosing.trial = before


def read_cache(file: Path | None) -> dict[str, Any]:
    """Return what a cache file holds; nothing where there is none."""
    try:
        known = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def add_to_cache(file: Path | None, new: Mapping[str, Any]) -> None:
    """Add entries to a cache file, beside those that others may have added since."""
    if file is not None:
        text = json.dumps({**read_cache(file), **new}, indent=1, sort_keys=True)
        write_cache(file, text.encode())


def fastest(task: str, sizes: Any, forms: Callable[[], Mapping[str, Form]], *inputs: Tensor) -> Any:
    """Do a task in the form that was measured fastest on this GPU; elsewhere in the plain one."""
    if _Choosing.trial or not _has_forms(inputs[0]):
        return forms()["plain"](*inputs, sizes)
    which = (task, sizes, _precision(inputs))
    if which not in _chosen:
        if _meanwhile and _waits(which, forms, inputs):
            _Choosing.plain += 1
            return forms()["plain"](*inputs, sizes)
        if torch.cuda.is_current_stream_capturing():  # timing would break the capture
            return forms()["plain"](*inputs, sizes)
        _chosen[which] = choose(problem(*which), forms(), (*inputs, sizes))
    return attempt(
        f"{task} of {sizes!r}",
        lambda: _chosen[which](*inputs, sizes),
        lambda: forms()["plain"](*inputs, sizes),
    )


def _has_forms(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _TOLERANCES


def _waits(which: Which, forms: Callable[[], Mapping[str, Form]], inputs: Any) -> bool:
    """Say whether the choice is postponed; not where it was made and compiled earlier."""
    if which in _waiting:
        return True
    known, given = forms(), (*inputs, which[1])
    name = "plain" if len(known) == 1 else _name(problem(*which))
    if name == "plain":
        return False
    if name in known and not torch.cuda.is_current_stream_capturing():
        if all(map(at_hand, launched_by(known[name], *on_meta(given)))):
            return False
    _waiting[which] = Postponed(known, [name] if name in known else known, given)
    return True


def _compile_later(which: Kernel) -> None:
    """Have a kernel compiled that is missing; torch does its work till the next round."""
    if begin_to_wait(which):
        _ahead[which] = Compilation(which)
    _Choosing.plain += 1


def settle(turn: int) -> None:
    """Before a round, choose some of what was postponed and has been compiled since.

    It takes at most about as long as what was done since the last time. A round may be many tasks,
    of several architectures: before the others of the same `turn` nothing is chosen.
    """
    if turn == _Choosing.turn:
        return
    _Choosing.turn = turn
    for kernel in [kernel for kernel, one in _ahead.items() if one.done]:
        use_from_now(kernel)
        del _ahead[kernel]
        _Choosing.changed = True
    if not _waiting:
        _switch(bool(_ahead))
        _Choosing.ended = time.perf_counter()
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    end = began + min(max(began - _Choosing.ended, _SLOT[0]), _SLOT[1])
    mine = {one: own for one, own in _waiting.items() if one[2] == _precision(own.like)}
    for which, own in mine.items():
        if time.perf_counter() >= end:
            break
        if own.compiled:
            try:
                form = choose(problem(*which), own.known, own.inputs())
            except FAILURES:  # no room, say: the plain form has run till now
                form = own.known["plain"]
            _chosen[which] = form
            del _waiting[which]
            _Choosing.changed |= form is not own.known["plain"]
    _switch(bool(_ahead or mine.keys() & _waiting.keys()))
    _Choosing.ended = time.perf_counter()


def _switch(waits: bool) -> None:
    """Let what was recorded be recorded anew, once: when nothing is waited for any more."""
    if _Choosing.changed and not waits:
        _Choosing.switches, _Choosing.changed = _Choosing.switches + 1, False


def recording() -> Callable[[], Callable[[], bool]]:
    """Begin to record. What is returned ends it, and returns what says whether it is outdated.

    It is where plain forms are in it whose problems have all been settled since.
    """
    before = _Choosing.plain

    def end() -> Callable[[], bool]:
        at = _Choosing.switches if _Choosing.plain > before else None
        return lambda: at is not None and at < _Choosing.switches

    return end


def problem(task: str, sizes: Any, precision: Any) -> str:
    """Name a task, of all sizes for which one choice is made.

    Blocks of clients are of many widths, and batches in evaluation of many lengths: up to twice as
    many of either are taken to be alike.
    """
    alike = {
        name: 1 << (getattr(sizes, name) - 1).bit_length() for name in _ALIKE & {*sizes._fields}
    }
    return f"{task} {sizes._replace(**alike)!r} {precision}"


def _precision(inputs: Sequence[Any]) -> Any:
    """Say how what is made of tensors is rounded: as the coarsest of them."""
    kinds = {one.dtype for one in inputs if isinstance(one, Tensor)}
    if torch.bfloat16 in kinds:
        return torch.bfloat16
    rounded = torch.float32 in kinds and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if rounded else inputs[0].dtype


def choose(what: str, known: Mapping[str, Form], inputs: tuple[Any, ...]) -> Form:
    """Return the form that was chosen for a problem in this run, an earlier one or by us.

    Where there is none, or it fails, or is far from the plain form here, all are measured.
    """
    name = "plain" if len(known) == 1 else _name(what)
    if name in known and (name == "plain" or _holds(known, name, inputs)):
        _names[what] = name
        return known[name]
    tried = trials[what] = dict[str, Any]()
    name = _names[what] = _measured(known, inputs, tried)
    add_to_cache(_file, {_entry(what): name})
    return known[name]


def _name(what: str) -> str:
    """Return the name of the form chosen for a problem; empty where there is none."""
    if what in _names:
        return _names[what]
    kept = read_cache(_file).get(_entry(what))
    return str(kept or _shipped().get(_chip(), {}).get(what, ""))


def _entry(what: str) -> str:
    """Return the line of the cache file for a problem: choices among other kernels are stale."""
    return f"{_chip()} | torch {torch.__version__} | {version()} | {what}"


def version() -> str:
    """Tell by which rule, and among which kernels, is chosen."""
    return f"{_sources()} {_RULE}"


def _chip() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


@functools.cache
def _shipped() -> dict[str, dict[str, str]]:
    """Return the choices that come with the package, of each chip: see scripts/ship_choices.py.

    They hold for other releases of torch too, and for other kernels of the same names: a choice may
    be a little slow there, but never wrong.
    """
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, dict[str, str]] = json.loads(
            resources.files("idiolect.kernels").joinpath("choices.json").read_text()
        )
        return found
    return {}


def _holds(known: Mapping[str, Form], name: str, inputs: tuple[Any, ...]) -> bool:
    """Say whether a form that was chosen before runs here and is near the plain one."""
    given = random_like(inputs)
    try:
        exact = known["plain"](*few(given))
        return _farthest(known[name](*given), exact) < _tolerance(given)
    except torch.OutOfMemoryError:
        raise
    except FAILURES:  # no compiler any more
        return False


def _tolerance(inputs: tuple[Any, ...]) -> float:
    return _TOLERANCES[_precision(inputs)]


def _measured(known: Mapping[str, Form], inputs: tuple[Any, ...], tried: dict[str, Any]) -> str:
    """Time every form, leaving out any that does not run here or gives other results.

    Where torch's own form does not run on these numbers, another that is right is chosen. Where it
    does not even run in double precision there is nothing to compare with, and it is the one.

    A form may `arrange` its inputs as they lie in memory where its neighbours use it too. The
    results of a few clients are compared with the plain form in double precision: in single
    precision the library may round factors, or use an algorithm that is far from exact.
    """
    inputs = random_like(inputs)
    if inputs[0].is_cuda:
        compile_all(known, inputs)
    took, failed = dict[str, float](), list[str]()
    try:
        exact = known["plain"](*few(inputs))
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        tried["plain"] = f"plain: {summary(error)}"
        return "plain"
    for name, form in known.items():
        try:
            far = _farthest(form(*inputs), exact)
            tried[name] = (far, None)
            if name == "plain" or far < _tolerance(inputs):
                arrange = getattr(form, "arrange", None)
                took[name] = milliseconds(form, *(arrange(inputs) if arrange else inputs))
                tried[name] = (far, took[name])
        except torch.OutOfMemoryError:  # says nothing about the form; fewer clients may fit
            raise
        except FAILURES as error:  # too few registers, for example
            reason = tried[name] = f"{name}: {summary(error)}"
            failed.append(f"no kernel for {inputs[-1]!r} here, so slower: {reason}")
    if failed and list(took) == ["plain"]:
        warnings.warn(failed[0], stacklevel=2)
    return min(took, key=took.__getitem__) if took else "plain"  # which says why it fails


def compile_all(known: Mapping[str, Form], inputs: tuple[Any, ...]) -> None:
    """Run every form once, each in a thread: compiling, which takes longest, is done side by side.

    What fails here fails again, and is told, when its turn comes.
    """

    def run(form: Form) -> None:
        place: Any = torch.cuda.device_of(inputs[0])  # type: ignore[no-untyped-call]
        with contextlib.suppress(*FAILURES), place:
            # CUDA makes a thread's context at its first launch; a product that comes first warns.
            inputs[0].new_zeros(1)
            form(*inputs)

    own = [form for form in known.values() if getattr(form, "compiles", True)]
    with ThreadPoolExecutor(max(2, min(_COMPILERS, os.cpu_count() or 1))) as pool:
        list(pool.map(run, own))


def few(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of the first clients alone, in double precision."""
    *tensors, sizes = inputs
    cut = sizes._replace(groups=min(sizes.groups, _COMPARED))
    some = (one[: cut.groups] for one in tensors)
    return (*(one if one.dtype == torch.bool else one.double() for one in some), cut)


def random_like(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return random numbers in place of real ones, which might be zeros or NaN, in their order.

    Masks are random too, but for their first key, which every place sees. What is made of other
    inputs is so here too, where the sizes know it (`related`).
    """
    *tensors, sizes = inputs
    draw = torch.Generator(tensors[0].device).manual_seed(0)  # torch's own stream stays as it is

    def drawn(one: Tensor) -> Tensor:
        if one.dtype != torch.bool:
            return torch.empty_like(one).normal_(generator=draw)
        mask = torch.rand(one.shape, generator=draw, device=one.device) < 0.5
        mask[..., 0] = True
        return mask

    related = getattr(sizes, "related", tuple)
    return (*related(tuple(map(drawn, tensors))), sizes)


def _farthest(results: Any, exact: Any) -> float:
    """Return the largest relative difference of what a form makes, for the clients compared.

    What comes after the first are means, or sums over all examples: near 0, so relatively rounder.
    """
    pairs = zip(_numbers(results), _numbers(exact), strict=True)
    far = [apart(own[: len(other)], other) for own, other in pairs]
    return max(far[0], *(own / _ROUNDER for own in far[1:]), 0.0)


def _numbers(results: Any) -> list[Tensor]:
    """Return results that are real numbers; others say which pixel was largest, for example."""
    several = results if isinstance(results, tuple | list) else (results,)
    return [one for one in several if one.is_floating_point()]


def apart(result: Tensor, exact: Tensor) -> float:
    """Return the relative difference of two results; infinity where it is NaN."""
    far = float((result - exact).norm() / exact.norm())
    return far if far == far else float("inf")


@functools.cache
def _sources() -> str:
    """Return a digest of all CUDA sources: a choice among other kernels is stale."""
    files = sorted(resources.files("idiolect.kernels").iterdir(), key=lambda file: file.name)
    texts = [file.read_bytes() for file in files if ".cu" in file.name]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def milliseconds(form: Form, *inputs: Any) -> float:
    """Return the least of a few times on the device, without the host's time for launching."""
    form(*inputs)  # compiles, and makes handles
    tape = GraphSequence()

    def runs() -> None:
        for _ in range(_TRIALS):
            computed(form(*inputs))

    tape.record(runs)
    least = float("inf")
    for _ in range(_TRIALS):
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        tape.replay()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / _TRIALS)
    return least
