"""Mixtures of experts in Triton, without any wait for the device; block sizes, variants compiled ahead of time.

See README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import TYPE_NAMES, Variant, Work, launch, next_power_of_2
from specmamba.kernels.linear.torch_ops import quantize
from specmamba.kernels.linear.triton_ops import Tile
from specmamba.kernels.moe import torch_ops, triton_dispatch, triton_experts, triton_kernels
from specmamba.kernels.moe.reference import Groups, Routing
from specmamba.kernels.moe.triton_dispatch import dispatch
from specmamba.kernels.moe.triton_experts import num_row_blocks, pack_codes, require_fit

__all__ = [
    "TritonExperts",
    "TritonInt8Experts",
    "combine",
    "dispatch",
    "multiply",
    "num_row_blocks",
    "pack",
    "pack_codes",
    "product_tile",
    "softmax_routing",
    "takes_grouped_mm",
    "topk_softmax_routing",
    "variants",
]

NUM_WARPS, NUM_STAGES = 4, 3  # of summing
MANY_ROWS = 64  # of an expert, on average


def takes_grouped_mm(weight: Tensor, num_pairs: int) -> bool:
    """Whether torch._grouped_mm rather than Triton multiplies num_pairs rows by a weight [E, N, K].

    With many rows per expert arithmetic counts, which CUTLASS schedules better than blocks of pointers; with few the
    bytes of weights do, and its tiles of 64 rows and more are nearly empty. Neither is measured. Both can be captured:
    where PyTorch would ask the device where groups end, Triton does everything.
    """
    has_many = num_pairs >= MANY_ROWS * len(weight)
    return has_many and torch_ops.can_group(weight) and torch_ops.is_grouped_on_device(weight)


def product_tile(dtype: torch.dtype, num_pairs: int, num_experts: int) -> Tile:
    """For num_pairs rows of a dtype in unknown groups; the same for int8 weights, which are widened in registers.

    Chosen from what fits into registers and 64 KiB of shared memory, not measured. What can be known without asking the
    device is how many rows an expert has on average. Few: the least height there is, for weights are read once for
    every block of rows. Float32 is multiplied without tensor cores, by threads that hold their operands in registers.
    """
    has_few = num_pairs <= 16 * num_experts
    if dtype is torch.float32:
        return Tile(16 if has_few else 32, 32, 32, 4, 3)
    return Tile(16, 64, 128, 4, 3) if has_few else Tile(64, 128, 64, 4, 3)


def product_constants(
    tile: Tile, width: int, dtype: torch.dtype, num_experts: int, is_interpreted: bool = False
) -> dict[str, Any]:
    """Constants of a product for inputs of this width and dtype."""
    return {"BLOCK_E": next_power_of_2(num_experts), **tile.constants(width, dtype, is_interpreted)}


def combine_block(num_tokens: int, width: int) -> int:
    """Columns of a program: few where there are few tokens, so that many programs share the reading."""
    return min(next_power_of_2(width), 256 if num_tokens <= 64 else 1024)


class TritonExperts:
    """The experts' matrices as they are, or PyTorch's grouped product of them where ``takes_grouped_mm`` says so."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [E, N, K] float32, bfloat16 or float16, not empty."""
        self._weight, self.nbytes = weight.contiguous(), weight.nbytes
        self._grouped = torch_ops.GroupedExperts(self._weight)

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K] of the weight's dtype, sorted by expert -> [P, N]. Raises ValueError: what does not fit."""
        require_fit(x, groups, self._weight.shape, self._weight.dtype, self._weight.device)
        if takes_grouped_mm(self._weight, len(x)):
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
        require_fit(x, groups, self._weight.shape, self._dtype, self._weight.device)
        return multiply(x, self._weight, self._scale, groups)


