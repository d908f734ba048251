"""The exchange before Ulysses attention: q, k and v from [my rows, all heads] to [whole sequence, my heads], at once or in two parts.

    with HeadExchange(group, max_sequence=32768, heads=24, head_dim=128) as to_heads:
        q, k, v = to_heads(q, k, v)      # [batch, my rows, all heads, head dim] → [batch, whole sequence, my heads, head dim]

`AttentionA2A.ulysses` puts one in front of the fused attention. What it runs on is decided once, by all ranks together: `kernel` (one
Hopper kernel stores all three into the peers' buffers, `heads_sm90.py`, then the ranks meet), `push` (strided copies,
between two barriers), `nccl` and `reference` (an all-to-all each, over NCCL or gloo).

In two parts (`in_parts`, kernel only) the first few heads of every rank arrive before the others, so that attention of the first hides
the exchange of the rest. Both go to the places where the whole would go; each ends with a `Meeting(DONE)`, and so with a generation of its
own. Rows of a rank's own heads all move with the first part, in the shadow of the link: beside attention they would want SMs or copies, and
the way to the L2 cache twice. How the rest travels leaves the GPU to attention: few large CTAs of the same kernel, or strided copies by the
copy engines.

Results are views of the object's own buffers, of which there are `buffers` (2). A result may be read until this rank's next call: what
reads it must be on the stream, or ordered before it, when the next call is made. A call may follow another at once, without a barrier of
the caller's and with no other exchange between them. Why nobody overwrites what is still read, generation g being the number of a call:

1. Rank r's kernel of call g stores into buffer g mod 2 of every peer p. Before it on r's stream is the meeting that ended call g − 1,
   which acquired p's `done` of that call. p's stream published that after all that it held before p's call g − 1, so after every reading
   of the output of call g − 2, the last one in that buffer. What p may still be reading is the output of call g − 1, in the other buffer.
2. Nobody gets further ahead: r's call g + 1, which stores there, has to acquire p's `done` of call g first, which p publishes after its
   readings of the output of call g − 1.
3. The argument needs the call before to have been call g − 1 of all ranks. With one buffer, and in the first call of a CUDA graph (which
   may be replayed after anything), a `Meeting(ENTERED)` goes before the stores: p has come to call g, and so has read everything older.
4. Complete: all stores of r's kernel happen before r's `Meeting(DONE)`, whose `st.release.sys` orders them; whoever has acquired that
   `done` of every rank sees every row, and so do the kernels that follow on its stream.
5. Two parts: both, with their meetings, are on the caller's stream, one after the other, so 1 to 4 hold for each: what precedes the first
   part precedes the second. The parts store to different heads of one buffer, so the second overwrites nothing of the first. What reads
   the first part on another stream, from behind its meeting, must be joined to the caller's stream before the next call. q, k and v are
   read on the caller's stream only. A call takes one generation or two, on all ranks alike: the part sizes are agreed like the shapes.

That fused attention, and its own meeting, comes between two exchanges of a transformer is not needed. Waits are bounded; a wait that gives
up makes its rank's kernels store nothing more, and the next call or `check()` raises. Copies cannot be withheld: those that were queued
behind such a wait, as in a graph, still store. CUDA graphs: call once with the same shapes before capture.

Not covered: gradients, exchanging one of the three ahead of the others, more than two parts, ranks on several hosts.
"""

from __future__ import annotations

import itertools
import json
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from xstage.attention import serial
from xstage.attention.arguments import check_options
from xstage.attention.entry import Entry
from xstage.attention.layout import SequenceLayout, head_parts, head_shards, head_table
from xstage.attention.overlap import REST_CTAS
from xstage.attention.reference import rows_of
from xstage.errors import UnsuitableMachine, XStageError
from xstage.platform import KiB
from xstage.symmetric import Agreement, SymmetricBuffer, Watch, allocate_together, default_device, first_reason, joined, next_number

_SIGNAL_BYTES = 4 * KiB
_PHASES = ("entered", "done")  # names of `heads_sm90`'s kinds of meetings
_NAMES = ("q", "k", "v")

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Call:
    """The problem of a call, as every rank must see it."""

    batch: int
    layout: SequenceLayout
    first: int = 0  # key/value heads of the first part, at most; 0: one part

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch, "rows per rank": list(self.layout.local_rows), "layout": self.layout.flat, "first heads": self.first,
        }  # fmt: skip


