"""Fields of request bodies that ask for structured output, and the grammars that they mean.

vLLM's names (``guided_json`` and its like, ``structured_outputs``) mean what this server's own fields do.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from specmamba.grammar.ebnf import literal, one_of
from specmamba.sampling_params import MAX_GRAMMAR_CHARACTERS, GrammarSpec
from specmamba.server.http.fields import STRING, StrictModel, only

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Choice = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]],
    Field(min_length=1, max_length=4096, fail_fast=True),
]


def _kind_of_schema(value: object) -> str | None:
    return STRING if isinstance(value, str) else "(object)" if isinstance(value, dict) else None


JsonSchema = Annotated[
    Annotated[GrammarText, Tag(STRING)] | Annotated[dict[str, Any], Tag("(object)")],
    Discriminator(
        _kind_of_schema, custom_error_type="schema_type", custom_error_message="must be a JSON schema: object or string"
    ),
]


class StructuredOutputs(StrictModel):
    """vLLM's object of structured output; it has one of the first five fields."""

    json_: Annotated[JsonSchema | None, Field(alias="json", description="JSON that this schema allows")] = None
    regex: Annotated[GrammarText | None, Field(description="a text that this expression matches")] = None
    choice: Annotated[Choice | None, Field(description="one of these texts")] = None
    grammar: Annotated[GrammarText | None, Field(description="a text that these rules (GBNF) derive")] = None
    json_object: Annotated[bool | None, Field(description="true: any JSON object")] = None

    disable_fallback: Annotated[bool | None, Field(description="changes nothing: there is one backend")] = None
    disable_any_whitespace: Annotated[Literal[False] | None, only(False)] = None
    disable_additional_properties: Annotated[Literal[False] | None, only(False)] = None
    whitespace_pattern: Annotated[None, only()] = None
    structural_tag: Annotated[None, only()] = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        asked = [name for name, spec in self.specs().items() if spec is not None]
        if len(asked) != 1:
            message = "send one of json, regex, choice, grammar and json_object" + (", not {fields}" if asked else "")
            problem = "two_grammars" if asked else "no_grammar"
            raise PydanticCustomError(problem, message, {"fields": " and ".join(asked)})
        return self

    def specs(self) -> dict[str, GrammarSpec | None]:
        """The grammar of each field, by the field's name; None: it is not given."""
        return {
            "json": of_schema(self.json_, "json"),
            "regex": of_text("regex", self.regex),
            "choice": of_choice(self.choice, "choice"),
            "grammar": of_text("ebnf", self.grammar),
            "json_object": GrammarSpec(kind="json_object") if self.json_object else None,
        }


def of_text(kind: Literal["regex", "ebnf"], text: str | None) -> GrammarSpec | None:
    """The grammar of an expression or of rules."""
    return None if text is None else GrammarSpec(kind=kind, text=text)


def of_choice(texts: list[str] | None, field: str) -> GrammarSpec | None:
    """The grammar of one of some texts, as rules. Errors as for ``of_schema``."""
    if texts is None:
        return None
    rules = "root ::= " + one_of([literal(text) for text in dict.fromkeys(texts)])
    _check_length(rules, field, "the choices have {length} characters as rules")
    return GrammarSpec(kind="ebnf", text=rules)


def of_schema(schema: str | dict[str, Any] | None, field: str) -> GrammarSpec | None:
    """The grammar of a JSON schema.

    Raises:
        PydanticCustomError: it is no JSON object, or too long; the error names ``field``.
    """
    if schema is None:
        return None
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        is_object = isinstance(json.loads(text, parse_constant=_no_number), dict)
    except (ValueError, RecursionError):  # not JSON; NaN or infinity; nested too deeply
        raise wrong(field, "invalid_schema", "the schema is not valid JSON") from None
    if not is_object:
        raise wrong(field, "invalid_schema", "the schema must be a JSON object")
    _check_length(text, field, "the schema has {length} characters")
    return GrammarSpec(kind="json_schema", text=text)


def _check_length(text: str, field: str, message: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        words = {"length": len(text), "most": MAX_GRAMMAR_CHARACTERS}
        raise wrong(field, "too_long", message + ", but at most {most} are taken", **words)


def _no_number(name: str) -> None:
    raise ValueError(name)


def wrong(field: str, code: str, message: str, **words: object) -> PydanticCustomError:
    """An error that names a field of the model whose validator raises it."""
    return PydanticCustomError(code, message, {"field": field, **words})
