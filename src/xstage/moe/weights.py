"""Weights of the experts of one rank, in fp8 and in the order in which the grouped GEMMs read them.

* Gate and up rows of Linear-1 are mixed after they are quantised (`quantize.interleave_gate_up`): each keeps its own scale per 128 rows.
* Rows of Linear-2 are put in the order in which a thread has contiguous results (`quantize.thread_order`).
* Both lie in pieces of 128 × 128 (`quantize.tiled`): what one copy brings to a stage are 16 KiB in a row, not 128 lines of a matrix.
* Scales of 128 × 128 blocks lie with K before N: a tile of columns walks K, and finds its next scale one step away.

Weights come in high precision and are rounded once, or as e4m3 with scales and are then taken bit for bit. Either way one expert after
another, so that beside the result there is never more than one expert in high precision on the device; the source may lie anywhere.

Not covered: shared experts. 4-bit weights: `xstage.moe.weights_mxfp4`.
"""

from __future__ import annotations

import torch

from xstage.errors import XStageError
from xstage.moe import quantize
from xstage.moe.quantize import BLOCK
from xstage.moe.reference import Linear

SOURCES = (torch.bfloat16, torch.float16, torch.float32)


class Weights:
    """Memory for the weights of `experts` experts, filled by `load`.

    Attributes:
        w1: uint8 (e4m3) [experts, 2 · intermediate / 128, hidden / 128, 128, 128], gate and up mixed.
        w1_scales: float32 [experts, hidden / 128, intermediate / 128, 2]: of 128 gate rows, of 128 up rows.
        w2: uint8 (e4m3) [experts, hidden / 128, intermediate / 128, 128, 128], rows in `quantize.thread_order`.
        w2_scales: float32 [experts, intermediate / 128, hidden / 128].
        loaded: `load` was called. Loading again writes the same memory, so a CUDA graph sees the new weights.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int, device: torch.device):
        self.experts, self.hidden, self.intermediate, self.device = experts, hidden, intermediate, device
        wide, narrow = hidden // BLOCK, intermediate // BLOCK
        self.w1 = torch.empty(experts, 2 * narrow, wide, BLOCK, BLOCK, dtype=torch.uint8, device=device)
        self.w2 = torch.empty(experts, wide, narrow, BLOCK, BLOCK, dtype=torch.uint8, device=device)
        self.w1_scales = torch.empty(experts, hidden // BLOCK, intermediate // BLOCK, 2, device=device)
        self.w2_scales = torch.empty(experts, intermediate // BLOCK, hidden // BLOCK, device=device)
        self.loaded = False

    @staticmethod
    def size_bytes(experts: int, hidden: int, intermediate: int) -> int:
        """Bytes of all four tensors."""
        elements = experts * 3 * hidden * intermediate
        return elements + elements // BLOCK**2 * 4

    def check(self, w1: torch.Tensor, w2: torch.Tensor, w1_scales: torch.Tensor | None, w2_scales: torch.Tensor | None) -> None:
        """Refuse what `load` cannot take.

        Raises:
            XStageError: a dtype or shape, or scales that are missing, superfluous, negative or not finite.
        """
        shapes = ((2 * self.intermediate, self.hidden), (self.hidden, self.intermediate))
        for name, w, scales, shape in (("w1", w1, w1_scales, shapes[0]), ("w2", w2, w2_scales, shapes[1])):
            if w.shape != (self.experts, *shape):
                raise XStageError(f"{name}: shape {tuple(w.shape)} must be {(self.experts, *shape)}, the experts of this rank")
            if w.dtype not in (*SOURCES, torch.float8_e4m3fn):
                raise XStageError(f"{name}: {w.dtype} must be bfloat16, float16, float32, or float8_e4m3fn with scales")
            if (scales is None) == (w.dtype == torch.float8_e4m3fn):
                raise XStageError(f"{name}_scales: {'missing' if scales is None else 'given'} with {name} in {w.dtype}; e4m3 has them")
            if scales is None:
                continue
            wanted = (self.experts, shape[0] // BLOCK, shape[1] // BLOCK)
            if scales.shape != wanted or scales.dtype != torch.float32:
                raise XStageError(f"{name}_scales: {scales.dtype} {tuple(scales.shape)} must be float32 {wanted}")
            if not bool(((scales >= 0) & scales.isfinite()).all()):
                raise XStageError(f"{name}_scales: a scale is negative or not finite; all must lie in 0 … 3.4e38")

    def load(
        self, w1: torch.Tensor, w2: torch.Tensor, w1_scales: torch.Tensor | None = None, w2_scales: torch.Tensor | None = None
    ) -> None:
        """Quantise and store; see `MegaMoE.load_weights`. The arguments have passed `check`."""
        with torch.no_grad():
            for expert in range(self.experts):
                q, scales = _quantised(w1, w1_scales, expert, self.device)
                self.w1[expert].copy_(quantize.tiled(quantize.interleave_gate_up(q.view(torch.uint8))))
                self.w1_scales[expert].copy_(scales.unflatten(0, (2, -1)).permute(2, 1, 0))
                q, scales = _quantised(w2, w2_scales, expert, self.device)
                self.w2[expert].copy_(quantize.tiled(quantize.thread_order(q.view(torch.uint8))))
                self.w2_scales[expert].copy_(scales.mT)
        self.loaded = True

    @property
    def linear1(self) -> Linear:
        """Linear-1 for `xstage.moe.reference`: the same weights, and scales as they are now."""
        scales = self.w1_scales.permute(0, 3, 2, 1).flatten(1, 2)
        return Linear(self.w1.view(torch.float8_e4m3fn), scales, lambda w: quantize.separate_gate_up(quantize.untiled(w)))

    @property
    def linear2(self) -> Linear:
        """Linear-2 likewise."""
        return Linear(self.w2.view(torch.float8_e4m3fn), self.w2_scales.mT, lambda w: quantize.from_thread_order(quantize.untiled(w)))


def _quantised(w: torch.Tensor, scales: torch.Tensor | None, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if scales is None:
        return quantize.quantize_weights(w[expert].to(device))
    return w[expert].to(device), scales[expert].to(device)
