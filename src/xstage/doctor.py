"""`doctor`: what runs on this machine, what does not, and the command that mends it. Never raises, changes nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import metadata, util

from xstage.fingerprint import gpu_facts

PINS = {
    "nvidia-cutlass-dsl": "4.8.1",
    "flash-attn-4": "4.0.0b36",
    "quack-kernels": "0.6.5",
    "apache-tvm-ffi": "0.1.15.post2",
    "torch-c-dlpack-ext": "0.1.5",
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `needed_for` names the verbs or operators that need it; `mend` is a command or an advice."""

    name: str
    ok: bool
    detail: str
    needed_for: str = ""
    mend: str = ""


def examine() -> list[Finding]:
    """Look at everything that a calibration or an operator needs."""
    found = [_python(), *_packages(), *_gpus(), _multicast()]
    missing = [f.name for f in found if not f.ok and "calibrate" in f.needed_for]
    found.append(Finding("predict, audit, report, compare", True, "run on any machine from shipped platforms"))
    detail = "torchrun --nproc-per-node 2 -m xstage calibrate --out platform.json" if not missing else f"needs: {', '.join(missing)}"
    found.append(Finding("calibrate", not missing, detail))
    return found


def text(findings: list[Finding]) -> str:
    """Findings as lines, the mending command under each that is not ok."""
    lines = []
    for f in findings:
        lines.append(f"{'ok  ' if f.ok else 'no  '} {f.name}: {f.detail}")
        if not f.ok and f.mend:
            lines.append(f"       mend: {f.mend}" + (f" (for {f.needed_for})" if f.needed_for else ""))
    return "\n".join(lines)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", sys.version_info >= (3, 11), version, "everything", "install Python 3.11 or newer")


def _packages() -> list[Finding]:
    mend = "pip install 'xstage[gpu]'"
    found = []
    torch = _version("torch")
    found.append(Finding("torch", bool(torch), torch or "not installed", "calibrate, operators", mend))
    for name, pin in PINS.items():
        have = _version(name)
        needed = "calibrate, operators" if name in ("nvidia-cutlass-dsl", "apache-tvm-ffi") else "operators"
        detail = "not installed" if not have else have if have == pin else f"{have}, xstage was measured with {pin}"
        found.append(Finding(name, have == pin, detail, needed, f"pip install '{name}=={pin}'"))
    return found


def _gpus() -> list[Finding]:
    facts = gpu_facts()
    if not facts:
        return [Finding("GPUs", False, "nvidia-smi finds none", "calibrate, operators", "run on a machine with two or more Hopper GPUs")]
    count = int(facts["gpu_count"])
    name = f"{count} × {facts['gpu_name']}, driver {facts.get('driver')}, CUDA {facts.get('cuda_driver', '?')}"
    found = [Finding("GPUs", count >= 2, name, "calibrate, operators", "run on a machine with two or more peer-connected GPUs")]
    links = facts.get("nvlink_links", 0)
    detail = (
        f"{links} links of {facts['nvlink_gbps_per_link']} GB/s, generation {facts['nvlink_generation']}"
        if links
        else "no active link seen"
    )
    found.append(Finding("NVLink", bool(links), detail, "", "stores go over PCIe instead: slower, but everything runs"))
    if count >= 2 and util.find_spec("torch") is not None:
        found += _torch_sees(count)
    return found


def _torch_sees(count: int) -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [
            Finding(
                "torch with CUDA", False, f"torch {torch.__version__} has no CUDA device", "calibrate, operators", "install a CUDA build"
            )
        ]
    seen = torch.cuda.device_count()
    capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
    refused = [(i, j) for i in range(seen) for j in range(seen) if i != j and not torch.cuda.can_device_access_peer(i, j)]
    peer = "every GPU reaches every other" if not refused else f"no access from {refused[0][0]} to {refused[0][1]}"
    return [
        Finding("torch with CUDA", seen >= 2, f"sees {seen} of {count} GPUs", "calibrate, operators", "unset CUDA_VISIBLE_DEVICES"),
        Finding("compute capability", capability == "9.0", capability, "calibrate, operators", "kernels are built for 9.0 (H100, H200)"),
        Finding("peer access", not refused, peer, "calibrate, operators", "check nvidia-smi topo -p2p r and the container's IPC settings"),
    ]


def _multicast() -> Finding:
    value = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    return Finding(
        "NVLink multicast", True, "off" if value == "1" else "not switched off in the environment; xstage does so for its own processes"
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
