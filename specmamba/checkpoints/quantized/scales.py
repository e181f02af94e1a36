"""Scales and groups of a quantized matrix: which shapes fit, and which values are of use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import torch
from torch import Tensor

from specmamba.checkpoints.quantized.declared import ALL, DEFAULT_BLOCK, Spread
from specmamba.checkpoints.quantized.unpack import from_e8m0
from specmamba.errors import CheckpointError
from specmamba.kernels.linear import QuantizedMatrix


def scale_of(name: str, scale: Tensor, shape: tuple[int, ...], spreads: Collection[Spread] = ()) -> tuple[Tensor, int]:
    """Scales of a matrix.

    Args:
        name: of the matrix, for messages.
        scale: as stored, as numbers.
        shape: [..., N, K], of the matrix.
        spreads: which weights may share a scale. Empty: any, and blocks are those of ``DEFAULT_BLOCK``.

    Returns:
        Scales [..., N, groups], and the inputs of a group.

    Raises:
        CheckpointError: the shape of the scales does not fit, or other weights share one than may.
    """
    if scale.dim() == 4 and len(shape) == 2 and scale.shape[1] == scale.shape[3] == 1:
        scale = scale.flatten(0, 1).flatten(1, 2)  # ModelOpt's blocks of FP8
    rows, columns = _spread_of(name, scale, shape, spreads)
    allowed = {_within(spread, shape) for spread in spreads}
    require(
        not allowed or (rows, columns) in allowed,
        f"{name}: {list(scale.shape)} scales are for {_in_words((rows, columns), shape)}; "
        f"its format or config says {_any_of(spreads)}",
    )
    outputs, width = shape[-2:]
    groups = -(-width // columns)
    of_blocks = scale.reshape(*shape[:-2], -(-outputs // rows), groups) if scale.numel() > 1 else scale.reshape(1, 1)
    if groups == 1 and rows == outputs:
        return of_blocks.expand(*shape[:-1], 1), columns
    return of_blocks if rows == 1 else of_blocks.repeat_interleave(rows, -2)[..., :outputs, :], columns


def _spread_of(name: str, scale: Tensor, shape: tuple[int, ...], spreads: Collection[Spread]) -> Spread:
    """The outputs and inputs that share a scale, as far as its shape tells it."""
    *_, outputs, width = shape
    if scale.numel() in (1, prod(shape[:-2])):
        return outputs, width
    blocks = [_within(spread, shape) for spread in spreads or (DEFAULT_BLOCK,) if spread[0] > 1]
    for rows, columns in blocks:
        if tuple(scale.shape) == (*shape[:-2], -(-outputs // rows), -(-width // columns)):
            return rows, columns
    if scale.shape == shape[:-1]:
        return 1, width
    num_groups = scale.shape[-1] if scale.dim() else 0
    is_by_output = scale.shape[:-1] == shape[:-1]
    require(
        is_by_output, f"{name}: {list(scale.shape)} scales do not fit {_any_of(spreads or (DEFAULT_BLOCK,))}", shape
    )
    require(num_groups > 0 and width % num_groups == 0, f"{name}: {num_groups} groups do not divide {width} inputs")
    return 1, width // num_groups


def _within(spread: Spread, shape: tuple[int, ...]) -> Spread:
    """The outputs and inputs of a spread in a matrix, which may be smaller than a block."""
    rows, columns = (size if part == ALL else min(part, size) for part, size in zip(spread, shape[-2:], strict=True))
    return rows, columns


def _any_of(spreads: Collection[Spread]) -> str:
    return " or ".join(_in_words(spread) for spread in sorted(spreads))


def _in_words(spread: Spread, shape: tuple[int, ...] = (ALL, ALL)) -> str:
    """What shares a scale, for people; ``shape`` is that of the matrix whose sizes the spread has."""
    if spread == (1, shape[-1]):
        return "whole outputs"
    if spread == tuple(shape[-2:]):
        return "the whole matrix"
    return f"groups of {spread[1]} inputs" if spread[0] == 1 else f"blocks of {spread[0]} x {spread[1]}"


def of_matrix(name: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A scale for all of a matrix, or one for each of stacked matrices: [..., 1, 1] float32."""
    if scale.numel() == 1:
        return scale.float().reshape(())
    require(scale.numel() == prod(shape[:-2]), f"{name}: {list(scale.shape)} scales of its scales do not fit", shape)
    return scale.float().reshape(*shape[:-2], 1, 1)


def numbers(scale: Tensor) -> Tensor:
    """Stored scales as float32. Bytes are exponents of two."""
    return from_e8m0(scale) if scale.dtype is torch.uint8 else scale.float()


