"""The grouped GEMMs of the layer, fp8 rows with fp8 or MXFP4 weights, to call: argument checks of shapes, one compilation per
configuration, launches on torch's stream.

A weight is e4m3, [experts, N / 128, K / 128, 128, 128] (`weights`), or tiles of MXFP4 as they rest, [experts, N / 128, K / 128,
`mxfp4.TILE_BYTES`] (`weights_mxfp4`); what it is decides which kernel runs. Scales of 128 × 128 are the same.

Which rows belong to which expert, and which tiles there are, is on the device (`xstage.moe.exchange`); nothing here waits for it. Kernel
and epilogues: `gemm_sm90.py`, `epilogues.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from xstage.device.kept import kept
from xstage.errors import XStageError
from xstage.moe import epilogues
from xstage.moe.gemm_sm90 import GroupedGemm
from xstage.moe.layout import SLOT_BYTES, SPARE_TILES, BufferLayout
from xstage.moe.loads_sm90 import CLUSTER, TILE_K
from xstage.moe.once_sm90 import OnceSender
from xstage.moe.send_sm90 import Sender
from xstage.moe.spans import Spans
from xstage.moe.work_table import FORMS, MAX_ROW_TILES, STAGES

LINEAR1, LINEAR2 = 0, 1  # whose count of `totals` is meant
NARROW_STAGES = 6  # of 64 rows and of codes
SPLIT_SLOT_BYTES = 8 * 1024  # of a sending warp beside a split tile's rings: what is left


def swiglu(
    a: torch.Tensor, a_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tile_expert: torch.Tensor,
    work: torch.Tensor, totals: torch.Tensor, row_weight: torch.Tensor, middle: torch.Tensor, middle_scales: torch.Tensor,
    clamp: float | None = None,
) -> None:  # fmt: skip
    """Linear-1, SwiGLU, routing weight, fp8 again.

    Args:
        a: uint8 (e4m3) [rows, hidden]. a_scales: float32 [hidden / 128, rows].
        weight: e4m3 as uint8 [experts, 2 · intermediate / 128, hidden / 128, 128, 128] (`quantize.tiled`) or MXFP4, gate and up mixed by
            `quantize.interleave_gate_up`.
        weight_scales: float32 [experts, hidden / 128, intermediate / 128, 2]: of 128 gate rows, of 128 up rows.
        tile_expert: int32 [rows / 128]. work, totals: see `xstage.moe.exchange`. row_weight: float32 [rows].
        middle: uint8 (e4m3) [rows, intermediate], written. middle_scales: float32 [intermediate / 128, rows], written.
        clamp: bound of the gate above and of up on both sides.

    Raises:
        XStageError: sizes that the kernel cannot take.
    """
    kernel = _compiled("swiglu", weight, clamp)
    outputs = (middle, middle_scales, row_weight)
    _launch(kernel, a, a_scales, weight, weight_scales.flatten(2), tile_expert, work, totals, outputs)


def rows(
    a: torch.Tensor, a_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tile_expert: torch.Tensor,
    work: torch.Tensor, totals: torch.Tensor, row_slot: torch.Tensor,
) -> None:  # fmt: skip
    """Linear-2: each row's bf16 result to the address `row_slot` (int64 [rows], 0: nowhere), on this GPU or a peer. Else like `swiglu`.

    weight: uint8 [experts, hidden / 128, intermediate / 128, 128, 128]. weight_scales: float32 [experts, intermediate / 128, hidden / 128].
    """
    _launch(_compiled("rows", weight), a, a_scales, weight, weight_scales, tile_expert, work, totals, row_slot)


def plain(
    a: torch.Tensor, a_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tile_expert: torch.Tensor,
    work: torch.Tensor, totals: torch.Tensor, out: torch.Tensor, which: int = LINEAR1,
) -> None:  # fmt: skip
    """The product alone: out bf16 [rows, N]. which: the entry of `totals` that counts the work. Else like `rows`."""
    _launch(_compiled("plain", weight, which), a, a_scales, weight, weight_scales, tile_expert, work, totals, out)


def both(
    a: torch.Tensor, a_scales: torch.Tensor, weight1: torch.Tensor, weight1_scales: torch.Tensor, weight2: torch.Tensor,
    weight2_scales: torch.Tensor, work: torch.Tensor, totals: torch.Tensor, row_weight: torch.Tensor, middle: torch.Tensor,
    middle_scales: torch.Tensor, row_slot: torch.Tensor, ready: tuple[Any, ...], clamp: float | None = None,
    layout: BufferLayout | None = None, spans: Spans | None = None, form: str = "wide",
) -> None:  # fmt: skip
    """`swiglu` and `rows` in one kernel.

    work: int32 [4 · entries], the list of both layers' entries (`xstage.moe.work_table`).
    ready: (int32 [1 + rows / 128], zeros; control and call words of `xstage.device.meeting`); with a layout, which is `direct`, the kernel
    also sends this rank's rows, and `ready` goes on with (arrived, addresses for `send_sm90.Sender.run`).
    spans: records of this call are added to it (`clear` it before); another kernel, which writes them.
    form: of the kernel (`gemm_sm90`), with weights in MXFP4 one of `work_table.FORMS`; the same bits. `narrow` and `swapped` record
        no spans.

    Raises:
        XStageError: sizes that the kernel cannot take, spans of another GPU, or a form where it cannot be.
    """
    codes = weight1.dim() == 4
    if form not in FORMS or (form != "wide" and not codes):
        raise XStageError(f"form: {form!r} is not one of {', '.join(FORMS)}, of which fp8 weights have the first")
    if form in ("narrow", "swapped") and (spans is not None or a.shape[0] // 64 > MAX_ROW_TILES):
        raise XStageError(f"form: {form!r} needs no spans, and at most {64 * MAX_ROW_TILES} rows; there are {a.shape[0]}")
    spare = 0 if layout is None or layout.middle(middle.shape[1]) is None else SPARE_TILES
    given_form = form if codes else None
    unroll = _unroll(given_form, a.shape[1], middle.shape[1])
    kernel = compiled_gemm("both", unroll, clamp, layout, spans is not None, spare, *_more(given_form))
    layers = (
        (a, _matrix(weight1), a_scales, weight1_scales.flatten(2)),
        (middle, _matrix(weight2), middle_scales, weight2_scales),
    )
    outputs = ((middle, middle_scales, row_weight), row_slot)
    ctas, given = ctas_of(a.device.index), None
    if spans is not None:
        if len(spans.records) != ctas or spans.records.device != a.device:
            raise XStageError(f"spans: for {len(spans.records)} CTAs on {spans.records.device}; the kernel has {ctas} on {a.device}")
        given = (spans.records.view(-1), spans.capacity)
    columns = tuple(weight.shape[1] * TILE_K for weight in (weight1, weight2))
    kernel(layers, outputs, (work,), totals, ready, given, columns, ctas)


def kernels(
    hidden: int, intermediate: int, clamp: float | None, layout: BufferLayout | None, recorded: bool = False, codes: bool = False,
) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:  # fmt: skip
    """What a layer's calls compile, with the arguments. layout: of the kernel that sends rows too; None: one GEMM after the other.
    recorded: with spans. codes: weights are MXFP4."""
    if layout is not None:
        spare = 0 if layout.middle(intermediate) is None else SPARE_TILES
        made: tuple[str | None, ...] = forms(layout, recorded) if codes else (None,)
        return [
            (compiled_gemm, ("both", _unroll(form, hidden, intermediate), clamp, layout, recorded, spare, *_more(form))) for form in made
        ]
    return [_work("swiglu", hidden, clamp, codes), _work("rows", intermediate, None, codes)]


def forms(layout: BufferLayout, recorded: bool) -> tuple[str, ...]:
    """That the kernel of both layers may have with weights in MXFP4. Narrow and swapped ones must be able to count the layout's rows by
    64."""
    return FORMS if not recorded and layout.rows // 64 <= MAX_ROW_TILES else FORMS[:2]


def plain_kernels(hidden: int, intermediate: int, codes: bool = False) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What `plain` compiles for both layers, with the arguments."""
    sizes = ((LINEAR1, hidden), (LINEAR2, intermediate))
    return [_work("plain", depth, which, codes) for which, depth in sizes]


