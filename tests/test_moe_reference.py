"""The reference layer: against a loop in float64, fp8 and MXFP4 against plain low-precision torch, and 2–4 gloo processes against one.

One set of processes per world size runs all cases, because starting them costs seconds. Not covered: anything on a GPU.
"""

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from xstage.errors import XStageError
from xstage.moe import mxfp4, quantize
from xstage.moe.layout import ELEMENTS, BufferLayout
from xstage.moe.reference import Buffer, Linear, Mxfp4Linear, moe, swiglu

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 128, 8, 3


pytestmark = pytest.mark.usefixtures("one_thread")


def problem(tokens: int, seed: int = 0, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> Any:
    """x, picks (some masked), weights, and both layers' weights of all experts in bfloat16."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    idx = torch.rand(tokens, EXPERTS, generator=g).topk(TOP_K).indices
    idx[torch.rand(idx.shape, generator=g) < 0.15] = -1
    weights = torch.rand(tokens, TOP_K, generator=g)
    w1 = (torch.randn(EXPERTS, 2 * intermediate, hidden, generator=g) * hidden**-0.5).bfloat16()
    w2 = (torch.randn(EXPERTS, hidden, intermediate, generator=g) * intermediate**-0.5).bfloat16()
    return x, idx, weights, w1, w2


def loop(
    x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, clamp: float | None
) -> torch.Tensor:
    """Token by token in float64, weighted at the very end."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for k in range(idx.shape[1]):
            e = int(idx[t, k])
            if e >= 0:
                gate, up = (w1[e].double() @ x[t].double()).chunk(2)
                if clamp is not None:
                    gate, up = (
                        torch.minimum(gate, torch.tensor(clamp)),
                        torch.minimum(torch.maximum(up, torch.tensor(-clamp)), torch.tensor(clamp)),
                    )
                out[t] += weights[t, k].double() * (w2[e].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return out


def coarse(m: torch.Tensor, rows: int) -> torch.Tensor:
    """Through fp8 with a scale per `rows` × 128, what one writes in a minute."""
    b = m.float().view(-1, rows, m.shape[-1] // 128, 128)
    s = b.abs().amax((1, 3), keepdim=True).clamp_min(1e-10) / 448
    return ((b / s).to(torch.float8_e4m3fn).float() * s).view(m.shape).bfloat16()


def coarse_mxfp4(m: torch.Tensor) -> torch.Tensor:
    """Through MXFP4 likewise."""
    b = m.float().view(*m.shape[:-1], -1, 32)
    s = torch.exp2(b.abs().amax(-1, keepdim=True).log2().floor() - 2)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return (grid[((b / s).abs()[..., None] - grid).abs().argmin(-1)] * b.sign() * s).view(m.shape).bfloat16()


def plain(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """fp8 rows, bfloat16 matrices, bfloat16 in between."""
    x = coarse(x, 1)
    out = torch.zeros(x.shape)
    for e in range(EXPERTS):
        t, k = (idx == e).nonzero(as_tuple=True)
        gate, up = (x[t] @ w1[e].T).chunk(2, -1)
        middle = torch.nn.functional.silu(gate) * up * weights[t, k, None].bfloat16()
        out.index_add_(0, t, (coarse(middle, 1) @ w2[e].T).float())
    return out.bfloat16()


def layers(w1: torch.Tensor, w2: torch.Tensor, precision: str) -> tuple[Linear, Linear]:
    return Linear.of(w1, precision), Linear.of(w2, precision)


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_float64_equals_the_loop(clamp: float | None) -> None:
    x, idx, weights, w1, w2 = problem(40)
    out = moe(x, idx, weights, *layers(w1, w2, "float64"), precision="float64", clamp=clamp)
    assert out.dtype == torch.float64
    expected = loop(x, idx, weights, w1, w2, clamp)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    if clamp is not None:
        assert not torch.allclose(expected, loop(x, idx, weights, w1, w2, None), rtol=1e-2)


@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (512, 384), (128, 512)])
def test_fp8_within_twice_the_error_of_plain_torch(hidden: int, intermediate: int) -> None:
    x, idx, weights, w1, w2 = problem(100, 3, hidden, intermediate)
    exact = moe(x, idx, weights, *layers(w1, w2, "float64"), precision="float64")
    error = moe(x, idx, weights, *layers(w1, w2, "fp8"), precision="fp8").double() - exact
    rough = plain(x, idx, weights, coarse(w1, 128), coarse(w2, 128)).double() - exact
    assert 0 < error.norm() <= 2 * rough.norm()
    assert error.abs().max() <= 2 * rough.abs().max()
    rough = moe(x, idx, weights, *layers(w1, w2, "bf16"), precision="bf16").double() - exact
    assert 0 < rough.norm() < error.norm()


@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (512, 384)])
def test_mxfp4_within_twice_the_error_of_plain_torch(hidden: int, intermediate: int) -> None:
    x, idx, weights, w1, w2 = problem(100, 4, hidden, intermediate)
    both = Mxfp4Linear.of(w1), Mxfp4Linear.of(w2)
    out = moe(x, idx, weights, *both).double()
    rough = plain(x, idx, weights, coarse_mxfp4(w1), coarse_mxfp4(w2)).double()
    # Against the weights as they were, and against what is left of them: the second leaves the rounding of rows and sums alone.
    kept = [torch.stack([linear.dense(e, torch.float64) for e in range(EXPERTS)]) for linear in both]
    errors = []
    for ws in ((w1, w2), kept):
        exact = moe(x, idx, weights, *layers(*ws, "float64"), precision="float64")
        assert 0 < (out - exact).norm() <= 2 * (rough - exact).norm()
        assert (out - exact).abs().max() <= 2 * (rough - exact).abs().max()
        errors.append((out - exact).norm())
    assert errors[1] < errors[0] / 2


