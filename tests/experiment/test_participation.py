"""Clients that took part in no round: models as newcomers get them, and figures that say so."""

import json

import numpy as np
import pytest
import small
import torch
from typer.testing import CliRunner

import worlds
from idiolect import fit
from idiolect.cli import app
from idiolect.deploy.serve_experiment import served_methods
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import Simulation
from idiolect.engine.sampling import eligible
from idiolect.errors import CheckpointError, ConfigError
from idiolect.experiment import early_checks
from idiolect.experiment.build import build_jobs
from idiolect.experiment.job import Evaluate, SimulatedJob
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.run import run_experiment
from idiolect.experiment.train import train
from idiolect.methods import METHODS, Ditto, LocalOnly
from idiolect.results import statistics
from idiolect.results.document import build_document
from test_laws import choose, made

SERVED = [name for name, kind in METHODS.items() if not (kind.pooled or kind.alone)]
NEVER = [1, 3, 4]  # of the world's six clients; the last has nothing to train on


def advanced(name, kind):
    """Two rounds of clients 0 and 2 alone."""
    world = worlds.with_public()
    simulation = worlds.simulation(made(name), world, cohort=2, kind=kind)
    choose(simulation, [0, 2], [0, 2])
    simulation.advance()
    simulation.advance()
    return simulation, world


def as_newcomers(simulation, world, told):
    """Score everyone as a newcomer to the same state."""
    guests = Simulation(
        simulation.method,
        simulation.runs,
        {"main": Architecture(worlds.network_of(simulation.method))},
        backend=Backend("sequential", "cpu"),
        newcomers=True,
    )
    guests.states, guests.round = simulation.states, simulation.round
    if "groups" in (kept := simulation.tree):
        guests.tree = {**guests.tree, "groups": kept["groups"]}
    guests.exchange_sums = [told] if told else ()
    (found,) = guests.evaluate([world.test_data], newcomers=True)
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "sequential") for name in SERVED), ("ditto", "vectorised"), ("ktpfl", "vectorised")],
)
def test_a_client_that_never_took_part_has_a_newcomers_model(name, kind, float64):
    simulation, world = advanced(name, kind)
    (found,) = simulation.evaluate([world.test_data], keep=True)
    assert simulation.strangers(0).tolist() == [1, 3, 4, 5]
    newcomers = as_newcomers(simulation, world, found.exchange_sums)
    for model, metrics in newcomers.scores.items():
        for metric, values in metrics.items():
            mine = found.scores[model][metric][NEVER]
            np.testing.assert_allclose(mine, values[NEVER], 1e-6, err_msg=f"{model} {metric}")
    assert sorted(int(c) for clients, _ in found.deployed for c in clients) == list(range(6))


def test_along_the_way_those_who_never_took_part_have_no_personal_score(float64):
    """Their share of the global model's curve stays."""
    simulation, _ = advanced("ditto", "vectorised")
    (found,) = simulation.evaluate(adapt=False)
    assert np.isnan(found.scores["personal"]["accuracy"]).tolist() == [0, 1, 0, 1, 1, 1]
    assert np.isfinite(found.scores["global"]["accuracy"][NEVER[:2]]).all()


def test_a_client_whose_every_report_was_broken_never_took_part():
    class Broken(Ditto):
        def client_step(self, sent, personal, local):
            report, kept = super().client_step(sent, personal, local)
            hurt = torch.where(local.size == 5, torch.nan, report.size)  # client 2
            return report._replace(size=hurt), kept

    simulation = worlds.simulation(Broken(batch=3), worlds.federation())
    simulation.advance()
    assert simulation.strangers(0).tolist() == [2, 5]


def test_seeds_with_other_strangers_are_scored_as_alone(float64):
    pair = [worlds.federation(), worlds.federation()]
    together = worlds.simulation(made("ditto"), pair, seeds=(0, 1), cohort=1)
    single = worlds.simulation(made("ditto"), pair[1], seeds=(1,), cohort=1)
    for simulation in (together, single):
        simulation.advance()
        simulation.advance()
    assert together.strangers(0).tolist() != together.strangers(1).tolist()
    (_, found), (alone,) = (
        together.evaluate([one.test_data for one in pair]),
        single.evaluate([pair[1].test_data]),
    )
    for metric, values in alone.scores["personal"].items():
        np.testing.assert_allclose(found.scores["personal"][metric], values, 1e-9)


