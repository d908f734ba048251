"""Diffusion transformers served over several GPUs: a step and an attention layer with diffusers' own Ulysses exchange, and with ours.

Each row is a model at a resolution, built from its public configuration at full width with `layers` blocks and random weights in bf16
(`dit_models`; FLUX.1: a third of the blocks with two streams, the rest with one, as published). A step is one forward at batch 1:
embeddings, the split, the blocks, the output put together. All variants of a row share their weights. Before anything is timed, the
outputs of all variants are held against the whole model in float32: none of ours may be more than `LIMIT` times as far from it as the
worst of diffusers', or of the whole model in bf16 where diffusers cannot split it (HunyuanVideo: it has no plan).

* `diffusers_NAME`: `enable_parallelism` with `ulysses_degree`, with `ulysses_anything` where a length is not a multiple of the ranks (then
  it exchanges lengths on the host in every layer); one variant for each attention backend of `BACKENDS` that runs. The fastest counts.
* `ours`: `integrations.diffusers.enable`.
* `ours_push`: the same, but attention and then strided copies, the strongest serial path: what fusing gives, and what FA4 gives.
* `ours_at_once`: the same as `ours`, but all heads are exchanged before any is attended: what hiding that exchange gives.
* `ours_all_to_all`: the same as `ours_at_once`, but q, k and v by an all-to-all each: what their exchange in one kernel gives.

Groups, each interleaved by itself (`bench.timing`):

* `step`: forwards, eager. `step_graph`: in a CUDA graph, which leaves out the host.
* `layer`: attention calls back to back as the model's processors make them, eager: q, k, v to the ranks of their heads, attention, rows
  back. And `alone_…`: a variant's attention kernel alone on the same heads. Their difference is the exposed communication of a layer.
  `exchange_packed` and `exchange_all_to_all` are the exchange of q, k and v alone, bounded by what leaves a rank over R (`PLATFORM`).
* `layer_graph`: the same in a CUDA graph.

`ulysses_anything` reads lengths back from the device or waits on the host: it is not captured, nor compared in a graph.

Not covered: whole models (a step of few layers has a larger share of embeddings and output than one of all), text encoders, VAE, guidance
(two forwards), compiled models, more than one host.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import geometric_mean, median
from typing import Any

import torch
import torch.distributed as dist

from xstage.attention import serial
from xstage.attention.layout import SequenceLayout
from xstage.attention.overlap import Split
from xstage.bench import timing
from xstage.errors import UnsuitableMachine, XStageError
from xstage.platform import load_platform
from xstage.studies import dit_models
from xstage.studies.attention import slug
from xstage.studies.dit_models import Model, exchange_bound_ns

LAYERS, ROW_S, LEAST_ROUNDS, LIMIT = 3, 14.0, 5, 2.0
GROUPS = ("step", "layer", "layer_graph", "step_graph")  # in this order: once there is a graph, every eager call of ours meets its peers
DEFAULT_GROUPS = GROUPS[:3]
BACKENDS = {"native": "native", "cudnn": "_native_cudnn", "flash": "_native_flash", "flash2": "flash"}  # diffusers' names
PLATFORM = "h200-nvlink4"  # whose drain rate bounds the exchanges
_FLOP_PER_NS = 5e5  # of a layer on an H200, for planning only
MODELS = {slug(m.name): m for m in dit_models.MODELS}

OURS = ("ours", "ours_at_once", "ours_push", "ours_all_to_all")

Step = Callable[[], torch.Tensor]


def build(model: Model, layers: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The transformer with random weights in evaluation mode, and the inputs of a forward; the same on every rank.

    Weights that the published model keeps in float32 stay so.
    """
    torch.manual_seed(0)
    with torch.device(device):
        transformer, inputs = _INPUTS[model.family](model, layers)
    kept = set(transformer._keep_in_fp32_modules or ())
    for name, parameter in transformer.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not name.endswith("_ids"):
            inputs[name] = value.to(dtype)
    transformer.set_attention_backend("native")  # by name: diffusers' default is whatever any model chose last
    return transformer.eval().requires_grad_(False), inputs


