"""Attention first, exchange afterwards: the baselines of the fused kernel, and what runs where it cannot.

(a) `NcclExchange`: gather rows by owner, `all_to_all_single`, put heads side by side: the paper's serial baseline (section 5.3).
(b) the same in a CUDA graph (`graphed`).
(c) `push`: each rank writes strided blocks straight into the owners' buffers, between two barriers of torch symmetric memory; by torch's
    copies, which for strided blocks are kernels on the SMs, or by the copy engines. It needs no permutation and is the strongest.

The attention is FA4's where it runs (`attention`), with its own bulk store of the output; else torch's scaled dot product. `OTHERS` are
other attention kernels for the same exchanges, full attention only, where their packages are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from xstage.attention.layout import SequenceLayout
from xstage.attention.reference import rows_of

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, softmax_scale: float | None = None,
    return_lse: bool = False, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """FA4 on Hopper and newer, torch elsewhere. [batch, sequence, heads, head dim]; log-sum-exp [batch, heads, sequence] or None.

    Heads are not packed, as in the fused kernel, so that the two are bitwise equal.
    """
    if has_fa4(q):
        from flash_attn.cute.interface import _flash_attn_fwd

        fa4_out, lse, *_ = _flash_attn_fwd(
            q, k, v, softmax_scale=softmax_scale, causal=causal, pack_gqa=False, out=out, return_lse=return_lse
        )
        return fa4_out, lse if return_lse else None
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[2] != k.shape[2]
    if not return_lse:
        result = torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, is_causal=causal, scale=softmax_scale, enable_gqa=gqa)
        return result.transpose(1, 2), None
    group = q.shape[2] // k.shape[2]
    result, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        qt, kt.repeat_interleave(group, 1), vt.repeat_interleave(group, 1), 0.0, causal, scale=softmax_scale
    )
    return result.transpose(1, 2), lse


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """cuDNN's attention as torch ships it. [batch, sequence, heads, head dim]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention 3 (package `fa3-fwd`). [batch, sequence, heads, head dim]."""
    from fa3_fwd_interface import flash_attn_func

    out = flash_attn_func(q, k, v)
    return out[0] if isinstance(out, tuple) else out


OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {"cudnn": cudnn, "fa3": fa3}


