"""A kernel design held against a platform: the two bounds of equation (10), which one binds, and what to do about it.

A `Design` says what one tile boundary sends (producers, tile, share that leaves the GPU), what work lies between two boundaries, who
issues the stores, and which completion edges it keeps. `audit` predicts; it measures nothing.

Notable: the gap that counts is the gap of the *issuing role*. When the role that computes also issues (`staging_slots = 1`) that is
the mainloop, and T_iss⁰ + G = T_iss⁰ + T_mma. When another role drains a staging buffer (`staging_slots >= 2`) issue and mainloop
overlap: an unhindered period is max(T_iss⁰ + its own gap, T_mma), and once the rate bound is broken the staging buffer is always full,
so the issuing role has no gap left and T_RS rises to V/R.

Not covered: receiver contention, reads, the cost of synchronisation and launches, L2 locality lost by interleaving.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from xstage.burst_gap import queue_wait_ns
from xstage.errors import XStageError
from xstage.platform import TABLES, KiB, MiB, Platform

EDGES: dict[str, str] = {
    "release_after_stores": "a system-scope release follows the data stores before a peer is told of them",
    "acquire_before_consumer": "the consumer acquires at system scope before it reads",
    "destination_free_before_overwrite": "a peer's buffer is not written again before its reader is done",
    "source_free_before_reuse": "staging memory is not written again before the bulk engine has read it",
    "proxy_fence_before_bulk": "fence.proxy.async stands between generic writes to shared memory and the bulk copy that reads them",
    "bulk_complete_before_release": "the issuing thread reaches wait_group 0, not .read, before its release",
}
"""Completion edges and what each promises. Issue is not visibility: none of them follows from the order of issue."""

_COMMON = ("release_after_stores", "acquire_before_consumer", "destination_free_before_overwrite")
REQUIRED_EDGES: dict[str, tuple[str, ...]] = {
    "st_global": _COMMON,
    "st_global_source_free": _COMMON,
    "bulk": (*_COMMON, "source_free_before_reuse", "proxy_fence_before_bulk", "bulk_complete_before_release"),
}
"""By store method: registers are free when a store was issued, shared memory under a bulk copy is not."""

_CLOSE = 0.05  # margins below this are inside the error of the model past the knee


@dataclass(frozen=True)
class Interleave:
    """Work without stores that may be put between the bursts (paper, section 4.2).

    Attributes:
        n1, n2: tiles of Linear-1 and Linear-2 in one period (≥ 1). mainloop_ns: T_L1, time of one Linear-1 mainloop.
    """

    n1: float
    n2: float
    mainloop_ns: float

    def __post_init__(self) -> None:
        for name in ("n1", "n2", "mainloop_ns"):
            _check(f"interleave.{name}", getattr(self, name), 0, strict=True)


@dataclass(frozen=True)
class Design:
    """One kernel design, as far as the X-Stage is concerned. Times in ns, sizes in bytes.

    Attributes:
        name: for people. kind: `gemm` or `attention`.
        producers: K, producers whose tile boundaries align (the worst case: all that are resident).
        tile_m, tile_n, out_bytes: output tile of one producer and bytes per element.
        bytes_per_producer: B given directly, when the tile is not known; replaces tile and element size.
        remote_share: fraction of those bytes that goes to peers, 0 < share ≤ 1.
        mainloop_ns: T_mma, or `mainloop_flops` with `tflops_per_producer`; attention may give `kv_tile_ns` (σ), `kv_tile` (b_n) and
            `sequence` (M) instead: mainloop = σ·⌈M/b_n⌉, the fixed part left out (conservative, section 4.3).
        gap_ns: time of other work of the *issuing role* between two bursts. Default: the mainloop when it issues itself, else 0.
        issue_floor_ns: unhindered span of this design's own epilogue where conversion is part of it. Default: the platform's T_iss⁰.
        staging_slots: 1 = the owner of the accumulators issues, 2 or more = another role issues from staging memory.
        cover_ns: T_cover, what staging hides. Default: one mainloop with 2 or more slots (more slots postpone a stall, they do not
            remove it), else 0.
        method: table of the platform, `st_global`, `st_global_source_free` or `bulk`.
        completion_edges: the edges (`EDGES`) that the design keeps.
        interleave: Linear-1 tiles that could stand between the bursts. note: where the numbers come from.

    Raises:
        XStageError: a field is outside its range, unknown, or missing.
    """

    name: str
    producers: int
    tile_m: int = 0
    tile_n: int = 0
    out_bytes: float = 2
    bytes_per_producer: float | None = None
    remote_share: float = 1.0
    kind: str = "gemm"
    mainloop_ns: float | None = None
    mainloop_flops: float | None = None
    tflops_per_producer: float | None = None
    kv_tile_ns: float | None = None
    kv_tile: int | None = None
    sequence: int | None = None
    gap_ns: float | None = None
    issue_floor_ns: float | None = None
    staging_slots: int = 1
    cover_ns: float | None = None
    method: str = "st_global"
    completion_edges: tuple[str, ...] = ()
    interleave: Interleave | None = None
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "completion_edges", tuple(self.completion_edges))
        if not isinstance(self.name, str) or not self.name:
            raise XStageError(f"name: {self.name!r} must be a text that is not empty")
        for field_name, known in (("kind", ("gemm", "attention")), ("method", TABLES)):
            if getattr(self, field_name) not in known:
                raise XStageError(f"{field_name}: {getattr(self, field_name)!r} is unknown, known are {', '.join(known)}")
        _check("producers", self.producers, 1)
        _check("staging_slots", self.staging_slots, 1)
        if self.bytes_per_producer is None:
            for field_name in ("tile_m", "tile_n", "out_bytes"):
                _check(field_name, getattr(self, field_name), 0, strict=True)
        positive = ("bytes_per_producer", "mainloop_ns", "mainloop_flops", "tflops_per_producer", "kv_tile_ns", "kv_tile", "sequence",
                    "issue_floor_ns")  # fmt: skip
        for field_name in positive:
            if getattr(self, field_name) is not None:
                _check(field_name, getattr(self, field_name), 0, strict=True)
        for field_name in ("gap_ns", "cover_ns"):
            if getattr(self, field_name) is not None:
                _check(field_name, getattr(self, field_name), 0)
        _check("remote_share", self.remote_share, 0, strict=True)
        if self.remote_share > 1:
            raise XStageError(f"remote_share: {self.remote_share:g} must be at most 1")
        for edge in self.completion_edges:
            if edge not in EDGES:
                raise XStageError(f"completion_edges: {edge!r} is unknown, known are {', '.join(EDGES)}")
        if self.kind == "attention" and (self.kv_tile_ns is None or self.kv_tile is None):
            raise XStageError("kind: 'attention' needs kv_tile_ns and kv_tile")
        _ = self.mainloop  # refuses a design without any

    @property
    def burst_bytes(self) -> float:
        """V = K·B, the bytes that leave the GPU at one aligned tile boundary."""
        return self.producers * self.remote_bytes_per_producer

    @property
    def remote_bytes_per_producer(self) -> float:
        """B = tile_m · tile_n · out_bytes · remote_share (or `bytes_per_producer` · remote_share)."""
        whole = self.tile_m * self.tile_n * self.out_bytes if self.bytes_per_producer is None else self.bytes_per_producer
        return whole * self.remote_share

    @property
    def mainloop(self) -> float:
        """T_mma in ns: given, or from arithmetic and rate, or σ·⌈M/b_n⌉."""
        if self.mainloop_ns is not None:
            return self.mainloop_ns
        if self.mainloop_flops is not None and self.tflops_per_producer is not None:
            return self.mainloop_flops / (self.tflops_per_producer * 1e3)  # 1 TFLOP/s = 1e3 FLOP/ns
        if self.kv_tile_ns is not None and self.kv_tile is not None and self.sequence is not None:
            return self.kv_tile_ns * math.ceil(self.sequence / self.kv_tile)
        raise XStageError(
            "mainloop_ns: is missing; give it, or mainloop_flops and tflops_per_producer, or kv_tile_ns, kv_tile and sequence"
        )

    @property
    def staged(self) -> bool:
        """True when another role than the one that computes issues the stores."""
        return self.staging_slots >= 2

    @property
    def missing_edges(self) -> tuple[str, ...]:
        """Completion edges that this store method needs and the design does not keep."""
        return tuple(e for e in REQUIRED_EDGES[self.method] if e not in self.completion_edges)


@dataclass(frozen=True)
class Schedule:
    """What one order of the tiles gives: the given order, or the one with Linear-1 tiles interleaved.

    Attributes:
        gap_ns: G, so that T_iss⁰ + G is the unhindered start-to-start time of two bursts.
        injection_rate: V/(T_iss⁰ + G) in bytes/ns. rate_margin: 1 − injection_rate/R; below 0 the rate bound is broken.
        issue_ns: T_RS, steady span of the issuing role.
        period_ns: burst start to start. stall_ns: T_RS − T_iss⁰. exposed_ns: Δt, what reaches the compute role.
        uneven_wait_ns: what a producer waits per burst, in the mean, where phases have drifted apart and gaps vary
            (`burst_gap.queue_wait_ns`).
    """

    gap_ns: float
    injection_rate: float
    rate_margin: float
    issue_ns: float
    period_ns: float
    stall_ns: float
    exposed_ns: float
    uneven_wait_ns: float

    @property
    def holds(self) -> bool:
        """The rate bound of equation (10), or (14) for an interleaved period."""
        return self.rate_margin >= 0


@dataclass(frozen=True)
class Audit:
    """Predictions for one design on one platform.

    Attributes:
        design, platform, method: names. producers, bytes_per_producer, burst_bytes: K, B and V, remote bytes only.
        drain_rate: R in bytes/ns. capacity_bytes: Q. issue_floor_ns: T_iss⁰ used.
        schedule: the order as given. interleaved: with Linear-1 tiles between the bursts, None when the design names none.
        peak_outstanding_bytes: [V − R·T_iss⁰]₊. capacity_margin: 1 − that/Q; below 0 the capacity bound is broken.
        binding: `rate` or `capacity`, the bound with the smaller margin.
        action: `reshape` (a bound is broken), `piggyback` (both hold), `refuse` (a completion edge is missing).
        recovery_gap_ns: G*. largest_burst_bytes: Q + R·T_iss⁰, the largest V that the capacity bound admits at this T_iss⁰.
        saturating_producers: K* = R·T_iss⁰/B. sequence_bound: M_ub = b_n·⌈G*/σ⌉ (attention).
        cover_ns: T_cover. completion_coupled_stall_ns: Δt^cc = [V/R + T_lat − T_cover]₊, the counterfactual in which the issuer
            waits for remote completion (attention; T_lat is the platform's fence latency).
        missing_edges: completion edges the design drops. notes: where the design's numbers come from,
            extrapolations, close margins. sentence: the result in words.
    """

    design: str
    platform: str
    method: str
    kind: str
    producers: int
    bytes_per_producer: float
    burst_bytes: float
    drain_rate: float
    capacity_bytes: float
    issue_floor_ns: float
    schedule: Schedule
    interleaved: Schedule | None
    peak_outstanding_bytes: float
    capacity_margin: float
    binding: str
    action: str
    recovery_gap_ns: float
    largest_burst_bytes: float
    saturating_producers: float
    cover_ns: float
    sequence_bound: int | None
    completion_coupled_stall_ns: float | None
    missing_edges: tuple[str, ...]
    notes: tuple[str, ...]
    sentence: str

    @property
    def rate_margin(self) -> float:
        """1 − V/(T_iss⁰ + G)/R of the order as given."""
        return self.schedule.rate_margin

    @property
    def holds(self) -> bool:
        """Both bounds of equation (10)."""
        return self.schedule.holds and self.capacity_margin >= 0

    def to_json(self) -> dict[str, Any]:
        """Plain types only; times in ns, sizes in bytes, rates in bytes/ns (= GB/s)."""
        return {**asdict(self), "missing_edges": list(self.missing_edges), "notes": list(self.notes),
                "rate_margin": self.rate_margin, "holds": self.holds, "predicted": True}  # fmt: skip

    def rows(self) -> list[tuple[str, str, str]]:
        """(quantity, value with unit, verdict or remark) for tables that people read."""
        s, i = self.schedule, self.interleaved
        out = [
            ("burst V", f"{_size(self.burst_bytes)}", f"{self.producers} producers × {self.bytes_per_producer / KiB:.1f} KiB"),
            ("rate bound", f"{s.injection_rate:.0f} of {self.drain_rate:.0f} GB/s", _verdict(s.rate_margin)),
            ("capacity bound", f"{_size(self.peak_outstanding_bytes)} of {_size(self.capacity_bytes)}", _verdict(self.capacity_margin)),
            ("gap G", f"{_time(s.gap_ns)}", f"recovery gap G* = {_time(self.recovery_gap_ns)}"),
            ("issue time", f"{_time(s.issue_ns)}", f"unhindered {_time(self.issue_floor_ns)}, stall {_time(s.stall_ns)}"),
            ("stall behind staging", f"{_time(s.exposed_ns)}", f"staging covers {_time(self.cover_ns)}"),
            ("period", f"{_time(s.period_ns)}", ""),
            ("wait if gaps vary", f"{_time(s.uneven_wait_ns)}", "per burst, mean, of producers that do not store together"),
        ]
        if i is not None:
            out += [
                ("interleaved: rate bound", f"{i.injection_rate:.0f} of {self.drain_rate:.0f} GB/s", _verdict(i.rate_margin)),
                ("interleaved: issue time", f"{_time(i.issue_ns)}", f"gap {_time(i.gap_ns)}, stall {_time(i.stall_ns)}"),
                ("interleaved: stall behind staging", f"{_time(i.exposed_ns)}", ""),
                ("interleaved: wait if gaps vary", f"{_time(i.uneven_wait_ns)}", ""),
            ]
        if self.sequence_bound is not None:
            out.append(("sequence bound M_ub", f"{self.sequence_bound} tokens", "the gap suffices from here on"))
        if self.completion_coupled_stall_ns is not None:
            out.append(("stall if it waited", f"{_time(self.completion_coupled_stall_ns)}", "per burst, completion-coupled"))
        out.append(("saturating producers K*", f"{self.saturating_producers:.1f}", "more than this inject faster than the path drains"))
        return out

    def text(self) -> str:
        """A short table in µs, KiB, MiB and GB/s, with the result in words under it."""
        rows = self.rows()
        first, second = (max(len(r[i]) for r in rows) for i in (0, 1))
        lines = [f"{self.design} on {self.platform} ({self.method}), predicted", ""]
        lines += [f"  {a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows]
        lines += ["", f"{self.action}: {self.sentence}"]
        return "\n".join(lines + [f"note: {n}" for n in self.notes])


def audit(design: Design, platform: Platform) -> Audit:
    """Hold a design against a platform (paper, section 4.1; equations 10, 14 and 15).

    Raises:
        XStageError: the platform was not calibrated for the design's store method.
    """
    method = platform.method(design.method)
    volume, per_producer = design.burst_bytes, design.remote_bytes_per_producer
    rate, capacity = float(method.drain_rate(design.producers)), float(method.capacity_bytes(design.producers))
    floor = design.issue_floor_ns if design.issue_floor_ns is not None else float(method.issue_floor_ns(design.producers, per_producer))
    peak = max(volume - rate * floor, 0.0)
    capacity_margin = 1.0 - peak / capacity
    cover = design.cover_ns if design.cover_ns is not None else (design.mainloop if design.staged else 0.0)
    schedule = _schedule(design, 0.0, floor, rate, capacity, cover)
    interleaved = None
    if design.interleave is not None:
        extra = design.interleave.n1 / design.interleave.n2 * design.interleave.mainloop_ns
        # Some bursts are followed by another Linear-2 tile, some by a Linear-1 tile: count on the shorter one.
        shorter = min(cover, design.interleave.mainloop_ns) if design.cover_ns is None else cover
        interleaved = _schedule(design, extra, floor, rate, capacity, shorter)
    recovery = max(volume / rate - floor, 0.0)
    bound, coupled = None, None
    if design.kind == "attention" and design.kv_tile is not None and design.kv_tile_ns is not None:
        bound = design.kv_tile * math.ceil(recovery / design.kv_tile_ns)
        coupled = max(volume / rate + method.latency_ns - cover, 0.0)
    binding = "rate" if schedule.rate_margin <= capacity_margin else "capacity"
    missing = design.missing_edges
    holds = schedule.holds and capacity_margin >= 0
    action = "refuse" if missing else "piggyback" if holds else "reshape"
    largest = capacity + rate * floor
    return Audit(
        design=design.name, platform=platform.name, method=design.method, kind=design.kind, producers=design.producers,
        bytes_per_producer=per_producer, burst_bytes=volume, drain_rate=rate, capacity_bytes=capacity, issue_floor_ns=floor,
        schedule=schedule, interleaved=interleaved, peak_outstanding_bytes=peak, capacity_margin=capacity_margin, binding=binding,
        action=action, recovery_gap_ns=recovery, largest_burst_bytes=largest, saturating_producers=rate * floor / per_producer,
        cover_ns=cover, sequence_bound=bound, completion_coupled_stall_ns=coupled, missing_edges=missing,
        notes=_notes(design, platform, schedule, capacity_margin),
        sentence=_sentence(design, schedule, interleaved, capacity_margin, largest / volume),
    )  # fmt: skip


def designs() -> list[str]:
    """Names of the designs that ship with the package."""
    folder = resources.files("xstage") / "data" / "designs"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_design(source: str | os.PathLike[str]) -> Design:
    """Load a design by shipped name (`designs()`) or from a TOML file whose keys are the fields of `Design`.

    Raises:
        XStageError: no such name or file, not TOML, an unknown key, or a value outside its range.
    """
    text = os.fspath(source)
    shipped = resources.files("xstage") / "data" / "designs" / f"{text}.toml"
    if os.sep not in text and not text.endswith(".toml") and shipped.is_file():
        content = shipped.read_text(encoding="utf-8")
    else:
        try:
            content = Path(text).read_text(encoding="utf-8")
        except IsADirectoryError:
            raise XStageError(f"design: {text} is a directory, a design file is needed") from None
        except FileNotFoundError:
            raise XStageError(f"design: {text!r} is neither a file nor one of the shipped designs: {', '.join(designs())}") from None
        except (OSError, ValueError) as error:
            raise XStageError(f"design: {text[:200]} cannot be read: {error.strerror if isinstance(error, OSError) else error}") from None
    try:
        data = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise XStageError(f"{text}: not TOML: {error}") from None
    if "interleave" in data:
        data["interleave"] = _build(Interleave, data["interleave"], f"{text}: interleave")
    if not isinstance(data.get("completion_edges", []), list):
        raise XStageError(f"{text}: completion_edges must be a list of names")
    design: Design = _build(Design, data, text)
    return design


# ---- parts ------------------------------------------------------------------------------------------------------------------


def _schedule(design: Design, extra_ns: float, floor: float, rate: float, capacity: float, cover: float) -> Schedule:
    """`extra_ns` is the interleaved work per burst, n1/n2·T_L1: equation (14) for an owner that issues, its staged form otherwise."""
    volume = design.burst_bytes
    if design.staged:
        own_gap = design.gap_ns or 0.0
        natural = max(floor + own_gap, design.mainloop + extra_ns)
    else:
        own_gap = (design.mainloop if design.gap_ns is None else design.gap_ns) + extra_ns
        natural = floor + own_gap
    unhindered = max(floor, (volume - capacity) / rate)
    held = volume / rate > natural
    issue = max(unhindered, volume / rate - own_gap) if held else unhindered
    # A wait for capacity (a long issue) eats into the staged role's idle time first, so the period grows only past the natural one.
    period = max(issue + own_gap, design.mainloop + extra_ns if design.staged else 0.0)
    stall = issue - floor
    exposed = max((stall if design.kind == "attention" else issue) - cover, 0.0)
    uneven = float(queue_wait_ns(natural, volume / rate, design.producers))
    return Schedule(natural - floor, volume / natural, 1.0 - volume / natural / rate, issue, period, stall, exposed, uneven)


def _notes(design: Design, platform: Platform, schedule: Schedule, capacity_margin: float) -> tuple[str, ...]:
    notes = [design.note] if design.note else []
    notes += platform.method(design.method).extrapolated(design.producers, design.remote_bytes_per_producer)
    for name, margin in (("rate", schedule.rate_margin), ("capacity", capacity_margin)):
        if abs(margin) < _CLOSE:
            notes.append(f"the {name} bound is within {_CLOSE:.0%}: the error of the model may decide it")
    if platform.failed_gates:
        notes.append(f"platform {platform.name} failed quality gates: {', '.join(g.name for g in platform.failed_gates)}")
    return tuple(notes)


def _sentence(design: Design, schedule: Schedule, mixed: Schedule | None, capacity_margin: float, fit: float) -> str:
    if design.missing_edges:
        return (
            f"the design drops {', '.join(design.missing_edges)}, which {design.method} stores need: {EDGES[design.missing_edges[0]]}; "
            "an issued store is not a visible one."
        )
    if schedule.holds and capacity_margin >= 0:
        return (
            f"both bounds hold, so the issuing role can send its tile in {_time(schedule.issue_ns)} and go on; "
            f"the path drains during the {_time(schedule.gap_ns)} that follow."
        )
    said = []
    if not schedule.holds:
        said.append(f"bursts follow each other faster than the path drains, so each waits {_time(schedule.stall_ns)}")
        if mixed is not None and mixed.holds:
            said.append(f"interleaving the Linear-1 tiles is enough (gap {_time(mixed.gap_ns)})")
        elif mixed is not None:
            said.append("interleaving the Linear-1 tiles is not enough, the burst must shrink too")
        else:
            said.append("put work between the bursts or send less at once")
    if capacity_margin < 0:
        said.append(
            f"one aligned burst does not fit the path: let at most {fit:.0%} of it leave at once, or spread its producers over time"
        )
    return "; ".join(said) + "."


def _build(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise XStageError(f"{where}: a table is needed, got {type(data).__name__}")
    known = {f.name for f in fields(kind)}
    for key in data:
        if key not in known:
            raise XStageError(f"{where}: unknown key {key!r}, known are {', '.join(sorted(known))}")
    try:
        return kind(**data)
    except TypeError as error:
        raise XStageError(f"{where}: {str(error).split('__init__() ')[-1]}") from None
    except XStageError as error:
        raise XStageError(f"{where}: {error}") from None


def _check(name: str, value: Any, low: float, strict: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < low or (strict and value == low):
        raise XStageError(f"{name}: {value!r} must be a finite number {'above' if strict else 'of at least'} {low:g}")


def _verdict(margin: float) -> str:
    return f"holds, {margin:.1%} to spare" if margin >= 0 else f"broken by {-margin:.1%}"


def _time(ns: float) -> str:
    return f"{ns / 1e3:.2f} µs"


def _size(size: float) -> str:
    return f"{size / MiB:.2f} MiB" if size >= MiB else f"{size / KiB:.1f} KiB"
