"""A comparison that trains in a second or two, and a count of what it trains."""

import json

from idiolect.engine.outcome import Silent
from idiolect.experiment.compare import compare_experiment
from idiolect.experiment.load import parse_experiment

TOML = """
name = "small"
seeds = [0, 1]
rounds = 4

[data]
partition = { name = "iid", clients = 6, per_client = 30 }

[model]
name = "mlr"

[training]
batch = 10
lr = 0.05

[backend]
device = "cpu"
width = 4
checkpoint_every = 1

[[methods]]
name = "local"

[[methods]]
name = "fedavg"

[[methods]]
name = "fedavg-ft"
tune_epochs = 2
"""

TUNE = """
[tune]
rounds = 2

[tune.space]
lr = [0.01, 0.1]

[tune.methods."FedAvg + FT"]
tune_epochs = [1, 3]
"""


class Told(Silent):
    """Counts the rounds that were done, and stops before a label if asked."""

    def __init__(self, stop=""):
        self.stop, self.rounds, self.notes = stop, {}, []

    def begin(self, label, round, rounds):
        if self.stop and label.startswith(self.stop):
            raise SystemExit("killed")  # nothing is saved on the way out
        self.rounds.setdefault(label, 0)

    def tick(self, tick):
        self.rounds[tick.label] += 1

    def note(self, text):
        self.notes.append(text)


def compared(folder, *overrides, text=TOML, stop=""):
    """Compare; return the comparison, the results by split, and the rounds that were done."""
    watch = Told(stop)
    content, _ = compare_experiment(parse_experiment(text, overrides), folder, watch=watch)
    results = {one["name"]: findings(folder / one["folder"]) for one in content["splits"]}
    return content, results, watch.rounds


def findings(folder):
    """Read a result without the time it took."""
    content = json.loads((folder / "result.json").read_text())
    for method in content["methods"].values():
        del method["speed"]
    return content


def accuracies(result, label, model="personal"):
    """Give a method's test accuracies by seed."""
    return {
        seed["seed"]: [client[model]["accuracy"] for client in seed["clients"]]
        for seed in result["methods"][label]["seeds"]
    }


def untimed(comparison):
    """Leave out of a comparison what depends on the clock."""
    for split in comparison["splits"]:
        for costs in ("reach", "costs"):
            for own in split["comparison"][costs].values():
                own.pop("seconds", None)
    return comparison
