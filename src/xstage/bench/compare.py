"""Is platform B the same as platform A, faster, or slower? Decided from the raw samples of both files, quantity by quantity.

The rule. Every quantity is refitted per launch, and launches are compared only with launches of the same cell (method, producers,
bytes, sending rank). The estimate is the mean over cells of ln(median of B's launches ÷ median of A's). Its 95% interval comes from
2,000 bootstrap replicates that redraw cells and, inside each cell, launches of both files; the seed is fixed. With t the tolerance of
the quantity (2% for the drain rate; 5% for capacity, knee and issue floor, which small bursts and clock steps blur more):

    SAME       the interval lies inside 1/(1 + t) … 1 + t
    FASTER     the interval does not contain 1, the estimate is outside the tolerance, and B is the better one
    SLOWER     the same, and B is the worse one
    UNCERTAIN  everything else, and always with fewer than 5 launches on a side

Better means a higher rate, a larger capacity or knee, a shorter issue time. Capacity and knee use each file's own fitted drain rate,
whose error is not in their interval. Quantities that both files did not measure give no row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from xstage.burst_gap import knee_bytes_per_producer
from xstage.errors import XStageError
from xstage.platform import METHODS, KiB, MiB, Platform
from xstage.samples import Sample, of_table

SAME, FASTER, SLOWER, UNCERTAIN = "SAME", "FASTER", "SLOWER", "UNCERTAIN"
TOLERANCE = {"drain rate": 0.02, "capacity": 0.05, "knee": 0.05, "issue floor": 0.05}
_HIGHER_IS_BETTER = {"drain rate": True, "capacity": True, "knee": True, "issue floor": False}
_UNIT = {"drain rate": "bytes/ns", "capacity": "bytes", "knee": "bytes per producer", "issue floor": "ns"}
_LEAST_LAUNCHES, _REPLICATES = 5, 2000

Cells = dict[tuple[int, int], list[float]]  # (producers, bytes per producer) → one value per launch


@dataclass(frozen=True)
class Row:
    """One quantity of B against A.

    Attributes:
        quantity: `drain rate`, `capacity`, `knee` or `issue floor`. method: store method. producers: K.
        sizes: smallest and largest bytes per producer of the cells. direction: `rank 0 sends`, …, or `both at once`.
        a, b: mean over cells of the launch medians, in `unit`. ratio: estimate of B/A. low, high: its 95% interval, NaN when too few
        launches. tolerance: half-width of SAME. launches_a, launches_b: how many launches were compared. verdict: see the module.
    """

    quantity: str
    method: str
    producers: int
    sizes: tuple[int, int]
    direction: str
    unit: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    tolerance: float
    launches_a: int
    launches_b: int
    verdict: str


def compare(a: Platform, b: Platform, *, allow_different_gpus: bool = False) -> list[Row]:
    """Hold platform B against platform A; see the module for the rule.

    Raises:
        XStageError: a platform has no samples, the fingerprints name different GPUs (unless allowed), or nothing is common.
    """
    for platform, name in ((a, "a"), (b, "b")):
        if not platform.samples:
            raise XStageError(f"{name}: platform {platform.name!r} ({platform.origin}) has no raw samples to compare")
    gpus = [p.fingerprint.get("gpu_name") for p in (a, b)]
    if not allow_different_gpus and None not in gpus and gpus[0] != gpus[1]:
        raise XStageError(f"b: {b.name!r} is of GPU {gpus[1]!r}, a: {a.name!r} of {gpus[0]!r}; comparing different GPUs must be allowed")
    rows: list[Row] = []
    for method in a.methods:
        if method in b.methods:
            own = [replace(p, samples=tuple(of_table(p.samples, method))) for p in (a, b)]
            rows += _method_rows(own[0], own[1], method)
    if not rows:
        raise XStageError(f"b: {b.name!r} and a: {a.name!r} have no measured quantity in common")
    return rows


def worst(rows: Sequence[Row]) -> str:
    """The verdict for a gate: SLOWER if any row is, else UNCERTAIN if any is, else FASTER if any is, else SAME."""
    for verdict in (SLOWER, UNCERTAIN, FASTER):
        if any(r.verdict == verdict for r in rows):
            return verdict
    return SAME


def text(rows: Sequence[Row]) -> str:
    """A table in GB/s, KiB, MiB and µs."""
    head = ("quantity", "method", "K", "per producer", "direction", "A", "B", "B/A", "95% interval", "verdict")
    table = [head]
    for r in rows:
        low, high = r.sizes
        sizes = f"{low / KiB:g} KiB" if low == high else f"{low / KiB:g} … {high / KiB:g} KiB"
        interval = "–" if math.isnan(r.low) else f"{r.low:.3f} … {r.high:.3f}"
        table.append((r.quantity, r.method, str(r.producers), sizes, r.direction, _shown(r.a, r.unit), _shown(r.b, r.unit),
                      f"{r.ratio:.3f}", interval, r.verdict))  # fmt: skip
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table)


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain types; NaN becomes None."""
    out = []
    for row in rows:
        entry = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(row).items()}
        out.append({**entry, "sizes": list(row.sizes)})
    json.dumps(out, allow_nan=False)
    return out


