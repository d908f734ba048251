"""Rows of q, k and v to the ranks of their heads, for Hopper (sm_90a): one kernel that stores into the peers' buffers.

A row of [my rows, the heads of a part] is cut into columns of 512 bytes, one 16-byte piece per lane. A warp moves one column of `FLIGHT`
rows: it loads all of its pieces, then stores each to the owner of its head. Which heads these are and where they go, two tables say
(`layout.head_table`, and the row's place in the whole sequence), so the change of layout is in the addresses: nothing is permuted or
staged. The kernel knows no ranks.

Columns run fastest, over q, k and v side by side, then rows. So a CTA's warps store to all ranks at once, and at every moment of the kernel
the same share of the stores that are under way is remote: the link works from the first row to the last, and local copies, which are far
faster, go on beside it. The grid is plain, with a warp's work small, so that CTAs whose columns stay at home make room for others.

Beside attention the kernel is `wide` and its grid bounded: CTAs of 768 threads, which walk the same items in turn. An attention CTA needs
an SM to itself, and CTAs are placed breadth first: many small ones would keep it from every SM. Few SMs are enough for the link.

A `Meeting(DONE)` (`xstage.device.meeting`) follows on the stream, launched ahead; where a peer may still be reading what this call
overwrites, a `Meeting(ENTERED)` goes before. Nothing is stored once a meeting has failed. `xstage.attention.heads` has the argument.

Not covered: stores by the copy engine out of shared memory.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from xstage.device.kept import kept
from xstage.device.loads import load_4, load_16, load_16_once
from xstage.device.meeting import FAILED, fake_words
from xstage.device.stores import store_16

# Kinds of meetings; `done` ends a call.
ENTERED, DONE = 0, 1
FLIGHT = 8  # rows that a warp loads before it stores one
_PIECE = 16  # bytes of a lane


class ToHeads:
    """heads: query heads of the part, over all ranks. kv_heads: of k, and of v. head_bytes: of a row of one head, a multiple of 16.
    wide: CTAs of 768 threads, each with many items.
    """

    def __init__(self, heads: int, kv_heads: int, head_bytes: int, wide: bool = False):
        self.wide, self.threads = wide, 768 if wide else 256
        self.counts = (heads, kv_heads, kv_heads)
        self.head_pieces = head_bytes // _PIECE
        self.pieces = [n * self.head_pieces for n in self.counts]  # of a row
        self.columns = [-(-n // 32) for n in self.pieces]

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> ToHeads:
        return self

    @cute.jit
    def __call__(
        self, q: Int64, k: Int64, v: Int64, q_batch: Int64, q_row: Int64, q_head: Int64, k_batch: Int64, k_row: Int64, k_head: Int64,
        v_batch: Int64, v_row: Int64, v_head: Int64, batch: Int32, rows: Int32, sequence: Int32, heads: Int64, places: Int64,
        most_ctas: Int32, control: cute.Tensor, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """Launch.

        Args:
            q, k, v: addresses of [batch, rows, all heads, head dim], 16-byte aligned. q_batch, …: strides in bytes, multiples of 16.
            sequence: rows of the whole sequence.
            heads: address of the part's `layout.head_table` of q, k and v, one behind the other.
            places: address of int32 [rows]: each row's place in the whole sequence.
            most_ctas: bound of the grid.
            control: see `xstage.device.meeting`.
        """
        warps = self.threads // 32
        items = batch * ((rows + (FLIGHT - 1)) // FLIGHT) * sum(self.columns)
        ctas = cutlass.min(cutlass.max((items + (warps - 1)) // warps, 1), most_ctas)
        strides = (q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head)
        self.kernel((q, k, v), strides, batch, rows, sequence, heads, places, control).launch(
            grid=(ctas, 1, 1), block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, sources: tuple[Int64, Int64, Int64], strides: tuple[Int64, ...], batch: Int32, rows: Int32, sequence: Int32, heads: Int64,
        places: Int64, control: cute.Tensor,
    ):  # fmt: skip
        # The meeting behind may take its place as soon as every CTA has one.
        cute.arch.griddepcontrol_launch_dependents()
        warps = self.threads // 32
        groups = Uint32((rows + (FLIGHT - 1)) // FLIGHT)
        columns = sum(self.columns)
        begin = cute.arch.block_idx()[0] * warps + cute.arch.thread_idx()[0] // 32
        end = Int32(Uint32(batch) * groups * columns)
        if control[FAILED] != 0:
            end = Int32(0)
        if const_expr(self.wide):
            for item in cutlass.range(begin, end, cute.arch.grid_dim()[0] * warps, unroll=1):
                self.move(Uint32(item), groups, sources, strides, rows, sequence, heads, places)
        else:
            if begin < end:
                self.move(Uint32(begin), groups, sources, strides, rows, sequence, heads, places)

    @cute.jit
    def move(
        self, item: Uint32, groups: Uint32, sources: tuple[Int64, Int64, Int64], strides: tuple[Int64, ...], rows: Int32, sequence: Int32,
        heads: Int64, places: Int64,
    ) -> None:  # fmt: skip
        """A column of `FLIGHT` rows."""
        columns = sum(self.columns)
        group = item // columns
        column = Int32(item - group * columns)
        batch_index = group // groups
        first = Int32((group - batch_index * groups) * FLIGHT)
        # Of q, k and v the one whose column it is.
        source, table, pieces, start = sources[0], heads, Int32(self.pieces[0]), Int32(0)
        batch_stride, row_stride, head_stride = strides[0], strides[1], strides[2]
        for i in cutlass.range_constexpr(1, 3):
            if column >= sum(self.columns[:i]):
                source, table = sources[i], heads + 16 * sum(self.counts[:i])
                pieces, start = Int32(self.pieces[i]), Int32(sum(self.columns[:i]))
                batch_stride, row_stride, head_stride = strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]
        piece = (column - start) * 32 + cute.arch.lane_idx()
        if piece < pieces:
            place = Int32(Uint32(piece) // self.head_pieces)  # of the head, in the part
            within = Int64((piece - place * self.head_pieces) * _PIECE)
            low, high, row_bytes, head = load_16(table + Int64(place) * 16)
            to = (Int64(high) << 32 | Int64(low) & 0xFFFFFFFF) + within
            at = source + Int64(batch_index) * batch_stride + Int64(head) * head_stride + within
            # Rows beyond the last are the last one again, and are not stored.
            numbers = [cutlass.min(first + i, rows - 1) for i in range(FLIGHT)]
            loaded = [load_16_once(at + Int64(number) * row_stride) for number in numbers]
            row_of = [load_4(places + Int64(number) * 4) for number in numbers]
            for i in cutlass.range_constexpr(FLIGHT):
                if first + i < rows:
                    row = Int64(Int32(batch_index) * sequence + row_of[i])
                    store_16(to + row * Int64(row_bytes), *loaded[i])


@kept
def compiled_to_heads(heads: int, kv_heads: int, head_bytes: int, wide: bool = False) -> Any:
    """`ToHeads`; its arguments are those of `ToHeads.__call__`, without the stream: it runs on torch's current one."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    numbers = [*[Int64(0)] * 12, *[Int32(1)] * 3, *[Int64(0)] * 2, Int32(1)]
    return cute.compile(ToHeads(heads, kv_heads, head_bytes, wide), *numbers, *fake_words(1), stream, options="--enable-tvm-ffi")
