"""Training alone, by hand."""

import torch

from idiolect.core.method import Sent
from idiolect.engine.architecture import Architecture
from idiolect.engine.rounds import Traffic
from idiolect.methods import LocalOnly
from methods.tiny import (
    HIGH,
    LN9,
    Line,
    alike,
    client,
    close,
    line,
    pair,
    refuses,
    setup,
    simulation,
)


def test_two_rounds_by_hand() -> None:
    """The own model goes on from round to round: (0, 0) → HIGH → 1.2 HIGH, as in FedAvg's test."""
    method = LocalOnly(lr=0.4 * LN9)
    own = method.init_personal(setup(Line()))
    reports = []
    for number in range(2):
        report, own = method.client_step(Sent(), own, client(round=number))
        reports.append(report)
    assert pair(own) == close((1.2 * HIGH[0], 1.2 * HIGH[1]))
    assert reports == [(), ()]


def test_the_server_holds_and_sends_nothing() -> None:
    method = LocalOnly()
    assert method.init_server(setup(Line())) == ()
    assert method.send((), torch.tensor([0])) == Sent()
    assert method.server_step((), torch.tensor([0]), ()) == ()
    own = line(HIGH)
    assert method.deploy(Sent(), own, client()) is own
    assert method.models(Sent(), own) == {"personal": own}


def test_nothing_crosses_the_network() -> None:
    world = simulation(LocalOnly(), [[(2.0, 1)], [(-1.0, 0)]], Architecture(Line))
    assert world.advance().traffic == [Traffic(2, 0, 0)]


def test_a_client_does_not_feel_the_others() -> None:
    """Client 0 ends alike whoever sits beside it."""
    ends = []
    for other in ([(-1.0, 0)], [(5.0, 1), (4.0, 0)]):
        world = simulation(LocalOnly(lr=0.5, batch=1), [[(2.0, 1)], other], Architecture(Line))
        for _ in range(3):
            world.advance()
        ends.append({name: leaf[0] for name, leaf in world.tree["personal"][0].items()})
    assert alike(*ends)
    assert float(ends[0]["w"]) > 0


def test_a_newcomer_trains_alone() -> None:
    """One pass from the initial model: (0, 0) → HIGH."""
    method = LocalOnly(lr=0.4 * LN9, newcomer_epochs=1)
    assert pair(method.adapt(Sent(), line((0, 0)), client())) == close(HIGH)


def test_settings_out_of_range_are_refused() -> None:
    refuses(LocalOnly, "lr", 0.0, "above 0")
