"""What a request's tools and its ``tool_choice`` mean for its prompt, its grammar and the parsing of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from specmamba.sampling_params import MAX_GRAMMAR_CHARACTERS, GrammarSpec
from specmamba.server.http.error_answers import ApiError
from specmamba.server.tools.definitions import NamedTool, Tool
from specmamba.server.tools.formats import JsonScan
from specmamba.server.tools.json_calls import HEAD, JsonCalls
from specmamba.server.tools.parsing import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
    MarkedCalls,
    PlainText,
)
from specmamba.server.tools.xml_calls import XmlCall

# Under these keys a schema quotes values, in which "$ref" is not a reference.
_QUOTING = frozenset({"const", "default", "enum", "examples"})
MAX_CALLS = 128  # of one answer

Family = Literal["hermes", "qwen3-xml", "nemotron"]
Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by the names of the tools


def family_of(template: str) -> Family | None:
    """The family whose marks a chat template writes or describes; None when it does not use tools."""
    if "tools" not in template:
        return None
    if "<function=" in template and "<parameter=" in template:
        return "qwen3-xml"
    if "<TOOLCALL>" in template:
        return "nemotron"
    return "hermes" if "<tool_call>" in template else None


def new_parser(family: Family, schemas: Schemas, max_calls: int) -> AnswerParser:
    """A new parser for one answer of a model.

    - ``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen3-Next, Granite 4, Falcon-H1)
    - ``qwen3-xml``: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``
      (Qwen3.5, Nemotron 3)
    - ``nemotron``: ``<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`` (Nemotron Nano 2)

    Args:
        family: how the model writes calls.
        schemas: of the tools' parameters, by the names of the tools.
        max_calls: further calls are dropped.
    """
    match family:
        case "hermes":
            return MarkedCalls("<tool_call>", "</tool_call>", lambda: JsonCalls(schemas), max_calls)
        case "qwen3-xml":
            return MarkedCalls("<tool_call>", "</tool_call>", lambda: XmlCall(schemas), max_calls)
        case "nemotron":
            return MarkedCalls("<TOOLCALL>", "</TOOLCALL>", lambda: JsonCalls(schemas), max_calls)


class NamedCall:
    """``AnswerParser`` of an answer that consists of the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._opening: list[Event] = [CallBegin(name)]

    def push(self, text: str) -> list[Event]:
        opening, self._opening = self._opening, []
        return [*opening, CallArguments(text)] if text else opening

    def finish(self) -> list[Event]:
        return self.push("")


class RequiredCall:
    """``AnswerParser`` of ``{"name": ..., "arguments": {...}}``. Without arguments it is content."""

    def __init__(self) -> None:
        self._head = ""
        self._scan: JsonScan | None = None
        self._is_done = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._scan is None:
            self._head += text
            head = HEAD.match(self._head)
            if head is None:
                return []
            self._scan, text = JsonScan(), self._head[head.end() :]
            events.append(CallBegin(head[1]))
        if text and not self._is_done:
            size = self._scan.push(text)
            self._is_done = size is not None
            events.append(CallArguments(text[:size]))
        return events

    def finish(self) -> list[Event]:
        return [Content(self._head)] if self._scan is None and self._head else []


def arguments_grammar(parameters: Mapping[str, Any]) -> GrammarSpec:
    """The grammar of the arguments of one tool."""
    return _grammar(dict(parameters))


