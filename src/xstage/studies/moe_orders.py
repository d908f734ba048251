"""The paper's comparison of tile orders (section 5.2.1, figure 8), measured: interleaved over expert-wave on two or more Hopper GPUs.

A configuration is a shape of the paper, a routing, a number of tokens per rank and a share f of remote picks: 7 × 2 × 3 × 2 = 84. The
paper's 84 are 7 × 2 × 3 with two precisions; here a run has one, W8A8 or W4A8 (weights in MXFP4, a result file of its own), at two shares.
f = 7/8 gives each of two GPUs the egress that 8-way expert parallelism gives it. Sizes and skew are those of the simulated study (`moe84`):
the paper does not print them.

Times are those of the whole layer in a CUDA graph, x in bf16, the same inputs for every variant, interleaved (`bench.timing`): both GEMMs
in one kernel in either order and with all of Linear-1 first, and `serial`, the strongest pipeline of one GEMM after the other.
`schedule="auto"` makes one of these kernels (`xstage.moe.auto_order`), so it has no time of its own.

A shape's weights and buffers are made once for the largest size (any number of tokens up to the maximum may come), so its kernels are one
set. Buffers hold the worst routing; a size whose buffers do not fit is a row that says how many bytes it needs.

Ranks are even by construction: `routing.draw_remote` gives every rank the same hotness, so skew is between experts, not between GPUs.

Not covered: ranks of different load, more than one host. What the simulator makes of the same rows: `moe_prediction`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from xstage.attention.serial import graphed
from xstage.bench import timing
from xstage.errors import XStageError
from xstage.moe import routing
from xstage.moe.auto_order import auto_order
from xstage.moe.op import MegaMoE
from xstage.moe.pipeline import KernelPipeline
from xstage.moe.shapes import PAPER, MoEShape, shape
from xstage.moe.work_table import WorkOrder
from xstage.simulate.routing import Routing
from xstage.studies import moe84
from xstage.studies.moe84 import summary
from xstage.studies.moe_layer import load_random, order_of, order_pipeline

SHAPES = tuple(model.name for model in PAPER)
SIZES, SHARES = moe84.SIZES, (0.875, 0.5)
ROUTINGS = {"balanced": 0.0, "power": moe84.ALPHA}  # exponent of the power law
ORDERS = ("interleaved", "expert_wave")  # that the paper compares
MEASURED = (*ORDERS, "linear1_first")
PRECISIONS = {"fp8": "W8A8", "mxfp4": "W4A8"}
SHARE_NAMES = {0.875: "f78", 0.5: "f12"}  # as headline keys write them
WITHIN = 1.02


@dataclass(frozen=True)
class Configuration:
    """model: the shape. routing: one of `ROUTINGS`. tokens: per rank. share: of remote picks. weights: their format."""

    model: MoEShape
    routing: str
    tokens: int
    share: float
    weights: str = "fp8"

    @property
    def what(self) -> dict[str, Any]:
        """The row of a result file that names it."""
        return {
            "shape": self.model.name, "synthetic": self.model.synthetic, "precision": PRECISIONS[self.weights], "routing": self.routing,
            "alpha": ROUTINGS[self.routing], "tokens": self.tokens, "share": self.share,
        }  # fmt: skip

    @property
    def key(self) -> tuple[Any, ...]:
        return key_of(self.what)


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["shape"], row["routing"], row["tokens"], row["share"]


Measure = Callable[[Configuration], dict[str, Any]]
Open = Callable[[MoEShape, int], AbstractContextManager[Measure]]


def configurations(
    shapes: Sequence[str], sizes: Sequence[int], shares: Sequence[float], weights: str = "fp8"
) -> list[list[Configuration]]:  # fmt: skip
    """All, in the order of measuring: lists of those for which a shape's weights and buffers are made once.

    First the first share at the first size for every shape, then the rest up to the second size, then size by size, so that a run that
    is cut short compares shapes.

    Raises:
        XStageError: unknown shape or format, nothing to do, or numbers outside their range.
    """
    if weights not in PRECISIONS:
        raise XStageError(f"weights: {weights!r} is not one of {', '.join(PRECISIONS)}")
    models = [shape(name) for name in shapes]
    for name, values, good in (
        ("shapes", shapes, True), ("sizes", sizes, all(tokens >= 1 for tokens in sizes)),
        ("shares", shares, all(0 <= share <= 1 for share in shares)),
    ):  # fmt: skip
        if not values or not good:
            raise XStageError(f"{name}: {list(values)} must be at least one; sizes at least 1, shares in 0 … 1")
    both = [(tokens, share) for tokens in sizes for share in shares]
    cuts = [0, 1, *range(2 * len(shares), len(both), len(shares)), len(both)]
    found = []
    for a, b in itertools.pairwise(cuts):
        for model in models if a < b else ():
            found.append([Configuration(model, family, tokens, share, weights) for tokens, share in both[a:b] for family in ROUTINGS])
    return found


def needed_bytes(model: MoEShape, tokens: int, ranks: int, weights: str = "fp8") -> int:
    """Bytes on each rank for `tokens` tokens: weights (twice, while they are made), buffers of both pipelines, x and outputs."""
    sizes: dict[str, Any] = {
        "ranks": ranks, "num_experts": model.experts, "hidden": model.hidden, "intermediate": model.intermediate, "top_k": model.top_k,
        "max_tokens_per_rank": tokens, "weight_format": weights,
    }  # fmt: skip
    serial, fused = MegaMoE.plan_bytes(**sizes, mode="serial"), MegaMoE.plan_bytes(**sizes, mode="fused")
    tensors = tokens * (3 * 2 * model.hidden + 8 * 8 * model.experts)  # and what a draw of picks keeps per expert
    return serial.total + serial.weights + fused.symmetric + fused.local + tensors


def derived(ns: Mapping[str, float], auto: str) -> dict[str, Any]:
    """Ratios of a row: interleaved over expert-wave (`speedup`), interleaved over serial, and what `auto`'s order takes."""
    return {
        "speedup": round(ns["expert_wave"] / ns["interleaved"], 4), "over_serial": round(ns["serial"] / ns["interleaved"], 4),
        "auto": auto, **chosen(ns, auto, "auto"),
    }  # fmt: skip


