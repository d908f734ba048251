"""What a machine is: what a result file carries so that two files can be told apart or compared.

Everything comes from `nvidia-smi` and installed package metadata; a field that cannot be read is absent. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_QUERY = {
    "gpu_name": "name",
    "driver": "driver_version",
    "power_cap_w": "power.limit",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.max.memory",
    "sm_clock_now_mhz": "clocks.sm",
    "temperature_c": "temperature.gpu",
}
_PACKAGES = (
    "torch", "triton", "nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels", "apache-tvm-ffi", "fa3-fwd", "sgl-deep-gemm", "numpy",
)  # fmt: skip


def fingerprint(sources: tuple[str, ...] = ()) -> dict[str, Any]:
    """The machine and the software, as plain JSON values.

    Args:
        sources: files, relative to this package, whose text decides what was measured; their hash becomes `kernel_sha256`.
    """
    out: dict[str, Any] = {"host": platform.platform(), "python": platform.python_version(), **gpu_facts(), **versions()}
    if sources:
        folder = Path(__file__).parent
        text = b"".join((folder / name).read_bytes() for name in sources)
        out["kernel_sha256"] = hashlib.sha256(text).hexdigest()
    return out


def gpu_facts() -> dict[str, Any]:
    """Name, count, driver, CUDA, clocks, power cap and NVLink of the GPUs; empty without `nvidia-smi`."""
    listing = _nvidia_smi("--query-gpu=" + ",".join(_QUERY.values()), "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    if not rows:
        return {}
    facts: dict[str, Any] = {name: _number(value) for name, value in zip(_QUERY, rows[0], strict=False)}
    facts["gpu_count"] = len(rows)
    head = re.search(r"CUDA Version:\s*([\d.]+)", _nvidia_smi())
    if head:
        facts["cuda_driver"] = head.group(1)
    links = re.findall(r"Link \d+:\s*([\d.]+) GB/s", _nvidia_smi("nvlink", "--status", "-i", "0"))
    if links:
        facts["nvlink_links"], facts["nvlink_gbps_per_link"] = len(links), float(links[0])
        facts["nvlink_generation"] = {25.781: 3, 26.562: 4, 53.125: 5}.get(float(links[0]), "unknown")
    return facts


def command() -> str:
    """The command line with file names instead of paths: what to type elsewhere, not where this machine keeps things."""
    program = "xstage" if Path(sys.argv[0]).name in ("__main__.py", "xstage") else Path(sys.argv[0]).name
    return " ".join([program, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter to a measurement."""
    out = {}
    for name in _PACKAGES:
        try:
            out[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def _nvidia_smi(*arguments: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _number(text: str) -> Any:
    try:
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        return text
