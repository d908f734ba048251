"""Sending rows to experts while the GEMMs run, for Hopper (sm_90a): the work of one warp per SM, in few registers.

The pairs of a rank stand in a list, in the order in which experts take them up (`plan_sm90.Plan.list_sends`); an item is up to
`ITEM_PAIRS` pairs of one expert, whose rows lie one behind the other at the expert's rank. Warps take items in turn. Of an item, lanes
first store weights, slots and scales, m-major, a lane per row; then row after row in 16-byte pieces; then one lane, after the warp has
met, adds the rows to the count of their tile (`red.release.sys`): whoever acquires the full count sees the rows. The release waits for
the warp's own stores and for nothing else; the other warps of the SM go on.

Who reads: the loading warp of a Linear-1 tile waits until `arrived[tile]` has reached the tile's real rows (`gemm_sm90`).

Not covered: rows in another precision than e4m3, one copy of a row for several picks on one rank.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from xstage.device import signals
from xstage.device.loads import load_4, load_16
from xstage.device.meeting import PEERS
from xstage.device.stores import store_4, store_8, store_16
from xstage.moe.layout import BufferLayout

_FLIGHT = 4  # pieces of a row that a lane loads before it stores
_TILE = 128


@cute.jit
def copy_row(source: Int64, target: Int64, size: cutlass.Constexpr[int], flight: cutlass.Constexpr[int]) -> None:
    """A warp copies `size` bytes, a multiple of 512. source, target: of the lane's 16 bytes. flight: pieces loaded before one is stored."""
    for offset in cutlass.range(0, size, 512 * flight, unroll=1):
        pieces = [load_16(source + cutlass.min(offset + 512 * i, size - 512)) for i in range(flight)]
        for i in cutlass.range_constexpr(flight):
            if offset + 512 * i < size:
                store_16(target + offset + 512 * i, *pieces[i])


class Sender:
    """Args: layout: of the buffers, `direct`."""

    def __init__(self, layout: BufferLayout) -> None:
        self.world, self.mine, self.top_k, self.hidden = layout.ranks, layout.experts_per_rank, layout.top_k, layout.hidden
        self.blocks, self.rows = layout.hidden // 128, layout.rows
        self.offset = {region.name: region.offset_bytes for region in layout.regions}

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Sender:
        return self

    @cute.jit
    def run(self, given, call, index: Int32, warps: Int32) -> None:
        """All items of warp `index` of `warps`.

        given: addresses of items, pairs, weights (see `plan_sm90`, `exchange_sm90.Stage`), rows in e4m3 and their scales.
        """
        items, pairs, weights, x, x_scales = given
        lane = cute.arch.lane_idx()
        for item in cutlass.range(index, load_4(items), warps, unroll=1):
            place, expert, count, row = load_16(items + Int64(1 + item) * 16)
            rank = expert // self.mine
            buffer = call[PEERS + rank]
            # Lanes 16 … 31 stand for the same rows as 0 … 15: two columns of scales at a time.
            mine = lane % 16
            pair = load_4(pairs + Int64(place + cutlass.min(mine, count - 1)) * 4)
            token = pair // self.top_k
            at = row + mine
            if mine < count:
                if lane < 16:
                    # The slot as the expert's rank sees it.
                    slot = call[PEERS + self.world + rank] + self.offset["combine"] + Int64(pair) * (self.hidden * 2)
                    store_4(buffer + self.offset["row_weight"] + Int64(at) * 4, load_4(weights + Int64(pair) * 4))
                    store_8(buffer + self.offset["row_slot"] + Int64(at) * 8, Int32(slot & 0xFFFFFFFF), Int32(slot >> 32))
                scale = x_scales + (Int64(token) * self.blocks + lane // 16) * 4
                to = buffer + self.offset["scales"] + (Int64(lane // 16) * self.rows + at) * 4
                for block in cutlass.range(0, self.blocks, 4, unroll=1):
                    two = [load_4(scale + (block + 2 * i) * 4) for i in range(2)]
                    for i in cutlass.range_constexpr(2):
                        store_4(to + Int64(block + 2 * i) * (self.rows * 4), two[i])
            for r in cutlass.range(count, unroll=1):
                source = x + Int64(cute.arch.shuffle_sync(token, r)) * self.hidden + lane * 16
                target = buffer + self.offset["activations"] + Int64(row + r) * self.hidden + lane * 16
                copy_row(source, target, self.hidden, _FLIGHT)
            cute.arch.sync_warp()
            if lane == 0:
                arrived = buffer + self.offset["arrived"]
                tile = row // _TILE
                before = cutlass.min((tile + 1) * _TILE - row, count)
                signals.count_release_sys(arrived + Int64(tile) * 4, before)
                if before < count:
                    signals.count_release_sys(arrived + Int64(tile + 1) * 4, count - before)
