"""The W4A8 half of the 84 configurations as the simulator of the kernel has it, before it is measured.

    python -m xstage.studies.moe_w4a8          # writes results/simulated/moe_w4a8.json; minutes

The configurations are those of `moe_orders`. The load of every expert is drawn on the CPU, so its numbers are not those that a GPU draws,
but its distribution is. The time of a tile is the line through GEMMs with MXFP4 weights (`auto_order.MXFP4_NS_PER_K`;
the file there is says which one it was made with).

What a measured row is held against is `moe_prediction`, the same simulation of the row's own load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xstage.moe.auto_order import MXFP4_EPILOGUE_NS, MXFP4_NS_PER_K, PLATFORM
from xstage.platform import load_platform
from xstage.studies.moe84 import summary
from xstage.studies.moe_orders import ORDERS, SHAPES, SHARE_NAMES, SHARES, SIZES, configurations
from xstage.studies.moe_prediction import order_times
from xstage.studies.one_list import drawn
from xstage.studies.result import SIMULATED, write_study

COMMAND, RANKS = "python -m xstage.studies.moe_w4a8", 2


def run(out: Path | None = SIMULATED, shapes: Sequence[str] = SHAPES, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Simulate every configuration; writes `moe_w4a8.json`."""
    platform, rows = load_platform(PLATFORM, samples=False), []
    for c in (c for part in configurations(shapes, sizes, SHARES, "mxfp4") for c in part):
        times = order_times({**c.what, "counts": drawn(c.what, RANKS)}, platform, RANKS, ORDERS)
        speedup = times["expert_wave"] / times["interleaved"]
        rows.append({**c.what, **{f"{name}_ns": ns for name, ns in times.items()}, "speedup": speedup})
    found = {f"{share:g}": summary([r["speedup"] for r in rows if r["share"] == share]) for share in SHARES}
    inputs = {"ns_per_k": MXFP4_NS_PER_K, "epilogue_ns": MXFP4_EPILOGUE_NS, "ranks": RANKS}
    return write_study(
        out, "moe_w4a8", COMMAND, platform, inputs, {"rows": rows, "by_share": found}, {}, {},
        {f"simulate.moe_w4a8.{SHARE_NAMES[share]}.geomean": (found[f"{share:g}"]["geomean"], "ratio") for share in SHARES},
        ["Predictions, made before anything was measured."],
    )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(run()["outputs"]["by_share"], indent=1))
