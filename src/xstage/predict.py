"""`predict`: every quantity of the Burst–Gap model for one repeated burst, with what makes the answer doubtful."""

from __future__ import annotations

from typing import Any

from xstage import burst_gap
from xstage.burst_gap import Burst
from xstage.platform import KiB, MiB, load_platform


def predict(
    platform_source: str, producers: float | None, bytes_per_producer: float, gap_ns: float = 0.0, method: str = "st_global"
) -> dict[str, Any]:
    """Predict one burst on a platform.

    Args:
        platform_source: gallery name or file. producers: K, None for one per SM. bytes_per_producer: B. gap_ns: G.

    Returns:
        Plain values: times in ns, sizes in bytes, rates in bytes/ns, and `notes` (extrapolation, failed gates, published numbers).

    Raises:
        XStageError: as `load_platform`, `Platform.method` and `Burst` do.
    """
    platform = load_platform(platform_source, samples=False)
    m = platform.method(method)
    k = float(platform.sms if producers is None else producers)
    burst = Burst(k, bytes_per_producer, gap_ns)
    notes = m.extrapolated(k, bytes_per_producer)
    if platform.origin == "published":
        notes.append(f"{platform.name} holds published numbers, nothing was measured by xstage")
    notes += [f"quality gate failed: {g.name} ({g.detail})" for g in platform.failed_gates if g.name.startswith(method)]
    issue = float(burst_gap.issue_ns(burst, platform, method))
    floor = float(m.issue_floor_ns(k, bytes_per_producer))
    isolated = float(burst_gap.isolated_issue_ns(burst, platform, method))
    rate = float(m.drain_rate(k))
    volume = float(burst.burst_bytes)
    limit = "nothing (issue floor)"
    if issue > 1.01 * floor:
        limit = "capacity: one burst fills the path" if isolated >= volume / rate - gap_ns else "drain rate: the gap is too short"
    return {
        "platform": platform.name, "method": method, "producers": k, "bytes_per_producer": float(bytes_per_producer),
        "gap_ns": float(gap_ns), "burst_bytes": volume, "issue_ns": issue, "issue_floor_ns": floor, "stall_ns": issue - floor,
        "limited_by": limit, "period_ns": issue + gap_ns, "drain_rate": rate, "capacity_bytes": float(m.capacity_bytes(k)),
        "recovery_gap_ns": float(burst_gap.recovery_gap_ns(burst, platform, method)),
        "peak_outstanding_bytes": float(burst_gap.peak_outstanding_bytes(burst, platform, method)),
        "saturating_producers": float(burst_gap.saturating_producers(burst, platform, method)),
        "bursts_to_saturation": float(burst_gap.bursts_to_saturation(burst, platform, method)),
        "uneven_wait_ns": float(burst_gap.uneven_wait_ns(burst, platform, method)),
        "completion_coupled_period_ns": float(burst_gap.completion_coupled_period_ns(burst, platform, method)),
        "notes": notes,
    }  # fmt: skip


def text(p: dict[str, Any]) -> str:
    """The prediction as a short table in µs, KiB, MiB and GB/s."""
    us = 1e3
    rows = [
        (
            "burst",
            f"{p['producers']:g} producers × {p['bytes_per_producer'] / KiB:g} KiB = {p['burst_bytes'] / MiB:.2f} MiB, {p['method']}",
        ),
        ("issue time", f"{p['issue_ns'] / us:.2f} µs (floor {p['issue_floor_ns'] / us:.2f}, stall {p['stall_ns'] / us:.2f})"),
        ("limited by", p["limited_by"]),
        ("period", f"{p['period_ns'] / us:.2f} µs; if the sender waited for completion {p['completion_coupled_period_ns'] / us:.2f} µs"),
        ("uneven gaps", f"{p['uneven_wait_ns'] / us:.2f} µs of waiting, if producers do not store together and their gaps vary"),
        ("gap", f"{p['gap_ns'] / us:g} µs; {p['recovery_gap_ns'] / us:.2f} µs would let the path recover"),
        ("under way", f"{p['peak_outstanding_bytes'] / MiB:.2f} MiB at most, capacity {p['capacity_bytes'] / MiB:.2f} MiB"),
        ("first stall", _saturation(p["bursts_to_saturation"])),
        ("drain rate", f"{p['drain_rate']:.0f} GB/s; more than {p['saturating_producers']:.1f} producers issue faster than it drains"),
    ]
    lines = [f"{p['platform']}", *(f"  {name:<12}{value}" for name, value in rows)]
    return "\n".join(lines + [f"  note        {note}" for note in p["notes"]])


def _saturation(count: float) -> str:
    if count == float("inf"):
        return "never"
    return "in the first burst" if count == 0 else f"after {count:.1f} bursts"
