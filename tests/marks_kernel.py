"""A kernel whose roles leave marks (`spans_sm90`) and do nothing else: two math warpgroups, and a warp that loads."""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from xstage.moe import spans_sm90
from xstage.moe.spans import END, HALF_END, HALF_START, MAIN_END, WAIT_END


@cute.kernel
def kernel(records: cute.Tensor, capacity: Int32, tiles: Int32):
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    state = Int32(SmemAllocator().allocate_array(Int64, spans_sm90.STATE_WORDS).toint())
    if thread == 0:
        spans_sm90.start(state, records.iterator.toint(), capacity, block)
    cute.arch.sync_threads()
    if thread < 256:
        for tile in cutlass.range(tiles, unroll=1):
            spans_sm90.begin(state, spans_sm90.MATH, block * 16 + tile << 12)
            spans_sm90.mark(state, spans_sm90.MATH, HALF_START)
            spans_sm90.mark(state, spans_sm90.MATH, HALF_END)
            spans_sm90.mark(state, spans_sm90.MATH, MAIN_END)
            spans_sm90.close(state, spans_sm90.MATH, END, capacity)
    else:
        for tile in cutlass.range(tiles, unroll=1):
            spans_sm90.begin(state, spans_sm90.LOADS, block * 16 + tile << 12 | 1 << 11)
            spans_sm90.close(state, spans_sm90.LOADS, WAIT_END, capacity)


@cute.jit
def launch(records: cute.Tensor, capacity: Int32, tiles: Int32, ctas: Int32, stream: cuda.CUstream) -> None:
    kernel(records, capacity, tiles).launch(grid=(ctas, 1, 1), block=[288, 1, 1], stream=stream)


@cache
def compiled_marks() -> Any:
    """Its arguments are those of `kernel`."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    records = make_fake_tensor(Int32, (1,), stride=(1,), assumed_align=16)
    return cute.compile(launch, records, Int32(1), Int32(1), Int32(1), stream, options="--enable-tvm-ffi")
