"""Scales and groups of a quantized matrix: which shapes fit, and which values are of use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import torch
from torch import Tensor

from specmamba.checkpoints.quantized.storage import ALL_INPUTS
from specmamba.checkpoints.quantized.unpack import from_e8m0
from specmamba.errors import CheckpointError
from specmamba.kernels.linear import QuantizedMatrix


def scale_of(
    name: str, scale: Tensor, shape: tuple[int, ...], block: tuple[int, int], groups: Collection[int] = ()
) -> tuple[Tensor, int]:
    """Scales of a matrix.

    Args:
        name: of the matrix, for messages.
        scale: as stored, as numbers.
        shape: [..., N, K], of the matrix.
        block: outputs and inputs of a block, where scales are for blocks.
        groups: the numbers of inputs that a group may have; ``ALL_INPUTS``: all of them. Empty: any.

    Returns:
        Scales [..., N, groups], and the inputs of a group.

    Raises:
        CheckpointError: the shape of the scales does not fit, or the groups are none that may be.
    """
    found, group = _spread(name, scale, shape, block)
    width = shape[-1]
    sizes = sorted({width if size == ALL_INPUTS else min(size, width) for size in groups})
    allowed = " or ".join(map(str, sizes))
    require(
        not sizes or group in sizes,
        f"{name}: {list(scale.shape)} scales are for groups of {group} inputs; its format or config says {allowed}",
    )
    return found, group


def _spread(name: str, scale: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> tuple[Tensor, int]:
    """The same for groups of any size."""
    *_, outputs, width = shape
    if scale.dim() == 4 and len(shape) == 2 and scale.shape[1] == scale.shape[3] == 1:
        scale = scale.flatten(0, 1).flatten(1, 2)  # ModelOpt's blocks of FP8
    if scale.numel() in (1, prod(shape[:-2])):  # per tensor
        return scale.reshape(*shape[:-2], 1, 1).expand(*shape[:-1], 1), width
    if scale.shape == shape[:-1]:
        scale = scale[..., None]
    if scale.shape[:-1] == shape[:-1]:
        num_groups = scale.shape[-1]
        require(num_groups > 0 and width % num_groups == 0, f"{name}: {num_groups} groups do not divide {width} inputs")
        return scale, width // num_groups
    rows, columns = block
    blocks = (*shape[:-2], -(-outputs // rows), -(-width // columns))
    require(
        tuple(scale.shape) == blocks,
        f"{name}: {list(scale.shape)} scales do not fit blocks of {rows} x {columns}",
        shape,
    )
    return scale.repeat_interleave(min(rows, outputs), -2)[..., :outputs, :], columns


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
    """Raise CheckpointError for scales that are no numbers, or that make weights vanish.

    The smallest positive e4m3 is 2**-9, so in such scales a zero here and there is a group of tiny weights; so is one
    beside a zero point, whose scales are float16.
    """
    if matrix.codes.is_meta:
        return
    for found in (matrix.scale, matrix.minimum):
        require(found is None or bool(found.isfinite().all()), f"{name} has scales that are NaN or infinite")
    is_e4m3 = "scale" in parts and parts["scale"].dtype is torch.float8_e4m3fn
    is_lost = vanish_as_a_whole if is_e4m3 or matrix.minimum is not None else _vanish_in_part
    require(not is_lost(matrix), f"{name} has scales of zero for weights that are not zero")


def vanish_as_a_whole(matrix: QuantizedMatrix) -> bool:
    """Whether all scales of a matrix, or of one that is stacked, are zero, though its codes are not all alike.

    What a writer stores for a matrix of zeros differs by format: a code of zero, a zero point, the lowest code.
    """
    is_zero = (matrix.scale == 0).flatten(-2).all(-1)
    if not bool(is_zero.any()):
        return False
    values = _values_of(matrix).flatten(-2)
    return bool((is_zero & (values.amin(-1) != values.amax(-1))).any())


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
