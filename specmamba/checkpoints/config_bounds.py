"""Bounds of the values in a config.json, checked before anything is built from them.

The bounds are several times the values of the largest published models. Whether sizes agree with the stored tensors and
with each other is checked where the layers are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specmamba.errors import CheckpointError

MAX_LAYERS = MAX_LABELS = 10_000
_SHOWN = 60  # characters of a wrong value in a message
_FLOAT = "__float__"  # transformers writes infinity as {"__float__": "Infinity"}: JSON has none


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``."""

    low: float
    high: float
    is_integer: bool = True
    is_open: bool = False  # without ``low`` itself
    may_be_null: bool = False
    is_list: bool = False  # the bounds hold for each number of a list

    def has(self, value: object) -> bool:
        """Whether a value is such a number; NaN is in no range."""
        if value is None:
            return self.may_be_null
        if isinstance(value, Mapping) and value.keys() == {_FLOAT}:
            return str(value[_FLOAT]) == "Infinity" and math.isinf(self.high)
        if self.is_list:
            return isinstance(value, (list, tuple)) and all(map(replace(self, is_list=False).has, value))
        if isinstance(value, bool) or not isinstance(value, int if self.is_integer else (int, float)):
            return False
        return self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        kind = "numbers" if self.is_list else "an integer" if self.is_integer else "a number"
        return f"{kind} {'above' if self.is_open else 'from'} {self.low:.12g} to {self.high:.12g}"


def _same(bounds: Range, *names: str) -> dict[str, Range]:
    return dict.fromkeys(names, bounds)


