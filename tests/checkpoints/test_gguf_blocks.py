"""Blocks of GGUF files against the library of their makers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from specmamba.checkpoints.gguf.blocks import BLOCK_TYPES, to_matrix
from specmamba.kernels.linear import QuantizedMatrix

# bytes of a block that are float16
HALVES = {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 12: (0, 2), 13: (0, 2), 14: (208,), 20: (0,), 39: ()}
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
