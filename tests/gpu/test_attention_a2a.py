"""Fused attention + All-to-All on two or more peer-connected Hopper GPUs.

    torchrun --nproc-per-node 2 tests/gpu/test_attention_a2a.py [--sections random,replay,…] [--shapes 200] [--replays 5000]

Under pytest the file starts that command once and reports each section as a test. Sections:

* random: shapes, layouts, orders, starts, dtypes, head dims, grouped heads, causal, log-sum-exp; bitwise against flash-attn-4
  followed by an exact exchange; outputs poisoned before each call, and every byte that is not output must still be poison after it.
* replay: one graph of two calls, thousands of replays on the same buffers with changing inputs, ranks free to drift.
* delay: a rank that is late, and a rank that reads its output late while its peer calls again into one static buffer; the same without
  the entry check must fail, or the test proves nothing.
* mismatch: ranks with different problems are refused on the host, and by the kernel when both problems are known.
* compile: torch.compile(fullgraph=True). stream: a side stream. dead: a peer that never comes.
* serial: the push and NCCL paths give the same bits. kernel: so does FA4 through its own output argument (`with_kernel`).

Not covered: more than one host, compute-sanitizer (docs/attention.md has the commands).
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sections import DEVICE, MARKS, RANK, WORLD, arguments, everywhere, main, outcome, say, settle

SECTIONS = ("random", "replay", "delay", "mismatch", "compile", "stream", "serial", "kernel", "dead")

pytestmark = MARKS


@pytest.mark.parametrize("section", SECTIONS)
def test_section(section: str) -> None:
    assert (became := outcome(__file__, 29571, section)) == "passed", became


# ---- what every rank runs


def gathered(x: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """[batch, rows, my heads, …] of every rank side by side: the exact exchange, before rows are picked."""
    padded = torch.zeros(*x.shape[:2], max(counts), *x.shape[3:], dtype=x.dtype, device=x.device)
    padded[:, :, : x.shape[2]] = x
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:, :, :n] for part, n in zip(parts, counts, strict=True)], 2)


def expected(q: Any, k: Any, v: Any, counts: tuple[int, ...], layout: Any, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from xstage.attention import reference, serial

    out, lse = serial.attention(q, k, v, causal=causal, return_lse=True)
    assert lse is not None
    rows = reference.rows_of(layout, RANK).cuda()
    return gathered(out, counts)[:, rows], gathered(lse.transpose(1, 2), counts)[:, rows].transpose(1, 2)


def tensors(batch: int, sequence: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed * 1000 + RANK)
    return [
        torch.randn(batch, sequence, h, head_dim, device="cuda", generator=generator, dtype=torch.float32).to(dtype)
        for h in (heads, kv_heads, kv_heads)
    ]


def random_layout(draw: random.Random, sequence: int) -> Any:
    from xstage.attention.layout import SequenceLayout

    kind = draw.choice(["even", "even", "uneven", "before", "after", "one"])
    if kind == "even" or sequence < 4 * WORLD:
        return SequenceLayout.even(sequence, WORLD)

    def cut(total: int) -> list[int]:
        marks = sorted(draw.randint(0, total) for _ in range(WORLD - 1))
        return [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]

    if kind == "one":
        owner = draw.randrange(WORLD)
        return SequenceLayout.shards([sequence if r == owner else 0 for r in range(WORLD)])
    if kind == "uneven":
        return SequenceLayout.shards(cut(sequence))
    text = draw.randint(1, sequence // 2)
    return SequenceLayout.with_text(cut(sequence - text), cut(text), kind)


def bits(x: torch.Tensor) -> torch.Tensor:
    """`x` as integers of the same size: unlike bytes, they ask nothing of its strides, and a dimension of size 1 may have any."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """On the device, so that nobody waits."""
    return (bits(a) == bits(b)).all()


def random_shapes(options: argparse.Namespace) -> None:
    from xstage.attention import layout as lay
    from xstage.attention.op import LAST_LAUNCHES, STARTS, AttentionA2A, Variant

    most, batches = 3000, 2
    configurations = [
        (torch.bfloat16, 128, WORLD * 2 + 1, 1, False, False), (torch.bfloat16, 128, WORLD * 4, 1, True, True),
        (torch.float16, 64, WORLD * 2, 2, False, True), (torch.bfloat16, 64, WORLD * 3 + 1, 1, True, False),
        (torch.bfloat16, 96, WORLD * 2, 1, False, False), (torch.float16, 128, WORLD * 4, 4, False, True),
        (torch.bfloat16, 256, WORLD, 1, False, True), (torch.bfloat16, 128, WORLD * 8, 2, True, False),
    ]  # fmt: skip
    configurations = configurations[: max(1, options.shapes)]
    done, begun = 0, time.time()
    for number, (dtype, head_dim, kv_heads, ratio, causal, with_lse) in enumerate(configurations):
        draw, since = random.Random(77 + number), time.time()
        checks: list[tuple[torch.Tensor, str]] = []
        with AttentionA2A(
            max_sequence=most, heads=kv_heads * ratio, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, max_batch=batches,
            max_local_rows=most, fallback="error", device=DEVICE,
        ) as attend:  # fmt: skip
            counts, kv_counts = attend.heads_per_rank, attend.kv_heads_per_rank
            for _ in range(-(-options.shapes // len(configurations))):
                sequence = draw.choice([draw.randint(1, 300), draw.randint(1, most), 128 * draw.randint(1, most // 128)])
                layout, batch = random_layout(draw, sequence), draw.randint(1, batches)
                variant = Variant(
                    order=draw.choice(["auto", *lay.ORDERS]), entry=draw.choice(["auto", "always"]), last=draw.choice(LAST_LAUNCHES),
                    start=draw.choice(STARTS),
                )  # fmt: skip
                q, k, v = tensors(batch, sequence, counts[RANK], kv_counts[RANK], head_dim, dtype, done)
                want, want_lse = expected(q, k, v, counts, layout, causal)
                assert attend._buffer is not None
                poison = attend._buffer.local[4096:]
                poison.fill_(0xFF)
                attend.barrier(0)  # on the stream: no rank stores before every rank's poison is in place
                result = attend(q, k, v, causal=causal, layout=layout, return_lse=with_lse, variant=variant)
                out, lse = result if with_lse else (result, None)
                what = (
                    f"dtype {dtype}, head_dim {head_dim}, heads {counts}/{kv_counts}, batch {batch}, {layout}, causal {causal}, {variant}"
                )
                checks.append((same_bits(out, want), f"not bitwise equal: {what}"))
                bits(out).fill_(-1)
                if lse is not None:
                    checks.append((same_bits(lse, want_lse), f"log-sum-exp not bitwise equal: {what}"))
                    bits(lse).fill_(-1)
                checks.append(((poison == 0xFF).all(), f"bytes outside the output were written: {what}"))
                done += 1
            # Looked at together: a look at each would make the host wait each time. Ranks that find nothing wrong go down with the others.
            attend.check()
            held = torch.stack([ok for ok, _ in checks]).tolist()
            wrong = [text for ok, (_, text) in zip(held, checks, strict=True) if not ok]
            assert everywhere(not wrong), f"{len(wrong)} of {len(held)} checks of this rank failed, the first: {(wrong or ['-'])[0]}"
            settle()
        say(f"  configuration {number}: {time.time() - since:.0f} s")
    say(f"  {done} shapes bitwise equal, {time.time() - begun:.0f} s")


def replay(options: argparse.Namespace) -> None:
    from xstage.attention.layout import SequenceLayout
    from xstage.attention.op import AttentionA2A, Variant

    sequence, heads, pool = 1000, 2, 8
    layout = SequenceLayout.even(sequence, WORLD)
    inputs = [tensors(1, sequence, heads, heads, 128, torch.bfloat16, 10 + i) for i in range(pool)]
    wanted = [expected(*x, (heads,) * WORLD, layout, False)[0] for x in inputs]
    for buffers, last in ((2, "after"), (1, "after"), (2, "ahead"), (1, "ahead")):
        with AttentionA2A(
            max_sequence=sequence,
            heads=heads * WORLD,
            head_dim=128,
            buffers=buffers,
            variant=Variant(last=last),
            fallback="error",
            device=DEVICE,
        ) as attend:
            first, second = ([t.clone() for t in inputs[0]] for _ in range(2))
            wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
            want = [wanted[0].clone(), wanted[0].clone()]

            def body(attend: Any = attend, first: Any = first, second: Any = second, want: Any = want, wrong: Any = wrong) -> None:
                a = attend(*first)
                if attend.buffers == 1:
                    wrong.add_((a != want[0]).any())
                b = attend(*second)
                if attend.buffers == 2:
                    wrong.add_((a != want[0]).any())
                wrong.add_((b != want[1]).any())

            body()
            body()
            settle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                body()
            wrong.zero_()
            settle()
            for i in range(options.replays // 2):
                for place, index in ((0, i % pool), (1, (i * 3 + 1) % pool)):
                    for target, source in zip((first, second)[place], inputs[index], strict=True):
                        target.copy_(source)
                    want[place].copy_(wanted[index])
                graph.replay()
            torch.cuda.synchronize()
            attend.check()
            assert everywhere(int(wrong) == 0), f"{int(wrong)} wrong outputs with {buffers} buffer(s), last meeting {last}"
            del graph
            settle()
    say(f"  {4 * options.replays} calls in replays, all bitwise right")


def delay(options: argparse.Namespace) -> None:
    from xstage.attention.layout import SequenceLayout
    from xstage.attention.op import AttentionA2A, Variant

    sequence, heads = 2048, 2
    layout = SequenceLayout.even(sequence, WORLD)
    inputs = [tensors(1, sequence, heads, heads, 128, torch.bfloat16, 50 + i) for i in range(2)]
    wanted = [expected(*x, (heads,) * WORLD, layout, False)[0] for x in inputs]

    def rounds(attend: Any, variant: Variant, count: int) -> int:
        """Calls in which what a late rank read was not its own call's output."""
        wrong = 0
        for i in range(count):
            settle()
            late = i % WORLD == RANK
            if late and variant.finish == "wait":
                torch.cuda._sleep(20_000_000)  # late into the call
            attend(*inputs[0], variant=variant)
            if variant.finish == "none":
                settle()
            if late:
                torch.cuda._sleep(20_000_000)  # late reading it, while the peer is already in its next call
            a = attend._plans[next(c for c in attend._plans if c.variant == variant)].outs[0].clone()
            b = attend(*inputs[1], variant=variant)
            if variant.finish == "none":
                settle()
            b = b.clone()
            torch.cuda.synchronize()
            wrong += int(not torch.equal(a, wanted[0])) + int(variant.finish == "wait" and not torch.equal(b, wanted[1]))
        return wrong

    with AttentionA2A(max_sequence=sequence, heads=heads * WORLD, head_dim=128, buffers=1, fallback="error", device=DEVICE) as attend:
        for variant in (Variant(), Variant(last="after"), Variant(finish="none")):
            attend(*inputs[0], variant=variant)
        settle()
        for variant in (Variant(), Variant(last="after")):
            wrong = rounds(attend, variant, 20)
            attend.check()
            assert everywhere(wrong == 0), f"{wrong} outputs overwritten or incomplete under delay, {variant}"
        unguarded = rounds(attend, Variant(finish="none"), 2 * WORLD)
        assert everywhere(unguarded > 0), "without the entry check nothing was overwritten: the delay is too short to prove anything"
        settle()


