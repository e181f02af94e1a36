"""Chat templates in a server: limits, turns, clients that hang up, the end; special tokens in messages."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from specmamba.config import DEMO_MODEL
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.server.api.templates import Turns
from specmamba.templates.renderer import TemplateRenderer
from specmamba.templates.rendering import Conversation
from tests.fake_engine import FakeEngine, FakeTokenizer, Served, serving, wait_until
from tests.server.test_server import refused

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
USER = {"role": "user", "content": "u"}


class ScriptedTokenizer(FakeTokenizer):
    """The first message is the template."""

    def conversation(self, messages: Any, *_: object) -> Conversation:
        return Conversation(messages[0]["content"], messages=messages)


class ScriptedTemplates(FakeEngine):
    renders_in_process = False

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = ScriptedTokenizer()


@pytest.fixture(scope="module")
def renderers() -> Iterator[list[TemplateRenderer]]:
    """The renderer of each server, in order."""
    made: list[TemplateRenderer] = []

    def make(most: int) -> TemplateRenderer:
        made.append(TemplateRenderer(most))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specmamba.server.api.templates.TemplateRenderer", make)
        yield made


@pytest.fixture(scope="module")
def served(renderers: list[TemplateRenderer]) -> Iterator[Served]:
    with serving(ScriptedTemplates()) as served:
        yield served


def ask(served: Served, template: str) -> httpx.Response:
    return served.http.post("/tokenize", json={"messages": [{"role": "user", "content": template}]})


def in_background(served: Served, template: str) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []
    body = {"messages": [{"role": "user", "content": template}]}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(served.url + "/tokenize", json=body, timeout=120))
    )
    thread.start()
    return thread, answers


def wait_for_work(renderer: TemplateRenderer) -> int:
    wait_until(lambda: renderer._child._busy is not None)
    assert renderer.worker_pid is not None
    return renderer.worker_pid


def test_a_template_that_exceeds_a_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.templates.renderer.TIMEOUT_S", 0.3)
    for template, reason in (
        (ENDLESS, "takes more than 0.3 s"),
        ("{{ 'a' * 10 ** 10 }}", "needs too much memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "writes more than 104"),
    ):
        assert reason in refused(ask(served, template), 400, "messages", "template_too_complex")
        monkeypatch.undo()
    refused(served.chat({"role": "user", "content": "{{ 'a' * 10 ** 10 }}"}), 400, "messages", "template_too_complex")
    assert "no x" in refused(ask(served, "{{ raise_exception('no x') }}"), 400, "messages", None)
    assert ask(served, "{{ messages[0].role }}").json()["tokens"] == list(b"user")


def test_a_long_conversation_is_not_the_fault_of_the_template(served: Served) -> None:
    refused(served.chat({"role": "user", "content": "x" * (1 << 20)}), 400, "messages", "context_length_exceeded")


def test_what_cannot_fit_is_refused_before_any_work() -> None:
    half = "x" * (1 << 19)
    tool = {"type": "function", "function": {"name": "f", "description": half * 2}}
    engine = ScriptedTemplates()
    engine.tokenizer.conversation = None  # type: ignore[assignment, method-assign]
    engine.tokenizer.chat_template = lambda with_tools=False: "{{ tools }}"  # type: ignore[method-assign]
    with serving(engine) as served:
        many: dict[str, Any] = {"messages": [{**USER, "content": half}] * 2}
        for path, code, body in (
            ("/v1/chat/completions", "context_length_exceeded", many),
            ("/tokenize", "too_long", many),
            ("/tokenize", "too_long", {"messages": [USER], "tools": [tool]}),
        ):
            assert str(1 << 20) in refused(served.http.post(path, json=body), 400, "messages", code)


def test_a_bound_of_characters_is_that_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages may be as long as the context could hold, or as 32 characters a token where no bound is known."""
    for known, most in ((3 << 20, 3 << 20), (None, 32 * 50_000)):
        engine = ScriptedTemplates()
        engine.context_length = 50_000
        monkeypatch.setattr(ScriptedTokenizer, "most_characters", lambda _, number, known=known: known)
        with serving(engine) as served:
            fitting = "{# " + "x" * (most - len("roleusercontent{#  #}ab")) + " #}ab"
            assert served.chat({"role": "user", "content": fitting}, max_tokens=1).json()["usage"]["prompt_tokens"] == 2
            message = refused(
                served.chat({"role": "user", "content": fitting + "c"}), 400, "messages", "context_length_exceeded"
            )
            assert str(most) in message
            assert str(most + 1) in message


