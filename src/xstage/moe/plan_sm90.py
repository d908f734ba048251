"""Counts and plan of an expert-parallel exchange for Hopper (sm_90a): where every row goes, and what the grouped GEMMs have to do.

* `Count`: per chunk of `CHUNK_TOKENS` tokens, how often each expert is picked, and the place of every pair among the chunk's pairs of its
  expert. Sixteen tokens per warp, in order, by `match.any`; no atomics, so places do not depend on timing.
* `Plan`, one CTA: totals of this rank to every rank, a meeting (`counted`) in its middle, then from the counts of all ranks the first row
  of every expert for this rank's pairs, the tiles of this rank's experts, the tables of work of both GEMMs, and the list of rows to send.
  While peers' signals are under way it sums the chunks. Everything is prefix sums and searches; the order of work is `work_table`'s closed
  form. Where the GEMM kernel is to send rows that come in bfloat16, other CTAs of the kernel quantise them meanwhile.

`Plan` is launched while `Count` still runs (programmatic dependent launch): its first CTA waits for the counts, the others need none.

A pair's row is then `first[expert] + chunk_bases[chunk, expert] + positions[pair]`, which is `routing.place`'s. If the meeting failed, or
one before it, all `totals` are 0 and nothing else is written.

Not covered: more experts than `MAX_EXPERTS` (a CTA's threads), more picks per token than a warp has lanes.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from xstage.device.kept import kept
from xstage.device.loads import load_4, load_8
from xstage.device.meeting import PEERS, RANK, Protocol, fake_words
from xstage.device.stores import store_4, store_8, store_16
from xstage.moe.layout import CHUNK_TOKENS, COUNTED, ITEM_PAIRS, MAX_EXPERTS
from xstage.moe.quantize_sm90 import quantize_row
from xstage.moe.work_table import GROUP_UNITS, LAYER_SHIFT, TILE_ROWS, WorkOrder, encoded, entries, partner, place

WARP_TOKENS = 16
CLEARED_BYTES = 16 << 10  # by one CTA
UNIT_THREADS = 8  # of a unit of the tables of work
ENTRIES1, ENTRIES2, TILES, ROWS = 0, 1, 2, 3  # `totals`
_BATCH = 16  # loads of a thread under way at a time
_MAX_PARTS = 16


def load_pick(topk_idx: Int64, pair: Int32, wide: bool) -> Any:
    """Pick number `pair` of those at `topk_idx`. `wide`: they are int64, else int32."""
    return load_8(topk_idx + Int64(pair) * 8) if wide else load_4(topk_idx + Int64(pair) * 4)


@cute.jit
def expert_of(pick, experts: cutlass.Constexpr[int]) -> Int32:
    """The expert that was picked, or `experts` where the pick is masked or outside."""
    expert = Int32(experts)
    if (pick >= 0) & (pick < experts):
        expert = Int32(pick)
    return expert


class Count:
    """One CTA per chunk; more if there is much to clear."""

    threads = 32 * (CHUNK_TOKENS // WARP_TOKENS)

    def __init__(self, experts: int, top_k: int, wide: bool):
        self.experts, self.top_k, self.wide = experts, top_k, wide

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Count:
        return self

    @cute.jit
    def __call__(
        self, topk_idx: Int64, tokens: Int32, chunk_counts: cute.Tensor, positions: cute.Tensor, cleared: Int64, clear_bytes: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """Launch.

        Args:
            topk_idx: address of [tokens, top_k]. chunk_counts: int32 [chunks · experts], written. positions: int32 [tokens · top_k],
                written; of no meaning where the pick is masked.
            cleared, clear_bytes: memory that is zeroed on the way, a multiple of 16 bytes.
        """
        chunks = cutlass.max((tokens + (CHUNK_TOKENS - 1)) // CHUNK_TOKENS, 1)
        # Few tokens may have much to clear, for there are rows for the worst routing: more CTAs than chunks then.
        ctas = cutlass.max(chunks, clear_bytes // CLEARED_BYTES)
        self.kernel(topk_idx, tokens, chunk_counts, positions, cleared, clear_bytes).launch(
            grid=(ctas, 1, 1), block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, topk_idx: Int64, tokens: Int32, chunk_counts: cute.Tensor, positions: cute.Tensor, cleared: Int64, clear_bytes: Int32
    ):  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        start = (cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]) * 16
        for offset in cutlass.range(start, clear_bytes, cute.arch.grid_dim()[0] * self.threads * 16, unroll=1):
            store_16(cleared + Int64(offset), Int32(0), Int32(0), Int32(0), Int32(0))
        warps, row = self.threads // 32, self.experts + 1  # the last bin takes masked picks
        bins = SmemAllocator().allocate_tensor(Int32, cute.make_layout(warps * row), byte_alignment=16)
        if cute.arch.block_idx()[0] * CHUNK_TOKENS < tokens:
            self.chunk(topk_idx, tokens, chunk_counts, positions, bins)

    @cute.jit
    def chunk(self, topk_idx: Int64, tokens: Int32, chunk_counts: cute.Tensor, positions: cute.Tensor, bins: cute.Tensor) -> None:
        thread, chunk = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = thread // 32, thread % 32
        warps, row = self.threads // 32, self.experts + 1
        steps = -(-WARP_TOKENS * self.top_k // 32)
        first = chunk * CHUNK_TOKENS + warp * WARP_TOKENS
        start = first * self.top_k + lane
        end = cutlass.min(first + WARP_TOKENS, tokens) * self.top_k
        picks = [load_pick(topk_idx, cutlass.min(start + i * 32, tokens * self.top_k - 1), self.wide) for i in range(steps)]
        for i in cutlass.range(thread, warps * row, self.threads, unroll=1):
            bins[i] = Int32(0)
        cute.arch.sync_threads()

        expert = cute.make_rmem_tensor((steps,), Int32)
        local = cute.make_rmem_tensor((steps,), Int32)
        for i in cutlass.range_constexpr(steps):
            expert[i] = expert_of(picks[i], self.experts)
            if start + i * 32 >= end:
                expert[i] = Int32(self.experts)
        # Each warp counts its own tokens in order; lanes with the same expert are in order of their pairs.
        for i in cutlass.range_constexpr(steps):
            place_of = warp * row + expert[i]
            same = cute.arch.match_sync(0xFFFFFFFF, expert[i])
            below = Int32(cute.arch.popc(same & cute.arch.lanemask_lt()))
            before = bins[place_of]
            cute.arch.sync_warp()
            if below == 0:
                bins[place_of] = before + Int32(cute.arch.popc(same))
            cute.arch.sync_warp()
            local[i] = before + below
        cute.arch.sync_threads()

        for i in cutlass.range_constexpr(steps):
            if start + i * 32 < end:
                position = local[i]
                for w in cutlass.range_constexpr(warps - 1):
                    if w < warp:
                        position += bins[w * row + expert[i]]
                positions[start + i * 32] = position
        for e in cutlass.range(thread, self.experts, self.threads, unroll=1):
            total = Int32(0)
            for w in cutlass.range_constexpr(warps):
                total += bins[w * row + e]
            chunk_counts[chunk * self.experts + e] = total


class Plan:
    """CTAs of `MAX_EXPERTS` threads. columns1, columns2: column tiles of the two GEMMs, even. order: of both in one kernel, or None.
    hidden: columns of the bfloat16 rows that all CTAs but the first quantise; 0: none. near: `near_tiles` of the layout.

    counts: offset of the layout's region, and bytes from one of its rows to the next.
    """

    threads = MAX_EXPERTS

    def __init__(
        self,
        world: int,
        experts: int,
        counts: tuple[int, int],
        columns1: int,
        columns2: int,
        order: WorkOrder | None = None,
        hidden: int = 0,
        near: int = 0,
    ):
        self.near = near
        self.world, self.experts, self.hidden = world, experts, hidden
        self.counts_offset, self.counts_pitch = counts
        self.columns1, self.columns2 = columns1, columns2
        self.order: Any = order
        self.mine = experts // world
        self.parts = min(self.threads // experts, _MAX_PARTS)  # threads that share an expert's chunks

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Plan:
        return self

    @cute.jit
    def __call__(
        self, tokens: Int32, chunk_bases: cute.Tensor, first: cute.Tensor, tile_expert: cute.Tensor, tile_end: cute.Tensor,
        expert_counts: cute.Tensor, totals: cute.Tensor, work1: cute.Tensor, work2: cute.Tensor, work: cute.Tensor, ready: cute.Tensor,
        send_first: cute.Tensor, items: cute.Tensor, x: Int64, rows: Int64, scales: Int64, control: cute.Tensor, call: cute.Tensor,
        words: cute.Tensor, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """Launch.

        Args:
            chunk_bases: int32 [chunks · experts], the chunks' counts; becomes the pairs of the chunks before, per expert.
            first: int32 [experts]: row, at its owner, of this rank's first pair of each expert.
            tile_expert, tile_end: int32 [tiles]: local expert of a tile, and the end of that expert's real rows.
            expert_counts: int32 [experts of this rank]. totals: int32 [4], see `ENTRIES1` and the others.
            work1, work2: int32 [2 · entries], see `work_table`; without an order only.
            work: int32 [4 · entries of both layers], see `work_table`, ready: int32 [1 + tiles], zeroed; both with an order only. So are
            send_first: int32 [experts]: place of this rank's first pair of each expert in the list of pairs to send.
            items: int32 [4 · (1 + items)]: how many there are, a bit for every rank that has more than `near` tiles, and per item place in
                the list, expert, pairs, row at the expert's rank.
            x, rows, scales: addresses; bfloat16 [tokens, hidden] becomes e4m3 with float32 [tokens, hidden / 128] where `hidden` is not 0.
            control, call, words: see `xstage.device.meeting`.
        """
        ctas = Int32(1)
        if const_expr(self.hidden > 0):
            ctas += (tokens + (self.threads // 32 - 1)) // (self.threads // 32)
        self.kernel(
            tokens, chunk_bases, first, tile_expert, tile_end, expert_counts, totals, work1, work2, work, ready, send_first, items,
            x, rows, scales, control, call, words
        ).launch(grid=(ctas, 1, 1), block=[self.threads, 1, 1], stream=stream, use_pdl=True)  # fmt: skip

    @cute.kernel
    def kernel(
        self, tokens: Int32, chunk_bases: cute.Tensor, first: cute.Tensor, tile_expert: cute.Tensor, tile_end: cute.Tensor,
        expert_counts: cute.Tensor, totals: cute.Tensor, work1: cute.Tensor, work2: cute.Tensor, work: cute.Tensor, ready: cute.Tensor,
        send_first: cute.Tensor, items: cute.Tensor, x: Int64, rows: Int64, scales: Int64, control: cute.Tensor, call: cute.Tensor,
        words: cute.Tensor,
    ):  # fmt: skip
        smem = SmemAllocator()
        partial = smem.allocate_tensor(Int32, cute.make_layout(self.threads), byte_alignment=16)
        tile_sums = smem.allocate_tensor(Int32, cute.make_layout(self.experts + 1), byte_alignment=16)
        single_sums = smem.allocate_tensor(Int32, cute.make_layout(self.experts + 1), byte_alignment=16)
        pair_sums = smem.allocate_tensor(Int32, cute.make_layout(self.experts + 1), byte_alignment=16)
        unit_first = smem.allocate_tensor(Int32, cute.make_layout(self.mine + 1), byte_alignment=16)
        loads = smem.allocate_tensor(Int32, cute.make_layout(self.mine), byte_alignment=16)
        warp_sums = smem.allocate_tensor(Int32, cute.make_layout(64), byte_alignment=16)
        refused = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        memory = (partial, tile_sums, single_sums, pair_sums, unit_first, loads, warp_sums, refused)
        if cute.arch.block_idx()[0] == 0:
            self.make(
                tokens, chunk_bases, first, tile_expert, tile_end, expert_counts, totals, work1, work2, work, ready, send_first, items,
                control, call, words, memory,
            )  # fmt: skip
        else:
            cute.arch.griddepcontrol_launch_dependents()
            if const_expr(self.hidden > 0):
                token = (cute.arch.block_idx()[0] - 1) * (self.threads // 32) + cute.arch.thread_idx()[0] // 32
                if token < tokens:
                    quantize_row(x, rows, scales, token, self.hidden)

    @cute.jit
    def make(
        self, tokens: Int32, chunk_bases: cute.Tensor, first: cute.Tensor, tile_expert: cute.Tensor, tile_end: cute.Tensor,
        expert_counts: cute.Tensor, totals: cute.Tensor, work1: cute.Tensor, work2: cute.Tensor, work: cute.Tensor, ready: cute.Tensor,
        send_first: cute.Tensor, items: cute.Tensor, control: cute.Tensor, call: cute.Tensor, words: cute.Tensor, memory,
    ) -> None:  # fmt: skip
        """The plan. memory: shared, of `kernel`."""
        cute.arch.griddepcontrol_wait()
        partial, tile_sums, single_sums, pair_sums, unit_first, loads, warp_sums, refused = memory
        thread = cute.arch.thread_idx()[0]
        protocol = Protocol(self.world, control, call, words)
        me = Int32(call[RANK])
        expert, part = thread % self.experts, thread // self.experts
        chunks = (tokens + (CHUNK_TOKENS - 1)) // CHUNK_TOKENS
        share = (chunks + (self.parts - 1)) // self.parts
        begin = part * share
        end = cutlass.min(begin + share, chunks)
        if part >= self.parts:
            end = begin
        if thread == 0:
            refused[0] = Int32(0)

        partial[thread] = self.sum_chunks(chunk_bases, expert, begin, end)
        cute.arch.sync_threads()
        if thread < self.experts:
            total = Int32(0)
            for i in cutlass.range_constexpr(self.parts):
                total += partial[i * self.experts + thread]
            for rank in cutlass.range_constexpr(self.world):
                store_4(self.counts_of(call[PEERS + rank], me, thread), total)
        # The barrier puts the stores of all threads before the release of the threads that publish.
        cute.arch.sync_threads()
        if thread < self.world:
            protocol.say(COUNTED, thread)
        before = Int32(0)
        for i in cutlass.range_constexpr(self.parts):
            if i < part:
                before += partial[i * self.experts + expert]
        self.scan_chunks(chunk_bases, expert, begin, end, before)
        if thread < self.world:
            if protocol.wait(COUNTED, thread) != 0:
                refused[0] = Int32(1)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()

        if refused[0] != 0:
            if thread < 4:
                totals[thread] = Int32(0)
                if const_expr(self.order is not None):
                    items[thread] = Int32(0)
        else:
            self.derive(
                me, thread, call, first, tile_expert, tile_end, expert_counts, totals, work1, work2, work, ready, tile_sums, single_sums,
                unit_first, loads, warp_sums,
            )  # fmt: skip
            if const_expr(self.order is not None):
                cute.arch.sync_threads()
                self.list_sends(me, thread, first, send_first, items, partial, tile_sums, single_sums, pair_sums, warp_sums)

    @cute.jit
    def list_sends(
        self, me: Int32, thread: Int32, first: cute.Tensor, send_first: cute.Tensor, items: cute.Tensor, partial: cute.Tensor,
        tile_sums: cute.Tensor, item_sums: cute.Tensor, pair_sums: cute.Tensor, warp_sums: cute.Tensor,
    ) -> None:  # fmt: skip
        """Pairs to send, in the order in which they are needed.

        A rank takes up its rows in order, and all ranks are taken to need the same time: an item comes when its row's share of its
        rank's rows comes. The items of one rank are in this order as they are, so an item's place follows from searches in the others'.
        """
        count = Int32(0)
        if thread < self.experts:
            for i in cutlass.range_constexpr(self.parts):
                count += partial[i * self.experts + thread]
        here = (count + (ITEM_PAIRS - 1)) // ITEM_PAIRS
        pair = self.exclusive_sum(count, warp_sums, 0, thread)
        item = self.exclusive_sum(here, warp_sums, 32, thread)
        rows = partial  # all have read it
        if thread < self.experts:
            send_first[thread], pair_sums[thread], item_sums[thread], rows[thread] = pair, pair, item, first[thread]
        if thread == self.experts - 1:
            pair_sums[self.experts], item_sums[self.experts] = pair + count, item + here
            items[0] = item + here
            more = Int32(0)
            for rank in cutlass.range_constexpr(self.world):
                more |= Int32(tile_sums[(rank + 1) * self.mine] - tile_sums[rank * self.mine] > self.near) << rank
            items[1] = more
        cute.arch.sync_threads()
        for index in cutlass.range(thread, item_sums[self.experts], self.threads, unroll=1):
            expert = self.search(item_sums, Int32(0), index, self.experts)
            rank, done = expert // self.mine, (index - item_sums[expert]) * ITEM_PAIRS
            row, place_of = rows[expert] + done, index - item_sums[rank * self.mine]
            for step in cutlass.range_constexpr(1, self.world):
                place_of += self.items_before(me, row, rank, (rank + step) % self.world, rows, tile_sums, item_sums)
            pairs = cutlass.min(pair_sums[expert + 1] - pair_sums[expert] - done, ITEM_PAIRS)
            store_16(items.iterator.toint() + Int64(1 + place_of) * 16, pair_sums[expert] + done, expert, pairs, row)

    @cute.jit
    def items_before(
        self, me: Int32, row: Int32, rank: Int32, other: Int32, rows: cute.Tensor, tile_sums: cute.Tensor, item_sums: cute.Tensor
    ) -> Int32:
        """Items for rank `other` that come before the one for `row` of `rank`; of equal ones the next rank's come first."""
        from_rank, from_other = rank * self.mine, other * self.mine
        tiles, other_tiles = (
            tile_sums[from_rank + self.mine] - tile_sums[from_rank],
            tile_sums[from_other + self.mine] - tile_sums[from_other],
        )
        scaled = Int64(row) * other_tiles
        if (other - me + (self.world - 1)) % self.world > (rank - me + (self.world - 1)) % self.world:
            scaled -= 1
        last = Int32(scaled // tiles)  # rows up to this one come before; −1: none
        expert = from_other + self.search(rows, from_other, last, self.mine)
        inside = cutlass.max(last + ITEM_PAIRS - rows[expert], 0) // ITEM_PAIRS
        return item_sums[expert] - item_sums[from_other] + cutlass.min(inside, item_sums[expert + 1] - item_sums[expert])

    def counts_of(self, buffer: Int64, rank: Int32, expert: Int32) -> Int64:
        """Address of a count in the buffer at `buffer`."""
        return buffer + self.counts_offset + Int64(rank * self.counts_pitch + expert * 4)

    @cute.jit
    def sum_chunks(self, counts: cute.Tensor, expert: Int32, begin: Int32, end: Int32) -> Int32:
        total = Int32(0)
        for c in cutlass.range(begin, end, _BATCH, unroll=1):
            batch = self.load_chunks(counts, expert, c, end)
            for i in cutlass.range_constexpr(_BATCH):
                total += batch[i]
        return total

    @cute.jit
    def scan_chunks(self, counts: cute.Tensor, expert: Int32, begin: Int32, end: Int32, before: Int32) -> None:
        for c in cutlass.range(begin, end, _BATCH, unroll=1):
            batch = self.load_chunks(counts, expert, c, end)
            for i in cutlass.range_constexpr(_BATCH):
                if c + i < end:
                    counts[(c + i) * self.experts + expert] = before
                before += batch[i]

    @cute.jit
    def load_chunks(self, counts: cute.Tensor, expert: Int32, c: Int32, end: Int32) -> cute.Tensor:
        """Counts of `_BATCH` chunks from `c` on, 0 from `end` on; all loads are issued before one is used."""
        batch = cute.make_rmem_tensor((_BATCH,), Int32)
        for i in cutlass.range_constexpr(_BATCH):
            batch[i] = counts[cutlass.min(c + i, end - 1) * self.experts + expert]
        for i in cutlass.range_constexpr(_BATCH):
            batch[i] = batch[i] if c + i < end else Int32(0)
        return batch

    @cute.jit
    def derive(
        self, me: Int32, thread: Int32, call: cute.Tensor, first: cute.Tensor, tile_expert: cute.Tensor, tile_end: cute.Tensor,
        expert_counts: cute.Tensor, totals: cute.Tensor, work1: cute.Tensor, work2: cute.Tensor, work: cute.Tensor, ready: cute.Tensor,
        tile_sums: cute.Tensor, single_sums: cute.Tensor, unit_first: cute.Tensor, loads: cute.Tensor, warp_sums: cute.Tensor,
    ) -> None:  # fmt: skip
        """Everything that follows from the counts of all ranks; thread e works for expert e."""
        mine, from_me = self.mine, me * self.mine
        lower, load = Int32(0), Int32(0)
        if thread < self.experts:
            buffer = call[PEERS + me]
            counts = cute.make_rmem_tensor((self.world,), Int32)
            for rank in cutlass.range_constexpr(self.world):
                counts[rank] = load_4(self.counts_of(buffer, Int32(rank), thread))
            for rank in cutlass.range_constexpr(self.world):
                load += counts[rank]
                if rank < me:
                    lower += counts[rank]
        tiles = (load + (TILE_ROWS - 1)) // TILE_ROWS
        single = tiles & 1
        tiles_before = self.exclusive_sum(tiles, warp_sums, 0, thread)
        singles_before = self.exclusive_sum(single, warp_sums, 32, thread)
        if thread < self.experts:
            tile_sums[thread], single_sums[thread] = tiles_before, singles_before
        if thread == self.experts - 1:
            tile_sums[self.experts], single_sums[self.experts] = tiles_before + tiles, singles_before + single
        cute.arch.sync_threads()

        tile_base, single_base = tile_sums[from_me], single_sums[from_me]
        tile_count = tile_sums[from_me + mine] - tile_base
        single_count = single_sums[from_me + mine] - single_base
        units = (tile_count + single_count) // 2
        if thread < self.experts:
            first[thread] = (tiles_before - tile_sums[thread // mine * mine]) * TILE_ROWS + lower
            local = thread - from_me
            if (local >= 0) & (local < mine):
                loads[local] = load
                expert_counts[local] = load
                unit_first[local] = (tiles_before - tile_base + singles_before - single_base) // 2
        if thread == 0:
            unit_first[mine] = units
            totals[ENTRIES1] = entries(units, single_count, self.columns1)
            totals[ENTRIES2] = entries(units, single_count, self.columns2)
            totals[TILES] = tile_count
            totals[ROWS] = tile_count * TILE_ROWS
            if const_expr(self.order is not None):
                ready[0] = Int32(0)
        cute.arch.sync_threads()

        for tile in cutlass.range(thread, tile_count, self.threads, unroll=1):
            owner = self.search(tile_sums, from_me, tile + tile_base, self.mine)
            tile_expert[tile] = owner
            tile_end[tile] = (tile_sums[from_me + owner] - tile_base) * TILE_ROWS + loads[owner]
            if const_expr(self.order is not None):
                ready[1 + tile] = Int32(0)
        turn = thread % UNIT_THREADS
        for unit in cutlass.range(thread // UNIT_THREADS, units, self.threads // UNIT_THREADS, unroll=1):
            owner = self.search(unit_first, Int32(0), unit, self.mine)
            group = unit // GROUP_UNITS * GROUP_UNITS
            group_end = cutlass.min(group + GROUP_UNITS, units)
            # Single units before a unit are those of the experts before: an expert's single unit is its last.
            singles = single_sums[from_me + owner] - single_base
            singles_first = single_sums[from_me + self.search(unit_first, Int32(0), group, self.mine)] - single_base
            singles_end = single_count
            if group_end < units:
                singles_end = single_sums[from_me + self.search(unit_first, Int32(0), group_end, self.mine)] - single_base
            m_tile = tile_sums[from_me + owner] - tile_base + 2 * (unit - unit_first[owner])
            alone = m_tile + 1 == tile_sums[from_me + owner + 1] - tile_base
            group_of = (group, singles_first, group_end - group, singles_end - singles_first)
            if const_expr(self.order is None):
                self.write(work1, 0, unit, turn, singles, group_of, m_tile, alone, None)
                self.write(work2, 1, unit, turn, singles, group_of, m_tile, alone, None)
            else:
                wave = unit // self.order.wave_units * self.order.wave_units
                wave_end = cutlass.min(wave + self.order.wave_units, units)
                singles_wave = single_sums[from_me + self.search(unit_first, Int32(0), wave, self.mine)] - single_base
                singles_wave_end = single_count
                if wave_end < units:
                    singles_wave_end = single_sums[from_me + self.search(unit_first, Int32(0), wave_end, self.mine)] - single_base
                # Where the wave begins in Linear-2 and ends in Linear-1, entries of both, expert, end of its rows.
                common = (
                    entries(wave, singles_wave, self.columns2), entries(wave_end, singles_wave_end, self.columns1),
                    entries(units, single_count, self.columns1), entries(units, single_count, self.columns2),
                    owner, (tile_sums[from_me + owner] - tile_base) * TILE_ROWS + loads[owner],
                )  # fmt: skip
                self.write(work, 0, unit, turn, singles, group_of, m_tile, alone, common)
                self.write(work, 1, unit, turn, singles, group_of, m_tile, alone, common)

    @cute.jit
    def write(
        self, table: cute.Tensor, layer: cutlass.Constexpr[int], unit: Int32, turn: Int32, singles: Int32, group, m_tile: Int32, alone,
        common,
    ) -> None:  # fmt: skip
        """One of `UNIT_THREADS` shares of a unit's entries: in the layer's table, or with an order in the list of both."""
        columns = self.columns2 if const_expr(layer == 1) else self.columns1
        for n in cutlass.range(2 * turn, columns, 2 * UNIT_THREADS, unroll=1):  # unrolled, its code would come from memory once per use
            even = place(n, unit, singles, group, columns)
            if alone:
                self.write_entry(table, layer, even, encoded(m_tile, n, 1), common)
            else:
                self.write_entry(table, layer, even, encoded(m_tile, n, 0), common)
                self.write_entry(table, layer, place(n + 1, unit, singles, group, columns), encoded(m_tile, n + 1, 0), common)

    @cute.jit
    def write_entry(self, table: cute.Tensor, layer: cutlass.Constexpr[int], index: Int32, word: Int32, common) -> None:
        address = table.iterator.toint()
        if const_expr(self.order is None):
            store_8(address + Int64(index) * 8, word, partner(word))
        else:
            wave_start, wave_end, end1, end2, owner, end = common
            if const_expr(layer == 0):
                before, other = index + 1, end2
                for candidate in self.order.passed(index, wave_start):
                    other = cutlass.min(other, candidate)
                other = cutlass.max(other, 0)
            else:
                other = Int32(0)
                for candidate in self.order.reach(index, wave_end):
                    other = cutlass.max(other, candidate)
                other = cutlass.min(other, end1)
                before = other
            store_16(address + Int64(index + other) * 16, word | layer << LAYER_SHIFT, before, owner, end)

    @cute.jit
    def search(self, sums: cute.Tensor, offset: Int32, value: Int32, size: cutlass.Constexpr[int]) -> Int32:
        """The last e < size with sums[offset + e] ≤ value, or 0; `sums` do not fall from `offset` on."""
        low = Int32(0)
        for step in cutlass.range_constexpr((size - 1).bit_length()):
            middle = low + (1 << ((size - 1).bit_length() - 1 - step))
            if middle < size:
                if sums[offset + middle] <= value:
                    low = middle
        return low

    @cute.jit
    def exclusive_sum(self, value: Int32, warp_sums: cute.Tensor, at: cutlass.Constexpr[int], thread: Int32) -> Int32:
        """Sum of `value` over the threads before this one; all threads call it. Uses 32 words of `warp_sums` from `at` on."""
        warp, lane = thread // 32, thread % 32
        inside = self.inclusive_in_warp(value, lane)
        if lane == 31:
            warp_sums[at + warp] = inside
        cute.arch.sync_threads()
        if warp == 0:
            warp_sums[at + lane] = self.inclusive_in_warp(warp_sums[at + lane], lane)
        cute.arch.sync_threads()
        before = Int32(0)
        if warp > 0:
            before = warp_sums[at + warp - 1]
        return before + inside - value

    @cute.jit
    def inclusive_in_warp(self, value: Int32, lane: Int32) -> Int32:
        total = value
        for i in cutlass.range_constexpr(5):
            up = cute.arch.shuffle_sync_up(total, 1 << i)
            if lane >= 1 << i:
                total += up
        return total


def fake_int32(count: int) -> list[Any]:
    """Stand-ins for `count` vectors of int32 of any length, to compile with."""
    return [cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in range(count)]


@kept
def compiled_count(experts: int, top_k: int, wide: bool) -> Any:
    """`Count`; call it with (address of topk_idx, tokens, chunk_counts, positions)."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        Count(experts, top_k, wide), Int64(0), Int32(0), *fake_int32(2), Int64(0), Int32(0), stream, options="--enable-tvm-ffi"
    )


@kept
def compiled_plan(
    world: int, experts: int, counts: tuple[int, int], columns1: int, columns2: int, order: WorkOrder | None = None, hidden: int = 0,
    near: int = 0,
) -> Any:  # fmt: skip
    """`Plan`; call it with the arguments of `Plan.__call__`, without the stream."""
    kernel = Plan(world, experts, counts, columns1, columns2, order, hidden, near)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, Int32(0), *fake_int32(12), *[Int64(0)] * 3, *fake_words(3), stream, options="--enable-tvm-ffi"
    )  # fmt: skip
