"""The studies of adapters: pretrain a base, compare methods on it, clients, newcomers and privacy.

    python scripts/study_adapters.py run DATA --out OUT        # on a GPU; --small: a rehearsal
    python scripts/study_adapters.py write OUT/adapters.json   # into results/ and the pages

DATA holds cross_sector, cross_product and tinyshakespeare_roles (6 MB). After the bases there is
a process for each study: `idiolect compare` of experiments/adapters, which chooses rates on
validation rows; then newcomers get models by every method under every seed. OUT/adapters.json is
written whenever a method is done, so that what is there can be used if time runs out.
"""

import argparse
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from reproduction import fill

from idiolect.analysis.comparison import compare
from idiolect.data import Dataset, load
from idiolect.data.dataset import taken
from idiolect.data.text import dealt
from idiolect.experiment.adapt import adapt
from idiolect.experiment.compare import compare_experiment
from idiolect.experiment.load import load_experiment

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = {"lora": "strange", "whole": "strange"}
STUDIES = {"roles": "base", "reviews": "base", **PRIVATE}
"""The studies, and the base of each."""
FEWEST = 20  # rows of a newcomer
SMALL = {  # what a rehearsal does less of
    "roles": ("rounds=2", "seeds=[0,1]", "data.min_size=2", "data.options.length=16"),
    "reviews": ("rounds=2", "tune.rounds=1", "tune.space.lr=[0.001]", "seeds=[0,1]",
                "training.steps=2", "data.options.length=16", "methods.No training.rounds=1",
                "methods.FedAvg + FT.tune_steps=2"),
    "private": ("rounds=2", "seeds=[0,1]", "training.steps=2", "data.options.length=16"),
}  # fmt: skip
METHODS = {
    "No training": "no training: the base as it is (its head of stars drawn)",
    "FedAvg": "one shared adapter: FedAvg, which is FedIT",
    "Local": "personal from scratch: Local",
    "FedAvg + FT": "shared, then personal: FedAvg + FT",
    "FedSA-LoRA": "A shared, B personal: FedSA-LoRA",
    "pFedLoRA": "a shared and a personal one, mixed: pFedLoRA",
    "Portfolio": "chosen by each client: portfolio",
}
Figures = dict[str, Any]


# What runs on the GPU.


def run(args: argparse.Namespace) -> None:
    """Pretrain, start every study, and gather what they find until they are done."""
    began, out, work = time.monotonic(), args.out.resolve(), args.work.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    data = small_data(args.data_dir, work / "data") if args.small else args.data_dir.resolve()
    small = ["--steps", "3", "--size", "tiny", "--batch", "2", "--length", "16"]
    timed = ["--seconds", args.seconds, "--save-every", args.seconds / 4]
    bases = {"base": [], "strange": ["--text", "reviews", "--size", "tiny"]}
    # The larger base has the GPU for itself; what needs the other can wait.
    after = {"base": "", "roles": "base", "reviews": "base", "strange": "base", **PRIVATE}
    wanted = [name for name in after if name in bases or name in args.only]
    going: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while time.monotonic() - began < args.limit:
            for name in wanted:
                before = after[name]
                ready = not before or (before in going and going[before].poll() is not None)
                if name in going or not ready:
                    continue
                if name not in bases:
                    line = [__file__, "study", name, data, work, *["--small"] * args.small]
                elif (work / name / "pretraining.json").exists():
                    line = ["-c", ""]
                else:
                    script = ROOT / "scripts" / "pretrain_decoder.py"
                    line = [script, data, "--out", work / name, *bases[name]]
                    line += small if args.small else timed
                going[name] = begin(work, name, line)
            gather(work, out / "adapters.json")
            if set(wanted) <= set(going) and all(p.poll() is not None for p in going.values()):
                break
            time.sleep(2)
    finally:
        for name, one in going.items():
            if one.poll() is None:
                one.terminate()
            code = one.wait()
            said = (work / f"{name}.log").read_text()
            print(f"{name}: exit {code}\n{said[-2000 if code else -300 :]}", flush=True)
        gather(work, out / "adapters.json")
    print(f"{time.monotonic() - began:.0f} s in all; {out / 'adapters.json'}", flush=True)


def begin(work: Path, name: str, line: list[Any]) -> "subprocess.Popen[bytes]":
    """Start a process whose words go to a file."""
    with (work / f"{name}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-u", *map(str, line)], stdout=log, stderr=log)


