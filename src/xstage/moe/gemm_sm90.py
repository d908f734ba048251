"""Grouped fp8 GEMM for Hopper (sm_90a): rows of many experts times their expert's weight, with the epilogue as a part to choose.

    C[m, n] = Σ_kb a_scales[kb, m] · weight_scales[e, kb, n / 128] · (A[m, kb] · W[e, n, kb])        e = tile_expert[m / 128]

One persistent CTA per SM, two CTAs a cluster. Tiles are 128 × 256 × 128. Three warpgroups: one warp loads through a ring of stages (TMA
and mbarriers), two multiply, 64 rows each, as two wgmma of 64 × 128. A product of 128 of K is added to the float32 sum after scaling
(the tensor core's own sum keeps 14 bits). What decides the speed is loading, not arithmetic, so a cluster shares what it can: the two CTAs
take two row tiles of one expert and share its weight by multicast; where an expert has an odd row tile left, they take two column
tiles of it and share the rows. Which, and in what order, stands in a work table made on the device (`xstage.moe.exchange`).

Scales ride in the stage. The ring is unrolled, and its length divides the number of stages' worth of K in a tile, so that no wgmma is in
flight across a loop's back edge, which would make ptxas serialise them all. 192 of a thread's 232 registers are sums, hence an
epilogue works on one half of 128 columns at a time; the first half's runs under the second half's last wgmma.

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

TILE_M, TILE_N, TILE_K = 128, 256, 128
CLUSTER = 2
THREADS = 384
SCALES = TILE_M + 32  # floats of a stage: a scale per row, then four of the weight
MATH_REGISTERS, LOAD_REGISTERS = 232, 40
# A work table's entry: row tile << 12 | column tile << 1 | whether the pair shares the rows (else the weight).
ROW_SHIFT, COLUMN_MASK = 12, 2047


class GroupedGemm:
    """epilogue: one of `xstage.moe.epilogues`. stages: of the ring; divides K / 128. table: the entry of `totals` that counts the work."""

    def __init__(self, epilogue: Any, stages: int, table: int) -> None:
        self.epilogue, self.stages, self.table = epilogue, stages, table

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> GroupedGemm:
        return self

    @cute.jit
    def __call__(
        self, a: cute.Tensor, weight: cute.Tensor, a_scales: cute.Tensor, weight_scales: cute.Tensor, tile_expert: cute.Tensor,
        work: cute.Tensor, totals: cute.Tensor, outputs: Any, columns: Int32, ctas: Int32, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """a: uint8 [rows, K]. weight: uint8 [experts · N, K]. a_scales: float32 [K / 128, rows].
        weight_scales: float32 [experts, K / 128, N / 128]. outputs: the epilogue's tensors. columns: N.
        """
        stages = self.stages
        a8 = cute.make_tensor(cute.recast_ptr(a.iterator, dtype=Float8E4M3FN), a.layout)
        w8 = cute.make_tensor(cute.recast_ptr(weight.iterator, dtype=Float8E4M3FN), weight.layout)
        k_major = LayoutEnum.ROW_MAJOR.sm90_mma_major_mode()
        # Two objects: one starts a sum, one goes on with it (a field set at run time does not survive a dynamic loop).
        start, go_on = (
            sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float32, (2, 1, 1), tiler_mn=(64, 128))
            for _ in range(2)
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
        # One memory, seen in 128-row slots by wgmma and in boxes of 128 or 64 rows by the copies.
        slots_a = cute.tile_to_shape(atom, (128, TILE_K, stages), (0, 1, 2))
        slots_w = cute.tile_to_shape(atom, (128, TILE_K, 2 * stages), (0, 1, 2))
        halves_a = cute.tile_to_shape(atom, (64, TILE_K, 2 * stages), (0, 1, 2))
        load, multicast = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()

        def box(layout: Any) -> Any:
            return cute.slice_(layout, (None, None, 0))

        load_a, tma_a = cpasync.make_tiled_tma_atom(load, a8, box(slots_a), (128, TILE_K))
        load_w, tma_w = cpasync.make_tiled_tma_atom(load, w8, box(slots_w), (128, TILE_K))
        share_w, _ = cpasync.make_tiled_tma_atom(multicast, w8, box(slots_w), (128, TILE_K), num_multicast=1)
        share_a, tma_half = cpasync.make_tiled_tma_atom(multicast, a8, box(halves_a), (64, TILE_K), num_multicast=1)

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[Int64, 2 * stages]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, SCALES * stages], 128]
            staging: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.epilogue.staging_bytes], 1024]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(slots_a)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(slots_w)], 1024]

        self.shared = Shared
        self.kernel(
            load_a, share_a, tma_a, tma_half, load_w, share_w, tma_w, a_scales, weight_scales, tile_expert, work, totals,
            self.epilogue.descriptors(outputs), a.shape[0], columns, a.shape[1], start, go_on, slots_a, slots_w, halves_a,
        ).launch(grid=(ctas, 1, 1), block=[THREADS, 1, 1], cluster=(CLUSTER, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, load_a: cute.CopyAtom, share_a: cute.CopyAtom, tma_a: cute.Tensor, tma_half: cute.Tensor, load_w: cute.CopyAtom,
        share_w: cute.CopyAtom, tma_w: cute.Tensor, a_scales: cute.Tensor, weight_scales: cute.Tensor, tile_expert: cute.Tensor,
        work: cute.Tensor, totals: cute.Tensor, outputs: Any, rows: Int32, columns: Int32, depth: Int32, start: cute.TiledMma,
        go_on: cute.TiledMma, slots_a: cute.ComposedLayout, slots_w: cute.ComposedLayout, halves_a: cute.ComposedLayout,
    ):  # fmt: skip
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        member = cute.arch.make_warp_uniform(block % CLUSTER)
        shared = SmemAllocator().allocate(self.shared)
        full = shared.barriers.data_ptr()
        empty = full + self.stages
        if warp == 0:
            cpasync.prefetch_descriptor(load_a)
            cpasync.prefetch_descriptor(load_w)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 8 * CLUSTER)  # every math warp of both CTAs
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

        s_scales = shared.scales.get_tensor(cute.make_layout((SCALES, self.stages)))
        entry, step, count = block // CLUSTER, cute.arch.grid_dim()[0] // CLUSTER, Int32(totals[self.table])
        if thread // 128 == 2:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == 8:
                sources = (load_a, share_a, tma_a, tma_half, load_w, share_w, tma_w)
                tiles = (
                    shared.a.get_tensor(slots_a.outer, swizzle=slots_a.inner), shared.a.get_tensor(halves_a.outer, swizzle=halves_a.inner),
                    shared.w.get_tensor(slots_w.outer, swizzle=slots_w.inner),
                )  # fmt: skip
                self._load(
                    sources, tiles, s_scales, a_scales, weight_scales, tile_expert, work, entry, step, count, member, rows, columns, depth,
                    full, empty,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            slice_ = start.get_slice(thread)
            start.set(warpgroup.Field.ACCUMULATE, False)
            go_on.set(warpgroup.Field.ACCUMULATE, True)
            r_a = start.make_fragment_A(slice_.partition_A(shared.a.get_tensor(slots_a.outer, swizzle=slots_a.inner)))
            r_w = start.make_fragment_B(slice_.partition_B(shared.w.get_tensor(slots_w.outer, swizzle=slots_w.inner)))
            shape = slice_.partition_shape_C((128, 128))
            product, first, second = (cute.make_rmem_tensor(shape, Float32) for _ in range(3))
            first.fill(0.0)
            second.fill(0.0)
            row = warp * 16 + thread % 32 // 4  # this thread's first row of the tile; the other is 8 below
            phase = Int32(0)
            self.epilogue.begin(shared.staging, thread, outputs)
            mine = work[cutlass.min(entry, count - 1) * 2 + member] if count > 0 else Int32(0)
            while entry < count:
                m, n = mine >> ROW_SHIFT, (mine >> 1) & COLUMN_MASK
                self.epilogue.warm(m)
                for _ in cutlass.range(depth // (TILE_K * self.stages) - 1, unroll=1):
                    self._round(False, start, go_on, product, first, second, r_a, r_w, s_scales, full, empty, phase, row, m, n)
                    phase ^= 1
                entry += step
                mine = work[cutlass.min(entry, count - 1) * 2 + member]
                self._round(True, start, go_on, product, first, second, r_a, r_w, s_scales, full, empty, phase, row, m, n)
                phase ^= 1
            self.epilogue.end()
        # A CTA must not go while its partner may still multicast to it or arrive at its barriers.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _load(
        self, sources, tiles, s_scales, a_scales, weight_scales, tile_expert, work, entry, step, count, member, rows, columns, depth, full,
        empty,
    ):  # fmt: skip
        """One warp: a stage's rows, weight and scales for every step of K of every tile."""
        load_a, share_a, tma_a, tma_half, load_w, share_w, tma_w = sources
        s_a, s_half, s_w = tiles
        alone = cute.make_layout(1)

        def parts(atom: Any, s: Any, g: Any, box: int) -> Any:
            g = cute.local_tile(g, (box, TILE_K), (None, None))
            return cpasync.tma_partition(atom, 0, alone, cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))

        to_a, from_a = parts(load_a, s_a, tma_a, 128)
        to_half, from_half = parts(share_a, s_half, tma_half, 64)
        to_w, from_w = parts(load_w, s_w, tma_w, 128)
        copy_scales = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        both = cutlass.Int16(3)
        stage, phase = Int32(0), Int32(0)
        k_blocks, n_blocks = depth // TILE_K, columns // 128
        # What a tile needs to begin is looked up a tile ahead, the entry two: a look-up would leave the ring to run dry.
        mine, following = Int32(0), Int32(0)
        expert = Int32(0)
        if entry < count:
            mine = work[entry * 2 + member]
            following = work[cutlass.min(entry + step, count - 1) * 2 + member]
            expert = tile_expert[mine >> ROW_SHIFT]
        while entry < count:
            m, n = mine >> ROW_SHIFT, (mine >> 1) & COLUMN_MASK
            next_expert = tile_expert[following >> ROW_SHIFT]
            after_next = work[cutlass.min(entry + 2 * step, count - 1) * 2 + member]
            w_block = expert * n_blocks + n * 2
            w_scale = expert * k_blocks * n_blocks + n // 2 * 4  # 16 bytes: the scales of this tile and of its neighbour
            for k in cutlass.range(k_blocks, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                bar = full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, (TILE_M + TILE_N) * TILE_K + TILE_M * 4 + 16)
                if mine & 1 == 0:
                    cute.copy(load_a, from_a[(None, m, k)], to_a[(None, stage)], tma_bar_ptr=bar)
                    cute.copy(
                        share_w, from_w[(None, w_block + member, k)], to_w[(None, stage * 2 + member)], tma_bar_ptr=bar, mcast_mask=both
                    )
                else:
                    cute.copy(
                        share_a, from_half[(None, m * 2 + member, k)], to_half[(None, stage * 2 + member)], tma_bar_ptr=bar, mcast_mask=both
                    )
                    for i in cutlass.range_constexpr(2):
                        cute.copy(load_w, from_w[(None, w_block + i, k)], to_w[(None, stage * 2 + i)], tma_bar_ptr=bar)
                with cute.arch.elect_one():
                    for source, target, size in (
                        (a_scales.iterator + (k * rows + m * TILE_M), stage * SCALES, TILE_M),
                        (weight_scales.iterator + (w_scale + k * n_blocks), stage * SCALES + TILE_M, 4),
                    ):
                        cute.copy(
                            copy_scales, cute.make_tensor(source.align(16), cute.make_layout(size)),
                            cute.make_tensor((s_scales.iterator + target).align(16), cute.make_layout(size)), mbar_ptr=bar,
                        )  # fmt: skip
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    phase ^= 1
            entry += step
            mine, following, expert = following, after_next, next_expert

    @cute.jit
    def _round(
        self, last: cutlass.Constexpr[bool], start, go_on, product, first, second, r_a, r_w, s_scales, full, empty, phase, row, m, n,
    ):  # fmt: skip
        """One trip round the ring. In the tile's last one the first half goes through the epilogue under the second half's last wgmma."""
        for stage in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_wait(full + stage, phase)
            upper, lower = s_scales[(row, stage)], s_scales[(row + 8, stage)]
            weights = [s_scales[(TILE_M + n % 2 * 2 + i, stage)] for i in range(2)]
            for half in cutlass.range_constexpr(2):
                warpgroup.fence()
                for k in cutlass.range_constexpr(4):
                    mma = start if const_expr(k == 0) else go_on
                    cute.gemm(mma, product, r_a[(None, None, k, stage)], r_w[(None, None, k, stage * 2 + half)], product)
                warpgroup.commit_group()
                if const_expr(last and stage == self.stages - 1 and half == 1):
                    self.epilogue.half(0, first, second, m, n)
                warpgroup.wait_group(0)
                if const_expr(half == 1):
                    lane = cute.arch.lane_idx()
                    if lane < CLUSTER:  # the slot was filled from both CTAs, so both must know that it is free
                        cute.arch.mbarrier_arrive(empty + stage, lane)
                # Column block j of 8 within a wgmma: gate and up take turns in the epilogue that holds both, with a scale each.
                even, odd = (0, 1) if const_expr(self.epilogue.alternating) else (half, half)
                factors = [(row_scale * weights[even], row_scale * weights[odd]) for row_scale in (upper, lower)]
                self._add(second if const_expr(half == 1) else first, product, *factors)
        if const_expr(last):
            self.epilogue.half(1, first, second, m, n)

    @cute.jit
    def _add(self, total: cute.Tensor, product: cute.Tensor, upper: Any, lower: Any) -> None:
        """total += scale · product, in float32."""
        for j in cutlass.range_constexpr(16):
            for i in cutlass.range_constexpr(2):
                for r, scales in ((0, upper), (1, lower)):
                    at = ((i, r, j), 0, 0)
                    total[at] = total[at] + scales[j % 2] * product[at]
