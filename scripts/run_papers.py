"""Train what the papers' pages still lack, within a time: one process a GPU line after the other.

    python scripts/run_papers.py SECONDS OUT [--gpu 1] [--cpu 0] [--only WORD] [--set KEY=VALUE]
    python scripts/run_papers.py plan [WORD]     # what would be trained, in order
    python scripts/run_papers.py check [WORD]    # read every line's data, build what it would train
    python scripts/run_papers.py keep OUT        # take the figures into results/ and the pages

The lines are those of experiments/papers.txt, what is worth most first:

    DEVICE SECONDS NAME PAGE:RUN FILE [--method LABEL]... [--set KEY=VALUE]...

DEVICE is gpu, cpu, or `had` where results/ has the line: it is kept to tell how, and not trained.
PAGE:RUN is where `keep` puts the figures (`+` behind it: more seeds of what is kept there; `*`: as
the experiment is called; nothing: they are not kept). Workers share datasets and kernels between
their lines; a line that needs more than the time that is left is passed by, one that fails costs
the others nothing. OUT/PAGE.tar.gz holds result.json and metrics.parquet of all that is done,
written anew all the time: a machine may be bare next time.
"""

import argparse
import gc
import io
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from idiolect.engine.outcome import Silent, Tick
from idiolect.experiment.build import build_job, build_shared, describe, refuse_unknown_labels
from idiolect.experiment.job import SimulatedJob
from idiolect.experiment.load import load_experiment
from idiolect.experiment.train import Trained, train
from idiolect.results.document import write_results

ROOT = Path(__file__).resolve().parent.parent
LINES = ROOT / "experiments" / "papers.txt"
HAD = "had"  # in the place of a device: results/ has that line, and it is not trained again
FILES = ("result.json", "metrics.parquet", "done")
WRITTEN = 5.0  # seconds between two writings of what is done
GRACE = 20.0  # seconds that a worker may take over the time before it is ended


@dataclass
class Line:
    """One run: where, how long by estimate, and what."""

    device: str
    seconds: float
    name: str
    page: str
    run: str
    file: str
    methods: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


def lines(only: Sequence[str] = ()) -> list[Line]:
    """Read the file; with words, the lines whose names hold one of them."""
    texts = [text for text in LINES.read_text().splitlines() if text and text[0] != "#"]
    found = [_line(shlex.split(text)) for text in texts]
    return [one for one in found if not only or any(word in one.name for word in only)]


def _line(words: list[str]) -> Line:
    device, seconds, name, target, file = words[:5]
    page, _, run = target.partition(":")
    made = Line(device, float(seconds), name, page, run, file)
    for option, value in zip(words[5::2], words[6::2], strict=True):
        if option == "--method":
            made.methods.append(value)
        elif option == "--set":
            made.changes.append(value)
        else:
            raise SystemExit(f"{name}: unknown option {option}")
    return made


# A worker: one process, which trains one line after the other.


