"""Charts of the simulated studies, in the style of the paper's figures 8–11, and of what was measured of 8–10; from result files alone.

Every function takes the content of a result file (see `studies.result`) and returns a matplotlib figure; `write_all` draws those whose
files exist. Each chart says whether it is simulated or measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from xstage.moe.spans import EDGES_NS
from xstage.studies.moe84 import summary
from xstage.studies.paper import MOE84

WAVE, MIXED, PAPER, CONTROL = "#c44e52", "#4c72b0", "#222222", "#8c8c8c"
SIMULATED = "simulated"


def speedups(result: dict[str, Any]) -> Any:
    """Figure 8: interleaved over expert-wave for the 84 configurations, by model."""
    rows, summary, paper = result["outputs"]["rows"], result["outputs"]["summary"], result["paper"]
    models = list(dict.fromkeys(r["model"] for r in rows))
    figure, axis = plt.subplots(figsize=(10, 4.2), layout="constrained")
    kinds = list(dict.fromkeys((r["precision"], r["routing"]) for r in rows))
    for i, model in enumerate(models):
        for j, kind in enumerate(kinds):
            values = [r["speedup"] for r in rows if r["model"] == model and (r["precision"], r["routing"]) == kind]
            x = [i * 14 + j * 3 + n * 0.9 for n in range(len(values))]
            color = plt.get_cmap("Paired")(2 * j + 1)
            label = f"{kind[0]}, {'skewed' if kind[1] == 'power' else kind[1]}" if i == 0 else None
            axis.bar(x, [v - 1 for v in values], width=0.85, bottom=1, color=color, label=label)
    axis.axhline(1, color=PAPER, linewidth=0.8)
    axis.axhline(paper["geomean"], color=PAPER, linestyle=":", linewidth=1, label=f"paper's geometric mean {paper['geomean']}")
    synthetic = {r["model"] for r in rows if r["synthetic"]}
    axis.set_xticks(
        [i * 14 + 5.4 for i in range(len(models))], [m + (" (synthetic)" if m in synthetic else "") for m in models], fontsize=8
    )
    axis.set_ylabel("interleaved over expert-wave, ×")
    axis.set_title(
        f"{len(rows)} configurations, {SIMULATED}: geometric mean {summary['geomean']:.2f} (paper {paper['geomean']}), "
        f"max {summary['max']:.2f} ({paper['max']}), min {summary['min']:.2f} ({paper['min']}, fitted)",
        fontsize=10,
    )
    axis.legend(fontsize=8, ncols=3)
    return figure


def measured_speedups(result: dict[str, Any]) -> Any:
    """Figure 8 as measured (`studies.moe_orders`): interleaved over expert-wave, sorted, with the paper's four figures as lines."""
    rows = sorted((r for r in result["rows"] if "derived" in r), key=lambda r: r["derived"]["speedup"])
    kinds = list(dict.fromkeys((r["share"], r["routing"]) for r in sorted(rows, key=lambda r: (-r["share"], r["routing"]))))
    figure, axis = plt.subplots(figsize=(10, 4.2), layout="constrained")
    for i, (share, family) in enumerate(kinds):
        at = [(x, r["derived"]["speedup"]) for x, r in enumerate(rows) if (r["share"], r["routing"]) == (share, family)]
        label = f"f = {share:g}, {'skewed' if family == 'power' else family}"
        color = plt.get_cmap("Paired")(2 * i + 1)
        axis.bar([x for x, _ in at], [v - 1 for _, v in at], width=0.85, bottom=1, color=color, label=label)
    predicted = [(x, r["predicted"]["speedup"]) for x, r in enumerate(rows) if r.get("predicted")]
    if predicted:
        axis.plot(*zip(*predicted, strict=True), ".", color=PAPER, markersize=4, label=f"{SIMULATED}, nothing refitted")
    names = {"max": "maximum", "geomean": "geometric mean", "median": "median", "min": "minimum"}
    for (key, name), style in zip(names.items(), ("--", ":", "-.", "--"), strict=True):
        axis.axhline(MOE84[key], color=CONTROL, linestyle=style, linewidth=1, label=f"paper's {name} {MOE84[key]:g}")
    axis.axhline(1, color=PAPER, linewidth=0.8)
    found = summary([r["derived"]["speedup"] for r in rows])
    axis.set_xlabel("configurations, sorted")
    axis.set_ylabel("interleaved over expert-wave, ×")
    axis.set_title(
        f"{len(rows)} configurations, W8A8, measured on {result['settings']['world']} GPUs: "
        + ", ".join(f"{name} {found[key]:.2f}" for key, name in names.items()),
        fontsize=10,
    )
    axis.legend(fontsize=8, ncols=2, loc="upper left")
    return figure