# ---- cells: one value per launch --------------------------------------------------------------------------------------------


def _method_rows(a: Platform, b: Platform, method: str) -> list[Row]:
    rows: list[Row | None] = []
    ranks = sorted({s.rank for s in a.samples} & {s.rank for s in b.samples})
    for rank in ranks if method in METHODS else ():  # a further table of a store method has no rate of its own
        rows.append(_row("drain rate", method, f"rank {rank} sends", *(_rates(p, q, method, rank, False) for p, q in ((a, b), (b, a)))))
    if method in METHODS:
        rows.append(_row("drain rate", method, "both at once", *(_rates(p, q, method, None, True) for p, q in ((a, b), (b, a)))))
    for rank in ranks:
        said = f"rank {rank} sends"
        for quantity, cells in (("capacity", _capacities), ("knee", _knees)):
            rows.append(_row(quantity, method, said, *(cells(p, q, method, rank) for p, q in ((a, b), (b, a)))))
        below = [_floors(p, q, method, rank) for p, q in ((a, b), (b, a))]
        common = sorted(set(below[0]) & set(below[1]))
        middle = (len(common) + 1) // 2
        halves = (common[:middle], common[middle:])
        if any(sum(len(cells[c]) for c in half) < _LEAST_LAUNCHES for cells in below for half in halves):
            halves = (common, [])  # too few launches to tell small bursts from larger ones
        for half in halves:
            rows.append(_row("issue floor", method, said, *({c: cells[c] for c in half} for cells in below)))
    return [r for r in rows if r is not None]


def _most(p: Platform, q: Platform, method: str, keep: Callable[[Sample], bool]) -> int | None:
    """The largest producer count that both platforms measured in this way."""
    counts = [{s.producers for s in x.samples if s.method == method and keep(s)} for x in (p, q)]
    return max(counts[0] & counts[1], default=None)


def _rates(p: Platform, q: Platform, method: str, rank: int | None, loaded: bool) -> Cells:
    """Bytes ÷ time of bursts without a gap whose drain takes at least four issue floors."""

    def keep(s: Sample, mode: str) -> bool:
        return s.destination == "peer" and s.loaded == loaded and s.gap_ns == 0 and s.mode == mode and s.rate > 0 and rank in (None, s.rank)

    for mode in ("free", "aligned"):
        producers = _most(p, q, method, lambda s, mode=mode: keep(s, mode))  # type: ignore[misc]
        if producers is None:
            continue
        table = p.method(method)
        rate = float(table.drain_rate(producers))
        cells: Cells = {}
        for s in p.samples:
            if s.method != method or s.producers != producers or not keep(s, mode):
                continue
            if s.burst_bytes / rate >= 4 * float(table.issue_floor_ns(producers, s.bytes_per_producer)):
                cells.setdefault((producers, s.bytes_per_producer), []).append(s.rate)
        return cells
    return {}


def _isolated(p: Platform, q: Platform, method: str, rank: int) -> tuple[int | None, list[Sample]]:
    def keep(s: Sample) -> bool:
        return s.mode == "isolated" and s.destination == "peer" and not s.loaded and s.rank == rank and len(s.issue_ns) > 0

    producers = _most(p, q, method, keep)
    return producers, [s for s in p.samples if s.method == method and s.producers == producers and keep(s)]


def _capacities(p: Platform, q: Platform, method: str, rank: int) -> Cells:
    """Q = V − R·T_iss of isolated bursts past the knee; equation (6)."""
    producers, samples = _isolated(p, q, method, rank)
    if producers is None:
        return {}
    low, high = _past_the_knee(p, q, method, producers)
    rate = float(p.method(method).drain_rate(producers))
    cells: Cells = {}
    for s in samples:
        if low <= s.bytes_per_producer <= high:
            value = s.burst_bytes - rate * float(np.median(s.issue_ns))
            if value > 0:
                cells.setdefault((producers, s.bytes_per_producer), []).append(value)
    return cells


