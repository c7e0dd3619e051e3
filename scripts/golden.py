"""A golden record: small runs of everything, and their digests, to be equal bit for bit later.

    python scripts/golden.py make DIR [--only NAME ...]   # the runs, each in a folder of DIR
    python scripts/golden.py digest DIR > FILE.json
    python scripts/golden.py compare A.json B.json        # status 1 if scores or tensors differ

Only the command line, keys of experiment files and files of run folders are used, so the record
outlives a rewrite of the package. Bits depend on the machine and on torch: `compare` says where
these differ. `tests/golden/digests.json` is the record of the commit that it was made at.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

# ---------------------------------------------------------------------------- experiments

PUBLIC = ["ktpfl", "fedmd", "sim-pfl", "topk-pfl", "feddf", "pfeddf"]
CENTRAL = ["local", "centralised", "fedavg", "fedprox", "fedavg-ft", "persfl", "fedper", "fedrep"]
OTHERS = ["pfedme", "per-fedavg", "pfml", "fml", "ktpfl-weights", "fedamp", "heurfedamp", "fedfomo"]
METHODS = [*CENTRAL, *OTHERS, "pfedhn", "ditto", "apfl", "portfolio", *PUBLIC]  # fedbn: batchnorm
SMALL = {  # settings that keep a method's run short
    "fedavg-ft": "tune_epochs = 2",
    "pfeddf": "tune_epochs = 2",
    "persfl": "distil_epochs = 2",
    "portfolio": "tune_epochs = 2",
    **{name: "sample = 30" for name in PUBLIC[:4]},
    "feddf": "sample = 30",
}
SMALL["pfeddf"] += "\nsample = 30"


def methods(*names: str, more: str = "") -> str:
    """Write the tables of methods."""
    tables = (f'[[methods]]\nname = "{name}"\n{SMALL.get(name, "")}\n{more}\n' for name in names)
    return "\n".join(tables)


def experiment(
    data: str, model: str, tail: str, *, seeds: str = "[0, 1]", rounds: int = 3, head: str = ""
) -> str:
    """Write an experiment; `tail` has further tables and the methods."""
    return f"""name = "golden"
seeds = {seeds}
rounds = {rounds}
{head}

[data]
{data}

[model]
{model}

[training]
batch = 16
lr = 0.05

{tail}
"""


def backend(more: str = "") -> str:
    """Write the backend's table; a fixed width, for a measured one depends on the moment."""
    return f'[backend]\ndevice = "cpu"\nwidth = 4\n{more}\n'


PLAIN = backend()
CURVES = "[evaluate]\nevery = 1\ntest_curve = true\n"
IID = 'source = "embedded"\npartition = { name = "iid", clients = 6, per_client = 60 }'
RAGGED = (
    'source = "embedded"\npool = "all"\nmin_size = 10\n'
    'partition = { name = "dirichlet", clients = 12, alpha = 0.5 }'
)
WITH_PUBLIC = '\npublic = { source = "embedded", size = 60 }'
SYNTHETIC = (
    'source = "synthetic"\nnormalise = "feature"\n'
    "options = { alpha = 1.0, beta = 1.0, clients = 12, max_size = 60 }"
)
TABLE = 'source = "table.npz"\nnormalise = "feature"'
TABLE_PUBLIC = '\npublic = { source = "table.npz", size = 40 }'
DNN = 'name = "dnn"\nhidden = 12'
PAIR = DNN + '\nauxiliary = { name = "dnn", hidden = 8 }'
TWO = 'architectures = ["mlr", { name = "dnn", hidden = 10 }]'
TEXT = (
    'source = "generated_text"\nsplit = [0.4, 0.3, 0.3]\nordered = true\n'
    "options = { users = 10, words = 40, length = 6, rows = 10 }"
)
LSTM = 'name = "next-word-lstm"\nunits = 8\nlayers = 2\ndropout = 0.2'
KIM = 'name = "kim-cnn"\nembedding = 8\nfilters = 6\nwindows = [2, 3]\ndropout = 0.3'
RESNET = 'name = "resnet18"\nnorm = "batch"\nwidth = 2'
PARTS = 'tune_epochs = 2\nexpert_epochs = 2\npersonalise = [["ft"], ["ft", "kd"], ["ft", "moe"], '
PARTS += '["fb"], ["fb", "kd", "moe"], ["fb", "ewc"], ["ft", "ewc", "moe"]]'
RULES = {
    "median": 'name = "median"',
    "trimmed": 'name = "trimmed-mean", trim = 0.2',
    "geometric": 'name = "geometric-median"',
    "krum": 'name = "krum", attackers = 1',
    "multi-krum": 'name = "multi-krum", attackers = 1',
    "bound": 'name = "norm-bound"',
    "mean": 'name = "mean"',
}


