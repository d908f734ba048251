"""Covered: every order as a property over random routings and instance counts, Algorithm 1 against a literal transcription, closed
forms of section 4.2 by hand-computed numbers, the checker itself on broken orders.
Not covered: a kernel that runs the cursor steps on a GPU; here one is compiled with them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage import tile_order as to

ROWS = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def orders(rows_per_expert: list[int], pairs1: int, pairs2: int, lead: int, wave: int, instances: int) -> list[to.TileOrder]:
    rows = sum(rows_per_expert)
    return [
        to.expert_wave(rows_per_expert, pairs1, pairs2, wave),
        to.interleaved(rows, pairs1, pairs2, lead),
        to.alternating(rows, pairs1, pairs2, lead, instances),
        to.lead_limited_groups(rows, pairs1, pairs2, lead, wave),
    ]


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(1, 6), st.integers(1, 90))
def test_every_order_is_sound_for_any_routing(rows, pairs1, pairs2, lead, wave, instances):
    for order in orders(rows, pairs1, pairs2, lead, wave, instances):
        assert to.check_order(order, instances) == "", order.name


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 40), st.randoms())
def test_no_order_deadlocks_whatever_instance_runs_next(rows, pairs1, pairs2, lead, wave, instances, random):
    """Instances run their own lists; a Linear-2 tile waits for its row, a Linear-1 tile for a row of a ring as large as the live set."""
    for order in orders(rows, pairs1, pairs2, lead, wave, instances):
        ring = max(1, order.live_rows(instances=1))
        lists = [order.instance(g, instances) for g in range(instances)]
        at = [0] * instances
        done1, done2 = [0] * order.rows, [0] * order.rows
        left = order.tiles
        while left:
            ready = []
            for g in range(instances):
                if at[g] == len(lists[g]):
                    continue
                layer, k = lists[g][at[g]]
                row = k // (order.pairs1 if layer == to.LINEAR1 else order.pairs2)
                if layer == to.LINEAR2 and done1[row] < order.pairs1:
                    continue
                if layer == to.LINEAR1 and row >= ring and done2[row - ring] < order.pairs2:
                    continue
                ready.append((g, layer, row))
            assert ready, f"{order.name} deadlocks"
            g, layer, row = random.choice(ready)
            (done1 if layer == to.LINEAR1 else done2)[row] += 1
            at[g] += 1
            left -= 1


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(1, 40))
def test_live_rows_of_interleaving_are_bounded_by_lead_and_stride(rows, pairs1, pairs2, lead, instances):
    order = to.interleaved(sum(rows), pairs1, pairs2, lead)
    bound = lead + 1 + math.ceil(instances / pairs1) + math.ceil(instances / pairs2)
    assert order.live_rows(instances) <= bound


def test_algorithm_1_literally():
    """The paper's pseudo-code, transcribed with its own names, emits the same tiles."""
    rows, p1, p2, lead, stride = 11, 3, 5, 2, 4
    order = to.interleaved(rows, p1, p2, lead)
    for g in range(stride):
        k1 = k2 = g
        emitted = []
        while k1 < rows * p1 or k2 < rows * p2:
            row1 = math.inf if k1 >= rows * p1 else k1 // p1
            row2 = k2 // p2
            if k2 < rows * p2 and row2 + lead <= row1:
                emitted.append((2, k2))
                k2 += stride
            else:
                emitted.append((1, k1))
                k1 += stride
        assert order.instance(g, stride) == emitted


def test_alternating_is_one_to_one_after_the_warm_up():
    layers = [layer for layer, _ in to.alternating(20, 4, 4, 2, 4).instance(0, 4)]
    assert layers == [1] + [1, 2] * 19 + [2]


def test_waves_keep_layers_apart():
    order = to.expert_wave([2, 0, 1, 3], 2, 2, 2)
    assert order.need == (2, 2, 6, 6, 6, 6)
    assert [layer for layer, _ in order.instance(0, 1)] == [1] * 4 + [2] * 4 + [1] * 8 + [2] * 8


def test_wave_size_by_expected_load():
    # 5 rows of 24 tiles each fill 120 of 2 · 74 tiles per expert: two experts.
    assert to.experts_per_wave(4.2, 24, 74, 48) == 2
    assert to.experts_per_wave(0.1, 8, 74, 4) == 4
    assert to.experts_per_wave(1000, 24, 74, 48) == 1


def test_closed_forms():
    assert to.lead_knee(128, 148, 2048) == 5  # 128·148/4096 = 4.6
    assert to.lead_knee(128, 148, 1024) == 10
    # DSv4-Flash, wave: V/R = 9.0 µs per tile; one Linear-1 tile of 7.4 µs per Linear-2 tile.
    assert to.mixed_injection_rate(6.36e6, 1140, 7400, 8010, 1, 1) == pytest.approx(6.36e6 / 16550)
    assert to.interleaved_backpressure_ns(3000, 2000, 1, 2) == 2000
    assert to.interleaved_backpressure_ns(3000, 7400, 1, 1) == 0
    assert to.staging_stall_ns(9480, 8010) == pytest.approx(1470)  # the paper's own prediction for DSv4-Flash
    assert to.staging_stall_ns(3830, 7400) == 0


def test_columns_of_a_pair():
    assert [to.tile_column(k, 4, 2, r) for k in (4, 5) for r in (0, 1)] == [0, 1, 2, 3]
    assert to.tile_row(9, 4) == 2
    assert to.interleaved(5, 1, 1, 3).need == (3, 4, 5, 5, 5)


def test_checker_finds_broken_orders():
    assert "must be above the row" in to.check_order(to.TileOrder("x", (0, 2), 2, 2), 2)
    assert "falls below" in to.check_order(to.TileOrder("x", (3, 2, 3), 2, 2), 2)
    with pytest.raises(ValueError, match="lead_rows: 0"):
        to.interleaved(4, 2, 2, 0)
    with pytest.raises(ValueError, match="experts_per_wave: 0"):
        to.expert_wave([1], 2, 2, 0)


def test_the_same_cursor_steps_compile_in_a_kernel(monkeypatch):
    """CuTe DSL traces `tile_row` and `takes_linear2` unchanged with run-time integers."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    import cute_cursor  # kernels need a source file of their own

    assert cute_cursor.compile_cursor() is not None
