"""What a MoE layer costs step by step, and how far the whole is from its compute and its bytes; measured on two or more Hopper GPUs.

Each row is a model's shape, a number of tokens per rank, and a share f of remote picks; f = 7/8 gives each of two GPUs the egress that
8-way expert parallelism gives it. Variants of a group run interleaved (`bench.timing`):

* `gemm`: the grouped GEMMs on the rows that a dispatch brought, without exchange: `linear1`, `linear2` (bf16 out, local), `swiglu`
  (Linear-1 as the layer runs it), `rows` (Linear-2 whose rows go to their ranks), `rows_local` (the control: the same into this GPU);
  and both in one kernel, `both_…` by the name of the order, and `both_…_local`.
* `layer`: `dispatch` and `combine` by themselves; the same rows by reads (`dispatch_pull`), and by NCCL (`dispatch_nccl`: gathered by rank,
  `all_to_all_single` with splits that are known, put in the experts' order); the whole layer in a CUDA graph (`serial`), with x in e4m3
  (`serial_e4m3`), and without a graph (`eager`), all with one GEMM after the other; and in a graph with both in one kernel, by the name of
  the order of tiles, `…_once` with rows that go to a rank once. By itself `dispatch` meets its peers only the first time, `combine` every
  time.
* `torch`: plain torch and NCCL with weights in bf16, eager (`pipeline.TorchPipeline`); fewer rounds, for it may be slow.

The bound is compute (`linear1` + `linear2`) plus the bytes that leave the busiest rank over R of a platform file, plus `OVERHEAD_NS` for
launches, meetings, plan and reduction: what a layer takes that overlaps nothing and wastes nothing else.

`extra` adds variants of other packages to the same groups and the same interleaving; see `benchmarks/sgl_deep_gemm.py`.

Not covered: skewed routings, more than one host, back-to-back replays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed as dist

from xstage.attention.serial import graphed
from xstage.bench import timing
from xstage.errors import XStageError
from xstage.moe import quantize, routing
from xstage.moe.auto_order import auto_order
from xstage.moe.exchange import Exchange
from xstage.moe.op import MegaMoE
from xstage.moe.pipeline import KernelPipeline, TorchPipeline
from xstage.moe.reference import Linear
from xstage.moe.shapes import MoEShape, shape
from xstage.moe.weights_mxfp4 import Mxfp4Weights
from xstage.moe.work_table import ORDERS, TILE_COLUMNS, WorkOrder
from xstage.platform import Platform, load_platform

SHAPES, SHARES = ("Qwen3.5", "DSv4-Flash", "Hy3", "Qwen3-30B", "GLM-5.2"), (0.5, 0.875)
OVERHEAD_NS = 150e3
SMALL = 1024  # tokens per rank
GROUPS = ("gemm", "layer", "torch")
ONCE = "_once"  # behind an order's name: with `rows_once`
FUSED = (*ORDERS, "interleaved" + ONCE)
# Shapes as headline keys write them.
MODELS = {"Qwen3.5": "qwen35", "DSv4-Flash": "dsv4_flash", "Hy3": "hy3", "Qwen3-30B": "qwen3_30b", "GLM-5.2": "glm52"}


@dataclass
class Layer:
    """A layer with random weights and one routing, after a call: every buffer of `pipeline` holds what that call left.

    Attributes:
        x: bfloat16 [tokens, hidden]; q, scales: the same in e4m3. idx, weights: [tokens, top_k]. out: what the call returned.
        orders: a pipeline with the same weights for each order of tiles in one kernel, after a call. pull: an exchange by reads.
        rows: of this rank's experts, with paddings. products: bf16 [rows, 2 · intermediate] and [rows, hidden], outputs of `plain`.
    """

    shape: MoEShape
    moe: MegaMoE
    pipeline: KernelPipeline
    x: torch.Tensor
    q: torch.Tensor
    scales: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    orders: dict[str, KernelPipeline]
    pull: Exchange
    rows: int
    products: tuple[torch.Tensor, torch.Tensor]

    def plain(self, which: int) -> None:
        """Linear-1 (0) or Linear-2 (1) as a product alone."""
        from xstage.moe import grouped_gemm

        p, e, w = self.pipeline, self.pipeline.exchange, self.pipeline.weights
        if which == 0:
            grouped_gemm.plain(
                e.activations, e.scales, w.w1, w.w1_scales.flatten(2), e.tile_expert, e.work1, e.totals, self.products[0], 0
            )  # fmt: skip
        else:
            grouped_gemm.plain(p.middle, p.middle_scales, w.w2, w.w2_scales, e.tile_expert, e.work2, e.totals, self.products[1], 1)


Extra = Callable[[Layer], Mapping[str, Mapping[str, Callable[[], Any]]]]


def sent_bytes(pairs: int, arrived: int, hidden: int) -> int:
    """Bytes that leave a rank: `pairs` rows to other ranks with scales and sources, results of `arrived` rows back to other ranks."""
    return pairs * (hidden + 4 * hidden // quantize.BLOCK + 16) + arrived * 2 * hidden


def derived(
    times: Mapping[str, Mapping[str, timing.Times]], bytes_sent: int, rate: float | None, flops: tuple[float, float], auto: str
) -> dict[str, Any]:  # fmt: skip
    """Answers of a row, ns and ratios; only those whose variants were measured. What is compared with others is the order `auto`.

    Args:
        bytes_sent: by the busiest rank. rate: R in bytes/ns, None: no bound. flops: of Linear-1 and Linear-2 on the fullest rank.
        auto: the order that `auto_order` says.
    """
    ns = {name: t.slowest_ns for measured in times.values() for name, t in measured.items()}
    answers: dict[str, Any] = {}
    if auto in ns:
        answers["auto"], ns["auto"] = auto, ns[auto]
    if "linear1" in ns:
        answers["compute_ns"] = round(ns["linear1"] + ns["linear2"], 1)
        answers["swiglu_over_plain"] = round(ns["swiglu"] / ns["linear1"], 4)
        answers["rows_local_over_plain"] = round(ns["rows_local"] / ns["linear2"], 4)
        answers["rows_remote_ns"] = round(ns["rows"] - ns["rows_local"], 1)
        answers["linear1_tflops"], answers["linear2_tflops"] = (
            round(f / ns[n] / 1e3, 1) for f, n in zip(flops, ("linear1", "linear2"), strict=True)
        )
        if rate is not None:
            answers["bytes_over_rate_ns"] = round(bytes_sent / rate, 1)
            answers["bound_ns"] = round(answers["compute_ns"] + bytes_sent / rate + OVERHEAD_NS, 1)
        for name in ("auto", *ORDERS):
            if name in ns:
                answers[f"{name}_over_compute"] = round(ns[name] / answers["compute_ns"], 4)
        if "deep_gemm_linear1" in ns:
            answers["gemm_over_deepgemm"] = round(answers["compute_ns"] / (ns["deep_gemm_linear1"] + ns["deep_gemm_linear2"]), 4)
    if "interleaved" + ONCE in ns and "interleaved" in ns:
        answers["once_over_per_pick"] = round(ns["interleaved" + ONCE] / ns["interleaved"], 4)
    if "interleaved" in ns and "expert_wave" in ns:
        answers["interleaved_over_wave"] = round(ns["expert_wave"] / ns["interleaved"], 4)
    if "auto" in ns and "deep_gemm_mega" in ns:
        answers["speedup_public"] = round(ns["deep_gemm_mega"] / ns["auto"], 4)
    if "serial" in ns:
        if "auto" in ns:
            answers["speedup_unfused"] = round(ns["serial"] / ns["auto"], 4)
        if "bound_ns" in answers:
            answers["serial_over_bound"] = round(ns["serial"] / answers["bound_ns"], 4)
        if "swiglu" in ns:
            steps = ns["dispatch"] + ns["swiglu"] + ns["rows"] + ns["combine"]
            answers["serial_over_steps"] = round(ns["serial"] / steps, 4)
        for other, name in (("torch", "speedup_over_torch"), ("deep_gemm_mega", "speedup_over_deep_gemm_mega")):
            if other in ns:
                answers[name] = round(ns[other] / ns["serial_e4m3" if other == "deep_gemm_mega" else "serial"], 4)
    return answers


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Headline figures per shape: GEMMs against DeepGEMM, times of the layer step by step and in one kernel; and over all shapes.

    Of rows with at most `SMALL` tokens only how they stand against the public kernel.
    """
    out: dict[str, dict[str, Any]] = {}
    small = [r["derived"]["speedup_public"] for r in rows if r["tokens"] <= SMALL and "speedup_public" in r["derived"]]
    rows = [r for r in rows if r["tokens"] > SMALL]

    def put(key: str, value: float, unit: str = "ratio") -> None:
        out[key] = {"value": round(value, 4), "unit": unit}

    def all_of(name: str, share: float) -> list[float]:
        return [r["derived"][name] for r in rows if r["share"] == share and name in r["derived"]]

    for r in rows:
        d, layer = r["derived"], r["groups"].get("layer", {})
        model, share = MODELS.get(r["shape"], r["shape"].lower()), {0.5: "f12", 0.875: "f78"}.get(r["share"])
        if share is None:
            continue
        if "auto" in d:
            put(f"moe.time_us.{share}.{model}", layer[d["auto"]]["slowest_ns"] / 1e3, "µs")
        if share == "f12":
            if "gemm_over_deepgemm" in d:
                put(f"moe.gemm_over_deepgemm.{model}", d["gemm_over_deepgemm"])
            if "serial" in layer:
                put(f"moe.serial_us.f12.{model}", layer["serial"]["slowest_ns"] / 1e3, "µs")
            if "auto_over_compute" in d:
                put(f"moe.over_compute_only.f12.{model}", d["auto_over_compute"])
    over = [r["derived"]["serial_over_bound"] for r in rows if "serial_over_bound" in r["derived"]]
    if over:
        put("moe.serial_over_bound.max", max(over))
    for name, key in (("speedup_unfused", "moe.speedup_unfused"), ("speedup_public", "moe.speedup_public")):
        if ratios := all_of(name, 0.5):
            put(f"{key}.geomean", geometric_mean(ratios))
            if key == "moe.speedup_public":
                put(f"{key}.min", min(ratios))
    if ratios := all_of("interleaved_over_wave", 0.875):
        put("moe.interleaved_over_wave.f78.geomean", geometric_mean(ratios))
        put("moe.interleaved_over_wave.f78.max", max(ratios))
    if small:
        put("moe.speedup_public.small.geomean", geometric_mean(small))
    return out


