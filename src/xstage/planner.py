"""The planner: which tile order, lead, store method, staging depth and tile a fused MoE kernel should use on a platform.

Every candidate is run through the simulator. The baseline is the expert-wave order as the workload describes it; another candidate
is chosen only when it gains more than the error of the model, which is what the model gets wrong per Linear-2 tile on the paper's
table 2 (`ERROR_PER_TILE_NS`). The lead D is searched, because the knee is only a lower bound: too short a lead leaves instances
waiting for each other's Linear-1 tiles (and dispatch short of link time), too long a lead costs locality and a tail of Linear-2 alone.

`at_scale` puts a workload on more ranks on paper: per-rank work stays the same, the share of traffic that leaves the rank, the peers,
and the limits of ports and pairs change.

Not covered: what a change of tile does to registers and shared memory, and mainloop times other than by bytes loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage import tile_order
from xstage.errors import XStageError
from xstage.platform import METHODS, Platform
from xstage.simulate.mega_moe import STAGING_TILE, Locality, MoERun, MoEWorkload, simulate_moe
from xstage.simulate.routing import Routing

# Largest error of the predicted stall of a Linear-2 tile over the rows of the paper's table 2 (results/simulated/table2.json).
ERROR_PER_TILE_NS = 500.0
# Fitted to one printed figure, the minimum of the 84 configurations (0.94); see docs/simulate.md.
PAPER_LOCALITY = Locality(l2_bytes=63e6, refill=0.2)
PAPER = "paper-8gpu"
LEAD_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


@dataclass(frozen=True)
class Candidate:
    """One simulated design. time_ns and error_ns are predictions: time and half-width of its error band.

    Attributes:
        order, lead_rows (D; None for waves), method, slots, tile_m: the design. span_ns, stall_ns: medians per Linear-2 tile.
        stalled_ns, waiting_ns: mean time of an instance in staging stalls, and in waits for data and the tail.
    """

    order: str
    lead_rows: int | None
    method: str
    slots: int
    tile_m: int
    time_ns: float
    error_ns: float
    span_ns: float
    stall_ns: float
    stalled_ns: float
    waiting_ns: float

    @property
    def label(self) -> str:
        lead = "" if self.lead_rows is None else f", D={self.lead_rows}"
        return f"{self.order}{lead}, {self.method}, {self.slots} slots, tile {self.tile_m}"


@dataclass(frozen=True)
class Plan:
    """What to build. `choice` equals `baseline` when nothing gains more than the error.

    Attributes:
        workload, platform: names. choice, baseline: candidates. candidates: all, fastest first. lead_knee: D_knee.
        reason: one sentence. warnings: one line each.
    """

    workload: str
    platform: str
    choice: Candidate
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    lead_knee: int
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """Predicted time of the baseline over the choice's."""
        return self.baseline.time_ns / self.choice.time_ns if self.choice.time_ns else 1.0

    def describe(self) -> list[str]:
        """Warnings, the reason, and every candidate with its error band, as lines for people."""
        lines = [f"warning: {w}" for w in self.warnings]
        lines += [f"{self.workload} on {self.platform}: {self.reason}", f"D_knee {self.lead_knee}; predicted times:"]
        for c in self.candidates:
            mark = "→" if c == self.choice else "·" if c == self.baseline else " "
            lines.append(
                f" {mark} {c.time_ns / 1e3:9.1f} µs ±{c.error_ns / 1e3:.0f}  {c.label}{' (baseline)' if c == self.baseline else ''}"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """The same for machines; times in ns."""
        return {**asdict(self), "gain": self.gain, "predicted": True}


def plan(
    workload: MoEWorkload,
    platform: Platform,
    *,
    leads: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    slots: Sequence[int] | None = None,
    tiles: Sequence[int] | None = None,
    locality: Locality = PAPER_LOCALITY,
    staging_ns: float | None = None,
) -> Plan:
    """Choose a design by simulation.

    Args:
        leads: values of D to try, default multiples of D_knee. methods: store methods, default those of the platform.
        slots: staging depths, default the workload's and one more. tiles: token rows of a tile, default the workload's alone.
        staging_ns: local part of an epilogue at the workload's tile, default the paper's (`mega_moe.STAGING_NS`), for another GPU or
        kernel to be measured by its local-store control.

    Raises:
        XStageError: the platform has no such store method, or a lead, depth or tile is not at least 1.
    """
    knee = tile_order.lead_knee(workload.tile_n, platform.sms, workload.intermediate)
    chosen_methods = tuple(methods) if methods is not None else tuple(m for m in METHODS if m in platform.methods)
    for name in chosen_methods:
        platform.method(name)
    chosen_leads = sorted(set(leads)) if leads is not None else sorted({max(1, round(knee * f)) for f in LEAD_FACTORS})
    chosen_slots = tuple(slots) if slots is not None else (workload.slots, workload.slots + 1)
    chosen_tiles = tuple(tiles) if tiles is not None else (workload.tile_m,)
    for name, values in (("leads", chosen_leads), ("methods", chosen_methods), ("slots", chosen_slots), ("tiles", chosen_tiles)):
        if not values:
            raise XStageError(f"{name}: empty, at least one value is needed")
        if name != "methods" and any(int(v) < 1 for v in values):
            raise XStageError(f"{name}: {min(values)} must be at least 1")

    def candidate(w: MoEWorkload, order: str, lead: int | None, method: str) -> Candidate:
        own = None if staging_ns is None else staging_ns * STAGING_TILE / (workload.tile_m * workload.tile_n)
        run = simulate_moe(w, platform, order, lead_rows=lead, method=method, locality=locality, staging_ns=own)
        return _candidate(run, order, lead, method)

    method = chosen_methods[0]
    baseline = candidate(workload, "expert-wave", None, method)
    found = [baseline]
    for lead in chosen_leads:
        found.append(candidate(workload, "interleaved", lead, method))
    best = min(found, key=lambda c: c.time_ns)
    if leads is None:
        lead = best.lead_rows or 2 * knee
        found.append(candidate(workload, "alternating", lead, method))
        found.append(candidate(workload, "groups", lead, method))
    best = min(found, key=lambda c: c.time_ns)
    for tile in chosen_tiles:
        for depth in chosen_slots:
            for other in chosen_methods:
                if (tile, depth, other) == (workload.tile_m, workload.slots, method):
                    continue
                changed = with_tile(replace(workload, slots=depth), tile)
                for order, at in {("expert-wave", None), (best.order, best.lead_rows)}:
                    found.append(candidate(changed, order, at, other))
    found.sort(key=lambda c: c.time_ns)
    # Among those that the model cannot tell from the fastest, the one closest to the baseline: fewer things to change.
    fastest = found[0]
    tied = [c for c in found if c.time_ns - fastest.time_ns <= 0.25 * fastest.error_ns]
    choice = min(tied, key=lambda c: (_changes(c, baseline), c.lead_rows or 0, c.time_ns))
    saved = baseline.time_ns - choice.time_ns
    if saved <= baseline.error_ns:
        reason = (
            f"Keep {baseline.label}: the best alternative ({fastest.label}) would save "
            f"{max(baseline.time_ns - fastest.time_ns, 0) / 1e3:.0f} µs of {baseline.time_ns / 1e3:.0f} µs, "
            f"within the model's error of ±{baseline.error_ns / 1e3:.0f} µs."
        )
        choice = baseline
    else:
        why = (
            ("staging stalls", baseline.stalled_ns, choice.stalled_ns)
            if baseline.stalled_ns - choice.stalled_ns >= baseline.waiting_ns - choice.waiting_ns
            else ("waits and local epilogues", baseline.waiting_ns, choice.waiting_ns)
        )
        reason = (
            f"Use {choice.label}: it saves {saved / 1e3:.0f} µs of {baseline.time_ns / 1e3:.0f} µs "
            f"(error ±{baseline.error_ns / 1e3:.0f} µs), "
            f"mostly because {why[0]} fall from {why[1] / 1e3:.0f} to {why[2] / 1e3:.0f} µs."
        )
    warnings = [f"lead_rows: {d} is below D_knee = {knee}; instances will wait for each other" for d in chosen_leads if d < knee]
    warnings += platform.method(method).extrapolated(platform.sms, workload.tile_m * workload.tile_n * 2)
    if platform.name != PAPER and staging_ns is None:
        warnings.append("staging_ns: not given, the local epilogue time and the error band are those of the paper's GPU and kernel")
    return Plan(workload.name, platform.name, choice, baseline, tuple(found), knee, reason, tuple(warnings))


def lead_sweep(
    workloads: Sequence[MoEWorkload],
    platform: Platform,
    lead_factors: Sequence[float],
    locality: Locality = PAPER_LOCALITY,
    threads: int = 2,
) -> NDArray[np.float64]:
    """Times in ns of the interleaved order, shape (workloads, lead_factors): D = factor · D_knee, at least 1. Threads run in parallel."""

    def one(job: tuple[MoEWorkload, float]) -> float:
        w, factor = job
        lead = max(1, round(factor * tile_order.lead_knee(w.tile_n, platform.sms, w.intermediate)))
        return simulate_moe(w, platform, "interleaved", lead_rows=lead, locality=locality).time_ns

    jobs = [(w, f) for w in workloads for f in lead_factors]
    with ThreadPoolExecutor(threads) as pool:
        times = list(pool.map(one, jobs))
    return np.asarray(times).reshape(len(workloads), len(lead_factors))


def with_tile(workload: MoEWorkload, tile_m: int) -> MoEWorkload:
    """The workload with another number of token rows per tile.

    Mainloop times follow the bytes that a CTA loads per step of K, tile_m/ctas of activations (shared in the cluster) and tile_n of
    weights: an assumption that fits the table-2 mainloops, whose rate is that of loads rather than of tensor cores.
    """
    if tile_m == workload.tile_m:
        return workload

    def load(rows: int) -> float:
        return rows / workload.ctas + workload.tile_n * workload.weight_bits / 8

    share = load(tile_m) / load(workload.tile_m)
    return replace(workload, tile_m=tile_m, mma_l1_ns=workload.mma_l1_ns * share, mma_l2_ns=workload.mma_l2_ns * share)


def at_scale(
    workload: MoEWorkload,
    platform: Platform,
    ranks: int,
    *,
    domain: int = 72,
    port_rate: float = 50.0,
    pair_rate: float = float("inf"),
) -> tuple[MoEWorkload, Platform]:
    """The workload and platform on more ranks, on paper: copies of the routing, so that every rank has the same work as before.

    The drain rate becomes that of the slower of two parallel paths: traffic inside a domain of `domain` ranks at R, traffic out
    of it at `port_rate` (bytes/ns per GPU; 50 is a 400 Gb/s port); each pair carries at most `pair_rate`.

    Raises:
        XStageError: ranks is not a multiple of the workload's, or a rate is not above 0.
    """
    if ranks < workload.ranks or ranks % workload.ranks:
        raise XStageError(f"ranks: {ranks} must be a multiple of the workload's {workload.ranks}")
    if not (port_rate > 0 and pair_rate > 0 and domain >= 1):
        raise XStageError(f"port_rate {port_rate:g}, pair_rate {pair_rate:g} and domain {domain} must be above 0")
    copies = ranks // workload.ranks
    load = workload.load
    routing = Routing(f"{load.name} ×{copies}", np.tile(load.counts, copies), load.top_k, load.tokens * copies)
    scaled = replace(workload, ranks=ranks, experts=workload.experts * copies, tokens=workload.tokens * copies, routing=routing)
    peers = ranks - 1
    inside = min(domain, ranks) - 1
    methods = {}
    for name, m in platform.methods.items():
        rates = []
        for rate in m.rate:
            inner = min(rate, inside * pair_rate)
            paths = [inside / peers / inner] if inside else []
            if peers > inside:
                paths.append((peers - inside) / peers / min(port_rate, (peers - inside) * pair_rate))
            rates.append(1 / max(paths))
        methods[name] = replace(m, rate=tuple(rates))
    return scaled, replace(platform, methods=methods, gpus=ranks)


def _candidate(run: MoERun, order: str, lead: int | None, method: str) -> Candidate:
    w = run.workload
    per_instance = run.order.rows * w.pairs2 / run.timeline.instances
    error = ERROR_PER_TILE_NS * per_instance * w.tile_m / 192
    return Candidate(
        order, lead, method, w.slots, w.tile_m, run.time_ns, error, run.span_ns, run.stall_ns, *list(run.breakdown_ns.values())[1:]
    )


def _changes(candidate: Candidate, baseline: Candidate) -> int:
    return sum(getattr(candidate, f) != getattr(baseline, f) for f in ("order", "method", "slots", "tile_m"))
