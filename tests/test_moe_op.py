"""The public MoE layer on CPUs: 1–8 gloo ranks against one process, weights, torch.compile, refusals, sizes, plain torch.

One set of processes per world size runs all cases, because starting them costs seconds. Not covered: anything on a GPU.
"""

import sys
import types
from contextlib import nullcontext
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import xstage
from xstage.errors import PeerTimeout, UnsuitableMachine, XStageError
from xstage.moe import mxfp4, op, quantize, reference, routing
from xstage.moe.layout import BufferLayout
from xstage.moe.pipeline import KernelPipeline, TorchPipeline
from xstage.moe.reference import Linear, Mxfp4Linear
from xstage.moe.weights import Weights
from xstage.moe.weights_mxfp4 import Mxfp4Weights

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MOST = 256, 128, 8, 3, 31
CPU = torch.device("cpu")
KINDS = ("any", "one expert", "all masked", "all local", "all remote", "a rank without rows", "twice the same")


pytestmark = pytest.mark.usefixtures("one_thread")


def expert_weights(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=g) * HIDDEN**-0.5
    return w1.bfloat16(), (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=g) * INTERMEDIATE**-0.5).bfloat16()


def tokens_of(rank: int, tokens: int, kind: str, world: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, picks and routing weights of one rank; every process can make those of every rank."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    idx = torch.rand(tokens, EXPERTS, generator=g).topk(TOP_K).indices
    masked = torch.rand(idx.shape, generator=g) < 0.15
    per_rank = EXPERTS // world
    if kind == "one expert":
        idx = torch.full_like(idx, 5)
    elif kind == "all masked":
        idx = torch.full_like(idx, -1)
    elif kind == "all local":
        idx = rank * per_rank + idx % per_rank
    elif kind == "all remote":
        idx = (rank + 1) % world * per_rank + idx % per_rank
    elif kind == "a rank without rows":
        idx = idx % max(EXPERTS - per_rank, 1)
    elif kind == "twice the same":
        idx = idx[:, :1].expand(-1, TOP_K).contiguous()
    return x, idx.masked_fill(masked, -1), torch.rand(tokens, TOP_K, generator=g)


def whole(linears: tuple[Linear, Linear], parts: list[Any], clamp: float | None) -> torch.Tensor:
    """One process, the tokens of all ranks."""
    x, idx, w = (torch.cat([part[i] for part in parts]) for i in range(3))
    return reference.moe(x, idx, w, *linears, clamp=clamp)


def loaded(w1: torch.Tensor, w2: torch.Tensor, *scales: torch.Tensor) -> Weights:
    weights = Weights(len(w1), HIDDEN, INTERMEDIATE, CPU)
    weights.check(w1, w2, *(scales or (None, None)))
    weights.load(w1, w2, *scales)
    return weights


def cases(rank: int, world: int) -> None:
    w1, w2 = expert_weights()
    everything = (Linear.of(w1, "fp8"), Linear.of(w2, "fp8"))
    arguments = {
        "num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K, "max_tokens_per_rank": MOST,
        "timeout_s": 20.0,
    }  # fmt: skip
    for clamp in (None, 0.5):
        with xstage.MegaMoE(clamp=clamp, **arguments) as moe:
            assert moe.mode == "reference"
            with pytest.raises(XStageError, match="load_weights first"):
                moe(*tokens_of(rank, 3, "any", world, 0))
            moe.load_weights(w1[moe.experts], w2[moe.experts])
            for number, kind in enumerate(KINDS):
                for tokens in ([(7 * r + 3 * number) % (MOST + 1) for r in range(world)], [0] * (world - 1) + [MOST]):
                    parts = [tokens_of(r, tokens[r], kind, world, number) for r in range(world)]
                    expected = whole(everything, parts, clamp)
                    start = sum(tokens[:rank])
                    y, counts = moe(*parts[rank], return_counts=True)
                    assert y.dtype == torch.bfloat16
                    assert torch.equal(y, expected[start : start + tokens[rank]]), (kind, tokens)
                    picks = torch.cat([part[1] for part in parts])
                    assert torch.equal(counts, routing.count(picks, EXPERTS)[moe.experts])
                    assert counts.dtype == torch.int32
    moe = xstage.MegaMoE(**arguments)
    moe.load_weights(w1[moe.experts], w2[moe.experts])
    x, idx, weights = tokens_of(rank, 9, "any", world, 3)
    y = moe(x, idx, weights)

    # Quantised rows give the bits that the layer's own quantisation gives, narrower picks and weights are the same picks.
    q, scales = quantize.quantize_activations(x)
    assert torch.equal(moe(q, idx.int(), weights, x_scales=scales), y)
    assert torch.equal(moe(x, idx, weights.bfloat16()), moe(x, idx, weights.bfloat16().float()))
    again = moe(x.flip(0), idx.flip(0), weights.flip(0))
    assert torch.equal(again.flip(0), y)
    assert again.data_ptr() != y.data_ptr()

    if world <= 2:  # tracing is slow
        function: Any = torch.compile(lambda x, i, w: moe(x * 2, i, w, return_counts=True), fullgraph=True, backend="aot_eager")
        out, counts = function(x, idx, weights)
        assert torch.equal(out, moe(x * 2, idx, weights))
        assert torch.equal(counts, moe(x, idx, weights, return_counts=True)[1])
        assert torch.equal(torch.compile(moe, fullgraph=True, backend="aot_eager")(q, idx, weights, x_scales=scales), y)

    # One rank has bad arguments: all refuse, the culprit in its own words, and the next call works.
    last = world - 1
    name = "" if rank == last else f"rank {last} refused its arguments: "
    for bad, message in (
        ((torch.cat([x] * 4), torch.cat([idx] * 4), torch.cat([weights] * 4)), "x: 36 tokens; the limit is max_tokens_per_rank = 31"),
        ((x, idx + EXPERTS, weights), r"topk_idx: \d+ must lie in"),
        ((x, idx[:, :2], weights), r"topk_idx: shape \(9, 2\) must be \(9, 3\)"),
    ):
        with pytest.raises(XStageError, match=name + message):
            moe(*(bad if rank == last else (x, idx, weights)))
        assert torch.equal(moe(x, idx, weights), y)
    with pytest.raises(XStageError, match=name + "w1: shape"):
        moe.load_weights(w1[:0] if rank == last else w1[moe.experts], w2[moe.experts])
    assert torch.equal(moe(x, idx, weights), y)

    # Objects that differ, and arguments that one rank has wrong.
    if world > 1:
        with pytest.raises(XStageError, match=r"MegaMoE: .*max_tokens_per_rank"):
            xstage.MegaMoE(**{**arguments, "max_tokens_per_rank": 10 + rank})
        with pytest.raises(XStageError, match=name + "hidden: 100"):
            xstage.MegaMoE(**{**arguments, "hidden": 100 if rank == last else HIDDEN})

    # A rank that stays away is named, within the bound.
    moe._agreement._timeout_s = 0.3
    if rank != last:
        with pytest.raises(PeerTimeout, match=rf"rank {last} .*phase agreement, tag 'mega-moe"):
            moe(x, idx, weights)
    dist.barrier()
    moe.close()
    moe.close()
    assert moe.size_bytes.total == 0
    with pytest.raises(XStageError, match="closed"):
        moe(x, idx, weights)

    plain_torch(rank, world, w1, w2)
    four_bits(rank, world, w1, w2, arguments)
    several_layers(rank, world, arguments)


def plain_torch(rank: int, world: int, w1: torch.Tensor, w2: torch.Tensor) -> None:
    """The path of GPUs without kernels, here over gloo: within twice the error of the fp8 reference, refused by all together."""
    group = dist.group.WORLD
    assert group is not None
    layout = BufferLayout(world, EXPERTS, HIDDEN, TOP_K, MOST)
    everything = loaded(w1, w2)
    mine = slice(rank * layout.experts_per_rank, (rank + 1) * layout.experts_per_rank)

    def refused(who: int) -> None:
        raise XStageError(f"rank {who} refused")

    pipeline = TorchPipeline(layout, clamp=0.7, group=group, refused=refused)
    fp8 = (everything.linear1.experts(mine.start, mine.stop), everything.linear2.experts(mine.start, mine.stop))
    dense = (Linear(w1[mine]), Linear(w2[mine]))
    mx = (Mxfp4Linear.of(w1), Mxfp4Linear.of(w2))
    mx_mine = (mx[0].experts(mine.start, mine.stop), mx[1].experts(mine.start, mine.stop))
    for number, kind in enumerate(KINDS):
        tokens = [(5 * r + 4 * number) % (MOST + 1) for r in range(world)]
        parts = [tokens_of(r, tokens[r], kind, world, number) for r in range(world)]
        x, idx, w = (torch.cat([part[i] for part in parts]) for i in range(3))
        exact = reference.moe(x, idx, w, Linear(w1.double()), Linear(w2.double()), precision="float64", clamp=0.7)
        error = (whole((everything.linear1, everything.linear2), parts, 0.7).double() - exact).norm()
        mx_error = (whole(mx, parts, 0.7).double() - exact).norm()
        for linears, most in ((fp8, error), (dense, error), (mx_mine, mx_error)):
            out = torch.full((tokens[rank], HIDDEN), torch.nan).bfloat16()
            counts = pipeline.run(*parts[rank], *linears, out)
            assert torch.equal(counts, routing.count(idx, EXPERTS)[mine])
            start = sum(tokens[:rank])
            miss = torch.tensor([(out.double() - exact[start : start + tokens[rank]]).square().sum()])
            dist.all_reduce(miss)
            assert float(miss) ** 0.5 <= 2 * most, (kind, float(miss) ** 0.5, most)
    if rank == world - 1:
        pipeline.refuse(CPU)
    else:
        with pytest.raises(XStageError, match=f"rank {world - 1} refused"):
            pipeline.run(*parts[rank], *fp8, out)


def four_bits(rank: int, world: int, w1: torch.Tensor, w2: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Weights in MXFP4: every rank's rows as in one process; packed weights give the same bits; formats that differ are refused."""
    if world > 1:
        with pytest.raises(XStageError, match=r"MegaMoE: .*weight_format"):
            xstage.MegaMoE(**arguments, weight_format="mxfp4" if rank else "fp8")
    everything = (Mxfp4Linear.of(w1), Mxfp4Linear.of(w2))
    with xstage.MegaMoE(**arguments, weight_format="mxfp4", clamp=0.7) as moe:
        assert moe.mode == "reference"
        assert moe.size_bytes.weights == Mxfp4Weights.size_bytes(moe.layout.experts_per_rank, HIDDEN, INTERMEDIATE)
        (q1, s1), (q2, s2) = mxfp4.quantize(w1[moe.experts]), mxfp4.quantize(w2[moe.experts])
        parts = [tokens_of(r, (7 * r + 5) % (MOST + 1), "any", world, 4) for r in range(world)]
        expected = whole(everything, parts, 0.7).split([len(part[0]) for part in parts])[rank]
        for packed in (False, True):
            if packed:
                moe.load_weights(q1, q2, w1_scales=s1, w2_scales=s2)
            else:
                moe.load_weights(w1[moe.experts], w2[moe.experts])
            assert torch.equal(moe(*parts[rank]), expected)
        last = world - 1
        with pytest.raises(XStageError, match=("" if rank == last else f"rank {last} refused its arguments: ") + "w1_scales: missing"):
            moe.load_weights(*((q1, q2) if rank == last else (w1[moe.experts], w2[moe.experts])))
        rows, scales = quantize.quantize_activations(parts[rank][0])
        assert torch.equal(moe(rows, *parts[rank][1:], x_scales=scales), expected)
        if world <= 2:  # tracing is slow
            assert torch.equal(torch.compile(moe, fullgraph=True, backend="aot_eager")(*parts[rank]), expected)


def several_layers(rank: int, world: int, arguments: dict[str, Any]) -> None:
    """Layers of one object: each its own weights, in any order of calls; bad and different layers are refused by all."""
    if world > 1:
        with pytest.raises(XStageError, match=r"MegaMoE: .*layers"):
            xstage.MegaMoE(**arguments, layers=2 + rank)
    everything = [expert_weights(seed) for seed in range(3)]
    last = world - 1
    name = "" if rank == last else f"rank {last} refused its arguments: "
    with xstage.MegaMoE(**arguments, layers=3) as moe:
        for layer in (0, 2):
            moe.load_weights(*(w[moe.experts] for w in everything[layer]), layer=layer)
        parts = [tokens_of(r, (7 * r + 5) % (MOST + 1), "any", world, 5) for r in range(world)]
        tokens = [len(part[0]) for part in parts]
        expected = [whole((Linear.of(w1, "fp8"), Linear.of(w2, "fp8")), parts, None).split(tokens)[rank] for w1, w2 in everything]
        for layer in (2, 0, 0, 2):
            assert torch.equal(moe(*parts[rank], layer=layer), expected[layer])
        with pytest.raises(XStageError, match="moe: layer 1 has no weights; call load_weights first"):
            moe(*parts[rank], layer=1)
        moe.load_weights(*(w[moe.experts] for w in everything[1]), layer=1)
        assert torch.equal(moe(*parts[rank], layer=1), expected[1])
        assert torch.equal(moe(*parts[rank]), expected[0])
        for bad in (3, -1, True, 1.0):
            with pytest.raises(XStageError, match=name + rf"layer: {bad} must be a whole number in 0 … 2; this object has 3"):
                moe(*parts[rank], layer=bad if rank == last else 0)
            with pytest.raises(XStageError, match=name + rf"layer: {bad} must be"):
                moe.load_weights(*(w[moe.experts] for w in everything[1]), layer=bad if rank == last else 0)
        if world > 1:
            said = f"moe: layer: {int(rank == last)} on this rank, {int(rank != last)} on rank {0 if rank == last else last}"
            with pytest.raises(XStageError, match=said):
                moe(*parts[rank], layer=int(rank == last))
            with pytest.raises(XStageError, match=said.replace("moe", "load_weights", 1)):
                moe.load_weights(*(w[moe.experts] for w in everything[2]), layer=int(rank == last))
        assert torch.equal(moe(*parts[rank], layer=2), expected[2])
        if world <= 2:  # tracing is slow
            function: Any = torch.compile(lambda x, i, w: moe(moe(x, i, w, layer=1), i, w, layer=2), fullgraph=True, backend="aot_eager")
            assert torch.equal(function(*parts[rank]), moe(moe(*parts[rank], layer=1), *parts[rank][1:], layer=2))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_equal_one_process(world: int) -> None:
    ranks.run(cases, world, limit_s=180)


# ---- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_weights_lie_in_the_kernels_order(dtype: torch.dtype) -> None:
    w1, w2 = (w.to(torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype) for w in expert_weights())
    (q1, s1), (q2, s2) = quantize.quantize_weights(w1), quantize.quantize_weights(w2)
    weights = loaded(q1, q2, s1, s2) if dtype == torch.float8_e4m3fn else loaded(w1, w2)
    assert torch.equal(weights.w1, quantize.tiled(quantize.interleave_gate_up(q1).view(torch.uint8)))
    assert torch.equal(weights.w2, quantize.tiled(quantize.thread_order(q2).view(torch.uint8)))
    assert (weights.linear1.shape, weights.linear2.shape) == (q1.shape, q2.shape)
    assert weights.w1_scales.is_contiguous()
    for block, column in ((0, 0), (0, 1)):
        assert torch.equal(weights.w1_scales[:, column, block, 0], s1[:, block, column])
        assert torch.equal(weights.w1_scales[:, column, block, 1], s1[:, INTERMEDIATE // 128 + block, column])
    assert torch.equal(weights.w2_scales, s2.mT)
    for kept, (q, s) in ((weights.linear1, (q1, s1)), (weights.linear2, (q2, s2))):
        for e in range(EXPERTS):
            assert torch.equal(kept.dense(e, torch.float32), quantize.dequantize_weights(q[e], s[e]))
    total = sum(t.numel() * t.element_size() for t in (weights.w1, weights.w2, weights.w1_scales, weights.w2_scales))
    assert total == Weights.size_bytes(EXPERTS, HIDDEN, INTERMEDIATE)


def test_zero_blocks_and_nan_survive() -> None:
    w1, w2 = expert_weights()
    q1, s1 = quantize.quantize_weights(w1)
    q2, s2 = quantize.quantize_weights(w2)
    s1[0] = 0.0
    q1[1, 200, 7] = torch.nan
    weights = loaded(q1, q2, s1, s2)
    assert not weights.linear1.dense(0, torch.float32).any()
    assert torch.nonzero(weights.linear1.dense(1, torch.float32).isnan()).tolist() == [[200, 7]]


def test_weights_that_are_refused() -> None:
    w1, w2 = expert_weights()
    q1, s1 = quantize.quantize_weights(w1)
    q2, s2 = quantize.quantize_weights(w2)
    weights = Weights(EXPERTS, HIDDEN, INTERMEDIATE, CPU)
    for arguments, message in (
        ((w1[:4], w2, None, None), r"w1: shape \(4, 256, 256\) must be \(8, 256, 256\)"),
        ((w1, w2.mT, None, None), "w2: shape"),
        ((w1.double(), w2, None, None), "w1: torch.float64"),
        ((q1, w2, None, None), "w1_scales: missing"),
        ((w1, q2, s1, s2), "w1_scales: given"),
        ((q1, q2, s1.mT[:, :1], s2), "w1_scales: torch.float32"),
        ((q1, q2, s1, s2.bfloat16()), "w2_scales: torch.bfloat16"),
        ((q1, q2, -s1, s2), "negative or not finite"),
        ((q1, q2, s1, s2 * torch.inf), "negative or not finite"),
    ):
        with pytest.raises(XStageError, match=message):
            weights.check(*arguments)  # type: ignore[arg-type]


# ---- one process


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_refusal_without_a_group() -> None:
    with pytest.raises(XStageError, match="init_process_group"):
        xstage.MegaMoE(num_experts=8, hidden=256, intermediate=128, top_k=2, max_tokens_per_rank=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "experts: 0"), ({"hidden": 192}, "hidden: 192 must be a multiple of 128"),
        ({"intermediate": 64}, "intermediate: 64 must be a positive multiple of 128"), ({"top_k": 9}, "top_k: 9"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank: 0"), ({"lead_rows": 0}, "lead_rows: 0"),
        ({"schedule": "fast"}, "schedule: 'fast' is not one of auto, serial, interleaved"),
        ({"clamp": 0.0}, "clamp: 0.0"), ({"dtype": torch.float16}, "dtype: torch.float16 must be bfloat16"),
        ({"fallback": "maybe"}, "fallback: 'maybe'"), ({"timeout_s": 0}, "timeout_s: 0"),
        ({"weight_format": "int4"}, "weight_format: 'int4' is not one of fp8, mxfp4"), ({"layers": 0}, "layers: 0 must be"),
        ({"layers": True}, "layers: True must be"), ({"rows_once": 1}, "rows_once: 1 must be True or False"),
    ],
)  # fmt: skip
def test_construction_is_refused(alone: None, changes: dict[str, Any], message: str) -> None:
    good = {"num_experts": 8, "hidden": 256, "intermediate": 128, "top_k": 2, "max_tokens_per_rank": 4}
    with pytest.raises(XStageError, match=message):
        xstage.MegaMoE(**{**good, **changes})


def test_calls_that_are_refused(alone: None) -> None:
    w1, w2 = expert_weights()
    with xstage.MegaMoE(num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K, max_tokens_per_rank=MOST) as moe:
        moe.load_weights(w1, w2)
        x, idx, weights = tokens_of(0, 5, "any", 1, 0)
        q, scales = quantize.quantize_activations(x)
        for arguments, x_scales, message in (
            ((x[:, :128], idx, weights), None, r"x: shape \(5, 128\)"), ((x[0], idx, weights), None, "x: shape"),
            ((x.float(), idx, weights), None, "x: torch.float32 without x_scales"), ((q, idx, weights), None, "float8_e4m3fn without"),
            ((x, idx, weights), scales, "x: torch.bfloat16 with x_scales"), ((q, idx, weights), scales[:, :1], "x_scales: torch.float32"),
            ((q, idx, weights), scales.double(), "x_scales: torch.float64"), ((x, idx[:4], weights), None, "topk_idx: shape"),
            ((x, idx.float(), weights), None, "topk_idx: torch.float32 must be int32 or int64"),
            ((x, idx, weights.double()), None, "topk_weights: torch.float64"), ((x, idx, weights[:, :1]), None, "topk_weights: shape"),
            ((x, idx - 2, weights), None, "topk_idx: -3 must lie in"), ((x.to("meta"), idx, weights), None, "x: lies on meta"),
            ((x.clone().requires_grad_(), idx, weights), None, "x: requires a gradient"),
        ):  # fmt: skip
            with pytest.raises(XStageError, match=message):
                moe(*arguments, x_scales=x_scales)
        with torch.no_grad():
            assert moe(x.clone().requires_grad_(), idx, weights).shape == x.shape


def test_sizes_are_known_before(alone: None) -> None:
    shape = {"num_experts": 128, "hidden": 2048, "intermediate": 768, "top_k": 8, "max_tokens_per_rank": 8192}
    planned = xstage.MegaMoE.plan_bytes(ranks=2, mode="reference", **shape)
    assert planned.symmetric == BufferLayout(2, 128, 2048, 8, 8192).size_bytes
    assert planned.weights == 64 * (3 * 2048 * 768 + 3 * 16 * 6 * 4)
    assert planned.total == planned.symmetric + planned.weights
    assert xstage.MegaMoE.plan_bytes(ranks=2, mode="torch", **shape).symmetric == 0
    with pytest.raises(XStageError, match="mode: 'fast'"):
        xstage.MegaMoE.plan_bytes(ranks=2, mode="fast", **shape)
    with pytest.raises(XStageError, match="experts: 128 must be a multiple"):
        xstage.MegaMoE.plan_bytes(ranks=3, mode="torch", **shape)
    each, once = (xstage.MegaMoE.plan_bytes(ranks=2, rows_once=once, **shape) for once in (False, True))
    inbox = 2 * 8192 * (2048 + 4 * 16 + 4)  # a row, its scales and its call; beside them 16 bytes a row of the experts
    assert once.symmetric - each.symmetric == inbox + 16 * BufferLayout(2, 128, 2048, 8, 8192).rows
    assert (once.local, once.weights) == (each.local, each.weights)
    small = {"num_experts": 8, "hidden": 256, "intermediate": 128, "top_k": 2, "max_tokens_per_rank": 4}
    one = xstage.MegaMoE.plan_bytes(ranks=1, mode="reference", **small)
    with xstage.MegaMoE(**small) as moe:
        assert moe.size_bytes == one
    with xstage.MegaMoE(**small, layers=5) as moe:
        assert moe.size_bytes == xstage.MegaMoE.plan_bytes(ranks=1, mode="reference", **small, layers=5)
        assert (moe.size_bytes.symmetric, moe.size_bytes.weights) == (one.symmetric, 5 * one.weights)
    with pytest.raises(XStageError, match="layers: 0 must be"):
        xstage.MegaMoE.plan_bytes(ranks=1, **small, layers=0)


def test_no_memory_for_the_weights(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    small = {"num_experts": 8, "hidden": 256, "intermediate": 128, "top_k": 2, "max_tokens_per_rank": 4}
    monkeypatch.setattr(Weights, "__init__", full)
    with pytest.raises(XStageError, match=r"layers: weights of 3 take 2,3\d\d,\d\d\d bytes, and there is no memory for them on cpu"):
        xstage.MegaMoE(**small, layers=3)


def test_kernels_get_the_weights_of_the_layer(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a Hopper GPU, with its pipeline replaced by a record."""
    used = []

    class Pipeline:
        exchange = types.SimpleNamespace(expert_counts=torch.zeros(EXPERTS, dtype=torch.int32))

        def choose(self, *chosen: Any) -> None:
            used.append(chosen)

        def run(self, *_: Any) -> None:
            pass

        def free(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    small = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K, "max_tokens_per_rank": MOST}
    with xstage.MegaMoE(**small, layers=2) as moe:
        for layer in range(2):
            moe.load_weights(*expert_weights(layer), layer=layer)
        moe.mode, moe._kernels = "fused", Pipeline()  # type: ignore[assignment]
        for layer in (1, 0, 0, 1):
            moe(*tokens_of(0, 4, "any", 1, 0), layer=layer)
        assert used == [(layer, moe._weights[layer]) for layer in (1, 0, 0, 1)]


def test_mxfp4_takes_half_the_memory() -> None:
    shape = {"ranks": 2, "num_experts": 256, "hidden": 4096, "intermediate": 2048, "top_k": 8, "max_tokens_per_rank": 8192}
    fp8, mx = (xstage.MegaMoE.plan_bytes(**shape, mode="torch", weight_format=name) for name in ("fp8", "mxfp4"))
    assert mx.weights / fp8.weights == pytest.approx(0.5314, abs=1e-4)
    assert mx.symmetric == fp8.symmetric
    for mode in ("fused", "serial"):
        one, other = (xstage.MegaMoE.plan_bytes(**shape, mode=mode, weight_format=name) for name in ("fp8", "mxfp4"))
        assert (one.symmetric, one.local) == (other.symmetric, other.local)
        assert other.weights == mx.weights
    with pytest.raises(XStageError, match="weight_format: 'int4' is not one of fp8, mxfp4"):
        xstage.MegaMoE.plan_bytes(**shape, weight_format="int4")


def test_mxfp4_where_kernels_cannot_run(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer says that it runs as plain torch, and why; or refuses. What it then runs, here on a CPU."""
    small = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K, "max_tokens_per_rank": MOST}
    w1, w2 = expert_weights()
    parts = tokens_of(0, 20, "any", 1, 8)
    with xstage.MegaMoE(**small, weight_format="mxfp4") as moe:
        moe.load_weights(w1, w2)
        expected = moe(*parts)
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(moe, "device", torch.device("cuda"))
            on_a_gpu.setattr(op, "_why_not_kernels", lambda device, layout, intermediate: "not a Hopper GPU")
            with pytest.warns(RuntimeWarning, match="plain torch with NCCL.*: rank 0: not a Hopper GPU"):
                assert moe._choose_mode("serial") == "torch"
            with pytest.raises(UnsuitableMachine, match="not a Hopper GPU"):
                moe._choose_mode("error")
        assert moe.reason == "rank 0: not a Hopper GPU"
        exact = reference.moe(*parts, Linear(w1.double()), Linear(w2.double()), precision="float64")
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(moe, "mode", "torch")
            on_a_gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            on_a_gpu.setattr(torch.cuda, "device", lambda device: nullcontext())
            out, counts = moe(*parts, return_counts=True)
        assert (out - exact).norm() <= 2 * (expected - exact).norm()
        assert torch.equal(counts, routing.count(parts[1], EXPERTS))


# ---- the serial pipeline's steps, with its kernels replaced by records


class _Exchange:
    def __init__(self, layout: BufferLayout, **options: Any) -> None:
        self.layout, self.options, self.steps = layout, options, []
        self.order = options["order"]
        for name in ("activations", "scales", "tile_expert", "work1", "work2", "totals", "row_weight", "row_slot"):
            setattr(self, name, name)
        self.expert_counts = torch.zeros(1, dtype=torch.int32)

    def choose(self, layer: int) -> None:
        self.layer = layer

    def dispatch(self, *arguments: Any) -> None:
        self.steps.append(("dispatch", arguments))

    def combine(self, *arguments: Any) -> None:
        self.steps.append(("combine", arguments))

    def check(self) -> None:
        raise PeerTimeout("rank 1 did not arrive")

    def free(self) -> None:
        self.steps.append(("free", ()))


def test_serial_pipeline_in_order(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import xstage.moe

    exchange, grouped_gemm = types.ModuleType("xstage.moe.exchange"), types.ModuleType("xstage.moe.grouped_gemm")
    exchange.Exchange, exchange.scratch_bytes = _Exchange, lambda layout, intermediate, fused: 1000  # type: ignore[attr-defined]
    for module in (exchange, grouped_gemm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(xstage.moe, module.__name__.rsplit(".", 1)[1], module, raising=False)
    group = dist.group.WORLD
    assert group is not None
    layout = BufferLayout(1, EXPERTS, HIDDEN, TOP_K, MOST)
    weights = loaded(*expert_weights())
    pipeline = KernelPipeline(layout, weights, clamp=7.0, group=group, device=CPU, timeout_s=3.0, tag="t")
    steps = pipeline.exchange.steps
    for name in ("swiglu", "rows"):
        setattr(grouped_gemm, name, lambda *a, name=name: steps.append((name, a)))
    x, idx, w = tokens_of(0, 4, "any", 1, 0)
    out = torch.empty(4, HIDDEN).bfloat16()
    pipeline.run(x, None, idx, w, out)
    assert [name for name, _ in steps] == ["dispatch", "swiglu", "rows", "combine"]
    assert steps[0][1] == (x, None, idx, w)
    assert steps[1][1][:2] == ("activations", "scales")
    assert steps[1][1][4:] == ("tile_expert", "work1", "totals", "row_weight", pipeline.middle, pipeline.middle_scales, 7.0)
    assert steps[2][1] == (
        pipeline.middle,
        pipeline.middle_scales,
        weights.w2,
        weights.w2_scales,
        "tile_expert",
        "work2",
        "totals",
        "row_slot",
    )
    assert steps[3][1] == (idx, out)
    assert pipeline.middle.shape == (layout.rows, INTERMEDIATE)
    assert pipeline.middle_scales.shape == (INTERMEDIATE // 128, layout.rows)
    middle = pipeline.middle.numel() + 4 * pipeline.middle_scales.numel()
    assert KernelPipeline.local_bytes(layout, INTERMEDIATE) == 1000 + middle

    # A call of `serial` whose arguments are bad: refused here, at once, and a peer that waited in vain can read why.
    with xstage.MegaMoE(num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K, max_tokens_per_rank=MOST) as moe:
        moe.load_weights(*expert_weights())
        assert moe(x, idx, w).shape == (4, HIDDEN)
        moe.mode, moe._kernels = "serial", pipeline
        with pytest.raises(XStageError, match="x: shape"):  # the first call is agreed on
            moe(x[0], idx, w)
        moe._met = True
        with pytest.raises(XStageError, match="x: shape"):
            moe(x[0], idx, w)
        with monkeypatch.context() as as_a_peer:
            as_a_peer.setattr(moe._refusals, "_rank", 7)
            with pytest.raises(PeerTimeout, match=r"did not arrive; rank 0 refused its arguments: x: shape \(256,\) must be"):
                moe.check()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        moe(x, idx, w)
        with monkeypatch.context() as as_a_peer:
            as_a_peer.setattr(moe._refusals, "_rank", 7)
            with pytest.raises(PeerTimeout, match=r"did not arrive$"):
                moe.check()
    assert steps[-1][0] == "free"


def test_rows_of_an_expert_choose_the_kernel(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import xstage.moe
    from xstage.moe.shapes import rows_of_an_expert
    from xstage.moe.work_table import FORMS, NARROW_ROWS, SPLIT_ROWS, SWAPPED_ROWS, WorkOrder

    assert [rows_of_an_expert(tokens, ranks=2, top_k=8, experts=128) for tokens in (0, 1, 384, 385)] == [0, 1, NARROW_ROWS, NARROW_ROWS + 1]

    exchange, grouped_gemm = types.ModuleType("xstage.moe.exchange"), types.ModuleType("xstage.moe.grouped_gemm")
    exchange.Exchange = _Exchange  # type: ignore[attr-defined]
    for module in (exchange, grouped_gemm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(xstage.moe, module.__name__.rsplit(".", 1)[1], module, raising=False)
    for name in ("work", "ready", "control", "call", "arrived", "sends"):
        monkeypatch.setattr(_Exchange, name, name, raising=False)
    monkeypatch.setattr(_Exchange, "view", lambda self, place: torch.empty(0), raising=False)
    compiled, taken = [], []
    grouped_gemm.forms = lambda layout, recorded: FORMS  # type: ignore[attr-defined]
    grouped_gemm.kernels = lambda *a, codes: [(compiled.append, (form,)) for form in FORMS]  # type: ignore[attr-defined]
    grouped_gemm.both = lambda *a: taken.append(a[-1])  # type: ignore[attr-defined]
    group, order = dist.group.WORLD, WorkOrder.of("interleaved", 2, 2, lead_rows=None, instances=2)
    assert group is not None
    most = 4 * SPLIT_ROWS
    layout = BufferLayout(1, EXPERTS, HIDDEN, TOP_K, most)
    options: dict[str, Any] = {"clamp": None, "group": group, "device": CPU, "timeout_s": 3.0, "tag": "t", "order": order}
    least, few, many = (rows * EXPERTS // TOP_K for rows in (SWAPPED_ROWS, NARROW_ROWS, SPLIT_ROWS))
    x, idx, w = (torch.empty(many, n) for n in (HIDDEN, TOP_K, TOP_K))
    for weights, wanted in (
        (Mxfp4Weights, ["swapped", "narrow", "narrow", "wide", "wide", "split", "wide", "narrow"]),
        (Weights, ["wide"] * 8),
    ):
        pipeline = KernelPipeline(layout, weights(EXPERTS, HIDDEN, INTERMEDIATE, CPU), **options)
        taken.clear()
        for tokens in (least, least + 1, few, few + 1, many - EXPERTS, many):
            pipeline.run(x[:tokens], None, idx[:tokens], w[:tokens], x)
        pipeline.spans = object()  # type: ignore[assignment]
        pipeline.run(x[:1], None, idx[:1], w[:1], x)
        pipeline.spans, pipeline.form = None, wanted[1]
        pipeline.run(x[:1], None, idx[:1], w[:1], x)
        assert taken == wanted, weights
    assert compiled == list(FORMS), "once, by four-bit weights only"


def test_memory_of_one_kernel_at_a_published_size() -> None:
    """Under any routing; the rows between the GEMMs take the place of rows that are done with."""
    from xstage.moe.shapes import shape

    m = shape("DSv4-Flash")
    sizes = {
        "ranks": 2, "num_experts": m.experts, "hidden": m.hidden, "intermediate": m.intermediate, "top_k": m.top_k,
        "max_tokens_per_rank": 8192,
    }  # fmt: skip
    planned = xstage.MegaMoE.plan_bytes(**sizes, mode="fused")
    assert planned.symmetric + planned.local == pytest.approx(0.90 * 2**30, rel=0.01)
    wide = xstage.MegaMoE.plan_bytes(**{**sizes, "intermediate": 2 * m.hidden}, mode="fused")
    assert wide.local - planned.local > 114_560 * 2 * m.hidden  # no room there: memory of its own
