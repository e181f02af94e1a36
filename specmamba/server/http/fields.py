"""Field types of request bodies: what is accepted, and how the rest is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specmamba.flags.near_names import did_you_mean
from specmamba.flags.other_names import OTHER_FIELDS
from specmamba.sampling_params import MAX_BIASES, MAX_STOP_STRINGS, SpeculationParams, StopString

# Tags begin with a bracket, which distinguishes them from field names in the location of an error.
STRING, STRINGS, TOKENS, TOKEN_LISTS, PARTS = "(string)", "(strings)", "(tokens)", "(token lists)", "(parts)"
MAX_PROMPTS, MAX_PARTS = 16_384, 4096
FLAG, OBJECT = "(flag)", "(object)"
_LONG_TEXT, _CHARACTERS_PER_TOKEN = 1 << 20, 8
_BIASED_TOKEN = re.compile(r"0|[1-9][0-9]{0,9}")


def shortened(text: str, most: int = 300) -> str:
    """Text of a client, cut to ``most`` characters for an error message."""
    return text if len(text) <= most else f"{text[:most]}..."


def longest_text(context_length: int, fitting: int | None = None) -> int:
    """How many characters a call may hand over to be tokenized, or a template may write: a megabyte in any case.

    Args:
        context_length: of the model, in tokens.
        fitting: characters that this many tokens can have; None: the tokenizer knows no bound.
    """
    return max(_LONG_TEXT, fitting or _CHARACTERS_PER_TOKEN * context_length)


def is_encodable(text: str) -> bool:
    """Whether UTF-8 has bytes for a text: JSON may have half of a surrogate pair in it, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_encodable(text: str) -> str:
    if not is_encodable(text):
        raise PydanticCustomError("invalid_unicode", "has half of a surrogate pair, which is no character")
    return text


# For texts that an answer repeats: it could not be written.
EncodableText = Annotated[str, AfterValidator(_check_encodable)]


class StrictModel(BaseModel):
    """A JSON object without unknown fields. Types are not converted: ``"16"`` is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _fields_are_known(cls, value: Any) -> Any:
        # Pydantic would report every unknown field: for a million of them that would take gigabytes.
        names = value if isinstance(value, dict) else ()
        known = {field.alias or name for name, field in cls.model_fields.items()} if names else set()
        for name in names:
            if name not in known:
                # Pydantic cannot write an error that contains a lone surrogate.
                field = name[:100].encode("utf8", "replace").decode("utf8")
                hint = near_field(field, known).replace("{", "{{").replace("}", "}}")
                message = f"there is no such field{hint}"
                raise PydanticCustomError("unknown_field", message, {"field": field})
        return value


def near_field(field: str, known: Collection[str]) -> str:
    """A half sentence that names the field which another runtime calls so, or the nearest one, or nothing."""
    here = OTHER_FIELDS.get(field)
    return f"; it is {here} here" if here in known else did_you_mean(field, known)


def only(*neutral: object) -> BeforeValidator:
    """For a field of OpenAI that is not supported yet: accept null and the ``neutral`` values, refuse all others."""

    def check(value: object) -> object:
        if value is None or any(type(value) is type(other) and value == other for other in neutral):
            return value
        allowed = " or ".join(["null", *map(json.dumps, neutral)])
        message = "this server does not support this field yet: leave it out, or send {allowed}"
        raise PydanticCustomError("not_supported", message, {"allowed": allowed})

    return BeforeValidator(check)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _bias_keys(value: object) -> object:
    """Convert the keys, which are strings in JSON, to token ids. Each id is accepted in one spelling only."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", "at most {most} tokens can be biased", {"most": MAX_BIASES})
    wrong = next((key for key in value if not _BIASED_TOKEN.fullmatch(str(key))), None)
    if wrong is not None:
        raise PydanticCustomError("bias_key", "{key} is not a token id", {"key": repr(shortened(str(wrong), 40))})
    return {int(key): bias for key, bias in value.items()}


LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]],
    BeforeValidator(_bias_keys),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100.0, "maximum": 100.0},
            "propertyNames": {"pattern": f"^({_BIASED_TOKEN.pattern})$"},
            "maxProperties": MAX_BIASES,
        }
    ),
]


def _kind_of_prompt(value: object) -> str | None:
    if isinstance(value, str):
        return STRING
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    return STRINGS if isinstance(first, str) else TOKEN_LISTS if isinstance(first, list) else TOKENS


def _kind(when_list: str) -> Callable[[object], str | None]:
    def kind(value: object) -> str | None:
        return STRING if isinstance(value, str) else when_list if isinstance(value, list) else None

    return kind


class TextPart(StrictModel):
    """A part of a message. Images, sound and files are refused: the model reads text."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:  # before an error reports the fields of an image as unknown
        if isinstance(value, dict) and value.get("type", "text") != "text":
            raise PydanticCustomError("not_supported", 'only parts of type "text" are supported', {"field": "type"})
        return value


Prompt = Annotated[
    Annotated[str, Tag(STRING)]
    | Annotated[list[TokenId], Field(min_length=1, fail_fast=True), Tag(TOKENS)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag(STRINGS)]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        Tag(TOKEN_LISTS),
    ],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of strings, a list of token ids, or a list of such lists",
    ),
]

Stop = Annotated[
    Annotated[StopString, Tag(STRING)]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), Tag(STRINGS)],
    Discriminator(
        _kind(STRINGS), custom_error_type="stop_type", custom_error_message="must be a string or a list of strings"
    ),
]


class SpeculationFields(StrictModel, SpeculationParams):
    """How a request is drafted for."""


def _kind_of_speculation(value: object) -> str | None:
    return FLAG if isinstance(value, bool) else OBJECT if isinstance(value, dict | SpeculationParams) else None


Speculation = Annotated[
    Annotated[bool, Tag(FLAG)] | Annotated[SpeculationFields, Tag(OBJECT)],
    Discriminator(
        _kind_of_speculation,
        custom_error_type="speculative_type",
        custom_error_message="must be a boolean or a JSON object",
    ),
]

MessageContent = Annotated[
    Annotated[str, Tag(STRING)]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag(PARTS)],
    Discriminator(
        _kind(PARTS), custom_error_type="content_type", custom_error_message="must be a string or a list of text parts"
    ),
]

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # of metadata; the lengths in characters


def _short_pairs(value: object) -> object:
    if not isinstance(value, dict):
        return value
    pairs = value.items() if len(value) <= MAX_PAIRS else ()
    is_short = all(isinstance(one, str) and len(key) <= MAX_KEY and len(one) <= MAX_VALUE for key, one in pairs)
    if len(value) > MAX_PAIRS or not is_short:
        message = "must be at most {pairs} pairs of strings, of {key} characters to {value} at most"
        raise PydanticCustomError("metadata", message, {"pairs": MAX_PAIRS, "key": MAX_KEY, "value": MAX_VALUE})
    if not all(is_encodable(key) and is_encodable(one) for key, one in pairs):
        raise PydanticCustomError("invalid_unicode", "has half of a surrogate pair, which is no character")
    return value


Metadata = Annotated[
    dict[str, str],
    BeforeValidator(_short_pairs),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
            "propertyNames": {"maxLength": MAX_KEY},
            "maxProperties": MAX_PAIRS,
        }
    ),
]
