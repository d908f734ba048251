"""The grouped GEMMs compile for sm_90a without a GPU; their machine code holds what the design promises.

Asserted: as many matrix instructions as the tile has, none serialised; multicast loads; how results leave; next to nothing spilled
where one layer runs alone. Not covered: that they compute anything (tests/gpu/test_grouped_gemm.py).
"""

import re
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(any(find_spec(n) is None for n in ("cutlass", "triton")), reason="the kernel packages are not installed")


@pytest.mark.parametrize(
    ("kind", "unroll", "option"),
    [("plain", 4, 0), ("plain", 2, 1), ("rows", 4, None), ("swiglu", 4, 7.0), ("swiglu", 2, None), ("both", 4, None)],
)  # fmt: skip
def test_machine_code(kind: str, unroll: int, option: float | None) -> None:
    import machine_code

    from xstage.moe import grouped_gemm

    code = machine_code.of(grouped_gemm.compiled_gemm(kind, unroll, option))["sass"]
    # A round in the loop over K and one per layer that ends a tile, each of `unroll` stages of two halves of four instructions.
    rounds = 3 if kind == "both" else 2
    assert len(re.findall(r"QGMMA\.64x128x32", code)) == rounds * unroll * 8
    assert len(re.findall(r"gsb0", code)) == rounds * unroll * 4, "ptxas serialised the matrix instructions"
    assert "UTMALDG.2D.MULTICAST" in code
    assert len(re.findall(r"STG\.E\.128", code)) == (16 if kind in ("rows", "both") else 0)
    assert ("UTMASTG" in code) == (kind != "rows")
    if kind != "both":
        assert len(re.findall(r"LDL|STL", code)) <= 16
