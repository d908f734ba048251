"""Arithmetic, headline, table and refusals of the diffusion transformers' study; its models, variants and check at small sizes over gloo.

Not covered: timing itself, and the fused kernel (both need GPUs).
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from xstage.bench import tables
from xstage.bench.timing import Times
from xstage.errors import UnsuitableMachine, XStageError
from xstage.platform import load_platform
from xstage.studies import dit as study
from xstage.studies import dit_models


def at(us: float) -> Times:
    return Times([[us * 1e3 - 5], [us * 1e3]], [[None]] * 2, 1)


STEP = {
    "diffusers_native": at(1200), "diffusers_cudnn": at(1100), "ours": at(1000), "ours_push": at(1050), "ours_all_to_all": at(1040),
    "ours_at_once": at(1020),
}  # fmt: skip
LAYER = {
    "diffusers_native": at(400), "alone_diffusers_native": at(320), "diffusers_cudnn": at(380), "alone_diffusers_cudnn": at(280),
    "ours": at(290), "ours_at_once": at(300), "ours_push": at(330), "ours_all_to_all": at(325), "alone_ours": at(260),
    "exchange_packed": at(25), "exchange_all_to_all": at(60),
}  # fmt: skip


def test_derived_answers() -> None:
    graph = {"ours": at(280), "alone_ours": at(260), "exchange_packed": at(22)}
    assert study.derived({"step": STEP, "layer": LAYER, "layer_graph": graph}, 20e3) == {
        "step_speedup": 1.1, "step_over_push": 1.05, "exposed_ours_ns": 30e3, "exposed_ours_push_ns": 70e3, "exposed_diffusers_ns": 100e3,
        "step_over_at_once": 1.02, "exposed_ours_at_once_ns": 40e3,
        "layer_speedup": round(380 / 290, 4), "exposed_share": 0.3, "exposed_ours_graph_ns": 20e3,
        "step_over_all_to_all": 1.04, "exposed_ours_all_to_all_ns": 65e3, "exchange_bound_ns": 20e3,
        "exchange_packed_ns": 25e3, "exchange_packed_over_bound": 1.25, "exchange_all_to_all_ns": 60e3,
        "exchange_all_to_all_over_bound": 3.0, "exchange_packed_graph_ns": 22e3, "exchange_packed_over_bound_graph": 1.1,
    }  # fmt: skip
    assert study.derived({"layer": {**LAYER, "alone_diffusers_cudnn": at(380)}}).keys() & {"exposed_share", "step_speedup"} == set()
    assert study.derived({}) == {}


def row(name: str, share: float, speedup: float) -> dict[str, Any]:
    times = {"step": STEP, "layer": LAYER}
    return {
        "name": name, "heads": 24, "sequence": 4608, "split": {"step": [2, 0], "layer": [2, 0]},
        "derived": {**study.derived(times, 20e3), "exposed_share": share, "step_speedup": speedup},
        "groups": {group: {n: t.to_json() for n, t in measured.items()} for group, measured in times.items()},
    }  # fmt: skip


def test_headline() -> None:
    rows = [row("FLUX.1 1024²", 0.3, 1.1), row("Wan 1.3B 480p", 0.4, 1.2)]
    figures = {key: entry["value"] for key, entry in study.headline(rows).items()}
    assert figures == {
        "dit.exposed_share_of_diffusers.max": 0.4, "dit.step_speedup.min": 1.1, "dit.step_speedup.geomean": round(1.32**0.5, 4),
        "dit.exchange_over_bound.max": 1.25,
        "dit.step_speedup.flux_1_1024": 1.1, "dit.step_speedup.wan_1_3b_480p": 1.2,
    }  # fmt: skip
    rows[0]["derived"]["exposed_share_graph"] = 0.25
    assert study.headline(rows)["dit.exposed_share_of_diffusers_graph.max"] == {"value": 0.25, "unit": "fraction"}
    assert study.headline([]) == {}


def test_table(tmp_path: Path) -> None:
    assert tables.TABLES["dit"](tmp_path) == "Not measured yet."
    (tmp_path / "h200x2").mkdir()
    content = {"settings": {"world": 2, "layers": 3}, "rows": [row("FLUX.1 1024²", 0.3, 1.1)]}
    (tmp_path / "h200x2" / "dit.json").write_text(json.dumps(content))
    line = "| FLUX.1 1024² | 24, 4,608 | 1,100 cudnn | 1,050 | 1,000 | 1.100× | 100 | 70 | 40 | 30 | 0.30 | – | – | – | – | – |"
    assert f"{line} 2, copies | 20 | 25 | 60 |" in tables.TABLES["dit"](tmp_path)
    content["rows"][0]["split"] = {"layer": None, "layer_graph": [1, 12]}
    (tmp_path / "h200x2" / "dit.json").write_text(json.dumps(content))
    assert "| all / 1, 12 SMs | 20 |" in tables.TABLES["dit"](tmp_path)
    content["rows"][0]["split"] = {"layer": None, "layer_graph": None}
    (tmp_path / "h200x2" / "dit.json").write_text(json.dumps(content))
    assert "| all | 20 |" in tables.TABLES["dit"](tmp_path)
    # Rows that were measured when all heads came at once say nothing of it.
    content["rows"][0]["groups"] = content["rows"][0]["derived"] = {}
    del content["rows"][0]["split"]
    (tmp_path / "h200x2" / "dit.json").write_text(json.dumps(content))
    assert f"| FLUX.1 1024² | 24, 4,608 {'| – ' * 18}|" in tables.TABLES["dit"](tmp_path)


def test_models_as_published() -> None:
    assert {name: (m.sequence, m.heads, m.odd(2)) for name, m in study.MODELS.items()} == {
        "flux_1_1024": (4608, 24, False), "flux_1_2048": (16896, 24, False), "qwen_image_1328": (6889 + 256, 24, True),
        "wan_1_3b_480p": (32760, 12, False), "wan_14b_480p": (32760, 40, False), "hunyuanvideo_720p": (118800 + 256, 24, False),
    }  # fmt: skip
    qwen = study.MODELS["qwen_image_1328"]
    assert [qwen.rows(rank, 2) for rank in range(2)] == [3445 + 128, 3444 + 128]
    assert sum(qwen.rows(rank, 3) for rank in range(3)) == qwen.sequence


def test_bound_by_hand() -> None:
    platform = load_platform("h200-nvlink4", samples=False)
    rate = float(platform.method("st_global").drain_rate(platform.sms))
    sent = {"flux_1_1024": 2304 * 12 * 256 * 3, "wan_14b_480p": 16380 * 20 * 256 * 3, "qwen_image_1328": 3573 * 12 * 256 * 3}
    for name, bytes_ in sent.items():
        assert dit_models.exchange_bound_ns(study.MODELS[name], 2, platform) == pytest.approx(bytes_ / rate)
    assert dit_models.exchange_bound_ns(study.MODELS["wan_14b_480p"], 8, platform) == pytest.approx(4095 * 35 * 256 * 3 / rate)


def test_outputs_that_differ_are_refused() -> None:
    study.check({"diffusers_native": 0.01, "diffusers_cudnn": 0.02, "ours": 0.039})
    for wrong in ({"ours": 0.041}, {"ours_push": 0.05}, {"ours": float("nan")}, {"diffusers_flash": float("nan"), "ours": 0.01}):
        with pytest.raises(XStageError, match="too far from the whole model"):
            study.check({"diffusers_native": 0.01, "diffusers_cudnn": 0.02, **wrong})


def test_refusals(tmp_path: Path) -> None:
    out = str(tmp_path / "r.json")
    for arguments, message in (
        ({"models": ["sd3"]}, "models: 'sd3' is not one of flux_1_1024"), ({"groups": ["all"]}, "groups: 'all'"),
        ({"layers": 0}, "layers: 0"),
    ):  # fmt: skip
        with pytest.raises(XStageError, match=message):
            study.run(out, **arguments)
    if torch.cuda.device_count() < 2:
        with pytest.raises(UnsuitableMachine, match="bench dit: needs two peer-connected GPUs"):
            study.run(out)


def test_unfinished_files_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    measured: list[str] = []

    def measure(model: study.Model, layers: int, *_: Any) -> dict[str, Any]:
        measured.append(model.name)
        return row(model.name, 0.1 * layers, 1.1)

    monkeypatch.setattr(study, "measure", measure)
    monkeypatch.setattr(study.timing, "start_group", lambda *_: None)
    monkeypatch.setattr(study.timing, "meet", lambda *_: None)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        out = tmp_path / "r.json"
        assert not study.run(str(out), models=["wan_1_3b_480p", "flux_1_1024"])["complete"]
        assert measured == ["FLUX.1 1024²", "Wan 1.3B 480p"]  # the short ones first
        assert not study.run(str(out), budget_s=-1.0)["complete"]
        assert len(measured) == 2
        assert study.run(str(out))["complete"]
        assert len(measured) == len(study.MODELS)
        content = json.loads(out.read_text())
        assert content["settings"]["layers"] == 3
        assert content["headline"]["dit.exposed_share_of_diffusers.max"]["value"] == 0.3
        assert content["headline"]["dit.step_speedup.wan_14b_480p"]["value"] == 1.1
    finally:
        torch.distributed.destroy_process_group()


SMALL = {
    "flux": {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
    "qwen": {"in_channels": 16, "out_channels": 4, "joint_attention_dim": 16, "axes_dims_rope": (4, 4, 8)},
    "wan": {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32},
    "hunyuan": {
        "in_channels": 4,
        "out_channels": 4,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (4, 4, 8),
        "num_refiner_layers": 1,
    },
}


def small(model: study.Model) -> study.Model:
    config = {**model.config, **SMALL[model.family], "num_attention_heads": 4, "attention_head_dim": 16}
    return replace(model, grid={"flux": (1, 4, 6), "qwen": (1, 3, 4)}.get(model.family, (2, 3, 4)), text=6, config=config)


def dry_run(rank: int, world: int) -> None:
    """`measure` with a clock that only calls what it should time."""

    def interleaved(functions: Any, *, calls: int, rounds: int, **_: Any) -> dict[str, Times]:
        for function in functions.values():
            function()
        return {name: at(2 if name.startswith("diffusers") else 1) for name in functions}

    study.timing.meet = lambda *_: torch.distributed.barrier()  # type: ignore[assignment]
    study.timing.interleaved = interleaved  # type: ignore[assignment]
    study._captured = lambda *_: nullcontext({})  # type: ignore[assignment]
    torch.accelerator.device_count = lambda: world  # type: ignore[assignment]  # diffusers counts GPUs
    study.Model.odd = lambda model, _: model.family == "qwen"  # type: ignore[method-assign]  # gloo gathers only equal parts
    study.quiet()
    for name, model in study.MODELS.items():
        found = study.measure(
            small(model), 3, study.GROUPS, 5, 0.0, device=torch.device("cpu"), backends={"native": "native", "cudnn": "_native_cudnn"}
        )  # fmt: skip
        planned = model.family != "hunyuan"  # by diffusers
        assert {"diffusers_native" if planned else "whole", "ours"} <= found["errors"].keys(), name
        assert all(0 < e < 0.05 for e in found["errors"].values()), (name, found["errors"])
        assert set(found["groups"]) == {"step", "layer"}
        theirs = {"diffusers_native", "alone_diffusers_native"} if planned else set()
        assert set(found["groups"]["layer"]) == theirs | {"ours", "alone_ours"}, name
        missing = {"ours_at_once", "ours_push", "ours_all_to_all", "exchange_packed", "exchange_all_to_all"}
        assert found["missing"].keys() == {"diffusers_cudnn", *missing} | (set() if planned else {"diffusers_native"})
        assert {found["missing"][name] for name in missing} == {"runs as reference"}
        assert found["derived"]["exchange_bound_ns"] > 0
        assert found["derived"].get("step_speedup") == (2.0 if planned else None)
        json.dumps(found)


def test_dry_run() -> None:
    pytest.importorskip("diffusers")
    ranks.run(dry_run, 2, limit_s=90)
