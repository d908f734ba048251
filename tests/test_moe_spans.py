"""Records from inside the MoE kernel: decoding, what is made of them, the study that collects them, its table, charts and trace.

Records of a launch are SYNTHETIC. Marks are left by the PTX of a small kernel, run by an interpreter (tests/ptx_interpreter.py). That
kernels which record compile to what they should: tests/test_moe_gemm_kernels.py; that they record: tests/gpu/test_grouped_gemm.py and
tests/gpu/test_moe.py. Not covered: timing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machine_code import needs_compiler

from xstage.bench import tables, timing
from xstage.burst_gap import queue_wait_ns
from xstage.errors import UnsuitableMachine, XStageError
from xstage.moe import work_table
from xstage.moe.layout import BufferLayout
from xstage.moe.shapes import MoEShape, shape
from xstage.moe.spans import BINS, EDGES_NS, ROLES, Records, Spans, activity, busy_share, capacity_of, decode, spans_ns, summary
from xstage.platform import load_platform
from xstage.simulate.mega_moe import DUPLEX
from xstage.studies import moe_prediction, moe_stall
from xstage.studies import moe_spans as study

LAYER2 = 1 << 11


def launch(capacity: int = 4, base: int = (1 << 31) - 700) -> np.ndarray:
    """Two CTAs: warpgroup 0 of CTA 0 has a Linear-1 and a Linear-2 tile, the loading warp their waits, the sending warp an item."""
    records = np.zeros((2, len(ROLES), capacity + 1, 8), np.int64)

    def put(cta: int, role: str, number: int, what: int, *times: int) -> None:
        records[cta, ROLES.index(role), number - 1, : 1 + len(times)] = (what, *(base + t for t in times))
        records[cta, ROLES.index(role), number - 1, 7] = number

    put(0, "math0", 1, work_table.encoded(5, 3, 0), 100, 1000, 1100, 1200, 1600)
    put(0, "math0", 2, work_table.encoded(7, 2, 1) | LAYER2, 1700, 2000, 2300, 2400, 2800)
    put(1, "math1", 1, work_table.encoded(7, 3, 1) | LAYER2, 1700, 2000, 2500, 2600, 3200)
    put(0, "loads", 1, work_table.encoded(5, 3, 0), 0, 90)
    put(0, "loads", 2, work_table.encoded(7, 2, 1) | LAYER2, 110, 1650)
    put(1, "sends", 1, 12, 20, 520, 900)
    return records.astype(np.uint32).view(np.int32)  # the clock's low half wraps between the first record and the last


def test_decoding() -> None:
    r = decode(launch())
    assert (r.ctas, r.dropped, r.whole_ns) == (2, 0, 3200)
    tiles = {name: values.tolist() for name, values in r.tiles.items()}
    assert tiles == {
        "cta": [0, 0, 1], "group": [0, 0, 1], "what": tiles["what"], "layer": [1, 2, 2], "m": [5, 7, 7], "n": [3, 2, 3],
        "start": [100, 1700, 1700], "half_start": [1000, 2000, 2000], "half_end": [1100, 2300, 2500], "main_end": [1200, 2400, 2600],
        "end": [1600, 2800, 3200],
    }  # fmt: skip
    assert (r.loads["layer"].tolist(), r.loads["start"].tolist(), r.loads["end"].tolist()) == ([1, 2], [0, 110], [90, 1650])
    assert (r.sends["cta"].tolist(), r.sends["item"].tolist(), r.sends["turn"].tolist()) == ([1], [12], [520])
    main, epilogue, gap = spans_ns(r.tiles)
    assert (main.tolist(), epilogue.tolist()) == ([1000, 400, 400], [500, 700, 1100])
    assert np.array_equal(gap, [np.nan, 100, np.nan], equal_nan=True)


def test_dropped_records_are_counted_and_left_out() -> None:
    records = launch(capacity=1)[:, :, :2]
    records = np.concatenate([records[:, :, :1], np.zeros_like(records[:, :, :1])], axis=2)
    records[0, 0, 1] = 1
    records[0, 0, 1, 7] = 9  # eight found no room
    r = decode(records)
    assert (r.dropped, len(r.tiles["cta"])) == (8, 2)


def test_nothing_recorded() -> None:
    r = decode(np.zeros((2, len(ROLES), 3, 8), np.int32))
    said = summary(r)
    assert (r.whole_ns, said["tiles"], said["store_span"], said["busy"]) == (0.0, [0, 0], {}, 0.0)
    assert json.loads(json.dumps(said)) == said


def test_summary() -> None:
    said = summary(decode(launch()))
    assert said["tiles"] == [1, 2]
    assert said["store_span"] == {"mean": 0.9, "median": 0.9, "p10": 0.74, "p90": 1.06}
    assert said["linear1_main"]["mean"] == 1.0
    assert said["linear2_main"]["mean"] == 0.4
    assert said["linear1_epilogue"]["mean"] == 0.5
    assert (said["gap1"], said["gap2"]["mean"]) == ({}, 0.1)
    assert (said["wait_arrived_us"], said["wait_ready_us"], said["send_turn_us"]) == (0.045, 0.77, 0.25)
    assert said["send_item"]["mean"] == 0.38
    assert (said["span_counts"][2], said["span_counts"][4], sum(said["span_counts"])) == (1, 1, 2)
    assert len(said["span_counts"]) == len(EDGES_NS) - 1
    assert (len(said["activity"]), said["whole_us"]) == (BINS, 3.2)
    # 1,800 ns of main loops, in 3,200 ns of four warpgroups.
    assert said["busy"] == pytest.approx(1800 / 3200 / 4, abs=1e-4)


def test_busy_share() -> None:
    assert busy_share(np.array([0.0, 50.0]), np.array([25.0, 100.0]), 100.0, 1, 4).tolist() == [1, 0, 1, 1]
    assert busy_share(np.array([0.0]), np.array([100.0]), 100.0, 4, 2).tolist() == [0.25, 0.25]
    assert activity(decode(launch()), 32)[:1].tolist() == [0]


@pytest.mark.parametrize("loads", [[3, 0, 5, 1], [1] * 40, [7]])
def test_capacity_is_twice_a_share(loads: list[int]) -> None:
    hidden, intermediate, clusters = 1024, 512, 3
    layout = BufferLayout(2, 2 * len(loads), hidden, 1, 64 * sum(loads))
    assert layout.rows >= 128 * sum(loads)
    order = work_table.WorkOrder.of("interleaved", 4, 4, lead_rows=None, instances=clusters)
    entries = len(work_table.work_list([128 * tiles for tiles in loads], order))
    assert 2 * entries / clusters <= capacity_of(layout, intermediate, 2 * clusters)


def test_memory() -> None:
    spans = Spans.of(BufferLayout(2, 8, 512, 2, 300), 256, torch.device("cpu"), ctas=4)
    assert tuple(spans.records.shape) == (4, 4, spans.capacity + 1, 8)
    spans.records.fill_(1)
    spans.clear()
    assert decode(spans.to_numpy()).whole_ns == 0


@needs_compiler
@pytest.mark.parametrize(("tiles", "capacity"), [(3, 3), (5, 8), (6, 2), (0, 1)])
def test_marks(tiles: int, capacity: int) -> None:
    """Every record in its place, with its times in order; those that find no room are counted, and nothing lies outside."""
    from emulated_launch import translated
    from emulated_memory import Memory
    from marks_kernel import compiled_marks
    from ptx_interpreter import Grid, run

    ctas, memory = 3, Memory(1 << 20)
    address = memory.put(torch.zeros(ctas, len(ROLES), capacity + 1, 8, dtype=torch.int32))
    run([[Grid(translated(compiled_marks()), ctas, [address, capacity, tiles], memory)]])
    records = memory.get(address, (ctas, len(ROLES), capacity + 1, 8), torch.int32).numpy()
    r, kept = decode(records), min(tiles, capacity)
    assert r.dropped == 3 * ctas * (tiles - kept)
    wanted = [(cta, group, 16 * cta + tile, 1) for cta in range(ctas) for group in range(2) for tile in range(kept)]
    assert list(zip(*(r.tiles[name] for name in ("cta", "group", "m", "layer")), strict=True)) == wanted
    assert list(zip(r.loads["cta"], r.loads["m"], r.loads["layer"], strict=True)) == [(c, m, 2) for c, g, m, _ in wanted if g == 0]
    times = [r.tiles[name] for name in ("start", "half_start", "half_end", "main_end", "end")]
    assert (np.diff(times, axis=0) > 0).all()
    assert (r.loads["end"] > r.loads["start"]).all()
    assert (spans_ns(r.tiles)[2][1:][np.diff(r.tiles["m"]) == 1] > 0).all()
    assert not records[:, ROLES.index("sends")].any()


# ---- the study


def of_rank(span: float, scale: float = 1.0) -> dict[str, Any]:
    said = summary(decode(launch()))
    times = {"linear1_main": 20.0, "linear1_epilogue": 2.0, "gap1": 1.0, "linear2_main": 5.0, "gap2": 0.5, "store_span": span}
    return said | {name: {"mean": t * scale, "median": t, "p10": t, "p90": t} for name, t in times.items()} | {"tiles": [100, 200]}


def measured(share: float) -> dict[str, Any]:
    orders = {
        "interleaved": {"remote": [of_rank(3.0), of_rank(3.5)], "local": [of_rank(1.5), of_rank(1.5)]},
        "expert_wave": {"remote": [of_rank(5.5), of_rank(5.5)], "local": [of_rank(1.5), of_rank(1.5)]},
    }
    times = {name: {"slowest_ns": ns} for name, ns in (("interleaved", 1e6), ("interleaved_spans", 1.02e6), ("expert_wave", 1.1e6), ("expert_wave_spans", 1.1e6))}  # fmt: skip  # noqa: E501
    return {
        "shape": "Qwen3-30B", "routing": "balanced", "tokens": 512, "share": share, "lead_rows": 40, "counts": [64] * 128, "orders": orders,
        "times": times,
    }  # fmt: skip


def test_predictions_stand_beside_what_was_measured() -> None:
    platform = load_platform("h200-nvlink4", samples=False)
    assert moe_stall.burst(0.5, platform).burst_bytes == 132 * 65_536 / 2
    # Rows are whole tiles here, three in five of them with a remote row.
    row = measured(0.5) | {"counts": [640] * 128}
    filled = moe_stall.filling(row["counts"], 0.5)
    assert filled == {"fill": 1.0, "active": 0.6}
    stores = moe_stall.burst(0.5, platform, duplex=DUPLEX, **filled)
    assert stores.capacity_bytes == pytest.approx(float(platform.method().capacity_bytes(0.6 * 132)))
    answers = study.derived(row | {"tokens": 0}, platform)
    mixed, wave = answers["interleaved"], answers["expert_wave"]
    assert (mixed["span_us"], mixed["control_us"], mixed["over_control"], mixed["stall_us"]) == (3.25, 1.5, 2.1667, 1.75)
    # A Linear-2 tile of 7 µs, and half a Linear-1 tile of 23 µs.
    assert (wave["period_us"], mixed["period_us"]) == (18.5, 18.5)
    assert mixed["predicted_stall_us"] == round(queue_wait_ns(18_500, stores.drain_ns, 79) / 1e3, 3) > 0
    figures = {key: entry["value"] for key, entry in study.headline([{"derived": answers}]).items()}
    error = round(1.75 - mixed["predicted_stall_us"], 3)
    assert abs(4.0 - wave["predicted_stall_us"]) < error
    assert figures == {"moe.span_over_control.max": 2.1667, "moe.stall_error_us.max": error}
    # Rows that a rank sends meanwhile share the link: a period drains both.
    tiles = row["orders"]["interleaved"]["local"]
    rounds = sum(r["tiles"][1] for r in tiles) / 2 / len(tiles) / 132
    busy = study.derived(row | {"tokens": 40}, platform)["interleaved"]
    rows_us = study.sent(shape("Qwen3-30B"), 40, 0.5) / rounds / stores.rate / 1e3
    assert busy["sent_us"] == pytest.approx(rows_us, abs=1e-3)
    assert busy["predicted_stall_us"] == pytest.approx(queue_wait_ns(18_500, stores.drain_ns + rows_us * 1e3, 79) / 1e3, abs=1e-3)
    assert study.headline([]) == {}


def test_a_wave_stalls_in_its_phases() -> None:
    wave = moe_stall.Wave(2.0, 4.0)
    stores = moe_stall.Burst(burst_bytes=10_000.0, rate=1.0, capacity_bytes=6_000.0, producers=66, sms=132)
    wait = queue_wait_ns
    # 40,000 ns of results in 20,000 ns of Linear-2; what is held at its end, and the rows, find room beside Linear-1.
    beside = wait(20_000, (4_000 + 6_000) / 2, 132)
    stall = stores.wave_stall_ns(20_000, 5_000, wave, 1_000.0)
    assert stall == (4 * wait(5_000, (40_000 - 6_000) / 4, 66) + 2 * beside) / 4
    assert stall == pytest.approx((40_000 - 6_000 - 20_000) / 4 + beside / 2, rel=1e-4)  # Linear-2 is far above the knee
    assert beside < 20
    # Rows that do not.
    stall = stores.wave_stall_ns(20_000, 5_000, wave, 10_000.0)
    assert stall == (4 * wait(5_000, (40_000 - 6_000) / 4, 66) + 2 * wait(20_000, (40_000 + 6_000) / 2, 132)) / 4
    assert stall == pytest.approx((40_000 - 6_000 - 20_000 + 40_000 + 6_000 - 40_000) / 4, rel=0.03)  # Linear-1 is less far above it
    # The path holds no more than was stored beyond its rate: both phases are at the knee.
    stall = stores.wave_stall_ns(20_000, 9_000, wave, 9_000.0)
    assert stall == (4 * wait(9_000, (40_000 - 4_000) / 4, 66) + 2 * wait(20_000, (36_000 + 4_000) / 2, 132)) / 4
    assert stores.aligned_ns == 4_000.0
    # Experts of 3 tiles, 8 and 16 columns, 66 clusters: 24 units a wave, half of them single.
    size = moe_stall.Wave.of([320] * 240, 8, 16, 66)
    assert (size.rounds1, size.rounds2) == (pytest.approx(144 / 66), pytest.approx(288 / 66))


class Shapes:
    """Stands for GPUs: which shapes were opened, and which shares measured."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, model: MoEShape) -> Iterator[study.Measure]:
        def measure(share: float) -> tuple[dict[str, Any], dict[str, Records]]:
            self.seen.append((model.name, share))
            return measured(share) | {"shape": model.name}, {order: decode(launch()) for order in study.ORDERS}

        yield measure


