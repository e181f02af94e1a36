"""Memory of captured steps on a GPU, estimated before there is one: what a token's activations take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from specmamba.cache.shapes import StateShape
from specmamba.config import EngineConfig
from specmamba.layers.feed_forward import MoE
from specmamba.layers.latent_attention import HeadProducts
from specmamba.layers.primitives import Linear
from specmamba.models.base import LoadedModel, Models
from specmamba.models.hybrid import HybridTarget

# Of the hidden size, beside what a layer's matrices make: the residual stream before and behind an addition, its norm,
# and what the layer gives back.
STREAMS = 4
KEPT = 5  # features that graphs of all batch sizes leave, over those of the largest one
COPIES = 2  # of what a matrix makes: itself, and convolved, rotated, normalized or activated


def graph_token_bytes(config: EngineConfig, models: Models, device: torch.device) -> int:
    """Estimate what one token takes in the memory that captured steps share, without logits.

    That is what is alive at a time in the layer with the widest products, as if all that the layer makes were. Memory
    is used again from layer to layer, and by graphs of smaller batches.

    Returns:
        0 where steps have no graphs: on a CPU, and where none are captured.
    """
    if device.type != "cuda" or not config.largest_captured_batch:
        return 0
    return max(_token_bytes(model) for model in (models.target, models.draft) if model is not None)


def _token_bytes(model: LoadedModel) -> int:
    target, shape = model.target, model.cache_shape
    parts = target.blocks if isinstance(target, HybridTarget) else (target,)
    own = vars(model.draft_head) if model.draft_head is not None else {}
    of_head = sum(_outputs(part, {id(target)}) for name, part in own.items() if name != "_logits")
    widest = max(of_head, *(_outputs(part, set()) for part in parts))
    num_features = max(1, len(getattr(model.draft_head, "target_layers", ())))
    width = COPIES * widest + (STREAMS + KEPT * num_features) * target.hidden_size
    return width * shape.dtype.itemsize + (_recurrence_bytes(shape.state) if shape.num_state_layers else 0)


def _recurrence_bytes(state: StateShape) -> int:
    """Inputs and outputs of a recurrence, float32: two of its keys' size, two of its values', decays and gates."""
    keys, values = state.num_key_heads * state.key_dim, state.num_value_heads * state.value_dim
    return 4 * (2 * keys + 2 * values + math.prod(state.decay_shape) + state.num_value_heads)


def _outputs(part: object, seen: set[int]) -> int:
    """Numbers that the matrices of a part make for one token."""
    found = products_below(part, seen)
    return sum(x.expert_outputs_per_token if isinstance(x, MoE) else x.num_outputs for x in found)


def products_below(part: object, seen: set[int]) -> Iterator[Linear | HeadProducts | MoE]:
    """Iterate over the matrices of a part of a model; an MoE stands for its experts alone.

    Objects whose id is in ``seen`` are skipped, the others are added to it.
    """
    found = walk(part, seen, lambda each: isinstance(each, Linear | HeadProducts))
    return (each for each in found if isinstance(each, Linear | HeadProducts | MoE))


def walk(part: object, seen: set[int], is_whole: Callable[[object], bool]) -> Iterator[object]:
    """Iterate over a part of a model and all that it consists of, but not over what is in parts that are whole.

    Objects whose id is in ``seen`` are skipped, the others are added to it.
    """
    parts = [part]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if not is_whole(part):
            parts += reversed([*_parts_below(part)])


def _parts_below(part: object) -> Iterator[object]:
    """What a part of a model consists of."""
    if isinstance(part, list | tuple):
        yield from part
    elif type(part).__module__.startswith("specmamba."):
        yield from getattr(part, "__dict__", {}).values()
        yield from (getattr(part, name) for name in getattr(type(part), "__slots__", ()))