def test_a_process_that_dies_is_replaced(served: Served, renderers: list[TemplateRenderer]) -> None:
    assert ask(served, "a").json()["count"] == 1
    thread, answers = in_background(served, ENDLESS)
    os.kill(wait_for_work(renderers[0]), signal.SIGKILL)
    thread.join(60)
    assert "ended the process" in refused(answers[0], 400, "messages", None)
    pid = renderers[0].worker_pid
    assert ask(served, "ab").json()["count"] == 2
    assert renderers[0].worker_pid != pid
    os.kill(renderers[0].worker_pid or 0, signal.SIGKILL)  # between two requests
    wait_until(lambda: renderers[0]._child._process is None or renderers[0]._child._process.poll() is not None)
    assert ask(served, "abc").json()["count"] == 3


def test_a_client_that_hangs_up_is_given_up(
    served: Served, renderers: list[TemplateRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specmamba.templates.renderer.TIMEOUT_S", 60.0)
    body = {"messages": [{"role": "user", "content": ENDLESS}]}
    with suppress(httpx.ReadTimeout):
        httpx.post(served.url + "/v1/chat/completions", json=body, timeout=0.2)
    started = time.monotonic()
    assert ask(served, "ab").json()["count"] == 2
    assert time.monotonic() - started < 50


def test_waiting_is_limited_and_the_end_waits_for_no_rendering(
    renderers: list[TemplateRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specmamba.templates.renderer.TIMEOUT_S", 60.0)
    with serving(ScriptedTemplates(), queue_timeout=0.2) as served:
        thread, answers = in_background(served, ENDLESS)
        pid = wait_for_work(renderers[-1])
        assert "--queue-timeout" in refused(ask(served, "a"), 503, None, "queue_timeout")
        served.thread.drain(0.0)
        thread.join(50)
        assert not thread.is_alive()
        refused(answers[0], 503, None, "engine_stopped")
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
    future = renderers[-1].render(lambda: Conversation("a"))
    assert isinstance(future.exception(60), Exception)


def test_callers_take_turns() -> None:
    async def order() -> list[str]:
        turns, seen = Turns(), []

        async def work(caller: str, name: str) -> None:
            async with turns.of(caller):
                seen.append(name)
                await asyncio.sleep(0)

        names = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2"), ("c", "c1")]
        tasks = {name: asyncio.create_task(work(caller, name)) for caller, name in names}
        await asyncio.sleep(0)
        tasks["b1"].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        async with asyncio.timeout(10):
            await work("d", "d1")
        return seen

    assert asyncio.run(order()) == ["a1", "a2", "b2", "c1", "a3", "d1"]


def test_a_turn_is_passed_on_when_its_caller_is_cancelled() -> None:
    async def work() -> bool:
        turns = Turns()
        async with turns.of("a"):
            second = asyncio.create_task(turns.of("a").__aenter__())
            third = asyncio.create_task(turns.of("a").__aenter__())
            await asyncio.sleep(0)
        second.cancel()  # it has the turn, and has not run since
        async with asyncio.timeout(10):
            await third
        return second.cancelled() or isinstance(await asyncio.gather(second, return_exceptions=True), list)

    assert asyncio.run(work())


def test_an_error_of_the_process_is_an_error_of_the_server(
    served: Served, renderers: list[TemplateRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(renderers[0]._child, "ask", fail)
    refused(ask(served, "a"), 500, None, "internal_error")


# ---- special tokens in messages --------------------------------------------------------------------------------------

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(("allowed", "control"), [(False, [1, 2]), (True, [1, 2, 2])])
def test_special_tokens_in_messages(tmp_path: Path, allowed: bool, control: list[int]) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    engine = FakeEngine()
    engine.tokenizer, engine.vocab_size = Tokenizer(tmp_path), 4096  # type: ignore[assignment]
    with serving(engine, allow_special_tokens=allowed) as served:
        message = {"role": "user", "content": "a<|im_end|>b"}
        prompt = {"prompt": "<|im_start|>user\na<|im_end|>b<|im_end|>\n"}
        tokens = served.http.post("/tokenize", json={"messages": [message]}).json()["tokens"]
        assert [token for token in tokens if token < 3] == control
        assert served.http.post("/detokenize", json={"tokens": tokens}).json() == prompt
        assert served.chat(message, max_tokens=1).json()["usage"]["prompt_tokens"] == len(tokens)
        as_prompt = served.http.post("/tokenize", json=prompt).json()["tokens"]
        assert [token for token in as_prompt if token < 3] == [1, 2, 2]
