"""A kernel that sends a rank's rows and does nothing else: `send_sm90.Sender` with one warp per CTA."""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from xstage.device.meeting import fake_words
from xstage.moe.layout import BufferLayout
from xstage.moe.send_sm90 import Sender


class Send:
    def __init__(self, layout: BufferLayout):
        self.sender = Sender(layout)

    # The launch carries `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Send:
        return self

    @cute.jit
    def __call__(
        self, items: Int64, pairs: Int64, weights: Int64, x: Int64, x_scales: Int64, call: cute.Tensor, ctas: Int32, stream: cuda.CUstream
    ) -> None:
        self.kernel(items, pairs, weights, x, x_scales, call).launch(grid=(ctas, 1, 1), block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, items: Int64, pairs: Int64, weights: Int64, x: Int64, x_scales: Int64, call: cute.Tensor):
        self.sender.run((items, pairs, weights, x, x_scales), call, cute.arch.block_idx()[0], cute.arch.grid_dim()[0])


@cache
def compiled_send(layout: BufferLayout) -> Any:
    """`Send`; its arguments are those of `Send.__call__`, without the stream."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Send(layout), *[Int64(0)] * 5, *fake_words(1), Int32(1), stream, options="--enable-tvm-ffi")
