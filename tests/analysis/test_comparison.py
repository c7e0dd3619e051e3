"""A comparison on planted truths, and its figures by hand."""

import json

import numpy as np
import planted
import pytest

from idiolect.analysis import compare
from idiolect.analysis.scores import jain, worst_decile
from idiolect.errors import DataError

TRIES = 100
QUICK = 400  # resamples; the verdict does not use them


def found(generator, gains, **options):
    """Count how often a difference is called, and how often Wilcoxon alone would call one."""
    called = alone = covered = 0
    for _ in range(TRIES):
        drawn = planted.drawn(generator, gains, **options)
        told = compare(planted.result(drawn, options.get("same_clients", False)), resamples=QUICK)
        called += told.verdict.found
        alone += any(pair.wilcoxon_holm < 0.05 for pair in told.pairs)
        pair = told.pair("A", "B")
        truth = (gains[0] - gains[1]) * (1 if pair.better == "A" else -1)
        covered += pair.interval[0] <= truth <= pair.interval[1]
    return called, alone, covered


@pytest.mark.parametrize(
    "options", [{}, {"same_clients": True, "clients": 20}, {"seeds": 3}], ids=str
)
def test_two_equal_methods_are_called_different_in_at_most_five_of_a_hundred(options):
    """Though each seed lifts or lowers all clients of a method together."""
    called, _, covered = found(np.random.default_rng(1), [0.0, 0.0], **options)
    assert called <= 5
    assert covered >= 90


def test_a_test_over_clients_alone_would_take_the_seeds_luck_for_a_difference():
    """Where seeds decide all, the verdict is the t-test of seeds: right in 95 of 100, give or take.

    Two standard errors of 5 in 100 are 4.4.
    """
    called, alone, _ = found(np.random.default_rng(2), [0.0, 0.0], seed_effect=0.02, clients=30)
    assert alone > 40 and called <= 9


def test_of_six_equal_methods_none_is_called_best():
    called, _, _ = found(np.random.default_rng(3), [0.0] * 6)
    assert called <= 5


@pytest.mark.parametrize("options", [{}, {"same_clients": True, "clients": 20}], ids=str)
def test_a_planted_difference_is_found(options):
    called, _, covered = found(np.random.default_rng(4), [0.05, 0.0], **options)
    assert called >= 95 and covered >= 90


def test_the_better_one_is_named_and_the_level_ones_too():
    drawn = planted.drawn(np.random.default_rng(5), [0.0, 0.0, -0.15, 0.0])
    told = compare(planted.result(drawn, names=["Local", "B", "C", "D"]))
    assert told.verdict.found and told.verdict.beats == ["C"]
    assert sorted([told.verdict.best, *told.verdict.level]) == ["B", "D", "Local"]
    assert "no difference found between it and" in told.verdict.sentence
    assert "better than C" in told.verdict.sentence
    assert list(told.ranks.average)[-1] == "C" and told.ranks.friedman < 0.001
    assert told.methods["C"].below_local > 0.9 and told.methods["Local"].below_local == 0.0
    pair = told.pair("C", told.verdict.best)
    assert pair.worse == "C" and pair.different and pair.p_holm >= pair.p >= pair.wilcoxon
    assert pair.wins + pair.losses + pair.ties == told.pairs_tested == 50


def test_sentences():
    level = planted.drawn(np.random.default_rng(6), [0.0, 0.0])
    said = compare(planted.result(level)).verdict.sentence
    assert said.startswith("No difference found between ") and "p = " in said
    apart = planted.drawn(np.random.default_rng(6), [0.0, 0.1])
    assert compare(planted.result(apart)).verdict.sentence.startswith("B is best (9")
    once = compare(planted.result(apart[:, :1]))
    assert "one seed cannot tell" in once.verdict.sentence and not once.verdict.found
    assert once.pairs[0].seeds is None and once.pairs[0].wilcoxon < 0.05
    alone = compare(planted.result(apart[:1])).verdict
    assert "no other method" in alone.sentence and not alone.found


def test_equal_results_differ_in_nothing():
    one = planted.drawn(np.random.default_rng(7), [0.0])[0]
    told = compare(planted.result([one, one, one]))
    assert not told.verdict.found and told.pairs[0].interval == (0.0, 0.0)
    assert {pair.p_holm for pair in told.pairs} == {1.0}


