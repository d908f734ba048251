"""Sending rows to experts while the GEMMs run, for Hopper (sm_90a): the work of one warp per SM.

The pairs of a rank stand in a list, in the order in which the ranks need them (`plan_sm90.Plan.list_sends`); an item is up to
`ITEM_PAIRS` pairs of one expert, whose rows lie one behind the other at the expert's rank. Warps take items in turn. Of an item, lanes
first store weights, slots and scales, m-major, a lane per row; then the copy engine takes the rows through shared memory, each of a few
lanes a piece at a time in a slot of its own; then one lane, after the warp has met, adds the rows to the count of their tile
(`red.release.sys`): whoever acquires the full count sees the rows. The release waits for the warp's own stores and for nothing else.

Who reads: the loading warp of a Linear-1 tile waits until `arrived[tile]` has reached the tile's real rows (`gemm_sm90`).

No warp runs further than `AHEAD` rounds of Linear-1 tiles ahead of what its CTA loads, as far as that says where the experts' ranks are:
rows that nobody needs yet would fill the X-Stage, and the stores of Linear-2 would wait for room. Experts that are further than this rank
thinks must not wait for it, and two ranks could wait for each other: a warp that has seen no progress for `PATIENCE_NS` sends until it sees
some.

Tried instead (`docs/moe-kernel.md`): stores from registers, by one warp and by two; other distances, and none.

Not covered: rows in another precision than e4m3, one copy of a row for several picks on one rank (`once_sm90`).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from xstage.device import signals, stores
from xstage.device.clock import now_ns, sleep_ns
from xstage.device.loads import load_4, load_16
from xstage.device.meeting import PEERS
from xstage.moe import spans_sm90
from xstage.moe.layout import AHEAD, SLOT_BYTES, BufferLayout, piece_bytes, slots_of
from xstage.moe.spans import SENT, TURN

PATIENCE_NS = 100_000
_TILE = 128


class Sender:
    """layout: of the buffers, `direct`. slot_bytes: of shared memory, at least 2 KiB, that the warp has, beside
    `MOST_SLOTS` mbarriers."""

    once = False

    def __init__(self, layout: BufferLayout, slot_bytes: int = SLOT_BYTES) -> None:
        self.marked = layout.once  # −1 − pair stands in the list for some pairs
        self.world, self.mine, self.top_k, self.hidden = layout.ranks, layout.experts_per_rank, layout.top_k, layout.hidden
        self.blocks, self.rows = layout.hidden // 128, layout.rows
        self.piece, self.slot_bytes = piece_bytes(layout.hidden, slot_bytes), slot_bytes
        self.slots = slots_of(self.piece, slot_bytes)
        self.offset = {region.name: region.offset_bytes for region in layout.regions}

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Sender:
        return self

    @cute.jit
    def run(self, given, call, index: Int32, warps: Int32, memory, pace, marks=None) -> None:
        """All items of warp `index` of `warps`.

        given: addresses of items, pairs, weights (see `plan_sm90`, `exchange_sm90.List`), rows in e4m3 and their scales.
        memory: (address of the slots in shared memory, pointer to the mbarriers, one arrival each).
        pace: (shared address of a word: Linear-1 entries up to the one that the CTA took last; Linear-1 entries in all; of a round).
        marks: (shared address, capacity) of `spans_sm90`; None: nothing is written down.
        """
        items = given[0]
        phase, stuck = Int32(0), Int32(-1)
        for item in cutlass.range(index, load_4(items), warps, unroll=1):
            if const_expr(marks is not None):
                spans_sm90.begin(marks[0], spans_sm90.SENDS, item)
            stuck = self._await_turn(item, load_4(items), pace, stuck)
            if const_expr(marks is not None):
                spans_sm90.mark(marks[0], spans_sm90.SENDS, TURN)
            place, expert, count, row = load_16(items + Int64(1 + item) * 16)
            phase = self.send(given, call, place, expert, count, row, memory, phase)
            if const_expr(marks is not None):
                spans_sm90.close(marks[0], spans_sm90.SENDS, SENT, marks[1])

    @cute.jit
    def send(self, given, call, place: Int32, expert: Int32, count: Int32, row: Int32, memory, phase: Int32) -> Int32:
        """`count` pairs from `place` in the list on, of one expert, to its rows from `row` on; they count there when it returns."""
        _, pairs, weights, x, x_scales = given
        lane = cute.arch.lane_idx()
        rank = expert // self.mine
        buffer = call[PEERS + rank]
        # Lanes 16 … 31 stand for the same rows as 0 … 15: two columns of scales at a time.
        mine = lane % 16
        pair = load_4(pairs + Int64(place + cutlass.min(mine, count - 1)) * 4)
        if const_expr(self.marked):
            pair = cutlass.max(pair, -1 - pair)
        token = pair // self.top_k
        at = row + mine
        if mine < count:
            if lane < 16:
                # The slot as the expert's rank sees it.
                slot = call[PEERS + self.world + rank] + self.offset["combine"] + Int64(pair) * (self.hidden * 2)
                stores.store_4(buffer + self.offset["row_weight"] + Int64(at) * 4, load_4(weights + Int64(pair) * 4))
                stores.store_8(buffer + self.offset["row_slot"] + Int64(at) * 8, Int32(slot & 0xFFFFFFFF), Int32(slot >> 32))
            scale = x_scales + (Int64(token) * self.blocks + lane // 16) * 4
            to = buffer + self.offset["scales"] + (Int64(lane // 16) * self.rows + at) * 4
            for block in cutlass.range(0, self.blocks, 4, unroll=1):
                two = [load_4(scale + (block + 2 * i) * 4) for i in range(2)]
                for i in cutlass.range_constexpr(2):
                    stores.store_4(to + Int64(block + 2 * i) * (self.rows * 4), two[i])
        phase = self._copy_rows(x, token, count, buffer + self.offset["activations"] + Int64(row) * self.hidden, memory, phase)
        cute.arch.sync_warp()
        if lane == 0:
            arrived = buffer + self.offset["arrived"]
            tile = row // _TILE
            before = cutlass.min((tile + 1) * _TILE - row, count)
            signals.count_release_sys(arrived + Int64(tile) * 4, before)
            if before < count:
                signals.count_release_sys(arrived + Int64(tile + 1) * 4, count - before)
        return phase

    @cute.jit
    def _copy_rows(self, x: Int64, token: Int32, count: Int32, target: Int64, memory, phase: Int32) -> Int32:
        """Rows of the tokens that the first `count` lanes hold, to successive rows at `target`; they are there when it returns."""
        base, barriers = memory
        lane = cute.arch.lane_idx()
        pieces = self.hidden // self.piece
        for first in cutlass.range(0, count * pieces, self.slots, unroll=1):
            piece = first + lane
            owner = cute.arch.shuffle_sync(token, cutlass.min(piece, count * pieces - 1) // pieces)
            if (lane < self.slots) & (piece < count * pieces):
                slot, barrier = base + lane * self.piece, barriers + lane
                stores.bulk_wait_source_free()
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.piece)
                source = x + Int64(owner) * self.hidden + piece % pieces * self.piece
                stores.bulk_load(slot, source, Int32(self.piece), Int32(barrier.toint()))
                cute.arch.mbarrier_wait(barrier, phase)
                phase ^= 1
                stores.bulk_store(target + Int64(piece) * self.piece, slot, Int32(self.piece))
                stores.bulk_commit()
        stores.bulk_wait_done()
        return phase

    @cute.jit
    def _await_turn(self, item: Int32, items: Int32, pace, stuck: Int32) -> Int32:
        """Until Linear-1 has come near the item, or has not moved for a while; returns where it then was stuck, before that −1."""
        progress, entries, round_ = pace
        due, seen, since = Int64(item) * entries, stores.load_shared(progress), now_ns()
        waiting = (Int64(seen + AHEAD * round_) * items < due) & (seen != stuck)
        while waiting:
            sleep_ns(Int32(500))
            now = stores.load_shared(progress)
            if now != seen:
                seen, since = now, now_ns()
            waiting = Int64(seen + AHEAD * round_) * items < due
            if now_ns() - since > PATIENCE_NS:
                stuck = seen
                waiting = cutlass.Boolean(False)
        return stuck
