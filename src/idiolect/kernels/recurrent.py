"""Recurrent layers in which every client of a stack has its own weights.

Torch's have no rule for vmap. Here the inputs' part is one product for all places, the recurrence a
batched product a place with the gates after it, one launch of `recurrent.cu` on CUDA, and the
gradient by the weights again one product. All functions are differentiable any number of times.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from idiolect.kernels.compiled import REALS, attempt, launch
from idiolect.kernels.vmap_rules import GroupedFunction, call

_THREADS = 128
Trees = tuple[Tensor, ...]


class _Layers(nn.RNNBase):
    """All layers and directions; subclasses say what a hidden state is made of."""

    @staticmethod
    def suits(layer: Any) -> bool:
        """Return whether a layer can be replaced: all but LSTMs with projected outputs."""
        return type(layer) in LAYERS and layer.proj_size == 0

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the last layer's outputs and every layer's last state, as torch does."""
        if isinstance(input, PackedSequence):
            return super().forward(input, hx)
        _check_width(input, self.input_size)
        batched, first = input.dim() == 3, int(self.batch_first and input.dim() == 3)
        x = input.transpose(0, 1) if first else input if batched else input[:, None]
        begin = self._states(hx, x, batched)
        ends: list[Trees] = []
        ways = 1 + self.bidirectional
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            found = []
            for way in range(ways):
                own = [part[layer * ways + way] for part in begin]
                outputs, last = self._direction(x, own, layer, way)
                found.append(outputs)
                ends.append(last)
            x = torch.cat(found, -1) if self.bidirectional else found[0]
        x = x.transpose(0, 1) if first else x if batched else x[:, 0]
        return x, self._left([torch.stack(part) for part in zip(*ends, strict=True)], batched)

    def _direction(self, x: Tensor, begin: Sequence[Tensor], layer: int, way: int) -> Any:
        end = f"_l{layer}" + "_reverse" * way
        weights = [getattr(self, name + end) for name in ("weight_ih", "weight_hh")]
        biases = [getattr(self, name + end) for name in ("bias_ih", "bias_hh")] if self.bias else []
        outputs, last = recur(_kind(self), x.flip(0) if way else x, begin, *weights, *biases)
        return outputs.flip(0) if way else outputs, last

    def _states(self, hx: Any, x: Tensor, batched: bool) -> list[Tensor]:
        count = 2 if isinstance(self, nn.LSTM) else 1
        if hx is None:
            layers = self.num_layers * (1 + self.bidirectional)
            return [x.new_zeros(layers, x.shape[1], self.hidden_size)] * count
        given = list(hx) if count == 2 else [hx]
        return given if batched else [part[:, None] for part in given]

    def _left(self, parts: list[Tensor], batched: bool) -> Any:
        parts = parts if batched else [part[:, 0] for part in parts]
        return tuple(parts) if len(parts) == 2 else parts[0]


class StackedRNN(_Layers, nn.RNN):  # type: ignore[misc]
    """`nn.RNN` for many clients at once."""


class StackedGRU(_Layers, nn.GRU):  # type: ignore[misc]
    """`nn.GRU` for many clients at once."""


class StackedLSTM(_Layers, nn.LSTM):  # type: ignore[misc]
    """`nn.LSTM` for many clients at once."""


class _Cell(nn.RNNCellBase):
    """One step of a recurrent layer."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Return whether a layer can be replaced."""
        return type(layer) in LAYERS

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the next state."""
        _check_width(input, self.input_size)
        x = input if input.dim() == 2 else input[None]
        if hx is None:
            zeros = x.new_zeros(len(x), self.hidden_size)
            begin = [zeros, zeros]
        else:
            begin = list(hx) if isinstance(self, nn.LSTMCell) else [hx]
            begin = [part if part.dim() == 2 else part[None] for part in begin]
        own = [self.weight_ih, self.weight_hh, *([self.bias_ih, self.bias_hh] * self.bias)]
        _, last = recur(_kind(self), x[None], begin, *own)
        last = last if input.dim() == 2 else tuple(part[0] for part in last)
        return last if isinstance(self, nn.LSTMCell) else last[0]


class StackedRNNCell(_Cell, nn.RNNCell):
    """`nn.RNNCell` for many clients at once."""


class StackedGRUCell(_Cell, nn.GRUCell):
    """`nn.GRUCell` for many clients at once."""


class StackedLSTMCell(_Cell, nn.LSTMCell):
    """`nn.LSTMCell` for many clients at once."""


LAYERS: dict[type[nn.Module], Any] = {
    nn.RNN: StackedRNN,
    nn.GRU: StackedGRU,
    nn.LSTM: StackedLSTM,
    nn.RNNCell: StackedRNNCell,
    nn.GRUCell: StackedGRUCell,
    nn.LSTMCell: StackedLSTMCell,
}
"""Torch's layers, and ours to be put in their place."""


