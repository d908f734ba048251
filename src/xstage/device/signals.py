"""Words that order memory, or only meet, between CTAs and between GPUs; each function states its scope and its order.

A signal word is 64 bits: the generation of the call in the high half, the signature of its shapes in the low half. One store
moves both, so a reader that sees the generation also knows whether the writer was given the same problem.

Who owns what: the writer orders everything it wants seen *before* `store_release_sys`; the reader may touch that data only
*after* a `load_acquire_sys` that returned the word. Both ends use `.sys` scope; a relaxed spin would not be an acquire.

Not covered: loads from peers, multicast, signals through the bulk engine.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from xstage.device.clock import now_ns

# Why a wait failed (status words), and what a rank that failed publishes instead of its signature (signatures have 31 bits).
TIMED_OUT, MISMATCH, PEER_GAVE_UP = 1, 2, 3
GAVE_UP = 0xFFFFFFFF


def store_release_sys(address: Int64, word: Int64) -> None:
    """Publish `word` at `address` (local or peer), after everything that happened before in this thread's causality order."""
    cute.arch.inline_ptx("st.release.sys.global.b64 [{$r0}], {$r1};", read_only_args=[address, word])


def load_acquire_sys(address: Int64) -> Int64:
    """Read a signal word in local memory; what its writer released with it may be used afterwards."""
    return cute.arch.inline_ptx("ld.acquire.sys.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def store_release_sys_32(address: Int64, word: Int32) -> None:
    """`store_release_sys` of an int32 word."""
    cute.arch.inline_ptx("st.release.sys.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def load_acquire_sys_32(address: Int64) -> Int32:
    """`load_acquire_sys` of an int32 word."""
    return cute.arch.inline_ptx("ld.acquire.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def load_relaxed_gpu(address: Int64) -> Int64:
    """Read a word that other threads of this GPU may be writing, without ordering anything."""
    return cute.arch.inline_ptx("ld.relaxed.gpu.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def store_relaxed_sys(address: Int64, word: Int64) -> None:
    """Write a word that the host may be reading, without ordering anything."""
    cute.arch.inline_ptx("st.relaxed.sys.global.b64 [{$r0}], {$r1};", read_only_args=[address, word])


def claim_gpu(address: Int64, word: Int64) -> Int64:
    """Write `word` where zero was; returns what was there. The first failure wins."""
    return cute.arch.inline_ptx(
        "atom.relaxed.gpu.global.cas.b64 {$w0}, [{$r0}], {$r1}, {$r2};",
        write_only_types=[Int64],
        read_only_args=[address, Int64(0), word],
    )


@cute.jit
def wait_for_generation(address: Int64, generation: Int32, failed_address: Int64, timeout_ns: Int64) -> Int64:
    """Wait until the word at `address` (local memory) carries `generation` or a later one; returns the last word read.

    Gives up after `timeout_ns`, or at once when this call has already failed elsewhere on this GPU: the caller compares the
    generation of what came back.
    """
    word = load_acquire_sys(address)
    start = cute.arch.globaltimer()
    waiting = Int32(word >> 32) - generation < 0
    while waiting:
        word = load_acquire_sys(address)
        expired = Int64(cute.arch.globaltimer() - start) > timeout_ns
        waiting = (Int32(word >> 32) - generation < 0) & (not expired) & (load_relaxed_gpu(failed_address) == 0)
    return word


# ---- CTAs of one GPU that meet without ordering anything: a release would wait for remote stores that are under way ----


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


@cute.jit
def take_gpu(address: Int64) -> Int32:
    """Add 1 to an int32 counter on this GPU and return what it was, a number that nobody else gets; orders nothing."""
    return cute.arch.inline_ptx("atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[address])


# ---- CTAs of one GPU that hand data on ----


@cute.jit
def count_release_gpu(address: Int64) -> None:
    """Add 1 to an int32 counter on this GPU, after everything that happened before in this thread's causality order."""
    cute.arch.inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[address])


@cute.jit
def wait_count_acquire_gpu(address: Int64, wanted: Int32, failed_address: Int64, timeout_ns: Int64) -> Int32:
    """Wait until the int32 counter is at least `wanted`; what its writers released with it may be used afterwards. Returns it.

    Gives up after `timeout_ns`, or at once when the int64 word at `failed_address` is not zero.
    """
    seen = cute.arch.inline_ptx("ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])
    start = now_ns()
    waiting = seen < wanted
    while waiting:
        seen = cute.arch.inline_ptx("ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])
        expired = Int64(now_ns() - start) > timeout_ns
        waiting = (seen < wanted) & (not expired) & (load_relaxed_gpu(failed_address) == 0)
    return seen


# ---- GPUs that hand data on, a piece at a time ----


@cute.jit
def count_release_sys(address: Int64, amount: Int32) -> None:
    """Add `amount` to an int32 counter, local or a peer's, after everything that happened before in this thread's causality order."""
    cute.arch.inline_ptx("red.release.sys.global.add.u32 [{$r0}], {$r1};", read_only_args=[address, amount])


@cute.jit
def wait_count_acquire_sys(address: Int64, wanted: Int32, failed_address: Int64, timeout_ns: Int64) -> Int32:
    """`wait_count_acquire_gpu` for a counter in local memory that peers add to."""
    seen = cute.arch.inline_ptx("ld.acquire.sys.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])
    start = now_ns()
    waiting = seen < wanted
    while waiting:
        seen = cute.arch.inline_ptx("ld.acquire.sys.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])
        expired = Int64(now_ns() - start) > timeout_ns
        waiting = (seen < wanted) & (not expired) & (load_relaxed_gpu(failed_address) == 0)
    return seen
