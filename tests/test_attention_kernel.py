"""The attention kernels compile for sm_90a without a GPU; their PTX and machine code hold what the design promises.

Asserted: 16-byte stores in the epilogue, wgmma and mainloop as in flash-attn-4, no local memory (nothing spilled), scopes and order
of the signals. Not covered: that they compute anything (tests/gpu).
"""

import json
import os
import re
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from machine_code import needs

pytestmark = needs("cutlass", "flash_attn", "quack", "triton")

# dtype, head dim, queries per key/value head, causal, log-sum-exp, then how a CTA knows its tile: runs (0: from the table), the first
MAIN = [f"fused,bfloat16,128,1,0,0,{start}" for start in ("2,1", "1,0", "0,0")]
CONFIGURATIONS = [
    *MAIN, *(f"fused,{name}" for name in ("bfloat16,128,1,0,0,8,3", "bfloat16,128,4,1,1,0,0", "float16,64,1,0,1,1,0",
                                          "bfloat16,96,1,1,0,0,0", "float16,256,2,0,1,2,0")),
]  # fmt: skip
MEETINGS = ["meeting,2,0,0", "meeting,2,1,0", "meeting,8,1,0", "meeting,2,1,1"]
STOCK = "stock,bfloat16,128,1,0"


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    dump = tmp_path_factory.mktemp("dump")
    environment = {
        **os.environ, "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_ARCH": "sm_90", "FLASH_ATTENTION_NUM_SMS": "132",
        "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": str(dump), "CUTE_DSL_NO_CACHE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    script = Path(__file__).with_name("attention_machine_code.py")
    run = subprocess.run(
        [sys.executable, str(script), *CONFIGURATIONS, *MEETINGS, STOCK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_stores_and_matrix_instructions(code: dict[str, dict[str, str]], name: str) -> None:
    ptx = code[name]["ptx"]
    head_dim = int(name.split(",")[2])
    rows, threads = (192, 384) if head_dim in (64, 96) else (128, 256)
    # Every thread stores its share of the tile in pieces of 16 bytes, and stores nothing else of the output.
    assert len(re.findall(r"st\.global\.v4", ptx)) == rows * head_dim * 2 // 16 // threads
    assert "wgmma.mma_async" in ptx
    assert "ld.local" not in ptx
    assert "st.local" not in ptx
    lse_stores = len(re.findall(r"st\.global\.(b32|f32)", ptx))
    assert (lse_stores > 0) == (name.split(",")[5] == "1")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_attention_itself_signals_nothing(code: dict[str, dict[str, str]], name: str) -> None:
    # A release would make a CTA wait for its own stores, a wait would cost the compiler its schedule of the mainloop.
    assert not re.search(r"(?:st|red|atom)\.(?:release|acq_rel)|fence\.(?:acq_rel|sc)|ld\.acquire|\.sys", code[name]["ptx"])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_tile_is_staged_between_two_barriers(code: dict[str, dict[str, str]], name: str) -> None:
    ptx = code[name]["ptx"]
    first_store = ptx.index("st.global.v4")
    staged = [m.start() for m in re.finditer(r"stmatrix", ptx) if m.start() < first_store][-1]
    read = min(m.start() for m in re.finditer(r"ld\.shared\.v4", ptx) if m.start() > staged)
    assert re.search(r"bar\.sync|barrier\.sync", ptx[staged:read])
    assert read < first_store


def test_a_tile_that_is_computed_needs_no_table(code: dict[str, dict[str, str]]) -> None:
    """A warp that nobody waits for loads one address per lane and 32 rows, and whether a meeting gave up; nobody loads anything else."""
    loads = [len(re.findall(r"\bld\.(?:\w+\.)*global", code[name]["ptx"])) for name in MAIN]
    assert loads[:2] == [128 // 32 + 1] * 2
    assert loads[2] > loads[0]


@pytest.mark.parametrize("name", MEETINGS)
def test_a_meeting_releases_then_acquires(code: dict[str, dict[str, str]], name: str) -> None:
    ptx = code[name]["ptx"]
    assert ptx.count("st.release.sys.global.b64") == 1
    assert ptx.index("ld.acquire.sys.global.b64") > ptx.index("st.release.sys.global.b64")
    # Launched ahead, it first waits for the kernel before it, whose stores it then vouches for.
    if name.endswith(",1"):
        assert -1 < ptx.find("griddepcontrol.wait") < ptx.index("st.release.sys.global.b64")
        assert not re.search(r"\b(?:ld|st)\.", ptx[ptx.index("{") : ptx.index("griddepcontrol.wait")].replace("ld.param", ""))
    else:
        assert "griddepcontrol" not in ptx
    assert "ld.local" not in ptx


def test_machine_code_spills_nothing(code: dict[str, dict[str, str]]) -> None:
    for name, kernel in code.items():
        for instruction in ("LDL", "STL"):
            assert not re.search(rf"\b{instruction}\b", kernel["sass"]), f"{name} uses local memory"
    for name in MAIN:
        sass = code[name]["sass"]
        assert len(re.findall(r"STG\.E\.128", sass)) == 8
        assert sass.count("HGMMA") == code[STOCK]["sass"].count("HGMMA") > 0
        assert "MEMBAR.ALL.GPU" not in sass
        assert "MEMBAR.ALL.SYS" not in sass


def test_the_mainloop_is_the_stock_one(code: dict[str, dict[str, str]]) -> None:
    stock = _mainloop(code[STOCK]["sass"])
    for name in MAIN:
        mine = _mainloop(code[name]["sass"])
        assert len(mine) == len(stock)
        # Scheduled like the stock one, too: but for one register copy that stands 14 places elsewhere.
        blocks = SequenceMatcher(None, stock, mine, autojunk=False).get_matching_blocks()
        assert sum(block.size for block in blocks) >= len(stock) - 1


def test_nothing_holds_up_the_stores(code: dict[str, dict[str, str]]) -> None:
    """After the last product nothing is loaded from global memory."""
    for name in CONFIGURATIONS:
        instructions = _instructions(code[name]["sass"])
        last = max(i for i, text in enumerate(instructions) if "HGMMA" in text)
        assert not [text for text in instructions[last:] if "LDG" in text], name


def _instructions(sass: str) -> list[str]:
    return [match.group(1) for line in sass.splitlines() if (match := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.+?)\s*;", line))]


def _mainloop(sass: str) -> list[str]:
    """Operations of the shortest loop that holds both products of a key block, without registers; names of one operation made equal."""
    labels: dict[str, int] = {}
    operations: list[str] = []
    best: list[str] = []
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label.group(1)] = len(operations)
        instruction = re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\S+)", line)
        if not instruction:
            continue
        operation = instruction.group(1)
        operations.append({"VIADD": "IADD3", "IMAD.IADD": "IADD3", "IMAD.MOV.U32": "MOV"}.get(operation, operation.split(".")[0]))
        target = re.search(r"BRA.*?(\.L_x_\d+)", line)
        if target and target.group(1) in labels:
            loop = operations[labels[target.group(1)] :]
            if loop.count("HGMMA") >= 16 and (not best or len(loop) < len(best)):
                best = loop
    return best


def test_warps_keep_to_their_register_budget(code: dict[str, dict[str, str]]) -> None:
    """The warp that looks up addresses lives in the producers' 24 or 32 registers, the stores in the math warps' share."""
    for name, kernel in code.items():
        if name.startswith("meeting"):
            continue
        parts = re.split(r"USETMAXREG\.\w+(?:\.CTAPOOL)?\s+(?:UP\d+, )?(0x[0-9a-f]+)", kernel["sass"])
        assert len(parts) == 5, name
        for limit, part in ((parts[1], parts[2]), (parts[3], parts[4])):
            assert max(int(r) for r in re.findall(r"\bR(\d+)\b", part)) < int(limit, 16), name
