"""Kernels that move rows of an expert-parallel layer for Hopper (sm_90a): dispatch, arrange, reduce.

* `Dispatch`, one token per warp: 16-byte pieces of the row go straight to the row of every pick, local or remote, 512 contiguous bytes a
  warp and store. Columns run outermost, picks inside, so a row is read and quantised once. A token's picks lie on several ranks and
  every SM works on many tokens: remote stores spread evenly over the kernel, which is as long as the link needs.
* `Fetch`, with `layout.pull`: then `Dispatch` puts each row once into this rank's own buffer and sends sources only, and after the
  meeting a warp per arrived row reads it from its source rank.
* `Arrange`, one CTA per tile that has arrived: scales from row-major, as they travel, to m-major, as the GEMM reads them; a row's routing
  weight, and the address of the slot where its result goes.
* `Reduce`: a token's slots, added in order of picks in float32. A thread adds one 16-byte piece, its loads go out ahead of the sums; the
  piece of a masked pick is a piece of zeros.
* `List`, instead of the first two where the GEMM kernel sends rows itself (`xstage.moe.send_sm90`), a pair per thread.

Nothing is stored once a meeting has failed; `Arrange` then sets all `totals` to 0, so that no GEMM runs on rows that did not come.

Not covered: rows of other precision than e4m3, one copy of a row for several picks on one rank, hidden sizes that 512 does not divide.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from xstage.device.floats import as_float, bf16_pair, pack_bf16
from xstage.device.kept import kept
from xstage.device.loads import load_4, load_16, load_16_once
from xstage.device.meeting import FAILED, PEERS, RANK, fake_words
from xstage.device.stores import store_16
from xstage.moe.layout import CHUNK_TOKENS, BufferLayout
from xstage.moe.plan_sm90 import TILES, expert_of, fake_int32, load_pick
from xstage.moe.quantize_sm90 import WARP_COLUMNS, load_quantized
from xstage.moe.work_table import TILE_ROWS

_BLOCK = 128  # columns of one scale
_FLIGHT = 8  # pieces of a row that a lane has under way


@cute.jit
def copy_row(source: Int64, target: Int64, size: cutlass.Constexpr[int], flight: cutlass.Constexpr[int]) -> None:
    """A warp copies `size` bytes, a multiple of 512. source, target: of the lane's 16 bytes. flight: pieces loaded before one is stored."""
    for offset in cutlass.range(0, size, 512 * flight, unroll=1):
        pieces = [load_16(source + cutlass.min(offset + 512 * i, size - 512)) for i in range(flight)]
        for i in cutlass.range_constexpr(flight):
            if offset + 512 * i < size:
                store_16(target + offset + 512 * i, *pieces[i])


class _Kernel:
    """What the kernels share: sizes of a layout, known when they are compiled."""

    threads = 256

    def __init__(self, layout: BufferLayout):
        self.ranks, self.experts, self.mine = layout.ranks, layout.experts, layout.experts_per_rank
        self.hidden, self.top_k = layout.hidden, layout.top_k
        self.scales = layout.hidden // _BLOCK  # per row
        self.offset = {region.name: region.offset_bytes for region in layout.regions}

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> _Kernel:
        return self


