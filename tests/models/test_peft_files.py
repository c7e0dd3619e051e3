"""An adapter's files are PEFT's: it loads ours with equal logits, and we begin with its own."""

import importlib
import importlib.util
import json

import pytest
import torch

import idiolect
from idiolect.errors import ModelError
from idiolect.models import MODELS
from idiolect.models.adapters import adapt_network
from idiolect.models.bases import find_base
from idiolect.models.peft_files import load_peft, save_peft

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers, in PEFT
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
]

WORDS = tuple(map(str, range(1024)))  # as many as the embedded base knows
TEXT = torch.tensor([[5, 9, 300, 7, 8, 1000], [6, 7, 8, 0, 0, 0]])
AUTO = {3: "AutoModelForSequenceClassification", 1024: "AutoModelForCausalLM"}


@pytest.fixture(scope="module")
def peft():
    """Imported where it is used: at the top every worker would wait for it."""
    return importlib.import_module("peft")


def pretrained(classes, base, **options):
    return getattr(transformers, AUTO[classes]).from_pretrained(
        find_base(base), dtype=torch.float32, **options
    )


def moved(model):
    """Move what is trained away from where it begins."""
    torch.manual_seed(3)
    with torch.no_grad():
        for leaf in model.parameters():
            if leaf.requires_grad:
                leaf.add_(0.1 * torch.randn_like(leaf))
    return model.eval()


def gpt2(folder):
    """Write a small GPT-2, whose query, key and value are one `Conv1D`."""
    config = transformers.GPT2Config(
        vocab_size=1024, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("classes", [1024, 3], ids=["next token", "classes"])
@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("decoder", idiolect.LoRA(rank=2, alpha=3)),
        ("decoder", idiolect.IA3(targets=("k_proj", "down_proj"))),
        ("decoder", idiolect.Prompts(count=3)),
        ("hf", idiolect.LoRA(rank=2, targets=("c_attn", "c_fc"))),
    ],
    ids=["lora", "ia3", "prompts", "gpt2"],
)
def test_peft_loads_what_we_save_with_equal_logits(name, adapter, classes, peft, tmp_path):
    weights = "embedded" if name == "decoder" else gpt2(tmp_path / "base")
    base = MODELS[name]((6,), classes, WORDS, weights=weights)
    model = moved(adapt_network(base, adapter))
    save_peft(model, tmp_path / "adapter")
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    folder = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert folder["base_model_name_or_path"] == str(find_base(weights))
    bare = pretrained(classes, weights, **({"num_labels": 3} if classes == 3 else {}))
    other = peft.PeftModel.from_pretrained(bare, tmp_path / "adapter").eval()
    with torch.no_grad():
        ours = model(TEXT)
        theirs = other(input_ids=TEXT, attention_mask=(TEXT != 0).long()).logits
        bare = base.eval()(TEXT)
    if classes == 1024:
        theirs = theirs[:, -6:]
        ours, theirs, bare = (logits[TEXT != 0] for logits in (ours, theirs, bare))
    elif isinstance(adapter, idiolect.Prompts):  # with them transformers sees no padding
        ours, theirs, bare = ours[:1], theirs[:1], bare[:1]
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.allclose(ours, bare, atol=1e-3)


def test_we_begin_with_what_peft_saved(peft, tmp_path):
    bare = pretrained(1024, "embedded")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj"], task_type="CAUSAL_LM")
    other = moved(peft.get_peft_model(bare, config))
    other.save_pretrained(tmp_path)
    base = MODELS["decoder"]((6,), 1024, WORDS, weights="embedded")
    start = {"targets": ("v_proj",), "start": str(tmp_path)}
    model = adapt_network(base, idiolect.LoRA(rank=4, alpha=8, **start)).eval()
    with torch.no_grad():
        assert torch.allclose(model(TEXT), other(input_ids=TEXT).logits, atol=1e-4)
    with pytest.raises(ModelError, match=r"has r = 4, and \[adapter\] says 2"):
        adapt_network(base, idiolect.LoRA(rank=2, alpha=8, **start))
    with pytest.raises(ModelError, match="choose the targets that it has"):
        adapt_network(base, idiolect.LoRA(rank=4, alpha=8, start=str(tmp_path)))


SMALL = {"vocab_size": 1024, "pad_token_id": 0}
NARROW = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
HEADS = {  # networks whose heads are several layers, or end like others' names
    "roberta": lambda: transformers.RobertaConfig(**SMALL, **NARROW, intermediate_size=24),
    "distilbert": lambda: transformers.DistilBertConfig(
        **SMALL, dim=16, n_layers=1, n_heads=2, hidden_dim=24
    ),
    "resnet": lambda: transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
}


