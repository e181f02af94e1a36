"""The flags of ``specmamba generate``."""

from __future__ import annotations

import warnings
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from specmamba.config import EngineConfig
from specmamba.sampling_params import LogitSettings, Temperature


def _one_text(value: object) -> object:
    """Read a prompt of the environment, of a file or of Python, where it is one text."""
    return (value,) if isinstance(value, str) else value


_AsJson = Annotated[
    bool, Field(description="no stream: one JSON object for each prompt on standard output, a line each")
]

with warnings.catch_warnings():
    # The flag is called "json", and so is a deprecated method of pydantic, which nothing here calls.
    warnings.filterwarnings("ignore", 'Field name "json"', UserWarning)

    class GenerateConfig(LogitSettings, EngineConfig):
        """``specmamba generate``: one prompt, streamed to the terminal; with --json any number, as JSON."""

        needs_text = True

        prompt: Annotated[
            tuple[str, ...],
            BeforeValidator(_one_text),
            Field(description="the prompt; none: standard input; with --json it may be given again"),
        ] = ()
        max_tokens: Annotated[int, Field(ge=1, description="new tokens at the most")] = 128
        temperature: Temperature = 0.0
        stop: list[str] = Field([], description="a string that ends the text; may be given again")
        ignore_eos: Annotated[bool, Field(description="go on after the end-of-text token")] = False
        json: _AsJson = False  # type: ignore[assignment]

        @model_validator(mode="after")
        def _one_prompt_is_streamed(self) -> Self:
            if len(self.prompt) > 1 and not self.json:
                raise ValueError(f"--prompt: given {len(self.prompt)} times; add --json, or give it once")
            return self
