"""What the exchange costs when it rides on FlashAttention (paper, sections 4.3 and 5.3, Table 3 and Figure 11), measured here.

Each row is a shape: heads per rank H, whole sequence M, head dim, batch 1, full attention, bf16. `rows` is the grid of H and M with head
dim 128; `dit` is what diffusion transformers ask for, their heads split over the ranks (`DIT`). Variants of a group run interleaved
(`bench.timing`), and only variants of one group are compared: attention at the power limit remembers what ran before it. The
groups, their questions, and the columns that answer them:

* `residual`. E_res, the sender-visible residual: `stores` (the attention kernel alone, rows at their owners) over `local` (the same
  kernel, every row stored into the rank's own memory) and over `fa4` (the unmodified kernel). Readiness: `fused` (the call ends when
  its output is complete) over `stores`.
* `baseline`. `fused` against the paper's serial baseline (`nccl`: eager, with permutations), the same in a graph (`nccl_graph`), and the
  push in a graph, after FA4 by torch's copies (`push_graph`) and by the copy engines (`push_engines_graph`), and after other attention
  kernels that this machine has (`push_cudnn`, `push_fa3`). Not serial, and so not one of the baselines: FA4 untouched, whose output
  argument lies in the peers' buffers, one launch per destination (`with_kernel`, how the paper fuses FA3).
* `forms`. A CTA computes its tile, the default (`local`, `stores`, `fused`), or reads it from a table at its start (`…_table`).
  Of calls shorter than `op.OWN_FIRST_NS`: longer ones read a table by default, in another order.
* `order`. What the order and the share of remote destinations do to the residual (`stores_table`, which alternates, `plain`, `own_last`,
  `own_first`, `remote`; all read the tile table, which some orders need), and what a meeting before the call costs, which the first call of
  a graph makes (`met`).
* `traffic`. What the same bytes cost that no warp stores: `local` with the copy engines sending a peer's part of an output meanwhile
  (`local_sent`), or moving as much within this GPU's memory (`local_copied`), beside `stores`. If E_res is power or memory, these cost as
  much; if it is what stores do to their SMs, they cost nothing. What is moved is another tensor's rows, all at the kernel's begin; the
  driver decides what moves them (within one GPU that may be a kernel of its own).
* `dit`. Residual, readiness and all serial baselines in one group, for shapes whose calls are long.

Every run has its mean SM clock (`interleaved` with `cycles`), so each residual (`PAIRED`) also comes apart into what a lower clock explains
and what more cycles do: `…_clock_ns` and `…_cycles_ns` of `…_paired_ns`, with `…_cycles`, `…_mhz` and, of `local`, `…_local_mhz`. These are
medians over rounds of differences within a round, on the rank that is slowest with the slower variant (`timing.apart`); `residual_ns` and
its like are differences of the slowest ranks' medians, as before, and so not quite their sum.

A row takes `ROW_S` at most, over the variants of all its groups, where that can be had by fewer rounds, never less than `LEAST_ROUNDS`.

The prediction of E_res comes from the tile table and a platform file alone (`simulate.attention.predict_residual`), with nothing refitted.

Not covered: causal attention, more than one host, back-to-back replays.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from xstage.attention import serial
from xstage.attention.layout import SequenceLayout
from xstage.attention.op import AttentionA2A, Variant, default_order
from xstage.bench import timing
from xstage.errors import XStageError
from xstage.platform import Platform, load_platform
from xstage.simulate.attention import predict_residual

HEADS, SEQUENCES, HEAD_DIM = (4, 12), (4096, 8192, 16384, 32768), 128
ROW_S, LEAST_ROUNDS = 7.0, 5
_FLOP_PER_NS = 7e5  # FA4 on an H200, for planning only


@dataclass(frozen=True)
class Shape:
    """A row: heads per rank, whole sequence."""

    name: str
    heads: int
    sequence: int
    head_dim: int = HEAD_DIM

    @property
    def flop(self) -> float:
        """Per rank and call."""
        return 4.0 * self.sequence**2 * self.head_dim * self.heads


# Name, heads over all ranks, sequence (text and image or video tokens), head dim.
DIT = (
    ("FLUX.1 1024²", 24, 4608, 128), ("FLUX.1 2048²", 24, 16896, 128), ("Qwen-Image 1328²", 24, 7145, 128),
    ("CogVideoX-5B", 48, 17776, 64), ("LTX-2", 32, 30240, 128), ("Wan 1.3B 480p", 12, 32760, 128), ("Wan 14B 480p", 40, 32760, 128),
    ("Wan 14B 720p", 40, 75600, 128), ("HunyuanVideo 720p", 24, 119056, 128),
)  # fmt: skip

FUSED = {
    "local": Variant(stores="local", finish="none"),
    "stores": Variant(finish="none"),
    "fused": Variant(),
    "local_table": Variant(order="alternating", stores="local", finish="none", start="table"),
    "stores_table": Variant(order="alternating", finish="none", start="table"),
    "fused_table": Variant(order="alternating", start="table"),
    "plain": Variant(order="plain", finish="none", start="table"),
    "own_last": Variant(order="own_last", finish="none", start="table"),
    "own_first": Variant(order="own_first", finish="none", start="table"),
    "remote": Variant(order="alternating", stores="remote", finish="none", start="table"),
    "met": Variant(entry="always"),
}
SERIAL = ("nccl", "nccl_graph", "push_graph", "push_engines_graph", *(f"push_{name}" for name in serial.OTHERS))
GROUPS = {
    "residual": ("fa4", "local", "stores", "fused"),
    "baseline": ("fa4", "fused", *SERIAL, "with_kernel"),
    "forms": ("fa4", "local", "stores", "fused", "local_table", "stores_table", "fused_table"),
    "dit": ("fa4", "local", "stores", "fused", *SERIAL[1:]),
    "order": ("local_table", "stores_table", "plain", "own_last", "own_first", "remote", "met", "fused"),
    "traffic": ("local", "stores", "local_sent", "local_copied"),
}
FORMS = {"computed": "", "table": "_table"}  # of the group `forms`, and the suffix of their variants
# Differences that come apart into clock and cycles: answers' prefix, group, slower variant; all over `local`.
PAIRED = (
    ("residual", "residual", "stores"), ("residual_beside", "traffic", "stores"), ("sent", "traffic", "local_sent"),
    ("copied", "traffic", "local_copied"),
)  # fmt: skip
DEFAULT_GROUPS = {"rows": ("residual", "baseline"), "dit": ("dit",)}
# Each order, and those that are taken by default without stalls: the drain of the last burst alone.
PREDICTED: dict[str, dict[str, Any]] = {
    **{order: {"order": order} for order in ("alternating", "plain", "own_last", "own_first")},
    "tail": {"order": "alternating", "stalls": False}, "own_first_tail": {"order": "own_first", "stalls": False},
}  # fmt: skip


def derived(times: dict[str, dict[str, timing.Times]]) -> dict[str, float]:
    """The row's answers from the times of its groups, in nanoseconds, cycles, MHz and ratios; only those whose variants were measured."""
    answers: dict[str, float] = {}
    times = {**times, "residual": times.get("residual", times.get("dit", {})), "baseline": times.get("baseline", times.get("dit", {}))}
    for name, group, top, bottom in (
        ("residual_ns", "residual", "stores", "local"), ("residual_over_fa4_ns", "residual", "stores", "fa4"),
        ("readiness_ns", "residual", "fused", "stores"), ("kernel_over_fa4_ns", "residual", "local", "fa4"),
        *((f"residual_{form}_ns", "forms", f"stores{suffix}", f"local{suffix}") for form, suffix in FORMS.items()),
        *((f"kernel_{form}_over_fa4_ns", "forms", f"local{suffix}", "fa4") for form, suffix in FORMS.items()),
        *((f"readiness_{form}_ns", "forms", f"fused{suffix}", f"stores{suffix}") for form, suffix in FORMS.items()),
        ("residual_alternating_ns", "order", "stores_table", "local_table"), ("residual_plain_ns", "order", "plain", "local_table"),
        ("residual_own_last_ns", "order", "own_last", "local_table"), ("residual_remote_ns", "order", "remote", "local_table"),
        ("residual_own_first_ns", "order", "own_first", "local_table"),
        ("meeting_ns", "order", "met", "fused"), ("residual_beside_ns", "traffic", "stores", "local"),
        ("sent_ns", "traffic", "local_sent", "local"), ("copied_ns", "traffic", "local_copied", "local"),
    ):  # fmt: skip
        t = times.get(group, {})
        if top in t and bottom in t:
            answers[name] = round(t[top].slowest_ns - t[bottom].slowest_ns, 1)
    for name, group, top in PAIRED:
        t = times.get(group, {})
        parts = timing.apart(t[top], t["local"]) if top in t and "local" in t else None
        if parts is not None:
            answers |= {
                f"{name}_paired_ns": round(parts.total_ns, 1), f"{name}_clock_ns": round(parts.clock_ns, 1),
                f"{name}_cycles_ns": round(parts.cycles_ns, 1), f"{name}_cycles": round(parts.cycles),
                f"{name}_mhz": round(parts.clock_mhz, 1), f"{name}_local_mhz": round(parts.base_clock_mhz, 1),
            }  # fmt: skip
    if "residual_ns" in answers:
        answers["residual_share"] = round(answers["residual_ns"] / times["residual"]["fa4"].slowest_ns, 6)
    t = times["baseline"]
    if "nccl" in t:
        answers["speedup_paper_baseline"] = round(t["nccl"].slowest_ns / t["fused"].slowest_ns, 4)
    baselines = [t[name].slowest_ns for name in SERIAL if name in t]
    if baselines:
        answers["speedup_strongest"] = round(min(baselines) / t["fused"].slowest_ns, 4)
    return answers


