"""Student's distribution in plain Python, beside scipy's."""

import pytest

from idiolect.results.statistics import student_p, student_quantile

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30])
def test_it_is_scipys(freedom: int) -> None:
    for t in (0.0, 0.3, 1.0, -2.5, 12.0):
        assert student_p(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-12)
    for p in (0.5, 0.1, 0.05, 0.001):
        assert student_quantile(p, freedom) == pytest.approx(stats.t.isf(p / 2, freedom), rel=1e-9)
