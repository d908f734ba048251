"""`xstage bench moe-layer` with variants of the `sgl-deep-gemm` package in the same groups, interleaved, in the same result file.

    torchrun --nproc-per-node 2 benchmarks/sgl_deep_gemm.py --out moe.json [--shapes Qwen3.5 …] [--tokens 8192] [--shares 0.5 0.875]

* `deep_gemm_linear1`, `deep_gemm_linear2` (group `gemm`): `m_grouped_fp8_gemm_nt_contiguous` on the same rows, weights and scales as ours,
  in the order it wants, made outside the timed call. Its product must agree with ours.
* `deep_gemm_mega` (group `layer`): `fp8_mega_moe`, its fused layer for sm_90, on the same tokens, picks and weights; x in e4m3, already in
  its buffer, so it stands beside `serial_e4m3`. What its output differs from ours by is printed: layers round in other places.

Where the package is missing, or refuses a shape, ours are measured without it.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from xstage.moe import quantize
from xstage.studies import moe_layer


def package() -> Any:
    try:
        import deep_gemm
    except Exception as error:  # a peer's package may fail in any way; ours are timed without it
        print(f"deep_gemm is not here: {error!r}", file=sys.stderr)
        return None
    return deep_gemm


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, file=sys.stderr, flush=True)


def on_all(failure: str) -> str:
    """The first rank's failure, the same on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failure)
    return next((f for f in everyone if f), "")


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def products(layer: moe_layer.Layer, peer: Any) -> dict[str, Callable[[], Any]]:
    exchange, held, pipeline = layer.pipeline.exchange, layer.pipeline.weights, layer.pipeline
    expert = exchange.tile_expert[: layer.rows // 128].repeat_interleave(128)
    given = (
        (exchange.activations, exchange.scales, quantize.untiled(held.w1), held.w1_scales.flatten(2)),
        (pipeline.middle, pipeline.middle_scales, quantize.untiled(held.w2), held.w2_scales),
    )
    made: dict[str, Callable[[], Any]] = {}
    for which, (a, a_scales, w, w_scales) in enumerate(given):
        rows = a[: layer.rows].view(torch.float8_e4m3fn)
        per_row = a_scales[:, : layer.rows].contiguous().T
        weight, per_block = w.view(torch.float8_e4m3fn), w_scales.mT.contiguous()
        out = torch.empty(layer.rows, w.shape[1], dtype=torch.bfloat16, device="cuda")

        def call(rows: Any = rows, p: Any = per_row, weight: Any = weight, b: Any = per_block, out: Any = out) -> None:
            peer.m_grouped_fp8_gemm_nt_contiguous((rows, p), (weight, b), out, expert)

        failure = ""
        try:
            call()
            layer.plain(which)
            miss = difference(out, layer.products[which][: layer.rows])
            failure = "" if miss < 3e-3 else f"differs from ours by {miss:.1e}"
        except Exception as error:
            failure = repr(error)[:300]
        if failure := on_all(failure):
            say(f"{layer.shape.name}: deep_gemm_linear{which + 1} left out: {failure}")
            return {}
        made[f"deep_gemm_linear{which + 1}"] = call
    return made


class Mega:
    """`fp8_mega_moe` with its own copy of the weights; `free` gives its buffer back."""

    def __init__(self, layer: moe_layer.Layer, peer: Any):
        s, held, tokens = layer.shape, layer.pipeline.weights, len(layer.x)
        linear1, linear2 = held.linear1, held.linear2
        assert linear1.scales is not None
        assert linear2.scales is not None
        assert linear1.undo is not None
        assert linear2.undo is not None
        w1, w2 = (torch.empty(linear.shape, dtype=linear.weight.dtype, device="cuda") for linear in (linear1, linear2))
        for e in range(len(w1)):
            w1[e], w2[e] = linear1.undo(linear1.weight[e]), linear2.undo(linear2.weight[e])
        self.peer, self.out = peer, torch.empty_like(layer.out)
        self.weights = peer.transform_weights_for_mega_moe_sm90((w1, linear1.scales), (w2, linear2.scales.contiguous()))
        self.buffer = peer.get_symm_buffer_for_mega_moe(dist.group.WORLD, s.experts, tokens, s.top_k, s.hidden, s.intermediate)
        self.buffer.x[:tokens].copy_(layer.q)
        self.buffer.x_sf[:tokens].copy_(layer.scales)
        self.buffer.topk_idx[:tokens].copy_(layer.idx)
        self.buffer.topk_weights[:tokens].copy_(layer.weights)

    def __call__(self) -> None:
        self.peer.fp8_mega_moe(self.out, *self.weights, self.buffer)

    def free(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        self.buffer.destroy()


def adapter(peer: Any) -> moe_layer.Extra:
    held: list[Mega] = []

    def extra(layer: moe_layer.Layer) -> dict[str, dict[str, Callable[[], Any]]]:
        while held:
            held.pop().free()
        more: dict[str, dict[str, Callable[[], Any]]] = {"gemm": products(layer, peer)}
        failure, mega = "", None
        try:
            mega = Mega(layer, peer)
        except Exception as error:
            failure = repr(error)[:300]
        failure = on_all(failure)
        if mega is not None and not failure:
            held.append(mega)
            mega()
            torch.cuda.synchronize()
            say(f"{layer.shape.name}: output of deep_gemm_mega differs from ours by {difference(mega.out, layer.out):.1e}")
            more["layer"] = {"deep_gemm_mega": mega}
        else:
            say(f"{layer.shape.name}: deep_gemm_mega left out: {failure}")
        return more

    return extra


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--shapes", nargs="+", default=list(moe_layer.SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shares", type=float, nargs="+", default=list(moe_layer.SHARES))
    parser.add_argument("--groups", nargs="+", default=list(moe_layer.GROUPS))
    parser.add_argument("--orders", nargs="*", default=list(moe_layer.FUSED))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=400.0, help="no shape is begun after this many seconds")
    parser.add_argument("--platform", default="h200-nvlink4")
    options = parser.parse_args()
    peer = package()
    moe_layer.run(
        options.out, shapes=options.shapes, tokens=options.tokens, shares=options.shares, budget_s=options.budget,
        platform=options.platform, groups=options.groups, orders=options.orders, rounds=options.rounds,
        extra=None if peer is None else adapter(peer),
    )  # fmt: skip
    sys.stdout.flush()
    os._exit(0)  # tearing NCCL down under captured graphs can hang


if __name__ == "__main__":
    main()
