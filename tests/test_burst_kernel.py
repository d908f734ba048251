"""The burst kernel compiles for sm_90a without a GPU, and its PTX is what the measurement is about.

Not covered: that it measures right (tests/gpu).
"""

import re

import pytest

pytest.importorskip("cutlass", reason="the kernel stack is not installed")

from xstage.calibration.burst_kernel import compile_burst_kernel


@pytest.fixture(scope="module", params=["st_global", "bulk"])
def kernel(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param, compile_burst_kernel(request.param).__ptx__


def test_targets_sm_90a_and_keeps_everything_in_registers(kernel: tuple[str, str]) -> None:
    _, ptx = kernel
    assert ".target sm_90a" in ptx
    assert ".local" not in ptx


def test_stores_with_the_method_it_is_named_after(kernel: tuple[str, str]) -> None:
    method, ptx = kernel
    vector, bulk = len(re.findall(r"st\.global\.v4\.b32", ptx)), len(re.findall(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", ptx))
    # One store instruction: the loop is not unrolled, so that a thread runs exactly one store ahead.
    assert (vector, bulk) == ((1, 0) if method == "st_global" else (0, 1))


def test_nothing_in_the_timed_region_waits_for_stores_under_way(kernel: tuple[str, str]) -> None:
    method, ptx = kernel
    issue = "st.global.v4.b32" if method == "st_global" else "cp.async.bulk.global"
    start = ptx.index(issue)
    timed = ptx[ptx.rindex("%clock64", 0, start) : ptx.index("%clock64", start)]
    assert not re.search(r"fence\.acq_rel|membar|\.release\.|\.acquire\.|bulk\.wait_group 0", timed)


def test_a_system_fence_follows_isolated_bursts_and_the_end(kernel: tuple[str, str]) -> None:
    assert kernel[1].count("fence.acq_rel.sys") == 2
