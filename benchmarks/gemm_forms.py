"""The MoE kernel's GEMMs of both layers as several checkouts compile them, interleaved on one Hopper GPU.

    python benchmarks/gemm_forms.py compile forms --name before        # in one checkout, anywhere; `after` in the other
    python benchmarks/gemm_forms.py time forms --out gemm.json [--shapes Qwen3.5 …] [--tokens 8192 …] [--forms fp8 split]

`compile` writes `NAME.FORM.SHAPE.o`: fp8, and the forms for weights in MXFP4 (`work_table.FORMS`). `time` runs all that it finds in the
folder for a shape, on the same random rows and weights, the experts of one rank of two, all results to this GPU's memory, and compares
what the kernels of one format of weights compute, bit for bit. Times are medians of single calls (`humming_gemm.times_us`). Two GPUs,
and the same one an hour later, differ by more than most changes do: what is to be compared belongs into one run.

The checkouts must agree in what a kernel is given. Not covered: rows that are sent meanwhile, recorded spans, a clamp.
"""

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import humming_gemm as hg
import torch

from xstage.bench import timing
from xstage.moe import work_table as wt
from xstage.moe.shapes import shape

FORMS = {"fp8": None, **{form: form for form in wt.FORMS}}
# What `humming_gemm` calls them.
CONTENDERS = {"fp8": "ours_fp8", "wide": "ours_mxfp4", **{form: name for name, form in hg.MXFP4_FORMS.items()}}


def compile_all(folder: Path, name: str, shapes: Sequence[str], forms: Sequence[str]) -> int:
    """Kernels of this checkout into `folder`; returns how many files they are."""
    from xstage.device.kept import FOLDER, write
    from xstage.moe import grouped_gemm

    os.environ.pop(FOLDER, None)  # a kernel that was loaded cannot be written again
    for s in map(shape, shapes):
        for form in forms:
            function, given = grouped_gemm.both_kernel(s.hidden, s.intermediate, FORMS[form])
            write(function(*given), folder / f"{name}.{form}.{s.name}.o")
    return len(shapes) * len(forms)


def found(folder: Path, shape_name: str, forms: Sequence[str]) -> dict[tuple[str, str], Any]:
    """(checkout, form) and the loaded kernel."""
    from xstage.device.kept import load

    paths = {tuple(path.name.split(".", 2)): path for path in sorted(folder.glob(f"*.*.{shape_name}.o"))}
    return {(name, form): load(path) for (name, form, _), path in paths.items() if form in forms}


def contender(kernel: Any, form: str, s: Any, tokens: int, rows: dict[str, hg.Rows], weights: dict[str, hg.Weights]) -> hg.Contender:
    """A call of this kernel, whatever this checkout would compile."""
    from xstage.moe import grouped_gemm

    torch.manual_seed(1)  # the same routing weights for all
    call = hg.ours_both(CONTENDERS[form], s, tokens, rows["linear1"], weights)

    def run() -> None:
        compiled = grouped_gemm.compiled_gemm
        grouped_gemm.compiled_gemm = lambda *_: kernel
        try:
            call.run()
        finally:
            grouped_gemm.compiled_gemm = compiled

    return hg.Contender(run, call.result, call.prepare)


def measure(options: argparse.Namespace, file: timing.ResultFile) -> None:
    for s in map(shape, options.shapes):
        kernels = found(options.folder, s.name, options.forms)
        done = {(r["shape"], r["tokens"]) for r in file.content["rows"]}
        todo = [tokens for tokens in options.tokens if (s.name, tokens) not in done]
        if not kernels or not todo:
            continue
        torch.manual_seed(0)
        weights = {layer: hg.Weights(s.experts // hg.RANKS, *size) for layer, size in hg.sizes(s).items()}
        for tokens in todo:
            rows = {layer: hg.Rows(hg.loads_of(s, tokens), k) for layer, (_, k) in hg.sizes(s).items()}
            made, first, same = {}, {}, {}
            for (name, form), kernel in kernels.items():
                one = contender(kernel, form, s, tokens, rows, weights)
                one.prepare()
                one.run()
                torch.cuda.synchronize()
                out = one.result().view(torch.int16).clone()
                label = f"{name}.{form}"
                same[label] = bool(torch.equal(first.setdefault(form == "fp8", out), out))
                made[label] = one
            times, failed = hg.times_us(made, options.rounds, options.pause)
            for label, values in times.items():
                error = failed.get(label)
                row = {"shape": s.name, "tokens": tokens, "kernel": label, "same_bits": same[label], "error": error}
                row |= {"time_us": round(statistics.median(values), 1) if values and error is None else None}
                file.add(row | {"rounds_us": [round(v, 1) for v in values]})
                print(s.name, tokens, label, row["time_us"], "" if same[label] else "OTHER BITS", error or "", file=sys.stderr, flush=True)
            del made, first, rows
            gc.collect()
        del weights
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("compile", "time"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", help="compile: of this checkout, without dots")
    parser.add_argument("--out", help="time: result file; an unfinished one of the same settings is continued")
    parser.add_argument("--shapes", nargs="+", default=list(hg.SHAPES))
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="per rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pause", type=float, default=0.004, help="idle seconds before each call")
    options = parser.parse_args()
    if options.what == "compile":
        if not options.name or "." in options.name:
            parser.error(f"--name: {options.name!r}; a name without dots is needed")
        print(compile_all(options.folder, options.name, options.shapes, options.forms), "kernels")
        return
    if not options.out:
        parser.error("--out is missing")
    settings = {key: getattr(options, key) for key in ("shapes", "forms", "tokens", "rounds", "pause")}
    file = timing.ResultFile(options.out, "gemm-forms", settings=settings | {"ranks": hg.RANKS, "scrub_bytes": hg.SCRUB_BYTES})
    measure(options, file)
    file.finish()


if __name__ == "__main__":
    main()
