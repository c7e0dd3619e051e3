import hashlib

import pytest
from hubserver import serving

from idiolect.data.cache import download_file, hub_url, recorded_digest
from idiolect.errors import DataError

CONTENT = bytes(range(256)) * 4000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def hub(monkeypatch):
    with serving({"/datasets/a/b/resolve/main/c.parquet": CONTENT}) as running:
        monkeypatch.setenv("IDIOLECT_HUB", running.address)
        yield running


def url():
    return hub_url("a/b", "c.parquet")


def test_a_download_is_checked_and_recorded(hub, tmp_path):
    target = tmp_path / "deep" / "c.parquet"
    assert recorded_digest(target) is None
    assert download_file(url(), target) == DIGEST == recorded_digest(target)
    assert target.read_bytes() == CONTENT
    assert sorted(path.name for path in target.parent.iterdir()) == [
        "c.parquet",
        "c.parquet.sha256",
    ]


def test_corruption_never_enters_and_is_thrown_away(hub, tmp_path):
    target = tmp_path / "c.parquet"
    hub.fault = "corrupt"
    with pytest.raises(DataError, match=f"arrived damaged: sha256 .* expected {DIGEST}"):
        download_file(url(), target)
    assert list(tmp_path.iterdir()) == []
    hub.fault = ""
    assert download_file(url(), target) == DIGEST


def test_a_broken_transfer_continues_where_it_stopped(hub, tmp_path):
    target = tmp_path / "c.parquet"
    hub.fault = "cut"
    with pytest.raises(DataError, match=f"broke off after {len(CONTENT) // 2} of {len(CONTENT)}"):
        download_file(url(), target)
    assert not target.exists()
    hub.fault = ""
    hub.requests.clear()
    assert download_file(url(), target) == DIGEST
    assert hub.requests[-1][1] == f"bytes={len(CONTENT) // 2}-"


def test_a_rotten_beginning_is_found_at_the_end(hub, tmp_path):
    target = tmp_path / "c.parquet"
    (tmp_path / "c.parquet.part").write_bytes(b"\xff" * 1000)
    with pytest.raises(DataError, match="arrived damaged"):
        download_file(url(), target)
    assert list(tmp_path.iterdir()) == []


def test_a_part_longer_than_the_file_is_dropped(hub, tmp_path):
    (tmp_path / "c.parquet.part").write_bytes(CONTENT + b"more")
    assert download_file(url(), tmp_path / "c.parquet") == DIGEST


def test_a_hub_that_states_no_digest_still_gets_one_recorded(hub, tmp_path):
    hub.states_digest = False
    (tmp_path / "c.parquet.part").write_bytes(b"half of what the file used to be")
    assert download_file(url(), tmp_path / "c.parquet") == DIGEST


def test_absent_files_and_addresses_are_named(hub, tmp_path, monkeypatch):
    hub.fault = "missing"
    with pytest.raises(DataError, match=r"could not be downloaded.*404"):
        download_file(url(), tmp_path / "c.parquet")
    monkeypatch.setenv("IDIOLECT_HUB", "file:///etc")
    with pytest.raises(DataError, match="expected an https://"):
        url()
