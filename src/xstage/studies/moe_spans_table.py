"""Markdown table of `moe_spans`: spans of Linear-2 tiles inside the kernel beside their control and the model. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from xstage.studies.tables import grid


def moe_spans_table(results: Path) -> str:
    """From `results`/h200x2/moe-spans.json; says so where nothing is measured yet."""
    path = results / "h200x2" / "moe-spans.json"
    if not path.exists():
        return "Not measured yet."
    content = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for r in content["rows"]:
        for order, found in r["orders"].items():
            d, ns = r["derived"][order], {name: t["slowest_ns"] for name, t in r["times"].items()}
            remote, predicted = found["remote"], (r.get("predicted") or {}).get(order)
            lines.append([
                f"{r['shape']}, {r['share']:g}, {order.replace('_', '-')}",
                *(_spread(ranks, "store_span") for ranks in (remote, found["local"])), f"{d['over_control']:.2f}",
                f"{d['period_us']:.1f}", f"{d['drain_us']:.1f}, {d['sent_us']:.1f}",
                f"{d['predicted_stall_us']:.1f}", f"{predicted['stall_us']:.1f}" if predicted else "–", f"{d['stall_us']:.1f}",
                ", ".join(f"{mean(s[name]['mean'] for s in remote):.1f}" for name in ("linear1_main", "linear2_main")),
                f"{mean(s['busy'] for s in remote):.0%} ({mean(s['busy'] for s in found['local']):.0%})",
                f"{ns[f'{order}_spans'] / ns[order] - 1:+.1%}",
            ])  # fmt: skip
    head = [
        "model, f, order", "T_RS: mean (p10 … median … p90)", "all rows local", "over it", "G, all rows local", "V/R, S/R", "closed form",
        "simulator", "measured", "main loop: Linear-1, Linear-2", "in a main loop (local)", "what recording costs",
    ]  # fmt: skip
    settings = content["settings"]
    foot = (
        f"µs, of the math warps, one whole call on each of {settings['world']} H200s, {settings['tokens']:,} tokens per rank; "
        f"`results/h200x2/moe-spans.json`. Platform `{settings['platform']}`, nothing refitted."
    )
    return grid(head, lines) + "\n\n" + foot


def _spread(ranks: Sequence[Mapping[str, Any]], name: str) -> str:
    """Means over ranks."""
    value = {key: mean(s[name][key] for s in ranks) for key in ("mean", "p10", "median", "p90")}
    return f"{value['mean']:.2f} ({value['p10']:.2f} … {value['median']:.2f} … {value['p90']:.2f})"
