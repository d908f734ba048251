"""The 84 configurations of section 5.2.1: interleaved over expert-wave, 7 shapes × W4A8/W8A8 × balanced/skewed × 3 sizes.

The paper prints the four summary figures and a chart, not the sizes, the shapes or the skew: those are chosen here (the size of
table 2, its half, and 8,192 tokens per GPU; power law α = 1). The refill cost of the locality term is fitted to one of the four
figures, the minimum of 0.94, so that one is no prediction. Time is that of the rank with the most rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xstage import tile_order
from xstage.planner import PAPER_LOCALITY
from xstage.platform import Platform, load_platform
from xstage.simulate import shapes
from xstage.simulate.mega_moe import Locality, MoEWorkload, simulate_moe
from xstage.studies import paper
from xstage.studies.result import SIMULATED, write_study

SIZES = (8192, paper.TABLE2_TOKENS // 2, paper.TABLE2_TOKENS)
ALPHA = 1.0
LEAD_FACTOR = 2


def configurations(alpha: float = ALPHA, dispatch: str = "none") -> list[tuple[dict[str, Any], MoEWorkload]]:
    """The 84 configurations as (what it is, workload)."""
    found = []
    for model in shapes.SHAPES:
        for bits in (8, 4):
            for family in ("balanced", "power"):
                for tokens in SIZES:
                    w = shapes.moe_workload(model, tokens, routing=family, alpha=alpha, weight_bits=bits, dispatch=dispatch)
                    what = {"model": model.name, "precision": f"W{bits}A8", "routing": family, "tokens_per_rank": tokens}
                    found.append((what, w))
    return found


def run(out: Path | None = SIMULATED, variants: bool = True) -> dict[str, Any]:
    """Simulate all configurations; writes `moe84.json`."""
    platform = load_platform("paper-8gpu")
    rows = _speedups(platform, configurations(), PAPER_LOCALITY)
    figures = summary([r["speedup"] for r in rows])
    outputs: dict[str, Any] = {"rows": rows, "summary": figures, "by": _groups(rows)}
    if variants:
        outputs["variants"] = [
            {"variant": name, **summary([r["speedup"] for r in _speedups(platform, configurations(alpha, dispatch), locality)])}
            for name, alpha, dispatch, locality in (
                ("no locality term", ALPHA, "none", Locality()),
                ("alpha 0.8", 0.8, "none", PAPER_LOCALITY),
                ("alpha 1.2", 1.2, "none", PAPER_LOCALITY),
                ("dispatch pulls share the link", ALPHA, "pull", PAPER_LOCALITY),
                ("dispatch pushes share link and capacity", ALPHA, "push", PAPER_LOCALITY),
            )
        ]
    return write_study(
        out,
        "moe84",
        "python -m xstage.studies.moe84",
        platform,
        inputs={
            "tokens_per_rank": list(SIZES),
            "routing": f"power alpha={ALPHA:g} seed=0, or balanced",
            "dispatch": "none",
            "lead_over_knee": LEAD_FACTOR,
            "locality": {"l2_bytes": PAPER_LOCALITY.l2_bytes, "refill": PAPER_LOCALITY.refill, "fitted_to": "the printed minimum"},
        },
        outputs=outputs,
        paper={"source": paper.SOURCE, **paper.MOE84},
        errors={key: figures[key] / paper.MOE84[key] - 1 for key in paper.MOE84},
        headline={
            "simulate.moe84.geomean": (figures["geomean"], "ratio"),
            "simulate.moe84.max": (figures["max"], "ratio"),
            "simulate.moe84.min": (figures["min"], "ratio"),
        },
        notes=["DiT-MoE is a synthetic shape.", "The minimum is fitted (refill cost), the other three figures are predictions."],
    )


def _speedups(platform: Platform, configs: list[tuple[dict[str, Any], MoEWorkload]], locality: Locality) -> list[dict[str, Any]]:
    rows = []
    for what, w in configs:
        lead = LEAD_FACTOR * tile_order.lead_knee(w.tile_n, platform.sms, w.intermediate)
        wave = simulate_moe(w, platform, "expert-wave", locality=locality)
        mixed = simulate_moe(w, platform, "interleaved", lead_rows=lead, locality=locality)
        rows.append(
            {
                **what,
                "synthetic": w.synthetic,
                "gini": w.load.gini,
                "max_over_mean": w.load.max_over_mean,
                "lead_rows": lead,
                "wave_us": wave.time_ns / 1e3,
                "interleaved_us": mixed.time_ns / 1e3,
                "speedup": wave.time_ns / mixed.time_ns,
                "tensor_busy_wave": wave.tensor_busy,
                "tensor_busy_interleaved": mixed.tensor_busy,
            }
        )
    return rows


def summary(values: Sequence[float]) -> dict[str, float]:
    """Geometric mean, median, maximum and minimum, and how many there are."""
    v = np.asarray(values)
    return {
        "geomean": float(np.exp(np.log(v).mean())),
        "median": float(np.median(v)),
        "max": float(v.max()),
        "min": float(v.min()),
        "configurations": len(values),
    }


def _groups(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric means by model, precision, routing and size."""
    found: dict[str, dict[str, float]] = {}
    for key in ("model", "precision", "routing", "tokens_per_rank"):
        values = dict.fromkeys(str(r[key]) for r in rows)
        found[key] = {v: summary([r["speedup"] for r in rows if str(r[key]) == v])["geomean"] for v in values}
    return found


if __name__ == "__main__":
    print(run()["outputs"]["summary"])