def ruled(name: str, rule: str) -> str:
    """Write a method's table with a rule of its own."""
    table = RULES[rule]
    return f'[[methods]]\nname = "{name}"\nlabel = "{name} {rule}"\naggregate = {{ {table} }}\n'


def attacked(attack: str) -> str:
    """Write an experiment under attack, over all robust rules."""
    rules = [*(ruled("fedavg", rule) for rule in RULES), ruled("ditto", "median")]
    return experiment(
        'source = "embedded"\npartition = { name = "iid", clients = 8, per_client = 40 }',
        DNN,
        PLAIN + f"[attack]\nfraction = 0.2\n{attack}\n" + "\n".join(rules),
        rounds=2,
    )


def private(more: str) -> str:
    """Write the tables of private methods."""
    rule = f'name = "dp", clip = 1.0, noise_source = "seed", force = true, {more}'
    tables = (
        f'[[methods]]\nname = "{name}"\naggregate = {{ {rule} }}\n' for name in ("fedavg", "ditto")
    )
    return "\n".join(tables)


def deployed(names: Sequence[str], deploy: str = "", model: str = DNN) -> str:
    """Write an experiment for `--on local`: three nodes, two rounds."""
    data = 'source = "embedded"\npartition = { name = "iid", clients = 3, per_client = 60 }'
    public = WITH_PUBLIC if set(names) & set(PUBLIC) else ""
    tail = CURVES + f"[deploy]\n{deploy}\n" + methods(*names)
    return experiment(data + public, model, tail, seeds="[0]", rounds=2)


TUNE = """
[tune]
search = "random"
budget = 3
rounds = 2
[tune.space]
lr = { low = 0.01, high = 0.3, log = true }
[tune.methods.Ditto]
pull = [0.01, 0.1, 1.0]
[[splits]]
name = "even"
partition = { name = "iid", clients = 5, per_client = 50 }
[[splits]]
name = "skewed"
partition = { name = "dirichlet", clients = 5, alpha = 0.5 }
min_size = 20
"""
RUN = ["run", "e.toml", "--out", "out"]
LOCAL = [*RUN, "--on", "local"]

