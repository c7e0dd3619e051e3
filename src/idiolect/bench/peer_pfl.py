"""apple/pfl-research (`pfl`) on a workload: its simulated backend, in this process."""

import os
import time
from typing import Any

import torch
from torch import nn

from idiolect.bench.random_images import federation
from idiolect.bench.workloads import Workload


def rounds(work: Workload, device: str, count: int) -> list[float]:
    """Return the seconds of each central iteration of its FederatedAveraging."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module
    from pfl.model.pytorch import PyTorchModel

    set_framework_module(pytorch_ops)
    fed = federation(work.sizes, work.shape)
    x = (torch.from_numpy(fed.dataset.x).float() - 127.5) / 127.5
    y = torch.from_numpy(fed.dataset.y)

    def user(number: int) -> Any:
        rows = fed.train[number]
        return PyTorchTensorDataset((x[rows].to(device), y[rows].to(device)))

    sampler = get_user_sampler("random", list(range(len(work.sizes))))
    data = FederatedDataset(user, sampler)
    network = _Scored(work.build())
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    clock = _clock()
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
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    seconds: list[float] = clock.seconds
    return seconds


class _Scored(nn.Module):
    """A network with the loss and metrics that pfl asks of it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.network(x)
        return logits

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        """Cross-entropy of a batch."""
        self.train(not eval)
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Any]:
        """Nothing: only training is compared."""
        return {}


def _clock() -> Any:
    from pfl.callback.base import TrainingProcessCallback
    from pfl.metrics import Metrics

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        """Note when each iteration is over."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._last = time.perf_counter()

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            """Wait for the device, then look at the clock."""
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = now
            return False, Metrics()

    return Clock()
