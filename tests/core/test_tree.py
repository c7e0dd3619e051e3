"""Trees of tensors: what comes back is what went in, and arithmetic that can be done by hand."""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from idiolect.core import tree
from idiolect.errors import CheckpointError, ConfigError, MethodError


class Point(NamedTuple):
    here: torch.Tensor
    params: dict


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def point():
    return Point(t(1, 2), {"fc.weight": t(3), "fc.bias": t(4, 5)})


@pytest.mark.parametrize(
    "one",
    [
        t(1, 2),
        (),
        {},
        {"a": t(1), "b": (t(2), {"c": t(3)})},
        point(),
        (point(), {"memory": ((), point())}),
    ],
)
def test_like_is_the_inverse_of_named(one):
    """Values come back in their places, whatever order the names come in."""
    named = tree.named(one)
    again = tree.like(tree.zeros_like(one), dict(reversed(list(named.items()))))
    assert type(again) is type(one)
    assert list(tree.named(again)) == list(named)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(one), strict=True))


def test_names_are_paths():
    assert list(tree.named((point(), [t(1)]))) == [
        "0.here",
        "0.params.fc.weight",
        "0.params.fc.bias",
        "1.0",
    ]
    assert list(tree.named(t(1))) == ["value"]


def test_like_tells_a_missing_and_a_foreign_name():
    with pytest.raises(CheckpointError, match=r"no value for 'here' \(1 of 3 missing\)"):
        tree.like(point(), {"params.fc.weight": t(3), "params.fc.bias": t(4)})
    with pytest.raises(CheckpointError, match="unknown value 'there'"):
        tree.like(point(), {**tree.named(point()), "there": t(1)})


def test_map_refuses_trees_of_another_form():
    with pytest.raises(ValueError):
        tree.add({"a": t(1)}, {"b": t(1)})


def test_arithmetic():
    """On x = (1, 2; 3; 4, 5) and y = 10 x: each result by hand."""
    x = point()
    y = tree.scale(10.0, x)
    assert y.params["fc.bias"].tolist() == [40, 50]
    assert tree.add(x, y).here.tolist() == [11, 22]
    assert tree.sub(x, y).here.tolist() == [-9, -18]
    for factor in (-0.5, t(-0.5)[0]):
        assert tree.axpy(factor, x, y).params["fc.bias"].tolist() == [38, 47.5]
    assert float(tree.dot(x, y)) == 10 * (1 + 4 + 9 + 16 + 25)
    assert float(tree.sqdist(x, y)) == 81 * 55
    assert float(tree.norm(tree.scale(2.0, x))) == pytest.approx((4 * 55) ** 0.5)
    assert tree.zeros_like(x).here.tolist() == [0, 0]
    assert tree.axpy(2.0, {}, {}) == tree.add({}, {}) == {}


def test_where_chooses_the_whole_tree_under_vmap():
    left, right = {"a": t(1, 2)}, {"a": t(3, 4)}
    chosen = torch.vmap(lambda yes: tree.where(yes, left, right))(torch.tensor([True, False]))
    assert chosen["a"].tolist() == [[1, 2], [3, 4]]


def test_pick_takes_another_row_for_each_under_vmap():
    """Three rows; the first of the block takes row 2, the second row 0."""
    rows = {"a": t(0, 1, 2), "b": torch.arange(6.0).reshape(3, 2)}
    assert tree.pick(rows, torch.tensor(1))["b"].tolist() == [2, 3]
    picked = torch.vmap(lambda row: tree.pick(rows, row))(torch.tensor([2, 0]))
    assert picked["a"].tolist() == [2, 0]
    assert picked["b"].tolist() == [[4, 5], [0, 1]]
    both = torch.vmap(tree.pick)(tree.stack([rows, tree.scale(10, rows)]), torch.tensor([1, 2]))
    assert both["a"].tolist() == [1, 20]


def test_mean_weighs_rows():
    """(1·2 + 3·6) / 4 = 5, and integers of weight mean the same."""
    rows = {"a": t(2, 6), "b": torch.tensor([[2.0, 0.0], [6.0, 4.0]])}
    for weight in (t(1, 3), torch.tensor([10.0, 30.0])):
        average = tree.mean(rows, weight)
        assert average["a"].item() == 5 and average["a"].dtype == torch.float64
        assert average["b"].tolist() == [5, 3]


def test_stacks():
    stacked = tree.stack([{"a": t(1, 2)}, {"a": t(3, 4)}])
    assert stacked["a"].tolist() == [[1, 2], [3, 4]]
    assert tree.concat([stacked, stacked])["a"].shape == (4, 2)
    assert tree.concat([stacked]) is stacked
    copies = tree.repeat({"a": t(1, 2)}, 3)
    assert copies["a"].tolist() == [[1, 2]] * 3
    copies["a"][0] = 9  # rows of their own, not views of one
    assert copies["a"][1].tolist() == [1, 2]


def test_put_is_the_inverse_of_take_and_leaves_the_rest():
    rows = {"a": t(0, 1, 2, 3)}
    places = torch.tensor([3, 1])
    assert tree.take(rows, places)["a"].tolist() == [3, 1]
    new = tree.put(rows, places, {"a": t(30, 10)})
    assert new["a"].tolist() == [0, 10, 2, 30]
    assert rows["a"].tolist() == [0, 1, 2, 3]


def test_split_parts_by_name():
    params = {"a.weight": t(1), "b.weight": t(2), "a.bias": t(3)}
    chosen, rest = tree.split(params, lambda name: name.startswith("a"))
    assert (list(chosen), list(rest)) == (["a.weight", "a.bias"], ["b.weight"])


