"""Compile a layer's kernels into a folder ahead of time, in as many processes as there are processors; needs no GPU.

    xstage prebuild --out kernels --shapes Qwen3.5 --tokens 8192 --ranks 2
    XSTAGE_KERNELS=kernels torchrun …                                # compiles nothing that is there

What is compiled depends on sizes: shape, most tokens per rank, ranks, schedule, dtypes of picks and rows, clamp.

Not covered: attention (see `xstage.device.kept`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from xstage.device.kept import FOLDER
from xstage.errors import XStageError
from xstage.moe import arguments
from xstage.moe.auto_order import auto_order
from xstage.moe.shapes import MoEShape, shape
from xstage.moe.work_table import TILE_COLUMNS, WorkOrder

Work = tuple[Callable[..., Any], tuple[Any, ...]]
CLUSTERS = 66  # of two CTAs, on a Hopper GPU of 132 SMs


def prebuild(
    folder: str | os.PathLike[str], shapes: Sequence[str | MoEShape], *, tokens: int, ranks: int,
    schedules: Sequence[str] = ("interleaved",), lead_rows: int | None = None, clamp: float | None = None,
    picks: Sequence[str] = ("int64",), rows: Sequence[str] = ("bfloat16",), processes: int | None = None,
    weights: str = "fp8", rows_once: bool = False,
) -> list[Path]:  # fmt: skip
    """Fill `folder` with the kernels of layers; what is there already is left alone.

    Args:
        shapes: of `xstage.moe.shapes`, or their names. tokens: most per rank. schedules, lead_rows, clamp: as `MegaMoE` takes them.
        picks: `int32`, `int64`. rows: `bfloat16`, `float8_e4m3fn`. processes: None: one per processor.
        weights: `weight_format` of `MegaMoE`. rows_once: as `MegaMoE` takes it.

    Returns:
        The objects in the folder.

    Raises:
        XStageError: arguments that `MegaMoE` would refuse.
    """
    models = [shape(known) if isinstance(known, str) else known for known in shapes]
    for schedule in schedules:
        arguments.check_options(schedule, lead_rows, clamp, None, "error", weights)
    for name, given, known in (("picks", picks, ("int32", "int64")), ("rows", rows, ("bfloat16", "float8_e4m3fn"))):
        if unknown := set(given) - set(known):
            raise XStageError(f"{name}: {sorted(unknown)[0]!r} is not one of {', '.join(known)}")
    work: list[Work] = []
    for model, schedule, wide, row in product(models, schedules, picks, rows):
        work += kernels_of(
            model, tokens, ranks, schedule, lead_rows, clamp, wide == "int64", row == "float8_e4m3fn", weights=weights, once=rows_once
        )  # fmt: skip
    return fill(folder, work, processes)


def kernels_of(
    model: MoEShape, tokens: int, ranks: int, schedule: str, lead_rows: int | None, clamp: float | None, wide: bool, quantized: bool,
    pull: bool = False, recorded: bool = False, weights: str = "fp8", once: bool = False,
) -> list[Work]:  # fmt: skip
    """What one layer compiles. pull: its exchange by reads. recorded: also the kernel of both GEMMs with spans. once: `rows_once` of
    `MegaMoE`."""
    from xstage.moe import exchange, grouped_gemm

    order = None
    if schedule != "serial":
        columns = (2 * model.intermediate // TILE_COLUMNS, model.hidden // TILE_COLUMNS)
        name = auto_order(model, tokens, ranks) if schedule == "auto" else schedule
        order = WorkOrder.of(name, *columns, lead_rows=lead_rows, instances=CLUSTERS)
    layout = arguments.layout(ranks, model.experts, model.hidden, model.intermediate, model.top_k, tokens)
    layout = replace(layout, direct=order is not None, once=once and order is not None, pull=pull)
    exchange.check_layout(layout, model.intermediate)
    codes = weights == "mxfp4"
    gemms = grouped_gemm.kernels(model.hidden, model.intermediate, clamp, None if order is None else layout, codes=codes)
    if recorded:
        gemms += grouped_gemm.kernels(model.hidden, model.intermediate, clamp, layout, True, codes)
    return [*exchange.kernels(layout, model.intermediate, order, wide, quantized), *gemms]


def fill(folder: str | os.PathLike[str], work: Sequence[Work], processes: int | None = None) -> list[Path]:
    """Call every function with its arguments, where `kept` keeps what they compile in `folder`; the objects that are there then."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_keep_in, initargs=(str(Path(folder).resolve()),)) as pool:
        list(pool.map(_compile, dict.fromkeys(work)))
    return sorted(Path(folder).glob("*.o"))


def _keep_in(folder: str) -> None:
    os.environ |= {FOLDER: folder, "CUTE_DSL_ARCH": "sm_90a"}


def _compile(work: Work) -> None:
    compiled, options = work
    compiled(*options)