def mismatch(options: argparse.Namespace) -> None:
    from xstage.attention.op import AttentionA2A
    from xstage.errors import PeerTimeout, XStageError

    with AttentionA2A(max_sequence=1024, heads=2 * WORLD, head_dim=128, timeout_s=5, buffers=1, fallback="error", device=DEVICE) as attend:
        with pytest.raises(XStageError, match="sequence"):
            attend(*tensors(1, 512 + 128 * RANK, 2, 2, 128, torch.bfloat16, 1))
        both = [tensors(1, n, 2, 2, 128, torch.bfloat16, 1) for n in (512, 640)]
        for x in both:
            attend(*x)
            attend(*x)
        settle()
        attend.check()
        attend._buffer.local[4096:].fill_(0xFF)  # type: ignore[union-attr]
        settle()
        attend(*both[min(RANK, 1)])
        with pytest.raises(PeerTimeout, match="other shapes"):
            attend.check()
        if WORLD == 2:
            assert bool((attend._buffer.local[4096:] == 0xFF).all()), "something was stored despite the mismatch"  # type: ignore[union-attr]
        with pytest.raises(PeerTimeout, match="other shapes"):
            attend(*both[0])
        settle()


def compiled(options: argparse.Namespace) -> None:
    from xstage.attention.layout import SequenceLayout
    from xstage.attention.op import AttentionA2A, flash_attention_a2a, release_shared

    sequence, heads = 1024, 2
    q, k, v = tensors(1, sequence, heads, heads, 128, torch.bfloat16, 3)
    want = expected(q, k, v, (heads,) * WORLD, SequenceLayout.even(sequence, WORLD), False)[0]
    with AttentionA2A(max_sequence=sequence, heads=heads * WORLD, head_dim=128, fallback="error", device=DEVICE) as attend:
        function: Callable[..., Any] = lambda q, k, v: attend(q, k, v) * 2 + flash_attention_a2a(q, k, v, fallback="error")  # noqa: E731
        for backend in ("aot_eager", "inductor"):
            try:
                out = torch.compile(function, fullgraph=True, backend=backend)(q, k, v)
            except Exception as error:
                if backend == "inductor" and "compiler" in str(error).lower():
                    say(f"  inductor cannot run here: {str(error).splitlines()[0][:200]}")
                    continue
                raise
            torch.testing.assert_close(out, want * 2 + want)
        settle()
    release_shared()


