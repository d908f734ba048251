"""What a Linear-2 tile's result stores cost inside the fused MoE kernel (the paper's section 5.2.3, figures 9 and 10), on Hopper GPUs.

A row is a shape and a share f of remote picks. For every order of tiles a whole call is recorded (`xstage.moe.spans`), after a few that
warm it, on every rank, once with results where they belong (`remote`) and once with all of them on their own GPU (`local`, the control);
both also send this rank's rows to the experts. The difference of the mean spans T_RS is the stall that a Linear-2 tile sees; beside it
stands the one that the model predicts from the control's times of a tile (`moe_stall`). Math warps issue their own stores, so nothing
covers a stall (T_cover = 0): it is also what the tensor cores wait for.

`times` are those of the kernel alone without and with records (`…_spans`), interleaved (`bench.timing`): what recording costs.

Of one row a trace of every order is written beside the result file, one CTA in `TRACED`, one warpgroup of it (`…-ORDER-trace.json`).

Not covered: skewed routings, which warps of a warpgroup wait, the reduction.
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

from xstage.bench import timing
from xstage.errors import XStageError
from xstage.moe import routing
from xstage.moe.op import MegaMoE
from xstage.moe.pipeline import KernelPipeline
from xstage.moe.shapes import MoEShape, shape
from xstage.moe.spans import Records, Spans, decode, summary
from xstage.moe.work_table import TILE_COLUMNS
from xstage.platform import Platform, load_platform
from xstage.simulate.mega_moe import DUPLEX
from xstage.simulate.trace import named, slice_event, write_events
from xstage.studies.moe_layer import load_random, order_pipeline, sent_bytes
from xstage.studies.moe_stall import Wave, burst, filling, gap_ns

SHAPES, SHARES = ("Qwen3.5", "Qwen3-30B"), (0.5, 0.875)
ORDERS, STORES = ("interleaved", "expert_wave"), ("remote", "local")
WARM, TRACED = 3, 10
GROUPS = 2  # math warpgroups: each records every tile
MATH, LOADS, SENDS = 1, 2, 3

Measure = Callable[[float], tuple[dict[str, Any], dict[str, Records]]]
Open = Callable[[MoEShape], AbstractContextManager[Measure]]


def derived(row: Mapping[str, Any], platform: Platform) -> dict[str, Any]:
    """Per order, µs: mean T_RS over ranks and its control's, and their ratio; the time from one Linear-2 tile of an SM to the next, with
    its share of Linear-1, in the control (`period_us`); by how much remote rows make it longer (`stall_us`), and what the model says
    (`predicted_stall_us`: the wait of `queue_wait_ns`, in expert-wave order by phases; V of real rows, R with both directions loaded).

    Args:
        row: `shape`, `tokens`, `share`, `counts` of all experts, and `orders`: order → `remote` and `local` → a summary per rank.
    """
    m, answers = shape(row["shape"]), {}
    stores = burst(row["share"], platform, duplex=DUPLEX, **filling(row["counts"], row["share"]))
    for name, found in row["orders"].items():
        spans = {which: _mean(found[which], "store_span") for which in STORES}
        tiles1, tiles2 = (sum(r["tiles"][layer] for r in found["local"]) for layer in (0, 1))
        alone = {which: tile_times(found[which]) for which in STORES}
        periods = {which: 1e3 * gap_ns(*alone[which], tiles1 / max(tiles2, 1), True) for which in STORES}
        ranks = len(found["local"])
        rounds = max(tiles2 / GROUPS / ranks / platform.sms, 1e-9)
        rows_ns = sent(m, row["tokens"], row["share"]) / rounds / stores.rate
        if name == "expert_wave":
            mine = row["counts"][: len(row["counts"]) // ranks]
            wave = Wave.of(mine, 2 * m.intermediate // TILE_COLUMNS, m.hidden // TILE_COLUMNS, platform.sms // 2)
            linear1_us, linear2_us = alone["local"]
            predicted = stores.wave_stall_ns(1e3 * linear1_us, 1e3 * linear2_us, wave, rows_ns * stores.rate)
        else:
            predicted = stores.stall_ns(periods["local"], rows_ns * stores.rate)
        answers[name] = {
            "span_us": round(spans["remote"], 3), "control_us": round(spans["local"], 3),
            "over_control": round(spans["remote"] / spans["local"], 4), "period_us": round(periods["local"] / 1e3, 3),
            "stall_us": round((periods["remote"] - periods["local"]) / 1e3, 3), "drain_us": round(stores.drain_ns / 1e3, 3),
            "sent_us": round(rows_ns / 1e3, 3), "predicted_stall_us": round(predicted / 1e3, 3),
        }  # fmt: skip
    return answers


def tile_times(ranks: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean time of a tile of either layer with the gap before it, µs; of the summaries of all ranks."""
    return (
        sum(_mean(ranks, part) for part in ("linear1_main", "linear1_epilogue", "gap1")),
        sum(_mean(ranks, part) for part in ("linear2_main", "store_span", "gap2")),
    )


