"""What other rules would have made of Portfolio's candidates: how its own was settled.

python scripts/study_portfolio.py EXPERIMENT.toml [DATA_DIR]

Trains the file's `portfolio` and prints mean test accuracy under several rules, and the share of
clients below their local model, at all and by over a point. Test data measure here and choose
nothing; the files of experiments/portfolio/study have data that no table uses.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.client import Local
from idiolect.core.method import Sent
from idiolect.core.tree import Params, Tree
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import load_experiment
from idiolect.experiment.train import train
from idiolect.methods import Portfolio
from idiolect.methods.personalise import choosing
from idiolect.methods.personalise.choosing import Blend, Votes
from idiolect.methods.portfolio import PortfolioModels


@dataclass(frozen=True, kw_only=True)
class Study(Portfolio):
    """Portfolio, and what other rules choose from the same candidates."""

    def hear(
        self, deployed: PortfolioModels, others: Votes, local: Local
    ) -> tuple[PortfolioModels, dict[str, Tree]]:
        """Let every rule choose from the candidates, which are trained once."""
        candidates = deployed.candidates
        rules = {**self.by_itself(candidates, local), **self.together(candidates, others, local)}
        return super().hear(deployed, others, local), rules

    def by_itself(self, candidates: Params, local: Local) -> dict[str, Tree]:
        """Choose by rules that go by the client's own validation data."""
        scores = choosing.scored(candidates, local)
        sound = choosing.sound(candidates, scores)
        best = choosing.alone(choosing.best_of(scores, sound), scores)
        rules = {"best on validation": choosing.blended(candidates, best, 1)[0]}
        for caution in (1.0, 3.0, 10.0, 30.0, 100.0):
            weights = choosing.fitted(scores, choosing.even(sound), caution)
            for most in (3, 5, len(weights)):
                blend, _ = choosing.blended(candidates, weights, most)
                rules[f"mixture of {most}, c = {caution:g}"] = blend
        for margin in (0.0, 1.0, 1.5, 2.0, 2.5, 3.0):
            other = dataclasses.replace(self, margin=margin)
            rules[f"margin = {margin:g}"] = other.choose(candidates, local).personal
        for margin in (1.0, 1.5, 2.0):
            asked = {0.5: 0.0, 1.0: margin}
            rules[f"{margin:g}, or half of it"] = self.share(asked, candidates, local)
            asked = dict.fromkeys((0.25, 0.5, 0.75, 1.0), margin)
            rules[f"{margin:g}, or a smaller share"] = self.share(asked, candidates, local)
        return rules

    def share(self, asked: dict[float, float], candidates: Params, local: Local) -> Blend:
        """Give the mixture the largest share that has the margin asked of it; the rest is local."""
        scores = choosing.scored(candidates, local)
        sound = choosing.even(choosing.sound(candidates, scores))
        weights = choosing.fitted(scores, sound, self.caution)
        _, mixture = choosing.blended(candidates, weights, self.members)
        own = choosing.alone(mixture.new_zeros(()), scores)
        most = self.members + 1  # the local model may come on top
        taken = own
        for share, margin in sorted(asked.items()):
            mixed = share * mixture + (1 - share) * own
            blend, _ = choosing.blended(candidates, mixed, most)
            first = tree.map(lambda leaf: leaf[0], candidates)
            accuracy = choosing.compared(blend, first, local).accuracy
            keeps = accuracy >= scores.accuracies[0] - 1e-6
            gains = choosing.surely_better(scores, mixed, margin)
            taken = torch.where(gains & keeps, mixed, taken)
        return choosing.blended(candidates, taken, most)[0]

    def together(self, candidates: Params, others: Votes, local: Local) -> dict[str, Tree]:
        """Choose by rules that go by what the others told as well."""
        rules: dict[str, Tree] = {}
        scores = choosing.scored(candidates, local)
        sound = choosing.sound(candidates, scores)
        for heed in (10.0, 30.0, 100.0):
            prior = choosing.prior(others, sound, self.caution, heed)
            blend, _ = choosing.blended(candidates, choosing.fitted(scores, *prior), self.members)
            rules[f"q of the others, c = {heed:g}"] = blend
        for margin in (1.0, 1.5, 2.0):
            for trust in (2.0, 3.0, math.inf):
                other = dataclasses.replace(self, margin=margin, trust=trust)
                found = other.choose(candidates, local, others).personal
                rules[f"q, margin {margin:g}, trust {trust:g}"] = found
        return rules

    def models(
        self, sent: Sent, deployed: tuple[PortfolioModels, dict[str, Tree]]
    ) -> dict[str, Tree]:
        """Score what each rule chose, and each candidate."""
        if not deployed:
            return super().models(sent, ())
        return {**super().models(sent, deployed[0]), **deployed[1]}

    def facts(self, deployed: tuple[PortfolioModels, dict[str, Tree]]) -> dict[str, Tree]:
        """Tell what Portfolio tells."""
        return super().facts(deployed[0])


def main() -> None:
    """Train and print."""
    data = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    (job, *_), _ = build_jobs(load_experiment(sys.argv[1]), data)
    method = Study(**{**job.method.settings(), "keep_candidates": True})
    final = train(dataclasses.replace(job, method=method)).outcome.final
    tested = {key[: -len("/accuracy")]: v for key, v in final.items() if key.endswith("/accuracy")}
    tested = {name: values for name, values in tested.items() if "/" not in name}
    singles = np.stack([tested[name] for name in method.names])
    rows = {"the oracle's candidate": singles.max(0), **tested}
    for name, own in rows.items():
        lost = tested["local"] - own
        below, far = (100 * np.mean(lost > least + 1e-6) for least in (0.0, 0.01))
        print(
            f"{name:28} {100 * np.nanmean(own):6.2f}   below local {below:5.1f} %, "
            f"by over a point {far:5.1f} %"
        )


if __name__ == "__main__":
    main()
