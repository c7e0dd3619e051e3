"""Give the newcomers of a study of adapters their models, and write what they score.

    python scripts/study_adapters.py RUN roles|reviews DATA --out newcomers.json

RUN is the folder of experiments/adapters/roles.toml or reviews.toml. Newcomers are the roles that
`data.text.dealt` keeps for them, or the products that the experiment leaves out. Seed
after seed, and written after each model, so that what is there can be used if it is cut short.
"""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data import Dataset, load
from idiolect.data.dataset import taken
from idiolect.experiment.adapt import adapt

FEWEST = 20  # rows of a newcomer


def newcomers(study: str, options: dict[str, Any], data_dir: Path) -> Dataset:
    """Load the newcomers of a study, read as its clients are."""
    if study == "roles":
        whole = load("shakespeare", data_dir, **{**options, "users": "newcomers"})
        assert whole.clients is not None
        sizes = np.bincount(whole.clients, minlength=len(whole.client_names))
        return taken(whole, np.flatnonzero(sizes[whole.clients] >= FEWEST))
    everyone = load("cross_product", data_dir, **{**options, "leave_out": []}).client_names
    seen = [name for name in everyone if name not in options["leave_out"]]
    return load("cross_product", data_dir, **{**options, "leave_out": tuple(seen)})


def score_newcomers(run: Path, study: str, data_dir: Path, out: Path) -> None:
    """Give newcomers their models by every finished method, and write what they score."""
    experiment = tomllib.loads((run / "experiment.toml").read_text())
    data = newcomers(study, experiment["data"]["options"], data_dir)
    metric = "perplexity" if study == "roles" else "accuracy"
    done = json.loads((run / "result.json").read_text())["methods"]
    found: dict[str, Any] = {}
    for seed in experiment["seeds"]:
        for label in done:
            told = adapt(run, data, label, seed, split="file", out=run / "late")
            found.setdefault(label, {})[seed] = {
                one["client"]: one["models"]["personal"][metric] for one in told["newcomers"]
            }
            print(f"{label}, seed {seed}: {np.mean(list(found[label][seed].values())):.4g}")
            out.write_text(json.dumps({"metric": metric, "scores": found}, indent=1))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("study", choices=("roles", "reviews"))
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    score_newcomers(args.run, args.study, args.data_dir, args.out)


if __name__ == "__main__":
    main()
