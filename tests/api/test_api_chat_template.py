"""Chat templates: their variables, which of them clients may set, and the marks of tool calls in answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specmamba.config import DEMO_MODEL
from specmamba.errors import RequestError
from specmamba.models.text.tokenizer import Detokenizer, Tokenizer
from specmamba.templates.rendering import variables_of

TEMPLATE = (
    "{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ eos_token }}"
)
USER = {"role": "user", "content": "u"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's tokenizer with another template, and with tokens for tool calls that it calls special."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL / name, tmp_path / name)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    for i, content in enumerate(("<tool_call>", "</tool_call>")):
        like = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"].append({**like, "id": 4096 + i, "content": content, "special": True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def written(tokenizer: Tokenizer, *args: Any) -> str:
    return tokenizer.decode(tokenizer.apply_chat_template(*args), skip_special_tokens=False)


def test_tools_calls_and_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"a": "é"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert written(tokenizer, [USER]) == "<user>u<|endoftext|>"
    assert written(tokenizer, [USER, turn], tools) == '[now]<user>u<assistant>{"a": "é"}<|endoftext|>'
    assert written(tokenizer, [USER], None, {"enable_thinking": False}) == "<user>u<think></think><|endoftext|>"


def test_the_role_developer_becomes_system_for_templates_without_it(folder: Path) -> None:
    message = {"role": "developer", "content": "u"}
    assert written(Tokenizer(folder), [message]) == "<system>u<|endoftext|>"
    (folder / "chat_template.jinja").write_text(TEMPLATE + "{# developer #}")
    assert written(Tokenizer(folder), [message]) == "<developer>u<|endoftext|>"


@pytest.mark.parametrize(
    "name",
    [
        "chat_template", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
        "eos_token", "conversations", "return_assistant_tokens_mask", "enable_think", "", "a b", "enable_thinking\n",
        ".*", "m", "call", "for", "role", "loop", "raise_exception", "range", "tojson", "strftime_now",
    ],
)  # fmt: skip
def test_clients_can_only_set_variables_that_the_template_reads(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError) as refusal:
        tokenizer.apply_chat_template([USER], None, {name: "{{ 1 }}"})
    assert refusal.value.param == "chat_template_kwargs"


def test_the_variables_that_a_template_reads() -> None:
    template = (
        "{% generation %}{{ a }}{% endgeneration %}"
        "{% set b = b or 1 %}{% if c is defined %}{{ b }}{% endif %}{# d #}{{ 'e' }}{% set f = 1 %}{{ f }}"
        "{% for m in messages %}{% if g %}{% continue %}{% endif %}{{ m.h }}{{ range(2) }}{% endfor %}"
    )
    assert variables_of(template) == {"a", "b", "c", "g", "messages"}
    assert variables_of("{% if %}") == frozenset()


@pytest.mark.parametrize(
    "program",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% include 'tokenizer.json' %}",
    ],
)
def test_templates_run_in_a_sandbox(folder: Path, program: str) -> None:
    (folder / "chat_template.jinja").write_text(program)
    with pytest.raises(RequestError) as refusal:
        Tokenizer(folder).apply_chat_template([USER])
    assert refusal.value.param == "messages"


def test_text_of_clients_is_not_executed(tokenizer: Tokenizer) -> None:
    message = {"role": "user", "content": "{{ 6 * 7 }}"}
    assert "{{ 6 * 7 }}" in written(tokenizer, [message])


def test_a_template_of_its_own_for_tools(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_template() == "plain"
    assert tokenizer.chat_template(with_tools=True) == "with {{ tools }}"
    assert written(tokenizer, [USER], [{"a": 1}]) == "with [{'a': 1}]"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates[1:]}))
    assert Tokenizer(folder).chat_template() is None


def test_marks_of_tool_calls_are_part_of_an_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<tool_call>{}</tool_call><|im_end|><|endoftext|>")
    assert (ids[0], ids[-2:]) == (4096, [2, 0])
    assert tokenizer.decode(ids) == "<tool_call>{}</tool_call>"
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "<tool_call>{}</tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_end|><|endoftext|>")
    assert tokenizer.token_bytes(4096) == b"<tool_call>"
    assert tokenizer.token_bytes(5000) is None


def test_every_token_of_the_demo_has_the_bytes_it_writes() -> None:
    tokenizer = Tokenizer(DEMO_MODEL)
    text = "def f(x):\n    return 'héllo → 世界 🙂'\n"
    assert b"".join(tokenizer.token_bytes(i) or b"" for i in tokenizer.encode(text)).decode() == text
