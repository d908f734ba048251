"""Data of figures 9 and 10: tensor-core activity over time, outstanding bytes, and span distributions, wave and interleaved.

Figure 9 uses one shape under skewed routing; figure 10 all seven, with the local-store control of section 5.2.3. Simulated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from xstage.moe.spans import busy_share
from xstage.platform import load_platform
from xstage.simulate import shapes
from xstage.simulate.engine import Timeline
from xstage.simulate.mega_moe import make_link, simulate_moe
from xstage.studies import paper, table2
from xstage.studies.result import SIMULATED, write_study

SHOWN = "Qwen3.5"
BINS = 240
EDGES_US = tuple(float(x) for x in np.round(np.arange(0, 16.01, 0.25), 2))


def tensor_activity(timeline: Timeline, bins: int = BINS) -> tuple[list[float], list[float]]:
    """Bin starts in µs and the share of instances in a mainloop, over the makespan."""
    edges = np.linspace(0, timeline.makespan_ns, bins + 1)
    share = busy_share(timeline.mma_start, timeline.mma_end, timeline.makespan_ns, timeline.instances, bins)
    return [float(e) / 1e3 for e in edges[:-1]], [float(x) for x in share]


def run(out: Path | None = SIMULATED) -> dict[str, Any]:
    """Simulate and bin; writes `timelines.json`."""
    platform = load_platform("paper-8gpu")
    workload = table2.row_workload(shapes.shape(SHOWN))
    lead = table2.row_lead(shapes.shape(SHOWN), platform)
    activity: dict[str, Any] = {}
    for order in ("expert-wave", "interleaved"):
        r = simulate_moe(workload, platform, order, lead_rows=lead, trace=True)
        at, share = tensor_activity(r.timeline)
        inside = np.linspace(0, r.timeline.makespan_ns, BINS * 50)
        flow = np.interp(inside, r.timeline.flow[:, 0], r.timeline.flow[:, 1]).reshape(BINS, 50)
        activity[order] = {
            "time_us": at,
            "tensor_active": share,
            "outstanding_mean_bytes": list(flow.mean(1)),
            "outstanding_max_bytes": list(flow.max(1)),
            "mean_active": r.tensor_busy,
            "end_us": r.time_ns / 1e3,
        }
    spans: dict[str, Any] = {}
    for model in shapes.SHAPES:
        w = table2.row_workload(model)
        runs = {
            "expert-wave": simulate_moe(w, platform, "expert-wave"),
            "interleaved": simulate_moe(w, platform, "interleaved", lead_rows=table2.row_lead(model, platform)),
            "local stores": simulate_moe(w, platform, "expert-wave", remote=False),
        }
        spans[model.name] = {k: [int(n) for n in np.histogram(r.timeline.span_ns / 1e3, EDGES_US)[0]] for k, r in runs.items()}
    return write_study(
        out,
        "timelines",
        "python -m xstage.studies.timelines",
        platform,
        inputs={
            "shape": SHOWN,
            "tokens_per_rank": paper.TABLE2_TOKENS,
            "routing": f"power alpha={table2.ALPHA:g} seed=0",
            "lead_rows": lead,
        },
        outputs={
            "activity": activity,
            "capacity_bytes": make_link(workload, platform).capacity,
            "span_edges_us": list(EDGES_US),
            "span_counts": spans,
        },
        paper={"source": paper.SOURCE, "span_medians_us": {k: v[:2] for k, v in paper.TABLE2.items()}},
        errors={},
        headline={},
        notes=["Simulated, single-rank engine. DiT-MoE is a synthetic shape."],
    )


if __name__ == "__main__":
    run()