def study(args: argparse.Namespace) -> None:
    """Compare the methods of one study; then give its newcomers their models."""
    name, base, folder = args.study, args.work / STUDIES[args.study], args.work / args.study
    file = "private" if name in PRIVATE else name
    sets = [f"model.weights={base}", f"data.options.tokeniser={base}"]
    sets += ["backend.precision=tf32"] if torch.cuda.is_available() else []
    sets += SMALL[file] if args.small else ()
    experiment = load_experiment(ROOT / "experiments" / "adapters" / f"{file}.toml", sets)
    if name == "whole":
        experiment = experiment.model_copy(update={"adapter": None})
    began = time.monotonic()
    compare_experiment(experiment, folder, data_dir=args.data_dir)
    print(f"{name}: compared after {time.monotonic() - began:.0f} s", flush=True)
    if file == "private":
        return
    labels = [str(table.label) for table in experiment.methods]
    options = dict(experiment.data.options)
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        given = [(folder, name, label, options, args.data_dir, args.small) for label in labels]
        for label, wrong in zip(labels, pool.map(newcomers_of, given), strict=True):
            print(f"newcomers of {label}: {wrong or 'done'}", flush=True)
    print(f"{name}: newcomers after {time.monotonic() - began:.0f} s", flush=True)


def newcomers_of(given: tuple[Path, str, str, dict[str, Any], Path, bool]) -> str:
    """Give newcomers models by one method, seed after seed; return what went wrong, if anything."""
    folder, study, label, options, data_dir, small = given
    try:
        data = newcomers(study, options, data_dir, 2 if small else FEWEST)
        for seed in json.loads((folder / "result.json").read_text())["seeds"]:
            adapt(folder, data, label, seed, split="file", out=folder / "late")
    except Exception:  # the other methods go on
        return traceback.format_exc()
    return ""


def newcomers(study: str, options: Mapping[str, Any], data_dir: Path, fewest: int) -> Dataset:
    """Load the newcomers of a study, read as its clients are."""
    if study == "roles":
        whole = load("shakespeare", data_dir, **{**options, "users": "newcomers"})
        assert whole.clients is not None
        sizes = np.bincount(whole.clients, minlength=len(whole.client_names))
        return taken(whole, np.flatnonzero(sizes[whole.clients] >= fewest))
    everyone = load("cross_product", data_dir, **{**options, "leave_out": []}).client_names
    seen = [name for name in everyone if name not in options["leave_out"]]
    return load("cross_product", data_dir, **{**options, "leave_out": tuple(seen)})


def small_data(data_dir: Path, out: Path) -> Path:
    """Write a few texts of a few clients, in the form of the whole: enough for a rehearsal."""
    for name in ("cross_sector", "cross_product", "tinyshakespeare_roles"):
        (out / name).mkdir(parents=True, exist_ok=True)
        some: set[str] = set()
        for part, most in (("train", 12), ("test", 4)):
            kept: dict[str, list[Any]] = {}
            for row in pyarrow.parquet.read_table(data_dir / name / f"{part}.parquet").to_pylist():
                kept.setdefault(row["client"], []).append(row)
            if not some:
                kinds = {"pretraining": 22, "study": 6, "newcomers": 4}
                own = {kind: [k for k, v in kept.items() if dealt(k) == kind and len(v) > 9]
                       for kind in kinds}  # fmt: skip
                some = {k for kind, many in kinds.items() for k in own[kind][:many]}
                some = some if "roles" in name else set(kept)
            rows = [row for who in sorted(some & set(kept)) for row in kept[who][:most]]
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, out / name / f"{part}.parquet")
    return out


# What is kept of it.


def gather(work: Path, out: Path, seen: dict[Path, float] = {}) -> None:  # noqa: B006
    """Write what is there, if there is more than before: the bases, and each study so far."""
    files = {path: path.stat().st_mtime for path in work.glob("*/*.json")}
    files |= {path: path.stat().st_mtime for path in work.glob("*/late/*.json")}
    if files == seen and out.exists():
        return
    seen.clear()
    seen.update(files)
    found: Figures = {"bases": {}}
    for name in dict.fromkeys(STUDIES.values()):
        path = work / name / "pretraining.json"
        if path in files:
            found["bases"][name] = json.loads(path.read_text())
    for name in STUDIES:
        if work / name / "result.json" in files:
            try:
                content = json.loads((work / name / "result.json").read_text())
                found[name] = summary(content)
                found[name] |= late(work / name, content)
            except Exception:  # what else there is counts more
                print(traceback.format_exc(), flush=True)
    write_json(out, found)


