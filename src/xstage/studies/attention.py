"""What the exchange costs when it rides on FlashAttention (paper, sections 4.3 and 5.3, Table 3 and Figure 11), measured here.

Each row is a shape: heads per rank H, whole sequence M, head dim 128, batch 1, full attention, bf16. Variants of a row run interleaved
(`bench.timing`). The questions and the columns that answer them:

* E_res, the sender-visible residual: `stores` (the attention kernel alone, rows at their owners) over `local` (the same kernel, every
  row stored into the rank's own memory), and over `fa4` (the unmodified kernel). `plain`, `own_last`, `remote` show what the order and
  the share of remote destinations do to it.
* Readiness: `fused` (the call ends when its output is complete) over `stores`.
* `checked`: `fused` with the entry check in every call, as in the first call of a graph.
* Speedup: `fused` against the paper's serial baseline (`nccl`, eager with permutations) and the strongest serial one of the row.

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
    "checked": Variant(entry="always"),
    "fused": Variant(),
}
SERIAL = ("nccl", "nccl_graph", "push_graph")


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


def derived(times: dict[str, timing.Times]) -> dict[str, float]:
    """The row's answers from its times, in nanoseconds and ratios; only those whose variants were measured."""
    t = {name: measured.slowest_ns for name, measured in times.items()}
    answers = {}
    for name, top, bottom in (
        ("residual_ns", "stores", "local"), ("residual_over_fa4_ns", "stores", "fa4"), ("residual_plain_ns", "plain", "local"),
        ("residual_own_last_ns", "own_last", "local"), ("residual_remote_ns", "remote", "local"), ("readiness_ns", "fused", "stores"),
        ("kernel_over_fa4_ns", "local", "fa4"), ("check_ns", "checked", "fused"),
    ):  # fmt: skip
        if top in t and bottom in t:
            answers[name] = round(t[top] - t[bottom], 1)
    if "residual_ns" in answers and "fa4" in t:
        answers["residual_share"] = round(answers["residual_ns"] / t["fa4"], 6)
    if "nccl" in t:
        answers["speedup_paper_baseline"] = round(t["nccl"] / t["fused"], 4)
    baselines = [t[name] for name in SERIAL if name in t]
    if baselines:
        answers["speedup_strongest"] = round(min(baselines) / t["fused"], 4)
    return answers


def run(
    out: str, *, heads: Sequence[int] = HEADS, sequences: Sequence[int] = SEQUENCES, rounds: int = 9, budget_s: float = 240.0,
    pause_s: float = 0.04, platform: str | None = None, variants: Sequence[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure every (heads, sequence) row and write a result file after each; run by every rank (torchrun).

    Args:
        out: path of the result file. heads: per rank. budget_s: no row is begun after this many seconds.
        platform: gallery name or path, for predictions; None: no predictions. variants: names to run besides `fa4`; None: all.

    Returns:
        The content of the result file.

    Raises:
        UnsuitableMachine: fewer than two ranks, or the fused kernel cannot run here.
        XStageError: unknown variant, a path that cannot be written.
    """
    wanted = [*FUSED, *SERIAL] if variants is None else list(variants)
    for name in wanted:
        if name not in FUSED and name not in SERIAL:
            raise XStageError(f"variants: {name!r} is not one of {', '.join([*FUSED, *SERIAL])}")
    if variants is not None and "fused" not in wanted:
        wanted.append("fused")
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
            row = _row(count, sequence, wanted, rounds, pause_s, known)
            results.add(row)
            if rank == 0:
                answers = " ".join(f"{k} {v:g}" for k, v in row["derived"].items())
                print(f"H={count} M={sequence}: {answers} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    if not cut_short:
        results.finish()
    return results.content


def _row(heads: int, sequence: int, wanted: Sequence[str], rounds: int, pause_s: float, platform: Platform | None) -> dict[str, Any]:
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
        for name in wanted:
            if name in FUSED:
                functions[name] = partial(attend, q, k, v, variant=FUSED[name])
        functions["nccl"] = functions["nccl_graph"] = lambda: exchange(attention())
        functions["push_graph"] = lambda: serial.push(attention(), layout, targets, rank, attend.barrier)
        flops = 4 * sequence**2 * HEAD_DIM * heads
        calls = timing.launches_for(flops / 7e5)
        timed: dict[str, Callable[[], Any]] = {}
        for name, function in functions.items():
            if name != "fa4" and name not in wanted:
                continue
            for _ in range(3):
                function()
            timing.meet()
            # Several calls to a graph, as the layers of a model are; eager calls are repeated by hand.
            timed[name] = partial(_repeat, function, calls) if name == "nccl" else serial.graphed(function, calls)
            timing.meet()
        times = timing.interleaved(timed, calls=calls, rounds=rounds, pause_s=pause_s)
        attend.check()
        timing.meet()
        row: dict[str, Any] = {
            "heads": heads, "sequence": sequence, "variants": {name: t.to_json() for name, t in times.items()}, "derived": derived(times),
            "tflops": {name: round(flops / times[name].slowest_ns / 1e3, 1) for name in ("fa4", "local", "fused") if name in times},
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


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="torchrun --nproc-per-node 2 -m xstage.studies.attention OUT")
    parser.add_argument("out")
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    parser.add_argument("--sequences", type=int, nargs="+", default=SEQUENCES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    parser.add_argument("--platform")
    parser.add_argument("--variants", nargs="+")
    options = parser.parse_args()
    run(
        options.out, heads=options.heads, sequences=options.sequences, rounds=options.rounds, budget_s=options.budget,
        platform=options.platform, variants=options.variants,
    )  # fmt: skip
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)
