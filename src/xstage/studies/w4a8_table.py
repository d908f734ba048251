"""Markdown tables of weights in MXFP4: the layer's times in both formats (`w4a8`), and its GEMMs beside humming's. Needs no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

from xstage.moe.work_table import FORMS, form_of
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


def w4a8_gemm_table(results: Path) -> str:
    """From `results`/h200/w4a8-gemm.json (`benchmarks/humming_gemm.py`); says so where nothing is measured yet."""
    path = results / "h200" / "w4a8-gemm.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    if not content["rows"]:
        return "Not measured yet."
    good = [r for r in content["rows"] if r["error"] is None]
    us = {(r["shape"], r["tokens"], r["layer"], r["contender"]): r["time_us"] for r in good}
    loads = {(r["shape"], r["tokens"]): r["rows"] / r["experts"] for r in good}
    lines = []
    for (shape, tokens), load in loads.items():

        def both(contender: str, at: tuple[str, int] = (shape, tokens)) -> float:
            return float(us.get((*at, "both", contender), math.nan))

        def layers(contenders: list[str], at: tuple[str, int] = (shape, tokens)) -> float:
            return sum(min((us.get((*at, layer, c), math.nan) for c in contenders), default=math.nan) for layer in ("linear1", "linear2"))

        fp8, forms = both("ours_fp8"), {form: both("ours_mxfp4" if form == "wide" else f"ours_mxfp4_{form}") for form in FORMS}
        measured = {form: t for form, t in forms.items() if not math.isnan(t)}
        taken = measured.get(form_of(load, list(measured)), math.nan)
        block = layers(sorted({c for *_, c in us if c.startswith("humming_1x128")}))
        row = layers(["humming_per_row"])
        lines.append(
            [f"{shape}, {tokens:,}", f"{load:.0f}", f"{fp8:,.0f}", *(f"{measured[f]:,.0f}" if f in measured else "–" for f in FORMS),
             f"{fp8 / taken:.2f}", *(f"{t:,.0f}" for t in (block, row)), f"{block / taken:.2f}"]
        )  # fmt: skip
    head = [
        "model, tokens per rank", "rows of an expert", "fp8", *FORMS, "fp8 over MXFP4", "humming, 1 × 128", "one scale a row",
        "1 × 128 over ours",
    ]  # fmt: skip
    foot = (
        f"µs, medians of {content['settings']['rounds']} rounds, weights not in the cache, one H200, the experts of one rank of two, all "
        "results on the same GPU; `results/h200/w4a8-gemm.json`."
    )
    return grid(head, lines) + "\n\n" + foot
