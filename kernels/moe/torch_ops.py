"""Products with experts and the choice of experts in PyTorch, for every device. See README.md."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import rowwise
from specmamba.kernels.linear.torch_ops import quantize
from specmamba.kernels.moe.reference import Groups, Routing

TINY = 1e-20  # added to a sum of weights, which may be 0, before a division
ALIGNMENT = 16  # bytes, of the rows of everything that the GPU's grouped product reads


class PlainRouter:
    """The weight of a router, for every device."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [E, H]."""
        self._weight = weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, E] float32."""
        return F.linear(x.float(), self._weight)


class HalfRouter:
    """A router of bfloat16 on a GPU: products of 16 bits, which are exact in float32, summed there."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [E, H] bfloat16."""
        self._weight = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] bfloat16 -> [T, E] float32."""
        return torch.mm(x, self._weight, out_dtype=torch.float32)


class GroupedExperts:
    """The experts' matrices as they are, where PyTorch has one product for all of them."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [E, N, K] that ``can_group``."""
        self._weight, self.nbytes = weight.transpose(1, 2), weight.nbytes

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K], sorted by expert -> [P, N]."""
        y: Tensor = torch._grouped_mm(x, self._weight, offs=groups.ends)
        return y


class PlainExperts:
    """The experts' matrices as they are, one product for each that has a token; for every device and dtype."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [E, N, K]."""
        self._weight, self.nbytes = weight, weight.nbytes

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K], sorted by expert -> [P, N]."""
        y = x.new_empty(x.shape[0], self._weight.shape[1])
        for expert, rows in active(groups):
            torch.mm(x[rows], self._weight[expert].t(), out=y[rows])
        return y


class Int8Experts:
    """The experts' matrices rounded to int8; the active ones are widened at every use."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [E, N, K], not empty, not kept."""
        q, scale = quantize(weight.flatten(0, 1))
        self._weight, self._scale = q.view(weight.shape), scale.view(weight.shape[:2])
        self.nbytes = q.nbytes + scale.nbytes

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K], sorted by expert -> [P, N]."""
        y = x.new_empty(x.shape[0], self._weight.shape[1])
        for expert, rows in active(groups):
            weight = self._weight[expert] * self._scale[expert, :, None]
            torch.mm(x[rows], weight.to(x.dtype).t(), out=y[rows])
        return y


def active(groups: Groups) -> list[tuple[int, slice]]:
    """The experts that have tokens, and which of the sorted pairs are theirs. Waits for the device."""
    ends = groups.ends.tolist()
    starts = [0, *ends[:-1]]
    return [(e, slice(first, end)) for e, (first, end) in enumerate(zip(starts, ends, strict=True)) if end > first]


def can_group(weight: Tensor) -> bool:
    """Whether PyTorch multiplies by all of these experts [E, N, K] at once."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return False
    rows = (size * weight.element_size() for size in weight.shape[1:])
    return all(row % ALIGNMENT == 0 for row in rows) and torch.cuda.get_device_capability(weight.device) >= (8, 0)


def is_grouped_on_device(weight: Tensor) -> bool:
    """Whether PyTorch multiplies by experts that ``can_group`` without asking the device where groups end.

    It has such a product for compute capabilities 9 and 10; on others, and on AMD's GPUs, it may loop over experts.
    """
    major, _ = torch.cuda.get_device_capability(weight.device)
    return torch.version.hip is None and major in (9, 10)


def dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Groups]:
    """A stable sort of all pairs."""
    ordered, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    bounds = torch.arange(num_experts, device=order.device)
    ends = torch.searchsorted(ordered, bounds, right=True, out_int32=True)
    return x.index_select(0, order // experts.shape[1]), Groups(places, ends)


def combine(y: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """One gather by token, then a weighted sum."""
    by_token = y.index_select(0, groups.places).view(*weights.shape, y.shape[1])
    return (by_token.float() * weights[..., None]).sum(1).to(y.dtype)


def softmax_routing(logits: Tensor, k: int, renormalise: bool) -> Routing:
    """Softmax over all experts, then topk."""
    weights, experts = logits.softmax(-1).topk(k, -1)
    return Routing(experts, weights / weights.sum(-1, keepdim=True) if renormalise else weights)


def topk_softmax_routing(logits: Tensor, k: int) -> Routing:
    """Topk, then softmax over the chosen."""
    weights, experts = logits.topk(k, -1)
    return Routing(experts, weights.softmax(-1))


def normalised(weights: Tensor) -> Tensor:
    """Each row over its sum, which may be 0."""
    return weights / (weights.sum(-1, keepdim=True) + TINY)


def sigmoid_routing(
    logits: Tensor,
    bias: Tensor,
    k: int,
    num_groups: int,
    topk_groups: int,
    renormalise: bool,
    scale: float,
    normalise: Callable[[Tensor], Tensor] = normalised,
) -> Routing:
    """Sigmoid; the bias only ranks."""
    scores = rowwise.sigmoid(logits)
    rank = scores + bias
    if topk_groups < num_groups:
        rank = _of_best_groups(rank, num_groups, topk_groups)
    experts = rank.topk(k, -1).indices
    weights = scores.gather(-1, experts)
    if renormalise:
        weights = normalise(weights)
    return Routing(experts, weights * scale)


def _of_best_groups(rank: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """[T, E], -inf for the experts of other groups."""
    grouped = rank.unflatten(-1, (num_groups, -1))
    two = grouped.topk(min(2, grouped.shape[-1]), -1).values
    of_groups = two[..., 0] + two[..., 1] if two.shape[-1] == 2 else two[..., 0]
    best = of_groups.topk(topk_groups, -1).indices
    is_best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, best, True)
    allowed: Tensor = grouped.masked_fill(~is_best[..., None], float("-inf")).flatten(-2)
    return allowed
