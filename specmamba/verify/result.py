"""What a step decides: ``StepOutput`` stays on the device, ``StepResult`` is what the host reads of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmamba.core import DraftTree, DraftView, TokenLogprob, Verdict
from specmamba.kernels import sampling as sampling_ops

MAX_LOGITS = 1 << 24  # logits of known tokens that are computed at a time


class StepResult(NamedTuple):
    """What one step decided for one request, on the host."""

    tokens: tuple[int, ...]  # accepted drafts, then the bonus token
    num_drafted: int
    is_finite: bool  # False: the target's logits are not finite, and the tokens mean nothing
    listed: tuple[Any, ...] | None = None  # numbers of log probabilities, if the request asks for them

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Those of the tokens, if the request asks for them; made anew at every call."""
        return () if self.listed is None else tuple(_listed(self.tokens, *self.listed))


@dataclass(frozen=True, slots=True)
class PathLogprobs:
    """Log probabilities of the tokens that a step decided, on the device."""

    own: Tensor  # [B, N] float32, of path_tokens[:, :N]
    top: Tensor  # [B, N, K] float32
    top_tokens: Tensor  # [B, N, K] int64

    @classmethod
    def of(cls, logits: Tensor, verdict: Verdict, num_top: int) -> PathLogprobs:
        """Compute them from the target's logits [B, N, V], before biases, penalties and masks; K is V at the most."""
        index = verdict.path.clamp(min=0)[..., None].expand(-1, -1, logits.shape[-1])
        on_path = logits.gather(1, index)
        tokens = verdict.path_tokens[:, : logits.shape[1]].clamp(0, logits.shape[-1] - 1)  # padding may have any value
        return cls(*sampling_ops.token_logprobs(on_path, tokens, min(num_top, logits.shape[-1])))

    def first(self, num_rows: int) -> PathLogprobs:
        """Return those of the first ``num_rows`` rows."""
        return PathLogprobs(self.own[:num_rows], self.top[:num_rows], self.top_tokens[:num_rows])

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of them."""
        return self.own, self.top, self.top_tokens


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step decided, on the device."""

    verdict: Verdict
    features: Tensor  # [B, N, F], the target's, of the nodes
    packed: Tensor  # [B, 3 + N + 1] int64, for the host: accepted, finite, drafted, path tokens
    tokens: Tensor  # [B, N] int64, the drafts; shown by tools
    parents: Tensor  # [B, N] int64
    logprobs: PathLogprobs | None = None  # None: no request asks for them

    @classmethod
    def of(
        cls, tree: DraftTree, verdict: Verdict, logits: Tensor, features: Tensor, num_logprobs: int | None
    ) -> StepOutput:
        """Pack the values that the host reads into one tensor.

        Args:
            tree: the drafts.
            verdict: about them.
            logits: [B, N, V], the target's.
            features: [B, N, F], the target's, for the drafter.
            num_logprobs: likeliest tokens listed beside each decided token; None: no log probabilities.
        """
        num_drafted = (tree.shape.parents >= 0).sum(1)
        columns = torch.stack([verdict.num_accepted, verdict.is_finite, num_drafted], 1)
        packed = torch.cat([columns, verdict.path_tokens], 1)
        logprobs = None if num_logprobs is None else PathLogprobs.of(logits, verdict, num_logprobs)
        return cls(verdict, features, packed, tree.tokens, tree.shape.parents, logprobs)

    def first(self, num_rows: int) -> StepOutput:
        """Return the output of the first ``num_rows`` rows, without the padding rows after them."""
        if num_rows == self.packed.shape[0]:
            return self
        v = self.verdict
        columns = (x[:num_rows] for x in (v.path, v.num_accepted, v.path_tokens, v.bonus, v.is_finite))
        return replace(
            self,
            verdict=Verdict(*columns),
            features=self.features[:num_rows],
            packed=self.packed[:num_rows],
            tokens=self.tokens[:num_rows],
            parents=self.parents[:num_rows],
            logprobs=None if self.logprobs is None else self.logprobs.first(num_rows),
        )

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """What the host reads in every step, for ``results``: contiguous tensors."""
        return (self.packed,) if self.logprobs is None else (self.packed, *self.logprobs.columns)

    @staticmethod
    def results(columns: Sequence[Sequence[Any]], num_logprobs: Sequence[int | None]) -> list[StepResult]:
        """Make results of ``columns`` on the host.

        Args:
            columns: as nested lists.
            num_logprobs: likeliest tokens beside each token of each request; None: the request gets no entries. Not
                looked at where there are no log probabilities.
        """
        packed, *of_logprobs = columns
        results = []
        for count, is_finite, num_drafted, *tokens in packed:
            results.append(StepResult(tuple(tokens[: count + 1]), num_drafted, bool(is_finite)))
        if not of_logprobs:
            return results
        rows = zip(results, *of_logprobs, num_logprobs, strict=True)
        return [r if count is None else r._replace(listed=(*numbers, count)) for r, *numbers, count in rows]

    def draft_of(self, place: int, request_id: str, decided: Sequence[int], tenant: str | None = None) -> DraftView:
        """Read the draft of the request at index ``place`` from the device, with its ``decided`` tokens."""
        parents = self.parents[place].tolist()
        real = [node for node, parent in enumerate(parents) if parent >= 0 or node == 0]
        at = {node: i for i, node in enumerate(real)}
        tokens = self.tokens[place].tolist()
        path = self.verdict.path[place].tolist()[: len(decided)]
        return DraftView(
            request_id,
            tokens=tuple(tokens[node] for node in real),
            parents=tuple(at.get(parents[node], -1) for node in real),
            path=tuple(at[node] for node in path),
            bonus=decided[-1],
            tenant=tenant,
        )


def known_token_logprobs(
    hidden: Tensor, tokens: Sequence[int], logits: Callable[[Tensor], Tensor], vocab_size: int, num_top: int
) -> tuple[list[TokenLogprob], bool]:
    """Compute log probabilities of known tokens, in pieces of at most ``MAX_LOGITS`` logits.

    Args:
        hidden: [L, H], the target's hidden state at the position before each of the L ``tokens``.
        tokens: L token ids.
        logits: [1, L, H] -> [1, L, V].
        vocab_size: V.
        num_top: likeliest tokens listed beside each.

    Returns:
        The log probabilities, and whether every row of logits has a finite maximum; if not, they are invalid.
    """
    found: list[TokenLogprob] = []
    is_finite = True
    step = max(1, MAX_LOGITS // vocab_size)
    for first in range(0, len(tokens), step):
        piece = list(tokens[first : first + step])
        made = logits(hidden[None, first : first + step]).squeeze(0)
        index = torch.tensor(piece, device=hidden.device)
        own, top, ids = sampling_ops.token_logprobs(made, index, num_top)
        found += _listed(piece, own.tolist(), top.tolist(), ids.tolist(), num_top)
        is_finite &= bool(sampling_ops.has_finite_max(made[None]).all())
    return found, is_finite


def _listed(
    tokens: Sequence[int], own: Sequence[float], top: Sequence[list[float]], ids: Sequence[list[int]], count: int
) -> list[TokenLogprob]:
    entries = zip(tokens, own, top, ids, strict=False)  # the rows also have padding after the tokens
    return [
        TokenLogprob(token, logprob, tuple(zip(which[:count], values[:count], strict=True)))
        for token, logprob, values, which in entries
    ]
