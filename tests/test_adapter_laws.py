"""Every method on adapters: the base stays as it was, is shared, and nothing of it is in any state.

The world is that of the laws, around a network whose first layer has LoRA and whose last is trained
as a whole; all other weights are frozen, one of them in a normalisation.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import idiolect
import worlds
from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.private_mean import Private
from idiolect.core import tree
from idiolect.data import Dataset
from idiolect.data.tokenisers import Tokeniser
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


def texts(sizes, tokens=1024, length=8):
    """Draw texts, of the embedded decoder's tokens by default, for clients of these sizes."""
    draw = np.random.default_rng(0)
    words = tuple(map(str, range(tokens)))
    text = draw.integers(4, tokens, (sum(sizes), length + 1)).astype(np.int32)
    x, y = text[:, :-1].copy(), text[:, 1:].astype(np.int64)
    x[1, 5:], y[1, 4:] = 0, -1  # one is shorter
    rows = tuple(np.split(np.arange(len(x)), np.cumsum(sizes)[:-1]))
    none = (np.arange(0),) * len(sizes)
    coded = Tokeniser.load("embedded") if tokens == 1024 else None
    dataset = Dataset("texts", x, y, words, words=words, tokeniser=coded)
    return idiolect.Federation(dataset, rows, none, none)


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


