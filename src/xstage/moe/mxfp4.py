"""Weights in MXFP4: four bits an element, one power of two per 32 elements of a row; and what they become for a matrix unit of fp8.

The format is that of the OCP Microscaling Formats (MX) Specification v1.0: sections 5.3 (elements), 5.4 (scales) and 6.3 (conversion).

* A *code* is sign, two bits of exponent, one of mantissa: ± 0, 0.5, 1, 1.5, 2, 3, 4, 6, without infinity or NaN. Two codes lie in a byte,
  the one of the lower column in the lower bits.
* A *scale* is the byte e + 127 and stands for 2^e, e in −127 … 127. 255 is NaN, and refused here.

Rounding: 2^e is the largest power of two in the block's largest magnitude, divided by 4, the largest power of two that a code holds; at
least 2^−127. x / 2^e is rounded to the nearest code, ties to the even one, and what exceeds 6 becomes 6. So |x − dequantised| ≤
max(|x|, 2^e) / 4. A block of zeros has the byte 0; zeros keep their sign. The format has nothing for NaN and infinities: they are refused.

Hopper multiplies e4m3. `fold` turns a tile of 128 × 128 codes into e4m3 numbers times one float32, so that a kernel applies the scales
where fp8 weights have theirs. With `base`, the tile's largest e (of blocks that are not all zero) − 6, or −126 if that is more:

    code · 2^e = e4m3(code · 2^shift) · 2^base,   shift = e − base ≤ 6

6 · 2⁶ = 384 is below e4m3's largest, 448, and 0.5 · 2⁻⁸ is its smallest, 2⁻⁹. A code has two significant bits, so every shift from −8
to 6 is exact: every tile whose exponents lie within 14 of each other. Blocks further down are rounded to multiples of 2⁻⁹; the error is
at most 2⁻¹⁰ · 2^base = 2^(largest e − 16), which is 2⁻¹⁸ of the tile's largest element if that is a 4 or 6 times its block's scale, as the
rounding above makes it, and 2⁻¹⁵ at worst. From shift −13 on, 2⁻¹⁹ of the largest scale, a block is zero.

Not covered: MXFP6, MXFP8, NVFP4 (blocks of 16), scales along the other dimension.
"""

from __future__ import annotations

import torch

from xstage.errors import XStageError
from xstage.moe import quantize as fp8

BLOCK = 32
TILE = fp8.BLOCK
BIAS = 127
NAN_SCALE = 255
LARGEST_SHIFT = 6
TILE_CODE_BYTES = TILE * TILE // 2  # of a tile at rest: its codes, then the distances of its blocks
TILE_BYTES = TILE_CODE_BYTES + TILE * TILE // BLOCK
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The smallest float32 that is rounded to each code but the first. The middle between two goes to the even one, which is every other time
# the upper.
_BOUNDS = sorted([*torch.tensor([0.25, 1.25, 2.5, 5.0]).nextafter(torch.tensor(8.0)).tolist(), 0.75, 1.75, 3.5])


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices to MXFP4, rounded as the specification says (see the module).

    Args:
        w: [..., out, in] in bfloat16, float16 or float32; in a multiple of 32.

    Returns:
        packed codes uint8 [..., out, in / 2] and scales uint8 [..., out, in / 32].

    Raises:
        XStageError: another dtype, a size that 32 does not divide, or an element that is not finite.
    """
    if w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise XStageError(f"w: {w.dtype} cannot be quantised; bfloat16, float16 and float32 can")
    if w.dim() < 2 or w.shape[-1] % BLOCK:
        raise XStageError(f"w: shape {tuple(w.shape)} must be [..., out, in] with in a multiple of {BLOCK}")
    check_finite("w", w)
    blocks = w.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    # frexp has mantissas of 0.5 … 1: one exponent more than the largest power of two; two go to the codes.
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 3, -BIAS).clamp_min(-BIAS)
    # Exact, but for what is far below the smallest code.
    scaled = blocks * _power(-exponent, torch.float32).unsqueeze(-1)
    codes = torch.bucketize(scaled.abs(), torch.tensor(_BOUNDS, device=w.device), right=True, out_int32=True)
    codes = codes.to(torch.uint8) | scaled.signbit().to(torch.uint8) << 3
    return pack(codes.flatten(-2)), (exponent + BIAS).to(torch.uint8)


def dequantize(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., out, in] of packed codes [..., out, in / 2] and scales [..., out, in / 32].

    dtype: float64: exact; float32: exact below 2¹²⁸, infinite from there on.

    Raises:
        XStageError: shapes that do not fit each other.
    """
    _check_pair(packed, scales)
    return _scaled(packed, exponents(scales), dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., in] of codes 0 … 15 to uint8 [..., in / 2], two a byte, the lower column in the lower bits.

    Raises:
        XStageError: an odd number of columns.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise XStageError(f"codes: {codes.dtype} {tuple(codes.shape)} must be uint8 with an even number of columns")
    return codes[..., ::2] & 15 | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def exponents(scales: torch.Tensor) -> torch.Tensor:
    """int32 exponents of uint8 scales."""
    return scales.int() - BIAS


