"""The three verbs that touch data, on worlds small enough to do in the head."""

import numpy as np
import pytest
import torch
from torch import nn

from idiolect.core import losses, optim, tree
from idiolect.core.batchnorm import BatchNorm
from idiolect.core.client import Local, Network, Pool, Request
from idiolect.engine.batch_plan import BatchPlanner, ClientRows
from idiolect.errors import MethodError

CPU = torch.device("cpu")


class Scale(nn.Module):
    """Logits (0, w·x): one weight, no more."""

    def __init__(self, weight=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(weight)))

    def forward(self, x):
        return torch.stack([torch.zeros_like(x), self.weight * x], -1)


def world(sizes, labels=None):
    """Client n holds examples x = 10n + 1, 10n + 2, ...; all of class 1 unless told."""
    x = torch.tensor([10.0 * n + i + 1 for n, size in enumerate(sizes) for i in range(size)])
    y = torch.ones(len(x), dtype=torch.int64) if labels is None else torch.tensor(labels)
    pool = Pool(x, y)
    ends = np.cumsum([0, *sizes])
    members = []
    for n in range(len(sizes)):
        rows = np.arange(ends[n], ends[n + 1])
        members.append(ClientRows(0, n, {"train": rows, "val": rows, "public": np.arange(len(x))}))
    book = BatchPlanner({"train": pool, "val": pool, "public": pool}, CPU)
    book.turn(members, 0)
    return book


def each_client(book, count, fn, stacked):
    """Run fn(local) for every client, mapped or one by one, and stack the results."""
    networks = {"main": Network(Scale())}

    def client(slot):
        size, round = torch.tensor(1.0), torch.tensor(0.0)
        return fn(Local(networks, book, slot, size, round, stacked))

    slots = torch.arange(count)
    if stacked:
        return torch.vmap(client)(slots)
    return torch.stack([client(slot) for slot in slots])


both_ways = pytest.mark.parametrize("stacked", [False, True])


