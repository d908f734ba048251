"""Compiled kernels on disk: found again, made anew when damaged, and a whole layer's ahead of time. Not covered: that they run (GPUs)."""

from pathlib import Path

import pytest
from machine_code import needs_compiler

pytestmark = needs_compiler


def meeting(world: int):  # type: ignore[no-untyped-def]
    from xstage.device.meeting import compiled_meeting

    return compiled_meeting.__wrapped__.__wrapped__(world, 0, False)  # type: ignore[attr-defined]


def never(world: int) -> None:
    raise AssertionError("compiled although there is an object")


def test_a_kernel_is_compiled_once_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from xstage.device.kept import FOLDER, kept

    monkeypatch.setenv(FOLDER, str(tmp_path))
    never.__module__, never.__qualname__, never.__name__ = meeting.__module__, meeting.__qualname__, meeting.__name__
    kept(meeting)(5)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("meeting-")
    loaded = kept(never)(5)
    with pytest.raises(Exception, match="Expects 3 parameters"):
        loaded()
    with pytest.raises(AssertionError, match="compiled although"):
        kept(never)(6)
    path.write_bytes(b"damaged")
    kept(meeting)(5)
    assert "cannot be loaded" in capsys.readouterr().err
    assert path.stat().st_size > 1000


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xstage.device.kept import FOLDER, kept

    monkeypatch.delenv(FOLDER, raising=False)
    assert kept(lambda: 7)() == 7
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    kept(meeting)(7)  # says that it cannot write, and goes on


def test_a_layer_ahead_of_time(tmp_path: Path) -> None:
    from xstage.errors import XStageError
    from xstage.moe.prebuild import prebuild

    made = prebuild(tmp_path, ["Qwen3-30B"], tokens=256, ranks=2, schedules=["auto"])
    kinds = sorted(path.name.rsplit("-", 1)[0] for path in made)
    assert kinds == ["compiled_count", "compiled_gemm", "compiled_list", "compiled_meeting", "compiled_plan", "compiled_reduce"]
    for wrong, named in (
        ({"shapes": ["GPT"]}, "GPT"),
        ({"schedules": ["fast"]}, "schedule"),
        ({"picks": ["int8"]}, "picks"),
        ({"ranks": 3}, "experts"),
    ):
        with pytest.raises(XStageError, match=named):
            prebuild(tmp_path, **{"shapes": ["Qwen3-30B"], "tokens": 256, "ranks": 2, **wrong})  # type: ignore[arg-type]
