"""The exchange before Ulysses attention: where every piece goes; the kernel compiles for sm_90a and holds what was designed; on emulated
ranks its PTX moves every byte and overwrites nothing that is still read; the same results over gloo.

Kernels run here as `HeadExchange` launches them, several calls in a row, with a slow reader behind each; an exchange whose ranks do not
meet must fail the same test. Not covered: the order of memory and time (tests/gpu/test_head_exchange.py).
"""

from __future__ import annotations

import ctypes
import random
import re
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import machine_code
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from emulated_launch import Array, addresses, emulated
from emulated_memory import POISON, Memory
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_code import needs_compiler
from ptx_interpreter import Grid, run

from xstage.attention import heads as he
from xstage.attention import layout as lay
from xstage.attention import reference
from xstage.attention.layout import SequenceLayout
from xstage.attention.op import AttentionA2A
from xstage.errors import XStageError

PATIENT_NS, IMPATIENT_NS = 10**12, 50_000


# ---- addresses


@st.composite
def shards(draw: st.DrawFn) -> tuple[SequenceLayout, list[int]]:
    world = draw(st.integers(1, 5))
    some = st.lists(st.integers(0, 9), min_size=world, max_size=world).filter(lambda s: sum(s) > 0)
    rows = draw(some)
    text = draw(st.one_of(st.none(), some))
    if text is None:
        return SequenceLayout.shards(rows), draw(some)
    return SequenceLayout.with_text(rows, text, draw(st.sampled_from(["before", "after"]))), draw(some)


@given(shards(), st.integers(1, 3))
@settings(deadline=None)
def test_every_row_of_every_head_has_its_place(given_: tuple[SequenceLayout, list[int]], batch: int) -> None:
    """Stores by the tables against torch: a memory of numbers, 16 to a head's row."""
    layout, heads = given_
    head_bytes, size = 16, batch * layout.sequence * max(heads) * 16
    bases = [64 + rank * (size + 32) for rank in range(layout.world)]
    memory = np.full(bases[-1] + size + 64, -1)
    table = lay.head_table(bases, heads, head_bytes)
    whole = torch.arange(batch * layout.sequence * sum(heads)).view(batch, layout.sequence, sum(heads))
    for rank in range(layout.world):
        places = reference.rows_of(layout, rank)
        for b in range(batch):
            for place in places.tolist():
                at = table[:, 0] + (b * layout.sequence + place) * (table[:, 1] & 0xFFFFFFFF)
                assert (memory[at] == -1).all()
                memory[at] = whole[b, place]
    for rank, part in enumerate(whole.split(heads, 2)):
        got = memory[bases[rank] : bases[rank] + part.numel() * head_bytes : head_bytes]
        assert torch.equal(torch.from_numpy(got).view(part.shape), part)
    assert (memory != -1).sum() == whole.numel()
    assert (table[:, 1] >> 32).tolist() == list(range(sum(heads)))


@given(shards(), st.integers(0, 10))
@settings(deadline=None)
def test_parts_are_all_heads_once(given_: tuple[SequenceLayout, list[int]], first: int) -> None:
    _, heads = given_
    bases = [2**40 + rank * 2**20 for rank in range(len(heads))]
    parts = lay.head_parts(heads, first)
    tables = [lay.head_table(bases, heads, 48, ranges) for ranges in parts]
    whole = lay.head_table(bases, heads, 48)
    order = np.concatenate([table[:, 1] >> 32 for table in tables])
    assert np.array_equal(np.concatenate(tables)[order.argsort()], whole)
    assert all((np.diff(table[:, 1] >> 32) > 0).all() for table in tables)
    sent = [[lay.head_table(bases, heads, 48, ranges) for ranges in lay.head_parts(heads, first, me)] for me in range(len(heads))]
    for me, own in enumerate(sent):  # the same, but for own heads, of which nothing is left
        order = np.concatenate([table[:, 1] >> 32 for table in own])
        assert np.array_equal(np.concatenate(own)[order.argsort()], whole)
        mine = range(sum(heads[:me]), sum(heads[: me + 1]))
        assert len(own) == len(parts)
        for early, late in zip(tables[1:], own[1:], strict=True):
            assert [n for n in (early[:, 1] >> 32).tolist() if n not in mine] == (late[:, 1] >> 32).tolist()
    if 0 < first < max(heads):
        assert [len(table) for table in tables] == [sum(min(first, n) for n in heads), sum(max(0, n - first) for n in heads)]
    else:
        assert len(parts) == 1


