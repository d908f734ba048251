"""What a pair of GPUs does with remote stores: issue floor T_iss⁰(K, B), drain rate R(K), capacity Q(K) per store method.

A `Platform` is a JSON file: tables, the raw samples they were fitted from, the quality gates, and a fingerprint of the machine.
Files ship with the package (`gallery()`); `load_platform` takes a gallery name or a path. Nothing here imports torch.

Units: bytes and nanoseconds, so a rate in bytes/ns reads as GB/s.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage.errors import XStageError
from xstage.samples import Sample

SCHEMA = 1
KiB, MiB = 1024, 1024**2
METHODS = ("st_global", "bulk")
TABLES = (*METHODS, "st_global_source_free")
_HIGHEST_RATE = 100_000.0  # bytes/ns; a rate given in bytes/s is far above


@dataclass(frozen=True)
class StoreMethod:
    """The X-Stage of one store method. Tables are sorted by producers K and by bytes per producer B.

    Attributes:
        name: which sender-visible time the tables hold. `st_global`: 16-byte stores by all threads, until they are issued.
            `st_global_source_free`: the same stores, until they have left registers and the SM's load/store queue, so that
            other memory instructions of that SM get through. `bulk`: bulk copies from shared memory by one thread, until the
            shared memory may be written again.
        rate_producers, rate: R(K) in bytes/ns.
        capacity_producers, capacity: Q(K) in bytes, from the knee of isolated bursts.
        capacity_by_fence: Q(K) in bytes from the drain time seen by a fence, NaN where not measured.
        knee_low, knee_high: bytes per producer between which issue time leaves its floor; NaN where no knee was seen.
        floor_producers, floor_bytes, floor: T_iss⁰(K, B) in ns, `floor[i][j]` for `floor_producers[i]`, `floor_bytes[j]`.
        latency_ns: time until a fence of an almost empty path returns.
    """

    name: str
    rate_producers: tuple[float, ...]
    rate: tuple[float, ...]
    capacity_producers: tuple[float, ...]
    capacity: tuple[float, ...]
    floor_producers: tuple[float, ...]
    floor_bytes: tuple[float, ...]
    floor: tuple[tuple[float, ...], ...]
    latency_ns: float = 0.0
    capacity_by_fence: tuple[float, ...] = ()
    knee_low: tuple[float, ...] = ()
    knee_high: tuple[float, ...] = ()

    def drain_rate(self, producers: ArrayLike) -> NDArray[np.float64]:
        """R(K) in bytes/ns: linear between measured K, proportional to K below the first, constant above the last."""
        return _by_producers(producers, self.rate_producers, self.rate)

    def capacity_bytes(self, producers: ArrayLike) -> NDArray[np.float64]:
        """Q(K) in bytes: linear between measured K, proportional to K below the first, constant above the last."""
        return _by_producers(producers, self.capacity_producers, self.capacity)

    def issue_floor_ns(self, producers: ArrayLike, bytes_per_producer: ArrayLike) -> NDArray[np.float64]:
        """T_iss⁰(K, B) in ns: bilinear in the table; beyond its last B the last slope goes on; beyond its K the edge holds.

        A table with one B is proportional to B.
        """
        k, b = np.broadcast_arrays(np.asarray(producers, float), np.asarray(bytes_per_producer, float))
        table = np.asarray(self.floor)
        per_row = np.stack([_line(b, self.floor_bytes, row) for row in table])
        axis = np.asarray(self.floor_producers)
        if len(axis) == 1:
            return np.asarray(per_row[0])
        spot = np.clip(np.interp(k, axis, np.arange(len(axis))), 0, len(axis) - 1)
        low = np.minimum(spot.astype(int), len(axis) - 2)
        share = spot - low
        below = np.take_along_axis(per_row, low[None, ...], 0)[0]
        above = np.take_along_axis(per_row, low[None, ...] + 1, 0)[0]
        return np.asarray(below * (1 - share) + above * share)

    def extrapolated(self, producers: ArrayLike, bytes_per_producer: ArrayLike) -> list[str]:
        """What is outside the measured range, as short sentences; empty when everything is inside."""
        notes = []
        k, b = np.asarray(producers, float), np.asarray(bytes_per_producer, float)
        for name, value, low, high in (
            ("producers", k, min(self.capacity_producers), max(self.capacity_producers)),
            ("bytes_per_producer", b, min(self.floor_bytes), max(self.floor_bytes)),
        ):
            if np.any(value < low) or np.any(value > high):
                shown = f"{value.flat[0]:g}" if value.size == 1 else f"{value.min():g} … {value.max():g}"
                span = f"{low:g}" if low == high else f"{low:g} … {high:g}"
                notes.append(f"{name} = {shown} is outside what was measured for {self.name} ({span}): extrapolated")
        return notes


@dataclass(frozen=True)
class Gate:
    """One quality check of a calibration: passed when `value <= limit`."""

    name: str
    value: float
    limit: float
    unit: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.value <= self.limit)  # NaN does not pass


@dataclass(frozen=True)
class Platform:
    """A calibrated (or published) platform.

    Attributes:
        name: for people. origin: `measured` or `published`. sms: multiprocessors per GPU. gpus: ranks that took part.
        methods: by store-method name. gates: quality checks, empty for published platforms.
        residuals: per table, relative errors of the fit at the points it was made from (`calibration.fit.fit_residuals`).
        fingerprint: what the machine was. samples: raw samples of the fit. note: one line on where it comes from.
        created: ISO time. command: what was run.
    """

    name: str
    origin: str
    sms: int
    gpus: int
    methods: dict[str, StoreMethod]
    gates: tuple[Gate, ...] = ()
    residuals: dict[str, dict[str, float]] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    note: str = ""
    created: str = ""
    command: str = ""

    def method(self, name: str = "st_global") -> StoreMethod:
        """The named store method.

        Raises:
            XStageError: the platform has no such method.
        """
        if name not in self.methods:
            raise XStageError(f"method: {name!r} is not in platform {self.name!r}, which has {', '.join(sorted(self.methods))}")
        return self.methods[name]

    @property
    def failed_gates(self) -> tuple[Gate, ...]:
        return tuple(g for g in self.gates if not g.passed)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, whole or not at all.

        Raises:
            XStageError: the path is a directory or cannot be written.
        """
        target = Path(path)
        check_writable(target)
        part = target.with_name(target.name + ".part")
        try:
            part.write_text(_dump(self), encoding="utf-8")
            part.replace(target)
        except OSError as error:  # disk full, read-only file system
            raise XStageError(f"out: {target} cannot be written: {error.strerror}") from None
        return target


