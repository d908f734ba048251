"""Conversions, and moves between registers and shared memory, that CuTe DSL has no name for. Addresses of shared memory are 32 bits."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32


def e4m3_quad(a: Float32, b: Float32, c: Float32, d: Float32) -> Int32:
    """Four float32 rounded to fp8 e4m3, saturating, NaN kept; `a` in the lowest byte."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; "
        "mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Int32],
        read_only_args=[a, b, c, d],
    )


def max_magnitude(a: Float32, b: Float32) -> Float32:
    """max(a, |b|), the other one where one is NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 m; abs.f32 m, {$r1}; max.f32 {$w0}, {$r0}, m; }", write_only_types=[Float32], read_only_args=[a, b]
    )


def maximum(a: Float32, b: Float32) -> Float32:
    """The larger; NaN where one is NaN."""
    return cute.arch.inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def minimum(a: Float32, b: Float32) -> Float32:
    """The smaller; NaN where one is NaN."""
    return cute.arch.inline_ptx("min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def tanh(a: Float32) -> Float32:
    """One instruction; relative error up to 2⁻¹¹."""
    return cute.arch.inline_ptx("tanh.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def divide_up(a: Float32, b: Float32) -> Float32:
    """a / b, rounded up."""
    return cute.arch.inline_ptx("div.rp.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def store_matrices(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """Four 8 × 8 matrices of 16-bit elements (`stmatrix`): `address` is a row's, lane l gives row l % 8 of matrix l // 8."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, a, b, c, d]
    )


def store_shared_32(address: Int32, word: Int32) -> None:
    """One word to shared memory."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def load_shared_32(address: Int32) -> Int32:
    """One word of shared memory."""
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def load_shared_128(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Four words of shared memory from a 16-byte aligned address."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[address]
    )


def store_shared_128(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """Four words to shared memory at a 16-byte aligned address."""
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, a, b, c, d])


def load_shared_64(address: Int32) -> tuple[Int32, Int32]:
    """Two words of shared memory from an 8-byte aligned address."""
    return cute.arch.inline_ptx("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[address])


def store_shared_64(address: Int32, a: Int32, b: Int32) -> None:
    """Two words to shared memory at an 8-byte aligned address."""
    cute.arch.inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, a, b])


def store_e4m3_pair(address: Int32, low: Float32, high: Float32) -> None:
    """Two float32 rounded as `e4m3_quad` rounds them to two bytes of shared memory; `address` is even."""
    cute.arch.inline_ptx(
        "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, {$r2}, {$r1}; st.shared.b16 [{$r0}], pair; }",
        read_only_args=[address, low, high],
    )


def max_shared(address: Int32, word: Int32) -> None:
    """The word in shared memory becomes the larger of both, without a sign; nobody waits."""
    cute.arch.inline_ptx("red.shared.max.u32 [{$r0}], {$r1};", read_only_args=[address, word])


def load_shared_byte(address: Int32) -> Int32:
    """A byte of shared memory, 0 … 255."""
    return cute.arch.inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])
