"""FlashAttention + All-to-All for Hopper (sm_90a): FA4's forward, whose epilogue stores each output row where it is needed.

What is changed of flash-attn-4's `FlashAttentionForwardSm90` (everything else, the whole mainloop, is inherited):

* `kernel`: tiles come from a table made by the host (`layout.tile_table`), one column per CTA. A table with one round is FA4's
  own one-tile-per-CTA grid; more rounds make the kernel persistent, and then the order of destinations in time is the table's.
* `epilogue`: the tile is staged through shared memory as FA4 does it, and each thread stores 16-byte pieces to the address of
  their row, read from a table of one address per row of the sequence (`layout.row_table`). A tile may therefore straddle ranks, and a
  shard may have any size and order, at no cost but one 8-byte load per thread and row, issued before the staging.
* `load`: a warp that has nothing to load waits for every rank's `entered` (CTA 0's publishes this rank's first) and joins the math warps in
  the barrier before their first store. Later tiles of the CTA pay nothing for it.
* `mma`: after the last tile of a CTA, the arrival that ends in `done`; shared memory of Q is given back to the producer only
  when the epilogue has read the staged tile out of it (FA4 keeps O in Q's place, and never needs it twice).

Causality (PTX memory model), generation g of rank r:

1. Whatever rank r ran before on its stream has read its output buffer. Kernel order puts that before `st.release.sys entered[r] = g`.
   A peer stores into r's buffer only after `ld.acquire.sys` returned g (one warp per CTA, then the CTA barrier that all stores follow).
   So no output is overwritten that r may still be reading, with one static buffer as with alternating ones.
2. Weak 16-byte stores of a CTA → CTA barrier → `atom.acq_rel.gpu` of one thread → the last CTA's atom observes all of them →
   `st.release.sys done[me] = g` on every rank (a system-scope fence and a store). Causality order is transitive, so a rank that
   acquires `done` of every rank sees every row.
3. The last CTA waits for every `done` with acquire.sys; the kernel ends after it, and the next kernel on the stream is ordered
   after the kernel's end. Kernel completion means: complete output, readable.

The generation lives in device memory and is advanced by the last CTA after every CTA has arrived, so a replayed CUDA graph counts on.
The arrival (a release) is made once per CTA, not per tile: a release waits for the stores before it, which is what a store's
issuer must not do. Every wait is bounded; a wait that gave up, or that met another signature, writes a status word; that rank
stores nothing from then on, and its `done` says so, so that no peer takes an incomplete output for a complete one.

Not covered: head dims that are not multiples of 16, packed GQA, variable-length batches, bulk-engine stores.
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
from xstage.device import signals

# Words of the control block (local memory, int64); the host makes it, see `op.py`.
GENERATION, ARRIVALS, FAILED, CONTROL_WORDS = 0, 1, 2, 4
# Words of a call's description (int64). Addresses of every rank's signal words follow at PEERS.
SIGNATURE, RANK, TIMEOUT_NS, STATUS_ADDRESS, PEERS = 0, 1, 2, 3, 4
# A rank's signal words: `entered` of every rank, then `done` of every rank.
ENTERED, DONE = 0, 1

# May this CTA store to peers? Unknown until its first tile is staged.
UNKNOWN, ALLOWED = 0, 1
ENTRY_BARRIER = 8  # the base class uses 0 to 6


@dataclass
class Tables(ParamsBase):
    """Everything the host made for a call, in the order in which `launch` passes it."""

    tiles: cute.Tensor  # int32 [rounds + 1, CTAs]; the last row is -1
    rows: cute.Tensor  # int64 [batch, sequence]: address of a row's first own head
    control: cute.Tensor  # int64 [CONTROL_WORDS]
    call: cute.Tensor  # int64 [PEERS + world]
    signals: cute.Tensor  # int64 [2 * world]
    lse_rows: cute.Tensor | None = None  # int64 [batch, sequence]


class TableScheduler:
    """Walks one column of the tile table. The next entry is loaded one tile ahead, so no tile waits for it."""

    def __init__(self, tiles: cute.Tensor, cta: Int32, step: Int32, tile: Int32, upcoming: Int32, *, loc: Any = None, ip: Any = None):
        self._tiles, self._cta, self._step, self._tile, self._upcoming = tiles, cta, step, tile, upcoming
        self._loc, self._ip = loc, ip

    @staticmethod
    def create(tables: Tables, *, loc: Any = None, ip: Any = None) -> TableScheduler:
        cta = cute.arch.block_idx()[0]
        return TableScheduler(tables.tiles, cta, Int32(1), tables.tiles[0, cta], tables.tiles[1, cta], loc=loc, ip=ip)

    @cute.jit
    def get_current_work(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        tile = self._tile
        block = tile & ((1 << BLOCK_BITS) - 1)
        head = (tile >> BLOCK_BITS) & ((1 << HEAD_BITS) - 1)
        batch = tile >> (BLOCK_BITS + HEAD_BITS)
        return WorkTileInfo((block, head, batch, Int32(0)), tile >= 0)

    def initial_work_tile_info(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        return self.get_current_work()

    def prefetch_next_work(self, *, loc: Any = None, ip: Any = None) -> None:
        pass

    @cute.jit
    def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        self._tile = self._upcoming
        self._step = cutlass.min(self._step + 1, self._tiles.shape[0] - 1)
        self._upcoming = self._tiles[self._step, self._cta]
        return self.get_current_work()

    def producer_tail(self, *, loc: Any = None, ip: Any = None) -> None:
        pass

    def __extract_mlir_values__(self) -> list[Any]:
        values: list[Any] = []
        self._values_pos = []
        for part in (self._tiles, self._cta, self._step, self._tile, self._upcoming):
            part_values = cutlass.extract_mlir_values(part)
            values += part_values
            self._values_pos.append(len(part_values))
        return values

    def __new_from_mlir_values__(self, values: list[Any]) -> TableScheduler:
        parts = []
        for part, count in zip((self._tiles, self._cta, self._step, self._tile, self._upcoming), self._values_pos, strict=True):
            parts.append(cutlass.new_from_mlir_values(part, values[:count]))
            values = values[count:]
        return TableScheduler(*parts, loc=self._loc)


class _HeldPipeline:
    """Q's pipeline as the consumer mainloop sees it: waits pass, the release is held for the epilogue."""

    def __init__(self, pipeline: Any):
        self._pipeline = pipeline

    def consumer_wait_w_index_phase(self, index: Any, phase: Any) -> None:
        self._pipeline.consumer_wait_w_index_phase(index, phase)

    def consumer_release_w_index(self, index: Any) -> None:
        pass

    # The mainloop's `while` carries it as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> _HeldPipeline:
        return self


