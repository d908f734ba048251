"""The command line: verbs and their arguments, no logic.

Results go to stdout, progress and complaints to stderr. Exit codes: 0 done, 1 a check asked for with --check failed, 2 usage or
file, 3 unsuitable machine, 4 a calibration failed its gates. Each verb imports what it needs, so that `predict` starts fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from xstage import __version__
from xstage.errors import XStageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except XStageError as error:
        print(f"xstage {options.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"xstage {options.verb}: package {error.name!r} is missing: pip install 'xstage[gpu]'", file=sys.stderr)
        return 3
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xstage", description="What happens to a remote GPU store after it was issued.")
    parser.add_argument("--version", action="version", version=f"xstage {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    v = verb("calibrate", _calibrate, "Measure issue floor, drain rate and capacity on peer-connected GPUs (start it with torchrun).")
    v.add_argument("--out", required=True, help="platform file to write")
    v.add_argument("--name", help="platform name (default: from the GPU)")
    v.add_argument("--method", action="append", choices=("st_global", "bulk"), help="store method, may be given twice (default: both)")
    v.add_argument("--repeats", type=int, default=3, help="repeats of the whole protocol (default 3)")
    v.add_argument("--check", action="store_true", help="exit 4 when a quality gate fails")
    v.add_argument("--json", action="store_true", help="print the platform's tables as JSON instead of a table")

    v = verb("predict", _predict, "Issue time, period and back-pressure of a repeated burst on a platform.")
    v.add_argument("--platform", default="h200-nvlink4", help="gallery name or file (default h200-nvlink4)")
    v.add_argument("--producers", type=float, help="K (default: all SMs)")
    v.add_argument("--bytes", dest="bytes_per_producer", required=True, type=_size, help="B per producer, for example 32768 or 32KiB")
    v.add_argument("--gap", dest="gap_ns", type=_time, default=0.0, help="G between bursts of the issuing role, for example 6us or 500ns")
    v.add_argument("--method", default="st_global", help="st_global or bulk")
    v.add_argument("--json", action="store_true")

    v = verb("audit", _audit, "Hold a kernel design against both bounds of a platform; says reshape or piggyback.")
    v.add_argument("design", help="shipped design name or TOML file")
    v.add_argument("--platform", default="h200-nvlink4", help="gallery name or file (default h200-nvlink4)")
    v.add_argument("--check", action="store_true", help="exit 1 when a bound is violated")
    v.add_argument("--json", action="store_true")

    v = verb("simulate", _simulate, "Run a MegaMoE tile order on a platform: spans, stalls, and a trace for Perfetto.")
    _workload_arguments(v)
    v.add_argument("--order", default="interleaved", help="expert-wave, interleaved, alternating or groups (default interleaved)")
    v.add_argument("--lead", type=int, help="D in rows (default: the knee)")
    v.add_argument("--local", action="store_true", help="local-store control")
    v.add_argument("--trace", help="trace file to write, for ui.perfetto.dev")
    v.add_argument("--json", action="store_true")

    v = verb("plan", _plan, "Choose tile order, lead, store method, staging depth and tile for a MegaMoE layer.")
    _workload_arguments(v)
    v.add_argument("--layer", action="store_true", help="for xstage.MegaMoE, the kernel that there is: which schedule and lead_rows")
    v.add_argument("--json", action="store_true")

    v = verb("report", _report, "Write one self-contained HTML page; calibrates first where GPUs with peer access are found.")
    v.add_argument("--out", default="xstage-report.html", help="page to write (default xstage-report.html)")
    v.add_argument("--platform", help="gallery name or file instead of calibrating")
    v.add_argument("--design", action="append", help="design to audit on the page, may be given again (default: the shipped ones)")
    v.add_argument("--charts", help="folder for the charts as SVG and PNG too")

    v = verb("compare", _compare, "Compare two platform files quantity by quantity from their raw samples.")
    v.add_argument("a")
    v.add_argument("b")
    v.add_argument("--different-gpus", action="store_true", help="compare although the fingerprints name different GPUs")
    v.add_argument("--check", action="store_true", help="exit 1 when a quantity is SLOWER")
    v.add_argument("--json", action="store_true")

    v = verb("bench", _bench, "Benchmarks (start them with torchrun), and the numbers that README and docs take from result files.")
    v.add_argument(
        "what",
        choices=("attention", "moe", "moe-layer", "moe-lead", "moe-spans", "w4a8", "dit", "docs"),
        help="docs: write results/headline.json and the generated tables anew",
    )
    v.add_argument("--out", help="attention, moe…, dit: result file to write")
    v.add_argument(
        "--shapes", nargs="+", help="attention: rows (heads × sequences; default) or dit (diffusion transformers); moe…: models' names"
    )
    v.add_argument(
        "--groups",
        nargs="+",
        help="groups of variants; attention: residual, baseline (default for rows), forms, order, traffic, dit (default for dit); "
        "moe-layer: gemm, layer, torch (default: all); dit: step, layer, layer_graph (default: these), step_graph",
    )
    v.add_argument("--heads", type=int, nargs="+", default=[4, 12], help="attention: heads per rank (default 4 12)")
    v.add_argument("--sequences", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="attention: whole sequences")
    v.add_argument("--tokens", type=int, default=8192, help="moe-layer, moe-lead, moe-spans: tokens per rank (default 8192)")
    v.add_argument("--sizes", type=int, nargs="+", help="moe, w4a8: tokens per rank (default 8192 27904 55808; 64 … 8192)")
    v.add_argument("--weights", choices=("fp8", "mxfp4"), default="fp8", help="moe: format of weights (default fp8)")
    v.add_argument("--shares", type=float, nargs="+", help="moe…: shares of remote picks (default 0.5 0.875)")
    v.add_argument("--models", nargs="+", help="dit: diffusion transformers by name, for example flux_1_1024 (default: all)")
    v.add_argument("--layers", type=int, default=3, help="dit: blocks of a transformer that are built (default 3)")
    v.add_argument("--budget", type=float, default=240.0, help="no row is begun after this many seconds (default 240)")
    v.add_argument("--platform", default="h200-nvlink4", help="platform for predictions and bounds (default h200-nvlink4)")
    v.add_argument("--results", default="results", help="docs: folder of result files (default results)")
    v.add_argument("--documents", nargs="*", default=["README.md", "docs"], help="docs: markdown files or folders (default README.md docs)")
    v.add_argument("--check", action="store_true", help="docs: exit 1 when something was not up to date")
    v.add_argument("--prebuild", metavar="FOLDER", help="moe…: only compile the kernels, for two ranks and XSTAGE_KERNELS=FOLDER")

    v = verb("prebuild", _prebuild, "Compile the kernels of a MoE layer into a folder ahead of time; needs no GPU.")
    v.add_argument("--out", required=True, help="folder; processes find it by XSTAGE_KERNELS=FOLDER")
    v.add_argument("--shapes", nargs="+", required=True, help="models, for example Qwen3.5 GLM-5.2")
    v.add_argument("--tokens", type=int, default=8192, help="most tokens per rank (default 8192)")
    v.add_argument("--ranks", type=int, required=True, help="ranks of the expert-parallel group")
    v.add_argument("--schedules", nargs="+", default=["auto"], help="as MegaMoE takes them (default auto)")
    v.add_argument("--weights", choices=("fp8", "mxfp4"), default="fp8", help="format of weights (default fp8)")
    v.add_argument("--rows-once", action="store_true", help="for MegaMoE(rows_once=True)")
    v.add_argument("--picks", nargs="+", default=["int64"], help="dtypes of topk_idx (default int64)")
    v.add_argument("--rows", nargs="+", default=["bfloat16"], help="dtypes of x (default bfloat16)")

    v = verb("doctor", _doctor, "Say what runs on this machine, what does not, and the command that mends it.")
    v.add_argument("--check", action="store_true", help="exit 1 when something that calibrate needs is missing")
    v.add_argument("--json", action="store_true")
    return parser


def _calibrate(options: argparse.Namespace) -> int:
    from xstage.calibration import calibrate
    from xstage.calibration.table import summary, sweep_table
    from xstage.platform import METHODS

    platform = calibrate(out=options.out, name=options.name, methods=tuple(options.method or METHODS), repeats=options.repeats)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(summary(platform), indent=1) if options.json else sweep_table(platform))
        print(f"wrote {options.out}", file=sys.stderr)
        for gate in platform.failed_gates:
            print(f"gate failed: {gate.name}: {gate.value:.3g} {gate.unit}, limit {gate.limit:g} ({gate.detail})", file=sys.stderr)
    return 4 if platform.failed_gates and options.check else 0


def _predict(options: argparse.Namespace) -> int:
    from xstage.predict import predict, text

    result = predict(options.platform, options.producers, options.bytes_per_producer, options.gap_ns, options.method)
    print(json.dumps(result, indent=1) if options.json else text(result))
    return 0


def _audit(options: argparse.Namespace) -> int:
    from xstage.design import audit, load_design
    from xstage.platform import load_platform

    result = audit(load_design(options.design), load_platform(options.platform, samples=False))
    print(json.dumps(result.to_json(), indent=1) if options.json else result.text())
    return 1 if options.check and result.action != "piggyback" else 0


def _workload_arguments(v: argparse.ArgumentParser) -> None:
    v.add_argument("--shape", required=True, help="model shape, for example Qwen3.5")
    v.add_argument("--tokens", type=int, default=8192, help="tokens per rank (default 8192)")
    v.add_argument("--ranks", type=int, default=8, help="expert-parallel ranks (default 8)")
    v.add_argument("--routing", default="balanced", help="balanced, power, or a JSON file with one count per expert (default balanced)")
    v.add_argument("--alpha", type=float, default=1.0, help="exponent of the power law (default 1.0)")
    v.add_argument("--seed", type=int, default=0)
    v.add_argument("--weight-bits", type=int, choices=(4, 8), default=8)
    v.add_argument(
        "--platform", help="gallery name or file (default paper-8gpu, which the shapes' mainloops fit; with --layer h200-nvlink4)"
    )


def _workload(options: argparse.Namespace) -> Any:
    from xstage.simulate.shapes import moe_workload

    return moe_workload(
        options.shape, options.tokens, ranks=options.ranks, routing=options.routing, alpha=options.alpha, seed=options.seed,
        weight_bits=options.weight_bits,
    )  # fmt: skip


def _simulate(options: argparse.Namespace) -> int:
    from xstage.platform import check_writable, load_platform
    from xstage.simulate.mega_moe import as_json, describe, simulate_moe
    from xstage.simulate.trace import write_trace

    if options.trace:
        check_writable(options.trace, "trace")
    workload, platform = _workload(options), load_platform(options.platform or "paper-8gpu", samples=False)
    run = simulate_moe(
        workload, platform, options.order, lead_rows=options.lead, remote=not options.local, trace=bool(options.trace)
    )  # fmt: skip
    print(json.dumps(as_json(run), indent=1) if options.json else "\n".join(describe(run, platform)))
    if options.trace:
        capacity = float(platform.method("st_global").capacity_bytes(platform.sms))
        print(write_trace(options.trace, run.timeline, capacity, ctas=workload.ctas), file=sys.stderr)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from xstage.layer_plan import LayerPlan, plan_layer
    from xstage.moe.shapes import shape
    from xstage.planner import Plan, plan
    from xstage.platform import load_platform
    from xstage.simulate import routing

    chosen: Plan | LayerPlan
    if options.layer:
        m = shape(options.shape)
        load = routing.named(options.routing, options.tokens * options.ranks, m.experts, m.top_k, options.alpha, options.seed)
        platform, weights = load_platform(options.platform or "h200-nvlink4", samples=False), {8: "fp8", 4: "mxfp4"}[options.weight_bits]
        chosen = plan_layer(m, load.counts.tolist(), options.ranks, platform, weights=weights)
    else:
        chosen = plan(_workload(options), load_platform(options.platform or "paper-8gpu", samples=False))
    print(json.dumps(chosen.as_json(), indent=1) if options.json else "\n".join(chosen.describe()))
    return 0


def _report(options: argparse.Namespace) -> int:
    from xstage.report.write import write_report

    print(write_report(options.out, platform=options.platform, designs_to_audit=options.design, charts=options.charts))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from xstage.bench.compare import compare, text, to_json, worst
    from xstage.platform import load_platform

    rows = compare(load_platform(options.a), load_platform(options.b), allow_different_gpus=options.different_gpus)
    print(json.dumps(to_json(rows), indent=1) if options.json else text(rows))
    return 1 if options.check and worst(rows) == "SLOWER" else 0


def _bench(options: argparse.Namespace) -> int:
    if options.prebuild:
        kept = ("moe", "moe-layer", "moe-lead", "moe-spans", "w4a8")
        if options.what not in kept:
            raise XStageError(f"prebuild: bench {options.what} has no kernels that can be kept; {', '.join(kept)} have")
        from xstage.studies import moe_layer, moe_lead, moe_orders, moe_spans, w4a8

        if options.what == "moe":
            largest = max(options.sizes or moe_orders.SIZES)
            number = moe_orders.prebuild(
                options.prebuild, shapes=options.shapes or moe_orders.SHAPES, tokens=largest, weights=options.weights
            )
        elif options.what == "w4a8":
            number = w4a8.prebuild(options.prebuild, shapes=options.shapes or w4a8.SHAPES, sizes=options.sizes or w4a8.SIZES)
        else:
            study: Any = {"moe-layer": moe_layer, "moe-lead": moe_lead, "moe-spans": moe_spans}[options.what]
            number = study.prebuild(options.prebuild, shapes=options.shapes or study.SHAPES, tokens=options.tokens)
        print(f"{number} kernels in {options.prebuild}")
        return 0
    if options.what != "docs":
        if not options.out:
            raise XStageError(f"out: bench {options.what} needs a result file to write")
        _bench_on_gpus(options)
        sys.stdout.flush()
        os._exit(0)  # tearing NCCL down under captured graphs can hang
    from pathlib import Path

    from xstage.bench.tables import refresh

    documents = [path for name in options.documents for path in (sorted(Path(name).glob("*.md")) if Path(name).is_dir() else [Path(name)])]
    changed = refresh(Path(options.results), documents)
    for path in changed:
        print(path)
    return 1 if options.check and changed else 0


def _bench_on_gpus(options: argparse.Namespace) -> None:
    if options.what == "attention":
        from xstage.studies import attention

        shapes = options.shapes or ["rows"]
        if len(shapes) > 1:
            raise XStageError(f"shapes: {' '.join(shapes)} must be one of rows and dit")
        attention.run(
            options.out, shapes=shapes[0], groups=options.groups, heads=options.heads, sequences=options.sequences,
            budget_s=options.budget, platform=options.platform,
        )  # fmt: skip
    elif options.what == "dit":
        from xstage.studies import dit

        dit.run(
            options.out, models=options.models or tuple(dit.MODELS), layers=options.layers, groups=options.groups or dit.DEFAULT_GROUPS,
            budget_s=options.budget,
        )  # fmt: skip
    elif options.what == "moe":
        from xstage.studies import moe_orders

        moe_orders.run(
            options.out, shapes=options.shapes or moe_orders.SHAPES, sizes=options.sizes or moe_orders.SIZES,
            shares=options.shares or moe_orders.SHARES, budget_s=options.budget, weights=options.weights,
        )  # fmt: skip
    elif options.what == "w4a8":
        from xstage.studies import w4a8

        w4a8.run(options.out, shapes=options.shapes or w4a8.SHAPES, sizes=options.sizes or w4a8.SIZES, budget_s=options.budget)
    elif options.what == "moe-lead":
        from xstage.studies import moe_lead

        moe_lead.run(
            options.out, shapes=options.shapes or moe_lead.SHAPES, tokens=options.tokens, shares=options.shares or moe_lead.SHARES,
            budget_s=options.budget,
        )  # fmt: skip
    elif options.what == "moe-spans":
        from xstage.studies import moe_spans

        moe_spans.run(
            options.out, shapes=options.shapes or moe_spans.SHAPES, tokens=options.tokens, shares=options.shares or moe_spans.SHARES,
            budget_s=options.budget, platform=options.platform,
        )  # fmt: skip
    else:
        from xstage.studies import moe_layer

        moe_layer.run(
            options.out, shapes=options.shapes or moe_layer.SHAPES, tokens=options.tokens, shares=options.shares or moe_layer.SHARES,
            groups=options.groups or moe_layer.GROUPS, budget_s=options.budget, platform=options.platform,
        )  # fmt: skip


def _prebuild(options: argparse.Namespace) -> int:
    from xstage.moe.prebuild import prebuild

    for path in prebuild(
        options.out, options.shapes, tokens=options.tokens, ranks=options.ranks, schedules=options.schedules, picks=options.picks,
        rows=options.rows, weights=options.weights, rows_once=options.rows_once,
    ):  # fmt: skip
        print(path)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from xstage.doctor import examine, text

    findings = examine()
    print(json.dumps([f.__dict__ for f in findings], indent=1) if options.json else text(findings))
    return 1 if options.check and not all(f.ok for f in findings) else 0


def _size(text: str) -> float:
    return _quantity(text, {"gib": 1024**3, "mib": 1024**2, "kib": 1024, "b": 1, "": 1}, "a size such as 32768, 32KiB or 1.5MiB")


def _time(text: str) -> float:
    return _quantity(text, {"ms": 1e6, "us": 1e3, "µs": 1e3, "ns": 1, "": 1}, "a time such as 6us, 500ns or 500 (ns)")


def _quantity(text: str, units: dict[str, float], wanted: str) -> float:
    number = text.strip().lower()
    for unit, factor in units.items():
        if number.endswith(unit):
            try:
                return float(number.removesuffix(unit)) * factor
            except ValueError:
                continue
    raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
