"""How fast the simulator is: 50,000 tiles over 148 SMs (limit 20 ms compiled), and 84 configurations × 20 leads (limit 60 s, two cores)."""

from __future__ import annotations

import os
import platform as machine
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from xstage import tile_order
from xstage.planner import lead_sweep
from xstage.platform import load_platform
from xstage.simulate import engine
from xstage.studies import moe84
from xstage.studies.result import SIMULATED, write_study

ROUNDS = 9
FACTORS = tuple(float(f) for f in np.round(np.geomspace(0.5, 16, 20), 3))


def tile_times(rounds: int = ROUNDS) -> tuple[int, dict[str, list[float]]]:
    """Tiles per run and the seconds of each round, for a wave and an interleaved order over 148 instances."""
    link = engine.Link(speed=37.7, rate=717.0, capacity=4456448.0)
    orders = {"expert-wave": tile_order.expert_wave([521], 48, 48, 1), "interleaved": tile_order.interleaved(521, 48, 48, 8)}
    seconds: dict[str, list[float]] = {name: [] for name in orders}
    for name, order in orders.items():
        for n in range(rounds + 1):
            begin = time.perf_counter()
            engine.run_order(order, 148, link, 10000.0, 4000.0, 43008.0, 1140.0, epilogue_l1_ns=2610.0, staging_ns=2610.0)
            if n:  # the first one compiles
                seconds[name].append(time.perf_counter() - begin)
    return orders["interleaved"].tiles, seconds


def interpreted_seconds_per_tile() -> float:
    """Time per tile with JIT off, in a process of its own, on a tenth of the tiles."""
    code = (
        "import time\nfrom xstage import tile_order\nfrom xstage.simulate import engine\n"
        "order = tile_order.interleaved(52, 48, 48, 8)\n"
        "link = engine.Link(speed=37.7, rate=717.0, capacity=4456448.0)\nbegin = time.perf_counter()\n"
        "engine.run_order(order, 148, link, 10000.0, 4000.0, 43008.0, 1140.0, epilogue_l1_ns=2610.0, staging_ns=2610.0)\n"
        "print((time.perf_counter() - begin) / order.tiles)"
    )
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    return float(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout)


def run(out: Path | None = SIMULATED) -> dict[str, Any]:
    """Time both; writes `speed.json`."""
    paper_platform = load_platform("paper-8gpu")
    tiles, seconds = tile_times()
    slowest = max(float(np.median(s)) for s in seconds.values())
    workloads = [w for _, w in moe84.configurations()]
    begin = time.perf_counter()
    times = lead_sweep(workloads, paper_platform, FACTORS)
    grid = time.perf_counter() - begin
    return write_study(
        out,
        "speed",
        "python -m xstage.studies.speed",
        paper_platform,
        inputs={
            "tiles": tiles,
            "sms": 148,
            "rounds": ROUNDS,
            "configurations": len(workloads),
            "lead_factors": list(FACTORS),
            "threads": 2,
        },
        outputs={
            "seconds": seconds,
            "interpreted_over_compiled": interpreted_seconds_per_tile() * tiles / slowest,
            "grid_seconds": grid,
            "best_lead_over_knee": [float(FACTORS[i]) for i in times.argmin(1)],
            "compiled": engine.COMPILED,
            "machine": {"cpu": machine.processor() or machine.machine(), "cores": os.cpu_count(), "python": machine.python_version()},
        },
        paper={},
        errors={"tiles_ms": slowest * 1e3, "tiles_ms_limit": 20.0, "grid_seconds": grid, "grid_seconds_limit": 60.0},
        headline={
            "simulate.tiles_per_second": (tiles / slowest, "1/s"),
            "plan.grid_seconds": (grid, "s"),
        },
        notes=["Medians of the slower of the two orders. The grid includes building the orders."],
    )


if __name__ == "__main__":
    print(run()["errors"])
