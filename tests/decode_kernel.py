"""Kernels that decode tiles of MXFP4 and do nothing else: as the grouped GEMM's decoding warps do, from and to shared memory, and as the
math warps of a swapped one do, into registers."""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from xstage.device import registers
from xstage.device.loads import load_4
from xstage.device.stores import store_4
from xstage.moe.decode_sm90 import HALF_BYTES, decode_operand, decode_tile, load_ahead
from xstage.moe.mxfp4 import TILE_BYTES, TILE_CODE_BYTES

THREADS, OPERAND_THREADS = 128, 256


class DecodeTiles:
    @cute.jit
    def __call__(self, tiles: cute.Tensor, out: cute.Tensor, ctas: Int32, stream: cuda.CUstream) -> None:
        """tiles: uint8 [ctas, TILE_BYTES]. out: uint8 [ctas, 128 · 128], what lies in shared memory afterwards."""
        self.kernel(tiles, out).launch(grid=(ctas, 1, 1), block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tiles: cute.Tensor, out: cute.Tensor) -> None:
        thread, block = cute.arch.thread_idx()[0], Int64(cute.arch.block_idx()[0])
        memory = SmemAllocator()
        target = Int32(memory.allocate_array(Uint8, HALF_BYTES, byte_alignment=1024).toint())
        source = load_tile(memory, tiles, thread, block, THREADS)
        decode_tile(source, target, thread, *load_ahead(source, thread))
        cute.arch.sync_threads()
        for at in cutlass.range(thread * 4, HALF_BYTES, THREADS * 4, unroll=1):
            store_4(out.iterator.toint() + block * HALF_BYTES + at, registers.load_shared_32(target + at))


@cute.jit
def load_tile(memory: Any, tiles: cute.Tensor, thread: Any, block: Any, threads: cutlass.Constexpr[int]) -> Int32:
    """Tile `block` in shared memory."""
    source = Int32(memory.allocate_array(Uint8, TILE_BYTES, byte_alignment=128).toint())
    for at in cutlass.range(thread * 4, TILE_BYTES, threads * 4, unroll=1):
        registers.store_shared_32(source + at, load_4(tiles.iterator.toint() + block * TILE_BYTES + at))
    cute.arch.sync_threads()
    return source


class DecodeOperand:
    @cute.jit
    def __call__(self, tiles: cute.Tensor, out: cute.Tensor, ctas: Int32, stream: cuda.CUstream) -> None:
        """tiles: uint8 [ctas, TILE_BYTES]. out: uint8 [ctas, threads, 64]: 16 words of each thread of two warpgroups."""
        self.kernel(tiles, out).launch(grid=(ctas, 1, 1), block=[OPERAND_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tiles: cute.Tensor, out: cute.Tensor) -> None:
        thread, block = cute.arch.thread_idx()[0], Int64(cute.arch.block_idx()[0])
        source = load_tile(SmemAllocator(), tiles, thread, block, OPERAND_THREADS)
        words = cute.make_rmem_tensor((16,), Int32)
        row = thread // 32 * 16 + thread % 32 // 4
        decode_operand(source + row * 16 + thread % 4 * 4, source + TILE_CODE_BYTES + row * 4, words)
        for i in cutlass.range_constexpr(16):
            store_4(out.iterator.toint() + (block * OPERAND_THREADS + thread) * 64 + 4 * i, words[i])


@cache
def compiled_decode_operand() -> Any:
    """Its arguments are those of `DecodeOperand.kernel`."""
    return _compiled(DecodeOperand())


@cache
def compiled_decode_tiles() -> Any:
    """Its arguments are those of `DecodeTiles.kernel`."""
    return _compiled(DecodeTiles())


def _compiled(kernel: Any) -> Any:
    tensors = [make_fake_tensor(Uint8, (16,), stride=(1,), assumed_align=16) for _ in range(2)]
    return cute.compile(kernel, *tensors, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi")
