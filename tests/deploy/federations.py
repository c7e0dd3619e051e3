"""Small federations for the tests of deployment."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from idiolect.core import checkpoint
from idiolect.deploy import submission
from idiolect.deploy.limits import UNLIMITED
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.serve_experiment import ServerSettings, make_messenger, serve
from idiolect.deploy.site import NodeSettings
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.portable import export_experiment
from idiolect.experiment.run import run_experiment
from idiolect.methods import METHODS
from idiolect.models.adapters import LoRA

TOML = """
name = "small"
seeds = [3]
rounds = 2

[data]
partition = { name = "iid", clients = 4, per_client = 20 }
public = { source = "embedded", size = 12 }

[model]
name = "federations:normed"
auxiliary = { name = "dnn", hidden = 4 }

[training]
batch = 8
lr = 0.05

[evaluate]
every = 2

[backend]
kind = "sequential"
checkpoint_every = 1

[deploy]
timeout = 300
join = 300
packages = ["federations"]
"""
HOST = ServerSettings(
    packages=("federations",)
)  # whoever runs these servers and nodes allows this module


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small network with a normalisation layer, so that FedBN has something to keep."""
    size = math.prod(shape)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, classes)
    )


def adapted(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The same with LoRA in its first layer, for methods that divide its matrices."""
    made = normed(shape, classes)
    made[1].requires_grad_(False)
    LoRA(targets=("1",)).attach(made)
    return made


def experiment(*methods: str, sets: tuple[str, ...] = (), toml: str = TOML):
    if any("LoRA" in METHODS[name].__name__ for name in methods if name in METHODS):
        toml = toml.replace("federations:normed", "federations:adapted")
    tables = "".join(f'[[methods]]\nname = "{method}"\n{_smaller(method)}' for method in methods)
    return parse_experiment(toml + tables, sets)


_SMALL = {
    "sample": 8,  # of the public examples
    "drawn": 2,
    "fuse_epochs": 1,
    "head_epochs": 1,
    "start_epochs": 2,
    "tune_epochs": 2,
    "newcomer_epochs": 2,
    "distil_epochs": 1,
    "shares": [0.0, 0.5],
    "temperatures": [1.0, 5.0],
}


def _smaller(name: str) -> str:
    """Let methods that do things many times do them a few times."""
    fields = {spec.name for spec in dataclasses.fields(METHODS[name])} - set(METHODS[name].unused)
    return "".join(f"{key} = {value}\n" for key, value in _SMALL.items() if key in fields)


def sites(home: Path, count: int = 4, **settings) -> list[NodeSettings]:
    """Sites of a few rows each, which set no limits unless told."""
    settings = {"policy": UNLIMITED, "packages": HOST.packages, **settings}
    return [
        NodeSettings(f"site-{n}", "test", home / f"site-{n}", "embedded", client=n, **settings)
        for n in range(count)
    ]


def inside(home: Path, count: int = 4, **settings) -> InProcess:
    return InProcess({site.name: Node(site) for site in sites(home, count, **settings)})


def simulated(wanted, folder: Path):
    content, _ = run_experiment(wanted, folder)
    return content


def served(wanted, transport, folder: Path, run: str = "r1", **more):
    text, host = export_experiment(wanted), more.pop("host", HOST)
    if (lead := getattr(transport, "lead", None)) is not None:  # the kit of whoever submits
        transport.submission = submission.sign(lead, run, "run", text)
        more.setdefault("submitter", lead.name)
    return serve(
        make_messenger(transport, text, folder, host), text, run, folder, host=host, **more
    )


def server_state(folder: Path, label: str, part: str = "server") -> Mapping[str, torch.Tensor]:
    """Return the server's last state by name, out of a run's checkpoint."""
    named, meta = checkpoint.read(folder / "checkpoints" / f"{label}.safetensors")
    assert meta["finished"]
    return {name: leaf for name, leaf in named.items() if name.startswith(f"state.{part}")}


def fused_models(folder: Path, label: str) -> Mapping[str, torch.Tensor]:
    """Return what the server keeps for each architecture."""
    return server_state(folder, label, "groups")


def scores(content, label: str):
    """Return all that was found of a method, apart from how long it took and what it weighed.

    Which test rows were right, and figures and pictures of all clients' rows together, are known to
    simulations only: nodes tell figures of their own. Who came to which round is known to
    federations only.
    """
    rows = ("right_by_group", "without_group", "pooled", "confusion", "confusion_of_clients")
    rows += ("reliability", "points", "attendance")

    def told(found):
        if isinstance(found, dict):
            return {key: told(value) for key, value in found.items() if key not in rows}
        return [told(one) for one in found] if isinstance(found, list) else found

    seeds = content["methods"][label]["seeds"]
    return told([{key: value for key, value in seed.items() if key != "traffic"} for seed in seeds])


def largest_gap(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys() and left
    return max(float((left[name] - right[name]).abs().max()) for name in left)


WEIGHTY = 8000  # bytes; of smaller messages the head is a large part


def bytes_beside(found, content, label: str, factor: tuple[float, float] = (1, 1)) -> list[float]:
    """Return what crossed beyond a factor times the simulator's count, as a share: down, up, ...

    Messages that are mostly head are left out.
    """
    shares = []
    pairs = zip(*(one["methods"][label]["seeds"] for one in (found, content)), strict=True)
    for there, here in pairs:
        for way, times in zip(("bytes_down", "bytes_up"), factor, strict=True):
            sent, weight = there["traffic"][way], times * here["traffic"][way]
            assert sent > weight
            if weight > WEIGHTY * here["traffic"]["participations"]:
                shares.append(sent / weight - 1)
    return shares
