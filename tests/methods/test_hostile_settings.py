"""Whatever a setting is given, the method is made, or says in one sentence what was expected."""

import dataclasses

import pytest

import idiolect
from idiolect.aggregation import MODEL_ATTACKS, RULES, SERVER_OPTIMISERS, Attacked, Private
from idiolect.aggregation.aggregator import Aggregated
from idiolect.core.method import Method
from idiolect.engine.backend import Backend
from idiolect.errors import ConfigError, IdiolectError
from idiolect.experiment import train as training
from idiolect.methods import IFCA, METHODS, MOCHA, FedAvg, FedRotLoRA, PFedMe
from idiolect.methods.personalise import Combined, Mixture, Tuned

COMMON = {spec.name for spec in dataclasses.fields(Method)}
HOSTILE = (
    *(float("nan"), float("inf"), -float("inf"), 1e300, 1e-300, 1e-40, -1.0, 0.0),
    *(10**400, 2**63, 2**31, -1, 0, 1, 1 + 2j, True, None, "", "nonsense"),
    *([], {}, (), (None,), ((),), ("x",), (float("nan"),), (1e300,), (-1,), (10**18,), ({},)),
    *((("ft",), ("ft",)), (("nope",),), (("ft", 3),), (3, 3), object()),
)
KINDS = {
    **METHODS,
    **{kind.__name__: kind for kind in (Combined, Tuned, Mixture)},
    **RULES,
    **SERVER_OPTIMISERS,
    "dp": Private,
    **MODEL_ATTACKS,
}
PLAIN = Backend("vectorised", "cpu", width=4)


def made(kind, settings):
    if kind in (Combined, Tuned, Mixture):
        return kind(FedAvg(), **settings)
    if kind in MODEL_ATTACKS.values():
        return Attacked(FedAvg(), kind(**settings), attackers=(0,))
    return kind(**settings) if issubclass(kind, Method) else Aggregated(FedAvg(), kind(**settings))


@pytest.mark.parametrize("name", KINDS)
def test_a_setting_is_taken_or_refused_in_one_sentence(name):
    kind = KINDS[name]
    for spec in dataclasses.fields(kind):
        if spec.name == "base" or (spec.name in COMMON and name != "fedavg"):
            continue
        for value in HOSTILE:
            try:
                made(kind, {spec.name: value})
            except ConfigError as error:
                said = str(error)
                assert "\n" not in said and len(said) < 250, said
                assert spec.name in said or name == "dp" or "personalise" in said, said


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: MOCHA(floor=1e300),
            "MOCHA: floor is 1e+300, expected at most 3.4e+38, the largest number of single "
            "precision",
        ),
        (
            lambda: MOCHA(floor=1e-300),
            "MOCHA: floor is 1e-300, expected at least 1.2e-38, the smallest number of single "
            "precision",
        ),
        (lambda: FedAvg(epochs=2**31), "FedAvg: epochs is 2147483648, expected at most 2147483647"),
        (
            lambda: Combined(FedAvg(), combinations=3),
            "Combined: combinations is 3, expected a tuple of values",
        ),
        (
            lambda: Combined(FedAvg(), combinations=(("ft", 3),)),
            "Combined: combinations is 3, expected a word in each place",
        ),
    ],
)
def test_the_sentence(make, said):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == said


def refused(method, **more):
    held = idiolect.federation("embedded", "iid", clients=2, per_client=20)
    with pytest.raises(IdiolectError) as caught:
        idiolect.fit(method, held, "dnn", backend=PLAIN, **{"rounds": 1, **more})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_more_models_than_memory_holds_are_refused():
    """It died without a word, when the system had no memory left."""
    assert "IFCA: clusters is 1000000, and so many models of" in refused(IFCA(clusters=10**6))
    wrapped = refused(Tuned(IFCA(clusters=10**6)))
    assert "clusters is 1000000" in wrapped and "lower it" in wrapped


def test_more_steps_than_memory_lists_are_refused():
    said = refused(FedAvg(epochs=10**9))
    assert said.startswith("the list of 1,000,000,000 steps") and "lower the epochs" in said


def test_a_batch_beyond_all_rows_is_all_rows():
    held = idiolect.federation("embedded", "iid", clients=2, per_client=20)
    scores = [
        idiolect.fit(FedAvg(batch=batch), held, "dnn", rounds=1, backend=PLAIN).scores.tolist()
        for batch in (20, 2**31 - 1)
    ]
    assert scores[0] == scores[1]


def test_products_beyond_single_precision_are_one_sentence():
    said = refused(PFedMe(lr=1e38))
    assert said.startswith("pFedMe: a setting, or a product of two, is beyond single precision")


def test_a_matrix_of_infinities_is_one_sentence():
    said = refused(FedRotLoRA(server_lr=1e38), rounds=2, adapter="lora")
    assert said.startswith("FedRot-LoRA: reports hold NaN or infinity") or "produced NaN" in said


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 GB")],
)
def test_running_out_of_memory_is_one_sentence(monkeypatch, error):
    def starved(*_):
        raise error

    monkeypatch.setattr(training, "_run_rounds", starved)
    assert refused(FedAvg()).startswith("FedAvg: out of memory; lower what the method holds")
