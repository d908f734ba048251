"""What the model says of a Linear-2 tile of the MoE kernel: how long its result stores stall, by both bounds. Needs no torch.

Tiles of one round of SMs are a burst V, of which a share f leaves the rank. The gap G between bursts is what an SM does from one Linear-2
tile to the next: that tile alone where Linear-2 runs by itself, and its share of Linear-1 tiles besides where one kernel runs both; in
expert-wave order too, because clusters do not reach their waves together. The one kernel also sends this rank's rows, S bytes a round, over
the same link: then the bound is (V + S)/R − G.
"""

from __future__ import annotations

from dataclasses import dataclass

from xstage.moe.work_table import TILE_COLUMNS, TILE_ROWS
from xstage.platform import Platform

RESULT_BYTES = 2


@dataclass(frozen=True)
class Burst:
    """burst_bytes: V. rate: R, bytes/ns. aligned_ns: (V − Q)/R, the stall if all SMs store at once, at least 0."""

    burst_bytes: float
    rate: float
    aligned_ns: float

    @property
    def drain_ns(self) -> float:
        """V/R."""
        return self.burst_bytes / self.rate

    def stall_ns(self, gap_ns: float, sent_bytes: float = 0.0) -> float:
        """(V + S)/R − G, at least 0: what the rate bound costs per tile. sent_bytes: S, other bytes that leave the rank per round."""
        return max(0.0, self.drain_ns + sent_bytes / self.rate - gap_ns)


def burst(share: float, platform: Platform) -> Burst:
    """Of a share of remote rows, stores by the math warps of all SMs."""
    method, sms = platform.method("st_global"), platform.sms
    rate, capacity = float(method.drain_rate(sms)), float(method.capacity_bytes(sms))
    size = sms * TILE_ROWS * TILE_COLUMNS * RESULT_BYTES * share
    return Burst(size, rate, max(0.0, size - capacity) / rate)


def gap_ns(linear1_ns: float, linear2_ns: float, linear1_per_linear2: float, interleaved: bool) -> float:
    """G from the times of a tile of each layer with local stores."""
    return linear2_ns + (linear1_per_linear2 * linear1_ns if interleaved else 0.0)
