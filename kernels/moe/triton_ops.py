"""Mixtures of experts in Triton, without any wait for the device. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.linear.torch_ops import quantize
from specmamba.kernels.moe import tiles, torch_ops, triton_kernels
from specmamba.kernels.moe.reference import Groups


class TritonExperts:
    """The experts' matrices as they are, or PyTorch's grouped product of them where ``takes_grouped_mm`` says so."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [E, N, K] float32, bfloat16 or float16, not empty."""
        self._weight, self.nbytes = weight.contiguous(), weight.nbytes
        self._grouped = torch_ops.GroupedExperts(self._weight)

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K] of the weight's dtype, sorted by expert -> [P, N]. Raises ValueError: what does not fit."""
        _require_fit(x, groups, self._weight, self._weight.dtype)
        if tiles.takes_grouped_mm(self._weight, len(x)):
            return self._grouped(x, groups)
        return multiply(x, self._weight, None, groups)


class TritonInt8Experts:
    """The experts' matrices rounded to int8, which are read as they are and widened in registers."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [E, N, K] float32, bfloat16 or float16, not empty, not kept."""
        q, scale = quantize(weight.flatten(0, 1))
        self._weight, self._scale, self._dtype = q.view(weight.shape), scale.view(weight.shape[:2]), weight.dtype
        self.nbytes = q.nbytes + scale.nbytes

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K] of the weight's dtype, sorted by expert -> [P, N]. Raises ValueError: what does not fit."""
        _require_fit(x, groups, self._weight, self._dtype)
        return multiply(x, self._weight, self._scale, groups)


def pack(weight: Tensor, form: str = "plain") -> TritonExperts | TritonInt8Experts:
    """Keep the experts, or round them to int8."""
    return TritonInt8Experts(weight) if form == "int8" else TritonExperts(weight)


def dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Groups]:
    """One launch."""
    (num_tokens, num_chosen), width = experts.shape, x.shape[1]
    num_pairs = num_tokens * num_chosen
    x, experts = _with_whole_rows(x), experts.contiguous()
    rows = x.new_empty(num_pairs, width)
    places = experts.new_empty(num_pairs)
    ends = experts.new_empty(num_experts, dtype=torch.int32)
    triton_kernels.dispatch[(num_pairs + num_experts,)](
        *(x, experts, rows, places, ends),
        *(num_pairs, num_chosen, width, x.stride(0), width),
        **tiles.DISPATCH_BLOCKS,
        num_warps=tiles.NUM_WARPS,
        num_stages=tiles.NUM_STAGES,
    )
    return rows, Groups(places, ends)


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None, groups: Groups) -> Tensor:
    """y[p] = scale[e] (W[e] x[p]), e the expert of row p, summed in float32 and rounded once. One launch.

    Args:
        x: [P, K] float32, bfloat16 or float16, sorted by expert.
        weight: [E, N, K] of x's dtype, or int8 with a scale; contiguous.
        scale: [E, N] float32.
        groups: the last of ``ends`` is P.

    Returns:
        [P, N] in x's dtype.
    """
    (p, k), (e, n, _) = x.shape, weight.shape
    y = x.new_empty(p, n)
    if not p:
        return y
    x = _with_whole_rows(x)
    tile = tiles.product_tile(x.dtype, p, e)
    grid = -(-n // tile.outputs), tiles.num_row_blocks(p, e, tile.rows)
    triton_kernels.multiply[grid](
        *(x, weight, scale, groups.ends, y, e, n, k),
        *(x.stride(0), n * k, k, n, n),
        **tiles.product_constants(tile, k, x.dtype, e, is_interpreted=x.is_cpu),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def combine(y: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """One launch; a token's sum is in ascending order of its experts."""
    (num_tokens, num_chosen), width = weights.shape, y.shape[1]
    out = y.new_empty(num_tokens, width)
    if not out.numel():
        return out
    y, weights = _with_whole_rows(y), _with_whole_rows(weights)
    block = tiles.combine_block(num_tokens, width)
    triton_kernels.combine[(num_tokens, -(-width // block))](
        *(y, groups.places, weights, out),
        *(width, y.stride(0), weights.stride(0), width),
        NUM_CHOSEN=num_chosen,
        BLOCK_N=block,
        num_warps=tiles.NUM_WARPS,
        num_stages=tiles.NUM_STAGES,
    )
    return out


def _with_whole_rows(x: Tensor) -> Tensor:
    """x, copied if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def _require_fit(x: Tensor, groups: Groups, weight: Tensor, dtype: torch.dtype) -> None:
    """Check all that needs no read from the device; operands that do not fit would read other memory."""
    ends = groups.ends
    is_fit = x.dtype is dtype and x.device == weight.device and x.dim() == 2 and x.shape[1] == weight.shape[2]
    are_ends = ends.dtype is torch.int32 and ends.device == x.device and ends.shape == weight.shape[:1]
    if not (is_fit and are_ends and len(x) == len(groups.places) and ends.is_contiguous()):
        raise ValueError(f"experts {list(weight.shape)} {dtype} cannot multiply {x.dtype} {list(x.shape)}")
