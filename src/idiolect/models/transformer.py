"""Transformers: a decoder, an encoder and one for images, of the same blocks.

They are LLaMA's (Touvron et al. 2023): normalisation by the root mean square before each part,
rotary positions, gated units, no biases, under the names that Hugging Face gives them, so that a
folder written by either is read by both. Attention is mapped over clients without a loop.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.core.vocabulary import padding_token
from idiolect.errors import ModelError
from idiolect.kernels.attention import attention
from idiolect.kernels.rms_norm import rms_norm
from idiolect.kernels.transformer_ops import Angles, gated, rotated
from idiolect.models.bases import find_base, load_base, read_config, save_base
from idiolect.models.layers import Shape

Positions = Literal["rotary", "learned"]

_DEVIATION = 0.02  # of first weights
_THETA = 10_000.0


class RMSNorm(nn.Module):
    """Divides each place's numbers by their root mean square."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return rms_norm(x, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself; several query heads may share a key's."""

    def __init__(self, width: int, heads: int, key_heads: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.q_proj = nn.Linear(width, heads * head_width, bias=False)
        self.k_proj = nn.Linear(width, key_heads * head_width, bias=False)
        self.v_proj = nn.Linear(width, key_heads * head_width, bias=False)
        self.o_proj = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, x: Tensor, turn: Angles | None, mask: Tensor | None, causal: bool) -> Tensor:
        """Mix places; `turn` are the angles of rotary positions."""

        def parted(y: Tensor, heads: int) -> Tensor:
            return y.view(*y.shape[:-1], heads, -1)

        q = parted(self.q_proj(x), self.heads)
        k, v = (parted(layer(x), self.key_heads) for layer in (self.k_proj, self.v_proj))
        if turn is not None:
            q, k = rotated(q, turn), rotated(k, turn)
        if self.key_heads != self.heads:
            k, v = (one.repeat_interleave(self.heads // self.key_heads, 2) for one in (k, v))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = attention(q, k, v, mask, causal)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class GatedUnits(nn.Module):
    """The part of a block that treats each place by itself: down(silu(gate x) · up x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate x) · up x)."""
        y: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
        return y


class TransformerBlock(nn.Module):
    """Attention, then gated units; each after a normalisation, and added to what came in."""

    def __init__(
        self, width: int, heads: int, key_heads: int, head_width: int, inner: int, eps: float
    ) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, heads, key_heads, head_width)
        self.mlp = GatedUnits(width, inner)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def forward(self, x: Tensor, turn: Angles | None, mask: Tensor | None, causal: bool) -> Tensor:
        """Run the block."""
        x = x + self.self_attn(self.input_layernorm(x), turn, mask, causal)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Blocks(nn.Module):
    """Embedded places through all blocks, with positions."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, size: "Size", embedding: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.causal, self.context, self.positions = size.causal, size.context, size.positions
        if size.positions == "learned":
            self.embed_positions = nn.Embedding(size.context, size.width)
        parts = (size.width, size.heads, size.key_heads, size.head_width, size.inner, size.eps)
        self.layers = nn.ModuleList(TransformerBlock(*parts) for _ in range(size.layers))
        self.norm = RMSNorm(size.width, size.eps)
        rates = size.theta ** -(torch.arange(0, size.head_width, 2) / size.head_width)
        angles = torch.arange(size.context)[:, None] * rates
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor, prompts: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Return the last block's output for each place of x, prompts being before the first."""
        x, first, turn = self.embed_tokens(x), 0, None
        places = x.shape[1] + (
            0 if prompts is None or self.positions == "learned" else len(prompts)
        )
        if places > self.context:
            raise ModelError(
                f"a sequence has {places} places, and the network was made for {self.context}; "
                "shorten the sequences, or set model.context"
            )
        if self.positions == "learned":
            x = x + self.embed_positions.weight[:places].to(x.dtype)
        else:
            turn = Angles(self.cosine[:places], self.sine[:places])
        if prompts is not None:
            first = len(prompts)
            x = torch.cat([prompts.to(x.dtype).expand(len(x), -1, -1), x], 1)
            if mask is not None:
                mask = F.pad(mask, (first, 0), value=True)
        for block in self.layers:
            x = block(x, turn, mask, self.causal)
        x = self.norm(x)
        return x[:, first:]


