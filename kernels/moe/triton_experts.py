"""Experts' products with codes in groups in Triton, without any wait for the device. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.gpu import TYPE_NAMES, Variant, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.linear.grouped import GroupedMatrix, regroup
from specmamba.kernels.linear.quantized import QuantizedMatrix
from specmamba.kernels.linear.triton_grouped import POINTERS, CodeBlocks, CodesKind, CodesTile
from specmamba.kernels.moe.reference import Groups
from specmamba.kernels.moe.triton_kernels import multiply_codes


class TritonCodedExperts:
    """The experts' matrices in codes of 4 or 8 bits, which are read as they are. Inputs are not rounded."""

    def __init__(self, matrix: GroupedMatrix, dtype: torch.dtype) -> None:
        """matrix: [E, N, K], not empty, not kept; dtype: of inputs, float32, bfloat16 or float16."""
        self._blocks, self._dtype = CodeBlocks(matrix, dtype), dtype
        self.nbytes = self._blocks.nbytes

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K] of the dtype of inputs, sorted by expert -> [P, N]. Raises ValueError: what does not fit."""
        require_fit(x, groups, self._blocks.shape, self._dtype, self._blocks.codes.device)
        return multiply(x, self._blocks, groups)


def pack_codes(matrix: QuantizedMatrix, dtype: torch.dtype) -> TritonCodedExperts:
    """Lay out quantized matrices [E, N, K], not empty, for inputs of float32, bfloat16 or float16."""
    return TritonCodedExperts(regroup(matrix, for_gpu=True), dtype)


def multiply(x: Tensor, blocks: CodeBlocks, groups: Groups) -> Tensor:
    """y[p] = W[e] x[p], e the expert of row p: x [P, K] sorted by expert -> [P, N]. One launch."""
    (p, k), (e, n, _) = x.shape, blocks.shape
    y = x.new_empty(p, n)
    if not p:
        return y
    x = dense(x)
    kind = blocks.kind
    tile = codes_tile(x.dtype, p, e, kind)
    launch(
        multiply_codes,
        (num_blocks(n, tile.outputs), num_row_blocks(p, e, tile.rows)),
        tile,
        kind.constants(tile, k, x.dtype, is_interpreted=x.is_cpu) | {"BLOCK_E": next_power_of_2(e)},
        *(x, blocks.codes, blocks.scale, blocks.minimum, blocks.factor, blocks.table, groups.ends, y),
        *(e, n, k, blocks.offset, x.stride(0)),
        *(blocks.codes[0].numel(), blocks.scale[0].numel(), n * kind.block, n, n),
    )
    return y


def codes_tile(dtype: torch.dtype, num_pairs: int, num_experts: int, kind: CodesKind) -> CodesTile:
    """For num_pairs rows of a dtype in unknown groups; few rows of an expert make low tiles, as for other weights.

    Chosen from what fits into registers and 64 KiB of shared memory, not measured.
    """
    has_few = num_pairs <= 16 * num_experts
    if dtype is torch.float32:
        return CodesTile(16 if has_few else 32, 32, 4, 3)
    return CodesTile(16, 32, 4, 3) if has_few else CodesTile(64, kind.most_outputs(64), 4, 3)


def num_row_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most blocks of so many rows that num_pairs pairs can need: sum of ceil(pairs of e / rows) over active e."""
    num_active = min(num_pairs, num_experts)
    return (num_pairs + num_active * (rows - 1)) // rows


def require_fit(x: Tensor, groups: Groups, size: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Check all that needs no read from the device; operands that do not fit would read other memory.

    Raises:
        ValueError: x, groups and experts [E, N, K] of this dtype and device do not fit together.
    """
    ends = groups.ends
    is_fit = x.dtype is dtype and x.device == device and x.dim() == 2 and x.shape[1] == size[2]
    are_ends = ends.dtype is torch.int32 and ends.device == x.device and ends.shape == size[:1]
    if not (is_fit and are_ends and len(x) == len(groups.places) and ends.is_contiguous()):
        raise ValueError(f"experts {list(size)} {dtype} cannot multiply {x.dtype} {list(x.shape)}")


def variants() -> list[Variant]:
    """Products of a decode step and of a long extend, with the codes that published experts have."""
    int4, e2m1 = CodesKind(4, 128, False, 32, False, False), CodesKind(4, 16, False, 16, False, True)
    minima, e4m3 = CodesKind(4, 32, False, 32, True, False), CodesKind(8, 128, True, 64, False, False)
    kinds = {"int4": int4, "e2m1": e2m1, "minima": minima, "e4m3": e4m3}
    return [
        *(_variant(name, kind, torch.bfloat16, pairs) for name, kind in kinds.items() for pairs in (64, 16384)),
        *(_variant("int4", int4, torch.float32, pairs) for pairs in (64, 16384)),
    ]


def _variant(name: str, kind: CodesKind, dtype: torch.dtype, num_pairs: int, num_experts: int = 128) -> Variant:
    tile, of_dtype = codes_tile(dtype, num_pairs, num_experts, kind), TYPE_NAMES[dtype]
    constants = kind.constants(tile, 2048, dtype, is_interpreted=False) | kind.absent()
    constants |= {"BLOCK_E": next_power_of_2(num_experts)}
    types = {"x": f"*{of_dtype}", "y": f"*{of_dtype}", "ends": "*i32"} | POINTERS
    return Variant.of(
        f"multiply_codes {of_dtype} {name} g={kind.group} P={num_pairs}", multiply_codes, types, constants, tile
    )
