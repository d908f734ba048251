"""The MoE layer on two or more peer-connected Hopper GPUs.

    torchrun --nproc-per-node 2 tests/gpu/test_moe.py [--once] [--sections random,replay,…] [--shapes 60] [--replays 5000]
    python tests/gpu/test_moe.py --prebuild FOLDER     # without a GPU; XSTAGE_KERNELS=FOLDER then spares the compiling

Under pytest the file starts that command, and again with `--once` (`rows_once`), and reports each section as a test. Sections:

* random: shapes, routings of every kind, tokens per rank, clamps, quantised x; every byte that peers or steps write is poisoned before each
  call. Against float64: at most twice the error of the fp8 reference, over all tokens and for the worst token; counts exactly.
* orders: every order of tiles gives the bits of `serial`, in the worst lead too.
* spans: with records of what the kernel did when, the same bits; every tile and every item once, times in order.
* replay: one graph of two calls, thousands of replays with changing tokens and routings, ranks free to drift; bitwise against eager calls.
* poison: buffers of all ranks full of 0xFF change no bit. stream: a side stream.
* delay: a rank that is late into a call, or between any two steps of it, while its peer is already in the next call.
* refuse: bad arguments in the first call (all ranks refuse), later (the rank alone; its next call meets its peers), and for good (the
  peer's error says why). dead: a peer that never comes.
* compile: torch.compile(fullgraph=True). layers: two layers of one object, eager and in one graph, give what two objects do; ranks
  that mean different ones are told.
* fallback: a shape that the kernels cannot take.
* mxfp4: weights in MXFP4, through `random`, `orders`, `spans` and `replay` again, and by all forms of the kernel; errors are against
  float64 of what the codes stand for.

Not covered: more than one host, speed, compute-sanitizer (sanitize.py).
"""

import argparse
import random
import time
import warnings
from typing import Any

import pytest
import torch
from sections import DEVICE, MARKS, RANK, WORLD, arguments, everywhere, main, outcome, say, settle

from xstage.moe import layout
from xstage.moe.work_table import FORMS

ONCE_SECTIONS = ("random", "orders", "spans", "poison", "replay", "delay", "stream", "layers", "mxfp4", "refuse", "dead")  # with rows_once
SECTIONS = (
    "random", "orders", "spans", "poison", "replay", "delay", "stream", "compile", "layers", "fallback", "mxfp4", "refuse", "dead",
)  # fmt: skip

pytestmark = MARKS


@pytest.mark.parametrize("section", SECTIONS)
def test_section(section: str) -> None:
    assert (became := outcome(__file__, 29572, section)) == "passed", became


@pytest.mark.parametrize("section", ONCE_SECTIONS)
def test_section_once(section: str) -> None:
    assert (became := outcome(__file__, 29576, section, "--once", "--sections", ",".join(ONCE_SECTIONS))) == "passed", became


# ---- what every rank runs

KINDS = (
    "even", "skewed", "one expert", "all local", "all remote", "a rank without rows", "masked", "all masked", "twice the same",
)  # fmt: skip


ONCE = False  # `rows_once` of the layers; by --once

# hidden, intermediate, experts, top_k, most tokens, clamp; where it says so with schedule and lead.
SMALL, MIDDLE = (512, 256, 8, 2, 200), (1024, 512, 16, 4, 600)
ALONE = (1024, 512, 16, 4, 601)  # sizes of one test, whose kernels nobody has launched before
LARGE = ((2048, 768, 64, 8, 2000), (1024, 1024, 32, 4, 3000))
SCHEDULES = (
    ("serial", None), ("interleaved", None), ("interleaved", 1), ("alternating", 40), ("expert_wave", None),
    ("linear1_first", None),
)  # fmt: skip
RANDOM = (
    ((512, 256, 4, 1, 300, None), "serial", None), ((1024, 512, 8, 2, 400, None), "interleaved", None),
    ((2048, 768, 64, 8, 500, None), "expert_wave", None), ((512, 768, 16, 4, 700, 0.5), "alternating", None),
    ((1024, 256, 32, 8, 129, 2.0), "serial", None), ((512, 512, max(2 * WORLD, 4), 3, 1000, None), "interleaved", 1),
)  # fmt: skip


