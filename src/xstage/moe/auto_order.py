"""What `schedule="auto"` means: the paper's rate bound (section 4.1), asked before anything runs.

Where Linear-2 tiles follow each other, the gap between a CTA's bursts is one tile's own time, T_L2. The rate bound holds if a round's bytes
to peers drain within it: V/R ≤ T_L2. If not, Linear-1 tiles have to stand between the bursts: `interleaved`. If so, nothing stalls, and
the layers need not be mixed: `linear1_first`, which never makes Linear-2 wait and keeps one layer's weights and rows near.

`SLACK`: where the bound is missed by 7% (Hy3, f = 1/2) `linear1_first` still gains 1.1%, where by 43% it loses 4% or more
(results/h200x2/moe-lead.json).

V: what all SMs store to peers in a round of Linear-2 tiles. R: drain rate of a platform file. T_L2 = `EPILOGUE_NS + NS_PER_K · K`, a line
through ten grouped GEMMs measured on one H200 (results/h200/grouped-gemm.json), which it meets within 4%.

`MXFP4_NS_PER_K`, `MXFP4_EPILOGUE_NS`: the same of weights in MXFP4, whose decoding makes tiles longer: ten grouped GEMMs of 8,192 tokens
per rank on one H200 (results/h200/w4a8-gemm.json), met within 4%. For predictions: the order is chosen by the line above, whatever the
weights.

Not asked: the capacity bound, how rows are spread over experts, how many there are.
"""

from __future__ import annotations

from functools import cache

from xstage.moe.work_table import TILE_COLUMNS, TILE_ROWS
from xstage.platform import load_platform

NS_PER_K, EPILOGUE_NS = 6.425, 999.0
MXFP4_NS_PER_K, MXFP4_EPILOGUE_NS = 8.407, 967.2
PLATFORM, SMS, SLACK = "h200-nvlink4", 132, 1.1


def auto_order(intermediate: int, remote_share: float) -> str:
    """`interleaved` or `linear1_first`, for a share of results that go to other ranks (1 − 1/ranks where picks are even)."""
    return "interleaved" if burst_ns(remote_share) > SLACK * tile_ns(intermediate) else "linear1_first"


def burst_ns(remote_share: float) -> float:
    """V/R: time in which a round of bfloat16 Linear-2 tiles drains."""
    return remote_share * SMS * TILE_ROWS * TILE_COLUMNS * 2 / _drain_rate()


def tile_ns(depth: int) -> float:
    """Time of a tile whose K is `depth`: T_L2 for the intermediate size, T_L1 for the hidden one."""
    return EPILOGUE_NS + NS_PER_K * depth


@cache
def _drain_rate() -> float:
    return float(load_platform(PLATFORM, samples=False).method("st_global").drain_rate(SMS))
