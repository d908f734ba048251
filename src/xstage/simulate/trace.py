"""Traces for Perfetto: JSON trace events, opened from a file at ui.perfetto.dev or chrome://tracing.

One process per instance with one track per role (tensor cores, issuing role), and a counter track of the outstanding bytes with Q
beside it as a line of its own. Slices carry layer, row and tile; a staging stall is a slice of its own. Times are µs in the file.

Not covered: runs of the whole GPU in one file by default (`instances` picks how many instances are written), flows between tiles.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xstage.platform import check_writable
from xstage.simulate.engine import Timeline

TENSOR, ISSUE = 1, 2


def trace_events(timeline: Timeline, capacity_bytes: float = math.inf, instances: int = 8, ctas: int = 1) -> list[dict[str, Any]]:
    """Trace events of the first `instances` instances.

    Args:
        capacity_bytes: Q, drawn beside the outstanding bytes when finite. ctas: CTAs of an instance, for the names.
    """
    order = timeline.order
    events: list[dict[str, Any]] = []
    shown = min(instances, timeline.instances)
    for g in range(shown):
        name = f"SM {g}" if ctas == 1 else f"SMs {g * ctas}–{(g + 1) * ctas - 1}"
        events += named(g + 1, name, {TENSOR: "tensor cores", ISSUE: "issuing role"})
    end1 = order.rows * order.pairs1
    for i in range(order.tiles):
        layer, k, pairs = (1, i, order.pairs1) if i < end1 else (2, i - end1, order.pairs2)
        g = k % timeline.instances
        if g >= shown:
            continue
        args = {"layer": layer, "row": k // pairs, "tile": k}
        start, end = timeline.mma_start[i], timeline.mma_end[i]
        events.append(slice_event(f"Linear-{layer} mainloop", g + 1, TENSOR, start, end, args))
        if timeline.stall[i] > 0 and timeline.span_start[i] >= end:
            events.append(slice_event("staging stall", g + 1, TENSOR, start - timeline.stall[i], start, args))
        if layer == 2:
            events.append(slice_event("stage", g + 1, ISSUE, timeline.span_start[i], timeline.store_start[i], args))
            events.append(slice_event("remote stores", g + 1, ISSUE, timeline.store_start[i], timeline.span_end[i], args))
        else:
            events.append(slice_event("Linear-1 epilogue", g + 1, ISSUE, timeline.span_start[i], timeline.span_end[i], args))
    events.append({"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "X-Stage"}})
    for now, outstanding, _ in timeline.flow:
        values = {"outstanding": round(float(outstanding))}
        if math.isfinite(capacity_bytes):
            values["Q"] = round(capacity_bytes)
        events.append({"ph": "C", "pid": 0, "name": "outstanding bytes", "ts": round(float(now) / 1e3, 3), "args": values})
    return events


def write_trace(
    path: str | os.PathLike[str], timeline: Timeline, capacity_bytes: float = math.inf, instances: int = 8, ctas: int = 1
) -> Path:
    """Write `trace_events` to a file.

    Raises:
        XStageError: the path cannot be written.
    """
    return write_events(path, trace_events(timeline, capacity_bytes, instances, ctas))


def write_events(path: str | os.PathLike[str], events: Sequence[Mapping[str, Any]]) -> Path:
    """Write trace events to a file.

    Raises:
        XStageError: the path cannot be written.
    """
    check_writable(path, "trace")
    target = Path(path)
    body = {"displayTimeUnit": "ns", "traceEvents": events}
    target.write_text(json.dumps(body, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")
    return target


def slice_event(name: str, process: int, tid: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    """A slice from start to end, ns, on a track."""
    return {
        "ph": "X",
        "pid": process,
        "tid": tid,
        "name": name,
        "ts": round(float(start) / 1e3, 3),
        "dur": round(float(end - start) / 1e3, 3),
        "args": args,
    }


def named(process: int, name: str, tracks: Mapping[int, str]) -> list[dict[str, Any]]:
    """Events that name a process and its tracks; processes are sorted by number."""
    return [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
        *({"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": role}} for tid, role in tracks.items()),
    ]
