"""The keywords of ``LLM`` and ``AsyncLLM``: a configuration of what is given, and errors in the words of Python."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from specmamba.config import EngineConfig
from specmamba.errors import ConfigError, SpecmambaError
from specmamba.flags.command_line import describe_validation_error
from specmamba.flags.near_names import as_keywords
from specmamba.flags.other_names import OTHER_NAMES, OTHER_PARAMS, SPECULATIVE, translated
from specmamba.flags.settings import variable_of
from specmamba.sampling_params import SamplingParams

logger = logging.getLogger("specmamba")

_OF_REQUESTS = frozenset({*SamplingParams.model_fields, *OTHER_PARAMS})


def config_of(keywords: Mapping[str, Any]) -> EngineConfig:
    """The configuration of these keywords, over the environment.

    Names of other runtimes are translated, and a note of each is logged.

    Raises:
        ConfigError: a keyword is unknown, or a value or a combination is not valid. A value that the environment set is
            said to come from there.
    """
    if of_requests := [name for name in keywords if name not in _known() and name in _OF_REQUESTS]:
        raise ConfigError(f"{of_requests[0]}: there is no such keyword; it is one of SamplingParams, which calls take")
    try:
        fields, notes = translated(keywords)
    except ConfigError as error:
        raise in_keywords(error) from None
    for note in notes:
        logger.warning("%s", as_keywords(note, _known()))
    if fields.get("model", "") is None:
        del fields["model"]  # the environment may name one

    def origin(name: str) -> str:
        variable = None if name in fields else variable_of(name)
        return "" if variable is None else f" (from the environment: {variable})"

    try:
        return EngineConfig(**fields)
    except ValidationError as error:
        in_flags = describe_validation_error(error, EngineConfig.model_fields, origin)
        named = [str(problem["loc"][0]) for problem in error.errors() if problem["loc"]]
        raise in_keywords(ConfigError(in_flags), named) from None


def in_keywords(error: SpecmambaError, names: Collection[str] = ()) -> SpecmambaError:
    """The same error, whose message speaks of flags, in the words of Python; ``names``: keywords beside the known."""
    error.in_flags = str(error)
    known = _known() | {*names}
    said = [str(part).replace("no such flag", "no such keyword") for part in error.args]
    error.args = tuple(as_keywords(part, known) for part in said)
    return error


def _known() -> set[str]:
    return {*EngineConfig.model_fields, *OTHER_NAMES, SPECULATIVE}
