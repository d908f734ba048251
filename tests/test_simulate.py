"""Covered: the engine against the closed forms (saturated period, capacity bound, recovery, completion coupling), invariants of its
timelines, readiness, ring, dispatch, roles, jammed runs, equality with JIT off, speed; MegaMoE, attention, fabric and routing by
numbers; bad input as one-line errors; traces. Not covered: numbers of the paper (tests/test_studies.py)."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage import tile_order as to
from xstage.errors import XStageError
from xstage.platform import load_platform
from xstage.simulate import engine, routing, shapes
from xstage.simulate.attention import AttentionWorkload, simulate_attention
from xstage.simulate.engine import Link, run_order
from xstage.simulate.fabric import simulate_fabric
from xstage.simulate.mega_moe import Locality, MoEWorkload, make_order, simulate_moe
from xstage.simulate.trace import trace_events, write_trace
from xstage.studies.speed import tile_times

LINK = Link(speed=43008 / 1140, rate=700.0, capacity=4.25 * 2**20)
PLATFORM = load_platform("paper-8gpu")


def linear2(rows: int = 40, pairs: int = 37) -> to.TileOrder:
    """Linear-2 alone, all of it ready."""
    return to.TileOrder("linear-2", tuple(range(1, rows + 1)), 0, pairs)


def small(**changes: object) -> MoEWorkload:
    values = {
        "name": "small", "hidden": 512, "intermediate": 256, "experts": 16, "top_k": 2, "tokens": 8192, "mma_l1_ns": 2000.0,
        "mma_l2_ns": 1000.0, "ranks": 8, "tile_m": 64, "dispatch": "none",
    }  # fmt: skip
    return MoEWorkload(**{**values, **changes})  # type: ignore[arg-type]


def test_saturated_period_is_drain_time_whatever_the_mainloop():
    """Table 2's insight: spans of a saturated issuing role do not move with the mainloop; period = max(T_mma, V/R)."""
    period = 148 * 43008 / 700
    for mainloop in (4000.0, 6000.0, 8000.0):
        t = run_order(linear2(160), 148, LINK, 0, mainloop, 43008, 1140, staging_ns=2610)
        middle = slice(24 * 148, 36 * 148)
        assert np.median(t.span_ns[middle]) == pytest.approx(period, rel=0.01)
        assert np.median(t.stall[middle]) == pytest.approx(period - mainloop, rel=0.01)


def test_recovered_spans_are_staging_plus_floor():
    t = run_order(linear2(), 148, LINK, 0, 12000, 43008 / 2, 1140, staging_ns=2610)
    assert np.median(t.span_ns) == pytest.approx(3750)
    assert t.stall.max() == 0


def test_isolated_burst_follows_the_capacity_bound():
    """One aligned burst above Q: all producers share the drain and end together, (V − Q)/R after they began (equation 6)."""
    t = run_order(linear2(rows=4), 148, LINK, 0, 5000, 43008, 1140)
    issue = (t.span_end - t.store_start)[:148]
    assert issue == pytest.approx((148 * 43008 - LINK.capacity) / LINK.rate, rel=1e-9)
    below = run_order(linear2(rows=4), 148, LINK, 0, 5000, 20000, 1140)
    assert (below.span_end - below.store_start)[:148] == pytest.approx(1140)


def test_completion_coupled_pays_the_sum():
    """Equation of section 3.4: the issuer that waits takes G + V/R, with G the gap of its own role."""
    t = run_order(linear2(), 148, LINK, 0, 4000, 43008, 1140, roles="registers", completion_coupled=True)
    starts = np.sort(t.store_start[::148])
    assert np.diff(starts).mean() == pytest.approx(4000 + 148 * 43008 / 700, rel=0.01)


def test_single_producer_is_held_to_its_own_drain_and_capacity():
    link = Link(43.0, 700.0, 4e6, producer_rate=48.0, producer_capacity=30_000)
    t = run_order(linear2(1, 1), 1, link, 0, 1000, 100_000, 1140)
    assert (t.span_end - t.store_start)[0] == pytest.approx(max(100_000 / 43.0, 70_000 / 48.0))
    slow = run_order(linear2(1, 1), 1, Link(430.0, 700.0, 4e6, 48.0, 30_000), 0, 1000, 100_000, 100)
    assert (slow.span_end - slow.store_start)[0] == pytest.approx(70_000 / 48.0)


