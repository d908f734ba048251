"""From the picks of every token to the row of every (token, pick) pair at its expert's rank.

Everything but `check` and `draw` is tensor operations of fixed shape on the device of its input, without a look at the values from
the host: legal in a CUDA graph whose routing changes between replays. `xstage.moe.layout` says in which order rows lie.

A pick of −1 is masked. So is any other number outside 0 … experts − 1, because a device cannot refuse: `check` does, where the host may
wait. Repeated picks of one token are rows of their own.

`draw` makes picks whose counts are exactly those of a `xstage.simulate.routing.Routing`, so that a measured layer and a simulated one run
the same load; `Routing.describe()` is the line to print beside a result. `draw_remote` makes picks that send a given share to other ranks.

Not covered: which experts real text sends one token to together, and routers themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from xstage.errors import XStageError
from xstage.simulate.routing import Routing


class Placement(NamedTuple):
    """Where the pairs of one rank go; int32 [tokens, top_k] each, −1 at masked picks.

    position: place among this rank's rows of the same expert. rank: of the expert. row: in that rank's buffer.
    """

    position: torch.Tensor
    rank: torch.Tensor
    row: torch.Tensor


def count(topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
    """int32 [experts]: pairs per expert in `topk_idx` [tokens, top_k] (int32 or int64)."""
    bins = torch.zeros(experts + 1, dtype=torch.int32, device=topk_idx.device)
    expert = _expert(topk_idx, experts)
    return bins.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))[:experts]


def count_ranks(counts: torch.Tensor, ranks: int) -> torch.Tensor:
    """Pairs per expert [..., experts] to pairs per rank [..., ranks]."""
    return counts.unflatten(-1, (ranks, -1)).sum(-1, dtype=torch.int32)


def positions(topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
    """int32 [tokens, top_k]: how many pairs of the same expert come before, by token and then pick; −1 at masked picks."""
    expert = _expert(topk_idx, experts)
    ordered, pair = torch.sort(expert, stable=True)
    bins = torch.zeros(experts + 1, dtype=torch.int64, device=expert.device).scatter_add_(0, expert, torch.ones_like(expert))
    starts = bins.cumsum(0) - bins
    place = torch.arange(len(expert), device=expert.device) - starts[ordered]
    place = torch.where(ordered < experts, place, -1)
    return torch.empty_like(place).scatter_(0, pair, place).to(torch.int32).view(topk_idx.shape)


def offsets(counts: torch.Tensor, tile: int) -> torch.Tensor:
    """First row of every expert in its rank's buffer.

    Args:
        counts: [ranks, experts], row r the pairs that rank r sends. tile: what an expert's rows are padded to.

    Returns:
        int32 [ranks, experts / ranks + 1]; the last of a rank is its number of rows with paddings. An empty expert has none.
    """
    padded = (counts.sum(0, dtype=torch.int64) + tile - 1) // tile * tile
    ends = padded.view(len(counts), -1).cumsum(1)
    return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


def place(topk_idx: torch.Tensor, counts: torch.Tensor, me: int, tile: int) -> Placement:
    """Where the pairs of rank `me` go.

    Args:
        topk_idx: [tokens, top_k]. counts: [ranks, experts], the counts of all ranks; row `me` is `count(topk_idx, experts)`.
    """
    ranks, experts = counts.shape
    position = positions(topk_idx, experts)
    masked = position < 0
    expert = _expert(topk_idx, experts).clamp(max=experts - 1).view(topk_idx.shape)
    first = offsets(counts, tile)[:, :-1].flatten() + counts[:me].sum(0, dtype=torch.int32)
    rank = expert // (experts // ranks)
    return Placement(position, torch.where(masked, -1, rank).to(torch.int32), torch.where(masked, -1, first[expert] + position))


def check(topk_idx: torch.Tensor, experts: int) -> None:
    """Refuse picks that the device would take for masked ones. Waits for the device.

    Raises:
        XStageError: not int32 or int64 of two dimensions, or a pick outside −1 … experts − 1.
    """
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int32, torch.int64):
        raise XStageError(f"topk_idx: {topk_idx.dtype} {tuple(topk_idx.shape)} must be int32 or int64 [tokens, top_k]")
    wrong = (topk_idx < -1) | (topk_idx >= experts)
    if bool(wrong.any()):
        raise XStageError(f"topk_idx: {int(topk_idx[wrong][0])} must lie in −1 … {experts - 1}")


def draw(routing: Routing, seed: int = 0) -> torch.Tensor:
    """int64 [tokens, top_k]: distinct picks per token whose counts are `routing.counts`, in an order that `seed` gives."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(routing.counts))
    # No expert has more pairs than there are tokens, so its run of pairs meets every token at most once.
    pairs = np.repeat(order, routing.counts[order]).reshape(routing.top_k, routing.tokens).T
    return torch.from_numpy(generator.permuted(generator.permutation(pairs), axis=1).astype(np.int64))


