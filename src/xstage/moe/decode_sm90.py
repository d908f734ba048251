"""MXFP4 weights of the grouped GEMM (`gemm_sm90`) on their way to the matrix unit: a fourth warpgroup turns codes into e4m3, or, of
a swapped kernel, every math warp its own into registers (`decode_operand`).

A stage of the ring carries codes instead of e4m3, in tiles of 128 weight rows × 128 of K, each `mxfp4.TILE_BYTES` as they rest in
memory: a tile is one bulk copy, which brings the distances of its blocks too. The decoding warps write *halves*, such tiles in e4m3 as
wgmma reads them (128-byte swizzle), into a ring of their own, in the order in which the math warps multiply.

    loading warp ─ coded ─► decoding warps ─ full ─► math warps
         ▲                         ▲                  │ │
         │                         └────── free ──────┘ │
         └──── empty ───────────────────────────────────┘

* `coded` (of a stage): the codes are there.
* `full` (of a stage): rows and scales are there, and each decoding warp has arrived, once its lanes have written and made a proxy fence:
  the matrix unit reads shared memory as the copy engine does.
* `free` (of a half): each math warp arrives when its wgmma of that half are over.
* `empty` (of a stage): math warps of both CTAs, when they are done with the stage; then its codes have long been read.

That is a split kernel (`gemm_sm90`), whose stages have one tile each; there are half as many halves as stages. In the other forms a
stage has two tiles, which may come by multicast; they come with the rows (`full`), decoding warps arrive at `empty` as well, and there are
`HALVES` halves, each with an mbarrier `decoded` of its own. A narrow kernel has two decoding warpgroups, one for a stage's first tile and
one for its second.

Decoding warps learn like the math warps from a stage's word that there is no more; they need not know which tile a stage belongs to.
They wait only for what is loaded and for halves that the math warps are about to finish, and these for halves in the order in which they
are made. So nothing waits in a circle.

A thread has a row of a tile: four blocks of 32 codes, 16 bytes each. A warp's accesses to shared memory hit every bank equally: blocks
lie row by row (`mxfp4.to_tiles`), and the swizzle puts eight rows' pieces into eight groups of banks. A block's distance gives its table
of magnitudes: two multiply-adds where all are normal numbers, by conversions where a warp has any that are not (`device.fp4`).

Not covered: halves of fewer columns.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from xstage.device import fp4, registers, stores
from xstage.moe.mxfp4 import LARGEST_SHIFT, TILE_BYTES, TILE_CODE_BYTES

HALVES = 3  # where a stage has two tiles
AHEAD = 2  # blocks whose codes are loaded before they are needed
HALF_BYTES = 128 * 128
THREADS = 512
WARPS = 4  # of a decoding warpgroup
# Of a math, a loading and a decoding thread: 128 · (2 · 224 + 24 + 40) is all that an SM has.
MATH_REGISTERS, LOAD_REGISTERS, DECODE_REGISTERS = 224, 24, 40
# Of a narrow kernel, whose two decoding warpgroups keep the 128 that they start with: 128 · (216 + 40 + 2 · 128).
NARROW_MATH_REGISTERS, NARROW_LOAD_REGISTERS = 216, 40


def half_of(turn: Int32, ahead: int = 0) -> tuple[Int32, Int32]:
    """Place and phase of the half that comes `ahead` after `turn`, which counts halves modulo 2 · HALVES."""
    turn = turn_after(turn, ahead)
    wrapped = turn >= HALVES
    return Int32(cutlass.select_(wrapped, turn - HALVES, turn)), Int32(wrapped)


def half_at(turn: Int32, more: Int32) -> tuple[Int32, Int32]:
    """`half_of` the count after 0 or 1 more."""
    turn = turn + more
    return half_of(Int32(cutlass.select_(turn >= 2 * HALVES, turn - 2 * HALVES, turn)))


def turn_after(turn: Int32, halves: int) -> Int32:
    """The count after so many more."""
    if halves % (2 * HALVES) == 0:
        return turn
    turn = turn + halves % (2 * HALVES)
    return Int32(cutlass.select_(turn >= 2 * HALVES, turn - 2 * HALVES, turn))


@cute.jit
def load_codes(
    tiles: cute.Tensor, tile: Int32, k_blocks: Int32, k: Int32, target: Int32, barrier: Int32, both: cutlass.Constexpr[bool]
) -> None:
    """One thread: block `k` of tile `tile` to shared memory at `target`; `both`: of either CTA of the cluster."""
    origin = tiles.iterator.toint() + (Int64(tile) * k_blocks + k) * TILE_BYTES
    if const_expr(both):
        stores.bulk_load_cluster(target, origin, Int32(TILE_BYTES), barrier, Int32(3))
    else:
        stores.bulk_load(target, origin, Int32(TILE_BYTES), barrier)


@cute.jit
def decode_stages(
    words: cute.Tensor, word: cutlass.Constexpr[int], codes: Int32, halves: Int32, rings: Any, stages: cutlass.Constexpr[int]
) -> None:
    """The decoding warpgroup: the tile of every stage that comes, until one has the word −1.

    Args:
        words: int32 [·, stages], shared; row `word` is the word of a stage.
        codes, halves: shared addresses, of a tile of codes per stage, and of half as many decoded ones.
        rings: mbarriers `coded` and `full` of the stages, `free` of the halves. stages: 4, a power of two.
    """
    coded, full, free = rings
    thread, lane = cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
    stage, phase = Int32(0), Int32(0)
    cute.arch.mbarrier_wait(coded + stage, phase)
    mine, ahead = words[word, stage], load_ahead(codes, thread)
    while mine >= 0:
        source, place, done = codes + stage * TILE_BYTES, stage & (stages // 2 - 1), full + stage
        cute.arch.mbarrier_wait(free + place, (Int32(stage >= stages // 2)) ^ 1)
        decode_tile(source, halves + place * HALF_BYTES, thread, *ahead)
        stage += 1
        if stage == stages:
            stage = Int32(0)
            phase ^= 1
        # What comes next is loaded before the fence, which waits, where it is there.
        there = cute.arch.mbarrier_test_wait(coded + stage, phase)
        if there:
            mine, ahead = words[word, stage], load_ahead(codes + stage * TILE_BYTES, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(done)
        if not there:
            cute.arch.mbarrier_wait(coded + stage, phase)
            mine, ahead = words[word, stage], load_ahead(codes + stage * TILE_BYTES, thread)
    if lane == 0:  # the math warps are to see the word too
        cute.arch.mbarrier_arrive(full + stage)


@cute.jit
def decode_pairs(
    words: cute.Tensor, word: cutlass.Constexpr[int], codes: Int32, halves: Int32, rings: Any, stages: cutlass.Constexpr[int],
    ctas: cutlass.Constexpr[int], mine: Any,
) -> None:  # fmt: skip
    """`decode_stages` of stages that have two tiles each, by one warpgroup or by two.

    Args:
        codes, halves: shared addresses of both rings' memory. rings: mbarriers `full`, `empty`, `decoded`, `free`.
        stages: of the first ring. ctas: of the cluster.
        mine: of two warpgroups, which tile of each stage is this one's; None: there is one, and both are.
    """
    full, empty, decoded, free = rings
    thread, lane = cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
    stage, phase, turn = Int32(0), Int32(0), Int32(0)
    cute.arch.mbarrier_wait(full + stage, phase)
    while words[word, stage] >= 0:
        source, tiles = codes + stage * 2 * TILE_BYTES, 2
        if const_expr(mine is not None):
            source, tiles = source + mine * TILE_BYTES, 1
        ahead = load_ahead(source, thread)
        for tile in cutlass.range_constexpr(tiles):
            place, flip = half_of(turn)
            if const_expr(mine is not None):
                place, flip = half_at(turn, mine)
            cute.arch.mbarrier_wait(free + place, flip ^ 1)
            decode_tile(source + tile * TILE_BYTES, halves + place * HALF_BYTES, thread, *ahead)
            if const_expr(tile + 1 < tiles):  # before the fence, which waits
                ahead = load_ahead(source + TILE_BYTES, thread)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(decoded + place)
            turn = turn_after(turn, 2 // tiles)
        if lane < ctas:
            cute.arch.mbarrier_arrive(empty + stage, lane)
        stage += 1
        if stage == stages:
            stage = Int32(0)
            phase ^= 1
        cute.arch.mbarrier_wait(full + stage, phase)


@cute.jit
def load_ahead(source: Int32, row: Int32) -> tuple[Any, Any]:
    """What `decode_tile` needs first of a row, while it may not yet write: distances of its blocks, and the first `AHEAD` blocks' codes."""
    distances = registers.load_shared_32(source + TILE_CODE_BYTES + row * 4)
    return distances, tuple(registers.load_shared_128(source + row * 16 + block * 2048) for block in range(AHEAD))