def work(args: argparse.Namespace) -> None:
    """Take the next line that nobody has taken and that fits, until the time is over."""
    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, max(args.end - time.time(), 0.1))
    datasets: dict[str, Any] = {}
    for line in lines(args.only):
        if line.device != args.device or (args.runs / line.name / "done").exists():
            continue
        if line.seconds * args.pace > args.end - time.time():
            print(f"{line.name}: passed by, {line.seconds:.0f} s do not fit", flush=True)
            continue
        try:
            (args.runs / f"{line.name}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            _train(line, args, datasets)
            (args.runs / line.name / "done").touch()
        except TimeoutError:
            print(f"{line.name}: the time is over", flush=True)
            return
        except Exception as error:  # one line's failure must not cost the others their time
            text = f"{type(error).__name__}: {error}"
            print(f"{line.name}: FAILED, {text[:2000]}", flush=True)
            if "CUDA error" in text:  # nothing can be computed in this process any more
                os._exit(3)
        _clear(args.device)


def _late(signum: int, frame: object) -> None:
    raise TimeoutError


def _clear(device: str) -> None:
    gc.collect()
    if device == "gpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _train(line: Line, args: argparse.Namespace, datasets: dict[str, Any]) -> None:
    """Train the methods of a line; the result is written after each."""
    begun = time.time()
    jobs, about, whole = _built(line, args.set, datasets)
    folder = args.runs / line.name
    folder.mkdir(exist_ok=True)
    read = time.time() - begun
    done: list[Trained] = []
    for job in jobs:
        pace = Pace()
        done.append(train(job, None, watch=pace, earlier=done))
        write_results(folder, about, [one.outcome for one in done], len(done) == whole)
        print(f"{line.name}: {job.label}: {pace.told()}", flush=True)
    print(f"{line.name}: {time.time() - begun:.1f} s, data {read:.1f} s of it", flush=True)


def _built(
    line: Line, changes: list[str], datasets: dict[str, Any]
) -> tuple[list[SimulatedJob], dict[str, Any], int]:
    """Make the jobs of a line, describe its data, count the methods of its experiment."""
    place = ["backend.device=cpu"] if line.device == "cpu" else []
    experiment = load_experiment(ROOT / line.file, [*line.changes, *changes, *place])
    refuse_unknown_labels(experiment, line.methods)
    held = build_shared(experiment, None, datasets)
    tables = [one for one in experiment.methods if not line.methods or one.label in line.methods]
    made = [build_job(experiment, table, held, experiment.seeds) for table in tables]
    return made, describe(experiment, held), len(experiment.methods)


def check(only: Sequence[str]) -> None:
    """Build every line, here without a GPU, so that none fails for its settings or its data."""
    datasets: dict[str, Any] = {}
    for line in lines(only):
        if line.device == HAD:
            continue
        jobs, about, _ = _built(line, ["backend.precision=fp32"], datasets)
        told = ", ".join(f"{job.label} {job.rounds} rounds" for job in jobs)
        print(f"{line.name}: {about['data']['federations'][0]}, {jobs[0].seeds}: {told}")


class Pace(Silent):
    """When rounds ended: the first two choose kernels and record graphs."""

    def __init__(self) -> None:
        self.begun = time.time()
        self.ends: list[float] = []

    def tick(self, tick: Tick) -> None:
        self.ends.append(time.time())

    def note(self, text: str) -> None:
        if "memory" in text or "NaN" in text:
            print(f"note: {text[:200]}", flush=True)

    def told(self) -> str:
        if not self.ends:
            return f"{time.time() - self.begun:.1f} s"
        first, last = self.ends[:2][-1], self.ends[-1]
        pace = (last - first) / max(len(self.ends) - 2, 1)
        return (
            f"{len(self.ends)} rounds, first two {first - self.begun:.1f} s, then {pace:.4f} s "
            f"each, after them {time.time() - last:.1f} s"
        )


# The run: workers, and what comes back.


def run(args: argparse.Namespace) -> None:
    """Start the workers, write what they have found all the time, and wait for them."""
    args.out.mkdir(parents=True, exist_ok=True)
    args.runs.mkdir(parents=True, exist_ok=True)
    for taken in args.runs.glob("*.taken"):
        taken.unlink()
    for path in sorted(args.had.glob("*.tar.gz")) if args.had else ():
        _unpack(path, args.runs)
    args.end = time.time() + args.seconds
    wanted = ["gpu"] * args.gpu + ["cpu"] * args.cpu
    workers = [(device, _start(args, device)) for device in wanted]
    while workers and time.time() < args.end + GRACE:
        time.sleep(WRITTEN)
        alive = []
        for device, worker in workers:
            code = worker.poll()
            if code == 3 and time.time() < args.end - GRACE:  # CUDA was lost: another goes on
                alive.append((device, _start(args, device)))
            elif code is None:
                alive.append((device, worker))
        workers = alive
        pack(args.runs, args.out)
    for _, worker in workers:
        worker.terminate()
        worker.wait()
    pack(args.runs, args.out)
    asked = [one.name for one in lines(args.only) if one.device != HAD]
    left = [name for name in asked if not (args.runs / name / "done").exists()]
    print(f"not done: {', '.join(left) or 'nothing'}")


def _start(args: argparse.Namespace, device: str) -> "subprocess.Popen[bytes]":
    own = [sys.executable, __file__, "work", str(args.end), str(args.out), "--device", device]
    own += ["--runs", str(args.runs), "--pace", str(args.pace)]
    own += [word for one in args.set for word in ("--set", one)]
    own += [word for one in args.only for word in ("--only", one)]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return subprocess.Popen(own, env={"OMP_NUM_THREADS": "1", **os.environ, **hidden})


def pack(runs: Path, out: Path) -> None:
    """Write an archive a page of all results that there are."""
    own: dict[str, list[Path]] = {}
    for line in lines():
        folder = runs / line.name
        if (folder / FILES[0]).exists():
            own.setdefault(line.page, []).append(folder)
    for page, folders in own.items():
        part = out / f"{page}.part"
        with tarfile.open(part, "w:gz", compresslevel=6) as archive:
            for folder in folders:
                for name in FILES:
                    if (folder / name).exists():
                        data = (folder / name).read_bytes()
                        about = tarfile.TarInfo(f"{folder.name}/{name}")
                        about.size = len(data)
                        archive.addfile(about, io.BytesIO(data))
        part.rename(out / f"{page}.tar.gz")


def _unpack(path: Path, folder: Path) -> None:
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")


# What came back: into results/ and the pages.


def keep(out: Path) -> None:
    """Unpack the archives, collect every run where its line says, and write the pages."""
    with tempfile.TemporaryDirectory() as place:
        for path in sorted(out.glob("*.tar.gz")):
            _unpack(path, Path(place))
        pages: dict[str, list[str]] = {}
        for line in lines():
            folder = Path(place) / line.name
            wanted = FILES[-1] if line.run.endswith("+") else FILES[0]  # seeds join when complete
            if line.run and (folder / wanted).exists():
                name = f"={line.run}" if line.run != "*" else ""
                pages.setdefault(line.page, []).append(f"{folder}{name}")
        for page, folders in pages.items():
            script = [sys.executable, str(ROOT / "scripts" / f"reproduce_{page}.py")]
            joined = [one for one in folders if one.endswith("+")]  # refused together
            for own in ([one for one in folders if one not in joined], joined):
                if own and subprocess.run([*script, "collect", *own], check=False).returncode:
                    print(f"{page}: NOT KEPT: {', '.join(Path(one).name for one in own)}")
            subprocess.run([*script, "write"], check=True)
    subprocess.run([sys.executable, str(ROOT / "scripts" / "reproduction_index.py")], check=True)


def main() -> None:
    if sys.argv[1:2] == ["plan"]:
        for line in lines(sys.argv[2:]):
            print(f"{line.device} {line.seconds:4.0f} s {line.name} -> {line.page}:{line.run}")
        return
    if sys.argv[1:2] == ["check"]:
        return check(sys.argv[2:])
    if sys.argv[1:2] == ["keep"]:
        return keep(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    working = sys.argv[1:2] == ["work"]
    if working:
        parser.add_argument("work")
        parser.add_argument("--device", choices=("gpu", "cpu"))
    parser.add_argument("end" if working else "seconds", type=float)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu", type=int, default=1, help="workers of GPU lines")
    parser.add_argument("--cpu", type=int, default=0, help="workers of CPU lines")
    parser.add_argument("--pace", type=float, default=1.0, help="of the estimates in the file")
    parser.add_argument("--runs", type=Path, default=Path("/tmp/runs-papers"))
    parser.add_argument("--had", type=Path, help="OUT of an earlier run, to go on from")
    parser.add_argument("--only", action="append", default=[], help="a word of a line's name")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    work(args) if working else run(args)


if __name__ == "__main__":
    main()
