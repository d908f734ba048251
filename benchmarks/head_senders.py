"""Bytes/ns that an SM moves of the rest of q, k and v (`HeadExchange.in_parts`), by form of the sending CTAs and their number.

    torchrun --nproc-per-node 2 benchmarks/head_senders.py --out result.json [--models wan_14b_480p flux_1_2048] [--forms turns ahead runs]
        [--ctas 8 14 20] [--first 1]

The second part alone, nothing beside it, all ranks at once; bf16, batch 1; in CUDA graphs, interleaved. `sent`: to the ranks of the heads,
as in a call. `home`: the same addresses within this rank's own buffer, so that no link takes part: what an SM can move. Bytes are all that
are loaded, and stored, those that stay at home included; a time has the meeting behind the kernel in it. One JSON line per measurement on
standard output, and a row per model in the file.

Each form's result must have the bits of the first's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from functools import partial
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist

from xstage.attention import serial
from xstage.attention.heads import FORMS, HeadExchange, _Call, _Plan
from xstage.attention.layout import SequenceLayout
from xstage.bench import timing
from xstage.errors import XStageError
from xstage.studies.dit import MODELS
from xstage.studies.dit_models import Model


def measure(model: Model, forms: list[str], ctas: list[int], first: int, rounds: int) -> list[dict[str, Any]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.shards([model.rows(r, world) for r in range(world)])
    generator = torch.Generator(device="cuda").manual_seed(rank)
    size = (1, layout.local_rows[rank], model.heads, model.head_dim)
    x = tuple(torch.randn(size, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3))
    with HeadExchange(max_sequence=layout.sequence, heads=model.heads, head_dim=model.head_dim, fallback="error") as exchange:
        want: list[torch.Tensor] = []
        for form in forms:
            exchange.form = form
            got, rest = exchange.in_parts(*x, layout, first, max(ctas))
            rest()
            want = want or [t.clone() for t in got]
            same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            for t in got:  # what the next form finds in this buffer is not the result
                t.fill_(-1)
            if not all(timing.gather(same)):
                raise XStageError(f"{form}: the result is not that of {forms[0]}")
        want.clear()
        call = _Call(1, layout, first)
        plans = {"sent": exchange._plans[call], "home": exchange._plan(call)}
        bring_home(plans["home"], exchange)

        def send(form: str, count: int, where: str) -> None:
            exchange.form = form
            for kernel, arguments in exchange._launches(*x, layout.sequence, plans[where], 0, False, 1, count):
                kernel(*arguments)

        keys = list(itertools.product(forms, ctas, plans))
        graphs: dict[str, Any] = {}
        for key in keys:
            timing.meet()
            graphs[str(key)] = serial.graphed(partial(send, *key), 2, 1)
        times = timing.interleaved(graphs, calls=2, rounds=rounds, pause_s=0.02)
        exchange.check()
        timing.meet()
        graphs.clear()
        part = plans["sent"].parts[1]
    row = sum(part.counts) * model.head_dim * 2
    leaves = [row - 3 * (end - begin) * model.head_dim * 2 for begin, end in part.parts]  # of a row of each rank
    sent = max(n * b for n, b in zip(layout.local_rows, leaves, strict=True))
    rows = []
    for form, count, where in keys:
        t = times[str((form, count, where))]
        ns = t.slowest_ns
        rows.append({
            "model": model.name, "form": form, "sms": count, "where": where, "us": round(ns / 1e3, 1),
            "spread_us": round(t.spread_ns / 1e3, 1), "bytes_per_ns_sm": round(max(layout.local_rows) * row / ns / count, 1),
            "link_bytes_per_ns": round(sent / ns, 1) if where == "sent" else 0.0,
        })  # fmt: skip
    return rows


def bring_home(plan: _Plan, exchange: HeadExchange) -> None:
    """Turn the addresses of peers into those of the same places of this rank."""
    buffer = exchange._buffer
    assert buffer is not None
    size = 4096 + exchange.buffers * sum(exchange._sizes)
    for table in (table for part in plan.parts for table in (*part.heads, *part.runs)):
        for base in buffer.addresses:
            there = (table[:, 0] >= base) & (table[:, 0] < base + size)
            table[there, 0] += buffer.addresses[exchange.rank] - base
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["wan_14b_480p", "flux_1_2048"])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--ctas", nargs="+", type=int, default=[8, 14, 20])
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    timing.start_group("benchmarks/head_senders.py")
    settings = {name: getattr(options, name) for name in ("models", "forms", "ctas", "first", "rounds")} | {"dtype": "bfloat16", "batch": 1}
    file = timing.ResultFile(options.out, "head_senders", write=dist.get_rank() == 0, settings=settings)
    done = set(timing.gather([row["name"] for row in file.content["rows"]])[0])
    for model in (MODELS[name] for name in options.models if MODELS[name].name not in done):
        rows = measure(model, options.forms, options.ctas, options.first, options.rounds)
        file.add({"name": model.name, "senders": rows})
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            for row in rows:
                print(json.dumps(row, ensure_ascii=False), flush=True)
            print(f"{model.name}: done", file=sys.stderr, flush=True)
    file.finish()
    timing.meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