def check_finite(name: str, w: torch.Tensor) -> None:
    """Refuse what MXFP4 has no code for.

    Raises:
        XStageError: NaN or an infinity, with its place.
    """
    finite = w.isfinite()
    if not bool(finite.all()):
        at = (~finite).nonzero()[0].tolist()
        raise XStageError(f"{name}: {float(w[tuple(at)])} at {at}; MXFP4 holds finite numbers only")


# ---- for a matrix unit of fp8


def tile_scales(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The power of two 2^base of every tile of 128 × 128 (see the module).

    Args:
        packed, scales: as `quantize` returns them; out and in multiples of 128.

    Returns:
        float32 [..., out / 128, in / 128]; of a tile of zeros 2^−126, the smallest that is normal.

    Raises:
        XStageError: sizes that 128 does not divide, shapes that do not fit each other.
    """
    return _power(_base(packed, scales), torch.float32)


def fold(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the matrix unit is given: e4m3 [..., out, in], and `tile_scales`, in the form of `quantize.quantize_weights`.

    Exact where the exponents of a tile lie within 14 of each other; see the module for what becomes of the others.

    Raises:
        XStageError: as `tile_scales`.
    """
    base = _base(packed, scales)
    shift = exponents(scales) - base.repeat_interleave(TILE, -2).repeat_interleave(TILE // BLOCK, -1)
    # More than 6 only over zeros. Exact in float32, or far below what rounds to zero.
    return _scaled(packed, shift.clamp_max(LARGEST_SHIFT), torch.float32).to(torch.float8_e4m3fn), _power(base, torch.float32)


def to_words(packed: torch.Tensor) -> torch.Tensor:
    """Packed codes in the order of bits that `xstage.device.fp4` decodes.

    Word q of a block's four has columns 4 q … 4 q + 3 and 16 + 4 q … 16 + 4 q + 3 of its 32: what one of four threads holds of a row
    where the weight is wgmma's operand in registers. Of these eight codes, magnitude i: bits 4 i … 4 i + 2; sign i: bit 8 i + 7 for
    i < 4, bit 8 (i − 4) + 3 for the others. So four signs lie where four e4m3 bytes have theirs, and the others 4 bits below.

    Args:
        packed: uint8 [..., in / 2], in a multiple of 32.

    Returns:
        uint8 like `packed`.
    """
    codes = unpack(packed).unflatten(-1, (-1, 2, 4, 4)).transpose(-3, -2).flatten(-4, -3)  # [..., word, first or second four, code]
    signs = codes >> 3
    moved = torch.stack((signs[..., 1, :], signs[..., 0, :]), -1)  # a byte's lower and upper sign
    return pack((codes & 7).flatten(-3) | moved.flatten(-3) << 3)


def from_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_words`."""
    nibbles = unpack(words).unflatten(-1, (-1, 4, 2))  # [..., word, byte, lower or upper]
    signs = (nibbles >> 3).flip(-1).mT  # [..., word, first or second four, code]
    codes = (nibbles & 7).flatten(-2) | signs.flatten(-2) << 3
    return pack(codes.unflatten(-1, (2, 4)).unflatten(-3, (-1, 4)).transpose(-3, -2).flatten(-4))


# ---- at rest, for a kernel


def distances(scales: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """How many powers of two a block's scale lies below the largest that `fold` has room for: LARGEST_SHIFT − shift, modulo 256.

    Of a block that is not all zero it is 0 … 254 without the modulo. With the tile's scale it says the block's again: `from_distances`.

    Args:
        scales: uint8 [..., out, in / 32]. tiles: `tile_scales` of them, float32 [..., out / 128, in / 128].

    Returns:
        uint8 like `scales`.
    """
    return (_tile_bytes(tiles) + LARGEST_SHIFT - scales.int()).to(torch.uint8)


def from_distances(below: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """The scales that `distances` was given."""
    return (_tile_bytes(tiles) + LARGEST_SHIFT - below.int()).to(torch.uint8)


def to_tiles(words: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Tiles of 128 × 128 as they rest: the codes of column block 0 (32 codes, 16 bytes) of rows 0 … 127, of blocks 1, 2 and 3; then the
    distances, four of every row.

    Args:
        words: uint8 [..., out, in / 2] in the order of `to_words`. below: uint8 [..., out, in / 32], `distances`.

    Returns:
        uint8 [..., out / 128, in / 128, TILE_BYTES].
    """
    codes = words.unflatten(-1, (-1, TILE // BLOCK, BLOCK // 2)).unflatten(-4, (-1, TILE))  # [..., m, row, k, block, byte]
    codes = codes.movedim(-4, -2).flatten(-3)  # [..., m, k, block, row, byte]
    blocks = below.unflatten(-1, (-1, TILE // BLOCK)).unflatten(-3, (-1, TILE)).transpose(-3, -2).flatten(-2)
    return torch.cat((codes, blocks), -1)


def from_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `to_tiles`."""
    codes, blocks = tiles.split((TILE_CODE_BYTES, TILE_BYTES - TILE_CODE_BYTES), -1)
    codes = codes.unflatten(-1, (TILE // BLOCK, TILE, BLOCK // 2)).movedim(-2, -4)
    blocks = blocks.unflatten(-1, (TILE, TILE // BLOCK)).transpose(-3, -2)
    return codes.flatten(-3).flatten(-3, -2), blocks.flatten(-2).flatten(-3, -2)


def _tile_bytes(tiles: torch.Tensor) -> torch.Tensor:
    """Exponents of tiles as a scale's byte would say them, one per block."""
    return (tiles.contiguous().view(torch.int32) >> 23).repeat_interleave(TILE, -2).repeat_interleave(TILE // BLOCK, -1)


def _scaled(packed: torch.Tensor, exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes times 2^exponent of their block."""
    table = torch.tensor([sign * m for sign in (1.0, -1.0) for m in _MAGNITUDES], dtype=dtype, device=packed.device)
    values = table[unpack(packed).int()].unflatten(-1, (-1, BLOCK))
    return (values * _power(exponent, dtype).unsqueeze(-1)).flatten(-2)


def _power(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2^exponent in −1022 … 1023 by its bits: torch's powers are not exact everywhere."""
    return (exponent.long() + 1023 << 52).view(torch.float64).to(dtype)


def _base(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int32 [..., out / 128, in / 128]."""
    _check_pair(packed, scales)
    if scales.shape[-2] % TILE or scales.shape[-1] % (TILE // BLOCK):
        size = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
        raise XStageError(f"packed: {size} elements must have out and in that are multiples of {TILE}")
    # A block of zeros has no say, whatever its scale.
    used = (packed & 0x77).unflatten(-1, (-1, BLOCK // 2)).amax(-1) > 0
    exponent = torch.where(used, exponents(scales), -BIAS)
    largest = exponent.unflatten(-1, (-1, TILE // BLOCK)).unflatten(-3, (-1, TILE)).amax((-3, -1))
    return (largest - LARGEST_SHIFT).clamp_min(1 - BIAS)


def _check_pair(packed: torch.Tensor, scales: torch.Tensor) -> None:
    wanted = (*packed.shape[:-1], packed.shape[-1] * 2 // BLOCK)
    if packed.dtype != torch.uint8 or packed.dim() < 2 or packed.shape[-1] % (BLOCK // 2):
        raise XStageError(f"packed: {packed.dtype} {tuple(packed.shape)} must be uint8 [..., out, in / 2] with in a multiple of {BLOCK}")
    if scales.dtype != torch.uint8 or scales.shape != wanted:
        raise XStageError(f"scales: {scales.dtype} {tuple(scales.shape)} must be uint8 {wanted}")
