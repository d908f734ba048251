"""What the order of tiles makes the MoE kernel read from memory: counted on one Hopper GPU, beside a model of the L2 cache.

    ncu --clock-control none --csv --log-file counters.csv -k regex:GroupedGemm --metrics M python benchmarks/moe_memory.py run Qwen3.5
    python benchmarks/moe_memory.py counted Qwen3.5 counters.csv --out memory.json        # anywhere; --taken-at-once: of an earlier kernel

with M gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,sm__cycles_elapsed.avg.per_second. `run` launches, after
Linear-1 and Linear-2 alone, both layers in one kernel in each order of `ORDERS`, on random rows and weights of a shape, all results on the
same GPU and no rows sent; `time` times them instead.

The model: every cluster goes through its entries stage by stage, and every piece of 16 KiB that a stage loads passes a cache of `CACHE`
bytes that keeps what was used last. That is half of an H200's 60 MB: either half of the chip keeps its own copy. What matters is when the
entries that share weights begin: a cluster takes its next entry `TAKEN_BEFORE` stages before the end of the one before, or, as an
earlier kernel did, when it begins that one.

Not covered: stores of the peers, rows that arrive meanwhile.
"""

import argparse
import csv
import heapq
import json
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xstage.moe import work_table as wt
from xstage.moe.work_table import TAKEN_BEFORE

PIECE, CACHE = 16 * 1024, 30 * 1024 * 1024
CLUSTERS, STAGE_US, EPILOGUE_US, SPREAD = 66, 0.87, 1.9, 0.02  # measured: `results/h200x2/moe-spans-earlier.json`
SHAPES = {"Qwen3.5": (256, 4096, 1024, 320), "Hy3": (96, 4096, 1536, 683)}  # experts of a rank, hidden, intermediate, rows of an expert
ORDERS = {"Linear-1 first": ("interleaved", 10**6), "interleaved": ("interleaved", None), "expert-wave": ("expert_wave", None)}


def rows_of(shape: str) -> list[int]:
    experts, _, _, mean = SHAPES[shape]
    draw = random.Random(1)
    return [int(draw.gauss(mean, mean**0.5)) for _ in range(experts)]


