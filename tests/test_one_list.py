"""The simulator of the one MoE kernel: rows and items, conservation, limits of the link, and the stalls that were measured.

Not covered: times of single tiles against records (only their means are kept), ranks that differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xstage.errors import XStageError
from xstage.moe.layout import ITEM_PAIRS, NEAR_TILES
from xstage.moe.work_table import TILE_ROWS, WorkOrder, work_list
from xstage.platform import Platform, load_platform
from xstage.simulate.mega_moe import DUPLEX
from xstage.simulate.one_list import OneListRun, TileTimes, row_bytes, simulate_one_list
from xstage.simulate.row_plan import row_plan
from xstage.studies import moe_once, moe_prediction
from xstage.studies import one_list as study

RESULTS = Path(__file__).parent.parent / "results"
PLATFORM = load_platform("h200-nvlink4", samples=False)
TIMES = TileTimes(3000.0, 1000.0, 1500.0, 1000.0, 100.0)
ROWS = [300, 129, 64, 1, 0, 512, 700, 40] * 3
ORDER = WorkOrder.of("interleaved", 4, 4, lead_rows=None, instances=66)
WAVE = WorkOrder.of("expert_wave", 4, 4, lead_rows=None, instances=66)


def simulated(
    order: WorkOrder = ORDER, share: float = 0.5, rows: list[int] = ROWS, platform: Platform = PLATFORM, **given: Any
) -> OneListRun:
    return simulate_one_list(rows, share, order, TIMES, platform, **given)


@given(st.lists(st.integers(0, 600), max_size=6), st.floats(0, 1), st.integers(2, 9), st.data())
def test_every_row_is_sent_once_and_counts_where_it_lies(rows: list[int], share: float, ranks: int, data: st.DataObject) -> None:
    plan = row_plan(rows, share, data.draw(st.integers(0, ranks - 1)), ranks)
    assert plan.real.sum() == sum(rows)
    assert len(plan.real) == sum(-(-count // TILE_ROWS) for count in rows)
    came = np.zeros(len(plan.real) + 1, int)
    np.add.at(came, plan.item_tile, plan.item_first)
    np.add.at(came, plan.item_tile + 1, plan.item_second)
    assert came[:-1].tolist() == plan.real.tolist()
    assert came[-1] == 0
    assert plan.sent_rows == plan.remote.sum() == sum(round(share * count) for count in rows)
    assert (plan.item_first + plan.item_second <= ITEM_PAIRS).all()
    assert (np.diff(plan.item_tile) >= 0).all()


@given(st.integers(1, 12), st.floats(1e-3, 1), st.integers(2, 8))
def test_as_many_rows_are_fresh_as_tokens_want_one_on_a_rank(picks: int, share: float, ranks: int) -> None:
    rows = [640] * 40
    plan = row_plan(rows, share, 0, ranks, picks)
    # Of a token, picks · p picks on another rank in the mean, and any with the probability 1 − (1 − p)^picks.
    p = share / (ranks - 1)
    assert plan.item_fresh.sum() / sum(rows) == pytest.approx((1 - (1 - p) ** picks) / (picks * p), rel=0.03)
    assert (plan.item_fresh <= plan.item_first + plan.item_second).all()
    assert (row_plan(rows, share, 0, ranks).item_fresh == plan.item_first + plan.item_second).all()


def test_rows_that_go_once_take_fewer_bytes_and_leave_the_link_to_results() -> None:
    rows = 3 * ROWS
    each, once = (simulated(share=0.875, rows=rows, picks=picks) for picks in (None, 8))
    plan = row_plan(rows, 0.875, 0, 2, 8)
    near = plan.item_tile < NEAR_TILES
    assert 0 < near.mean() < 0.5
    # Near rows go per pick, and once besides.
    fewer = np.where(near, -plan.item_fresh, plan.item_first + plan.item_second - plan.item_fresh)[plan.item_remote].sum()
    assert each.moved_bytes - once.moved_bytes == pytest.approx(fewer * row_bytes(ORDER.columns2 * 256), rel=1e-6)
    assert once.store_spans_ns.mean() < each.store_spans_ns.mean()
    few = [simulated(share=0.875, rows=ROWS[:9], picks=picks) for picks in (None, 8)]
    assert few[0].moved_bytes == few[1].moved_bytes, "a rank with near tiles alone gets nothing into its inbox"


def test_the_shipped_prediction_of_rows_that_go_once_is_what_the_simulator_says() -> None:
    [shipped] = [
        r for r in json.loads((RESULTS / "simulated" / "moe_once.json").read_text())["outputs"]["rows"]
        if (r["shape"], r["ranks"], r["share"]) == ("Qwen3-30B", 2, 0.875)
    ]  # fmt: skip
    found = moe_once.row("Qwen3-30B", 2, 0.875, 8192, PLATFORM)
    for way, orders in shipped["times"].items():
        for order, times in orders.items():
            assert found["times"][way][order] == pytest.approx(times, rel=1e-3)


def test_rows_of_one_rank_lie_together() -> None:
    first, last = (row_plan([512], 0.5, rank).remote.tolist() for rank in (0, 1))
    assert (first, last) == ([0, 0, 128, 128], [128, 128, 0, 0])


def test_rows_of_every_source_lie_together() -> None:
    plan = row_plan([512, 160], 0.75, rank=2, ranks=4)
    assert plan.remote.tolist() == [128, 128, 0, 128, 80 + 8, 32]  # 4 × 40 rows: this rank's are 80 … 120 of the second expert
    here = ~plan.item_remote
    assert plan.item_tile[here].tolist() == [2] * 8 + [4] * 3
    assert (plan.item_first + plan.item_second)[-12:].tolist() == [16, 16, 8] * 4


@pytest.mark.parametrize("order", [ORDER, WAVE, WorkOrder.of("alternating", 4, 4, lead_rows=None, instances=66)], ids=lambda o: o.name)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_every_tile_runs_once_and_every_byte_leaves_once(order: WorkOrder, share: float) -> None:
    entries = [word >> 11 & 1 for word, *_ in work_list(ROWS, order)]
    far = sum(round(share * count) for count in ROWS)
    for remote in (True, False):
        run = simulated(order, share, remote=remote)
        assert run.tiles == (2 * entries.count(0), 2 * entries.count(1))
        assert len(run.store_spans_ns) == run.tiles[1]
        assert run.moved_bytes == pytest.approx(far * (row_bytes(1024) + remote * 2 * 1024), rel=1e-6)


def test_without_remote_rows_a_period_is_its_tiles() -> None:
    times = TileTimes(40_000.0, 1000.0, 15_000.0, 1000.0, 100.0)  # so long that rows are there in time
    run = simulate_one_list([1024] * 96, 0.0, ORDER, times, PLATFORM, jitter=0.0)
    assert run.store_spans_ns.max() <= 1000.0 + 50.0
    alone = 16_100 + 41_100  # as many tiles of either layer
    assert alone <= run.period_ns <= 1.02 * alone
    assert run.time_ns >= 2 * run.tiles[1] / 264 * alone


def test_the_rate_is_a_bound_and_so_is_the_control() -> None:
    rows = [1024] * 48
    run, control = (simulated(share=1.0, rows=rows, remote=remote) for remote in (True, False))
    rate = float(PLATFORM.method().drain_rate(132)) * DUPLEX
    assert run.time_ns > run.moved_bytes / rate - float(PLATFORM.method().capacity_bytes(132)) / rate
    assert run.time_ns > control.time_ns
    assert run.period_ns > control.period_ns


def test_linear2_alone_stalls_where_the_mixed_order_does_not() -> None:
    """Qwen3-30B's sizes: the link could carry all of it, but not while Linear-2 runs."""
    times = TileTimes(12_400.0, 1600.0, 4800.0, 1370.0, 190.0)
    mixed, wave = (
        simulate_one_list([1024] * 64, 0.5, WorkOrder.of(name, 6, 8, lead_rows=None, instances=66), times, PLATFORM)
        for name in ("interleaved", "expert_wave")
    )
    assert mixed.moved_bytes / mixed.time_ns < float(PLATFORM.method().drain_rate(132)) * DUPLEX
    assert wave.period_ns - mixed.period_ns > 1000
    assert wave.store_spans_ns.mean() > 1.5 * mixed.store_spans_ns.mean()


