"""Raw samples of a calibration: one `Sample` is one launch of the burst kernel on one rank.

Lists hold one entry per burst, each the mean over that burst's producers unless the name says otherwise, so that a file stays
small and every fit can be made again from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from xstage.errors import XStageError

MODES = ("isolated", "aligned", "free")
DESTINATIONS = ("peer", "local")
ROLES = ("fit", "held_out")
_LISTS = ("issue_ns", "issue_max_ns", "post_ns", "visible_ns", "gap_seen_ns", "skew_ns")
_NOT_NEGATIVE = ("rank", "gap_ns", "window_ns", "window_bytes", "window_bursts", "sm_clock_ghz")
_LEAST = {"producers": 1, "bytes_per_producer": 1, "fan_out": 1, **dict.fromkeys(_NOT_NEGATIVE, 0)}


@dataclass(frozen=True)
class Sample:
    """One launch of the burst kernel.

    Attributes:
        method: store method, `st_global` or `bulk`.
        mode: `isolated` (aligned bursts, each from an empty path), `aligned` (bursts that start together after a gap),
            `free` (each producer waits its own gap: phases drift).
        destination: `peer`, or `local` for the control.
        fan_out: number of peers that the producers write to.
        loaded: True when the reverse direction carried the same traffic at the same time.
        role: `fit` or `held_out` (`ROLES`).
        producers: K. bytes_per_producer: B. gap_ns: the gap asked for.
        rank: the rank that measured.
        issue_ns: sender-visible issue time T_iss. For `bulk` until the source may be reused.
        issue_max_ns: the slowest producer's.
        post_ns: `bulk` only: time until the copies were handed over (before the source is free).
        left_ns: `st_global`, isolated bursts only: time until the stores had left registers and the SM's load/store queue.
        visible_ns: until the slowest producer's system fence returned (isolated bursts only).
        gap_seen_ns: the gap that really passed before each burst.
        skew_ns: last start minus first start among the producers of a burst.
        window_ns: length of the window in which every producer was active; window_bytes: what was issued in it.
        window_bursts: bursts per producer in that window (mean).
        sm_clock_ghz: clock64 ticks per nanosecond of %globaltimer.
    """

    method: str
    mode: str
    destination: str
    producers: int
    bytes_per_producer: int
    gap_ns: float
    rank: int
    fan_out: int = 1
    loaded: bool = False
    role: str = "fit"
    issue_ns: list[float] = field(default_factory=list)
    issue_max_ns: list[float] = field(default_factory=list)
    post_ns: list[float] = field(default_factory=list)
    left_ns: list[float] = field(default_factory=list)
    visible_ns: list[float] = field(default_factory=list)
    gap_seen_ns: list[float] = field(default_factory=list)
    skew_ns: list[float] = field(default_factory=list)
    window_ns: float = 0.0
    window_bytes: float = 0.0
    window_bursts: float = 0.0
    sm_clock_ghz: float = 0.0

    @property
    def burst_bytes(self) -> int:
        """V = K·B."""
        return self.producers * self.bytes_per_producer

    @property
    def rate(self) -> float:
        """Bytes per nanosecond (GB/s) over the window in which every producer was active."""
        return self.window_bytes / self.window_ns if self.window_ns > 0 else 0.0

    @property
    def period_ns(self) -> float:
        """Mean burst start-to-start time in that window."""
        return self.window_ns / self.window_bursts if self.window_bursts > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults; nanoseconds rounded to what the clocks can tell."""
        return {k: _round(v) for k, v in asdict(self).items() if k in _ALWAYS or v != _BLANK[k]}

    @staticmethod
    def from_json(entry: Any, where: str = "samples") -> Sample:
        if not isinstance(entry, dict):
            raise XStageError(f"{where}: expected an object, got {type(entry).__name__}")
        known = {f.name for f in fields(Sample)}
        unknown = sorted(set(entry) - known)
        if unknown:
            raise XStageError(f"{where}: unknown field {unknown[0]!r}")
        try:
            sample = Sample(**entry)
        except TypeError as error:
            raise XStageError(f"{where}: {str(error).split('__init__() ')[-1]}") from None
        _check(sample, where)
        return sample


_BLANK = asdict(Sample("", "", "", 0, 0, 0.0, 0))
_ALWAYS = ("method", "mode", "destination", "producers", "bytes_per_producer", "gap_ns", "rank")


def select(samples: Iterable[Sample], **wanted: object) -> list[Sample]:
    """The samples whose attributes equal all of `wanted`."""
    return [s for s in samples if all(getattr(s, name) == value for name, value in wanted.items())]


def of_table(samples: Iterable[Sample], table: str) -> list[Sample]:
    """The samples that a table of a platform is fitted from, `issue_ns` being the time that the table is about.

    `st_global_source_free` has its times in isolated bursts of `st_global` only; other modes stand for the drain rate.
    """
    if table != "st_global_source_free":
        return [s for s in samples if s.method == table]
    return [replace(s, method=table, issue_ns=s.left_ns) for s in samples if s.method == "st_global"]


def append(path: Path, samples: Sequence[Sample]) -> None:
    """Add samples to a JSON-lines file at once, so that a run that dies keeps what it took."""
    with path.open("a", encoding="utf-8") as out:
        for sample in samples:
            out.write(json.dumps(sample.to_json(), separators=(",", ":")) + "\n")


def read(path: Path) -> Iterator[Sample]:
    """Samples of a JSON-lines file written by `append`."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise XStageError(f"{path}:{number}: not JSON: {error}") from None
        yield Sample.from_json(entry, f"{path}:{number}")


def _check(sample: Sample, where: str) -> None:
    """Refuse what a fit would trip over later: unknown modes, values that are no finite numbers, sizes below their least."""
    for name, known in (("mode", MODES), ("destination", DESTINATIONS), ("role", ROLES)):
        if getattr(sample, name) not in known:
            raise XStageError(f"{where}: {name} {getattr(sample, name)!r} is unknown, known are {', '.join(known)}")
    if not isinstance(sample.method, str) or not isinstance(sample.loaded, bool):
        raise XStageError(f"{where}: method must be a text and loaded true or false")
    for name, least in _LEAST.items():
        value = getattr(sample, name)
        if not _finite(value) or value < least:
            raise XStageError(f"{where}: {name} {value!r} must be a finite number of at least {least}")
    for name in _LISTS:
        values = getattr(sample, name)
        if not isinstance(values, list) or not all(map(_finite, values)):
            raise XStageError(f"{where}: {name} must be a list of finite numbers")


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list):
        return [round(v, 1) if abs(v) < 1000 else round(v) for v in value]
    return value
