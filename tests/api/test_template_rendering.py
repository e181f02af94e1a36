"""Chat templates render as transformers renders them."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specmamba.config import DEMO_MODEL
from specmamba.errors import RequestError, TemplateLimitError
from specmamba.templates.rendering import Conversation, RenderedChat, render

CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"zone": "é <b>", "n": [1, None]}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  hé\n{{ 1 }} 🙂  "},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "12°", "tool_call_id": "1"},
]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "demo": (DEMO_MODEL / "chat_template.jinja").read_text("utf8"),
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "tools": "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{{ t | tojson(indent=2) }}{% endfor %}"
    "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.arguments | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=true) }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}{{ eos_token }}",
    "blocks": "  {% if true %}\n    a\n  {% endif %}\nb\n  {# gone #}\n{%- if tools is none %} x {%- endif %}\nc\n",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
    "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}\n{{ m.content }}{% endgeneration %}|{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, self=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ ns.self }}{{ dict(a=1) }}{{ dict.fromkeys([1], 2) }}{{ documents }}{{ documents is defined }}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{{ m.reasoning }}{% endfor %}",
    "macro": "{% macro one(m) %}<{{ m.role }}>{{ caller() }}{% endmacro %}"
    "{% for m in messages %}{% call one(m) %}{{ m.content }}{% endcall %}{% endfor %}{{ 'é' | upper }}",
    "time": "{{ strftime_now('%Y %Z') | length }}{{ strftime_now is defined }}",
}
REFUSED = {
    "raises": "{{ raise_exception('no system') }}",
    "raises by a message": "{{ messages[9].content.x }}",
    "unsafe": "{{ messages.append(1) }}",
    "unsafe class": "{{ dict.__class__.__mro__[1].__subclasses__() }}",
    "unsafe namespace": "{{ namespace(_a=1) }}",
    "unsafe field": "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "range": "{% for i in range(1000000) %}{% endfor %}",
    "syntax": "{% for %}",
    "include": "{% include 'x' %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "with tools"])
def test_as_transformers_renders_it(name: str, tools: list[dict[str, Any]] | None) -> None:
    template, conversation = TEMPLATES[name], Conversation(TEMPLATES[name], SPECIAL, MESSAGES, tools)
    expected = render_jinja_template([MESSAGES], tools, chat_template=template, add_generation_prompt=True, **SPECIAL)
    assert render(conversation).text == expected[0][0]


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_as_transformers_refuses_it(name: str) -> None:
    with pytest.raises(Exception) as expected:
        render_jinja_template([MESSAGES], chat_template=REFUSED[name], **SPECIAL)
    with pytest.raises(RequestError, match="refuses these messages: ") as caught:
        render(Conversation(REFUSED[name], SPECIAL, MESSAGES))
    if not name.startswith("unsafe "):  # worded differently
        assert str(expected.value) in str(caught.value)


def test_a_text_is_limited() -> None:
    assert render(Conversation("{{ 'ab' }}{{ 'c' }}"), 3).text == "abc"
    with pytest.raises(TemplateLimitError, match="writes more than 2 characters"):
        render(Conversation("{{ 'ab' }}{% for i in range(9) %}{{ 'c' }}{% endfor %}"), 2)
    with pytest.raises(TemplateLimitError, match="memory"):
        render(Conversation("{{ 'a' * 10 ** 17 }}"))


def test_marks_are_removed_in_every_form() -> None:
    mark = "\ufdd0"
    assert RenderedChat(f"a<{mark}b", mark).text == "a<b"
    template = "{{ [messages[0].content] | tojson }}{{ messages[0].content | tojson(ensure_ascii=True) }}"
    rendered = render(Conversation(template, messages=[{"content": f"a{mark}b"}], mark=mark))
    assert rendered.text == '["ab"]"ab"'
    with pytest.raises(RequestError, match=re.escape("messages: xab")):
        render(
            Conversation("{{ raise_exception('x' + messages[0].content) }}", {}, [{"content": f"a{mark}b"}], mark=mark)
        )


def test_the_process_that_renders_loads_nothing_heavy() -> None:
    code = (
        "import specmamba.templates.template_worker, sys; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
