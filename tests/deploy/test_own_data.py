"""Nodes with files of their own: one federation of their rows, classes and scaling."""

import csv
import dataclasses

import federations as fed
import numpy as np
import pytest

from idiolect.data import federate, read
from idiolect.data.dataset import Moments, decoding, fitted, moments, normalised
from idiolect.deploy.limits import UNLIMITED
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.serve_experiment import ServerSettings
from idiolect.deploy.site import NodeSettings
from idiolect.errors import DataError, DeployError

TOML = """
name = "clinics"
seeds = [1]
rounds = 2
[data]
source = "{source}"
normalise = "feature"
classes = ["ill", "well", "unknown"]
[model]
name = "mlr"
[training]
batch = 4
lr = 0.1
[backend]
kind = "sequential"
[[methods]]
name = "ditto"
"""
COLUMNS = ["age", "dose", "pulse"]


def rows(seed, count):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 3)) * [9, 1, 20] + [50, seed, 70]
    return [[*map(float, one), "ill" if one[0] > 50 else "well"] for one in x]


def written(path, table, names=COLUMNS, client=None):
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*names, "label", *(["client"] if client else [])])
        out.writerows(table)
    return path


@pytest.fixture
def clinics(tmp_path):
    """Three clinics' files, and the same rows in one file for the simulator."""
    tables = [rows(seed, count) for seed, count in enumerate((14, 20, 11))]
    files = [written(tmp_path / f"{n}.csv", table) for n, table in enumerate(tables)]
    joined = [[*row, f"clinic {n}"] for n, table in enumerate(tables) for row in table]
    return files, written(tmp_path / "all.csv", joined, client=True)


def nodes(tmp_path, files):
    names = [f"clinic {n}" for n in range(len(files))]
    return {
        name: Node(NodeSettings(name, "test", tmp_path / name, str(file), policy=UNLIMITED))
        for name, file in zip(names, files, strict=True)
    }


def experiment(source):
    return fed.experiment(toml=TOML.format(source=source))


@pytest.mark.parametrize("turn", [1, -1], ids=["in order", "listed backwards"])
def test_files_apart_learn_as_one_file_divided_by_its_clients(turn, clinics, tmp_path):
    """Split, class numbers and scaling are the simulator's on the same rows, to rounding."""
    files, together = clinics
    wanted = experiment(together)
    content = fed.simulated(wanted, tmp_path / "simulated")
    listed = dict(list(nodes(tmp_path, files).items())[::turn])
    found = fed.served(wanted, InProcess(listed), tmp_path / "served")
    here, there = (fed.server_state(tmp_path / k, "Ditto") for k in ("simulated", "served"))
    assert fed.largest_gap(here, there) < 1e-6
    for mine, theirs in zip(fed.scores(found, "Ditto"), fed.scores(content, "Ditto"), strict=True):
        assert [c["client"] for c in mine["clients"]] == [c["client"] for c in theirs["clients"]]
        assert [c["test"] for c in mine["clients"]] == [c["test"] for c in theirs["clients"]]
        assert mine["models"]["personal"]["mean"] == theirs["models"]["personal"]["mean"]
    assert found["data"]["source"] == "the nodes' own data"


def test_statistics_merge_as_if_all_rows_lay_in_one_place(clinics):
    files, together = clinics
    data = read(together)
    whole = fitted(normalised(data, "feature"), np.arange(len(data)))
    total = None
    for file in files:
        own = read(file)
        one = moments(own, "feature", np.arange(len(own)))
        total = one if total is None else total.merged(one)
    assert isinstance(total, Moments)
    shift, scale = decoding(total, "feature", False)
    np.testing.assert_allclose(shift, whole.shift, rtol=1e-6)
    np.testing.assert_allclose(scale, whole.scale, rtol=1e-6)


def test_a_label_the_experiment_does_not_declare_is_refused(clinics, tmp_path):
    files, together = clinics
    written(files[1], [[*row[:3], "dead"] for row in rows(5, 12)])
    with pytest.raises(DeployError, match="clinic 1: its labels do not fit the classes") as caught:
        fed.served(experiment(together), InProcess(nodes(tmp_path, files)), tmp_path / "served")
    assert "dead" not in str(caught.value)


