"""POST /tokenize and /detokenize, and the bytes of single tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from specmamba.config import DEMO_MODEL
from specmamba.models.text.tokenizer_backend import TokenBytes
from specmamba.templates.rendering import Conversation
from tests.fake_engine import FakeEngine, Served, serving
from tests.server.test_server import refused

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


def post(served: Served, path: str, **body: object) -> object:
    response = served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokenize(served: Served) -> None:
    length = served.engine.context_length
    assert post(served, "/tokenize", prompt="hé") == {
        "count": 3,
        "max_model_len": length,
        "tokens": list("hé".encode()),
    }
    assert post(served, "/tokenize", prompt="", model="specmamba-demo") == {
        "count": 0,
        "max_model_len": length,
        "tokens": [],
    }
    strings = post(served, "/tokenize", prompt="<bos>é", return_token_strs=True)["token_strs"]  # type: ignore[index]
    assert strings == ["<0>", *"<bos>", r"bytes:\xc3", r"bytes:\xa9"]
    assert post(served, "/tokenize", prompt="<bos>", add_special_tokens=False)["count"] == 5  # type: ignore[index]


def test_messages_use_the_chat_template(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = post(served, "/tokenize", messages=messages)["tokens"]  # type: ignore[index]
    assert bytes(tokens) == b"<user>hi<assistant>"
    assert served.chat(*messages).json()["usage"]["prompt_tokens"] == len(tokens)


def test_detokenize(served: Served) -> None:
    assert post(served, "/detokenize", tokens=[0, *"hé ".encode()]) == {"prompt": "<0>hé "}
    assert post(served, "/detokenize", tokens=[]) == {"prompt": ""}


def test_invalid_fields_are_refused_by_name(served: Served) -> None:
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"messages": [USER] * 4097}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]}, "messages[0].content"),
    ):
        refused(served.http.post("/tokenize", json=body), 400, param)
    headers = {"Content-Type": "application/json"}
    refused(served.http.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=headers), 400, "prompt")
    for tokens, param in (([256], "tokens"), ([-1], "tokens[0]"), ([2**40], "tokens[0]"), ("x", "tokens")):
        refused(served.http.post("/detokenize", json={"tokens": tokens}), 400, param)
    bodies: list[tuple[str, dict[str, Any]]] = [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})]
    for path, body in bodies:
        refused(served.http.post(path, json={**body, "model": "m" * 5000}), 404, "model", "model_not_found")


def test_large_texts(served: Served) -> None:
    text = "x" * ((1 << 20) + 1)
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        refused(served.http.post("/tokenize", json=body), 400, next(iter(body)), "too_long")
    found = post(served, "/tokenize", prompt=text[1:], return_token_strs=True)
    assert found["token_strs"] == ["x"] * (1 << 20)  # type: ignore[index]
    assert post(served, "/detokenize", tokens=[120] * 100_000) == {"prompt": "x" * 100_000}


def test_tools_and_variables_reach_the_chat_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        served.http.post("/tokenize", json={"messages": [USER], "tools": [TOOL]}), 400, "tools", "tools_not_supported"
    )
    seen: list[Any] = []

    def conversation(*given: Any) -> Conversation:
        seen.append(given)
        return Conversation("hi")

    tokenizer = served.engine.tokenizer
    monkeypatch.setattr(tokenizer, "conversation", conversation)
    monkeypatch.setattr(tokenizer, "chat_template", lambda with_tools=False: "{{ tools }} <tool_call>")
    asked = {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    assert post(served, "/tokenize", **asked)["count"] == 2  # type: ignore[index]
    assert served.http.post("/v1/chat/completions", json=asked).status_code == 200
    assert seen[0] == seen[1]
    assert seen[0][1:3] == ([TOOL | {"function": seen[0][1][0]["function"]}], {"enable_thinking": False})


def test_messages_need_a_template() -> None:
    with serving(FakeEngine(has_chat_template=False)) as served:
        response = served.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
        refused(response, 400, "messages", "no_chat_template")


# ---- the bytes of tokens ---------------------------------------------------------------------------------------------

DEMO = Backend.from_file(str(DEMO_MODEL / "tokenizer.json"))


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_bytes_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    tokens = TokenBytes(DEMO)
    assert b"".join(tokens.of(i) or b"" for i in DEMO.encode(text, add_special_tokens=False).ids) == text.encode()


def test_the_bytes_of_all_tokens() -> None:
    tokens = TokenBytes(DEMO)
    found = {tokens.of(i) for i in range(DEMO.get_vocab_size())}
    assert {bytes([byte]) for byte in range(256)} <= found
    assert tokens.of(0) == b"<|endoftext|>"
    assert tokens.of(DEMO.get_vocab_size()) is None


def backend(words: list[str], decoder: Any) -> Backend:
    made = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    made.decoder = decoder
    made.add_special_tokens(["<s>"])
    return made


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_bytes_of_sentencepiece_tokens(decoder: object) -> None:
    tokens = TokenBytes(backend(["▁a", "<0xE4>", "é▁", "<0xE"], decoder))
    assert [tokens.of(i) for i in range(5)] == [b" a", b"\xe4", "é ".encode(), b"<0xE", b"<s>"]


def test_other_vocabularies_stand_for_themselves() -> None:
    words = TokenBytes(backend(["▁a", "##b"], decoders.WordPiece()))
    assert [words.of(i) for i in range(2)] == ["▁a".encode(), b"b"]
    assert TokenBytes(backend(["Ġa"], None)).of(0) == "Ġa".encode()