class Dispatch(_Kernel):
    """`wide`: picks are int64. `quantized`: rows come as e4m3 with scales, else as bf16."""

    def __init__(self, layout: BufferLayout, wide: bool, quantized: bool):
        super().__init__(layout)
        self.wide, self.quantized, self.pull = wide, quantized, layout.pull
        self.targets = 1 if self.pull else self.top_k  # places that a row is stored to

    @cute.jit
    def __call__(
        self, x: Int64, x_scales: Int64, topk_idx: Int64, topk_weights: Int64, tokens: Int32, chunk_bases: cute.Tensor,
        positions: cute.Tensor, first: cute.Tensor, control: cute.Tensor, call: cute.Tensor, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """Launch.

        Args:
            x, x_scales, topk_idx, topk_weights: addresses of [tokens, hidden], float32 [tokens, hidden / 128] (unused for bf16),
                [tokens, top_k], float32 [tokens, top_k].
            chunk_bases, positions, first: see `xstage.moe.plan_sm90`. control, call: see `xstage.device.meeting`.
        """
        tokens_per_cta = self.threads // 32
        ctas = cutlass.max((tokens + (tokens_per_cta - 1)) // tokens_per_cta, 1)
        self.kernel(x, x_scales, topk_idx, topk_weights, tokens, chunk_bases, positions, first, control, call).launch(
            grid=(ctas, 1, 1), block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, x: Int64, x_scales: Int64, topk_idx: Int64, topk_weights: Int64, tokens: Int32, chunk_bases: cute.Tensor,
        positions: cute.Tensor, first: cute.Tensor, control: cute.Tensor, call: cute.Tensor,
    ):  # fmt: skip
        warps = self.threads // 32
        smem = SmemAllocator()
        rows = smem.allocate_tensor(Int64, cute.make_layout((self.top_k, warps)), byte_alignment=16)
        scale_rows = smem.allocate_tensor(Int64, cute.make_layout((self.top_k, warps)), byte_alignment=16)
        scales = smem.allocate_tensor(Int32, cute.make_layout((self.scales, warps)), byte_alignment=16)
        warp = cute.arch.thread_idx()[0] // 32
        token = cute.arch.block_idx()[0] * warps + warp
        if (token < tokens) & (control[FAILED] == 0):
            self.token(
                token, x, x_scales, topk_idx, topk_weights, chunk_bases, positions, first, call,
                rows[None, warp], scale_rows[None, warp], scales[None, warp],
            )  # fmt: skip

    @cute.jit
    def token(
        self, token: Int32, x: Int64, x_scales: Int64, topk_idx: Int64, topk_weights: Int64, chunk_bases: cute.Tensor,
        positions: cute.Tensor, first: cute.Tensor, call: cute.Tensor, rows: cute.Tensor, scale_rows: cute.Tensor, scales: cute.Tensor,
    ) -> None:  # fmt: skip
        """One warp: addresses of the token's rows, 0 where a pick is masked, then the row, then its scales."""
        lane = cute.arch.thread_idx()[0] % 32
        if lane < self.top_k:
            pair = token * self.top_k + lane
            expert = expert_of(load_pick(topk_idx, pair, self.wide), self.experts)
            row_at, scales_at = Int64(0), Int64(0)
            if expert < self.experts:
                buffer = call[PEERS + expert // self.mine]
                row = Int64(first[expert] + chunk_bases[token // CHUNK_TOKENS * self.experts + expert] + positions[pair])
                row_at = buffer + self.offset["activations"] + row * self.hidden
                scales_at = buffer + self.offset["activation_scales"] + row * (self.scales * 4)
                weight = load_4(topk_weights + Int64(pair) * 4)
                store_16(buffer + self.offset["sources"] + row * 16, Int32(call[RANK]), token, lane, weight)
            rows[lane], scale_rows[lane] = row_at, scales_at
        if const_expr(self.pull):
            if lane == 0:
                mine = call[PEERS + Int32(call[RANK])]
                rows[0] = mine + self.offset["staged"] + Int64(token) * self.hidden
                scale_rows[0] = mine + self.offset["staged_scales"] + Int64(token) * (self.scales * 4)
        cute.arch.sync_warp()

        for block in cutlass.range(self.hidden // WARP_COLUMNS, unroll=1):
            column = block * WARP_COLUMNS + lane * 16
            at = Int64(token) * self.hidden + column
            if const_expr(self.quantized):
                piece: Any = load_16_once(x + at)
            else:
                piece, scale = load_quantized(x + at * 2)
                if lane % 8 == 0:
                    scales[block * 4 + lane // 8] = scale
            for pick in cutlass.range_constexpr(self.targets):
                row_at = rows[pick]
                if row_at != 0:
                    store_16(row_at + column, *piece)
        cute.arch.sync_warp()

        pieces = self.scales // 4
        for i in cutlass.range_constexpr(-(-self.targets * pieces // 32)):
            index = i * 32 + lane
            if index < self.targets * pieces:
                scales_at, piece_index = scale_rows[index // pieces], index % pieces
                if scales_at != 0:
                    if const_expr(self.quantized):
                        four: Any = load_16(x_scales + (Int64(token) * self.scales + piece_index * 4) * 4)
                    else:
                        four = [scales[piece_index * 4 + j] for j in range(4)]
                    store_16(scales_at + piece_index * 16, *four)


class Fetch(_Kernel):
    """One warp per row that the buffer can hold."""

    @cute.jit
    def __call__(
        self, buffer: Int64, tile_end: cute.Tensor, totals: cute.Tensor, control: cute.Tensor, call: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        """Launch. Args: see `Arrange`."""
        self.kernel(buffer, tile_end, totals, control, call).launch(
            grid=(tile_end.shape[0] * (TILE_ROWS // (self.threads // 32)), 1, 1), block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, buffer: Int64, tile_end: cute.Tensor, totals: cute.Tensor, control: cute.Tensor, call: cute.Tensor):
        row = cute.arch.block_idx()[0] * (self.threads // 32) + cute.arch.thread_idx()[0] // 32
        tile = row // TILE_ROWS
        if (control[FAILED] == 0) & (tile < totals[TILES]):
            if row < tile_end[tile]:
                self.row(row, cute.arch.lane_idx(), buffer, call)

    @cute.jit
    def row(self, row: Int32, lane: Int32, buffer: Int64, call: cute.Tensor) -> None:
        rank, token, _, _ = load_16(buffer + self.offset["sources"] + Int64(row) * 16)
        source = call[PEERS + rank]
        scale = Int64(lane * 16)
        if lane < self.scales // 4:
            at = buffer + self.offset["activation_scales"] + Int64(row) * (self.scales * 4)
            store_16(at + scale, *load_16_once(source + self.offset["staged_scales"] + Int64(token) * (self.scales * 4) + scale))
        here = source + self.offset["staged"] + Int64(token) * self.hidden + lane * 16
        there = buffer + self.offset["activations"] + Int64(row) * self.hidden + lane * 16
        copy_row(here, there, self.hidden, _FLIGHT)


class List(_Kernel):
    """Before a kernel that sends rows itself: pairs listed in the order of `Plan.list_sends`. A pair per thread.

    With `layout.once` the experts' ranks are told the source of every row that is not near (`once_sm90`), and −1 − pair stands where the
    same token has a pair before this one, in the order of experts, on the same rank.
    """

    def __init__(self, layout: BufferLayout, wide: bool):
        super().__init__(layout)
        self.wide, self.once, self.near_rows = wide, layout.once, layout.near_tiles * TILE_ROWS

    @cute.jit
    def __call__(
        self, topk_idx: Int64, topk_weights: Int64, tokens: Int32, chunk_bases: cute.Tensor, positions: cute.Tensor, first: cute.Tensor,
        send_first: cute.Tensor, items: cute.Tensor, pairs: cute.Tensor, control: cute.Tensor, call: cute.Tensor, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """Launch.

        Args:
            pairs: int32 [tokens · top_k], written: token · top_k + pick. Others: see `Dispatch` and `Plan`.
        """
        ctas = cutlass.max((tokens * self.top_k + (self.threads - 1)) // self.threads, 1)
        self.kernel(topk_idx, topk_weights, tokens, chunk_bases, positions, first, send_first, items, pairs, control, call).launch(
            grid=(ctas, 1, 1), block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, topk_idx: Int64, topk_weights: Int64, tokens: Int32, chunk_bases: cute.Tensor, positions: cute.Tensor, first: cute.Tensor,
        send_first: cute.Tensor, items: cute.Tensor, pairs: cute.Tensor, control: cute.Tensor, call: cute.Tensor,
    ):  # fmt: skip
        cute.arch.griddepcontrol_wait()
        pair = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        if (pair < tokens * self.top_k) & (control[FAILED] == 0):
            expert = expert_of(load_pick(topk_idx, pair, self.wide), self.experts)
            if expert < self.experts:
                token, listed = pair // self.top_k, pair
                place = chunk_bases[token // CHUNK_TOKENS * self.experts + expert] + positions[pair]
                if const_expr(self.once):
                    rank, row, pick = expert // self.mine, first[expert] + place, pair % self.top_k
                    if items[1] >> rank & 1 == 1:
                        for other in cutlass.range_constexpr(self.top_k):
                            its = expert_of(load_pick(topk_idx, token * self.top_k + other, self.wide), self.experts)
                            if (its // self.mine == rank) & ((its < expert) | ((its == expert) & (other < pick))):
                                listed = -1 - pair
                        if row >= self.near_rows:
                            source = call[PEERS + rank] + self.offset["sources"] + Int64(row) * 16
                            store_16(source, Int32(call[RANK]), token, pick, load_4(topk_weights + Int64(pair) * 4))
                pairs[send_first[expert] + place] = listed


class Arrange(_Kernel):
    """One CTA per tile that the buffer can hold; those beyond the tiles of this call do nothing."""

    @cute.jit
    def __call__(
        self, buffer: Int64, tile_end: cute.Tensor, totals: cute.Tensor, scales: cute.Tensor, row_weight: cute.Tensor,
        row_slot: cute.Tensor, control: cute.Tensor, call: cute.Tensor, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """Launch.

        Args:
            buffer: address of this rank's buffer. tile_end, totals: see `xstage.moe.plan_sm90`.
            scales: float32 [hidden / 128, rows], written for the tiles that there are, 0 in padding rows.
            row_weight: float32 [rows], row_slot: int64 [rows], likewise.
        """
        self.kernel(buffer, tile_end, totals, scales, row_weight, row_slot, control, call).launch(
            grid=(tile_end.shape[0], 1, 1), block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, buffer: Int64, tile_end: cute.Tensor, totals: cute.Tensor, scales: cute.Tensor, row_weight: cute.Tensor,
        row_slot: cute.Tensor, control: cute.Tensor, call: cute.Tensor,
    ):  # fmt: skip
        # One word of padding: threads of a warp write pieces of several rows, and read neighbouring rows, without bank conflicts.
        pitch = TILE_ROWS + 1
        turned = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.scales * pitch), byte_alignment=16)
        thread, tile = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        if control[FAILED] != 0:
            if (tile == 0) & (thread < 4):
                totals[thread] = Int32(0)
        else:
            if tile < totals[TILES]:
                self.tile(tile, thread, buffer, tile_end, scales, row_weight, row_slot, call, turned)

    @cute.jit
    def tile(
        self, tile: Int32, thread: Int32, buffer: Int64, tile_end: cute.Tensor, scales: cute.Tensor, row_weight: cute.Tensor,
        row_slot: cute.Tensor, call: cute.Tensor, turned: cute.Tensor,
    ) -> None:  # fmt: skip
        first, pitch, pieces = tile * TILE_ROWS, TILE_ROWS + 1, self.scales // 4
        count = cutlass.min(tile_end[tile] - first, TILE_ROWS)  # real rows
        if thread < TILE_ROWS:
            weight, slot = Int32(0), Int64(0)
            if thread < count:
                rank, token, pick, weight = load_16_once(buffer + self.offset["sources"] + Int64(first + thread) * 16)
                pair = Int64(token) * self.top_k + pick
                slot = call[PEERS + rank] + self.offset["combine"] + pair * (self.hidden * 2)
            row_weight[first + thread], row_slot[first + thread] = as_float(weight), slot

        start = buffer + self.offset["activation_scales"] + Int64(first) * (self.scales * 4)
        for i in cutlass.range_constexpr(-(-TILE_ROWS * pieces // self.threads)):
            index = i * self.threads + thread
            if index < TILE_ROWS * pieces:
                row, piece = index // pieces, index % pieces
                four = load_16_once(start + Int64(index) * 16)
                for j in cutlass.range_constexpr(4):
                    turned[(piece * 4 + j) * pitch + row] = four[j]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(TILE_ROWS * self.scales // self.threads):
            index = i * self.threads + thread
            block, row = index // TILE_ROWS, index % TILE_ROWS
            scale = Int32(0)
            if row < count:
                scale = turned[block * pitch + row]
            scales[block, first + row] = as_float(scale)


class Reduce(_Kernel):
    """`wide`: picks are int64."""

    def __init__(self, layout: BufferLayout, wide: bool):
        super().__init__(layout)
        self.wide = wide
        self.pieces = layout.hidden // 8  # 16-byte pieces of a row

    @cute.jit
    def __call__(
        self, buffer: Int64, topk_idx: Int64, out: Int64, tokens: Int32, zeros: Int64, control: cute.Tensor, stream: cuda.CUstream
    ) -> None:  # fmt: skip
        """Launch.

        Args:
            buffer: address of this rank's buffer. topk_idx, out: addresses of [tokens, top_k], bf16 [tokens, hidden].
            zeros: address of 16 bytes of zeros, read in place of the slots of masked picks.
        """
        ctas = cutlass.max((tokens * self.pieces + (self.threads - 1)) // self.threads, 1)
        self.kernel(buffer, topk_idx, out, tokens, zeros, control).launch(
            grid=(ctas, 1, 1), block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(self, buffer: Int64, topk_idx: Int64, out: Int64, tokens: Int32, zeros: Int64, control: cute.Tensor):
        cute.arch.griddepcontrol_wait()
        index = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        token = index // self.pieces
        if (token < tokens) & (control[FAILED] == 0):
            self.piece(token, index, buffer, topk_idx, out, zeros)

    @cute.jit
    def piece(self, token: Int32, index: Int32, buffer: Int64, topk_idx: Int64, out: Int64, zeros: Int64) -> None:
        first = token * self.top_k
        picks = [load_pick(topk_idx, first + i, self.wide) for i in range(self.top_k)]
        slot = buffer + self.offset["combine"] + (Int64(first) * self.pieces + index % self.pieces) * 16
        addresses = []
        for i in cutlass.range_constexpr(self.top_k):
            addresses.append(self.address(picks[i], slot + i * (self.pieces * 16), zeros))
        loaded = [load_16_once(address) for address in addresses]
        sums = [Float32(0.0)] * 8
        for words in loaded:
            values = [as_float(bits) for word in words for bits in bf16_pair(word)]
            sums = [total + value for total, value in zip(sums, values, strict=True)]
        store_16(out + Int64(index) * 16, *(pack_bf16(sums[i], sums[i + 1]) for i in range(0, 8, 2)))

    @cute.jit
    def address(self, pick, slot: Int64, zeros: Int64) -> Int64:
        return slot if expert_of(pick, self.experts) < self.experts else zeros


def _stream() -> Any:
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


@kept
def compiled_dispatch(layout: BufferLayout, wide: bool, quantized: bool) -> Any:
    """`Dispatch`; call it with the arguments of `Dispatch.__call__`, without the stream."""
    kernel = Dispatch(layout, wide, quantized)
    return cute.compile(kernel, *[Int64(0)] * 4, Int32(0), *fake_int32(3), *fake_words(2), _stream(), options="--enable-tvm-ffi")


@kept
def compiled_fetch(layout: BufferLayout) -> Any:
    """`Fetch`; call it with the arguments of `Fetch.__call__`, without the stream."""
    return cute.compile(Fetch(layout), Int64(0), *fake_int32(2), *fake_words(2), _stream(), options="--enable-tvm-ffi")


@kept
def compiled_list(layout: BufferLayout, wide: bool) -> Any:
    """`List`; call it with the arguments of `List.__call__`, without the stream."""
    return cute.compile(
        List(layout, wide), Int64(0), Int64(0), Int32(0), *fake_int32(6), *fake_words(2), _stream(), options="--enable-tvm-ffi"
    )  # fmt: skip


@kept
def compiled_arrange(layout: BufferLayout) -> Any:
    """`Arrange`; call it with the arguments of `Arrange.__call__`, without the stream."""
    scales = cute.runtime.make_fake_tensor(Float32, (layout.hidden // _BLOCK, layout.rows), stride=(layout.rows, 1), assumed_align=16)
    weights = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), stride=(1,), assumed_align=16)
    return cute.compile(
        Arrange(layout), Int64(0), *fake_int32(2), scales, weights, *fake_words(3), _stream(), options="--enable-tvm-ffi"
    )  # fmt: skip


@kept
def compiled_reduce(layout: BufferLayout, wide: bool) -> Any:
    """`Reduce`; call it with the arguments of `Reduce.__call__`, without the stream."""
    return cute.compile(Reduce(layout, wide), *[Int64(0)] * 3, Int32(0), Int64(0), *fake_words(1), _stream(), options="--enable-tvm-ffi")