def _flux(m: Model, layers: int) -> tuple[Any, dict[str, Any]]:
    from diffusers import FluxTransformer2DModel

    double = max(1, round(layers / 3))
    _, height, width = m.grid
    places = torch.zeros(height, width, 3)
    places[..., 1], places[..., 2] = torch.arange(height)[:, None], torch.arange(width)[None]
    return FluxTransformer2DModel(num_layers=double, num_single_layers=layers - double, **m.config), {
        "hidden_states": torch.randn(1, m.image, m.config["in_channels"]), "timestep": torch.tensor([0.25]),
        "encoder_hidden_states": torch.randn(1, m.text, m.config["joint_attention_dim"]), "guidance": torch.tensor([2.0]),
        "pooled_projections": torch.randn(1, m.config["pooled_projection_dim"]), "txt_ids": torch.zeros(m.text, 3),
        "img_ids": places.reshape(m.image, 3),
    }  # fmt: skip


def _qwen(m: Model, layers: int) -> tuple[Any, dict[str, Any]]:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(num_layers=layers, **m.config), {
        "hidden_states": torch.randn(1, m.image, m.config["in_channels"]), "timestep": torch.tensor([0.25]),
        "encoder_hidden_states": torch.randn(1, m.text, m.config["joint_attention_dim"]), "img_shapes": [[m.grid]],
    }  # fmt: skip


def _wan(m: Model, layers: int) -> tuple[Any, dict[str, Any]]:
    from diffusers import WanTransformer3DModel

    size = [n * patch for n, patch in zip(m.grid, m.config["patch_size"], strict=True)]
    return WanTransformer3DModel(num_layers=layers, **m.config), {
        "hidden_states": torch.randn(1, m.config["in_channels"], *size), "timestep": torch.tensor([256.0]),
        "encoder_hidden_states": torch.randn(1, m.text, m.config["text_dim"]),
    }  # fmt: skip


def _hunyuan(m: Model, layers: int) -> tuple[Any, dict[str, Any]]:
    from diffusers import HunyuanVideoTransformer3DModel

    double = max(1, round(layers / 3))
    frames, height, width = m.grid
    return HunyuanVideoTransformer3DModel(num_layers=double, num_single_layers=layers - double, **m.config), {
        "hidden_states": torch.randn(1, m.config["in_channels"], frames, 2 * height, 2 * width), "timestep": torch.tensor([256]),
        "encoder_hidden_states": torch.randn(1, m.text, m.config["text_embed_dim"]), "guidance": torch.tensor([6016.0]),
        "encoder_attention_mask": torch.ones(1, m.text, dtype=torch.long),
        "pooled_projections": torch.randn(1, m.config["pooled_projection_dim"]),
    }  # fmt: skip


_INPUTS: dict[str, Callable[[Model, int], tuple[Any, dict[str, Any]]]] = {"flux": _flux, "qwen": _qwen, "wan": _wan, "hunyuan": _hunyuan}


def twin(transformer: Any) -> Any:
    """A copy with attributes of its own and the same weights."""
    return copy.deepcopy(transformer, {id(p): p for p in (*transformer.parameters(), *transformer.buffers())})


