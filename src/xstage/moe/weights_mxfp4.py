"""Weights of the experts of one rank in MXFP4, resting as the grouped GEMMs read them.

* Rows lie as in `xstage.moe.weights`: gate and up mixed, Linear-2's in thread order; the scales of their blocks with them.
* The codes of eight columns lie as `mxfp4.to_words` puts them, in tiles of 128 rows × 128 columns (`mxfp4.to_tiles`), each one contiguous
  piece: that is what a copy brings into a stage. Scales of blocks lie in the tile too, as their distance below the tile's
  (`mxfp4.distances`), which is what decoding asks for. Nothing is rounded on the way: what was given comes back bit for bit.
* Beside them the power of two of every 128 × 128 (`mxfp4.tile_scales`), in the place and form of the scales of fp8 weights.

Weights come in high precision and are rounded once, or as packed codes with scales, as public checkpoints hold them. Either way one expert
after another.

Not covered: other blocks than 32 along the input, biases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from xstage.errors import XStageError
from xstage.moe import mxfp4, quantize
from xstage.moe.quantize import BLOCK
from xstage.moe.reference import Mxfp4Linear
from xstage.moe.weights import SOURCES


class Mxfp4Weights:
    """Memory for the weights of `experts` experts, filled by `load`: 0.531 of what `Weights` take.

    Attributes:
        w1: uint8 [experts, 2 · intermediate / 128, hidden / 128, TILE_BYTES], tiles of codes and distances, gate and up mixed.
        w1_scales: float32 [experts, hidden / 128, intermediate / 128, 2]: of 128 gate rows, of 128 up rows.
        w2: uint8 [experts, hidden / 128, intermediate / 128, TILE_BYTES], rows in `quantize.thread_order`.
        w2_scales: float32 [experts, intermediate / 128, hidden / 128].
        loaded: `load` was called. Loading again writes the same memory.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int, device: torch.device):
        self.experts, self.hidden, self.intermediate, self.device = experts, hidden, intermediate, device

        def tiles(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(experts, rows // BLOCK, columns // BLOCK, mxfp4.TILE_BYTES, dtype=torch.uint8, device=device)

        self.w1, self.w2 = tiles(2 * intermediate, hidden), tiles(hidden, intermediate)
        self.w1_scales = torch.empty(experts, hidden // BLOCK, intermediate // BLOCK, 2, device=device)
        self.w2_scales = torch.empty(experts, intermediate // BLOCK, hidden // BLOCK, device=device)
        self.loaded = False

    @staticmethod
    def size_bytes(experts: int, hidden: int, intermediate: int) -> int:
        """Bytes of all four tensors."""
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
                tiles = mxfp4.tile_scales(packed, blocks)
                self.w1[expert].copy_(_resting(packed, blocks, tiles, quantize.interleave_gate_up))
                self.w1_scales[expert].copy_(tiles.unflatten(0, (2, -1)).permute(2, 1, 0))
                packed, blocks = _packed(w2, w2_scales, expert, self.device)
                tiles = mxfp4.tile_scales(packed, blocks)
                self.w2[expert].copy_(_resting(packed, blocks, tiles, quantize.thread_order))
                self.w2_scales[expert].copy_(tiles.mT)
        self.loaded = True

    def fill(self, spread: int = 4) -> None:
        """Random codes, blocks up to `spread` − 1 powers of two below the largest: made where they rest, for measurements."""
        for w, scales, depth in ((self.w1, self.w1_scales, self.hidden), (self.w2, self.w2_scales, self.intermediate)):
            w[..., : mxfp4.TILE_CODE_BYTES].random_(0, 256)
            w[..., mxfp4.TILE_CODE_BYTES :].random_(0, spread)
            # The largest block's scale times 3, about what codes are in the mean, is to be depth^−1/2.
            scales.fill_(2.0 ** (round(math.log2(depth**-0.5 / 3)) - mxfp4.LARGEST_SHIFT))
        self.loaded = True

    @property
    def linear1(self) -> Mxfp4Linear:
        """Linear-1 for `xstage.moe.reference`: the same weights, and scales as they are now."""
        return RestingLinear(self.w1, self.w1_scales.permute(0, 3, 2, 1).flatten(1, 2), quantize.separate_gate_up)

    @property
    def linear2(self) -> Mxfp4Linear:
        """Linear-2 likewise."""
        return RestingLinear(self.w2, self.w2_scales.mT, quantize.from_thread_order)


@dataclass(frozen=True)
class RestingLinear(Mxfp4Linear):
    """weight: tiles, as they rest. scales: float32 of tiles, rows in natural order. undo: of rows at rest."""

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, columns, _ = self.weight.shape
        return experts, rows * BLOCK, columns * BLOCK

    def natural(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.scales is not None
        assert self.undo is not None
        words, below = (self.undo(t) for t in mxfp4.from_tiles(self.weight[expert]))
        return words, mxfp4.from_distances(below, self.scales[expert])


def _resting(
    packed: torch.Tensor, blocks: torch.Tensor, tiles: torch.Tensor, order: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:  # fmt: skip
    return mxfp4.to_tiles(order(mxfp4.to_words(packed)), order(mxfp4.distances(blocks, tiles)))


def _packed(w: torch.Tensor, scales: torch.Tensor | None, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if scales is None:
        return mxfp4.quantize(w[expert].to(device))
    return w[expert].to(device), scales[expert].view(torch.uint8).to(device)
