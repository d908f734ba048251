"""The MoE kernel with rows that go to a rank once for all their picks there, simulated before it was measured, beside rows per pick.

    python -m xstage.studies.moe_once        # writes results/simulated/moe_once.json

Two GPUs of one host with the shares f of the measured layer, and eight. Loads are drawn as `moe_layer` draws them; the simulator is that of
the kernel (`xstage.simulate.one_list`); a tile's time is a line through grouped GEMMs of one GPU, all else comes from the platform file.
Times are means over ranks.

Not covered: counts, plan and sum of the layer, which are the same but for the sources that every rank is told (16 bytes a pair); the wait
for them; receivers' ports; that copies to a tile wait for rows that another warp posts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from xstage.moe.auto_order import EPILOGUE_NS, NS_PER_K, PLATFORM
from xstage.moe.shapes import shape
from xstage.platform import Platform, load_platform
from xstage.simulate.layer import order_of, simulate_layer
from xstage.studies.one_list import ORDERS, drawn
from xstage.studies.result import SIMULATED, write_study

SHAPES, TOKENS = ("Qwen3.5", "DSv4-Flash", "Hy3", "Qwen3-30B", "GLM-5.2"), 8192
CASES = ((2, 0.5), (2, 0.875), (8, 0.875))  # ranks, share of rows from other ranks
WAYS = {"per_pick": False, "once": True}
COMMAND = "python -m xstage.studies.moe_once"


def run(out: Path | None = SIMULATED, shapes: Sequence[str] = SHAPES, tokens: int = TOKENS) -> dict[str, Any]:
    """Simulate all rows; writes `moe_once.json`."""
    platform = load_platform(PLATFORM, samples=False)
    rows = [row(name, ranks, share, tokens, platform) for name in shapes for ranks, share in CASES]
    gains = [r["times"]["per_pick"]["interleaved"]["time_ns"] / r["times"]["once"]["interleaved"]["time_ns"] for r in rows]
    return write_study(
        out, "moe_once", COMMAND, platform, {"ns_per_k": NS_PER_K, "epilogue_ns": EPILOGUE_NS, "tokens": tokens}, {"rows": rows}, {}, {},
        {"simulate.moe_once_gain.min": (min(gains), "ratio"), "simulate.moe_once_gain.max": (max(gains), "ratio")},
        ["Predictions, made before anything was measured."],
    )  # fmt: skip


def row(name: str, ranks: int, share: float, tokens: int, platform: Platform) -> dict[str, Any]:
    """Of both ways and orders, means over ranks: kernel, T_RS of a CTA, bytes that leave a rank."""
    m = shape(name)
    given = {"shape": name, "tokens": tokens, "share": share}
    counts = drawn(given, ranks)
    times: dict[str, dict[str, dict[str, float]]] = {}
    for way, once in WAYS.items():
        times[way] = {}
        for order in ORDERS:
            runs = simulate_layer(m, counts, share, order_of(order, m, platform), ranks, platform, once=once)
            times[way][order] = {
                "time_ns": mean(r.time_ns for r in runs), "span_ns": mean(float(r.store_spans_ns.mean()) for r in runs),
                "moved_bytes": mean(r.moved_bytes for r in runs),
            }  # fmt: skip
    return {**given, "ranks": ranks, "times": times}


if __name__ == "__main__":
    print(json.dumps(run()["headline"], indent=1))
