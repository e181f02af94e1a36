"""Products with codes in groups in Triton: layout, block sizes, launches, variants compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels.gpu import TYPE_NAMES, Variant, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.linear.grouped import GroupedMatrix, regroup
from specmamba.kernels.linear.quantized import QuantizedMatrix
from specmamba.kernels.linear.triton_kernels import multiply_codes, take_rows

FEW_ROWS = 64
POINTERS = {"codes": "*u8", "scale": "*fp16", "minimum": "*fp16", "factor": "*fp32", "table": "*i64"}  # of codes


@dataclass(frozen=True)
class CodesTile:
    """A program's share of a product, and how it is run."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


ROWS_TILE = CodesTile(rows=1, outputs=1, num_warps=1, num_stages=1)  # of ``take_rows``: one step of one row


@dataclass(frozen=True, slots=True)
class CodesKind:
    """What a kernel is compiled for, besides the types of its arguments."""

    bits: int
    group: int
    is_e4m3: bool
    block: int  # inputs that one product of blocks takes
    has_minimum: bool
    has_table: bool

    @property
    def step(self) -> int:
        """Inputs of a block of bytes."""
        return self.block * (8 // self.bits)

    def most_outputs(self, rows: int) -> int:
        """Of a program of four warps in 16 bits: with 64 rows and 64 of them minima of 4-bit codes spill registers."""
        return 32 if rows == FEW_ROWS and self.has_minimum and self.bits == 4 else 64

    def of_codes(self) -> dict[str, Any]:
        """Constants of ``take_rows``."""
        return {"BITS": self.bits, "GROUP": self.group, "IS_E4M3": self.is_e4m3, "BLOCK_K": self.block}

    def constants(self, tile: CodesTile, width: int, dtype: torch.dtype, is_interpreted: bool) -> dict[str, Any]:
        """Constants of ``dot_codes`` for inputs of this width and dtype."""
        return self.of_codes() | {
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.outputs,
            "IS_EVEN": width % self.step == 0,
            "IS_WIDE": is_interpreted and dtype is torch.bfloat16,
        }

    def absent(self) -> dict[str, None]:
        """Arguments that are not there."""
        return {name: None for name, has in (("minimum", self.has_minimum), ("table", self.has_table)) if not has}


class CodeBlocks:
    """A matrix in codes [..., N, K] as programs read it: what a step of one block of outputs needs lies together."""

    def __init__(self, matrix: GroupedMatrix, dtype: torch.dtype) -> None:
        """matrix: not empty, not kept; dtype: of inputs."""
        self.shape, self.nbytes, self.offset = matrix.codes.shape, matrix.nbytes, matrix.offset
        has = matrix.minimum is not None, matrix.table is not None
        block = block_size(dtype, matrix.group, matrix.bits)
        self.kind = CodesKind(matrix.bits, matrix.group, matrix.is_e4m3, block, *has)
        self.codes = _blocks(matrix.codes, self.kind)
        groups = num_blocks(self.codes.shape[-3] * self.kind.step, matrix.group)
        self.scale = _by_group(matrix.scale, groups)
        self.minimum = None if matrix.minimum is None else _by_group(matrix.minimum, groups)
        self.factor = matrix.factor.contiguous()
        # little-endian: byte i is the value of code i
        self.table = None if matrix.table is None else matrix.table.contiguous().view(torch.int64)


class TritonCodes:
    """Codes of 4 or 8 bits that any number of rows multiply as they are. Inputs are not rounded."""

    def __init__(self, matrix: GroupedMatrix, dtype: torch.dtype) -> None:
        """matrix: [N, K], not empty, not kept; dtype: of inputs, float32, bfloat16 or float16."""
        self._blocks, self._dtype = CodeBlocks(matrix, dtype), dtype
        self.nbytes = self._blocks.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] of the dtype of inputs -> [..., N], summed in float32 and rounded once.

        Raises:
            ValueError: another dtype, width, or on another device.
        """
        n, k = self._blocks.shape
        device = self._blocks.codes.device
        if not x.dim() or x.shape[-1] != k or x.dtype is not self._dtype or x.device != device:
            complaint = f"codes [{n}, {k}] of a {str(self._dtype).removeprefix('torch.')} weight on {device} cannot"
            raise ValueError(f"{complaint} multiply {x.dtype} {list(x.shape)} on {x.device}")
        return multiply(x.reshape(x.numel() // k, k), self._blocks).view(*x.shape[:-1], n)

    def rows(self, index: Tensor) -> Tensor:
        """Rows ``index`` [...] int64 of the matrix, rounded once: [..., K]; NaN for a row that there is not."""
        blocks, (n, k) = self._blocks, self._blocks.shape
        y = torch.empty(*index.shape, k, dtype=self._dtype, device=blocks.codes.device)
        if index.numel():
            launch(
                take_rows,
                (index.numel(), len(blocks.codes)),
                ROWS_TILE,
                blocks.kind.of_codes(),
                *(index.contiguous(), blocks.codes, blocks.scale, blocks.minimum, blocks.factor, blocks.table, y),
                *(n, k, blocks.offset, n * blocks.kind.block, n, k),
            )
        return y


def pack_codes(matrix: QuantizedMatrix, dtype: torch.dtype) -> TritonCodes:
    """Lay out a quantized matrix [N, K], not empty, on its device, for inputs of float32, bfloat16 or float16."""
    return TritonCodes(regroup(matrix, for_gpu=True), dtype)


def multiply(x: Tensor, blocks: CodeBlocks) -> Tensor:
    """x [M, K] times the transpose of a matrix [N, K]: [M, N] in x's dtype. One launch."""
    (m, k), n = x.shape, blocks.shape[0]
    y = x.new_empty(m, n)
    if not m:
        return y
    x = dense(x)
    kind = blocks.kind
    tile = codes_tile(x.dtype, m, n, kind)
    launch(
        multiply_codes,
        (num_blocks(n, tile.outputs), num_blocks(m, tile.rows)),
        tile,
        kind.constants(tile, k, x.dtype, is_interpreted=x.is_cpu),
        *(x, blocks.codes, blocks.scale, blocks.minimum, blocks.factor, blocks.table, y),
        *(m, n, k, blocks.offset, x.stride(0), n * kind.block, n, n),
    )
    return y