class Size:
    """The sizes of a transformer: those asked for, or those of a base."""

    def __init__(self, causal: bool, given: Mapping[str, Any], base: Mapping[str, Any]) -> None:
        """`base` is a configuration in the terms of Hugging Face; empty: none."""
        named = {
            "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
            "inner": "intermediate_size", "context": "max_position_embeddings",
        }  # fmt: skip
        sizes = {name: base.get(key, given[name]) for name, key in named.items()}
        if bad := [name for name, size in sizes.items() if type(size) is not int or size < 1]:
            raise ModelError(f"{bad[0]} is {sizes[bad[0]]!r}, expected a whole number above 0")
        self.layers, self.width, self.heads = (sizes[n] for n in ("layers", "width", "heads"))
        self.inner, self.context, self.causal = sizes["inner"], sizes["context"], causal
        self.key_heads = int(base.get("num_key_value_heads") or self.heads)
        self.head_width = int(base.get("head_dim") or self.width // self.heads)
        self.eps = float(base.get("rms_norm_eps", 1e-5))
        rope = base.get("rope_parameters") or {}
        self.theta = float(rope.get("rope_theta") or base.get("rope_theta") or _THETA)
        self.positions: Positions = base.get("positions", given["positions"])
        self.tied = bool(base.get("tie_word_embeddings", given["tied"]))
        if self.positions not in get_args(Positions):
            raise ModelError(f"positions is {self.positions!r}, expected 'rotary' or 'learned'")
        if self.heads * self.head_width != self.width and not base:
            raise ModelError(f"width {self.width} is no multiple of the {self.heads} heads")
        if self.head_width % 2 or self.heads % self.key_heads:
            raise ModelError(
                f"{self.heads} heads of {self.head_width} numbers with {self.key_heads} of keys do "
                "not fit; use an even width of a head, and heads that are a multiple of keys'"
            )
        unknown = [
            key
            for key, usual in (
                ("attention_bias", False),
                ("mlp_bias", False),
                ("hidden_act", "silu"),
            )
            if base.get(key, usual) != usual
        ]
        if rope.get("rope_type", "default") != "default" or base.get("rope_scaling"):
            unknown.append("rope_scaling")
        if unknown:
            raise ModelError(
                f"the base has a {unknown[0]} that this network lacks; read it by transformers: "
                "model.name = 'hf:PATH'"
            )

    def config(self, kind: str, vocabulary: int) -> dict[str, Any]:
        """Describe it in the terms of Hugging Face."""
        return {
            "model_type": kind,
            "vocab_size": vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head_width,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "tie_word_embeddings": self.tied,
            "positions": self.positions,
        }


class _Transformer(nn.Module):
    """What the three have in common: sizes, a base, prompts, a head."""

    kind = ""  # model_type of a base's configuration
    usual: ClassVar[Mapping[str, Any]] = {}  # sizes, where nobody asks for others
    head_name = "score"
    more: Mapping[str, Any] = {}  # of the configuration

    pad = 0  # the token that fills texts up
    prompts: nn.Parameter | None
    new_layers: tuple[str, ...] = ()  # not of the base, so trained beside an adapter

    def _make(
        self,
        given: Mapping[str, Any],
        causal: bool,
        weights: str | None,
        digest: str | None,
        **more: int,
    ) -> Size:
        """Find the base, if any, and the sizes."""
        self.folder = None if weights is None else find_base(weights, digest)
        base = {} if self.folder is None else read_config(self.folder)
        asked = {name: value for name, value in given.items() if value is not None}
        if base and asked:
            raise ModelError(f"the base decides `{next(iter(asked))}`; leave it out")
        if base and base.get("model_type") != self.kind:
            raise ModelError(
                f"base {str(self.folder)!r} is a {base.get('model_type')!r} network, expected "
                f"{self.kind!r}; read it by transformers: model.name = 'hf:PATH'"
            )
        self.vocabulary = int(base.get("vocab_size", 0))
        self.size = Size(causal, {**self.usual, **more, **asked}, base)
        self.register_parameter("prompts", None)
        return self.size

    def _draw(self, new: Sequence[str]) -> None:
        """Draw first weights, and take the base's where there is one."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                nn.init.normal_(layer.weight, std=_DEVIATION)
        if self.folder is not None:
            self.new_layers = tuple(new)
            load_base(self, self.folder, self.new_layers)

    def prompts_like(self) -> tuple[int, float]:
        """Return the width of prompts, and the deviation of embedded places."""
        table = self.get_submodule("model.embed_tokens").weight
        assert isinstance(table, Tensor)
        return self.size.width, float(table.detach().std())

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of examples."""
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Return what enters the last layer."""
        raise NotImplementedError

    def head(self, features: Tensor) -> Tensor:
        """Return the outputs of features."""
        out: Tensor = self.get_submodule(self.head_name)(features)
        return out

    def save(self, folder: str) -> None:
        """Write the network for `weights`, and for transformers where that knows its kind."""
        config = self.size.config(self.kind, self.vocabulary)
        save_base(self, {**config, "pad_token_id": self.pad, **self.more}, folder)

    def _check_words(self, words: Sequence[str]) -> None:
        if self.vocabulary and self.vocabulary != len(words):
            raise ModelError(
                f"the base knows {self.vocabulary} tokens, and the data has {len(words)}; code the "
                "data by the base's tokeniser: data.options.tokeniser = the base's folder"
            )
        self.vocabulary = len(words)
        self.pad = padding_token(words)


class Decoder(_Transformer):
    """Reads tokens from left to right: the next one's logits, or a class by the last place.

    Where the classes are the words, as for text without labels, it predicts the next token.
    """

    kind = "llama"
    usual: ClassVar[Mapping[str, Any]] = {
        "layers": 6, "width": 384, "heads": 6, "inner": 1024,
        "context": 512, "positions": "rotary", "tied": True,
    }  # fmt: skip

    def __init__(
        self,
        shape: Shape,
        classes: int,
        words: Sequence[str],
        weights: str | None = None,
        digest: str | None = None,
        layers: int | None = None,
        width: int | None = None,
        heads: int | None = None,
        inner: int | None = None,
        context: int | None = None,
        positions: Positions | None = None,
        tied: bool | None = None,
    ) -> None:
        """`weights` is the folder of a base, which then decides the sizes (see `bases`)."""
        super().__init__()
        given = {
            "layers": layers, "width": width, "heads": heads, "inner": inner,
            "context": context, "positions": positions, "tied": tied,
        }  # fmt: skip
        size = self._make(given, True, weights, digest)
        self._check_words(words)
        self.model = Blocks(size, nn.Embedding(len(words), size.width))
        self.next_token = classes == len(words)
        self.head_name = "lm_head" if self.next_token else "score"
        outputs = nn.Linear(size.width, classes, bias=False)
        self.add_module(self.head_name, outputs)
        if self.next_token and size.tied:
            outputs.weight = self.model.embed_tokens.weight  # type: ignore[assignment]
        self._draw(() if self.next_token else ("score",))

    def features(self, x: Tensor) -> Tensor:
        """Return each place's, or the last token's [example, width] where a class is wanted."""
        found: Tensor = self.model(x, self.prompts)
        return found if self.next_token else _last_token(found, x, self.pad)


def _last_token(found: Tensor, x: Tensor, pad: int) -> Tensor:
    """Return what was found at the last token of each text that is none of padding."""
    places = torch.arange(x.shape[1], device=x.device)
    last = (places * (x != pad)).amax(1)
    return found.gather(1, last[:, None, None].expand(-1, 1, found.shape[-1])).squeeze(1)


class Encoder(_Transformer):
    """Reads a text as a whole: a class by the mean over its tokens."""

    kind = "idiolect-encoder"
    usual: ClassVar[Mapping[str, Any]] = {
        "layers": 4, "width": 256, "heads": 4, "inner": 688,
        "context": 512, "positions": "rotary", "tied": False,
    }  # fmt: skip

    def __init__(
        self,
        shape: Shape,
        classes: int,
        words: Sequence[str],
        weights: str | None = None,
        digest: str | None = None,
        layers: int | None = None,
        width: int | None = None,
        heads: int | None = None,
        inner: int | None = None,
        context: int | None = None,
        positions: Positions | None = None,
    ) -> None:
        """`weights` is the folder of a base, which then decides the sizes (see `bases`)."""
        super().__init__()
        given = {
            "layers": layers, "width": width, "heads": heads, "inner": inner,
            "context": context, "positions": positions,
        }  # fmt: skip
        size = self._make(given, False, weights, digest)
        self._check_words(words)
        self.model = Blocks(size, nn.Embedding(len(words), size.width))
        self.score = nn.Linear(size.width, classes)
        self._draw(("score",))

    def features(self, x: Tensor) -> Tensor:
        """Return the mean over a text's tokens [example, width]."""
        real = x != self.pad
        seen = real | (torch.arange(x.shape[1], device=x.device) == 0)  # an empty text's first
        found = self.model(x, self.prompts, seen[:, None, None])
        share = seen.to(found.dtype)[..., None]
        mean: Tensor = (found * share).sum(1) / share.sum(1)
        return mean


class ViT(_Transformer):
    """Reads an image as a sequence of patches (Dosovitskiy et al. 2021): a class by their mean."""

    kind = "idiolect-vit"
    usual: ClassVar[Mapping[str, Any]] = {
        "layers": 6, "width": 192, "heads": 6, "inner": 512,
        "positions": "learned", "tied": False,
    }  # fmt: skip

    def __init__(
        self,
        shape: Shape,
        classes: int,
        weights: str | None = None,
        digest: str | None = None,
        patch: int = 4,
        layers: int | None = None,
        width: int | None = None,
        heads: int | None = None,
        inner: int | None = None,
    ) -> None:
        """`weights` is the folder of a base, which then decides the sizes (see `bases`)."""
        super().__init__()
        if len(shape) != 3 or shape[1] % patch or shape[2] % patch:
            raise ModelError(
                f"vit cuts images into patches of {patch}×{patch}, and examples are of shape "
                f"{tuple(shape)}; set model.patch to a size that divides them"
            )
        count = (shape[1] // patch) * (shape[2] // patch)
        given = {"layers": layers, "width": width, "heads": heads, "inner": inner}
        size = self._make(given, False, weights, digest, context=count)
        self.patch, self.more = patch, {"patch": patch}
        self.model = Blocks(size, nn.Linear(shape[0] * patch * patch, size.width))
        self.score = nn.Linear(size.width, classes)
        self._draw(("score",))

    def features(self, x: Tensor) -> Tensor:
        """Return the mean over patches [example, width]."""
        return self.model(self._patches(x), self.prompts).mean(1)  # type: ignore[no-any-return]

    def _patches(self, x: Tensor) -> Tensor:
        """Cut images [example, channel, height, width] into [example, patch, number]."""
        n, channels, height, width = x.shape
        side = self.patch
        cut = x.reshape(n, channels, height // side, side, width // side, side)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, channels * side * side)
