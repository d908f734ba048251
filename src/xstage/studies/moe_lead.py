"""How far Linear-1 should run ahead of Linear-2 (the paper's D, section 4.2), measured: the MoE layer over the lead, on two or more GPUs.

A row is a shape and a share f of remote picks. The layer runs interleaved with every lead of `orders`, from the least that the kernel can
have to all of Linear-1 first, and in expert-wave order beside it; whole layer in a CUDA graph, x in bf16, the same inputs, interleaved
(`bench.timing`). All orders must give the same bits. One layer serves them all: `Exchange.order` is set anew before a capture. Of all
kernels only the plan knows the order, so a lead costs one small compilation, of a second.

Of every order one whole call is recorded besides (`xstage.moe.spans`): how long the kernel took (`kernel_us`), and when the last row that a
rank sent counted at its expert (`dispatch_us`), both since the kernel's first record on that rank, the slowest rank's. A short lead
asks for results early, and they share the link with rows that have yet to come; a long one ends with Linear-2 alone.

Leads are compared by the same times by which the best is found, so the best of several looks better than it is by some of their spread.

Not covered: skewed routings, few tokens, `alternating`. What the simulator and the planner say of the same rows: `moe_lead_prediction`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from xstage import tile_order
from xstage.attention.serial import graphed
from xstage.bench import timing
from xstage.errors import XStageError
from xstage.moe import arguments, routing
from xstage.moe.op import MegaMoE
from xstage.moe.shapes import MoEShape, shape
from xstage.moe.spans import Spans
from xstage.moe.work_table import TILE_COLUMNS, TILE_ROWS, WorkOrder
from xstage.studies import moe_layer
from xstage.studies.moe_layer import load_random
from xstage.studies.moe_spans import recorded

SHAPES, SHARES, TOKENS = moe_layer.SHAPES, moe_layer.SHARES, 8192
FACTORS = {"half": 0.5, "2x": 2, "4x": 4, "8x": 8, "16x": 16}  # of the default lead
LEADS = ("least", "knee", "half", "default", "2x", "4x", "8x", "16x", "all")
WAVE, CLUSTERS = "expert_wave", 66

Measure = Callable[[float], dict[str, Any]]
Open = Callable[[MoEShape], AbstractContextManager[Measure]]


def orders(model: MoEShape, tokens: int, ranks: int, clusters: int = CLUSTERS) -> dict[str, WorkOrder]:
    """Name → order: the interleaved order with the leads of `LEADS`, rising, and expert-wave last.

    `least` is what the kernel raises a lead of 0 to; `knee` D_knee of the machine; `all` as many rows as buffers hold, so all of Linear-1
    comes first. A lead that is no other than one before, or above what even routing brings to a rank, is left out.

    Args:
        tokens: most per rank. clusters: of two CTAs, on the GPU.
    """
    columns = (2 * model.intermediate // TILE_COLUMNS, model.hidden // TILE_COLUMNS)

    def made(lead_rows: int | None, name: str = "interleaved") -> WorkOrder:
        return WorkOrder.of(name, *columns, lead_rows=lead_rows, instances=clusters)

    layout = arguments.layout(ranks, model.experts, model.hidden, model.intermediate, model.top_k, tokens)
    default, even = made(None), tokens * model.top_k // TILE_ROWS
    found = {"least": made(1), "default": default, "all": made(layout.rows // TILE_ROWS)}
    rows = {"knee": tile_order.lead_knee(TILE_COLUMNS, 2 * clusters, model.intermediate)}
    rows |= {name: round(factor * default.lead_rows) for name, factor in FACTORS.items()}
    for name, lead_rows in rows.items():
        order = made(lead_rows)
        if lead_rows < even and order.lead not in {known.lead for known in found.values()}:
            found[name] = order
    rising = sorted(found, key=lambda name: (found[name].lead, LEADS.index(name)))
    return {**{name: found[name] for name in rising}, WAVE: made(None, WAVE)}


def derived(ns: Mapping[str, float], predicted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Answers of a row: the best lead, what the default loses against it, what the wave order takes over the default; and what the
    lead loses that the simulator has as the best, and the planner's choice against the best of all orders, where predictions are known.

    Args:
        ns: time of every order, by the names of `orders`. predicted: of `moe_lead_prediction`.
    """
    leads = {name: time for name, time in ns.items() if name != WAVE}
    best = min(leads, key=leads.__getitem__)
    answers: dict[str, Any] = {
        "best": best, "default_loss": round(leads["default"] / leads[best] - 1, 4),
        "default_over_wave": round(ns[WAVE] / leads["default"], 4),
    }  # fmt: skip
    if predicted:
        answers["predicted_best_loss"] = round(leads[predicted["best"]] / leads[best] - 1, 4)
        answers["plan_loss"] = round(ns[predicted["plan"]] / min(ns.values()) - 1, 4)
    return answers


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The largest loss of the default lead against the best one measured, and of the simulator's best where all rows have one."""
    figures = {}
    for name in ("default_loss", "predicted_best_loss"):
        if rows and all(name in r["derived"] for r in rows):
            figures[f"moe_lead.{name}.max"] = {"value": max(r["derived"][name] for r in rows), "unit": "fraction"}
    return figures


