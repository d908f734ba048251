"""The timing record, its file, and the arithmetic of the attention study. Not covered: timing itself (needs GPUs)."""

import json
from pathlib import Path

import numpy as np
import pytest

from xstage.attention.layout import SequenceLayout
from xstage.bench.tables import fill
from xstage.bench.timing import ResultFile, Times, interleaved, launches_for
from xstage.errors import UnsuitableMachine, XStageError
from xstage.platform import KiB, Platform, StoreMethod, load_platform
from xstage.simulate.attention import predict_residual, predicted_residual_ns
from xstage.studies import attention as study


def platform() -> Platform:
    store = StoreMethod(
        "st_global", (1.0, 132.0), (350.0, 350.0), (132.0,), (100 * 32.0 * KiB,), (132.0,), (32.0 * KiB,), ((400.0,),)
    )  # fmt: skip
    return Platform(name="test", origin="published", sms=132, gpus=2, methods={"st_global": store})


def test_the_slowest_rank_counts() -> None:
    times = Times([[1.0, 2.0, 30.0], [3.0, 4.0, 5.0]], [[None] * 3] * 2, 7)
    assert times.median_ns == [2.0, 4.0]
    assert times.slowest_ns == 4.0
    assert times.spread_ns == 2.0
    assert times.to_json()["time_ns"] == [[1.0, 2.0, 30.0], [3.0, 4.0, 5.0]]


def test_result_file_is_complete_after_every_row(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "new" / "r.json", "attention", settings={"rounds": 9})
    for n in range(2):
        file.add({"sequence": n})
        content = json.loads((tmp_path / "new" / "r.json").read_text())
        assert [row["sequence"] for row in content["rows"]] == list(range(n + 1))
        assert not content["complete"]
    file.finish()
    content = json.loads((tmp_path / "new" / "r.json").read_text())
    assert content["complete"]
    assert content["settings"] == {"rounds": 9}
    assert content["fingerprint"]["torch"]
    with pytest.raises(XStageError, match="directory"):
        ResultFile(tmp_path, "attention")


def test_an_unfinished_result_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    ResultFile(path, "attention", settings={"groups": ("a", "b")}).add({"name": "one"})
    again = ResultFile(path, "attention", settings={"groups": ("a", "b")})
    assert again.content["rows"] == [{"name": "one"}]
    assert json.loads(path.read_text())["rows"] == [{"name": "one"}]
    other = ResultFile(path, "attention", settings={"groups": ("a",)})
    assert other.content["rows"] == []
    other.add({"name": "two"})
    other.finish()
    assert ResultFile(path, "attention", settings={"groups": ("a",)}).content["rows"] == []


def test_a_row_of_long_calls_has_fewer_rounds() -> None:
    assert study.rounds_for(50e3, 20, 11, 9, 0.04) == 9
    assert 5 < study.rounds_for(9.4e6, 2, 11, 9, 0.04) < 9
    assert study.rounds_for(9.4e6, 2, 8, 9, 0.04) == 9  # residual and traffic
    assert study.rounds_for(500e6, 1, 8, 9, 0.04) == study.LEAST_ROUNDS
    assert study.rounds_for(500e6, 1, 8, 3, 0.04) == 3


def test_launches_stay_few() -> None:
    assert launches_for(38e6, least=1) == 1
    assert launches_for(50e3) == 20
    assert launches_for(1e6) == 4
    assert launches_for(30e6) == 2
    with pytest.raises(XStageError, match="variants"):
        interleaved({}, calls=1)


def test_derived_answers() -> None:
    def at(ns: float) -> Times:
        return Times([[ns - 5], [ns]], [[None]] * 2, 1)

    def clocked_at(ns: float, mhz: float) -> Times:
        return Times([[ns - 5], [ns]], [[None]] * 2, 1, [[1900.0], [mhz]])

    residual = {"fa4": at(1000), "local": at(1010), "stores": at(1030), "fused": at(1040)}
    answers = study.derived({"residual": residual, "baseline": {"fused": at(1050), "nccl": at(1600), "push_graph": at(1100)}})
    assert answers == {
        "residual_ns": 20, "residual_over_fa4_ns": 30, "readiness_ns": 10, "kernel_over_fa4_ns": 10, "residual_share": 0.02,
        "speedup_paper_baseline": round(1600 / 1050, 4), "speedup_strongest": round(1100 / 1050, 4),
    }  # fmt: skip
    # One group that holds everything answers the same questions.
    everything = study.derived({"dit": {**residual, "nccl_graph": at(1300), "push_graph": at(1200), "push_cudnn": at(1144)}})
    assert everything["residual_ns"] == answers["residual_ns"]
    assert everything["speedup_strongest"] == 1.1
    traffic = study.derived({"traffic": {"local": at(1000), "stores": at(1030), "local_sent": at(1004), "local_copied": at(1001)}})
    assert traffic == {"residual_beside_ns": 30.0, "sent_ns": 4.0, "copied_ns": 1.0}
    # With mean clocks they come apart: a clock lower by 1%, and 18 cycles.
    clocked = {"local": clocked_at(1000, 1800), "stores": clocked_at(1000 / 0.99 + 10, 1782), "local_sent": clocked_at(1010, 1800)}
    apart = study.derived({"residual": {**clocked, "fa4": at(1000)}, "traffic": clocked})
    for name in ("residual", "residual_beside"):
        parts = {key: apart[f"{name}_{key}"] for key in ("paired_ns", "clock_ns", "cycles_ns", "cycles", "mhz", "local_mhz")}
        assert parts == {"paired_ns": 20.1, "clock_ns": 10.1, "cycles_ns": 10.0, "cycles": 18, "mhz": 1782, "local_mhz": 1800}
    assert (apart["sent_clock_ns"], apart["sent_cycles_ns"], apart["sent_cycles"]) == (0, 10, 18)
    assert "copied_cycles" not in apart
    assert "residual_cycles" not in study.derived({"residual": residual})
    forms = study.derived({"forms": {**residual, "local_table": at(1013), "stores_table": at(1043), "fused_table": at(1052)}})
    assert [forms[f"residual_{form}_ns"] for form in study.FORMS] == [20, 30]
    assert [forms[f"kernel_{form}_over_fa4_ns"] for form in study.FORMS] == [10, 13]
    assert [forms[f"readiness_{form}_ns"] for form in study.FORMS] == [10, 9]

    rows = [{"heads": 4, "sequence": 8192, "derived": answers}, {"heads": 12, "sequence": 32768, "derived": {"residual_share": 0.01}}]
    figures = {key: entry["value"] for key, entry in study.headline(rows).items()}
    assert figures == {
        "attention.residual_us.short.max": 0.02, "attention.residual_share.long.max": 0.01, "attention.readiness_us.max": 0.01,
        "attention.speedup_strongest.H4_M8192": answers["speedup_strongest"],
        "attention.speedup_paper_baseline.H4_M8192": answers["speedup_paper_baseline"],
    }  # fmt: skip
    model = {"shapes": "dit", "name": "FLUX.1 1024²", "heads": 4, "sequence": 4608, "derived": everything}
    assert study.headline([model]) == {"attention.dit.speedup_strongest.flux_1_1024": {"value": 1.1, "unit": "ratio"}}


