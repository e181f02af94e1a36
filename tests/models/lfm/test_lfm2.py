"""What is LFM2's alone: the ways in which its configs say the same, its states, and checkpoints that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.errors import CheckpointError, UnsupportedModelError
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.registry import load_model
from tests.families import lfm2
from tests.models.test_family_checkpoints import changed, logits_of
from tests.models.test_model_exact import assert_close

CONV, ATTENTION = lfm2.CONV, lfm2.ATTENTION


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2")
    lfm2.build(folder)
    return folder


def load(folder: Path) -> LoadedModel:
    return load_model(folder, LoadOptions(torch.float32, torch.device("cpu")))


def test_fields_of_the_first_published_configs(checkpoint: Path, tmp_path: Path) -> None:
    """They name the attention layers by index, the width before it is adjusted ``block_ff_dim``, and the tied head."""
    older = changed(checkpoint, tmp_path / "older", full_attn_idxs=[2], block_ff_dim=30, block_use_swiglu=True)
    config = json.loads((older / "config.json").read_text())
    for name in ("layer_types", "intermediate_size"):
        del config[name]
    config |= {"tie_embedding": config.pop("tie_word_embeddings"), "rope_theta": 10000.0, "num_heads": 6}
    del config["rope_parameters"]
    (older / "config.json").write_text(json.dumps(config))
    assert_close(logits_of(older), logits_of(checkpoint))


def test_the_state_is_a_window(checkpoint: Path) -> None:
    """Slots, records and the memory plan count it and nothing else, whatever the dtype of recurrent states."""
    flags: dict[str, Any] = {"max_total_tokens": 64, "max_running_requests": 2, "speculative_algorithm": "ngram"}
    engine = Engine(
        EngineConfig(model=str(checkpoint), device="cpu", dtype="float32", mamba_ssm_dtype="bfloat16", **flags)
    )
    shape, plan, channels = engine.model.cache_shape, engine.memory_plan, lfm2.DEFAULTS["hidden_size"]
    assert shape.num_state_layers == 3
    assert shape.state.num_recurrent_values == 0
    assert shape.state_bytes_per_slot == 3 * 2 * channels * 4
    assert shape.record_bytes_per_token == 3 * channels * 4
    assert plan.state_bytes == engine.pools.states.conv.nbytes == (plan.num_state_slots + 1) * 3 * 2 * channels * 4
    assert engine.pools.states.recurrent.numel() == 0
    engine.close()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"layer_types": [CONV, "sliding_attention", ATTENTION, CONV]},
            "must give conv or full_attention to each of 4",
        ),
        ({"layer_types": [CONV, "linear_attention", ATTENTION, CONV]}, "must give conv or full_attention to each of 4"),
        ({"num_key_value_heads": 4}, "6 query heads are not a multiple of 4 key heads"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope type 'proportional' is not"),
    ],
)
def test_variants_that_are_not_computed(
    changes: dict[str, Any], sentence: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=sentence):
        load(changed(checkpoint, tmp_path / "changed", **changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("conv_L_cache", 0),
        ("conv_L_cache", 1),
        ("conv_L_cache", 2.5),
        ("norm_eps", 0.0),
        ("block_multiple_of", 0),
        ("block_ffn_dim_multiplier", 0.0),
        ("block_ffn_dim_multiplier", None),
    ],
)
def test_values_that_make_no_model(name: str, value: object, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=name):
        load(changed(checkpoint, tmp_path / "changed", **{name: value}))


def test_a_layer_type_that_transformers_does_not_know(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        load(changed(checkpoint, tmp_path / "changed", layer_types=[CONV, "wavelet", ATTENTION, CONV]))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"conv_bias": True}, "model.layers.0.conv.conv.bias"),
        ({"conv_L_cache": 4}, r"model.layers.0.conv.conv.weight has the shape \[36, 1, 3\]"),
        ({"layer_types": [CONV, CONV, CONV, CONV]}, "model.layers.2.conv.conv.weight"),
        ({"block_auto_adjust_ff_dim": False}, r"model.layers.0.feed_forward.w1.weight has the shape \[24, 36\]"),
    ],
)
def test_tensors_that_do_not_fit_the_config(
    changes: dict[str, Any], names: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=names):
        load(changed(checkpoint, tmp_path / "changed", **changes))


@pytest.mark.parametrize(
    "name",
    ["model.embedding_norm.weight", "model.layers.2.self_attn.k_layernorm.weight", "model.layers.3.conv.conv.weight"],
)
def test_tensors_that_are_missing_or_left_over(name: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.conv.conv.bias": torch.zeros(36)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.conv\.conv\.bias"):
        load(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(folder)
