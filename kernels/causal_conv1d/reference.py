"""Causal depthwise convolution with SiLU, one token at a time: the specification of this op.

    y[t, c] = silu( bias[c] + sum_w weight[c, w] * x[t - (W - 1) + w, c] )        x before the first token: the window

Source: the short convolution of the Mamba block, arXiv 2312.00752, section 3.4. See README.md for the tree form.

Shapes: B batch, L padded tokens, N tree nodes, C channels, W width (weight[:, W - 1] meets the newest input).
Sums are formed in float32 (float64 for float64 inputs) and returned so: what follows wants them unrounded.
Shapes are not checked here: a mismatch surfaces as torch's own IndexError or RuntimeError.
"""

import torch
from torch import Tensor


def extend(
    x: Tensor, window: Tensor, weight: Tensor, lengths: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve ``lengths[b]`` known tokens of every row.

    x [B, L, C], window [B, W-1, C] the last inputs before x, oldest first, weight [C, W], lengths [B] int64
    (may be smaller than W - 1, also 0), bias [C] (None: zeros).

    Returns y [B, L, C] and new_window [B, W-1, C], the last W - 1 inputs up to lengths[b]. Outputs at and beyond
    lengths[b] are unspecified; here they are NaN, so that tests detect a read of them. No input is written.
    """
    width = weight.shape[1]
    y = torch.full_like(x, float("nan"), dtype=torch.promote_types(x.dtype, torch.float32))
    new_window = torch.empty_like(window)
    for b in range(x.shape[0]):
        length = int(lengths[b])
        history = torch.cat([window[b], x[b, :length]])
        for t in range(length):
            y[b, t] = _convolve(history[t : t + width], weight, bias)
        new_window[b] = history[length:]
    return y, new_window


def tree_verify(inputs: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve every tree node over its own last W inputs.

    inputs [B, E, C]: the stored window, the pending inputs and the node inputs of each row;
    index [B, N, W] int64: for each node the rows of ``inputs`` to convolve over, oldest first; weight [C, W], bias [C]
    (None: zeros).

    Returns y [B, N, C].
    """
    batch, nodes, _ = index.shape
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    y = inputs.new_empty(batch, nodes, inputs.shape[2], dtype=dtype)
    for b in range(batch):
        for i in range(nodes):
            y[b, i] = _convolve(inputs[b, index[b, i]], weight, bias)
    return y


def tree_verify_snapshots(
    x: Tensor, window: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve every tree node over its own last W inputs, and give the window after each node.

    x [B, N, C] the nodes' inputs, window [B, W-1, C] the last inputs before the tree, oldest first; index [B, N, W]
    int64: for each node the rows of (window, x) to convolve over, oldest first, itself last; weight [C, W],
    bias [C] (None: zeros).

    Returns y [B, N, C] and windows [B, N, W-1, C], what ``window`` is for the children of each node.
    """
    inputs = torch.cat([window, x], 1)
    batch, nodes, width = index.shape
    windows = inputs.new_empty(batch, nodes, width - 1, x.shape[2])
    for b in range(batch):
        for i in range(nodes):
            windows[b, i] = inputs[b, index[b, i, 1:]]
    return tree_verify(inputs, index, weight, bias), windows


def _convolve(taps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """taps [W, C] oldest first, weight [C, W], bias [C] -> silu of the weighted sum [C], in at least float32."""
    dtype = torch.promote_types(taps.dtype, torch.float32)
    total = torch.zeros(taps.shape[1], dtype=dtype, device=taps.device)
    if bias is not None:
        total = total + bias.to(dtype)
    for w in range(weight.shape[1]):
        total = total + taps[w].to(dtype) * weight[:, w].to(dtype)
    return total * torch.sigmoid(total)
