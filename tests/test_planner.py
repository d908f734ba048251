"""Covered: what the planner picks and why, by regime; error bands; leads below the knee; scale on paper; bad input.
Not covered: whether a kernel built by its advice is faster (a measurement)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from xstage.errors import XStageError
from xstage.planner import at_scale, lead_sweep, plan, with_tile
from xstage.platform import load_platform
from xstage.simulate import shapes

PLATFORM = load_platform("paper-8gpu")


def workload(model: str, **changes: object):
    return shapes.moe_workload(model, 8192, **{"routing": "power", "dispatch": "none", **changes})


def test_interleaves_where_linear2_is_short():
    p = plan(workload("Qwen3.5"), PLATFORM)
    assert p.choice.order in ("interleaved", "alternating")
    assert p.gain > 1.2
    assert p.choice.lead_rows is not None
    assert p.choice.lead_rows >= p.lead_knee - 2
    assert p.reason.startswith("Use ")
    assert p.reason.count(". ") == 0
    assert p.candidates == tuple(sorted(p.candidates, key=lambda c: c.time_ns))
    assert all(c.error_ns > 0 for c in p.candidates)


def test_keeps_the_baseline_where_nothing_stalls():
    p = plan(workload("DSv4-Pro", routing="balanced"), PLATFORM)
    assert p.choice == p.baseline
    assert p.gain == 1.0
    assert "within the model's error" in p.reason


def test_warns_of_leads_below_the_knee():
    p = plan(workload("DSv4-Flash"), PLATFORM, leads=[1, 8])
    assert any("lead_rows: 1 is below D_knee = 5" in w for w in p.warnings)
    assert p.choice.lead_rows != 1


def test_sweep_has_a_knee_and_a_cost_of_length():
    times = lead_sweep([workload("Hy3")], PLATFORM, [0.25, 1.5, 24.0])[0]
    assert times[0] > 1.3 * times[1]
    assert times[2] > times[1]
    assert np.all(np.isfinite(times))


def test_tile_changes_mainloops_by_bytes():
    w = workload("Hy3")
    half = with_tile(w, 96)
    assert half.tile_m == 96
    assert half.mma_l2_ns / w.mma_l2_ns == pytest.approx((48 + 128) / (96 + 128))
    assert with_tile(w, 192) is w


def test_scale_limits():
    w = workload("Hy3")
    near, platform = at_scale(w, PLATFORM, 64)
    assert near.expert_counts().sum() == w.expert_counts().sum()
    assert platform.method().rate == PLATFORM.method().rate  # all inside one domain
    _, far = at_scale(w, PLATFORM, 1024, port_rate=50.0)
    assert float(far.method().rate[0]) == pytest.approx(50.0 * 1023 / (1023 - 71))
    _, thin = at_scale(w, PLATFORM, 64, pair_rate=1.0)
    assert float(thin.method().rate[0]) == pytest.approx(63.0)


def test_bad_input():
    w = workload("Hy3")
    with pytest.raises(XStageError, match="leads: 0 must be at least 1"):
        plan(w, PLATFORM, leads=[0])
    with pytest.raises(XStageError, match="methods: empty"):
        plan(w, PLATFORM, methods=[])
    with pytest.raises(XStageError, match="method: 'bulk' is not in platform"):
        plan(w, PLATFORM, methods=["bulk"])
    with pytest.raises(XStageError, match="ranks: 12 must be a multiple"):
        at_scale(w, PLATFORM, 12)
    with pytest.raises(XStageError, match="port_rate 0"):
        at_scale(w, PLATFORM, 16, port_rate=0)


def test_constants_of_the_paper_are_named_on_other_platforms():
    elsewhere = replace(PLATFORM, name="other")
    assert any(w.startswith("staging_ns: not given") for w in plan(workload("Hy3"), elsewhere).warnings)
    given = plan(workload("Hy3"), elsewhere, staging_ns=2610.0)
    assert not any(w.startswith("staging_ns") for w in given.warnings)
    assert given.baseline.time_ns == plan(workload("Hy3"), PLATFORM).baseline.time_ns


def test_two_store_methods_are_both_tried():
    method = PLATFORM.method()
    both = replace(PLATFORM, methods={"st_global": method, "bulk": replace(method, name="bulk", capacity=(9e6,))})
    tried = {c.method for c in plan(workload("Hy3"), both).candidates}
    assert tried == {"st_global", "bulk"}
    assert math.isfinite(plan(workload("Hy3"), both).gain)
