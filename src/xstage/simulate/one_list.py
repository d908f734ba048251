"""The one kernel of the MoE layer on one rank: clusters that take tiles from one list, senders, and result stores that share a link.

`engine` runs orders in which every instance has its own share of the tiles, and whose senders are a rate. This is the kernel of
`xstage.moe.gemm_sm90`: entries of the real list (`work_table.work_list`), taken from one counter by clusters of two CTAs.

Notable, and where it is in the kernel:
- A cluster takes its next entry `TAKEN_BEFORE` stages before it has loaded the one before, then waits for what the entry needs: rows for
  Linear-1, all Linear-1 tiles of its rows for Linear-2. Loading runs `STAGES` stages ahead of the math.
- Stages are shared by the two CTAs of a cluster, so one of them can be no more than a ring ahead of the other: a CTA whose stores stall
  stops its partner after four stages.
- Math warps store Linear-2's results themselves (T_cover = 0). A tile's remote bytes follow from where its rows come from: at f = 1/2
  whole tiles are local or remote.
- A sending warp per CTA works off its items: not further than `AHEAD` rounds of Linear-1 tiles ahead of the entry that its cluster took
  last, one window of `SLOT_BYTES` after another, and the rows count when the last one has arrived. Where a row goes to a rank once
  (`once_sm90`), only those windows cross the link whose rows are not there yet, and the item is copied again behind them; but items of a
  rank's first `NEAR_TILES` tiles go as before, and those windows behind them.
- The link: every CTA has its part Q(K)/K of the capacity, K being the CTAs that have bytes under way now; these share R equally, at most
  the rate of a single producer each; results and sent rows of one CTA share its part. So Q(K) and R(K) of the platform file are all that
  is asked, and a single storing CTA meets the limits that the platform measured for few producers.

Time goes in steps of `STEP_NS`, in which the link is a fluid; ends of main loops and epilogues are exact in between. Times of tiles
are inputs (`TileTimes`). Nothing is fitted: `SEND_BEGIN_NS` and `SEND_WINDOW_NS` come from the control of `moe_spans`, in which no result
leaves the GPU; rates, capacities and the latency of the last window from the platform file.

Covered: both layers, all orders of `WorkOrder`, any load of experts and any share f, the control in which results are local.
Not covered: ranks that differ or start at different times (`row_plan`), receivers that are busy, the time from a Linear-1 tile's epilogue
until its count is seen, stores and loads that wait behind one another inside an SM, clocks and power, the cache, what stands before and
behind the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xstage.errors import XStageError
from xstage.moe.layout import AHEAD, MAX_RANKS, NEAR_TILES, piece_bytes, slots_of
from xstage.moe.work_table import LAYER_SHIFT, ROW_SHIFT, STAGES, TAKEN_BEFORE, TILE_COLUMNS, WorkOrder, partner, work_list
from xstage.platform import Platform, StoreMethod
from xstage.simulate.engine import _jit
from xstage.simulate.mega_moe import DUPLEX, MAINLOOP_SPREAD
from xstage.simulate.row_plan import row_plan

STEP_NS = 50.0
# Items of a sending warp take 16.4 µs with 4 windows and 10.0 µs with 2 (median items of Qwen3.5 and Qwen3-30B with all results local,
# f = 1/2, both orders, results/h200x2/moe-spans-earlier.json): 3.2 µs a window. Beside 3.1 µs until the last one has arrived (`latency_ns`
# of the platform) and 0.3 µs in which one CTA's window drains, 0.2 µs are left for all that stands before.
SEND_WINDOW_NS, SEND_BEGIN_NS = 3200.0, 200.0
RESULT_BYTES, STAGE_COLUMNS, CLUSTER = 2, 128, 2
ITEM_WORDS_BYTES = 12  # a row's weight and the address of its slot
MOST_NS = 2e8
FOREVER = 1e30

# What the math warps of a CTA do, and what its sending warp does.
AWAITS, MULTIPLIES, STORES, OVER = 0, 1, 2, 3
ITS_TURN, PREPARES, DRAINS, ARRIVES = 0, 1, 2, 3
LAST = 3  # entries of a cluster that are kept, less one: entry number n stands at n & LAST
END = -1  # instead of an entry: there are no more
MAIN, EPILOGUE, GAP, TILES, EPILOGUES, GAPS = 0, 1, 2, 3, 4, 5  # columns of the sums: times, and how many


@_jit
def _spread(number, half_width):  # type: ignore[no-untyped-def]
    """A fixed factor around 1 for a number, as in `engine`."""
    return 1.0 + half_width * (((number * 40503) & 65535) / 32768.0 - 1.0)


@_jit
def _needed(e, layer, tiles, real, columns1, arrived, done):  # type: ignore[no-untyped-def]
    """What an entry waits for is there: its rows, or all Linear-1 tiles of them."""
    for i in range(CLUSTER):
        m = tiles[i, e]
        if (layer[e] == 0 and arrived[m] < real[m]) or (layer[e] == 1 and done[m] < columns1):
            return False
    return True


@_jit
def _load(  # type: ignore[no-untyped-def]
    now, step, ring, taken_before, taken, layer, tiles, before, real, columns1, stages, main, arrived, done,
    entry, loaded, start, newest, progress,
):  # fmt: skip
    """The loading warps and the takers of all clusters; returns the entries taken so far."""
    for g in range(newest.shape[0]):
        number = newest[g]
        at, last = number & LAST, (number - 1) & LAST
        a, b = CLUSTER * g, CLUSTER * g + 1
        e = entry[g, at]
        if e == END:
            continue
        if loaded[g, at] < 0.0:
            begin = 0.0  # when the loading warps have issued the tile before
            if number > 0:
                y = layer[entry[g, last]]
                begin = max(start[a, last], start[b, last]) + main[y] * (1.0 - ring / stages[y])
            if begin > now:
                continue
            progress[g] = before[e]
            if not _needed(e, layer, tiles, real, columns1, arrived, done):
                continue
            loaded[g, at] = max(begin, now - step)
        y = layer[e]
        late = max(stages[y] - taken_before, 0)
        if late >= ring:
            when = max(start[a, at], start[b, at]) + (late - ring + 1) * main[y] / stages[y]
        else:
            when = loaded[g, at]
            if number > 0:
                y = layer[entry[g, last]]
                when = max(when, max(start[a, last], start[b, last]) + main[y] - (ring - 1 - late) * main[y] / stages[y])
        if when <= now:
            at = (number + 1) & LAST
            entry[g, at] = taken if taken < layer.shape[0] else END
            loaded[g, at] = -1.0 if taken < layer.shape[0] else 0.0
            start[a, at] = start[b, at] = FOREVER
            newest[g] = number + 1
            taken += 1
    return taken


@_jit
def _multiply(  # type: ignore[no-untyped-def]
    now, step, ring, room, layer, tiles, remote_bytes, stages, main, epilogue1, store_span, gap, jitter, done,
    entry, loaded, start, newest, number, phase, free, opened, to_store, counts, counted, held, sums, spans,
):  # fmt: skip
    """The math warps of all CTAs, both warpgroups of one as one; returns how many CTAs have come to the end of the list."""
    over = 0
    for c in range(number.shape[0]):
        if counted[c] <= now:
            done[counts[c]] += 1
            counted[c] = FOREVER
        g, at, other = c >> 1, number[c] & LAST, c ^ 1
        e = entry[g, at]
        if phase[c] == AWAITS and number[c] <= newest[g] and loaded[g, at] >= 0.0:
            if e == END:
                phase[c] = OVER
                over += 1
                continue
            begin = max(free[c] + gap, loaded[g, at])
            if begin <= now:
                start[c, at] = begin
                phase[c] = MULTIPLIES
                if number[c] > 0:
                    sums[layer[e], GAP] += begin - free[c]
                    sums[layer[e], GAPS] += 1
        if phase[c] == MULTIPLIES and number[other] >= number[c] and start[other, at] < FOREVER:
            y = layer[e]
            whole = main[y] * _spread(e, jitter)
            end = max(start[c, at], start[other, at] - ring * whole / stages[y]) + whole
            if end > now:
                continue
            m = tiles[c & 1, e]
            sums[y, MAIN] += end - start[c, at]
            sums[y, TILES] += 1
            if y == 0:
                sums[y, EPILOGUE] += epilogue1
                sums[y, EPILOGUES] += 1
                free[c] = counted[c] = end + epilogue1
                counts[c] = m
                number[c] += 1
                phase[c] = AWAITS
            else:
                opened[c], to_store[c] = end, remote_bytes[m]
                phase[c] = STORES
        elif phase[c] == STORES:
            end = opened[c] + store_span
            if to_store[c] > 0.0:
                speed = remote_bytes[tiles[c & 1, e]] / store_span
                put = max(min(to_store[c], speed * (now - max(now - step, opened[c])), room - held[c]), 0.0)
                held[c] += put
                to_store[c] -= put
                if to_store[c] > 1e-3:
                    continue
                held[c] += to_store[c]
                to_store[c] = 0.0
                end = max(end, now - step + put / speed)
            if end <= now:
                spans[int(sums[1, EPILOGUES])] = end - opened[c]
                sums[1, EPILOGUES] += 1
                sums[1, EPILOGUE] += end - opened[c]
                free[c] = end
                number[c] += 1
                phase[c] = AWAITS
    return over


@_jit
def _send(  # type: ignore[no-untyped-def]
    now, step, ahead, room, item_due, item_tile, item_rows, item_windows, item_remote, item_bytes, item_placed, begin_ns, window_ns,
    end_ns, producer_rate, jitter, progress, arrived, sending, item, windows, until, sent,
):  # fmt: skip
    """The sending warps of all CTAs; returns when the last of the items that arrived in this step did, 0: none."""
    last = 0.0
    items = item_tile.shape[0]
    for c in range(item.shape[0]):
        i = item[c]
        if i >= items:
            continue
        window = item_bytes[i] / item_windows[i]
        if sending[c] == ITS_TURN:
            if progress[c >> 1] + ahead < item_due[i]:
                until[c] = now - step
                continue
            longer = _spread(i, jitter)
            windows[c] = item_windows[i]
            if item_remote[i]:
                sending[c] = PREPARES
                until[c] += (begin_ns + window_ns) * longer
            else:
                sending[c] = ARRIVES
                until[c] += (begin_ns + windows[c] * (window_ns + window / producer_rate) + end_ns) * longer
        if sending[c] == PREPARES and until[c] <= now:
            sent[c] += window
            sending[c] = DRAINS
        elif sending[c] == DRAINS and sent[c] <= (room if windows[c] > 1 else 0.0):
            windows[c] -= 1
            sending[c] = PREPARES if windows[c] > 0 else ARRIVES
            until[c] = now - step + (window_ns if windows[c] > 0 else end_ns + item_placed[i])
        if sending[c] == ARRIVES and until[c] <= now:
            for j in range(2):
                if item_rows[j, i] > 0:
                    arrived[item_tile[i] + j] += item_rows[j, i]
            last = max(last, until[c])
            item[c] += item.shape[0]
            sending[c] = ITS_TURN
    return last


@_jit
def _drain(held, sent, left, rate, producer_rate, step):  # type: ignore[no-untyped-def]
    """A step of the link: bytes under way of every CTA, of results and of sent rows, become fewer. left: scratch. Returns what moved."""
    budget = rate * step
    ctas = held.shape[0]
    active = 0
    for c in range(ctas):
        left[c] = producer_rate * step
        if held[c] + sent[c] > 0.0:
            active += 1
    for _ in range(3):  # what some do not need is offered to the others
        if active == 0 or budget <= 1.0:
            break
        part = budget / active
        active = 0
        for c in range(ctas):
            both = held[c] + sent[c]
            if both <= 0.0 or left[c] <= 0.0:
                continue
            moved = min(part, left[c], both)
            left[c] -= moved
            budget -= moved
            rows = min(moved - min(moved / 2, held[c]), sent[c])
            held[c] -= moved - rows
            sent[c] -= rows
            if held[c] < 1e-6:
                held[c] = 0.0
            if sent[c] < 1e-6:
                sent[c] = 0.0
            if held[c] + sent[c] > 0.0 and left[c] > 0.0:
                active += 1
    return rate * step - budget


@_jit
def _run(  # type: ignore[no-untyped-def]
    layer, tiles, before, entries1, columns1, real, remote_bytes, stages, main, epilogue1, store_span, gap, jitter,
    item_due, item_tile, item_rows, item_windows, item_remote, item_bytes, item_placed, begin_ns, window_ns, end_ns, ring, taken_before,
    ahead, clusters, rate, producer_rate, capacity, bulk_capacity, step, most, sums, spans,
):  # fmt: skip
    """All steps; returns CTAs that did not come to the end, when the last one did, bytes that left the rank, when the last row had come."""
    ctas, entries = CLUSTER * clusters, layer.shape[0]
    # Of clusters: entries under way, when their first stage could be loaded (−1: not yet), when each CTA's main loop began.
    entry = np.full((clusters, LAST + 1), END, np.int64)
    loaded = np.full((clusters, LAST + 1), -1.0)
    start = np.full((ctas, LAST + 1), FOREVER)
    newest, progress = np.zeros(clusters, np.int64), np.zeros(clusters, np.int64)
    # Of math warps: number of the entry, phase, end of the last tile, begin of an epilogue, bytes still to be stored; the row tile of a
    # Linear-1 tile that will count, and when.
    number, phase, counts = np.zeros(ctas, np.int64), np.zeros(ctas, np.int64), np.zeros(ctas, np.int64)
    free, opened, to_store, counted = np.zeros(ctas), np.zeros(ctas), np.zeros(ctas), np.full(ctas, FOREVER)
    # Of sending warps: phase, item, windows left, end of what they do now. Of the link: bytes under way, of results and of rows.
    sending, item, windows, until = np.zeros(ctas, np.int64), np.arange(ctas), np.zeros(ctas, np.int64), np.zeros(ctas)
    held, sent, left = np.zeros(ctas), np.zeros(ctas), np.zeros(ctas)
    # By row tile: rows that have come, Linear-1 tiles that are there.
    arrived, done = np.zeros(real.shape[0], np.int64), np.zeros(real.shape[0], np.int64)
    for g in range(clusters):
        entry[g, 0] = g if g < entries else END
        loaded[g, 0] = -1.0 if g < entries else 0.0
    taken, unfinished, moved, dispatched, n = clusters, ctas, 0.0, 0.0, 0
    while unfinished > 0 and n < most:
        n += 1
        now = n * step
        taken = _load(
            now, step, ring, taken_before, taken, layer, tiles, before, real, columns1, stages, main, arrived, done,
            entry, loaded, start, newest, progress,
        )  # fmt: skip
        active = 0
        for c in range(ctas):
            if held[c] + sent[c] > 0.0:
                active += 1
        unfinished -= _multiply(
            now, step, ring, capacity[active], layer, tiles, remote_bytes, stages, main, epilogue1, store_span, gap, jitter, done,
            entry, loaded, start, newest, number, phase, free, opened, to_store, counts, counted, held, sums, spans,
        )  # fmt: skip
        came = _send(
            now, step, ahead * clusters, bulk_capacity[active], item_due, item_tile, item_rows, item_windows, item_remote, item_bytes,
            item_placed, begin_ns, window_ns, end_ns, producer_rate, jitter, progress, arrived, sending, item, windows, until, sent,
        )  # fmt: skip
        dispatched = max(dispatched, came)
        moved += _drain(held, sent, left, rate, producer_rate, step)
    while held.sum() + sent.sum() > 0.0:
        moved += _drain(held, sent, left, rate, producer_rate, step)
    return unfinished, free.max(), moved, dispatched


@dataclass(frozen=True)
class TileTimes:
    """Times of a tile of either layer with local stores, ns.

    Attributes:
        linear1_main_ns, linear1_epilogue_ns, linear2_main_ns: as they are. store_span_ns: T_RS without remote rows. gap_ns: between tiles.
    """

    linear1_main_ns: float
    linear1_epilogue_ns: float
    linear2_main_ns: float
    store_span_ns: float
    gap_ns: float = 0.0


@dataclass(frozen=True)
class OneListRun:
    """Result of `simulate_one_list`; times in ns.

    Attributes:
        time_ns: until the last tile's stores are issued. period_ns: mean time from one Linear-2 tile of a CTA to the next, with its share
        of Linear-1 tiles, the first tile's wait left out (`studies.moe_spans` says the same of a recorded call).
        store_spans_ns: T_RS of every Linear-2 tile, of CTAs. tiles: of either layer. moved_bytes: that left the rank. dispatch_ns: until
        the last row has arrived.
    """

    time_ns: float
    period_ns: float
    store_spans_ns: NDArray[np.float64]
    tiles: tuple[int, int]
    moved_bytes: float
    dispatch_ns: float


def simulate_one_list(
    rows: Sequence[int],
    share: float,
    order: WorkOrder,
    times: TileTimes,
    platform: Platform,
    *,
    remote: bool = True,
    rank: int = 0,
    ranks: int = 2,
    picks: int | None = None,
    duplex: float = DUPLEX,
    jitter: float = MAINLOOP_SPREAD,
    step_ns: float = STEP_NS,
) -> OneListRun:
    """Run the kernel of both layers on a rank.

    Args:
        rows: real rows of each of its experts. share: f, of rows from other ranks. order: of the list; its columns say the layer's sizes.
        remote: False for the control: results stay here, rows are sent all the same. rank, ranks: see `row_plan`.
        picks: of a token, if a row goes to a rank once for all of them (`rows_once` of `MegaMoE`); None: once per pick.
        duplex: factor on R. jitter: relative half-width of times of main loops and items.

    Raises:
        XStageError: a number outside its range, a platform without the store methods, or a run that does not end.
    """
    for name, value, low, high in (
        ("share", share, 0, 1),
        ("step_ns", step_ns, 1, 1000),
        ("jitter", jitter, 0, 0.9),
        ("duplex", duplex, 0.01, 1),
        ("ranks", ranks, 2, MAX_RANKS),
        ("rank", rank, 0, ranks - 1),
    ):
        if not low <= value <= high:
            raise XStageError(f"{name}: {value:g} must lie in {low:g} … {high:g}")
    stores, bulk = platform.method("st_global"), platform.method("bulk")
    plan = row_plan(rows, share, rank, ranks, picks or 1)
    table = np.asarray(work_list(rows, order), np.int64).reshape(-1, 4)
    words = table[:, 0]
    layer = words >> LAYER_SHIFT & 1
    hidden, intermediate = order.columns2 * TILE_COLUMNS, order.columns1 * TILE_COLUMNS // 2
    item_tile, item_rows, item_remote = plan.item_tile, np.stack([plan.item_first, plan.item_second]), plan.item_remote
    due = np.arange(len(item_tile)) * float((layer == 0).sum()) / max(len(item_tile), 1)  # Linear-1 entries
    window_bytes = piece_bytes(hidden) * slots_of(piece_bytes(hidden))
    crossing = item_rows.sum(0).astype(float)  # rows
    windows = np.ceil(crossing * hidden / window_bytes)
    sent, placed = windows, np.zeros(len(windows))
    if picks is not None:
        posts = item_remote & (len(plan.real) > NEAR_TILES)
        near, posted = item_tile < NEAR_TILES, np.maximum(np.ceil(plan.item_fresh * hidden / window_bytes), 1)
        placing = SEND_BEGIN_NS + windows * (SEND_WINDOW_NS + window_bytes / float(stores.drain_rate(1))) + float(bulk.latency_ns)
        crossing, sent, placed = (
            np.where(posts & ~near, late, soon) for late, soon in ((plan.item_fresh, crossing), (posted, windows), (placing, 0.0))
        )
        # What near items post is an item of its own behind each, with rows that nobody waits for.
        again = np.sort(np.concatenate([np.arange(len(near)), np.flatnonzero(near & posts)]))
        behind = np.concatenate([[False], again[1:] == again[:-1]])
        item_tile, item_remote, item_rows, placed = item_tile[again], item_remote[again], item_rows[:, again] * ~behind, placed[again]
        due = due[again]
        crossing, sent = np.where(behind, plan.item_fresh[again], crossing[again]), np.where(behind, posted[again], sent[again])
    sums, spans = np.zeros((2, 6)), np.zeros(CLUSTER * int(layer.sum()))
    unfinished, ended, moved, dispatched = _run(
        layer, np.stack([words >> ROW_SHIFT, partner(words) >> ROW_SHIFT]), table[:, 1].copy(), int((layer == 0).sum()), order.columns1,
        plan.real, plan.remote * float(TILE_COLUMNS * RESULT_BYTES * remote), np.array([hidden, intermediate]) // STAGE_COLUMNS,
        np.array([times.linear1_main_ns, times.linear2_main_ns], float), float(times.linear1_epilogue_ns), float(times.store_span_ns),
        float(times.gap_ns), float(jitter), due, item_tile, item_rows, sent.astype(np.int64), item_remote,
        crossing * float(row_bytes(hidden)), placed,
        SEND_BEGIN_NS, SEND_WINDOW_NS, float(bulk.latency_ns), STAGES, TAKEN_BEFORE, AHEAD, platform.sms // CLUSTER,
        float(stores.drain_rate(platform.sms)) * duplex, float(stores.drain_rate(1)),
        _per_producer(stores, platform.sms), _per_producer(bulk, platform.sms), float(step_ns), int(MOST_NS / step_ns), sums, spans,
    )  # fmt: skip
    if unfinished:
        raise XStageError(f"order: {order.name} leaves {unfinished} CTAs with tiles after {MOST_NS / 1e6:g} ms, the most that is simulated")
    tiles = (int(sums[0, TILES]), int(sums[1, TILES]))
    each = sums[:, :TILES] / np.maximum(sums[:, TILES:], 1)
    period = float(each[1].sum() + tiles[0] / max(tiles[1], 1) * each[0].sum())
    return OneListRun(float(ended), period, spans, tiles, float(moved), float(dispatched))


def row_bytes(hidden: int) -> int:
    """Bytes that travel with a sent row: elements, scales, weight and slot."""
    return hidden + 4 * hidden // 128 + ITEM_WORDS_BYTES


def _per_producer(method: StoreMethod, sms: int) -> NDArray[np.float64]:
    """Q(K)/K by K = 0 … sms, bytes; below the fewest producers measured, as of those."""
    k = np.maximum(np.arange(sms + 1.0), min(method.capacity_producers))
    return np.asarray(method.capacity_bytes(k) / k)
