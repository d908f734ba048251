"""How many heads come first: the model by hand and against a placement tile by tile, what it chooses for models of published sizes; what a
call in two parts launches where, and what it refuses.

Not covered: that the parts overlap, and by how much (benchmarks/ulysses_overlap.py); results (tests/gpu/test_head_exchange.py).
"""

from __future__ import annotations

import heapq
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_code import needs

from xstage.attention import entry, overlap
from xstage.attention import op as module
from xstage.attention.layout import SequenceLayout
from xstage.attention.op import AttentionA2A, Variant
from xstage.attention.overlap import Problem, Split, choose, time_ns
from xstage.errors import XStageError
from xstage.studies.dit_models import MODELS, overlap_problem

# ---- the model


def problem(name: str, world: int = 2) -> Problem:
    return overlap_problem(next(m for m in MODELS if m.name == name), world)


def placed(first: int, rest: int, tile: int, sms: int, taken: int, ready: int) -> int:
    """Tile by tile, each to the SM that is free first."""
    free = [0] * (sms - taken) + [ready] * taken
    heapq.heapify(free)
    last = 0
    for i in range(first + rest):
        last = max(heapq.heappop(free), 0 if i < first else ready) + tile
        heapq.heappush(free, last)
    return last


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9), st.integers(2, 12), st.data())
@settings(deadline=None, max_examples=400)
def test_tiles_are_placed_as_one_by_one(first: int, rest: int, tile: int, sms: int, data: st.DataObject) -> None:
    taken, ready = data.draw(st.integers(0, sms - 1)), data.draw(st.integers(1, 50))
    if first + rest:
        assert overlap._last_ns(first, rest, tile, sms, taken, ready) == placed(first, rest, tile, sms, taken, ready)


def test_time_by_hand() -> None:
    p = Problem(SequenceLayout.shards([128, 256]), (4, 4), (2, 2), 128, 256, 128, 4)
    row = (2 + 2) * 256  # a key/value head with its queries
    assert p.tile_ns == 4 * 128 * 384 * 128 / overlap.SM_FLOP
    whole = 256 * 2 * row / overlap.LINK + overlap.MEETING_NS
    assert time_ns(p, None) == pytest.approx(whole + 3 * p.tile_ns)  # 12 tiles on 4 SMs
    assert overlap.attention_ns(p) == 3 * p.tile_ns
    one = [(0, 1), (0, 1)]
    assert p.exchange_ns(one) == pytest.approx(256 * row / overlap.LINK + overlap.MEETING_NS)
    assert p.exchange_ns(one, Split(1, 1)) == pytest.approx(256 * row / overlap.STORES + overlap.MEETING_NS)
    assert p.exchange_ns(one, Split(1, 40)) == pytest.approx(256 * row / overlap.SENDERS + overlap.MEETING_NS)
    assert p.exchange_ns(one, Split(1, 0)) == pytest.approx(256 * row / overlap.LINK + overlap.MEETING_NS + overlap.COPY_NS)
    # Nine heads that stay need the memory longer than the one that goes needs the link.
    many = replace(p, heads=(18, 18), kv_heads=(9, 9))
    assert many.exchange_ns(one) == pytest.approx(2 * 256 * (1 + 9) * row / overlap.MEMORY + overlap.MEETING_NS)
    assert replace(p, causal=True).tile_ns == p.tile_ns / 2
    assert time_ns(p, Split(2)) == time_ns(p, None)  # nothing is left


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_choice_is_no_worse_than_any_other(model: Any, world: int, captured: bool) -> None:
    p = problem(model.name, world)
    if not captured and overlap.attention_ns(p) < overlap.LEAST_NS:
        assert choose(p) is None
        return
    took = time_ns(p, choose(p, captured=captured))
    assert took <= time_ns(p, None)
    assert all(took <= time_ns(p, Split(first, ctas)) for first in range(1, max(p.kv_heads)) for ctas in overlap.CTAS)


def test_choices() -> None:
    """Of a full last wave no SM is taken; where attention is short or there is a single head, nothing is split."""
    assert choose(problem("FLUX.1 2048²")) == choose(problem("FLUX.1 2048²"), captured=True) == Split(2, 0)
    assert choose(problem("FLUX.1 1024²")) is None
    assert choose(problem("FLUX.1 1024²"), 2) == Split(2, 20)
    assert choose(problem("FLUX.1 1024²"), captured=True) == Split(3, 20)
    assert choose(problem("Wan 1.3B 480p")) == choose(problem("Wan 14B 480p")) == Split(1, 0)
    p = problem("Wan 1.3B 480p")
    assert choose(replace(p, layout=SequenceLayout.even(256, 2))) is None
    assert choose(replace(p, heads=(1, 1), kv_heads=(1, 1)), captured=True) is None


def test_long_attention_keeps_its_links_asleep_first() -> None:
    assert module.default_order(32768, 12, 128, 132) == "alternating"  # 9 ms
    assert module.default_order(65536, 4, 128, 132) == "own_first"


def test_rates_are_those_of_the_platform() -> None:
    from xstage.platform import load_platform

    platform = load_platform("h200-nvlink4", samples=False)
    method = platform.method("st_global")
    assert pytest.approx(float(method.drain_rate(platform.sms)), rel=1e-3) == overlap.LINK


# ---- what is launched


