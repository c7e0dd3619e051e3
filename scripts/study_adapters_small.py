"""The two studies of adapters in small: a few clients, the embedded base, two cores.

    python scripts/study_adapters_small.py DATA roles|reviews --out small/roles

Texts are the first of each client: 40 and 12 (training, test) of the eight largest roles of the
study and the four largest of its newcomers, or 120 and 60 of each product. They are written as JSON
lines; the experiment is that of experiments/adapters with fewer rounds and shorter rows.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet

from idiolect.data import read
from idiolect.data.text import dealt
from idiolect.experiment.adapt import adapt
from idiolect.experiment.load import load_experiment
from idiolect.experiment.run import run_experiment

HERE = Path(__file__).resolve().parents[1] / "experiments" / "adapters"
SETS = {
    "roles": ("training.epochs=1", "data.min_size=1", "backend.width=8"),
    "reviews": ("training.steps=10", "backend.width=4"),
}
LENGTH = {"roles": 32, "reviews": 48}
COUNTS = {"roles": {"train": 40, "test": 12}, "reviews": {"train": 120, "test": 60}}
TRAINED = ("alexa", "amazon", "food", "headphones")
LAST = "Portfolio"  # after the newcomers, for it takes longest


def texts(study: str, data_dir: Path) -> dict[str, dict[str, list[dict[str, str]]]]:
    """Read every client's texts, by part."""
    name = {"roles": "tinyshakespeare_roles", "reviews": "cross_product"}[study]
    held: dict[str, dict[str, list[dict[str, str]]]] = {}
    for part in ("train", "test"):
        for row in pyarrow.parquet.read_table(data_dir / name / f"{part}.parquet").to_pylist():
            line = {"client": row["client"], "text": row["text"], "split": part}
            line |= {"label": str(row["label"])} if study == "reviews" else {}
            held.setdefault(row["client"], {"train": [], "test": []})[part].append(line)
    return held


def chosen(study: str, held: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return who is trained on, and the newcomers."""
    if study == "reviews":
        return list(TRAINED), [name for name in held if name not in TRAINED]

    def largest(kind: str, count: int) -> list[str]:
        own = [name for name in held if dealt(name) == kind]
        size = {n: sum(len(t["text"]) for p in held[n].values() for t in p) for n in own}
        return sorted(own, key=lambda name: size[name], reverse=True)[:count]

    return largest("study", 8), largest("newcomers", 4)


def main() -> None:
    """Read the command line, train, and give newcomers their models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("study", choices=sorted(SETS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    study, out = args.study, args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    held = texts(study, args.data_dir)
    for file, names in zip(("in", "new"), chosen(study, held), strict=True):
        parts = [held[n][part][:few] for n in names for part, few in COUNTS[study].items()]
        lines = [json.dumps(line) for part in parts for line in part]
        (out / f"{file}.jsonl").write_text("\n".join(lines))
    toml = (HERE / f"{study}.toml").read_text()
    toml = re.sub(r'source = ".*"', 'source = "in.jsonl"', toml)
    options = f'options = {{ length = {LENGTH[study]}, tokeniser = "embedded" }}'
    toml = re.sub(r"options = \{.*\}", options, toml)
    toml = toml.replace("tune_steps = 100", "tune_steps = 15")
    toml = toml.replace("newcomer_epochs = 5", "newcomer_epochs = 2")
    (out / "small.toml").write_text(toml)
    sets = ("rounds=4", "training.batch=8", "evaluate.every=4", *SETS[study])
    experiment = load_experiment(out / "small.toml", sets)
    labels = [str(method.label) for method in experiment.methods]
    some = [label for label in labels if label != LAST]
    run_experiment(experiment, out / "run", resume=(out / "run").exists(), only=some)
    data = read(out / "new.jsonl", tokeniser="embedded", length=LENGTH[study])
    metric = "perplexity" if study == "roles" else "accuracy"
    found: dict[str, Any] = {}
    for seed in experiment.seeds:
        for label in some:
            told = adapt(out / "run", data, label, seed, split="file", out=out / "late")
            scores = {o["client"]: o["models"]["personal"][metric] for o in told["newcomers"]}
            found.setdefault(label, {})[seed] = scores
            (out / "newcomers.json").write_text(json.dumps(found, indent=1))
    run_experiment(experiment, out / "run", resume=True)


if __name__ == "__main__":
    main()
