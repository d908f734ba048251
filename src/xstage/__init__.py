"""xstage: what happens to a remote store after it was issued, and kernels designed with it.

Names are loaded on first use, so that `import xstage` costs nothing and the model runs where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "KiB": "platform", "MiB": "platform", "Platform": "platform", "StoreMethod": "platform", "load_platform": "platform",
    "gallery": "platform",
    "Burst": "burst_gap", "Trajectory": "burst_gap", "issue_ns": "burst_gap", "isolated_issue_ns": "burst_gap", "period_ns": "burst_gap",
    "stall_ns": "burst_gap", "recovery_gap_ns": "burst_gap", "peak_outstanding_bytes": "burst_gap", "saturating_producers": "burst_gap",
    "knee_bytes_per_producer": "burst_gap", "uneven_wait_ns": "burst_gap",
    "bursts_to_saturation": "burst_gap", "completion_coupled_period_ns": "burst_gap", "recurrence": "burst_gap",
    "Design": "design", "Interleave": "design", "Audit": "design", "audit": "design", "load_design": "design", "designs": "design",
    "calibrate": "calibration", "write_report": "report.write", "compare": "bench.compare",
    "plan": "planner", "Plan": "planner", "MoEWorkload": "simulate.mega_moe", "simulate_moe": "simulate.mega_moe",
    "moe_workload": "simulate.shapes", "AttentionWorkload": "simulate.attention", "simulate_attention": "simulate.attention",
    "TileOrder": "tile_order", "lead_knee": "tile_order", "write_trace": "simulate.trace",
    "AttentionA2A": "attention.op", "Variant": "attention.op", "flash_attention_a2a": "attention.op", "release_shared": "attention.op",
    "MegaMoE": "moe.op", "SequenceLayout": "attention.layout", "Segment": "attention.layout",
    "XStageError": "errors", "UnsuitableMachine": "errors", "CalibrationFailed": "errors", "PeerTimeout": "errors",
}  # fmt: skip

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'xstage' has no attribute {name!r}")
    return getattr(import_module(f"xstage.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