@dataclass
class _Part:
    """Which heads are sent together: q, k and v of `counts` heads over all ranks."""

    parts: list[tuple[int, int]]  # key/value heads from … to, of each rank: what this rank sends
    counts: tuple[int, int, int]
    heads: list[torch.Tensor]  # per buffer int64 [heads of q, of k, of v, 2]: see `layout.head_table`


@dataclass
class _Plan:
    """What a call needs on the device, made on its first use; `calls` and `outs` per buffer."""

    places: torch.Tensor  # int32 [my rows]: in the whole sequence
    parts: list[_Part]
    calls: list[torch.Tensor]  # see `device.meeting`
    outs: list[Three]


class HeadExchange:
    """Owns the buffers that q, k and v of [batch, whole sequence, my heads, head dim] arrive in.

    Args:
        group: process group (None: the default one).
        max_sequence: most rows of the whole sequence.
        heads, kv_heads: over all ranks, of q, and of k and v (None: as many).
        head_dim, dtype: the kernel takes any whose product is a multiple of 16 bytes.
        heads_per_rank: query heads of each rank (None: even, see `layout.head_shards`).
        max_batch: most sequences in a call.
        device: None: the current CUDA device if the group has a GPU back end, else the CPU.
        buffers: 2; or 1, half the memory, and the ranks meet before every call as well.
        timeout_s: bound of every wait on a peer, in the kernel and on the host.
        fallback: `serial`: where the kernel cannot run, warn once and exchange otherwise; `error`: refuse.

    Attributes:
        mode: `kernel`, `push`, `nccl` or `reference`. reason: why not `kernel`, on GPUs.

    Raises:
        XStageError: bad arguments, or arguments that differ between ranks.
        UnsuitableMachine: with `fallback="error"`, naming the first rank that cannot run the kernel, and why.
        PeerTimeout: a rank did not make its object.
    """

    own_ahead = True  # for measurement; False: rows of own heads are sent as those of peers

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, max_sequence: int, heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16,
        kv_heads: int | None = None, heads_per_rank: Sequence[int] | None = None, max_batch: int = 1,
        device: torch.device | str | None = None, buffers: int = 2, timeout_s: float = 30.0, fallback: str = "serial",
    ):  # fmt: skip
        group = joined(group)
        self.group, self.rank, self.world = group, group.rank(), group.size()
        check_options(fallback, timeout_s, max_sequence=max_sequence, max_batch=max_batch, head_dim=head_dim, buffers=buffers)
        self.max_sequence, self.max_batch, self.head_dim, self.dtype = max_sequence, max_batch, head_dim, dtype
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.heads_per_rank, self.kv_heads_per_rank = head_shards(heads, self.kv_heads, self.world, heads_per_rank)
        self.device, self.buffers, self.timeout_s = default_device(device, group), buffers, timeout_s
        self._counts = (self.heads_per_rank, self.kv_heads_per_rank, self.kv_heads_per_rank)  # of q, k, v
        self._head_bytes = head_dim * dtype.itemsize
        self._turn, self._closed, self.reason, self._entry = 0, False, "", Entry()
        self._plans: dict[tuple[_Call, bool], _Plan] = {}
        self._agreed: set[_Call] = set()
        self._buffer: SymmetricBuffer | None = None
        self._urgent: torch.cuda.Stream | None = None
        self.tag = f"head-exchange/{group.group_name}/{next_number(group, 'head-exchange')}"
        self._agreement = Agreement(group, self.tag, timeout_s)
        self._agreement.same(
            "HeadExchange", {"max_sequence": max_sequence, "heads": list(self.heads_per_rank), "kv_heads": list(self.kv_heads_per_rank),
                             "head_dim": head_dim, "dtype": str(dtype), "max_batch": max_batch, "buffers": buffers,
                             "device": self.device.type, "fallback": fallback},
        )  # fmt: skip
        self.mode = self._choose_mode(fallback)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout | None = None) -> Three:
        """All rows of my heads.

        Args:
            q: [batch, my rows, all query heads, head dim]. k, v: [batch, my rows, all key/value heads, head dim]. Any strides; what is not
                laid out in 16-byte pieces of one head each is copied first.
            layout: which rank owns which rows (None: contiguous shards, every rank has as many rows as this one).

        Returns:
            q, k, v [batch, whole sequence, my heads, head dim], contiguous; views that are valid until this rank's next call.

        Raises:
            XStageError: an argument does not fit the object, or the ranks were given different problems.
            PeerTimeout: a peer did not come to this call's agreement, or to an earlier call's kernel.
        """
        return self.in_parts(q, k, v, layout, 0)[0]

    def in_parts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout | None, first: int, rest_ctas: int = REST_CTAS
    ) -> tuple[Three, Callable[[], None]]:
        """The first heads of every rank, and what launches the exchange of the rest.

        Args:
            q, k, v, layout: see the object's call.
            first: key/value heads of every rank that are sent now, with their query heads (0: all), and rows of this rank that stay. Other
                modes than `kernel` send all.
            rest_ctas: how the rest is sent: by so many CTAs, one to an SM, or (0) by the copy engines.

        Returns:
            q, k, v as the object's call returns them, and a function: it sends the rest on the current stream, which must be the one of
            this call, before any other call. It does nothing where nothing is left.

        Raises:
            As the object's call.
        """
        layout = alike(q.shape[1], self.world) if layout is None else layout
        self.check_arguments(q, k, v, layout)
        if self.mode == "kernel":
            self._watch.check()
        call = _Call(q.shape[0], layout, first if self.mode == "kernel" else 0)
        if call not in self._agreed:
            self._agreement.same("rows", call.to_json())
            self._agreed.add(call)
        if self.mode not in ("kernel", "push"):
            return self._all_to_all(q, k, v, layout), _nothing
        turn = self._turn % self.buffers
        self._turn += 1
        with torch.cuda.device(self.device):
            if self.mode == "push":
                self._push(q, k, v, call, turn)
                return self._views(call, turn), _nothing
            key = (call, self.own_ahead)
            plan = self._plans.get(key)
            if plan is None:
                if torch.cuda.is_current_stream_capturing():
                    raise XStageError("q: call it once with these shapes before capturing a CUDA graph")
                plan = self._plans[key] = self._plan(call)
                # Tables were written on the current stream; a call on another stream must not read them before.
                torch.cuda.synchronize(self.device)
            met = self._entry.must_meet(always=self.buffers == 1)
            x = (aligned(q.detach()), aligned(k.detach()), aligned(v.detach()))
            for kernel, arguments in self._launches(*x, layout.sequence, plan, turn, met):
                kernel(*arguments)
        rest = _nothing if len(plan.parts) == 1 else partial(self._rest, x, call, plan, turn, rest_ctas)
        return plan.outs[turn], rest

    def check(self) -> None:
        """Wait for what was launched and raise if a kernel gave up on a peer.

        Raises:
            PeerTimeout: naming rank, phase and tag.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._buffer is not None:
            self._watch.check()

    def close(self) -> None:
        """Wait for this rank's kernels and free the buffers. Results become invalid. Every rank should close."""
        if self._closed:
            return
        self._closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._plans.clear()
        if self._buffer is not None:
            self._buffer.free()

    def __enter__(self) -> HeadExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose_mode(self, fallback: str) -> str:
        if self.device.type == "cpu":
            return "reference"
        reasons = self._agreement.reach("ability", _why_no_kernel(self.device, self._head_bytes, self.world))
        size = _SIGNAL_BYTES + self.buffers * sum(self._sizes)
        self._buffer, failures = allocate_together(size, self.group, self.device, self._agreement)
        if self._buffer is not None:
            self._control = torch.zeros(2, dtype=torch.int64, device=self.device)
            self._watch = Watch(self.group, self.tag, self.timeout_s, _PHASES)
            self._signals = self._buffer.view(0, (2 * self.world,), torch.int64)
        reasons = [reason or failure for reason, failure in zip(reasons, failures, strict=True)]
        self.reason = first_reason(self.group, reasons)
        if not self.reason:
            return "kernel"
        if fallback == "error":
            raise UnsuitableMachine(f"the exchange to heads cannot run as one kernel ({self.reason})")
        mode = "push" if self._buffer is not None else "nccl"
        words = {"push": "strided copies", "nccl": "three NCCL all-to-alls"}
        warnings.warn(f"the exchange to heads runs as {words[mode]}: {self.reason}", RuntimeWarning, stacklevel=4)
        return mode

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Bytes that q, k and v take in a buffer: the same on every rank, as those with most heads need it."""
        rows = self.max_batch * self.max_sequence * self._head_bytes
        return tuple(-(-rows * max(counts) // 256) * 256 for counts in self._counts)

    def _starts(self, turn: int) -> list[int]:
        """Where q, k and v begin in buffer `turn`, in bytes from the beginning of a rank's memory."""
        start = _SIGNAL_BYTES + turn * sum(self._sizes)
        return [start + sum(self._sizes[:i]) for i in range(3)]

    def _views(self, call: _Call, turn: int, rank: int | None = None) -> Three:
        """What buffer `turn` holds on this rank, or on `rank`."""
        assert self._buffer is not None
        buffer, at = self._buffer, self.rank if rank is None else rank
        shape = (call.batch, call.layout.sequence)
        q, k, v = (
            buffer.view(start, (*shape, counts[at], self.head_dim), self.dtype, rank)
            for start, counts in zip(self._starts(turn), self._counts, strict=True)
        )
        return q, k, v

    def _plan(self, call: _Call) -> _Plan:
        assert self._buffer is not None
        plan = _Plan(rows_of(call.layout, self.rank).int().to(self.device), [], [], [])
        for parts in head_parts(self.kv_heads_per_rank, call.first, self.rank if self.own_ahead else None):
            kv_heads = sum(end - begin for begin, end in parts)
            plan.parts.append(_Part(parts, (kv_heads * self._group_heads, kv_heads, kv_heads), []))
        for turn in range(self.buffers):
            for part in plan.parts:
                tables = [
                    torch.from_numpy(head_table([address + start for address in self._buffer.addresses], counts, self._head_bytes, ranges))
                    for start, counts, ranges in zip(self._starts(turn), self._counts, self._ranges(part), strict=True)
                ]
                part.heads.append(torch.cat(tables).to(self.device))
            signature = zlib.crc32(json.dumps([call.to_json(), turn], sort_keys=True).encode()) & 0x7FFFFFFF
            words = [signature, self.rank, int(self.timeout_s * 1e9), self._watch.address, *self._buffer.addresses]
            plan.calls.append(torch.tensor(words, dtype=torch.int64, device=self.device))
            plan.outs.append(self._views(call, turn))
        return plan

    @property
    def _group_heads(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    def _ranges(self, part: _Part) -> tuple[list[tuple[int, int]], ...]:
        """Heads from … to, of each rank, of q, of k and of v."""
        n = self._group_heads
        return [(n * begin, n * end) for begin, end in part.parts], part.parts, part.parts

    def _launches(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequence: int, plan: _Plan, turn: int, met: bool, number: int = 0,
        ctas: int = 0,
    ) -> list[tuple[Any, tuple[Any, ...]]]:  # fmt: skip
        """Kernels of part `number` and their arguments, in order; `ctas` large CTAs, or (0) as many as there is work for."""
        from xstage.attention.heads_sm90 import DONE, ENTERED, compiled_to_heads
        from xstage.device.meeting import compiled_meeting

        meeting, part = (self._control, plan.calls[turn], self._signals), plan.parts[number]
        strides = [x.stride(i) * x.element_size() for x in (q, k, v) for i in range(3)]
        copy = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), *strides, q.shape[0], q.shape[1], sequence, part.heads[turn].data_ptr(),
            plan.places.data_ptr(), ctas or 2**31 - 1, self._control,
        )  # fmt: skip
        before = [(compiled_meeting(self.world, ENTERED, False), meeting)] if met else []
        if sum(part.counts):  # else peers have no head left
            before.append((compiled_to_heads(*part.counts[:2], self._head_bytes, ctas > 0), copy))
        return [*before, (compiled_meeting(self.world, DONE, True, True), meeting)]

    def _rest(self, x: Three, call: _Call, plan: _Plan, turn: int, ctas: int) -> None:
        """Send the second part on the current stream."""
        with torch.cuda.device(self.device):
            if not ctas and all(side_by_side(t) for t in x):
                self._copy(x, call, turn, plan.parts[1])
                self._meet_urgently(plan.calls[turn])
                return
            for kernel, arguments in self._launches(*x, call.layout.sequence, plan, turn, False, 1, ctas or REST_CTAS):
                kernel(*arguments)

    def _copy(self, x: Three, call: _Call, turn: int, part: _Part) -> None:
        """A part of my rows into the buffers of all ranks, by the copy engines."""
        assert self._buffer is not None
        stream = torch.cuda.current_stream().cuda_stream
        for peer in ((self.rank + 1 + i) % self.world for i in range(self.world)):
            for t, start, counts, ranges in zip(x, self._starts(turn), self._counts, self._ranges(part), strict=True):
                begin, end = ranges[peer]
                pitch = counts[peer] * self._head_bytes
                for b, s in itertools.product(range(call.batch), (s for s in call.layout.segments if s.rank == self.rank)):
                    source = t[b, s.local_start :, sum(counts[:peer]) + begin :]
                    row = b * call.layout.sequence + s.start
                    to = self._buffer.addresses[peer] + start + row * pitch + begin * self._head_bytes
                    step = t.stride(1) * t.element_size()
                    serial.copy_rows(to, pitch, source.data_ptr(), step, (end - begin) * self._head_bytes, s.rows, stream)

    def _meet_urgently(self, words: torch.Tensor) -> None:
        """`Meeting(DONE)` behind copies. On a full GPU it needs the next place that gets free, so it is on a stream of high priority."""
        from xstage.attention.heads_sm90 import DONE
        from xstage.device.meeting import compiled_meeting

        if self._urgent is None:
            self._urgent = torch.cuda.Stream(self.device, priority=-1)
        current = torch.cuda.current_stream()
        self._urgent.wait_stream(current)
        with torch.cuda.stream(self._urgent):
            compiled_meeting(self.world, DONE, True, False)(self._control, words, self._signals)
        current.wait_stream(self._urgent)

    def _push(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, turn: int) -> None:
        """Each segment of my rows into the buffers of all ranks, by torch's copies."""
        assert self._buffer is not None
        self._buffer.barrier(0)
        for peer in ((self.rank + 1 + i) % self.world for i in range(self.world)):  # own rows last: they need no drain
            for x, target, counts in zip((q, k, v), self._views(call, turn, peer), self._counts, strict=True):
                first = sum(counts[:peer])
                for s in (s for s in call.layout.segments if s.rank == self.rank):
                    rows = x[:, s.local_start : s.local_start + s.rows, first : first + counts[peer]]
                    target[:, s.start : s.start + s.rows].copy_(rows)
        self._buffer.barrier(1)

    def _all_to_all(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout) -> Three:
        order = torch.cat([rows_of(layout, rank) for rank in range(self.world)])
        back = None if torch.equal(order, torch.arange(len(order))) else order.argsort().to(self.device)
        got = [serial.to_heads(x, layout.local_rows, n, self.group) for x, n in zip((q, k, v), self._counts, strict=True)]
        a, b, c = (x if back is None else x.index_select(1, back) for x in got)
        return a, b, c

    def check_arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout) -> None:
        """Refuse what `in_parts` would refuse, and send nothing."""
        if self._closed:
            raise XStageError("q: this exchange was closed")
        if layout.world != self.world:
            raise XStageError(f"layout: {layout.world} ranks; the group has {self.world}")
        rows = layout.local_rows[self.rank]
        for name, x, count in zip(_NAMES, (q, k, v), (self.heads, self.kv_heads, self.kv_heads), strict=True):
            if x.dim() != 4 or tuple(x.shape) != (q.shape[0], rows, count, self.head_dim):
                raise XStageError(f"{name}: shape {tuple(x.shape)} is not [batch, {rows}, {count}, {self.head_dim}]")
            if x.dtype != self.dtype or x.device != self.device:
                raise XStageError(f"{name}: {x.dtype} on {x.device}; this object takes {self.dtype} on {self.device}")
            if torch.is_grad_enabled() and x.requires_grad:
                raise XStageError(f"{name}: requires a gradient; there is no backward (use torch.no_grad())")
        if not 1 <= q.shape[0] <= self.max_batch:
            raise XStageError(f"q: batch {q.shape[0]} is not in 1 … max_batch = {self.max_batch}")
        if layout.sequence > self.max_sequence:
            raise XStageError(f"layout: sequence {layout.sequence} is longer than max_sequence = {self.max_sequence}")


