"""What the exchange costs when it rides on FlashAttention (paper, sections 4.3 and 5.3, Table 3 and Figure 11), measured here.

Each row is a shape: heads per rank H, whole sequence M, head dim 128, batch 1, full attention, bf16. Variants of a group run interleaved
(`bench.timing`), and only variants of one group are compared: attention at the power limit remembers what ran before it. The
groups, their questions, and the columns that answer them:

* `residual`. E_res, the sender-visible residual: `stores` (the attention kernel alone, rows at their owners) over `local` (the same
  kernel, every row stored into the rank's own memory) and over `fa4` (the unmodified kernel). Readiness: `fused` (the call ends when
  its output is complete) over `stores`.
* `baseline`. `fused` against the paper's serial baseline (`nccl`: eager, with permutations), the same in a graph (`nccl_graph`), and the
  copy-engine push in a graph (`push_graph`).
* `order`. What the order and the share of remote destinations do to the residual (`plain`, `own_last`, `remote`), and what a
  meeting before the call costs, which the first call of a graph makes (`met`).

The prediction of E_res comes from the tile table and a platform file alone (`predicted_residual_ns`), with nothing refitted.

Not covered: other attention kernels, more than one host, back-to-back replays.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from xstage.attention import layout as lay
from xstage.attention import serial
from xstage.attention.layout import SequenceLayout
from xstage.attention.op import AttentionA2A, Variant
from xstage.bench import timing
from xstage.errors import UnsuitableMachine, XStageError
from xstage.platform import Platform, load_platform

HEADS, SEQUENCES, HEAD_DIM = (4, 12), (4096, 8192, 16384, 32768, 65536), 128

FUSED = {
    "local": Variant(stores="local", finish="none"),
    "stores": Variant(finish="none"),
    "plain": Variant(order="plain", finish="none"),
    "own_last": Variant(order="own_last", finish="none"),
    "remote": Variant(stores="remote", finish="none"),
    "met": Variant(entry="always"),
    "fused": Variant(),
}
SERIAL = ("nccl", "nccl_graph", "push_graph")
GROUPS = {
    "residual": ("fa4", "local", "stores", "fused"),
    "baseline": ("fa4", "fused", *SERIAL),
    "order": ("local", "stores", "plain", "own_last", "remote", "met", "fused"),
}


def predicted_residual_ns(remote_tiles: Sequence[int], tile_bytes: int, platform: Platform, method: str = "st_global") -> float:
    """E_res from the two bounds: each wave above Q stalls for the excess (equation 6), and the last burst drains in full after the work.

    Args:
        remote_tiles: tiles per wave that leave the rank (`layout.remote_tiles`). tile_bytes: bytes per tile.
    """
    store = platform.method(method)
    bursts = np.asarray(remote_tiles, float) * tile_bytes
    producers = np.maximum(remote_tiles, 1)
    rate, capacity = store.drain_rate(producers), store.capacity_bytes(producers)
    stalls = np.maximum(bursts[:-1] - capacity[:-1], 0) / rate[:-1]
    return float(stalls.sum() + bursts[-1] / rate[-1])


def derived(times: dict[str, dict[str, timing.Times]]) -> dict[str, float]:
    """The row's answers from the times of its groups, in nanoseconds and ratios; only those whose variants were measured."""
    answers: dict[str, float] = {}
    for name, group, top, bottom in (
        ("residual_ns", "residual", "stores", "local"), ("residual_over_fa4_ns", "residual", "stores", "fa4"),
        ("readiness_ns", "residual", "fused", "stores"), ("kernel_over_fa4_ns", "residual", "local", "fa4"),
        ("residual_alternating_ns", "order", "stores", "local"), ("residual_plain_ns", "order", "plain", "local"),
        ("residual_own_last_ns", "order", "own_last", "local"), ("residual_remote_ns", "order", "remote", "local"),
        ("meeting_ns", "order", "met", "fused"),
    ):  # fmt: skip
        t = times.get(group, {})
        if top in t and bottom in t:
            answers[name] = round(t[top].slowest_ns - t[bottom].slowest_ns, 1)
    if "residual_ns" in answers:
        answers["residual_share"] = round(answers["residual_ns"] / times["residual"]["fa4"].slowest_ns, 6)
    t = times.get("baseline", {})
    if "nccl" in t:
        answers["speedup_paper_baseline"] = round(t["nccl"].slowest_ns / t["fused"].slowest_ns, 4)
    baselines = [t[name].slowest_ns for name in SERIAL if name in t]
    if baselines:
        answers["speedup_strongest"] = round(min(baselines) / t["fused"].slowest_ns, 4)
    return answers


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Headline figures of a result: the worst row for each question, and the speedups by shape."""
    out: dict[str, dict[str, Any]] = {}
    short = [r["derived"]["residual_ns"] for r in rows if r["sequence"] <= 16384 and "residual_ns" in r["derived"]]
    long = [r["derived"]["residual_share"] for r in rows if r["sequence"] >= 32768 and "residual_share" in r["derived"]]
    ready = [r["derived"]["readiness_ns"] for r in rows if "readiness_ns" in r["derived"]]
    if short:
        out["attention.residual_us.short.max"] = {"value": round(max(short) / 1e3, 2), "unit": "µs"}
    if long:
        out["attention.residual_share.long.max"] = {"value": max(long), "unit": "fraction"}
    if ready:
        out["attention.readiness_us.max"] = {"value": round(max(ready) / 1e3, 2), "unit": "µs"}
    for row in rows:
        shape = f"H{row['heads']}_M{row['sequence']}"
        if "speedup_strongest" in row["derived"] and row["heads"] == 4:
            out[f"attention.speedup_strongest.{shape}"] = {"value": row["derived"]["speedup_strongest"], "unit": "ratio"}
        if "speedup_paper_baseline" in row["derived"] and shape == "H4_M8192":
            out[f"attention.speedup_paper_baseline.{shape}"] = {"value": row["derived"]["speedup_paper_baseline"], "unit": "ratio"}
    return out


def run(
    out: str, *, heads: Sequence[int] = HEADS, sequences: Sequence[int] = SEQUENCES, rounds: int = 9, budget_s: float = 240.0,
    pause_s: float = 0.04, platform: str | None = None, groups: Sequence[str] = tuple(GROUPS),
) -> dict[str, Any]:  # fmt: skip
    """Measure every (heads, sequence) row and write a result file after each; run by every rank (torchrun).

    Args:
        out: path of the result file. heads: per rank. budget_s: no row is begun after this many seconds.
        platform: gallery name or path, for predictions; None: no predictions. groups: which of `GROUPS` to run.

    Returns:
        The content of the result file.

    Raises:
        UnsuitableMachine: fewer than two ranks, or the fused kernel cannot run here.
        XStageError: unknown group, a path that cannot be written.
    """
    for name in groups:
        if name not in GROUPS:
            raise XStageError(f"groups: {name!r} is not one of {', '.join(GROUPS)}")
    known = None if platform is None else load_platform(platform)
    _start_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = {
        "head_dim": HEAD_DIM, "dtype": "bfloat16", "batch": 1, "causal": False, "rounds": rounds, "pause_s": pause_s, "world": world,
        "platform": platform,
    }  # fmt: skip
    results = timing.ResultFile(out, "attention", write=rank == 0, settings=settings)
    begun = time.monotonic()
    cut_short = False
    for sequence in sorted(sequences):
        for count in heads:
            # One clock decides, or ranks would part ways.
            if timing.gather(time.monotonic() - begun)[0] > budget_s:
                cut_short = True
                continue
            row = _row(count, sequence, groups, rounds, pause_s, known)
            results.content["headline"] = headline([*results.content["rows"], row])
            results.add(row)
            if rank == 0:
                answers = " ".join(f"{k} {v:g}" for k, v in row["derived"].items())
                print(f"H={count} M={sequence}: {answers} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    if not cut_short:
        results.finish()
    timing.meet()
    return results.content


def _row(heads: int, sequence: int, groups: Sequence[str], rounds: int, pause_s: float, platform: Platform | None) -> dict[str, Any]:
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device=device).manual_seed(rank)
    q, k, v = (torch.randn(1, sequence, heads, HEAD_DIM, device=device, generator=generator, dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    layout = SequenceLayout.even(sequence, world)
    group = dist.group.WORLD
    assert group is not None
    with AttentionA2A(max_sequence=sequence, heads=heads * world, head_dim=HEAD_DIM, fallback="error") as attend:
        counts = attend.heads_per_rank
        exchange = serial.NcclExchange(layout, counts, group, 1, (HEAD_DIM,), torch.bfloat16, device, permute=True)
        targets = attend.push_targets(layout)

        def attention() -> torch.Tensor:
            return serial.attention(q, k, v, out=out)[0]

        functions: dict[str, Callable[[], Any]] = {"fa4": attention}
        for name, variant in FUSED.items():
            functions[name] = partial(attend, q, k, v, variant=variant)
        functions["nccl"] = functions["nccl_graph"] = lambda: exchange(attention())
        functions["push_graph"] = lambda: serial.push(attention(), layout, targets, rank, attend.barrier)
        flops = 4 * sequence**2 * HEAD_DIM * heads
        calls = timing.launches_for(flops / 7e5)
        timed: dict[str, Callable[[], Any]] = {}
        for name in dict.fromkeys(name for group in groups for name in GROUPS[group]):
            for _ in range(3):
                functions[name]()
            timing.meet()
            # Several calls to a graph, as the layers of a model are; eager calls are repeated by hand.
            eager = name == "nccl"
            timed[name] = partial(_repeat, functions[name], calls) if eager else serial.graphed(functions[name], calls)
            timing.meet()
        times = {
            group: timing.interleaved({n: timed[n] for n in GROUPS[group]}, calls=calls, rounds=rounds, pause_s=pause_s) for group in groups
        }
        attend.check()
        timing.meet()
        row: dict[str, Any] = {
            "heads": heads, "sequence": sequence, "derived": derived(times),
            "groups": {group: {name: t.to_json() for name, t in measured.items()} for group, measured in times.items()},
            "tflops": {n: round(flops / t.slowest_ns / 1e3, 1) for n, t in times.get("residual", {}).items()},
            "remote_tiles": {}, "predicted_residual_ns": {},
        }  # fmt: skip
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        for order in ("plain", "alternating", "own_last"):
            tiles = _remote_tiles(layout, rank, heads, order, sms)
            row["remote_tiles"][order] = tiles
            if platform is not None:
                row["predicted_residual_ns"][order] = round(predicted_residual_ns(tiles, 128 * HEAD_DIM * 2, platform), 1)
        del timed
        return row


def _repeat(function: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        function()


def _remote_tiles(layout: SequenceLayout, rank: int, heads: int, order: str, sms: int) -> list[int]:
    table = lay.tile_table(layout, rank, heads=heads, batch=1, tile_rows=128, wave=sms, order=order, capacity_tiles=sms * 24 // 32)
    return lay.remote_tiles(table, layout, rank, 128, sms)


def _start_group() -> None:
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        raise UnsuitableMachine(f"bench attention: needs two peer-connected GPUs, found {torch.cuda.device_count()}")
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise UnsuitableMachine("bench attention: start it with torchrun --nproc-per-node 2 (one process per GPU)")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if dist.get_world_size() < 2:
        raise UnsuitableMachine("bench attention: needs at least two ranks")
