"""Adapters of many clients on one frozen decoder: all at once, and as a loop over PEFT."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from idiolect.bench.measurements import Make, Measured, timed
from idiolect.core import tree
from idiolect.data import Dataset, Federation
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend, multiplying
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import FedAvg
from idiolect.models.adapters import AdaptedNetwork, LoRA
from idiolect.models.transformer import Decoder

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_PEFT = "peft loop"


@dataclass(frozen=True)
class AdapterWorkload:
    """LoRA of each client on a decoder that all share; a client's round is some steps of SGD."""

    clients: int = 100
    layers: int = 6
    width: int = 384
    heads: int = 6
    inner: int = 1024
    words: int = 4096
    tokens: int = 128
    batch: int = 4
    steps: int = 10
    rank: int = 8
    loop_clients: int = 3  # of loops, whose time is linear in them

    @property
    def about(self) -> str:
        """The workload in words."""
        return (
            f"FedAvg of LoRA (rank {self.rank} on attention's projections) on a frozen decoder, "
            f"{self.layers} layers of {self.width}, {self.words:,} tokens; {self.clients} clients, "
            f"{self.steps} steps of {self.batch} × {self.tokens} tokens each"
        )

    def tokens_of(self, clients: int) -> int:
        """Return how many tokens a round of so many clients trains on."""
        return clients * self.steps * self.batch * self.tokens

    def federation(self, clients: int) -> Federation:
        """Draw random texts: times do not depend on words."""
        draw, each = np.random.default_rng(0), self.steps * self.batch
        text = draw.integers(1, self.words, (clients * each, self.tokens + 1)).astype(np.int32)
        words = tuple(map(str, range(self.words)))
        x, y = text[:, :-1], text[:, 1:].astype(np.int64)
        rows = np.split(np.arange(len(text)), clients)
        none = (np.arange(0),) * clients
        return Federation(Dataset("random", x, y, words, words=words), tuple(rows), none, none)

    def base(self) -> Decoder:
        """Draw the frozen decoder."""
        return Decoder(
            (self.tokens,),
            self.words,
            range(self.words),  # type: ignore[arg-type]
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            inner=self.inner,
        )


def adapters(
    work: AdapterWorkload, device: str, precisions: tuple[str, ...], budget: float
) -> dict[str, Any]:
    """Time every side in every precision; return tokens a second, ratios and memory."""
    found: dict[str, Any] = {"about": work.about, "clients": work.clients, "precisions": {}}
    base = work.base()
    for precision in precisions:
        took = timed(_sides(work, base, device, precision), device, budget, share=3)
        found["precisions"][precision] = _row(work, took)
    return found


def _row(work: AdapterWorkload, took: dict[str, Measured]) -> dict[str, Any]:
    pace = {
        side: work.tokens_of(work.clients if side == "stacked" else work.loop_clients) / own.seconds
        for side, own in took.items()
    }
    slow = pace.get(_PEFT, pace["sequential"])
    return {
        side: {
            "tokens_per_second": pace[side],
            "ratio": pace[side] / slow,
            "peak_mib": own.peak_mib,
            "turns": own.turns,
        }
        for side, own in took.items()
    }


def _sides(
    work: AdapterWorkload, base: Decoder, device: str, precision: str
) -> Iterator[tuple[str, Make]]:
    few = work.federation(work.loop_clients)
    if _peft_at_hand():
        yield _PEFT, partial(_peft_loop, work, few, base, device, precision)
    alone = Backend("sequential", device, precision=precision)
    yield "sequential", lambda: simulate(work, few, base, alone).advance
    together = Backend(
        "vectorised", device, width=work.clients, precision=precision, kernels="first"
    )
    everyone = work.federation(work.clients)
    yield "stacked", lambda: simulate(work, everyone, base, together).advance


def simulate(
    work: AdapterWorkload, federation: Federation, base: Decoder, backend: Backend
) -> Simulation:
    """Make a simulation of the workload."""
    gc.collect()
    adapter = LoRA(rank=work.rank, alpha=2 * work.rank, targets=_PROJECTIONS)
    network = {"all": Architecture(AdaptedNetwork(lambda: base, adapter))}
    method = FedAvg(batch=work.batch, lr=0.01, epochs=1)
    runs = [SeededRun(0, federation.train_data)]
    return Simulation(method, runs, network, backend=backend)


def _peft_at_hand() -> bool:
    try:
        import_module("peft")
        import_module("transformers")
    except ImportError:
        return False
    return True


def _peft_loop(
    work: AdapterWorkload, federation: Federation, base: Decoder, device: str, precision: str
) -> Callable[[], None]:
    """Return a round as one writes it with PEFT: one adapter after the other, then the mean."""
    peft, transformers = import_module("peft"), import_module("transformers")
    config = transformers.LlamaConfig(**base.size.config("llama", work.words), use_cache=False)
    bare = transformers.LlamaForCausalLM(config)
    bare.load_state_dict(base.state_dict(), strict=False)
    half = precision == "bf16"
    wanted = peft.LoraConfig(
        r=work.rank, lora_alpha=2 * work.rank, target_modules=list(_PROJECTIONS), bias="none"
    )
    model = peft.get_peft_model(bare.to(torch.bfloat16 if half else torch.float32), wanted)
    model.to(device).train()
    trained = {name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad}
    state = {name: leaf.detach().clone() for name, leaf in trained.items()}
    dataset = federation.dataset
    x = torch.from_numpy(np.array(dataset.x)).long().to(device)
    y = torch.from_numpy(np.array(dataset.y)).to(device)

    def client(rows: np.ndarray) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for name, leaf in trained.items():
                leaf.copy_(state[name])
        optimiser = torch.optim.SGD(trained.values(), lr=0.01)
        for batch in torch.split(torch.from_numpy(rows).to(device), work.batch):
            optimiser.zero_grad()
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=half):
                logits = model(input_ids=x[batch]).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), y[batch].flatten()
            )
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return {name: leaf.detach().clone() for name, leaf in trained.items()}

    def turn() -> None:
        with multiplying(precision, torch.device(device)):
            reports = [client(rows) for rows in federation.train]
        state.update(tree.map(lambda *leaves: torch.stack(leaves).mean(0), *reports))

    return turn


def adapters_text(found: dict[str, Any]) -> Iterator[str]:
    """Write the figures as lines."""
    yield f"lora-100: {found['about']}"
    for precision, sides in found["precisions"].items():
        for side, own in sides.items():
            peak = "" if own["peak_mib"] is None else f"{own['peak_mib']:,.0f} MiB"
            pace = f"{own['tokens_per_second']:,.0f} tokens/s"
            yield f"  {precision:<6}{side:<12}{pace:>22}{own['ratio']:>8.2f}×{peak:>14}"