def test_mxfp4_product_is_that_of_the_folded_weights() -> None:
    """What a kernel will multiply: e4m3 with a power of two per 128 × 128, bit for bit the same product."""
    x, _, _, w1, _ = problem(20, 6)
    q, scales = quantize.quantize_activations(x)
    linear = Mxfp4Linear.of(w1)
    assert linear.scales is not None
    fp8 = Linear(*mxfp4.fold(mxfp4.from_words(linear.weight), linear.scales))
    for expert in range(EXPERTS):
        assert torch.equal(fp8.dense(expert, torch.float32), linear.dense(expert, torch.float32))
        assert torch.equal(fp8.apply(expert, q, scales), linear.apply(expert, q, scales))
        exact = x.double() @ linear.dense(expert, torch.float64).T
        assert torch.equal(linear.apply(expert, x.double(), None), exact)
    assert linear.experts(2, 5).shape == (3, 2 * INTERMEDIATE, HIDDEN)
    with pytest.raises(XStageError, match="precision: 'fp8' must be 'mxfp4'"):
        Mxfp4Linear.of(w1, "fp8")


def test_fp8_product_within_the_bound_of_float32_sums() -> None:
    x, _, _, w1, _ = problem(50, 5)
    q, scales = quantize.quantize_activations(x)
    linear = Linear.of(w1, "fp8")
    assert linear.scales is not None
    a = quantize.dequantize_activations(q, scales, torch.float64)
    w = quantize.dequantize_weights(linear.weight, linear.scales, torch.float64)
    for expert in range(EXPERTS):
        error = (linear.apply(expert, q, scales).double() - a @ w[expert].T).abs()
        # n additions and a few products: γ_n Σ|a||w| with n = 256 + 4.
        assert (error <= 260 * 2.0**-24 * 1.001 * (a.abs() @ w[expert].abs().T)).all()


@pytest.mark.parametrize("precision", sorted(ELEMENTS))
def test_masked_picks_and_no_tokens(precision: str) -> None:
    x, idx, weights, w1, w2 = problem(30, 9)
    both = layers(w1, w2, precision)
    out = moe(x, idx, weights, *both, precision=precision)
    # What a masked pick's weight is does not matter, and a token without picks is zero.
    poisoned = weights.masked_fill(idx < 0, torch.nan)
    assert torch.equal(moe(x, idx, poisoned, *both, precision=precision), out)
    empty = moe(x, torch.full_like(idx, -1), weights, *both, precision=precision)
    assert torch.equal(empty, torch.zeros_like(out))
    none = moe(x[:0], idx[:0], weights[:0], *both, precision=precision)
    assert none.shape == (0, HIDDEN)
    # A routing weight of two is exactly twice the result of one: powers of two pass through every rounding.
    assert torch.equal(moe(x, idx, weights * 2, *both, precision=precision), out * 2)


def test_what_is_not_finite_stays_with_its_token() -> None:
    x, idx, weights, w1, w2 = problem(30, 9)
    idx[4] = torch.tensor([0, 1, 2])
    clean = moe(x, idx, weights, *layers(w1, w2, "fp8"))
    x[4, 17] = torch.inf
    out = moe(x, idx, weights, *layers(w1, w2, "fp8"))
    assert out[4].isnan().all()
    rest = torch.arange(30) != 4
    assert torch.equal(out[rest], clean[rest])


def test_swiglu_clamp() -> None:
    x = torch.tensor([[-30.0, 2.0, 30.0, -30.0, 1.0, 30.0]])
    expected = torch.tensor([-30.0, 2.0, 7.0]).sigmoid() * torch.tensor([-30.0, 2.0, 7.0]) * torch.tensor([-7.0, 1.0, 7.0])
    torch.testing.assert_close(swiglu(x, 7.0)[0], expected)


