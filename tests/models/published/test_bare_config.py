"""``specmamba info --plan`` of a folder that has nothing but a config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from specmamba.cli import main
from specmamba.config import EngineConfig
from specmamba.engine.capacity_plan import plan_capacity
from specmamba.errors import CheckpointError
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.registry import load_model
from tests.families import FAMILIES
from tests.models.published.test_published_configs import MODELS
from tests.tiny import write_tiny_checkpoint

VARIANTS = {f"{family}-{name}": (family, name) for family in sorted(FAMILIES) for name in FAMILIES[family].VARIANTS}


def shapes_of(folder: Path) -> LoadedModel:
    return load_model(folder, LoadOptions(torch.bfloat16, torch.device("meta"), want_draft_head=True))


@pytest.mark.fast_cases("default")
@pytest.mark.parametrize("case", VARIANTS)
def test_every_family_has_the_sizes_of_its_tensors(case: str, tmp_path: Path) -> None:
    family, variant = VARIANTS[case]
    FAMILIES[family].build(tmp_path / "whole", variant)
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    whole, bare = shapes_of(tmp_path / "whole"), shapes_of(tmp_path / "bare")
    assert bare.num_parameters == whole.num_parameters
    assert bare.weight_bytes == whole.weight_bytes
    assert bare.cache_shape == whole.cache_shape


@pytest.mark.fast_cases("Qwen3.5-35B", "Nemotron-3-Nano", "LFM2-8B")
@pytest.mark.parametrize("name", MODELS)
def test_published_configs(name: str, tmp_path: Path) -> None:
    published = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(published.config | {"dtype": "bfloat16"}))
    model = shapes_of(tmp_path)
    is_exact = isinstance(published.num_parameters, int)
    assert model.num_parameters == pytest.approx(published.num_parameters, rel=0 if is_exact else 1e-3, abs=0)
    assert (model.cache_shape.kv, model.cache_shape.state) == (published.kv, published.state)


def test_the_plan_of_a_published_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3.5-35B-A3B"].config | {"dtype": "bfloat16"}))
    assert main(["info", "--model", str(tmp_path), "--plan", "--tp", "8", "--gpu-memory", "141"]) == 0
    shown = capsys.readouterr().out
    assert "8 ranks" in shown
    assert "requests of 32,768 tokens at once" in shown


def test_the_plan_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    whole = write_tiny_checkpoint(tmp_path / "whole", 0)
    (tmp_path / "bare").mkdir()
    shutil.copy(whole / "config.json", tmp_path / "bare")
    plans = [
        plan_capacity(EngineConfig(model=str(tmp_path / name), quantization=form), 1, (64,))["plans"]
        for form in ("auto", "int8")
        for name in ("whole", "bare")
    ]
    assert plans[0] == plans[1] != plans[2] == plans[3]


def test_codes_cannot_be_planned_without_tensors(tmp_path: Path) -> None:
    config = json.loads((write_tiny_checkpoint(tmp_path / "whole", 0) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantized \(fp8\), but not which, and there are no safetensors: plan"):
        plan_capacity(EngineConfig(model=str(tmp_path)), 1, (64,))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.gguf.part"])
def test_weights_that_are_not_read_are_no_bare_config(file: str, tmp_path: Path) -> None:
    """A folder of pickles is refused as it always was; what else lies beside a config.json does not matter."""
    shutil.copy(write_tiny_checkpoint(tmp_path / "whole", 0) / "config.json", tmp_path)
    (tmp_path / file).touch()
    config = EngineConfig(model=str(tmp_path))
    if file.endswith(".bin"):
        with pytest.raises(CheckpointError, match="loading a pickle runs code"):
            plan_capacity(config, 1, (64,))
    else:
        assert plan_capacity(config, 1, (64,))["plans"]
