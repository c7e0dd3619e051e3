"""Texts are filled up with the token that their vocabulary names, which need not be number 0."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from idiolect.core.vocabulary import padding_token
from idiolect.models.hf import hf_network
from idiolect.models.text_networks import FastText, KimCNN
from idiolect.models.transformer import Decoder, Encoder

ROBERTA = ("<s>", "<pad>", "</s>", "a", "b", "c", "d", "e")
GPT = ("!", "a", "b", "c", "d", "e", "f", "<|endoftext|>")


def test_the_token_that_fills_up() -> None:
    assert padding_token(ROBERTA) == 1
    assert padding_token(GPT) == 7  # the end's, where there is none of its own
    assert padding_token(("a", "b")) == 0


def hf(folder: Path, words: tuple[str, ...]) -> nn.Module:
    small = {"vocab_size": len(words), "num_attention_heads": 2, "max_position_embeddings": 16}
    bert = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, **small}
    gpt = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": len(words)}
    config = {"model_type": "gpt2", **gpt} if words is GPT else {"model_type": "bert", **bert}
    (folder / "config.json").write_text(json.dumps(config))
    return hf_network((4,), 2, words, weights=str(folder))


@pytest.mark.parametrize("words", [ROBERTA, GPT])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "kim-cnn", "fasttext", "hf"])
def test_it_does_not_matter_how_far_a_text_is_filled_up(
    kind: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """The class of a text is that of the text alone; its token 0 is a word like others."""
    torch.manual_seed(0)
    sizes = {"layers": 1, "width": 8, "heads": 2, "inner": 8}
    if kind == "hf":
        network = hf(tmp_path, words)
    elif kind == "kim-cnn":
        network = KimCNN((4,), 2, words, embedding=8, filters=4)
    elif kind == "fasttext":
        network = FastText((4,), 2, words, embedding=8)
    else:
        network = {"decoder": Decoder, "encoder": Encoder}[kind]((4,), 2, words, **sizes)
    network.eval()
    pad = padding_token(words)
    text = torch.tensor([[3, 0, 4, 0]])
    filled = torch.cat([text, torch.full((1, 3), pad)], 1)
    other = torch.tensor([[3, 0, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(network(filled), network(text))
        assert not torch.equal(network(text), network(other))