# Fields of layers that a model may not have may be 0; what needs such a layer refuses a tensor without elements.
_OPTIONAL_SIZE, _OPTIONAL_COUNT = (Range(0, 1 << bits, may_be_null=True) for bits in (24, 16))
_OPTIONAL_LAYERS = Range(0, MAX_LAYERS, may_be_null=True)
_FACTOR = Range(-1e6, 1e6, is_integer=False)
FIELDS: Mapping[str, Range] = {
    **_same(Range(1, 1 << 24), "vocab_size", "hidden_size"),
    **_same(_OPTIONAL_SIZE, "intermediate_size", "moe_intermediate_size", "moe_latent_size"),
    **_same(_OPTIONAL_SIZE, "shared_intermediate_size", "shared_expert_intermediate_size"),
    **_same(_OPTIONAL_SIZE, "moe_shared_expert_intermediate_size"),
    **_same(Range(1, 1 << 30), "max_position_embeddings"),
    **_same(Range(1, MAX_LAYERS), "num_hidden_layers", "decoder_sparse_step"),
    **_same(_OPTIONAL_LAYERS, "mtp_num_hidden_layers", "num_nextn_predict_layers"),
    **_same(Range(1, 1 << 16), "num_attention_heads", "num_key_value_heads", "num_heads", "n_groups"),
    **_same(Range(1, 1 << 16), "linear_num_key_heads", "linear_num_value_heads"),
    **_same(Range(1, 1 << 16), "linear_num_heads"),
    **_same(Range(1, 1 << 14), "linear_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"),
    "q_lora_rank": Range(1, 1 << 16, may_be_null=True),
    **_same(Range(1, 1 << 16), "mamba_n_heads", "mamba_num_heads", "mamba_n_groups"),
    **_same(Range(1, 1 << 14, may_be_null=True), "head_dim"),
    **_same(Range(1, 1 << 14), "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"),
    **_same(Range(1, 1 << 14), "state_size", "ssm_state_size", "mamba_d_state"),
    **_same(Range(2, 64), "conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache"),
    **_same(_OPTIONAL_COUNT, "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    **_same(Range(0, 1 << 16), "num_experts_per_tok"),
    **_same(Range(1, 1 << 16), "n_group", "topk_group"),
    **_same(Range(0, 1, is_integer=False, is_open=True), "rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    **_same(_FACTOR, "embedding_multiplier", "lm_head_multiplier", "residual_multiplier", "key_multiplier"),
    **_same(_FACTOR, "attention_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
    **_same(_FACTOR, "ssm_in_multiplier", "ssm_out_multiplier", "routed_scaling_factor"),
    **_same(replace(_FACTOR, is_list=True), "mlp_multipliers", "ssm_multipliers"),
    **_same(Range(0, 1e6, is_integer=False, is_open=True), "logits_scaling"),
    "block_multiple_of": Range(1, 1 << 24),
    "block_ffn_dim_multiplier": Range(0, 1e6, is_integer=False, is_open=True),
    "num_dense_layers": Range(0, MAX_LAYERS),
    "time_step_limit": Range(0, math.inf, is_integer=False, is_list=True, may_be_null=True),
    **_same(Range(1, 1 << 16), "time_step_rank", "mamba_dt_rank"),
    **_same(Range(1, 1 << 10), "expand", "mamba_expand"),
    **_same(Range(1, MAX_LAYERS), "attn_layer_period", "expert_layer_period"),
}
_LENGTH = Range(1, 1 << 30, is_integer=False, may_be_null=True)
_POSITIVE = Range(0, 1e6, is_integer=False, is_open=True, may_be_null=True)
ROPE_FIELDS: Mapping[str, Range] = {
    # null in models that do not rotate; for others there are then no frequencies
    "rope_theta": Range(1, 1e30, is_integer=False, may_be_null=True),
    "partial_rotary_factor": Range(0, 1, is_integer=False, is_open=True, may_be_null=True),
    "original_max_position_embeddings": _LENGTH,
    **_same(_POSITIVE, "factor", "beta_fast", "beta_slow", "attention_factor", "low_freq_factor", "high_freq_factor"),
    **_same(replace(_POSITIVE, is_list=True), "short_factor", "long_factor"),
    **_same(Range(-1e6, 1e6, is_integer=False, may_be_null=True), "mscale", "mscale_all_dim"),
}


def require_bounded_json(file: Path, raw: Mapping[str, Any]) -> None:
    """Refuse numbers from which the config classes of transformers would make lists of that length.

    Raises:
        CheckpointError: the message names the field.
    """
    for name, value in _fields(raw):
        if not isinstance(value, int):
            continue
        if "layers" in name and value > MAX_LAYERS:
            raise CheckpointError(f"{file}: {name} is {_shown(value)}; {MAX_LAYERS} layers are the most that is read")
        if name == "num_labels" and value > MAX_LABELS:
            raise CheckpointError(f"{file}: {name} is {_shown(value)}; {MAX_LABELS} labels are the most that is read")


def require_bounded_numbers(file: Path, raw: Mapping[str, Any]) -> None:
    """Refuse wrong numbers in the config of a supported model as it is stored, where null and texts are allowed.

    The config classes compute with these numbers, and their errors would not name the field.

    Raises:
        CheckpointError: the message names the field.
    """
    for part in (raw, raw.get("text_config")):
        numbers = part.items() if isinstance(part, dict) else ()
        _require_all(file, {name: value for name, value in numbers if isinstance(value, (int, float, list))})


def require_bounded_config(file: Path, config: object) -> None:
    """Refuse values with which a model could not be built, or would fail when it runs.

    Args:
        file: where the config was read, for the message.
        config: of the language model; fields that it does not have are not checked.

    Raises:
        CheckpointError: the message names the field.
    """
    _require_all(file, {name: getattr(config, name) for name in FIELDS if hasattr(config, name)})
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    of_kinds = {f"{kind}.": part for kind, part in rope.items() if isinstance(part, dict)}  # of layers
    for kind, part in {"": rope, **of_kinds}.items():
        for name, bounds in ROPE_FIELDS.items():
            if name in part:
                _require(file, f"rope_parameters.{kind}{name}", part[name], bounds)


def _require_all(file: Path, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if name in FIELDS:
            _require(file, name, value, FIELDS[name])


def _require(file: Path, name: str, value: object, bounds: Range) -> None:
    if not bounds.has(value):
        raise CheckpointError(f"{file}: {name} is {_shown(value)}: it should be {bounds}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _fields(value: object) -> Iterator[tuple[str, object]]:
    """Name and value of every field of a JSON value, also in nested objects."""
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, dict):
            yield from current.items()
            waiting.extend(current.values())
        elif isinstance(current, list):
            waiting.extend(current)
