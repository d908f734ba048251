"""Rows to their experts and back on two or more peer-connected Hopper GPUs.

    torchrun --nproc-per-node 2 tests/gpu/test_moe_exchange.py [--sections random,replay,dead,timing] [--cases 60] [--replays 2000]

Under pytest the file starts that command once and reports each section but `timing` as a test. Sections:

* random: shapes, routings (uniform, Zipf, one expert takes all, all remote, all local, masked, numbers outside, no tokens on one rank or on
  all), bf16 rows and rows that come quantised, with what is not finite. Everything that `dispatch` writes against `routing`, `quantize` and
  `work_table`, bit for bit; bytes beside it are poison before and after. The GEMMs are `moe_echo`, whose sums `combine` must give.
* replay: one graph, thousands of replays on the same buffer with changing rows and routing, ranks late at random.
* dead: a peer that never comes.
* timing: µs of every kernel and rates at 8,192 tokens per rank, half of the pairs remote. Written to $OUT/moe_exchange.json.

Not covered: more than one host, GEMMs (an echo stands for them), compute-sanitizer (sanitize.py).
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sections import MARKS, RANK, WORLD, arguments, everywhere, main, outcome, say, settle

SECTIONS = ("random", "replay", "dead")

pytestmark = MARKS


@pytest.mark.parametrize("section", SECTIONS)
def test_section(section: str) -> None:
    assert (became := outcome(__file__, 29573, section)) == "passed", became


# ---- what every rank runs

KINDS = ("uniform", "zipf", "one expert", "all remote", "all local", "masked", "outside", "none here", "none anywhere")


def make(
    experts: int, hidden: int, top_k: int, tokens: int, intermediate: int, timeout_s: float = 30.0, tag: str = "", pull: bool = False
) -> Any:
    from xstage.moe.exchange import Exchange
    from xstage.moe.layout import BufferLayout

    layout = BufferLayout(WORLD, experts, hidden, top_k, tokens, pull=pull)
    group = dist.group.WORLD
    assert group is not None
    tag = tag or f"test/{experts}/{hidden}/{top_k}/{tokens}/{pull}"
    return Exchange(layout, intermediate=intermediate, group=group, device=torch.device("cuda"), timeout_s=timeout_s, tag=tag)


def picks(kind: str, tokens: int, layout: Any, rank: int, generator: torch.Generator, seed: int) -> torch.Tensor:
    from xstage.moe import routing

    experts, mine, shape = layout.experts, layout.experts_per_rank, (tokens, layout.top_k)
    near = torch.randint(mine, shape, generator=generator)
    if kind == "zipf" and layout.top_k <= mine:
        return routing.draw_remote(tokens, experts, layout.top_k, ranks=WORLD, me=rank, share=0.5, alpha=1.2, seed=seed)
    if kind == "one expert":
        return torch.full(shape, seed % experts)
    if kind == "all remote":
        return near + (rank + 1) % WORLD * mine
    if kind == "all local":
        return near + rank * mine
    if kind == "masked":
        return torch.where(torch.rand(shape, generator=generator) < 0.7, -1, torch.randint(experts, shape, generator=generator))
    if kind == "outside":
        return torch.randint(-3, experts + 4, shape, generator=generator)
    return torch.randint(experts, shape, generator=generator)


def problem(kind: str, layout: Any, seed: int) -> list[dict[str, Any]]:
    """Every rank's tokens, on the CPU; each rank makes all of them."""
    from xstage.moe import quantize

    draw, problems = random.Random(seed), []
    for rank in range(WORLD):
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        most = layout.max_tokens_per_rank
        tokens = draw.choice([draw.randint(0, most), draw.randint(0, min(most, 9)), most])
        if kind == "none anywhere" or (kind == "none here" and rank == seed % WORLD):
            tokens = 0
        scale = torch.exp(20 * torch.randn(tokens, 1, generator=generator))
        x = (torch.randn(tokens, layout.hidden, generator=generator) * scale).bfloat16()
        if tokens > 3:
            x[1, 5], x[1, 300], x[2], x[3, :128] = float("inf"), float("nan"), -0.0, 1e-39
            x[3, 7] = -float("inf")
        rows, scales = quantize.quantize_activations(x)
        problems.append(
            {"x": x, "rows": rows, "scales": scales, "idx": picks(kind, tokens, layout, rank, generator, seed),
             "weights": torch.rand(tokens, layout.top_k, generator=generator)}
        )  # fmt: skip
    return problems


