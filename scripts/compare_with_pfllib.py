"""PFLlib's own code beside ours, on equal batches.

    python scripts/compare_with_pfllib.py CHECKOUT

Four clients of twenty embedded digits, one full batch each, two epochs, three rounds, the same
initial network: nothing is left to chance, so the personal models must give the same outputs up to
rounding, or one of the two differs. CHECKOUT is a clone of github.com/TsingZ0/PFLlib, whose code is
run as it is; figures on docs/reproduction/field.md are of d832e76. Needs scikit-learn.
"""

import contextlib
import copy
import importlib
import io
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import idiolect
from idiolect.core.method import Method
from idiolect.data.sources import load_embedded
from idiolect.methods import GPFL, FedDistill

CLIENTS, ROWS, TRAIN, EPOCHS, ROUNDS, RATE = 4, 25, 20, 2, 3, 0.1

# What PFLlib's servers and clients read from the command line; what a case changes is beside it.
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("client_drop_rate", "train_slow_rate", "send_slow_rate", "mu"), 0.0),
    **dict.fromkeys(("dlg_eval", "auto_break", "time_select", "random_join_ratio"), False),
    **dict.fromkeys(("few_shot", "num_new_clients", "fine_tuning_epoch_new"), 0),
    **dict.fromkeys(("join_ratio", "lamda", "beta", "alphaK", "sigma", "eta", "momentum"), 1.0),
    **dict.fromkeys(("dataset", "algorithm", "goal", "save_folder_name"), "none"),
    **{"device": "cpu", "num_classes": 10, "num_clients": CLIENTS, "batch_size": TRAIN},
    **{"global_rounds": ROUNDS - 1, "local_epochs": EPOCHS, "plocal_epochs": EPOCHS},
    **{"local_learning_rate": RATE, "p_learning_rate": 0.05, "K": 5, "alpha": 0.5},
    **{"learning_rate_decay": False, "learning_rate_decay_gamma": 1.0, "eval_gap": 10**6},
    **{"time_threthold": 1e9, "top_cnt": 1, "dlg_gap": 1, "batch_num_per_client": 1},
    **{"rand_percent": 100, "layer_idx": 2, "kl_weight": 50.0, "fine_tuning_epochs": 1},
}


class Network(nn.Module):
    """A network in PFLlib's form: its last layer is called fc."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(width, 12), nn.ReLU())
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc1(x))  # type: ignore[no-any-return]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Three classes of the embedded digits for each client, every seventh pixel."""
    data, draws = load_embedded(), np.random.default_rng(0)
    mine = [np.isin(data.y, (2 * client, 2 * client + 1, 9)) for client in range(CLIENTS)]
    rows = np.concatenate([draws.choice(np.flatnonzero(m), ROWS, replace=False) for m in mine])
    return (data.x[rows].reshape(len(rows), -1)[:, ::7] / 255).astype(np.float32), data.y[rows]


X, Y = digits()
torch.manual_seed(0)
START = Network(X.shape[1])


def outputs(network: Callable[[Tensor], Tensor], client: int) -> Tensor:
    with torch.no_grad():
        return network(torch.from_numpy(X[client * ROWS : (client + 1) * ROWS]))


def theirs(
    module: str,
    name: str,
    split: bool = False,
    before: Callable[[Any], None] = lambda server: None,
    **changes: Any,
) -> Any:
    """Train by a server of PFLlib's, `before` first; its evaluation and files are left out."""
    from flcore.trainmodel.models import BaseHeadSplit

    kind = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
    kind.save_results = kind.save_global_model = lambda self: None
    model: nn.Module = copy.deepcopy(START)
    if split:
        head, model.fc = model.fc, nn.Identity()
        model = BaseHeadSplit(model, copy.deepcopy(head))
    np.random.seed(0)
    random.seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        server = kind(types.SimpleNamespace(**{**ARGUMENTS, **changes}, model=model), 0)
        server.rs_test_acc, server.rs_test_acc_per = [0.0], [0.0]
        for one in ("evaluate", "evaluate_personalized", "evaluate_one_step"):
            setattr(server, one, lambda *_, **__: None)
        before(server)
        server.train()
    return server