def stream(options: argparse.Namespace) -> None:
    from xstage.attention.layout import SequenceLayout
    from xstage.attention.op import AttentionA2A

    sequence, heads = 1536, 3
    with AttentionA2A(max_sequence=sequence, heads=heads * WORLD, head_dim=128, fallback="error", device=DEVICE) as attend:
        side = torch.cuda.Stream()
        for i in range(20):
            x = tensors(1, sequence, heads, heads, 128, torch.bfloat16, 100 + i)
            want = expected(*x, (heads,) * WORLD, SequenceLayout.even(sequence, WORLD), False)[0]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out = attend(*x)
                copy = out.clone()
            torch.cuda.current_stream().wait_stream(side)
            assert everywhere(torch.equal(copy, want))
        settle()


def serial_paths(options: argparse.Namespace) -> None:
    from xstage.attention.layout import SequenceLayout
    from xstage.attention.op import AttentionA2A

    sequence, heads = 777, 2
    x = tensors(2, sequence, heads, heads, 128, torch.bfloat16, 9)
    for layout in (
        SequenceLayout.even(sequence, WORLD),
        SequenceLayout.with_text([sequence - 77, *[0] * (WORLD - 1)], [0] * (WORLD - 1) + [77]),
    ):
        want, want_lse = expected(*x, (heads,) * WORLD, layout, False)
        with AttentionA2A(
            max_sequence=sequence, heads=heads * WORLD, head_dim=128, max_batch=2, max_local_rows=sequence, fallback="error", device=DEVICE
        ) as attend:
            for mode in ("push", "nccl"):
                attend.mode = mode
                for _ in range(3):
                    out, lse = attend(*x, layout=layout, return_lse=True)
                    out, lse = out.clone(), lse.clone()
                    settle()
                    assert everywhere(torch.equal(out, want)), f"{mode}: output"
                    assert everywhere(torch.equal(lse, want_lse)), f"{mode}: log-sum-exp"
            attend.mode = "fused"
            settle()