def check_writable(path: str | os.PathLike[str], name: str = "out") -> None:
    """Raise XStageError, naming the argument, when a file cannot be written at `path`."""
    target = Path(path)
    if target.is_dir():
        raise XStageError(f"{name}: {target} is a directory, a file name is needed")
    folder = target.parent
    if not folder.is_dir():
        raise XStageError(f"{name}: {target} cannot be written, {folder} is not a directory")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise XStageError(f"{name}: {target} cannot be written, permission denied")


def gallery() -> list[str]:
    """Names of the platforms that ship with the package."""
    data = resources.files("xstage") / "data"
    return sorted(p.name.removesuffix(".json") for p in data.iterdir() if p.name.endswith(".json"))


def load_platform(source: str | os.PathLike[str], *, samples: bool = True) -> Platform:
    """Load a platform by gallery name (`h200-nvlink4`, `paper-8gpu`) or from a file.

    Args:
        source: gallery name or path. samples: False leaves the raw samples out, which are most of a file.

    Raises:
        XStageError: no such name or file, or its content is not a platform (the message names the field).
    """
    text = os.fspath(source)
    if os.sep not in text and not text.endswith(".json"):
        shipped = resources.files("xstage") / "data" / f"{text}.json"
        if shipped.is_file():
            return _parse(shipped.read_text(encoding="utf-8"), text, samples)
    path = Path(text)
    try:
        content = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise XStageError(f"platform: {text} is a directory, a platform file is needed") from None
    except FileNotFoundError:
        raise XStageError(f"platform: {text!r} is neither a file nor one of the shipped platforms: {', '.join(gallery())}") from None
    except (OSError, ValueError) as error:
        raise XStageError(f"platform: {text[:200]} cannot be read: {error.strerror if isinstance(error, OSError) else error}") from None
    return _parse(content, text, samples)


# ---- the file ---------------------------------------------------------------------------------------------------------------


_SAMPLES_START = ',\n "samples": [\n'