@pytest.mark.parametrize("adapter", [idiolect.LoRA(rank=2), idiolect.IA3()], ids=["lora", "ia3"])
@pytest.mark.parametrize("bare", [False, True], ids=["two classes before", "no head before"])
@pytest.mark.parametrize("kind", HEADS)
def test_heads_of_several_layers_go_to_peft_and_back(kind, bare, adapter, peft, tmp_path):
    config = HEADS[kind]()
    config.num_labels = 2
    images = kind == "resnet"
    task = "AutoModelForImageClassification" if images else "AutoModelForSequenceClassification"
    maker = getattr(transformers, task)
    whole = maker.from_config(config)
    (whole.base_model if bare else whole).save_pretrained(tmp_path / "base")
    shape, words = ((3, 32, 32), ()) if images else ((6,), WORDS)
    x = torch.linspace(-1, 1, 2 * 3 * 32**2).reshape(2, 3, 32, 32) if images else TEXT

    def made():
        base = MODELS["hf"](shape, 3, words, weights=str(tmp_path / "base"))
        return adapt_network(base.eval(), adapter)

    model = moved(made())
    save_peft(model, tmp_path / "adapter")
    again = made().eval()
    load_peft(again, tmp_path / "adapter")
    fresh = maker.from_pretrained(
        tmp_path / "base", num_labels=3, ignore_mismatched_sizes=True, dtype=torch.float32
    )
    other = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    given = {"pixel_values": x} if images else {"input_ids": x, "attention_mask": (x != 0).long()}
    with torch.no_grad():
        ours, theirs, back = model(x), other(**given).logits, again(x)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.equal(ours, back)


def test_mambas_layers_are_those_that_peft_takes(peft, tmp_path):
    """Kernels read the weight of out_proj past the layer; PEFT did not load what we saved."""
    config = transformers.MambaConfig(
        vocab_size=1024, hidden_size=16, num_hidden_layers=2, state_size=4
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "base")
    base = MODELS["hf"]((6,), 1024, WORDS, weights=str(tmp_path / "base"))
    model = moved(adapt_network(base, idiolect.LoRA(rank=2)))
    assert not any(
        "out_proj" in name for name, own in model.named_parameters() if own.requires_grad
    )
    save_peft(model, tmp_path / "adapter")
    bare = pretrained(1024, str(tmp_path / "base"))
    other = peft.PeftModel.from_pretrained(bare, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.allclose(model(TEXT)[0], other(input_ids=TEXT).logits[0], atol=1e-4)
    base = MODELS["hf"]((6,), 1024, WORDS, weights=str(tmp_path / "base"))
    with pytest.raises(ModelError, match=r"name '.*out_proj', whose weight kernels of Mamba"):
        adapt_network(base, idiolect.LoRA(targets=("out_proj",)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"target_modules": ["v_proj", "up_proj"]}, "up_proj.lora_A.weight.*nothing here takes it"),
        ({"modules_to_save": ["norm"]}, "norm.weight.*adapter.head = true"),
        ({"alpha_pattern": {"layers.0.self_attn.v_proj": 80}}, "alpha_pattern, which is not known"),
    ],
)
def test_what_peft_has_and_we_would_leave_out_is_refused(config, words, peft, tmp_path):
    bare = pretrained(1024, "embedded")
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"], "task_type": "CAUSAL_LM"}
    moved(peft.get_peft_model(bare, peft.LoraConfig(**{**given, **config}))).save_pretrained(
        tmp_path
    )
    base = MODELS["decoder"]((6,), 1024, WORDS, weights="embedded")
    adapter = idiolect.LoRA(rank=4, alpha=8, targets=("v_proj",), start=str(tmp_path))
    with pytest.raises(ModelError, match=words):
        adapt_network(base, adapter)


def test_what_peft_has_no_files_for_is_said(tmp_path):
    base = MODELS["decoder"]((6,), 1024, WORDS, weights="embedded")
    with pytest.raises(ModelError, match="it knows lora, ia3 and prompts"):
        save_peft(adapt_network(base, idiolect.Last(targets=("norm",))), tmp_path / "a")
    with pytest.raises(ModelError, match="the network has no adapter"):
        save_peft(base, tmp_path / "a")
    with pytest.raises(ModelError, match="cannot be read"):
        load_peft(adapt_network(base, idiolect.LoRA()), tmp_path)
