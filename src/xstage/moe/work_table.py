"""Which tile of a grouped GEMM comes when: the order of work of kernels that run as clusters of two CTAs.

A tile is `TILE_ROWS` rows of one expert times `TILE_COLUMNS` columns of its weight. An entry of the table is two words, the tile of CTA 0
and that of CTA 1, each m_tile << 12 | n_tile << 1 | shares_a (bit 11 is free, `gemm_sm90` names a layer there):

* Two successive m tiles of one expert are a *unit*: its entries are (m, n) and (m + 1, n), the CTAs share the weight, `shares_a` is 0.
* An odd last m tile of an expert is a *single* unit: its entries are (m, n) and (m, n + 1) for even n, the CTAs share the rows,
  `shares_a` is 1.

Units are numbered expert after expert. `GROUP_UNITS` successive units are a group; inside a group n runs outermost, then the units, so
that a group's rows and a column of weights stay in the L2 cache while they are used. Single units come at even n only.

The position of an entry has a closed form (`entries`, `place`), which the kernel that makes the table on the device uses, one thread per
unit; `work_table` says the same by counting, and tests hold them together. Nothing here imports torch.

Both layers of a fused kernel in one list (`WorkOrder`, `merged_table`): entries of Linear-2 carry a bit of their own, and each layer keeps
the order above. An order is the number of Linear-1 entries that come before a Linear-2 entry, its *reach*; columns1 and columns2 stand in
the same ratio as the entries of the layers in every group, so the reach has a closed form too:

* `interleaved`: k · columns1 // columns2 + lead. Linear-2 follows Linear-1 at a fixed distance, in proportion, to the end (Algorithm 1 with
  row tiles for rows; the lead is D · columns1 / 2 entries).
* `alternating`: at least k + lead: after a warm-up one to one, whatever the proportion.
* `expert_wave`: the end of the wave, whole groups of units that make about two rounds of Linear-1 tiles.

The lead is at least a group of Linear-1 entries, and so is what `alternating` adds to the proportion: then every reach lies behind all
Linear-1 entries of its group, hence of its row tile. This is `xstage.tile_order`'s global order with entries for tiles.

Not covered: odd numbers of column tiles, clusters of another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TILE_ROWS, TILE_COLUMNS, GROUP_UNITS = 128, 256, 8
MAX_COLUMN_TILES, MAX_ROW_TILES = 1 << 10, 1 << 19
LINEAR2 = 1 << 11  # the bit of a Linear-2 entry in a list of both layers
ORDERS = ("interleaved", "alternating", "expert_wave")


def encoded(m_tile: Any, n_tile: Any, shares_a: Any) -> Any:
    """One word of an entry. Numbers or the kernel language's."""
    return m_tile << 12 | n_tile << 1 | shares_a


def decoded(word: int) -> tuple[int, int, int]:
    """(m_tile, n_tile, shares_a)."""
    return word >> 12, word >> 1 & 0x3FF, word & 1


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


@dataclass(frozen=True)
class WorkOrder:
    """Which entry of either layer comes next in one list of both.

    Attributes:
        name: one of `ORDERS`. columns1, columns2: column tiles of the layers, even. lead: Linear-1 entries, at least `least_lead`;
            raised to it where it is less. wave_units: units of a wave, a multiple of `GROUP_UNITS`.
    """

    name: str
    columns1: int
    columns2: int
    lead: int = 0
    wave_units: int = GROUP_UNITS

    @classmethod
    def of(cls, name: str, columns1: int, columns2: int, *, lead_rows: int | None, instances: int) -> WorkOrder:
        """By rows of 128 tokens, for `instances` clusters.

        Args:
            lead_rows: D (None: a group and two rounds of the machine, so that what Linear-2 needs is done before it is asked for).
        """
        lead = GROUP_UNITS * columns1 + 2 * instances if lead_rows is None else lead_rows * columns1 // 2
        wave = -(-2 * instances // columns1)
        wave_units = -(-wave // GROUP_UNITS) * GROUP_UNITS
        return cls(name, columns1, columns2, max(lead, GROUP_UNITS * columns1), wave_units)

    @property
    def lead_rows(self) -> int:
        """The lead in rows of 128 tokens."""
        return 2 * self.lead // self.columns1

    def reach(self, k2: Any, wave_end: Any) -> list[Any]:
        """Linear-1 entries before Linear-2 entry k2: the largest of these, and at most all. wave_end: of the entry's wave, in Linear-1."""
        proportion = k2 * self.columns1 // self.columns2
        if self.name == "expert_wave":
            return [wave_end]
        if self.name == "alternating":
            return [proportion + GROUP_UNITS * self.columns1, k2 + self.lead]
        return [proportion + self.lead]

    def passed(self, k1: Any, wave_start: Any) -> list[Any]:
        """Linear-2 entries before Linear-1 entry k1: the least of these (each at least 0), and at most all.

        wave_start: of the entry's wave, in Linear-2. Of a lead l, those with k2 · columns1 // columns2 + l ≤ k1.
        """
        if self.name == "expert_wave":
            return [wave_start]
        lead = GROUP_UNITS * self.columns1 if self.name == "alternating" else self.lead
        # Numerators of both signs: shifted by whole columns2 so that the division rounds the same way everywhere.
        shift = lead // self.columns1 + 1
        proportion = ((k1 - lead + 1 + shift * self.columns1) * self.columns2 + self.columns1 - 1) // self.columns1 - shift * self.columns2
        return [proportion, k1 - self.lead + 1] if self.name == "alternating" else [proportion]


def merged_table(tiles: Sequence[int], order: WorkOrder) -> list[tuple[int, int]]:
    """The list of both layers by counting: `xstage.tile_order`'s rule, one Linear-2 entry as soon as its reach allows."""
    first, second = work_table(tiles, order.columns1), work_table(tiles, order.columns2)
    units = [single for count in tiles for single in [False] * (count // 2) + [True] * (count % 2)]
    ends, end = [], 0
    for unit in range(0, len(units), order.wave_units):
        wave = units[unit : unit + order.wave_units]
        end += entries(len(wave), sum(wave), order.columns1)
        ends.append(end)
    merged, done = [], 0
    for k2, entry in enumerate(second):
        proportional = k2 * order.columns1 // order.columns2
        wave_end = next((e for e in ends if proportional < e), end)
        reach = min(max(order.reach(k2, wave_end)), len(first))
        while done < reach:
            merged.append(first[done])
            done += 1
        merged.append((entry[0] | LINEAR2, entry[1] | LINEAR2))
    return merged + first[done:]
