"""Numbers in README and docs come out of result files: `results/headline.json` and the tables between markers are written here.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. A result file is either a platform (`xstage calibrate`) or a JSON
object with a `headline` map of `{key: {"value": …, "unit": …}}`, a `command` and a `created` time (studies, benchmarks); the newest
file wins a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xstage.attention.overlap import Split, attention_ns, choose, time_ns
from xstage.burst_gap import knee_bytes_per_producer
from xstage.calibration.fit import held_out
from xstage.errors import XStageError
from xstage.platform import METHODS, KiB, MiB, Platform, load_platform
from xstage.predict import predict, text
from xstage.simulate.mega_moe import DUPLEX
from xstage.studies.dit_models import MODELS as DIT_MODELS
from xstage.studies.dit_models import SMS, exchange_bound_ns, overlap_problem
from xstage.studies.eight_tables import TABLES as EIGHT
from xstage.studies.moe_lead_table import moe_lead_table
from xstage.studies.moe_orders_table import moe_orders_table
from xstage.studies.moe_spans_table import moe_spans_table
from xstage.studies.moe_stall import burst, gap_ns
from xstage.studies.tables import TABLES as SIMULATED
from xstage.studies.tables import grid
from xstage.studies.w4a8_table import w4a8_gemm_table, w4a8_table

HEADLINE = "headline.json"


def headline(results: Path) -> dict[str, dict[str, Any]]:
    """The newest measurement of every headline figure: dotted key → value, unit, file, command.

    Raises:
        XStageError: the folder does not exist.
    """
    if not results.is_dir():
        raise XStageError(f"results: {results} is not a directory")
    found: dict[str, dict[str, Any]] = {}
    age: dict[str, str] = {}
    for path in sorted(results.rglob("*.json")):
        if path.name == HEADLINE:
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("kind") == "xstage-platform":
            figures = _platform_figures(load_platform(path))
        else:
            figures = {key: (entry["value"], entry["unit"]) for key, entry in data.get("headline", {}).items()}
        for key, (value, unit) in figures.items():
            if data.get("created", "") >= age.get(key, ""):
                age[key] = data.get("created", "")
                where = path.relative_to(results.parent).as_posix()
                found[key] = {"value": value, "unit": unit, "file": where, "command": data.get("command", "")}
    return dict(sorted(found.items()))


def _platform_figures(p: Platform) -> dict[str, tuple[float, str]]:
    out = {}
    for name in METHODS:
        out[f"calibrate.drain_rate.{name}"] = (round(float(p.method(name).drain_rate(p.sms)), 1), "GB/s")
        knee = float(knee_bytes_per_producer(p.sms, p, name))
        out[f"calibrate.knee.{name}"] = (round(knee / KiB, 1), "KiB per producer")
    points = [h for name in METHODS for h in held_out(p.samples, p, name)]
    period = np.array([h.period_error for h in points if h.sample.mode != "isolated"])
    out["model.period_error.median"] = (round(float(np.median(period)), 5), "fraction")
    out["model.period_error.p95"] = (round(float(np.quantile(period, 0.95)), 5), "fraction")
    out["model.issue_error.median"] = (round(float(np.median([h.issue_error for h in points])), 5), "fraction")
    return out


def refresh(results: Path, documents: Sequence[Path]) -> list[Path]:
    """Write `headline.json` and every generated table anew; returns the files that changed.

    Raises:
        XStageError: a marker names a table that is not known, or has no end.
    """
    changed = []
    target = results / HEADLINE
    content = json.dumps(headline(results), indent=1, ensure_ascii=False) + "\n"
    if not target.exists() or target.read_text(encoding="utf-8") != content:
        target.write_text(content, encoding="utf-8")
        changed.append(target)
    for document in documents:
        before = document.read_text(encoding="utf-8")
        after = fill(before, results, str(document))
        if after != before:
            document.write_text(after, encoding="utf-8")
            changed.append(document)
    return changed


def fill(text: str, results: Path, where: str) -> str:
    """`text` with the content between its markers made anew."""

    def table(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise XStageError(f"{where}: generated table {name!r} is unknown, known are {', '.join(TABLES)}")
        return f"<!-- generated: {name} -->\n{TABLES[name](results)}\n<!-- end -->"

    if text.count("<!-- generated: ") != text.count("<!-- end -->"):
        raise XStageError(f"{where}: a generated table has no end marker")
    return re.sub(r"<!-- generated: ([\w-]+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def calibrations(results: Path) -> list[tuple[Path, Platform]]:
    """Platform files of the results folder, oldest first."""
    found = [(path, load_platform(path)) for path in sorted(results.rglob("calibration-*.json"))]
    return sorted(found, key=lambda entry: entry[1].created)


def _platform_table(results: Path) -> str:
    path, p = calibrations(results)[-1]
    rows = []
    for name, m in p.methods.items():
        rows.append([
            f"`{name}`", f"{float(m.drain_rate(p.sms)):.1f} GB/s", f"{float(m.capacity_bytes(p.sms)) / MiB:.2f} MiB",
            f"{m.knee_low[-1] / KiB:g} to {m.knee_high[-1] / KiB:g} KiB", f"{float(m.issue_floor_ns(p.sms, 8 * KiB)) / 1e3:.2f} µs",
            f"{float(m.issue_floor_ns(p.sms, 32 * KiB)) / 1e3:.2f} µs", f"{m.latency_ns / 1e3:.2f} µs",
        ])  # fmt: skip
    head = ["", "drain rate R", "capacity Q", "knee, per producer", "T_iss⁰ at 8 KiB", "T_iss⁰ at 32 KiB", "fence of an empty path"]
    return grid(head, rows) + f"\n\n{p.gpus} × {p.fingerprint['gpu_name']}, {p.sms} producers; `{path.relative_to(results.parent)}`."


def _predict_example(_results: Path) -> str:
    shown = text(predict("h200-nvlink4", None, 32 * KiB, 12_000.0))
    return "    $ xstage predict --bytes 32KiB --gap 12us\n" + "\n".join(f"    {line}" for line in shown.splitlines())


def _producers_table(results: Path) -> str:
    _, p = calibrations(results)[-1]
    rows = []
    for name, m in p.methods.items():
        for k, q, fence, low, high in zip(m.capacity_producers, m.capacity, m.capacity_by_fence, m.knee_low, m.knee_high, strict=True):
            rows.append([
                f"`{name}`", f"{k:g}", f"{float(m.drain_rate(k)):.0f} GB/s", f"{q / MiB:.2f} MiB", f"{fence / MiB:.2f} MiB",
                f"{q / k / KiB:.1f} KiB", f"{low / KiB:g} to {high / KiB:g} KiB",
            ])  # fmt: skip
    return grid(["", "producers", "R", "Q from the knee", "Q from the fence", "Q per producer", "knee, per producer"], rows)


def _gates_table(results: Path) -> str:
    found = calibrations(results)[-2:]
    by_name = [{g.name: g for g in p.gates} for _, p in found]
    rows = []
    for name, gate in by_name[-1].items():
        values = [f"{gates[name].value:.3g}" if name in gates else "–" for gates in by_name]
        rows.append([name, *values, f"{gate.limit:g}", gate.unit, gate.detail])
    files = " and ".join(f"`{path.relative_to(results.parent)}` ({p.created})" for path, p in found)
    return grid(["gate", *[path.stem for path, _ in found], "limit", "unit", "detail (last file)"], rows) + f"\n\n{files}."


def _residuals_table(results: Path) -> str:
    _, p = calibrations(results)[-1]
    keys = ("issue_median", "issue_p95", "issue_max", "rate_max")
    rows = [[f"`{name}`", *(f"{r[key]:.1%}" for key in keys)] for name, r in p.residuals.items()]
    return grid(["", "issue time, median", "95th percentile", "largest", "rate, largest"], rows)


def _comparison_table(results: Path) -> str:
    from xstage.bench.compare import compare

    found = calibrations(results)[-2:]
    if len(found) < 2:
        return "Only one calibration is on file."
    rows = compare(found[0][1], found[1][1])
    cells = [
        [r.quantity, f"`{r.method}`", r.direction, f"{r.sizes[0] // KiB} … {r.sizes[1] // KiB} KiB", f"{r.ratio:.4f}",
         f"{r.low:.4f} … {r.high:.4f}", r.verdict]
        for r in rows
    ]  # fmt: skip
    said = (
        f"{sum(r.verdict == 'SAME' for r in rows)} of {len(rows)} quantities are SAME; {found[0][1].created} against {found[1][1].created}."
    )
    return grid(["quantity", "method", "direction", "per producer", "ratio", "95% interval", "verdict"], cells) + "\n\n" + said


def _attention_table(results: Path) -> str:
    content = _read(results / "h200x2" / "attention.json")
    rows = []
    for r in content["rows"]:
        residual, baseline, d = r["groups"]["residual"], r["groups"]["baseline"], r["derived"]
        us = {name: f"{t['slowest_ns'] / 1e3:.1f}" for group in (baseline, residual) for name, t in group.items()}
        rows.append([
            f"{r['heads']}, {r['sequence']:,}", *(us[n] for n in ("fa4", "local", "stores", "fused", "push_graph")),
            *(us.get(n, "–") for n in ("with_kernel", "push_engines_graph", "nccl_graph", "nccl")),
            f"{d['residual_ns'] / 1e3:.1f} ({d['residual_share']:.1%})", *_bounds(r),
            f"{d['readiness_ns'] / 1e3:.1f}", f"{d['kernel_over_fa4_ns'] / 1e3 / float(us['fa4']):.2%}",
            f"{d['speedup_strongest']:.2f}×", f"{d['speedup_paper_baseline']:.2f}×",
        ])  # fmt: skip
    head = ["H, M", "FA4 alone", "local stores", "stores", "fused", "push, graph", "FA4 by its output argument",
            "push by copy engines, graph", "NCCL, graph", "NCCL, eager", "E_res",
            "predicted: last drain", "and stalls", "readiness", "local over FA4", "over strongest serial", "over eager serial"]  # fmt: skip
    said = "µs per call, slowest rank, medians; H heads per GPU, head dim 128, bf16, full attention"
    return grid(head, rows) + f"\n\n{said}; `results/h200x2/attention.json`."


def _bounds(row: dict[str, Any]) -> list[str]:
    """Predicted: the drain of the last burst, and with the stalls of the waves before."""
    p, order = row["predicted_residual_ns"], row.get("order", "alternating")
    tail = "tail" if order == "alternating" else f"{order}_tail"
    return [f"{p[name] / 1e3:.1f}" if name in p else "–" for name in (tail, order)]


def _attention_summary_table(results: Path) -> str:
    rows = []
    for r in _read(results / "h200x2" / "attention.json")["rows"]:
        times, d = r["groups"]["baseline"], r["derived"]
        us = [f"{times[name]['slowest_ns'] / 1e3:,.0f}" for name in ("fa4", "fused")]
        ratios = [f"{d[f'speedup_{name}']:.2f}×" for name in ("strongest", "paper_baseline")]
        rows.append([f"{r['heads']}, {r['sequence']:,}", *us, *ratios])
    head = ["heads per GPU, tokens", "FA4 alone, µs", "with the exchange, µs", "over the strongest serial path", "over the eager one"]
    return grid(head, rows) + "\n\nTwo H200s, head dim 128, bf16, full attention; `results/h200x2/attention.json`."


def _attention_split_table(results: Path) -> str:
    content = _read(results / "h200x2" / "attention-split.json")
    sms, rows = load_platform("h200-nvlink4").sms, []
    for r in content["rows"]:
        t, d, p = r["groups"]["forms"], r["derived"], r["predicted_residual_ns"]
        fa4_ns, tiles = t["fa4"]["slowest_ns"], r["heads"] * r["sequence"] / 128 / sms
        over = [f"{t[n]['slowest_ns'] / fa4_ns - 1:.2%}" for n in ("local", "local_whole")]
        residual = {form: d[f"residual_{form}_ns"] for form in ("split", "whole")}
        found = [f"{residual[form] / 1e3:.1f} ({p[order] / 1e3:.1f})" for form, order in (("split", "split"), ("whole", "alternating"))]
        per_tile, shares = [f"{ns / 1e3 / tiles:.1f}" for ns in residual.values()], [f"{ns / fa4_ns:.1%}" for ns in residual.values()]
        rows.append([f"{r['heads']}, {r['sequence']:,}", f"{fa4_ns / 1e3:.1f}", f"{tiles:.1f}", *over, *found, *per_tile, *shares])
    head = ["H, M", "FA4 alone", "tiles per SM", "split, local over FA4", "whole, local over FA4", "E_res, split", "E_res, whole",
            "per tile of an SM, split", "whole", "of FA4's time, split", "whole"]  # fmt: skip
    return grid(head, rows) + "\n\nµs per call, slowest rank, medians (`results/h200x2/attention-split.json`); in brackets: predicted."


def _attention_forms_table(results: Path) -> str:
    path = results / "h200x2" / "attention-forms.json"
    if not path.exists():
        return "Not measured yet."
    rows = []
    for r in _read(path)["rows"]:
        times, d = r["groups"]["forms"], r["derived"]
        cells = [f"{times[n]['slowest_ns'] / 1e3:.1f}" for n in ("fa4", "local", "stores", "local_thread", "stores_thread")]
        residuals = [f"{d[f'residual_{who}_ns'] / 1e3:.1f}" for who in ("warp", "thread")]
        shares = [f"{d[f'kernel_{who}_over_fa4_ns'] / times['fa4']['slowest_ns']:.2%}" for who in ("warp", "thread")]
        ready = [f"{d[f'readiness_{when}_ns'] / 1e3:.1f}" for when in ("after", "ahead")]
        rows.append([f"{r['heads']}, {r['sequence']:,}", *cells, *residuals, *shares, *ready])
    head = ["H, M", "FA4 alone", "warp, local", "warp", "thread, local", "thread", "E_res, warp", "E_res, thread", "local over FA4, warp",
            "local over FA4, thread", "readiness, after", "readiness, ahead"]  # fmt: skip
    return grid(head, rows) + "\n\nµs per call, slowest rank, medians; `results/h200x2/attention-forms.json`."


def _attention_stores_table(results: Path) -> str:
    sms, rows = load_platform("h200-nvlink4").sms, []
    for r in _read(results / "h200x2" / "attention-stores.json")["rows"]:
        t, d, p = r["groups"]["forms"], r["derived"], r["predicted_residual_ns"]
        forms, tiles = ("threads", "engine", "table"), -(-r["heads"] * r["sequence"] // 128 // sms)
        us = [f"{t[n]['slowest_ns'] / 1e3:.1f}" for n in ("fa4", "stores_threads", "stores")]
        shares = [f"{d[f'kernel_{form}_over_fa4_ns'] / t['fa4']['slowest_ns']:.2%}" for form in forms]
        look_up = f"{(d['kernel_table_over_fa4_ns'] - d['kernel_engine_over_fa4_ns']) / 1e3 / tiles:.1f}"
        residuals = [f"{d[f'residual_{form}_ns'] / 1e3:.1f}" for form in forms]
        bounds = [f"{p[n] / 1e3:.1f}" for n in ("tail", "alternating", "engine")]
        rows.append([f"{r['heads']}, {r['sequence']:,}", *us, *shares, look_up, *residuals, *bounds])
    head = ["H, M", "FA4 alone", "stores, threads", "stores, engine", "local over FA4, threads", "engine", "engine, table read",
            "the table, per tile", "E_res, threads", "engine", "engine, table read", "predicted: last drain", "and stalls, threads",
            "and stalls, engine"]  # fmt: skip
    return grid(head, rows) + "\n\nµs per call, slowest rank, medians; `results/h200x2/attention-stores.json`."


def _attention_models_table(results: Path) -> str:
    path = results / "h200x2" / "attention-dit.json"
    if not path.exists():
        return "Not measured yet."
    rows = []
    for r in _read(path)["rows"]:
        times, d = r["groups"]["dit"], r["derived"]
        us = [
            f"{times[n]['slowest_ns'] / 1e3:.1f}" if n in times else "–" for n in ("fa4", "fused", "push_graph", "push_cudnn", "nccl_graph")
        ]
        residual = f"{d['residual_ns'] / 1e3:.1f} ({d['residual_share']:.1%})"
        shape = f"{r['heads']}, {r['sequence']:,}, {r['head_dim']}"
        rows.append([r["name"], shape, *us, residual, f"{d['readiness_ns'] / 1e3:.1f}", f"{d['speedup_strongest']:.3f}×"])
    head = ["model", "H, M, head dim", "FA4 alone", "fused", "FA4, push", "cuDNN, push", "FA4, NCCL", "E_res", "readiness",
            "over strongest serial"]  # fmt: skip
    return grid(head, rows) + "\n\nµs per call, slowest rank, medians; all serial ones in a graph; `results/h200x2/attention-dit.json`."


def _attention_clocks_table(results: Path) -> str:
    path = results / "h200x2" / "attention.json"
    if not any("traffic" in r["groups"] for r in _read(path)["rows"]):
        return "Not measured yet."
    rows = []
    for r in _read(path)["rows"]:

        def us(name: str, d: dict[str, float] = r["derived"]) -> list[str]:
            return [f"{d[f'{name}_{part}_ns'] / 1e3:.1f}" for part in ("paired", "clock", "cycles")]

        clocks = [f"{r['derived'][f'residual_{name}']:,.0f}" for name in ("local_mhz", "mhz")]
        beside = [f"{total} ({clock}, {cycles})" for total, clock, cycles in map(us, ("residual_beside", "sent", "copied"))]
        rows.append([f"{r['heads']}, {r['sequence']:,}", *us("residual"), ", ".join(clocks), *beside])
    head = ["H, M", "E_res", "of it clock", "of it cycles", "mean clock: local, stores, MHz", "E_res again, beside the copies",
            "the same bytes sent by copy engines", "moved locally"]  # fmt: skip
    said = (
        "µs per call over local stores, on the rank that is slowest with the slower variant; every number is a median of its own over "
        "rounds, of differences within a round, so parts need not add up. In brackets: clock, cycles"
    )
    return grid(head, rows) + f"\n\n{said}; `results/h200x2/attention.json`."


def _link_power_table(results: Path) -> str:
    over = {"stores": "local", "few": "local", "stores_table": "local_table", "own_first": "local_table", "remote_first": "local_table",
            "pushed": "local"}  # fmt: skip
    rows = []
    for number in (1, 2):
        for r in _read(results / "h200x2" / f"link-power-{number}.json")["rows"]:
            times, apart = r["times"], r["apart"]

            def cell(name: str, base: str, times: Any = times, apart: Any = apart) -> str:
                ns, mhz = times[name]["slowest_ns"] - times[base]["slowest_ns"], apart[name]["clock_mhz"] - apart[name]["base_clock_mhz"]
                return f"{ns / 1e3:+,.0f} ({mhz:+.0f})"

            cells = [cell(name, base) for name, base in over.items()]
            rows.append([f"{number}", f"{r['heads']}, {r['sequence']:,}", f"{times['local']['slowest_ns'] / 1e3:,.0f}", *cells])
    head = ["pair", "H, M", "local", "remote, alternating", "one tile of a head", "alternating, by table", "own first", "remote first",
            "copies afterwards"]  # fmt: skip
    said = "µs, slowest rank, medians, over the same with local stores; in brackets: MHz of the mean clock, on the rank that is slowest"
    return grid(head, rows) + f"\n\n{said}; `results/h200x2/link-power-1.json`, `-2.json`."


def _attention_orders_table(results: Path) -> str:
    rows = []
    measured = _read(results / "h200x2" / "attention-orders.json")["rows"]
    orders = ("plain", "alternating", "own_last")
    for r in measured:
        d, p = r["derived"], r["predicted_residual_ns"]
        cells = [f"{d[f'residual_{o}_ns'] / 1e3:.1f} ({p[o] / 1e3:.1f})" for o in orders]
        rows.append([f"{r['heads']}, {r['sequence']:,}", *cells, f"{d['residual_remote_ns'] / 1e3:.1f}", f"{d['meeting_ns'] / 1e3:.1f}"])
    return grid(["H, M", *(o.replace("_", " ") for o in orders), "all remote", "a meeting before the call"], rows) + (
        "\n\n`results/h200x2/attention-orders.json`: stores by threads, tiles read from a table."
    )


def _attention_designs_table(results: Path) -> str:
    now, check, persistent = (
        {(r["heads"], r["sequence"]): r for r in _read(results / "h200x2" / f"{name}.json")["rows"]}
        for name in ("attention", "attention-entry-check", "attention-persistent")
    )
    rows = []
    for key, r in now.items():
        if key not in persistent or key not in check:
            continue
        old, middle, new = persistent[key]["variants"], check[key]["groups"], r["groups"]
        base = [f"{v['fa4']['slowest_ns'] / 1e3:.1f}" for v in (old, middle["residual"], new["residual"])]
        fused = [f"{v['fused']['slowest_ns'] / 1e3:.1f}" for v in (old, middle["residual"], new["residual"])]
        checked = f"{middle['order']['checked']['slowest_ns'] / 1e3:.1f}"
        rows.append([f"{key[0]}, {key[1]:,}", f"{fused[0]} ({base[0]})", f"{checked} ({base[1]})", f"{fused[2]} ({base[2]})"])
    return grid(["H, M", "persistent", "entry check inside", "meetings outside"], rows)


def _dit_table(results: Path) -> str:
    path = results / "h200x2" / "dit.json"
    if not path.exists():
        return "Not measured yet."
    content = _read(path)
    rows = []
    for r in content["rows"]:
        d, groups = r["derived"], r["groups"]

        def step(prefix: str, groups: dict[str, Any] = groups) -> str:
            """The fastest variant whose name begins so, and the rest of its name."""
            ns = {n.removeprefix(prefix): t["slowest_ns"] for n, t in groups.get("step", {}).items() if n.startswith(prefix)}
            best = min(ns, key=ns.__getitem__, default=None)
            return "–" if best is None else f"{ns[best] / 1e3:,.0f} {best}".strip()

        def exposed(suffix: str, d: dict[str, float] = d) -> list[str]:
            values = [d.get(f"exposed_{name}{suffix}_ns") for name in ("diffusers", "ours_push", "ours_at_once", "ours")]
            share = d.get(f"exposed_share{suffix}")
            return [*("–" if v is None else f"{v / 1e3:,.0f}" for v in values), "–" if share is None else f"{share:.2f}"]

        def exchange(d: dict[str, float] = d) -> list[str]:
            """In a graph if measured so, else eager."""
            values = [d.get(f"exchange_{name}_graph_ns", d.get(f"exchange_{name}_ns")) for name in ("bound", "packed", "all_to_all")]
            return ["–" if v is None else f"{v / 1e3:,.0f}" for v in values]

        times = {n: f"{t['slowest_ns'] / 1e3:,.0f}" for n, t in groups.get("step", {}).items()}
        steps = [step("diffusers_"), times.get("ours_push", "–"), times.get("ours", "–")]
        speedup = f"{d['step_speedup']:.3f}×" if "step_speedup" in d else "–"
        splits = [r["split"][group] for group in ("layer", "layer_graph") if group in r.get("split", {})]
        first = " / ".join(dict.fromkeys(_split_words(*(s or (0, None))) for s in splits)) or "–"
        rows.append([r["name"], f"{r['heads']}, {r['sequence']:,}", *steps, speedup, *exposed(""), *exposed("_graph"), first, *exchange()])
    head = ["model", "heads, tokens", "step, diffusers", "ours, push", "ours, fused", "speedup", "exposed per layer: diffusers",
            "ours, push", "ours, at once", "ours, fused", "share", "in a graph: diffusers", "ours, push", "ours, at once", "ours, fused",
            "share", "heads first / in a graph",
            "q, k, v alone: bound", "one kernel", "all-to-alls"]  # fmt: skip
    world, layers = (content["settings"][name] for name in ("world", "layers"))
    said = f"µs, slowest of {world} ranks, medians; {layers} blocks, random weights, bf16, batch 1; `results/h200x2/dit.json`."
    return grid(head, rows) + "\n\n" + said


def _exchange_bound_table(_results: Path) -> str:
    platform, rows = load_platform("h200-nvlink4", samples=False), []
    for m in DIT_MODELS:
        cells = [f"{exchange_bound_ns(m, world, platform) / 1e3:,.0f}" for world in (2, 4, 8)]
        rows.append([m.name, f"{m.heads}, {m.sequence:,}", *cells])
    rate = float(platform.method("st_global").drain_rate(platform.sms))
    said = f"µs per layer: bytes of q, k and v that leave the rank with most of them, over R = {rate:.1f} GB/s; bf16, batch 1"
    return grid(["model", "heads, tokens", "2 GPUs", "4", "8"], rows) + f"\n\n{said}; platform `h200-nvlink4`."


def _split_words(first: int, ctas: int | None) -> str:
    return "all" if not first else f"{first}, {f'{ctas} SMs' if ctas else 'copies'}"


def _overlap_table(_results: Path) -> str:
    rows = []
    for m in DIT_MODELS:
        cells = []
        for world in (2, 4, 8):
            p = overlap_problem(m, world)
            split = choose(p, captured=True)
            how = _split_words(split.first, split.ctas) if split else _split_words(0, None)
            once, chosen = (f"{(time_ns(p, way) - attention_ns(p)) / 1e3:,.0f}" for way in (None, split))
            cells += [how, once, chosen]
        rows.append([m.name, f"{max(overlap_problem(m, 2).tiles(n) for n in overlap_problem(m, 2).kv_heads) / SMS:.2f}", *cells])
    head = ["model", "waves of attention", "2 GPUs: heads first", "at once", "chosen", "4: heads first", "at once", "chosen",
            "8: heads first", "at once", "chosen"]  # fmt: skip
    return grid(head, rows) + "\n\nµs exposed per layer before attention ends, as `xstage.attention.overlap` expects; not measured."


def _overlap_measured_table(results: Path) -> str:
    """The best split of each model, the same with rows of own heads sent late, and the best that sends the rest otherwise."""
    rows = []
    for r in _read(results / "h200x2" / "ulysses-overlap.json")["rows"]:
        exposed, p = r["exposed_us"], overlap_problem(next(m for m in DIT_MODELS if m.name == r["name"]), 2)
        splits = {name: Split(*map(int, name.split("_by_"))) for name in exposed if "_by_" in name and not name.endswith("_late")}
        best = min(splits, key=exposed.__getitem__)
        other = min((name for name, s in splits.items() if (s.ctas == 0) != (splits[best].ctas == 0)), key=exposed.__getitem__)
        expected, at_once = ((time_ns(p, way) - attention_ns(p)) / 1e3 for way in (splits[best], None))
        rows.append([
            r["name"], f"{exposed['at_once']:.0f} ({at_once:.0f})", f"{_split_words(splits[best].first, splits[best].ctas)}: "
            f"{exposed[best]:.0f} ({expected:.0f})", f"{exposed[f'{best}_late']:.0f}",
            f"{_split_words(splits[other].first, splits[other].ctas)}: {exposed[other]:.0f}",
        ])  # fmt: skip
    head = ["model", "all at once", "best split: heads first, rest by", "own rows late", "best by other means"]
    return grid(head, rows) + "\n\nµs; in brackets: expected."


def _head_exchange_table(results: Path) -> str:
    rows = [
        [
            r["shape"],
            *(f"{r[name]:,.0f}" for name in ("bound_us", "kernel_us", "push_us", "nccl_us")),
            f"{r['kernel_us'] / r['bound_us']:.2f}",
        ]
        for r in _read(results / "h200x2" / "head-exchange.json")["rows"]
    ]
    head = ["model", "bound", "one kernel", "strided copies", "three all-to-alls (NCCL)", "kernel over bound"]
    return grid(head, rows) + "\n\nµs, slowest rank, two H200s; `results/h200x2/head-exchange.json`."


def _moe_table(results: Path) -> str:
    path = results / "h200x2" / "moe-layer.json"
    if not path.exists():
        return "Not measured yet."
    content = _read(path)
    head = [
        "model, f", "GEMMs", "with SwiGLU, rows", "dispatch", "combine", "serial", "bound", "over bound", "interleaved", "wave",
        "Linear-1 first", "`auto` over GEMMs", "serial over `auto`", "DeepGEMM's GEMMs", "DeepGEMM's fused layer", "over `auto`",
        "torch + NCCL",
    ]  # fmt: skip
    rows = []
    for r in content["rows"]:
        ns = {name: t["slowest_ns"] for group in r["groups"].values() for name, t in group.items()}

        def us(*names: str, ns: dict[str, float] = ns) -> str:
            return f"{sum(ns[n] for n in names) / 1e3:,.0f}" if all(n in ns for n in names) else "–"

        def ratio(name: str, d: dict[str, float] = r["derived"]) -> str:
            return f"{d[name]:.2f}" if name in d else "–"

        bound = f"{r['derived']['bound_ns'] / 1e3:,.0f}" if "bound_ns" in r["derived"] else "–"
        rows.append([
            f"{r['shape']}, {r['share']:g}", us("linear1", "linear2"), us("swiglu", "rows"), us("dispatch"), us("combine"), us("serial"),
            bound, ratio("serial_over_bound"), us("interleaved"), us("expert_wave"), us("linear1_first"),
            ratio("auto_over_compute"), ratio("speedup_unfused"), us("deep_gemm_linear1", "deep_gemm_linear2"), us("deep_gemm_mega"),
            ratio("speedup_public"), us("torch"),
        ])  # fmt: skip
    tokens, world = content["settings"]["tokens"], content["settings"]["world"]
    said = f"µs per call, slowest rank, medians; {tokens:,} tokens on each of {world} ranks; `results/h200x2/moe-layer.json`."
    return grid(head, rows) + "\n\n" + said


def _sent_rows(row: Any) -> float:
    """Bytes of rows, with scales and sources, that leave the busiest rank of a row of moe-layer."""
    return float(max(row["remote_pairs"]) * (row["hidden"] + row["hidden"] // 32 + 16))


def _moe_dispatch_table(results: Path) -> str:
    """Rows to their experts by stores, by reads and by NCCL, beside what the drain rate says."""
    rate, rows = float(load_platform("h200-nvlink4", samples=False).method("st_global").drain_rate(132)), []
    for r in _read(results / "h200x2" / "moe-layer.json")["rows"]:
        us = {name: t["slowest_ns"] / 1e3 for name, t in r["groups"]["layer"].items()}
        sent = _sent_rows(r)
        rows.append([
            f"{r['shape']}, {r['share']:g}", f"{sent / 2**20:,.0f}", f"{sent / rate / 1e3:,.0f}",
            *(f"{us[name]:,.0f}" for name in ("dispatch", "dispatch_pull", "dispatch_nccl")),
        ])  # fmt: skip
    head = ["model, f", "MiB that leave a rank", "over R", "stores (push)", "reads (pull)", "NCCL"]
    said = "µs, slowest rank. Push and pull with counts, plan and quantisation; NCCL with e4m3 rows and known splits"
    return grid(head, rows) + f"\n\n{said}; `results/h200x2/moe-layer.json`."


def _moe_small_table(results: Path) -> str:
    path = results / "h200x2" / "moe-layer-small.json"
    if not path.exists():
        return "Not measured yet."
    columns = {
        "step by step": "serial", "interleaved": "interleaved", "wave": "expert_wave", "Linear-1 first": "linear1_first",
        "DeepGEMM's fused layer": "deep_gemm_mega",
    }  # fmt: skip
    rows = []
    for r in _read(path)["rows"]:
        ns = {name: t["slowest_ns"] for group in r["groups"].values() for name, t in group.items()}
        gemms = f"{(ns['linear1'] + ns['linear2']) / 1e3:,.0f}"
        times = [f"{ns[name] / 1e3:,.0f}" if name in ns else "–" for name in columns.values()]
        rows.append([f"{r['shape']}, {r['tokens']:,}", gemms, *times, f"{r['derived']['speedup_public']:.2f}"])
    said = "µs per call, slowest of 2 ranks, medians; f = 1/2; `results/h200x2/moe-layer-small.json`."
    return grid(["model, tokens per rank", "GEMMs", *columns, "over `auto`"], rows) + "\n\n" + said


def _moe_summary_table(results: Path) -> str:
    path = results / "h200x2" / "moe-layer.json"
    rows = []
    for r in _read(path)["rows"]:
        layer = {name: t["slowest_ns"] / 1e3 for name, t in r["groups"]["layer"].items()}
        public, ours = layer.get("deep_gemm_mega"), layer[r["derived"]["auto"]]
        rows.append([
            f"{r['shape']}, {r['share']:g}", f"{r['derived']['compute_ns'] / 1e3:,.0f}", f"{layer['serial']:,.0f}", f"{ours:,.0f}",
            "–" if public is None else f"{public:,.0f}", "–" if public is None else f"{public / ours:.2f}×",
        ])  # fmt: skip
    head = ["model, share of remote picks", "its two GEMMs, µs", "step by step", "one kernel", "public fused kernel", "over it"]
    return grid(head, rows) + "\n\nTwo H200s, 8,192 tokens each; public: `sgl-deep-gemm` 0.1.5; `results/h200x2/moe-layer.json`."


def _attention_kernels_table(results: Path) -> str:
    path = results / "h200" / "attention-kernels.json"
    if not path.exists():
        return "Not measured yet."
    content = json.loads(path.read_text(encoding="utf-8"))
    names = list(content["rows"][0]["times"])
    lines = [
        [f"{r['heads']}, {r['sequence']:,}", *(f"{r['times'][n]['slowest_ns'] / 1e3:,.1f} ({r['tflops'][n]:.0f})" for n in names)]
        for r in content["rows"]
    ]
    said = "".join(f"; {name}: {why}" for name, why in content["missing"].items())
    foot = f"µs (TFLOP/s), one H200, medians of {content['settings']['rounds']} rounds{said}; `results/h200/attention-kernels.json`."
    return grid(["heads, sequence", *names], lines) + "\n\n" + foot


def _moe_gemm_table(results: Path) -> str:
    rows = []
    for r in _read(results / "h200" / "grouped-gemm.json")["rows"]:
        t = r["tflops"]
        cells = [
            f"{t[ours]:,.0f} / {t[theirs]:,.0f}" for ours, theirs in (("linear1", "deep_gemm_linear1"), ("linear2", "deep_gemm_linear2"))
        ]
        rows.append([r["shape"], f"{r['experts']}, {r['rows']:,}", *cells, f"{r['derived']['over_deep_gemm']:.3f}"])
    head = ["model", "experts, rows", "Linear-1: ours / DeepGEMM", "Linear-2", "time over DeepGEMM's"]
    return grid(head, rows) + "\n\nTFLOP/s, padded rows, one H200; `results/h200/grouped-gemm.json`."


def _moe_model_table(results: Path) -> str:
    """Stall per Linear-2 tile from the platform file and the local times, beside what remote rows cost. Loads of experts are not in the
    file: all SMs are taken to have remote rows."""
    platform = load_platform("h200-nvlink4", samples=False)
    rows = []
    for r in _read(results / "h200x2" / "moe-layer.json")["rows"]:
        ns = {name: t["slowest_ns"] for name, t in r["groups"]["gemm"].items()}
        tiles1, tiles2 = (max(r["rows"]) / 128 * columns / 256 / platform.sms for columns in (2 * r["intermediate"], r["hidden"]))
        alone1, alone2 = ns["swiglu"] / tiles1, ns["rows_local"] / tiles2
        stores = burst(r["share"], platform, fill=r["tokens"] * r["top_k"] / max(r["rows"]), duplex=DUPLEX)
        sent = _sent_rows(r)
        cells = []
        for name in ("rows", "both_interleaved"):
            gap = gap_ns(alone1, alone2, tiles1 / tiles2, interleaved=name != "rows")
            measured = (ns[name] - ns[f"{name}_local"]) / tiles2
            cells.append(f"{stores.stall_ns(gap, 0.0 if name == 'rows' else sent / tiles2) / 1e3:.1f}")
            cells.append(f"{measured / 1e3:.1f}")
        rows.append([
            f"{r['shape']}, {r['share']:g}", f"{alone1 / 1e3:.1f}, {alone2 / 1e3:.1f}",
            f"{stores.burst_bytes / 2**20:.1f} MiB, {stores.drain_ns / 1e3:.1f}", f"{stores.aligned_ns / 1e3:.1f}", *cells,
        ])  # fmt: skip
    head = ["model, f", "time of a tile: Linear-1, Linear-2", "burst V, V/R", "(V − Q)/R if aligned", "one after the other: closed form",
            "measured", "interleaved: closed form", "measured"]  # fmt: skip
    return grid(head, rows) + "\n\nµs; stalls per Linear-2 tile. Platform `h200-nvlink4`, nothing refitted."


def _moe_forms_table(results: Path) -> str:
    """Forms of the kernel that were tried, question by question; those of one question ran side by side."""
    content = _read(results / "h200x2" / "moe-forms.json")
    parts = []
    for run in content["runs"]:
        cases = [f"{r['shape']}, {r['share']:g}{', skewed' if r.get('alpha') else ''}" for r in run["rows"]]
        lines = [[form, *(f"{r['us'][form][0]:,.0f}" for r in run["rows"])] for form in run["rows"][0]["us"]]
        parts.append(grid([f"{run['question']} ({run['note']})", *cases], lines))
    return "\n\n".join([*parts, "µs, slowest rank, by model and f; compare within a column of one table only."])


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


TABLES: dict[str, Callable[[Path], str]] = {
    "platform": _platform_table,
    "producers": _producers_table,
    "predict-example": _predict_example,
    "gates": _gates_table,
    "residuals": _residuals_table,
    "comparison": _comparison_table,
    "attention": _attention_table,
    "attention-summary": _attention_summary_table,
    "attention-orders": _attention_orders_table,
    "attention-split": _attention_split_table,
    "attention-forms": _attention_forms_table,
    "attention-stores": _attention_stores_table,
    "attention-models": _attention_models_table,
    "attention-clocks": _attention_clocks_table,
    "attention-designs": _attention_designs_table,
    "dit": _dit_table,
    "exchange-bound": _exchange_bound_table,
    "ulysses-overlap": _overlap_table,
    "ulysses-measured": _overlap_measured_table,
    "link-power": _link_power_table,
    "head-exchange": _head_exchange_table,
    "moe": _moe_table,
    "moe-orders": moe_orders_table,
    "moe-lead": moe_lead_table,
    "moe-spans": moe_spans_table,
    "moe-summary": _moe_summary_table,
    "moe-small": _moe_small_table,
    "moe-dispatch": _moe_dispatch_table,
    "moe-gemm": _moe_gemm_table,
    "moe-model": _moe_model_table,
    "moe-forms": _moe_forms_table,
    "w4a8": w4a8_table,
    "w4a8-gemm": w4a8_gemm_table,
    "attention-kernels": _attention_kernels_table,
    **EIGHT,
    **SIMULATED,
}
