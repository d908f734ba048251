"""Quantising on the way: bfloat16 in memory to e4m3 with a scale per 128 columns in registers, as `quantize.quantize_activations` does."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from xstage.device.floats import bf16_pair, e4m3_scale, e4m3x4, finite_magnitude, finite_or_nan
from xstage.device.loads import load_16_once
from xstage.device.stores import store_4, store_16

WARP_COLUMNS = 512  # columns that a warp takes at a time: 16 a lane


def load_quantized(address: Int64) -> tuple[list[Int32], Int32]:
    """Sixteen bfloat16 of this lane as four words of e4m3, and the scale, bits of a float32, of the block that eight lanes share."""
    low, high = load_16_once(address), load_16_once(address + 16)
    values = [bits for word in (*low, *high) for bits in bf16_pair(word)]
    largest = finite_magnitude(values[0])
    for value in values[1:]:
        largest = cutlass.max(largest, finite_magnitude(value))
    for distance in (1, 2, 4):
        largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, distance))
    scale = e4m3_scale(largest)
    values = [finite_or_nan(value) for value in values]
    return [e4m3x4(values[i : i + 4], scale) for i in range(0, 16, 4)], scale


@cute.jit
def quantize_row(x: Int64, rows: Int64, scales: Int64, token: Int32, hidden: cutlass.Constexpr[int]) -> None:
    """A warp's work: one row. x, rows, scales: addresses of bfloat16 and e4m3 [tokens, hidden], and float32 [tokens, hidden / 128]."""
    lane = cute.arch.lane_idx()
    for block in cutlass.range(hidden // WARP_COLUMNS, unroll=1):
        at = Int64(token) * hidden + block * WARP_COLUMNS + lane * 16
        piece, scale = load_quantized(x + at * 2)
        store_16(rows + at, *piece)
        if lane % 8 == 0:
            store_4(scales + (Int64(token) * (hidden // 128) + block * 4 + lane // 8) * 4, scale)
