"""The studies of adapters: pretrain a base, compare methods on it, clients, newcomers and privacy.

    python scripts/study_adapters.py run DATA --out OUT        # on a GPU; --small: a rehearsal
    python scripts/study_adapters.py write OUT/adapters.json   # into results/ and the pages

DATA holds cross_sector, cross_product and tinyshakespeare_roles (6 MB). Bases are pretrained for a
fixed number of steps. The methods of a study are dealt out to processes, which are made ready
meanwhile: one after the other chooses its rates on validation rows, is trained under all seeds at
once, and gives newcomers their models. OUT/adapters.json is written whenever a method is done, and
again when its newcomers are, so that what is there can be used if time runs out (--limit, SIGINT,
SIGTERM). While one process traces its steps on the host, the GPU works for the other two.
`write` also prints what the page's own words are to be checked by.

`--known FILE`, an adapters.json of before: methods there are trained with the rates that validation
rows chose then, without trials, and private runs that are there are not repeated.
"""

import argparse
import gc
import math
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from adapter_pages import Figures, read_json, write, write_json

from idiolect.analysis.comparison import compare
from idiolect.core import checkpoint, tree
from idiolect.data import Dataset, federate, load
from idiolect.data.dataset import taken
from idiolect.data.text import dealt
from idiolect.engine import block_runner
from idiolect.engine.outcome import BASELINE, Silent
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.experiment.build import build_backend
from idiolect.experiment.compare import SplitComparison, compare_experiment
from idiolect.experiment.components import build_architectures, build_method
from idiolect.experiment.job import Evaluate
from idiolect.experiment.load import load_experiment
from idiolect.experiment.run_state import checkpoint_path, seed_leaves
from idiolect.experiment.schema import Experiment, Tune
from idiolect.experiment.seed_parts import part_with_seed
from idiolect.experiment.stored_models import choose_method, read_experiment
from idiolect.experiment.tune import with_settings
from idiolect.experiment.untrusted import CLOSED
from idiolect.results import run_files
from idiolect.results.run_files import folder_name

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = {"lora": "strange", "whole": "strange"}
STUDIES = {"roles": "base", "reviews": "base", **PRIVATE}
"""The studies, and the base of each."""
PROCESSES = {  # what runs side by side, each in the order of what was never measured
    "roles": (
        ("pFedLoRA", "FedSA-LoRA", "No training"),
        ("Portfolio", "FedAvg"),
        ("Local", "FedAvg + FT"),
    ),
    "reviews": (
        ("Portfolio", "FedAvg + FT", "Local", "No training"),
        ("FedAvg", "FedSA-LoRA", "pFedLoRA"),
    ),
}
BORROWED = {"Portfolio": "FedAvg + FT"}  # whose rates it takes where they are known
# After the two rounds of a trial it was no better than guessing under any rate: nothing was chosen.
WHOLE_TRIALS = (("reviews", "FedAvg"),)
BASES: dict[str, list[Any]] = {
    "base": ["--steps", 1260],
    "strange": ["--steps", 1543, "--text", "reviews", "--size", "tiny"],
}
# Of eight rounds the host traces the first two, block by block, and the others are replayed: with
# more blocks there is less padding and more to trace.
BLOCKS = 3
FEWEST = 20  # rows of a newcomer
PRECISION = "tf32"  # of the studies on a GPU
SMALL = {  # what a rehearsal does less of
    "roles": ("rounds=2", "tune.space.lr=[0.001]", "seeds=[0,1]", "data.min_size=2",
              "data.options.length=16", "methods.Local.newcomer_epochs=1",
              "methods.FedSA-LoRA.newcomer_epochs=1", "methods.pFedLoRA.newcomer_epochs=1",
              "methods.Portfolio.newcomer_epochs=1"),
    "reviews": ("rounds=2", "tune.rounds=1", "tune.space.lr=[0.001]", "seeds=[0,1]",
                "training.steps=2", "data.options.length=16", "methods.No training.rounds=1",
                "methods.FedAvg + FT.tune_steps=2"),
    "private": ("rounds=2", "seeds=[0,1]", "training.steps=2", "data.options.length=16"),
}  # fmt: skip


