"""Tables at 80 and 120 columns: real methods, 20 clients, names of any length; nothing is cut."""

import io
import json

import pytest
from typer.testing import CliRunner

from idiolect.cli import app, main
from idiolect.cli.comparison_tables import print_comparison
from idiolect.cli.layout import print_table, print_texts
from idiolect.cli.screen import PlainConsole, print_fairness, print_result
from idiolect.errors import shortened
from idiolect.methods import METHODS

WIDTHS = (80, 120)
TITLES = [method.title for method in METHODS.values()] + ["FedAvg + FT + MTL + KD"]


def screen(width):
    return PlainConsole(width=width, file=io.StringIO(), highlight=False)


def written(made, width):
    """Return what was printed; no line of a table is wider than the screen, no word cut."""
    text = made.file.getvalue()
    tables = [line for line in text.splitlines() if "  " in line.strip() or "─" in line]
    assert all(len(line.rstrip()) <= width for line in tables), text
    assert "…" not in text
    return text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_client_table_of_all_methods(width):
    made = screen(width)
    rows = [[f"client {n}", *(f"{10 + n}.{k % 10}" for k in range(len(TITLES)))] for n in range(20)]
    print_table(made, "Accuracy", ["client"], TITLES, rows, total=["mean", *["50.0"] * len(TITLES)])
    words = written(made, width).split()
    for title in TITLES:
        assert all(word in words for word in title.split()), title
    assert words.count("19") > 1  # the last client, in every block


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A real comparison of three methods with 20 clients."""
    from idiolect.experiment.compare import compare

    folder = tmp_path_factory.mktemp("compared")
    path = folder / "e.toml"
    path.write_text(
        'name = "x"\nrounds = 1\nseeds = [0, 1]\n'
        '[data]\npartition = { name = "iid", clients = 20 }\n'
        '[model]\nname = "mlr"\n[[methods]]\nname = "fedavg"\npersonalise = ["ft", "ewc", "kd"]\n'
        '[[methods]]\nname = "heurfedamp"\n[[methods]]\nname = "local"\n'
    )
    return compare(path, out=folder / "out"), folder / "out"


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_and_show(compared, width):
    content, folder = compared
    made = screen(width)
    print_comparison(made, content)
    text = written(made, width)
    assert "HeurFedAMP" in text and "difference" in text
    made = screen(width)
    document = json.loads((folder / "result.json").read_text())
    print_result(made, document)
    print_fairness(made, document["fairness"])
    text = written(made, width)
    assert all(f"client {n}" in text for n in range(20))
    assert "± clients" in text and "seconds" in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "command",
    [
        ["methods"],
        ["methods", "persfl"],
        ["repro"],
        ["data", "list"],
        ["data", "inspect", "embedded"],
    ],
)
def test_commands(command, width, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert "…" not in found.output.replace("0 … 9", "")
    lines = [line.rstrip() for line in found.output.splitlines()]
    sentences = ("Paper", "`idiolect", "PersFL (", "note:", "preset", "A path", "embedded,")
    assert not [x for x in lines if len(x) > width and not x.startswith(sentences)]


def test_names_of_any_length_are_shortened_in_the_middle():
    name = "hospital " + "x" * 5000 + " ward 7"
    assert len(shortened(name)) == 40 and shortened(name).startswith("hospital ")
    assert shortened(name).endswith("ward 7") and shortened("plain") == "plain"
    made = screen(80)
    print_table(made, "", ["client"], ["mean"], [[name, "50.0"]])
    print_texts(made, ("name", "text"), [[name, "word " * 50]])
    assert all(len(line) <= 80 for line in made.file.getvalue().splitlines())


def test_spare_columns_are_left_out_and_said_to_be():
    made = screen(40)
    heads = ["points", "p", "won-lost-level", "Wilcoxon"]
    print_table(made, "", ["ahead"], heads, [["FedAvg", "1", "2", "3", "4"]], spare=heads[2:])
    text = made.file.getvalue()
    assert "Wilcoxon" in text.split("Left out")[1] and "Wilcoxon" not in text.split("Left out")[0]
    made = screen(80)
    print_table(made, "", ["ahead"], heads, [["FedAvg", "1", "2", "3", "4"]], spare=heads[2:])
    assert "Left out" not in made.file.getvalue()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "there is no command 'nosuch'"),
        (["repoort", "x"], "there is no command 'repoort'; did you mean 'report'?"),
        (["run"], "idiolect run: missing argument"),
        (["run", "x.toml", "--nosuch"], "idiolect run: no such option: --nosuch"),
        (["compare", "x.toml", "--alpha", "a"], "idiolect compare: invalid value for '--alpha'"),
        (["data", "nosuch"], "idiolect data: there is no command 'nosuch'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(words, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["idiolect", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    errors = capsys.readouterr().err
    assert caught.value.code == 2 and errors.count("\n") == 1
    assert errors.startswith("error: ") and said in errors


@pytest.mark.parametrize("group", [[], ["data"], ["federation"]])
def test_no_summary_of_a_command_is_cut(group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = CliRunner().invoke(app, [*group, "--help"]).output.splitlines()
    assert not [line for line in lines[1:] if line.endswith("...")]
