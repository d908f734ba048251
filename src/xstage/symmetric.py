"""Memory that every rank of a group can store into, agreement of all ranks before anything is launched, and failures with names.

* `SymmetricBuffer`: one allocation per rank on torch symmetric memory, its address on every rank. Multicast must be off: it is a
  different path with different limits (set TORCH_SYMM_MEM_DISABLE_MULTICAST=1; importing this module sets it where it is unset).
* `Agreement`: every rank says what it is about to do, and each refuses if another says something else. It runs over the group's
  key-value store on the host, so it works for CPU and GPU groups alike, during graph capture too, and ends within a bound.
* `Refusals`: where a rank that refuses a call leaves the reason, when there is no agreement on that call.
* `Watch`: the word through which a kernel reports a wait that gave up. It lives in pinned host memory, so that the host sees it
  without synchronising.

Generation counters and signal words are device memory laid out by the kernels that use them; who orders what is written in
`xstage.device.signals`. On CPUs there is nothing to map: `exchange` moves rows over gloo instead.

Not covered: multi-node memory, NVSHMEM back ends, growing a buffer in place.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from xstage.errors import PeerTimeout, UnsuitableMachine, XStageError

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Global ranks of a group, in group order."""
    return list(dist.get_process_group_ranks(group))


class SymmetricBuffer:
    """`size_bytes` on every rank of `group`, each mapped into every rank's address space and zeroed.

    Attributes:
        local: uint8 tensor, this rank's part. addresses: device address of every rank's part, as seen from this rank.

    Every rank must make it, with the same size, outside graph capture.

    Raises:
        UnsuitableMachine: the GPUs cannot map each other's memory, or multicast is on.
    """

    def __init__(self, size_bytes: int, group: dist.ProcessGroup, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric_memory

        try:
            self.local: Any = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)
            self._handle: Any = symmetric_memory.rendezvous(self.local, group.group_name)
        except RuntimeError as error:
            raise UnsuitableMachine(
                f"symmetric memory: {size_bytes} bytes on {device} could not be shared: {_first_line(error)}"
            ) from error
        if self._handle.multicast_ptr != 0:
            raise UnsuitableMachine(
                "symmetric memory: NVLink multicast is on; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before the first rendezvous"
            )
        self.size_bytes = size_bytes
        self._views = [self._handle.get_buffer(rank, (size_bytes,), torch.uint8) for rank in range(group.size())]
        self.addresses: list[int] = [view.data_ptr() for view in self._views]
        self.local.zero_()
        torch.cuda.synchronize(device)

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype, rank: int | None = None) -> Any:
        """A contiguous tensor inside this rank's part, or inside `rank`'s."""
        size = dtype.itemsize
        for n in shape:
            size *= n
        if offset_bytes + size > self.size_bytes:
            raise XStageError(f"shape: {tuple(shape)} needs {size} bytes at {offset_bytes}; the buffer has {self.size_bytes}")
        part = self.local if rank is None else self._views[rank]
        return part[offset_bytes : offset_bytes + size].view(dtype).view(*shape)

    def barrier(self, channel: int) -> None:
        """Torch's device-side barrier of all ranks on the current stream."""
        self._handle.barrier(channel=channel)

    def free(self) -> None:
        """Drop this rank's part. No peer may store into it any more."""
        self._views, self._handle, self.local, self.addresses = [], None, None, []


