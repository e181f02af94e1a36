"""The part of KV and of recurrent states that one of several ranks keeps: whole heads and groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specmamba.cache.shapes import KVShape, StateShape
from specmamba.parallel.share import Segment, Share


@dataclass(frozen=True, slots=True)
class StateSegments:
    """The segments of the tensors of a recurrent layer, by the parts of its state."""

    keys: Segment  # queries or keys of a gated delta net; B or C of Mamba2
    values: Segment  # values and output gates of a gated delta net; x and gates of Mamba2
    heads: Segment  # one number for every value head: steps, decays
    decays: Segment  # by key channel: K numbers for every value head

    @classmethod
    def of(cls, shape: StateShape, keys: str, values: str) -> StateSegments:
        """``keys`` and ``values``: what their units are called in messages."""
        has_groups = shape.num_key_heads < shape.num_value_heads  # else no more ranks than key heads can be
        return cls(
            Segment(keys, shape.num_key_heads, shape.key_dim, "repeated" if has_groups else "whole"),
            Segment(values, shape.num_value_heads, shape.value_dim),
            Segment(values, shape.num_value_heads),
            Segment(values, shape.num_value_heads, shape.key_dim),
        )

    @property
    def convolved(self) -> tuple[Segment, Segment, Segment]:
        """The convolved channels of a gated delta net: queries, keys, values."""
        return self.keys, self.keys, self.values

    def own(self, shape: StateShape, share: Share) -> StateShape:
        """The state that a rank keeps of a layer with this one.

        Raises:
            ConfigError: its heads cannot be divided among the ranks.
        """
        keys, values = share.count(self.keys), share.count(self.values)
        return replace(shape, num_key_heads=keys, num_value_heads=values)


def channel_segment(shape: StateShape) -> Segment:
    """The channels of a layer whose state is a window."""
    return Segment("channels in its short convolutions", shape.plain_channels)


def selective_segment(shape: StateShape) -> Segment:
    """The channels of a Mamba1 layer, each with a state of its own: all ranks have B and C of their one head."""
    return Segment("Mamba1 channels", shape.value_dim)


def own_state(shape: StateShape, share: Share) -> StateShape:
    """As ``StateSegments.own``, of any layer."""
    if share.size == 1:
        return shape
    if shape.is_selective:
        return replace(shape, value_dim=share.count(selective_segment(shape)))
    if shape.plain_channels:
        return replace(shape, plain_channels=share.count(channel_segment(shape)))
    return StateSegments.of(shape, "key heads (or groups) in recurrent layers", "heads there").own(shape, share)


def own_kv(shape: KVShape, share: Share) -> KVShape:
    """The keys and values that a rank keeps of layers with these; likewise."""
    heads = Segment("key heads", shape.num_heads, shape.head_dim, "repeated")
    return replace(shape, num_heads=share.count(heads)) if share.size > 1 else shape
