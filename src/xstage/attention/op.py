"""FlashAttention + All-to-All: attention over [whole sequence, my heads] whose output rows go straight to the ranks that own them.

    with xstage.AttentionA2A(group, max_sequence=32768, heads=24, head_dim=128) as attend:
        out = attend(q, k, v)                                # [batch, my rows, all heads, head dim]

        out = attend.ulysses(q, k, v)                        # in: [batch, my rows, all heads, head dim], as the output

    out = xstage.flash_attention_a2a(q, k, v, group=group)   # as the first, with buffers kept per process

What it runs on: `fused` (one Hopper kernel, `kernel_sm90.py`), `push` or `nccl` (attention, then an exchange: `serial.py`), `reference`
(CPU tensors, gloo). Which one is decided once, by all ranks together, when the object is made; anything but `fused` on GPUs is said
once as a warning, or refused with `fallback="error"`.

Outputs of `attend(…)` are views of the object's own buffers, of which there are `buffers` (2). An output may be read until this rank's
next call: what reads it must be on the stream before that call is; with a third buffer, before the call after. `copy=True`,
`flash_attention_a2a`, and any call under `torch.compile` return tensors of their own. A call may follow another at once: a rank's kernel
does not store into a peer's buffer before that peer has read what was in it (`kernel_sm90.py` has the argument), so no barrier is needed
between calls, replays or layers. Calls of one object must be ordered on each rank (one stream, or streams ordered by events) and come in
the same order on every rank.

CUDA graphs: call once with the same shapes before capture (buffers, tables and the compiled kernel are made then); keep the object
alive as long as the graph. Forward only.
"""

from __future__ import annotations

import itertools
import json
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from xstage.attention import layout as lay
from xstage.attention import reference, serial
from xstage.attention.arguments import check_options
from xstage.attention.entry import Entry
from xstage.attention.heads import HeadExchange, aligned, alike
from xstage.attention.layout import SequenceLayout
from xstage.attention.overlap import SM_FLOP, Problem, Split, choose
from xstage.errors import UnsuitableMachine, XStageError
from xstage.platform import KiB
from xstage.symmetric import Agreement, SymmetricBuffer, Watch, allocate_together, default_device, first_reason, joined, next_number

STORES = ("owner", "local", "remote")
LAST_LAUNCHES = ("ahead", "after")
STARTS = ("auto", "table")
HEAD_DIMS = (64, 96, 128, 256)
_SIGNAL_BYTES = 4 * KiB
_PHASES = ("entered", "done")  # names of `kernel_sm90`'s kinds of meetings
OWN_FIRST_NS = 1e7  # of attention, from where on an awake link costs more than reading the tile table (docs/attention.md)
_L2_BYTES = 50 * 1024 * KiB  # what FA4 assumes for keys and values, causal order
_OBJECTS: weakref.WeakValueDictionary[int, AttentionA2A] = weakref.WeakValueDictionary()
_ids = itertools.count(1)
_shared: dict[tuple[Any, ...], AttentionA2A] = {}


@dataclass(frozen=True)
class Variant:
    """How the fused kernel runs. The defaults are for use, the others for measurement; all ranks must use the same.

    Attributes:
        order: one of `layout.ORDERS`, or `auto`: `alternating`, and from `OWN_FIRST_NS` on `own_first`.
        stores: `owner`; `local` (every row into this rank's own memory: the control) or `remote` (every row to the next rank).
        entry: `auto`: the ranks meet before a call only where they must (`AttentionA2A._must_meet`); `always`.
        finish: `wait` (the call ends when the output is complete), `none` (the attention kernel alone, no meeting before
            or after: sender-visible time).
        last: the meeting that ends a call is launched `ahead` of the attention kernel's end, which it then awaits itself, or `after` it.
        start: `auto`: a CTA computes its tile from its index where the order allows (`layout.turns`); `table`: it always reads it.
    """

    order: str = "auto"
    stores: str = "owner"
    entry: str = "auto"
    finish: str = "wait"
    last: str = "ahead"
    start: str = "auto"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("order", self.order, ("auto", *lay.ORDERS)),
            ("stores", self.stores, STORES),
            ("entry", self.entry, ("auto", "always")),
            ("finish", self.finish, ("wait", "none")),
            ("last", self.last, LAST_LAUNCHES),
            ("start", self.start, STARTS),
        ):
            if value not in known:
                raise XStageError(f"{name}: {value!r} is not one of {', '.join(known)}")


@dataclass(frozen=True)
class _Call:
    """The problem of a call, as every rank must see it."""

    batch: int
    layout: SequenceLayout
    causal: bool
    return_lse: bool
    variant: Variant
    first: int = 0  # key/value heads of the first of two parts, at most; 0: one part

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch, "sequence": self.layout.sequence, "rows per rank": list(self.layout.local_rows),
            "layout": self.layout.flat, "causal": self.causal, "return_lse": self.return_lse,
            "variant": list(astuple(self.variant)), "first heads": self.first,
        }  # fmt: skip


