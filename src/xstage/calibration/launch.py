"""Launching the burst kernel and turning its records into a `Sample`.

`Launcher` owns everything on the device: the symmetric ring that peers write into, the record buffers, the compiled kernels.
`reduce_records` is plain numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage.calibration.protocol import Point
from xstage.errors import UnsuitableMachine, XStageError
from xstage.samples import Sample

RING_BYTES = 256 * 1024 * 1024
WAIT_LIMIT_NS = 2_000_000_000


def reduce_records(records: NDArray[np.int64], clocks: NDArray[np.int64], point: Point, rank: int) -> Sample:
    """One launch as a `Sample`.

    Args:
        records: (bursts, K, 4) start ns, then ticks until posted, source free, fence returned. clocks: (K, 4), see `burst_kernel`.
    """
    start = records[:, :, 0].astype(float)
    start -= start.min()
    ghz = float(np.median((clocks[:, 3] - clocks[:, 1]) / (clocks[:, 2] - clocks[:, 0])))
    posted, free, fenced = (records[:, :, i] / ghz for i in (1, 2, 3))
    # The sender may go on when its stores are issued; with bulk copies, when their source may be written again.
    onward = free if point.method == "bulk" else posted
    bursts, isolated = len(start), point.mode == "isolated"
    skip = 2 if isolated else bursts // 4
    gap_seen = start[1:] - (start[:-1] + (fenced if isolated else onward)[:-1])
    # Producers do not get equal shares and finish at different times: count only while all of them are active.
    closes = float(start[-1].min())
    opens = closes / 5
    progress = [np.interp((opens, closes), start[:, c], np.arange(bursts)) for c in range(start.shape[1])]
    done = float(sum(after - before for before, after in progress))
    return Sample(
        method=point.method, mode=point.mode, destination=point.destination, producers=point.producers,
        bytes_per_producer=point.bytes_per_producer, gap_ns=float(point.gap_ns), rank=rank, fan_out=point.fan_out,
        loaded=point.loaded, role=point.role,
        issue_ns=_thin(onward[skip:].mean(1)),
        issue_max_ns=_thin(onward[skip:].max(1)),
        post_ns=_thin(posted[skip:].mean(1)) if point.method == "bulk" else [],
        left_ns=_thin(free[skip:].mean(1)) if point.method == "st_global" and isolated else [],
        visible_ns=_thin(fenced[skip:].max(1)) if isolated else [],
        gap_seen_ns=_thin(gap_seen[skip - 1 :].mean(1)),
        skew_ns=_thin(start[skip:].max(1) - start[skip:].min(1)),
        window_ns=closes - opens, window_bytes=done * point.bytes_per_producer, window_bursts=done / start.shape[1],
        sm_clock_ghz=ghz,
    )  # fmt: skip


def _thin(values: NDArray[np.float64], most: int = 12) -> list[float]:
    """At most `most` values spread evenly over the launch, each the mean of its stretch: files stay small, drift stays visible."""
    return [float(part.mean()) for part in np.array_split(values, min(most, len(values)))]


class Launcher:
    """Device side of a calibration on one rank; a context manager.

    Raises:
        UnsuitableMachine: no CUDA device, a GPU that is not sm_90, fewer than two ranks, or no peer access.
    """

    def __init__(self, group: Any, methods: tuple[str, ...]) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        from xstage.calibration.burst_kernel import CLOCK_FIELDS, RECORD_FIELDS, compile_burst_kernel

        self.torch = torch
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.world < 2:
            raise UnsuitableMachine("group: 1 rank, at least 2 GPUs are needed to store to a peer")
        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        if (properties.major, properties.minor) != (9, 0):
            raise UnsuitableMachine(
                f"GPU: {properties.name} has compute capability {properties.major}.{properties.minor}, kernels are built for 9.0"
            )
        self.sms = int(properties.multi_processor_count)
        self.ring = symmetric.empty(RING_BYTES, dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(self.ring, group)
        if self.handle.multicast_ptr != 0:
            raise UnsuitableMachine("TORCH_SYMM_MEM_DISABLE_MULTICAST: must be 1 before torch is imported, NVLink multicast is on")
        pointers = [int(p) for p in self.handle.buffer_ptrs]
        peers = [pointers[(self.rank + 1 + i) % self.world] for i in range(self.world - 1)]
        self.peers = torch.tensor(peers, dtype=torch.int64, device=device)
        self.local = torch.tensor([pointers[self.rank]], dtype=torch.int64, device=device)
        self.records = torch.empty(256 * self.sms * RECORD_FIELDS, dtype=torch.int64, device=device)
        self.clocks = torch.empty(self.sms * CLOCK_FIELDS, dtype=torch.int64, device=device)
        self.starts = torch.zeros(256, dtype=torch.int64, device=device)
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self._fields = (RECORD_FIELDS, CLOCK_FIELDS)
        self.kernels = {method: compile_burst_kernel(method) for method in methods}

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        del self.handle, self.ring

    def launch(self, point: Point) -> Sample:
        """Run one point and wait for it. With `point.loaded`, all ranks must call it together.

        Raises:
            XStageError: K, B or the number of bursts is outside what the kernel takes, or a wait inside it gave up.
        """
        record_fields, clock_fields = self._fields
        k, b, n = point.producers, point.bytes_per_producer, point.bursts
        for name, value, low, high in (
            ("producers", k, 1, self.sms), ("bytes_per_producer", b, 16, RING_BYTES // k), ("bursts", n, 4, len(self.starts)),
            ("fan_out", point.fan_out, 1, self.world - 1),
        ):  # fmt: skip
            if not low <= value <= high:
                raise XStageError(f"{name}: {value} is outside {low} … {high}")
        if b % 16:
            raise XStageError(f"bytes_per_producer: {b} is not a multiple of 16")
        records = self.records[: n * k * record_fields].view(n, k, record_fields)
        clocks = self.clocks[: k * clock_fields].view(k, clock_fields)
        targets = self.local if point.destination == "local" else self.peers[: point.fan_out]
        self.starts.zero_()
        self.arrivals.zero_()
        if point.loaded:
            self.handle.barrier(channel=0, timeout_ms=30_000)
        self.kernels[point.method](
            targets, records, clocks, self.arrivals, self.starts[:n], self.status, b, max(1, RING_BYTES // (k * b)), point.gap_ns,
            int(point.mode != "free"), int(point.mode == "isolated"), WAIT_LIMIT_NS,
        )  # fmt: skip
        host = records.cpu().numpy(), clocks.cpu().numpy()
        if int(self.status.item()):
            self.status.zero_()
            raise XStageError(f"rank {self.rank}: phase burst, tag {point}: the producers did not meet within {WAIT_LIMIT_NS / 1e9:g} s")
        return reduce_records(*host, point, self.rank)

    def stores_arrive(self, method: str, barrier: Any) -> bool:
        """Send a known pattern to every peer and compare what arrived here; all ranks call it together.

        Args:
            barrier: a host barrier over the ranks.
        """
        torch = self.torch
        k, b = min(16, self.sms), 40 * 1024
        self.ring[: self.world * k * b].fill_(0xA5)
        torch.cuda.synchronize()
        barrier()
        self.launch(Point(method, "isolated", k, b, bursts=4))
        barrier()
        words = self.ring[: 4 * k * b].view(torch.int32).view(4, k, b // 4).cpu()
        barrier()
        return bool(torch.equal(words, expected_words(method, 4, k, b)))


def expected_words(method: str, bursts: int, producers: int, size: int) -> Any:
    """int32 (bursts, producers, size/4): what the burst kernel writes; a torch tensor on the CPU."""
    import torch

    from xstage.calibration.burst_kernel import THREADS, TILE_BYTES

    producer = torch.arange(producers, dtype=torch.int32).view(1, -1, 1)
    word = torch.arange(size // 4, dtype=torch.int32).view(1, 1, -1)
    repeats_after = TILE_BYTES // 4 if method == "bulk" else THREADS * 4
    return ((word % repeats_after) ^ (producer << 16)).expand(bursts, producers, size // 4).contiguous()
