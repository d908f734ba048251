"""All ranks at once: what uneven destinations and busy receivers add to spans and stalls.

The event engine runs one rank whose peers take everything at rate R. Here every rank sends to every other, each port takes R in and
R out, and a row of tokens is not spread evenly over its source ranks: it consists of `runs_per_row` runs of tokens, each from one
rank. Destinations then differ from burst to burst, receivers are busy by turns, and bytes for a busy receiver fill the sender's
capacity Q for all others. Near the drain rate this matters: a rank that offers 95% of R never stalls alone, and stalls in a crowd.

Model: every rank runs the same tile order in time steps of `STEP_NS`; per source P outstanding amounts; egress is shared in
proportion to them, ingress likewise, what is left is offered once more; producers of a source share its room equally; two
accumulator slots per instance, an own issuing role and readiness of rows as in the engine (`roles="separate"`).

Covered: shared ports in both directions, capacity shared between destinations (head-of-line blocking), local shares that vary,
mainloop spread, readiness of Linear-2 rows, partial rows.
Not covered: dispatch, other role layouts, per-pair limits, different loads per rank. Two orders of magnitude slower than the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage.errors import XStageError
from xstage.platform import Platform
from xstage.simulate import mega_moe
from xstage.simulate.engine import _jit
from xstage.simulate.mega_moe import DUPLEX, MAINLOOP_SPREAD, STAGING_NS, STAGING_TILE, MoEWorkload

STEP_NS = 50.0


@_jit
def _drain(out, egress, ingress, budget):  # type: ignore[no-untyped-def]
    """Move up to `budget` bytes out of and into every rank; changes `out`. Two passes of proportional shares."""
    ranks = out.shape[0]
    for s in range(ranks):
        egress[s] = budget
        ingress[s] = budget
    grant = np.zeros((ranks, ranks))
    for _ in range(2):
        for s in range(ranks):
            total = 0.0
            for d in range(ranks):
                if ingress[d] > 0.0:
                    total += out[s, d]
            part = min(1.0, egress[s] / total) if total > 0.0 else 0.0
            for d in range(ranks):
                grant[s, d] = out[s, d] * part if ingress[d] > 0.0 else 0.0
        for d in range(ranks):
            total = 0.0
            for s in range(ranks):
                total += grant[s, d]
            part = min(1.0, ingress[d] / total) if total > 0.0 else 0.0
            for s in range(ranks):
                moved = grant[s, d] * part
                out[s, d] -= moved
                egress[s] = max(egress[s] - moved, 0.0)
                ingress[d] = max(ingress[d] - moved, 0.0)


@_jit
def _spread(a, b, c):  # type: ignore[no-untyped-def]
    """A fixed number in [−1, 1) for three integers."""
    return (((a * 7919 + b * 131 + c) * 40503) & 65535) / 32768.0 - 1.0


@_jit
def _steps(  # type: ignore[no-untyped-def]
    layers, row_index, lengths, share, fill, pairs1, most, step, mma1, mma2, jitter, epilogue1, staging, amount, speed, rate, capacity,
    spans, stalls,
):  # fmt: skip
    ranks, rows = share.shape[0], share.shape[1]
    instances = layers.shape[0]
    at = np.zeros((ranks, instances), np.int64)  # tile in the mainloop or to enter it
    done_at = np.zeros((ranks, instances), np.int64)  # tile that the epilogue takes next
    left_mma = np.zeros((ranks, instances))
    blocked = np.zeros((ranks, instances))  # time that the next mainloop has waited for a slot, −1 while one runs
    phase = np.zeros((ranks, instances), np.int64)  # 0 idle, 1 local part of an epilogue, 2 stores
    left_epi = np.zeros((ranks, instances))
    left_bytes = np.zeros((ranks, instances))
    begun = np.zeros((ranks, instances))
    done1 = np.zeros((ranks, rows), np.int64)
    out = np.zeros((ranks, ranks))
    egress, ingress = np.zeros(ranks), np.zeros(ranks)
    span_n = stall_n = 0
    unfinished = ranks * instances
    n = 0
    while unfinished > 0 and n < most:
        now = n * step
        n += 1
        unfinished = 0
        for s in range(ranks):
            want = 0.0
            for i in range(instances):
                if done_at[s, i] >= lengths[i]:
                    continue
                unfinished += 1
                if blocked[s, i] < 0.0:
                    left_mma[s, i] -= step
                    if left_mma[s, i] <= 0.0:
                        at[s, i] += 1
                        blocked[s, i] = 0.0
                if phase[s, i] == 0 and done_at[s, i] < at[s, i]:
                    phase[s, i] = 1
                    begun[s, i] = now
                    row = row_index[i, done_at[s, i]]
                    if layers[i, done_at[s, i]] == 2:
                        left_epi[s, i] = staging
                        left_bytes[s, i] = amount * fill[row] * (1.0 - share[s, row, s])
                    else:
                        left_epi[s, i] = epilogue1
                        left_bytes[s, i] = -1.0
                # Two slots: one may be in the epilogue, the other takes the next mainloop.
                if blocked[s, i] >= 0.0 and at[s, i] < lengths[i]:
                    tile = at[s, i]
                    if tile - done_at[s, i] >= 2:
                        blocked[s, i] += step
                    elif layers[i, tile] == 1 or done1[s, row_index[i, tile]] == pairs1:
                        left_mma[s, i] = (mma2 if layers[i, tile] == 2 else mma1) * (1.0 + jitter * _spread(tile, s, i))
                        if layers[i, tile] == 2 and stall_n < stalls.shape[0] and fill[row_index[i, tile]] == 1.0:
                            stalls[stall_n] = blocked[s, i]
                            stall_n += 1
                        blocked[s, i] = -1.0
                if phase[s, i] == 1:
                    left_epi[s, i] -= step
                    if left_epi[s, i] <= 0.0:
                        phase[s, i] = 2
                        if left_bytes[s, i] < 0.0:
                            done1[s, row_index[i, done_at[s, i]]] += 1
                            phase[s, i] = 0
                            done_at[s, i] += 1
                elif phase[s, i] == 2:
                    want += min(left_bytes[s, i], speed * step)
            held = 0.0
            for d in range(ranks):
                held += out[s, d]
            part = min(1.0, max(capacity - held, 0.0) / want) if want > 0.0 else 1.0
            for i in range(instances):
                if phase[s, i] == 2:
                    put = min(left_bytes[s, i], speed * step) * part
                    left_bytes[s, i] -= put
                    row = row_index[i, done_at[s, i]]
                    remote = 1.0 - share[s, row, s]
                    if put > 0.0:
                        for d in range(ranks):
                            if d != s:
                                out[s, d] += put * share[s, row, d] / remote
                    if left_bytes[s, i] <= 1.0:
                        phase[s, i] = 0
                        done_at[s, i] += 1
                        if span_n < spans.shape[0] and fill[row] == 1.0:
                            spans[span_n] = now + step - begun[s, i]
                            span_n += 1
        _drain(out, egress, ingress, rate * step)
    return span_n, stall_n, n, unfinished


@dataclass(frozen=True)
class FabricRun:
    """Spans and stalls of the Linear-2 tiles of full rows, of all ranks; ns.

    Attributes:
        spans_ns, stalls_ns: one entry per tile. time_ns: the last rank's sender-visible end.
    """

    spans_ns: NDArray[np.float64]
    stalls_ns: NDArray[np.float64]
    time_ns: float

    @property
    def span_ns(self) -> float:
        return float(np.median(self.spans_ns))

    @property
    def stall_ns(self) -> float:
        return float(np.median(self.stalls_ns))


def simulate_fabric(
    workload: MoEWorkload,
    platform: Platform,
    order: str = "expert-wave",
    *,
    lead_rows: int | None = None,
    runs_per_row: int | None = None,
    method: str = "st_global",
    duplex: float = DUPLEX,
    jitter: float = MAINLOOP_SPREAD,
    seed: int = 0,
    step_ns: float = STEP_NS,
) -> FabricRun:
    """Run a tile order on all ranks, each with the load of the rank with the most rows.

    Args:
        runs_per_row: runs of tokens of one source rank in a row of tile_m tokens; default the number of ranks. Large means even.
        duplex: factor on R. step_ns: time step; spans and stalls are multiples of it.

    Raises:
        XStageError: a number outside its range, an unknown order or store method, or a run in which nothing can progress.
    """
    runs = workload.ranks if runs_per_row is None else runs_per_row
    if runs < 1:
        raise XStageError(f"runs_per_row: {runs} must be at least 1")
    if not 1 <= step_ns <= 1000:
        raise XStageError(f"step_ns: {step_ns:g} must lie in 1 … 1000")
    if workload.roles != "separate" or workload.slots != 2:
        raise XStageError(f"roles: {workload.roles!r} with {workload.slots} slots is not modelled here, only 'separate' with 2")
    m = platform.method(method)
    instances = mega_moe.instances_of(workload, platform.sms)
    ctas = instances * workload.ctas
    full = workload.tile_m * workload.tile_n * 2
    staging = STAGING_NS * workload.tile_m * workload.tile_n / STAGING_TILE
    whole = mega_moe.make_order(workload, order, platform.sms, lead_rows)
    streams = [whole.instance(g, instances) for g in range(instances)]
    lengths = np.array([len(s) for s in streams], np.int64)
    layers, row_index = np.zeros((instances, lengths.max()), np.int64), np.zeros((instances, lengths.max()), np.int64)
    for g, stream in enumerate(streams):
        for j, (layer, k) in enumerate(stream):
            layers[g, j], row_index[g, j] = layer, k // (workload.pairs1 if layer == 1 else workload.pairs2)
    fill = mega_moe.valid_rows(workload.expert_counts(), workload.tile_m) / workload.tile_m
    random = np.random.default_rng(seed)
    share = random.multinomial(runs, [1 / workload.ranks] * workload.ranks, size=(workload.ranks, whole.rows)) / runs
    tiles = whole.rows * workload.pairs2 * workload.ranks
    spans, stalls = np.zeros(tiles), np.zeros(tiles)
    floor = float(m.issue_floor_ns(ctas, full))
    rate = float(m.drain_rate(ctas)) * duplex
    slowest = workload.mma_l1_ns + workload.mma_l2_ns + 4 * (staging + floor) + 2 * ctas * full / rate
    most = int(4 * lengths.max() * slowest / step_ns) + 1000
    used: Any = _steps(
        layers, row_index, lengths, share, fill, workload.pairs1, most, step_ns, workload.mma_l1_ns, workload.mma_l2_ns, jitter,
        staging, staging, float(full * workload.ctas), full * workload.ctas / floor, rate, float(m.capacity_bytes(ctas)),
        spans, stalls,
    )  # fmt: skip
    if used[3]:
        raise XStageError(f"order {whole.name}: nothing can progress, {used[3]} instances have tiles left")
    return FabricRun(spans[: used[0]], stalls[: used[1]], used[2] * step_ns)
