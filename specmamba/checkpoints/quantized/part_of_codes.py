"""The part of a quantized matrix that a rank has, from the part of its stored codes.

Codes are nearly all bytes of a matrix. Its scales are decoded whole, beside codes without values, and cut afterwards:
which weights share one need not have anything to do with where the codes are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specmamba.checkpoints.quantized.decode import decode
from specmamba.checkpoints.quantized.parts import CODES
from specmamba.checkpoints.quantized.scales import check_scales, is_shuffled, require, vanishes
from specmamba.checkpoints.quantized.storage import Storage
from specmamba.checkpoints.quantized.unpack import from_awq_words, from_bytes, from_words
from specmamba.kernels.linear import QuantizedMatrix
from specmamba.kernels.linear.quantized import has_nan
from specmamba.parallel.share import Part

WORD_BITS = 32


class StoredCodes(NamedTuple):
    """How the codes of a matrix [..., N, K] lie in a stored tensor."""

    outputs: int  # the dimension that has them, from the end
    inputs: int
    outputs_of_element: int  # 1, or so many share an element of that dimension
    inputs_of_element: int
    unpack: Callable[[Tensor], Tensor]


def take_part(
    name: str,
    parts: dict[str, Tensor],
    shape: tuple[int, ...],
    storage: Storage,
    part: Part,
    read: Callable[[str, Part], Tensor],
) -> QuantizedMatrix | None:
    """Decode the part of a matrix, and read no more of its codes.

    Args:
        name, shape, storage: as for ``decode``.
        parts: the tensors of the matrix by role; its codes have no values.
        part: of the matrix.
        read: loads a part of the tensor that has a role.

    Returns:
        The part; None where all codes are needed: inputs are ordered by group, an element of the file has codes inside
        and outside of the part, or a scale is zero, which is right or wrong by the codes that it scales.

    Raises:
        CheckpointError: as ``decode``.
        ConfigError: groups do not end where the part does.
    """
    groups = parts.get("groups")
    ordered = {} if groups is None else {"groups": groups.to("meta")}  # taken to be in order, until the group is known
    whole = decode(name, parts | ordered, shape, storage)
    if not isinstance(whole, QuantizedMatrix) or _depends_on_codes(whole, parts):
        return None
    if groups is not None and is_shuffled(name, groups, shape[-1], whole.group):
        return None
    role = next(role for role in CODES if role in parts)
    stored = _stored_codes(role, parts[role], whole)
    of_file = _part_of_file(stored, part, shape)
    if of_file is None:
        return None
    found = read(role, of_file)
    require(found.dtype is not torch.float8_e4m3fn or not has_nan(found), f"{name} has weights that are NaN")
    codes = stored.unpack(found)
    check_scales(name, replace(whole, codes=codes), parts)
    return part.with_codes(whole, codes)


def _depends_on_codes(whole: QuantizedMatrix, parts: Mapping[str, Tensor]) -> bool:
    """Whether ``check_scales`` would look at codes: a scale is zero where that is rare, or all of a matrix are."""
    if whole.scale.is_meta:
        return False
    are_often_zero = whole.minimum is not None or ("scale" in parts and parts["scale"].dtype is torch.float8_e4m3fn)
    return vanishes(whole.scale) or (not are_often_zero and bool((whole.scale == 0).any()))


def _stored_codes(role: str, codes: Tensor, matrix: QuantizedMatrix) -> StoredCodes:
    """The counterpart of ``decode``, for the codes alone."""
    per_word, bits = WORD_BITS // matrix.bits, matrix.bits
    if role == "qweight":
        if codes.shape[1] == matrix.shape[0]:  # GPTQ
            return StoredCodes(-1, -2, 1, per_word, lambda words: from_words(words.t().contiguous(), bits))
        return StoredCodes(-1, -2, per_word, 1, lambda words: from_awq_words(words).t().contiguous())
    if role == "blocks":
        return StoredCodes(-3, -2, 1, 2 * codes.shape[-1], lambda pairs: from_bytes(pairs.flatten(-2)))
    if codes.dtype is torch.int32:
        middle = 1 << (bits - 1) if matrix.codes.dtype is torch.int8 else 0
        to_code = matrix.codes.dtype
        return StoredCodes(-2, -1, 1, per_word, lambda words: (from_words(words, bits).int() - middle).to(to_code))
    if matrix.bits == 4 and codes.dtype is torch.uint8:
        return StoredCodes(-2, -1, 1, 2, from_bytes)
    return StoredCodes(-2, -1, 1, 1, lambda found: found.view(matrix.codes.dtype))


def _part_of_file(stored: StoredCodes, part: Part, shape: tuple[int, ...]) -> Part | None:
    """The part of the stored tensor that has the codes of the part of the matrix; None: elements would be divided."""
    dim = part.dim % len(shape)
    if dim == len(shape) - 1:
        at, count = stored.inputs, stored.inputs_of_element
    elif dim == len(shape) - 2:
        at, count = stored.outputs, stored.outputs_of_element
    else:
        at, count = dim, 1
    if count == 1:
        return replace(part, dim=at)
    runs = part.runs()
    if shape[dim] % count or any(begin % count or size % count for begin, size in runs):
        return None
    index = torch.cat([torch.arange(begin // count, (begin + size) // count) for begin, size in runs])
    return replace(part, dim=at, index=index)
