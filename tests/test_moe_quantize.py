"""Quantisation against float64 and the list of all e4m3 numbers: error bounds, scales, what is not finite, round trips, interleave."""

import numpy as np
import pytest
import torch

from xstage.errors import XStageError
from xstage.moe import quantize as qz

# Every e4m3 number, from the definition of the format: bias 7, no infinity, mantissa 7 of the highest exponent is NaN.
E4M3 = np.array(
    sorted(
        {
            s * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
            for s in (1, -1)
            for e in range(16)
            for m in range(8)
            if (e, m) != (15, 7)
        }
    )
)


def families() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    random = torch.randn(16, 512, generator=g)
    wide = random * torch.exp2(torch.randint(-60, 60, (16, 512), generator=g).float())
    zeros = torch.zeros(4, 256)
    zeros[1] = -0.0
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return {
        "random": random,
        "random bf16": random.bfloat16(),
        "random fp16": random.half(),
        "wide": wide,
        "tiny": random * 2.0**-140,
        "smallest": torch.full((2, 128), 2.0**-149),
        "huge": (random / random.abs().max()).double().mul(torch.finfo(torch.float32).max).float(),
        "largest": torch.tensor([[torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max] * 64]),
        "zero": zeros,
        "one": torch.nn.functional.one_hot(torch.arange(128), 128).float() * -3.3,
        "every bf16": bits.view(-1, 128),
        "every bf16, shuffled": bits[torch.randperm(1 << 16, generator=g)].view(-1, 1024),
    }


