"""Networks: the papers' sizes, what is refused and by what it is replaced, and a user's own."""

import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import worlds
from idiolect.core.client import Network
from idiolect.engine.architecture import mappable
from idiolect.errors import MethodError, ModelError
from idiolect.methods import METHODS, FedAvg
from idiolect.models import DNN, MLR, MODELS, LeNet5, McMahanCNN, check, group_norm_instead

READERS = ("kim-cnn", "fasttext", "next-word-lstm", "decoder", "encoder", "hf")  # of words


@pytest.mark.parametrize(
    ("model", "shape", "parameters"),
    [
        # 784 · 10 + 10
        (MLR((1, 28, 28), 10), (1, 28, 28), 7_850),
        # 784 · 100 + 100 + 100 · 10 + 10
        (DNN((1, 28, 28), 10), (1, 28, 28), 79_510),
        # 60 · 20 + 20 + 20 · 10 + 10, as for Synthetic
        (DNN((60,), 10, hidden=20), (60,), 1_430),
        # (75 + 1) · 6 + (150 + 1) · 16 + (400 + 1) · 120 + 121 · 84 + 85 · 10
        (LeNet5((3, 32, 32), 10), (3, 32, 32), 62_006),
        # (25 + 1) · 32 + (800 + 1) · 64 + (1024 + 1) · 512 + 513 · 10
        (McMahanCNN((1, 28, 28), 10), (1, 28, 28), 582_026),
    ],
)
def test_the_papers_networks_have_the_papers_sizes(model, shape, parameters):
    check(model)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in READERS])
def test_every_named_network_of_images_takes_another_shape_and_maps(name):
    """Not only the papers' images: 2 × 20 × 24, 3 classes; one by one and under vmap alike."""
    options = {"dropout": 0.0} if name == "alexnet" else {}
    model = MODELS[name]((2, 20, 24), 3, **options)
    assert not mappable(model)
    x = torch.randn(2, 5, 2, 20, 24)
    network = Network(model)
    stacked = {key: torch.stack([value, 2 * value]) for key, value in network.params.items()}
    mapped = torch.vmap(lambda params, x: network(params, x, True))(stacked, x)
    for n in range(2):
        alone = network({key: value[n] for key, value in stacked.items()}, x[n], False)
        assert alone.shape == (5, 3)
        assert torch.allclose(mapped[n], alone, atol=1e-5)


def convolutional(channels, first, second, *linear):
    """The same layers written one below the other."""
    body = [nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2)]
    body += [nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    for inside, out in pairwise(linear):
        body += [nn.Linear(inside, out), nn.ReLU()]
    return nn.Sequential(*body[:-1])


@pytest.mark.parametrize(
    ("model", "layers", "shape"),
    [
        (MLR((3, 4), 5), nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 4)),
        (
            DNN((3, 4), 5, hidden=7),
            nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 5)),
            (3, 4),
        ),
        (LeNet5((3, 32, 32), 10), convolutional(3, 6, 16, 400, 120, 84, 10), (3, 32, 32)),
        (McMahanCNN((1, 28, 28), 10), convolutional(1, 32, 64, 1024, 512, 10), (1, 28, 28)),
    ],
)
def test_the_papers_networks_are_the_papers_layers(model, layers, shape):
    for own, other in zip(model.parameters(), layers.parameters(), strict=True):
        other.data.copy_(own)
    x = torch.randn(3, *shape)
    assert torch.allclose(model(x), layers(x), atol=1e-6)


# What cannot be trained.


class Convolutional(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), norm, nn.ReLU())
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.body(x).mean((2, 3)))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(6),
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.SyncBatchNorm(6),
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
    ],
)
def test_batch_normalisation_is_refused_by_name_with_its_replacement(norm):
    model = Convolutional(norm)
    message = rf"layer 'body.1' is {type(norm).__name__}.*group_norm_instead\(model\)"
    with pytest.raises(ModelError, match=message):
        check(model)
    fixed = group_norm_instead(model)
    check(fixed)
    # 6 channels are not divisible by the 8 groups preferred, nor by 7.
    assert isinstance(fixed.body[1], nn.GroupNorm) and fixed.body[1].num_groups == 6
    assert torch.equal(fixed.body[0].weight, model.body[0].weight)
    assert isinstance(model.body[1], type(norm))  # the original is left alone
    # No example sees another: alone or in a batch, the same logits.
    x = torch.randn(4, 1, 5, 5)
    assert torch.allclose(fixed(x)[:1], fixed(x[:1]), atol=1e-6)


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 6), nn.InstanceNorm2d(6), nn.LayerNorm([3, 3]), nn.Identity()]
)
def test_what_looks_at_one_example_is_accepted_and_kept(norm):
    model = Convolutional(norm)
    check(model)
    assert type(group_norm_instead(model).body[1]) is type(norm)


