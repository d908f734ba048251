"""What the simulator and the planner say of the leads of `moe_lead`, on any machine.

    python -m xstage.studies.moe_lead_prediction                                    # writes results/simulated/moe_lead.json
    python -m xstage.studies.moe_lead_prediction results/h200x2/moe-lead.json       # adds the same to measured rows

The simulator is that of the kernel, `xstage.simulate.one_list`: every lead of the list that the kernel is given, on the load that the study
draws. The time of a tile is the line `EPILOGUE_NS + NS_PER_K · K` through grouped GEMMs of one GPU (`auto_order`); all else comes from the
platform file. Its best lead is the one of the shortest simulated kernel.

The planner's choice among them is that of `xstage.layer_plan`: `auto`'s order with the kernel's own lead, unless another's gain exceeds the
model's error.

Not covered: what a lead makes the kernel read from memory, clocks; counts, plan and sum over picks, which all orders have alike.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from xstage.layer_plan import taken
from xstage.moe.auto_order import EPILOGUE_NS, NS_PER_K, PLATFORM, auto_order
from xstage.moe.shapes import shape
from xstage.platform import Platform, check_writable, load_platform
from xstage.simulate.layer import simulate_layer
from xstage.studies import moe_lead
from xstage.studies.moe_lead import SHAPES, SHARES, TOKENS, WAVE
from xstage.studies.one_list import drawn
from xstage.studies.result import SIMULATED, read_measured, write_study

COMMAND, RANKS = "python -m xstage.studies.moe_lead_prediction", 2


def predict(row: Mapping[str, Any], platform: Platform, ranks: int) -> dict[str, Any]:
    """Of every order of `moe_lead.orders`, ns, mean over ranks: of the kernel (`time_ns`), and until the last row has come (`dispatch_ns`).
    `best`: name of the lead with the shortest time. `plan`: name of what the planner chooses.

    Args:
        row: `shape`, `tokens`, `share`, and `counts` of all experts.
    """
    m = shape(row["shape"])
    orders = moe_lead.orders(m, row["tokens"], ranks, platform.sms // 2)
    times, dispatch = {}, {}
    for name, order in orders.items():
        runs = simulate_layer(m, row["counts"], row["share"], order, ranks, platform)
        times[name], dispatch[name] = (round(mean(ns), 1) for ns in ([r.time_ns for r in runs], [r.dispatch_ns for r in runs]))
    auto = "all" if auto_order(m, row["tokens"], ranks, row["share"]) == "linear1_first" else "default"
    best = min((name for name in orders if name != WAVE), key=times.__getitem__)
    return {"time_ns": times, "dispatch_ns": dispatch, "best": best, "plan": taken(times, auto)}


def run(out: Path | None = SIMULATED, tokens: int = TOKENS) -> dict[str, Any]:
    """Simulate the study's rows before they are measured; writes `moe_lead.json`."""
    platform, rows = load_platform(PLATFORM, samples=False), []
    for name in SHAPES:
        for share in SHARES:
            row: dict[str, Any] = {"shape": name, "tokens": tokens, "share": share}
            found = predict({**row, "counts": drawn(row, RANKS)}, platform, RANKS)
            leads = moe_lead.orders(shape(name), tokens, RANKS, platform.sms // 2)
            lead_rows = {lead: order.lead_rows for lead, order in leads.items() if lead != WAVE}
            rows.append({**row, "lead_rows": lead_rows, "predicted": found, "derived": moe_lead.derived(found["time_ns"])})
    loss = max(r["derived"]["default_loss"] for r in rows)
    inputs = {"ns_per_k": NS_PER_K, "epilogue_ns": EPILOGUE_NS, "ranks": RANKS, "tokens_per_rank": tokens}
    return write_study(
        out, "moe_lead", COMMAND, platform, inputs, {"rows": rows}, {}, {},
        {"simulate.moe_lead_default_loss.max": (loss, "fraction")},
        ["Predictions, made before anything was measured."],
    )  # fmt: skip


def annotate(path: str | Path, platform: str = PLATFORM) -> dict[str, Any]:
    """Write the prediction into every row of a result of `moe_lead`, and what follows from it; returns the content.

    Raises:
        XStageError: no such file, or of another study.
    """
    path = Path(path)
    content = read_measured(path, "moe-lead")
    known = load_platform(platform, samples=False)
    for row in content["rows"]:
        row["predicted"] = predict(row, known, content["settings"]["world"])
        row["derived"] = moe_lead.derived({name: t["slowest_ns"] for name, t in row["times"].items()}, row["predicted"])
    content["prediction"] = {"platform": platform, "ns_per_k": NS_PER_K, "epilogue_ns": EPILOGUE_NS}
    content["headline"] = moe_lead.headline(content["rows"])
    check_writable(path)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


if __name__ == "__main__":
    made = annotate(sys.argv[1])["headline"] if sys.argv[1:] else run()["headline"]
    print(json.dumps(made, indent=1))
