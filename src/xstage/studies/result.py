"""Result files of studies: simulated ones are written (inputs, outputs, the paper's numbers, errors, headline), measured ones read."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xstage import __version__
from xstage.errors import XStageError
from xstage.platform import Platform, check_writable

SIMULATED = Path("results/simulated")


def write_study(
    out: Path | None,
    name: str,
    command: str,
    platform: Platform,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    paper: dict[str, Any],
    errors: dict[str, Any],
    headline: dict[str, tuple[float, str]],
    notes: list[str],
) -> dict[str, Any]:
    """Write `<out>/<name>.json` (not at all when `out` is None) and return its content.

    Args:
        headline: dotted key → (value, unit).

    Raises:
        XStageError: the file cannot be written.
    """
    result = {
        "kind": "xstage-study",
        "schema": 1,
        "name": name,
        "origin": "simulated",
        "version": __version__,
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": {"name": platform.name, "origin": platform.origin, "fingerprint": platform.fingerprint},
        "inputs": inputs,
        "outputs": outputs,
        "paper": paper,
        "errors": errors,
        "headline": {key: {"value": value, "unit": unit} for key, (value, unit) in headline.items()},
        "notes": notes,
    }
    plain: dict[str, Any] = _plain(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        target = out / f"{name}.json"
        check_writable(target)
        target.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return plain


def read_measured(path: Path, *studies: str) -> dict[str, Any]:
    """Content of a result file of one of `studies`, as `bench.timing.ResultFile` writes them.

    Raises:
        XStageError: no such file, or of another study.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise XStageError(f"path: {path} cannot be read: {error}") from None
    if content.get("study") not in studies:
        raise XStageError(f"path: {path} is a result of {content.get('study')!r}, not of {' or '.join(map(repr, studies))}")
    return content


def _plain(value: Any) -> Any:
    """Numbers of JSON, rounded to five significant digits so that files compare well."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, bool | str | int) or value is None:
        return value
    number = float(value)
    if math.isnan(number) or math.isinf(number):
        return None
    return float(f"{number:.5g}")
