"""Blocks of GGUF files as codes, scales and minima (ggml's ``block_q4_0`` and so on, little endian).

A row of K weights is K / 32 or K / 256 blocks. Each decoder takes blocks [n, bytes] uint8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specmamba.checkpoints.quantized.unpack import e2m1_values, from_e8m0
from specmamba.kernels.linear import QuantizedMatrix

# What the codes of IQ4_NL mean.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Blocks(NamedTuple):
    """Decoded blocks of G groups of g weights each."""

    codes: Tensor  # [n, G g] int8 or uint8
    scale: Tensor  # [n, G] float32
    minimum: Tensor | None = None  # [n, G] float32
    table: Tensor | None = None


class BlockType(NamedTuple):
    """How one type of ggml is decoded."""

    num_weights: int
    num_bytes: int
    group: int
    decode: Callable[[Tensor], Blocks]
    bits: int = 8  # that a code needs, 4 or more


def type_name(number: int) -> str:
    """What ggml calls its type of this number."""
    from transformers.integrations.gguf.dequant import GGML_NAME

    named = {6: "Q5_0", 7: "Q5_1", 20: "IQ4_NL", 39: "MXFP4"} | GGML_NAME
    return str(named.get(number, f"ggml type {number}"))


def to_matrix(data: Tensor, kind: BlockType, shape: tuple[int, ...]) -> QuantizedMatrix:
    """Decode the bytes of a tensor [..., N, K] of this type, whose K is a multiple of the weights of a block."""
    found = kind.decode(data.view(-1, kind.num_bytes))
    groups = (*shape[:-1], shape[-1] // kind.group)
    minimum = None if found.minimum is None else found.minimum.reshape(groups)
    parts = found.codes.reshape(shape), found.scale.reshape(groups)
    return QuantizedMatrix(*parts, kind.group, minimum, found.table, kind.bits)


def shape_of_matrix(kind: BlockType, shape: tuple[int, ...]) -> QuantizedMatrix:
    """A tensor of this type without values: its parts are on PyTorch's meta device."""
    one = to_matrix(torch.zeros(kind.num_bytes, dtype=torch.uint8), kind, (1, kind.num_weights))
    groups = (*shape[:-1], shape[-1] // kind.group)
    scale = torch.empty(groups, device="meta")
    codes = torch.empty(shape, dtype=one.codes.dtype, device="meta")
    return replace(one, codes=codes, scale=scale, minimum=None if one.minimum is None else scale)


def _q4_0(blocks: Tensor) -> Blocks:
    return Blocks((_nibbles(blocks[:, 2:]) - 8).view(torch.int8), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Blocks:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return Blocks((codes - 16).view(torch.int8), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Blocks:
    return Blocks(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _q4_k(blocks: Tensor) -> Blocks:
    scale, minimum = _scales_and_minima(blocks)
    return Blocks(_nibbles_of_groups(blocks[:, 16:]), scale, minimum)


def _q5_k(blocks: Tensor) -> Blocks:
    scale, minimum = _scales_and_minima(blocks)
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [n, groups, 32]
    return Blocks(_nibbles_of_groups(blocks[:, 48:]) | high.flatten(1) << 4, scale, minimum)


def _q6_k(blocks: Tensor) -> Blocks:
    low = blocks[:, :128].unflatten(1, (2, 1, 64)) >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3
    codes = low.flatten(1) | high.flatten(1) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Blocks((codes - 32).view(torch.int8), scale)


def _iq4_nl(blocks: Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 2:]), _half(blocks, 0), table=torch.tensor(IQ4_VALUES, dtype=torch.float32))


def _mxfp4(blocks: Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 1:]), from_e8m0(blocks[:, :1]), table=e2m1_values())


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at this byte of each block: [n, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor) -> Tensor:
    """Bytes [n, B], whose low halves come first and whose high ones after them: [n, 2 B]."""
    return torch.cat([blocks & 15, blocks >> 4], 1)


def _nibbles_of_groups(blocks: Tensor) -> Tensor:
    """The same for every 32 of the bytes."""
    pairs = blocks.unflatten(1, (-1, 32))
    return torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)


def _bits(words: Tensor) -> Tensor:
    """Bits of words [n, 4] of 32 bits, the lowest first: [n, 32] of 0 and 1."""
    return (words[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the 8 groups of Q4_K and Q5_K: 6 bits each in 12 bytes, times a float16 for all."""
    packed = blocks[:, 4:16]
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat([first & 63, last & 15 | first >> 6 << 4], 1)
    minimum = torch.cat([second & 63, last >> 4 | second >> 6 << 4], 1)
    return _half(blocks, 0) * scale, -_half(blocks, 2) * minimum


# By ggml's number of the type.
BLOCK_TYPES = {
    2: BlockType(32, 18, 32, _q4_0, 4),
    3: BlockType(32, 20, 32, _q4_1, 4),
    6: BlockType(32, 22, 32, _q5_0, 5),
    7: BlockType(32, 24, 32, _q5_1, 5),
    8: BlockType(32, 34, 32, _q8_0),
    12: BlockType(256, 144, 32, _q4_k, 4),
    13: BlockType(256, 176, 32, _q5_k, 5),
    14: BlockType(256, 210, 16, _q6_k, 6),
    20: BlockType(32, 18, 32, _iq4_nl, 4),
    39: BlockType(32, 17, 32, _mxfp4, 4),
}
