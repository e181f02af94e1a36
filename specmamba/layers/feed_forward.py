"""Feed-forward layers: dense ones, and mixtures of experts (arXiv 1701.06538).

In a mixture a router sends each token to a few of many experts. Pairs of a token and an expert are sorted by expert, so
that all experts are one product (MegaBlocks, arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import moe, rowwise
from specmamba.kernels.linear import Matrix, WeightForm
from specmamba.kernels.moe import PartOfGroups, Routing
from specmamba.kernels.native import library
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import Linear
from specmamba.parallel.ranks import ONE_RANK, Ranks

Activation = Callable[[Tensor], Tensor]


class Router(Protocol):
    """Chooses the experts of each token."""

    k: int  # experts of a token

    def __call__(self, x: Tensor, /) -> Routing:
        """Route tokens [T, H] to k experts each."""


@dataclass(frozen=True, slots=True)
class ClampedSiluMul:
    """min(silu(gate), limit) * clip(up, -limit, limit), in float32, rounded once: [..., 2 I] -> [..., I]."""

    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Apply the activation; gates come first."""
        return rowwise.clamped_silu_mul(gate_up, self.limit)


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one product (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation = rowwise.silu_mul) -> None:
        """gate_up: H -> 2 I, the gates first; down: I -> H; activation: [..., 2 I] -> [..., I]."""
        self._gate_up, self._down, self.activation = gate_up, down, activation

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """Apply the layer to [..., H]; the context is not used."""
        return self._down(self.activation(self._gate_up(x)))


class MLP:
    """down(activation(up(x)))."""

    def __init__(self, up: Linear, down: Linear, activation: Activation) -> None:
        """up: H -> I; down: I -> H."""
        self._up, self._down, self.activation = up, down, activation

    @property
    def activations(self) -> list[Activation]:
        """The only one."""
        return [self.activation]

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """Apply the layer to [..., H]; the context is not used."""
        return self._down(self.activation(self._up(x)))


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


_EXACT = (squared_relu, F.relu, rowwise.silu, rowwise.gelu, rowwise.gelu_tanh, rowwise.silu_mul)


def is_exact_activation(activation: Activation) -> bool:
    """Whether a number's result has the same bits wherever it stands: PyTorch's e^x at ends of its vectors has not."""
    return isinstance(activation, ClampedSiluMul) or activation in _EXACT


class SoftmaxRouter:
    """Softmax over all experts, then the k experts with the largest probabilities."""

    def __init__(self, weight: Tensor, k: int, renormalise: bool) -> None:
        """weight: [E, H]; renormalise: the weights of a token's experts sum to 1."""
        self._scores, self.k, self._renormalise = moe.pack_router(weight), k, renormalise

    def __call__(self, x: Tensor) -> Routing:
        """Route tokens [T, H] to k experts each."""
        return moe.softmax_routing(self._scores(x), self.k, self._renormalise)


class TopKSoftmaxRouter:
    """The k experts with the largest logits, then softmax over these."""

    def __init__(self, weight: Tensor, k: int) -> None:
        """weight: [E, H]."""
        self._scores, self.k = moe.pack_router(weight), k

    def __call__(self, x: Tensor) -> Routing:
        """Route tokens [T, H] to k experts each."""
        return moe.topk_softmax_routing(self._scores(x), self.k)


