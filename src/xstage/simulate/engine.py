"""Event engine: one GPU's instances run a tile order against one shared X-Stage. One source, compiled by numba where it is present.

Pipeline of an instance (an SM, or a cluster of them that works in step):

    mainloop → staging slot → issuing role → X-Stage → peer

Notable:
- Only two kinds of event need global order: a store that begins and a store that ends. All else of an instance is a recurrence of
  maxima, worked off when its last store is known, so a run costs a few heap operations per Linear-2 tile.
- The X-Stage is the fluid of `burst_gap`, for stores that begin at any time: every active producer injects at its unhindered speed
  until Q is full; then the producers share the drain R equally. Equal speeds mean one common odometer (`issued`), on which a store
  finishes at a known reading, whatever the rate does in between.
- The same source runs with NUMBA_DISABLE_JIT=1 or without numba, with identical results: no fastmath, no parallel reductions.
- It cannot hang: when no event is left and tiles are missing, the run ends and `waiting` says what each instance waits for.

Covered: staging slots and their release; three ways in which mainloop and stores share roles; shared capacity, shared drain,
per-producer drain and capacity; readiness of a Linear-2 row (all Linear-1 tiles of the row); a ring of rows between the layers;
dispatch reads or stores on the same link, and their arrival; completion-coupled counterfactual; jitter of mainloops.
Not covered: contention at receivers and switches, several ranks that differ (one rank is run, its peers behave alike), clocks and
power, instruction-level effects inside a mainloop, atomics, and tiles that an instance draws dynamically.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage import tile_order
from xstage.errors import XStageError

try:
    import numba

    COMPILED = os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
    _jit = numba.njit(cache=True, fastmath=False, nogil=True)
except ImportError:  # the same source runs interpreted, far slower
    COMPILED = False

    def _jit(function: Any) -> Any:
        return function


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# How mainloop, staging and stores share the roles of an instance.
SEPARATE = 0  # own issuing role behind accumulator slots (Blackwell: tensor memory stages)
REGISTERS = 1  # the math warps store: nothing covers (Hopper, accumulators in registers)
STAGED = 2  # the math warps stage into shared memory, another warp drains it (Hopper)
ALTERNATING = 3  # two math warpgroups take turns; each stores its own tile (Hopper)
ROLES = {"separate": SEPARATE, "registers": REGISTERS, "staged": STAGED, "alternating": ALTERNATING}

_WAITS = ("nothing", "Linear-1 tiles of its row", "dispatched tokens of its row", "a free ring row")
_takes_linear2 = _jit(tile_order.takes_linear2)


@_jit
def _push(times, owners, size, time, owner):  # type: ignore[no-untyped-def]
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if times[up] < time or (times[up] == time and owners[up] <= owner):
            break
        times[i] = times[up]
        owners[i] = owners[up]
        i = up
    times[i] = time
    owners[i] = owner
    return size + 1


@_jit
def _pop(times, owners, size):  # type: ignore[no-untyped-def]
    """Remove the first entry (read it before); returns the new size."""
    size -= 1
    time = times[size]
    owner = owners[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (times[right] < times[child] or (times[right] == times[child] and owners[right] < owners[child])):
            child = right
        if time < times[child] or (time == times[child] and owner <= owners[child]):
            break
        times[i] = times[child]
        owners[i] = owners[child]
        i = child
    times[i] = time
    owners[i] = owner
    return size


@_jit
def _run(  # type: ignore[no-untyped-def]
    need, lag, pairs1, pairs2, instances, ctas, role_mode, slots, ring,
    mma1, mma2, store_bytes, store_floor, arrival,
    epilogue1, staging, speed, rate, capacity, producer_rate, producer_capacity, signal, latency, coupled,
    dispatch_total, dispatch_share, dispatch_rate, dispatch_held, jitter,
    mma_start, mma_end, span_start, store_start, span_end, stall, wait_kind, wait_tile, flow,
):  # fmt: skip
    rows = need.shape[0]
    end1, end2 = rows * pairs1, rows * pairs2
    roles = 2 if role_mode == 3 else 1
    k1, k2 = np.arange(instances), np.arange(instances)
    count = np.zeros(instances, np.int64)
    mma_free = np.zeros(instances)
    woken = np.zeros(instances)
    slot_free = np.zeros((instances, slots))
    issue_free = np.zeros((instances, roles))
    own_from = np.zeros((instances, roles))  # drain interval and size of the producer's store before
    own_until = np.zeros((instances, roles))
    own_bytes = np.zeros((instances, roles))
    done1 = np.zeros(rows, np.int64)
    done2 = np.zeros(rows, np.int64)
    ready1 = np.zeros(rows)
    free2 = np.zeros(rows)
    ready_list = np.full(rows, -1, np.int64)
    ring_list = np.full(rows, -1, np.int64)
    next_waiter = np.full(instances, -1, np.int64)

    starts_t = np.zeros(2 * instances + 1)  # stores that will begin
    starts_o = np.zeros(2 * instances + 1, np.int64)
    starts_n = 0
    ends_t = np.zeros(2 * instances + 1)  # active stores by odometer reading
    ends_o = np.zeros(2 * instances + 1, np.int64)
    ends_n = 0
    disp_t = np.zeros(instances + 1)  # instances that wait for dispatched bytes
    disp_o = np.zeros(instances + 1, np.int64)
    disp_n = 0
    tile_of = np.full(2 * instances, -1, np.int64)  # the tile whose store a role has under way
    slot_of = np.zeros(2 * instances, np.int64)
    runnable = np.arange(instances)[::-1].copy()
    run_n = instances

    now = 0.0
    issued = 0.0  # bytes that a CTA which stored all the time would have issued
    q = 0.0
    dispatched = 0.0
    flow_n = 0
    left = end1 + end2

    while True:
        # 1. Work off every instance that can go on without a further event.
        while run_n > 0:
            run_n -= 1
            g = runnable[run_n]
            while True:
                a, b = k1[g], k2[g]
                role = count[g] % roles
                if (a >= end1 and b >= end2) or tile_of[2 * g + role] >= 0:
                    break
                slot = count[g] % slots
                need_row = need[b // pairs2] if b < end2 else 0
                second = True
                if pairs1 > 0:
                    second = _takes_linear2(a, b, end1, end2, pairs1, need_row, lag)
                ready = woken[g]
                if second:
                    row = b // pairs2
                    tile = end1 + b
                    if done1[row] < pairs1:
                        wait_kind[g] = 1
                        wait_tile[g] = tile
                        next_waiter[g] = ready_list[row]
                        ready_list[row] = g
                        break
                    ready = max(ready, ready1[row])
                    busy = mma2[row]
                else:
                    row = a // pairs1
                    tile = a
                    if arrival[row] > dispatched:
                        wait_kind[g] = 2
                        wait_tile[g] = tile
                        disp_n = _push(disp_t, disp_o, disp_n, arrival[row], g)
                        break
                    if ring > 0 and row >= ring:
                        if done2[row - ring] < pairs2:
                            wait_kind[g] = 3
                            wait_tile[g] = tile
                            next_waiter[g] = ring_list[row - ring]
                            ring_list[row - ring] = g
                            break
                        ready = max(ready, free2[row - ring])
                    busy = mma1[row]
                wait_kind[g] = 0
                if jitter > 0.0:
                    busy = busy * (1.0 + jitter * (((tile * 40503) & 65535) / 32768.0 - 1.0))
                base = max(mma_free[g], ready)
                if role_mode == 0 or role_mode == 3:
                    begin = max(base, slot_free[g, slot])
                    stall[tile] = begin - base
                    finish = begin + busy
                    mma_free[g] = finish
                    issue = max(finish, issue_free[g, role])
                elif role_mode == 1:
                    begin = base
                    finish = begin + busy
                    issue = finish
                else:
                    begin = base
                    finish = begin + busy
                    issue = max(finish, slot_free[g, slot])
                    stall[tile] = issue - finish
                mma_start[tile] = begin
                mma_end[tile] = finish
                span_start[tile] = issue
                count[g] += 1
                if second:
                    k2[g] = b + instances
                    done2[row] += 1
                    free2[row] = max(free2[row], finish)
                    if done2[row] == pairs2 and ring > 0:
                        other = ring_list[row]
                        while other >= 0:
                            wait_kind[other] = 0
                            runnable[run_n] = other
                            run_n += 1
                            other = next_waiter[other]
                        ring_list[row] = -1
                    staged = issue + staging
                    if role_mode == 2:
                        mma_free[g] = staged
                        staged = max(staged, issue_free[g, 0])
                    store_start[tile] = staged
                    tile_of[2 * g + role] = tile
                    slot_of[2 * g + role] = slot
                    starts_n = _push(starts_t, starts_o, starts_n, staged, 2 * g + role)
                else:
                    k1[g] = a + instances
                    over = issue + epilogue1
                    store_start[tile] = over
                    span_end[tile] = over
                    slot_free[g, slot] = over
                    if role_mode == 0 or role_mode == 3:
                        issue_free[g, role] = over
                    else:
                        mma_free[g] = over
                    left -= 1
                    done1[row] += 1
                    ready1[row] = max(ready1[row], over + signal)
                    if done1[row] == pairs1:
                        other = ready_list[row]
                        while other >= 0:
                            wait_kind[other] = 0
                            runnable[run_n] = other
                            run_n += 1
                            other = next_waiter[other]
                        ready_list[row] = -1

        # 2. Rates until the next event.
        active = ends_n * ctas
        moving = dispatched < dispatch_total
        drain = rate
        pull = 0.0
        limit = capacity
        if moving:
            limit = capacity - dispatch_held
            pull = dispatch_rate
            if active > 0 or q > 0.0:
                pull = min(pull, dispatch_share * rate)
            drain = rate - pull
        inject = active * speed
        per_cta = speed
        growth = inject - drain
        if q >= limit and growth > 0.0:
            per_cta = drain / active
            growth = 0.0
        when = math.inf
        kind = 0
        if starts_n > 0:
            when = starts_t[0]
            kind = 1
        if ends_n > 0:
            t = now + (ends_t[0] - issued) / per_cta
            if t < when:
                when = t
                kind = 2
        if growth > 0.0 and q < limit:
            t = now + (limit - q) / growth
            if t < when:
                when = t
                kind = 3
        elif growth < 0.0 and q > 0.0:
            t = now - q / growth
            if t < when:
                when = t
                kind = 4
        if moving:
            goal = dispatch_total
            if disp_n > 0:
                goal = min(goal, disp_t[0])
            t = now + (goal - dispatched) / pull
            if t < when:
                when = t
                kind = 5
        if kind == 0:
            break

        # 3. Move there.
        step = max(when - now, 0.0)
        now = max(when, now)
        if ends_n > 0:
            issued += per_cta * step
        if growth != 0.0 and step > 0.0:
            q = min(max(q + growth * step, 0.0), limit)
        if moving:
            dispatched = min(dispatched + pull * step, dispatch_total)
        if kind == 1:
            owner = starts_o[0]
            starts_n = _pop(starts_t, starts_o, starts_n)
            g = owner >> 1
            row = (tile_of[owner] - end1) // pairs2
            amount = store_bytes[row]
            if ends_n == 0:
                issued = 0.0
            ends_n = _push(ends_t, ends_o, ends_n, issued + amount, owner)
        elif kind == 2:
            owner = ends_o[0]
            issued = ends_t[0]
            ends_n = _pop(ends_t, ends_o, ends_n)
            g = owner >> 1
            role = owner & 1
            tile = tile_of[owner]
            row = (tile - end1) // pairs2
            amount = store_bytes[row]
            begun = store_start[tile]
            over = max(now, begun + store_floor[row])
            # The producer's own share of the path: what is left of its store before, and its own drain.
            if amount > 0.0 and producer_rate < math.inf:
                old = 0.0
                if own_until[g, role] > begun:
                    old = own_bytes[g, role] * (own_until[g, role] - begun) / (own_until[g, role] - own_from[g, role])
                over = max(over, begun + (old + amount - producer_capacity) / producer_rate)
                own_from[g, role] = begun
                own_until[g, role] = max(over + q / rate, begun + (old + amount) / producer_rate)
                own_bytes[g, role] = old + amount
            if coupled:
                over = over + q / drain + latency
            span_end[tile] = over
            slot_free[g, slot_of[owner]] = over
            issue_free[g, role] = over
            if role_mode == 1:
                mma_free[g] = over
                stall[tile] = over - mma_end[tile]
            tile_of[owner] = -1
            left -= 1
            if wait_kind[g] == 0:  # with two roles the instance may be waiting already
                runnable[run_n] = g
                run_n += 1
        elif kind == 3:
            q = limit
        elif kind == 4:
            q = 0.0
        elif disp_n > 0 and dispatched >= disp_t[0] * (1.0 - 1e-12):
            dispatched = max(dispatched, disp_t[0])
            while disp_n > 0 and disp_t[0] <= dispatched:
                g = disp_o[0]
                disp_n = _pop(disp_t, disp_o, disp_n)
                wait_kind[g] = 0
                woken[g] = now
                runnable[run_n] = g
                run_n += 1
        elif dispatched >= dispatch_total * (1.0 - 1e-12):
            dispatched = dispatch_total
        if flow_n < flow.shape[0]:
            flow[flow_n, 0] = now
            flow[flow_n, 1] = q
            flow[flow_n, 2] = dispatched
            flow_n += 1
    return left, flow_n, now


@dataclass(frozen=True)
class Link:
    """The X-Stage that the instances share, in bytes and ns.

    Attributes:
        speed: bytes/ns at which one CTA issues unhindered. rate: R. capacity: Q (inf for local stores).
        producer_rate, producer_capacity: limits of a single CTA, inf where not known.
        latency_ns: T_lat, from drained to visible; used by the completion-coupled counterfactual only.
        dispatch_bytes: inbound tokens that share the link. dispatch_share: the part of R they get while stores are outstanding.
        dispatch_rate: their rate on a link without stores. dispatch_held_bytes: capacity they occupy (push), 0 for pulls.
    """

    speed: float
    rate: float
    capacity: float
    producer_rate: float = math.inf
    producer_capacity: float = math.inf
    latency_ns: float = 0.0
    dispatch_bytes: float = 0.0
    dispatch_share: float = 0.0
    dispatch_rate: float = 0.0
    dispatch_held_bytes: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """What a run gives. Tile arrays are indexed by k for Linear-1 and by rows·pairs1 + k for Linear-2; times in ns.

    Attributes:
        order: the order that was run. instances: G; tile k belongs to instance k mod G.
        mma_start, mma_end: mainloop. span_start: epilogue begins. store_start, span_end: issue of its remote stores.
        stall: time that the tensor cores waited for a slot (before the mainloop, or behind it where roles share it).
        flow: shape (n, 3), time, outstanding bytes, dispatched bytes; empty unless asked for.
        makespan_ns: last issue accepted (sender-visible end). drained_ns: link empty and dispatch over.
    """

    order: tile_order.TileOrder
    instances: int
    mma_start: Floats
    mma_end: Floats
    span_start: Floats
    store_start: Floats
    span_end: Floats
    stall: Floats
    makespan_ns: float
    drained_ns: float
    flow: Floats = field(default_factory=lambda: np.empty((0, 3)))

    @property
    def linear2(self) -> slice:
        """The Linear-2 tiles in the tile arrays."""
        return slice(self.order.rows * self.order.pairs1, None)

    @property
    def linear1(self) -> slice:
        return slice(0, self.order.rows * self.order.pairs1)

    @property
    def span_ns(self) -> Floats:
        """T_RS of each Linear-2 tile: epilogue begin to last store accepted (the figure-10 quantity)."""
        return np.asarray((self.span_end - self.span_start)[self.linear2])


def run_order(
    order: tile_order.TileOrder,
    instances: int,
    link: Link,
    mma_l1_ns: Any,
    mma_l2_ns: Any,
    store_bytes: Any,
    store_floor_ns: Any,
    *,
    epilogue_l1_ns: float = 0.0,
    staging_ns: float = 0.0,
    roles: str = "separate",
    slots: int = 2,
    ring_rows: int = 0,
    ctas_per_instance: int = 1,
    arrival_bytes: Any = 0.0,
    signal_ns: float = 0.0,
    completion_coupled: bool = False,
    jitter: float = 0.0,
    trace: bool = False,
) -> Timeline:
    """Run a tile order.

    Args:
        mma_l1_ns, mma_l2_ns, store_bytes (remote bytes per CTA and Linear-2 tile), store_floor_ns (T_iss⁰ of one tile's store),
        arrival_bytes (dispatched bytes up to and including the row): numbers or arrays of one value per row.
        roles: one of `ROLES`. slots: staging slots per instance. ring_rows: rows between the layers, 0 for no limit.
        signal_ns: time from the last Linear-1 epilogue of a row until its readers see the counter.
        jitter: relative half-width of a deterministic spread of mainloop times.

    Raises:
        XStageError: an argument outside its range, or a run in which nothing can go on; the message names the tiles that wait.
    """
    rows = order.rows
    for name, value, low in (
        ("instances", instances, 1), ("slots", slots, 1), ("ring_rows", ring_rows, 0), ("ctas_per_instance", ctas_per_instance, 1),
        ("epilogue_l1_ns", epilogue_l1_ns, 0), ("staging_ns", staging_ns, 0), ("signal_ns", signal_ns, 0), ("jitter", jitter, 0),
    ):  # fmt: skip
        if not (math.isfinite(value) and value >= low):
            raise XStageError(f"{name}: {value!r} must be a finite number of at least {low}")
    if roles not in ROLES:
        raise XStageError(f"roles: {roles!r} is unknown, known are {', '.join(ROLES)}")
    if jitter >= 1:
        raise XStageError(f"jitter: {jitter!r} must be below 1")
    if not (link.speed > 0 and link.rate > 0 and link.capacity > link.dispatch_held_bytes):
        raise XStageError(f"link: speed {link.speed:g}, rate {link.rate:g} and capacity {link.capacity:g} must be above 0")
    if link.dispatch_bytes > 0 and not (0 < link.dispatch_share < 1 and 0 < link.dispatch_rate <= link.rate):
        raise XStageError(f"dispatch_share: {link.dispatch_share:g} must lie in (0, 1) and dispatch_rate in (0, R]")

    def per_row(values: Any, name: str) -> Floats:
        array = np.array(np.broadcast_to(np.asarray(values, float), (rows,)))
        if not np.all(np.isfinite(array)) or np.any(array < 0):
            raise XStageError(f"{name}: must be finite and at least 0")
        return array

    arrival = per_row(arrival_bytes, "arrival_bytes")
    if rows and arrival.max() > link.dispatch_bytes * (1 + 1e-9):
        raise XStageError(f"arrival_bytes: {arrival.max():g} is more than is dispatched, {link.dispatch_bytes:g}")
    arrival = np.minimum(arrival, link.dispatch_bytes)
    tiles = order.tiles
    out = [np.zeros(tiles) for _ in range(6)]
    wait_kind, wait_tile = np.zeros(instances, np.int64), np.zeros(instances, np.int64)
    flow = np.zeros((8 * rows * order.pairs2 + 4 * rows + 64 if trace else 0, 3))
    alternating = roles == "alternating"
    left, used, now = _run(
        np.asarray(order.need, np.int64), max(order.lag, tile_order.NO_LAG), order.pairs1, order.pairs2, instances, ctas_per_instance,
        ROLES[roles], 2 if alternating else slots, ring_rows,
        per_row(mma_l1_ns, "mma_l1_ns"), per_row(mma_l2_ns, "mma_l2_ns"), per_row(store_bytes, "store_bytes"),
        per_row(store_floor_ns, "store_floor_ns"), arrival,
        float(epilogue_l1_ns), float(staging_ns), float(link.speed), float(link.rate), float(link.capacity), float(link.producer_rate),
        float(link.producer_capacity), float(signal_ns), float(link.latency_ns), bool(completion_coupled),
        float(link.dispatch_bytes), float(link.dispatch_share), float(link.dispatch_rate), float(link.dispatch_held_bytes), float(jitter),
        *out, wait_kind, wait_tile, flow,
    )  # fmt: skip
    if left:
        raise XStageError(_waiting(order, wait_kind, wait_tile, int(left)))
    makespan = float(out[4].max()) if tiles else 0.0
    a, b, c, d, e, f = out
    return Timeline(order, instances, a, b, c, d, e, f, makespan, max(float(now), makespan), flow[:used])


def _waiting(order: tile_order.TileOrder, kind: Ints, tile: Ints, left: int) -> str:
    """One line that names the tiles of a run in which nothing can go on."""
    end1 = order.rows * order.pairs1
    parts = []
    stuck = np.flatnonzero(kind)
    for g in stuck[:4]:
        second = tile[g] >= end1
        k = int(tile[g] - end1 if second else tile[g])
        row = k // (order.pairs2 if second else order.pairs1)
        parts.append(f"instance {g}: Linear-{2 if second else 1} tile {k} of row {row} waits for {_WAITS[kind[g]]}")
    more = f"; and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    return f"order {order.name}: nothing can progress, {left} tiles left; {'; '.join(parts)}{more}"
