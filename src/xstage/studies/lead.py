"""The lead D: D_knee as a lower bound, and what a search finds beside dispatch on the same link (section 4.2, condition 2).

Time of the interleaved order over D for every shape, once with tokens that are there at the start and once with dispatch pulls that
share the link. A lead below the knee leaves instances waiting for each other; with dispatch, a longer lead than the knee can pay,
because Linear-2's stores hold back the reads that feed Linear-1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xstage import tile_order
from xstage.planner import PAPER_LOCALITY
from xstage.platform import load_platform
from xstage.simulate import shapes
from xstage.simulate.mega_moe import simulate_moe
from xstage.studies.result import SIMULATED, write_study

TOKENS = 8192
FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)


def run(out: Path | None = SIMULATED) -> dict[str, Any]:
    """Simulate the sweep; writes `lead.json`."""
    platform = load_platform("paper-8gpu")
    rows = []
    for model in shapes.SHAPES:
        knee = tile_order.lead_knee(shapes.TILE_N, platform.sms, model.intermediate)
        leads = sorted({max(1, round(f * knee)) for f in FACTORS})
        row: dict[str, Any] = {"model": model.name, "knee": knee, "leads": leads}
        for dispatch in ("none", "pull"):
            w = shapes.moe_workload(model, TOKENS, routing="power", dispatch=dispatch)
            wave = simulate_moe(w, platform, "expert-wave", locality=PAPER_LOCALITY).time_ns
            times = [simulate_moe(w, platform, "interleaved", lead_rows=d, locality=PAPER_LOCALITY).time_ns for d in leads]
            row[f"speedup_{dispatch}"] = [wave / t for t in times]
            row[f"best_{dispatch}"] = leads[min(range(len(leads)), key=times.__getitem__)]
        rows.append(row)
    return write_study(
        out,
        "lead",
        "python -m xstage.studies.lead",
        platform,
        inputs={"tokens_per_rank": TOKENS, "routing": "power alpha=1 seed=0", "locality": {"refill": PAPER_LOCALITY.refill}},
        outputs={"rows": rows},
        paper={},
        errors={},
        headline={},
        notes=["Predictions. Speed-up of the interleaved order over the expert-wave order of the same dispatch."],
    )


if __name__ == "__main__":
    run()
