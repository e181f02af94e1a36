"""What a step decides: on the device, and for one request on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from specmamba.core import DraftView, TokenLogprob, Verdict
from specmamba.engine.logprobs import PathLogprobs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step decided, on the device."""

    verdict: Verdict
    features: Tensor  # [B, N, F], the target's, of the nodes
    packed: Tensor  # [B, 3 + N + 1] int64, all that the host wants to know: accepted, sound, drafted, path tokens
    tokens: Tensor  # [B, N] int64, the drafts; for people who look on
    parents: Tensor  # [B, N] int64
    logprobs: PathLogprobs | None = None  # None: nobody asked

    def first(self, num_rows: int) -> Outcome:
        """Without the rows that are padding."""
        v = self.verdict
        columns = (x[:num_rows] for x in (v.path, v.num_accepted, v.path_tokens, v.bonus, v.is_sound))
        return replace(
            self,
            verdict=Verdict(*columns),
            features=self.features[:num_rows],
            packed=self.packed[:num_rows],
            tokens=self.tokens[:num_rows],
            parents=self.parents[:num_rows],
        )

    def draft_of(self, place: int, request_id: str, decided: Sequence[int]) -> DraftView:
        """One request's draft, read from the device, and what was decided of it."""
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
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What one step decided for one request, on the host."""

    tokens: tuple[int, ...]  # accepted drafts, then the bonus token
    num_drafted: int
    is_sound: bool  # False: the target's logits are not finite, and the tokens mean nothing
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens, where the request asks for them
    error: str | None = None  # the request cannot go on, and the tokens mean nothing

    @classmethod
    def read(cls, row: Sequence[int]) -> Decision:
        """From a row of ``Outcome.packed``."""
        count, is_sound, num_drafted, *tokens = row
        return cls(tuple(tokens[: count + 1]), num_drafted, bool(is_sound))
