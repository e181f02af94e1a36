"""A gated short convolution, one token at a time: the specification of this op.

    y[t, c] = after[t, c] * ( bias[c] + sum_w weight[c, w] * m[t - (W - 1) + w, c] )        m = before * x

m before the first token: the window. Source: the double-gated short convolution of LFM2, arXiv 2511.23404, section 2.

Shapes: B batch, L padded tokens, N tree nodes, C channels, W width; projected [B, L, 3 C] is before, after and x, side
by side. m is rounded to the dtype of ``projected``, in which windows and records keep it; sums are formed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.short_conv.operands import Weights
from specmamba.kernels.state_records.operands import Buffers, ExtendOperands, Trees


def tree_verify(projected: Tensor, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """Compute the outputs of all nodes of draft trees; write their inputs m, never the windows.

    Node i of tree b writes entry W - 1 + node_offset + i of ``buffers.conv_inputs`` in row ``trees.rows[b]``.

    Returns [B, N, C] in the dtype of ``projected``.
    """
    before, after, x = projected.chunk(3, -1)
    out = torch.empty_like(after)
    first = weights.conv.shape[1] - 1 + trees.node_offset
    for b, row in enumerate(trees.rows.tolist()):
        inputs = buffers.conv_inputs[row]
        for i in range(projected.shape[1]):
            inputs[first + i] = before[b, i] * x[b, i]
            out[b, i] = _gated(after[b, i], inputs[trees.conv_index[b, i]], weights)
    return out


def extend(projected: Tensor, weights: Weights, state: ExtendOperands) -> Tensor:
    """Compute the outputs of ``state.lengths[b]`` known tokens; advance the windows in their slots.

    Returns [B, L, C] in the dtype of ``projected``; beyond the lengths NaN, so that tests detect a read.
    """
    before, after, x = projected.chunk(3, -1)
    out, width = torch.full_like(after, float("nan")), weights.conv.shape[1]
    for b, slot in enumerate(state.slots.index.tolist()):
        length = int(state.lengths[b])
        inputs = torch.cat([state.windows[slot], before[b, :length] * x[b, :length]])
        for t in range(length):
            out[b, t] = _gated(after[b, t], inputs[t : t + width], weights)
        state.windows[slot] = inputs[length:]
    return out


def _gated(after: Tensor, taps: Tensor, weights: Weights) -> Tensor:
    """after [C], taps [W, C] oldest first -> [C] in at least float32."""
    dtype = torch.promote_types(taps.dtype, torch.float32)
    total = torch.zeros(taps.shape[1], dtype=dtype)
    if weights.conv_bias is not None:
        total = total + weights.conv_bias.to(dtype)
    for w in range(weights.conv.shape[1]):
        total = total + taps[w].to(dtype) * weights.conv[:, w].to(dtype)
    return after.to(dtype) * total
