"""The flags of the handoff benchmark."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from specmamba.measure.report import Count, JsonOption, split_numbers

FEWEST_ASKED = 17  # tokens of a prompt that a decode server asks for: fewer missing ones it computes itself
PromptTokens = Annotated[int, Field(ge=FEWEST_ASKED)]


class HandoffsBenchConfig(JsonOption):
    """Prefill and decode apart, beside one server."""

    prompt_tokens: Annotated[
        Annotated[tuple[PromptTokens, ...], Field(min_length=1)],
        BeforeValidator(split_numbers),
        Field(description="tokens of the prompts whose handoff is timed"),
    ] = (256, 1024, 4000)
    streams: Annotated[Count, Field(description="streams that run while long prompts arrive")] = 4
    stream_prompt_tokens: Annotated[PromptTokens, Field(description="tokens of the prompt of each stream")] = 64
    stream_tokens: Annotated[int, Field(ge=2, description="new tokens of each stream")] = 1024
    arrival_tokens: Annotated[PromptTokens, Field(description="tokens of each long prompt that arrives")] = 1024
    arrival_interval: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds from one arrival to the next")
    ] = 1.0
    rounds: Annotated[Count, Field(description="rounds of everything; medians over them are reported")] = 3
    startup_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds that each server may take to load")
    ] = 600.0

    @model_validator(mode="after")
    def _two_servers_have_threads(self) -> HandoffsBenchConfig:
        if self.num_threads == 1:
            raise ValueError("--num-threads 1: two servers share these threads: give at least 2")
        for name in ("tp_size", "disable_radix_cache"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"--{name.replace('_', '-')}: servers that hand prompts over do not have this")
        return self
