"""Networks for text: Kim's and fastText for sentences, an LSTM for the next word; word vectors."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.core.vocabulary import padding_token
from idiolect.errors import DataError
from idiolect.models.layers import Shape


class KimCNN(nn.Module):
    """CNN for sentence classification (Kim 2014): windows of 3, 4 and 5 words, 100 filters each.

    Every word begins a window, the last ones' reaching over the end into zeros, and the largest
    answer over the words of a text is kept: so it does not matter how far a text is filled up.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        words: Sequence[str],
        embedding: int = 300,
        filters: int = 100,
        windows: tuple[int, ...] = (3, 4, 5),
        dropout: float = 0.5,
        vectors: str | None = None,
    ) -> None:
        """`vectors` is a file of word vectors in GloVe's form; other words begin at random."""
        super().__init__()
        self.pad = padding_token(words)
        self.embedding = nn.Embedding(len(words), embedding)
        nn.init.uniform_(self.embedding.weight, -0.25, 0.25)
        self.convolutions = nn.ModuleList(nn.Conv1d(embedding, filters, w) for w in windows)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(filters * len(windows), classes)
        if vectors is not None:
            fill_vectors(self.embedding.weight, words, vectors)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class] of tokens [example, place]."""
        real = (x != self.pad).unsqueeze(-1)
        words = self.embedding(x) * real
        found = [_strongest(layer, words, real) for layer in self.convolutions]
        logits: Tensor = self.fc(self.dropout(torch.cat(found, -1)))
        return logits


class FastText(nn.Module):
    """fastText (Joulin et al. 2017) as PFLlib has it: mean of word vectors, two linear layers.

    The mean is over a text's words. PFLlib's is over all 200 places of a text that is filled up
    with zeros: `places = 200`.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        words: Sequence[str],
        embedding: int = 32,
        places: int = 0,
    ) -> None:
        super().__init__()
        self.pad, self.places = padding_token(words), places
        self.embedding = nn.Embedding(len(words), embedding)
        self.fc1 = nn.Linear(embedding, embedding)
        self.fc = nn.Linear(embedding, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class] of tokens [example, place]."""
        real = (x != self.pad).unsqueeze(-1)
        over = self.places or real.sum(1).clamp(min=1)
        logits: Tensor = self.fc(self.fc1((self.embedding(x) * real).sum(1) / over))
        return logits


def _strongest(layer: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    """Return each filter's largest answer over the windows that begin with a word."""
    assert isinstance(layer, nn.Conv1d) and layer.bias is not None
    weight, answers = layer.weight, layer.bias
    filters, features, window = weight.shape
    # One product for all offsets, then shifted sums: under vmap a product of matrices is a batched
    # one, where a convolution would become a grouped one, many times slower.
    spread = weight.permute(2, 0, 1).reshape(window * filters, features)
    parts = F.pad(F.linear(words, spread), (0, 0, 0, window - 1))
    for offset in range(window):
        part = parts[:, offset : offset + words.shape[1]]
        answers = answers + part[..., offset * filters : (offset + 1) * filters]
    strongest: Tensor = answers.masked_fill(~real, -torch.inf).max(1).values
    return strongest.relu()  # an empty text answers nothing: 0


def fill_vectors(weight: Tensor, words: Sequence[str], path: str | os.PathLike[str]) -> int:
    """Copy the vectors of known words from a file of lines `word number number ...`.

    Returns how many words the file had; the others stay as they are.
    """
    file = Path(path).expanduser()
    place = {word: row for row, word in enumerate(words)}
    width, found = weight.shape[1], 0
    try:
        with file.open(encoding="utf-8") as lines, torch.no_grad():
            for number, line in enumerate(lines, 1):
                word, *values = line.rstrip("\n").split(" ")
                if number == 1 and len(values) == 1:
                    continue  # word2vec's text form begins with a count and a width
                if len(values) != width:
                    raise DataError(
                        f"{file}:{number} has {len(values)} numbers after the word, and the "
                        f"network's embedding is {width}; set model.embedding to the file's width"
                    )
                if word in place:
                    weight[place[word]] = torch.tensor([float(value) for value in values])
                    found += 1
    except (OSError, ValueError) as error:
        raise DataError(
            f"the word vectors {file} cannot be read ({error}); expected lines of a word and its "
            "numbers, apart by spaces, in UTF-8"
        ) from error
    return found


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
        self, shape: Shape, classes: int, units: int = 200, layers: int = 2, dropout: float = 0.2
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
