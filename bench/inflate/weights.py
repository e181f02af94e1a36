"""The tensors of an inflated checkpoint, one by one.

Every axis of a tensor is a list of components, each of which is copied from one of the small model, or is **zero**
whatever the text (the padding of the residual, of queries, keys and delta net values), or is **noise** that nothing
may read (new heads, new neurons, the padding of attention values and of gates). A matrix between two axes has

- the small model's weight between two copied components,
- a random weight wherever that does not show: towards noise, and from zeros,
- zero in all other places: from noise, and towards zeros.

So every matrix of a layer that has a source must be read. Zero are only: in o_proj, out_proj and down_proj the columns
of noise and the rows of the residual's padding; in fc those rows; in the embedding the columns of the padding; and, if
the hidden size stays, the rows of padded head widths. New layers are random except o_proj, out_proj and down_proj,
which are zero, so that they add nothing to the residual.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.bench.inflate.shape import Scales, Shape, copies_needed
from specmamba.errors import CheckpointError

WEIGHT_STD = 0.02  # of random matrices
CONV_BOUND = 0.5  # random convolution weights lie between plus and minus this
DECAY_RATES = (0.05, 16.0)  # exp(A_log) of random heads
TIME_STEPS = (1e-3, 1e-1)  # softplus(dt_bias) of random heads
ZERO, NOISE = -1, -2  # components without a source


def padded(size: int, new_size: int, rest: int) -> Tensor:
    """Components 0 ... size - 1, then ``rest``; [new_size]."""
    return torch.cat([torch.arange(size), torch.full((new_size - size,), rest)])


def grouped(groups: int, members: int, new_groups: int, new_members: int) -> tuple[Tensor, Tensor]:
    """Place heads so that member m still belongs to group m // (members per group).

    The members of an old group fill one new group or several, each with a copy of the same key head. Groups and places
    that are left over are noise.

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
    """Concatenate axes, each given with its size in the small model."""
    parts, offset = [], 0
    for axis, size in axes:
        parts.append(torch.where(axis < 0, axis, axis + offset))
        offset += size
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Axis:
    """The source of every component of an axis of the large model."""

    source: Tensor  # [new size]: an index, ZERO or NOISE
    old_size: int

    @property
    def size(self) -> int:
        return len(self.source)


def make_axes(s: Shape, t: Shape, vocab_size: int) -> dict[str, Axis]:
    """Make all axes of matrices and vectors by name; s: sizes of the small model, t: of the large one."""
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
    """The axes of a layer without a source: all components are noise, except the residual."""
    return {
        name: axis if name == "hidden" else Axis(torch.full_like(axis.source, NOISE), axis.old_size)
        for name, axis in axes.items()
    }


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix by the axes of its rows and columns; ``scale``: a number, or [rows, 1] of the small model."""

    rows: str
    columns: str
    scale: float | Tensor


@dataclass(frozen=True, slots=True)
class Vector:
    """The weight w of a norm that multiplies by (offset + w); that factor is scaled."""

    axis: str
    scale: float = 1.0
    offset: float = 1.0


Rule = Matrix | Vector | Literal["embedding", "conv", "decay", "time step"]


def make_rules(s: Shape, scales: Scales) -> dict[str, Rule]:
    """The rules of all tensors, by their names without the layer; s: the small model's sizes."""
    read, write = scales.read, scales.write
    query_gate = torch.tensor([scales.query_key * read, read]).view(1, 2, 1)
    query_gate = query_gate.expand(s.num_attention_heads, 2, s.head_dim).reshape(-1, 1)
    return {
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": Matrix("vocabulary", "hidden", scales.head),
        "model.norm.weight": Vector("hidden", scales.last_norm),
        "mtp.norm.weight": Vector("hidden", scales.last_norm),
        "mtp.pre_fc_norm_embedding.weight": Vector("hidden"),
        "mtp.pre_fc_norm_hidden.weight": Vector("hidden"),
        "mtp.fc.weight": Matrix("hidden", "two_hidden", read * write),
        "input_layernorm.weight": Vector("hidden"),
        "post_attention_layernorm.weight": Vector("hidden"),
        "mlp.gate_proj.weight": Matrix("inner", "hidden", read),
        "mlp.up_proj.weight": Matrix("inner", "hidden", read),
        "mlp.down_proj.weight": Matrix("hidden", "inner", write),
        "self_attn.q_proj.weight": Matrix("query_gate", "hidden", query_gate),
        "self_attn.k_proj.weight": Matrix("key", "hidden", read * scales.query_key),
        "self_attn.v_proj.weight": Matrix("value", "hidden", read),
        "self_attn.o_proj.weight": Matrix("hidden", "attended", write),
        "self_attn.q_norm.weight": Vector("head"),
        "self_attn.k_norm.weight": Vector("head", scales.key_norm),
        "linear_attn.in_proj_qkv.weight": Matrix("delta_qkv", "hidden", read),
        "linear_attn.in_proj_z.weight": Matrix("delta_gate", "hidden", read),
        "linear_attn.in_proj_b.weight": Matrix("value_heads", "hidden", read),
        "linear_attn.in_proj_a.weight": Matrix("value_heads", "hidden", read),
        "linear_attn.conv1d.weight": "conv",
        "linear_attn.A_log": "decay",
        "linear_attn.dt_bias": "time step",
        "linear_attn.norm.weight": Vector("delta_head", scales.delta_norm, offset=0.0),
        "linear_attn.out_proj.weight": Matrix("hidden", "delta_out", write),
    }