def check_scales(name: str, matrix: QuantizedMatrix, parts: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for scales that are no numbers, too large, or that make weights vanish.

    The smallest positive e4m3 is 2**-9, so in such scales a zero here and there is a group of tiny weights; so is one
    beside a zero point, whose scales are float16.
    """
    if matrix.codes.is_meta:
        return
    check_values(name, matrix)
    is_e4m3 = "scale" in parts and parts["scale"].dtype is torch.float8_e4m3fn
    is_lost = not is_e4m3 and matrix.minimum is None and _vanish_in_part(matrix)
    require(not is_lost, f"{name} has scales of zero for weights that are not zero")


def check_values(name: str, matrix: QuantizedMatrix) -> None:
    """Raise CheckpointError for scales that are of no use in any format: NaN, infinite, too large, zero everywhere."""
    found = [x for x in (matrix.scale, matrix.minimum) if x is not None]
    require(all(bool(x.isfinite().all()) for x in found), f"{name} has scales that are NaN or infinite")
    largest, lowest = (float(x.abs().max()) if x.numel() else 0.0 for x in (found[0], found[-1]))
    bound = largest * _largest_value(matrix) + (lowest if matrix.minimum is not None else 0.0)
    require(
        bound <= torch.finfo(torch.bfloat16).max,
        f"{name} has a scale of {largest:.2g}, with which weights are infinite",
    )
    require(not vanish_as_a_whole(matrix), f"{name} has scales of zero for weights that are not zero")


def _largest_value(matrix: QuantizedMatrix) -> float:
    """The largest that a code can mean before it is scaled."""
    if matrix.table is not None:
        return float(matrix.table.nan_to_num().abs().max())
    return float(1 << (matrix.bits - (matrix.codes.dtype is torch.int8)))


def vanish_as_a_whole(matrix: QuantizedMatrix) -> bool:
    """Whether all scales of a matrix, or of one that is stacked, are zero, though its codes are not all alike.

    What a writer stores for a matrix of zeros differs by format: a code of zero, a zero point, the lowest code.
    2**-127 counts as zero: bytes of zero are that where scales are exponents.
    """
    if not vanishes(matrix.scale):
        return False
    values = _values_of(matrix).flatten(-2)
    return bool((_are_zero(matrix.scale) & (values.amin(-1) != values.amax(-1))).any())


def vanishes(scale: Tensor) -> bool:
    """Whether all scales [..., N, groups] of a matrix, or of one that is stacked, are zero."""
    return bool(_are_zero(scale).any())


def _are_zero(scale: Tensor) -> Tensor:
    return (scale.abs() < torch.finfo(torch.float32).tiny).flatten(-2).all(-1)


def _vanish_in_part(matrix: QuantizedMatrix) -> bool:
    """Whether a scale is zero for a code that is not."""
    is_zero = matrix.scale == 0
    if not bool(is_zero.any()):
        return False
    values = _values_of(matrix)
    return bool(((values != 0) & is_zero.repeat_interleave(matrix.group, -1)[..., : values.shape[-1]]).any())


def _values_of(matrix: QuantizedMatrix) -> Tensor:
    """What codes mean before they are scaled."""
    return matrix.codes if matrix.table is None else matrix.table[matrix.codes.int()]


def is_shuffled(name: str, groups: Tensor, width: int, group: int) -> bool:
    """Whether groups are no runs of inputs. -1 everywhere: there is no order."""
    is_fit = tuple(groups.shape) == (width,) and groups.dtype in (torch.int32, torch.int64)
    require(is_fit, f"{name}: its g_idx does not name a group for each input")
    if groups.is_meta:
        return False  # the matrix has the same shape either way
    in_order = torch.arange(groups.numel()) // group
    return not (bool((groups == -1).all()) or torch.equal(groups.long(), in_order))


def by_groups(name: str, matrix: QuantizedMatrix, groups: Tensor) -> Tensor:
    """Dequantize where ``groups`` [K] names the group of each input. Raises CheckpointError."""
    assert matrix.minimum is not None
    check_scales(name, matrix, {})
    places = groups.long()
    is_known = int(groups.min()) >= 0 and int(groups.max()) < matrix.scale.shape[-1]
    require(is_known, f"{name}: its g_idx does not name a group for each input")
    return matrix.codes.float() * matrix.scale[..., places] + matrix.minimum[..., places]


def require(is_right: bool, complaint: str, wanted: tuple[int, ...] | None = None) -> None:
    """Raise CheckpointError with a complaint, and the shape that the config asks for."""
    if not is_right:
        of_config = "" if wanted is None else f", but its config.json asks for {list(wanted)}"
        raise CheckpointError(complaint + of_config)
