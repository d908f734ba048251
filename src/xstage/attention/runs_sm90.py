"""Rows of q, k and v to the ranks of their heads by bulk copies, for Hopper (sm_90a): the third form of `heads_sm90`'s wide kernel.

Heads of one rank lie side by side in a row, where it comes from and where it goes: a *run*, some KiB long (`layout.run_table`). A warp
moves one run of a few rows at a time, a row per lane: a bulk copy into shared memory, and one from there to the owner. Of the `STAGES`
places that it has for that, all but one are being filled while the last is emptied. So loads are always under way, and bytes wait in shared
memory, not in registers: `SHARED_BYTES` on an SM, more than its share of the link times any latency. Threads only give addresses.

Runs go fastest, over q, k and v, then rows, as the columns of `heads_sm90`; what that says of meetings and failures holds here.

A copy is over for the meeting behind when its thread has waited for its group, which every lane does at its end.

Not covered: sources whose heads do not lie side by side (`heads_sm90` takes those).
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from xstage.device import stores
from xstage.device.kept import kept
from xstage.device.loads import load_4, load_16
from xstage.device.meeting import FAILED, fake_words

WARPS, STAGES = 8, 4
STAGE_BYTES = 7168  # 224 KiB in all: beside it a meeting still finds the KiB that every CTA takes
SHARED_BYTES = WARPS * STAGES * STAGE_BYTES
_AHEAD = STAGES - 1  # items that are being loaded when one is stored


def rows_of_item(run_bytes: int) -> int:
    """Rows that a warp moves at once, of runs of at most so many bytes."""
    return min(32, STAGE_BYTES // run_bytes)


class Runs:
    """CTAs of `WARPS` warps, one to an SM, each with many items."""

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Runs:
        return self

    @cute.jit
    def __call__(
        self, q: Int64, k: Int64, v: Int64, q_batch: Int64, q_row: Int64, q_head: Int64, k_batch: Int64, k_row: Int64, k_head: Int64,
        v_batch: Int64, v_row: Int64, v_head: Int64, batch: Int32, rows: Int32, sequence: Int32, table: Int64, runs: Int32,
        run_bytes: Int32, together: Int32, places: Int64, most_ctas: Int32, control: cute.Tensor, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """Launch.

        Args:
            table: address of the part's `layout.run_table`, of `runs` runs of at most `run_bytes` bytes.
            together: rows of an item, `rows_of_item(run_bytes)`.
            Others: as `heads_sm90.ToHeads` takes them. Heads of a row must lie side by side.
        """
        items = batch * ((rows + together - 1) // together) * runs
        ctas = cutlass.min(cutlass.max((items + (WARPS - 1)) // WARPS, 1), most_ctas)
        strides = (q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head)
        self.kernel((q, k, v), strides, batch, rows, sequence, table, runs, run_bytes, together, places, control).launch(
            grid=(ctas, 1, 1), block=[32 * WARPS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, sources: tuple[Int64, Int64, Int64], strides: tuple[Int64, ...], batch: Int32, rows: Int32, sequence: Int32, table: Int64,
        runs: Int32, run_bytes: Int32, together: Int32, places: Int64, control: cute.Tensor,
    ):  # fmt: skip
        # The meeting behind may take its place as soon as every CTA has one.
        cute.arch.griddepcontrol_launch_dependents()
        allocator = SmemAllocator()
        slots = Int32(allocator.allocate(SHARED_BYTES, 128).toint())
        barriers = allocator.allocate_array(Int64, WARPS * STAGES)
        warp = cute.arch.thread_idx()[0] // 32
        lane = cute.arch.lane_idx()
        slots += warp * (STAGES * STAGE_BYTES) + lane * run_bytes
        barriers = barriers + warp * STAGES
        if lane == 0:
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(barriers + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        groups = (rows + together - 1) // together
        begin = cute.arch.block_idx()[0] * WARPS + warp
        step = cute.arch.grid_dim()[0] * WARPS
        items = batch * groups * runs
        if control[FAILED] != 0:
            items = Int32(0)
        mine = (items - begin + step - 1) // step
        if begin >= items:
            mine = Int32(0)
        # Where the items go that are being loaded, the oldest first.
        coming = [(Int64(0), Int32(0)) for _ in range(_AHEAD)]
        if mine > 0:
            at_item, by = self.position(begin, runs, groups), self.position(step, runs, groups)
            words, place, row, count = self.find(at_item, together, rows, table, places)
            for turn in cutlass.range(0, mine + _AHEAD, unroll=1):
                to, size = coming[0]
                if turn >= _AHEAD:
                    slot = (turn - _AHEAD) % STAGES
                    cute.arch.mbarrier_wait(barriers + slot, (turn - _AHEAD) // STAGES % 2)
                    if size > 0:
                        stores.bulk_store(to, slots + slot * STAGE_BYTES, size)
                    cute.arch.sync_warp()
                stores.bulk_commit()
                to, size = Int64(0), Int32(0)
                if turn < mine:
                    at, to, size = self.aim(words, place, row, count, at_item[2], sources, strides, sequence)
                    slot = turn % STAGES
                    # What was in this place was stored a turn ago.
                    stores.bulk_wait_source_free(1)
                    barrier = barriers + slot
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size * count)
                    cute.arch.sync_warp()
                    if size > 0:
                        stores.bulk_load(slots + slot * STAGE_BYTES, at, size, Int32(barrier.toint()))
                    cute.arch.sync_warp()
                    # Words of the next item come while this one does. Behind the last item they are words, too, of no use.
                    at_item = self.advance(at_item, by, runs, groups)
                    words, place, row, count = self.find(at_item, together, rows, table, places)
                coming = [*coming[1:], (to, size)]
            stores.bulk_wait_done()

    @cute.jit
    def position(self, item: Int32, runs: Int32, groups: Int32) -> tuple[Int32, Int32, Int32]:
        """An item's run, its group of rows, its sequence."""
        group = item // runs
        batch_index = group // groups
        return item - group * runs, group - batch_index * groups, batch_index

    @cute.jit
    def advance(
        self, position: tuple[Int32, Int32, Int32], by: tuple[Int32, Int32, Int32], runs: Int32, groups: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """The sum of two positions: no division in the loop."""
        run, group, batch_index = position[0] + by[0], position[1] + by[1], position[2] + by[2]
        if run >= runs:
            run, group = run - runs, group + 1
        if group >= groups:
            group, batch_index = group - groups, batch_index + 1
        return run, group, batch_index

    @cute.jit
    def find(
        self, position: tuple[Int32, Int32, Int32], together: Int32, rows: Int32, table: Int64, places: Int64
    ) -> tuple[Any, Int32, Int32, Int32]:
        """Words of an item's run, the place of this lane's row, the row, rows of the item."""
        run = table + Int64(position[0]) * 32
        first = position[1] * together
        count = cutlass.min(rows - first, together)
        row = first + cutlass.min(cute.arch.lane_idx(), count - 1)
        return (*load_16(run), *load_16(run + 16)), load_4(places + Int64(row) * 4), row, count

    @cute.jit
    def aim(
        self, words: Any, place: Int32, row: Int32, count: Int32, batch_index: Int32, sources: tuple[Int64, Int64, Int64],
        strides: tuple[Int64, ...], sequence: Int32,
    ) -> tuple[Int64, Int64, Int32]:  # fmt: skip
        """Of this lane's row: address of the run, where it goes, its bytes (0: the row of another lane)."""
        low, high, row_bytes, head, size, which = words[:6]
        source, batch_stride, row_stride, head_stride = sources[0], strides[0], strides[1], strides[2]
        for i in cutlass.range_constexpr(1, 3):
            if which == i:
                source, batch_stride, row_stride, head_stride = sources[i], strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]
        at = source + Int64(batch_index) * batch_stride + Int64(row) * row_stride + Int64(head) * head_stride
        to = (Int64(high) << 32 | Int64(low) & 0xFFFFFFFF) + Int64(batch_index * sequence + place) * Int64(row_bytes)
        if cute.arch.lane_idx() >= count:
            size = Int32(0)
        return at, to, size


@kept
def compiled_runs() -> Any:
    """`Runs`; its arguments are those of `Runs.__call__`, without the stream: it runs on torch's current one."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    numbers = [*[Int64(0)] * 12, *[Int32(1)] * 3, Int64(0), *[Int32(1)] * 3, Int64(0), Int32(1)]
    return cute.compile(Runs(), *numbers, *fake_words(1), stream, options="--enable-tvm-ffi")
