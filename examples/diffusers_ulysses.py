"""A diffusers pipeline on one rank and split over all, and how far the two results are apart.

    torchrun --nproc-per-node 2 examples/diffusers_ulysses.py

Runs on GPUs where there are as many as ranks, else on the CPU. The model is a small FLUX with random weights, so nothing is downloaded;
with a real one only the making of `pipe` differs.
"""

import os

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from xstage.integrations.diffusers import disable, enable


def main() -> None:
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.device_count() >= world
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")

    torch.manual_seed(0)  # the same weights and inputs on every rank
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=128, num_attention_heads=4, joint_attention_dim=64,
        pooled_projection_dim=64,
    ).to(device, dtype)  # fmt: skip
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    prompt = torch.randn(1, 37, 64, device=device, dtype=dtype)
    pooled = torch.randn(1, 64, device=device, dtype=dtype)

    def latents() -> torch.Tensor:
        return pipe(
            prompt_embeds=prompt, pooled_prompt_embeds=pooled, height=256, width=176, num_inference_steps=4, output_type="latent",
            generator=torch.Generator(device).manual_seed(1),
        ).images  # fmt: skip

    whole = latents()
    enable(pipe)
    split = latents()
    disable(pipe)
    restored = torch.equal(latents(), whole)
    if rank == 0:
        tokens, error = whole.shape[1] + prompt.shape[1], (split - whole).abs().max().item()
        print(f"{world} ranks, {tokens} tokens, {dtype}: largest difference {error:.1e} of {whole.abs().max():.1f}; restored: {restored}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