OTHERS = {  # by hf: — one dense layer for query, key and value; a head of two layers
    "gpt2": (
        lambda t: t.GPT2Config(
            vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16, pad_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        "AutoModelForCausalLM", ("c_attn", "c_fc"), None,
    ),
    "roberta": (
        lambda t: t.RobertaConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24, pad_token_id=0, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        "AutoModelForSequenceClassification", ("query", "value"), ["classifier"],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in PEFT
@pytest.mark.parametrize("kind", OTHERS)
def test_networks_of_transformers_too_are_peft_one_by_one_to_1e_5(kind, tmp_path):
    """Next tokens of GPT-2, classes by RoBERTa with a new head; clients of 6, 4 and 2 texts."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config, task, targets, heads = OTHERS[kind]
    torch.manual_seed(0)
    maker = getattr(transformers, task)
    whole = maker.from_config(config(transformers))
    for held in whole.parameters():
        if held.dim() > 1:
            nn.init.normal_(held, std=0.2)
    whole.base_model.save_pretrained(tmp_path)
    world = texts((6, 4, 2), 64)
    classes = 64 if heads is None else 3
    if heads is not None:
        stars = np.arange(len(world.dataset.x)) % 3
        labelled = Dataset(
            "stars", world.dataset.x, stars, ("1", "2", "3"), words=world.dataset.words
        )
        world = idiolect.Federation(labelled, world.train, world.val, world.test)
    base = MODELS["hf"]((8,), classes, world.dataset.words, weights=str(tmp_path))
    start = adapt_network(base, idiolect.LoRA(rank=4, alpha=8, targets=targets))
    method = METHODS["local"](batch=8, epochs=3, lr=0.2, momentum=0.9)
    simulation = worlds.simulation(method, world, build=lambda: start)
    assert not simulation.notices, "it is mapped"
    simulation.advance()
    found = tree.named(simulation.tree["personal"])

    more = {} if heads is None else {"num_labels": 3}
    bare = maker.from_pretrained(tmp_path, dtype=torch.float32, **more)
    turned = {"fan_in_fan_out": kind == "gpt2"}
    given = {"r": 4, "lora_alpha": 8, "target_modules": list(targets), "modules_to_save": heads}
    other = peft.get_peft_model(bare, peft.LoraConfig(**given, **turned)).eval()
    trained = {
        name.removeprefix("base_model.model.")
        .replace(".default.weight", "")
        .replace("modules_to_save.default.", ""): leaf
        for name, leaf in other.named_parameters()
        if leaf.requires_grad
    }
    began = {
        name.removeprefix("network."): leaf.detach().clone()
        for name, leaf in start.named_parameters()
    }
    assert {f"network.{name}" for name in trained} == {name.partition(".")[2] for name in found}
    for client, rows in enumerate(world.train):
        with torch.no_grad():
            for name, leaf in trained.items():
                leaf.copy_(began[name])
        optimiser = torch.optim.SGD(trained.values(), lr=0.2, momentum=0.9)
        x = torch.from_numpy(np.array(world.dataset.x[rows])).long()
        y = torch.from_numpy(np.array(world.dataset.y[rows]))
        for _ in range(3):
            optimiser.zero_grad()
            logits = other(input_ids=x, attention_mask=(x != 0).long()).logits
            logits = logits.flatten(0, 1) if heads is None else logits
            nn.functional.cross_entropy(logits, y.flatten(), ignore_index=-1).backward()
            optimiser.step()
        for name, leaf in trained.items():
            own = next(value for key, value in found.items() if key.endswith(name))[client]
            assert torch.allclose(own, leaf, rtol=1e-5, atol=1e-5), name
        assert any(
            not torch.allclose(leaf, began[name], atol=1e-3) for name, leaf in trained.items()
        )


# Memory, and what is made private.


class Largest(TorchDispatchMode):
    """Notes the most numbers that any one operation returns, and what it was."""

    def __init__(self):
        super().__init__()
        self.most, self.what = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        held = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in out if isinstance(out, tuple | list) else (out,):
            # A view of what came in takes no memory.
            new = isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in held
            if new and one.numel() > self.most:
                self.most, self.what = one.numel(), str(func)
        return out


WORDS = tuple(map(str, range(16)))


def wide_decoder():
    return MODELS["decoder"]((4,), 16, WORDS, layers=1, width=128, heads=2, inner=256)


def wide_dense():
    return nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 128), nn.Linear(128, 3))


@pytest.mark.parametrize("kind", ["decoder", "dense"])
def test_memory_grows_with_adapters_and_activations_not_with_copies_of_the_base(kind):
    """The largest weight of the base has 32,768 numbers; no operation makes as many."""
    clients = 12
    if kind == "decoder":
        world, build = texts((2,) * clients, 16, 4), wide_decoder
    else:
        world, build = worlds.federation((2,) * clients, (1,) * clients), wide_dense
    adapter = idiolect.LoRA(rank=1, targets=("*",) if kind == "dense" else ())
    adapted = AdaptedNetwork(build, adapter)
    largest = max(leaf.numel() for leaf in build().parameters())
    assert largest == 32_768
    simulation = worlds.simulation(made("fedavg", batch=2), world, build=adapted)
    with Largest() as seen:
        simulation.advance()
    assert 0 < seen.most < largest, seen.what


@pytest.mark.filterwarnings("ignore")
def test_the_noise_that_hides_a_client_falls_on_adapters_alone(float64):
    """Noise of z · S on each number: its length grows with the root of how many there are.

    Nobody learns anything (a rate of nothing), so what the server moved by is noise.
    """
    world = worlds.with_public()

    def length(build):
        method = Aggregated(made("fedavg", lr=1e-12), Private(clip=1.0, noise=1.0, force=True))
        simulation = worlds.simulation(method, world, build=build)
        before = tree.named(simulation.tree["server"])
        simulation.advance()
        after = tree.named(simulation.tree["server"])
        moved = [after[n] - before[n] for n in before if n in after and before[n].dim() > 1]
        return sum(leaf.numel() for leaf in moved), float(sum((m**2).sum() for m in moved)) ** 0.5

    wide = lambda: MODELS["dnn"]((worlds.FEATURES,), worlds.CLASSES, hidden=400)  # noqa: E731
    whole, noise = length(wide)
    few, less = length(AdaptedNetwork(wide, idiolect.LoRA(rank=1, targets=("fc1",))))
    assert (whole, few) == (400 * 4 + 400 * 3, 4 + 400)
    assert less / noise == pytest.approx((few / whole) ** 0.5, rel=0.15)
