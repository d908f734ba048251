"""What `schedule="auto"` means: the paper's rate bound (section 4.1), asked before anything runs, and what mixing the layers costs.

Where Linear-2 tiles follow each other, the gap between a CTA's bursts is one tile's own time, T_L2. The rate bound holds if a round's bytes
to peers drain within it: V/R ≤ T_L2. If not, Linear-1 tiles have to stand between the bursts: `interleaved`. A round has fewer bytes where
an expert's rows fill a part of a tile only.

If the bound holds, nothing need stall, and two things decide, which were measured (results/h200x2/moe.json, moe-lead.json and
moe-layer-small.json):

* With up to `MANY_ROWS` rows an expert `linear1_first` is faster, by 1 to 2% (at few rows up to 3%): Linear-2 never waits, and one
  layer's weights and rows stay near. With more it gains as much where experts have equal loads, and loses up to 5% where they do not:
  `interleaved`.
* If the weights of an expert do not fit in the L2 cache together, `linear1_first` is faster by 1 to 6% at all sizes.

V: what all SMs store to peers in a round of Linear-2 tiles. R: drain rate of a platform file. T_L2 = `EPILOGUE_NS + NS_PER_K · K`, a line
through ten grouped GEMMs measured on one H200 (results/h200/grouped-gemm.json), which it meets within 4%.

`MXFP4_NS_PER_K`, `MXFP4_EPILOGUE_NS`: the same of weights in MXFP4, of both layers in one kernel in the split form, which layers with many
rows take: five models, 8,192 tokens per rank, one H200 (results/h200/w4a8-gemm.json), met within 5%. For predictions: the order is
chosen by the line above, whatever the weights.

Not asked: the capacity bound, how rows are spread over experts; weights in MXFP4 are taken for fp8.
"""

from __future__ import annotations

from functools import cache

from xstage.moe.shapes import MoEShape, rows_of_an_expert
from xstage.moe.work_table import TILE_COLUMNS, TILE_ROWS
from xstage.platform import load_platform

NS_PER_K, EPILOGUE_NS = 6.425, 999.0
MXFP4_NS_PER_K, MXFP4_EPILOGUE_NS = 6.070, 2581.0
PLATFORM, SMS = "h200-nvlink4", 132
MANY_ROWS, L2_BYTES = 1024, 50 << 20


def auto_order(model: MoEShape, tokens: int, ranks: int, share: float | None = None) -> str:
    """`interleaved` or `linear1_first`.

    tokens: per rank, in the largest call. share: of results, that go to other ranks (None: 1 − 1/ranks).
    """
    rows = rows_of_an_expert(tokens, ranks, model.top_k, model.experts)
    burst = burst_ns(1 - 1 / ranks if share is None else share) * min(rows / TILE_ROWS, 1.0)
    mixed = rows > MANY_ROWS and 3 * model.hidden * model.intermediate <= L2_BYTES
    return "interleaved" if mixed or burst > tile_ns(model.intermediate) else "linear1_first"


def burst_ns(remote_share: float) -> float:
    """V/R: time in which a round of bfloat16 Linear-2 tiles drains."""
    return remote_share * SMS * TILE_ROWS * TILE_COLUMNS * 2 / _drain_rate()


def tile_ns(depth: int) -> float:
    """Time of a tile whose K is `depth`: T_L2 for the intermediate size, T_L1 for the hidden one."""
    return EPILOGUE_NS + NS_PER_K * depth


@cache
def _drain_rate() -> float:
    return float(load_platform(PLATFORM, samples=False).method("st_global").drain_rate(SMS))
