"""Platform files: what is read, interpolated, extrapolated and refused, and that saving loses nothing.

Every bad input gives one line that names the field. Not covered: whether shipped numbers are right (they carry their own gates).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xstage.errors import XStageError
from xstage.platform import Gate, KiB, MiB, Platform, StoreMethod, check_writable, gallery, load_platform
from xstage.samples import Sample, append, read, select

GOOD: dict[str, Any] = {
    "kind": "xstage-platform", "schema": 1, "name": "test", "origin": "measured", "note": "n", "created": "c", "command": "x",
    "sms": 132, "gpus": 2,
    "methods": {
        "st_global": {
            "drain_rate": {"producers": [8, 132], "bytes_per_ns": [354, 372]},
            "capacity": {"producers": [8, 132], "bytes": [212992, 3514368], "bytes_by_fence": [None, 3600000], "knee_low": [None, 24576],
                         "knee_high": [None, 28672]},
            "issue_floor": {"producers": [8, 132], "bytes_per_producer": [2048, 32768], "ns": [[80, 400], [100, 500]]},
            "latency_ns": 1700.0,
        }
    },
    "gates": [{"name": "g", "value": 0.01, "limit": 0.05, "unit": "", "passed": True, "detail": "d"}],
    "fingerprint": {"gpu_name": "H200"},
    "samples": [{"method": "st_global", "mode": "isolated", "destination": "peer", "producers": 132, "bytes_per_producer": 2048,
                 "gap_ns": 0.0,
                 "rank": 0, "issue_ns": [80.5, 81.0]}],
}  # fmt: skip


def written(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "platform.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def changed(where: str, value: Any) -> dict[str, Any]:
    """GOOD with the entry at a dotted path replaced; `...` removes it."""
    data = copy.deepcopy(GOOD)
    *parents, last = [int(p) if p.isdigit() else p for p in where.split(".")]
    node: Any = data
    for p in parents:
        node = node[p]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return data


M = "methods.st_global"
BAD: list[tuple[str, Any, str]] = [
    ("kind", "other", "not a platform file"), ("kind", ..., "not a platform file"),
    ("schema", 2, "schema 2 is newer than 1"), ("schema", 0, "schema 0 is not 1"), ("schema", "1", "schema '1' is not 1"),
    ("schema", ..., "schema None"),
    ("name", ..., "field 'name' is missing"), ("name", 3, "field 'name' has the wrong type: int"),
    ("origin", "guessed", "origin is 'guessed'"),
    ("sms", ..., "field 'sms' is missing"), ("sms", 0, "sms: 0 must be"), ("sms", -1, "sms: -1"), ("sms", 1.5, "'sms' has the wrong type"),
    ("sms", True, "'sms' has the wrong type: bool"), ("gpus", "2", "'gpus' has the wrong type: str"),
    ("gates", ..., "field 'gates' is missing"),
    ("gates", {}, "'gates' has the wrong type"), ("fingerprint", ..., "field 'fingerprint' is missing"),
    ("fingerprint", [], "'fingerprint' has the wrong"),
    ("note", 5, "note"), ("created", [], "created"), ("command", {}, "command"),
    ("methods", ..., "field 'methods' is missing"), ("methods", {}, "methods is empty"), ("methods", [], "'methods' has the wrong type"),
    ("methods", {"tma": {}}, "methods.tma is unknown, known are st_global, bulk"), (M, [], "expected an object"),
    (f"{M}.drain_rate", ..., "field 'drain_rate' is missing"), (f"{M}.capacity", ..., "field 'capacity' is missing"),
    (f"{M}.issue_floor", ..., "field 'issue_floor' is missing"), (f"{M}.drain_rate.producers", ..., "field 'producers' is missing"),
    (f"{M}.drain_rate.bytes_per_ns", ..., "field 'bytes_per_ns' is missing"), (f"{M}.capacity.bytes", ..., "field 'bytes' is missing"),
    (f"{M}.issue_floor.ns", ..., "field 'ns' is missing"),
    (f"{M}.drain_rate.bytes_per_ns", [354, math.nan], "bytes_per_ns[1]: nan must be a finite number above 0"),
    (f"{M}.drain_rate.bytes_per_ns", [354, math.inf], "bytes_per_ns[1]: inf"),
    (f"{M}.drain_rate.bytes_per_ns", [0, 372], "bytes_per_ns[0]: 0"),
    (f"{M}.drain_rate.bytes_per_ns", [-1, 372], "bytes_per_ns[0]: -1"),
    (f"{M}.drain_rate.bytes_per_ns", ["a", 372], "bytes_per_ns[0]: 'a'"),
    (f"{M}.drain_rate.bytes_per_ns", [True, 372], "bytes_per_ns[0]: True"),
    (f"{M}.drain_rate.bytes_per_ns", [None, 372], "bytes_per_ns[0]: None"),
    (f"{M}.drain_rate.bytes_per_ns", [372e9, 372e9], "is it in bytes/s?"), (f"{M}.drain_rate.bytes_per_ns", [372], "1 values, 2 expected"),
    (f"{M}.drain_rate.producers", [], "0 values, at least 1 expected"),
    (f"{M}.drain_rate.producers", [132, 8], "drain_rate.producers: must rise"),
    (f"{M}.drain_rate.producers", [8, 8], "drain_rate.producers: must rise"),
    (f"{M}.capacity.producers", [132, 8], "capacity.producers: must rise"),
    (f"{M}.capacity.bytes", [212992, 0], "capacity.bytes[1]: 0"), (f"{M}.capacity.bytes", "big", "'bytes' has the wrong type: str"),
    (f"{M}.capacity.knee_low", [1], "capacity.knee_low: 1 values for 2 producers"),
    (f"{M}.capacity.knee_low", [1, "x"], "capacity.knee_low"),
    (f"{M}.capacity.knee_high", 5, "field 'knee_high' has the wrong type"),
    (f"{M}.capacity.bytes_by_fence", [-5, 1], "capacity.bytes_by_fence"),
    (f"{M}.issue_floor.producers", [132, 8], "issue_floor.producers: must rise"),
    (f"{M}.issue_floor.producers", [8], "2 rows for 1 producers"),
    (f"{M}.issue_floor.bytes_per_producer", [32768, 2048], "bytes_per_producer: must rise"),
    (f"{M}.issue_floor.bytes_per_producer", [-1, 2048], "bytes_per_producer[0]: -1"),
    (f"{M}.issue_floor.ns", [[80, 400], [100]], "issue_floor.ns[1].ns: 1 values, 2 expected"),
    (f"{M}.issue_floor.ns", [[80, 400], 5], "ns[1]"),
    (f"{M}.issue_floor.ns", [[80, -1], [100, 500]], "ns[0].ns[1]: -1"),
    (f"{M}.issue_floor.ns", [[80, math.nan], [1, 2]], "ns[0].ns[1]: nan"),
    (f"{M}.latency_ns", -1, "latency_ns: -1 is not a time"), (f"{M}.latency_ns", math.nan, "latency_ns: nan"),
    (f"{M}.latency_ns", "x", "latency_ns: 'x'"),
    ("gates.0", 5, "gates[0]: expected an object"), ("gates.0.name", ..., "gates[0]: field 'name' is missing"),
    ("gates.0.limit", ..., "gates[0]: field 'limit' is missing"), ("gates.0.limit", "x", "gates[0]: field 'limit' has the wrong type"),
    ("gates.0.value", "x", "gates[0]: field 'value' has the wrong type"), ("samples", {}, "samples"), ("samples", None, "samples"),
    ("samples.0", 5, "samples[0]: expected an object, got int"), ("samples.0.speed", 1, "samples[0]: unknown field 'speed'"),
    ("samples.0.method", ..., "samples[0]: "), ("samples.0.mode", "lonely", "samples[0]: mode 'lonely'"),
    ("samples.0.destination", "moon", "samples[0]: destination 'moon'"), ("samples.0.producers", 0, "samples[0]: producers"),
    ("samples.0.producers", "many", "samples[0]: producers"), ("samples.0.bytes_per_producer", -4, "samples[0]: bytes_per_producer"),
    ("samples.0.gap_ns", math.nan, "samples[0]: gap_ns"), ("samples.0.issue_ns", "abc", "samples[0]: issue_ns"),
    ("samples.0.issue_ns", [1, "x"], "samples[0]: issue_ns"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value", "message"), BAD, ids=[f"{w}={v!r}"[:70] for w, v, _ in BAD])
def test_bad_files(tmp_path: Path, where: str, value: Any, message: str) -> None:
    path = written(tmp_path, changed(where, value))
    with pytest.raises(XStageError) as error:
        load_platform(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", "3", '"text"', "not json at all"])
def test_not_a_platform(tmp_path: Path, content: str) -> None:
    with pytest.raises(XStageError, match=r"not JSON|not a platform file"):
        load_platform(written(tmp_path, content))


def test_unreadable_sources(tmp_path: Path) -> None:
    with pytest.raises(XStageError, match="is a directory, a platform file is needed"):
        load_platform(tmp_path)
    with pytest.raises(XStageError, match=r"'nowhere' is neither a file nor one of the shipped platforms: .*paper-8gpu"):
        load_platform("nowhere")
    with pytest.raises(XStageError, match="neither a file"):
        load_platform(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(XStageError, match="cannot be read"):
        load_platform(tmp_path / "binary.json")
    with pytest.raises(XStageError, match="platform: "):
        load_platform("x" * 5000 + ".json")


def test_the_good_file_loads(tmp_path: Path) -> None:
    platform = load_platform(written(tmp_path, GOOD))
    method = platform.method()
    assert (platform.name, platform.origin, platform.sms, platform.gpus) == ("test", "measured", 132, 2)
    assert method.rate == (354, 372)
    assert math.isnan(method.knee_low[0])
    assert method.knee_high[1] == 28672
    assert platform.gates[0].passed
    assert platform.samples[0].issue_ns == [80.5, 81.0]


def test_round_trip(tmp_path: Path, measured: Platform, paper: Platform) -> None:
    for number, platform in enumerate((measured, paper, load_platform(written(tmp_path, GOOD)))):
        first = platform.save(tmp_path / f"{number}-a.json")
        again = load_platform(first)
        second = again.save(tmp_path / f"{number}-b.json")
        assert load_platform(second).save(tmp_path / f"{number}-c.json").read_bytes() == second.read_bytes()
        assert again.samples == platform.samples
        assert again.gates == platform.gates
        assert again.fingerprint == platform.fingerprint
        for field in ("name", "origin", "sms", "gpus", "note", "created", "command"):
            assert getattr(again, field) == getattr(platform, field)
        for name, method in platform.methods.items():
            for field in StoreMethod.__dataclass_fields__:
                np.testing.assert_array_equal(getattr(again.methods[name], field), getattr(method, field), err_msg=field)


def test_saved_files_are_strict_json(tmp_path: Path) -> None:
    """NaN is written as null: other readers of the file must not choke on it."""
    path = load_platform(written(tmp_path, changed("gates.0.value", None))).save(tmp_path / "out.json")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert data["gates"][0]["value"] is None
    assert data["gates"][0]["passed"] is False
    assert not list(tmp_path.glob("*.part"))


def test_unwritable_paths(tmp_path: Path, paper: Platform) -> None:
    with pytest.raises(XStageError, match=r"out: .* is a directory, a file name is needed"):
        paper.save(tmp_path)
    with pytest.raises(XStageError, match="is not a directory"):
        paper.save(tmp_path / "missing" / "p.json")
    (tmp_path / "file").write_text("x")
    with pytest.raises(XStageError, match="is not a directory"):
        paper.save(tmp_path / "file" / "p.json")
    with pytest.raises(XStageError, match="report: "):
        check_writable(tmp_path, "report")


def test_permission_denied(tmp_path: Path, paper: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(XStageError, match="permission denied"):
        paper.save(tmp_path / "p.json")


def method(**changes: Any) -> StoreMethod:
    base: dict[str, Any] = {
        "name": "st_global", "rate_producers": (8.0, 16.0, 132.0), "rate": (350.0, 360.0, 370.0), "capacity_producers": (16.0, 132.0),
        "capacity": (400_000.0, 3_400_000.0), "floor_producers": (16.0, 132.0), "floor_bytes": (2048.0, 8192.0, 32768.0),
        "floor": ((80.0, 100.0, 400.0), (90.0, 120.0, 480.0)),
    }  # fmt: skip
    return StoreMethod(**{**base, **changes})


def test_interpolation_values() -> None:
    m = method()
    np.testing.assert_allclose(m.drain_rate([8, 12, 16, 74, 132, 500]), [350, 355, 360, 365, 370, 370])
    np.testing.assert_allclose(m.drain_rate([4, 1]), [175, 43.75])  # one producer cannot use a path that eight just fill
    np.testing.assert_allclose(m.capacity_bytes([8, 16, 74, 132, 200]), [200_000, 400_000, 1_900_000, 3_400_000, 3_400_000])
    np.testing.assert_allclose(m.issue_floor_ns(16, [2048, 5120, 8192, 20480, 32768]), [80, 90, 100, 250, 400])
    np.testing.assert_allclose(m.issue_floor_ns(132, [2048, 32768, 57344]), [90, 480, 840])  # the last slope goes on
    np.testing.assert_allclose(m.issue_floor_ns([1, 16, 74, 132, 500], 8192), [100, 100, 110, 120, 120])
    assert m.issue_floor_ns(74, 5120) == pytest.approx((90 + 105) / 2)  # bilinear
    assert m.issue_floor_ns(74, 1024) == pytest.approx(85)  # below the first size the first value holds
    assert m.issue_floor_ns(np.array([16, 132])[:, None], np.array([2048, 8192, 32768])).shape == (2, 3)


def test_issue_floor_never_falls_beyond_the_table() -> None:
    falling = method(floor=((400.0, 100.0, 80.0), (400.0, 100.0, 80.0)))
    assert falling.issue_floor_ns(132, 1e9) == 80


def test_tables_of_one_entry(paper: Platform) -> None:
    m = paper.method()
    assert m.drain_rate(148) == 717
    assert m.drain_rate(74) == pytest.approx(358.5)
    assert m.capacity_bytes(148) == 4.25 * MiB
    assert m.issue_floor_ns(148, 64 * KiB) == pytest.approx(1520)
    assert m.issue_floor_ns(10, 32 * KiB) == 760


def test_extrapolation_notes(paper: Platform) -> None:
    m = method()
    assert m.extrapolated(132, 8192) == []
    assert m.extrapolated([16, 132], [2048, 32768]) == []
    assert m.extrapolated(8, 8192) == ["producers = 8 is outside what was measured for st_global (16 … 132): extrapolated"]
    assert m.extrapolated(132, 65536) == [
        "bytes_per_producer = 65536 is outside what was measured for st_global (2048 … 32768): extrapolated"
    ]
    assert "producers = 4 … 200" in m.extrapolated([4, 200], 8192)[0]
    assert len(m.extrapolated(4, 1)) == 2
    assert paper.method().extrapolated(148, 32 * KiB) == []
    assert "(148)" in paper.method().extrapolated(132, 32 * KiB)[0]


def test_gates() -> None:
    assert Gate("g", 0.05, 0.05, "").passed
    assert not Gate("g", 0.051, 0.05, "").passed
    assert not Gate("g", math.nan, 0.05, "").passed


def test_failed_gates(measured: Platform) -> None:
    assert [g.name for g in measured.failed_gates] == ["local control flat in the gap"]


def test_gallery_loads() -> None:
    assert "paper-8gpu" in gallery()
    for name in gallery():
        assert load_platform(name).name == name


def test_unknown_method(paper: Platform) -> None:
    with pytest.raises(XStageError, match="method: 'bulk' is not in platform 'paper-8gpu', which has st_global"):
        paper.method("bulk")


def sample(**changes: Any) -> Sample:
    base: dict[str, Any] = {
        "method": "bulk",
        "mode": "free",
        "destination": "peer",
        "producers": 132,
        "bytes_per_producer": 2048,
        "gap_ns": 0.0,
        "rank": 1,
    }
    return Sample(**{**base, **changes})


def test_sample_figures() -> None:
    s = sample(window_ns=2000.0, window_bytes=740_000.0, window_bursts=4.0)
    assert s.burst_bytes == 132 * 2048
    assert s.rate == 370
    assert s.period_ns == 500
    assert sample().rate == 0
    assert sample().period_ns == 0


def test_samples_append_and_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    some = [sample(), sample(rank=0, issue_ns=[1.2, 2.5], loaded=True), sample(role="held_out", gap_ns=1000.0)]
    append(path, some[:1])
    append(path, some[1:])
    assert list(read(path)) == some
    assert select(some, rank=1, role="held_out") == some[2:]
    with path.open("a") as out:
        out.write('{"method": "bulk"')  # a run that died in the middle of a line
    with pytest.raises(XStageError, match=r"samples\.jsonl:4: not JSON"):
        list(read(path))


def test_checks_do_not_touch_good_values(tmp_path: Path) -> None:
    variants: list[Callable[[], dict[str, Any]]] = [
        lambda: changed("samples", ...), lambda: changed(f"{M}.latency_ns", ...), lambda: changed(f"{M}.capacity.knee_low", ...),
        lambda: changed("note", ...), lambda: changed("gates.0.value", None), lambda: changed("gates", []),
        lambda: changed("origin", "published"),
    ]  # fmt: skip
    for variant in variants:
        load_platform(written(tmp_path, variant()))
