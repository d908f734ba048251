"""How much of the exchange of q, k and v attention hides, over how many heads come first and how the rest is sent.

    torchrun --nproc-per-node 2 benchmarks/ulysses_overlap.py --out result.json [--models wan_14b_480p flux_1_2048 flux_1_1024]
        [--first 1 2 3 4] [--ctas 8 12 16 24 0] [--late]

Shapes of diffusion transformers (`studies.dit_models`), bf16, batch 1; all in CUDA graphs, interleaved. `alone`: flash-attn-4 on this
rank's heads. `at_once`: `AttentionA2A.ulysses` with all heads first; `chosen`: as the model chooses; `N_by_C`: N heads of every rank first,
the rest sent by C CTAs (0: by the copy engines). `N_by_C_late` (`--late`): with rows of a rank's own heads among the rest, instead of with
the first. `exchange` is that of all heads alone, `parts_N_by_C` both parts of it, one after the other, nothing beside them; `beside_N_by_C`
is `alone` with both parts going on meanwhile, neither waiting for the other. A row says what each exposes (its time less `alone`), and what
the model expected; of `beside`, also how much of it is a lower SM clock and how much are more cycles (`timing.apart`).

Each split's output must have the bits of `at_once` first.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist

import xstage
from xstage.attention import serial
from xstage.attention.layout import SequenceLayout
from xstage.attention.overlap import Split, attention_ns, choose, time_ns
from xstage.bench import timing
from xstage.errors import XStageError
from xstage.studies.dit import MODELS
from xstage.studies.dit_models import Model, overlap_problem

FLOP_PER_NS = 6e5  # of a rank, to choose the calls of a graph


def measure(model: Model, firsts: list[int], ctas: list[int], rounds: int, late: bool) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.shards([model.rows(r, world) for r in range(world)])
    generator = torch.Generator(device="cuda").manual_seed(rank)

    def draw(rows: int, heads: int) -> list[torch.Tensor]:
        size = (1, rows, heads, model.head_dim)
        return [torch.randn(size, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3)]

    mine = draw(layout.local_rows[rank], model.heads)
    with xstage.AttentionA2A(
        max_sequence=layout.sequence, heads=model.heads, head_dim=model.head_dim, max_local_rows=max(layout.local_rows), fallback="error"
    ) as attend:
        here = draw(layout.sequence, attend.heads_per_rank[rank])

        def call(split: Split | None, chosen: bool = False, own_ahead: bool = True) -> torch.Tensor:
            if attend.inputs is not None:
                attend.inputs.own_ahead = own_ahead
            attend.rest_ctas = None if split is None else split.ctas
            first = None if chosen else split.first if split else 0
            out: torch.Tensor = attend.ulysses(*mine, layout=layout, first_heads=first)
            return out

        def parts(split: Split) -> None:
            assert attend.inputs is not None
            attend.inputs.own_ahead = True
            attend.inputs.in_parts(*mine, layout, split.first, split.ctas)[1]()

        side = torch.cuda.Stream()

        def beside(split: Split) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                parts(split)
            serial.attention(*here)
            torch.cuda.current_stream().wait_stream(side)

        splits = [Split(first, n) for first in firsts if first < max(attend.heads_per_rank) for n in ctas]
        want = call(None).clone()
        for split in [*splits, None]:
            same = torch.equal(call(split, chosen=split is None), want)
            same &= not late or torch.equal(call(split, split is None, False), want)
            if not all(timing.gather(same)):
                raise XStageError(f"{split}: the output is not that of all heads at once")
        names = {split: f"{split.first}_by_{split.ctas}" for split in splits}
        functions: dict[str, Callable[[], Any]] = {
            "alone": lambda: serial.attention(*here)[0], "at_once": partial(call, None), "chosen": partial(call, None, True),
            "exchange": lambda: attend.inputs(*mine, layout),  # type: ignore[misc]
            **{names[split]: partial(call, split) for split in splits},
            **{f"{names[split]}_late": partial(call, split, False, False) for split in splits if late},
            **{f"parts_{names[split]}": partial(parts, split) for split in splits if split.first == firsts[0]},
            **{f"beside_{names[split]}": partial(beside, split) for split in splits if split.first == firsts[0]},
        }  # fmt: skip
        calls = timing.launches_for(model.attention_flop / world / FLOP_PER_NS, least=1)
        graphs = {}
        for name, function in functions.items():
            timing.meet()
            graphs[name] = serial.graphed(function, calls, 1)
        times = timing.interleaved(graphs, calls=calls, rounds=rounds, pause_s=0.03, cycles=True)
        attend.check()
        timing.meet()
        graphs.clear()
    p = overlap_problem(model, world)
    ns = {name: t.slowest_ns for name, t in times.items()}
    layers = {"at_once", "chosen", *(name for name in ns if name.removesuffix("_late") in names.values())}
    expected = {names[split]: time_ns(p, split) for split in splits} | {"at_once": time_ns(p, None), "chosen": time_ns(p, choose(p))}
    best = choose(p)
    slower = {name: timing.apart(t, times["alone"]) for name, t in times.items() if name.startswith("beside_")}
    return {
        "name": model.name, "heads": model.heads, "sequence": model.sequence, "calls": calls,
        "chosen": None if best is None else f"{best.first}_by_{best.ctas}",
        "times": {name: t.to_json() for name, t in times.items()},
        "exposed_us": {name: round((t - ns["alone"]) / 1e3, 1) for name, t in ns.items() if name in layers},
        "expected_us": {name: round((t - attention_ns(p)) / 1e3, 1) for name, t in expected.items()},
        "alone_us": {name: round(t / 1e3, 1) for name, t in ns.items() if name not in layers and name not in slower},
        "beside": {name: {key: round(value, 1) for key, value in asdict(d).items()} for name, d in slower.items() if d},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["flux_1_1024", "flux_1_2048", "wan_14b_480p"])
    parser.add_argument("--first", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--ctas", nargs="+", type=int, default=[8, 12, 16, 24, 0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--late", action="store_true")
    options = parser.parse_args()
    timing.start_group("benchmarks/ulysses_overlap.py")
    rank, begun = dist.get_rank(), time.monotonic()
    settings = {name: getattr(options, name) for name in ("models", "first", "ctas", "rounds", "late")} | {"dtype": "bfloat16", "batch": 1}
    file = timing.ResultFile(options.out, "ulysses_overlap", write=rank == 0, settings=settings)
    done = set(timing.gather([row["name"] for row in file.content["rows"]])[0])
    for model in (MODELS[name] for name in options.models if MODELS[name].name not in done):
        row = measure(model, options.first, options.ctas, options.rounds, options.late)
        file.add(row)
        torch.cuda.empty_cache()
        if rank == 0:
            print(f"{row['name']}: chosen {row['chosen']} ({time.monotonic() - begun:.0f} s)", file=sys.stderr)
            print(f"  alone, µs: {row['alone_us']}", file=sys.stderr)
            for name, d in row["beside"].items():
                us = [d[key] / 1e3 for key in ("total_ns", "clock_ns", "cycles_ns")]
                print(f"  {name:17s} {us[0]:7.1f} µs longer, by clock {us[1]:7.1f}, by cycles {us[2]:7.1f}", file=sys.stderr)
            for name, exposed in sorted(row["exposed_us"].items(), key=lambda item: item[1]):
                expected = row["expected_us"].get(name, "–")
                print(f"  {name:11s} exposes {exposed:7.1f} µs, expected {expected}", file=sys.stderr, flush=True)
    file.finish()
    timing.meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
