"""What GPU test files of several ranks share: sections that torchrun runs one after another, and that pytest reports one by one.

A file has a map RUNS from a section's name to `function(options)`, starts `main(RUNS, …)` when it is run, and asks `outcome` under pytest.
Sections run in every rank; a rank that fails ends the run, because nothing after it can be trusted.

    XSTAGE_TEST_ONE_GPU=1 torchrun --nproc-per-node 2 FILE [--sections …]

puts all ranks on GPU 0, over gloo (NCCL refuses two ranks on one GPU). Their kernels then take turns, a time slice each, so that a wait
on a peer costs milliseconds: signals, addresses, bytes and bits are tested, but neither NVLink nor the order in which its stores arrive,
and no time that is measured means anything. MPS must be off: with it the ranks would share the SMs, and a kernel that waits would keep
those that its peer's kernel needs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ONE_GPU = os.environ.get("XSTAGE_TEST_ONE_GPU") == "1"
# What objects are given as their device. They find a GPU by themselves in a group that has NCCL.
DEVICE = "cuda" if ONE_GPU else None
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < (1 if ONE_GPU else 2), reason="needs two peer-connected GPUs, or one and to be told"),
]


@cache
def report(file: str, port: int, *options: str) -> dict[str, str]:
    """Every section of `file`, run once on two ranks with these options: `passed`, or why not."""
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), file, "--report", *options],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, run.stdout[-2000:] + run.stderr[-4000:]
    return dict(json.loads(lines[-1].removeprefix("REPORT ")))


def outcome(file: str, port: int, section: str, *options: str) -> str:
    return report(file, port, *options).get(section, "did not run")


def say(*words: object) -> None:
    if RANK == 0:
        print(*words, file=sys.stderr, flush=True)


def everywhere(ok: bool) -> bool:
    """True if it is True on every rank."""
    flag = torch.tensor([int(ok)], device="cuda")
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def settle() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def arguments(sections: Sequence[str], **numbers: int) -> argparse.ArgumentParser:
    """`--sections`, a number by each of the names, `--report`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sections", default=",".join(sections))
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--report", action="store_true")
    return parser


def join(one_gpu: bool = ONE_GPU) -> None:
    """Make the default group, and this rank's GPU the current one. On one GPU a process without torchrun is a group by itself."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if not one_gpu:
        torch.cuda.set_device(RANK)
        dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
        return
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # torch reads it at every rendezvous
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(0)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main(runs: Mapping[str, Callable[[argparse.Namespace], Any]], options: argparse.Namespace) -> None:
    """Run sections in this rank, print what became of them, and leave the process."""
    join()
    results: dict[str, str] = {}
    for section in options.sections.split(","):
        begun = time.time()
        try:
            runs[section](options)
            results[section] = "passed"
        except BaseException as error:  # pytest.raises fails with one
            traceback.print_exc()
            results[section] = f"rank {RANK}: {type(error).__name__}: {error}"[:2000]
            print(f"rank {RANK} {section}: {results[section]}", file=sys.stderr, flush=True)
            if RANK != 0:
                os._exit(1)
            break
        say(f"{section}: passed ({time.time() - begun:.0f} s)")
    if RANK == 0:
        print("REPORT " + json.dumps(results), flush=True)
    failed = any(text != "passed" for text in results.values())
    if not failed:
        settle()
    os._exit(int(failed))
