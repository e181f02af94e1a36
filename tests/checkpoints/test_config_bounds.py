"""Wrong numbers in a config.json are refused by name, before anything is built from them."""

from __future__ import annotations

import json
import math
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba.checkpoints.checkpoint import read_config, text_config
from specmamba.checkpoints.config_bounds import FIELDS, ROPE_FIELDS, require_bounded_config
from specmamba.config import DEMO_MODEL
from specmamba.errors import CheckpointError
from specmamba.models.base import LoadOptions
from specmamba.models.draft_heads import read_head_config
from specmamba.models.registry import ARCHITECTURES, load_model
from tests.models.published.test_published_configs import MODELS

OPTIONS = LoadOptions(torch.float32, torch.device("meta"))
DEMO: dict[str, Any] = json.loads((DEMO_MODEL / "config.json").read_text())
ROPE: dict[str, Any] = DEMO["rope_parameters"]


def write(folder: Path, config: dict[str, Any], **changes: Any) -> None:
    """A checkpoint without weights. ``changes`` are of the language model."""
    nested = "text_config" in config
    changed = {**config, "text_config": config["text_config"] | changes} if nested else config | changes
    (folder / "config.json").write_text(json.dumps(changed))


def write_demo(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(DEMO | changes))


@pytest.mark.parametrize("model", MODELS)
def test_every_number_of_every_family_is_bounded(tmp_path: Path, model: str) -> None:
    """The bounds hold for the published config, and a wrong value of any field is refused with its name."""
    published = MODELS[model].config
    write(tmp_path, published)
    config = text_config(read_config(tmp_path, tuple(ARCHITECTURES))[0])
    used = [name for name in FIELDS if hasattr(config, name)]
    assert {"vocab_size", "hidden_size", "num_hidden_layers"} < set(used)
    wrong = cycle([-(2**40), 10**30, math.nan, -(2.0**40), -math.inf])
    for name in used:
        value = next(wrong)
        write(tmp_path, published, **{name: [float(value)] if FIELDS[name].is_list else value})
        with pytest.raises(CheckpointError, match=rf"config\.json: {name} is .*"):
            read_config(tmp_path, tuple(ARCHITECTURES))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("head_dim", 0),
        ("num_key_value_heads", 0),
        ("linear_conv_kernel_dim", 1),
        ("linear_key_head_dim", 2**20),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", math.nan),
        ("max_position_embeddings", 10**15),
        ("num_labels", 10**9),
        ("mtp_num_hidden_layers", []),
        *((name, 0) for name in ROPE_FIELDS if name == "rope_theta"),
    ],
)
def test_values_that_ended_the_engine_or_filled_the_memory(tmp_path: Path, name: str, value: object) -> None:
    changes = {"rope_parameters": ROPE | {name: value}} if name in ROPE_FIELDS else {name: value}
    write_demo(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=rf"config\.json: (rope_parameters\.)?{name} is "):
        read_config(tmp_path, ["Qwen3_5ForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5: it should be a number above 0 to 1"),
        ({"partial_rotary_factor": 1e9}, "partial_rotary_factor is 1000000000.0"),
        ({"partial_rotary_factor": 1e-9}, "give 0 of 64 numbers of a head"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": None}, "'rope_theta': None.* give no frequencies"),
        ({"rope_type": "yarn", "factor": 0.0}, "factor is 0.0"),
        ({"rope_type": "llama3", "factor": 2.0}, "Missing required keys"),
    ],
)
def test_rotary_embeddings(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    write_demo(tmp_path, rope_parameters=ROPE | changes)
    (tmp_path / "model.safetensors").symlink_to(DEMO_MODEL / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        load_model(tmp_path, OPTIONS)


def test_sizes_of_zero(tmp_path: Path) -> None:
    """A stored tensor without elements would agree with them."""
    write_demo(tmp_path, intermediate_size=0)
    (tmp_path / "model.safetensors").symlink_to(DEMO_MODEL / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"gate_proj.weight the shape \[0, 256\], without elements"):
        load_model(tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("nested", "sentence"), [({"hidden_size": 8}, "is text alone, so it can have no"), (5, "text")]
)
def test_a_nested_config_in_a_model_of_text_alone(tmp_path: Path, nested: object, sentence: str) -> None:
    write_demo(tmp_path, text_config=nested)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [("llama", "model_type is 'llama', but should be qwen3_5 or qwen3_5_text"), (None, "model_type is None")],
)
def test_the_config_of_another_model(tmp_path: Path, model_type: str | None, sentence: str) -> None:
    write_demo(tmp_path, model_type=model_type)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(tmp_path, OPTIONS)


def test_draft_heads(tmp_path: Path) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 2, "head_dim": -4}))
    with pytest.raises(CheckpointError, match=r"config\.json: head_dim is -4"):
        read_head_config(tmp_path)


def test_a_value_is_not_quoted_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"vocab_size is 1{60}\.{3}: it should be an integer from 1 to 16777216"):
        require_bounded_config(tmp_path, type("Config", (), {"vocab_size": int("1" * 1000)})())
