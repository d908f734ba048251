"""Remote stores by method. Addresses are 64-bit integers, because a peer's buffer reaches a kernel as a number in a table.

None of these makes data visible to anybody: issue is not visibility. What a peer may read is decided by `device.signals`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


@cute.jit
def store_16(address: Int64, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """16-byte weak store of four words (`st.global.v4.b32`); `address` is 16-byte aligned."""
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, a, b, c, d])


@cute.jit
def store_4(address: Int64, word: Int32) -> None:
    """4-byte weak store."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])


@cute.jit
def store_8(address: Int64, a: Int32, b: Int32) -> None:
    """8-byte weak store of two words; `address` is 8-byte aligned."""
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, a, b])


@cute.jit
def bulk_store(address: Int64, shared_address: Int32, size: Int32) -> None:
    """Hand `size` bytes (a multiple of 16) of shared memory to the copy engine; one thread calls it.

    Generic writes to that shared memory need `fence.proxy.async` by their writers first.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};", read_only_args=[address, shared_address, size]
    )


@cute.jit
def bulk_load(shared_address: Int32, address: Int64, size: Int32, barrier_address: Int32) -> None:
    """Ask the copy engine for `size` bytes (a multiple of 16) of this GPU's memory; the mbarrier at `barrier_address` counts them."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared_address, address, size, barrier_address],
    )


@cute.jit
def bulk_load_cluster(shared_address: Int32, address: Int64, size: Int32, barrier_address: Int32, ctas: Int32) -> None:
    """`bulk_load` into the same place of every CTA of the cluster whose bit is set in `ctas`; the mbarrier of each counts the bytes."""
    cute.arch.inline_ptx(
        "{ .reg .b16 ctas; cvt.u16.u32 ctas, {$r4}; "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{$r0}], [{$r1}], {$r2}, [{$r3}], ctas; }",
        read_only_args=[shared_address, address, size, barrier_address, ctas],
    )


@cute.jit
def bulk_commit() -> None:
    """Close the calling thread's group of bulk stores."""
    cute.arch.inline_ptx("cp.async.bulk.commit_group;")


@cute.jit
def bulk_wait_source_free() -> None:
    """Wait until the calling thread's bulk stores have read their shared memory, so that it may be overwritten."""
    cute.arch.inline_ptx("cp.async.bulk.wait_group.read 0;")


@cute.jit
def bulk_wait_done() -> None:
    """Wait until the calling thread's bulk stores are visible to *that thread*. Its release is what shows them to a peer."""
    cute.arch.inline_ptx("cp.async.bulk.wait_group 0;")


@cute.jit
def burst_of_16(base: Int64, size: Int32, thread: Int32, threads: cutlass.Constexpr, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """All `threads` of a CTA store `size` bytes from `base` on, coalesced, in a loop that is not unrolled.

    The shape decides when the loop ends, not when the stores have left: each round writes its address register anew and so waits
    until the store of the round before has left it. A thread runs one store ahead; straight-line code runs further ahead.
    """
    for offset in cutlass.range(thread * 16, size, threads * 16, unroll=1):
        store_16(base + Int64(offset), a, b, c, d)


@cute.jit
def send_16(
    shared_address: Int32, barrier_address: Int32, rank: Int32, a: Int32, b: Int32, c: Int32, d: Int32
) -> None:  # fmt: skip
    """Four words to the shared memory of CTA `rank` of the cluster, whose mbarrier counts the 16 bytes: who waits for it may read them.

    The addresses are those of the same places in one's own CTA.
    """
    cute.arch.inline_ptx(
        "{ .reg .b32 to, barrier; mapa.shared::cluster.u32 to, {$r0}, {$r2}; mapa.shared::cluster.u32 barrier, {$r1}, {$r2}; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {{$r3}, {$r4}, {$r5}, {$r6}}, [barrier]; }",
        read_only_args=[shared_address, barrier_address, rank, a, b, c, d],
    )


@cute.jit
def send_4(shared_address: Int32, barrier_address: Int32, rank: Int32, value: Float32) -> None:
    """`send_16` of one float: the mbarrier counts 4 bytes."""
    cute.arch.inline_ptx(
        "{ .reg .b32 to, barrier; mapa.shared::cluster.u32 to, {$r0}, {$r2}; mapa.shared::cluster.u32 barrier, {$r1}, {$r2}; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], {$r3}, [barrier]; }",
        read_only_args=[shared_address, barrier_address, rank, value],
    )


@cute.jit
def prefetch_l1(address: Int64) -> None:
    """Ask for the line of `address` in this SM's L1 cache; nobody waits."""
    cute.arch.inline_ptx("prefetch.global.L1 [{$r0}];", read_only_args=[address])


def thread_anew() -> Int32:
    """`%tid.x`, read where this stands: nothing computed from it earlier need be kept in registers until here."""
    return Int32(
        llvm.inline_asm(
            T.i32(), [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT
        )
    )


def zero_anew() -> Int32:
    """0, which the compiler cannot know: what is computed from it is computed where it is used, and not kept in registers before."""
    return Int32(
        llvm.inline_asm(
            T.i32(), [], "mov.u32 $0, 0;", "=r", has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT
        )
    )


@cute.jit
def load_shared(shared_address: Int32) -> Int32:
    """Volatile load of a word of shared memory: a value that the compiler can only keep, not compute again."""
    return cute.arch.inline_ptx("ld.volatile.shared.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[shared_address])


@cute.jit
def burst_of_bulk(base: Int64, size: Int32, shared_address: Int32, shared_bytes: cutlass.Constexpr, chunk: cutlass.Constexpr) -> None:
    """One thread stores `size` bytes from `base` on out of a shared-memory tile of `shared_bytes`, `chunk` bytes a copy.

    The tile is read again from its start when `size` is larger.
    """
    for offset in cutlass.range(0, size, chunk, unroll=1):
        bulk_store(base + Int64(offset), shared_address + offset % shared_bytes, cutlass.min(Int32(chunk), size - offset))


def cluster_address(shared_address: Int32, rank: Int32) -> Int32:
    """Where CTA `rank` of the cluster has what this one has at `shared_address`."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[shared_address, rank]
    )


def arrive_cluster(address: Int32) -> None:
    """Arrive at an mbarrier of the cluster, by `cluster_address`."""
    cute.arch.inline_ptx("mbarrier.arrive.shared::cluster.b64 _, [{$r0}];", read_only_args=[address])
