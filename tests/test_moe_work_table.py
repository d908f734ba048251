"""The order of work of a grouped GEMM: every tile once, pairs inside one expert, closed forms against counting,
and an order of both layers in which clusters that take entries one after the other cannot get stuck."""

from bisect import bisect_right
from itertools import accumulate
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from xstage.moe.work_table import (
    FORMS,
    GROUP_UNITS,
    LAYER_SHIFT,
    ORDERS,
    TILE_ROWS,
    WorkOrder,
    decoded,
    encoded,
    entries,
    form_of,
    partner,
    place,
    reaches,
    taken,
    work_list,
    work_table,
)
from xstage.tile_order import LINEAR1, LINEAR2

loads = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), max_size=40)
columns = st.integers(1, 8).map(lambda n: 2 * n)


@settings(max_examples=200, deadline=None)
@given(loads, columns)
def test_every_tile_once_in_pairs_of_one_expert(tiles: list[int], n_tiles: int) -> None:
    table = work_table(tiles, n_tiles)
    words = [decoded(word) for entry in table for word in entry]
    assert len(words) == sum(tiles) * n_tiles
    assert {(m, n) for m, n, _ in words} == {(m, n) for m in range(sum(tiles)) for n in range(n_tiles)}
    assert len({(m, n) for m, n, _ in words}) == len(words)
    ends = list(accumulate(tiles))
    for entry in table:
        (m0, n0, a0), (m1, n1, a1) = (decoded(word) for word in entry)
        assert a0 == a1
        assert partner(entry[0]) == entry[1]
        assert (m1, n1) == ((m0, n0 + 1) if a0 else (m0 + 1, n0))
        assert bisect_right(ends, m0) == bisect_right(ends, m1)
        assert not a0 or n0 % 2 == 0


@settings(max_examples=200, deadline=None)
@given(loads, columns)
def test_closed_form_equals_counting(tiles: list[int], n_tiles: int) -> None:
    # As the kernel does it: prefix sums over experts, then one thread per unit that finds its expert by search.
    tile_first = list(accumulate(tiles, initial=0))
    single_first = list(accumulate((count & 1 for count in tiles), initial=0))
    unit_first = [(t + s) // 2 for t, s in zip(tile_first, single_first, strict=True)]
    units, singles = unit_first[-1], single_first[-1]

    def singles_before(unit: int) -> int:
        return single_first[bisect_right(unit_first, unit) - 1] if unit < units else singles

    table = work_table(tiles, n_tiles)
    assert entries(units, singles, n_tiles) == len(table)
    made: dict[int, tuple[int, int]] = {}
    for unit in range(units):
        expert = bisect_right(unit_first, unit) - 1
        inside = unit - unit_first[expert]
        m = tile_first[expert] + 2 * inside
        single = m + 1 == tile_first[expert + 1]
        first = unit // GROUP_UNITS * GROUP_UNITS
        last = min(first + GROUP_UNITS, units)
        group = first, singles_before(first), last - first, singles_before(last) - singles_before(first)
        for n in range(0, n_tiles, 2 if single else 1):
            index = place(n, unit, singles_before(unit), group, n_tiles)
            assert index not in made
            made[index] = (encoded(m, n, 1), encoded(m, n + 1, 1)) if single else (encoded(m, n, 0), encoded(m + 1, n, 0))
    assert [made[i] for i in range(len(made))] == table


def test_order_by_hand() -> None:
    # Two experts with 3 and 1 tiles: units (0, 1), (2), (3); two column tiles.
    table = [tuple(decoded(word) for word in entry) for entry in work_table([3, 0, 1], 2)]
    assert table == [
        ((0, 0, 0), (1, 0, 0)), ((2, 0, 1), (2, 1, 1)), ((3, 0, 1), (3, 1, 1)),
        ((0, 1, 0), (1, 1, 0)),
    ]  # fmt: skip


orders = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 12), st.sampled_from(ORDERS),
    st.one_of(st.none(), st.integers(0, 100)), st.sampled_from([1, 3, 66]),
)  # fmt: skip


def ordered(case: tuple[list[int], int, int, str, int | None, int]) -> tuple[list[int], WorkOrder]:
    tiles, half1, half2, name, lead_rows, instances = case
    return tiles, WorkOrder.of(name, 2 * half1, 2 * half2, lead_rows=lead_rows, instances=instances)


