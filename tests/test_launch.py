"""Records of a launch become a sample: clock rate, windows, gaps, and the time that counts for each store method."""

import numpy as np
import pytest

from xstage.calibration.launch import reduce_records
from xstage.calibration.protocol import Point

GHZ = 1.98


def records(periods_ns: list[float], bursts: int = 60, issue_ns: float = 500, posted_ns: float = 200) -> tuple[np.ndarray, np.ndarray]:
    """Producers that repeat a burst each with its own period; issue, source-free and fence times the same for all."""
    k = len(periods_ns)
    out = np.zeros((bursts, k, 4), np.int64)
    for c, period in enumerate(periods_ns):
        out[:, c, 0] = 10**15 + np.round(np.arange(bursts) * period)
        out[:, c, 1:] = np.round(np.array([posted_ns, issue_ns, 3 * issue_ns]) * GHZ)
    end = out[-1, :, 0]
    clocks = np.stack([np.full(k, 10**15), np.full(k, 7), end, 7 + np.round((end - 10**15) * GHZ).astype(np.int64)], 1)
    return out, clocks


def test_times_are_nanoseconds_of_the_measured_clock() -> None:
    s = reduce_records(*records([1000.0] * 4), Point("bulk", "free", 4, 4096, 480), rank=1)
    assert s.sm_clock_ghz == pytest.approx(GHZ, rel=1e-4)
    assert s.issue_ns == pytest.approx([500] * len(s.issue_ns), abs=1)
    assert s.post_ns == pytest.approx([200] * len(s.post_ns), abs=1)
    assert s.gap_seen_ns == pytest.approx([500] * len(s.gap_seen_ns), abs=2)
    assert (s.rank, s.visible_ns) == (1, [])


def test_the_issue_of_ordinary_stores_ends_when_they_are_posted() -> None:
    s = reduce_records(*records([4000.0] * 2), Point("st_global", "isolated", 2, 4096), rank=0)
    assert s.issue_ns[0] == pytest.approx(200, abs=1)
    assert s.left_ns[0] == pytest.approx(500, abs=1)
    assert s.visible_ns[0] == pytest.approx(1500, abs=1)
    assert s.gap_seen_ns[0] == pytest.approx(2500, abs=2)  # from the fence on


def test_rate_counts_only_while_every_producer_is_active() -> None:
    # One producer three times as fast as the other: after it ends, the other would run alone.
    s = reduce_records(*records([1000.0, 3000.0]), Point("st_global", "free", 2, 3000), rank=0)
    assert s.rate == pytest.approx(3000 / 1000 + 3000 / 3000, rel=1e-3)
    assert s.period_ns == pytest.approx(2 / (1 / 1000 + 1 / 3000), rel=1e-3)
    assert s.window_ns < 59_000


def test_skew_is_the_spread_of_starts() -> None:
    rows, clocks = records([1000.0] * 3)
    rows[:, 2, 0] += 96
    s = reduce_records(rows, clocks, Point("st_global", "aligned", 3, 4096), rank=0)
    assert s.skew_ns == pytest.approx([96] * len(s.skew_ns))
