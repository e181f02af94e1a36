"""The fields of structured output: OpenAI's ``response_format``, and schema, expression and rules on their own."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError

from specmamba.core import MAX_GRAMMAR_CHARACTERS, GrammarSpec
from specmamba.server.fields import STRING, StrictModel

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON schema as OpenAI's clients send it. The answer keeps to it whether ``strict`` is set or not."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="changes nothing")]
    description: Annotated[str | None, Field(description="changes nothing")] = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Annotated[bool | None, Field(description="changes nothing")] = None


class JsonSchemaFormat(StrictModel):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _kind_of_format(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"({kind})" if kind in ("text", "json_object", "json_schema") else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("(text)")]
    | Annotated[JsonObjectFormat, Tag("(json_object)")]
    | Annotated[JsonSchemaFormat, Tag("(json_schema)")],
    Discriminator(
        _kind_of_format,
        custom_error_type="response_format_type",
        custom_error_message='must be an object whose "type" is "text", "json_object" or "json_schema"',
    ),
]


def _kind_of_schema(value: object) -> str | None:
    return STRING if isinstance(value, str) else "(object)" if isinstance(value, dict) else None


JsonSchema = Annotated[
    Annotated[GrammarText, Tag(STRING)] | Annotated[dict[str, Any], Tag("(object)")],
    Discriminator(
        _kind_of_schema, custom_error_type="schema_type", custom_error_message="must be a JSON schema: object or string"
    ),
]


class StructuredRequest(StrictModel):
    """What every answer must be a text of; at most one of the four."""

    response_format: Annotated[ResponseFormat | None, Field(description="the form of the whole answer")] = None
    json_schema: Annotated[JsonSchema | None, Field(description="extension: JSON that this schema allows")] = None
    regex: Annotated[GrammarText | None, Field(description="extension: a text that this expression matches")] = None
    ebnf: Annotated[GrammarText | None, Field(description="extension: a text that these rules (GBNF) derive")] = None
    ignore_eos: Annotated[
        bool | None, Field(description="extension: go on after the model's own end-of-text token")
    ] = None

    _grammar: tuple[str, GrammarSpec] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        asked = {name: spec for name, spec in self._specs().items() if spec is not None}
        if len(asked) > 1:
            message = "send one of {fields}"
            raise _wrong(list(asked)[-1], "two_grammars", message, fields=" and ".join(asked))
        if asked and self.ignore_eos:
            message = "an answer ends where its form is whole: ignore_eos does not go together with {other}"
            raise _wrong("ignore_eos", "ignore_eos", message, other=next(iter(asked)))
        object.__setattr__(self, "_grammar", next(iter(asked.items()), None))
        return self

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        """What structured output the request asks for."""
        return None if self._grammar is None else self._grammar[1]

    @property
    def grammar_field(self) -> str | None:
        """The field that asks for it."""
        return None if self._grammar is None else self._grammar[0]

    def _specs(self) -> dict[str, GrammarSpec | None]:
        return {
            "response_format": _of_response_format(self.response_format),
            "json_schema": None if self.json_schema is None else _of_schema(self.json_schema, "json_schema"),
            "regex": None if self.regex is None else GrammarSpec(kind="regex", text=self.regex),
            "ebnf": None if self.ebnf is None else GrammarSpec(kind="ebnf", text=self.ebnf),
        }


def _of_response_format(asked: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> GrammarSpec | None:
    match asked:
        case JsonObjectFormat():
            return GrammarSpec(kind="json_object")
        case JsonSchemaFormat():
            return _of_schema(asked.json_schema.schema_, "response_format")
    return None


def _of_schema(schema: str | dict[str, Any], field: str) -> GrammarSpec:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        is_object = isinstance(json.loads(text, parse_constant=_no_number), dict)
    except (ValueError, RecursionError):  # no JSON; a number that is none; nested without end
        raise _wrong(field, "invalid_schema", "the schema is not valid JSON") from None
    if not is_object:
        raise _wrong(field, "invalid_schema", "the schema must be a JSON object")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        message = "the schema has {length} characters, but at most {most} are taken"
        raise _wrong(field, "too_long", message, length=len(text), most=MAX_GRAMMAR_CHARACTERS)
    return GrammarSpec(kind="json_schema", text=text)


def _no_number(name: str) -> None:
    raise ValueError(name)


def _wrong(field: str, code: str, message: str, **words: object) -> PydanticCustomError:
    return PydanticCustomError(code, message, {"field": field, **words})
