"""The larger networks: published sizes, image shapes, normalisations, one by one or not."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import worlds
from idiolect.core.batchnorm import BatchNorm
from idiolect.core.client import Network
from idiolect.errors import ModelError
from idiolect.kernels import convolution
from idiolect.methods import FedAvg
from idiolect.models import (
    MODELS,
    AlexNet,
    LeNet5,
    McMahanCNN,
    ResNet18,
    ShuffleNetV2,
    check,
    layers,
)
from idiolect.models.layers import CropAndMirror, Pointwise, dividing
from idiolect.models.shufflenet import ShuffleUnit

GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "shape", "parameters"),
    [
        # (25 + 1) · 6 + (150 + 1) · 16 + (256 + 1) · 120 + 121 · 84 + 85 · 10
        (LeNet5, GREY, 44_426),
        # (75 + 1) · 32 + (800 + 1) · 64 + (1600 + 1) · 512 + 513 · 10
        (McMahanCNN, COLOUR, 878_538),
        # 28 · 64 + 577 · 192 + 1729 · 384 + 3457 · 256 + 2305 · 256, then 1024 → 4096 → 4096 → 10
        # with 1025 · 4096 + 4097 · 4096 + 4097 · 10; the figure given for AlexNet on CIFAR-10
        (AlexNet, COLOUR, 23_272_266),
        # 18 · 64 less in the first layer, and 768 inputs of fc1 less: one place instead of four
        (AlexNet, GREY, 23_272_266 - 18 * 64 - 768 * 4096),
        # Stem 27 · 64 + 128. Stage 1: 2 (2 · 9 · 64² + 4 · 64). Stage s of c channels:
        # 9 c²/2 + 3 · 9 c² + c²/2 + 10 c with c = 128, 256, 512. Last 513 · 10.
        (ResNet18, COLOUR, 11_173_962),
        (ResNet18, GREY, 11_173_962 - 2 * 9 * 64),
        # The published 2,278,604 of width 1 on ImageNet has 1,000 classes behind 1,024 features.
        (ShuffleNetV2, COLOUR, 2_278_604 - 990 * 1025),
        (ShuffleNetV2, GREY, 2_278_604 - 990 * 1025 - 2 * 9 * 24),
    ],
)
def test_sizes_and_shapes(build, shape, parameters):
    model = build(shape, 10).eval()
    check(model)
    assert count(model) == parameters
    logits = model(torch.randn(2, *shape))
    assert logits.shape == (2, 10) and bool(torch.isfinite(logits).all())


def test_first_weights_for_rectifiers():
    """He's have variance 2 / inputs, and biases are zero; torch's have a sixth of that variance."""
    for build, layer, inputs in ((LeNet5, "fc1", 256), (AlexNet, "conv3", 1728)):
        for init, variance in (("he", 2 / inputs), ("torch", 1 / (3 * inputs))):
            found = build(GREY, 10, init=init).get_submodule(layer)
            assert float(found.weight.detach().var()) == pytest.approx(variance, rel=0.1)
            assert bool((found.bias == 0).all()) is (init == "he")
    with pytest.raises(ModelError, match="init is 'xavier', expected 'torch' or 'he'"):
        LeNet5(GREY, 10, init="xavier")


def test_resnets_size_by_the_formula_above():
    stages = sum(9 * c * c // 2 + 27 * c * c + c * c // 2 + 10 * c for c in (128, 256, 512))
    assert 27 * 64 + 128 + 2 * (18 * 64**2 + 256) + stages + 5130 == 11_173_962


@pytest.mark.parametrize(
    ("width", "parameters"), [(0.5, 1_366_792), (1.5, 3_503_624), (2.0, 7_393_996)]
)
def test_shufflenets_widths_have_the_published_sizes(width, parameters):
    """Those of the ImageNet models in torchvision's table, with 1,000 classes."""
    assert count(ShuffleNetV2(COLOUR, 1000, width=width)) == parameters


