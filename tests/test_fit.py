"""The fit recovers a platform it has not seen from samples made by the model with noise, and each gate fails when it should.

Not covered: real hardware (tests/gpu) and the reduction of raw records (test_launch).
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from xstage.burst_gap import recurrence
from xstage.calibration.fit import drain_rates, fit_method, fit_residuals, gates, held_out, limits
from xstage.calibration.protocol import Point, points, producer_grid
from xstage.calibration.table import sweep_table
from xstage.errors import CalibrationFailed
from xstage.platform import KiB, Platform
from xstage.samples import Sample

SMS, PER_SM_RATE, RATE, PER_SM_CAPACITY, LATENCY = 132, 48.0, 372.0, 26 * KiB, 2000.0
CAPACITY_PER_PEER = 0.5  # what each further peer adds, of the first one's


def floor_ns(size: float) -> float:
    return 60 + size * 0.01


def measure(point: Point, noise: np.random.Generator, rate: float = RATE) -> Sample:
    """One launch as the fluid model has it, 1% noise on times."""
    k, size = point.producers, float(point.bytes_per_producer)
    drain = min(k * PER_SM_RATE, rate) if point.destination == "peer" else 1e6
    capacity = k * PER_SM_CAPACITY * (1 + CAPACITY_PER_PEER * (point.fan_out - 1)) if point.mode != "free" else 1e9
    gap = 1e9 if point.mode == "isolated" else float(point.gap_ns) + (1500.0 if point.mode == "aligned" else 0.0)
    path = recurrence(np.full(80, k * size), gap, floor_ns(size), drain, capacity if capacity < 1e9 else k * PER_SM_CAPACITY)
    issue = float(path.issue_ns[-1])
    if point.mode == "free":  # drifted phases: no capacity term
        issue = max(floor_ns(size), k * size / drain - gap)
    shake = lambda n: 1 + 0.01 * noise.standard_normal(n)  # noqa: E731
    times = issue * shake(10)
    visible = (k * size / drain + LATENCY) * shake(10) if point.mode == "isolated" else np.zeros(0)
    period = float(np.mean(times)) + (0 if point.mode == "isolated" else gap)
    return Sample(
        point.method, point.mode, point.destination, k, point.bytes_per_producer, float(point.gap_ns), rank=0, loaded=point.loaded,
        fan_out=point.fan_out, role=point.role, issue_ns=list(times), issue_max_ns=list(times * 1.1), visible_ns=list(visible),
        gap_seen_ns=[gap] * 10, skew_ns=[40.0] * 10, window_ns=period * 100, window_bytes=k * size * 100, window_bursts=100,
        sm_clock_ghz=1.98,
    )  # fmt: skip


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    noise = np.random.default_rng(1)
    return [replace(measure(p, noise), rank=rank) for rank in range(2) for p in points(SMS, ("st_global",)) for _ in range(2)]


@pytest.fixture(scope="module")
def platform(samples: list[Sample]) -> Platform:
    return Platform("made-up", "measured", SMS, 2, {"st_global": fit_method(samples, "st_global")}, samples=tuple(samples))


def test_rate_floor_and_capacity_come_back(platform: Platform) -> None:
    m = platform.methods["st_global"]
    assert m.rate[-1] == pytest.approx(RATE, rel=0.01)
    assert m.drain_rate(4) == pytest.approx(4 * PER_SM_RATE, rel=0.01)
    assert m.capacity[-1] == pytest.approx(SMS * PER_SM_CAPACITY, rel=0.03)
    assert m.capacity_by_fence[-1] == pytest.approx(SMS * PER_SM_CAPACITY, rel=0.06)
    assert m.latency_ns == pytest.approx(LATENCY, rel=0.05)
    assert m.knee_low[-1] <= 28 * KiB
    assert m.knee_high[-1] >= 24 * KiB
    for size in (2 * KiB, 16 * KiB, 64 * KiB):
        assert m.issue_floor_ns(SMS, size) == pytest.approx(floor_ns(size), rel=0.03)


def test_held_out_points_were_not_fitted_and_are_predicted(samples: list[Sample], platform: Platform) -> None:
    fitted = {(s.producers, s.bytes_per_producer, s.gap_ns, s.mode) for s in samples if s.role == "fit"}
    points_held = held_out(samples, platform, "st_global")
    assert {p.sample.mode for p in points_held} == {"free", "aligned", "isolated"}
    assert not fitted & {(p.sample.producers, p.sample.bytes_per_producer, p.sample.gap_ns, p.sample.mode) for p in points_held}
    assert np.median([p.period_error for p in points_held]) < 0.02
    assert np.median([p.issue_error for p in points_held]) < 0.05


def test_residuals_are_the_noise_where_the_machine_follows_the_model(samples: list[Sample], platform: Platform) -> None:
    r = fit_residuals(samples, platform)["st_global"]
    assert r["issue_median"] < 0.01
    assert r["issue_p95"] < 0.06
    assert r["rate_max"] < 0.02
    spoiled = [replace(s, issue_ns=[v * 1.3 for v in s.issue_ns]) for s in samples]
    assert fit_residuals(spoiled, platform)["st_global"]["issue_median"] == pytest.approx(1 - 1 / 1.3, abs=0.01)


def test_all_gates_pass_on_a_machine_that_follows_the_model(samples: list[Sample], platform: Platform) -> None:
    failed = [g for g in gates(samples, platform, arrived=True) if not g.passed]
    assert not failed


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("linear", lambda s: replace(s, window_ns=s.window_ns + 3000 * s.window_bursts * (s.producers == SMS and not s.gap_ns))),
        ("splits", lambda s: replace(s, window_bytes=s.window_bytes * (1.2 if s.producers == 66 else 1))),
        ("ranks", lambda s: replace(s, window_bytes=s.window_bytes * (1 + 0.05 * s.rank))),
        ("plateau", lambda s: replace(s, issue_ns=[v + s.gap_ns / 50 for v in s.issue_ns]) if s.destination == "peer" else s),
        ("remote and local floor", lambda s: replace(s, issue_ns=[v + 150 for v in s.issue_ns]) if s.destination == "peer" else s),
        ("estimates of Q", lambda s: replace(s, visible_ns=[v * 2 for v in s.visible_ns])),
        ("local control", lambda s: replace(s, issue_ns=[v + s.gap_ns / 20 for v in s.issue_ns]) if s.destination == "local" else s),
        ("held-out period, median", lambda s: replace(s, window_bursts=s.window_bursts * 1.1) if s.role == "held_out" else s),
        ("held-out issue", lambda s: replace(s, issue_ns=[v * 1.5 + 300 for v in s.issue_ns]) if s.role == "held_out" else s),
    ],
)
def test_each_gate_fails_on_what_it_protects_from(name: str, spoil, samples: list[Sample], platform: Platform) -> None:
    spoiled = [spoil(s) for s in samples]
    fitted = replace(platform, methods={"st_global": fit_method(spoiled, "st_global")})
    failed = [g.name for g in gates(spoiled, fitted, arrived=True) if not g.passed]
    assert any(name in g for g in failed), failed


def test_stores_that_did_not_arrive_fail_a_gate(samples: list[Sample], platform: Platform) -> None:
    assert not gates(samples, platform, arrived=False)[0].passed


def test_missing_samples_are_named() -> None:
    with pytest.raises(CalibrationFailed, match="bulk has 0 drain rates"):
        fit_method([], "bulk")


def test_limits_by_condition(samples: list[Sample], platform: Platform) -> None:
    """More peers hold more, at the same rate; a condition without isolated bursts has no Q."""
    noise = np.random.default_rng(2)
    of_two = [measure(p, noise) for p in points(SMS, ("st_global",), peers=2) if p.fan_out == 2]
    of_three = [replace(s, fan_out=3) for s in of_two if s.mode == "free"]
    found = {(f.loaded, f.fan_out): f for f in limits([*samples, *of_two, *of_three], platform, "st_global")}
    assert list(found) == [(False, 1), (False, 2), (False, 3), (True, 1)]
    fitted = platform.method("st_global")
    own = found[False, 1]
    assert own.drain_rate == fitted.drain_rate(SMS)
    assert own.capacity_bytes == pytest.approx(float(fitted.capacity_bytes(SMS)), rel=1e-9)
    for condition, f in found.items():
        assert f.drain_rate == pytest.approx(RATE, rel=0.01), condition
    assert found[True, 1].capacity_bytes == pytest.approx(SMS * PER_SM_CAPACITY, rel=0.1)
    assert found[False, 2].capacity_bytes == pytest.approx(1.5 * SMS * PER_SM_CAPACITY, rel=0.1)
    assert math.isnan(found[False, 3].capacity_bytes)
    said = sweep_table(replace(platform, samples=tuple([*samples, *of_two, *of_three])))
    assert "one direction, to 2 peers: R 37" in said
    assert "one direction, to 3 peers: R 37" in said
    assert said.count("Q not measured") == 1


def test_zero_gap_rate_is_bytes_over_time_not_a_mean_of_periods() -> None:
    s = measure(Point("st_global", "free", SMS, 64 * KiB), np.random.default_rng(0))
    uneven = replace(s, window_bytes=s.window_bytes / 2)
    assert drain_rates([uneven])[SMS] == pytest.approx(uneven.window_bytes / uneven.window_ns)


@pytest.mark.parametrize("sms", [8, 132, 148])
def test_points_fit_the_gpu(sms: int) -> None:
    for p in points(sms, ("st_global", "bulk"), peers=3):
        assert 1 <= p.producers <= sms
        assert p.bytes_per_producer % 16 == 0
        assert 4 <= p.bursts <= 256
        assert 1 <= p.fan_out <= 3
    assert producer_grid(sms)[-1] == sms
