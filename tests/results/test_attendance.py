"""One record for each site and round."""

from idiolect.results.attendance import NOT_DRAWN, REPORTED, AttendanceLog, by_site, words


def test_a_round_that_is_done_again_counts_once_and_torn_lines_do_not(tmp_path):
    """Two rounds, of which the second was done again after a crash that tore a line."""
    log = AttendanceLog(tmp_path)
    log.add("A", 1, [{"a": REPORTED, "b": "gone"}])
    log.add("A", 2, [{"a": "gone", "b": "gone"}])
    with (tmp_path / "attendance.jsonl").open("a") as file:
        file.write('\n{"label": "A", "rou')
    log.add("A", 2, [{"a": REPORTED, "b": REPORTED}])
    log.add("B", 1, [{"a": "gone", "b": "gone"}])
    (record,) = AttendanceLog(tmp_path).read("A", 3, 1)
    assert record == [{"a": REPORTED, "b": "gone"}, {"a": REPORTED, "b": REPORTED}, {}]
    assert AttendanceLog(tmp_path).read("A", 1, 1) == [[{"a": REPORTED, "b": "gone"}]]


def test_missed_rounds_are_spans_with_a_cause():
    did = [REPORTED, "gone", "gone", "late", NOT_DRAWN, "gone", REPORTED]
    found = by_site([{"a": REPORTED, "b": one} for one in did])
    assert found["a"] == {
        "reported": 7,
        "trained": 0,
        "not_drawn": 0,
        "at_work": 0,
        "missed": 0,
        "spans": [],
    }
    assert found["b"]["missed"] == 4 and found["b"]["not_drawn"] == 1
    assert words(found) == ["b missed 4 of 6 rounds: 2-3 (gone), 4 (late), 6 (gone)"]
