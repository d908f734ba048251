"""A mixture-of-experts layer over the ranks of a group: rows to their experts, two GEMMs in fp8 with SwiGLU between, and back.

    with xstage.MegaMoE(group, num_experts=256, hidden=4096, intermediate=2048, top_k=8, max_tokens_per_rank=8192) as moe:
        moe.load_weights(w1, w2)                    # of this rank's experts
        y = moe(x, topk_idx, topk_weights)          # [tokens, hidden] in bfloat16

What it runs on: `fused`, or `serial` if the schedule says so (Hopper GPUs that reach each other's memory: `pipeline.KernelPipeline`),
`torch` (other GPUs: `pipeline.TorchPipeline`), `reference` (CPU tensors, gloo). All ranks decide together, once,
when the object is made; `torch` on GPUs is said once as a warning, or refused with `fallback="error"`.

Tokens may differ between ranks and from call to call, and be none; a rank without tokens must call too, because its experts may have work.
Calls of one object must be ordered on each rank (one stream, or streams ordered by events) and come in the same order on every rank.

A model has many such layers, one after the other. One object serves all of one size: `layers=48`, then `moe.load_weights(…, layer=3)` and
`moe(…, layer=3)`. They have weights of their own and take turns with the buffers, which are the larger the more tokens there may be.

Who refuses what: what must be the same is compared when the object is made. Bad arguments of a call are refused by all ranks together
where they talk on the host anyway: in the first call, and in every call of `torch` and `reference`. In a later call on Hopper nobody
waits for the host: the rank raises by itself before it launches anything, and leaves the reason in the group's store; a peer whose
kernel has waited in vain reads it there, and its `PeerTimeout` says it. The refused call has not taken place: with good arguments the next
one meets the call in which the peers are, if they have not given up. That all mean the same layer is compared by the kernels too, which
else store nothing and give up, and in every call of `reference`; never in `torch`: there ranks that mean different ones mix them.

CUDA graphs: call once with the same dtypes before capture; keep the object alive as long as the graph. Forward only.

Not covered: shared experts, gradients, more than one host.
"""

from __future__ import annotations

import itertools
import math
import socket
import warnings
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from xstage.errors import PeerTimeout, UnsuitableMachine, XStageError
from xstage.moe import arguments, quantize, reference, routing
from xstage.moe.auto_order import auto_order
from xstage.moe.layout import BufferLayout
from xstage.moe.pipeline import KernelPipeline, TorchPipeline
from xstage.moe.shapes import MoEShape
from xstage.moe.weights import Weights
from xstage.moe.weights_mxfp4 import Mxfp4Weights
from xstage.moe.work_table import TILE_COLUMNS, WorkOrder
from xstage.symmetric import Agreement, Refusals, default_device, first_reason, joined, next_number, ranks_of

MODES = ("fused", "serial", "torch", "reference")
_WEIGHTS: dict[str, type[Weights] | type[Mxfp4Weights]] = {"fp8": Weights, "mxfp4": Mxfp4Weights}
_OBJECTS: weakref.WeakValueDictionary[int, MegaMoE] = weakref.WeakValueDictionary()
_ids = itertools.count(1)


@dataclass(frozen=True)
class MoEBytes:
    """Bytes of a layer on one rank.

    Attributes:
        symmetric: memory that peers store into (for `reference`: allocated anew in every call). local: work lists and the rows between
            the GEMMs. weights: weights with their scales. Not counted: outputs, and in mode `torch` what a call allocates.
    """

    symmetric: int
    local: int
    weights: int

    @property
    def total(self) -> int:
        return self.symmetric + self.local + self.weights


