"""The kernel of `xstage.MegaMoE` on every rank of a group: a model's sizes and a load of its experts, run by `one_list`.

The time of a tile is a line in its K, `EPILOGUE_NS + NS_PER_K · K`, through grouped GEMMs of one GPU (`xstage.moe.auto_order`); all else
comes from the platform file.
"""

from __future__ import annotations

from collections.abc import Sequence

from xstage.moe.auto_order import EPILOGUE_NS, NS_PER_K
from xstage.moe.shapes import MoEShape
from xstage.moe.work_table import TILE_COLUMNS, WorkOrder
from xstage.platform import Platform
from xstage.simulate.one_list import OneListRun, TileTimes, simulate_one_list


def simulate_layer(
    model: MoEShape, counts: Sequence[int], share: float, order: WorkOrder, ranks: int, platform: Platform,
    line: tuple[float, float] = (EPILOGUE_NS, NS_PER_K), remote: bool = True, once: bool = False,
) -> list[OneListRun]:  # fmt: skip
    """One run per rank.

    Args:
        counts: rows of all experts, from all ranks. share: f, of rows that come from other ranks. line: epilogue of a tile, and the time
        of its main loop per column of K, ns. remote: False for the control, all results local. once: rows go to a rank once
        (`rows_once` of `MegaMoE`).
    """
    mine, (epilogue_ns, ns_per_k), picks = len(counts) // ranks, line, model.top_k if once else None
    times = TileTimes(ns_per_k * model.hidden, epilogue_ns, ns_per_k * model.intermediate, epilogue_ns)
    return [
        simulate_one_list(
            counts[rank * mine : (rank + 1) * mine], share, order, times, platform, remote=remote, rank=rank, ranks=ranks, picks=picks
        )
        for rank in range(ranks)
    ]


def order_of(name: str, model: MoEShape, platform: Platform, lead_rows: int | None = None) -> WorkOrder:
    """The list's order in the kernel of a shape. lead_rows: D in rows of 128 tokens; None: the kernel's own."""
    columns = (2 * model.intermediate // TILE_COLUMNS, model.hidden // TILE_COLUMNS)
    return WorkOrder.of(name, *columns, lead_rows=lead_rows, instances=platform.sms // 2)
