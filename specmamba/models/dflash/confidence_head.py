"""DSpark's confidence head: how likely it is that the token drafted at a place of a block is accepted.

It is one row of numbers and perhaps a bias, over the block's hidden state at that place and, beside a Markov head, the
row w1 of the token above (``token_links.py``); the result is a logit. It is trained to be the probability that the
target accepts a token drawn from the draft's distribution, given that it has accepted those above: one minus half the
sum of the differences between the two distributions, which is what acceptance by rejection gives.

Sources: DeepSpec (``modeling/dspark/common.py``: ``AcceptRatePredictor``; ``modeling/dspark/qwen3/modeling.py``: its
input), SGLang (``models/qwen3_dspark.py``: the same in float32, names and shapes of published checkpoints).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.models.eagle import HeadWeights

NAME = "confidence_head.proj"


class ConfidenceHead:
    """The logit of a place, in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, table: Tensor | None) -> None:
        """Make the head of its parts.

        Args:
            weight: [1, H], or [1, H + R] with a table.
            bias: [1] or None, float32 as ``weight``.
            table: [V, R], rows of the tokens above; None: they are not looked at.
        """
        self._weight, self._bias, self._table = weight, bias, table

    @classmethod
    def of(cls, weights: HeadWeights, knows_tokens: bool, table: Tensor | None) -> ConfidenceHead | None:
        """Load the head; None: there is none.

        Args:
            weights: of the block head.
            knows_tokens: whether its input has the row of the token above too.
            table: as for the head, where the block head has one.

        Raises:
            CheckpointError: a tensor is misshapen.
        """
        if not weights.reader.has(f"{NAME}.weight"):
            return None
        table = table if knows_tokens else None
        width = weights.config.hidden_size + (0 if table is None else table.shape[1])
        weight = weights.take(f"{NAME}.weight", 1, width, dtype=torch.float32)
        has_bias = weights.reader.has(f"{NAME}.bias")  # heads of the Qwen family have one, DeepSeek's have none
        return cls(weight, weights.take(f"{NAME}.bias", 1, dtype=torch.float32) if has_bias else None, table)

    def __call__(self, above: Tensor, hidden: Tensor) -> Tensor:
        """Judge the drafts of a block.

        Args:
            above: [B, D] int64, the token above each draft; the root's is the first.
            hidden: [B, D, H], of the block where the drafts are predicted.

        Returns:
            [B, D] float32, logits of being accepted after the token above.
        """
        features = hidden.float()
        if self._table is not None:
            features = torch.cat([features, F.embedding(above, self._table).float()], -1)
        return F.linear(features, self._weight, self._bias)[..., 0]
