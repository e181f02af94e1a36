"""A Mamba2 layer between its projections: the specification of this operator.

    mixed -> causal convolution, SiLU -> x, B, C;   dt -> step size;   SSD;   + D x;   gate and RMSNorm in groups

Source: the block of Mamba2, arXiv 2405.21060, section 7. Shapes are in ``operands`` here and in state_records.
Arithmetic is float32, or float64 for float64 inputs; the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.causal_conv1d import reference as conv
from specmamba.kernels.mamba2.operands import Inputs, Weights
from specmamba.kernels.rowwise import reference as rowwise
from specmamba.kernels.ssd import reference as ssd
from specmamba.kernels.state_records.operands import Buffers, ExtendOperands, RowSet, Trees
from specmamba.kernels.state_records.reference import write_nodes


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """Compute the outputs of all nodes of draft trees; write their inputs and records, never the states.

    Node i of tree b writes entry W - 1 + node_offset + i of conv_inputs and record node_offset + i in row
    ``trees.rows[b]`` of the buffers. Its path continues the state in slot ``trees.slots[b]``.

    Returns [B, N, H P] in the gate's dtype.
    """
    w, rows, nodes = weights, trees.rows, inputs.mixed.shape[1]
    first = w.conv.shape[1] - 1 + trees.node_offset
    buffers.conv_inputs[rows, first : first + nodes] = inputs.mixed
    mixed = conv.tree_verify(buffers.conv_inputs[rows], trees.conv_index, w.conv, w.conv_bias)
    c, b, u, g = _tokens(mixed, inputs, w)
    records = buffers.k[rows], buffers.u[rows], buffers.decay[rows]
    recurred = ssd.tree_verify(c, b, u, g, buffers.states[trees.slots], records, trees.placement)
    write_nodes((buffers.k, buffers.u, buffers.decay), records, rows, trees.node_offset, nodes)
    return gate_and_norm(recurred, mixed, inputs.gate, w, None)


def extend(inputs: Inputs, weights: Weights, state: ExtendOperands) -> Tensor:
    """Compute the outputs of ``state.lengths[b]`` known tokens; advance the states and windows in their slots.

    Returns [B, L, H P] in the gate's dtype; beyond the lengths NaN, so that tests detect a read.
    """
    w, slots = weights, state.slots.index
    mixed, windows = conv.extend(inputs.mixed, state.windows[slots], w.conv, state.lengths, w.conv_bias)
    recurred, after = ssd.extend(*_tokens(mixed, inputs, w), state.states[slots], state.lengths)
    state.windows[slots], state.states[slots] = windows, after
    return gate_and_norm(recurred, mixed, inputs.gate, w, None)


def _tokens(mixed: Tensor, inputs: Inputs, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """c, b, u, g of the recurrence, from convolved inputs [B, N, C]."""
    w = weights
    inner, state_size = w.num_heads * w.head_dim, w.num_groups * w.state_dim
    b = mixed[..., inner : inner + state_size].unflatten(-1, (w.num_groups, w.state_dim))
    c = mixed[..., inner + state_size :].unflatten(-1, (w.num_groups, w.state_dim))
    return c, b, *step(inputs.dt, mixed, w)


def step(dt: Tensor, mixed: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """dt [B, L, H], mixed [B, L, C] -> u = dt x [B, L, H, P] and g = dt A [B, L, H], in the dtype of ``mixed``."""
    w = weights
    x = mixed[..., : w.num_heads * w.head_dim].unflatten(-1, (w.num_heads, w.head_dim))
    dt = torch.log1p(torch.exp(dt.to(mixed.dtype) + w.dt_bias)).clamp(*w.dt_limit)
    return dt[..., None] * x, dt * w.negative_a


def gate_and_norm(
    recurred: Tensor,
    mixed: Tensor,
    gate: Tensor,
    weights: Weights,
    slots: RowSet | None,  # noqa: ARG001 -- rows of padding are computed like others
) -> Tensor:
    """With y = recurred + D x: norm(y * silu(gate)), norm(y) * silu(gate) or, without a norm, y * silu(gate).

    recurred [B, L, H, P], mixed [B, L, C], gate [B, L, H P]. The norm is RMSNorm over each of ``norm_groups`` parts of
    the channels.

    Returns [B, L, H P] in the gate's dtype.
    """
    w, wide = weights, gate.to(recurred.dtype)
    opened = wide / (1 + torch.exp(-wide))
    x = mixed[..., : w.num_heads * w.head_dim].unflatten(-1, (w.num_heads, w.head_dim))
    y: Tensor = (recurred + w.skip[:, None] * x).flatten(2)
    if w.norm is None:
        return (y * opened).to(gate.dtype)
    parts = (w.norm_groups, y.shape[-1] // w.norm_groups)
    y = (y if w.norm_before_gate else y * opened).unflatten(-1, parts)
    y = rowwise.rms_norm(y, w.norm.unflatten(0, parts), w.norm_eps).flatten(-2)
    return (y * opened if w.norm_before_gate else y).to(gate.dtype)
