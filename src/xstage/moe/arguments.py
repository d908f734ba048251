"""What a MoE layer takes: every refusal of `xstage.moe.op` that needs no peer, each naming the argument, its value and the limit."""

from __future__ import annotations

import math

import torch

from xstage.errors import XStageError
from xstage.moe.layout import BufferLayout
from xstage.moe.quantize import BLOCK
from xstage.moe.work_table import ORDERS

SCHEDULES = ("auto", "serial", *ORDERS)
FALLBACKS = ("serial", "error")
WEIGHT_FORMATS = ("fp8", "mxfp4")
TILE = 128
PICKS = (torch.int32, torch.int64)
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


def layout(ranks: int, num_experts: int, hidden: int, intermediate: int, top_k: int, max_tokens_per_rank: int) -> BufferLayout:
    """The layout of the buffers.

    Raises:
        XStageError: numbers outside their range, or that do not divide each other.
    """
    made = BufferLayout(ranks, num_experts, hidden, top_k, max_tokens_per_rank, TILE)
    if not isinstance(intermediate, int) or intermediate < 1 or intermediate % BLOCK:
        raise XStageError(f"intermediate: {intermediate!r} must be a positive multiple of {BLOCK}")
    return made


def check_options(
    schedule: str, lead_rows: int | None, clamp: float | None, dtype: torch.dtype | None, fallback: str,
    weight_format: str = "fp8",
) -> None:  # fmt: skip
    """Refuse options that are no numbers of the layout.

    Raises:
        XStageError: an option that is not known, or a lead or clamp that is not positive.
    """
    options = (("schedule", schedule, SCHEDULES), ("fallback", fallback, FALLBACKS), ("weight_format", weight_format, WEIGHT_FORMATS))
    for name, value, known in options:
        if value not in known:
            raise XStageError(f"{name}: {value!r} is not one of {', '.join(known)}")
    if lead_rows is not None and not (isinstance(lead_rows, int) and lead_rows >= 1):
        raise XStageError(f"lead_rows: {lead_rows!r} must be a whole number of at least 1, or None")
    if clamp is not None and not 0 < clamp < math.inf:
        raise XStageError(f"clamp: {clamp} must be positive and finite, or None")
    if dtype not in (None, torch.bfloat16):
        raise XStageError(f"dtype: {dtype} must be bfloat16")


def check_layers(layers: int) -> None:
    """Refuse a number of layers.

    Raises:
        XStageError: not a whole number of at least 1.
    """
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise XStageError(f"layers: {layers!r} must be a whole number of at least 1")


def check_rows_once(rows_once: bool) -> None:
    """Refuse what is no bool.

    Raises:
        XStageError: another value.
    """
    if not isinstance(rows_once, bool):
        raise XStageError(f"rows_once: {rows_once!r} must be True or False")


def check_layer(layer: int, layers: int) -> None:
    """Refuse a layer that the object does not have.

    Raises:
        XStageError: not a whole number from 0 on and below `layers`.
    """
    if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < layers:
        raise XStageError(f"layer: {layer!r} must be a whole number in 0 … {layers - 1}; this object has {layers}")


def check_call(
    x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor, layout: BufferLayout,
    device: torch.device,
) -> None:  # fmt: skip
    """Refuse arguments of a call by shape, dtype and device; does not look at their values.

    Raises:
        XStageError: see `MegaMoE.__call__`.
    """
    hidden = layout.hidden
    if x.dim() != 2 or x.shape[1] != hidden:
        raise XStageError(f"x: shape {tuple(x.shape)} must be [tokens, {hidden}]")
    tokens = x.shape[0]
    if tokens > layout.max_tokens_per_rank:
        raise XStageError(f"x: {tokens} tokens; the limit is max_tokens_per_rank = {layout.max_tokens_per_rank}")
    if x.dtype != (torch.bfloat16 if x_scales is None else torch.float8_e4m3fn):
        given = "without" if x_scales is None else "with"
        raise XStageError(f"x: {x.dtype} {given} x_scales; must be bfloat16 without, or float8_e4m3fn with them")
    if x_scales is not None and (x_scales.dtype != torch.float32 or x_scales.shape != (tokens, hidden // BLOCK)):
        raise XStageError(f"x_scales: {x_scales.dtype} {tuple(x_scales.shape)} must be float32 {(tokens, hidden // BLOCK)}")
    for name, tensor, known in (("topk_idx", topk_idx, PICKS), ("topk_weights", topk_weights, WEIGHTS)):
        if tensor.shape != (tokens, layout.top_k):
            raise XStageError(f"{name}: shape {tuple(tensor.shape)} must be {(tokens, layout.top_k)}")
        if tensor.dtype not in known:
            raise XStageError(f"{name}: {tensor.dtype} must be {' or '.join(str(d).removeprefix('torch.') for d in known)}")
    for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights), ("x_scales", x_scales)):
        if tensor is None:
            continue
        if tensor.device != device:
            raise XStageError(f"{name}: lies on {tensor.device}; this object is on {device}")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise XStageError(f"{name}: requires a gradient; there is no backward (use torch.no_grad())")