FUSED = """
[[methods]]
name = "feddf"
sample = 0
"""


def test_a_server_with_public_rows_of_its_own_trains_on_them(clinics, tmp_path):
    """The nodes hold none and are not asked for any; the result is the simulator's."""
    files, together = clinics
    table = [[*row[:3], "well"] for row in rows(9, 30)]
    public = written(tmp_path / "public.csv", table)
    toml = TOML.format(source=together).partition("[[methods]]")[0] + FUSED
    wanted = fed.experiment(toml=toml, sets=(f"data.public.source={public}",))
    fed.simulated(wanted, tmp_path / "simulated")
    transport = InProcess(nodes(tmp_path, files))
    public.rename(tmp_path / "moved.csv")
    with pytest.raises(DataError, match=r"the server lacks the public examples.* --public PATH"):
        fed.served(wanted, transport, tmp_path / "served")
    host = ServerSettings(public=str(tmp_path / "moved.csv"))
    fed.served(wanted, transport, tmp_path / "served", host=host)
    here, there = (fed.fused_models(tmp_path / k, "FedDF") for k in ("simulated", "served"))
    assert fed.largest_gap(here, there) < 1e-6


def test_nodes_that_count_alike_do_so_under_masks(clinics, tmp_path):
    """PFML weighs clients alike; of 14, 20 and 11 rows a mean by examples would be another."""
    files, together = clinics
    toml = TOML.format(source=together).replace("ditto", "pfml")
    for kind, secure in (("open", "false"), ("secure", "true")):
        wanted = fed.experiment(toml=toml, sets=(f"deploy.secure={secure}",))
        fed.served(wanted, InProcess(nodes(tmp_path / kind, files)), tmp_path / kind)
    states = [fed.server_state(tmp_path / kind, "PFML") for kind in ("open", "secure")]
    assert fed.largest_gap(*states) < 1e-6


RAW = """
name = "nodes"
seeds = [0, 1]
rounds = 2
[data]
source = "{source}"
classes = ["a", "b"]
normalise = "feature"
[model]
name = "mlr"
[training]
batch = 4
lr = 0.05
[[methods]]
name = "fedavg"
"""


def test_nodes_tell_nothing_of_their_test_rows(tmp_path):
    """Each node poisons the rows that are test under both seeds; all that they told stays."""
    states, told = [], []
    for name in ("clean", "foul"):
        (tmp_path / name).mkdir()
        nodes = {}
        for place in range(3):
            own = tmp_path / name / f"clinic {place}"
            own.mkdir()
            rows = read(write_one(own / "own.csv", place))
            whole = named(rows, f"clinic {place}")
            tests = [federate(whole, "natural", n, by_name=True).test[0] for n in (0, 1)]
            poison = np.intersect1d(*tests).tolist() if name == "foul" else []
            assert poison or name == "clean", "every node has something to poison"
            path = write_one(own / "own.csv", place, poison)
            site = NodeSettings(
                f"clinic {place}", "test", own / "state", str(path), policy=UNLIMITED
            )
            nodes[site.name] = Node(site)
        transport = InProcess(nodes)
        wanted = fed.experiment(toml=RAW.format(source=path.as_posix()))
        fed.served(wanted, transport, tmp_path / name / "served")
        states.append(fed.server_state(tmp_path / name / "served", "FedAvg"))
        told.append((tmp_path / name / "served" / "scaling.json").read_text())
    assert told[0] == told[1]
    assert fed.largest_gap(*states) == 0


def named(dataset, name):
    one = np.zeros(len(dataset), np.int64)
    return dataclasses.replace(dataset, clients=one, client_names=(name,))


def write_one(path, place, poison=()):
    draw = np.random.default_rng((5, place))
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["age", "dose", "label"])
        for row in range(60):
            values = draw.normal(loc=(50 + 5 * place, 2), scale=(9, 0.5))
            label = "ab"[int(values[1] > 2)]
            out.writerow([*(values * (1000, -7) if row in poison else values), label])
    return path
