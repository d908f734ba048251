"""Which `schedule` and `lead_rows` to give `xstage.MegaMoE`: its kernel simulated for each, and another than `auto` only for a gain beyond
the model's error.

`planner` chooses a design for a kernel that has yet to be written, in which every instance has its own share of the tiles. This asks the
simulator of the kernel that there is (`simulate.layer`). Against what was measured on two H200s it misses the time of one order over the
other's by 2.2% in the median of ten rows and 5.9% at most (results/simulated/eight_moe.json); `ERROR` is the former.
What `rows_once` would do is said of the choice; nothing is chosen by it, for it has not been measured on a link.

Not covered: few tokens, what an order reads from memory, clocks, ranks of different load; `serial` and `alternating`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from xstage.errors import XStageError
from xstage.moe.auto_order import EPILOGUE_NS, MXFP4_EPILOGUE_NS, MXFP4_NS_PER_K, NS_PER_K, auto_order
from xstage.moe.shapes import MoEShape
from xstage.moe.work_table import TILE_ROWS
from xstage.platform import Platform
from xstage.simulate.layer import order_of, simulate_layer

ERROR = 0.022
LEAD_FACTORS = (0.5, 2, 4, 8)  # of the kernel's own lead
LINES = {"fp8": (EPILOGUE_NS, NS_PER_K), "mxfp4": (MXFP4_EPILOGUE_NS, MXFP4_NS_PER_K)}


@dataclass(frozen=True)
class Candidate:
    """schedule, lead_rows: what `MegaMoE` is given; None: its own lead. lead: the lead that this is. time_ns: of the slowest rank's kernel.
    stall_ns: by how much remote results lengthen the time from one Linear-2 tile of an SM to the next, mean over ranks."""

    schedule: str
    lead_rows: int | None
    lead: int
    time_ns: float
    stall_ns: float


@dataclass(frozen=True)
class LayerPlan:
    """model, platform: names. share: f. auto: what `schedule="auto"` takes. choice: one of candidates, which are sorted by time.
    once_ns: time of the choice with `rows_once`."""

    model: str
    platform: str
    share: float
    auto: Candidate
    choice: Candidate
    candidates: tuple[Candidate, ...]
    once_ns: float

    def describe(self) -> list[str]:
        """One sentence, then every candidate, as lines for people."""
        fastest, kept = self.candidates[0], f'schedule="auto", {_said(self.auto)}'
        gain, error = self.auto.time_ns / fastest.time_ns - 1, f"the model's error is {ERROR:.1%}"
        if fastest == self.auto:
            why = f"keep {kept}: nothing is faster."
        elif self.choice == self.auto:
            why = f"keep {kept}: {_said(fastest)} would gain {gain:.1%}, {error}."
        else:
            why = f"{_said(fastest)}: {kept}, would take {gain:.1%} longer, {error}."
        lines = [f"{self.model} on {self.platform}, f = {self.share:g}: {why}", "time of the kernel, stall of a Linear-2 tile, predicted:"]
        for c in self.candidates:
            mark = "→" if c == self.choice else "·" if c == self.auto else " "
            own = " (its own lead)" if c.lead_rows is None and c.schedule == "interleaved" else ""
            lines.append(
                f" {mark} {c.time_ns / 1e3:9.1f} µs {c.stall_ns / 1e3:6.1f} µs  {_said(c)}{own}{' (auto)' if c == self.auto else ''}"
            )
        change = self.once_ns / self.choice.time_ns - 1
        return [*lines, f"→ with rows_once=True: {self.once_ns / 1e3:.1f} µs ({change:+.1%}); not yet measured on a link."]

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return {**asdict(self), "predicted": True}


def plan_layer(
    model: MoEShape, counts: Sequence[int], ranks: int, platform: Platform, *, share: float | None = None, weights: str = "fp8"
) -> LayerPlan:  # fmt: skip
    """Simulate the layer in every order and choose.

    Args:
        counts: rows of all experts, from all ranks. share: f, of rows that come from other ranks; None: 1 − 1/ranks.
        weights: `weight_format` of `MegaMoE`.

    Raises:
        XStageError: counts that are not the model's experts, experts that the ranks do not divide, no row at all, or an unknown format.
    """
    if len(counts) != model.experts or model.experts % ranks:
        raise XStageError(f"counts: {len(counts)} must be the {model.experts} experts of {model.name}, which {ranks} ranks must divide")
    if not sum(counts):
        raise XStageError("counts: 0 rows; at least one is needed")
    if weights not in LINES:
        raise XStageError(f"weights: {weights!r} is not one of {', '.join(LINES)}")
    f = 1 - 1 / ranks if share is None else share
    own = order_of("interleaved", model, platform).lead_rows
    most = max(sum(-(-n // TILE_ROWS) for n in counts[r * len(counts) // ranks : (r + 1) * len(counts) // ranks]) for r in range(ranks))
    leads = [None, *(lead for lead in (round(factor * own) for factor in LEAD_FACTORS) if lead < most)]
    found: dict[tuple[str, int], Candidate] = {}
    for schedule, lead_rows in [("expert_wave", None), ("linear1_first", None), *(("interleaved", lead) for lead in leads)]:
        order = order_of(schedule, model, platform, lead_rows)
        if (schedule, order.lead) in found:
            continue
        there, here = (simulate_layer(model, counts, f, order, ranks, platform, LINES[weights], remote=remote) for remote in (True, False))
        lead = most if schedule == "linear1_first" else order.lead_rows
        stall = mean(max(a.period_ns - b.period_ns, 0.0) for a, b in zip(there, here, strict=True))
        found[schedule, order.lead] = Candidate(schedule, lead_rows, lead, max(run.time_ns for run in there), stall)
    candidates = tuple(sorted(found.values(), key=lambda c: c.time_ns))
    schedule = auto_order(model, sum(counts) // (ranks * model.top_k), ranks, f)
    auto = next(c for c in candidates if c.schedule == schedule and c.lead_rows is None)
    name = taken({_said(c): c.time_ns for c in candidates}, _said(auto))
    choice = next(c for c in candidates if _said(c) == name)
    order = order_of(choice.schedule, model, platform, choice.lead_rows)
    once = simulate_layer(model, counts, f, order, ranks, platform, LINES[weights], once=True)
    return LayerPlan(model.name, platform.name, f, auto, choice, candidates, max(run.time_ns for run in once))


def taken(times: Mapping[str, float], auto: str) -> str:
    """The name of the shortest time, or `auto` where that gains no more than the model's error."""
    fastest = min(times, key=times.__getitem__)
    return fastest if times[auto] > (1 + ERROR) * times[fastest] else auto


def _said(c: Candidate) -> str:
    return c.schedule if c.schedule != "interleaved" else f"{c.schedule}, D = {c.lead}"
