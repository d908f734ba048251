"""Rows to their experts and results back, for the ranks of one host: everything of an expert-parallel layer but its GEMMs.

    exchange = Exchange(layout, intermediate=1024, group=group, device=device, tag="moe/0/1")
    exchange.dispatch(x, None, topk_idx, topk_weights)      # rows of all ranks are here, and what the GEMMs have to do
    …                                                       # Linear-1, SwiGLU, Linear-2, which stores results to `row_slot`
    exchange.combine(topk_idx, out)                         # meets the peers, then adds the slots of every token

`dispatch` is five kernels: count, plan (which meets the peers in its middle: `counted`), dispatch, a meeting (`dispatched`), arrange.
`combine` is two: a meeting (`combined`), reduce. Nothing waits on the host, shapes are fixed, counts live on the device: legal in CUDA
graphs whose routing changes between replays. Call both once with the same dtypes before a capture: kernels are compiled then.

One buffer serves every call. Call g + 1 overwrites nothing that call g still reads:

* A peer's dispatch of g + 1 stores into this rank's activations, scales and sources after that peer passed `combined` of g, which this
  rank published after its Linear-2, and so after `arrange` and both GEMMs have read them.
* A peer's plan of g + 1 stores into this rank's counts after it passed `combined` of g; this rank's plan of g came long before.
* A peer's Linear-2 of g + 1 stores into this rank's combine slots after that peer passed `dispatched` of g + 1, which this rank
  published after its reduce of g: kernels of a rank run in the order of its stream.

With an order both GEMMs are one kernel, which sends this rank's rows itself (`send_sm90`) while it computes on those that have arrived.
Then `dispatch` is count, plan and stage (bf16 rows in e4m3, and the list of pairs to send), nothing waits for all rows, and what a GEMM
needs of a row comes with it. The arguments are: peers send rows of g + 1 after they passed `counted` of g + 1, which this rank published
after everything of g, and after its count had cleared `arrived` and `row_slot`; a peer's Linear-2 of g + 1 stores only results of rows
that this rank sent in g + 1, after its reduce of g.

With `layout.once` rows go into the inbox of a rank, and from there to their places (`once_sm90`, which says why nothing is overwritten).
The list kernel of g + 1 stores `sources` of a peer after its plan passed `counted` of g + 1, which the peer published after all of g.

With `layout.pull`, for measurement, `dispatch` sends sources only, and a `fetch` behind the meeting reads the rows from the ranks they come
from. A rank overwrites its staged rows in g + 1 after it passed `combined` of g, which every peer published after its fetch of g.

Plan, list, the meeting `combined` and reduce are launched while the kernel before them runs (programmatic dependent launch) and wait for
its end before they touch what it writes. Two things come before that wait: what a launch takes, and rows that are quantised while `count`
runs, which needs only what was there before `count` began. No kernel lets the next one begin before its own wait for peers is over but
that of both GEMMs, whose CTAs all have their places by then, and behind it comes one warp.

So calls of an object must be ordered on each rank, and come in the same order on every rank. A wait that gives up says so at `check` or at
the next call, and nothing is stored from then on: an object that failed is not used again.

Not covered: several hosts, rings smaller than the worst routing, precisions other than fp8.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from xstage.errors import XStageError
from xstage.moe.layout import (
    CHUNK_TOKENS,
    COMBINED,
    DISPATCHED,
    ITEM_BYTES,
    ITEM_PAIRS,
    MAX_EXPERTS,
    MAX_PICKS,
    MAX_RANKS,
    PHASES,
    BufferLayout,
    Region,
)
from xstage.moe.work_table import MAX_COLUMN_TILES, MAX_ROW_TILES, TILE_COLUMNS, TILE_ROWS, WorkOrder
from xstage.symmetric import Agreement, SymmetricBuffer, Watch

HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE = 512, 256
_ROWS = {torch.bfloat16: False, torch.float8_e4m3fn: True, torch.uint8: True}  # dtype of x: is it quantised?


def check_layout(layout: BufferLayout, intermediate: int) -> None:
    """Refuse what the kernels cannot take.

    Raises:
        XStageError: naming the argument, its value and the limit.
    """
    if layout.precision != "fp8":
        raise XStageError(f"precision: {layout.precision!r} is not 'fp8', the only one with kernels")
    if layout.tile != TILE_ROWS:
        raise XStageError(f"tile: {layout.tile} is not {TILE_ROWS}, the kernels' rows of a tile")
    for name, value, multiple in (("hidden", layout.hidden, HIDDEN_MULTIPLE), ("intermediate", intermediate, INTERMEDIATE_MULTIPLE)):
        if value < 1 or value % multiple:
            raise XStageError(f"{name}: {value} must be a positive multiple of {multiple}")
    for name, value, limit in (
        ("ranks", layout.ranks, MAX_RANKS), ("top_k", layout.top_k, MAX_PICKS), ("experts", layout.experts, MAX_EXPERTS),
        ("hidden", layout.hidden // TILE_COLUMNS, MAX_COLUMN_TILES - 1),
        ("intermediate", 2 * intermediate // TILE_COLUMNS, MAX_COLUMN_TILES - 1),
        ("max_tokens_per_rank", layout.rows // TILE_ROWS, MAX_ROW_TILES - 1),
        ("max_tokens_per_rank", layout.max_tokens_per_rank * (layout.hidden // 8), (1 << 31) - 1024),
        ("max_tokens_per_rank", layout.rows // TILE_ROWS * max(layout.hidden, 2 * intermediate) // TILE_COLUMNS, (1 << 31) - 1),
    ):  # fmt: skip
        if value > limit:
            unit = {"hidden": " column tiles", "intermediate": " column tiles", "max_tokens_per_rank": " tiles or pieces"}.get(name, "")
            raise XStageError(f"{name}: {value}{unit} exceed the kernels' limit of {limit}")


def scratch_shapes(layout: BufferLayout, intermediate: int, fused: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of what an `Exchange` keeps in its rank's own memory beside the buffer. fused: for both GEMMs in one kernel."""
    tiles = layout.rows // TILE_ROWS
    first, second = 2 * intermediate // TILE_COLUMNS, layout.hidden // TILE_COLUMNS
    pairs, blocks = layout.max_tokens_per_rank * layout.top_k, layout.hidden // 128
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "chunk_bases": ("int32", (-(-layout.max_tokens_per_rank // CHUNK_TOKENS) * layout.experts,)),
        "positions": ("int32", (layout.max_tokens_per_rank * layout.top_k,)),
        "first": ("int32", (layout.experts,)),
        "tile_expert": ("int32", (tiles,)),
        "tile_end": ("int32", (tiles,)),
        "expert_counts": ("int32", (layout.experts_per_rank,)),
        "totals": ("int32", (4,)),
        "zeros": ("int32", (4,)),
    }
    if fused:
        return shapes | {
            "work": ("int32", (2 * tiles * (first + second),)), "ready": ("int32", (1 + tiles,)),
            "send_first": ("int32", (layout.experts,)),
            "items": ("int32", (4 * (1 + pairs // ITEM_PAIRS + layout.experts),)), "pairs": ("int32", (pairs,)),
            "rows": ("float8_e4m3fn", (layout.max_tokens_per_rank, layout.hidden)),
            "row_scales": ("float32", (layout.max_tokens_per_rank, blocks)),
        }  # fmt: skip
    return shapes | {
        "work1": ("int32", (tiles * first,)), "work2": ("int32", (tiles * second,)),
        "scales": ("float32", (blocks, layout.rows)), "row_weight": ("float32", (layout.rows,)), "row_slot": ("int64", (layout.rows,)),
    }  # fmt: skip


def scratch_bytes(layout: BufferLayout, intermediate: int, fused: bool = False) -> int:
    """Bytes of `scratch_shapes`; `layout.size_bytes` are those of the buffer."""
    return sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in scratch_shapes(layout, intermediate, fused).values())


def kernels(
    layout: BufferLayout, intermediate: int, order: WorkOrder | None, wide: bool, quantized: bool
) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What `dispatch` and `combine` compile, with the arguments. wide: picks are int64. quantized: rows come in e4m3."""
    from xstage.device.meeting import compiled_meeting
    from xstage.moe import exchange_sm90, plan_sm90

    made: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (plan_sm90.compiled_count, (layout.experts, layout.top_k, wide)),
        (plan_sm90.compiled_plan, _plan_options(layout, intermediate, order, quantized)),
    ]
    if layout.direct:
        made.append((exchange_sm90.compiled_list, (layout, wide)))
    else:
        made += [
            (exchange_sm90.compiled_dispatch, (layout, wide, quantized)), (compiled_meeting, (layout.ranks, DISPATCHED, False)),
            (exchange_sm90.compiled_arrange, (layout,)),
        ]  # fmt: skip
        if layout.pull:
            made.append((exchange_sm90.compiled_fetch, (layout,)))
    return [*made, (compiled_meeting, (layout.ranks, COMBINED, True, True)), (exchange_sm90.compiled_reduce, (layout, wide))]


def _plan_options(layout: BufferLayout, intermediate: int, order: WorkOrder | None, quantized: bool) -> tuple[Any, ...]:
    columns = (2 * intermediate // TILE_COLUMNS, layout.hidden // TILE_COLUMNS)
    counts = layout.region("counts")
    quantizes = layout.hidden if layout.direct and not quantized else 0
    near = layout.near_tiles if layout.once else 0
    return layout.ranks, layout.experts, (counts.offset_bytes, counts.row_bytes), *columns, order, quantizes, near


class Exchange:
    """Owns the buffer, the signal words and the scratch memory of one layer's exchange. Every rank makes it together.

    Args:
        layout: fp8, tile 128, `direct` if there is an order. intermediate: columns of gate, and of up.
        group: whose ranks hold the experts, in rank order. device: this rank's GPU. timeout_s: bound of every wait.
        tag: names the object in errors; the same on every rank, and its own.
        order: of both GEMMs in one kernel (None: one after the other). Another one may be set between calls: it is the plan that makes
            the list, and everything else is the same for all orders.
        layers: how many layers take turns with it; which one a call is of is said by `choose`.

    Attributes, for the GEMMs; of a call's own size only where `totals` says so, valid from `dispatch` to `combine` on the stream:
        activations: uint8 (e4m3) [rows, hidden]. scales: float32 [hidden / 128, rows], m-major, 0 in padding rows.
        tile_expert: int32 [rows / 128]: local expert of a tile. tile_end: int32 [rows / 128]: end of that expert's real rows.
        work1, work2: int32 words of the entries for 2 · intermediate and for hidden columns (`xstage.moe.work_table`).
            With an order, instead: work: int32 words of the entries of both, in the order in which they are taken; ready: int32
            [1 + rows / 128], zeros when `dispatch` has passed; arrived: int32 [rows / 128], rows of a tile that have come; sends: addresses
            for `send_sm90.Sender.run`.
        control, call: words of `xstage.device.meeting`.
        totals: int32 [4]: entries of Linear-1, entries of Linear-2, tiles, rows with padding. All 0 once a meeting failed.
        expert_counts: int32 [experts per rank]: real rows of each local expert.
        row_weight: float32 [rows]: routing weight, 0 in padding rows.
        row_slot: int64 [rows]: address where the row's result (bf16 [hidden]) goes, maybe on a peer; 0 in padding rows: store nothing.

    Raises:
        XStageError: a layout that the kernels cannot take, or that differs between ranks.
        UnsuitableMachine, PeerTimeout: see `SymmetricBuffer` and `Agreement`.
    """

    def __init__(
        self, layout: BufferLayout, *, intermediate: int, group: dist.ProcessGroup, device: torch.device, timeout_s: float = 30.0, tag: str,
        order: WorkOrder | None = None, layers: int = 1,
    ):  # fmt: skip
        check_layout(layout, intermediate)
        if layout.direct != (order is not None):
            raise XStageError(f"layout: direct is {layout.direct}, which does not fit order {order}")
        if group.size() != layout.ranks:
            raise XStageError(f"ranks: the layout is for {layout.ranks}, the group has {group.size()}")
        if device.type != "cuda":
            raise XStageError(f"device: {device} is not a CUDA device")
        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.layout, self.intermediate, self.order, self.device, self.tag = layout, intermediate, order, device, tag
        self.rank, self.world = group.rank(), group.size()
        problem = [asdict(layout), intermediate]  # the order of work is a rank's own business
        agreement = Agreement(group, f"{tag}/exchange", timeout_s)
        agreement.same("exchange", {"layout": str(layout), "intermediate": intermediate})
        self._buffer = SymmetricBuffer(layout.size_bytes, group, device)
        self._watch = Watch(group, tag, timeout_s, PHASES)
        # The signal words are the first region: their addresses are the buffers'.
        words = [self.rank, int(timeout_s * 1e9), self._watch.address, *self._buffer.addresses]
        # Behind them, this rank's buffer as every rank sees it.
        words += [addresses[self.rank] for addresses in agreement.reach("addresses", self._buffer.addresses)]
        # A signature for every layer: a meeting compares them, and no layer's rows can go to another's experts.
        signatures = [zlib.crc32(json.dumps([problem, layer], sort_keys=True).encode()) & 0x7FFFFFFF for layer in range(layers)]
        self._calls = torch.tensor([[signature, *words] for signature in signatures], dtype=torch.int64, device=device)
        self.choose(0)
        self.control = torch.zeros(2, dtype=torch.int64, device=device)
        self._signals = self.view("signals").view(-1)
        self.activations = self.view("activations").view(torch.uint8)
        made = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in scratch_shapes(layout, intermediate, order is not None).items()
        }
        self._chunk_bases, self._positions, self._zeros = made["chunk_bases"], made["positions"], made["zeros"]
        self.first, self.tile_expert, self.tile_end = made["first"], made["tile_expert"], made["tile_end"]
        self.expert_counts, self.totals = made["expert_counts"], made["totals"]
        here = {name: self.view(name) for name in ("scales", "row_weight", "row_slot")} if layout.direct else made
        self.scales, self.row_weight, self.row_slot = here["scales"], here["row_weight"].view(-1), here["row_slot"].view(-1)
        if layout.direct:
            self.work, self.ready, self.arrived = made["work"], made["ready"], self.view("arrived").view(-1)
            self._send_first, self._items, self._pairs = made["send_first"], made["items"], made["pairs"]
            self._rows, self._row_scales = made["rows"], made["row_scales"]
        else:
            self.work1, self.work2 = made["work1"], made["work2"]
        self.sends: tuple[int, ...] = ()
        self._tokens: int | None = None  # of the call that is under way
        torch.cuda.synchronize(device)

    def choose(self, layer: int) -> None:
        """The next call is of this layer. Ranks that mean different ones store nothing, and `check` says so."""
        self.call = self._calls[layer]

    def view(self, region: str | Region, rank: int | None = None) -> torch.Tensor:
        """A region of this rank's buffer, or of `rank`'s, [rows, columns] in its dtype."""
        r = self.layout.region(region) if isinstance(region, str) else region
        whole = self._buffer.view(r.offset_bytes, (r.rows, r.row_bytes), torch.uint8, rank)
        return whole[:, : r.columns * ITEM_BYTES[r.dtype]].view(getattr(torch, r.dtype))

    def dispatch(self, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """Send every row to the experts that were picked for it, and wait on the stream for the peers' rows. Then come the GEMMs.

        Args:
            x: [tokens, hidden], bfloat16, or e4m3 (also as uint8) with x_scales float32 [tokens, hidden / 128].
            topk_idx: int32 or int64 [tokens, top_k], numbers outside 0 … experts − 1 are masked. topk_weights: float32 [tokens, top_k].
                All contiguous, and unchanged until the stream has passed `combine`. Tokens may differ between ranks and be none.

        Raises:
            XStageError: an argument that does not fit, or a call under way. PeerTimeout: an earlier call failed.
        """
        if self._tokens is not None:
            raise XStageError("dispatch: the call before was not combined")
        self._check(x, x_scales, topk_idx, topk_weights)
        self._watch.check()
        with torch.cuda.device(self.device):
            for _, launch in self._dispatch_steps(x, x_scales, topk_idx, topk_weights):
                launch()
        self._tokens = len(x)

    def combine(self, topk_idx: torch.Tensor, out: torch.Tensor) -> None:
        """Wait on the stream for the peers' results, and add them: out[token] = Σ over picks, in order, of the slots that are not masked.

        Args:
            topk_idx: the picks given to `dispatch`. out: bfloat16 [tokens, hidden], contiguous, written.

        Raises:
            XStageError: an argument that does not fit, or no call under way.
        """
        if self._tokens is None:
            raise XStageError("combine: no call was dispatched")
        self._check_picks(topk_idx, self._tokens)
        self._check_tensor("out", out, (self._tokens, self.layout.hidden), (torch.bfloat16,))
        with torch.cuda.device(self.device):
            for _, launch in self._combine_steps(topk_idx, out):
                launch()
        self._tokens = None

    def check(self) -> None:
        """Wait for what was launched and raise if a kernel gave up on a peer.

        Raises:
            PeerTimeout: naming rank, phase and tag.
        """
        torch.cuda.synchronize(self.device)
        self._watch.check()

    def free(self) -> None:
        """Wait for this rank's kernels and drop the buffer. No peer may be in a call any more."""
        torch.cuda.synchronize(self.device)
        self._buffer.free()

    # ---- what is launched

    def _dispatch_steps(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> list[tuple[str, Callable[[], Any]]]:
        """The kernels of `dispatch` with their names, each a function that launches it."""
        from xstage.device.meeting import compiled_meeting
        from xstage.moe import exchange_sm90, plan_sm90

        layout, tokens, wide = self.layout, len(x), topk_idx.dtype == torch.int64
        count = plan_sm90.compiled_count(layout.experts, layout.top_k, wide)
        plan = plan_sm90.compiled_plan(*_plan_options(layout, self.intermediate, self.order, _ROWS[x.dtype]))
        words = (self.control, self.call, self._signals)
        tiles = (self.tile_expert, self.tile_end, self.expert_counts, self.totals)
        unused = self._zeros
        if layout.direct:
            start, end = layout.region("arrived").offset_bytes, layout.region("spare").offset_bytes
            cleared = (self._buffer.addresses[self.rank] + start, end - start)
            orders = (unused, unused, self.work, self.ready, self._send_first, self._items)
            listing = exchange_sm90.compiled_list(layout, wide)
            rows = (x, x_scales) if x_scales is not None else (self._rows, self._row_scales)
            quantizing = (x.data_ptr(), self._rows.data_ptr(), self._row_scales.data_ptr())
            read = (self._items, self._pairs, topk_weights, *rows, *([self.tile_end] if layout.once else []))
            self.sends = tuple(t.data_ptr() for t in read)
            moves = [
                ("list", lambda: listing(
                    topk_idx.data_ptr(), topk_weights.data_ptr(), tokens, self._chunk_bases, self._positions, self.first,
                    self._send_first, self._items, self._pairs, self.control, self.call,
                )),
            ]  # fmt: skip
        else:
            cleared, quantizing = (0, 0), (0, 0, 0)
            orders = (self.work1, self.work2, unused, unused, unused, unused)
            send = exchange_sm90.compiled_dispatch(layout, wide, _ROWS[x.dtype])
            arrange = exchange_sm90.compiled_arrange(layout)
            meeting = compiled_meeting(self.world, DISPATCHED, False)
            fetching: list[tuple[str, Callable[[], Any]]] = []
            if layout.pull:
                fetch = exchange_sm90.compiled_fetch(layout)
                here = self._buffer.addresses[self.rank]
                fetching = [("fetch", lambda: fetch(here, self.tile_end, self.totals, self.control, self.call))]
            given = (x.data_ptr(), 0 if x_scales is None else x_scales.data_ptr(), topk_idx.data_ptr(), topk_weights.data_ptr(), tokens)
            moves = [
                ("dispatch", lambda: send(*given, self._chunk_bases, self._positions, self.first, self.control, self.call)),
                ("dispatched", lambda: meeting(*words)),
                *fetching,
                ("arrange", lambda: arrange(
                    self._buffer.addresses[self.rank], self.tile_end, self.totals, self.scales, self.row_weight, self.row_slot,
                    self.control, self.call,
                )),
            ]  # fmt: skip
        return [
            ("count", lambda: count(topk_idx.data_ptr(), tokens, self._chunk_bases, self._positions, *cleared)),
            ("plan", lambda: plan(tokens, self._chunk_bases, self.first, *tiles, *orders, *quantizing, *words)),
            *moves,
        ]

    def _combine_steps(self, topk_idx: torch.Tensor, out: torch.Tensor) -> list[tuple[str, Callable[[], Any]]]:
        """The kernels of `combine`, likewise."""
        from xstage.device.meeting import compiled_meeting
        from xstage.moe import exchange_sm90

        reduce = exchange_sm90.compiled_reduce(self.layout, topk_idx.dtype == torch.int64)
        meeting = compiled_meeting(self.world, COMBINED, True, True)
        given = (self._buffer.addresses[self.rank], topk_idx.data_ptr(), out.data_ptr(), len(out), self._zeros.data_ptr())
        return [
            ("combined", lambda: meeting(self.control, self.call, self._signals)),
            ("reduce", lambda: reduce(*given, self.control)),
        ]

    # ---- what is refused

    def _check(self, x: torch.Tensor, x_scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
        layout, tokens = self.layout, len(x)
        self._check_tensor("x", x, (tokens, layout.hidden), tuple(_ROWS))
        if tokens > layout.max_tokens_per_rank:
            raise XStageError(f"x: {tokens} tokens exceed max_tokens_per_rank {layout.max_tokens_per_rank}")
        if _ROWS[x.dtype] != (x_scales is not None):
            raise XStageError(f"x_scales: {'none' if x_scales is None else 'given'}, which does not fit x in {x.dtype}")
        if x_scales is not None:
            self._check_tensor("x_scales", x_scales, (tokens, layout.hidden // 128), (torch.float32,))
        self._check_picks(topk_idx, tokens)
        self._check_tensor("topk_weights", topk_weights, (tokens, layout.top_k), (torch.float32,))

    def _check_picks(self, topk_idx: torch.Tensor, tokens: int) -> None:
        self._check_tensor("topk_idx", topk_idx, (tokens, self.layout.top_k), (torch.int32, torch.int64))

    def _check_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device != self.device:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise XStageError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} must be {known} {shape} on {self.device}")
        # Rows and scales are moved 16 bytes at a time; picks and weights by the element.
        if not tensor.is_contiguous() or tensor.data_ptr() % (tensor.element_size() if name.startswith("topk") else 16):
            raise XStageError(f"{name}: strides {tensor.stride()} at address {tensor.data_ptr():#x} must be contiguous and aligned")