def activity(result: dict[str, Any]) -> Any:
    """Figure 9: tensor-core activity over time, and outstanding bytes under it."""
    outputs = result["outputs"]
    figure, axes = plt.subplots(2, 2, figsize=(11, 5), sharex=True, sharey="row", layout="constrained")
    for column, (order, color) in enumerate((("expert-wave", WAVE), ("interleaved", MIXED))):
        data = outputs["activity"][order]
        top, bottom = axes[0][column], axes[1][column]
        top.fill_between(data["time_us"], [100 * v for v in data["tensor_active"]], step="post", color=color, alpha=0.75)
        top.set_title(f"{order}: mean {100 * data['mean_active']:.0f}%, end {data['end_us']:.0f} µs", fontsize=10)
        for key, shade, label in (("outstanding_max_bytes", 0.25, "largest"), ("outstanding_mean_bytes", 0.75, "mean")):
            values = [b / 2**20 for b in data[key]]
            bottom.fill_between(data["time_us"], values, step="post", color=color, alpha=shade, linewidth=0, label=label)
        bottom.axhline(outputs["capacity_bytes"] / 2**20, color=PAPER, linestyle="--", linewidth=0.8, label="Q")
        bottom.set_xlabel("time, µs")
        bottom.legend(fontsize=8, loc="upper right")
    axes[0][0].set_ylabel("instances in a mainloop, %")
    axes[1][0].set_ylabel("outstanding, MiB")
    figure.suptitle(f"{result['inputs']['shape']}, skewed routing, {SIMULATED}", fontsize=11)
    return figure


def span_distributions(result: dict[str, Any]) -> Any:
    """Figure 10: spans of Linear-2 tiles by order, with the paper's medians as lines."""
    outputs = result["outputs"]
    edges = outputs["span_edges_us"]
    models = list(outputs["span_counts"])
    figure, axes = plt.subplots(2, 4, figsize=(12, 5), sharex=True, layout="constrained")
    for axis, model in zip(axes.flat, models, strict=False):
        for kind, color in (("expert-wave", WAVE), ("interleaved", MIXED), ("local stores", CONTROL)):
            counts = outputs["span_counts"][model][kind]
            total = max(sum(counts), 1)
            axis.stairs([c / total for c in counts], edges, color=color, fill=kind != "local stores", alpha=0.6, label=kind)
        for value, color in zip(result["paper"]["span_medians_us"][model], (WAVE, MIXED), strict=True):
            axis.axvline(value, color=color, linestyle="--", linewidth=1)
        axis.set_title(model, fontsize=9)
        axis.set_yticks([])
    axes.flat[-1].axis("off")
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("sender-visible span of a Linear-2 tile, µs (dashed: paper's medians)", fontsize=9)
    figure.suptitle(f"Span distributions, {SIMULATED}", fontsize=11)
    return figure