# What runs on the GPU.


def run(args: argparse.Namespace) -> None:
    """Pretrain, start every study, and gather what they find until they are done."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` leaves what is there
    began, out, work = time.monotonic(), args.out.resolve(), args.work.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    known = read_json(args.known)
    wanted = [name for name in args.only if name not in PRIVATE or name not in known]
    data = small_data(args.data_dir, work / "data") if args.small else args.data_dir.resolve()
    small = ["--steps", 3, "--size", "tiny", "--batch", 2, "--length", 16]
    lines: dict[str, list[Any]] = {}
    for base in dict.fromkeys(STUDIES[name] for name in wanted):
        if not (work / base / "pretraining.json").exists():
            script = ROOT / "scripts" / "pretrain_decoder.py"
            whole = ["--save-every", 1e9, *(small if args.small else [])]
            whole += ["--eager"] * args.eager
            lines[base] = [script, data, "--out", work / base, *BASES[base], *whole]
    more = ["--small"] * args.small + (["--known", args.known.resolve()] if args.known else [])
    for name in wanted:
        for number, labels in enumerate(PROCESSES.get(name, ((),))):
            if labels and all(late_file(work / name, label).exists() for label in labels):
                continue
            line = [__file__, "study", name, data, work, *more, "--methods", *labels]
            lines[f"{name}-{number}"] = line
    going: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, line in lines.items():
            going[name] = begin(work, name, line)
        while time.monotonic() - began < args.limit:
            gather(work, out / "adapters.json", known)
            codes = {name: one.poll() for name, one in going.items()}
            if None not in codes.values() or any(codes.get(base) for base in BASES):
                break
            time.sleep(1)
    finally:
        for name, one in going.items():
            if one.poll() is None:
                one.terminate()
            code = one.wait()
            said = (work / f"{name}.log").read_text()
            print(f"{name}: exit {code}\n{said[-2000 if code else -700 :]}", flush=True)
        gather(work, out / "adapters.json", known)
    print(f"{time.monotonic() - began:.0f} s in all; {out / 'adapters.json'}", flush=True)


def begin(work: Path, name: str, line: list[Any]) -> "subprocess.Popen[bytes]":
    """Start a process whose words go to a file."""
    with (work / f"{name}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-u", *map(str, line)], stdout=log, stderr=log)


def late_file(study: Path, label: str) -> Path:
    """Return the file of a method's newcomers, which is the last that it writes."""
    return study / "late" / f"{folder_name(label)}.json"


def study(args: argparse.Namespace) -> None:
    """Train some methods of a study, each with its newcomers; or compare a private study's."""
    name, base = args.study, args.work / STUDIES[args.study]
    if torch.cuda.is_available():
        torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # a context, handles
    while not (base / "pretraining.json").exists():  # written last
        time.sleep(0.1)
    file = "private" if name in PRIVATE else name
    sets = [f"model.weights={base}", f"data.options.tokeniser={base}"]
    sets += [f"backend.precision={PRECISION}", "backend.kernels=first"] * torch.cuda.is_available()
    sets += SMALL[file] if args.small else ()
    # Of validation rows only what is measured after the last round is used: no curve, but of one.
    sets += [] if file == "private" else ["evaluate.clients=1"]
    experiment = load_experiment(ROOT / "experiments" / "adapters" / f"{file}.toml", sets)
    began = time.monotonic()
    if file == "private":
        if name == "whole":
            experiment = experiment.model_copy(update={"adapter": None})
        compare_experiment(experiment, args.work / name, data_dir=args.data_dir)
        print(f"{name}: compared after {time.monotonic() - began:.0f} s", flush=True)
        return
    block_runner.MOST_BLOCKS = BLOCKS
    known, datasets = read_json(args.known), dict[str, Dataset]()
    strangers = None
    for label in args.methods:
        folder, done = args.work / name / folder_name(label), late_file(args.work / name, label)
        if done.exists():
            continue
        own, tune = of_method(experiment, label, chosen_before(known, name, label))
        if tune and (name, label) in WHOLE_TRIALS:
            tune = tune.model_copy(update={"rounds": None})
        SplitComparison(own, tune, folder, args.data_dir, datasets).run(Silent())
        print(f"{label}: after {time.monotonic() - began:.0f} s", flush=True)
        if strangers is None:
            fewest = 2 if args.small else FEWEST
            strangers = newcomers(name, experiment.data.options, args.data_dir, fewest)
        found = newcomers_of(folder, label, strangers)
        done.parent.mkdir(exist_ok=True)
        write_json(done, found)
        gc.collect()  # other processes need the memory too
        torch.cuda.empty_cache()
        print(f"its newcomers: after {time.monotonic() - began:.0f} s", flush=True)


