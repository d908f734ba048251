"""The grouped GEMMs compile for sm_90a without a GPU; their machine code holds what the design promises.

Asserted: as many matrix instructions as the tile has, none serialised; multicast loads; how results leave; next to nothing spilled; where
both layers run, one atomic add and one message per entry; a warp that sends rows beside the GEMMs fits into the registers that loading
warps keep. The same where the kernel records spans, whose marks stand where they should; without, math warps read no clock. Not covered:
that they compute anything (tests/gpu/test_grouped_gemm.py).
"""

import re

import machine_code
import pytest
from machine_code import needs_compiler

from xstage.moe.layout import BufferLayout

pytestmark = needs_compiler


@pytest.mark.parametrize(
    ("kind", "unroll", "option", "recorded"),
    [
        ("plain", 4, 0, False), ("plain", 2, 1, False), ("rows", 4, None, False), ("swiglu", 4, 7.0, False), ("swiglu", 2, None, False),
        ("both", 4, None, False), ("both", 4, None, True), ("both", 2, 7.0, True),
    ],
)  # fmt: skip
def test_machine_code(kind: str, unroll: int, option: float | None, recorded: bool) -> None:

    from xstage.moe import grouped_gemm

    code = machine_code.of(grouped_gemm.compiled_gemm(kind, unroll, option, None, recorded))["sass"]
    # A round in the loop over K and one per layer that ends a tile, each of `unroll` stages of two halves of four instructions.
    rounds = 3 if kind == "both" else 2
    assert len(re.findall(r"QGMMA\.64x128x32", code)) == rounds * unroll * 8
    assert len(re.findall(r"gsb0", code)) == rounds * unroll * 4, "ptxas serialised the matrix instructions"
    assert "UTMALDG.2D.MULTICAST" in code
    assert _descriptors_are_uniform(code)
    assert len(re.findall(r"STG\.E\.128", code)) == (16 if kind in ("rows", "both") else 0)
    assert ("UTMASTG" in code) == (kind != "rows")
    assert len(re.findall(r"LDL|STL", code)) <= 16
    # Of both layers: an entry is taken in one place, and sent to both CTAs.
    assert [len(re.findall(name, code)) for name in (r"ATOMG\.E\.ADD", r"STAS\.128")] == ([1, 1] if kind == "both" else [0, 0])


def _descriptors_are_uniform(code: str) -> bool:
    """No register of a thread goes into a descriptor in the loop over K, where its way to a uniform register would hold up wgmma."""
    places = [found.start() for found in re.finditer("QGMMA", code)]
    return "R2UR" not in code[places[0] : places[7]]


def test_marks_stand_around_the_stores_of_linear2() -> None:
    """Of a Linear-2 tile each half's eight stores lie between two readings of the clock, with no matrix instruction among them."""

    from xstage.moe import grouped_gemm

    sass = {recorded: machine_code.of(grouped_gemm.compiled_gemm("both", 4, None, None, recorded))["sass"] for recorded in (False, True)}
    math = {recorded: code[code.index("USETMAXREG.TRY_ALLOC") :] for recorded, code in sass.items()}
    assert "GLOBALTIMER" not in math[False]
    letters = {"SR_GLOBALTIMERLO": "t", "QGMMA": "m", "STG.E.128": "s"}
    order = "".join(letters[found] for found in re.findall("|".join(letters), math[True]))
    # The first half's run under the second half's last matrix instructions.
    assert "mt" + "s" * 8 + "tt" + "s" * 8 + "t" in order
    # A tile's start, and four more in the last round of either layer.
    assert order.count("t") == 1 + 2 * 4


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("sizes", [(2, 512, 4096, 10, 8192), (8, 128, 2048, 8, 4096), (3, 12, 1536, 3, 100)])
def test_sending_fits_into_the_registers_of_loading(sizes: tuple[int, ...], recorded: bool) -> None:

    from xstage.moe import grouped_gemm
    from xstage.moe.gemm_sm90 import LOAD_REGISTERS

    sass = machine_code.of(grouped_gemm.compiled_gemm("both", 4, None, BufferLayout(*sizes, direct=True), recorded))["sass"]
    few, more = (re.findall(rf"USETMAXREG\.{kind}\b", sass) for kind in ("DEALLOC", "TRY_ALLOC"))
    assert (len(few), len(more)) == (1, 1)
    loading = sass[sass.index("USETMAXREG.DEALLOC") : sass.index("USETMAXREG.TRY_ALLOC")]
    assert "UTMALDG" in loading
    assert "QGMMA" not in loading
    # Bulk copies to a peer, and the count of a tile at its owner: this is the part that sends.
    assert "UBLKCP.G.S" in loading
    assert "STG.E.128" not in loading
    assert re.search(r"\bRED\S*\.SYS\b", loading)
    assert not re.search(r"\b(LDL|STL)\b", loading)
    assert max(int(number) for number in re.findall(r"\bR(\d+)\b", loading)) < LOAD_REGISTERS


