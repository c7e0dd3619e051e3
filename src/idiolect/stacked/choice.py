"""Which form of a stacked layer is fastest here: measured once a shape, then remembered.

Where a file is named, choices are kept there between runs, so that a run that is repeated or
resumed need not measure, nor compile what it does not use.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idiolect.stacked import notes

Form = Callable[..., Any]
_TRIALS = 3
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
        key = f"{torch.cuda.get_device_name()} {torch.__version__} {_sources()} {which!r}"
        _chosen[which] = choose(key, forms(), (*inputs, sizes))
    return _chosen[which](*inputs, sizes)


def choose(key: str, known: Mapping[str, Form], inputs: tuple[Any, ...]) -> Form:
    """Return the form that was chosen for a key, or else measure."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    name = str(notes.read(_file).get(digest))
    if name in known:
        try:
            known[name](*inputs)
            return known[name]
        except (RuntimeError, AttributeError):  # no compiler any more
            pass
    name = _measured(known, inputs)
    notes.add(_file, {digest: name})
    return known[name]


def _measured(known: Mapping[str, Form], inputs: tuple[Any, ...]) -> str:
    """Time every form on the real inputs; one that does not run here is out."""
    took = {}
    for name, form in known.items():
        try:
            took[name] = milliseconds(form, *inputs)
        except (RuntimeError, AttributeError):  # no compiler, or too little memory on the chip
            if name == "plain":
                raise
    return min(took, key=took.__getitem__)


@functools.cache
def _sources() -> str:
    """Return a digest of all kernels: a choice among others is out of date."""
    files = sorted(resources.files("idiolect.stacked").iterdir(), key=lambda file: file.name)
    texts = [file.read_bytes() for file in files if file.name.endswith(".cu")]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def milliseconds(form: Form, *inputs: Any) -> float:
    """Return the least of a few times on the device; what the host needs to start it left out."""
    form(*inputs)  # compiles, and makes handles
    graph = _repeated(form, inputs)
    least = float("inf")
    for _ in range(_TRIALS):
        start, end = (
            torch.Event("cuda", enable_timing=True),
            torch.Event("cuda", enable_timing=True),
        )
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / _TRIALS)
    return least


def _repeated(form: Form, inputs: tuple[Any, ...]) -> Any:
    """Capture a few runs of a form; by hand, since `torch.cuda.graph` collects garbage first."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    side = type(current)()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        form(*inputs)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(_TRIALS):
                form(*inputs)
        finally:
            graph.capture_end()
    current.wait_stream(side)
    return graph
