"""Adapters: what is trained, what is shared, and that PEFT makes the same of a layer."""

import pytest
import torch
from torch import nn

import idiolect
from idiolect.core.network import Network
from idiolect.errors import ConfigError, ModelError
from idiolect.models.adapters import AdaptedNetwork, adapt_network, make_adapter


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.q_proj = nn.Linear(12, 6)
        self.fc = nn.Linear(6, 2)

    def forward(self, x):
        x = self.norm(self.conv(x)).flatten(1)
        return self.fc(self.q_proj(x).relu())


@pytest.fixture
def base():
    torch.manual_seed(1)
    return Net()


X = torch.linspace(-1, 1, 3 * 16).reshape(3, 1, 4, 4)


@pytest.mark.parametrize(
    ("adapter", "trained"),
    [
        ("lora", {"q_proj.lora_A": (8, 12), "q_proj.lora_B": (6, 8)}),
        (idiolect.LoRA(rank=2, targets=("conv",)), {"conv.lora_A": (2, 1, 3, 3),
                                                    "conv.lora_B": (3, 2, 1, 1)}),
        ({"name": "ia3", "targets": ("q_*", "conv")}, {"conv.ia3": (3,), "q_proj.ia3": (6,)}),
        (idiolect.IA3(head=True), {"q_proj.ia3": (6,), "fc.weight": (2, 6), "fc.bias": (2,)}),
        ("bias", {"conv.bias": (3,), "q_proj.bias": (6,), "fc.bias": (2,)}),
        (idiolect.Last(), {"fc.weight": (2, 6), "fc.bias": (2,)}),
        (idiolect.Last(targets=("conv",)), {"conv.weight": (3, 1, 3, 3), "conv.bias": (3,)}),
    ],
)  # fmt: skip
def test_only_the_adapter_is_trained_and_it_begins_as_the_base(base, adapter, trained):
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = adapt_network(base, make_adapter(adapter))
    network = Network(model)
    assert {name: tuple(leaf.shape) for name, leaf in network.params.items()} == trained
    assert not network.statistics, "running statistics of the base are frozen with it"
    with torch.no_grad():
        expected = base.eval()(X)
        for training in (False, True):
            assert torch.allclose(network(network.params, X, training), expected, atol=1e-6)
        moved = {name: leaf + 0.1 for name, leaf in network.params.items()}
        assert not torch.allclose(network(moved, X, False), expected, atol=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_torch_s_own_attention_heeds_its_adapters_in_every_mode():
    """Its layers read weights past the modules that hold them, unless they are kept from it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    base = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)).eval()
    x = torch.randn(2, 5, 8)
    network = Network(adapt_network(base, idiolect.LoRA(rank=2)))
    names = {name.partition("self_attn.")[2] for name in network.params}
    assert names == {"lora_A", "lora_B", "out_proj.lora_A", "out_proj.lora_B"}
    every = Network(adapt_network(base, idiolect.LoRA(rank=2, targets=("*",))), stacked=False)
    with torch.no_grad():
        for own in (network, every):
            assert torch.allclose(own(own.params, x, False), base(x), atol=1e-5)
            for moved in own.params:
                params = {**own.params, moved: torch.randn_like(own.params[moved])}
                found = [own(params, x, training) for training in (False, True)]
                assert torch.allclose(*found, atol=1e-5), moved
                if moved.endswith("lora_B"):
                    assert not torch.allclose(found[0], base(x), atol=1e-3), moved


def test_the_base_is_in_memory_once(base):
    made = [AdaptedNetwork(lambda: base, idiolect.LoRA(rank=2))() for _ in range(3)]
    networks = [Network(model) for model in made]
    held = {network.constants["q_proj.weight"].data_ptr() for network in networks}
    assert held == {base.q_proj.weight.data_ptr()}
    modes = networks[0]._modes
    assert modes[True].conv.weight.data_ptr() == modes[False].conv.weight.data_ptr()
    # What is trained is each network's own, and leaves the base alone.
    assert len({model.q_proj.lora_A.data_ptr() for model in made}) == 3
    last = adapt_network(base, idiolect.Last())
    assert last.fc.weight.data_ptr() != base.fc.weight.data_ptr()


def test_a_base_that_is_drawn_is_the_same_for_all_seeds_and_its_adapter_is_not():
    build = AdaptedNetwork(Net, idiolect.LoRA(rank=2))
    torch.manual_seed(5)
    one, other = build(), build()
    assert torch.equal(one.conv.weight, other.conv.weight)
    assert not torch.equal(one.q_proj.lora_A, other.q_proj.lora_A)


@pytest.mark.parametrize(("target", "rank"), [("q_proj", 2), ("conv", 2), ("fc", 1)])
def test_lora_is_that_of_peft(base, target, rank):
    peft = pytest.importorskip("peft")
    base.eval()
    config = peft.LoraConfig(r=rank, lora_alpha=3, target_modules=[target], bias="none")
    model = adapt_network(base, idiolect.LoRA(rank=rank, alpha=3, targets=(target,)))
    layer = model.get_submodule(target)
    with torch.no_grad():
        layer.lora_B.normal_()
    other = peft.get_peft_model(base, config)
    theirs = other.base_model.model.get_submodule(target)
    with torch.no_grad():
        theirs.lora_A["default"].weight.copy_(layer.lora_A)
        theirs.lora_B["default"].weight.copy_(layer.lora_B)
        assert torch.allclose(model(X), other(X), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("lorra", ConfigError, "unknown adapter 'lorra'; did you mean 'lora'"),
        ({"name": "lora", "rnk": 1}, ConfigError, "unknown key adapter.rnk"),
        ({"name": "lora", "rank": 0}, ConfigError, "adapter.rank is 0"),
        ({"name": "lora", "targets": "fc"}, ConfigError, "expected a list"),
        (idiolect.LoRA(targets=("nope",)), ModelError, "it has conv, fc, q_proj"),
        (idiolect.Prompts(), ModelError, "no place for prompts"),
        (idiolect.Bias(targets=("norm",)), ModelError, "name no dense layer"),
    ],
)
def test_what_cannot_be_adapted_is_said_in_a_line(base, given, error, words):
    with pytest.raises(error) as said:
        adapt_network(base, make_adapter(given))
    assert words in str(said.value)
