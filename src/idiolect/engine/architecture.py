"""Architectures: networks built under each run's seed, and checked against the data."""

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from idiolect.core import tree
from idiolect.core.batchnorm import check, masked
from idiolect.core.client import Network
from idiolect.core.method import Method, Setup
from idiolect.core.network import known
from idiolect.core.task import Task
from idiolect.data.dataset import Dataset
from idiolect.data.federation import TrainData
from idiolect.data.tokenisers import FILE, Tokeniser, refuse_other_tokeniser
from idiolect.engine.backend import TRAINING_ROOM, Backend, machine_memory
from idiolect.errors import ConfigError, IdiolectError, MethodError, ModelError, shortened
from idiolect.kernels.autotune import trial
from idiolect.kernels.beneath import clients_of_stack, stacked_gradient
from idiolect.kernels.recurrent import LAYERS
from idiolect.models.adapters import AdaptedNetwork
from idiolect.models.hf import HuggingFace

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class WordNetwork:
    """Builds a network that reads words; each run has a vocabulary of its own."""

    factory: Callable[..., nn.Module]
    words: tuple[str, ...]

    def __call__(self) -> nn.Module:
        """Build the network for these words."""
        return self.factory(words=self.words)


def bound(
    factory: Callable[..., nn.Module],
    shape: tuple[int, ...],
    classes: int,
    words: tuple[str, ...],
    options: Mapping[str, Any],
    blocks: Sequence[tuple[int, int]] = (),
) -> Build:
    """Bind a factory to the shape, the classes and, where it asks, words or categories of data."""
    asked = inspect.signature(factory).parameters
    if "blocks" in asked:
        options = {**options, "blocks": tuple(blocks)}
    build = functools.partial(factory, shape, classes, **options)
    if "words" not in asked:
        return build
    if not words and asked["words"].default is not inspect.Parameter.empty:
        return build
    if not words:
        raise ModelError(
            f"network {getattr(factory, '__name__', factory)} reads words, and the data holds "
            "none; choose text, or another network"
        )
    return WordNetwork(build, words)


class Architecture(NamedTuple):
    """A network and who runs it; `auxiliary` is the private second network of mutual learning."""

    main: Build
    auxiliary: Build | None = None
    clients: tuple[int, ...] | None = None  # None: everyone


def labels(architectures: Mapping[str, Architecture], clients: int) -> tuple[str, ...]:
    """Name each client's network; nothing where all run the same."""
    if len(architectures) == 1:
        return ()
    named = {n: label for label, own in architectures.items() for n in own.clients or ()}
    return tuple(named.get(n, "") for n in range(clients))


class BuiltNetworks(NamedTuple):
    """An architecture's networks; all runs share the first one's modules, not its parameters."""

    networks: Mapping[str, Network]
    setups: list[Setup]  # of each run
    unmappable: str  # why vmap cannot map it, or nothing
    stacked: bool  # whether they run many clients at once


def make(
    name: str,
    architecture: Architecture,
    seeds: Sequence[int],
    train_data: Sequence[TrainData],
    examples: Tensor,
    backend: Backend,
) -> BuiltNetworks:
    """Build an architecture under each run's seed, and try it on a few examples.

    Where clients run one by one the layers are torch's: quicker there, and a second opinion.
    """
    models = [
        build_modules(name, architecture, seed, held.dataset.words)
        for seed, held in zip(seeds, train_data, strict=True)
    ]
    for own in models[0].values():
        _refuse_other_tokens(own, train_data[0].dataset)
    unmappable = next(filter(None, map(mappable, models[0].values())), "")
    dataset = train_data[0].dataset

    def networks_of(stacked: bool) -> list[dict[str, Network]]:
        made = [_networks(own, backend, stacked, dataset.task) for own in models]
        return _placed(name, made, backend)

    stacked = backend.kind != "sequential" and not unmappable
    networks = networks_of(stacked)
    # On a GPU no kernel is chosen for these few examples, whose sizes no round has.
    with trial() if _on_gpu(examples) else contextlib.nullcontext():
        if stacked:
            doubtful = [networks[0][kind] for kind, own in models[0].items() if _doubtful(own)]
            unmappable = next(filter(None, (_tried_vmap(own, examples) for own in doubtful)), "")
            if unmappable:
                stacked, networks = False, networks_of(False)
        for network in networks[0].values():
            _try(name, network, examples, dataset)
        if stacked:
            foreign = [networks[0][kind] for kind, own in models[0].items() if _foreign(own)]
            unmappable = next(filter(None, (_tried_gradient(own, examples) for own in foreign)), "")
            if unmappable:
                stacked, networks = False, networks_of(False)
                for network in networks[0].values():
                    _try(name, network, examples, dataset)
        for network in networks[0].values():
            network.find_head(examples)
    setups = [
        _setup(own, held, seed, backend.place)._replace(features=networks[0]["main"].features)
        for own, held, seed in zip(networks, train_data, seeds, strict=True)
    ]
    return BuiltNetworks(networks[0], setups, unmappable, stacked)