def _kind(layer: nn.Module) -> str:
    """Name what a layer computes: lstm, gru, tanh or relu."""
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return "lstm"
    return "gru" if isinstance(layer, nn.GRU | nn.GRUCell) else str(layer.nonlinearity)


def _check_width(input: Tensor, width: int) -> None:
    if input.shape[-1] != width:
        raise RuntimeError(
            f"a recurrent layer of input size {width} was given inputs of {input.shape[-1]}"
        )


def recur(
    kind: str,
    x: Tensor,
    begin: Sequence[Tensor],
    enter: Tensor,
    again: Tensor,
    bias: Tensor | None = None,
    bias_again: Tensor | None = None,
) -> tuple[Tensor, Trees]:
    """Run one layer over x [place, example, number]; return outputs, and the last state."""
    units = again.shape[1]
    extra = list(begin[1:2]) if kind == "lstm" else []
    if bias is not None and bias_again is not None:
        if kind == "gru":  # the new state's own bias is within a product
            bias = bias + torch.cat([bias_again[: 2 * units], torch.zeros_like(bias_again[:units])])
            extra = [bias_again[2 * units :]]
        else:
            bias = bias + bias_again
    elif kind == "gru":
        extra = [torch.zeros_like(again[:units, 0])]
    ahead = F.linear(x, enter, bias).to(again.dtype)
    with torch.autocast(x.device.type, enabled=False):
        tensors = [part.to(again.dtype)[None] for part in (ahead, again, begin[0], *extra)]
        found = [part[0] for part in call(_Recurrence, *tensors, kind)]
    return found[0], tuple(part[-1] for part in found[: 1 + (kind == "lstm")])