def test_parts_by_hand() -> None:
    assert lay.head_parts([4, 2, 0], 3) == [[(0, 3), (0, 2), (0, 0)], [(3, 4), (2, 2), (0, 0)]]
    assert lay.head_parts([4, 2, 0], 3, sender=0) == [[(0, 4), (0, 2), (0, 0)], [(4, 4), (2, 2), (0, 0)]]
    assert lay.head_parts([4, 2, 0], 3, sender=1)[1] == [(3, 4), (2, 2), (0, 0)]
    assert lay.head_parts([4, 2], 0) == lay.head_parts([4, 2], 4) == [[(0, 4), (0, 2)]]
    rest = [(2 * a, 2 * b) for a, b in lay.head_parts([4, 2, 0], 3)[1]]
    assert lay.head_table([0, 1000, 2000], [8, 4, 0], 16, rest).tolist() == [[96, 128 | 6 << 32], [112, 128 | 7 << 32]]


def test_sent_bytes_by_hand() -> None:
    layout = SequenceLayout.shards([3, 5])
    assert lay.sent_bytes(layout, 0, (4, 2), (2, 1), 256) == 3 * (2 + 2 * 1) * 256
    assert lay.sent_bytes(layout, 1, (4, 2), (2, 1), 256, batch=2) == 2 * 5 * (4 + 2 * 2) * 256


# ---- machine code


@needs_compiler
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_bytes"), [(24, 24, 256), (40, 40, 256), (7, 7, 48), (8, 2, 128)])
def test_all_pieces_are_loaded_then_stored_by_16_bytes(heads: int, kv_heads: int, head_bytes: int, wide: bool) -> None:
    from xstage.attention.heads_sm90 import FLIGHT, compiled_to_heads

    code = machine_code.of(compiled_to_heads(heads, kv_heads, head_bytes, wide))
    ptx, sass = code["ptx"], code["sass"]
    assert ".target sm_90a" in ptx
    assert not re.search(r"\.local|ld\.global\.nc", ptx)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert max(int(r) for r in re.findall(r"\bR(\d+)\b", sass)) < (72 if wide else 64)  # one CTA on an SM and room for a meeting; four
    assert f".reqntid {768 if wide else 256}, 1, 1" in ptx
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == len(re.findall(r"STG\.E\.128", sass)) == FLIGHT
    assert len(re.findall(r"\bst\.", ptx)) == FLIGHT
    pieces = [m.start() for m in re.finditer(r"LDG\.E\.NA\.128", sass)]
    assert len(pieces) == FLIGHT
    assert max(pieces) < sass.index("STG.E.128")
    # Only the meetings order memory: a release would wait for remote stores that are under way.
    assert not re.search(r"\.release\.|\.acquire\.|\.sys\b|\b(fence|membar|atom|red)\.", ptx)
    assert "griddepcontrol.launch_dependents" in ptx


# ---- emulated ranks


@dataclass(frozen=True)
class Case:
    """rows: of each rank. heads: of each rank. ratio: query heads per key/value head. strides: how q, k and v lie in memory.
    first: key/value heads of the first part. ctas: that send the rest.
    """

    rows: tuple[int, ...]
    heads: tuple[int, ...]
    head_dim: int
    ratio: int = 1
    batch: int = 1
    strides: str = "packed"
    text: tuple[int, ...] = ()
    buffers: int = 2
    first: int = 0
    ctas: int = 2

    @property
    def layout(self) -> SequenceLayout:
        return SequenceLayout.with_text(self.rows, self.text) if self.text else SequenceLayout.shards(self.rows)

    def __str__(self) -> str:
        sizes = ["x".join(map(str, part)) for part in (self.rows, self.heads, self.text) if part]
        return f"{'-'.join(sizes)}-{self.head_dim}-{self.strides}-{self.batch}x{self.ratio}-{self.buffers}-{self.first}by{self.ctas}"


