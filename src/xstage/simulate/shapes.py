"""Shapes of the paper's evaluation (`xstage.moe.shapes`) with the mainloop times that its table 2 prints.

Mainloop times are medians of full tiles, W8A8. A W4A8 mainloop is taken to be shorter in the ratio of bytes that a CTA loads per step
of K (an assumption: the printed times follow loads, not arithmetic).

The tile, 192 × 128 per CTA in clusters of two, is the public kernel's choice for long sequences; the paper does not print it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from xstage.errors import XStageError
from xstage.moe.shapes import PAPER, MoEShape, by_name
from xstage.simulate import routing as routings
from xstage.simulate.mega_moe import MoEWorkload

TILE_M, TILE_N, CTAS = 192, 128, 2


@dataclass(frozen=True)
class Shape(MoEShape):
    """A model's shape and its full-tile mainloop times (ns, W8A8, paper's table 2)."""

    mma_l2_ns: float = field(kw_only=True)
    mma_l1_ns: float = field(kw_only=True)


# (Linear-2, Linear-1) mainloop, ns.
MAINLOOPS = {
    "DiT-MoE": (5300, 9770),
    "Qwen3.5": (4240, 14400),
    "Hy3": (6090, 10790),
    "MiMo-V2.5": (7770, 7570),
    "GLM-5.2": (7990, 18770),
    "DSv4-Flash": (8010, 7400),
    "DSv4-Pro": (9540, 11570),
}
SHAPES = tuple(Shape(**asdict(m), mma_l2_ns=MAINLOOPS[m.name][0], mma_l1_ns=MAINLOOPS[m.name][1]) for m in PAPER)


def shape(name: str) -> Shape:
    """A shape by name, any case.

    Raises:
        XStageError: no such shape.
    """
    return by_name(name, SHAPES)


def moe_workload(
    model: Shape | str,
    tokens_per_rank: int,
    *,
    ranks: int = 8,
    routing: str = "balanced",
    alpha: float = 1.0,
    seed: int = 0,
    weight_bits: int = 8,
    dispatch: str = "pull",
) -> MoEWorkload:
    """The workload of a shape.

    Args:
        routing: `balanced`, `power` (with `alpha` and `seed`), or the path of a JSON file with one count per expert.

    Raises:
        XStageError: an unknown shape, or sizes that do not fit each other.
    """
    m = shape(model) if isinstance(model, str) else model
    if tokens_per_rank < 1:
        raise XStageError(f"tokens_per_rank: {tokens_per_rank} must be at least 1")
    tokens = tokens_per_rank * ranks
    load = routings.named(routing, tokens, m.experts, m.top_k, alpha, seed)
    share = (TILE_M / CTAS + TILE_N * weight_bits / 8) / (TILE_M / CTAS + TILE_N)
    return MoEWorkload(
        name=m.name, hidden=m.hidden, intermediate=m.intermediate, experts=m.experts, top_k=m.top_k, tokens=tokens, ranks=ranks,
        mma_l1_ns=m.mma_l1_ns * share, mma_l2_ns=m.mma_l2_ns * share, tile_m=TILE_M, tile_n=TILE_N, ctas=CTAS, routing=load,
        weight_bits=weight_bits, synthetic=m.synthetic, dispatch=dispatch,
    )  # fmt: skip
