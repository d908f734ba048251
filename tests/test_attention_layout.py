"""Layouts and tile tables: every row and tile exactly once, the promised spread, bad input refused. Not covered: anything on a GPU."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage.attention import layout as lay
from xstage.attention.layout import Segment, SequenceLayout
from xstage.errors import XStageError

ranks = st.integers(1, 8)


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    world = draw(ranks)
    shards = st.lists(st.integers(0, 400), min_size=world, max_size=world)
    image = draw(shards.filter(lambda s: sum(s) > 0))
    if draw(st.booleans()):
        return SequenceLayout.with_text(image, draw(shards), draw(st.sampled_from(["before", "after"])))
    return SequenceLayout.shards(image)


@given(layouts())
def test_every_row_has_one_place(layout: SequenceLayout) -> None:
    for rank, rows in enumerate(layout.local_rows):
        assert sorted(layout.local_row[layout.owner == rank]) == list(range(rows))
    assert len(layout.owner) == layout.sequence == sum(layout.local_rows)
    assert SequenceLayout.from_flat(layout.flat, layout.world) == layout


@given(layouts(), st.integers(1, 3))
def test_row_addresses_fill_every_output_without_overlap(layout: SequenceLayout, batch: int) -> None:
    bases = [10**9 * (r + 1) for r in range(layout.world)]
    table = lay.row_table(layout, bases, batch, 64, 16)
    for rank, rows in enumerate(layout.local_rows):
        places = (table[:, layout.owner == rank] - bases[rank] - 16) // 64
        assert sorted(places.reshape(-1)) == list(range(batch * rows))
        assert (table[:, layout.owner == rank] % 64 == (bases[rank] + 16) % 64).all()


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 5), st.integers(1, 2), st.sampled_from(lay.ORDERS), st.booleans(),
       st.sampled_from([1, 5, 132]), st.sampled_from([64, 128, 192]), st.integers(1, 4), st.data())  # fmt: skip
def test_every_tile_once(layout, heads, batch, order, causal, wave, tile_rows, section, data) -> None:  # type: ignore[no-untyped-def]
    rank = data.draw(st.integers(0, layout.world - 1))
    table = lay.tile_table(layout, rank, heads=heads, batch=batch, tile_rows=tile_rows, wave=wave, order=order, causal=causal,
                           capacity_tiles=data.draw(st.sampled_from([None, 1, 3, 99])), heads_per_section=section)  # fmt: skip
    blocks = -(-layout.sequence // tile_rows)
    assert table.ndim == 1
    assert len(np.unique(table)) == len(table) == blocks * heads * batch
    block, head, entry_batch = lay.unpack(table)
    assert block.max() == blocks - 1
    assert head.max() == heads - 1
    assert entry_batch.max() == batch - 1


@settings(max_examples=40, deadline=None)
@given(layouts(), st.sampled_from(lay.ORDERS), st.booleans(), st.integers(1, 2), st.data())
def test_following_the_tables_is_the_exchange(layout, order, causal, batch, data) -> None:  # type: ignore[no-untyped-def]
    """What the kernel does with its tables, in numpy: every output of every rank, byte for byte, and nothing beside it."""
    counts = data.draw(st.lists(st.integers(1, 3), min_size=layout.world, max_size=layout.world))
    heads, head_bytes, size = sum(counts), 16, max(layout.local_rows) * sum(counts) * 16 * batch
    memory = np.full(size * layout.world, -1, np.int64)
    for rank, count in enumerate(counts):
        first = sum(counts[:rank])
        rows = lay.row_table(layout, [size * r for r in range(layout.world)], batch, heads * head_bytes, first * head_bytes)
        table = lay.tile_table(layout, rank, heads=count, batch=batch, tile_rows=64, wave=7, order=order, causal=causal)
        for entry in table:
            block, head, b = lay.unpack(entry)
            for row in range(64 * block, min(64 * block + 64, layout.sequence)):
                place = rows[b, row] + head * head_bytes
                assert (memory[place : place + head_bytes] == -1).all()
                memory[place : place + head_bytes] = (b * heads + first + head) * layout.sequence + row
    for rank, mine in enumerate(layout.local_rows):
        used = batch * mine * heads * head_bytes
        got, rest = np.split(memory[size * rank : size * (rank + 1)], [used])
        got = got.reshape(batch, mine, heads, head_bytes)
        owned = np.argsort(np.where(layout.owner == rank, layout.local_row, layout.sequence))[:mine]
        want = (np.arange(batch)[:, None, None] * heads + np.arange(heads)) * layout.sequence + owned[:, None]
        assert (got == want[..., None]).all()
        assert (rest == -1).all()


@given(st.integers(1, 8), st.integers(0, 7), st.integers(1, 3), st.integers(1, 2), st.sampled_from(["plain", "alternating"]))
def test_tiles_of_even_shards_need_no_table(world: int, rank: int, heads: int, batch: int, order: str) -> None:
    layout, rank = SequenceLayout.even(world * 128 * 5, world), rank % world
    common = {"rank": rank, "heads": heads, "batch": batch}
    table = lay.tile_table(layout, tile_rows=128, wave=132, order=order, **common)
    runs, first = lay.turns(table, world=world, **common)
    assert runs == (world if order == "alternating" else 1)
    block, head, entry_batch = lay.unpack(table)
    i = np.arange(len(table)) % (world * 5)
    assert (block == (i + first) % runs * (world * 5 // runs) + i // runs).all()
    assert (head == np.arange(len(table)) // (world * 5) % heads).all()
    assert (entry_batch == np.arange(len(table)) // (world * 5) // heads).all()


def test_other_tables_are_read() -> None:
    for layout, order in ((SequenceLayout.shards([640, 128]), "alternating"), (SequenceLayout.even(768, 2), "remote_first"),
                          (SequenceLayout.even(768, 2), "own_first")):  # fmt: skip
        table = lay.tile_table(layout, 0, heads=2, batch=1, tile_rows=128, wave=132, order=order)
        assert lay.turns(table, 0, world=2, heads=2, batch=1) == (0, 0)
    # Lengths that tiles do not divide are no obstacle while every rank has as many blocks.
    table = lay.tile_table(SequenceLayout.even(7145, 2), 1, heads=2, batch=1, tile_rows=128, wave=132, order="alternating")
    assert lay.turns(table, 1, world=2, heads=2, batch=1) == (2, 0)


def test_plain_order_is_the_one_of_the_base_kernel() -> None:
    table = lay.tile_table(SequenceLayout.even(512, 2), 0, heads=2, batch=2, tile_rows=128, wave=132, order="plain")
    block, head, batch = lay.unpack(table)
    assert block.tolist() == [0, 1, 2, 3] * 4
    assert head.tolist() == ([0] * 4 + [1] * 4) * 2
    assert batch.tolist() == [0] * 8 + [1] * 8


@given(st.integers(2, 8), st.integers(0, 7), st.integers(1, 4))
def test_alternating_spreads_each_destination_over_every_window(world: int, rank: int, heads: int) -> None:
    layout = SequenceLayout.even(world * 128 * 12, world)
    table = lay.tile_table(layout, rank % world, heads=heads, batch=1, tile_rows=128, wave=132, order="alternating")
    owner = lay.block_owner(layout, 128)[lay.unpack(table)[0]]
    for start in range(0, len(owner), world):
        assert sorted(owner[start : start + world]) == list(range(world))


def test_alternating_halves_the_burst_that_plain_sends_at_once() -> None:
    layout = SequenceLayout.even(32768, 2)
    common = {"heads": 4, "batch": 1, "tile_rows": 128, "wave": 128}
    plain = lay.remote_rows(lay.tile_table(layout, 0, order="plain", **common), layout, 0, 128, 128)
    alternating = lay.remote_rows(lay.tile_table(layout, 0, order="alternating", **common), layout, 0, 128, 128)
    assert [sent.sum() for sent in plain] == [0, 128 * 128] * 4
    assert [sent.sum() for sent in alternating] == [64 * 128] * 8


def test_rows_that_leave_are_counted_one_by_one() -> None:
    layout = SequenceLayout.shards([100, 200])
    table = lay.tile_table(layout, 0, heads=1, batch=1, tile_rows=128, wave=2, order="plain")
    assert [sent.tolist() for sent in lay.remote_rows(table, layout, 0, 128, 2)] == [[28, 128], [44]]


@pytest.mark.parametrize(("sequence", "heads"), [(16384, 4), (32768, 4), (8192, 12), (65536, 12)])
def test_own_last_ends_at_home_and_keeps_the_capacity_before(sequence: int, heads: int) -> None:
    layout = SequenceLayout.even(sequence, 2)
    table = lay.tile_table(layout, 1, heads=heads, batch=1, tile_rows=128, wave=132, order="own_last", capacity_tiles=99)
    remote = [sent.sum() // 128 for sent in lay.remote_rows(table, layout, 1, 128, 132)]
    assert max(remote) <= 99 + 1
    assert (lay.block_owner(layout, 128)[lay.unpack(table[-132:])[0]] != 1).sum() == 0


def test_own_last_with_two_waves_moves_only_what_fits() -> None:
    layout = SequenceLayout.even(8192, 2)
    table = lay.tile_table(layout, 0, heads=4, batch=1, tile_rows=128, wave=132, order="own_last", capacity_tiles=99)
    remote = lay.remote_rows(table, layout, 0, 128, 132)
    assert sum(sent.sum() for sent in remote) == 128 * 128
    # 124 tiles come before the last wave; they carry at most 124 · 99 / 132 = 93 remote tiles.
    assert (lay.block_owner(layout, 128)[lay.unpack(table[:124])[0]] != 0).sum() == 93


def test_own_first_sends_nothing_until_all_own_tiles_are_done_then_to_one_peer_after_the_other() -> None:
    layout = SequenceLayout.shards([300, 700, 500])
    common = {"heads": 3, "batch": 2, "tile_rows": 128, "wave": 132}
    table = lay.tile_table(layout, 1, order="own_first", **common)
    owner = lay.block_owner(layout, 128)[lay.unpack(table)[0]]
    assert [int(rank) for rank in owner[np.flatnonzero(np.diff(owner, prepend=-1))]] == [1, 2, 0]
    # Within each, as `plain` has them.
    plain = lay.tile_table(layout, 1, order="plain", **common)
    of = lay.block_owner(layout, 128)[lay.unpack(plain)[0]]
    assert table.tolist() == [*plain[of == 1], *plain[of == 2], *plain[of == 0]]
    assert lay.turns(table, 1, world=3, heads=3, batch=2) == (0, 0)


def test_causal_tiles_come_longest_first() -> None:
    layout = SequenceLayout.even(16384, 2)
    table = lay.tile_table(layout, 0, heads=4, batch=1, tile_rows=128, wave=132, order="alternating", causal=True, heads_per_section=4)
    assert (np.diff(lay.unpack(table)[0]) <= 0).all()


def test_heads() -> None:
    assert lay.head_shards(24, 24, 2) == ((12, 12), (12, 12))
    assert lay.head_shards(7, 7, 2) == ((4, 3), (4, 3))
    assert lay.head_shards(16, 4, 3) == ((8, 4, 4), (2, 1, 1))
    assert lay.head_shards(16, 4, 2, (12, 4)) == ((12, 4), (3, 1))
    with pytest.raises(XStageError, match="multiples of 4"):
        lay.head_shards(16, 4, 2, (10, 6))
    with pytest.raises(XStageError, match="kv_heads"):
        lay.head_shards(5, 2, 2)


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(XStageError, match="no rows"):
        SequenceLayout.shards([0, 0])
    with pytest.raises(XStageError, match="start at row 0"):
        SequenceLayout((Segment(1, 4, 0, 0),), 1)
    with pytest.raises(XStageError, match="not in 0"):
        SequenceLayout((Segment(0, 4, 2, 0),), 2)
    with pytest.raises(XStageError, match="no segment or by two"):
        SequenceLayout((Segment(0, 4, 0, 1),), 1)
    with pytest.raises(XStageError, match="before"):
        SequenceLayout.with_text([4], [2], "inside")
    with pytest.raises(XStageError, match="order"):
        lay.tile_table(SequenceLayout.even(4, 1), 0, heads=1, batch=1, tile_rows=64, wave=1, order="random")
    with pytest.raises(XStageError, match="query blocks"):
        lay.tile_table(SequenceLayout.even(64 * 9000, 1), 0, heads=1, batch=1, tile_rows=64, wave=1, order="plain")
