"""The bridge to diffusers: small transformers of each family, split over 2 and 3 gloo processes, against the same model on one.

In float64 the two agree to 1e-12; in float32 and bfloat16 the split model is at most twice as far from float64 as the whole one is. One
set of processes per world size runs all cases, because starting them costs seconds. Not covered: GPUs, and so the fused kernel itself.
"""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from xstage.errors import XStageError

diffusers = pytest.importorskip("diffusers")
import diffusers_models as models  # noqa: E402

LENGTHS = ((8, 12), (7, 13))  # of text and image; 2 ranks divide the first, 3 neither
FUSED_CALLS = {"FLUX": 4, "FLUX.2": 4, "Qwen-Image masked": 0}  # layers whose attention the operator runs; else 2


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[Any]]:
    """A list that gets an entry per call of a method."""
    calls, method = [], getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, count)
    try:
        yield calls
    finally:
        setattr(owner, name, method)


def state(model: Any) -> list[Any]:
    """What `enable` could leave behind: attributes of modules and processors, hooks, forwards."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found.append((name, sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks), vars(module).get("forward")))
        found.append(sorted(getattr(vars(module).get("_diffusers_hook"), "hooks", {})))
        found.append(sorted((k, v) for k, v in vars(getattr(module, "processor", None) or object).items() if k.startswith("_a")))
        found.append(getattr(getattr(module, "processor", None), "_parallel_config", None))
    return [*found, model._parallel_config]


def in_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def check_families(rank: int, world: int) -> None:
    from xstage.attention.op import AttentionA2A
    from xstage.integrations.diffusers import disable, enable

    def agrees(family: str, lengths: tuple[int, int], dtype: torch.dtype) -> None:
        model, inputs = models.build(family, *lengths, dtype)
        truth = copy.deepcopy(model).double()(**in_double(inputs), return_dict=False)[0]
        whole = model(**inputs, return_dict=False)[0]
        before = state(model)
        enable(model)
        with counted(AttentionA2A, "ulysses") as calls:
            split = model(**inputs, return_dict=False)[0]
        assert len(calls) == FUSED_CALLS.get(family, 2)
        assert torch.equal(model(**inputs, return_dict=False)[0], split)  # row counts are known now
        disable(model)
        assert state(model) == before
        assert torch.equal(model(**inputs, return_dict=False)[0], whole)
        if dtype == torch.float64:
            torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
        else:
            assert (split - truth).abs().max() <= 2 * (whole - truth).abs().max()

    for family in models.FAMILIES:
        for lengths in LENGTHS:
            agrees(family, lengths, torch.float64)
        for dtype in (torch.float32, torch.bfloat16):
            agrees(family, LENGTHS[1], dtype)


def check_exchange(rank: int, world: int) -> None:
    """`_Ulysses.attend` alone: keys of another length than queries, masks, heads that ranks do not divide, dropout's path."""
    from torch.nn.functional import scaled_dot_product_attention

    from xstage.integrations.diffusers import _mesh, _Ulysses

    ulysses = _Ulysses(_mesh(None, None), False, {})
    torch.manual_seed(1)
    for heads in (4, 5):
        whole_q, whole_k, whole_v = (torch.randn(2, n, heads, 8, dtype=torch.float64) for n in (11, 14, 14))
        keep = torch.rand(2, heads, 1, 14) > 0.4
        q, k, v = (x.tensor_split(world, 1)[rank] for x in (whole_q, whole_k, whole_v))
        for mask in (None, keep, keep[:, :1], keep[:, 0, 0]):
            local = None if mask is None else mask.tensor_split(world, -1)[rank]
            out = ulysses.attend(q, k, v, local)
            whole_mask = mask[:, None, None] if mask is not None and mask.dim() == 2 else mask
            expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (whole_q, whole_k, whole_v)), attn_mask=whole_mask)
            torch.testing.assert_close(out, expected.transpose(1, 2).tensor_split(world, 1)[rank], rtol=1e-12, atol=1e-12)
        for wrong in (keep[:, 0], keep):  # of three dimensions; of all keys
            with pytest.raises(XStageError, match="attn_mask"):
                ulysses.attend(q, k, v, wrong)
    with pytest.raises(XStageError, match=r"key: 2 heads.*query \(5\)"):
        ulysses.attend(q, k[:, :, :2], v[:, :, :2])
    with torch.enable_grad(), pytest.raises(XStageError, match="gradient"):
        ulysses.attend(q.clone().requires_grad_(), k, v)
    ulysses.close()


