"""The conversations that the demo learns from, their tokens, and the exam about them."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specmamba.bench.demo import exam
from specmamba.bench.demo.checkpoint import END_OF_TEXT, END_OF_TURN, WindowSampler
from specmamba.bench.demo.talks import docstrings, functions
from specmamba.bench.demo.talks.conversations import conversations
from specmamba.bench.demo.talks.talk import TEMPLATE, Talk, assistant, is_held_out, question, user
from specmamba.bench.demo.talks.tokens import MixedSampler, chat_tokens
from specmamba.bench.demo.talks.tool_needs import definition
from specmamba.config import DEMO_MODEL
from specmamba.errors import ConfigError
from specmamba.server.tools.choice import MAX_CALLS, family_of, new_parser
from specmamba.server.tools.parsing import PlainText, whole_answer
from specmamba.server.tools.reasoning import ReasonedAnswer, ReasoningFormat
from specmamba.templates.rendering import Conversation, render, variables_of
from specmamba.train import corpus

KINDS = {
    *("chatter", "definition", "unknown", "arithmetic", "docstring", "function"),
    *("tool call", "tool result", "two calls", "no tool"),
}


def some(count: int, seed: int = 0, *, held_out: bool = False) -> list[Talk]:
    return list(itertools.islice(conversations(seed, held_out=held_out), count))


@pytest.fixture(scope="module")
def talks() -> list[Talk]:
    return some(600)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def test_one_seed_gives_one_stream_and_another_seed_another(talks: list[Talk]) -> None:
    assert some(50) == talks[:50]
    assert some(50, seed=1) != talks[:50]


def test_every_kind_of_talk_comes(talks: list[Talk]) -> None:
    assert {talk.kind for talk in talks} == KINDS
    assert any(talk.thinks for talk in talks)
    assert not all(talk.thinks for talk in talks)
    assert any(message["role"] == "system" for talk in talks for message in talk.messages)
    assert max(Counter(talk.kind for talk in talks).values()) < 0.4 * len(talks)


def test_a_talk_is_the_served_prompt_and_the_answer(talks: list[Talk]) -> None:
    """What is trained is what a server renders, up to the answer, and then the answer."""
    template = TEMPLATE.read_text("utf8")
    for talk in talks[:200]:
        thinking = {"enable_thinking": True} if talk.thinks else {}
        served = render(
            Conversation(template, messages=talk.messages[:-1], tools=talk.tools or None, variables=thinking)
        )
        assert talk.text == f"{served.text}{talk.answer}\n"
        assert served.text == talk.prompt
        assert talk.answer.endswith("<|im_end|>")


def test_pieces_are_the_text_and_all_answers_are_learned(talks: list[Talk]) -> None:
    for talk in talks[:200]:
        pieces = talk.pieces()
        assert "".join(text for text, _ in pieces) == talk.text
        learned = [text for text, is_learned in pieces if is_learned]
        assert len(learned) == sum(message["role"] == "assistant" for message in talk.messages)
        assert learned[-1] == talk.answer


def test_held_out_questions_are_not_trained(talks: list[Talk]) -> None:
    def last_question(talk: Talk) -> str:
        return next(str(message["content"]) for message in reversed(talk.messages) if message["role"] == "user")

    kept = some(100, held_out=True)
    assert all(is_held_out(last_question(talk)) for talk in kept)
    trained = {last_question(talk) for talk in talks if talk.kind not in ("chatter", "definition", "unknown")}
    assert not any(is_held_out(asked) for asked in trained)
    assert not {"chatter", "definition", "unknown"} & {talk.kind for talk in kept}


def test_the_server_reads_the_trained_answers(talks: list[Talk]) -> None:
    """Its parsers, chosen by the template alone, give the messages back: reasoning, text and calls."""
    template = TEMPLATE.read_text("utf8")
    family = family_of(template)
    assert family == "hermes"
    assert "enable_thinking" in variables_of(template)
    for talk in talks[:300]:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in talk.tools}
        parser = new_parser(family, schemas, MAX_CALLS) if talk.tools else PlainText()
        start = ReasoningFormat("qwen3").start(talk.prompt)
        assert start == ("open" if talk.thinks else "none")
        reader = parser if start == "none" else ReasonedAnswer(parser, start)
        events = [*reader.push(talk.answer.removesuffix("<|im_end|>")), *reader.finish()]
        said, message = whole_answer(events), talk.messages[-1]
        assert said.content == message["content"]
        assert said.reasoning == message.get("reasoning_content", "")
        calls = [(call.name, json.loads(call.arguments)) for call in said.calls]
        assert calls == [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]


def test_called_tools_are_offered_and_arguments_fit_their_schema(talks: list[Talk]) -> None:
    types = {"string": str, "integer": int, "number": int}
    called = 0
    for talk in talks:
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in talk.tools}
        assert len(offered) == len(talk.tools)
        for message in talk.messages:
            for call in message.get("tool_calls", ()):
                schema, arguments = offered[call["function"]["name"]], call["function"]["arguments"]
                assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
                for name, value in arguments.items():
                    field = schema["properties"][name]
                    assert isinstance(value, types[field["type"]])
                    assert value in field.get("enum", [value])
                called += 1
    assert called > 100


def test_the_template_renders_what_clients_send() -> None:
    """Tools without parameters or of odd schemas, arguments as text, a system's message and none."""
    odd = {"type": "object", "properties": {"x": True, "kind": {"type": ["string", "null"]}, "u": {"enum": [1, 2]}}}
    tools = [
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "odd", "description": "Odd.", "parameters": odd}},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [user("Hi"), assistant("Wait.") | {"tool_calls": [call]}, {"role": "tool", "content": "7"}]
    template = TEMPLATE.read_text("utf8")
    text = render(Conversation(template, messages=messages, tools=tools)).text
    assert text == (
        "<|im_start|>system\nTools:\nnow()\nodd(x?: any, kind?: any, u?: 1|2) Odd.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>\nWait.\n"
        '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n<think></think>\n"
    )
    system = {"role": "system", "content": "Be brief."}
    text = render(Conversation(template, messages=[system, user("Hi")], tools=tools[:1])).text
    assert text.startswith("<|im_start|>system\nBe brief.\nTools:\nnow()<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")
    text = render(Conversation(template, messages=[system, user("Hi")], variables={"enable_thinking": True})).text
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_written_functions_run() -> None:
    """Each is valid Python under its usual name and under another, recursion included."""
    arguments = {"a, b": (6, 3), "x": (4,), "n": (5,), "text": ("anna",), "items": ([3, 1, 2],), "name": ("Bo",)}
    for _, name, parameters, body in functions.FUNCTIONS:
        space: dict[str, object] = {}
        exec(f"def {name}({parameters}):\n    {body}\n", space)
        if parameters in arguments:
            assert space[name](*arguments[parameters]) is not None  # type: ignore[operator]
    renamed = next(talk for talk in some(4000) if re.search(r"def \w+\(n\):\n    return 1 if", talk.text))
    found = re.search(r"def (\w+)\(n\):\n    return 1 if n < 2 else n \* (\w+)\(", renamed.text)
    assert found is not None
    assert found[1] == found[2]


