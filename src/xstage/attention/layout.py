"""Where every row and every tile goes: the one definition used by the host, the kernel's tables, the reference and the tests.

Attention leaves [whole sequence, my heads] on a rank; the exchange makes [my sequence, all heads]. A `SequenceLayout` says for each row of
the whole sequence which rank owns it and which row of that rank's output it becomes: even and uneven shards, text tokens before or
after image tokens, lengths that neither ranks nor tiles divide. `head_shards` does the same for heads.

The kernels themselves know none of this. That of the exchange before attention follows `head_table` (an address per head). That of
attention follows `row_table` (an address per row) and `tile_table` (which tile each CTA computes, in which order), the latter only where
`turns` cannot say the same. The *order of destinations in time* is part of the
design, because stores of one wave of tiles are one burst of the X-Stage (paper, section 4.3, equation 10: a burst should stay below the
capacity Q, of which every SM has its share):

* `plain`: FA4's own order, query blocks fastest. A wave may then go to one peer entirely.
* `alternating`: the destinations of a head's blocks are spread evenly over its tiles, so every wave carries the same share.
* `own_last`: as `alternating`, but each CTA's last tile stays on its own rank as far as earlier waves can take the peers' tiles
  without exceeding the capacity: the drain of the last burst is what a kernel's end cannot hide.
* `own_first`: the tiles of all heads that stay on the rank, then peer by peer those of all heads, each rank beginning with the next one.
  Links that are awake cost long attention clock, however little they carry (docs/attention.md): here they sleep through the first part.
* `remote_first`: all of a head's remote tiles, then its own; the counterexample of the studies.

Causal attention has tiles of unequal length, which come longest first in every order.

Not covered: rows that more than one rank owns (replicated text), schedules that change during a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage.errors import XStageError

# A tile is one non-negative int32: block | head << 13 | batch << 23.
BLOCK_BITS, HEAD_BITS, BATCH_BITS = 13, 10, 8
ORDERS = ("alternating", "plain", "own_last", "own_first", "remote_first")
# Low end of the knee of isolated, aligned bursts of 16-byte stores, 132 producers, two H200: what a wave may send at once.
KNEE_BYTES_PER_SM = 24 * 1024


@dataclass(frozen=True)
class Segment:
    """Rows `start … start + rows` of the whole sequence are rows `local_start …` of `rank`'s output."""

    start: int
    rows: int
    rank: int
    local_start: int


