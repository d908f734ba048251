"""The four panels of the paper's figure 3 for any platform: measured points over lines of the model.

Each function takes a platform and a store method and returns a matplotlib `Figure`. Points are medians over launches and ranks (filled:
`fit`, hollow: `held_out`, bar: smallest to largest launch); lines are the model with the platform's tables and touch no sample. A
platform without samples gives lines alone.

Notable: when each producer waits its own gap (`free` samples) phases drift apart and a burst never fills Q, so the line over such points
is the paper's two-term relation max(T_iss⁰, V/R − G); over `aligned` points, and without points, the capacity term is in it.

Colours come from a `Palette`, so that a page can put in sentinels and turn them into CSS variables. Sizes are small on purpose: one
figure is about as wide as a phone, and text stays readable when it is not enlarged.

Not covered: loaded (both-direction) samples, which appear in tables only.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from xstage.burst_gap import Burst, completion_coupled_period_ns, isolated_issue_ns, issue_ns, knee_bytes_per_producer
from xstage.errors import XStageError
from xstage.platform import METHODS, KiB, MiB, Platform
from xstage.samples import Sample, of_table, select

WIDTH, HEIGHT = 3.6, 2.85  # inches; 1 inch = 72 SVG units
_MARKERS = "os^Dv"
_LABELLED_GAP_BYTES = (8 * KiB, 16 * KiB, 32 * KiB, 64 * KiB)
FORMATS = ("svg", "png", "pdf")


@dataclass(frozen=True)
class Palette:
    """Colours of a chart: `ink` for text, `muted` for axes and secondary text, `grid`, `paper` behind text, `series` in drawing order."""

    ink: str = "#1c2430"
    muted: str = "#5b6675"
    grid: str = "#e1e5ea"
    paper: str = "#ffffff"
    series: tuple[str, ...] = ("#0a6ebd", "#c04a00", "#00795a", "#a5418a", "#7a5b00")


PLAIN = Palette()


def issue_against_gap(platform: Platform, method: str = "st_global", palette: Palette = PLAIN) -> Figure:
    """Panel (a): issue time T_iss in µs against the gap G in µs, per bytes per producer, with the local-store control."""
    producers, sizes, samples = _gap_sweep(platform, method)
    gaps = _gap_axis(platform, method, producers, sizes, samples)
    with _style(palette):
        figure, axes = _axes("gap between bursts (µs)", "issue time (µs)")
        top = max(_highest(samples, _issue), 1.0)
        for i, size in enumerate(sizes):
            colour = _colour(palette, i)
            line = _model(platform, method, producers, size, gaps, samples)
            top = max(top, float(line.max()))
            axes.plot(gaps / 1e3, line / 1e3, color=colour, zorder=2)
            _points(axes, select(samples, bytes_per_producer=size, destination="peer"), _gap, _issue, colour, i)
            at = 0.82 * line[0]
            spot = float(np.interp(-at, -line, gaps)) / 1e3 + 0.025 * float(gaps[-1]) / 1e3
            if line[0] > 2 * line[-1]:
                _text(axes, spot, at / 1e3, f"{size / KiB:g}{' KiB' if i == len(sizes) - 1 else ''}", colour, ha="left")
        control = select(samples, destination="local")
        if control:
            _points(axes, control, _gap, _issue, palette.muted, 0, marker="x")
            size = control[0].bytes_per_producer
            _text(axes, gaps[-1] / 1e3, top / 1e3, f"×  local stores, {_bytes(size)}", palette.muted, ha="right")
        axes.set(xlim=(0, gaps[-1] / 1e3 * 1.02), ylim=(0, 1.08 * top / 1e3))
        _key(axes, f"{producers:g} producers, KiB each", bool(samples), palette)
    return figure


def period_against_gap(platform: Platform, method: str = "st_global", palette: Palette = PLAIN) -> Figure:
    """Panel (b): burst start-to-start time in µs against the gap, with the line of an issuer that waits for completion."""
    producers, sizes, samples = _gap_sweep(platform, method)
    samples = select(samples, destination="peer")
    gaps = _gap_axis(platform, method, producers, sizes, samples)
    with _style(palette):
        figure, axes = _axes("gap between bursts (µs)", "period (µs)")
        top = _highest(samples, _period)
        for i, size in enumerate(sizes):
            colour = _colour(palette, i)
            line = _model(platform, method, producers, size, gaps, samples) + gaps
            top = max(top, float(line.max()))
            axes.plot(gaps / 1e3, line / 1e3, color=colour, zorder=2)
            _points(axes, select(samples, bytes_per_producer=size), _gap, _period, colour, i)
        for i, size in enumerate(sizes):
            level = float(issue_ns(Burst(producers, size, 0.0), platform, method))
            said = f"{size / KiB:g}{' KiB' if i == len(sizes) - 1 else ''}"
            _text(axes, 0.015 * gaps[-1] / 1e3, (level - 0.016 * top) / 1e3, said, _colour(palette, i), ha="left", va="top")
        shown = 32 * KiB if 32 * KiB in sizes else sizes[-1]
        coupled = completion_coupled_period_ns(Burst(producers, shown, gaps), platform, method)
        axes.plot(gaps / 1e3, coupled / 1e3, color=palette.muted, linestyle=(0, (4, 3)), zorder=1)
        top = 1.2 * top / 1e3
        at = 0.93 * top
        _text(axes, at - float(coupled[0]) / 1e3 - 0.09 * gaps[-1] / 1e3, at, f"if it waited for\ncompletion, {_bytes(shown)}",
              palette.muted, ha="right", va="center")  # fmt: skip
        axes.set(xlim=(0, gaps[-1] / 1e3 * 1.02), ylim=(0, top))
        _key(axes, f"{producers:g} producers, KiB each", bool(samples), palette)
    return figure


def isolated_bursts(platform: Platform, method: str = "st_global", palette: Palette = PLAIN) -> Figure:
    """Panel (c): issue time in µs of one burst into an empty path against KiB per producer, with the knee, per producers K."""
    table = platform.method(method)
    samples = select(of_table(platform.samples, method), mode="isolated", destination="peer", loaded=False)
    counts = _spread(sorted({s.producers for s in samples}) or [int(max(table.capacity_producers))], 5)
    biggest = counts[-1]
    knee, holds = _knee(platform, method, biggest), float(table.capacity_bytes(biggest)) / biggest
    last = max((s.bytes_per_producer for s in samples), default=2.5 * min(knee, 4 * holds))
    sizes = np.linspace(last / 400, last, 400)
    with _style(palette):
        figure, axes = _axes("burst size per producer (KiB)", "issue time (µs)")
        ends = []
        for i, k in enumerate(counts):
            colour = _colour(palette, i)
            line = isolated_issue_ns(Burst(k, sizes), platform, method)
            axes.plot(sizes / KiB, line / 1e3, color=colour, zorder=2)
            _points(axes, select(samples, producers=k), _size, _issue, colour, i)
            ends.append((float(line[-1]) / 1e3, f"{'K=' if k == counts[-1] else ''}{k:g}", colour))
        top = max(*(e[0] for e in ends), _highest(samples, _issue) / 1e3, 1e-3)
        if knee < last:
            height = float(isolated_issue_ns(Burst(biggest, knee), platform, method)) / 1e3
            axes.plot([knee / KiB] * 2, [height, 0.42 * top], color=palette.muted, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
            left = max(knee - 0.1 * last, 0.015 * last) / KiB
            said = f"knee {knee / KiB:.0f} KiB\n({biggest * knee / MiB:.1f} MiB in all)"
            _text(axes, left, 0.45 * top, said, palette.ink, ha="left", va="bottom")
            x = knee + 0.6 * (last - knee)
            y = float(isolated_issue_ns(Burst(biggest, x), platform, method))
            _text(axes, x / KiB - 0.03 * last / KiB, y / 1e3, "(V − Q)/R", palette.ink, ha="right", va="bottom")
        for y, (_, label, colour) in zip(_apart([e[0] for e in ends], 0.075 * top), ends, strict=True):
            _text(axes, 1.025 * last / KiB, y, label, colour, ha="left", va="center", clip=False)
        axes.set(xlim=(0, last / KiB), ylim=(0, 1.08 * top))
        _key(axes, "K producers together", bool(samples), palette)
    return figure


def shared_drain(platform: Platform, method: str = "st_global", palette: Palette = PLAIN) -> Figure:
    """Panel (d): period in µs of bursts without a gap against the burst V = K·B in MiB, over splits K/B, with the line V/R."""
    table = platform.method(method)
    samples = [s for s in _periodic(platform, method) if s.gap_ns == 0 and s.destination == "peer"]
    counts = _spread(sorted({s.producers for s in samples}), 5)
    most = max(counts, default=max(table.rate_producers))
    rate = float(table.drain_rate(most))
    last = max((float(s.burst_bytes) for s in samples), default=2 * float(table.capacity_bytes(most)))
    with _style(palette):
        figure, axes = _axes("burst size V, all producers (MiB)", "period without a gap (µs)")
        axes.plot([0, last / MiB], [0, last / rate / 1e3], color=palette.ink, zorder=2)
        _text(axes, 0.59 * last / MiB, 0.6 * last / rate / 1e3, f"V/R,  R = {rate:.0f} GB/s  ", palette.ink, ha="right", va="bottom")
        for i, k in enumerate(counts):
            chosen = select(samples, producers=k)
            _points(axes, chosen, _volume, _period, _colour(palette, i), i, size=4)
            axes.plot([], [], _MARKERS[i % len(_MARKERS)], color=_colour(palette, i), markersize=4, label=f"{k}")
        if counts:
            legend = axes.legend(title="producers", loc="lower right", frameon=False, handletextpad=0.2, labelspacing=0.3, borderpad=0.1)
            legend.get_title().set_color(palette.muted)
            for text, i in zip(legend.get_texts(), range(len(counts)), strict=True):
                text.set_color(_colour(palette, i))
        axes.set(xlim=(0, 1.04 * last / MiB), ylim=(0, 1.08 * max(last / rate, _highest(samples, _period)) / 1e3))
        _key(axes, "bursts back to back", bool(samples), palette)
    return figure


CHARTS = {
    "issue-against-gap": issue_against_gap,
    "period-against-gap": period_against_gap,
    "isolated-bursts": isolated_bursts,
    "shared-drain": shared_drain,
}
"""The four panels by file name, in the paper's order (a) to (d)."""


