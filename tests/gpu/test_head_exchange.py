"""The exchange before Ulysses attention on two or more peer-connected Hopper GPUs.

    torchrun --nproc-per-node 2 tests/gpu/test_head_exchange.py [--sections random,replay,…] [--shapes 200] [--replays 3000]

Under pytest the file starts that command once and reports each section as a test. Sections:

* random: layouts, heads, grouped heads, batches, dtypes, head dims, strides; every bit against torch, kernel and push; buffers poisoned
  before each call, and every byte that is no result must still be poison after it.
* replay: one graph of three calls, thousands of replays on the same buffers with changing inputs, ranks free to drift.
* delay: a rank that is late, and reads late while its peer goes on calling; without a meeting the same must fail on a single buffer, or the
  test proves nothing.
* ulysses: the whole of it has the bits of the fused attention on the same heads; replayed in a graph; all-to-alls instead give the same.
* split: the first heads ahead of the others, in every number that there is, sent by few CTAs or by copies: the bits of all at once, with
  poisoned buffers, ranks that are late, calls back to back, on a side stream, and in replays with changing inputs; outputs and sums.
* mismatch: ranks with different problems are refused on the host, and by the meeting when both problems are known. stream: a side stream.
* bound: shapes of diffusion transformers take less than `SLACK` times what the link needs. dead: a peer that never comes.

Not covered: more than one host, the bridge to diffusers (`xstage bench dit` holds its outputs against whole models).
"""

import argparse
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
from sections import DEVICE, MARKS, RANK, WORLD, arguments, everywhere, main, outcome, say, settle

SECTIONS = ("random", "replay", "delay", "ulysses", "split", "mismatch", "stream", "bound", "dead")
SLACK = 1.6

pytestmark = MARKS


@pytest.mark.parametrize("section", SECTIONS)
def test_section(section: str) -> None:
    assert (became := outcome(__file__, 29577, section)) == "passed", became


# ---- what every rank runs


