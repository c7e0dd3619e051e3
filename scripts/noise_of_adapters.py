"""What the noise of a private run does by itself: to a whole network, and to adapters of it.

    python scripts/noise_of_adapters.py DATA

The embedded decoder on 200 texts of Shakespeare's roles; noise as of a run with ε = 8 over 20
rounds in which all 145 roles take part (z = 4.277), updates cut to 0.3. Nothing is trained.
"""

import sys

import numpy as np
import torch
from torch.nn import functional

import idiolect
from idiolect.core.network import Network
from idiolect.models import MODELS
from idiolect.models.adapters import LoRA, adapt_network

NOISE, CLIP, CLIENTS, ROUNDS = 4.27734375, 0.3, 145, 20
DRAWS = 5


def main() -> None:
    """Print the loss before and after."""
    options = {"tokeniser": "embedded", "length": 32}
    held = idiolect.federation("shakespeare", data_dir=sys.argv[1], options=options)
    rows = np.concatenate(held.test)[::13][:200]
    x, y = (
        torch.from_numpy(np.array(part[rows])).long() for part in (held.dataset.x, held.dataset.y)
    )
    base = MODELS["decoder"]((32,), 1024, held.dataset.words, weights="embedded")
    deviation = NOISE * CLIP / CLIENTS * ROUNDS**0.5
    for kind, model in (("whole network", base), ("lora", adapt_network(base, LoRA()))):
        network = Network(model, stacked=False)

        def loss(moved: float, seed: int, network: Network = network) -> float:
            draw = torch.Generator().manual_seed(seed)
            noise = {n: torch.randn(p.shape, generator=draw) for n, p in network.params.items()}
            params = {n: p + moved * noise[n] for n, p in network.params.items()}
            with torch.no_grad():
                logits = network(params, x, False).flatten(0, 1)
            return float(functional.cross_entropy(logits, y.flatten(), ignore_index=-1))

        numbers = sum(leaf.numel() for leaf in network.params.values())
        after = [loss(deviation, seed) for seed in range(DRAWS)]
        print(f"{kind}: {numbers:,} numbers, length {deviation * numbers**0.5:.1f}, loss "
              f"{loss(0, 0):.3f} -> {min(after):.3f} to {max(after):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
