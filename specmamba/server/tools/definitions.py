"""The fields of requests that define tools, choose among them, and repeat earlier calls."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from specmamba.sampling_params import MAX_GRAMMAR_CHARACTERS
from specmamba.server.http.fields import STRING, EncodableText, StrictModel
from specmamba.server.tools.formats import MAX_DEPTH, can_be_written, is_shallow, read_json

MAX_TOOLS = 128

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Check that a JSON object can be written, and is neither too large nor nested too deeply."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise PydanticCustomError("invalid_json", "must be JSON without NaN, and not nested too deeply") from None
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        words = {"most": MAX_GRAMMAR_CHARACTERS}
        raise PydanticCustomError("too_long", "must have at most {most} characters", words)
    _check_depth(value)
    if not can_be_written(value):
        raise PydanticCustomError("invalid_unicode", "has half of a surrogate pair, which is no character")
    return value


def _check_depth(value: dict[str, Any]) -> dict[str, Any]:
    if not is_shallow(value):
        raise PydanticCustomError("too_deep", "must be nested at most {most} deep", {"most": MAX_DEPTH})
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]


def _describes_an_object(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise PydanticCustomError("no_object", 'must be the schema of an object: {"type": "object", ...}')
    return value


class FunctionDefinition(StrictModel):
    """A function that the model may ask the client to call."""

    name: ToolName
    description: EncodableText | None = None
    parameters: Annotated[JsonObject | None, AfterValidator(lambda value: value and _describes_an_object(value))] = None
    strict: Annotated[bool | None, Field(description="true only where tool_choice forces a call")] = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments. Without ``parameters`` no arguments are allowed."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


def _only_functions(value: object) -> object:
    if isinstance(value, str) and value != "function":
        raise PydanticCustomError("not_supported", 'only tools of type "function" are supported')
    return value


FunctionType = Annotated[Literal["function"], BeforeValidator(_only_functions)]


class Tool(StrictModel):
    """A tool of the client."""

    type: FunctionType
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it, without ``strict``."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.function.schema_of_arguments}}


class FunctionName(StrictModel):
    """The name of one of the tools."""

    name: ToolName


class NamedTool(StrictModel):
    """The one tool that must be called."""

    type: FunctionType
    function: FunctionName


Choice = Annotated[Literal["none", "auto", "required"], Tag(STRING)]


def choice_or_one(one: type[StrictModel], of: str) -> Discriminator:
    """Tell a ``Choice`` from the object, of the class ``one`` and the tag "(object)", that names one ``of`` several."""

    def kind(value: object) -> str | None:
        return STRING if isinstance(value, str) else "(object)" if isinstance(value, dict | one) else None

    return Discriminator(
        kind,
        custom_error_type="tool_choice_type",
        custom_error_message=f'must be "none", "auto", "required" or an object that names one of the {of}',
    )


ToolChoice = Annotated[Choice | Annotated[NamedTool, Tag("(object)")], choice_or_one(NamedTool, "tools")]


def _names_differ(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PydanticCustomError("duplicate_tool", "two tools are called {name}", {"name": twice})
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_names_differ)]


class CalledFunction(StrictModel):
    """The function and the arguments of an earlier call."""

    name: ToolName
    arguments: Annotated[str, Field(max_length=1 << 20, description="a JSON object, written out")]


class EarlierCall(StrictModel):
    """A tool call of an earlier answer, sent back unchanged."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: FunctionType
    function: CalledFunction
    index: Annotated[int | None, Field(ge=0, description="changes nothing: streamed calls carry it")] = None

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it: the arguments are an object."""
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": self.read()}}

    def read(self) -> dict[str, Any]:
        """The arguments, parsed. Raises ValueError when they are not a JSON object."""
        values = read_json(self.function.arguments or "{}")
        if not isinstance(values, dict):
            raise ValueError("no object")
        return _check_depth(values)
