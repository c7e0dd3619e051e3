"""Every method on adapters: the base stays as it was, is shared, and nothing of it is in any state.

The world is that of the laws, around a network whose first layer has LoRA and whose last is trained
as a whole; all other weights are frozen, one of them in a normalisation.
"""

import numpy as np
import pytest
import torch
from torch import nn

import idiolect
import worlds
from idiolect.core import tree
from idiolect.data import Dataset
from idiolect.methods import METHODS
from idiolect.models import MODELS
from idiolect.models.adapters import AdaptedNetwork, adapt_network
from idiolect.models.bases import find_base
from test_laws import TIGHT, ended, made, play

# Each stands for methods that hold models in a way of their own; the others run with the slow ones.
QUICK = ("fedavg", "ditto", "fedper", "scaffold", "pfedme", "perfedavg", "fedfomo", "fedrod")
QUICK = tuple(name for name in QUICK if name in METHODS)
every_method = pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.faults) for name in METHODS],
)


ADAPTED = AdaptedNetwork(worlds.Normed, idiolect.LoRA(rank=2, targets=("fc1",), head=True))


@every_method
def test_with_an_adapter_vectorised_equals_sequential(name, float64):
    options = {"build": ADAPTED, "auxiliary": worlds.Normed}
    if name == "fedbn":  # it keeps normalisations, so these have to be trained
        kept = idiolect.Last(targets=("norm", "fc2"))
        options["build"] = AdaptedNetwork(worlds.Normed, kept)
    stacked = play(name, **options)
    assert not worlds.differing(
        stacked, play(name, **options, kind="sequential", width=None), TIGHT
    )
    shapes = {tuple(leaf.shape[-2:]) for leaf in tree.leaves(stacked) if leaf.dim() > 1}
    if name not in ("fml", "pfml"):  # whose second network is trained as a whole
        assert (6, 4) not in shapes, "the frozen weight [6, 4] is in a state"


def test_seeds_share_the_base_and_draw_their_own_adapter(float64):
    world = worlds.with_public()
    both = worlds.simulation(made("fedavg"), [world, world], seeds=(0, 1), build=ADAPTED, cohort=3)
    ends = ended(both, [world.test_data] * 2)
    alone = [
        play("fedavg", world, build=ADAPTED)
        if seed == 0
        else ended(
            worlds.simulation(made("fedavg"), world, seeds=(1,), build=ADAPTED, cohort=3),
            [world.test_data],
        )
        for seed in (0, 1)
    ]
    for n, own in enumerate(alone):
        assert not worlds.differing(ends.deployed[n], own.deployed[0], TIGHT)


# Against PEFT, one client after the other, on the same batches.


def texts(sizes):
    """Draw texts of the embedded decoder's tokens, for clients of these sizes."""
    draw = np.random.default_rng(0)
    words = tuple(map(str, range(1024)))
    text = draw.integers(4, 1024, (sum(sizes), 9)).astype(np.int32)
    x, y = text[:, :-1].copy(), text[:, 1:].astype(np.int64)
    x[1, 5:], y[1, 4:] = 0, -1  # one is shorter
    rows = tuple(np.split(np.arange(len(x)), np.cumsum(sizes)[:-1]))
    none = (np.arange(0),) * len(sizes)
    return idiolect.Federation(Dataset("texts", x, y, words, words=words), rows, none, none)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in PEFT
def test_many_clients_at_once_are_peft_one_by_one_to_1e_5():
    """Three clients of 8, 5 and 2 texts, 3 epochs of full batches, SGD with momentum."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = MODELS["decoder"]((8,), 1024, tuple(map(str, range(1024))), weights="embedded")
    adapter = idiolect.LoRA(rank=4, alpha=8, targets=("q_proj", "v_proj"))
    start = adapt_network(base, adapter)
    world = texts((8, 5, 2))
    method = METHODS["local"](batch=8, epochs=3, lr=0.5, momentum=0.9)
    simulation = worlds.simulation(method, world, build=lambda: start)
    simulation.advance()
    found = tree.named(simulation.tree["personal"])

    bare = transformers.AutoModelForCausalLM.from_pretrained(
        find_base("embedded"), dtype=torch.float32
    )
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    other = peft.get_peft_model(bare, config).eval()
    trained = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): leaf
        for name, leaf in other.named_parameters()
        if leaf.requires_grad
    }
    began = {name: leaf.detach().clone() for name, leaf in start.named_parameters()}
    for client, rows in enumerate(world.train):
        with torch.no_grad():
            for name, leaf in trained.items():
                leaf.copy_(began[name])
        optimiser = torch.optim.SGD(trained.values(), lr=0.5, momentum=0.9)
        x = torch.from_numpy(np.array(world.dataset.x[rows])).long()
        y = torch.from_numpy(np.array(world.dataset.y[rows]))
        for _ in range(3):
            optimiser.zero_grad()
            logits = other(input_ids=x).logits
            nn.functional.cross_entropy(
                logits.flatten(0, 1), y.flatten(), ignore_index=-1
            ).backward()
            optimiser.step()
        moved = 0.0
        for name, leaf in trained.items():
            own = next(value for key, value in found.items() if key.endswith(name))[client]
            assert torch.allclose(own, leaf, rtol=1e-5, atol=1e-5), name
            moved = max(moved, float((leaf - began[name]).detach().abs().max()))
        assert moved > 1e-3, "nothing was trained"