def any_call_grammar(tools: Sequence[tuple[str, Mapping[str, Any]]]) -> GrammarSpec:
    """The grammar of a call of any of these tools, given as pairs of name and parameters."""
    definitions: dict[str, Any] = {}
    calls = []
    for index, (name, parameters) in enumerate(tools):
        own = {key: value for key, value in parameters.items() if key != "$schema"}  # only allowed in a root
        definitions[f"{index}"] = _moved(own, index)
        for group in ("$defs", "definitions"):
            inner = parameters.get(group)
            if isinstance(inner, dict):
                definitions |= {f"{index}.{key}": _moved(schema, index) for key, schema in inner.items()}
        properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{index}"}}
        required = ["name", "arguments"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    return _grammar({"anyOf": calls, "$defs": definitions})


def _moved(schema: Any, index: int) -> Any:
    """A part of a tool's schema without its definitions; references point to where these have been moved."""
    if isinstance(schema, list):
        return [_moved(one, index) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            moved[key] = _moved_reference(value, index)
        elif key not in ("$defs", "definitions") or not isinstance(value, dict):
            moved[key] = value if key in _QUOTING else _moved(value, index)
    return moved


def _moved_reference(reference: str, index: int) -> str:
    if reference in ("#", "#/"):
        return f"#/$defs/{index}"
    for start in ("#/$defs/", "#/definitions/"):
        if reference.startswith(start) and "/" not in reference.removeprefix(start):
            return f"#/$defs/{index}.{reference.removeprefix(start)}"
    if reference.startswith("#/"):
        return f"#/$defs/{index}/{reference[2:]}"
    raise PydanticCustomError("reference", "$ref must begin with #", {"field": "tools"})


def _grammar(schema: Mapping[str, Any]) -> GrammarSpec:
    text = json.dumps(schema, allow_nan=False)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        message = "the schemas of the tools have {length} characters, but a forced call can have at most {most}"
        words = {"field": "tools", "length": len(text), "most": MAX_GRAMMAR_CHARACTERS}
        raise PydanticCustomError("too_long", message, words)
    return GrammarSpec(kind="json_schema", text=text)


ParserName = Literal["auto", "hermes", "qwen3-xml", "nemotron", "none"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How a request's tools are offered to the model, and how calls are read from its answers."""

    template_tools: Sequence[dict[str, Any]] | None = None  # given to the chat template; None: none
    grammar: GrammarSpec | None = None  # of the whole answer, when a call is forced
    new_parser: Callable[[], AnswerParser] = field(default=PlainText)  # called once for each answer
    called: Literal["stop", "tool_calls"] = "tool_calls"  # finish reason of an answer that stopped and has calls


def plan_tools(
    tools: Sequence[Tool],
    choice: Literal["none", "auto", "required"] | NamedTool,
    parallel: bool,
    template: str,
    parser: ParserName,
) -> ToolPlan:
    """Decide how the tools of a request are offered, forced and parsed.

    Args:
        tools: of the request.
        choice: its ``tool_choice``.
        parallel: whether an answer may have several calls.
        template: the checkpoint's chat template for tools.
        parser: the value of ``--tool-call-parser``.

    Raises:
        ApiError: 400; the model cannot choose among tools, or the schemas cannot be made into a grammar.
    """
    if choice == "none":
        return ToolPlan()
    template_tools = [tool.for_template() for tool in tools] if "tools" in template else None
    if choice == "auto":
        family = _family(template, parser)
        if template_tools is None or family is None:
            raise _cannot_choose(template_tools is None)
        _refuse_strict(tools)
        schemas = {tool.function.name: tool.function.schema_of_arguments for tool in tools}
        max_calls = MAX_CALLS if parallel else 1
        return ToolPlan(template_tools, None, lambda: new_parser(family, schemas, max_calls))
    try:
        return _forced(tools, choice, template_tools)
    except PydanticCustomError as error:
        raise ApiError(400, f"tools: {error.message()}", param="tools", code=error.type) from None


def _family(template: str, parser: ParserName) -> Family | None:
    if parser == "auto":
        return family_of(template)
    return None if parser == "none" else parser


def _forced(
    tools: Sequence[Tool], choice: Literal["required"] | NamedTool, template_tools: list[dict[str, Any]] | None
) -> ToolPlan:
    if choice == "required":
        grammar = any_call_grammar([(tool.function.name, tool.function.schema_of_arguments) for tool in tools])
        return ToolPlan(template_tools, grammar, RequiredCall)
    name = choice.function.name
    function = next(tool.function for tool in tools if tool.function.name == name)
    # OpenAI's answers end with "stop" where the request has named the function.
    return ToolPlan(template_tools, arguments_grammar(function.schema_of_arguments), lambda: NamedCall(name), "stop")


def _cannot_choose(template_has_no_tools: bool) -> ApiError:
    if template_has_no_tools:
        reason = "the model's chat template knows no tools"
    else:
        reason = "this server cannot read the model's tool calls (--tool-call-parser)"
    message = f'tools: {reason}, so it cannot choose among them: force a call with "tool_choice", or send "none"'
    return ApiError(400, message, param="tools", code="tools_not_supported")


def _refuse_strict(tools: Sequence[Tool]) -> None:
    index = next((index for index, tool in enumerate(tools) if tool.function.strict), None)
    if index is not None:
        param = f"tools[{index}].function.strict"
        message = f'{param}: arguments can only be held to their schema where "tool_choice" forces the call'
        raise ApiError(400, message, param=param, code="not_supported")
