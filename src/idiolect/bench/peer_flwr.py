"""Flower (`flwr`) on a workload: its simulation engine, with clients in Ray's processes."""

import functools
import time
from typing import Any

import torch
from torch import Tensor, nn

from idiolect.bench.random_images import federation
from idiolect.bench.workloads import Workload


def rounds(work: Workload, device: str, count: int) -> list[float]:
    """Return the seconds of each round of its FedAvg, from sending to the new average."""
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server = ServerApp()
    strategy = _strategy(work)

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        start = ArrayRecord(work.build().state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=count)

    shares = {"num_cpus": 1, "num_gpus": 0.25 if device == "cuda" else 0.0}
    run_simulation(
        server_app=server,
        client_app=_client(work, device),
        num_supernodes=len(work.sizes),
        backend_config={"client_resources": shares},
    )
    seconds: list[float] = strategy.seconds
    return seconds


def _client(work: Workload, device: str) -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        x, y = _examples(work.sizes, work.shape)[int(context.node_config["partition-id"])]
        model = work.build().to(device).train()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=work.method.lr)
        for _ in range(work.method.epochs):
            for rows in torch.split(torch.randperm(len(y)), work.method.batch):
                optimiser.zero_grad()
                loss = nn.functional.cross_entropy(model(x[rows].to(device)), y[rows].to(device))
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        told = {"arrays": ArrayRecord(model.state_dict())}
        weighed = MetricRecord({"num-examples": len(y)})
        return Message(content=RecordDict({**told, "metrics": weighed}), reply_to=message)

    return app


@functools.lru_cache(maxsize=1)
def _examples(sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Make the clients' examples, once in each of Ray's processes."""
    fed = federation(sizes, shape)
    x = (torch.from_numpy(fed.dataset.x).float() - 127.5) / 127.5
    y = torch.from_numpy(fed.dataset.y)
    return [(x[rows], y[rows]) for rows in fed.train]


def _strategy(work: Workload) -> Any:
    from flwr.serverapp.strategy import FedAvg

    class Timed(FedAvg):  # type: ignore[misc]
        """Flower's FedAvg, which looks at the clock."""

        seconds: list[float]

        def configure_train(self, *given: Any, **named: Any) -> Any:
            """Note when a round begins."""
            self._began = time.perf_counter()
            return super().configure_train(*given, **named)

        def aggregate_train(self, *given: Any, **named: Any) -> Any:
            """Note how long a round took."""
            joined = super().aggregate_train(*given, **named)
            self.seconds.append(time.perf_counter() - self._began)
            return joined

    clients = len(work.sizes)
    cohort = work.cohort or clients
    strategy = Timed(
        fraction_train=cohort / clients,
        fraction_evaluate=0.0,
        min_train_nodes=cohort,
        min_available_nodes=clients,
    )
    strategy.seconds = []
    return strategy
