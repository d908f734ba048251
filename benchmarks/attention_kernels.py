"""Attention kernels against each other on one Hopper GPU, interleaved: FlashAttention 4, 3 and 2, cuDNN, and this package's kernel alone.

    python benchmarks/attention_kernels.py --out result.json [--heads 4 12] [--sequences 4096 8192 16384 32768]

bf16, head dim 128, batch 1, full attention of the heads of one rank, [batch, sequence, heads, head dim] in and out. Several calls to a CUDA
graph, so that no launch is in the times.

* `fa4`: flash-attn-4 as the package's serial baselines run it.
* `xstage`: the kernel of `xstage.AttentionA2A` in a group of one rank: the same mainloop, its rows stored through the table of addresses.
* `cudnn`: cuDNN through torch, on the tensors as they are; `cudnn_heads_first`: on tensors that lie as [batch, heads, sequence, head dim].
* `fa2`: FlashAttention 2, as torch ships it. `fa3`: FlashAttention 3 where the package `fa3-fwd` is installed.

Every kernel must be right first, on a small shape: at most twice the error of plain bfloat16 against float64. A kernel that cannot run is
left out, and the file says why.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import xstage
from xstage.attention import serial
from xstage.attention.op import Variant
from xstage.bench import timing

HEADS, SEQUENCES, HEAD_DIM = (4, 12), (4096, 8192, 16384, 32768), 128
CHECKED = (4, 1000)  # heads, sequence
FLOP_PER_NS = 6e5  # to choose the calls of a graph
Kernel = Callable[[], torch.Tensor]


def tensors(heads: int, sequence: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    size = (1, sequence, heads, HEAD_DIM)
    return [torch.randn(size, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3)]


def torch_attention(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[batch, heads, sequence, head dim]."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: xstage.AttentionA2A) -> dict[str, Kernel]:
    """Each returns [batch, sequence, heads, head dim]."""
    out = torch.empty_like(q)
    views = [x.transpose(1, 2) for x in (q, k, v)]
    heads_first = [x.contiguous() for x in views]
    return {
        "fa4": lambda: serial.attention(q, k, v, out=out)[0],
        "xstage": lambda: attend(q, k, v, variant=Variant(finish="none")),
        "cudnn": lambda: serial.cudnn(q, k, v),
        "cudnn_heads_first": lambda: torch_attention(SDPBackend.CUDNN_ATTENTION, *heads_first).transpose(1, 2),
        "fa2": lambda: torch_attention(SDPBackend.FLASH_ATTENTION, *views).transpose(1, 2),
        "fa3": lambda: serial.fa3(q, k, v),
    }


def errors(attend: xstage.AttentionA2A) -> tuple[dict[str, float], dict[str, str]]:
    """Errors of the kernels as multiples of plain bfloat16's, and why others cannot run."""
    q, k, v = tensors(*CHECKED)
    views = [x.transpose(1, 2) for x in (q, k, v)]
    exact = torch_attention(SDPBackend.MATH, *(x.double() for x in views)).transpose(1, 2)
    logits = (views[0] @ views[1].transpose(2, 3)) * HEAD_DIM**-0.5
    plain = (logits.softmax(-1) @ views[2]).transpose(1, 2).double() - exact
    found: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, kernel in kernels(q, k, v, attend).items():
        try:
            if name == "fa4" and not serial.has_fa4(q):
                raise ImportError
            y = kernel()
            torch.cuda.synchronize()
        except ImportError:
            missing[name] = "not installed"
        except RuntimeError as error:
            missing[name] = (str(error).splitlines() or [type(error).__name__])[0][:200]
        else:
            found[name] = float((y.double() - exact).norm() / plain.norm())
            if not found[name] <= 2:
                raise SystemExit(f"{name}: {found[name]:.2f} × the error of plain bfloat16")
    return found, missing


def measure(heads: int, sequence: int, names: list[str], attend: xstage.AttentionA2A, rounds: int) -> dict[str, Any]:
    flop = 4.0 * sequence**2 * HEAD_DIM * heads
    calls = timing.launches_for(flop / FLOP_PER_NS, least=1)
    q, k, v = tensors(heads, sequence)
    functions = kernels(q, k, v, attend)
    graphs = {}
    for name in names:
        functions[name]()
        torch.cuda.synchronize()
        graphs[name] = serial.graphed(functions[name], calls, 1)
    times = timing.interleaved(graphs, calls=calls, rounds=rounds, pause_s=0.03)
    ns = {name: t.slowest_ns for name, t in times.items()}
    others = {name: t for name, t in ns.items() if name != "xstage"}
    strongest = min(others, key=lambda name: others[name])
    return {
        "shape": f"H{heads}_M{sequence}", "heads": heads, "sequence": sequence, "head_dim": HEAD_DIM, "calls": calls,
        "times": {name: t.to_json() for name, t in times.items()},
        "tflops": {name: round(flop / t / 1e3, 1) for name, t in ns.items()},
        "derived": {"strongest": strongest, "over_strongest": {name: round(t / ns[strongest], 4) for name, t in ns.items()}},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--heads", nargs="+", type=int, default=list(HEADS))
    parser.add_argument("--sequences", nargs="+", type=int, default=list(SEQUENCES))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    settings = {name: getattr(options, name) for name in ("heads", "sequences", "rounds")}
    settings |= {"dtype": "bfloat16", "cudnn": torch.backends.cudnn.version()}
    file = timing.ResultFile(options.out, "attention_kernels", settings=settings)
    make = partial(xstage.AttentionA2A, head_dim=HEAD_DIM, device="cuda", fallback="error")
    with make(max_sequence=CHECKED[1], heads=CHECKED[0]) as attend:
        found, missing = errors(attend)
    file.content |= {"errors_over_plain": {name: round(ratio, 3) for name, ratio in found.items()}, "missing": missing}
    print("errors over plain bfloat16's:", file.content["errors_over_plain"], "missing:", missing, file=sys.stderr, flush=True)
    done, begun = {row["shape"] for row in file.content["rows"]}, time.monotonic()
    for sequence in sorted(options.sequences):
        for heads in options.heads:
            if f"H{heads}_M{sequence}" in done:
                continue
            with make(max_sequence=sequence, heads=heads) as attend:
                row = measure(heads, sequence, list(found), attend, options.rounds)
            file.add(row)
            print(
                row["shape"], row["tflops"], row["derived"]["strongest"], f"{time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True
            )
            torch.cuda.empty_cache()
    file.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
