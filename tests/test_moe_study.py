"""Arithmetic, routing and table of the MoE layer's study. Not covered: timing itself (needs GPUs)."""

import json
from pathlib import Path

import pytest
import torch

from xstage.bench import tables
from xstage.bench.timing import Times
from xstage.errors import UnsuitableMachine, XStageError
from xstage.studies import moe_layer as study


def at(ns: float) -> Times:
    return Times([[ns - 5], [ns]], [[None]] * 2, 1)


GEMM = {
    "linear1": at(1000), "swiglu": at(1100), "linear2": at(500), "rows": at(700), "rows_local": at(550),
    "deep_gemm_linear1": at(1200), "deep_gemm_linear2": at(800),
}  # fmt: skip
LAYER = {
    "dispatch": at(200), "combine": at(100), "serial": at(2100), "serial_e4m3": at(2000), "eager": at(2500), "deep_gemm_mega": at(5000),
}  # fmt: skip


def test_derived_answers() -> None:
    answers = study.derived({"gemm": GEMM, "layer": LAYER, "torch": {"torch": at(8400)}}, 37_200, 372.0, (2e6, 1e6), "interleaved")
    assert answers == {
        "compute_ns": 1500, "swiglu_over_plain": 1.1, "rows_local_over_plain": 1.1, "rows_remote_ns": 150, "linear1_tflops": 2.0,
        "linear2_tflops": 2.0, "bytes_over_rate_ns": 100, "bound_ns": 151_600, "gemm_over_deepgemm": 0.75,
        "serial_over_bound": round(2100 / 151_600, 4), "serial_over_steps": 1.0, "speedup_over_torch": 4.0,
        "speedup_over_deep_gemm_mega": 2.5,
    }  # fmt: skip
    assert "bound_ns" not in study.derived({"gemm": GEMM}, 1, None, (1.0, 1.0), "interleaved")
    assert study.derived({"layer": LAYER}, 1, 1.0, (1.0, 1.0), "interleaved") == {"speedup_over_deep_gemm_mega": 2.5}


def test_rows_that_go_once_stand_beside_rows_per_pick() -> None:
    fused = {"interleaved": at(2000), "interleaved_once": at(1500)}
    assert study.derived({"layer": fused}, 1, 1.0, (1.0, 1.0), "interleaved")["once_over_per_pick"] == 0.75


def test_bytes_of_a_rank() -> None:
    assert study.sent_bytes(10, 3, 4096) == 10 * (4096 + 128 + 16) + 3 * 8192


def row(share: float) -> dict[str, object]:
    return {
        "shape": "Hy3", "tokens": 8192, "share": share,
        "derived": {"gemm_over_deepgemm": 0.95, "serial_over_bound": 1 + share, "bound_ns": 3e6},
        "groups": {"gemm": {n: t.to_json() for n, t in GEMM.items()}, "layer": {"serial": {"slowest_ns": 3.21e6}}},
    }  # fmt: skip


def test_headline() -> None:
    figures = {key: entry["value"] for key, entry in study.headline([row(0.5), row(0.875)]).items()}
    assert figures == {"moe.serial_over_bound.max": 1.875, "moe.gemm_over_deepgemm.hy3": 0.95, "moe.serial_us.f12.hy3": 3210.0}
    assert study.headline([]) == {}


def test_headline_of_one_kernel() -> None:
    fused = {**LAYER, "interleaved": at(2000), "expert_wave": at(2500), "serial": at(3000), "deep_gemm_mega": at(4000)}
    rows = []
    for share in (0.5, 0.875):
        measured = {"gemm": GEMM, "layer": fused}
        derived = study.derived(measured, 0, None, (1.0, 1.0), "interleaved" if share == 0.5 else "expert_wave")
        assert derived["interleaved_over_wave"] == 1.25
        assert (derived["speedup_unfused"], derived["speedup_public"]) == ((1.5, 2.0) if share == 0.5 else (1.2, 1.6))
        groups = {group: {n: t.to_json() for n, t in times.items()} for group, times in measured.items()}
        rows.append({"shape": "GLM-5.2", "tokens": 8192, "share": share, "derived": derived, "groups": groups})
    figures = {key: entry["value"] for key, entry in study.headline(rows).items()}
    assert figures == {
        "moe.gemm_over_deepgemm.glm52": 0.75, "moe.serial_us.f12.glm52": 3.0, "moe.over_compute_only.f12.glm52": 1.3333,
        "moe.time_us.f12.glm52": 2.0, "moe.time_us.f78.glm52": 2.5, "moe.speedup_unfused.geomean": 1.5, "moe.speedup_public.geomean": 2.0,
        "moe.speedup_public.min": 2.0, "moe.interleaved_over_wave.f78.geomean": 1.25, "moe.interleaved_over_wave.f78.max": 1.25,
    }  # fmt: skip
    few = study.headline([{**rows[0], "tokens": tokens} for tokens in (512, 1024)])
    assert few == {"moe.speedup_public.small.geomean": {"value": 2.0, "unit": "ratio"}}


def test_table_of_few_tokens(tmp_path: Path) -> None:
    assert tables.TABLES["moe-small"](tmp_path) == "Not measured yet."
    (tmp_path / "h200x2").mkdir()
    layer = {**LAYER, "interleaved": at(2000), "expert_wave": at(2500), "serial": at(3000), "deep_gemm_mega": at(4000)}
    groups = {group: {n: t.to_json() for n, t in times.items()} for group, times in {"gemm": GEMM, "layer": layer}.items()}
    content = {"rows": [{"shape": "Hy3", "tokens": 1024, "derived": {"speedup_public": 2.0}, "groups": groups}]}
    (tmp_path / "h200x2" / "moe-layer-small.json").write_text(json.dumps(content))
    assert "| Hy3, 1,024 | 2 | 3 | 2 | 2 | – | 4 | 2.00 |" in tables.TABLES["moe-small"](tmp_path)


def test_table(tmp_path: Path) -> None:
    assert tables.TABLES["moe"](tmp_path) == "Not measured yet."
    (tmp_path / "h200x2").mkdir()
    content = {"settings": {"tokens": 8192, "world": 2}, "rows": [row(0.5)]}
    (tmp_path / "h200x2" / "moe-layer.json").write_text(json.dumps(content))
    assert "| Hy3, 0.5 | 2 | 2 | – | – | 3,210 | 3,000 | 1.50 | – | – | – | – | – | 2 | – | – | – |" in tables.TABLES["moe"](tmp_path)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(XStageError, match="groups: 'all'"):
        study.run(str(tmp_path / "r.json"), groups=["all"])
    with pytest.raises(XStageError, match="shape: 'GPT'"):
        study.run(str(tmp_path / "r.json"), shapes=["GPT"])
    with pytest.raises(XStageError, match="tokens: 0"):
        study.run(str(tmp_path / "r.json"), tokens=0)
    if torch.cuda.device_count() < 2:
        with pytest.raises(UnsuitableMachine, match="bench moe-layer: needs two peer-connected GPUs"):
            study.run(str(tmp_path / "r.json"))