def run(
    out: str, *, shapes: Sequence[str] = SHAPES, tokens: int = TOKENS, shares: Sequence[float] = SHARES, rounds: int = 9,
    budget_s: float = 400.0, pause_s: float = 0.04,
) -> dict[str, Any]:  # fmt: skip
    """Measure every (shape, share) row and write a result file after each; run by every rank (torchrun).

    Args:
        out: path of the result file; unfinished, it is continued. It is complete when it has all of `SHAPES` at all of `SHARES`.
        shapes: of this run, names of `xstage.moe.shapes`. tokens: per rank. shares: of remote picks.
        budget_s: no row is begun after this many seconds.

    Returns:
        The content of the result file.

    Raises:
        UnsuitableMachine: fewer than two ranks, or the kernels cannot run here.
        XStageError: unknown shape, numbers outside their range, a path that cannot be written, orders whose outputs differ, or records that
            were dropped.
    """
    if tokens < 1 or not shares or not all(0 <= share <= 1 for share in shares):
        raise XStageError(f"tokens: {tokens} must be at least 1, and shares {list(shares)} lie in 0 … 1")
    models = [shape(name) for name in shapes]
    timing.start_group("bench moe-lead")
    settings = {"world": dist.get_world_size(), "tokens": tokens, "rounds": rounds, "pause_s": pause_s}
    results = timing.ResultFile(out, "moe-lead", write=dist.get_rank() == 0, settings=settings)
    walk(results, models, shares, partial(_opened, tokens=tokens, rounds=rounds, pause_s=pause_s), budget_s)
    if complete(results.content["rows"]):
        results.finish()
    timing.meet()
    return results.content


