"""Markdown table of `moe_orders`: the paper's four figures beside the measured ones, then every configuration. Needs no torch.

The paper's 84 configurations are 42 with weights of eight bits and 42 with weights of four. Here each half is a result file, at two shares
f of remote picks, so at each share both halves together are 84.
"""

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
FILES = {"W8A8": "moe.json", "W4A8": "moe-w4a8.json"}

Rows = Sequence[Mapping[str, Any]]


def moe_orders_table(results: Path) -> str:
    """From `results`/h200x2/moe.json and moe-w4a8.json; says so where nothing is measured yet."""
    found = {precision: _read(results / "h200x2" / name) for precision, name in FILES.items()}
    measured = {precision: [r for r in content["rows"] if "derived" in r] for precision, content in found.items()}
    there = [precision for precision, rows in measured.items() if rows]
    if not there:
        return "Not measured yet."
    parts = [_figures(measured, found[there[0]]["settings"]["shares"])]
    parts += [_said(precision, found[precision], measured[precision]) for precision in FILES]
    parts[-1] += _predicted(results / "simulated" / "moe_w4a8.json")
    for precision in there:
        content = found[precision]
        parts += [_each(content["rows"], content["settings"]["shares"]), _foot(precision, content)]
    return "\n\n".join(parts)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    return content


def _predicted(path: Path) -> str:
    """What the simulator said of the half with weights of four bits before it was measured."""
    if not path.exists():
        return ""
    shares = json.loads(path.read_text(encoding="utf-8"))["outputs"]["by_share"]
    figures = [f"at f = {share} " + ", ".join(f"{label} {s[key]:.3f}" for key, label in FIGURES.items()) for share, s in shares.items()]
    return f" Predicted before the measurement, by the simulator of the kernel: {'; '.join(figures)} (`results/simulated/moe_w4a8.json`)."


def _said(precision: str, content: Mapping[str, Any], rows: Rows) -> str:
    """What `auto` did in a half, and what is missing of it."""
    if not rows:
        return f"{precision}: not measured."
    near = sum(r["derived"]["auto_over_best"] <= 1.02 for r in rows) / len(rows)
    worst = max(r["derived"]["auto_loss"] for r in rows)
    said = [f"{precision}: `auto` is within 2% of the best order in {near:.0%} of them, at worst {worst:+.1%} against expert-wave."]
    if not content["complete"]:
        settings = content["settings"]
        all_of_them = len(PAPER) * len(settings["routings"]) * len(settings["sizes"]) * len(settings["shares"])
        said.append(f"{len(content['rows'])} of {all_of_them} configurations: the rest is not measured yet.")
    return " ".join(said)


def _foot(precision: str, content: Mapping[str, Any]) -> str:
    settings = content["settings"]
    return (
        f"{precision}, {settings['world']} H200s, whole layer, medians of {settings['rounds']} rounds, slowest rank; "
        f"`results/h200x2/{FILES[precision]}`. Predicted: over wave, by the simulator on `h200-nvlink4`, nothing refitted."
    )


def _figures(measured: Mapping[str, Rows], shares: Sequence[float]) -> str:
    """One half: all of it, then by share. Both: by share, together and each."""
    there = {precision: rows for precision, rows in measured.items() if rows}
    together = [r for rows in there.values() for r in rows]
    columns: dict[str, list[Mapping[str, Any]]] = {}
    if len(there) == 1:
        columns["all"] = together
    for share in shares:
        columns[f"f = {share:g}"] = [r for r in together if r["share"] == share]
        if len(there) > 1:
            columns |= {f"of it {precision}, {share:g}": [r for r in rows if r["share"] == share] for precision, rows in there.items()}
    columns = {name: rows for name, rows in columns.items() if rows}
    found = [summary([r["derived"]["speedup"] for r in rows]) for rows in columns.values()]
    lines = [[label, *(f"{s[key]:.3f}" for s in found), f"{MOE84[key]:.2f}"] for key, label in FIGURES.items()]
    lines.append(["configurations", *(str(s["configurations"]) for s in found), "84"])
    return grid(["interleaved over expert-wave", *columns, "paper"], lines)


def _each(rows: Rows, shares: Sequence[float]) -> str:
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
