"""In place of a layer's GEMMs: a kernel that sends back, for every row that arrived, values that tell the row's bytes and its expert.

value(byte, expert) has the bf16 bits 0x3F80 + byte + (expert % 8 << 7): a number from 1 on, another one for every byte.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64

from xstage.device.loads import load_8
from xstage.device.meeting import fake_words
from xstage.device.stores import store_16
from xstage.moe.exchange import Exchange
from xstage.moe.plan_sm90 import TILES, fake_int32


class Echo:
    def __init__(self, hidden: int):
        self.hidden = hidden

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Echo:
        return self

    @cute.jit
    def __call__(
        self, activations: Int64, tile_expert: cute.Tensor, totals: cute.Tensor, row_slot: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        self.kernel(activations, tile_expert, totals, row_slot).launch(grid=(tile_expert.shape[0], 1, 1), block=[256, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, activations: Int64, tile_expert: cute.Tensor, totals: cute.Tensor, row_slot: cute.Tensor):
        thread, tile = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = thread // 32, thread % 32
        if tile < totals[TILES]:
            base = 0x3F80 + (tile_expert[tile] % 8 << 7)
            for i in cutlass.range(16, unroll=1):
                row = tile * 128 + warp * 16 + i
                slot = row_slot[row]
                if slot != 0:
                    for piece in cutlass.range(lane, self.hidden // 8, 32, unroll=1):
                        eight = load_8(activations + Int64(row) * self.hidden + piece * 8)
                        words = [self.word(eight, j, base) for j in range(4)]
                        store_16(slot + piece * 16, *words)

    def word(self, eight: Int64, j: int, base: Int32) -> Int32:
        low, high = (Int32((eight >> (8 * (2 * j + k))) & 0xFF) + base for k in range(2))
        return low | high << 16


@cache
def compiled(hidden: int) -> Any:
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Echo(hidden), Int64(0), *fake_int32(2), *fake_words(1), stream, options="--enable-tvm-ffi")


def echo(exchange: Exchange) -> None:
    """Launch between `dispatch` and `combine`."""
    kernel = compiled(exchange.layout.hidden)
    kernel(exchange.activations.data_ptr(), exchange.tile_expert, exchange.totals, exchange.row_slot)


def expected(rows: torch.Tensor, topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """What `combine` gives then: bf16 [tokens, hidden], from the e4m3 `rows` [tokens, hidden] and int64 `topk_idx`."""
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for pick in range(topk_idx.shape[1]):
        expert = topk_idx[:, pick, None]
        bits = 0x3F80 + rows.view(torch.uint8).to(torch.int32) + (expert % (experts // ranks) % 8 << 7)
        value = bits.to(torch.int16).view(torch.bfloat16).float()
        total += torch.where((expert >= 0) & (expert < experts), value, 0.0)
    return total.to(torch.bfloat16)