class MegaMoE:
    """Owns the weights and buffers of one layer on one rank, or of several layers that take turns with the buffers.

    Args:
        group: process group (None: the default one). Expert e lives on its rank e // (num_experts / ranks).
        num_experts: over all ranks. hidden, intermediate: columns, multiples of 128; the kernels need multiples of 512 and 256.
        top_k: picks per token. max_tokens_per_rank: most tokens of a rank in one call; the buffers hold the worst routing of them.
        schedule: `serial`: two GEMMs, one after the other. `interleaved`, `alternating`, `expert_wave`, `linear1_first`: both in one
            persistent kernel, in that order of tiles (`xstage.moe.work_table`); all give the same bits. `auto`: `xstage.moe.auto_order`.
        lead_rows: D of `interleaved` and `alternating`: by how many rows of 128 tokens Linear-1 leads (None: see `WorkOrder.of`).
        clamp: bounds the gate above and up on both sides before SwiGLU (None: not).
        weight_format: how weights rest: `fp8`, e4m3 with a scale per 128 × 128; or `mxfp4`, e2m1 with a power of two per 32 of a row
            (`xstage.moe.mxfp4`), which the kernels decode on the way to the matrix unit (`xstage.moe.decode_sm90`).
        layers: how many layers of these sizes there are, each with weights of its own.
        rows_once: in one persistent kernel, a row goes to a rank once, however many of its experts were picked (`xstage.moe.once_sm90`);
            else once per pick. The same bits; takes an inbox of ranks · max_tokens_per_rank rows.
        dtype: of x and of the output: bfloat16.
        device: None: the current GPU if the group has NCCL, else the CPU.
        timeout_s: bound of every wait on a peer, in kernels and on the host.
        fallback: `serial`: where the kernels cannot run, warn once and run plain torch, step by step; `error`: refuse.

    Attributes:
        mode: `fused`, `serial`, `torch` or `reference`. reason: why `torch`. layout: the `BufferLayout`.
        experts: slice of this rank's experts.

    All ranks make it together, outside graph capture. Memory is as `plan_bytes` says.

    Raises:
        XStageError: bad arguments, or arguments that differ between ranks; on every rank.
        UnsuitableMachine: with `fallback="error"`, naming the first rank that cannot run the kernels, and why.
        PeerTimeout: a rank did not make its object.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, num_experts: int, hidden: int, intermediate: int, top_k: int,
        max_tokens_per_rank: int, schedule: str = "auto", lead_rows: int | None = None, clamp: float | None = None,
        weight_format: str = "fp8", layers: int = 1, rows_once: bool = False, dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None, timeout_s: float = 30.0, fallback: str = "serial",
    ):  # fmt: skip
        group = joined(group)
        if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
            raise XStageError(f"timeout_s: {timeout_s} must be positive and finite")
        self.group, self.rank, self.world = group, group.rank(), group.size()
        self.device, self.timeout_s = default_device(device, group), timeout_s
        self.tag = f"mega-moe/{group.group_name}/{next_number(group, 'mega-moe')}"
        self._agreement = Agreement(group, self.tag, timeout_s)
        self._refusals = Refusals(group, self.tag)
        error = None
        try:
            self.layout = arguments.layout(self.world, num_experts, hidden, intermediate, top_k, max_tokens_per_rank)
            arguments.check_options(schedule, lead_rows, clamp, dtype, fallback, weight_format)
            arguments.check_layers(layers)
            arguments.check_rows_once(rows_once)
        except XStageError as raised:
            error = raised
        self._together("MegaMoE", error)
        self._agreement.same(
            "MegaMoE", {"num_experts": num_experts, "hidden": hidden, "intermediate": intermediate, "top_k": top_k,
                        "max_tokens_per_rank": max_tokens_per_rank, "schedule": schedule, "lead_rows": lead_rows,
                        "clamp": clamp, "weight_format": weight_format, "layers": layers, "rows_once": rows_once, "dtype": str(dtype),
                        "device": self.device.type, "fallback": fallback},
        )  # fmt: skip
        self.intermediate, self.clamp, self.weight_format = intermediate, clamp, weight_format
        self.lead_rows, self.layers, self.rows_once = lead_rows, layers, rows_once
        model = MoEShape("layer", hidden, intermediate, num_experts, top_k)
        self.schedule = auto_order(model, max_tokens_per_rank, self.world) if schedule == "auto" else schedule
        here = self.layout.experts_per_rank
        self.experts = slice(self.rank * here, (self.rank + 1) * here)
        self.reason, self._closed, self._met = "", False, False
        self._warm: set[tuple[torch.dtype, ...]] = set()  # dtypes whose kernels are compiled
        try:
            self._weights = [_WEIGHTS[weight_format](here, hidden, intermediate, self.device) for _ in range(layers)]
        except torch.OutOfMemoryError as raised:
            size = layers * _WEIGHTS[weight_format].size_bytes(here, hidden, intermediate)
            error = XStageError(f"layers: weights of {layers} take {size:,} bytes, and there is no memory for them on {self.device}")
            error.__cause__ = raised
        self._together("MegaMoE", error)
        self._kernels: KernelPipeline | None = None
        self.mode = self._choose_mode(fallback)
        self._torch = TorchPipeline(self.layout, clamp=clamp, group=group, refused=self._refusals.raise_for)
        self._handle = next(_ids)
        _OBJECTS[self._handle] = self

    @staticmethod
    def plan_bytes(
        *, ranks: int, num_experts: int, hidden: int, intermediate: int, top_k: int, max_tokens_per_rank: int, mode: str = "fused",
        weight_format: str = "fp8", layers: int = 1, rows_once: bool = False,
    ) -> MoEBytes:  # fmt: skip
        """What an object of these arguments holds on each rank, before anything is allocated.

        Raises:
            XStageError: arguments that the layer would refuse.
        """
        for name, value, known in (("mode", mode, MODES), ("weight_format", weight_format, arguments.WEIGHT_FORMATS)):
            if value not in known:
                raise XStageError(f"{name}: {value!r} is not one of {', '.join(known)}")
        layout = arguments.layout(ranks, num_experts, hidden, intermediate, top_k, max_tokens_per_rank)
        arguments.check_layers(layers)
        arguments.check_rows_once(rows_once)
        weights = layers * _WEIGHTS[weight_format].size_bytes(layout.experts_per_rank, hidden, intermediate)
        symmetric = 0 if mode == "torch" else replace(layout, direct=mode == "fused", once=rows_once and mode == "fused").size_bytes
        local = KernelPipeline.local_bytes(layout, intermediate, mode == "fused") if mode in ("fused", "serial") else 0
        return MoEBytes(symmetric, local, weights)

    @property
    def size_bytes(self) -> MoEBytes:
        """What this object holds on this rank; nothing once it is closed."""
        if self._closed:
            return MoEBytes(0, 0, 0)
        shape = self.layout
        return self.plan_bytes(
            ranks=self.world, num_experts=shape.experts, hidden=shape.hidden, intermediate=self.intermediate, top_k=shape.top_k,
            max_tokens_per_rank=shape.max_tokens_per_rank, mode=self.mode, weight_format=self.weight_format, layers=self.layers,
            rows_once=self.rows_once,
        )  # fmt: skip

    def load_weights(
        self, w1: torch.Tensor, w2: torch.Tensor, *, w1_scales: torch.Tensor | None = None, w2_scales: torch.Tensor | None = None,
        layer: int = 0,
    ) -> None:  # fmt: skip
        """Take the weights of this rank's experts; they are copied, expert by expert. All ranks call it together.

        Args:
            w1: [my experts, 2 · intermediate, hidden], gate rows before up rows. w2: [my experts, hidden, intermediate]. In bfloat16,
                float16 or float32, on any device: quantised here, once. Or in e4m3 with scales.
            w1_scales: float32 [my experts, 2 · intermediate / 128, hidden / 128], one per 128 × 128 block of an e4m3 `w1`.
            w2_scales: likewise [my experts, hidden / 128, intermediate / 128].
            layer: whose weights they are.

        With `weight_format="mxfp4"` not e4m3 but uint8 [my experts, out, in / 2], two codes a byte, the one of the lower column in the
        lower bits; and scales uint8 or float8_e8m0fnu [my experts, out, in / 32] (`xstage.moe.mxfp4`). NaN and infinities are refused.

        What comes with scales is taken bit for bit. All are kept in the kernel's order.

        Raises:
            XStageError: weights that do not fit, on every rank.
            PeerTimeout: a rank did not call.
        """
        error = None
        try:
            if self._closed:
                raise XStageError("load_weights: this object was closed")
            arguments.check_layer(layer, self.layers)
            self._weights[layer].check(w1, w2, w1_scales, w2_scales)
        except XStageError as raised:
            error = raised
        self._together("load_weights", error, layer)
        self._weights[layer].load(w1, w2, w1_scales, w2_scales)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a call on another stream must not read half of them

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, *, x_scales: torch.Tensor | None = None,
        return_counts: bool = False, layer: int = 0,
    ) -> Any:  # fmt: skip
        """The layer: y[t] = Σ over picks k of topk_weights[t, k] · expert topk_idx[t, k] of x[t].

        Args:
            x: bfloat16 [tokens, hidden]; or e4m3 with `x_scales`, float32 [tokens, hidden / 128]. At most max_tokens_per_rank tokens.
            topk_idx: int32 or int64 [tokens, top_k]. −1 masks a pick; on GPUs so does every other number outside the experts, which
                CPUs refuse.
            topk_weights: float32, bfloat16 or float16 [tokens, top_k].
            return_counts: also return how many rows each of this rank's experts got.
            layer: whose weights are meant, the same on every rank; see the module for when that is compared.

        Returns:
            bfloat16 [tokens, hidden], a tensor of its own; with `return_counts` also int32 [my experts].

        Raises:
            XStageError: an argument does not fit, here or on a peer (see the module).
            PeerTimeout: a peer did not come, to this call's agreement or to an earlier call's kernel.
        """
        if torch.compiler.is_compiling():
            out, counts = torch.ops.xstage.mega_moe(x, x_scales, topk_idx, topk_weights, self._handle, return_counts, layer)
        else:
            out, counts = self._run(x, x_scales, topk_idx, topk_weights, return_counts, layer)
        return (out, counts) if return_counts else out

    def check(self) -> None:
        """Wait for what was launched and raise if a kernel gave up on a peer.

        Raises:
            PeerTimeout: naming rank, phase and tag, and the reason if a peer refused its arguments.
        """
        if self._kernels is not None:
            try:
                self._kernels.check()
            except PeerTimeout as error:
                raise self._explained(error) from error
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for this rank's kernels and free weights and buffers. Every rank should close, after its last call is complete."""
        if self._closed:
            return
        self._closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._kernels is not None:
            self._kernels.free()
        self._kernels = None
        del self._weights

    def __enter__(self) -> MegaMoE:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- choosing how to run

    def _choose_mode(self, fallback: str) -> str:
        if self.device.type == "cpu":
            return "reference"
        host = socket.gethostname()
        hosts = sorted(set(self._agreement.reach("host", host)))
        why = _why_not_kernels(self.device, self.layout, self.intermediate)
        if not why and len(hosts) > 1:
            why = f"ranks are on different hosts ({', '.join(hosts)})"
        reasons = self._agreement.reach("ability", why)
        if not any(reasons):
            # Making it is a meeting of all ranks, so a rank that knows that it cannot must have said so before.
            try:
                self._kernels = KernelPipeline(
                    self.layout, self._weights[0], clamp=self.clamp, group=self.group, device=self.device, timeout_s=self.timeout_s,
                    tag=self.tag, order=self._order(), layers=self.layers, once=self.rows_once,
                )  # fmt: skip
            except (UnsuitableMachine, torch.OutOfMemoryError) as error:
                why = str(error).split("\n", 1)[0]
            reasons = self._agreement.reach("allocation", why)
        self.reason = first_reason(self.group, reasons)
        if not self.reason:
            return "serial" if self.schedule == "serial" else "fused"
        if self._kernels is not None:
            self._kernels.free()
            self._kernels = None
        if fallback == "error":
            raise UnsuitableMachine(f"MegaMoE cannot run its kernels ({self.reason})")
        warnings.warn(f"MegaMoE runs as plain torch with NCCL, which is far slower: {self.reason}", RuntimeWarning, stacklevel=4)
        return "torch"

    def _order(self) -> WorkOrder | None:
        if self.schedule == "serial":
            return None
        clusters = torch.cuda.get_device_properties(self.device).multi_processor_count // 2
        columns = (2 * self.intermediate // TILE_COLUMNS, self.layout.hidden // TILE_COLUMNS)
        return WorkOrder.of(self.schedule, *columns, lead_rows=self.lead_rows, instances=clusters)

    # ---- one call

    def _run(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor, return_counts: bool,
        layer: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if self._closed:
            raise XStageError("moe: this object was closed")
        dtypes = (x.dtype, topk_idx.dtype, topk_weights.dtype)
        error = None
        try:
            self._validate(x, x_scales, topk_idx, topk_weights, dtypes, layer)
        except XStageError as raised:
            error = raised
        self._refuse(error, layer)
        x, topk_idx, topk_weights = x.detach(), topk_idx.contiguous(), topk_weights.detach().contiguous()
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=self.device)
        with torch.no_grad():
            if self.mode == "reference":
                counts = self._reference(x, x_scales, topk_idx, topk_weights, out, layer)
            else:
                with torch.cuda.device(self.device):
                    counts = self._on_gpu(x, x_scales, topk_idx, topk_weights, out, layer)
        # Not before: in plain torch a peer reads why the call before was refused, and comes to this one afterwards.
        self._refusals.withdraw()
        self._warm.add(dtypes)
        return out, counts.clone() if return_counts else counts.new_empty(0)

    def _on_gpu(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:  # fmt: skip
        weights = self._weights[layer]
        if self._kernels is None:
            if x_scales is not None:
                x = quantize.dequantize_activations(x, x_scales).bfloat16()
            return self._torch.run(x, topk_idx, topk_weights, weights.linear1, weights.linear2, out)
        scales = None if x_scales is None else _aligned(x_scales)
        self._kernels.choose(layer, weights)
        try:
            self._kernels.run(_aligned(x), scales, topk_idx, topk_weights.float(), out)
        except PeerTimeout as error:
            raise self._explained(error) from error
        counts: torch.Tensor = self._kernels.exchange.expert_counts
        return counts

    def _reference(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:  # fmt: skip
        counts = routing.count(topk_idx, self.layout.experts)
        dist.all_reduce(counts, group=self.group)
        result = reference.moe(
            x, topk_idx, topk_weights, self._weights[layer].linear1, self._weights[layer].linear2, clamp=self.clamp,
            layout=self.layout, group=self.group, x_scales=x_scales,
        )  # fmt: skip
        out.copy_(result)
        return counts[self.experts]

    def _validate(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor,
        dtypes: tuple[torch.dtype, ...], layer: int,
    ) -> None:  # fmt: skip
        arguments.check_layer(layer, self.layers)
        if not self._weights[layer].loaded:
            raise XStageError(f"moe: layer {layer} has no weights; call load_weights first")
        arguments.check_call(x, x_scales, topk_idx, topk_weights, self.layout, self.device)
        if self.mode == "reference":
            routing.check(topk_idx, self.layout.experts)
        elif torch.cuda.is_current_stream_capturing():
            if self.mode == "torch":
                raise XStageError(f"moe: plain torch waits for the host and cannot be captured in a CUDA graph ({self.reason})")
            if dtypes not in self._warm:
                raise XStageError(
                    f"moe: call it once with {x.dtype}, {topk_idx.dtype} and {topk_weights.dtype} before capturing a CUDA graph"
                )

    def _refuse(self, error: XStageError | None, layer: int) -> None:
        """Raise if this rank, or as far as the host may know it any rank, has bad arguments."""
        if self.mode == "reference" or (self._kernels is not None and not self._met):
            self._together("moe", error, layer)
            self._met = True
        elif error is not None:
            self._refusals.post(str(error))
            if self.mode == "torch" and not torch.cuda.is_current_stream_capturing():
                self._torch.refuse(self.device)
            raise error

    def _together(self, what: str, error: XStageError | None, layer: int = 0) -> None:
        """Raise on every rank if one has an error, or if they mean different layers."""
        said = self._agreement.reach("arguments", ["" if error is None else str(error), layer if error is None else 0])
        if error is not None:
            raise error
        for rank, (reason, _) in enumerate(said):
            if reason:
                raise XStageError(f"{what}: rank {ranks_of(self.group)[rank]} refused its arguments: {reason}")
        for rank, (_, theirs) in enumerate(said):
            if theirs != layer:
                where = f"rank {ranks_of(self.group)[rank]}"
                raise XStageError(f"{what}: layer: {layer} on this rank, {theirs} on {where}; all ranks must mean the same")

    def _explained(self, error: PeerTimeout) -> PeerTimeout:
        """With the reasons of the peers that refused their arguments."""
        return PeerTimeout("; ".join([str(error), *self._refusals.read()]))


@torch.library.custom_op("xstage::mega_moe", mutates_args=())
def _mega_moe(
    x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: int, return_counts: bool,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _OBJECTS[handle]._run(x, x_scales, topk_idx, topk_weights, return_counts, layer)


@_mega_moe.register_fake
def _(
    x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: int, return_counts: bool,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    counts = _OBJECTS[handle].layout.experts_per_rank if return_counts else 0
    return x.new_empty(x.shape, dtype=torch.bfloat16), topk_idx.new_empty(counts, dtype=torch.int32)


def _why_not_kernels(device: torch.device, layout: BufferLayout, intermediate: int) -> str:
    """Empty if this rank can run the kernels, else the reason."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU (sm_90)"
    try:
        from xstage.moe import exchange, exchange_sm90, grouped_gemm  # noqa: F401

        exchange.check_layout(layout, intermediate)
    except ImportError as error:
        return f"the kernel packages are not installed ({error})"
    except XStageError as error:
        return str(error)
    return ""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` with dense rows that 16-byte accesses can read."""
    return x.clone(memory_format=torch.contiguous_format) if not x.is_contiguous() or x.data_ptr() % 16 else x
