"""How a drafted token changes the distribution of the next one: DSpark's Markov heads and DFlash2's selector.

A block head's logits at a depth, the marginal, do not know which token was drafted above. What is added to them is a
product of two low-rank matrices: R numbers of the token above, the *latent*, times R numbers of each token of the
vocabulary. It needs no other pass of the head, so a draft of D tokens stays one pass and D small products.

With a row w1[t] of R numbers for the token above, and h the block's hidden state that the marginal comes from:

- vanilla: the latent is w1[t];
- gated: w1[t] times the sigmoid of a projection of [h, w1[t]];
- rnn: a path carries a state s of R numbers, 0 above the root. A projection of [s, w1[t], h] gives three parts a, b, c.
  The next state is g s + (1 - g) tanh(b) with g the sigmoid of a, and the latent is tanh(c).

All three add the latent times w2 [V, R]. The selector of DFlash2 has the latent p[t] times a projection of h, and adds
its product with the rows of a second table; only the K likeliest tokens of the marginal can be drafted.

Sources: DeepSpec (``modeling/dspark``: Markov heads, where a block predicts), z-lab/dflash (``dflash/model.py``: the
selector), SGLang and vLLM (``models/dspark.py``, ``qwen3_dspark.py``, ``qwen3_dflash2.py``: the same with names and
shapes of the published checkpoints).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.layers.primitives import Linear
from specmamba.models.eagle import HeadWeights

MARKOV_KINDS = "vanilla", "gated", "rnn"


class MarkovLinks:
    """A Markov head of DSpark; ``TokenLinks`` describes the methods."""

    def __init__(self, weights: HeadWeights, kind: str, rank: int) -> None:
        """Load the head, of one of ``MARKOV_KINDS``. Raises CheckpointError: a tensor is missing or misshapen."""
        vocab_size, width, name = weights.config.vocab_size, weights.config.hidden_size, "markov_head."
        self._kind = kind
        self.latent_size, self.state_size = rank, rank if kind == "rnn" else 0
        self.table = weights.take(f"{name}markov_w1.weight", vocab_size, rank)  # [V, R], w1
        self._output: Linear = weights.head(weights.take_head(f"{name}markov_w2.weight", vocab_size, rank), vocab_size)
        self._mix: Linear | None = None
        if kind == "gated":
            self._mix = weights.take_linear(f"{name}gate_proj", rank, width + rank, has_bias=True)
        elif kind == "rnn":
            self._mix = weights.take_linear(f"{name}joint_proj", 3 * rank, 2 * rank + width, has_bias=True)

    def latent(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        above = F.embedding(tokens, self.table)
        if self._mix is None:
            return above, state
        hidden = hidden.expand(-1, tokens.shape[1], -1)
        if self._kind == "gated":
            return above * self._mix(torch.cat([hidden, above], -1)).sigmoid(), state
        keep, new, out = self._mix(torch.cat([state, above, hidden], -1)).chunk(3, -1)
        keep = keep.sigmoid()
        return out.tanh(), keep * state + (1 - keep) * new.tanh()

    def logits(self, marginal: Tensor, latent: Tensor) -> Tensor:
        return marginal.float() + self._output(latent).float()


class SelectorLinks:
    """The candidate selector of DFlash2; ``TokenLinks`` describes the methods."""

    state_size = 0

    def __init__(self, weights: HeadWeights, rank: int, num_candidates: int) -> None:
        """Load the selector. Raises CheckpointError: a tensor is missing or misshapen."""
        vocab_size, name = weights.config.vocab_size, "candidate_selector."
        self.latent_size, self._num_candidates = rank, num_candidates
        self._above, self._below = (
            weights.take(f"{name}{table}_codebook", vocab_size, rank) for table in ("predecessor", "successor")
        )
        self._projection = weights.take_linear(f"{name}hidden_projection", rank, weights.config.hidden_size)

    def latent(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return F.embedding(tokens, self._above) * self._projection(hidden), state

    def logits(self, marginal: Tensor, latent: Tensor) -> Tensor:
        values, candidates = marginal.topk(self._num_candidates, -1)
        below = F.embedding(candidates[:, 0], self._below)
        scores = values.float() + (latent @ below.mT).float()
        nowhere = scores.new_full((*latent.shape[:2], marginal.shape[2]), -torch.inf)
        return nowhere.scatter(-1, candidates.expand_as(scores), scores)
