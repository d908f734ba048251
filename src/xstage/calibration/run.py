"""`calibrate`: take the samples on every rank, fit a platform, hold it against the gates, write it down.

Order of work: for each repeat, the ranks measure one after the other (the reverse direction idle), then together (loaded). Within
a repeat the points run in an order rotated by the repeat, so that slow drift of the machine does not look like an effect of K, B
or G. Every sample is appended to a file at once; a rank that dies or a signal loses nothing that was taken.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from xstage.calibration.fit import fit_residuals, fit_tables, gates
from xstage.calibration.protocol import REPEATS, Point, points
from xstage.errors import CalibrationFailed, PeerTimeout, XStageError
from xstage.fingerprint import command, fingerprint
from xstage.platform import METHODS, Platform, check_writable
from xstage.samples import Sample, append, read

PEER_LIMIT_S = 180
KERNEL_SOURCES = ("calibration/burst_kernel.py", "device/stores.py", "device/clock.py", "device/signals.py")


def calibrate(
    group: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    name: str | None = None,
    methods: tuple[str, ...] = METHODS,
    repeats: int = REPEATS,
) -> Platform:
    """Measure this machine's X-Stage; every rank of `group` calls it, one GPU each.

    Args:
        group: torch process group with a CPU backend (gloo); None sets one up from torchrun's environment.
        out: platform file that rank 0 writes. Samples go to `<out>.rank<r>.jsonl` as they are taken; these are removed at the end.
        name: platform name, default from the GPU's. methods: store methods to measure. repeats: ≥ 1, at least 3 for a verdict.

    Returns:
        The fitted platform, the same on every rank. Failed gates are in `failed_gates`; the file is written all the same.

    Raises:
        UnsuitableMachine: no peer-connected sm_90 GPUs. PeerTimeout: a rank did not come to a meeting within 180 s.
        CalibrationFailed: samples are missing for a fit. XStageError: bad arguments.
    """
    for method in methods:
        if method not in METHODS:
            raise XStageError(f"methods: {method!r} is unknown, known are {', '.join(METHODS)}")
    if repeats < 1:
        raise XStageError(f"repeats: {repeats} is below 1")
    if out is not None:
        check_writable(out)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # multicast can take the GPUs of a shared host out of service
    import torch.distributed as dist

    from xstage.calibration.launch import Launcher

    own_group = group is None
    if own_group:
        group = _group_from_environment()
    rank = dist.get_rank(group)
    log = Path(f"{os.fspath(out) if out is not None else 'xstage-calibration'}.rank{rank}.jsonl")
    log.unlink(missing_ok=True)
    before = signal.signal(signal.SIGTERM, _stopped(rank, log))
    started = time.monotonic()
    try:
        with Launcher(group, methods) as launcher:
            meet = _Meeting(group, rank)
            arrived = all([launcher.stores_arrive(m, lambda: meet("check")) for m in methods])
            for repeat in range(repeats):
                _take(launcher, meet, methods, repeat, log)
                if rank == 0:
                    print(f"repeat {repeat + 1} of {repeats} done after {time.monotonic() - started:.0f} s", file=sys.stderr)
            sms, world = launcher.sms, launcher.world
        everything = _gather(group, (list(read(log)), arrived), meet)
    finally:
        signal.signal(signal.SIGTERM, before)
    samples = [s for part, _ in everything for s in part]
    platform = fit(samples, name=name, sms=sms, gpus=world, arrived=all(ok for _, ok in everything), command=command())
    if out is not None and rank == 0:
        platform.save(out)
    meet("end")
    if out is not None:
        log.unlink(missing_ok=True)
    if own_group:
        dist.destroy_process_group()
    return platform


def fit(samples: Iterable[Sample], *, name: str | None, sms: int, gpus: int, arrived: bool, command: str) -> Platform:
    """A platform from samples: tables, gates, fingerprint of this machine."""
    taken = tuple(samples)
    machine = fingerprint(KERNEL_SOURCES)
    platform = Platform(
        name=name or _slug(str(machine.get("gpu_name", "unknown"))),
        origin="measured",
        sms=sms,
        gpus=gpus,
        methods=fit_tables(taken),
        fingerprint=machine | {"sms": sms, "sm_clock_ghz_seen": _clock_range(taken)},
        samples=taken,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command,
    )
    return replace(platform, gates=gates(taken, platform, arrived), residuals=fit_residuals(taken, platform))


def _take(launcher: Any, meet: _Meeting, methods: tuple[str, ...], repeat: int, log: Path) -> None:
    todo = points(launcher.sms, methods, launcher.world - 1)
    start = repeat * len(todo) // 3
    todo = todo[start % len(todo) :] + todo[: start % len(todo)]
    alone = [p for p in todo if not p.loaded]
    for rank in range(launcher.world):
        if rank == launcher.rank:
            _measure(launcher, alone, log)
        meet(f"repeat {repeat}, rank {rank} alone")
    _measure(launcher, [p for p in todo if p.loaded], log)
    meet(f"repeat {repeat}, all together")


def _measure(launcher: Any, todo: list[Point], log: Path) -> None:
    before = ""
    for point in todo:
        if point.destination != before:  # the first launch on another path finds it cold: peer stores then drain a third slower
            launcher.launch(point)
            before = point.destination
        append(log, [launcher.launch(point)])


class _Meeting:
    """A host barrier that names who is missing."""

    def __init__(self, group: Any, rank: int) -> None:
        self.group, self.rank = group, rank

    def __call__(self, phase: str) -> None:
        import torch.distributed as dist

        try:
            dist.monitored_barrier(self.group, timeout=timedelta(seconds=PEER_LIMIT_S), wait_all_ranks=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise PeerTimeout(
                f"rank {self.rank}: phase calibrate, tag {phase!r}: a peer did not come in {PEER_LIMIT_S} s: {reason}"
            ) from None


def _gather(group: Any, mine: Any, meet: _Meeting) -> list[Any]:
    import torch.distributed as dist

    meet("gather")
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, mine, group)
    return out


def _group_from_environment() -> Any:
    import torch
    import torch.distributed as dist

    from xstage.errors import UnsuitableMachine

    if "RANK" not in os.environ:
        raise XStageError("group: no process group, start with: torchrun --nproc-per-node 2 -m xstage calibrate --out FILE")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count < 2:
        raise UnsuitableMachine(f"GPUs: {count} found, at least 2 with peer access are needed")
    if local >= count:
        raise UnsuitableMachine(f"nproc-per-node: rank {local} has no GPU, this machine has {count}")
    for peer in range(min(count, int(os.environ.get("LOCAL_WORLD_SIZE", "2")))):
        if peer != local and not torch.cuda.can_device_access_peer(local, peer):
            raise UnsuitableMachine(f"GPUs: {local} has no peer access to {peer}, stores cannot reach it")
    torch.cuda.set_device(local)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PEER_LIMIT_S))
    return dist.group.WORLD


def _stopped(rank: int, log: Path) -> Any:
    def handler(_number: int, _frame: FrameType | None) -> None:
        raise CalibrationFailed(f"rank {rank}: stopped from outside, most likely because another rank died; samples so far are in {log}")

    return handler


def _clock_range(samples: tuple[Sample, ...]) -> list[float]:
    clocks = [s.sm_clock_ghz for s in samples if s.sm_clock_ghz]
    return [round(min(clocks), 3), round(max(clocks), 3)] if clocks else []


def _slug(name: str) -> str:
    return name.lower().replace("nvidia ", "").replace(" ", "-")