def summary(content: Figures) -> Figures:
    """Keep what tables need: every client's score, the verdict, what was tuned, what it cost."""
    compared = compare(content)
    methods = {}
    for label, own in content["methods"].items():
        model = next(iter(own["headline"]))
        methods[label] = {
            "scores": [
                [round(client[model][compared.metric], 5) for client in seed["clients"]]
                for seed in own["seeds"]
            ],
            "mean": compared.methods[label].mean,
            "chosen": own.get("tuned", {}).get("chosen", [{}])[:1],
            "trials": own.get("tuned", {}).get("trials", []),
            "privacy": own.get("privacy"),
            "numbers_sent": sum(math.prod(form) for form in own["crossing"]["down"].values()),
            "seconds": own["speed"]["seconds"],
        }
    return {
        "metric": compared.metric,
        "clients": compared.clients,
        "seeds": list(compared.seeds),
        "baseline": content.get("baseline", {}).get("headline", {}).get("seeds", {}).get("mean"),
        "verdict": compared.verdict.sentence,
        "federation": content["data"]["federations"][0],
        "device": next(iter(content["methods"].values()))["device"],
        "versions": content["versions"],
        "methods": methods,
    }


def late(folder: Path, content: Figures) -> Figures:
    """Lay out newcomers' scores as a result, and compare methods on them."""
    held: dict[str, dict[int, Any]] = {}
    for path in sorted((folder / "late").glob("*-seed-*.json")):
        told = json.loads(path.read_text())
        held.setdefault(told["label"], {})[told["seed"]] = [
            {"client": one["client"], "train": one["train"], "test": one["test"], **one["models"]}
            for one in told["newcomers"]
        ]
    seeds = content["seeds"]
    whole = {label: own for label, own in held.items() if set(own) == set(seeds)}
    if not whole:
        return {}
    methods = {
        label: {
            **content["methods"][label],
            "headline": {"personal": 0},
            "seeds": [
                {**before, "clients": own[before["seed"]]}
                for before in content["methods"][label]["seeds"]
            ],
        }
        for label, own in whole.items()
    }
    bare = {k: v for k, v in content.items() if k != "baseline"}
    told = summary({**bare, "methods": methods})
    kept = {n: {k: own[k] for k in ("scores", "mean")} for n, own in told["methods"].items()}
    return {"newcomers": {"clients": told["clients"], "verdict": told["verdict"], "methods": kept}}


def write_json(path: Path, content: Figures) -> None:
    """Write a file whole."""
    path.with_suffix(".new").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    path.with_suffix(".new").replace(path)


# The pages.


def write(args: argparse.Namespace) -> None:
    """Keep the figures in results/, and put the tables into the pages."""
    kept = args.into / "results" / "adapters.json"
    found = json.loads(args.figures.read_text())
    known = json.loads(kept.read_text()) if kept.exists() else {}
    write_json(kept, {**known, **found})
    found = json.loads(kept.read_text())
    docs = args.into / "docs"
    fill(docs / "adapters-studies.md", study_tables(found))
    fill(docs / "adapters.md", {"private": private_table(found)})


def study_tables(found: Figures) -> dict[str, list[str]]:
    """Make the tables of the two studies, and say what was chosen and concluded."""
    columns = [(s, part) for s in ("roles", "reviews") for part in ("clients", "newcomers")]
    heads = [_head(found, name, part) for name, part in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * 5 + "|"]
    guesses = [_number(found, s, None) if part == "clients" else "" for s, part in columns]
    lines.append("| guessing (own shares of words, majority class) | " + " | ".join(guesses) + " |")
    for label, words in METHODS.items():
        cells = [_number(found, name, label, part) for name, part in columns]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    words = []
    for name, part in columns:
        own = _part(found, name, part)
        if own:
            words += [f"> {name.capitalize()}, {part}: {own['verdict']}", ""]
    return {"base": _base(found), "studies": lines, "verdicts": words[:-1], "rates": _rates(found)}


def _part(found: Figures, name: str, part: str) -> Figures:
    own: Figures = found.get(name, {})
    return own if part == "clients" else own.get("newcomers", {})


def _head(found: Figures, name: str, part: str) -> str:
    count = _part(found, name, part).get("clients", "?")
    what = {"roles": "roles: perplexity ↓", "reviews": "reviews: accuracy ↑"}[name]
    return f"{what} ({count} clients)" if part == "clients" else f"{count} newcomers"


