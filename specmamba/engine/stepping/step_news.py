"""What a step has brought to requests, and the deltas that are made of it: while the next step runs, where it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specmamba.core import FinishReason, OutputDelta, SpecStats
from specmamba.engine.request import Request
from specmamba.engine.stepping.acceptance_watch import AcceptanceWatch
from specmamba.errors import RequestError
from specmamba.verify.result import StepResult


class StepNews(NamedTuple):
    """What one step has brought to one request, whose output has the tokens already."""

    request: Request
    result: StepResult
    num_tokens: int  # of the result, that belong to the output
    text: str | None  # None: it is still to be decoded
    reason: FinishReason | None  # why the request ends here
    is_first: bool  # its first delta

    @property
    def tokens(self) -> tuple[int, ...]:
        """New tokens of the output."""
        return self.result.tokens[: self.num_tokens]


News = StepNews | OutputDelta  # the last delta of a request that could not go on


def has_ended(news: News) -> bool:
    """Whether a request ends here."""
    return (news.finish_reason if isinstance(news, OutputDelta) else news.reason) is not None


class Reporter:
    """Makes deltas of news, and counts what was drafted and accepted by tenant."""

    def __init__(self, watch: AcceptanceWatch) -> None:
        """``watch`` sees every draft."""
        self._watch = watch
        self._spec_of: dict[str | None, SpecStats] = {}  # by tenant

    def spec_of(self, tenant: str | None) -> SpecStats:
        """Figures of one tenant's requests since the start."""
        return self._spec_of.get(tenant, SpecStats())

    @property
    def spec(self) -> SpecStats:
        """Figures of all requests since the start."""
        return sum(self._spec_of.values(), SpecStats())

    def forget(self) -> None:
        """Start counting anew."""
        self._spec_of.clear()

    def deltas(self, news: Sequence[News]) -> tuple[list[OutputDelta], list[tuple[Request, str]]]:
        """Tell the news of one step; the requests must not have got more tokens since.

        Returns:
            The deltas, and instead of those of requests whose text cannot be decoded, the requests and why.
        """
        deltas, undecoded = list[OutputDelta](), list[tuple[Request, str]]()
        steps: dict[str | None, list[tuple[int, int]]] = {}  # drafted and accepted tokens
        for each in news:
            if isinstance(each, OutputDelta):
                deltas.append(each)
                continue
            request, result, count, reason = each.request, each.result, each.num_tokens, each.reason
            tokens, text = each.tokens, each.text
            try:
                text = request.text.decode(tokens, reason) if text is None else text
            except RequestError as error:  # the tokenizer fails
                undecoded.append((request, str(error)))
                continue
            request.spec = request.spec.after_step(result.num_drafted, count - 1)
            steps.setdefault(request.owner.tenant, []).append((result.num_drafted, count - 1))
            self._watch.observe(result.num_drafted, len(result.tokens) - 1)
            depths = (*range(1, len(result.tokens)), 0)[:count]
            deltas.append(
                request.delta(
                    tokens, text, reason, is_first=each.is_first, depths=depths, logprobs=result.logprobs[:count]
                )
            )
        for tenant, counted in steps.items():
            self._spec_of[tenant] = self.spec_of(tenant).after_steps(counted)
        return deltas, undecoded
