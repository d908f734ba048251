"""What the model says of a Linear-2 tile of the MoE kernel: how long its result stores stall. Needs no torch.

Tiles of one round of SMs are a burst V, of which a share f leaves the rank, and of that only rows that are no padding (`fill`). The gap G
between bursts is what an SM does from one Linear-2 tile to the next: that tile alone where Linear-2 runs by itself, and its share of
Linear-1 tiles besides where one kernel runs both. The one kernel also sends this rank's rows, S bytes a round, over the same link.

The rate bound says (V + S)/R − G, as if SMs stored evenly. They do not, and near the knee bursts wait for each other though the link keeps
up with them in the mean. `burst_gap.queue_wait_ns` is that wait: SMs that have something to store are the sources of a queue, the link
serves it. It tends to the rate bound well above the knee and to 0 well below.

* Interleaved, all of that is mixed: bursts of (V + S)/R in gaps of G.
* In expert-wave order it is not: a wave is n₁ rounds of Linear-1 and then n₂ of Linear-2, whose gap is Linear-2's own tile. Its results,
  n₂V, leave while it runs, except what the path holds at its end, at most Q(K): rows from one rank lie together, so at f = 1/2 half
  the tiles are local, and only the other half's SMs can hold anything. Senders go by the progress of Linear-1, so the rows of a wave
  leave while Linear-1 runs, and what was held drains then too. `Burst.wave_stall_ns` is what waits in both phases, per Linear-2 tile.

Not covered: what the path holds of a burst that waits, beside a wave's end; rows that senders are late with and send while Linear-2 runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xstage.burst_gap import queue_wait_ns
from xstage.moe.work_table import TILE_COLUMNS, TILE_ROWS, WorkOrder, entries
from xstage.platform import Platform
from xstage.simulate.row_plan import row_plan

RESULT_BYTES = 2


@dataclass(frozen=True)
class Wave:
    """rounds1, rounds2: n₁ and n₂, rounds of the machine in tiles of either layer, of a wave of mean size."""

    rounds1: float
    rounds2: float

    @classmethod
    def of(cls, rows: Sequence[int], columns1: int, columns2: int, clusters: int) -> Wave:
        """Of experts with so many real rows each."""
        order = WorkOrder.of("expert_wave", columns1, columns2, lead_rows=None, instances=clusters)
        tiles = [-(-count // TILE_ROWS) for count in rows]
        units, singles = sum(-(-t // 2) for t in tiles), sum(t % 2 for t in tiles)
        waves = max(units / order.wave_units, 1.0)
        rounds1, rounds2 = (entries(units, singles, columns) / clusters / waves for columns in (columns1, columns2))
        return cls(rounds1, rounds2)


@dataclass(frozen=True)
class Burst:
    """burst_bytes: V. rate: R, bytes/ns. capacity_bytes: Q(K). producers: K, SMs that have results to store. sms: all, which send rows."""

    burst_bytes: float
    rate: float
    capacity_bytes: float
    producers: int
    sms: int

    @property
    def aligned_ns(self) -> float:
        """(V − Q)/R, the stall if all SMs store at once, at least 0."""
        return max(0.0, self.burst_bytes - self.capacity_bytes) / self.rate

    @property
    def drain_ns(self) -> float:
        """V/R."""
        return self.burst_bytes / self.rate

    def stall_ns(self, gap_ns: float, sent_bytes: float = 0.0) -> float:
        """Wait of bursts of (V + S)/R in gaps of G, per tile. sent_bytes: S, other bytes that leave the rank per round."""
        return float(queue_wait_ns(gap_ns, self.drain_ns + sent_bytes / self.rate, self.producers))

    def wave_stall_ns(self, linear1_ns: float, linear2_ns: float, wave: Wave, sent_bytes: float) -> float:
        """Waits of both phases of a wave, per Linear-2 tile. Times of a tile with local stores; sent_bytes: S."""
        if not wave.rounds2:
            return 0.0
        stored = wave.rounds2 * self.burst_bytes
        held = min(max(stored - self.rate * wave.rounds2 * linear2_ns, 0.0), self.capacity_bytes)
        served1, served2 = (left / self.rate for left in (wave.rounds2 * sent_bytes + held, stored - held))
        wait1 = float(queue_wait_ns(linear1_ns, served1 / wave.rounds1, self.sms))
        wait2 = float(queue_wait_ns(linear2_ns, served2 / wave.rounds2, self.producers))
        return (wave.rounds1 * wait1 + wave.rounds2 * wait2) / wave.rounds2


def burst(share: float, platform: Platform, *, fill: float = 1.0, active: float = 1.0, duplex: float = 1.0) -> Burst:
    """Of a share of remote rows, stores by the math warps of all SMs.

    Args:
        fill: share of a tile's rows that are real. active: share of tiles that have a remote row, K of K_SM. duplex: factor on R.
    """
    method, sms = platform.method("st_global"), platform.sms
    size = sms * TILE_ROWS * TILE_COLUMNS * RESULT_BYTES * share * fill
    capacity = float(method.capacity_bytes(sms * active))
    return Burst(size, float(method.drain_rate(sms)) * duplex, capacity, round(sms * active), sms)


def filling(rows: Sequence[int], share: float) -> dict[str, float]:
    """`fill` and `active` of `burst`, of experts with so many rows each; rows from one rank lie together (`row_plan`)."""
    plan = row_plan(rows, share)
    return {"fill": float(plan.real.mean()) / TILE_ROWS, "active": float((plan.remote > 0).mean())} if len(plan.real) else {}


def gap_ns(linear1_ns: float, linear2_ns: float, linear1_per_linear2: float, interleaved: bool) -> float:
    """G from the times of a tile of each layer with local stores."""
    return linear2_ns + (linear1_per_linear2 * linear1_ns if interleaved else 0.0)
