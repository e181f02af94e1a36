"""The config of a draft head in the layout of vllm-project/speculators, as fields of the other layouts.

``speculators_model_type`` says which head it is, ``transformer_layer_config`` has the fields of its layers, as far as
they differ from those of a config class of transformers, and what is the head's own stands beside these two.
``speculators_config`` names the target and says how many tokens to draft; neither is read.

Layers of the target are numbered by their inputs: i is what goes into layer i, counted from 0.

A ``dspark`` head has to say ``sample_from_anchor``: versions of the library differ in where a block predicts its first
token if it is left out, and the tensors are the same.

Sources: vllm-project/speculators (``models/eagle3``, ``dflash``, ``dspark``: fields, their defaults, what is stored),
vLLM (``transformers_utils/configs/speculators``: what a runtime makes of them).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmamba.errors import CheckpointError, UnsupportedModelError

KIND = "speculators_model_type"
LAYERS = "transformer_layer_config"
# by kind, where the config names no model_type
USUAL_LAYERS = {"eagle3": "llama", "dflash": "qwen3", "dspark": "qwen3"}
# fields that may be left out because they are those of the class
OF_CLASS = {
    "llama": ("LlamaConfig", ()),
    "qwen3": ("Qwen3Config", ("head_dim", "num_key_value_heads")),
}
OF_ANY_CLASS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "rms_norm_eps", "max_position_embeddings"),
)
OF_HEAD = ("draft_vocab_size", "target_hidden_size")
OF_KIND = {
    "eagle3": (
        *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        "eagle_aux_hidden_state_layer_ids",
    ),
    "dflash": ("projector_type", "sample_from_anchor", "shift_label"),
    "dspark": (
        *("projector_type", "sample_from_anchor", "shift_label"),
        *("markov_rank", "markov_head_type", "confidence_head_with_markov"),
    ),
}
OF_EVERY_DSPARK = {"markov_rank": 256}  # of the config class, where it is left out
DEFAULT_BLOCK = 8  # of the config class


def is_speculator(stored: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this layout."""
    return KIND in stored


def head_fields(file: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a head of the same kind has in its own layout.

    Args:
        file: the config.json, for messages.
        stored: what is in it.

    Raises:
        CheckpointError: a field is missing or no such value.
        UnsupportedModelError: a kind of head, or of its layers, that is not supported.
    """
    kind = stored[KIND]
    if not isinstance(kind, str) or kind not in OF_KIND:
        raise UnsupportedModelError(f"{file}: {KIND} {kind!r} is not supported: only {', '.join(OF_KIND)} are")
    layers = stored.get(LAYERS)
    if not isinstance(layers, dict):
        raise CheckpointError(f"{file}: {LAYERS} should be an object, but is {layers!r}")
    own = {name: stored[name] for name in (*OF_HEAD, *OF_KIND[kind]) if stored.get(name) is not None}
    if kind == "dspark":
        own = _of_dspark(file, own)
    return _of_layers(file, kind, layers) | own | ({} if kind == "eagle3" else _of_blocks(file, stored))


def _of_dspark(file: Path, own: dict[str, Any]) -> dict[str, Any]:
    """What the head's own fields are in DSpark's layout, which has no inherited ``projector_type``."""
    if type(own.get("sample_from_anchor")) is not bool:
        raise CheckpointError(
            f"{file}: sample_from_anchor should be true or false, but is {own.get('sample_from_anchor')!r}: nothing "
            "else says where blocks predict their first token"
        )
    is_usual = own.get("projector_type") in (None, "dflash")
    return OF_EVERY_DSPARK | own | ({"projector_type": "dspark"} if is_usual else {})


def _of_layers(file: Path, kind: str, layers: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the layers, with those of the config class where they are left out."""
    model_type = layers.get("model_type") or USUAL_LAYERS[kind]
    if not isinstance(model_type, str) or model_type not in OF_CLASS:
        raise UnsupportedModelError(
            f"{file}: {LAYERS} of the model_type {model_type!r} is not supported: only {', '.join(OF_CLASS)} are"
        )
    import transformers

    name, more = OF_CLASS[model_type]
    usual = getattr(transformers, name)()
    return {field: getattr(usual, field) for field in (*OF_ANY_CLASS, *more)} | dict(layers)


def _of_blocks(file: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in ``dflash_config`` elsewhere, where layers of the target are numbered by their outputs."""
    name = "aux_hidden_state_layer_ids"
    ids = stored.get(name)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise CheckpointError(f"{file}: {name} should be a list of numbers of layers, but is {ids!r}")
    settings = {"target_layer_ids": [i - 1 for i in ids], "mask_token_id": stored.get("mask_token_id")}
    if stored.get("sliding_window_non_causal"):  # else layers with a window are causal and others are not
        settings["is_causal"] = False
    block_size = stored.get("block_size")
    return {"dflash_config": settings, "block_size": DEFAULT_BLOCK if block_size is None else block_size}