def entries_of(shape: str, order: str) -> list[tuple[int, int, int, int]]:
    _, hidden, intermediate, _ = SHAPES[shape]
    name, lead = ORDERS[order]
    columns = (2 * intermediate // wt.TILE_COLUMNS, hidden // wt.TILE_COLUMNS)
    return wt.work_list(rows_of(shape), wt.WorkOrder.of(name, *columns, lead_rows=lead, instances=CLUSTERS))


def modelled_bytes(shape: str, order: str, before: int | None = TAKEN_BEFORE) -> int:
    """Bytes read from memory. before: stages before its end at which a cluster takes the next entry; None: at its beginning."""
    _, hidden, intermediate, _ = SHAPES[shape]
    draw = random.Random(0)
    speed = [1 + draw.uniform(-SPREAD, SPREAD) for _ in range(CLUSTERS)]
    cache: OrderedDict[tuple[Any, ...], None] = OrderedDict()
    missed, entries, taken = 0, iter(entries_of(shape, order)), {}

    def touch(key: tuple[Any, ...], written: bool = False) -> None:
        nonlocal missed
        if key in cache:
            cache.move_to_end(key)
            return
        missed += not written
        cache[key] = None
        if len(cache) > CACHE // PIECE:
            cache.popitem(last=False)

    begun = [(draw.uniform(0, 0.5), cluster, 0, entry) for cluster, entry in zip(range(CLUSTERS), entries, strict=False)]
    heapq.heapify(begun)
    while begun:
        now, cluster, stage, entry = heapq.heappop(begun)
        word, _, expert, _ = entry
        m, n, shares_rows = wt.decoded(word & ~(1 << wt.LAYER_SHIFT))
        second = word >> wt.LAYER_SHIFT & 1
        stages = (intermediate if second else hidden) // 128
        if stage == (0 if before is None else max(stages - before, 0)):
            taken[cluster] = next(entries, None)
        if stage < stages:
            for row in (m,) if shares_rows else (m, m + 1):
                touch(("rows", second, row, stage))
            for column in (n, n + 1) if shares_rows else (n,):
                for half in (0, 1):
                    touch(("weight", second, expert, column, half, stage))
            heapq.heappush(begun, (now + STAGE_US * speed[cluster], cluster, stage + 1, entry))
            continue
        for row, column in ((m, n), (m, n + 1)) if shares_rows else ((m, n), (m + 1, n)):
            if second:
                for quarter in range(4):
                    touch(("result", row, column, quarter), written=True)
            else:
                touch(("rows", 1, row, column), written=True)
        if (following := taken.pop(cluster)) is not None:
            heapq.heappush(begun, (now + EPILOGUE_US, cluster, 0, following))
    return missed * PIECE


def kernels(shape: str) -> tuple[dict[str, Callable[[], None]], Callable[[], None], Callable[[], int]]:
    """Launches by name, what to call before each, and a status that must be 0."""
    import torch

    from xstage.moe import grouped_gemm, quantize

    torch.manual_seed(0)
    experts, hidden, intermediate, _ = SHAPES[shape]
    loads = rows_of(shape)
    tiles = [-(-count // 128) for count in loads]
    rows = 128 * sum(tiles)

    def weights(n: int, k: int) -> torch.Tensor:
        w = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn, device="cuda")
        for part in w:
            part.copy_(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
        return quantize.tiled(w.view(torch.uint8)).contiguous()

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda").view(-1)

    w1, w2 = weights(2 * intermediate, hidden), weights(hidden, intermediate)
    s1 = torch.rand(experts, hidden // 128, intermediate // 128, 2, device="cuda") + 0.5
    s2 = torch.rand(experts, intermediate // 128, hidden // 128, device="cuda") + 0.5
    q, scales = quantize.quantize_activations(torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16))
    a, a_scales = q.view(torch.uint8), scales.T.contiguous()
    weight, out = torch.rand(rows, device="cuda"), torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    slots = out.data_ptr() + torch.arange(rows, device="cuda") * (2 * hidden)
    middle = torch.zeros(rows, intermediate, dtype=torch.uint8, device="cuda")
    middle_scales = torch.zeros(intermediate // 128, rows, device="cuda")
    control, status = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    call = torch.tensor([0, 0, 10**9, status.data_ptr()], dtype=torch.int64, device="cuda")
    ready, expert = int32([0] * (1 + sum(tiles))), int32([e for e, count in enumerate(tiles) for _ in range(count)])

    tables = [wt.work_table(tiles, columns // wt.TILE_COLUMNS) for columns in (2 * intermediate, hidden)]
    totals = int32([len(tables[0]), len(tables[1]), sum(tiles), rows])
    words = [int32(table) for table in tables]
    made: dict[str, Callable[[], None]] = {
        "Linear-1 alone": lambda: grouped_gemm.swiglu(a, a_scales, w1, s1, expert, words[0], totals, weight, middle, middle_scales),
        "Linear-2 alone": lambda: grouped_gemm.rows(middle, middle_scales, w2, s2, expert, words[1], totals, slots),
    }
    for order in ORDERS:
        work = int32(entries_of(shape, order))
        given = (a, a_scales, w1, s1, w2, s2, work, totals, weight, middle, middle_scales, slots, (ready, control, call))
        made[order] = lambda given=given: grouped_gemm.both(*given)  # type: ignore[misc]

    def prepare() -> None:
        ready.zero_()
        torch.cuda.synchronize()

    return made, prepare, lambda: int(status.item())


def times_us(shape: str, rounds: int = 9) -> dict[str, float]:
    import torch

    made, prepare, status = kernels(shape)
    names, found = list(made), {name: [] for name in made}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            prepare()
            time.sleep(0.004)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            made[name]()
            end.record()
            torch.cuda.synchronize()
            if turn:
                found[name].append(begin.elapsed_time(end) * 1e3)
    assert status() == 0
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def counted(shape: str, path: str, before: int | None) -> list[dict[str, Any]]:
    """Rows of counters, as `ncu --csv` wrote them for `run`, with the model's bytes."""
    lines = [line for line in Path(path).read_text().splitlines() if line.startswith('"')]
    launches: dict[int, dict[str, float]] = {}
    for line in csv.DictReader(lines):
        launches.setdefault(int(line["ID"]), {})[line["Metric Name"]] = float(line["Metric Value"].replace(",", ""))
    found = []
    for name, m in zip(("Linear-1 alone", "Linear-2 alone", *ORDERS), launches.values(), strict=True):
        row = {
            "shape": shape, "kernel": name, "taken_before": before, "time_us": round(m["gpu__time_duration.sum"] / 1e3, 1),
            "read_bytes": int(m["dram__bytes_read.sum"]), "sm_clock_ghz": round(m["sm__cycles_elapsed.avg.per_second"] / 1e9, 3),
        }  # fmt: skip
        if name in ORDERS:
            row["modelled_read_bytes"] = modelled_bytes(shape, name, before)
        found.append(row)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("run", "time", "counted", "model"))
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("counters", nargs="?", help="counted: what ncu wrote")
    parser.add_argument("--out", help="counted: rows are added to this file")
    parser.add_argument("--taken-at-once", action="store_true", help="clusters take their next entry when they begin one")
    options = parser.parse_args(arguments)
    before = None if options.taken_at_once else TAKEN_BEFORE
    if options.what == "model":
        print({order: modelled_bytes(options.shape, order, before) for order in ORDERS})
    elif options.what == "time":
        print(times_us(options.shape))
    elif options.what == "run":
        made, prepare, status = kernels(options.shape)
        for launch in made.values():
            prepare()
            launch()
        assert status() == 0
    else:
        rows = counted(options.shape, options.counters, before)
        path = Path(options.out)
        content = json.loads(path.read_text()) if path.exists() else {"study": "moe-memory", "rows": []}
        content["rows"] += rows
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
