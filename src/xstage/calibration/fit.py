"""From samples to a platform: drain rate, issue floor, capacity, their residuals, and the gates that say whether to believe them.

- R(K): bytes over time of zero-gap bursts, in the window in which every producer was active.
- T_iss⁰(K, B): isolated bursts, where they are not held up. Beyond the knee the floor of a remote burst cannot be seen; there the
  local control stands in, which a gate holds against the remote floor below the knee.
- Q(K): with R and the floor known, bursts that are clearly held up follow (V − Q)/R; Q is the median of V − R·T over them. The
  knee is where floor and drain line cross. A K that is never held up gets no Q (the tables interpolate).
- Q again, independently: bytes under way when issue ended = R × (time the fence still took, less the fence of an empty path).
- Held-out points, never used above, are predicted and compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xstage.burst_gap import Burst, issue_ns, recurrence
from xstage.errors import CalibrationFailed
from xstage.platform import METHODS, TABLES, Gate, Platform, StoreMethod
from xstage.samples import Sample, of_table, select

LINEAR_LIMIT = 0.05
SPLIT_LIMIT = 0.06
PLATEAU_LIMIT = 0.10
FLOOR_LIMIT = 0.10
CAPACITY_FACTOR = 1.35
LOCAL_LIMIT = 0.20
RANK_LIMIT = 0.02
PERIOD_MEDIAN_LIMIT = 0.03
PERIOD_P95_LIMIT = 0.10
ISSUE_LIMIT = 0.10
ISSUE_LIMIT_NS = 200.0
FLOOR_NOISE_NS = 50.0  # differences of issue time below this are not evidence of anything


@dataclass(frozen=True)
class Limits:
    """R and Q of all SMs under one condition. loaded: both directions carried traffic. fan_out: peers that were written to.

    drain_rate: bytes/ns. capacity_bytes: NaN where no isolated bursts were measured, or none was held up.
    """

    loaded: bool
    fan_out: int
    drain_rate: float
    capacity_bytes: float


@dataclass(frozen=True)
class HeldOut:
    """One held-out sample against the model; times in ns."""

    sample: Sample
    period_ns: float
    period_predicted_ns: float
    issue_ns: float
    issue_predicted_ns: float

    @property
    def period_error(self) -> float:
        return abs(self.period_predicted_ns / self.period_ns - 1)

    @property
    def issue_error(self) -> float:
        return abs(self.issue_predicted_ns / self.issue_ns - 1)


def fit_tables(samples: Sequence[Sample]) -> dict[str, StoreMethod]:
    """Every table that the samples allow."""
    return {name: fit_method(samples, name) for name in TABLES if of_table(samples, name)}


def fit_method(samples: Iterable[Sample], name: str) -> StoreMethod:
    """One table from the `fit` samples of its store method to peers with the reverse direction idle.

    Raises:
        CalibrationFailed: the samples that a table needs are missing.
    """
    samples = of_table(samples, name)
    mine = select(samples, destination="peer", role="fit", loaded=False, fan_out=1)
    rates = drain_rates(mine)
    isolated = _by_point(s for s in mine if s.mode == "isolated")
    control = _by_point(select(samples, mode="isolated", destination="local", role="fit"))
    if not rates or not isolated or not control:
        raise CalibrationFailed(
            f"samples: {name} has {len(rates)} drain rates, {len(isolated)} isolated points and {len(control)} local ones, all are needed"
        )
    sizes = sorted({b for _, b in isolated})
    floors: dict[int, NDArray[np.float64]] = {}
    capacity: dict[int, tuple[float, float, float, float]] = {}
    size = np.array(sizes, float)
    for k in sorted(rates):
        if any((k, b) not in isolated or (k, b) not in control for b in sizes):
            continue
        issue = np.array([median_of(isolated[k, b], "issue_ns") for b in sizes])
        local = np.array([median_of(control[k, b], "issue_ns") for b in sizes])
        floors[k] = np.minimum(issue, local)
        held_up = _held_up(issue, floors[k])
        if held_up.sum() >= 2:
            free = size <= size[held_up].min() / 2
            latency = _latency(isolated, k, size[free], rates[k])
            q = _capacity(k * size, issue, held_up, rates[k])
            fence = float(np.median([_fence_capacity(isolated[k, int(b)], rates[k], latency) for b in size[held_up]]))
            crossed = int(np.argmax((k * size - q) / rates[k] > floors[k]))
            capacity[k] = (q, fence, float(size[max(crossed - 1, 0)]), float(size[crossed]))
    if not capacity:
        raise CalibrationFailed(f"samples: {name} shows no knee at any producer count, larger bursts are needed")
    ks, caps = sorted(rates), sorted(capacity)
    top = max(floors)
    return StoreMethod(
        name,
        rate_producers=tuple(float(k) for k in ks),
        rate=tuple(rates[k] for k in ks),
        capacity_producers=tuple(float(k) for k in caps),
        capacity=tuple(capacity[k][0] for k in caps),
        floor_producers=tuple(float(k) for k in sorted(floors)),
        floor_bytes=tuple(size),
        floor=tuple(tuple(float(v) for v in floors[k]) for k in sorted(floors)),
        latency_ns=max(0.0, _latency(isolated, top, size[size <= capacity[caps[-1]][2] / 2], rates[top])),
        capacity_by_fence=tuple(capacity[k][1] for k in caps),
        knee_low=tuple(capacity[k][2] for k in caps),
        knee_high=tuple(capacity[k][3] for k in caps),
    )


def limits(samples: Iterable[Sample], platform: Platform, name: str) -> list[Limits]:
    """R and Q of all SMs of a store method for every condition in the samples, by the fitted issue floor: the fit's own first.

    Whether R is a property of the sender's port, and whether Q grows with the peers, is what these say on more than two GPUs.
    """
    k, found = platform.sms, []
    mine = [s for s in select(of_table(samples, name), destination="peer", role="fit") if s.producers == k]
    for loaded, fan_out in sorted({(s.loaded, s.fan_out) for s in mine}):
        here = [s for s in mine if (s.loaded, s.fan_out) == (loaded, fan_out)]
        if k not in (rates := drain_rates(here)):
            continue
        isolated = _by_point(s for s in here if s.mode == "isolated")
        size = np.array(sorted(b for _, b in isolated), float)
        issue = np.array([median_of(isolated[k, int(b)], "issue_ns") for b in size])
        held_up = _held_up(issue, np.array([float(platform.method(name).issue_floor_ns(k, b)) for b in size]))
        q = _capacity(k * size, issue, held_up, rates[k]) if held_up.sum() >= 2 else math.nan
        found.append(Limits(loaded, fan_out, rates[k], q))
    return found


def _held_up(issue: NDArray[np.float64], floor: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which bursts clearly waited for the path."""
    return issue > floor + np.maximum(0.5 * floor, 4 * FLOOR_NOISE_NS)


