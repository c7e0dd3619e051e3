"""What secure aggregation costs a round: bytes and seconds beside the plain round.

Usage: python benchmarks/secure_aggregation.py. Nodes in this process, one after the other, each
with a kit of its own; a network of 1e5 parameters, a single gradient step; bytes are those of the
messages as sent, seconds those of the processor for all nodes and the hub.
"""

import dataclasses
import tempfile
import time
from pathlib import Path

import torch

from idiolect.deploy.flare.kits import init
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.serve_experiment import make_messenger, serve
from idiolect.deploy.site import NodeSettings
from idiolect.engine.outcome import Silent, Tick
from idiolect.experiment.federation_file import load_project
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.portable import export_experiment

ROUNDS = 6
TOML = """
name = "secure"
rounds = {rounds}
[data]
partition = {{ name = "iid", clients = {clients}, per_client = 20 }}
[model]
name = "dnn"
hidden = 126
[training]
batch = 20
[evaluate]
every = {rounds}
[backend]
kind = "sequential"
[[methods]]
name = "fedavg"
"""


class Clock(Silent):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def tick(self, tick: Tick) -> None:
        """Hear that a round is over."""
        self.ends.append(time.process_time())

    @property
    def round(self) -> float:
        """Seconds of the processor for a round: the median, without the first."""
        spans = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        return sorted(spans)[len(spans) // 2]


def kits(folder: Path, clients: int) -> Path:
    """Make kits for so many sites."""
    sites = ", ".join(f'{{ name = "n{n}" }}' for n in range(clients))
    path = folder / "project.toml"
    path.write_text(
        f'name = "bench"\nserver = {{ host = "localhost", port = 8002 }}\nsites = [{sites}]\n'
        'admins = [{ email = "lead@example.org" }]\n'
    )
    init(load_project(path), folder / "kits")
    return folder / "kits"


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("nodes  way       kB up  kB down  of a node and round   CPU s of a round")
    for clients in (4, 20):
        with tempfile.TemporaryDirectory() as scratch:
            made = kits(Path(scratch), clients)
            for name, secure, signed in (
                ("plain", False, False),
                ("unsigned", True, False),
                ("secure", True, True),
            ):
                sets = (f"deploy.secure={secure}".lower(),)
                text = export_experiment(
                    parse_experiment(TOML.format(rounds=ROUNDS, clients=clients), sets)
                )
                home, clock = Path(scratch) / name, Clock()
                sites = [
                    NodeSettings(f"n{n}", "bench", home / f"n{n}", "embedded", client=n)
                    for n in range(clients)
                ]
                if signed:
                    sites = [dataclasses.replace(one, kit=made / one.name) for one in sites]
                transport = InProcess({site.name: Node(site) for site in sites})
                calls = make_messenger(transport, text, home / "hub")
                found = serve(calls, text, "r", home / "hub", watch=clock)
                traffic = found["methods"]["FedAvg"]["seeds"][0]["traffic"]
                up, down = (
                    traffic[way] / traffic["participations"] / 1e3
                    for way in ("bytes_up", "bytes_down")
                )
                print(f"{clients:5}  {name:8} {up:6.1f}  {down:7.1f}  {'':20} {clock.round:6.3f}")


if __name__ == "__main__":
    main()