def _on_gpu(examples: Tensor) -> bool:
    return examples.is_cuda


def _refuse_other_tokens(model: nn.Module, dataset: Dataset) -> None:
    """Refuse text that was coded otherwise than what the network's base was pretrained on."""
    folder = getattr(model, "folder", None) or getattr(model, "_folder", None)
    if dataset.words and folder is not None and (Path(folder) / FILE).is_file():
        base = Tokeniser.load(folder)
        refuse_other_tokeniser(dataset.tokeniser, base, dataset.name, f"the base {folder}")


def refuse_crowds(method: Method, setup: Setup) -> None:
    """Refuse a setting that asks for more models at once than this machine has memory for."""
    memory, weights = machine_memory(), tree.nbytes(setup.params)
    for spec in fields(method):
        count = getattr(method, spec.name) if spec.metadata.get("models") else 0
        if TRAINING_ROOM * count * weights > memory:
            raise ConfigError(
                f"{method.title}: {spec.name} is {count}, and so many models of {weights:,} bytes "
                f"are more than this machine's memory of {memory / 1e9:.0f} GB can train; "
                f"expected at most {int(memory / (TRAINING_ROOM * weights))}; lower it"
            )
    if isinstance(base := getattr(method, "base", None), Method):
        refuse_crowds(base, setup)


def refuse_unequal_states(method: Method, name: str, first: Setup, other: Setup) -> None:
    """A server state made of one architecture's parameters cannot serve another."""
    states = [
        {leaf: tuple(value.shape) for leaf, value in tree.named(state).items()}
        for state in (method.init_server(first), method.init_server(other))
    ]
    if states[0] != states[1]:
        leaf = sorted(set(states[0].items()) ^ set(states[1].items()))[0][0]
        raise MethodError(
            f"{method.title} shares {leaf!r} among all clients, but architecture {name!r} differs "
            f"from the first in it: {states[1].get(leaf, 'absent')}, not "
            f"{states[0].get(leaf, 'absent')}; give every client the same network (or, where "
            "features are shared, features of the same size), or use a method that exchanges "
            "predictions"
        )


def refuse_other_head(
    method: Method,
    name: str,
    architecture: Architecture,
    setup: Setup,
    dataset: Dataset,
    examples: Tensor,
) -> None:
    """Refuse a network that ends with another layer than those that the method takes for its head.

    These are the layers defined last, by their parameters' names alone.
    """
    count = getattr(method, "head_layers", 0)
    if getattr(method, "trains", "") == "head" and not getattr(method, "fb_names", ()):
        count = max(count, getattr(method, "fb_layers", 0))
    if not count:
        return
    model = build_modules(name, architecture, setup.seed, dataset.words)["main"]
    ran = _ran(model, examples)
    taken = list(dict.fromkeys(map(tree.layer_of, setup.params)))[-count:]
    # A layer that is never called may be used all the same: a bias beside tied weights, say.
    if taken[-1] in ran and ran[-1] not in taken:
        raise MethodError(
            f"{method.title} takes the layer{'s' * (count > 1)} defined last for the head, "
            f"{', '.join(map(repr, taken))}, but {ran[-1]!r} runs last; define it last in "
            "the module's __init__, with weights of its own"
        )


def blank(setup: Setup) -> Setup:
    """Move a setup to the meta device: states made of it have shapes, and take no memory.

    Newcomers may hold no public examples, so the number of these is one that suits any method.
    """
    nowhere = torch.device("meta")
    params, auxiliary, sizes = tree.to((setup.params, setup.auxiliary, setup.sizes), nowhere)
    return setup._replace(
        params=params, auxiliary=auxiliary, sizes=sizes, public=1 << 20, public_labels=True
    )


