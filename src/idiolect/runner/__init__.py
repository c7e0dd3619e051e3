"""Run methods with checkpoints, resume and results; needs no pydantic, typer or rich."""

from idiolect.runner.job import Evaluate, Job
from idiolect.runner.run import run
from idiolect.runner.train import Trained, train
from idiolect.runner.watch import Several, Silent, Tick, Watch

__all__ = ["Evaluate", "Job", "Several", "Silent", "Tick", "Trained", "Watch", "run", "train"]