def ours(method: str | type[Method], **settings: Any) -> Callable[[int], Tensor]:
    who = np.repeat(np.arange(CLIENTS), ROWS)
    share = TRAIN / ROWS
    held = idiolect.Federation.from_arrays(
        X, Y, who, split=(share, 0, 1 - share), normalise="none", ordered=True
    )
    settings |= {"lr": RATE, "batch": TRAIN, "epochs": EPOCHS}
    chosen = method if isinstance(method, str) else method(**settings)
    how: dict[str, Any] = {"rounds": ROUNDS, "device": "cpu", "model": lambda: copy.deepcopy(START)}
    how |= settings if isinstance(method, str) else {}
    result = idiolect.fit(chosen, held, **how)
    return lambda client: outputs(result.model(client), client)


def compare(what: str, pfllib: Callable[[int], Tensor], own: Callable[[int], Tensor]) -> None:
    gaps = [float((pfllib(client) - own(client)).abs().max()) for client in range(CLIENTS)]
    print(f"{what:58} {max(gaps):.0e}", flush=True)


def main() -> None:
    sys.path.insert(0, f"{sys.argv[1]}/system")
    for absent in ("h5py", "matplotlib", "matplotlib.pyplot"):  # for what is not used here
        sys.modules.setdefault(absent, types.ModuleType(absent))
    import flcore.clients.clientbase as client_base
    import flcore.servers.serverbase as server_base
    from utils import data_utils

    def read(_: str, client: int, is_train: bool = True, few_shot: int = 0) -> list[Any]:
        begin, end = client * ROWS + (0 if is_train else TRAIN), (client + 1) * ROWS
        rows = range(begin, end - (ROWS - TRAIN if is_train else 0))
        return [(torch.from_numpy(X[row]), torch.tensor(int(Y[row]))) for row in rows]

    for home in (data_utils, client_base, server_base):
        home.read_client_data = read
    cases()


def cases() -> None:
    print("largest difference of the outputs of personal models")
    server = theirs("serveravg", "FedAvg", split=True)
    compare("FedAvg", lambda c: outputs(server.global_model, c), ours("fedavg"))
    server = theirs("serverprox", "FedProx", mu=0.5)
    compare("FedProx", lambda c: outputs(server.global_model, c), ours("fedprox", pull=0.5))
    server = theirs("serverditto", "Ditto", mu=0.5)
    own = ours("ditto", pull=0.5, uniform=False)
    compare("Ditto", lambda c: outputs(server.clients[c].model_per, c), own)
    server = theirs("serverper", "FedPer", split=True)
    server.send_models()
    compare("FedPer", lambda c: outputs(server.clients[c].model, c), ours("fedper"))
    server = theirs("serverrep", "FedRep", split=True)
    server.send_models()
    own = ours("fedrep", head_epochs=EPOCHS)
    compare("FedRep", lambda c: outputs(server.clients[c].model, c), own)
    server = theirs("serverrod", "FedROD", split=True)
    server.send_models()

    def both_heads(client: int) -> Tensor:
        mine = server.clients[client]
        features = outputs(mine.model.base, client)
        return mine.model.head(features).detach() + mine.head(features).detach()

    compare("FedRoD", both_heads, ours("fedrod"))
    server = theirs("serverdbe", "FedDBE", split=True)
    server.send_models()

    def shifted(client: int) -> Tensor:
        mine = server.clients[client]
        features = outputs(mine.model.base, client)
        return mine.model.head(features + mine.client_mean).detach()  # type: ignore[no-any-return]

    compare("FedDBE", shifted, ours("feddbe"))
    guided()
    distilled()
    related()
    server = theirs("serverphp", "FedPHP", split=True, lamda=0.3, mu=0.6)
    own = ours("fedphp", share=0.3, kernels="fixed", keep=0.6, keep_rounds=ROUNDS - 1)
    compare("FedPHP: scored there", lambda c: outputs(server.clients[c].model, c), own)
    compare("FedPHP: inherited there", lambda c: outputs(server.clients[c].model_p, c), own)
    server = theirs("serverala", "FedALA")
    for client in server.clients:
        client.local_initialization(server.global_model)
    own = ours("fedala", share=1.0, start_epochs=10, tolerance=0.0)
    compare("FedALA, eleven passes at first", lambda c: outputs(server.clients[c].model, c), own)
    own = ours("fedbabu", tune_epochs=1, tune_lr=RATE)
    server = theirs("serverbabu", "FedBABU", split=True)
    compare("FedBABU as it is", lambda c: outputs(server.clients[c].model, c), own)
    server = theirs("serverbabu", "FedBABU", split=True, fine_tuning_epochs=0)
    server.send_models()
    for client in server.clients:
        client.fine_tuning_epochs = 1
        client.fine_tune()
    compare("FedBABU, tuned from the average", lambda c: outputs(server.clients[c].model, c), own)
    server = theirs("serveramp", "FedAMP", sigma=10.0)
    own = ours("fedamp", pull=1.0, share=0.1, sigma=10.0)
    compare("FedAMP", lambda c: outputs(server.clients[c].model, c), own)
    compare(
        "FedAMP there, Local here", lambda c: outputs(server.clients[c].model, c), ours("local")
    )
    server = theirs("serverapfl", "APFL")
    own = ours("apfl", weight_lr=RATE)
    compare("APFL", lambda c: outputs(server.clients[c].model_per, c), own)
    server = theirs("serverpFedMe", "pFedMe", lamda=15.0)
    server.send_models()

    def scored(client: int) -> Tensor:
        mine = copy.deepcopy(START)
        held = server.clients[client].personalized_params
        for leaf, given in zip(mine.parameters(), held, strict=True):
            leaf.data = given.data.clone()
        return outputs(mine, client)

    own = ours("pfedme", pull=15.0, inner_lr=0.05, weight_decay=0.001)
    compare("pFedMe", scored, own)
    compare(
        "pFedMe: scored there, its global model", scored, lambda c: outputs(server.global_model, c)
    )


