"""Grouped fp8 GEMM for Hopper (sm_90a): rows of many experts times their expert's weight, with the epilogue as a part to choose.

    C[m, n] = Σ_kb a_scales[kb, m] · weight_scales[e, kb, n / 128] · (A[m, kb] · W[e, n, kb])        e = tile_expert[m / 128]

One persistent CTA per SM, two CTAs a cluster. Tiles are 128 × 256 × 128. Three warpgroups: one warp loads through a ring of stages (TMA
and mbarriers), two multiply, 64 rows each, as two wgmma of 64 × 128. A product of 128 of K is added to the float32 sum after scaling
(the tensor core's own sum keeps 14 bits). What decides the speed is loading, not arithmetic, so a cluster shares what it can: the two CTAs
take two row tiles of one expert and share its weight by multicast; where an expert has an odd row tile left, they take two column
tiles of it and share the rows. Which, and in what order, stands in a work table made on the device (`xstage.moe.work_table`).

Scales ride in the stage, and in a tile's first stage so do two words that say which tile it is, and whether half its rows or more are
padding: the math warps look nothing up, and in such a tile the second warpgroup multiplies nothing but the last round. The
loop over K goes in unrolled rounds of a few stages, so that no wgmma is in flight across a back edge, which would make ptxas serialise
them all. 192 of a thread's 232 registers are sums, hence an epilogue works on one half of 128 columns at a time; the first half's runs
under the second half's last wgmma.

One layer: every cluster walks its table with a stride. Both layers of a MoE layer: their entries stand in one list (`work_table`), and
clusters take the next one from a counter in memory. SMs differ in speed by a few percent, and a share that was dealt out beforehand would
let the slowest cluster decide when the kernel ends, and hold up all others wherever an order makes Linear-2 wait for Linear-1.

1. One warp of a cluster's first CTA, the taker, takes an entry (one atomic add), looks it up (one load) and sends it to the loading warps
   of both CTAs (`st.async` into a slot, an mbarrier counts the bytes). It does so when both have said that the slot is free, which they do
   `TAKEN_BEFORE` stages before the end of their tile: late, so that entries that stand side by side begin side by side, however long the
   tiles before them were, and what they share is still in the L2 cache; and early enough that no loading warp waits for memory.
2. The math warps learn from the ring which tile it is. They stage a Linear-1 tile in shared memory, write its scales, and hand it to the
   store warp (a named barrier `STAGED` per warpgroup, and a word that says which tile; −1 ends it).
3. The store warp copies it to memory, says that the staging is free (`FREE`), waits until the copy is complete, and adds one to
   `ready[1 + tile]` (`red.release.gpu`). No math warp waits for a copy, and what a tile is waited for by never waits for anything but that
   copy: were the count added by the math warps, later, it would wait for their next tile's loads, which may wait for another
   warpgroup's count.
4. The loading warp of a Linear-2 tile acquires the full count of its row tile (gpu scope), makes a proxy fence, and lets the copy engine
   read.

Why nothing deadlocks: all clusters are resident, entries are taken in the order of the list, and a cluster loads, computes and counts its
entries in the order in which it took them, the same in both CTAs. Take the first entry of the list that is not finished. If nobody has
taken it, all that was taken is finished, so every slot is or becomes free, and a taker takes it. Then whatever its cluster took before
is finished, and it is next to be loaded. If it is of Linear-2, all Linear-1 entries of its row tiles stand before it (`work_table`: every
reach lies behind them), so they are finished, and finished is counted. If it is of Linear-1, it waits for rows from senders, which wait for
no tile: they are held back for a bounded time only (`send_sm90`). So it can run, and is finished some time. The waits for rows and for
Linear-1 are bounded all the same, and say so where the meetings of ranks do.

Linear-1's output may take the place of rows that Linear-1 has done with (`BufferLayout.middle`): then the store warp of a tile waits in the
same way for the row tile whose place it takes, `SPARE_TILES` before it. Its entries stand before this one's in the list.

With `spans` every role writes down when its steps began and ended (`spans_sm90`); without, nothing of that is in the machine code.

Weights in MXFP4 (`codes`): stages carry codes, and a fourth warpgroup decodes them for the math warps (`decode_sm90`). All else, scales
and epilogues included, is the same. Without, nothing of this is in the machine code. There are four forms (`form`), which give the same
bits; which is taken when: `work_table`.

* Wide: stages have two tiles of codes instead of two of e4m3.
* Split (of two layers): a cluster's two CTAs take the same two row tiles of an entry, and 128 of its 256 columns each. So a CTA decodes
  128 × 128 of the weight for 256 rows, half of what it would decode for a row tile of its own, and shared memory moves 9% less. Rows come
  by multicast, half of them from either CTA. A math warpgroup has 64 rows of either row tile. An entry whose CTAs share the rows is a
  single row tile; its two column tiles pass one after the other, and a warpgroup multiplies once per stage instead of twice; products
  without any real row are left out. A scale of Linear-1's output is that of 128 columns, of which a CTA has half: both tell the other
  their rows' largest (`st.async`). CTAs count in `ready` what they have of a row tile each, so it is complete at twice its column tiles.
* Narrow (of two layers): for experts of few rows, where decoding takes longer than multiplying. One warpgroup multiplies, 64
  rows, two decode, and of the memory that 64 rows fewer leave there are six stages. Of a stage's rows those are loaded that are real,
  by 8. A tile whose second 64 rows are not all padding, or whose neighbour in the cluster has such, passes twice through the ring;
  `ready` counts it after the second time. Its words count rows by 64, and have in the lowest bit whether this is the last time.
* Swapped: as the narrow form, for fewer rows still, but four warpgroups decode codes straight into registers, where wgmma takes its first
  operand from, and multiply them with as many rows as there are (`swapped_sm90`). There is no ring of decoded weight.

What the split form's CTAs wait for in each other changes nothing in why nothing deadlocks: both load, compute and count the same entries in
the same order, and a warpgroup that waits for the other's largest has done with all stages of that tile.

Epilogues (`xstage.moe.epilogues`): plain bf16; SwiGLU, routing weight and fp8 again; rows to slots anywhere.

Not covered: N that 512 does not divide, K that 256 does not divide, row tiles other than 128.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from xstage.device import registers, signals, stores
from xstage.moe import decode_sm90, spans_sm90, swapped_sm90
from xstage.moe.layout import MOST_SLOTS
from xstage.moe.loads_sm90 import CLUSTER, ROW_BLOCK, TILE_K, TILE_M, TileLoads, words_of
from xstage.moe.mxfp4 import TILE_BYTES
from xstage.moe.spans import END, HALF_END, HALF_START, MAIN_END
from xstage.moe.swapped_sm90 import SwappedMath
from xstage.moe.work_table import COLUMN_MASK, LAYER_SHIFT, ROW_SHIFT

THREADS = 384
SHARED_BYTES = 227 * 1024  # as much as a CTA can have
MATH_REGISTERS, LOAD_REGISTERS = 232, 40


class GroupedGemm(TileLoads, SwappedMath):
    """epilogues: one of `xstage.moe.epilogues` per layer. stages: of the ring. unroll: stages of a round; divides `stages` and K / 128.
    count: of one layer, the entry of `totals` that counts the work; of two, the first two do. sender: sends rows meanwhile (`send_sm90`),
    and Linear-1 tiles wait until theirs have arrived; of two layers only. recorded: with spans. spare: a row tile of Linear-1's output lies
    where the rows of the tile so many before it were; 0: in memory of its own. form: of a kernel for weights in MXFP4, see the module.
    """

    def __init__(
        self, epilogues: tuple[Any, ...], stages: int, unroll: int, count: int, sender: Any = None, recorded: bool = False,
        spare: int = 0, form: str | None = None,
    ) -> None:  # fmt: skip
        self.epilogues, self.stages, self.unroll, self.count, self.sender = epilogues, stages, unroll, count, sender
        self.spare, self.codes, self.split, self.swapped = spare, form is not None, form == "split", form == "swapped"
        self.narrow = self.swapped or form == "narrow"  # of 64 rows
        self.registers = (MATH_REGISTERS, LOAD_REGISTERS)
        if self.codes:
            self.registers = (decode_sm90.MATH_REGISTERS, decode_sm90.LOAD_REGISTERS)
        if self.narrow:
            self.registers = (decode_sm90.NARROW_MATH_REGISTERS, decode_sm90.NARROW_LOAD_REGISTERS)
        if self.swapped:
            self.registers = (swapped_sm90.MATH_REGISTERS, swapped_sm90.LOAD_REGISTERS)
        # Warpgroups: 0 and 1 multiply, 2 loads, 3 decodes if there are codes; narrow: 0 multiplies, 2 loads, 1 and 3 decode; swapped:
        # 2 loads, 0, 1, 3 and 4 decode and multiply.
        self.groups = 1 if self.narrow else 2  # of 64 rows, that are multiplied at a time; split: of each of a stage's two row tiles
        self.math_warps = 4 * (swapped_sm90.GROUPS if self.swapped else self.groups)
        self.decoding = self.codes and not self.swapped  # on warps of their own
        self.decoders = (2 if self.narrow else 1) if self.decoding else 0
        self.rows = 64 * self.groups
        self.halves = 1 if self.split else 2  # of codes, in a stage
        # Floats of a stage: a scale per row, four of the weight, then the tile's words; without the rest as many stages fit as do.
        self.ring = stages // 2 if self.split else 0 if self.swapped else decode_sm90.HALVES  # of decoded halves
        self.word = (2 if self.split else 1) * TILE_M + 4
        self.few = self.word + 1
        self.scales = self.word + (4 if self.split or self.narrow else 28)
        for epilogue in epilogues:
            epilogue.groups, epilogue.split = self.groups, self.split
            epilogue.handing = 32 + (swapped_sm90.MATH_THREADS if self.swapped else 128)
        self.threads = swapped_sm90.THREADS if self.swapped else decode_sm90.THREADS if self.codes else THREADS
        self.largest_words = 512 if self.split else swapped_sm90.TOPS if self.swapped else 4
        self.row_bytes = swapped_sm90.STAGING_BYTES if self.swapped else 16
        self.slot_bytes = 16 if sender is None else sender.slot_bytes
        self.recorded, self.state_words = recorded, 1 + spans_sm90.STATE_WORDS if recorded else 1

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> GroupedGemm:
        return self

    @cute.jit
    def __call__(
        self, layers: Any, outputs: Any, work: Any, totals: cute.Tensor, ready: Any, spans: Any, columns: Any, ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """layers: per layer a uint8 [rows, K], weight uint8 [experts · N · K / 128, 128] (`quantize.tiled`; codes: [experts · N / 128,
        K / 128 · TILE_BYTES]), a_scales float32 [K / 128, rows], weight_scales float32 [experts, K / 128, N / 128]. outputs: what each
        layer's epilogue takes. columns: N of each layer.
        work: of one layer (int32 [2 · entries], its table; int32 [row tiles], their experts); of two (int32 [4 · entries], the list).
        ready: of two layers, (int32 [1 + row tiles], zeros: entries taken, then Linear-1 tiles that are there; control and call words of
            `xstage.device.meeting`); with a sender also (int32 [row tiles]: rows that have arrived; what `Sender.run` is given).
        spans: if recorded, (int32 [ctas · roles · (capacity + 1) · 8], zeros; capacity), see `xstage.moe.spans`; else None.
        """
        stages = self.stages
        k_major = LayoutEnum.ROW_MAJOR.sm90_mma_major_mode()
        # Two objects: one starts a sum, one goes on with it (a field set at run time does not survive a dynamic loop).
        start, go_on = (
            sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float32, (self.groups, 1, 1), tiler_mn=(64, 128))
            for _ in range(2)
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        # One memory, seen in slots of a stage's rows by wgmma and in boxes of as many or of 64 rows by the copies.
        tiles = 2 if self.split else 1  # of rows, in a stage
        slots_a = cute.tile_to_shape(atom, (self.rows, TILE_K, tiles * stages), (0, 1, 2))
        # A swapped kernel has no decoded weight in shared memory: a layout that nobody uses.
        slots_w = cute.tile_to_shape(atom, (8 if self.swapped else 128, TILE_K, (self.ring or 1) if self.codes else 2 * stages), (0, 1, 2))
        box = ROW_BLOCK if self.narrow else 64
        halves_a = cute.tile_to_shape(atom, (box, TILE_K, self.rows // box * tiles * stages), (0, 1, 2))

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[Int64, 2 * stages]
            send_barriers: cute.struct.MemRange[Int64, MOST_SLOTS]
            entry_barriers: cute.struct.MemRange[Int64, 2]
            entry: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            progress: cute.struct.MemRange[Int32, self.state_words]
            handed: cute.struct.MemRange[Int32, 1]
            slots: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.slot_bytes], 128]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, self.scales * stages], 128]
            staging: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.epilogues[0].staging_bytes], 1024]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(slots_a)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(slots_w)], 1024]

        @cute.struct
        class Coded:
            codes: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.halves * TILE_BYTES * stages], 128]
            barriers: cute.struct.MemRange[Int64, 1 + self.ring + (stages if self.split else self.ring)]
            exchanged: cute.struct.MemRange[Int64, 4]
            largest: cute.struct.Align[cute.struct.MemRange[Float32, self.largest_words], 16]
            rows: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.row_bytes], 16]

        self.shared, self.coded = Shared, Coded
        size: Any = Shared.size_in_bytes()  # type: ignore[attr-defined]
        if const_expr(self.codes):
            size += Coded.size_in_bytes()  # type: ignore[attr-defined]
        if const_expr(size > SHARED_BYTES):
            raise ValueError(f"shared memory: {size} bytes; a CTA can have {SHARED_BYTES}")
        products = None
        if const_expr(self.swapped):
            products = tuple(
                tuple(
                    sm90.make_trivial_tiled_mma(
                        Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float32, (1, 1, 1), (64, width), warpgroup.OperandSource.RMEM
                    )
                    for _ in range(2)
                )
                for width in swapped_sm90.WIDTHS
            )
        sources = [self._source(layer, n, slots_a, slots_w, halves_a) for layer, n in zip(layers, columns, strict=True)]
        targets = [epilogue.descriptors(out) for epilogue, out in zip(self.epilogues, outputs, strict=True)]
        self.kernel(sources, targets, work, totals, ready, spans, (start, go_on), products, slots_a, slots_w, halves_a).launch(
            grid=(ctas, 1, 1), block=[self.threads, 1, 1], cluster=(CLUSTER, 1, 1), stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def _source(self, layer: Any, columns: Any, slots_a: Any, slots_w: Any, halves: Any) -> Any:
        """What the loading warp needs of a layer: copies of whole boxes and of what a cluster shares, scales, sizes."""
        one, shared = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        a, weight = (cute.make_tensor(cute.recast_ptr(t.iterator, dtype=Float8E4M3FN), t.layout) for t in layer[:2])
        box_a, box_w, half = (cute.slice_(layout, (None, None, 0)) for layout in (slots_a, slots_w, halves))
        if self.narrow:
            box_a = half
        copies: tuple[Any, ...] = (
            cpasync.make_tiled_tma_atom(one, a, box_a, (cute.size(box_a.outer, mode=[0]), TILE_K)),  # split: unused
            cpasync.make_tiled_tma_atom(shared, a, half, (cute.size(half.outer, mode=[0]), TILE_K), num_multicast=1),
        )  # fmt: skip
        if self.codes:
            copies += (layer[1],)
        else:
            copies += (
                cpasync.make_tiled_tma_atom(one, weight, box_w, (128, TILE_K)),
                cpasync.make_tiled_tma_atom(shared, weight, box_w, (128, TILE_K), num_multicast=1),
            )  # fmt: skip
        return (*copies, *layer[2:], a.shape[0], a.shape[1] // TILE_K, columns // 128)

    @cute.kernel
    def kernel(
        self, sources: Any, targets: Any, work: Any, totals: cute.Tensor, ready: Any, spans: Any, mmas: Any, products: Any,
        slots_a: cute.ComposedLayout, slots_w: cute.ComposedLayout, halves_a: cute.ComposedLayout,
    ):  # fmt: skip
        start, go_on = mmas
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        member = cute.arch.make_warp_uniform(block % CLUSTER)
        shared = SmemAllocator().allocate(self.shared)
        full = shared.barriers.data_ptr()
        empty = full + self.stages
        codes, decoded, free, coded = None, None, None, None
        if const_expr(self.codes):
            own = SmemAllocator().allocate(self.coded)
            codes, free = Int32(own.codes.data_ptr().toint()), own.barriers.data_ptr()
            if const_expr(self.split):
                coded, decoded = free + self.ring, full  # a stage is full when its rows are there and its codes are decoded
            else:
                decoded = free + self.ring
            for epilogue in self.epilogues:
                epilogue.member, epilogue.exchanged = member, own.exchanged.data_ptr()
                epilogue.largest = Int32(own.largest.data_ptr().toint())
        if warp == 0:
            for source in sources:
                cpasync.prefetch_descriptor(source[0][0])
                if const_expr(not self.codes):
                    cpasync.prefetch_descriptor(source[2][0])
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + i, 1 + (decode_sm90.WARPS if self.split else 0))
                    # Every math warp of both CTAs, and every decoding warp; split: these have long read what math warps are done with.
                    decoding = 0 if self.split else decode_sm90.WARPS * self.decoders
                    cute.arch.mbarrier_init(empty + i, (self.math_warps + decoding) * CLUSTER)
                if const_expr(self.decoding):
                    for i in cutlass.range_constexpr(self.ring):
                        cute.arch.mbarrier_init(free + i, self.math_warps)
                        if const_expr(not self.split):
                            cute.arch.mbarrier_init(decoded + i, decode_sm90.WARPS)
                if const_expr(self.split):
                    for i in cutlass.range_constexpr(self.stages):
                        cute.arch.mbarrier_init(coded + i, 1)
                    for i in cutlass.range_constexpr(4):
                        cute.arch.mbarrier_init(own.exchanged.data_ptr() + i, 1)
                cute.arch.mbarrier_init(shared.entry_barriers.data_ptr(), 1)
                cute.arch.mbarrier_init(shared.entry_barriers.data_ptr() + 1, CLUSTER)  # the first CTA's: both loading warps
                registers.store_shared_32(Int32(shared.progress.data_ptr().toint()), Int32(0))
                if const_expr(self.recorded):
                    state = Int32(shared.progress.data_ptr().toint()) + 8
                    spans_sm90.start(state, spans[0].iterator.toint(), spans[1], block)
                for i in cutlass.range_constexpr(MOST_SLOTS):
                    cute.arch.mbarrier_init(shared.send_barriers.data_ptr() + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        if const_expr(self.sender is not None):
            # Every CTA has its place: the warp of the meeting behind takes nobody's.
            cute.arch.griddepcontrol_launch_dependents()

        s_scales = shared.scales.get_tensor(cute.make_layout((self.scales, self.stages)))
        progress, handed = Int32(shared.progress.data_ptr().toint()), Int32(shared.handed.data_ptr().toint())
        marks: Any = None
        if const_expr(self.recorded):
            marks = (progress + 8, spans[1])
        entry = (Int32(shared.entry.data_ptr().toint()), shared.entry_barriers.data_ptr())
        if thread // 128 == 2:
            cute.arch.setmaxregister_decrease(self.registers[1])
            if warp == 8:
                slots = [shared.a.get_tensor(slots_a.outer, swizzle=slots_a.inner), shared.a.get_tensor(halves_a.outer, swizzle=halves_a.inner), shared.w.get_tensor(slots_w.outer, swizzle=slots_w.inner)]  # fmt: skip  # noqa: E501
                given = (s_scales, member, full, empty, (codes, coded))
                if const_expr(len(self.epilogues) == 2):
                    self._load_taken(sources, slots, ready, entry, progress, marks, given)
                else:
                    self._load_share(sources[0], slots, work, Int32(totals[self.count]), block // CLUSTER, given)
            if const_expr(len(self.epilogues) == 2):
                if warp == 9:
                    self.epilogues[0].begin(shared.staging, Int32(0), targets[0], handed)
                    self._store(ready, self._counted(sources))
                if const_expr(self.sender is not None):
                    if warp == 10:
                        memory = (Int32(shared.slots.data_ptr().toint()), shared.send_barriers.data_ptr())
                        pace = (progress, Int32(totals[0]), cute.arch.grid_dim()[0] // CLUSTER)
                        if const_expr(self.sender.once):
                            self.sender.run(ready[4], ready[1:3], block, cute.arch.grid_dim()[0], memory, pace, Int32(totals[3]), marks)
                        else:
                            self.sender.run(ready[4], ready[2], block, cute.arch.grid_dim()[0], memory, pace, marks)
                if (warp == 11) & (member == 0):
                    self._take(ready[0], work[0], Int32(totals[0]), Int32(totals[1]), entry)
        else:
            r_slots = (shared.a.get_tensor(slots_a.outer, swizzle=slots_a.inner), shared.w.get_tensor(slots_w.outer, swizzle=slots_w.inner))
            rings = (full, empty, decoded, free)
            if const_expr(self.swapped):
                rows = [cute.local_tile(r_slots[0], (width, TILE_K), (0, 0, None)) for width in swapped_sm90.WIDTHS]
                memory = tuple(Int32(part.data_ptr().toint()) for part in (shared.staging, own.rows, own.largest))
                self._multiply_swapped(sources, targets, products, rows, codes, s_scales, rings, memory, handed)
            elif const_expr(self.codes):
                if thread // 128 >= (1 if const_expr(self.narrow) else 3):
                    tile = None
                    if const_expr(self.narrow):
                        tile = thread // 256  # warpgroup 1: the first, 3: the second
                    else:
                        cute.arch.setmaxregister_decrease(decode_sm90.DECODE_REGISTERS)
                    halves, words = Int32(shared.w.data_ptr().toint()), words_of(s_scales)
                    if const_expr(self.split):
                        decode_sm90.decode_stages(words, self.word, codes, halves, (coded, full, free), self.stages)
                    else:
                        decode_sm90.decode_pairs(words, self.word, codes, halves, rings, self.stages, CLUSTER, tile)
                else:
                    self._multiply(sources, targets, start, go_on, r_slots, s_scales, rings, shared.staging, handed, marks)
            else:
                self._multiply(sources, targets, start, go_on, r_slots, s_scales, rings, shared.staging, handed, marks)
        # A CTA must not go while its partner may still multicast to it or arrive at its barriers.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _multiply(self, sources, targets, start, go_on, slots, s_scales, rings, staging, handed, marks) -> None:
        """The math warps."""
        thread = cute.arch.thread_idx()[0]
        cute.arch.setmaxregister_increase(self.registers[0])
        full = rings[0]
        # Of a whole warpgroup, whichever thread this is: so the descriptors of what wgmma reads stay in uniform registers.
        slice_ = start.get_slice(cute.arch.make_warp_uniform(thread // 128) * 128)
        start.set(warpgroup.Field.ACCUMULATE, False)
        go_on.set(warpgroup.Field.ACCUMULATE, True)
        r_a = start.make_fragment_A(slice_.partition_A(slots[0]))
        r_w = start.make_fragment_B(slice_.partition_B(slots[1]))
        shape = slice_.partition_shape_C((self.rows, 128))
        product, first, second = (cute.make_rmem_tensor(shape, Float32) for _ in range(3))
        first.fill(0.0)
        second.fill(0.0)
        fixed = (start, go_on, product, first, second, r_a, r_w, s_scales, rings, marks)
        for epilogue, target in zip(self.epilogues, targets, strict=True):
            epilogue.begin(staging, thread, target, handed)
        two = len(self.epilogues) == 2
        base, phase, staged = Int32(0), Int32(0), Int32(0)
        turn = Int32(0)  # of decoded halves; split: of Linear-1 tiles
        word = self._word(s_scales, full, base, phase)
        while word >= 0:
            m, n, layer = word >> ROW_SHIFT, (word >> 1) & COLUMN_MASK, (word >> LAYER_SHIFT) & 1
            if const_expr(self.recorded):
                spans_sm90.begin(marks[0], spans_sm90.MATH, word)
            rounds = Int32(sources[0][-2])
            if const_expr(two):
                if layer == 1:
                    rounds = Int32(sources[1][-2])
                    self.epilogues[1].warm(m)
                else:
                    self.epilogues[0].warm(m)
            else:
                self.epilogues[0].warm(m)
            idle, blocks, real = Int32(0), Int32(0), None
            if const_expr(self.narrow):
                self.epilogues[0].last = word & 1
            elif const_expr(self.split):
                for epilogue in self.epilogues:
                    epilogue.single, epilogue.turn, epilogue.flip = word & 1, turn & 1, turn >> 1
                blocks = words_of(s_scales)[self.few, base] - thread // 128
                real = (blocks > 0, blocks > 2)
                for epilogue in self.epilogues:
                    epilogue.real = real
            elif const_expr(two):
                idle = words_of(s_scales)[self.few, base] * (thread // 128)
            for _ in cutlass.range(rounds // self.unroll - 1, unroll=1):
                if const_expr(self.split):
                    if blocks > 2:
                        self._round(-1, fixed, base, phase, turn, m, n, layer)
                    elif blocks > 0:
                        self._round(-1, fixed, base, phase, turn, m, n, layer, 1)
                    else:
                        self._pass(rings, base, phase, turn)
                elif const_expr(two and not self.narrow):
                    if idle == 0:
                        self._round(-1, fixed, base, phase, turn, m, n, layer)
                    else:
                        self._pass(rings, base, phase, turn)
                else:
                    self._round(-1, fixed, base, phase, turn, m, n, layer)
                base, phase, turn = self._next(base, phase, turn)
            if const_expr(two):
                if staged == 1:
                    self.epilogues[0].await_free()
                staged = layer ^ 1
            if const_expr(two):
                if layer == 1:
                    self._round(1, fixed, base, phase, turn, m, n, layer, 2, real)
                else:
                    self._round(0, fixed, base, phase, turn, m, n, layer, 2, real)
            else:
                self._round(0, fixed, base, phase, turn, m, n, layer)
            base, phase, turn = self._next(base, phase, turn)
            if const_expr(self.split):
                turn = (turn + (layer ^ 1)) & 3
            word = self._word(s_scales, full, base, phase)
        if const_expr(two):
            if staged == 1:
                self.epilogues[0].await_free()
            self.epilogues[0].no_more()
        else:
            self.epilogues[0].end()

    @cute.jit
    def _word(self, s_scales, full, stage, phase) -> Int32:
        """Which tile begins with this stage: its entry, with the layer; −1 when there is no more."""
        cute.arch.mbarrier_wait(full + stage, phase)
        return words_of(s_scales)[self.word, stage]

    @cute.jit
    def _store(self, ready, tiles) -> None:
        """One warp: Linear-1 tiles from staging to memory, and the count of what is there. tiles: columns of Linear-1."""
        m = Int32(0)
        while m >= 0:
            m, n, last = self.epilogues[0].await_staged()
            if m >= 0:
                tile = m // 2 if const_expr(self.narrow) else m
                upper = tile + 1 - last if const_expr(self.split) else tile  # the last row tile: there may be two
                if const_expr(self.spare > 0):
                    if tile >= self.spare:
                        self._wait_ready(ready, tile - self.spare, tiles)  # nobody reads those rows any more
                    if const_expr(self.split):
                        if (upper > tile) & (upper >= self.spare):
                            self._wait_ready(ready, upper - self.spare, tiles)
                self.epilogues[0].store_staged(m, n, last)
                cute.arch.fence_proxy("async")
                cute.arch.sync_warp()
                counts = cute.arch.lane_idx() <= upper - tile
                if const_expr(self.narrow):
                    counts = counts & (last == 1)
                if counts:
                    signals.count_release_gpu(ready[0].iterator.toint() + Int64(1 + tile + cute.arch.lane_idx()) * 4)

    @cute.jit
    def _round(
        self, last: cutlass.Constexpr[int], fixed, base, phase, turn, m, n, layer, products: cutlass.Constexpr[int] = 2, real: Any = None,
    ) -> None:  # fmt: skip
        """`unroll` stages from `base` on.

        last: the layer if these are the tile's last, else -1. Then its first half goes through the epilogue under the second's last wgmma.
        products: of 64 × 128, per stage; split: 1 where the second row tile has nothing for this warpgroup.
        real: of the last of a split tile, which of both products have real rows; the others are left out.
        """
        first, second, _, _, s_scales, rings, marks = fixed[3:]
        full, _, decoded, _ = rings
        thread = stores.thread_anew() if const_expr(self.codes) else cute.arch.thread_idx()[0]
        row = (thread >> 5) * 16 + ((thread >> 2) & 7)  # this thread's first row of the tile; the other is 8 below
        for i in cutlass.range_constexpr(self.unroll):
            stage = base + i if const_expr(self.unroll < self.stages) else i
            if const_expr(self.codes):
                stage = stage + stores.zero_anew()
            cute.arch.mbarrier_wait(full + stage, phase)
            rows = [(s_scales[(row, stage)], s_scales[(row + 8, stage)])] * 2
            if const_expr(self.split and products == 2):
                rows[1] = (s_scales[(row + TILE_M, stage)], s_scales[(row + TILE_M + 8, stage)])
            columns: Any = None
            if const_expr(self.codes):  # before the wgmma: between two of a product a load's wait would hold up the second
                columns = [self._column_scales(s_scales, stage, half, n, layer) for half in range(products)]
            for half in cutlass.range_constexpr(products):
                place, slot = stage * 2 + half, stage
                if const_expr(self.split):
                    place, slot = i & (self.ring - 1), stage * 2 + half
                elif const_expr(self.codes):
                    place, flip = decode_sm90.half_of(turn, 2 * i + half)
                    cute.arch.mbarrier_wait(decoded + place, flip)
                # Under the tile's last wgmma its first half's epilogue runs.
                ending = last if last >= 0 and i == self.unroll - 1 and half == 1 else -1
                given = (fixed, half, slot, place, stage, rows[half], columns, m, n, layer)
                if const_expr(real is not None):
                    if real[half]:
                        self._product(ending, half == products - 1, given)
                    else:
                        if const_expr(ending >= 0):
                            self._first_half(ending, first, second, m, n, marks)
                        self._done(half == products - 1, stage, place, rings)
                else:
                    self._product(ending, half == products - 1, given)
        if const_expr(last >= 0):
            if const_expr(self.recorded):
                spans_sm90.mark(marks[0], spans_sm90.MATH, MAIN_END)
            self.epilogues[last].half(1, first, second, m, n)
            if const_expr(self.recorded):
                spans_sm90.close(marks[0], spans_sm90.MATH, END, marks[1])

    @cute.jit
    def _product(self, ending: cutlass.Constexpr[int], whole: cutlass.Constexpr[bool], given) -> None:
        """This warpgroup's rows in a slot times the 128 columns in a place, added to its sums.

        ending: the layer whose first half's epilogue runs meanwhile, or −1. whole: it is the stage's last.
        """
        fixed, half, slot, place, stage, rows, columns, m, n, layer = given
        start, go_on, product, first, second, r_a, r_w, s_scales, rings, marks = fixed
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            mma = start if const_expr(k == 0) else go_on
            cute.gemm(mma, product, r_a[(None, None, k, slot)], r_w[(None, None, k, place)], product)
        warpgroup.commit_group()
        scales = columns[half] if const_expr(self.codes) else self._column_scales(s_scales, stage, half, n, layer)
        factors = [(row * scales[0], row * scales[1]) for row in rows]
        if const_expr(ending >= 0):
            self._first_half(ending, first, second, m, n, marks)
        warpgroup.wait_group(0)
        self._done(whole, stage, place, rings)
        self._add(second if const_expr(half == 1) else first, product, *factors)

    @cute.jit
    def _first_half(self, last: cutlass.Constexpr[int], first, second, m, n, marks) -> None:
        if const_expr(self.recorded):
            spans_sm90.mark(marks[0], spans_sm90.MATH, HALF_START)
        self.epilogues[last].half(0, first, second, m, n)
        if const_expr(self.recorded):
            spans_sm90.mark(marks[0], spans_sm90.MATH, HALF_END)

    @cute.jit
    def _done(self, whole: cutlass.Constexpr[bool], stage, place, rings) -> None:
        """This warp needs the product's operands no more; `whole`: nor anything else of the stage."""
        _, empty, _, free = rings
        lane = cute.arch.lane_idx()
        if const_expr(self.codes and (whole or not self.split)):
            if lane == 0:
                cute.arch.mbarrier_arrive(free + place)
        if const_expr(whole):
            if lane < CLUSTER:  # the slot was filled from both CTAs, so both must know that it is free
                cute.arch.mbarrier_arrive(empty + stage, lane)

    def _column_scales(self, s_scales: cute.Tensor, stage: Any, half: int, n: Int32, layer: Any) -> tuple[Any, Any]:
        """Of the weight, for column blocks 0, 2, … and 1, 3, … of 8 within a product's 128 columns."""
        # Where gate and up take turns, the tile's two scales do; else each half has one.
        turns = layer ^ 1 if len(self.epilogues) == 2 else int(self.epilogues[0].alternating)
        at = self.word - 4 + n % 2 * 2
        if self.split:
            even = at + self.epilogues[0].member * (1 - turns)
            odd = even + turns
        else:
            even, odd = (at, at + turns) if half == 0 else (at + (1 - turns), at + 1)
        return s_scales[(even, stage)], s_scales[(odd, stage)]

    @cute.jit
    def _pass(self, rings, base, phase, turn) -> None:
        """`_round` of a warpgroup whose rows are all padding: it only says that it is done with what was loaded."""
        full, empty, decoded, free = rings
        lane = cute.arch.lane_idx()
        for i in cutlass.range(self.unroll, unroll=1):
            stage = base + i
            cute.arch.mbarrier_wait(full + stage, phase)
            if const_expr(self.split):
                if lane == 0:
                    cute.arch.mbarrier_arrive(free + (i & (self.ring - 1)))
            elif const_expr(self.codes):
                for half in cutlass.range_constexpr(2):
                    place, flip = decode_sm90.half_of(turn, half)
                    cute.arch.mbarrier_wait(decoded + place, flip)
                    if lane == 0:
                        cute.arch.mbarrier_arrive(free + place)
                turn = decode_sm90.turn_after(turn, 2)
            if lane < CLUSTER:
                cute.arch.mbarrier_arrive(empty + stage, lane)

    @cute.jit
    def _next(self, base: Int32, phase: Int32, turn: Int32) -> tuple[Int32, Int32, Int32]:
        """The stage after a round, and its phase; and the count of halves."""
        if const_expr(self.unroll == self.stages):
            phase ^= 1
        else:
            base += self.unroll
            if base == self.stages:
                base = Int32(0)
                phase ^= 1
        if const_expr(self.codes and not self.split):
            turn = decode_sm90.turn_after(turn, 2 * self.unroll)
        return base, phase, turn

    @cute.jit
    def _add(self, total: cute.Tensor, product: cute.Tensor, upper: Any, lower: Any) -> None:
        """total += scale · product, in float32."""
        for j in cutlass.range_constexpr(16):
            for i in cutlass.range_constexpr(2):
                for r, scales in ((0, upper), (1, lower)):
                    at = ((i, r, j), 0, 0)
                    total[at] = total[at] + scales[j % 2] * product[at]
