"""MegaMoE on one rank: a workload and a platform in, spans, stalls and times of a tile order out.

The rank with the most rows is run; its peers are taken to behave alike. Times of mainloops are inputs (`mma_l1_ns`, `mma_l2_ns`,
of one full tile), everything behind the mainloop comes from the platform and from three constants that hold for all shapes:

- `STAGING_NS`: the local part of a Linear-2 epilogue (accumulator read, conversion, staging, addresses) of a 192 × 128 tile, beside
  T_iss⁰. It is what the paper's local-store control shows: spans of 3.6–3.9 µs, whose middle 3.75 µs less T_iss⁰ = 1.14 µs is 2.61 µs.
- `DUPLEX`: the share of R that is left when both directions are loaded, as they are in an all-to-all. 365/372 as measured on
  H200 NVLink4 with the burst kernel; the paper prints no such figure for its own GPU.
- `MAINLOOP_SPREAD`: mainloops of equal tiles differ by up to ±5%. An assumption; without it every instance of an interleaved order
  stays in lock-step for the whole kernel and stores in artificial unison. Results hardly depend on its size (docs/simulate.md).

Covered (assumption → where): a Linear-2 tile sends b_m·b_n·2 bytes, of which (P−1)/P leave the rank; rows that are padding store
nothing; a partial tile takes a full tile's mainloop time; an expert's rows are spread evenly over source ranks; readiness of Linear-2
rows; dispatch on the same link with a share of W/(W + Q), W being the bytes that dispatch warps keep in flight; wave sizes by expected
load; a locality term (working set of expert weights against the L2 cache).
Not covered: imbalance between ranks other than through the rank that is run, congestion at receivers and in the switch, the final
top-k reduction, launch and barrier times, and mainloop times that change with clocks or with the link's load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from xstage import tile_order
from xstage.errors import XStageError
from xstage.platform import Platform
from xstage.simulate import routing as routings
from xstage.simulate.engine import Link, Timeline, run_order
from xstage.simulate.routing import Routing

STAGING_NS = 2610.0
STAGING_TILE = 192 * 128  # elements of the tile that STAGING_NS belongs to
DUPLEX = 365 / 372
MAINLOOP_SPREAD = 0.05
DISPATCH_TOKENS_IN_FLIGHT = 4  # per CTA: four dispatch warps of the public kernel, one token each
SCALE_OVERHEAD = 1 / 32  # one-byte block scales of 32 elements

ORDERS = ("expert-wave", "interleaved", "alternating", "groups")


@dataclass(frozen=True)
class Locality:
    """Working set of expert weights against the L2 cache.

    A mainloop takes 1 + refill·[1 − l2_bytes/working set]₊ times as long as with all operands in L2. `refill` is to be fitted;
    0 switches the term off. Working set: weights of the experts that one stride of all instances touches, of both layers when both
    streams run at once, and the rows between the streams.
    """

    l2_bytes: float = 63e6
    refill: float = 0.0


@dataclass(frozen=True)
class MoEWorkload:
    """One fused MoE layer under expert parallelism.

    Attributes:
        name: for people. hidden, intermediate, experts, top_k: the layer. tokens: over all ranks together. ranks: P.
        mma_l1_ns, mma_l2_ns: mainloop of one full tile (tile_m × tile_n per CTA) of each layer.
        tile_m, tile_n: tokens and columns of a CTA's tile. ctas: CTAs of an instance (2: clusters of the public Blackwell kernel).
        routing: None for balanced. weight_bits: 8 or 4. roles, slots: see `engine.ROLES`.
        synthetic: the shape is not public. dispatch: 'pull', 'push' or 'none' (tokens are there at the start).
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int
    mma_l1_ns: float
    mma_l2_ns: float
    ranks: int = 8
    tile_m: int = 192
    tile_n: int = 128
    ctas: int = 2
    routing: Routing | None = None
    weight_bits: int = 8
    roles: str = "separate"
    slots: int = 2
    synthetic: bool = False
    dispatch: str = "pull"

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "top_k", "tokens", "ranks", "tile_m", "tile_n", "ctas", "slots"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise XStageError(f"{name}: {value!r} must be a whole number of at least 1")
        if self.top_k > self.experts:
            raise XStageError(f"top_k: {self.top_k} is more than the {self.experts} experts")
        if self.experts % self.ranks:
            raise XStageError(f"experts: {self.experts} must be a multiple of the {self.ranks} ranks")
        width = self.tile_n * self.ctas
        if self.hidden % width:
            raise XStageError(f"hidden: {self.hidden} must be a multiple of {width} (tile_n · ctas)")
        if self.intermediate % self.tile_n or 2 * self.intermediate % width:
            raise XStageError(f"intermediate: {self.intermediate} must be a multiple of the tile, {self.tile_n}")
        for name in ("mma_l1_ns", "mma_l2_ns"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise XStageError(f"{name}: {value!r} must be a finite time above 0")
        if self.weight_bits not in (4, 8):
            raise XStageError(f"weight_bits: {self.weight_bits} must be 4 or 8")
        if self.dispatch not in ("pull", "push", "none"):
            raise XStageError(f"dispatch: {self.dispatch!r} must be 'pull', 'push' or 'none'")
        r = self.routing
        if r is not None and (len(r.counts) != self.experts or r.top_k != self.top_k or r.tokens != self.tokens):
            raise XStageError(
                f"routing: made for {r.tokens} tokens, {len(r.counts)} experts, top-{r.top_k}; "
                f"the workload has {self.tokens}, {self.experts}, top-{self.top_k}"
            )

    @property
    def load(self) -> Routing:
        return self.routing or routings.balanced(self.tokens, self.experts, self.top_k)

    @property
    def pairs1(self) -> int:
        """Linear-1 tiles of a row as instances take them (P_1): gate and up columns, 2·h_inter."""
        return 2 * self.intermediate // (self.tile_n * self.ctas)

    @property
    def pairs2(self) -> int:
        return self.hidden // (self.tile_n * self.ctas)

    def expert_counts(self) -> Any:
        """Tokens of each local expert of the rank with the most rows, shape (experts/ranks,)."""
        by_rank = self.load.ranks(self.ranks)
        rows = -(-by_rank // self.tile_m)
        return by_rank[int(rows.sum(1).argmax())]


def make_order(workload: MoEWorkload, name: str, sms: int, lead_rows: int | None = None) -> tile_order.TileOrder:
    """The named tile order for the workload's hottest rank; `lead_rows` (D) defaults to D_knee."""
    if name not in ORDERS:
        raise XStageError(f"order: {name!r} is unknown, known are {', '.join(ORDERS)}")
    instances = instances_of(workload, sms)
    counts = workload.expert_counts()
    rows_per_expert = [int(r) for r in -(-counts // workload.tile_m)]
    rows = sum(rows_per_expert)
    if name == "expert-wave":
        expected = workload.tokens * workload.top_k / workload.experts / workload.tile_m
        size = tile_order.experts_per_wave(expected, workload.pairs1, instances, len(rows_per_expert))
        return tile_order.expert_wave(rows_per_expert, workload.pairs1, workload.pairs2, size)
    lead = tile_order.lead_knee(workload.tile_n, sms, workload.intermediate) if lead_rows is None else lead_rows
    if lead < 1:
        raise XStageError(f"lead_rows: {lead} must be at least 1 (with 0 an instance waits for its own tile)")
    if name == "interleaved":
        return tile_order.interleaved(rows, workload.pairs1, workload.pairs2, lead)
    if name == "alternating":
        return tile_order.alternating(rows, workload.pairs1, workload.pairs2, lead, instances)
    return tile_order.lead_limited_groups(rows, workload.pairs1, workload.pairs2, lead)


def instances_of(workload: MoEWorkload, sms: int) -> int:
    if sms < workload.ctas:
        raise XStageError(f"sms: {sms} is less than the {workload.ctas} CTAs of an instance")
    return sms // workload.ctas


def tile_store_bytes(workload: MoEWorkload) -> float:
    """V_t: bytes that one CTA sends for a full Linear-2 tile; 1/P of them stay on the rank."""
    return workload.tile_m * workload.tile_n * 2 * (workload.ranks - 1) / workload.ranks


def make_link(workload: MoEWorkload, platform: Platform, method: str = "st_global", remote: bool = True, duplex: float = DUPLEX) -> Link:
    """The platform's X-Stage as the engine takes it; `remote=False` gives the local-store control.

    Raises:
        XStageError: the platform has no such store method.
    """
    m = platform.method(method)
    ctas = instances_of(workload, platform.sms) * workload.ctas
    full = workload.tile_m * workload.tile_n * 2
    floor = float(m.issue_floor_ns(ctas, full))
    amount = tile_store_bytes(workload)
    if not remote or workload.ranks == 1:
        return Link(full / floor, math.inf, math.inf)
    rate, capacity = float(m.drain_rate(ctas)) * duplex, float(m.capacity_bytes(ctas))
    known = len(m.rate_producers) > 1  # limits of one producer are known only where few producers were measured
    # What competes with the stores for the outbound link is what the peers pull from here (or what is pushed to them): the tokens of
    # this rank, whatever the load of its experts.
    dispatched = 0.0
    if workload.dispatch != "none":
        tokens = workload.tokens * workload.top_k / workload.ranks
        dispatched = tokens * workload.hidden * (1 + SCALE_OVERHEAD) * (workload.ranks - 1) / workload.ranks
    window = ctas * DISPATCH_TOKENS_IN_FLIGHT * workload.hidden
    return Link(
        speed=amount / floor,
        rate=rate,
        capacity=capacity,
        producer_rate=float(m.drain_rate(1)) if known else math.inf,
        producer_capacity=float(m.capacity_bytes(1)) if len(m.capacity_producers) > 1 else math.inf,
        latency_ns=m.latency_ns,
        dispatch_bytes=dispatched,
        dispatch_share=window / (window + capacity),
        dispatch_rate=rate,
        dispatch_held_bytes=min(window / (window + capacity) * capacity, capacity / 2) if workload.dispatch == "push" else 0.0,
    )


@dataclass(frozen=True)
class MoERun:
    """Result of `simulate_moe`; times in ns.

    Attributes:
        workload, order: what was run. timeline: tiles. span_ns, stall_ns: medians over Linear-2 tiles of full rows.
        time_ns: sender-visible end, with the last bytes drained. mma_l1_ns, mma_l2_ns: with the locality term.
        tensor_busy: share of the instances' time in mainloops. breakdown_ns: mean time of an instance by cause.
    """

    workload: MoEWorkload
    order: tile_order.TileOrder
    timeline: Timeline
    span_ns: float
    stall_ns: float
    time_ns: float
    mma_l1_ns: float
    mma_l2_ns: float
    tensor_busy: float
    breakdown_ns: dict[str, float]


def simulate_moe(
    workload: MoEWorkload,
    platform: Platform,
    order: str | tile_order.TileOrder = "expert-wave",
    *,
    lead_rows: int | None = None,
    method: str = "st_global",
    locality: Locality | None = None,
    remote: bool = True,
    completion_coupled: bool = False,
    staging_ns: float | None = None,
    duplex: float = DUPLEX,
    jitter: float = MAINLOOP_SPREAD,
    ring_rows: int = 0,
    trace: bool = False,
) -> MoERun:
    """Run one order of a workload on a platform.

    Args:
        order: one of `ORDERS` or a `TileOrder`. lead_rows: D, default D_knee. method: store method.
        remote: False for the local-store control. completion_coupled: the counterfactual in which issuers wait for completion.
        staging_ns: local part of the epilogue of a 192 × 128 tile (scaled to the tile), default `STAGING_NS`.
        duplex: factor on R, default `DUPLEX`.
        jitter: relative half-width of mainloop times. ring_rows: rows that fit between the layers, 0 for no limit.
        trace: keep the outstanding bytes over time.

    Raises:
        XStageError: bad arguments, an unknown store method, or a run in which nothing can progress.
    """
    chosen = order if isinstance(order, tile_order.TileOrder) else make_order(workload, order, platform.sms, lead_rows)
    m = platform.method(method)
    instances = instances_of(workload, platform.sms)
    ctas = instances * workload.ctas
    link = make_link(workload, platform, method, remote, duplex)
    counts = workload.expert_counts()
    valid = valid_rows(counts, workload.tile_m)
    fill = valid / workload.tile_m
    staging = (STAGING_NS if staging_ns is None else staging_ns) * workload.tile_m * workload.tile_n / STAGING_TILE
    slow1, slow2 = _locality_factors(workload, chosen, instances, locality or Locality())
    mma1, mma2 = workload.mma_l1_ns * slow1, workload.mma_l2_ns * slow2
    arrival = np.cumsum(valid) / max(valid.sum(), 1) * link.dispatch_bytes
    timeline = run_order(
        chosen,
        instances,
        link,
        mma1,
        mma2,
        tile_store_bytes(workload) * fill,
        m.issue_floor_ns(ctas, np.maximum(workload.tile_m * workload.tile_n * 2 * fill, 1.0)),
        epilogue_l1_ns=staging,
        staging_ns=staging,
        roles=workload.roles,
        slots=workload.slots,
        ring_rows=ring_rows,
        ctas_per_instance=workload.ctas,
        arrival_bytes=arrival,
        completion_coupled=completion_coupled,
        jitter=jitter,
        trace=trace,
    )
    full = np.repeat(valid == workload.tile_m, workload.pairs2)
    seen = full if full.any() else np.ones_like(full)
    stalls = timeline.stall[timeline.linear2]
    mainloops = float((timeline.mma_end - timeline.mma_start).sum()) / instances
    stalled = float(timeline.stall.sum()) / instances
    time = timeline.drained_ns
    return MoERun(
        workload=workload,
        order=chosen,
        timeline=timeline,
        span_ns=float(np.median(timeline.span_ns[seen])) if len(seen) else 0.0,
        stall_ns=float(np.median(stalls[seen])) if len(seen) else 0.0,
        time_ns=time,
        mma_l1_ns=mma1,
        mma_l2_ns=mma2,
        tensor_busy=mainloops / time if time else 0.0,
        breakdown_ns={
            "mainloops": mainloops,
            "staging stalls": stalled,
            "waits, local epilogues, tail": max(time - mainloops - stalled, 0.0),
        },
    )


def valid_rows(counts: Any, tile_m: int) -> Any:
    """Valid tokens of each row (block of tile_m tokens) of the rank, in expert order."""
    valid = []
    for count in counts:
        full, rest = divmod(int(count), tile_m)
        valid += [tile_m] * full + ([rest] if rest else [])
    return np.asarray(valid, float)


def _locality_factors(w: MoEWorkload, order: tile_order.TileOrder, instances: int, locality: Locality) -> tuple[float, float]:
    """Factors on the mainloop times of both layers by the locality term."""
    if locality.refill == 0.0 or order.rows == 0:
        return 1.0, 1.0
    rows = -(-w.expert_counts() // w.tile_m)
    experts = np.repeat(np.arange(len(rows)), rows)

    def touched(pairs: int) -> float:
        stride = max(1, math.ceil(instances / pairs))
        last = experts[np.minimum(np.arange(len(experts)) + stride - 1, len(experts) - 1)]
        return float((last - experts + 1).mean())

    weights1 = touched(w.pairs1) * 2 * w.intermediate * w.hidden * w.weight_bits / 8
    weights2 = touched(w.pairs2) * w.intermediate * w.hidden * w.weight_bits / 8
    tokens1 = instances / w.pairs1 * w.tile_m * w.hidden
    tokens2 = instances / w.pairs2 * w.tile_m * w.intermediate
    lead = float(np.mean(np.asarray(order.need) - np.arange(order.rows))) * w.tile_m * w.intermediate

    def factor(working_set: float) -> float:
        return 1.0 + locality.refill * max(0.0, 1.0 - locality.l2_bytes / working_set)

    if order.name == "expert-wave":
        return factor(weights1 + tokens1 + lead), factor(weights2 + tokens2 + lead)
    both = factor(weights1 + weights2 + tokens1 + tokens2 + lead)
    return both, both


def describe(run: MoERun, platform: Platform) -> list[str]:
    """The stall breakdown as lines for people; a warning first where the lead is below D_knee."""
    w, lines = run.workload, []
    knee = tile_order.lead_knee(w.tile_n, platform.sms, w.intermediate)
    lead = run.order.need[0] if run.order.rows and run.order.name == "interleaved" else None
    if lead is not None and lead < min(knee, run.order.rows):
        lines.append(f"warning: lead_rows: {lead} is below D_knee = {knee}; instances will wait for each other")
    load = w.load
    lines += [
        f"{w.name}{' (synthetic shape)' if w.synthetic else ''}, {w.tokens // w.ranks} tokens per rank, {w.ranks} ranks, "
        f"W{w.weight_bits}A8, routing {load.name} (Gini {load.gini:.2f}, max/mean {load.max_over_mean:.1f})",
        f"platform {platform.name}, order {run.order.name}{'' if lead is None else f', D={lead}'} (D_knee {knee}), "
        f"{run.order.tiles} tiles in {run.order.rows} rows on the busiest rank",
        f"predicted time {run.time_ns / 1e3:.1f} µs, tensor cores busy {100 * run.tensor_busy:.0f}%",
        f"Linear-2 tile: span {run.span_ns / 1e3:.2f} µs, stall {run.stall_ns / 1e3:.2f} µs (medians)",
    ]
    return lines + [f"  {cause:<30}{time / 1e3:10.1f} µs  {100 * time / run.time_ns:5.1f}%" for cause, time in run.breakdown_ns.items()]


def as_json(run: MoERun) -> dict[str, Any]:
    """The same for machines; times in ns."""
    w = run.workload
    return {
        "workload": w.name,
        "synthetic": w.synthetic,
        "routing": {"name": w.load.name, "gini": w.load.gini, "max_over_mean": w.load.max_over_mean},
        "order": run.order.name,
        "tiles": run.order.tiles,
        "time_ns": run.time_ns,
        "span_ns": run.span_ns,
        "stall_ns": run.stall_ns,
        "tensor_busy": run.tensor_busy,
        "breakdown_ns": run.breakdown_ns,
        "predicted": True,
    }
