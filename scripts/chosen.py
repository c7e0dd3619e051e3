"""Print the rates that a choosing run prefers, as options of `idiolect run`.

python scripts/chosen.py RUN_DIR...   # of one of experiments/combinations/choose-*.toml
python scripts/chosen.py --setting inner_lr,home RUN_DIR...   # by the personal models

Each by the mean over clients of validation accuracy: lr by the federated model, then tune_lr by the
fine-tuned one that began at that lr, expert_lr by the local model. Runs that did not end (a rate
may diverge) are left out; without any it prints nothing, and the experiment's own values hold.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any


def options(methods: list[dict[str, Any]]) -> list[str]:
    """Return what to set."""
    best = max(methods, key=lambda one: _score(one, "global"))
    lr = best["settings"]["lr"]
    alike = [one for one in methods if one["settings"]["lr"] == lr]
    tuned = max(alike, key=lambda one: _score(one, "FT"))["settings"]["combined"]["tune_lr"]
    alone = max(methods, key=lambda one: _score(one, "local"))
    found = {
        "lr": lr,
        "tune_lr": tuned,
        "expert_lr": alone["settings"]["combined"]["expert_lr"],
    }
    return [f"--set training.{name}={value}" for name, value in found.items()]


def named(methods: list[dict[str, Any]], settings: str) -> list[str]:
    """Return the named settings of the best."""
    best = max(methods, key=lambda one: _score(one, "personal"))["settings"]
    return [f"--set training.{setting}={best[setting]}" for setting in settings.split(",")]


def _score(method: dict[str, Any], model: str) -> float:
    """Average a model's validation accuracy over clients and seeds; a run that diverged is last."""
    seen = [client[model]["val_accuracy"] for s in method["seeds"] for client in s["clients"]]
    known = [value for value in seen if value is not None]
    return mean(known) if known else -1.0


if __name__ == "__main__":
    folders = sys.argv[1:]
    settings = folders.pop(1) if folders[0] == "--setting" else ""
    paths = [Path(folder) / "result.json" for folder in folders[bool(settings) :]]
    ended = [json.loads(path.read_text())["methods"] for path in paths if path.exists()]
    found = [method for methods in ended for method in methods.values()]
    if found:
        print(*(named(found, settings) if settings else options(found)))
