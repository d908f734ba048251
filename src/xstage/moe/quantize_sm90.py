"""Quantising on the way: bfloat16 in memory to e4m3 with a scale per 128 columns in registers, as `quantize.quantize_activations` does.

A division rounded to nearest is ten instructions, sixteen times a lane. Where all of a warp's numbers are finite and none of its blocks is
tiny, they are four multiply-adds and a multiplication each with the block's reciprocal, which give the same bits (`floats.e4m3x4_by`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from xstage.device.floats import (
    BF16_INFINITY,
    bf16_pair,
    e4m3_scale,
    e4m3x4,
    e4m3x4_by,
    finite_magnitude,
    finite_or_nan,
    largest_bf16,
    reciprocal,
)
from xstage.device.loads import load_16_once
from xstage.device.stores import store_4, store_16

WARP_COLUMNS = 512  # columns that a warp takes at a time: 16 a lane
# Bits of the bfloat16 2⁻⁸⁰: blocks whose largest number is smaller are tiny, but not those of zeros.
LEAST = (127 - 80) << 7


def load_quantized(address: Int64) -> tuple[list[Int32], Int32]:
    """Sixteen bfloat16 of this lane as four words of e4m3, and the scale, bits of a float32, of the block that eight lanes share."""
    return quantized((*load_16_once(address), *load_16_once(address + 16)))


def quantized(words: Sequence[Int32]) -> tuple[list[Int32], Int32]:
    """The same of bfloat16 pairs in registers. All lanes of a warp call it."""
    largest = _of_block(largest_bf16(words))
    unusual = (largest >= BF16_INFINITY) | ((largest < LEAST) & (largest != 0))
    *pieces, scale = _convert(words, largest, cute.arch.vote_any_sync(unusual))
    return pieces, scale


def _of_block(largest: Int32) -> Int32:
    for distance in (1, 2, 4):
        largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, distance))
    return largest


@cute.jit
def _convert(words: Any, largest: Int32, unusual: Any) -> tuple[Int32, Int32, Int32, Int32, Int32]:
    """Four words of e4m3, and the scale. largest: bits of a bfloat16."""
    values = [bits for word in words for bits in bf16_pair(word)]
    scale = e4m3_scale(largest << 16)
    a, b, c, d = Int32(0), Int32(0), Int32(0), Int32(0)
    if unusual:
        finite = finite_magnitude(values[0])
        for value in values[1:]:
            finite = cutlass.max(finite, finite_magnitude(value))
        scale = e4m3_scale(_of_block(finite))
        a, b, c, d = [e4m3x4([finite_or_nan(value) for value in values[i : i + 4]], scale) for i in range(0, 16, 4)]
    else:
        inverse = reciprocal(scale)
        a, b, c, d = [e4m3x4_by(values[i : i + 4], scale, inverse) for i in range(0, 16, 4)]
    return a, b, c, d, scale


@cute.jit
def quantize_row(x: Int64, rows: Int64, scales: Int64, token: Int32, hidden: cutlass.Constexpr[int]) -> None:
    """A warp's work: one row. x, rows, scales: addresses of bfloat16 and e4m3 [tokens, hidden], and float32 [tokens, hidden / 128]."""
    lane = cute.arch.lane_idx()
    together = 2 if hidden % (2 * WARP_COLUMNS) == 0 else 1  # more loads under way
    for step in cutlass.range(hidden // WARP_COLUMNS // together, unroll=1):
        at = Int64(token) * hidden + step * (together * WARP_COLUMNS) + lane * 16
        loaded = [
            (*load_16_once(x + here * 2), *load_16_once(x + here * 2 + 16)) for here in [at + i * WARP_COLUMNS for i in range(together)]
        ]
        for i in cutlass.range_constexpr(together):
            pieces, scale = quantized(loaded[i])
            store_16(rows + at + i * WARP_COLUMNS, *pieces)
            if lane % 8 == 0:
                block = (step * together + i) * 4 + lane // 8
                store_4(scales + (Int64(token) * (hidden // 128) + block) * 4, scale)
