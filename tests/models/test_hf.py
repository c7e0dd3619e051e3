"""Networks of transformers: as it computes them itself, mapped over clients, or said why not."""

import warnings

import pytest
import torch
from safetensors.torch import save_file

import idiolect
import worlds
from idiolect.core.network import Network
from idiolect.engine.architecture import Architecture
from idiolect.errors import ModelError
from idiolect.methods import METHODS
from idiolect.models import MODELS
from idiolect.models.adapters import AdaptedNetwork, adapt_network
from test_adapter_laws import texts

transformers = pytest.importorskip("transformers")

WORDS = tuple(map(str, range(64)))
TEXT = torch.tensor([[5, 9, 30, 7, 8, 60], [6, 7, 8, 0, 0, 0]])
SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
SMALL |= {"num_attention_heads": 2, "pad_token_id": 0}
CONFIGS = {  # with the classes to tell; 64: the next token
    "llama": (lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=1), 64),
    "mistral": (
        lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=2),
        64,
    ),
    "bert": (lambda: transformers.BertConfig(**SMALL), 3),
    "vit": (
        lambda: transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
            image_size=8, patch_size=4,
        ),
        3,
    ),
}  # fmt: skip


def built(config, classes, folder):
    config.save_pretrained(folder)
    torch.manual_seed(0)
    images = config.model_type == "vit"
    shape, words = ((3, 8, 8), ()) if images else ((6,), WORDS)
    x = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8) if images else TEXT
    return MODELS["hf"](shape, classes, words, weights=str(folder)).eval(), x


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_what_transformers_computes_and_each_client_s_under_vmap(kind, tmp_path):
    config, classes = CONFIGS[kind]
    model, x = built(config(), classes, tmp_path)
    with torch.no_grad():
        ours = model(x)
        model.network.set_attn_implementation("eager")
        key = "pixel_values" if kind == "vit" else "input_ids"
        more = {} if kind == "vit" else {"attention_mask": (x != 0).long()}
        theirs = model.network(**{key: x}, **more).logits
        model.network.set_attn_implementation("idiolect")
    if classes == 64:
        ours, theirs = ours[x != 0], theirs[x != 0]
    assert torch.allclose(ours, theirs, atol=1e-5)
    network = Network(adapt_network(model, idiolect.LoRA(rank=2, head=True)))
    params = {n: p + 0.1 * torch.randn(3, *p.shape) for n, p in network.params.items()}

    def slope(params):
        return torch.func.grad(lambda own: network(own, x, False).square().mean())(params)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.vmap(slope)(params)
    one = slope({name: leaf[1] for name, leaf in params.items()})
    assert all(torch.allclose(found[name][1], leaf, atol=1e-5) for name, leaf in one.items())


OWN_ATTENTION = {  # which is more than the softmax of scores under a mask, or cannot be replaced
    "gemma2": (
        lambda: transformers.Gemma2Config(
            **SMALL, num_key_value_heads=1, head_dim=8, attn_logit_softcapping=0.5
        ),
        64,
    ),
    "gptj": (
        lambda: transformers.GPTJConfig(
            vocab_size=64, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, pad_token_id=0
        ),
        64,
    ),
    "bloom": (
        lambda: transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2),
        64,
    ),
    "swin": (
        lambda: transformers.SwinConfig(
            image_size=8, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[2, 2], window_size=2
        ),
        3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_an_attention_that_ours_cannot_stand_for_is_kept(kind, tmp_path):
    """Beside what transformers itself makes of the same files, with weights that matter."""
    config, classes = OWN_ATTENTION[kind]
    task = "CausalLM" if classes == 64 else "ImageClassification"
    torch.manual_seed(0)
    maker = getattr(transformers, f"AutoModelFor{task}")
    described = config()
    described.num_labels = 3
    whole = maker.from_config(described)
    for held in whole.parameters():
        torch.nn.init.normal_(held, std=0.5)
    whole.save_pretrained(tmp_path)
    images = classes == 3
    shape, words = ((3, 8, 8), ()) if images else ((6,), WORDS)
    x = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8) if images else TEXT
    model = MODELS["hf"](shape, classes, words, weights=str(tmp_path)).eval()
    theirs = maker.from_pretrained(tmp_path, attn_implementation="eager").eval()
    given = {} if images else {"attention_mask": (x != 0).long()}
    with torch.no_grad():
        ours, expected = model(x), theirs(x, **given).logits
    if not images:
        ours, expected = ours[x != 0], expected[x != 0]
    assert torch.allclose(ours, expected, atol=1e-5 * float(expected.abs().max()))


