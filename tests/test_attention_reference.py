"""Reference attention and its exchange: 2–4 gloo processes against one, for every kind of layout; refusals; torch.compile on CPUs.

One set of processes per world size runs all cases, because starting them costs seconds. Not covered: anything on a GPU.
"""

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from xstage.attention import reference
from xstage.attention.layout import SequenceLayout, head_shards
from xstage.errors import PeerTimeout, XStageError


def layouts(world: int) -> list[SequenceLayout]:
    uneven = [5 + 7 * r for r in range(world)]
    return [
        SequenceLayout.even(16 * world, world),
        SequenceLayout.even(31 * world + 1, world),
        SequenceLayout.shards(uneven),
        SequenceLayout.shards([0, *uneven[1:]]),
        SequenceLayout.with_text(uneven, [3] * world, "before"),
        SequenceLayout.with_text(uneven, [r % 2 for r in range(world)], "after"),
    ]


def inputs(sequence: int, heads: int, kv_heads: int, head_dim: int = 16, batch: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(sequence * 31 + heads)
    return [torch.randn(batch, sequence, h, head_dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)]


def mine(x: torch.Tensor, counts: tuple[int, ...], rank: int) -> torch.Tensor:
    start = sum(counts[:rank])
    return x[:, :, start : start + counts[rank]].contiguous()


def cases(rank: int, world: int) -> None:
    from xstage.attention.op import AttentionA2A, flash_attention_a2a

    heads, kv_heads = 2 * (world + 1), world + 1
    counts, kv_counts = head_shards(heads, kv_heads, world)
    assert len(set(counts)) == 2  # uneven head shards
    with AttentionA2A(max_sequence=200, heads=heads, kv_heads=kv_heads, head_dim=16, max_batch=2, max_local_rows=64) as attend:
        assert attend.mode == "reference"
        for layout in layouts(world):
            for causal in (False, True):
                q, k, v = inputs(layout.sequence, heads, kv_heads)
                whole, whole_lse = reference.attention(q, k, v, causal=causal)
                rows = reference.rows_of(layout, rank)
                local = [mine(x, c, rank) for x, c in zip((q, k, v), (counts, kv_counts, kv_counts), strict=True)]
                out, lse = attend(*local, causal=causal, layout=layout, return_lse=True)
                assert out.shape == (2, layout.local_rows[rank], heads, 16)
                assert torch.equal(out, whole[:, rows])
                assert torch.equal(lse, whole_lse[:, :, rows])
                shared = flash_attention_a2a(*local, causal=causal, layout=layout, heads_per_rank=counts)
                assert torch.equal(shared, out)

        layout = SequenceLayout.even(24, world)
        q, k, v = (mine(x, c, rank) for x, c in zip(inputs(24, heads, kv_heads), (counts, kv_counts, kv_counts), strict=True))
        if world == 2:  # tracing is slow
            compiled = torch.compile(
                lambda q, k, v: attend(q * 2, k, v) + flash_attention_a2a(q, k, v, heads_per_rank=counts),
                fullgraph=True,
                backend="aot_eager",
            )
            assert torch.equal(compiled(q, k, v), attend(q * 2, k, v) + attend(q, k, v))

        # One rank is fed a longer sequence: every rank refuses, and the object still works afterwards.
        longer = 26 if rank == 1 else 25
        with pytest.raises(XStageError, match=r"sequence 2[56]"):
            attend(*(x[:, :1].expand(-1, longer, -1, -1) for x in (q, k, v)))
        assert torch.equal(attend(q, k, v, layout=layout), attend(q, k, v))

        # A rank that stays away is named, within the bound.
        attend._agreement._timeout_s = 0.3
        if rank != world - 1:
            with pytest.raises(PeerTimeout, match=rf"rank {world - 1} .*phase agreement, tag 'attention-a2a"):
                attend(*(x[:, :20] for x in (q, k, v)))
        dist.barrier()
    with pytest.raises(XStageError, match="closed"):
        attend(q, k, v)
    with pytest.raises(XStageError, match="max_sequence"):
        AttentionA2A(max_sequence=100 + rank, heads=heads, head_dim=16)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_process(world: int) -> None:
    ranks.run(cases, world, limit_s=90)


@pytest.mark.parametrize("causal", [False, True])
def test_reference_against_torch(causal: bool) -> None:
    q, k, v = inputs(37, 4, 2, dtype=torch.float64)
    out, lse = reference.attention(q, k, v, causal=causal)
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    scores = qt @ kt.repeat_interleave(2, 1).mT / 4
    if causal:
        scores = scores.masked_fill(torch.ones(37, 37, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(lse, scores.exp().sum(-1).log(), rtol=1e-12, atol=1e-12)


def test_refusals_without_a_group() -> None:
    from xstage.attention.op import AttentionA2A, Variant

    with pytest.raises(XStageError, match="init_process_group"):
        AttentionA2A(max_sequence=1, heads=1, head_dim=64)
    with pytest.raises(XStageError, match="order"):
        Variant(order="best")


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_refusals(alone: None) -> None:
    from xstage.attention.op import AttentionA2A

    with pytest.raises(XStageError, match="fallback"):
        AttentionA2A(max_sequence=8, heads=1, head_dim=8, fallback="maybe")
    with pytest.raises(XStageError, match="kv_heads"):
        AttentionA2A(max_sequence=8, heads=3, kv_heads=2, head_dim=8)
    with AttentionA2A(max_sequence=8, heads=2, head_dim=8, dtype=torch.float32, max_batch=1) as attend:
        good = torch.randn(1, 8, 2, 8)
        assert torch.equal(attend(good, good, good), reference.attention(good, good, good)[0])
        for tensor, message in (
            (torch.randn(1, 8, 3, 8), "shape"), (good.half(), "float16"), (torch.randn(2, 8, 2, 8), "max_batch"),
            (torch.randn(1, 9, 2, 8), "max_sequence"), (good.clone().requires_grad_(), "gradient"),
        ):  # fmt: skip
            with pytest.raises(XStageError, match=message):
                attend(tensor, tensor, tensor)
        with pytest.raises(XStageError, match="layout"):
            attend(good, good, good, layout=SequenceLayout.even(7, 1))


def test_status_words_name_rank_phase_and_tag() -> None:
    from xstage.symmetric import describe_status

    phases = ("entered", "done")
    text = describe_status(7 << 32 | 1 << 16 | 1 << 8 | 2, phases, [4, 9], 0, "attention-a2a/0/1", 2.5)
    assert text == "rank 9 did not arrive within 2.5 s (rank 4, phase done, tag 'attention-a2a/0/1', call 7); the output is not complete"
    assert "gave up" in describe_status(7 << 32 | 3 << 16 | 0 << 8 | 2, phases, [4, 9], 1, "t", 1)
    assert "other shapes" in describe_status(7 << 32 | 2 << 16 | 0 << 8 | 1, phases, [4, 9], 1, "t", 1)