def sent(model: MoEShape, tokens: int, share: float) -> float:
    """Bytes of rows that a rank sends to others."""
    return sent_bytes(round(share * tokens * model.top_k), 0, model.hidden)


def _mean(ranks: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean over ranks of a mean; 0 where nothing of that name was recorded."""
    return sum(float(r[name].get("mean", 0.0)) for r in ranks) / len(ranks)


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Largest span of the interleaved order over its control's, and largest errors of a predicted stall of either order: of the closed
    form, and of the simulation where it has been added (`moe_prediction`)."""
    if not rows:
        return {}
    figures = {
        "moe.span_over_control.max": (max(r["derived"]["interleaved"]["over_control"] for r in rows), "ratio", 4),
        "moe.stall_error_us.max": (max(abs(d["predicted_stall_us"] - d["stall_us"]) for r in rows for d in r["derived"].values()), "µs", 3),
    }
    if all(r.get("predicted") for r in rows):
        errors = [abs(r["predicted"][name]["stall_us"] - d["stall_us"]) for r in rows for name, d in r["derived"].items()]
        figures["moe.simulated_stall_error_us.max"] = (max(errors), "µs", 3)
    return {key: {"value": round(value, digits), "unit": unit} for key, (value, unit, digits) in figures.items()}


def trace_events(records: Records, every: int = TRACED) -> list[dict[str, Any]]:
    """Events for Perfetto of one CTA in `every`: its first math warpgroup, the waits of its loading warp, and its sending warp."""
    events = []
    for cta in range(0, records.ctas, every):
        events += named(cta + 1, f"SM {cta}", {MATH: "math warpgroup", LOADS: "waits of the loading warp", SENDS: "sending warp"})
        t = records.tiles
        for i in _where(t, cta, group=0):
            args = {"m": int(t["m"][i]), "n": int(t["n"][i])}
            layer = f"Linear-{t['layer'][i]}"
            events.append(slice_event(f"{layer} main loop", cta + 1, MATH, t["start"][i], t["half_start"][i], args))
            events.append(slice_event(f"{layer} epilogue", cta + 1, MATH, t["half_start"][i], t["end"][i], args))
        w = records.loads
        for i in _where(w, cta):
            name = "rows to arrive" if w["layer"][i] == 1 else "Linear-1"
            events.append(slice_event(name, cta + 1, LOADS, w["start"][i], w["end"][i], {"m": int(w["m"][i])}))
        s = records.sends
        for i in _where(s, cta):
            args = {"item": int(s["item"][i])}
            events.append(slice_event("wait for its turn", cta + 1, SENDS, s["start"][i], s["turn"][i], args))
            events.append(slice_event("send", cta + 1, SENDS, s["turn"][i], s["end"][i], args))
    return events


def _where(part: Mapping[str, Any], cta: int, group: int | None = None) -> list[int]:
    wanted = part["cta"] == cta
    if group is not None:
        wanted = wanted & (part["group"] == group)
    return [int(i) for i in wanted.nonzero()[0]]


def run(
    out: str, *, shapes: Sequence[str] = SHAPES, tokens: int = 8192, shares: Sequence[float] = SHARES, rounds: int = 5,
    budget_s: float = 240.0, pause_s: float = 0.04, platform: str = "h200-nvlink4",
) -> dict[str, Any]:  # fmt: skip
    """Record every (shape, share) row and write a result file after each; run by every rank (torchrun).

    Args:
        out: path of the result file; unfinished, it is continued. shapes: names of `xstage.moe.shapes`. tokens: per rank.
        shares: of remote picks. rounds: of the kernel's times. budget_s: no row is begun after this many seconds.
        platform: gallery name or path, for the predictions.

    Returns:
        The content of the result file.

    Raises:
        UnsuitableMachine: fewer than two ranks, or the kernels cannot run here.
        XStageError: unknown shape, numbers outside their range, a path that cannot be written, records that were dropped, or outputs that
            differ with records.
    """
    if tokens < 1:
        raise XStageError(f"tokens: {tokens} must be at least 1")
    models, known = [shape(name) for name in shapes], load_platform(platform, samples=False)
    timing.start_group("bench moe-spans")
    settings = {
        "world": dist.get_world_size(), "tokens": tokens, "shapes": list(shapes), "shares": list(shares), "orders": list(ORDERS),
        "warm": WARM, "rounds": rounds, "pause_s": pause_s, "platform": platform,
    }  # fmt: skip
    results = timing.ResultFile(out, "moe-spans", write=dist.get_rank() == 0, settings=settings)
    opened = partial(_opened, tokens=tokens, rounds=rounds, pause_s=pause_s)
    if walk(results, models, shares, opened, known, budget_s, write=dist.get_rank() == 0):
        results.finish()
    timing.meet()
    return results.content


def walk(
    results: timing.ResultFile, models: Sequence[MoEShape], shares: Sequence[float], opened: Open, platform: Platform, budget_s: float,
    write: bool = True,
) -> bool:  # fmt: skip
    """Measure what `results` does not hold yet; False: the budget ended before all was there.

    Args:
        opened: a shape → context whose value measures a share: the row, and this rank's records of the remote calls. write: traces too.
    """
    begun = time.monotonic()
    # One rank decides what there is to do, and its clock, or ranks would part ways.
    done = {tuple(key) for key in timing.gather([(row["shape"], row["share"]) for row in results.content["rows"]])[0]}
    for model in models:
        todo = [share for share in shares if (model.name, share) not in done]
        if not todo:
            continue
        if timing.gather(time.monotonic() - begun)[0] > budget_s:
            return False
        with opened(model) as measure:
            for share in todo:
                if timing.gather(time.monotonic() - begun)[0] > budget_s:
                    return False
                row, records = measure(share)
                row["derived"] = derived(row, platform)
                if write and (model, share) == (models[0], shares[0]):
                    for order, of_rank in records.items():
                        write_events(results.path.with_name(f"{results.path.stem}-{order}-trace.json"), trace_events(of_rank))
                results.content["headline"] = headline([*results.content["rows"], row])
                results.add(row)
                if write:
                    said = ", ".join(
                        f"{order}: T_RS {d['span_us']:.2f} µs, local {d['control_us']:.2f}, predicted stall {d['predicted_stall_us']:.2f}"
                        for order, d in row["derived"].items()
                    )
                    print(f"{model.name} f={share:g}: {said} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    return True


def prebuild(folder: str, *, shapes: Sequence[str] = SHAPES, tokens: int = 8192, ranks: int = 2) -> int:
    """Compile what the study uses into a folder for `XSTAGE_KERNELS`, without a GPU; returns how many kernels are there."""
    from xstage.moe.prebuild import Work, fill, kernels_of

    work: list[Work] = []
    for model in [shape(name) for name in shapes]:
        for order in ORDERS:
            work += kernels_of(model, tokens, ranks, order, None, None, True, False, recorded=True)
    return len(fill(folder, work))


@contextmanager
def _opened(model: MoEShape, tokens: int, rounds: int, pause_s: float) -> Iterator[Measure]:
    with MegaMoE(
        num_experts=model.experts, hidden=model.hidden, intermediate=model.intermediate, top_k=model.top_k, max_tokens_per_rank=tokens,
        schedule=ORDERS[0], fallback="error",
    ) as moe:  # fmt: skip
        load_random(moe, model)
        torch.cuda.empty_cache()  # symmetric memory does not come out of torch's cache
        assert moe._kernels is not None
        others = {order: order_pipeline(moe, order) for order in ORDERS[1:]}
        results = torch.empty(moe._kernels.exchange.layout.rows, model.hidden, dtype=torch.bfloat16, device=moe.device)
        yield partial(_measure, moe, {ORDERS[0]: moe._kernels, **others}, model, results, tokens, rounds, pause_s)
        timing.meet()
        for pipeline in others.values():
            pipeline.free()
    torch.cuda.empty_cache()


def _measure(
    moe: MegaMoE, pipelines: Mapping[str, KernelPipeline], model: MoEShape, results: torch.Tensor, tokens: int, rounds: int, pause_s: float,
    share: float,
) -> tuple[dict[str, Any], dict[str, Records]]:  # fmt: skip
    """results: bf16 [rows, hidden], where the control's rows go."""
    from xstage.moe.grouped_gemm import ctas_of

    generator = torch.Generator(device=moe.device).manual_seed(1 + moe.rank)
    x = torch.randn(tokens, model.hidden, device=moe.device, generator=generator, dtype=torch.bfloat16)
    weights = torch.rand(tokens, model.top_k, device=moe.device, generator=generator) / model.top_k
    idx = routing.draw_remote(tokens, model.experts, model.top_k, ranks=moe.world, me=moe.rank, share=share, device=moe.device)
    counts = [sum(ranks) for ranks in zip(*timing.gather(routing.count(idx, model.experts).tolist()), strict=True)]
    places = torch.arange(len(results), device=moe.device) * (2 * model.hidden) + results.data_ptr()
    layout = next(iter(pipelines.values())).exchange.layout
    spans = Spans.of(layout, model.intermediate, moe.device, ctas_of(moe.device.index))
    wanted, out = torch.empty_like(x), torch.empty_like(x)
    orders: dict[str, dict[str, list[dict[str, Any]]]] = {}
    kept: dict[str, Records] = {}
    timed: dict[str, Callable[[], Any]] = {}
    for order, pipeline in pipelines.items():
        pipeline.run(x, None, idx, weights, wanted)
        pipeline.check()
        slots = pipeline.exchange.row_slot
        control = torch.where(slots != 0, places, 0)
        orders[order] = {}
        for which, given in zip(STORES, (slots, control), strict=True):
            records = recorded(pipeline, spans, (x, idx, weights), given, out)
            if which == "remote" and not all(timing.gather(torch.equal(out, wanted))):
                raise XStageError(f"spans: {order} gave other bits with records than without")
            if any(timing.gather(records.dropped)):
                raise XStageError(f"spans: {records.dropped} records of {order} found no room on rank {moe.rank}")
            orders[order][which] = _compact(timing.gather(summary(records)))
            if which == "remote":
                kept[order] = records
        timed |= {order: partial(_kernel, pipeline, None), f"{order}_spans": partial(_kernel, pipeline, spans)}
        timing.meet()
    times = timing.interleaved(timed, rounds=rounds, pause_s=pause_s)
    for pipeline in pipelines.values():
        pipeline.spans = None
        pipeline.check()
    interleaved = pipelines["interleaved"].exchange.order
    assert interleaved is not None
    row = {
        "shape": model.name, "routing": "balanced", "tokens": tokens, "share": share, "lead_rows": interleaved.lead_rows, "counts": counts,
        "orders": orders, "times": {name: t.to_json() for name, t in times.items()},
    }  # fmt: skip
    return row, kept


def recorded(
    pipeline: KernelPipeline, spans: Spans, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], slots: torch.Tensor, out: torch.Tensor
) -> Records:
    """The last of a few whole calls, whose rows of results go to `slots`. Only its records are read."""
    x, idx, weights = inputs
    pipeline.spans = spans
    for _ in range(WARM + 1):
        spans.clear()
        timing.meet()
        pipeline.exchange.dispatch(x, None, idx, weights)
        pipeline.gemms(slots)
        pipeline.exchange.combine(idx, out)
    pipeline.check()
    pipeline.spans = None
    return decode(spans.to_numpy())


def _compact(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Curve and distribution of the first rank only: the file is read by people too."""
    return [ranks[0], *({k: v for k, v in r.items() if k not in ("activity", "span_counts")} for r in ranks[1:])]


def _kernel(pipeline: KernelPipeline, spans: Spans | None) -> None:
    pipeline.spans = spans
    pipeline.exchange.ready.zero_()
    pipeline.gemms(pipeline.exchange.row_slot)
