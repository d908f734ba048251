"""A mixture-of-experts layer in plain torch, in one process or over a group of ranks: what kernels are to be tested against.

y[t] = Σ over picks k, in order, of Linear-2(w[t, k] · SwiGLU(Linear-1(x[t]))), each with the weights of expert topk_idx[t, k].

The routing weight is applied once, to the output of SwiGLU in float32. Every precision rounds in the same places: the row that travels
to the expert, the row that enters Linear-2, the result that travels back, and the output. The combine adds float32 (float64) slots.

* `float64`: all in float64, nothing is rounded.
* `bf16`: all four are bfloat16; products and sums are float32.
* `fp8`: the first two are e4m3 with 1 × 128 scales (`xstage.moe.quantize`), the weights e4m3 with 128 × 128; products are summed in
  float32 per 128 columns, scaled, and then added. The last two are bfloat16. The weights may also be MXFP4 (`Mxfp4Linear`), whose
  scales are powers of two and therefore applied before the product.

Ranks exchange the bytes of `xstage.moe.layout`, row by row to where `xstage.moe.routing` puts them. A buffer begins as NaN in every byte,
so a byte that is read but was not written shows. One process is one rank of the same code: an expert sees the same rows in the same
order, and results are bitwise equal.

Not covered: speed, gradients, refusal by all ranks together (a rank refuses by itself, and its peers wait for gloo to give up).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from xstage.errors import XStageError
from xstage.moe import mxfp4, quantize, routing
from xstage.moe.layout import BufferLayout
from xstage.symmetric import exchange


@dataclass(frozen=True)
class Linear:
    """Weights of one layer of the experts of a rank.

    Attributes:
        weight: [experts, out, in], or as `quantize.tiled` makes it; e4m3 where there are scales. scales: float32 [experts, out / 128,
            in / 128].
        undo: where an expert's `weight` (not its `scales`) lies as a GEMM wants it: what gives [out, in] back; `apply` and `dense` do.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    undo: Callable[[torch.Tensor], torch.Tensor] | None = None

    @classmethod
    def of(cls, weight: torch.Tensor, precision: str) -> Linear:
        """Rounded or quantised from high precision.

        Raises:
            XStageError: fp8, and a dtype or size that cannot be quantised.
        """
        if precision == "fp8":
            return cls(*quantize.quantize_weights(weight))
        return cls(weight.to(torch.float64 if precision == "float64" else torch.bfloat16))

    @property
    def shape(self) -> tuple[int, ...]:
        """(experts, out, in)."""
        experts, *matrix = self.weight.shape
        return (experts, *matrix) if len(matrix) == 2 else (experts, matrix[0] * matrix[2], matrix[1] * matrix[3])

    def experts(self, start: int, stop: int) -> Linear:
        """Of some of the experts."""
        return replace(self, weight=self.weight[start:stop], scales=None if self.scales is None else self.scales[start:stop])

    def dense(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] of one expert in `dtype`, scales applied, gate rows before up rows."""
        weight = self._of(expert)
        if self.scales is None:
            return weight.to(dtype)
        return quantize.dequantize_weights(weight, self.scales[expert], torch.promote_types(dtype, torch.float32)).to(dtype)

    def apply(self, expert: int, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """rows [n, in], with scales [n, in / 128] if they are e4m3, times the expert's weight: float32 (float64) [n, out]."""
        weight = self._of(expert)
        if self.scales is None or scales is None:
            work = torch.float64 if rows.dtype == torch.float64 else torch.float32
            return rows.to(work) @ weight.to(work).T
        per_row = self.scales[expert].repeat_interleave(quantize.BLOCK, 0)
        total = torch.zeros(len(rows), len(weight), device=rows.device)
        for block in range(scales.shape[1]):
            k = slice(block * quantize.BLOCK, (block + 1) * quantize.BLOCK)
            total += rows[:, k].float() @ weight[:, k].float().T * (scales[:, block, None] * per_row[:, block])
        return total

    def _of(self, expert: int) -> torch.Tensor:
        return self.weight[expert] if self.undo is None else self.undo(self.weight[expert])


