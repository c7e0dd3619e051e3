"""Every optimiser against its `torch.optim` namesake, step for step, in double precision."""

import itertools

import pytest
import torch

from idiolect.core import optim, tree

STEPS = 6
EXACT = 1e-12


def start(seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"weight": (3, 2), "bias": (3,)}
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def slopes(params):
    """Gradient of Σ (p⁴/4 + p), which is neither constant nor linear."""
    return tree.map(lambda p: p**3 + 1, params)


def torch_path(make, params, max_norm=None):
    """The parameters after each step of a `torch.optim` optimiser."""
    own = {name: value.clone().requires_grad_() for name, value in params.items()}
    rule = make(list(own.values()))
    path = []
    for _ in range(STEPS):
        for value in own.values():
            value.grad = value.detach() ** 3 + 1
        if max_norm:
            torch.nn.utils.clip_grad_norm_(list(own.values()), max_norm)
        rule.step()
        path.append({name: value.detach().clone() for name, value in own.items()})
    return path


def our_path(rule, params):
    memory, path = rule.init(params), []
    for _ in range(STEPS):
        params, memory = rule.step(params, slopes(params), memory)
        path.append(params)
    return path


def assert_equal(ours, theirs, tolerance=EXACT):
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in other:
            gap = (mine[name] - other[name]).abs().max()
            assert gap < tolerance, f"step {step + 1}, {name}: {gap}"


SGD = [
    {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov}
    for momentum, decay, nesterov in itertools.product((0.0, 0.9), (0.0, 0.1), (False, True))
    if momentum or not nesterov  # torch refuses Nesterov without momentum
]
ADAM = [
    {"weight_decay": decay, "betas": betas, "eps": eps}
    for decay, betas, eps in itertools.product((0.0, 0.1), ((0.9, 0.999), (0.0, 0.8)), (1e-8, 0.1))
]
RULES = [(optim.sgd, torch.optim.SGD, options) for options in SGD]
RULES += [(optim.adam, torch.optim.Adam, options) for options in [{}, *ADAM]]
every_rule = pytest.mark.parametrize(("ours", "theirs", "options"), RULES)


@every_rule
def test_steps_equal_torchs(ours, theirs, options):
    params = start()
    expected = torch_path(lambda own: theirs(own, lr=0.05, **options), params)
    assert_equal(our_path(ours(0.05, **options), params), expected)
    # A learning rate that is a tensor, as schedules make it, is the same rate.
    rate = torch.tensor(0.05, dtype=torch.float64)
    assert_equal(our_path(ours(rate, **options), params), expected)


@every_rule
def test_steps_equal_torchs_under_vmap(ours, theirs, options):
    """Three clients in one stack, each against its own torch optimiser."""
    rule, clients = ours(0.05, **options), [start(seed) for seed in range(3)]
    memory = torch.vmap(rule.init)(tree.stack(clients))
    stacked, path = tree.stack(clients), []
    for _ in range(STEPS):
        stacked, memory = torch.vmap(rule.step)(stacked, slopes(stacked), memory)
        path.append(stacked)
    for number, params in enumerate(clients):
        mine = [tree.map(lambda leaf, n=number: leaf[n], one) for one in path]
        assert_equal(mine, torch_path(lambda own: theirs(own, lr=0.05, **options), params))


@every_rule
def test_steps_keep_single_precision(ours, theirs, options):
    """Seven digits: Adam's 1 - 0.999 would keep only four of them if it were written so."""
    params = tree.map(lambda leaf: leaf.float(), start())
    expected = torch_path(lambda own: theirs(own, lr=0.05, **options), params)
    assert_equal(our_path(ours(0.05, **options), params), expected, 1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e6])
def test_clipping_equals_clip_grad_norm(max_norm):
    """The norm is over all parameters together; the largest bound never binds."""
    params = start()
    norm = float(tree.norm(slopes(params)))
    assert 0.5 < norm < 1e6
    expected = torch_path(
        lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9), params, max_norm=max_norm
    )
    assert_equal(our_path(optim.clipped(optim.sgd(0.05, 0.9), max_norm), params), expected)


def test_clipping_is_per_client_under_vmap():
    """A client with a small gradient is not clipped because another's is large."""
    rule = optim.clipped(optim.sgd(1.0), 1.0)
    params = {"w": torch.zeros(2, 2)}
    grads = {"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}
    moved, _ = torch.vmap(lambda p, g: rule.step(p, g, ()))(params, grads)
    assert torch.allclose(moved["w"], torch.tensor([[-0.6, -0.8], [-0.3, -0.4]]), atol=1e-6)


def scheduled(make):
    rule = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plan, rates = make(rule), []
    for _ in range(12):
        rates.append(plan.get_last_lr()[0])
        rule.step()
        plan.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.exponential(0.7), lambda rule: torch.optim.lr_scheduler.ExponentialLR(rule, 0.7)),
        (optim.step_decay(3, 0.5), lambda rule: torch.optim.lr_scheduler.StepLR(rule, 3, 0.5)),
        (
            optim.steps_at((2, 5), 0.5),
            lambda rule: torch.optim.lr_scheduler.MultiStepLR(rule, [2, 5], 0.5),
        ),
        (optim.cosine(15), lambda rule: torch.optim.lr_scheduler.CosineAnnealingLR(rule, 15)),
        (optim.cosine(7), lambda rule: torch.optim.lr_scheduler.CosineAnnealingLR(rule, 7)),
    ],
)
def test_schedules_equal_torchs(ours, theirs):
    """The factor after t rounds is the scheduler's rate after t steps; past its end too."""
    for round, rate in enumerate(scheduled(theirs)):
        factor = float(ours(torch.tensor(float(round), dtype=torch.float64)))
        assert abs(factor - rate) < EXACT, round
