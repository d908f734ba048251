"""The MoE kernel on more ranks than were measured: what is simulated, held against the study of two, and what receivers get.

Not covered: whether any of it is true of four or eight GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xstage.errors import XStageError
from xstage.moe.auto_order import PLATFORM, auto_order, tile_ns
from xstage.moe.shapes import shape
from xstage.platform import load_platform
from xstage.simulate.one_list import RESULT_BYTES, row_bytes
from xstage.studies import eight_moe as study
from xstage.studies import one_list
from xstage.studies.eight_tables import eight_moe, eight_moe_capacity, eight_moe_checked

RESULTS = Path(__file__).parent.parent / "results"
FILE = json.loads((RESULTS / "simulated" / "eight_moe.json").read_text())
ORDERS = ("interleaved", "expert_wave")


def test_two_ranks_are_those_of_the_study_of_two() -> None:
    """The file's rows, those that were checked and those that are predicted."""
    before = json.loads((RESULTS / "simulated" / "one_list.json").read_text())["outputs"]["rows"]
    outputs = FILE["outputs"]
    assert [(r["shape"], r["share"]) for r in outputs["checked"]] == [(r["shape"], r["share"]) for r in before]
    two = {r["shape"]: r for r in outputs["rows"] if r["ranks"] == 2}
    for was, now in zip(before, outputs["checked"], strict=True):
        for order in ORDERS:
            assert now[order]["time_ns"] == was[f"{order}_ns"]
            if was["share"] == 0.5:
                assert two[was["shape"]][order] == now[order]


def test_measured_times_stand_as_they_were_measured() -> None:
    layer = json.loads((RESULTS / "h200x2" / "moe-layer-earlier.json").read_text())["rows"]
    for r, found in zip(layer, FILE["outputs"]["checked"], strict=True):
        for order in ORDERS:
            measured, said = found["measured"][order], found[order]
            assert measured["time_ns"] == pytest.approx(r["groups"]["gemm"][f"both_{order}"]["slowest_ns"], rel=1e-4)
            assert measured["local_ns"] == pytest.approx(r["groups"]["gemm"][f"both_{order}_local"]["slowest_ns"], rel=1e-4)
            assert said["time_ns"] == pytest.approx(measured["time_ns"], rel=0.06)
            assert abs(said["stall_ns"] - measured["stall_ns"]) < 1800


def test_a_rank_of_four_by_hand() -> None:
    platform = load_platform(PLATFORM, samples=False)
    row = study.predicted("Qwen3-30B", 4, 256, platform)
    counts = one_list.drawn({"shape": "Qwen3-30B", "tokens": 256, "share": 0.75}, 4)
    assert (len(counts), sum(counts)) == (128, 4 * 256 * 8)
    m = shape("Qwen3-30B")
    tiles = sum(-(-count // 128) for count in counts) / 4 / 132
    assert row["two_gemms_ns"] == pytest.approx(tiles * (6 * tile_ns(m.hidden) + 8 * tile_ns(m.intermediate)))
    rate = float(platform.method("st_global").drain_rate(132))
    assert row["bytes_over_rate_ns"] == pytest.approx(256 * 8 * 0.75 * (row_bytes(m.hidden) + RESULT_BYTES * m.hidden) / rate)
    assert row["bytes_over_rate_ns"] <= row["in_step_ns"] <= 4 * row["bytes_over_rate_ns"]
    assert row["auto"] == auto_order(m, 256, 4)
    assert row[row["faster"]]["time_ns"] == min(row[order]["time_ns"] for order in ORDERS)
    for order in ORDERS:
        assert row[order]["time_ns"] >= row[order]["local_ns"]
        assert row[order]["stall_ns"] == pytest.approx((row[order]["time_ns"] - row[order]["local_ns"]) / (8 * tiles))


@pytest.mark.parametrize(
    ("rows", "ranks", "most"),
    [([2048], 8, 1.0), ([4096], 8, 2.0), ([4096] * 5, 8, 2.0), ([4096], 16, 2.0), ([4096], 2, 2.0), ([1024] * 4, 2, 1.0), ([2], 2, 1.0)],
)
def test_what_the_busiest_receiver_gets(rows: list[int], ranks: int, most: float) -> None:
    """Sixteen row tiles at a time, 2,048 rows."""
    assert study.busiest_receiver(rows, ranks) == most


def test_study(tmp_path: Path) -> None:
    ns = {"linear1": 1e6, **{f"both_{order}{which}": 1e6 for order in ORDERS for which in ("", "_local")}}
    gemm = {name: {"slowest_ns": value} for name, value in ns.items()}
    row = {"shape": "Qwen3-30B", "tokens": 256, "share": 0.5, "rows": [8192, 8064], "groups": {"gemm": gemm}}
    path = tmp_path / "moe-layer.json"
    path.write_text(json.dumps({"study": "moe-layer", "settings": {"world": 2}, "rows": [row]}))
    made = study.run(path, tmp_path, shapes=["Qwen3-30B"], ranks=[2, 4], tokens=256)
    assert json.loads((tmp_path / "eight_moe.json").read_text()) == made
    outputs = made["outputs"]
    checked, (two, four), (more,) = outputs["checked"][0], outputs["rows"], outputs["capacity"]
    assert checked["interleaved"] == two["interleaved"]
    assert checked["measured"]["interleaved"] == {"time_ns": 1e6, "local_ns": 1e6, "stall_ns": 0.0}
    assert made["errors"]["time"]["max"] == pytest.approx(max(abs(checked[order]["time_ns"] / 1e6 - 1) for order in ORDERS), rel=1e-3)
    assert more["per_peer"]["expert_wave"] <= more["doubled"]["expert_wave"] <= four["expert_wave"]["time_ns"]
    assert [eight_moe_checked(made).count("| Qwen3-30B, "), eight_moe(made).count("| Qwen3-30B, ")] == [1, 2]
    assert "| Qwen3-30B, 4 | " in eight_moe_capacity(made)
    path.write_text(json.dumps({"study": "moe"}))
    with pytest.raises(XStageError, match="not of 'moe-layer'"):
        study.run(path, None)
