"""Remote stores by method. Addresses are 64-bit integers, because a peer's buffer reaches a kernel as a number in a table.

None of these makes data visible to anybody: issue is not visibility. What a peer may read is decided by `device.signals`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def store_16(address: Int64, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """16-byte weak store of four words (`st.global.v4.b32`); `address` is 16-byte aligned."""
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, a, b, c, d])


@cute.jit
def bulk_store(address: Int64, shared_address: Int32, size: Int32) -> None:
    """Hand `size` bytes (a multiple of 16) of shared memory to the copy engine; one thread calls it.

    Generic writes to that shared memory need `fence.proxy.async` by their writers first.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};", read_only_args=[address, shared_address, size]
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
def burst_of_16(base: Int64, size: Int32, thread: Int32, threads: cutlass.Constexpr, rows: cutlass.Constexpr, tag: Int32) -> None:
    """All `threads` of a CTA store `size` bytes from `base` on, coalesced, as an epilogue stores a tile from registers.

    A row is 16 bytes of every thread; up to `rows` rows are stored without writing any register in between, because a loop that
    reuses registers waits for the stores before it to leave them, which an unrolled epilogue does not.
    """
    for start in cutlass.range(thread * 16, size, threads * 16 * rows, unroll=1):
        for row in cutlass.range_constexpr(rows):
            if start + row * threads * 16 < size:
                store_16(base + Int64(start) + row * threads * 16, start, tag, start ^ tag, ~tag)


@cute.jit
def wait_stores_left(shared_address: Int32) -> Int32:
    """Wait until the calling thread's stores have left its registers and its load/store queue: a shared load queued behind them
    came back. Says nothing about the path beyond. The caller must use the result.
    """
    return cute.arch.inline_ptx("ld.volatile.shared.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[shared_address])


@cute.jit
def burst_of_bulk(base: Int64, size: Int32, shared_address: Int32, shared_bytes: cutlass.Constexpr, chunk: cutlass.Constexpr) -> None:
    """One thread stores `size` bytes from `base` on out of a shared-memory tile of `shared_bytes`, `chunk` bytes a copy.

    The tile is read again from its start when `size` is larger.
    """
    for offset in cutlass.range(0, size, chunk, unroll=1):
        bulk_store(base + Int64(offset), shared_address + offset % shared_bytes, cutlass.min(Int32(chunk), size - offset))