def draw_remote(
    tokens: int, experts: int, top_k: int, *, ranks: int, me: int, share: float, alpha: float = 0.0, seed: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """Picks of rank `me`, of which a given share goes to experts of other ranks: int64 [tokens, top_k], distinct per token.

    round(share · tokens · top_k) pairs leave, as evenly over tokens as they divide; half of two ranks' traffic is share 1/2, and share
    7/8 gives each of two ranks the egress of eight. Which experts: the i-th hottest of every rank has weight (i + 1)^−alpha, hotness is
    shuffled over experts by `seed`, the same on every rank; tokens draw without replacement, differently on every rank. `device` draws, and
    holds the picks; GPUs draw others than CPUs do.

    Raises:
        XStageError: a share outside 0 … 1, or more picks of one side than it has experts.
    """
    if not 0 <= share <= 1:
        raise XStageError(f"share: {share} must lie in 0 … 1")
    mine = experts // ranks
    common = torch.Generator().manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed * ranks + me + (1 << 32))
    leaving = torch.full((tokens,), (total := round(share * tokens * top_k)) // max(tokens, 1), device=device)
    leaving[torch.randperm(tokens, generator=generator, device=device)[: total - int(leaving.sum())]] += 1
    for side, picks, limit in (
        ("other ranks have", int(leaving.max()) if tokens else 0, experts - mine),
        ("this rank has", top_k - int(leaving.min()) if tokens else 0, mine),
    ):
        if picks > limit:
            raise XStageError(f"share: {share} needs {picks} distinct picks of a token where {side} {limit} experts")
    heat = torch.cat([torch.randperm(mine, generator=common) for _ in range(ranks)]).to(device)
    # The largest of log weight + Gumbel noise are a weighted draw without replacement.
    noise = torch.rand(tokens, experts, generator=generator, dtype=torch.float64, device=device).clamp_min(1e-300)
    keys = -alpha * (heat + 1).double().log() - (-noise.log()).log()
    here = torch.arange(experts, device=device) // mine == me
    local = keys.masked_fill(~here, -torch.inf).topk(min(top_k, mine), 1).indices
    remote = keys.masked_fill(here, -torch.inf).topk(min(top_k, experts - mine), 1).indices
    place = torch.arange(top_k, device=device).expand(tokens, top_k)
    padded = [torch.nn.functional.pad(side, (0, top_k - side.shape[1])) for side in (local, remote)]
    from_local = padded[0].gather(1, (place - leaving[:, None]).clamp_min(0))
    picks = torch.where(place < leaving[:, None], padded[1], from_local)
    return picks.gather(1, torch.rand(tokens, top_k, generator=generator, device=device).argsort(1))


def _expert(topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
    """int64 [pairs]: the expert, or `experts` where the pick is masked."""
    flat = topk_idx.flatten().long()
    return torch.where((flat >= 0) & (flat < experts), flat, experts)
