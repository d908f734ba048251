"""Compiles the attention kernels of one or more configurations without a GPU and prints their PTX and machine code as JSON.

Run by `test_attention_kernel.py` in a process of its own, because the target is read from the environment when the compiler is loaded.
Arguments: configurations `fused,dtype,head_dim,queries_per_kv,causal,with_lse,runs,first`; `stock,…` is flash-attn-4's own kernel,
`meeting,world,kind,ahead` the kernels around it.
"""

import json
import sys
from typing import Any

import cutlass
import cutlass.cute as cute
import machine_code
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.interface import _tile_size_fwd_sm90
from flash_attn.cute.utils import AuxData
from quack.compile_utils import make_fake_tensor

from xstage.attention import kernel_sm90
from xstage.device.meeting import compiled_meeting


def stock(dtype: str, head_dim: int, queries_per_kv: int, causal: bool) -> Any:
    config = _tile_size_fwd_sm90(head_dim, head_dim, causal, False)
    element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype]
    kernel = FlashAttentionForwardSm90(
        element, head_dim, head_dim, queries_per_kv, is_causal=causal, is_local=False, pack_gqa=False, tile_m=config.m_block_size,
        tile_n=config.n_block_size, num_stages=2, num_threads=384, Q_in_regs=False, intra_wg_overlap=config.intra_wg_overlap,
        mma_pv_is_rs=config.mma_pv_is_rs,
    )  # fmt: skip
    batch, sequence, heads, kv_heads = (cute.sym_int() for _ in range(4))
    q, o = (make_fake_tensor(element, (batch, sequence, heads, head_dim), divisibility=8) for _ in range(2))
    k, v = (make_fake_tensor(element, (batch, sequence, kv_heads, head_dim), divisibility=8) for _ in range(2))
    return cute.compile(
        kernel, q, k, v, o, None, cutlass.Float32(1.0), *[None] * 9, AuxData(), None, None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi",
    )  # fmt: skip


def main() -> None:
    out = {}
    for name in sys.argv[1:]:
        if name.startswith("meeting"):
            world, kind, ahead = (int(word) for word in name.split(",")[1:])
            kernel = compiled_meeting(world, kind, kind == kernel_sm90.DONE, bool(ahead))
            out[name] = machine_code.of(kernel)
            continue
        kind, dtype, head_dim, group, causal, *rest = name.split(",")
        options = (dtype, int(head_dim), int(group), causal == "1")
        if kind == "stock":
            kernel = stock(*options)
        else:
            with_lse, runs, first = (int(word) for word in rest)
            kernel = kernel_sm90.compiled(*options, with_lse == 1, kernel_sm90.Start(runs, first))
        out[name] = machine_code.of(kernel)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
