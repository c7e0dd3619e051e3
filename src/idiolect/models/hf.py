"""Any network of Hugging Face's `transformers`, from a folder on this machine.

No code of a folder is run and nothing is fetched. Attention is ours, which vmap can map.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idiolect.core.vocabulary import padding_token
from idiolect.errors import MissingExtra, ModelError
from idiolect.kernels.attention import attention, attention_shares
from idiolect.models.bases import find_base, read_config
from idiolect.models.layers import Shape

_OURS = "idiolect"


class HuggingFace(nn.Module):
    """A network of transformers: tokens or images in, logits out."""

    new_layers: tuple[str, ...] = ()
    prompts: nn.Parameter | None

    def __init__(
        self,
        network: Any,
        folder: Path,
        input_name: str,
        next_token: bool,
        new: Sequence[str],
        pad: int = 0,
    ) -> None:
        """`pad` is the token that fills texts up."""
        super().__init__()
        self.network, self.folder, self.input_name = network, folder, input_name
        self.pad = pad
        self.next_token = next_token
        self.new_layers = tuple(new)
        self.register_parameter("prompts", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        given: dict[str, Any] = {self.input_name: x}
        count = 0
        if self.input_name == "input_ids":
            seen = (x != self.pad) | (torch.arange(x.shape[1], device=x.device) == 0)
            if self.prompts is not None:
                count = len(self.prompts)
                embedded = self.network.get_input_embeddings()(x)
                before = self.prompts.to(embedded.dtype).expand(len(x), -1, -1)
                given = {"inputs_embeds": torch.cat([before, embedded], 1)}
                seen = F.pad(seen, (count, 0), value=True)
            given |= {"attention_mask": seen.long(), "use_cache": False}
            if not self.generates:
                given.pop("use_cache")
        logits: Tensor = self.network(**given).logits
        return logits[:, count:] if logits.dim() == 3 else logits

    @property
    def generates(self) -> bool:
        """Whether the network keeps what it read, which training has no use for."""
        return hasattr(self.network.config, "use_cache")

    def prompts_like(self) -> tuple[int, float]:
        """Return the width of prompts, and the deviation of embedded tokens."""
        if not self.next_token:
            raise ModelError(
                "prompts in a network of transformers are for the next token alone: of classes it "
                "would take padding for the end of a text; use lora, or the network 'decoder'"
            )
        table = self.network.get_input_embeddings().weight.detach()
        return int(table.shape[1]), float(table.std())


def hf_network(
    shape: Shape,
    classes: int,
    words: Sequence[str] = (),
    *,
    weights: str,
    digest: str | None = None,
) -> nn.Module:
    """Build the network of a folder for the data: next token, classes of texts, or of images."""
    transformers = _transformers()
    home = find_base(weights, digest)
    read_config(home)
    if words:
        kind = "CausalLM" if classes == len(words) else "SequenceClassification"
    else:
        kind = "ImageClassification"
    with _quiet(transformers):
        network, new = _made(transformers, home, kind, classes, padding_token(words))
    if kind == "CausalLM" and network.config.vocab_size != classes:
        raise ModelError(
            f"the network of {str(home)!r} knows {network.config.vocab_size} tokens, and the data "
            f"has {classes}; code the data by its tokeniser: data.options.tokeniser = the folder"
        )
    reads = "input_ids" if words else "pixel_values"
    return HuggingFace(network, home, reads, kind == "CausalLM", new, padding_token(words))


def _made(
    transformers: Any, home: Path, kind: str, classes: int, pad: int
) -> tuple[Any, list[str]]:
    """Return a network and the layers that the folder has no weights for."""
    maker = getattr(transformers, f"AutoModelFor{kind}")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(home, **options)
        if kind != "CausalLM":
            config.num_labels = classes
            config.problem_type = None
        if kind == "SequenceClassification":
            config.pad_token_id = pad
        options["attn_implementation"] = _registered(transformers)
        if any(home.glob("*.safetensors")):
            network, loading = maker.from_pretrained(
                home,
                config=config,
                dtype=torch.get_default_dtype(),
                ignore_mismatched_sizes=kind != "CausalLM",
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
            missing = {*loading["missing_keys"], *(one[0] for one in loading["mismatched_keys"])}
        else:
            options.pop("local_files_only")
            network, missing = maker.from_config(config, **options), set()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"transformers cannot make a network for {kind} of {str(home)!r}: {said}"
        ) from error
    return network, sorted({f"network.{name.rpartition('.')[0]}" for name in missing})


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return import_module("transformers")
    except ImportError as error:
        raise MissingExtra("networks of Hugging Face need transformers", "hf") from error


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep bars and advice on new layers from the screen; what is new is trained."""
    logger = transformers.utils.logging
    before, bars = logger.get_verbosity(), logger.is_progress_bar_enabled()
    logger.set_verbosity(logging.ERROR)
    logger.disable_progress_bar()
    try:
        yield
    finally:
        logger.set_verbosity(before)
        if bars:
            logger.enable_progress_bar()


def _registered(transformers: Any) -> str:
    """Make our attention known to transformers; return its name there."""
    interface = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    masks = import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    if _OURS not in interface.valid_keys():
        interface.register(_OURS, _attention)
        masks.register(_OURS, _mask)
    return _OURS


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers calls it; a mask says all, also what is causal."""
    if query.shape[1] != key.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", False))
    causal = causal and attention_mask is None and query.shape[2] > 1
    if dropout:
        share = attention_shares(query, key, attention_mask, causal, scaling)
        mixed = F.dropout(share, dropout) @ value
    else:
        mixed = attention(query, key, value, attention_mask, causal, scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    q_offset: int = 0,
    kv_offset: int = 0,
    **_: Any,
) -> Tensor | None:
    """Return who sees whom [example or 1, 1, place, key]; nothing where that is causal alone.

    Texts are filled up on their right, so what is causal never sees padding.
    """
    if mask_function is import_module("transformers.masking_utils").causal_mask_function:
        return None
    example = torch.arange(batch_size, device=device)[:, None, None, None]
    place = torch.arange(q_length, device=device)[None, None, :, None] + q_offset
    other = torch.arange(kv_length, device=device)[None, None, None] + kv_offset
    seen: Tensor = mask_function(example, torch.zeros_like(example), place, other)
    if attention_mask is not None:
        seen = seen & attention_mask.bool()[:, None, None]
    return seen | (place == other)  # padding too sees something: itself
