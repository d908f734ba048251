"""The queue of `burst_gap`: its limits, the exact distribution of the same queue, and a simulation of bursts and gaps that are nothing like
exponential. Waves and what is made of a measured row: tests/test_moe_spans.py.
"""

from __future__ import annotations

import heapq
import random
from math import perm

import numpy as np
import pytest

from xstage.burst_gap import Burst, queue_wait_ns, uneven_wait_ns
from xstage.platform import KiB, load_platform
from xstage.studies import moe_stall


@pytest.mark.parametrize("producers", [66, 88, 132])
def test_limits(producers: int) -> None:
    gap = 20_000.0
    assert queue_wait_ns(gap, 0.1 * gap, producers) < 1e-3 * gap
    for load in (1.5, 2.0, 4.0):
        assert queue_wait_ns(gap, load * gap, producers) == pytest.approx((load - 1) * gap, rel=1e-3)
    waits = [queue_wait_ns(gap, load * gap / 20, producers) for load in range(81)]
    assert waits == sorted(waits)
    # The rate bound is never undercut.
    assert all(wait > (load / 20 - 1) * gap - 1e-6 for load, wait in enumerate(waits))
    # Nobody waits for its own burst.
    assert queue_wait_ns(gap, 0.9 * gap, 1) == queue_wait_ns(gap, 4 * gap, 1) == queue_wait_ns(gap, 0.9 * gap, 0) == 0.0
    # Without a gap all the others are there.
    assert queue_wait_ns(0.0, gap, producers) == pytest.approx(gap * (producers - 1) / producers)
    stores = moe_stall.Burst(10_000.0, 2.0, 0.0, producers, 132)
    assert stores.stall_ns(gap, 30_000.0) == queue_wait_ns(gap, gap, producers)


def test_of_a_burst() -> None:
    platform = load_platform("h200-nvlink4", samples=False)
    gaps, producers = np.array([0.0, 5_000.0, 11_000.0, 40_000.0]), np.array([[8], [132]])
    burst = Burst(producers, 32 * KiB, gaps)
    waits = uneven_wait_ns(burst, platform)
    assert waits.shape == (2, 4)
    for k, of_k in zip(producers[:, 0], waits, strict=True):
        method = platform.method("st_global")
        service = k * 32 * KiB / method.drain_rate(k)
        cycles = method.issue_floor_ns(k, 32 * KiB) + gaps
        assert of_k.tolist() == [queue_wait_ns(cycle, service, k) for cycle in cycles]
    # A gap as long as the path needs is no end of waiting.
    assert waits[1, 0] > waits[1, 1] > 1_000 > waits[1, 2] > 100 > waits[1, 3]


@pytest.mark.parametrize("producers", [2, 3, 9])
@pytest.mark.parametrize("load", [0.3, 0.9, 1.0, 1.7])
def test_exact_distribution(producers: int, load: float) -> None:
    """With n bursts at the link the queue is in a state of weight N!/(N − n)! (s/Z)ⁿ; Little's law makes a time of it."""
    gap = 1_000.0
    service = load * gap / producers
    weights = [perm(producers, n) * (service / (gap - service)) ** n for n in range(producers + 1)]
    there = sum(n * w for n, w in enumerate(weights)) / sum(weights)
    rate = (1 - weights[0] / sum(weights)) / service
    assert queue_wait_ns(gap, load * gap, producers) == pytest.approx(there / rate - service, rel=1e-9)


def simulated_wait(producers: int, gap: float, service_ns: float, spread: float, shared: bool, bursts: int = 200_000) -> float:
    """Mean wait of bursts of one size. spread: of gaps, even within that part of their mean. shared: the link serves all bursts that are
    there at once, else one after the other."""
    draw = random.Random(1)
    service = service_ns / producers
    arrivals = [(draw.uniform(0, gap), n) for n in range(producers)]
    heapq.heapify(arrivals)
    here: list[tuple[float, float, int]] = []  # what a burst that was there all along would have got when this one ends; arrival; whose
    now = got = total = 0.0
    for done in range(bursts):
        while True:
            at_once = len(here) if shared else 1
            ends = now + (here[0][0] - got) * at_once if here else float("inf")
            if not arrivals or arrivals[0][0] > ends:
                break
            at, whose = heapq.heappop(arrivals)
            got += (at - now) / at_once if here else 0.0
            now = at
            begins = got if shared or not here else max(here)[0]
            heapq.heappush(here, (begins + service, at, whose))
        got, at, whose = heapq.heappop(here)
        now = ends
        total += now - at - service if done >= bursts // 5 else 0.0
        heapq.heappush(arrivals, (now + (gap - service) * draw.uniform(1 - spread, 1 + spread), whose))
    return total / (bursts - bursts // 5)


@pytest.mark.parametrize(("load", "spread", "alone"), [(0.7, 0.05, 120), (0.7, 1.0, 160), (0.985, 0.05, 390), (0.985, 1.0, 870)])
def test_bursts_of_one_size(load: float, spread: float, alone: float) -> None:
    """Served together they wait as long as the queue says, whatever the gaps; one after the other less. 0.985: Qwen3-30B, f = 1/2."""
    producers, gap = 77, 17_200.0
    said = queue_wait_ns(gap, load * gap, producers)
    assert simulated_wait(producers, gap, load * gap, spread, shared=True) == pytest.approx(said, rel=0.02)
    assert simulated_wait(producers, gap, load * gap, spread, shared=False) == pytest.approx(alone, rel=0.05)
