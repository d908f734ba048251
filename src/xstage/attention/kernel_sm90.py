"""FlashAttention + All-to-All for Hopper (sm_90a): FA4's forward, whose epilogue stores each output row where it is needed.

What is changed of flash-attn-4's `FlashAttentionForwardSm90` (everything else, the whole mainloop, is inherited):

* `kernel`: one CTA per tile, as FA4 has it. Which tile, the order of issue decides (`layout.tile_table`), so that the order of
  destinations in time is ours. A CTA computes its tile from its index where the order can be written so (`layout.turns`), and reads
  the table elsewhere: what a CTA waits for at its start, nothing hides.
* `load`: an idle warp looks up, in a table of one address per row of the sequence (`layout.row_table`), where the tile's rows go, and
  leaves the addresses in shared memory. A tile may therefore straddle ranks, and a shard may have any size and order.
* `epilogue`: the tile is staged through shared memory as FA4 does it, and each thread stores 16-byte pieces to the address of
  their row. Nothing is loaded from global memory here: by then the stores of the other CTAs fill the way to it. The thread index is
  read anew, because what is computed from it earlier lives in registers through the mainloop and costs the compiler FA4's schedule.

Kernels of one warp (`xstage.device.meeting`) stand around it on the stream. `Meeting(DONE)` follows: it tells every rank that this one
is done, and waits for all of them. `Meeting(ENTERED)` goes before where a peer may still be reading what this call overwrites.

Signals inside the attention kernel were built and measured first (a persistent form, then an entry check by an idle warp). Both cost
the compiler its schedule of the mainloop, 2 to 4% of the kernel; docs/attention.md has the figures.

Causality (PTX memory model), generation g of rank r:

1. Whatever rank r ran before on its stream has read its output buffer. Kernel order puts that before the `st.release.sys
   entered[r] = g` of `Meeting(ENTERED)`. A peer's attention kernel, which alone stores into r's buffer, comes after its own
   `Meeting(ENTERED)` acquired that. A call that follows one with another buffer needs no such meeting: the peer's `done` of
   the call before, which this rank has acquired, comes after the peer's reading of everything older.
2. All stores of the attention kernel happen before the next kernel of the stream, `Meeting(DONE)`, whose `st.release.sys done[me] = g`
   on every rank orders them: causality is transitive. A rank that acquires `done` of every rank sees every row.
   Launched ahead, the meeting has the same from `griddepcontrol.wait`: it returns when the kernel before has completed, its memory
   operations performed and visible.
3. `Meeting(DONE)` ends when every `done` is acquired; the next kernel on the stream is ordered after it. Its completion means: complete
   output, readable.

The generation lives in device memory and is advanced by `Meeting(DONE)`, so a replayed CUDA graph counts on. No CTA of the attention
kernel makes a release: a release waits for the stores before it, which is what a store's issuer must not do. Every wait is bounded; a
wait that gave up, or that met another signature, writes a status word, and no attention kernel stores anything from then on.

Not covered: head dims that are not multiples of 16, packed GQA, variable-length batches, stores by the copy engine (docs/attention.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from flash_attn.cute import utils
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.interface import _tile_size_fwd_sm90
from flash_attn.cute.named_barrier import NamedBarrierFwd
from flash_attn.cute.tile_scheduler import WorkTileInfo
from flash_attn.cute.utils import AuxData
from quack import layout_utils
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import ParamsBase

from xstage.attention.layout import BLOCK_BITS, HEAD_BITS
from xstage.device.meeting import FAILED, fake_words
from xstage.device.stores import thread_anew

# Kinds of meetings: a rank's signal words are `entered` of every rank, then `done` of every rank. `done` ends a call.
ENTERED, DONE = 0, 1


@dataclass
class Tables(ParamsBase):
    """Everything the host made for a call. In the order in which `launch` passes it."""

    tiles: cute.Tensor  # int32 [tiles], in the order of issue
    rows: cute.Tensor  # int64 [batch, sequence]: address of a row's first own head
    control: cute.Tensor  # int64 [CONTROL_WORDS]
    lse_rows: Any = None  # int64 [batch, sequence], or None


def unpacked(tile: Int32) -> tuple[Int32, Int32, Int32]:
    """(block, head, batch) of an entry of the tile table."""
    return tile & ((1 << BLOCK_BITS) - 1), (tile >> BLOCK_BITS) & ((1 << HEAD_BITS) - 1), tile >> (BLOCK_BITS + HEAD_BITS)


@dataclass(frozen=True)
class Start:
    """How a CTA knows its tile: from the tile table, or from its index in the base class's grid (block, head, batch).

    Args:
        runs: 0: from the table. n: a head's blocks in n runs of the sequence, taken in turn, block by block (`layout.turns`).
        first: the run that begins.
    """

    runs: int = 0
    first: int = 0

    def tile(self, tables: Tables) -> tuple[Int32, Int32, Int32]:
        """(block, head, batch) of this CTA."""
        x, head, batch = cute.arch.block_idx()
        if self.runs == 0:
            return unpacked(tables.tiles[x])
        if self.runs == 1:
            return x, head, batch
        run = (x + self.first) % self.runs
        return run * (cute.arch.grid_dim()[0] // self.runs) + x // self.runs, head, batch


class TileScheduler:
    """One tile per CTA. That there is no second one is known when the kernel is compiled."""

    def __init__(self, tile: tuple[Int32, Int32, Int32], *, loc: Any = None, ip: Any = None):
        self._tile, self._first = tile, True
        self._loc, self._ip = loc, ip

    @staticmethod
    def of(start: Start) -> Any:
        """The class whose `create` the base class calls."""

        def create(tables: Tables, *, loc: Any = None, ip: Any = None) -> TileScheduler:
            return TileScheduler(start.tile(tables), loc=loc, ip=ip)

        return type("TileScheduler", (), {"create": staticmethod(create)})

    def get_current_work(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        return WorkTileInfo((*self._tile, Int32(0)), self._first)

    def initial_work_tile_info(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        return self.get_current_work()

    def prefetch_next_work(self, *, loc: Any = None, ip: Any = None) -> None:
        pass

    def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        self._first = False
        return self.get_current_work()

    def producer_tail(self, *, loc: Any = None, ip: Any = None) -> None:
        pass

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for number in self._tile for value in cutlass.extract_mlir_values(number)]

    def __new_from_mlir_values__(self, values: list[Any]) -> TileScheduler:
        block, head, batch = (cutlass.new_from_mlir_values(n, [value]) for n, value in zip(self._tile, values, strict=True))
        scheduler = TileScheduler((block, head, batch), loc=self._loc)
        scheduler._first = self._first  # known when the kernel is compiled, so no value of it
        return scheduler


class _GridOf:
    """A kernel call whose grid is the tile table's, whatever the caller asks for."""

    def __init__(self, call: Any, tiles: cute.Tensor):
        self._call, self._tiles = call, tiles

    def launch(self, *, grid: Any, **options: Any) -> None:
        self._call.launch(grid=(self._tiles.shape[0], 1, 1), **options)


