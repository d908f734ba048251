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
    pieces, head, entry_batch = lay.unpack(table)
    rows = tile_rows // pieces.shape[1]
    blocks = -(-layout.sequence // rows)
    # As many tiles as without pieces; every piece once per head; what fills up the last tile lies outside of the sequence.
    assert len(table) == -(-layout.sequence // tile_rows) * heads * batch
    assert (pieces <= blocks).all()
    keys = np.stack(np.broadcast_arrays(pieces, head[:, None], entry_batch[:, None]), 2).reshape(-1, 3)
    found = keys[keys[:, 0] < blocks]
    assert len(np.unique(found, axis=0)) == len(found) == blocks * heads * batch
    assert found.max(0).tolist() == [blocks - 1, heads - 1, batch - 1]
    if causal or order != "split":
        assert rows == tile_rows
    # Heads stay together in time, whose keys and values the L2 cache then holds.
    if not causal and order != "own_last":
        assert (np.diff(table[:, 0]) >= 0).all()


@given(layouts(), st.sampled_from([64, 128, 192]), st.data())
def test_split_tiles_share_out_each_destination(layout, tile_rows, data) -> None:  # type: ignore[no-untyped-def]
    """No run of tiles holds more pieces for a rank than its share of the sequence, but for a few that no order can place better."""
    rank = data.draw(st.integers(0, layout.world - 1))
    pieces = lay.unpack(lay.tile_table(layout, rank, heads=1, batch=1, tile_rows=tile_rows, wave=132, order="split"))[0]
    owners = lay.block_owner(layout, tile_rows // pieces.shape[1])
    in_order = owners[pieces.reshape(-1)[: len(owners)]]
    for owner in range(layout.world):
        counts = np.concatenate([[0], np.cumsum(in_order == owner)])
        ahead = counts - counts[-1] * np.arange(len(counts)) / len(owners)
        assert np.abs(ahead).max() <= layout.world / 2 + 0.5


@pytest.mark.parametrize("tile_rows", [128, 192])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_split_tiles_are_alike(world: int, tile_rows: int) -> None:
    """Even shards: every SM sends the same amount in every wave."""
    layout = SequenceLayout.even(world * 192 * 8, world)
    table = lay.tile_table(layout, world - 1, heads=3, batch=2, tile_rows=tile_rows, wave=132, order="split")
    sent = np.concatenate(lay.remote_rows(table, layout, world - 1, tile_rows, 132))
    if tile_rows // lay.piece_rows(tile_rows, world) % world:
        assert sent.max() - sent.min() <= 16
    else:
        assert (sent == tile_rows * (world - 1) // world).all()


def test_pieces_are_as_long_as_the_ranks_allow() -> None:
    assert [lay.piece_rows(128, world) for world in (1, 2, 3, 4, 8, 32)] == [128, 64, 16, 32, 16, 16]
    assert [lay.piece_rows(192, world) for world in (1, 2, 3, 4, 8)] == [192, 32, 64, 16, 16]


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
            (pieces,), (head,), (b,) = lay.unpack(entry[None])
            n = 64 // len(pieces)
            for row in (row for piece in pieces for row in range(n * piece, min(n * piece + n, layout.sequence))):
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


def test_plain_order_is_the_one_of_the_base_kernel() -> None:
    table = lay.tile_table(SequenceLayout.even(512, 2), 0, heads=2, batch=2, tile_rows=128, wave=132, order="plain")
    block, head, batch = lay.unpack(table)
    assert block.tolist() == [[0], [1], [2], [3]] * 4
    assert head.tolist() == ([0] * 4 + [1] * 4) * 2
    assert batch.tolist() == [0] * 8 + [1] * 8


@given(st.integers(2, 8), st.integers(0, 7), st.integers(1, 4))
def test_alternating_spreads_each_destination_over_every_window(world: int, rank: int, heads: int) -> None:
    layout = SequenceLayout.even(world * 128 * 12, world)
    table = lay.tile_table(layout, rank % world, heads=heads, batch=1, tile_rows=128, wave=132, order="alternating")
    owner = lay.block_owner(layout, 128)[lay.unpack(table)[0][:, 0]]
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
    split = lay.tile_table(layout, 0, heads=1, batch=1, tile_rows=128, wave=2, order="split")
    assert sum(sent.sum() for sent in lay.remote_rows(split, layout, 0, 128, 2)) == 200


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


def test_causal_tiles_come_longest_first() -> None:
    layout = SequenceLayout.even(16384, 2)
    table = lay.tile_table(layout, 0, heads=4, batch=1, tile_rows=128, wave=132, order="alternating", causal=True, heads_per_section=4)
    assert (np.diff(lay.unpack(table)[0][:, 0]) <= 0).all()


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
    with pytest.raises(XStageError, match="heads"):
        lay.tile_table(SequenceLayout.even(64, 1), 0, heads=1025, batch=1, tile_rows=64, wave=1, order="plain")
