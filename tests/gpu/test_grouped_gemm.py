"""Grouped fp8 GEMM on one Hopper GPU: against float64, on random loads of experts, with outputs poisoned.

    python tests/gpu/test_grouped_gemm.py          # the same without pytest

Covered: the three epilogues, rounds of 4 and 2 stages, one to many experts, empty experts, odd numbers of row tiles, padding rows, a clamp,
values that are not finite, no work at all, the same bits twice and with spans; weights in MXFP4 (`-k mxfp4`): all epilogues against float64
of the folded weights, and bitwise what fp8 kernels make of them, blocks far below their tile's largest included. Not covered: speed
(`xstage bench moe-layer`).
"""

import random
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
]
SIZES = [(512, 512), (1024, 512), (768, 1024), (256, 512), (2048, 1536), (4096, 2048)]  # K, N


def work_table(loads: list[int], columns: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(tile_expert, work, entries) of experts with so many row tiles each: any order of entries will do."""
    from xstage.moe import work_table as wt

    expert = [e for e, tiles in enumerate(loads) for _ in range(tiles)]
    entries = wt.work_table(loads, columns // wt.TILE_COLUMNS)
    random.Random(1).shuffle(entries)
    expert_of, words = (torch.tensor(words, dtype=torch.int32, device="cuda").view(-1) for words in (expert or [0], entries or [(0, 0)]))
    return expert_of, words, len(entries)


def work_list(loads: list[int], order: Any, rows: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(list of both layers' entries, totals) of experts with so many row tiles each. rows: of experts; None: tiles are full."""
    from xstage.moe import work_table as wt

    entries = [len(wt.work_table(loads, columns)) for columns in (order.columns1, order.columns2)]
    words = wt.work_list([128 * tiles for tiles in loads] if rows is None else rows, order)
    return (
        torch.tensor(words, dtype=torch.int32, device="cuda").view(-1),
        torch.tensor([*entries, sum(loads), 128 * sum(loads)], dtype=torch.int32, device="cuda"),
    )


def problem(loads: list[int], k: int, n: int, spare: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random e4m3 rows and weights with scales; `spare` row tiles at the end belong to nobody and hold NaN."""
    from xstage.moe import quantize

    torch.manual_seed(seed)
    rows = 128 * (sum(loads) + spare)
    x = torch.randn(rows, k, device="cuda") * torch.rand(rows, 1, device="cuda").add(0.2)
    x[rows - 128 * spare :] = torch.nan
    a, a_scales = quantize.quantize_activations(x)
    w, w_scales = quantize.quantize_weights(torch.randn(len(loads), n, k, device="cuda") * k**-0.5 * 4)
    tile_expert, work, entries = work_table(loads, n)
    totals = torch.tensor([entries, entries, sum(loads), 128 * sum(loads)], dtype=torch.int32, device="cuda")
    return {"a": a, "a_scales": a_scales, "w": w, "w_scales": w_scales, "tile_expert": tile_expert, "work": work, "totals": totals}


def in_mxfp4(p: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """The problem with other weights, in MXFP4: `w` and `w_scales` are what they fold to; `codes` and `below` in natural order."""
    from xstage.moe import mxfp4

    torch.manual_seed(1000 + seed)
    shape = p["w"].shape
    codes, scales = mxfp4.quantize(torch.randn(shape, device="cuda") * shape[2] ** -0.5 * 4)
    # Of some tiles of rows some blocks are far smaller, of one all but one; warps with and without them stand side by side.
    small = torch.rand(scales.shape, device="cuda") < 0.02 * (torch.arange(shape[1], device="cuda") // 32 % 3 == 1)[None, :, None]
    scales = torch.where(small, (scales.int() - torch.randint(5, 30, scales.shape, device="cuda")).clamp_min(0).to(torch.uint8), scales)
    scales[:, 7, 1] = 140
    folded, tiles = mxfp4.fold(codes, scales)
    return {**p, "w": folded, "w_scales": tiles, "codes": mxfp4.to_words(codes), "below": mxfp4.distances(scales, tiles)}


def exact(p: dict[str, torch.Tensor], loads: list[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[rows of experts, N] in `dtype` from the dequantised operands."""
    from xstage.moe import quantize

    a = quantize.dequantize_activations(p["a"], p["a_scales"], dtype)
    parts, m = [], 0
    for e, tiles in enumerate(loads):
        w = quantize.dequantize_weights(p["w"][e], p["w_scales"][e], dtype)
        parts.append(a[128 * m : 128 * (m + tiles)] @ w.T)
        m += tiles
    return torch.cat(parts)


def arguments(p: dict[str, torch.Tensor], order: str = "natural", folded: bool = False) -> list[torch.Tensor]:
    """order of the weight's rows: `natural`, `gate_up` mixed, `threads`. folded: weights in MXFP4 as the e4m3 that they are decoded to."""
    from xstage.moe import mxfp4, quantize

    scales = p["w_scales"].transpose(1, 2).contiguous()
    place = {"natural": lambda t: t, "threads": quantize.thread_order, "gate_up": quantize.interleave_gate_up}[order]
    if "codes" in p and not folded:
        w = mxfp4.to_tiles(place(p["codes"]), place(p["below"]))
    else:
        w = quantize.tiled(place(p["w"].view(torch.uint8))).contiguous()
    if order == "gate_up":
        scales = scales.unflatten(2, (2, -1)).transpose(2, 3).contiguous()
    return [p["a"].view(torch.uint8), p["a_scales"].T.contiguous(), w, scales, p["tile_expert"], p["work"], p["totals"]]


def loads_of(draw: random.Random, most: int) -> list[int]:
    return draw.choice([[1], [2], [0, 3, 0], [draw.randint(0, 3) for _ in range(draw.randint(1, most))], [7, 0, 1, 1]])


def relative(value: torch.Tensor, true: torch.Tensor) -> float:
    return float((value.double() - true).norm() / true.norm())


@pytest.mark.parametrize(("k", "n"), SIZES)
def test_product_and_rows_to_slots(k: int, n: int) -> None:
    from xstage.moe import grouped_gemm

    draw = random.Random(k + n)
    for seed in range(4):
        loads = loads_of(draw, 20)
        if not sum(loads):
            continue
        p = problem(loads, k, n, seed=seed)
        true = exact(p, loads)
        out = torch.full((p["a"].shape[0], n), torch.nan, dtype=torch.bfloat16, device="cuda")
        grouped_gemm.plain(*arguments(p), out)
        used = 128 * sum(loads)
        assert relative(out[:used], true) < 2 * relative(true.bfloat16(), true)
        assert out[used:].isnan().all()
        again = torch.full_like(out, torch.nan)
        grouped_gemm.plain(*arguments(p), again)
        assert torch.equal(again[:used], out[:used])

        # Rows in a random order, some to nowhere.
        slots = torch.full((used + 5, n), torch.nan, dtype=torch.bfloat16, device="cuda")
        place = torch.randperm(used, device="cuda")
        address = slots.data_ptr() + place * (2 * n)
        keep = torch.rand(used, device="cuda") < 0.9
        row_slot = torch.zeros(p["a"].shape[0], dtype=torch.int64, device="cuda")
        row_slot[:used] = torch.where(keep, address, 0)
        grouped_gemm.rows(*arguments(p, "threads"), row_slot)
        want = torch.full_like(slots, torch.nan)
        want[place[keep]] = out[:used][keep]
        assert torch.equal(slots.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("clamp", [None, 1.5])
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_swiglu(k: int, n: int, clamp: float | None) -> None:
    from xstage.moe import grouped_gemm, quantize
    from xstage.moe.reference import swiglu

    draw = random.Random(k * n)
    for seed in range(3):
        loads = loads_of(draw, 20)
        if not sum(loads):
            continue
        p = problem(loads, k, n, seed=seed)
        rows, used = p["a"].shape[0], 128 * sum(loads)
        weight = torch.rand(rows, device="cuda")
        middle = torch.full((rows, n // 2), 0xFF, dtype=torch.uint8, device="cuda")
        scales = torch.full((n // 256, rows), torch.nan, device="cuda")
        grouped_gemm.swiglu(*arguments(p, "gate_up"), weight, middle, scales, clamp)
        got = quantize.dequantize_activations(middle.view(torch.float8_e4m3fn)[:used], scales.T[:used], torch.float64)
        true = swiglu(exact(p, loads), clamp) * weight[:used, None].double()
        elements, torch_scales = quantize.quantize_activations(swiglu(exact(p, loads, torch.float32), clamp))
        torch_scales = torch_scales * weight[:used, None]
        plain = quantize.dequantize_activations(elements, torch_scales, torch.float64)
        assert relative(got, true) < 1.02 * relative(plain, true)
        assert (scales.T[:used] / torch_scales - 1).abs().max() < 2e-3
        assert (middle[used:] == 0xFF).all()
        assert scales[:, used:].isnan().all()


@pytest.mark.parametrize("name", ["interleaved", "alternating", "expert_wave", "linear1_first"])
@pytest.mark.parametrize(("k", "n"), [(512, 1024), (1024, 512), (1536, 1536)])
def test_both_layers_in_one_kernel(k: int, n: int, name: str) -> None:
    both_layers(k, n, name)


def both_layers(k: int, n: int, name: str, form: str | None = None) -> None:
    """Bitwise what two kernels give, in every order, many times over. form: of the kernel, with weights in MXFP4."""
    from xstage.moe import grouped_gemm
    from xstage.moe import work_table as wt

    draw = random.Random(k + n)
    for seed in range(3):
        loads = [draw.randint(0, 5) for _ in range(draw.choice([3, 40]))] + [1]
        p, q = problem(loads, k, n, seed=seed), problem(loads, n // 2, k, seed=seed + 100)
        if form:
            p, q = in_mxfp4(p, seed), in_mxfp4(q, seed + 100)
        one, two = arguments(p, "gate_up"), arguments(q, "threads")
        rows, tiles = p["a"].shape[0], sum(loads)
        weight = torch.rand(rows, device="cuda")
        out = torch.full((2, rows, k), torch.nan, dtype=torch.bfloat16, device="cuda")
        slots = [out[i].data_ptr() + torch.arange(rows, device="cuda") * (2 * k) for i in range(2)]
        middle = torch.full((2, rows, n // 2), 0xFF, dtype=torch.uint8, device="cuda")
        scales = torch.full((2, n // 256, rows), torch.nan, device="cuda")
        grouped_gemm.swiglu(*one, weight, middle[0], scales[0])
        grouped_gemm.rows(middle[0], scales[0], *two[2:], slots[0])

        order = wt.WorkOrder.of(name, n // 256, k // 256, lead_rows=None, instances=66)
        # Last tiles full, and with more, as many and less than half of their rows.
        real = [max(128 * tiles - draw.choice((0, 63, 64, 70, 127)), 0) for tiles in loads]
        here = torch.cat([torch.arange(128 * tiles, device="cuda") < count for tiles, count in zip(loads, real, strict=True)])
        work, totals = work_list(loads, order, real)
        control, status = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        call = torch.tensor([0, 0, 10**9, status.data_ptr()], dtype=torch.int64, device="cuda")
        for _ in range(5):
            middle[1], out[1] = 0xFF, torch.nan
            ready = torch.zeros(1 + rows // 128, dtype=torch.int32, device="cuda")
            given = (*one[:4], *two[2:4], work, totals, weight)
            grouped_gemm.both(*given, middle[1], scales[1], slots[1], (ready, control, call), form=form or "wide")
            torch.cuda.synchronize()
            assert status.item() == 0
            # Every cluster has asked once more than it was given.
            assert ready[0] == totals[:2].sum() + grouped_gemm.ctas_of(0) // 2
            assert (ready[1 : 1 + tiles] == n // (128 if form == "split" else 256)).all()  # two CTAs count a split tile
            assert torch.equal(middle[0, : 128 * tiles][here], middle[1, : 128 * tiles][here])
            assert torch.equal(out[0, : 128 * tiles][here].view(torch.int16), out[1, : 128 * tiles][here].view(torch.int16))


@pytest.mark.parametrize(("k", "n"), SIZES)
def test_mxfp4_is_what_fp8_kernels_make_of_the_folded_weights(k: int, n: int) -> None:
    """Bitwise, in all three epilogues; and the product against float64 at most twice the error of rounding it."""
    from xstage.moe import grouped_gemm

    draw = random.Random(k + n)
    for seed in range(4):
        loads = loads_of(draw, 12)
        if not sum(loads):
            continue
        p = in_mxfp4(problem(loads, k, n, seed=seed), seed)
        true, rows, used = exact(p, loads), p["a"].shape[0], 128 * sum(loads)
        outs = [torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        for out, folded in zip(outs, (True, False, False), strict=True):
            grouped_gemm.plain(*arguments(p, folded=folded), out)
            torch.cuda.synchronize()
        assert relative(outs[1][:used], true) < 2 * relative(true.bfloat16(), true)
        for out in outs[1:]:
            assert torch.equal(out.view(torch.int16), outs[0].view(torch.int16))
        place = torch.randperm(used, device="cuda")
        slots, made = [torch.full((used, n), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)], []
        weight = torch.rand(rows, device="cuda")
        for folded in (True, False):
            row_slot = torch.zeros(rows, dtype=torch.int64, device="cuda")
            row_slot[:used] = slots[folded].data_ptr() + place * (2 * n)
            grouped_gemm.rows(*arguments(p, "threads", folded), row_slot)
            middle = torch.full((rows, n // 2), 0xFF, dtype=torch.uint8, device="cuda")
            scales = torch.full((n // 256, rows), 2.0, device="cuda")
            grouped_gemm.swiglu(*arguments(p, "gate_up", folded), weight, middle, scales, 1.5)
            made.append((middle, scales))
        assert torch.equal(slots[0].view(torch.int16), slots[1].view(torch.int16))
        assert torch.equal(slots[0][place].view(torch.int16), outs[0][:used].view(torch.int16))
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("name", ["interleaved", "alternating", "expert_wave", "linear1_first"])
@pytest.mark.parametrize(("k", "n"), [(512, 1024), (1024, 512), (1536, 1536)])
@pytest.mark.parametrize("form", ["wide", "split", "narrow", "swapped"])
def test_mxfp4_both_layers_in_one_kernel(k: int, n: int, name: str, form: str) -> None:
    both_layers(k, n, name, form)


def test_spans_change_no_bit_and_are_complete() -> None:
    """Of both layers in one kernel: every tile once per warpgroup, its times in order, and no Linear-2 tile before what it needs."""
    import numpy as np

    from xstage.errors import XStageError
    from xstage.moe import grouped_gemm
    from xstage.moe import work_table as wt
    from xstage.moe.spans import Spans, decode, summary

    k, n, loads = 1024, 1024, [3, 0, 5, 1, 2, 4] * 5
    p, q = problem(loads, k, n), problem(loads, n // 2, k, seed=100)
    one, two = arguments(p, "gate_up"), arguments(q, "threads")
    rows, tiles = p["a"].shape[0], sum(loads)
    order = wt.WorkOrder.of("interleaved", n // 256, k // 256, lead_rows=None, instances=66)
    work, totals = work_list(loads, order)
    control, status = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    call = torch.tensor([0, 0, 10**9, status.data_ptr()], dtype=torch.int64, device="cuda")
    weight, ctas = torch.rand(rows, device="cuda"), grouped_gemm.ctas_of(0)

    def run(spans: Spans | None) -> list[torch.Tensor]:
        out = torch.full((rows, k), torch.nan, dtype=torch.bfloat16, device="cuda")
        slots = out.data_ptr() + torch.arange(rows, device="cuda") * (2 * k)
        middle = torch.full((rows, n // 2), 0xFF, dtype=torch.uint8, device="cuda")
        scales = torch.full((n // 256, rows), 2.0, device="cuda")
        ready = torch.zeros(1 + rows // 128, dtype=torch.int32, device="cuda")
        given = (*one[:4], *two[2:4], work, totals, weight, middle, scales, slots, (ready, control, call))
        grouped_gemm.both(*given, spans=spans)
        torch.cuda.synchronize()
        assert status.item() == 0
        return [out.view(torch.int16), middle, scales]

    wanted, spans = run(None), Spans(ctas, 64, "cuda:0")
    for _ in range(3):
        spans.clear()
        assert all(torch.equal(a, b) for a, b in zip(run(spans), wanted, strict=True))
        r = decode(spans.to_numpy())
        assert r.dropped == 0
        t = r.tiles
        for layer, columns in ((1, n // 256), (2, k // 256)):
            for group in (0, 1):
                here = (t["layer"] == layer) & (t["group"] == group)
                assert sorted(zip(t["m"][here], t["n"][here], strict=True)) == [(m, c) for m in range(tiles) for c in range(columns)]
        names = ("start", "half_start", "half_end", "main_end", "end")
        assert (np.diff([t[name] for name in names], axis=0) >= 0).all()
        assert len(r.loads["start"]) == tiles * (n + k) // 256
        assert (r.loads["end"] >= r.loads["start"]).all()
        # No earlier than Linear-1's tiles of the same rows ended, but for steps of the clock.
        second = t["layer"] == 2
        done = {m: t["end"][(t["layer"] == 1) & (t["m"] == m)].max() for m in range(tiles)}
        assert all(start >= done[m] - 64 for m, start in zip(t["m"][second], t["start"][second], strict=True))
        assert 0 < summary(r)["busy"] < 1
    with pytest.raises(XStageError, match=f"spans: for {ctas - 2} CTAs"):
        run(Spans(ctas - 2, 64, "cuda:0"))
    few = Spans(ctas, 1, "cuda:0")
    assert all(torch.equal(a, b) for a, b in zip(run(few), wanted, strict=True))
    kept, everything = decode(few.to_numpy()), tiles * (n + k) // 256
    assert kept.dropped > 0
    assert kept.dropped + len(kept.tiles["m"]) + len(kept.loads["m"]) == 3 * everything


def test_not_finite_stays_visible_and_alone() -> None:
    from xstage.moe import grouped_gemm, quantize

    p = problem([1], 512, 512)
    arguments_ = arguments(p, "gate_up")
    weight = torch.ones(256, device="cuda")
    weight[3], weight[5], weight[7] = torch.inf, torch.nan, 0.0
    middle = torch.zeros(256, 256, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(2, 256, device="cuda")
    grouped_gemm.swiglu(*arguments_, weight, middle, scales)
    value = quantize.dequantize_activations(middle.view(torch.float8_e4m3fn), scales.T.contiguous())[:128]
    assert not value[3].isfinite().any()
    assert value[5].isnan().all()
    assert (value[7] == 0).all()
    assert value[[i for i in range(128) if i not in (3, 5)]].isfinite().all()


def test_no_work() -> None:
    from xstage.moe import grouped_gemm

    p = problem([1], 512, 512)
    p["totals"].zero_()
    out = torch.full((256, 512), 3.0, dtype=torch.bfloat16, device="cuda")
    grouped_gemm.plain(*arguments(p), out)
    torch.cuda.synchronize()
    assert (out == 3.0).all()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-p", "no:cacheprovider", "-x"]))