def arrived(exchange: Any, problems: list[dict[str, Any]]) -> None:
    """Everything that `dispatch` wrote on this rank, against torch on the CPU."""
    from xstage.moe import routing
    from xstage.moe.work_table import work_table

    layout, tile = exchange.layout, exchange.layout.tile
    counts = torch.stack([routing.count(p["idx"], layout.experts) for p in problems])
    assert torch.equal(exchange.view("counts").cpu(), counts), "counts"
    starts = routing.offsets(counts, tile)
    loads = counts.sum(0).view(WORLD, -1)[RANK]
    tiles = (-(-loads // tile)).tolist()
    columns = (2 * exchange.intermediate // 256, layout.hidden // 256)
    tables = [work_table(tiles, n) for n in columns]
    used = int(starts[RANK, -1])
    assert exchange.totals.tolist() == [len(tables[0]), len(tables[1]), sum(tiles), used], "totals"
    for table, found in zip(tables, (exchange.work1, exchange.work2), strict=True):
        assert torch.equal(found[: 2 * len(table)].cpu().view(-1, 2), torch.tensor(table, dtype=torch.int32).view(-1, 2)), "work"
    first = starts[:, :-1].flatten() + counts[:RANK].sum(0)
    assert torch.equal(exchange.first.cpu().long(), first.long()), "first"
    assert torch.equal(exchange.expert_counts.cpu().long(), loads.long()), "expert_counts"
    expert = torch.arange(layout.experts_per_rank).repeat_interleave(torch.tensor(tiles))
    assert torch.equal(exchange.tile_expert[: len(expert)].cpu().long(), expert), "tile_expert"
    assert torch.equal(exchange.tile_end[: len(expert)].cpu().long(), (starts[RANK, :-1].long() + loads.long())[expert]), "tile_end"

    rows = torch.full((layout.rows, layout.hidden), 0xFF, dtype=torch.uint8)
    scales = torch.full((layout.rows, layout.hidden // 128), 0.0)
    sources = torch.full((layout.rows, 4), -1, dtype=torch.int32)
    weights, slots = torch.zeros(layout.rows), torch.zeros(layout.rows, dtype=torch.int64)
    real = torch.zeros(layout.rows, dtype=torch.bool)
    for source, p in enumerate(problems):
        placed = routing.place(p["idx"], counts, source, tile)
        token, pick = (placed.rank == RANK).nonzero(as_tuple=True)
        row = placed.row[token, pick].long()
        real[row] = True
        rows[row], scales[row] = p["rows"].view(torch.uint8)[token], p["scales"][token]
        weights[row] = p["weights"][token, pick]
        record = torch.stack([torch.full_like(token, source), token, pick, p["weights"].view(torch.int32)[token, pick].long()], 1)
        sources[row] = record.to(torch.int32)
        start = exchange._buffer.addresses[source] + layout.region("combine").offset_bytes
        slots[row] = start + (token * layout.top_k + pick) * layout.hidden * 2
    assert torch.equal(exchange.activations.cpu(), rows), "activations, or a byte beside them"
    assert torch.equal(exchange.view("activation_scales").cpu()[real], scales[real]), "activation_scales"
    assert bool((exchange.view("activation_scales").cpu()[~real].view(torch.int32) == -1).all()), "a scale beside a row"
    assert torch.equal(exchange.view("sources").cpu(), sources), "sources"
    assert torch.equal(exchange.scales.cpu()[:, :used], scales.T[:, :used]), "scales"
    assert torch.equal(exchange.row_weight.cpu()[:used], weights[:used]), "row_weight"
    assert torch.equal(exchange.row_slot.cpu()[:used], slots[:used]), "row_slot"


def random_cases(options: argparse.Namespace) -> None:
    import moe_echo

    configurations = [  # experts per rank, hidden, top_k, most tokens, intermediate, int64 picks
        (4, 512, 2, 300, 256, True), (3, 1536, 3, 200, 512, False), (64, 2048, 8, 400, 768, True), (256, 1024, 10, 300, 1280, True),
        (16, 4096, 6, 200, 256, False),
    ]  # fmt: skip
    done, begun = 0, time.time()
    runs = [(configuration, False) for configuration in configurations] + [(configuration, True) for configuration in configurations[:2]]
    for (per_rank, hidden, top_k, most, intermediate, wide), pull in runs:
        exchange = make(per_rank * WORLD, hidden, top_k, most, intermediate, pull=pull)
        layout, signals = exchange.layout, exchange.layout.region("counts").offset_bytes
        for number in range(-(-options.cases // len(configurations))):
            kind, quantized = KINDS[number % len(KINDS)], number % 2 == 1
            problems = problem(kind, layout, 1000 * done + number)
            here = {name: tensor.cuda() for name, tensor in problems[RANK].items()}
            idx = here["idx"].to(torch.int64 if wide else torch.int32)
            settle()
            exchange._buffer.local[signals:].fill_(0xFF)
            settle()
            if quantized:
                exchange.dispatch(here["rows"], here["scales"], idx, here["weights"])
            else:
                exchange.dispatch(here["x"], None, idx, here["weights"])
            torch.cuda.synchronize()
            what = f"{kind}, {layout}, tokens {[len(p['x']) for p in problems]}, quantized {quantized}"
            try:
                arrived(exchange, problems)
                wrong = ""
            except AssertionError as error:
                wrong = str(error).split("\n", 1)[0]
            assert everywhere(not wrong), f"{wrong or 'another rank'} is wrong: {what}"
            moe_echo.echo(exchange)
            out = torch.full((len(idx), hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
            exchange.combine(idx, out)
            torch.cuda.synchronize()
            exchange.check()
            want = moe_echo.expected(here["rows"], here["idx"], layout.experts, WORLD)
            assert everywhere(torch.equal(out, want)), f"the output is wrong: {what}"
            masked = (here["idx"] < 0) | (here["idx"] >= layout.experts)
            slots = exchange.view("combine").view(torch.uint8).unflatten(0, (most, top_k))[: len(idx)]
            assert everywhere(bool((slots[masked] == 0xFF).all())), f"the slot of a masked pick was written: {what}"
            done += 1
        settle()
        exchange.free()
    say(f"  {done} cases bitwise right, {time.time() - begun:.0f} s")


def replay(options: argparse.Namespace) -> None:
    import moe_echo

    experts, hidden, top_k, tokens, pool = 32 * WORLD, 1024, 8, 256, 8
    exchange = make(experts, hidden, top_k, tokens, 512)
    inputs = []
    for i in range(pool):
        generator = torch.Generator().manual_seed(i * 10 + RANK)
        idx = picks(KINDS[i % 7], tokens, exchange.layout, RANK, generator, 7 * i).cuda()
        rows = torch.randint(0, 127, (tokens, hidden), generator=generator, dtype=torch.uint8).cuda()
        inputs.append((rows, idx, moe_echo.expected(rows, idx, experts, WORLD)))
    rows, idx, want = (t.clone() for t in inputs[0])
    scales = torch.ones(tokens, hidden // 128, device="cuda")
    weights = torch.rand(tokens, top_k, device="cuda")
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")

    def body() -> None:
        for _ in range(2):
            exchange.dispatch(rows, scales, idx, weights)
            moe_echo.echo(exchange)
            exchange.combine(idx, out)
            wrong.add_((out != want).any())
            out.zero_()

    body()
    settle()
    assert everywhere(int(wrong) == 0), "wrong before the capture"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    settle()
    draw = random.Random(RANK)
    for i in range(options.replays // 2):
        for target, source in zip((rows, idx, want), inputs[(i * 3 + i // 7) % pool], strict=True):
            target.copy_(source)
        if draw.random() < 0.05:
            torch.cuda._sleep(draw.randint(1, 2_000_000))  # late into the call
        graph.replay()
    torch.cuda.synchronize()
    exchange.check()
    assert everywhere(int(wrong) == 0), f"{int(wrong)} wrong outputs"
    del graph
    settle()
    exchange.free()
    say(f"  {options.replays} calls in replays, all bitwise right")


def dead(options: argparse.Namespace) -> None:
    from xstage.errors import PeerTimeout

    exchange = make(4 * WORLD, 512, 2, 64, 256, timeout_s=2, tag="test/dead")
    x = torch.randn(64, 512, device="cuda").bfloat16()
    idx = torch.randint(4 * WORLD, (64, 2), device="cuda")
    weights, out = torch.rand(64, 2, device="cuda"), torch.empty(64, 512, dtype=torch.bfloat16, device="cuda")
    exchange.dispatch(x, None, idx, weights)
    exchange.combine(idx, out)
    exchange.check()
    settle()
    if RANK == 0:
        begun = time.time()
        exchange.dispatch(x, None, idx, weights)
        with pytest.raises(PeerTimeout, match=r"rank [1-9] did not arrive within 2 s \(rank 0, phase counted, tag 'test/dead'"):
            exchange.check()
        assert time.time() - begun < 6, "the wait was not bounded"
        assert exchange.totals.tolist() == [0, 0, 0, 0], "a GEMM would run on rows that did not come"
        exchange.combine(idx, out)
        with pytest.raises(PeerTimeout):
            exchange.dispatch(x, None, idx, weights)
    settle()
    if RANK != 0:
        exchange.dispatch(x, None, idx, weights)
        with pytest.raises(PeerTimeout, match="rank 0 gave up on this call"):
            exchange.check()
        assert exchange.totals.tolist() == [0, 0, 0, 0], "a GEMM would run on rows that did not come"
    settle()
    exchange.free()


def timing(options: argparse.Namespace) -> None:
    import moe_echo

    from xstage.moe import quantize, routing, shapes

    tokens, rounds, results = 8192, 11, []
    for name in ("Qwen3.5", "Qwen3-30B"):
        shape = shapes.shape(name)
        exchange = make(shape.experts, shape.hidden, shape.top_k, tokens, shape.intermediate, tag=f"timing/{name}")
        for share, alpha in ((0.5, 0.0), (0.5, 0.8), (0.0, 0.0)):
            idx = routing.draw_remote(
                tokens, shape.experts, shape.top_k, ranks=WORLD, me=RANK, share=share, alpha=alpha, seed=1
            ).cuda()  # fmt: skip
            generator = torch.Generator(device="cuda").manual_seed(RANK)
            x = torch.randn(tokens, shape.hidden, device="cuda", generator=generator, dtype=torch.float32).bfloat16()
            weights = torch.rand(tokens, shape.top_k, device="cuda", generator=generator)
            out = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")
            rows, _ = quantize.quantize_activations(x)
            want = moe_echo.expected(rows, idx, shape.experts, WORLD)
            spans: dict[str, list[float]] = {}
            for turn in range(rounds + 2):
                steps = [
                    *exchange._dispatch_steps(x, None, idx, weights), ("(echo)", lambda exchange=exchange: moe_echo.echo(exchange)),
                    *exchange._combine_steps(idx, out),
                ]  # fmt: skip
                settle()
                time.sleep(0.05)
                # Launches queue behind the sleep; the barrier then lets all ranks begin together.
                torch.cuda._sleep(8_000_000)
                exchange._buffer.barrier(0)
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
                marks[0].record()
                for mark, (_, launch) in zip(marks[1:], steps, strict=True):
                    launch()
                    mark.record()
                torch.cuda.synchronize()
                if turn >= 2:
                    for i, (step, _) in enumerate(steps):
                        spans.setdefault(step, []).append(marks[i].elapsed_time(marks[i + 1]) * 1e3)
            exchange.check()
            assert everywhere(torch.equal(out, want)), f"{name}: the output is wrong"
            medians = torch.tensor([sorted(s)[len(s) // 2] for s in spans.values()], device="cuda")
            dist.all_reduce(medians, dist.ReduceOp.MAX)
            us = dict(zip(spans, medians.tolist(), strict=True))
            row_bytes = shape.hidden + shape.hidden // 128 * 4 + 16
            pairs, leaving = tokens * shape.top_k, round(share * tokens * shape.top_k)
            result = {
                "shape": name, "tokens": tokens, "share": share, "alpha": alpha, "us": us,
                "remote_GBps": leaving * row_bytes / us["dispatch"] / 1e3,
                "local_GBps": ((pairs - leaving) * row_bytes + tokens * shape.hidden * 2) / us["dispatch"] / 1e3,
                "reduce_GBps": (pairs + tokens) * shape.hidden * 2 / us["reduce"] / 1e3,
                "all_else_us": sum(t for step, t in us.items() if step not in ("dispatch", "(echo)", "reduce")),
            }  # fmt: skip
            results.append(result)
            say(f"  {name}, {tokens} tokens per rank, share {share:g}, alpha {alpha:g}, slowest rank's median of {rounds}:")
            say("    " + ", ".join(f"{step} {t:.1f}" for step, t in us.items()) + " µs")
            say(
                f"    dispatch {result['remote_GBps']:.0f} GB/s remote, {result['local_GBps']:.0f} GB/s local; reduce "
                f"{result['reduce_GBps']:.0f} GB/s; all but dispatch and reduce {result['all_else_us']:.1f} µs"
            )
        settle()
        exchange.free()
    if RANK == 0 and os.environ.get("OUT"):
        Path(os.environ["OUT"], "moe_exchange.json").write_text(json.dumps(results, indent=1))


RUNS = {"random": random_cases, "replay": replay, "dead": dead, "timing": timing}


if __name__ == "__main__":
    parser = arguments(SECTIONS, cases=60, replays=2000)
    main(RUNS, parser.parse_args())
