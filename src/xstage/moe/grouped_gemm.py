"""The grouped fp8 GEMMs of the layer, to call: argument checks of shapes, one compilation per configuration, launches on torch's stream.

Which rows belong to which expert, and which tiles there are, is on the device (`xstage.moe.exchange`); nothing here waits for it. Kernel
and epilogues: `gemm_sm90.py`, `epilogues.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from xstage.errors import XStageError
from xstage.moe import epilogues
from xstage.moe.gemm_sm90 import CLUSTER, TILE_K, GroupedGemm

STAGES = (4, 3, 2)  # as many as fit, but K of a tile is a whole number of trips round the ring
LINEAR1, LINEAR2 = 0, 1  # whose count of `totals` is meant


def swiglu(
    a: torch.Tensor, a_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tile_expert: torch.Tensor,
    work: torch.Tensor, totals: torch.Tensor, row_weight: torch.Tensor, middle: torch.Tensor, middle_scales: torch.Tensor,
    clamp: float | None = None,
) -> None:  # fmt: skip
    """Linear-1, SwiGLU, routing weight, fp8 again.

    Args:
        a: uint8 (e4m3) [rows, hidden]. a_scales: float32 [hidden / 128, rows].
        weight: uint8 (e4m3) [experts, 2 · intermediate, hidden], gate and up mixed by `quantize.interleave_gate_up`.
        weight_scales: float32 [experts, hidden / 128, intermediate / 128, 2]: of 128 gate rows, of 128 up rows.
        tile_expert: int32 [rows / 128]. work, totals: see `xstage.moe.exchange`. row_weight: float32 [rows].
        middle: uint8 (e4m3) [rows, intermediate], written. middle_scales: float32 [intermediate / 128, rows], written.
        clamp: bound of the gate above and of up on both sides.

    Raises:
        XStageError: sizes that the kernel cannot take.
    """
    kernel = _compiled("swiglu", _stages(a), clamp)
    outputs = (middle, middle_scales, row_weight)
    _launch(kernel, a, a_scales, weight, weight_scales.flatten(2), tile_expert, work, totals, outputs)


def rows(
    a: torch.Tensor, a_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tile_expert: torch.Tensor,
    work: torch.Tensor, totals: torch.Tensor, row_slot: torch.Tensor,
) -> None:  # fmt: skip
    """Linear-2: each row's bf16 result to the address `row_slot` (int64 [rows], 0: nowhere), on this GPU or a peer. Else like `swiglu`.

    weight: uint8 [experts, hidden, intermediate]. weight_scales: float32 [experts, intermediate / 128, hidden / 128].
    """
    _launch(_compiled("rows", _stages(a)), a, a_scales, weight, weight_scales, tile_expert, work, totals, row_slot)


def plain(
    a: torch.Tensor, a_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tile_expert: torch.Tensor,
    work: torch.Tensor, totals: torch.Tensor, out: torch.Tensor, which: int = LINEAR1,
) -> None:  # fmt: skip
    """The product alone: out bf16 [rows, N]. which: the entry of `totals` that counts the work. Else like `rows`."""
    _launch(_compiled("plain", _stages(a), which), a, a_scales, weight, weight_scales, tile_expert, work, totals, out)


def _stages(a: torch.Tensor) -> int:
    blocks = a.shape[1] // TILE_K
    for stages in STAGES:
        if a.shape[1] % TILE_K == 0 and blocks % stages == 0:
            return stages
    raise XStageError(f"a: K is {a.shape[1]}; it must be a multiple of {TILE_K * STAGES[-1]} or {TILE_K * STAGES[-2]}")


def _launch(
    kernel: Any, a: torch.Tensor, a_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tile_expert: torch.Tensor,
    work: torch.Tensor, totals: torch.Tensor, outputs: Any,
) -> None:  # fmt: skip
    experts, columns, depth = weight.shape
    if depth != a.shape[1] or columns % 512 or a.shape[0] % 128:
        raise XStageError(f"weight: {tuple(weight.shape)} does not fit rows {tuple(a.shape)}: same K, N a multiple of 512, rows of 128")
    flat = weight.view(experts * columns, depth)
    kernel(a, flat, a_scales, weight_scales, tile_expert, work, totals, outputs, columns, _ctas(a.device.index))


@cache
def _ctas(device: int) -> int:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return int(sms // CLUSTER * CLUSTER)


@cache
def _compiled(kind: str, stages: int, option: Any = None) -> Any:
    """Compiled once per process (about 3 s). option: the clamp of `swiglu`, which table of `plain`."""
    epilogue: Any = {"swiglu": epilogues.SwigluFp8, "rows": epilogues.RowsToSlots, "plain": epilogues.Plain}[kind](
        *([option] if kind == "swiglu" else [])
    )
    table = {"swiglu": LINEAR1, "rows": LINEAR2, "plain": option}[kind]
    count, columns = cute.sym_int(divisibility=128), cute.sym_int(divisibility=4)

    def matrix(dtype: Any, shape: tuple[Any, ...], divisibility: int) -> Any:
        strides = tuple(cute.sym_int64(divisibility=divisibility) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=16)

    def vector(dtype: Any) -> Any:
        return make_fake_tensor(dtype, (cute.sym_int(),), stride=(1,), assumed_align=8 if dtype is Int64 else 4)

    outputs: Any = {
        "swiglu": (
            matrix(Uint8, (count, cute.sym_int(divisibility=128)), 128),
            matrix(Float32, (cute.sym_int(), count), 4),
            vector(Float32),
        ),
        "rows": vector(Int64),
        "plain": matrix(cutlass.BFloat16, (count, cute.sym_int(divisibility=128)), 128),
    }[kind]  # fmt: skip
    return cute.compile(
        GroupedGemm(epilogue, stages, table), matrix(Uint8, (count, cute.sym_int(divisibility=128)), 128),
        matrix(Uint8, (cute.sym_int(divisibility=128), cute.sym_int(divisibility=128)), 128), matrix(Float32, (cute.sym_int(), count), 4),
        matrix(Float32, (cute.sym_int(), cute.sym_int(), columns), 4), vector(Int32), vector(Int32), vector(Int32), outputs, Int32(512),
        Int32(132), make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi",
    )  # fmt: skip