def table2(result: dict[str, Any]) -> Any:
    """Predicted against measured spans and stalls of table 2."""
    rows, table = result["outputs"]["rows"], result["paper"]["table2"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for axis, limit, unit in ((left, 11, "span"), (right, 5.5, "stall")):
        axis.plot([0, limit], [0, limit], color=CONTROL, linewidth=0.8)
        axis.set_xlabel(f"paper, measured {unit}, µs")
        axis.set_ylabel(f"model, {unit}, µs")
    left.fill_between([0, 11], [0, 9.9], [0, 12.1], color=CONTROL, alpha=0.15, linewidth=0)
    right.fill_between([0, 5.5], [-0.6, 4.9], [0.6, 6.1], color=CONTROL, alpha=0.15, linewidth=0)
    for r in rows:
        span_wave, span_mixed, _, stall, _, stall_mixed = table[r["model"]]
        left.plot(span_wave, r["span_wave_us"], "o", color=WAVE)
        left.plot(span_mixed, r["span_interleaved_us"], "s", color=MIXED)
        left.annotate(r["model"], (span_wave, r["span_wave_us"]), fontsize=6, xytext=(3, -8), textcoords="offset points")
        right.plot(stall, r["stall_wave_us"], "o", color=WAVE)
        right.plot(stall_mixed, r["stall_interleaved_us"], "s", color=MIXED)
        right.annotate(r["model"], (stall, r["stall_wave_us"]), fontsize=6, xytext=(3, -8), textcoords="offset points")
    fabric = result["outputs"].get("fabric")
    if fabric:
        left.plot(
            [table[r["model"]][0] for r in fabric["unbroken_in_step"]], [r["span_wave_us"] for r in fabric["unbroken_in_step"]], "x",
            color=WAVE, label="all ranks, unbroken run, instances in step",
        )  # fmt: skip
        left.legend(fontsize=7)
    figure.suptitle(f"Table 2 from first principles, {SIMULATED} (bands: 10%, 0.6 µs; circles wave, squares interleaved)", fontsize=10)
    return figure


def residuals(result: dict[str, Any]) -> Any:
    """Figure 11: residual over attention alone, with the completion-coupled counterfactual and the clock band."""
    series, band = result["outputs"]["series"], result["paper"]["clock_band"]
    figure, axes = plt.subplots(1, len(series), figsize=(5 * len(series), 4), sharey=True, layout="constrained", squeeze=False)
    for axis, (name, rows) in zip(axes[0], series.items(), strict=True):
        x = [r["tokens"] for r in rows]
        wide = [100 * band for _ in rows]
        axis.fill_between(x, [-v for v in wide], wide, color=MIXED, alpha=0.15, label="±2% clock band")
        for key, label, color, mark in (
            ("paper_residual_us", "paper, measured", PAPER, "o"),
            ("residual_us", f"model, {SIMULATED}", MIXED, "s"),
            ("completion_coupled_us", "completion-coupled", WAVE, "^"),
        ):
            axis.plot(x, [100 * r[key] / r["attention_us"] for r in rows], mark + "-", color=color, label=label, linewidth=1)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("tokens")
    axes[0][0].set_ylabel("residual over attention alone, %")
    axes[0][0].legend(fontsize=7)
    return figure


def scale(result: dict[str, Any]) -> Any:
    """Where interleaving stops to pay: speed-up over drain rate, and over ranks for each port."""
    outputs = result["outputs"]
    models = list(dict.fromkeys(r["model"] for r in outputs["by_rate"]))
    ports = list(result["inputs"]["ports_bytes_per_ns"])
    figure, axes = plt.subplots(1, 1 + len(ports), figsize=(4 * (1 + len(ports)), 4), sharey=True, layout="constrained")
    for i, model in enumerate(models):
        color = plt.get_cmap("tab10")(i)
        rows = [r for r in outputs["by_rate"] if r["model"] == model]
        axes[0].plot([r["drain_rate"] for r in rows], [r["speedup"] for r in rows], color=color, label=model, linewidth=1)
        axes[0].plot(
            [r["drain_rate"] for r in rows if r["worth_it"]], [r["speedup"] for r in rows if r["worth_it"]], "o", color=color, markersize=4
        )
        for axis, port in zip(axes[1:], ports, strict=True):
            there = [r for r in outputs["by_ranks"] if r["model"] == model and r["port"] == port]
            axis.plot([str(r["ranks"]) for r in there], [r["speedup"] for r in there], "o-", color=color, linewidth=1, markersize=4)
            axis.set_title(f"{port}, {SIMULATED} on paper", fontsize=9)
            axis.set_xlabel("ranks")
    axes[0].set_xscale("log")
    axes[0].set_xlabel("drain rate R, GB/s (dots: gain above the model's error)")
    axes[0].set_ylabel("interleaved over expert-wave, ×")
    for axis in axes:
        axis.axhline(1, color=PAPER, linewidth=0.8)
    axes[0].legend(fontsize=7)
    return figure


def lead(result: dict[str, Any]) -> Any:
    """Speed-up over the lead D in units of D_knee, without and with dispatch on the link."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, dispatch, title in zip(axes, ("none", "pull"), ("tokens there at the start", "dispatch pulls on the same link"), strict=True):
        for i, r in enumerate(result["outputs"]["rows"]):
            axis.plot([d / r["knee"] for d in r["leads"]], r[f"speedup_{dispatch}"], ".-", color=plt.get_cmap("tab10")(i), label=r["model"])
        axis.axvline(1, color=PAPER, linestyle="--", linewidth=0.8)
        axis.axhline(1, color=CONTROL, linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("lead D over D_knee")
        axis.set_title(f"{title}, {SIMULATED}", fontsize=10)
    axes[0].set_ylabel("interleaved over expert-wave, ×")
    axes[0].legend(fontsize=7)
    return figure


def measured_spans(result: dict[str, Any]) -> Any:
    """Figure 10 as measured (`studies.moe_spans`): spans of Linear-2 tiles by order, and with all rows local, per row."""
    rows = result["rows"]
    figure, axes = plt.subplots(1, len(rows), figsize=(3.4 * len(rows), 3.4), sharex=True, layout="constrained", squeeze=False)
    edges = EDGES_NS / 1e3
    shown = (
        ("expert_wave", "remote", WAVE, "expert-wave"), ("interleaved", "remote", MIXED, "interleaved"),
        ("interleaved", "local", CONTROL, "interleaved, all rows local"),
    )  # fmt: skip
    for axis, r in zip(axes[0], rows, strict=True):
        for order, stores, color, label in shown:
            counts = r["orders"][order][stores][0]["span_counts"]
            total = max(sum(counts), 1)
            axis.stairs([c / total for c in counts], edges, color=color, fill=stores == "remote", alpha=0.6, label=label)
        axis.set_title(f"{r['shape']}, f = {r['share']:g}", fontsize=9)
        axis.set_yticks([])
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("sender-visible span of a Linear-2 tile, µs", fontsize=9)
    figure.suptitle(f"Span distributions, measured on {result['settings']['world']} GPUs (rank 0)", fontsize=11)
    return figure


def measured_activity(result: dict[str, Any]) -> Any:
    """Figure 9 as measured: share of the math warpgroups in a main loop over a launch, a line of charts per row of the file."""
    rows = result["rows"]
    figure, axes = plt.subplots(len(rows), 2, figsize=(11, 2.3 * len(rows)), sharex="row", sharey=True, layout="constrained", squeeze=False)
    for line, r in zip(axes, rows, strict=True):
        for axis, (order, color) in zip(line, (("expert_wave", WAVE), ("interleaved", MIXED)), strict=True):
            for stores in ("remote", "local"):
                found = r["orders"][order][stores][0]
                bins, remote = len(found["activity"]), stores == "remote"
                edges = [found["whole_us"] * i / bins for i in range(bins + 1)]
                label = f"{stores}, mean {found['busy']:.0%}, end {found['whole_us']:,.0f} µs"
                axis.stairs(
                    [100 * share for share in found["activity"]], edges, color=color if remote else CONTROL, fill=remote,
                    alpha=0.75 if remote else 1.0, label=label,
                )  # fmt: skip
            axis.set_title(f"{r['shape']}, f = {r['share']:g}, {order.replace('_', '-')}", fontsize=9)
            axis.legend(fontsize=7, loc="lower center")
        line[0].set_ylabel("in a main loop, %", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("time in the kernel, µs")
    figure.suptitle(f"Math warpgroups in a main loop, measured on {result['settings']['world']} GPUs (rank 0)", fontsize=11)
    return figure


CHARTS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "figure8-speedups": ("moe84", speedups),
    "figure9-activity": ("timelines", activity),
    "figure10-spans": ("timelines", span_distributions),
    "figure11-residuals": ("table3", residuals),
    "table2": ("table2", table2),
    "scale": ("scale", scale),
    "lead": ("lead", lead),
}
MEASURED = {
    "figure8-measured": ("moe", measured_speedups),
    "figure9-measured": ("moe-spans", measured_activity),
    "figure10-measured": ("moe-spans", measured_spans),
}


def write_all(results: Path, out: Path, kind: str = "svg") -> list[Path]:
    """Draw every chart whose result file exists in `results` (results/simulated, or results/h200x2) into `out`; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "xstage"  # the same file for the same data
    written = []
    for name, (study, draw) in {**CHARTS, **MEASURED}.items():
        source = results / f"{study}.json"
        if not source.is_file():
            continue
        figure = draw(json.loads(source.read_text(encoding="utf-8")))
        target = out / f"{name}.{kind}"
        figure.savefig(target, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        plt.close(figure)
        written.append(target)
    return written
