"""Frequencies of a rotary position embedding, from a config's ``rope_parameters``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmamba.errors import CheckpointError, UnsupportedModelError

KINDS = ("default", "linear", "yarn", "llama3", "dynamic", "longrope")
KINDS_OF_LAYERS = (*KINDS, "proportional")  # where each kind of layers has parameters of its own


class Frequencies(NamedTuple):
    """Of a rotary position embedding, and the texts for which they are right."""

    inverse: Tensor  # [rotary_dim / 2]
    scaling: float  # of cosines and sines
    # Longer texts have other frequencies, for their first tokens too, whose keys would be stored already.
    max_length: int


def rotary_frequencies(config: Any, layer_kind: str | None = None) -> Frequencies:
    """Frequencies of texts that are not longer than ``max_length``.

    ``layer_kind``: of the layers, where ``rope_parameters`` has parameters for each kind. ``proportional`` frequencies
    are 0 for the last numbers of a head, which do not turn.

    For text the three sections of a multimodal rotary embedding have the same position: it equals the plain one.

    Raises:
        CheckpointError: a parameter is missing or has a value with which the frequencies cannot be computed.
        UnsupportedModelError: a rope type that is not known.
    """
    parameters, max_length = config.rope_parameters, config.max_position_embeddings
    if layer_kind is not None:
        parameters = parameters.get(layer_kind)
        if not isinstance(parameters, dict):
            raise CheckpointError(f"config.json: rope_parameters have none for layers of {layer_kind}")
    kind = parameters.get("rope_type", "default")
    known = KINDS if layer_kind is None else KINDS_OF_LAYERS
    if kind not in known:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported ({', '.join(known)} are)")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    try:
        is_plain = kind == "default"
        frequencies, scaling = (
            _plain_frequencies(parameters, head_dim) if is_plain else _scaled(config, kind, layer_kind)
        )
        if kind == "longrope":
            max_length = min(max_length, int(parameters["original_max_position_embeddings"]))
    # transformers computes with the values as they are; torch's errors are RuntimeErrors
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: rope_parameters {parameters} give no frequencies: {error!r}") from error
    width = 2 * len(frequencies)
    if not (2 <= width <= head_dim and math.isfinite(scaling) and bool(frequencies.isfinite().all())):
        raise CheckpointError(
            f"config.json: rope_parameters {parameters} give {width} of {head_dim} numbers of a head frequencies that "
            "cannot be used"
        )
    return Frequencies(frequencies, scaling, max_length)


def _plain_frequencies(parameters: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def _scaled(config: Any, kind: str, layer_kind: str | None) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    of_layers = {} if layer_kind is None else {"layer_type": layer_kind}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **of_layers)
    return frequencies, float(scaling)
