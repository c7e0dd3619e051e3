"""Tables of several sites become the same features, from sums alone."""

import csv
import dataclasses
import json

import federations as fed
import numpy as np
import pytest
import torch
from test_limits import ask, code, opening

from idiolect.core.survival import Discrete
from idiolect.core.task import Number
from idiolect.data.columns import TableEncoder
from idiolect.deploy import protocol
from idiolect.deploy.encoder_agreement import Agreement, SiteColumns
from idiolect.deploy.limits import UNLIMITED, SitePolicy
from idiolect.deploy.newcomer_nodes import WantedModel, adapt_nodes, find_model
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.deploy.serve_experiment import make_messenger
from idiolect.deploy.site import NodeSettings
from idiolect.errors import ConfigError, DeployError
from idiolect.experiment.build import build_federations

TOML = """
name = "clinics"
seeds = [1, 2]
rounds = 2
[data]
source = "{source}"
{data}
[model]
name = "mlr"
[training]
batch = 16
lr = 0.1
[backend]
kind = "sequential"
[[methods]]
name = "ditto"
"""
CLASSES = 'classes = ["ill", "well"]'
NAMES = ["age", "sex", "smoker", "seen", "dose", "label"]


def rows(seed, count):
    """Numbers with gaps, categories with commas and quotes, a boolean, a date."""
    draw = np.random.default_rng(seed)
    table = []
    for _ in range(count):
        age = draw.normal(55 + seed, 12)
        sex = draw.choice(["f", "m", 'say "x, y"'], p=[0.5, 0.4, 0.1])
        day = f"20{draw.integers(10, 24)}-{draw.integers(1, 13):02d}-11"
        dose = "" if draw.random() < 0.3 else f"{draw.lognormal(2, 1):.3f}"
        ill = "ill" if age + 10 * (sex == "m") + draw.normal(0, 8) > 62 else "well"
        table.append(
            [
                f"{age:.2f}",
                "" if draw.random() < 0.1 else sex,
                draw.choice(["yes", "no"]),
                day,
                dose,
                ill,
            ]
        )
    return table


def written(path, table, names=NAMES):
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(names)
        out.writerows(table)
    return path


@pytest.fixture
def clinics(tmp_path):
    """Three clinics' files, the second in another order of columns; and all rows in one file."""
    tables = [rows(seed, count) for seed, count in enumerate((70, 90, 60))]
    order = [4, 1, 0, 3, 2, 5]
    files = []
    for n, table in enumerate(tables):
        places = order if n == 1 else range(6)
        own = [[row[place] for place in places] for row in table]
        files.append(written(tmp_path / f"{n}.csv", own, [NAMES[place] for place in places]))
    joined = [[*row, f"clinic {n}"] for n, table in enumerate(tables) for row in table]
    return files, written(tmp_path / "all.csv", joined, [*NAMES, "client"])


def nodes(tmp_path, files, policy=UNLIMITED, options=None):
    names = [f"clinic {n}" for n in range(len(files))]
    return {
        name: Node(
            NodeSettings(name, "test", tmp_path / name, str(file), options or {}, policy=policy)
        )
        for name, file in zip(names, files, strict=True)
    }


def experiment(source, data=CLASSES):
    return fed.experiment(toml=TOML.format(source=source, data=data))


def both(wanted, tmp_path, held):
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = fed.served(wanted, InProcess(held), tmp_path / "served")
    here, there = (fed.server_state(tmp_path / k, "Ditto") for k in ("simulated", "served"))
    assert fed.largest_gap(here, there) < 1e-6
    for mine, theirs in zip(fed.scores(found, "Ditto"), fed.scores(content, "Ditto"), strict=True):
        assert [c["client"] for c in mine["clients"]] == [c["client"] for c in theirs["clients"]]
        assert mine["models"]["personal"]["mean"] == theirs["models"]["personal"]["mean"]
    return found


