"""Runs a function as every rank of a gloo group, one process each, and fails the test with the traceback of the first rank that failed."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(cases: Callable[[int, int], None], world: int, limit_s: float) -> None:
    """`cases(rank, world)`, a function at the top of its module, on `world` processes; each may take `limit_s` seconds to join."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    failures = context.SimpleQueue()
    workers = [context.Process(target=_rank, args=(cases, rank, world, port, failures)) for rank in range(world)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(limit_s)
    alive = [w for w in workers if w.is_alive()]
    for w in alive:
        w.kill()
    message = "" if failures.empty() else failures.get()
    assert not message, message
    assert not alive
    assert all(w.exitcode == 0 for w in workers)


def _rank(cases: Callable[[int, int], None], rank: int, world: int, port: int, failures: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        cases(rank, world)
        dist.barrier()
        dist.destroy_process_group()
        # Threads of torch's store that were cut off by a timeout may end a process that exits the long way with an abort.
        os._exit(0)
    except BaseException:
        failures.put(f"rank {rank}: {traceback.format_exc()}")
        raise
