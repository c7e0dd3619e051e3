"""A method is settings and steps: what its client code would keep in itself is refused."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

import worlds
from idiolect.errors import MethodError
from idiolect.methods import FedAvg


@dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    """Trains more slowly with every call: with as many calls as there are clients, or blocks."""

    seen: dict[str, Any] = field(default_factory=dict)

    def client_step(self, sent, personal, local):
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        report, personal = super().client_step(sent, personal, local)
        return report._replace(size=local.size / self.seen["calls"]), personal


class OfTheClass(FedAvg):
    calls: ClassVar[list[int]] = []

    def client_step(self, sent, personal, local):
        self.calls.append(len(self.calls))
        return super().client_step(sent, personal, local)


class Later(FedAvg):
    """Makes a number at first, and counts in it from then on."""

    def client_step(self, sent, personal, local):
        object.__setattr__(self, "_calls", getattr(self, "_calls", 0) + 1)
        return super().client_step(sent, personal, local)


class Deploying(FedAvg):
    last: ClassVar[list[Any]] = []

    def deploy(self, sent, personal, local):
        self.last.append(local.size)
        return super().deploy(sent, personal, local)


class Caching(FedAvg):
    """What it makes once, of its settings alone, is no memory of clients."""

    def client_step(self, sent, personal, local):
        if not hasattr(self, "_table"):
            object.__setattr__(self, "_table", [self.lr**n for n in range(3)])
        return super().client_step(sent, personal, local)


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
@pytest.mark.parametrize(
    ("method", "name"),
    [(Counting, "seen"), (OfTheClass, "calls"), (Later, "_calls"), (Deploying, "last")],
)
def test_what_client_code_changes_in_its_method_is_refused(method, name, kind):
    world = worlds.federation()
    simulation = worlds.simulation(method(batch=3), world, kind=kind)
    with pytest.raises(MethodError, match=rf"changes its own '{name}' in client code"):
        for _ in range(2):
            simulation.advance()
        simulation.evaluate([world.test_data])


def test_what_it_makes_once_is_not():
    simulation = worlds.simulation(Caching(batch=3), worlds.federation())
    for _ in range(3):
        simulation.advance()