@settings(deadline=None)
@given(orders)
def test_place_in_the_list_by_closed_form(case: tuple[list[int], int, int, str, int | None, int]) -> None:
    tiles, order = ordered(case)
    singles = [single for count in tiles for single in [False] * (count // 2) + [True] * (count % 2)]
    end1, end2 = (entries(len(singles), sum(singles), columns) for columns in (order.columns1, order.columns2))
    reach = reaches(tiles, order)
    assert reach == sorted(reach)
    made: dict[int, tuple[int, int]] = {k2 + reach[k2]: (LINEAR2, k2) for k2 in range(end2)}
    for first in range(0, len(singles), order.wave_units):
        units = [singles[:first], singles[: first + order.wave_units]]
        wave_start = entries(len(units[0]), sum(units[0]), order.columns2)
        for k1 in range(*(entries(len(u), sum(u), order.columns1) for u in units)):
            made[k1 + max(0, min(end2, *order.passed(k1, wave_start)))] = (LINEAR1, k1)
    assert [made[i] for i in range(end1 + end2)] == taken(end1, reach)


@settings(deadline=None)
@given(orders, st.randoms(use_true_random=False))
def test_no_order_deadlocks(case: tuple[list[int], int, int, str, int | None, int], random: Random) -> None:
    """Clusters take entries in the order of the list, ahead of what they do, and finish them when they can, in any order."""
    tiles, order = ordered(case)
    instances = case[-1]
    listed = work_list([TILE_ROWS * count for count in tiles], order)
    todo, missing = iter(listed), {m: order.columns1 for m in range(sum(tiles))}
    held: list[list[tuple[int, int, int, int]]] = [[] for _ in range(instances)]
    finished = 0
    while finished < len(listed):
        for h in held:
            while len(h) < 2 and (entry := next(todo, None)) is not None:
                h.append(entry)
        able = []
        for h in held:
            if h:
                rows = [decoded(word)[0] for word in (h[0][0], partner(h[0][0]))]
                second = h[0][0] >> LAYER_SHIFT & 1
                if not (second and any(missing[m] for m in rows)):
                    able.append((h, rows, second))
        assert able, "nobody can go on"
        h, rows, second = random.choice(able)
        for m in rows if not second else ():
            missing[m] -= 1
        h.pop(0)
        finished += 1
    assert not any(missing.values())


def test_list_by_hand() -> None:
    # Three row tiles of two experts, the last of 5 rows; two and four column tiles, all of Linear-1 before Linear-2.
    order = WorkOrder.of("expert_wave", 2, 4, lead_rows=None, instances=1)
    pair, alone, second = 0 << 12, 2 << 12 | 1, 1 << LAYER_SHIFT
    assert work_list([256, 5], order) == [
        (pair, 1, 0, 256), (alone, 2, 1, 261), (pair | 1 << 1, 3, 0, 256),
        (pair | second, 3, 0, 256), (alone | second, 3, 1, 261), (pair | second | 1 << 1, 3, 0, 256),
        (pair | second | 2 << 1, 3, 0, 256), (alone | second | 2 << 1, 3, 1, 261), (pair | second | 3 << 1, 3, 0, 256),
    ]  # fmt: skip


def test_interleaving_follows_at_a_distance() -> None:
    order = WorkOrder.of("interleaved", 8, 16, lead_rows=32, instances=66)
    assert (order.lead, order.lead_rows) == (128, 32)
    steps = taken(1024, reaches([4] * 64, order))
    assert [layer for layer, _ in steps[:128]] == [LINEAR1] * 128
    assert [layer for layer, _ in steps[128:137]] == [LINEAR2, LINEAR2, LINEAR1] * 3
    assert WorkOrder.of("interleaved", 8, 16, lead_rows=1, instances=66).lead == GROUP_UNITS * 8


def test_form_by_rows_of_an_expert() -> None:
    rows = (0, 28, 28.1, 48, 48.1, 127, 128, 5000)
    assert [form_of(r, FORMS) for r in rows] == ["swapped", "swapped", "narrow", "narrow", "wide", "wide", "split", "split"]
    # Where there is no such form: spans, or more rows than can be counted by 64.
    assert [form_of(r, ("wide", "split")) for r in rows] == ["wide"] * 6 + ["split"] * 2
    assert {form_of(r, ("wide",)) for r in rows} == {"wide"}
