"""A method of your own: FedAvg whose server remembers where it was going.

In an experiment file beside this one it is `name = "own_method:FedAvgM"`: see own_method.toml.
"""

from dataclasses import dataclass
from typing import NamedTuple

from idiolect.api import federation, fit
from idiolect.core import tree
from idiolect.core.method import Method, Report, Sent, mean_report, setting
from idiolect.core.tree import Params


class State(NamedTuple):
    """The global model, and the server's velocity."""

    params: Params
    velocity: Params


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Method):
    """Server momentum (Hsu et al. 2019)."""

    inertia: float = setting(0.5, "share of the last move that is kept", least=0, most=1)

    def init_server(self, setup):
        """Start at rest."""
        return State(setup.params, tree.zeros_like(setup.params))

    def send(self, state, cohort):
        """Send the model alone."""
        return Sent(shared=state.params)

    def client_step(self, sent, personal, local):
        """Train and report."""
        return Report(self.fit(local, sent.shared), local.size), personal

    def server_step(self, state, cohort, reports):
        """Move on along the average of the clients' moves."""
        move = tree.sub(mean_report(reports), state.params)
        velocity = tree.axpy(self.inertia, state.velocity, move)
        return State(tree.add(state.params, velocity), velocity)


if __name__ == "__main__":
    held = federation("embedded", partition="dirichlet", seed=0)
    result = fit(FedAvgM(lr=0.05), held, rounds=5)
    print(f"FedAvgM: {result.mean:.1%}")
