"""What goes into the product with experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """Which experts each of T tokens goes to, and how much each counts."""

    experts: Tensor  # [T, k] int64, from 0 to E - 1, all different in a row
    weights: Tensor  # [T, k] float32


class Groups(NamedTuple):
    """The P = T k pairs of a token and an expert, sorted by expert and, among one expert's, by token."""

    places: Tensor  # [P] int64: where the pair of token t and its j-th expert, the (t k + j)-th, stands when sorted
    ends: Tensor  # [E] int32: where each expert's pairs end when sorted