@pytest.mark.parametrize(("roles", "slots"), [("separate", 2), ("separate", 1), ("registers", 1), ("staged", 2), ("alternating", 2)])
def test_invariants_of_a_timeline(roles, slots):
    order = to.interleaved(30, 4, 6, 3)
    t = run_order(order, 17, LINK, 3000, 1500, 43008, 300, epilogue_l1_ns=700, staging_ns=500, roles=roles, slots=slots, jitter=0.1)
    assert np.all(t.mma_end > t.mma_start)
    assert np.all(t.span_start >= t.mma_end)
    assert np.all(t.store_start >= t.span_start)
    assert np.all(t.span_end >= t.store_start)
    assert np.all(t.stall >= 0)
    assert t.drained_ns >= t.makespan_ns == t.span_end.max()
    end1 = order.rows * order.pairs1
    ready = t.span_end[:end1].reshape(order.rows, -1).max(1)
    assert np.all(t.mma_start[end1:].reshape(order.rows, -1) >= ready[:, None])
    for g in range(17):  # mainloops of an instance do not overlap: it has one set of tensor cores
        tiles = [k if layer == 1 else end1 + k for layer, k in order.instance(g, 17)]
        assert np.all(t.mma_start[tiles][1:] >= t.mma_end[tiles][:-1] - 1e-9)


def test_roles_order_by_cover():
    """Hopper with stores by the math warps has no cover; staging, turns and own roles each hide more."""
    times = {
        roles: run_order(linear2(), 148, LINK, 0, 9000, 43008, 1140, staging_ns=500, roles=roles).makespan_ns
        for roles in ("registers", "staged", "alternating", "separate")
    }
    assert times["registers"] > times["staged"] > times["separate"]
    assert times["registers"] > times["alternating"]


def test_ring_limits_the_lead_and_a_short_one_is_reported():
    order = to.interleaved(40, 4, 6, 4)
    live = order.live_rows(5)
    free = run_order(order, 5, LINK, 100, 100, 1000, 10)
    ringed = run_order(order, 5, LINK, 100, 100, 1000, 10, ring_rows=live)
    assert ringed.makespan_ns >= free.makespan_ns
    with pytest.raises(XStageError, match=r"nothing can progress, .* Linear-1 tile \d+ of row \d+ waits for a free ring row"):
        run_order(order, 5, LINK, 100, 100, 1000, 10, ring_rows=2)


def test_order_without_lead_jams_and_names_its_tiles():
    broken = to.TileOrder("no lead", tuple(range(6)), 4, 4)
    with pytest.raises(XStageError, match="Linear-2 tile 0 of row 0 waits for Linear-1 tiles of its row") as error:
        run_order(broken, 3, LINK, 100, 100, 1000, 10)
    assert "\n" not in str(error.value)


def test_dispatch_holds_linear1_back_and_takes_its_share():
    order = to.expert_wave([20], 4, 4, 1)
    total = 20e6
    link = Link(40.0, 700.0, 4e6, dispatch_bytes=total, dispatch_share=0.5, dispatch_rate=700.0)
    t = run_order(order, 8, link, 100, 100, 40_000, 1000, arrival_bytes=np.linspace(1e6, total, 20))
    first = t.mma_start[: 20 * 4].reshape(20, 4).min(1)
    arrived = np.linspace(1e6, total, 20) / 700.0
    assert first[:-1] == pytest.approx(arrived[:-1], rel=1e-6)
    assert arrived[-1] < first[-1] < arrived[-1] + 1500  # instances without Linear-1 tiles left store by now: half the rate


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 30))
def test_engine_runs_every_sound_order(rows, pairs1, pairs2, lead, instances):
    total = sum(rows)
    for order in (to.expert_wave(rows, pairs1, pairs2, 2), to.interleaved(total, pairs1, pairs2, lead)):
        t = run_order(order, instances, LINK, 700, 300, 9000, 50, staging_ns=20, epilogue_l1_ns=30)
        if total:
            assert np.all(t.mma_end > 0)
            assert t.makespan_ns >= (total * (pairs1 * 700 + pairs2 * 300)) / instances * 0.999


def _digest() -> str:
    """A hash over the exact bits of several runs."""
    h = hashlib.sha256()
    wave, mixed = to.expert_wave([3, 0, 5, 1], 4, 6, 2), to.interleaved(9, 4, 6, 2)
    link = Link(40.0, 90.0, 60_000, 48.0, 30_000, dispatch_bytes=5e5, dispatch_share=0.3, dispatch_rate=90.0)
    for order in (wave, mixed):
        for roles in engine.ROLES:
            t = run_order(
                order, 5, link, 900, 400, 9000, 200, epilogue_l1_ns=100, staging_ns=150, roles=roles, jitter=0.07,
                arrival_bytes=np.linspace(5e4, 5e5, 9), trace=True, ctas_per_instance=2,
            )  # fmt: skip
            for array in (t.mma_start, t.mma_end, t.span_start, t.store_start, t.span_end, t.stall, t.flow):
                h.update(array.tobytes())
    tiny = small(tokens=2048)
    r = simulate_fabric(tiny, PLATFORM, "interleaved", step_ns=200)
    h.update(r.spans_ns.tobytes() + r.stalls_ns.tobytes())
    return h.hexdigest()


