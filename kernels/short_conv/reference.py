"""A gated short convolution, one token at a time: the specification of this op.

    m = in_gate * mixed        y[t, c] = gate[t, c] * ( bias[c] + sum_w weight[c, w] * m[t - (W - 1) + w, c] )

m before the first token: the window. Source: the double-gated short convolution of LFM2, arXiv 2511.23404, section 2.

Shapes: B batch, L padded tokens, N tree nodes, C channels, W width. m is rounded to the dtype of the inputs, in which
windows and records keep it; sums are formed in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.short_conv.operands import Inputs, Weights
from specmamba.kernels.state_records.operands import Buffers, ExtendOperands, Trees


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """Compute the outputs of all nodes of draft trees; write their gated inputs, never the windows.

    Node i of tree b writes entry W - 1 + node_offset + i of ``buffers.conv_inputs`` in row ``trees.rows[b]``.

    Returns [B, N, C] in the gate's dtype.
    """
    gated, out = inputs.in_gate * inputs.mixed, torch.empty_like(inputs.gate)
    first = weights.conv.shape[1] - 1 + trees.node_offset
    for b, row in enumerate(trees.rows.tolist()):
        kept = buffers.conv_inputs[row]
        for i in range(gated.shape[1]):
            kept[first + i] = gated[b, i]
            out[b, i] = _gated_sum(inputs.gate[b, i], kept[trees.conv_index[b, i]], weights)
    return out


def extend(inputs: Inputs, weights: Weights, state: ExtendOperands) -> Tensor:
    """Compute the outputs of ``state.lengths[b]`` known tokens; advance the windows in their slots.

    Returns [B, L, C] in the gate's dtype; beyond the lengths NaN, so that tests detect a read.
    """
    gated, out = inputs.in_gate * inputs.mixed, torch.full_like(inputs.gate, float("nan"))
    width = weights.conv.shape[1]
    for b, slot in enumerate(state.slots.index.tolist()):
        length = int(state.lengths[b])
        seen = torch.cat([state.windows[slot], gated[b, :length]])
        for t in range(length):
            out[b, t] = _gated_sum(inputs.gate[b, t], seen[t : t + width], weights)
        state.windows[slot] = seen[length:]
    return out


def _gated_sum(gate: Tensor, taps: Tensor, weights: Weights) -> Tensor:
    """gate [C], taps [W, C] oldest first -> [C] in at least float32."""
    dtype = torch.promote_types(taps.dtype, torch.float32)
    total = torch.zeros(taps.shape[1], dtype=dtype)
    if weights.conv_bias is not None:
        total = total + weights.conv_bias.to(dtype)
    for w in range(weights.conv.shape[1]):
        total = total + taps[w].to(dtype) * weights.conv[:, w].to(dtype)
    return gate.to(dtype) * total
