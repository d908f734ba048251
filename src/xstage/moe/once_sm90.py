"""Sending a row once to a rank, however many of its experts were picked, while the GEMMs run; for Hopper (sm_90a), one warp per SM.

A token with `top_k` picks has top_k / ranks of them on every rank on average, and they want the same row. So a rank *posts* a row into
the inbox of every rank that wants it, once, with its scales; and every rank *places* rows: it copies them from its inbox, or from its own
rows, to where its experts' tiles are, and a row's scales, weight and the address of its result's slot beside them. The link carries a row
per rank instead of one per pick; the copies that it no longer carries are made in a GPU's own memory, as those of its own rows were before.

`exchange_sm90.List` has told every rank the source of each of its rows (`sources`); all that a rank told are there when it has come to
the meeting `dispatched`: the warp of the first CTA says so for its rank, and every warp waits for all ranks, behind its first post. In
the list of pairs those are marked that are not the first of their token for that rank; an item of `send_sm90`'s list posts the others.

What a rank needs first goes there as `send_sm90` sends it, per pick and without the way through the inbox: the rows of its first
`near_tiles` tiles. The items that do so post afterwards. A rank with no more tiles than these gets nothing into its inbox.

* A post is over when the copy engine's stores are; then a lane per row stores the number of the call beside it (`st.release.sys`).
* A place is an item of `ITEM_PAIRS` rows of this rank, in the order of tiles. It is done when all its rows are there
  (`ld.acquire.sys` of these numbers, a proxy fence, for the copy engine reads them), and counted by `red.release` where the loading
  warp waits for the tile.

Posts come first where both can be done, and no warp waits for a row: it looks whether it is there, and posts on. So every row is
posted some time, whatever others wait for. Neither runs further than `AHEAD` rounds ahead of the GEMMs, but where these stand
still (`send_sm90`).

Who overwrites what: a peer posts call g + 1 after it passed `combined` of g, which this rank published after its GEMMs, and so after all
it placed. A number of another call is never taken for this one's.

Not covered: rows in another precision than e4m3, results of a token that are added before they are sent back.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from xstage.device import signals, stores
from xstage.device.clock import now_ns, sleep_ns
from xstage.device.loads import load_4, load_16
from xstage.device.meeting import PEERS, RANK, Protocol
from xstage.moe import spans_sm90
from xstage.moe.layout import AHEAD, DISPATCHED, ITEM_PAIRS, MEETINGS, SLOT_BYTES, BufferLayout, piece_bytes, slots_of
from xstage.moe.send_sm90 import PATIENCE_NS, Sender
from xstage.moe.spans import SENT, TURN

_TILE = 128
_POLL_NS = 500


class OnceSender:
    """layout: of the buffers, `once`. slot_bytes: see `send_sm90.Sender`."""

    once = True

    def __init__(self, layout: BufferLayout, slot_bytes: int = SLOT_BYTES) -> None:
        self.world, self.mine, self.top_k, self.hidden = layout.ranks, layout.experts_per_rank, layout.top_k, layout.hidden
        self.blocks, self.rows, self.most = layout.hidden // 128, layout.rows, layout.max_tokens_per_rank
        self.piece, self.slot_bytes = piece_bytes(layout.hidden, slot_bytes), slot_bytes
        self.slots = slots_of(self.piece, slot_bytes)
        self.sender, self.near_rows = Sender(layout, slot_bytes), layout.near_tiles * _TILE
        self.offset = {region.name: region.offset_bytes for region in layout.regions}

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> OnceSender:
        return self

    @cute.jit
    def run(self, given, words, index: Int32, warps: Int32, memory, pace, rows: Int32, marks=None) -> None:
        """All posts and places of warp `index` of `warps`.

        given: addresses of items, pairs, weights, rows in e4m3 and their scales, ends of tiles (see `plan_sm90`). words: control and call
        words of `xstage.device.meeting`. memory, pace, marks: see `send_sm90.Sender.run`; posts are marked. rows: this rank's, padded.
        """
        lane = cute.arch.lane_idx()
        protocol = self._protocol(words)
        if (index == 0) & (lane < self.world):
            protocol.say(DISPATCHED, lane)
        failed = protocol.failed_address()
        progress, entries, round_ = pace
        posts, places, told = load_4(given[0]), rows // ITEM_PAIRS, Int32(0)
        post, place, phase, stuck = index, self.near_rows // ITEM_PAIRS + index, Int32(0), Int32(-1)
        seen, since = Int32(-1), now_ns()
        while (post < posts) | (place < places):
            now = cute.arch.shuffle_sync(stores.load_shared(progress), 0)
            if now != seen:
                seen, since = now, now_ns()
            ahead, moved, missing = Int64(now + AHEAD * round_), Int32(0), Int32(0)
            if (post < posts) & ((ahead * posts >= Int64(post) * entries) | (now == stuck)):
                phase = self._post(given, words, post, memory, phase, marks)
                post += warps
                moved = Int32(1)
            if (told == 0) & (place < places):
                refused = Int32(0)
                if lane < self.world:
                    refused = protocol.wait(DISPATCHED, lane)
                cute.arch.sync_warp()
                told = Int32(1)
                if cute.arch.vote_any_sync(refused != 0):
                    post, place = posts, places  # nobody knows where rows come from
            if (place < places) & ((ahead * places >= Int64(place) * entries) | (now == stuck)):
                done, phase = self._place(given, words, place, memory, phase)
                if done:
                    place += warps
                    moved = Int32(1)
                else:
                    missing = Int32(1)
            if moved == 0:
                # Beside warps that multiply every instruction counts: nothing changes before the CTA takes an entry, or a row comes.
                waiting = cutlass.Boolean(True)
                while waiting:
                    sleep_ns(Int32(_POLL_NS))
                    waiting = (missing == 0) & (stores.load_shared(progress) == now) & (now_ns() - since <= PATIENCE_NS)
                if cute.arch.vote_any_sync(now_ns() - since > PATIENCE_NS):
                    stuck = now
                if cute.arch.vote_any_sync(signals.load_relaxed_gpu(failed) != 0):
                    post, place = posts, places

    def _protocol(self, words: Any) -> Protocol:
        control, call = words
        return Protocol(self.world, control, call, self._words(call))

    @cute.jit
    def _words(self, call: cute.Tensor) -> cute.Tensor:
        """This rank's signal words: the first region of its buffer."""
        pointer = cute.make_ptr(Int64, call[PEERS + Int32(call[RANK])], cute.AddressSpace.gmem, assumed_align=8)
        return cute.make_tensor(pointer, cute.make_layout(len(MEETINGS) * self.world))

    @cute.jit
    def _post(self, given, words, item: Int32, memory, phase: Int32, marks) -> Int32:
        """An item's pairs that are near to their rows; then the rows, with scales, of its tokens' first pairs to the rank's inbox."""
        items, pairs, _, x, x_scales, _ = given
        _, call = words
        lane, me = cute.arch.lane_idx(), Int32(call[RANK])
        if const_expr(marks is not None):
            spans_sm90.begin(marks[0], spans_sm90.SENDS, item)
            spans_sm90.mark(marks[0], spans_sm90.SENDS, TURN)
        place, expert, count, row = load_16(items + Int64(1 + item) * 16)
        rank = expert // self.mine
        if row < self.near_rows:
            phase = self.sender.send(given[:5], call, place, expert, cutlass.min(self.near_rows - row, count), row, memory, phase)
        if (rank != me) & (load_4(items + 4) >> rank & 1 == 1):
            pair = load_4(pairs + Int64(place + cutlass.min(lane, count - 1)) * 4)
            wanted = cute.arch.vote_ballot_sync((lane < count) & (pair >= 0))
            number = Int32(cute.arch.popc(wanted))
            if number > 0:
                # Lane n stands for the n-th of them.
                rest = wanted
                for i in cutlass.range_constexpr(ITEM_PAIRS - 1):
                    if i < lane:
                        rest &= rest - 1
                which = Int32(cute.arch.popc((rest & -rest) - 1))
                token = cute.arch.shuffle_sync(pair, which) // self.top_k
                buffer, first = call[PEERS + rank], me * self.most
                pieces = self.blocks // 4
                for start in cutlass.range(0, number * pieces, 32, unroll=1):
                    at = cutlass.min(start + lane, number * pieces - 1)
                    of = cute.arch.shuffle_sync(token, at // pieces)
                    offset = at % pieces * 16
                    scale = load_16(x_scales + Int64(of) * (4 * self.blocks) + offset)
                    stores.store_16(buffer + self.offset["inbox_scales"] + Int64(first + of) * (4 * self.blocks) + offset, *scale)
                inbox = buffer + self.offset["inbox"] + Int64(first) * self.hidden
                phase = self._copy(-1 - token, number, (x, x), inbox, False, memory, phase)
                cute.arch.sync_warp()
                if lane < number:
                    there = buffer + self.offset["inbox_call"] + Int64(first + token) * 4
                    signals.store_release_sys_32(there, self._protocol(words).generation())
        if const_expr(marks is not None):
            spans_sm90.close(marks[0], spans_sm90.SENDS, SENT, marks[1])
        return phase

    @cute.jit
    def _place(self, given, words, item: Int32, memory, phase: Int32) -> tuple[cutlass.Boolean, Int32]:
        """An item's rows to their tile, if they are all there; whether they were."""
        _, _, _, x, x_scales, tile_end = given
        _, call = words
        lane, me = cute.arch.lane_idx(), Int32(call[RANK])
        buffer, row, tile = call[PEERS + me], item * ITEM_PAIRS, item * ITEM_PAIRS // _TILE
        count = cutlass.min(load_4(tile_end + Int64(tile) * 4) - row, ITEM_PAIRS)
        done = count <= 0
        if count > 0:
            # Lanes 16 … 31 stand for the same rows as 0 … 15: two runs of scales at a time.
            mine, half = lane % ITEM_PAIRS, lane // ITEM_PAIRS
            at = row + mine
            rank, token, pick, weight = load_16(buffer + self.offset["sources"] + Int64(row + cutlass.min(mine, count - 1)) * 16)
            code, there = -1 - token, Int32(1)  # of this rank's own rows
            if rank != me:
                code = rank * self.most + token
                there = Int32(
                    signals.load_acquire_sys_32(buffer + self.offset["inbox_call"] + Int64(code) * 4) == self._protocol(words).generation()
                )
            done = cute.arch.vote_all_sync(there == 1)
            if done:
                cute.arch.sync_warp()
                cute.arch.fence_proxy("async")
                if mine < count:
                    if half == 0:
                        slot = call[PEERS + rank] + self.offset["combine"] + Int64(token * self.top_k + pick) * (self.hidden * 2)
                        stores.store_4(buffer + self.offset["row_weight"] + Int64(at) * 4, weight)
                        stores.store_8(buffer + self.offset["row_slot"] + Int64(at) * 8, Int32(slot & 0xFFFFFFFF), Int32(slot >> 32))
                    scale = buffer + self.offset["inbox_scales"] + Int64(code) * (4 * self.blocks)
                    if code < 0:
                        scale = x_scales + Int64(token) * (4 * self.blocks)
                    to = buffer + self.offset["scales"] + Int64(at) * 4
                    for block in cutlass.range(4 * half, self.blocks, 8, unroll=1):
                        four = load_16(scale + block * 4)
                        for i in cutlass.range_constexpr(4):
                            stores.store_4(to + Int64(block + i) * (self.rows * 4), four[i])
                target = buffer + self.offset["activations"] + Int64(row) * self.hidden
                phase = self._copy(code, count, (x, buffer + self.offset["inbox"]), target, True, memory, phase)
                cute.arch.sync_warp()
                if lane == 0:
                    signals.count_release_sys(buffer + self.offset["arrived"] + Int64(tile) * 4, count)
        return done, phase

    @cute.jit
    def _copy(
        self, code: Int32, count: Int32, sources, target: Int64, placing: cutlass.Constexpr[bool], memory, phase: Int32
    ) -> Int32:  # fmt: skip
        """Rows that the first `count` lanes name, −1 − token of this rank's own or a row of the inbox; they are there when it returns.
        placing: to successive rows at `target`, else to the tokens' rows there."""
        base, barriers = memory
        lane = cute.arch.lane_idx()
        pieces = self.hidden // self.piece
        for first in cutlass.range(0, count * pieces, self.slots, unroll=1):
            piece = first + lane
            owner = cutlass.min(piece, count * pieces - 1) // pieces
            name = cute.arch.shuffle_sync(code, owner)
            if (lane < self.slots) & (piece < count * pieces):
                slot, barrier, offset = base + lane * self.piece, barriers + lane, piece % pieces * self.piece
                stores.bulk_wait_source_free()
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.piece)
                source, to = sources[0] + Int64(-1 - name) * self.hidden, owner
                if const_expr(placing):
                    if name >= 0:
                        source = sources[1] + Int64(name) * self.hidden
                else:
                    to = -1 - name
                stores.bulk_load(slot, source + offset, Int32(self.piece), Int32(barrier.toint()))
                cute.arch.mbarrier_wait(barrier, phase)
                phase ^= 1
                stores.bulk_store(target + Int64(to) * self.hidden + offset, slot, Int32(self.piece))
                stores.bulk_commit()
        stores.bulk_wait_done()
        return phase