def _capacity(burst_bytes: NDArray[np.float64], issue: NDArray[np.float64], held_up: NDArray[np.bool_], rate: float) -> float:
    """Q from bursts that follow (V − Q)/R."""
    return float(np.median((burst_bytes - rate * issue)[held_up]))


def drain_rates(samples: Iterable[Sample]) -> dict[int, float]:
    """R(K) in bytes/ns from zero-gap samples: for each K the median over the burst sizes that reach the best rate within 3%.

    Small bursts of few producers are limited by their own issue, not by the drain; they fall out.
    """
    by_k: dict[int, dict[int, list[float]]] = {}
    for s in samples:
        if s.mode == "free" and s.gap_ns == 0 and s.rate > 0:
            by_k.setdefault(s.producers, {}).setdefault(s.bytes_per_producer, []).append(s.rate)
    out = {}
    for k, sizes in by_k.items():
        rates = np.array([np.median(v) for v in sizes.values()])
        out[k] = float(np.median(rates[rates >= 0.97 * rates.max()]))
    return out


def median_of(samples: Sequence[Sample], field: str) -> float:
    """Median over repeats (and ranks) of the median over a launch's bursts."""
    return float(np.median([np.median(getattr(s, field)) for s in samples]))


def held_out(samples: Iterable[Sample], platform: Platform, table: str) -> list[HeldOut]:
    """Predictions for the held-out samples of a table. The gap is the one that really passed, for `aligned` with the meeting."""
    sources = [s for s in of_table(samples, table) if s.role == "held_out"]
    return [_predict(s, platform, table) for s in sources if table in METHODS or s.mode == "isolated"]


