"""What a private run costs with a whole network, and with adapters: loss of each by ε.

    python scripts/study_private_adapters.py DATA --out docs/figures/private-adapters.json

FedAvg on Shakespeare's roles, next token, from the embedded base: all its parameters, or LoRA. Both
have their best of a few rates without noise, on validation text; then noise is added for each ε.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import idiolect
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.private_mean import Private
from idiolect.methods import FedAvg
from idiolect.models import MODELS

EPSILONS = (math.inf, 8.0)
RATES = {"whole network": (0.1, 0.3), "lora": (0.3, 1.0)}
CLIP = 0.3


def base(shape: tuple[int, ...], classes: int, words: tuple[str, ...]) -> Any:
    """Build the embedded decoder."""
    return MODELS["decoder"](shape, classes, words, weights="embedded")


def main() -> None:
    """Train, and write after each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    options = {"tokeniser": "embedded", "length": given.length}
    federation = idiolect.federation("shakespeare", data_dir=given.data, options=options)
    print(federation)
    found: dict[str, Any] = {"clients": federation.clients, "rounds": given.rounds, "rows": []}

    def run(kind: str, rate: float, epsilon: float, seed: int) -> dict[str, Any]:
        method: Any = FedAvg(lr=rate, batch=8, steps=given.steps)
        if math.isfinite(epsilon):
            method = Aggregated(method, Private(clip=CLIP, epsilon=epsilon))
        result = idiolect.fit(
            method, federation, base, adapter=None if kind == "whole network" else "lora",
            rounds=given.rounds, seed=seed, every=given.rounds, progress=False,
        )  # fmt: skip
        row = {"kind": kind, "rate": rate, "seed": seed}
        row["epsilon"] = epsilon if math.isfinite(epsilon) else None
        row |= {result.metric: result.mean}
        row["loss"] = float(result.outcome.final["global/loss"][0].mean())
        row["val_loss"] = float(result.outcome.curves["val/global/loss"][-1].mean())
        found["rows"].append(row)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        print(row, flush=True)
        return row

    best = {}
    for kind, rates in RATES.items():
        tried = {rate: run(kind, rate, math.inf, 0)["val_loss"] for rate in rates}
        best[kind] = min(tried, key=tried.__getitem__)
    for seed in range(given.seeds):
        for epsilon in EPSILONS:
            for kind in RATES:
                if (epsilon, seed) != (math.inf, 0):
                    run(kind, best[kind], epsilon, seed)


if __name__ == "__main__":
    main()
