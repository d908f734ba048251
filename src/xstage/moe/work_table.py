"""Which tile of a grouped GEMM comes when: the order of work of kernels that run as clusters of two CTAs.

A tile is `TILE_ROWS` rows of one expert times `TILE_COLUMNS` columns of its weight. An entry of the table is two words, the tile of CTA 0
and that of CTA 1, each m_tile << 12 | n_tile << 1 | shares_a:

* Two successive m tiles of one expert are a *unit*: its entries are (m, n) and (m + 1, n), the CTAs share the weight, `shares_a` is 0.
* An odd last m tile of an expert is a *single* unit: its entries are (m, n) and (m, n + 1) for even n, the CTAs share the rows,
  `shares_a` is 1.

Units are numbered expert after expert. `GROUP_UNITS` successive units are a group; inside a group n runs outermost, then the units, so
that a group's rows and a column of weights stay in the L2 cache while they are used. Single units come at even n only.

The position of an entry has a closed form (`entries`, `place`), which the kernel that makes the table on the device uses, one thread per
unit; `work_table` says the same by counting, and tests hold them together. Nothing here imports torch.

Not covered: odd numbers of column tiles, clusters of another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TILE_ROWS, TILE_COLUMNS, GROUP_UNITS = 128, 256, 8
MAX_COLUMN_TILES, MAX_ROW_TILES = 1 << 11, 1 << 19


def encoded(m_tile: Any, n_tile: Any, shares_a: Any) -> Any:
    """One word of an entry. Numbers or the kernel language's."""
    return m_tile << 12 | n_tile << 1 | shares_a


def decoded(word: int) -> tuple[int, int, int]:
    """(m_tile, n_tile, shares_a)."""
    return word >> 12, word >> 1 & 0x7FF, word & 1


def entries(units: Any, singles: Any, n_tiles: int) -> Any:
    """Entries of `units` units, of which `singles` are single."""
    return (units - singles) * n_tiles + singles * (n_tiles // 2)


def place(n_tile: Any, unit: Any, singles: Any, group: tuple[Any, Any, Any, Any], n_tiles: int) -> Any:
    """Index of the entry of `unit` at `n_tile`.

    Args:
        singles: single units before `unit`. n_tiles: column tiles, even.
        group: of the unit's group: units before it, single ones before it, its units, its single ones.
    """
    group_first, group_singles_first, group_units, group_singles = group
    before = (n_tile + 1) // 2 * group_units + n_tile // 2 * (group_units - group_singles)  # at even n, at odd n
    here = unit - group_first - (n_tile & 1) * (singles - group_singles_first)
    return entries(group_first, group_singles_first, n_tiles) + before + here


def work_table(tiles: Sequence[int], n_tiles: int) -> list[tuple[int, int]]:
    """The whole table, in order, of experts with `tiles` m tiles each."""
    units, m = [], 0
    for count in tiles:
        units += [(m + i, i + 1 == count) for i in range(0, count, 2)]
        m += count
    table = []
    for first in range(0, len(units), GROUP_UNITS):
        for n in range(n_tiles):
            for m, single in units[first : first + GROUP_UNITS]:
                if not single:
                    table.append((encoded(m, n, 0), encoded(m + 1, n, 0)))
                elif n % 2 == 0:
                    table.append((encoded(m, n, 1), encoded(m, n + 1, 1)))
    return table
