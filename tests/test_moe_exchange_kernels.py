"""What moves rows of a MoE layer, as far as it can be told without a GPU: kernels compile for sm_90a and hold what was designed, layouts
that they cannot take are refused, sizes are known before anything is allocated.

Not covered: that rows arrive (test_moe_exchange_emulated.py, tests/gpu/test_moe_exchange.py).
"""

import re
from dataclasses import replace
from functools import cache

import machine_code
import pytest
from machine_code import needs_compiler

from xstage.errors import XStageError
from xstage.moe.exchange import check_layout, scratch_bytes, scratch_shapes
from xstage.moe.layout import BufferLayout
from xstage.moe.work_table import WorkOrder

QWEN35 = BufferLayout(2, 512, 4096, 10, 8192)
QWEN3_30B = BufferLayout(2, 128, 2048, 8, 8192)
ODD = BufferLayout(3, 12, 1536, 3, 100)
KERNELS = [
    *(f"{name}-{layout}" for name in ("count", "plan", "dispatch", "quantized", "arrange", "reduce") for layout in ("qwen35", "odd")),
    "dispatch-qwen3", "narrow-odd", "list-qwen35", "list-odd", "told-odd", "quantizing-qwen35", "quantizing-odd",
]  # fmt: skip


@cache
def code(name: str) -> dict[str, str]:
    from xstage.moe import exchange_sm90, plan_sm90

    kind, which = name.split("-")
    layout = {"qwen35": QWEN35, "qwen3": QWEN3_30B, "odd": ODD}[which]
    kernel = {
        "count": lambda: plan_sm90.compiled_count(layout.experts, layout.top_k, True),
        "narrow": lambda: plan_sm90.compiled_count(layout.experts, layout.top_k, False),
        "plan": lambda: plan_sm90.compiled_plan(layout.ranks, layout.experts, (0, 4 * layout.experts), 8, 16),
        "dispatch": lambda: exchange_sm90.compiled_dispatch(layout, True, False),
        "quantized": lambda: exchange_sm90.compiled_dispatch(layout, True, True),
        "quantizing": lambda: plan_sm90.compiled_plan(
            layout.ranks,
            layout.experts,
            (0, 4 * layout.experts),
            8,
            16,
            WorkOrder.of("interleaved", 8, 16, lead_rows=None, instances=66),
            layout.hidden,
        ),
        "list": lambda: exchange_sm90.compiled_list(replace(layout, direct=True), True),
        "told": lambda: exchange_sm90.compiled_list(replace(layout, direct=True, once=True), True),
        "arrange": lambda: exchange_sm90.compiled_arrange(layout),
        "reduce": lambda: exchange_sm90.compiled_reduce(layout, True),
    }[kind]()
    return machine_code.of(kernel)


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_everything_stays_in_registers(name: str) -> None:
    assert ".target sm_90a" in code(name)["ptx"]
    assert not re.search(r"\.local|ld\.global\.nc", code(name)["ptx"])
    assert not re.search(r"\b(LDL|STL)\b", code(name)["sass"])


@needs_compiler
@pytest.mark.parametrize("name", [name for name in KERNELS if not name.startswith(("plan", "quantizing"))])
def test_only_the_meetings_order_memory(name: str) -> None:
    # A release would wait for remote stores that are under way.
    assert not re.search(r"\.release\.|\.acquire\.|\.sys\b|\b(fence|membar|atom|red)\.", code(name)["ptx"])


@needs_compiler
@pytest.mark.parametrize("name", ["list-qwen35", "reduce-qwen35", "plan-qwen35", "quantizing-qwen35"])
def test_what_is_launched_ahead_first_waits_for_the_kernel_before(name: str) -> None:
    ptx = code(name)["ptx"]
    assert ptx.count("griddepcontrol.wait") == 1
    if name.startswith(("list", "reduce")):
        assert not re.search(r"(ld|st)\.global", ptx[: ptx.index("griddepcontrol.wait")])
        assert "launch_dependents" not in ptx
    else:
        # The CTA that plans lets the list begin when all peers have come; the others wait for nobody.
        assert ptx.count("griddepcontrol.launch_dependents") == 2
        planning = ptx[ptx.index("griddepcontrol.wait") :]
        assert "ld.acquire.sys" not in planning[planning.index("griddepcontrol.launch_dependents") :]


