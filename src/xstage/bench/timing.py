"""Timing of variants against each other on one or more GPUs, and the files that keep what was measured.

Protocol (`interleaved`): in every round each variant runs once, in an order that rotates by one per round; before each run all ranks meet,
the GPU idles, and one run goes ahead untimed; then one of a few calls is timed by events. A loop over one variant alone would
throttle and drift by more than the differences in question. Every rank's raw times are kept; the slowest rank counts.

Sender-visible time is what a launch occupies on its own rank. Receiver-visible time needs a variant whose kernel ends only when its
output is complete; the protocol does not make one out of the other.

With `cycles` every run also has its mean SM clock, so that a difference of times comes apart into cycles and clock (`apart`). A kernel
that reads the clocks of all SMs stands before and after the timed calls, outside of their events; all variants run behind it alike.

Not covered: time inside a kernel, energy.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from xstage.errors import UnsuitableMachine, XStageError
from xstage.fingerprint import command, fingerprint
from xstage.platform import check_writable


@dataclass(frozen=True)
class Times:
    """Raw times of one variant.

    Attributes:
        time_ns: per rank, per round: nanoseconds per call. clock_mhz: the SM clock read while it ran, None where not readable.
        launches: timed calls per round. mean_clock_mhz: per rank, per round: over exactly the timed calls; None if not asked for.
    """

    time_ns: list[list[float]]
    clock_mhz: list[list[int | None]]
    launches: int
    mean_clock_mhz: list[list[float]] | None = None

    @property
    def median_ns(self) -> list[float]:
        """Per rank."""
        return [median(rounds) for rounds in self.time_ns]

    @property
    def slowest_ns(self) -> float:
        """Median of the slowest rank."""
        return max(self.median_ns)

    @property
    def spread_ns(self) -> float:
        """Interquartile range of the slowest rank."""
        rounds = sorted(max(self.time_ns, key=median))
        return rounds[(3 * len(rounds)) // 4] - rounds[len(rounds) // 4]

    def to_json(self) -> dict[str, Any]:
        """`mean_clock_mhz` only where it was asked for."""
        clocks = self.mean_clock_mhz
        return {
            "slowest_ns": round(self.slowest_ns, 1), "spread_ns": round(self.spread_ns, 1),
            "median_ns": [round(t, 1) for t in self.median_ns], "launches": self.launches,
            "time_ns": [[round(t, 1) for t in rounds] for rounds in self.time_ns], "clock_mhz": self.clock_mhz,
            **({} if clocks is None else {"mean_clock_mhz": [[round(f, 2) for f in rounds] for rounds in clocks]}),
        }  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """What one variant takes longer than another, per call, on one rank; medians over rounds of differences within a round.

    Each is a median of its own, so `clock_ns` and `cycles_ns` need not add up to `total_ns` where rounds scatter.

    Attributes:
        rank: the slowest with the slower variant. total_ns: t − t₀. cycles: t f − t₀ f₀, f being the mean SM clock.
        clock_ns: t₀ (f₀/f − 1), what as many cycles as before take longer at the new clock. cycles_ns: the rest, (t f − t₀ f₀) / f.
        clock_mhz, base_clock_mhz: f and f₀, medians over rounds.
    """

    rank: int
    total_ns: float
    cycles: float
    clock_ns: float
    cycles_ns: float
    clock_mhz: float
    base_clock_mhz: float


def apart(times: Times, base: Times) -> Difference | None:
    """`times` over `base`, which ran in the same rounds; None if either has no mean clocks.

    Paired within rounds, because the clock of a GPU at its power limit drifts from round to round. One rank throughout, because the GPUs
    have clocks of their own.
    """
    if times.mean_clock_mhz is None or base.mean_clock_mhz is None:
        return None
    rank = max(range(len(times.time_ns)), key=times.median_ns.__getitem__)
    t, f = times.time_ns[rank], [mhz / 1e3 for mhz in times.mean_clock_mhz[rank]]
    t0, f0 = base.time_ns[rank], [mhz / 1e3 for mhz in base.mean_clock_mhz[rank]]
    rounds = list(zip(t, f, t0, f0, strict=True))
    return Difference(
        rank=rank,
        total_ns=median(a - b for a, _, b, _ in rounds),
        cycles=median(a * ghz - b * base_ghz for a, ghz, b, base_ghz in rounds),
        clock_ns=median(b * (base_ghz / ghz - 1) for _, ghz, b, base_ghz in rounds),
        cycles_ns=median(a - b * base_ghz / ghz for a, ghz, b, base_ghz in rounds),
        clock_mhz=1e3 * median(f), base_clock_mhz=1e3 * median(f0),
    )  # fmt: skip


def mean_clock_mhz(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> float:
    """Median over SMs of cycles over time between two reads of the clocks.

    Args:
        before, after: rows of SM, its cycles, nanoseconds, as `clock_sm90` writes them; of an SM that has several the first counts.

    Raises:
        XStageError: no SM is in both, or no time passed between them.
    """
    first, last = ({sm: (cycles, ns) for sm, cycles, ns in reversed(rows)} for rows in (before, after))
    passed = [(last[sm][0] - first[sm][0], last[sm][1] - first[sm][1]) for sm in first.keys() & last.keys()]
    shortest = min((ns for _, ns in passed), default=0)
    if shortest <= 0:
        raise XStageError(f"mean clock: {len(passed)} SMs were read twice, {shortest} ns apart at least")
    return 1e3 * median(cycles / ns for cycles, ns in passed)


def interleaved(
    variants: Mapping[str, Callable[[], Any]], *, calls: int = 1, rounds: int = 9, pause_s: float = 0.05,
    group: dist.ProcessGroup | None = None, cycles: bool = False,
) -> dict[str, Times]:  # fmt: skip
    """Time every variant in every round (see the module's protocol). All ranks of `group` must call it together.

    Args:
        variants: each makes `calls` calls when it runs. rounds: runs per variant. pause_s: idle time before each run, seconds.
        cycles: measure the mean SM clock of every run too. Not by default: it needs the kernel packages and a Hopper GPU, and puts a
            kernel between the untimed and the timed run.

    Raises:
        XStageError: no variants, or fewer than one round or call.
    """
    if not variants or calls < 1 or rounds < 1:
        raise XStageError(f"interleaved: {len(variants)} variants, {calls} calls, {rounds} rounds; each must be at least 1")
    names = list(variants)
    mine: dict[str, list[float]] = {name: [] for name in names}
    clocks: dict[str, list[int | None]] = {name: [] for name in names}
    means: dict[str, list[float]] = {name: [] for name in names}
    read_before, read_after, reads = _clock_reads() if cycles else (_nothing, _nothing, None)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            function = variants[name]
            meet(group)
            time.sleep(pause_s)
            function()
            read_before()
            begin.record()
            function()
            end.record()
            read_after()
            clocks[name].append(sm_clock_mhz())
            torch.cuda.synchronize()
            mine[name].append(begin.elapsed_time(end) * 1e6 / calls)
            if reads is not None:
                means[name].append(mean_clock_mhz(*reads.tolist()))
    everyone = gather([mine, clocks, means], group)
    found = {name: [[ranks[i][name] for ranks in everyone] for i in range(3)] for name in names}
    return {name: Times(t, clock, calls, mean if cycles else None) for name, (t, clock, mean) in found.items()}


def _clock_reads() -> tuple[Callable[[], Any], Callable[[], Any], torch.Tensor]:
    """What reads the clocks before and after a run, and where the reads are: int64 (2, CTAs, `clock_sm90.FIELDS`)."""
    from xstage.bench.clock_sm90 import CTAS_PER_SM, FIELDS, compiled_clock_kernel

    kernel, device = compiled_clock_kernel(), torch.device("cuda", torch.cuda.current_device())
    ctas = CTAS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    reads = torch.zeros(2, ctas, FIELDS, dtype=torch.int64, device=device)
    before, after = (partial(kernel, part) for part in reads)
    before()  # its first launch loads it, which must not happen between runs
    return before, after, reads


def _nothing() -> None:
    pass


def start_group(what: str, backend: str = "nccl") -> None:
    """The default NCCL group of a benchmark that `torchrun` started, one GPU per process.

    Args:
        what: the command, for errors. backend: `nccl`, or back ends per device, for example `cpu:gloo,cuda:nccl`.

    Raises:
        UnsuitableMachine: fewer than two GPUs or ranks, or not started by torchrun.
    """
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        raise UnsuitableMachine(f"{what}: needs two peer-connected GPUs, found {torch.cuda.device_count()}")
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise UnsuitableMachine(f"{what}: start it with torchrun --nproc-per-node 2 (one process per GPU)")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        dist.init_process_group(backend, device_id=device)
    if dist.get_world_size() < 2:
        raise UnsuitableMachine(f"{what}: needs at least two ranks")


def meet(group: dist.ProcessGroup | None = None) -> None:
    """All ranks idle, together."""
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier(group)
        torch.cuda.synchronize()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank has, in rank order."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group)
    return everyone


def sm_clock_mhz() -> int | None:
    """The SM clock now, or None where the management library is not installed."""
    try:
        return int(torch.cuda.clock_rate())
    except (ImportError, ModuleNotFoundError, RuntimeError, AttributeError):
        return None


def launches_for(time_ns: float, budget_ns: float = 4e6, most: int = 20, least: int = 2) -> int:
    """Timed launches so that one run takes about `budget_ns`: enough to average, too few to heat."""
    return max(least, min(most, int(budget_ns / max(time_ns, 1.0))))


class ResultFile:
    """A JSON result file that is complete after every `add`, so that a run that is cut short keeps what it has.

    Args:
        path: written by rank 0 only. An unfinished file of the same study, settings and kind of machine is continued: its rows and
            headline stay.
        study: what was measured. write: False on ranks that should not write.

    Raises:
        XStageError: the path cannot be written; found before anything is measured.
    """

    def __init__(self, path: str | os.PathLike[str], study: str, *, write: bool = True, settings: Mapping[str, Any] | None = None):
        self.path, self._write = Path(path), write
        if write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(self.path)
        self.content: dict[str, Any] = {
            "study": study, "created": datetime.now(UTC).isoformat(timespec="seconds"), "command": command(),
            "fingerprint": fingerprint(), "settings": dict(settings or {}), "complete": False, "rows": [],
        }  # fmt: skip
        if write:
            self._continue()
        self._save()

    def _continue(self) -> None:
        try:
            before = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        same = all(before.get(key) == json.loads(json.dumps(self.content[key])) for key in ("study", "settings"))
        machine = all(before.get("fingerprint", {}).get(k) == self.content["fingerprint"].get(k) for k in ("gpu_name", "driver", "torch"))
        if same and machine and not before.get("complete", True):
            self.content |= {key: before[key] for key in ("rows", "headline") if key in before}

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row and save."""
        self.content["rows"].append(dict(row))
        self._save()

    def finish(self) -> None:
        """Mark the run as complete and save."""
        self.content["complete"] = True
        self._save()

    def _save(self) -> None:
        if self._write:
            partial = self.path.with_name(self.path.name + ".partial")
            partial.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
            partial.replace(self.path)
