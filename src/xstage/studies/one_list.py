"""The MoE kernel in either order of tiles, simulated for every row of results/h200x2/moe-layer-earlier.json, beside the times of the layer.

    python -m xstage.studies.one_list results/h200x2/moe-layer-earlier.json   # writes results/simulated/one_list.json

The load of every expert is drawn as `moe_layer` drew it (`routing.draw_remote` on the CPU, seed 0). The time of a tile is the line
`EPILOGUE_NS + NS_PER_K · K` through grouped GEMMs of one GPU (`auto_order`); all else comes from the platform file. Beside it stands what
the simulator of own shares says of the same loads (`own_shares`). What is measured is the whole layer: counts and plan
before the kernel and the sum over picks behind it are in its times, in both orders alike.

Where a result of `moe_spans` lies beside that file: how far the stalls inside the kernel are missed, as chosen and with one choice changed.

Not covered: few tokens, skewed routings, what an order reads from memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from xstage.moe import routing
from xstage.moe.auto_order import EPILOGUE_NS, NS_PER_K, PLATFORM
from xstage.moe.shapes import shape
from xstage.moe.work_table import TILE_COLUMNS, TILE_ROWS
from xstage.planner import Plan, at_scale, plan
from xstage.platform import Platform, load_platform
from xstage.simulate import routing as loads
from xstage.simulate.layer import order_of, simulate_layer
from xstage.simulate.mega_moe import MoEWorkload
from xstage.studies.moe_orders import ROUTINGS
from xstage.studies.moe_prediction import spans
from xstage.studies.result import SIMULATED, read_measured, write_study

ORDERS = ("interleaved", "expert_wave")
COMMAND = "python -m xstage.studies.one_list results/h200x2/moe-layer-earlier.json"


def run(measured: Path, out: Path | None = SIMULATED) -> dict[str, Any]:
    """Simulate the rows of a result of `moe_layer`; writes `one_list.json`.

    Raises:
        XStageError: no such file, or of another study.
    """
    content = read_measured(measured, "moe-layer")
    platform, ranks = load_platform(PLATFORM, samples=False), content["settings"]["world"]
    rows = []
    for r in content["rows"]:
        layer = {name: r["groups"]["layer"][name]["slowest_ns"] for name in ORDERS}
        row = {"shape": r["shape"], "routing": "balanced", "tokens": r["tokens"], "share": r["share"]}
        counts = drawn(row, ranks)
        times = predict(row, counts, ranks, platform)
        lead = order_of("interleaved", shape(r["shape"]), platform).lead_rows
        found = own_shares(row | {"counts": counts, "lead_rows": lead}, platform, ranks)
        before = {c.order: c.time_ns for c in found.candidates} if found else {}
        rows.append({
            **row, **{f"{name}_ns": ns for name, ns in times.items()}, "speedup": times["expert_wave"] / times["interleaved"],
            "measured_speedup": layer["expert_wave"] / layer["interleaved"],
            "own_shares_speedup": before["expert-wave"] / before["interleaved"] if before else None,
        })  # fmt: skip
    errors, others = (
        [abs(r[which] / r["measured_speedup"] - 1) for r in rows if r[which]] for which in ("speedup", "own_shares_speedup")
    )  # fmt: skip
    figures = {"median": median(errors), "max": max(errors)}
    recorded = measured.with_name("moe-spans.json")
    changed = variants(json.loads(recorded.read_text(encoding="utf-8")), platform) if recorded.exists() else []
    answers = figures | ({"own_shares_median": median(others), "own_shares_max": max(others)} if others else {})
    inputs = {"ns_per_k": NS_PER_K, "epilogue_ns": EPILOGUE_NS, "ranks": ranks}
    return write_study(
        out, "one_list", COMMAND, platform, inputs, {"rows": rows, "variants": changed}, {}, answers,
        {f"simulate.one_list_speedup_error.{name}": (value, "fraction") for name, value in figures.items()}, [],
    )  # fmt: skip


def variants(content: Mapping[str, Any], platform: Platform) -> list[dict[str, Any]]:
    """Errors of the stalls of a result of `moe_spans`, µs: median, largest, and the largest of a difference of two simulations."""
    cases: list[tuple[str, Platform, dict[str, float]]] = [
        ("as chosen", platform, {}), ("R not reduced for two directions", platform, {"duplex": 1.0}),
        ("tiles and items without spread", platform, {"jitter": 0.0}), ("spread by ±20%", platform, {"jitter": 0.2}),
        ("Q of result stores halved", with_capacity(platform, 0.5, "st_global"), {}),
        ("Q of result stores doubled", with_capacity(platform, 2.0, "st_global"), {}),
        ("steps of 12.5 ns", platform, {"step_ns": 12.5}),
    ]  # fmt: skip
    found = []
    for name, there, given in cases:
        errors, differences = [], []
        for row in content["rows"]:
            for order, said in spans(row, there, content["settings"]["world"], **given).items():
                stall = row["derived"][order]["stall_us"]
                errors.append(abs(said["stall_us"] - stall))
                differences.append(abs(said["period_us"] - said["control_us"] - stall))
        found.append({"variant": name, "median_us": median(errors), "max_us": max(errors), "difference_max_us": max(differences)})
    return found


def with_capacity(platform: Platform, factor: float, *methods: str) -> Platform:
    """A platform whose Q is that many times as large, of some of its store methods."""
    scaled = {
        name: replace(m, capacity=tuple(factor * size for size in m.capacity)) for name, m in platform.methods.items() if name in methods
    }
    return replace(platform, methods={**platform.methods, **scaled})


def predict(row: Mapping[str, Any], counts: Sequence[int], ranks: int, platform: Platform, remote: bool = True) -> dict[str, float]:
    """Order → ns of the kernel, mean over ranks. counts: rows of all experts. remote: False for the control, all results local."""
    m = shape(row["shape"])
    return {
        name: mean(r.time_ns for r in simulate_layer(m, counts, row["share"], order_of(name, m, platform), ranks, platform, remote=remote))
        for name in ORDERS
    }


def own_shares(row: Mapping[str, Any], platform: Platform, ranks: int) -> Plan | None:
    """Both orders of a row's load, in a kernel in which every cluster has its own share of the tiles, as ours had at first.

    Waves are whole experts there, rows of the two CTAs of a cluster share columns instead of weights, the locality term is the one fitted
    to the paper's GPU. None: a share f that is not 1 − 1/P of P ranks which all have this rank's work.
    """
    share, m = row["share"], shape(row["shape"])
    peers = round(1 / (1 - share)) if share < 1 else 0
    if not peers or peers % ranks or abs(1 - 1 / peers - share) > 1e-9:
        return None
    load = loads.from_counts(row["counts"], row["tokens"] * ranks, m.top_k, m.experts, row["routing"])
    work, there = at_scale(
        MoEWorkload(
            m.name, m.hidden, m.intermediate, m.experts, m.top_k, row["tokens"] * ranks, NS_PER_K * m.hidden, NS_PER_K * m.intermediate,
            ranks=ranks, tile_m=TILE_ROWS, tile_n=TILE_COLUMNS, ctas=2, routing=load, roles="registers", synthetic=m.synthetic,
            dispatch="push",
        ), platform, peers,
    )  # fmt: skip
    return plan(work, there, leads=[row["lead_rows"]], methods=["st_global"], slots=[work.slots], staging_ns=EPILOGUE_NS)


def drawn(row: Mapping[str, Any], ranks: int) -> list[int]:
    """Rows of every expert from all ranks, as `moe_layer` draws them. row: `shape`, `tokens`, `share`; `routing` if it is not balanced."""
    m, total = shape(row["shape"]), torch.zeros(shape(row["shape"]).experts, dtype=torch.int32)
    alpha = ROUTINGS[row.get("routing", "balanced")]
    for rank in range(ranks):
        idx = routing.draw_remote(row["tokens"], m.experts, m.top_k, ranks=ranks, me=rank, share=row["share"], alpha=alpha)
        total = total + routing.count(idx, m.experts)
    counts: list[int] = total.tolist()
    return counts


if __name__ == "__main__":
    made = run(Path(sys.argv[1]))
    print(json.dumps(made["errors"], indent=1))