RUNS: dict[str, tuple[str, list[list[str]]]] = {
    # every method; the other settings of training; on the other backend
    "methods": (experiment(IID + WITH_PUBLIC, PAIR, CURVES + PLAIN + methods(*METHODS)), [RUN]),
    "methods-sequential": (
        experiment(
            IID + WITH_PUBLIC,
            PAIR,
            backend('kind = "sequential"') + methods(*METHODS),
            seeds="[2]",
            rounds=2,
        ),
        [RUN],
    ),
    "methods-ragged-cohort-disk": (
        experiment(
            TABLE + TABLE_PUBLIC,
            PAIR,
            backend('personal = "disk"\npersonal_mb = 1') + methods(*METHODS),
            head="cohort = 0.4",
        ),
        [RUN],
    ),
    "optimisers": (
        experiment(
            SYNTHETIC,
            DNN,
            CURVES
            + PLAIN
            + methods("fedavg", "ditto", "apfl", more='optimiser = "adam"\nlr = 0.01')
            + '[[methods]]\nname = "fedper"\nmomentum = 0.9\nnesterov = true\nclip = 1.0\n'
            + 'weight_decay = 0.001\nschedule = "cosine"\nsteps = 4\n'
            + '[[methods]]\nname = "fedprox"\nschedule = "step"\ndecay = 0.5\ndecay_rounds = 2\n',
            head='cohort = 5\ndraw = "poisson"',
            rounds=4,
        ),
        [RUN],
    ),
    "bystanders": (
        experiment(
            SYNTHETIC,
            DNN,
            PLAIN + methods("pfedme", "ditto"),
            head='cohort = 4\nbystanders="train"',
        ),
        [RUN],
    ),
    # privacy and robustness
    "dp": (experiment(RAGGED, DNN, PLAIN + private("noise = 0.3"), head="cohort = 6"), [RUN]),
    "dp-adaptive": (
        experiment(
            RAGGED,
            DNN,
            PLAIN + private("noise = 1.0, adaptive = true"),
            head='cohort = 6\ndraw = "poisson"',
        ),
        [RUN],
    ),
    "robust-sign-flip": (attacked('name = "sign-flip"\nscale = 5.0'), [RUN]),
    "robust-backdoor": (attacked('name = "backdoor"\ntarget = 0'), [RUN]),
    "robust-broken": (attacked('name = "broken"'), [RUN]),
    # networks
    "two-networks": (
        experiment(IID + WITH_PUBLIC, TWO, CURVES + PLAIN + methods("local", *PUBLIC)),
        [RUN],
    ),
    "ktpfl-presets": (
        experiment(
            IID + WITH_PUBLIC,
            DNN,
            PLAIN
            + "".join(
                f'[[methods]]\nname = "ktpfl"\nlabel = "{preset}"\npreset = "{preset}"\n'
                "sample = 30\nlr = 0.05\n"
                for preset in ("paper", "code")
            ),
        ),
        [RUN],
    ),
    "lenet": (
        experiment(
            IID, 'name = "lenet5"', PLAIN + methods("fedavg", "fedper", "per-fedavg"), rounds=2
        ),
        [RUN],
    ),
    "batchnorm": (
        experiment(IID, RESNET, PLAIN + methods("fedbn", "fedavg", "ditto"), rounds=2),
        [RUN],
    ),
    "text-lstm": (
        experiment(TEXT, LSTM, PLAIN + methods("fedavg", "fedper", "ditto"), head="cohort = 5"),
        [RUN],
    ),
    "text-cnn": (
        experiment(
            'source = "reviews.csv"\noptions = { length = 12, vocabulary = 60 }',
            KIM,
            PLAIN + methods("fedavg", "fedrep"),
        ),
        [RUN],
    ),
    # personalisation in parts
    "combinations": (
        experiment(
            'source = "embedded"\npool = "all"\n'
            'partition = { name = "classes", clients = 5, classes_per_client = 4 }',
            DNN,
            PLAIN + methods("fedavg", "fedper", "ditto", more=PARTS),
            rounds=2,
        ),
        [RUN],
    ),
    "combinations-gates": (
        experiment(
            IID,
            DNN,
            PLAIN
            + "".join(
                f'[[methods]]\nname = "fedavg"\nlabel = "{gate}"\ngate = "{gate}"\n'
                'tune_epochs = 2\nexpert_epochs = 2\npersonalise = ["ft", "ewc", "moe"]\n'
                'ewc_fisher = "client"\n'
                for gate in ("scalar", "inputs", "outputs")
            ),
            rounds=2,
        ),
        [RUN],
    ),
    "portfolio": (
        experiment(
            SYNTHETIC,
            DNN,
            PLAIN + methods("portfolio", more='preset = "whole-grid"'),
            head="cohort = 0.5",
            rounds=3,
        ),
        [RUN],
    ),
    # what happens over time
    "compare": (
        experiment('source = "embedded"', DNN, PLAIN + TUNE + methods("fedavg", "ditto")),
        [["compare", "e.toml", "--out", "out"]],
    ),
    "newcomers": (
        experiment(
            TABLE,
            DNN,
            "[evaluate]\nkeep_globals = true\n"
            + PLAIN
            + methods("fedavg-ft", "persfl", "fedper", "pfedhn", "ditto", "portfolio"),
        ),
        [
            RUN,
            *(
                [
                    "adapt",
                    "out",
                    "--data",
                    "new.npz",
                    "--method",
                    label,
                    "--out",
                    f"out/new/{label}",
                ]
                for label in ("PersFL", "FedPer", "Portfolio")
            ),
        ],
    ),
    "resume": (
        experiment(
            RAGGED + WITH_PUBLIC,
            PAIR,
            PLAIN + methods("fedavg", "ditto", "ktpfl", "apfl"),
            head="cohort = 0.4",
            rounds=4,
        ),
        [
            [*RUN, "--set", "rounds=2"],
            [*RUN, "--set", "rounds=3", "--resume"],
            [*RUN, "--resume", "--set", "rounds=4"],
        ],
    ),
    # a federation of processes
    "local": (deployed(["fedavg", "ditto", "ktpfl", "portfolio"]), [LOCAL]),
    "local-two-networks": (deployed(["ktpfl", "feddf"], model=TWO), [LOCAL]),
    "local-secure": (deployed(["fedavg", "ditto"], "secure = true"), [LOCAL]),
    "local-fp16": (deployed(["fedavg", "ditto"], 'compress = "fp16"'), [LOCAL]),
    "local-topk": (deployed(["fedavg", "ditto"], 'compress = "topk"\nkeep = 0.2'), [LOCAL]),
}

