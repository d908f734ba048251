"""The measured comparison of tile orders: what is measured in which order, resuming, budget, memory, figures, table, chart, prediction.

Times are made up. Not covered: the measuring itself (needs GPUs).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from xstage.bench import tables
from xstage.bench.timing import ResultFile, Times
from xstage.errors import UnsuitableMachine, XStageError
from xstage.moe import routing
from xstage.moe.auto_order import EPILOGUE_NS, MXFP4_EPILOGUE_NS, MXFP4_NS_PER_K, NS_PER_K, auto_order, burst_ns
from xstage.moe.shapes import PAPER, MoEShape, shape
from xstage.moe.work_table import WorkOrder
from xstage.platform import load_platform
from xstage.report import moe_charts
from xstage.simulate.layer import order_of, simulate_layer
from xstage.studies import moe_orders as study
from xstage.studies import moe_prediction as prediction
from xstage.studies import moe_w4a8, one_list
from xstage.studies.paper import MOE84

H200 = 139 << 30


def at(ns: float) -> Times:
    return Times([[ns - 5], [ns]], [[None]] * 2, 1)


def row(c: study.Configuration, interleaved: float = 1e6, wave: float = 1.2e6, **more: Any) -> dict[str, Any]:
    times = {"serial": at(1.5e6), "interleaved": at(interleaved), "expert_wave": at(wave)}
    ns = {name: t.slowest_ns for name, t in times.items()}
    measured = {"derived": study.derived(ns, "interleaved"), "times": {n: t.to_json() for n, t in times.items()}}
    return {**c.what, "gini": 0.25, "max_over_mean": 3.0, **measured, **more}


ALL = [c for part in study.configurations(study.SHAPES, study.SIZES, study.SHARES) for c in part]


class Bench:
    """Stands for the GPUs: remembers what was opened and measured; `clock` is what `time.monotonic` says, `step` seconds per row."""

    def __init__(self, step: float = 0.0):
        self.opened: list[tuple[str, int]] = []
        self.measured: list[study.Configuration] = []
        self.clock, self.step = 0.0, step

    @contextmanager
    def open(self, model: Any, most: int) -> Iterator[study.Measure]:
        self.opened.append((model.name, most))
        yield self.measure

    def measure(self, c: study.Configuration) -> dict[str, Any]:
        self.measured.append(c)
        self.clock += self.step
        return row(c)


def walk(bench: Bench, path: Path, todo: list[list[study.Configuration]], free: int = H200, budget_s: float = 1e9) -> tuple[bool, Any]:
    """Whether all of `todo` is there, and what the file says."""
    results = ResultFile(path, "moe", settings={"world": 2})
    study.walk(results, todo, bench.open, 2, free, budget_s)
    rows = results.content["rows"]
    return {study.key_of(r) for r in rows} == {c.key for part in todo for c in part}, json.loads(path.read_text(encoding="utf-8"))


def test_84_configurations_the_most_telling_first() -> None:
    parts = study.configurations(study.SHAPES, study.SIZES, study.SHARES)
    assert len(ALL) == len({c.key for c in ALL}) == 84
    assert {c.model for c in ALL} == set(PAPER)
    assert all((c.tokens, c.share) == (8192, 0.875) for c in ALL[:14])
    assert {tokens: sum(c.tokens == tokens for c in ALL) for tokens in study.SIZES} == dict.fromkeys((8192, 27904, 55808), 28)
    assert all(len({c.model for c in part}) == 1 for part in parts)
    assert [max(c.tokens for c in part) for part in parts] == [8192] * 7 + [27904] * 7 + [55808] * 7


def test_any_numbers_of_sizes_and_shares() -> None:
    for sizes in ((64,), (64, 128), (1, 2, 3, 4)):
        for shares in ((0.5,), (0.875, 0.5), (0.0, 0.5, 1.0)):
            found = [c for part in study.configurations(["Hy3"], sizes, shares) for c in part]
            assert {(c.tokens, c.share) for c in found} == {(t, f) for t in sizes for f in shares}
            assert len(found) == 2 * len(sizes) * len(shares)


def test_refusals(tmp_path: Path) -> None:
    for wrong, said in (
        ({"shapes": ["GPT"]}, "shape: 'GPT'"), ({"sizes": [0]}, r"sizes: \[0\]"), ({"shares": [1.5]}, r"shares: \[1.5\]"),
        ({"shapes": []}, r"shapes: \[\]"),
    ):  # fmt: skip
        with pytest.raises(XStageError, match=said):
            study.run(str(tmp_path / "r.json"), **wrong)  # type: ignore[arg-type]
    if torch.cuda.device_count() < 2:
        with pytest.raises(UnsuitableMachine, match="bench moe: needs two peer-connected GPUs"):
            study.run(str(tmp_path / "r.json"))


def test_all_is_measured_with_buffers_of_the_largest_size(tmp_path: Path) -> None:
    bench = Bench()
    ended, content = walk(bench, tmp_path / "moe.json", study.configurations(study.SHAPES, study.SIZES, study.SHARES))
    assert ended
    assert study.complete(content["rows"], study.SIZES, study.SHARES)
    assert not study.complete(content["rows"][:-1], study.SIZES, study.SHARES)
    assert bench.measured == ALL
    assert bench.opened == [(name, 55808) for name in study.SHAPES] * 3
    assert content["headline"]["moe84.configurations"]["value"] == 84


def test_every_size_fits_an_h200() -> None:
    need = {c: study.needed_bytes(c.model, c.tokens, 2) for c in ALL}
    assert 10 << 30 < max(need.values()) < 80 << 30
    for c in ALL:
        assert need[c] > study.needed_bytes(c.model, c.tokens // 2, 2)


def test_the_budget_ends_it_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = study.configurations(["Hy3", "Qwen3.5"], [64, 128], [0.875, 0.5])
    first, second = Bench(step=1.0), Bench()
    monkeypatch.setattr(study.time, "monotonic", lambda: first.clock)
    ended, content = walk(first, tmp_path / "moe.json", todo, budget_s=4.5)
    assert not ended
    assert len(content["rows"]) == 5  # the one that was begun at 4 s is finished
    ended, content = walk(Bench(), tmp_path / "moe.json", todo, budget_s=-1)
    assert not ended
    assert content["headline"]["moe84.configurations"]["value"] == len(content["rows"]) == 5
    ended, content = walk(second, tmp_path / "moe.json", todo, budget_s=4.5)
    assert ended
    assert first.measured + second.measured == [c for part in todo for c in part]
    assert [study.key_of(r) for r in content["rows"]] == [c.key for part in todo for c in part]
    assert content["headline"]["moe84.configurations"]["value"] == 16
    more = Bench()
    walk(
        more, tmp_path / "moe.json", study.configurations(["Hy3", "GLM-5.2"], [64, 128], [0.875, 0.5])
    )  # other shapes go into the same file
    assert {c.model.name for c in more.measured} == {"GLM-5.2"}


def test_nothing_is_opened_for_what_is_there_or_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(study.time, "monotonic", iter([0.0, 10.0]).__next__)
    ended, content = walk(bench, tmp_path / "moe.json", study.configurations(["Hy3"], [64], [0.5]), budget_s=5)
    assert not ended
    assert bench.opened == content["rows"] == []


def test_what_does_not_fit_is_a_row_that_says_so(tmp_path: Path) -> None:
    todo = study.configurations(["DSv4-Pro"], study.SIZES, study.SHARES)
    free = study.needed_bytes(shape("DSv4-Pro"), study.SIZES[1], 2)
    bench = Bench()
    ended, content = walk(bench, tmp_path / "moe.json", todo, free=free)
    skipped = [r for r in content["rows"] if "skipped" in r]
    assert ended
    assert {r["tokens"] for r in skipped} == {55808}
    assert skipped[0]["skipped"] == f"needs {skipped[0]['needed_bytes']} bytes on each rank, {free} are free"
    assert bench.opened == [("DSv4-Pro", 27904)] * 2
    assert {r["max_tokens"] for r in study.measured(content["rows"])} == {27904}
    assert content["headline"]["moe84.configurations"]["value"] == 8
    bench = Bench()
    ended, content = walk(bench, tmp_path / "none.json", todo, free=1)
    assert bench.opened == []
    assert len(content["rows"]) == 12
    assert study.headline(content["rows"]) == {}


class Pipeline:
    """Stands for `KernelPipeline`: writes `value` into the output, on CPUs."""

    def __init__(self, value: float):
        self.exchange = SimpleNamespace(order=None)
        self.value, self.seen, self.orders = value, set[tuple[Any, ...]](), list[Any]()

    def run(self, x: torch.Tensor, scales: None, idx: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        self.orders.append(self.exchange.order)
        self.seen.add((x.shape, idx.shape, weights.shape, out.shape, idx.dtype))
        out.fill_(self.value)

    def check(self) -> None: ...


def test_one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(timed: dict[str, Any], calls: int, rounds: int, pause_s: float) -> dict[str, Times]:
        for function in timed.values():
            function()
        return {name: at(1e6 * (i + 1) / calls) for i, name in enumerate(timed)}

    monkeypatch.setattr(study.timing, "meet", lambda: None)
    monkeypatch.setattr(study.timing, "interleaved", interleaved)
    monkeypatch.setattr(study, "graphed", lambda function, calls, warm_up: function)
    model = shape("Qwen3-30B")
    c = study.Configuration(model, "power", 48, 0.875)
    moe: Any = SimpleNamespace(rank=0, world=2, device=torch.device("cpu"))
    x, weights = torch.ones(64, model.hidden, dtype=torch.bfloat16), torch.ones(64, model.top_k)
    fused, columns = Pipeline(1), (2 * 768 // 256, 2048 // 256)
    orders = {name: WorkOrder.of(name, *columns, lead_rows=None, instances=66) for name in study.MEASURED}
    made = {"serial": (Pipeline(1), None), **{name: (fused, order) for name, order in orders.items()}}
    found = study._measure(moe, made, x, weights, c, rounds=5, pause_s=0.0)  # type: ignore[arg-type]
    assert fused.seen == {((48, 2048), (48, 8), (48, 8), (48, 2048), torch.int64)}
    assert fused.orders[:3] == list(orders.values())
    assert sum(found["counts"]) == 48 * 8
    assert sum(found["counts"][64:]) == 48 * 7
    assert found["gini"] > 0.3
    assert found["lead_rows"] == orders["interleaved"].lead_rows
    assert found["derived"]["speedup"] == 1.5
    json.dumps(found)
    made["expert_wave"] = (Pipeline(2), orders["expert_wave"])
    with pytest.raises(XStageError, match=r"orders: expert_wave and one GEMM after the other gave different bits for .*Qwen3-30B"):
        study._measure(moe, made, x, weights, c, rounds=5, pause_s=0.0)  # type: ignore[arg-type]


def test_derived_answers() -> None:
    ns = {"interleaved": 1e6, "serial": 1.5e6}
    assert study.derived({**ns, "expert_wave": 1.2e6}, "interleaved") == {
        "speedup": 1.2, "over_serial": 1.5, "auto": "interleaved", "auto_over_best": 1.0, "auto_loss": -0.1667,
    }  # fmt: skip
    assert study.derived({**ns, "expert_wave": 0.9e6}, "interleaved")["auto_loss"] == 0.1111
    assert study.derived({**ns, "expert_wave": 1.2e6}, "expert_wave")["auto_over_best"] == 1.2


def test_auto_is_the_rate_bound() -> None:
    """Half of a 64 KiB tile of 132 SMs drains in 11.6 µs; a Linear-2 tile of K = 1,650 takes as long."""
    assert burst_ns(0.5) == pytest.approx(11.6e3, rel=0.01)
    first, mixed = "linear1_first", "interleaved"
    assert [auto_order(MoEShape("m", 4096, k, 64, 4), 2048, 2) for k in (768, 1536, 2048)] == [mixed, mixed, first]
    assert [auto_order(MoEShape("m", 4096, k, 64, 4), 2048, 8) for k in (2048, 3072)] == [mixed, first]
    assert auto_order(MoEShape("m", 4096, 256, 64, 4), 2048, 1) == first  # nothing leaves
    # A third of a tile is a third of the bytes; beyond 1,024 rows an expert layers are mixed, where an expert fits into the L2 cache.
    assert [auto_order(MoEShape("m", 4096, 768, 64, 4), tokens, 2) for tokens in (320, 1024)] == [first, mixed]
    assert [auto_order(MoEShape("m", hidden, 3072, 64, 4), 8256, 2) for hidden in (4096, 7168)] == [mixed, first]


def test_headline() -> None:
    first, second = (next(c for c in ALL if c.share == share) for share in (0.875, 0.5))
    rows = [row(first, wave=1.6e6), row(second, wave=0.9e6), row(first, wave=0.985e6)]
    figures = {key: entry["value"] for key, entry in study.headline(rows).items()}
    assert figures["moe84.geomean"] == round((1.6 * 0.9 * 0.985) ** (1 / 3), 4)
    assert (figures["moe84.median"], figures["moe84.max"], figures["moe84.min"]) == (0.985, 1.6, 0.9)
    assert (figures["moe84.f12.geomean"], figures["moe84.f78.max"], figures["moe84.f78.min"]) == (0.9, 1.6, 0.985)
    assert (figures["moe.auto_within_2pct.share"], figures["moe.auto_worst_loss"]) == (0.6667, 0.1111)
    assert figures["moe84.over_serial.geomean"] == 1.5


def test_table_and_chart(tmp_path: Path) -> None:
    assert tables.TABLES["moe-orders"](tmp_path) == "Not measured yet."
    skipped = {**ALL[1].what, "needed_bytes": 40 << 30, "skipped": "needs more"}
    rows = [row(ALL[0], predicted={"speedup": 1.1}), skipped, *(row(c, wave=9e5 + 1e4 * i) for i, c in enumerate(ALL[2:]))]
    settings = {
        "world": 2, "rounds": 5, "shares": [0.875, 0.5], "sizes": study.SIZES, "routings": study.ROUTINGS,
    }  # fmt: skip
    content = {"study": "moe", "complete": True, "settings": settings, "rows": rows}
    (tmp_path / "h200x2").mkdir()
    path = tmp_path / "h200x2" / "moe.json"
    path.write_text(json.dumps(content))
    text = tables.TABLES["moe-orders"](tmp_path)
    assert "| maximum | 1.710 | 1.690 | 1.710 | 1.62 |" in text
    assert "| configurations | 83 | 41 | 42 | 84 |" in text
    assert "| DiT-MoE, balanced, 8,192 | 0.25, 3.0 | 1.200 | 1.100 | 1.50 | 1.020 | – | 1.50 |" in text
    assert "| DiT-MoE, skewed, 8,192 | 0.25, 3.0 | needs 40 GiB | – | – | " in text
    assert text.count("\n| ") == 5 + 43
    assert "the rest is not measured" not in text
    assert "\n\nW4A8: not measured.\n\n" in text
    predicted(tmp_path)
    text = tables.TABLES["moe-orders"](tmp_path)
    assert "W4A8: not measured. Predicted before the measurement, by the simulator of the kernel: at f = 0.875 geometric mean" in text
    path.write_text(json.dumps({**content, "complete": False, "rows": rows[:2]}))
    assert "2 of 84 configurations: the rest is not measured yet." in tables.TABLES["moe-orders"](tmp_path)
    path.write_text(json.dumps({**content, "rows": [skipped]}))
    assert tables.TABLES["moe-orders"](tmp_path) == "Not measured yet."
    path.write_text(json.dumps(content))
    text = both_halves(tmp_path, settings)
    assert "| interleaved over expert-wave | f = 0.875 | of it W8A8, 0.875 | of it W4A8, 0.875 | f = 0.5 |" in text
    assert "| maximum | 2.000 | 1.690 | 2.000 | 2.000 | 1.710 | 2.000 | 1.62 |" in text
    assert "| configurations | 83 | 41 | 42 | 84 | 42 | 42 | 84 |" in text
    assert "W4A8, 2 H200s, whole layer, medians of 5 rounds, slowest rank; `results/h200x2/moe-w4a8.json`." in text
    assert text.count("\n| ") == 5 + 43 + 43
    path.unlink()
    text = tables.TABLES["moe-orders"](tmp_path)
    assert "W8A8: not measured." in text
    assert "| maximum | 2.000 | 2.000 | 2.000 | 1.62 |" in text
    (path.parent / "moe-w4a8.json").unlink()
    path.write_text(json.dumps(content))
    written = moe_charts.write_all(path.parent, tmp_path / "charts")
    assert [p.stem for p in written] == ["figure8-measured"]
    figure = moe_charts.measured_speedups(content)
    axis = figure.axes[0]
    levels = {float(line.get_ydata()[0]) for line in axis.lines if len(set(line.get_ydata())) == 1 and len(line.get_ydata()) == 2}
    assert levels >= {1, *MOE84.values()}
    assert len(axis.patches) == 83
    heights = [p.get_y() + p.get_height() for p in sorted(axis.patches, key=lambda p: p.get_x())]
    assert np.allclose(heights, sorted(heights))


def both_halves(folder: Path, settings: dict[str, Any]) -> str:
    """The table beside a half of W4A8 in which interleaved is twice as fast."""
    half = [row(study.Configuration(c.model, c.routing, c.tokens, c.share, "mxfp4"), wave=2e6) for c in ALL]
    content = {"study": "moe", "complete": True, "settings": settings, "rows": half}
    (folder / "h200x2" / "moe-w4a8.json").write_text(json.dumps(content))
    return tables.TABLES["moe-orders"](folder)


def predicted(folder: Path) -> None:
    """The simulated half of W4A8, of few configurations."""
    made = moe_w4a8.run(folder / "simulated", shapes=["DiT-MoE"], sizes=[256])
    assert made == json.loads((folder / "simulated" / "moe_w4a8.json").read_text(encoding="utf-8"))
    assert [(r["share"], r["routing"]) for r in made["outputs"]["rows"]] == [(f, name) for f in study.SHARES for name in study.ROUTINGS]
    assert {r["precision"] for r in made["outputs"]["rows"]} == {"W4A8"}
    assert made["headline"]["simulate.moe_w4a8.f78.geomean"]["value"] == made["outputs"]["by_share"]["0.875"]["geomean"]


def drawn(model: str, family: str, tokens: int, share: float) -> dict[str, Any]:
    m = shape(model)
    picks = [
        routing.draw_remote(tokens, m.experts, m.top_k, ranks=2, me=me, share=share, alpha=study.ROUTINGS[family]) for me in range(2)
    ]  # fmt: skip
    counts = sum(routing.count(p, m.experts) for p in picks)
    lead = WorkOrder.of("interleaved", 2 * m.intermediate // 256, m.hidden // 256, lead_rows=None, instances=66).lead_rows
    return row(study.Configuration(m, family, tokens, share), counts=counts.tolist(), lead_rows=lead)  # type: ignore[union-attr]


def test_prediction_takes_the_rows_load_and_share() -> None:
    platform = load_platform("h200-nvlink4", samples=False)
    half, seven = (drawn("DiT-MoE", "power", 1024, share) for share in (0.5, 0.875))
    less, more = (prediction.predict(r, platform, 2) for r in (half, seven))
    assert more["expert_wave_ns"] > less["expert_wave_ns"]  # more bytes on the same link
    assert less["speedup"] == round(less["expert_wave_ns"] / less["interleaved_ns"], 4)
    assert less["winner"] in study.ORDERS
    assert less["plan"] in study.ORDERS


def test_prediction_is_added_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "moe.json"
    rows = [drawn("DiT-MoE", "balanced", 512, 0.875), {**ALL[1].what, "skipped": "needs more", "needed_bytes": 1}]
    path.write_text(json.dumps({"study": "moe", "settings": {"world": 2}, "complete": True, "rows": rows, "headline": {}}))
    content = prediction.annotate(path)
    assert content == json.loads(path.read_text(encoding="utf-8"))
    assert "predicted" not in content["rows"][1]
    found = content["rows"][0]["predicted"]
    error = abs(found["speedup"] / 1.2 - 1)
    assert content["headline"]["moe84.predicted_speedup_error.max"]["value"] == pytest.approx(error, abs=1e-4)
    assert content["headline"]["moe84.geomean"]["value"] == 1.2
    loss = {"interleaved": -0.1667, "expert_wave": 0.0}[found["winner"]]
    assert content["headline"]["moe.winner_worst_loss"]["value"] == loss
    path.write_text(json.dumps({"study": "dit"}))
    for wrong in (path, tmp_path / "none.json"):
        with pytest.raises(XStageError, match="path: "):
            prediction.annotate(wrong)


def test_w4a8_is_predicted_by_the_kernel_of_one_list(tmp_path: Path) -> None:
    """Longer tiles hide more: with weights in MXFP4 the order gains less, and any share can be asked for."""
    platform = load_platform("h200-nvlink4", samples=False)
    row8 = drawn("Qwen3.5", "power", 2048, 0.875)
    row4 = {**row8, "precision": "W4A8"}
    four = prediction.predict(row4, platform, 2)
    assert four["plan"] in study.ORDERS
    m = shape("Qwen3.5")
    eight = {
        order: sum(r.time_ns for r in simulate_layer(m, row8["counts"], 0.875, order_of(order, m, platform), 2, platform))
        for order in study.ORDERS
    }
    assert 1 < four["speedup"] < eight["expert_wave"] / eight["interleaved"]
    assert four["interleaved_ns"] > eight["interleaved"] / 2
    path = tmp_path / "moe-w4a8.json"
    path.write_text(json.dumps({"study": "moe", "settings": {"world": 2, "precision": "W4A8"}, "rows": [row4]}))
    content = prediction.annotate(path)
    assert content["prediction"]["ns_per_k"] == MXFP4_NS_PER_K
    assert content["rows"][0]["predicted"] == four
    assert all(key.startswith("w4a8.") for key in content["headline"])
    assert "w4a8.moe84.predicted_speedup_error.max" in content["headline"]
    assert "w4a8.moe.winner_worst_loss" in content["headline"]
    assert "w4a8.moe.plan_worst_loss" in content["headline"]


def test_times_of_a_tile_in_mxfp4_are_those_of_the_kernel_of_both_layers() -> None:
    path = Path(__file__).parent.parent / "results" / "h200" / "w4a8-gemm.json"
    parts, ns = [], []  # per kernel: tiles, and tiles times K; time of all SMs
    for r in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if (r["tokens"], r["layer"], r["contender"]) != (8192, "both", "ours_mxfp4_split"):
            continue
        m = shape(r["shape"])
        counts = one_list.drawn({"shape": m.name, "tokens": 8192, "share": 0.5}, 2)[: r["experts"]]
        assert sum(counts) == r["rows"]  # the loads that were measured
        rows = sum(-(-count // 128) for count in counts)
        tiles1, tiles2 = rows * 2 * m.intermediate / 256, rows * m.hidden / 256
        parts.append((tiles1 + tiles2, tiles1 * m.hidden + tiles2 * m.intermediate))
        ns.append(1e3 * r["time_us"] * 132)
    assert len(ns) == 5
    relative = np.array(parts) / np.array(ns)[:, None]
    rest, slope = np.linalg.lstsq(relative, np.ones(len(ns)), rcond=None)[0]
    assert slope == pytest.approx(MXFP4_NS_PER_K, rel=1e-3)
    assert rest == pytest.approx(MXFP4_EPILOGUE_NS, rel=1e-3)
    assert np.abs(relative @ (MXFP4_EPILOGUE_NS, MXFP4_NS_PER_K) - 1).max() < 0.05


def test_times_of_a_tile_are_those_of_the_grouped_gemms() -> None:
    path = Path(__file__).parent.parent / "results" / "h200" / "grouped-gemm.json"
    points = []
    for r in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        for layer, k in (("linear1", shape(r["shape"]).hidden), ("linear2", shape(r["shape"]).intermediate)):
            points.append((k, 2 * 128 * 256 * k / (r["tflops"][layer] * 1e3 / 132)))
    k, ns = np.array(points).T
    slope, rest = np.polyfit(k, ns, 1)
    assert slope == pytest.approx(NS_PER_K, rel=1e-3)
    assert rest == pytest.approx(EPILOGUE_NS, rel=1e-3)
    assert np.abs((NS_PER_K * k + EPILOGUE_NS) / ns - 1).max() < 0.04