@dataclass(frozen=True)
class Mxfp4Linear(Linear):
    """The same in MXFP4, exactly as its codes and scales say.

    Attributes:
        weight: uint8 [experts, out, in / 2], two codes a byte in the order of `mxfp4.to_words`. scales: uint8 [experts, out, in / 32].
        undo: where rows of both lie as a GEMM wants them: what gives the natural order back.
    """

    @classmethod
    def of(cls, weight: torch.Tensor, precision: str = "mxfp4") -> Mxfp4Linear:
        """Quantised from high precision.

        Raises:
            XStageError: what `mxfp4.quantize` refuses, or another precision.
        """
        if precision != "mxfp4":
            raise XStageError(f"precision: {precision!r} must be 'mxfp4'")
        packed, scales = mxfp4.quantize(weight)
        return cls(mxfp4.to_words(packed), scales)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.weight.shape[:-1], 2 * self.weight.shape[-1])

    def natural(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Words [out, in / 2] and scales [out, in / 32] of one expert, gate rows before up rows."""
        assert self.scales is not None
        words, scales = (t[expert] if self.undo is None else self.undo(t[expert]) for t in (self.weight, self.scales))
        return words, scales

    def dense(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        words, scales = self.natural(expert)
        return mxfp4.dequantize(mxfp4.from_words(words), scales, torch.promote_types(dtype, torch.float32)).to(dtype)

    def apply(self, expert: int, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        weight = self.dense(expert, torch.float64 if rows.dtype == torch.float64 else torch.float32)
        if scales is None:
            return rows.to(weight.dtype) @ weight.T
        total = torch.zeros(len(rows), len(weight), device=rows.device)
        for block in range(scales.shape[1]):
            k = slice(block * quantize.BLOCK, (block + 1) * quantize.BLOCK)
            total += rows[:, k].float() @ weight[:, k].T * scales[:, block, None]
        return total


def swiglu(x: torch.Tensor, clamp: float | None = None) -> torch.Tensor:
    """silu(gate) · up of [n, 2 · intermediate], gate before up; `clamp` bounds the gate above and up on both sides."""
    gate, up = x.chunk(2, -1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return torch.nn.functional.silu(gate) * up


def moe(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, linear1: Linear, linear2: Linear, *, precision: str = "fp8",
    clamp: float | None = None, layout: BufferLayout | None = None, group: dist.ProcessGroup | None = None,
    x_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The layer.

    Args:
        x: [tokens, hidden] in bfloat16, float16, float32 or float64; with `x_scales` (fp8 only) e4m3. topk_idx: [tokens, top_k], −1
            masks a pick.
        topk_weights: [tokens, top_k] in float32 or less, as it travels.
        linear1: [my experts, 2 · intermediate, hidden], gate before up. linear2: [my experts, hidden, intermediate].
        precision: `float64`, `bf16` or `fp8`; the weights must be of the same.
        x_scales: float32 [tokens, hidden / 128] of an `x` that is quantised already.
        clamp: see `swiglu`. layout: sizes of the buffer, the same on every rank; None without a group: as large as needed.
        group: gloo group for CPU tensors; tokens may differ between its ranks and be none. None: one process has all experts.

    Returns:
        [tokens, hidden] in bfloat16 (float64).

    Raises:
        XStageError: arguments that do not fit each other or the layout.
    """
    me, ranks = (0, 1) if group is None else (group.rank(), group.size())
    tokens, hidden = x.shape
    if layout is None:
        if group is not None:
            raise XStageError("layout: None does not do with a group; all ranks must be given the same one")
        layout = BufferLayout(1, linear1.shape[0], hidden, topk_idx.shape[1], max(tokens, 1), 1, precision)
    _check(x, topk_idx, topk_weights, linear1, linear2, layout, precision, ranks)
    if x_scales is not None and (
        precision != "fp8" or x.dtype != torch.float8_e4m3fn or x_scales.shape != (tokens, hidden // quantize.BLOCK)
    ):
        raise XStageError(f"x_scales: {tuple(x_scales.shape)} with x {x.dtype} and precision {precision!r}; they are of an e4m3 x in fp8")
    if group is not None and x.device.type != "cpu":
        raise XStageError(f"x: lies on {x.device}; the reference exchanges CPU tensors over gloo")

    buffer = Buffer(layout, me, group, x.device)
    counts = buffer.exchange_counts(routing.count(topk_idx, layout.experts))
    placement = routing.place(topk_idx, counts, me, layout.tile)
    buffer.dispatch(x, topk_weights, placement, counts, x_scales)
    buffer.combine(*_experts(buffer, counts, linear1, linear2, clamp), counts, placement)

    slots = buffer.view("combine").unflatten(0, (layout.max_tokens_per_rank, layout.top_k))[:tokens]
    out = torch.zeros(tokens, hidden, dtype=torch.float64 if precision == "float64" else torch.float32, device=x.device)
    for pick in range(layout.top_k):
        out += torch.where(placement.row[:, pick, None] >= 0, slots[:, pick].to(out.dtype), 0.0)
    return out.to(slots.dtype)


class Buffer:
    """The bytes of one rank, and stores into those of its peers: over gloo, a store is a row number and the row's bytes."""

    def __init__(self, layout: BufferLayout, me: int, group: dist.ProcessGroup | None, device: torch.device):
        self.layout, self.me, self.group = layout, me, group
        self.bytes = torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8, device=device)

    def raw(self, name: str) -> torch.Tensor:
        """uint8 [rows, row bytes] of a region."""
        r = self.layout.region(name)
        return self.bytes[r.offset_bytes : r.offset_bytes + r.size_bytes].view(r.rows, r.row_bytes)

    def view(self, name: str) -> torch.Tensor:
        """[rows, columns] of a region, in its dtype."""
        r = self.layout.region(name)
        return self.raw(name).view(getattr(torch, r.dtype))[:, : r.columns]

    def store(self, name: str, rows: torch.Tensor, values: torch.Tensor, ranks: torch.Tensor, arriving: Sequence[int]) -> None:
        """Store `values[i]` to row `rows[i]` of rank `ranks[i]`'s region, while `arriving[r]` rows come from rank r."""
        columns = values.contiguous().view(torch.uint8)
        to = [ranks == rank for rank in range(self.layout.ranks)]
        width = columns.shape[1]
        places = self._exchange([rows[there].long() for there in to], [(n,) for n in arriving])
        for place, part in zip(places, self._exchange([columns[there] for there in to], [(n, width) for n in arriving]), strict=True):
            self.raw(name)[place, :width] = part

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Every rank stores its counts to row `me` of everybody; returns int32 [ranks, experts]."""
        ranks = torch.arange(self.layout.ranks, device=counts.device)
        self.store("counts", torch.full_like(ranks, self.me), counts.expand(len(ranks), -1), ranks, [1] * len(ranks))
        return self.view("counts").clone()

    def dispatch(
        self, x: torch.Tensor, topk_weights: torch.Tensor, placement: routing.Placement, counts: torch.Tensor,
        x_scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Rows, scales and sources to the ranks of their experts."""
        arriving = routing.count_ranks(counts, self.layout.ranks)[:, self.me].tolist()
        token, pick = (placement.row >= 0).nonzero(as_tuple=True)
        rank, row = placement.rank[token, pick], placement.row[token, pick]
        weight = topk_weights[token, pick].float().view(torch.int32)
        sources = torch.stack((torch.full_like(rank, self.me), token.to(torch.int32), pick.to(torch.int32), weight), 1)
        self.store("sources", row, sources, rank, arriving)
        if self.layout.precision == "fp8":
            rows, scales = quantize.quantize_activations(x) if x_scales is None else (x, x_scales)
            self.store("activation_scales", row, scales[token], rank, arriving)
        else:
            rows = x.to(self.view("activations").dtype)
        self.store("activations", row, rows.view(torch.uint8)[token], rank, arriving)

    def combine(self, rows: torch.Tensor, results: torch.Tensor, counts: torch.Tensor, placement: routing.Placement) -> None:
        """The result of each of `rows` back to the slot of its token's own pick."""
        arriving = [int((placement.rank == rank).sum()) for rank in range(self.layout.ranks)]
        rank, token, pick, _ = self.view("sources")[rows].unbind(1)
        self.store("combine", token.long() * self.layout.top_k + pick, results, rank, arriving)

    def _exchange(self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return list(parts) if self.group is None else exchange(parts, shapes, self.group)


def _experts(
    buffer: Buffer, counts: torch.Tensor, linear1: Linear, linear2: Linear, clamp: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the buffer that hold a pair, and their results as they travel: [n], [n, hidden]."""
    layout = buffer.layout
    first = routing.offsets(counts, layout.tile)[buffer.me].tolist()
    loads = counts.sum(0).view(layout.ranks, -1)[buffer.me].tolist()
    activations, weights = buffer.view("activations"), buffer.view("sources")[:, 3].contiguous().view(torch.float32)
    scales = buffer.view("activation_scales") if layout.precision == "fp8" else None
    rows, results = [], []
    for expert, load in enumerate(loads):
        mine = slice(first[expert], first[expert] + load)
        wide = linear1.apply(expert, activations[mine], None if scales is None else scales[mine])
        middle = swiglu(wide, clamp) * weights[mine, None]
        if layout.precision == "fp8":
            result = linear2.apply(expert, *quantize.quantize_activations(middle))
        else:
            result = linear2.apply(expert, middle.to(activations.dtype), None)
        rows.append(torch.arange(mine.start, mine.stop, device=activations.device))
        results.append(result.to(buffer.view("combine").dtype))
    return torch.cat(rows), torch.cat(results)


def _check(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, linear1: Linear, linear2: Linear, layout: BufferLayout,
    precision: str, ranks: int,
) -> None:  # fmt: skip
    tokens, hidden = x.shape
    for name, given, wanted in (
        ("precision", precision, layout.precision),
        ("group", ranks, layout.ranks),
        ("hidden", hidden, layout.hidden),
    ):
        if given != wanted:
            raise XStageError(f"{name}: {given!r} does not fit the layout's {wanted!r}")
    if tokens > layout.max_tokens_per_rank:
        raise XStageError(f"x: {tokens} tokens exceed max_tokens_per_rank {layout.max_tokens_per_rank}")
    if topk_idx.shape != (tokens, layout.top_k) or topk_weights.shape != topk_idx.shape:
        raise XStageError(
            f"topk_idx, topk_weights: {tuple(topk_idx.shape)} and {tuple(topk_weights.shape)} must be {(tokens, layout.top_k)}"
        )
    if topk_weights.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise XStageError(f"topk_weights: {topk_weights.dtype} must be float32, bfloat16 or float16")
    routing.check(topk_idx, layout.experts)
    intermediate = linear2.shape[-1]
    for name, linear, shape in (
        ("linear1", linear1, (layout.experts_per_rank, 2 * intermediate, hidden)),
        ("linear2", linear2, (layout.experts_per_rank, hidden, intermediate)),
    ):
        if linear.shape != shape:
            raise XStageError(f"{name}: {linear.shape} must be {shape}")
        if (linear.scales is not None) != (precision == "fp8"):
            raise XStageError(f"{name}: {'no' if linear.scales is None else 'fp8'} scales do not fit precision {precision!r}")
