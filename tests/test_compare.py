"""Comparing platforms: the rule itself, that known differences are found and equal machines are not accused, refusals.

All platforms are SYNTHETIC. Not covered: drifts inside one run, which the samples do not show.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import synthetic

from xstage.bench.compare import FASTER, SAME, SLOWER, TOLERANCE, UNCERTAIN, Row, compare, text, to_json, verdict, worst
from xstage.errors import XStageError
from xstage.platform import KiB, Platform
from xstage.samples import select

QUIET = 0.003


@pytest.fixture(scope="module")
def base() -> Platform:
    return synthetic.platform(1, noise=QUIET)


def verdicts(rows: list[Row], quantity: str) -> set[str]:
    found = {r.verdict for r in rows if r.quantity == quantity}
    assert found
    return found


@pytest.mark.parametrize("seed", [2, 3])
def test_equal_machines_are_the_same(base: Platform, seed: int) -> None:
    rows = compare(base, synthetic.platform(seed, noise=QUIET))
    assert {r.verdict for r in rows} == {SAME}
    assert worst(rows) == SAME
    assert all(abs(r.ratio - 1) < r.tolerance and r.low <= r.ratio <= r.high for r in rows)


def test_every_quantity_method_and_direction_has_a_row(base: Platform) -> None:
    rows = compare(base, base)
    for method in ("st_global", "bulk"):
        for quantity in TOLERANCE:
            for rank in (0, 1):
                assert [r for r in rows if (r.quantity, r.method, r.direction) == (quantity, method, f"rank {rank} sends")]
        assert [r for r in rows if (r.quantity, r.method, r.direction) == ("drain rate", method, "both at once")]
    assert all(r.producers == 132 for r in rows)


def test_values_are_those_the_samples_were_drawn_from(base: Platform) -> None:
    rows = [r for r in compare(base, base) if r.method == "st_global"]
    assert all(r.a == r.b and r.ratio == 1 for r in rows)
    for r in rows:
        if r.quantity == "drain rate" and r.direction != "both at once":
            assert r.a == pytest.approx(372, rel=0.01)
        elif r.quantity == "drain rate":
            assert r.a == pytest.approx(372 / 1.02, rel=0.01)
        elif r.quantity == "capacity":
            assert r.a == pytest.approx(132 * 26 * KiB, rel=0.02)
        elif r.quantity == "knee":
            assert r.a / KiB == pytest.approx(27, abs=0.8)
    floors = [r for r in rows if r.quantity == "issue floor" and r.direction == "rank 0 sends"]
    assert [r.sizes for r in floors] == [(2 * KiB, 8 * KiB), (12 * KiB, 16 * KiB)]
    assert floors[0].a == pytest.approx((80 + 80 + 20 / 3 + 100) / 3, rel=0.02)


CHANGES = [
    ({"rate": 350.0}, "drain rate", SLOWER), ({"rate": 395.0}, "drain rate", FASTER),
    ({"capacity_per_producer": 22 * KiB}, "capacity", SLOWER),
    ({"capacity_per_producer": 30 * KiB}, "capacity", FASTER), ({"capacity_per_producer": 30 * KiB}, "knee", FASTER),
    ({"floor_scale": 1.2}, "issue floor", SLOWER), ({"floor_scale": 0.8}, "issue floor", FASTER),
]  # fmt: skip


@pytest.mark.parametrize(("change", "quantity", "expected"), CHANGES)
def test_a_known_difference_is_found(base: Platform, change: dict[str, float], quantity: str, expected: str) -> None:
    rows = compare(base, synthetic.platform(7, noise=QUIET, **change))  # type: ignore[arg-type]
    assert verdicts(rows, quantity) == {expected}
    assert worst(rows) == expected
    for other in {"drain rate", "capacity", "issue floor"} - {quantity, "capacity" if quantity == "knee" else quantity}:
        assert verdicts(rows, other) == {SAME}


def test_exchange_turns_the_verdict_around(base: Platform) -> None:
    other = synthetic.platform(7, noise=QUIET, rate=350.0)
    there, back = compare(base, other), compare(other, base)
    for one, two in zip(there, back, strict=True):
        assert one.ratio == pytest.approx(1 / two.ratio)
        assert {one.verdict, two.verdict} in ({SAME}, {FASTER, SLOWER})


def test_noise_makes_it_uncertain(base: Platform) -> None:
    rows = compare(base, synthetic.platform(9, noise=0.15))
    assert UNCERTAIN in verdicts(rows, "drain rate")
    assert worst(rows) == UNCERTAIN


def test_too_few_launches_are_uncertain(base: Platform) -> None:
    few = replace(base, samples=tuple(s for s in base.samples if s.bytes_per_producer == 64 * KiB and s.mode == "free" and s.loaded))
    rows = compare(few, synthetic.platform(7, noise=QUIET, rate=200.0))
    assert {r.direction for r in rows} == {"both at once"}
    assert rows[0].launches_a == 6
    fewer = replace(few, samples=tuple(select(few.samples, rank=0)))
    row = compare(fewer, few)[0]
    assert row.launches_a == 3
    assert row.verdict == UNCERTAIN
    assert math.isnan(row.low)


RULE = [
    ((1.0, 0.99, 1.01), SAME), ((1.019, 1.018, 1.0199), SAME), ((1.0, 0.97, 1.01), UNCERTAIN), ((1.03, 1.01, 1.05), FASTER),
    ((0.97, 0.95, 0.99), SLOWER), ((1.015, 1.001, 1.03), UNCERTAIN), ((1.05, 0.99, 1.1), UNCERTAIN), ((2.0, math.nan, math.nan), UNCERTAIN),
]  # fmt: skip


@pytest.mark.parametrize(("numbers", "expected"), RULE)
def test_the_rule(numbers: tuple[float, float, float], expected: str) -> None:
    assert verdict(*numbers, 0.02, True) == expected
    assert verdict(*numbers, 0.02, False) == {FASTER: SLOWER, SLOWER: FASTER}.get(expected, expected)


def test_false_alarms_are_rare() -> None:
    """Five pairs of equal, noisier machines: no row may be called faster or slower by more than chance."""
    machines = [synthetic.platform(20 + i, noise=0.01, repeats=2) for i in range(6)]
    called = [r.verdict for x, y in itertools.pairwise(machines) for r in compare(x, y)]
    assert len(called) >= 90
    assert sum(v in (FASTER, SLOWER) for v in called) <= 2


def test_text_and_json(base: Platform) -> None:
    rows = compare(base, synthetic.platform(7, noise=QUIET, rate=350.0))
    lines = text(rows).splitlines()
    assert lines[0].split()[0] == "quantity"
    assert len(lines) == len(rows) + 1
    assert "GB/s" in lines[1]
    assert "SLOWER" in lines[1]
    assert max(map(len, lines)) < 150
    data = json.loads(json.dumps(to_json(rows), allow_nan=False))
    assert data[0]["verdict"] == "SLOWER"
    assert data[0]["unit"] == "bytes/ns"
    assert to_json([replace(rows[0], low=math.nan)])[0]["low"] is None


def test_refusals(base: Platform, paper: Platform) -> None:
    with pytest.raises(XStageError, match=r"b: platform 'paper-8gpu' \(published\) has no raw samples to compare"):
        compare(base, paper)
    with pytest.raises(XStageError, match="a: platform 'paper-8gpu'"):
        compare(paper, base)
    other = synthetic.platform(1, noise=QUIET, gpu_name="Other GPU")
    with pytest.raises(XStageError, match=r"Other GPU.*Synthetic GPU") as error:
        compare(base, other)
    assert "\n" not in str(error.value)
    assert {r.verdict for r in compare(base, other, allow_different_gpus=True)} == {SAME}
    assert compare(base, replace(base, fingerprint={}))  # a machine that is not named cannot be told apart
    with pytest.raises(XStageError, match="no measured quantity in common"):
        compare(base, replace(base, methods={"st_global": base.methods["st_global"]}, samples=tuple(select(base.samples, method="bulk"))))