class WeightMaker:
    """Makes the large model's tensors out of the small one's."""

    def __init__(
        self,
        source: Shape,
        target: Shape,
        vocab_size: int,
        scales: Scales,
        seed: int,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        """``rules``: by names without the layer; none: those of Qwen3.5's text model."""
        self._source, self._target, self._vocab_size = source, target, vocab_size
        self._scales = scales
        self._rules = rules or make_rules(source, scales)
        self._generator = torch.Generator().manual_seed(seed)

    def tensors(
        self, small: Mapping[str, Tensor], dtype: torch.dtype | None, repeat_noise: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the large model; ``dtype`` None: each as in the small one.

        With ``repeat_noise``, layers that have no source are copies of the first of their kind. A_log, and norms that
        are rescaled, are float32 in any case.

        Raises:
            CheckpointError: the small model has a tensor that Qwen3.5 does not have, or one of another shape.
        """
        axes = make_axes(self._source, self._target, self._vocab_size)
        for name, tensor in small.items():
            yield name, self.make(name, tensor.float(), axes).to(self._stored(name, dtype or tensor.dtype))
        axes, made = as_noise(axes), dict[str, Tensor]()
        for i in range(len(self._source.layer_types), len(self._target.layer_types)):
            like, layer = f"model.layers.{i % self._source.period}.", f"model.layers.{i}."
            for old_name in [name for name in small if name.startswith(like)]:
                name = layer + old_name.removeprefix(like)
                if old_name in made:
                    yield name, made[old_name].clone()  # files hold no tensor twice
                    continue
                tensor = self.make(name, None, axes).to(self._stored(name, dtype or small[old_name].dtype))
                if repeat_noise:
                    made[old_name] = tensor
                yield name, tensor

    def _stored(self, name: str, dtype: torch.dtype) -> torch.dtype:
        rule = self._rules.get(_part(name))
        is_rescaled = isinstance(rule, Vector) and rule.scale != 1.0
        return torch.float32 if is_rescaled or name.endswith(".A_log") else dtype

    def make(self, name: str, tensor: Tensor | None, axes: Mapping[str, Axis]) -> Tensor:
        """A tensor of the large model; ``tensor``: the small one's, None for a layer without a source.

        Raises:
            CheckpointError: no rule has this name, or the tensor another shape.
        """
        rule = self._rules.get(_part(name))
        match rule:
            case Matrix():
                return self._matrix(name, tensor, rule, axes)
            case Vector():
                random = 1.0 - rule.offset + WEIGHT_STD * self._normal(axes[rule.axis].size)
                scaled = None if tensor is None else (rule.offset + tensor) * rule.scale - rule.offset
                return _rows(name, random, scaled, axes[rule.axis])
            case "conv":
                shape = (axes["delta_qkv"].size, 1, self._source.linear_conv_kernel_dim)
                return _rows(name, self._uniform(-CONV_BOUND, CONV_BOUND, *shape), tensor, axes["delta_qkv"])
            case "decay":
                rates = self._uniform(*DECAY_RATES, axes["value_heads"].size)
                return _rows(name, rates.log(), tensor, axes["value_heads"])
            case "time step":
                low, high = TIME_STEPS
                steps = self._uniform(math.log(low), math.log(high), axes["value_heads"].size).exp()
                return _rows(name, steps.expm1().log(), tensor, axes["value_heads"])  # softplus, backwards
            case "embedding" if tensor is not None:  # it writes zeros to the residual's padding
                padding = axes["hidden"].size - tensor.shape[1]
                return F.pad(tensor * self._scales.write, (0, padding))
        raise CheckpointError(f"the checkpoint has a tensor {name}, which no rule widens")

    def _matrix(self, name: str, tensor: Tensor | None, rule: Matrix, axes: Mapping[str, Axis]) -> Tensor:
        rows, columns = axes[rule.rows], axes[rule.columns]
        made = WEIGHT_STD * self._normal(rows.size, columns.size)
        does_not_show = (rows.source == NOISE)[:, None] | (columns.source == ZERO)
        made.masked_fill_(~does_not_show, 0.0)
        if tensor is not None:
            _check_shape(name, tensor, (rows.old_size, columns.old_size))
            i, j = (rows.source >= 0).nonzero(), (columns.source >= 0).nonzero().T
            made[i, j] = (tensor * rule.scale)[rows.source[i], columns.source[j]]
        return made

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self._generator)


def _rows(name: str, random: Tensor, tensor: Tensor | None, axis: Axis) -> Tensor:
    """``random`` [new size, ...], with the rows of ``tensor`` [old size, ...] where the axis has a source."""
    if tensor is not None:
        _check_shape(name, tensor, (axis.old_size, *random.shape[1:]))
        has_source = axis.source >= 0
        random[has_source] = tensor[axis.source[has_source]]
    return random


def _part(name: str) -> str:
    return re.sub(r"^((model|mtp)\.)?layers\.\d+\.", "", name)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name} has the shape {list(tensor.shape)}, but config.json asks for {list(shape)}")
