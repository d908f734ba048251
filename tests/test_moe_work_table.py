"""The order of work of a grouped GEMM: every tile once, pairs inside one expert, closed form against counting."""

from bisect import bisect_right
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from xstage.moe.work_table import GROUP_UNITS, ORDERS, WorkOrder, decoded, encoded, entries, place, reaches, walk, work_table
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


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 12), st.sampled_from(ORDERS),
    st.one_of(st.none(), st.integers(0, 100)), st.sampled_from([1, 3, 66]),
)  # fmt: skip
def test_no_order_deadlocks(tiles: list[int], half1: int, half2: int, name: str, lead_rows: int | None, instances: int) -> None:
    order = WorkOrder.of(name, 2 * half1, 2 * half2, lead_rows=lead_rows, instances=instances)
    first, second, reach = work_table(tiles, order.columns1), work_table(tiles, order.columns2), reaches(tiles, order)
    assert len(reach) == len(second)
    assert reach == sorted(reach)
    walks = [walk(g, instances, len(first), reach) for g in range(instances)]
    steps = [step for w in walks for step in w]
    assert len(steps) == len(set(steps)) == len(first) + len(second)
    # Every cluster goes on as far as it can, in turn; a Linear-2 entry waits for all of its row tiles' Linear-1.
    missing = {m: order.columns1 for m in range(sum(tiles))}
    at = [0] * instances
    moved = True
    while moved:
        moved = False
        for g, w in enumerate(walks):
            while at[g] < len(w):
                layer, k = w[at[g]]
                rows = [decoded(word)[0] for word in (first if layer == LINEAR1 else second)[k]]
                if layer == LINEAR2 and any(missing[m] for m in rows):
                    break
                if layer == LINEAR1:
                    for m in rows:
                        missing[m] -= 1
                at[g] += 1
                moved = True
    assert at == [len(w) for w in walks]


def test_every_cluster_has_its_share_of_both_layers() -> None:
    tiles = [4] * 64
    for name in ORDERS:
        order = WorkOrder.of(name, 8, 16, lead_rows=None, instances=66)
        end1, reach = len(work_table(tiles, 8)), reaches(tiles, order)
        shares = [[layer for layer, _ in walk(g, 66, end1, reach)] for g in range(66)]
        for layer in (LINEAR1, LINEAR2):
            assert max(s.count(layer) for s in shares) - min(s.count(layer) for s in shares) <= 1


def test_interleaving_follows_at_a_distance() -> None:
    order = WorkOrder.of("interleaved", 8, 16, lead_rows=32, instances=66)
    assert (order.lead, order.lead_rows) == (128, 32)
    steps = walk(0, 1, 1024, reaches([4] * 64, order))
    assert [layer for layer, _ in steps[:128]] == [LINEAR1] * 128
    assert [layer for layer, _ in steps[128:137]] == [LINEAR2, LINEAR2, LINEAR1] * 3
    assert WorkOrder.of("interleaved", 8, 16, lead_rows=1, instances=66).lead == GROUP_UNITS * 8