def chosen(ns: Mapping[str, float], order: str, name: str) -> dict[str, float]:
    """The time of an order over that of the best order, and what it loses against expert-wave (less than 0: it wins), as `name`_…"""
    return {
        f"{name}_over_best": round(ns[order] / min(ns[known] for known in MEASURED if known in ns), 4),
        f"{name}_loss": round(ns[order] / ns["expert_wave"] - 1, 4),
    }


def measured(rows: Sequence[Mapping[str, Any]], share: float | None = None) -> list[Mapping[str, Any]]:
    """Rows that were not skipped, of one share (None: all)."""
    return [r for r in rows if "derived" in r and share in (None, r["share"])]


def of_precision(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """A headline key, as rows of that precision write it: those of W4A8 say so."""
    return key if rows[0].get("precision", "W8A8") == "W8A8" else f"w4a8.{key}"


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The paper's four figures over what was measured, per share, over serial, and how `auto` stands. Keys of W4A8 say so."""
    out: dict[str, dict[str, Any]] = {}
    if not (found := measured(rows)):
        return out

    def put(key: str, value: float, unit: str = "ratio") -> None:
        out[of_precision(found, key)] = {"value": round(value, 4), "unit": unit}

    def of(name: str, of_share: float | None = None) -> list[float]:
        return [r["derived"][name] for r in measured(rows, of_share)]

    for key, value in summary(of("speedup")).items():
        put(f"moe84.{key}", value, "configurations" if key == "configurations" else "ratio")
    for share, name in SHARE_NAMES.items():
        if ratios := of("speedup", share):
            for key in ("geomean", "max", "min"):
                put(f"moe84.{name}.{key}", summary(ratios)[key])
    put("moe84.over_serial.geomean", summary(of("over_serial"))["geomean"])
    put("moe84.over_serial.min", min(of("over_serial")))
    put("moe.auto_within_2pct.share", sum(ratio <= WITHIN for ratio in of("auto_over_best")) / len(found), "fraction")
    put("moe.auto_worst_loss", max(of("auto_loss")), "fraction")
    return out


def run(
    out: str, *, shapes: Sequence[str] = SHAPES, sizes: Sequence[int] = SIZES, shares: Sequence[float] = SHARES, rounds: int = 5,
    budget_s: float = 400.0, pause_s: float = 0.04, weights: str = "fp8",
) -> dict[str, Any]:  # fmt: skip
    """Measure every configuration and write a result file after each; run by every rank (torchrun).

    Args:
        out: path of the result file; unfinished, it is continued. It is complete when it has all of the paper's shapes.
        shapes: of this run, names of `xstage.moe.shapes`. sizes: tokens per rank. shares: of remote picks.
        budget_s: no configuration is begun after this many seconds. weights: their format; a result file has one.

    Returns:
        The content of the result file.

    Raises:
        UnsuitableMachine: fewer than two ranks, or the kernels cannot run here.
        XStageError: unknown shape, numbers outside their range, a path that cannot be written, or orders whose outputs differ.
    """
    todo = configurations(shapes, sizes, shares, weights)
    timing.start_group("bench moe")
    settings = {
        "world": dist.get_world_size(), "sizes": list(sizes), "shares": list(shares), "routings": ROUTINGS,
        "precision": PRECISIONS[weights], "rounds": rounds, "pause_s": pause_s,
    }  # fmt: skip
    results = timing.ResultFile(out, "moe", write=dist.get_rank() == 0, settings=settings)
    free = min(timing.gather(torch.cuda.mem_get_info()[0]))
    walk(results, todo, partial(_opened, rounds=rounds, pause_s=pause_s, weights=weights), dist.get_world_size(), free, budget_s)
    if complete(results.content["rows"], sizes, shares):
        results.finish()
    timing.meet()
    return results.content


def complete(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int], shares: Sequence[float]) -> bool:
    """Is every configuration of the paper's shapes a row?"""
    return {key_of(row) for row in rows} >= {c.key for part in configurations(SHAPES, sizes, shares) for c in part}


