"""Small diffusers transformers of each family with random weights, and inputs for them: `FAMILIES[name](text, image)` → (model, inputs).

`text` and `image` are lengths in tokens; a batch of 2, as guidance makes it. Every rank builds the same. Times and guidance, and a thousand
times them, have a place in bfloat16: else its error would be that of another time.
"""

from collections.abc import Callable
from typing import Any

import torch

Built = tuple[Any, dict[str, Any]]
BATCH, HEADS, HEAD_DIM = 2, 4, 16


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def wan(text: int, image: int, heads: int = HEADS, **more: Any) -> Built:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=HEAD_DIM, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32, **more,
    )  # fmt: skip
    return model, {
        "hidden_states": _randn(BATCH, 4, image, 2, 2), "timestep": torch.tensor([3.0] * BATCH),
        "encoder_hidden_states": _randn(BATCH, text, 16),
    }  # fmt: skip


def wan_image(text: int, image: int) -> Built:
    """Image to video: 512 text tokens and an image encoder's, in cross-attention."""
    model, inputs = wan(512, image, image_dim=16, added_kv_proj_dim=HEADS * HEAD_DIM)
    return model, {**inputs, "encoder_hidden_states_image": _randn(BATCH, text, 16)}


def wan_per_token(text: int, image: int) -> Built:
    """A timestep for every token."""
    model, inputs = wan(text, image)
    return model, {**inputs, "timestep": torch.linspace(1, 9, image).expand(BATCH, -1).contiguous()}


def chronoedit(text: int, image: int) -> Built:
    from diffusers import ChronoEditTransformer3DModel

    model = ChronoEditTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": _randn(BATCH, 4, image, 2, 2), "timestep": torch.tensor([3.0] * BATCH),
        "encoder_hidden_states": _randn(BATCH, text, 16),
    }  # fmt: skip


def flux(text: int, image: int) -> Built:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=HEAD_DIM, num_attention_heads=HEADS, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    return model, {
        "hidden_states": _randn(BATCH, image, 4), "encoder_hidden_states": _randn(BATCH, text, 32), "pooled_projections": _randn(BATCH, 32),
        "timestep": torch.tensor([0.25] * BATCH), "guidance": torch.tensor([2.0] * BATCH), "txt_ids": torch.zeros(text, 3),
        "img_ids": torch.arange(image * 3).reshape(image, 3).float(),
    }  # fmt: skip


def flux2(text: int, image: int) -> Built:
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=HEAD_DIM, num_attention_heads=HEADS, joint_attention_dim=32,
        timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": _randn(BATCH, image, 4), "encoder_hidden_states": _randn(BATCH, text, 32),
        "timestep": torch.tensor([0.25] * BATCH), "guidance": torch.tensor([2.0] * BATCH), "txt_ids": torch.zeros(BATCH, text, 4),
        "img_ids": torch.arange(image * 4).reshape(1, image, 4).float().expand(BATCH, -1, -1),
    }  # fmt: skip


def qwen(text: int, image: int, **more: Any) -> Built:
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=HEAD_DIM, num_attention_heads=HEADS,
        joint_attention_dim=16, axes_dims_rope=(4, 4, 8), **more,
    )  # fmt: skip
    return model, {
        "hidden_states": _randn(BATCH, image, 16), "encoder_hidden_states": _randn(BATCH, text, 16),
        "timestep": torch.tensor([0.25] * BATCH), "img_shapes": [(1, 1, image)] * BATCH,
    }  # fmt: skip


def qwen_masked(text: int, image: int) -> Built:
    """Prompts of different lengths in a batch: joint attention with a mask, without the fused exchange."""
    model, inputs = qwen(text, image)
    mask = torch.ones(BATCH, text)
    mask[1, text - 3 :] = 0
    return model, {**inputs, "encoder_hidden_states_mask": mask}


def qwen_edit(text: int, image: int) -> Built:
    """An image and the image it is made from, which is modulated otherwise."""
    model, inputs = qwen(text, image, zero_cond_t=True)
    return model, {**inputs, "img_shapes": [[(1, 1, image - 4), (1, 1, 4)]] * BATCH}


def ltx(text: int, image: int) -> Built:
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, cross_attention_dim=HEADS * HEAD_DIM,
        num_layers=2, caption_channels=16,
    )  # fmt: skip
    mask = torch.ones(BATCH, text)
    mask[1, text - 3 :] = 0
    return model, {
        "hidden_states": _randn(BATCH, image, 8), "encoder_hidden_states": _randn(BATCH, text, 16), "encoder_attention_mask": mask,
        "timestep": torch.tensor([3.0] * BATCH), "num_frames": 1, "height": 1, "width": image,
    }  # fmt: skip


def hunyuan(text: int, image: int, **more: Any) -> Built:
    """Text with padding behind it."""
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, mlp_ratio=2.0, guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 4, 8),
        **more,
    )  # fmt: skip
    mask = torch.ones(BATCH, text + 3)
    mask[:, text:] = 0
    return model, {
        "hidden_states": _randn(BATCH, 4, image, 2, 2), "timestep": torch.tensor([3] * BATCH), "guidance": torch.tensor([2.0] * BATCH),
        "encoder_hidden_states": _randn(BATCH, text + 3, 16), "encoder_attention_mask": mask, "pooled_projections": _randn(BATCH, 8),
    }  # fmt: skip


def cogvideox(text: int, image: int, rotary: bool = True) -> Built:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16,
        num_layers=2, sample_width=2, sample_height=2, sample_frames=4 * image - 3, max_text_seq_length=text,
        use_rotary_positional_embeddings=rotary,
    )  # fmt: skip
    places = {"image_rotary_emb": (torch.rand(image, HEAD_DIM), torch.rand(image, HEAD_DIM))} if rotary else {}
    return model, {
        "hidden_states": _randn(BATCH, image, 4, 2, 2), "encoder_hidden_states": _randn(BATCH, text, 16),
        "timestep": torch.tensor([3] * BATCH), **places,
    }  # fmt: skip


def cogvideox_sincos(text: int, image: int) -> Built:
    """Places that are added to the patches, as the model of two billion weights has them."""
    return cogvideox(text, image, rotary=False)


FAMILIES: dict[str, Callable[[int, int], Built]] = {
    "Wan": wan, "Wan image to video": wan_image, "Wan timestep per token": wan_per_token, "ChronoEdit": chronoedit, "FLUX": flux,
    "FLUX.2": flux2, "Qwen-Image": qwen, "Qwen-Image edit": qwen_edit, "Qwen-Image masked": qwen_masked, "LTX": ltx,
    "HunyuanVideo": hunyuan, "CogVideoX": cogvideox, "CogVideoX, places added": cogvideox_sincos,
}  # fmt: skip


def build(family: str, text: int, image: int, dtype: torch.dtype, seed: int = 0) -> Built:
    """A family's model in evaluation mode and its inputs, floating-point ones in `dtype`."""
    torch.manual_seed(seed)
    model, inputs = FAMILIES[family](text, image)
    for parameter in model.parameters():  # some begin as zeros, and then hide what they multiply
        torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval(), {k: _cast(k, v, dtype) for k, v in inputs.items()}


def _cast(name: str, value: Any, dtype: torch.dtype) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floats and not name.endswith("_ids") else value