# ---------------------------------------------------------------------------- make


def write_data(folder: Path) -> None:
    """Write own data beside the experiment: tables with clients, and reviews."""
    random = np.random.default_rng(7)
    for name, clients in (("table.npz", 10), ("new.npz", 2)):
        sizes = random.integers(15, 60, clients)
        client = np.repeat(np.arange(clients), sizes)
        y = random.integers(0, 4, sizes.sum())
        x = random.normal(size=(sizes.sum(), 10)).astype(np.float32)
        x[np.arange(len(y)), y] += 1.5
        np.savez(folder / name, x=x, y=y, client=client)
    lines = ["text,label,client"]
    for number in range(160):
        label = int(random.integers(0, 3))
        words = random.integers(0, 20, int(random.integers(4, 14))) + 15 * label
        lines.append(f"{' '.join(f'w{word}' for word in words)},{label},{number % 4}")
    (folder / "reviews.csv").write_text("\n".join(lines) + "\n")


def make_one(folder: Path, name: str) -> tuple[str, float, str]:
    """Do one run; returns its name, seconds, and what was printed if it failed."""
    begun = time.perf_counter()
    text, commands = RUNS[name]
    home = folder / name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    (home / "e.toml").write_text(text)
    write_data(home)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "idiolect", *words],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return name, time.perf_counter() - begun, f"{' '.join(words)}\n{done.stderr[-800:]}"
    return name, time.perf_counter() - begun, ""


