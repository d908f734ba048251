"""What the two-GPU calibration says of more GPUs of one host, before anybody measured it: markdown tables. Needs no torch.

The model takes R and Q for properties of the sender's port: with P ranks a rank sends a share f = 1 − 1/P of the same bytes, to P − 1 peers
instead of one, at the same rate. That is what a run on eight GPUs would test first.
"""

from __future__ import annotations

from pathlib import Path

from xstage.attention.layout import SequenceLayout
from xstage.moe.auto_order import auto_order, tile_ns
from xstage.moe.shapes import shape
from xstage.moe.work_table import TILE_COLUMNS, TILE_ROWS
from xstage.platform import load_platform
from xstage.simulate.attention import predict_residual
from xstage.studies.moe_stall import burst
from xstage.studies.tables import grid

PLATFORM, RANKS = "h200-nvlink4", (2, 4, 8)
HEADS, SEQUENCES, HEAD_DIM, ATTENTION_ROWS = 4, (4096, 8192, 16384, 32768, 65536), 128, 128
SHAPES, TOKENS = ("Qwen3.5", "DSv4-Flash", "Hy3", "Qwen3-30B", "GLM-5.2"), 8192


def eight_attention_table(_results: Path) -> str:
    """E_res of the fused attention: the drain of the last burst, and with the stalls of waves above Q; the slowest rank."""
    platform, lines = load_platform(PLATFORM, samples=False), []
    for sequence in SEQUENCES:
        cells = []
        for ranks in RANKS:
            layout = SequenceLayout.even(sequence, ranks)
            tail, stalls = (
                max(
                    predict_residual(
                        HEADS, layout, platform=platform, rank=rank, row_bytes=2 * HEAD_DIM, tile_rows=ATTENTION_ROWS, sms=platform.sms,
                        order="alternating", stalls=with_stalls,
                    )[1]
                    for rank in range(ranks)
                )
                for with_stalls in (False, True)
            )  # fmt: skip
            cells.append(f"{tail / 1e3:.1f} … {stalls / 1e3:.1f}")
        lines.append([f"{HEADS}, {sequence:,}", *cells])
    return grid(["heads per rank, M", *(f"{ranks} GPUs" for ranks in RANKS)], lines) + "\n\nµs."


def eight_moe_table(_results: Path) -> str:
    """Per shape and number of ranks: the layer's two floors, stalls of a Linear-2 tile, and the order that `auto` takes."""
    platform, lines = load_platform(PLATFORM, samples=False), []
    for name in SHAPES:
        m = shape(name)
        pairs = TOKENS * m.top_k
        tiles1, tiles2 = (pairs / TILE_ROWS * columns / TILE_COLUMNS / platform.sms for columns in (2 * m.intermediate, m.hidden))
        alone1, alone2 = tile_ns(m.hidden), tile_ns(m.intermediate)
        gap = alone2 + tiles1 / tiles2 * alone1
        for ranks in RANKS:
            share = 1 - 1 / ranks
            stores, rows = burst(share, platform), pairs * share * (m.hidden * 33 / 32 + 16)
            lines.append([
                f"{name}, {ranks}", f"{(tiles1 * alone1 + tiles2 * alone2) / 1e3:,.0f}",
                f"{(rows + pairs * share * 2 * m.hidden) / stores.rate / 1e3:,.0f}", f"{stores.stall_ns(alone2) / 1e3:.1f}",
                f"{stores.stall_ns(gap, rows / tiles2) / 1e3:.1f}", auto_order(m.intermediate, share).replace("_", "-"),
            ])  # fmt: skip
    head = ["model, GPUs", "two GEMMs", "bytes over R", "stall of a tile, one GEMM after the other", "one kernel", "`auto`"]
    return grid(head, lines) + f"\n\nµs; {TOKENS:,} tokens per rank, even picks, paddings left out."