@pytest.mark.parametrize("build", [ResNet18, ShuffleNetV2])
def test_normalisation_is_by_group_unless_asked_otherwise(build):
    kinds = {norm: {type(layer) for layer in build(GREY, 10, norm=norm).modules()}
             for norm in ("group", "batch")}  # fmt: skip
    assert nn.GroupNorm in kinds["group"] and BatchNorm not in kinds["group"]
    assert BatchNorm in kinds["batch"] and nn.GroupNorm not in kinds["batch"]
    assert {type(layer) for layer in build(GREY, 10).modules()} == kinds["group"]
    with pytest.raises(ModelError, match="norm is 'layer', expected 'group' or 'batch'"):
        build(GREY, 10, norm="layer")


@pytest.mark.parametrize("stride", [1, 2])
def test_a_pointwise_convolution_is_a_convolution(stride, float64):
    layer, x = Pointwise(5, 7, stride), torch.randn(3, 5, 9, 8)
    expected = F.conv2d(x, layer.weight, stride=stride)
    assert torch.allclose(layer(x), expected, 1e-12, 1e-12)


def test_a_pointwise_convolution_is_one_by_the_kernels_of_cuda_too(float64, monkeypatch):
    """Here in their plain form: each client's own weights, and the same for all."""
    unit, x = ShuffleUnit(16, 16, "group", 2), torch.randn(3, 2, 16, 4, 4)
    shared = {name: own.detach() for name, own in unit.named_parameters()}
    own = {name: torch.randn(3, *one.shape) for name, one in shared.items()}

    def bent(params, x):
        return functional_call(unit, params, (x,)).tanh().pow(2).sum()

    def both():
        return [vmap(grad(bent), (kind, 0))(given, x) for kind, given in ((None, shared), (0, own))]

    expected = both()
    for module in (layers, convolution):
        monkeypatch.setattr(module, "float32_on_cuda", lambda x: True)
    torch.testing.assert_close(both(), expected)


def test_a_unit_interleaves_what_it_keeps_with_what_it_found():
    """Channels 0, 2, 4 out are channels 0, 1, 2 in; the odd ones come from the branch."""
    unit, x = ShuffleUnit(6, 6, "group", 2), torch.randn(2, 6, 4, 4)
    out = unit(x)
    assert torch.equal(out[:, 0::2], x[:, :3])
    assert torch.equal(out[:, 1::2], unit.branch(x[:, 3:]))


def test_stages_halve_the_image():
    """32 → 16 → 8 → 4 for both; ResNet's first stage keeps 32, ShuffleNet's does not."""
    for model, sides in ((ResNet18(COLOUR, 10, width=8), [32, 16, 8, 4]),
                         (ShuffleNetV2(COLOUR, 10, width=0.5), [16, 8, 4])):  # fmt: skip
        seen = []
        parts = model.blocks if isinstance(model, ResNet18) else model.units
        for part in parts:
            part.register_forward_hook(lambda *a, to=seen: to.append(a[2].shape[-1]))
        model(torch.zeros(1, *COLOUR))
        assert sorted(set(seen), reverse=True) == sides


def test_the_stem_for_photographs_is_that_of_the_paper(float64):
    """224 → 112 by the convolution → 56 by pooling, and 7 at the end, as in He et al., Table 1."""
    model, seen = ResNet18((3, 224, 224), 10, width=2, stem="photograph"), []
    for part in (model.conv, model.blocks[0], model.blocks[-1]):
        part.register_forward_hook(lambda *a, to=seen: to.append(a[2].shape[-1]))
    x = torch.randn(1, 3, 224, 224)
    model(x)
    assert seen == [112, 56, 7]
    whole = ResNet18((3, 224, 224), 1000, stem="photograph", norm="batch")
    learned = sum(p.numel() for p in whole.parameters())
    assert learned == 11_689_512  # of ImageNet's model, as published
    with pytest.raises(ModelError, match="stem is 'big', expected 'small' or 'photograph'"):
        ResNet18(COLOUR, 10, stem="big")


