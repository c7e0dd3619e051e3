"""The models that clients would use, on disk: one file for each method and seed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from idiolect.core import checkpoint, tree
from idiolect.core.batchnorm import learned
from idiolect.core.tree import Tree
from idiolect.errors import DataError, MethodError

Deployed = Sequence[tuple[np.ndarray, Tree]]
"""Per architecture: its clients, and what they deploy, stacked on axis 0."""


PARTS = "parts"  # of a comparison's folder: parts/METHOD/SETTINGS/SEEDS are runs of their own


def folder_name(label: str) -> str:
    """Make a label safe as the name of a file, the same on every system."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in label)
    return name if name.strip(".") else "_" * len(name)  # no "..", which is another folder


def save_models(folder: Path, label: str, seed: int, names: Sequence[str], kept: Deployed) -> None:
    """Write what every client of one seed deploys."""
    checkpoint.save(
        _path(folder, label, seed),
        {str(place): stacked for place, (_, stacked) in enumerate(kept)},
        {"clients": list(names), "architectures": [clients.tolist() for clients, _ in kept]},
    )


def load_model(folder: str | Path, method: str, seed: int, client: int | str) -> dict[str, Tensor]:
    """Return what one client of a finished run deploys, by the names of its leaves."""
    path = _path(Path(folder), method, seed)
    if not path.is_file():
        raise DataError(f"{path} does not exist; finish the run with evaluate.save_models = true")
    named, meta = checkpoint.read(path)
    names = meta["clients"]
    if isinstance(client, str):
        if client not in names:
            raise DataError(f"{path} has no client {client!r}; it has {', '.join(names[:8])}, ...")
        return one_client(named, meta["architectures"], names.index(client))
    return one_client(named, meta["architectures"], client)


def one_client(
    named: dict[str, Tensor], architectures: Sequence[Sequence[int]], client: int
) -> dict[str, Tensor]:
    """Pick one client's leaves out of the stacks of its architecture."""
    for place, clients in enumerate(architectures):
        if client in clients:
            row, prefix = list(clients).index(client), f"{place}."
            return {
                name.removeprefix(prefix): leaf[row]
                for name, leaf in named.items()
                if name.startswith(prefix)
            }
    raise DataError(f"there is no client {client}; expected 0..{sum(map(len, architectures)) - 1}")


def fill(module: nn.Module, leaves: dict[str, Tensor]) -> nn.Module:
    """Load a client's leaves into a network, wherever in the deployed tree its parameters are."""
    wanted = {name: value.shape for name, value in learned(module).items()}
    first = next(iter(wanted))
    prefixes = sorted({name[: -len(first)] for name in leaves if name.endswith(first)})
    for prefix in prefixes:
        found = {name: leaves[prefix + name] for name in wanted if prefix + name in leaves}
        if {name: value.shape for name, value in found.items()} == wanted:
            module.load_state_dict(found, strict=False)
            return module.eval()
    raise MethodError(
        f"the deployed model has leaves {', '.join(list(leaves)[:4])}, ..., which do not fill a "
        f"{type(module).__name__}; read them with idiolect.load_model"
    )


def named_stacks(kept: Deployed) -> dict[str, Tensor]:
    """Name the leaves of all architectures as the file does."""
    return tree.named({str(place): stacked for place, (_, stacked) in enumerate(kept)})


def _path(folder: Path, label: str, seed: int) -> Path:
    """Find the file: in the run's folder, or in the part of a comparison that holds the seed."""
    own = Path("models") / folder_name(label) / f"seed-{seed}.safetensors"
    parts = folder.glob(f"{PARTS}/{folder_name(label)}/*/*/{own}")
    return folder / own if (folder / own).exists() else next(parts, folder / own)
