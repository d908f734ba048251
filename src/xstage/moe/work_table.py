"""Which tile of a grouped GEMM comes when: the order of work of kernels that run as clusters of two CTAs.

A tile is `TILE_ROWS` rows of one expert times `TILE_COLUMNS` columns of its weight. An entry of the table is two words, the tile of CTA 0
and that of CTA 1, each m_tile << 12 | n_tile << 1 | shares_a (bit 11 is free for a layer):

* Two successive m tiles of one expert are a *unit*: its entries are (m, n) and (m + 1, n), the CTAs share the weight, `shares_a` is 0.
* An odd last m tile of an expert is a *single* unit: its entries are (m, n) and (m, n + 1) for even n, the CTAs share the rows,
  `shares_a` is 1.

Units are numbered expert after expert. `GROUP_UNITS` successive units are a group; inside a group n runs outermost, then the units, so
that a group's rows and a column of weights stay in the L2 cache while they are used. Single units come at even n only.

The position of an entry has a closed form (`entries`, `place`), which the kernel that makes the table on the device uses, one thread per
unit; `work_table` says the same by counting, and tests hold them together. Nothing here imports torch.

Both layers in one kernel (`WorkOrder`): the entries of both tables stand in one list, and clusters take the next one that nobody has taken
(`gemm_sm90` has the argument why that cannot deadlock). Its order is `xstage.tile_order`'s rule for one instance, with entries for tiles:
the next Linear-2 entry comes as soon as as many Linear-1 entries stand before it as it asks for, its *reach* (`taken`). So Linear-2 entry
k2 stands at k2 + reach, and Linear-1 entry k1 at k1 + the number of Linear-2 entries that reach no further than k1. Both have closed forms,
because the layers' entries stand in the ratio columns1 : columns2 in every group. An order is a table of reaches:

* `interleaved`: k2 · columns1 // columns2 + lead. Linear-2 follows Linear-1 at a fixed distance, in proportion, to the end (Algorithm 1
  with row tiles for rows; the lead is D · columns1 / 2 entries).
* `alternating`: at least k2 + lead: after a warm-up one to one, whatever the proportion.
* `expert_wave`: the end of the wave, whole groups of units that make about two rounds of Linear-1 tiles.
* `linear1_first`: the end of Linear-1.

The lead is at least a group of Linear-1 entries, and so is what `alternating` adds to the proportion: then every reach lies behind all
Linear-1 entries of its group, hence of its row tile.

An entry of the list is four words (`work_list`): the tile of CTA 0 with the layer in bit 11, from which that of CTA 1 follows (`partner`);
how many Linear-1 entries there are up to here, itself included; the expert; the end of the expert's real rows. So one load says all that
a cluster needs to know.

Not covered: odd numbers of column tiles, clusters of another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xstage.tile_order import LINEAR1, LINEAR2, NO_LAG, takes_linear2

TILE_ROWS, TILE_COLUMNS, GROUP_UNITS = 128, 256, 8
MAX_COLUMN_TILES, MAX_ROW_TILES = 1 << 10, 1 << 19
ROW_SHIFT, LAYER_SHIFT, COLUMN_MASK = 12, 11, MAX_COLUMN_TILES - 1  # of a word
ORDERS = ("interleaved", "alternating", "expert_wave", "linear1_first")
NEVER = 1 << 30  # more entries than there are
STAGES = 4  # of the ring through which a CTA loads its tiles: as many as fit
# Of the kernel of both layers with weights in MXFP4 (`gemm_sm90`), by rows of an expert on average: up to so many it is swapped, up to so
# many narrow, as few experts have more than the 64 that it takes at once; from so many on most have two row tiles, for which a
# split one decodes a weight once.
FORMS = ("wide", "split", "narrow", "swapped")
SWAPPED_ROWS, NARROW_ROWS, SPLIT_ROWS = 28, 48, 128
TAKEN_BEFORE = 6  # stages: with so many of a tile left to load, its cluster takes the next entry


def form_of(rows: float, forms: Sequence[str]) -> str:
    """Of these forms the one for experts of so many rows on average."""
    ranges = (("swapped", 0, SWAPPED_ROWS), ("narrow", 0, NARROW_ROWS), ("split", SPLIT_ROWS, NEVER))
    return next((form for form, least, most in ranges if form in forms and least <= rows <= most), "wide")


def encoded(m_tile: Any, n_tile: Any, shares_a: Any) -> Any:
    """One word of an entry. Numbers or the kernel language's."""
    return m_tile << ROW_SHIFT | n_tile << 1 | shares_a


