"""Calls of one ``LLM``: from many threads at a time, with prompts in every form, after its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from specmamba.engine import channels
from specmamba.errors import EngineFailedError, EngineStoppedError, RankLostError, RequestError
from specmamba.sampling_params import GrammarSpec
from tests.engine.test_engine import assert_idle
from tests.tiny import write_tiny_checkpoint

NUM_THREADS, NUM_CALLS = 8, 20
TEXTS = ("def main():", "class A", "import os\n", "x = 1\n", "for i in")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", context_length=128, max_running_requests=6, max_queued_requests=4) as llm:
        yield llm


def job(thread: int, call: int) -> tuple[Any, SamplingParams]:
    """Some greedy, some sampled with a seed, some of several prompts."""
    temperature = (0.0, 0.8)[call % 2]
    params = SamplingParams(max_tokens=3 + (thread + call) % 6, temperature=temperature, seed=call, ignore_eos=True)
    first = TEXTS[(thread + call) % len(TEXTS)]
    return ([first, TEXTS[call % len(TEXTS)]] if call % 5 == 0 else first), params


def texts_of(llm: LLM, thread: int) -> list[list[tuple[int, ...]]]:
    calls = [job(thread, call) for call in range(NUM_CALLS)]
    return [[output.token_ids for output in llm.generate(prompt, params)] for prompt, params in calls]


def test_threads_get_the_texts_of_sequential_calls(llm: LLM) -> None:
    expected = [texts_of(llm, thread) for thread in range(NUM_THREADS)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert list(pool.map(lambda thread: texts_of(llm, thread), range(NUM_THREADS))) == expected
    assert_idle(llm.engine)


def test_calls_of_two_threads_run_in_one_batch(llm: LLM) -> None:
    """Each stream waits for the other's first token before it goes on: one after the other would never end."""
    together = threading.Barrier(2, timeout=60)
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)

    def consume(text: str) -> int:
        stream = llm.stream(text, params)
        num_tokens = len(next(stream).token_ids)
        together.wait()
        return num_tokens + sum(len(delta.token_ids) for delta in stream)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(consume, TEXTS[:2])) == [100, 100]


def test_a_mapping_is_the_prompt_that_it_has(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0)
    ids = llm.engine.tokenizer.encode("def f(")
    expected = llm.generate("def f(", params)
    assert llm.generate({"prompt": "def f("}, params)[0].token_ids == expected[0].token_ids
    both = llm.generate([{"prompt_token_ids": ids}, {"prompt_token_ids": ids, "cache_salt": "a"}], params)
    assert [output.token_ids for output in both] == [expected[0].token_ids] * 2
    assert "".join(delta.text for delta in llm.stream({"prompt": "def f("}, params)) == expected[0].text


def test_a_salt_keeps_cached_prefixes_apart(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0)
    ids = list(range(5, 69))
    salted = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "a", "b")]
    outputs = [llm.generate(prompt, params)[0] for prompt in salted] + llm.generate(ids, params, extra_key="a")
    cached = [output.num_cached_tokens > 0 for output in outputs]
    assert cached == [False, True, False, False]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"text": "x"}, "a prompt has no 'text'"),
        ({"prompt": "x", "multi_modal_data": {}}, "a prompt has no 'multi_modal_data'"),
        ({}, "one of 'prompt' and 'prompt_token_ids'"),
        ({"prompt": "x", "prompt_token_ids": [5]}, "one of 'prompt' and 'prompt_token_ids'"),
        ({"prompt": [5, 6]}, "'prompt' must be a text"),
        ({"prompt_token_ids": "x"}, "'prompt_token_ids' must be a list of token ids"),
        ({"prompt_token_ids": [True]}, "a prompt is a text"),
        ({"prompt": "x", "cache_salt": ""}, "'cache_salt' must be a text"),
        ({"prompt": ""}, "empty"),
    ],
)
def test_other_mappings_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    for prompts in (prompt, ["ok", prompt]):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts)
    assert_idle(llm.engine)


def test_chat_is_the_template_and_generate(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Sort a list."}]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    ids = llm.engine.tokenizer.apply_chat_template(messages)
    answer = llm.chat(messages, params)
    assert [output.prompt_token_ids for output in answer] == [tuple(ids)]
    assert answer[0].token_ids == llm.generate(ids, params)[0].token_ids
    assert len(llm.chat([messages, messages], params)) == 2
    assert llm.chat([]) == []
    for wrong in ("hello", [messages, "hello"]):
        with pytest.raises(RequestError, match="a conversation is a list of messages"):
            llm.chat(wrong)  # type: ignore[arg-type]


def test_what_users_of_other_runtimes_write(tmp_path: Path, llm: LLM) -> None:
    folder = write_tiny_checkpoint(tmp_path, 0)
    with LLM(folder, dtype="float32", device="cpu") as tiny:
        assert tiny.engine.folder == folder
        output = tiny.generate([5, 6], SamplingParams(max_tokens=3))[0]
    assert [answer.text for answer in output.outputs] == [output.text]
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("def f(")) == "def f("


