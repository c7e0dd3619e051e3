"""Which form of a stacked layer is fastest here: measured once a shape, then remembered."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Form = Callable[..., Any]
_TRIALS = 3
_chosen: dict[tuple[str, Any], Form] = {}


def fastest(task: str, sizes: Any, forms: Callable[[], Mapping[str, Form]], *inputs: Tensor) -> Any:
    """Do a task in the form that was measured fastest on this GPU; the first is the plain one."""
    if not inputs[0].is_cuda or inputs[0].dtype != torch.float32:
        return forms()["plain"](*inputs, sizes)
    if (task, sizes) not in _chosen:
        if torch.cuda.is_current_stream_capturing():  # timing would break the capture
            return forms()["plain"](*inputs, sizes)
        _chosen[task, sizes] = _measured(forms(), sizes, inputs)
    return _chosen[task, sizes](*inputs, sizes)


def _measured(known: Mapping[str, Form], sizes: Any, inputs: tuple[Tensor, ...]) -> Form:
    """Time every form on the real inputs; one that does not run here is out."""
    took = {}
    for name, form in known.items():
        try:
            took[name] = milliseconds(form, *inputs, sizes)
        except (RuntimeError, AttributeError):  # no compiler, or too little memory on the chip
            if name == "plain":
                raise
    return known[min(took, key=took.__getitem__)]


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