@cute.jit
def decode_tile(source: Int32, target: Int32, row: Int32, distances: Int32, codes: Any) -> None:
    """Row `row` of a tile of codes at shared address `source` to e4m3 in the tile at `target`. All lanes of a warp call it."""
    # Which bytes are above 11: one of the upper four bits, or both below.
    far = (distances & Int32(-0x0F0F0F10)) | (distances & (distances << 1) & 0x08080808)
    to = target + row * 128 + row % 8 * 16
    if cute.arch.vote_any_sync(far != 0):
        _decode_row(source + row * 16, to, distances, codes, False)
    else:
        _decode_row(source + row * 16, to, distances, codes, True)


@cute.jit
def _decode_row(source: Int32, to: Int32, distances: Int32, codes: Any, normal: cutlass.Constexpr[bool]) -> None:
    codes = list(codes)
    for block in cutlass.range_constexpr(4):
        a, b, c, d = codes[block]
        if const_expr(block + AHEAD < 4):  # before this block's are written: a load does not pass a store
            codes.append(registers.load_shared_128(source + (block + AHEAD) * 2048))
        distance = (distances >> 8 * block) & 0xFF
        low, high = fp4.normal_magnitudes_below(distance) if const_expr(normal) else fp4.magnitudes(LARGEST_SHIFT - distance)
        pieces = zip(*(fp4.decode(word, low, high) for word in (a, b, c, d)), strict=True)
        for piece, words in enumerate(pieces):
            registers.store_shared_128(to ^ (block * 32 + piece * 16), *words)