def has_fa4(q: torch.Tensor) -> bool:
    """True if flash-attn-4 takes this tensor."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or torch.cuda.get_device_capability(q.device)[0] not in (9, 10):
        return False
    try:
        import flash_attn.cute.interface  # noqa: F401
    except ImportError:
        return False
    return bool(q.shape[-1] % 8 == 0 and q.shape[-1] <= (256 if torch.cuda.get_device_capability(q.device)[0] == 9 else 128))


class NcclExchange:
    """(a): [batch, sequence, my heads, …] → [batch, my rows, all heads, …] through `all_to_all_single`.

    Buffers and index tensors are made once, so that the exchange can be captured. With `permute` rows are always gathered by
    owner before they are sent, as the paper's baseline does; without it they are sent where they lie if the layout allows.
    """

    def __init__(
        self, layout: SequenceLayout, heads_per_rank: Sequence[int], group: dist.ProcessGroup, batch: int, tail: tuple[int, ...],
        dtype: torch.dtype, device: torch.device, permute: bool = False,
    ):  # fmt: skip
        me = group.rank()
        self._group, self._layout, self._heads, self._mine = group, layout, tuple(heads_per_rank), layout.local_rows[me]
        order = torch.cat([rows_of(layout, rank) for rank in range(layout.world)])
        in_order = not permute and batch == 1 and torch.equal(order, torch.arange(layout.sequence))
        self._order = None if in_order else order.to(device)
        self._batch, self._tail, per_row = batch, tail, batch
        for n in tail:
            per_row *= n
        self._send_sizes = [rows * self._heads[me] * per_row for rows in layout.local_rows]
        self._receive_sizes = [self._mine * heads * per_row for heads in self._heads]
        self._received = torch.empty(sum(self._receive_sizes), dtype=dtype, device=device)
        self.out = torch.empty(batch, self._mine, sum(self._heads), *tail, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows_first = x.transpose(0, 1)
        send = (x if self._order is None else rows_first.index_select(0, self._order)).reshape(-1)
        dist.all_to_all_single(self._received, send, self._receive_sizes, self._send_sizes, group=self._group)
        start = head = 0
        for size, heads in zip(self._receive_sizes, self._heads, strict=True):
            part = self._received[start : start + size].view(self._mine, self._batch, heads, *self._tail).transpose(0, 1)
            self.out[:, :, head : head + heads].copy_(part)
            start, head = start + size, head + heads
        return self.out


def to_heads(x: torch.Tensor, rows: Sequence[int], heads: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """[batch, my rows, all heads, head dim] → [batch, all rows rank by rank, my heads, head dim], by an all-to-all of unequal parts."""
    me, (batch, _, _, dim) = group.rank(), x.shape
    send = torch.cat([part.transpose(0, 1).reshape(-1) for part in x.split(list(heads), 2)])
    got = x.new_empty(sum(rows) * heads[me] * batch * dim)
    dist.all_to_all_single(got, send, [n * heads[me] * batch * dim for n in rows], [rows[me] * n * batch * dim for n in heads], group=group)
    return got.view(sum(rows), batch, heads[me], dim).transpose(0, 1)


def push(
    x: torch.Tensor, layout: SequenceLayout, targets: Sequence[torch.Tensor], rank: int, barrier: Callable[[int], Any],
    engines: bool = False,
) -> torch.Tensor:  # fmt: skip
    """(c): copy each segment of [batch, sequence, my heads, …] into `targets[owner]`, the part of that rank's output for my heads.

    Args:
        targets: per rank a view [batch, its rows, my heads, …] of its output. barrier: called with 0 before and 1 after.
        engines: by the copy engines; what lies behind the rows must be contiguous.
    """
    barrier(0)
    # Each rank starts with its right neighbour, so that no rank is everyone's first.
    for segment in sorted(layout.segments, key=lambda s: (s.rank - rank - 1) % layout.world):
        rows = slice(segment.start, segment.start + segment.rows)
        target = targets[segment.rank][:, segment.local_start : segment.local_start + segment.rows]
        if engines:
            for to, source in zip(target, x[:, rows], strict=True):
                copy_tensor_rows(to, source)
        else:
            target.copy_(x[:, rows])
    barrier(1)
    return x


def copy_tensor_rows(to: torch.Tensor, source: torch.Tensor) -> None:
    """[rows, …] to another of the same shape and dtype, by the copy engines; rows are contiguous in both."""
    size = source.element_size()
    width = source[0].numel() * size if len(source) else 0
    steps = (to.stride(0) * size, source.stride(0) * size)
    copy_rows(to.data_ptr(), steps[0], source.data_ptr(), steps[1], width, len(source), torch.cuda.current_stream().cuda_stream)


def copy_rows(to: int, to_step: int, source: int, source_step: int, width: int, rows: int, stream: int) -> None:
    """`rows` rows of `width` bytes between addresses of GPUs, by the copy engines. Steps from row to row in bytes."""
    if not width or not rows:
        return
    from cuda.bindings import driver

    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    copy.srcDevice, copy.srcPitch, copy.dstDevice, copy.dstPitch = source, source_step, to, to_step
    copy.WidthInBytes, copy.Height = width, rows
    (error,) = driver.cuMemcpy2DAsync(copy, stream)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuMemcpy2DAsync: {error.name}")


def graphed(function: Callable[[], Any], calls: int = 1, warm_up: int = 3) -> Callable[[], None]:
    """`calls` calls of `function` captured into one CUDA graph after `warm_up` eager ones; returns the replay. Every rank must do
    it together.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return lambda: graph.replay()
