"""Decode the parts of a quantized matrix. The format follows from the parts and their types.

weight F8_E4M3, scale             FP8: per tensor, per output, per block of outputs and inputs; MXFP8
weight I8, scale, zeros           8 bits of compressed-tensors
packed I32, scale, zeros, groups  4 and 8 bits of compressed-tensors
packed or weight U8, scale        NVFP4 (scales F8_E4M3, and one for all: ``global_scale`` divides,
``second_scale`` multiplies) and MXFP4 (scales are powers of two)
blocks U8, scale                  MXFP4 of stacked experts
qweight, qzeros, scales, groups   GPTQ and AWQ, which differ in the order of dimensions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from specmamba.checkpoints.quantized.unpack import (
    e2m1_values,
    from_awq_words,
    from_bytes,
    from_e8m0,
    from_words,
)
from specmamba.errors import CheckpointError
from specmamba.kernels.linear import QuantizedMatrix
from specmamba.kernels.linear.quantized import e4m3_values

Parts = Mapping[str, Tensor]
SUPPORTED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Storage:
    """What a checkpoint's config says about its quantized matrices, beyond what their tensors say."""

    block: tuple[int, int] = (128, 128)  # outputs and inputs of a block of FP8
    zero_offset: int = 1  # added to the zero points of GPTQ


def decode(name: str, parts: Parts, shape: tuple[int, ...], storage: Storage) -> QuantizedMatrix | Tensor:
    """Decode a matrix.

    Args:
        name: of the matrix, for messages.
        parts: its tensors by role; see ``parts``.
        shape: [..., N, K], that the model asks for.
        storage: of the checkpoint.

    Returns:
        The matrix; as float32 where the inputs of a group do not lie side by side.

    Raises:
        CheckpointError: the parts do not make a matrix of this shape, or a scale is no usable number.
    """
    if len(shape) < 2:
        raise CheckpointError(f"{name} is quantized, and has the shape {list(shape)}: it should be a matrix")
    matrix = _decoder(name, parts)(name, parts, shape, storage)
    if isinstance(matrix, Tensor):
        _require(bool(matrix.isfinite().all()), f"{name}: its scales or zero points are no finite numbers")
    else:
        _check_scales(name, matrix)
    return matrix


def _decoder(name: str, parts: Parts) -> Callable[[str, Parts, tuple[int, ...], Storage], QuantizedMatrix | Tensor]:
    if "qweight" in parts:
        return _words_by_input
    codes = parts[next(role for role in ("packed", "blocks", "weight") if role in parts)]
    if "packed" in parts and codes.dtype is torch.int32:
        return _packed_words
    if codes.dtype is torch.uint8:
        return _float4
    if codes.dtype in (torch.float8_e4m3fn, torch.int8) and "weight" in parts:
        return _bytes
    raise CheckpointError(f"{name}: no known format has codes of {codes.dtype} beside {', '.join(sorted(parts))}")


def _bytes(name: str, parts: Parts, shape: tuple[int, ...], storage: Storage) -> QuantizedMatrix:
    """A byte per weight: FP8, or whole numbers."""
    codes = parts["weight"]
    _require_shape(name, codes, shape)
    scale, group = _scale_of(name, _numbers(parts["scale"]), shape, storage)
    if codes.dtype is torch.float8_e4m3fn:
        return QuantizedMatrix(codes.view(torch.uint8), scale, group, table=e4m3_values())
    zeros = parts.get("zeros")
    if zeros is None:
        return QuantizedMatrix(codes, scale, group)
    of_zeros, _ = _scale_of(name, zeros.float(), shape, storage)
    return QuantizedMatrix(codes, scale, group, minimum=-of_zeros * scale)


def _packed_words(name: str, parts: Parts, shape: tuple[int, ...], storage: Storage) -> QuantizedMatrix | Tensor:
    """Whole numbers packed along inputs; zero points are packed along outputs."""
    words = parts["packed"]
    if "shape" in parts:
        _require(tuple(parts["shape"].tolist()) == shape, f"{name} has the shape {parts['shape'].tolist()}", shape)
    bits = _bits(name, words.shape[-1], shape[-1])
    middle = 1 << (bits - 1)
    codes = from_words(words, bits)[..., : shape[-1]]
    _require_shape(name, codes, shape)
    scale, group = _scale_of(name, _numbers(parts["scale"]), shape, storage)
    minimum = -middle * scale
    if "zeros" in parts:
        stored = from_words(parts["zeros"].transpose(-1, -2).contiguous(), bits).transpose(-1, -2)[..., : shape[-2], :]
        _require(stored.shape == scale.shape, f"{name}: {list(stored.shape)} zero points do not fit its scales")
        minimum = -stored.float() * scale
    if "groups" in parts and _is_shuffled(parts["groups"], group):
        return _by_groups(name, codes.float(), scale, minimum, parts["groups"])
    if "zeros" not in parts:
        return QuantizedMatrix((codes.int() - middle).to(torch.int8), scale, group, bits=bits)
    return QuantizedMatrix(codes, scale, group, minimum, bits=bits)


def _float4(name: str, parts: Parts, shape: tuple[int, ...], storage: Storage) -> QuantizedMatrix:
    """Two e2m1 numbers in a byte."""
    pairs, scales = parts.get("packed", parts.get("weight", parts.get("blocks"))), parts["scale"]
    assert pairs is not None
    codes = from_bytes(pairs.flatten(-2) if "blocks" in parts else pairs)
    _require_shape(name, codes, shape)
    scale, group = _scale_of(name, _numbers(scales), shape, storage)
    if "global_scale" in parts:
        scale = scale / parts["global_scale"].float()
    if "second_scale" in parts:
        scale = scale * parts["second_scale"].float()
    if scales.dtype is torch.float8_e4m3fn and not {"global_scale", "second_scale"} & set(parts):
        raise CheckpointError(f"{name}: the scale of its scales is missing (weight_scale_2 or weight_global_scale)")
    return QuantizedMatrix(codes, scale, group, table=e2m1_values(), bits=4)


