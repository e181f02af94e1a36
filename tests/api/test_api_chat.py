"""Chat over HTTP: log-probabilities, several choices, structured output, and the fields that are refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import openai
import pytest

from specmamba.core import OutputDelta, TokenLogprob
from specmamba.errors import EngineStoppedError, RequestError
from specmamba.grammar import CompiledGrammar
from specmamba.sampling_params import GrammarSpec
from specmamba.server.api import structured
from specmamba.server.api.chat_format import ChatFormat
from specmamba.server.api.parsed_choice import ChatOptions
from specmamba.server.api.structured import Grammars
from specmamba.server.tools.choice import ToolPlan
from specmamba.server_config import ServerConfig
from tests.fake_engine import TEXT, FakeEngine, FakeTokenizer, Served, fake_logprob, serving
from tests.server.test_server import events, refused

USER = {"role": "user", "content": "u"}
SPEC, NEVER = GrammarSpec(kind="regex", text="a+"), GrammarSpec(kind="ebnf", text="never")


class ScriptedCompiler:
    """Answers by the text of a specification."""

    num_made = num_closed = 0
    refused: ClassVar[list[GrammarSpec]] = []

    def __init__(self, *_: object) -> None:
        type(self).num_made += 1

    def compile(self, spec: GrammarSpec, caller: str | None = None) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        match spec.text:
            case "wrong":
                future.set_exception(RequestError("'(' is never closed"))
            case "slow":
                error = RequestError("it takes more than 1 s")
                error.__cause__ = TimeoutError()
                future.set_exception(error)
            case "never":
                pass
            case _:
                future.set_result(CompiledGrammar(spec, None))
        return future

    def refuse(self, spec: GrammarSpec) -> None:
        self.refused.append(spec)

    def close(self) -> None:
        type(self).num_closed += 1


class SlowGrammarEngine(FakeEngine):
    """Ends every request that has a grammar, after its first step, because the grammar is too slow."""

    def step(self) -> list[OutputDelta]:
        return [self._ended(delta) if self._is_slow(delta) else delta for delta in super().step()]

    def _is_slow(self, delta: OutputDelta) -> bool:
        request = self.running.get(delta.request_id)
        return request is not None and request.params.grammar is not None

    def _ended(self, delta: OutputDelta) -> OutputDelta:
        del self.running[delta.request_id]
        return replace(delta, finish_reason="error", error="it is too slow", error_code="grammar_too_complex")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch, serving(FakeEngine(chunk=3)) as served:
        patch.setattr(structured, "GrammarCompiler", ScriptedCompiler)
        yield served


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs(served: Served) -> None:
    body = {"logprobs": True, "top_logprobs": 2, "max_tokens": 50}
    choice = served.chat(USER, **body).json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    data = TEXT.encode()[:50]
    assert [token["bytes"] for token in tokens] == [[byte] for byte in data]
    assert [token["logprob"] for token in tokens] == [fake_logprob(byte, None, 2).logprob for byte in data]
    first = fake_logprob(data[0], None, 2)
    assert tokens[0]["top_logprobs"] == [
        {"token": chr(token), "bytes": [token], "logprob": logprob} for token, logprob in first.top
    ]
    assert tokens[data.index("é".encode()[0])]["token"] == "bytes:\\xc3"
    streamed = [chunk["choices"][0] for chunk in events(served.chat(USER, stream=True, **body))]
    assert [token for chunk in streamed if chunk["logprobs"] for token in chunk["logprobs"]["content"]] == tokens
    assert "".join(chunk["delta"].get("content", "") for chunk in streamed) == choice["message"]["content"]


def test_logprobs_are_left_out_unless_asked_for(served: Served) -> None:
    assert served.chat(USER).json()["choices"][0]["logprobs"] is None
    assert served.chat(USER, logprobs=False, top_logprobs=0).json()["choices"][0]["logprobs"] is None
    assert served.engine.seen_params[-1].logprobs is None
    content = served.chat(USER, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []
    refused(served.chat(USER, top_logprobs=2), 400, "top_logprobs")
    refused(served.chat(USER, logprobs=True, top_logprobs=21), 400, "top_logprobs")
    refused(served.chat(USER, logprobs=3), 400, "logprobs")


def test_tokens_without_text_are_listed_too() -> None:
    options = ChatOptions(ToolPlan(), "none", 1, None)
    chat = ChatFormat("id", "model", FakeTokenizer(), options)  # type: ignore[arg-type]
    impossible = TokenLogprob(0xC3, -math.inf, ((65, -0.5), (1, -math.inf)))
    (chunk,) = chat.chunks(0, OutputDelta("id-0", (0xC3,), "", 1, 0, 1, logprobs=(impossible,)))
    choice = chunk.choices[0]
    assert choice.delta.content == ""
    assert choice.logprobs is not None
    assert choice.logprobs.content[0].logprob == -9999.0
    assert [top.bytes for top in choice.logprobs.content[0].top_logprobs] == [[65]]
    assert list(chat.chunks(0, OutputDelta("id-0", (), "", 1, 0, 1))) == []


# ---- choices, tokens, biases -----------------------------------------------------------------------------------------


def test_several_choices(served: Served) -> None:
    answer = served.chat(USER, n=3, seed=5, max_tokens=7, logit_bias={"65": -100}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [TEXT[:7]] * 3
    assert {params.seed for params in served.engine.seen_params[-3:]} == {5, 6, 7}
    assert served.engine.seen_params[-1].logit_bias == {65: -100.0}
    assert answer["usage"]["completion_tokens"] == 21
    texts = ["", "", ""]
    for chunk in events(served.chat(USER, n=3, max_tokens=7, stream=True)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert texts == [TEXT[:7]] * 3


def test_tokens_with_their_depths(served: Served) -> None:
    choice = served.chat(USER, return_tokens=True, max_tokens=40).json()["choices"][0]
    assert "".join(token["text"] for token in choice["tokens"]) == choice["message"]["content"]
    assert [token["depth"] for token in choice["tokens"]][:4] == [1, 2, 0, 1]
    chunks = events(served.chat(USER, return_tokens=True, max_tokens=40, stream=True))
    assert [token for chunk in chunks for token in chunk["choices"][0].get("tokens", ())] == choice["tokens"]
    assert "tokens" not in served.chat(USER).json()["choices"][0]


# ---- structured output -----------------------------------------------------------------------------------------------


def test_response_format_reaches_the_engine(served: Served) -> None:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        schema: Any = {
            "name": "s",
            "strict": True,
            "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
        }
        body: dict[str, Any] = {"model": "specmamba-demo", "messages": [USER], "max_tokens": 5}
        client.chat.completions.create(**body, response_format={"type": "json_schema", "json_schema": schema})
    grammar = served.engine.seen_params[-1].grammar
    assert grammar == GrammarSpec(
        kind="json_schema", text='{"type": "object", "properties": {"a": {"type": "integer"}}}'
    )
    served.chat(USER, response_format={"type": "json_object"})
    assert served.engine.seen_params[-1].grammar == GrammarSpec(kind="json_object")
    served.chat(USER, response_format={"type": "text"})
    assert served.engine.seen_params[-1].grammar is None


def test_grammars_that_cannot_be_used(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "never closed" in refused(served.chat(USER, regex="wrong"), 400, "regex", "invalid_grammar")
    refused(served.chat(USER, ebnf="slow"), 400, "ebnf", "grammar_too_complex")
    assert ScriptedCompiler.num_made == 1

    def without_xgrammar(*_: object) -> None:
        raise ModuleNotFoundError("no xgrammar")

    monkeypatch.setattr(structured, "GrammarCompiler", without_xgrammar)
    with serving() as fresh:
        response = fresh.chat(USER, response_format={"type": "json_object"})
        message = refused(response, 400, "response_format", "grammar_unavailable")
        assert "pip install 'specmamba[grammar]'" in message
        assert fresh.chat(USER).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_too_slow_while_it_is_used_is_refused_from_then_on(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(structured, "GrammarCompiler", ScriptedCompiler)
    monkeypatch.setattr(ScriptedCompiler, "refused", [])
    with serving(SlowGrammarEngine()) as served:
        assert served.chat(USER).status_code == 200
        answer = served.chat(USER, regex="bomb", stream=stream)
        assert "grammar_too_complex" in answer.text
        assert ScriptedCompiler.refused == [GrammarSpec(kind="regex", text="bomb")]


def test_a_grammar_waits_no_longer_than_a_request_and_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "GrammarCompiler", ScriptedCompiler)
    monkeypatch.setattr(ScriptedCompiler, "num_made", 0)
    monkeypatch.setattr(ScriptedCompiler, "num_closed", 0)
    constants: Any = SimpleNamespace(tokenizer=None, vocab_size=256, eos_token_ids=(0,))

    async def scenario() -> None:
        grammars = Grammars(ServerConfig(queue_timeout=1.5), constants)
        results = await asyncio.gather(
            *(grammars.compile(spec) for spec in (NEVER, SPEC, NEVER)), return_exceptions=True
        )
        assert [getattr(result, "status", None) for result in results] == [503, None, 503]
        assert isinstance(results[1], CompiledGrammar)
        assert ScriptedCompiler.num_made == 1
        grammars.close()
        grammars.close()
        assert ScriptedCompiler.num_closed == 1
        with pytest.raises(EngineStoppedError):
            await grammars.compile(SPEC)

    asyncio.run(scenario())


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any]] = [
    ("functions", [{}]), ("function_call", {"name": "f"}), ("audio", {}), ("modalities", ["text", "audio"]),
    ("store", True), ("service_tier", "flex"), ("verbosity", "high"),
    ("web_search_options", {}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_fields_that_are_not_supported(served: Served, field: str, value: object) -> None:
    refused(served.chat(USER, **{field: value}), 400, field, "not_supported")


def test_template_variables_are_limited(served: Served) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"a": deep}
    for value in ("x", deep, {f"a{i}": 1 for i in range(33)}, {"a": "x" * 70_000}):
        refused(served.chat(USER, chat_template_kwargs=value), 400, "chat_template_kwargs")


def test_the_number_of_messages_is_limited(served: Served) -> None:
    assert "4096" in refused(served.chat(*[USER] * 4097), 400, "messages")
