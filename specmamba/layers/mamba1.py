"""Mamba1: short convolution, selective scan, gate (arXiv 2312.00752, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.kernels import causal_conv1d, mamba1, rowwise, selective_scan
from specmamba.kernels.state_records import StateOperands
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import Linear, RecurrentLayer, RMSNorm


@dataclass(frozen=True, eq=False)
class Mamba1Weights(mamba1.Weights):
    """What a layer of C channels, state size M and time steps of rank R computes between its outer projections."""

    project: Linear  # C -> R + 2 M, in the order time step, B, C
    norms: Sequence[RMSNorm] | None  # of time step, B and C; None: they are not normed
    expand: Linear  # R -> C

    def steps(self, x: Tensor) -> mamba1.Steps:
        """Time steps, B and C of tokens x [B, L, C], all in its dtype."""
        projected, size = self.project(x), self.rates.shape[0]
        parts: Sequence[Tensor] = torch.split_with_sizes(projected, [projected.shape[-1] - 2 * size, size, size], -1)
        if self.norms is not None:
            parts = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        return mamba1.Steps(self.expand(parts[0]), *parts[1:])


class Mamba1(RecurrentLayer[Mamba1Weights]):
    """One recurrent layer. Its input projection gives 2 C numbers, x and gate; the output projection takes C."""

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        projected, w = self._in(x), self._weights
        mixed, gate = projected.chunk(2, -1)
        state = context.state.operands(self._state_layer)
        if mamba1.can_fuse(state, mixed, w):
            convolved, rounded = mamba1.convolve(mixed, w, state.buffers, state.trees)
            out = mamba1.scan(convolved, w.steps(rounded), gate, w, state.buffers, state.trees)
        else:
            mixed, gate = context.unpack(projected).chunk(2, -1)
            out = context.pack(mix(mixed, gate, w, state))
        return self._out(out)


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
    steps = w.steps(x.to(gate.dtype))
    dt, u = rowwise.time_steps(steps.dt, w.dt_bias, x)
    b, c = (part.float().unsqueeze(2) for part in (steps.b, steps.c))
    out = selective_scan.advance(c, b, u.unsqueeze(2), dt.unsqueeze(2), w.rates, state).squeeze(2)
    return rowwise.skip_gate(out, x, w.skip, gate)
