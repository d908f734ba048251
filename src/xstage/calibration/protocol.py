"""Which bursts a calibration measures: a plain list of `Point`s made from the number of SMs. Nothing here needs a GPU.

Fit points and held-out points never share a (K, B, G): what the model predicts for the held-out ones was not used to fit it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xstage.platform import KiB

REPEATS = 3
ISOLATED_GAP_NS = 40_000  # idle time between isolated bursts, behind the fence that already emptied the path
ISOLATED_KIB = (2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
SWEEP_KIB = (8, 16, 32, 64)
SWEEP_GAPS_NS = (0, 1000, 2000, 3000, 4000, 5000, 6000, 8000, 10000, 12000, 16000, 20000, 28000)
SPLIT_KIB = (16, 32, 64, 128)
HELD_OUT_KIB = (12, 20, 40)
HELD_OUT_GAPS_NS = (0, 2500, 5500, 9000, 14000)


@dataclass(frozen=True)
class Point:
    """One launch to make; fields as in `xstage.samples.Sample`, plus the number of bursts."""

    method: str
    mode: str
    producers: int
    bytes_per_producer: int
    gap_ns: int = 0
    bursts: int = 12
    destination: str = "peer"
    role: str = "fit"
    loaded: bool = False
    fan_out: int = 1


def producer_grid(sms: int) -> tuple[int, ...]:
    """Producer counts to fit at: 1, 2, 4, 8, 16, then a quarter, a half and all of the SMs."""
    return tuple(sorted({k for k in (1, 2, 4, 8, 16, sms // 4, sms // 2, sms) if 1 <= k <= sms}))


def points(sms: int, methods: Sequence[str], peers: int = 1) -> list[Point]:
    """All launches of one repeat on one rank.

    Args:
        sms: multiprocessors of the GPU. methods: store methods. peers: how many peers there are; fan-outs 1 … peers are measured.
    """
    return [p for method in methods for p in _points(sms, method, peers)]


def _points(sms: int, method: str, peers: int) -> list[Point]:
    grid = producer_grid(sms)
    isolated = [
        Point(method, "isolated", k, b * KiB, ISOLATED_GAP_NS, 12) for k in grid for b in ISOLATED_KIB if k >= 8 or b in (8, 32, 128)
    ]
    splits = [Point(method, "free", k, b * KiB, 0, _bursts(k * b * KiB)) for k in grid for b in SPLIT_KIB]
    sweep = [Point(method, "free", sms, b * KiB, g, _bursts(sms * b * KiB, g)) for b in SWEEP_KIB for g in SWEEP_GAPS_NS if g]
    local = [replace(p, destination="local") for p in (*isolated, *sweep)]
    local += [replace(p, destination="local") for p in splits if p.producers == sms and p.bytes_per_producer // KiB in SWEEP_KIB]
    off_grid = (round(0.375 * sms), round(0.75 * sms), sms)
    held_out = [
        Point(method, mode, k, b * KiB, g, _bursts(k * b * KiB, g), role="held_out")
        for k in off_grid
        for b in HELD_OUT_KIB
        for g in HELD_OUT_GAPS_NS
        for mode in ("free", "aligned")
    ]
    held_out += [Point(method, "isolated", round(0.75 * sms), b * KiB, ISOLATED_GAP_NS, 12, role="held_out") for b in (6, 14, 22, 36, 80)]
    loaded = [replace(p, loaded=True) for p in splits if p.producers in grid[-2:]]
    loaded += [replace(p, loaded=True, bursts=40) for p in isolated if p.producers == sms]
    fan_out = [replace(p, fan_out=n) for n in range(2, peers + 1) for p in (*splits, *isolated) if p.producers == sms]
    return splits + isolated + sweep + local + held_out + loaded + fan_out


def _bursts(burst_bytes: int, gap_ns: int = 0) -> int:
    """Enough bursts for about 2 ms at 300 GB/s, so that the window with every producer active is long against its ends."""
    return int(min(240, max(48, 2_000_000 / max(burst_bytes / 300, gap_ns, 1))))