def build_modules(
    name: str, architecture: Architecture, seed: int, words: tuple[str, ...]
) -> dict[str, nn.Module]:
    """Build the modules under a seed, leaving torch's own random state alone."""
    builders = {"main": architecture.main}
    if architecture.auxiliary is not None:
        builders["auxiliary"] = architecture.auxiliary
    builders = {role: _with_words(build, words) for role, build in builders.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            models = {role: build() for role, build in builders.items()}
        except IdiolectError:
            raise
        except Exception as error:
            raise ModelError(
                f"network {name!r} cannot be built: {_words(error)}; check its options and whether "
                "it is meant for examples of this shape"
            ) from error
    for model in models.values():
        check(model)
    return models


def _with_words(build: Build, words: tuple[str, ...]) -> Build:
    """Give a network that reads words the run's own, also where an adapter is around it."""
    if isinstance(build, AdaptedNetwork):
        return replace(build, build=_with_words(build.build, words))
    return replace(build, words=words) if isinstance(build, WordNetwork) else build


def _networks(
    models: Mapping[str, nn.Module], backend: Backend, stacked: bool, task: Task
) -> dict[str, Network]:
    networks = {
        role: Network(model, backend.precision, stacked, task) for role, model in models.items()
    }
    return {"auxiliary": networks["main"], **networks}


def _placed(
    name: str, networks: list[dict[str, Network]], backend: Backend
) -> list[dict[str, Network]]:
    """Move networks to the device; runs share the first one's modules, so of others parameters."""
    _refuse_unequal_constants(name, networks)
    for network in networks[0].values():
        network.to(backend.place)
    for own in networks[1:]:
        for network in own.values():
            network.params = tree.to(network.params, backend.place)
    return networks


def _try(name: str, network: Network, examples: Tensor, dataset: Dataset) -> None:
    """Run a network on a few examples, so that a misfit is found before the first round."""
    shape, weight = tuple(examples.shape[1:]), torch.ones(len(examples), device=examples.device)
    classes = len(dataset.classes)
    places = dataset.y.shape[1:] if dataset.sequential else ()
    expected = (len(examples), *places, classes)
    devices = [examples.device] if examples.device.type == "cuda" else []
    for training in (False, True):
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), masked(weight):
                logits = network(network.params, examples.clone(), training)
        except Exception as error:
            raise ModelError(
                f"network {name!r} fails on examples of shape {shape}{_IN[training]}: "
                f"{_words(error)}; change the network, or the data"
            ) from error
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(
                f"network {name!r} returns {got} for {expected[0]} examples of "
                f"{_outputs(dataset)}{_IN[training]}, expected outputs of shape {expected}"
            )
        with torch.random.fork_rng(devices):
            fault = network.fault(examples, training)
        if fault:
            raise ModelError(f"network {name!r} {fault}")


_IN = {False: "", True: " in training mode"}


def _outputs(dataset: Dataset) -> str:
    """Say in words what a network is to return."""
    kind, width = dataset.task.kind, len(dataset.classes)
    if kind in ("classes", "labels"):
        return f"{width} {kind}"
    return f"task {dataset.task.title} ({width} output{'s' * (width > 1)})"


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _refuse_unequal_constants(name: str, made: Sequence[Mapping[str, Network]]) -> None:
    """Runs share one module, so what is not trained must not depend on the seed."""
    first = [network.constants for network in made[0].values()]
    for networks in made[1:]:
        for one, other in zip(first, networks.values(), strict=True):
            for leaf, value in other.constants.items():
                if not torch.equal(one[leaf], value):
                    raise ModelError(
                        f"architecture {name!r}: {leaf!r} is not trained, yet differs between the "
                        "seeds, which are trained together; make it the same for every seed, or "
                        "run the seeds one by one"
                    )


def _setup(
    networks: Mapping[str, Network], train_data: TrainData, seed: int, device: torch.device
) -> Setup:
    public = train_data.public
    sizes = torch.tensor([float(len(rows)) for rows in train_data.train], device=device)
    return Setup(
        networks["main"].params,
        networks["auxiliary"].params,
        sizes,
        len(train_data.dataset.classes),
        networks["main"].norms,
        networks["main"].statistics,
        0 if public is None else len(public),
        public is not None
        and public.classes == train_data.dataset.classes
        and public.task.kind == train_data.dataset.task.kind,
        seed,
        task=train_data.dataset.task,
    )


def _doubtful(model: nn.Module) -> bool:
    """Say whether only a trial tells if vmap can map a network.

    Recurrent layers may be called with packed sequences, which it cannot.
    """
    recurrent = any(isinstance(layer, _RECURRENT) for layer in model.modules())
    return isinstance(model, HuggingFace) or recurrent


def _tried_vmap(network: Network, examples: Tensor) -> str:
    """Return why vmap cannot map a network of somebody's, or an empty string: by trying."""
    few = examples[:2].expand(2, *examples[:2].shape)
    params = tree.map(lambda leaf: leaf.expand(2, *leaf.shape), network.params)

    def total(params: tree.Params, x: Tensor) -> Tensor:
        return network(params, x, training=True).sum()

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop", UserWarning)
            torch.vmap(torch.func.grad(total), randomness="different")(params, few)
    except Exception as error:
        return _one_by_one(error)
    return ""