def block_size(dtype: torch.dtype, group: int, bits: int) -> int:
    """Inputs of one product of blocks: of one group, and few where registers must hold more.

    Operands of products in float32 are held there, and both halves of bytes are unpacked side by side.
    """
    return min(group, 32 if dtype is torch.float32 or bits == 4 else 64)


def codes_tile(dtype: torch.dtype, num_rows: int, num_outputs: int, kind: CodesKind) -> CodesTile:
    """For inputs [num_rows, K] of a dtype and a matrix [num_outputs, K] in codes of a kind.

    As for int8, few outputs make narrow tiles, so that weights flow into all processors. Many rows take wide ones,
    which read inputs less often. Chosen from registers and 64 KiB of shared memory, not measured.
    """
    rows = min(max(next_power_of_2(num_rows), 16), FEW_ROWS)
    if dtype is torch.float32:
        return CodesTile(min(rows, 32), 16 if num_outputs < 8192 else 32, 4, 3)
    if num_rows <= FEW_ROWS and num_outputs < 8192:
        return CodesTile(rows, 16, 2, 4)
    outputs = 32 if num_rows <= FEW_ROWS and num_outputs < 32768 else kind.most_outputs(rows)
    return CodesTile(rows, outputs, 4, 3)


def _blocks(codes: Tensor, kind: CodesKind) -> Tensor:
    """[..., N, K] -> [..., steps, N, block]; of 4 bits, one block of inputs in the low halves and the next in the high.

    Codes beyond K are 0, of any meaning: inputs are zeros there.
    """
    width = codes.shape[-1]
    padded = F.pad(codes, (0, -width % kind.step)).unflatten(-1, (-1, 8 // kind.bits, kind.block))
    joined: Tensor = padded[..., 0, :] | (padded[..., 1, :] << 4) if kind.bits == 4 else padded.squeeze(-2)
    return joined.transpose(-3, -2).contiguous()


def _by_group(of_groups: Tensor, num_groups: int) -> Tensor:
    """[..., N, G] -> [..., num_groups, N]; zeros for groups beyond those that there are."""
    return F.pad(of_groups, (0, num_groups - of_groups.shape[-1])).transpose(-1, -2).contiguous()


def variants() -> list[Variant]:
    """Every kind of codes at a decode step and at verifies, in bf16 and float32; more tiles of those that need most."""
    kinds = [
        ("int4", CodesKind(4, 32, False, 32, False, False)),
        ("minima", CodesKind(4, 128, False, 32, True, False)),
        ("table", CodesKind(4, 16, False, 16, False, True)),
        ("table", CodesKind(4, 32, False, 32, False, True)),
        ("bytes", CodesKind(8, 128, False, 64, False, False)),
        ("bytes and minima", CodesKind(8, 128, False, 64, True, False)),
        ("e4m3", CodesKind(8, 128, True, 64, False, False)),
    ]
    sizes = (1, 2048), (16, 12288), (64, 151936)
    largest = [(name, kind) for name, kind in kinds if kind.has_minimum]
    float32 = [(name, replace(kind, block=min(kind.group, 32))) for name, kind in kinds]
    return [
        *(_variant(name, kind, torch.bfloat16, *size) for name, kind in kinds for size in sizes),
        *(_variant(name, kind, torch.float16, 64, 2048) for name, kind in largest),
        *(_variant(name, kind, torch.float32, 64, 151936) for name, kind in float32),
        _variant(*float32[1], torch.float32, 1, 2048),
        *(_rows_variant(name, kind) for name, kind in kinds),
    ]


def _rows_variant(name: str, kind: CodesKind) -> Variant:
    types = {"index": "*i64"} | POINTERS | {"y": "*bf16"}
    return Variant.of(
        f"take_rows bf16 {name} g={kind.group}", take_rows, types, kind.of_codes() | kind.absent(), ROWS_TILE
    )


def _variant(name: str, kind: CodesKind, dtype: torch.dtype, num_rows: int, num_outputs: int) -> Variant:
    tile, of_dtype = codes_tile(dtype, num_rows, num_outputs, kind), TYPE_NAMES[dtype]
    constants = kind.constants(tile, 2048, dtype, is_interpreted=False) | kind.absent()
    title = f"multiply_codes {of_dtype} {name} g={kind.group} M={num_rows} N={num_outputs}"
    types = {"x": f"*{of_dtype}", "y": f"*{of_dtype}"} | POINTERS
    return Variant.of(title, multiply_codes, types, constants, tile)
