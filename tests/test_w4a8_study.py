"""Arithmetic, grouping and table of the study of four-bit weights. Not covered: timing itself (needs GPUs)."""

import json
from pathlib import Path

import pytest

from xstage.errors import UnsuitableMachine, XStageError
from xstage.studies import w4a8 as study
from xstage.studies.w4a8_table import w4a8_gemm_table, w4a8_table


def row(shape: str, tokens: int, w8: float, w4: float) -> dict[str, object]:
    times = {"w8a8": {"slowest_ns": w8}, "w4a8": {"slowest_ns": w4}}
    return {
        "shape": shape, "tokens": tokens, "times": times,
        "derived": study.derived({"w8a8": w8, "w4a8": w4}, {"w8a8": 1000, "w4a8": 531}),
    }  # fmt: skip


def test_small_sizes_share_a_pair_of_layers() -> None:
    assert study.parts(study.SIZES) == [[64, 128, 256, 512], [8192]]
    assert study.parts([8192, 1024, 512]) == [[512], [1024], [8192]]
    for bad in ([], [0, 4]):
        with pytest.raises(XStageError, match="sizes: "):
            study.parts(bad)


def test_headline_and_table(tmp_path: Path) -> None:
    assert w4a8_table(tmp_path) == "Not measured yet."
    rows = [row("Hy3", 64, 2e5, 1e5), row("Hy3", 512, 4e5, 8e5), row("Hy3", 8192, 2e6, 3e6), row("GLM-5.2", 8192, 2e6, 2e6)]
    assert {key: entry["value"] for key, entry in study.headline(rows).items()} == {
        "w4a8.speedup_over_w8a8.small.geomean": 1.0, "w4a8.slowdown_at_8192.max": 1.4999, "w4a8.weight_bytes_ratio": 0.531,
    }  # fmt: skip
    assert study.headline([]) == {}
    (tmp_path / "h200x2").mkdir()
    content = {"rows": rows, "settings": {"world": 2, "rounds": 9}}
    (tmp_path / "h200x2" / "w4a8.json").write_text(json.dumps(content), encoding="utf-8")
    lines = w4a8_table(tmp_path).splitlines()
    assert lines[0] == "| tokens per rank | 64 | 512 | 8,192 |"
    assert lines[2:4] == ["| Hy3 | 200 / 100: 2.00 | 400 / 800: 0.50 | 2,000 / 3,000: 0.67 |", "| GLM-5.2 | – | – | 2,000 / 2,000: 1.00 |"]


def test_table_of_the_gemms_alone(tmp_path: Path) -> None:
    """Beside ours the kernel that a layer takes by its rows; of humming's the fastest of each layer."""
    assert w4a8_gemm_table(tmp_path) == "Not measured yet."
    measured = {
        "both": {"ours_fp8": 300, "ours_mxfp4": 250, "ours_mxfp4_narrow": 200},
        "linear1": {"humming_1x128": 70, "humming_1x128_indexed": 60, "humming_per_row": 50},
        "linear2": {"humming_1x128": 40, "humming_1x128_indexed": 45, "humming_per_row": 30},
    }  # fmt: skip
    rows = [
        {"shape": "Hy3", "tokens": n, "rows": load * 96, "experts": 96, "layer": layer, "contender": name, "time_us": us, "error": None}
        for n, load in ((64, 48), (8192, 49)) for layer, times in measured.items() for name, us in times.items()
    ]  # fmt: skip
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "w4a8-gemm.json").write_text(json.dumps({"rows": rows, "settings": {"rounds": 9}}), encoding="utf-8")
    assert w4a8_gemm_table(tmp_path).splitlines()[2:4] == [
        "| Hy3, 64 | 48 | 300 | 250 | – | 200 | – | 1.50 | 100 | 80 | 0.50 |",
        "| Hy3, 8,192 | 49 | 300 | 250 | – | 200 | – | 1.20 | 100 | 80 | 0.40 |",
    ]  # fmt: skip


def test_needs_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnsuitableMachine, match="bench w4a8: needs two peer-connected GPUs"):
        study.run(str(tmp_path / "w4a8.json"))
