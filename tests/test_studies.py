"""Covered: the paper's tables within the errors that the result files state, headline keys, charts from the files, generated tables
present in the document (test_tables holds them equal). Not covered: figures that only a GPU can give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xstage.errors import XStageError
from xstage.report import moe_charts
from xstage.studies import moe84, paper, table2, table3, tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "simulated"


@pytest.fixture(scope="module")
def spans():
    return table2.run(out=None, variants=False)


def test_table2_stalls_are_within_the_target_on_every_row(spans):
    for row in spans["outputs"]["rows"]:
        assert abs(row["errors"]["stall_wave_us"]) <= 0.6, row["model"]
        assert abs(row["errors"]["stall_interleaved_us"]) <= 0.6, row["model"]


def test_table2_spans_are_within_the_target_on_all_but_one(spans):
    """DSv4-Pro's wave span is a known miss (docs/simulate.md says why); a change that repairs it should show here."""
    missed = []
    for row in spans["outputs"]["rows"]:
        assert abs(row["errors"]["span_interleaved"]) <= 0.10, row["model"]
        if abs(row["errors"]["span_wave"]) > 0.10:
            missed.append(row["model"])
    assert missed == ["DSv4-Pro"]


def test_table2_wave_spans_do_not_follow_the_mainloop(spans):
    """Mainloops differ by 1.9×, spans of the saturated rows by less than 3%."""
    saturated = [r for r in spans["outputs"]["rows"] if r["model"] != "DSv4-Pro"]
    values = [r["span_wave_us"] for r in saturated]
    assert max(r["mma_l2_us"] for r in saturated) / min(r["mma_l2_us"] for r in saturated) > 1.8
    assert max(values) / min(values) < 1.03
    assert max(values) <= 1.05 * spans["inputs"]["drain_period_us"]


def test_leave_one_out_of_the_staging_constant(spans):
    assert all(abs(r["span_error"]) < 0.07 for r in spans["outputs"]["leave_one_out"])


def test_moe84_summary_near_the_paper():
    r = moe84.run(out=None, variants=False)
    summary = r["outputs"]["summary"]
    assert summary["configurations"] == 84
    assert summary["geomean"] == pytest.approx(paper.MOE84["geomean"], rel=0.05)
    assert summary["min"] == pytest.approx(paper.MOE84["min"], abs=0.01)  # fitted
    assert summary["max"] == pytest.approx(paper.MOE84["max"], rel=0.12)
    by = r["outputs"]["by"]["routing"]
    assert by["power"] > by["balanced"] > 1


def test_table3_residuals_do_not_grow_and_waiting_would():
    series = table3.run(out=None)["outputs"]["series"]
    four = series["FA4 on paper-8gpu"]
    assert max(r["residual_us"] for r in four) < 16  # the paper's issue floor is about 16 µs
    assert four[0]["qloop_us"] == pytest.approx(paper.QLOOP_GAP_8192, rel=0.06)
    assert four[-1]["completion_coupled_us"] > 3 * four[0]["completion_coupled_us"]
    assert all(r["inside_clock_band"] for rows in series.values() for r in rows if r["tokens"] > 8192)


@pytest.mark.parametrize("name", ["table2", "moe84", "table3", "scale", "speed", "lead", "moe_lead", "moe_w4a8", "timelines"])
def test_result_files_say_what_they_are(name):
    r = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert r["kind"] == "xstage-study"
    assert r["origin"] == "simulated"
    assert r["command"].startswith("python -m xstage.studies.")
    for entry in r["headline"].values():
        assert set(entry) == {"value", "unit"}


def test_headline_keys():
    keys: set[str] = set()
    for path in RESULTS.glob("*.json"):
        keys |= set(json.loads(path.read_text(encoding="utf-8"))["headline"])
    assert keys >= {
        "simulate.table2.span_error.max", "simulate.table2.stall_error_us.max", "simulate.moe84.geomean", "simulate.moe84.max",
        "simulate.moe84.min", "simulate.tiles_per_second", "plan.grid_seconds",
    }  # fmt: skip


def test_every_table_stands_in_the_document(tmp_path: Path):
    text = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    for name, draw in tables.TABLES.items():
        assert f"<!-- generated: {name} -->" in text
        with pytest.raises(XStageError, match="is missing, make it with: python"):
            draw(tmp_path)


def test_charts_draw_from_the_files(tmp_path: Path):
    written = moe_charts.write_all(RESULTS, tmp_path)
    assert [p.stem for p in written] == list(moe_charts.CHARTS)
    assert all(p.stat().st_size > 5000 for p in written)
    assert moe_charts.write_all(tmp_path / "none", tmp_path / "out") == []
