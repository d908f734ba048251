"""Times of the MoE kernel in either order of tiles, simulated for every row of results/h200x2/moe-layer.json, beside those of the layer.

    python -m xstage.studies.one_list results/h200x2/moe-layer.json          # writes results/simulated/one_list.json

The load of every expert is drawn as `moe_layer` drew it (`routing.draw_remote` on the CPU, seed 0). The time of a tile is the line
`EPILOGUE_NS + NS_PER_K · K` through grouped GEMMs of one GPU (`auto_order`); all else comes from the platform file. What is measured is the
whole layer: counts and plan before the kernel and the sum over picks behind it are in its times, in both orders alike.

Not covered: few tokens, skewed routings, what an order reads from memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

from xstage.errors import XStageError
from xstage.moe import routing
from xstage.moe.auto_order import EPILOGUE_NS, NS_PER_K, PLATFORM
from xstage.moe.shapes import MoEShape, shape
from xstage.moe.work_table import TILE_COLUMNS, WorkOrder
from xstage.platform import Platform, load_platform
from xstage.simulate.one_list import TileTimes, simulate_one_list
from xstage.studies.result import SIMULATED, write_study

ORDERS = ("interleaved", "expert_wave")
COMMAND = "python -m xstage.studies.one_list results/h200x2/moe-layer.json"


def run(measured: Path, out: Path | None = SIMULATED) -> dict[str, Any]:
    """Simulate the rows of a result of `moe_layer`; writes `one_list.json`.

    Raises:
        XStageError: no such file, or of another study.
    """
    try:
        content = json.loads(measured.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise XStageError(f"path: {measured} cannot be read: {error}") from None
    if content.get("study") != "moe-layer":
        raise XStageError(f"path: {measured} is a result of {content.get('study')!r}, not of 'moe-layer'")
    platform, ranks = load_platform(PLATFORM, samples=False), content["settings"]["world"]
    rows = []
    for r in content["rows"]:
        layer = {name: r["groups"]["layer"][name]["slowest_ns"] for name in ORDERS}
        times = predict(shape(r["shape"]), r["tokens"], r["share"], ranks, platform)
        rows.append({
            "shape": r["shape"], "tokens": r["tokens"], "share": r["share"], **{f"{name}_ns": ns for name, ns in times.items()},
            "speedup": times["expert_wave"] / times["interleaved"], "measured_speedup": layer["expert_wave"] / layer["interleaved"],
        })  # fmt: skip
    errors = [abs(r["speedup"] / r["measured_speedup"] - 1) for r in rows]
    figures = {"median": median(errors), "max": max(errors)}
    return write_study(
        out, "one_list", COMMAND, platform, {"ns_per_k": NS_PER_K, "epilogue_ns": EPILOGUE_NS, "ranks": ranks}, {"rows": rows}, {}, figures,
        {f"simulate.one_list_speedup_error.{name}": (value, "fraction") for name, value in figures.items()}, [],
    )  # fmt: skip


def predict(model: MoEShape, tokens: int, share: float, ranks: int, platform: Platform) -> dict[str, float]:
    """Order → ns of the kernel, mean over ranks, of a balanced routing."""
    counts = [sum(parts) for parts in zip(*(drawn(model, tokens, share, ranks, rank) for rank in range(ranks)), strict=True)]
    times = TileTimes(NS_PER_K * model.hidden, EPILOGUE_NS, NS_PER_K * model.intermediate, EPILOGUE_NS)
    columns, mine = (2 * model.intermediate // TILE_COLUMNS, model.hidden // TILE_COLUMNS), model.experts // ranks
    found = {}
    for name in ORDERS:
        order = WorkOrder.of(name, *columns, lead_rows=None, instances=platform.sms // 2)
        found[name] = mean(
            simulate_one_list(counts[rank * mine : (rank + 1) * mine], share, order, times, platform, own_first=rank == 0).time_ns
            for rank in range(ranks)
        )
    return found


def drawn(model: MoEShape, tokens: int, share: float, ranks: int, rank: int) -> list[int]:
    """Pairs of a rank per expert."""
    idx = routing.draw_remote(tokens, model.experts, model.top_k, ranks=ranks, me=rank, share=share)
    counts: list[int] = routing.count(idx, model.experts).tolist()
    return counts


if __name__ == "__main__":
    made = run(Path(sys.argv[1]))
    print(json.dumps(made["errors"], indent=1))
