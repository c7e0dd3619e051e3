"""Networks that do not fit are told before the first round, in one line."""

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint

import worlds
from idiolect.core.method import Report
from idiolect.engine import architecture
from idiolect.errors import MethodError, ModelError
from idiolect.kernels import autotune
from idiolect.methods import FedAvg, FedPer, FedRep, LGFedAvg
from idiolect.methods.personalise.fine_tuning import Tuned
from idiolect.models import LeNet5


def start(build):
    return worlds.simulation(FedAvg(), worlds.federation(), build=build)


def test_a_network_for_images_on_a_table_of_features():
    with pytest.raises(ModelError, match=r"network 'main' cannot be built: ValueError: not enough"):
        start(lambda: LeNet5((worlds.FEATURES,), worlds.CLASSES))


def test_a_network_that_takes_another_shape():
    with pytest.raises(ModelError, match=r"fails on examples of shape \(4,\): RuntimeError: mat1"):
        start(lambda: nn.Linear(worlds.FEATURES + 1, worlds.CLASSES))


@pytest.mark.parametrize(
    ("build", "got"),
    [
        (lambda: nn.Linear(worlds.FEATURES, 7), r"\(2, 7\)"),
        (lambda: Pair(), "tuple"),
    ],
)
def test_a_network_that_returns_something_else(build, got):
    with pytest.raises(ModelError, match=rf"returns {got} .* expected outputs of shape \(2, 3\)"):
        start(build)


def test_trying_leaves_torchs_random_state_alone():
    before = torch.get_rng_state()
    start(worlds.Normed)
    assert torch.equal(before, torch.get_rng_state())


def test_no_kernel_is_chosen_for_the_examples_of_a_trial(monkeypatch):
    """On a GPU that would take seconds before the first round, for sizes that no round has."""
    monkeypatch.setattr(architecture, "_on_gpu", lambda examples: True)

    class Tried(nn.LSTM):  # recurrent, so vmap is tried as well
        def forward(self, x):
            tried.append(autotune._Choosing.trial)
            return super().forward(x[:, None])[0][:, 0]

    tried = []
    start(lambda: Tried(worlds.FEATURES, worlds.CLASSES, batch_first=True))
    assert len(tried) > 4 and all(tried) and not autotune._Choosing.trial


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(worlds.FEATURES, worlds.CLASSES)

    def forward(self, x):
        return self.fc(x), x


class Seen(nn.Linear):
    """Notes of which class it is when it runs."""

    met: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__(worlds.FEATURES, worlds.CLASSES)
        self.inner = nn.Linear(worlds.CLASSES, worlds.CLASSES)

    def forward(self, x):
        self.met.append(type(self.inner).__name__)
        return self.inner(super().forward(x))


@pytest.mark.parametrize(
    ("kind", "layer"), [("vectorised", "StackedLinear"), ("sequential", "Linear")]
)
def test_clients_one_by_one_have_torchs_own_layers(kind, layer):
    Seen.met.clear()
    worlds.simulation(FedAvg(), worlds.federation(), kind=kind, build=Seen).advance()
    assert set(Seen.met) - {"Identity"} == {layer}  # that stands for the head where it is sought


def test_a_network_that_vmap_cannot_map_has_torchs_own_layers():
    class Recurrent(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.LSTM(1, 2, proj_size=1)

    Seen.met.clear()
    simulation = worlds.simulation(FedAvg(), worlds.federation(), build=Recurrent)
    simulation.advance()
    assert set(Seen.met) == {"Linear"}
    assert "LSTM, which torch cannot vmap" in simulation.notices[0]


class Own(nn.Module):
    """A hidden layer and a head, between which a test does what it likes."""

    def __init__(self, between, **buffers) -> None:
        super().__init__()
        self.hidden = nn.Linear(worlds.FEATURES, 6)
        self.head = nn.Linear(6, worlds.CLASSES)
        self.between, self.steps = between, 0
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.head(self.between(self, self.hidden(x)))


def counted(self, h):
    self.steps += self.training
    return h / (1 + self.steps)


def averaged(self, h):
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
    return h - self.mean


def averaged_in_place(self, h):
    if self.training:
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h - self.mean


def attended(self, h):
    q = h[:, None].transpose(0, 1)  # examples where places belong
    return F.scaled_dot_product_attention(q, q, q)[0]


class Plain(Own):
    """Has its running mean as a plain tensor."""

    def __init__(self) -> None:
        super().__init__(averaged)
        self.mean = torch.zeros(6)


class Seeing(Own):
    """Leaves behind what it saw, which changes nothing."""

    def __init__(self) -> None:
        super().__init__(self.look)
        self.seen = None

    @staticmethod
    def look(self, h):
        self.seen = h.detach()
        return h


def test_what_a_network_leaves_behind_is_no_state():
    worlds.simulation(FedAvg(), worlds.federation(), build=Seeing).advance()


class Listed(Own):
    def __init__(self) -> None:
        super().__init__(lambda self, h: self.layers[0](h).tanh())
        self.layers = [nn.Linear(6, 6)]


def hooked(around):
    first = around(nn.Linear(worlds.FEATURES, 6))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(6, worlds.CLASSES))


