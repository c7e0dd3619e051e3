"""A wrapper passes on what it does not change, without naming it."""

import dataclasses
import pickle

import pytest

from idiolect.aggregation.aggregator import Aggregated
from idiolect.aggregation.attacks import Attacked, SignFlip
from idiolect.aggregation.robust import Median
from idiolect.core import capabilities
from idiolect.core.capabilities import (
    Averaging,
    Facts,
    FinalExchange,
    JointPrediction,
    NewcomerMessage,
    Privacy,
    StateTrace,
    Tampering,
    functions,
    has,
    settled,
    sums,
)
from idiolect.core.method import CORE, Capability, Method, RunPlan, Sent
from idiolect.core.wrap import Served, Stateful, Wrapper
from idiolect.methods import FedAvg

KINDS = [kind for kind in vars(capabilities).values() if isinstance(kind, type)]
KINDS = [kind for kind in KINDS if issubclass(kind, Capability) and kind.__module__.endswith("ies")]


class Idle(Wrapper):
    """Changes nothing."""


class Remembering(Stateful):
    """Changes nothing but the form of the state."""


def answering(*kinds):
    """A method that has capabilities; each function returns its name and what it was given."""

    def named(name):
        return lambda self, *given: (name, given)

    body = {name: named(name) for kind in kinds for name in functions(kind)}
    body |= {name: property(lambda self: 7) for name in ("models_held", "repeatable")}
    body["averages"] = True
    made = type("Answering", (*kinds, Method), {k: body[k] for k in body if _of(k, kinds)})
    return dataclasses.dataclass(frozen=True, kw_only=True)(made)()


def _of(name, kinds):
    return any(name in functions(kind) for kind in kinds)


def answers(method, kind):
    found = {}
    for name in functions(kind):
        value = getattr(method, name)
        found[name] = value("one", "two") if callable(value) else value
    return found


def test_there_are_capabilities():
    assert len(KINDS) > 10 and all(functions(kind) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_capability_is_passed_on_by_wrappers_of_wrappers(kind):
    inner = answering(kind)
    for method in (Idle(inner), Idle(Idle(inner)), Remembering(inner), Idle(Remembering(inner))):
        assert has(method, kind)
        if kind is not Privacy:
            assert answers(method, kind) == answers(inner, kind)
    assert answers(Idle(Idle(inner)), kind) == answers(inner, kind)


def test_an_empty_round_changes_the_inner_part_of_a_state():
    method = Remembering(answering(Privacy))
    assert method.idle(Served(5, "memory")) == Served(("idle", (5,)), "memory")
    assert method.repeatable == 7


def test_wrappers_are_pickled():
    method = Remembering(Idle(FedAvg(lr=0.5)))
    again = pickle.loads(pickle.dumps(method))
    assert again == method and again.lr == 0.5 and has(again, Averaging)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_inside_is_not_offered(kind):
    inner = answering(*(other for other in KINDS if other is not kind))
    for method in (inner, Idle(inner), Idle(Remembering(inner))):
        assert not has(method, kind)
    bare = Idle(answering())
    for name in functions(kind):
        with pytest.raises(AttributeError):
            getattr(bare, name)


def test_a_new_capability_is_passed_on():
    class Singing(Capability):
        def sing(self, state, times):
            raise NotImplementedError

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Singer(Singing, FedAvg):
        def sing(self, state, times):
            return state * times

    assert has(Idle(Singer()), Singing) and not has(Idle(FedAvg()), Singing)
    assert Idle(Idle(Singer())).sing(2, 3) == 6
    assert Remembering(Singer()).sing(Served(2, ()), 3) == 6


def test_the_contract_is_passed_on():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Echo(Method):
        pass

    for name in CORE:
        setattr(Echo, name, lambda self, *given, name=name: (name, given))
        assert getattr(Idle(Idle(Echo())), name)(1, 2) == (name, (1, 2))
    assert Idle(Echo()).settings()["idle"] == {}


def test_what_builds_on_an_overridden_function_is_not_passed_on():
    class Deploys(Wrapper):
        def deploy(self, sent, personal, local):
            return ()

    class Predicts(Wrapper):
        def predict(self, model, x, local):
            return x

    inner = answering(Facts, FinalExchange, JointPrediction)
    assert not has(Deploys(inner), FinalExchange) and has(Deploys(inner), JointPrediction)
    assert not has(Idle(Deploys(inner)), FinalExchange) and has(Deploys(inner), Facts)
    assert not has(Predicts(inner), JointPrediction) and has(Predicts(inner), FinalExchange)


def test_a_capability_must_be_inherited():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Forgetful(FedAvg):
        def trace(self, state):
            return {}

    with pytest.raises(TypeError, match=r"Forgetful defines trace.*StateTrace; inherit"):
        has(Forgetful(), StateTrace)
    assert not has(Forgetful(), NewcomerMessage)


def test_reports_come_in_parts_only_where_nobody_looks_at_them():
    assert sums(FedAvg()) and sums(Idle(FedAvg())) and sums(Remembering(FedAvg()))
    assert not sums(Method()) and not sums(Aggregated(FedAvg(), Median()))
    attacked = Attacked(FedAvg(), SignFlip())
    assert not sums(attacked) and not sums(Idle(attacked)) and has(Idle(attacked), Tampering)


def test_what_is_inside_is_fitted_to_a_plan_first():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Short(Privacy, FedAvg):
        def settled(self, plan):
            return dataclasses.replace(self, epochs=3), plan.rounds - 1

    method, rounds = settled(Idle(Idle(Short())), RunPlan(5, 10, None))
    assert rounds == 4 and method == Idle(Idle(Short(epochs=3))) and method.epochs == 3
    assert settled(Idle(FedAvg()), RunPlan(5, 10, None)) == (Idle(FedAvg()), 5)


def test_functions_of_capabilities_get_the_inner_part_of_a_state():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Seen(NewcomerMessage, StateTrace, FedAvg):
        def welcome(self, state, cohort):
            return Sent(state)

        def trace(self, state):
            return {"state": state}

    method = Remembering(Idle(Remembering(Seen())))
    state = Served(Served(5, "memory"), ())
    assert method.welcome(state, None) == Sent(5) and method.trace(state) == {"state": 5}
    assert method.send(state, None) == Sent(5)
