"""What other rules would have made of Portfolio's candidates: how its own was settled.

python scripts/study_portfolio.py EXPERIMENT.toml [DATA_DIR]

Trains the file's `portfolio` and prints mean test accuracy under several rules, and the share of
clients below their local model. Test data measure here and choose nothing; the files of
experiments/portfolio/study have data that no table uses.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from idiolect.experiment import jobs, load_experiment
from idiolect.local import Local
from idiolect.method import Sent
from idiolect.methods import Portfolio
from idiolect.methods.portfolio import Kept, Settled
from idiolect.personalise import choosing
from idiolect.runner.train import train
from idiolect.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Study(Portfolio):
    """Portfolio, and what other rules choose from the same candidates."""

    def deploy(self, sent: Sent, personal: Kept, local: Local) -> tuple[Settled, dict[str, Tree]]:
        """Train the candidates once, then let every rule choose."""
        settled = super().deploy(sent, personal, local)
        candidates = settled.candidates
        scores = choosing.scored(candidates, local)
        sound = choosing.sound(candidates, scores)
        best = choosing.alone(choosing.best_of(scores, sound), scores)
        rules = {"best on validation": choosing.blended(candidates, best, 1)[0]}
        for caution in (1.0, 3.0, 10.0, 30.0, 100.0):
            weights = choosing.fitted(scores, sound, caution)
            for most in (3, 5, len(weights)):
                blend, _ = choosing.blended(candidates, weights, most)
                rules[f"mixture of {most}, c = {caution:g}"] = blend
        for margin in (0.0, 1.5, 2.0):
            other = dataclasses.replace(self, margin=margin)
            rules[f"margin = {margin:g}"] = other.choose(candidates, local).personal
        return settled, rules

    def models(self, sent: Sent, deployed: tuple[Settled, dict[str, Tree]]) -> dict[str, Tree]:
        """Score what each rule chose, and each candidate."""
        if not deployed:
            return super().models(sent, ())
        return {**super().models(sent, deployed[0]), **deployed[1]}

    def facts(self, deployed: tuple[Settled, dict[str, Tree]]) -> dict[str, Tree]:
        """Tell what Portfolio tells."""
        return super().facts(deployed[0])


def main() -> None:
    """Train and print."""
    data = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    (job, *_), _ = jobs(load_experiment(sys.argv[1]), data)
    method = Study(**{**job.method.settings(), "keep_candidates": True})
    final = train(dataclasses.replace(job, method=method)).outcome.final
    tested = {key[: -len("/accuracy")]: v for key, v in final.items() if key.endswith("/accuracy")}
    tested = {name: values for name, values in tested.items() if "/" not in name}
    singles = np.stack([tested[name] for name in method.names])
    rows = {"the oracle's candidate": singles.max(0), **tested}
    for name, own in rows.items():
        below = np.mean(own < tested["local"] - 1e-9)
        print(f"{name:28} {100 * np.nanmean(own):6.2f}   below local {100 * below:5.1f} %")


if __name__ == "__main__":
    main()