def chosen_before(known: Figures, study: str, label: str) -> dict[str, Any]:
    """Return the settings that validation rows chose in an earlier run; none where it had none."""
    if (study, label) in WHOLE_TRIALS:
        return {}
    methods = known.get(study, {}).get("methods", {})
    own = methods.get(label) or methods.get(BORROWED.get(label, label)) or {}
    held: dict[str, Any] = own["chosen"][0].get("settings", {}) if own.get("chosen") else {}
    return held


def of_method(
    experiment: Experiment, label: str, settings: Mapping[str, Any]
) -> tuple[Experiment, Tune | None]:
    """Make the experiment of one method, and its search; given settings are not searched."""
    (table,) = [one for one in experiment.methods if one.label_or_name == label]
    alone = {"methods": (with_settings(table, settings),), "tune": None}
    return experiment.model_copy(update=alone), None if settings else experiment.tune


def newcomers_of(folder: Path, label: str, data: Dataset) -> Figures:
    """Give newcomers models by one method under all its seeds at once; return their scores."""
    part = part_with_seed(folder, label, None)
    assert part is not None
    experiment = read_experiment(part, False, None)
    method = build_method(choose_method(experiment, label))
    path = checkpoint_path(part, label)
    named, meta = checkpoint.read(path)
    seeds = meta["identity"]["seeds"]
    own = [run_files.read_scaling(part, seed).matched(data) for seed in seeds]
    divided = [
        federate(rows, "natural", seed, "file", drop=True)
        for rows, seed in zip(own, seeds, strict=True)
    ]
    networks = build_architectures(experiment, divided, CLOSED)
    backend = build_backend(experiment)
    runs = [SeededRun(seed, one.train_data) for seed, one in zip(seeds, divided, strict=True)]
    simulation = Simulation(method, runs, networks, backend=backend, newcomers=True)
    start = "state.server."
    last = {n.removeprefix(start): leaf for n, leaf in named.items() if n.startswith(start)}
    states = checkpoint.fitted(tuple(simulation.states), last, path)
    simulation.states = list(tree.to(states, backend.place))
    simulation.round = meta["round"]
    told = [seed_leaves(named, f"told.{place}.") for place in range(len(seeds))]
    if any(told):
        simulation.exchange_sums = [tree.to(sums, backend.place) for sums in told]
    choice = Evaluate(**experiment.evaluate.of_job()).choice(data.task.kind)
    how: dict[str, Any] = {"choice": choice, "detail": True, "grouped": True}
    verdicts = simulation.evaluate([one.test_data for one in divided], newcomers=True, **how)
    return {
        "label": label,
        "seeds": {
            str(seed): [
                {
                    "client": name,
                    "train": len(one.train[place]),
                    "test": len(one.test[place]),
                    **{
                        model: {metric: number(values[place]) for metric, values in scores.items()}
                        for model, scores in verdict.scores.items()
                    },
                }
                for place, name in enumerate(one.names)
            ]
            for seed, one, verdict in zip(seeds, divided, verdicts, strict=True)
        },
    }


def number(value: Any) -> float | str:
    """Return a score for a file; those of groups of rows in a line, as a result has them."""
    return float(value) if np.ndim(value) == 0 else " ".join(f"{one:.9g}" for one in value)


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


