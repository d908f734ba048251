"""What becomes of a tile's sums: the part of the grouped GEMM that differs between its uses.

Each part works on one half of a tile, 128 columns, at a time: a math warpgroup holds 64 rows × 128 columns in the layout of wgmma, where
a thread has columns 8 j + 2 q, + 1 (q: its place among four) of two rows that are 8 apart. Staging in shared memory turns that into
pieces of 16 bytes; the pieces of a row are swapped by its number (the 128-byte swizzle of the copy engine), so that eight rows meet no
common bank.

* `Plain`: bf16 [rows, N], stored by the copy engine.
* `SwigluFp8`: silu(gate) · up · routing weight, in fp8 with a scale per row and 128 columns; the weight is a factor of the scale. N
  holds gate and up as `quantize.interleave_gate_up` mixes them: 256 columns are the gate and up of 128 outputs, and a thread has four
  outputs in a row. silu(g) = h + h · tanh(h) with h = g / 2: one special-function instruction instead of two, and its error of 2⁻¹¹ is far
  below fp8's.
* `RowsToSlots`: bf16 rows, each to the address in a table, local or a peer's, by 16-byte stores of the math warps, from registers. The
  weight's rows are mixed so that this is possible; a warp stores its own 16 rows, and waits for nobody.

Not covered: float32 results, bulk-engine stores of rows.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from xstage.device import registers, stores
from xstage.device.floats import as_float, pack_bf16
from xstage.device.stores import load_shared, prefetch_l1, store_16
from xstage.moe.work_table import decoded, encoded

E4M3_MAX, SMALLEST_SCALE = 448.0, 2.0**-126
_KINDS = warpgroup.SmemLayoutAtomKind
MATH, STAGED, FREE = 1, 3, 5  # named barriers, each of two warpgroups


class Epilogue:
    """What the parts have in common. `staging_bytes` of shared memory are theirs.

    split: half i is not 128 columns of row tile m, but of row tile m + i the 128 columns that this CTA has, the first or the second of the
    tile (`member`); where row tile m is alone (`single`), half 1 is of nothing and goes nowhere. `real`: which halves have any row of this
    warpgroup; the sums of the others are zeros.

    alternating: column blocks of 8 take turns in having the first and the second scale of the tile (gate and up); else the first
    128 columns have the first, the others the second. groups: of 64 rows, one per math warpgroup; row tiles m count groups · 64 rows.
    handing: threads that meet where a group's staging is handed to the store warp, that warp and those who write it.
    """

    staging_bytes = 32 * 1024
    alternating = False
    groups = 2
    handing = 160
    split = False
    # Of a split kernel, at run time: its CTA, whether the row tile is alone, memory and mbarriers for what the CTAs tell each other.
    member: Any = 0
    single: Any = 0
    real: Any = None
    largest: Any = None
    exchanged: Any = None

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        return self

    def descriptors(self, outputs: Any) -> Any:
        """On the host: what the kernel is given of `outputs`."""
        return outputs

    def begin(self, staging: Any, thread: Int32, outputs: Any, handed: Int32) -> None:
        """Before the first tile, in every math thread. handed: shared address of a word, for `SwigluFp8`."""
        self.outputs, self.staging, self.word = outputs, staging, handed
        self.base = Int32(staging.data_ptr().toint())
        self.group = cute.arch.make_warp_uniform(thread // 128)
        self.lane, self.leads = thread % 32, cute.arch.make_warp_uniform(thread // 32) % 4 == 0
        self.row = thread % 128 // 32 * 16  # first row of this warp among the 64 of its warpgroup

    def warm(self, m: Int32) -> None:
        """At the start of a tile: ask for what `half` will read, before stores fill the way to memory."""

    def half(self, i: cutlass.Constexpr[int], first: cute.Tensor, second: cute.Tensor, m: Int32, n: Int32) -> None:
        """Columns 256 n + 128 i … of row tile m, or as `split` says; leaves the sums zeroed for the next tile after i = 1."""

    def _tile_row(self, m: Int32, i: int) -> Int32:
        """First row of this warpgroup in half i."""
        if self.split:
            return (m + i) * 128 + self.group * 64
        return m * (64 * self.groups) + self.group * 64

    def _column(self, i: int) -> Any:
        """Which 128 of the tile's columns half i has."""
        return self.member if self.split else i

    def end(self) -> None:
        """After the last tile."""

    @cute.jit
    def _meet(self) -> None:
        cute.arch.barrier(barrier_id=MATH + self.group, number_of_threads=128)


