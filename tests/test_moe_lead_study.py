"""The study of the lead: which leads there are and what they compile, resuming, budget, one row on stubs, figures, table, prediction.

Measured times are made up. Not covered: the measuring itself (needs GPUs).
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

from xstage import tile_order
from xstage.bench import tables
from xstage.bench.timing import ResultFile, Times
from xstage.errors import UnsuitableMachine, XStageError
from xstage.layer_plan import ERROR
from xstage.moe.shapes import SHAPES, shape
from xstage.moe.work_table import LAYER_SHIFT, WorkOrder, work_list
from xstage.platform import load_platform
from xstage.simulate.layer import simulate_layer
from xstage.studies import moe_lead as study
from xstage.studies import moe_lead_prediction as prediction
from xstage.studies.moe_lead_table import moe_lead_table
from xstage.studies.one_list import drawn

RESULTS = Path(__file__).parent.parent / "results"
TINY = {"tokens": 256, "ranks": 2}


def at(ns: float) -> Times:
    return Times([[ns - 5], [ns]], [[None]] * 2, 1)


def row(model: str, share: float, **ns: float) -> dict[str, Any]:
    """Times of the orders of a shape with 8,192 tokens: 1 ms, or as given."""
    orders = study.orders(shape(model), 8192, 2)
    times = {name: at(ns.get(name.replace("2x", "twice"), 1e6)).to_json() for name in orders}
    return {
        "shape": model, "routing": "balanced", "tokens": 8192, "share": share, "times": times,
        "lead_rows": {name: order.lead_rows for name, order in orders.items() if name != study.WAVE},
        "dispatch_us": {name: 700.0 - i for i, name in enumerate(orders)}, "kernel_us": dict.fromkeys(orders, 900.0),
    }  # fmt: skip


@pytest.mark.parametrize("model", SHAPES, ids=lambda m: m.name)
def test_leads_rise_from_the_least_to_all_of_linear1(model: Any) -> None:
    orders = study.orders(model, 8192, 2)
    assert set(orders) <= {*study.LEADS, study.WAVE}
    assert list(orders)[-2:] == ["all", study.WAVE]
    leads = [order.lead for name, order in orders.items() if name != study.WAVE]
    assert leads == sorted(set(leads))
    assert {order.name for name, order in orders.items() if name != study.WAVE} == {"interleaved"}
    assert orders["least"] == WorkOrder.of("interleaved", orders["least"].columns1, orders["least"].columns2, lead_rows=0, instances=66)
    assert orders["least"].lead_rows == 16
    knee = tile_order.lead_knee(256, 132, model.intermediate)
    assert ("knee" in orders) == (knee > 16)  # a lead below the least is raised to it
    default = orders["default"]
    assert default == WorkOrder.of("interleaved", default.columns1, default.columns2, lead_rows=None, instances=66)
    assert orders["2x"].lead_rows == 2 * default.lead_rows
    assert len(orders) >= 7


def test_all_means_that_no_linear2_entry_comes_before_a_linear1_entry() -> None:
    model = shape("Qwen3-30B")
    orders = study.orders(model, 8192, 2)
    for rows in ([2048] * 64, [131072] + [0] * 63):  # as many as there can be, of all tokens of both ranks
        layers = [word >> LAYER_SHIFT & 1 for word, *_ in work_list(rows, orders["all"])]
        assert layers == sorted(layers)
    assert layers != [word >> LAYER_SHIFT & 1 for word, *_ in work_list(rows, orders["default"])]


def test_a_lead_costs_one_plan_and_nothing_else() -> None:
    from xstage.moe.prebuild import kernels_of

    model = shape("Qwen3-30B")
    found = {
        lead: set(kernels_of(model, 8192, 2, "interleaved", lead, None, True, False, recorded=True)) for lead in (None, 16, 120)
    }  # fmt: skip
    alike = set.intersection(*found.values())
    for kernels in found.values():
        assert [compiled.__name__ for compiled, _ in kernels - alike] == ["compiled_plan"]


def test_prebuild_asks_for_what_the_layer_of_every_order_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xstage.moe import prebuild

    asked: list[Any] = []
    monkeypatch.setattr(prebuild, "fill", lambda folder, work: asked.extend(work) or list(dict.fromkeys(work)))
    number = study.prebuild(str(tmp_path), shapes=["Qwen3-30B"])
    plans = {options[5] for compiled, options in asked if compiled.__name__ == "compiled_plan"}
    assert plans == set(study.orders(shape("Qwen3-30B"), 8192, 2).values())
    assert number == len(plans) + 6  # count, list, meeting, reduce, and the kernel with and without records


class Bench:
    """Stands for the GPUs: remembers what was opened and measured; `clock` is what `time.monotonic` says, `step` seconds per row."""

    def __init__(self, step: float = 0.0):
        self.opened: list[str] = []
        self.measured: list[tuple[str, float]] = []
        self.clock, self.step = 0.0, step

    @contextmanager
    def open(self, model: Any) -> Iterator[study.Measure]:
        self.opened.append(model.name)
        yield lambda share: self.measure(model.name, share)

    def measure(self, name: str, share: float) -> dict[str, Any]:
        self.measured.append((name, share))
        self.clock += self.step
        return row(name, share, default=1.02e6)


def walk(bench: Bench, path: Path, names: list[str], budget_s: float = 1e9) -> Any:
    results = ResultFile(path, "moe-lead", settings={"world": 2})
    study.walk(results, [shape(name) for name in names], study.SHARES, bench.open, budget_s)
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_budget_ends_it_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, path = Bench(step=1.0), Bench(), tmp_path / "moe-lead.json"
    monkeypatch.setattr(study.time, "monotonic", lambda: first.clock)
    content = walk(first, path, list(study.SHAPES), budget_s=2.5)
    assert first.measured == [("Qwen3.5", 0.5), ("Qwen3.5", 0.875), ("DSv4-Flash", 0.5)]  # what was begun at 2 s is finished
    assert not study.complete(content["rows"])
    content = walk(Bench(), path, list(study.SHAPES), budget_s=-1)
    assert len(content["rows"]) == 3
    content = walk(second, path, list(study.SHAPES))
    assert second.opened == list(study.SHAPES[1:])
    assert len(first.measured + second.measured) == len(content["rows"]) == 10
    assert study.complete(content["rows"])
    assert content["headline"] == {"moe_lead.default_loss.max": {"value": 0.02, "unit": "fraction"}}


def test_nothing_is_opened_for_what_is_there(tmp_path: Path) -> None:
    bench, path = Bench(), tmp_path / "moe-lead.json"
    walk(bench, path, ["Hy3"])
    walk(bench, path, ["Hy3"])
    assert bench.opened == ["Hy3"]


def test_refusals(tmp_path: Path) -> None:
    for wrong, said in (({"shapes": ["GPT"]}, "shape: 'GPT'"), ({"tokens": 0}, "tokens: 0"), ({"shares": [1.5]}, r"shares \[1.5\]")):
        with pytest.raises(XStageError, match=said):
            study.run(str(tmp_path / "r.json"), **wrong)  # type: ignore[arg-type]
    if torch.cuda.device_count() < 2:
        with pytest.raises(UnsuitableMachine, match="bench moe-lead: needs two peer-connected GPUs"):
            study.run(str(tmp_path / "r.json"))


class Pipeline:
    """Stands for `KernelPipeline`: writes 1, or for `wrong` leads 2, into the output, on CPUs."""

    def __init__(self, wrong: int | None = None):
        self.exchange = SimpleNamespace(order=None, row_slot=torch.zeros(4))
        self.ran: list[WorkOrder] = []
        self.wrong = wrong

    def run(self, x: torch.Tensor, scales: None, idx: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        assert idx.device == x.device
        self.ran.append(self.exchange.order)
        out.fill_(2 if self.exchange.order.lead == self.wrong else 1)

    def check(self) -> None: ...


def measured(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, dropped: int = 0) -> dict[str, Any]:
    def interleaved(timed: dict[str, Any], calls: int, rounds: int, pause_s: float) -> dict[str, Times]:
        for function in timed.values():
            function()
        return {name: at(1e6 * (i + 1) / calls) for i, name in enumerate(timed)}

    def recorded(pipeline: Pipeline, spans: Any, inputs: Any, slots: torch.Tensor, out: torch.Tensor) -> Any:
        pipeline.run(inputs[0], None, *inputs[1:], out)
        return SimpleNamespace(dropped=dropped, whole_ns=9e5, sends={"end": np.array([1e5, 7e5])})

    monkeypatch.setattr(study, "recorded", recorded)
    monkeypatch.setattr(study.timing, "meet", lambda: None)
    monkeypatch.setattr(study.timing, "interleaved", interleaved)
    monkeypatch.setattr(study, "graphed", lambda function, calls, warm_up: function)
    moe: Any = SimpleNamespace(rank=0, world=2, device=torch.device("cpu"), _kernels=pipeline)
    return study._measure(moe, None, shape("Qwen3-30B"), 256, 66, 3, 0.0, 0.875)  # type: ignore[arg-type]


def test_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, orders = Pipeline(), study.orders(shape("Qwen3-30B"), **TINY)
    found = measured(pipeline, monkeypatch)
    assert list(found["times"]) == list(orders)
    assert pipeline.ran[::2][: len(orders)] == list(orders.values())  # a call of each, and a recorded one
    assert sum(found["counts"]) == 256 * 8
    assert found["lead_rows"]["least"] == 16
    assert study.WAVE not in found["lead_rows"]
    assert set(found["dispatch_us"].values()) == {700.0}
    assert set(found["kernel_us"].values()) == {900.0}
    json.dumps(found)
    with pytest.raises(XStageError, match=r"orders: default and least gave different bits for Qwen3-30B, f = 0\.875"):
        measured(Pipeline(wrong=orders["default"].lead), monkeypatch)
    with pytest.raises(XStageError, match="spans: 3 records of least found no room"):
        measured(Pipeline(), monkeypatch, dropped=3)


def test_derived_and_headline() -> None:
    ns = {"least": 1.2e6, "default": 1e6, "2x": 0.8e6, "all": 1e6, study.WAVE: 0.7e6}
    assert study.derived(ns) == {"best": "2x", "default_loss": 0.25, "default_over_wave": 0.7}
    found = study.derived(ns, {"best": "least", "plan": study.WAVE})
    assert (found["predicted_best_loss"], found["plan_loss"]) == (0.5, 0.0)
    assert study.headline([]) == {}
    rows = [{"derived": found}, {"derived": study.derived(ns)}]
    assert list(study.headline(rows)) == ["moe_lead.default_loss.max"]  # not of some rows only
    assert study.headline(rows[:1])["moe_lead.predicted_best_loss.max"] == {"value": 0.5, "unit": "fraction"}


def test_table(tmp_path: Path) -> None:
    assert tables.TABLES["moe-lead"] is moe_lead_table
    with pytest.raises(XStageError, match=r"is missing, make it with: python -m xstage.studies.moe_lead_prediction"):
        moe_lead_table(tmp_path)
    assert "**Predicted, not measured yet.**" in moe_lead_table(RESULTS) or (RESULTS / "h200x2" / "moe-lead.json").exists()
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "moe_lead.json").write_text((RESULTS / "simulated" / "moe_lead.json").read_text())
    text = moe_lead_table(tmp_path)
    assert "**Predicted, not measured yet.**" in text
    assert text.count("\n| ") == 10
    r = row("Qwen3.5", 0.5, twice=9e5, least=1.3e6)
    guess = {"time_ns": {n: 5e5 for n in r["times"]}, "dispatch_ns": dict.fromkeys(r["times"], 4e5), "best": "default", "plan": "least"}
    ns = {name: t["slowest_ns"] for name, t in r["times"].items()}
    rows = [r | {"derived": study.derived(ns, guess), "predicted": guess}, row("Hy3", 0.5)]
    rows[1]["derived"] = study.derived(dict.fromkeys(rows[1]["times"], 1e6))
    content = {"study": "moe-lead", "complete": False, "settings": {"world": 2, "tokens": 8192, "rounds": 9}, "rows": rows}
    (tmp_path / "h200x2").mkdir()
    (tmp_path / "h200x2" / "moe-lead.json").write_text(json.dumps(content))
    text = moe_lead_table(tmp_path)
    assert "not measured yet" not in text
    assert "| Qwen3.5, 0.5 | 16: +30.0% (+0.0%) \\* | 17: +0.0% (+0.0%) |" in text
    assert "| 49: 1,000 (500) | **98: -10.0% (+0.0%)** |" in text
    assert "| 697 (400) |" in text
    assert "more rows will follow" in text
    assert "| Hy3, 0.5 | **16: +0.0%** | – |" in text


def test_prediction_is_added_to_the_file(tmp_path: Path) -> None:
    what = {"shape": "Qwen3-30B", "tokens": 512, "share": 0.875}
    orders = study.orders(shape("Qwen3-30B"), 512, 2)
    r = {**row("Qwen3-30B", 0.875), **what, "counts": drawn(what, 2), "times": {name: at(1e6).to_json() for name in orders}}
    path = tmp_path / "moe-lead.json"
    path.write_text(json.dumps({"study": "moe-lead", "settings": {"world": 2}, "rows": [r], "headline": {}}))
    content = prediction.annotate(path)
    assert content == json.loads(path.read_text(encoding="utf-8"))
    found = content["rows"][0]["predicted"]
    assert set(found["time_ns"]) == set(found["dispatch_ns"]) == set(orders)
    assert found["time_ns"][found["best"]] == min(ns for name, ns in found["time_ns"].items() if name != study.WAVE)
    times = found["time_ns"]
    assert times[found["plan"]] <= (1 + ERROR) * min(times.values()), "the planner loses no more than the model's error"
    assert content["headline"]["moe_lead.predicted_best_loss.max"]["value"] == 0
    odd = prediction.predict({**r, "share": 0.6}, load_platform("h200-nvlink4", samples=False), 2)
    assert odd["plan"] in orders
    path.write_text(json.dumps({"study": "dit"}))
    for wrong in (path, tmp_path / "none.json"):
        with pytest.raises(XStageError, match="path: "):
            prediction.annotate(wrong)


def test_simulated_file_is_what_the_simulator_says() -> None:
    content = json.loads((RESULTS / "simulated" / "moe_lead.json").read_text())
    rows, platform = content["outputs"]["rows"], load_platform("h200-nvlink4", samples=False)
    assert study.complete(rows)
    r = next(r for r in rows if r["shape"] == "Qwen3-30B" and r["share"] == 0.5)
    m, counts = shape("Qwen3-30B"), drawn(r, 2)
    for name in ("least", "default"):
        runs = simulate_layer(m, counts, r["share"], study.orders(m, r["tokens"], 2)[name], 2, platform)
        assert r["predicted"]["time_ns"][name] == pytest.approx(sum(run.time_ns for run in runs) / 2, rel=1e-4)
        assert r["predicted"]["dispatch_ns"][name] == pytest.approx(sum(run.dispatch_ns for run in runs) / 2, rel=1e-4)
    for r in rows:  # Linear-2 asks later, so rows have the link sooner
        came = r["predicted"]["dispatch_ns"]
        assert came["all"] < came["default"] < came["least"]
    loss = max(r["derived"]["default_loss"] for r in rows)
    assert content["headline"]["simulate.moe_lead_default_loss.max"]["value"] == loss
