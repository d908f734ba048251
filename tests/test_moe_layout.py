"""Shapes by name, and the bytes of a rank's buffer: no overlap, alignment, a size by hand, growth, refusals."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage.errors import XStageError
from xstage.moe import shapes
from xstage.moe.layout import ELEMENTS, ITEM_BYTES, BufferLayout, padded_rows
from xstage.simulate import routing
from xstage.simulate import shapes as simulated


@st.composite
def layouts(draw: st.DrawFn) -> BufferLayout:
    ranks, per_rank = draw(st.integers(1, 8)), draw(st.integers(1, 64))
    return BufferLayout(
        ranks, ranks * per_rank, 128 * draw(st.integers(1, 40)), draw(st.integers(1, min(ranks * per_rank, 10))),
        draw(st.integers(1, 9000)), draw(st.sampled_from([1, 8, 16, 64, 128, 192, 256])), draw(st.sampled_from(sorted(ELEMENTS))),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_regions_follow_each_other_aligned(layout: BufferLayout) -> None:
    end = 0
    for region in layout.regions:
        assert region.offset_bytes % 128 == 0
        assert region.row_bytes % 16 == 0
        assert region.row_bytes >= region.columns * ITEM_BYTES[region.dtype]
        assert end <= region.offset_bytes < end + 128
        end = region.offset_bytes + region.size_bytes
        assert layout.region(region.name) is region
    assert end <= layout.size_bytes < end + 128
    assert layout.size_bytes % 128 == 0
    assert layout.rows % layout.tile == 0


def test_item_sizes_are_torch_s() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


def test_size_by_hand() -> None:
    m = shapes.shape("qwen3-30b")
    layout = BufferLayout(2, m.experts, m.hidden, m.top_k, 8192, 128)
    # 131,072 pairs, 64 experts: ⌊(131072 + 64 · 127) / 128⌋ = 1087 tiles.
    assert layout.rows == 1087 * 128 == 139_136
    assert {r.name: r.size_bytes for r in layout.regions} == {
        "signals": 3 * 2 * 8,
        "counts": 2 * 128 * 4,
        "sources": 139_136 * 16,
        "activations": 139_136 * 2048,
        "activation_scales": 139_136 * 64,
        "combine": 8192 * 8 * 2048 * 2,
    }
    assert layout.size_bytes == 564_518_016
    text = layout.describe()
    assert text.splitlines()[-1].split() == ["total", "564,518,016", "bytes", "per", "rank,", "538.4", "MiB"]
    assert len(text.splitlines()) == 8
    assert "float8_e4m3fn [139,136, 2,048]" in text
    wide = BufferLayout(2, m.experts, m.hidden, m.top_k, 8192, 128, "bf16")
    assert wide.size_bytes == layout.size_bytes + 139_136 * (2048 - 64)


@pytest.mark.parametrize("precision", sorted(ELEMENTS))
def test_size_grows_with_every_argument(precision: str) -> None:
    def size(ranks: int = 2, per_rank: int = 16, hidden: int = 512, top_k: int = 4, tokens: int = 100, tile: int = 64) -> int:
        return BufferLayout(ranks, ranks * per_rank, hidden, top_k, tokens, tile, precision).size_bytes

    for name, values in {
        "ranks": range(1, 9), "per_rank": (4, 5, 8, 16, 60), "hidden": range(128, 1408, 128), "top_k": range(1, 17),
        "tokens": (1, 2, 50, 100, 1000), "tile": (1, 2, 4, 64, 128, 256),
    }.items():  # fmt: skip
        sizes = [size(**{name: value}) for value in values]
        assert all(a <= b for a, b in itertools.pairwise(sizes)), name
        assert sizes[0] < sizes[-1], name


def test_worst_routing_fills_the_rows() -> None:
    for pairs, experts, tile in itertools.product(range(9), range(1, 4), range(1, 5)):
        splits = [c for c in itertools.product(range(pairs + 1), repeat=experts) if sum(c) == pairs]
        assert padded_rows(pairs, experts, tile) == max(sum(-(-c // tile) * tile for c in split) for split in splits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks: 0"), ({"experts": 9}, "experts: 9 must be a multiple"), ({"hidden": 100}, "hidden: 100"),
        ({"top_k": 11}, "top_k: 11"), ({"max_tokens_per_rank": 1.5}, "max_tokens_per_rank: 1.5"), ({"tile": True}, "tile: True"),
        ({"precision": "fp4"}, "precision: 'fp4'"), ({"max_tokens_per_rank": 1 << 30}, "max_tokens_per_rank: 1073741824 makes"),
        ({"once": True}, "once: goes with direct only"), ({"direct": True, "pull": True}, "pull: does not go with direct"),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, object], message: str) -> None:
    with pytest.raises(XStageError, match=message):
        BufferLayout(**{"ranks": 2, "experts": 10, "hidden": 128, "top_k": 2, "max_tokens_per_rank": 4, **changes})  # type: ignore[arg-type]


def test_unknown_region() -> None:
    with pytest.raises(XStageError, match="activation_scales"):
        BufferLayout(2, 4, 128, 2, 4, precision="bf16").region("activation_scales")


def test_shapes() -> None:
    assert len(shapes.SHAPES) == 8
    assert [s.name for s in shapes.SHAPES if s.synthetic] == ["DiT-MoE"]
    assert shapes.shape("Qwen3-30B") == shapes.MoEShape("Qwen3-30B", 2048, 768, 128, 8)
    assert [s.name for s in simulated.SHAPES] == [s.name for s in shapes.PAPER]
    for model, plain in zip(simulated.SHAPES, shapes.PAPER, strict=True):
        assert {name: getattr(model, name) for name in plain.__dataclass_fields__} == vars(plain)
    with pytest.raises(XStageError, match="'GPT' is unknown"):
        shapes.shape("GPT")
    with pytest.raises(XStageError, match="top_k: 3"):
        shapes.MoEShape("mine", 128, 128, 2, 3)
    with pytest.raises(XStageError, match="hidden: 0"):
        shapes.MoEShape("mine", 0, 128, 2, 1)


def test_the_docs_show_the_table_and_the_routing() -> None:
    text = (Path(__file__).parent.parent / "docs" / "moe.md").read_text(encoding="utf-8")
    m = shapes.shape("Qwen3-30B")
    assert BufferLayout(2, m.experts, m.hidden, m.top_k, 8192, 128).describe() in text
    assert routing.power(2 * 8192, m.experts, m.top_k, 0.8, 0).describe() in text


def test_sizes_need_no_torch() -> None:
    code = "import sys, xstage.moe.layout, xstage.simulate.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