def test_tables_apart_learn_as_one_table(clinics, tmp_path):
    """Categories, gaps, a date and another order: the encoder is the simulator's, both seeds."""
    files, together = clinics
    wanted = experiment(together)
    held = nodes(tmp_path, files)
    both(wanted, tmp_path, held)
    agreed = Agreement.load(tmp_path / "served", 2)
    for own, simulated in zip(agreed.encoders, build_federations(wanted), strict=True):
        theirs = simulated.dataset.encoder
        assert own.features == theirs.features
        assert [c.categories for c in own.columns] == [c.categories for c in theirs.columns]
        for mine, other in zip(own.columns, theirs.columns, strict=True):
            for key in ("fill", "shift", "scale"):
                assert getattr(mine, key) == pytest.approx(getattr(other, key), rel=1e-9)


def test_under_a_policy_rare_categories_and_extremes_stay_at_the_site(clinics, tmp_path):
    files, together = clinics
    policy = SitePolicy(min_examples=20, max_seeds=2)
    held = nodes(tmp_path, files, policy)
    node = next(iter(held.values()))
    wanted = experiment(together)
    assert ask(node, "open", opening(wanted, clients=3)).kind == "yes"
    told = ask(node, "columns", {"run": "r1", "table": True})
    read = SiteColumns.read("clinic 0", told, [[42, 14, 14]] * 2)
    for columns in read.seeds:
        sex = columns["sex"].sums
        assert all(count >= 5 for count in sex.counts.values())
        assert min(columns["age"].sums.bins.values()) >= 5
    text = told.leaves["columns0"].numpy().tobytes().decode()
    own = read.seeds[0]["age"].sums
    assert own.mean != own.quantile(1.0) and len(own.bins) < 10 and "say" not in text
    fed.served(wanted, InProcess(nodes(tmp_path / "p", files, policy)), tmp_path / "served")


def test_a_site_without_a_column_takes_part_and_all_are_told(clinics, tmp_path, caplog):
    files, together = clinics
    table = [[row[n] for n in (0, 1, 2, 3, 5)] for row in rows(2, 60)]
    written(files[2], table, [NAMES[n] for n in (0, 1, 2, 3, 5)])
    held = nodes(tmp_path, files)
    found = fed.served(experiment(together), InProcess(held), tmp_path / "served")
    assert "clinic 2 has no column dose" in str(found["methods"]["Ditto"])
    assert "beside the other sites: this site has no column 'dose'" in caplog.text


def test_a_column_of_another_type_is_one_line(clinics, tmp_path, caplog):
    files, together = clinics
    table = [
        [row[0], row[1], row[2], row[3], "high" if n % 2 else "low", row[5]]
        for n, row in enumerate(rows(2, 60))
    ]
    written(files[2], table)
    with pytest.raises(ConfigError, match=r"'dose' is read as category at clinic 2 and as number"):
        fed.served(experiment(together), InProcess(nodes(tmp_path, files)), tmp_path / "served")
    assert "beside the other sites: dose is read as category at clinic 2" in caplog.text


def test_a_site_whose_numbers_are_too_large_is_told_the_column(clinics, tmp_path, caplog):
    """A server would refuse their sums as a forgery, and name no column to anybody."""
    files, together = clinics
    written(files[2], [[f"{row[0]}e30", *row[1:]] for row in rows(2, 60)])
    with pytest.raises(DeployError, match=r"clinic 2: its data is .*; its log says why"):
        fed.served(experiment(together), InProcess(nodes(tmp_path, files)), tmp_path / "served")
    assert "column 'age' holds numbers around 1e15 or more" in caplog.text


def test_plain_tables_in_another_order_work_too(tmp_path):
    draw = np.random.default_rng(0)
    files, every = [], []
    for n in range(3):
        x = draw.normal(size=(40, 3)) * [9, 1, 20] + [50, 0, 70]
        table = [[*map(float, one), "ill" if one[0] > 50 else "well"] for one in x]
        every += [[*row, f"clinic {n}"] for row in table]
        order = [2, 0, 1, 3] if n == 1 else [0, 1, 2, 3]
        names = ["age", "dose", "pulse", "label"]
        own = [[row[place] for place in order] for row in table]
        files.append(written(tmp_path / f"{n}.csv", own, [names[place] for place in order]))
    together = written(tmp_path / "all.csv", every, ["age", "dose", "pulse", "label", "client"])
    wanted = experiment(together, CLASSES + '\nnormalise = "feature"')
    both(wanted, tmp_path, nodes(tmp_path, files))