@dataclass(frozen=True)
class SequenceLayout:
    """Owner and place of every row of the whole sequence.

    Attributes:
        segments: in order of `start`, covering the sequence without gaps; per rank they cover its output without gaps.
        world: number of ranks.

    Raises:
        XStageError: the segments do not do that.
    """

    segments: tuple[Segment, ...]
    world: int

    def __post_init__(self) -> None:
        position = 0
        for s in self.segments:
            if s.start != position or s.rows < 1:
                raise XStageError(f"segments: {s} should start at row {position} and have at least one row")
            if not 0 <= s.rank < self.world:
                raise XStageError(f"segments: rank {s.rank} is not in 0 … {self.world - 1}")
            position += s.rows
        if position == 0:
            raise XStageError("segments: the sequence has no rows")
        for rank in range(self.world):
            row = 0
            for s in sorted((s for s in self.segments if s.rank == rank), key=lambda s: s.local_start):
                if s.local_start != row:
                    raise XStageError(f"segments: row {row} of rank {rank}'s output is filled by no segment or by two")
                row += s.rows

    @staticmethod
    def even(sequence: int, world: int) -> SequenceLayout:
        """Contiguous shards whose lengths differ by one at most; the first ranks have the longer ones (`torch.tensor_split`)."""
        return SequenceLayout.shards(split_evenly(sequence, world))

    @staticmethod
    def shards(rows_per_rank: Sequence[int]) -> SequenceLayout:
        """Contiguous shards of the given lengths, rank by rank. A length may be 0."""
        return SequenceLayout._parts([("rows_per_rank", rows_per_rank)])

    @staticmethod
    def with_text(image_rows: Sequence[int], text_rows: Sequence[int], text: str = "before") -> SequenceLayout:
        """Image tokens and text tokens, each sharded over the ranks, text `before` or `after` the image in the whole sequence.

        Each rank's output keeps that order: its text rows, then its image rows, or the other way round.
        """
        parts = [("text_rows", text_rows), ("image_rows", image_rows)]
        if text not in ("before", "after"):
            raise XStageError(f"text: {text!r} is not 'before' or 'after'")
        if len(image_rows) != len(text_rows):
            raise XStageError(f"text_rows: has {len(text_rows)} ranks, image_rows has {len(image_rows)}")
        return SequenceLayout._parts(parts if text == "before" else parts[::-1])

    @staticmethod
    def from_flat(numbers: Sequence[int], world: int) -> SequenceLayout:
        """Inverse of `flat`."""
        return SequenceLayout(tuple(Segment(*numbers[i : i + 4]) for i in range(0, len(numbers), 4)), world)

    @staticmethod
    def _parts(parts: Sequence[tuple[str, Sequence[int]]]) -> SequenceLayout:
        world = len(parts[0][1])
        segments, start, filled = [], 0, [0] * world
        for name, lengths in parts:
            for rank, rows in enumerate(lengths):
                if rows < 0:
                    raise XStageError(f"{name}: rank {rank} has {rows} rows; the least is 0")
                if rows:
                    segments.append(Segment(start, rows, rank, filled[rank]))
                    start += rows
                    filled[rank] += rows
        return SequenceLayout(tuple(segments), world)

    @property
    def sequence(self) -> int:
        """Rows of the whole sequence."""
        return sum(s.rows for s in self.segments)

    @cached_property
    def local_rows(self) -> tuple[int, ...]:
        """Rows of each rank's output."""
        return tuple(sum(s.rows for s in self.segments if s.rank == rank) for rank in range(self.world))

    @property
    def flat(self) -> list[int]:
        """The segments as plain numbers, for operator schemas."""
        return [n for s in self.segments for n in (s.start, s.rows, s.rank, s.local_start)]

    @cached_property
    def owner(self) -> NDArray[np.int64]:
        """int64 [sequence]: the rank that owns each row."""
        return np.concatenate([np.full(s.rows, s.rank) for s in self.segments])

    @cached_property
    def local_row(self) -> NDArray[np.int64]:
        """int64 [sequence]: the row of its owner's output that each row becomes."""
        return np.concatenate([np.arange(s.local_start, s.local_start + s.rows) for s in self.segments])


