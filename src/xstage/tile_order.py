"""Tile orders of a fused two-layer MoE kernel: which Linear-1 or Linear-2 tile an instance takes next.

Notable: every order is the same three integers per step. Tiles of a layer are numbered row by row (a row is one block of tokens
of one expert; a row of layer i has `pairs_i` tiles, so tile k lies in row k // pairs_i). Instance g of G walks both streams with
stride G, holding two cursors k1 and k2, and `takes_linear2` says which stream is next:

    Linear-2 when  k2 < end2  and (k1 >= end1 or (row of k1 >= need[row of k2] and k1 >= k2 + lag)),  else Linear-1.

What differs between orders is the table `need` (the Linear-1 row that must have been reached before a Linear-2 row may start)
and `lag` (in tiles):

    expert-wave   need = end of the wave of the row       all Linear-1 of a wave, then its Linear-2 (public MegaMoE)
    interleaved   need = row + D                          the paper's Algorithm 1
    alternating   need = row + D, lag = warm-up tiles     a warm-up of Linear-1, then one to one
    groups        need = end of the row's group + lead    groups of rows in turns, at most `lead` rows ahead

One definition for all users: the functions of the first part are integer arithmetic without allocation, containers or exceptions,
so that plain Python, numba and a CuTe DSL kernel run the same source. `&` and `|` stand for `and` and `or` there because a DSL
cannot overload the latter.

Why no order can deadlock: give Linear-1 tile k the key k and Linear-2 tile k the key max(need·pairs_1, k + lag) − ½. Since `need`
rises with the row, every instance emits its tiles in rising key, and since need > row every Linear-2 tile has a larger key than
all Linear-1 tiles of its row. So the order by key contains every instance's own order and every dependency: whatever tile has
the smallest key among the unfinished ones can always run, for any number of instances, provided that they are all resident.
`global_order` returns it. D = 0 breaks this (an instance would wait for a tile that it has yet to emit) and is refused.

A kernel that draws tiles from a counter in memory needs no strides: its order is the global order.

Not covered: splits along K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LINEAR1, LINEAR2 = 1, 2
NO_LAG = -(1 << 30)


# ---- cursor steps: integers only, shared with kernels ---------------------------------------------------------------------


def takes_linear2(k1: int, k2: int, end1: int, end2: int, pairs1: int, need_row: int, lag: int) -> bool:
    """True when the next tile is a Linear-2 tile (lines 6 and 9 of Algorithm 1, for every order).

    Args:
        k1, k2: cursors. end1, end2: tiles of each stream. pairs1: Linear-1 tiles per row.
        need_row: need[k2 // pairs2] (any value when k2 >= end2). lag: tiles by which k1 must lead k2, NO_LAG for none.
    """
    return (k2 < end2) & ((k1 >= end1) | ((k1 // pairs1 >= need_row) & (k1 >= k2 + lag)))


def tile_row(k: int, pairs: int) -> int:
    """Row p of tile k: ⌊k / P⌋."""
    return k // pairs


def tile_column(k: int, pairs: int, ctas: int, role: int) -> int:
    """Column n of tile k for one CTA of a cluster: n = c·(k mod P) + r with c CTAs (2 for pairs) and role r."""
    return ctas * (k % pairs) + role


def interleaved_need(row: int, lead_rows: int) -> int:
    """need[row] of the interleaved order: p + D. Where that is `rows` or more, `takes_linear2` waits for the end of Linear-1."""
    return row + lead_rows


# ---- orders -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileOrder:
    """A tile order over `rows` rows.

    Attributes:
        name: for people. need: per row, the Linear-1 row to reach first (rising, row < need ≤ rows). pairs1, pairs2: tiles per
        row and layer (a tile is what one instance does in one step). lag: see `takes_linear2`.
    """

    name: str
    need: tuple[int, ...]
    pairs1: int
    pairs2: int
    lag: int = NO_LAG

    @property
    def rows(self) -> int:
        return len(self.need)

    @property
    def tiles(self) -> int:
        """Tiles of both layers."""
        return self.rows * (self.pairs1 + self.pairs2)

    def instance(self, index: int, instances: int) -> list[tuple[int, int]]:
        """The tiles of one instance in order, as (layer, k): what Algorithm 1 emits for instance `index` of `instances`."""
        end1, end2 = self.rows * self.pairs1, self.rows * self.pairs2
        k1 = k2 = index
        emitted = []
        while k1 < end1 or k2 < end2:
            need_row = self.need[k2 // self.pairs2] if k2 < end2 else 0
            if takes_linear2(k1, k2, end1, end2, self.pairs1, need_row, self.lag):
                emitted.append((LINEAR2, k2))
                k2 += instances
            else:
                emitted.append((LINEAR1, k1))
                k1 += instances
        return emitted

    def global_order(self) -> list[tuple[int, int]]:
        """All tiles in one order that holds every instance's order and every dependency (see the module's text)."""
        end1 = self.rows * self.pairs1
        order: list[tuple[int, int]] = []
        done1 = 0
        for k2 in range(self.rows * self.pairs2):
            reach = min(max(self.need[k2 // self.pairs2] * self.pairs1, k2 + self.lag), end1)
            order += [(LINEAR1, k) for k in range(done1, reach)]
            done1 = max(done1, reach)
            order.append((LINEAR2, k2))
        return order + [(LINEAR1, k) for k in range(done1, end1)]

    def live_rows(self, instances: int) -> int:
        """Largest number of rows between the first one whose Linear-2 is unfinished and the last one whose Linear-1 has begun.

        Over the global order, with up to `instances` tiles under way at once (a tile counts as finished when `instances` further
        tiles were emitted). The ring that holds Linear-1 outputs needs at least this many rows.
        """
        most = first = last = 0
        finished = [0] * self.rows
        order = self.global_order()
        for position, (layer, k) in enumerate(order):
            if position >= instances:
                old_layer, old = order[position - instances]
                if old_layer == LINEAR2:
                    finished[old // self.pairs2] += 1
                    while first < self.rows and finished[first] == self.pairs2:
                        first += 1
            if layer == LINEAR1:
                last = max(last, k // self.pairs1 + 1)
                most = max(most, last - first)
        return most


def expert_wave(rows_per_expert: Sequence[int], pairs1: int, pairs2: int, experts_per_wave: int) -> TileOrder:
    """Waves of `experts_per_wave` local experts: all Linear-1 tiles of a wave, then all its Linear-2 tiles (section 2.2)."""
    _check(pairs1, pairs2, experts_per_wave=experts_per_wave)
    need: list[int] = []
    for first in range(0, len(rows_per_expert), experts_per_wave):
        count = sum(rows_per_expert[first : first + experts_per_wave])
        need += [len(need) + count] * count
    return TileOrder("expert-wave", tuple(need), pairs1, pairs2)


def interleaved(rows: int, pairs1: int, pairs2: int, lead_rows: int) -> TileOrder:
    """Algorithm 1: Linear-2 as soon as its row is `lead_rows` (D ≥ 1) behind Linear-1's row, else Linear-1."""
    _check(pairs1, pairs2, lead_rows=lead_rows)
    return TileOrder("interleaved", tuple(min(interleaved_need(p, lead_rows), rows) for p in range(rows)), pairs1, pairs2)