def distilled() -> None:
    """FedDistill: with its loss of today, and with the two that it had before."""
    losses = {
        "": functional.cross_entropy,
        ", softmax of the mean": lambda out, to: functional.cross_entropy(out, to.softmax(-1)),
        ", squared error": functional.mse_loss,
    }
    for told, loss in losses.items():

        def changed(server: Any, loss: Callable[..., Tensor] = loss) -> None:
            for client in server.clients:
                client.loss = lambda out, to: (
                    loss if to.is_floating_point() else functional.cross_entropy
                )(out, to)

        server = theirs("serverfd", "FD", before=changed, lamda=0.5)
        distance = "squared" if "squared" in told else "entropy"
        same = {"average": "logits", "leave_out": False, "pull": 0.5, "distance": distance}
        own = ours(FedDistill, **same)
        compare(f"FedDistill{told}", lambda c, s=server: outputs(s.clients[c].model, c), own)


def related() -> None:
    """APPLE: as it is, and with the core models that were sent, trained, and kept."""

    def kept(server: Any) -> None:
        for client in server.clients:

            def train(number: int, client: Any = client, plain: Any = client.train) -> None:
                client.model_cs = copy.deepcopy(client.model_cs)
                client.model_c = client.model_cs[client.id]
                plain(number)
                client.aggregate_parameters()
                client.model_c = client.model_cs[client.id]

            client.train = train

    own = ours("apple", weight_lr=0.0, scale_lr=True)
    for told, before in (("", lambda server: None), (", core models kept", kept)):
        server = theirs("serverapple", "APPLE", before=before, dr_learning_rate=0.0, L=1.0)
        compare(f"APPLE{told}", lambda c, s=server: outputs(s.clients[c].model, c), own)


def guided() -> None:
    """GPFL: embeddings and valve, which both draw, start as PFLlib drew them."""
    server = theirs("servergpfl", "GPFL", split=True, lamda=0.3, mu=0.2)
    valve = server.args.CoV
    start = {"gpfl.embeddings": server.args.GCE.embedding.weight.detach().clone()}
    for part, net in (("gamma", valve.Conditional_gamma), ("beta", valve.Conditional_beta)):
        for name, leaf in zip(("weight", "bias", "scale", "shift"), net.parameters(), strict=True):
            start[f"gpfl.{part}.{name}"] = leaf.detach().clone()

    class Started(GPFL):
        def init_server(self, setup: Any) -> Any:
            return {**super().init_server(setup), **start}

    def personal(client: int) -> Tensor:
        mine = server.clients[client]
        features = outputs(mine.model.base, client)
        made = mine.CoV(features, mine.personalized_conditional_input)
        return mine.model.head(made).detach()  # type: ignore[no-any-return]

    same = {"guide": 0.3, "extra_decay": 0.2}
    compare("GPFL", personal, ours(Started, **same))
    compare("GPFL, c of trained embeddings", personal, ours(Started, conditions="trained", **same))
    compare("GPFL, one norm of the batch", personal, ours(Started, distance="batch", **same))
    both = ours(Started, conditions="trained", distance="batch", **same)
    compare("GPFL, as released: both", personal, both)


if __name__ == "__main__":
    main()