@needs_compiler
def test_a_meeting_lets_the_next_kernel_begin_when_all_have_come() -> None:
    from xstage.device.meeting import compiled_meeting

    ptx = machine_code.of(compiled_meeting(2, 2, True, True))["ptx"]
    wait, acquire, last = (ptx.rindex(word) for word in ("griddepcontrol.wait", "ld.acquire.sys", "griddepcontrol.launch_dependents"))
    assert wait < ptx.index("st.release.sys") < acquire < last
    assert "bar.warp.sync" in ptx[acquire:last]


@needs_compiler
@pytest.mark.parametrize("name", ["plan-qwen35", "plan-odd"])
def test_the_plan_stores_counts_then_releases_then_acquires(name: str) -> None:
    ptx = code(name)["ptx"]
    counts, release, acquire = (ptx.index(word) for word in ("st.global.b32", "st.release.sys.global.b64", "ld.acquire.sys.global.b64"))
    assert counts < release < acquire
    assert ptx.count("st.release.sys.global.b64") == 1
    # All threads' stores are before the barrier that comes before the release; what peers stored is read after one behind the wait.
    assert "bar.sync" in ptx[counts:release]
    assert "bar.sync" in ptx[ptx.rindex("ld.acquire.sys.global.b64") :]


@needs_compiler
@pytest.mark.parametrize(("layout", "which"), [(QWEN35, "qwen35"), (QWEN3_30B, "qwen3"), (ODD, "odd")])
def test_a_row_is_read_once_and_stored_by_16_bytes_to_every_pick(layout: BufferLayout, which: str) -> None:
    ptx = code(f"dispatch-{which}")["ptx"]
    scales = -(-layout.top_k * layout.hidden // 512 // 32)
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 1 + layout.top_k + scales  # source, row, scales
    assert not re.search(r"st\.global\.(?!v4)", ptx)
    assert len(re.findall(r"ld\.global\.L1::no_allocate\.v4", ptx)) == 2
    # Numbers that are not finite or are tiny by divisions, others by the reciprocal of the scale.
    assert (ptx.count("div.rn.f32"), ptx.count("rcp.rn.f32"), ptx.count("fma.rn.f32")) == (16, 1, 16 * 4)
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 8 + 8


@needs_compiler
@pytest.mark.parametrize("which", ["qwen35", "odd"])
def test_rows_are_quantised_beside_the_plan_by_16_bytes(which: str) -> None:
    ptx = code(f"quantizing-{which}")["ptx"]
    rows = ptx[ptx.index("ld.global.L1::no_allocate.v4") :]
    together = 2 if which == "qwen35" else 1
    assert len(re.findall(r"ld\.global\.L1::no_allocate\.v4", ptx)) == 2 * together
    assert rows.count("cvt.rn.satfinite.e4m3x2.f32") == ptx.count("cvt.rn.satfinite.e4m3x2.f32") == (8 + 8) * together
    assert "cvt.rn.satfinite" not in code(f"plan-{which}")["ptx"]


@needs_compiler
def test_pairs_are_only_listed() -> None:
    ptx = code("list-odd")["ptx"]
    assert len(re.findall(r"\bst\.", ptx)) == 1
    assert ".v4" not in ptx


@needs_compiler
def test_an_experts_rank_is_told_a_row_in_one_store() -> None:
    ptx = code("told-odd")["ptx"]
    assert sorted(re.findall(r"\bst\.global\S*", ptx)) == ["st.global.b32", "st.global.v4.b32"]


@needs_compiler
def test_what_orders_rows_that_go_once() -> None:
    from send_kernel import compiled_send

    ptx = machine_code.of(compiled_send(replace(ODD, direct=True, once=True)))["ptx"]
    # Of a post: all copies are over, the warp has met, each row's call is released.
    post = ptx[: ptx.index("st.release.sys.global.b32")]
    assert re.search(r"wait_group 0.*bar\.warp\.sync", post[post.rindex("cp.async.bulk.global") :], re.DOTALL)
    # Of a place: the calls of its rows are acquired, the warp meets, and the copy engine is made to see what they show.
    place = ptx[ptx.index("ld.acquire.sys.global.b32") :]
    assert re.search(r"vote\.sync\.all.*bar\.warp\.sync.*fence\.proxy\.async.*cp\.async\.bulk\.shared", place, re.DOTALL)
    counted = place[place.index("cp.async.bulk.global") : place.index("red.release.sys")]
    assert re.search(r"wait_group 0.*bar\.warp\.sync", counted, re.DOTALL)


@needs_compiler
def test_a_warp_meets_before_it_counts_the_rows_that_it_sent() -> None:
    from send_kernel import compiled_send

    ptx = machine_code.of(compiled_send(replace(ODD, direct=True)))["ptx"]
    # The interpreter cannot see this: without it the count of one lane would not come after the stores of the others.
    last = ptx[ptx.rindex("cp.async.bulk.global") : ptx.index("red.release.sys")]
    assert re.search(r"wait_group 0.*bar\.warp\.sync", last, re.DOTALL)
    assert ptx.count("red.release.sys.global.add.u32") == 2


@needs_compiler
@pytest.mark.parametrize(("layout", "which"), [(QWEN35, "qwen35"), (ODD, "odd")])
def test_the_sum_of_a_token_has_a_load_per_pick_and_one_store(layout: BufferLayout, which: str) -> None:
    ptx, sass = code(f"reduce-{which}")["ptx"], code(f"reduce-{which}")["sass"]
    assert len(re.findall(r"ld\.global\.L1::no_allocate\.v4", ptx)) == layout.top_k
    assert ptx.count("add.f32") == 8 * layout.top_k
    assert len(re.findall(r"STG\.E\.128", sass)) == 1
    first_sum = sass.index("FADD")
    assert len(re.findall(r"LDG\.E\.NA\.128", sass[:first_sum])) >= min(layout.top_k, 4)


@pytest.mark.parametrize(
    ("changes", "intermediate", "message"),
    [
        ({"precision": "bf16"}, 256, "precision: 'bf16'"), ({"tile": 64}, 256, "tile: 64"), ({"hidden": 640}, 256, "hidden: 640"),
        ({}, 128, "intermediate: 128"), ({}, 0, "intermediate: 0"), ({"experts": 2048}, 256, "experts: 2048"),
        ({"top_k": 33, "experts": 64}, 256, "top_k: 33"), ({"ranks": 64, "experts": 64}, 256, "ranks: 64"),
        ({"max_tokens_per_rank": 1 << 26}, 256, "max_tokens_per_rank: "), ({"hidden": 512 * 1024}, 256, "hidden: 2048 column tiles"),
    ],
)  # fmt: skip
def test_layouts_that_the_kernels_cannot_take(changes: dict[str, object], intermediate: int, message: str) -> None:
    sizes = {"ranks": 2, "experts": 8, "hidden": 512, "top_k": 2, "max_tokens_per_rank": 64}
    check_layout(BufferLayout(**sizes), 256)
    with pytest.raises(XStageError, match=message):
        check_layout(BufferLayout(**{**sizes, **changes}), intermediate)  # type: ignore[arg-type]


def test_scratch_by_hand() -> None:
    check_layout(QWEN3_30B, 768)
    shapes = scratch_shapes(QWEN3_30B, 768)
    tiles = 1087
    assert shapes["work1"] == ("int32", (tiles * 6,))
    assert shapes["work2"] == ("int32", (tiles * 8,))
    assert shapes["scales"] == ("float32", (16, tiles * 128))
    both = scratch_shapes(QWEN3_30B, 768, fused=True)
    assert (both["work"], both["ready"]) == (("int32", (2 * tiles * 14,)), ("int32", (1 + tiles,)))
    assert "work1" not in both
    assert scratch_bytes(QWEN3_30B, 768) == 4 * (
        64 * 128 + 8192 * 8 + 128 + 2 * tiles + 64 + 4 + tiles * 14 + 16 * tiles * 128 + tiles * 128 + 2 * tiles * 128 + 4
    )
