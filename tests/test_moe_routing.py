"""Rows of pairs against a plain loop: every unmasked pick once, in order, padded; drawn picks have the simulator's counts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from xstage.errors import XStageError
from xstage.moe import routing
from xstage.moe.layout import padded_rows
from xstage.simulate import routing as loads


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[torch.Tensor], int, int]:
    """Picks of every rank, experts, tile."""
    ranks = draw(st.integers(1, 4))
    experts = ranks * draw(st.integers(1, 5))
    top_k = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["any", "one hot", "masked", "few"]))
    low, high = {"any": (-1, experts - 1), "one hot": (experts // 2, experts // 2), "masked": (-1, -1), "few": (-1, 0)}[kind]
    tokens = [draw(st.integers(0, 12)) for _ in range(ranks)]
    seed = draw(st.integers(0, 1 << 20))
    generator = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    picks = [torch.randint(low, high + 1, (n, top_k), generator=generator).to(dtype) for n in tokens]
    return picks, experts, draw(st.sampled_from([1, 3, 16, 128]))


def by_hand(picks: list[torch.Tensor], experts: int, tile: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(source rank, token, pick) → (rank, row), by the words of the layout."""
    ranks, places = len(picks), {}
    for rank in range(ranks):
        row = 0
        for expert in range(rank * experts // ranks, (rank + 1) * experts // ranks):
            for source, idx in enumerate(picks):
                for token, picked in enumerate(idx.tolist()):
                    for pick, e in enumerate(picked):
                        if e == expert:
                            places[source, token, pick] = (rank, row)
                            row += 1
            row = -(-row // tile) * tile
    return places


@settings(max_examples=150, deadline=None)
@given(problems())
def test_places_equal_the_loop(problem: tuple[list[torch.Tensor], int, int]) -> None:
    picks, experts, tile = problem
    ranks, top_k = len(picks), picks[0].shape[1]
    counts = torch.stack([routing.count(idx, experts) for idx in picks])
    assert counts.dtype == torch.int32
    assert counts.tolist() == [[int((idx == e).sum()) for e in range(experts)] for idx in picks]
    assert routing.count_ranks(counts, ranks).tolist() == counts.view(ranks, ranks, -1).sum(2).tolist()

    first = routing.offsets(counts, tile)
    assert first.shape == (ranks, experts // ranks + 1)
    assert (first % tile == 0).all()
    padded = -(-counts.sum(0).view(ranks, -1) // tile) * tile
    assert torch.equal(first.diff(dim=1), padded.to(first.dtype))
    assert int(first.max()) <= padded_rows(sum(idx.numel() for idx in picks), experts // ranks, tile)

    expected, found = by_hand(picks, experts, tile), {}
    for source, idx in enumerate(picks):
        placed = routing.place(idx, counts, source, tile)
        assert all(t.dtype == torch.int32 and t.shape == idx.shape for t in placed)
        assert torch.equal(placed.row < 0, idx < 0)
        assert torch.equal(placed.rank < 0, idx < 0)
        assert torch.equal(placed.position < 0, idx < 0)
        for expert in range(experts):
            assert placed.position[idx == expert].tolist() == list(range(int(counts[source, expert])))
        found |= {
            (source, t, k): (int(placed.rank[t, k]), int(placed.row[t, k]))
            for t in range(len(idx))
            for k in range(top_k)
            if placed.row[t, k] >= 0
        }
    assert found == expected


@pytest.mark.parametrize("tokens", [0, 64])
def test_no_value_is_looked_at(tokens: int) -> None:
    """Fake tensors have no values: an operation whose shape or control flow depended on one would raise."""
    with FakeTensorMode():
        idx = torch.zeros(tokens, 4, dtype=torch.int64)
        counts = routing.count(idx, 8).expand(2, -1)
        placed = routing.place(idx, counts, 1, 128)
        assert routing.count_ranks(counts, 2).shape == (2, 2)
        assert all(t.shape == idx.shape for t in placed)


def test_numbers_outside_are_masked_on_the_device_and_refused_by_check() -> None:
    idx = torch.tensor([[0, 9], [-7, 1]])
    assert routing.positions(idx, 2).tolist() == [[0, -1], [-1, 0]]
    assert routing.count(idx, 2).tolist() == [1, 1]
    for wrong in ([[0, 2]], [[-2, 0]]):
        with pytest.raises(XStageError, match=r"topk_idx: -?2 must lie in −1 … 1"):
            routing.check(torch.tensor(wrong), 2)
    with pytest.raises(XStageError, match="int32 or int64"):
        routing.check(torch.zeros(2, 2), 2)
    routing.check(torch.tensor([[-1, 1]]), 2)


@pytest.mark.parametrize(
    "load",
    [
        loads.balanced(96, 16, 3),
        loads.power(500, 32, 4, 0.8, 7),
        loads.power(500, 32, 4, 1.2, 7),
        loads.k_hot(100, 16, 3, 3, 1),
        loads.k_hot(100, 16, 3, 5, 1),
        loads.power(1, 4, 4),
    ],
    ids=lambda load: load.name,
)
def test_drawn_picks_have_the_counts(load: loads.Routing) -> None:
    idx = routing.draw(load, seed=3)
    assert idx.shape == (load.tokens, load.top_k)
    assert routing.count(idx, len(load.counts)).tolist() == load.counts.tolist()
    assert all(len(set(row)) == load.top_k for row in idx.tolist())
    assert torch.equal(idx, routing.draw(load, seed=3))
    if load.tokens > 1:
        assert not torch.equal(idx, routing.draw(load, seed=4))


def test_k_hot_and_description() -> None:
    load = loads.k_hot(100, 16, 3, 3, 1)
    assert sorted(load.counts.tolist()) == [0] * 13 + [100] * 3
    assert load.max_over_mean == pytest.approx(16 / 3)
    assert load.gini == pytest.approx(13 / 16)
    assert load.describe() == "k-hot hot=3 seed=1: Gini 0.812, max/mean 5.33"
    assert not np.array_equal(load.counts, loads.k_hot(100, 16, 3, 3, 2).counts)
    for hot in (2, 17):
        with pytest.raises(XStageError, match="hot"):
            loads.k_hot(100, 16, 3, hot)


@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "share", "alpha"),
    [(2, 512, 10, 0.5, 0.0), (2, 64, 8, 7 / 8, 1.0), (4, 64, 4, 0.3, 0.0), (2, 16, 8, 0.0, 0.0), (2, 16, 8, 1.0, 2.0), (1, 8, 8, 0.0, 0.0)],
)
def test_a_given_share_leaves(ranks: int, experts: int, top_k: int, share: float, alpha: float) -> None:
    tokens, mine = 203, experts // ranks
    all_ranks = [routing.draw_remote(tokens, experts, top_k, ranks=ranks, me=me, share=share, alpha=alpha, seed=5) for me in range(ranks)]
    for me, idx in enumerate(all_ranks):
        assert idx.shape == (tokens, top_k)
        assert idx.dtype == torch.int64
        assert int(idx.min()) >= 0
        assert int(idx.max()) < experts
        assert all(len(set(row)) == top_k for row in idx.tolist())
        leaving = (idx // mine != me).sum(1)
        assert int(leaving.sum()) == round(share * tokens * top_k)
        assert int(leaving.max()) - int(leaving.min()) <= 1
        assert torch.equal(idx, routing.draw_remote(tokens, experts, top_k, ranks=ranks, me=me, share=share, alpha=alpha, seed=5))
    if alpha and share < 1:
        # The same experts are hot for every rank, whether near or far.
        counts = [routing.count(idx, experts).double() for idx in all_ranks]
        assert float(torch.corrcoef(torch.stack([c[:mine] for c in counts]))[0, 1]) > 0.8
        assert not torch.equal(all_ranks[0] % mine, all_ranks[1] % mine)


def test_a_share_that_cannot_be() -> None:
    with pytest.raises(XStageError, match=r"share: 1.5 must lie in 0 … 1"):
        routing.draw_remote(8, 8, 2, ranks=2, me=0, share=1.5)
    with pytest.raises(XStageError, match="needs 4 distinct picks of a token where this rank has 2 experts"):
        routing.draw_remote(8, 4, 4, ranks=2, me=0, share=0.0)
    with pytest.raises(XStageError, match="needs 4 distinct picks of a token where other ranks have 2 experts"):
        routing.draw_remote(8, 4, 4, ranks=2, me=0, share=1.0)
    assert routing.draw_remote(0, 4, 2, ranks=2, me=1, share=0.5).shape == (0, 2)
