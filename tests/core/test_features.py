"""What enters a network's head, and the way on: head(features(x)) is logits(x)."""

import pytest
import torch
from torch import nn

from idiolect.core.batchnorm import BatchNorm
from idiolect.core.network import Network
from idiolect.errors import ModelError
from idiolect.models import MODELS

WORDS = tuple(f"w{n}" for n in range(20))
READERS = ("kim-cnn", "fasttext", "next-word-lstm", "decoder", "encoder", "hf")  # of words
IMAGES = [name for name in MODELS if name not in READERS]


def built(name):
    """Build a named network with few classes, and examples for it."""
    torch.manual_seed(0)
    if name in ("kim-cnn", "fasttext"):
        return MODELS[name]((7,), 3, words=WORDS), torch.randint(2, 20, (5, 7))
    if name == "next-word-lstm":
        return MODELS[name]((6,), 20, units=8), torch.randint(0, 20, (5, 6))
    if name in ("decoder", "encoder"):
        model = MODELS[name]((6,), 3, WORDS, width=16, heads=2, layers=1)
        return model, torch.randint(0, 20, (5, 6))
    return MODELS[name]((2, 20, 24), 3), torch.randn(5, 2, 20, 24)


SHAPES = {  # from the layers' sizes: the inputs of the output layer
    "mlr": (2 * 20 * 24,), "dnn": (100,), "lenet5": (84,), "mcmahan-cnn": (512,),
    "alexnet": (4096,), "resnet18": (512,), "shufflenet": (1024,), "kim-cnn": (300,),
    "fasttext": (32,), "next-word-lstm": (6, 8), "table-mlp": (64,),
    "decoder": (16,), "encoder": (16,), "vit": (192,),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MODELS if name != "hf"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_head_of_the_features_gives_the_logits_of_every_network(name, precision):
    model, x = built(name)
    for stacked in (False, True):
        network = Network(model, precision, stacked)
        assert network.find_head(x)
        assert network.features == SHAPES[name]
        logits = network(network.params, x, False)
        features = network(network.params, x, False, "features")
        assert features.shape == (5, *SHAPES[name]) and features.dtype == torch.float32
        assert torch.equal(network(network.params, features, False, "head"), logits)
        assert torch.equal(network(network.params, x, False), logits)  # nothing was left changed


@pytest.mark.parametrize("name", ["lenet5", "resnet18", "kim-cnn", "next-word-lstm"])
def test_under_vmap_each_client_has_the_features_of_its_own_network(name):
    """The head is sought on the first call, inside vmap."""
    model, x = built(name)
    network = Network(model)
    stacked = {key: torch.stack([value, 1.5 * value]) for key, value in network.params.items()}

    def client(params):
        features = network(params, x, False, "features")
        return features, network(params, features, False, "head")

    features, logits = torch.vmap(client)(stacked)
    for n in range(2):
        own = {key: value[n] for key, value in stacked.items()}
        assert torch.allclose(logits[n], network(own, x, False), atol=1e-5)
        assert torch.allclose(features[n], network(own, x, False, "features"), atol=1e-5)


class Own(nn.Module):
    """Ends with its last layer, under names of its own; there is a norm in between."""

    def __init__(self, after=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), BatchNorm(6), nn.ReLU())
        self.out = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        self.after = after

    def forward(self, x):
        logits = self.out(self.body(x))
        return logits if self.after is None else self.after(logits)


class Declared(Own):
    """Says itself where its head begins; without that, the features would be unknown."""

    def forward(self, x):
        return self.head(self.features(x))

    def features(self, x):
        return self.body(x)

    def head(self, features):
        return 2 * self.out(features)


class Misleading(Own):
    """Has attributes of these names that are no such split: the last layer is the head."""

    def __init__(self):
        super().__init__()
        self.features = self.body[0]
        self.head = self.out[2]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Own(), (5,)),
        (Declared(), (6,)),
        (Misleading(), (5,)),
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (6,)),
        (nn.Linear(4, 3), (4,)),
    ],
)
def test_own_modules(model, shape):
    x = torch.randn(7, 4)
    network = Network(model)
    features = network(network.params, x, False, "features")
    assert network.features == shape == features.shape[1:]
    assert torch.equal(
        network(network.params, features, False, "head"), network(network.params, x, False)
    )


def test_a_module_that_goes_on_after_its_last_layer_is_asked_to_declare_its_head():
    network = Network(Own(after=nn.LogSoftmax(-1)))
    assert not network.find_head(torch.randn(2, 4))
    with pytest.raises(ModelError, match=r"Own does not end with .* \('out.2'\).* head\(features"):
        network(network.params, torch.randn(2, 4), True, "features")
    assert network(network.params, torch.randn(2, 4), False).shape == (2, 3)


def test_the_gradient_of_the_features_reaches_the_body_alone():
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    x = torch.randn(7, 4)

    def total(params):
        return network(params, x, True, "features").sum()

    found = torch.func.grad(total)(network.params)
    layer = nn.Linear(4, 6)
    layer.load_state_dict({key: network.params[f"0.{key}"] for key in ("weight", "bias")})
    layer(x).relu().sum().backward()
    assert torch.allclose(found["0.weight"], layer.weight.grad)
    assert not found["2.weight"].any() and not found["2.bias"].any()
