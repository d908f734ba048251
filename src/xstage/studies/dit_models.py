"""Diffusion transformers of published sizes, with a problem for each: what `studies.dit` measures, and the bound of its exchange.

Works without torch, for the tables of the docs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xstage.attention.layout import SequenceLayout, head_shards, sent_bytes
from xstage.attention.overlap import Problem
from xstage.platform import Platform


@dataclass(frozen=True)
class Model:
    """A row: configuration of a transformer as published but for its number of blocks, and a problem for it.

    Attributes:
        family: of `_INPUTS`. grid: tokens of the image or video: frames, height, width. text: tokens of the prompt.
        depth: blocks as published. joint: attention is over text and image.
    """

    name: str
    family: str
    grid: tuple[int, int, int]
    text: int
    depth: int
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def joint(self) -> bool:
        return self.family != "wan"

    @property
    def image(self) -> int:
        """Tokens of the image or video."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def sequence(self) -> int:
        """Tokens that attention sees."""
        return self.image + (self.text if self.joint else 0)

    @property
    def heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def head_dim(self) -> int:
        return int(self.config["attention_head_dim"])

    @property
    def attention_flop(self) -> float:
        """Of one layer, over all ranks."""
        return 4.0 * self.sequence**2 * self.heads * self.head_dim

    @property
    def layer_flop(self) -> float:
        """Of one block, over all ranks, roughly: 12 squares of the width per token besides attention."""
        return self.attention_flop + 24.0 * self.sequence * (self.heads * self.head_dim) ** 2

    def rows(self, rank: int, world: int) -> int:
        """Of the sequence, on a rank: every stream is cut by itself, the first ranks have one more."""
        streams = (self.text, self.image) if self.joint else (self.image,)
        return sum(n // world + (rank < n % world) for n in streams)

    def odd(self, world: int) -> bool:
        """Whether a stream that is split, or the heads, are not a multiple of the ranks."""
        return any(n % world for n in ((self.text, self.image, self.heads) if self.joint else (self.image, self.heads)))


_FLUX = {
    "in_channels": 64, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
    "guidance_embeds": True, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
_QWEN = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 3584, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
_WAN = {
    "patch_size": (1, 2, 2), "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256,
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024,
}  # fmt: skip
_HUNYUAN = {
    "in_channels": 16, "out_channels": 16, "num_attention_heads": 24, "attention_head_dim": 128, "num_refiner_layers": 2, "mlp_ratio": 4.0,
    "guidance_embeds": True, "text_embed_dim": 4096, "pooled_projection_dim": 768, "rope_axes_dim": (16, 56, 56),
}  # fmt: skip
# Images in patches of 16 pixels; 81 frames of 480 × 832 are 21 latent frames of 30 × 52 patches, 129 of 720 × 1280 are 33 of 45 × 80.
MODELS = (
    Model("FLUX.1 1024²", "flux", (1, 64, 64), 512, 57, _FLUX),
    Model("FLUX.1 2048²", "flux", (1, 128, 128), 512, 57, _FLUX),
    Model("Qwen-Image 1328²", "qwen", (1, 83, 83), 256, 60, _QWEN),
    Model("Wan 1.3B 480p", "wan", (21, 30, 52), 512, 30, {**_WAN, "num_attention_heads": 12, "ffn_dim": 8960}),
    Model("Wan 14B 480p", "wan", (21, 30, 52), 512, 40, {**_WAN, "num_attention_heads": 40, "ffn_dim": 13824}),
    Model("HunyuanVideo 720p", "hunyuan", (33, 45, 80), 256, 60, _HUNYUAN),
)


TILE_ROWS, SMS = 128, 132  # of the attention kernel for heads of 128; of an H200


def overlap_problem(model: Model, world: int) -> Problem:
    """An attention layer in bf16, as the choice of first heads sees it."""
    heads, _ = head_shards(model.heads, model.heads, world)
    layout = SequenceLayout.shards([model.rows(rank, world) for rank in range(world)])
    return Problem(layout, heads, heads, model.head_dim, 2 * model.head_dim, TILE_ROWS, SMS)


def exchange_bound_ns(model: Model, world: int, platform: Platform) -> float:
    """Least time of the exchange before an attention layer in bf16: bytes of q, k and v that leave a rank, over the drain rate R."""
    heads, _ = head_shards(model.heads, model.heads, world)
    layout = SequenceLayout.shards([model.rows(rank, world) for rank in range(world)])
    sent = max(sent_bytes(layout, rank, heads, heads, 2 * model.head_dim) for rank in range(world))
    return sent / float(platform.method("st_global").drain_rate(platform.sms))
