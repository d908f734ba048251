"""fp8 e4m3 with fp32 scales: one per 128 columns of an activation row, one per 128 × 128 block of a weight.

The rules, the same for both:

* The scale is the largest *finite* magnitude of the block ÷ 448, rounded up (`div.rp.f32` in a kernel), so that scale · 448 covers
  the block and no element saturates. It is at least 2⁻¹²⁶, the smallest normal float32: no scale is one that hardware may flush to
  zero, and 1 / scale is finite.
* An element is x / scale in float32, rounded to nearest even e4m3. For a finite x, |x − dequantised| ≤ max(|x| / 16, scale / 1024), up
  to float32 rounding: half a step of three mantissa bits, or half the smallest step below 2⁻⁶.
* A block without finite non-zero elements gets the scale 2⁻¹²⁶; zeros stay zeros, sign included.
* Infinities and NaN become NaN, because e4m3 has no infinity: what was not finite stays visible, and only there. They do not touch
  the scale, so their neighbours are what they would be without them. The sign of an infinity is lost.

`interleave_gate_up` mixes the gate and up rows of Linear-1's weight so that a thread of a wgmma accumulator holds both of what meets in
SwiGLU, and four outputs in a row. Quantise before mixing: gate and up keep a scale of their own per 128 rows, as checkpoints have them.

Not covered: e5m2, scales that are powers of two; 4-bit weights are in `xstage.moe.mxfp4`.
"""

from __future__ import annotations

import torch

from xstage.errors import XStageError

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126
GROUP = 16  # outputs of SwiGLU that 32 mixed rows make


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in 1 × 128 blocks.

    Args:
        x: [..., columns] in bfloat16, float16 or float32; columns a multiple of 128.

    Returns:
        e4m3 like `x`, and float32 scales [..., columns / 128].

    Raises:
        XStageError: another dtype, or columns that 128 does not divide.
    """
    _check(x, 1)
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = _scales(blocks.abs(), (-1,))
    return _elements(blocks, scales.unsqueeze(-1)).flatten(-2), scales


def quantize_weights(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices in 128 × 128 blocks.

    Args:
        w: [..., rows, columns] in bfloat16, float16 or float32; both multiples of 128.

    Returns:
        e4m3 like `w`, and float32 scales [..., rows / 128, columns / 128].

    Raises:
        XStageError: another dtype, or sizes that 128 does not divide.
    """
    _check(w, 2)
    blocks = w.float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., row block, row, column block, column]
    scales = _scales(blocks.abs(), (-3, -1))
    return _elements(blocks, scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2), scales


def dequantize_activations(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., columns] of e4m3 times its scales [..., columns / 128], in `dtype` (float32 or float64)."""
    return _values(q.unflatten(-1, (-1, BLOCK)), scales.unsqueeze(-1), dtype).flatten(-2)


def dequantize_weights(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., rows, columns] of e4m3 times its scales [..., rows / 128, columns / 128], in `dtype` (float32 or float64)."""
    blocks = q.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    return _values(blocks, scales[..., :, None, :, None], dtype).flatten(-2).flatten(-3, -2)


def interleave_gate_up(w: torch.Tensor) -> torch.Tensor:
    """[..., 2 · intermediate, columns], gate rows before up rows, to the order of Linear-1's accumulators.

    32 rows hold the gate and up of 16 outputs: row 16 s + 8 g + 2 q + e is gate (g = 0) or up (g = 1) of output 4 q + 2 s + e, because a
    thread q of four has columns 2 q + e of every eight.

    Raises:
        XStageError: 32 does not divide the rows.
    """
    _check_interleave(w)
    g, t, q, s, e, columns = range(-6, 0)
    return _permuted(w.unflatten(-2, (2, -1, 4, 2, 2)), (t, s, g, q, e, columns)).flatten(-6, -2)


def separate_gate_up(w: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave_gate_up`.

    Raises:
        XStageError: 32 does not divide the rows.
    """
    _check_interleave(w)
    t, s, g, q, e, columns = range(-6, 0)
    return _permuted(w.unflatten(-2, (-1, 2, 2, 4, 2)), (g, t, q, s, e, columns)).flatten(-6, -2)


def thread_order(w: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns] to the order in which a thread of Linear-2's accumulators has contiguous results.

    Row 8 j + 2 q + e of 32 is result 8 q + 2 j + e, because a thread q of four has columns 2 q + e of every eight.

    Raises:
        XStageError: 32 does not divide the rows.
    """
    _check_interleave(w)
    t, q, j, e, columns = range(-5, 0)
    return _permuted(w.unflatten(-2, (-1, 4, 4, 2)), (t, j, q, e, columns)).flatten(-5, -2)


def from_thread_order(w: torch.Tensor) -> torch.Tensor:
    """The inverse of `thread_order`.

    Raises:
        XStageError: 32 does not divide the rows.
    """
    _check_interleave(w)
    t, j, q, e, columns = range(-5, 0)
    return _permuted(w.unflatten(-2, (-1, 4, 4, 2)), (t, q, j, e, columns)).flatten(-5, -2)


def tiled(w: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns] to [..., rows / 128, columns / 128, 128, 128]: what a copy brings at once is one piece of memory."""
    return w.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).transpose(-3, -2)


def untiled(w: torch.Tensor) -> torch.Tensor:
    """The inverse of `tiled`."""
    return w.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _permuted(w: torch.Tensor, last: tuple[int, ...]) -> torch.Tensor:
    """The last dimensions in another order."""
    return w.permute(*range(w.dim() - len(last)), *last)


def _scales(magnitudes: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    largest = torch.where(magnitudes.isfinite(), magnitudes, 0.0).amax(dims)
    # By a tensor: GPUs multiply by the reciprocal of a number.
    scales = largest / torch.full_like(largest, E4M3_MAX)
    # Float32 times 448 is exact in float64: it decides whether the division rounded down.
    below = scales.double() * E4M3_MAX < largest.double()
    return torch.where(below, torch.nextafter(scales, torch.full_like(scales, torch.inf)), scales).clamp_min(SMALLEST_SCALE)


def _elements(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.where(blocks.isfinite(), blocks / scales, torch.nan).to(torch.float8_e4m3fn)


def _values(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Never beyond the largest float32: 448 divides that number exactly, so the largest scale is not rounded up.
    return blocks.to(dtype) * scales.to(dtype)


def _check(x: torch.Tensor, blocked: int) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise XStageError(f"dtype: {x.dtype} cannot be quantised; bfloat16, float16 and float32 can")
    if x.dim() < blocked or any(n % BLOCK for n in x.shape[-blocked:]):
        which = "columns" if blocked == 1 else "rows and columns"
        raise XStageError(f"shape: {tuple(x.shape)} must have {which} that are multiples of {BLOCK}")


def _check_interleave(w: torch.Tensor) -> None:
    if w.dim() < 2 or w.shape[-2] % (2 * GROUP):
        raise XStageError(f"shape: {tuple(w.shape)} must have rows that are a multiple of {2 * GROUP}")
