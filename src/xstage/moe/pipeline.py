"""A call of a MoE layer: the kernels that `MegaMoE` launches, and what it runs where they cannot.

* `KernelPipeline`: dispatch by stores into the peers' buffers, two grouped GEMMs, the second of which stores its rows into the peers'
  buffers, and the sum over picks. The host never waits, and no size depends on the routing: legal in CUDA graphs. With an order dispatch
  and both GEMMs are one persistent kernel: it computes on the rows that have arrived, and Linear-1 tiles stand between the stores of
  Linear-2 and give them time to drain.
* `TorchPipeline`: plain torch and `all_to_all_single`, as one writes it without kernels: the host waits for the counts, experts come one
  after another, everything between the fp8 weights is bfloat16. It is also the baseline of the study.

Not covered: overlap of the sum over picks with the GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from xstage.moe import quantize, routing
from xstage.moe.layout import BufferLayout
from xstage.moe.reference import Linear, swiglu
from xstage.moe.shapes import rows_of_an_expert
from xstage.moe.spans import Spans
from xstage.moe.weights import Weights
from xstage.moe.weights_mxfp4 import Mxfp4Weights
from xstage.moe.work_table import WorkOrder, form_of


class KernelPipeline:
    """Dispatch, GEMMs and combine on the current stream of one Hopper GPU, in step with its peers.

    Args:
        order: of both GEMMs in one kernel; None: one after the other. layers: how many take turns with it.

    Attributes:
        weights: what a call multiplies by; see `choose`. exchange:
            `xstage.moe.exchange.Exchange`, symmetric memory and work lists. middle: uint8 (e4m3) [rows, intermediate], what enters the
            second GEMM, in one kernel in the place of rows that the first has done with; middle_scales: float32 [intermediate / 128,
            rows]. spans: None, or the `xstage.moe.spans.Spans` into which the kernel of both GEMMs records from now on; narrow
            and swapped ones do not. form: of that kernel, with weights in MXFP4, by `work_table.form_of` as if all ranks had this rank's
            tokens (None) or one of `work_table.FORMS`; they give the same bits.

    All ranks make it together, outside graph capture.

    Raises:
        UnsuitableMachine: no memory that peers can reach.
    """

    def __init__(
        self, layout: BufferLayout, weights: Weights | Mxfp4Weights, *, clamp: float | None, group: dist.ProcessGroup, device: torch.device,
        timeout_s: float, tag: str, order: WorkOrder | None = None, layers: int = 1, once: bool = False,
    ):  # fmt: skip
        from xstage.moe import grouped_gemm
        from xstage.moe.exchange import Exchange

        intermediate = weights.intermediate
        layout = replace(layout, direct=order is not None, once=once and order is not None)
        self.weights, self.clamp = weights, clamp
        self.spans: Spans | None = None
        self.form: str | None = None
        codes = order is not None and isinstance(weights, Mxfp4Weights)
        self._forms = grouped_gemm.forms(layout, False) if codes else ("wide",)
        self._compiled = len(self._forms) == 1
        self.exchange = Exchange(
            layout, intermediate=intermediate, group=group, device=device, timeout_s=timeout_s, tag=tag, order=order,
            layers=layers,
        )  # fmt: skip
        place = layout.middle(intermediate)
        if place is None:
            self.middle = torch.empty(layout.rows, intermediate, dtype=torch.uint8, device=device)
        else:
            self.middle = self.exchange.view(place).view(torch.uint8)
        self.middle_scales = torch.empty(intermediate // quantize.BLOCK, layout.rows, device=device)

    @staticmethod
    def local_bytes(layout: BufferLayout, intermediate: int, fused: bool = False) -> int:
        """Bytes beside the symmetric buffer and the weights. fused: both GEMMs in one kernel."""
        from xstage.moe.exchange import scratch_bytes

        middle = 0 if replace(layout, direct=fused).middle(intermediate) else layout.rows * intermediate
        return scratch_bytes(layout, intermediate, fused) + middle + layout.rows * 4 * intermediate // quantize.BLOCK

    def choose(self, layer: int, weights: Weights | Mxfp4Weights) -> None:
        """The next call is of this layer, whose weights these are."""
        self.weights = weights
        self.exchange.choose(layer)

    def run(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The layer into `out` bfloat16 [tokens, hidden]. The first call compiles every kernel, and must be outside graph capture.

        Raises:
            PeerTimeout: an earlier call's kernel gave up on a peer.
        """
        self.exchange.dispatch(x, x_scales, topk_idx, topk_weights)
        layout = self.exchange.layout
        rows = rows_of_an_expert(len(x), layout.ranks, layout.top_k, layout.experts)
        forms = self._forms if self.spans is None else [form for form in self._forms if form not in ("narrow", "swapped")]
        form = form_of(rows, forms) if self.form is None else self.form
        self.gemms(self.exchange.row_slot, form)
        self.exchange.combine(topk_idx, out)

    def gemms(self, row_slot: torch.Tensor, form: str = "wide") -> None:
        """Both layers for the rows of the last dispatch; row r of Linear-2 goes to the address `row_slot[r]`. form: of the kernel of both,
        with weights in MXFP4."""
        from xstage.moe import grouped_gemm

        e, w = self.exchange, self.weights
        if e.order is None:
            self.linear1()
            self.linear2(row_slot)
            return
        if not self._compiled:  # all forms now, for a graph may be captured of another
            for compiled, options in grouped_gemm.kernels(e.layout.hidden, w.intermediate, self.clamp, e.layout, codes=True):
                compiled(*options)
            self._compiled = True
        grouped_gemm.both(
            e.activations, e.scales, w.w1, w.w1_scales, w.w2, w.w2_scales, e.work, e.totals, e.row_weight, self.middle,
            self.middle_scales, row_slot, (e.ready, e.control, e.call, e.arrived, e.sends), self.clamp, e.layout, self.spans,
            form,
        )  # fmt: skip

    def linear1(self) -> None:
        """Linear-1, SwiGLU, routing weight and quantisation of the rows that the last dispatch brought."""
        from xstage.moe import grouped_gemm

        e, w = self.exchange, self.weights
        grouped_gemm.swiglu(
            e.activations, e.scales, w.w1, w.w1_scales, e.tile_expert, e.work1, e.totals, e.row_weight, self.middle, self.middle_scales,
            self.clamp,
        )  # fmt: skip

    def linear2(self, row_slot: torch.Tensor) -> None:
        """Linear-2; row r goes to the address `row_slot[r]`."""
        from xstage.moe import grouped_gemm

        e, w = self.exchange, self.weights
        grouped_gemm.rows(self.middle, self.middle_scales, w.w2, w.w2_scales, e.tile_expert, e.work2, e.totals, row_slot)

    def check(self) -> None:
        """Wait for what was launched and raise if a kernel gave up on a peer.

        Raises:
            PeerTimeout: naming rank, phase and tag.
        """
        self.exchange.check()

    def free(self) -> None:
        """Drop the memory. No peer may store into it any more."""
        self.exchange.free()
        self.middle = self.middle_scales = torch.empty(0)


