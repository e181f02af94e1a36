"""Checkpoints in the published layouts, and configs that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.llm import LLM
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.hybrid import expert_layers
from specmamba.models.registry import load_model
from tests.families import FAMILIES
from tests.models.test_model_exact import assert_close, random_prompts

PLAIN: dict[str, Any] = {"speculative_algorithm": "none"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in folders.items():
        FAMILIES[name].build(folder)
    return folders


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """The same checkpoint with another config."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text("utf8"))
    (to / "config.json").write_text(json.dumps(config | changes), "utf8")
    return to


def load(folder: Path) -> LoadedModel:
    return load_model(folder, LoadOptions(torch.float32, torch.device("cpu")))


def logits_of(folder: Path) -> torch.Tensor:
    prompt, tokens = random_prompts((9, 20), seed=3)
    logits: list[torch.Tensor] = []
    with LLM(model=str(folder), dtype="float32", device="cpu", context_length=64, num_threads=1, **PLAIN) as llm:
        llm.workbench.logits_along(prompt, tokens, logits.append)
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("bamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: only silu is"),
        ("bamba", {"attn_layer_indices": [1, 4]}, r"attn_layer_indices \[4\]: the model has layers 0 to 3"),
        ("bamba", {"mamba_n_groups": 4}, "6 Mamba2 heads are not a multiple of 4 groups"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: only silu is"),
        ("mamba2", {"n_groups": 4}, "6 Mamba2 heads are not a multiple of 4 groups"),
        ("mamba2", {"rms_norm": False}, "rms_norm false is not supported"),
        ("mamba2", {"time_step_limit": [0.4, 0.1]}, r"time_step_limit \[0.4, 0.1\] should be two numbers"),
        ("mamba2", {"time_step_limit": [0.1]}, r"time_step_limit \[0.1\] should be two numbers"),
        ("falcon-h1", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported: only silu is"),
        ("falcon-h1", {"mamba_n_groups": 3}, "4 Mamba2 heads are not a multiple of 3 groups"),
        ("falcon-h1", {"num_key_value_heads": 4}, "6 query heads are not a multiple of 4 key heads"),
        ("falcon-h1", {"mlp_multipliers": [1.0, 2.0, 3.0]}, r"mlp_multipliers \[1.0, 2.0, 3.0\] should be 2 numbers"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers \[1.0\] should be 5 numbers"),
        (
            "falcon-h1",
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "rope type 'proportional' is not supported",
        ),
        ("granite-hybrid", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: only silu is"),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, "'alibi' is not supported .nope and rope are"),
        ("granite-hybrid", {"num_key_value_heads": 4}, "6 query heads are not a multiple of 4 key heads"),
        ("granite-hybrid", {"normalization_function": "layernorm"}, "normalization_function 'layernorm' is not"),
        ("granite-hybrid", {"num_experts_per_tok": 7}, "a token cannot go to 7 of 6 experts"),
        ("granite-hybrid", {"num_experts_per_tok": 0}, "a token cannot go to 0 of 6 experts"),
        (
            "granite-hybrid",
            {"layer_types": ["mamba", "sliding_attention", "mamba", "mamba"]},
            "must give linear_attention or full_attention to each of 4 layers",
        ),
        (
            "bailing-hybrid",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            "rope type 'yarn' is not supported for Ling: only default is",
        ),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: only silu is"),
        ("jamba", {"num_experts_per_tok": 7}, "a token cannot go to 7 of 6 experts"),
        ("jamba", {"num_key_value_heads": 2}, "3 query heads are not a multiple of 2 key heads"),
        ("kimi-linear", {"num_experts_per_token": 7}, "a token cannot go to 7 of 6 experts"),
        ("kimi-linear", {"num_key_value_heads": 1}, "latent attention has no groups"),
        ("kimi-linear", {"attention_bias": True}, "attention_bias true is not supported with latent attention"),
        (
            "kimi-linear",
            {"attn_res_block_size": 12},
            "attn_res_block_size is not supported: models like Kimi-K3 need more",
        ),
        ("kimi-linear", {"routed_expert_hidden_size": 8}, "routed_expert_hidden_size is not supported"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope false is not supported: Kimi-Linear does not rotate"),
        ("lfm2-moe", {"num_experts_per_tok": 7}, "a token cannot go to 7 of 6 experts"),
        ("olmo-hybrid", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: only silu is"),
        ("olmo-hybrid", {"linear_num_key_heads": 4}, "6 value heads are not a multiple of 4 key heads"),
        ("olmo-hybrid", {"num_key_value_heads": 4}, "6 query heads are not a multiple of 4 key heads"),
        (
            "olmo-hybrid",
            {"layer_types": [*3 * ["linear_attention"], "sliding_attention"]},
            "must give linear_attention",
        ),
        ("olmo-hybrid", {"rope_parameters": {"rope_type": None}}, "rope type None is not supported"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ("qwen3.5", {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported: only silu is"),
        ("qwen3.5-moe", {"norm_topk_prob": False}, "norm_topk_prob false is not supported for Qwen3.5"),
        ("qwen3-next", {"num_experts_per_tok": 8}, "a token cannot go to 8 of 7 experts"),
    ],
)
def test_variants_that_are_refused(
    family: str, changes: dict[str, Any], sentence: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=sentence):
        load(changed(checkpoints[family], tmp_path / "changed", **changes))


def test_an_older_name_of_the_embedding(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(checkpoints["mamba2"], tmp_path / "older")
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert_close(logits_of(folder), logits_of(checkpoints["mamba2"]))


@pytest.mark.parametrize("layout", ["one convolution", "three of one size"])
def test_names_of_olmo_hybrid(layout: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As transformers has them in memory, and as it saves them."""
    folder = changed(checkpoints["olmo-hybrid"], tmp_path / "renamed")
    tensors = load_file(folder / "model.safetensors")
    for prefix in (f"model.layers.{layer}.linear_attn." for layer in (0, 1, 3)):
        names = [f"{prefix}{x}_conv1d.weight" for x in "qkv"]
        conv = torch.cat([tensors.pop(name) for name in names])
        if layout == "one convolution":
            tensors[f"{prefix}conv1d.weight"] = conv
        else:
            tensors |= {name: part.contiguous() for name, part in zip(names, conv.chunk(3), strict=True)}
    stored, renamed = "feedforward_layer_norm", "post_attention_layernorm"
    if layout == "one convolution":
        tensors = {key.replace("attention_layer_norm", "input_layernorm"): x for key, x in tensors.items()}
    else:
        stored, renamed = renamed, stored  # of the block with attention, which alone has the first of them
    tensors = {key.replace(stored, renamed): x for key, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert_close(logits_of(folder), logits_of(checkpoints["olmo-hybrid"]))


def test_convolutions_that_do_not_fit(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(checkpoints["olmo-hybrid"], tmp_path / "misfit")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.linear_attn.v_conv1d.weight"
    tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"v_conv1d.weight have \[20, 20, 83\] channels, together not .* 124"):
        load(folder)


def test_experts_of_jamba_in_one_tensor(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As transformers has them in memory; published checkpoints have one tensor for each."""
    folder = changed(checkpoints["jamba"], tmp_path / "fused")
    tensors = load_file(folder / "model.safetensors")
    for prefix in (f"model.layers.{layer}.feed_forward.experts." for layer in (1, 3)):
        of_each = [
            {name: tensors.pop(f"{prefix}{expert}.{name}_proj.weight") for name in ("gate", "up", "down")}
            for expert in range(6)
        ]
        tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat([x["gate"], x["up"]]) for x in of_each])
        tensors[f"{prefix}down_proj"] = torch.stack([x["down"] for x in of_each])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert_close(logits_of(folder), logits_of(checkpoints["jamba"]))


@pytest.mark.parametrize("field", ["attn_layer_period", "expert_layer_period", "mamba_dt_rank", "mamba_expand"])
def test_turns_and_sizes_of_jamba_are_positive(field: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    changes = {field: 0, "attn_layer_offset": -1, "expert_layer_offset": -1}
    with pytest.raises(CheckpointError, match=f"{field} is 0: it should be an integer from 1"):
        load(changed(checkpoints["jamba"], tmp_path / "zero", **changes))


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 300}


def test_texts_are_no_longer_than_the_short_factors_of_longrope(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    factors = {"short_factor": [1.5] * 5, "long_factor": [3.0] * 5}
    folder = changed(checkpoints["falcon-h1"], tmp_path / "long", rope_parameters=LONGROPE | factors)
    assert load(folder).context_length == 300
    with pytest.raises(ConfigError, match=r"context_length 301 is more than the 300"):
        LLM(model=str(folder), dtype="float32", device="cpu", context_length=301)


@pytest.mark.parametrize("factors", [[1.0] * 4, [1.0, 0.0, 1.0, 1.0, 1.0], ["a"] * 5])
def test_factors_of_longrope_that_do_not_fit(factors: object, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    rope = LONGROPE | {"short_factor": factors, "long_factor": [1.0] * 5}
    with pytest.raises(CheckpointError, match=r"rope_parameters|short_factor"):
        load(changed(checkpoints["falcon-h1"], tmp_path / "wrong", rope_parameters=rope))


def test_shared_experts_of_the_width_of_each(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Two of half the stored width are one of all of it."""
    changes = {"n_shared_experts": 2, "moe_shared_expert_intermediate_size": 13}
    folder = changed(checkpoints["nemotron-h"], tmp_path / "each", **changes)
    assert_close(logits_of(folder), logits_of(checkpoints["nemotron-h"]))
    with pytest.raises(CheckpointError, match=r"shared_experts.up_proj.weight has the shape"):
        load(changed(folder, tmp_path / "three", n_shared_experts=3))


def test_time_steps_without_a_limit(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(checkpoints["falcon-h1"], tmp_path / "unlimited", time_step_limit=None)
    assert_close(logits_of(folder), logits_of(checkpoints["falcon-h1"]))


@pytest.mark.parametrize("gate_type", ["silu", "swish"])
def test_config_fields_without_effect(gate_type: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    said = {"attn_output_gate": True, "output_gate_type": gate_type, "norm_topk_prob": True}
    assert load(changed(checkpoints["qwen3.5-moe"], tmp_path / "said", **said)).draft_head is None


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("granite-hybrid", "router.layer.weight"),
        ("jamba", "feed_forward.router.weight"),
        ("nemotron-h", "mixer.gate.weight"),
        ("qwen3-next", "mlp.gate.weight"),
    ],
)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_routers_are_as_exact_as_they_are_stored(
    family: str, name: str, stored: torch.dtype, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(checkpoints[family], tmp_path / "bfloat16", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    tensors = {key: x.to(stored if key.endswith(name) else torch.bfloat16) for key, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    gates = [x for key, x in sorted(tensors.items()) if key.endswith(name) and not key.startswith("mtp.")]
    model = load_model(folder, LoadOptions(torch.bfloat16, torch.device("cpu")))
    layers = expert_layers(model.target)
    assert len(layers) == len(gates) > 0
    x = torch.randn(50, gates[0].shape[1], generator=torch.Generator().manual_seed(1))
    for layer, gate in zip(layers.values(), gates, strict=True):
        scores: Any = layer._router
        torch.testing.assert_close(scores._scores(x), x @ gate.float().t(), rtol=1e-5, atol=1e-5)


def test_a_stored_head_of_a_tied_model(tmp_path: Path) -> None:
    FAMILIES["granite-hybrid"].build(tmp_path / "tied", "no-experts")
    folder = changed(tmp_path / "tied", tmp_path / "stored")
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stored, tied = load(folder), load(tmp_path / "tied")
    assert (stored.num_parameters, stored.weight_bytes) == (tied.num_parameters, tied.weight_bytes)
    assert_close(logits_of(folder), logits_of(tmp_path / "tied"))


@pytest.mark.parametrize("family", ["mamba2", "falcon-h1", "granite-hybrid", "jamba"])
def test_parameters_and_bytes_are_counted(family: str, tmp_path: Path) -> None:
    reference = FAMILIES[family].build(tmp_path)
    model = load(tmp_path)
    assert model.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert model.weight_bytes == 4 * model.num_parameters
    assert model.num_layers == reference.config.num_hidden_layers
