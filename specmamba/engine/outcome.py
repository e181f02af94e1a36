"""What a step decides: on the device, and for one request on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from specmamba.core import Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step decided, on the device."""

    verdict: Verdict
    features: Tensor  # [B, N, F], the target's, of the nodes
    packed: Tensor  # [B, 3 + N + 1] int64, all that the host wants to know: accepted, sound, drafted, path tokens

    def first(self, num_rows: int) -> Outcome:
        """Without the rows that are padding."""
        v = self.verdict
        columns = (x[:num_rows] for x in (v.path, v.num_accepted, v.path_tokens, v.bonus, v.is_sound))
        return replace(
            self, verdict=Verdict(*columns), features=self.features[:num_rows], packed=self.packed[:num_rows]
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What one step decided for one request, on the host."""

    tokens: tuple[int, ...]  # accepted drafts, then the bonus token
    num_drafted: int
    is_sound: bool  # False: the target's logits are not finite, and the tokens mean nothing

    @classmethod
    def read(cls, row: Sequence[int]) -> Decision:
        """From a row of ``Outcome.packed``."""
        count, is_sound, num_drafted, *tokens = row
        return cls(tuple(tokens[: count + 1]), num_drafted, bool(is_sound))
