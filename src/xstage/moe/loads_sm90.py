"""What the loading warps of the grouped GEMM (`gemm_sm90`) do: tiles of rows, weights and scales into the ring of stages, which tile comes
next, and what must be there before it may be read.

One warp of a CTA loads; of two layers another one, of a cluster's first CTA, takes the entries of the list for both (`_take`). All copies
are asynchronous and counted by the stage's mbarrier. In a stage's scales stand words that say which tile it is of: math warps look
nothing up.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from xstage.device import registers, signals, stores
from xstage.device.loads import load_16
from xstage.device.meeting import FAILED, GENERATION, RANK, STATUS_ADDRESS, TIMEOUT_NS
from xstage.moe import decode_sm90, spans_sm90
from xstage.moe.layout import ARRIVED, LINEAR1
from xstage.moe.mxfp4 import TILE_BYTES
from xstage.moe.spans import WAIT_END
from xstage.moe.work_table import COLUMN_MASK, LAYER_SHIFT, ROW_SHIFT, TAKEN_BEFORE, partner

TILE_M, TILE_N, TILE_K = 128, 256, 128
CLUSTER = 2
ROW_BLOCK = 8  # of a narrow or swapped kernel's rows that are copied at once


class TileLoads:
    """The part of `GroupedGemm` that loads; what the attributes mean stands there."""

    stages: int
    unroll: int
    groups: int
    rows: int
    scales: int
    word: int
    few: int
    codes: bool
    narrow: bool
    split: bool
    recorded: bool
    sender: Any

    @cute.jit
    def _load_share(self, source, slots, work, entries, index, given) -> None:
        """One warp, of one layer: a stage's rows, weight and scales for every step of K of every tile of its share."""
        table, experts = work
        member = given[1]
        parts, step = self._parts(source, slots), cute.arch.grid_dim()[0] // CLUSTER
        stage, phase = Int32(0), Int32(0)
        # What a tile needs to begin is looked up a tile ahead: a look-up would leave the ring to run dry.
        mine, following = self._tile(table, index, entries, member), self._tile(table, index + step, entries, member)
        expert = experts[cutlass.max(mine, 0) >> ROW_SHIFT]
        while mine >= 0:
            index += step
            after = self._tile(table, index + step, entries, member)
            next_expert = experts[cutlass.max(following, 0) >> ROW_SHIFT]
            stage, phase = self._load_tile(source, parts, given, mine, expert, stage, phase, None, None, None)
            mine, following, expert = following, after, next_expert
        self._end(given, stage, phase)

    @cute.jit
    def _tile(self, table, index, entries, member) -> Int32:
        """The tile of an entry; −1 where there is none."""
        word = Int32(-1)
        if index < entries:
            word = table[index * 2 + member]
        return word

    @cute.jit
    def _load_taken(self, sources, slots, ready, entry, progress, marks, given) -> None:
        """One warp, of two layers: the same for every entry that the taker sends. `progress`: see `send_sm90`."""
        parts = [self._parts(source, slots) for source in sources]
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        mine, expert, end = self._receive(entry, turn, progress)
        while mine >= 0:
            turn ^= 1
            if const_expr(self.recorded):
                spans_sm90.begin(marks[0], spans_sm90.LOADS, mine)
            if (mine >> LAYER_SHIFT) & 1 == 1:
                self._wait_ready(ready, mine >> ROW_SHIFT, self._counted(sources))
                if const_expr(self.split):
                    if mine & 1 == 0:
                        self._wait_ready(ready, (mine >> ROW_SHIFT) + 1, self._counted(sources))
                if const_expr(self.recorded):
                    spans_sm90.close(marks[0], spans_sm90.LOADS, WAIT_END, marks[1])
                stage, phase = self._load_entry(sources[1], parts[1], given, mine, expert, stage, phase, (entry, end))
            else:
                if const_expr(self.sender is not None):
                    self._wait_arrived(ready, mine >> ROW_SHIFT, end)
                    if const_expr(self.split):
                        if mine & 1 == 0:
                            self._wait_arrived(ready, (mine >> ROW_SHIFT) + 1, end)
                if const_expr(self.recorded):
                    spans_sm90.close(marks[0], spans_sm90.LOADS, WAIT_END, marks[1])
                stage, phase = self._load_entry(sources[0], parts[0], given, mine, expert, stage, phase, (entry, end))
            mine, expert, end = self._receive(entry, turn, progress)
        self._end(given, stage, phase)

    @cute.jit
    def _take(self, counter, work, entries1, entries2, entry) -> None:
        """One warp of the cluster's first CTA: entries of the list to both loading warps, until there are no more."""
        slot, barriers = entry
        lane, phase, mine = cute.arch.lane_idx(), Int32(1), Int32(0)
        while mine >= 0:
            cute.arch.mbarrier_wait(barriers + 1, phase)
            phase ^= 1
            place = Int32(0)
            if lane == 0:
                place = signals.take_gpu(counter.iterator.toint())
            place = cute.arch.shuffle_sync(place, 0)
            mine, before, expert, end = Int32(-1), entries1, Int32(0), Int32(0)
            if place < entries1 + entries2:
                mine, before, expert, end = load_16(work.iterator.toint() + Int64(place) * 16)
                if const_expr(not self.split):
                    if lane == 1:
                        mine = partner(mine)
            if lane < CLUSTER:
                stores.send_16(slot, Int32(barriers.toint()), lane, mine, before, expert, end)

    @cute.jit
    def _receive(self, entry, turn, progress) -> tuple[Int32, Int32, Int32]:
        """The next entry: tile, expert, end of its real rows; tile −1 when there are no more."""
        slot, barriers = entry
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers, 16)
        cute.arch.mbarrier_wait(barriers, turn)
        mine, before, expert, end = (stores.load_shared(slot + 4 * i) for i in range(4))
        if const_expr(self.sender is not None):
            with cute.arch.elect_one():
                registers.store_shared_32(progress, before)
        return mine, expert, end

    @cute.jit
    def _release(self, entry) -> None:
        """The slot has been read; the taker may take the next entry."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(entry[1] + 1, 0)

    @cute.jit
    def _end(self, given, stage, phase) -> None:
        """Tell the math warps that there is no more."""
        s_scales, _, full, empty, (_, coded) = given
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        words = words_of(s_scales)
        with cute.arch.elect_one():
            words[self.word, stage] = Int32(-1)
            cute.arch.mbarrier_arrive(full + stage)
            if const_expr(self.split):
                cute.arch.mbarrier_arrive(coded + stage)

    def _counted(self, sources: Any) -> Any:
        """What says that a row tile of Linear-1 is complete: column tiles, which two CTAs count where they split them."""
        return sources[0][-1] if self.split else sources[0][-1] // 2

    def _parts(self, source: Any, slots: Any) -> Any:
        """Shared and global memory of each copy, box by box."""
        boxes = ((0, slots[0], self.rows), (1, slots[1], 64), (2, slots[2], 128))[: 2 if self.codes else 3]
        if self.narrow:
            boxes = ((0, slots[1], ROW_BLOCK), (1, slots[1], ROW_BLOCK))
        tiles = [(source[i], s, cute.local_tile(source[i][1], (rows, TILE_K), (None, None))) for i, s, rows in boxes]
        return [
            cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))
            for (atom, _), s, g in tiles
        ]

    @cute.jit
    def _load_entry(self, source, parts, given, mine, expert, stage, phase, taken) -> tuple[Int32, Int32]:
        """A tile of an entry of two layers; of a narrow kernel its first 64 rows, then the others, where either CTA has any; split: of a
        single row tile both column tiles."""
        if const_expr(self.split):
            passes = 1 + (mine & 1)
            for later in cutlass.range(passes, unroll=1):
                stage, phase = self._load_split(source, parts, given, mine + 2 * later, expert, stage, phase, taken, later + 1 == passes)
        elif const_expr(self.narrow):
            alone = (mine & 1 == 1) & (taken[1] - (mine >> ROW_SHIFT) * TILE_M <= TILE_M // 2)
            passes = Int32(cutlass.select_(alone, Int32(1), Int32(2)))
            for upper in cutlass.range(passes, unroll=1):
                stage, phase = self._load_tile(source, parts, given, mine, expert, stage, phase, taken, upper, upper + 1 == passes)
        else:
            stage, phase = self._load_tile(source, parts, given, mine, expert, stage, phase, taken, None, None)
        return stage, phase

    @cute.jit
    def _load_tile(self, source, parts, given, mine, expert, stage, phase, taken, upper, last) -> tuple[Int32, Int32]:
        """A tile's steps of K. taken: of two layers, the entry's slot and the end of its expert's real rows. upper: of a narrow kernel,
        which 64 rows; last: whether they are the tile's last."""
        (load_a, _), (share_a, _) = source[:2]
        k_blocks, n_blocks = source[-2:]
        (to_a, from_a), (to_half, from_half) = parts[:2]
        s_scales, member, full, empty, (codes, _) = given
        w_bytes = 2 * TILE_BYTES if const_expr(self.codes) else TILE_N * TILE_K
        if const_expr(not self.codes):
            (load_w, _), (share_w, _) = source[2:4]
            to_w, from_w = parts[2]
        m, n = mine >> ROW_SHIFT, (mine >> 1) & COLUMN_MASK
        both, words = cutlass.Int16(3), words_of(s_scales)
        w_block = expert * n_blocks + n * 2
        few, late = Int32(0), Int32(0)
        if const_expr(taken is not None):
            few, late = Int32(taken[1] - m * TILE_M <= TILE_M // 2), cutlass.max(k_blocks - TAKEN_BEFORE, 0)
        half = few & mine  # of rows that the cluster shares only the first half is loaded, which has all that are real
        word = mine
        row_bytes, blocks = TILE_M * TILE_K >> half, Int32(0)
        if const_expr(self.narrow):
            m = m * 2 + upper
            word = m << ROW_SHIFT | mine & ((1 << ROW_SHIFT) - 2) | Int32(last)
            late = Int32(cutlass.select_(last, late, Int32(-1)))
            # Up to the last that has any that are real; others are not loaded.
            blocks = cutlass.min(cutlass.max((taken[1] - m * self.rows + ROW_BLOCK - 1) // ROW_BLOCK, 1), self.rows // ROW_BLOCK)
            row_bytes = blocks * (ROW_BLOCK * TILE_K)
        stage_bytes = self.rows * 4 + 16 + w_bytes + row_bytes
        for k in cutlass.range(k_blocks, unroll=1):
            if const_expr(taken is not None):
                if k == late:
                    self._release(taken[0])
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            bar = full + stage
            with cute.arch.elect_one():
                words[self.word, stage] = word  # math warps read the first stage's, decoding warps every one
                if const_expr(self.narrow):
                    words[self.few, stage] = blocks
                elif const_expr(taken is not None):
                    words[self.few, stage] = few * Int32(k < k_blocks - self.unroll)  # not of the last round
                cute.arch.mbarrier_arrive_and_expect_tx(bar, stage_bytes)
            if mine & 1 == 0:
                if const_expr(self.narrow):
                    self._load_blocks(load_a, from_a, to_a, m, k, stage, blocks, bar, None)
                else:
                    cute.copy(load_a, from_a[(None, m, k)], to_a[(None, stage)], tma_bar_ptr=bar)
                if const_expr(self.codes):
                    self._load_codes(source, w_block + member, k, codes, stage * 2 + member, bar, True)
                else:
                    at = (None, stage * 2 + member)
                    cute.copy(share_w, from_w[(None, (w_block + member) * k_blocks + k, 0)], to_w[at], tma_bar_ptr=bar, mcast_mask=both)
            else:
                if const_expr(self.narrow):
                    if member == 0:
                        self._load_blocks(share_a, from_half, to_half, m, k, stage, blocks, bar, both)
                elif (half == 0) | (member == 0):
                    at = (None, stage * self.groups + member)
                    cute.copy(share_a, from_half[(None, m * self.groups + member, k)], to_half[at], tma_bar_ptr=bar, mcast_mask=both)
                for i in cutlass.range_constexpr(2):
                    if const_expr(self.codes):
                        self._load_codes(source, w_block + i, k, codes, stage * 2 + i, bar, False)
                    else:
                        cute.copy(load_w, from_w[(None, (w_block + i) * k_blocks + k, 0)], to_w[(None, stage * 2 + i)], tma_bar_ptr=bar)
            with cute.arch.elect_one():
                self._load_scales(source, s_scales, expert, k, m * self.rows, n, stage, bar, self.rows)
            stage, phase = self._after(stage, phase)
        return stage, phase

    @cute.jit
    def _load_blocks(self, copy, source, target, m, k, stage, blocks, bar, mask: cutlass.Constexpr[Any]) -> None:
        """The first `blocks` blocks of rows of a narrow tile; mask: for which CTAs of the cluster."""
        for block in cutlass.range_constexpr(self.rows // ROW_BLOCK):
            if block < blocks:
                at = (None, stage * (self.rows // ROW_BLOCK) + block)
                box = (None, m * (self.rows // ROW_BLOCK) + block, k)
                if const_expr(mask is None):
                    cute.copy(copy, source[box], target[at], tma_bar_ptr=bar)
                else:
                    cute.copy(copy, source[box], target[at], tma_bar_ptr=bar, mcast_mask=mask)

    @cute.jit
    def _load_split(self, source, parts, given, mine, expert, stage, phase, taken, last) -> tuple[Int32, Int32]:
        """A tile's steps of K where the CTAs split its columns: two row tiles, or a single one, for either; each brings half of the rows
        to both, and its own half of the weight."""
        k_blocks, n_blocks = source[-2:]
        to_half, from_half = parts[1]
        s_scales, member, full, empty, (codes, coded) = given
        m, n, single = mine >> ROW_SHIFT, (mine >> 1) & COLUMN_MASK, mine & 1
        both, words = cutlass.Int16(3), words_of(s_scales)
        w_block = expert * n_blocks + n * 2 + member
        # Blocks of 64 rows, from the first to the last that has any that are real: 1 … 2, 3 … 4. Others are not loaded.
        blocks = 4 - 2 * single - Int32(taken[1] - (m + 1 - single) * TILE_M <= TILE_M // 2)
        late = Int32(cutlass.select_(last, cutlass.max(k_blocks - TAKEN_BEFORE, 0), Int32(-1)))
        stage_bytes = 16 + (2 - single) * TILE_M * 4 + blocks * 64 * TILE_K
        for k in cutlass.range(k_blocks, unroll=1):
            if k == late:
                self._release(taken[0])
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            bar, code_bar = full + stage, coded + stage
            with cute.arch.elect_one():
                words[self.word, stage] = mine
                words[self.few, stage] = blocks
                cute.arch.mbarrier_arrive_and_expect_tx(code_bar, TILE_BYTES)
                cute.arch.mbarrier_arrive_and_expect_tx(bar, stage_bytes)
            self._load_codes(source, w_block, k, codes, stage, code_bar, False)
            for i in cutlass.range_constexpr(2):
                block = member * (2 - single) + i
                if (block < blocks) & (i < 2 - single):
                    at = (None, stage * 4 + block)
                    cute.copy(
                        source[1][0], from_half[(None, m * 2 + block, k)], to_half[at], tma_bar_ptr=bar, mcast_mask=both
                    )  # fmt: skip
            with cute.arch.elect_one():
                if single == 1:
                    self._load_scales(source, s_scales, expert, k, m * TILE_M, n, stage, bar, TILE_M)
                else:
                    self._load_scales(source, s_scales, expert, k, m * TILE_M, n, stage, bar, 2 * TILE_M)
            stage, phase = self._after(stage, phase)
        return stage, phase

    @cute.jit
    def _after(self, stage, phase) -> tuple[Int32, Int32]:
        """The next stage of the ring, and its phase."""
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def _load_scales(self, source, s_scales, expert, k, row, n, stage, bar, size: cutlass.Constexpr[int]) -> None:
        """One thread: scales of `size` rows from `row` on, and of column tile n and its neighbour, 16 bytes."""
        a_scales, weight_scales, rows, k_blocks, n_blocks = source[-5:]
        copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        w_scale = (expert * k_blocks + k) * n_blocks + n // 2 * 4
        for origin, target, count in (
            (a_scales.iterator + (k * rows + row), stage * self.scales, size),
            (weight_scales.iterator + w_scale, stage * self.scales + self.word - 4, 4),
        ):
            layout = cute.make_layout(count)
            to_stage = cute.make_tensor((s_scales.iterator + target).align(16), layout)
            cute.copy(copy, cute.make_tensor(origin.align(16), layout), to_stage, mbar_ptr=bar)

    @cute.jit
    def _load_codes(self, source, tile, k, codes, place, bar, both: cutlass.Constexpr[bool]) -> None:
        """Block `k` of a tile's codes to its place in the ring; `both`: of either CTA."""
        with cute.arch.elect_one():
            decode_sm90.load_codes(source[2], tile, source[-2], k, codes + place * TILE_BYTES, Int32(bar.toint()), both)

    @cute.jit
    def _wait_ready(self, ready, m, tiles) -> None:
        """Until Linear-1 has written row tile `m` in all its column tiles."""
        counts, control, call = ready[0], ready[1], ready[2]
        at, failed = counts.iterator.toint() + Int64(1 + m) * 4, control.iterator.toint() + 8 * FAILED
        if signals.wait_count_acquire_gpu(at, Int32(tiles), failed, call[TIMEOUT_NS]) < tiles:
            self._gave_up(ready, LINEAR1)
        cute.arch.fence_proxy("async")

    @cute.jit
    def _wait_arrived(self, ready, m, end) -> None:
        """Until the rows of row tile `m` have come from all ranks; its expert's real rows end at `end`."""
        rows = cutlass.min(end - m * TILE_M, TILE_M)
        at, failed = ready[3].iterator.toint() + Int64(m) * 4, ready[1].iterator.toint() + 8 * FAILED
        if signals.wait_count_acquire_sys(at, rows, failed, ready[2][TIMEOUT_NS]) < rows:
            self._gave_up(ready, ARRIVED)
        cute.arch.fence_proxy("async")

    @cute.jit
    def _gave_up(self, ready, phase: cutlass.Constexpr[int]) -> None:
        """Say that a wait of `phase` gave up, if nothing failed before."""
        control, call = ready[1], ready[2]
        status = Int64(Int32(control[GENERATION]) + 1) << 32 | signals.TIMED_OUT << 16 | call[RANK] << 8 | phase + 1
        if signals.claim_gpu(control.iterator.toint() + 8 * FAILED, status) == 0:
            signals.store_relaxed_sys(call[STATUS_ADDRESS], status)


def words_of(s_scales: cute.Tensor) -> cute.Tensor:
    """The same memory as int32."""
    return cute.make_tensor(cute.recast_ptr(s_scales.iterator, dtype=Int32), s_scales.layout)