def walk(results: timing.ResultFile, todo: Sequence[Sequence[Configuration]], opened: Open, ranks: int, free: int, budget_s: float) -> None:
    """Measure what `results` does not hold yet, until all is there or the budget ends.

    Args:
        opened: a shape and the most tokens → context whose value measures configurations of that shape.
        free: bytes on each rank. Sizes that need more become rows with `skipped` and `needed_bytes`.
    """
    begun = time.monotonic()
    need = {c: needed_bytes(c.model, c.tokens, ranks, c.weights) for part in todo for c in part}
    most: dict[MoEShape, int] = {}
    for c in need:
        if need[c] <= free:
            most[c.model] = max(c.tokens, most.get(c.model, 0))

    def late() -> bool:
        return bool(timing.gather(time.monotonic() - begun)[0] > budget_s)

    # One rank's file and one rank's clock say what there is to do, or ranks would part ways.
    done = set(timing.gather([key_of(row) for row in results.content["rows"]])[0])
    for part in todo:
        left = [c for c in part if c.key not in done]
        for c in left:
            if need[c] > free:
                said = f"needs {need[c]} bytes on each rank, {free} are free"
                results.add({**c.what, "skipped": said, "needed_bytes": need[c]})
        left = [c for c in left if need[c] <= free]
        if not left:
            continue
        if late():
            return
        with opened(left[0].model, most[left[0].model]) as measure:
            for c in left:
                if late():
                    return
                row = {**c.what, "max_tokens": most[c.model], **measure(c)}
                results.content["headline"] = headline([*results.content["rows"], row])
                results.add(row)
                _say(row, time.monotonic() - begun)


def prebuild(folder: str, *, shapes: Sequence[str] = SHAPES, tokens: int = max(SIZES), ranks: int = 2, weights: str = "fp8") -> int:
    """Compile what the study uses into a folder for `XSTAGE_KERNELS`, without a GPU; returns how many kernels are there.

    Args:
        tokens: the largest size, for which buffers are made; kernels fit no other.
    """
    from xstage.moe.prebuild import Work, fill, kernels_of

    work: list[Work] = []
    for model in [shape(name) for name in shapes]:
        for schedule in ("serial", *MEASURED):
            work += kernels_of(model, tokens, ranks, schedule, None, None, True, False, weights=weights)
    return len(fill(folder, work))