def _predict(s: Sample, platform: Platform, table: str) -> HeldOut:
    gap, issue = float(np.median(s.gap_seen_ns)), float(np.median(s.issue_ns))
    if s.mode == "free":
        burst = Burst(s.producers, s.bytes_per_producer, gap)
        predicted = float(issue_ns(burst, platform, table, aligned=False))
        return HeldOut(s, s.period_ns, predicted + gap, issue, predicted)
    m = platform.method(table)
    floor = m.issue_floor_ns(s.producers, s.bytes_per_producer)
    burst_bytes = np.full(60, float(s.burst_bytes))
    gap = 1e9 if s.mode == "isolated" else gap
    path = recurrence(burst_bytes, gap, floor, m.drain_rate(s.producers), m.capacity_bytes(s.producers))
    predicted = float(path.issue_ns[-1])
    period = issue + (0.0 if s.mode == "isolated" else gap)
    return HeldOut(s, period, predicted + (0.0 if s.mode == "isolated" else gap), issue, predicted)


def fit_residuals(samples: Iterable[Sample], platform: Platform) -> dict[str, dict[str, float]]:
    """How far the fitted tables are from the points they were fitted to: relative errors of isolated issue times and of zero-gap rates.

    Per table `issue_median`, `issue_p95`, `issue_max` over all isolated points of the producer counts that have a capacity, and
    `rate_max` over the zero-gap bursts that are limited by the drain (within 3% of R(K)).
    """
    out = {}
    taken = list(samples)
    for name, m in platform.methods.items():
        mine = select(of_table(taken, name), destination="peer", role="fit", loaded=False, fan_out=1)
        errors = []
        for (k, b), here in _by_point(s for s in mine if s.mode == "isolated").items():
            if k in m.capacity_producers:
                issue = median_of(here, "issue_ns")
                model = max(float(m.issue_floor_ns(k, b)), (k * b - float(m.capacity_bytes(k))) / float(m.drain_rate(k)))
                errors.append(abs(model / issue - 1))
        rates = [abs(s.rate / float(m.drain_rate(s.producers)) - 1) for s in mine if s.mode == "free" and s.gap_ns == 0]
        reached = [e for e in rates if e <= 0.03]
        out[name] = {
            "issue_median": round(float(np.median(errors)), 5), "issue_p95": round(float(np.quantile(errors, 0.95)), 5),
            "issue_max": round(max(errors), 5), "rate_max": round(max(reached), 5),
        }  # fmt: skip
    return out


def gates(samples: Sequence[Sample], platform: Platform, arrived: bool) -> tuple[Gate, ...]:
    """Quality gates per store method; the docstring of each says what it protects from."""
    out = [Gate("stores arrive at the peer", 0.0 if arrived else 1.0, 0.0, "", "a known pattern was compared at its destination")]
    for name in platform.methods:
        mine = select(of_table(samples, name), fan_out=1)
        if name in METHODS:
            out += [
                _linear_gate(name, mine),
                _split_gate(name, mine, platform),
                _rank_gate(name, mine, platform),
                _plateau_gate(name, mine, platform),
                _local_gate(name, mine),
            ]
        out += [
            _floor_gate(name, mine, platform),
            _capacity_gate(name, platform),
            *_held_out_gates(name, held_out(samples, platform, name)),
        ]
    return tuple(out)


def _linear_gate(name: str, samples: Sequence[Sample]) -> Gate:
    """V/R has no offset: otherwise a fixed cost per burst hides in R."""
    k = max(s.producers for s in samples)
    zero = [s for s in samples if s.mode == "free" and s.gap_ns == 0 and s.destination == "peer" and not s.loaded and s.producers == k]
    volume, period = np.array([s.burst_bytes for s in zero], float), np.array([s.period_ns for s in zero])
    slope, offset = np.polyfit(volume, period, 1)
    return Gate(
        f"{name}: zero-gap period is linear in V", abs(offset) / period.max(), LINEAR_LIMIT, "of the longest period",
        f"slope {1 / slope:.1f} GB/s, offset {offset:.0f} ns over {volume.min() / 2**20:.2f} … {volume.max() / 2**20:.1f} MiB",
    )  # fmt: skip


