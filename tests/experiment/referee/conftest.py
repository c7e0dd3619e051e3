"""A bad method, judged for real on the four hospitals."""

import json
import sys

import pytest
from judging import BAD, SMALL

from idiolect.engine.outcome import Silent
from idiolect.experiment.referee.challenger import find_challenger
from idiolect.experiment.referee.referee_run import referee


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("referee")
    sys.modules.pop("amnesia_method", None)  # a worker may make this folder more than once
    (folder / "amnesia_method.py").write_text(BAD)
    return folder


@pytest.fixture(scope="session")
def judged(home):
    """A bad method on the hospitals, beside the stored baselines."""
    challenger = find_challenger(str(home / "amnesia_method.py"), SMALL)
    content, path = referee(SMALL, challenger, home / "out", Silent(), only=["heart"], device="cpu")
    assert json.loads(path.read_text()) == content
    return content
