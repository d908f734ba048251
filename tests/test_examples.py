"""The examples run as their first lines say, on two CPU ranks. Not covered: GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine_code import needs

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("diffusers_ulysses.py", "restored: True", marks=needs("diffusers")),
        pytest.param("moe_transformers.py", "mode reference, 4 layers", marks=needs("transformers")),
    ],
)
def test_example(name: str, said: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29641", str(EXAMPLES / name)]
    run = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert said in run.stdout