class Streams:
    """Stand-ins for streams: `log` says what was launched on which, and what waited for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.log: list[str] = []
        self.now = self.make("main")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: self.make("side"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        monkeypatch.setattr(entry, "_capture_id", lambda: 0)

    def make(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    @contextmanager
    def on(self, stream: Any) -> Any:
        before, self.now = self.now, stream
        yield
        self.now = before

    def launched(self, what: str) -> None:
        self.log.append(f"{self.now.name}: {what}")


def made(rank: int, heads: tuple[int, ...], kv_heads: tuple[int, ...]) -> AttentionA2A:
    a = object.__new__(AttentionA2A)
    a.rank, a.world, a.heads_per_rank, a.kv_heads_per_rank, a.heads = rank, len(heads), heads, kv_heads, sum(heads)
    a.device, a.dtype, a.head_dim, a.buffers, a.timeout_s = torch.device("cpu"), torch.bfloat16, 64, 2, 1.0
    a.max_batch, a._turn, a._plans, a._entry, a._side = 1, 0, {}, entry.Entry(), None
    a._out_bytes = a._lse_bytes = 1 << 20
    addresses = [(1 + r) << 32 for r in range(a.world)]
    a._buffer = SimpleNamespace(addresses=addresses, view=lambda *_: torch.empty(1, 1, 1))  # type: ignore[assignment]
    a._watch = SimpleNamespace(address=0)  # type: ignore[assignment]
    a._control = a._signals = torch.zeros(2)
    return a


@needs("cutlass", "flash_attn", "quack")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rank", "first"), [(0, 1), (0, 2), (1, 1), (1, 2), (0, 0)])
def test_what_a_call_in_two_parts_launches(rank: int, first: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from xstage.attention import kernel_sm90
    from xstage.device import meeting

    streams = Streams(monkeypatch)
    seen: list[tuple[Any, ...]] = []

    def launch(_kernel: Any, q: Any, k: Any, v: Any, _scale: float, tables: Any) -> None:
        streams.launched(f"attention of {q.shape[2]}")
        seen.append((q, k, v, tables))

    monkeypatch.setattr(kernel_sm90, "compiled", lambda *_: "kernel")
    monkeypatch.setattr(kernel_sm90, "launch", launch)
    monkeypatch.setattr(
        meeting, "compiled_meeting", lambda _w, kind, _l, ahead=False: lambda *_: streams.launched(f"meeting {kind} {ahead}")
    )
    heads, kv_heads = (6, 2), (3, 1)
    attend, layout = made(rank, heads, kv_heads), SequenceLayout.even(300, 2)
    n, kv = heads[rank], kv_heads[rank]
    x = [torch.randn(1, 300, count, 64).bfloat16() for count in (n, kv, kv)]
    call = module._Call(1, layout, causal, True, Variant(), first)
    attend._fused(*x, 0.1, call, lambda: streams.launched("rest"))  # type: ignore[arg-type]
    now = 2 * min(first, kv)
    if first == 0:
        assert streams.log == ["main: rest", f"main: attention of {n}", "main: meeting 1 True"]
    else:
        last = [f"main: attention of {n - now}"] if n > now else []
        assert streams.log == [
            "side waits for main", "main: rest", f"side: attention of {now}", *last, "main waits for side", "main: meeting 1 False",
        ]  # fmt: skip
    # Every tile of every head once, of the right heads, to the right address.
    assert torch.equal(torch.cat([q for q, *_ in seen], 2), x[0])
    assert torch.equal(torch.cat([k for _, k, *_ in seen], 2), x[1])
    head = sum(heads[:rank])
    for q, k, _, (tiles, rows, _, lse_rows) in seen:
        assert q.shape[2] == 2 * k.shape[2]
        assert sorted(tiles.tolist()) == sorted(
            b | h << 13 for b in range(-(-300 // kernel_sm90.tile_shape(64, causal)[0])) for h in range(q.shape[2])
        )
        start = (1 << 32) + module._SIGNAL_BYTES
        assert int(rows[0, 0]) == start + head * 128
        assert int(lse_rows[0, 0]) == start + (1 << 20) + head * 4
        head += q.shape[2]


def test_short_layers_are_split_in_graphs_and_once_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph will launch must have been planned by an eager call."""
    attend, capturing = made(0, (4, 4), (4, 4)), False
    attend.mode, attend.rest_ctas, attend._splits = "fused", None, {}
    attend.inputs = SimpleNamespace(mode="kernel", check_arguments=lambda *_: None)  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(attend, "_choose_split", lambda *key: (None, Split(2, 20)) if key[3] is None else (Split(1), Split(1)))
    x = [torch.zeros(1, 4, 8, 64)] * 3
    layout = SequenceLayout.even(8, 2)

    def split(first: int | None = None) -> Split | None:
        return attend._split((x[0], x[1], x[2]), layout, False, first)

    assert [split(), split(), split()] == [Split(2, 20), None, None]
    capturing = True
    assert [split(), split(1), split(0)] == [Split(2, 20), Split(1), None]
    capturing = False
    assert split() is None


# ---- arguments


def refused(rank: int, world: int) -> None:
    x = [torch.ones(1, 3, n, 8) for n in (4 * world, 2 * world, 2 * world)]
    with AttentionA2A(heads=4 * world, kv_heads=2 * world, head_dim=8, dtype=torch.float32, max_sequence=3 * world) as attend:
        for value, message in ((-2, "-2 is not in 0 … 4"), (6, "6 is not in 0 … 4"), (3, "3 must be a multiple of 2")):
            with pytest.raises(XStageError, match=f"first_heads: {message}"):
                attend.ulysses(*x, first_heads=value)
        assert attend.inputs is None  # nothing was made or sent
        want = attend.ulysses(*x)
        for value in (0, 2, 4):
            assert torch.equal(attend.ulysses(*x, first_heads=value), want)
            assert attend.split is None


def test_first_heads_that_do_not_fit_are_refused() -> None:
    ranks.run(refused, 2, limit_s=60)
