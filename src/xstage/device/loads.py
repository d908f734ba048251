"""Loads from addresses that are 64-bit integers. Weak loads: what may be read is decided by `device.signals` or by kernel order."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64


def load_4(address: Int64) -> Int32:
    """A 4-byte word of global memory."""
    return cute.arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def load_8(address: Int64) -> Int64:
    """An 8-byte word of global memory."""
    return cute.arch.inline_ptx("ld.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def load_16(address: Int64) -> tuple[Int32, Int32, Int32, Int32]:
    """Four words from a 16-byte aligned address."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[address]
    )


def load_16_once(address: Int64) -> tuple[Int32, Int32, Int32, Int32]:
    """`load_16` of something that nobody on this SM reads again: the L1 cache keeps no copy."""
    return cute.arch.inline_ptx(
        "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[address]
    )