def truth(transformer: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The output of the whole model in float32, its weights and inputs as they are."""
    whole = copy.deepcopy(transformer).float()
    exact = {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        out: torch.Tensor = whole(**exact, return_dict=False)[0]
    return out


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean square of the difference over that of `exact`."""
    return float((out.float() - exact).norm() / exact.norm())


def check(errors: Mapping[str, float]) -> None:
    """Refuse variants that are further from the whole model than `dtype` explains.

    Raises:
        XStageError: a variant of ours is more than `LIMIT` times as far as the worst of diffusers' (or `whole`), or one is not a number.
    """
    worst = max((e for name, e in errors.items() if name.startswith("diffusers_") or name == "whole"), default=0.0)
    for name, e in errors.items():
        if not e < float("inf") or (name.startswith("ours") and e > LIMIT * worst):
            said = ", ".join(f"{n} {v:.2e}" for n, v in errors.items())
            raise XStageError(f"{name}: its output is too far from the whole model in float32 ({said})")


@dataclass
class Variants:
    """What a row compares: `steps` are forwards, `layers` attention calls and `alone_…`, `missing` says why one is not there."""

    steps: dict[str, Step]
    layers: dict[str, Step]
    missing: dict[str, str]
    operators: Callable[[], list[Any]]
    close: Callable[[], None]
    split: Callable[[], Split | None] = lambda: None  # how the last attention call of `ours` was split


def variants(model: Model, transformer: Any, inputs: Mapping[str, Any], backends: Mapping[str, str] = BACKENDS) -> Variants:
    """All variants that run here, each called once; every rank calls it.

    Args:
        backends: names of variants and diffusers' names of attention backends.
    """
    from xstage.integrations.diffusers import disable, enable

    rank, world = dist.get_rank(), dist.get_world_size()
    device, dtype = transformer.device, inputs["hidden_states"].dtype
    generator = torch.Generator(device=device).manual_seed(1 + rank)

    def draw(rows: int, heads: int) -> list[torch.Tensor]:
        return [torch.randn(1, rows, heads, model.head_dim, device=device, dtype=dtype, generator=generator) for _ in range(3)]

    mine = draw(model.rows(rank, world), model.heads)
    here = draw(model.sequence, model.heads // world + (rank < model.heads % world))
    v = Variants({}, {}, {}, list, lambda: None)

    def add(name: str, made: Any, before: Callable[[], Any] = lambda: None) -> None:
        v.steps[name] = partial(_forward, made, inputs)
        processor = next(p for p in made.attn_processors.values() if getattr(p, "_parallel_config", None) is not None)
        v.layers[name] = partial(_attend, processor, mine, before)

    for short, backend in backends.items():
        if transformer._cp_plan is None:
            v.missing[f"diffusers_{short}"] = "diffusers has no plan for it"
            continue
        name, made = f"diffusers_{short}", twin(transformer)
        reason = _why_not(partial(made.set_attention_backend, backend))
        if not reason:
            _parallel(made, world, anything=model.odd(world))
            add(name, made)
            v.layers[f"alone_{name}"] = partial(_alone, here, backend)
            reason = _why_not(v.layers[f"alone_{name}"]) or _why_not(v.steps[name])
        if reason:
            v.missing[name] = reason
            for functions in (v.steps, v.layers):
                functions.pop(name, None)
            v.layers.pop(f"alone_{name}", None)

    ours, enabled = {name: twin(transformer) for name in OURS}, []
    layout = SequenceLayout.shards([model.rows(r, world) for r in range(world)])
    for name, made in ours.items():
        enable(made, fallback="error", first_heads=0 if name == "ours_at_once" else None)
        enabled.append(made)
        ulysses = made._parallel_config
        # Row counts are known after the first call of a kind of forward, which `layer` is one of.
        add(name, made, partial(ulysses.begin, ("layer",)))
        v.steps[name]()
        v.layers[name]()
        operators = list(ulysses._operators.values())
        exchange = {"ours_at_once": "exchange_packed", "ours_all_to_all": "exchange_all_to_all"}.get(name)
        modes = {operator.mode for operator in operators} | {operator.inputs.mode for operator in operators}
        if modes != {"fused", "kernel"}:
            reason = f"runs as {', '.join(sorted(modes))}"
            if exchange is not None:
                v.missing[exchange] = reason
            if name != "ours":
                v.missing[name] = reason
                del v.steps[name], v.layers[name]
            continue
        for operator in operators:
            if name == "ours":
                v.split = partial(getattr, operator, "split")
            if name == "ours_push":
                operator.mode = "push"
            elif name == "ours_all_to_all":
                operator.inputs.mode = "nccl"
        if exchange is not None:
            v.layers[exchange] = partial(operators[0].inputs, *mine, layout)
    v.layers["alone_ours"] = lambda: serial.attention(*here)[0]
    v.operators = lambda: [operator for made in enabled for operator in made._parallel_config._operators.values()]

    def close() -> None:
        for made in enabled:
            disable(made)

    v.close = close
    return v


def _parallel(transformer: Any, world: int, anything: bool) -> None:
    from diffusers import ContextParallelConfig

    mesh = _mesh(transformer.device.type, world)
    transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world, ulysses_anything=anything, mesh=mesh))


