"""Parts of layers: matrix product, RMS norm, rotary position embedding, the frame of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.cache.shapes import StateShape
from specmamba.kernels import linear, rowwise
from specmamba.kernels.linear import Matrix, PackedCodes, WeightForm
from specmamba.kernels.native import library
from specmamba.parallel.ranks import Ranks

W = TypeVar("W")


class Linear:
    """y = x W^T + bias, with the weights laid out for their device."""

    def __init__(
        self,
        weight: Tensor | Sequence[Matrix],
        bias: Tensor | None = None,
        form: WeightForm = "plain",
        dtype: torch.dtype | None = None,
        layout: torch.device | None = None,
        gates: Sequence[Matrix] = (),
    ) -> None:
        """Lay out the weights.

        Args:
            weight: [out, in], or several of them one below the other; not kept where a packed copy takes its place.
            bias: [out].
            form: of weights that are not quantized, as for ``linear.pack``.
            dtype: of inputs, where matrices are quantized.
            layout: the device whose sizes are meant, where matrices have no values.
            gates: further matrices, behind the others, that forms of codes do not round.
        """
        parts = (weight,) if isinstance(weight, Tensor) else weight
        if parts[0].device.type == "cpu":
            library.preload()
        self.product = linear.packed(parts, form, dtype, layout, gates)
        self._bias = bias
        self.nbytes = self.product.nbytes + (0 if bias is None else bias.nbytes)  # of the tensors that are kept
        self.num_outputs = sum(part.shape[0] for part in (*parts, *gates))

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply [..., in]: [..., out]. The product is rounded to x's dtype before the bias is added."""
        y = self.product(x)
        return y if self._bias is None else y.add_(self._bias)


class SummedLinear(Linear):
    """A product of which every rank has some of the inputs: the ranks' results are added up, and the bias once."""

    def __init__(self, made: Linear, bias: Tensor | None, ranks: Ranks) -> None:
        """made: of this rank's inputs, without bias; bias: [out]."""
        self.product, self._bias, self._ranks = made.product, bias, ranks
        self.nbytes = made.nbytes + (0 if bias is None else bias.nbytes)
        self.num_outputs = made.num_outputs

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply [..., own in]: [..., out], the same on every rank."""
        y = self._ranks.all_reduce(self.product(x))
        return y if self._bias is None else y.add_(self._bias)


class GatheredLinear(Linear):
    """A product of which every rank has some of the outputs: they are joined on all ranks."""

    def __init__(self, made: Linear, widths: tuple[int, ...], ranks: Ranks) -> None:
        """made: of this rank's outputs, without bias; widths: outputs of every rank."""
        self.product, self.nbytes, self._widths, self._ranks = made.product, made.nbytes, widths, ranks
        self.num_outputs = sum(widths)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply [..., in]: [..., out], the same on every rank."""
        return self._ranks.all_gather(self.product(x), self._widths)


class Embedding:
    """Vectors of tokens: rows of a table, or of a matrix in codes, which an output head may multiply by too."""

    def __init__(self, shape: Sequence[int], table: Tensor | None, codes: PackedCodes | None = None) -> None:
        """Either of the two.

        Args:
            shape: V, H.
            table: [V, H].
            codes: of a matrix [V, H].
        """
        assert (table is None) != (codes is None)
        self.shape, self.table = tuple(shape), table
        self._codes = codes

    def __call__(self, tokens: Tensor) -> Tensor:
        """Vectors of tokens [...] int64: [..., H]."""
        if self._codes is not None:
            return self._codes.rows(tokens)
        assert self.table is not None
        return F.embedding(tokens, self.table)


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 and rounded to x's dtype (arXiv 1910.07467)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: [D], or [H, D] with a row per head; for families that store w - 1, the caller has added the 1."""
        self.weight = weight.float()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Norm [..., D] or [..., H, D]; gives the same shape."""
        return rowwise.rms_norm(x, self.weight, self._eps)

    def behind(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Add y [..., D] to x; gives the sum and its norm."""
        return rowwise.add_rms_norm(x, y, self.weight, self._eps)


class DividedRMSNorm:
    """RMS norm in groups of channels that several ranks have parts of: they add up their sums of squares."""

    def __init__(
        self, weight: Tensor, eps: float, groups: Tensor, num_groups: int, group_size: int, ranks: Ranks
    ) -> None:
        """Make the norm of this rank's channels.

        Args:
            weight: [D], of this rank's channels.
            eps: added to the mean of the squares.
            groups: [D] int64, the group of every one of them.
            num_groups: on all ranks.
            group_size: channels of a group, counted on every rank that has them.
            ranks: that have the channels.
        """
        self.weight, self._eps, self._ranks = weight.float(), eps, ranks
        self._groups, self._num_groups = groups.to(weight.device), num_groups
        self._scale = 1.0 / group_size

    def __call__(self, x: Tensor) -> Tensor:
        """Norm [..., D] in float32, rounded to x's dtype; gives the same shape."""
        wide = x.float()
        sums = wide.new_zeros((*x.shape[:-1], self._num_groups)).index_add_(-1, self._groups, wide.square())
        means = self._ranks.all_reduce(sums).mul_(self._scale)
        return (wide * (means + self._eps).rsqrt().index_select(-1, self._groups) * self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Cosines and sines of one forward's positions, each [B, L, 1, rotary_dim]."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """Rotary position embedding over the first part of each head (RoFormer, arXiv 2104.09864, section 3.4)."""

    def __init__(self, inverse_frequencies: Tensor, scaling: float = 1.0) -> None:
        """inverse_frequencies: [rotary_dim / 2] float32; scaling: factor of cosines and sines."""
        self._inverse_frequencies = torch.cat([inverse_frequencies, inverse_frequencies]).float()
        self._scaling = scaling

    def angles(self, positions: Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Cosines and sines at positions [B, L] int64, computed in float32 and rounded to ``dtype``."""
        return RotaryAngles(*rowwise.rotary_angles(positions, self._inverse_frequencies, self._scaling, dtype))


class RecurrentLayer(Generic[W]):
    """The projections of a recurrent layer, and the weights of the operators between them."""

    def __init__(
        self, state_layer: int, shape: StateShape, project: Linear, out: Callable[[Tensor], Tensor], weights: W
    ) -> None:
        """Make the layer from its projections and weights.

        Args:
            state_layer: where this layer's state lives in the state pool.
            shape: of the state.
            project: hidden size -> the operators' inputs, side by side; see the layer.
            out: the operators' outputs -> hidden size.
            weights: of the operators.
        """
        self._state_layer, self._shape = state_layer, shape
        self._in, self._out, self._weights = project, out, weights
