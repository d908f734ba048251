"""What weights in MXFP4 cost or gain: the whole MoE layer with them beside the same layer in fp8, on two or more Hopper GPUs.

A row is a model's shape and a number of tokens per rank, few (where an expert's weight is read for a handful of rows) and many (where
arithmetic decides). Both layers run as `schedule="auto"` makes them, on the same x in bf16 and the same picks, in CUDA graphs, interleaved
(`bench.timing`). Tokens of up to `SMALL` share one pair of layers, made for the most of them; each larger number has its own.

Weights are random and not the same numbers in both: only times are compared. Those in MXFP4 have blocks up to three powers of two below
the largest of their tile, the case of the quick decoder, as quantised matrices have (`Mxfp4Weights.fill`).

Not covered: accuracy (tests/gpu), skewed routing, layers of one GEMM after the other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed as dist

from xstage.attention.serial import graphed
from xstage.bench import timing
from xstage.errors import XStageError
from xstage.moe import routing
from xstage.moe.op import MegaMoE
from xstage.moe.shapes import MoEShape, shape
from xstage.studies import moe_layer
from xstage.studies.moe_layer import load_random

SHAPES = moe_layer.SHAPES
SIZES, SMALL, SHARE = (64, 128, 256, 512, 8192), 512, 0.5
FORMATS = {"w8a8": "fp8", "w4a8": "mxfp4"}


def parts(sizes: Sequence[int]) -> list[list[int]]:
    """Sizes that share a pair of layers: the small ones together.

    Raises:
        XStageError: no size, or one below 1.
    """
    if not sizes or min(sizes) < 1:
        raise XStageError(f"sizes: {list(sizes)} must be at least one, each at least 1")
    few = sorted({tokens for tokens in sizes if tokens <= SMALL})
    return ([few] if few else []) + [[tokens] for tokens in sorted({tokens for tokens in sizes if tokens > SMALL})]


def derived(ns: Mapping[str, float], weight_bytes: Mapping[str, int]) -> dict[str, float]:
    """Of a row: how much faster the layer is with MXFP4, and the share of the bytes that its weights take."""
    return {
        "speedup_over_w8a8": round(ns["w8a8"] / ns["w4a8"], 4), "weight_bytes_ratio": round(weight_bytes["w4a8"] / weight_bytes["w8a8"], 4),
    }  # fmt: skip


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Speedup over few tokens, the worst slowdown at 8,192, and bytes."""
    out: dict[str, dict[str, Any]] = {}

    def put(key: str, values: list[float], figure: Callable[[list[float]], float]) -> None:
        if values:
            out[f"w4a8.{key}"] = {"value": round(figure(values), 4), "unit": "ratio"}

    put("speedup_over_w8a8.small.geomean", [r["derived"]["speedup_over_w8a8"] for r in rows if r["tokens"] <= SMALL], geometric_mean)
    put("slowdown_at_8192.max", [1 / r["derived"]["speedup_over_w8a8"] for r in rows if r["tokens"] == 8192], max)
    put("weight_bytes_ratio", [r["derived"]["weight_bytes_ratio"] for r in rows], max)
    return out