def test_a_restarted_node_and_a_resumed_run_keep_the_encoder(clinics, tmp_path):
    files, together = clinics
    wanted = experiment(together)
    held = nodes(tmp_path, files)
    fed.served(wanted, InProcess(held), tmp_path / "served")
    kept = (tmp_path / "served" / "encoders.json").read_text()
    again = nodes(tmp_path, files)
    fed.served(wanted, InProcess(again), tmp_path / "served")
    assert (tmp_path / "served" / "encoders.json").read_text() == kept


@pytest.mark.parametrize(
    "task",
    [
        'task = "number"',
        'task = {name = "survival", form = "discrete", intervals = 4}',
        'task = "survival"',
        f'{CLASSES}\nclass_weights = "balanced"',
    ],
)
def test_targets_are_measured_alike(tmp_path, task):
    """Mean and deviation of a number, cut points of times, weights of classes: from sums."""
    draw = np.random.default_rng(1)
    files, every = [], []
    for n in range(3):
        table = []
        for _ in range(50 + 10 * n):
            x, t = draw.normal(size=2), int(draw.integers(1, 900))
            table.append([f"{x[0]:.3f}", f"{x[1]:.3f}", t, int(draw.random() < 0.6)])
            if "classes" in task:
                table[-1][2] = "ill" if t > 700 else "well"
        every += [[*row, f"clinic {n}"] for row in table]
        files.append(written(tmp_path / f"{n}.csv", table, ["a", "b", "t", "e"]))
    together = written(tmp_path / "all.csv", every, ["a", "b", "t", "e", "client"])
    label = ["t", "e"] if "survival" in task else "t"
    data = f"{task}\noptions = {{label = {json.dumps(label)}}}\nstratify = false"
    wanted = experiment(together, data)
    # Mean and deviation are exact under a policy too.
    policy = SitePolicy(min_examples=20, short_batches=True) if "number" in task else UNLIMITED
    both(wanted, tmp_path, nodes(tmp_path, files, policy, {"label": label}))
    agreed = Agreement.load(tmp_path / "served", 2)
    simulated = [own.dataset.task for own in build_federations(wanted)]
    for mine, theirs in zip(agreed.tasks, simulated, strict=False):
        assert type(mine) is type(theirs)
        if isinstance(mine, Number):
            assert (mine.shift, mine.scale) == pytest.approx((theirs.shift, theirs.scale))
        elif isinstance(mine, Discrete):
            assert mine.cuts == theirs.cuts and len(mine.cuts) == 3
        else:
            assert mine.weights == pytest.approx(theirs.weights)
    assert len(agreed.tasks) == (0 if task == 'task = "survival"' else 2)


# Hostile.


def test_a_newcomer_tells_no_sums(clinics, tmp_path):
    files, together = clinics
    node = next(iter(nodes(tmp_path, files).values()))
    wanted = experiment(together)
    assert ask(node, "open", opening(wanted, clients=3, newcomer=True)).kind == "yes"
    assert code(ask(node, "columns", {"run": "r1", "table": True})) == "newcomer"


def test_agreements_are_read_or_refused(clinics, tmp_path):
    _, together = clinics
    encoder = build_federations(experiment(together))[0].dataset.encoder
    assert isinstance(encoder, TableEncoder)
    good = Agreement((encoder,), (Number(),))
    assert Agreement.read(good.leaf(), 1).to_json() == good.to_json()
    plain = good.to_json()
    column = plain["encoders"][0]["columns"][0]
    for wrong in (
        [],
        {"encoders": [], "tasks": [], "more": 1},
        {"encoders": plain["encoders"] * 2, "tasks": []},
        {"encoders": [{"version": 1, "columns": [{**column, "scale": 0}]}], "tasks": []},
        {"encoders": [{"version": 1, "columns": [{**column, "width": 10**9}]}], "tasks": []},
        {"encoders": [], "tasks": [{"kind": "number", "shift": float("nan")}]},
        {"encoders": [], "tasks": [7]},
    ):
        with pytest.raises(Refused):
            Agreement.from_json(wrong, 1)
    for raw in (b"{", b"[" * 10_000, b"\xff"):
        with pytest.raises(Refused):
            Agreement.read(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 1)