def make(folder: Path, only: Sequence[str]) -> int:
    """Do the runs, two at a time."""
    unknown = set(only) - set(RUNS)
    if unknown:
        sys.exit(f"no run {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for name, seconds, error in pool.map(lambda name: make_one(folder, name), only or RUNS):
            print(f"{seconds:6.1f} s  {name}{'  FAILED: ' + error if error else ''}", flush=True)
            failed += bool(error)
    return min(failed, 1)


# ---------------------------------------------------------------------------- digest

COUNTED = ("scores", "metrics", "models")  # a difference in one of these fails `compare`
SCORES = ("curves", "headline", "best_validation_round", "reached", "seeds")
WORDS = ("reason", "federation", "description", "sentence", "notices", "data")  # among scores
PASSING = ("speed", "versions", "seconds", "provenance", "folder", "path", "created", "when")


def short(*parts: bytes) -> str:
    """Hash parts, each with its length."""
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()[:20]


def without(content: Any, names: Iterable[str]) -> Any:
    """Drop keys of these names at any depth."""
    gone = set(names)
    if isinstance(content, dict):
        return {key: without(value, gone) for key, value in content.items() if key not in gone}
    return [without(value, gone) for value in content] if isinstance(content, list) else content


def of_json(content: Any) -> str:
    """Hash a JSON value; floats count to the last bit."""
    return short(json.dumps(content, sort_keys=True).encode())


def of_result(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Hash a result: scores by label, and the rest."""
    content = without(json.loads(path.read_text()), PASSING)
    found = content.pop("methods")
    scores = {
        label: of_json(without({key: table.get(key) for key in SCORES}, WORDS))
        for label, table in found.items()
    }
    scores["fairness"] = of_json(content.pop("fairness", None))
    about = {
        label: of_json({key: value for key, value in table.items() if key not in SCORES})
        for label, table in found.items()
    }
    return scores, {**about, "top": of_json(content)}


def of_metrics(path: Path) -> dict[str, str]:
    """Hash the rows of a metrics file by method, whatever their order."""
    import pyarrow.parquet as pq

    rows: dict[str, list[str]] = {}
    for row in pq.read_table(path).to_pylist():
        rows.setdefault(row["method"], []).append(json.dumps(row, sort_keys=True))
    return {label: short(*(row.encode() for row in sorted(own))) for label, own in rows.items()}


def of_tensors(path: Path) -> dict[str, str]:
    """Hash the tensors of a safetensors file, with their names and without."""
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header.pop("__metadata__", None)
    named, bare = [], []
    for name, about in sorted(header.items()):
        low, high = about["data_offsets"]
        form = f"{about['dtype']} {about['shape']}"
        value = form.encode() + blob[start + low : start + high]
        named.append(short(name.encode(), value))
        if not name.endswith(".key"):  # of personal state on disk: drawn anew in every run
            bare.append(short(value))
    return {
        "named": short(*(part.encode() for part in named)),
        "values": short(*(part.encode() for part in sorted(bare))),
    }


def of_run(home: Path) -> dict[str, Any]:
    """Hash a run's folder: what users read by name, and the state of training by its values."""
    found: dict[str, Any] = {part: {} for part in (*COUNTED, "state", "about")}
    for path in sorted(home.rglob("*")):
        parts = path.relative_to(home).parts
        name = "/".join(part for part in parts if not re.fullmatch("[0-9a-f]{12}", part))  # run ids
        if path.name == "result.json":
            found["scores"][name], found["about"][name] = of_result(path)
        elif path.suffix == ".parquet":
            found["metrics"][name] = of_metrics(path)
        elif path.name == "comparison.json" or (path.suffix == ".json" and parts[0] == "new"):
            content = json.loads(path.read_text())
            found["scores"][name] = of_json(without(content, (*PASSING, *WORDS)))
        elif path.suffix == ".safetensors" and {"checkpoints", "state", "personal"} & {*parts}:
            found["state"][name] = of_tensors(path)["values"]
        elif path.suffix == ".safetensors":
            found["models"][name] = of_tensors(path)
    return {**{part: of_json(found[part]) for part in COUNTED}, "of": found}


def processor() -> str:
    """Name the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def digest(folder: Path) -> dict[str, Any]:
    """Hash all runs of a folder."""
    import torch

    machine = {"torch": torch.__version__, "numpy": np.__version__, "cpu": processor()}
    homes = sorted(path.parent for path in folder.glob("*/e.toml"))
    return {"machine": machine, "runs": {home.name: of_run(home / "out") for home in homes}}


# ---------------------------------------------------------------------------- compare


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Name the places at which two digests differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = []
        for key in sorted({*one, *other}):
            place = f"{where} > {key}" if where else key
            if key not in one or key not in other:
                found.append(f"{place}: only in the {'second' if key not in one else 'first'}")
            else:
                found += differences(one[key], other[key], place)
        return found
    return [] if one == other else [where]


def compare(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Print differences; those of scores, metrics and tensors count."""
    for place in differences(one["machine"], other["machine"]):
        key = place.split(":")[0]
        print(f"note: {key}: {one['machine'].get(key)!r} and {other['machine'].get(key)!r}")
    bad = 0
    for name in sorted({*one["runs"], *other["runs"]}):
        if name not in one["runs"] or name not in other["runs"]:
            print(f"{name}: only in the {'second' if name not in one['runs'] else 'first'}")
            bad += 1
            continue
        places = differences(one["runs"][name]["of"], other["runs"][name]["of"])
        for place in places:
            counts = place.startswith(COUNTED)  # not: settings, notices, prose; files for resuming
            print(f"{'' if counts else 'note: '}{name}: {place}")
            bad += counts
    print(f"{bad} differences in {len(one['runs'])} runs")
    return int(bad > 0)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--only", nargs="+", default=[], metavar="NAME")
    verbs.add_parser("digest").add_argument("folder", type=Path)
    comparing = verbs.add_parser("compare")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    given = parser.parse_args()
    if given.verb == "make":
        return make(given.folder.resolve(), given.only)
    if given.verb == "digest":
        print(json.dumps(digest(given.folder.resolve()), indent=1, sort_keys=True))
        return 0
    return compare(json.loads(given.one.read_text()), json.loads(given.other.read_text()))


if __name__ == "__main__":
    sys.exit(main())