def _parse(content: str, where: str, with_samples: bool) -> Platform:
    if not with_samples and _SAMPLES_START in content:  # as `_dump` writes them: last, from a line of their own on
        content = content[: content.index(_SAMPLES_START)] + "\n}"
    try:
        data = json.loads(content)
    except json.JSONDecodeError as error:
        raise XStageError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != "xstage-platform":
        raise XStageError(f'{where}: not a platform file (no "kind": "xstage-platform")')
    schema = data.get("schema")
    if schema != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        raise XStageError(f"{where}: schema {schema!r} is {'newer than' if newer else 'not'} {SCHEMA}, which this version reads")
    methods = _get(data, "methods", dict, where)
    if not methods:
        raise XStageError(f"{where}: methods is empty")
    for name in methods:
        if name not in TABLES:
            raise XStageError(f"{where}: methods.{name} is unknown, known are {', '.join(TABLES)}")
    origin = _get(data, "origin", str, where)
    if origin not in ("measured", "published"):
        raise XStageError(f"{where}: origin is {origin!r}, must be 'measured' or 'published'")
    gates = tuple(_gate(g, f"{where}: gates[{i}]") for i, g in enumerate(_get(data, "gates", list, where)))
    raw = _get(data, "samples", list, where) if with_samples and "samples" in data else []
    samples = tuple(Sample.from_json(s, f"{where}: samples[{i}]") for i, s in enumerate(raw))
    texts = {key: _get(data, key, str, where) if key in data else "" for key in ("note", "created", "command")}
    return Platform(
        name=_get(data, "name", str, where),
        origin=origin,
        sms=int(_positive(_get(data, "sms", int, where), f"{where}: sms")),
        gpus=int(_positive(_get(data, "gpus", int, where), f"{where}: gpus")),
        methods={name: _method(name, m, f"{where}: methods.{name}") for name, m in methods.items()},
        gates=gates,
        residuals=_get(data, "residuals", dict, where) if "residuals" in data else {},
        fingerprint=_get(data, "fingerprint", dict, where),
        samples=samples,
        **texts,
    )


def _method(name: str, data: Any, where: str) -> StoreMethod:
    if not isinstance(data, dict):
        raise XStageError(f"{where}: expected an object")
    rate, cap, floor = (_get(data, part, dict, where) for part in ("drain_rate", "capacity", "issue_floor"))
    rate_k = _numbers(rate, "producers", f"{where}.drain_rate")
    rates = _numbers(rate, "bytes_per_ns", f"{where}.drain_rate", len(rate_k))
    if max(rates) > _HIGHEST_RATE:
        raise XStageError(
            f"{where}.drain_rate.bytes_per_ns: {max(rates):g} is above {_HIGHEST_RATE:g} bytes/ns; is it in bytes/s? (1 GB/s = 1 byte/ns)"
        )
    cap_k = _numbers(cap, "producers", f"{where}.capacity")
    floor_k = _numbers(floor, "producers", f"{where}.issue_floor")
    floor_b = _numbers(floor, "bytes_per_producer", f"{where}.issue_floor")
    rows = _get(floor, "ns", list, f"{where}.issue_floor")
    if len(rows) != len(floor_k):
        raise XStageError(f"{where}.issue_floor.ns: {len(rows)} rows for {len(floor_k)} producers")
    table = tuple(_numbers({"ns": row}, "ns", f"{where}.issue_floor.ns[{i}]", len(floor_b), rising=False) for i, row in enumerate(rows))
    for axis, label in ((rate_k, "drain_rate"), (cap_k, "capacity"), (floor_k, "issue_floor")):
        if list(axis) != sorted(set(axis)):
            raise XStageError(f"{where}.{label}.producers: must rise, got {list(axis)}")
    if list(floor_b) != sorted(set(floor_b)):
        raise XStageError(f"{where}.issue_floor.bytes_per_producer: must rise, got {list(floor_b)}")
    latency = data.get("latency_ns", 0.0)
    if not isinstance(latency, int | float) or not 0 <= latency < math.inf:
        raise XStageError(f"{where}.latency_ns: {latency!r} is not a time ≥ 0")

    def optional(key: str) -> tuple[float, ...]:
        values = _get(cap, key, list, f"{where}.capacity") if key in cap else []
        if values and len(values) != len(cap_k):
            raise XStageError(f"{where}.capacity.{key}: {len(values)} values for {len(cap_k)} producers")
        return tuple(math.nan if v is None else float(_positive(v, f"{where}.capacity.{key}[{i}]")) for i, v in enumerate(values))

    return StoreMethod(
        name, rate_k, rates, cap_k, _numbers(cap, "bytes", f"{where}.capacity", len(cap_k)), floor_k, floor_b, table, float(latency),
        optional("bytes_by_fence"), optional("knee_low"), optional("knee_high"),
    )  # fmt: skip