@lru_cache
def _mesh(device: str, world: int) -> Any:
    """What diffusers would make for each model anew, with communicators of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (1, world), mesh_dim_names=("ring", "ulysses"))


def _forward(transformer: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = transformer(**inputs, return_dict=False)[0]
    return out


def _attend(processor: Any, qkv: Sequence[torch.Tensor], before: Callable[[], Any]) -> torch.Tensor:
    """An attention call as the processor makes it. `before`: what a model's forward does first."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    before()
    chosen = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config}
    with torch.no_grad():
        out: torch.Tensor = dispatch_attention_fn(*qkv, **chosen)
    return out


def _alone(qkv: Sequence[torch.Tensor], backend: str) -> torch.Tensor:
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    with torch.no_grad():
        out: torch.Tensor = dispatch_attention_fn(*qkv, backend=AttentionBackendName(backend))
    return out


def _why_not(function: Callable[[], Any]) -> str:
    """Empty if every rank can run it, else a rank's reason."""
    reason = ""
    try:
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except (ImportError, RuntimeError, ValueError) as failure:
        reason = (str(failure).splitlines() or [type(failure).__name__])[0][:200]
    return next((reason for reason in timing.gather(reason) if reason), "")


def derived(times: Mapping[str, Mapping[str, timing.Times]], bound_ns: float = 0.0) -> dict[str, float]:
    """The row's answers from the times of its groups, in nanoseconds and ratios; only those whose variants were measured.

    diffusers' variant is the one with the fastest step, and in a layer the one with the fastest call; what it exposes is measured against
    the attention of its own backend. bound_ns: of the exchange of q, k and v (0: not known).
    """
    answers: dict[str, float] = {"exchange_bound_ns": round(bound_ns, 1)} if bound_ns else {}
    for suffix in ("", "_graph"):
        ns = {name: t.slowest_ns for name, t in times.get(f"step{suffix}", {}).items()}
        theirs = [t for name, t in ns.items() if name.startswith("diffusers_")]
        if theirs and "ours" in ns:
            answers[f"step_speedup{suffix}"] = round(min(theirs) / ns["ours"], 4)
        if "ours" in ns and "ours_push" in ns:
            answers[f"step_over_push{suffix}"] = round(ns["ours_push"] / ns["ours"], 4)
        if "ours" in ns and "ours_at_once" in ns:
            answers[f"step_over_at_once{suffix}"] = round(ns["ours_at_once"] / ns["ours"], 4)
        if "ours" in ns and "ours_all_to_all" in ns:
            answers[f"step_over_all_to_all{suffix}"] = round(ns["ours_all_to_all"] / ns["ours"], 4)
        ns = {name: t.slowest_ns for name, t in times.get(f"layer{suffix}", {}).items()}
        for name in ("exchange_packed", "exchange_all_to_all"):
            if name in ns:
                answers[f"{name}{suffix}_ns"] = round(ns[name], 1)
                if bound_ns:
                    answers[f"{name}_over_bound{suffix}"] = round(ns[name] / bound_ns, 4)
        called = {name: t for name, t in ns.items() if not name.startswith(("alone_", "exchange_"))}
        exposed = {name: t - ns.get(f"alone_{name}", ns.get("alone_ours", 0.0)) for name, t in called.items()}
        best = min((name for name in exposed if name.startswith("diffusers_")), key=ns.__getitem__, default=None)
        for name in OURS:
            if name in exposed:
                answers[f"exposed_{name}{suffix}_ns"] = round(exposed[name], 1)
        if best is not None:
            answers[f"exposed_diffusers{suffix}_ns"] = round(exposed[best], 1)
        if best is not None and "ours" in exposed:
            answers[f"layer_speedup{suffix}"] = round(ns[best] / ns["ours"], 4)
            if exposed[best] > 0:
                answers[f"exposed_share{suffix}"] = round(exposed["ours"] / exposed[best], 4)
    return answers


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Headline figures: the worst and the mean row, and each row's speedup."""
    out: dict[str, dict[str, Any]] = {}

    def put(key: str, value: float, unit: str = "ratio") -> None:
        out[key] = {"value": round(value, 4), "unit": unit}

    for suffix in ("", "_graph"):
        shares = [r["derived"][f"exposed_share{suffix}"] for r in rows if f"exposed_share{suffix}" in r["derived"]]
        if shares:
            put(f"dit.exposed_share_of_diffusers{suffix}.max", max(shares), "fraction")
        speedups = {slug(r["name"]): r["derived"][f"step_speedup{suffix}"] for r in rows if f"step_speedup{suffix}" in r["derived"]}
        if speedups:
            put(f"dit.step_speedup{suffix}.min", min(speedups.values()))
            put(f"dit.step_speedup{suffix}.geomean", geometric_mean(speedups.values()))
        over = [r["derived"][f"exchange_packed_over_bound{suffix}"] for r in rows if f"exchange_packed_over_bound{suffix}" in r["derived"]]
        if over:
            put(f"dit.exchange_over_bound{suffix}.max", max(over))
        for name, value in speedups.items():
            put(f"dit.step_speedup{suffix}.{name}", value)
    return out