def gather(work: Path, out: Path, known: Figures, seen: dict[Path, float] = {}) -> None:  # noqa: B006
    """Write what is there, if there is more than before: each study so far."""
    found = [*work.glob("*/*.json"), *work.glob("*/*/result.json"), *work.glob("*/late/*.json")]
    files = {path: path.stat().st_mtime for path in found}
    if files == seen and out.exists():
        return
    seen.clear()
    seen.update(files)
    figures: Figures = {}
    for name in STUDIES:
        held = [read_json(path) for path in sorted((work / name).glob("**/result.json"))]
        if held:
            methods = {label: own for one in held for label, own in one["methods"].items()}
            try:
                content = {**held[0], "methods": methods}
                base = read_json(work / STUDIES[name] / "pretraining.json")
                figures[name] = {"base": base, **summary(content)}
                figures[name] |= late(work / name, content)
            except Exception:  # what else there is counts more
                print(traceback.format_exc(), flush=True)
            for label, own in figures.get(name, {}).get("methods", {}).items():
                if not own["trials"] and (settings := chosen_before(known, name, label)):
                    before = known[name]["methods"].get(label, {})
                    own["chosen"] = [{"settings": settings}]
                    own["trials"] = before.get("trials", [])
    write_json(out, figures)
    # All of it, should a summary lack something: unpacked, it is a folder to gather from again.
    whole = out.with_name("adapters-runs.tar.gz")
    with tarfile.open(whole.with_suffix(".new"), "w:gz", compresslevel=1) as packed:
        for path in found:
            packed.add(path, path.relative_to(work))
    whole.with_suffix(".new").replace(whole)


def summary(content: Figures) -> Figures:
    """Keep what tables need: every client's score, the verdict, what was tuned, what it cost."""
    compared = compare(content)
    device = next(iter(content["methods"].values()))["device"]
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
            "weights": mixtures(own),
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
        "device": device,
        "bases": sorted({own["model"].get("digest", "") for own in content["methods"].values()}),
        "precision": "fp32" if device == "cpu" else PRECISION,
        "versions": content["versions"],
        "methods": methods,
    }


def mixtures(own: Figures) -> list[float]:
    """Return the mean weight of each candidate of a portfolio over clients and seeds."""
    rows = [row.get("facts", {}).get("weights") for seed in own["seeds"] for row in seed["clients"]]
    return [round(mean(one), 3) for one in zip(*rows, strict=True)] if None not in rows else []


def late(folder: Path, content: Figures) -> Figures:
    """Lay out newcomers' scores as a result, and compare methods on them."""
    held: dict[str, dict[int, Any]] = {}
    for path in sorted((folder / "late").glob("*.json")):
        told = read_json(path)
        held[told["label"]] = {int(seed): own for seed, own in told["seeds"].items()}
    whole = {label: held[label] for label in content["methods"] if label in held}
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
    some = next(iter(whole.values()))
    guess = [row[BASELINE][told["metric"]] for rows in some.values() for row in rows]
    own = {"clients": told["clients"], "verdict": told["verdict"], "baseline": mean(guess)}
    return {"newcomers": {**own, "methods": kept}}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("run")
    one.add_argument("data_dir", type=Path)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--work", type=Path, default=Path("/tmp/adapters"))
    one.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES))
    one.add_argument("--known", type=Path, help="figures of before, whose rates are taken")
    one.add_argument("--limit", type=float, default=540.0, help="seconds after which it ends")
    one.add_argument("--small", action="store_true", help="a rehearsal, in minutes on a CPU")
    one.add_argument("--eager", action="store_true", help="pretrain without a graph")
    one.set_defaults(do=run)
    one = verbs.add_parser("study")
    one.add_argument("study", choices=STUDIES)
    one.add_argument("data_dir", type=Path)
    one.add_argument("work", type=Path)
    one.add_argument("--methods", nargs="*", default=[])
    one.add_argument("--known", type=Path)
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
