"""Other ways to convolve by torch's libraries, against the grouped convolution; and bfloat16."""

import threading

import emulate
import pytest
import torch
from torch import nn

from convolutions import operands
from idiolect.core.network import Network
from idiolect.kernels import autotune, convolution, convolution_library, group_norm
from idiolect.kernels.convolution import PLAIN
from idiolect.kernels.convolution_cuda import ConvShape
from idiolect.kernels.convolution_library import ByTrial

SHAPES = [
    ConvShape(3, 2, 32, 6, 5, 40, 3, 3, 1, 1),
    ConvShape(2, 3, 33, 7, 8, 32, 3, 3, 2, 1),
    ConvShape(2, 1, 32, 6, 6, 32, 5, 5, 1, 0),
    ConvShape(2, 2, 32, 4, 4, 48, 1, 1, 2, 0),
    ConvShape(2, 3, 10, 9, 15, 6, 1, 1, 1, 0),
    ConvShape(2, 8, 3, 26, 18, 8, 2, 2, 2, 0),
    ConvShape(2, 8, 3, 33, 34, 8, 4, 4, 4, 0),
]


@pytest.mark.parametrize("task", ["convolve", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_form_is_the_grouped_convolution(shape, task, float64):
    torch.manual_seed(0)
    s = shape
    x = torch.randn(s.groups, s.images, s.channels, s.height, s.width)
    w = torch.randn(s.groups, s.out_channels, s.channels, s.kernel_height, s.kernel_width)
    g = torch.randn_like(PLAIN["convolve"](x, w, s))
    inputs = {"convolve": (x, w), "input_gradient": (g, w), "weight_gradient": (g, x)}[task]
    exact = PLAIN[task](*inputs, s)
    found = convolution_library.forms(task, s)
    once = s.stride == s.kernel_height and s.padding == 0  # no pixel is seen twice
    few = task == "weight_gradient" and s.out_height * s.out_width < 64
    assert set(found) == ({"last"} if s.channels >= 32 else set()) | (
        {"patches"} if once else set()
    ) | ({"pixels"} if s.pointwise and not few else set())
    for name, form in found.items():
        arranged = form.arrange((*inputs, s)) if name == "last" else (*inputs, s)
        for given in ((*inputs, s), arranged):
            got = form(*given)
            assert got.shape == exact.shape, name
            torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-11)


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("task", ["convolve", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_on_a_gpu_weights_change_their_order_in_one_launch(task, kind, monkeypatch):
    """Gradients by weights come back in single precision, without gaps; so do plain ones."""
    emulate.use(monkeypatch)
    monkeypatch.setattr(convolution_library, "_on_gpu", lambda w: True)
    torch.manual_seed(0)
    shape = SHAPES[0]._replace(channels=32)
    x, w = torch.randn(3, 2, 32, 6, 5).to(kind), torch.randn(3, 40, 32, 3, 3)
    g = torch.randn(3, 2, 40, 6, 5).to(kind)
    inputs = {"convolve": (x, w), "input_gradient": (g, w), "weight_gradient": (g, x)}[task]
    exact = PLAIN[task](*(one.double() for one in inputs), shape)
    found = convolution_library.forms(task, shape, rounded=True)
    given = found["last"].arrange((*inputs, shape))
    for form in (*found.values(), PLAIN[task]):
        got = form(*given)
        assert autotune.apart(got.double(), exact) < (1e-5 if kind == torch.float32 else 1e-2)
        if task == "weight_gradient":
            assert got.dtype == torch.float32 and got.is_contiguous()


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("task", ["convolve", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_products_of_rows_are_the_convolution(task, kind, monkeypatch):
    """Of rows for every pixel, made and added up by our kernels; images stay with channels last."""
    emulate.use(monkeypatch)
    for s in (
        ConvShape(3, 2, 32, 6, 5, 40, 3, 3, 1, 1),
        ConvShape(2, 3, 40, 7, 8, 32, 3, 3, 2, 1),
        ConvShape(2, 3, 32, 5, 6, 48, 1, 1, 2, 0),
        ConvShape(1, 2, 32, 9, 9, 32, 2, 2, 3, 0),
    ):
        given = operands(s, kind)[task]
        exact = PLAIN[task](*(one.double() for one in given), s)
        form = convolution_library.forms(task, s, rounded=True)["rows"]
        got = form(*form.arrange((*given, s)))
        assert autotune.apart(got.double(), exact) < (1e-6 if kind == torch.float32 else 4e-3)
        assert got.dtype == (torch.float32 if task == "weight_gradient" else kind)
        assert task == "weight_gradient" or got.stride()[2] == 1


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_convolution_may_be_a_gradient_of_another(kind, monkeypatch):
    """Of weights as a step leaves them too; only deep ones of stride 1 are offered."""
    emulate.use(monkeypatch)
    for s in (
        ConvShape(2, 2, 128, 4, 3, 130, 3, 3, 1, 1),
        ConvShape(2, 1, 128, 5, 6, 128, 4, 4, 1, 1),
        ConvShape(1, 1, 129, 4, 4, 128, 3, 3, 1, 0),
    ):
        x, w = operands(s, kind)["convolve"]
        form = convolution_library.forms("convolve", s, rounded=True)["turned"]
        exact = PLAIN["convolve"](x.double(), w.double(), s)
        for given in ((x, w, s), form.arrange((x, w, s))):
            assert autotune.apart(form(*given).double(), exact) < (
                1e-6 if kind == torch.float32 else 4e-3
            )
        assert "turned" not in convolution_library.forms("convolve", s)
        for other in (s._replace(stride=2), s._replace(channels=64), s._replace(kernel_width=2)):
            assert "turned" not in convolution_library.forms("convolve", other, rounded=True)


def test_rows_that_take_much_room_are_not_made():
    """Nor where channels do not fill pieces of 16 bytes."""
    deep = ConvShape(20, 32, 512, 4, 4, 512, 3, 3, 1, 1)
    assert "rows" in convolution_library.forms("convolve", deep, rounded=True)
    assert "rows" not in convolution_library.forms("convolve", deep)
    for other in (
        deep._replace(channels=64, height=32, width=32), deep._replace(channels=36),
        deep._replace(channels=2048), deep._replace(kernel_height=1),
    ):  # fmt: skip
        assert "rows" not in convolution_library.forms("convolve", other, rounded=True)


def test_a_form_by_trial_is_for_rounded_products(monkeypatch):
    """The switch is on while it runs, and as before afterwards, also where it fails."""
    library, shape = torch.backends.cudnn, SHAPES[0]
    assert "last, by trial" not in convolution.forms("convolve", shape)
    forms = {task: convolution.forms(task, shape, own=False, rounded=True) for task in PLAIN}
    found = [own["last, by trial"] for own in forms.values() if "last, by trial" in own]
    assert [form.run for form in found] == [own.run for own in convolution_library._LAST.values()]
    assert not any(form.compiles for form in found)  # in other threads it would be for nothing
    seen = []

    def run(*inputs):
        seen.append((library.benchmark, library.deterministic))
        if not inputs[0].is_meta:
            raise RuntimeError("no room")

    form = ByTrial(run, convolution_library.all_last, 1)
    form(torch.empty(1, device="meta"), shape)
    with pytest.raises(RuntimeError, match="no room"):
        form(torch.empty(1), shape)
    assert seen == [(True, True)] * 2
    assert not library.benchmark and not library.deterministic


def test_no_trial_is_captured(monkeypatch):
    """Where a thread has not found its algorithm before, the library guesses."""

    class OnGPU:
        is_cuda, is_meta, dtype = True, False, torch.bfloat16

    seen, capturing = [], [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    form = ByTrial(lambda *_: seen.append(torch.backends.cudnn.benchmark), None, 1)
    for capturing[0] in (True, False, True):
        form(OnGPU(), SHAPES[0])
    form(OnGPU(), SHAPES[1])
    other = threading.Thread(target=form, args=(OnGPU(), SHAPES[0]))
    other.start()
    other.join()
    assert seen == [False, True, True, False, False]


def test_a_form_is_timed_on_images_in_its_own_order():
    """So that none is copied where neighbours have it too; what it returns has that order again."""
    shape = SHAPES[0]._replace(channels=40)
    form = convolution_library.forms("convolve", shape)["last"]
    x, w = torch.randn(3, 2, 40, 6, 5), torch.randn(3, 40, 40, 3, 3)
    arranged, stepped, _ = form.arrange((x, w, shape))
    assert torch.equal(arranged, x) and arranged.stride() != x.stride()
    assert torch.equal(stepped, w) and stepped.permute(0, 1, 3, 4, 2).is_contiguous()
    assert form(arranged, w, shape).stride() == arranged.stride()
    assert form.order(arranged).data_ptr() == arranged.data_ptr()


def test_the_order_of_a_form_is_how_it_is_timed(monkeypatch):
    seen = []
    monkeypatch.setattr(
        autotune, "milliseconds", lambda form, x, *rest: seen.append(x.stride()) or len(seen)
    )
    shape = SHAPES[0]
    x, w = torch.randn(3, 2, 32, 6, 5), torch.randn(3, 40, 32, 3, 3)
    autotune.choose("key", convolution.forms("convolve", shape, own=False), (x, w, shape))
    plain, last = seen
    assert plain == x.stride() != last


def test_what_is_not_worth_a_try():
    thin = SHAPES[0]._replace(channels=3)
    assert convolution_library.forms("convolve", thin) == {}
    assert convolution_library.forms("conv_relu", SHAPES[0]) == {}
    assert list(convolution.forms("convolve", SHAPES[0], own=False)) == ["plain", "last"]
    assert len(convolution.forms("convolve", SHAPES[0])) > 3


@pytest.mark.parametrize("task", ["convolve", "input_gradient", "weight_gradient"])
def test_a_pointwise_convolution_leaves_channels_first(task):
    """Unless the network has them last: all but one form are timed with the copies they need."""
    shape = ConvShape(2, 3, 58, 9, 8, 58, 1, 1, 1, 0)
    known = convolution.forms(task, shape)
    assert list(known)[:4] == ["plain", "last", "patches", "pixels"]
    known = {name: form for name, form in known.items() if "pointwise" not in name}  # own tests
    assert not any(hasattr(form, "arrange") for form in known.values())
    images, w = torch.randn(2, 3, 58, 9, 8), torch.randn(2, 58, 58, 1, 1)
    given = (images, images.flip(0) if task == "weight_gradient" else w, shape)
    made = [form(*given) for form in known.values()]
    for one in made:
        assert one.is_contiguous()
        torch.testing.assert_close(one, made[0], rtol=1e-4, atol=1e-4)
    wide = shape._replace(channels=64, out_channels=64)
    assert "pixels" not in convolution.forms(task, wide, rounded=True)


def test_bfloat16_is_as_autocast_has_it(monkeypatch):
    """Here by the layers that CUDA has: their kernels' plain form on a CPU."""

    def halved(x):
        return torch.is_autocast_enabled("cpu")

    for module in (convolution, group_norm):
        monkeypatch.setattr(module, "halved_on_cuda", halved)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    x = torch.randn(5, 3, 6, 6)
    network, plain = Network(model, "bf16"), Network(model, "bf16", stacked=False)

    def loss(network):
        return lambda params: network(params, x, training=True).square().mean()

    torch.testing.assert_close(
        network(network.params, x, False), plain(plain.params, x, False), rtol=2e-2, atol=2e-3
    )
    ours, theirs = (torch.func.grad(loss(one))(plain.params) for one in (network, plain))
    for name, leaf in ours.items():
        assert leaf.dtype == torch.float32
        torch.testing.assert_close(leaf, theirs[name], rtol=5e-2, atol=5e-3)
