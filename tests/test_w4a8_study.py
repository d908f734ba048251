"""Arithmetic, grouping and table of the study of four-bit weights. Not covered: timing itself (needs GPUs)."""

import json
from pathlib import Path

import pytest

from xstage.errors import UnsuitableMachine, XStageError
from xstage.studies import w4a8 as study
from xstage.studies.w4a8_table import w4a8_table


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


def test_needs_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnsuitableMachine, match="bench w4a8: needs two peer-connected GPUs"):
        study.run(str(tmp_path / "w4a8.json"))