def embedded(**options):
    return nn.Sequential(nn.Embedding(5, 6, **options), nn.Linear(6, worlds.CLASSES))


def stored(self, h):
    self.calls = [*self.calls, 1]
    return h / len(self.calls)


class Kept(Own):
    """Counts in a list."""

    def __init__(self) -> None:
        super().__init__(stored)
        self.calls = []


class Constrained(Own):
    """Holds the weight of a layer within limits, by writing to it."""

    def __init__(self, most=1.0) -> None:
        super().__init__(self.limited)
        self.most = most

    @staticmethod
    def limited(self, h):
        self.hidden.weight.data = torch.renorm(self.hidden.weight.data, 2, 0, self.most)
        return h


def written(self, h):
    with torch.no_grad():
        self.head.weight.clamp_(-1, 1)
    return h


class Called(Own):
    """Its lambda holds the module it was made in, not the copy that is trained."""

    def __init__(self) -> None:
        super().__init__(lambda _, h: self.more(h))
        self.more = nn.Linear(6, 6)


class Complex(Own):
    def __init__(self) -> None:
        super().__init__(lambda self, h: h * self.turn.abs())
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))


class LookedUp(Own):
    def __init__(self) -> None:
        super().__init__(lambda self, h: h + F.embedding(h.argmax(1), self.table, sparse=True))
        self.table = nn.Parameter(torch.ones(6, 6))


