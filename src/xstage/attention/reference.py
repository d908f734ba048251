"""Attention and its exchange in plain torch, for any device and dtype: what the kernel is tested against, and what CPUs run.

Heads are computed one by one, so that a rank's heads are bitwise those of one process that holds all of them. Products and sums are
float32 (float64 for float64 inputs); results are rounded once, at the end.

Not covered: speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from xstage.attention.layout import SequenceLayout
from xstage.symmetric import exchange


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [batch, sequence, heads, head dim] with grouped key/value heads.

    Returns:
        Output like `q`, and the log-sum-exp of each row's scores as float32 (or float64) [batch, heads, sequence].
    """
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=work, device=q.device)
    for batch in range(q.shape[0]):
        for head in range(q.shape[2]):
            scores = q[batch, :, head].to(work) @ k[batch, :, head // group].to(work).T * scale
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
            lse[batch, head] = scores.logsumexp(-1)
            out[batch, :, head] = (scores.softmax(-1) @ v[batch, :, head // group].to(work)).to(q.dtype)
    return out, lse


def rows_of(layout: SequenceLayout, rank: int) -> torch.Tensor:
    """int64: the rows of the whole sequence that `rank` owns, in the order of its output."""
    rows = (layout.owner == rank).nonzero()[0]
    return torch.from_numpy(rows[layout.local_row[rows].argsort()])


def attention_a2a(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: dist.ProcessGroup, layout: SequenceLayout, heads_per_rank: Sequence[int],
    causal: bool = False, softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over [whole sequence, my heads], then rows to their owners: CPU tensors and a gloo group.

    Returns:
        [batch, my rows, all heads, head dim] and the log-sum-exp [batch, all heads, my rows].
    """
    out, lse = attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
    me, (batch, _, _, head_dim) = group.rank(), q.shape
    mine = layout.local_rows[me]
    places = [rows_of(layout, rank).to(q.device) for rank in range(layout.world)]
    outs = exchange([out[:, rows] for rows in places], [(batch, mine, h, head_dim) for h in heads_per_rank], group)
    lses = exchange([lse[:, :, rows] for rows in places], [(batch, h, mine) for h in heads_per_rank], group)
    return torch.cat(outs, 2), torch.cat(lses, 1)