def test_study_resumes(tmp_path: Path) -> None:
    path, platform = tmp_path / "moe-spans.json", load_platform("h200-nvlink4", samples=False)
    models, shares = [shape("Qwen3.5"), shape("Qwen3-30B")], (0.5, 0.875)
    first = Shapes()
    results = timing.ResultFile(path, "moe-spans", settings={"tokens": 1})
    assert study.walk(results, models[:1], shares[:1], first, platform, 60)
    assert sorted(p.name for p in tmp_path.glob("*trace*")) == ["moe-spans-expert_wave-trace.json", "moe-spans-interleaved-trace.json"]
    again = Shapes()
    results = timing.ResultFile(path, "moe-spans", settings={"tokens": 1})
    assert study.walk(results, models, shares, again, platform, 60)
    assert first.seen + again.seen == [(m.name, share) for m in models for share in shares]
    content = json.loads(path.read_text())
    assert [(r["shape"], r["share"]) for r in content["rows"]] == again.seen[:0] + first.seen + again.seen
    assert set(content["headline"]) == {"moe.span_over_control.max", "moe.stall_error_us.max"}
    assert not study.walk(timing.ResultFile(tmp_path / "other.json", "moe-spans"), models, shares, Shapes(), platform, -1)


def test_table_charts_and_simulation(tmp_path: Path) -> None:
    assert tables.TABLES["moe-spans"](tmp_path) == "Not measured yet."
    (tmp_path / "h200x2").mkdir()
    path = tmp_path / "h200x2" / "moe-spans.json"
    platform = load_platform("h200-nvlink4", samples=False)
    rows = [measured(share) for share in (0.5, 0.875)]
    for row in rows:
        row["derived"] = study.derived(row, platform)
    settings = {"world": 2, "tokens": 512, "platform": "h200-nvlink4"}
    path.write_text(json.dumps({"study": "moe-spans", "settings": settings, "rows": rows}))
    spans = "5.50 (5.50 … 5.50 … 5.50) | 1.50 (1.50 … 1.50 … 1.50) | 3.67"
    d = rows[0]["derived"]["expert_wave"]
    times = f"18.5 | {d['drain_us']:.1f}, {d['sent_us']:.1f} | {d['predicted_stall_us']:.1f} | – | 4.0 | 20.0, 5.0"
    assert f"| Qwen3-30B, 0.5, expert-wave | {spans} | {times} |" in tables.TABLES["moe-spans"](tmp_path)
    moe_prediction.annotate(path)
    predicted = json.loads(path.read_text())["rows"][0]["predicted"]
    assert set(predicted) == set(study.ORDERS)
    assert all(p["span_us"] > 0 and p["period_us"] >= p["control_us"] > 0 for p in predicted.values())
    assert "moe.simulated_stall_error_us.max" in json.loads(path.read_text())["headline"]
    assert tables.TABLES["moe-spans"](tmp_path).count("| – |") == 0

    from xstage.report import moe_charts

    written = moe_charts.write_all(tmp_path / "h200x2", tmp_path / "out")
    assert {p.name for p in written} == {"figure9-measured.svg", "figure10-measured.svg"}


def test_trace(tmp_path: Path) -> None:
    events = study.trace_events(decode(launch()), every=1)
    slices = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        (1, "Linear-1 main loop", 0.1, 0.9), (1, "Linear-1 epilogue", 1.0, 0.6), (1, "Linear-2 main loop", 1.7, 0.3),
        (1, "Linear-2 epilogue", 2.0, 0.8), (1, "rows to arrive", 0.0, 0.09), (1, "Linear-1", 0.11, 1.54),
        (2, "wait for its turn", 0.02, 0.5), (2, "send", 0.52, 0.38),
    ]  # fmt: skip
    assert {e["pid"] for e in study.trace_events(decode(launch()), every=2)} == {1}
    json.dumps(events)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(XStageError, match="tokens: 0"):
        study.run(str(tmp_path / "r.json"), tokens=0)
    with pytest.raises(XStageError, match="shape: 'GPT'"):
        study.run(str(tmp_path / "r.json"), shapes=["GPT"])
    if torch.cuda.device_count() < 2:
        with pytest.raises(UnsuitableMachine, match="bench moe-spans: needs two peer-connected GPUs"):
            study.run(str(tmp_path / "r.json"))
