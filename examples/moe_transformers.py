"""The experts of a transformers model over the ranks of a group: every rank has its own prompts, and a share of every layer's experts.

    torchrun --nproc-per-node 2 examples/moe_transformers.py

Runs on GPUs where there are as many as ranks, else on the CPU. The model is a small Qwen3-MoE with random weights: nothing is downloaded;
with a real one only the making of `model` differs. All its layers share one `MegaMoE`, whose buffers they take turns with.

Here every rank holds the whole model until its experts are replaced; a server would read only its own experts from the checkpoint.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import xstage


def share_experts(model: Qwen3MoeForCausalLM, max_tokens_per_rank: int) -> xstage.MegaMoE:
    """Replace the experts of every layer by this rank's share of them; returns the object to close when the model is no longer used."""
    config = model.config
    experts = [block.mlp.experts for block in model.model.layers]
    moe = xstage.MegaMoE(
        num_experts=config.num_experts, hidden=config.hidden_size, intermediate=config.moe_intermediate_size,
        top_k=config.num_experts_per_tok, max_tokens_per_rank=max_tokens_per_rank, layers=len(experts),
    )  # fmt: skip
    for layer, one in enumerate(experts):
        # A gate's rows stand before up's, as `load_weights` wants them.
        moe.load_weights(one.gate_up_proj[moe.experts], one.down_proj[moe.experts], layer=layer)
        del one.gate_up_proj, one.down_proj
        one.forward = partial(moe, layer=layer)
    return moe


def main() -> None:
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")

    torch.manual_seed(0)  # the same weights on every rank
    config = Qwen3MoeConfig(
        vocab_size=1000, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=256, norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(device, torch.bfloat16).eval()
    prompts = torch.randint(1000, (2, 40 + 7 * rank), generator=torch.Generator().manual_seed(rank)).to(device)

    with torch.no_grad():
        whole = model(prompts).logits.float()
        with share_experts(model, max_tokens_per_rank=512) as moe:
            shared = model(prompts).logits.float()
            error = torch.tensor([(shared - whole).square().sum(), whole.square().sum()], device=device)
            dist.all_reduce(error)
            if rank == 0:
                relative, size = (error[0] / error[1]).sqrt().item(), moe.size_bytes
                print(
                    f"{world} ranks, mode {moe.mode}, {moe.layers} layers: logits differ by {relative:.1e} (experts in fp8); "
                    f"{size.weights / 2**20:.1f} MiB of weights, {(size.symmetric + size.local) / 2**20:.1f} MiB of buffers"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
