"""Ulysses context parallelism for diffusers transformers on `AttentionA2A.ulysses`: attention with both of its exchanges.

    from xstage.integrations.diffusers import disable, enable

    enable(pipe)                # or a transformer; every rank calls it, then uses the pipeline as before
    image = pipe(...).images[0]
    disable(pipe)

What is diffusers': the model's context-parallel plan says which tensors are split over the ranks; its hooks split them; its processors
call its attention dispatcher. What is added: an attention backend, one per backend that the processors had (`_backend`), which sends q, k
and v to the ranks of their heads and runs attention whose rows go back; and hooks that put the output together again. Nothing of diffusers
is changed but the model's own attributes, which `disable` puts back.

A sequence is cut as `torch.tensor_split` cuts it, every stream (text, image) by itself. A rank's rows of all streams are contiguous in
the sequence that attention sees: full attention does not mind the order of its keys.

HunyuanVideo and CogVideoX, for which diffusers has no plan, have one here. HunyuanVideo would tell its attention of padded text by a mask;
so padding is cut off before the forward, which asks the device for the prompt's length once per forward. CogVideoX's processors do not call
the dispatcher; while it is enabled, others do their work (`_CogVideoXProcessor`).

How many rows each rank has is agreed on the host once per kind of forward and attention call; later forwards with inputs of the same shapes
say nothing (`_Ulysses._of_all_ranks`).

Under `torch.compile` an attention call is a graph break: what is between them is compiled.

Not covered: gradients, causal and grouped-query attention, masks per query: refused. Attention with a mask over keys, or with keys
of another length than its queries, is exchanged without the fused kernel, and says so once.
"""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xstage.attention import serial
from xstage.attention.layout import SequenceLayout, head_shards
from xstage.attention.op import AttentionA2A
from xstage.errors import UnsuitableMachine, XStageError
from xstage.symmetric import Agreement, joined, next_number

try:
    from diffusers.hooks import HookRegistry, ModelHook
    from diffusers.hooks.context_parallel import _get_submodule_by_name, apply_context_parallel, remove_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelInput, ContextParallelOutput, ParallelConfig
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
    from diffusers.models.attention_processor import Attention, CogVideoXAttnProcessor2_0, MochiAttention
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.modeling_utils import ModelMixin
except ImportError as error:
    raise UnsuitableMachine(f"diffusers: {error} (pip install 'xstage[diffusers]')") from error

OPTIONS = ("max_sequence", "max_batch", "buffers", "variant", "timeout_s", "fallback", "first_heads")
# What `tests/test_diffusers.py` holds against the whole model.
TESTED = (
    "WanTransformer3DModel", "ChronoEditTransformer3DModel", "FluxTransformer2DModel", "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel", "LTXVideoTransformer3DModel", "HunyuanVideoTransformer3DModel", "CogVideoXTransformer3DModel",
)  # fmt: skip
# Plans for models to which diffusers gives none.
_PLANS: dict[str, dict[str, Any]] = {
    "HunyuanVideoTransformer3DModel": {
        "x_embedder": {0: ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)},
        "context_embedder": {0: ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)},
        "rope": {i: ContextParallelInput(split_dim=0, expected_dims=2, split_output=True) for i in range(2)},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    },
    "CogVideoXTransformer3DModel": {
        "": {"image_rotary_emb": [ContextParallelInput(split_dim=0, expected_dims=2) for _ in range(2)]},
        "transformer_blocks.0": {
            name: ContextParallelInput(split_dim=1, expected_dims=3) for name in ("hidden_states", "encoder_hidden_states")
        },
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    },
}
# Modules whose attention stays as it is: of whole text, which is small and the same on every rank. LTX: cross-attention, whose text
# diffusers' plan splits as well. HunyuanVideo: what refines the text, before it is split.
_LOCAL_LAYERS = {"LTXVideoTransformer3DModel": "attn2", "HunyuanVideoTransformer3DModel": "context_embedder"}
_PADDED = ("HunyuanVideoTransformer3DModel",)  # see `_without_padding`
_GATHER = "xstage_gather---{}"
_ENABLED = "_xstage_enabled"  # attribute of a model