def slug(name: str) -> str:
    """A model's name as keys write it."""
    return re.sub("[^a-z0-9]+", "_", name.lower().replace("²", "")).strip("_")


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Headline figures of a result: the worst row for each question, and the speedups by shape."""
    out: dict[str, dict[str, Any]] = {}
    models = [r for r in rows if r.get("shapes") == "dit"]
    for row in (r for r in models if "speedup_strongest" in r["derived"]):
        out[f"attention.dit.speedup_strongest.{slug(row['name'])}"] = {"value": row["derived"]["speedup_strongest"], "unit": "ratio"}
    rows = [r for r in rows if r not in models]
    short = [r["derived"]["residual_ns"] for r in rows if r["sequence"] <= 16384 and "residual_ns" in r["derived"]]
    long = [r["derived"]["residual_share"] for r in rows if r["sequence"] >= 32768 and "residual_share" in r["derived"]]
    ready = [r["derived"]["readiness_ns"] for r in rows if "readiness_ns" in r["derived"]]
    if short:
        out["attention.residual_us.short.max"] = {"value": round(max(short) / 1e3, 2), "unit": "µs"}
    if long:
        out["attention.residual_share.long.max"] = {"value": max(long), "unit": "fraction"}
    if ready:
        out["attention.readiness_us.max"] = {"value": round(max(ready) / 1e3, 2), "unit": "µs"}
    for row in rows:
        shape = f"H{row['heads']}_M{row['sequence']}"
        if "speedup_strongest" in row["derived"] and row["heads"] == 4:
            out[f"attention.speedup_strongest.{shape}"] = {"value": row["derived"]["speedup_strongest"], "unit": "ratio"}
        if "speedup_paper_baseline" in row["derived"] and shape == "H4_M8192":
            out[f"attention.speedup_paper_baseline.{shape}"] = {"value": row["derived"]["speedup_paper_baseline"], "unit": "ratio"}
    return out


def run(
    out: str, *, shapes: str = "rows", heads: Sequence[int] = HEADS, sequences: Sequence[int] = SEQUENCES, rounds: int = 9,
    budget_s: float = 240.0, pause_s: float = 0.04, platform: str | None = None, groups: Sequence[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure every row and write a result file after each; run by every rank (torchrun). An unfinished file is continued.

    Args:
        out: path of the result file. shapes: `rows` (every pair of `heads` per rank and `sequences`) or `dit`. rounds: at most.
        budget_s: no row is begun after this many seconds.
        platform: gallery name or path, for predictions; None: no predictions.
        groups: which of `GROUPS` to run; None: `DEFAULT_GROUPS` of the shapes.

    Returns:
        The content of the result file.

    Raises:
        UnsuitableMachine: fewer than two ranks, or the fused kernel cannot run here.
        XStageError: unknown group or shapes, heads that the ranks do not divide, a path that cannot be written.
    """
    if shapes not in ("rows", "dit"):
        raise XStageError(f"shapes: {shapes!r} is not 'rows' or 'dit'")
    groups = groups or DEFAULT_GROUPS[shapes]
    for name in groups:
        if name not in GROUPS:
            raise XStageError(f"groups: {name!r} is not one of {', '.join(GROUPS)}")
    known = None if platform is None else load_platform(platform)
    timing.start_group("bench attention")
    rank, world = dist.get_rank(), dist.get_world_size()
    todo = [Shape(f"H{h}_M{m}", h, m) for m in sorted(sequences) for h in heads]
    if shapes == "dit":
        if any(h % world for _, h, *_ in DIT):
            raise XStageError(f"shapes: the heads of 'dit' are not multiples of {world} ranks")
        todo = sorted((Shape(name, h // world, m, d) for name, h, m, d in DIT), key=lambda s: s.flop)
    settings = {
        "shapes": shapes, "dtype": "bfloat16", "batch": 1, "causal": False, "rounds": rounds, "pause_s": pause_s, "world": world,
        "platform": platform, "groups": list(groups),
    }  # fmt: skip
    results = timing.ResultFile(out, "attention", write=rank == 0, settings=settings)
    begun = time.monotonic()
    cut_short = False
    # One rank decides, or ranks would part ways.
    done = set(timing.gather([row["name"] for row in results.content["rows"]])[0])
    for shape in todo:
        if shape.name in done:
            continue
        if timing.gather(time.monotonic() - begun)[0] > budget_s:
            cut_short = True
            continue
        row = {"shapes": shapes, **_row(shape, groups, rounds, pause_s, known)}
        results.content["headline"] = headline([*results.content["rows"], row])
        results.add(row)
        if rank == 0:
            answers = " ".join(f"{k} {v:g}" for k, v in row["derived"].items())
            print(f"{shape.name}: {answers} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    if not cut_short:
        results.finish()
    timing.meet()
    return results.content


def rounds_for(call_ns: float, calls: int, variants: int, rounds: int, pause_s: float) -> int:
    """Rounds that keep a row of that many variants within `ROW_S`."""
    once = variants * (2 * calls * call_ns / 1e9 + pause_s + 0.01)
    return max(min(rounds, LEAST_ROUNDS), min(rounds, int(ROW_S / once)))


def _row(shape: Shape, groups: Sequence[str], rounds: int, pause_s: float, platform: Platform | None) -> dict[str, Any]:
    from xstage.attention.kernel_sm90 import tile_shape

    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device=device).manual_seed(rank)
    size = (1, shape.sequence, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    layout = SequenceLayout.even(shape.sequence, world)
    group = dist.group.WORLD
    assert group is not None
    with AttentionA2A(max_sequence=shape.sequence, heads=shape.heads * world, head_dim=shape.head_dim, fallback="error") as attend:
        counts = attend.heads_per_rank
        exchange = serial.NcclExchange(layout, counts, group, 1, (shape.head_dim,), torch.bfloat16, device, permute=True)
        targets = attend.push_targets(layout)

        def attention() -> torch.Tensor:
            return serial.attention(q, k, v, out=out)[0]

        def pushed(kernel: Callable[[], torch.Tensor], engines: bool = False) -> None:
            serial.push(kernel(), layout, targets, rank, attend.barrier, engines)

        functions: dict[str, Callable[[], Any]] = {"fa4": attention}
        for name, variant in FUSED.items():
            functions[name] = partial(attend, q, k, v, variant=variant)
        side = torch.cuda.Stream()
        own = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in targets]

        def beside(places: Sequence[torch.Tensor]) -> None:
            """The kernel with local stores, while the copy engines bring the other ranks' rows of `out` to `places`.

            Not by `Tensor.copy_`: for strided rows that is a kernel, which takes SMs.
            """
            side.wait_stream(torch.cuda.current_stream())
            for s in layout.segments:
                if s.rank != rank:
                    with torch.cuda.stream(side):
                        to = places[s.rank][0, s.local_start : s.local_start + s.rows]
                        serial.copy_tensor_rows(to, out[0, s.start : s.start + s.rows])
            attend(q, k, v, variant=FUSED["local"])
            torch.cuda.current_stream().wait_stream(side)

        functions["local_sent"], functions["local_copied"] = partial(beside, targets), partial(beside, own)
        functions["nccl"] = functions["nccl_graph"] = lambda: exchange(attention())
        functions["push_graph"] = partial(pushed, attention)
        functions["push_engines_graph"] = partial(pushed, attention, True)
        functions["with_kernel"] = partial(attend.with_kernel(lambda q, k, v, out: serial.attention(q, k, v, out=out)), q, k, v)
        missing = {}
        for name, other in serial.OTHERS.items():
            reason = _why_not(partial(other, q, k, v))
            functions[f"push_{name}"] = partial(pushed, partial(other, q, k, v))
            if reason:
                missing[f"push_{name}"] = reason
        groups_here = {group: [n for n in GROUPS[group] if n not in missing] for group in groups}
        call_ns = shape.flop / _FLOP_PER_NS
        calls = timing.launches_for(call_ns, least=1 if call_ns > 1e7 else 2)
        rounds = rounds_for(call_ns, calls, sum(map(len, groups_here.values())), rounds, pause_s)
        warm_up = 1 if call_ns > 1e7 else 3
        timed: dict[str, Callable[[], Any]] = {}
        for name in dict.fromkeys(name for names in groups_here.values() for name in names):
            for _ in range(warm_up):
                functions[name]()
            timing.meet()
            # Several calls to a graph, as the layers of a model are; eager calls are repeated by hand.
            eager = name == "nccl"
            timed[name] = partial(_repeat, functions[name], calls) if eager else serial.graphed(functions[name], calls, warm_up)
            timing.meet()
        times = {
            group: timing.interleaved({n: timed[n] for n in names}, calls=calls, rounds=rounds, pause_s=pause_s, cycles=True)
            for group, names in groups_here.items()
        }
        attend.check()
        timing.meet()
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        row: dict[str, Any] = {
            "name": shape.name, "heads": shape.heads, "sequence": shape.sequence, "head_dim": shape.head_dim, "derived": derived(times),
            "order": default_order(shape.sequence, shape.heads, shape.head_dim, sms),
            "groups": {group: {name: t.to_json() for name, t in measured.items()} for group, measured in times.items()},
            "tflops": {n: round(shape.flop / t.slowest_ns / 1e3, 1) for n, t in times.get("residual", times.get("dit", {})).items()},
            "missing": missing, "remote_rows": {}, "predicted_residual_ns": {},
        }  # fmt: skip
        tile_rows, _ = tile_shape(shape.head_dim, False)
        if platform is not None:
            for name, options in PREDICTED.items():
                waves, residual_ns = predict_residual(
                    shape.heads, layout, platform=platform, rank=rank, row_bytes=2 * shape.head_dim, tile_rows=tile_rows, sms=sms, **options
                )
                row["remote_rows"][options["order"]], row["predicted_residual_ns"][name] = waves, round(residual_ns, 1)
        del timed
        return row


def _why_not(kernel: Callable[[], torch.Tensor]) -> str:
    """Empty if every rank can run an attention kernel, else a rank's reason."""
    reason = ""
    try:
        kernel()
        torch.cuda.synchronize()
    except (ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return next((reason for reason in timing.gather(reason) if reason), "")


def _repeat(function: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        function()
