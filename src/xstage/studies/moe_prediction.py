"""What the simulator says about the configurations of `moe_orders` and of `moe_spans`: added to the result file afterwards, on any machine.

    python -m xstage.studies.moe_prediction results/h200x2/moe.json      # or moe-w4a8.json, or moe-spans.json: stall of a Linear-2 tile

`moe-spans.json` is of the kernel whose clusters take tiles from one list, and so is its simulator, `xstage.simulate.one_list`. Of a
measured row it takes the load of every expert and the share f; of the row's control, in which all results are local, the times of a tile;
of the platform file all else. Nothing that was recorded with remote results goes in.

The same simulator runs both orders of a row of `moe.json` and `moe-w4a8.json`. Of a row it takes the load of every expert and the share
f; of the platform file R, Q and T_iss⁰; and the time of a tile alone, a line through GEMMs of one GPU for either format of weights
(`auto_order`). Nothing is fitted to a whole layer, whose other kernels, which are the same in both orders, are left out.

Two choices come out of it: `winner`, the order with the shorter predicted time, and `plan`, the planner's (`layer_plan.taken`), which
leaves `auto`'s order only for a gain beyond the model's error. Both are for comparison with `auto`, which simulates nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from xstage.layer_plan import LINES, taken
from xstage.moe.auto_order import PLATFORM, auto_order
from xstage.moe.shapes import shape
from xstage.platform import Platform, check_writable, load_platform
from xstage.simulate.layer import order_of, simulate_layer
from xstage.simulate.one_list import TileTimes, simulate_one_list
from xstage.studies import moe_spans
from xstage.studies.moe_orders import MEASURED, PRECISIONS, WITHIN, chosen, derived, headline, measured, of_precision
from xstage.studies.result import read_measured

CHOICES = ("winner", "plan")
FORMATS = {precision: weights for weights, precision in PRECISIONS.items()}


def predict(row: Mapping[str, Any], platform: Platform, ranks: int) -> dict[str, Any]:
    """Predicted times of both orders, their ratio, and the choices with what they cost in the row's measured times."""
    times = order_times(row, platform, ranks, [name for name in MEASURED if name in row["times"]])
    orders = {"winner": min(times, key=times.__getitem__), "plan": taken(times, row["derived"]["auto"])}
    ns = {name: t["slowest_ns"] for name, t in row["times"].items()}
    costs: dict[str, Any] = {}
    for name, order in orders.items():
        costs |= chosen(ns, order, name)
    return {
        **{f"{name}_ns": round(time, 1) for name, time in times.items()},
        "speedup": round(times["expert_wave"] / times["interleaved"], 4), **orders, **costs,
    }  # fmt: skip


def order_times(row: Mapping[str, Any], platform: Platform, ranks: int, orders: Sequence[str] = MEASURED) -> dict[str, float]:
    """Order → ns of the kernel, mean over ranks. row: `shape`, `precision`, `share`, and `counts` of all experts."""
    m, line = shape(row["shape"]), LINES[FORMATS[row["precision"]]]
    return {
        name: mean(
            run.time_ns for run in simulate_layer(m, row["counts"], row["share"], order_of(name, m, platform), ranks, platform, line)
        )
        for name in orders
    }


def spans(row: Mapping[str, Any], platform: Platform, ranks: int, **given: Any) -> dict[str, dict[str, float]]:
    """Per order of a row of `moe_spans`, µs, means over ranks: the simulated time from one Linear-2 tile to the next (`period_us`), the
    same in the simulated control, the stall, which is the former less the measured control's, and T_RS of a CTA.

    Args:
        given: choices of `simulate_one_list` other than its own.
    """
    m, found = shape(row["shape"]), {}
    mine = len(row["counts"]) // ranks
    for name, recorded in row["orders"].items():
        times = control_times(recorded["local"])
        order = order_of(name, m, platform)
        runs = {
            remote: [
                simulate_one_list(
                    row["counts"][rank * mine : (rank + 1) * mine], row["share"], order, times, platform,
                    remote=remote, rank=rank, ranks=ranks, **given,
                )
                for rank in range(ranks)
            ]
            for remote in (True, False)
        }  # fmt: skip
        periods = {remote: mean(run.period_ns for run in of_ranks) for remote, of_ranks in runs.items()}
        us = {
            "period_us": periods[True], "control_us": periods[False], "stall_us": periods[True] - 1e3 * row["derived"][name]["period_us"],
            "span_us": mean(float(run.store_spans_ns.mean()) for run in runs[True]),
        }  # fmt: skip
        found[name] = {key: round(ns / 1e3, 3) for key, ns in us.items()}
    return found


def control_times(ranks: Sequence[Mapping[str, Any]]) -> TileTimes:
    """Times of a tile from what a control recorded: means over tiles and ranks, and the median of the gap before a Linear-2 tile."""
    parts = [("linear1_main", "mean"), ("linear1_epilogue", "mean"), ("linear2_main", "mean"), ("store_span", "mean"), ("gap2", "median")]
    return TileTimes(*(1e3 * mean(r[name][which] for r in ranks) for name, which in parts))


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Headline figures of the rows that have a prediction: error of the speedup, and how each choice would have done."""
    found = [r for r in measured(rows) if r.get("predicted")]
    if not found:
        return {}
    errors = [abs(r["predicted"]["speedup"] / r["derived"]["speedup"] - 1) for r in found]
    out = {"moe84.predicted_speedup_error.median": median(errors), "moe84.predicted_speedup_error.max": max(errors)}
    for name in CHOICES:
        out[f"moe.{name}_within_2pct.share"] = sum(r["predicted"][f"{name}_over_best"] <= WITHIN for r in found) / len(found)
        out[f"moe.{name}_worst_loss"] = max(r["predicted"][f"{name}_loss"] for r in found)
    return {of_precision(found, key): {"value": round(value, 4), "unit": "fraction"} for key, value in out.items()}


def annotate(path: str | Path, platform: str = PLATFORM) -> dict[str, Any]:
    """Write the prediction into every measured row of a result file, and its headline figures; returns the content.

    Raises:
        XStageError: no such file, or of another study.
    """
    path = Path(path)
    content = read_measured(path, "moe", "moe-spans")
    known = load_platform(platform, samples=False)
    tell = predict if content["study"] == "moe" else spans
    for row in content["rows"]:
        if "derived" in row:
            if content["study"] == "moe":
                m, ns = shape(row["shape"]), {name: t["slowest_ns"] for name, t in row["times"].items()}
                row["derived"] = derived(ns, auto_order(m, row["tokens"], content["settings"]["world"], row["share"]))
            else:
                row["derived"] = moe_spans.derived(row, known)
            row["predicted"] = tell(row, known, content["settings"]["world"])
    content["prediction"] = {"platform": platform}  # of spans: with the times of a tile that the control recorded
    if content["study"] == "moe":
        epilogue_ns, ns_per_k = LINES[FORMATS[content["settings"].get("precision", "W8A8")]]
        content["prediction"] |= {"ns_per_k": ns_per_k, "epilogue_ns": epilogue_ns}
        content["headline"] = headline(content["rows"]) | figures(content["rows"])
    else:
        content["headline"] = moe_spans.headline(content["rows"])
    check_writable(path)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


if __name__ == "__main__":
    made = annotate(sys.argv[1])
    print(json.dumps(figures(made["rows"]) if made["study"] == "moe" else [row["predicted"] for row in made["rows"]], indent=1))
