"""Charts and the page: what is drawn, that the page stands alone, is accessible, escapes its input, and is quick.

Measured platforms here are SYNTHETIC. Not covered: how it looks; that was judged on screenshots at desktop and phone width, light and dark.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from xstage.burst_gap import Burst, completion_coupled_period_ns, isolated_issue_ns
from xstage.design import audit, load_design
from xstage.errors import XStageError
from xstage.platform import KiB, MiB, Platform
from xstage.report.charts import CHARTS, isolated_bursts, issue_against_gap, period_against_gap, save_charts, shared_drain
from xstage.report.page import origin, render, write_page
from xstage.samples import select


@pytest.fixture(scope="module")
def page(measured: Platform) -> str:
    return render(measured, [audit(load_design("attention-a2a-h200"), measured)], ["A note <b>on</b> top."])


def texts(figure: Figure) -> str:
    return " | ".join(t.get_text() for t in figure.axes[0].texts)


def lines(figure: Figure, marker: bool) -> list[Any]:
    """Lines with (points) or without (model) markers that hold more than a dash or a bar."""
    return [x for x in figure.axes[0].lines if (x.get_marker() not in ("None", "", None)) == marker and len(x.get_xdata()) > 2]


class Outline(HTMLParser):
    """Tags in order, ids, and what is referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        self.ids += [v for k, v in attrs if k == "id" and v]

    handle_startendtag = handle_starttag  # type: ignore[assignment]


def outline(text: str) -> Outline:
    parser = Outline()
    parser.feed(text)
    return parser


# ---- charts -----------------------------------------------------------------------------------------------------------------


def test_issue_against_gap_draws_every_size_and_the_control(measured: Platform) -> None:
    figure = issue_against_gap(measured)
    axes = figure.axes[0]
    assert axes.get_xlabel() == "gap between bursts (µs)"
    assert axes.get_ylabel() == "issue time (µs)"
    assert len(lines(figure, marker=False)) == 4
    assert len(lines(figure, marker=True)) == 2 * 5  # fit and held out, four sizes and the local control
    for label in ("64 KiB", "32", "16", "8", "local stores", "132 producers", "points measured"):
        assert label in texts(figure)


@pytest.mark.parametrize("method", ["st_global", "bulk"])
def test_model_lines_pass_through_the_points(measured: Platform, method: str) -> None:
    """Points of a sweep that was drawn from the model lie on its line within the noise; colours pair them."""
    for chart in (issue_against_gap, period_against_gap):
        figure = chart(measured, method)
        model = {x.get_color(): x for x in lines(figure, marker=False) if x.get_linestyle() == "-"}
        checked = 0
        for points in lines(figure, marker=True):
            if points.get_color() in model:
                line = model[points.get_color()]
                expected = np.interp(points.get_xdata(), line.get_xdata(), line.get_ydata())
                np.testing.assert_allclose(points.get_ydata(), expected, rtol=0.06, atol=0.05)
                checked += 1
        assert checked == 8


def test_period_has_the_completion_coupled_line(measured: Platform) -> None:
    figure = period_against_gap(measured)
    assert "if it waited for\ncompletion, 32 KiB" in texts(figure)
    coupled = [x for x in lines(figure, marker=False) if x.get_linestyle() != "-"]
    assert len(coupled) == 1
    gaps = np.asarray(coupled[0].get_xdata()) * 1e3
    np.testing.assert_allclose(np.asarray(coupled[0].get_ydata()) * 1e3, completion_coupled_period_ns(Burst(132, 32 * KiB, gaps), measured))


def test_aligned_samples_show_the_capacity_term(measured: Platform) -> None:
    """Bursts that start together fill Q: at 64 KiB their issue time does not come down to the floor."""
    aligned = replace(measured, samples=tuple(s for s in measured.samples if s.mode != "free"))
    pairs = (("free", measured), ("aligned", aligned))
    last = {mode: max(x.get_ydata()[-1] for x in lines(issue_against_gap(p), marker=False)) for mode, p in pairs}
    assert last["free"] == pytest.approx(1.06, abs=0.01)
    assert last["aligned"] == pytest.approx((132 * (64 - 26) * KiB) / 372 / 1e3, rel=1e-3)


def test_isolated_bursts_name_the_knee(measured: Platform) -> None:
    figure = isolated_bursts(measured)
    shown = texts(figure)
    for label in ("knee 27 KiB", "(3.5 MiB in all)", "(V − Q)/R", "K=132", "66", "33", "16", "8"):
        assert label in shown
    model = lines(figure, marker=False)
    assert len(model) == 5
    sizes = np.asarray(model[-1].get_xdata()) * KiB
    np.testing.assert_allclose(np.asarray(model[-1].get_ydata()) * 1e3, isolated_issue_ns(Burst(132, sizes), measured))
    assert isolated_bursts(measured, "bulk").axes[0].get_xlabel() == "burst size per producer (KiB)"


