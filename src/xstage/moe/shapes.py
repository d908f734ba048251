"""Shapes of mixture-of-experts layers (the seven models of the paper's evaluation, Qwen3-30B, any by numbers), and their rows per expert.

The shapes are the public ones of the models; the paper does not print them. `DiT-MoE` is synthetic: its shape is not public, the
intermediate size is inferred from its Linear-2 time in table 2 (1280 on the line through the other rows) and the rest is made up.

Not covered: shared experts, and layers of one model that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from xstage.errors import XStageError


@dataclass(frozen=True)
class MoEShape:
    """One layer: Linear-1 takes `hidden` to gate and up of `intermediate` each, Linear-2 takes `intermediate` back to `hidden`.

    Attributes:
        name: for people. hidden, intermediate: columns. experts: over all ranks. top_k: experts per token.
        synthetic: the shape belongs to no public model.

    Raises:
        XStageError: a number is not positive, or top_k exceeds the experts.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    synthetic: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise XStageError(f"{name}: {value!r} must be a whole number of at least 1")
        if self.top_k > self.experts:
            raise XStageError(f"top_k: {self.top_k} must lie in 1 … {self.experts}, the number of experts")


S = TypeVar("S", bound=MoEShape)

PAPER = (
    MoEShape("DiT-MoE", 5120, 1280, 64, 4, synthetic=True),
    MoEShape("Qwen3.5", 4096, 1024, 512, 10),
    MoEShape("Hy3", 4096, 1536, 192, 8),
    MoEShape("MiMo-V2.5", 4096, 2048, 256, 8),
    MoEShape("GLM-5.2", 6144, 2048, 256, 8),
    MoEShape("DSv4-Flash", 4096, 2048, 256, 6),
    MoEShape("DSv4-Pro", 7168, 3072, 384, 6),
)
SHAPES = (*PAPER, MoEShape("Qwen3-30B", 2048, 768, 128, 8))


def shape(name: str) -> MoEShape:
    """A shape by name, any case.

    Raises:
        XStageError: no such shape.
    """
    return by_name(name, SHAPES)


def by_name(name: str, shapes: Sequence[S]) -> S:
    """The one of `shapes` that is called `name`, any case.

    Raises:
        XStageError: none is.
    """
    for known in shapes:
        if known.name.lower() == name.lower():
            return known
    raise XStageError(f"shape: {name!r} is unknown, known are {', '.join(s.name for s in shapes)}")


def rows_of_an_expert(tokens: int, ranks: int, top_k: int, experts: int) -> int:
    """Rows of an expert on average, rounded up, if every rank has so many tokens and no pick is masked. experts: over all ranks."""
    return -(-tokens * ranks * top_k // experts)
