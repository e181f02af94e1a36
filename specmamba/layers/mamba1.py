"""Mamba1: short convolution, selective scan, gate (arXiv 2312.00752, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import causal_conv1d, selective_scan
from specmamba.kernels.state_records import StateOperands
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import Linear, RecurrentLayer, RMSNorm


@dataclass(frozen=True, slots=True)
class Mamba1Weights:
    """What a layer of C channels, state size M and time steps of rank R computes between its outer projections."""

    conv: Tensor  # [C, W] float32
    conv_bias: Tensor | None  # [C] float32
    project: Linear  # C -> R + 2 M, in the order time step, B, C
    norms: Sequence[RMSNorm] | None  # of time step, B and C; None: they are not normed
    expand: Linear  # R -> C
    dt_bias: Tensor  # [C] float32
    rates: Tensor  # [M, C] float32, A
    skip: Tensor  # [C] float32


class Mamba1(RecurrentLayer[Mamba1Weights]):
    """One recurrent layer. Its input projection gives 2 C numbers, x and gate; the output projection takes C."""

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        mixed, gate = context.unpack(self._in(x)).chunk(2, -1)
        state = context.state.operands(self._state_layer)
        return self._out(context.pack(mix(mixed, gate, self._weights, state)))


def mix(mixed: Tensor, gate: Tensor, weights: Mamba1Weights, state: StateOperands) -> Tensor:
    """The layer between its outer projections, one operator after the other.

    Args:
        mixed: [B, L, C], what is convolved.
        gate: [B, L, C].
        weights: of the layer.
        state: the states that are read, and the buffers that are written.

    Returns:
        [B, L, C] in the gate's dtype.
    """
    w = weights
    x = causal_conv1d.advance(mixed, w.conv, w.conv_bias, state)
    size = w.rates.shape[0]
    projected = w.project(x.to(gate.dtype))
    parts: Sequence[Tensor] = torch.split_with_sizes(projected, [projected.shape[-1] - 2 * size, size, size], -1)
    if w.norms is not None:
        parts = [norm(part) for norm, part in zip(w.norms, parts, strict=True)]
    dt = F.softplus(w.expand(parts[0]).float() + w.dt_bias)
    b, c = (part.float().unsqueeze(2) for part in parts[1:])
    out = selective_scan.advance(c, b, (dt * x).unsqueeze(2), dt.unsqueeze(2), w.rates, state).squeeze(2)
    return (torch.addcmul(out, w.skip, x) * F.silu(gate.float())).to(gate.dtype)
