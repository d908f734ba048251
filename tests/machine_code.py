"""PTX and machine code of kernels that were compiled with CUTE_DSL_KEEP="ptx,cubin"."""

import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Kernels compile where their packages are: the test environment has them on Linux."""
    return pytest.mark.skipif(any(find_spec(name) is None for name in packages), reason="the kernel packages are not installed")


needs_compiler = needs("cutlass", "triton")


def disassembler() -> str:
    """The one on the path, else the one that triton ships."""
    import triton

    return shutil.which("nvdisasm") or str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm")


def content(artifact: str | bytes) -> bytes:
    """What was kept: the compiler hands out the text itself or the path of a file."""
    raw = artifact.encode() if isinstance(artifact, str) else artifact
    return raw if b"\0" in raw or b"\n" in raw else Path(raw.decode()).read_bytes()


def of(kernel: Any) -> dict[str, str]:
    """`ptx` and `sass` of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content(kernel.__cubin__))
        file.flush()
        sass = subprocess.run([disassembler(), "-c", file.name], capture_output=True, text=True, check=True).stdout
    return {"ptx": content(kernel.__ptx__).decode(), "sass": sass}