def _knees(p: Platform, q: Platform, method: str, rank: int) -> Cells:
    """Bytes per producer at which the line through a burst past the knee, of slope 1/R, comes down to T_iss⁰."""
    producers, _ = _isolated(p, q, method, rank)
    if producers is None:
        return {}
    table = p.method(method)
    knee = float(knee_bytes_per_producer(producers, p, method))
    lift = float(table.drain_rate(producers)) * float(table.issue_floor_ns(producers, knee)) if math.isfinite(knee) else 0.0
    return {cell: [(v + lift) / producers for v in values] for cell, values in _capacities(p, q, method, rank).items()}


def _floors(p: Platform, q: Platform, method: str, rank: int) -> Cells:
    """Issue times of isolated bursts well below both knees."""
    producers, samples = _isolated(p, q, method, rank)
    if producers is None:
        return {}
    limit = 0.7 * min(float(knee_bytes_per_producer(producers, x, method)) for x in (p, q))
    cells: Cells = {}
    for s in samples:
        if s.bytes_per_producer <= limit:
            cells.setdefault((producers, s.bytes_per_producer), []).append(float(np.median(s.issue_ns)))
    return cells


def _past_the_knee(p: Platform, q: Platform, method: str, producers: int) -> tuple[float, float]:
    """Sizes where (V − Q)/R rules: clearly past both knees, but not so far that the error of R·T drowns Q."""
    knees = [float(knee_bytes_per_producer(producers, x, method)) for x in (p, q)]
    return 1.2 * max(knees), 4.0 * max(knees)


# ---- the verdict ------------------------------------------------------------------------------------------------------------


def _row(
    quantity: str, method: str, direction: str, a: Mapping[tuple[int, int], list[float]], b: Mapping[tuple[int, int], list[float]]
) -> Row | None:
    common = sorted(set(a) & set(b))
    if not common:
        return None
    logs = [math.log(float(np.median(b[c])) / float(np.median(a[c]))) for c in common]
    estimate = float(np.mean(logs))
    launches = [sum(len(cells[c]) for c in common) for cells in (a, b)]
    low, high = (math.nan, math.nan) if min(launches) < _LEAST_LAUNCHES else _interval([a[c] for c in common], [b[c] for c in common])
    sizes = [c[1] for c in common]
    return Row(
        quantity, method, common[0][0], (min(sizes), max(sizes)), direction, _UNIT[quantity],
        float(np.mean([np.median(a[c]) for c in common])), float(np.mean([np.median(b[c]) for c in common])),
        math.exp(estimate), low, high, TOLERANCE[quantity], launches[0], launches[1],
        verdict(math.exp(estimate), low, high, TOLERANCE[quantity], _HIGHER_IS_BETTER[quantity]),
    )  # fmt: skip


def _interval(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> tuple[float, float]:
    random = np.random.default_rng(20260)
    differences = np.stack([_redrawn(y, random) - _redrawn(x, random) for x, y in zip(a, b, strict=True)])
    cells = random.integers(0, len(a), size=differences.shape)
    low, high = np.quantile(np.mean(np.take_along_axis(differences, cells, 0), axis=0), [0.025, 0.975])
    return float(np.exp(low)), float(np.exp(high))


def _redrawn(values: Sequence[float], random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    drawn = random.integers(0, len(values), size=(_REPLICATES, len(values)))
    return np.asarray(np.log(np.median(np.asarray(values, float)[drawn], axis=1)))


def verdict(ratio: float, low: float, high: float, tolerance: float, higher_is_better: bool) -> str:
    """SAME, FASTER, SLOWER or UNCERTAIN for an estimate of B/A and its interval (NaN: too few launches)."""
    if math.isnan(low) or math.isnan(high):
        return UNCERTAIN
    least, most = 1 / (1 + tolerance), 1 + tolerance
    if least <= low and high <= most:
        return SAME
    if not low <= 1 <= high and not least <= ratio <= most:
        return FASTER if (ratio > 1) == higher_is_better else SLOWER
    return UNCERTAIN


def _shown(value: float, unit: str) -> str:
    if unit == "bytes/ns":
        return f"{value:.1f} GB/s"
    if unit == "ns":
        return f"{value / 1e3:.3f} µs"
    return f"{value / MiB:.2f} MiB" if value >= MiB else f"{value / KiB:.1f} KiB"