def alternating(rows: int, pairs1: int, pairs2: int, lead_rows: int, instances: int) -> TileOrder:
    """A warm-up of Linear-1 through `lead_rows` rows, then Linear-2 and Linear-1 strictly one to one while both last.

    Where a Linear-2 row has fewer tiles than a Linear-1 row, one to one would overtake the dependency; the row condition then
    inserts further Linear-1 tiles.
    """
    _check(pairs1, pairs2, lead_rows=lead_rows, instances=instances)
    warm_up = -(-lead_rows * pairs1 // instances) * instances
    need = tuple(min(p + 1, rows) for p in range(rows))
    return TileOrder("alternating", need, pairs1, pairs2, warm_up)


def lead_limited_groups(rows: int, pairs1: int, pairs2: int, group_rows: int, lead_rows: int = 0) -> TileOrder:
    """Groups of `group_rows` rows whatever their expert; a group's Linear-2 starts `lead_rows` rows past its own Linear-1."""
    _check(pairs1, pairs2, group_rows=group_rows)
    if lead_rows < 0:
        raise ValueError(f"lead_rows: {lead_rows} must be at least 0")
    return TileOrder("groups", tuple(min((p // group_rows + 1) * group_rows + lead_rows, rows) for p in range(rows)), pairs1, pairs2)


def experts_per_wave(expected_rows: float, pairs1: int, instances: int, experts: int, imbalance: int = 2) -> int:
    """Wave size by expected load as public MegaMoE does: as many experts as fill `imbalance` rounds of Linear-1 tiles.

    Args:
        expected_rows: rows an expert is expected to have (tokens · top-k / experts / tile rows, rounded up by the caller or not).
    """
    tiles = max(1, math.ceil(expected_rows)) * pairs1
    return max(1, min(experts, -(-imbalance * instances // tiles)))


# ---- closed forms of section 4.2 ---------------------------------------------------------------------------------------------


def lead_knee(tile_columns: int, sms: int, intermediate: int) -> int:
    """D_knee = ⌈b_n·K_SM / (2·h_inter)⌉ rows.

    One stride of all SMs spans that many Linear-1 rows (a row has 2·h_inter/b_n tiles). SMs that emit a step at the same time are
    up to one stride apart in the stream, so a shorter lead asks for rows that other SMs have only begun. A lower bound on D.
    """
    return -(-tile_columns * sms // (2 * intermediate))


def mixed_injection_rate(
    burst_bytes: float, issue_floor_ns: float, mma_l1_ns: float, mma_l2_ns: float, tiles_l1: float, tiles_l2: float
) -> float:
    """Left side of the rate test (14), n₂V / (n₂(T_iss⁰ + T_L2) + n₁T_L1), in bytes/ns; interleaving is enough when it is ≤ R."""
    return tiles_l2 * burst_bytes / (tiles_l2 * (issue_floor_ns + mma_l2_ns) + tiles_l1 * mma_l1_ns)


def interleaved_backpressure_ns(wave_backpressure_ns: float, mma_l1_ns: float, tiles_l1: float, tiles_l2: float) -> float:
    """Equation (13): ΔT_int = [ΔT_wave − (n₁/n₂)·T_L1]₊ in ns."""
    return max(0.0, wave_backpressure_ns - tiles_l1 / tiles_l2 * mma_l1_ns)


def staging_stall_ns(store_span_ns: float, cover_ns: float) -> float:
    """Equation (15): Δt = [T_RS − T_cover]₊ in ns; the cover is the mainloop of the tile that really follows."""
    return max(0.0, store_span_ns - cover_ns)


# ---- order checks ------------------------------------------------------------------------------------------------------------


def check_order(order: TileOrder, instances: int) -> str:
    """An empty string when the order is sound for `instances` instances, else one line that says what is broken.

    Checks: every tile exactly once over the instances and in the global order; the global order contains each instance's; no
    Linear-2 tile before a Linear-1 tile of its row; `need` rises and lies above its row.
    """
    for row, need in enumerate(order.need):
        if not row < need <= order.rows:
            return f"row {row}: need {need} must be above the row and at most {order.rows}"
        if row and need < order.need[row - 1]:
            return f"row {row}: need {need} falls below that of the row before, {order.need[row - 1]}"
    whole = order.global_order()
    position = {tile: i for i, tile in enumerate(whole)}
    if len(position) != len(whole) or len(whole) != order.tiles:
        return f"global order: {len(whole)} tiles, {len(position)} distinct, {order.tiles} expected"
    last1 = [-1] * order.rows
    for (layer, k), i in position.items():
        if layer == LINEAR1:
            last1[k // order.pairs1] = max(last1[k // order.pairs1], i)
    for (layer, k), i in position.items():
        if layer == LINEAR2 and i < last1[k // order.pairs2]:
            return f"Linear-2 tile {k} comes before a Linear-1 tile of its row {k // order.pairs2}"
    seen: set[tuple[int, int]] = set()
    for g in range(instances):
        tiles = order.instance(g, instances)
        places = [position.get(tile, -1) for tile in tiles]
        if places != sorted(places) or -1 in places:
            return f"instance {g}: its tiles are not in the global order"
        if seen.intersection(tiles) or len(set(tiles)) != len(tiles):
            return f"instance {g}: a tile is emitted twice"
        seen.update(tiles)
    if len(seen) != order.tiles:
        return f"{order.tiles - len(seen)} tiles are emitted by no instance"
    return ""


def _check(pairs1: int, pairs2: int, **at_least_one: int) -> None:
    for name, value in {"pairs1": pairs1, "pairs2": pairs2, **at_least_one}.items():
        if value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
