"""Floating point by bits: bf16 pairs, and fp8 e4m3 by the rules of `xstage.moe.quantize`, bit for bit.

Values travel as the bits of float32 in Int32, because magnitudes compare as integers and what is not finite is told by its exponent.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

INFINITY, BF16_INFINITY = 0x7F800000, 0x7F80
_NAN = 0x7FFFFFFF
_UPPER_HALF = -0x10000  # 0xFFFF0000
_SMALLEST_SCALE = 0x00800000  # 2⁻¹²⁶


def bf16_pair(word: Int32) -> tuple[Int32, Int32]:
    """Two bf16 of a word, the lower first, as bits of float32."""
    return word << 16, word & _UPPER_HALF


def as_float(bits: Int32) -> Float32:
    """The float32 with these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def as_bits(value: Float32) -> Int32:
    """The bits of a float32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def pack_bf16(low: Float32, high: Float32) -> Int32:
    """Two float32, each rounded to nearest even bf16, in one word."""
    return cute.arch.inline_ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high])


@cute.jit
def finite_magnitude(bits: Int32) -> Int32:
    """Bits of |value|; 0 for infinities and NaN."""
    magnitude = bits & 0x7FFFFFFF
    return magnitude if magnitude < INFINITY else Int32(0)


@cute.jit
def finite_or_nan(bits: Int32) -> Int32:
    """The value, or NaN for infinities: e4m3 has none, and a saturating conversion would make them finite."""
    return bits if (bits & 0x7FFFFFFF) < INFINITY else Int32(_NAN)


def e4m3_scale(largest: Int32) -> Int32:
    """Scale of a block whose largest finite magnitude is `largest`: ÷ 448 rounded up, at least 2⁻¹²⁶; both as bits."""
    scale = cute.arch.inline_ptx(
        "{\n.reg .f32 x, y;\nmov.b32 x, {$r0};\nmov.b32 y, 0f43E00000;\ndiv.rp.f32 x, x, y;\nmov.b32 {$w0}, x;\n}",
        write_only_types=[Int32],
        read_only_args=[largest],
    )
    # Both are positive, so they compare as integers.
    return cutlass.max(scale, Int32(_SMALLEST_SCALE))


def e4m3x4(values: Sequence[Int32], scale: Int32) -> Int32:
    """Four values ÷ scale, each division rounded to nearest, as e4m3 bytes, the first lowest. NaN stays NaN (0x7F)."""
    return cute.arch.inline_ptx(
        "{\n.reg .f32 a, b, c, d, s;\n.reg .b16 low, high;\n"
        "mov.b32 a, {$r0};\nmov.b32 b, {$r1};\nmov.b32 c, {$r2};\nmov.b32 d, {$r3};\nmov.b32 s, {$r4};\n"
        "div.rn.f32 a, a, s;\ndiv.rn.f32 b, b, s;\ndiv.rn.f32 c, c, s;\ndiv.rn.f32 d, d, s;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, b, a;\ncvt.rn.satfinite.e4m3x2.f32 high, d, c;\n"
        "mov.b32 {$w0}, {low, high};\n}",
        write_only_types=[Int32],
        read_only_args=[*values, scale],
    )


def largest_bf16(words: Sequence[Int32]) -> Int32:
    """Bits of the largest magnitude of bfloat16 pairs; NaN are larger than infinities, and these than all else."""
    pairs = [word & 0x7FFF7FFF for word in words]
    largest = pairs[0]
    for pair in pairs[1:]:
        largest = cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[largest, pair])
    return cutlass.max(largest & 0xFFFF, largest >> 16)


def reciprocal(value: Int32) -> Int32:
    """1 ÷ value, rounded to nearest; both as bits of float32."""
    return cute.arch.inline_ptx(
        "{\n.reg .f32 x;\nmov.b32 x, {$r0};\nrcp.rn.f32 x, x;\nmov.b32 {$w0}, x;\n}", write_only_types=[Int32], read_only_args=[value]
    )


def e4m3x4_by(values: Sequence[Int32], scale: Int32, inverse: Int32) -> Int32:
    """`e4m3x4` of finite values, given `reciprocal(scale)`: the same bits where scale ≥ 2⁻⁹², or all values are zeros.

    A quotient within one unit of its last place, and the reciprocal rounded to nearest: then one more step, with an exact remainder, gives
    the quotient rounded to nearest (Markstein, IBM J. Res. Dev. 34, 1990). The first step makes it so near. A remainder is exact where no
    bit of it lies below 2⁻¹⁴⁹: quotients of less than 2⁻¹¹ become zero anyway, and for others scale · 2⁻¹¹ · 2⁻⁴⁶ does not.
    """
    lines = ["{\n.reg .f32 a<4>, m, r, s, i;\n.reg .b16 low, high;\n", "mov.b32 s, {$r4};\nmov.b32 i, {$r5};\n"]
    for n in range(4):
        lines.append(f"mov.b32 a{n}, {{$r{n}}};\nneg.f32 m, a{n};\nmul.rn.f32 a{n}, a{n}, i;\n")
        # The remainder with its sign turned: so zeros keep theirs.
        lines.append(2 * f"fma.rn.f32 r, s, a{n}, m;\nneg.f32 r, r;\nfma.rn.f32 a{n}, r, i, a{n};\n")
    lines.append("cvt.rn.satfinite.e4m3x2.f32 low, a1, a0;\ncvt.rn.satfinite.e4m3x2.f32 high, a3, a2;\nmov.b32 {$w0}, {low, high};\n}")
    return cute.arch.inline_ptx("".join(lines), write_only_types=[Int32], read_only_args=[*values, scale, inverse])