def run(
    out: str, *, shapes: Sequence[str] = SHAPES, tokens: int = 8192, shares: Sequence[float] = SHARES, rounds: int = 9,
    budget_s: float = 400.0, pause_s: float = 0.04, platform: str | None = "h200-nvlink4", groups: Sequence[str] = GROUPS,
    orders: Sequence[str] = FUSED, extra: Extra | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure every (shape, share) row and write a result file after each; run by every rank (torchrun).

    Args:
        out: path of the result file. shapes: names of `xstage.moe.shapes`. tokens: per rank. shares: of remote picks.
        budget_s: no shape is begun after this many seconds. platform: gallery name or path, whose R gives the bound; None: no bound.
        groups: which of `GROUPS` to run. orders: of tiles in one kernel, besides `serial`; with `ONCE` behind it, rows go once.
        extra: more variants per group, called with each row's layer.

    Returns:
        The content of the result file.

    Raises:
        UnsuitableMachine: fewer than two ranks, or the kernels cannot run here.
        XStageError: unknown group or shape, numbers outside their range, a path that cannot be written.
    """
    for name in groups:
        if name not in GROUPS:
            raise XStageError(f"groups: {name!r} is not one of {', '.join(GROUPS)}")
    if tokens < 1:
        raise XStageError(f"tokens: {tokens} must be at least 1")
    models = [shape(name) for name in shapes]
    known = None if platform is None else load_platform(platform)
    timing.start_group("bench moe-layer")
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = {
        "world": world, "tokens": tokens, "rounds": rounds, "pause_s": pause_s, "platform": platform, "overhead_ns": OVERHEAD_NS,
        "groups": list(groups), "orders": list(orders), "others": extra is not None,
    }  # fmt: skip
    results = timing.ResultFile(out, "moe-layer", write=rank == 0, settings=settings)
    begun, cut_short = time.monotonic(), False
    # One rank decides what there is to do, and its clock, or ranks would part ways.
    done = {tuple(key) for key in timing.gather([(row["shape"], row["share"]) for row in results.content["rows"]])[0]}
    for model in models:
        todo = [share for share in shares if (model.name, share) not in done]
        late = timing.gather(time.monotonic() - begun)[0] > budget_s
        cut_short |= late and bool(todo)
        if late or not todo:
            continue
        with MegaMoE(
            num_experts=model.experts, hidden=model.hidden, intermediate=model.intermediate, top_k=model.top_k,
            max_tokens_per_rank=tokens, schedule="serial", fallback="error",
        ) as moe:  # fmt: skip
            load_random(moe, model)
            fused = {name: order_pipeline(moe, name) for name in orders}
            pull = Exchange(
                replace(moe.layout, pull=True), intermediate=moe.intermediate, group=moe.group, device=moe.device, timeout_s=moe.timeout_s,
                tag=f"{moe.tag}/pull",
            )  # fmt: skip
            for share in todo:
                row = _row(_layer(moe, model, tokens, share, fused, pull), share, groups, rounds, pause_s, known, extra)
                results.content["headline"] = headline([*results.content["rows"], row])
                results.add(row)
                if rank == 0:
                    answers = " ".join(f"{k} {v if isinstance(v, str) else f'{v:g}'}" for k, v in row["derived"].items())
                    print(f"{model.name} f={share:g}: {answers} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
            for pipeline in fused.values():
                pipeline.free()
            pull.free()
        torch.cuda.empty_cache()
    if not cut_short:
        results.finish()
    timing.meet()
    return results.content


def prebuild(folder: str, *, shapes: Sequence[str] = SHAPES, tokens: int = 8192, ranks: int = 2, orders: Sequence[str] = FUSED) -> int:
    """Compile what the study uses into a folder for `XSTAGE_KERNELS`, without a GPU; returns how many kernels are there."""
    from xstage.moe import grouped_gemm
    from xstage.moe.prebuild import Work, fill, kernels_of

    work: list[Work] = []
    for model in [shape(name) for name in shapes]:
        for schedule, quantized in [("serial", False), ("serial", True), *((order, False) for order in orders)]:
            name, once = schedule.removesuffix(ONCE), schedule.endswith(ONCE)
            work += kernels_of(model, tokens, ranks, name, None, None, True, quantized, once=once)
        work += kernels_of(model, tokens, ranks, "serial", None, None, True, False, pull=True)
        work += grouped_gemm.plain_kernels(model.hidden, model.intermediate)
    return len(fill(folder, work))


def load_random(moe: MegaMoE, model: MoEShape) -> None:
    """Random weights, made on the GPU: the same arithmetic, and no matrix in high precision. In MXFP4, where they rest."""
    if isinstance(moe._weights[0], Mxfp4Weights):
        moe._weights[0].fill()
        torch.cuda.synchronize(moe.device)
        return
    experts = model.experts // dist.get_world_size()
    made = []
    for rows, columns in ((2 * model.intermediate, model.hidden), (model.hidden, model.intermediate)):
        w = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=moe.device)
        for part in w:
            part.copy_(torch.randn(rows, columns, device=moe.device, dtype=torch.bfloat16))
        made += [w, (torch.rand(experts, rows // quantize.BLOCK, columns // quantize.BLOCK, device=moe.device) + 0.5) * columns**-0.5]
    moe.load_weights(made[0], made[2], w1_scales=made[1], w2_scales=made[3])


def order_pipeline(moe: MegaMoE, order: str) -> KernelPipeline:
    """Both GEMMs in one kernel in that order of tiles, with buffers of its own and the weights of `moe`."""
    return KernelPipeline(
        moe.layout, moe._weights[0], clamp=moe.clamp, group=moe.group, device=moe.device, timeout_s=moe.timeout_s, tag=f"{moe.tag}/{order}",
        order=order_of(moe, order.removesuffix(ONCE)), once=order.endswith(ONCE),
    )  # fmt: skip


def order_of(moe: MegaMoE, order: str) -> WorkOrder:
    """That order, with the kernel's own lead."""
    columns = (2 * moe.intermediate // TILE_COLUMNS, moe.layout.hidden // TILE_COLUMNS)
    clusters = torch.cuda.get_device_properties(moe.device).multi_processor_count // 2
    return WorkOrder.of(order, *columns, lead_rows=None, instances=clusters)


def _layer(moe: MegaMoE, model: MoEShape, tokens: int, share: float, orders: dict[str, KernelPipeline], pull: Exchange) -> Layer:
    generator = torch.Generator(device=moe.device).manual_seed(1 + moe.rank)
    idx = routing.draw_remote(tokens, model.experts, model.top_k, ranks=moe.world, me=moe.rank, share=share).to(moe.device)
    x = torch.randn(tokens, model.hidden, device=moe.device, generator=generator, dtype=torch.bfloat16)
    q, scales = quantize.quantize_activations(x)
    weights = torch.rand(tokens, model.top_k, device=moe.device, generator=generator) / model.top_k
    assert moe._kernels is not None
    moe(q, idx, weights, x_scales=scales)
    out = moe(x, idx, weights)
    moe.check()
    for name, pipeline in orders.items():
        other = torch.empty_like(out)
        pipeline.run(x, None, idx, weights, other)
        pipeline.check()
        if not torch.equal(other, out):
            raise XStageError(f"orders: {name} and one GEMM after the other gave different bits on rank {moe.rank}")
    rows = int(moe._kernels.exchange.totals[3])
    other = torch.empty_like(out)
    pull.dispatch(x, None, idx, weights)
    pull.combine(idx, other)  # of slots that nobody wrote: only the rows matter
    pull.check()
    real = moe._kernels.exchange.row_slot[:rows] != 0
    if not torch.equal(pull.activations[:rows][real], moe._kernels.exchange.activations[:rows][real]):
        raise XStageError(f"pull: other rows arrived by reads than by stores on rank {moe.rank}")
    products = tuple(
        torch.empty(moe.layout.rows, n, dtype=torch.bfloat16, device=moe.device) for n in (2 * model.intermediate, model.hidden)
    )
    return Layer(model, moe, moe._kernels, x, q, scales, idx, weights, out, orders, pull, rows, (products[0], products[1]))


def _variants(layer: Layer) -> dict[str, dict[str, Callable[[], Any]]]:
    pipeline, moe, exchange = layer.pipeline, layer.moe, layer.pipeline.exchange
    x, idx, weights, out = layer.x, layer.idx, layer.weights, torch.empty_like(layer.out)
    places = torch.arange(len(exchange.row_slot), device=moe.device) * (2 * layer.shape.hidden) + layer.products[1].data_ptr()
    local = torch.where(exchange.row_slot != 0, places, 0)
    both: dict[str, Callable[[], Any]] = {}
    for name, fused in layer.orders.items():
        if name.endswith(ONCE):
            continue
        slots = fused.exchange.row_slot
        both[f"both_{name}"] = partial(_gemms, fused, slots)
        both[f"both_{name}_local"] = partial(_gemms, fused, torch.where(slots != 0, places, 0))
    return {
        "gemm": {
            "linear1": partial(layer.plain, 0), "swiglu": pipeline.linear1, "linear2": partial(layer.plain, 1),
            "rows": lambda: pipeline.linear2(exchange.row_slot), "rows_local": lambda: pipeline.linear2(local),
            **both,
        },
        "layer": {
            "dispatch": lambda: _launch(exchange._dispatch_steps(x, None, idx, weights)),
            "dispatch_pull": lambda: _launch(layer.pull._dispatch_steps(x, None, idx, weights)), "dispatch_nccl": _nccl(layer),
            "combine": lambda: _launch(exchange._combine_steps(idx, out)),
            "serial": lambda: moe(x, idx, weights), "serial_e4m3": lambda: moe(layer.q, idx, weights, x_scales=layer.scales),
            "eager": lambda: moe(x, idx, weights),
            **{name: partial(fused.run, x, None, idx, weights, out) for name, fused in layer.orders.items()},
        },
    }  # fmt: skip


def _nccl(layer: Layer) -> Callable[[], Any]:
    """Rows and scales to the experts' ranks by NCCL, into their places; who sends how much, and where it goes, is known before."""
    exchange, moe, top_k = layer.pipeline.exchange, layer.moe, layer.shape.top_k
    counts = exchange.view("counts")
    placed = routing.place(layer.idx, counts, moe.rank, moe.layout.tile)
    pairs = torch.sort(torch.where(placed.row.flatten() < 0, moe.world, placed.rank.flatten()), stable=True).indices
    sent = [int((placed.rank == rank).sum()) for rank in range(moe.world)]
    pairs = pairs[: sum(sent)]
    tokens, places = pairs // top_k, placed.row.flatten()[pairs].contiguous()
    received = [int(n) for n in routing.count_ranks(counts, moe.world)[:, moe.rank]]
    here = torch.empty(sum(received), dtype=torch.int32, device=moe.device)
    dist.all_to_all_single(here, places, received, sent, group=moe.group)
    rows = torch.empty(sum(received), layer.shape.hidden, dtype=torch.uint8, device=moe.device)
    scales = torch.empty(sum(received), layer.scales.shape[1], device=moe.device)
    target = torch.empty(moe.layout.rows, layer.shape.hidden, dtype=torch.uint8, device=moe.device)
    target_scales = torch.empty(moe.layout.rows, layer.scales.shape[1], device=moe.device)
    index, q = here.long(), layer.q.view(torch.uint8)

    def call() -> None:
        dist.all_to_all_single(rows, q[tokens], received, sent, group=moe.group)
        dist.all_to_all_single(scales, layer.scales[tokens], received, sent, group=moe.group)
        target.index_copy_(0, index, rows)
        target_scales.index_copy_(0, index, scales)

    return call


def _gemms(pipeline: KernelPipeline, slots: torch.Tensor) -> None:
    pipeline.exchange.ready.zero_()
    pipeline.gemms(slots)


def _launch(steps: Sequence[tuple[str, Callable[[], Any]]]) -> None:
    for _, launch in steps:
        launch()


def _plain_torch(layer: Layer) -> Callable[[], Any]:
    moe, held = layer.moe, layer.pipeline.weights
    dense = []
    for linear in (held.linear1, held.linear2):
        w = torch.empty(linear.shape, dtype=torch.bfloat16, device=moe.device)
        for e in range(len(w)):
            w[e] = linear.dense(e, torch.bfloat16)
        dense.append(Linear(w))
    pipeline = TorchPipeline(moe.layout, clamp=moe.clamp, group=moe.group, refused=lambda rank: None)
    out = torch.empty_like(layer.out)

    def call() -> torch.Tensor:
        pipeline.run(layer.x, layer.idx, layer.weights, dense[0], dense[1], out)
        return out

    return call


EAGER = ("eager", "torch", "dispatch_nccl")


def _row(
    layer: Layer, share: float, groups: Sequence[str], rounds: int, pause_s: float, platform: Platform | None, extra: Extra | None
) -> dict[str, Any]:
    model, moe, world = layer.shape, layer.moe, dist.get_world_size()
    more = {} if extra is None else extra(layer)
    times: dict[str, dict[str, timing.Times]] = {}
    agreement: dict[str, float] = {}
    for group in GROUPS:
        if group not in groups:
            continue
        ours = {"torch": _plain_torch(layer)} if group == "torch" else _variants(layer)[group]
        functions = {**ours, **more.get(group, {})}
        timed: dict[str, Callable[[], Any]] = {}
        calls = 1 if group == "torch" else 2
        for name, function in functions.items():
            result = function()
            if name == "torch":
                agreement[name] = float((result.float() - layer.out.float()).norm() / layer.out.float().norm())
            timing.meet()
            eager = name in EAGER or name not in ours
            timed[name] = partial(_repeat, function, calls) if eager else graphed(function, calls)
            timing.meet()
        few = max(3, rounds // 3) if group == "torch" else rounds
        times[group] = timing.interleaved(timed, calls=calls, rounds=few, pause_s=pause_s)
        del timed, functions, ours
        if group == "layer":
            # A dispatch by itself leaves its call open, and the next dispatch would meet nobody: close the calls of both exchanges.
            timing.meet()
            for exchange in (layer.pipeline.exchange, layer.pull):
                _launch(exchange._combine_steps(layer.idx, torch.empty_like(layer.out)))
        moe.check()
        timing.meet()
    here = moe.layout.experts_per_rank
    owner = layer.idx // here
    sent = [int((owner == rank).sum()) for rank in range(world)]
    everyone = timing.gather((sent, layer.rows))
    remote = [sum(n for to, n in enumerate(ranks[0]) if to != rank) for rank, ranks in enumerate(everyone)]
    arrived = [sum(ranks[0][rank] for source, ranks in enumerate(everyone) if source != rank) for rank in range(world)]
    bytes_sent = max(sent_bytes(a, b, model.hidden) for a, b in zip(remote, arrived, strict=True))
    most = max(ranks[1] for ranks in everyone)
    flops = (4.0 * most * model.hidden * model.intermediate, 2.0 * most * model.hidden * model.intermediate)
    rate = None if platform is None else float(platform.method("st_global").drain_rate(platform.sms))
    return {
        "shape": model.name, "hidden": model.hidden, "intermediate": model.intermediate, "experts": model.experts, "top_k": model.top_k,
        "tokens": len(layer.x), "share": share, "rows": [ranks[1] for ranks in everyone], "remote_pairs": remote, "sent_bytes": bytes_sent,
        "object_bytes": moe.size_bytes.total, "agreement": {k: round(v, 5) for k, v in agreement.items()},
        "derived": derived(times, bytes_sent, rate, flops, auto_order(model, len(layer.x), world, share)),
        "groups": {group: {name: t.to_json() for name, t in measured.items()} for group, measured in times.items()},
    }  # fmt: skip


def _repeat(function: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        function()
