"""The decoder that comes with idiolect: read by transformers alike, and only with its tokeniser."""

import json
from pathlib import Path

import pytest
import torch

import idiolect
from idiolect.data.tokenisers import Tokeniser, embedded_base
from idiolect.errors import DataError
from idiolect.models.transformer import Decoder

pytest.importorskip("tokenizers", reason="needs tokenizers")
TOKENS = Tokeniser.load("embedded")
SAID = "The room was clean, and the staff were friendly."


def made() -> Decoder:
    return Decoder((16,), len(TOKENS.words), TOKENS.words, weights="embedded").eval()


def test_transformers_reads_the_same_network():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    other = transformers.AutoModelForCausalLM.from_pretrained(embedded_base(), dtype=torch.float32)
    x = torch.tensor([TOKENS.framed(TOKENS.encode([SAID])[0])])
    with torch.no_grad():
        assert torch.allclose(made()(x), other.eval()(x).logits, atol=1e-4)
    tokens = transformers.AutoTokenizer.from_pretrained(embedded_base())
    assert tokens(SAID)["input_ids"] == TOKENS.encode([SAID])[0] and tokens.pad_token_id == 0


def test_it_has_learnt_english():
    """It is less surprised by words in their order; a network that knows nothing needs 6.9 nats."""
    ids = torch.tensor([TOKENS.framed(TOKENS.encode([SAID])[0])])
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]

    def lost(x: torch.Tensor) -> float:
        logits = made()(x[:, :-1])
        return torch.nn.functional.cross_entropy(logits[0], x[0, 1:]).item()

    assert lost(ids) < 4 < lost(shuffled)
    record = json.loads((embedded_base() / "pretraining.json").read_text())
    assert record["parameters"] == sum(p.numel() for p in made().parameters())
    assert (embedded_base() / "model.safetensors").stat().st_size < 2_500_000


def test_text_of_another_tokeniser_is_refused(tmp_path: Path):
    lines = [f'{{"client": "{who}", "text": "{SAID} {n}"}}' for who in "ab" for n in range(8)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines))
    other = json.loads(TOKENS.json)
    other["model"]["merges"] = other["model"]["merges"][::-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    held = idiolect.federation(path, options={"tokeniser": str(tmp_path), "length": 8})
    with pytest.raises(DataError, match=r"of t was coded by the tokeniser .* and the base .* has"):
        idiolect.fit("fedavg", held, "decoder:embedded", adapter="lora", rounds=1)