def test_shared_drain_lies_on_one_line(measured: Platform) -> None:
    figure = shared_drain(measured)
    assert "R = 372 GB/s" in texts(figure)
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["8", "16", "33", "66", "132"]
    for points in lines(figure, marker=True):
        volumes = np.asarray(points.get_xdata()) * MiB
        np.testing.assert_allclose(np.asarray(points.get_ydata()) * 1e3, volumes / 372, rtol=0.09)


@pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS)
def test_a_published_platform_has_lines_alone(paper: Platform, chart: Any) -> None:
    figure = chart(paper)
    assert not lines(figure, marker=True)
    assert "model only, no samples" in texts(figure)
    assert figure.axes[0].lines


PARTS = [{"mode": "isolated"}, {"mode": "free", "destination": "local"}, {"method": "bulk"}, {"loaded": True}, {"role": "held_out"}]


@pytest.mark.parametrize("kept", PARTS, ids=str)
def test_incomplete_samples_still_give_charts(measured: Platform, kept: dict[str, object]) -> None:
    part = replace(measured, samples=tuple(select(measured.samples, **kept)))
    for chart in CHARTS.values():
        assert chart(part, "st_global").axes


def test_a_path_without_a_knee(measured: Platform) -> None:
    """Producers too slow to fill the path: no knee to draw or to name, nothing infinite in the picture."""
    slow = replace(measured.methods["st_global"], floor=tuple((4e3, 2e4, 4e4, 8e4, 1.6e5, 3.2e5) for _ in range(5)))
    for samples in (measured.samples, ()):
        platform = replace(measured, methods={"st_global": slow}, samples=samples)
        assert "knee" not in texts(isolated_bursts(platform))
        assert "inf" not in re.sub(r"<style.*?</style>", "", render(platform), flags=re.DOTALL).replace("information", "")


def test_points_above_the_model_stay_in_the_picture(measured: Platform) -> None:
    high = tuple(replace(s, issue_ns=[3 * t for t in s.issue_ns], window_ns=3 * s.window_ns) for s in measured.samples)
    for chart in CHARTS.values():
        figure = chart(replace(measured, samples=high))
        top = figure.axes[0].get_ylim()[1]
        assert all(max(points.get_ydata()) <= top for points in lines(figure, marker=True))