def _number(found: Figures, name: str, label: str | None, part: str = "clients") -> str:
    """Write a method's mean and its deviation over seeds; the best of its column is bold."""
    own = _part(found, name, part)
    percent = name == "reviews"
    if label is None:
        guess = own.get("baseline")
        return "" if guess is None else f"{100 * guess:.1f} %" if percent else f"{guess:.0f}"
    scores = own.get("methods", {}).get(label)
    if scores is None:
        return "not measured"
    means = [(100 if percent else 1) * mean(row) for row in scores["scores"]]
    spread = f" ± {stdev(means):.1f}" if len(means) > 1 and stdev(means) > 0.005 else ""
    text = f"{mean(means):.1f}{spread}{' %' if percent else ''}"
    every = [one["mean"] for one in own["methods"].values()]
    best = max(every) if percent else min(every)
    return f"**{text}**" if scores["mean"] == best else text


def _base(found: Figures) -> list[str]:
    own = found["bases"]["base"]
    device = found.get("roles", {}).get("device", "")
    lost = ", ".join(f"{value:.2f} of {kind}" for kind, value in own["held_back_loss"].items())
    return [
        f"The base: {own['parameters']:,} parameters, {own['vocabulary']:,} tokens, "
        f"{own['seconds']:.0f} s of pretraining ({device}), {own['tokens_read'] / 1e6:.0f} million "
        f"tokens read; held-back loss in nats a token: {lost}. ± is the deviation over seeds."
    ]


def _rates(found: Figures) -> list[str]:
    """Say what validation rows chose."""
    words = []
    for name in ("roles", "reviews"):
        for label, own in found.get(name, {}).get("methods", {}).items():
            settings = own["chosen"][0].get("settings") if own["chosen"] else None
            if settings:
                said = " and ".join(f"{key} {value:g}" for key, value in settings.items())
                words.append((name, f"{label} {said}"))
    return [
        f"Chosen on validation rows, {name}: " + "; ".join(t for n, t in words if n == name) + "."
        for name in ("roles", "reviews")
    ]


def private_table(found: Figures) -> list[str]:
    """Lay adapters beside the whole network; of the clips each takes its best by validation."""
    head = ("perplexity ↓", "numbers sent", "no training", "no noise", "ε = 8", "clip and rate")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, words in (("lora", "LoRA"), ("whole", "the whole network")):
        methods = found.get(name, {}).get("methods", {})
        hidden = {label: own for label, own in methods.items() if own["privacy"]}
        if not hidden:
            lines.append(f"| {words} |" + " not measured |" * (len(head) - 1))
            continue
        label = min(hidden, key=lambda one: validation(hidden[one]))
        rate = hidden[label]["chosen"][0]["settings"]["lr"]
        cells = [f"{hidden[label]['numbers_sent']:,}"]
        cells += [_private(methods.get(one)) for one in ("No training", "no noise", label)]
        lines.append(f"| {words} | " + " | ".join(cells) + f" | {label.split()[-1]}, {rate:g} |")
    return lines


def validation(method: Figures) -> float:
    """Return the best mean over seeds of a method's trials, on validation rows."""
    trials = [[row["score"] for row in one["validation"]] for one in method["trials"]]
    return min(mean(scores) for scores in trials if None not in scores)


def _private(own: Figures | None) -> str:
    if own is None:
        return "not measured"
    means = [mean(row) for row in own["scores"]]
    spread = f" ± {stdev(means):.1f}" if len(means) > 1 and stdev(means) > 0.005 else ""
    return f"{mean(means):.1f}{spread}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("run")
    one.add_argument("data_dir", type=Path)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--work", type=Path, default=Path("/tmp/adapters"))
    one.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES))
    one.add_argument("--seconds", type=float, default=30.0, help="of pretraining")
    one.add_argument("--limit", type=float, default=540.0, help="seconds after which it ends")
    one.add_argument("--small", action="store_true", help="a rehearsal, in minutes on a CPU")
    one.set_defaults(do=run)
    one = verbs.add_parser("study")
    one.add_argument("study", choices=STUDIES)
    one.add_argument("data_dir", type=Path)
    one.add_argument("work", type=Path)
    one.add_argument("--small", action="store_true")
    one.set_defaults(do=study)
    one = verbs.add_parser("write")
    one.add_argument("figures", type=Path)
    one.add_argument("--into", type=Path, default=ROOT)
    one.set_defaults(do=write)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
