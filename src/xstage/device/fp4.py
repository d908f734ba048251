"""FP4 e2m1 to fp8 e4m3 in registers, with a power of two as a factor: eight codes of one word become two words of four bytes.

A byte permutation is a table of eight bytes that four nibbles look up at once, and a code has eight magnitudes. So a block's factor goes
into the table, once per 32 codes, and the eight codes of a word cost seven instructions (`decode`). Words are in the order of
`xstage.moe.mxfp4.to_words`, which puts the signs where they are cheap to take.

Where all magnitudes are normal e4m3 numbers, a factor of two adds 8 to each byte but that of zero: two multiply-adds make a table
(`normal_magnitudes`). Below, it takes conversions, which round to nearest even (`magnitudes`), 16 instructions more, and ptxas predicates
them rather than branch around them: a loop that decodes should choose outside.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from xstage.device.floats import as_float
from xstage.device.registers import e4m3_quad

SMALLEST_NORMAL = -5  # 0.5 · 2⁻⁵ is e4m3's smallest normal number
_VANISHED = -13
# Bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6; what one more power of two adds.
_LOW, _HIGH = 0x3C383000, 0x4C484440
_LOW_STEP, _HIGH_STEP = 0x08080800, 0x08080808
# 0.5, 1, 1.5, 2, 3, 4, 6 as float32.
_FLOATS = (0x3F000000, 0x3F800000, 0x3FC00000, 0x40000000, 0x40400000, 0x40800000, 0x40C00000)
_SIGNS = -0x7F7F7F80  # 0x80808080


def normal_magnitudes(shift: Int32) -> tuple[Int32, Int32]:
    """e4m3 bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, each times 2^shift; shift in −5 … 6."""
    return Int32(_LOW) + shift * _LOW_STEP, Int32(_HIGH) + shift * _HIGH_STEP


def normal_magnitudes_below(distance: Int32) -> tuple[Int32, Int32]:
    """`normal_magnitudes` of the shift 6 − distance, in as many instructions; distance in 0 … 11."""
    return Int32(_LOW + 6 * _LOW_STEP) - distance * _LOW_STEP, Int32(_HIGH + 6 * _HIGH_STEP) - distance * _HIGH_STEP


@cute.jit
def magnitudes(shift: Int32) -> tuple[Int32, Int32]:
    """`normal_magnitudes` of any shift up to 6, rounded to nearest even."""
    low, high = normal_magnitudes(shift)
    if shift < SMALLEST_NORMAL:
        exponent = cutlass.max(shift, Int32(_VANISHED)) << 23
        values = [as_float(Int32(bits) + exponent) for bits in _FLOATS]
        low, high = e4m3_quad(as_float(Int32(0)), *values[:3]), e4m3_quad(*values[3:])
    return low, high


def decode(word: Int32, low: Int32, high: Int32) -> tuple[Int32, Int32]:
    """Codes 0 … 3 and 4 … 7 of a word as e4m3, the first in the lowest byte, by the table of their magnitudes."""
    codes = word & 0x77777777
    # The permutation looks at the lower half of its selector only.
    first, second = cute.arch.prmt(low, high, codes), cute.arch.prmt(low, high, codes >> 16)
    return first | (word & _SIGNS), second | ((word << 4) & _SIGNS)