def test_identical_with_jit_off():
    code = "import sys; sys.path.insert(0, 'tests'); import test_simulate as t; print(t._digest(), t.engine.COMPILED)"
    found = {}
    for off in ("0", "1"):
        env = {**os.environ, "NUMBA_DISABLE_JIT": off}
        found[off] = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split()
    assert found["0"][0] == found["1"][0]
    assert found["1"][1] == "False"


def test_works_without_numba():
    code = (
        "import sys; sys.modules['numba'] = None; sys.path.insert(0, 'tests')\n"
        "import test_simulate as t; print(t._digest(), t.engine.COMPILED)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out == [_digest(), "False"]


def test_fifty_thousand_tiles_in_twenty_milliseconds():
    assert engine.COMPILED, "the test environment has numba; where it is absent or switched off nothing is fast"
    tiles, seconds = tile_times(rounds=5)
    assert tiles >= 50_000
    assert max(min(s) for s in seconds.values()) < 0.020


# ---- models -----------------------------------------------------------------------------------------------------------------


def test_megamoe_counts_and_bytes():
    w = small(tokens=8192)
    order = make_order(w, "expert-wave", 148)
    assert order.pairs1 == 2
    assert order.pairs2 == 2
    assert order.rows == 2 * 16  # two experts of 1,024 pairs in rows of 64
    r = simulate_moe(w, PLATFORM, "expert-wave", jitter=0.0)
    assert r.time_ns > 0
    assert sum(r.breakdown_ns.values()) == pytest.approx(r.time_ns)


def test_local_control_is_flat_and_interleaving_never_beats_its_own_compute():
    w = shapes.moe_workload("Qwen3.5", 2048, routing="power", dispatch="none")
    control = simulate_moe(w, PLATFORM, "expert-wave", remote=False)
    assert control.span_ns == pytest.approx(3750)
    mixed = simulate_moe(w, PLATFORM, "interleaved", lead_rows=20)
    assert mixed.time_ns >= mixed.breakdown_ns["mainloops"]


def test_lead_below_the_knee_waits():
    w = shapes.moe_workload("DSv4-Flash", 8192, routing="power", dispatch="none")
    times = {d: simulate_moe(w, PLATFORM, "interleaved", lead_rows=d).time_ns for d in (1, 5, 6, 10)}
    assert times[1] > 1.2 * times[10]
    assert times[6] == pytest.approx(times[10], rel=0.02)


def test_locality_costs_only_above_the_cache():
    w = shapes.moe_workload("DSv4-Pro", 8192, dispatch="none")
    plain = simulate_moe(w, PLATFORM, "interleaved", lead_rows=8)
    small_cache = simulate_moe(w, PLATFORM, "interleaved", lead_rows=8, locality=Locality(63e6, 0.2))
    large_cache = simulate_moe(w, PLATFORM, "interleaved", lead_rows=8, locality=Locality(1e12, 0.2))
    assert large_cache.mma_l1_ns == plain.mma_l1_ns
    assert 1.0 < small_cache.mma_l1_ns / plain.mma_l1_ns < 1.2


def test_one_hot_expert_and_empty_experts():
    counts = [0] * 16
    counts[3] = counts[7] = 8192
    load = routing.from_counts(counts, 8192, 2, 16)
    for order in ("expert-wave", "interleaved", "alternating", "groups"):
        r = simulate_moe(small(routing=load), PLATFORM, order)
        assert r.order.rows == 128
        assert np.all(r.timeline.mma_end > 0)


def test_fewer_tiles_than_instances():
    r = simulate_moe(small(tokens=8), PLATFORM, "interleaved")
    assert r.order.tiles < 74
    assert r.time_ns > 0


def test_fabric_with_even_rows_agrees_with_the_engine():
    """Evenly spread rows and one load per rank: the all-rank model must give the single-rank spans of a saturated run."""
    w = MoEWorkload("x", 4096, 1024, 8, 1, 8 * 90 * 192, 14400.0, 4240.0, dispatch="none")
    alone = simulate_moe(w, PLATFORM, "expert-wave", jitter=0.0)
    crowd = simulate_fabric(w, PLATFORM, "expert-wave", runs_per_row=48000, jitter=0.0)
    assert crowd.span_ns == pytest.approx(alone.span_ns, rel=0.03)
    uneven = simulate_fabric(w, PLATFORM, "expert-wave", runs_per_row=4)
    assert uneven.span_ns > crowd.span_ns


def test_attention_residual_is_the_drain_of_the_last_wave():
    w = AttentionWorkload(16384, 4, 346_500.0, tiles_per_cta=2, roles="separate", destinations="alternating")
    r = simulate_attention(w, PLATFORM)
    assert (r.waves, r.last_wave) == (2, 108)
    assert r.control_ns == pytest.approx(346_500.0)
    sent = 108 * 65536 * 7 / 8 / (717 * 365 / 372)
    assert r.residual_ns == pytest.approx(sent - 1520, abs=600)  # what drains while the last bursts are issued
    coupled = simulate_attention(AttentionWorkload(16384, 4, 346_500.0, tiles_per_cta=2), PLATFORM, completion_coupled=True)
    assert coupled.residual_ns > 1.8 * r.residual_ns


def test_routing_counts_add_up_and_skew_orders():
    flat, skewed = routing.balanced(1000, 32, 4), routing.power(1000, 32, 4, 1.2, seed=3)
    for load in (flat, skewed):
        assert load.counts.sum() == 4000
        assert load.counts.max() <= 1000
    assert flat.gini == 0
    assert 0.3 < skewed.gini < 0.8
    assert skewed.max_over_mean > 3
    assert skewed.ranks(8).sum() == 4000


def test_trace_opens(tmp_path: Path):
    r = simulate_moe(small(), PLATFORM, "interleaved", trace=True)
    path = write_trace(tmp_path / "trace.json", r.timeline, 4456448, instances=3, ctas=2)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"tensor cores", "issuing role"}
    counters = [e for e in events if e["ph"] == "C"]
    assert all(e["args"]["Q"] == 4456448 and e["args"]["outstanding"] <= 4456449 for e in counters)
    stamps = [e["ts"] for e in counters]
    assert stamps == sorted(stamps)
    loops = [e for e in trace_events(r.timeline, instances=74) if "mainloop" in e["name"]]
    assert len(loops) == r.order.tiles


