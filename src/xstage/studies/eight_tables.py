"""Tables of what the two-GPU calibration says of more GPUs of one host, before anybody measured it. Needs no torch.

R and Q are taken for properties of the sender's port: with P ranks a rank sends a share f = 1 − 1/P of the same bytes, to P − 1 peers
instead of one, at the same rate. The fused attention's residual is computed here, the MoE kernel comes from `eight_moe`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from xstage.attention.layout import SequenceLayout
from xstage.platform import load_platform
from xstage.simulate.attention import predict_residual
from xstage.studies.tables import from_study, grid

PLATFORM, RANKS = "h200-nvlink4", (2, 4, 8)
HEADS, SEQUENCES, HEAD_DIM, ATTENTION_ROWS = 4, (4096, 8192, 16384, 32768, 65536), 128, 128
ORDERS = ("interleaved", "expert_wave")


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


def eight_moe_checked(result: dict[str, Any]) -> str:
    """What is simulated of two GPUs beside what was measured there."""
    rows = []
    for r in result["outputs"]["checked"]:
        found = r["measured"]
        pairs = [(r[order][key] / 1e3, found[order][key] / 1e3) for key in ("time_ns", "stall_ns") for order in ORDERS]
        times = [f"{said:,.0f}, {was:,.0f} ({100 * (said / was - 1):+.1f}%)" for said, was in pairs[:2]]
        stalls = [f"{said:.1f}, {was:.1f}" for said, was in pairs[2:]]
        rows.append([f"{r['shape']}, {r['share']:g}", *times, f"{r['speedup']:.3f}, {found['speedup']:.3f}", *stalls])
    head = ["model, f", "interleaved: simulated, measured", "expert-wave", "interleaved over wave", "stall of a tile, interleaved",
            "expert-wave"]  # fmt: skip
    e = result["errors"]
    said = f"Errors of a time: median {100 * e['time']['median']:.1f}%, largest {100 * e['time']['max']:.1f}%; of interleaved over wave: "
    said += f"{100 * e['speedup']['median']:.1f} and {100 * e['speedup']['max']:.1f}%; of a stall: {e['stall_us']['median']:.1f} and "
    said += f"{e['stall_us']['max']:.1f} µs."
    return grid(head, rows) + f"\n\nµs of the GEMM kernel, two GPUs; measured: `results/h200x2/moe-layer-earlier.json`. {said}"


def eight_moe(result: dict[str, Any]) -> str:
    """Every shape on every number of GPUs."""
    rows = []
    for r in result["outputs"]["rows"]:
        inter, wave = r["interleaved"], r["expert_wave"]
        rows.append([
            f"{r['shape']}, {r['ranks']}", f"{r['two_gemms_ns'] / 1e3:,.0f}",
            f"{r['bytes_over_rate_ns'] / 1e3:,.0f} … {r['in_step_ns'] / 1e3:,.0f}",
            *(f"{o['time_ns'] / 1e3:,.0f} ({o['local_ns'] / 1e3:,.0f})" for o in (inter, wave)), f"{r['speedup']:.3f}",
            f"{inter['stall_ns'] / 1e3:.1f}, {wave['stall_ns'] / 1e3:.1f}", f"{r['auto_ns'] / r['two_gemms_ns']:.2f}",
            f"{r['auto']}, {r['faster']}".replace("_", "-"),
        ])  # fmt: skip
    head = [
        "model, GPUs", "two GEMMs", "bytes over R: even … in step", "interleaved (results local)", "expert-wave (results local)",
        "interleaved over wave", "stall of a tile: interleaved, wave", "`auto` over two GEMMs", "`auto`, the faster of these two",
    ]  # fmt: skip
    return grid(head, rows) + f"\n\nµs; {result['inputs']['tokens']:,} tokens per rank, even picks."


def eight_moe_capacity(result: dict[str, Any]) -> str:
    """The largest number of GPUs with a Q that grows with the peers."""
    chosen = {(r["shape"], r["ranks"]): {order: r[order]["time_ns"] for order in ORDERS} for r in result["outputs"]["rows"]}
    rows = []
    for r in result["outputs"]["capacity"]:
        cases = [chosen[r["shape"], r["ranks"]], r["doubled"], r["per_peer"]]
        cells = [", ".join(f"{ns[order] / 1e3:,.0f}" for order in ORDERS) for ns in cases]
        rows.append([f"{r['shape']}, {r['ranks']}", *(f"{cell} ({_gain(ns):.3f})" for cell, ns in zip(cells, cases, strict=True))])
    head = ["model, GPUs", "Q of one peer: interleaved, expert-wave (one over the other)", "twice that", "as much for every peer"]
    return grid(head, rows) + "\n\nµs of the GEMM kernel, simulated."


def moe_once(result: dict[str, Any]) -> str:
    """Rows per pick and once."""
    rows = []
    for r in result["outputs"]["rows"]:
        each, once = r["times"]["per_pick"], r["times"]["once"]
        pairs = [(each[order], once[order]) for order in ORDERS]
        moved = [f"{way['interleaved']['moved_bytes'] / 1e6:,.0f}" for way in (each, once)]
        rows.append([
            f"{r['shape']}, {r['share']:g}, {r['ranks']}", ", ".join(moved),
            *(f"{a['time_ns'] / 1e3:,.0f}, {b['time_ns'] / 1e3:,.0f} ({100 * (b['time_ns'] / a['time_ns'] - 1):+.1f}%)" for a, b in pairs),
            f"{pairs[0][0]['span_ns'] / 1e3:.1f}, {pairs[0][1]['span_ns'] / 1e3:.1f}",
        ])  # fmt: skip
    head = ["model, f, GPUs", "MB that leave a rank: per pick, once", "interleaved", "expert-wave", "T_RS, interleaved"]
    return grid(head, rows) + f"\n\nµs of the GEMM kernel, simulated; {result['inputs']['tokens']:,} tokens per rank, even picks."


def _gain(ns: dict[str, float]) -> float:
    return ns["expert_wave"] / ns["interleaved"]


TABLES: dict[str, Callable[[Path], str]] = {
    "eight-attention": eight_attention_table,
    "eight-moe-checked": partial(from_study, "eight_moe", eight_moe_checked),
    "eight-moe": partial(from_study, "eight_moe", eight_moe),
    "eight-moe-capacity": partial(from_study, "eight_moe", eight_moe_capacity),
    "moe-once": partial(from_study, "moe_once", moe_once),
}