def test_figures_by_hand():
    """Worst tenth of eleven is the mean of the two worst; Jain of 1, 2, 3 is 36 / (3 x 14)."""
    assert worst_decile(np.arange(11.0)) == 0.5
    assert worst_decile(np.array([3.0, np.nan, 2.0])) == 2.0
    assert jain(np.array([1.0, 2.0, 3.0])) == pytest.approx(36 / 42)
    assert jain(np.array([0.0, 0.0, 1.0])) == pytest.approx(1 / 3)
    accuracy = np.array([[[0.2, 0.4, 0.6], [0.4, 0.4, 0.4]], [[0.1, 0.4, 0.8], [0.3, 0.5, 0.4]]])
    told = compare(planted.result(accuracy, names=["Local", "Own"])).methods
    assert told["Local"].mean == pytest.approx(0.4) and told["Local"].std_seeds == 0.0
    assert told["Local"].std_clients == pytest.approx(0.1)  # 0.2 under one seed, 0 under the other
    assert told["Local"].worst_decile == pytest.approx(0.3)
    assert told["Own"].below_local == pytest.approx(2 / 6)
    assert told["Local"].variance == pytest.approx(0.01)  # the square of 0.1


def test_persons_who_stay_are_one_pair_each_and_others_one_a_seed():
    drawn = planted.drawn(np.random.default_rng(8), [0.0, 0.02], seeds=3, clients=7)
    assert compare(planted.result(drawn, same_clients=True)).pairs_tested == 7
    told = compare(planted.result(drawn, same_clients=False))
    assert told.pairs_tested == 21 and told.unit == "client and seed"


def test_clients_without_test_data_are_left_out_everywhere():
    drawn = planted.drawn(np.random.default_rng(9), [0.0, 0.1], clients=8)
    gap = np.concatenate([drawn, np.full((2, 5, 1), np.nan)], axis=2)
    left, right = (compare(planted.result(one)).as_dict() for one in (drawn, gap))
    assert (left.pop("clients"), right.pop("clients")) == (8, 9)
    assert left == right


def test_means_and_differences_are_of_the_same_clients():
    """The third client has no score under the second seed: with it A's mean would be 0.65."""
    nan = float("nan")
    first = np.array([[0.60, 0.61, 0.89], [0.59, 0.60, nan]])
    content = planted.result(np.stack([first, first - [0.1, 0.1, 0.4]]), same_clients=True)
    told = compare(content)
    assert [one.mean for one in told.methods.values()] == pytest.approx([0.60, 0.50])
    assert told.pairs[0].difference == pytest.approx(0.1)
    assert np.mean(told.methods["A"].interval) == pytest.approx(0.60, abs=1e-3)
    assert "(1 more does not define accuracy under every seed)" in told.verdict.sentence
    apart = compare(planted.result(np.stack([first, first - 0.1])))  # other clients under each
    assert apart.methods["A"].mean == pytest.approx((0.70 + 0.595) / 2)
    # Where no client has a score under both, all stay.
    none = np.array([[[0.6, nan], [nan, 0.8]]] * 2)
    assert compare(planted.result(none, same_clients=True)).methods["A"].mean == pytest.approx(0.7)


def test_seeds_that_all_methods_share_are_compared():
    drawn = planted.drawn(np.random.default_rng(10), [0.0, 0.1])
    content = planted.result(drawn)
    del content["methods"]["A"]["seeds"][0]
    assert compare(content).seeds == (1, 2, 3, 4)
    content["methods"]["A"]["seeds"] = []
    with pytest.raises(DataError, match="share no seed"):
        compare(content)


def test_what_it_costs_to_come_to_an_accuracy():
    """A comes to 0.5 after 4 of 10 rounds, B after 8; B ends at 0.6, the lower end of the two."""
    rising = {"A": [[0.4, 0.4], [0.5, 0.7]], "B": [[0.2, 0.2], [0.4, 0.5], [0.5, 0.5], [0.6, 0.6]]}
    rounds = {"A": [2, 4], "B": [2, 4, 8, 10]}
    curves = {
        label: {"rounds": rounds[label], "val": {"personal": {"accuracy": rows}}}
        for label, rows in rising.items()
    }
    content = planted.result(planted.drawn(np.random.default_rng(0), [0, 0]), curves=curves)
    told = compare(content)
    assert told.target == pytest.approx(0.6)
    assert (told.reach["A"].round, told.reach["B"].round) == (4, 10)
    half = compare(content, target=0.5).reach["B"]
    assert (half.round, half.bytes, half.seconds) == (8, 120.0, 16.0)
    assert compare(content, target=0.9).reach["B"].round is None


def test_a_comparison_is_plain_json_and_the_same_again():
    content = planted.result(planted.drawn(np.random.default_rng(0), [0, 0.1, 0]))
    once, again = (json.dumps(compare(content).as_dict(), allow_nan=False) for _ in range(2))
    assert once == again
