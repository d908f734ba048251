"""`xstage report`: choose the platform (calibrate where GPUs with peer access are found), audit designs on it, write the page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from xstage.design import audit, designs, load_design
from xstage.doctor import examine
from xstage.fingerprint import gpu_facts
from xstage.platform import Platform, check_writable, load_platform
from xstage.report.charts import save_charts
from xstage.report.page import write_page

SHIPPED = "h200-nvlink4"
CALIBRATION_LIMIT_S = 600


def write_report(
    out: str | os.PathLike[str],
    *,
    platform: str | os.PathLike[str] | None = None,
    designs_to_audit: Sequence[str] | None = None,
    charts: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the report page and return its path.

    Args:
        out: HTML file. platform: gallery name or file; None calibrates where this machine allows it (the platform file is kept
            beside the page as `<page>.platform.json`) and takes the shipped H200 elsewhere, which the page says.
        designs_to_audit: shipped names or TOML files, default all shipped ones that the platform has the store method for.
        charts: folder for the charts as SVG and PNG.

    Raises:
        XStageError: a path cannot be written, or a platform or design cannot be read.
    """
    check_writable(out)
    notes: list[str] = []
    chosen = load_platform(platform) if platform is not None else _measure_or_ship(Path(out), notes)
    wanted = [load_design(name) for name in (designs() if designs_to_audit is None else designs_to_audit)]
    audits = [audit(design, chosen) for design in wanted if designs_to_audit is not None or design.method in chosen.methods]
    if charts is not None:
        save_charts(charts, chosen)
    return write_page(out, chosen, audits, notes)


def _measure_or_ship(page: Path, notes: list[str]) -> Platform:
    if not next(f.ok for f in examine() if f.name == "calibrate"):
        notes.append(
            f"No peer-connected GPUs were found here, so this page shows {SHIPPED}, which ships with xstage and was measured elsewhere."
        )
        return load_platform(SHIPPED)
    kept = page.with_name(page.name + ".platform.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpu_facts()["gpu_count"]), "-m", "xstage"]
    print("calibrating (about a minute) ...", file=sys.stderr)
    try:
        subprocess.run([*command, "calibrate", "--out", str(kept)], check=True, timeout=CALIBRATION_LIMIT_S, stdout=subprocess.DEVNULL)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        notes.append(f"Calibration was tried on this machine and failed ({error}); this page shows {SHIPPED}, which ships with xstage.")
        print(f"xstage report: {notes[-1]}", file=sys.stderr)
        return load_platform(SHIPPED)
    notes.append(f"Calibrated on this machine just now; the platform file is {kept.name}.")
    return load_platform(kept)
