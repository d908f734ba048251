"""A kernel that reads the clocks of every SM: run before and after a region of a stream, it gives the region's mean SM clock
(`bench.timing.mean_clock_mhz`).

A CTA is one warp and writes a row of its own: which SM it is on, `%clock64`, `%globaltimer`. So cycles and time of a row were read
together, however the CTAs fell; two CTAs per SM on an idle GPU leave no SM out that matters to a median.

Not covered: what a single SM did; regions so short that the timer's step counts (32 ns on the GPUs measured so far).
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int64

from xstage.device.clock import now_ns, ticks

FIELDS = 3  # SM, cycles, nanoseconds
CTAS_PER_SM = 2


class ClockKernel:
    """One warp per CTA; lane 0 reads."""

    @cute.jit
    def __call__(self, reads: cute.Tensor, stream: cuda.CUstream) -> None:
        """reads: int64 (CTAs, FIELDS)."""
        self.kernel(reads).launch(grid=(reads.shape[0], 1, 1), block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, reads: cute.Tensor):
        cta = cute.arch.block_idx()[0]
        if cute.arch.thread_idx()[0] == 0:
            cycles, time = ticks(), now_ns()
            reads[(cta, 0)] = Int64(cute.arch.smid())
            reads[(cta, 1)] = cycles
            reads[(cta, 2)] = time


@cache
def compiled_clock_kernel() -> Any:
    """For sm_90a; compiling needs no GPU. Call it with an int64 tensor (CTAs, FIELDS); it runs on torch's current stream."""
    reads = cute.runtime.make_fake_compact_tensor(Int64, (cute.sym_int(), FIELDS), stride_order=(1, 0), assumed_align=8)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(ClockKernel(), reads, stream, options="--enable-tvm-ffi")