def turned(map_by):
    layer = orthogonal(nn.Linear(worlds.FEATURES, 2), orthogonal_map=map_by)
    return nn.Sequential(layer, nn.Linear(2, worlds.CLASSES))


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Kept, "gives other results when it runs again"),
        (Constrained, "changes its parameter 'hidden.weight' while it runs"),
        (lambda: Constrained(100.0), "changes its parameter 'hidden.weight' while it runs"),
        (lambda: Own(written), "changes its parameter 'head.weight' while it runs"),
        (Called, "trainable but not among its parameters, .* a lambda keeps those of the first"),
        (Complex, "whose 'turn' has complex numbers, .*view_as_complex"),
        (LookedUp, "gives a sparse gradient of 'table'"),
        (lambda: turned(None), "layer '0.parametrizations.weight.0' is _Orthogonal, .* 'cayley'"),
        (lambda: Own(lambda _, h: h / h.shape[0]), "otherwise when another of its batch changes"),
        (lambda: Own(lambda _, h: h / h.abs().max()), "otherwise when another of its batch"),
        (lambda: Own(lambda _, h: F.dropout(h, 0.5)), "in evaluation too, .*training=self.train"),
        (
            lambda: Own(lambda _, h: h * random.choice([1, 2])),
            "draws random numbers by Python's random or by NumPy",
        ),
        (
            lambda: Own(lambda _, h: h * float(np.random.normal())),
            "draws random numbers by Python's random or by NumPy",
        ),
        (lambda: Own(counted), "changes 'steps' whenever it runs"),
        (lambda: Own(averaged, mean=torch.zeros(6)), "changes 'mean' whenever it runs"),
        (lambda: Own(averaged_in_place, mean=torch.zeros(6)), "changes 'mean' whenever it runs"),
        (Plain, "changes 'mean' whenever it runs"),
        (lambda: hooked(spectral_norm), r"changes '0.weight_u' .*parametrizations.weight_norm"),
        (lambda: Own(lambda _, h: h - h.mean(0)), "otherwise when another of its batch changes"),
        (
            lambda: Own(lambda _, h: F.batch_norm(h, None, None, training=True)),
            "otherwise when another of its batch changes",
        ),
        (lambda: Own(attended), "otherwise when another .* batch_first=True"),
        (lambda: Own(lambda self, h: (h,) if self.training else h), "fails .* in training mode"),
        (Listed, "trainable but not among its parameters, .* nn.ModuleList"),
        (
            lambda: hooked(weight_norm),
            r"layer '0' is Linear, whose 'weight' .*parametrizations.weight_norm",
        ),
        (
            lambda: hooked(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
            r"layer '0' is Linear, .*prune.remove",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(worlds.CLASSES)), "layer '0' is LazyLinear, .* sizes"),
        (lambda: embedded(max_norm=1.0), "layer '0' is Embedding, whose max_norm"),
        (lambda: embedded(scale_grad_by_freq=True), "layer '0' is Embedding, .* counts padding"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_what_would_be_wrong_in_silence_is_refused(build, said, kind):
    with pytest.raises(ModelError, match=said):
        worlds.simulation(FedAvg(), worlds.federation(), kind=kind, build=build)


class Again(Own):
    def __init__(self) -> None:
        super().__init__(lambda self, h: checkpoint(self.again, h, use_reentrant=False))
        self.again = nn.Linear(6, 6)


def test_a_part_that_is_run_again_for_its_gradient():
    """It would be run with the network's first parameters, not the client's."""
    with pytest.raises(ModelError, match="runs a part again to take its gradient"):
        worlds.simulation(FedAvg(), worlds.federation(), kind="sequential", build=Again)


class Worded(nn.Module):
    """Reads features as words of which number 0 fills up; its embedding is somebody's own."""

    def __init__(self, embedding) -> None:
        super().__init__()
        self.embedding = embedding(5, 6, padding_idx=0)
        self.head = nn.Linear(6, worlds.CLASSES)

    def forward(self, x):
        return self.head(self.embedding((x * 2).abs().long().clamp(max=4)).mean(1))


class Scaled(nn.Embedding):
    def forward(self, places):
        return super().forward(places) * 2


def doubled(model):
    model[1].register_forward_hook(lambda layer, given, made: 2 * made)
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: Worded(nn.Embedding),
        lambda: Worded(Scaled),
        lambda: Worded(lambda *sizes, **more: nn.Embedding(*sizes, sparse=True, **more)),
        lambda: doubled(hooked(lambda layer: layer)),
    ],
    ids=["padding_idx", "a kind of embedding of one's own", "sparse", "a hook on ReLU"],
)
def test_vectorised_is_torchs_own(build, float64):
    """By vmap alone the row of padding is trained; a layer joined with its ReLU had no hooks."""

    def trained(kind):
        simulation = worlds.simulation(FedAvg(lr=0.5), worlds.federation(), kind=kind, build=build)
        for _ in range(2):
            simulation.advance()
        return simulation.tree["server"]

    assert not worlds.differing(trained("vectorised"), trained("sequential"), 1e-12)


def turned_back(self, h):
    """Reverses the gradient by a hook, as adversarial training does."""
    if h.requires_grad:
        h.register_hook(lambda gradient: -gradient)
    return h


class Rounded(torch.autograd.Function):
    """In the old form, without setup_context."""

    @staticmethod
    def forward(ctx, h):
        return h.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def masked_rows(self, h):
    made = torch.zeros_like(h)
    made[h[:, 0] > 0] = h[h[:, 0] > 0].tanh()
    return made