def test_rows_have_come_before_the_kernel_ends_and_sooner_with_a_longer_lead() -> None:
    runs = [
        simulated(WorkOrder.of("interleaved", 4, 4, lead_rows=lead, instances=66), 0.5, [1024] * 64, remote=remote)
        for lead, remote in ((16, True), (512, True), (512, False))
    ]
    assert all(0 < run.dispatch_ns < run.time_ns for run in runs)
    assert runs[0].dispatch_ns > runs[1].dispatch_ns > 0.99 * runs[2].dispatch_ns


def test_steps_are_short_enough() -> None:
    rows = [700] * 24
    fine, coarse = (simulated(WAVE, 0.875, rows, step_ns=step).time_ns for step in (12.5, 50.0))
    assert coarse == pytest.approx(fine, rel=0.02)


def test_no_rows() -> None:
    run = simulated(rows=[0, 0])
    assert (run.time_ns, run.period_ns, run.tiles, run.moved_bytes, run.dispatch_ns) == (0.0, 0.0, (0, 0), 0.0, 0.0)


def test_the_same_source_interpreted() -> None:
    code = "import sys; sys.path.insert(0, 'tests')\nimport test_one_list as t; print(t.digest())"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [digest()]


def digest() -> str:
    run = simulated(share=0.5, rows=[130, 20], step_ns=200.0)
    return f"{run.time_ns!r},{run.period_ns!r},{run.moved_bytes!r}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"share": 1.5}, "share: 1.5"),
        ({"step_ns": 0.0}, "step_ns: 0"),
        ({"jitter": 1.0}, "jitter: 1"),
        ({"duplex": 2.0}, "duplex: 2"),
        ({"ranks": 1}, "ranks: 1"),
        ({"rank": 2}, "rank: 2"),
    ],
)
def test_refusals(given: dict[str, float], said: str) -> None:
    with pytest.raises(XStageError, match=said):
        simulated(**given)