def enable(
    model: Any, group: dist.ProcessGroup | DeviceMesh | None = None, *, plan: dict[str, Any] | None = None, copy: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    """Split a transformer's sequence over the ranks of a group. Every rank calls it, and then runs the model on the same inputs.

    Args:
        model: a diffusers transformer, or a pipeline: then every component with a context-parallel plan.
        group: process group (None: the default one), or a device mesh: of one dimension, or with one that is named `ulysses`.
        plan: instead of the model's `_cp_plan`.
        copy: attention outputs are tensors of their own instead of views of the operator's buffers: for code that keeps
            an attention output beyond the next attention call.
        options: `max_sequence` and `max_batch` (buffers of at least that size from the start; they grow when a call needs it), and
            `buffers`, `variant`, `timeout_s`, `fallback` of `AttentionA2A`; `first_heads` of `AttentionA2A.ulysses`.

    A model that is not one of `TESTED` is taken with a warning.

    Raises:
        XStageError: the model has no plan, has other parallelism, has attention that does not go through diffusers' dispatcher, or
            fewer heads than there are ranks; the group has one rank; or the ranks were given different models.
        PeerTimeout: a rank did not call it.
    """
    for name in options:
        if name not in OPTIONS:
            raise XStageError(f"{name}: not an option; the options are {', '.join(OPTIONS)}")
    mesh = _mesh(group, model)
    models = _models(model, plan)
    world = mesh.size()
    for transformer in models:
        _check(transformer, world)
    ulysses = _Ulysses(mesh, copy, options)
    names = [type(m).__name__ for m in models]
    ulysses.agreement.same("enable", {"models": names, "options": sorted(f"{name}={value}" for name, value in options.items())})
    changes = [_Enabled(m, ulysses, plan or _plan_of(m)) for m in models]
    try:
        for number, transformer in enumerate(models):
            setattr(transformer, _ENABLED, changes[number])
            changes[number].apply(number)
    except BaseException:
        disable(model)
        raise


def disable(model: Any) -> None:
    """Undo `enable` on the same transformer or pipeline: its attributes are as before, buffers are freed. Every rank calls it.

    Raises:
        XStageError: it is not enabled.
    """
    modules = [model] if isinstance(model, torch.nn.Module) else getattr(model, "components", {}).values()
    found = [m for m in modules if _ENABLED in getattr(m, "__dict__", {})]
    if not found:
        raise XStageError(f"model: context parallelism is not enabled on this {type(model).__name__}")
    for transformer in found:
        getattr(transformer, _ENABLED).restore()
        delattr(transformer, _ENABLED)


class _Ulysses(ParallelConfig):
    """diffusers' configuration object, which reaches every attention call, with what a call needs: group, operators, rows of all ranks."""

    def __init__(self, mesh: DeviceMesh, copy: bool, options: dict[str, Any]):
        context = ContextParallelConfig(ulysses_degree=mesh.size(), ulysses_anything=True)
        # What `setup` would do; it wants a second dimension, and a rank per accelerator.
        context._mesh = context._flattened_mesh = context._ulysses_mesh = mesh
        context._ulysses_local_rank, context._ring_local_rank = mesh.get_local_rank(), 0
        super().__init__(context_parallel_config=context)
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.world = self.group.rank(), self.group.size()
        tag = f"diffusers/{self.group.group_name}/{next_number(self.group, 'diffusers')}"
        self.agreement = Agreement(self.group, tag, options.get("timeout_s", 30.0))
        self.forward: Any = None  # what is the same on all ranks about the forward that runs; None: not known
        self.unpadded = False  # a mask of the forward that runs masks nothing
        self._turn, self._known = 0, dict[Any, list[tuple[int, ...]]]()
        self._copy, self._operators = copy, dict[Any, AttentionA2A]()
        self._options, self._first_heads = {k: v for k, v in options.items() if k != "first_heads"}, options.get("first_heads")
        self.models = 0  # that use it

    @torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
    def begin(self, forward: Any) -> None:
        """A model's forward begins (None: ends)."""
        self.forward, self._turn = forward, 0
        if forward is None:
            self.unpadded = False

    @torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
    def without_padding(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward without padding behind the text, which then needs no mask.

        Raises:
            XStageError: prompts of unequal length, or text that is not in front.
        """
        given = dict(inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments)
        given.pop("self")
        mask = given["encoder_attention_mask"].bool()
        lengths = mask.sum(1).tolist()
        if len(set(lengths)) > 1:
            raise XStageError(f"encoder_attention_mask: prompts of {min(lengths)} and {max(lengths)} tokens; they must be of equal length")
        if not bool(mask[:, : lengths[0]].all()):
            raise XStageError("encoder_attention_mask: padding before text; text must come first")
        for name in ("encoder_hidden_states", "encoder_attention_mask"):
            given[name] = given[name][:, : lengths[0]]
        self.unpadded = True
        return (), given

    def close(self) -> None:
        """Free the operators' buffers."""
        for operator in self._operators.values():
            operator.close()
        self._operators.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, dropout_p: float = 0.0,
        scale: float | None = None, inner: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of [batch, my rows, all heads, head dim] over the rows of all ranks.

        Args:
            k, v: as q, with rows of their own. mask: over my keys (`_whole_mask`). inner: backend where the operator does not fit.

        Returns:
            [batch, my rows, all heads, head dim]; a view of the operator's buffer, or a tensor of its own.
        """
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise XStageError("query: requires a gradient; there is no backward (use torch.no_grad())")
        if not q.shape[2] == k.shape[2] == v.shape[2]:
            raise XStageError(f"key: {k.shape[2]} heads; it must have as many as query ({q.shape[2]})")
        mask = None if self.unpadded else mask
        heads = _heads(q.shape[2], self.world)
        sizes = self._of_all_ranks((q.shape[1], k.shape[1], -1 if mask is None else mask.shape[-1]))
        q_rows, k_rows, mask_rows = (tuple(column) for column in zip(*sizes, strict=True))
        if mask is not None:
            mask = self._whole_mask(mask, q.shape[0], heads, k_rows, mask_rows)
        if mask is None and q_rows == k_rows and not dropout_p:
            operator = self._operator(q, q_rows, sum(heads))
            chosen = {"copy": self._copy, "first_heads": self._first_heads}
            return operator.ulysses(q, k, v, softmax_scale=scale, layout=_shards(q_rows), **chosen)
        why = "a mask" if mask is not None else "keys of another length" if q_rows != k_rows else "dropout"
        _warn_once(f"attention with {why} is exchanged after it ended, not by the fused kernel")
        q, k, v = (serial.to_heads(x, rows, heads, self.group) for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows)))
        out = dispatch_attention_fn(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale, backend=inner)
        return _to_rows(out, q_rows, heads, self.group)

    @torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
    def gather(self, x: torch.Tensor, dim: int, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The whole of a tensor that the ranks hold in parts along `dim` (`rows` of each rank, None: not known yet)."""
        rows = [size[0] for size in self._of_all_ranks((x.shape[dim],))] if rows is None else rows
        x = x.movedim(dim, 0)
        part = x.new_zeros(max(rows), *x.shape[1:])
        part[: x.shape[0]] = x
        parts = [torch.empty_like(part) for _ in rows]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat([p[:n] for p, n in zip(parts, rows, strict=True)]).movedim(0, dim)

    def _of_all_ranks(self, mine: tuple[int, ...]) -> list[tuple[int, ...]]:
        """`mine` of every rank, for this forward's next call.

        It is asked for once per call of a kind of forward. A kind is what all ranks see alike, the whole inputs: a rank's own sizes may
        stay while another's change, and then one rank would ask and the other not.
        """
        key, turn = (self.forward, self._turn), self._turn
        self._turn += 1
        said = self._known.get(key)
        if said is None:
            check = zlib.crc32(repr(self.forward).encode())
            answers = self.agreement.reach("rows", [check, *mine])
            for rank, (theirs, *_) in enumerate(answers):
                if theirs != check:
                    raise XStageError(f"inputs: rank {rank} of the group runs the model on other shapes than rank {self.rank}")
            said = [tuple(sizes) for _, *sizes in answers]
            if self.forward is not None:
                self._known[key] = said
        if said[self.rank] != mine:
            raise XStageError(
                f"query: exchange {turn} is of {mine} rows; in a forward on inputs of the same shapes it was of {said[self.rank]}"
            )
        return said

    def _operator(self, q: torch.Tensor, rows: Sequence[int], heads: int) -> AttentionA2A:
        """The operator for such calls; it grows where this one needs more than it has room for. All ranks see the same numbers."""
        key = (heads, q.shape[3], q.dtype, q.device)
        operator, need = self._operators.get(key), {"max_sequence": sum(rows), "max_local_rows": max(rows), "max_batch": q.shape[0]}
        if operator is not None and all(n <= getattr(operator, name) for name, n in need.items()):
            return operator
        options = dict(self._options)
        for name in need:
            need[name] = max(need[name], options.pop(name, 1), getattr(operator, name, 1))
        need["max_local_rows"] = max(need["max_local_rows"], -(-need["max_sequence"] // self.world))
        if operator is not None:
            operator.close()
        operator = self._operators[key] = AttentionA2A(
            self.group, heads=heads, head_dim=q.shape[3], dtype=q.dtype, device=q.device, **need, **options
        )
        return operator

    def _whole_mask(
        self, mask: torch.Tensor, batch: int, heads: Sequence[int], rows: Sequence[int], mask_rows: Sequence[int]
    ) -> torch.Tensor:
        """A mask over my keys, [batch, my rows] or [batch, 1 or heads, 1, my rows], for all keys and my heads."""
        over_keys = (mask.dim() == 2 and mask.shape[0] == batch) or (mask.dim() == 4 and mask.shape[2] == 1)
        if not over_keys:
            raise XStageError(f"attn_mask: shape {tuple(mask.shape)} is not over keys, [batch, keys] or [batch, heads, 1, keys]")
        if tuple(mask_rows) != tuple(rows):
            raise XStageError(f"attn_mask: {mask.shape[-1]} keys; this rank has {rows[self.rank]} (a plan must split it as the keys)")
        mask = self.gather(mask, mask.dim() - 1, rows)
        return mask.split(list(heads), 1)[self.rank] if mask.dim() == 4 and mask.shape[1] > 1 else mask


class _Enabled:
    """What `enable` did to one model, and how to undo it."""

    def __init__(self, model: Any, ulysses: _Ulysses, plan: dict[str, Any]):
        self._model, self._ulysses = model, ulysses
        if type(model).__name__ in _LOCAL_LAYERS:
            plan = {name: _without_text(entry) if isinstance(entry, dict) else entry for name, entry in plan.items()}
        self._splits = {name: entry for name, entry in plan.items() if isinstance(entry, dict)}
        self._gathers: list[tuple[Any, str, list[Any]]] = []
        for name, entry in plan.items():
            modules = _submodules(model, name)
            if not isinstance(entry, dict):
                outputs = list(entry) if isinstance(entry, list | tuple) else [entry]
                self._gathers += [(module, _GATHER.format(name), outputs) for module in modules]
        self._attributes: list[tuple[Any, str, bool, Any]] = []
        self._handles: list[Any] = []
        self._bare = [m for m in model.modules() if "_diffusers_hook" not in vars(m)]
        self._plain = [m for m in model.modules() if "forward" not in vars(m)]
        ulysses.models += 1

    def apply(self, number: int) -> None:
        """`number` tells models apart that share operators."""
        model, ulysses = self._model, self._ulysses
        for _, module, processor in _processors(model):
            if type(processor) is CogVideoXAttnProcessor2_0:
                self._set(module, "processor", _CogVideoXProcessor())
        processors = {id(p): p for _, _, p in _processors(model)}
        for processor in processors.values():
            self._set(processor, "_attention_backend", _backend(processor._attention_backend))
            self._set(processor, "_parallel_config", ulysses)
        self._set(model, "_parallel_config", ulysses)
        apply_context_parallel(model, ulysses.context_parallel_config, self._splits)
        for module, name, outputs in self._gathers:
            HookRegistry.check_if_exists_or_initialize(module).register_hook(_Gather(outputs, ulysses), name)
        if type(model).__name__ in _PADDED:
            self._handles.append(model.register_forward_pre_hook(ulysses.without_padding, with_kwargs=True))
        self._handles += [
            model.register_forward_pre_hook(lambda _, args, kwargs: ulysses.begin((number, _kind([args, kwargs]))), with_kwargs=True),
            model.register_forward_hook(lambda *_: ulysses.begin(None), always_call=True),
        ]
        _forget_children(model)

    def restore(self) -> None:
        """Undo what `apply` did, or began to do; free the operators if no other model uses them."""
        for handle in self._handles:
            handle.remove()
        for module, name, _ in self._gathers:
            HookRegistry.check_if_exists_or_initialize(module).remove_hook(name, recurse=False)
        remove_context_parallel(self._model, self._splits)
        _forget_children(self._model)
        for module in self._bare:
            registry = vars(module).get("_diffusers_hook")
            if registry is not None and not registry.hooks:
                del module._diffusers_hook
        for module in self._plain:
            forward = vars(module).get("forward")
            if forward is not None and getattr(forward, "__func__", None) is type(module).forward:
                del module.forward
        for target, name, own, value in reversed(self._attributes):
            if own:
                setattr(target, name, value)
            else:
                delattr(target, name)
        self._ulysses.models -= 1
        if not self._ulysses.models:
            self._ulysses.close()

    def _set(self, target: Any, name: str, value: Any) -> None:
        self._attributes.append((target, name, name in vars(target), getattr(target, name)))
        setattr(target, name, value)


class _CogVideoXProcessor:
    """What `CogVideoXAttnProcessor2_0` does, by diffusers' attention dispatcher."""

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        text, both = encoder_hidden_states.shape[1], torch.cat([encoder_hidden_states, hidden_states], 1)
        q, k, v = (project(both).unflatten(2, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v))
        q, k = q if attn.norm_q is None else attn.norm_q(q), k if attn.norm_k is None else attn.norm_k(k)
        if image_rotary_emb is not None:
            q, k = (torch.cat([x[:, :text], apply_rotary_emb(x[:, text:], image_rotary_emb, sequence_dim=1)], 1) for x in (q, k))
        chosen = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        out = attn.to_out[1](attn.to_out[0](dispatch_attention_fn(q, k, v, attn_mask=attention_mask, **chosen).flatten(2)))
        return out[:, text:], out[:, :text]


class _Gather(ModelHook):
    """diffusers' gather hook, for parts of unequal length over any back end, and without asking for lengths that are known."""

    def __init__(self, outputs: list[Any], ulysses: _Ulysses):
        super().__init__()
        self._outputs, self._ulysses = outputs, ulysses

    def post_forward(self, module: Any, output: Any) -> Any:
        parts = [output] if isinstance(output, torch.Tensor) else list(output)
        if len(parts) != len(self._outputs):
            raise XStageError(f"plan: {len(self._outputs)} outputs for {type(module).__name__}, which has {len(parts)}")
        whole = [p if o is None else self._ulysses.gather(p, o.gather_dim) for p, o in zip(parts, self._outputs, strict=True)]
        return whole[0] if isinstance(output, torch.Tensor) else tuple(whole)


@lru_cache
def _backend(inner: Any) -> Any:
    """An attention backend for diffusers' dispatcher, for processors whose backend was `inner` (None: the one that is active at the call).

    Its name is an `AttentionBackendName` that is no member of the enumeration: the dispatcher takes it, and no list of names changes.
    """
    text = "xstage" if inner is None else f"xstage/{AttentionBackendName(inner).value}"
    name: Any = str.__new__(AttentionBackendName, text)
    name._name_ = name._value_ = text

    @_AttentionBackendRegistry.register(name, supports_context_parallel=True)
    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, _parallel_config: Any = None,
    ) -> Any:  # fmt: skip
        if not isinstance(_parallel_config, _Ulysses):
            return dispatch_attention_fn(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend=inner, parallel_config=_parallel_config
            )
        if is_causal:
            raise XStageError("is_causal: True; causal attention cannot be split here")
        return _parallel_config.attend(query, key, value, attn_mask, dropout_p, scale, inner)

    return name


def _to_rows(x: torch.Tensor, rows: Sequence[int], heads: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """[batch, all rows, my heads, head dim] → [batch, my rows, all heads, head dim]."""
    me, (batch, _, _, dim) = group.rank(), x.shape
    send = x.transpose(0, 1).reshape(-1)
    sizes = [rows[me] * n * batch * dim for n in heads]
    got = x.new_empty(sum(sizes))
    dist.all_to_all_single(got, send, sizes, [n * heads[me] * batch * dim for n in rows], group=group)
    parts = [part.view(rows[me], batch, n, dim) for part, n in zip(got.split(sizes), heads, strict=True)]
    return torch.cat(parts, 2).transpose(0, 1)


def _mesh(group: Any, model: Any) -> DeviceMesh:
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or ()
        if group.ndim > 1 and "ulysses" not in names:
            raise XStageError(f"group: a mesh of dimensions {names}; it must have one dimension or one that is named 'ulysses'")
        mesh = group if group.ndim == 1 else group["ulysses"]
    else:
        device = getattr(model, "device", torch.device("cpu"))
        mesh = DeviceMesh.from_group(joined(group), device.type, mesh_dim_names=("ulysses",))
    if mesh.size() < 2:
        raise XStageError("group: it has 1 rank; context parallelism needs 2 or more")
    return mesh


def _models(model: Any, plan: Any) -> list[Any]:
    """The transformers to enable: `model` itself, or a pipeline's components that have a plan."""
    if isinstance(model, ModelMixin):
        if plan is None and _plan_of(model) is None:
            raise XStageError(f"plan: {type(model).__name__} has no context-parallel plan (`_cp_plan`), and none was given")
        return [model]
    if plan is not None:
        raise XStageError("plan: only for a transformer, not for a pipeline")
    parts = getattr(model, "components", None)
    if not isinstance(parts, dict):
        raise XStageError(f"model: {type(model).__name__} is neither a diffusers model nor a pipeline")
    found = [m for m in parts.values() if isinstance(m, ModelMixin) and _plan_of(m) is not None]
    if not found:
        raise XStageError(f"model: no component of {type(model).__name__} has a context-parallel plan (`_cp_plan`)")
    return found


def _plan_of(model: Any) -> Any:
    """diffusers' plan, or ours, or None."""
    plan = model._cp_plan or _PLANS.get(type(model).__name__)
    if plan and getattr(model.config, "use_rotary_positional_embeddings", True) is False:  # CogVideoX: then it is not given them
        return {name: entry for name, entry in plan.items() if name}
    return plan


def _check(model: Any, world: int) -> None:
    name = type(model).__name__
    if getattr(model.config, "image_condition_type", None) == "token_replace":
        raise XStageError(f"model: this {name} treats its first frame apart ('token_replace'); it cannot be split")
    if model._parallel_config is not None:
        raise XStageError(f"model: parallelism is already enabled on this {name}")
    found = list(_processors(model))
    if not found:
        raise XStageError(f"model: {name} has no attention layers of diffusers' classes")
    for layer, module, processor in found:
        if type(processor) is CogVideoXAttnProcessor2_0:
            continue
        if not hasattr(processor, "_parallel_config") or not hasattr(processor, "_attention_backend"):
            raise XStageError(f"model: {layer}.processor, a {type(processor).__name__}, does not use diffusers' attention dispatcher")
        heads = getattr(module, "heads", None)
        if isinstance(heads, int):
            _heads(heads, world)
    if name not in TESTED:
        _warn_once(f"{name} split over ranks has not been tested; compare with one rank")


def _processors(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, module, processor) of the attention layers that are to be split."""
    local = _LOCAL_LAYERS.get(type(model).__name__)
    for name, module in model.named_modules():
        if isinstance(module, (Attention, MochiAttention, AttentionModuleMixin)) and local not in name.split("."):
            yield name, module, module.processor


def _submodules(model: Any, name: str) -> list[Any]:
    try:
        found = _get_submodule_by_name(model, name)
    except ValueError as error:
        raise XStageError(f"plan: {name!r}: {error}") from error
    return found if isinstance(found, list) else [found]


def _heads(heads: int, world: int) -> tuple[int, ...]:
    if heads < world:
        raise XStageError(f"heads: {heads} heads over {world} ranks; each rank needs one or more")
    return head_shards(heads, heads, world)[0]


@lru_cache
def _shards(rows: tuple[int, ...]) -> SequenceLayout:
    return SequenceLayout.shards(rows)


@lru_cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _without_text(entry: dict[Any, Any]) -> dict[Any, Any]:
    return {name: split for name, split in entry.items() if not str(name).startswith("encoder_")}


def _forget_children(model: Any) -> None:
    """diffusers keeps a list of the hooked modules below a hooked one."""
    if hasattr(model, "_diffusers_hook"):
        model._diffusers_hook.invalidate_child_registries_cache()


def _kind(value: Any) -> Any:
    """What every rank sees alike in a forward's arguments: shapes, counts and switches, not contents."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((str(name), _kind(v)) for name, v in sorted(value.items(), key=lambda item: str(item[0])))
    if isinstance(value, list | tuple):
        return tuple(_kind(v) for v in value)
    return value if isinstance(value, int | str | None) else type(value).__name__
