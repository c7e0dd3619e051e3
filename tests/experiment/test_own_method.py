"""A method in a user's file, `module:Class`, and one that a package brings as an entry point."""

import importlib.metadata
import sys

import pytest

from idiolect.errors import ConfigError
from idiolect.experiment import untrusted
from idiolect.experiment.adapt import adapt
from idiolect.experiment.compare import compare
from idiolect.experiment.components import build_method
from idiolect.experiment.load import load_experiment
from idiolect.experiment.portable import import_experiment
from idiolect.experiment.run import run
from idiolect.experiment.untrusted import CLOSED, Permissions, trust_named_code

MODULE = '''
from dataclasses import dataclass
from idiolect.core.method import Method, Report, mean_report, setting

@dataclass(frozen=True, kw_only=True)
class Halved(Method):
    """FedAvg that goes half the way."""
    share: float = setting(0.5, "of the way", above=0, most=1)
    def client_step(self, sent, personal, local):
        return Report(self.fit(local, sent.shared), local.size), personal
    def server_step(self, state, cohort, reports):
        mean = mean_report(reports)
        return {name: state[name] + self.share * (mean[name] - state[name]) for name in state}

class Loose(Method):
    share: float = setting(0.5, "of the way")

@dataclass(frozen=True, kw_only=True)
class Stepless(Method):
    pass

def function():
    pass
'''

FILE = """
name = "own"
rounds = 2
[data]
partition = { name = "iid", clients = 3 }
options = {}
[model]
name = "mlr"
[[methods]]
name = "NAME"
share = 0.25
[[methods]]
name = "fedavg"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a module of a name that no other test has."""
    module = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    (tmp_path / "e.toml").write_text(FILE.replace("NAME", f"{module}:Halved"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    yield tmp_path, module
    sys.modules.pop(module, None)


def test_a_method_beside_the_file_is_trained_resumed_compared_and_adapted(own):
    folder, module = own
    first = run(folder / "e.toml", out=folder / "run")
    method = first["methods"]["Halved"]
    assert method["settings"]["share"] == 0.25 and method["method"] == f"{module}:Halved"
    changes = ["rounds=3", "methods.Halved.lr=0.01"]
    again = run(folder / "e.toml", changes, out=folder / "run", resume=True)
    assert again["methods"]["Halved"]["rounds"] == 3
    compared = compare(
        folder / "e.toml", ["tune.methods.Halved.share=[0.5,1.0]"], out=folder / "compared"
    )
    assert set(compared["splits"][0]["comparison"]["methods"]) == {"Halved", "FedAvg"}
    with pytest.raises(ConfigError, match=f"names the method '{module}:Halved', which is code"):
        adapt(folder / "run", "embedded", method="Halved")


def test_it_is_refused_from_outside_unless_its_package_is_allowed(own):
    folder, module = own
    text = (folder / "e.toml").read_text()
    with pytest.raises(ConfigError, match="neither built in nor of a package"):
        import_experiment(text, reach=CLOSED)
    assert module not in sys.modules
    raw = {"methods": [{"name": f"{module}:Halved"}]}
    reach = trust_named_code(raw)._replace(folders=(str(folder),))
    (table, _) = import_experiment(text, reach=reach).methods
    assert build_method(table).share == 0.25
    # What a module merely imports is not called from outside.
    with pytest.raises(ConfigError, match=r"is no function or class that .* itself defines"):
        untrusted.import_factory(
            f"{module}:Method", "here", Permissions(packages=(module,), base=None), "method"
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Loose", "is no dataclass; write @dataclass"),
        ("Stepless", "has no client_step"),
        ("function", "is no class derived from Method"),
        ("Absent", "cannot be imported"),
    ],
)
def test_half_a_method_is_one_line(own, name, words):
    folder, module = own
    path = folder / "half.toml"
    path.write_text(FILE.replace("NAME", f"{module}:{name}"))
    with pytest.raises(ConfigError, match=words) as caught:
        load_experiment(path)
    assert "\n" not in str(caught.value) and "methods[0].name" in str(caught.value)


def test_a_broken_module_is_one_line(own):
    folder, _ = own
    (folder / "broken_own.py").write_text("def f(:\n")
    path = folder / "broken.toml"
    path.write_text(FILE.replace("NAME", "broken_own:F"))
    with pytest.raises(ConfigError, match=r"cannot be imported .SyntaxError"):
        load_experiment(path)


def test_a_package_brings_methods_by_entry_points(own, monkeypatch):
    folder, module = own
    point = importlib.metadata.EntryPoint("halved", f"{module}:Halved", "idiolect.methods")
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if "methods" in group else []
    )
    path = folder / "packaged.toml"
    path.write_text(FILE.replace("NAME", "halved"))
    (table, _) = load_experiment(path).methods
    assert (table.name, table.label) == ("halved", "halved")
    with pytest.raises(ConfigError, match="neither built in"):
        import_experiment(path.read_text(), reach=CLOSED)
    assert untrusted.custom_code({"methods": [{"name": "halved"}]}) == {
        f"{module}:Halved": "method"
    }