@pytest.mark.parametrize(("sizes", "recorded"), [((2, 512, 4096, 10, 8192), False), ((3, 12, 1536, 3, 100), True)])
def test_sending_once_fits_into_the_registers_of_loading(sizes: tuple[int, ...], recorded: bool) -> None:

    from xstage.moe import grouped_gemm
    from xstage.moe.gemm_sm90 import LOAD_REGISTERS

    layout = BufferLayout(*sizes, direct=True, once=True)
    sass = machine_code.of(grouped_gemm.compiled_gemm("both", 4, None, layout, recorded))["sass"]
    loading = sass[sass.index("USETMAXREG.DEALLOC") : sass.index("USETMAXREG.TRY_ALLOC")]
    assert len(re.findall(r"UBLKCP\.G\.S", loading)) == 3  # near rows, posts, places
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert max(int(number) for number in re.findall(r"\bR(\d+)\b", loading)) < LOAD_REGISTERS


@pytest.mark.parametrize(
    ("kind", "option", "sizes", "recorded", "form"),
    [
        ("plain", 0, None, False, "wide"), ("rows", None, None, False, "wide"), ("swiglu", 7.0, None, False, "wide"),
        ("both", None, None, False, "wide"), ("both", None, None, False, "split"), ("both", 7.0, None, False, "split"),
        *(("both", None, (2, 512, 4096, 10, 8192), recorded, form) for recorded in (False, True) for form in ("wide", "split")),
    ],
)  # fmt: skip
def test_machine_code_with_codes(kind: str, option: float | None, sizes: tuple[int, ...] | None, recorded: bool, form: str) -> None:
    """Weights in MXFP4: as many matrix instructions, what a cluster shares by multicast, and every warpgroup within its registers."""

    from xstage.moe import decode_sm90, grouped_gemm

    layout = None if sizes is None else BufferLayout(*sizes, direct=True)
    split = form == "split"
    unroll = 4 if split else 2
    code = machine_code.of(grouped_gemm.compiled_gemm(kind, unroll, option, layout, recorded, 0, form))["sass"]
    # Of rounds: in the loop over K, split there with one row tile too, and one per layer.
    products = (2 + split + 2 * (2 if kind == "both" else 1)) * unroll
    assert len(re.findall(r"QGMMA\.64x128x32", code)) == products * 4
    assert len(re.findall(r"gsb0", code)) == products * 2, "ptxas serialised the matrix instructions"
    assert bool(re.findall(r"UBLKCP\S*MULTICAST", code)) != split
    assert "UTMALDG.2D.MULTICAST" in code
    assert _descriptors_are_uniform(code)
    # What the CTAs of a split tile tell each other of a row: its largest element.
    assert len(re.findall(r"\bSTAS(?!\.128)", code)) == split
    starts = [found.start() for found in re.finditer(r"USETMAXREG", code)]
    assert len(starts) == 3
    loading, decoding, math = (code[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True))
    has = (decode_sm90.LOAD_REGISTERS, decode_sm90.DECODE_REGISTERS, decode_sm90.MATH_REGISTERS)
    assert 128 * (has[0] + has[1] + 2 * has[2]) <= 65536
    for part, registers in zip((loading, decoding, math), has, strict=True):
        assert f"0x{registers:x}" in part[: part.index(";")]
        assert max(int(number) for number in re.findall(r"\bR(\d+)\b", part)) < registers
    for part in (loading, decoding):
        assert "QGMMA" not in part
        assert not re.search(r"\b(LDL|STL)\b", part)
    assert "UBLKCP" in loading
    # With tables by multiply-adds and by conversions: 16 words of eight codes a thread, two permutations each.
    tiles = 1 if split else 2  # of a stage
    assert len(re.findall(r"\bPRMT\b", decoding)) >= tiles * 2 * 16 * 2
    assert len(re.findall(r"STS\.128", decoding)) == tiles * 2 * 8
    assert len(re.findall(r"F2FP", decoding)) == tiles * 4 * 4
    # Not in the loop over K: its halves are the first.
    assert not re.search(r"\b(LDL)\b", math[: [found.start() for found in re.finditer("gsb0", math)][2 * (2 + split) * unroll - 1]])
    assert len(re.findall(r"\b(?:LDL|STL)\b", math)) <= 24


