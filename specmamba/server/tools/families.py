"""How families of models write tool calls, and which of them a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from specmamba.server.tools.events import AnswerParser
from specmamba.server.tools.json_calls import JsonCalls
from specmamba.server.tools.marked import MarkedCalls
from specmamba.server.tools.xml_calls import XmlCall

Family = Literal["hermes", "qwen3-xml", "nemotron"]
Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by the names of the tools


def family_of(template: str) -> Family | None:
    """The family whose marks a chat template writes or describes; None where it knows no tools."""
    if "tools" not in template:
        return None
    if "<function=" in template and "<parameter=" in template:
        return "qwen3-xml"
    if "<TOOLCALL>" in template:
        return "nemotron"
    return "hermes" if "<tool_call>" in template else None


def new_parser(family: Family, schemas: Schemas, max_calls: int) -> AnswerParser:
    """A parser of one answer, by a model that was offered tools with these parameters.

    - ``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen3-Next, Granite 4, Falcon-H1)
    - ``qwen3-xml``: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``
      (Qwen3.5, Nemotron 3)
    - ``nemotron``: ``<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`` (Nemotron Nano 2)
    """
    match family:
        case "hermes":
            return MarkedCalls("<tool_call>", "</tool_call>", lambda: JsonCalls(schemas), max_calls)
        case "qwen3-xml":
            return MarkedCalls("<tool_call>", "</tool_call>", lambda: XmlCall(schemas), max_calls)
        case "nemotron":
            return MarkedCalls("<TOOLCALL>", "</TOOLCALL>", lambda: JsonCalls(schemas), max_calls)
