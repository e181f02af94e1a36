"""Decode the parts of a quantized matrix. The format follows from the parts and their types.

weight F8_E4M3, scale             FP8: per tensor, per output, per block of outputs and inputs; MXFP8
weight I8, scale, zeros           8 bits of compressed-tensors
packed I32, scale, zeros, groups  4 and 8 bits of compressed-tensors
packed or weight U8, scale        NVFP4 (scales F8_E4M3, and one for all: ``global_scale`` divides,
``second_scale`` multiplies) and MXFP4 (scales are powers of two)
blocks U8, scale                  MXFP4 of stacked experts
qweight, qzeros, scales, groups   GPTQ and AWQ, which differ in the order of dimensions

Parts on PyTorch's meta device are decoded as far as shapes and types go, so that a checkpoint whose values are not read
is refused with the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from specmamba.checkpoints.quantized.declared import MX_GROUP, NVFP4_GROUP, Spread
from specmamba.checkpoints.quantized.scales import (
    by_groups,
    check_scales,
    is_shuffled,
    numbers,
    of_matrix,
    require,
    scale_of,
)
from specmamba.checkpoints.quantized.storage import Storage
from specmamba.checkpoints.quantized.unpack import (
    e2m1_values,
    from_awq_words,
    from_bytes,
    from_words,
)
from specmamba.errors import CheckpointError
from specmamba.kernels.linear import QuantizedMatrix
from specmamba.kernels.linear.quantized import e4m3_values, has_nan

Parts = Mapping[str, Tensor]
SUPPORTED_BITS = (4, 8)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
FLOAT4_SCALES = (torch.float8_e4m3fn, *EXPONENTS)  # of e2m1 codes; bytes are exponents


def decode(name: str, parts: Parts, shape: tuple[int, ...], storage: Storage) -> QuantizedMatrix | Tensor:
    """Decode a matrix.

    Args:
        name: of the matrix, for messages.
        parts: its tensors by role; see ``parts``. On the meta device there are no values to check; ``shape`` has its
            values all the same.
        shape: [..., N, K], that the model asks for.
        storage: of the checkpoint.

    Returns:
        The matrix; as float32 where the inputs of a group do not lie side by side.

    Raises:
        CheckpointError: the parts do not make a matrix of this shape, or a scale is no usable number.
    """
    if len(shape) < 2:
        raise CheckpointError(f"{name} is quantized, and has the shape {list(shape)}: it should be a matrix")
    decoder = _decoder(name, parts)
    try:
        matrix = decoder(name, parts, shape, storage)
    except (RuntimeError, IndexError) as error:  # of PyTorch, for shapes and types that no check above names
        found = ", ".join(f"{role} {list(part.shape)} {part.dtype}" for role, part in sorted(parts.items()))
        raise CheckpointError(f"{name}: its parts do not make a matrix {list(shape)}: {found}") from error
    if isinstance(matrix, QuantizedMatrix):
        check_scales(name, matrix, parts)
    elif not matrix.is_meta:
        require(bool(matrix.isfinite().all()), f"{name}: its scales or zero points are no finite numbers")
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
    is_float = codes.dtype is torch.float8_e4m3fn
    spreads: Collection[Spread] = storage.of("FP8" if is_float else "whole numbers").spreads
    if parts["scale"].dtype in EXPONENTS and not (is_float and spreads):
        spreads = ((1, MX_GROUP),)
    scale, group = scale_of(name, numbers(parts["scale"]), shape, spreads)
    if is_float:
        require(not has_nan(codes), f"{name} has weights that are NaN")
        return QuantizedMatrix(codes.view(torch.uint8), scale, group, table=e4m3_values())
    _require_bytes(name, storage)
    zeros = parts.get("zeros")
    if zeros is None:
        return QuantizedMatrix(codes, scale, group)
    of_zeros, _ = scale_of(name, zeros.float(), shape, spreads)
    require(of_zeros.shape == scale.shape, f"{name}: {list(zeros.shape)} zero points do not fit its scales")
    return QuantizedMatrix(codes, scale, group, minimum=-of_zeros * scale)


def _packed_words(name: str, parts: Parts, shape: tuple[int, ...], storage: Storage) -> QuantizedMatrix | Tensor:
    """Whole numbers packed along inputs; zero points are packed along outputs."""
    words = parts["packed"]
    _require_words(name, parts)
    if "shape" in parts:
        require(parts["shape"].numel() == len(shape), f"{name}: its weight_shape has not {len(shape)} sizes")
        require(tuple(parts["shape"].tolist()) == shape, f"{name} has the shape {parts['shape'].tolist()}", shape)
    bits = _bits(name, words.shape[-1], shape[-1])
    _require_bits(name, bits, storage)
    middle = 1 << (bits - 1)
    codes = from_words(words, bits)[..., : shape[-1]]
    _require_shape(name, codes, shape)
    scale, group = scale_of(name, numbers(parts["scale"]), shape, storage.of("whole numbers").spreads)
    minimum = -middle * scale
    if "zeros" in parts:
        stored = from_words(parts["zeros"].transpose(-1, -2).contiguous(), bits).transpose(-1, -2)[..., : shape[-2], :]
        require(stored.shape == scale.shape, f"{name}: {list(stored.shape)} zero points do not fit its scales")
        minimum = -stored.float() * scale
    if "groups" in parts and is_shuffled(name, parts["groups"], shape[-1], group):
        return by_groups(name, QuantizedMatrix(codes, scale, group, minimum), parts["groups"])
    if "zeros" not in parts:
        return QuantizedMatrix((codes.int() - middle).to(torch.int8), scale, group, bits=bits)
    return QuantizedMatrix(codes, scale, group, minimum, bits=bits)


def _float4(name: str, parts: Parts, shape: tuple[int, ...], storage: Storage) -> QuantizedMatrix:
    """Two e2m1 numbers in a byte."""
    pairs, scales = parts.get("packed", parts.get("weight", parts.get("blocks"))), parts["scale"]
    assert pairs is not None
    codes = from_bytes(pairs.flatten(-2) if "blocks" in parts else pairs)
    _require_shape(name, codes, shape)
    if scales.dtype not in FLOAT4_SCALES:  # the codes would be whole numbers of 4 bits
        raise CheckpointError(f"{name}: no known format has codes of uint8 beside scales of {scales.dtype}")
    size = NVFP4_GROUP if scales.dtype is torch.float8_e4m3fn else MX_GROUP
    scale, group = scale_of(name, numbers(scales), shape, ((1, size),))
    scale_of(name, numbers(scales), shape, storage.of("FP4").spreads)
    if "global_scale" in parts:
        scale = scale / of_matrix(name, parts["global_scale"], shape)
    if "second_scale" in parts:
        scale = scale * of_matrix(name, parts["second_scale"], shape)
    if scales.dtype is torch.float8_e4m3fn and not {"global_scale", "second_scale"} & set(parts):
        raise CheckpointError(f"{name}: the scale of its scales is missing (weight_scale_2 or weight_global_scale)")
    return QuantizedMatrix(codes, scale, group, table=e2m1_values(), bits=4)


def _words_by_input(name: str, parts: Parts, shape: tuple[int, ...], storage: Storage) -> QuantizedMatrix | Tensor:
    """GPTQ [K / P, N], whose words hold neighbouring inputs, and AWQ [K, N / P], whose words hold outputs."""
    (outputs, width), words, scales = shape[-2:], parts["qweight"], parts["scales"].float()
    _require_words(name, parts)
    require(words.dim() == 2 == scales.dim() and scales.shape[1] == outputs, f"{name} has other sizes", shape)
    if words.shape[1] == outputs:
        bits = _bits(name, words.shape[0], width)
        codes = from_words(words.t().contiguous(), bits)
        zeros = _gptq_zeros(parts["qzeros"], bits, storage).int() if "qzeros" in parts else None
    else:
        bits = _bits(name, words.shape[1], outputs)
        require(bits == 4, f"{name}: AWQ has 4 bits, not {bits}")
        codes = from_awq_words(words).t().contiguous()
        zeros = from_awq_words(parts["qzeros"]).int() if "qzeros" in parts else None
    _require_bits(name, bits, storage)
    _require_shape(name, codes, shape)
    scale, group = scale_of(name, scales.t().contiguous(), shape, storage.of("whole numbers").spreads)
    if zeros is None:
        zeros = torch.full_like(scales, 1 << (bits - 1))
    require(zeros.shape == scales.shape, f"{name}: {list(zeros.shape)} zero points do not fit its scales")
    minimum = -zeros.t().float() * scale
    if "groups" in parts and is_shuffled(name, parts["groups"], width, group):
        return by_groups(name, QuantizedMatrix(codes, scale, group, minimum), parts["groups"])
    return QuantizedMatrix(codes, scale, group, minimum, bits=bits)


def _gptq_zeros(words: Tensor, bits: int, storage: Storage) -> Tensor:
    """Unpack zero points. One less was taken of whole words, so a zero has borrowed from its neighbour."""
    ones = sum(1 << place for place in range(0, 32, bits)) if storage.has_less_zeros else 0
    return from_words(words + ones, bits)


def _bits(name: str, num_words: int, num_codes: int) -> int:
    """Bits of a code, of which so many lie in so many words."""
    for bits in SUPPORTED_BITS:
        if num_words == -(-num_codes * bits // 32):
            return bits
    raise CheckpointError(f"{name}: {num_words} words do not hold {num_codes} codes of 4 or 8 bits")


def _require_bits(name: str, bits: int, storage: Storage) -> None:
    """Raise CheckpointError where a config says other numbers of bits, for any layer, than codes are stored in."""
    said = storage.of("whole numbers").bits
    wanted = " or ".join(map(str, sorted(said)))
    require(not said or bits in said, f"{name} is stored in codes of {bits} bits; its config says {wanted}")


def _require_bytes(name: str, storage: Storage) -> None:
    """Raise CheckpointError where a config says more bits than a byte has; fewer are also stored in a byte each."""
    said = storage.of("whole numbers").bits
    require(not said or min(said) <= 8, f"{name} is stored in codes of 8 bits; its config says {min(said, default=8)}")


def _require_words(name: str, parts: Parts) -> None:
    """Raise CheckpointError for packed codes and zero points that are not stored in words of 32 bits."""
    for role in {"qweight", "qzeros", "packed", "zeros"} & set(parts):
        found = parts[role].dtype
        require(found is torch.int32, f"{name}: its {role} should be packed in words of 32 bits, but are {found}")


def _require_shape(name: str, codes: Tensor, shape: tuple[int, ...]) -> None:
    require(codes.shape == shape, f"{name} has the shape {list(codes.shape)}", shape)