def job(method, rounds=2, cohort=1, **evaluate):
    return SimulatedJob(
        label="m",
        name="m",
        method=method,
        seeds=(0, 1),
        federations=(worlds.federation(),) * 2,
        architectures={"main": Architecture(worlds.Normed)},
        rounds=rounds,
        cohort=cohort,
        backend=Backend("vectorised", "cpu", 64),
        evaluate=Evaluate(every=1, **evaluate),
    )


def test_local_trains_everyone_to_the_same_budget():
    """A cohort is drawn by a server, and Local has none."""
    ends = [train(job(LocalOnly(batch=3), cohort=cohort)).outcome for cohort in (1, None)]
    for values in zip(*(end.final["personal/loss"] for end in ends), strict=True):
        np.testing.assert_array_equal(*values)
    assert [own.tolist() for own in ends[0].took_part] == [[True] * 5 + [False]] * 2


def test_a_resumed_run_knows_who_took_part(tmp_path):
    whole = train(job(Ditto(batch=3), rounds=4)).outcome
    train(job(Ditto(batch=3), rounds=2), tmp_path)
    again = train(job(Ditto(batch=3), rounds=4), tmp_path, resume=True).outcome
    read = train(job(Ditto(batch=3), rounds=4), tmp_path, resume=True).outcome
    for other in (again, read):
        assert [o.tolist() for o in other.took_part] == [o.tolist() for o in whole.took_part]
        for key, values in whole.final.items():
            np.testing.assert_array_equal(values, other.final[key], key)
    assert np.isnan(whole.curves["val/personal/accuracy"][0]).any()
    always = train(job(Ditto(batch=3), personal="always")).outcome
    assert not np.isnan(always.curves["val/personal/accuracy"][0][:, [0, 1, 2, 3]]).any()


def test_the_result_has_both_figures_with_their_counts():
    outcome = train(job(Ditto(batch=3))).outcome
    content = build_document({}, [outcome], complete=True)
    for place, seed in enumerate(content["methods"]["m"]["seeds"]):
        present = outcome.took_part[place]
        scores = outcome.final["personal/accuracy"][place]
        told = seed["participation"]
        taking = int(present.sum())
        assert told["clients"] == {"all": 6, "took_part": taking, "never": 6 - taking}
        means = told["accuracy"]["personal"]
        assert means["all"] == pytest.approx(scores.mean())
        assert means["took_part"] == pytest.approx(scores[present].mean())
        assert means["never"] == pytest.approx(scores[~present].mean())
        assert [client["took_part"] for client in seed["clients"]] == present.tolist()
    (line,) = statistics.participation_lines(content["methods"])
    assert line.startswith("m: ") and "that took part" in line and "that never did" in line
    assert any("took part in no round" in text for text in outcome.notices)


def test_screen_report_and_comparison_say_it(tmp_path):
    toml = tmp_path / "e.toml"
    toml.write_text(
        "name = 'e'\nrounds = 1\ncohort = 1\n"
        "[data]\npartition = {name = 'iid', clients = 3, per_client = 30}\n"
        "[model]\nname = 'mlr'\n[backend]\nkind = 'sequential'\n[[methods]]\nname = 'ditto'\n"
        "[[methods]]\nname = 'local'\n"
    )
    invoke, out = CliRunner().invoke, tmp_path / "run"
    assert invoke(app, ["run", str(toml), "--out", str(out)]).exit_code == 0
    shown = " ".join(invoke(app, ["show", str(out)]).output.split())
    assert "over the 1 that took part" in shown and "over the 2 that never did" in shown
    assert invoke(app, ["report", str(out)]).exit_code == 0
    assert any("never took part" in path.read_text() for path in out.glob("*.html"))
    two = invoke(app, ["compare", str(toml), "--out", str(tmp_path / "two")])
    assert "over the 2 that never did" in " ".join(two.output.split())
    told = json.loads((out / "result.json").read_text())["methods"]["Ditto"]["seeds"][0]
    assert told["participation"]["clients"] == {"all": 3, "took_part": 1, "never": 2}


def test_python_has_both_figures():
    found = fit("ditto", worlds.federation(), model="mlr", rounds=1, cohort=1, batch=3)
    assert found.took_part.sum() == 1
    assert found.participation["clients"] == {"all": 6, "took_part": 1, "never": 5}
    means = found.participation["accuracy"]["personal"]
    assert means["never"] == pytest.approx(found.accuracy[~found.took_part].mean())
    assert found.model(int(np.flatnonzero(~found.took_part)[0])) is not None


