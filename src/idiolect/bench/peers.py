"""Other frameworks on the same workload, where they are installed.

Each adapter runs the peer's own simulation of FedAvg, in one process unless the peer insists, and
returns the seconds of each round. Evaluation is left out: only training is compared.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

from idiolect.bench import peer_flwr, peer_pfl
from idiolect.bench.about import version
from idiolect.bench.workloads import Workload

_ROUNDS = 4  # the first is not counted

Peer = Callable[[Workload, str, int], list[float]]


def beside(work: Workload, device: str) -> dict[str, dict[str, Any]]:
    """Time every peer on a workload, or say why not."""
    return {name: _timed(name, peer, work, device) for name, peer in PEERS.items()}


def _timed(name: str, peer: Peer, work: Workload, device: str) -> dict[str, Any]:
    found = version(name)
    if found is None:
        return {"why": "not installed"}
    if not work.in_turn:
        return {"why": "no such method there"}
    try:
        seconds = median(peer(work, device, _ROUNDS)[1:])
    except Exception as error:  # a peer's own trouble is no fault of ours
        lines = str(error).strip().splitlines() or [""]
        return {"why": f"{found} failed: {type(error).__name__}: {lines[0]}"}
    return {"version": found, "ms": 1e3 * seconds, "samples_per_second": work.examples / seconds}


PEERS: dict[str, Peer] = {"pfl": peer_pfl.rounds, "flwr": peer_flwr.rounds}