def test_a_bare_layer_can_be_replaced_too():
    fixed = group_norm_instead(nn.BatchNorm1d(16, affine=False))
    assert isinstance(fixed, nn.GroupNorm) and fixed.num_groups == 8 and not fixed.affine


def test_a_network_without_anything_to_train_is_refused():
    with pytest.raises(ModelError, match="Sequential has no trainable parameter"):
        check(nn.Sequential(nn.Flatten(), nn.ReLU()))
    with pytest.raises(ModelError, match="no trainable"):
        check(nn.Linear(2, 2).requires_grad_(False))


def test_a_simulation_checks_its_network():
    build = lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))  # noqa: E731
    with pytest.raises(ModelError, match="layer '1' is BatchNorm1d"):
        worlds.simulation(FedAvg(), worlds.federation(), build=build)
    with pytest.raises(ModelError, match="layer '1' is BatchNorm1d"):
        worlds.simulation(FedAvg(), worlds.federation(), auxiliary=build)
    fixed = lambda: group_norm_instead(build())  # noqa: E731
    worlds.simulation(FedAvg(), worlds.federation(), build=fixed).advance()


# A user's own.


class Own(nn.Module):
    """A bit of everything: dropout, normalisation, a buffer, a frozen and a tied layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.full((4,), 0.5))
        self.frozen = nn.Linear(4, 4)
        nn.init.eye_(self.frozen.weight)
        nn.init.zeros_(self.frozen.bias)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(4)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = self.frozen(x - self.shift)
        x = self.drop(self.norm(self.second(self.first(x).tanh())))
        return self.out(x)


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
def test_a_users_module_trains_without_change(kind):
    """Its loss falls; what is frozen or a buffer is neither trained nor sent."""
    method = FedAvg(lr=0.05, momentum=0.5, batch=4, epochs=3)  # steady, whatever dropout draws
    simulation = worlds.simulation(method, worlds.federation(), build=Own, kind=kind)
    assert set(simulation.states[0]) == {
        "first.weight", "first.bias", "second.bias", "norm.weight", "norm.bias",
        "out.weight", "out.bias",
    }  # fmt: skip
    (before,) = simulation.evaluate([worlds.federation().test_data])
    torch.manual_seed(0)
    for _ in range(8):
        simulation.advance()
    (after,) = simulation.evaluate([worlds.federation().test_data])
    assert after.scores["global"]["loss"].mean() < 0.7 * before.scores["global"]["loss"].mean()


def test_dropout_is_on_in_training_and_off_elsewhere():
    network = Network(Own())
    x = torch.ones(50, 4)
    assert torch.equal(network(network.params, x, False)[0], network(network.params, x, False)[1])
    logits = network(network.params, x, True)
    assert len(logits.unique(dim=0)) > 5


def test_a_tied_weight_gets_the_gradient_of_both_places(float64):
    """Against autograd on the module itself."""
    model = Own().eval()
    network, x = Network(model), torch.randn(5, 4)
    loss = lambda logits: F.cross_entropy(logits, torch.tensor([0, 1, 2, 0, 1]))  # noqa: E731
    slopes = torch.func.grad(lambda params: loss(network(params, x, False)))(network.params)
    loss(model(x)).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(slopes[name], parameter.grad, 1e-12, 1e-12), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: params.pop("norm.weight"), "'norm.weight' is absent.*expects \\(4,\\)"),
        (lambda params: params.update(extra=torch.ones(2)), r"'extra' is \(2,\).*expects absent"),
        (lambda params: params.update({"out.bias": torch.ones(1)}), r"'out.bias' is \(1,\)"),
    ],
)
def test_parameters_that_do_not_fit_are_told_not_ignored(change, message):
    """Torch would run on with the initial values of what is missing."""
    network = Network(Own())
    params = dict(network.params)
    change(params)
    with pytest.raises(MethodError, match=message):
        network(params, torch.ones(1, 4), False)


def test_constants_that_differ_between_seeds_are_refused_where_seeds_share_a_module():
    class Randomised(worlds.Normed):
        def __init__(self):
            super().__init__()
            self.register_buffer("directions", torch.randn(4))

    both = [worlds.federation(), worlds.federation(seed=1)]
    with pytest.raises(ModelError, match="'directions' is not trained, yet differs between"):
        worlds.simulation(FedAvg(), both, seeds=(0, 1), build=Randomised)
    worlds.simulation(FedAvg(), both, seeds=(3, 3), build=Randomised)
    worlds.simulation(FedAvg(), both, seeds=(0, 1), build=Own)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.cell = kind(2, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.cell(x.reshape(-1, 2, 2))[0][:, -1])


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(2, 5, proj_size=3, batch_first=True)

    def forward(self, x):
        return self.cell(x.reshape(-1, 2, 2))[0][:, -1]


class Packed(Recurrent):
    def forward(self, x):
        whole = [2] * len(x)
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(-1, 2, 2), whole, batch_first=True)
        return self.out(self.cell(packed)[1][0][-1])


def test_recurrent_layers_that_cannot_be_stacked_are_named():
    assert "layer 'cell' is LSTM" in mappable(Projected())
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        assert mappable(Recurrent(kind)) == ""
    assert mappable(nn.Sequential(nn.LSTMCell(2, 3))) == mappable(worlds.Normed()) == ""


@pytest.mark.parametrize("build", [Projected, Packed])
@pytest.mark.parametrize("place", ["build", "auxiliary"])
def test_some_recurrent_networks_run_one_by_one_and_say_so(place, build, float64):
    """The vectorised backend falls back, for a private second network too; results agree."""
    method = METHODS["fml"](batch=3, lr=0.1)
    both = []
    for kind in ("vectorised", "sequential"):
        simulation = worlds.simulation(method, worlds.federation(), kind=kind, **{place: build})
        said = simulation.notices
        assert len(said) == (kind == "vectorised")
        words = ("'main'", "cannot", "vmap", "one after the other")
        assert all(word in " ".join(text.split()) for text in said for word in words)
        start = simulation.tree
        simulation.advance()
        assert worlds.differing(start, simulation.tree, 1e-3)
        both.append(simulation.tree)
    assert not worlds.differing(*both, 1e-9)


class Encoder(nn.Module):
    """Reads four numbers as two places of two; attention by torch's layer and by its function."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(2, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = self.encoder(self.enter(x.reshape(-1, 2, 2)))
        return self.out(nn.functional.scaled_dot_product_attention(x, x, x).mean(1))


@pytest.mark.parametrize("build", [Recurrent, partial(Recurrent, nn.GRU), Encoder])
def test_recurrent_and_attention_layers_are_stacked(build, float64):
    """Trained, scored and deployed as one by one, and without a word about falling back."""
    ends = []
    for kind in ("vectorised", "sequential"):
        world = worlds.federation()
        simulation = worlds.simulation(
            METHODS["fedavg-ft"](batch=3, lr=0.1, tune_epochs=1), world, kind=kind, build=build
        )
        assert not simulation.notices
        for _ in range(2):
            simulation.advance()
        (verdict,) = simulation.evaluate([world.test_data], keep=True)
        ends.append((simulation.tree, verdict.deployed[0][1]))
    assert not worlds.differing(*ends, 1e-9)


def test_evaluation_takes_no_shortcut_that_cannot_be_mapped():
    network = Network(Encoder())
    two = {name: torch.stack([leaf, leaf]) for name, leaf in network.params.items()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap tells where it goes client by client
        both = torch.vmap(
            lambda own: network(own, torch.randn(3, 4), training=False), randomness="same"
        )(two)
    assert torch.equal(both[0], both[1])
