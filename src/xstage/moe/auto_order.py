"""What `schedule="auto"` means: the paper's rate bound (section 4.1), asked before anything runs.

In expert-wave order Linear-2 tiles follow each other, so the gap between a CTA's bursts is one tile's own time, T_L2. The order keeps the
rate bound if a round's bytes to peers drain within it: V/R ≤ T_L2. If not, Linear-1 tiles have to stand between the bursts: `interleaved`.

If so, nothing need stall, and what decides is something else. Where an expert has no more than a row tile of rows, the kernel is bound by
reading weights, and expert-wave is faster, by up to 4%. With more rows it is 0.6% at best, where loads are balanced, and loses up to 15%
where they are not or tiles are many: `interleaved` (results/h200x2/moe.json, moe-layer-small.json).

V: what all SMs store to peers in a round of Linear-2 tiles. R: drain rate of a platform file. T_L2 = `EPILOGUE_NS + NS_PER_K · K`, a line
through ten grouped GEMMs measured on one H200 (results/h200/grouped-gemm.json), which it meets within 4%.

`MXFP4_NS_PER_K`, `MXFP4_EPILOGUE_NS`: the same of weights in MXFP4, whose decoding makes tiles longer: ten grouped GEMMs of 8,192 tokens
per rank on one H200 (results/h200/w4a8-gemm.json), met within 4%. For predictions: the order is chosen by the line above, whatever the
weights.

Not asked: the capacity bound, how rows are spread over experts.
"""

from __future__ import annotations

from functools import cache

from xstage.moe.work_table import TILE_COLUMNS, TILE_ROWS
from xstage.platform import load_platform

NS_PER_K, EPILOGUE_NS = 6.425, 999.0
MXFP4_NS_PER_K, MXFP4_EPILOGUE_NS = 8.407, 967.2
PLATFORM, SMS = "h200-nvlink4", 132


def auto_order(intermediate: int, remote_share: float, rows: int) -> str:
    """`interleaved` or `expert_wave`.

    remote_share: of results, that go to other ranks (1 − 1/ranks where picks are even). rows: of an expert on average, in the largest call.
    """
    drains = burst_ns(remote_share) <= tile_ns(intermediate)
    return "expert_wave" if drains and rows <= TILE_ROWS else "interleaved"


def burst_ns(remote_share: float) -> float:
    """V/R: time in which a round of bfloat16 Linear-2 tiles drains."""
    return remote_share * SMS * TILE_ROWS * TILE_COLUMNS * 2 / _drain_rate()


def tile_ns(depth: int) -> float:
    """Time of a tile whose K is `depth`: T_L2 for the intermediate size, T_L1 for the hidden one."""
    return EPILOGUE_NS + NS_PER_K * depth


@cache
def _drain_rate() -> float:
    return float(load_platform(PLATFORM, samples=False).method("st_global").drain_rate(SMS))
