"""Several answers to one prompt: what the engine is asked for, which of them are given, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specmamba.core import OutputDelta, SamplingParams
from specmamba.server.errors import ApiError
from specmamba.server.responses import Usage
from specmamba.server.streams import Ask
from specmamba.server_config import ServerConfig

if TYPE_CHECKING:
    from specmamba.grammar import CompiledGrammar


@dataclass(frozen=True, slots=True)
class Choices:
    """What a call asks for: ``per_prompt`` answers to each prompt, of which it gives ``kept``.

    The choices of prompt p are p * kept, p * kept + 1, ...; among the asks, p * per_prompt and those after it.
    """

    asks: Sequence[Ask]
    per_prompt: int = 1
    kept: int = 1

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        grammar: CompiledGrammar | None = None,
        *,
        per_prompt: int = 1,
        kept: int = 1,
    ) -> Choices:
        """Ask for every prompt ``per_prompt`` times, each time with a seed of its own where there is one."""
        seeded = [_reseeded(params, i) for i in range(per_prompt)]
        return cls([Ask(prompt, own, grammar) for prompt in prompts for own in seeded], per_prompt, kept)

    def best(self, outputs: Sequence[OutputDelta]) -> list[OutputDelta]:
        """Of whole answers to the asks, those to give: for each prompt the ones with the likeliest tokens."""
        if self.kept == self.per_prompt:
            return list(outputs)
        of_prompts = (outputs[first : first + self.per_prompt] for first in range(0, len(outputs), self.per_prompt))
        return [output for group in of_prompts for output in sorted(group, key=_badness)[: self.kept]]

    def usage(self, last_deltas: Mapping[int, OutputDelta]) -> Usage:
        """Of the asks that ended with these deltas, by the index of the ask: a prompt counts once."""
        ended = sorted(last_deltas)
        first_of = {index // self.per_prompt: index for index in reversed(ended)}
        return Usage.of([last_deltas[i] for i in ended], [last_deltas[i] for i in first_of.values()])


def check_number(count: int, param: str, num_prompts: int, config: ServerConfig) -> None:
    """Raises ApiError 400 for more choices than a call may have, or than could ever wait and run at once."""
    if count > config.max_choices:
        message = f"{param}: {count} choices, but this server gives at most {config.max_choices} (--max-choices)"
        raise ApiError(400, message, param=param)
    most = config.max_running_requests + config.max_queued_requests
    if num_prompts > most:
        raise ApiError(400, f"prompt: {num_prompts} prompts in a call, but at most {most} fit in", param="prompt")
    if num_prompts * count > most:
        message = f"{param}: {num_prompts} prompts with {count} choices each, but at most {most} answers fit in a call"
        raise ApiError(400, message, param=param)


def _reseeded(params: SamplingParams, index: int) -> SamplingParams:
    if params.seed is None or index == 0:
        return params
    seed = (params.seed + index + 2**63) % 2**64 - 2**63  # seeds are 64 bits and go round
    return params.model_copy(update={"seed": seed})


def _badness(output: OutputDelta) -> float:
    """Minus the mean log-probability of an answer's tokens; 0 for an answer without any."""
    return -sum(token.logprob for token in output.logprobs) / max(len(output.logprobs), 1)
