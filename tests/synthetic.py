"""SYNTHETIC platforms for tests: samples drawn from the Burst-Gap model plus noise. Nothing here was measured on any machine.

The shape of a real calibration (modes, destinations, roles, both store methods, a loaded run), so that fits, pages and comparisons
have something to read. `rate`, `capacity_per_producer` and `floor_scale` move the truth, `noise` is the relative spread of a launch.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from xstage.burst_gap import Burst, isolated_issue_ns, issue_ns
from xstage.platform import Gate, KiB, Platform, StoreMethod
from xstage.samples import Sample

PRODUCERS = (8, 16, 33, 66, 132)
GAPS_NS = tuple(float(g) for g in range(0, 29_000, 2_000))
GAP_BYTES = (8 * KiB, 16 * KiB, 32 * KiB, 64 * KiB)
ISOLATED_BYTES = tuple(n * KiB for n in (2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128))
FLOOR_BYTES = tuple(n * KiB for n in (2, 8, 16, 32, 64, 128))
FLOORS = {"st_global": (80, 100, 140, 410, 1060, 2300), "bulk": (160, 260, 390, 710, 1360, 2700)}
LOCAL_BYTES = 32 * KiB


def platform(
    seed: int = 0,
    *,
    rate: float = 372.0,
    capacity_per_producer: float = 26 * KiB,
    floor_scale: float = 1.0,
    noise: float = 0.01,
    repeats: int = 3,
    gpu_name: str = "Synthetic GPU",
    name: str = "synthetic",
) -> Platform:
    """A synthetic measured platform; see the module's warning."""
    rng = np.random.default_rng(seed)
    share = {8: 0.951, 16: 0.957, 33: 0.97, 66: 0.995, 132: 1.0}
    methods = {}
    for method, per_producer in (("st_global", capacity_per_producer), ("bulk", capacity_per_producer * 10 / 26)):
        row = tuple(floor_scale * t for t in FLOORS[method])
        methods[method] = StoreMethod(
            name=method, rate_producers=PRODUCERS, rate=tuple(round(rate * share[k], 3) for k in PRODUCERS),
            capacity_producers=PRODUCERS, capacity=tuple(round(per_producer * k) for k in PRODUCERS),
            floor_producers=PRODUCERS, floor_bytes=FLOOR_BYTES, floor=tuple(row for _ in PRODUCERS), latency_ns=2000.0,
            capacity_by_fence=tuple(round(per_producer * k * 1.03) for k in PRODUCERS),
            knee_low=tuple((24.0 if method == "st_global" else 8.0) * KiB for _ in PRODUCERS),
            knee_high=tuple((28.0 if method == "st_global" else 12.0) * KiB for _ in PRODUCERS),
        )  # fmt: skip
    truth = Platform(name, "measured", 132, 2, methods)
    samples: list[Sample] = []

    @cache
    def periodic(method: str, k: int, b: int, gap: float = 0.0) -> float:
        return float(issue_ns(Burst(k, b, gap), truth, method))

    @cache
    def isolated(method: str, k: int, b: int) -> float:
        return float(isolated_issue_ns(Burst(k, b), truth, method))

    @cache
    def floor_ns(method: str, b: int) -> float:
        return float(methods[method].issue_floor_ns(132, b))

    def spread() -> float:
        return float(1 + noise * rng.standard_normal())

    def bursts(value: float) -> list[float]:
        return [round(float(v)) * 1.0 for v in value * spread() * (1 + noise * rng.standard_normal(4))]

    for method in methods:
        for rank in (0, 1):
            for repeat in range(repeats):
                role = "held_out" if repeat == repeats - 1 else "fit"
                for k in PRODUCERS:
                    for b in ISOLATED_BYTES:
                        time = isolated(method, k, b)
                        samples.append(_sample(method, "isolated", k, b, 40_000.0, rank, role, bursts(time), bursts(k * b / rate + 2000.0)))
                for b in GAP_BYTES:
                    for gap in GAPS_NS:
                        for mode in ("free", "aligned"):
                            # Free phases drift apart and never fill Q; aligned bursts do.
                            floor = floor_ns(method, b)
                            time = periodic(method, 132, b, gap) if mode == "aligned" else max(floor, 132 * b / rate - gap)
                            samples.append(_windowed(method, mode, "peer", 132, b, gap, rank, role, bursts(time), spread()))
                for gap in GAPS_NS:
                    time = 0.9 * floor_ns(method, LOCAL_BYTES)
                    samples.append(_windowed(method, "free", "local", 132, LOCAL_BYTES, gap, rank, role, bursts(time), spread()))
                for k in PRODUCERS:
                    for b in (32 * KiB, 64 * KiB, 128 * KiB):
                        time = periodic(method, k, b)
                        samples.append(_windowed(method, "free", "peer", k, b, 0.0, rank, role, bursts(time), spread()))
                time = 1.02 * periodic(method, 132, 64 * KiB)
                samples.append(_windowed(method, "free", "peer", 132, 64 * KiB, 0.0, rank, role, bursts(time), spread(), loaded=True))
    gates = (
        Gate("held-out issue time", 0.031, 0.10, "median relative error", "issue times that the fit did not see"),
        Gate("both ranks agree on R", 0.004, 0.02, "relative difference"),
        Gate("local control flat in the gap", 0.12, 0.10, "relative spread", "made to fail, so that a failed gate is seen"),
    )
    fingerprint = {"gpu_name": gpu_name, "sms": 132, "driver": "000.00 (synthetic)", "cuda": "0.0", "nvlink_links": 18, "power_cap_w": 700}
    return Platform(
        name, "measured", 132, 2, methods, gates, fingerprint=fingerprint, samples=tuple(samples),
        note="SYNTHETIC: drawn from the model, not measured", created="2000-01-01T00:00:00+00:00", command="python tests/synthetic.py",
    )  # fmt: skip


def _sample(method: str, mode: str, k: int, b: int, gap: float, rank: int, role: str, issue: list[float], visible: list[float]) -> Sample:
    return Sample(method, mode, "peer", k, b, gap, rank, role=role, issue_ns=issue, issue_max_ns=[round(1.2 * t) * 1.0 for t in issue],
                  visible_ns=visible, gap_seen_ns=[gap] * len(issue), skew_ns=[30.0] * len(issue), sm_clock_ghz=1.98)  # fmt: skip


def _windowed(
    method: str, mode: str, destination: str, k: int, b: int, gap: float, rank: int, role: str, issue: list[float], factor: float,
    loaded: bool = False,
) -> Sample:  # fmt: skip
    period = (float(np.mean(issue)) + gap) * factor
    bursts = 20
    return Sample(method, mode, destination, k, b, gap, rank, loaded=loaded, role=role, issue_ns=issue,
                  gap_seen_ns=[gap] * len(issue), skew_ns=[500.0] * len(issue), window_ns=round(bursts * period, 4),
                  window_bytes=float(bursts * k * b), window_bursts=float(bursts), sm_clock_ghz=1.98)  # fmt: skip
