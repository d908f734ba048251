"""The choice of schedule and lead for the layer: what is simulated, when another than `auto` is taken, what is refused."""

import json
from dataclasses import replace

import pytest

from xstage import layer_plan
from xstage.cli import main
from xstage.errors import XStageError
from xstage.layer_plan import ERROR, plan_layer
from xstage.moe.shapes import MoEShape, shape
from xstage.platform import Platform, load_platform
from xstage.simulate import routing
from xstage.simulate.layer import order_of, simulate_layer

SMALL = MoEShape("small", 2048, 768, 32, 8)


@pytest.fixture(scope="module")
def platform() -> Platform:
    return load_platform("h200-nvlink4", samples=False)


def counts(model: MoEShape, tokens: int) -> list[int]:
    found: list[int] = routing.named("balanced", tokens, model.experts, model.top_k).counts.tolist()
    return found


def test_candidates_are_the_kernels_own_runs(platform: Platform) -> None:
    load = counts(SMALL, 8192)
    plan = plan_layer(SMALL, load, 2, platform)
    assert plan.share == 0.5
    own = order_of("interleaved", SMALL, platform)
    by_lead = {c.lead: c for c in plan.candidates if c.schedule == "interleaved"}
    assert by_lead[own.lead_rows].lead_rows is None
    (first,) = [c for c in plan.candidates if c.schedule == "linear1_first"]
    assert first.lead == sum(-(-n // 128) for n in load[:16]) > max(by_lead)
    assert [c.time_ns for c in plan.candidates] == sorted(c.time_ns for c in plan.candidates)
    for c in (by_lead[own.lead_rows], next(c for c in plan.candidates if c.schedule == "expert_wave")):
        runs = simulate_layer(SMALL, load, 0.5, order_of(c.schedule, SMALL, platform), 2, platform)
        assert c.time_ns == max(r.time_ns for r in runs)
    more = plan_layer(SMALL, load, 2, platform, share=0.875)
    assert more.auto.stall_ns > plan.auto.stall_ns
    assert more.once_ns < more.choice.time_ns, "the link is overloaded, and most rows cross it for a token's second pick or a later one"
    slow = plan_layer(SMALL, load, 2, platform, weights="mxfp4")
    assert slow.auto.time_ns > plan.auto.time_ns, "tiles take longer with MXFP4 weights"


@pytest.mark.parametrize(("gain", "kept"), [(0.0, True), (0.9 * ERROR, True), (1.1 * ERROR, False)])
def test_auto_is_left_for_more_than_the_error_only(gain: float, kept: bool, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expert-wave order made faster than `auto`'s interleaved by a known gain."""
    runs = simulate_layer(SMALL, counts(SMALL, 1024), 0.5, order_of("interleaved", SMALL, platform), 2, platform)

    def simulated(model, load, share, order, ranks, platform, line, remote=True, once=False):  # type: ignore[no-untyped-def]
        faster = 1 + gain if order.name == "expert_wave" else 0.99 if order.lead_rows != own.lead_rows else 1.0
        return [replace(run, time_ns=1e6 / faster) for run in runs]

    own = order_of("interleaved", SMALL, platform)
    monkeypatch.setattr(layer_plan, "simulate_layer", simulated)
    monkeypatch.setattr(layer_plan, "auto_order", lambda *_: "interleaved")
    plan = plan_layer(SMALL, counts(SMALL, 1024), 2, platform)
    assert (plan.choice == plan.auto) == kept
    said = plan.describe()
    assert said[0].startswith("small on h200-nvlink4, f = 0.5: " + ("keep" if kept else "expert_wave: "))
    assert sum(line.startswith(" →") for line in said) == 1
    assert plan.as_json()["choice"]["schedule"] == ("interleaved" if kept else "expert_wave")


def test_refusals(platform: Platform) -> None:
    with pytest.raises(XStageError, match="counts: 3 must be the 32 experts of small, which 2 ranks must divide"):
        plan_layer(SMALL, [1, 2, 3], 2, platform)
    with pytest.raises(XStageError, match="which 5 ranks must divide"):
        plan_layer(SMALL, [1] * 32, 5, platform)
    with pytest.raises(XStageError, match="counts: 0 rows"):
        plan_layer(SMALL, [0] * 32, 2, platform)
    with pytest.raises(XStageError, match="weights: 'int4' is not one of fp8, mxfp4"):
        plan_layer(SMALL, [1] * 32, 2, platform, weights="int4")


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--layer", "--shape", "Qwen3-30B", "--tokens", "1024", "--ranks", "2"]) == 0
    assert capsys.readouterr().out.startswith("Qwen3-30B on h200-nvlink4, f = 0.5: ")
    assert main(["plan", "--layer", "--shape", "Qwen3-30B", "--tokens", "1024", "--weight-bits", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["predicted"]
    assert said["share"] == 0.875
    assert {c["schedule"] for c in said["candidates"]} == {"interleaved", "expert_wave", "linear1_first"}
    assert shape("Qwen3-30B").name == said["model"]