def test_docstrings_are_short_sentences_of_their_objects() -> None:
    sentences = docstrings.sentences()
    assert len(sentences) >= 40  # a few of them are longer in other versions of Python
    assert sentences["math.sqrt"] == "Return the square root of x."
    assert "os.path.join" in sentences
    assert all(10 < len(text) <= docstrings.MOST and text[-1] in ".!" for text in sentences.values())


def test_docstrings_come_from_no_held_out_file() -> None:
    modules = {name.split(".")[0] for name in docstrings.NAMES} | {"os.path"}
    files = {getattr(importlib.import_module(name), "__file__", None) for name in modules}
    names = {Path(file).name for file in files if file is not None}  # None: built into Python
    assert {"posixpath.py", "statistics.py", "glob.py"} <= names
    assert not any(corpus.is_held_out(name) for name in names)


def test_the_exam_writes_its_questions_as_prompts(tmp_path: Path) -> None:
    talks = some(20, held_out=True)
    exam.write_prompts(tmp_path / "questions.jsonl", talks)
    rows = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["continuation"]) for row in rows] == [(talk.prompt, talk.answer) for talk in talks]


def test_tokens_of_conversations_are_the_served_ones(tokenizer: Tokenizer) -> None:
    chat = chat_tokens(tokenizer, 40, seed=0)
    first = some(1)[0]
    prompt, answer = tokenizer.encode(first.prompt).ids, tokenizer.encode(first.answer).ids
    length = int(chat.starts[1])
    assert chat.tokens[: len(prompt) + len(answer)].tolist() == prompt + answer
    assert chat.tokens[length - 1] == END_OF_TEXT
    assert chat.learned[:length].nonzero().flatten().tolist() == list(range(len(prompt), len(prompt) + len(answer)))
    assert answer[-1] == END_OF_TURN
    assert chat.digest == chat_tokens(tokenizer, 40, seed=0).digest != chat_tokens(tokenizer, 40, seed=1).digest


def test_a_mixed_batch_begins_with_conversations(tokenizer: Tokenizer) -> None:
    chat = chat_tokens(tokenizer, 40, seed=0)
    code = WindowSampler(torch.full((500,), 7, dtype=torch.int16), seq=64, batch=4, seed=0)
    tokens, learned = MixedSampler(code, chat, share=0.5).next()
    assert tokens.shape == learned.shape == (4, 64)
    assert (tokens[:2, 0] == 1).all()  # <|im_start|>
    assert (tokens[2:] == 7).all()
    assert learned[2:].all()
    assert not learned[:2].all()
    with pytest.raises(ConfigError, match="--conversations"):
        MixedSampler(WindowSampler(torch.zeros(9000, dtype=torch.int16), 9000, 4, 0), chat, share=0.5)


def test_distinct_share() -> None:
    assert exam.distinct_share([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5
    assert exam.distinct_share(range(10)) == 1
    assert exam.distinct_share([1, 2, 3]) is None


def test_right_answers_are_recognised() -> None:
    plain = question("arithmetic", "2 + 2", "2 + 2 = 4", "I compute 2 plus 2.")
    assert exam.is_right(plain, "Well.\n</think>\n2 + 2 = 4")
    assert not exam.is_right(plain, "2 + 2 = 4")  # the reasoning was not ended
    tools = (definition("add", "Add.", {"a": "integer", "b": "integer"}),)
    call = Talk("tool call", (user("Add 1 and 2."), assistant("", "", [("add", {"a": 1, "b": 2})])), tools)
    assert exam.is_right(call, '<tool_call>{"name":"add","arguments":{"b":2,"a":1}}</tool_call>')
    assert not exam.is_right(call, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 3}}</tool_call>')
    assert not exam.is_right(call, '<tool_call>{"name": "add", "arguments": {"a": 1, "b"')
    assert not exam.is_right(call, "3")
    needless = Talk("no tool", (user("Hi"), assistant("Hello!")), tools)
    assert exam.is_right(needless, "Hello!")
    assert not exam.is_right(needless, 'Hello!<tool_call>{"name": "add", "arguments": {}}</tool_call>')