def blocks(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy().reshape(*x.shape[:-1], -1, 128)


@pytest.mark.parametrize("name", list(families()))
def test_activations(name: str) -> None:
    x = families()[name]
    q, scales = qz.quantize_activations(x)
    assert q.dtype == torch.float8_e4m3fn
    assert q.shape == x.shape
    assert scales.dtype == torch.float32
    assert scales.shape == (*x.shape[:-1], x.shape[-1] // 128)
    exact, coded, s = blocks(x), blocks(q), scales.double().numpy()[..., None]
    finite = np.isfinite(exact)
    largest = np.where(finite, np.abs(exact), 0).max(-1, keepdims=True)

    # The scale covers the block's maximum and is the smallest float32 that does, or the floor.
    assert (s * 448 >= largest).all()
    below = np.nextafter(scales.numpy(), np.float32(0)).astype(np.float64)[..., None]
    assert ((below * 448 < largest) | (s == 2.0**-126)).all()

    # What is not finite becomes NaN, and nothing else does.
    assert (np.isnan(coded) == ~finite).all()

    # Each code is the e4m3 number nearest to x / scale, up to the float32 rounding of the quotient, and the promised bound holds.
    quotient = (exact / s)[finite]
    index = np.clip(np.searchsorted(E4M3, quotient), 1, len(E4M3) - 1)
    nearest = np.minimum(np.abs(E4M3[index] - quotient), np.abs(E4M3[index - 1] - quotient))
    error = np.abs(coded[finite] - quotient)
    assert (error <= nearest + 2 * 2.0**-24 * np.abs(quotient) + 2.0**-149).all()
    assert (error <= np.maximum(np.abs(quotient) / 16, 2.0**-10) * (1 + 2.0**-19)).all()

    back = blocks(qz.dequantize_activations(q, scales, torch.float64))
    bound = np.maximum(np.abs(exact) / 16, np.broadcast_to(s, exact.shape) / 1024) * (1 + 2.0**-19)
    assert (np.abs(back - exact)[finite] <= bound[finite]).all()
    single = qz.dequantize_activations(q, scales)
    assert (single.isfinite().numpy().reshape(finite.shape) == finite).all()
    np.testing.assert_allclose(blocks(single)[finite], back[finite], rtol=2.0**-24, atol=2.0**-150)

    # Codes times their scale come back as they were, where the scale is not the floor.
    again, scales_again = qz.quantize_activations(single.where(single.isfinite(), 0.0))
    kept = (scales_again == scales) & (scales > 2.0**-120)
    same = (again.float() == q.float()) | q.float().isnan()
    assert same.unflatten(-1, (-1, 128))[kept].all()


def test_zeros_keep_their_sign() -> None:
    q, scales = qz.quantize_activations(families()["zero"])
    assert (scales == 2.0**-126).all()
    assert (q.view(torch.uint8)[0] == 0).all()
    assert (q.view(torch.uint8)[1] == 0x80).all()


def test_the_largest_scale_is_exact() -> None:
    largest = torch.finfo(torch.float32).max
    _, scales = qz.quantize_activations(torch.full((1, 128), largest))
    assert scales.double().item() * 448 == largest


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_neighbours_of_what_is_not_finite_are_untouched(bad: float) -> None:
    x = families()["random"].clone()
    x[3, 5] = 0.0
    q, scales = qz.quantize_activations(x)
    x[3, 5] = bad
    q_bad, scales_bad = qz.quantize_activations(x)
    assert torch.equal(scales, scales_bad)
    differs = q.view(torch.uint8) != q_bad.view(torch.uint8)
    assert differs.nonzero().tolist() == [[3, 5]]
    assert q_bad[3, 5].float().isnan()
    q_all, scales_all = qz.quantize_activations(torch.full((1, 128), bad))
    assert q_all.float().isnan().all()
    assert scales_all.item() == 2.0**-126


@pytest.mark.parametrize("shape", [(128, 128), (3, 256, 384)])
def test_weights(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(2)
    w = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-20, 20, shape, generator=g).float())
    w[..., 5, 7], w[..., 6, 7] = torch.inf, torch.nan
    w[..., :128, -128:] = 0
    q, scales = qz.quantize_weights(w)
    *lead, rows, columns = shape
    assert q.shape == w.shape
    assert scales.shape == (*lead, rows // 128, columns // 128)
    # A block's scale is the largest of its rows' scales: both round the same quotient up.
    row_scales = qz.quantize_activations(w)[1]
    assert torch.equal(scales, row_scales.view(*lead, rows // 128, 128, -1).amax(-2))
    s = scales.double().repeat_interleave(128, -1).repeat_interleave(128, -2)
    exact, back = w.double(), qz.dequantize_weights(q, scales, torch.float64)
    finite = exact.isfinite()
    assert torch.equal(back.isnan(), ~finite)
    bound = torch.maximum(exact.abs() / 16, s / 1024) * (1 + 2.0**-19)
    assert ((back - exact).abs()[finite] <= bound[finite]).all()
    assert torch.equal(back[finite], (q.double() * s)[finite])


def test_interleave_gives_a_thread_gate_and_up_of_four_outputs() -> None:
    rows = torch.arange(2 * 64)[:, None].expand(-1, 3)
    mixed = qz.interleave_gate_up(rows)[:, 0].view(-1, 4, 4, 2)  # [of 32 rows, column block of 8, thread of four, two columns]
    for group in range(4):
        for thread in range(4):
            held = mixed[group, :, thread]  # gate, up, gate, up
            outputs = [group * 16 + 4 * thread + i for i in range(4)]
            assert held[0::2].flatten().tolist() == outputs
            assert held[1::2].flatten().tolist() == [64 + output for output in outputs]
    assert torch.equal(qz.separate_gate_up(qz.interleave_gate_up(rows)), rows)
    w = torch.randn(2, 96, 5)
    assert torch.equal(qz.separate_gate_up(qz.interleave_gate_up(w)), w)
    assert torch.equal(qz.interleave_gate_up(qz.separate_gate_up(w)), w)


def test_thread_order_gives_a_thread_eight_results_in_a_row() -> None:
    rows = torch.arange(64)[:, None].expand(-1, 3)
    mixed = qz.thread_order(rows)[:, 0].view(-1, 4, 4, 2)  # [of 32 rows, column block of 8, thread of four, two columns]
    for group in range(2):
        for thread in range(4):
            assert mixed[group, :, thread].flatten().tolist() == [group * 32 + 8 * thread + i for i in range(8)]
    w = torch.randn(2, 96, 5)
    assert torch.equal(qz.from_thread_order(qz.thread_order(w)), w)
    assert torch.equal(qz.thread_order(qz.from_thread_order(w)), w)


def test_refusals() -> None:
    with pytest.raises(XStageError, match="multiples of 128"):
        qz.quantize_activations(torch.zeros(2, 100))
    with pytest.raises(XStageError, match="rows and columns"):
        qz.quantize_weights(torch.zeros(100, 128))
    with pytest.raises(XStageError, match="float64"):
        qz.quantize_activations(torch.zeros(2, 128, dtype=torch.float64))
    with pytest.raises(XStageError, match="multiple of 32"):
        qz.interleave_gate_up(torch.zeros(24, 4))


def test_no_rows() -> None:
    q, scales = qz.quantize_activations(torch.zeros(0, 256))
    assert q.shape == (0, 256)
    assert scales.shape == (0, 2)
