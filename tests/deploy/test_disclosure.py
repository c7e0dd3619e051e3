"""What leaves a site before training, and what a server takes from a site that lies."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from test_limits import FEDAVG, TOML, ask, code, site

from idiolect.aggregation import noise
from idiolect.data.column_sums import ColumnPlan, ColumnSums, RawColumn
from idiolect.data.description import ToldColumn, column_figures
from idiolect.deploy import disclosure, protocol
from idiolect.deploy.describe_nodes import describe_nodes
from idiolect.deploy.disclosure import noisy, protected, read_columns, unpack_columns
from idiolect.deploy.limits import UNLIMITED, SitePolicy
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.deploy.serve_experiment import make_messenger
from idiolect.deploy.site import NodeSettings, load_node_data
from idiolect.errors import DeployError
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.portable import export_experiment
from idiolect.version import VERSION

TEXT = export_experiment(parse_experiment(TOML + FEDAVG))


def column(kind, values, names=()):
    return ToldColumn(kind, "feature", ColumnSums.of(RawColumn(ColumnPlan(kind), values, names)))


def counts(told):
    return column_figures(told)["categories"]


# Small counts.


def test_a_rare_category_is_not_told_and_cannot_be_worked_out():
    names = ("a", "b", "c")
    held = column("category", np.repeat([0, 1, 2], [60, 30, 2]), names)
    told = protected(held, 5)
    # c is rare; b goes with it, for rows less a and b would be c.
    assert counts(told) == {"a": 60} and column_figures(told)["other"] == 32
    assert counts(protected(held, 1)) == {"a": 60, "b": 30, "c": 2}
    two = column("category", np.repeat([0, 1, 2, 0], [60, 3, 3, 0]), names)
    assert counts(protected(two, 5)) == {"a": 60}  # six rows in all: either may be any of them


def test_two_rare_positives_show_in_neither_class_nor_mean():
    held = column("boolean", np.r_[np.zeros(98), np.ones(2)])
    told = protected(held, 5)
    assert counts(told) == {"no": 95} and column_figures(told)["other"] == 5
    assert told.sums.mean == 0 and told.sums.squares == 0
    assert protected(column("boolean", np.r_[np.zeros(97), np.ones(3)]), 5) == told
    labels = protected(column("category", np.repeat([0, 1], [98, 2]), ("well", "ill")), 5)
    assert counts(labels) == {}
    fine = column("boolean", np.r_[np.zeros(90), np.ones(10)])
    assert protected(fine, 5).sums == fine.sums


def test_few_gaps_are_told_as_fewer_than_the_least():
    values = np.r_[np.arange(1.0, 98.0), [np.nan] * 3]
    told = protected(column("number", values), 5)
    other = protected(column("number", np.r_[np.arange(1.0, 99.0), [np.nan] * 2]), 5)
    assert told.hidden and told.sums.missing == other.sums.missing == 5
    assert sum(told.sums.bins.values()) == told.sums.present == 95
    assert column_figures(told, 5)["missing"] is None
    assert told.sums.deviation == pytest.approx(np.nanstd(values))
    kept = protected(column("category", np.r_[np.repeat([0, 1], 48), [-1] * 4], ("a", "b")), 5)
    assert kept.hidden and sum(kept.sums.counts.values()) == kept.sums.present == 95


def test_values_are_told_in_groups_at_their_mean_and_never_an_extreme():
    draw = np.random.default_rng(0)
    values = np.round(draw.normal(60, 10, 200))
    values[0], values[1] = 103.0, 7.0
    told = protected(column("number", values), 5).sums
    assert min(told.bins.values()) >= 5 and sum(told.bins.values()) == 200
    ends = [told.quantile(0.0), told.quantile(1.0)]
    assert values.min() < ends[0] and ends[1] < values.max()
    assert ends[0] == pytest.approx(np.sort(values)[:5].mean(), abs=3)
    assert told.quantile(0.5) == pytest.approx(np.median(values), abs=1)
    assert told.mean == values.mean()


def test_a_column_of_few_values_is_told_as_empty():
    told = protected(column("number", np.r_[[5.0, 7.0], [np.nan] * 60]), 5).sums
    assert told == ColumnSums(62, 62)


def test_where_no_cell_is_small_nothing_is_changed():
    whole = column("number", np.repeat([1.0, 2.0, 3.0], [50, 40, 30]))
    assert protected(whole, 5).sums == whole.sums


# Noise.


def test_noise_is_the_laplace_of_its_scale_and_hides_rare_cells():
    drawn = noise.from_seed(0, 0).laplaces(40_000, 3.0)
    ratio = math.exp(-1 / 3)
    assert np.all(drawn == np.round(drawn)) and abs(drawn.mean()) < 0.1
    assert drawn.var() == pytest.approx(2 * ratio / (1 - ratio) ** 2, rel=0.05)
    draw = np.random.default_rng(0)
    columns = {
        "x": column("number", draw.normal(100, 10, 5000)),
        "flag": column("boolean", (np.arange(5000) < 400).astype(float)),
        "c": column("category", np.repeat([0, 1], [4990, 10]), ("often", "rare")),
    }
    told = noisy(columns, 2.0, noise.from_seed(1, 0))
    assert told["x"].sums.mean == pytest.approx(100, abs=5)
    assert told["x"].sums.mean != columns["x"].sums.mean and not told["x"].sums.whole
    assert counts(told["flag"])["yes"] == pytest.approx(400, abs=40)
    assert list(counts(told["c"])) == ["often"] and counts(told["c"])["often"] != 4990


# What a node answers.


def question(**changes):
    head = {"run": "d1", "submitter": "", "version": VERSION, "experiment": TEXT, "clients": 3}
    return {**head, "place": 0, **changes}


def test_a_site_tells_what_its_policy_allows(tmp_path):
    for number, (policy, expected) in enumerate(
        [
            (SitePolicy(describe="none"), "describe"),
            (SitePolicy(min_sites=4), "min_sites"),
            (SitePolicy(min_examples=90), "min_examples"),
            (SitePolicy(max_runs=1), "max_runs"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        node = Node(site(folder, policy=policy))
        if expected == "max_runs":
            assert ask(node, "describe", question(run="first")).kind == "yes"
        assert code(ask(node, "describe", question())) == expected


def test_the_label_needs_no_declared_classes_to_be_described(tmp_path):
    text = export_experiment(
        parse_experiment(TOML.replace('classes = ["healthy", "ill"]', "") + FEDAVG)
    )
    told = ask(Node(site(tmp_path)), "describe", question(experiment=text))
    assert set(unpack_columns(told)["label"].sums.counts) == {"healthy", "ill"}


def test_rows_that_differ_in_few_are_not_described_twice(tmp_path):
    """A row that was added, removed or changed would be the difference of two descriptions."""
    own = site(tmp_path, policy=SitePolicy())
    ordered = export_experiment(parse_experiment(TOML + FEDAVG, ("data.ordered=true",)))
    first = ask(Node(own), "describe", question(experiment=ordered))
    again = ask(Node(own), "describe", question(run="d2", experiment=ordered))
    assert first.kind == again.kind == "yes"
    assert torch.equal(first.leaves["columns"], again.leaves["columns"])
    path = tmp_path / "hospital.csv"
    lines = path.read_text().splitlines()
    cells = lines[5].split(",")
    path.write_text("\n".join([*lines[:5], ",".join(["9.5", *cells[1:]]), *lines[6:]]) + "\n")
    assert (
        code(ask(Node(own), "describe", question(run="d3", experiment=ordered))) == "min_examples"
    )
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert (
        code(ask(Node(own), "describe", question(run="d4", experiment=ordered))) == "min_examples"
    )
    path.write_text("\n".join([lines[0], *lines[2:], lines[1]]) + "\n")  # another at its end
    assert (
        code(ask(Node(own), "describe", question(run="d5", experiment=ordered))) == "min_examples"
    )
    path.write_text("\n".join(lines) + "\n")
    assert ask(Node(own), "describe", question(run="d6", experiment=ordered)).kind == "yes"


@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_a_changed_value_is_not_the_difference_of_two_runs(kind, tmp_path):
    """Exact means leave when a run begins: of a plain table at once, of another when asked."""
    from test_limits import experiment, opening

    own = site(tmp_path, 110, policy=SitePolicy())
    path = tmp_path / "hospital.csv"
    lines = path.read_text().splitlines()
    if kind == "typed":
        lines = [f"{'ab'[n % 2] if n else 'ward'},{line}" for n, line in enumerate(lines)]
    path.write_text("\n".join(lines) + "\n")
    wanted = experiment('data.normalise="feature"')

    def told(run):
        node = Node(own)
        answer = ask(node, "open", opening(wanted, run=run))
        if answer.kind == "no" or kind == "plain":
            return answer
        return ask(node, "columns", {"run": run, "table": True})

    assert told("r1").kind == told("r2").kind == "yes"
    rows = load_node_data(own, export_experiment(wanted), 0).federations[0].train[0]
    cells = lines[row := 1 + int(rows[0])].split(",")
    changed = ",".join([*cells[:-2], "99.5", cells[-1]])
    path.write_text("\n".join([*lines[:row], changed, *lines[row + 1 :]]) + "\n")
    assert code(told("r3")) == "min_examples"


def test_calling_a_value_a_gap_does_not_tell_how_many_have_it(tmp_path):
    """Two runs whose columns differ in what is missing would tell of the rows between."""
    path = tmp_path / "hospital.csv"
    draw = np.random.default_rng(0)
    lines = [f"{draw.integers(30, 80)},{draw.integers(3)},{n % 2}" for n in range(200)]
    path.write_text("\n".join(["age,ward,label", *lines]) + "\n")
    own = NodeSettings("hospital", "test", tmp_path / "home", str(path), policy=SitePolicy())

    def described(run, *columns):
        more = tuple(f"data.columns.{one}" for one in columns)
        wanted = parse_experiment(TOML.replace('["healthy", "ill"]', '["0", "1"]') + FEDAVG, more)
        text = export_experiment(wanted)
        return ask(Node(own), "describe", question(run=run, experiment=text))

    assert described("d1").kind == "yes"
    hole = 'age={type="number", missing=["42"]}'
    assert code(described("d2", hole)) == "min_examples"
    assert code(described("d3", hole, 'ward="ignore"')) == "min_examples"
    assert code(described("d4", 'age={type="category", missing=["42"]}')) == "min_examples"
    assert described("d5", 'ward="category"').kind == "yes"


def test_the_same_rows_get_the_same_noise_and_epsilon_adds_up(tmp_path):
    policy = SitePolicy(describe_epsilon=5.0, max_epsilon=8.0)
    own = site(tmp_path, 300, policy=policy)
    first = ask(Node(own), "describe", question())
    again = ask(Node(own), "describe", question(run="d2"))
    assert torch.equal(first.leaves["columns"], again.leaves["columns"])
    exact = ask(
        Node(dataclasses.replace(own, home=tmp_path / "x", policy=UNLIMITED)),
        "describe",
        question(),
    )
    assert not torch.equal(first.leaves["columns"], exact.leaves["columns"])
    other = export_experiment(parse_experiment(TOML + FEDAVG, ("seeds=[1]",)))
    told = ask(Node(own), "describe", question(run="d3", experiment=other))
    assert code(told) == "max_epsilon"


def test_a_description_and_the_run_after_it_tell_of_the_same_rows(tmp_path):
    from test_limits import experiment, opening

    wanted = experiment('data.normalise="feature"')
    node = Node(site(tmp_path, 110))
    assert ask(node, "describe", question(experiment=export_experiment(wanted))).kind == "yes"
    assert ask(node, "open", opening(wanted)).kind == "yes"


# What a server takes.


def federation(folder, change=None, units=(), policies=None):
    folder.mkdir(exist_ok=True)
    nodes = {}
    for n in range(4):
        own = site(folder, 120, f"clinic-{n}", n, (policies or {}).get(n, UNLIMITED))
        if n in units:
            path = folder / f"clinic-{n}.csv"
            head, *lines = path.read_text().splitlines()
            scaled = [
                f"{100 + float(one.split(',')[0]):.3f},{one.split(',', 1)[1]}" for one in lines
            ]
            path.write_text("\n".join([head, *scaled]) + "\n")
        nodes[own.name] = Node(own)
    return Lying(nodes, change)


class Lying(InProcess):
    """Honest nodes, the first of which tells something else."""

    def __init__(self, nodes, change):
        super().__init__(nodes)
        self._change = change
        self.remarks = {}

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if message.kind == "remark":
            self.remarks[site] = message.head["remarks"]
        answer = super().call(site, blob, seconds)
        if self._change is None or site != "clinic-0" or message.kind != "describe":
            return answer
        told = protocol.unpack(answer)
        text = json.loads(told.leaves["columns"].numpy().tobytes())
        head, text = self._change(dict(told.head), text)
        raw = bytearray(json.dumps(text).encode())
        return protocol.pack("yes", head, {"columns": torch.frombuffer(raw, dtype=torch.uint8)})


def ran(transport, folder):
    return describe_nodes(make_messenger(transport, TEXT, folder), TEXT, "d1", folder)


def test_a_site_in_another_unit_is_named_to_the_lead_and_to_itself(tmp_path, caplog):
    transport = federation(tmp_path, units=(2,))
    content = ran(transport, tmp_path)
    assert [one["site"] for one in content["warnings"]] == ["clinic-2"]
    assert transport.remarks == {"clinic-2": [content["warnings"][0]["text"]]}
    assert "beside the other sites: m0: the mean of clinic-2" in caplog.text
    assert content["pooled"]["rows"] == 4 * 72
    assert json.loads((tmp_path / "description.json").read_text()) == content


def test_a_site_that_tells_nothing_is_left_out_in_words(tmp_path):
    content = ran(federation(tmp_path, policies={1: SitePolicy(describe="none")}), tmp_path)
    told = {one["site"]: one for one in content["sites"]}
    assert "does not allow statistics before training (describe)" in told["clinic-1"]["why"]
    assert content["pooled"]["sites"] == ["clinic-0", "clinic-2", "clinic-3"]
    none = federation(tmp_path / "b", policies=dict.fromkeys(range(4), SitePolicy(describe="none")))
    with pytest.raises(DeployError, match="no site tells anything"):
        ran(none, tmp_path / "b")


def _set(key, value):
    def change(head, text):
        return head, {**text, "m0": {**text["m0"], key: value}}

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("mean", float("nan")),
        _set("mean", 1e300),
        _set("squares", -1.0),
        _set("missing", -3),
        _set("rows", 10**9),
        _set("bins", [[0, 10**12]]),
        _set("bins", [["x", 1]]),
        _set("counts", {f"c{n}": 0 for n in range(2000)}),
        _set("counts", {"x" * 5000: 1}),
        _set("kind", "<script>"),
        lambda head, text: (head, {f"c{n}": text["m0"] for n in range(20_001)}),
        lambda head, text: (head, {"x" * 5000: text["m0"]}),
        lambda head, text: (head, [1, 2]),
        lambda head, text: ({**head, "rows": {"train": -1, "val": 0, "test": 0}}, text),
        lambda head, text: ({**head, "tells": "everything"}, text),
        lambda head, text: ({**head, "epsilon": float("inf")}, text),
    ],
)
def test_impossible_sums_leave_their_site_out(tmp_path, change):
    content = ran(federation(tmp_path, change), tmp_path)
    assert len(content["pooled"]["sites"]) == 3
    assert content["sites"][0]["why"] == protocol.CODES["statistics"] or content["sites"][0]["why"]


def test_sums_that_are_no_json_are_refused():
    for raw in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        leaf = torch.frombuffer(bytearray(raw or b" "), dtype=torch.uint8)
        with pytest.raises(Refused):
            unpack_columns(protocol.Message("yes", {}, {"columns": leaf}))
    with pytest.raises(Refused):
        unpack_columns(protocol.Message("yes", {}, {}))
    assert read_columns({}) == {}


def test_remarks_from_a_server_are_letters_and_few(caplog):
    disclosure.log_remarks(disclosure.log, ["a\x1b[31mb\nERROR forged"] * 100)
    assert len(caplog.records) == 20 and "\x1b" not in caplog.text
    assert "a?[31mb?ERROR forged" in caplog.text
    with pytest.raises(Refused):
        disclosure.log_remarks(disclosure.log, "text")
