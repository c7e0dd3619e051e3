"""What tests of several methods have in common."""

import pytest

from idiolect.core.client import Local


@pytest.fixture(params=[False, True], ids=["a pass for each", "one pass for both"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that may differ in training, and such as surely do not: `Line` does for both."""
    monkeypatch.setattr(Local, "steady", request.param)
