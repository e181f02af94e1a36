"""What a drafter offers for trees whose size is decided later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specmamba.kernels.draft_sizing import Ints

Floats32 = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Nodes from which the trees of a batch are chosen.

    A parent comes before its children, a sibling of a lower rank before those of higher ones.

    ``logp`` does not depend on a token that was drawn: then it belongs to the place among the siblings, so that whether
    a node is kept says nothing about its token.
    """

    tokens: Tensor  # [B, C] int64
    parents: Tensor  # [B, C] int64: 0 for the root, 1 + c for candidate c
    logp: Tensor  # [B, C] float32, log probability of a node after its parent, as the drafter says; -inf: none
    depths: Ints  # [C] or [B, C], 1 for children of the root
    ranks: Ints  # [C] or [B, C], among the siblings
    draft_probs: Tensor | None = None  # [B, E, V] float32, what children were drawn from; None: chosen
    entries: Tensor | None = None  # [B, 1 + C] int64: the distribution after the root and after each candidate

    def on_host(self, num_rows: int) -> tuple[Ints, Ints, Floats32]:
        """Return tokens, parents and log probabilities of the first rows; on a CPU they share the tensors' memory."""
        columns = self.tokens, self.parents, self.logp
        tokens, parents, logp = (x[:num_rows].cpu().numpy() for x in columns)
        return tokens, parents, logp