def test_a_site_that_lies_about_its_columns_is_left_out(clinics, tmp_path):
    files, together = clinics

    class Lying(InProcess):
        def call(self, site, blob, seconds):
            answer = super().call(site, blob, seconds)
            if site != "clinic 0" or protocol.unpack(blob).kind != "columns":
                return answer
            told = protocol.unpack(answer)
            text = json.loads(told.leaves["columns0"].numpy().tobytes())
            text["age"]["mean"] = float("nan")
            raw = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
            return protocol.pack("yes", told.head, {**told.leaves, "columns0": raw})

    wanted = experiment(together)
    fed.served(wanted, Lying(nodes(tmp_path, files)), tmp_path / "served")
    faults = json.loads((tmp_path / "served" / "faults.json").read_text())
    assert faults["clinic 0"]["statistics"] == 1


def test_images_beside_a_table_are_one_line(clinics, tmp_path):
    files, together = clinics
    np.savez(tmp_path / "x.npz", x=np.ones((60, 5), np.float32), y=np.array(["ill", "well"] * 30))
    held = nodes(tmp_path, [*files[:2], tmp_path / "x.npz"])
    with pytest.raises(DeployError, match="clinic 2 holds no table of columns"):
        fed.served(experiment(together), InProcess(held), tmp_path / "served")


def test_an_encoder_of_another_type_is_refused_by_the_node(clinics, tmp_path):
    files, together = clinics
    node = next(iter(nodes(tmp_path, files).values()))
    wanted = experiment(together)
    assert ask(node, "open", opening(wanted, clients=3)).kind == "yes"
    encoder = build_federations(wanted)[0].dataset.encoder
    _, *rest = encoder.columns
    false = TableEncoder((dataclasses.replace(rest[0], name="age"), *rest[1:]))
    content = {"shift": torch.zeros(2, 1), "scale": torch.ones(2, 1)}
    content["agreed"] = Agreement((false, false)).leaf()
    head = {"run": "r1", "classes": ["ill", "well"]}
    assert code(ask(node, "agree", head, content)) == "columns"


def test_a_newcomer_is_given_the_runs_encoder(clinics, tmp_path):
    """Its columns in another order, one lacking, a category that nobody had."""
    files, together = clinics
    fed.served(experiment(together), InProcess(nodes(tmp_path, files)), tmp_path / "served")
    order = [3, 1, 0, 2, 5]
    table = [[row[n] if n != 1 or row[n] != "m" else "other" for n in order] for row in rows(7, 60)]
    path = written(tmp_path / "late.csv", table, [NAMES[n] for n in order])
    own = NodeSettings("late", "test", tmp_path / "late", str(path), policy=UNLIMITED)
    found = find_model(tmp_path / "served", WantedModel("r1", seed=2))
    messenger = make_messenger(InProcess({"late": Node(own)}), found.text, tmp_path / "visit")
    content = adapt_nodes(messenger, found, "v1", tmp_path / "visit")
    assert content["newcomers"][0]["models"]["personal"]["accuracy"] > 0.4
    agreed = Agreement.load(tmp_path / "served", 2).encoders[1]
    assert Agreement.load(tmp_path / "visit", 1).encoders == (agreed,)


def test_declared_columns_hold_at_every_site(clinics, tmp_path):
    """A code of digits is a category where the experiment says so, at sites as in a simulation."""
    files, together = clinics
    for path in (*files, together):
        with path.open(newline="") as file:
            head, *table = list(csv.reader(file))
        place = head.index("age")
        ward = [[str(100 + int(float(row[place])) % 3), *row] for row in table]
        written(path, ward, ["ward", *head])
    data = f'{CLASSES}\n[data.columns]\nward = "category"\nseen = {{type = "ignore"}}'
    both(experiment(together, data), tmp_path, nodes(tmp_path, files))
    encoder = Agreement.load(tmp_path / "served", 2).encoders[0]
    (ward,) = [one for one in encoder.columns if one.name == "ward"]
    assert ward.categories == ("100", "101", "102") and "seen" not in encoder.plans
