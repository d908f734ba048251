"""The Burst–Gap model: what a sender sees when it issues bursts of remote stores with gaps of other work between them.

A burst of V = K·B bytes takes T_iss⁰ to issue on an empty path, drains at rate R, and at most Q bytes can be under way. In a
fluid picture the outstanding bytes q obey, for each burst and the gap behind it,

    T_iss = max(T_iss⁰, (q + V − Q)/R),    q ← max(0, q + V − R·T_iss),    q ← max(0, q − R·G),

which `recurrence` computes for any sequence. Its steady state for one repeated burst is the closed form of `issue_ns`,

    T_iss = max(T_iss⁰, V/R − G, (V − Q)/R).

The first two terms are the paper's Burst–Gap relation (section 3.2), the third its isolated-burst equation (6). `Burst` fields
may be numpy arrays; results broadcast. Units: bytes, nanoseconds, bytes/ns (= GB/s).

Producers whose phases have drifted apart never present a whole burst at once: then the third term falls away. With equal gaps they take
turns at the link and the first two terms are met; where gaps vary, they wait for each other near the knee though the path keeps up in the
mean: `uneven_wait_ns`, by a queue.

Not covered: reads, atomics, contention at the receiver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage.errors import XStageError
from xstage.platform import Platform, StoreMethod

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Burst:
    """A repeated burst of remote stores.

    Attributes:
        producers: K, how many producers issue it together (≥ 1).
        bytes_per_producer: B (> 0).
        gap_ns: G, time of other work of the *issuing role* between two of its bursts (≥ 0).

    Raises:
        XStageError: a field is not finite or outside its range.
    """

    producers: ArrayLike
    bytes_per_producer: ArrayLike
    gap_ns: ArrayLike = 0.0

    def __post_init__(self) -> None:
        for name, low, strict in (("producers", 1, False), ("bytes_per_producer", 0, True), ("gap_ns", 0, False)):
            value = _number(getattr(self, name), name)
            bad = ~np.isfinite(value) | ((value <= low) if strict else (value < low))
            if np.any(bad):
                shown = np.asarray(value)[bad].flat[0]
                raise XStageError(f"{name}: {shown:g} must be a finite number {'above' if strict else 'of at least'} {low}")

    @property
    def burst_bytes(self) -> Array:
        """V = K·B (paper, table 1)."""
        return np.asarray(np.asarray(self.producers, float) * np.asarray(self.bytes_per_producer, float))


def issue_ns(burst: Burst, platform: Platform, method: str = "st_global", *, aligned: bool = True) -> Array:
    """Steady sender-visible issue time T_iss = max(T_iss⁰, V/R − G, (V − Q)/R) in ns.

    Section 3.2 (Burst–Gap relation) with the capacity term of equation (6). For `bulk` it is the time until the source may be
    reused. With `aligned=False` the capacity term is left out: producers whose phases have drifted apart never present a whole
    burst at once.
    """
    t0, rate, capacity, volume, gap = _terms(burst, platform, method)
    terms = [t0, volume / rate - gap] + ([(volume - capacity) / rate] if aligned else [])
    return np.asarray(np.maximum.reduce(terms))


def isolated_issue_ns(burst: Burst, platform: Platform, method: str = "st_global") -> Array:
    """Issue time of one burst into an empty path: max(T_iss⁰, (V − Q)/R) in ns; equation (6). The gap is not used."""
    t0, rate, capacity, volume, _ = _terms(burst, platform, method)
    return np.asarray(np.maximum(t0, (volume - capacity) / rate))


def period_ns(burst: Burst, platform: Platform, method: str = "st_global") -> Array:
    """Steady burst start-to-start time T_period = T_iss + G in ns; section 3.2."""
    return np.asarray(issue_ns(burst, platform, method) + np.asarray(burst.gap_ns, float))


def stall_ns(burst: Burst, platform: Platform, method: str = "st_global") -> Array:
    """Back-pressure ΔT_iss = T_iss − T_iss⁰ in ns; section 3.2, with the capacity term."""
    return issue_ns(burst, platform, method) - _terms(burst, platform, method)[0]


def uneven_wait_ns(burst: Burst, platform: Platform, method: str = "st_global") -> Array:
    """Mean wait, in ns, of a producer's part of a burst for other producers' parts, where phases have drifted apart and gaps vary at
    random: `queue_wait_ns` with bursts that follow each other in T_iss⁰ + G in the mean. Beyond the paper; docs/model.md has what was
    measured."""
    t0, rate, _, volume, gap = _terms(burst, platform, method)
    return queue_wait_ns(t0 + gap, volume / rate, burst.producers)


def queue_wait_ns(cycle_ns: ArrayLike, service_ns: ArrayLike, producers: ArrayLike) -> Array:
    """Mean time that a burst waits for those of other producers at the link: the machine-repair queue (M/M/1//N) by mean value analysis
    (Reiser and Lavenberg, 1980).

    A posted burst's own service does not hold its producer, so a producer is away from the link for the cycle less that service. If the
    link serves all bursts that are there at once, evenly, the result holds for sizes and gaps of any distribution (Baskett et al., 1975).
    It tends to service − cycle well above the knee, and to 0 well below.

    Args:
        cycle_ns: from one burst of a producer to its next where nothing waits. service_ns: of one burst of every producer, V/R.
        producers: K, of which fractions are rounded.
    """
    number = np.rint(np.asarray(producers, float))
    service = np.maximum(np.asarray(service_ns, float), 0.0) / np.maximum(number, 1.0)
    away = np.maximum(np.asarray(cycle_ns, float) - service, 0.0)
    there = np.zeros(np.broadcast_shapes(number.shape, away.shape))  # mean bursts at the link
    # A burst finds there what the queue has in the mean with one producer fewer.
    for n in range(1, int(number.max(initial=1.0))):
        stay = service * (1.0 + there)
        there = np.where((n < number) & (stay > 0), n * stay / np.maximum(away + stay, np.finfo(float).tiny), there)
    return np.asarray(service * there)


def recovery_gap_ns(burst: Burst, platform: Platform, method: str = "st_global") -> Array:
    """Smallest gap without back-pressure from the burst before, G* = [V/R − T_iss⁰]₊ in ns; section 3.2."""
    t0, rate, _, volume, _ = _terms(burst, platform, method)
    return np.maximum(volume / rate - t0, 0.0)


def peak_outstanding_bytes(burst: Burst, platform: Platform, method: str = "st_global") -> Array:
    """Bytes under way at the end of an unhindered issue, q_peak = [V − R·T_iss⁰]₊; section 3.5. Q is not applied."""
    t0, rate, _, volume, _ = _terms(burst, platform, method)
    return np.maximum(volume - rate * t0, 0.0)


def saturating_producers(burst: Burst, platform: Platform, method: str = "st_global") -> Array:
    """K* = R·T_iss⁰/B: with more producers than this an issuing burst injects faster than the path drains."""
    t0, rate, _, _, _ = _terms(burst, platform, method)
    return np.asarray(rate * t0 / np.asarray(burst.bytes_per_producer, float))


def knee_bytes_per_producer(producers: ArrayLike, platform: Platform, method: str = "st_global") -> Array:
    """Bytes per producer up to which an isolated burst issues at its floor: where (V − Q)/R meets T_iss⁰; section 3.5.

    Found by bisection, as T_iss⁰ is a table. `inf` where the floor alone grows faster than the path drains (few producers).
    """
    m = platform.method(method)
    k = np.asarray(producers, float)
    rate, capacity = m.drain_rate(k), m.capacity_bytes(k)

    def held(size: Array) -> Any:
        return (k * size - capacity) / rate > m.issue_floor_ns(k, size)

    low, high = np.zeros(k.shape), np.full(k.shape, 1e6) * np.maximum(capacity / k, 1.0)
    never = np.logical_not(held(high))
    for _ in range(60):
        middle = (low + high) / 2
        above = held(np.maximum(middle, 1e-9))
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.where(never, np.inf, high)


def bursts_to_saturation(burst: Burst, platform: Platform, method: str = "st_global") -> Array:
    """How many unhindered bursts fit, starting empty, before Q is full: 1 + (Q − q_peak)/(V − R·(T_iss⁰ + G)).

    The fluid count, not rounded: the first burst that is held up is the next whole number above. `inf` when the rate bound
    holds and q_peak ≤ Q; 0 when the first burst is already held up (q_peak > Q).
    """
    t0, rate, capacity, volume, gap = _terms(burst, platform, method)
    peak = np.maximum(volume - rate * t0, 0.0)
    growth = volume - rate * (t0 + gap)
    with np.errstate(divide="ignore", invalid="ignore"):
        count = 1.0 + (capacity - peak) / growth
    return np.where(peak > capacity, 0.0, np.where(growth > 0, count, np.inf))


def completion_coupled_period_ns(burst: Burst, platform: Platform, method: str = "st_global") -> Array:
    """The counterfactual in which the issuer waits for remote completion: T_period^cc = G + V/R in ns; section 3.4."""
    _, rate, _, volume, gap = _terms(burst, platform, method)
    return np.asarray(gap + volume / rate)


@dataclass(frozen=True)
class Trajectory:
    """What `recurrence` returns; arrays have the shape of the burst sequence, the last axis being time.

    Attributes:
        start_ns: start of each burst, the first at 0. issue_ns: its T_iss. outstanding_before, outstanding_after: q in bytes at
        its start and at the end of its issue.
    """

    start_ns: Array
    issue_ns: Array
    outstanding_before: Array
    outstanding_after: Array


def recurrence(
    burst_bytes: ArrayLike,
    gap_ns: ArrayLike,
    issue_floor_ns: ArrayLike,
    drain_rate: ArrayLike,
    capacity_bytes: ArrayLike,
    outstanding_bytes: ArrayLike = 0.0,
) -> Trajectory:
    """Exact fluid recurrence for any sequence of bursts: sizes, gaps, floors, R and Q may differ from burst to burst.

    Args:
        burst_bytes: V of each burst, shape (..., n). gap_ns: gap *after* each burst. issue_floor_ns: T_iss⁰ of each.
        drain_rate: R in bytes/ns. capacity_bytes: Q. outstanding_bytes: q before the first burst (0 empty, Q full), shape (...).

    Raises:
        XStageError: a value is negative or not finite, or R is 0.
    """
    arrays = [_number(a, n) for a, n in zip(
        (burst_bytes, gap_ns, issue_floor_ns, drain_rate, capacity_bytes, outstanding_bytes),
        ("burst_bytes", "gap_ns", "issue_floor_ns", "drain_rate", "capacity_bytes", "outstanding_bytes"), strict=True)]  # fmt: skip
    names = ("burst_bytes", "gap_ns", "issue_floor_ns", "drain_rate", "capacity_bytes", "outstanding_bytes")
    for name, value in zip(names, arrays, strict=True):
        if np.any(~np.isfinite(value)) or np.any(value < 0) or (name == "drain_rate" and np.any(value == 0)):
            raise XStageError(f"{name}: must be finite and {'above 0' if name == 'drain_rate' else 'at least 0'}")
    volume, gap, floor, rate, capacity = np.broadcast_arrays(*(np.atleast_1d(a) for a in arrays[:5]))
    q = np.array(np.broadcast_to(arrays[5], volume.shape[:-1]), float)
    issue, before, after, start = (np.empty(volume.shape) for _ in range(4))
    now = np.zeros(volume.shape[:-1])
    for i in range(volume.shape[-1]):
        before[..., i], start[..., i] = q, now
        time = np.maximum(floor[..., i], (q + volume[..., i] - capacity[..., i]) / rate[..., i])
        q = np.maximum(q + volume[..., i] - rate[..., i] * time, 0.0)
        issue[..., i], after[..., i] = time, q
        q = np.maximum(q - rate[..., i] * gap[..., i], 0.0)
        now = now + time + gap[..., i]
    return Trajectory(start, issue, before, after)


def _terms(burst: Burst, platform: Platform, method: str) -> tuple[Array, Array, Array, Array, Array]:
    """T_iss⁰, R, Q, V, G, broadcast together."""
    m: StoreMethod = platform.method(method)
    k, b, g = np.broadcast_arrays(*(np.asarray(v, float) for v in (burst.producers, burst.bytes_per_producer, burst.gap_ns)))
    return m.issue_floor_ns(k, b), m.drain_rate(k), m.capacity_bytes(k), k * b, g


def _number(value: Any, name: str) -> Array:
    try:
        return np.asarray(value, float)
    except (TypeError, ValueError):
        raise XStageError(f"{name}: {value!r} is not a number") from None
