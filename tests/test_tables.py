"""README, docs and headline.json hold what the result files say."""

import json
from pathlib import Path

import pytest

from xstage.bench.tables import HEADLINE, fill, headline, refresh
from xstage.errors import XStageError

ROOT = Path(__file__).parent.parent


def test_headline_and_tables_are_up_to_date() -> None:
    results = ROOT / "results"
    assert json.loads((results / HEADLINE).read_text(encoding="utf-8")) == headline(results)
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = document.read_text(encoding="utf-8")
        assert fill(text, results, str(document)) == text, f"run: xstage bench docs ({document.name})"


def test_every_headline_figure_names_its_file_and_command() -> None:
    for key, entry in headline(ROOT / "results").items():
        assert (ROOT / entry["file"]).is_file(), key
        assert entry["command"], key
        assert entry["unit"], key


def test_the_newest_file_wins_a_key(tmp_path: Path) -> None:
    for name, created, value in (("b", "2026-01-02", 2.0), ("a", "2026-01-01", 1.0)):
        content = {"created": created, "command": "xstage bench x", "headline": {"k": {"value": value, "unit": "µs"}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert headline(tmp_path)["k"]["value"] == 2.0


def test_unknown_tables_and_open_markers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(XStageError, match="'nothing' is unknown"):
        fill("<!-- generated: nothing -->\n<!-- end -->", tmp_path, "x.md")
    with pytest.raises(XStageError, match="no end marker"):
        fill("<!-- generated: platform -->\n", tmp_path, "x.md")
    with pytest.raises(XStageError, match="results"):
        refresh(tmp_path / "none", [])
