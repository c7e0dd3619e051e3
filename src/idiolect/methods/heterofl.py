"""HeteroFL: clients train the first channels of one network, as many as each can afford.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, Algorithm 1. A client of width r has of every hidden layer the
first ⌈r·n⌉ of n units, hence the upper left block of each weight; networks of smaller width lie
inside those of larger. The server averages each entry over the clients that have it, alike, and
keeps those that nobody has. In training, outputs of hidden layers are divided by r (the scaler), so
that the wide network works without it. Logits of classes that a client has no example of are set to
zero before the cross-entropy, and its rows of those classes are not averaged. The personal model is
the global one with those logits set to zero too, the paper's "local" score; set to zero, not to
−∞, such a class still wins where all others are below zero.

Widths are dealt in turn: client i has widths[i mod k], or, dynamic, draws one anew in every round.
Dense and convolutional layers are cut, with the normalisation and bias that belong to them; a dense
layer after flattened channels by whole channels. A network with recurrent layers is refused.

A narrow client here holds the wide network with zeros outside of its block, which computes the same
as the narrow one, batch normalisation included; group and layer normalisation see the zeros. So
figures of accuracy are those of HeteroFL, and the time and bytes counted are those of full width:
the savings are not realised.

The paper's static batch normalisation keeps no running statistics in training; after it, all
clients in turn add to those of the final network. The released code takes them at the server from
all clients' pooled examples, which a federation has not. Here each client, before it uses the
model, moves its statistics over its own examples; those of the global model are averaged like
parameters. The preset `code` is theirs for MNIST; for CIFAR-10 their rate is 0.1.

Written from notes and released code: the paper's text was not at hand to check equation numbers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import batchnorm, tree
from idiolect.core.client import Batch, Local
from idiolect.core.method import Method, Sent, Setup, alike, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import MethodError


class NestedReport(NamedTuple):
    """What a client reports: its part of the network, and which part that is."""

    params: Params  # zeros outside
    width: Tensor
    classes: Tensor  # [class] 1 where it has examples
    size: Tensor


class Masked(NamedTuple):
    """What a client uses: the global model, for the classes that it has."""

    params: Params
    classes: Tensor


@dataclass(frozen=True, kw_only=True)
class HeteroFL(Method):
    """Clients train nested parts of one network by width; each entry is averaged by who has it."""

    title: ClassVar[str] = "HeteroFL"
    paper: ClassVar[str] = "Diao et al. 2021, Algorithm 1"
    needs_classes: ClassVar[str] = "a row that only those with examples train"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {
            "widths": (1.0, 0.5, 0.25, 0.125, 0.0625),
            "assign": "dynamic",
            "lr": 0.01,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "batch": 10,
            "epochs": 5,
            "clip": 1.0,
        }
    }

    widths: tuple[float, ...] = setting(
        (1.0, 0.5, 0.25), "shares of the units that clients have (r)", above=0, most=1
    )
    assign: str = setting(
        "fixed",
        "who has which: fixed, in turn, or drawn anew each round",
        choices=("fixed", "dynamic"),
    )
    scale: bool = setting(True, "divide outputs of hidden layers by the width in training")
    mask: bool = setting(True, "leave classes out that a client has no example of")
    uniform: bool = setting(True, "weigh clients alike, as printed, instead of by their examples")

    def init_server(self, setup: Setup) -> Params:
        """The wide network."""
        for name in setup.params:
            if name.rpartition(".")[2].startswith(("weight_ih", "weight_hh")):
                raise MethodError(
                    f"parameter {name!r} is of a recurrent layer, whose gates HeteroFL's blocks "
                    "would cut apart; use a network of dense and convolutional layers"
                )
        return setup.params

    def send(self, state: Params, cohort: Tensor) -> Sent:
        """Send the network, and each client its width."""
        one = tree.leaves(state)[0]
        widths = torch.stack([one.new_full((), width) for width in self.widths])
        return Sent(state, widths[cohort % len(self.widths)])

    def client_step(self, sent: Sent, personal: Tree, local: Local) -> tuple[NestedReport, Tree]:
        """Train the block of the client's width."""
        width = sent.own
        if self.assign == "dynamic":
            drawn = (local.random.uniform() * len(self.widths)).long()
            width = local.numbers(self.widths).index_select(0, drawn.reshape(1)).squeeze(0)
        held, classes = self.held(sent.shared, width), self._present(sent.shared, local)
        hidden = _hidden(sent.shared)

        def narrowed(name: str, leaf: Tensor) -> Tensor:
            if batchnorm.is_statistic(name):
                return leaf
            return leaf * held[name] / (width if self.scale and name in hidden else 1.0)

        def loss(params: Params, batch: Batch) -> Tensor:
            inside = {name: narrowed(name, leaf) for name, leaf in params.items()}
            logits = local.logits(inside, batch.x, batch.training, weight=batch.weight)
            return local.task.loss(logits * classes, batch.y, batch.weight)

        trained = self.fit(local, sent.shared, loss)
        inside = {name: leaf * held[name] for name, leaf in trained.items()}
        return NestedReport(inside, width, classes, local.size), personal

    def server_step(self, state: Params, cohort: Tensor, reports: NestedReport) -> Params:
        """Average each entry over those who have it."""
        weight = alike(reports.size) if self.uniform else reports.size
        held = torch.vmap(lambda width: self.held(state, width))(reports.width)
        last = _weighted_layers(state)[-1:]

        def averaged(name: str, old: Tensor) -> Tensor:
            own, rows = held[name], reports.params[name]
            if name.rpartition(".")[0] in last:
                own = own * reports.classes.reshape(*reports.classes.shape, *[1] * (old.dim() - 1))
            own = own * weight.reshape(-1, *[1] * old.dim())
            total = own.sum(0)
            return torch.where(total > 0, (own * rows).sum(0) / total.clamp(min=1e-30), old)

        return {name: averaged(name, old) for name, old in state.items()}

    def deploy(self, sent: Sent, personal: Tree, local: Local) -> Masked:
        """Use the wide network with statistics of the own examples."""

        def step(params: Params, batch: Batch) -> Params:
            moved = local.gradient(local.loss, params, batch)
            still = {n: leaf for n, leaf in params.items() if not batchnorm.is_statistic(n)}
            return {**tree.axpy(0.0, moved, params), **still}

        params = sent.shared
        if any(map(batchnorm.is_statistic, params)):
            params = local.scan(step, params, batch=self.batch)
        return Masked(params, self._present(params, local))

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Set logits of classes that the client has not to zero; not so in the global model."""
        if isinstance(model, Masked):
            return local.logits(model.params, x) * model.classes
        return local.logits(model, x)

    def held(self, params: Params, width: Tensor) -> Params:
        """Return 1 for each entry that a client of some width has, and 0 for the others.

        Rows are the units of a layer, all of the last; columns those of the layer before, all of
        the first. Columns after flattened channels come in runs, one for each channel.
        """
        layers = _weighted_layers(params)
        outputs: list[int] = []  # of the layers so far

        def first(count: int, run: int = 1) -> Tensor:
            there = torch.ceil(width * (count // run) - 1e-4) * run
            return (torch.arange(count, device=width.device) < there).to(width.dtype)

        def after(count: int) -> Tensor:
            """Units that come out of the layers so far."""
            if not outputs:
                return torch.ones(count, dtype=width.dtype, device=width.device)
            whole = count in outputs or count % outputs[-1]
            return first(count, 1 if whole else count // outputs[-1])

        held = {}
        for name, leaf in params.items():
            layer = name.rpartition(".")[0]
            mask = torch.ones_like(leaf)
            if layer in layers:
                if leaf.dim() > 1:
                    mask = mask * after(leaf.shape[1]).reshape(1, -1, *[1] * (leaf.dim() - 2))
                    outputs.append(leaf.shape[0])
                if layer != layers[-1]:
                    mask = mask * first(leaf.shape[0]).reshape(-1, *[1] * (leaf.dim() - 1))
            elif leaf.dim() == 1:  # of a normalisation
                mask = mask * after(leaf.shape[0])
            held[name] = mask
        return held

    def _present(self, params: Params, local: Local) -> Tensor:
        """Return 1 for each class that the client has examples of; all where none are left out."""
        last = list(params.values())[-1]
        if not self.mask:
            return last.new_ones(last.shape[0])
        there = local.class_shares(last.shape[0]) > 0
        return (there | ~there.any()).to(last.dtype)  # without examples nothing is left out


def _weighted_layers(params: Params) -> list[str]:
    """Name the layers with a matrix of weights, in order."""
    wide = [name.rpartition(".")[0] for name, leaf in params.items() if leaf.dim() > 1]
    return list(dict.fromkeys(wide))


def _hidden(params: Params) -> set[str]:
    """Name the parameters of all layers with weights but the last."""
    layers = _weighted_layers(params)[:-1]
    return {name for name in params if name.rpartition(".")[0] in layers}