class Plain(Epilogue):
    """outputs: bf16 [rows, N]."""

    def descriptors(self, outputs: cute.Tensor) -> Any:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return _descriptor(cute.tile_to_shape(atom, (64, 64, 4), (0, 1, 2)), outputs, (64, 64))

    def begin(self, staging: Any, thread: Int32, outputs: Any, handed: Int32) -> None:
        Epilogue.begin(self, staging, thread, outputs, handed)
        self.source, self.target = _boxes(staging, BFloat16, outputs, (64, 64))

    @cute.jit
    def half(self, i: cutlass.Constexpr[int], first: cute.Tensor, second: cute.Tensor, m: Int32, n: Int32) -> None:
        sums = second if const_expr(i == 1) else first
        if self.leads:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self._meet()
        self._stage_bf16(sums)
        sums.fill(0.0)
        cute.arch.fence_view_async_shared()
        self._meet()
        if self.leads:
            for c in cutlass.range_constexpr(2):
                box = (None, m * 2 + self.group, n * 4 + i * 2 + c)
                cute.copy(self.outputs[0], self.source[(None, self.group * 2 + c)], self.target[box])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def end(self) -> None:
        if self.leads:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _stage_bf16(self, sums: cute.Tensor) -> None:
        """This warp's 16 rows to shared memory as bf16: two boxes of [64 rows, 64 columns] per warpgroup."""
        lane, row = self.lane, self.row + self.lane % 16
        for pair in cutlass.range_constexpr(8):
            at = [((r, 2 * pair + j), 0, 0) for j in range(2) for r in range(2)]
            words = [pack_bf16(sums[((0, *first), *rest)], sums[((1, *first), *rest)]) for first, *rest in at]
            registers.store_matrices(self._piece(row, 2 * pair + lane // 16), *words)

    @cute.jit
    def _piece(self, row: Int32, column: Int32) -> Int32:
        """Shared address of 16 bytes: row of the warpgroup, column in units of 8 elements."""
        return self.base + self.group * 16384 + column // 8 * 8192 + row * 128 + ((column % 8) ^ (row % 8)) * 16


class SwigluFp8(Epilogue):
    """outputs: (uint8 [rows, N / 2], float32 scales [N / 256, rows], float32 routing weight [rows]).

    clamp: gate is bounded above and up on both sides by it; None: neither. handed: staged tiles are handed to a store warp, which
    calls `await_staged` and `store_staged` until there are no more; the math warps call `await_free` before they stage again, and
    `no_more` at the end.
    A word in shared memory says which tile is staged, and in its lowest bit, of a split tile whether it is a single one, else `last`: 1, or
    whether these are the last rows of 128.
    """

    alternating = True
    last: Any = 1
    turn: Any = 0  # of what is told, the place, and its phase
    flip: Any = 0

    def __init__(self, clamp: float | None = None, handed: bool = False) -> None:
        self.clamp, self.handed = clamp, handed

    @property
    def staging_bytes(self) -> int:  # type: ignore[override]
        return self.groups * 8 * 1024

    def descriptors(self, outputs: Any) -> Any:
        middle, scales, weight = outputs
        kind, box = (_KINDS.K_SW64, (64, 64)) if self.split else (_KINDS.K_SW128, (64, 128))
        atom = warpgroup.make_smem_layout_atom(kind, Uint8)
        boxes = cute.tile_to_shape(atom, (*box, self.groups * (2 if self.split else 1)), (0, 1, 2))
        return (*_descriptor(boxes, middle, box), scales, weight)

    def begin(self, staging: Any, thread: Int32, outputs: Any, handed: Int32) -> None:
        Epilogue.begin(self, staging, thread, outputs, handed)
        self.source, self.target = _boxes(staging, Uint8, outputs[:3], (64, 64 if self.split else 128))

    @cute.jit
    def warm(self, m: Int32) -> None:
        for i in cutlass.range_constexpr(2 if self.split else 1):
            prefetch_l1(self.outputs[4].iterator.toint() + 4 * Int64(self._row(m, 0, i)))

    @cute.jit
    def half(self, i: cutlass.Constexpr[int], first: cute.Tensor, second: cute.Tensor, m: Int32, n: Int32) -> None:
        sums = second if const_expr(i == 1) else first
        if const_expr(self.split):
            if self.real[i]:  # else they are zeros
                self._activate(sums)
        else:
            self._activate(sums)
        if const_expr(i == 1):
            self._finish(first, second, m, n)
            first.fill(0.0)
            second.fill(0.0)

    @cute.jit
    def _activate(self, sums: cute.Tensor) -> None:
        """SwiGLU; the result takes the gate's place."""
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(0, 16, 2):
                for e in cutlass.range_constexpr(2):
                    sums[((e, r, j), 0, 0)] = self.swiglu(sums[((e, r, j), 0, 0)], sums[((e, r, j + 1), 0, 0)])

    @cute.jit
    def end(self) -> None:
        if self.leads:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def await_staged(self) -> tuple[Int32, Int32, Int32]:
        """The store warp's part: the next tile that is staged, as row and column tile, −1: there are no more; and its lowest bit."""
        cute.arch.barrier(barrier_id=STAGED, number_of_threads=self.handing)
        return decoded(load_shared(self.word))

    @cute.jit
    def store_staged(self, m: Int32, n: Int32, last: Int32) -> None:
        """That tile, until its elements are in memory; its scales were written by the math warps."""
        for group in cutlass.range_constexpr(self.groups):
            if const_expr(group == 1):
                cute.arch.barrier(barrier_id=STAGED + group, number_of_threads=self.handing)
            if const_expr(self.split):
                cute.copy(self.outputs[0], self.source[(None, group * 2)], self.target[(None, m * 2 + group, n * 2 + self.member)])
                if last == 0:
                    box = (None, m * 2 + 2 + group, n * 2 + self.member)
                    cute.copy(self.outputs[0], self.source[(None, group * 2 + 1)], self.target[box])
            else:
                cute.copy(self.outputs[0], self.source[(None, group)], self.target[(None, m * self.groups + group, n)])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        for group in cutlass.range_constexpr(self.groups):
            cute.arch.barrier_arrive(barrier_id=FREE + group, number_of_threads=self.handing)
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def await_free(self) -> None:
        """Until the store warp has read what was handed to it."""
        cute.arch.barrier(barrier_id=FREE + self.group, number_of_threads=self.handing)

    @cute.jit
    def no_more(self) -> None:
        """After the last tile, when nothing that was handed over is still being read."""
        self._hand(Int32(-1))

    @cute.jit
    def _hand(self, word: Int32) -> None:
        """Which tile the first warpgroup has staged. The store warp reads it before it says that the staging is free."""
        if self.group == 0:
            registers.store_shared_32(self.word, word)
            cute.arch.barrier_arrive(barrier_id=STAGED, number_of_threads=self.handing)

    @cute.jit
    def _finish(self, first: cute.Tensor, second: cute.Tensor, m: Int32, n: Int32) -> None:
        """A scale per row of 128 columns, elements in fp8, and both on their way to memory."""
        if const_expr(not self.handed):
            self.end()
            self._meet()
        quarter = self.lane % 4
        # Where the CTAs split the columns a row tile in two, each sum is 64 columns of a row; else both together are 128.
        halves = ((first,), (second,)) if const_expr(self.split) else ((first, second),)
        weights = [self.outputs[4][self._row(m, r, i)] for i in range(len(halves)) for r in range(2)]
        tops = [self._largest(sums, r) for sums in halves for r in range(2)] if const_expr(self.split) else [Float32(0.0)] * 2
        if const_expr(self.split):
            tops = self._exchange(tops)
        for i in cutlass.range_constexpr(len(halves)):
            for r in cutlass.range_constexpr(2):
                largest = tops[2 * i + r] if const_expr(self.split) else self._largest(halves[i], r)
                scale = scale_of(largest)
                inverse = Float32(1.0) / scale
                row = self.row + self.lane // 4 + 8 * r
                for half, sums in enumerate(halves[i]):
                    for t in cutlass.range_constexpr(4):
                        values = [sums[((e, r, 4 * t + 2 * s), 0, 0)] * inverse for s in range(2) for e in range(2)]
                        if const_expr(self.split):
                            at = (self.group * 2 + i) * 4096 + row * 64 + (t ^ (row // 2 % 4)) * 16
                        else:
                            at = self.group * 8192 + row * 128 + ((4 * half + t) ^ (row % 8)) * 16
                        registers.store_shared_32(self.base + at + quarter * 4, registers.e4m3_quad(*values))
                if (quarter == 0) & ((i == 0) | (self.single == 0)):
                    self.outputs[3][n, self._row(m, r, i)] = scale * weights[2 * i + r]
        cute.arch.fence_view_async_shared()
        if const_expr(self.handed):
            self._hand(encoded(m, n, self.single if self.split else self.last))
            if self.group == 1:
                cute.arch.barrier_arrive(barrier_id=STAGED + 1, number_of_threads=self.handing)
        else:
            self._meet()
            if self.leads:
                cute.copy(self.outputs[0], self.source[(None, self.group)], self.target[(None, m * self.groups + self.group, n)])
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _largest(self, parts: Any, r: cutlass.Constexpr[int]) -> Float32:
        """Largest magnitude of row r of a thread's two in these sums, over the four threads that share it."""
        largest = Float32(0.0)
        for sums in parts:
            for j in cutlass.range_constexpr(0, 16, 2):
                for e in cutlass.range_constexpr(2):
                    largest = registers.max_magnitude(largest, sums[((e, r, j), 0, 0)])
        if largest == Float32.inf:  # what is not finite becomes NaN and leaves its neighbours' scale alone
            largest = Float32(0.0)
            for sums in parts:
                for j in cutlass.range_constexpr(0, 16, 2):
                    for e in cutlass.range_constexpr(2):
                        value = sums[((e, r, j), 0, 0)]
                        value = value + (value - value)
                        sums[((e, r, j), 0, 0)] = value
                        largest = registers.max_magnitude(largest, value)
        for mask in (1, 2):
            largest = registers.max_magnitude(largest, cute.arch.shuffle_sync_bfly(largest, mask))
        return largest

    @cute.jit
    def _exchange(self, tops: Any) -> Any:
        """The larger of these four rows' and the other CTA's, which has the other columns of the same rows.

        Two places and barriers per warpgroup take turns: the other CTA writes a place again only when it has this one's next ones.
        """
        thread = stores.thread_anew() % 128
        quarter = thread % 4
        top = tops[0]
        for q in cutlass.range_constexpr(1, 4):
            top = tops[q] if quarter == q else top
        place, barrier = self.largest + (self.turn * 2 + self.group) * 512, self.exchanged + self.turn * 2 + self.group
        if self.leads:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 512)
        stores.send_4(place + thread * 4, Int32(barrier.toint()), self.member ^ 1, top)
        cute.arch.mbarrier_wait(barrier, self.flip)
        others = registers.load_shared_128(place + thread // 4 * 16)
        return [registers.max_magnitude(tops[q], as_float(others[q])) for q in range(4)]

    @cute.jit
    def swiglu(self, gate: Float32, up: Float32) -> Float32:
        """silu(gate) · up, both bounded by the clamp."""
        if const_expr(self.clamp is not None):
            limit = Float32(self.clamp)
            gate = registers.minimum(gate, limit)
            up = registers.maximum(registers.minimum(up, limit), -limit)
        half = gate * 0.5
        return (half * registers.tanh(half) + half) * up

    def _row(self, m: Int32, r: int, i: int = 0) -> Int32:
        """A thread's row r of half i; of a single row tile the first half's again."""
        return self._tile_row(m, 0) + i * (1 - self.single) * 128 + self.row + self.lane // 4 + 8 * r


class RowsToSlots(Epilogue):
    """outputs: int64 [rows], the address of a row's N bf16 results; 0: nobody wants it.

    The weight's rows lie in `quantize.thread_order`, so that a thread has 16 contiguous bytes of a row, four threads 64. Threads of two
    neighbouring rows swap pieces, and every instruction stores 128 contiguous bytes of four rows.
    """

    staging_bytes = 1024

    @cute.jit
    def warm(self, m: Int32) -> None:
        for i in cutlass.range_constexpr(2 if self.split else 1):
            row = self._tile_row(m, 0) + i * (1 - self.single) * 128 + self.row + self.lane % 16
            prefetch_l1(self.outputs.iterator.toint() + 8 * Int64(row))

    @cute.jit
    def half(self, i: cutlass.Constexpr[int], first: cute.Tensor, second: cute.Tensor, m: Int32, n: Int32) -> None:
        sums = second if const_expr(i == 1) else first
        if const_expr(self.split):
            if self.real[i]:
                self._send(i, sums, m, n)
        else:
            self._send(i, sums, m, n)
        sums.fill(0.0)

    @cute.jit
    def _send(self, i: cutlass.Constexpr[int], sums: cute.Tensor, m: Int32, n: Int32) -> None:
        quarter, row = self.lane % 4, self.lane // 4
        odd = row % 2 == 1
        upper_row = self._tile_row(m, i) + self.row + row // 2 * 2
        for r in cutlass.range_constexpr(2):
            upper, lower = self.outputs[upper_row + 8 * r], self.outputs[upper_row + 8 * r + 1]
            for t in cutlass.range_constexpr(0, 4, 2):
                left, right = self._piece_of(sums, r, t), self._piece_of(sums, r, t + 1)
                pairs = list(zip(left, right, strict=True))
                # A thread keeps the piece that stands where it will store, and gives the other to its neighbour.
                own = [_select(odd, b, a) for a, b in pairs]
                other = [cute.arch.shuffle_sync_bfly(_select(odd, a, b), 4) for a, b in pairs]
                at = Int64(n * 512 + self._column(i) * 256 + t * 64 + row % 2 * 64 + quarter * 16)
                pairs = list(zip(own, other, strict=True))
                if upper != 0:
                    store_16(upper + at, *[_select(odd, b, a) for a, b in pairs])
                if lower != 0:
                    store_16(lower + at, *[_select(odd, a, b) for a, b in pairs])

    def _piece_of(self, sums: cute.Tensor, r: int, t: int) -> list[Int32]:
        """This thread's results 32 t + 8 q … of row r of its two, as bf16."""
        return [pack_bf16(sums[((0, r, 4 * t + j), 0, 0)], sums[((1, r, 4 * t + j), 0, 0)]) for j in range(4)]


def scale_of(largest: Float32) -> Float32:
    """Scale of e4m3 numbers of which the largest magnitude, finite, is this: `quantize`'s, ÷ 448 rounded up, at least 2⁻¹²⁶."""
    return registers.max_magnitude(registers.divide_up(largest, Float32(E4M3_MAX)), Float32(SMALLEST_SCALE))


def _select(condition: Any, a: Int32, b: Int32) -> Int32:
    return Int32(cutlass.select_(condition, a, b))


def _descriptor(boxes: Any, tensor: Any, shape: tuple[int, int]) -> Any:
    """On the host: copy from staging (`boxes` of `shape`, one behind the other) to `tensor`."""
    box = cute.slice_(boxes, (None, None, 0))
    return (*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, box, shape), boxes)


def _boxes(staging: Any, dtype: Any, descriptor: Any, shape: tuple[int, int]) -> Any:
    """Staging and global memory as boxes of the copy engine."""
    atom, tensor, boxes = descriptor
    shared = staging.get_tensor(boxes.outer, swizzle=boxes.inner, dtype=dtype)
    tiles = cute.local_tile(tensor, shape, (None, None))
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))