def _gate(data: Any, where: str) -> Gate:
    if not isinstance(data, dict):
        raise XStageError(f"{where}: expected an object")
    value = None if data.get("value") is None else _get(data, "value", (int, float), where)
    texts = [_get(data, key, str, where) if key in data else "" for key in ("unit", "detail")]
    return Gate(
        _get(data, "name", str, where),
        math.nan if value is None else float(value),
        float(_get(data, "limit", (int, float), where)),
        *texts,
    )


def _get(data: dict[str, Any], key: str, kind: Any, where: str) -> Any:
    if key not in data:
        raise XStageError(f"{where}: field {key!r} is missing")
    value = data[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise XStageError(f"{where}: field {key!r} has the wrong type: {type(value).__name__}")
    return value


def _positive(value: float, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise XStageError(f"{where}: {value!r} must be a finite number above 0")
    return value


def _numbers(data: dict[str, Any], key: str, where: str, length: int | None = None, rising: bool = False) -> tuple[float, ...]:
    values = _get(data, key, list, where)
    if not values or (length is not None and len(values) != length):
        raise XStageError(f"{where}.{key}: {len(values)} values, {length if length else 'at least 1'} expected")
    return tuple(float(_positive(v, f"{where}.{key}[{i}]")) for i, v in enumerate(values))


def _dump(platform: Platform) -> str:
    def plain(values: Sequence[float], digits: int) -> list[float | None]:
        return [None if math.isnan(v) else round(v, digits) for v in values]

    methods = {
        m.name: {
            "drain_rate": {"producers": list(m.rate_producers), "bytes_per_ns": plain(m.rate, 3)},
            "capacity": {
                "producers": list(m.capacity_producers),
                "bytes": plain(m.capacity, 0),
                "bytes_by_fence": plain(m.capacity_by_fence, 0),
                "knee_low": plain(m.knee_low, 0),
                "knee_high": plain(m.knee_high, 0),
            },
            "issue_floor": {
                "producers": list(m.floor_producers),
                "bytes_per_producer": list(m.floor_bytes),
                "ns": [plain(row, 2) for row in m.floor],
            },
            "latency_ns": round(m.latency_ns, 1),
        }
        for m in platform.methods.values()
    }
    head = {
        "kind": "xstage-platform",
        "schema": SCHEMA,
        "name": platform.name,
        "origin": platform.origin,
        "note": platform.note,
        "created": platform.created,
        "command": platform.command,
        "sms": platform.sms,
        "gpus": platform.gpus,
        "methods": methods,
        "gates": [
            {
                "name": g.name, "value": None if math.isnan(g.value) else round(g.value, 5), "limit": g.limit, "unit": g.unit,
                "passed": g.passed, "detail": g.detail,
            }
            for g in platform.gates
        ],
        "residuals": platform.residuals,
        "fingerprint": platform.fingerprint,
    }  # fmt: skip
    body = json.dumps(head, indent=1, ensure_ascii=False)
    lines = ",\n  ".join(json.dumps(s.to_json(), separators=(",", ":")) for s in platform.samples)
    return body[:-2] + _SAMPLES_START + "  " + lines + "\n ]\n}\n" if platform.samples else body + "\n"


def _by_producers(producers: ArrayLike, axis: Sequence[float], values: Sequence[float]) -> NDArray[np.float64]:
    k = np.asarray(producers, float)
    return np.asarray(np.interp(k, axis, values) * np.minimum(k / axis[0], 1.0))


def _line(x: NDArray[np.float64], axis: Sequence[float], values: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(axis) == 1:
        return np.asarray(x / axis[0] * values[0])
    y = np.interp(x, axis, values)
    slope = max((values[-1] - values[-2]) / (axis[-1] - axis[-2]), 0.0)
    return np.asarray(y + slope * np.maximum(x - axis[-1], 0.0))
