"""Calibration on real GPUs: it passes its gates, and a rank that dies loses no sample.

Each test starts its own torchrun, so plain `pytest tests/gpu` runs them; they are skipped without two GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xstage.platform import load_platform
from xstage.samples import read

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with peer access"),
]

COMMAND = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "xstage", "calibrate"]


def test_calibration_passes_its_gates(tmp_path: Path) -> None:
    out = tmp_path / "platform.json"
    result = subprocess.run([*COMMAND, "--out", str(out), "--check"], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    platform = load_platform(out)
    assert platform.failed_gates == ()
    assert set(platform.methods) == {"st_global", "bulk", "st_global_source_free"}
    assert platform.fingerprint["kernel_sha256"]
    assert not list(tmp_path.glob("*.jsonl"))
    assert "GB/s" in result.stdout


def test_a_rank_that_dies_leaves_its_peers_samples_on_disk(tmp_path: Path) -> None:
    out = tmp_path / "platform.json"
    run = subprocess.Popen([*COMMAND, "--out", str(out)], stderr=subprocess.PIPE, text=True)
    logs = [tmp_path / f"platform.json.rank{r}.jsonl" for r in (0, 1)]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (logs[0].exists() and logs[0].stat().st_size > 10_000):
        time.sleep(0.05)
    os.kill(_child(run.pid, rank=1), signal.SIGKILL)
    _, stderr = run.communicate(timeout=240)
    assert run.returncode != 0
    assert not out.exists()
    said = [line for line in stderr.splitlines() if line.startswith("xstage calibrate: rank 0")]
    assert len(said) == 1, stderr[-3000:]
    assert len(list(read(logs[0]))) > 10


def _child(parent: int, rank: int) -> int:
    """Process id of a rank that torchrun started."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment and int(stat.rsplit(")", 1)[1].split()[1]) == parent:
            return int(entry.name)
    raise AssertionError(f"rank {rank} of {parent} was not found")
