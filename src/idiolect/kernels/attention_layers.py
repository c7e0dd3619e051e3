"""Attention of a user's module for many clients at once: torch's layer, and its function.

Torch has no rule for mapping its fused attention. `nn.MultiheadAttention` is replaced by one that
calls ours; where a module calls `F.scaled_dot_product_attention` itself, `StackedFunctions` puts
ours in its place while the module runs. So it does with `F.embedding`, whose `padding_idx` vmap
drops: the row of padding would be trained.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from idiolect.kernels.attention import attention
from idiolect.kernels.linear import stacked_linear


class StackedFunctions(TorchFunctionMode):
    """While it is entered, attention and embeddings are done by the functions below."""

    def __init__(self) -> None:
        super().__init__()
        self.called = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pass on all other calls."""
        if func is F.scaled_dot_product_attention:
            self.called = True
            func = scaled_dot_product
        elif func is F.embedding and kwargs and kwargs.get("padding_idx") is not None:
            self.called = True
            func = embedding
        return func(*args, **(kwargs or {}))


def embedding(places: Tensor, weight: Tensor, *, padding_idx: int, **options: Any) -> Tensor:
    """Do what torch's function of these arguments does."""
    found = F.embedding(places, weight, **options)
    padding = (places == padding_idx % weight.shape[0]).unsqueeze(-1)
    return torch.where(padding, found.detach(), found)


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what torch's function of these arguments does."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        half = torch.get_autocast_dtype(device)
        query, key, value = query.to(half), key.to(half), value.to(half)
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if attn_mask is None and not dropout_p and query.shape[:-2] == key.shape[:-2]:
        q, k, v = (t.reshape(-1, *_heads(t), *t.shape[-2:]) for t in (query, key, value))
        done = attention(q, k, v, causal=is_causal, scale=scale)
        return done.reshape(*query.shape[:-1], value.shape[-1])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = (query * scale) @ key.mT
    if is_causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        bias = attn_mask.dtype != torch.bool
        logits = logits + attn_mask if bias else logits.masked_fill(~attn_mask, -math.inf)
        blind = (logits == -math.inf).all(-1, keepdim=True)  # a place that sees nothing: 0
        share = logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    else:
        share = logits.softmax(-1)
    result: Tensor = F.dropout(share, dropout_p).to(value.dtype) @ value
    return result


def _heads(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.shape[-3],) if tensor.dim() > 3 else (1,)


class StackedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` for many clients at once."""

    @staticmethod
    def suits(layer: nn.Module) -> bool:
        """Return whether a layer is of the plain kind that can be replaced."""
        return type(layer) is nn.MultiheadAttention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs, and what each place attended to where that is asked for."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint: give attn_mask too")
        alone = query.dim() == 2
        batch = 0 if alone or self.batch_first else 1
        same = query is key and key is value
        given = [t[None] if alone else t.movedim(batch, 0) for t in (query, key, value)]
        q, k, v = self._entered(given, same)  # [example, place, number]
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), 1, -1)], 1)
        if self.add_zero_attn:
            k, v = (torch.cat([t, torch.zeros_like(t[:, :1])], 1) for t in (k, v))
        q, k, v = (t.view(*t.shape[:2], self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, q, k.shape[2])
        dropout = self.dropout if self.training else 0.0
        share = None
        if need_weights:
            logits = (q / math.sqrt(q.shape[-1])) @ k.mT
            share = (logits if mask is None else logits + mask).softmax(-1)
            share = F.dropout(share, dropout, self.training)
            found = share @ v
        elif is_causal and key_padding_mask is None:  # as torch does, with new keys unseen
            found = scaled_dot_product(q, k, v, None, dropout, True)
        else:
            found = scaled_dot_product(q, k, v, mask, dropout)
        output = self.out_proj(found.transpose(1, 2).flatten(2))
        if share is not None and average_attn_weights:
            share = share.mean(1)
        if alone:
            return output[0], None if share is None else share[0]
        return output.movedim(0, batch), share

    def _entered(self, given: Sequence[Tensor], same: bool) -> Sequence[Tensor]:
        """Project queries, keys and values, where they are the same in one product."""
        weights, bias = self.in_proj_weight, self.in_proj_bias
        if same and weights is not None:
            return stacked_linear(given[0], weights, bias).chunk(3, -1)
        own: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        own = own if weights is None else weights.chunk(3)
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return [stacked_linear(x, w, b) for x, w, b in zip(given, own, biases, strict=True)]

    def _mask(
        self, places: Tensor | None, padding: Tensor | None, q: Tensor, keys: int
    ) -> Tensor | None:
        """Add up both masks as numbers, -∞ where a key is not seen; new keys are always seen."""
        total: Tensor | None = None
        if places is not None:
            total = _numbers(places, q)
            if total.dim() == 3:
                total = total.view(-1, self.num_heads, *total.shape[1:])
        if padding is not None:
            own = _numbers(padding if padding.dim() == 2 else padding[None], q)[:, None, None]
            total = own if total is None else total + own
        return total if total is None else F.pad(total, (0, keys - total.shape[-1]))


def _numbers(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
