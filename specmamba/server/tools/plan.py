"""What a request's tools mean for its prompt, its grammar and the reading of its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from specmamba.core import GrammarSpec
from specmamba.server.errors import ApiError
from specmamba.server.tools.definitions import NamedTool, Tool
from specmamba.server.tools.events import AnswerParser, PlainText
from specmamba.server.tools.families import Family, family_of, new_parser
from specmamba.server.tools.forced import NamedCall, RequiredCall, any_call_grammar, arguments_grammar

MAX_CALLS = 128  # of one answer
ParserName = Literal["auto", "hermes", "qwen3-xml", "nemotron", "none"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How a request's tools are offered to the model and read from its answer.

    ``template_tools``: the tools given to the chat template; None: none. ``grammar``: of the whole answer, if a call is
    forced. ``called``: the finish reason of an answer that ended by itself and holds calls.
    """

    template_tools: Sequence[dict[str, Any]] | None = None
    grammar: GrammarSpec | None = None
    new_parser: Callable[[], AnswerParser] = field(default=PlainText)
    called: Literal["stop", "tool_calls"] = "tool_calls"


def plan_tools(
    tools: Sequence[Tool],
    choice: Literal["none", "auto", "required"] | NamedTool,
    parallel: bool,
    template: str,
    parser: ParserName,
) -> ToolPlan:
    """``template``: the checkpoint's chat template for tools. ``parser``: what ``--tool-call-parser`` says.

    Raises:
        ApiError: 400; the model has no way to choose, or the schemas cannot be made into a grammar.
    """
    if choice == "none":
        return ToolPlan()
    told = [tool.for_template() for tool in tools] if "tools" in template else None
    if choice == "auto":
        family = _family(template, parser)
        if told is None or family is None:
            raise _cannot_choose(told is None)
        _refuse_strict(tools)
        schemas = {tool.function.name: tool.function.schema_of_arguments for tool in tools}
        max_calls = MAX_CALLS if parallel else 1
        return ToolPlan(told, None, lambda: new_parser(family, schemas, max_calls))
    try:
        return _forced(tools, choice, told)
    except PydanticCustomError as error:
        raise ApiError(400, f"tools: {error.message()}", param="tools", code=error.type) from None


def _family(template: str, parser: ParserName) -> Family | None:
    if parser == "auto":
        return family_of(template)
    return None if parser == "none" else parser


def _forced(
    tools: Sequence[Tool], choice: Literal["required"] | NamedTool, told: list[dict[str, Any]] | None
) -> ToolPlan:
    if choice == "required":
        grammar = any_call_grammar([(tool.function.name, tool.function.schema_of_arguments) for tool in tools])
        return ToolPlan(told, grammar, RequiredCall)
    name = choice.function.name
    function = next(tool.function for tool in tools if tool.function.name == name)
    # OpenAI's answers end with "stop" where the request has named the function.
    return ToolPlan(told, arguments_grammar(function.schema_of_arguments), lambda: NamedCall(name), "stop")


def _cannot_choose(template_knows_no_tools: bool) -> ApiError:
    if template_knows_no_tools:
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