class TorchPipeline:
    """Plain torch with an NCCL (or gloo) group.

    Args:
        layout: sizes; only ranks, experts and top_k matter here.
        refused: called where a rank said that it refuses its arguments, with its rank in the group; must raise.
    """

    def __init__(self, layout: BufferLayout, *, clamp: float | None, group: dist.ProcessGroup, refused: Callable[[int], None]):
        self.layout, self.clamp, self.group, self._refused = layout, clamp, group, refused

    def refuse(self, device: torch.device) -> None:
        """Take part in a call only to say that this rank's arguments are bad."""
        self._counts(torch.zeros(self.layout.experts, dtype=torch.int32, device=device), refused=True)

    def run(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, linear1: Linear, linear2: Linear, out: torch.Tensor
    ) -> torch.Tensor:
        """The layer of bfloat16 x [tokens, hidden] into `out`; returns int32 [my experts], rows per expert.

        linear1, linear2: e4m3 with scales, which are then applied expert by expert in every call, or bfloat16.

        Raises:
            XStageError: a rank refused its arguments.
        """
        layout, hidden = self.layout, x.shape[1]
        counts = routing.count(topk_idx, layout.experts)
        received, (sent, arriving, loads) = self._counts(counts)
        expert = topk_idx.flatten().long()
        expert = torch.where((expert >= 0) & (expert < layout.experts), expert, layout.experts)
        pair = torch.sort(expert, stable=True).indices[: sum(sent)]  # by expert, so by rank; masked picks are last and stay here
        rows = self._exchange(x[pair // layout.top_k], arriving, sent)
        weights = self._exchange(topk_weights.flatten()[pair].float(), arriving, sent)

        # Rows lie by source rank, then expert; experts want their own together.
        ids = torch.arange(layout.experts_per_rank, device=x.device).repeat(layout.ranks).repeat_interleave(received.flatten().long())
        order = torch.sort(ids, stable=True).indices
        rows, weights = rows[order], weights[order]
        results, start = torch.empty(len(order), hidden, dtype=x.dtype, device=x.device), 0
        for index, load in enumerate(loads):
            if load:
                mine = slice(start, start + load)
                wide = rows[mine] @ linear1.dense(index, x.dtype).T
                middle = swiglu(wide.float(), self.clamp) * weights[mine, None]
                results[mine] = middle.to(x.dtype) @ linear2.dense(index, x.dtype).T
                start += load
        back = self._exchange(torch.empty_like(results).index_copy_(0, order, results), sent, arriving)
        slots = x.new_zeros(topk_idx.numel(), hidden).index_copy_(0, pair, back)
        out.copy_(slots.view(len(x), layout.top_k, hidden).sum(1, dtype=torch.float32))
        return received.sum(0, dtype=torch.int32)

    def _counts(self, counts: torch.Tensor, refused: bool = False) -> tuple[torch.Tensor, tuple[list[int], list[int], list[int]]]:
        """Tell every rank how many rows come, and whether this rank refuses; waits for the device.

        Returns:
            int32 [ranks, my experts], and as lists: rows to each rank, rows from each rank, rows per expert of mine.
        """
        ranks = self.layout.ranks
        words = torch.nn.functional.pad(counts.view(ranks, -1), (0, 1), value=int(refused)).contiguous()
        received = torch.empty_like(words)
        dist.all_to_all_single(received, words, group=self.group)
        # One copy to the host, so one wait.
        sums = (words[:, :-1].sum(1), received[:, :-1].sum(1), received[:, -1].long(), received[:, :-1].sum(0))
        numbers = torch.cat(sums).tolist()
        sent, arriving, flags, loads = numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks : 3 * ranks], numbers[3 * ranks :]
        for rank, flag in enumerate(flags):
            if flag and not refused:
                self._refused(rank)
        return received[:, :-1], (sent, arriving, loads)

    def _exchange(self, x: torch.Tensor, arriving: list[int], sent: list[int]) -> torch.Tensor:
        out = torch.empty(sum(arriving), *x.shape[1:], dtype=x.dtype, device=x.device)
        dist.all_to_all_single(out, x.contiguous(), arriving, sent, group=self.group)
        return out