def _split_gate(name: str, samples: Sequence[Sample], platform: Platform) -> Gate:
    """The same R at any split of V into K and B, where the path and not the producers limits."""
    top = max(platform.methods[name].rate)
    zero = [s for s in samples if s.mode == "free" and s.gap_ns == 0 and s.destination == "peer" and not s.loaded and s.role == "fit"]
    groups: dict[tuple[int, int], list[float]] = {}
    for s in zero:
        if s.producers >= platform.sms // 4:
            groups.setdefault((s.producers, s.bytes_per_producer), []).append(s.rate)
    rates = np.array([np.median(v) for v in groups.values()])
    spread = float((rates.max() - rates.min()) / np.median(rates))
    detail = f"{rates.min():.1f} … {rates.max():.1f} GB/s over {len(rates)} splits of K ≥ {platform.sms // 4}; highest R(K) {top:.1f}"
    return Gate(f"{name}: R agrees across splits", spread, SPLIT_LIMIT, "spread over median", detail)


def _rank_gate(name: str, samples: Sequence[Sample], platform: Platform) -> Gate:
    """Every rank's own path has the same R."""
    rates = []
    for rank in sorted({s.rank for s in samples}):
        own = drain_rates(select(samples, rank=rank, destination="peer", loaded=False, role="fit"))
        rates.append(own.get(platform.sms, math.nan))
    spread = (max(rates) - min(rates)) / float(np.median(rates))
    return Gate(f"{name}: ranks agree on R", spread, RANK_LIMIT, "spread over median", ", ".join(f"{r:.1f}" for r in rates) + " GB/s")


def _plateau_gate(name: str, samples: Sequence[Sample], platform: Platform) -> Gate:
    """With long gaps issue time no longer depends on the gap (bursts below the knee)."""
    m = platform.methods[name]
    free = [s for s in samples if s.mode == "free" and s.destination == "peer" and not s.loaded and s.role == "fit" and s.gap_ns]
    worst, detail = 0.0, "no burst size below the knee was swept"
    for b in sorted({s.bytes_per_producer for s in free}):
        if b > m.knee_low[-1]:
            continue
        recovered = {
            g: median_of([s for s in free if s.gap_ns == g and s.bytes_per_producer == b], "issue_ns")
            for g in sorted({s.gap_ns for s in free})
            if g > 1.3 * platform.sms * b / m.rate[-1]
        }
        if len(recovered) < 2:
            continue
        values = np.array(list(recovered.values()))
        change = max(0.0, float(values.max() - values.min()) - FLOOR_NOISE_NS) / float(np.median(values))
        if change >= worst:
            worst, detail = change, f"B = {b // 1024} KiB: {values.min():.0f} … {values.max():.0f} ns over {len(values)} gaps"
    return Gate(f"{name}: plateau is flat in the gap", worst, PLATEAU_LIMIT, f"change beyond {FLOOR_NOISE_NS:.0f} ns", detail)


def _floor_gate(name: str, samples: Sequence[Sample], platform: Platform) -> Gate:
    """Below the knee the local control issues as fast as the remote burst, so that it may stand in beyond."""
    m = platform.methods[name]
    worst, detail = 0.0, ""
    for k, knee in zip(m.capacity_producers, m.knee_low, strict=True):
        isolated = [s for s in samples if (s.mode, s.producers, s.loaded, s.role) == ("isolated", k, False, "fit")]
        for b in sorted({s.bytes_per_producer for s in isolated if s.bytes_per_producer <= knee / 2}):
            here = [s for s in isolated if s.bytes_per_producer == b]
            peer, local = (median_of([s for s in here if s.destination == d], "issue_ns") for d in ("peer", "local"))
            change = max(0.0, abs(peer - local) - FLOOR_NOISE_NS) / local
            if change >= worst:
                worst, detail = change, f"K = {k:.0f}, B = {b // 1024} KiB: {peer:.0f} against {local:.0f} ns"
    return Gate(f"{name}: remote and local floor agree", worst, FLOOR_LIMIT, f"difference beyond {FLOOR_NOISE_NS:.0f} ns", detail)


