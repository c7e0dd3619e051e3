"""Coarser products on request: in the network alone, and only where they were asked for."""

import pytest
import torch
from torch import nn

from idiolect.bench.workloads import CLASSES, federation
from idiolect.core import tree
from idiolect.core.client import Network
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.errors import ConfigError
from idiolect.experiment.build import build_backend
from idiolect.experiment.load import parse_experiment
from idiolect.methods import METHODS, FedAvg

SHAPE = (1, 6, 6)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    )


def trained(method, kind="vectorised", precision="fp32", rounds=2):
    fed = federation([24, 17, 9], SHAPE, held_out=4)
    backend = Backend(kind, "cpu", width=3 if kind == "vectorised" else None, precision=precision)
    sim = Simulation(
        method, [SeededRun(0, fed.train_data)], {"a": Architecture(network)}, backend=backend
    )
    for _ in range(rounds):
        sim.advance()
    return sim, fed


def test_bfloat16_rounds_as_autocast_does():
    """Logits are those of torch's own autocast, given back in single precision."""
    torch.manual_seed(0)
    model, x = network().eval(), torch.randn(5, *SHAPE)
    own = Network(model, "bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    logits = own(own.params, x, training=False)
    assert expected.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert torch.equal(logits, expected.float())
    assert not torch.equal(logits, Network(model)(own.params, x, training=False))


@pytest.mark.parametrize("name", ["fedavg", "pfedme", "per-fedavg", "persfl", "fedbn"])
def test_bfloat16_is_near_and_state_stays_single(name):
    method = METHODS[name](batch=8, lr=0.05)
    (full, _), (half, fed) = trained(method), trained(method, precision="bf16")
    pairs = list(zip(tree.leaves(full.tree), tree.leaves(half.tree), strict=True))
    assert all(a.dtype == b.dtype for a, b in pairs)
    off = max(float((a - b).abs().max()) for a, b in pairs if a.is_floating_point())
    assert 0 < off < 0.05
    verdict = half.evaluate([fed.test_data])[0]
    assert 0 <= verdict.scores["personal"]["accuracy"].min()


def test_bfloat16_vectorised_agrees_with_sequential_up_to_its_own_rounding():
    """Sums of 8 bits differ by kernel, so the bound is bfloat16's, not single precision's."""
    method = FedAvg(batch=8, lr=0.05)
    sides = [trained(method, kind, "bf16")[0].states[0] for kind in ("vectorised", "sequential")]
    for name in sides[0]:
        assert torch.allclose(sides[0][name], sides[1][name], atol=2e-3), name


def test_a_second_simulation_leaves_the_first_its_precision():
    half, _ = trained(FedAvg(batch=8, lr=0.05), precision="bf16", rounds=1)
    trained(FedAvg(batch=8, lr=0.05), rounds=1)
    half.advance()
    straight, _ = trained(FedAvg(batch=8, lr=0.05), precision="bf16", rounds=2)
    for name, value in straight.states[0].items():
        assert torch.equal(value, half.states[0][name]), name


def test_the_file_says_so():
    text = 'name = "a"\n[data]\nsource = "embedded"\n[[methods]]\nname = "fedavg"\n'
    assert build_backend(parse_experiment(text, [], "here")).precision == "fp32"
    given = ["backend.precision=bf16", "backend.graph=false", "backend.device=cpu"]
    chosen = build_backend(parse_experiment(text, given, "here"))
    assert (chosen.precision, chosen.graph) == ("bf16", False)
    with pytest.raises(ConfigError, match="precision"):
        parse_experiment(text, ["backend.precision=fp8"], "here")


def test_what_a_device_lacks_is_refused():
    with pytest.raises(ConfigError, match="'tf32', which only CUDA devices have"):
        Backend(device="cpu", precision="tf32")
    with pytest.raises(ConfigError, match="precision is 'half', expected one of fp32, tf32, bf16"):
        Backend(precision="half")
