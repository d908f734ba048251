"""The exchange of rows on emulated ranks: the PTX of its kernels is interpreted (`ptx_interpreter`), `Exchange` says what is launched.

Both paths, two calls in a row on the same buffers, in memory that is poisoned where nobody wrote: against `routing`, `quantize` and
`work_table`, bit for bit. Between `dispatch` and `combine` the tests stand in for the GEMMs and put random results into the slots.

Not covered: the order of memory and time (tests/gpu/test_moe_exchange.py), the GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_launch import Array, addresses, emulated, translated
from emulated_memory import POISON, Memory
from machine_code import needs_compiler
from ptx_interpreter import Grid, Kernel, run

from xstage.moe import quantize, routing
from xstage.moe.exchange import Exchange, scratch_shapes
from xstage.moe.layout import CHUNK_TOKENS, COMBINED, COUNTED, DISPATCHED, ITEM_BYTES, ITEM_PAIRS, PHASES, BufferLayout
from xstage.moe.work_table import TILE_COLUMNS, TILE_ROWS, WorkOrder, work_list, work_table

pytestmark = needs_compiler

SIGNATURE, PATIENT_NS, IMPATIENT_NS = 77, 10**12, 50_000
SENDING_WARPS = 5


@dataclass(frozen=True)
class Case:
    """tokens: of each rank. picks: see `pick`. wide: int64 picks. quantized: rows come in e4m3. order: None: step by step. once: rows go
    to a rank once, but for those of its first tiles."""

    tokens: tuple[int, ...]
    experts: int
    top_k: int
    picks: str
    wide: bool
    quantized: bool
    order: str | None
    hidden: int = 512
    intermediate: int = 256
    pull: bool = False
    once: bool = False
    near_tiles: int = 1

    @property
    def layout(self) -> BufferLayout:
        return BufferLayout(
            len(self.tokens), self.experts, self.hidden, self.top_k, max(*self.tokens, 1), direct=self.order is not None, once=self.once,
            pull=self.pull, near_tiles=self.near_tiles,
        )  # fmt: skip

    @property
    def columns(self) -> tuple[int, int]:
        return 2 * self.intermediate // TILE_COLUMNS, self.hidden // TILE_COLUMNS

    def __str__(self) -> str:
        dtypes = f"{'int64' if self.wide else 'int32'}-{'e4m3' if self.quantized else 'bf16'}"
        way = f"{f'once-{self.near_tiles}-' * self.once}{self.order or ('pull' if self.pull else 'steps')}"
        return f"{way}-{self.picks}-{dtypes}-{'.'.join(map(str, self.tokens))}"


class Rank:
    """One rank: its exchange on emulated memory, and what the kernels were given."""

    def __init__(self, machine: Machine, me: int):
        case, memory, layout = machine.case, machine.memory, machine.case.layout
        self.me, self.buffer, self.machine = me, machine.buffers[me], machine
        self.scratch = {
            name: Array(memory, shape, getattr(torch, dtype))
            for name, (dtype, shape) in scratch_shapes(layout, case.intermediate, layout.direct).items()
        }
        memory.put(torch.zeros(4, dtype=torch.int32), self.scratch["zeros"].address)
        self.status = Array.of(memory, torch.zeros(1, dtype=torch.int64))
        self.control = Array.of(memory, torch.zeros(2, dtype=torch.int64))
        words = [SIGNATURE, me, machine.timeout_ns, self.status.address, *machine.buffers, *[self.buffer] * layout.ranks]
        self.exchange = exchange = object.__new__(Exchange)
        exchange.layout, exchange.intermediate, exchange.order = layout, case.intermediate, machine.order
        exchange.rank, exchange.world = me, layout.ranks
        exchange._buffer = SimpleNamespace(addresses=machine.buffers)  # type: ignore[assignment]
        exchange.control, exchange.call = self.control, Array.of(memory, torch.tensor(words))
        exchange._signals = Array(memory, (len(PHASES) * layout.ranks,), torch.int64, self.buffer)
        private = ("chunk_bases", "positions", "zeros", "send_first", "items", "pairs", "rows", "row_scales")
        for name, array in self.scratch.items():
            setattr(exchange, f"_{name}" if name in private else name, array)

    def region(self, name: str) -> torch.Tensor:
        r = self.machine.case.layout.region(name)
        raw = self.machine.memory.get(self.buffer + r.offset_bytes, (r.rows, r.row_bytes), torch.uint8)
        return raw[:, : r.columns * ITEM_BYTES[r.dtype]].view(getattr(torch, r.dtype) if r.dtype != "float8_e4m3fn" else torch.uint8)

    def take(self, generator: torch.Generator) -> None:
        """New arguments of a call."""
        case, memory = self.machine.case, self.machine.memory
        tokens = case.tokens[self.me]
        self.picks = pick(case, self.me, generator)
        self.weights = torch.rand(tokens, case.top_k, generator=generator)
        x = (torch.randn(tokens, case.hidden, generator=generator) * torch.exp(9 * torch.randn(tokens, 1, generator=generator))).bfloat16()
        if tokens > 3:
            x[1, 5], x[1, 300], x[2], x[2, ::3], x[3, 128:256] = float("inf"), float("nan"), 0, -0.0, 1e-40
        self.x, self.x_scales = quantize.quantize_activations(x)
        self.given = Array.of(memory, self.x if case.quantized else x)
        self.given_scales = Array.of(memory, self.x_scales) if case.quantized else None
        self.given_picks = Array.of(memory, self.picks.to(torch.int64 if case.wide else torch.int32))
        self.given_weights = Array.of(memory, self.weights)
        self.out = Array(memory, (tokens, case.hidden), torch.bfloat16)

    def dispatch(self) -> list[Grid]:
        steps = self.exchange._dispatch_steps(self.given, self.given_scales, self.given_picks, self.given_weights)  # type: ignore[arg-type]
        return [self.grid(name, launch()) for name, launch in steps]

    def combine(self) -> list[Grid]:
        steps = self.exchange._combine_steps(self.given_picks, self.out)  # type: ignore[arg-type]
        return [self.grid(name, launch()) for name, launch in steps]

    def grid(self, name: str, launched: tuple[Kernel, tuple[Any, ...]]) -> Grid:
        """CTAs as the kernels' `__call__` have them."""
        from xstage.moe.plan_sm90 import CLEARED_BYTES

        kernel, arguments = launched
        tokens, layout = len(self.given), self.machine.case.layout
        cleared = arguments[5] if name == "count" else 0
        ctas = {
            "count": max(-(-tokens // CHUNK_TOKENS), cleared // CLEARED_BYTES), "dispatch": -(-tokens // 8),
            "list": -(-tokens * layout.top_k // 256),
            "plan": 1 + (-(-tokens // 32) if layout.direct and not self.machine.case.quantized else 0), "arrange": layout.rows // TILE_ROWS,
            "fetch": layout.rows // 8, "reduce": -(-tokens * layout.hidden // 8 // 256),
        }  # fmt: skip
        return Grid(kernel, max(ctas.get(name, 1), 1), addresses(arguments), self.machine.memory, seed=self.machine.next_seed())

    def sends(self) -> list[Grid]:
        """Warps that may wait for each other, hence a grid each."""
        from send_kernel import compiled_send

        if not self.machine.order:
            return []
        kernel = translated(compiled_send(self.machine.case.layout))
        here = (self.control.address, self.exchange.call.address, int(self.scratch["totals"].value[3]))  # type: ignore[attr-defined]
        arguments = [*self.exchange.sends, *([] if self.machine.case.once else [0]), *here]
        return [
            Grid(kernel, 1, [*arguments, index, SENDING_WARPS], self.machine.memory, seed=self.machine.next_seed())
            for index in range(SENDING_WARPS)
        ]


def dispatch(ranks: list[Rank], seed: int = 0) -> None:
    run([rank.dispatch() for rank in ranks], seed=seed)
    run([[grid] for rank in ranks for grid in rank.sends()], seed=seed)


def pick(case: Case, me: int, generator: torch.Generator) -> torch.Tensor:
    shape, mine = (case.tokens[me], case.top_k), case.experts // len(case.tokens)
    picks = torch.randint(-1, case.experts, shape, generator=generator)
    if case.picks == "one":
        picks = torch.full(shape, case.experts // 2)
    elif case.picks == "masked":
        picks = torch.full(shape, -1)
    elif case.picks == "remote":
        picks = (me + 1) % len(case.tokens) * mine + torch.randint(0, mine, shape, generator=generator)
    elif case.picks == "outside":
        picks = torch.randint(-5, case.experts + 5, shape, generator=generator)
        if case.wide:
            picks[0, 0] = (1 << 32) + 1  # its low half is an expert
    return picks


class Machine:
    """All ranks, and the memory that all of them reach."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch, timeout_ns: int = PATIENT_NS):
        from xstage.device import meeting
        from xstage.moe import exchange_sm90, plan_sm90

        self.case, self.timeout_ns, self._seed = case, timeout_ns, 0
        self.order = None if case.order is None else WorkOrder.of(case.order, *case.columns, lead_rows=None, instances=3)
        layout = case.layout
        self.memory = Memory(2 * layout.ranks * layout.size_bytes + (16 << 20))
        self.buffers = [self.memory.allocate(layout.size_bytes) for _ in range(layout.ranks)]
        zeroed = ("signals", "inbox_call") if layout.once else ("signals",)
        for buffer in self.buffers:
            for region in map(layout.region, zeroed):
                self.memory.put(torch.zeros(region.size_bytes, dtype=torch.uint8), buffer + region.offset_bytes)
        self.ranks = [Rank(self, me) for me in range(layout.ranks)]
        for module in (plan_sm90, exchange_sm90, meeting):
            for name in [name for name in vars(module) if name.startswith("compiled_")]:
                monkeypatch.setattr(module, name, emulated(getattr(module, name)))

    def next_seed(self) -> int:
        self._seed += 1
        return self._seed


def check_plan(machine: Machine, counts: torch.Tensor) -> None:
    """Everything that the GEMMs are told."""
    experts, columns = machine.case.experts, machine.case.columns
    offsets = routing.offsets(counts, TILE_ROWS)
    for rank in machine.ranks:
        got = {name: array.value for name, array in rank.scratch.items() if array.dtype == torch.int32}
        mine = counts.sum(0).view(len(machine.ranks), -1)[rank.me]
        tiles = -(-mine // TILE_ROWS)
        tables = [work_table(tiles.tolist(), n) for n in columns]
        number = int(tiles.sum())
        assert got["totals"].tolist() == [len(tables[0]), len(tables[1]), number, number * TILE_ROWS]
        assert got["expert_counts"].tolist() == mine.tolist()
        expert = torch.arange(len(mine)).repeat_interleave(tiles)
        assert torch.equal(got["tile_expert"][:number], expert.int())
        assert torch.equal(got["tile_end"][:number], offsets[rank.me, :-1][expert] + mine[expert].int())
        if machine.order is None:
            for name, table in zip(("work1", "work2"), tables, strict=True):
                assert got[name][: 2 * len(table)].tolist() == [word for entry in table for word in entry]
        else:
            listed = work_list(mine.tolist(), machine.order)
            assert got["work"].view(-1, 4)[: len(listed)].tolist() == [list(entry) for entry in listed]
            assert not got["ready"][: 1 + number].any()
            first = (offsets[:, :-1].flatten() + counts[: rank.me].sum(0)).tolist()
            # The share of its rank's rows that comes before an item; of equal ones, the next rank's first.
            mine_of, ranks = len(mine), len(machine.ranks)
            rows_of = (-(-counts.sum(0) // TILE_ROWS)).view(ranks, -1).sum(1).tolist()
            items, pairs = [], 0
            for e in range(experts):
                count = int(counts[rank.me, e])
                items += [[pairs + n, e, min(ITEM_PAIRS, count - n), first[e] + n] for n in range(0, count, ITEM_PAIRS)]
                pairs += count
            items.sort(key=lambda item: (Fraction(item[3], rows_of[item[1] // mine_of]), (item[1] // mine_of - rank.me - 1) % ranks))
            assert got["items"][0] == len(items)
            if machine.case.once:
                assert got["items"][1] == sum(1 << r for r, rows in enumerate(rows_of) if rows > machine.case.near_tiles)
            assert got["items"].view(-1, 4)[1 : 1 + len(items)].tolist() == items


def check_rows(machine: Machine, counts: torch.Tensor, fresh: bool) -> list[torch.Tensor]:
    """What arrived at every rank. fresh: nobody wrote before. Returns the slots, per rank."""
    layout, direct = machine.case.layout, machine.order is not None
    places = [routing.place(rank.picks, counts, rank.me, TILE_ROWS) for rank in machine.ranks]
    slots = []
    for rank in machine.ranks:
        real = torch.zeros(layout.rows, dtype=torch.bool)
        rows = torch.zeros(layout.rows, layout.hidden, dtype=torch.uint8)
        scales = torch.zeros(layout.hidden // 128, layout.rows)
        weight, slot = torch.zeros(layout.rows), torch.zeros(layout.rows, dtype=torch.int64)
        for source, where in zip(machine.ranks, places, strict=True):
            token, k = (where.rank == rank.me).nonzero(as_tuple=True)
            row = where.row[token, k].long()
            assert not real[row].any()
            real[row], weight[row] = True, source.weights[token, k]
            rows[row], scales[:, row] = source.x.view(torch.uint8)[token], source.x_scales[token].T
            slot[row] = source.buffer + layout.region("combine").offset_bytes + (token * layout.top_k + k) * layout.hidden * 2
        end = int(rank.scratch["totals"].value[2]) * TILE_ROWS
        assert not real[end:].any()
        got = {
            name: rank.region(name) if direct else rank.scratch[name].value for name in ("scales", "row_weight", "row_slot")
        }  # fmt: skip
        activations = rank.region("activations")
        assert torch.equal(activations[real], rows[real])
        if fresh:
            assert (activations[~real] == POISON).all()
        assert torch.equal(got["row_weight"].view(-1)[:end], weight[:end])
        assert torch.equal(got["row_slot"].view(-1)[:end], slot[:end])
        told = real if direct else torch.arange(layout.rows) < end
        assert torch.equal(got["scales"][:, told], scales[:, told])
        if direct:
            arrived = rank.region("arrived").view(-1)
            assert torch.equal(arrived, real.view(-1, TILE_ROWS).sum(1).int())
        slots.append(slot[real])
    return slots


CASES = [
    *(
        case
        for order, other in ((None, None), ("interleaved", "linear1_first"))
        for case in (
            Case((21, 0), 4, 2, "any", True, False, order),
            Case((3, 131, 17), 6, 3, "one", False, True, order),  # pieces of the list lie across tiles
            Case((9, 30, 12, 5), 12, 2, "remote", False, False, other, hidden=1024),
            Case((6, 1), 2, 1, "masked", True, True, order),
            Case((40, 33), 6, 3, "outside", True, False, other),
        )
    ),
    Case((13, 20), 6, 2, "any", True, False, None, pull=True),
    Case((3, 30, 17), 6, 3, "outside", True, True, None, hidden=1536, pull=True),
    Case((50, 20), 10, 5, "any", False, True, "alternating", intermediate=768),
    Case((21, 0), 4, 2, "any", True, False, "interleaved", once=True),
    Case((3, 131, 17), 6, 3, "one", False, True, "interleaved", once=True),
    Case((9, 20, 12, 5), 12, 6, "any", False, True, "expert_wave", hidden=1024, once=True),
    Case((6, 1), 2, 1, "masked", True, True, "interleaved", once=True),
    Case((19, 13), 6, 3, "outside", True, True, "linear1_first", hidden=1536, once=True),
    Case((20,), 6, 3, "any", True, True, "interleaved", once=True, near_tiles=0),
    Case((30, 25), 8, 3, "any", False, True, "interleaved", once=True, near_tiles=4),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_go_to_their_experts_and_results_come_back(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(sum(case.tokens))
    machine = Machine(case, monkeypatch)
    for call in range(2):
        for rank in machine.ranks:
            rank.take(generator)
        dispatch(machine.ranks, seed=call)
        counts = torch.stack([routing.count(rank.picks, case.experts) for rank in machine.ranks])
        check_plan(machine, counts)
        for slot in torch.cat(check_rows(machine, counts, fresh=call == 0)).tolist():
            machine.memory.put(10 * torch.randn(case.hidden, generator=generator).bfloat16(), slot)
        run([rank.combine() for rank in machine.ranks], seed=call)
        for rank in machine.ranks:
            slots = rank.region("combine").view(-1, case.top_k, case.hidden)[: len(rank.picks)].float()
            masked = (rank.picks < 0) | (rank.picks >= case.experts)
            total = torch.zeros(len(rank.picks), case.hidden)
            for k in range(case.top_k):
                total += torch.where(masked[:, k, None], 0, slots[:, k])
            assert torch.equal(rank.out.value, total.bfloat16())
            assert rank.status.value.tolist() == [0]
            assert rank.control.value.tolist() == [call + 1, 0]


@pytest.mark.parametrize(("order", "once"), [(None, False), ("interleaved", False), ("interleaved", True)])
def test_nothing_is_stored_when_a_peer_does_not_come(order: str | None, once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from xstage.device.signals import PEER_GAVE_UP, TIMED_OUT

    machine = Machine(Case((10, 10), 4, 2, "any", True, False, order, once=once), monkeypatch, IMPATIENT_NS)
    for rank in machine.ranks:
        rank.take(torch.Generator().manual_seed(0))
    here, peer = machine.ranks
    dispatch([here])
    run([here.combine()])

    status = 1 << 32 | TIMED_OUT << 16 | 1 << 8 | COUNTED + 1
    assert here.status.value.tolist() == [status]
    assert here.control.value.tolist() == [1, status]
    assert here.scratch["totals"].value.tolist() == [0] * 4
    if order:
        assert here.scratch["items"].value[0] == 0
    stored = ("activations", "combine", *(("scales",) if order else ("sources", "activation_scales")))
    stored += ("sources", "inbox", "inbox_scales") if once else ()
    for rank in machine.ranks:
        assert all((rank.region(name).view(torch.uint8) == POISON).all() for name in stored)
    assert (here.out.value.view(torch.uint8) == POISON).all()

    # A peer that comes late met `here` once, and hears at the next meeting that it gave up.
    dispatch([peer])
    run([peer.combine()])
    kind = COMBINED if order and not once else DISPATCHED
    assert peer.status.value.tolist() == [1 << 32 | PEER_GAVE_UP << 16 | 0 << 8 | kind + 1]
    if not order:
        assert peer.scratch["totals"].value.tolist() == [0] * 4
    assert (peer.out.value.view(torch.uint8) == POISON).all()


@pytest.mark.parametrize(("order", "once"), [(None, False), ("interleaved", False), ("interleaved", True)])
def test_ranks_that_mean_different_layers_store_nothing(order: str | None, once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from xstage.device.signals import MISMATCH

    machine = Machine(Case((10, 10), 4, 2, "any", True, False, order, once=once), monkeypatch)
    for rank in machine.ranks:
        rank.take(torch.Generator().manual_seed(0))
        machine.memory.put(torch.tensor([SIGNATURE + rank.me]), rank.exchange.call.address)  # type: ignore[attr-defined]
    dispatch(machine.ranks)
    run([rank.combine() for rank in machine.ranks])
    for rank in machine.ranks:
        assert rank.status.value.tolist() == [1 << 32 | MISMATCH << 16 | (1 - rank.me) << 8 | COUNTED + 1]
        assert rank.scratch["totals"].value.tolist() == [0] * 4
        assert all((rank.region(name).view(torch.uint8) == POISON).all() for name in ("activations", "combine"))
        assert (rank.out.value.view(torch.uint8) == POISON).all()
