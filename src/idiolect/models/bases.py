"""Folders of pretrained networks: config.json and safetensors, known by a digest.

The form is that of Hugging Face. Whoever names a base says which by the digest of its files, so
that another machine uses the same one or none.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from idiolect.errors import ModelError

EMBEDDED = "embedded"  # the small decoder that comes with idiolect
BASES = "IDIOLECT_BASES"  # of the environment: folders in which bases are looked for by digest
MARK = "sha256:"
_CONFIG, _TENSORS = "config.json", "*.safetensors"
_ADAPTER = "adapter_config.json"  # in its place where a folder holds an adapter
_BLOCK = 1 << 24


def find_base(named: str, digest: str | None = None) -> Path:
    """Return the folder of a base: by its path, by name, or by the digest of its files."""
    if named == EMBEDDED:
        folder = Path(str(resources.files("idiolect.data").joinpath("embedded/decoder")))
    elif named.startswith(MARK):
        return _by_digest(named)
    else:
        folder = Path(named).expanduser()
        if not _described(folder):
            if digest is not None:  # moved since
                return _by_digest(digest)
            raise ModelError(
                f"{named!r} has no {_CONFIG}; give a folder with {_CONFIG} and model.safetensors, "
                f"or '{EMBEDDED}'; of an adapter, one with {_ADAPTER}"
            )
    if digest is not None and digest != digest_of(folder):
        raise ModelError(
            f"base {str(folder)!r} is not the one that the experiment was made with: its digest is "
            f"{digest_of(folder)[:19]}..., expected {digest[:19]}..."
        )
    return folder


def base_name(named: str) -> str:
    """Name a base so that another machine finds it: the embedded one, or a digest."""
    if named == EMBEDDED:
        return named
    folder = find_base(named)
    remember(folder)
    return digest_of(folder)


def _by_digest(digest: str) -> Path:
    for folder in _known():
        if digest_of(folder) == digest:
            return folder
    raise ModelError(
        f"this machine does not have the base {digest[:19]}..., which clients share and nobody "
        f"sends; put its folder here and name it, or the folder it lies in, in {BASES}"
    )


def _known() -> Iterator[Path]:
    """Yield the bases of this machine: the embedded one, and those that its operator names."""
    yield find_base(EMBEDDED)
    named_here = os.environ.get(BASES, "").split(os.pathsep)
    seen = _seen().read_text(encoding="utf-8").splitlines() if _seen().is_file() else []
    for named in filter(None, [*named_here, *seen]):
        home = Path(named).expanduser()
        for folder in (home, *(sorted(home.iterdir()) if home.is_dir() else ())):
            if _described(folder):
                yield folder


def _seen() -> Path:
    """Return the file that lists the bases this user has named by their path."""
    home = os.environ.get("IDIOLECT_CACHE") or Path.home() / ".cache" / "idiolect"
    return Path(home).expanduser() / "bases.txt"


def remember(folder: Path) -> None:
    """Note where a base is, so that it is found again by its digest."""
    line, file = f"{folder.resolve()}\n", _seen()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if line not in (file.read_text(encoding="utf-8") if file.is_file() else ""):
            with file.open("a", encoding="utf-8") as out:
                out.write(line)
    except OSError:
        pass  # then it is found by IDIOLECT_BASES alone


def _described(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_CONFIG, _ADAPTER))


def digest_of(folder: Path) -> str:
    """Return `sha256:...` of the configuration and the tensors of a base, or of an adapter."""
    configs = [folder / name for name in (_CONFIG, _ADAPTER) if (folder / name).is_file()]
    files = [*configs, *sorted(folder.glob(_TENSORS))]
    return _digest(tuple((str(file), file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=64)
def _digest(files: tuple[tuple[str, int], ...]) -> str:
    whole = hashlib.sha256()
    for name, _ in files:
        with open(name, "rb") as file:
            own = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{Path(name).name} {own}\n".encode())
    return MARK + whole.hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """Read what a base is."""
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / _CONFIG} cannot be read ({error}); fetch it again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{folder / _CONFIG} is no table; expected a network's configuration")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read a base's tensors in single precision; those last read stay, for other seeds."""
    files = sorted(folder.glob(_TENSORS))
    return _tensors(tuple((str(file), file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=2)
def _tensors(files: tuple[tuple[str, int], ...]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for name, _ in files:
        try:
            found |= load_file(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{name} cannot be read ({error}); fetch it again") from None
    kind = torch.get_default_dtype()
    return {name: t.to(kind) if t.is_floating_point() else t for name, t in found.items()}


def load_base(model: nn.Module, folder: Path, new: tuple[str, ...] = ()) -> None:
    """Put a base's tensors in the place of a network's; the layers `new` are not looked for.

    They are not copied: networks of one base share its memory.
    """
    held, own = read_tensors(folder), dict(model.named_parameters())
    for name, parameter in own.items():
        if name.startswith(tuple(f"{layer}." for layer in new)):
            continue
        if name not in held or held[name].shape != parameter.shape:
            got = str(tuple(held[name].shape)) if name in held else "absent"
            raise ModelError(
                f"base {str(folder)!r}: {name!r} is {got}, and the network expects "
                f"{tuple(parameter.shape)}; name a base of this kind of network"
            )
        parameter.data = held[name]


def save_base(model: nn.Module, config: Mapping[str, Any], folder: str | Path) -> Path:
    """Write a network's parameters so that `weights` names them; return where."""
    from safetensors.torch import save

    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    (out / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    return out
