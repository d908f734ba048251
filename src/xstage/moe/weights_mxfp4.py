"""Weights of the experts of one rank in MXFP4, resting in the order in which a kernel of the grouped GEMMs is to read them; none does yet.

* Rows lie as in `xstage.moe.weights`: gate and up mixed, Linear-2's in thread order; the scales of their blocks with them.
* The codes of eight columns lie as `mxfp4.to_words` puts them. Nothing is rounded on the way: what was given comes back bit for bit.
* Beside them the power of two of every 128 × 128 (`mxfp4.tile_scales`), in the place and form of the scales of fp8 weights.

Weights come in high precision and are rounded once, or as packed codes with scales, as public checkpoints hold them. Either way one expert
after another.

Not covered: other blocks than 32 along the input, biases.
"""

from __future__ import annotations

import torch

from xstage.errors import XStageError
from xstage.moe import mxfp4, quantize
from xstage.moe.quantize import BLOCK
from xstage.moe.reference import Mxfp4Linear
from xstage.moe.weights import SOURCES


class Mxfp4Weights:
    """Memory for the weights of `experts` experts, filled by `load`: 0.531 of what `Weights` take.

    Attributes:
        w1: uint8 [experts, 2 · intermediate, hidden / 2], two codes a byte, gate and up mixed.
        w1_blocks: uint8 (e8m0) [experts, 2 · intermediate, hidden / 32], rows as in `w1`.
        w1_scales: float32 [experts, hidden / 128, intermediate / 128, 2]: of 128 gate rows, of 128 up rows.
        w2: uint8 [experts, hidden, intermediate / 2], rows in `quantize.thread_order`.
        w2_blocks: uint8 (e8m0) [experts, hidden, intermediate / 32], rows as in `w2`.
        w2_scales: float32 [experts, intermediate / 128, hidden / 128].
        loaded: `load` was called. Loading again writes the same memory.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int, device: torch.device):
        self.experts, self.hidden, self.intermediate, self.device = experts, hidden, intermediate, device

        def of_bytes(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(experts, rows, columns, dtype=torch.uint8, device=device)

        self.w1, self.w1_blocks = of_bytes(2 * intermediate, hidden // 2), of_bytes(2 * intermediate, hidden // mxfp4.BLOCK)
        self.w2, self.w2_blocks = of_bytes(hidden, intermediate // 2), of_bytes(hidden, intermediate // mxfp4.BLOCK)
        self.w1_scales = torch.empty(experts, hidden // BLOCK, intermediate // BLOCK, 2, device=device)
        self.w2_scales = torch.empty(experts, intermediate // BLOCK, hidden // BLOCK, device=device)
        self.loaded = False

    @staticmethod
    def size_bytes(experts: int, hidden: int, intermediate: int) -> int:
        """Bytes of all six tensors."""
        elements = experts * 3 * hidden * intermediate
        return elements // 2 + elements // mxfp4.BLOCK + elements // BLOCK**2 * 4

    def check(self, w1: torch.Tensor, w2: torch.Tensor, w1_scales: torch.Tensor | None, w2_scales: torch.Tensor | None) -> None:
        """Refuse what `load` cannot take. Reads all weights once, because a rank that finds a NaN later would leave its peers alone.

        Raises:
            XStageError: a dtype or shape; scales that are missing, superfluous or NaN; an element that is not finite.
        """
        shapes = ((2 * self.intermediate, self.hidden), (self.hidden, self.intermediate))
        for name, w, scales, (rows, columns) in (("w1", w1, w1_scales, shapes[0]), ("w2", w2, w2_scales, shapes[1])):
            if w.dtype not in (*SOURCES, torch.uint8):
                raise XStageError(f"{name}: {w.dtype} must be bfloat16, float16, float32, or uint8 (two codes a byte) with scales")
            packed = w.dtype == torch.uint8
            wanted = (self.experts, rows, columns // 2 if packed else columns)
            if w.shape != wanted:
                raise XStageError(f"{name}: shape {tuple(w.shape)} must be {wanted} in {w.dtype}, the experts of this rank")
            if (scales is None) == packed:
                raise XStageError(f"{name}_scales: {'missing' if packed else 'given'} with {name} in {w.dtype}; packed codes have them")
            if scales is None:
                for expert in range(self.experts):
                    mxfp4.check_finite(f"{name}[{expert}]", w[expert])
                continue
            wanted = (self.experts, rows, columns // mxfp4.BLOCK)
            if scales.shape != wanted or scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
                raise XStageError(f"{name}_scales: {scales.dtype} {tuple(scales.shape)} must be uint8 or float8_e8m0fnu {wanted}")
            bad = (scales.view(torch.uint8) == mxfp4.NAN_SCALE).nonzero()
            if len(bad):
                raise XStageError(f"{name}_scales: {mxfp4.NAN_SCALE} (NaN) at {bad[0].tolist()}; scales must lie in 0 … 254")

    def load(
        self, w1: torch.Tensor, w2: torch.Tensor, w1_scales: torch.Tensor | None = None, w2_scales: torch.Tensor | None = None
    ) -> None:
        """Quantise and store; see `MegaMoE.load_weights`. The arguments have passed `check`."""
        with torch.no_grad():
            for expert in range(self.experts):
                packed, blocks = _packed(w1, w1_scales, expert, self.device)
                self.w1[expert].copy_(quantize.interleave_gate_up(mxfp4.to_words(packed)))
                self.w1_blocks[expert].copy_(quantize.interleave_gate_up(blocks))
                self.w1_scales[expert].copy_(mxfp4.tile_scales(packed, blocks).unflatten(0, (2, -1)).permute(2, 1, 0))
                packed, blocks = _packed(w2, w2_scales, expert, self.device)
                self.w2[expert].copy_(quantize.thread_order(mxfp4.to_words(packed)))
                self.w2_blocks[expert].copy_(quantize.thread_order(blocks))
                self.w2_scales[expert].copy_(mxfp4.tile_scales(packed, blocks).mT)
        self.loaded = True

    @property
    def linear1(self) -> Mxfp4Linear:
        """Linear-1 for `xstage.moe.reference`: the same weights, and scales as they are now."""
        return Mxfp4Linear(self.w1, self.w1_blocks, quantize.separate_gate_up)

    @property
    def linear2(self) -> Mxfp4Linear:
        """Linear-2 likewise."""
        return Mxfp4Linear(self.w2, self.w2_blocks, quantize.from_thread_order)


def _packed(w: torch.Tensor, scales: torch.Tensor | None, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if scales is None:
        return mxfp4.quantize(w[expert].to(device))
    return w[expert].to(device), scales[expert].view(torch.uint8).to(device)
