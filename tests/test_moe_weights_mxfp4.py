"""MXFP4 weights of a rank: what is kept is what was given, bit for bit, in the order of the kernels; what is refused; bytes."""

import pytest
import torch

from xstage.errors import XStageError
from xstage.moe import mxfp4, quantize
from xstage.moe.weights import Weights
from xstage.moe.weights_mxfp4 import Mxfp4Weights

EXPERTS, HIDDEN, INTERMEDIATE = 3, 256, 384
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def dense(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=g) * HIDDEN**-0.5
    return w1.to(dtype), (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=g) * INTERMEDIATE**-0.5).to(dtype)


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Any codes, any scales: w1, w2 and the scales of each."""
    g = torch.Generator().manual_seed(1)
    shapes = ((EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE))
    made = [torch.randint(256, (e, rows, columns // 2), generator=g).to(torch.uint8) for e, rows, columns in shapes]
    made += [torch.randint(255, (e, rows, columns // 32), generator=g).to(torch.uint8) for e, rows, columns in shapes]
    return made[0], made[1], made[2], made[3]


def loaded(*arguments: torch.Tensor) -> Mxfp4Weights:
    weights = Mxfp4Weights(EXPERTS, HIDDEN, INTERMEDIATE, CPU)
    weights.check(*(arguments if len(arguments) == 4 else (*arguments, None, None)))  # type: ignore[arg-type]
    weights.load(*arguments)
    assert weights.loaded
    return weights


@pytest.mark.parametrize("e8m0", [False, True])
def test_packed_weights_are_kept_bit_for_bit(e8m0: bool) -> None:
    q1, q2, s1, s2 = packed()
    weights = loaded(q1, q2, *((s1.view(torch.float8_e8m0fnu), s2.view(torch.float8_e8m0fnu)) if e8m0 else (s1, s2)))
    for rows, tiles, linear, scales, (q, s), undo in (
        (2 * INTERMEDIATE, weights.w1, weights.linear1, weights.w1_scales, (q1, s1), quantize.separate_gate_up),
        (HIDDEN, weights.w2, weights.linear2, weights.w2_scales, (q2, s2), quantize.from_thread_order),
    ):
        assert tiles.shape[1] == rows // 128
        words, below = mxfp4.from_tiles(tiles)
        assert torch.equal(mxfp4.to_tiles(words, below), tiles)
        assert torch.equal(mxfp4.from_words(undo(words)), q)
        for expert in range(EXPERTS):
            natural = linear.natural(expert)
            assert torch.equal(mxfp4.from_words(natural[0]), q[expert])
            assert torch.equal(natural[1], s[expert])
        assert scales.is_contiguous()
    # Scales of tiles lie as those of fp8 weights: K first, gate and up of the same outputs side by side.
    tiles = mxfp4.tile_scales(q1, s1)
    for expert in range(EXPERTS):
        for block in range(INTERMEDIATE // 128):
            for column in range(HIDDEN // 128):
                gate, up = weights.w1_scales[expert, column, block]
                assert gate == tiles[expert, block, column]
                assert up == tiles[expert, INTERMEDIATE // 128 + block, column]
    assert torch.equal(weights.w2_scales, mxfp4.tile_scales(q2, s2).mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_weights_are_quantised_once(dtype: torch.dtype) -> None:
    w1, w2 = dense(dtype)
    weights = loaded(w1, w2)
    for linear, w in ((weights.linear1, w1), (weights.linear2, w2)):
        assert linear.shape == w.shape
        for e in range(EXPERTS):
            assert torch.equal(linear.dense(e, torch.float64), mxfp4.dequantize(*mxfp4.quantize(w[e]), torch.float64))
            # bfloat16 holds every code at every scale that these have.
            assert torch.equal(linear.dense(e, torch.bfloat16).double(), linear.dense(e, torch.float64))
    # The same as quantising outside and loading what came out.
    (q1, s1), (q2, s2) = mxfp4.quantize(w1), mxfp4.quantize(w2)
    again = loaded(q1, q2, s1, s2)
    for name in ("w1", "w2", "w1_scales", "w2_scales"):
        assert torch.equal(getattr(again, name), getattr(weights, name))


def test_kernel_order_holds_what_the_matrix_unit_is_to_get() -> None:
    """Rows in the GEMM's order, decoded block by block with the tile's scale beside them, are the folded matrix."""
    weights = loaded(*dense())
    words, below = mxfp4.from_tiles(weights.w1[0])
    # 32 mixed rows are gate and up of 16 outputs, which take turns every 8.
    row = torch.arange(2 * INTERMEDIATE)
    tile = weights.w1_scales[0][:, row // 256, row // 8 % 2].mT.repeat_interleave(4, 1)  # [row, block of 32]
    shift = mxfp4.LARGEST_SHIFT - below.int()
    blocks = (shift + torch.frexp(tile).exponent - 1 + mxfp4.BIAS).to(torch.uint8)
    assert int(shift.max()) == 6
    natural = quantize.separate_gate_up(words), quantize.separate_gate_up(blocks)
    q, _ = mxfp4.fold(mxfp4.from_words(natural[0]), natural[1])
    decoded = mxfp4.dequantize(mxfp4.from_words(words), (shift + 127).to(torch.uint8)).to(torch.float8_e4m3fn)
    assert torch.equal(decoded.view(torch.uint8), quantize.interleave_gate_up(q.view(torch.uint8)))


def test_bytes() -> None:
    weights = Mxfp4Weights(EXPERTS, HIDDEN, INTERMEDIATE, CPU)
    tensors = (weights.w1, weights.w1_scales, weights.w2, weights.w2_scales)
    total = sum(t.numel() * t.element_size() for t in tensors)
    assert total == Mxfp4Weights.size_bytes(EXPERTS, HIDDEN, INTERMEDIATE)
    assert total / Weights.size_bytes(EXPERTS, HIDDEN, INTERMEDIATE) == pytest.approx(0.5314, abs=1e-4)


def test_what_is_refused() -> None:
    (w1, w2), (q1, q2, s1, s2) = dense(), packed()
    bad_w2, bad_s1 = w2.clone(), s1.clone()
    bad_w2[2, 5, 7], bad_s1[1, 3, 4] = torch.nan, 255
    weights = Mxfp4Weights(EXPERTS, HIDDEN, INTERMEDIATE, CPU)
    for arguments, message in (
        ((w1[:2], w2, None, None), r"w1: shape \(2, 768, 256\) must be \(3, 768, 256\)"),
        ((q1, q2[..., :100], s1, s2), r"w2: shape \(3, 256, 100\) must be \(3, 256, 192\) in torch\.uint8"),
        ((w1.double(), w2, None, None), r"w1: torch\.float64 must be"),
        ((w1.to(torch.float8_e4m3fn), w2, s1, None), r"w1: torch\.float8_e4m3fn must be"),
        ((q1, w2, None, None), "w1_scales: missing"),
        ((w1, w2, None, s2), "w2_scales: given"),
        ((q1, q2, s1.mT, s2), "w1_scales: "),
        ((q1, q2, s1, s2.float()), r"w2_scales: torch\.float32 \(3, 256, 12\) must be uint8 or float8_e8m0fnu \(3, 256, 12\)"),
        ((q1, q2, bad_s1, s2), r"w1_scales: 255 \(NaN\) at \[1, 3, 4\]; scales must lie in 0 … 254"),
        ((w1, bad_w2, None, None), r"w2\[2\]: nan at \[5, 7\]; MXFP4 holds finite numbers only"),
    ):
        with pytest.raises(XStageError, match=message):
            weights.check(*arguments)  # type: ignore[arg-type]
    assert not weights.loaded


def test_random_weights_are_weights() -> None:
    """What measurements fill in is such as `load` could have made: the reference reads it, in the size of an ordinary layer's."""
    weights = Mxfp4Weights(EXPERTS, HIDDEN, INTERMEDIATE, CPU)
    torch.manual_seed(0)
    weights.fill()
    assert weights.loaded
    for linear, depth in ((weights.linear1, HIDDEN), (weights.linear2, INTERMEDIATE)):
        for expert in range(EXPERTS):
            words, scales = linear.natural(expert)
            folded, tiles = mxfp4.fold(mxfp4.from_words(words), scales)
            assert linear.scales is not None
            assert torch.equal(tiles, linear.scales[expert])
            assert folded.float().isfinite().all()
            assert 0.25 < float(linear.dense(expert, torch.float32).std()) * depth**0.5 < 4


@pytest.mark.parametrize("spread", [0, 11, 12, 40, 250])
def test_distances_fit_a_byte_and_say_the_scale_again(spread: int) -> None:
    g = torch.Generator().manual_seed(spread)
    packed = torch.randint(256, (256, 128), generator=g).to(torch.uint8)
    scales = torch.randint(254 - spread, 255, (256, 8), generator=g).to(torch.uint8)
    packed[5, :16], scales[5, 0] = 0x80, 254  # of zeros, above all others
    tiles = mxfp4.tile_scales(packed, scales)
    below = mxfp4.distances(scales, tiles)
    assert torch.equal(mxfp4.from_distances(below, tiles), scales)
    used = (packed & 0x77).unflatten(-1, (-1, 16)).amax(-1) > 0
    assert int(below[used].max()) <= spread
    words = mxfp4.to_words(packed)
    assert all(torch.equal(a, b) for a, b in zip(mxfp4.from_tiles(mxfp4.to_tiles(words, below)), (words, below), strict=True))
