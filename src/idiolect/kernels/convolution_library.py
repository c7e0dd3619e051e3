"""Stacked convolutions by torch's libraries, in ways other than one grouped convolution.

For many channels a grouped convolution leaves matrix units idle. "last" is the same one with
channels last in memory, the order that matrix units are fed in; "last, by trial" the same with the
algorithm that the library found fastest by trial. "turned" is a convolution as the gradient by
images of another, which the library may do faster. "patches", where no pixel is seen twice, copies
what every output pixel sees into a row: a dense layer, one batched product for all; "rows" does so
for any convolution of few pixels, by `patches.cu`. "pixels", where every pixel sees one, is a
product for each image, with channels first: no copies.
The tasks are those of `convolution_cuda`, without what may follow a convolution.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from idiolect.kernels import weight_order
from idiolect.kernels.autotune import Form
from idiolect.kernels.compiled import launch
from idiolect.kernels.convolution_cuda import ConvShape

_CHANNELS = 32  # with fewer, grouped convolutions and our kernels are faster
_MANY_CHANNELS = 128  # with which a gradient by images may be faster than a convolution
_LONG = 128  # pixels of a part of a sum over them
_MANY = 64  # pixels of an image, at least, for a sum of its own
_MOST = 1 << 27  # numbers of rows for all clients
_WIDEST = 1024  # channels of a pixel that a block of threads copies at once
_THREADS, _PIXELS = 256, 8


def forms(task: str, shape: ConvShape, rounded: bool = False) -> dict[str, Form]:
    """Return the ways to do a task that may be worth a try, by name.

    What the library finds by trial is not kept between runs: for products that may be `rounded`.
    """
    if task not in _LAST or shape.depthwise:
        return {}
    thin = min(shape.channels, shape.out_channels) < _CHANNELS
    found: dict[str, Form] = {} if thin else {"last": _LAST[task]}
    if rounded and not thin:
        found["last, by trial"] = _TRIED[task]
        if task == "convolve" and _may_turn(shape):
            found["turned"] = InLayout(turned_convolve, all_last, 1)
        if _few_rows(shape):
            found["rows"] = _ROWED[task]
    once = shape.padding == 0 and shape.stride == shape.kernel_height == shape.kernel_width
    if once:
        found["patches"] = _PATCHED[task]
    small = task == "weight_gradient" and shape.out_height * shape.out_width < _MANY
    if shape.pointwise and not small:
        found["pixels"] = _POINTWISE[task]
    return found


def _backward(
    gradient: Tensor, x: Tensor, w: Tensor, shape: ConvShape, which: int, groups: int = 1
) -> Tensor:
    found = torch.ops.aten.convolution_backward(
        gradient, x, w, None, [shape.stride] * 2, [shape.padding] * 2, [1, 1], False,
        [0, 0], groups, [which == 0, which == 1, False],
    )  # fmt: skip
    result: Tensor = found[which]
    return result


# One grouped convolution of all clients, with channels last.


def _wide(t: Tensor) -> Tensor:
    """Make clients a part of the channels, which are last in memory: one copy, or none."""
    last = t.permute(1, 3, 4, 0, 2).contiguous()
    return last.flatten(3).permute(0, 3, 1, 2)


def _weights(w: Tensor, like: Tensor) -> Tensor:
    if not _on_gpu(w):
        return w.flatten(0, 1).to(like.dtype, memory_format=torch.channels_last)
    return weight_order.by_taps(w, like, w.shape[2]).flatten(0, 1).permute(0, 3, 1, 2)


def _on_gpu(w: Tensor) -> bool:
    return w.device.type != "cpu"


def _room(like: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return what has a size, and numbers that nothing reads; the library would copy a view."""
    last = torch.channels_last
    return torch.empty(sizes, dtype=like.dtype, device=like.device, memory_format=last)


def _half(images: Tensor) -> bool:
    return images.dtype == torch.bfloat16


def _apart(t: Tensor, groups: int) -> Tensor:
    """Undo `_wide`, in the same place in memory."""
    return t.view(len(t), groups, -1, *t.shape[2:]).transpose(0, 1)


