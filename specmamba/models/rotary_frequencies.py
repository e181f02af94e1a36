"""Frequencies of a rotary position embedding, from a config's ``rope_parameters``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specmamba.errors import CheckpointError, UnsupportedModelError


def rotary_frequencies(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] and the scaling of cosines and sines.

    For text the three sections of a multimodal rotary embedding have the same position: it equals the plain one.

    Raises:
        CheckpointError: a parameter is missing or has a value with which the frequencies cannot be computed.
        UnsupportedModelError: a rope type whose frequencies depend on the length of the text.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise UnsupportedModelError(f"rope type {kind!r} is not supported (default, linear, yarn, llama3 are)")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    try:
        frequencies, scaling = _plain_frequencies(parameters, head_dim) if kind == "default" else _scaled(config, kind)
    # transformers computes with the values as they are
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: rope_parameters {parameters} give no frequencies: {error!r}") from error
    width = 2 * len(frequencies)
    if not (2 <= width <= head_dim and math.isfinite(scaling) and bool(frequencies.isfinite().all())):
        raise CheckpointError(
            f"config.json: rope_parameters {parameters} give {width} of {head_dim} numbers of a head frequencies that "
            "cannot be used"
        )
    return frequencies, scaling


def _plain_frequencies(parameters: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def _scaled(config: Any, kind: str) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, float(scaling)