def test_measured_stalls_are_met() -> None:
    """All rows of the file as they were added, and the short ones anew."""
    content = json.loads((RESULTS / "h200x2" / "moe-spans.json").read_text())
    for row in content["rows"]:
        found = row["predicted"]
        if row["shape"] == "Qwen3-30B":
            found = moe_prediction.spans(row, PLATFORM, content["settings"]["world"])
            assert found == row["predicted"]
        for order, said in found.items():
            d = row["derived"][order]
            assert abs(said["stall_us"] - d["stall_us"]) < 1.0, (row["shape"], row["share"], order)
            assert abs(d["predicted_stall_us"] - d["stall_us"]) < 1.1, (row["shape"], row["share"], order)
            assert said["control_us"] == pytest.approx(d["period_us"], rel=0.07)
    chosen = json.loads((RESULTS / "simulated" / "one_list.json").read_text())["outputs"]["variants"][0]
    assert chosen["max_us"] == content["headline"]["moe.simulated_stall_error_us.max"]["value"]


def test_study_of_the_layer(tmp_path: Path) -> None:
    layer = {name: {"slowest_ns": ns} for name, ns in (("interleaved", 1e6), ("expert_wave", 1.1e6))}
    row = {"shape": "Qwen3-30B", "tokens": 512, "share": 0.875, "groups": {"layer": layer}}
    path = tmp_path / "moe-layer.json"
    path.write_text(json.dumps({"study": "moe-layer", "settings": {"world": 2}, "rows": [row]}))
    made = study.run(path, tmp_path)
    assert json.loads((tmp_path / "one_list.json").read_text()) == made
    found = made["outputs"]["rows"][0]
    assert found["measured_speedup"] == pytest.approx(1.1)
    assert found["speedup"] == pytest.approx(found["expert_wave_ns"] / found["interleaved_ns"], rel=1e-3)
    assert made["errors"]["max"] == pytest.approx(abs(found["speedup"] / 1.1 - 1), rel=1e-2)
    path.write_text(json.dumps({"study": "moe"}))
    for wrong, said in ((path, "not of 'moe-layer'"), (tmp_path / "none.json", "cannot be read")):
        with pytest.raises(XStageError, match=said):
            study.run(wrong, None)