def _tried_gradient(network: Network, examples: Tensor) -> str:
    """Return why somebody's module is not trained beneath vmap: it fails, or learns otherwise."""
    network = network.apart()
    few = examples[:2].expand(2, *examples[:2].shape).clone()
    params = tree.map(lambda leaf: leaf.expand(2, *leaf.shape).clone(), network.params)
    weight = torch.ones(len(examples[:2]), device=examples.device)
    devices = [examples.device] if examples.device.type == "cuda" else []

    def slopes(params: tree.Params, x: Tensor) -> tree.Params:
        held, trained = tree.split(params, network.statistics.__contains__)

        def total(at: tree.Params) -> tuple[Tensor, tree.Params]:
            given = {name: at[name] if name in at else held[name] for name in params}
            logits = network(given, x, training=True)
            return (logits * _unlike(logits)).sum(), {}

        clients = None if x.is_cuda or not tree.transformed() else clients_of_stack()
        if clients is not None:
            return stacked_gradient(total, trained, clients)[0]
        if tree.transformed():
            sloped: tree.Params = torch.func.grad(total, has_aux=True)(trained)[0]
            return sloped
        at = {name: leaf.requires_grad_() for name, leaf in trained.items()}
        found = torch.autograd.grad(total(at)[0], [*at.values()], allow_unused=True)
        return dict(zip(at, found, strict=True))

    try:
        with torch.random.fork_rng(devices), masked(weight):
            torch.vmap(lambda at, x: network(at, x, False), randomness="different")(params, few)
            found = torch.vmap(slopes, randomness="different")(params, few)
    except Exception as error:
        return _one_by_one(error)
    if network.draws:
        return ""
    try:
        with torch.enable_grad(), masked(weight):
            plain = slopes(tree.map(lambda leaf: leaf[0].clone(), params), few[0])
    except Exception:  # `_try` says what is wrong
        return ""
    # Some gradients are nothing but rounding: of a bias of attention's keys, say.
    sizes = [own.to_dense().abs().amax() for own in plain.values() if own is not None]
    whole = torch.stack(sizes).amax() if sizes else 0.0
    for name, own in plain.items():
        mine, least = found[name][0], torch.finfo(found[name].dtype).tiny
        own = torch.zeros_like(mine) if own is None else own.to_dense()
        if (mine - own).abs().amax() > 0.05 * own.abs().amax() + 1e-3 * whole + least:
            return (
                f"vmap takes another gradient of {name!r} than plain torch, as it does past hooks; "
                "its clients are trained one after the other"
            )
    return ""


def _unlike(logits: Tensor) -> Tensor:
    """Return a factor for each output, no two alike: the sum of shares, say, has no gradient."""
    count = logits[0].numel()
    return torch.linspace(-1, 2, count, device=logits.device).reshape(logits.shape[1:])


def _one_by_one(error: Exception) -> str:
    return (
        f"vmap cannot map it ({shortened(_words(error), 120)}); its clients are trained one "
        "after the other"
    )


def _ran(model: nn.Module, examples: Tensor) -> list[str]:
    """List the layers with parameters as they run; none where a base is frozen, or it fails."""
    if not all(own.requires_grad for own in model.parameters()):
        return []
    model = copy.deepcopy(model).to(examples.device).eval()
    names = {id(own): name for name, own in model.named_parameters()}
    ran: list[str] = []

    def any_in(layer: nn.Module) -> bool:
        return next(layer.parameters(), None) is not None

    def holds(layer: nn.Module) -> bool:
        below = (own for name, own in layer.named_children() if name != "parametrizations")
        return any_in(layer) and not any(map(any_in, below))

    for layer in model.modules():
        if holds(layer):
            name = tree.layer_of(names[id(next(layer.parameters()))])
            layer.register_forward_hook(lambda *_, name=name: ran.append(name))
    devices = [examples.device] if examples.device.type == "cuda" else []
    weight = torch.ones(len(examples), device=examples.device)
    with torch.random.fork_rng(devices), contextlib.suppress(Exception), masked(weight):
        model(examples.clone())
    return ran


def _foreign(model: nn.Module) -> bool:
    """Say whether there is somebody's code that only a trial tells of; of transformers it did."""
    return not (isinstance(model, HuggingFace) or all(map(known, model.modules())))


def mappable(model: nn.Module) -> str:
    """Return why vmap cannot map this network, or an empty string where it can."""
    for name, layer in model.named_modules():
        ours = LAYERS.get(type(layer))
        if isinstance(layer, _RECURRENT) and not (ours and ours.suits(layer)):
            return (
                f"layer {name!r} is {type(layer).__name__}, which torch cannot vmap; its clients "
                "are trained one after the other"
            )
    return ""