class Agreement:
    """Host-side comparison of what the ranks of a group are about to do.

    Args:
        group: whose ranks take part. tag: names this agreement in the store and in errors; the same on every rank.
        timeout_s: how long to wait for the slowest rank.
    """

    def __init__(self, group: dist.ProcessGroup, tag: str, timeout_s: float):
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._rank, self._world, self._tag, self._timeout_s = group.rank(), group.size(), tag, timeout_s
        self._ranks = ranks_of(group)
        self._round = 0

    def reach(self, what: str, value: Any) -> list[Any]:
        """Tell every rank `value` (anything JSON can hold) and return what each rank said.

        Raises:
            PeerTimeout: a rank did not say anything within the bound.
        """
        self._round += 1
        keys = [f"xstage/{self._tag}/{self._round}/{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], json.dumps(value))
        deadline = time.monotonic() + self._timeout_s
        said = []
        for rank, key in enumerate(keys):
            try:
                self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except (dist.DistStoreError, dist.DistError, RuntimeError) as error:
                raise PeerTimeout(
                    f"rank {self._ranks[rank]} did not say its {what} within {self._timeout_s:g} s (phase agreement, tag {self._tag!r})"
                ) from error
            said.append(json.loads(self._store.get(key)))
        return said

    def same(self, what: str, value: Any) -> None:
        """Return if every rank says the same `value`.

        Raises:
            XStageError: they differ; the message shows this rank's and the first other one's.
            PeerTimeout: see `reach`.
        """
        said = self.reach(what, value)
        mine = said[self._rank]
        for rank, theirs in enumerate(said):
            if theirs != mine:
                raise XStageError(
                    f"{what}: rank {self._ranks[self._rank]} was given {_differing(mine, theirs)}, rank {self._ranks[rank]} "
                    f"{_differing(theirs, mine)}; all ranks must be given the same"
                )


def allocate_together(
    size_bytes: int, group: dist.ProcessGroup, device: torch.device, agreement: Agreement
) -> tuple[SymmetricBuffer | None, list[str]]:  # fmt: skip
    """Symmetric memory on every rank, or None on every rank; and of each rank why it has none (empty: it is not the one)."""
    buffer, failure = None, ""
    hosts = agreement.reach("host", socket.gethostname())
    if len(set(hosts)) > 1:
        failure = f"ranks are on different hosts ({', '.join(sorted(set(hosts)))})"
    if not any(agreement.reach("readiness", failure)):
        try:
            buffer = SymmetricBuffer(size_bytes, group, device)
        except UnsuitableMachine as error:
            failure = str(error)
    failures = agreement.reach("allocation", failure)
    return (None if any(failures) else buffer), failures


class Refusals:
    """Why a rank refused the arguments of its last call, in the group's store, for peers that waited for it in vain.

    Nobody waits for anybody here, and a rank that never refuses never talks to the store.

    Args:
        group, tag: see `Agreement`.
    """

    def __init__(self, group: dist.ProcessGroup, tag: str):
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._rank, self._ranks, self._posted = group.rank(), ranks_of(group), False
        self._keys = [f"xstage/{tag}/refused/{rank}" for rank in range(group.size())]

    def post(self, reason: str) -> None:
        """Say that this rank refused its call, and why."""
        self._store.set(self._keys[self._rank], reason)
        self._posted = True

    def withdraw(self) -> None:
        """This rank has been given good arguments since."""
        if self._posted:
            self._store.set(self._keys[self._rank], "")
            self._posted = False

    def read(self) -> list[str]:
        """A sentence for every other rank that refused its last call."""
        return [self._of(rank) for rank in range(len(self._keys)) if rank != self._rank and self._of(rank)]

    def raise_for(self, rank: int) -> None:
        """Raise because rank `rank` of the group refused.

        Raises:
            XStageError: always.
        """
        raise XStageError(self._of(rank) or f"rank {self._ranks[rank]} refused its arguments")

    def _of(self, rank: int) -> str:
        key = self._keys[rank]
        reason = self._store.get(key).decode() if self._store.check([key]) else ""
        return f"rank {self._ranks[rank]} refused its arguments: {reason}" if reason else ""


class Watch:
    """Status word of the kernels of one object: 0, or generation << 32 | reason << 16 | peer << 8 | phase, phases counted from 1.

    Args:
        group: whose ranks meet. tag: names the object in errors. timeout_s: bound of a wait.
        phases: names of the object's kinds of meetings, in order.
    """

    def __init__(self, group: dist.ProcessGroup, tag: str, timeout_s: float, phases: Sequence[str]):
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._rank, self._ranks, self._tag, self._timeout_s = group.rank(), ranks_of(group), tag, timeout_s
        self._phases = tuple(phases)

    @property
    def address(self) -> int:
        """Address for kernels: pinned memory has one address for host and device (unified addressing)."""
        return int(self._word.data_ptr())

    def check(self) -> None:
        """Raise if a kernel gave up.

        Raises:
            PeerTimeout: a rank did not come, or it was working on another problem.
        """
        word = int(self._word[0])
        if word:
            raise PeerTimeout(describe_status(word, self._phases, self._ranks, self._rank, self._tag, self._timeout_s))


def describe_status(word: int, phases: Sequence[str], ranks: Sequence[int], rank: int, tag: str, timeout_s: float) -> str:
    """The sentence for a status word."""
    number = word & 0xFF
    phase = phases[number - 1] if 1 <= number <= len(phases) else f"number {number}"
    peer, reason, generation = ranks[word >> 8 & 0xFF], word >> 16 & 0xFF, word >> 32
    where = f"(rank {ranks[rank]}, phase {phase}, tag {tag!r}, call {generation})"
    if reason == 1:
        return f"rank {peer} did not arrive within {timeout_s:g} s {where}; the output is not complete"
    if reason == 3:
        return f"rank {peer} gave up on this call, its own error says why {where}; the output is not complete"
    return f"rank {peer} was working on other shapes, another layer or another buffer {where}; nothing was stored"


def exchange(parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Send `parts[r]` to rank r and return what each rank sent here (`shapes[r]`); CPU tensors over gloo, any dtype.

    Point to point, because gloo has no all-to-all of unequal parts. Empty parts are not sent.
    """
    me, ranks = group.rank(), ranks_of(group)
    out = [torch.empty(tuple(shape), dtype=parts[me].dtype, device=parts[me].device) for shape in shapes]
    out[me].copy_(parts[me])
    sent = [part.contiguous() for part in parts]
    operations = []
    for rank in range(group.size()):
        if rank != me and out[rank].numel():
            operations.append(dist.P2POp(dist.irecv, out[rank], ranks[rank], group))
        if rank != me and sent[rank].numel():
            operations.append(dist.P2POp(dist.isend, sent[rank], ranks[rank], group))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return out


def default_device(device: torch.device | str | None, group: dist.ProcessGroup) -> torch.device:
    """`device` with its index; None: the current GPU of a group that has NCCL, else the CPU."""
    if device is not None:
        chosen = torch.device(device)
        if chosen.type == "cuda" and chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
        return chosen
    if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_numbers: dict[tuple[str, str], itertools.count[int]] = {}


def joined(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one.

    Raises:
        XStageError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise XStageError("group: torch.distributed is not initialised (call torch.distributed.init_process_group first)")
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return group


def first_reason(group: dist.ProcessGroup, reasons: Sequence[str]) -> str:
    """The first rank that has a reason, by its global number, and the reason; empty where none has."""
    return next((f"rank {ranks_of(group)[rank]}: {reason}" for rank, reason in enumerate(reasons) if reason), "")


def next_number(group: dist.ProcessGroup, kind: str) -> int:
    """Objects of a kind are made in the same order on every rank of a group, so this number names one of them on all."""
    return next(_numbers.setdefault((group.group_name, kind), itertools.count(1)))


def _differing(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        names = [name for name in mine if mine[name] != theirs.get(name)]
        return ", ".join(f"{name} {mine[name]}" for name in names) or "nothing else"
    return str(mine)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
