"""The mean SM clock: what is made of two reads, how a difference of times comes apart, and the kernel that reads, compiled for sm_90a.

Not covered: that a GPU's clocks say so.
"""

from __future__ import annotations

import machine_code
import pytest
import torch
from emulated_memory import Memory
from machine_code import needs_compiler
from ptx_interpreter import Grid, run, translate

from xstage.bench.timing import Times, apart, mean_clock_mhz
from xstage.errors import XStageError


def test_the_median_sm_counts_and_its_first_read() -> None:
    before = [[0, 1_000, 0], [1, 50, 10], [2, 7, 10], [0, 9_999_999, 500], [5, 1, 1]]
    after = [[2, 7 + 1_500, 1_010], [1, 50 + 1_700, 1_010], [0, 1_000 + 1_900, 1_000], [6, 5, 5]]
    assert mean_clock_mhz(before, after) == pytest.approx(1_700)  # SMs 0, 1, 2: 1,900, 1,700, 1,500 cycles in 1,000 ns
    with pytest.raises(XStageError, match="0 SMs"):
        mean_clock_mhz([[0, 1, 1]], [[1, 2, 2]])
    with pytest.raises(XStageError, match="1 SMs were read twice, 0 ns"):
        mean_clock_mhz([[0, 1, 1]], [[0, 2, 1]])


def times(ns: list[list[float]], mhz: list[list[float]] | None) -> Times:
    return Times(ns, [[None] * len(rounds) for rounds in ns], 1, mhz)


def test_a_difference_comes_apart_into_clock_and_cycles() -> None:
    """Rank 1 is slower with the first; its clock drifts from round to round, and what is lost within a round does not."""
    base_ghz, cycles = [1.9, 1.8, 1.6], 1.8e6
    slower_ghz, more = [0.99 * f for f in base_ghz], 9_000.0
    base = times([[9e5] * 3, [cycles / f for f in base_ghz]], [[1900.0] * 3, [1e3 * f for f in base_ghz]])
    slower = times([[9.1e5] * 3, [(cycles + more) / f for f in slower_ghz]], [[1900.0] * 3, [1e3 * f for f in slower_ghz]])
    found = apart(slower, base)
    assert found is not None
    assert found.rank == 1
    assert found.cycles == pytest.approx(more)
    assert found.clock_ns == pytest.approx(1e6 * (1 / 0.99 - 1))
    assert found.cycles_ns == pytest.approx(more / 1.8 / 0.99)
    assert found.total_ns == pytest.approx(found.clock_ns + found.cycles_ns)
    assert (found.clock_mhz, found.base_clock_mhz) == pytest.approx((1782, 1800))
    assert apart(slower, times(base.time_ns, None)) is None
    assert apart(times(slower.time_ns, None), base) is None


def test_the_record_has_clocks_only_where_they_were_measured() -> None:
    assert times([[1.0]], [[1755.0004]]).to_json() == {**times([[1.0]], None).to_json(), "mean_clock_mhz": [[1755.0]]}
    assert "mean_clock_mhz" not in times([[1.0]], None).to_json()


@needs_compiler
def test_the_kernel_reads_cycles_and_time_together() -> None:
    from xstage.bench.clock_sm90 import FIELDS, compiled_clock_kernel

    code = machine_code.of(compiled_clock_kernel())
    ptx = code["ptx"]
    assert ".target sm_90a" in ptx
    assert FIELDS == 3
    lines = [line.split()[-1] for line in ptx.splitlines() if "%clock64" in line or "%globaltimer" in line]
    assert lines == ["%clock64;", "%globaltimer;"]
    start = code["sass"].index("SR_CLOCKLO")
    assert code["sass"].index("SR_GLOBALTIMERLO") > start
    assert not any(word in code["sass"][start : code["sass"].index("SR_GLOBALTIMERLO")] for word in ("STG", "LDC", "LDG"))


@needs_compiler
def test_every_cta_writes_a_row_of_its_own() -> None:
    from xstage.bench.clock_sm90 import FIELDS, compiled_clock_kernel

    # The interpreter has no SMs and no cycles: constants stand for them.
    ptx = machine_code.content(compiled_clock_kernel().__ptx__).decode().replace("%smid", "77").replace("%clock64", "88")
    memory, ctas = Memory(1 << 16), 5
    address = memory.put(torch.zeros(ctas, FIELDS, dtype=torch.int64))
    run([[Grid(translate(ptx), ctas=ctas, arguments=[address], memory=memory)]])
    rows = memory.get(address, (ctas, FIELDS), torch.int64).tolist()
    assert [row[:2] for row in rows] == [[77, 88]] * ctas
    assert all(row[2] > 0 for row in rows)