def _say(row: Mapping[str, Any], seconds: float) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        what = f"{row['shape']} {row['routing']} {row['tokens']} f={row['share']:g}"
        skew = f"Gini {row['gini']:.3f}, max/mean {row['max_over_mean']:.2f}"
        answers = " ".join(f"{k} {v if isinstance(v, str) else f'{v:g}'}" for k, v in row["derived"].items())
        print(f"{what} ({skew}): {answers} ({seconds:.0f} s)", file=sys.stderr, flush=True)


@contextmanager
def _opened(model: MoEShape, most: int, rounds: int, pause_s: float, weights: str) -> Iterator[Measure]:
    with MegaMoE(
        num_experts=model.experts, hidden=model.hidden, intermediate=model.intermediate, top_k=model.top_k, max_tokens_per_rank=most,
        schedule="serial", fallback="error", weight_format=weights,
    ) as moe:  # fmt: skip
        load_random(moe, model)
        torch.cuda.empty_cache()  # symmetric memory does not come out of torch's cache
        assert moe._kernels is not None
        fused = order_pipeline(moe, MEASURED[0])
        runs = {"serial": (moe._kernels, None), **{name: (fused, order_of(moe, name)) for name in MEASURED}}
        generator = torch.Generator(device=moe.device).manual_seed(1 + moe.rank)
        x = torch.randn(most, model.hidden, device=moe.device, generator=generator, dtype=torch.bfloat16)
        factors = torch.rand(most, model.top_k, device=moe.device, generator=generator) / model.top_k
        yield partial(_measure, moe, runs, x, factors, rounds=rounds, pause_s=pause_s)
        timing.meet()
        fused.free()
    torch.cuda.empty_cache()


def _measure(
    moe: MegaMoE, runs: Mapping[str, tuple[KernelPipeline, WorkOrder | None]], x: torch.Tensor, weights: torch.Tensor, c: Configuration, *,
    rounds: int, pause_s: float,
) -> dict[str, Any]:  # fmt: skip
    model, x, weights = c.model, x[: c.tokens], weights[: c.tokens]
    idx = routing.draw_remote(
        c.tokens, model.experts, model.top_k, ranks=moe.world, me=moe.rank, share=c.share, alpha=ROUTINGS[c.routing], device=moe.device
    )
    mine = timing.gather(routing.count(idx, model.experts).tolist())
    counts = [sum(ranks) for ranks in zip(*mine, strict=True)]
    load = Routing(c.routing, torch.tensor(counts).numpy(), model.top_k, c.tokens * moe.world)
    outs: dict[str, torch.Tensor] = {}
    timed: dict[str, Callable[[], Any]] = {}
    calls = 2 if c.tokens <= SIZES[0] else 1
    out = torch.empty_like(x)
    for name, (pipeline, order) in runs.items():
        pipeline.exchange.order = order  # one pipeline, one set of buffers for all orders
        call = partial(pipeline.run, x, None, idx, weights, out)
        call()
        pipeline.check()
        same = all(timing.gather(torch.equal(outs.setdefault("first", out.clone()), out)))
        if not same:
            raise XStageError(f"orders: {name} and one GEMM after the other gave different bits for {c.what}")
        timed[name] = graphed(call, calls, warm_up=1)
        timing.meet()
    times = timing.interleaved(timed, calls=calls, rounds=rounds, pause_s=pause_s)
    for pipeline, _ in runs.values():
        pipeline.check()
    order = runs["interleaved"][1]
    assert order is not None
    ns = {name: t.slowest_ns for name, t in times.items()}
    return {
        "gini": round(load.gini, 4), "max_over_mean": round(load.max_over_mean, 3), "lead_rows": order.lead_rows, "counts": counts,
        "derived": derived(ns, auto_order(model, c.tokens, moe.world, c.share)), "times": {name: t.to_json() for name, t in times.items()},
    }  # fmt: skip