def test_a_network_that_sees_the_token_it_is_to_tell_is_refused(tmp_path):
    transformers.BertConfig(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="reads texts in both directions"):
        MODELS["hf"]((6,), 64, WORDS, weights=str(tmp_path))


def test_texts_longer_than_the_network_are_said(tmp_path):
    transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=4
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cannot read \[2, 6\].*made for 4 places"):
        MODELS["hf"]((6,), 64, WORDS, weights=str(tmp_path))


def test_layers_that_drop_whole_paths_draw_by_the_run_s_seed(tmp_path):
    config = OWN_ATTENTION["swin"][0]()
    config.drop_path_rate = 0.5
    config.save_pretrained(tmp_path)
    model = MODELS["hf"]((3, 8, 8), 3, (), weights=str(tmp_path))
    assert Network(adapt_network(model, idiolect.LoRA(rank=1))).draws


def test_by_default_convolutions_of_several_groups_have_no_lora(tmp_path):
    """ConvNeXt has no attention: its dense layers and stem are adapted, not the depthwise ones."""
    transformers.ConvNextConfig(
        hidden_sizes=[4, 4], depths=[1, 1], num_stages=2, image_size=16
    ).save_pretrained(tmp_path)
    model = MODELS["hf"]((3, 16, 16), 3, (), weights=str(tmp_path))
    names = Network(adapt_network(model, idiolect.LoRA(rank=1))).params
    assert any("pwconv1.lora_A" in name for name in names)
    assert not any("dwconv" in name for name in names)


def test_a_layer_that_the_folder_has_no_weights_for_is_new(tmp_path):
    config = CONFIGS["llama"][0]()
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = MODELS["hf"]((6,), 3, WORDS, weights=str(tmp_path))
    assert model.new_layers == ("network.score",)
    trained = Network(adapt_network(model, idiolect.LoRA(rank=2))).params
    assert "network.score.weight" in trained
    with pytest.raises(ModelError, match="knows 64 tokens, and the data has 9"):
        MODELS["hf"]((6,), 9, WORDS[:9], weights=str(tmp_path))
    with pytest.raises(ModelError, match="cannot make a network for ImageClassification"):
        MODELS["hf"]((3, 8, 8), 3, (), weights=str(tmp_path))


@pytest.mark.parametrize("broken", ["pickled", "a shard away", "a layer away"])
def test_weights_that_are_not_there_are_not_drawn_in_silence(broken, tmp_path):
    config = CONFIGS["llama"][0]()
    network = transformers.LlamaForCausalLM(config)
    network.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if broken == "a layer away":
        held = network.state_dict()
        gone = {name: leaf for name, leaf in held.items() if "layers.1.mlp.up" not in name}
        save_file(gone, file, metadata={"format": "pt"})
        words = "no weights, or others, for model.layers.1.mlp.up_proj.weight"
    else:
        file.unlink()
        name = "pytorch_model.bin" if broken == "pickled" else "model.safetensors.index.json"
        (tmp_path / name).write_text("{}")
        words = f"has weights in {name}, and only whole safetensors are read"
    with pytest.raises(ModelError, match=words):
        MODELS["hf"]((6,), 64, WORDS, weights=str(tmp_path))


def test_what_cannot_be_mapped_is_said_and_trained_one_by_one(tmp_path, monkeypatch):
    """A network that looks at its numbers to decide what to do."""
    model, _ = built(CONFIGS["llama"][0](), 64, tmp_path)
    forward = type(model).forward

    def looking(self, x):
        return forward(self, x) * (2.0 if bool((x > 62).any()) else 1.0)

    monkeypatch.setattr(type(model), "forward", looking)
    build = AdaptedNetwork(lambda: model, idiolect.LoRA(rank=1))
    simulation = worlds.simulation(
        METHODS["fedavg"](lr=0.1, batch=2),
        texts((3, 2), 64, 6),
        architectures={"looking": Architecture(build)},
    )
    assert "vmap cannot map it" in simulation.notices[0]
    assert "one after the other" in simulation.notices[0]
    simulation.advance()
