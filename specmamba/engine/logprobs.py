"""How likely the model found tokens: of prompts as they are run, of outputs as they are decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.core import TokenLogprob, Verdict
from specmamba.kernels import sampling as sampling_ops

MAX_LOGITS = 1 << 24  # logits that are made at a time


@dataclass(frozen=True, slots=True)
class PathLogprobs:
    """Of the tokens that a step decided, on the device."""

    own: Tensor  # [B, N] float32, of path_tokens[:, :N]
    top: Tensor  # [B, N, K] float32
    top_tokens: Tensor  # [B, N, K] int64

    @classmethod
    def of(cls, logits: Tensor, verdict: Verdict, num_top: int) -> PathLogprobs:
        """From the target's logits [B, N, V], as it gave them."""
        index = verdict.path.clamp(min=0)[..., None].expand(-1, -1, logits.shape[-1])
        on_path = logits.gather(1, index)
        tokens = verdict.path_tokens[:, : logits.shape[1]].clamp(0, logits.shape[-1] - 1)  # padding may be anything
        return cls(*sampling_ops.token_logprobs(on_path, tokens, num_top))

    def read(self, tokens: Sequence[Sequence[int]], num_top: Sequence[int | None]) -> list[tuple[TokenLogprob, ...]]:
        """On the host, for the requests of a batch: so many of the likeliest for each; None: nothing."""
        columns = self.own.tolist(), self.top.tolist(), self.top_tokens.tolist()
        figures = []
        for decided, count, own, top, ids in zip(tokens, num_top, *columns, strict=True):
            figures.append(() if count is None else tuple(_listed(decided, own, top, ids, count)))
        return figures


def _listed(
    tokens: Sequence[int], own: Sequence[float], top: Sequence[list[float]], ids: Sequence[list[int]], count: int
) -> list[TokenLogprob]:
    entries = zip(tokens, own, top, ids, strict=False)  # there are more places than tokens
    return [
        TokenLogprob(token, logprob, tuple(zip(which[:count], values[:count], strict=True)))
        for token, logprob, values, which in entries
    ]


def of_known_tokens(
    hidden: Tensor, tokens: Sequence[int], logits: Callable[[Tensor], Tensor], vocab_size: int, num_top: int
) -> tuple[list[TokenLogprob], bool]:
    """Of tokens that are given: hidden states [L, H] in front of each of the ``tokens``, which are L.

    Returns:
        The figures, and whether all logits had a largest, so that they mean something.
    """
    found: list[TokenLogprob] = []
    is_sound = True
    step = max(1, MAX_LOGITS // vocab_size)
    for first in range(0, len(tokens), step):
        piece = list(tokens[first : first + step])
        made = logits(hidden[None, first : first + step]).squeeze(0)
        index = torch.tensor(piece, device=hidden.device)
        own, top, ids = sampling_ops.token_logprobs(made, index, num_top)
        found += _listed(piece, own.tolist(), top.tolist(), ids.tolist(), num_top)
        is_sound &= bool(sampling_ops.has_finite_max(made[None]).all())
    return found, is_sound
