"""Products with packed weights in Triton, for GPUs. See README.md."""

from __future__ import annotations

from torch import Tensor

from specmamba.kernels.linear import tiles, torch_ops
from specmamba.kernels.linear.triton_kernels import multiply_int8


class TritonInt8Weight(torch_ops.Int8Weight):
    """An int8 weight that a few rows multiply as it is, a byte per weight; for more it is widened at every use."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]; few rows of float32, bf16 and float16 are rounded once, after the scale.

        Raises:
            ValueError: another width, or on another device.
        """
        n, k = self._weight.shape
        if not x.dim() or x.shape[-1] != k or x.device != self._weight.device:
            complaint = f"an int8 weight [{n}, {k}] on {self._weight.device} cannot multiply"
            raise ValueError(f"{complaint} {x.dtype} {list(x.shape)} on {x.device}")
        num_rows = x.numel() // k
        if num_rows > tiles.MAX_ROWS or x.dtype not in tiles.DTYPES:
            return super().__call__(x)
        return multiply_few(x.reshape(num_rows, k), self._weight, self._scale).view(*x.shape[:-1], n)


def pack(weight: Tensor, form: str = "int8") -> TritonInt8Weight:
    """Round a weight [N, K], not empty; there is no other form than int8."""
    assert form == "int8"
    return TritonInt8Weight(weight)


def multiply_few(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """y[m, n] = scale[n] sum_k x[m, k] weight[n, k], summed in float32 and rounded once.

    Args:
        x: [M, K] float32, bfloat16 or float16.
        weight: [N, K] int8, contiguous.
        scale: [N] float32.

    Returns:
        [M, N] in x's dtype.
    """
    (m, k), n = x.shape, len(weight)
    y = x.new_empty(m, n)
    if not m:
        return y
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = tiles.int8_tile(x.dtype, m, n)
    grid = -(-n // tile.outputs), -(-m // tile.rows)
    multiply_int8[grid](
        *(x, weight, scale, y, m, n, k, x.stride(0), k, n),
        **tile.constants(k, x.dtype, is_interpreted=x.is_cpu),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y
