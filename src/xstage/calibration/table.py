"""A calibration as people read it: the loaded-latency table (gap, issue time, period, rate) and the platform in one screen."""

from __future__ import annotations

import math
from typing import Any

from xstage.calibration.fit import limits, median_of
from xstage.platform import METHODS, KiB, MiB, Platform
from xstage.samples import select


def summary(platform: Platform) -> dict[str, Any]:
    """R, Q, knee and gates as plain values (bytes, bytes/ns, ns)."""
    out: dict[str, Any] = {"name": platform.name, "origin": platform.origin, "sms": platform.sms, "methods": {}}
    for name, m in platform.methods.items():
        out["methods"][name] = {
            "drain_rate": dict(zip(map(int, m.rate_producers), m.rate, strict=True)),
            "capacity_bytes": dict(zip(map(int, m.capacity_producers), m.capacity, strict=True)),
            "knee_bytes_per_producer": dict(zip(map(int, m.capacity_producers), zip(m.knee_low, m.knee_high, strict=True), strict=True)),
            "latency_ns": m.latency_ns,
        }
    out["gates"] = [{"name": g.name, "value": g.value, "limit": g.limit, "passed": g.passed, "detail": g.detail} for g in platform.gates]
    return out


def sweep_table(platform: Platform) -> str:
    """The tables printed by `xstage calibrate`."""
    lines = [f"{platform.name}: {platform.gpus} GPUs, {platform.sms} SMs"]
    for name, m in platform.methods.items():
        knee = f"{m.knee_low[-1] / KiB:g} to {m.knee_high[-1] / KiB:g} KiB per producer"
        lines += [
            "",
            f"{name}: R {m.rate[-1]:.1f} GB/s, Q {m.capacity[-1] / MiB:.2f} MiB (knee {knee}; by fence "
            f"{m.capacity_by_fence[-1] / MiB:.2f} MiB), fence of an empty path {m.latency_ns / 1e3:.2f} µs",
        ]
        if name not in METHODS:
            continue
        for found in limits(platform.samples, platform, name):
            if found.loaded or found.fan_out > 1:
                q = "not measured" if math.isnan(found.capacity_bytes) else f"{found.capacity_bytes / MiB:.2f} MiB"
                peers = f", to {found.fan_out} peers" if found.fan_out > 1 else ""
                where = "both directions loaded" if found.loaded else "one direction"
                lines.append(f"  {where}{peers}: R {found.drain_rate:.1f} GB/s, Q {q}")
        lines += ["", f"  {'burst':>9} {'gap µs':>7} {'issue µs':>9} {'local µs':>9} {'period µs':>10} {'GB/s':>6}"]
        swept = select(platform.samples, method=name, mode="free", producers=platform.sms, loaded=False, fan_out=1, role="fit")
        sizes = sorted({s.bytes_per_producer for s in swept})
        for b in sizes:
            for g in sorted({s.gap_ns for s in swept if s.bytes_per_producer == b}):
                here = [s for s in swept if s.bytes_per_producer == b and s.gap_ns == g]
                peer, local = ([s for s in here if s.destination == d] for d in ("peer", "local"))
                issue_local = f"{median_of(local, 'issue_ns') / 1e3:9.2f}" if local else " " * 9
                period = sorted(s.period_ns for s in peer)[len(peer) // 2]
                rate = sorted(s.rate for s in peer)[len(peer) // 2]
                lines.append(
                    f"  {b * platform.sms / MiB:5.2f} MiB {g / 1e3:7.1f} {median_of(peer, 'issue_ns') / 1e3:9.2f} {issue_local} "
                    f"{period / 1e3:10.2f} {rate:6.1f}"
                )
    lines += ["", "gates:"]
    for gate in platform.gates:
        value = "not measured" if math.isnan(gate.value) else f"{gate.value:.3g}"
        lines.append(f"  {'ok  ' if gate.passed else 'FAIL'} {gate.name}: {value} (limit {gate.limit:g}) {gate.unit}; {gate.detail}")
    return "\n".join(lines)
