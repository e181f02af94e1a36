"""The settings of DFlash heads in their config, and the variants that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.models.eagle import HeadWeights

FIELD = "dflash_config"
VARIANTS = {
    "markov_head": "DSpark",
    "confidence_head": "DSpark",
    "candidate_selector": "DFlash2",
    "attention_conv": "DFlash2",
    "mlp_conv": "DFlash2",
}
# settings that change what is computed, and the values with which they change nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "causal": (None, False),
    "is_causal": (None, False),
    "projector_type": (None, "dflash"),
    "attention_mode": (None, "gqa"),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "selector_rank": (None, 0),
    "markov_rank": (None, 0),
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
}
DEFAULT_BLOCK = 16  # of the published heads


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """What a head's config says besides its sizes."""

    target_layers: tuple[int, ...]  # in front of which features are read, in the order of the head's inputs
    block_size: int  # b, the root included
    mask_token_id: int

    @classmethod
    def of(cls, weights: HeadWeights, num_layers: int, vocab_size: int) -> BlockSettings:
        """Read the settings, which stand in ``dflash_config`` or beside it.

        Args:
            weights: of the head.
            num_layers, vocab_size: of the target.

        Raises:
            CheckpointError: one is missing or impossible.
            UnsupportedModelError: they ask for a variant, or for features of a layer that cannot be read.
            ConfigError: the mask is no token of the target.
        """
        given = _given(weights)
        _refuse_variants(weights, given)
        layers = _target_layers(weights, given.get("target_layer_ids"), num_layers)
        block_size = _number(weights, "block_size", given.get("block_size", DEFAULT_BLOCK))
        mask = _number(weights, "mask_token_id", given.get("mask_token_id"))
        if block_size < 2:
            raise CheckpointError(f"{weights.folder}: block_size {block_size}: a block has a root and a mask at least")
        if not 0 <= mask < vocab_size:
            raise ConfigError(
                f"--speculative-draft-model-path {weights.folder}: mask_token_id {mask} is not in the target's "
                f"vocabulary of {vocab_size} tokens"
            )
        return cls(layers, block_size, mask)


def _given(weights: HeadWeights) -> dict[str, Any]:
    config = weights.config
    nested = getattr(config, FIELD, None) or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{weights.folder}: {FIELD} should be an object, but is a {type(nested).__name__}")
    names = {"block_size", "mask_token_id", "target_layer_ids", *NEUTRAL}
    outside = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    return outside | {name: value for name, value in nested.items() if value is not None}


def _refuse_variants(weights: HeadWeights, given: dict[str, Any]) -> None:
    """Refuse heads that compute something else."""
    for name in weights.reader.names():
        for part, variant in VARIANTS.items():
            if part in name.split("."):
                raise UnsupportedModelError(
                    f"{weights.folder} has the tensor {name}: it is a {variant} head, which is not supported"
                )
    for name, neutral in NEUTRAL.items():
        if given.get(name) not in neutral:
            raise UnsupportedModelError(f"{weights.folder}: {name} {given[name]!r} is not supported in DFlash heads")


def _target_layers(weights: HeadWeights, ids: Any, num_layers: int) -> tuple[int, ...]:
    """The config has the layers *behind* which features are read, counted from 0."""
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{weights.folder}: target_layer_ids should be a list of numbers of layers, but is {ids!r}"
        )
    if missing := [i for i in ids if not 0 <= i < num_layers - 1]:
        raise UnsupportedModelError(
            f"{weights.folder}: target_layer_ids {missing}: the head can read behind layers 0 to {num_layers - 2} of "
            f"the target, which has {num_layers}"
        )
    return tuple(i + 1 for i in ids)


def _number(weights: HeadWeights, name: str, value: Any) -> int:
    if type(value) is not int:
        raise CheckpointError(f"{weights.folder}: {name} should be a whole number, but is {value!r}")
    return value
