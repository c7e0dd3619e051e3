"""What compression saves and costs: bytes and accuracy of a federation of messages, in one run.

Usage: python benchmarks/compression.py. Ten nodes in this process, the embedded digits, three
seeds, FedAvg and FedPer; bytes are those of the messages as sent.
"""

import tempfile
from pathlib import Path

from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.serve_experiment import make_messenger, serve
from idiolect.deploy.site import NodeSettings
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.portable import export_experiment

TOML = """
name = "compression"
seeds = [0, 1, 2]
rounds = 20
[data]
partition = { name = "dirichlet", clients = 10, alpha = 0.5 }
[model]
name = "dnn"
hidden = 32
[training]
batch = 10
lr = 0.05
[evaluate]
every = 20
[backend]
kind = "sequential"
[[methods]]
name = "fedavg"
[[methods]]
name = "fedper"
"""
WAYS = {
    "none": (),
    "fp16": ("deploy.compress=fp16",),
    "topk 0.1": ("deploy.compress=topk", "deploy.keep=0.1"),
    "topk 0.01": ("deploy.compress=topk", "deploy.keep=0.01"),
    "secure": ("deploy.secure=true",),
}


def main() -> None:
    """Print a table."""
    print("compress    method   MB up  MB down  personal accuracy %")
    for name, sets in WAYS.items():
        experiment = parse_experiment(TOML, sets)
        with tempfile.TemporaryDirectory() as scratch:
            home = Path(scratch)
            sites = [
                NodeSettings(f"n{n}", "bench", home / f"n{n}", "embedded", client=n)
                for n in range(10)
            ]
            transport = InProcess({site.name: Node(site) for site in sites})
            text = export_experiment(experiment)
            found = serve(make_messenger(transport, text, home / "hub"), text, "r", home / "hub")
        for label, method in found["methods"].items():
            seeds = method["seeds"]
            up, down = (
                sum(seed["traffic"][way] for seed in seeds) / len(seeds) / 1e6
                for way in ("bytes_up", "bytes_down")
            )
            scores = [100 * seed["models"]["personal"]["mean"] for seed in seeds]
            told = ", ".join(f"{score:.1f}" for score in scores)
            print(f"{name:11} {label:8} {up:5.2f}  {down:7.2f}  {told}", flush=True)


if __name__ == "__main__":
    main()
