"""What `import idiolect` offers, and the names that modules had in version 0.1."""

import subprocess
import sys
from importlib import import_module

import pytest

import idiolect
from idiolect.core import client, losses, method, optim, tree


def test_every_name_is_there_and_what_it_says():
    for name in idiolect.__all__:
        assert getattr(idiolect, name) is not None
    assert set(idiolect.__all__) <= set(dir(idiolect))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = idiolect.nothing


def test_the_author_of_a_method_imports_from_the_front_door():
    from idiolect import Method, Report, Sent, Setup, setting

    assert (Method, Report, Sent, Setup, setting) == (
        method.Method, method.Report, method.Sent, method.Setup, method.setting
    )  # fmt: skip
    assert (idiolect.tree, idiolect.optim, idiolect.losses) == (tree, optim, losses)


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("method", "mean_report", "core.method"),
        ("local", "Local", "core.client"),
        ("tree", "split_layers", "core.tree"),
        ("optim", "adam", "core.optim"),
        ("losses", "distil", "core.losses"),
        ("aggregate", "Aggregator", "aggregation"),
        ("robust", "RULES", "aggregation"),
        ("privacy", "Private", "aggregation"),
    ],
)
def test_an_old_module_is_the_new_one_and_warns(old, name, new, monkeypatch):
    monkeypatch.delitem(sys.modules, f"idiolect.{old}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"idiolect.{old} is now idiolect.{new}; ") as seen:
        found = import_module(f"idiolect.{old}")
    assert len(seen) == 1
    assert found is import_module(f"idiolect.{new}")
    assert hasattr(found, name)
    assert found.__name__ == f"idiolect.{new}"


def test_a_warning_names_the_line_of_the_import():
    code = "import warnings\nwarnings.simplefilter('error')\nfrom idiolect.local import Local"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'File "<string>", line 3' in done.stderr
    assert "DeprecationWarning: idiolect.local is now idiolect.core.client" in done.stderr


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"idiolect\.nothing"):
        import_module("idiolect.nothing")
    assert client.__name__ == "idiolect.core.client"