def prebuild(folder: str, world: int, sections: list[str], once: bool) -> None:
    """Compile what the sections use, for `world` ranks; needs no GPU. Then start the tests with XSTAGE_KERNELS=folder."""
    for weights in ("fp8", "mxfp4"):
        if any((section == "mxfp4") == (weights == "mxfp4") for section in sections):
            _prebuild(folder, world, weights, once)


def _prebuild(folder: str, world: int, weights: str, once: bool) -> None:
    from xstage.moe.prebuild import fill, kernels_of, prebuild
    from xstage.moe.shapes import MoEShape

    wanted = [(sizes, "auto", None) for sizes in (SMALL, MIDDLE, ALONE)] + [(MIDDLE, "serial", None), *RANDOM]
    wanted += [(sizes, schedule, lead) for sizes in LARGE for schedule, lead in SCHEDULES]
    for (hidden, intermediate, experts, top_k, most, *clamp), schedule, lead in wanted:
        made = prebuild(
            folder, [MoEShape("test", hidden, intermediate, experts, top_k)], tokens=most, ranks=world, schedules=[schedule],
            lead_rows=lead, clamp=clamp[0] if clamp else None, picks=["int32", "int64"], rows=["bfloat16", "float8_e4m3fn"],
            weights=weights, rows_once=once,
        )  # fmt: skip
    model = MoEShape("test", *MIDDLE[:4])
    recorded = kernels_of(model, MIDDLE[4], world, "interleaved", None, None, True, False, recorded=True, weights=weights, once=once)
    made = fill(folder, recorded)
    print(f"{len(made)} kernels in {folder}")


