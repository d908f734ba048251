"""The MoE kernel on two, four and eight GPUs of one host, simulated before anybody ran it on more than two.

    python -m xstage.studies.eight_moe results/h200x2/moe-layer-earlier.json   # writes results/simulated/eight_moe.json

With P ranks a rank has experts / P of them. Their rows come from all ranks, by source rank, a share f = 1 − 1/P from others; loads are
drawn as `moe_layer` draws them. `simulate_one_list` runs every rank in both orders, with remote results and with all of them local (the
control), as `studies.one_list` does for two; times are means over ranks. R and Q are those of two GPUs: taken for properties of the
sender's port. `two_gemms_ns` are tiles, with paddings, times `tile_ns`.

`checked` are the rows of that file, simulated in the same way, beside the kernel's measured times (`both_…`, whose rows had arrived before
it began; the simulated kernel waits for them). A stall is the time that remote results add, per Linear-2 tile of an SM.

`capacity` has the largest number of ranks again, with a Q that grows with the peers.

No simulation of one rank has busy receivers. Ranks go through their experts in the same order, and what they store at a time goes where the
rows of these tiles came from. `in_step_ns` is the bytes over R as `bytes_over_rate_ns`, of the busiest receiver if all ranks are at the
same group of row tiles at any time, and nothing of a group is left for the next: the worst case, where the other one is the best.

Not covered: receivers' ports, ranks that start at different times, skewed routings, counts, plan and sum of the layer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from xstage.moe.auto_order import EPILOGUE_NS, NS_PER_K, PLATFORM, auto_order, tile_ns
from xstage.moe.shapes import MoEShape, shape
from xstage.moe.work_table import GROUP_UNITS, TILE_COLUMNS, TILE_ROWS
from xstage.platform import Platform, load_platform
from xstage.simulate.layer import order_of, simulate_layer
from xstage.simulate.one_list import RESULT_BYTES, row_bytes
from xstage.studies.one_list import ORDERS, drawn, predict, with_capacity
from xstage.studies.result import SIMULATED, read_measured, write_study

SHAPES, RANKS, TOKENS = ("Qwen3.5", "DSv4-Flash", "Hy3", "Qwen3-30B", "GLM-5.2"), (2, 4, 8), 8192
COMMAND = "python -m xstage.studies.eight_moe results/h200x2/moe-layer-earlier.json"


def run(
    path: Path, out: Path | None = SIMULATED, *, shapes: Sequence[str] = SHAPES, ranks: Sequence[int] = RANKS, tokens: int = TOKENS
) -> dict[str, Any]:
    """Simulate all rows and those of a result of `moe_layer`; writes `eight_moe.json`.

    Raises:
        XStageError: no such file, or of another study.
    """
    content, platform = read_measured(path, "moe-layer"), load_platform(PLATFORM, samples=False)
    checked = [check(r, content["settings"]["world"], platform) for r in content["rows"]]
    rows = [predicted(name, number, tokens, platform) for name in shapes for number in ranks]
    capacity = [more_capacity(name, max(ranks), tokens, platform) for name in shapes]
    both = [(r[order], r["measured"][order]) for r in checked for order in ORDERS]
    found = {
        "time": [abs(said["time_ns"] / was["time_ns"] - 1) for said, was in both],
        "stall_us": [abs(said["stall_ns"] - was["stall_ns"]) / 1e3 for said, was in both],
        "speedup": [abs(r["speedup"] / r["measured"]["speedup"] - 1) for r in checked],
    }
    errors = {name: {"median": median(values), "max": max(values)} for name, values in found.items()}
    headline = {
        "simulate.moe_kernel_time_error.max": (errors["time"]["max"], "fraction"),
        "simulate.moe_kernel_stall_error_us.max": (errors["stall_us"]["max"], "µs"),
    }
    inputs = {"ns_per_k": NS_PER_K, "epilogue_ns": EPILOGUE_NS, "tokens": tokens}
    outputs = {"rows": rows, "checked": checked, "capacity": capacity}
    return write_study(out, "eight_moe", COMMAND, platform, inputs, outputs, {}, errors, headline, [])


def check(r: Mapping[str, Any], ranks: int, platform: Platform) -> dict[str, Any]:
    """A row of `moe_layer` simulated, with what was measured."""
    row = {"shape": r["shape"], "ranks": ranks, "tokens": r["tokens"], "share": r["share"]}
    ns = {name: t["slowest_ns"] for name, t in r["groups"]["gemm"].items()}
    remote, local = ({order: ns[f"both_{order}{which}"] for order in ORDERS} for which in ("", "_local"))
    tiles = _tiles(max(r["rows"]) // TILE_ROWS, shape(r["shape"]), platform)
    return row | _orders(*simulated(row, drawn(row, ranks), platform)) | {"measured": _orders(remote, local, tiles[1])}


def predicted(name: str, ranks: int, tokens: int, platform: Platform) -> dict[str, Any]:
    """A shape on a number of ranks: both orders, beside the two GEMMs, with paddings, and the bytes that leave a rank over R."""
    m, share = shape(name), 1 - 1 / ranks
    row, auto = {"shape": name, "ranks": ranks, "tokens": tokens, "share": share}, auto_order(m, tokens, ranks)
    counts = drawn(row, ranks)
    found = _orders(*simulated(row, counts, platform))
    tiles = _tiles(_row_tiles(counts, ranks), m, platform)
    mine, rate = len(counts) // ranks, float(platform.method("st_global").drain_rate(platform.sms))
    rows_ns, results_ns = (tokens * m.top_k * share * size / rate for size in (row_bytes(m.hidden), RESULT_BYTES * m.hidden))
    busiest = mean(busiest_receiver(counts[rank * mine : (rank + 1) * mine], ranks) for rank in range(ranks))
    return row | found | {
        "two_gemms_ns": tiles[0] * tile_ns(m.hidden) + tiles[1] * tile_ns(m.intermediate),
        "bytes_over_rate_ns": rows_ns + results_ns, "in_step_ns": rows_ns + busiest * results_ns, "busiest_receiver": busiest,
        "auto": auto, "auto_ns": mean(r.time_ns for r in simulate_layer(m, counts, share, order_of(auto, m, platform), ranks, platform)),
        "faster": min(ORDERS, key=lambda order: found[order]["time_ns"]),
    }  # fmt: skip


def more_capacity(name: str, ranks: int, tokens: int, platform: Platform) -> dict[str, Any]:
    """ns of the kernel by order: `doubled`, if Q were twice as large with so many peers, `per_peer`, if each had a Q of its own."""
    row = {"shape": name, "ranks": ranks, "tokens": tokens, "share": 1 - 1 / ranks}
    counts = drawn(row, ranks)
    cases = {"doubled": 2.0, "per_peer": ranks - 1.0}
    return row | {case: predict(row, counts, ranks, with_capacity(platform, factor, "st_global", "bulk")) for case, factor in cases.items()}


def simulated(row: Mapping[str, Any], counts: Sequence[int], platform: Platform) -> tuple[dict[str, float], dict[str, float], float]:
    """ns of the kernel by order with remote results, the same with all of them local, and Linear-2 tiles of an SM."""
    remote, local = (predict(row, counts, row["ranks"], platform, remote=where) for where in (True, False))
    return remote, local, _tiles(_row_tiles(counts, row["ranks"]), shape(row["shape"]), platform)[1]


def busiest_receiver(rows: Sequence[int], ranks: int) -> float:
    """Results of a group of units for the rank that gets most of them, over an even part; mean over groups, by their rows.

    Args:
        rows: of a rank's experts, an even part of each from every rank.
    """
    units = []
    for count in rows:
        bounds = np.array([count * rank // ranks for rank in range(ranks + 1)])
        for at in range(0, count, 2 * TILE_ROWS):
            units.append(np.diff(np.clip(bounds, at, at + 2 * TILE_ROWS)))
    groups = np.add.reduceat(np.array(units), np.arange(0, len(units), GROUP_UNITS), axis=0)
    return float(ranks * groups.max(1).sum() / groups.sum())


def _orders(remote: Mapping[str, float], local: Mapping[str, float], tiles2: float) -> dict[str, Any]:
    """By order its times and the stall of a Linear-2 tile, of which an SM has `tiles2`; and interleaved over expert-wave."""
    times = {o: {"time_ns": remote[o], "local_ns": local[o], "stall_ns": (remote[o] - local[o]) / tiles2} for o in ORDERS}
    return {**times, "speedup": remote["expert_wave"] / remote["interleaved"]}


def _row_tiles(counts: Sequence[int], ranks: int) -> float:
    """Row tiles of a rank, mean."""
    return sum(-(-count // TILE_ROWS) for count in counts) / ranks


def _tiles(row_tiles: float, model: MoEShape, platform: Platform) -> tuple[float, float]:
    """Tiles of either layer per SM."""
    first, second = (row_tiles * columns / TILE_COLUMNS / platform.sms for columns in (2 * model.intermediate, model.hidden))
    return first, second


if __name__ == "__main__":
    made = run(Path(sys.argv[1]))
    print(json.dumps(made["errors"], indent=1))
