"""How many tokens each expert of a model sees, for debugging: a router that has collapsed shows here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from specmamba.errors import ConfigError
from specmamba.layers.moe import MoE
from specmamba.models.base import Target
from specmamba.models.hybrid import HybridTarget


@contextmanager
def record_expert_load(target: Target) -> Iterator[dict[int, Tensor]]:
    """Count what a target's routers decide within the block.

    Every token that is run counts, in each layer for as many experts as it goes to: those of prompts, those of draft
    trees that are not accepted, and padding. Nothing is counted, and nothing is spent on it, outside.

        with record_expert_load(llm.engine.model.target) as load:
            llm.generate(prompts)
        load[3]  # of the experts in block 3, [E] int64

    Raises:
        ConfigError: the model has no experts, or they are being counted already.
    """
    layers = expert_layers(target)
    if not layers:
        raise ConfigError("the load of experts cannot be recorded: this model has none")
    if any(layer.load is not None for layer in layers.values()):
        raise ConfigError("the load of this model's experts is being recorded already")
    target.is_watched = True
    try:
        yield {block: layer.start_counting() for block, layer in layers.items()}
    finally:
        target.is_watched = False
        for layer in layers.values():
            layer.stop_counting()


def expert_layers(target: Target) -> dict[int, MoE]:
    """The mixtures of experts of a target, by the number of their block."""
    assert isinstance(target, HybridTarget)
    layers = [(i, layer) for i, block in enumerate(target.blocks) for _, layer in block.layers]
    return {i: layer for i, layer in layers if isinstance(layer, MoE)}