@dataclass
class _Part:
    """Attention of some of my heads, in one launch: the kernel, the tile table, and per buffer the row tables."""

    heads: slice
    kv_heads: slice
    kernel: Any
    tiles: torch.Tensor
    rows: list[torch.Tensor]
    lse_rows: list[torch.Tensor]


@dataclass
class _Plan:
    """What a call needs on the device, made on its first use; all but `parts` and `keep` per buffer."""

    parts: list[_Part]  # two, of which this rank may have no heads in the second; else one
    calls: list[torch.Tensor]
    outs: list[torch.Tensor]
    lses: list[torch.Tensor]
    keep: list[torch.Tensor]


class AttentionA2A:
    """Owns the buffers of fused attention and exchange for one group.

    Args:
        group: process group (None: the default one).
        max_sequence: most rows of the whole sequence. heads: query heads over all ranks.
        head_dim: fused for 64, 96, 128, 256.
        dtype: bfloat16 or float16 for the fused kernel.
        kv_heads: key/value heads over all ranks (None: as many as `heads`).
        heads_per_rank: query heads of each rank (None: even, see `layout.head_shards`).
        max_batch: most sequences in a call.
        max_local_rows: most rows that one rank owns (None: an even share of `max_sequence`).
        device: None: the current CUDA device if the group has a GPU back end, else the CPU.
        buffers: 2; each further one keeps outputs valid for one more call; 1 takes less memory, and the ranks meet before every call too.
        variant: how the fused kernel runs.
        timeout_s: bound of every wait on a peer, in the kernel and on the host.
        fallback: `serial`: where the fused kernel cannot run, warn once and run attention, then an exchange; `error`: refuse.

    Raises:
        XStageError: bad arguments, or arguments that differ between ranks.
        UnsuitableMachine: with `fallback="error"`, naming the first rank that cannot run the fused kernel, and why.
        PeerTimeout: a rank did not make its object.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, max_sequence: int, heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16,
        kv_heads: int | None = None, heads_per_rank: Sequence[int] | None = None, max_batch: int = 1, max_local_rows: int | None = None,
        device: torch.device | str | None = None, buffers: int = 2, variant: Variant | None = None, timeout_s: float = 30.0,
        fallback: str = "serial",
    ):  # fmt: skip
        group = joined(group)
        self.group, self.rank, self.world = group, group.rank(), group.size()
        check_options(fallback, timeout_s, max_sequence=max_sequence, max_batch=max_batch, head_dim=head_dim, buffers=buffers)
        self.heads, self.head_dim, self.dtype, self.max_sequence, self.max_batch = heads, head_dim, dtype, max_sequence, max_batch
        self.heads_per_rank, self.kv_heads_per_rank = lay.head_shards(heads, kv_heads or heads, self.world, heads_per_rank)
        self.max_local_rows = max_local_rows or -(-max_sequence // self.world)
        if min(self.heads_per_rank) < 1:
            raise XStageError(f"heads: rank {self.heads_per_rank.index(0)} of {self.world} would have none ({heads} heads in whole groups)")
        self.device = default_device(device, group)
        self.variant, self.buffers, self.timeout_s = variant or Variant(), buffers, timeout_s
        self._turn, self._closed, self.reason = 0, False, ""
        self._entry = Entry()
        self._plans: dict[_Call, _Plan] = {}
        self._agreed: set[tuple[_Call, str]] = set()
        self._exchanges: dict[tuple[Any, ...], serial.NcclExchange] = {}
        self._buffer: SymmetricBuffer | None = None
        number = next_number(group, "attention-a2a")
        self.tag = f"attention-a2a/{group.group_name}/{number}"
        self._agreement = Agreement(group, self.tag, timeout_s)
        self._agreement.same(
            "AttentionA2A", {"max_sequence": max_sequence, "heads": list(self.heads_per_rank), "kv_heads": list(self.kv_heads_per_rank),
                             "head_dim": head_dim, "dtype": str(dtype), "max_batch": max_batch, "max_local_rows": self.max_local_rows,
                             "buffers": buffers, "device": self.device.type, "fallback": fallback},
        )  # fmt: skip
        self._fallback = fallback
        self.mode = self._choose_mode(fallback)
        self.inputs: HeadExchange | None = None  # of `ulysses`, made by its first call
        self.split: Split | None = None  # how the last call of `ulysses` was split; None: not
        # For measurement: see `overlap.Split`.
        self.rest_ctas: int | None = None
        self._splits: dict[tuple[int, SequenceLayout, bool, int | None], tuple[Split | None, Split | None]] = {}  # eager, in a graph
        self._side: torch.cuda.Stream | None = None
        self._handle = next(_ids)
        _OBJECTS[self._handle] = self

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, softmax_scale: float | None = None,
        layout: SequenceLayout | None = None, return_lse: bool = False, copy: bool | None = None, variant: Variant | None = None,
    ) -> Any:  # fmt: skip
        """Attention of my heads over the whole sequence; every output row at its owner.

        Args:
            q: [batch, sequence, my query heads, head dim]. k, v: [batch, sequence, my key/value heads, head dim].
            softmax_scale: None: 1/√(head dim).
            layout: which rank owns which rows (None: even contiguous shards).
            return_lse: also return the log-sum-exp of every row that arrives here.
            copy: True: return tensors of their own. None: only under `torch.compile`.
            variant: instead of the object's, for measurement (not under `torch.compile`).

        Returns:
            [batch, my rows, all heads, head dim], with `return_lse` also float32 [batch, all heads, my rows].

        Raises:
            XStageError: an argument does not fit the object, or the ranks were given different problems.
            PeerTimeout: a peer did not come to this call's agreement, or to an earlier call's kernel.
        """
        scale = self.head_dim**-0.5 if softmax_scale is None else softmax_scale
        if torch.compiler.is_compiling():
            flat = [] if layout is None else layout.flat
            out, lse = torch.ops.xstage.attention_a2a(q, k, v, self._handle, causal, scale, flat, return_lse)
        else:
            out, lse = self._run(q, k, v, causal, scale, layout, return_lse, variant or self.variant)
            if copy:
                out, lse = out.clone(), None if lse is None else lse.clone()
        return (out, lse) if return_lse else out

    @torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
    def ulysses(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, softmax_scale: float | None = None,
        layout: SequenceLayout | None = None, return_lse: bool = False, copy: bool | None = None, first_heads: int | None = None,
    ) -> Any:  # fmt: skip
        """The whole of Ulysses attention: q, k and v of my rows to the ranks of their heads, attention, its rows to their owners.

        The first call makes the buffers of the first exchange (`heads.HeadExchange`), on every rank. Under `torch.compile` a call is a
        graph break.

        Args:
            q: [batch, my rows, all query heads, head dim]. k, v: [batch, my rows, all key/value heads, head dim].
            layout: which rank owns which rows (None: contiguous shards, every rank has as many rows as this one).
            first_heads: so many query heads of every rank are exchanged and attended first, and hide the exchange of the rest. 0: all at
                once. None: chosen by a model of both (`overlap.choose`); in a CUDA graph also for short layers, and so in the first call
                of a kind, which a graph may follow. Whole key/value groups; the same on every rank; a rank that has fewer gives all. The
                result has the same bits. Only where attention is fused and the exchange one kernel.
            Others: as the object's call takes them.

        Returns:
            As the object's call: [batch, my rows, all heads, head dim], with `return_lse` also float32 [batch, all heads, my rows].

        Raises:
            XStageError, UnsuitableMachine, PeerTimeout: see `HeadExchange` and the object's call.
        """
        where = alike(q.shape[1], self.world) if layout is None else layout
        self._check_first(first_heads)
        if self.inputs is None:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise XStageError("ulysses: call it once with these shapes before capturing a CUDA graph")
            self.inputs = HeadExchange(
                self.group, max_sequence=self.max_sequence, heads=self.heads, kv_heads=sum(self.kv_heads_per_rank), head_dim=self.head_dim,
                dtype=self.dtype, heads_per_rank=self.heads_per_rank, max_batch=self.max_batch, device=self.device, buffers=self.buffers,
                timeout_s=self.timeout_s, fallback=self._fallback,
            )  # fmt: skip
        self._check_rows(where)  # before anything is sent
        self.split = self._split((q, k, v), where, causal, first_heads)
        first, ctas = (self.split.first, self.split.ctas) if self.split else (0, 0)
        x, rest = self.inputs.in_parts(q, k, v, where, first, ctas)
        scale = self.head_dim**-0.5 if softmax_scale is None else softmax_scale
        out, lse = self._run(*x, causal, scale, where, return_lse, self.variant, first, rest)
        if copy:
            out, lse = out.clone(), None if lse is None else lse.clone()
        return (out, lse) if return_lse else out

    def _check_first(self, first_heads: int | None) -> None:
        group, most = self.heads // sum(self.kv_heads_per_rank), max(self.heads_per_rank)
        if first_heads is not None and not 0 <= first_heads <= most:
            raise XStageError(f"first_heads: {first_heads} is not in 0 … {most}, the query heads of a rank")
        if first_heads is not None and first_heads % group:
            raise XStageError(f"first_heads: {first_heads} must be a multiple of {group} (query heads per key/value head)")

    def _split(
        self, x: tuple[torch.Tensor, torch.Tensor, torch.Tensor], layout: SequenceLayout, causal: bool, first_heads: int | None
    ) -> Split | None:  # fmt: skip
        """How a call of `ulysses` is split; the same on every rank.

        The first call of a kind is split as in a CUDA graph, where short layers are split too: the graph can then be captured.
        """
        assert self.inputs is not None
        if self.mode != "fused" or self.inputs.mode != "kernel" or first_heads == 0:
            return None
        key = (x[0].shape[0], layout, causal, first_heads)
        seen = key in self._splits
        if not seen:
            self.inputs.check_arguments(*x, layout)
            self._splits[key] = self._choose_split(*key)
        eager, captured = self._splits[key]
        split = eager if seen and not torch.cuda.is_current_stream_capturing() else captured
        return split if split is None or self.rest_ctas is None else Split(split.first, self.rest_ctas)

    def _choose_split(
        self, batch: int, layout: SequenceLayout, causal: bool, first_heads: int | None
    ) -> tuple[Split | None, Split | None]:  # fmt: skip
        """Eager, and in a CUDA graph."""
        from xstage.attention import kernel_sm90

        first = None if first_heads is None else first_heads * sum(self.kv_heads_per_rank) // self.heads
        if first is not None and len(lay.head_parts(self.kv_heads_per_rank, first)) == 1:
            return None, None
        problem = Problem(
            layout, self.heads_per_rank, self.kv_heads_per_rank, self.head_dim, self.head_dim * self.dtype.itemsize,
            kernel_sm90.tile_shape(self.head_dim, causal)[0], _sms(self.device), batch, causal,
        )  # fmt: skip
        return choose(problem, first), choose(problem, first, captured=True)

    def with_kernel(self, kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
        """Another attention kernel, fused without touching it: its output argument lies in the peers' buffers, one launch per destination.

        This is how the paper fuses FA3 (section 5.3). It costs two barriers and short launches, and needs nothing but a strided output.

        Args:
            kernel: `kernel(q, k, v, out)` with q [batch, some rows, my heads, head dim], k and v of the whole sequence; writes `out`,
                a strided view of q's shape. Full attention only: a causal kernel would not know which rows it was given.

        Returns:
            `function(q, k, v, layout=None)` → [batch, my rows, all heads, head dim], a view like the object's own outputs.
        """

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout | None = None) -> torch.Tensor:
            where = _even(q.shape[1], self.world) if layout is None else layout
            self._validate(q, k, v, where)
            self._agree(_Call(q.shape[0], where, False, False, self.variant), "shapes (with_kernel)")
            turn = self._turn % self.buffers
            self._turn += 1
            targets = self.push_targets(where, q.shape[0], turn)
            self.barrier(0)
            # Own rows last: they need no drain.
            for s in sorted(where.segments, key=lambda s: (s.rank - self.rank - 1) % self.world):
                kernel(q[:, s.start : s.start + s.rows], k, v, targets[s.rank][:, s.local_start : s.local_start + s.rows])
            self.barrier(1)
            assert self._buffer is not None
            start = _SIGNAL_BYTES + turn * (self._out_bytes + self._lse_bytes)
            return self._buffer.view(start, (q.shape[0], where.local_rows[self.rank], self.heads, self.head_dim), self.dtype)

        return attend

    def check(self) -> None:
        """Wait for what was launched and raise if a kernel gave up on a peer.

        Raises:
            PeerTimeout: naming rank, phase and tag.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.mode == "fused":
            self._watch.check()
        if self.inputs is not None:
            self.inputs.check()

    def close(self) -> None:
        """Wait for this rank's kernels and free the buffers. Views of outputs become invalid. Every rank should close."""
        if self._closed:
            return
        self._closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._plans.clear()
        self._exchanges.clear()
        if self.inputs is not None:
            self.inputs.close()
        if self._buffer is not None:
            self._buffer.free()

    def __enter__(self) -> AttentionA2A:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- choosing how to run

    def _choose_mode(self, fallback: str) -> str:
        if self.device.type == "cpu":
            return "reference"
        reasons = self._agreement.reach("ability", _why_not_fused(self.device, self.dtype, self.head_dim, self.world))
        reasons = self._allocate_together(reasons)
        self.reason = first_reason(self.group, reasons)
        if not self.reason:
            return "fused"
        if fallback == "error":
            raise UnsuitableMachine(f"attention + all-to-all cannot run fused ({self.reason})")
        mode = "push" if self._buffer is not None else "nccl"
        words = {"push": "strided copies", "nccl": "an NCCL all-to-all"}
        warnings.warn(f"attention + all-to-all runs as attention, then {words[mode]}: {self.reason}", RuntimeWarning, stacklevel=4)
        return mode

    def _allocate_together(self, reasons: list[str]) -> list[str]:
        """Symmetric memory on every rank or on none; adds to `reasons` where it failed."""
        self._out_bytes = _round_up(self.max_batch * self.max_local_rows * self.heads * self.head_dim * self.dtype.itemsize, 256)
        self._lse_bytes = _round_up(self.max_batch * self.max_local_rows * self.heads * 4, 256)
        size = _SIGNAL_BYTES + self.buffers * (self._out_bytes + self._lse_bytes)
        self._buffer, failures = allocate_together(size, self.group, self.device, self._agreement)
        if self._buffer is None:
            return [reason or failure for reason, failure in zip(reasons, failures, strict=True)]
        self._control = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._watch = Watch(self.group, self.tag, self.timeout_s, _PHASES)
        self._signals = self._buffer.view(0, (2 * self.world,), torch.int64)
        return reasons

    # ---- one call

    def _run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, layout: SequenceLayout | None,
        return_lse: bool, variant: Variant, first: int = 0, rest: Callable[[], None] = lambda: None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        if layout is None:
            layout = _even(q.shape[1], self.world)
        self._validate(q, k, v, layout)
        if self.mode == "fused":
            self._watch.check()
        call = _Call(q.shape[0], layout, causal, return_lse, variant, first)
        self._agree(call, "shapes")
        if self.mode == "reference":
            out, lse = reference.attention_a2a(
                q, k, v, group=self.group, layout=layout, heads_per_rank=self.heads_per_rank, causal=causal, softmax_scale=scale
            )
            return out, lse.float() if return_lse else None
        with torch.cuda.device(self.device):
            if self.mode == "fused":
                return self._fused(q, k, v, scale, call, rest)
            return self._serial(q, k, v, scale, call)

    def _agree(self, call: _Call, what: str) -> None:
        if (call, what) not in self._agreed:
            self._agreement.same(what, call.to_json())
            self._agreed.add((call, what))

    def _validate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout) -> None:
        if self._closed:
            raise XStageError("attend: this object was closed")
        heads, kv_heads = self.heads_per_rank[self.rank], self.kv_heads_per_rank[self.rank]
        for name, tensor, count in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
            if tensor.dim() != 4 or tensor.shape[2:] != (count, self.head_dim) or tensor.shape[:2] != q.shape[:2]:
                raise XStageError(f"{name}: shape {tuple(tensor.shape)} is not [batch, sequence, {count}, {self.head_dim}]")
            if tensor.dtype != self.dtype or tensor.device != self.device:
                raise XStageError(f"{name}: {tensor.dtype} on {tensor.device}; this object takes {self.dtype} on {self.device}")
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise XStageError(f"{name}: requires a gradient; there is no backward (use torch.no_grad())")
        if not 1 <= q.shape[0] <= self.max_batch:
            raise XStageError(f"q: batch {q.shape[0]} is not in 1 … max_batch = {self.max_batch}")
        if q.shape[1] > self.max_sequence:
            raise XStageError(f"q: sequence {q.shape[1]} is longer than max_sequence = {self.max_sequence}")
        if layout.sequence != q.shape[1] or layout.world != self.world:
            raise XStageError(
                f"layout: {layout.sequence} rows over {layout.world} ranks; q has {q.shape[1]} rows and the group {self.world} ranks"
            )
        self._check_rows(layout)

    def _check_rows(self, layout: SequenceLayout) -> None:
        if max(layout.local_rows) > self.max_local_rows:
            raise XStageError(f"layout: a rank owns {max(layout.local_rows)} rows; the limit is max_local_rows = {self.max_local_rows}")

    def _fused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, call: _Call, rest: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from xstage.attention import kernel_sm90
        from xstage.device.meeting import compiled_meeting

        variant = call.variant
        plan = self._plans.get(call)
        if plan is None:
            if torch.cuda.is_current_stream_capturing():
                raise XStageError("attend: call it once with these shapes before capturing a CUDA graph")
            plan = self._plans[call] = self._plan(call)
        turn = self._turn % self.buffers
        self._turn += 1
        x = [aligned(t) for t in (q.detach(), k.detach(), v.detach())]
        meeting = (self._control, plan.calls[turn], self._signals)
        met = self._entry.must_meet(waits=variant.finish == "wait", always=variant.entry == "always" or self.buffers == 1)
        if met and variant.finish != "none":
            compiled_meeting(self.world, kernel_sm90.ENTERED, False)(*meeting)
        if len(plan.parts) == 1:
            rest()
            self._launch(plan.parts[0], turn, x, scale, call.return_lse)
        else:
            self._in_two(plan.parts, turn, x, scale, call.return_lse, rest)
        if variant.finish == "wait":
            # Launched ahead, it would wait for the kernel before it on this stream, and not for the one on the side.
            ahead = variant.last == "ahead" and len(plan.parts) == 1
            compiled_meeting(self.world, kernel_sm90.DONE, True, ahead)(*meeting)
        return plan.outs[turn], plan.lses[turn].transpose(1, 2) if call.return_lse else None

    def _in_two(
        self, parts: Sequence[_Part], turn: int, x: Sequence[torch.Tensor], scale: float, with_lse: bool, rest: Callable[[], None]
    ) -> None:  # fmt: skip
        """Attention of the first heads on a side stream, while `rest` brings the others on this one; then theirs.

        The order is on purpose. Behind the fork, what stays on this stream starts a little before what waits for it on another: the
        exchange has its few SMs before attention fills the GPU. Attention of the rest does not wait for that of the first: its CTAs take
        the SMs of the first's last wave. The side stream reads this object's tables and the exchange's buffers, which live as long as the
        object, and ends before anything that follows on this one.
        """
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        rest()
        with torch.cuda.stream(self._side):
            self._launch(parts[0], turn, x, scale, with_lse)
        self._launch(parts[1], turn, x, scale, with_lse)
        current.wait_stream(self._side)

    def _launch(self, part: _Part, turn: int, x: Sequence[torch.Tensor], scale: float, with_lse: bool) -> None:
        """Attention of a part of my heads, on the current stream."""
        from xstage.attention import kernel_sm90

        if part.kernel is None:
            return
        q, k, v = x
        tables = [part.tiles, part.rows[turn], self._control]
        if with_lse:
            tables.append(part.lse_rows[turn])
        kernel_sm90.launch(part.kernel, q[:, :, part.heads], k[:, :, part.kv_heads], v[:, :, part.kv_heads], scale, tables)

    def _plan(self, call: _Call) -> _Plan:
        assert self._buffer is not None
        layout, variant, batch = call.layout, call.variant, call.batch
        plan = _Plan(
            [self._part(call, *ranges[self.rank]) for ranges in lay.head_parts(self.kv_heads_per_rank, call.first)], [], [], [], []
        )
        row_bytes = self.heads * self.head_dim * self.dtype.itemsize
        for turn in range(self.buffers):
            start = _SIGNAL_BYTES + turn * (self._out_bytes + self._lse_bytes)
            bases, lse_bases = self._bases(variant.stores, start, plan.keep)
            for part in plan.parts:
                head = sum(self.heads_per_rank[: self.rank]) + part.heads.start
                rows = lay.row_table(layout, bases, batch, row_bytes, head * self.head_dim * self.dtype.itemsize)
                part.rows.append(self._to_device(rows))
                part.lse_rows.append(self._to_device(lay.row_table(layout, lse_bases, batch, self.heads * 4, head * 4)))
            signature = zlib.crc32(json.dumps([call.to_json(), turn], sort_keys=True).encode()) & 0x7FFFFFFF
            words = [signature, self.rank, int(self.timeout_s * 1e9), self._watch.address, *self._buffer.addresses]
            mine = layout.local_rows[self.rank]
            plan.calls.append(torch.tensor(words, dtype=torch.int64, device=self.device))
            plan.outs.append(self._buffer.view(start, (batch, mine, self.heads, self.head_dim), self.dtype))
            plan.lses.append(self._buffer.view(start + self._out_bytes, (batch, mine, self.heads), torch.float32))
        # Tables were written on the current stream; a call on another stream must not read them before.
        torch.cuda.synchronize(self.device)
        return plan

    def _part(self, call: _Call, begin: int, end: int) -> _Part:
        """Attention of my key/value heads `begin` … `end`, as far as it is the same for all buffers."""
        from xstage.attention import kernel_sm90

        layout, variant, batch, group = call.layout, call.variant, call.batch, self.heads // sum(self.kv_heads_per_rank)
        part = _Part(slice(begin * group, end * group), slice(begin, end), None, torch.empty(0, dtype=torch.int32), [], [])
        heads = (end - begin) * group
        if not heads:
            return part
        sms = _sms(self.device)
        tile_rows, _ = kernel_sm90.tile_shape(self.head_dim, call.causal)
        tile_bytes = tile_rows * self.head_dim * self.dtype.itemsize
        kv_bytes = 2 * layout.sequence * self.head_dim * self.dtype.itemsize
        order = variant.order
        if order == "auto":  # as all heads ask for, also in a part
            order = default_order(layout.sequence, batch * self.heads_per_rank[self.rank], self.head_dim, sms)
        table = lay.tile_table(
            layout, self.rank, heads=heads, batch=batch, tile_rows=tile_rows, wave=sms, order=order, causal=call.causal,
            capacity_tiles=min(sms, sms * lay.KNEE_BYTES_PER_SM // tile_bytes),
            heads_per_section=1 << max(0, (_L2_BYTES // kv_bytes).bit_length() - 1),
        )  # fmt: skip
        # Causal tiles differ in length, and the base class's grid for them has another shape.
        computed = variant.start == "auto" and not call.causal
        runs, first = lay.turns(table, self.rank, world=self.world, heads=heads, batch=batch) if computed else (0, 0)
        part.tiles = self._to_device(table)
        part.kernel = kernel_sm90.compiled(
            str(self.dtype).removeprefix("torch."), self.head_dim, group, call.causal, call.return_lse, kernel_sm90.Start(runs, first)
        )
        return part

    def _bases(self, stores: str, start: int, keep: list[torch.Tensor]) -> tuple[list[int], list[int]]:
        """Where each rank's output begins, and its log-sum-exp, for a choice of destinations; `keep` holds memory made for it."""
        assert self._buffer is not None
        addresses = list(self._buffer.addresses)
        if stores == "remote":
            addresses = [addresses[(self.rank + 1) % self.world]] * self.world
        elif stores == "local":
            size = self._out_bytes + self._lse_bytes
            keep.append(torch.empty(self.world, size, dtype=torch.uint8, device=self.device))
            addresses = [keep[-1].data_ptr() + rank * size - start for rank in range(self.world)]
        return [a + start for a in addresses], [a + start + self._out_bytes for a in addresses]

    def _to_device(self, table: Any) -> torch.Tensor:
        return torch.from_numpy(table).to(self.device)

    def _serial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = serial.attention(q, k, v, causal=call.causal, softmax_scale=scale, return_lse=call.return_lse)
        rows_first = None if lse is None else lse.transpose(1, 2).contiguous()
        if self.mode == "push":
            return self._push(out, rows_first, call)
        moved = self._exchange("out", out, call)
        if rows_first is None:
            return moved, None
        return moved, self._exchange("lse", rows_first, call).transpose(1, 2)

    def push_targets(self, layout: SequenceLayout, batch: int = 1, turn: int = 0, lse: bool = False) -> list[torch.Tensor]:
        """Per rank the view [batch, its rows, my heads(, head dim)] of output buffer `turn`: what `serial.push` writes to."""
        if self._buffer is None:
            raise XStageError(f"push: this object has no memory that peers can reach ({self.reason or self.mode})")
        start = _SIGNAL_BYTES + turn * (self._out_bytes + self._lse_bytes) + (self._out_bytes if lse else 0)
        tail, dtype = ((self.heads,), torch.float32) if lse else ((self.heads, self.head_dim), self.dtype)
        first = sum(self.heads_per_rank[: self.rank])
        mine = slice(first, first + self.heads_per_rank[self.rank])
        return [self._buffer.view(start, (batch, layout.local_rows[rank], *tail), dtype, rank)[:, :, mine] for rank in range(self.world)]

    def barrier(self, channel: int) -> None:
        """Torch's device-side barrier of all ranks; for the serial baselines, the fused kernel needs none."""
        if self._buffer is None:
            raise XStageError(f"barrier: this object has no memory that peers can reach ({self.reason or self.mode})")
        self._buffer.barrier(channel)

    def _push(self, out: torch.Tensor, lse: torch.Tensor | None, call: _Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self._buffer is not None
        turn = self._turn % self.buffers
        self._turn += 1
        start = _SIGNAL_BYTES + turn * (self._out_bytes + self._lse_bytes)
        rows = call.layout.local_rows[self.rank]
        serial.push(out, call.layout, self.push_targets(call.layout, call.batch, turn), self.rank, self.barrier)
        result = self._buffer.view(start, (call.batch, rows, self.heads, self.head_dim), self.dtype)
        if lse is None:
            return result, None
        serial.push(lse, call.layout, self.push_targets(call.layout, call.batch, turn, lse=True), self.rank, self.barrier)
        return result, self._buffer.view(start + self._out_bytes, (call.batch, rows, self.heads), torch.float32).transpose(1, 2)

    def _exchange(self, name: str, x: torch.Tensor, call: _Call) -> torch.Tensor:
        turn = self._turn % self.buffers
        self._turn += name == "out"
        key = (name, turn, call.layout, call.batch)
        if key not in self._exchanges:
            self._exchanges[key] = serial.NcclExchange(
                call.layout, self.heads_per_rank, self.group, call.batch, tuple(x.shape[3:]), x.dtype, self.device
            )
        return self._exchanges[key](x)


def flash_attention_a2a(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: dist.ProcessGroup | None = None, causal: bool = False,
    softmax_scale: float | None = None, layout: SequenceLayout | None = None, heads_per_rank: Sequence[int] | None = None,
    return_lse: bool = False, fallback: str = "serial",
) -> Any:  # fmt: skip
    """`AttentionA2A` with buffers that this process keeps per group, heads, head dim, dtype and device; they grow when a call needs it.

    Args:
        q: [batch, sequence, my query heads, head dim]. k, v: [batch, sequence, my key/value heads, head dim].
        heads_per_rank: query heads of each rank (None: every rank has as many as this one).
        Others: see `AttentionA2A` and its call.

    Returns:
        A tensor of its own [batch, my rows, all heads, head dim]; with `return_lse` also float32 [batch, all heads, my rows].

    Raises:
        XStageError, UnsuitableMachine, PeerTimeout: see `AttentionA2A`.
    """
    group = joined(group)
    shards = [q.shape[2]] * group.size() if heads_per_rank is None else list(heads_per_rank)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    flat = [] if layout is None else layout.flat
    out, lse = torch.ops.xstage.flash_attention_a2a(q, k, v, group.group_name, causal, scale, flat, shards, return_lse, fallback)
    return (out, lse) if return_lse else out


def release_shared() -> None:
    """Free the buffers that `flash_attention_a2a` keeps. Every rank should do it together."""
    for attend in _shared.values():
        attend.close()
    _shared.clear()


@torch.library.custom_op("xstage::attention_a2a", mutates_args=())
def _attention_a2a(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: int, causal: bool, softmax_scale: float, layout: list[int], return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    attend = _OBJECTS[handle]
    where = SequenceLayout.from_flat(layout, attend.world) if layout else None
    return _owned(attend._run(q, k, v, causal, softmax_scale, where, return_lse, attend.variant))


@_attention_a2a.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, handle: int, causal: bool, softmax_scale: float, layout: list[int], return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    attend = _OBJECTS[handle]
    return _fake(q, attend.rank, attend.world, attend.heads, layout, return_lse)


@torch.library.custom_op("xstage::flash_attention_a2a", mutates_args=())
def _flash_attention_a2a(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group_name: str, causal: bool, softmax_scale: float, layout: list[int],
    heads_per_rank: list[int], return_lse: bool, fallback: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type,unused-ignore]
    where = SequenceLayout.from_flat(layout, group.size()) if layout else SequenceLayout.even(q.shape[1], group.size())
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise XStageError(f"q: {q.shape[2]} heads are not a multiple of k's {k.shape[2]}")
    ratio = q.shape[2] // k.shape[2]
    key = (group_name, tuple(heads_per_rank), ratio, q.shape[3], q.dtype, q.device, fallback)
    attend = _shared.get(key)
    need = (q.shape[1], max(where.local_rows), q.shape[0])
    if attend is None or any(
        n > have for n, have in zip(need, (attend.max_sequence, attend.max_local_rows, attend.max_batch), strict=True)
    ):
        if attend is not None:
            attend.close()
            need = (max(need[0], attend.max_sequence), max(need[1], attend.max_local_rows), max(need[2], attend.max_batch))
        attend = _shared[key] = AttentionA2A(
            group, max_sequence=need[0], heads=sum(heads_per_rank), head_dim=q.shape[3], dtype=q.dtype,
            kv_heads=sum(heads_per_rank) // ratio,
            heads_per_rank=heads_per_rank, max_batch=need[2], max_local_rows=need[1], device=q.device, fallback=fallback,
        )  # fmt: skip
    return _owned(attend._run(q, k, v, causal, softmax_scale, where, return_lse, attend.variant))


@_flash_attention_a2a.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group_name: str, causal: bool, softmax_scale: float, layout: list[int],
    heads_per_rank: list[int], return_lse: bool, fallback: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type,unused-ignore]
    return _fake(q, group.rank(), group.size(), sum(heads_per_rank), layout, return_lse)


def _fake(q: torch.Tensor, rank: int, world: int, heads: int, layout: list[int], return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    batch, sequence, _, head_dim = q.shape
    rows = SequenceLayout.from_flat(layout, world).local_rows[rank] if layout else sequence // world + (rank < sequence % world)
    lse_shape = (batch, heads, rows) if return_lse else (0,)
    return q.new_empty(batch, rows, heads, head_dim), q.new_empty(lse_shape, dtype=torch.float32)


def _owned(result: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh contiguous tensors: an operator's outputs must not alias memory that a later call writes."""
    out, lse = result
    return torch.clone(out, memory_format=torch.contiguous_format), (
        out.new_empty(0, dtype=torch.float32) if lse is None else torch.clone(lse, memory_format=torch.contiguous_format)
    )


def _why_not_fused(device: torch.device, dtype: torch.dtype, head_dim: int, world: int) -> str:
    """Empty if this rank can run the fused kernel, else the reason."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU (sm_90)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {dtype} is not bfloat16 or float16"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if world > 32:
        return f"{world} ranks; the limit is 32"
    try:
        from xstage.attention import kernel_sm90  # noqa: F401
    except ImportError as error:
        return f"the kernel packages are not installed ({error})"
    return ""


def default_order(sequence: int, heads: int, head_dim: int, sms: int) -> str:
    """Of tiles, where nobody asked for one (not causal; heads: of the rank, of all batches together)."""
    return "own_first" if 4.0 * heads * sequence**2 * head_dim / (SM_FLOP * sms) >= OWN_FIRST_NS else "alternating"


def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


@lru_cache(maxsize=64)
def _even(sequence: int, world: int) -> SequenceLayout:
    return SequenceLayout.even(sequence, world)
