"""Every closed form of the model against the exact recurrence, the paper's numbers, broadcasting, and bad input.

Properties are held by hypothesis over parameters far wider than any machine. The recurrence itself is held against inflow and
outflow written out piece by piece. Not covered: whether hardware follows the model.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage.burst_gap import (
    Burst,
    bursts_to_saturation,
    completion_coupled_period_ns,
    isolated_issue_ns,
    issue_ns,
    knee_bytes_per_producer,
    peak_outstanding_bytes,
    period_ns,
    recovery_gap_ns,
    recurrence,
    saturating_producers,
    stall_ns,
)
from xstage.errors import XStageError
from xstage.platform import KiB, MiB, Platform, StoreMethod

settings.register_profile("quick", max_examples=150, deadline=None)
settings.load_profile("quick")


def one(rate: float, capacity: float, floor: float, producers: float, size: float) -> Platform:
    """A platform of which exactly one (K, B) is known."""
    method = StoreMethod("st_global", (producers,), (rate,), (producers,), (capacity,), (producers,), (size,), ((floor,),))
    return Platform("p", "measured", 132, 2, {"st_global": method})


@st.composite
def cases(draw: st.DrawFn) -> tuple[Platform, Burst, float, float, float, float, float]:
    """A platform and a burst; V/R, T_iss⁰, Q/R and G are drawn against each other so that every branch is visited."""
    rate = draw(st.floats(1.0, 5_000.0))
    drain = draw(st.floats(10.0, 100_000.0))
    floor = drain * draw(st.floats(0.01, 2.0))
    capacity = drain * rate * draw(st.floats(0.01, 3.0))
    gap = drain * draw(st.one_of(st.just(0.0), st.floats(0.0, 3.0)))
    producers = draw(st.integers(1, 148))
    size = drain * rate / producers
    return one(rate, capacity, floor, producers, size), Burst(producers, size, gap), rate, capacity, floor, gap, drain * rate


def run(volume: float, gap: float, floor: float, rate: float, capacity: float, count: int, start: float = 0.0):  # type: ignore[no-untyped-def]
    return recurrence(np.full(count, volume), gap, floor, rate, capacity, start)


def settled(volume: float, gap: float, floor: float, rate: float, capacity: float) -> int:
    """Bursts after which the outstanding bytes have reached their steady state from any start in [0, Q]."""
    drift = abs(volume - rate * (floor + gap))
    return 5 if drift < 1e-9 * volume else int(min(3 + math.ceil(capacity / drift), 100_000))


@given(cases(), st.booleans())
def test_steady_state(case, full) -> None:  # type: ignore[no-untyped-def]
    """After many bursts, from an empty or a full path, T_iss is the closed form and so is the period."""
    platform, burst, rate, capacity, floor, gap, volume = case
    count = settled(volume, gap, floor, rate, capacity)
    if count > 20_000 or abs(volume - rate * (floor + gap)) < 1e-9 * volume:
        return  # at the very edge of the rate bound the path fills infinitely slowly
    path = run(volume, gap, floor, rate, capacity, count + 2, capacity if full else 0.0)
    expected = float(issue_ns(burst, platform))
    assert path.issue_ns[-1] == pytest.approx(expected, rel=1e-6)
    assert path.start_ns[-1] - path.start_ns[-2] == pytest.approx(float(period_ns(burst, platform)), rel=1e-6)
    assert expected == pytest.approx(max(floor, volume / rate - gap, (volume - capacity) / rate))
    assert float(stall_ns(burst, platform)) == pytest.approx(expected - floor, abs=1e-6 * expected)


@given(cases())
def test_the_path_never_holds_more_than_its_capacity_or_less_than_nothing(case) -> None:  # type: ignore[no-untyped-def]
    _, _, rate, capacity, floor, gap, volume = case
    path = run(volume, gap, floor, rate, capacity, 50)
    assert np.all(path.outstanding_after <= capacity * (1 + 1e-9))
    assert np.all(path.outstanding_after >= 0)
    assert np.all(path.outstanding_before >= 0)
    assert np.all(path.issue_ns >= floor)
    injected, drained = volume * np.arange(1, 51), path.start_ns + path.issue_ns
    assert np.all(injected - path.outstanding_after <= rate * drained * (1 + 1e-9))  # nothing drains faster than R


@given(cases())
def test_isolated_burst(case) -> None:  # type: ignore[no-untyped-def]
    platform, burst, rate, capacity, floor, gap, volume = case
    path = run(volume, gap, floor, rate, capacity, 1)
    assert path.issue_ns[0] == pytest.approx(float(isolated_issue_ns(burst, platform)))
    assert path.outstanding_after[0] == pytest.approx(min(float(peak_outstanding_bytes(burst, platform)), capacity), abs=1e-9 * volume)


@given(cases())
def test_first_burst_that_is_held_up(case) -> None:  # type: ignore[no-untyped-def]
    """From an empty path the first held-up burst is the next whole number above the fluid count."""
    platform, burst, rate, capacity, floor, gap, volume = case
    count = float(bursts_to_saturation(burst, platform))
    if count > 3_000 and math.isfinite(count):
        return
    if math.isfinite(count) and abs(count - round(count)) < 1e-6:
        return  # rounding decides
    path = run(volume, gap, floor, rate, capacity, 5 + (int(count) if math.isfinite(count) else 200))
    held = np.flatnonzero(path.issue_ns > floor * (1 + 1e-9))
    if math.isinf(count):
        assert held.size == 0
    else:
        assert held[0] + 1 == math.floor(count) + 1


@given(cases())
def test_recovery_gap(case) -> None:  # type: ignore[no-untyped-def]
    """With a gap of G* nothing of the burst before is left, with any less something is."""
    platform, burst, rate, capacity, floor, _, volume = case
    gap = float(recovery_gap_ns(burst, platform))
    # Where the terms nearly cancel, what is left is their rounding.
    assert gap == pytest.approx(max(volume / rate - floor, 0.0), abs=1e-12 * max(floor, 1.0))
    if capacity < volume - rate * floor:  # a burst that does not fit is slowed down, which leaves Q to drain
        return
    before = run(volume, gap, floor, rate, capacity, 3).outstanding_before
    assert np.all(before <= 1e-9 * volume)
    if gap > 1e-3 * volume / rate:
        assert run(volume, 0.99 * gap, floor, rate, capacity, 3).outstanding_before[1] > 0


@given(cases())
def test_saturating_producers(case) -> None:  # type: ignore[no-untyped-def]
    """Below K* a burst leaves nothing outstanding when its issue ends."""
    platform, burst, rate, _, floor, _, volume = case
    most = float(saturating_producers(burst, platform))
    assert most == pytest.approx(rate * floor / (volume / float(burst.producers)))
    if abs(most / float(burst.producers) - 1) > 1e-9:
        assert (float(burst.producers) > most) == (float(peak_outstanding_bytes(burst, platform)) > 0)


@given(cases())
def test_completion_coupled_period_is_never_shorter(case) -> None:  # type: ignore[no-untyped-def]
    platform, burst, rate, _, floor, gap, volume = case
    coupled = float(completion_coupled_period_ns(burst, platform))
    assert coupled == pytest.approx(gap + volume / rate)
    if floor <= volume / rate:  # an issuer limited by its own instructions gains nothing
        assert coupled >= float(period_ns(burst, platform)) * (1 - 1e-12)


BURSTS = st.lists(st.tuples(st.floats(1, 1e7), st.floats(0, 3e4), st.floats(1, 5e3)), min_size=1, max_size=12)


@given(BURSTS, st.floats(50, 900), st.floats(1e4, 1e7))
def test_recurrence_against_inflow_and_outflow(bursts, rate, capacity) -> None:  # type: ignore[no-untyped-def]
    """Mixed sizes, gaps and floors: bytes flow in at V/T_iss⁰ while there is room, at R once the path is full, and out at R."""
    volume, gap, floor = (np.array(v) for v in zip(*bursts, strict=True))
    path = recurrence(volume, gap, floor, rate, capacity)
    q = 0.0
    for i in range(len(volume)):
        inflow = volume[i] / floor[i]
        if inflow > rate and q + (inflow - rate) * floor[i] > capacity:  # fills up on the way
            until_full = (capacity - q) / (inflow - rate)
            time = until_full + (volume[i] - inflow * until_full) / rate
            q = capacity
        else:
            time = floor[i]
            q = max(q + (inflow - rate) * time, 0.0)
        assert path.issue_ns[i] == pytest.approx(time, rel=1e-9, abs=1e-6)
        assert path.outstanding_after[i] == pytest.approx(q, rel=1e-9, abs=1e-3)
        q = max(path.outstanding_after[i] - rate * gap[i], 0.0)


def test_recurrence_shapes_and_time() -> None:
    path = recurrence(np.array([[1000.0, 2000.0, 500.0], [10.0, 10.0, 10.0]]), 5.0, 1.0, 100.0, 800.0, np.array([0.0, 800.0]))
    assert path.issue_ns.shape == (2, 3)
    # First row by hand: (1000 − 800)/100 = 2, full; 5 ns drain 500; (300 + 2000 − 800)/100 = 15, full again; 300 + 500 just fit.
    np.testing.assert_allclose(path.issue_ns[0], [2.0, 15.0, 1.0])
    np.testing.assert_allclose(path.outstanding_before[0], [0.0, 300.0, 300.0])
    np.testing.assert_allclose(path.outstanding_after[0], [800.0, 800.0, 700.0])
    np.testing.assert_allclose(path.start_ns[0], [0.0, 7.0, 27.0])
    np.testing.assert_allclose(path.outstanding_before[1], [800.0, 210.0, 0.0])
    assert recurrence(5.0, 1.0, 1.0, 1.0, 1.0).issue_ns.shape == (1,)


def test_papers_numbers(paper: Platform) -> None:
    """Sections 3.5 and 4.3: K = 148, B = 32 KB, T_iss⁰ = 0.76 µs, R = 717 GB/s, Q = 4.25 MiB."""
    burst = Burst(148, 32 * KiB, 0.0)
    assert float(recovery_gap_ns(burst, paper)) / 1e3 == pytest.approx(6.0, abs=0.05)
    assert float(peak_outstanding_bytes(burst, paper)) / MiB == pytest.approx(4.1, abs=0.05)
    assert float(burst.burst_bytes) / MiB == pytest.approx(4.6, abs=0.05)
    assert float(isolated_issue_ns(burst, paper)) == 760
    assert float(issue_ns(burst, paper)) == pytest.approx(148 * 32 * KiB / 717)
    assert float(knee_bytes_per_producer(148, paper)) / KiB == pytest.approx(33, abs=0.3)
    assert 148 * float(knee_bytes_per_producer(148, paper)) / MiB == pytest.approx(4.77, abs=0.03)
    assert float(issue_ns(Burst(148, 32 * KiB, 6_100.0), paper)) == 760
    assert float(completion_coupled_period_ns(Burst(148, 32 * KiB, 80_000.0), paper)) == pytest.approx(80_000 + 6_764, abs=1)


def test_knee_is_where_isolated_bursts_leave_the_floor(measured: Platform) -> None:
    for method, least in (("st_global", 26 * KiB), ("bulk", 10 * KiB)):
        table = measured.method(method)
        knees = knee_bytes_per_producer(np.array([8, 66, 132]), measured, method)
        assert knees.shape == (3,)
        for k, knee in zip((8, 66, 132), knees, strict=True):
            assert knee > least
            below, above = (float(isolated_issue_ns(Burst(k, knee * f), measured, method)) for f in (0.999, 1.01))
            assert below == float(table.issue_floor_ns(k, knee * 0.999))
            assert above > float(table.issue_floor_ns(k, knee * 1.01))


def test_no_knee_when_producers_cannot_outrun_the_path() -> None:
    assert knee_bytes_per_producer(1, one(rate=10.0, capacity=1e4, floor=500.0, producers=1, size=1000.0)) == np.inf


def test_broadcasting(measured: Platform) -> None:
    producers, sizes, gaps = np.array([16, 132])[:, None, None], np.array([8, 32, 64])[:, None] * KiB, np.array([0.0, 1e3, 1e4, 2e4])
    whole = issue_ns(Burst(producers, sizes, gaps), measured)
    assert whole.shape == (2, 3, 4)
    for i, j, n in np.ndindex(2, 3, 4):
        single = Burst(int(producers[i, 0, 0]), int(sizes[j, 0]), float(gaps[n]))
        assert whole[i, j, n] == float(issue_ns(single, measured))
        assert stall_ns(Burst(producers, sizes, gaps), measured)[i, j, n] == float(stall_ns(single, measured))
    for function in (period_ns, recovery_gap_ns, peak_outstanding_bytes, saturating_producers, bursts_to_saturation, isolated_issue_ns,
                     completion_coupled_period_ns):  # fmt: skip
        assert function(Burst(producers, sizes, gaps), measured).shape == (2, 3, 4)


BAD_BURSTS = [
    ((0, 1, 0), "producers: 0 must be a finite number of at least 1"), ((-3, 1, 0), "producers: -3"), ((math.nan, 1, 0), "producers: nan"),
    ((1, 0, 0), "bytes_per_producer: 0 must be a finite number above 0"), ((1, -5, 0), "bytes_per_producer: -5"),
    ((1, math.inf, 0), "bytes_per_producer: inf"), ((1, 1, -1), "gap_ns: -1 must be a finite number of at least 0"),
    ((1, 1, math.nan), "gap_ns: nan"), ((1, np.array([4.0, -2.0]), 0), "bytes_per_producer: -2"),
    (("x", 1, 0), "producers: 'x' is not a number"),
    ((1, None, 0), "bytes_per_producer"), ((1, 1, [0, [1]]), "gap_ns"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BAD_BURSTS, ids=[m for _, m in BAD_BURSTS])
def test_bad_bursts(fields, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(XStageError) as error:
        Burst(*fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["burst_bytes", "gap_ns", "issue_floor_ns", "drain_rate", "capacity_bytes", "outstanding_bytes"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "x"])
def test_bad_recurrence(name: str, value: object) -> None:
    good = {"burst_bytes": 1.0, "gap_ns": 1.0, "issue_floor_ns": 1.0, "drain_rate": 1.0, "capacity_bytes": 1.0}
    with pytest.raises(XStageError, match=name):
        recurrence(**{**good, name: value})  # type: ignore[arg-type]


def test_zero_rate_and_unknown_method(paper: Platform) -> None:
    with pytest.raises(XStageError, match="drain_rate: must be finite and above 0"):
        recurrence(1.0, 1.0, 1.0, 0.0, 1.0)
    with pytest.raises(XStageError, match="method: 'tma' is not in platform 'paper-8gpu', which has st_global"):
        issue_ns(Burst(1, 1), paper, "tma")