def test_sampling_params_of_another_kind(llm: LLM) -> None:
    for wrong in ("x", 3, {"max_tokens": 3}, [None]):
        with pytest.raises(RequestError, match=r"sampling_params are SamplingParams"):
            llm.generate("x", wrong)  # type: ignore[arg-type]


def test_a_stream_has_one_object_of_sampling_params(llm: LLM) -> None:
    for wrong in ([SamplingParams(n=2)], [SamplingParams()], "x", {"n": 1}):
        with pytest.raises(RequestError, match=r"a stream is of one prompt and has one SamplingParams\(...\), not "):
            next(llm.stream("x", wrong))  # type: ignore[arg-type]


def test_after_its_end_calls_are_refused() -> None:
    llm = LLM(dtype="float32", device="cpu", context_length=64)
    llm.close()
    llm.close()
    spec = GrammarSpec(kind="regex", text="[a-z]+")
    for ask in (lambda: llm.generate("x"), lambda: llm.generate("x", SamplingParams(grammar=spec)), llm.flush_cache):
        with pytest.raises(EngineStoppedError, match="this model is closed"):
            ask()
    assert not llm._local._grammars


def test_a_stream_that_garbage_collection_closes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its thread puts a command, whose making can start a collection."""
    stream = llm.stream("def main():", SamplingParams(max_tokens=100, ignore_eos=True))
    assert isinstance(stream, Generator)
    next(stream)
    make, streams = channels._Command, [stream]

    def collect(*given: Any) -> Any:
        while streams:
            streams.pop().close()
        return make(*given)

    monkeypatch.setattr(channels, "_Command", collect)
    assert len(llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
    assert_idle(llm.engine)


def test_what_was_complete_before_a_failure_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(dtype="float32", device="cpu", context_length=128) as llm:
        fail, step = threading.Event(), llm.engine.step
        ended: list[Any] = []

        def step_or_fail() -> Any:
            deltas = step()
            if any(delta.finish_reason for delta in deltas):
                fail.set()
                return deltas
            if fail.is_set():
                raise ZeroDivisionError
            return deltas

        monkeypatch.setattr(llm.engine, "step", step_or_fail)
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        with ThreadPoolExecutor(1) as pool:
            stream = llm.stream("class A", long)
            next(stream)
            short = pool.submit(llm.generate, "x", SamplingParams(max_tokens=2, ignore_eos=True))
            with pytest.raises(EngineFailedError, match="ZeroDivisionError"):
                ended.extend(stream)
            assert [output.finish_reason for output in short.result(60)] == ["length"]


def test_a_request_that_cannot_be_added_is_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add, bad = llm.engine.add_request, llm.engine.tokenizer.encode("import os\n")

    def add_or_raise(name: str, ids: Any, *given: Any, **named: Any) -> None:
        if list(ids) == bad:
            raise ValueError("this is unexpected")
        add(name, ids, *given, **named)

    monkeypatch.setattr(llm.engine, "add_request", add_or_raise)
    outputs = llm.generate(["x = 1\n", "import os\n"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [output.finish_reason for output in outputs] == ["length", "error"]
    assert outputs[1].error == "ValueError: this is unexpected"
    assert_idle(llm.engine)


def test_a_rank_that_is_lost_when_a_request_is_added_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise RankLostError("rank 1 is lost")

    with LLM(dtype="float32", device="cpu", context_length=128) as llm:
        monkeypatch.setattr(llm.engine, "add_request", lost)
        with pytest.raises(EngineFailedError, match="rank 1 is lost"):
            llm.generate("x")


def test_a_failure_reaches_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(dtype="float32", device="cpu", context_length=128) as llm:
        monkeypatch.setattr(llm.engine.runner, "launch", lambda batch: 1 / 0)
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(llm.generate, "x") for _ in range(4)]
            for call in calls:
                with pytest.raises((EngineFailedError, EngineStoppedError), match="failed"):
                    call.result(60)


def test_a_process_that_leaves_it_open_ends_well() -> None:
    code = "from specmamba import LLM\nllm = LLM(context_length=64)\nnext(llm.stream('x'))\nprint('end')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")
