"""A kernel that decodes FP4 and does nothing else: thread t takes `words` words and one shift."""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from xstage.device.fp4 import decode, magnitudes, normal_magnitudes
from xstage.device.loads import load_4, load_16
from xstage.device.stores import store_16

THREADS = 64


class Decode:
    """words: of a thread, a multiple of 4. normal: shifts are −5 … 6."""

    def __init__(self, words: int, normal: bool) -> None:
        self.words, self.table = words, normal_magnitudes if normal else magnitudes

    @cute.jit
    def __call__(self, source: cute.Tensor, shifts: cute.Tensor, out: cute.Tensor, ctas: Int32, stream: cuda.CUstream) -> None:
        """source: int32 [threads, words]. shifts: int32 [threads]. out: int32 [threads, 2 · words]."""
        self.kernel(source, shifts, out).launch(grid=(ctas, 1, 1), block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, shifts: cute.Tensor, out: cute.Tensor) -> None:
        thread = Int64(cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0])
        low, high = self.table(load_4(shifts.iterator.toint() + thread * 4))
        from_, to = source.iterator.toint() + thread * (4 * self.words), out.iterator.toint() + thread * (8 * self.words)
        for i in cutlass.range_constexpr(self.words // 4):
            a, b, c, d = (decode(word, low, high) for word in load_16(from_ + 16 * i))
            store_16(to + 32 * i, *a, *b)
            store_16(to + 32 * i + 16, *c, *d)


@cache
def compiled_decode(words: int, normal: bool = False) -> Any:
    """Its arguments are those of `Decode.kernel`."""
    tensors = [make_fake_tensor(Int32, (1,), stride=(1,), assumed_align=16) for _ in range(3)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Decode(words, normal), *tensors, Int32(1), stream, options="--enable-tvm-ffi")
