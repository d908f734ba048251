"""Words that order memory between CTAs and between GPUs; each function states its scope and its order.

Release at one end needs acquire at the other, at the same scope; a relaxed spin is not an acquire (PTX ISA, memory consistency
model). Every wait is bounded: it returns what it last saw, and the caller reports.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from xstage.device.clock import now_ns


@cute.jit
def fence_sys() -> None:
    """`fence.acq_rel.sys`: returns when the calling thread's earlier stores are visible to every GPU. Slow on a full path."""
    cute.arch.inline_ptx("fence.acq_rel.sys;")


@cute.jit
def count_relaxed_gpu(address: Int64) -> None:
    """Add 1 to an int32 counter on this GPU; orders nothing (a release would wait for remote stores that are still under way)."""
    cute.arch.inline_ptx("red.relaxed.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[address])


@cute.jit
def publish_relaxed_gpu(address: Int64, value: Int64) -> None:
    """Write an int64 word for other CTAs of this GPU; orders nothing but the word itself."""
    cute.arch.inline_ptx("st.relaxed.gpu.global.u64 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def wait_count_gpu(address: Int64, wanted: Int32, deadline_ns: Int64) -> Int32:
    """Spin (relaxed, gpu scope) until the int32 word is at least `wanted` or `%globaltimer` passes `deadline_ns`; returns it."""
    seen = cute.arch.inline_ptx("ld.relaxed.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])
    now = now_ns()
    while (seen < wanted) & (now < deadline_ns):
        seen = cute.arch.inline_ptx("ld.relaxed.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])
        now = now_ns()
    return seen


@cute.jit
def wait_word_gpu(address: Int64, deadline_ns: Int64) -> Int64:
    """Spin (relaxed, gpu scope) until the int64 word is not 0 or `%globaltimer` passes `deadline_ns`; returns it."""
    seen = cute.arch.inline_ptx("ld.relaxed.gpu.global.u64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])
    now = now_ns()
    while (seen == 0) & (now < deadline_ns):
        seen = cute.arch.inline_ptx("ld.relaxed.gpu.global.u64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])
        now = now_ns()
    return seen
