"""Blocks of GGUF files against the library of their makers, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor
from transformers.integrations.gguf.dequant import GGML_BLOCK

from specmamba.checkpoints.gguf.blocks import BLOCK_TYPES, to_matrix, type_name
from specmamba.checkpoints.gguf.gguf_reader import GgufReader
from specmamba.checkpoints.gguf.header import TensorEntry
from specmamba.errors import CheckpointError
from specmamba.kernels.linear import QuantizedMatrix

# bytes of a block that are float16
HALVES = {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 12: (0, 2), 13: (0, 2), 14: (208,), 20: (0,), 39: ()}
# Types that transformers' reader dequantizes: Q2_K, Q3_K and the IQ ones
OTHERS = tuple(sorted(set(GGML_BLOCK) - set(BLOCK_TYPES)))
OTHER_HALVES = {10: (80, 82), 11: (108,), **dict.fromkeys(OTHERS[2:], (0,)), 29: ()}
ROWS, BLOCKS = 5, 3


def random_blocks(number: int, seed: int = 0) -> Tensor:
    """Bytes [rows, blocks, bytes of a block], with floats that are finite."""
    torch.manual_seed(seed)
    data = torch.randint(0, 256, (ROWS, BLOCKS, BLOCK_TYPES[number].num_bytes), dtype=torch.uint8)
    for at in HALVES[number]:
        data[..., at : at + 2] = torch.randn(ROWS, BLOCKS, 1).half().view(torch.uint8)
    if number == 39:
        data[..., 0] %= 255  # 255 stands for no number
    return data


def matrix_of(number: int, data: Tensor) -> QuantizedMatrix:
    kind = BLOCK_TYPES[number]
    return to_matrix(data.flatten(), kind, (ROWS, BLOCKS * kind.num_weights))


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_sizes(number: int) -> None:
    kind = BLOCK_TYPES[number]
    assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.num_weights, kind.num_bytes)


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_weights(number: int) -> None:
    data = random_blocks(number)
    expected = dequantize(data.flatten(1).numpy(), GGMLQuantizationType(number))
    found = matrix_of(number, data).dequantize(torch.float32).numpy()
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_rows_and_columns_move(number: int) -> None:
    """As those of the dequantized weights; where columns leave their groups, weights are dequantized."""
    matrix = matrix_of(number, random_blocks(number))
    whole, group = matrix.dequantize(torch.float32), matrix.group
    rows, groups = torch.randperm(ROWS), torch.randperm(matrix.shape[1] // group)
    assert torch.equal(matrix.with_rows(rows).dequantize(torch.float32), whole[rows])
    columns = (groups[:, None] * group + torch.arange(group)).flatten()
    moved = matrix.with_columns(columns)
    assert isinstance(moved, QuantizedMatrix)
    assert torch.equal(moved.dequantize(torch.float32), whole[:, columns])
    for other in (torch.randperm(matrix.shape[1]), torch.arange(matrix.shape[1]).roll(1), torch.arange(group + 1)):
        dense = matrix.with_columns(other)
        assert isinstance(dense, Tensor)
        assert torch.equal(dense, whole[:, other])
    joined = QuantizedMatrix.cat([matrix, matrix.with_rows(rows)], 0)
    assert torch.equal(joined.dequantize(torch.float32), torch.cat([whole, whole[rows]]))


def other_blocks(number: int) -> Tensor:
    """The same for the types that are dequantized when they are read."""
    torch.manual_seed(number)
    data = torch.randint(0, 256, (ROWS, BLOCKS, GGML_BLOCK[number][1]), dtype=torch.uint8)
    for at in OTHER_HALVES[number]:
        data[..., at : at + 2] = torch.randn(ROWS, BLOCKS, 1).half().view(torch.uint8)
    if number == 29:  # IQ1_M has the nibbles of its float16 at the top of four words of scales
        data[..., 55] &= 0x3F  # an exponent below the highest
    return data


@pytest.mark.parametrize("number", OTHERS, ids=type_name)
def test_types_that_are_dequantized(number: int) -> None:
    """Read as from a file; scales that are all zero make weights vanish, and are refused."""
    data, kind = other_blocks(number), GGMLQuantizationType(number)
    assert GGML_BLOCK[number] == GGML_QUANT_SIZES[kind]
    expected = dequantize(data.flatten(1).numpy(), kind)
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 50
    assert np.array_equal(read_as(number, data).numpy(), expected)


@pytest.mark.parametrize("number", OTHERS, ids=type_name)
def test_types_that_are_dequantized_without_scales(number: int) -> None:
    data = other_blocks(number)
    for at in OTHER_HALVES[number]:
        data[..., at : at + 2] = 0
    if number == 29:
        data[..., 49::2] &= 0x0F
    with pytest.raises(CheckpointError, match="has scales of zero for weights that are not zero"):
        read_as(number, data)
    assert not read_as(number, torch.zeros_like(data)).any()


def test_scales_of_zero_beside_minima() -> None:
    """Of Q2_K: minima alone would stand for weights."""
    data = other_blocks(10)
    data[..., 80:82] = 0
    with pytest.raises(CheckpointError, match="has scales of zero for weights that are not zero"):
        read_as(10, data)
    data[..., 16:80] = 0
    assert read_as(10, data).any()


def read_as(number: int, data: Tensor) -> Tensor:
    """The weights of a tensor of this type, as a reader of a file loads it."""
    reader = object.__new__(GgufReader)
    reader._file, reader._data = Path("x.gguf"), data.flatten()
    shape = ROWS, BLOCKS * GGML_BLOCK[number][0]
    reader._infos = {"x": TensorEntry(shape, number, 0, data.numel())}
    found = reader._load_source("x")
    assert isinstance(found, Tensor)
    return found
