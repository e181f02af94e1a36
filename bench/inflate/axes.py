"""What the components of an inflated checkpoint's axes are: copied, zero or noise.

Every axis of a tensor is a list of components, each of which is copied from one of the small model, or is **zero**
whatever the text (the padding of the residual, of queries, keys and delta net values), or is **noise** that nothing
may read (new heads, new neurons, the padding of attention values and of gates).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.bench.inflate.shape import Shape, copies_needed

ZERO, NOISE = -1, -2  # components without a source


def padded(size: int, new_size: int, rest: int) -> Tensor:
    """Components 0 ... size - 1, then ``rest``; [new_size]."""
    return torch.cat([torch.arange(size), torch.full((new_size - size,), rest)])


def grouped(groups: int, members: int, new_groups: int, new_members: int) -> tuple[Tensor, Tensor]:
    """Where heads land so that member m still belongs to group m // (members per group).

    An old group fills as many new ones as its members need, each with a copy of the same key head. What is left over,
    whole groups and places in groups, is noise.

    Returns:
        Source of each new group [new_groups] and of each new member [new_members].
    """
    size, new_size = members // groups, new_members // new_groups
    copies = copies_needed(size, new_size)
    group_source = torch.full((new_groups,), NOISE)
    group_source[: groups * copies] = torch.arange(groups).repeat_interleave(copies)
    member_source = torch.full((new_groups // copies, copies * new_size), NOISE)
    member_source[:groups, :size] = torch.arange(members).view(groups, size)
    return group_source, F.pad(member_source.flatten(), (0, new_members - member_source.numel()), value=NOISE)


def within(heads: Tensor, components: Tensor, head_size: int) -> Tensor:
    """Components [d] of each head [n], as one axis [n d]; ``head_size``: components of a head of the small model."""
    heads, components = heads[:, None], components[None]
    inside = torch.where(components < 0, components, heads * head_size + components)
    return torch.where(heads < 0, heads, inside).flatten()


def joined(*axes: tuple[Tensor, int]) -> Tensor:
    """Axes one after the other, each given with its size in the small model."""
    parts, offset = [], 0
    for axis, size in axes:
        parts.append(torch.where(axis < 0, axis, axis + offset))
        offset += size
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Axis:
    """Components of the large model by their source, and how many the small one has."""

    source: Tensor  # [new size]: an index, ZERO or NOISE
    old_size: int

    @property
    def size(self) -> int:
        return len(self.source)


def make_axes(s: Shape, t: Shape, vocab_size: int) -> dict[str, Axis]:
    """Every kind of axis of every matrix and vector; s: small, t: large."""
    kv_heads, q_heads = grouped(
        s.num_key_value_heads, s.num_attention_heads, t.num_key_value_heads, t.num_attention_heads
    )
    key_heads, value_heads = grouped(
        s.linear_num_key_heads, s.linear_num_value_heads, t.linear_num_key_heads, t.linear_num_value_heads
    )
    D, K, V = s.head_dim, s.linear_key_head_dim, s.linear_value_head_dim
    zeros, noise = padded(D, t.head_dim, ZERO), padded(D, t.head_dim, NOISE)
    delta_key = within(key_heads, padded(K, t.linear_key_head_dim, ZERO), K)
    delta_value = padded(V, t.linear_value_head_dim, ZERO)
    value = within(value_heads, delta_value, V)
    key_size, value_size = s.linear_num_key_heads * K, s.linear_num_value_heads * V
    hidden = padded(s.hidden_size, t.hidden_size, ZERO)
    axes = {
        "vocabulary": (torch.arange(vocab_size), vocab_size),
        "hidden": (hidden, s.hidden_size),
        "two_hidden": (joined((hidden, s.hidden_size), (hidden, s.hidden_size)), 2 * s.hidden_size),
        "inner": (padded(s.intermediate_size, t.intermediate_size, NOISE), s.intermediate_size),
        # each head's query, then its gate
        "query_gate": (within(q_heads, joined((zeros, D), (noise, D)), 2 * D), 2 * s.num_attention_heads * D),
        "key": (within(kv_heads, zeros, D), s.num_key_value_heads * D),
        "value": (within(kv_heads, noise, D), s.num_key_value_heads * D),
        "attended": (within(q_heads, noise, D), s.num_attention_heads * D),
        "head": (zeros, D),
        "delta_qkv": (
            joined((delta_key, key_size), (delta_key, key_size), (value, value_size)),
            2 * key_size + value_size,
        ),
        "delta_gate": (within(value_heads, padded(V, t.linear_value_head_dim, NOISE), V), value_size),
        "delta_out": (value, value_size),
        "delta_head": (delta_value, V),
        "value_heads": (value_heads, s.linear_num_value_heads),
    }
    return {name: Axis(source, size) for name, (source, size) in axes.items()}


def as_noise(axes: Mapping[str, Axis]) -> dict[str, Axis]:
    """The axes of a layer that has no source: all is noise but the residual."""
    return {
        name: axis if name == "hidden" else Axis(torch.full_like(axis.source, NOISE), axis.old_size)
        for name, axis in axes.items()
    }