# ---- bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate": 200}, "intermediate: 200 must be a multiple of the tile, 128"),
        ({"hidden": 300}, "hidden: 300 must be a multiple of 256"),
        ({"top_k": 17}, "top_k: 17 is more than the 16 experts"),
        ({"tokens": 0}, "tokens: 0 must be a whole number of at least 1"),
        ({"experts": 12}, "experts: 12 must be a multiple of the 8 ranks"),
        ({"mma_l1_ns": math.nan}, "mma_l1_ns: nan"),
        ({"weight_bits": 6}, "weight_bits: 6 must be 4 or 8"),
        ({"dispatch": "fetch"}, "dispatch: 'fetch'"),
        ({"routing": routing.balanced(64, 16, 2)}, "routing: made for 64 tokens"),
    ],
)
def test_impossible_workloads(changes, words):
    with pytest.raises(XStageError) as error:
        small(**changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_arguments(tmp_path: Path):
    with pytest.raises(XStageError, match="method: 'bulk' is not in platform 'paper-8gpu'"):
        simulate_moe(small(), PLATFORM, "interleaved", method="bulk")
    with pytest.raises(XStageError, match="order: 'random' is unknown"):
        simulate_moe(small(), PLATFORM, "random")
    with pytest.raises(XStageError, match="lead_rows: 0 must be at least 1"):
        simulate_moe(small(), PLATFORM, "interleaved", lead_rows=0)
    with pytest.raises(XStageError, match="roles: 'wizards'"):
        run_order(linear2(), 4, LINK, 0, 1, 1, 1, roles="wizards")
    with pytest.raises(XStageError, match="tokens: 5000 must be a multiple of 1024"):
        AttentionWorkload(5000, 4, 1e6)
    with pytest.raises(XStageError, match="shape: 'GPT' is unknown"):
        shapes.shape("GPT")
    wrong = tmp_path / "routing.json"
    wrong.write_text("[1, 2, 3, 4]")
    with pytest.raises(XStageError, match="adds up to 10, must be tokens · top_k = 8"):
        routing.from_file(wrong, 4, 4, 2)
    wrong.write_text("[9, -1, 0, 0]")
    with pytest.raises(XStageError, match="gives expert 0 9 tokens"):
        routing.from_file(wrong, 4, 4, 2)
    wrong.write_text("{}")
    with pytest.raises(XStageError, match="list of whole numbers"):
        routing.from_file(wrong, 4, 4, 2)
    with pytest.raises(XStageError, match="cannot be read"):
        routing.from_file(tmp_path / "none.json", 4, 4, 2)