def test_text_stays_inside_the_figure(measured: Platform, paper: Platform) -> None:
    """No label is cut off at the edge, whatever the platform."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for platform in (measured, paper):
        for method in platform.methods:
            for chart in CHARTS.values():
                figure = chart(platform, method)
                canvas = FigureCanvasAgg(figure)
                canvas.draw()
                whole = figure.bbox
                axes = figure.axes[0]
                for text in [*axes.texts, axes.xaxis.label, axes.yaxis.label]:
                    box = text.get_window_extent(canvas.get_renderer())
                    if text.get_visible() and text.get_text():
                        inside = whole.x0 <= box.x0 and box.x1 <= whole.x1 + 1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
                        assert inside, (chart.__name__, method, text.get_text())


def test_save_charts(tmp_path: Path, paper: Platform) -> None:
    paths = save_charts(tmp_path / "new", paper)
    assert len(paths) == 8
    assert {p.name for p in paths if p.suffix == ".svg"} == {f"paper-8gpu-st_global-{name}.svg" for name in CHARTS}
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".svg":
            ElementTree.fromstring(content)
            assert b"var(--" not in content
            assert b"#1c2430" in content
        else:
            assert content.startswith(b"\x89PNG")
    again = save_charts(tmp_path / "again", paper, ("svg",))
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in paths if p.suffix == ".svg"]


def test_save_charts_refusals(tmp_path: Path, paper: Platform) -> None:
    with pytest.raises(XStageError, match="formats: 'bmp' is unknown, known are svg, png, pdf"):
        save_charts(tmp_path, paper, ("bmp",))
    (tmp_path / "file").write_text("x")
    with pytest.raises(XStageError, match=r"folder: .* cannot be written"):
        save_charts(tmp_path / "file" / "charts", paper)


# ---- the page ---------------------------------------------------------------------------------------------------------------


def test_page_stands_alone(page: str) -> None:
    """No script, no request: the only addresses are XML namespaces."""
    assert set(re.findall(r"https?://[^\"'\s<)]+", page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    tags = set(outline(page).tags)
    assert not tags & {"script", "link", "img", "iframe", "object"}
    assert "@import" not in page
    assert not re.search(r"\bon\w+=\"", page)
    assert all(v.startswith("#") for v in re.findall(r'href="([^"]*)"', page))


def test_page_is_small_and_quick(measured: Platform) -> None:
    start = time.perf_counter()
    text = render(measured, [audit(load_design("attention-a2a-h200"), measured)])
    assert time.perf_counter() - start < 10
    assert len(text.encode()) < 5 * MiB


def test_page_is_accessible(page: str, measured: Platform) -> None:
    found = outline(page)
    assert '<html lang="en">' in page
    assert "width=device-width" in page
    assert len(found.ids) == len(set(found.ids))
    charts = [a for t, a in found.attributes if t == "svg"]
    assert len(charts) == 4 * len(measured.methods)
    for chart in charts:
        assert chart["role"] == "img"
        for ident in (chart["aria-labelledby"] or "").split():
            assert ident in found.ids
    assert found.tags.count("desc") == len(charts)
    assert found.tags.count("table") == found.tags.count("caption") > 4
    levels = [int(t[1]) for t in found.tags if re.fullmatch(r"h[1-6]", t)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    scopes = [a.get("scope") for t, a in found.attributes if t == "th"]
    assert set(scopes) == {"col", "row"}


def test_references_in_charts_resolve(page: str) -> None:
    ids = set(outline(page).ids)
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= ids


def test_colours_follow_the_theme(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    charts = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r'(href="|url\()#[^")]+', "", charts).replace("#000000", ""))
    for name in ("ink", "muted", "grid", "s1", "s5"):
        assert f"var(--{name})" in charts
        assert page.count(f"--{name}: #") == 2  # light and dark
    assert "<text" in charts  # text stays text


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast(page: str) -> None:
    """Text and series colours reach 4.5:1 on the card behind them, in both themes (WCAG AA)."""
    for theme in re.findall(r":root \{ (--ink.*?) \}", page):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", theme))
        back = luminance(colours["paper"])
        for name in ("ink", "muted", "s1", "s2", "s3", "s4", "s5"):
            high, low = sorted((luminance(colours[name]), back), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, colours[name])


def test_page_says_what_it_should(page: str, measured: Platform) -> None:
    plain = re.sub(r"<[^>]+>", " ", re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL))
    for words in ("Measured on the machine described below", "372 GB/s", "3.35 MiB", "27 KiB", "0.41 µs", "1 of 3 quality gates failed",
                  "local control flat in the gap", "✗ failed", "✓ passed", "SYNTHETIC: drawn from the model", "Synthetic GPU",
                  f"{len(measured.samples):,}", "python tests/synthetic.py", "attention-a2a-h200", "reshape", "let at most 85% of it leave",
                  "A note &lt;b&gt;on&lt;/b&gt; top.", "power_cap_w"):  # fmt: skip
        assert words in plain, words


def test_both_directions_at_once_are_shown(page: str, measured: Platform) -> None:
    loaded = [s.rate for s in measured.samples if s.loaded and s.method == "st_global"]
    assert loaded
    assert f"{np.median(loaded):.0f} GB/s each way" in page


def test_published_page(paper: Platform) -> None:
    text = render(paper, [audit(load_design("attention-a2a-paper"), paper)])
    assert "Published numbers, not measured by xstage" in text
    assert "there are no samples to draw" in text
    assert "How far to trust it" not in text
    assert "xstage calibrate" in text
    assert "1024 tokens" in text


def test_origin(paper: Platform, measured: Platform) -> None:
    assert origin(paper) == "published"
    assert origin(measured) == "measured"
    assert origin(replace(paper, origin="measured")) == "shipped"


def test_page_escapes_what_it_is_given(measured: Platform) -> None:
    evil = "<script>alert(1)</script>"
    text = render(replace(measured, name=evil, note=evil, command=evil, fingerprint={evil: [evil]}), [], [evil])
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_equal_input_gives_an_equal_page(measured: Platform, page: str) -> None:
    assert render(measured, [audit(load_design("attention-a2a-h200"), measured)], ["A note <b>on</b> top."]) == page


def test_write_page(tmp_path: Path, paper: Platform) -> None:
    path = write_page(tmp_path / "page.html", paper)
    assert path.read_text(encoding="utf-8") == render(paper)
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(XStageError, match="is a directory"):
        write_page(tmp_path, paper)
    with pytest.raises(XStageError, match="is not a directory"):
        write_page(tmp_path / "missing" / "page.html", paper)


def test_a_laptop_needs_no_torch() -> None:
    code = (
        "import sys, xstage.design, xstage.report.page, xstage.bench.compare; sys.exit('torch' in sys.modules or 'cutlass' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