class SigmoidRouter:
    """The best k experts of the best groups, by sigmoid and a correction bias (arXiv 2412.19437, section 2.1.2)."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        k: int,
        num_groups: int = 1,
        topk_groups: int = 1,
        renormalise: bool = True,
        scale: float = 1.0,
    ) -> None:
        """Make a router.

        Args:
            weight: [E, H].
            bias: [E], used to choose experts and not in their weights.
            k: experts of a token.
            num_groups, topk_groups: number of equal groups of experts, and of the groups a token may choose from.
            renormalise: the weights of a token's experts sum to 1 before they are scaled.
            scale: factor of the weights.
        """
        self._scores, self._bias, self.k = moe.pack_router(weight), bias.float(), k
        self._num_groups, self._topk_groups = num_groups, topk_groups
        self._renormalise, self._scale = renormalise, scale

    def __call__(self, x: Tensor) -> Routing:
        """Route tokens [T, H] to k experts each."""
        return moe.sigmoid_routing(
            self._scores(x),
            self._bias,
            self.k,
            num_groups=self._num_groups,
            topk_groups=self._topk_groups,
            renormalise=self._renormalise,
            scale=self._scale,
        )


class Experts:
    """down_e(activation(up_e(x))) for the experts e of each token."""

    def __init__(
        self,
        up: Matrix,
        down: Matrix,
        activation: Activation,
        form: WeightForm = "plain",
        dtype: torch.dtype | None = None,
        layout: torch.device | None = None,
        ranks: Ranks = ONE_RANK,
        own: tuple[range, int] | None = None,
    ) -> None:
        """Hold the matrices of all experts, or of those that this rank has.

        Args:
            up: [E, I, H], or [E, 2 I, H] for activations that halve the width; not kept when a packed copy takes its
                place.
            down: [E, H, I], kept or not in the same way.
            activation: [..., I or 2 I] -> [..., I].
            form: how matrices that are not quantized are stored.
            dtype: of inputs, where matrices are quantized.
            layout: the device whose sizes are meant, where matrices have no values.
            ranks: each of which has some of the I, or of the experts.
            own: which of how many experts these are; None: all.
        """
        self._ranks = ranks
        self.num_experts, self.device = up.shape[0] if own is None else own[1], up.device
        self._places = None if own is None else _places(*own, self.device)  # [E] int64, of experts on this rank
        self._num_own = up.shape[0]
        if self.device.type == "cpu":
            library.preload()
        self._up, self._down = (moe.packed(weight, form, dtype, layout) for weight in (up, down))
        self.activation = activation
        self.nbytes = self._up.nbytes + self._down.nbytes  # of the tensors that are kept
        self.num_outputs = up.shape[1] + down.shape[1]  # of one expert

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """Sum the weighted outputs of each token's experts: [T, H] -> [T, H]."""
        if self._places is not None:
            return self._ranks.all_reduce(self._own_part(x, routing, self._places))
        pairs, groups = moe.dispatch(x, routing.experts, self.num_experts)
        inner = self.activation(self._up(pairs, groups))
        return self._ranks.all_reduce(moe.combine(self._down(inner, groups), groups, routing.weights))

    def _own_part(self, x: Tensor, routing: Routing, places: Tensor) -> Tensor:
        """The sum over those of each token's experts that this rank has.

        Pairs with other experts are sorted behind all of its own. Rows that nothing was computed for may hold anything.
        """
        pairs, groups = moe.dispatch(x, places[routing.experts], self._num_own + 1)
        groups = PartOfGroups(groups.places, groups.ends[: self._num_own])
        y = self._down(self.activation(self._up(pairs, groups)), groups)
        rows = torch.arange(y.shape[0], device=y.device)[:, None]
        return moe.combine(torch.where(rows < groups.ends[-1], y, 0.0), groups, routing.weights)


def _places(own: range, num_experts: int, device: torch.device) -> Tensor:
    """The place of every expert among those of a rank; the number of these for all others."""
    places = torch.full((num_experts,), len(own), dtype=torch.int64, device=device)
    places[own.start : own.stop] = torch.arange(len(own), device=device)
    return places


class MoE:
    """Routed experts, with or without a shared layer for all tokens."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: Callable[[Tensor, LayerContext], Tensor] | None = None,
        shared_gate: Linear | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        """Make the layer from its router and its experts.

        Args:
            router: chooses the experts of each token.
            experts: H -> H, or between vectors of the latent width.
            shared: a layer for all tokens, H -> H.
            shared_gate: H -> 1; its sigmoid is the factor of ``shared``.
            latent: projections to the experts' smaller width and back.
        """
        self._router, self._experts, self._shared = router, experts, shared
        self._shared_gate, self._latent = shared_gate, latent
        self.load: Tensor | None = None  # [E] int64, tokens that each expert got; None: not counted

    @property
    def activations(self) -> list[Activation]:
        """Of the experts, and of the shared layer."""
        shared = [self._shared.activation] if isinstance(self._shared, MLP | GatedMLP) else []
        return [self._experts.activation, *shared]

    @property
    def expert_bytes_per_token(self) -> int:
        """Of the experts' matrices that one token is multiplied by."""
        return self._experts.nbytes * self._router.k // self._experts.num_experts

    @property
    def expert_outputs_per_token(self) -> int:
        """Numbers that the experts' matrices make for one token."""
        return self._experts.num_outputs * self._router.k

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """Run [B, L, H] through the experts of each token and the shared layer; gives the same shape."""
        tokens = x.flatten(0, -2)
        routing = self._router(tokens)
        load = self.load  # read once: another thread may stop the counting
        if load is not None:
            chosen = routing.experts.flatten()
            load.scatter_add_(0, chosen, torch.ones_like(chosen))
        if self._latent is not None:
            tokens = self._latent[0](tokens)
        y = self._experts(tokens, routing)
        if self._latent is not None:
            y = self._latent[1](y)
        return self._with_shared(y.view_as(x), x, context)

    def _with_shared(self, y: Tensor, x: Tensor, context: LayerContext) -> Tensor:
        if self._shared is None:
            return y
        shared = self._shared(x, context)
        if self._shared_gate is None:
            return y + shared
        gate = rowwise.sigmoid(self._shared_gate(x))
        # on a CPU in two operations that each round once, as in ``Block.add``
        return y + gate * shared if x.is_cpu else torch.addcmul(y, gate, shared)

    def start_counting(self) -> Tensor:
        """Count tokens per expert from now on; gives ``load``, which is updated by every forward."""
        self.load = torch.zeros(self._experts.num_experts, dtype=torch.int64, device=self._experts.device)
        return self.load

    def stop_counting(self) -> None:
        """Stop counting."""
        self.load = None
