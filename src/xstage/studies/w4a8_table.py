"""Markdown table of `w4a8`: the layer's times in both formats by shape and tokens. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

from xstage.studies.tables import grid


def w4a8_table(results: Path) -> str:
    """From `results`/h200x2/w4a8.json; says so where nothing is measured yet."""
    path = results / "h200x2" / "w4a8.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    rows = {(r["shape"], r["tokens"]): r for r in content["rows"]}
    if not rows:
        return "Not measured yet."
    sizes = sorted({tokens for _, tokens in rows})
    lines = []
    for shape in dict.fromkeys(shape for shape, _ in rows):
        cells = []
        for tokens in sizes:
            if (shape, tokens) not in rows:
                cells.append("–")
                continue
            r = rows[shape, tokens]
            w8, w4 = (r["times"][name]["slowest_ns"] / 1e3 for name in ("w8a8", "w4a8"))
            cells.append(f"{w8:,.0f} / {w4:,.0f}: {r['derived']['speedup_over_w8a8']:.2f}")
        lines.append([shape, *cells])
    settings = content["settings"]
    foot = (
        f"µs, W8A8 / W4A8: speedup; whole layer, `auto`, {settings['world']} H200s, medians of {settings['rounds']} rounds, slowest rank; "
        "`results/h200x2/w4a8.json`."
    )
    return grid(["tokens per rank", *(f"{tokens:,}" for tokens in sizes)], lines) + "\n\n" + foot
