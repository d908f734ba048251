"""The command line as a user meets it: exit codes, one-line errors on stderr, results on stdout.

Not covered: calibrate on GPUs (tests/gpu).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xstage.cli import main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "xstage", *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_predict_of_the_published_platform(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--platform", "paper-8gpu", "--bytes", "32KiB", "--gap", "0", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["producers"] == 148
    assert out["issue_ns"] == pytest.approx(148 * 32768 / 717)
    assert out["recovery_gap_ns"] == pytest.approx(6004, abs=1)
    assert "published numbers" in out["notes"][0]


def test_predict_flags_extrapolation_but_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--bytes", "1MiB", "--producers", "500", "--gap", "6us"]) == 0
    text = capsys.readouterr().out
    assert "producers = 500 is outside" in text
    assert "bytes_per_producer = 1.04858e+06 is outside" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "--bytes", "0"], "bytes_per_producer: 0 must be"),
        (["predict", "--bytes", "32KiB", "--gap", "-1"], "gap_ns: -1 must be"),
        (["predict", "--bytes", "nan"], "bytes_per_producer: nan must be"),
        (["predict", "--bytes", "32KiB", "--platform", "nowhere"], "neither a file nor one of the shipped"),
        (["predict", "--bytes", "32KiB", "--platform", "/"], "is a directory"),
        (["predict", "--bytes", "32KiB", "--method", "pigeon"], "method: 'pigeon'"),
        (["audit", "no-such-design"], "no-such-design"),
        (["report", "--platform", "paper-8gpu", "--out", "/no/such/folder/page.html"], "is not a directory"),
        (["compare", "paper-8gpu", "paper-8gpu"], "paper-8gpu"),
        (["plan", "--shape", "nothing"], "shape: 'nothing' is unknown"),
        (["plan", "--shape", "Qwen3.5", "--tokens", "0"], "tokens_per_rank: 0"),
        (["simulate", "--shape", "Hy3", "--order", "sideways"], "order: 'sideways' is unknown"),
        (["simulate", "--shape", "Hy3", "--trace", "/"], "trace: / is a directory"),
        (["bench", "attention"], "out: bench attention needs"),
        (["bench", "dit"], "out: bench dit needs"),
        (["bench", "moe"], "out: bench moe needs"),
        (["bench", "moe-lead"], "out: bench moe-lead needs"),
        (["bench", "dit", "--prebuild", "k"], "prebuild: bench dit has no kernels"),
        (["calibrate", "--out", "/"], "is a directory"),
        (["calibrate", "--out", "x.json", "--repeats", "0"], "repeats: 0"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_simulate_prints_a_breakdown_and_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["simulate", "--shape", "Qwen3.5", "--tokens", "2048", "--order", "expert-wave", "--trace", str(trace)]) == 0
    captured = capsys.readouterr()
    assert "staging stalls" in captured.out
    assert json.loads(trace.read_text())["traceEvents"]


def test_plan_names_its_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "Qwen3.5", "--tokens", "2048", "--routing", "power", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out


def test_units_are_refused_by_name() -> None:
    result = run("predict", "--bytes", "32 parsecs")
    assert result.returncode == 2
    assert "'32 parsecs' is not a size" in result.stderr


def test_calibrate_without_torchrun_says_how_to_start_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = run("calibrate", "--out", str(tmp_path / "x.json"))
    assert result.returncode == 2
    assert "torchrun --nproc-per-node 2 -m xstage calibrate" in result.stderr


def test_calibrate_without_gpus_is_an_unsuitable_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has GPUs")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    result = run("calibrate", "--out", str(tmp_path / "x.json"))
    assert result.returncode == 3
    assert "GPUs: 0 found, at least 2" in result.stderr


def test_doctor_speaks_on_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    names = [f["name"] for f in json.loads(capsys.readouterr().out)]
    assert {"Python", "GPUs", "calibrate"} <= set(names)


def test_predict_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from xstage.cli import main; main(['predict','--bytes','32KiB']);"
        "sys.exit(any(m in sys.modules for m in ('torch','matplotlib','cutlass')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_output_to_a_closed_pipe_is_quiet() -> None:
    result = subprocess.run(
        f"{sys.executable} -m xstage audit megamoe-qwen3.5-paper --platform paper-8gpu | true",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in result.stderr
