"""The order of work of a grouped GEMM: every tile once, pairs inside one expert, closed form against counting."""

from bisect import bisect_right
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from xstage.moe.work_table import GROUP_UNITS, LINEAR2, ORDERS, WorkOrder, decoded, encoded, entries, merged_table, place, work_table

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


def merged_by_closed_form(tiles: list[int], order: WorkOrder) -> list[tuple[int, int]]:
    """What the plan kernel does: each entry to the place that the closed forms give."""
    first, second = work_table(tiles, order.columns1), work_table(tiles, order.columns2)
    units = [single for count in tiles for single in [False] * (count // 2) + [True] * (count % 2)]
    waves1, waves2 = [], []  # (start, end) of the wave of every entry
    for columns, waves in ((order.columns1, waves1), (order.columns2, waves2)):
        for unit in range(0, len(units), order.wave_units):
            before, here = units[:unit], units[: unit + order.wave_units]
            span = tuple(entries(len(u), sum(u), order.columns2 if columns == order.columns1 else order.columns1) for u in (before, here))
            waves += [span] * (entries(len(here), sum(here), columns) - entries(len(before), sum(before), columns))
    merged: list[tuple[int, int]] = [(0, 0)] * (len(first) + len(second))
    for k1, entry in enumerate(first):
        merged[k1 + min(len(second), *(max(p, 0) for p in order.passed(k1, waves1[k1][0])))] = entry
    for k2, entry in enumerate(second):
        merged[k2 + min(len(first), max(order.reach(k2, waves2[k2][1])))] = (entry[0] | LINEAR2, entry[1] | LINEAR2)
    return merged


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 12), st.sampled_from(ORDERS),
    st.one_of(st.none(), st.integers(0, 100)), st.sampled_from([1, 3, 66]),
)  # fmt: skip
def test_one_list_of_both_layers(tiles: list[int], half1: int, half2: int, name: str, lead_rows: int | None, instances: int) -> None:
    order = WorkOrder.of(name, 2 * half1, 2 * half2, lead_rows=lead_rows, instances=instances)
    merged = merged_table(tiles, order)
    assert merged_by_closed_form(tiles, order) == merged
    # Each layer in its own order; all of a row tile's Linear-1 before its first Linear-2.
    layers = [[e for e in merged if not e[0] & LINEAR2], [(a ^ LINEAR2, b ^ LINEAR2) for a, b in merged if a & LINEAR2]]
    assert layers == [work_table(tiles, order.columns1), work_table(tiles, order.columns2)]
    last: dict[int, int] = {}
    for position, entry in enumerate(merged):
        for word in entry:
            m, _, _ = decoded(word & ~LINEAR2)
            if word & LINEAR2:
                assert last[m] < position
            else:
                last[m] = position
    for m in last:
        seconds = [p for p, entry in enumerate(merged) if any(w & LINEAR2 and decoded(w & ~LINEAR2)[0] == m for w in entry)]
        assert min(seconds) > last[m]


def test_interleaving_follows_at_a_distance() -> None:
    order = WorkOrder.of("interleaved", 8, 16, lead_rows=32, instances=66)
    assert (order.lead, order.lead_rows) == (128, 32)
    merged = merged_table([4] * 64, order)
    assert [bool(e[0] & LINEAR2) for e in merged[:128]] == [False] * 128
    assert [bool(e[0] & LINEAR2) for e in merged[128:137]] == [True, True, False] * 3
    assert WorkOrder.of("interleaved", 8, 16, lead_rows=1, instances=66).lead == GROUP_UNITS * 8
