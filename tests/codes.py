"""Random quantized matrices of every kind of codes, for tests of products with them."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.linear import QuantizedMatrix
from specmamba.kernels.linear.quantized import e4m3_values

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
IQ4 = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
KINDS = [
    *("int4", "int4 with minima", "e2m1", "iq4", "int5", "int6", "int6 with minima"),
    *("int8", "bytes with minima", "fp8"),
]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(kind: str, *shape: int, group: int = 32, seed: int = 1) -> QuantizedMatrix:
    """Random codes of every value that a kind has, with scales of several orders of magnitude."""
    of = torch.Generator().manual_seed(seed)
    groups = (*shape[:-1], -(-shape[-1] // group))
    scale = torch.rand(groups, generator=of).add(0.1) * 10.0 ** torch.randint(-4, 1, groups, generator=of)
    minimum = -torch.rand(groups, generator=of) if kind.endswith("minima") else None
    table = {"e2m1": E2M1, "iq4": IQ4, "fp8": e4m3_values()}.get(kind)
    bits = {"int5": 5, "int6": 6, "int6 with minima": 6, "int8": 8, "bytes with minima": 8, "fp8": 8}.get(kind, 4)
    codes = torch.randint(0, 1 << bits, shape, generator=of).to(torch.uint8)
    if kind == "fp8":
        codes = codes.where((codes & 127) != 127, 0)  # NaN
    if kind in ("int4", "int5", "int6", "int8"):
        codes = (codes.int() - (1 << (bits - 1))).to(torch.int8)
    return QuantizedMatrix(codes, scale, group, minimum, table, bits)
