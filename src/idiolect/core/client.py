"""One client's data and the verbs that may touch it.

A method never sees rows, order, padding or devices: it asks a `Local` to fold a step over batches
(`scan`), to average over examples (`mean`) or to give one row per example (`rows`). Ragged clients
are padded and masked here and nowhere else: a padded example has weight 0, and a step made of
padding alone leaves the carry as it was.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.func import grad

from idiolect.core import batchnorm, losses, tree
from idiolect.core.batches import Batch, Batching, Plan, Plans, Pool, Pulse, Request
from idiolect.core.graph_scan import GraphScan
from idiolect.core.network import Network, Part
from idiolect.core.optim import Optimiser
from idiolect.core.randomness import Random
from idiolect.core.task import Task
from idiolect.core.tree import Params, Tree
from idiolect.errors import MethodError
from idiolect.kernels.beneath import clients_of_stack, stacked_descent, stacked_gradient

__all__ = ["Batch", "Local", "Loss", "Network", "Plan", "Plans", "Pool", "Request"]

Loss = Callable[[Any, Batch], Tensor]
_HELD_OUT = ("val", "labelled")  # streams with validation rows
_READY = 1 << 28  # bytes of decoded examples that a block may hold on a GPU


def _ordered(like: Params, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """Put parts of a tree of parameters together again, in the order they had."""
    if len(parts[0]) == len(like):
        return dict(parts[0])
    whole = {name: leaf for part in parts for name, leaf in part.items()}
    return {name: whole[name] for name in like}


class Local:
    """All that one client may touch during a round."""

    def __init__(
        self,
        networks: Mapping[str, Network],
        plans: Plans,
        slot: Tensor,
        size: Tensor,
        round: Tensor,
        stacked: bool,
        initial: Params | None = None,
        channels_last: bool = False,
        graphs: GraphScan | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """`channels_last` lays out images so; some networks are faster then on a CPU.

        With `graphs`, scans may be captured in pieces on CUDA. `pulse` hears of every step.
        """
        self.size = size  # number of training examples
        self.round = round  # rounds completed before this one
        self._networks = networks
        self._plans = plans
        self._slot = slot
        self._stacked = stacked
        self._initial = initial
        self._channels_last = channels_last
        self._graphs = graphs
        self._pulse = pulse
        self._calls = 0
        self._look: Callable[[Request], None] | None = None
        self.random = Random(lambda: plans.keys()[slot], size)
        self._training = "train"  # the stream that methods train on
        self._spares = False  # whether validation rows must not be trained on
        self._averaged = ""  # the stream whose outputs are taken just now
        self._weighed = False  # whether training weighs some examples more than others
        self._statistics = frozenset().union(*(own.statistics for own in networks.values()))
        # For each gradient being taken, innermost last; None where nothing is normalised by batch.
        self._gradients: list[batchnorm.RunningStatistics | None] = []
        self._last_batch: tuple[Tensor, Tensor] | None = None  # its examples and weights

    def watched(self, look: Callable[[Request], None]) -> "Local":
        """Return the same client's data; `look` sees each request first, and may raise."""
        watched = copy.copy(self)
        watched._look = look
        return watched

    def with_validation(self) -> "Local":
        """Return the same client's data, with its validation rows among the training rows.

        For what is trained after everything was chosen. `size` stays that of the training rows.
        """
        both = copy.copy(self)
        both._training = "labelled"
        return both

    def sparing_validation(self) -> "Local":
        """Return the same client's data, whose validation rows are refused to training."""
        spared = copy.copy(self)
        spared._spares = True
        return spared

    def _refuse_held_out(self, stream: str) -> None:
        if self._spares and stream in _HELD_OUT:
            raise MethodError(
                "client code trains on validation rows, so no score on them would mean anything; "
                "train on 'train', or, if it only chooses by them, say so in its class: a property "
                "`chooses` that returns True"
            )

    @property
    def initial(self) -> Params:
        """The parameters that training started from, where the method says it `starts_over`."""
        if self._initial is None:
            raise MethodError(
                "the initial parameters are at hand only in `deploy` and `adapt` of a method that "
                "says so; set `starts_over = True` in its class"
            )
        return self._initial

    @property
    def task(self) -> Task:
        """What labels are, and how outputs are compared with them and with each other."""
        return self._networks["main"].task

    @property
    def beside(self) -> int:
        """How many clients of a block are in memory at once, each with tensors like this one's."""
        return max(1, self._plans.clients) if self._stacked else 1

    @property
    def steady(self) -> bool:
        """Whether the client's networks surely do the same in training and in evaluation."""
        return all(network.steady for network in self._networks.values())

    def logits(
        self,
        params: Params,
        x: Tensor,
        training: bool = False,
        network: str = "main",
        weight: Tensor | None = None,
    ) -> Tensor:
        """Run the client's own architecture (or its auxiliary one) with these parameters.

        Batch normalisation in training has to know padding: `weight` is needed for examples that
        are not just those of the last batch.
        """
        return self._run("logits", params, x, training, network, weight)

    def features(
        self,
        params: Params,
        x: Tensor,
        training: bool = False,
        network: str = "main",
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return what enters the network's head: [example, feature], or one row per place.

        `head` is the way on: `head(params, features(params, x))` are the logits.
        """
        return self._run("features", params, x, training, network, weight)

    def head(
        self,
        params: Params,
        features: Tensor,
        training: bool = False,
        network: str = "main",
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of given features."""
        return self._run("head", params, features, training, network, weight)

    def _run(
        self,
        part: Part,
        params: Params,
        x: Tensor,
        training: bool,
        network: str,
        weight: Tensor | None,
    ) -> Tensor:
        chosen = self._networks[network]
        if not training or not chosen.statistics:
            return chosen(params, x, training, part)
        if weight is None and self._last_batch is not None and x is self._last_batch[0]:
            weight = self._last_batch[1]
        if weight is None:
            raise MethodError(
                "the network has batch normalisation, which cannot tell padding among examples "
                f"that are not a batch's own; pass {part}(..., weight=batch.weight)"
            )
        moving = self._gradients[-1] if self._gradients else None
        if moving is None:
            raise MethodError(
                "the network has batch normalisation and was run in training mode outside of "
                "local.gradient and local.fit, so its running statistics would stand still; take "
                "gradients there, pass training=False, or use norm = 'group'"
            )
        if weight.dim() > 1:  # of labels; an example with any is one
            weight = weight.flatten(1).amax(1)
        if self._weighed:  # a rare class counts more in the loss, but not in the statistics
            weight = (weight > 0).to(weight.dtype)
        return chosen.run_noted(params, x, weight, moving, part)

    def loss(self, params: Params, batch: Batch, network: str = "main") -> Tensor:
        """The task's loss of a batch, padding ignored; of classes cross-entropy in nats."""
        logits = self.logits(params, batch.x, batch.training, network, batch.weight)
        return self.task.loss(logits, batch.y, batch.weight)

    def accuracy(self, params: Params, batch: Batch, network: str = "main") -> Tensor:
        """Share of the batch that is classified rightly; of other tasks `score`."""
        return self.score(params, batch, network)

    def score(self, params: Params, batch: Batch, network: str = "main") -> Tensor:
        """How good a model is on a batch, higher is better; of classes the accuracy."""
        logits = self.logits(params, batch.x, network=network)
        return self.task.score(logits, batch.y, batch.weight)

    def gradient(self, loss: Loss, params: Params, batch: Batch) -> Params:
        """Return the gradient of a batch loss at some parameters.

        Running statistics are no variables of the loss: in their place stands how far the batch
        moves them (`tree.Drift`), for the optimiser or `tree.axpy` to apply.
        """
        self._refuse_held_out(self._averaged)
        held: Params = {}
        gradient: Params
        trained = params
        clients = self._clients_beneath()
        if self._statistics:
            held, trained = tree.split(params, self._statistics.__contains__)

        def objective(trained: Params) -> tuple[Tensor, Params]:
            # Closed over rather than passed, so that torch does not wrap batch and statistics:
            # they are known again by identity.
            moving = batchnorm.RunningStatistics(held) if self._statistics else None
            value = self._within_gradient(loss, _ordered(params, trained, held), batch, moving)
            return value, moving.drifts() if moving else {}

        if not trained:  # a normalisation without scale and shift, trained by itself
            gradient, (_, moved) = {}, objective({})
        elif clients is not None:
            gradient, moved = stacked_gradient(objective, trained, clients)
        elif self._stacked:
            gradient, moved = grad(objective, has_aux=True)(trained)
        else:
            # Plain autograd is the same gradient with less overhead than the functional transform.
            at = {name: value.detach().requires_grad_() for name, value in trained.items()}
            with torch.enable_grad():
                value, moved = objective(at)
            leaves = torch.autograd.grad(
                value, list(at.values()), allow_unused=True, materialize_grads=True
            )
            gradient = dict(zip(at, leaves, strict=True))
        drifts = {name: tree.Drift(by) for name, by in moved.items()}
        return _ordered(params, gradient, drifts)

    def _clients_beneath(self) -> int | None:
        """Return the number of clients whose gradients may be taken together beneath vmap, if any.

        A gradient within a gradient is differentiated itself; on a GPU steps are recorded; where
        autograd is switched off torch.func.grad is not.
        """
        plain = torch.is_grad_enabled() and not self._gradients and not self.size.is_cuda
        return clients_of_stack() if plain and self._stacked else None

    def _is_alone(self, params: Params) -> bool:
        """Say whether a step of a single client may change parameters in their place, on a CPU."""
        return (
            not (self._stacked or self._gradients or self.size.is_cuda or tree.transformed())
            and type(params) is dict
            and bool(params)  # a network may be all head
            and all(type(leaf) is Tensor and not leaf.requires_grad for leaf in params.values())
        )

    def _within_gradient(
        self, loss: Loss, params: Params, batch: Batch, moving: batchnorm.RunningStatistics | None
    ) -> Tensor:
        self._gradients.append(moving)
        try:
            return loss(params, batch)
        finally:
            self._gradients.pop()

    def scan(
        self,
        step: Callable[[Any, Batch], Any],
        carry: Any,
        stream: str = "train",
        **batching: Unpack[Batching],
    ) -> Any:
        """Fold `step` over shuffled batches of size `batch`: whole `epochs` (1), or some `steps`.

        Of the public stream, `sample` takes the examples drawn for this round, the same for
        everyone, or those of some rounds `ago`: server and clients know them by the seed alone.
        Of a client's own examples, `share` takes a random subset, the same in all epochs of the
        call and another in the next; at least one example.
        """
        return self._fold(lambda carry, batch, _: step(carry, batch), carry, stream, **batching)

    def _fold(
        self,
        step: Callable[[Any, Batch, bool], Any],
        carry: Any,
        stream: str,
        **batching: Unpack[Batching],
    ) -> Any:
        """Do as `scan` does; a step is told whether its carry is spare.

        It is where the step before has made it and nothing needs it after this step.
        """
        plan = self._plan(stream, True, **batching)
        # A replayed graph has no backward pass, where a gradient of the whole scan is wanted.
        graphs = None if self._gradients else self._graphs
        varies, device = plan.needed is not None, plan.rows.device
        if graphs is not None and graphs.worth(plan.rows.shape[1], device, varies):
            return self._captured_scan(
                graphs, lambda carry, batch: step(carry, batch, False), carry, plan
            )
        pulse, steps = self._pulse, plan.rows.shape[1]
        for number, batch in enumerate(self._batches(plan, training=True)):
            # Where every client has examples no mask is needed, which saves a copy.
            there = None if number < plan.certain else batch.weight.sum() > 0
            if there is None:
                carry = step(carry, batch, number > 0)
            else:
                carry = tree.where(there, step(carry, batch, False), carry)
            if pulse is not None:
                pulse.step(number + 1, steps)
        return carry

    def _captured_scan(
        self, graphs: GraphScan, step: Callable[[Any, Batch], Any], carry: Any, plan: Plan
    ) -> Any:
        """Do as `scan` does, with batches that are looked up by the number of the step."""
        rows, weights = plan.rows[self._slot], plan.weight[self._slot]
        weights = self._training_weight(plan, rows, weights)
        places = None if plan.places is None else plan.places[self._slot]
        steps, span = plan.rows.shape[1], _span(plan)
        certain = steps <= plan.certain

        def some(number: Tensor, carry: Any, count: int) -> Any:
            """Do so many steps from a number on; their examples are taken together."""
            if count > span:
                for done in range(0, count, span):
                    carry = some(number + done, carry, min(span, count - done))
                return carry
            which = number + torch.arange(count, device=number.device)
            row, weight = rows.index_select(0, which), weights.index_select(0, which)
            place = [None] * count if places is None else places.index_select(0, which).unbind(0)
            there = [None] * count if certain else (weight.sum(1) > 0).unbind(0)
            taken = zip(
                plan.pool.examples(row).unbind(0),
                plan.pool.labels(row).unbind(0),
                weight.unbind(0),
                row.unbind(0),
                place,
                which.unbind(0),
                there,
                strict=True,
            )
            for x, y, own, numbers, at, step_number, counted in taken:
                self.random.step(step_number)
                batch = self._batch(x, y, own, numbers, True, at)
                if counted is not None and batch.weight is not own:  # of labels
                    counted = batch.weight.sum() > 0
                new = step(carry, batch)
                carry = new if counted is None else tree.where(counted, new, carry)
            return carry

        outer = self.random.enter()
        result = graphs.scan(some, carry, steps, plan.rows.device, plan.needed)
        self.random.leave(outer)
        self._last_batch = None  # else the memory of the graph would be held on to
        return result

    def fit(
        self,
        loss: Loss,
        params: Params,
        optimiser: Optimiser,
        stream: str = "train",
        **batching: Unpack[Batching],
    ) -> Params:
        """Minimise a batch loss from `params` with a fresh optimiser; batches are as in `scan`."""

        def step(carry: Any, batch: Batch, spare: bool) -> Any:
            params, memory = carry
            clients = self._clients_beneath()
            alone = clients is None and self._is_alone(params)
            if optimiser.rate is None or self._statistics or (clients is None and not alone):
                return optimiser.step(params, self.gradient(loss, params, batch), memory)

            def objective(at: Params) -> Tensor:
                return self._within_gradient(loss, at, batch, None)

            if clients is not None:
                return stacked_descent(objective, params, clients, optimiser.rate, spare), memory
            self._refuse_held_out(self._averaged)
            return _descent(objective, params, optimiser.rate, spare), memory

        fitted: Params
        fitted, _ = self._fold(step, (params, optimiser.init(params)), stream, **batching)
        return fitted

    def mean(self, fn: Callable[[Batch], Tree], stream: str = "val", *, batch: int = 500) -> Tree:
        """Average fn(batch), itself a mean, over a stream's labels; NaN where it has none."""
        total, seen = self.total(fn, stream, batch=batch)
        return tree.map(lambda leaf: leaf / seen, total)

    def total(
        self, fn: Callable[[Batch], Tree], stream: str = "val", *, batch: int = 500
    ) -> tuple[Tree, Tensor]:
        """Add fn(batch), a mean, up over a stream's labels; return the number of labels as well."""
        plan = self._plan(stream, False, batch=batch)
        total, count = None, torch.zeros_like(plan.weight[self._slot][0, 0])
        for now in self._outputs(stream, plan):
            labels = now.weight.sum()
            part = tree.scale(labels, fn(now))
            total, count = part if total is None else tree.add(total, part), count + labels
        return total, count

    def class_shares(self, classes: int) -> Tensor:
        """Return how often each class is among the client's training labels; zeros without any."""

        def shares(batch: Batch) -> Tensor:
            counts = losses.by_class(batch.y, batch.weight, classes).sum(0)
            return counts / batch.weight.sum().clamp(min=1)

        total, labels = self.total(shares, "train")
        found: Tensor = total / labels.clamp(min=1)
        return found

    def rows(
        self,
        fn: Callable[[Batch], Tensor],
        stream: str = "public",
        *,
        batch: int = 500,
        sample: int = 0,
        ago: int = 0,
    ) -> Tensor:
        """Return fn's output for every example of a stream that all clients hold, in its order.

        `sample` and `ago` choose among public examples as in `scan`.
        """
        plan = self._plan(stream, False, batch=batch, sample=sample, ago=ago)
        outputs = [fn(now) for now in self._outputs(stream, plan)]
        return torch.cat(outputs)[: plan.longest]

    def own_rows(
        self, fn: Callable[[Batch], Tree], most: int, stream: str = "train", *, batch: int = 500
    ) -> Tree:
        """Return fn's outputs, a row each, for at most so many of the client's own examples.

        Those are drawn at random. There are always `most` rows, zeros after the examples: return
        `batch.weight` among the outputs to tell them.
        """
        plan = self._plan(stream, True, batch=batch)
        outputs = [fn(now) for now in self._batches(plan, training=False)]

        there = plan.weight[self._slot].flatten() > 0

        def filled(*parts: Tensor) -> Tensor:
            found = torch.cat(parts)
            found = torch.where(there.reshape(-1, *[1] * (found.dim() - 1)), found, 0)[:most]
            return torch.cat([found, found.new_zeros(most - len(found), *found.shape[1:])])

        return tree.map(filled, *outputs)

    def each(self, fn: Callable[..., Tree], *rows: Tree) -> Tree:
        """Apply fn to each row of the given stacks and stack the results; all see equal batches.

        Vectorised backends do all rows at once, the sequential one does them in turn.
        """
        calls, drawn = self._calls, self.random.calls
        if self._stacked:
            return torch.vmap(fn, randomness="different")(*rows)
        results, turns = [], len(tree.leaves(rows)[0])
        for place in range(turns):
            if self._pulse is not None:
                self._pulse.turn(place, turns)
            self._calls, self.random.calls = calls, drawn
            results.append(fn(*tree.map(lambda leaf, n=place: leaf[n], rows)))
        return tree.stack(results)

    def alike(self, *works: Callable[[], Tree]) -> list[Tree]:
        """Do several things, each on the batches that it would see if it came first."""
        start, results = (self._calls, self.random.calls), []
        most = start
        for work in works:
            self._calls, self.random.calls = start
            results.append(work())
            most = (max(most[0], self._calls), max(most[1], self.random.calls))
        self._calls, self.random.calls = most
        return results

    def repeat(self, work: Callable[[Any], Any], carry: Any, times: int) -> Any:
        """Do something so many times in a row, each time on the same batches and numbers."""
        start = self._calls, self.random.calls

        def again(carry: Any) -> Any:
            self._calls, self.random.calls = start
            return work(carry)

        if self._graphs is not None and not self._gradients:
            carry = self._graphs.passes(again, carry, times, self._slot.device)
            self._last_batch = None  # else the memory of the graph would be held on to
            return carry
        for _ in range(times):
            carry = again(carry)
        return carry

    def restart(self) -> None:
        """Let what follows see the batches and numbers it would see if nothing had come before."""
        self._calls = self.random.calls = 0

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Make a tensor of constants on the client's device without copying from the host.

        A copy cannot be captured in a CUDA graph; filling can.
        """
        return torch.stack([self.size.new_full((), value) for value in values])

    def _plan(self, stream: str, shuffled: bool, **batching: Unpack[Batching]) -> Plan:
        """Return the client's batches; each shuffled request of a round has its own order."""
        share = batching.get("share", 1.0)
        if not 0 < share <= 1 or (share < 1 and stream == "public"):
            raise MethodError(
                f"share is {share} of the {stream} examples, expected above 0 and at most 1; of "
                "public examples, which all clients draw alike, take a sample instead"
            )
        call = self._calls if shuffled else 0
        self._calls += shuffled
        own = self._training if stream == "train" else stream
        if shuffled:
            self._refuse_held_out(own)
        request = Request(own, shuffled=shuffled, call=call, **batching)
        if self._look is not None:
            self._look(request)
        return self._plans.ask(request)

    def _outputs(self, stream: str, plan: Plan) -> Iterator[Batch]:
        """Yield the batches whose outputs are taken; what is done with one is known to be that."""
        outer = self._averaged
        try:
            for batch in self._batches(plan, training=False):
                self._averaged = stream
                yield batch
        finally:
            self._averaged = outer

    def _batches(self, plan: Plan, training: bool) -> Iterator[Batch]:
        """Yield the batches of a plan; in each step random numbers begin anew."""
        rows, weight = plan.rows[self._slot], plan.weight[self._slot]
        if training:
            weight = self._training_weight(plan, rows, weight)
        places = None if plan.places is None else plan.places[self._slot]
        # Cut once a round rather than once a step: each piece costs as much as a small product.
        order = rows.unbind(0)
        captured = self._stacked and weight.is_cuda  # losses of these take weights themselves
        weights = weight.unbind(0) if captured else losses.by_step(weight)
        outer = self.random.enter()
        for step, (x, y) in enumerate(_examples(plan, rows)):
            place = None if places is None else places[step]
            self.random.step(step)
            yield self._batch(x, y, weights[step], order[step], training, place)
        self.random.leave(outer)

    def _training_weight(self, plan: Plan, rows: Tensor, weight: Tensor) -> Tensor:
        self._weighed = plan.pool.importance is not None
        return plan.pool.weighed(rows, weight)

    def _batch(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        row: Tensor,
        training: bool,
        place: Tensor | None,
    ) -> Batch:
        if self._channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        self._last_batch = (x, weight)
        inner = 0 if y.dtype.is_floating_point else y.dim() - weight.dim()
        if inner:  # a label for each place of a sequence
            weight = weight.reshape(*weight.shape, *[1] * inner) * (y >= 0).to(weight.dtype)
            y = y.clamp(min=0)  # any class will do where nothing is counted
        return Batch(x, y, weight, row, training, place)


def _descent(
    objective: Callable[[Params], Tensor], params: Params, rate: float, spare: bool
) -> Params:
    """Return the parameters minus rate times the gradient; where they are `spare`, in their place.

    Threads that each train a client wait for each other at every call from Python, so a step is
    made of few.
    """
    leaves = [leaf if spare else leaf.clone() for leaf in params.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.enable_grad():
        value = objective(dict(zip(params, leaves, strict=True)))
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    for leaf in leaves:
        leaf.requires_grad_(False)
    moved = leaves
    if any(own is None for own in found):  # a parameter that the loss does not use
        moved = [leaf for leaf, own in zip(leaves, found, strict=True) if own is not None]
        found = tuple(own for own in found if own is not None)
    torch._foreach_add_(moved, found, alpha=-rate)
    return dict(zip(params, leaves, strict=True))


def _examples(plan: Plan, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the examples and labels of each step."""
    span = _span(plan)
    labels = plan.pool.labels(rows).unbind(0)
    if span == 1:
        for step, own in enumerate(rows.unbind(0)):
            yield plan.pool.examples(own), labels[step]
        return
    for first in range(0, rows.shape[0], span):
        for place, x in enumerate(plan.pool.examples(rows[first : first + span]).unbind(0)):
            yield x, labels[first + place]


def _span(plan: Plan) -> int:
    """Return of how many steps the examples are taken at once: 1, or more on a GPU.

    Taking and decoding a batch is quick on a GPU, but each kernel has to be launched.
    """
    x, rows = plan.pool.x, plan.rows
    numbers = rows[:, 0].numel() * max(1, x[:1].numel())
    ready = _READY if rows.is_cuda else 0
    return max(1, ready // (numbers * torch.get_default_dtype().itemsize))
