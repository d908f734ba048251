"""Grouped GEMMs with MXFP4 weights and e4m3 rows, ours and those of the `humming-kernels` package, interleaved, on one Hopper GPU.

    python benchmarks/humming_gemm.py --out w4a8-gemm.json [--shapes Qwen3.5 …] [--tokens 64 128 256 512 8192]
    python benchmarks/humming_gemm.py --prebuild kernels        # ours, anywhere; then XSTAGE_KERNELS=kernels python benchmarks/…

Compute only. Per shape and number of tokens per rank: the experts of one rank of two, and the rows that it gets when the tokens of both
pick evenly (`routing.draw_remote`, as `xstage bench w4a8` does). All contenders of a layer, `linear1` or `linear2`, compute the same
product of the same codes, scales and rows, bf16 out:

* `ours_fp8`, `ours_mxfp4`: `grouped_gemm.plain`, weights in e4m3 with a scale per 128 × 128 (the codes folded, so the same numbers), or in
  MXFP4. Rows stand in tiles of 128, and padding is multiplied like rows.
* `humming_1x128`: rows one after the other, scales of 1 × 128 as ours, [K / 128, rows]; its kernels know where each expert's rows end.
  `humming_1x128_row_major`: scales [rows, K / 128]. `humming_1x128_indexed`: rows by index. `humming_per_row`: one scale per row.

`both` has no counterpart there: our Linear-1, SwiGLU, fp8 rows again and Linear-2 in one kernel, as a layer runs them, all results to this
GPU's memory. It knows where rows end. `ours_mxfp4_swapped`, `…_narrow`, `…_split`: its other forms for weights in MXFP4, which a layer
takes by how many rows an expert has (`work_table.form_of`). What `humming` takes for it is at least its two layers.

What a contender computes is held against float64 first, for three experts; of `both` only that it is finite (the GPU tests hold it).
`error` says why there is no time, or why it is not to be used.
Times are medians of single calls, each after an idle moment and a read of `SCRUB_BYTES`, so that no weight is in the L2 cache.

Which kernel humming takes is its own choice for this number of rows. It compiles them (NVRTC or nvcc) into `HUMMING_CACHE_DIR`.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from xstage.bench import timing
from xstage.moe import mxfp4, quantize, routing
from xstage.moe import work_table as wt
from xstage.moe.auto_order import auto_order
from xstage.moe.shapes import MoEShape, shape

SHAPES = ("Qwen3.5", "DSv4-Flash", "Hy3", "Qwen3-30B", "GLM-5.2")
TOKENS = (64, 128, 256, 512, 8192)
RANKS, CLUSTERS = 2, 66
SPREAD = 4  # blocks lie up to so many powers of two, less one, below the largest
LOCKS = 8192  # int32 that humming's kernels wait at, more than any asks for
SCRUB_BYTES = 1 << 31
MOST_ERROR = 0.02  # relative; e4m3 products keep 14 bits, outputs 8, and a scale per row leaves the whole K to the former


@dataclass(frozen=True)
class Variant:
    """How humming is called. group: columns of a row under one scale, 0: all. kind: how it finds an expert's rows. turned: scales are
    [K / 128, rows]."""

    group: int
    kind: str = "grouped_contiguous"
    turned: bool = False

    @property
    def compute(self) -> dict[str, Any]:
        return {"gemm_type": self.kind, "use_m_major_input_scale": self.turned}


HUMMING = {
    "humming_1x128": Variant(128, turned=True), "humming_1x128_row_major": Variant(128),
    "humming_1x128_indexed": Variant(128, "indexed"), "humming_per_row": Variant(0),
}  # fmt: skip
OURS = ("ours_fp8", "ours_mxfp4")
MXFP4_FORMS = {f"ours_mxfp4_{form}": form for form in wt.FORMS if form != "wide"}  # of both layers, beside the wide one
LAYERS = {"linear1": (*OURS, *HUMMING), "linear2": (*OURS, *HUMMING), "both": (*OURS, *MXFP4_FORMS)}


@dataclass(frozen=True)
class Contender:
    """run: what is timed. result: rows of what it wrote, in the order of rows. prepare: comes before each run."""

    run: Callable[[], Any]
    result: Callable[[], torch.Tensor]
    prepare: Callable[[], Any] = lambda: None


def sizes(s: MoEShape) -> dict[str, tuple[int, int]]:
    """(N, K) of each layer."""
    return {"linear1": (2 * s.intermediate, s.hidden), "linear2": (s.hidden, s.intermediate)}


def loads_of(s: MoEShape, tokens: int) -> list[int]:
    """Rows of every expert of rank 0: tokens · top_k in all."""
    share, counts = 1 - 1 / RANKS, torch.zeros(s.experts, dtype=torch.int32)
    for me in range(RANKS):
        counts += routing.count(routing.draw_remote(tokens, s.experts, s.top_k, ranks=RANKS, me=me, share=share), s.experts)
    return [int(n) for n in counts[: s.experts // RANKS]]


def places(loads: Sequence[int]) -> list[int]:
    """Where each row stands when every expert's begin at a tile."""
    found: list[int] = []
    first = 0
    for n in loads:
        found += range(first, first + n)
        first += -(-n // wt.TILE_ROWS) * wt.TILE_ROWS
    return found


def index_blocks(loads: Sequence[int], block: int) -> tuple[list[int], list[int]]:
    """Rows by index in blocks of one expert, filled up with the number of rows, and the expert of each block."""
    rows, experts, first, total = [], [], 0, sum(loads)
    for e, n in enumerate(loads):
        blocks = -(-n // block)
        rows += [*range(first, first + n), *[total] * (blocks * block - n)]
        experts += [e] * blocks
        first += n
    return rows, experts


class Weights:
    """Random weights of one layer, the same numbers in every form: packed codes and scales of blocks, tiles as ours rest, e4m3."""

    def __init__(self, experts: int, n: int, k: int, device: torch.device | str = "cuda"):
        self.experts, self.n, self.k = experts, n, k
        largest = mxfp4.BIAS + round(math.log2(k**-0.5 / 3))  # codes are about 3 in the mean
        self.packed = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
        scale_shape = (experts, n, k // mxfp4.BLOCK)
        self.blocks = torch.randint(largest - SPREAD + 1, largest + 1, scale_shape, dtype=torch.uint8, device=device)
        self.codes = torch.empty(experts, n // 128, k // 128, mxfp4.TILE_BYTES, dtype=torch.uint8, device=device)
        self.fp8 = torch.empty(experts, n // 128, k // 128, 128, 128, dtype=torch.uint8, device=device)
        self.scales = torch.empty(experts, k // 128, n // 128, device=device)
        for e in range(experts):
            packed, blocks = self.packed[e], self.blocks[e]
            folded, tiles = mxfp4.fold(packed, blocks)
            self.codes[e].copy_(mxfp4.to_tiles(mxfp4.to_words(packed), mxfp4.distances(blocks, tiles)))
            self.fp8[e].copy_(quantize.tiled(folded.view(torch.uint8)))
            self.scales[e].copy_(tiles.mT)
        self._humming: dict[int, tuple[Any, dict[str, torch.Tensor]]] = {}

    def ours(self, name: str) -> torch.Tensor:
        return self.fp8 if name == "ours_fp8" else self.codes

    def humming(self, group: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """What humming makes of them for rows with such scales: its configuration and tensors."""
        if group not in self._humming:
            from humming.transform import prepare_and_transform_humming_tensors

            given = {"weight": self.packed.view(torch.int32), "weight_scale": self.blocks.view(torch.float8_e8m0fnu)}
            options = described(self.experts, group)
            self._humming[group] = prepare_and_transform_humming_tensors(given, self.n, self.k, **options, device=self.packed.device)
        return self._humming[group]


class Rows:
    """Random input rows of one layer, as humming takes them, one after the other, and as ours do, in tiles of one expert."""

    def __init__(self, loads: Sequence[int], k: int, device: torch.device | str = "cuda"):
        self.loads = list(loads)
        x = torch.randn(sum(loads), k, dtype=torch.bfloat16, device=device)
        self.rows, self.scales = quantize.quantize_activations(x)
        self.row_scales = x.abs().amax(1, keepdim=True).float() / quantize.E4M3_MAX
        self.rows_of_one_scale = (x / self.row_scales).to(torch.float8_e4m3fn)
        self.place = torch.tensor(places(loads), device=device)
        self.tiles = [-(-n // wt.TILE_ROWS) for n in loads]
        self.padded = torch.zeros(wt.TILE_ROWS * sum(self.tiles), k, dtype=torch.uint8, device=device)
        self.padded[self.place] = self.rows.view(torch.uint8)
        self.padded_scales = torch.ones(k // 128, len(self.padded), device=device)
        self.padded_scales[:, self.place] = self.scales.T

    def given(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """e4m3 rows and their scales, [rows, groups]."""
        return (self.rows, self.scales) if group else (self.rows_of_one_scale, self.row_scales)

    def span(self, expert: int) -> slice:
        first = sum(self.loads[:expert])
        return slice(first, first + self.loads[expert])

    @property
    def looked_at(self) -> list[int]:
        """Experts whose results are checked: the first, one in the middle, the last."""
        used = [e for e, n in enumerate(self.loads) if n]
        return sorted({used[0], used[len(used) // 2], used[-1]})


def reference(rows: Rows, weights: Weights, group: int) -> dict[int, torch.Tensor]:
    """float64 results of the experts that are looked at."""
    q, scales = rows.given(group)
    found = {}
    for e in rows.looked_at:
        values = q[rows.span(e)].double() * scales[rows.span(e)].double().repeat_interleave(q.shape[1] // scales.shape[1], 1)
        found[e] = values @ mxfp4.dequantize(weights.packed[e], weights.blocks[e], torch.float64).T
    return found


def difference(out: torch.Tensor, rows: Rows, wanted: dict[int, torch.Tensor]) -> float:
    """Relative, of results in the order of rows."""
    missed = sum(float((out[rows.span(e)].double() - w).square().sum()) for e, w in wanted.items())
    return math.sqrt(missed / sum(float(w.square().sum()) for w in wanted.values()))


# ---- contenders


def ours_plain(name: str, rows: Rows, weights: Weights, which: int) -> Contender:
    from xstage.moe import grouped_gemm

    table = _int32(wt.work_table(rows.tiles, weights.n // wt.TILE_COLUMNS), rows)
    expert = _int32([e for e, count in enumerate(rows.tiles) for _ in range(count)], rows)
    totals = _int32([len(table) // 2, len(table) // 2, len(expert), len(rows.padded)], rows)
    out = torch.empty(len(rows.padded), weights.n, dtype=torch.bfloat16, device=rows.padded.device)
    given = (rows.padded, rows.padded_scales, weights.ours(name), weights.scales, expert, table, totals, out, which)
    return Contender(lambda: grouped_gemm.plain(*given), lambda: out[rows.place])


def ours_both(name: str, s: MoEShape, tokens: int, rows: Rows, weights: dict[str, Weights]) -> Contender:
    from xstage.moe import grouped_gemm

    device, count, first, second = rows.padded.device, len(rows.padded), weights["linear1"], weights["linear2"]
    columns = (first.n // wt.TILE_COLUMNS, second.n // wt.TILE_COLUMNS)
    order = wt.WorkOrder.of(auto_order(s, tokens, RANKS), *columns, lead_rows=None, instances=CLUSTERS)
    entries = [len(wt.work_table(rows.tiles, n)) for n in columns]
    work, totals = _int32(wt.work_list(rows.loads, order), rows), _int32([*entries, sum(rows.tiles), count], rows)
    middle = torch.empty(count, s.intermediate, dtype=torch.uint8, device=device)
    middle_scales, row_weight = torch.empty(s.intermediate // 128, count, device=device), torch.rand(count, device=device)
    out, slots = torch.empty(count, s.hidden, dtype=torch.bfloat16, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    slots[rows.place] = out.data_ptr() + rows.place * (2 * s.hidden)
    ready = torch.zeros(1 + sum(rows.tiles), dtype=torch.int32, device=device)
    control, status = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    call = torch.tensor([0, 0, 10**9, status.data_ptr()], dtype=torch.int64, device=device)
    given = (
        rows.padded, rows.padded_scales, first.ours(name), first.scales.unflatten(2, (-1, 2)), second.ours(name), second.scales, work,
        totals, row_weight, middle, middle_scales, slots, (ready, control, call),
    )  # fmt: skip

    def result() -> torch.Tensor:
        if status.item():
            raise RuntimeError(f"a wait gave up: {status.item():#x}")
        return out[rows.place]

    form = MXFP4_FORMS.get(name, "wide")
    return Contender(lambda: grouped_gemm.both(*given, form=form), result, ready.zero_)


def described(experts: int, group: int) -> dict[str, Any]:
    """A layer for humming: e2m1 with e8m0 per 32, times e4m3 rows, bf16 out."""
    from humming import dtypes
    from humming.schema import HummingInputSchema, HummingWeightSchema

    return {
        "weight_schema": HummingWeightSchema(b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0, weight_scale_group_size=mxfp4.BLOCK),
        "input_schema": HummingInputSchema(a_dtype=dtypes.float8e4m3, input_scale_group_size=group),
        "num_experts": experts, "torch_dtype": torch.bfloat16,
    }  # fmt: skip


def tuned(config: Any, variant: Variant, rows: int) -> dict[str, Any]:
    """humming's choice for so many rows."""
    from humming.tune import get_heuristics_config

    return dict(get_heuristics_config(config, shape_m=rows, **variant.compute, device=0))


def humming(variant: Variant, rows: Rows, weights: Weights) -> Contender:
    from humming import ops
    from humming.kernel.humming import HummingKernel

    config, tensors = weights.humming(variant.group)
    tuning = tuned(config, variant, sum(rows.loads))
    kernel = HummingKernel.prepare_kernels(config.to_str(), variant.compute, tuning, 0)
    inputs, scales = rows.given(variant.group)
    if variant.turned:
        scales = torch.nn.functional.pad(scales.T, (0, -len(inputs) % 4)).contiguous()
    given: dict[str, Any] = {"inputs": inputs, "input_scale": scales, **tensors}
    if variant.kind == "indexed":
        index, experts = index_blocks(rows.loads, tuning["block_shape"][0])
        given |= {"sorted_ids": _int32(index, rows), "expert_ids": _int32(experts, rows), "num_tokens_padded": _int32([len(index)], rows)}
    else:
        given["expert_layout"] = _int32([sum(rows.loads[:e]) for e in range(len(rows.loads) + 1)], rows)
    given["outputs"] = torch.empty(len(inputs), weights.n, dtype=torch.bfloat16, device=inputs.device)
    given["locks"] = torch.zeros(LOCKS, dtype=torch.int32, device=inputs.device)
    return Contender(lambda: ops.launch_kernel(configs=kernel, **given), lambda: given["outputs"])


def _int32(values: Any, rows: Rows) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=rows.padded.device).view(-1)


# ---- compiling


def our_kernels(shapes: Sequence[str]) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What our contenders compile."""
    from xstage.moe import grouped_gemm

    work = []
    for s in map(shape, shapes):
        for codes in (False, True):
            work += grouped_gemm.plain_kernels(s.hidden, s.intermediate, codes)
            work += [grouped_gemm.both_kernel(s.hidden, s.intermediate, form) for form in (wt.FORMS if codes else (None,))]
    return work


def humming_kernels(shapes: Sequence[str], tokens: Sequence[int]) -> list[tuple[Any, dict[str, Any]]]:
    """Arguments of the kernels that humming takes for all rows, each once."""
    from humming.kernel.humming import HummingKernel
    from humming.transform import prepare_layer_config

    found = {}
    for s in map(shape, shapes):
        for (n, k), variant in [(size, v) for size in sizes(s).values() for v in HUMMING.values()]:
            config = prepare_layer_config(n, k, **described(s.experts // RANKS, variant.group), device=0)
            for count in tokens:
                tuning = tuned(config, variant, count * s.top_k)
                tuning.pop("num_sms", None)
                options = json.loads(config.to_str()) | variant.compute | tuning
                found[json.dumps(options, sort_keys=True, default=str)] = (HummingKernel, options)
    return list(found.values())


def compile_humming(shapes: Sequence[str], tokens: Sequence[int]) -> None:
    """All at once, on all processors; whatever fails here fails again, and is said, where it is used."""
    begun = time.monotonic()
    try:
        from humming.jit.compiler import NVRTCCompiler

        try:
            NVRTCCompiler.signature()
        except Exception:
            os.environ.setdefault("HUMMING_COMPILER", "nvcc")
        from humming.kernel.humming import HummingKernel

        work = humming_kernels(shapes, tokens)
        HummingKernel.compile_many(work, 0)
        print(f"humming {metadata.version('humming-kernels')}: {len(work)} kernels, {time.monotonic() - begun:.1f} s", file=sys.stderr)
    except Exception as error:
        print(f"humming: {_said(error)}", file=sys.stderr, flush=True)


# ---- measuring


def times_us(made: dict[str, Contender], rounds: int, pause_s: float) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times of single calls, every contender once a round, beginning with another one each round; and of those that failed, why."""
    scrub = torch.zeros(SCRUB_BYTES // 4, device="cuda")
    names, failed = list(made), {}
    found: dict[str, list[float]] = {name: [] for name in names}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if name in failed:
                continue
            try:
                made[name].prepare()
                torch.cuda.synchronize()
                time.sleep(pause_s)
                scrub.sum()  # the GPU is busy until the call has been issued, and only clean lines are in its cache
                begin.record()
                made[name].run()
                end.record()
                torch.cuda.synchronize()
            except Exception as error:
                failed[name] = _said(error)
            else:
                if turn:
                    found[name].append(begin.elapsed_time(end) * 1e3)
    return found, failed


def contenders(
    layer: str, names: Sequence[str], s: MoEShape, tokens: int, rows: dict[str, Rows], weights: dict[str, Weights]
) -> Iterator[tuple[str, Contender | None, dict[str, Any]]]:  # fmt: skip
    """Each contender that can be timed, called once, and what its row has to say."""
    wanted: dict[int, dict[int, torch.Tensor]] = {}
    for name in names:
        row: dict[str, Any] = {"time_us": None, "relative_error": None, "error": None}
        made: Contender | None = None
        try:
            if layer == "both":
                made = ours_both(name, s, tokens, rows["linear1"], weights)
            elif name in HUMMING:
                made = humming(HUMMING[name], rows[layer], weights[layer])
            else:
                made = ours_plain(name, rows[layer], weights[layer], list(weights).index(layer))
            made.prepare()
            made.run()
            torch.cuda.synchronize()
            out = made.result()
            if layer == "both":
                missed = 0.0 if bool(out.isfinite().all()) else math.nan
            else:
                group = HUMMING[name].group if name in HUMMING else 128
                if group not in wanted:
                    wanted[group] = reference(rows[layer], weights[layer], group)
                missed = row["relative_error"] = difference(out, rows[layer], wanted[group])
            if not missed < MOST_ERROR:
                row["error"] = f"differs from float64 by {missed:.1e}"
                row["relative_error"] = None if math.isnan(missed) else missed
        except Exception as error:
            made, row["error"] = None, _said(error)
        yield name, made, row


def measure(s: MoEShape, options: argparse.Namespace, file: timing.ResultFile) -> None:
    done = {(r["shape"], r["tokens"], r["layer"], r["contender"]) for r in file.content["rows"]}
    todo = {
        tokens: {layer: [c for c in names if (s.name, tokens, layer, c) not in done] for layer, names in LAYERS.items()}
        for tokens in options.tokens
    }
    if not any(names for layers in todo.values() for names in layers.values()):
        return
    torch.manual_seed(0)
    weights = {layer: Weights(s.experts // RANKS, *size) for layer, size in sizes(s).items()}
    for tokens, layers in todo.items():
        loads = loads_of(s, tokens)
        rows = {layer: Rows(loads, k) for layer, (_, k) in sizes(s).items()}
        for layer, names in layers.items():
            made: dict[str, Contender] = {}
            said: dict[str, dict[str, Any]] = {}
            for name in names:
                if name in options.without:
                    said[name] = {"time_us": None, "relative_error": None, "error": "left out"}
            for name, contender, row in contenders(layer, [n for n in names if n not in said], s, tokens, rows, weights):
                said[name] = row
                if contender is not None:
                    made[name] = contender
                elif _broken():
                    add(file, s, tokens, loads, layer, {name: row})
                    restart(name)
            found, failed = times_us(made, options.rounds, options.pause) if made else ({}, {})
            for name, values in found.items():
                if name in failed:
                    said[name]["error"] = failed[name]
                else:
                    said[name] |= {"time_us": round(statistics.median(values), 1), "rounds_us": [round(v, 1) for v in values]}
            add(file, s, tokens, loads, layer, said)
            if failed and _broken():
                restart(next(iter(failed)))
            del made
        del rows
        torch.cuda.empty_cache()


def add(file: timing.ResultFile, s: MoEShape, tokens: int, loads: Sequence[int], layer: str, said: dict[str, dict[str, Any]]) -> None:
    what = {"shape": s.name, "tokens": tokens, "experts": len(loads), "rows": sum(loads), "layer": layer}
    for name, row in said.items():
        file.add(what | {"contender": name} | row)
    times = {name: row["time_us"] or row["error"] for name, row in said.items()}
    print(s.name, tokens, layer, times, file=sys.stderr, flush=True)


def restart(name: str) -> None:
    """After an error that no later call survives: from the beginning, without `name`. What is in the file stays."""
    print(f"beginning again without {name}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *sys.argv, "--without", name])


def _broken() -> bool:
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception:
        return True
    return False


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", help="result file; an unfinished one of the same settings is continued")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="per rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pause", type=float, default=0.004, help="idle seconds before each call")
    parser.add_argument("--without", nargs="+", action="extend", default=[], help="contenders to leave out", metavar="CONTENDER")
    parser.add_argument("--prebuild", metavar="FOLDER", help="compile our kernels into FOLDER and end")
    options = parser.parse_args()
    if options.prebuild:
        from xstage.moe.prebuild import fill

        print(len(fill(options.prebuild, our_kernels(options.shapes))), "kernels")
        return
    if not options.out:
        parser.error("--out is missing")
    settings = {key: getattr(options, key) for key in ("shapes", "tokens", "rounds", "pause")}
    settings |= {"ranks": RANKS, "scrub_bytes": SCRUB_BYTES}
    models = [shape(name) for name in options.shapes]
    file = timing.ResultFile(options.out, "w4a8-gemm", settings=settings)
    try:
        file.content["fingerprint"]["humming_kernels"] = metadata.version("humming-kernels")
    except metadata.PackageNotFoundError:
        print("humming-kernels is not here", file=sys.stderr)
    compile_humming(options.shapes, options.tokens)
    begun = time.monotonic()
    for s in models:
        try:
            measure(s, options, file)
        except Exception as error:
            file.add({"shape": s.name, "tokens": None, "layer": None, "contender": None, "time_us": None, "error": _said(error)})
            print(s.name, _said(error), file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
        print(f"{s.name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    file.finish()


if __name__ == "__main__":
    main()