def _words_by_input(name: str, parts: Parts, shape: tuple[int, ...], storage: Storage) -> QuantizedMatrix | Tensor:
    """GPTQ [K / P, N], whose words hold neighbouring inputs, and AWQ [K, N / P], whose words hold outputs."""
    (outputs, width), words, scales = shape[-2:], parts["qweight"], parts["scales"].float()
    _require(words.dim() == 2 == scales.dim() and scales.shape[1] == outputs, f"{name} has other sizes", shape)
    if words.shape[1] == outputs:
        bits = _bits(name, words.shape[0], width)
        codes = from_words(words.t().contiguous(), bits)
        zeros = from_words(parts["qzeros"], bits).int() + storage.zero_offset if "qzeros" in parts else None
    else:
        bits = _bits(name, words.shape[1], outputs)
        _require(bits == 4, f"{name}: AWQ has 4 bits, not {bits}")
        codes = from_awq_words(words).t().contiguous()
        zeros = from_awq_words(parts["qzeros"]).int() if "qzeros" in parts else None
    _require_shape(name, codes, shape)
    scale, group = _scale_of(name, scales.t().contiguous(), shape, storage)
    if zeros is None:
        zeros = torch.full_like(scales, 1 << (bits - 1))
    _require(zeros.shape == scales.shape, f"{name}: {list(zeros.shape)} zero points do not fit its scales")
    minimum = -zeros.t().float() * scale
    if "groups" in parts and _is_shuffled(parts["groups"], group):
        return _by_groups(name, codes.float(), scale, minimum, parts["groups"])
    return QuantizedMatrix(codes, scale, group, minimum, bits=bits)


def _by_groups(name: str, values: Tensor, scale: Tensor, minimum: Tensor, groups: Tensor) -> Tensor:
    """Dequantize where ``groups`` [K] names the group of each input."""
    places = groups.long()
    is_known = groups.shape == values.shape[-1:] and int(groups.min()) >= 0 and int(groups.max()) < scale.shape[-1]
    _require(is_known, f"{name}: its g_idx does not name a group for each input")
    return values * scale[..., places] + minimum[..., places]


def _is_shuffled(groups: Tensor, group: int) -> bool:
    """Whether groups are no runs of inputs. -1 everywhere: there is no order."""
    in_order = torch.arange(groups.numel()) // group
    return not (bool((groups == -1).all()) or torch.equal(groups.long(), in_order))


def _scale_of(name: str, scale: Tensor, shape: tuple[int, ...], storage: Storage) -> tuple[Tensor, int]:
    """Scales [..., N, groups] of a matrix of this shape, and the inputs of a group."""
    *_, outputs, width = shape
    if scale.dim() == 4 and len(shape) == 2 and scale.shape[1] == scale.shape[3] == 1:
        scale = scale.flatten(0, 1).flatten(1, 2)  # ModelOpt's blocks of FP8
    if scale.numel() in (1, prod(shape[:-2])):  # per tensor
        return scale.reshape(*shape[:-2], 1, 1).expand(*shape[:-1], 1), width
    if scale.shape == shape[:-1]:
        scale = scale[..., None]
    if scale.shape[:-1] == shape[:-1]:
        num_groups = scale.shape[-1]
        _require(
            num_groups > 0 and width % num_groups == 0, f"{name}: {num_groups} groups do not divide {width} inputs"
        )
        return scale, width // num_groups
    rows, columns = storage.block
    blocks = (*shape[:-2], -(-outputs // rows), -(-width // columns))
    _require(
        tuple(scale.shape) == blocks,
        f"{name}: {list(scale.shape)} scales do not fit blocks of {rows} x {columns}",
        shape,
    )
    return scale.repeat_interleave(rows, -2)[..., :outputs, :], columns


def _numbers(scale: Tensor) -> Tensor:
    """Stored scales as float32. Bytes are exponents of two."""
    return from_e8m0(scale) if scale.dtype is torch.uint8 else scale.float()


def _bits(name: str, num_words: int, num_codes: int) -> int:
    """Bits of a code, of which so many lie in so many words."""
    for bits in SUPPORTED_BITS:
        if num_words == -(-num_codes * bits // 32):
            return bits
    raise CheckpointError(f"{name}: {num_words} words do not hold {num_codes} codes of 4 or 8 bits")


def _check_scales(name: str, matrix: QuantizedMatrix) -> None:
    """Raise CheckpointError for scales that are no numbers, or that make weights vanish."""
    for found in (matrix.scale, matrix.minimum):
        _require(found is None or bool(found.isfinite().all()), f"{name} has scales that are NaN or infinite")
    is_zero = matrix.scale == 0
    if matrix.minimum is None and bool(is_zero.any()):
        values = matrix.codes if matrix.table is None else matrix.table[matrix.codes.int()]
        is_lost = (values != 0) & is_zero.repeat_interleave(matrix.group, -1)[..., : values.shape[-1]]
        _require(not bool(is_lost.any()), f"{name} has scales of zero for weights that are not zero")


def _require_shape(name: str, codes: Tensor, shape: tuple[int, ...]) -> None:
    _require(codes.shape == shape, f"{name} has the shape {list(codes.shape)}", shape)


def _require(is_right: bool, complaint: str, wanted: tuple[int, ...] | None = None) -> None:
    if not is_right:
        of_config = "" if wanted is None else f", but its config.json asks for {list(wanted)}"
        raise CheckpointError(complaint + of_config)
