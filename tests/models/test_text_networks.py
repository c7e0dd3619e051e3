"""The networks for text against torch's own layers, under vmap and under padding."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from idiolect.core import losses
from idiolect.errors import DataError
from idiolect.models.text_networks import LSTM, FastText, KimCNN, NextWord

WORDS = [f"w{n}" for n in range(30)]


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_next_word_has_the_published_size():
    """50,000·200 + 2·(4·200·(200+200) + 2·4·200) + 50,000 = 10,693,200, in ten tensors."""
    model = NextWord((64,), 50_000)
    assert size(model) == 50_000 * 200 + 2 * (4 * 200 * 400 + 2 * 4 * 200) + 50_000 == 10_693_200
    assert len(list(model.parameters())) == 10


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_lstm_is_torchs(layers):
    torch.manual_seed(0)
    mine, theirs = LSTM(7, 5, layers), nn.LSTM(7, 5, layers, batch_first=True)
    theirs.load_state_dict(mine.state_dict())  # the same names and shapes, too
    x = torch.randn(3, 9, 7)
    out, (wanted, _) = mine(x), theirs(x)
    assert (out - wanted).abs().max() < 1e-6
    slopes = [
        torch.autograd.grad(o.square().sum(), m.parameters())
        for o, m in ((out, mine), (wanted, theirs))
    ]
    for one, other in zip(*slopes, strict=True):
        assert (one - other).abs().max() < 1e-5


def test_kim_is_three_convolutions_and_the_largest_answer():
    """Against nn.Conv1d over a text followed by zeros, which is what every window may see."""
    torch.manual_seed(0)
    model = KimCNN((6,), 5, WORDS, embedding=4, filters=3).eval()
    assert size(model) == 30 * 4 + sum(3 * 4 * w + 3 for w in (3, 4, 5)) + 9 * 5 + 5
    x = torch.randint(1, 30, (2, 6))
    words = torch.cat([model.embedding(x), torch.zeros(2, 4, 4)], 1).transpose(1, 2)
    found = [
        convolution(words)[..., :6].relu().max(-1).values for convolution in model.convolutions
    ]
    assert torch.allclose(model(x), model.fc(torch.cat(found, 1)), atol=1e-6)


def test_kim_does_not_see_how_far_a_text_is_filled_up():
    torch.manual_seed(0)
    model = KimCNN((9,), 5, WORDS, embedding=4, filters=3).eval()
    with torch.no_grad():
        model.embedding.weight[0] = 99.0  # whatever the vector of padding is
        for layer in model.convolutions:
            layer.bias.fill_(5.0)  # a window of padding would answer 5
    short = torch.tensor([[7, 3, 0], [7, 0, 0], [0, 0, 0]])
    long = torch.cat([short, torch.zeros(3, 6, dtype=torch.int64)], 1)
    assert torch.equal(model(short), model(long))
    assert torch.equal(model(short)[2], model.fc.bias)  # nothing said, nothing heard
    slope = torch.autograd.grad(model(short).sum(), model.embedding.weight)[0]
    assert not slope[0].any() and slope[7].any() and slope.isfinite().all()


def test_fasttext_is_a_mean_and_two_layers():
    """By hand: words 7 and 3 of a text of four places, over two words or over PFLlib's 200."""
    torch.manual_seed(0)
    model = FastText((4,), 5, WORDS, embedding=6)
    assert size(model) == 30 * 6 + 6 * 6 + 6 + 6 * 5 + 5
    x = torch.tensor([[7, 3, 0, 0], [0, 0, 0, 0]])
    both = model.embedding.weight[7] + model.embedding.weight[3]
    assert torch.allclose(model(x)[0], model.fc(model.fc1(both / 2)), atol=1e-6)
    assert torch.allclose(model(x)[1], model.fc(model.fc1.bias), atol=1e-6)  # an empty text
    model.places = 200
    assert torch.allclose(model(x)[0], model.fc(model.fc1(both / 200)), atol=1e-6)
    slope = torch.autograd.grad(model(x).sum(), model.embedding.weight)[0]
    assert not slope[0].any() and slope[7].any()


def test_the_next_word_does_not_depend_on_what_follows():
    torch.manual_seed(0)
    model = NextWord((8,), 30, units=6).eval()
    x = torch.randint(4, 30, (2, 8))
    other = x.clone()
    other[:, 5:] = 0
    assert torch.equal(model(x)[:, :5], model(other)[:, :5])
    assert not torch.equal(model(x)[:, 5:], model(other)[:, 5:])


@pytest.mark.parametrize("kind", ["kim", "lstm"])
def test_clients_can_be_stacked(kind, float64):
    torch.manual_seed(0)
    build = (
        (lambda: KimCNN((6,), 3, WORDS, embedding=4, filters=3))
        if kind == "kim"
        else (lambda: NextWord((6,), 30, units=5))
    )
    models = [build().eval() for _ in range(3)]
    x = torch.randint(0, 30, (3, 2, 6), dtype=torch.int32)
    y = torch.randint(0, 3, (3, 2) if kind == "kim" else (3, 2, 6))
    params = {
        name: torch.stack([dict(m.named_parameters())[name].detach() for m in models])
        for name, _ in models[0].named_parameters()
    }

    def slope(own, x, y):
        return grad(
            lambda p: losses.cross_entropy(
                functional_call(models[0], p, (x,)), y, torch.ones(y.shape)
            )
        )(own)

    together = vmap(slope)(params, x, y)
    for n in range(3):
        alone = slope({name: value[n] for name, value in params.items()}, x[n], y[n])
        for name, value in alone.items():
            assert torch.allclose(together[name][n], value, atol=1e-12), name


def test_word_vectors_are_read_from_a_file(tmp_path):
    file = tmp_path / "glove.txt"
    file.write_text("w3 1 2 3 4\nstrange 0 0 0 0\nw5 -1 .5 0 1e-1\n")
    torch.manual_seed(0)
    plain = KimCNN((6,), 3, WORDS, embedding=4)
    torch.manual_seed(0)
    model = KimCNN((6,), 3, WORDS, embedding=4, vectors=str(file))
    assert model.embedding.weight[3].tolist() == [1, 2, 3, 4]
    assert torch.allclose(model.embedding.weight[5], torch.tensor([-1, 0.5, 0, 0.1]))
    assert torch.equal(model.embedding.weight[6:], plain.embedding.weight[6:])
    assert torch.equal(model.fc.weight, plain.fc.weight)
    with pytest.raises(DataError, match=r"glove.txt:1 has 4 numbers.*set model.embedding"):
        KimCNN((6,), 3, WORDS, embedding=5, vectors=str(file))
    for content in ("w3 a b c d\n",):
        file.write_text(content)
        with pytest.raises(DataError, match="cannot be read"):
            KimCNN((6,), 3, WORDS, embedding=4, vectors=str(file))
    with pytest.raises(DataError, match=r"nowhere.txt cannot be read"):
        KimCNN((6,), 3, WORDS, embedding=4, vectors=str(tmp_path / "nowhere.txt"))
