"""What the roles of the MoE kernel did when: memory for the records that `spans_sm90` writes, and what they say.

    pipeline.spans = Spans.of(layout, intermediate, device, ctas)  # from now on the kernel of both GEMMs records
    pipeline.spans.clear(); …a call…
    said = summary(decode(pipeline.spans.to_numpy()))

Of a tile, a math warpgroup (its first thread, so its first warp): first stage there, first half of the epilogue begun and ended (it runs
under the last matrix instructions of the second half), main loop over, last store issued. Issued is not arrived: the span of a Linear-2
tile's epilogue is the sender-visible T_RS of the paper. Of a tile, the loading warp: how long it waited for the tile's rows. Of an item,
the sending warp: taken up, its turn come, its rows counted at their expert's rank.

With weights in MXFP4 a record is of half the columns of two row tiles, or of one that is alone (bit 0 of what it is of).

A main loop counts as busy, waits for later stages included: the share says where the math warps were, not what the tensor cores did.

Not covered: the warp that stores Linear-1's tiles, other warps of a warpgroup, order between records closer than the clock's 32 ns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xstage.moe.layout import ITEM_PAIRS, BufferLayout
from xstage.moe.work_table import MAX_COLUMN_TILES, TILE_COLUMNS, TILE_ROWS

if TYPE_CHECKING:
    import torch

ROLES = ("math0", "math1", "loads", "sends")
# Words of a record. What it is of: a tile as its table entry with the layer in bit 11, or an item.
RECORD_WORDS, WHAT, START, NUMBER = 8, 0, 1, 7
HALF_START, HALF_END, MAIN_END, END = 2, 3, 4, 5
WAIT_END = 2
TURN, SENT = 2, 3
COLUMN_MASK = MAX_COLUMN_TILES - 1
SPARE_TILES = 16  # of a CTA that takes some while others have not started
BINS = 120
EDGES_NS = np.arange(0, 24_001, 250)  # of the distribution of spans; the last bin holds what is longer
Times = NDArray[np.float64]


class Spans:
    """Memory for the records of one launch.

    Args:
        ctas: of the kernel. capacity: records of a role in a CTA; what exceeds it is dropped, and counted.

    Attributes:
        records: int32 [ctas, roles, capacity + 1, 8] on `device`; the last of a role is a spare.
    """

    def __init__(self, ctas: int, capacity: int, device: torch.device | str) -> None:
        import torch

        self.capacity = capacity
        self.records = torch.zeros(ctas, len(ROLES), capacity + 1, RECORD_WORDS, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, layout: BufferLayout, intermediate: int, device: torch.device, ctas: int) -> Spans:
        """Enough for every routing of that layout. ctas: of the kernel (`grouped_gemm.ctas_of`)."""
        return cls(ctas, capacity_of(layout, intermediate, ctas), device)

    def clear(self) -> None:
        """Before a call that is to be read; on the current stream."""
        self.records.zero_()

    def to_numpy(self) -> NDArray[np.int32]:
        """Waits for the device."""
        records: NDArray[np.int32] = self.records.cpu().numpy()
        return records


def capacity_of(layout: BufferLayout, intermediate: int, ctas: int) -> int:
    """Twice a CTA's share of the tiles, which no CTA is fast enough to take, or its items if they are more."""
    tiles, clusters = layout.rows // TILE_ROWS, ctas // 2
    entries = [tiles * columns // TILE_COLUMNS // 2 for columns in (2 * intermediate, layout.hidden)]
    items = layout.max_tokens_per_rank * layout.top_k // ITEM_PAIRS + layout.experts
    return max(2 * -(-sum(entries) // clusters) + SPARE_TILES, -(-items // ctas))


@dataclass(frozen=True)
class Records:
    """One launch. All arrays of a role have one value per record; times are ns after the first of all.

    Attributes:
        tiles: cta, group (warpgroup), layer (1, 2), m, n, start, half_start, half_end, main_end, end; a warpgroup's in order of time.
        loads: cta, layer, start, end (of a wait). sends: cta, item, start, turn, end.
        ctas: of the kernel. dropped: records that found no room.
    """

    tiles: dict[str, NDArray[Any]]
    loads: dict[str, NDArray[Any]]
    sends: dict[str, NDArray[Any]]
    ctas: int
    dropped: int

    @property
    def whole_ns(self) -> float:
        """From the first start to the last end of any role."""
        return max((float(role["end"].max()) for role in (self.tiles, self.loads, self.sends) if len(role["end"])), default=0.0)


def decode(records: NDArray[np.int32]) -> Records:
    """int32 [ctas, roles, capacity + 1, 8] as the kernel left them in memory that was zero before."""
    ctas, _, room, _ = records.shape
    kept, numbers = records[:, :, :-1], records[..., NUMBER]
    written = kept[..., NUMBER] > 0
    dropped = int(np.maximum(numbers[:, :, -1] - (room - 1), 0).sum())
    # The clock's low half wraps: differences to any one time are right as signed numbers, and the smallest becomes the origin.
    some = kept[..., START][written]
    origin = some[0] if len(some) else np.int32(0)
    with np.errstate(over="ignore"):
        times = (kept - origin).astype(np.float64)
    times -= times[..., START][written].min() if len(some) else 0.0

    def role(names: slice, fields: Mapping[str, int]) -> dict[str, NDArray[Any]]:
        at = np.nonzero(written[:, names])
        found: dict[str, NDArray[Any]] = {"cta": at[0], "group": at[1], "what": kept[:, names][at][:, WHAT]}
        return found | {name: times[:, names][at][:, field] for name, field in fields.items()}

    tiles = role(slice(0, 2), {"start": START, "half_start": HALF_START, "half_end": HALF_END, "main_end": MAIN_END, "end": END})
    loads, sends = role(slice(2, 3), {"start": START, "end": WAIT_END}), role(slice(3, 4), {"start": START, "turn": TURN, "end": SENT})
    for part in (tiles, loads):
        part["layer"] = (part["what"] >> 11 & 1) + 1
        part["m"], part["n"] = part["what"] >> 12, part["what"] >> 1 & COLUMN_MASK
    sends["item"] = sends["what"]
    return Records(tiles, loads, sends, ctas, dropped)


def spans_ns(tiles: Mapping[str, NDArray[Any]]) -> tuple[Times, Times, Times]:
    """Of every tile: main loop, epilogue, and the gap before it since the same warpgroup's last tile (NaN before its first)."""
    epilogue = tiles["half_end"] - tiles["half_start"] + tiles["end"] - tiles["main_end"]
    gap = np.full(len(epilogue), np.nan)
    follows = (tiles["cta"][1:] == tiles["cta"][:-1]) & (tiles["group"][1:] == tiles["group"][:-1])
    gap[1:][follows] = (tiles["start"][1:] - tiles["end"][:-1])[follows]
    return tiles["end"] - tiles["start"] - epilogue, epilogue, gap


def busy_share(begin: Times, end: Times, whole_ns: float, lanes: int, bins: int = BINS) -> Times:
    """Share of `lanes` that are inside one of the intervals, in each of `bins` equal parts of 0 … whole_ns."""
    edges = np.linspace(0, whole_ns, bins + 1)

    def until(t: Times) -> Times:
        """Time inside before t, over all intervals: Σ max(t − begin, 0) − Σ max(t − end, 0)."""
        total = np.zeros(len(t))
        for sign, times in ((1, np.sort(begin)), (-1, np.sort(end))):
            count = np.searchsorted(times, t)
            total += sign * (count * t - np.concatenate([[0.0], np.cumsum(times)])[count])
        return total

    share: Times = np.diff(until(edges)) / (edges[1] * lanes)
    return share


def activity(records: Records, bins: int = BINS) -> Times:
    """Share of the math warpgroups that are in a main loop, over the launch."""
    t, whole = records.tiles, records.whole_ns
    if not whole:
        return np.zeros(bins)
    begin, end = np.concatenate([t["start"], t["half_end"]]), np.concatenate([t["half_start"], t["main_end"]])
    return busy_share(begin, end, whole, 2 * records.ctas, bins)


def summary(records: Records) -> dict[str, Any]:
    """Numbers of a launch for a result file; times in µs, `_us` ones are sums per CTA.

    `store_span` is T_RS: the epilogue of Linear-2 tiles. `gap1`, `gap2`: before tiles of a layer. `span_counts`: of `EDGES_NS`.
    """
    tiles, loads, sends = records.tiles, records.loads, records.sends
    main, epilogue, gap = spans_ns(tiles)
    first, second = tiles["layer"] == 1, tiles["layer"] == 2
    share = activity(records)
    counts = np.histogram(np.minimum(epilogue[second], EDGES_NS[-1] - 1), EDGES_NS)[0]
    waits = {name: (loads["end"] - loads["start"])[loads["layer"] == layer] for name, layer in (("arrived", 1), ("ready", 2))}
    return {
        "tiles": [int(first.sum()), int(second.sum())], "dropped": records.dropped, "whole_us": _us(records.whole_ns),
        "store_span": _spread(epilogue[second]), "linear2_main": _spread(main[second]), "linear1_main": _spread(main[first]),
        "linear1_epilogue": _spread(epilogue[first]), "gap1": _spread(gap[first]), "gap2": _spread(gap[second]),
        **{f"wait_{name}_us": _us(float(times.sum()) / records.ctas) for name, times in waits.items()},
        "send_item": _spread(sends["end"] - sends["turn"]),
        "send_turn_us": _us(float((sends["turn"] - sends["start"]).sum()) / records.ctas), "busy": round(float(share.mean()), 4),
        "activity": [round(float(s), 4) for s in share], "span_counts": [int(c) for c in counts],
    }  # fmt: skip


def _spread(times: Times) -> dict[str, float]:
    """Mean, median, p10 and p90 in µs, of what is known; empty: nothing was."""
    times = times[~np.isnan(times)]
    if not len(times):
        return {}
    p10, median, p90 = (float(q) for q in np.quantile(times, (0.1, 0.5, 0.9)))
    return {"mean": _us(float(times.mean())), "median": _us(median), "p10": _us(p10), "p90": _us(p90)}


def _us(ns: float) -> float:
    return round(ns / 1e3, 3)