def check_uses(rank: int, world: int) -> None:
    """Lengths that change, options, hooks of others, a backend that was chosen, a pipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
    from diffusers.hooks import HookRegistry, ModelHook
    from diffusers.models.attention_dispatch import AttentionBackendName
    from torch.distributed.device_mesh import init_device_mesh

    from xstage.integrations.diffusers import disable, enable
    from xstage.symmetric import Agreement

    # Other lengths, and back: buffers grow, and nothing is said on the host about lengths that were seen.
    model, _ = models.build("FLUX", 8, 12, torch.float64)
    inputs = [models.build("FLUX", *lengths, torch.float64)[1] for lengths in ((8, 12), (9, 21), (8, 12))]
    whole = [model(**i, return_dict=False)[0] for i in inputs]
    enable(model, init_device_mesh("cpu", (1, world), mesh_dim_names=("ring", "ulysses")), max_sequence=20, copy=True)
    for i, expected in zip(inputs, whole, strict=True):
        torch.testing.assert_close(model(**i, return_dict=False)[0], expected, rtol=1e-12, atol=1e-12)
    with counted(Agreement, "reach") as said:
        model(**inputs[1], return_dict=False)
    assert not said
    if world == 2:  # a rank that is given other inputs
        other = models.build("FLUX", 8, 14 + 2 * rank, torch.float64)[1]
        with pytest.raises(XStageError, match=r"inputs: rank [01] of the group runs the model on other shapes"):
            model(**other)
    with pytest.raises(XStageError, match="already enabled"):
        enable(model)
    with torch.enable_grad(), pytest.raises(XStageError, match="gradient"):
        model(**inputs[0])
    disable(model)
    with pytest.raises(XStageError, match="not enabled"):
        disable(model)

    if world == 2:  # compiled
        model, some = models.build("Wan", 5, 9, torch.float64)
        expected = model(**some, return_dict=False)[0]
        enable(model)
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(**some, return_dict=False)[0], expected, rtol=1e-12, atol=1e-12)
        disable(model)

    if world == 3:  # a group of some ranks
        pair = dist.new_group([1, 2])
        model, some = models.build("Qwen-Image", 5, 9, torch.float64)
        if rank:
            expected = model(**some, return_dict=False)[0]
            enable(model, pair)
            torch.testing.assert_close(model(**some, return_dict=False)[0], expected, rtol=1e-12, atol=1e-12)
            disable(model)

    # Heads that ranks do not divide are dealt out unevenly.
    torch.manual_seed(0)
    model, some = models.wan(5, 9, heads=5)
    expected = model(**some, return_dict=False)[0]
    enable(model)
    torch.testing.assert_close(model(**some, return_dict=False)[0], expected)
    disable(model)

    # Hooks of others, made before and during, are called and stay. A chosen backend goes on where attention is not split.
    class Double(ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return output * 2

    model, some = models.build("Wan", 5, 9, torch.float64)
    HookRegistry.check_if_exists_or_initialize(model.proj_out).register_hook(Double(), "before")
    for processor in model.attn_processors.values():
        processor._attention_backend = AttentionBackendName._NATIVE_MATH
    expected, before = model(**some, return_dict=False)[0], state(model)
    enable(model)
    assert {p._attention_backend.value for p in model.attn_processors.values()} == {"xstage/_native_math"}
    torch.testing.assert_close(model(**some, return_dict=False)[0], expected, rtol=1e-12, atol=1e-12)
    model.proj_out._diffusers_hook.register_hook(Double(), "during")
    torch.testing.assert_close(model(**some, return_dict=False)[0], 2 * expected, rtol=1e-12, atol=1e-12)
    disable(model)
    torch.testing.assert_close(model(**some, return_dict=False)[0], 2 * expected, rtol=1e-12, atol=1e-12)
    model.proj_out._diffusers_hook.remove_hook("during")
    assert state(model) == before

    # A pipeline, end to end.
    model, _ = models.build("FLUX", 8, 12, torch.float32)
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, model)
    pipe.set_progress_bar_config(disable=True)
    prompt = {"prompt_embeds": torch.randn(1, 7, 32), "pooled_prompt_embeds": torch.randn(1, 32)}

    def latents() -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        return pipe(**prompt, height=48, width=80, num_inference_steps=2, output_type="latent", generator=generator).images

    expected = latents()
    enable(pipe)
    torch.testing.assert_close(latents(), expected)
    disable(pipe)
    assert torch.equal(latents(), expected)

    # A pipeline with two transformers, which share operators; and one of the two alone.
    (first, some), (second, _) = (models.build("Wan", 5, 9, torch.float64, seed=seed) for seed in (0, 1))
    both = SimpleNamespace(components={"transformer": first, "scheduler": None, "transformer_2": second}, device=first.device)
    expected = [m(**some, return_dict=False)[0] for m in (first, second)]
    enable(both)
    disable(first)
    assert torch.equal(first(**some, return_dict=False)[0], expected[0])
    torch.testing.assert_close(second(**some, return_dict=False)[0], expected[1], rtol=1e-12, atol=1e-12)
    disable(both)
    assert torch.equal(second(**some, return_dict=False)[0], expected[1])


def check_refusals(rank: int, world: int) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, MochiTransformer3DModel
    from torch.distributed.device_mesh import init_device_mesh

    from xstage.integrations.diffusers import disable, enable

    mochi = MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16, in_channels=4, text_embed_dim=16,
        time_embed_dim=4, max_sequence_length=8,
    )  # fmt: skip
    with pytest.raises(XStageError, match="plan: MochiTransformer3DModel has no context-parallel plan"):
        enable(mochi)
    with pytest.raises(XStageError, match=r"processor, a MochiAttnProcessor2_0, does not use diffusers' attention dispatcher"):
        enable(mochi, plan={"proj_out": None})
    with pytest.raises(XStageError, match="model: this HunyuanVideoTransformer3DModel treats its first frame apart"):
        enable(models.hunyuan(5, 9, image_condition_type="token_replace")[0])
    hunyuan, some = models.hunyuan(5, 9)
    enable(hunyuan)
    for place, message in ((3, "prompts of 4 and 5 tokens"), (slice(0, 1), "prompts of 4 and 5 tokens")):
        mask = some["encoder_attention_mask"].clone()
        mask[0, place] = 0
        with pytest.raises(XStageError, match=f"encoder_attention_mask: {message}"):
            hunyuan(**{**some, "encoder_attention_mask": mask})
    with pytest.raises(XStageError, match="encoder_attention_mask: padding before text"):
        hunyuan(**{**some, "encoder_attention_mask": some["encoder_attention_mask"].flip(1)})
    disable(hunyuan)
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, None)
    with pytest.raises(XStageError, match="no component of FluxPipeline"):
        enable(pipe)
    with pytest.raises(XStageError, match="Linear is neither"):
        enable(torch.nn.Linear(1, 1))
    with pytest.raises(XStageError, match=f"heads: 1 heads over {world} ranks"):
        enable(models.wan(5, 9, heads=1)[0])
    model = models.wan(5, 9)[0]

    class Unknown(type(model)):  # type: ignore[misc]
        pass

    model.__class__ = Unknown
    with pytest.warns(RuntimeWarning, match="Unknown split over ranks has not been tested"):
        enable(model)
    disable(model)
    model.__class__ = Unknown.__base__
    with pytest.raises(XStageError, match="colour: not an option; the options are max_sequence"):
        enable(model, colour=1)
    with pytest.raises(XStageError, match="must have one dimension"):
        enable(model, init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b")))
    with pytest.raises(XStageError, match="enable: rank"):
        enable(model, max_batch=1 + rank)
    before = state(model)
    with pytest.raises(XStageError, match="plan: 'nothing': 'nothing' is not a submodule"):
        enable(model, plan={**model._cp_plan, "nothing": next(iter(model._cp_plan.values()))})
    assert state(model) == before
    enable(model)
    disable(model)
    assert state(model) == before


@torch.no_grad()
def cases(rank: int, world: int) -> None:
    diffusers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="attention with")
    check_exchange(rank, world)
    check_refusals(rank, world)
    check_uses(rank, world)
    check_families(rank, world)


@pytest.mark.parametrize("world", [2, 3])
def test_split_equals_whole(world: int) -> None:
    ranks.run(cases, world, limit_s=90)


def test_example() -> None:
    example = Path(__file__).parent.parent / "examples" / "diffusers_ulysses.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=80, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert "2 ranks, 213 tokens" in result.stdout
    assert "restored: True" in result.stdout


def test_refusals_alone(tmp_path: Any) -> None:
    from xstage.integrations.diffusers import enable

    model, _ = models.wan(5, 9)
    with pytest.raises(XStageError, match="init_process_group"):
        enable(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(XStageError, match="1 rank"):
            enable(model)
    finally:
        dist.destroy_process_group()