def split_evenly(total: int, world: int) -> tuple[int, ...]:
    """`total` in `world` parts that differ by one at most, longer parts first."""
    if total < 1:
        raise XStageError(f"total: {total} is less than 1")
    if world < 1:
        raise XStageError(f"world: {world} is less than 1")
    return tuple(total // world + (rank < total % world) for rank in range(world))


def head_shards(
    heads: int, kv_heads: int, world: int, heads_per_rank: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query heads and key/value heads of each rank. Whole key/value groups stay together.

    Args:
        heads, kv_heads: over all ranks. heads_per_rank: query heads of each rank, or None for an even split (parts differ by one
            group at most where the ranks do not divide them).

    Raises:
        XStageError: the numbers do not fit, or a rank would hold part of a group.
    """
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise XStageError(f"heads: {heads} is not a multiple of kv_heads {kv_heads}")
    group = heads // kv_heads
    if heads_per_rank is None:
        kv = split_evenly(kv_heads, world)
        return tuple(n * group for n in kv), kv
    if len(heads_per_rank) != world or sum(heads_per_rank) != heads or min(heads_per_rank) < 0:
        raise XStageError(f"heads_per_rank: {tuple(heads_per_rank)} are not {world} counts that add up to {heads}")
    if any(n % group for n in heads_per_rank):
        raise XStageError(f"heads_per_rank: {tuple(heads_per_rank)} must be multiples of {group} (query heads per key/value head)")
    return tuple(heads_per_rank), tuple(n // group for n in heads_per_rank)


def row_table(layout: SequenceLayout, bases: Sequence[int], batch: int, row_bytes: int, head_offset_bytes: int) -> NDArray[np.int64]:
    """int64 [batch, sequence]: address at which a row's first own head is stored.

    Rank r's output lies at `bases[r]` as [batch, its rows, all heads, head dim], `row_bytes` per row.
    """
    rows = np.asarray(layout.local_rows, np.int64)[layout.owner]
    place = np.arange(batch, dtype=np.int64)[:, None] * rows + layout.local_row
    return np.asarray(bases, np.int64)[layout.owner] + place * row_bytes + head_offset_bytes


def head_table(
    bases: Sequence[int], heads_per_rank: Sequence[int], head_bytes: int, parts: Sequence[tuple[int, int]] | None = None
) -> NDArray[np.int64]:
    """int64 [heads, 2]: where the first row of a head is stored; the bytes from one row to the next, and the head's number << 32.

    The inverse direction of `row_table`: rank r's heads lie at `bases[r]` as [batch, whole sequence, its heads, head dim], `head_bytes` per
    row of a head.

    Args:
        parts: of each rank's heads, those from … to (None: all of them).
    """
    heads = np.asarray(heads_per_rank, np.int64)
    owner = np.repeat(np.arange(len(heads)), heads)
    number = np.arange(heads.sum())
    within = number - (heads.cumsum() - heads)[owner]
    table = np.stack([np.asarray(bases, np.int64)[owner] + within * head_bytes, heads[owner] * head_bytes | number << 32], 1)
    if parts is None:
        return table
    begin, end = np.asarray(parts, np.int64).T
    return np.asarray(table[(begin[owner] <= within) & (within < end[owner])])


def head_parts(kv_heads_per_rank: Sequence[int], first: int, sender: int | None = None) -> list[list[tuple[int, int]]]:
    """Key/value heads from … to, of each rank, in each part of a call: the first `first` of every rank (fewer where it has fewer), then the
    rest. One part where `first` is 0 or the rest is nothing.

    Args:
        sender: of what this rank sends. Its own heads all come in the first part: they take nothing of the link. None: what is attended.
    """
    first_part = [(0, min(first, n)) for n in kv_heads_per_rank]
    rest = [(end, n) for (_, end), n in zip(first_part, kv_heads_per_rank, strict=True)]
    if not first or all(begin == end for begin, end in rest):
        return [[(0, n) for n in kv_heads_per_rank]]
    if sender is not None:
        n = kv_heads_per_rank[sender]
        first_part[sender], rest[sender] = (0, n), (n, n)
    return [first_part, rest]


def sent_bytes(layout: SequenceLayout, rank: int, heads: Sequence[int], kv_heads: Sequence[int], head_bytes: int, batch: int = 1) -> int:
    """Bytes of q, k and v that leave a rank when its rows go to the ranks of their heads.

    Args:
        heads, kv_heads: of each rank. head_bytes: of a row of one head.
    """
    away = sum(heads) - heads[rank] + 2 * (sum(kv_heads) - kv_heads[rank])
    return batch * layout.local_rows[rank] * away * head_bytes


def block_owner(layout: SequenceLayout, tile_rows: int) -> NDArray[np.int64]:
    """int64 [blocks]: the rank that owns most rows of each query block (the lower rank of two with equally many)."""
    blocks = -(-layout.sequence // tile_rows)
    counts = np.zeros((blocks, layout.world), np.int64)
    np.add.at(counts, (np.arange(layout.sequence) // tile_rows, layout.owner), 1)
    return np.asarray(counts.argmax(1))


def tile_table(
    layout: SequenceLayout, rank: int, *, heads: int, batch: int, tile_rows: int, wave: int, order: str, causal: bool = False,
    capacity_tiles: int | None = None, heads_per_section: int = 1,
) -> NDArray[np.int32]:  # fmt: skip
    """int32 [tiles]: the tiles of a rank in the order in which they are issued, one CTA each.

    Args:
        rank: whose table this is. heads: query heads of that rank. tile_rows: query rows per tile.
        wave: CTAs that run at the same time.
        order: one of `ORDERS`; causal tiles come longest first in every order.
        capacity_tiles: remote tiles that one wave can send without a stall, Q / tile bytes (`own_last` only). None: a whole wave.
        heads_per_section: heads whose keys and values fit the L2 cache together (causal order).

    Raises:
        XStageError: unknown order, or more blocks, heads or batches than an entry can hold.
    """
    if order not in ORDERS:
        raise XStageError(f"order: {order!r} is not one of {', '.join(ORDERS)}")
    blocks = -(-layout.sequence // tile_rows)
    for name, value, bits in (("sequence", blocks, BLOCK_BITS), ("heads", heads, HEAD_BITS), ("batch", batch, BATCH_BITS)):
        if value > 1 << bits:
            raise XStageError(f"{name}: {value} {'query blocks' if name == 'sequence' else name}; the limit is {1 << bits}")
    sections = [(b, h) for b in range(batch) for h in range(heads)]
    if causal:
        groups = [sections[i : i + heads_per_section] for i in range(0, len(sections), heads_per_section)]
        return np.asarray([_entry(block, h, b) for group in groups for block in reversed(range(blocks)) for b, h in group], np.int32)
    owners = block_owner(layout, tile_rows)
    tiles = [_entry(block, h, b) for b, h in sections for block in _head_order(owners, rank, layout.world, order)]
    if order == "own_first":
        tiles.sort(key=lambda t: int(owners[t & ((1 << BLOCK_BITS) - 1)] - rank) % layout.world)
    if order == "own_last" and len(tiles) > wave:
        tiles = _own_last(tiles, owners, rank, wave, wave if capacity_tiles is None else capacity_tiles)
    return np.asarray(tiles, np.int32)


def unpack(entry: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """(block, head, batch) of table entries."""
    return entry & ((1 << BLOCK_BITS) - 1), (entry >> BLOCK_BITS) & ((1 << HEAD_BITS) - 1), entry >> (BLOCK_BITS + HEAD_BITS)


def turns(table: NDArray[np.int32], rank: int, *, world: int, heads: int, batch: int) -> tuple[int, int]:
    """(runs, first) if the tile table of `rank` need not be read, else (0, 0).

    Then the i-th of a head's n blocks in time is block `(i + first) % runs * (n / runs) + i // runs`: `runs` runs of the sequence take
    turns. A CTA can compute that from its index; even shards have such an order, `plain` (one run) and `alternating` (one per rank).
    """
    blocks = len(table) // (heads * batch)
    section = np.arange(heads * batch)[:, None]
    i = np.arange(blocks)
    for runs, first in ((1, 0), (world, (rank + 1) % world)):
        if blocks % runs == 0:
            block = (i + first) % runs * (blocks // runs) + i // runs
            if np.array_equal(table, _entry(block, section % heads, section // heads).reshape(-1)):
                return runs, first
    return 0, 0


def remote_rows(table: NDArray[np.int32], layout: SequenceLayout, rank: int, tile_rows: int, wave: int) -> list[NDArray[np.int64]]:
    """Per wave, the rows of each tile that leave the rank: what its CTA sends at once, all of them together if the wave ends together."""
    block = unpack(table)[0]
    before = np.concatenate([[0], np.cumsum(layout.owner != rank)])
    first, last = (np.minimum((block + i) * tile_rows, layout.sequence) for i in (0, 1))
    away = before[last] - before[first]
    return [away[start : start + wave] for start in range(0, len(away), wave)]


def _entry(block: Any, head: Any, batch: Any) -> Any:
    return block | head << BLOCK_BITS | batch << (BLOCK_BITS + HEAD_BITS)


def _head_order(owners: NDArray[np.int64], rank: int, world: int, order: str) -> list[int]:
    blocks = range(len(owners))
    if order == "plain":
        return list(blocks)
    if order == "remote_first":
        return sorted(blocks, key=lambda b: (owners[b] == rank, b))
    # The i-th of n blocks for a destination belongs at (i + 1/2) / n. Ranks start with different peers, so that no peer is
    # everyone's first.
    seen, keys, totals = [0] * world, [], np.bincount(owners, minlength=world)
    for block in blocks:
        owner = int(owners[block])
        keys.append(((seen[owner] + 0.5) / totals[owner], (owner - rank - 1) % world))
        seen[owner] += 1
    return sorted(blocks, key=lambda b: keys[b])


def _own_last(tiles: list[int], owners: NDArray[np.int64], rank: int, ctas: int, capacity_tiles: int) -> list[int]:
    remote = [t for t in tiles if owners[t & ((1 << BLOCK_BITS) - 1)] != rank]
    own = [t for t in tiles if owners[t & ((1 << BLOCK_BITS) - 1)] == rank]
    body = len(tiles) - ctas
    # Remote tiles that the waves before the last can carry; what is left, or has no own tile to trade with, stays in the last.
    early = min(len(remote), body * capacity_tiles // ctas)
    tail_own = min(len(own), ctas - (len(remote) - early))
    early = len(remote) - (ctas - tail_own)
    head = _merge(remote[:early], own[: len(own) - tail_own])
    return head + remote[early:] + own[len(own) - tail_own :]


def _merge(first: list[int], second: list[int]) -> list[int]:
    keyed = [((i + 0.5) / len(part), side, tile) for side, part in enumerate((first, second)) for i, tile in enumerate(part)]
    return [tile for *_, tile in sorted(keyed)]