def other_kernel(options: argparse.Namespace) -> None:
    from xstage.attention import serial
    from xstage.attention.layout import SequenceLayout
    from xstage.attention.op import AttentionA2A

    sequence, heads = 900, 3
    layout = SequenceLayout.even(sequence, WORLD)
    with AttentionA2A(max_sequence=sequence, heads=heads * WORLD, head_dim=128, fallback="error", device=DEVICE) as attend:
        other = attend.with_kernel(lambda q, k, v, out: serial.attention(q, k, v, out=out))
        for i in range(10):
            x = tensors(1, sequence, heads, heads, 128, torch.bfloat16, 200 + i)
            want = expected(*x, (heads,) * WORLD, layout, False)[0]
            assert everywhere(torch.equal(other(*x), want))
            assert everywhere(torch.equal(attend(*x), want))
        settle()


def dead(options: argparse.Namespace) -> None:
    from xstage.attention.op import AttentionA2A
    from xstage.errors import PeerTimeout

    x = tensors(1, 512, 2, 2, 128, torch.bfloat16, 4)
    # With one buffer a call must not store before its peers have entered; with two it may, and waits at its end.
    for buffers, phase in ((1, "entered"), (2, "done")):
        attend = AttentionA2A(
            max_sequence=512, heads=2 * WORLD, head_dim=128, timeout_s=2, buffers=buffers, fallback="error", device=DEVICE
        )
        attend(*x)
        attend.check()
        settle()
        if RANK == 0:
            begun = time.time()
            attend(*x)
            said = rf"rank [1-9] did not arrive within 2 s \(rank 0, phase {phase}, tag 'attention-a2a"
            with pytest.raises(PeerTimeout, match=said):
                attend.check()
            assert time.time() - begun < 6, "the wait was not bounded"
            with pytest.raises(PeerTimeout):
                attend(*x)
        settle()
        if RANK != 0:
            attend(*x)
            if buffers == 1:  # the late rank must learn that rank 0's rows are missing; with two buffers they are all there
                with pytest.raises(PeerTimeout, match="rank 0 gave up on this call"):
                    attend.check()
            else:
                attend.check()
        settle()
        attend.close()


RUNS = {
    "random": random_shapes, "replay": replay, "delay": delay, "mismatch": mismatch, "compile": compiled, "stream": stream,
    "serial": serial_paths, "kernel": other_kernel, "dead": dead,
}  # fmt: skip


if __name__ == "__main__":
    parser = arguments(SECTIONS, shapes=200, replays=5000)
    main(RUNS, parser.parse_args())
