"""A dense layer in which every client of a stack has its own weights.

vmap makes it batched products with a bias added, and its gradients products, sums and scalings;
here each is one launch of `dense.cu` where that is faster, as measured once a shape. All functions
are differentiable any number of times. Weights' and biases' gradients are tensors that are made
when they are used; a step adds them to the weights while they are made. Of a large layer even that
is put off while clients have taken few steps from the same weights: `_FactoredWeights`.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from idiolect.kernels import beneath
from idiolect.kernels.autotune import Form, fastest
from idiolect.kernels.compiled import REALS, aligned, attempt, launch, round_up
from idiolect.kernels.deferred import Deferred, DeferredTensor, Factored, Terms, computed, factored
from idiolect.kernels.vmap_rules import GroupedFunction, call, float32_on_cuda, halved_on_cuda

_BATCH = 64  # with more examples the library's tiles are full
_LONG = 512  # examples from which a sum over them may be worth cutting
_LARGE = 1 << 24  # weights of all clients, more than a GPU's cache holds
_RANK = 0.5  # examples of all steps for each output, up to which weights stay factors
_CUTS = (4, 5, 8, 10, 16)
_SUMS = (80, 40, 20)  # of a thread
_SHARED_SUMS = 160  # of inputs of a thread, for which there is shared memory
_HELD = 16  # examples of which a thread may hold its inputs
_WARP = 32
_THREADS = 128


class StackedLinear(nn.Linear):
    """A dense layer that is fast under vmap on CUDA; elsewhere it is torch's own."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Return whether a layer is of the plain kind that can be replaced."""
        plain = type(layer) in (nn.Linear, NonDynamicallyQuantizableLinear)
        return plain and layer.bias is not None

    def forward(self, x: Tensor) -> Tensor:
        """Return x Aᵀ + b."""
        return stacked_linear(x, self.weight, self.bias)


def stacked_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Do what torch's function of these arguments does."""
    given = None
    if b is not None and x.dim() > 1 and _on_cuda(x):
        given = _prepared(x.flatten(0, -2), w, b)
    if given is None:
        if b is not None and beneath.suits_linear(x, w, b):
            return beneath.linear(x, w, b)
        return F.linear(x, w, b)
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = call(_Linear, *(one[None] for one in given))
    return y.squeeze(0).reshape(*x.shape[:-1], -1)


def _on_cuda(x: Tensor) -> bool:
    return x.is_cuda


