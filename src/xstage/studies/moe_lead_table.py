"""Markdown table of `moe_lead`: the layer over the lead, measured beside simulated, or simulated alone. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xstage.errors import XStageError
from xstage.studies.tables import grid

NAMES = {
    "least": "least", "knee": "D_knee", "half": "half the default", "default": "default", "2x": "2 ×", "4x": "4 ×", "8x": "8 ×",
    "16x": "16 ×", "all": "all of Linear-1 first", "expert_wave": "expert-wave",
}  # fmt: skip
DISPATCH = ("default", "all")


def moe_lead_table(results: Path) -> str:
    """From `results`/h200x2/moe-lead.json; while there is none, from `results`/simulated/moe_lead.json.

    Raises:
        XStageError: neither is there.
    """
    path, simulated = results / "h200x2" / "moe-lead.json", results / "simulated" / "moe_lead.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    if content["rows"]:
        return _measured(content)
    if not simulated.is_file():
        raise XStageError(f"results: {simulated} is missing, make it with: python -m xstage.studies.moe_lead_prediction")
    rows = json.loads(simulated.read_text(encoding="utf-8"))["outputs"]["rows"]
    foot = (
        "**Predicted, not measured yet.** In the column of the default lead µs of the kernel, else change against it, with the lead D; "
        "bold: the best lead; \\*: what the planner chooses. Two H200s, 8,192 tokens each; `results/simulated/moe_lead.json`."
    )
    return _grid(rows, [r["predicted"]["time_ns"] for r in rows], [r["predicted"]["dispatch_ns"] for r in rows], False) + "\n\n" + foot


def _measured(content: Mapping[str, Any]) -> str:
    rows, settings = content["rows"], content["settings"]
    times = [{name: t["slowest_ns"] for name, t in r["times"].items()} for r in rows]
    dispatch = [{name: 1e3 * us for name, us in r["dispatch_us"].items()} for r in rows]
    said = [
        f"Whole layer, {settings['world']} H200s, {settings['tokens']:,} tokens each, medians of {settings['rounds']} rounds, slowest "
        "rank; `results/h200x2/moe-lead.json`. In the column of the default lead µs, else change against it, with the lead D; in brackets: "
        "simulated; bold: the best lead; \\*: what the planner chooses. Rows have come: in a recorded call."
    ]
    if not content["complete"]:
        said.append("The file is not complete: more rows will follow.")
    return _grid(rows, times, dispatch, True) + "\n\n" + " ".join(said)


def _grid(
    rows: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, float]], dispatch: Sequence[Mapping[str, float]], measured: bool
) -> str:
    """times, dispatch: of every row, name → ns. measured: predictions come in brackets."""
    names = [name for name in NAMES if any(name in ns for ns in times)]
    lines = []
    for r, ns, came in zip(rows, times, dispatch, strict=True):
        p = r.get("predicted")
        cells = [_cell(name, r, ns, p if measured else None) for name in names]
        for name in DISPATCH:
            beside = f" ({p['dispatch_ns'][name] / 1e3:,.0f})" if measured and p else ""
            cells.append(f"{came[name] / 1e3:,.0f}{beside}")
        lines.append([f"{r['shape']}, {r['share']:g}", *cells])
    head = ["model, f", *(NAMES[name] for name in names), "rows have come, µs: default", "all of Linear-1 first"]
    return grid(head, lines)


def _cell(name: str, row: Mapping[str, Any], ns: Mapping[str, float], beside: Mapping[str, Any] | None) -> str:
    """A time, or what changes against the default lead."""
    if name not in ns:
        return "–"
    lead = f"{row['lead_rows'][name]}: " if name in row["lead_rows"] and name != "all" else ""
    if name == "default":
        text = f"{lead}{ns[name] / 1e3:,.0f}" + (f" ({beside['time_ns'][name] / 1e3:,.0f})" if beside else "")
    else:
        text = f"{lead}{_change(name, ns)}" + (f" ({_change(name, beside['time_ns'])})" if beside else "")
    text = f"**{text}**" if name == row["derived"]["best"] else text
    chosen = (row.get("predicted") or {}).get("plan")
    return f"{text} \\*" if name == chosen else text


def _change(name: str, ns: Mapping[str, float]) -> str:
    return f"{ns[name] / ns['default'] - 1:+.1%}"