@lru_cache(maxsize=64)
def alike(rows: int, world: int) -> SequenceLayout:
    """Contiguous shards of `rows` rows each."""
    return SequenceLayout.shards([rows] * world)


def _why_no_kernel(device: torch.device, head_bytes: int, world: int) -> str:
    """Empty if this rank can run the kernel, else the reason."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU (sm_90)"
    if head_bytes % 16:
        return f"head_dim: a head has {head_bytes} bytes, not a multiple of 16"
    if world > 32:
        return f"{world} ranks; the limit is 32"
    try:
        from xstage.attention import heads_sm90  # noqa: F401
    except ImportError as error:
        return f"the kernel packages are not installed ({error})"
    return ""


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy that can be read in 16-byte pieces: last dimension contiguous, 16-byte rows."""
    step = 16 // x.element_size()
    if x.stride(-1) != 1 or any(s % step for s in x.stride()[:-1]) or x.data_ptr() % 16:
        return torch.clone(x, memory_format=torch.contiguous_format)
    return x


def side_by_side(x: torch.Tensor) -> bool:
    """Whether the heads of a row lie one behind the other, and the rows apart: what a strided copy can read."""
    return bool((x.shape[2] == 1 or x.stride(2) == x.shape[3]) and x.stride(1) >= x.shape[2] * x.shape[3])


def _nothing() -> None:
    pass
