"""Which rows one rank of the MoE kernel sends in which order, and where the rows of its own experts come from.

A rank's experts lie one behind the other, each padded to a tile of 128 rows; an expert's rows lie by source rank. A sender's list holds
items of up to `ITEM_PAIRS` rows of one expert and one source, in the order in which they are needed (`xstage.moe.send_sm90`).

One rank is planned, and its peers are taken to have the same rows: what this rank sends to a peer at some time is what a peer sends here at
that time. So an item for a peer stands for the item that brings the same rows of this rank from there.

Covered: experts of any load, any share f of rows that come from other ranks, any number of these, tiles with few real rows.
Not covered: ranks of different load; that an expert's rows come from all ranks side by side, as every sender has its own part of them to
send: here they come in the order in which they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xstage.moe.layout import ITEM_PAIRS
from xstage.moe.work_table import TILE_ROWS

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RowPlan:
    """Rows of a rank by tile, and its items in the order of sending.

    Attributes:
        real, remote: rows of a tile that are no padding, and those of them whose results leave the rank. item_tile: tile of an item's first
        row. item_first, item_second: its rows in that tile and in the next. item_remote: it leaves the rank. item_fresh: how many of its
        rows the other rank does not have yet, where it keeps them; an expectation.
    """

    real: Ints
    remote: Ints
    item_tile: Ints
    item_first: Ints
    item_second: Ints
    item_remote: NDArray[np.bool_]
    item_fresh: NDArray[np.float64]

    @property
    def sent_rows(self) -> int:
        """Rows that leave the rank."""
        return int((self.item_first + self.item_second)[self.item_remote].sum())


def row_plan(rows: Sequence[int], share: float, rank: int = 0, ranks: int = 2, picks: int = 1) -> RowPlan:
    """Of a rank whose experts have so many real rows each.

    Args:
        share: f, of an expert's rows that come from other ranks; rounded to whole rows, of which every other rank has an even part.
        rank: of `ranks`, at least 2; so many have their rows before its own.
        picks: of a token, any of which wants its row on a certain other rank with the probability share / (ranks − 1), as likely at one
            of that rank's experts' rows as at another.
    """
    real: list[int] = []
    remote: list[int] = []
    items: list[tuple[int, int, bool]] = []  # first row, rows, leaves the rank
    for count in rows:
        first = TILE_ROWS * len(real)
        far = round(share * count)
        ends = [far * peers // (ranks - 1) for peers in range(ranks)]  # of rows from so many peers
        bounds = [*ends[: rank + 1], *(row + count - far for row in ends[rank:])]  # of the ranks' rows
        begin, end = bounds[rank : rank + 2]
        for at in range(0, count, TILE_ROWS):
            until = min(at + TILE_ROWS, count)
            real.append(until - at)
            remote.append(until - at - max(min(until, end) - max(at, begin), 0))
        for source in range(ranks):
            start, stop = bounds[source], bounds[source + 1]
            items += [(first + at, min(ITEM_PAIRS, stop - at), source != rank) for at in range(start, stop, ITEM_PAIRS)]
    table = np.asarray(items, np.int64).reshape(-1, 3)
    first_row, of_item = table[:, 0], table[:, 1]
    tile = first_row // TILE_ROWS
    here = np.minimum((tile + 1) * TILE_ROWS - first_row, of_item)
    # No other pick of the token at one of the rows before it.
    fresh = of_item * (1 - share / (ranks - 1) * (np.cumsum(of_item) - of_item) / max(sum(rows), 1)) ** (picks - 1)
    return RowPlan(np.asarray(real, np.int64), np.asarray(remote, np.int64), tile, here, of_item - here, table[:, 2] > 0, fresh)