def _capacity_gate(name: str, platform: Platform) -> Gate:
    """The knee and the fence see the same Q."""
    m = platform.methods[name]
    ratio = m.capacity_by_fence[-1] / m.capacity[-1]
    factor = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    detail = f"K = {m.capacity_producers[-1]:.0f}: knee {m.capacity[-1] / 2**20:.2f} MiB, fence {m.capacity_by_fence[-1] / 2**20:.2f} MiB"
    return Gate(f"{name}: both estimates of Q agree", factor, CAPACITY_FACTOR, "factor", detail)


def _local_gate(name: str, samples: Sequence[Sample]) -> Gate:
    """Local stores do not feel the gap: what recovers with the gap is the path, not the loop."""
    local = [s for s in samples if s.destination == "local" and s.mode == "free"]
    worst, detail = 0.0, "no local control"
    for b in sorted({s.bytes_per_producer for s in local}):
        same = [s for s in local if s.bytes_per_producer == b]
        by_gap = {g: median_of([s for s in same if s.gap_ns == g], "issue_ns") for g in {s.gap_ns for s in same}}
        values = np.array([v for g, v in sorted(by_gap.items()) if g])  # at no gap local memory is saturated too
        change = max(0.0, float(values.max() - values.min()) - FLOOR_NOISE_NS) / float(np.median(values))
        if change >= worst:
            worst, detail = change, f"B = {b // 1024} KiB: {values.min():.0f} … {values.max():.0f} ns over {len(values)} gaps"
    return Gate(f"{name}: local control is flat in the gap", worst, LOCAL_LIMIT, f"change beyond {FLOOR_NOISE_NS:.0f} ns", detail)


def _held_out_gates(name: str, points: Sequence[HeldOut]) -> list[Gate]:
    if not points:
        return [Gate(f"{name}: held-out points", math.nan, 0.0, "", "none were measured")]
    issue = np.array([p.issue_error for p in points])
    issue_abs = np.array([abs(p.issue_predicted_ns - p.issue_ns) for p in points])
    # either bound will do: short issue times are known to a few tens of nanoseconds only
    issue_value = min(float(np.median(issue)) / ISSUE_LIMIT, float(np.median(issue_abs)) / ISSUE_LIMIT_NS)
    out = [
        Gate(
            f"{name}: held-out issue time, median error", issue_value, 1.0, f"of {ISSUE_LIMIT:.0%} or {ISSUE_LIMIT_NS:.0f} ns",
            f"{np.median(issue):.1%}, {np.median(issue_abs):.0f} ns over {len(issue)} points",
        )
    ]  # fmt: skip
    periodic = [p for p in points if p.sample.mode != "isolated"]
    if periodic:
        period, worst = np.array([p.period_error for p in periodic]), max(periodic, key=lambda p: p.period_error)
        p95 = float(np.quantile(period, 0.95))
        out += [
            Gate(
                f"{name}: held-out period, median error", float(np.median(period)), PERIOD_MEDIAN_LIMIT, "fraction", f"{len(period)} points"
            ),
            Gate(f"{name}: held-out period, 95th percentile", p95, PERIOD_P95_LIMIT, "fraction", _describe(worst)),
        ]
    return out


def _describe(p: HeldOut) -> str:
    s = p.sample
    return (
        f"worst: {s.mode} K={s.producers} B={s.bytes_per_producer // 1024} KiB G={s.gap_ns / 1e3:g} µs, "
        f"period {p.period_ns / 1e3:.2f} against {p.period_predicted_ns / 1e3:.2f} µs"
    )


def _by_point(samples: Iterable[Sample]) -> dict[tuple[int, int], list[Sample]]:
    out: dict[tuple[int, int], list[Sample]] = {}
    for s in samples:
        out.setdefault((s.producers, s.bytes_per_producer), []).append(s)
    return out


def _latency(isolated: dict[tuple[int, int], list[Sample]], producers: int, sizes: Iterable[float], rate: float) -> float:
    """Time of a fence of an empty path: what remains of the visible time of unhindered bursts after V/R."""
    left = [median_of(isolated[producers, int(b)], "visible_ns") - producers * b / rate for b in sizes]
    return float(np.median(left)) if left else 0.0


def _fence_capacity(samples: Sequence[Sample], rate: float, latency_ns: float) -> float:
    return rate * (median_of(samples, "visible_ns") - median_of(samples, "issue_ns") - latency_ns)