class AttentionA2ASm90(FlashAttentionForwardSm90):
    """FA4's sm90 forward with rows stored where they are needed.

    Args (beyond the base class's):
        with_lse: also store each row's log-sum-exp (float32) through a second row table.
        start: how a CTA knows its tile.
    """

    # The base class assigns this in `__call__`; the rows of a tile have more than one destination, which one tensor map cannot say.
    use_tma_O = property(lambda self: False, lambda self, value: None)

    def __init__(self, *args: Any, with_lse: bool, start: Start, **options: Any):
        super().__init__(*args, **options)
        self.with_lse, self.start = with_lse, start

    def _get_shared_storage_cls(self) -> Any:
        fields = dict(FlashAttentionForwardSm90._get_shared_storage_cls(self)._annotations)
        fields["addresses"] = cute.struct.MemRange[Int64, self._address_count]
        storage = cute.struct(type("SharedStorage", (), {"__annotations__": fields}))
        self._addresses_at = (storage._offsets["addresses"] - storage._offsets["mbar_ptr_Q"]) // 8
        return storage

    @property
    def _address_count(self) -> int:
        """Of a tile: one per row, and one per row's log-sum-exp."""
        return self.tile_m * (2 if self.with_lse else 1)

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> AttentionA2ASm90:
        return self

    def kernel(self, *args: Any) -> Any:
        *front, _, _, storage, aux_data, _ = args
        tables = Tables(*aux_data.tensors)
        scheduler = TileScheduler.of(self.start)
        call = FlashAttentionForwardSm90.kernel(self, *front, tables, scheduler, storage, AuxData(), None)
        return call if self.start.runs else _GridOf(call, tables.tiles)

    @cute.jit
    def load(
        self, mQ, mK, mV, sQ, sK, sV, tma_atom_Q, tma_atom_K, tma_atom_V, pipeline_k, pipeline_v, pipeline_q, gmem_tiled_copy_Q,
        mPageTable, blocksparse_tensors, block_info, SeqlenInfoCls, TileSchedulerCls,
    ):  # fmt: skip
        thread, tables = cute.arch.thread_idx()[0], TileSchedulerCls.args[0]
        if thread >= 32 and thread < 64:  # warp 1 has nothing to load
            self._look_up(tables, self._addresses(pipeline_q), thread - 32, mQ.shape[0])
        FlashAttentionForwardSm90.load(
            self, mQ, mK, mV, sQ, sK, sV, tma_atom_Q, tma_atom_K, tma_atom_V, pipeline_k, pipeline_v, pipeline_q, gmem_tiled_copy_Q,
            mPageTable, blocksparse_tensors, block_info, SeqlenInfoCls, TileSchedulerCls,
        )  # fmt: skip

    def _addresses(self, pipeline_q: Any) -> cute.Tensor:
        words = pipeline_q.sync_object_full.get_barrier(0) + self._addresses_at  # the first words of the storage are these barriers
        return cute.make_tensor(words, (self._address_count,))

    @cute.jit
    def _look_up(self, tables: Tables, addresses: cute.Tensor, lane: Int32, sequence: Int32) -> None:
        """Leave in shared memory where the tile's rows go, and arrive at the barrier where the epilogue begins.

        Address 0 stands for "no store": rows beyond the sequence, or a meeting before this kernel gave up. The arrival orders the
        writes before the readers that come there, and waits for nobody.
        """
        block, head, batch = self.start.tile(tables)
        end = sequence
        if tables.control[FAILED] != 0:
            end = Int32(0)
        for i in cutlass.range_constexpr(self.tile_m // 32):
            row = block * self.tile_m + i * 32 + lane
            address, lse_address = Int64(0), Int64(0)
            if row < end:
                address = tables.rows[batch, row] + Int64(head) * (self.tile_hdimv * self.dtype.width // 8)
                if const_expr(self.with_lse):
                    lse_address = tables.lse_rows[batch, row] + Int64(head) * 4
            addresses[i * 32 + lane] = address
            if const_expr(self.with_lse):
                addresses[self.tile_m + i * 32 + lane] = lse_address
        cute.arch.barrier_arrive(
            barrier_id=int(NamedBarrierFwd.Epilogue), number_of_threads=self.num_epilogue_threads + cute.arch.WARP_SIZE
        )
        # Once every CTA is here, none is left to be placed: a meeting that goes ahead takes nobody's place.
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def mma(
        self, tiled_mma_qk, tiled_mma_pv, mO, mLSE, sQ, sK, sVt, sP, sO, learnable_sink, pipeline_k, pipeline_v, pipeline_q,
        gmem_tiled_copy_O, tma_atom_O, tidx, softmax_scale_log2, softmax_scale, block_info, SeqlenInfoCls, AttentionMaskCls,
        TileSchedulerCls, blocksparse_tensors, aux_data=AuxData(), fastdiv_mods=None,  # noqa: B008 (the base class's signature)
    ):  # fmt: skip
        self._looked_up, self._tables = self._addresses(pipeline_q), TileSchedulerCls.args[0]
        FlashAttentionForwardSm90.mma(
            self, tiled_mma_qk, tiled_mma_pv, mO, mLSE, sQ, sK, sVt, sP, sO, learnable_sink, pipeline_k, pipeline_v, pipeline_q,
            gmem_tiled_copy_O, tma_atom_O, tidx, softmax_scale_log2, softmax_scale, block_info, SeqlenInfoCls, AttentionMaskCls,
            TileSchedulerCls, blocksparse_tensors, AuxData(), None,
        )  # fmt: skip

    @cute.jit
    def epilogue(
        self, acc_O, lse, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma, tidx, m_block, head_idx, batch_idx,
    ):  # fmt: skip
        # Stage the tile through shared memory (in Q's place), as the base class does, for stores of 16 bytes.
        rO = cute.make_fragment_like(acc_O, self.dtype)
        rO.store(acc_O.load().to(self.dtype))
        # Everybody has read V, and the warp that looked up the addresses has arrived here long ago.
        cute.arch.barrier(barrier_id=int(NamedBarrierFwd.Epilogue), number_of_threads=self.num_epilogue_threads + cute.arch.WARP_SIZE)
        store_atom = utils.get_smem_store_atom(self.arch.major * 10 + self.arch.minor, self.dtype)
        store_thread = cute.make_tiled_copy_C(store_atom, tiled_mma).get_slice(tidx)
        cute.copy(store_atom, store_thread.retile(rO), store_thread.partition_D(sO))
        cute.arch.barrier(barrier_id=int(NamedBarrierFwd.Epilogue), number_of_threads=self.num_epilogue_threads)
        self._store_rows(sO, gmem_tiled_copy_O)
        if const_expr(self.with_lse):
            self._store_lse(lse, tiled_mma, tidx)

    @cute.jit
    def _store_rows(self, sO, gmem_tiled_copy_O):
        gmem_thr_copy_O = gmem_tiled_copy_O.get_slice(thread_anew() - 128)
        positions = cute.make_identity_tensor((self.tile_m, self.tile_hdimv))
        tOcO = gmem_thr_copy_O.partition_S(positions)
        rows = cute.size(tOcO.shape[1])
        address = cute.make_rmem_tensor((rows,), Int64)
        for i in cutlass.range_constexpr(rows):
            address[i] = self._looked_up[tOcO[0, i, 0][0]]
        tOsO = gmem_thr_copy_O.partition_S(sO)
        tOrO = cute.make_fragment_like(tOsO, self.dtype)
        cute.autovec_copy(tOsO, tOrO)

        for i in cutlass.range_constexpr(rows):
            if address[i] != 0:
                pointer = cute.make_ptr(self.dtype, address[i], cute.AddressSpace.gmem, assumed_align=16)
                pieces = cute.tiled_divide(cute.make_tensor(pointer, (self.tile_hdimv,)), (128 // self.dtype.width,))
                for j in cutlass.range_constexpr(cute.size(tOrO.shape[2])):
                    piece = tOcO[0, 0, j][1] // (128 // self.dtype.width)
                    cute.autovec_copy(tOrO[None, i, j], pieces[None, piece])

    @cute.jit
    def _store_lse(self, lse, tiled_mma, tidx):
        positions = cute.make_identity_tensor((self.tile_m, self.tile_hdimv))
        thread_positions = layout_utils.reshape_acc_to_mn(tiled_mma.get_slice(tidx).partition_C(positions))
        # A row's sum is the same in the four threads that share it; the one with column 0 stores it.
        if thread_positions[0][1] == 0:
            for i in cutlass.range_constexpr(cute.size(lse)):
                target = self._looked_up[self.tile_m + thread_positions[i, 0][0]]
                if target != 0:
                    cute.make_tensor(cute.make_ptr(Float32, target, cute.AddressSpace.gmem, assumed_align=4), (1,))[0] = lse[i]


def tile_shape(head_dim: int, causal: bool) -> tuple[int, int]:
    """(query rows, key rows) of a tile: FA4's own choice, so that results are bitwise those of FA4."""
    config = _tile_size_fwd_sm90(head_dim, head_dim, causal, False)
    return config.m_block_size, config.n_block_size


@cache
def compiled(dtype: str, head_dim: int, queries_per_kv: int, causal: bool, with_lse: bool = False, start: Start = Start()) -> Any:
    """The attention kernel for a configuration, compiled once per process (a few seconds); `launch` calls it."""
    config = _tile_size_fwd_sm90(head_dim, head_dim, causal, False)
    element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype]
    kernel = AttentionA2ASm90(
        element, head_dim, head_dim, queries_per_kv, is_causal=causal, is_local=False, pack_gqa=False, tile_m=config.m_block_size,
        tile_n=config.n_block_size, num_stages=2, num_threads=384, Q_in_regs=False, intra_wg_overlap=config.intra_wg_overlap,
        mma_pv_is_rs=config.mma_pv_is_rs, with_lse=with_lse, start=start,
    )  # fmt: skip
    batch, sequence, heads, kv_heads = (cute.sym_int() for _ in range(4))
    q = make_fake_tensor(element, (batch, sequence, heads, head_dim), divisibility=8)
    k, v = (make_fake_tensor(element, (batch, sequence, kv_heads, head_dim), divisibility=8) for _ in range(2))
    tiles = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=4)
    rows = [
        cute.runtime.make_fake_tensor(Int64, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1), assumed_align=8)
        for _ in range(2 if with_lse else 1)
    ]
    aux = AuxData([tiles, rows[0], *fake_words(1), *rows[1:]], None)
    return cute.compile(
        kernel, q, k, v, q, None, Float32(1.0), *[None] * 9, aux, None, None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )  # fmt: skip


def launch(
    kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, tables: Sequence[torch.Tensor]
) -> None:  # fmt: skip
    """Launch attention on torch's current stream. `tables` in the order of `Tables`; nothing is written but through them."""
    kernel(q, k, v, q, None, softmax_scale, *[None] * 9, AuxData(list(tables), None), None, None)