@cute.jit
def decode_operand(source: Int32, below: Int32, words: cute.Tensor) -> None:
    """Rows r and r + 8 of a tile of codes to e4m3, as a thread has them in the operand of wgmma that is in registers. All lanes of a warp
    call it.

    Args:
        source: shared address of word q of row r's first block; below: of the row's distances.
        words: int32 [16], written: of block b of K words 4 b … 4 b + 3: columns 4 q … 4 q + 3 of row r, of r + 8, both 16 columns further.
    """
    codes = [[registers.load_shared_32(source + block * 2048 + h * 128) for h in range(2)] for block in range(4)]
    # Of distances above 7; a table of normal numbers would do up to 11, but to ask for that costs four instructions of some 150 a stage.
    far = (registers.load_shared_32(below) | registers.load_shared_32(below + 32)) & Int32(-0x07070708)
    if cute.arch.vote_any_sync(far != 0):
        _decode_words(codes, below, words, False)
    else:
        _decode_words(codes, below, words, True)


@cute.jit
def _decode_words(codes: Any, below: Int32, words: cute.Tensor, normal: cutlass.Constexpr[bool]) -> None:
    for block in cutlass.range_constexpr(4):
        for h in cutlass.range_constexpr(2):
            distance = registers.load_shared_byte(below + h * 32 + block)
            table = fp4.normal_magnitudes_below(distance) if const_expr(normal) else fp4.magnitudes(LARGEST_SHIFT - distance)
            words[block * 4 + h], words[block * 4 + 2 + h] = fp4.decode(codes[block][h], *table)
