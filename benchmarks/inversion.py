"""How many training rows one report shows: gradient inversion of a first dense layer.

`python benchmarks/inversion.py` prints the table of docs/deploy.md, "What a site allows". The
attacker has what was sent and the report. A unit's change of weights over its change of bias is an
average of rows, and one row where only that row reaches the unit. Means over five seeds.
"""

import numpy as np
import torch
from torch import Tensor, nn

from idiolect.data import load

SEEDS = 5
ROWS = (1, 4, 8, 16, 32, 64, 128)


def digits() -> tuple[Tensor, Tensor]:
    """Handwritten digits, 784 pixels from 0 to 1."""
    found = load("embedded")
    x = torch.from_numpy(np.array(found.x)).float().flatten(1)
    return x / x.max(), torch.from_numpy(np.array(found.y)).long()


def table() -> tuple[Tensor, Tensor]:
    """A table of 20 columns, half of them yes or no."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 20, generator=draw)
    y = (x @ torch.randn(20, 5, generator=draw)).argmax(1)
    x[:, 10:] = (x[:, 10:] > 1.0).float()
    return x, y


def network(columns: int, hidden: int, classes: int) -> nn.Sequential:
    """Softmax regression, or one hidden ReLU layer."""
    if not hidden:
        return nn.Sequential(nn.Linear(columns, classes))
    return nn.Sequential(nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def report(
    x: Tensor, y: Tensor, net: nn.Sequential, batch: int, lr: float, short: bool
) -> tuple[Tensor, Tensor]:
    """Train for an epoch; return the change of the first layer's weights and biases."""
    before = [leaf.detach().clone().double() for leaf in net.parameters()]
    for rows in torch.randperm(len(x)).split(batch):
        if not short and len(x) > batch > 2 * len(rows):
            continue  # as a node does, unless short_batches = true
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        for leaf, slope in zip(
            net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True
        ):
            leaf.data -= lr * slope
    after = [leaf.detach().double() for leaf in net.parameters()]
    return before[0] - after[0], before[1] - after[1]


def shown(
    x: Tensor, y: Tensor, rows: int, hidden: int, batch: int, lr: float = 0.01, short: bool = False
) -> str:
    """Say how many rows are shown exactly, and how near the best and the middle estimate come."""
    figures = []
    for seed in range(SEEDS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        own, other = order[:rows], order[rows : 2 * rows]
        torch.manual_seed(seed)
        net = network(x.shape[1], hidden, int(y.max()) + 1)
        weights, bias = report(x[own], y[own], net, batch, lr, short)
        moved = bias.abs() > 1e-9 * bias.abs().max()
        estimates = weights[moved] / bias[moved][:, None]
        apart = torch.cdist(estimates, x[own].double()).amin(0)
        exact = apart < 0.01 * x[own].double().norm(dim=1)
        near = [_nearness(estimates, x[some].double(), x.double().mean(0)) for some in (own, other)]
        figures.append([float(exact.sum()), *(float(f) for one in near for f in one)])
    exact_rows, best, middle, best_other, middle_other = np.mean(figures, 0)
    return f"{exact_rows:.1f}; {best:.2f}/{best_other:.2f}, {middle:.2f}/{middle_other:.2f}"


def _nearness(estimates: Tensor, rows: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best correlation with a row: of the best row, and of the middle one."""
    a, b = estimates - centre, rows - centre
    lengths = a.norm(dim=1)[:, None] * b.norm(dim=1)[None]
    best = (a @ b.T / lengths.clamp(min=1e-30)).amax(0)
    return best.max(), best.median()


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    for name, (x, y) in {"digits": digits(), "table": table()}.items():
        print(f"\n| {name}: rows behind the report | softmax | 100 units | 2000 units |")
        print("|---|---|---|---|")
        for rows in ROWS:
            cells = [shown(x, y, rows, hidden, min(rows, 32)) for hidden in (0, 100, 2000)]
            print(f"| {rows} | {' | '.join(cells)} |")
        cells = [shown(x, y, 64, hidden, 8) for hidden in (0, 100, 2000)]
        print(f"| 64, as 8 steps of 8 | {' | '.join(cells)} |")
        for short, words in ((True, "trained on"), (False, "left out")):
            cells = [shown(x, y, 33, hidden, 32, short=short) for hidden in (0, 100, 2000)]
            print(f"| 33, batch 32, last row {words} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