def complete(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Is every one of `SHAPES` a row at every one of `SHARES`?"""
    return {(r["shape"], r["share"]) for r in rows} >= {(name, share) for name in SHAPES for share in SHARES}


def walk(results: timing.ResultFile, models: Sequence[MoEShape], shares: Sequence[float], opened: Open, budget_s: float) -> None:
    """Measure what `results` does not hold yet, until all is there or the budget ends.

    Args:
        opened: a shape → context whose value measures a share.
    """
    begun = time.monotonic()

    def late() -> bool:
        return bool(timing.gather(time.monotonic() - begun)[0] > budget_s)

    # One rank's file and one rank's clock say what there is to do, or ranks would part ways.
    done = {tuple(key) for key in timing.gather([(row["shape"], row["share"]) for row in results.content["rows"]])[0]}
    for model in models:
        todo = [share for share in shares if (model.name, share) not in done]
        if not todo:
            continue
        if late():
            return
        with opened(model) as measure:
            for share in todo:
                if late():
                    return
                row = measure(share)
                row["derived"] = derived({name: t["slowest_ns"] for name, t in row["times"].items()})
                results.content["headline"] = headline([*results.content["rows"], row])
                results.add(row)
                _say(row, time.monotonic() - begun)


def prebuild(folder: str, *, shapes: Sequence[str] = SHAPES, tokens: int = TOKENS, ranks: int = 2) -> int:
    """Compile what the study uses into a folder for `XSTAGE_KERNELS`, without a GPU; returns how many kernels are there."""
    from xstage.moe.prebuild import Work, fill, kernels_of

    work: list[Work] = []
    for model in [shape(name) for name in shapes]:
        for name, order in orders(model, tokens, ranks).items():
            lead_rows = None if name in ("default", WAVE) else order.lead_rows
            work += kernels_of(model, tokens, ranks, order.name, lead_rows, None, True, False, recorded=True)
    return len(fill(folder, work))


def _say(row: Mapping[str, Any], seconds: float) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        times = ", ".join(f"{name} {t['slowest_ns'] / 1e3:,.0f}" for name, t in row["times"].items())
        said = f"{row['shape']} f={row['share']:g}: {times} µs; best {row['derived']['best']}"
        print(f"{said}, default loses {row['derived']['default_loss']:.1%} ({seconds:.0f} s)", file=sys.stderr, flush=True)


@contextmanager
def _opened(model: MoEShape, tokens: int, rounds: int, pause_s: float) -> Iterator[Measure]:
    with MegaMoE(
        num_experts=model.experts, hidden=model.hidden, intermediate=model.intermediate, top_k=model.top_k, max_tokens_per_rank=tokens,
        schedule="interleaved", fallback="error",
    ) as moe:  # fmt: skip
        load_random(moe, model)
        torch.cuda.empty_cache()  # symmetric memory does not come out of torch's cache
        assert moe._kernels is not None
        clusters = torch.cuda.get_device_properties(moe.device).multi_processor_count // 2
        spans = Spans.of(moe._kernels.exchange.layout, model.intermediate, moe.device, 2 * clusters)
        yield partial(_measure, moe, spans, model, tokens, clusters, rounds, pause_s)
        timing.meet()
    torch.cuda.empty_cache()


def _measure(
    moe: MegaMoE, spans: Spans, model: MoEShape, tokens: int, clusters: int, rounds: int, pause_s: float, share: float
) -> dict[str, Any]:  # fmt: skip
    pipeline = moe._kernels
    assert pipeline is not None
    generator = torch.Generator(device=moe.device).manual_seed(1 + moe.rank)
    x = torch.randn(tokens, model.hidden, device=moe.device, generator=generator, dtype=torch.bfloat16)
    weights = torch.rand(tokens, model.top_k, device=moe.device, generator=generator) / model.top_k
    # On the CPU, as the simulator's loads are drawn.
    idx = routing.draw_remote(tokens, model.experts, model.top_k, ranks=moe.world, me=moe.rank, share=share).to(moe.device)
    counts = [sum(ranks) for ranks in zip(*timing.gather(routing.count(idx, model.experts).tolist()), strict=True)]
    out, wanted, calls = torch.empty_like(x), None, 2
    timed: dict[str, Callable[[], Any]] = {}
    kernel: dict[str, float] = {}
    dispatch: dict[str, float] = {}
    swept = orders(model, tokens, moe.world, clusters)
    for name, order in swept.items():
        pipeline.exchange.order = order
        call = partial(pipeline.run, x, None, idx, weights, out)
        call()
        pipeline.check()
        wanted = out.clone() if wanted is None else wanted
        alike = torch.equal(out, wanted)
        records = recorded(pipeline, spans, (x, idx, weights), pipeline.exchange.row_slot, out)
        if not all(timing.gather(alike and torch.equal(out, wanted))):
            raise XStageError(f"orders: {name} and {next(iter(swept))} gave different bits for {model.name}, f = {share:g}")
        if any(timing.gather(records.dropped)):
            raise XStageError(f"spans: {records.dropped} records of {name} found no room on rank {moe.rank}")
        kernel[name], dispatch[name] = (
            round(max(timing.gather(ns)) / 1e3, 1) for ns in (records.whole_ns, float(records.sends["end"].max(initial=0.0)))
        )
        timed[name] = graphed(call, calls, warm_up=1)
        timing.meet()
    times = timing.interleaved(timed, calls=calls, rounds=rounds, pause_s=pause_s)
    pipeline.check()
    return {
        "shape": model.name, "routing": "balanced", "tokens": tokens, "share": share, "counts": counts,
        "lead_rows": {name: order.lead_rows for name, order in swept.items() if name != WAVE}, "kernel_us": kernel, "dispatch_us": dispatch,
        "times": {name: t.to_json() for name, t in times.items()},
    }  # fmt: skip