def test_groups_divide_the_channels():
    assert [dividing(8, n) for n in (64, 24, 58, 116, 7, 3)] == [8, 8, 2, 4, 7, 3]
    with pytest.raises(ModelError, match="groups is 0, expected 1 or more"):
        dividing(0, 8)


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    "build",
    [
        lambda norm: ResNet18((1, 2, 2), 3, norm=norm, groups=2, width=4),
        lambda norm: ResNet18((1, 2, 2), 3, norm=norm, groups=2, width=4, stem="photograph"),
        lambda norm: ShuffleNetV2((1, 2, 2), 3, width=0.5, norm=norm),
    ],
    ids=["resnet18", "resnet18-photograph", "shufflenet"],
)
def test_vectorised_equals_sequential_on_ragged_clients(build, norm, float64):
    """Images of 2×2 pixels: real strides and shortcuts, a short last batch, padding.

    Few examples normalised by batches amplify rounding: of ShuffleNet's batches of two, a change
    of 1e-15 of the first weights was more than 1e-6 after a round.
    """
    sizes, batch = ((7, 4, 2), 4) if norm == "group" else ((50, 30, 27), 30)
    ends = []
    for kind in ("vectorised", "sequential"):
        simulation = worlds.simulation(
            FedAvg(batch=batch, lr=0.005, momentum=0.9),
            worlds.federation(sizes, (0, 0, 0)),
            build=lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), build(norm)),
            kind=kind,
        )
        start = list(simulation.states)
        simulation.advance()
        assert worlds.differing(start, simulation.states, 1e-3)
        ends.append(simulation.states)
    assert not worlds.differing(*ends, 1e-8)


@pytest.mark.parametrize("name", ["alexnet", "resnet18", "shufflenet"])
def test_a_network_learns_ten_images_by_heart(name):
    """The signs are right from the loss to the first layer."""
    torch.manual_seed(0)
    options = {"alexnet": {"hidden": 64, "dropout": 0.0}, "resnet18": {"width": 8}}
    model = MODELS[name]((1, 16, 16), 2, **options.get(name, {"width": 0.5}))
    x, y = torch.randn(10, 1, 16, 16), torch.arange(10) % 2
    descent = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(30):
        loss = F.cross_entropy(model(x), y)
        descent.zero_grad()
        loss.backward()
        descent.step()
    assert float(loss.detach()) < 0.1


def test_options_that_make_no_sense_are_told():
    with pytest.raises(ModelError, match=r"8×8 is too small; use images of 15×15"):
        AlexNet((1, 8, 8), 10)
    with pytest.raises(ModelError, match=r"width is 0.7, expected one of 0.5, 1.0, 1.5, 2.0"):
        ShuffleNetV2(GREY, 10, width=0.7)


def test_statistics_are_leaves_beside_the_weights():
    """Each of ResNet's 20 normalisations has two."""
    network = Network(ResNet18((1, 8, 8), 3, norm="batch", width=2))
    assert len(network.statistics) == 2 * 20
    assert network.statistics < network.norms


def test_augmentation_shows_every_window_mirrored_or_not_and_only_in_training():
    """With a border of one pixel an image has 9 windows, 18 with their mirror images."""
    layer, x = CropAndMirror(1), torch.rand(400, 2, 3, 4)
    wide = torch.nn.functional.pad(x, (1, 1, 1, 1))
    windows = [wide[:, :, top : top + 3, left : left + 4] for top in range(3) for left in range(3)]
    known = torch.stack([*windows, *(window.flip(3) for window in windows)], 1)
    same = (known == layer(x).unsqueeze(1)).flatten(2).all(2)
    assert (same.sum(1) == 1).all(), "something else than a window was shown"
    assert same.any(0).all(), "a window is never shown"
    assert layer.eval()(x) is x


def test_clients_and_steps_draw_windows_of_their_own():
    network = Network(ResNet18(COLOUR, 10, width=2, augment=True))
    assert network.draws
    x = torch.rand(8, *COLOUR)
    params = {name: torch.stack([value, value]) for name, value in network.params.items()}

    def logits(own, train):
        return network(own, x, train)

    mapped = torch.vmap(logits, (0, None), randomness="different")
    one, other = mapped(params, True)
    again, _ = mapped(params, True)
    assert not torch.allclose(one, other) and not torch.allclose(one, again)
    one, other = mapped(params, False)
    torch.testing.assert_close(one, other)
