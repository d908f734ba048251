"""What remote stores do to the SM clock of long attention, over when and how much of it is remote.

    torchrun --nproc-per-node 2 benchmarks/link_power.py --out result.json [--heads 12] [--sequences 16384 32768 65536]

The fused attention kernel alone (no meetings), bf16, head dim 128, even shards, in CUDA graphs, interleaved, with the mean SM clock of
every run. `local`: all rows into this rank's memory. `stores`: rows to their owners, tiles of the ranks taking turns. `few`: all local
but for one tile of each head. `own_first`: all own tiles of all heads, then the others', as long calls have it by default; `remote_first`:
the other way round; both read their tiles from a table, as `local_table` and `stores_table` do. `pushed`: `local`, then the peers' rows by
the copy engines.

If the link takes power while it is in use, cost follows the bytes; if it takes power as long as it is not asleep, `few` costs as much as
`stores`, and what is remote early or late costs half.
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
from xstage.attention import layout as lay
from xstage.attention import serial
from xstage.attention.op import Variant, _Call
from xstage.bench import timing

FLOP_PER_NS, HEAD_DIM = 7e5, 128
TURNS = {"order": "alternating", "finish": "none"}
# `last` and `entry` say nothing without meetings; here they tell apart plans of which one is changed afterwards.
VARIANTS = {
    "local": Variant(**TURNS, stores="local"), "stores": Variant(**TURNS), "few": Variant(**TURNS, stores="local", last="after"),
    "local_table": Variant(**TURNS, stores="local", start="table"), "stores_table": Variant(**TURNS, start="table"),
    "own_first": Variant(order="own_first", finish="none"), "remote_first": Variant(**TURNS, start="table", entry="always"),
}  # fmt: skip


def measure(heads: int, sequence: int, rounds: int) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device="cuda").manual_seed(rank)
    q, k, v = (torch.randn(1, sequence, heads, HEAD_DIM, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3))
    layout = lay.SequenceLayout.even(sequence, world)
    with xstage.AttentionA2A(max_sequence=sequence, heads=heads * world, head_dim=HEAD_DIM, fallback="error") as attend:
        functions: dict[str, Callable[[], Any]] = {name: partial(attend, q, k, v, variant=variant) for name, variant in VARIANTS.items()}
        for function in functions.values():
            function()
        parts = {name: attend._plans[_Call(1, layout, False, False, variant)].parts[0] for name, variant in VARIANTS.items()}
        others = torch.from_numpy(layout.owner != rank).cuda().nonzero().flatten()
        for few, stores in zip(parts["few"].rows, parts["stores"].rows, strict=True):
            few[:, others[:128]] = stores[:, others[:128]]
        tiles = parts["remote_first"].tiles
        own = torch.from_numpy(lay.block_owner(layout, 128)[lay.unpack(tiles.cpu().numpy())[0]] == rank).cuda()
        tiles.copy_(torch.cat([tiles[~own], tiles[own]]))
        targets, out = attend.push_targets(layout), torch.empty_like(q)

        def pushed() -> None:
            functions["local"]()
            for s in layout.segments:
                if s.rank != rank:
                    serial.copy_tensor_rows(targets[s.rank][0, s.local_start : s.local_start + s.rows], out[0, s.start : s.start + s.rows])

        functions["pushed"] = pushed
        calls = timing.launches_for(4 * sequence**2 * heads * HEAD_DIM / FLOP_PER_NS, least=1)
        graphs = {}
        for name, function in functions.items():
            timing.meet()
            graphs[name] = serial.graphed(function, calls, 1)
        times = timing.interleaved(graphs, calls=calls, rounds=rounds, pause_s=0.03, cycles=True)
        timing.meet()
        graphs.clear()
    apart = {name: timing.apart(t, times["local_table" if "table" in name or "first" in name else "local"]) for name, t in times.items()}
    return {
        "heads": heads, "sequence": sequence, "calls": calls, "times": {name: t.to_json() for name, t in times.items()},
        "apart": {name: {key: round(value, 1) for key, value in asdict(d).items()} for name, d in apart.items() if d},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--sequences", nargs="+", type=int, default=[16384, 32768, 65536])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    timing.start_group("benchmarks/link_power.py")
    rank, begun = dist.get_rank(), time.monotonic()
    settings = {"head_dim": HEAD_DIM, "rounds": options.rounds, "dtype": "bfloat16"}
    file = timing.ResultFile(options.out, "link_power", write=rank == 0, settings=settings)
    for sequence in options.sequences:
        row = measure(options.heads, sequence, options.rounds)
        file.add(row)
        torch.cuda.empty_cache()
        if rank == 0:
            local_us = row["times"]["local"]["slowest_ns"] / 1e3
            print(f"{options.heads}, {sequence}: {local_us:.1f} µs ({time.monotonic() - begun:.0f} s)", file=sys.stderr)
            for name, d in row["apart"].items():
                print(f"  {name:13s} {' '.join(f'{key} {value:g}' for key, value in d.items())}", file=sys.stderr, flush=True)
    file.finish()
    timing.meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
