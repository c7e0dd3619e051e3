"""Our transformers: as transformers computes them, mapped without a loop, with any adapter."""

import warnings

import pytest
import torch

import idiolect
from idiolect.core.network import Network
from idiolect.errors import ModelError
from idiolect.models import MODELS
from idiolect.models.adapters import adapt_network
from idiolect.models.bases import BASES, digest_of, find_base

WORDS = tuple(map(str, range(1024)))  # as many as the embedded base knows
TEXT = torch.tensor([[5, 9, 300, 7, 8, 1000], [6, 7, 8, 0, 0, 0]])
IMAGES = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8)
SMALL = {"layers": 2, "width": 16, "heads": 2, "inner": 24}


def test_the_decoder_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    own = MODELS["decoder"]((6,), 1024, WORDS, weights="embedded").eval()
    other = transformers.AutoModelForCausalLM.from_pretrained(
        find_base("embedded"), dtype=torch.float32
    )
    with torch.no_grad():
        assert torch.allclose(own(TEXT), other(TEXT).logits, atol=1e-4)


def test_a_class_is_told_by_the_last_token_whatever_fills_the_text_up():
    model = MODELS["decoder"]((6,), 3, WORDS, **SMALL).eval()
    with torch.no_grad():
        assert torch.allclose(model(TEXT)[1], model(TEXT[1:, :3])[0], atol=1e-6)
        longer = torch.cat([TEXT, torch.zeros_like(TEXT)], 1)
        assert torch.allclose(model(TEXT), model(longer), atol=1e-6)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_an_encoder_sees_no_padding(positions):
    model = MODELS["encoder"]((6,), 3, WORDS, **SMALL, positions=positions).eval()
    with torch.no_grad():
        assert torch.allclose(model(TEXT)[1], model(TEXT[1:, :3])[0], atol=1e-6)
        assert not torch.allclose(model(TEXT[:1])[0], model(TEXT[:1, [1, 0, 2, 3, 4, 5]])[0])
        assert torch.isfinite(model(torch.zeros_like(TEXT))).all(), "an empty text"


def test_prompts_go_before_a_text_whatever_fills_it_up():
    model = MODELS["encoder"]((6,), 3, WORDS, **SMALL)
    model = adapt_network(model, idiolect.Prompts(count=2)).eval()
    with torch.no_grad():
        found = model(TEXT)
        assert torch.allclose(found[1], model(TEXT[1:, :3])[0], atol=1e-6)
        model.prompts.add_(1)
        assert not torch.allclose(found, model(TEXT), atol=1e-3)


CASES = {
    "next token": (lambda: MODELS["decoder"]((6,), 1024, WORDS, **SMALL), TEXT, "lora"),
    "untied": (lambda: MODELS["decoder"]((6,), 1024, WORDS, **SMALL, tied=False), TEXT, None),
    "prompts": (lambda: MODELS["decoder"]((6,), 3, WORDS, **SMALL), TEXT, "prompts"),
    "encoder": (
        lambda: MODELS["encoder"]((6,), 3, WORDS, **SMALL),
        TEXT,
        idiolect.Prompts(head=True),
    ),
    "vit": (lambda: MODELS["vit"]((3, 8, 8), 3, **SMALL), IMAGES, idiolect.IA3(head=True)),
    "vit, whole": (lambda: MODELS["vit"]((3, 8, 8), 3, **SMALL), IMAGES, None),
}


@pytest.mark.parametrize("case", CASES)
def test_mapped_over_clients_without_a_loop_it_is_each_client_s(case):
    build, x, adapter = CASES[case]
    torch.manual_seed(0)
    model = build()
    network = Network(model if adapter is None else adapt_network(model, _made(adapter)))
    network.params = {name: leaf.double() for name, leaf in network.params.items()}
    for mode in network._modes.values():
        mode.double()
    network._locate()
    drawn = {n: p + 0.1 * torch.randn(3, *p.shape).double() for n, p in network.params.items()}
    xs = torch.stack([x.roll(n, 0) for n in range(3)])
    xs = xs.double() if xs.is_floating_point() else xs

    def slope(params, x):
        return torch.func.grad(lambda own: network(own, x, True).square().mean())(params)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a missing rule
        found = torch.vmap(slope)(drawn, xs)
    for n in range(3):
        own = slope({name: leaf[n] for name, leaf in drawn.items()}, xs[n])
        assert all(torch.allclose(found[name][n], leaf) for name, leaf in own.items())


def _made(adapter):
    return idiolect.models.adapters.make_adapter(adapter)


def test_a_saved_base_is_found_by_its_digest_and_no_other(tmp_path, monkeypatch):
    model = MODELS["encoder"]((6,), 3, WORDS, **SMALL).eval()
    model.save(tmp_path / "mine")
    digest = digest_of(tmp_path / "mine")
    with pytest.raises(ModelError, match="does not have the base"):
        find_base(digest)
    monkeypatch.setenv(BASES, str(tmp_path))
    again = MODELS["encoder"]((6,), 5, WORDS, weights=digest).eval()
    assert again.new_layers == ("score",)
    with torch.no_grad():
        assert torch.equal(again.features(TEXT), model.features(TEXT))
    with pytest.raises(ModelError, match="not the one that the experiment was made with"):
        find_base("embedded", digest)
    with pytest.raises(ModelError, match="the base decides `layers`"):
        MODELS["encoder"]((6,), 5, WORDS, weights=digest, layers=3)
    with pytest.raises(ModelError, match="knows 1024 tokens, and the data has 7"):
        MODELS["encoder"]((6,), 5, WORDS[:7], weights=digest)
    with pytest.raises(ModelError, match="is a 'idiolect-encoder' network"):
        MODELS["decoder"]((6,), 5, WORDS, weights=digest)
