"""Any network of Hugging Face's `transformers`, from a folder on this machine.

No code of a folder is run and nothing is fetched. Attention is ours, which vmap can map.
"""

import contextlib
import logging
import math
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
_OTHERS = {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}
_TRIED = 16  # places of the texts that a network is tried on
_ROUNDING = 1e-4  # relative to the largest logit


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
        for layer in network.modules():  # each file of transformers has its own
            if type(layer).__name__.endswith("DropPath") and getattr(layer, "drop_prob", None):
                layer.draws = True

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
        try:
            logits: Tensor = self.network(**given).logits
        except (ValueError, IndexError) as error:  # of what it reads, such as too many places
            most = getattr(self.network.config, "max_position_embeddings", None)
            known = f"; it was made for {most} places" if isinstance(error, IndexError) else ""
            raise ModelError(
                f"the network of {str(self.folder)!r} cannot read {list(x.shape)}: "
                f"{_first_line(error)}{known}"
            ) from error
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
    made = HuggingFace(network, home, reads, kind == "CausalLM", new, padding_token(words))
    _settle(made, _probe(made, shape, len(words)))
    return made


def _probe(made: HuggingFace, shape: Shape, words: int) -> Tensor:
    """Return two examples to try a network on; of texts the second is shorter."""
    if made.input_name == "pixel_values":
        return torch.linspace(-1, 1, 2 * math.prod(shape)).reshape(2, *shape)
    length, end = min(shape[0], _TRIED), getattr(made.network.config, "eos_token_id", None)
    plain = [word for word in range(min(words, 2 * length + 2)) if word not in (made.pad, end)]
    x = torch.tensor(plain or [0])[torch.arange(2 * length).reshape(2, length) % max(1, len(plain))]
    x[1, (length + 1) // 2 :] = made.pad
    if isinstance(end, int) and 0 <= end < words and end != made.pad:  # some look for it
        x[0, -1] = x[1, (length - 1) // 2] = end
    return x


def _settle(made: HuggingFace, x: Tensor) -> None:
    """Keep our attention where it is what the network's own would be; else use that.

    Some give it more than scores and a mask, such as a bias of windows.
    """
    network, training = made.network, made.training
    made.eval()
    theirs = ours = _tried(made, x)
    if network.config._attn_implementation == _OURS:
        network.set_attn_implementation("eager")
        theirs = _tried(made, x)
        if isinstance(ours, Tensor) and (not isinstance(theirs, Tensor) or _alike(ours, theirs)):
            network.set_attn_implementation(_OURS)
            theirs = ours
    if isinstance(theirs, ModelError):
        raise theirs
    if not isinstance(theirs, Tensor):
        raise ModelError(
            f"transformers cannot run the network of {str(made.folder)!r}: {_first_line(theirs)}"
        ) from theirs
    if made.next_token and len(x[0]) > 1:
        other = x.clone()
        other[0, -1] = (x[0, -1] + 1) % made.network.config.vocab_size
        changed = _tried(made, other)
        if not isinstance(changed, Tensor) or not _alike(changed[:1, :-1], theirs[:1, :-1]):
            raise ModelError(
                f"the network of {str(made.folder)!r} reads texts in both directions, so it sees "
                "the token that it is to tell; choose another, or data with labels"
            )
    made.train(training)


def _tried(made: HuggingFace, x: Tensor) -> Tensor | Exception:
    """Run a network; return its logits, of padding 0, or why it does not run."""
    try:
        with torch.no_grad():
            logits: Tensor = made(x)
    except Exception as error:
        return error
    return logits * (x != made.pad)[..., None] if logits.dim() == 3 else logits


def _alike(one: Tensor, other: Tensor) -> bool:
    """Say whether two results are equal but for rounding."""
    near = _ROUNDING * float(other.abs().max())
    return one.shape == other.shape and bool(((one - other).abs() <= near).all())


def _made(
    transformers: Any, home: Path, kind: str, classes: int, pad: int
) -> tuple[Any, list[str]]:
    """Return a network and the layers that the folder has no weights for."""
    maker = getattr(transformers, f"AutoModelFor{kind}")
    others = sorted(
        file.name
        for file in home.iterdir()
        if file.suffix in _OTHERS or file.name.endswith(".index.json")
    )
    if others and not any(home.glob("*.safetensors")):
        raise ModelError(
            f"{str(home)!r} has weights in {others[0]}, and only whole safetensors are read, which "
            "run no code; save it again by transformers (save_pretrained)"
        )
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(home, **options)
        if kind != "CausalLM":
            config.num_labels = classes
            config.problem_type = None
        if kind == "SequenceClassification":
            config.pad_token_id = pad
        try:
            network, missing = _filled(maker, home, config, _registered(transformers), kind)
        except (KeyError, ValueError):  # its attention cannot be replaced
            network = None
        if network is None or not network._supports_sdpa:  # it is more than the softmax of scores
            network, missing = _filled(maker, home, config, "eager", kind)
    except Exception as error:  # of any kind, from code of many authors
        raise ModelError(
            f"transformers cannot make a network for {kind} of {str(home)!r}: {_first_line(error)}"
        ) from error
    inner = f"{network.base_model_prefix}."  # of a stack of layers: no head, so not meant to be new
    for name in sorted(missing):
        if name.startswith(inner) and any(part.isdigit() for part in name.split(".")):
            raise ModelError(
                f"{str(home)!r} has no weights, or others, for {name} ({len(missing)} such), which "
                "its config.json tells of; fetch it again"
            )
    return network, sorted({f"network.{name.rpartition('.')[0]}" for name in missing})


def _filled(maker: Any, home: Path, config: Any, attention: str, kind: str) -> tuple[Any, set[str]]:
    """Make a network with the weights of a folder, if it has some; name those it lacks."""
    options: dict[str, Any] = {"attn_implementation": attention, "trust_remote_code": False}
    if not any(home.glob("*.safetensors")):
        return maker.from_config(config, **options), set()
    network, loading = maker.from_pretrained(
        home,
        config=config,
        dtype=torch.get_default_dtype(),
        ignore_mismatched_sizes=kind != "CausalLM",
        use_safetensors=True,
        output_loading_info=True,
        local_files_only=True,
        **options,
    )
    return network, {*loading["missing_keys"], *(one[0] for one in loading["mismatched_keys"])}


def _first_line(error: Exception) -> str:
    """Return what an error says, in a line."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__


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