class _GridOf:
    """A kernel call whose grid is the tile table's, whatever the caller asks for."""

    def __init__(self, call: Any, tiles: cute.Tensor):
        self._call, self._tiles = call, tiles

    def launch(self, *, grid: Any, **options: Any) -> None:
        self._call.launch(grid=(self._tiles.shape[1], 1, 1), **options)


class AttentionA2ASm90(FlashAttentionForwardSm90):
    """FA4's sm90 forward with rows stored where they are needed.

    Args (beyond the base class's):
        world: number of ranks, at most 32.
        with_lse: also store each row's log-sum-exp (float32) through a second row table.
        finish: `wait` (signal `done` and wait for every rank's), `signal` (no wait: sender-visible time), `none` (no
            protocol at all: no entry check, no arrival; for the measurement of stores alone).
    """

    # The base class assigns this in `__call__`; the rows of a tile have more than one destination, which one tensor map cannot say.
    use_tma_O = property(lambda self: False, lambda self, value: None)

    def __init__(self, *args: Any, world: int, with_lse: bool, finish: str, **options: Any):
        super().__init__(*args, **options)
        self.world, self.with_lse, self.finish = world, with_lse, finish

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> AttentionA2ASm90:
        return self

    def kernel(self, *args: Any) -> _GridOf:
        *front, _, _, storage, aux_data, _ = args
        tables = Tables(*aux_data.tensors)
        call = FlashAttentionForwardSm90.kernel(self, *front, tables, TableScheduler, storage, AuxData(), None)
        return _GridOf(call, tables.tiles)

    def _control_address(self, word: int) -> Int64:
        return self._tables.control.iterator.toint() + 8 * word

    def _signal_address(self, kind: int, rank: Int32) -> Int64:
        return self._tables.signals.iterator.toint() + 8 * (Int64(kind * self.world) + Int64(rank))

    @cute.jit
    def _generation(self) -> Int32:
        return Int32(self._tables.control[GENERATION]) + 1

    @cute.jit
    def _publish(self, kind: cutlass.Constexpr[int], peer: Int32, what: Int64) -> None:
        """Tell `peer` this call's generation and `what` it is about: the signature, or that this rank gave up."""
        slot = 8 * (Int64(kind * self.world) + self._tables.call[RANK])
        word = (Int64(self._generation()) << 32) | what
        signals.store_release_sys(self._tables.call[PEERS + peer] + slot, word)

    @cute.jit
    def _wait(self, kind: cutlass.Constexpr[int], peer: Int32) -> Int32:
        """Wait for `peer`'s signal of this call. 1, and a status word, if it did not come, is about something else, or says that
        the peer gave up; 1 too if this rank has failed before.
        """
        generation, signature = self._generation(), self._tables.call[SIGNATURE]
        failed = self._control_address(FAILED)
        word = signals.wait_for_generation(self._signal_address(kind, peer), generation, failed, self._tables.call[TIMEOUT_NS])
        late = Int32(word >> 32) - generation < 0
        # A peer that does not wait may be a call ahead; its word then says nothing about this one.
        what = word & 0xFFFFFFFF
        other = (Int32(word >> 32) == generation) & (what != signature)
        broken = signals.load_relaxed_gpu(failed) != 0
        refused = Int32(0)
        if late or other or broken:
            refused = Int32(1)
            reason = Int64(signals.MISMATCH)
            if what == signals.GAVE_UP:
                reason = Int64(signals.PEER_GAVE_UP)
            if late:
                reason = Int64(signals.TIMED_OUT)
            status = (Int64(generation) << 32) | (reason << 16) | (Int64(peer) << 8) | Int64(kind + 1)
            if signals.claim_gpu(failed, status) == 0:
                signals.store_relaxed_sys(self._tables.call[STATUS_ADDRESS], status)
        return refused

    @cute.jit
    def _enter(self, lane: Int32) -> None:
        refused = Int32(0)
        if lane < self.world:
            if cute.arch.block_idx()[0] == 0:
                self._publish(ENTERED, lane, self._tables.call[SIGNATURE])
            refused = self._wait(ENTERED, lane)
        # Joined by the math warps before their first store; the barrier carries what was acquired here.
        signals.barrier_any(refused, ENTRY_BARRIER, self.num_epilogue_threads + 32)

    @cute.jit
    def load(
        self, mQ, mK, mV, sQ, sK, sV, tma_atom_Q, tma_atom_K, tma_atom_V, pipeline_k, pipeline_v, pipeline_q, gmem_tiled_copy_Q,
        mPageTable, blocksparse_tensors, block_info, SeqlenInfoCls, TileSchedulerCls,
    ):  # fmt: skip
        self._tables = TileSchedulerCls.args[0]
        if const_expr(self.finish != "none"):
            thread = cute.arch.thread_idx()[0]
            # Warp 1 has nothing to load: it does the waiting, long before the first tile is ready to be stored.
            if thread >= 32 and thread < 64:
                self._enter(thread - 32)
        FlashAttentionForwardSm90.load(
            self, mQ, mK, mV, sQ, sK, sV, tma_atom_Q, tma_atom_K, tma_atom_V, pipeline_k, pipeline_v, pipeline_q, gmem_tiled_copy_Q,
            mPageTable, blocksparse_tensors, block_info, SeqlenInfoCls, TileSchedulerCls,
        )  # fmt: skip

    @cute.jit
    def mma(
        self, tiled_mma_qk, tiled_mma_pv, mO, mLSE, sQ, sK, sVt, sP, sO, learnable_sink, pipeline_k, pipeline_v, pipeline_q,
        gmem_tiled_copy_O, tma_atom_O, tidx, softmax_scale_log2, softmax_scale, block_info, SeqlenInfoCls, AttentionMaskCls,
        TileSchedulerCls, blocksparse_tensors, aux_data=AuxData(), fastdiv_mods=None,  # noqa: B008 (the base class's signature)
    ):  # fmt: skip
        self._tables = TileSchedulerCls.args[0]
        self._pipeline_q = pipeline_q
        self._entry = cute.make_rmem_tensor((1,), Int32)
        self._entry[0] = UNKNOWN if const_expr(self.finish != "none") else ALLOWED
        FlashAttentionForwardSm90.mma(
            self, tiled_mma_qk, tiled_mma_pv, mO, mLSE, sQ, sK, sVt, sP, sO, learnable_sink, pipeline_k, pipeline_v,
            _HeldPipeline(pipeline_q), gmem_tiled_copy_O, tma_atom_O, tidx, softmax_scale_log2, softmax_scale, block_info, SeqlenInfoCls,
            AttentionMaskCls, TileSchedulerCls, blocksparse_tensors, AuxData(), None,
        )  # fmt: skip
        if const_expr(self.finish != "none"):
            self._finish(tidx)

    @cute.jit
    def _finish(self, tidx: Int32) -> None:
        # All stores of this CTA are issued; the barrier puts them before thread 0's arrival.
        cute.arch.barrier(barrier_id=int(NamedBarrierFwd.Epilogue), number_of_threads=self.num_epilogue_threads)
        if tidx < 32:
            arrived = Int64(0)
            if tidx == 0:
                arrived = signals.arrive_gpu(self._control_address(ARRIVALS))
            last = cute.arch.shuffle_sync(Int32(arrived), 0) == self._tables.tiles.shape[1] - 1
            if last:
                # The warp barrier carries what thread 0 acquired to the other lanes.
                cute.arch.sync_warp()
                if tidx < self.world:
                    # A CTA that refused stored nothing: peers must not take this rank's rows for complete.
                    what = self._tables.call[SIGNATURE]
                    if signals.load_relaxed_gpu(self._control_address(FAILED)) != 0:
                        what = Int64(signals.GAVE_UP)
                    self._publish(DONE, tidx, what)
                    if const_expr(self.finish == "wait"):
                        self._wait(DONE, tidx)
                cute.arch.sync_warp()
                if tidx == 0:
                    self._tables.control[ARRIVALS] = Int64(0)
                    self._tables.control[GENERATION] = Int64(self._generation())

    @cute.jit
    def epilogue(
        self, acc_O, lse, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma, tidx, m_block, head_idx, batch_idx,
    ):  # fmt: skip
        gmem_thr_copy_O = gmem_tiled_copy_O.get_slice(tidx)
        positions = cute.make_identity_tensor((self.tile_m, self.tile_hdimv))
        tOcO = gmem_thr_copy_O.partition_S(positions)
        rows = cute.size(tOcO.shape[1])
        first_row = m_block * self.tile_m
        # Addresses of this thread's rows; 0 stands for "no store". Loaded first: their latency passes under the staging.
        address = cute.make_rmem_tensor((rows,), Int64)
        address.fill(0)
        for i in cutlass.range_constexpr(rows):
            row = first_row + tOcO[0, i, 0][0]
            if row < seqlen.seqlen_q:
                address[i] = self._tables.rows[batch_idx, row]

        # Stage the tile through shared memory (in Q's place), as the base class does, for stores of 16 bytes.
        rO = cute.make_fragment_like(acc_O, self.dtype)
        rO.store(acc_O.load().to(self.dtype))
        cute.arch.barrier(barrier_id=int(NamedBarrierFwd.Epilogue), number_of_threads=self.num_epilogue_threads)
        store_atom = utils.get_smem_store_atom(self.arch.major * 10 + self.arch.minor, self.dtype)
        store_thread = cute.make_tiled_copy_C(store_atom, tiled_mma).get_slice(tidx)
        cute.copy(store_atom, store_thread.retile(rO), store_thread.partition_D(sO))
        if self._entry[0] == UNKNOWN:
            any_refused = signals.barrier_any(Int32(0), ENTRY_BARRIER, self.num_epilogue_threads + 32)
            self._entry[0] = ALLOWED + any_refused
        else:
            cute.arch.barrier(barrier_id=int(NamedBarrierFwd.Epilogue), number_of_threads=self.num_epilogue_threads)
        tOsO = gmem_thr_copy_O.partition_S(sO)
        tOrO = cute.make_fragment_like(tOsO, self.dtype)
        cute.autovec_copy(tOsO, tOrO)
        # The tile is in registers: the producer may load the next Q over it (generic accesses before the bulk engine's write).
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self._pipeline_q.consumer_release_w_index(0)

        if self._entry[0] == ALLOWED:
            head_offset = Int64(head_idx) * (self.tile_hdimv * self.dtype.width // 8)
            for i in cutlass.range_constexpr(rows):
                if address[i] != 0:
                    pointer = cute.make_ptr(self.dtype, address[i] + head_offset, cute.AddressSpace.gmem, assumed_align=16)
                    pieces = cute.tiled_divide(cute.make_tensor(pointer, (self.tile_hdimv,)), (128 // self.dtype.width,))
                    for j in cutlass.range_constexpr(cute.size(tOrO.shape[2])):
                        piece = tOcO[0, 0, j][1] // (128 // self.dtype.width)
                        cute.autovec_copy(tOrO[None, i, j], pieces[None, piece])
            if const_expr(self.with_lse):
                self._store_lse(lse, positions, seqlen, tiled_mma, tidx, first_row, head_idx, batch_idx)

    @cute.jit
    def _store_lse(self, lse, positions, seqlen, tiled_mma, tidx, first_row, head_idx, batch_idx):
        thread_positions = layout_utils.reshape_acc_to_mn(tiled_mma.get_slice(tidx).partition_C(positions))
        # A row's sum is the same in the four threads that share it; the one with column 0 stores it.
        if thread_positions[0][1] == 0:
            for i in cutlass.range_constexpr(cute.size(lse)):
                row = first_row + thread_positions[i, 0][0]
                if row < seqlen.seqlen_q:
                    target = self._tables.lse_rows[batch_idx, row] + Int64(head_idx) * 4
                    cute.make_tensor(cute.make_ptr(Float32, target, cute.AddressSpace.gmem, assumed_align=4), (1,))[0] = lse[i]


def tile_shape(head_dim: int, causal: bool) -> tuple[int, int]:
    """(query rows, key rows) of a tile: FA4's own choice, so that results are bitwise those of FA4."""
    config = _tile_size_fwd_sm90(head_dim, head_dim, causal, False)
    return config.m_block_size, config.n_block_size


@cache
def compiled(
    dtype: str, head_dim: int, queries_per_kv: int, causal: bool, world: int, with_lse: bool = False, finish: str = "wait"
) -> Any:  # fmt: skip
    """The kernel for a configuration, compiled once per process (a few seconds); `launch` calls it."""
    config = _tile_size_fwd_sm90(head_dim, head_dim, causal, False)
    element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype]
    kernel = AttentionA2ASm90(
        element, head_dim, head_dim, queries_per_kv, is_causal=causal, is_local=False, pack_gqa=False, tile_m=config.m_block_size,
        tile_n=config.n_block_size, num_stages=2, num_threads=384, Q_in_regs=False, intra_wg_overlap=config.intra_wg_overlap,
        mma_pv_is_rs=config.mma_pv_is_rs, world=world, with_lse=with_lse, finish=finish,
    )  # fmt: skip
    batch, sequence, heads, kv_heads = (cute.sym_int() for _ in range(4))
    q = make_fake_tensor(element, (batch, sequence, heads, head_dim), divisibility=8)
    k, v = (make_fake_tensor(element, (batch, sequence, kv_heads, head_dim), divisibility=8) for _ in range(2))
    tiles = _table(Int32)
    rows = [_table(Int64) for _ in range(2 if with_lse else 1)]
    words = [cute.runtime.make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,), assumed_align=8) for _ in range(3)]
    aux = AuxData([tiles, rows[0], *words, *rows[1:]], None)
    return cute.compile(
        kernel, q, k, v, q, None, Float32(1.0), *[None] * 9, aux, None, None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )  # fmt: skip


def launch(
    kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, tables: Sequence[torch.Tensor]
) -> None:  # fmt: skip
    """Launch on torch's current stream. `tables` in the order of `Tables`; nothing is written but through them."""
    kernel(q, k, v, q, None, softmax_scale, *[None] * 9, AuxData(list(tables), None), None, None)


def _table(element: Any) -> Any:
    return cute.runtime.make_fake_tensor(
        element, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1), assumed_align=element.width // 8
    )
