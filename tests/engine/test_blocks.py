"""Cutting a line of clients into blocks."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import worlds
from idiolect.engine import local_group
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.block_runner import PADDING, cut_blocks
from idiolect.engine.local_group import LocalGroup
from idiolect.engine.rounds import SeededRun, Simulation
from idiolect.methods import FedAvg

lengths = st.lists(st.integers(0, 60), min_size=1, max_size=40).map(lambda x: sorted(x)[::-1])


@given(lengths, st.integers(1, 45))
def test_blocks_cover_everyone_in_order_within_the_span(lengths, span):
    cuts = cut_blocks(lengths, span)
    assert [n for first, last in cuts for n in range(first, last)] == list(range(len(lengths)))
    assert all(1 <= last - first <= span for first, last in cuts)


@given(lengths)
def test_little_is_padded_or_many_blocks_were_made(lengths):
    """A block is as long as its first client; a client without examples still costs a step."""
    cuts = cut_blocks(lengths, len(lengths))
    real = [max(1, length) for length in lengths]
    planned = sum(real[first] * (last - first) for first, last in cuts)
    assert 1 - sum(real) / planned <= PADDING + 1e-9 or len(cuts) == 8


@pytest.mark.parametrize(
    ("lengths", "span", "expected"),
    [
        ([5, 5, 5, 5], 4, [(0, 4)]),  # alike: one block
        ([5, 5, 5, 5], 3, [(0, 3), (3, 4)]),  # as wide as allowed
        ([9, 9, 1, 1], 4, [(0, 2), (2, 4)]),  # 20 examples would be planned as 36
        ([10, 10, 10, 9], 4, [(0, 4)]),  # one place in forty is padding: not worth a block
        ([3, 0], 2, [(0, 1), (1, 2)]),
        ([3, 1, 0], 3, [(0, 1), (1, 3)]),  # without examples a client is as long as with one
        ([4, 3, 2], 1, [(0, 1), (1, 2), (2, 3)]),
        ([], 4, []),
    ],
)
def test_cuts_by_hand(lengths, span, expected):
    assert cut_blocks(lengths, span) == expected


def test_the_cut_is_the_best_for_its_number_of_blocks():
    """8 4 4 2 2 2: two blocks plan 8 + 20 = 28 of 22 real; three plan all of it exactly."""
    assert cut_blocks([8, 4, 4, 2, 2, 2], 6) == [(0, 1), (1, 3), (3, 6)]


def test_tiny_networks_run_in_one_block_and_larger_ones_by_length():
    """A step of a tiny network is all overhead, so that padding costs less than steps do."""
    lengths = [150, 100, 60, 30, 10, 5]
    light, heavy = (SimpleNamespace(_light=lambda _, own=own: own) for own in (True, False))
    assert LocalGroup._cuts(light, lengths, 6) == [(0, 6)]
    assert len(LocalGroup._cuts(heavy, lengths, 6)) > 1
    assert LocalGroup._cuts(light, lengths, 1) == cut_blocks(lengths, 1)


@pytest.mark.parametrize(
    ("rounds", "replays", "large", "blocks"),
    [
        (20, True, False, (3, 3)),
        (21, True, False, (6, 3)),
        (None, True, False, (6, 3)),
        (20, True, True, (6, 6)),  # padding would take long
        (20, False, False, (6, 6)),  # nothing is recorded
    ],
)
def test_what_is_done_a_few_times_is_cut_into_few_blocks(
    rounds, replays, large, blocks, monkeypatch
):
    """Training and scoring: to record a block takes longer than the padding that it saves."""
    monkeypatch.setattr(local_group, "_TINY", 0)
    monkeypatch.setattr(local_group, "_LARGE", 1 if large else 1 << 21)
    runs = [SeededRun(0, worlds.federation([2**n for n in range(9)], [0] * 9).train_data)]
    network = {"all": Architecture(worlds.Normed)}
    simulation = Simulation(FedAvg(), runs, network, backend=Backend(width=64), rounds=rounds)
    group = simulation.groups[0]
    group._replays = replays
    lengths = sorted((2**n for n in range(9)), reverse=True)
    found = [len(group._blocks(kind, lengths, 64, None)) for kind in ("step", "score")]
    assert tuple(found) == blocks


@pytest.mark.parametrize(
    ("device", "own", "form", "lengths", "light"),
    [
        ("cpu", 1999, (4, 4), [9, 3], True),
        ("cpu", 2000, (4, 4), [9, 3], False),
        ("cuda", 2000, (4,), [9, 3], True),
        ("cuda", 2000, (3, 4, 4), [9, 3], False),  # every weight is used at every place
        ("cuda", 1 << 20, (4,), [9] * 4, False),  # the same as one client of four times the size
        ("cuda", 2000, (4,), [1 << 22, 1], False),
        ("mps", 10, (4,), [9, 3], False),
    ],
)
def test_which_networks_are_light(device, own, form, lengths, light):
    pools = {"train": SimpleNamespace(x=torch.zeros(2, *form))}
    group = SimpleNamespace(device=torch.device(device), _own=own, _pools=pools)
    assert LocalGroup._light(group, lengths) is light
