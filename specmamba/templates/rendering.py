"""Chat templates: their sandbox, the variables that clients may set, and the rendering of a conversation.

The sandbox has what templates find in transformers. This module imports neither torch nor transformers, so that the
process that renders starts fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NoReturn

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from specmamba.errors import RequestError, TemplateLimitError

# Variables of the renderer itself; ``chat_template`` and the like are options of other renderers.
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "raise_exception",
        "return_assistant_tokens_mask",
        "strftime_now",
        "tools",
    }
)
# Variables by which templates turn reasoning on and off; each reads one of them at the most.
_SWITCHES = ("enable_thinking", "thinking")
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Effort = ReasoningEffort | Literal["on", "off"]  # these two: where a template has a switch; else as it likes
# Fields of a message that hold its reasoning; templates read one of the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is rendered with: plain values of JSON."""

    template: str
    special_tokens: Mapping[str, Any] = field(default_factory=dict)  # by their names as variables
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the client, read by the template alone
    mark: str = ""  # one character, inside every special token that a client wrote; "": there is none
    effort: Effort | None = None  # of the client; it becomes one of the variables


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a conversation, up to the beginning of the assistant's answer."""

    marked: str
    mark: str = ""  # as in ``Conversation``

    @property
    def text(self) -> str:
        """The text without marks."""
        return without_mark(self.marked, self.mark)


def without_mark(text: str, mark: str) -> str:
    """Remove a mark, also where a template has written its escape of JSON."""
    return text.replace(mark, "").replace(escape_of(mark), "") if mark else text


def escape_of(mark: str) -> str:
    """A character as JSON may write it."""
    return json.dumps(mark)[1:-1]


def render(conversation: Conversation, most_characters: int | None = None) -> RenderedChat:
    """Render a conversation up to the beginning of the assistant's answer, in a sandbox without side effects.

    Neither template nor messages are trusted. Time and memory are not limited here: ``TemplateRenderer`` does that.

    Raises:
        RequestError: the template refuses these messages, or does not read one of the variables.
        TemplateLimitError: the text has more than ``most_characters``, or memory ran out.
    """
    template, mark = conversation.template, conversation.mark
    try:
        check_variables(template, conversation.special_tokens, conversation.variables)
        variables = {**conversation.variables, **_of_effort(conversation)}
        pieces = _compiled(template).generate(
            messages=[_as_templates_read(message, template) for message in conversation.messages],
            tools=conversation.tools,
            documents=None,
            add_generation_prompt=True,
            **conversation.special_tokens,
            **variables,
        )
        return RenderedChat(_joined(pieces, most_characters), mark)
    except RequestError:
        raise
    except MemoryError:
        raise TemplateLimitError("needs too much memory") from None
    # A template is a program over the client's input: any error in it is an error of that request.
    except Exception as error:
        reason = without_mark(str(error) or type(error).__name__, mark)
        raise RequestError(f"the model's chat template refuses these messages: {reason}", "messages") from error


def check_variables(template: str, special_tokens: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
    """Raise RequestError for a variable that the template does not read, or that clients may not set."""
    for name in variables:
        if name in RESERVED or name in special_tokens:
            problem = "is not for clients to set"
        elif name in variables_of(template):
            continue
        else:
            problem = "is nothing that the model's chat template reads"
        raise RequestError(f"{name[:100]!r} {problem}", "chat_template_kwargs")


def _of_effort(conversation: Conversation) -> dict[str, Any]:
    """The variable that says how much the model thinks. Raises RequestError where the template reads none."""
    effort = conversation.effort
    if effort is None:
        return {}
    read = variables_of(conversation.template)
    wanted = "none" if effort == "off" else effort
    switch = next(({name: wanted != "none"} for name in _SWITCHES if name in read), {})
    level = {"reasoning_effort": wanted} if "reasoning_effort" in read and wanted != "on" else {}
    chosen = switch if wanted == "none" and switch else level or switch
    if not chosen and effort not in ("on", "off"):
        problem = "is nothing that the model's chat template reads, nor does it read enable_thinking"
        raise RequestError(f"'reasoning_effort' {problem}", "reasoning_effort")
    other = next((name for name in chosen if conversation.variables.get(name, chosen[name]) != chosen[name]), None)
    if other is not None:
        message = f"reasoning_effort: {effort!r} does not go together with chat_template_kwargs.{other}"
        raise RequestError(message, "reasoning_effort")
    return chosen


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """The variables that a template reads and does not define; empty where it is not a valid template.

    Constant expressions of the template are evaluated, which may take any time and memory.
    """
    environment = _environment()
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(names - environment.globals.keys())


def _as_templates_read(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Rename the role "developer" for templates without it; give reasoning under the names that templates read."""
    fields = dict(message)
    if fields.get("role") == "developer" and "developer" not in template:
        fields["role"] = "system"  # else the template would leave the message out
    reasoning = next((fields[name] for name in _REASONING if fields.get(name) is not None), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _joined(pieces: Iterator[str], most: int | None) -> str:
    written, length = [], 0
    for piece in pieces:
        length += len(piece)
        if most is not None and length > most:
            raise TemplateLimitError(f"writes more than {most} characters")
        written.append(piece)
    return "".join(written)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


class _Generation(Extension):
    """``{% generation %}``, which marks answers in templates and adds nothing to the text."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        text: str = caller()
        return text


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with "_", which Python gives a meaning."""

    def __init__(*args: Any, **fields: Any) -> None:  # a field may be called "self"
        Namespace.__init__(*args, **fields)
        for name in dict(*args[1:], **fields):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a field of a namespace cannot be called {name!r}")


class _Dict:
    """``dict`` of templates: it makes dictionaries and, unlike Python's, has no other attributes."""

    def __call__(self, *items: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*items, **fields)

    def fromkeys(self, *items: Any) -> dict[Any, Any]:
        return dict.fromkeys(*items)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it stands in a prompt. Jinja's own filter writes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
