"""A recurrent network for the next word; its own LSTM, since torch's cannot be vmapped."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LSTM(nn.Module):
    """Stacked LSTM layers with the parameters, names and results of `nn.LSTM(batch_first=True)`.

    It begins every sequence at zero and returns the last layer's outputs [example, place, unit].
    """

    def __init__(self, inputs: int, units: int, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.units, self.layers = units, layers
        self.between = nn.Dropout(dropout)
        bound = 1 / math.sqrt(units)
        for layer in range(layers):
            wide = units if layer else inputs
            shapes: dict[str, tuple[int, ...]] = {
                "weight_ih": (4 * units, wide),
                "weight_hh": (4 * units, units),
                "bias_ih": (4 * units,),
                "bias_hh": (4 * units,),
            }
            for name, shape in shapes.items():
                value = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
                self.register_parameter(f"{name}_l{layer}", value)

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers, one after the other."""
        for layer in range(self.layers):
            x = self._layer(self.between(x) if layer else x, layer)
        return x

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        named = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        enter, again, *biases = (getattr(self, f"{name}_l{layer}") for name in named)
        # What the inputs contribute is one product for all places and gates; only the product with
        # the last output has to wait for it.
        ahead = F.linear(x, enter, biases[0] + biases[1]).unbind(1)
        units = self.units
        cell = hidden = None
        outputs = []
        for entered in ahead:
            gates = entered if hidden is None else entered + F.linear(hidden, again)
            opened = gates.sigmoid()  # of all four at once: one kernel, a quarter of it unused
            new = opened[..., :units] * gates[..., 2 * units : 3 * units].tanh()
            cell = new if cell is None else opened[..., units : 2 * units] * cell + new
            hidden = opened[..., 3 * units :] * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1)


class NextWord(nn.Module):
    """Two LSTM layers of 200 units under a tied embedding: 10,693,200 parameters at 50,000 words.

    50,000 · 200 of the embedding, which is the output layer too, 2 · (4 · 200 · (200 + 200) + 2 · 4
    · 200) of the LSTM, and 50,000 output biases.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        units: int = 200,
        layers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, units)
        self.lstm = LSTM(units, units, layers, dropout)
        self.decoder = _Bias(classes)
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, place, word] of tokens [example, place]."""
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Return what enters the output layer: [example, place, unit]."""
        read: Tensor = self.dropout(self.lstm(self.dropout(self.embedding(x))))
        return read

    def head(self, features: Tensor) -> Tensor:
        """Return logits of features; the weights are those of the embedding."""
        return F.linear(features, self.embedding.weight, self.decoder.bias)


class _Bias(nn.Module):
    """The part of the output layer that the embedding does not give."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))