def whole(batch: int, sequence: int, counts: tuple[int, ...], head_dim: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """q, k and v of all rows and heads, the same on every rank."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(batch, sequence, n, head_dim, device="cuda", generator=generator).to(dtype) for n in counts]


def rows_of(x: list[torch.Tensor], layout: Any, strides: str = "plain") -> list[torch.Tensor]:
    """What this rank has of them: contiguous, parts of one projection, heads before rows, or at odd addresses."""
    from xstage.attention import reference

    mine = [t[:, reference.rows_of(layout, RANK).cuda()] for t in x]
    if strides == "packed":
        packed = torch.cat([t.flatten(2) for t in mine], 2)
        return [p.unflatten(2, t.shape[2:]) for p, t in zip(packed.split([t.shape[2] * t.shape[3] for t in mine], 2), mine, strict=True)]
    if strides == "heads":
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in mine]
    if strides == "odd":
        return [torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in mine]
    return mine


def heads_of(x: list[torch.Tensor], exchange: Any) -> list[torch.Tensor]:
    return [t.split(list(n), 2)[RANK].contiguous() for t, n in zip(x, exchange._counts, strict=True)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same(got: Any, want: list[torch.Tensor]) -> torch.Tensor:
    """On the device, so that nobody waits."""
    return torch.stack([(bits(a) == bits(b)).all() for a, b in zip(got, want, strict=True)]).all()


def random_layout(draw: random.Random, most: int) -> Any:
    from xstage.attention.layout import SequenceLayout

    def cut(total: int) -> list[int]:
        marks = sorted(draw.randint(0, total) for _ in range(WORLD - 1))
        return [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]

    sequence = draw.choice([draw.randint(1, 300), draw.randint(1, most), 128 * draw.randint(1, most // 128)])
    kind = draw.choice(["even", "uneven", "before", "after"])
    if kind == "even":
        return SequenceLayout.even(sequence, WORLD)
    if kind == "uneven" or sequence < 2:
        return SequenceLayout.shards(cut(sequence))
    text = draw.randint(1, sequence // 2)
    return SequenceLayout.with_text(cut(sequence - text), cut(text), kind)


def random_shapes(options: argparse.Namespace) -> None:
    from xstage.attention.heads import HeadExchange

    most, batches, begun, done = 3000, 2, time.time(), 0
    configurations = [
        (torch.bfloat16, 128, WORLD * 12, 1, 2), (torch.bfloat16, 128, WORLD * 2 + 1, 1, 2), (torch.float16, 64, WORLD * 2, 4, 2),
        (torch.bfloat16, 40, WORLD + 1, 2, 1), (torch.float16, 8, WORLD, 1, 2), (torch.float32, 36, WORLD * 3, 1, 1),
        (torch.bfloat16, 256, WORLD * 5, 1, 3), (torch.bfloat16, 72, WORLD * 4 + 1, 1, 2),
    ]  # fmt: skip
    configurations = configurations[: max(1, options.shapes)]
    for number, (dtype, head_dim, kv_heads, ratio, buffers) in enumerate(configurations):
        draw = random.Random(11 + number)
        checks: list[tuple[torch.Tensor, str]] = []
        with HeadExchange(
            max_sequence=most, heads=kv_heads * ratio, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, max_batch=batches,
            buffers=buffers, fallback="error", device=DEVICE,
        ) as to_heads:  # fmt: skip
            for _ in range(-(-options.shapes // len(configurations))):
                layout, batch = random_layout(draw, most), draw.randint(1, batches)
                strides = draw.choice(["plain", "packed", "heads", "odd"])
                to_heads.mode = draw.choice(["kernel", "kernel", "kernel", "push"])
                what = f"{dtype}, {head_dim}, heads {to_heads.heads_per_rank} / {ratio}, {batch}, {layout}, {strides}, {to_heads.mode}"
                x = whole(batch, layout.sequence, (kv_heads * ratio, kv_heads, kv_heads), head_dim, dtype, done)
                mine, want = rows_of(x, layout, strides), heads_of(x, to_heads)
                assert to_heads._buffer is not None
                poison = to_heads._buffer.local[4096:]
                poison.fill_(0xFF)
                to_heads._buffer.barrier(2)  # on the stream: no rank stores before every rank's poison is in place
                got = to_heads(*mine, layout)
                checks.append((same(got, want), f"not bitwise equal: {what}"))
                for part in got:
                    bits(part).fill_(-1)
                checks.append(((poison == 0xFF).all(), f"bytes outside the results were written: {what}"))
                done += 1
            to_heads.mode = "kernel"
            to_heads.check()
            held = torch.stack([ok for ok, _ in checks]).tolist()
            wrong = [text for ok, (_, text) in zip(held, checks, strict=True) if not ok]
            assert everywhere(not wrong), f"{len(wrong)} of {len(held)} checks of this rank failed, the first: {(wrong or ['-'])[0]}"
            settle()
    say(f"  {done} shapes bitwise equal, {time.time() - begun:.0f} s")


def replay(options: argparse.Namespace) -> None:
    from xstage.attention.heads import HeadExchange
    from xstage.attention.layout import SequenceLayout

    layout, counts, pool = SequenceLayout.even(1001, WORLD), (2 * WORLD + 1,) * 3, 7
    inputs = [whole(1, layout.sequence, counts, 128, torch.bfloat16, 10 + i) for i in range(pool)]
    for buffers in (2, 1, 3):
        with HeadExchange(
            max_sequence=layout.sequence, heads=counts[0], head_dim=128, buffers=buffers, fallback="error", device=DEVICE
        ) as to_heads:
            mine, wanted = [rows_of(x, layout) for x in inputs], [heads_of(x, to_heads) for x in inputs]
            given = [[t.clone() for t in mine[0]] for _ in range(3)]
            want = [[t.clone() for t in wanted[0]] for _ in range(3)]
            wrong = torch.zeros(1, dtype=torch.int64, device="cuda")

            def body(to_heads: Any = to_heads, given: Any = given, want: Any = want, wrong: Any = wrong) -> None:
                for x, y in zip(given, want, strict=True):
                    wrong.add_(~same(to_heads(*x, layout), y))

            for _ in range(4):
                body()
            torch.cuda.synchronize()
            assert everywhere(int(wrong) == 0), f"{int(wrong)} wrong results of eager calls, {buffers} buffer(s)"
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                body()
            settle()
            for i in range(options.replays // 3):
                for place in range(3):
                    index = (i * (place + 1) + place) % pool
                    for target, source in zip((*given[place], *want[place]), (*mine[index], *wanted[index]), strict=True):
                        target.copy_(source)
                graph.replay()
                if i % 50 == 0:
                    body()  # a call outside, between replays
            torch.cuda.synchronize()
            to_heads.check()
            assert everywhere(int(wrong) == 0), f"{int(wrong)} wrong results of replays, {buffers} buffer(s)"
            del graph
            settle()
    say(f"  {3 * options.replays} calls in replays, all bitwise right")


def delay(options: argparse.Namespace) -> None:
    from xstage.attention.entry import Entry
    from xstage.attention.heads import HeadExchange
    from xstage.attention.layout import SequenceLayout

    layout, counts = SequenceLayout.even(2048, WORLD), (2 * WORLD,) * 3
    inputs = [whole(1, layout.sequence, counts, 128, torch.bfloat16, 50 + i) for i in range(5)]

    def rounds(to_heads: Any, count: int) -> int:
        """Calls whose results a late rank did not find when it read them."""
        mine, wanted = [rows_of(x, layout) for x in inputs], [heads_of(x, to_heads) for x in inputs]
        wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        for i in range(count):
            settle()
            late = i % WORLD == RANK
            for x, y in zip(mine, wanted, strict=True):
                if late:
                    torch.cuda._sleep(10_000_000)  # late into the call
                got = to_heads(*x, layout)
                if late:
                    torch.cuda._sleep(10_000_000)  # late reading it, while the peer goes on
                wrong += ~same(got, y)
            torch.cuda.synchronize()
        return int(wrong)

    for buffers in (2, 1):
        with HeadExchange(
            max_sequence=layout.sequence, heads=counts[0], head_dim=128, buffers=buffers, fallback="error", device=DEVICE
        ) as to_heads:
            wrong = rounds(to_heads, 10 * WORLD)
            to_heads.check()
            assert everywhere(wrong == 0), f"{wrong} results overwritten or incomplete under delay, {buffers} buffer(s)"
            if buffers == 1:
                with mock.patch.object(Entry, "must_meet", return_value=False):
                    unguarded = rounds(to_heads, 2 * WORLD)
                assert everywhere(unguarded > 0), "without a meeting nothing was overwritten: the delay is too short to prove anything"
            settle()


def ulysses(options: argparse.Namespace) -> None:
    from xstage.attention.layout import SequenceLayout
    from xstage.attention.op import AttentionA2A

    for batch, heads, kv_heads, layout in (
        (1, 3 * WORLD, 3 * WORLD, SequenceLayout.even(1500, WORLD)),
        (2, 4 * WORLD + 2, 2 * WORLD + 1, SequenceLayout.with_text([701, *[400] * (WORLD - 1)], [*[77] * (WORLD - 1), 0])),
    ):
        x = whole(batch, layout.sequence, (heads, kv_heads, kv_heads), 128, torch.bfloat16, 7)
        with AttentionA2A(
            max_sequence=layout.sequence, heads=heads, kv_heads=kv_heads, head_dim=128, max_batch=batch, max_local_rows=layout.sequence,
            fallback="error", device=DEVICE,
        ) as attend:  # fmt: skip
            mine = rows_of(x, layout, "packed")
            first = attend.ulysses(*mine, layout=layout).clone()
            assert attend.inputs is not None
            want = attend(*heads_of(x, attend.inputs), layout=layout).clone()
            assert everywhere(bool(same([first], [want])))
            for _ in range(20):
                out = attend.ulysses(*mine, layout=layout)
            assert everywhere(bool(same([out], [want])))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = attend.ulysses(*mine, layout=layout)
                second = attend.ulysses(*(t * 2 for t in mine), layout=layout, copy=True)
            double = attend.ulysses(*(t * 2 for t in mine), layout=layout, copy=True)
            for _ in range(50):
                graph.replay()
            assert everywhere(bool(same([second], [double])))
            for mode in ("push", "nccl"):
                attend.inputs.mode = mode
                assert everywhere(bool(same([attend.ulysses(*mine, layout=layout)], [want]))), mode
            attend.inputs.mode = "kernel"
            attend.check()
            del graph
            settle()


def poison(attend: Any) -> None:
    """No rank stores before every rank's is in place."""
    for owner in (attend.inputs, attend):
        owner._buffer.local[4096:].fill_(0xFF)
    attend._buffer.barrier(2)


def split(options: argparse.Namespace) -> None:
    from xstage.attention.op import AttentionA2A

    most, begun, done = 1500, time.time(), 0
    few = WORLD - 1
    # Query heads of each rank, query heads per key/value head, head dim, batches, buffers, causal.
    configurations = [
        ([3] * WORLD, 1, 128, 1, 2, False), ([5, *[1] * few], 1, 128, 2, 1, False), ([4, *[8] * few], 2, 128, 2, 2, True),
        ([9, *[3] * few], 3, 64, 1, 2, False), ([2, *[3] * few], 1, 64, 2, 3, True), ([4] * WORLD, 1, 128, 2, 1, False),
    ]  # fmt: skip
    configurations = configurations[: max(1, options.shapes)]
    for number, (heads, group, head_dim, batches, buffers, causal) in enumerate(configurations):
        draw = random.Random(31 + number)
        counts = (sum(heads), sum(heads) // group, sum(heads) // group)
        with AttentionA2A(
            max_sequence=most, heads=counts[0], kv_heads=counts[1], heads_per_rank=heads, head_dim=head_dim, max_batch=batches,
            max_local_rows=most, buffers=buffers, fallback="error", device=DEVICE,
        ) as attend:  # fmt: skip

            def run(mine: Any, layout: Any, first: int | None, ctas: int, attend: Any = attend, causal: bool = causal) -> Any:
                attend.rest_ctas = ctas
                return attend.ulysses(*mine, layout=layout, causal=causal, return_lse=True, first_heads=first)

            for _ in range(max(1, options.shapes // 40)):
                layout, batch = random_layout(draw, most), draw.randint(1, batches)
                strides = draw.choice(["plain", "packed", "heads", "odd"])
                mine = rows_of(whole(batch, layout.sequence, counts, head_dim, torch.bfloat16, done), layout, strides)
                want = [t.clone() for t in run(mine, layout, 0, 1)]
                assert attend.split is None
                for first in range(group, max(heads) + 1, group):
                    for ctas in (1, 12, 0):
                        what = f"first {first} of {heads} / {group}, {ctas} CTAs, {batch}, {layout}, {strides}, {buffers} buffers"
                        settle()
                        poison(attend)
                        late = draw.randrange(-1, WORLD)
                        if late == RANK:
                            torch.cuda._sleep(2_000_000)
                        got = [run(mine, layout, first, ctas)]
                        assert (attend.split is None) == (first == max(heads))
                        ok = [same(got[0], want)]
                        side = torch.cuda.Stream()
                        side.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(side):
                            for _ in range(3):  # back to back
                                got.append(run(mine, layout, first, ctas))
                            ok.append(same(got[-1], want))
                        torch.cuda.current_stream().wait_stream(side)
                        assert everywhere(bool(torch.stack(ok).all())), f"not bitwise equal: {what}"
                        done += 1
                run(mine, layout, None, 12)
            attend.check()
            settle()
            if number in (0, 1):
                replay_split(options, attend, heads, head_dim, counts, run)
    say(f"  {done} splits bitwise equal, {time.time() - begun:.0f} s")


def replay_split(options: argparse.Namespace, attend: Any, heads: list[int], head_dim: int, counts: Any, run: Any) -> None:
    from xstage.attention.layout import SequenceLayout

    layout, pool = SequenceLayout.even(1001, WORLD), 5
    pools = [rows_of(whole(1, layout.sequence, counts, head_dim, torch.bfloat16, 200 + i), layout) for i in range(pool)]
    wanted = [[t.clone() for t in run(x, layout, 0, 1)] for x in pools]
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    for ctas in (12, 0):
        given, want = ([[t.clone() for t in ts] for ts in (source[0], source[1])] for source in (pools, wanted))

        def body(ctas: int = ctas, given: Any = given, want: Any = want) -> None:
            for place, first in ((0, 1), (1, 2), (0, 0)):
                wrong.add_(~same(run(given[place], layout, first, ctas), want[place]))

        body()
        torch.cuda.synchronize()
        assert everywhere(int(wrong) == 0), f"{int(wrong)} wrong results of eager calls, {ctas} CTAs"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        settle()
        for i in range(options.replays // 30):
            for place in range(2):
                index = (i * (place + 1) + place) % pool
                for target, source in zip((*given[place], *want[place]), (*pools[index], *wanted[index]), strict=True):
                    target.copy_(source)
            if i % 7 == RANK:
                torch.cuda._sleep(300_000)
            graph.replay()
            if i % 20 == 0:
                wrong.add_(~same(run(given[0], layout, 1, 12), want[0]))
        torch.cuda.synchronize()
        attend.check()
        assert everywhere(int(wrong) == 0), f"{int(wrong)} wrong results of replays, {ctas} CTAs, heads {heads}"
        del graph
        settle()


def mismatch(options: argparse.Namespace) -> None:
    from xstage.attention.heads import HeadExchange
    from xstage.attention.layout import SequenceLayout
    from xstage.errors import PeerTimeout, XStageError

    with HeadExchange(
        max_sequence=1024, heads=2 * WORLD, head_dim=128, timeout_s=5, buffers=1, fallback="error", device=DEVICE
    ) as to_heads:
        layouts = [SequenceLayout.shards([n] * WORLD) for n in (100, 120)]
        both = [rows_of(whole(1, lay.sequence, (2 * WORLD,) * 3, 128, torch.bfloat16, 1), lay) for lay in layouts]
        with pytest.raises(XStageError, match="rows: rank"):
            to_heads(*both[min(RANK, 1)])
        for x in both:
            to_heads(*x)
            to_heads(*x)
        settle()
        to_heads.check()
        to_heads._buffer.local[4096:].fill_(0xFF)  # type: ignore[union-attr]
        settle()
        to_heads(*both[min(RANK, 1)])
        with pytest.raises(PeerTimeout, match="other shapes"):
            to_heads.check()
        if WORLD == 2:
            assert bool((to_heads._buffer.local[4096:] == 0xFF).all()), "something was stored despite the mismatch"  # type: ignore[union-attr]
        with pytest.raises(PeerTimeout, match="other shapes"):
            to_heads(*both[0])
        settle()


def stream(options: argparse.Namespace) -> None:
    from xstage.attention.heads import HeadExchange
    from xstage.attention.layout import SequenceLayout

    layout = SequenceLayout.even(1536, WORLD)
    with HeadExchange(max_sequence=layout.sequence, heads=3 * WORLD, head_dim=128, fallback="error", device=DEVICE) as to_heads:
        side = torch.cuda.Stream()
        for i in range(20):
            x = whole(1, layout.sequence, (3 * WORLD,) * 3, 128, torch.bfloat16, 100 + i)
            mine, want = rows_of(x, layout), heads_of(x, to_heads)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                ok = same(to_heads(*mine, layout), want)
            torch.cuda.current_stream().wait_stream(side)
            assert everywhere(bool(ok))
        settle()


def bound(options: argparse.Namespace) -> None:
    from xstage.attention import serial
    from xstage.attention.heads import HeadExchange
    from xstage.attention.layout import SequenceLayout
    from xstage.platform import load_platform
    from xstage.studies.dit_models import MODELS, exchange_bound_ns

    calls, slow = 10, []
    for model in MODELS:
        layout = SequenceLayout.shards([model.rows(rank, WORLD) for rank in range(WORLD)])
        x = [torch.randn(1, layout.local_rows[RANK], model.heads, model.head_dim, device="cuda").bfloat16() for _ in range(3)]
        least = exchange_bound_ns(model, WORLD, load_platform("h200-nvlink4", samples=False)) / 1e3
        with HeadExchange(
            max_sequence=layout.sequence, heads=model.heads, head_dim=model.head_dim, fallback="error", device=DEVICE
        ) as to_heads:
            took = {}
            for mode in ("kernel", "push", "nccl"):
                to_heads.mode = mode
                run = serial.graphed(lambda x=x, to_heads=to_heads, layout=layout: to_heads(*x, layout), calls)  # type: ignore[misc]
                times = []
                for _ in range(9):
                    settle()
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    run()
                    end.record()
                    end.synchronize()
                    times.append(begin.elapsed_time(end) * 1e3 / calls)
                took[mode] = sorted(times)[len(times) // 2]
                settle()
                del run
            to_heads.mode = "kernel"
            to_heads.check()
            settle()
        said = ", ".join(f"{mode} {us:.1f}" for mode, us in took.items())
        say(f"  {model.name}: bound {least:.1f} µs, {said} ({took['kernel'] / least:.2f} × the bound)")
        slow += [model.name] if took["kernel"] > SLACK * least else []
    assert everywhere(not slow), f"more than {SLACK} × the bound: {', '.join(slow)}"


def dead(options: argparse.Namespace) -> None:
    from xstage.attention.heads import HeadExchange
    from xstage.attention.layout import SequenceLayout
    from xstage.errors import PeerTimeout

    layout = SequenceLayout.even(512, WORLD)
    x = rows_of(whole(1, 512, (2 * WORLD,) * 3, 128, torch.bfloat16, 4), layout)
    for buffers, phase in ((1, "entered"), (2, "done")):
        to_heads = HeadExchange(
            max_sequence=512, heads=2 * WORLD, head_dim=128, timeout_s=2, buffers=buffers, fallback="error", device=DEVICE
        )
        to_heads(*x, layout)
        to_heads.check()
        settle()
        if RANK == 0:
            begun = time.time()
            to_heads(*x, layout)
            with pytest.raises(PeerTimeout, match=rf"rank [1-9] did not arrive within 2 s \(rank 0, phase {phase}, tag 'head-exchange"):
                to_heads.check()
            assert time.time() - begun < 6, "the wait was not bounded"
            with pytest.raises(PeerTimeout):
                to_heads(*x, layout)
        settle()
        if RANK != 0:
            to_heads(*x, layout)
            if buffers == 1:  # the late rank must learn that rank 0's rows are missing; with two buffers they are all there
                with pytest.raises(PeerTimeout, match="rank 0 gave up on this call"):
                    to_heads.check()
            else:
                to_heads.check()
        settle()
        to_heads.close()


RUNS = {
    "random": random_shapes, "replay": replay, "delay": delay, "ulysses": ulysses, "split": split, "mismatch": mismatch, "stream": stream,
    "bound": bound, "dead": dead,
}  # fmt: skip


if __name__ == "__main__":
    parser = arguments(SECTIONS, shapes=200, replays=3000)
    main(RUNS, parser.parse_args())
