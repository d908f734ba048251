"""The math warps of a swapped grouped GEMM (`gemm_sm90`): products transposed, the weight decoded straight into wgmma's registers.

For experts of few rows, with weights in MXFP4. A tile is 256 columns of the output × up to 64 rows, and what is multiplied is W · Aᵀ: the
weight's rows are the operand that wgmma takes from registers, the tile's rows the one from shared memory, as narrow as the tile is
(`WIDTHS`). So codes go from shared memory into the registers where they are multiplied and never back, the matrix unit does little more
than it must, and nobody waits for anybody within a stage: four math warps on each scheduler hide one another's waits. While a stage's
products are under way a warp decodes the next one, where it has registers for both.

A thread (lane 4 a + q of warp w of math warpgroup g) has rows 64 g + 16 w + a and + 8 of the weight's 256, of each one word of codes per 32
of K (`mxfp4.to_words`), and sums of these two for the tile's rows 8 j + 2 q, + 1. The weight's rows are mixed for the other forms
(`quantize.interleave_gate_up`, `thread_order`), in which they are columns of sums; here that puts gate and up of one output into one
thread, and 8 bytes of a Linear-2 row into two neighbours.

Sums go to shared memory turned back: Linear-1's as the store warp of the other forms finds them, Linear-2's row by row, which warps then
store 512 bytes at a time, each row to its address in the table. An output's scale is that of 128 columns, of which every warp has some:
they take the largest in shared memory.

Not covered: more than 64 rows at once, spans.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from xstage.device import registers, stores
from xstage.device.floats import as_bits, as_float, finite_magnitude, finite_or_nan, pack_bf16
from xstage.moe import decode_sm90
from xstage.moe.epilogues import scale_of
from xstage.moe.loads_sm90 import CLUSTER, ROW_BLOCK, words_of
from xstage.moe.mxfp4 import TILE_BYTES, TILE_CODE_BYTES
from xstage.moe.work_table import COLUMN_MASK, LAYER_SHIFT, ROW_SHIFT, encoded

GROUPS = 4  # that multiply; a fifth loads
THREADS, MATH_THREADS = 128 * (GROUPS + 1), 128 * GROUPS
MATH_REGISTERS, LOAD_REGISTERS = 112, 32  # of 640 threads each starts with 96: 128 · (4 · 112 + 32)
ROWS = 64
WIDTHS = (8, 16, 24, 32, 48, 64)  # rows that are multiplied at once
AHEAD_WIDTH = 32  # up to which there are registers for a second stage's weight
ROW_BYTES = 512 + 16  # of a Linear-2 row in shared memory: so eight rows' pieces of 16 bytes lie in eight groups of banks
STAGING_BYTES = ROWS * ROW_BYTES
TOPS = 3 * ROWS  # words for largest magnitudes
MATH, STAGED, FREE = 1, 3, 5  # named barriers: of the math threads; of these and the store warp, as in `epilogues`


class _Tile:
    """What the stages of one tile share.

    width: rows that are multiplied. mmas: wgmma that starts a sum, that goes on. rows: their operand, of every stage. words, weights: the
    other operand twice, as written and as read. total, product: sums. column: of the weight's first scale in a stage, step: to the
    second, in bytes.
    """

    def __init__(self, width: int, mmas: Any, rows: Any, column: Any, step: Any) -> None:
        self.width, self.mmas, self.column, self.step = width, mmas, column, step
        self.ahead = width <= AHEAD_WIDTH
        slice_ = mmas[0].get_slice(0)
        self.rows = mmas[0].make_fragment_B(slice_.partition_B(rows))
        shape = slice_.partition_shape_C((64, width))
        self.total, self.product = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        self.total.fill(0.0)
        layout = mmas[0].make_fragment_A(slice_.partition_shape_A((64, 128))).layout
        self.words = [cute.make_rmem_tensor((16,), Int32) for _ in range(2)]
        self.weights = [cute.make_tensor(cute.recast_ptr(word.iterator, dtype=Float8E4M3FN), layout) for word in self.words]

    # Branches at run time carry it as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> _Tile:
        return self


class SwappedMath:
    """The part of `GroupedGemm` that a swapped kernel has instead of `_multiply`; what the attributes mean stands there.

    Set by `_multiply_swapped`: group, warp, a, q: which thread it is, see the module. memory: shared addresses of Linear-1's staging, of
    Linear-2's, of `TOPS` words; codes_at, below_at: of the thread's first word and first distance in the first stage; scales_at: of
    its scales. full: mbarriers; free: of those that say that a stage is free, where the thread arrives.
    """

    epilogues: Any
    stages: int
    scales: int
    word: int
    few: int

    @cute.jit
    def _multiply_swapped(self, sources, targets, products, rows, codes, s_scales, rings, memory, handed) -> None:
        """products: per width wgmma of W · Aᵀ, that starts a sum and that goes on. rows: per width the stages' rows."""
        cute.arch.setmaxregister_increase(MATH_REGISTERS)
        for start, go_on in products:
            start.set(warpgroup.Field.ACCUMULATE, False)
            go_on.set(warpgroup.Field.ACCUMULATE, True)
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        group = cute.arch.make_warp_uniform(thread // 128)
        self.group = group - Int32(group > 2)  # 0, 1, 3, 4: the one between loads
        self.warp = cute.arch.make_warp_uniform(thread // 32 % 4)
        self.a, self.q = lane // 4, lane % 4
        row = self.group % 2 * 64 + self.warp * 16 + self.a
        tile = codes + self.group // 2 * TILE_BYTES
        self.codes_at, self.below_at = tile + row * 16 + self.q * 4, tile + TILE_CODE_BYTES + row * 4
        self.scales_at, self.memory, self.handed = Int32(s_scales.iterator.toint()), memory, handed
        self.full, self.free = rings[0], stores.cluster_address(Int32(rings[1].toint()), lane % CLUSTER)
        if self.group == 0:
            registers.store_shared_32(memory[2] + thread * 4, Int32(0))
        self._meet()
        words = words_of(s_scales)
        base, phase, staged, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(self.full + base, phase)
        word = words[self.word, base]
        while word >= 0:
            layer, count = (word >> LAYER_SHIFT) & 1, words[self.few, base] * ROW_BLOCK
            rounds = Int32(sources[0][-2])
            if layer == 1:
                rounds = Int32(sources[1][-2])
            for i in cutlass.range_constexpr(len(WIDTHS)):
                if (count > (WIDTHS[i - 1] if i else 0)) & (count <= WIDTHS[i]):
                    base, phase = self._tile_swapped(WIDTHS[i], products[i], rows[i], targets, word, rounds // 2, base, phase, staged, turn)
            staged = layer ^ 1
            turn = Int32(cutlass.select_(turn + staged == 3, Int32(0), turn + staged))
            cute.arch.mbarrier_wait(self.full + base, phase)
            word = words[self.word, base]
        if staged == 1:
            self._await_free()
        self._hand_swapped(Int32(-1))

    @cute.jit
    def _tile_swapped(
        self, width: cutlass.Constexpr[int], mmas, rows, targets, word, rounds, base, phase, staged, turn
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """A tile of at most `width` rows: all of its stages, then its layer's epilogue. Returns the stage after it, and its phase."""
        m, n, layer = word >> ROW_SHIFT, (word >> 1) & COLUMN_MASK, (word >> LAYER_SHIFT) & 1
        # Gate and up have a scale each and take turns; of Linear-2 each half of the columns has one. Not in a uniform register, where it
        # would have to be brought anew for every stage.
        column = (self.word - 4 + n % 2 * 2 + layer * (self.group // 2)) * 4 + stores.zero_anew()
        tile = _Tile(width, mmas, rows, column, (1 - layer) * 4)
        if self.group == 0:
            self._warm(targets, layer, m * ROWS + self.warp % 2 * 32 + cute.arch.lane_idx())
        if const_expr(tile.ahead):
            self._decode(tile.words[0], base, phase)
            for _ in cutlass.range(rounds - 1, unroll=1):
                base, phase = self._two_stages(tile, True, base, phase)
            base, phase = self._two_stages(tile, False, base, phase)
        else:
            for _ in cutlass.range(rounds, unroll=1):
                base, phase = self._two_stages(tile, False, base, phase)
        if staged == 1:
            self._await_free()
        if layer == 1:
            self._rows_swapped(tile, targets[1], m, n)
        else:
            self._swiglu_swapped(tile, targets[0], turn, m, n)
            self._hand_swapped(encoded(m, n, word & 1))
        return base, phase

    @cute.jit
    def _warm(self, targets, layer, row) -> None:
        """Ask for what the epilogue will read of a row, before stores fill the way to memory."""
        if layer == 1:
            stores.prefetch_l1(targets[1].iterator.toint() + 8 * Int64(row))
        else:
            stores.prefetch_l1(targets[0][4].iterator.toint() + 4 * Int64(row))

    @cute.jit
    def _two_stages(self, tile, more: cutlass.Constexpr[bool], base, phase) -> tuple[Int32, Int32]:
        """Two stages of the ring, `base` is even. more: they are not the tile's last, so the next one may be decoded ahead.

        Not more than that tile's: the next one may have to wait for this one.
        """
        after, next_phase = base + 2, phase
        if after == self.stages:
            after = Int32(0)
            next_phase = phase ^ 1
        for i in cutlass.range_constexpr(2):
            turn = i if const_expr(tile.ahead) else 0
            if const_expr(not tile.ahead):
                self._decode(tile.words[0], base + i, phase)
            warpgroup.fence()
            for k in cutlass.range_constexpr(4):
                mma = tile.mmas[min(k, 1)]
                cute.gemm(mma, tile.product, tile.weights[turn][(None, None, k)], tile.rows[(None, None, k, base + i)], tile.product)
            warpgroup.commit_group()
            if const_expr(tile.ahead and i == 0):
                self._decode(tile.words[1], base + 1, phase)
            elif const_expr(tile.ahead and more):
                self._decode(tile.words[0], after, next_phase)
            self._add_swapped(tile, base + i)
        return after, next_phase

    @cute.jit
    def _decode(self, words, stage, phase) -> None:
        """A thread's part of a stage, once it is there."""
        cute.arch.mbarrier_wait(self.full + stage, phase)
        at = stage * (2 * TILE_BYTES)
        decode_sm90.decode_operand(self.codes_at + at, self.below_at + at, words)

    @cute.jit
    def _add_swapped(self, tile, stage) -> None:
        """Once the stage's products are there, they are added to the sums, and the stage is free."""
        scales = self.scales_at + stage * (self.scales * 4)
        columns = [as_float(registers.load_shared_32(scales + tile.column + h * tile.step)) for h in range(2)]
        pairs = []
        if const_expr(tile.ahead):
            pairs = [self._row_scales(scales, j) for j in range(tile.width // 8)]
        warpgroup.wait_group(0)
        for j in cutlass.range_constexpr(tile.width // 8):
            pair = pairs[j] if const_expr(tile.ahead) else self._row_scales(scales, j)
            for e in cutlass.range_constexpr(2):
                for h in cutlass.range_constexpr(2):
                    at = _at(e, h, j)
                    tile.total[at] = tile.total[at] + pair[e] * columns[h] * tile.product[at]
        if cute.arch.lane_idx() < CLUSTER:  # the slot was filled from both CTAs, so both must know that it is free
            stores.arrive_cluster(self.free + stage * 8)

    def _row_scales(self, scales: Int32, j: int) -> tuple[Float32, ...]:
        """Of the tile's rows 8 j + 2 q, + 1."""
        return tuple(as_float(word) for word in registers.load_shared_64(scales + (j * 8 + self.q * 2) * 4))

    @cute.jit
    def _meet(self) -> None:
        cute.arch.barrier(barrier_id=MATH, number_of_threads=MATH_THREADS)

    @cute.jit
    def _await_free(self) -> None:
        """Until the store warp has read what was handed to it."""
        cute.arch.barrier(barrier_id=FREE, number_of_threads=MATH_THREADS + 32)

    @cute.jit
    def _hand_swapped(self, word) -> None:
        """Which Linear-1 tile is staged, to the store warp; −1: there are no more."""
        if self.group == 0:
            registers.store_shared_32(self.handed, word)
        cute.arch.barrier_arrive(barrier_id=STAGED, number_of_threads=MATH_THREADS + 32)

    @cute.jit
    def _swiglu_swapped(self, tile, target, turn, m, n) -> None:
        """`epilogues.SwigluFp8` of these sums.

        Of three times 64 words for largest magnitudes this tile's, `turn`, are zeros, as the next one's are once everybody has met; those
        of the tile before may still be read.
        """
        lane, odd = cute.arch.lane_idx(), self.a % 2 == 1
        tops = self.memory[2] + turn * (4 * ROWS)
        if self.group == 0:
            following = self.memory[2] + Int32(cutlass.select_(turn == 2, Int32(0), turn + 1)) * (4 * ROWS)
            registers.store_shared_32(following + (self.warp * 32 + lane) % ROWS * 4, Int32(0))
        for j in cutlass.range_constexpr(tile.width // 8):
            for e in cutlass.range_constexpr(2):
                value = as_bits(self.epilogues[0].swiglu(tile.total[_at(e, 0, j)], tile.total[_at(e, 1, j)]))
                tile.total[_at(e, 0, j)] = as_float(finite_or_nan(value))  # and leaves its neighbours' scale alone
                largest = finite_magnitude(value)
                for mask in (4, 8, 16):
                    largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, mask))
                if lane < 4:
                    registers.max_shared(tops + (j * 8 + self.q * 2 + e) * 4, largest)
        self._meet()
        row = self.warp * 32 + lane
        if (self.group == 0) & (row < tile.width):
            target[3][n, m * ROWS + row] = _scale(tops + row * 4) * target[4][m * ROWS + row]
        column = self.group * 32 + self.warp // 2 * 16 + self.a // 2 * 4 + self.warp % 2 * 2  # of this thread and its neighbour
        for j in cutlass.range_constexpr(tile.width // 8):
            row = j * 8 + self.q * 2 + self.a % 2
            inverse = Float32(1.0) / _scale(tops + row * 4)
            left, right = (as_float(word) for word in _in_pairs(odd, *(as_bits(tile.total[_at(e, 0, j)]) for e in range(2))))
            at = self.memory[0] + row * 128 + ((column // 16) ^ (row % 8)) * 16 + column % 16
            registers.store_e4m3_pair(at, left * inverse, right * inverse)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def _rows_swapped(self, tile, addresses, m, n) -> None:
        """`epilogues.RowsToSlots` of these sums."""
        odd, staging, lane = self.a % 2 == 1, self.memory[1], cute.arch.lane_idx()
        self._meet()  # the tile before has left
        column = self.group * 64 + self.warp // 2 * 32 + self.a // 2 * 8 + self.warp % 2 * 4  # and three more, of both in turns
        for j in cutlass.range_constexpr(tile.width // 8):
            row = j * 8 + self.q * 2 + self.a % 2
            left, right = _in_pairs(odd, *(pack_bf16(*(tile.total[_at(e, h, j)] for h in range(2))) for e in range(2)))
            words = (cute.arch.prmt(left, right, selector) for selector in (0x5410, 0x7632))
            registers.store_shared_64(staging + row * ROW_BYTES + column * 2, *words)
        self._meet()
        for i in cutlass.range_constexpr(-(-tile.width // 16)):
            row, address = i * 16 + self.group * 4 + self.warp, Int64(0)
            if row < tile.width:
                address = addresses[m * ROWS + row]
            if address != 0:
                piece = registers.load_shared_128(staging + row * ROW_BYTES + lane * 16)
                stores.store_16(address + Int64(n * 512 + lane * 16), *piece)


def _at(e: int, h: int, j: int) -> int:
    """Of a thread's sums: the tile's row 8 j + 2 q + e, the weight's row a + 8 h."""
    return e + 2 * h + 4 * j


def _scale(top: Int32) -> Float32:
    """Of 128 columns, by the bits of their largest magnitude at a shared address."""
    return scale_of(as_float(registers.load_shared_32(top)))


def _in_pairs(odd: Any, first: Int32, second: Int32) -> tuple[Int32, Int32]:
    """Results of this thread and its neighbour, the even one's first: of the first of two rows if this is the even one, else the second."""
    own, other = (Int32(cutlass.select_(odd, *pair)) for pair in ((second, first), (first, second)))
    other = cute.arch.shuffle_sync_bfly(other, 4)
    return Int32(cutlass.select_(odd, other, own)), Int32(cutlass.select_(odd, own, other))
