"""The tensors of an inflated checkpoint, one by one.

A matrix between two axes (axes.py says what is on them) has

- the small model's weight between two copied components,
- a random weight wherever that does not show: towards noise, and from zeros,
- zero in all other places: from noise, and towards zeros.

So no layer that has a source has a weight whose reading could be skipped: zero are the columns below noise and the
rows towards the residual's padding of o_proj, out_proj and down_proj, those rows of fc, the padding's columns of the
embedding, and, only where the hidden size stays, the rows of padded head widths. New layers are random but for o_proj,
out_proj and down_proj, which are zero throughout: they add nothing to the residual.
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

from specmamba.bench.inflate.axes import NOISE, ZERO, Axis, as_noise, make_axes
from specmamba.bench.inflate.shape import Scales, Shape
from specmamba.errors import CheckpointError

WEIGHT_STD = 0.02  # of random matrices
CONV_BOUND = 0.5  # random convolution weights lie between plus and minus this
DECAY_RATES = (0.05, 16.0)  # exp(A_log) of random heads
TIME_STEPS = (1e-3, 1e-1)  # softplus(dt_bias) of random heads


@dataclass(frozen=True, slots=True)
class Matrix:
    """[rows, columns]; ``scale``: a number, or one per row of the small model [rows, 1]."""

    rows: str
    columns: str
    scale: float | Tensor


@dataclass(frozen=True, slots=True)
class Vector:
    """A norm's weight w, where (offset + w) is what multiplies and what is scaled."""

    axis: str
    scale: float = 1.0
    offset: float = 1.0


Rule = Matrix | Vector | Literal["embedding", "conv", "decay", "time step"]


def make_rules(s: Shape, scales: Scales) -> dict[str, Rule]:
    """What the tensors are, by their names without the layer; s: the small model's sizes."""
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

    def __init__(self, source: Shape, target: Shape, vocab_size: int, scales: Scales, seed: int) -> None:
        self._source, self._target, self._vocab_size = source, target, vocab_size
        self._scales = scales
        self._rules = make_rules(source, scales)
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
            yield name, self._make(name, tensor.float(), axes).to(self._stored(name, dtype or tensor.dtype))
        axes, made = as_noise(axes), dict[str, Tensor]()
        for i in range(len(self._source.layer_types), len(self._target.layer_types)):
            like, layer = f"model.layers.{i % self._source.period}.", f"model.layers.{i}."
            for old_name in [name for name in small if name.startswith(like)]:
                name = layer + old_name.removeprefix(like)
                if old_name in made:
                    yield name, made[old_name].clone()  # files hold no tensor twice
                    continue
                tensor = self._make(name, None, axes).to(self._stored(name, dtype or small[old_name].dtype))
                if repeat_noise:
                    made[old_name] = tensor
                yield name, tensor

    def _stored(self, name: str, dtype: torch.dtype) -> torch.dtype:
        rule = self._rules.get(_part(name))
        is_rescaled = isinstance(rule, Vector) and rule.scale != 1.0
        return torch.float32 if is_rescaled or name.endswith(".A_log") else dtype

    def _make(self, name: str, tensor: Tensor | None, axes: Mapping[str, Axis]) -> Tensor:
        """A tensor of the large model; ``tensor``: the small one's, None for a layer without a source."""
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
            case "embedding" if tensor is not None:  # all it writes to the residual's padding is zero
                padding = axes["hidden"].size - tensor.shape[1]
                return F.pad(tensor * self._scales.write, (0, padding))
        raise CheckpointError(f"the checkpoint has a tensor {name}, which Qwen3.5's text model does not have")

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
    return re.sub(r"^(model|mtp)\.layers\.\d+\.", "", name)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name} has the shape {list(tensor.shape)}, but config.json asks for {list(shape)}")