def test_short_rounds_of_the_split_kernel() -> None:
    """Where K is no multiple of 512: rounds of two stages of the four."""

    from xstage.moe import grouped_gemm

    layout = BufferLayout(2, 128, 2048, 8, 8192, direct=True)
    [compiled] = [(f, given) for f, given in grouped_gemm.kernels(2048, 768, None, layout, codes=True) if given[-1] == "split"]
    assert compiled[1][1] == 2
    code = machine_code.of(compiled[0](*compiled[1]))["sass"]
    assert len(re.findall(r"QGMMA\.64x128x32", code)) == (3 + 2 * 2) * 2 * 4
    assert len(re.findall(r"gsb0", code)) == (3 + 2 * 2) * 2 * 2
    assert _descriptors_are_uniform(code)
    assert not re.search(r"\b(LDL|STL)\b", code)


@pytest.mark.parametrize("sizes", [None, (2, 512, 4096, 10, 8192), (8, 128, 2048, 8, 512)])
def test_machine_code_of_the_swapped_kernel(sizes: tuple[int, ...] | None) -> None:
    """For experts of few rows: wgmma of every width whose first operand comes from registers, nothing spilled, and no more registers than
    there are."""

    from xstage.moe import grouped_gemm, swapped_sm90

    layout = None if sizes is None else BufferLayout(*sizes, direct=True)
    code = machine_code.of(grouped_gemm.compiled_gemm("both", 2, None, layout, False, 64, "swapped"))["sass"]
    for width in swapped_sm90.WIDTHS:
        # Two stages at a time; where one is decoded ahead, the tile's last two stand apart.
        stages = 4 if width <= swapped_sm90.AHEAD_WIDTH else 2
        assert len(re.findall(rf"QGMMA\.64x{width}x32\S* R\d+, R\d+, gdesc", code)) == stages * 4
    stages = sum(4 if width <= swapped_sm90.AHEAD_WIDTH else 2 for width in swapped_sm90.WIDTHS)
    assert len(re.findall(r"gsb0", code)) == stages * 2, "ptxas serialised the matrix instructions"
    assert not re.search(r"\b(LDL|STL)\b", code)
    starts = [found.start() for found in re.finditer(r"USETMAXREG", code)]
    assert len(starts) == 2
    loading, math = code[starts[0] : starts[1]], code[starts[1] :]
    has = (swapped_sm90.LOAD_REGISTERS, swapped_sm90.MATH_REGISTERS)
    for part, registers in zip((loading, math), has, strict=True):
        assert f"0x{registers:x}" in part[: part.index(";")]
        assert max(int(number) for number in re.findall(r"\bR(\d+)\b", part)) < registers
    assert "QGMMA" not in loading
    assert re.search(r"UBLKCP\S*MULTICAST", loading)
    # What a CTA's threads start with is what there is to share: 65536 registers by 640 threads, in steps of 8.
    assert 128 * (has[0] + swapped_sm90.GROUPS * has[1]) <= 65536 // swapped_sm90.THREADS // 8 * 8 * swapped_sm90.THREADS
    # Neither a release that waits for the cluster nor one of the whole GPU in the loop over K.
    loop = math[math.index("QGMMA.64x8x32") : math.index("QGMMA.64x16x32")]
    assert len(re.findall(r"MEMBAR\.\S*GPU", loop)) == 0


@pytest.mark.parametrize("sizes", [None, (2, 512, 4096, 10, 8192), (8, 128, 2048, 8, 512)])
def test_machine_code_of_the_narrow_kernel(sizes: tuple[int, ...] | None) -> None:
    """No more matrix instructions a warpgroup, nothing spilled, and no more registers than there are."""

    from xstage.moe import decode_sm90, grouped_gemm

    layout = None if sizes is None else BufferLayout(*sizes, direct=True)
    code = machine_code.of(grouped_gemm.compiled_gemm("both", 2, None, layout, False, 64, "narrow"))["sass"]
    assert len(re.findall(r"QGMMA\.64x128x32", code)) == 3 * 2 * 8
    assert len(re.findall(r"gsb0", code)) == 3 * 2 * 4, "ptxas serialised the matrix instructions"
    assert not re.search(r"\b(LDL|STL)\b", code)
    starts = [found.start() for found in re.finditer(r"USETMAXREG", code)]
    assert len(starts) == 2, "the decoding warps keep the registers that they start with"
    rest, math = code[starts[0] : starts[1]], code[starts[1] :]
    has = (decode_sm90.NARROW_LOAD_REGISTERS, decode_sm90.NARROW_MATH_REGISTERS)
    for part, registers in zip((rest, math), has, strict=True):
        assert f"0x{registers:x}" in part[: part.index(";")]
    for part, most in ((rest, 128), (math, has[1])):  # loading, which has fewer than decoding, stands in one part with it
        assert max(int(number) for number in re.findall(r"\bR(\d+)\b", part)) < most
    assert "QGMMA" not in rest
    assert re.search(r"UBLKCP\S*MULTICAST", rest)
    assert 128 * (sum(has) + 2 * 128) <= 65536
    # Either decoding warpgroup runs the same code, of one tile.
    assert len(re.findall(r"STS\.128", rest)) == 2 * 8
