"""The interpreter of PTX that other tests lean on: conversions against torch, kernels by hand, what it refuses."""

import ptx_interpreter
import pytest
import torch
from emulated_memory import POISON, AccessError, Memory
from ptx_interpreter import Grid, PtxError, run, translate

KERNEL = """
.visible .entry by_hand(
	.param .u64 by_hand_param_0,
	.param .align 8 .b8 by_hand_param_1[16]
)
.reqntid 64, 1, 1
{
	.reg .b32 %r<9>;
	ld.param.b64 %rd1, [by_hand_param_0];
	ld.param.b64 %rd2, [by_hand_param_1];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 4;
BODY
	ret;
}
"""
# Thread t reads what thread 63 − t wrote to shared memory.
REVERSED = """	shl.b32 %r2, %r1, 2;
	st.shared.b32 [%r2], %r1;
	BARRIER
	sub.s32 %r3, 252, %r2;
	ld.shared.b32 %r4, [%r3];
	add.s64 %rd4, %rd1, %rd3;
	st.global.b32 [%rd4], %r4;"""

LOOP = "mov.b32 %r2, 9; $L: setp.gt.u32 %p1, %r2, %r1; @%p1 bra $M; add.s32 %r2, %r2, 9; bra.uni $L; $M:"


def launch(body: str, memory: Memory, *addresses: int, seed: int = 0) -> None:
    run([[Grid(translate(KERNEL.replace("BODY", body)), 1, addresses, memory, seed=seed)]])


def test_conversions_are_those_of_torch() -> None:
    around = torch.arange(1 << 16, dtype=torch.int64)[:, None] * (1 << 16) + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001])
    values = torch.where(around >= 1 << 31, around - (1 << 32), around).flatten().int().view(torch.float32)
    values = values[~values.isnan()]
    bits = [value & 0xFFFFFFFF for value in values.view(torch.int32).tolist()]
    assert [ptx_interpreter._bf16(b) for b in bits] == [v & 0xFFFF for v in values.bfloat16().view(torch.int16).tolist()]
    saturated = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert [ptx_interpreter._e4m3(b) for b in bits] == saturated.tolist()


def test_quotients_rounded_up() -> None:
    for a in torch.rand(1000, generator=torch.Generator().manual_seed(0)).tolist():
        bits = ptx_interpreter._bits(a)  # type: ignore[arg-type]
        up = float(ptx_interpreter._float(ptx_interpreter._divide_up(bits, 0x43E00000)))
        below = float(torch.tensor(up).nextafter(torch.tensor(0.0)))
        assert below * 448 < float(ptx_interpreter._float(bits)) <= up * 448


def test_threads_meet_at_a_barrier_and_only_there() -> None:
    memory = Memory(4096)
    out = memory.allocate(256)
    launch(REVERSED.replace("BARRIER", "bar.sync 0;"), memory, out, 0)
    assert memory.get(out, (64,), torch.int32).tolist() == list(range(63, -1, -1))
    launch(REVERSED.replace("BARRIER", ""), memory, out, 0)
    assert int.from_bytes([POISON] * 4, "little", signed=True) in memory.get(out, (64,), torch.int32).tolist()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("shfl.sync.up.b32 %r2, %r1, 4, 0, -1;", [t - 4 if t % 32 >= 4 else t for t in range(64)]),
        ("shfl.sync.bfly.b32 %r2, %r1, 2, 31, -1;", [t ^ 2 for t in range(64)]),
        ("shfl.sync.idx.b32 %r2, %r1, 5, 31, -1;", [t // 32 * 32 + 5 for t in range(64)]),
        ("and.b32 %r3, %r1, 15; match.any.sync.b32 %r2, %r3, -1;", [0x10001 << t % 16 for t in range(64)]),
        ("sub.s32 %r2, %r1, 7; shr.s32 %r2, %r2, 1;", [(t - 7 >> 1) % (1 << 32) for t in range(64)]),
        ("sub.s32 %r3, %r1, 7; setp.lt.s32 %p1, %r3, -2; selp.b32 %r2, 1, 0, %p1;", [int(t < 5) for t in range(64)]),
        ("sub.s32 %r3, %r1, 7; mul.hi.s32 %r2, %r3, 1431655766;", [((t - 7) * 1431655766 >> 32) % (1 << 32) for t in range(64)]),
        ("prmt.b32 %r2, 0x83020100, %r1, 0xFB43;", [0xFF0083 | t << 8 for t in range(64)]),
        ("sub.s32 %r3, %r1, 7; min.relu.s32 %r2, %r3, 5;", [max(min(t - 7, 5), 0) for t in range(64)]),
        ("mov.b32 %r3, -2147483648; shf.l.wrap.b32 %r2, %r3, %r1, 1;", [2 * t + 1 for t in range(64)]),
        (LOOP, [t // 9 * 9 + 9 for t in range(64)]),
    ],
)  # fmt: skip
def test_by_hand(body: str, expected: list[int]) -> None:
    memory = Memory(4096)
    out = memory.allocate(256)
    launch(body + " add.s64 %rd4, %rd1, %rd3; st.global.b32 [%rd4], %r2;", memory, out, 0)
    assert [value % (1 << 32) for value in memory.get(out, (64,), torch.int32).tolist()] == expected


@pytest.mark.parametrize(
    "body",
    [
        "sin.approx.f32 %r2, %r1;", "sub.f32 %r2, %r1, %r1;", "setp.lt.f32 %p1, %r1, %r1;", "bar.sync 1;", "bar.warp.sync 15;",
        "shfl.sync.up.b32 %r2, %r1, 1, 7168, -1;", "ld.param.b32 %r2, [by_hand_param_1+8];", "atom.global.add.u32 %r2, [%rd1], 1;",
    ],
)  # fmt: skip
def test_what_is_not_covered_is_refused(body: str) -> None:
    with pytest.raises(PtxError, match="not covered"):
        translate(KERNEL.replace("BODY", body))


def test_accesses_that_no_kernel_may_make() -> None:
    memory = Memory(4096)
    out, other = memory.allocate(252), memory.allocate(252)
    assert other >= out + 256
    with pytest.raises(AccessError, match="4 bytes"):
        launch("add.s64 %rd4, %rd1, %rd3; st.global.b32 [%rd4], %r1;", memory, out, 0)
    with pytest.raises(AccessError, match="16 bytes"):
        launch("st.global.v4.b32 [%rd1+8], {%r1, %r1, %r1, %r1};", memory, out, 0)


def test_threads_that_wait_for_ever() -> None:
    with pytest.raises(PtxError, match="wait for ever"):
        launch("setp.eq.b32 %p1, %r1, 5; @%p1 bra $E; bar.sync 0;\n$E:", Memory(4096), 0, 0)
    with pytest.raises(PtxError, match="wait for ever"):
        launch("setp.eq.b32 %p1, %r1, 5; @%p1 bra $E; bar.warp.sync -1;\n$E:", Memory(4096), 0, 0)