def charts_of(method: str) -> dict[str, Callable[..., Figure]]:
    """The panels that a table has: when stores have left the SM is seen in isolated bursts only."""
    return {n: c for n, c in CHARTS.items() if method in METHODS or n == "isolated-bursts"}


def save_charts(folder: str | os.PathLike[str], platform: Platform, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write every chart of every store method as `<platform>-<method>-<chart>.<format>`; returns the paths.

    Raises:
        XStageError: an unknown format, or the folder cannot be made or written.
    """
    for wanted in formats:
        if wanted not in FORMATS:
            raise XStageError(f"formats: {wanted!r} is unknown, known are {', '.join(FORMATS)}")
    target = Path(folder)
    paths = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for method in platform.methods:
            for name, chart in charts_of(method).items():
                figure = chart(platform, method)
                for wanted in formats:
                    path = target / f"{platform.name}-{method}-{name}.{wanted}"
                    with _style(PLAIN):
                        figure.savefig(path, dpi=200, metadata={"Date": None} if wanted == "svg" else None)
                    paths.append(path)
    except OSError as error:
        raise XStageError(f"folder: {target} cannot be written: {error.strerror}") from None
    return paths


def svg_text(figure: Figure) -> str:
    """The figure as SVG whose text is text; equal figures give equal SVG."""
    buffer = io.StringIO()
    with _style(PLAIN):  # fonttype and salt count when the figure is saved; its colours were fixed when it was drawn
        figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


@contextmanager
def _style(palette: Palette) -> Iterator[None]:
    settings = {
        "svg.fonttype": "none", "svg.hashsalt": "xstage", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 8,
        "text.color": palette.ink, "axes.labelcolor": palette.ink, "axes.edgecolor": palette.muted, "xtick.color": palette.muted,
        "ytick.color": palette.muted, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": palette.grid, "grid.linewidth": 0.7, "axes.axisbelow": True, "lines.linewidth": 1.4, "figure.facecolor": "none",
        "axes.facecolor": "none", "savefig.facecolor": "none" if palette is not PLAIN else palette.paper, "axes.labelsize": 8,
        "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "legend.fontsize": 7.5, "legend.title_fontsize": 7.5, "axes.unicode_minus": True,
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield


def _axes(x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_axes((0.13, 0.15, 0.75, 0.74))
    axes.set_xlabel(x, labelpad=3)
    axes.set_ylabel(y, labelpad=4)
    axes.tick_params(length=3)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    return figure, axes


def _key(axes: Any, said: str, measured: bool, palette: Palette) -> None:
    """One line over the axes that says what is drawn; a title inside the picture would be lost on a phone."""
    axes.text(0, 1.035, said, transform=axes.transAxes, color=palette.ink, fontsize=8, ha="left", va="bottom")
    drawn = "points measured, lines model" if measured else "model only, no samples"
    axes.text(1.155, 1.035, drawn, transform=axes.transAxes, color=palette.muted, fontsize=7.5, ha="right", va="bottom")


def _text(axes: Any, x: float, y: float, text: str, colour: str, ha: str, va: str = "center", clip: bool = True) -> None:
    axes.text(x, y, text, color=colour, fontsize=7.5, ha=ha, va=va, clip_on=clip, zorder=5, linespacing=1.15)


def _points(
    axes: Any,
    samples: Iterable[Sample],
    x: Callable[[Sample], float],
    y: Callable[[Sample], float],
    colour: str,
    index: int,
    marker: str = "",
    size: float = 3.2,
) -> None:
    """Medians per x over launches and ranks; held-out launches hollow, a bar from the smallest to the largest."""
    marker = marker or _MARKERS[index % len(_MARKERS)]
    chosen = list(samples)
    for role, face in (("fit", colour), ("held_out", "none")):
        cells: dict[float, list[float]] = {}
        for sample in chosen:
            value = y(sample)
            if sample.role == role and value > 0:
                cells.setdefault(x(sample), []).append(value)
        for at, values in sorted(cells.items()):
            low, middle, high = min(values), float(np.median(values)), max(values)
            if high - low > 0.02 * middle:
                axes.plot([at, at], [low / 1e3, high / 1e3], color=colour, linewidth=0.7, alpha=0.6, zorder=3)
        at_all = sorted(cells)
        middles = [float(np.median(cells[a])) / 1e3 for a in at_all]
        scale = 1.0 if role == "fit" else 1.5
        axes.plot(at_all, middles, linestyle="none", marker=marker, color=colour, markerfacecolor=face, markersize=size * scale,
                  markeredgewidth=0.8, zorder=4, clip_on=False)  # fmt: skip


def _highest(samples: Iterable[Sample], y: Callable[[Sample], float]) -> float:
    return max(map(y, samples), default=0.0)


def _gap_sweep(platform: Platform, method: str) -> tuple[float, list[float], list[Sample]]:
    """Producers, bytes per producer and samples of the sweep over gaps: the producer count with the most gaps."""
    table = platform.method(method)
    samples = _periodic(platform, method)
    gaps: dict[int, set[float]] = {}
    for sample in samples:
        if sample.destination == "peer":
            gaps.setdefault(sample.producers, set()).add(sample.gap_ns)
    if not gaps:
        sizes = [b for b in table.floor_bytes if b in _LABELLED_GAP_BYTES] or [table.floor_bytes[len(table.floor_bytes) // 2]]
        return max(table.capacity_producers), sizes, []
    producers = max(gaps, key=lambda k: (len(gaps[k]), k))
    samples = select(samples, producers=producers)
    swept: dict[int, set[float]] = {}
    for sample in samples:
        if sample.destination == "peer":
            swept.setdefault(sample.bytes_per_producer, set()).add(sample.gap_ns)
    wanted = _spread(sorted(b for b, g in swept.items() if len(g) > 1) or sorted(swept), 4)
    return producers, [float(b) for b in wanted], [s for s in samples if s.bytes_per_producer in wanted or s.destination == "local"]


def _periodic(platform: Platform, method: str) -> list[Sample]:
    """Periodic samples of one direction: `free`, whose window gives the period, or `aligned` where there are none."""
    for mode in ("free", "aligned"):
        found = select(of_table(platform.samples, method), mode=mode, loaded=False)
        if any(s.destination == "peer" for s in found):
            return found
    return []


def _gap_axis(platform: Platform, method: str, producers: float, sizes: Sequence[float], samples: Iterable[Sample]) -> NDArray[np.float64]:
    """Gaps from 0 to the last one measured, or past the longest recovery gap."""
    last = max((_gap(s) * 1e3 for s in samples), default=0.0)
    if last == 0:
        last = 2.0 * producers * max(sizes) / float(platform.method(method).drain_rate(producers))
    return np.linspace(0.0, last, 281)


def _model(
    platform: Platform, method: str, producers: float, size: float, gaps: NDArray[np.float64], samples: Sequence[Sample]
) -> NDArray[np.float64]:  # fmt: skip
    """Issue time over the gaps in ns, without the capacity term where the points drift in phase."""
    if samples and samples[0].mode == "free":
        table = platform.method(method)
        floor = float(table.issue_floor_ns(producers, size))
        return np.asarray(np.maximum(floor, producers * size / float(table.drain_rate(producers)) - gaps))
    return issue_ns(Burst(producers, size, gaps), platform, method)


def _knee(platform: Platform, method: str, producers: float) -> float:
    return float(knee_bytes_per_producer(producers, platform, method))


def _spread(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the sorted values, ends kept."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Heights moved up where needed so that labels stand at least `least` apart, order kept."""
    order = np.argsort(heights, kind="stable")
    moved = np.array(heights, float)
    for before, here in itertools.pairwise(order):
        moved[here] = max(moved[here], moved[before] + least)
    return [float(v) for v in moved]


def _colour(palette: Palette, index: int) -> str:
    return palette.series[index % len(palette.series)]


def _gap(sample: Sample) -> float:
    return (float(np.median(sample.gap_seen_ns)) if sample.gap_seen_ns else sample.gap_ns) / 1e3


def _size(sample: Sample) -> float:
    return sample.bytes_per_producer / KiB


def _volume(sample: Sample) -> float:
    return sample.burst_bytes / MiB


def _issue(sample: Sample) -> float:
    return float(np.median(sample.issue_ns)) if sample.issue_ns else 0.0


def _period(sample: Sample) -> float:
    return sample.period_ns


def _bytes(size: float) -> str:
    return f"{size / KiB:.0f} KiB" if size % KiB == 0 else f"{size / KiB:.1f} KiB"