def run(
    out: str, *, shapes: Sequence[str] = SHAPES, sizes: Sequence[int] = SIZES, rounds: int = 9, budget_s: float = 400.0,
    pause_s: float = 0.04,
) -> dict[str, Any]:  # fmt: skip
    """Measure every (shape, tokens) row and write a result file after each; run by every rank (torchrun). Unfinished, it is continued.

    Args:
        out: path of the result file. shapes: names of `xstage.moe.shapes`. sizes: tokens per rank.
        budget_s: no row is begun after this many seconds.

    Returns:
        The content of the result file.

    Raises:
        UnsuitableMachine: fewer than two ranks, or the kernels cannot run here.
        XStageError: unknown shape, numbers outside their range, a path that cannot be written, an output that is not finite.
    """
    models, groups = [shape(name) for name in shapes], parts(sizes)
    timing.start_group("bench w4a8")
    settings = {"world": dist.get_world_size(), "sizes": list(sizes), "share": SHARE, "rounds": rounds, "pause_s": pause_s}
    results = timing.ResultFile(out, "w4a8", write=dist.get_rank() == 0, settings=settings)
    begun, cut_short = time.monotonic(), False
    # One rank's file and one rank's clock say what there is to do, or ranks would part ways.
    done = {tuple(key) for key in timing.gather([(row["shape"], row["tokens"]) for row in results.content["rows"]])[0]}
    for group in groups:
        for model in models:
            todo = [tokens for tokens in group if (model.name, tokens) not in done]
            late = timing.gather(time.monotonic() - begun)[0] > budget_s
            cut_short |= late and bool(todo)
            if late or not todo:
                continue
            with ExitStack() as stack:
                layers = {name: stack.enter_context(_layer(model, max(group), weights)) for name, weights in FORMATS.items()}
                for tokens in todo:
                    what = {"shape": model.name, "tokens": tokens, "max_tokens": max(group)}
                    row = {**what, **_measure(layers, model, tokens, rounds, pause_s)}
                    results.content["headline"] = headline([*results.content["rows"], row])
                    results.add(row)
                    if dist.get_rank() == 0:
                        times = ", ".join(f"{name} {t['slowest_ns'] / 1e3:.1f} µs" for name, t in row["times"].items())
                        said = f"{model.name} {tokens}: {times}, speedup {row['derived']['speedup_over_w8a8']:g}"
                        print(f"{said} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    if not cut_short:
        results.finish()
    timing.meet()
    return results.content


def prebuild(folder: str | Path, *, shapes: Sequence[str] = SHAPES, sizes: Sequence[int] = SIZES, ranks: int = 2) -> int:
    """Compile what the study uses into a folder for `XSTAGE_KERNELS`, without a GPU; returns how many kernels are there."""
    from xstage.moe.prebuild import Work, fill, kernels_of

    work: list[Work] = []
    for model in [shape(name) for name in shapes]:
        for group in parts(sizes):
            for weights in FORMATS.values():
                work += kernels_of(model, max(group), ranks, "auto", None, None, True, False, weights=weights)
    return len(fill(folder, work))


def _layer(model: MoEShape, most: int, weights: str) -> MegaMoE:
    moe = MegaMoE(
        num_experts=model.experts, hidden=model.hidden, intermediate=model.intermediate, top_k=model.top_k, max_tokens_per_rank=most,
        weight_format=weights, fallback="error",
    )  # fmt: skip
    load_random(moe, model)
    torch.cuda.empty_cache()  # symmetric memory does not come out of torch's cache
    return moe


def _measure(layers: Mapping[str, MegaMoE], model: MoEShape, tokens: int, rounds: int, pause_s: float) -> dict[str, Any]:
    moe = layers["w8a8"]
    generator = torch.Generator(device=moe.device).manual_seed(1 + moe.rank)
    idx = routing.draw_remote(tokens, model.experts, model.top_k, ranks=moe.world, me=moe.rank, share=SHARE, device=moe.device)
    x = torch.randn(tokens, model.hidden, device=moe.device, generator=generator, dtype=torch.bfloat16)
    weights = torch.rand(tokens, model.top_k, device=moe.device, generator=generator) / model.top_k
    timed, calls = {}, 8 if tokens <= SMALL else 2
    for name, layer in layers.items():
        y = layer(x, idx, weights)
        layer.check()
        if not all(timing.gather(bool(y.isfinite().all() & (y != 0).any()))):
            raise XStageError(f"{name}: the layer's output is not finite, or all zero, on {model.name} with {tokens} tokens")
        timed[name] = graphed(partial(layer, x, idx, weights), calls)
        timing.meet()
    times = timing.interleaved(timed, calls=calls, rounds=rounds, pause_s=pause_s)
    for layer in layers.values():
        layer.check()
    sizes = {name: layer.size_bytes.weights for name, layer in layers.items()}
    return {
        "share": SHARE, "schedule": moe.schedule, "weight_bytes": sizes,
        "derived": derived({name: t.slowest_ns for name, t in times.items()}, sizes),
        "times": {name: t.to_json() for name, t in times.items()},
    }  # fmt: skip
