"""One self-contained HTML page about a platform: what it does with remote stores, how far to trust that, and what follows for designs.

Notable: no script, no font, no network; charts are inline SVG whose text stays text and whose colours are CSS variables, so the page
follows the reader's light or dark setting; wide tables scroll in their own box, the body never does. The charts are the same as those
of `charts.py`, drawn with sentinel colours that are replaced afterwards.

Not covered: operator benchmarks; the page shows one platform and the audits it is given.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from xstage.burst_gap import knee_bytes_per_producer
from xstage.design import Audit
from xstage.platform import KiB, MiB, Platform, StoreMethod, check_writable, gallery
from xstage.report.charts import CHARTS, Palette, charts_of, svg_text
from xstage.samples import of_table

_METHOD_NAMES = {
    "st_global": "16-byte stores, until issued (st_global)",
    "st_global_source_free": "16-byte stores, until they have left the SM (st_global_source_free)",
    "bulk": "bulk copies, until shared memory is free again (bulk)",
}

_CAPTIONS = {
    "issue-against-gap": (
        "Issue time against gap",
        "How long the sender is held up by one burst when other work of the given length follows each burst. Work between bursts takes "
        "its own length off the issue time until only the bare instructions are left.",
    ),
    "period-against-gap": (
        "Period against gap",
        "Time from burst to burst. It stays at V/R while the gap is short, then follows the gap: the path drains during other work. "
        "A sender that waited for remote completion would be on the dashed line.",
    ),
    "isolated-bursts": (
        "Isolated bursts",
        "One burst into an empty path. Up to the knee it is taken at once; what does not fit the capacity Q waits for the path to drain.",
    ),
    "shared-drain": (
        "Shared drain",
        "Bursts without a pause. However the bytes are split over producers, the path needs V/R for them: the drain is shared.",
    ),
}

_VARIABLES = ("ink", "muted", "grid", "paper", "s1", "s2", "s3", "s4", "s5")
_LIGHT = ("#1c2430", "#5b6675", "#e1e5ea", "#ffffff", "#0a6ebd", "#c04a00", "#00795a", "#a5418a", "#7a5b00")
_DARK = ("#e8ecf1", "#a3adba", "#333b46", "#171b21", "#5cb3f5", "#ff9152", "#3fc79a", "#ec94cf", "#d9b13b")
_SENTINELS = tuple(f"#0102{i:02x}" for i in range(0xE0, 0xE0 + len(_VARIABLES)))
_THEMED = Palette(_SENTINELS[0], _SENTINELS[1], _SENTINELS[2], _SENTINELS[3], _SENTINELS[4:])


def write_page(path: str | os.PathLike[str], platform: Platform, audits: Sequence[Audit] = (), notes: Sequence[str] = ()) -> Path:
    """Write the page, whole or not at all, and return its path.

    Args:
        path: the file to write. platform: what the page is about. audits: designs held against it. notes: sentences to add on top.

    Raises:
        XStageError: the path cannot be written.
    """
    target = Path(path)
    check_writable(target)
    part = target.with_name(target.name + ".part")
    part.write_text(render(platform, audits, notes), encoding="utf-8")
    part.replace(target)
    return target


def render(platform: Platform, audits: Sequence[Audit] = (), notes: Sequence[str] = ()) -> str:
    """The page as text; equal input gives equal text."""
    light, dark = (" ".join(f"--{n}: {c};" for n, c in zip(_VARIABLES, colours, strict=True)) for colours in (_LIGHT, _DARK))
    style = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    style += (resources.files("xstage.report") / "page.css").read_text(encoding="utf-8")
    parts = [_head(platform, notes), *(_charts(platform, method) for method in platform.methods)]
    parts += [_audits(audits), _numbers(platform), _gates(platform), _origin(platform)]
    title = f"X-Stage of {platform.name}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{_e(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(p for p in parts if p)
        + "\n</main>\n</body>\n</html>\n"
    )


def origin(platform: Platform) -> str:
    """Where the numbers come from: `published` (printed by others), `shipped` (measured, in the package), `measured` (this file)."""
    if platform.origin == "published":
        return "published"
    return "shipped" if platform.name in gallery() else "measured"


# ---- sections ---------------------------------------------------------------------------------------------------------------


def _head(platform: Platform, notes: Sequence[str]) -> str:
    first = next(iter(platform.methods.values()))
    k = int(max(first.capacity_producers))
    rate, capacity, knee = (
        float(first.drain_rate(k)),
        float(first.capacity_bytes(k)),
        float(knee_bytes_per_producer(k, platform, first.name)),
    )
    shown = 32 * KiB if min(first.floor_bytes) <= 32 * KiB <= max(first.floor_bytes) else first.floor_bytes[-1]
    drain = k * shown / rate
    issue = max(float(first.issue_floor_ns(k, shown)), (k * shown - capacity) / rate)
    where = {
        "published": "Published numbers, not measured by xstage",
        "shipped": "Measured; this platform ships with xstage",
        "measured": "Measured on the machine described below",
    }[origin(platform)]
    failed = platform.failed_gates
    trust = ""
    if failed:
        names = _e(", ".join(g.name for g in failed))
        trust = f'<p class="bad">✗ {len(failed)} of {len(platform.gates)} quality gates failed: {names}. Read the numbers with care.</p>'
    elif platform.gates:
        trust = f'<p class="good">✓ All {len(platform.gates)} quality gates passed.</p>'
    waits = (
        f"the sender is free after {_us(issue)} while the bytes need {_us(drain)} to drain"
        if issue < 0.9 * drain
        else f"it takes {_us(issue)}"
    )
    taken = (
        f"bursts up to {_size(knee)} per producer are taken at once" if math.isfinite(knee) else "no burst is too large to be taken at once"
    )
    said = (
        f"A GPU that stores into a peer's memory does not have to wait until the bytes arrive. On this platform, when {k} producers send "
        f"{_size(shown)} each at the same time into an empty path, {waits}. The path drains {rate:.0f} GB/s and holds {_size(capacity)}; "
        f"{taken}. A kernel whose bursts stay below that, with at least their drain time from one to the next, "
        "gets its communication for the price of the store instructions."
    )
    facts = (
        (f"{rate:.0f} GB/s", "drain rate R"), (_size(capacity), "capacity Q"), (_size(knee), "knee, per producer"),
        (_us(float(first.issue_floor_ns(k, shown))), f"issue floor T_iss⁰ at {_size(shown)}"),
    )  # fmt: skip
    cells = "".join(f"<li><b>{_e(v)}</b><span>{_e(n)}</span></li>" for v, n in facts)
    lines = "".join(f"<p>{_e(n)}</p>" for n in ((platform.note,) if platform.note else ()) + tuple(notes))
    return (
        f'<header><span class="badge">{_e(where)}</span><h1>X-Stage of {_e(platform.name)}</h1>'
        f'<p class="lead">{_e(said)}</p>{trust}'
        f'<ul class="facts">{cells}</ul><p class="muted">Figures above: {_e(_METHOD_NAMES[first.name])}, {k} producers.</p>{lines}</header>'
    )


def _numbers(platform: Platform) -> str:
    rows = [_method_row(platform, m) for m in platform.methods.values()]
    sizes = sorted({b for m in platform.methods.values() for b in m.floor_bytes})
    sizes = sizes if len(sizes) <= 8 else [b for b in sizes if b in {n * KiB for n in (2, 4, 8, 16, 32, 64, 128)}] or sizes[:8]
    floors = [
        [
            _METHOD_NAMES[m.name],
            *(
                _us(float(m.issue_floor_ns(max(m.floor_producers), b))) if m.floor_bytes[0] <= b <= m.floor_bytes[-1] else "–"
                for b in sizes
            ),
        ]
        for m in platform.methods.values()
    ]
    drains = []
    for m in platform.methods.values():
        for i, k in enumerate(m.capacity_producers):
            fence = m.capacity_by_fence[i] if i < len(m.capacity_by_fence) else math.nan
            drains.append([m.name, f"{k:g}", f"{float(m.drain_rate(k)):.0f} GB/s", _size(m.capacity[i]), _size(fence), _knee_range(m, i)])
    names = ["store method", "producers K", "drain rate R", "R, both directions busy", "capacity Q", "knee, computed", "fence latency"]
    out = _table("The three quantities of the model, all producers", names, rows)
    said = "Issue floor T_iss⁰: time to issue a burst that meets no back-pressure, by size per producer"
    out += _table(said, ["store method", *(_size(b) for b in sizes)], floors)
    if any(len(m.capacity_producers) > 1 for m in platform.methods.values()):
        out += _table(
            "By number of producers", ["method", "producers K", "R", "Q from the knee", "Q from fences", "knee seen between"], drains
        )
    return f"<section><h2>The platform in numbers</h2>{out}</section>"


def _method_row(platform: Platform, m: StoreMethod) -> list[str]:
    k = max(m.capacity_producers)
    knee = float(knee_bytes_per_producer(k, platform, m.name))
    latency = _us(m.latency_ns) if m.latency_ns > 0 else "–"
    capacity = float(m.capacity_bytes(k))
    back_to_back = (s for s in platform.samples if s.method == m.name and s.loaded and s.gap_ns == 0 and s.producers == k)
    busy = [s.rate for s in back_to_back if s.rate > 0 and s.burst_bytes > capacity / 2]  # smaller ones may be limited by their issue
    both = f"{median(busy):.0f} GB/s each way" if busy else "–"
    said = f"{_size(knee)} each, {_size(k * knee)} in all" if math.isfinite(knee) else "none"
    return [_METHOD_NAMES[m.name], f"{k:g}", f"{float(m.drain_rate(k)):.0f} GB/s", both, _size(capacity), said, latency]


def _knee_range(m: StoreMethod, i: int) -> str:
    low, high = (t[i] if i < len(t) else math.nan for t in (m.knee_low, m.knee_high))
    return "none seen" if math.isnan(low) or math.isnan(high) else f"{low / KiB:.0f} and {high / KiB:.0f} KiB each"


def _gates(platform: Platform) -> str:
    if not platform.gates:
        return ""
    rows = [[g.name, "✓ passed" if g.passed else "✗ failed", _number(g.value), _number(g.limit), g.unit, g.detail] for g in platform.gates]
    table = _table(
        "A gate passes when its value is at most its limit", ["gate", "result", "value", "limit", "unit", "what it checks"], rows
    )
    return f"<section><h2>How far to trust it</h2>{table}</section>"


def _charts(platform: Platform, method: str) -> str:
    figures = []
    for name, chart in charts_of(method).items():
        title, said = _CAPTIONS[name]
        ident = f"{method}-{name}"
        svg = _inline_svg(chart(platform, method, _THEMED), ident, f"{title}, {_METHOD_NAMES[method]}, {platform.name}", said)
        figures.append(
            f"<figure><h3>({'abcd'[list(CHARTS).index(name)]}) {_e(title)}</h3>{svg}<figcaption>{_e(said)}</figcaption></figure>"
        )
    measured = bool(of_table(platform.samples, method))
    how = (
        "Points are medians over launches and ranks; hollow points were held out of the fit; lines are the model."
        if measured
        else "Lines are the model with this platform's numbers; there are no samples to draw."
    )
    heading = _METHOD_NAMES[method]
    return (
        f'<section><h2>{_e(heading[:1].upper() + heading[1:])}</h2><p class="muted">{how}</p>'
        f'<div class="charts">{"".join(figures)}</div></section>'
    )


def _audits(audits: Sequence[Audit]) -> str:
    if not audits:
        return ""
    cards = []
    for a in audits:
        # Verdicts stand under their values: a third column would be off the screen of a phone.
        table = _table(f"{a.design}, predicted", ["quantity", "value"], [[name, f"{value}\n{said}"] for name, value, said in a.rows()])
        notes = "".join(f'<p class="muted">{_e(n)}</p>' for n in a.notes)
        kind = "good" if a.action == "piggyback" else "bad"
        sentence = f"{a.sentence[:1].upper()}{a.sentence[1:]}"
        head = f'<h3>{_e(a.design)}: <span class="{kind}">{_e(a.action)}</span></h3>'
        cards.append(f'<article class="card">{head}<p>{_e(sentence)}</p>{table}{notes}</article>')
    return f"<section><h2>Designs held against it</h2><p>Predictions of the model, not measurements.</p>{''.join(cards)}</section>"


def _origin(platform: Platform) -> str:
    rows = [
        [key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)] for key, value in platform.fingerprint.items()
    ]
    rows += [["GPUs that took part", str(platform.gpus)], ["multiprocessors per GPU", str(platform.sms)]]
    rows += [["created", platform.created or "–"], ["raw samples in the file", f"{len(platform.samples):,}"]]
    if platform.origin == "published":
        how = "<p>These numbers were printed by others. To get your own, run on a machine with peer-connected GPUs:</p>"
        command = "xstage calibrate"
    else:
        how = "<p>Run the command that made this platform file, then compare the two files:</p>"
        command = f"{platform.command or 'xstage calibrate'}\nxstage compare OLD.json NEW.json"
    return (
        f"<section><h2>Where it comes from</h2>{_table('Fingerprint of the machine and the file', ['field', 'value'], rows)}"
        f"<h3>Reproduce it</h3>{how}<pre><code>{_e(command)}</code></pre></section>"
    )


# ---- parts ------------------------------------------------------------------------------------------------------------------


def _inline_svg(figure: Figure, ident: str, title: str, description: str) -> str:
    """The figure as an SVG element: unique ids, CSS variables for sentinels, a title and a description for screen readers."""
    text = svg_text(figure)
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{ident}-', text)
    text = re.sub(r'href="#', f'href="#{ident}-', text)
    text = re.sub(r"url\(#", f"url(#{ident}-", text)
    for sentinel, name in zip(_SENTINELS, _VARIABLES, strict=True):
        text = text.replace(sentinel, f"var(--{name})")
    box = re.search(r'viewBox="[^"]+"', text)
    named = f'role="img" aria-labelledby="{ident}-title {ident}-desc"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box.group(0) if box else ""} {named}>'
    head += f'<title id="{ident}-title">{_e(title)}</title><desc id="{ident}-desc">{_e(description)}</desc>'
    return head + text[text.index(">") + 1 :]


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_e(h)}</th>' for h in header)
    body = []
    for row in rows:
        cells = [f'<th scope="row">{_e(row[0])}</th>']
        for cell in row[1:]:
            value, _, said = cell.partition("\n")
            under = f'<br><span class="{_kind(said) or "muted"}">{_e(said)}</span>' if said else ""
            kind = " ".join(filter(None, (_kind(value), "n" if len(value) < 24 and not said else "")))
            cells.append(f'<td class="{kind}">{_e(value)}{under}</td>' if kind else f"<td>{_e(value)}{under}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    # The box takes the keyboard, so that a table wider than the screen can be scrolled without a pointer.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_e(caption)}"><table><caption><span>{_e(caption)}</span></caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _kind(value: str) -> str:
    """CSS class of a verdict; the sign or word in the text says the same without colour."""
    return "good" if value.startswith(("✓", "holds")) else "bad" if value.startswith(("✗", "broken")) else ""


def _e(text: object) -> str:
    return html.escape(str(text))


def _us(ns: float) -> str:
    return f"{ns / 1e3:.2f} µs" if ns < 10_000 else f"{ns / 1e3:.1f} µs"


def _size(size: float) -> str:
    if not math.isfinite(size):
        return "–"
    return (
        f"{size / MiB:.2f} MiB"
        if size >= MiB
        else f"{size / KiB:.0f} KiB"
        if size >= 10 * KiB or size % KiB == 0
        else f"{size / KiB:.1f} KiB"
    )


def _number(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.4g}"
