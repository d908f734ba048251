"""Markdown table of `moe_orders`: the paper's four figures beside the measured ones, then every configuration. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xstage.moe.shapes import PAPER
from xstage.studies.moe84 import summary
from xstage.studies.paper import MOE84
from xstage.studies.tables import grid

FIGURES = {"geomean": "geometric mean", "median": "median", "max": "maximum", "min": "minimum"}


def moe_orders_table(results: Path) -> str:
    """From `results`/h200x2/moe.json; says so where nothing is measured yet."""
    path = results / "h200x2" / "moe.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    rows = [r for r in content["rows"] if "derived" in r]
    if not rows:
        return "Not measured yet."
    settings = content["settings"]
    near = sum(r["derived"]["auto_over_best"] <= 1.02 for r in rows) / len(rows)
    worst = max(r["derived"]["auto_loss"] for r in rows)
    said = [f"`auto` is within 2% of the better order in {near:.0%} of them, at worst {worst:+.1%} against expert-wave."]
    if not content["complete"]:
        all_of_them = len(PAPER) * len(settings["routings"]) * len(settings["sizes"]) * len(settings["shares"])
        said.append(f"{len(content['rows'])} of {all_of_them} configurations: the rest is not measured yet.")
    foot = (
        f"W8A8, {settings['world']} H200s, whole layer, medians of {settings['rounds']} rounds, slowest rank; `results/h200x2/moe.json`. "
        "Predicted: over wave, by the simulator on `h200-nvlink4`, nothing refitted."
    )
    return "\n\n".join([_figures(rows, settings["shares"]), " ".join(said), _each(content["rows"], settings["shares"]), foot])


def _figures(rows: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> str:
    parts = {"all": rows, **{f"f = {share:g}": [r for r in rows if r["share"] == share] for share in shares}}
    parts = {name: part for name, part in parts.items() if part}
    found = [summary([r["derived"]["speedup"] for r in part]) for part in parts.values()]
    lines = [[label, *(f"{s[key]:.3f}" for s in found), f"{MOE84[key]:.2f}"] for key, label in FIGURES.items()]
    lines.append(["configurations", *(str(s["configurations"]) for s in found), "84"])
    return grid(["interleaved over expert-wave", *parts, "paper"], lines)


def _each(rows: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> str:
    by_share = {(r["tokens"], r["shape"], r["routing"], r["share"]): r for r in rows}
    lines = []
    for tokens, shape, routing in sorted({key[:3] for key in by_share}):
        cells, skew = [], "–"
        for share in shares:
            r = by_share.get((tokens, shape, routing, share), {})
            if "derived" in r:
                predicted = r.get("predicted")
                cells += [
                    f"{r['derived']['speedup']:.3f}", f"{predicted['speedup']:.3f}" if predicted else "–",
                    f"{r['derived']['over_serial']:.2f}",
                ]  # fmt: skip
                skew = f"{r['gini']:.2f}, {r['max_over_mean']:.1f}"
            else:
                cells += [f"needs {r['needed_bytes'] / 2**30:.0f} GiB" if r else "–", "–", "–"]
        lines.append([f"{shape}, {'skewed' if routing == 'power' else routing}, {tokens:,}", skew, *cells])
    head = [title for share in shares for title in (f"f = {share:g}: over wave", "predicted", "over serial")]
    return grid(["shape, routing, tokens per rank", "Gini, max/mean", *head], lines)