def run(
    out: str, *, models: Sequence[str] = tuple(MODELS), layers: int = LAYERS, rounds: int = 9, budget_s: float = 240.0,
    pause_s: float = 0.04, groups: Sequence[str] = DEFAULT_GROUPS,
) -> dict[str, Any]:  # fmt: skip
    """Measure every row and write a result file after each; run by every rank (torchrun). An unfinished file is continued.

    Args:
        out: path of the result file. models: keys of `MODELS`. layers: blocks that are built. rounds: at most.
        budget_s: no row is begun after this many seconds. groups: which of `GROUPS` to run.

    Returns:
        The content of the result file, which is complete when it has all of `MODELS`.

    Raises:
        UnsuitableMachine: fewer than two ranks, diffusers is not installed, or the fused kernel cannot run here.
        XStageError: unknown model or group, numbers outside their range, a path that cannot be written, outputs that differ.
    """
    for name in models:
        if name not in MODELS:
            raise XStageError(f"models: {name!r} is not one of {', '.join(MODELS)}")
    for name in groups:
        if name not in GROUPS:
            raise XStageError(f"groups: {name!r} is not one of {', '.join(GROUPS)}")
    if layers < 1:
        raise XStageError(f"layers: {layers} must be at least 1")
    # Host tensors over gloo are what diffusers advises for lengths that do not divide: it exchanges them in every layer.
    timing.start_group("bench dit", "cpu:gloo,cuda:nccl")
    import xstage.integrations.diffusers  # noqa: F401  refuses where diffusers is missing

    quiet()
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = {
        "dtype": "bfloat16", "batch": 1, "layers": layers, "rounds": rounds, "pause_s": pause_s, "world": world,
        "groups": list(groups), "diffusers": _diffusers_version(),
    }  # fmt: skip
    results = timing.ResultFile(out, "dit", write=rank == 0, settings=settings)
    begun = time.monotonic()
    # One rank decides, or ranks would part ways.
    done = set(timing.gather([row["name"] for row in results.content["rows"]])[0])
    for model in sorted((MODELS[name] for name in dict.fromkeys(models)), key=lambda m: m.layer_flop):
        if model.name in done or timing.gather(time.monotonic() - begun)[0] > budget_s:
            continue
        row = measure(model, layers, groups, rounds, pause_s)
        gc.collect()  # hooks and models refer to each other
        torch.cuda.empty_cache()
        done.add(model.name)
        results.content["headline"] = headline([*results.content["rows"], row])
        results.add(row)
        if rank == 0:
            answers = " ".join(f"{k} {v:g}" for k, v in row["derived"].items())
            print(f"{model.name}: {answers} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    if done >= {m.name for m in MODELS.values()}:
        results.finish()
    timing.meet()
    return results.content


def quiet() -> None:
    """diffusers warns of every parallel model that its interface may change."""
    from diffusers.utils import logging

    logging.set_verbosity_error()


def _diffusers_version() -> str:
    import diffusers

    return str(diffusers.__version__)


def measure(
    model: Model, layers: int, groups: Sequence[str], rounds: int, pause_s: float, *, device: torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16, backends: Mapping[str, str] = BACKENDS,
) -> dict[str, Any]:  # fmt: skip
    """One row: build, compare, time."""
    world = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    transformer, inputs = build(model, layers, device, dtype)
    exact = truth(transformer, inputs)
    found = variants(model, transformer, inputs, backends)
    try:
        planned = transformer._cp_plan is not None
        if planned and not any(name.startswith("diffusers_") for name in found.steps):
            raise UnsuitableMachine(f"diffusers: none of its backends runs {model.name} here ({found.missing})")
        whole: dict[str, Step] = {} if planned else {"whole": partial(_forward, transformer, inputs)}
        steps = {**whole, **found.steps}
        errors = {name: error(step(), exact) for name, step in steps.items()}
        errors = {name: max(e[name] for e in timing.gather(errors)) for name in errors}
        check(errors)
        del exact
        times: dict[str, dict[str, timing.Times]] = {}
        host: dict[str, dict[str, float]] = {}
        splits: dict[str, Split | None] = {}
        for group in (g for g in GROUPS if g in groups):
            kind, _, graph = group.partition("_")
            functions = found.steps if kind == "step" else found.layers
            flop = layers * model.layer_flop if kind == "step" else model.attention_flop
            call_ns = flop / world / _FLOP_PER_NS
            calls = timing.launches_for(call_ns, budget_ns=1e7, least=1 if kind == "step" or call_ns > 1e7 else 2)
            if graph and model.odd(world):
                functions = {name: f for name, f in functions.items() if "diffusers_" not in name}
            with _captured(functions, calls, group, found.missing) if graph else _eager(functions, calls) as timed:
                if not timed:
                    continue
                if not graph:
                    host[group] = _host_ns(timed, calls)
                once = len(timed) * (2 * calls * call_ns / 1e9 + pause_s + 0.01)
                turns = max(min(rounds, LEAST_ROUNDS), min(rounds, int(ROW_S / len(groups) / once)))
                times[group] = timing.interleaved(timed, calls=calls, rounds=turns, pause_s=pause_s)
                splits[group] = found.split()
        for operator in found.operators():
            operator.check()
        timing.meet()
    finally:
        found.close()
    return {
        "name": model.name, "layers": layers, "depth": model.depth, "heads": model.heads, "head_dim": model.head_dim,
        "sequence": model.sequence, "text": model.text, "image": model.image, "ulysses_anything": model.odd(world),
        "split": {group: [s.first, s.ctas] if s else None for group, s in splits.items()},
        "derived": derived(times, exchange_bound_ns(model, world, load_platform(PLATFORM, samples=False))),
        "errors": {name: float(f"{e:.4g}") for name, e in errors.items()}, "host_ns": host,
        "groups": {group: {name: t.to_json() for name, t in measured.items()} for group, measured in times.items()},
        "missing": found.missing,
    }  # fmt: skip


@contextmanager
def _eager(functions: Mapping[str, Step], calls: int) -> Iterator[dict[str, Callable[[], Any]]]:
    yield {name: partial(_repeat, function, calls) for name, function in functions.items()}


@contextmanager
def _captured(
    functions: Mapping[str, Step], calls: int, group: str, missing: dict[str, str]
) -> Iterator[dict[str, Callable[[], Any]]]:  # fmt: skip
    """Graphs of those that can be captured; the others are named in `missing`."""
    timed: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        timing.meet()
        reason = _why_not(lambda name=name, function=function: timed.update({name: serial.graphed(function, calls, 1)}))  # type: ignore[misc]
        if reason:
            timed.pop(name, None)
            missing[f"{group}: {name}"] = reason
    yield timed
    timed.clear()


def _repeat(function: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        function()


def _host_ns(timed: Mapping[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """What a call takes the slowest host to launch, the GPU idle before: where that is more than the GPU's time, the host is measured."""
    mine: dict[str, float] = {}
    for name, function in timed.items():
        spent = []
        for _ in range(3):
            timing.meet()
            begun = time.perf_counter()
            function()
            spent.append((time.perf_counter() - begun) * 1e9 / calls)
        mine[name] = median(spent)
    timing.meet()
    everyone = timing.gather(mine)
    return {name: round(max(one[name] for one in everyone), 1) for name in mine}
