"""The layer's grouped fp8 GEMMs against DeepGEMM's, interleaved, on one Hopper GPU.

    python benchmarks/grouped_gemm.py --out result.json [--shapes Qwen3.5 …] [--tokens 8192] [--ranks 2]

Per shape: rows of one rank of `--ranks`, loads of the experts drawn evenly per pair, padded to 128. Rows, weights and scales are random;
all variants compute the same product. `linear1`, `linear2`: ours, bf16 out. `swiglu`: Linear-1 with SwiGLU and fp8 out. `rows`: Linear-2
whose rows go to slots in this GPU's memory. `deep_gemm_…`: `m_grouped_fp8_gemm_nt_contiguous` of the `sgl-deep-gemm` package where it is
installed, with scales in the order it wants. DeepGEMM must agree with ours on the result.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from sgl_deep_gemm import package

from xstage.bench import timing
from xstage.moe import grouped_gemm, quantize
from xstage.moe.shapes import shape
from xstage.moe.work_table import TILE_COLUMNS, work_table

SHAPES = ("Qwen3.5", "DSv4-Flash", "Hy3", "Qwen3-30B", "GLM-5.2")


def random_e4m3(*size: int) -> torch.Tensor:
    out = torch.empty(size, dtype=torch.float8_e4m3fn, device="cuda")
    for part in out.view(-1, size[-1]).split(1 << 18):
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
    return out


def measure(name: str, tokens: int, ranks: int, peer: Any, rounds: int) -> dict[str, Any]:
    s = shape(name)
    experts = s.experts // ranks
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(0, experts, (tokens * s.top_k,), generator=generator)
    tiles = [-(-n // 128) for n in torch.bincount(picks, minlength=experts).tolist()]
    count = sum(tiles)
    rows = 128 * count
    expert = torch.tensor([e for e, n in enumerate(tiles) for _ in range(n)], dtype=torch.int32, device="cuda")
    flat = [work_table(tiles, n // TILE_COLUMNS) for n in (2 * s.intermediate, s.hidden)]
    tables = [torch.tensor(table, dtype=torch.int32, device="cuda").view(-1) for table in flat]
    totals = torch.tensor([len(tables[0]) // 2, len(tables[1]) // 2, count, rows], dtype=torch.int32, device="cuda")
    sizes = {"linear1": (s.hidden, 2 * s.intermediate), "linear2": (s.intermediate, s.hidden)}
    variants: dict[str, Callable[[], Any]] = {}
    agreement = {}
    for which, (layer, (k, n)) in enumerate(sizes.items()):
        a, w = random_e4m3(rows, k), random_e4m3(experts, n, k)
        a_scales = torch.rand(k // 128, rows, device="cuda") + 0.5
        w_scales = (torch.rand(experts, k // 128, n // 128, device="cuda") + 0.5) * 0.02
        out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        pieces = quantize.tiled(w.view(torch.uint8)).contiguous()  # as ours lie; the same numbers as DeepGEMM's
        given = (a.view(torch.uint8), a_scales, pieces, w_scales, expert, tables[which], totals)
        variants[layer] = lambda given=given, out=out, which=which: grouped_gemm.plain(*given, out, which)
        if layer == "linear1":
            middle = torch.empty(rows, n // 2, dtype=torch.uint8, device="cuda")
            scales, weight = torch.empty(n // 256, rows, device="cuda"), torch.rand(rows, device="cuda")
            mixed = (*given[:3], w_scales.unflatten(2, (-1, 2)), *given[4:])
            variants["swiglu"] = lambda mixed=mixed, rest=(weight, middle, scales): grouped_gemm.swiglu(*mixed, *rest)
        else:
            slot = out.data_ptr() + torch.randperm(rows, device="cuda") * (2 * n)
            variants["rows"] = lambda given=given, slot=slot: grouped_gemm.rows(*given, slot)
        if peer is not None:
            index, other = expert.repeat_interleave(128), torch.empty_like(out)
            per_row, per_block = a_scales.T, w_scales.transpose(1, 2).contiguous()
            variants[f"deep_gemm_{layer}"] = lambda a=a, w=w, p=(per_row, per_block), other=other, index=index: (
                peer.m_grouped_fp8_gemm_nt_contiguous((a, p[0]), (w, p[1]), other, index)
            )
            variants[layer]()
            variants[f"deep_gemm_{layer}"]()
            agreement[layer] = float((other.float() - out.float()).norm() / out.float().norm())
            if not agreement[layer] < 3e-3:
                raise SystemExit(f"{name} {layer}: ours and DeepGEMM differ by {agreement[layer]:.1e}")
    calls = 3

    def repeat(function: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                function()

        return run

    times = timing.interleaved({n: repeat(f) for n, f in variants.items()}, calls=calls, rounds=rounds)
    flops = {layer: 2.0 * rows * k * n for layer, (k, n) in sizes.items()}
    flops |= {v: flops["linear2" if v in ("rows", "deep_gemm_linear2") else "linear1"] for v in times if v not in flops}
    ns = {variant: t.slowest_ns for variant, t in times.items()}
    row: dict[str, Any] = {
        "shape": name, "rows": rows, "experts": experts, "agreement": agreement,
        "times": {v: t.to_json() for v, t in times.items()},
        "tflops": {v: round(flops[v] / t / 1e3, 1) for v, t in ns.items()},
        "derived": {"swiglu_over_plain": ns["swiglu"] / ns["linear1"], "rows_over_plain": ns["rows"] / ns["linear2"]},
    }  # fmt: skip
    if peer is not None:
        theirs = ns["deep_gemm_linear1"] + ns["deep_gemm_linear2"]
        row["derived"] |= {
            "over_deep_gemm": (ns["linear1"] + ns["linear2"]) / theirs,
            "swiglu_and_rows_over_deep_gemm": (ns["swiglu"] + ns["rows"]) / theirs,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    peer = package()
    file = timing.ResultFile(options.out, "grouped_gemm", settings=vars(options))
    for name in options.shapes:
        row = measure(name, options.tokens, options.ranks, peer, options.rounds)
        file.add(row)
        derived = {k: round(v, 3) for k, v in row["derived"].items()}
        print(name, row["rows"], row["tflops"], derived, file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    file.finish()


if __name__ == "__main__":
    main()
