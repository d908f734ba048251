"""A kernel that sends a rank's rows and does nothing else: `send_sm90.Sender`, or `once_sm90.OnceSender`, a warp per CTA, beside a Linear-1
that stands still."""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.memory import SmemAllocator

from xstage.device import registers
from xstage.device.meeting import fake_words
from xstage.moe.layout import MOST_SLOTS, SLOT_BYTES, BufferLayout
from xstage.moe.once_sm90 import OnceSender
from xstage.moe.send_sm90 import Sender


class Send:
    def __init__(self, layout: BufferLayout):
        self.sender: Any = OnceSender(layout) if layout.once else Sender(layout)

    # The launch carries `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Send:
        return self

    @cute.jit
    def __call__(
        self, items: Int64, pairs: Int64, weights: Int64, x: Int64, x_scales: Int64, tile_end: Int64, control: cute.Tensor,
        call: cute.Tensor, rows: Int32, first: Int32, warps: Int32, ctas: Int32, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """The warps from `first` on of `warps`. tile_end, rows: of the rank, with padding; of `OnceSender` only."""
        self.kernel(items, pairs, weights, x, x_scales, tile_end, control, call, rows, first, warps).launch(
            grid=(ctas, 1, 1), block=[32, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, items: Int64, pairs: Int64, weights: Int64, x: Int64, x_scales: Int64, tile_end: Int64, control: cute.Tensor,
        call: cute.Tensor, rows: Int32, first: Int32, warps: Int32,
    ):  # fmt: skip
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, MOST_SLOTS)
        progress = smem.allocate_array(Int32, 1)
        slots = smem.allocate_array(Uint8, SLOT_BYTES, byte_alignment=128)
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(MOST_SLOTS):
                cute.arch.mbarrier_init(barriers + i, 1)
            registers.store_shared_32(Int32(progress.toint()), Int32(0))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        memory, pace = (Int32(slots.toint()), barriers), (Int32(progress.toint()), Int32(60), Int32(8))
        given, index = (items, pairs, weights, x, x_scales), first + cute.arch.block_idx()[0]
        if const_expr(self.sender.once):
            self.sender.run((*given, tile_end), (control, call), index, warps, memory, pace, rows)
        else:
            self.sender.run(given, call, index, warps, memory, pace)


@cache
def compiled_send(layout: BufferLayout) -> Any:
    """`Send`; its arguments are those of `Send.__call__`, without the stream."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Send(layout), *[Int64(0)] * 6, *fake_words(2), *[Int32(1)] * 4, stream, options="--enable-tvm-ffi")