def pack(weight: Tensor, form: str = "plain") -> TritonExperts | TritonInt8Experts:
    """Keep the experts, or round them to int8."""
    return TritonInt8Experts(weight) if form == "int8" else TritonExperts(weight)


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None, groups: Groups) -> Tensor:
    """y[p] = scale[e] (W[e] x[p]), e the expert of row p, summed in float32 and rounded once. One launch.

    Args:
        x: [P, K] float32, bfloat16 or float16, sorted by expert.
        weight: [E, N, K] of x's dtype, or int8 with a scale; contiguous.
        scale: [E, N] float32.
        groups: the last of ``ends`` is P, or less in ``PartOfGroups``, whose other rows are not written.

    Returns:
        [P, N] in x's dtype.
    """
    (p, k), (e, n, _) = x.shape, weight.shape
    y = x.new_empty(p, n)
    if not p:
        return y
    x = _with_whole_rows(x)
    tile = product_tile(x.dtype, p, e)
    grid = -(-n // tile.outputs), num_row_blocks(p, e, tile.rows)
    triton_kernels.multiply[grid](
        *(x, weight, scale, groups.ends, y, e, n, k),
        *(x.stride(0), n * k, k, n, n),
        **product_constants(tile, k, x.dtype, e, is_interpreted=x.is_cpu),
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
    block = combine_block(num_tokens, width)
    triton_kernels.combine[(num_tokens, -(-width // block))](
        *(y, groups.places, weights, out),
        *(width, y.stride(0), weights.stride(0), width),
        NUM_CHOSEN=num_chosen,
        BLOCK_N=block,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out


def softmax_routing(logits: Tensor, k: int, renormalise: bool) -> Routing:
    """One launch; of equal scores the lower experts."""
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        logits, tile = _with_whole_rows(logits), route_tile(num_experts)
        arguments = logits, experts, weights, num_experts, logits.stride(0)
        launch(triton_kernels.route, (num_tokens,), tile, route_constants(num_experts, k, renormalise), *arguments)
    return Routing(experts, weights)


def topk_softmax_routing(logits: Tensor, k: int) -> Routing:
    """The same launch: the softmax over the chosen is that over all, made to sum to 1."""
    return softmax_routing(logits, k, renormalise=True)


@dataclass(frozen=True)
class RouteTile:
    """One program has all experts of a token."""

    num_warps: int
    num_stages: int = 1  # no loop loads anything ahead


def route_tile(num_experts: int) -> RouteTile:
    """One warp, which needs no shared memory to find a maximum, of up to 16 experts a thread. Not measured."""
    return RouteTile(1 if num_experts <= 512 else 4)


def route_constants(num_experts: int, k: int, renormalise: bool) -> dict[str, Any]:
    """Constants of the launch that chooses experts."""
    blocks = {"BLOCK_E": next_power_of_2(num_experts), "BLOCK_K": next_power_of_2(k)}
    return {"NUM_CHOSEN": k, "RENORMALISE": renormalise, **blocks}


def _with_whole_rows(x: Tensor) -> Tensor:
    """x, copied if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def variants() -> list[Variant]:
    """Products of a decode step and of a long extend, in each form that has a tile of its own; sorting and summing."""
    return [
        _product(torch.bfloat16, torch.bfloat16, 64),
        _product(torch.bfloat16, torch.bfloat16, 16384),
        _product(torch.bfloat16, torch.int8, 64),
        _product(torch.bfloat16, torch.int8, 16384),
        _product(torch.float32, torch.float32, 64),
        _product(torch.float32, torch.float32, 16384),
        *triton_experts.variants(),
        *triton_dispatch.variants(),
        _combine(),
        _route(128, 8, False),
        _route(512, 10, True),
    ]


def _product(dtype: torch.dtype, stored: torch.dtype, num_pairs: int, num_experts: int = 128) -> Variant:
    tile, name = product_tile(dtype, num_pairs, num_experts), TYPE_NAMES[dtype]
    is_int8 = stored is torch.int8
    pointers = {"x": name, "weight": TYPE_NAMES[stored], "scale": "fp32", "ends": "i32", "y": name}
    constants = product_constants(tile, 2048, dtype, num_experts) | ({} if is_int8 else {"scale": None})
    form = f"multiply {name}{' int8' if is_int8 else ''} P={num_pairs}"
    return _variant(form, triton_kernels.multiply, pointers, constants, tile.num_warps, tile.num_stages)


def _combine() -> Variant:
    pointers = {"y": "bf16", "places": "i64", "weights": "fp32", "out": "bf16"}
    constants = {"NUM_CHOSEN": 8, "BLOCK_N": combine_block(16384, 2048)}
    return _variant("combine bf16 k=8", triton_kernels.combine, pointers, constants)


def _route(num_experts: int, k: int, renormalise: bool) -> Variant:
    types = {"scores": "*fp32", "experts": "*i64", "weights": "*fp32"}
    constants, tile = route_constants(num_experts, k, renormalise), route_tile(num_experts)
    made = Variant.of(f"route E={num_experts} k={k}", triton_kernels.route, types, constants, tile)
    return replace(made, work=Work(programs=1, sizes={}))


def _variant(
    name: str,
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
) -> Variant:
    """All arguments that are neither pointers nor constants are 32-bit integers."""
    signature = {
        argument: "constexpr" if argument in constants else f"*{pointers[argument]}" if argument in pointers else "i32"
        for argument in kernel.arg_names
    }
    # the weights of a token's experts are few
    return Variant(name, kernel, signature, constants, num_warps, num_stages, frozenset({"weights_stride"}))