@pytest.mark.parametrize(
    ("last", "head"),
    [(0, []), (1, ["fc.weight", "fc.bias"]), (2, ["norm.weight", "fc.weight", "fc.bias"])],
)
def test_split_layers_counts_layers_not_parameters(last, head):
    params = dict.fromkeys(["conv.0.weight", "norm.weight", "fc.weight", "fc.bias"], t(1))
    base, top = tree.split_layers(params, last)
    assert list(top) == head
    assert list(base) == [name for name in params if name not in head]


def test_split_layers_says_how_many_there_are():
    with pytest.raises(ConfigError, match="3 last layers asked for, but the network has 2"):
        tree.split_layers({"a.weight": t(1), "b.weight": t(1)}, 3)


def test_nbytes_counts_every_leaf_at_its_own_size():
    leaves = (t(1, 2), torch.zeros(3, dtype=torch.int8), torch.zeros(2, 2))
    assert tree.nbytes(leaves) == 2 * 8 + 3 * 1 + 4 * 4
    assert tree.nbytes(()) == 0


def test_unsound_rows_are_found_in_every_leaf():
    inf = float("inf")
    rows = {
        "a": t(0, inf, 0, 0, 0),
        "b": torch.tensor([[0.0, 0.0], [0, 0], [0, -inf], [0, 0], [float("nan"), 0]]),
        "c": torch.ones(5, 2, dtype=torch.int64),
        "d": torch.ones(5, 0),
    }
    nan = partial(tree.unsound_rows, finite=False)
    assert tree.unsound_rows(rows, finite=True).tolist() == [False, True, True, False, True]
    assert nan(rows).tolist() == [False] * 4 + [True]
    assert nan(rows["c"]).tolist() == [False] * 5
    assert nan(()) is None
    many = {**rows, **{f"m{n}": torch.ones(5, 2) for n in range(80)}}  # more than of a launch
    many["m7"][3, 1] = torch.nan
    assert nan(many).tolist() == [False, False, False, True, True]
    assert tree.unsound_rows(many, finite=True).tolist() == [False, True, True, True, True]


def test_whole_numbers_are_not_averaged_to_nothing():
    """The shares of a mean, cast to whole numbers, would all be 0."""
    with pytest.raises(MethodError, match=r"a leaf of torch\.int64 cannot be averaged"):
        tree.mean({"count": torch.tensor([3, 5])}, torch.tensor([1.0, 1.0]))


def test_dicts_of_tensors_go_the_short_way_to_the_same_end():
    """Parameters skip torch's pytree; nested trees, drifts and other names must not."""
    a, b = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}, {"b": ONE, "w": ONE}
    assert list(tree.map(torch.add, a, b)) == ["w", "b"]
    assert torch.equal(tree.map(torch.add, a, b)["w"], torch.tensor([2.0, 3.0]))
    assert torch.equal(tree.axpy(-2.0, b, a)["b"], torch.tensor(1.0))
    nested = tree.map(lambda leaf: leaf + 1, {"w": (ONE, {"v": ONE})})
    assert torch.equal(nested["w"][1]["v"], 2 * ONE)
    moved = tree.axpy(5.0, {"w": ONE, "m": tree.Drift(ONE)}, {"w": ONE, "m": ONE})
    assert (float(moved["w"]), float(moved["m"])) == (6.0, 2.0)
    assert tree.drifting({"m": tree.Drift(ONE)}) and not tree.drifting({"m": ONE})
    with pytest.raises(ValueError):
        tree.map(torch.add, {"w": ONE}, {"v": ONE})


ONE = torch.tensor(1.0)


def test_leaves_are_listed_as_torch_lists_them():
    """Dicts and tuples are gone through by ourselves; whatever else there is, by torch."""

    class Pair(NamedTuple):
        left: object
        right: object

    one, two, three, four = (torch.full((2,), float(n)) for n in range(4))
    for made in (
        one,
        (),
        {"b": one, "a": two},
        (one, {"x": (two, Pair(three, {"y": four}))}, ()),
        [one, {"x": two}],
        OrderedDict(b=one, a=two),
        {"none": None, "x": one},
        torch.Size((2, 3)),
    ):
        expected = pytree.tree_leaves(made)
        listed = tree.leaves(made)
        assert len(listed) == len(expected)
        assert all(left is right for left, right in zip(listed, expected, strict=True))


def test_steps_of_all_leaves_at_once_are_the_same_to_the_last_bit():
    """Alone or mapped, with a gradient or without; whole numbers go leaf by leaf."""
    draw = torch.Generator().manual_seed(0)
    one, other = ({"a": torch.randn(3, 5, generator=draw), "b": torch.randn(3, generator=draw)}
                  for _ in range(2))  # fmt: skip
    by_hand = {name: torch.add(one[name], other[name], alpha=-0.3) for name in one}
    assert tree.equal(tree.axpy(-0.3, other, one), by_hand)
    assert tree.equal(torch.vmap(lambda x, y: tree.axpy(-0.3, x, y))(other, one), by_hand)
    assert tree.equal(tree.add(one, other), {name: one[name] + other[name] for name in one})
    assert tree.equal(tree.sub(one, other), {name: one[name] - other[name] for name in one})
    at = {name: leaf.clone().requires_grad_() for name, leaf in one.items()}
    moved = tree.sqdist(tree.axpy(-0.3, at, other), other)
    slopes = torch.autograd.grad(moved, list(at.values()))
    for slope, leaf in zip(slopes, one.values(), strict=True):
        torch.testing.assert_close(slope, 2 * 0.09 * leaf)
    whole = {"n": torch.tensor([3, 4])}
    assert tree.add(whole, whole)["n"].tolist() == [6, 8]
    assert tree.sub(whole, whole)["n"].dtype == torch.int64
