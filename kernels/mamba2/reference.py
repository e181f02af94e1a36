"""A Mamba2 layer between its projections, over draft trees: the specification of this op.

    mixed -> causal convolution, SiLU -> x, B, C;   dt -> step size;   SSD;   + D x;   gate and RMSNorm in groups

Source: the block of Mamba2, arXiv 2405.21060, section 7. See README.md. Arithmetic is float32, or float64 for float64
inputs; the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.causal_conv1d import reference as conv
from specmamba.kernels.mamba2.operands import Inputs, Weights
from specmamba.kernels.rowwise import reference as rowwise
from specmamba.kernels.ssd import reference as ssd
from specmamba.kernels.state_records.operands import Buffers, Trees
from specmamba.kernels.state_records.reference import write_nodes


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """Outputs of all nodes of draft trees; writes their inputs and records, never the states.

    See ``operands`` here and of state_records for shapes. Node i of tree b leaves entry W - 1 + node_offset + i of
    conv_inputs and record node_offset + i in row ``trees.rows[b]`` of the buffers, and continues the state in slot
    ``trees.slots[b]``.

    Returns [B, N, H P] in the gate's dtype.
    """
    w, rows, nodes = weights, trees.rows, inputs.mixed.shape[1]
    first = w.conv.shape[1] - 1 + trees.node_offset
    buffers.conv_inputs[rows, first : first + nodes] = inputs.mixed
    mixed = conv.tree_verify(buffers.conv_inputs[rows], trees.conv_index, w.conv, w.conv_bias)
    inner, state_size = w.num_heads * w.head_dim, w.num_groups * w.state_dim
    x = mixed[..., :inner].unflatten(-1, (w.num_heads, w.head_dim))
    b = mixed[..., inner : inner + state_size].unflatten(-1, (w.num_groups, w.state_dim))
    c = mixed[..., inner + state_size :].unflatten(-1, (w.num_groups, w.state_dim))
    dt = torch.log1p(torch.exp(inputs.dt.to(mixed.dtype) + w.dt_bias)).clamp(*w.dt_limit)

    records = buffers.k[rows], buffers.u[rows], buffers.decay[rows]
    places = trees.num_pending, trees.node_offset, trees.ancestors
    out = ssd.tree_verify(c, b, dt[..., None] * x, dt * w.negative_a, buffers.states[trees.slots], *records, *places)
    write_nodes((buffers.k, buffers.u, buffers.decay), records, rows, trees.node_offset, nodes)
    return norm_gated((out + w.skip[:, None] * x).flatten(2), inputs.gate, w)


def norm_gated(x: Tensor, gate: Tensor, weights: Weights) -> Tensor:
    """x [B, L, H P], gate [B, L, H P] -> norm(x * silu(gate)), norm(x) * silu(gate) or, without a norm, x * silu(gate).

    The norm is RMSNorm over each of ``norm_groups`` parts of the channels. Returns the gate's dtype.
    """
    w, wide = weights, gate.to(x.dtype)
    opened = wide / (1 + torch.exp(-wide))
    if w.norm is None:
        return (x * opened).to(gate.dtype)
    parts = (w.norm_groups, x.shape[-1] // w.norm_groups)
    x = (x if w.norm_before_gate else x * opened).unflatten(-1, parts)
    x = rowwise.rms_norm(x, w.norm.unflatten(0, parts), w.norm_eps).flatten(-2)
    return (x * opened if w.norm_before_gate else x).to(gate.dtype)