def test_unseen_clients_take_part_in_no_round_and_end_as_newcomers(float64):
    """Drawn by the seed from those who could train; the others are everyone in every round."""
    world = worlds.federation()
    simulation = worlds.simulation(made("ditto"), world, unseen=2)
    simulation.advance()
    strangers = simulation.strangers(0).tolist()
    assert len(strangers) == 3 and 5 in strangers  # 5 has nothing to train on
    simulation.advance()
    assert simulation.strangers(0).tolist() == strangers
    again = eligible(world.train_data, simulation.runs[0].seed, 2)
    assert np.setdiff1d(range(6), again).tolist() == strangers
    assert any(set(eligible(world.train_data, n, 2)) != set(again) for n in range(1, 9))
    (found,) = simulation.evaluate([world.test_data])
    (new,) = [as_newcomers(simulation, world, found.exchange_sums)]
    for metric, values in new.scores["personal"].items():
        mine = found.scores["personal"][metric][strangers[:2]]
        np.testing.assert_allclose(mine, values[strangers[:2]], 1e-6, err_msg=metric)
    alone = worlds.simulation(LocalOnly(batch=3), world, unseen=2)
    alone.advance()
    assert alone.strangers(0).tolist() == [5]  # nobody's help is missed


def test_a_file_keeps_clients_out_of_all_rounds(tmp_path):
    def read(*changes):
        own = ["rounds=1", "unseen=0.4", "cohort=2", *changes]
        return parse_experiment(small.TOML, own)

    experiment = read()
    document, _ = run_experiment(experiment, tmp_path / "run", only=["FedAvg"])
    (alone, job, _), _ = build_jobs(experiment)
    clients = job.federations[0].clients
    assert job.unseen == round(0.4 * clients) > 0
    assert job.plan(2).clients == clients - job.unseen and alone.plan(2).clients == clients
    for seed in document["methods"]["FedAvg"]["seeds"]:
        assert seed["participation"]["clients"]["never"] >= job.unseen
    part, _ = run_experiment(read("evaluate.final_clients=3"), tmp_path / "part", only=["FedAvg"])
    assert part["methods"]["FedAvg"]["seeds"][0]["participation"]["clients"]["all"] == 3
    with pytest.raises(CheckpointError, match="unseen"):
        run_experiment(read("unseen=1", "rounds=2"), tmp_path / "run", resume=True)
    for changes in ([f"unseen={clients}"], [f"unseen={clients - 1}", "cohort=2"]):
        with pytest.raises(ConfigError, match="a round needs 2; lower it"):
            build = read(*changes)
            early_checks.refuse_misfits(build, build_jobs(build)[0], tmp_path)
    for wrong in ("-1", "1.5", "true", '"a"', "[1]"):
        with pytest.raises(ConfigError, match="unseen: expected 0 or more clients, or 0 < share"):
            read(f"unseen={wrong}")
    assert build_jobs(read("unseen=0"))[0][1].unseen == 0
    with pytest.raises(ConfigError, match=f"unseen is {clients + 1}, and there are"):
        run_experiment(read(f"unseen={clients + 1}"), tmp_path / "more")
    text = small.TOML.replace('name = "fedavg"', 'name = "centralised"')
    with pytest.raises(ConfigError, match="trains on the rows of all clients"):
        run_experiment(parse_experiment(text, ["unseen=1"]), tmp_path / "pooled")
    with pytest.raises(ConfigError, match="unseen is for simulations"):
        served_methods(experiment)


def test_settings_are_not_chosen_by_unseen_clients(tmp_path):
    changes = ["unseen=2", "seeds=[2]", "rounds=2", "tune.space.lr=[0.1]"]
    text = small.TOML + small.TUNE
    _, job, _ = build_jobs(parse_experiment(text, changes))[0]
    content, _, _ = small.compared(tmp_path, *changes, text=text)
    (split,) = content["splits"]
    result = json.loads((tmp_path / split["folder"] / "result.json").read_text())
    scores = [
        one["personal"]["val_accuracy"]
        for one in result["methods"]["FedAvg"]["seeds"][0]["clients"]
    ]
    (trial,) = split["tuned"]["FedAvg"]["trials"]
    heard = np.delete(scores, job.kept_out[0])
    assert len(heard) == 4 and heard.mean() != np.mean(scores)
    assert trial["validation"] == [{"seed": 2, "score": pytest.approx(heard.mean())}]