def decoded(word: int) -> tuple[int, int, int]:
    """(m_tile, n_tile, shares_a)."""
    return word >> ROW_SHIFT, word >> 1 & COLUMN_MASK, word & 1


def partner(word: Any) -> Any:
    """The tile of CTA 1 in the entry in which CTA 0 has `word`: the next column tile where they share the rows, else the next row tile."""
    return word + (1 << ROW_SHIFT) - (word & 1) * ((1 << ROW_SHIFT) - 2)


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
    """In which order the entries of both layers are taken.

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
        if self.name == "linear1_first":
            return [NEVER]
        if self.name == "alternating":
            return [proportion + GROUP_UNITS * self.columns1, k2 + self.lead]
        return [proportion + self.lead]

    def passed(self, k1: Any, wave_start: Any) -> list[Any]:
        """Linear-2 entries before Linear-1 entry k1: the smallest of these, at least 0, at most all; those whose reach is at most k1.

        wave_start: of the entry's wave, in Linear-2. Divisions may round either way below 0.
        """
        if self.name == "expert_wave":
            return [wave_start]
        if self.name == "linear1_first":
            return [0]
        if self.name == "alternating":
            return [self._in_proportion(k1 + 1 - GROUP_UNITS * self.columns1), k1 + 1 - self.lead]
        return [self._in_proportion(k1 + 1 - self.lead)]

    def _in_proportion(self, k1: Any) -> Any:
        """Linear-2 entries k2 with k2 · columns1 // columns2 < k1."""
        return (k1 * self.columns2 + (self.columns1 - 1)) // self.columns1


def reaches(tiles: Sequence[int], order: WorkOrder) -> list[int]:
    """Reach of every Linear-2 entry, by counting."""
    units = [single for count in tiles for single in [False] * (count // 2) + [True] * (count % 2)]
    table = []
    for unit in range(0, len(units), order.wave_units):
        before, here = units[:unit], units[: unit + order.wave_units]
        end1 = entries(len(here), sum(here), order.columns1)
        for k2 in range(*(entries(len(u), sum(u), order.columns2) for u in (before, here))):
            table.append(max(order.reach(k2, end1)))
    end = entries(len(units), sum(units), order.columns1)
    return [min(reach, end) for reach in table]


def taken(end1: int, reach: Sequence[int]) -> list[tuple[int, int]]:
    """(layer, entry) of both tables in the order in which they are taken, by the rule. end1: Linear-1 entries."""
    k1 = k2 = 0
    end2, steps = len(reach), []
    while k1 < end1 or k2 < end2:
        if takes_linear2(k1, k2, end1, end2, 1, reach[k2] if k2 < end2 else 0, NO_LAG):
            steps.append((LINEAR2, k2))
            k2 += 1
        else:
            steps.append((LINEAR1, k1))
            k1 += 1
    return steps


def work_list(rows: Sequence[int], order: WorkOrder) -> list[tuple[int, int, int, int]]:
    """The list of both layers' entries, of experts with so many real rows each."""
    tiles = [-(-count // TILE_ROWS) for count in rows]
    tables = {LINEAR1: work_table(tiles, order.columns1), LINEAR2: work_table(tiles, order.columns2)}
    expert = [e for e, count in enumerate(tiles) for _ in range(count)]
    end = [TILE_ROWS * sum(tiles[:e]) + count for e, count in enumerate(rows)]
    found, before = [], 0
    for layer, entry in taken(len(tables[LINEAR1]), reaches(tiles, order)):
        word = tables[layer][entry][0]
        before += layer == LINEAR1
        owner = expert[word >> ROW_SHIFT]
        found.append((word | (layer == LINEAR2) << LAYER_SHIFT, before, owner, end[owner]))
    return found