class Problem:
    """A layer with weights of all experts, which every rank makes alike, and its references."""

    def __init__(
        self, hidden: int, intermediate: int, experts: int, top_k: int, most: int, clamp: float | None = None, seed: int = 0,
        weights: str = "fp8",
    ):  # fmt: skip
        from xstage.moe import mxfp4
        from xstage.moe.reference import Linear, Mxfp4Linear

        self.weights = weights
        self.hidden, self.experts, self.top_k, self.most, self.clamp = hidden, experts, top_k, most, clamp
        self.intermediate = intermediate
        g = torch.Generator(device="cuda").manual_seed(seed)
        self.w1 = torch.randn(experts, 2 * intermediate, hidden, device="cuda", generator=g, dtype=torch.bfloat16) * (2 * hidden**-0.5)
        self.w2 = torch.randn(experts, hidden, intermediate, device="cuda", generator=g, dtype=torch.bfloat16) * intermediate**-0.5
        self.exact = (Linear.of(self.w1, "float64"), Linear.of(self.w2, "float64"))
        self.rounded = (Linear.of(self.w1, "fp8"), Linear.of(self.w2, "fp8"))
        if weights == "mxfp4":
            self.rounded = (Mxfp4Linear.of(self.w1), Mxfp4Linear.of(self.w2))
            first, second = (mxfp4.dequantize(*mxfp4.quantize(w), torch.float64) for w in (self.w1, self.w2))
            self.exact = (Linear(first), Linear(second))

    def make(self, **options: Any) -> Any:
        from xstage.moe.op import MegaMoE

        options = {"fallback": "error", "weight_format": self.weights, "device": DEVICE, "rows_once": ONCE, **options}
        moe = MegaMoE(
            num_experts=self.experts, hidden=self.hidden, intermediate=self.intermediate, top_k=self.top_k, max_tokens_per_rank=self.most,
            clamp=self.clamp, **options,
        )  # fmt: skip
        moe.load_weights(self.w1[moe.experts], self.w2[moe.experts])
        return moe

    def tokens(self, rank: int, count: int, kind: str, seed: int) -> list[torch.Tensor]:
        """x, picks, routing weights of a rank; every rank can make those of every rank."""
        g = torch.Generator(device="cuda").manual_seed(1000 * seed + rank)
        x = torch.randn(count, self.hidden, device="cuda", generator=g).bfloat16()
        popularity = torch.rand(count, self.experts, device="cuda", generator=g)
        if kind == "skewed":
            popularity /= torch.arange(1, self.experts + 1, device="cuda")
        idx = popularity.topk(self.top_k).indices
        per_rank = self.experts // WORLD
        if kind == "one expert":
            idx = torch.full_like(idx, seed % self.experts)
        elif kind == "all local":
            idx = rank * per_rank + idx % per_rank
        elif kind == "all remote":
            idx = (rank + 1 + idx // per_rank % max(WORLD - 1, 1)) % WORLD * per_rank + idx % per_rank
        elif kind == "a rank without rows":
            idx = idx % (self.experts - per_rank)
        elif kind == "masked":
            idx = idx.masked_fill(torch.rand(idx.shape, device="cuda", generator=g) < 0.4, -1)
        elif kind == "all masked":
            idx = torch.full_like(idx, -1)
        elif kind == "twice the same":
            idx = idx[:, :1].expand(-1, self.top_k).contiguous()
        return [x, idx, torch.rand(count, self.top_k, device="cuda", generator=g)]

    def errors(self, y: torch.Tensor, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> tuple[float, float]:
        """Error over all tokens, and of the worst token, as multiples of the fp8 reference's."""
        from xstage.moe import reference

        if not len(x) or not bool((idx >= 0).any()):
            return (0.0, 0.0) if bool((y == 0).all()) else (torch.inf, torch.inf)
        exact = reference.moe(x.double(), idx, weights, *self.exact, precision="float64", clamp=self.clamp)
        plain = reference.moe(x, idx, weights, *self.rounded, clamp=self.clamp).double() - exact
        error = y.double() - exact
        worst = float(error.norm(dim=1).max() / plain.norm(dim=1).max())
        return float(error.norm() / plain.norm()), worst if worst == worst else torch.inf


def buffer_of(moe: Any) -> Any:
    from xstage.symmetric import SymmetricBuffer

    return next(value for value in vars(moe._kernels.exchange).values() if isinstance(value, SymmetricBuffer))


def poison(moe: Any) -> None:
    """0xFF in everything that a call writes, on every rank; signals stay. Ranks are idle before and after."""
    settle()
    local = buffer_of(moe).local
    for region in moe._kernels.exchange.layout.regions:
        if region.name != "signals":
            local[region.offset_bytes : region.offset_bytes + region.size_bytes].fill_(0xFF)
    pipeline, exchange = moe._kernels, moe._kernels.exchange
    scratch = (
        exchange.scales,
        exchange.tile_expert,
        exchange.tile_end,
        exchange.row_weight,
        exchange.row_slot,
    )
    if exchange.order is not None:
        work = [exchange.work, exchange.ready, exchange._rows, exchange._row_scales]
    else:
        work = [exchange.work1, exchange.work2]
    for tensor in (pipeline.middle, pipeline.middle_scales, *scratch, *work):
        tensor.view(torch.uint8).fill_(0xFF)
    settle()


def random_shapes(options: argparse.Namespace, format_: str = "fp8") -> None:
    from xstage.moe import quantize, routing

    done, begun, worst = 0, time.time(), (0.0, 0.0)
    for number, (configuration, schedule, lead) in enumerate(RANDOM):
        draw, problem = random.Random(5 + number), Problem(*configuration, seed=number, weights=format_)
        with problem.make(schedule=schedule, lead_rows=lead) as moe:
            assert moe.mode == ("serial" if schedule == "serial" else "fused")
            for turn in range(max(-(-options.shapes // len(RANDOM)), len(KINDS))):
                kind = KINDS[turn % len(KINDS)]
                most = problem.most
                counts = [draw.choice([0, 1, most, draw.randint(0, most), draw.randint(0, most), 128]) for _ in range(WORLD)]
                parts = [problem.tokens(r, min(counts[r], most), kind, done) for r in range(WORLD)]
                x, idx, weights = parts[RANK]
                given, scales = quantize.quantize_activations(x) if turn % 3 == 1 else (x, None)
                if turn % 2:
                    idx = idx.int()
                poison(moe)
                y, got = moe(given, idx, weights, x_scales=scales, return_counts=True)
                moe.check()
                ratio = problem.errors(y, x, idx, weights)
                what = f"{configuration}, {schedule}, {kind}, tokens {counts}, {given.dtype}, {idx.dtype}"
                assert everywhere(max(ratio) <= 2), f"errors {ratio} × the reference's here: {what}"
                picks = torch.cat([part[1] for part in parts])
                assert everywhere(torch.equal(got, routing.count(picks, problem.experts)[moe.experts])), f"counts {got.tolist()}: {what}"
                assert everywhere(torch.equal(moe(given, idx, weights, x_scales=scales), y)), f"other bits the second time: {what}"
                worst, done = (max(worst[0], ratio[0]), max(worst[1], ratio[1])), done + 1
            settle()
    say(f"  {done} calls, errors at most {worst[0]:.2f} × the reference's, worst token {worst[1]:.2f} ×, {time.time() - begun:.0f} s")


def orders(options: argparse.Namespace, format_: str = "fp8") -> None:
    for configuration in LARGE:
        problem = Problem(*configuration, weights=format_)
        wanted = []
        for schedule, lead in SCHEDULES:
            with problem.make(schedule=schedule, lead_rows=lead) as moe:
                for turn, kind in enumerate(KINDS):
                    mine = problem.tokens(RANK, problem.most - 500 * RANK, kind, turn)
                    if schedule == "serial":
                        wanted.append(moe(*mine))
                        continue
                    for form in FORMS if format_ == "mxfp4" else (None,):
                        moe._kernels.form = form
                        poison(moe)
                        what = f"{configuration}, {schedule}, lead {lead}, {kind}, {form}"
                        assert everywhere(torch.equal(moe(*mine), wanted[turn])), what
                        moe.check()
                settle()


def recorded(options: argparse.Namespace, format_: str = "fp8") -> None:
    import numpy as np

    from xstage.moe.grouped_gemm import ctas_of
    from xstage.moe.spans import Spans, decode

    problem = Problem(*MIDDLE, weights=format_)
    with problem.make() as moe:
        pipeline, exchange = moe._kernels, moe._kernels.exchange
        spans = Spans.of(exchange.layout, moe.intermediate, moe.device, ctas_of(moe.device.index))
        for turn, kind in enumerate(KINDS):
            split = format_ == "mxfp4" and turn % 2 == 1
            pipeline.form = None if format_ == "fp8" else "split" if split else "wide"
            mine = problem.tokens(RANK, 600 - 70 * turn if RANK else 31 * turn, kind, turn)
            pipeline.spans = None
            wanted = moe(*mine)
            pipeline.spans = spans
            spans.clear()
            settle()
            assert everywhere(torch.equal(moe(*mine), wanted)), kind
            moe.check()
            r, tiles = decode(spans.to_numpy()), int(exchange.totals[2])
            t, waits, sends = r.tiles, r.loads, r.sends
            complete = r.dropped == 0
            for layer, columns in ((1, 2 * moe.intermediate // 256), (2, problem.hidden // 256)):
                for group in (0, 1):
                    here = (t["layer"] == layer) & (t["group"] == group)
                    found = list(zip(t["m"][here], t["n"][here], strict=True))
                    wide = columns
                    if split:  # half the columns of two row tiles, or of one
                        wide = 2 * columns
                        single, member = t["what"][here] & 1, t["cta"][here] % 2
                        found = [(m + i, 2 * n + c) for (m, n), one, c in zip(found, single, member, strict=True) for i in range(2 - one)]
                    complete &= sorted(found) == [(m, c) for m in range(tiles) for c in range(wide)]
            complete &= sorted(sends["item"]) == list(range(int(exchange._items[0])))
            assert everywhere(complete), f"{kind}: records are missing, or there are too many"
            steps = [
                np.diff([t[name] for name in ("start", "half_start", "half_end", "main_end", "end")], axis=0),
                waits["end"] - waits["start"], sends["turn"] - sends["start"], sends["end"] - sends["turn"],
            ]  # fmt: skip
            assert everywhere(all(bool((times >= 0).all()) for times in steps)), f"{kind}: times out of order"
        settle()


def poisoned(options: argparse.Namespace) -> None:
    problem = Problem(*MIDDLE)
    with problem.make() as moe:
        for turn, kind in enumerate(KINDS):
            mine = problem.tokens(RANK, 600 - 70 * turn if RANK else 31 * turn, kind, turn)
            first = moe(*mine)
            poison(moe)
            assert everywhere(torch.equal(moe(*mine), first)), kind
        settle()
        moe.check()


def replay(options: argparse.Namespace, format_: str = "fp8") -> None:
    problem, pool = Problem(*MIDDLE, weights=format_), 12
    count = 96 + 64 * RANK
    inputs = [problem.tokens(RANK, count, KINDS[i % len(KINDS)], 10 + i) for i in range(pool)]
    with problem.make() as moe:
        wanted = [moe(*x) for x in inputs]
        for i in (0, 4):
            assert everywhere(max(problem.errors(wanted[i], *inputs[i])) <= 2)
        static = [[t.clone() for t in inputs[0]] for _ in range(2)]
        want = [wanted[0].clone() for _ in range(2)]
        wrong = torch.zeros(1, dtype=torch.int64, device="cuda")

        def body() -> None:
            for tensors, expected in zip(static, want, strict=True):
                wrong.add_((moe(*tensors) != expected).any())

        body()
        settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        wrong.zero_()
        settle()
        for i in range(options.replays):
            for place, index in ((0, i % pool), (1, (i * 5 + 1) % pool)):
                for target, source in zip(static[place], inputs[index], strict=True):
                    target.copy_(source)
                want[place].copy_(wanted[index])
            graph.replay()
            if i % 500 == 7:  # an eager call between replays
                wrong.add_((moe(*inputs[i % pool]) != wanted[i % pool]).any())
        torch.cuda.synchronize()
        moe.check()
        assert everywhere(int(wrong) == 0), f"{int(wrong)} wrong outputs in {2 * options.replays} calls"
        del graph
        settle()
    say(f"  {2 * options.replays} calls in replays, all bitwise right")


def four_bits(options: argparse.Namespace) -> None:
    for part in (random_shapes, orders, recorded, replay):
        part(options, "mxfp4")
    few_in_a_graph()


def few_in_a_graph() -> None:
    """A graph of few tokens, captured when only calls of many have run: the other form of the kernel is there nevertheless."""
    problem = Problem(*ALONE, weights="mxfp4")
    many, few = (problem.tokens(RANK, count, "even", count) for count in (problem.most, 16))
    with problem.make() as moe:
        moe(*many)
        settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = moe(*few)
        graph.replay()
        torch.cuda.synchronize()
        assert everywhere(torch.equal(captured, moe(*few)))
        assert everywhere(max(problem.errors(captured, *few)) <= 2)
        moe.check()
        del graph
        settle()


def delay(options: argparse.Namespace) -> None:
    problem = Problem(*MIDDLE)
    inputs = [problem.tokens(RANK, 300 + 100 * RANK, kind, 40 + i) for i, kind in enumerate(("even", "all remote", "masked"))]
    for schedule in ("serial", "interleaved"):
        late_anywhere(problem, schedule, inputs)


def late_anywhere(problem: Problem, schedule: str, inputs: list[list[torch.Tensor]]) -> None:
    with problem.make(schedule=schedule) as moe:
        wanted = [moe(*x) for x in inputs]
        pipeline = moe._kernels

        def stepwise(x: list[torch.Tensor], late: int) -> torch.Tensor:
            """One call; this rank sleeps before step `late`."""
            out, e = torch.empty_like(x[0]), pipeline.exchange
            gemms = [lambda: pipeline.gemms(e.row_slot)]
            if schedule == "serial":
                gemms = [pipeline.linear1, lambda: pipeline.linear2(e.row_slot)]
            steps = [lambda: e.dispatch(x[0], None, x[1], x[2]), *gemms, lambda: e.combine(x[1], out)]
            for number, step in enumerate(steps):
                if number == late:
                    torch.cuda._sleep(10_000_000)
                step()
            return out

        for turn in range(20):
            settle()
            late = turn // WORLD % 5 if turn % WORLD == RANK else -1
            results = [stepwise(x, late) for x in inputs]
            if late == 4:
                torch.cuda._sleep(10_000_000)
            results.append(moe(*inputs[0]))
            torch.cuda.synchronize()
            same = all(torch.equal(y, w) for y, w in zip(results, [*wanted, wanted[0]], strict=True))
            assert everywhere(same), f"other bits with rank {turn % WORLD} late before step {turn // WORLD % 5}"
        moe.check()
        settle()


def stream(options: argparse.Namespace) -> None:
    problem = Problem(*SMALL)
    with problem.make() as moe:
        side = torch.cuda.Stream()
        for i in range(20):
            x = problem.tokens(RANK, 100 + i + 50 * RANK, KINDS[i % len(KINDS)], 60 + i)
            want = moe(*x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = moe(*x)
            torch.cuda.current_stream().wait_stream(side)
            assert everywhere(torch.equal(y, want))
        moe.check()
        settle()


def compiled(options: argparse.Namespace) -> None:
    problem = Problem(*SMALL)
    with problem.make() as moe:
        x, idx, weights = problem.tokens(RANK, 130, "masked", 3)
        want, counts = moe(x * 2, idx, weights, return_counts=True)
        for backend in ("aot_eager", "inductor"):
            function: Any = torch.compile(lambda x, i, w: moe(x * 2, i, w, return_counts=True), fullgraph=True, backend=backend)
            try:
                y, got = function(x, idx, weights)
            except Exception as error:
                if backend == "inductor" and "compiler" in str(error).lower():
                    say(f"  inductor cannot run here: {str(error).splitlines()[0][:200]}")
                    continue
                raise
            assert everywhere(torch.equal(y, want) and torch.equal(got, counts)), backend
        settle()


def layers(options: argparse.Namespace) -> None:
    from xstage.errors import PeerTimeout

    for weights in ("fp8", "mxfp4"):
        problems = [Problem(*SMALL, seed=seed, weights=weights) for seed in range(2)]
        x = problems[0].tokens(RANK, 120 + 40 * RANK, "even", 7)
        wanted = []
        for problem in problems:
            with problem.make() as moe:
                wanted.append(moe(*x))
                moe.check()
                settle()
        assert not torch.equal(*wanted)
        with problems[0].make(layers=2) as moe:
            moe.load_weights(problems[1].w1[moe.experts], problems[1].w2[moe.experts], layer=1)
            for layer in (1, 0, 0, 1):
                assert everywhere(torch.equal(moe(*x, layer=layer), wanted[layer])), (weights, layer)
            settle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = [moe(*x, layer=layer) for layer in range(2)]
            for _ in range(3):
                for y in captured:
                    y.fill_(torch.nan)
                graph.replay()
                torch.cuda.synchronize()
                assert everywhere(all(torch.equal(y, want) for y, want in zip(captured, wanted, strict=True))), weights
            moe.check()
            del graph
            settle()
        # Ranks that mean different layers, in a call in which nobody waits for the host: nothing is stored, and all say why.
        with problems[0].make(layers=2, timeout_s=3) as moe:
            moe.load_weights(problems[1].w1[moe.experts], problems[1].w2[moe.experts], layer=1)
            moe(*x, layer=1)
            moe.check()
            settle()
            moe(*x, layer=int(RANK == WORLD - 1))
            with pytest.raises(PeerTimeout, match=r"another layer .*phase counted"):
                moe.check()
            settle()


def fallback(options: argparse.Namespace) -> None:
    from xstage.errors import UnsuitableMachine, XStageError
    from xstage.moe import quantize

    problem = Problem(256, 128, 8, 2, 100, 0.8)
    with pytest.raises(UnsuitableMachine, match="rank 0: hidden: 256 must be a positive multiple of 512"):
        problem.make()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        moe = problem.make(fallback="serial")
    assert any("hidden: 256 must be a positive multiple of 512" in str(w.message) for w in said), [str(w.message) for w in said]
    with moe:
        assert moe.mode == "torch"
        for turn, kind in enumerate(KINDS):
            x, idx, weights = problem.tokens(RANK, 90 - 10 * turn if RANK else 11 * turn, kind, turn)
            y = moe(x, idx, weights)
            assert everywhere(max(problem.errors(y, x, idx, weights)) <= 2), kind
            q, scales = quantize.quantize_activations(x)
            assert everywhere(max(problem.errors(moe(q, idx, weights, x_scales=scales), x, idx, weights)) <= 2), kind
        bad = problem.tokens(RANK, 101 if RANK == WORLD - 1 else 5, "even", 1)
        with pytest.raises(XStageError, match=f"{'' if RANK == WORLD - 1 else f'rank {WORLD - 1} refused its arguments: '}x: 101 tokens"):
            moe(*bad)
        assert everywhere(torch.equal(moe(x, idx, weights), y))


def refuse(options: argparse.Namespace) -> None:
    from xstage.errors import PeerTimeout, XStageError

    problem, last = Problem(*SMALL), RANK == WORLD - 1
    who = "" if last else f"rank {WORLD - 1} refused its arguments: "
    moe = problem.make(timeout_s=3)
    good = problem.tokens(RANK, 80, "even", 1)
    bad = problem.tokens(RANK, problem.most + 1, "even", 1)
    with pytest.raises(XStageError, match=who + "x: 201 tokens"):
        moe(*(bad if last else good))
    want = moe(*good)
    moe.check()
    assert everywhere(max(problem.errors(want, *good)) <= 2)
    # Later: nobody waits for the host. The rank refuses alone, and its next call meets the one in which its peers are.
    if last:
        with pytest.raises(XStageError, match="x: 201 tokens"):
            moe(*bad)
    y = moe(*good)
    moe.check()
    assert everywhere(torch.equal(y, want))
    # For good: the peers' error says why.
    if last:
        with pytest.raises(XStageError, match="x: 201 tokens"):
            moe(*bad)
    else:
        moe(*good)
        with pytest.raises(PeerTimeout, match=who + "x: 201 tokens"):
            moe.check()
    settle()
    moe.close()


def dead(options: argparse.Namespace) -> None:
    from xstage.errors import PeerTimeout

    problem = Problem(*SMALL)
    moe = problem.make(timeout_s=2)
    good = problem.tokens(RANK, 80, "even", 1)
    moe(*good)
    moe.check()
    settle()
    if RANK == 0:
        begun = time.time()
        moe(*good)
        with pytest.raises(PeerTimeout, match=r"rank [1-9] did not arrive within 2 s \(rank 0, phase \w+, tag 'mega-moe"):
            moe.check()
        assert time.time() - begun < 12, "the wait was not bounded"
        with pytest.raises(PeerTimeout):
            moe(*good)
    settle()
    if RANK != 0:  # whoever comes late must learn that nobody is there any more
        moe(*good)
        with pytest.raises(PeerTimeout):
            moe.check()
    settle()
    moe.close()


RUNS = {
    "random": random_shapes, "orders": orders, "spans": recorded, "poison": poisoned, "replay": replay, "delay": delay, "stream": stream,
    "compile": compiled, "layers": layers, "fallback": fallback, "mxfp4": four_bits, "refuse": refuse, "dead": dead,
}  # fmt: skip


if __name__ == "__main__":
    parser = arguments(SECTIONS, shapes=60, replays=5000)
    parser.add_argument("--prebuild", help="only compile the kernels into this folder, for two ranks, without a GPU")
    parser.add_argument("--once", action="store_true", help="with rows_once")
    options = parser.parse_args()
    if options.once:
        ONCE, layout.NEAR_TILES = True, 2  # or most of these shapes would have no rows beyond
    if options.prebuild:
        prebuild(options.prebuild, 2, options.sections.split(","), options.once)
    else:
        main(RUNS, options)
