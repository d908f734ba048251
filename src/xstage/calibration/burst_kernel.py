"""The burst kernel: K producers store B bytes each to a peer (or to local memory), wait a gap, and do it again.

One CTA is one producer. It writes down, for each burst, when it started (%globaltimer) and how many clock ticks passed until the
stores were posted, until their source is free (`bulk`: the shared memory may be overwritten; `st_global`: the stores have left
registers and the load/store queue, seen in isolated bursts only), and until a system fence returned. A burst's record is
written behind the start of the next one, so that it never stands between a burst and its gap. Three modes share every line but
the wait between bursts:

- aligned: all producers meet, one of them names a start time `gap` later, all spin on %globaltimer until then. Without this,
  slow producers fall behind, the bursts spread out, and the capacity of the path cannot be seen.
- isolated: aligned, with a system fence behind each burst, so that every burst finds an empty path.
- free: each producer waits its own gap after its own burst, as an unsynchronised persistent kernel does.

The destination is a ring larger than the burst, so that no line is written twice within its time on the path. The local control
is the same kernel with local addresses. Not covered: reductions and loads (a further `method` branch in `_issue`).
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from xstage.device.clock import now_ns, spin_until_ns, ticks
from xstage.device.signals import count_relaxed_gpu, fence_sys, publish_relaxed_gpu, wait_count_gpu, wait_word_gpu
from xstage.device.stores import (
    bulk_commit,
    bulk_wait_done,
    bulk_wait_source_free,
    burst_of_16,
    burst_of_bulk,
    load_shared,
)

THREADS = 512
TILE_BYTES = 32 * 1024  # shared-memory source of the bulk copies: one output tile
CHUNK_BYTES = 8 * 1024  # bytes of one bulk copy
RECORD_FIELDS = 4  # start (ns), posted, source free, fence returned (ticks since start)
CLOCK_FIELDS = 4  # globaltimer and clock64 at the first burst, and after the last
_EXCLUSIVE_BYTES = 120 * 1024  # more than half of an SM's shared memory: one producer per SM


class BurstKernel:
    """`method` is `st_global` or `bulk`."""

    def __init__(self, method: str) -> None:
        self.method = method

    @cute.jit
    def __call__(
        self,
        destinations: cute.Tensor,
        records: cute.Tensor,
        clocks: cute.Tensor,
        arrivals: cute.Tensor,
        starts: cute.Tensor,
        status: cute.Tensor,
        size: Int32,
        slots: Int32,
        gap_ns: Int32,
        aligned: Int32,
        fence: Int32,
        limit_ns: Int64,
        stream: cuda.CUstream,
    ) -> None:
        """Launch one CTA per producer.

        Args:
            destinations: int64 (fan_out), base addresses of rings of slots·K·size bytes; producer c writes to c % fan_out.
            records: int64 (bursts, K, RECORD_FIELDS). clocks: int64 (K, CLOCK_FIELDS).
            arrivals: int32 (1), zeroed. starts: int64 (bursts), zeroed. status: int32 (1), zeroed; 1 when a wait gave up.
            size: B in bytes, a multiple of 16. slots: ring length in bursts. limit_ns: bound on the kernel's waits.
        """
        self.kernel(destinations, records, clocks, arrivals, starts, status, size, slots, gap_ns, aligned, fence, limit_ns).launch(
            grid=(records.shape[1], 1, 1), block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        destinations: cute.Tensor,
        records: cute.Tensor,
        clocks: cute.Tensor,
        arrivals: cute.Tensor,
        starts: cute.Tensor,
        status: cute.Tensor,
        size: Int32,
        slots: Int32,
        gap_ns: Int32,
        aligned: Int32,
        fence: Int32,
        limit_ns: Int64,
    ):
        thread, _, _ = cute.arch.thread_idx()
        producer, _, _ = cute.arch.block_idx()
        bursts, producers = records.shape[0], records.shape[1]

        @cute.struct
        class Shared:
            tile: cute.struct.Align[cute.struct.MemRange[Int32, _EXCLUSIVE_BYTES // 4], 128]

        tile = SmemAllocator().allocate(Shared).tile.data_ptr()
        words = cute.make_tensor(tile, cute.make_layout(TILE_BYTES // 4))
        for i in cutlass.range(thread, TILE_BYTES // 4, THREADS, unroll=4):
            words[i] = i ^ (producer << 16)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        shared = Int32(tile.toint())
        row = (
            load_shared(shared + thread * 16),
            load_shared(shared + thread * 16 + 4),
            load_shared(shared + thread * 16 + 8),
            load_shared(shared + thread * 16 + 12),
        )
        ring = destinations[producer % destinations.shape[0]]
        arrived, started = arrivals.iterator.toint(), starts.iterator.toint()
        give_up = now_ns() + limit_ns
        free_end = now_ns()
        start, tick, posted, free, done = free_end, free_end, free_end, free_end, free_end

        slot = Int32(0)
        for burst in cutlass.range(bursts, unroll=1):
            base = ring + (Int64(slot) * producers + producer) * Int64(size)
            slot = slot + 1 if slot + 1 < slots else Int32(0)
            if thread == 0:
                if (aligned != 0) | (burst == 0):
                    count_relaxed_gpu(arrived)
                    if producer == 0:
                        seen = wait_count_gpu(arrived, producers * (burst + 1), give_up)
                        if seen < producers * (burst + 1):
                            status[0] = Int32(1)
                        publish_relaxed_gpu(started + Int64(burst) * 8, now_ns() + Int64(gap_ns))
                    spin_until_ns(wait_word_gpu(started + Int64(burst) * 8, give_up))
                else:
                    spin_until_ns(free_end + Int64(gap_ns))
            cute.arch.sync_threads()
            begin, mark = now_ns(), ticks()
            if thread == 0:
                if burst == 0:
                    clocks[(producer, 0)] = begin
                    clocks[(producer, 1)] = mark
                else:
                    self._write(records, burst - 1, producer, start, tick, posted, free, done)
            start, tick = begin, mark
            posted, free = self._issue(base, size, thread, shared, row, fence, status)
            done = free
            if fence != 0:
                if cutlass.const_expr(self.method == "bulk"):
                    if thread == 0:
                        bulk_wait_done()
                        cute.arch.inline_ptx("fence.proxy.async;")
                fence_sys()
                cute.arch.sync_threads()
                done = ticks()
            free_end = now_ns()
        if thread == 0:
            self._write(records, bursts - 1, producer, start, tick, posted, free, done)
            clocks[(producer, 2)] = now_ns()
            clocks[(producer, 3)] = ticks()
            if cutlass.const_expr(self.method == "bulk"):
                bulk_wait_done()
        fence_sys()

    @cute.jit
    def _write(self, records: cute.Tensor, burst: Int32, producer: Int32, start, tick, posted, free, done):
        records[(burst, producer, 0)] = start
        records[(burst, producer, 1)] = posted - tick
        records[(burst, producer, 2)] = free - tick
        records[(burst, producer, 3)] = done - tick

    @cute.jit
    def _issue(self, base: Int64, size: Int32, thread: Int32, shared: Int32, row, fence: Int32, status: cute.Tensor):
        """Issue one burst; returns ticks when it was posted and when its source is free."""
        if cutlass.const_expr(self.method == "bulk"):
            posted = Int64(0)
            if thread == 0:
                burst_of_bulk(base, size, shared, TILE_BYTES, CHUNK_BYTES)
                bulk_commit()
                posted = ticks()
                bulk_wait_source_free()
            cute.arch.sync_threads()
            free = ticks()
        else:
            burst_of_16(base, size, thread, THREADS, *row)
            cute.arch.sync_threads()
            posted = ticks()
            free = posted
            if fence != 0:
                # A load behind the stores in the queue; testing it (the tile holds no such word) makes the thread wait for it.
                if load_shared(shared) == -1:
                    status[0] = Int32(2)
                cute.arch.sync_threads()
                free = ticks()
        return posted, free


def compile_burst_kernel(method: str) -> Any:
    """Compile for sm_90a; needs no GPU.

    Call the result with `(destinations, records, clocks, arrivals, starts, status, size, slots, gap_ns, aligned, fence,
    limit_ns)` as torch tensors and ints; it runs on torch's current stream.
    """
    fake = cute.runtime.make_fake_compact_tensor
    fan_out, bursts, producers = cute.sym_int(), cute.sym_int(), cute.sym_int()
    return cute.compile(
        BurstKernel(method),
        fake(Int64, (fan_out,), assumed_align=8),
        fake(Int64, (bursts, producers, RECORD_FIELDS), stride_order=(2, 1, 0), assumed_align=8),
        fake(Int64, (producers, CLOCK_FIELDS), stride_order=(1, 0), assumed_align=8),
        fake(Int32, (1,), assumed_align=4),
        fake(Int64, (bursts,), assumed_align=8),
        fake(Int32, (1,), assumed_align=4),
        Int32(16),
        Int32(1),
        Int32(0),
        Int32(0),
        Int32(0),
        Int64(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