@both_ways
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_scan_folds_over_real_examples_only(stacked, batch):
    """Sums: 1 + 2 + 3 = 6, 11, and nothing: the carry of a client without data is untouched.

    The step adds 100 a time as well, so a step of padding alone would show.
    """

    def fn(local):
        def step(carry, now):
            return carry + (now.x * now.weight).sum() + 100

        return local.scan(step, torch.tensor(0.5), batch=batch, epochs=2)

    steps = [2 * -(-3 // batch), 2, 0]
    expected = [0.5 + 2 * total + 100 * n for total, n in zip((6, 11, 0), steps, strict=True)]
    assert each_client(world([3, 1, 0]), 3, fn, stacked).tolist() == expected


@both_ways
def test_scan_takes_so_many_steps(stacked):
    """Four steps for whoever has data, however many examples that takes."""
    count = lambda local: local.scan(lambda n, _: n + 1, torch.tensor(0), batch=2, steps=4)  # noqa: E731
    assert each_client(world([5, 1, 0]), 3, count, stacked).tolist() == [4, 4, 0]


@both_ways
@pytest.mark.parametrize("batch", [1, 2, 500])
def test_mean_weighs_examples_not_batches(stacked, batch):
    """Means 2 of (1, 2, 3), 11.5 of (11, 12); no example has no mean."""

    def fn(local):
        return local.mean(lambda now: losses.weighted_mean(now.x, now.weight), batch=batch)

    got = each_client(world([3, 2, 0]), 3, fn, stacked)
    assert got[:2].tolist() == pytest.approx([2, 11.5])
    assert got[2].isnan()


@both_ways
@pytest.mark.parametrize("batch", [2, 3, 500])
def test_rows_gives_one_row_for_every_public_example_in_order(stacked, batch):
    fn = lambda local: local.rows(lambda now: now.x, batch=batch)  # noqa: E731
    got = each_client(world([3, 2]), 2, fn, stacked)
    assert got.tolist() == [[1, 2, 3, 11, 12]] * 2


@both_ways
def test_fit_takes_gradient_steps(stacked):
    """One example x = 1 of class 1 at w = 0: p = ½, so w becomes lr · ½; then p = σ(lr/2)."""

    def fn(local):
        rule = optim.sgd(0.2)
        start = {"weight": torch.tensor(0.0)}
        return local.fit(local.loss, start, rule, batch=1, epochs=2)["weight"]

    got = each_client(world([1]), 1, fn, stacked)
    expected = 0.1 + 0.2 * (1 - torch.sigmoid(torch.tensor(0.1)))
    assert torch.allclose(got[0], expected)


@both_ways
def test_the_gradient_ignores_padding_and_what_is_unused(stacked):
    """At w = 0 with labels 1, 0: ½ (−½ · 1 + ½ · 2) = ¼, in a batch of seven places."""

    def fn(local):
        def step(carry, batch):
            loss = lambda params, batch: local.loss({"weight": params["weight"]}, batch)  # noqa: E731
            at = {"weight": torch.tensor(0.0), "unused": torch.ones(2)}
            slope = local.gradient(loss, at, batch)
            return carry + torch.cat([slope["weight"].reshape(1), slope["unused"]])

        return local.scan(step, torch.zeros(3), batch=7)

    got = each_client(world([2], labels=[1, 0]), 1, fn, stacked)
    assert got.tolist() == [[0.25, 0, 0]]


@both_ways
def test_each_shows_all_rows_the_same_batches(stacked):
    """Two factors on one fold: results are exactly proportional, and the next call draws anew."""

    def fold(local, factor):
        # The order matters: each x is weighed by the steps before it.
        def step(carry, batch):
            total, count = carry
            return total + factor * count * (batch.x * batch.weight).sum(), count + 1

        return local.scan(step, (torch.tensor(0.0), torch.tensor(1.0)), batch=1)[0]

    def fn(local):
        factors = local.numbers([1.0, 3.0])
        rows = local.each(lambda factor: fold(local, factor), factors)
        return torch.cat([rows, fold(local, 1.0).reshape(1)])

    (got,) = each_client(world([9]), 1, fn, stacked)
    assert got[1] == 3 * got[0] and got[2] != got[0]


@both_ways
def test_accuracy_and_networks(stacked):
    """At w = 1 positive x is class 1; three of four labels agree."""

    def fn(local):
        return local.mean(lambda batch: local.accuracy({"weight": torch.tensor(1.0)}, batch))

    assert each_client(world([4], labels=[1, 1, 0, 1]), 1, fn, stacked).tolist() == [0.75]


def test_batches_say_whether_they_are_for_training_and_where_they_lie():
    local = Local({"main": Network(Scale())}, world([2]), torch.tensor(0), None, None, False)
    seen = []
    local.scan(lambda carry, batch: seen.append(batch), (), batch=2)
    local.mean(lambda batch: seen.append(batch) or torch.zeros(()))
    assert [batch.training for batch in seen] == [True, False]
    assert sorted(seen[0].row.tolist()) == [0, 1]


def test_shuffled_calls_are_numbered_and_constant_ones_are_not():
    asked = []

    class Recording:
        def ask(self, request):
            asked.append(request)
            return pages.ask(request)

    pages = world([2])
    local = Local({}, Recording(), torch.tensor(0), None, None, False)
    for _ in range(2):
        local.scan(lambda carry, batch: carry, (), batch=2)
        local.mean(lambda batch: torch.zeros(()))
    assert asked == [
        Request("train", 2, 1, 0, True, 0),
        Request("val", 500, 1, 0, False, 0),
        Request("train", 2, 1, 0, True, 1),
        Request("val", 500, 1, 0, False, 0),
    ]


@pytest.mark.parametrize("span", [2, 3, 100])
def test_batches_taken_several_at_a_time_are_those_taken_one_by_one(span, monkeypatch):
    """On a GPU examples are decoded for many steps at once; here 7 steps in pieces of `span`."""

    def seen(local):
        return local.scan(
            lambda carry, batch: 0.5 * carry + (batch.x * batch.weight * batch.row).sum(),
            torch.zeros(()),
            batch=2,
        )

    one_by_one = each_client(world([13, 6, 1]), 3, seen, True)
    monkeypatch.setattr("idiolect.core.client._span", lambda plan: span)
    assert torch.equal(each_client(world([13, 6, 1]), 3, seen, True), one_by_one)


@both_ways
def test_a_share_is_a_fixed_subset_of_a_clients_own_examples(stacked):
    """Of 10, 5, 1 and 0 examples 80 % are 8, 4, 1 (never none) and none; twice over, the same.

    The step notes the examples' bits: a subset seen in two epochs sums to twice its own bits.
    """

    def fn(local):
        def step(carry, now):
            seen, steps = carry
            bits = 2.0 ** ((now.x.to(torch.int64) - 1) % 10).to(torch.float32)
            return seen + (bits * now.weight).sum(), steps + 1

        start = (torch.tensor(0.0), torch.tensor(0.0))
        first = local.scan(step, start, batch=4, epochs=2, share=0.8)
        again = local.scan(step, start, batch=4, epochs=2, share=0.8)
        return torch.stack([*first, *again])

    planner = world([10, 5, 1, 0])
    found = each_client(planner, 4, fn, stacked)
    for column in (0, 2):
        bits = (found[:, column] / 2).tolist()
        assert [bin(int(own)).count("1") for own in bits] == [8, 4, 1, 0]
        assert all(own == int(own) for own in bits)
    assert found[:, 1].tolist() == found[:, 3].tolist() == [4, 2, 2, 0]
    assert found[0, 0] != found[0, 2]  # each call draws a subset of its own
    assert torch.equal(found, each_client(planner, 4, fn, not stacked))
    planner.turn(planner._members, 1)
    assert each_client(planner, 4, fn, stacked)[0, 0] != found[0, 0]  # and so does each round


def test_fit_on_a_share_takes_the_steps_of_that_share():
    """One step a batch of 1, at slope −x/2 and rate 1: w = Σ x / 2 over 2 of the 3 examples."""

    def fn(local):
        def loss(params, batch):
            return -(params["weight"] * batch.x * batch.weight).sum() / 2

        start = {"weight": torch.tensor(0.0)}
        return local.fit(loss, start, optim.sgd(1.0), batch=1, share=0.7)["weight"]

    found = each_client(world([3]), 1, fn, stacked=True)
    assert found.item() in (1.5, 2.0, 2.5)  # (1 + 2) / 2, (1 + 3) / 2, (2 + 3) / 2


@pytest.mark.parametrize(("share", "stream"), [(0.0, "train"), (1.5, "train"), (0.5, "public")])
def test_a_share_that_makes_no_sense_is_refused(share, stream):
    def fn(local):
        return local.scan(lambda carry, now: carry, torch.zeros(()), stream, batch=1, share=share)

    with pytest.raises(MethodError, match=r"above 0 and at most 1; of public .* take a sample"):
        each_client(world([3]), 1, fn, stacked=False)


class Normed(nn.Module):
    """Batch normalisation before the head."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = BatchNorm(1), nn.Linear(1, 2)

    def forward(self, x):
        return self.out(self.norm(x.unsqueeze(-1)))


@both_ways
def test_a_loss_by_features_and_head_has_the_gradient_of_the_loss_by_logits(stacked):
    """Padding and batch normalisation included: parameters and running statistics move alike."""
    torch.manual_seed(0)
    networks = {"main": Network(Normed())}

    def client(slot):
        local = Local(networks, planner, slot, torch.tensor(1.0), torch.tensor(0.0), stacked)

        def parted(params, batch):
            given = (batch.training, "main", batch.weight)
            features = local.features(params, batch.x, *given)
            return losses.cross_entropy(local.head(params, features, *given), batch.y, batch.weight)

        def fitted(loss):
            local.restart()
            return local.fit(loss, networks["main"].params, optim.sgd(0.1), batch=3, epochs=2)

        return fitted(parted), fitted(local.loss)

    planner = world([4, 2], [0, 1, 0, 1, 1, 0])
    slots = torch.arange(2)
    if stacked:
        found = torch.vmap(client)(slots)
    else:
        found = tree.stack([client(slot) for slot in slots])
    assert tree.norm(tree.sub(*found)) < 1e-5
    assert tree.norm(tree.sub(found[0], tree.repeat(networks["main"].params, 2))) > 0.1


@both_ways
def test_gradients_where_autograd_is_switched_off(stacked):
    """A method may have switched it off for all that it does: gradients are not zeros then."""

    def fn(local):
        def step(at, batch):
            return tree.axpy(-0.1, local.gradient(local.loss, at, batch), at)

        return local.scan(step, {"weight": torch.tensor(0.5)}, batch=2)["weight"]

    with torch.no_grad():
        found = each_client(world([3, 2]), 2, fn, stacked)
    assert (found != 0.5).all()


class Dense(nn.Module):
    """A dense layer on one number."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(1, 2)

    def forward(self, x):
        return self.out(x.unsqueeze(-1))


def test_fit_writes_over_nothing_but_its_own_steps():
    """The shorter client's last steps are padding, and what was given to fit is needed after it."""
    torch.manual_seed(0)
    networks, planner = {"main": Network(Dense())}, world([7, 2], [0, 1, 0, 1, 1, 0, 1, 0, 1])
    given = tree.map(lambda leaf: torch.stack([leaf, -leaf]), networks["main"].params)
    before = tree.map(torch.clone, given)

    def client(slot, params):
        local = Local(networks, planner, slot, torch.tensor(1.0), torch.tensor(0.0), True)

        def loss(at, batch):  # with a term that pulls at padding, too
            return local.loss(at, batch) + tree.sqdist(at, params) + tree.norm(at)

        def step(at, batch):
            return tree.axpy(-0.1, local.gradient(loss, at, batch), at)

        fitted = local.fit(loss, params, optim.sgd(0.1), batch=2, epochs=2)
        local.restart()
        return fitted, local.scan(step, params, batch=2, epochs=2)

    fitted, stepped = torch.vmap(client)(torch.arange(2), given)
    assert tree.equal(given, before)
    assert tree.norm(tree.sub(fitted, stepped)) < 1e-6 < 1e-2 < tree.norm(tree.sub(fitted, given))


def test_what_the_loss_of_a_single_client_does_not_use_stays_as_it_was():
    networks, planner = {"main": Network(Dense())}, world([7], [0, 1, 0, 1, 1, 0, 1])
    local = Local(networks, planner, torch.tensor(0), torch.tensor(1.0), torch.tensor(0.0), False)
    given = {"unused": torch.ones(2), **networks["main"].params}

    def loss(at, batch):
        return local.loss({name: at[name] for name in networks["main"].params}, batch)

    fitted = local.fit(loss, given, optim.sgd(0.1), batch=2)
    local.restart()
    plain = local.fit(local.loss, networks["main"].params, optim.sgd(0.1), batch=2)
    assert tree.equal(fitted, {"unused": torch.ones(2), **plain})
    assert not tree.equal(plain, networks["main"].params)


def test_fit_of_a_single_client_steps_as_its_gradients_say_and_changes_nothing_given():
    """The last steps are padding: only those before them may be made in place."""
    torch.manual_seed(0)
    networks, planner = {"main": Network(Dense())}, world([7, 2], [0, 1, 0, 1, 1, 0, 1, 0, 1])
    given = networks["main"].params
    before = tree.map(torch.clone, given)
    for slot in torch.arange(2):
        local = Local(networks, planner, slot, torch.tensor(1.0), torch.tensor(0.0), False)
        seen = []

        def loss(at, batch, local=local):
            return local.loss(at, batch) + tree.sqdist(at, given) + tree.norm(at)

        def noted(at, batch, loss=loss, seen=seen):
            seen.append({leaf.data_ptr() for leaf in at.values()})
            return loss(at, batch)

        def step(at, batch, local=local, loss=loss):
            return tree.axpy(-0.1, local.gradient(loss, at, batch), at)

        fitted = local.fit(noted, given, optim.sgd(0.1), batch=2, epochs=2)
        local.restart()
        assert tree.equal(fitted, local.scan(step, given, batch=2, epochs=2))
        assert tree.equal(given, before) and not tree.equal(fitted, given)
        assert not any(leaf.requires_grad for leaf in fitted.values())
        assert seen[0] == seen[1]  # in place
        # Whoever wants a gradient of what was fitted gets it, as far as steps pass it on.
        start = tree.map(lambda leaf: leaf.clone().requires_grad_(), given)
        local.restart()
        again = local.fit(loss, start, optim.sgd(0.1), batch=2, epochs=2)
        assert tree.equal(again, fitted) and all(leaf.requires_grad for leaf in again.values())
