"""8, 64 and 1,024 ranks on paper: where interleaving stops to pay.

Weak scaling of every shape: a rank keeps its work, the share of traffic that leaves it grows to (P−1)/P, and beyond one NVLink domain
traffic crosses a port. Two pictures: speed-up over ranks for several ports, and speed-up over the drain rate itself. With a fast
link there is no stall to remove; with a slow one the drain bounds both orders, and the gain that remains is the Linear-1 time that
can be put under the drain. Predictions on paper: nothing here was measured at these sizes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from xstage import tile_order
from xstage.planner import ERROR_PER_TILE_NS, PAPER_LOCALITY, at_scale
from xstage.platform import Platform, load_platform
from xstage.simulate import shapes
from xstage.simulate.mega_moe import MoEWorkload, simulate_moe
from xstage.studies.result import SIMULATED, write_study

RANKS = (8, 64, 1024)
DOMAIN = 72
PORTS = {"one NVLink domain": None, "800 Gb/s port": 100.0, "400 Gb/s port": 50.0}
RATES = (50.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 717.0, 900.0, 1200.0, 1800.0, 3000.0)
TOKENS = 8192


def run(out: Path | None = SIMULATED) -> dict[str, Any]:
    """Simulate both pictures; writes `scale.json`."""
    platform = load_platform("paper-8gpu")
    by_ranks, by_rate = [], []
    for model in shapes.SHAPES:
        w = shapes.moe_workload(model, TOKENS, routing="power", dispatch="none")
        for port, rate in PORTS.items():
            for ranks in RANKS:
                scaled, there = at_scale(w, platform, ranks, domain=ranks if rate is None else DOMAIN, port_rate=rate or 1e9)
                by_ranks.append({"model": model.name, "port": port, "ranks": ranks, **_gain(scaled, there)})
        for drain in RATES:
            methods = {n: replace(m, rate=tuple(drain for _ in m.rate)) for n, m in platform.methods.items()}
            by_rate.append({"model": model.name, "drain_rate": drain, **_gain(w, replace(platform, methods=methods))})
    stops = {model.name: [r["drain_rate"] for r in by_rate if r["model"] == model.name and not r["worth_it"]] for model in shapes.SHAPES}
    return write_study(
        out,
        "scale",
        "python -m xstage.studies.scale",
        platform,
        inputs={"tokens_per_rank": TOKENS, "ranks": list(RANKS), "domain": DOMAIN, "ports_bytes_per_ns": PORTS, "rates": list(RATES)},
        outputs={"by_ranks": by_ranks, "by_rate": by_rate, "rates_without_gain": stops},
        paper={},
        errors={},
        headline={},
        notes=[
            "Predictions on paper for 64 and 1,024 ranks: capacity Q, issue floor and fan-out are those of the 8-rank platform.",
            f"worth_it: the gain is more than the model's error of {ERROR_PER_TILE_NS:g} ns per Linear-2 tile.",
        ],
    )


def _gain(w: MoEWorkload, platform: Platform) -> dict[str, Any]:
    lead = 2 * tile_order.lead_knee(w.tile_n, platform.sms, w.intermediate)
    wave = simulate_moe(w, platform, "expert-wave", locality=PAPER_LOCALITY)
    mixed = simulate_moe(w, platform, "interleaved", lead_rows=lead, locality=PAPER_LOCALITY)
    error = ERROR_PER_TILE_NS * wave.order.rows * w.pairs2 / wave.timeline.instances
    return {
        "wave_us": wave.time_ns / 1e3,
        "interleaved_us": mixed.time_ns / 1e3,
        "speedup": wave.time_ns / mixed.time_ns,
        "worth_it": wave.time_ns - mixed.time_ns > error,
    }


if __name__ == "__main__":
    print(run()["outputs"]["rates_without_gain"])