def inner_gradient(self, h):
    with torch.enable_grad():
        at = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.head(at).square().sum(), at, create_graph=True)
    return h - slope


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (
            turned_back,
            "another gradient of 'hidden.weight' than plain torch, as it does past hooks",
        ),
        (lambda _, h: Rounded.apply(h), "to use an autograd.Function"),
        (masked_rows, "We do not support batching operators"),
        (lambda _, h: h * 2 if h[0, 0].item() > 1e6 else h, "item() on a Tensor"),
        (inner_gradient, "vmap cannot map it"),
    ],
)
def test_what_vmap_would_do_otherwise_is_trained_client_by_client(between, said, float64):
    """The last client's rows by plain torch, from what it was sent."""

    def trained(kind):
        simulation = worlds.simulation(
            FedAvg(lr=0.5, batch=100), worlds.federation(), kind=kind, build=lambda: Own(between)
        )
        start = simulation.states[0]
        simulation.advance()
        return simulation, start

    simulation, start = trained("vectorised")
    assert said in simulation.notices[0] and "one after the other" in simulation.notices[0]
    other, _ = trained("sequential")
    assert not worlds.differing(simulation.states[0], other.states[0], 1e-12)
    world, model = worlds.federation(), Own(between)
    total = {name: torch.zeros_like(own) for name, own in start.items()}
    for rows in world.train:
        model.load_state_dict(start)
        if len(rows):
            x, y = torch.from_numpy(world.dataset.x[rows]), torch.from_numpy(world.dataset.y[rows])
            F.cross_entropy(model(x.double()), y).backward()
        for name, own in model.named_parameters():
            slope = 0 if own.grad is None else own.grad
            total[name] += len(rows) * (own.detach() - 0.5 * slope)
            own.grad = None
    count = sum(map(len, world.train))
    expected = {name: own / count for name, own in total.items()}
    assert not worlds.differing(simulation.states[0], expected, 1e-12)


def test_dropout_as_a_function_is_dropout(float64):
    """It draws in training alone, so it is seeded by the round as nn.Dropout is."""

    def dropped(self, h):
        return F.dropout(h, 0.5, self.training)

    def trained():
        simulation = worlds.simulation(
            FedAvg(lr=0.5), worlds.federation(), build=lambda: Own(dropped)
        )
        simulation.advance()
        return simulation.states[0]

    assert not worlds.differing(trained(), trained())
    assert worlds.differing(trained(), start(lambda: Own(dropped)).states[0])


def test_a_module_that_writes_to_its_examples_gets_a_copy():
    """Others see the same examples: here the same network runs twice on a batch."""

    class Twice(FedAvg):
        def client_step(self, sent, personal, local):
            def loss(params, batch):
                return local.loss(params, batch) + local.loss(params, batch)

            return Report(self.fit(local, sent.shared, loss), local.size), personal

    class Shifting(Own):
        def forward(self, x):
            return super().forward(x.sub_(1) if self.writes else x - 1)

    def trained(writes):
        def build():
            made = Shifting(lambda _, h: h)
            made.writes = writes
            return made

        simulation = worlds.simulation(Twice(lr=0.5), worlds.federation(), build=build)
        simulation.advance()
        return simulation.states[0]

    assert not worlds.differing(trained(True), trained(False), 1e-6)


class HeadFirst(nn.Module):
    """Defines what runs last before what runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, worlds.CLASSES)
        self.body = nn.Sequential(nn.Linear(worlds.FEATURES, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x):
        return self.head(self.body(x))


class TiedHead(HeadFirst):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, worlds.CLASSES, bias=False)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, worlds.CLASSES, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x):
        return self.last(self.middle(self.body(x)))


@pytest.mark.parametrize(
    "method",
    [FedPer(), FedRep(), LGFedAvg(), Tuned(FedAvg(), trains="head")],
)
@pytest.mark.parametrize(
    ("build", "last", "runs"),
    [(HeadFirst, "body.2", "head"), (TiedHead, "middle", "embedding")],
)
def test_a_head_that_is_not_defined_last_is_refused(method, build, last, runs):
    """Else another layer would be personal, in silence."""
    said = rf"takes the layer defined last for the head, '{last}', but '{runs}' runs last"
    with pytest.raises(MethodError, match=said):
        worlds.simulation(method, worlds.federation(), build=build)
    worlds.simulation(FedAvg(), worlds.federation(), build=build)


def test_two_layers_may_be_the_head_in_any_order():
    worlds.simulation(FedPer(head_layers=3), worlds.federation(), build=HeadFirst)


def test_a_head_whose_weight_is_made_of_others_is_one_layer():
    """Its bias would be averaged while the rest is personal."""

    def build():
        first = nn.Linear(worlds.FEATURES, 6)
        return nn.Sequential(first, parametrizations.weight_norm(nn.Linear(6, worlds.CLASSES)))

    simulation = worlds.simulation(FedPer(), worlds.federation(), build=build)
    assert set(simulation.states[0]) == {"0.weight", "0.bias"}
