"""Markdown tables of the simulated studies, from their result files; `bench.tables` fills them into documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xstage.errors import XStageError


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(r) + " |" for r in rows])


def table2(result: dict[str, Any]) -> str:
    rows = []
    for r in result["outputs"]["rows"]:
        p, e = result["paper"]["table2"][r["model"]], r["errors"]
        rows.append(
            [
                r["model"], f"{r['mma_l2_us']:.2f} / {r['mma_l1_us']:.2f}",
                f"{r['span_wave_us']:.2f} / {p[0]:.2f}", f"{100 * e['span_wave']:+.1f}%",
                f"{r['span_interleaved_us']:.2f} / {p[1]:.2f}", f"{100 * e['span_interleaved']:+.1f}%",
                f"{r['stall_wave_us']:.2f} / {p[3]:.2f}", f"{e['stall_wave_us']:+.2f}",
                f"{r['stall_interleaved_us']:.2f} / {p[5]:.2f}",
            ]
        )  # fmt: skip
    head = [
        "model",
        "T_mma L2 / L1",
        "span wave, model / paper",
        "error",
        "span interleaved",
        "error",
        "stall wave",
        "error µs",
        "stall int.",
    ]
    return grid(head, rows)


def table2_fabric(result: dict[str, Any]) -> str:
    found = result["outputs"]["fabric"]
    rows = []
    for routed, unbroken, in_step in zip(found["routed"], found["unbroken"], found["unbroken_in_step"], strict=True):
        cells = [
            f"{r['span_wave_us']:.2f} ({100 * r['span_error']:+.0f}%), {r['stall_error_us']:+.2f}" for r in (routed, unbroken, in_step)
        ]
        rows.append([routed["model"], *cells, f"{routed['span_interleaved_us']:.2f} ({100 * routed['span_interleaved_error']:+.0f}%)"])
    head = [
        "model", "routed: span wave, stall error µs", "unbroken run: span, stall error", "unbroken, in step: span, stall error",
        "routed: span interleaved",
    ]  # fmt: skip
    return grid(head, rows)


def table2_variants(result: dict[str, Any]) -> str:
    rows = []
    for v in result["outputs"]["variants"]:
        e = v["errors_max_without_dsv4_pro"]
        rows.append(
            [
                v["variant"], f"{100 * e['span_wave']:.1f}%", f"{100 * e['span_interleaved']:.1f}%", f"{e['stall_wave_us']:.2f}",
                f"{v['dsv4_pro_span_wave_us']:.2f}",
            ]
        )  # fmt: skip
    return grid(["one choice changed", "span wave", "span interleaved", "stall wave µs", "DSv4-Pro span wave µs"], rows)


def table2_leave_one_out(result: dict[str, Any]) -> str:
    rows = [[r["left_out"], f"{r['staging_us']:.2f}", f"{100 * r['span_error']:+.1f}%"] for r in result["outputs"]["leave_one_out"]]
    return grid(["left out", "staging from the others, µs", "error of the span left out"], rows)


def table2_tried(result: dict[str, Any]) -> str:
    rows = []
    for t in result["outputs"]["tried"]:
        (low, high), (less, more) = t["others_span_wave"], t["others_stall_wave_us"]
        spread = f"{100 * low:+.0f} … {100 * high:+.0f}%"
        rows.append([t["tried"], f"{t['dsv4_pro_span_wave_us']:.2f}", spread, f"{less:+.2f} … {more:+.2f}"])
    return grid(["tried", "DSv4-Pro span wave µs (7.88)", "other rows: span errors", "other rows: stall errors µs"], rows)


def moe84(result: dict[str, Any]) -> str:
    s, p = result["outputs"]["summary"], result["paper"]
    names = {"geomean": "geometric mean", "median": "median", "max": "maximum", "min": "minimum (fitted)"}
    rows = [[label, f"{s[key]:.3f}", f"{p[key]:.2f}", f"{100 * result['errors'][key]:+.1f}%"] for key, label in names.items()]
    return grid(["84 configurations", "model", "paper", "error"], rows)


def moe84_variants(result: dict[str, Any]) -> str:
    rows = [[v["variant"], *(f"{v[k]:.3f}" for k in ("geomean", "median", "max", "min"))] for v in result["outputs"]["variants"]]
    return grid(["one choice changed", "geometric mean", "median", "maximum", "minimum"], rows)


def moe84_groups(result: dict[str, Any]) -> str:
    rows = [[k, ", ".join(f"{n} {x:.3f}" for n, x in v.items())] for k, v in result["outputs"]["by"].items()]
    return grid(["by", "geometric means"], rows)


def table3(result: dict[str, Any]) -> str:
    rows = []
    for name, series in result["outputs"]["series"].items():
        for r in series:
            rows.append(
                [
                    name, f"{r['tokens']:,}", f"{r['waves']}, {r['last_wave']}",
                    f"{r['residual_us']:.1f}", f"{r['paper_residual_us']:+.1f}",
                    f"{0.02 * r['attention_us']:.1f}", f"{r['completion_coupled_us']:.1f}",
                    f"{r['speedup']:.3f} / {r['paper_speedup']:.3f}",
                ]
            )  # fmt: skip
    head = ["", "M", "waves, last", "E_res model µs", "paper", "±2% clock band", "completion-coupled", "over serial, model / paper"]
    return grid(head, rows)


def scale(result: dict[str, Any]) -> str:
    out = result["outputs"]["by_ranks"]
    ports, ranks = list(dict.fromkeys(r["port"] for r in out)), list(dict.fromkeys(r["ranks"] for r in out))
    rows = []
    for model in dict.fromkeys(r["model"] for r in out):
        cells = []
        for port in ports:
            found = {r["ranks"]: r for r in out if r["model"] == model and r["port"] == port}
            cells.append(" · ".join(f"{found[n]['speedup']:.2f}{'' if found[n]['worth_it'] else '*'}" for n in ranks))
        rows.append([model, *cells])
    return grid(["model", *(f"{p}: " + " · ".join(str(n) for n in ranks) for p in ports)], rows)


def lead(result: dict[str, Any]) -> str:
    rows = []
    for r in result["outputs"]["rows"]:
        at = min(range(len(r["leads"])), key=lambda i: abs(r["leads"][i] - r["knee"]))
        none, pull = r["speedup_none"], r["speedup_pull"]
        rows.append(
            [
                r["model"], str(r["knee"]), f"{none[0]:.2f} · {none[at]:.2f} · {max(none):.2f} (D={r['best_none']}) · {none[-1]:.2f}",
                f"{pull[0]:.2f} · {pull[at]:.2f} · {max(pull):.2f} (D={r['best_pull']}) · {pull[-1]:.2f}",
            ]
        )  # fmt: skip
    return grid(["model", "D_knee", "D = knee/4 · knee · best · 24·knee", "the same with dispatch pulls on the link"], rows)


def speed(result: dict[str, Any]) -> str:
    e = result["errors"]
    rows = [
        [
            f"{result['inputs']['tiles']:,} tiles over {result['inputs']['sms']} SMs",
            f"{e['tiles_ms']:.1f} ms",
            f"{e['tiles_ms_limit']:.0f} ms",
        ],
        ["the same source interpreted, per tile, over compiled", f"{result['outputs']['interpreted_over_compiled']:.0f} ×", ""],
        ["84 configurations × 20 leads, two threads", f"{e['grid_seconds']:.1f} s", f"{e['grid_seconds_limit']:.0f} s"],
    ]
    return grid(["", "measured", "limit"], rows)


def one_list(result: dict[str, Any]) -> str:
    rows = [
        [f"{r['shape']}, {r['share']:g}", f"{r['interleaved_ns'] / 1e3:,.0f}", f"{r['expert_wave_ns'] / 1e3:,.0f}", f"{r['speedup']:.3f}",
         "–" if r["own_shares_speedup"] is None else f"{r['own_shares_speedup']:.3f}", f"{r['measured_speedup']:.3f}"]
        for r in result["outputs"]["rows"]
    ]  # fmt: skip
    head = ["model, f", "interleaved, simulated", "wave, simulated", "interleaved over wave: simulated", "with own shares", "measured"]
    return grid(head, rows) + "\n\nµs of the kernel; measured: the layer, `results/h200x2/moe-layer-earlier.json`."


def one_list_variants(result: dict[str, Any]) -> str:
    rows = [
        [v["variant"], f"{v['median_us']:.2f}", f"{v['max_us']:.2f}", f"{v['difference_max_us']:.2f}"]
        for v in result["outputs"]["variants"]
    ]
    head = ["one choice changed", "error of a stall, median µs", "largest", "largest, as a difference of two simulations"]
    return grid(head, rows)


def from_study(study: str, draw: Callable[[dict[str, Any]], str], results: Path) -> str:
    """A table of a study's result file."""
    source = results / "simulated" / f"{study}.json"
    if not source.is_file():
        raise XStageError(f"results: {source} is missing, make it with: python -m xstage.studies.{study}")
    return draw(json.loads(source.read_text(encoding="utf-8")))


TABLES: dict[str, Callable[[Path], str]] = {
    "simulate-table2": partial(from_study, "table2", table2),
    "simulate-table2-fabric": partial(from_study, "table2", table2_fabric),
    "simulate-table2-variants": partial(from_study, "table2", table2_variants),
    "simulate-table2-tried": partial(from_study, "table2", table2_tried),
    "simulate-table2-leave-one-out": partial(from_study, "table2", table2_leave_one_out),
    "simulate-moe84": partial(from_study, "moe84", moe84),
    "simulate-moe84-groups": partial(from_study, "moe84", moe84_groups),
    "simulate-moe84-variants": partial(from_study, "moe84", moe84_variants),
    "simulate-table3": partial(from_study, "table3", table3),
    "simulate-scale": partial(from_study, "scale", scale),
    "simulate-lead": partial(from_study, "lead", lead),
    "simulate-speed": partial(from_study, "speed", speed),
    "simulate-one-list": partial(from_study, "one_list", one_list),
    "simulate-one-list-variants": partial(from_study, "one_list", one_list_variants),
}
