"""Which form of a stacked layer is fastest here: measured once a shape, then remembered.

Where a file is named, choices are kept there between runs, so that a run that is repeated or
resumed need not measure, nor compile what it does not use.
"""

import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idiolect.kernels import timing_cache
from idiolect.kernels.compiled import attempt
from idiolect.kernels.cuda_graph import Tape

Form = Callable[..., Any]
_TRIALS = 3
_APART = 2e-5  # relative distance that rounding explains in single precision
_RULE = 2  # of choosing; what others chose is out of date
_FEW = 2  # clients whose results are compared
_chosen: dict[tuple[str, Any, bool], Form] = {}
_file: Path | None = None


def keep(file: Path | None) -> None:
    """Keep choices in a file from now on."""
    global _file
    _file = file


def fastest(task: str, sizes: Any, forms: Callable[[], Mapping[str, Form]], *inputs: Tensor) -> Any:
    """Do a task in the form that was measured fastest on this GPU; elsewhere in the plain one."""
    if not inputs[0].is_cuda or inputs[0].dtype != torch.float32:
        return forms()["plain"](*inputs, sizes)
    which = (task, sizes, torch.backends.cuda.matmul.allow_tf32)
    if which not in _chosen:
        if torch.cuda.is_current_stream_capturing():  # timing would break the capture
            return forms()["plain"](*inputs, sizes)
        about = f"{torch.cuda.get_device_name()} {torch.__version__} {_sources()}"
        key = f"{about} {_RULE} {which!r}"
        _chosen[which] = choose(key, forms(), (*inputs, sizes))
    return attempt(
        f"{task} of {sizes!r}",
        lambda: _chosen[which](*inputs, sizes),
        lambda: forms()["plain"](*inputs, sizes),
    )


def choose(key: str, known: Mapping[str, Form], inputs: tuple[Any, ...]) -> Form:
    """Return the form that was chosen for a key, or else measure."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    name = str(timing_cache.read(_file).get(digest))
    if name in known:
        try:
            known[name](*inputs)
            return known[name]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError, OSError):  # no compiler any more
            pass
    name = _measured(known, inputs)
    timing_cache.add(_file, {digest: name})
    return known[name]


def _measured(known: Mapping[str, Form], inputs: tuple[Any, ...]) -> str:
    """Time every form; one that does not run here, or gives other results, is out.

    The results of a few clients are compared with the plain form in double precision: in single
    precision the library may round factors, or take a way that is far from exact.
    """
    inputs = drawn(inputs)
    some = few(inputs)
    exact, took, failed = first(known["plain"](*some)), {}, list[str]()
    for name, form in known.items():
        try:
            if name == "plain" or apart(first(form(*inputs))[: len(exact)], exact) < _APART:
                took[name] = milliseconds(form, *inputs)
        except torch.OutOfMemoryError:  # says nothing about the form; fewer clients may fit
            raise
        except (RuntimeError, AttributeError, OSError) as error:  # too little of the chip, say
            if name == "plain":
                raise
            words = (str(error) or type(error).__name__).splitlines()[0]
            failed.append(f"no kernel for {inputs[-1]!r} here, so slower: {name}: {words}")
    if failed and list(took) == ["plain"]:
        warnings.warn(failed[0], stacklevel=2)
    return min(took, key=took.__getitem__)


def few(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of the first clients alone, in double precision."""
    *tensors, sizes = inputs
    cut = sizes._replace(groups=min(sizes.groups, _FEW))
    return (*(one[: cut.groups].double() for one in tensors), cut)


def drawn(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return random numbers in place of real ones, which might be zeros, or broken."""
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    draw = torch.Generator(tensors[0].device).manual_seed(0)  # nobody else's numbers are used up

    def normal(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return torch.randn(one.shape, generator=draw, device=one.device, dtype=one.dtype)

    return tuple(map(normal, inputs))


def first(result: Any) -> Tensor:
    """Return the first of several results."""
    chief: Tensor = result[0] if isinstance(result, tuple) else result
    return chief


def apart(result: Tensor, exact: Tensor) -> float:
    """Return how far a result is from another, relative to it; NaN is far."""
    far = float((result - exact).norm() / exact.norm())
    return far if far == far else float("inf")


@functools.cache
def _sources() -> str:
    """Return a digest of all kernels: a choice among others is out of date."""
    files = sorted(resources.files("idiolect.kernels").iterdir(), key=lambda file: file.name)
    texts = [file.read_bytes() for file in files if file.name.endswith(".cu")]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def milliseconds(form: Form, *inputs: Any) -> float:
    """Return the least of a few times on the device; what the host needs to start it left out."""
    form(*inputs)  # compiles, and makes handles
    tape = _repeated(form, inputs)
    least = float("inf")
    for _ in range(_TRIALS):
        start, end = (
            torch.Event("cuda", enable_timing=True),
            torch.Event("cuda", enable_timing=True),
        )
        start.record()
        tape.replay()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / _TRIALS)
    return least


def _repeated(form: Form, inputs: tuple[Any, ...]) -> Tape:
    """Record a few runs of a form."""
    tape = Tape()

    def runs() -> None:
        for _ in range(_TRIALS):
            form(*inputs)

    tape.record(runs)
    return tape
