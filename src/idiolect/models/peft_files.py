"""Adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from idiolect.errors import ModelError
from idiolect.models.adapters import IA3, Adapter, LoRA, Prompts

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_OURS = "network."  # before the names of a network of transformers
_PROMPTS = "prompt_embeddings"
Named = TypeVar("Named", bound=Tensor)


def save_peft(model: nn.Module, folder: str | Path, base: str = "") -> Path:
    """Write the adapter of a network so that PEFT loads it onto the same base; return where.

    `base` is what the files name as the base model: a folder, by default the one it came from.
    """
    from safetensors.torch import save

    adapter = _adapter_of(model)
    trained = _trained(model)
    heads = _heads(model, trained)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    config = {
        **_config(model, adapter, trained),
        "base_model_name_or_path": base or str(getattr(model, "folder", None) or ""),
        "inference_mode": True,
        "modules_to_save": heads or None,
        "task_type": _task(model),
    }
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    prompted = isinstance(adapter, Prompts)
    tensors = {
        _peft_name(name, prompted): _peft_form(model, name, leaf.detach().cpu().contiguous())
        for name, leaf in {**trained, **_beside(model, heads)}.items()
    }
    (out / TENSORS).write_bytes(save(tensors, {"format": "pt"}))
    return out


def _adapter_of(model: nn.Module) -> Adapter:
    adapter = getattr(model, "adapter", None)
    if not isinstance(adapter, LoRA | IA3 | Prompts):
        kind = f"the adapter {adapter.kind!r}" if isinstance(adapter, Adapter) else "no adapter"
        raise ModelError(
            f"the network has {kind}, which PEFT has no files for; it knows lora, ia3 and prompts. "
            "Export it as safetensors"
        )
    return adapter


def _config(model: nn.Module, adapter: Adapter, trained: Mapping[str, Tensor]) -> dict[str, Any]:
    if isinstance(adapter, Prompts):
        return {
            "peft_type": "PROMPT_TUNING",
            "num_virtual_tokens": adapter.count,
            "token_dim": trained["prompts"].shape[1],
            "num_transformer_submodules": 1,
        }
    layers = dict.fromkeys(name.rpartition(".")[0] for name in trained if _made(name))
    turned = any(hasattr(_layer(model, name), "nf") for name in layers)
    common = {"target_modules": list(layers), "fan_in_fan_out": turned}
    if isinstance(adapter, LoRA):
        own = {
            "r": adapter.rank,
            "lora_alpha": _whole(adapter.alpha),
            "lora_dropout": 0.0,
            "bias": "none",
        }
        return {"peft_type": "LORA", **own, **common}
    return {"peft_type": "IA3", "feedforward_modules": [], **common}


def _heads(model: nn.Module, trained: Mapping[str, Tensor]) -> list[str]:
    """Name the modules that PEFT keeps as a whole, those with layers trained as they are.

    For classes of texts it does so with all that is called a classifier or a score.
    """
    usual = ("classifier", "score") if _task(model) == "SEQ_CLS" else ()
    found = set()
    for name in {name.rpartition(".")[0] for name in trained if not _made(name)}:
        parts = name.split(".")
        own = [n for n, part in enumerate(parts) if part.endswith(usual)] if usual else []
        found.add(".".join(parts[: own[0] + 1]) if own else name)
    return sorted(found)


def _beside(model: nn.Module, heads: Sequence[str]) -> dict[str, Tensor]:
    """Return the frozen tensors of those modules; PEFT takes a name for the end of one."""
    kept = [*heads, "classifier", "score"] if _task(model) == "SEQ_CLS" else heads
    whole = _named(model.state_dict())
    inside = {name: [name[:at] for at, sign in enumerate(name) if sign == "."] for name in whole}
    return {
        name: leaf
        for name, leaf in whole.items()
        if any(own.endswith(tuple(kept)) for own in inside[name]) and not _made(name)
    }


def _whole(number: float) -> float:
    """Write 16 for 16.0, as PEFT does."""
    return int(number) if number == int(number) else number


def _layer(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name if not hasattr(model, "network") else _OURS + name)


def _made(name: str) -> bool:
    """Say whether a parameter is of an adapter, and not a layer that is trained as it is."""
    return name.rpartition(".")[2] in ("lora_A", "lora_B", "ia3", "prompts")


def _task(model: nn.Module) -> str | None:
    """Name the task as PEFT does; of networks that transformers does not know there is none."""
    if getattr(model, "input_name", "") == "pixel_values" or not hasattr(model, "next_token"):
        return None
    return "CAUSAL_LM" if model.next_token else "SEQ_CLS"


def _peft_name(name: str, prompted: bool) -> str:
    if name == "prompts":
        return _PROMPTS
    layer, _, own = name.rpartition(".")
    prefix = "base_model." if prompted else "base_model.model."
    if own in ("lora_A", "lora_B"):
        return f"{prefix}{name}.weight"
    return f"{prefix}{layer}.ia3_l" if own == "ia3" else prefix + name


def _peft_form(model: nn.Module, name: str, leaf: Tensor) -> Tensor:
    if not name.endswith(".ia3"):
        return leaf
    image = isinstance(_layer(model, name.rpartition(".")[0]), nn.Conv2d)
    return leaf[None, :, None, None] if image else leaf[:, None]


def load_peft(model: nn.Module, folder: str | Path) -> None:
    """Fill the adapter of a network with one that PEFT, or `save_peft`, wrote."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    home, adapter = Path(folder), _adapter_of(model)
    try:
        config = json.loads((home / CONFIG).read_text(encoding="utf-8"))
        held = load_file(home / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"the adapter {str(home)!r} cannot be read ({error}); expected a folder with {CONFIG} "
            f"and {TENSORS}"
        ) from None
    wanted = _config(model, adapter, _trained(model))
    for key in ("peft_type", "r", "lora_alpha", "num_virtual_tokens"):
        if key in wanted and config.get(key) != wanted[key]:
            raise ModelError(
                f"the adapter {str(home)!r} has {key} = {config.get(key)!r}, and [adapter] says "
                f"{wanted[key]!r}; make them alike"
            )
    for key in ("use_dora", "use_rslora", "alpha_pattern", "feedforward_modules"):
        if config.get(key):
            raise ModelError(f"the adapter {str(home)!r} has {key}, which is not known here")
    names = {name: _peft_name(name, isinstance(adapter, Prompts)) for name in _trained(model)}
    whole = {_peft_name(name, False): leaf for name, leaf in _named(model.state_dict()).items()}
    left = sorted(  # what is frozen here, and the same, is no matter
        key
        for key in held.keys() - set(names.values())
        if key not in whole or not torch.equal(whole[key], held[key].to(whole[key]))
    )
    if left:
        raise ModelError(
            f"the adapter {str(home)!r} has {left[0]!r} ({len(left)} such), and nothing here takes "
            "it; choose the targets that it has, and adapter.head = true where it has a head"
        )
    for name, leaf in _trained(model).items():
        key = names[name]
        if key not in held and not _made(name):
            continue  # a head that is trained here and was not there
        if key not in held or held[key].numel() != leaf.numel():
            got = str(tuple(held[key].shape)) if key in held else "absent"
            raise ModelError(
                f"the adapter {str(home)!r}: {key!r} is {got}, expected {tuple(leaf.shape)}; "
                "choose the targets that it has"
            )
        with torch.no_grad():
            leaf.copy_(held[key].reshape(leaf.shape))


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return _named({name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad})


def _named(tensors: Mapping[str, Named]) -> dict[str, Named]:
    """Name tensors as transformers does."""
    return {name.removeprefix(_OURS): leaf for name, leaf in tensors.items()}
