"""``SamplingParams(n=...)``: several continuations of each prompt of a call, from Python."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from specmamba import LLM, AsyncLLM, SamplingParams
from specmamba.core import OutputDelta
from specmamba.errors import EngineStoppedError
from tests.engine.test_engine import assert_idle
from tests.fake_engine import wait_until

PARAMS = SamplingParams(max_tokens=8, temperature=0.9, seed=7, ignore_eos=True)


def several(n: int, **changes: Any) -> SamplingParams:
    return PARAMS.model_copy(update={"n": n, **changes})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", context_length=128, max_running_requests=3, max_queued_requests=2) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _gives_all_back(llm: LLM) -> Iterator[None]:
    yield
    llm.flush_cache()  # behind all aborts
    assert_idle(llm.engine)


def test_a_continuation_takes_the_seed_with_its_number_added(llm: LLM) -> None:
    """More of them than the engine's queue takes."""
    first, second = llm.generate(["def main():", "class A"], several(7, logprobs=1))
    assert [output.index for output in first.outputs] == list(range(7))
    assert (first.text, first.token_ids) == (first.outputs[0].text, first.outputs[0].token_ids)
    for output, prompt in ((first, "def main():"), (second, "class A")):
        alone = [llm.generate(prompt, several(1, seed=7 + i, logprobs=1))[0] for i in range(7)]
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in alone]
        assert [one.text for one in output.outputs] == [one.text for one in alone]
        assert all(len(one.logprobs) == 8 and one.finish_reason == "length" for one in output.outputs)
    assert len({one.token_ids for one in first.outputs}) > 3


def test_seeds_wrap_around() -> None:
    last = SamplingParams(seed=2**63 - 1, n=3, prompt_logprobs=1)
    assert [last.of_choice(i).seed for i in range(3)] == [2**63 - 1, -(2**63), 1 - 2**63]
    assert [last.of_choice(i).prompt_logprobs for i in range(3)] == [1, None, None]
    assert {last.of_choice(i).n for i in range(3)} == {1}
    assert SamplingParams(n=2).of_choice(1).seed is None


def test_without_a_seed_each_draws_its_own(llm: LLM) -> None:
    output = llm.generate("def main():", several(4, seed=None))[0]
    assert len({one.token_ids for one in output.outputs}) > 1


def test_each_prompt_may_have_its_number(llm: LLM) -> None:
    outputs = llm.generate(["x", "y", "z"], [several(2), several(1), several(3)])
    assert [len(output.outputs) for output in outputs] == [2, 1, 3]
    assert [output.others for output in outputs][1] == ()


def test_log_probabilities_of_the_prompt_belong_to_all(llm: LLM) -> None:
    output = llm.generate("def main():", several(3, prompt_logprobs=1))[0]
    scores = output.prompt_logprobs
    assert scores is not None
    assert len(scores) == len(output.prompt_token_ids)
    assert [one.prompt_logprobs for one in output.outputs] == [scores] * 3


def test_given_output_tokens_are_those_of_all(llm: LLM) -> None:
    output = llm.generate("x", several(2, max_tokens=3), replay=[[5, 6, 7]])[0]
    assert [one.token_ids for one in output.outputs] == [(5, 6, 7)] * 2


def test_answers_of_a_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Sort a list."}]
    outputs = llm.chat([messages, messages], several(2))
    assert [[one.index for one in output.outputs] for output in outputs] == [[0, 1], [0, 1]]
    alone = llm.chat(messages, several(1, seed=8))[0]
    assert outputs[0].outputs[1].token_ids == outputs[1].outputs[1].token_ids == alone.token_ids


@pytest.mark.parametrize("n", [0, -1, 1025, 1.5, None, "two"])
def test_the_number_is_bounded(n: Any) -> None:
    with pytest.raises(ValidationError, match="n\n"):
        SamplingParams(n=n)


def texts_of_stream(deltas: Iterable[OutputDelta]) -> dict[int, tuple[int, ...]]:
    """The tokens of each continuation; nothing comes behind its end, and each has one."""
    found: dict[int, tuple[int, ...]] = {}
    ended = set()
    for delta in deltas:
        assert delta.index not in ended
        found[delta.index] = found.get(delta.index, ()) + delta.token_ids
        if delta.finish_reason is not None:
            ended.add(delta.index)
    assert ended == set(found)
    return found


def test_a_stream_has_all_continuations(llm: LLM) -> None:
    expected = {one.index: one.token_ids for one in llm.generate("def main():", several(4))[0].outputs}
    deltas = list(llm.stream("def main():", several(4)))
    assert texts_of_stream(deltas) == expected
    assert len(expected) == 4
    assert [delta.index for delta in deltas] != sorted(delta.index for delta in deltas)  # side by side


def test_leaving_a_stream_ends_all_continuations(llm: LLM) -> None:
    stream = llm.stream("def main():", several(6, max_tokens=100))
    next(stream)
    assert isinstance(stream, Generator)
    stream.close()
    assert not llm.engine.has_unfinished_requests
    assert_idle(llm.engine)


def test_one_that_fails_is_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add = llm.engine.add_request

    def add_or_raise(name: str, ids: Any, params: SamplingParams, *given: Any, **named: Any) -> None:
        if params.seed == 8:
            raise ValueError("this is unexpected")
        add(name, ids, params, *given, **named)

    monkeypatch.setattr(llm.engine, "add_request", add_or_raise)
    output = llm.generate("def main():", several(3))[0]
    assert [one.finish_reason for one in output.outputs] == ["length", "error", "length"]
    assert output.outputs[1].error == "ValueError: this is unexpected"


def test_an_interrupted_call_ends_all(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = threading.Event.wait

    def interrupt(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and llm.engine.has_unfinished_requests:
            raise KeyboardInterrupt
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("def main():", several(6, max_tokens=100))


def test_tasks_share_one_engine() -> None:
    async def ask() -> None:
        async with AsyncLLM(dtype="float32", device="cpu", context_length=128, max_running_requests=3) as llm:
            output, *_ = await llm.generate("def main():", several(5))
            alone = [(await llm.generate("def main():", several(1, seed=7 + i)))[0] for i in range(5)]
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in alone]
            streamed = texts_of_stream([delta async for delta in llm.stream("def main():", several(5))])
            assert streamed == {one.index: one.token_ids for one in output.outputs}
            left = llm.stream("def main():", several(5, max_tokens=100))
            await anext(left)
            await left.aclose()  # type: ignore[attr-defined]
            cancelled = asyncio.ensure_future(llm.generate("def main():", several(5, max_tokens=100)))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await llm.flush_cache()  # behind the aborts
            wait_until(lambda: not llm.engine.has_unfinished_requests)
            assert_idle(llm.engine)
        with pytest.raises(EngineStoppedError):
            await llm.generate("x")

    asyncio.run(ask())
