"""The design audit: the paper's numbers, the two bounds against the closed forms, completion edges, design files.

Not covered: whether a real kernel behaves as predicted.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from xstage.burst_gap import Burst, issue_ns, period_ns, stall_ns
from xstage.design import EDGES, REQUIRED_EDGES, Design, Interleave, audit, designs, load_design
from xstage.errors import XStageError
from xstage.platform import KiB, MiB, Platform

EDGES_ST = REQUIRED_EDGES["st_global"]


def owner(**changes: object) -> Design:
    base = Design("d", producers=132, tile_m=128, tile_n=128, mainloop_ns=20_000.0, completion_edges=EDGES_ST)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_papers_attention(paper: Platform) -> None:
    result = audit(load_design("attention-a2a-paper"), paper)
    assert result.recovery_gap_ns == pytest.approx(6000, abs=50)  # section 4.3: about 6.0 µs
    assert result.sequence_bound == 1024  # about 1.0 K tokens
    assert result.burst_bytes / MiB == pytest.approx(4.6, abs=0.05)
    assert result.peak_outstanding_bytes / MiB == pytest.approx(4.1, abs=0.05)
    assert result.capacity_bytes / MiB == pytest.approx(4.25)
    assert result.holds
    assert result.action == "piggyback"
    assert result.binding == "capacity"
    assert result.schedule.stall_ns == 0
    assert result.completion_coupled_stall_ns == pytest.approx(148 * 32768 / 717)


def test_attention_waits_below_the_sequence_bound(paper: Platform) -> None:
    design = load_design("attention-a2a-paper")
    assert not audit(replace(design, sequence=896), paper).schedule.holds
    assert audit(replace(design, sequence=1024), paper).schedule.holds
    short = audit(replace(design, sequence=512), paper)
    assert short.action == "reshape"
    # Equation 18: V/R − G − T_iss⁰, and T_iss⁰ + G + Δt = V/R.
    assert short.schedule.stall_ns == pytest.approx(148 * 32768 / 717 - 4 * 790 - 760)
    covered = audit(replace(design, sequence=512, cover_ns=1000.0), paper)
    assert covered.schedule.exposed_ns == pytest.approx(short.schedule.stall_ns - 1000)


# Table 2: span in wave order and interleaved, Linear-2 and Linear-1 mainloop, predicted and measured stall (µs).
TABLE2 = {
    "DiT-MoE": (9.93, 3.77, 5.30, 9.77, 4.63, 4.18), "Qwen3.5": (9.17, 3.82, 4.24, 14.40, 4.94, 4.31),
    "Hy3": (9.68, 3.59, 6.09, 10.79, 3.60, 3.08), "MiMo-V2.5": (9.22, 3.94, 7.77, 7.57, 1.45, 0.71),
    "GLM-5.2": (9.53, 3.63, 7.99, 18.77, 1.54, 0.92), "DSv4-Flash": (9.48, 3.83, 8.01, 7.40, 1.47, 0.65),
    "DSv4-Pro": (7.88, 3.55, 9.54, 11.57, 0.0, 0.06),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE2)
def test_table_2_from_one_burst_size(paper: Platform, row: str) -> None:
    """The burst size inferred from one row predicts the stalls of all seven, in wave order and interleaved."""
    span, interleaved_span, linear2, linear1, predicted, measured = TABLE2[row]
    design = replace(load_design("megamoe-qwen3.5-paper"), mainloop_ns=1e3 * linear2, issue_floor_ns=1e3 * interleaved_span,
                     interleave=Interleave(1, 2, 1e3 * linear1))  # fmt: skip
    result = audit(design, paper)
    assert result.schedule.exposed_ns / 1e3 == pytest.approx(predicted, abs=0.8)
    assert result.schedule.exposed_ns / 1e3 == pytest.approx(measured, abs=0.8)
    assert result.interleaved is not None
    assert result.interleaved.exposed_ns == 0
    if row != "DSv4-Pro":  # not saturated: its wave span is above the floor for reasons outside the model
        assert result.schedule.issue_ns / 1e3 == pytest.approx(span, abs=0.8)
        assert result.action == "reshape"
        assert result.binding == "rate"
        assert result.interleaved.holds
        assert result.interleaved.issue_ns / 1e3 == pytest.approx(interleaved_span)


def test_shipped_megamoe_rows(paper: Platform) -> None:
    stalled, free = (audit(load_design(f"megamoe-{n}-paper"), paper) for n in ("qwen3.5", "dsv4-pro"))
    assert stalled.schedule.exposed_ns == pytest.approx(4930, abs=5)
    assert "interleaving the Linear-1 tiles is enough" in stalled.sentence
    assert free.schedule.exposed_ns == 0
    assert free.action == "piggyback"
    assert any("rate bound is within 5%" in n for n in free.notes)


@pytest.mark.parametrize("gap", [0.0, 3_000.0, 8_000.0, 20_000.0])
@pytest.mark.parametrize("tile_n", [32, 64, 96, 128, 256])
def test_owner_that_issues_follows_the_closed_forms(measured: Platform, gap: float, tile_n: int) -> None:
    result = audit(owner(tile_n=tile_n, gap_ns=gap), measured)
    burst = Burst(132, 128 * tile_n * 2, gap)
    assert result.schedule.issue_ns == pytest.approx(float(issue_ns(burst, measured)))
    assert result.schedule.period_ns == pytest.approx(float(period_ns(burst, measured)))
    assert result.schedule.stall_ns == pytest.approx(float(stall_ns(burst, measured)))
    assert result.holds == (result.schedule.stall_ns < 1e-9)  # equation 10 holds exactly when nothing is held up


def test_equation_14(paper: Platform) -> None:
    """n₂V/(n₂(T_iss⁰ + T_L2) + n₁T_L1) ≤ R, and equation 13: interleaved work takes its own length off the stall."""
    design = Design("d", producers=148, tile_m=128, tile_n=128, mainloop_ns=2_000.0, completion_edges=EDGES_ST,
                    interleave=Interleave(3, 2, 1_000.0))  # fmt: skip
    result = audit(design, paper)
    assert result.interleaved is not None
    assert result.interleaved.injection_rate == pytest.approx(2 * 148 * 32768 / (2 * (760 + 2000) + 3 * 1000))
    assert result.interleaved.stall_ns == pytest.approx(result.schedule.stall_ns - 1500)
    assert not result.interleaved.holds
    assert "not enough" in result.sentence


def test_staging_lets_issue_and_mainloop_overlap(measured: Platform) -> None:
    volume, rate = 132 * 32768, 372.0
    staged = audit(owner(staging_slots=2, mainloop_ns=9_000.0), measured)
    assert staged.schedule.issue_ns == pytest.approx(volume / rate)  # saturated: the issuing role has no gap left
    assert staged.schedule.exposed_ns == pytest.approx(volume / rate - 9_000)  # equation 15
    assert staged.schedule.period_ns == pytest.approx(volume / rate)  # max(T_mma, V/R)
    assert audit(owner(staging_slots=2, mainloop_ns=9_000.0, gap_ns=2_000.0), measured).schedule.issue_ns == pytest.approx(
        volume / rate - 2_000
    )
    slow = audit(owner(staging_slots=2, mainloop_ns=30_000.0), measured)
    assert slow.schedule.exposed_ns == 0
    assert slow.schedule.period_ns == 30_000


def test_capacity_bound_alone(measured: Platform) -> None:
    """A 32 KiB tile from all 132 producers does not fit 26 KiB each; half of it does."""
    whole, half = audit(owner(), measured), audit(owner(remote_share=0.5), measured)
    assert whole.schedule.holds
    assert whole.capacity_margin < 0
    assert (whole.action, whole.binding) == ("reshape", "capacity")
    assert whole.schedule.issue_ns == pytest.approx((132 * 32768 - 132 * 26 * KiB) / 372)
    assert half.action == "piggyback"
    assert half.burst_bytes == whole.burst_bytes / 2
    fitting = whole.largest_burst_bytes / whole.burst_bytes
    assert f"{fitting:.0%}" in whole.sentence
    assert audit(owner(remote_share=fitting - 0.01, issue_floor_ns=whole.issue_floor_ns), measured).capacity_margin > 0


def test_h200_attention_design_is_at_the_capacity_bound(measured: Platform) -> None:
    result = audit(load_design("attention-a2a-h200"), measured)
    assert result.design == "attention-a2a-h200"
    assert result.schedule.holds
    assert result.capacity_margin < 0
    assert result.schedule.stall_ns == pytest.approx(1770, rel=0.1)  # (V − Q)/R − T_iss⁰ of the synthetic platform


@pytest.mark.parametrize("method", ["st_global", "bulk"])
def test_a_dropped_edge_is_refused_by_name(measured: Platform, method: str) -> None:
    edges = REQUIRED_EDGES[method]
    assert audit(owner(method=method, completion_edges=edges, remote_share=0.2), measured).action == "piggyback"
    for dropped in edges:
        result = audit(owner(method=method, completion_edges=tuple(e for e in edges if e != dropped)), measured)
        assert result.action == "refuse"
        assert result.missing_edges == (dropped,)
        assert dropped in result.sentence
        assert EDGES[dropped] in result.sentence


def test_arithmetic_and_rate_give_the_mainloop() -> None:
    design = Design("d", producers=1, tile_m=128, tile_n=256, mainloop_flops=2 * 128 * 256 * 1024, tflops_per_producer=5.0)
    assert design.mainloop == pytest.approx(2 * 128 * 256 * 1024 / 5e12 * 1e9)
    assert design.remote_bytes_per_producer == 64 * KiB


def test_text_and_json(paper: Platform) -> None:
    result = audit(load_design("megamoe-qwen3.5-paper"), paper)
    text = result.text()
    assert "4.93 µs" in text
    assert "broken by 116.3%" in text
    assert text.count("\n") < 30
    assert max(map(len, text.splitlines()[:-3])) < 120
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert data["action"] == "reshape"
    assert data["schedule"]["exposed_ns"] == result.schedule.exposed_ns
    assert data["predicted"] is True
    assert any("extrapolated" in n for n in data["notes"])


def test_failed_gates_are_noted(measured: Platform) -> None:
    assert any("local control flat in the gap" in n for n in audit(owner(), measured).notes)


def test_unknown_method_of_a_platform(paper: Platform) -> None:
    with pytest.raises(XStageError, match="method: 'bulk' is not in platform 'paper-8gpu'"):
        audit(owner(method="bulk"), paper)


def test_shipped_designs_load() -> None:
    assert set(designs()) >= {"attention-a2a-paper", "attention-a2a-h200", "megamoe-qwen3.5-paper", "megamoe-dsv4-pro-paper"}
    for name in designs():
        design = load_design(name)
        assert design.name == name
        assert design.note
        assert not design.missing_edges


BAD = [
    ({"producers": 0}, "producers: 0 must be"), ({"producers": math.nan}, "producers: nan"), ({"tile_m": 0}, "tile_m: 0"),
    ({"tile_n": -1}, "tile_n: -1"), ({"out_bytes": 0}, "out_bytes: 0"), ({"remote_share": 0}, "remote_share: 0"),
    ({"remote_share": 1.5}, "remote_share: 1.5 must be at most 1"), ({"mainloop_ns": -5}, "mainloop_ns: -5"),
    ({"mainloop_ns": math.inf}, "mainloop_ns: inf"), ({"gap_ns": -1}, "gap_ns: -1"), ({"staging_slots": 0}, "staging_slots: 0"),
    ({"cover_ns": math.nan}, "cover_ns: nan"), ({"method": "tma"}, "method: 'tma' is unknown, known are st_global, bulk"),
    ({"kind": "conv"}, "kind: 'conv' is unknown"), ({"completion_edges": ("hope",)}, "completion_edges: 'hope' is unknown"),
    ({"kind": "attention"}, "needs kv_tile_ns and kv_tile"), ({"mainloop_ns": None}, "mainloop_ns: is missing"), ({"name": ""}, "name: ''"),
    ({"bytes_per_producer": 0}, "bytes_per_producer: 0"), ({"producers": "many"}, "producers: 'many'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_designs(changes: dict[str, object], message: str) -> None:
    with pytest.raises(XStageError) as error:
        owner(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_design_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    cases = {
        "a = = 1": "not TOML",
        "": "required",
        'name = "x"\nproducers = 1\ntile_m = 1\ntile_n = 1\nmainloop = 3': "unknown key 'mainloop'",
        'name = "x"\nproducers = 1\ntile_m = 1\ntile_n = 1\nmainloop_ns = 3\ncompletion_edges = "all"': "completion_edges must be a list",
        'name = "x"\nproducers = 1\ntile_m = 1\ntile_n = 1\nmainloop_ns = 3\ninterleave = 2': "interleave: a table is needed",
        'name = "x"\nproducers = 1\ntile_m = 1\ntile_n = 1\nmainloop_ns = 3\n[interleave]\nn1 = 0\nn2 = 1\nmainloop_ns = 1': "n1: 0 must",
        'name = "x"\nproducers = nan\ntile_m = 1\ntile_n = 1\nmainloop_ns = 3': "producers: nan",
    }
    for content, message in cases.items():
        path = tmp_path / "design.toml"
        path.write_text(content)
        with pytest.raises(XStageError, match=message):
            load_design(path)
    with pytest.raises(XStageError, match="is a directory"):
        load_design(tmp_path)
    with pytest.raises(XStageError, match="neither a file nor one of the shipped designs: attention-a2a"):
        load_design("nothing")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(XStageError, match="cannot be read"):
        load_design(tmp_path / "binary.toml")
