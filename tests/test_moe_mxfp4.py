"""MXFP4 against its definition in float64: rounding, scales, order of bytes, and what a matrix unit of fp8 is given. Not covered: that a
kernel computes with it (none does).
"""

import math
import re
from typing import Any

import machine_code
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_code import needs_compiler

from xstage.errors import XStageError
from xstage.moe import mxfp4

pytestmark = pytest.mark.usefixtures("one_thread")


def value(code: int) -> float:
    """Of a code, from the definition of e2m1: bias 1, no infinity, no NaN."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def code_of(x: float) -> int:
    """The nearest code, ties to the even one, saturating."""
    best = min(range(8), key=lambda code: (abs(value(code) - abs(x)), code & 1))
    return best | (8 if math.copysign(1.0, x) < 0 else 0)


def scale_of(block: list[float]) -> int:
    """The byte of a block's scale."""
    largest = max(abs(x) for x in block)
    return 0 if largest == 0 else max(math.frexp(largest)[1] - 1 - 2, -127) + 127


def random_packed(rows: int, columns: int, seed: int, spread: int, middle: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    """Any codes; exponents of all blocks within `spread` of each other, and as far somewhere."""
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (rows, columns // 2), generator=g).to(torch.uint8)
    scales = middle + torch.randint(spread + 1, (rows, columns // 32), generator=g)
    scales[0, 0], scales[-1, -1] = middle, middle + spread
    packed[-1, -1] = 0x77
    return packed, scales.to(torch.uint8)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
near = st.builds(lambda n, e: n / 8 * 2.0**e, st.integers(-64, 64), st.integers(-3, 3))  # middles between codes are among them


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(finite, near), min_size=32, max_size=32))
def test_rounding_is_that_of_the_definition(block: list[float]) -> None:
    w = torch.tensor([block])
    packed, scales = mxfp4.quantize(w)
    byte = scale_of(w[0].tolist())
    assert scales.tolist() == [[byte]]
    exact = [x / 2.0 ** (byte - 127) for x in w[0].tolist()]
    assert mxfp4.unpack(packed)[0].tolist() == [code_of(x) for x in exact]
    back = mxfp4.dequantize(packed, scales, torch.float64)[0].tolist()
    assert back == [value(code) * 2.0 ** (byte - 127) for code in mxfp4.unpack(packed)[0].tolist()]
    assert all(abs(b - x) <= max(abs(x), 2.0 ** (byte - 127)) / 4 for b, x in zip(back, w[0].tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_edges(dtype: torch.dtype) -> None:
    """Ties go to even codes, what exceeds 6 times the scale saturates, zeros keep their sign."""
    w = torch.zeros(3, 64, dtype=dtype)
    w[0, :10] = torch.tensor([7.5, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.2, -7.0])
    w[1] = -0.0
    w[2, 0] = torch.finfo(dtype).smallest_normal
    packed, scales = mxfp4.quantize(w)
    assert packed.dtype == scales.dtype == torch.uint8
    codes = [value(code) for code in mxfp4.unpack(packed)[0, :10].tolist()]
    assert codes == [6, 0, 1, 1, 2, 2, 4, 4, 0, -6]
    assert scales[:, 1].tolist() == [0, 0, 0]
    assert scales[:2, 0].tolist() == [127, 0]
    assert packed[1].tolist() == [0x88] * 32
    assert packed[0, 4] == 0xF8  # −0.2 and −7, the lower column in the lower bits
    assert mxfp4.dequantize(packed, scales)[2, 0] <= w[2, 0]


def test_any_block_with_a_4_or_6_comes_back() -> None:
    packed, scales = random_packed(64, 256, 3, 200, 10)
    packed[:, ::16] = packed[:, ::16] & 0xF8 | 6
    again = mxfp4.quantize(mxfp4.dequantize(packed, scales))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scales)


def test_float32_is_exact_below_its_largest() -> None:
    codes = mxfp4.pack(torch.arange(32).to(torch.uint8)[None] & 15)
    for byte in range(255):
        scales = torch.tensor([[byte]], dtype=torch.uint8)
        exact = mxfp4.dequantize(codes, scales, torch.float64)
        assert exact[0, :16].tolist() == [value(code) * 2.0 ** (byte - 127) for code in range(16)]
        single = mxfp4.dequantize(codes, scales).double()
        assert torch.equal(single, torch.where(exact.abs() < 2.0**128, exact, exact.sign() * torch.inf))


def test_words_have_what_a_thread_multiplies() -> None:
    packed, _ = random_packed(16, 512, 1, 0)
    words = mxfp4.to_words(packed)
    assert torch.equal(mxfp4.from_words(words), packed)
    blocks = mxfp4.unpack(packed).view(-1, 2, 4, 4)  # of 32: upper or lower 16, word, code
    for number, word in enumerate(words.view(torch.int32).flatten().tolist()[:64]):
        codes = blocks[number // 4, :, number % 4].flatten().tolist()
        assert [word >> 4 * i & 7 for i in range(8)] == [code & 7 for code in codes]
        assert [word >> (8 * i + 7 if i < 4 else 8 * (i - 4) + 3) & 1 for i in range(8)] == [code >> 3 for code in codes]


# ---- for a matrix unit of fp8


def folded(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `fold` stands for, the exact matrix, and the tile's largest exponent for every element."""
    q, tiles = mxfp4.fold(packed, scales)
    assert torch.equal(tiles, mxfp4.tile_scales(packed, scales))
    assert torch.equal(torch.frexp(tiles).mantissa, torch.full_like(tiles, 0.5))
    wide = tiles.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return q.double() * wide, mxfp4.dequantize(packed, scales, torch.float64), wide * 2.0**6


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 14), st.integers(0, 240), st.integers(0, 99))
def test_exact_within_14_powers(spread: int, middle: int, seed: int) -> None:
    got, exact, _ = folded(*random_packed(128, 256, seed, spread, min(middle, 254 - spread)))
    assert torch.equal(got, exact)


def test_15_powers_are_too_many() -> None:
    packed, scales = random_packed(128, 128, 5, 15)
    packed[0, 0] = 0x01  # 0.5, times 2⁻¹⁵ of the largest scale
    got, exact, _ = folded(packed, scales)
    assert got[0, 0] == 0 != exact[0, 0]


@pytest.mark.parametrize("spread", [15, 17, 18, 19, 25, 130, 250])
def test_beyond_the_error_is_bounded(spread: int) -> None:
    packed, scales = random_packed(256, 256, spread, spread, 2)
    got, exact, largest = folded(packed, scales)
    assert ((got - exact).abs() <= largest * 2.0**-16).all()
    # The tile's largest element is 6 times its largest scale in the one with this corner.
    tile = (slice(128, None), slice(128, None))
    assert ((got - exact)[tile].abs().max() <= exact[tile].abs().max() * 2.0**-18).all()
    exponent = scales.int().repeat_interleave(32, 1)
    below = torch.log2(largest).int() + 127 - exponent
    assert torch.equal(got[below <= 14], exact[below <= 14])
    assert not got[below >= 19].any()
    assert got.signbit().equal(exact.signbit())


def test_blocks_of_zeros_have_no_say() -> None:
    packed, scales = random_packed(128, 128, 4, 3)
    expected = mxfp4.tile_scales(packed, scales)
    packed[7, :16], scales[7, 0] = 0x80, 254
    assert torch.equal(mxfp4.tile_scales(packed, scales), expected)
    got, exact, _ = folded(packed, scales)
    assert torch.equal(got, exact)
    assert torch.equal(mxfp4.tile_scales(torch.full_like(packed, 0x08), scales), torch.full((1, 1), 2.0**-126))


def test_the_largest_and_the_smallest_scales() -> None:
    for byte, base in ((254, 121), (1, -126), (0, -126)):
        packed, scales = random_packed(128, 128, 2, 0, byte)
        got, exact, _ = folded(packed, scales)
        assert torch.equal(got, exact)
        assert mxfp4.tile_scales(packed, scales).item() == 2.0**base


def test_quantised_matrices_fold_exactly() -> None:
    g = torch.Generator().manual_seed(1)
    got, exact, _ = folded(*mxfp4.quantize(torch.randn(256, 512, generator=g).bfloat16()))
    assert torch.equal(got, exact)


def test_refusals() -> None:
    good = torch.zeros(2, 64)
    packed, scales = mxfp4.quantize(good)
    for bad, message in (
        (good.double(), "w: torch.float64"), (good[:, :48], r"w: shape \(2, 48\)"), (good[0], "w: shape"),
        (good.index_fill(1, torch.tensor([5]), torch.nan), r"w: nan at \[0, 5\]; MXFP4 holds finite numbers only"),
        (good.index_fill(0, torch.tensor([1]), -torch.inf).bfloat16(), r"w: -inf at \[1, 0\]"),
    ):  # fmt: skip
        with pytest.raises(XStageError, match=message):
            mxfp4.quantize(bad)
    for arguments, message in (
        ((packed[:, :8], scales), "packed: "), ((packed.int(), scales), "packed: torch.int32"), ((packed, scales[:, :1]), "scales: "),
        ((packed, scales.int()), r"scales: torch.int32 \(2, 2\) must be uint8 \(2, 2\)"),
    ):  # fmt: skip
        with pytest.raises(XStageError, match=message):
            mxfp4.dequantize(*arguments)
    with pytest.raises(XStageError, match=r"packed: \(2, 64\) elements must have out and in that are multiples of 128"):
        mxfp4.fold(packed, scales)
    with pytest.raises(XStageError, match=r"codes: torch\.int64"):
        mxfp4.pack(torch.zeros(2, 4, dtype=torch.int64))


# ---- decoded in registers


@needs_compiler
@pytest.mark.parametrize("normal", [False, True])
def test_every_code_at_every_place_with_every_shift(normal: bool) -> None:
    from emulated_launch import Array, translated
    from emulated_memory import Memory
    from fp4_kernel import THREADS, compiled_decode
    from ptx_interpreter import Grid, run

    shifts = torch.arange(-5 if normal else -24, 7)
    # 16 words of eight codes, rotated so that every code comes to every place; four words a thread.
    codes = ((torch.arange(16)[:, None] + torch.arange(8)) % 16).to(torch.uint8).view(4, 32)
    packed, mine = mxfp4.pack(codes).repeat(len(shifts), 1), shifts.repeat_interleave(4).int()
    # Zeros under a scale that has no say in the tile's.
    packed, mine = torch.cat((packed, packed[:1] & 0x88)), torch.cat((mine, torch.tensor([127]).int()))
    ctas = -(-len(mine) // THREADS)
    rows = torch.arange(ctas * THREADS) % len(mine)
    packed, mine = packed[rows], mine[rows]
    memory = Memory(1 << 20)
    source, given = Array.of(memory, mxfp4.to_words(packed).view(torch.int32)), Array.of(memory, mine)
    out = Array(memory, (len(rows), 8), torch.int32)
    run([[Grid(translated(compiled_decode(4, normal)), ctas, [source.address, given.address, out.address], memory)]])
    expected = mxfp4.dequantize(packed, (mine + 127).to(torch.uint8)[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    # A word's first four columns and its others are 16 apart.
    made = out.value.view(torch.uint8).view(-1, 4, 2, 4).transpose(1, 2).reshape(-1, 32)
    assert torch.equal(made, expected)


def instructions(words: int, normal: bool) -> list[str]:
    """Names, without moves of memory and padding."""
    from fp4_kernel import compiled_decode

    names = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?\w+\s+)?([A-Z0-9.]+)", machine_code.of(compiled_decode(words, normal))["sass"])
    assert not {"LDL", "STL", "LDS"} & set(names)
    return [name for name in names if not name.startswith(("LDG", "STG", "NOP", "BRA"))]


@needs_compiler
@pytest.mark.parametrize("normal", [False, True])
def test_eight_codes_cost_seven_instructions(normal: bool) -> None:
    few, many = instructions(4, normal), instructions(8, normal)
    assert len(many) - len(few) == 4 * 7
    assert (few.count("PRMT"), many.count("PRMT")) == (2 * 4, 2 * 8)


@needs_compiler
def test_a_table_of_normal_numbers_needs_no_conversion() -> None:
    few, more = instructions(4, True), instructions(4, False)
    assert not [name for name in few if name.startswith(("F2FP", "ISETP"))]
    assert [name.split(".")[0] for name in more].count("F2FP") == 4
    assert len(more) - len(few) <= 16


def decoded(spread: int, kernel: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel of `decode_kernel` makes of two tiles, uint8 of this shape; and what `fold` makes of them, uint8 [128, 256]."""
    from emulated_launch import Array, translated
    from emulated_memory import Memory
    from ptx_interpreter import Grid, run

    packed, scales = random_packed(128, 256, spread, spread, 100)
    scales[0, ::4] = 100 + spread  # every distance occurs, and in some warps only short ones
    scales[32:64] = 100 + spread - torch.arange(8) % 4
    packed[70, :16], scales[70, 0] = 0x80, 254
    tiles = mxfp4.to_tiles(mxfp4.to_words(packed), mxfp4.distances(scales, mxfp4.tile_scales(packed, scales)))[0]
    memory = Memory(1 << 20)
    source, out = Array.of(memory, tiles), Array(memory, shape, torch.uint8)
    run([[Grid(translated(kernel), 2, [source.address, out.address], memory)]])
    return out.value, mxfp4.fold(packed, scales)[0].view(torch.uint8)


@needs_compiler
@pytest.mark.parametrize("spread", [7, 11, 12, 30])
def test_tiles_decode_to_what_the_matrix_unit_reads(spread: int) -> None:
    """By the code of the decoding warps: e4m3 as `fold` makes it, rows of 128 bytes whose 16-byte pieces are swizzled by the row."""
    from decode_kernel import compiled_decode_tiles

    made, expected = decoded(spread, compiled_decode_tiles(), (2, 128, 8, 16))
    row, piece = torch.arange(128)[:, None], torch.arange(8)
    for k in range(2):
        assert torch.equal(made[k][row, piece ^ row % 8].flatten(1), expected[:, 128 * k : 128 * k + 128])


@needs_compiler
@pytest.mark.parametrize("spread", [7, 11, 12, 30])
def test_tiles_decode_to_the_operand_in_registers(spread: int) -> None:
    """By the code of a swapped kernel's math warps: of two warpgroups every thread's part of 64 rows, as wgmma m64k32 has it."""
    from decode_kernel import compiled_decode_operand

    made, expected = decoded(spread, compiled_decode_operand(), (2, 2, 4, 8, 4, 4, 2, 2, 4))
    # [tile, warpgroup, warp, a, q, block, half of the block, 8 rows further, column] to rows and columns
    made = made.permute(0, 1, 2, 7, 3, 5, 6, 4, 8).reshape(2, 128, 128)
    for k in range(2):
        assert torch.equal(made[k], expected[:, 128 * k : 128 * k + 128])