def last_convolve(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Convolve."""
    step = (shape.stride, shape.padding, 1, shape.groups)
    return _apart(F.conv2d(_wide(x), _weights(w, x), None, *step), shape.groups)


def last_input_gradient(gradient: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the images."""
    sizes = (shape.images, shape.groups * shape.channels, shape.height, shape.width)
    like = _room(gradient, sizes)
    return _apart(
        _backward(_wide(gradient), like, _weights(w, like), shape, 0, shape.groups), shape.groups
    )


def _may_turn(s: ConvShape) -> bool:
    alike = s.kernel_height == s.kernel_width > s.padding and not s.pointwise
    return alike and s.stride == 1 and min(s.channels, s.out_channels) >= _MANY_CHANNELS


def turned_convolve(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Convolve, as the gradient by the images of a convolution the other way."""
    s = shape
    other = s._replace(
        channels=s.out_channels, height=s.out_height, width=s.out_width,
        out_channels=s.channels, padding=s.kernel_height - 1 - s.padding,
    )  # fmt: skip
    like = _room(x, (s.images, s.groups * s.out_channels, s.out_height, s.out_width))
    laid = weight_order.turned(w, like, flipped=True).flatten(0, 1).permute(0, 3, 1, 2)
    return _apart(_backward(_wide(x), like, laid, other, 0, s.groups), s.groups)


def last_weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the weights."""
    kernel = (shape.channels, shape.kernel_height, shape.kernel_width)
    like = _room(x, (shape.groups * shape.out_channels, *kernel))
    dw = _backward(_wide(gradient), _wide(x), like, shape, 1, shape.groups)
    if not _on_gpu(x):
        return dw.reshape(shape.groups, shape.out_channels, *kernel)
    laid = dw.permute(0, 2, 3, 1).contiguous()  # as the library has made it
    parts, half = laid.view(1, shape.groups, shape.out_channels, *laid.shape[1:]), _half(x)
    if not half and not torch.backends.cuda.matmul.allow_tf32:  # most other forms have them first
        return weight_order.put_back(parts, shape.channels)
    return weight_order.gradient(parts, shape.channels, half)


# As one batched product.


def _rows(x: Tensor, shape: ConvShape) -> Tensor:
    """Return what each output pixel sees: [client, image and pixel, place and channel]."""
    pad, step = shape.padding, shape.stride
    last = F.pad(x.permute(0, 1, 3, 4, 2), (0, 0, pad, pad, pad, pad))
    seen = last.unfold(2, shape.kernel_height, step).unfold(3, shape.kernel_width, step)
    return seen.permute(0, 1, 2, 3, 5, 6, 4).reshape(len(x), -1, shape.taps * shape.channels)


def _lines(w: Tensor) -> Tensor:
    """Return weights as [client, place and channel, out]."""
    return w.permute(0, 3, 4, 2, 1).flatten(1, 3)


def _pixels(t: Tensor) -> Tensor:
    """Return images as [client, image and pixel, channel]."""
    return t.permute(0, 1, 3, 4, 2).flatten(1, 3)


def _from_rows(rows: Tensor, shape: ConvShape) -> Tensor:
    """Undo `_rows` where no pixel is seen twice; pixels that none sees are 0."""
    s = shape
    sizes = (s.groups, s.images, s.out_height, s.out_width, s.kernel_height, s.kernel_width, -1)
    seen = rows.view(sizes).permute(0, 1, 6, 2, 4, 3, 5).flatten(5).flatten(3, 4)
    return F.pad(seen, (0, s.width - seen.shape[-1], 0, s.height - seen.shape[-2]))


def patches_convolve(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Convolve."""
    y = torch.bmm(_rows(x, shape), _lines(w.to(x.dtype)))
    sizes = (shape.groups, shape.images, shape.out_height, shape.out_width, -1)
    return y.view(sizes).permute(0, 1, 4, 2, 3)


def patches_input_gradient(gradient: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the images: a convolution with the weights flipped."""
    if shape.stride != 1:  # patches without overlaps, put back where they were
        return _from_rows(torch.bmm(_pixels(gradient), _lines(w.to(gradient.dtype)).mT), shape)
    return patches_convolve(gradient, w.flip(3, 4).transpose(1, 2), shape.seen_by("input_gradient"))


def patches_weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the weights."""
    rows, out = _rows(x, shape), _pixels(gradient)
    parts = next((n for n in (16, 8, 4) if rows.shape[1] % (n * _LONG) == 0), 1)
    cut = (shape.groups * parts, rows.shape[1] // parts, -1)  # many pixels, few weights
    found = torch.bmm(rows.view(cut).mT, out.reshape(cut))
    dw = found.view(shape.groups, parts, *found.shape[1:]).sum(1)
    sizes = (shape.groups, shape.kernel_height, shape.kernel_width, shape.channels, -1)
    return dw.view(sizes).permute(0, 4, 3, 1, 2)


# The same of any convolution, with channels last, by kernels that make rows and add them up again.


def _few_rows(shape: ConvShape) -> bool:
    """Say whether rows take so little room that products of them may be worth it."""
    s, inside = shape, shape.kernel_height == shape.kernel_width
    rows = s.groups * s.images * s.out_height * s.out_width
    channels = s.channels % 8 == 0 == s.out_channels % 8 and s.channels <= _WIDEST
    return inside and channels and rows * s.taps * s.channels <= _MOST


def _launch_rows(name: str, images: Tensor, rows: Tensor, shape: ConvShape) -> None:
    """Make rows [client, image and pixel, place and channel] of images, or add them up to these."""
    s, gather = shape, name == "gather_rows"
    many = s.images * (s.out_height * s.out_width if gather else s.height * s.width)
    constants = {"THREADS": _THREADS, "PIXELS": _PIXELS} | ({"HALF": 1} if _half(images) else {})
    sizes = (s.images, s.channels, s.height, s.width, s.out_height, s.out_width)
    constants |= {"KH": s.kernel_height, "KW": s.kernel_width, "PAD": s.padding, "STRIDE": s.stride}
    given = [*((images, rows) if gather else (rows, images)), *sizes]
    grid = (-(-many // _PIXELS), s.groups, 1)
    launch("patches.cu", name, constants, grid, _THREADS, given, 12 * _PIXELS)


def _gathered_rows(x: Tensor, shape: ConvShape) -> Tensor:
    s = shape
    rows = x.new_empty(s.groups, s.images * s.out_height * s.out_width, s.taps * s.channels)
    _launch_rows("gather_rows", x.permute(1, 3, 4, 0, 2).contiguous(), rows, s)
    return rows


def _lain(images: Tensor) -> Tensor:
    """Return images, with channels last, as [client, image and pixel, channel]."""
    return images.permute(1, 3, 4, 0, 2).contiguous().flatten(0, 2).transpose(0, 1)


def rows_convolve(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Convolve."""
    s = shape
    made = x.new_empty(s.images, s.out_height, s.out_width, s.groups, s.out_channels)
    laid = weight_order.by_taps(w, x, s.channels).flatten(2)
    torch.bmm(_gathered_rows(x, s), laid.mT, out=made.flatten(0, 2).transpose(0, 1))
    return made.permute(3, 0, 4, 1, 2)


def rows_input_gradient(gradient: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the images: that by rows, added up."""
    s = shape
    laid = weight_order.by_taps(w, gradient, s.channels).flatten(2)
    dx = gradient.new_empty(s.images, s.height, s.width, s.groups, s.channels)
    _launch_rows("spread_rows", dx, torch.bmm(_lain(gradient), laid), s)
    return dx.permute(3, 0, 4, 1, 2)


def rows_weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the weights."""
    s = shape
    dw = torch.bmm(_lain(gradient).mT, _gathered_rows(x, s))
    sizes = (1, s.groups, s.out_channels, s.kernel_height, s.kernel_width, s.channels)
    return weight_order.gradient(dw.view(sizes), s.channels, _half(x))


# As one product for each image: weights of 1×1.


def _lined(x: Tensor) -> Tensor:
    """Return images as [client and image, channel, pixel]."""
    return x.flatten(3).flatten(0, 1)


def _for_each(w: Tensor, like: Tensor, images: int) -> Tensor:
    """Return a client's weights for each of its images: [client and image, out, channel]."""
    own = w.flatten(2).to(like.dtype)
    return own[:, None].expand(-1, images, -1, -1).flatten(0, 1)


def pixels_convolve(x: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Convolve."""
    y = torch.bmm(_for_each(w, x, shape.images), _lined(x))
    return y.view(shape.groups, shape.images, -1, shape.height, shape.width)


def pixels_input_gradient(gradient: Tensor, w: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the images."""
    return pixels_convolve(gradient, w.transpose(1, 2), shape)


def pixels_weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Return the gradient by the weights: the sum of each image's."""
    each = torch.bmm(_lined(gradient), _lined(x).mT)
    dw = each.view(shape.groups, shape.images, *each.shape[1:]).sum(1)
    return dw[..., None, None]


@dataclass(frozen=True)
class InLayout:
    """A form, and how the images that it is given lie in memory where those beside it use it."""

    run: Form
    order: Callable[[Tensor], Tensor]
    images: int  # so many of its tensors are images, the others weights

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        return self.run(*inputs)

    def arrange(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the same inputs in that order; weights as a step leaves them."""
        images = [self.order(one) for one in inputs[: self.images]]
        weights = inputs[self.images : -1]
        stepped = (weight_order.as_stepped(one, _half(images[0])) for one in weights)
        return (*images, *stepped, inputs[-1])


_tried = threading.local()
"""`known`: of which problems the library knows the fastest algorithm, which it keeps by thread."""
_FLAGS = threading.Lock()  # torch's switches are those of all threads


class ByTrial(InLayout):
    """A form whose algorithm the library finds by running several.

    That cannot be captured: where it would have to be, the library guesses as it does otherwise.
    Algorithms that add in any order are left out. That also keeps what was found apart from what
    was guessed, since torch looks both up by the problem and this switch, not by how it was found.
    """

    compiles = False  # what threads find is lost with them

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        known = _tried.__dict__.setdefault("known", set())
        x, shape = inputs[0], inputs[-1]
        problem = (self.run, shape, x.dtype, torch.backends.cudnn.allow_tf32)
        if problem not in known and x.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.run(*inputs)
        with _trying():
            made = self.run(*inputs)
        if not x.is_meta:
            known.add(problem)
        return made


@contextlib.contextmanager
def _trying() -> Iterator[None]:
    library = torch.backends.cudnn
    with _FLAGS:
        before = library.benchmark, library.deterministic
        library.benchmark = library.deterministic = True
        try:
            yield
        finally:
            library.benchmark, library.deterministic = before


def all_last(t: Tensor) -> Tensor:
    """Lay images out as one grouped convolution with channels last does."""
    return _apart(_wide(t), len(t))


_LAST: dict[str, Form] = {
    "convolve": InLayout(last_convolve, all_last, 1),
    "input_gradient": InLayout(last_input_gradient, all_last, 1),
    "weight_gradient": InLayout(last_weight_gradient, all_last, 2),
}
_TRIED: dict[str, Form] = {
    "convolve": ByTrial(last_convolve, all_last, 1),
    "input_gradient": ByTrial(last_input_gradient, all_last, 1),
    "weight_gradient": ByTrial(last_weight_gradient, all_last, 2),
}
_PATCHED: dict[str, Form] = {
    "convolve": patches_convolve,
    "input_gradient": patches_input_gradient,
    "weight_gradient": patches_weight_gradient,
}
_ROWED: dict[str, Form] = {
    "convolve": InLayout(rows_convolve, all_last, 1),
    "input_gradient": InLayout(rows_input_gradient, all_last, 1),
    "weight_gradient": InLayout(rows_weight_gradient, all_last, 2),
}
_POINTWISE: dict[str, Form] = {
    "convolve": pixels_convolve,
    "input_gradient": pixels_input_gradient,
    "weight_gradient": pixels_weight_gradient,
}
