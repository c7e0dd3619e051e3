import hashlib

import numpy as np
import pytest
from hubserver import serving

from idiolect.data.cache import cache_key, cached, download_file, hub_url, recorded_digest
from idiolect.data.sources import cache_root
from idiolect.errors import DataError


def refuse(_):
    raise AssertionError("a second load must not write")


def test_a_second_load_only_maps(toy, tmp_path):
    written = cached(tmp_path, "toy-1", lambda _: toy(provenance="ours"))
    mapped = cached(tmp_path, "toy-1", refuse)
    assert isinstance(mapped.x, np.memmap) and not mapped.x.flags.writeable
    for field in ("x", "y", "clients", "origin", "shift", "scale"):
        assert np.array_equal(getattr(mapped, field), getattr(toy(), field))
    assert (mapped.classes, mapped.client_names) == (toy().classes, toy().client_names)
    assert mapped.provenance == written.provenance == "ours"


def test_columns_that_are_absent_stay_absent(toy, tmp_path):
    bare = toy(clients=None, client_names=(), origin=None)
    mapped = cached(tmp_path, "toy-1", lambda _: bare)
    assert mapped.clients is None and mapped.origin is None


def test_a_failure_while_writing_leaves_nothing(toy, tmp_path):
    def fail(folder):
        np.save(folder / "x.npy", np.zeros(3))
        raise DataError("the source is damaged")

    with pytest.raises(DataError, match="the source is damaged"):
        cached(tmp_path, "toy-1", fail)
    assert list(tmp_path.iterdir()) == []
    assert len(cached(tmp_path, "toy-1", lambda _: toy())) == 60


def test_of_two_writers_the_second_finds_the_work_done(toy, tmp_path):
    def overtaken(_):
        cached(tmp_path, "toy-1", lambda _: toy(60))
        return toy(30)

    assert len(cached(tmp_path, "toy-1", overtaken)) == 60
    assert [path.name for path in tmp_path.iterdir()] == ["toy-1"]


def test_a_damaged_folder_is_named(toy, tmp_path):
    cached(tmp_path, "toy-1", lambda _: toy())
    (tmp_path / "toy-1" / "x.npy").write_bytes(b"not an array")
    with pytest.raises(DataError, match=r"toy-1 is damaged.*delete it"):
        cached(tmp_path, "toy-1", refuse)


def test_a_place_that_cannot_be_written_is_named(toy, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written.*set IDIOLECT_CACHE"):
        cached(tmp_path / "file", "toy-1", lambda _: toy())


def test_keys_and_places(tmp_path, monkeypatch):
    assert cache_key("a", ["1", "2"]) != cache_key("a", ["1", "3"])
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "env"))
    assert cache_root(None) == tmp_path / "env"
    assert cache_root(tmp_path) == tmp_path
    monkeypatch.delenv("IDIOLECT_CACHE")
    assert cache_root(None).parts[-2:] == (".cache", "idiolect")


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
