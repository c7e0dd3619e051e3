"""Other frameworks on the same workload, where they are installed.

Each peer runs its own simulation of FedAvg, in one process unless it insists otherwise, and returns
the seconds of each round. Evaluation is left out: only training is compared.
"""

import functools
import itertools
import os
import time
from collections.abc import Callable
from importlib import metadata
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from idiolect.bench.workloads import Shape, Workload, federation, tensors, train

_ROUNDS = 4  # the first is not counted

Peer = Callable[[Workload, str, int], list[float]]


def time_peers(work: Workload, device: str) -> dict[str, dict[str, Any]]:
    """Time every peer on a workload, or return why not."""
    return {name: _timed(name, peer, work, device) for name, peer in PEERS.items()}


def _timed(name: str, peer: Peer, work: Workload, device: str) -> dict[str, Any]:
    found = version(name)
    if found is None:
        return {"why": "not installed"}
    if not work.has_loop:
        return {"why": "no such method there"}
    try:
        seconds = median(peer(work, device, _ROUNDS)[1:])
    except Exception as error:  # a peer's failure is not ours
        lines = str(error).strip().splitlines() or [""]
        return {"why": f"{found} failed: {type(error).__name__}: {lines[0]}"}
    return {"version": found, "ms": 1e3 * seconds, "samples_per_second": work.examples / seconds}


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# apple/pfl-research: its simulated backend, in this process.


def _pfl_rounds(work: Workload, device: str, count: int) -> list[float]:
    """Return the seconds of each central iteration of its FederatedAveraging."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    set_framework_module(pytorch_ops)
    users = tensors(federation(work.sizes, work.shape))

    def user(number: int) -> Any:
        return PyTorchTensorDataset(tuple(part.to(device) for part in users[number]))

    ends = [time.perf_counter()]

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        """Note when each iteration is over."""

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            """Wait for the device, then look at the clock."""
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            return False, Metrics()

    data = FederatedDataset(user, get_user_sampler("random", list(range(len(users)))))
    network = _PflModel(work.build())
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=count,
            evaluation_frequency=1 << 30,
            train_cohort_size=work.cohort or len(work.sizes),
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_num_epochs=work.method.epochs,
            local_learning_rate=work.method.lr,
            local_batch_size=work.method.batch,
        ),
        NNEvalHyperParams(local_batch_size=500),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return [end - start for start, end in itertools.pairwise(ends)]


class _PflModel(nn.Module):
    """A network with the loss and metrics that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.network(x)
        return logits

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        """Return the cross-entropy of a batch."""
        self.train(not eval)
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        """Return nothing: only training is compared."""
        return {}


# Flower: its simulation engine, with clients in Ray's processes.


def _flwr_rounds(work: Workload, device: str, count: int) -> list[float]:
    """Return the seconds of each round of its FedAvg, from sending to the new average."""
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    seconds: list[float] = []

    class Timed(FedAvg):  # type: ignore[misc]
        """Flower's FedAvg, which looks at the clock."""

        def configure_train(self, *given: Any, **named: Any) -> Any:
            """Note when a round begins."""
            self._began = time.perf_counter()
            return super().configure_train(*given, **named)

        def aggregate_train(self, *given: Any, **named: Any) -> Any:
            """Note how long a round took."""
            joined = super().aggregate_train(*given, **named)
            seconds.append(time.perf_counter() - self._began)
            return joined

    clients = len(work.sizes)
    cohort = work.cohort or clients
    strategy = Timed(
        fraction_train=cohort / clients,
        fraction_evaluate=0.0,
        min_train_nodes=cohort,
        min_available_nodes=clients,
    )
    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        start = ArrayRecord(work.build().state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=count)

    shares = {"num_cpus": 1, "num_gpus": 0.25 if device == "cuda" else 0.0}
    run_simulation(
        server_app=server,
        client_app=_flwr_client(work, device),
        num_supernodes=clients,
        backend_config={"client_resources": shares},
    )
    return seconds


def _flwr_client(work: Workload, device: str) -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def client(message: Any, context: Any) -> Any:
        x, y = _examples(work.sizes, work.shape)[int(context.node_config["partition-id"])]
        model = work.build().to(device).train()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())

        def batches() -> Any:
            return ((x[r], y[r]) for r in torch.split(torch.randperm(len(y)), work.method.batch))

        train(model, work.method, device, batches)
        arrays, count = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": len(y)})
        return Message(content=RecordDict({"arrays": arrays, "metrics": count}), reply_to=message)

    return app


@functools.lru_cache(maxsize=1)
def _examples(sizes: tuple[int, ...], shape: Shape) -> list[tuple[Tensor, Tensor]]:
    """Make the clients' examples, once in each of Ray's processes."""
    return tensors(federation(sizes, shape))


PEERS: dict[str, Peer] = {"pfl": _pfl_rounds, "flwr": _flwr_rounds}
