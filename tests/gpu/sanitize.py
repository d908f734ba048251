"""Calls of the operators for compute-sanitizer to look at: small shapes, every kernel a few times, on one GPU.

    python tests/gpu/sanitize.py --prebuild FOLDER [--ranks 2]      # without a GPU; XSTAGE_KERNELS=FOLDER then spares the compiling
    compute-sanitizer --tool memcheck --kernel-name kernel_substring=xstage python tests/gpu/sanitize.py --what moe,attention
    compute-sanitizer --tool initcheck python tests/gpu/sanitize.py --what moe

racecheck and synccheck as memcheck. The filter leaves torch's kernels alone; initcheck must see them, for they write what others read.
A process is a group of one rank, which sends to itself; `torchrun --nproc-per-node 2 tests/gpu/sanitize.py` puts two ranks on the GPU.

* moe: both weight formats, one GEMM after the other and both in one kernel, rows per pick and once, tokens in bfloat16 and in e4m3, masked
  picks; the one kernel must give the bits of the two, in all its forms.
* attention: whole Ulysses attention, with and without causal mask and log-sum-exp, more query heads than key heads, against float64.

Every tensor is an allocation of its own (no caching allocator), so that memcheck knows where it ends. The buffers that peers store into are
one allocation each: what goes wrong inside of one, the tests that poison them find.

Not covered: numbers (test_moe.py, test_attention_a2a.py), graphs, late peers.
"""

import argparse
import itertools
import os
import time

import torch
import torch.distributed as dist
from sections import RANK, WORLD, join, say, settle

from xstage.moe import layout
from xstage.moe.work_table import FORMS

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MOST = 512, 256, 8, 2, 200
SCHEDULES = ("serial", "interleaved")
RUNS = (("serial", False), ("interleaved", False), ("interleaved", True))  # schedule, rows_once
layout.NEAR_TILES = 1  # or such small layers would have nothing to send once
TIMEOUT_S = 300.0  # kernels take a hundred times as long


def prebuild(folder: str, ranks: int) -> None:
    """The kernels of the layer; those of attention take seconds to compile and cannot be kept."""
    from xstage.moe.prebuild import prebuild
    from xstage.moe.shapes import MoEShape

    model = MoEShape("test", HIDDEN, INTERMEDIATE, EXPERTS, TOP_K)
    for weights in ("fp8", "mxfp4"):
        for picks, rows in (("int64", "bfloat16"), ("int32", "float8_e4m3fn")):
            for once in (False, True):
                made = prebuild(
                    folder, [model], tokens=MOST, ranks=ranks, schedules=SCHEDULES, picks=[picks], rows=[rows], weights=weights,
                    rows_once=once,
                )  # fmt: skip
    print(f"{len(made)} kernels in {folder}")


def moe(weights: str) -> None:
    import xstage
    from xstage.moe import quantize

    g = torch.Generator().manual_seed(RANK)
    per_rank = EXPERTS // WORLD
    w1 = (torch.randn(per_rank, 2 * INTERMEDIATE, HIDDEN, generator=g) * 2 * HIDDEN**-0.5).bfloat16()
    w2 = (torch.randn(per_rank, HIDDEN, INTERMEDIATE, generator=g) * INTERMEDIATE**-0.5).bfloat16()
    calls = []
    for tokens in (MOST - 3 * RANK, 37 + RANK, 0):
        x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
        idx = torch.randint(EXPERTS, (tokens, TOP_K), generator=g)
        idx[torch.rand(idx.shape, generator=g) < 0.1] = -1
        routing = torch.rand(tokens, TOP_K, generator=g).cuda()
        rows, scales = quantize.quantize_activations(x)
        calls.append((x.cuda(), idx.cuda(), routing, None))
        calls.append((rows.cuda(), idx.int().cuda(), routing, scales.cuda()))
    wanted = []
    for schedule, once in RUNS:
        begun = time.time()
        with xstage.MegaMoE(
            num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K, max_tokens_per_rank=MOST, schedule=schedule,
            rows_once=once, weight_format=weights, device="cuda", timeout_s=TIMEOUT_S, fallback="error",
        ) as layer:  # fmt: skip
            layer.load_weights(w1, w2)
            forms = FORMS if weights == "mxfp4" and schedule != "serial" else (None,)
            for form, (number, (x, idx, routing, scales)) in itertools.product(forms, enumerate(calls)):
                layer._kernels.form = form
                y = layer(x, idx, routing, x_scales=scales)
                layer.check()
                if schedule == "serial":
                    wanted.append(y)
                assert bool(y.isfinite().all()), f"{weights}, {schedule}, {form}, call {number}: not finite"
                assert torch.equal(y, wanted[number]), f"{weights}, {schedule}, {form}, call {number}: other bits"
            settle()
        say(f"moe, {weights}, {schedule}{', rows once' * once}: {len(forms)} · {len(calls)} calls, {time.time() - begun:.0f} s")


def attention(sequence: int = 300, heads: int = 2, head_dim: int = 128) -> None:
    import xstage
    from xstage.attention.layout import SequenceLayout
    from xstage.attention.reference import rows_of

    layout = SequenceLayout.even(sequence, WORLD)
    rows = rows_of(layout, RANK).cuda()
    for kv_heads, causal in ((heads, False), (heads // 2, True)):
        begun = time.time()
        g = torch.Generator().manual_seed(1)
        whole = [torch.randn(1, sequence, WORLD * h, head_dim, generator=g).bfloat16() for h in (heads, kv_heads, kv_heads)]
        q, k, v = (x.transpose(1, 2) for x in whole)
        exact, plain = (
            torch.nn.functional.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), is_causal=causal, enable_gqa=True)
            .transpose(1, 2)[:, rows.cpu()]
            .double()
            for dtype in (torch.float64, torch.bfloat16)
        )
        mine = [x.cuda()[:, rows].contiguous() for x in whole]
        with xstage.AttentionA2A(
            max_sequence=sequence, heads=WORLD * heads, kv_heads=WORLD * kv_heads, head_dim=head_dim, device="cuda", timeout_s=TIMEOUT_S,
            fallback="error",
        ) as attend:  # fmt: skip
            for _ in range(2):
                out, lse = attend.ulysses(*mine, causal=causal, layout=layout, return_lse=True)
                attend.check()
                ratio = float((out.cpu().double() - exact).norm() / (plain - exact).norm())
                assert ratio <= 2, f"{kv_heads} key heads, causal {causal}: {ratio} × the error of plain bfloat16"
                assert bool(lse.isfinite().all()), f"{kv_heads} key heads, causal {causal}: log-sum-exp"
                attend.ulysses(*mine, causal=causal, layout=layout, first_heads=heads // kv_heads)
                attend.check()
            settle()
        say(f"attention, {kv_heads} key heads, causal {causal}: {time.time() - begun:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default="moe,attention", help="some of moe, attention, or of the layer fp8 or mxfp4 alone")
    parser.add_argument("--prebuild", help="only compile the layer's kernels into this folder, without a GPU")
    parser.add_argument("--ranks", type=int, default=1, help="for --prebuild: how many ranks will share the GPU")
    options = parser.parse_args()
    if options.prebuild:
        prebuild(options.prebuild, options.ranks)
        return
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    join(one_gpu=True)
    runs = {"fp8": lambda: moe("fp8"), "mxfp4": lambda: moe("mxfp4"), "attention": attention}
    for what in options.what.replace("moe", "fp8,mxfp4").split(","):
        runs[what]()
    say("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
