"""Field types of the HTTP interface: what is accepted, and how the rest is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
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

from specmamba.core import MAX_BIASES, MAX_STOP_STRINGS, StopString


def shortened(text: str, most: int = 300) -> str:
    """Text that quotes a client, cut to what an error message can bear."""
    return text if len(text) <= most else f"{text[:most]}..."


class StrictModel(BaseModel):
    """A JSON object of which every field is known. Types are not guessed: ``"16"`` is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _fields_are_known(cls, value: Any) -> Any:
        # Pydantic would report each unknown field by itself: a body of a million of them would cost gigabytes.
        names = value if isinstance(value, dict) else ()
        known = {field.alias or name for name, field in cls.model_fields.items()} if names else set()
        for name in names:
            if name not in known:
                # Half of a surrogate pair must not get into an error: pydantic cannot write it out.
                field = name[:100].encode("utf8", "replace").decode("utf8")
                raise PydanticCustomError("unknown_field", "there is no such field", {"field": field})
        return value


def only(*neutral: object) -> BeforeValidator:
    """For a field of OpenAI's that is not supported yet: let the values pass that ask for nothing, refuse the rest."""

    def check(value: object) -> object:
        if value is None or any(type(value) is type(other) and value == other for other in neutral):
            return value
        allowed = " or ".join(["null", *map(json.dumps, neutral)])
        message = "this server does not support this field yet: leave it out, or send {allowed}"
        raise PydanticCustomError("not_supported", message, {"allowed": allowed})

    return BeforeValidator(check)


# Tags begin with a bracket so that they can be told from field names in the place of an error.
STRING, STRINGS, TOKENS, TOKEN_LISTS, PARTS = "(string)", "(strings)", "(tokens)", "(token lists)", "(parts)"


MAX_PROMPTS, MAX_PARTS = 16_384, 4096


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


_BIASED_TOKEN = re.compile(r"0|[1-9][0-9]{0,9}")


def _bias_keys(value: object) -> object:
    """JSON has no keys but strings; they must be token ids, each in the one way to write it."""
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
    """A piece of a message. Images, sound and files are refused: the model reads text."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:  # runs before the fields of an image are found to be unknown
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


MessageContent = Annotated[
    Annotated[str, Tag(STRING)]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag(PARTS)],
    Discriminator(
        _kind(PARTS), custom_error_type="content_type", custom_error_message="must be a string or a list of text parts"
    ),
]
