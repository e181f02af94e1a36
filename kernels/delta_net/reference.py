"""A gated delta net layer between its projections, over draft trees and known tokens: the specification of this op.

    mixed -> causal convolution, SiLU -> q, k, v;   a, b -> decay, beta;   gated delta rule;   RMSNorm * silu(gate)

Source: the block of Gated DeltaNet, arXiv 2412.06464, section 3.4. It is the references of causal_conv1d, rowwise and
gated_delta_rule, one after the other. Shapes are in ``operands`` here and in state_records.
"""

from __future__ import annotations

from torch import Tensor

from specmamba.kernels.causal_conv1d import reference as conv
from specmamba.kernels.delta_net.operands import Inputs, Weights
from specmamba.kernels.gated_delta_rule import reference as delta
from specmamba.kernels.rowwise import reference as rowwise
from specmamba.kernels.state_records.operands import Buffers, ExtendOperands, Trees
from specmamba.kernels.state_records.reference import write_nodes


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """Compute the outputs of all nodes of draft trees; write their inputs and records, never the states.

    Node i of tree b writes entry W - 1 + node_offset + i of conv_inputs and record node_offset + i in row
    ``trees.rows[b]`` of the buffers. Its path continues the state in slot ``trees.slots[b]``.

    Returns [B, N, Hv, V] in the gate's dtype.
    """
    w, rows, nodes = weights, trees.rows, inputs.mixed.shape[1]
    first = w.conv.shape[1] - 1 + trees.node_offset
    buffers.conv_inputs[rows, first : first + nodes] = inputs.mixed
    q, k, v, g, beta = _tokens(conv.tree_verify(buffers.conv_inputs[rows], trees.conv_index, w.conv), inputs, w)
    records = buffers.k[rows], buffers.u[rows], buffers.decay[rows]
    out = delta.tree_verify(q, k, v, g, beta, buffers.states[trees.slots], records, trees.placement)
    write_nodes((buffers.k, buffers.u, buffers.decay), records, rows, trees.node_offset, nodes)
    return rowwise.gated_rms_norm(out, inputs.gate, w.norm, w.norm_eps, w.has_sigmoid_gate)


def extend(inputs: Inputs, weights: Weights, state: ExtendOperands) -> Tensor:
    """Compute the outputs of ``state.lengths[b]`` known tokens; advance the states and windows in their slots.

    Returns [B, L, Hv, V] in the gate's dtype; beyond the lengths NaN, so that tests detect a read.
    """
    w, slots = weights, state.slots.index
    mixed, windows = conv.extend(inputs.mixed, state.windows[slots], w.conv, state.lengths)
    out, after = delta.extend(*_tokens(mixed, inputs, w), state.states[slots], state.lengths)
    state.windows[slots], state.states[slots] = windows, after
    return rowwise.gated_rms_norm(out, inputs.gate, w.norm, w.norm_eps, w.has_sigmoid_gate)


def _tokens(mixed: Tensor, inputs: Inputs, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta of the gated delta rule, from convolved inputs [B, N, C]."""
    w = weights
    heads = w.num_key_heads, w.key_dim, w.step_scale, w.lower_bound
    q, k, g, beta = rowwise.delta_inputs(mixed, inputs.a, inputs.b, w.negative_a, w.dt_bias, *heads)
    v = mixed[..., 2 * w.num_key_heads * w.key_dim :].unflatten(-1, (w.num_value_heads, w.value_dim))
    return q, k, v, g, beta
