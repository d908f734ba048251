"""Fused attention + All-to-All on one rank: where the residual over attention alone comes from (section 4.3).

A CTA works through output tiles; the Q-loop of a tile takes the attention-only time divided by the waves of CTAs, and the tile's
output goes to the rank that owns its query block. Residual E_res = end of the fused run, with its last bytes drained, less the
end of the same run with local stores. What the model says: bursts of all waves but the last drain under the next Q-loop; what
remains is the drain of the last, usually partial wave, so the residual does not grow with the sequence, and it follows the size
of the last wave. The completion-coupled counterfactual pays V/R in every wave.

`simulate_attention` has one capacity for all SMs. `predict_residual` has the tile table of the kernel that runs here, and each SM its own
share of the capacity, as it was measured: no events, only the two bounds. What a remote tile costs beside them it leaves out
(docs/attention.md).

Covered: persistent CTAs or waves (equal tiles make them the same), destinations in plain or alternating order, local blocks,
capacity of a full wave, shared drain, issuing by the math warps or by an own role, one barrier at the end as a given time.
Not covered: causal masks and variable lengths, clocks and power (the paper's own band is ±2%), skew between ranks, the All-to-All
in front of attention, misses of address translation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage.attention.layout import KNEE_BYTES_PER_SM, SequenceLayout, remote_rows, tile_table
from xstage.errors import XStageError
from xstage.platform import Platform
from xstage.simulate.engine import Floats, Link, Timeline, run_order
from xstage.simulate.mega_moe import DUPLEX
from xstage.tile_order import NO_LAG, TileOrder

DESTINATIONS = ("plain", "alternating")


@dataclass(frozen=True)
class AttentionWorkload:
    """Attention over a whole sequence with local heads, output scattered over ranks by sequence block.

    Attributes:
        tokens: M, whole sequence. heads: per rank. attention_ns: time of attention alone. head_dim, out_bytes: d, bytes per element.
        tile_m: query rows of an output tile. tiles_per_cta: output tiles that a CTA finishes together (2 in FlashAttention-4).
        ranks: P. roles: who stores (see `engine.ROLES`). destinations: `plain` (query blocks fastest: whole runs of blocks for one
        rank) or `alternating` (block by block). barrier_ns: added at the end. sms: of the GPU that ran it, None for the platform's.
    """

    tokens: int
    heads: int
    attention_ns: float
    head_dim: int = 128
    out_bytes: int = 2
    tile_m: int = 128
    tiles_per_cta: int = 1
    ranks: int = 8
    roles: str = "registers"
    destinations: str = "plain"
    barrier_ns: float = 0.0
    sms: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "head_dim", "out_bytes", "tile_m", "tiles_per_cta", "ranks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise XStageError(f"{name}: {value!r} must be a whole number of at least 1")
        if not (math.isfinite(self.attention_ns) and self.attention_ns > 0):
            raise XStageError(f"attention_ns: {self.attention_ns!r} must be a finite time above 0")
        if self.tokens % (self.ranks * self.tile_m):
            raise XStageError(f"tokens: {self.tokens} must be a multiple of {self.ranks * self.tile_m} (ranks · tile_m)")
        if self.destinations not in DESTINATIONS:
            raise XStageError(f"destinations: {self.destinations!r} is unknown, known are {', '.join(DESTINATIONS)}")
        if not self.barrier_ns >= 0:
            raise XStageError(f"barrier_ns: {self.barrier_ns!r} must be at least 0")


@dataclass(frozen=True)
class AttentionRun:
    """Result of `simulate_attention`; times in ns.

    Attributes:
        fused_ns: end of the fused run with the last bytes drained and the barrier. control_ns: the same run with local stores.
        residual_ns: E_res. waves: CTA waves; last_wave: CTAs of the last one. qloop_ns: Q-loop of one CTA's tiles.
        timeline: of the fused run. link: its X-Stage.
    """

    fused_ns: float
    control_ns: float
    residual_ns: float
    waves: int
    last_wave: int
    qloop_ns: float
    timeline: Timeline
    link: Link


def simulate_attention(
    workload: AttentionWorkload,
    platform: Platform,
    *,
    method: str = "st_global",
    completion_coupled: bool = False,
    trace: bool = False,
) -> AttentionRun:
    """Run the fused kernel and its local-store control.

    Raises:
        XStageError: the platform has no such store method.
    """
    w, m = workload, platform.method(method)
    sms = w.sms or platform.sms
    blocks = w.tokens // w.tile_m
    tiles = blocks * w.heads // w.tiles_per_cta
    if tiles == 0 or blocks * w.heads % w.tiles_per_cta:
        raise XStageError(f"tiles_per_cta: {w.tiles_per_cta} must divide the {blocks * w.heads} output tiles")
    waves = -(-tiles // sms)
    amount = w.tile_m * w.head_dim * w.out_bytes * w.tiles_per_cta
    floor = float(m.issue_floor_ns(sms, amount))
    qloop = w.attention_ns / waves - floor if w.roles == "registers" else (w.attention_ns - floor) / waves
    if qloop <= 0:
        raise XStageError(f"attention_ns: {w.attention_ns:g} is less than the issue floor of its {waves} waves")
    block = np.arange(tiles) * w.tiles_per_cta % blocks
    plain = w.destinations == "plain"
    local = block // (blocks // w.ranks) == 0 if plain else block // w.tiles_per_cta % w.ranks == 0
    order = TileOrder("attention", tuple(range(1, tiles + 1)), 0, 1, NO_LAG)
    link = Link(
        amount / floor,
        float(m.drain_rate(sms)) * (DUPLEX if w.ranks > 1 else 1.0),
        float(m.capacity_bytes(sms)),
        latency_ns=m.latency_ns,
    )
    sent = np.where(local, 0.0, amount) if w.ranks > 1 else np.zeros(tiles)

    def run(where: Link, stores: Floats, coupled: bool) -> Timeline:
        return run_order(order, sms, where, 0.0, qloop, stores, floor, roles=w.roles, slots=2, completion_coupled=coupled, trace=trace)

    timeline = run(link, sent, completion_coupled)
    control = run(Link(amount / floor, math.inf, math.inf), np.zeros(tiles), False)
    fused = timeline.drained_ns + w.barrier_ns
    return AttentionRun(fused, control.makespan_ns, fused - control.makespan_ns, waves, tiles - (waves - 1) * sms, qloop, timeline, link)


def predicted_residual_ns(waves: Sequence[NDArray[Any]], platform: Platform, method: str = "st_global") -> float:
    """E_res from the two bounds: each wave above Q stalls for the excess (equation 6), and the last burst drains in full after the work.

    Every SM has its share of the capacity, Q(K) / K of K SMs that send: what one of them sends beyond it is excess, whatever the others
    leave unused.

    Args:
        waves: bytes that each CTA of a wave sends to other ranks (`layout.remote_rows` times the bytes of a row).
    """
    store, residual = platform.method(method), 0.0
    for i, sent in enumerate(waves):
        producers = max(int((sent > 0).sum()), 1)
        share = float(store.capacity_bytes(producers)) / producers if i < len(waves) - 1 else 0.0
        residual += float(np.maximum(sent - share, 0).sum()) / float(store.drain_rate(producers))
    return residual


def predict_residual(
    heads: int, layout: SequenceLayout, order: str, platform: Platform, *, rank: int = 0, row_bytes: int = 256, tile_rows: int = 128,
    sms: int | None = None, stalls: bool = True,
) -> tuple[list[int], float]:  # fmt: skip
    """Rows that leave the rank in each wave of a call of the fused kernel, and E_res as `predicted_residual_ns` has it.

    Args:
        heads: of this rank. order: of `attention.layout`. row_bytes: of one head. tile_rows: of the kernel's tiles.
        sms: of the GPU that runs it, None for the platform's. stalls: False: only the drain of the last burst.
    """
    sms = sms or platform.sms
    capacity_tiles = min(sms, sms * KNEE_BYTES_PER_SM // (tile_rows * row_bytes))
    table = tile_table(layout, rank, heads=heads, batch=1, tile_rows=tile_rows, wave=sms, order=order, capacity_tiles=capacity_tiles)
    waves = remote_rows(table, layout, rank, tile_rows, sms)
    bursts = [sent * row_bytes for sent in waves]
    return [int(sent.sum()) for sent in waves], predicted_residual_ns(bursts if stalls else bursts[-1:], platform)