def test_the_table_of_clocks_shows_what_was_derived(tmp_path: Path) -> None:
    def at(ns: float, mhz: float) -> Times:
        return Times([[ns]], [[None]], 1, [[mhz]])

    measured = {"local": at(1e6, 1800), "stores": at(1.03e6, 1782)}
    traffic = {**measured, "local_sent": at(1.02e6, 1800), "local_copied": at(1.01e6, 1782)}
    row = {"heads": 12, "sequence": 32768, "derived": study.derived({"residual": {**measured, "fa4": at(1e6, 1800)}, "traffic": traffic})}
    (tmp_path / "h200x2").mkdir()
    file = tmp_path / "h200x2" / "attention.json"
    file.write_text(json.dumps({"rows": [{"groups": {"residual": {}}}]}))
    assert fill("<!-- generated: attention-clocks -->\n<!-- end -->", tmp_path, "x.md").splitlines()[1] == "Not measured yet."
    file.write_text(json.dumps({"rows": [row | {"groups": {"residual": {}, "traffic": {}}}]}))
    table = fill("<!-- generated: attention-clocks -->\n<!-- end -->", tmp_path, "x.md").splitlines()
    assert table[3] == "| 12, 32,768 | 30.0 | 10.1 | 19.9 | 1,800, 1,782 | 30.0 (10.1, 19.9) | 20.0 (0.0, 20.0) | 10.0 (10.1, -0.1) |"


def test_prediction_is_stalls_plus_the_last_drain() -> None:
    def predicted(*waves: list[float]) -> float:
        return predicted_residual_ns([np.asarray(sent) * KiB for sent in waves], platform()) * 350 / KiB

    share = 100 * 32 / 132  # of one SM of 132
    assert predicted([16] * 64, [0] * 132) == 0
    assert predicted([16] * 64, [16] * 132) == pytest.approx(16 * 132)
    assert predicted([32] * 132, [0]) == pytest.approx((32 - share) * 132)
    assert predicted([32] * 132, [32] * 132) == pytest.approx((32 - share) * 132 + 32 * 132)
    # The same bytes on half of the SMs: what these cannot hold is not taken by the others.
    assert predicted([16] * 132, [0]) == 0
    assert predicted([32, 0] * 66, [0]) == predicted([32] * 66, [0]) > 0


def test_prediction_of_the_orders() -> None:
    """The last wave's drain is the least that an order can cost; waves that one rank gets entirely cost more than mixed ones."""
    known = load_platform("h200-nvlink4")
    for heads, sequence in ((4, 8192), (12, 16384), (12, 32768)):
        layout = SequenceLayout.even(sequence, 2)
        predicted = {name: predict_residual(heads, layout, platform=known, **options)[1] for name, options in study.PREDICTED.items()}
        last_wave = (heads * sequence // 128 - 1) % known.sms + 1
        drain = last_wave * 16 * KiB / float(known.method("st_global").drain_rate(last_wave))
        assert predicted["tail"] == pytest.approx(drain, rel=0.01)
        assert predicted["tail"] < predicted["alternating"] < predicted["plain"]


def test_study_refuses_a_machine_without_peers(tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has peers")
    with pytest.raises(UnsuitableMachine, match="two peer-connected GPUs"):
        study.run(str(tmp_path / "r.json"))
    with pytest.raises(XStageError, match="groups"):
        study.run(str(tmp_path / "r.json"), groups=["fastest"])
    with pytest.raises(XStageError, match="shapes"):
        study.run(str(tmp_path / "r.json"), shapes="llm")