class _Recurrence(GroupedFunction):
    """ahead [g, place, example, gate], w [g, gate, unit], h [g, example, unit], and one more.

    For LSTM that is the first cell, for GRU the bias within a product. -> outputs [g, place,
    example, unit], LSTM's cells, and the gates as they opened.
    """

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *tensors, kind = inputs
        return attempt(
            "recurrent layers",
            lambda: _cuda_forward(*tensors, kind=kind),
            lambda: plain_forward(*tensors, kind=kind),
            tensors[0],
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.kind = inputs
        ctx.given = len(tensors)
        hidden = 1 + (ctx.kind == "lstm")
        ctx.mark_non_differentiable(*output[hidden:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        outputs = ctx.saved_tensors[ctx.given]
        g = torch.zeros_like(outputs) if gradients[0] is None else gradients[0]
        celled = ctx.kind == "lstm" and gradients[1] is not None
        given = (g, *([gradients[1]] if celled else []), *ctx.saved_tensors)
        return *call(_RecurrenceGradient, *given, ctx.kind, celled), None


class _RecurrenceGradient(GroupedFunction):
    """The gradients by outputs and perhaps cells, all of the above -> by the first four."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *tensors, kind, celled = inputs
        return attempt(
            "recurrent layers",
            lambda: _cuda_gradient(*tensors, kind=kind, celled=celled),
            lambda: plain_gradient(*tensors, kind=kind, celled=celled),
            tensors[0],
        )

    @staticmethod
    def backward(ctx: Any, *further: Tensor) -> Any:
        kind, celled = ctx.options
        varied = 1 + celled + 3 + (kind in ("lstm", "gru"))
        saved = ctx.saved_tensors

        def recomputed(*given: Tensor) -> Any:
            found = plain_forward(*given[1 + celled :], kind=kind)
            return plain_gradient(*given, *found, kind=kind, celled=celled)

        pull: Any = torch.func.vjp(recomputed, *saved[:varied])[1]
        return *pull(tuple(further)), *[None] * (len(saved) - varied), None, None


# In torch's operations, so that they have gradients themselves.


def plain_forward(ahead: Tensor, w: Tensor, h: Tensor, *own: Tensor, kind: str) -> Trees:
    """Run the recurrence place by place."""
    state, steps = (h, *own[: kind == "lstm"]), []
    for entered in ahead.unbind(1):
        done = _STEPS[kind](kind, entered, w, (*state, *own[kind == "lstm" :]))
        state = done[: len(state)]
        steps.append(done)
    return tuple(torch.stack(part, 1) for part in zip(*steps, strict=True))


def _rnn_step(kind: str, entered: Tensor, w: Tensor, state: Trees) -> Trees:
    total = torch.baddbmm(entered, state[0], w.mT)
    return (total.tanh() if kind == "tanh" else total.relu(),)


def _gru_step(kind: str, entered: Tensor, w: Tensor, state: Trees) -> Trees:
    h, bias = state
    units = h.shape[-1]
    again = torch.bmm(h, w.mT)
    reset, keep = (entered[..., : 2 * units] + again[..., : 2 * units]).sigmoid().chunk(2, -1)
    inner = again[..., 2 * units :] + bias[:, None]
    new = (entered[..., 2 * units :] + reset * inner).tanh()
    return new + keep * (h - new), torch.cat([reset, keep, new, inner], -1)


def _lstm_step(kind: str, entered: Tensor, w: Tensor, state: Trees) -> Trees:
    h, cell = state
    total = torch.baddbmm(entered, h, w.mT).chunk(4, -1)
    enter, forget, out = (total[n].sigmoid() for n in (0, 1, 3))
    new = total[2].tanh()
    cell = forget * cell + enter * new
    return out * cell.tanh(), cell, torch.cat([enter, forget, new, out], -1)


_STEPS: dict[str, Callable[..., Trees]] = {
    "tanh": _rnn_step, "relu": _rnn_step, "gru": _gru_step, "lstm": _lstm_step,
}  # fmt: skip


def plain_gradient(*tensors: Tensor, kind: str, celled: bool) -> Trees:
    """Return the gradients by what enters, the weights, the first state, and the one more."""
    g, by_cells, w, h, own, outputs, kept = _parted(tensors, kind, celled)
    before = torch.cat([h[:, None], outputs[:, :-1]], 1)
    if kind == "lstm":
        cells_before = torch.cat([own[:, None], kept[0][:, :-1]], 1)
    by_h, by_cell = torch.zeros_like(h), torch.zeros_like(h)
    entered, again = [], []  # the gradients by what entered, and by what came again
    for place in range(g.shape[1] - 1, -1, -1):
        by_h = by_h + g[:, place]
        if kind == "lstm":
            if celled:
                by_cell = by_cell + by_cells[:, place]
            now = (part[:, place] for part in (kept[0], cells_before, kept[1]))
            by_cell, gates = _lstm_back(by_h, by_cell, *now)
            entered.append(gates)
            by_h = torch.bmm(gates, w)
        elif kind == "gru":
            kept_h, gates, inner = _gru_back(by_h, before[:, place], kept[0][:, place])
            entered.append(gates)
            again.append(inner)
            by_h = kept_h + torch.bmm(inner, w)
        else:
            y = outputs[:, place]
            gates = by_h * (1 - y * y) if kind == "tanh" else by_h * (y > 0)
            entered.append(gates)
            by_h = torch.bmm(gates, w)
    by_ahead = torch.stack(entered[::-1], 1)
    by_again = torch.stack(again[::-1], 1) if again else by_ahead
    return _whole(by_ahead, by_again, before, by_h, by_cell, kind)


def _parted(tensors: Sequence[Tensor], kind: str, celled: bool) -> Any:
    """Name the tensors of a gradient."""
    g, *rest = tensors
    by_cells = rest.pop(0) if celled else None
    _, w, h, *rest = rest
    own = rest.pop(0) if kind in ("lstm", "gru") else None
    outputs, *kept = rest
    return g, by_cells, w, h, own, outputs, kept


def _whole(
    by_ahead: Tensor, by_again: Tensor, before: Tensor, by_h: Tensor, by_cell: Tensor, kind: str
) -> Trees:
    """Take the product that gives the weights' gradient, of all places at once."""
    by_w = torch.bmm(by_again.flatten(1, 2).mT, before.flatten(1, 2))
    found = (by_ahead, by_w, by_h)
    if kind == "lstm":
        return (*found, by_cell)
    if kind == "gru":
        return (*found, by_again[..., 2 * by_h.shape[-1] :].sum((1, 2)))
    return found


def _lstm_back(by_h: Tensor, by_cell: Tensor, cell: Tensor, before: Tensor, gates: Tensor) -> Trees:
    enter, forget, new, out = gates.chunk(4, -1)
    bent = cell.tanh()
    by_cell = by_cell + by_h * out * (1 - bent * bent)
    by_gates = torch.cat(
        [
            by_cell * new * enter * (1 - enter),
            by_cell * before * forget * (1 - forget),
            by_cell * enter * (1 - new * new),
            by_h * bent * out * (1 - out),
        ],
        -1,
    )
    return by_cell * forget, by_gates


def _gru_back(by_h: Tensor, before: Tensor, gates: Tensor) -> Trees:
    reset, keep, new, inner = gates.chunk(4, -1)
    by_new = by_h * (1 - keep) * (1 - new * new)
    by_reset = by_new * inner * reset * (1 - reset)
    by_keep = by_h * (before - new) * keep * (1 - keep)
    entered = torch.cat([by_reset, by_keep, by_new], -1)
    again = torch.cat([by_reset, by_keep, by_new * reset], -1)
    return by_h * keep, entered, again


# By `recurrent.cu`: a product and one launch a place.


def _cuda_forward(ahead: Tensor, w: Tensor, h: Tensor, *own: Tensor, kind: str) -> Trees:
    groups, places, examples, _ = ahead.shape
    units = h.shape[-1]
    ahead, h, turned = ahead.contiguous(), h.contiguous(), w.mT
    outputs = h.new_empty(groups, places, examples, units)
    kept = {"lstm": (units, 4 * units), "gru": (4 * units,)}.get(kind, ())
    rest = [h.new_empty(groups, places, examples, width) for width in kept]
    more = own[0].contiguous() if own else h
    for place in range(places):
        before = outputs[:, place - 1] if place else h
        if kind == "gru":
            total = torch.bmm(before, turned)
        else:
            total = torch.baddbmm(ahead[:, place], before, turned)
        cell = rest[0][:, place - 1] if place and kind == "lstm" else more
        given = [total, ahead[:, place], before, cell, outputs[:, place]]
        given += [part[:, place] for part in rest]
        _launch(f"{kind}_forward", examples, units, given)
    return outputs, *rest


def _cuda_gradient(*tensors: Tensor, kind: str, celled: bool) -> Trees:
    g, by_cells, w, h, own, outputs, kept = _parted(tensors, kind, celled)
    groups, places, examples, units = outputs.shape
    g, h, w = g.contiguous(), h.contiguous(), w.contiguous()
    outputs, kept = outputs.contiguous(), [part.contiguous() for part in kept]
    by_cells = g if by_cells is None else by_cells.contiguous()
    width = {"lstm": 4, "gru": 3}.get(kind, 1) * units
    by_ahead = h.new_empty(groups, places, examples, width)
    by_again = torch.empty_like(by_ahead) if kind == "gru" else by_ahead
    by_cell = torch.zeros_like(h)
    own = own.contiguous() if own is not None else h
    later: Tensor = torch.zeros_like(h)  # the gradient by an output through all that follow
    for place in range(places - 1, -1, -1):
        before = outputs[:, place - 1] if place else h
        passed = torch.empty_like(h)
        given = [g[:, place], later, before, outputs[:, place], by_ahead[:, place], passed]
        if kind == "lstm":
            cell = kept[0][:, place - 1] if place else own
            given += [by_cells[:, place], by_cell, kept[0][:, place], cell, kept[1][:, place]]
        elif kind == "gru":
            given += [by_again[:, place], kept[0][:, place]]
        _launch(f"{kind}_gradient", examples, units, given, CELLED=int(celled))
        if kind == "gru":
            later = torch.baddbmm(passed, by_again[:, place], w)
        else:
            later = torch.bmm(by_ahead[:, place], w)
    before = torch.cat([h[:, None], outputs[:, :-1]], 1)
    return _whole(by_ahead, by_again, before, later, by_cell, kind)


def _launch(name: str, examples: int, units: int, tensors: Sequence[Tensor], **more: int) -> None:
    """Launch a thread for each unit of each example; tensors are followed by their strides."""
    constants: dict[str, int | str] = {
        "REAL": REALS[tensors[0].dtype], "N": examples, "H": units, "THREADS": _THREADS, **more,
    }  # fmt: skip
    blocks = (-(-examples * units // _THREADS), len(tensors[0]), 1)
    strides = [part.stride(0) for part in tensors]
    launch("recurrent.cu", name, constants, blocks, _THREADS, [*tensors, *strides])