def both_kernel(hidden: int, intermediate: int, form: str | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `both` compiles without a layout, with the arguments. form: None: weights are fp8."""
    return compiled_gemm, ("both", _unroll(form, hidden, intermediate), None, None, False, 0, *_more(form))


def _work(kind: str, depth: int, option: Any, codes: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A kernel of one layer with the arguments that `_compiled` gives, for they are part of its name on disk."""
    form = "wide" if codes else None
    return compiled_gemm, (kind, _unroll(form, depth), option, *((None, False, 0, form) if codes else ()))


def _compiled(kind: str, weight: torch.Tensor, option: Any = None) -> Any:
    compiled, options = _work(kind, weight.shape[2] * TILE_K, option, weight.dim() == 4)
    return compiled(*options)


def _more(form: str | None) -> tuple[str, ...]:
    return () if form is None else (form,)


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    """As the kernel takes it: 128 elements a row, or the codes of 128 of N a row."""
    return weight.view(-1, weight.shape[2] * weight.shape[3] if weight.dim() == 4 else TILE_K)


def _unroll(form: str | None, *depths: int) -> int:
    """Stages of a round: K of every layer is a whole number of rounds. form: None: weights are fp8. Longer rounds made the wide form
    slower; the narrow one has not been tried with them; stages of the swapped one come in pairs."""
    for depth in depths:
        if depth % (2 * TILE_K):
            raise XStageError(f"a: K is {depth}; it must be a multiple of {2 * TILE_K}")
    long = form in (None, "split") and all(depth % (4 * TILE_K) == 0 for depth in depths)
    return 4 if long else 2


def _launch(
    kernel: Any, a: torch.Tensor, a_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tile_expert: torch.Tensor,
    work: torch.Tensor, totals: torch.Tensor, outputs: Any,
) -> None:  # fmt: skip
    columns, depth = weight.shape[1] * TILE_K, weight.shape[2] * TILE_K
    if depth != a.shape[1] or columns % 512 or a.shape[0] % 128:
        raise XStageError(f"weight: {tuple(weight.shape)} does not fit rows {tuple(a.shape)}: same K, N a multiple of 512, rows of 128")
    layer = (a, _matrix(weight), a_scales, weight_scales)
    kernel((layer,), (outputs,), (work, tile_expert), totals, None, None, (columns,), ctas_of(a.device.index))


@cache
def ctas_of(device: int) -> int:
    """CTAs that a GEMM launches on a GPU: whole clusters, one CTA per SM."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return int(sms // CLUSTER * CLUSTER)


@kept
def compiled_gemm(
    kind: str, unroll: int, option: Any = None, layout: BufferLayout | None = None, recorded: bool = False, spare: int = 0,
    form: str | None = None,
) -> Any:  # fmt: skip
    """Compiled once per process (about 3 s). option: the clamp of `swiglu`, which table of `plain`. layout: rows are sent too.
    recorded: with spans, of `both` only. spare: Linear-1's output of a row tile takes the place of the rows so many tiles before it; 0:
    it has memory of its own. form: weights are MXFP4; others than `wide` of `both` only."""
    rows, columns1, columns2 = cute.sym_int(divisibility=128), cute.sym_int(divisibility=4), cute.sym_int(divisibility=4)

    def matrix(dtype: Any, shape: tuple[Any, ...], divisibility: int) -> Any:
        strides = tuple(cute.sym_int64(divisibility=divisibility) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=16)

    def vector(dtype: Any) -> Any:
        return make_fake_tensor(dtype, (cute.sym_int(),), stride=(1,), assumed_align=8 if dtype is Int64 else 4)

    def wide() -> Any:
        return cute.sym_int(divisibility=128)

    def layer(columns: Any) -> Any:
        weight = (cute.sym_int(), wide()) if form else (wide(), TILE_K)
        return (
            matrix(Uint8, (rows, wide()), 128), matrix(Uint8, weight, 128),
            matrix(Float32, (cute.sym_int(), rows), 4), matrix(Float32, (cute.sym_int(), cute.sym_int(), columns), 4),
        )  # fmt: skip

    fp8 = (matrix(Uint8, (rows, wide()), 128), matrix(Float32, (cute.sym_int(), rows), 4), vector(Float32))
    bf16 = matrix(cutlass.BFloat16, (rows, wide()), 128)
    parts: tuple[Any, ...]
    parts, outputs, count = {
        "swiglu": ((epilogues.SwigluFp8(option),), (fp8,), LINEAR1),
        "rows": ((epilogues.RowsToSlots(),), (vector(Int64),), LINEAR2),
        "plain": ((epilogues.Plain(),), (bf16,), option),
        "both": ((epilogues.SwigluFp8(option, handed=True), epilogues.RowsToSlots()), (fp8, vector(Int64)), LINEAR1),
    }[kind]
    sender = None
    if layout is not None:
        sender = (OnceSender if layout.once else Sender)(layout, SPLIT_SLOT_BYTES if form == "split" else SLOT_BYTES)
    ready: Any = (vector(Int32), vector(Int64), vector(Int64)) if kind == "both" else None
    if sender is not None:
        ready += (vector(Int32), tuple(Int64(0) for _ in range(6 if sender.once else 5)))
    spans = (vector(Int32), Int32(1)) if recorded else None
    work = (vector(Int32),) if kind == "both" else (vector(Int32), vector(Int32))
    layers = tuple(layer(columns) for _, columns in zip(parts, (columns1, columns2), strict=False))
    stages = NARROW_STAGES if form in ("narrow", "swapped") else STAGES
    kernel = GroupedGemm(parts, stages, unroll, count, sender, recorded, spare, form)
    return cute.compile(
        kernel, layers, outputs, work, vector(Int32), ready, spans,
        tuple(Int32(512) for _ in parts), Int32(132), make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi",
    )  # fmt: skip