class Machine:
    """All ranks, and the memory that all of them reach."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch, timeout_ns: int = PATIENT_NS):
        from xstage.attention import heads_sm90
        from xstage.device import meeting

        self.case, self.memory, self.timeout_ns, self._seed = case, Memory(32 << 20), timeout_ns, 0
        for module, name in ((heads_sm90, "compiled_to_heads"), (meeting, "compiled_meeting")):
            monkeypatch.setattr(module, name, emulated(getattr(module, name)))
        world = len(case.rows)
        self.exchanges = [self.exchange(rank) for rank in range(world)]
        size = he._SIGNAL_BYTES + case.buffers * sum(self.exchanges[0]._sizes)
        self.buffers, self.size = [self.memory.allocate(size) for _ in range(world)], size
        for exchange, buffer in zip(self.exchanges, self.buffers, strict=True):
            self.memory.put(torch.zeros(2 * world, dtype=torch.int64), buffer)
            exchange._buffer = SimpleNamespace(addresses=self.buffers, view=self.view)  # type: ignore[assignment]
            exchange._signals = Array(self.memory, (2 * world,), torch.int64, buffer)
        self.call = he._Call(case.batch, case.layout, case.first)
        self.plans = [self.plan(exchange) for exchange in self.exchanges]

    def exchange(self, rank: int) -> he.HeadExchange:
        case, made = self.case, object.__new__(he.HeadExchange)
        made.rank, made.world, made.device, made.timeout_s = rank, len(case.rows), torch.device("cpu"), self.timeout_ns / 1e9
        made.heads_per_rank, made.kv_heads_per_rank = case.heads, tuple(n // case.ratio for n in case.heads)
        made.heads, made.kv_heads = sum(made.heads_per_rank), sum(made.kv_heads_per_rank)
        made._counts = (made.heads_per_rank, made.kv_heads_per_rank, made.kv_heads_per_rank)
        made.head_dim, made.dtype, made._head_bytes = case.head_dim, torch.bfloat16, 2 * case.head_dim
        made.max_batch, made.max_sequence, made.buffers = case.batch, case.layout.sequence + 3, case.buffers
        made._control = Array.of(self.memory, torch.zeros(2, dtype=torch.int64))
        status = Array.of(self.memory, torch.zeros(1, dtype=torch.int64))
        made._watch = SimpleNamespace(address=status.address, status=status)  # type: ignore[assignment]
        return made

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype, rank: int | None) -> Any:
        return start, shape, dtype

    def plan(self, exchange: he.HeadExchange) -> he._Plan:
        plan: Any = exchange._plan(self.call)
        plan.places = Array.of(self.memory, plan.places)
        plan.calls = [Array.of(self.memory, x) for x in plan.calls]
        for part in plan.parts:
            part.heads = [Array.of(self.memory, x) for x in part.heads]
        return plan  # type: ignore[no-any-return]

    def draw(self, generator: torch.Generator) -> list[torch.Tensor]:
        """q, k and v of the whole sequence, all heads."""
        e, case = self.exchanges[0], self.case
        shape = (case.batch, case.layout.sequence)
        return [torch.randn(*shape, n, case.head_dim, generator=generator).bfloat16() for n in (e.heads, e.kv_heads, e.kv_heads)]

    def given(self, whole: list[torch.Tensor], rank: int) -> list[Array]:
        """The rank's rows, laid out as the case has it."""
        mine = [x[:, reference.rows_of(self.case.layout, rank)] for x in whole]
        if self.case.strides == "packed":  # of one projection
            packed = torch.cat([x.flatten(2) for x in mine], 2)
            storage = self.memory.put(packed) if packed.numel() else self.memory.allocate(16)
            parts = packed.split([x.shape[2] * x.shape[3] for x in mine], 2)
            return [Array.view(self.memory, p.unflatten(2, x.shape[2:]), storage) for p, x in zip(parts, mine, strict=True)]
        arrays = []
        for i, x in enumerate(mine):  # heads before rows, or rows before sequences; of the three, each otherwise
            order = ((0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 2, 3))[i]
            stored = x.permute(order).contiguous()
            storage = self.memory.put(stored) if stored.numel() else self.memory.allocate(16)
            arrays.append(Array.view(self.memory, stored.permute([order.index(d) for d in range(4)]), storage))
        return arrays

    def launch(self, rank: int, whole: list[torch.Tensor], number: int, met: bool, between: Any = None) -> list[Any]:
        """Grids of a call, as the kernels' `__call__` have them; `between` its parts."""
        exchange, turn, case = self.exchanges[rank], number % self.case.buffers, self.case
        q, k, v = self.given(whole, rank)
        grids, plan = [], self.plans[rank]
        for number, part in enumerate(plan.parts):
            columns = sum(-(-n * 2 * case.head_dim // 512) for n in part.counts)
            warps, bound = (24, case.ctas) if number else (8, 0)
            ctas = max(-(-case.batch * -(-q.shape[1] // 8) * columns // warps), 1)
            launches = exchange._launches(q, k, v, case.layout.sequence, plan, turn, met and not number, number, bound)  # type: ignore[arg-type]
            for kernel, arguments in (f(*a) for f, a in launches):
                self._seed += 1
                grid = 1
                if len(arguments) > 3:  # the bound of the grid is no argument of the kernel
                    *arguments, bound, control = arguments
                    arguments, grid = (*arguments, control), min(ctas, bound)
                grids.append(Grid(kernel, grid, addresses(arguments), self.memory, seed=self._seed))
            if between is not None and number + 1 < len(plan.parts):
                grids.append(between)
        return grids

    def got(self, rank: int, number: int) -> list[torch.Tensor]:
        outs = self.plans[rank].outs[number % self.case.buffers]
        return [self.memory.get(self.buffers[rank] + start, shape, dtype) for start, shape, dtype in outs]  # type: ignore[misc]

    def want(self, whole: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        return [x.split(list(n), 2)[rank] for x, n in zip(whole, self.exchanges[rank]._counts, strict=True)]

    def untouched(self, rank: int) -> torch.Tensor:
        """Of a rank's memory, the bytes that hold neither signals nor a result."""
        raw = self.memory.get(self.buffers[rank], (self.size,), torch.uint8)
        free = torch.ones(self.size, dtype=torch.bool)
        free[: 16 * len(self.buffers)] = False
        for outs in self.plans[rank].outs:
            for start, shape, dtype in outs:  # type: ignore[misc]
                free[start : start + torch.Size(shape).numel() * dtype.itemsize] = False
        return raw[free]


class Reader:
    """Stands on a stream behind a call, or behind its first part, and reads what it brought some time later, twice; `wrong` gets a word if
    it is not that.
    """

    def __init__(self, machine: Machine, rank: int, whole: list[torch.Tensor], number: int, wrong: list[str], first: bool = False):
        self._machine, self._rank, self._whole, self._number, self._wrong = machine, rank, whole, number, wrong
        case = machine.case
        ends = [case.first * case.ratio, case.first, case.first] if first else [None] * 3
        self._heads = [slice(end) for end in ends]
        self._left = random.Random(number * 10 + rank).choice([1, 3, 200])

    def step(self) -> bool:
        self._left -= 1
        if self._left in (0, 1):
            got = self._machine.got(self._rank, self._number)
            want = self._machine.want(self._whole, self._rank)
            if not all(torch.equal(a[:, :, h], b[:, :, h]) for a, b, h in zip(got, want, self._heads, strict=True)):
                self._wrong.append(f"call {self._number} on rank {self._rank}")
        return self._left > 0


def calls_in_a_row(machine: Machine, count: int, meets: Any, later: int = 0) -> list[str]:
    """`count` calls of every rank, a reader of each result behind the call that comes `later`; which did not find their results."""
    generator, wrong = torch.Generator().manual_seed(3), list[str]()
    streams: list[list[Any]] = [[] for _ in machine.exchanges]
    drawn: list[Any] = []
    for number in range(count):
        whole = machine.draw(generator)
        drawn.append(whole)
        for rank, stream in enumerate(streams):
            stream += machine.launch(rank, whole, number, meets(number), Reader(machine, rank, whole, number, wrong, first=True))
            if number >= later:
                stream.append(Reader(machine, rank, drawn[number - later], number - later, wrong))
    run(streams, seed=count)
    return wrong


CASES = [
    Case((9, 8), (2, 2), 128),
    Case((13, 7), (3, 2), 64, batch=2),
    Case((5, 20, 1), (2, 1, 1), 40, strides="mixed"),
    Case((10, 3, 6), (4, 4, 2), 16, ratio=2, batch=2, strides="mixed", text=(2, 0, 5)),
    Case((17, 0), (5, 4), 24, strides="mixed"),
    Case((8, 9), (2, 1), 128, buffers=1),
    Case((30, 25), (3, 3), 128, first=1, ctas=1),
    Case((13, 7), (3, 1), 64, batch=2, first=1, strides="mixed"),
    Case((10, 3, 6), (6, 2, 4), 16, ratio=2, batch=2, strides="mixed", text=(2, 0, 5), first=2, buffers=1),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_arrive_and_nothing_that_is_read_is_overwritten(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(case, monkeypatch)
    count = 4
    assert not calls_in_a_row(machine, count, lambda number: case.buffers == 1)
    for rank, exchange in enumerate(machine.exchanges):
        assert exchange._watch.status.value.tolist() == [0]  # type: ignore[attr-defined]
        assert exchange._control.value.tolist() == [count * len(machine.plans[rank].parts), 0]
        assert (machine.untouched(rank) == POISON).all()


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_go_where_the_kernel_stores(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts by copies, between tensors of this process."""

    def copy_rows(to: int, to_step: int, source: int, source_step: int, width: int, rows: int, _stream: int) -> None:
        for i in range(rows):
            ctypes.memmove(to + i * to_step, source + i * source_step, width)

    monkeypatch.setattr(he.serial, "copy_rows", copy_rows)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    machine = Machine(case, monkeypatch)
    buffers = [torch.full((machine.size,), 255, dtype=torch.uint8) for _ in case.rows]
    addresses = [buffer.data_ptr() for buffer in buffers]
    whole, turn = machine.draw(torch.Generator().manual_seed(8)), case.buffers - 1
    for rank, exchange in enumerate(machine.exchanges):
        exchange._buffer = SimpleNamespace(addresses=addresses)  # type: ignore[assignment]
        mine = [x[:, reference.rows_of(case.layout, rank)] for x in whole]
        packed = torch.cat([x.flatten(2) for x in mine], 2).split([x.shape[2] * x.shape[3] for x in mine], 2)
        q, k, v = (p.unflatten(2, x.shape[2:]) for p, x in zip(packed, mine, strict=True))
        assert all(he.side_by_side(x) for x in (q, k, v))
        for part in machine.plans[rank].parts:
            exchange._copy((q, k, v), machine.call, turn, part)
    for rank, buffer in enumerate(buffers):
        for (start, shape, dtype), want in zip(machine.plans[rank].outs[turn], machine.want(whole, rank), strict=True):  # type: ignore[misc]
            part = buffer[start : start + want.numel() * 2]
            assert torch.equal(part.view(dtype).view(shape), want)
            part.fill_(255)
        assert (buffer == 255).all()  # nothing else was written


def test_heads_side_by_side() -> None:
    x = torch.empty(1, 6, 3, 8)
    assert he.side_by_side(x)
    assert he.side_by_side(x[:, ::2])
    assert not he.side_by_side(x.transpose(1, 2).contiguous().transpose(1, 2))
    assert not he.side_by_side(x[:, :1].expand(1, 6, 3, 8))


@needs_compiler
def test_without_a_meeting_a_single_buffer_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test before would prove nothing."""
    machine = Machine(Case((8, 9), (2, 1), 128, buffers=1), monkeypatch)
    assert calls_in_a_row(machine, 6, lambda number: False)


@needs_compiler
@pytest.mark.parametrize("buffers", [2, 3])
def test_how_long_a_result_may_be_read(buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two buffers until the next call; a third one adds a call."""
    machine = Machine(Case((8, 9), (2, 1), 128, buffers=buffers), monkeypatch)
    assert bool(calls_in_a_row(machine, 8, lambda number: False, later=1)) == (buffers == 2)


@needs_compiler
@pytest.mark.parametrize("met", [False, True])
def test_a_peer_that_does_not_come(met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from xstage.attention.heads_sm90 import DONE, ENTERED
    from xstage.device.signals import PEER_GAVE_UP, TIMED_OUT

    machine = Machine(Case((9, 8), (2, 2), 64), monkeypatch, IMPATIENT_NS)
    whole = machine.draw(torch.Generator().manual_seed(0))
    here, peer = machine.exchanges
    run([machine.launch(0, whole, 0, met)])
    status = 1 << 32 | TIMED_OUT << 16 | 1 << 8 | (ENTERED if met else DONE) + 1
    assert here._watch.status.value.tolist() == [status]  # type: ignore[attr-defined]
    stored = any((x.view(torch.uint8) != POISON).any() for rank in range(2) for x in machine.got(rank, 0))
    assert stored != met  # where the ranks met before, nothing is
    if met:  # a launch that was queued behind it, as replays of a graph are: its words are of a later call
        run([machine.launch(0, whole, 1, False)])
    # A peer that comes late hears that it gave up, where rows are missing.
    run([machine.launch(1, whole, 0, met)])
    said = peer._watch.status.value.tolist()  # type: ignore[attr-defined]
    assert said == ([1 << 32 | PEER_GAVE_UP << 16 | 0 << 8 | DONE + 1] if met else [0])
    if not met:
        run([machine.launch(0, whole, 1, False)])
    # No later call stores anything.
    assert all((x.view(torch.uint8) == POISON).all() for rank in range(2) for x in machine.got(rank, 1))


@needs_compiler
@pytest.mark.parametrize("buffers", [1, 2])
def test_which_kernels_a_call_launches(buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from xstage.attention import entry, heads_sm90
    from xstage.device import meeting

    machine = Machine(Case((4, 4), (2, 2), 16, buffers=buffers), monkeypatch)
    to_heads, launched = machine.exchanges[0], list[str]()
    graph = 0

    def log(name: str) -> Any:
        return lambda *_: launched.append(name)

    monkeypatch.setattr(heads_sm90, "compiled_to_heads", lambda *_: log("copy"))
    monkeypatch.setattr(meeting, "compiled_meeting", lambda _, kind, last, ahead=False: log(f"{('entered', 'done')[kind]} {last} {ahead}"))
    monkeypatch.setattr(entry, "_capture_id", lambda: graph)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graph != 0)
    to_heads.mode, to_heads._closed, to_heads._turn, to_heads._entry = "kernel", False, 0, entry.Entry()
    to_heads._plans, to_heads._agreed = {}, {machine.call, he._Call(1, machine.case.layout, 1)}
    to_heads._watch.check = lambda: None  # type: ignore[method-assign]
    x = [torch.zeros(1, 4, 4, 16, dtype=torch.bfloat16) for _ in range(3)]

    def call() -> tuple[bool, int]:
        """Whether the ranks met before, and which buffer was written."""
        launched.clear()
        q, _, _ = to_heads(*x)
        assert launched[-2:] == ["copy", "done True True"]
        assert launched[:-2] in ([], ["entered False False"])
        start: Any = q[0]
        return len(launched) == 3, [to_heads._starts(turn)[0] for turn in range(buffers)].index(start)

    one = buffers == 1
    assert [call() for _ in range(3)] == [(one, 0), (one, 1 % buffers), (one, 0)]
    graph = 7
    assert [call() for _ in range(3)] == [(True, 1 % buffers), (one, 0), (one, 1 % buffers)]
    graph = 8
    assert call() == (True, 0)
    graph = 0
    assert [call()[0] for _ in range(2)] == [True, True]  # between them a graph may have been replayed
    # In two parts: the second follows the first's meeting, and no other meeting.
    launched.clear()
    _, rest = to_heads.in_parts(*x, None, 1, 3)
    assert launched == ["entered False False", "copy", "done True True"]
    rest()
    assert launched[3:] == ["copy", "done True True"]
    to_heads._plans.clear()
    graph = 9
    with pytest.raises(XStageError, match="before capturing"):
        call()


# ---- gloo


def gloo(rank: int, world: int) -> None:
    with_ = [SequenceLayout.shards([7, 4, 2][:world]), SequenceLayout.with_text([5, 0, 3][:world], [1, 4, 2][:world])]
    heads = (4, 2, 2)[:world]
    shapes = [(layout, ratio) for layout in with_ for ratio in (1, 2)]
    for layout, ratio in shapes:
        torch.manual_seed(5)
        batch, dim, counts = 2, 8, tuple(n // ratio for n in heads)
        whole = [torch.randn(batch, layout.sequence, n, dim, dtype=torch.float64) for n in (sum(heads), sum(counts), sum(counts))]
        mine = [x[:, reference.rows_of(layout, rank)] for x in whole]
        options = {"heads": sum(heads), "kv_heads": sum(counts), "heads_per_rank": heads, "head_dim": dim, "dtype": torch.float64,
                   "max_sequence": layout.sequence, "max_batch": batch}  # fmt: skip
        with he.HeadExchange(**options) as to_heads:
            assert to_heads.mode == "reference"
            for got, x, n in zip(to_heads(*mine, layout), whole, (heads, counts, counts), strict=True):
                assert torch.equal(got, x.split(list(n), 2)[rank])
            wrong = {
                r"k: shape .* is not \[batch, \d+, \d+, 8\]": (mine[0], mine[1][:, :, :1], mine[2]),
                "v: torch.float32": (mine[0], mine[1], mine[2].float()),
                "batch 3": [torch.cat([x, x[:1]]) for x in mine],
            }
            for message, given_ in wrong.items():
                with pytest.raises(XStageError, match=message):
                    to_heads(*given_, layout)
            long = SequenceLayout.shards([*layout.local_rows[:-1], layout.local_rows[-1] + 1])
            with pytest.raises(XStageError, match="longer than max_sequence"):
                to_heads(*(x.new_zeros(batch, long.local_rows[rank], *x.shape[2:]) for x in mine), long)
            with pytest.raises(XStageError, match=r"rows: rank \d was given"):
                to_heads(*(x.new_zeros(batch, 1 + rank % 2, *x.shape[2:]) for x in mine))  # every rank believes the others have as many
        with pytest.raises(XStageError, match="closed"):
            to_heads(*mine, layout)
        for causal in (False, True):
            with AttentionA2A(**options, max_local_rows=layout.sequence) as attend:
                out, lse = attend.ulysses(*mine, layout=layout, causal=causal, return_lse=True, softmax_scale=0.3)
                want, want_lse = reference.attention(*whole, causal=causal, softmax_scale=0.3)
                rows = reference.rows_of(layout, rank)
                assert torch.equal(out, want[:, rows])
                assert torch.equal(lse, want_lse[:, :, rows].float())
    even = [torch.ones(1, 3, world, 8) for _ in range(3)]
    with AttentionA2A(heads=world, head_dim=8, dtype=torch.float32, max_sequence=3 * world) as attend:
        assert torch.equal(attend.ulysses(*even), even[0])
    with pytest.raises(XStageError, match="max_batch"):
        he.HeadExchange(max_sequence=8, heads=world, head_dim=8, max_batch=1 + rank)
    for name, value in (("buffers", 0), ("timeout_s", 0), ("fallback", "no")):
        with pytest.raises(XStageError, match=f"{name}: {value!r}"):
            he.HeadExchange(max_sequence=8, heads=world, head_dim=8, **{name: value})  # type: ignore[arg-type]
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_over_gloo(world: int) -> None:
    ranks.run(gloo, world, limit_s=90)


def test_refused_without_a_group() -> None:
    with pytest.raises(XStageError, match="init_process_group"):
        he.HeadExchange(max_sequence=8, heads=2, head_dim=8)


def test_what_cannot_be_read_by_16_bytes_is_copied() -> None:
    x = torch.arange(4 * 6 * 2 * 16, dtype=torch.bfloat16).view(1, 4, 6, 32)
    for taken in (x, x[:, :, 1:3], x.transpose(1, 2), x[..., 8:24]):
        assert he.aligned(taken).data_ptr() == taken.data_ptr()
    for copied in (x[..., ::2], x[..., 4:20], x.reshape(1, 4, 192)[..., 4:164].unflatten(2, (5, 32))):
        assert he.aligned(copied).data_ptr() != copied.data_ptr()
        assert torch.equal(he.aligned(copied), copied)
