"""Whether the ranks must meet before a call stores into peers' buffers: one object per set of buffers, asked once per call.

They need not when the call before wrote another buffer and waited for its peers: a peer published `done` of that call after everything
that its stream held before it, and so had read what this call overwrites (`xstage.attention.heads` has the argument at length). A CUDA
graph may be replayed after anything, so its first call meets; and once there is a graph, so does every call outside.
"""

from __future__ import annotations

import itertools

import torch

_unknown = itertools.count(1)


class Entry:
    """What the last call of an object left behind; at first an allocation, which was a meeting of all ranks."""

    def __init__(self) -> None:
        self._waited, self._capture, self._captured = True, 0, False

    def must_meet(self, *, waits: bool = True, always: bool = False) -> bool:
        """For the call that is about to be launched on the current stream.

        Args:
            waits: it will end with a meeting of all ranks. always: it meets whatever went before, as with a single buffer.
        """
        capture = _capture_id()
        self._captured |= capture != 0
        follows = self._waited and capture == self._capture and (capture != 0 or not self._captured)
        self._capture, self._waited = capture, waits
        return always or not follows


def _capture_id() -> int:
    """Which CUDA graph is being captured on the current stream; 0 for none, a new negative number where that cannot be told."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    from cuda.bindings import driver

    error, _, number, *_ = driver.cuStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    return int(number) if error == driver.CUresult.CUDA_SUCCESS else -next(_unknown)