def test_refusals() -> None:
    x, idx, weights, w1, w2 = problem(6)
    both = layers(w1, w2, "bf16")
    layout = BufferLayout(1, EXPERTS, HIDDEN, TOP_K, 4, precision="bf16")
    for arguments, changes, message in (
        ((x, idx, weights, *both), {"layout": layout}, "max_tokens_per_rank 4"),
        ((x, idx, weights, *both), {"layout": BufferLayout(2, EXPERTS, HIDDEN, TOP_K, 9, precision="bf16")}, "group: 1"),
        ((x, idx, weights, *both), {"precision": "fp8"}, "linear1: no scales"),
        ((x, idx + EXPERTS, weights, *both), {}, "topk_idx"),
        ((x, idx[:5], weights, *both), {}, r"must be \(6, 3\)"),
        ((x, idx, weights.double(), *both), {}, "topk_weights: torch.float64"),
        ((x, idx, weights, both[0], Linear(both[1].weight[:, :128])), {}, "linear2"),
    ):
        with pytest.raises(XStageError, match=message):
            moe(*arguments, **{"precision": "bf16", **changes})


def picks(kind: str, idx: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The picks of a rank, changed to one kind of routing."""
    per_rank = EXPERTS // world
    if kind == "one expert":
        return torch.where(idx >= 0, 5, -1)
    if kind == "all masked":
        return torch.full_like(idx, -1)
    if kind == "all local":
        return torch.where(idx >= 0, rank * per_rank + idx % per_rank, -1)
    if kind == "all remote":
        return torch.where(idx >= 0, ((rank + 1) % world) * per_rank + idx % per_rank, -1)
    if kind == "a rank without rows":
        return torch.where(idx >= 0, idx % (EXPERTS - per_rank), -1)
    return idx


def cases(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    per_rank = EXPERTS // world
    mine = slice(rank * per_rank, (rank + 1) * per_rank)
    whole = problem(60, 11)
    weights_of = {precision: layers(*whole[3:], precision) for precision in ELEMENTS}
    for number, (kind, tokens) in enumerate(
        [
            ("any", [15] * world), ("any", [0, 31, 7, 1][:world]), ("any", [3, 0, 0, 20][:world]), ("any", [0] * world),
            ("one expert", [9, 4, 0, 13][:world]), ("all masked", [5] * world), ("all local", [6, 2, 1, 8][:world]),
            ("all remote", [6, 2, 1, 8][:world]), ("a rank without rows", [7, 5, 3, 4][:world]),
        ]
    ):  # fmt: skip
        starts = [sum(tokens[:r]) for r in range(world + 1)]
        x, weights = whole[0][: starts[-1]], whole[2][: starts[-1]]
        idx = torch.cat([picks(kind, whole[1][starts[r] : starts[r + 1]], r, world) for r in range(world)])
        here = slice(starts[rank], starts[rank + 1])
        for precision in sorted(ELEMENTS) if number < 2 else ("fp8",):
            clamp = 1.0 if number == 1 else None
            linear1, linear2 = weights_of[precision]
            expected = moe(x, idx, weights, linear1, linear2, precision=precision, clamp=clamp)
            layout = BufferLayout(world, EXPERTS, HIDDEN, TOP_K, 31, (1, 16, 128)[number % 3], precision)
            out = moe(
                x[here], idx[here], weights[here], linear1.experts(mine.start, mine.stop), linear2.experts(mine.start, mine.stop),
                precision=precision, clamp=clamp, layout=layout, group=group,
            )  # fmt: skip
            assert torch.equal(out, expected[here]), (kind, tokens, precision)
    with pytest.raises(XStageError, match="layout"):
        moe(x[here], idx[here], weights[here], linear1, linear2, group=group)

    # Stored bytes lie where the layout says, and no byte beside them is touched.
    layout = BufferLayout(world, EXPERTS, HIDDEN, TOP_K, 31)
    buffer = Buffer(layout, rank, group, torch.device("cpu"))
    row = torch.tensor([10 + rank] * world)
    values = torch.arange(world, dtype=torch.float32)[:, None].expand(-1, 2) + 10 * rank
    buffer.store("activation_scales", row, values, torch.arange(world), [1] * world)
    region = layout.region("activation_scales")
    expected_bytes = torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8)
    for source in range(world):
        start = region.offset_bytes + (10 + source) * region.row_bytes
        expected_bytes[start : start + 8] = torch.full((2,), 10.0 * source + rank).view(torch.uint8)
    assert torch.equal(buffer.bytes, expected_bytes)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_process(world: int) -> None:
    ranks.run(cases, world, limit_s=60)