def _prepared(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return what our functions multiply; None where they are not for these numbers.

    Where networks multiply in bfloat16, so do layers of many examples. With few of them reading the
    weights is what takes time, and a copy in bfloat16 would only add to it.
    """
    if not _on_cuda(x):
        return None
    if halved_on_cuda(x):
        half = torch.bfloat16 if len(x) > _BATCH else torch.float32
        return x.to(half), w.to(half), b.to(half)
    return (x, w, b) if float32_on_cuda(x) else None


def linear_relu(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return ReLU(x Aᵀ + b): in one launch under vmap on CUDA."""
    ours = isinstance(layer, StackedLinear) and x.dim() == 2
    given = _prepared(x, layer.weight, layer.bias) if ours else None
    if given is None:
        return torch.relu(layer(x))
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = call(_LinearReLU, *(one[None] for one in given))
    return y.squeeze(0)


class LinearSizes(NamedTuple):
    """The sizes of a stack of dense layers."""

    groups: int
    examples: int
    inputs: int
    outputs: int


class _Linear(GroupedFunction):
    """x [group, example, in], w [group, out, in], b [group, out] -> y [group, example, out]."""

    joins_examples = 1

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return _fastest("forward", x, w, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gradients(ctx.needs_input_grad, gradient, *ctx.saved_tensors[:2])


class _LinearReLU(GroupedFunction):
    """The same, with ReLU after it."""

    joins_examples = 1

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return _fastest("relu", x, w, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0)  # ReLU's own, in one launch
        return _gradients(ctx.needs_input_grad, gradient, x, w)


def _gradients(wanted: tuple[bool, ...], gradient: Tensor, x: Tensor, w: Tensor) -> Any:
    dx = call(_LinearInputGradient, gradient, w) if wanted[0] else None
    dw, db = call(_LinearWeightGradient, gradient, x) if any(wanted[1:]) else (None, None)
    return dx, dw, db


class _LinearInputGradient(GroupedFunction):
    """The gradient by y, w -> the gradient by x."""

    joins_examples = 1

    @staticmethod
    def forward(gradient: Tensor, w: Tensor) -> Any:
        return _fastest("input_gradient", gradient, w)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        gradient, w = ctx.saved_tensors
        return torch.bmm(dx, w.mT), torch.bmm(gradient.mT, dx)


class _LinearWeightGradient(GroupedFunction):
    """The gradient by y, x -> the gradients by w and b."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor) -> Any:
        if not _put_off(gradient, x):
            return _fastest("weight_gradient", gradient, x)
        both = _Gradients(gradient, x)
        return DeferredTensor(_WeightGradient(both)), DeferredTensor(_BiasGradient(both))

    @staticmethod
    def backward(ctx: Any, dw: Tensor, db: Tensor) -> Any:
        gradient, x = ctx.saved_tensors
        return torch.bmm(x, dw.mT) + db[:, None], torch.bmm(gradient, dw)


def _put_off(gradient: Tensor, x: Tensor) -> bool:
    """Say whether a step may add the gradients while they are made."""
    return gradient.shape[1] <= _BATCH and _on_cuda(x) and x.dtype == torch.float32


class _Gradients:
    """Gradients of outputs, and inputs [group, example, ...]: those by weights and biases."""

    def __init__(self, gradient: Tensor, x: Tensor) -> None:
        self.gradient, self.x = gradient, x

    @functools.cached_property
    def made(self) -> tuple[Tensor, Tensor]:
        """Both, in one launch."""
        dw, db = _fastest("weight_gradient", self.gradient, self.x)
        return dw, db


class _WeightGradient(Deferred):
    """The gradient by the weights, when it is needed."""

    def __init__(self, both: _Gradients) -> None:
        super().__init__((len(both.x), both.gradient.shape[2], both.x.shape[2]), both.x)
        self._both = both

    def make(self) -> Tensor:
        """Return it."""
        return self._both.made[0]

    def added(self, factor: float, to: Tensor) -> Tensor | None:
        """Return weights plus factor · the gradient, of large layers."""
        if self.shape.numel() < _LARGE:
            return None
        gradient, x = self._both.gradient, self._both.x
        w = to.reshape(-1, *self.shape[1:])
        known = _factored(w)
        if known is None and len(w) == 1 < len(x):
            known = _FactoredWeights.at(computed(w), len(x))
        if known is not None and (more := known.plus(factor, gradient, x)) is not None:
            return DeferredTensor(more)
        return _stepped(factor * gradient, x, computed(w).expand(self.shape))

    def terms(self) -> Terms:
        """Return the products that it is the sum of."""
        gradient, (x, _) = self._both.gradient.contiguous(), _dense_groups(self._both.x)
        return Terms(gradient, gradient[0].numel(), x.shape[1], 0, x)


def _stepped(gradient: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Return weights plus the sum of products of gradients and inputs."""
    groups, examples, inputs = x.shape
    sizes = LinearSizes(groups, examples, inputs, gradient.shape[2])
    known = functools.partial(forms, "weight_step", sizes)
    new: Tensor = fastest("weight_step", sizes, known, gradient, x, w)
    return new


class _Room:
    """Gradients [example, group, out] and inputs [example, group, in] of all steps in a row."""

    def __init__(self, groups: int, most: int, base: Tensor) -> None:
        self.most, self.filled = most, 0
        self.left = base.new_empty(most, groups, base.shape[1])
        self.right = base.new_empty(most, groups, base.shape[2])

    def add(self, factor: float, left: Tensor, right: Tensor) -> None:
        """Add those of a step, [example, group, ...], with gradients times a factor."""
        first, self.filled = self.filled, self.filled + len(right)
        torch.mul(left, factor, out=self.left[first : self.filled])
        self.right[first : self.filled] = right


class _FactoredWeights(Factored):
    """Weights that all clients began with, plus products: gᵀ x of every step since.

    The weights of 50 clients are read and written several times in a step, though a batch of ten
    changes them by a matrix of rank ten. With x_t wᵀ = x_t w_0ᵀ + Σ_s (x_t x_sᵀ) g_s, and likewise
    for gradients by inputs and for means over clients, they need never be there: what is read are
    the inputs of the steps before, and the first weights, once for all clients.
    """

    def __init__(self, base: Tensor, room: _Room, rank: int) -> None:
        super().__init__((room.left.shape[1], *base.shape[1:]), base)
        self._base, self._room, self._rank = base, room, rank

    @classmethod
    def at(cls, base: Tensor, groups: int) -> "_FactoredWeights":
        """Begin at weights [1, out, in]."""
        return cls(base, _Room(groups, int(base.shape[1] * _RANK), base), 0)

    @property
    def _left(self) -> Tensor:
        return self._room.left[: self._rank]

    @property
    def _right(self) -> Tensor:
        return self._room.right[: self._rank]

    def plus(self, factor: float, left: Tensor, right: Tensor) -> "_FactoredWeights | None":
        """Return these weights and factor · leftᵀ right; None where factors become too many."""
        room, rank = self._room, self._rank + right.shape[1]
        if rank > room.most:
            return None
        if room.filled != self._rank:  # another step was taken from the same weights
            room = _Room(self.shape[0], room.most, self._base)
            room.add(1.0, self._left, self._right)
        room.add(factor, left.transpose(0, 1), right.transpose(0, 1))
        return _FactoredWeights(self._base, room, rank)

    def make(self) -> Tensor:
        """Return them."""
        left, right = (one.transpose(0, 1) for one in (self._left, self._right))
        return _stepped(left, right, self._base.expand(self.shape))

    def again(self) -> "_FactoredWeights":
        """Return what is computed of the same memory, once that was written anew."""
        return _FactoredWeights(self._base, self._room, self._rank)

    def largest(self) -> Tensor:
        """Return the products of each example's largest gradient and input; NaN is the largest."""
        pair = (self._left, self._right)
        left, right = (torch.linalg.vector_norm(one, float("inf"), dim=2) for one in pair)
        largest: Tensor = (left * right).mT
        return largest

    def mean(self, share: Tensor, left_out: Tensor) -> Tensor:
        """Return the sum over rows, each times its share, as one product."""
        left, right = self._weighed(share, left_out)
        total = torch.where(left_out, 0.0, share).sum()
        return (total * self._base[0]).addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))

    def _weighed(self, share: Tensor, left_out: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients times shares, and inputs: zeros in what is left out."""
        left, right = self._left, self._right

        def plain() -> tuple[Tensor, Tensor]:
            gone = left_out[:, None]
            return torch.where(gone, 0.0, left * share[:, None]), torch.where(gone, 0.0, right)

        def own() -> tuple[Tensor, Tensor]:
            """Write zeros to inputs themselves, of which nobody reads those of broken clients."""
            made = torch.empty_like(left)
            constants: dict[str, int | str] = {"WEIGH": 1, "THREADS": _THREADS}
            constants["REAL"] = REALS[left.dtype]
            given: list[Any] = [share.contiguous(), left_out.contiguous(), left, made, right]
            given += [left.shape[2], right.shape[2]]
            grid = (left.shape[1], len(left), 1)
            launch("fused.cu", "weigh", constants, grid, _THREADS, given)
            return made, right

        return attempt("weighed factors", own, plain, on=left)

    def forward(self, x: Tensor, b: Tensor) -> Tensor:
        """Return x wᵀ + b."""
        groups, examples, inputs = x.shape
        y = torch.bmm(x.reshape(1, -1, inputs), self._base.mT).view(groups, examples, -1)
        sizes = LinearSizes(groups, examples, inputs, self._rank)
        known = functools.partial(forms, "products", sizes)
        between: Tensor = fastest("products", sizes, known, x, self._right.transpose(0, 1))
        return y.baddbmm_(between, self._left.transpose(0, 1)).add_(b[:, None])

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return gradient · w."""
        groups, examples, outputs = gradient.shape
        first = torch.bmm(gradient.reshape(1, -1, outputs), self._base)
        first = first.view(groups, examples, -1)
        between = torch.bmm(gradient, self._left.permute(1, 2, 0))
        sizes = LinearSizes(groups, examples, first.shape[2], self._rank)
        known = functools.partial(forms, "added_gradient", sizes)
        right = self._right.transpose(0, 1)
        dx: Tensor = fastest("added_gradient", sizes, known, between, right, first)
        return dx


def _factored(w: Tensor) -> _FactoredWeights | None:
    """Return the factors that weights consist of, unless they were computed."""
    found = factored(w)
    return found if isinstance(found, _FactoredWeights) else None


class _BiasGradient(Deferred):
    """The gradient by the biases: the sum over examples of that by outputs."""

    def __init__(self, both: _Gradients) -> None:
        super().__init__((len(both.x), both.gradient.shape[2]), both.x)
        self._both = both

    def make(self) -> Tensor:
        """Return it."""
        return self._both.made[1]

    def terms(self) -> Terms:
        """Return the examples' gradients."""
        gradient = self._both.gradient.contiguous()
        _, examples, outputs = gradient.shape
        return Terms(gradient, examples * outputs, examples, outputs)


def _fastest(task: str, first: Tensor, second: Tensor, *rest: Tensor) -> Any:
    weights = _factored(second)
    if weights is not None and task == "input_gradient":
        return weights.input_gradient(first)
    if weights is not None:
        y = weights.forward(first, *rest)
        return y.relu_() if task == "relu" else y
    groups, examples, _ = first.shape
    if task == "weight_gradient":
        sizes = LinearSizes(groups, examples, second.shape[2], first.shape[2])
    else:
        sizes = LinearSizes(groups, examples, second.shape[2], second.shape[1])
    own = first.dtype == torch.float32  # that our kernels are for
    return fastest(task, sizes, lambda: forms(task, sizes, own=own), first, second, *rest)


# The forms of each task: y = x wᵀ + b, the gradient by x, and those by w and b.


class LinearTile(NamedTuple):
    """How `dense.cu` cuts the work: examples and outputs of a thread, and threads of a block."""

    rows: int
    lines: int  # of the gradient by the inputs: threads that share a sum over outputs
    threads: int = _THREADS


def forms(task: str, sizes: LinearSizes, own: bool = True) -> dict[str, Form]:
    """Return all ways to do a task on a GPU, by name; `own`: by our kernels, too."""
    plain, launched = _FORMS[task]
    known: dict[str, Form] = {"plain": plain}
    if sizes.examples >= _LONG:
        if task == "forward":
            known["added"] = _added_forward
        if task == "weight_gradient":
            cuts = [parts for parts in _CUTS if sizes.examples % parts == 0][:3]
            known |= {f"cut {n}": functools.partial(_cut_weight_gradient, parts=n) for n in cuts}
    for tile in _tiles(task, sizes) if own else ():
        known["dense " + "x".join(map(str, tile))] = functools.partial(launched, tile=tile)
    return known


def _tiles(task: str, sizes: LinearSizes) -> Iterator[LinearTile]:
    if sizes.examples > _BATCH:
        return
    if task in ("weight_gradient", "weight_step"):
        yield from (LinearTile(1, lines) for lines in (4, 8, 16))
        held = 1 < sizes.examples <= _HELD and sizes.outputs >= _WARP and _vector(sizes) > 1
        yield from (LinearTile(sizes.examples, lines) for lines in (32, 64, 128) if held)
        return
    rows = -(-sizes.examples // -(-sizes.examples // 20))
    if task in ("input_gradient", "added_gradient"):
        yield LinearTile(rows, 1)
        if rows > 8:
            yield LinearTile(-(-rows // 2), 1)
        if sizes.outputs >= 4 * _WARP:  # few blocks, each with a long sum, where clients are few
            fit = [parts for parts in (4, 8, 16) if rows * parts <= _SHARED_SUMS]
            yield from (LinearTile(rows, parts, _WARP * parts) for parts in fit)
        return
    warps = min(8, max(1, sizes.inputs // (_WARP * _vector(sizes))))
    for sums in _SUMS:
        yield LinearTile(rows, min(sizes.outputs, max(1, sums // rows)), _WARP * warps)


def _plain_forward(x: Tensor, w: Tensor, b: Tensor, sizes: LinearSizes) -> Tensor:
    return torch.bmm(x, w.mT) + b[:, None]


def _added_forward(x: Tensor, w: Tensor, b: Tensor, sizes: LinearSizes) -> Tensor:
    """Let the product add the bias."""
    return torch.baddbmm(b[:, None], x, w.mT)


def _plain_relu(x: Tensor, w: Tensor, b: Tensor, sizes: LinearSizes) -> Tensor:
    return _plain_forward(x, w, b, sizes).relu()


def _plain_input_gradient(gradient: Tensor, w: Tensor, sizes: LinearSizes) -> Tensor:
    return torch.bmm(gradient, w)


def _plain_products(x: Tensor, w: Tensor, sizes: LinearSizes) -> Tensor:
    return torch.bmm(x, w.mT)


def _plain_added_gradient(
    gradient: Tensor, w: Tensor, before: Tensor, sizes: LinearSizes
) -> Tensor:
    return torch.baddbmm(before, gradient, w)


def _plain_weight_gradient(
    gradient: Tensor, x: Tensor, sizes: LinearSizes
) -> tuple[Tensor, Tensor]:
    return torch.bmm(gradient.mT, x), gradient.sum(1)


def _plain_weight_step(gradient: Tensor, x: Tensor, w: Tensor, sizes: LinearSizes) -> Tensor:
    return torch.baddbmm(w, gradient.mT, x)


def _cut_weight_gradient(
    gradient: Tensor, x: Tensor, sizes: LinearSizes, parts: int
) -> tuple[Tensor, Tensor]:
    """Cut the examples into parts: a sum over many of them for few weights leaves a GPU idle."""
    pieces = (sizes.groups * parts, sizes.examples // parts, -1)
    dw = torch.bmm(gradient.reshape(pieces).mT, x.reshape(pieces))
    return dw.view(sizes.groups, parts, *dw.shape[1:]).sum(1), gradient.sum(1)


def _forward(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    sizes: LinearSizes,
    tile: LinearTile,
    relu: bool = False,
) -> Tensor:
    """Launch a block for a few outputs."""
    s, y = sizes, x.new_empty(sizes.groups, sizes.examples, sizes.outputs)
    (x, stride), (w, *apart) = _dense_groups(x), _lines(w)
    blocks = (-(-s.outputs // tile.lines), s.groups, -(-s.examples // tile.rows))
    also = {"RELU": int(relu), "BIAS": int(b is not None)}
    constants = _constants(s, tile) | {"FORWARD": 1} | also
    shared = 4 * tile.rows * tile.lines * tile.threads // _WARP
    given = [x, w, w if b is None else b.contiguous(), y, stride, *apart]
    launch("dense.cu", "forward", constants, blocks, tile.threads, given, shared)
    return y


def _products(x: Tensor, w: Tensor, sizes: LinearSizes, tile: LinearTile) -> Tensor:
    return _forward(x, w, None, sizes, tile)


def _input_gradient(gradient: Tensor, w: Tensor, sizes: LinearSizes, tile: LinearTile) -> Tensor:
    return _added_gradient(gradient, w, None, sizes, tile)


def _added_gradient(
    gradient: Tensor, w: Tensor, before: Tensor | None, sizes: LinearSizes, tile: LinearTile
) -> Tensor:
    """Launch a thread for a few numbers of each example."""
    s, out = sizes, gradient.new_empty(sizes.groups, sizes.examples, sizes.inputs)
    side = tile.threads // tile.lines * _vector(s)  # inputs of a block
    blocks = (-(-s.inputs // side), s.groups, -(-s.examples // tile.rows))
    constants, shared = _constants(s, tile) | {"INPUT_GRADIENT": 1}, 4 * s.outputs * tile.rows
    constants["ADDED"] = int(before is not None)
    if tile.lines > 1:
        shared = round_up(shared, 16) + 4 * tile.rows * side * tile.lines
    w, *apart = _lines(w)
    given = [gradient.contiguous(), w, out, *apart, out if before is None else aligned(before)]
    launch("dense.cu", "input_gradient", constants, blocks, tile.threads, given, shared)
    return out


def _weight_gradient(
    gradient: Tensor, x: Tensor, sizes: LinearSizes, tile: LinearTile
) -> tuple[Tensor, Tensor]:
    """Return the gradients by weights and biases in one pass."""
    db = x.new_empty(sizes.groups, sizes.outputs)
    return _launched_weights(gradient, x, db, None, sizes, tile), db


def _weight_step(
    gradient: Tensor, x: Tensor, w: Tensor, sizes: LinearSizes, tile: LinearTile
) -> Tensor:
    """Return w + the gradient by the weights."""
    if w.stride()[1:] != (sizes.inputs, 1) or w.data_ptr() % 16 or w.stride(0) % 4:
        w = w.contiguous()
    return _launched_weights(gradient, x, gradient, w, sizes, tile)


def _launched_weights(
    gradient: Tensor,
    x: Tensor,
    db: Tensor,
    w: Tensor | None,
    sizes: LinearSizes,
    tile: LinearTile,
) -> Tensor:
    s, dw = sizes, x.new_empty(sizes.groups, sizes.outputs, sizes.inputs)
    x, stride = _dense_groups(x)
    blocks = (_blocks_of_inputs(s), s.groups, -(-s.outputs // tile.lines))
    constants = _constants(s, tile) | {"WEIGHT_GRADIENT": 1, **({} if w is None else {"STEP": 1})}
    given = [gradient.contiguous(), x, dw, db, stride]
    given += [dw, 0] if w is None else [w, w.stride(0)]
    shared = 4 * round_up(s.examples, 4) * tile.lines
    launch("dense.cu", "weight_gradient", constants, blocks, tile.threads, given, shared)
    return dw


_FORMS: dict[str, tuple[Form, Form]] = {  # plain, and by kernel
    "forward": (_plain_forward, _forward),
    "relu": (_plain_relu, functools.partial(_forward, relu=True)),
    "input_gradient": (_plain_input_gradient, _input_gradient),
    "products": (_plain_products, _products),
    "added_gradient": (_plain_added_gradient, _added_gradient),
    "weight_gradient": (_plain_weight_gradient, _weight_gradient),
    "weight_step": (_plain_weight_step, _weight_step),
}


def _dense_groups(x: Tensor) -> tuple[Tensor, int]:
    """Return examples without gaps within a group, and the stride from group to group."""
    close = x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % 4 == 0 and x.data_ptr() % 16 == 0
    x = x if close else x.contiguous()
    return x, x.stride(0)


def _lines(w: Tensor) -> tuple[Tensor, int, int]:
    """Return weights whose lines have no gaps; numbers from group to group and line to line."""
    w = computed(w)
    close = w.stride(2) == 1 and w.data_ptr() % 16 == 0 and not any(n % 4 for n in w.stride()[:2])
    w = w if close else w.contiguous()
    return w, w.stride(0), w.stride(1)


def _vector(sizes: LinearSizes) -> int:
    return 4 if sizes.inputs % 4 == 0 else 1


def _blocks_of_inputs(sizes: LinearSizes) -> int:
    return -(-sizes.inputs // (_THREADS * _vector(sizes)))


def _constants(sizes: LinearSizes, tile: LinearTile) -> dict[str, int]:
    return {
        "N": sizes.examples, "IN": sizes.inputs, "OUT": sizes.outputs, "VEC": _vector(sizes),
        "THREADS": tile.threads, "ROWS": tile.rows, "LINES": tile.lines,
    }  # fmt: skip
