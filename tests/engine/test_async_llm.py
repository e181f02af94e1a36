"""``AsyncLLM``: many tasks on one engine, and what is left when they end or are cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator

import pytest

from specmamba import AsyncLLM, SamplingParams
from specmamba.errors import EngineStoppedError, RequestError
from tests.engine.test_engine import assert_idle
from tests.fake_engine import wait_until

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
TEXTS = ("def main():", "class A", "import os\n", "x = 1\n", "for i in")


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(dtype="float32", device="cpu", context_length=128, max_running_requests=6, max_queued_requests=8)
    yield llm
    asyncio.run(llm.close())


def run(llm: AsyncLLM, what: Callable[[], Awaitable[None]]) -> None:
    """Run, wait until nothing runs any more, and look for what was not given back."""

    async def main() -> None:
        await what()
        await llm.flush_cache()  # behind all aborts

    asyncio.run(main())
    wait_until(lambda: not llm.engine.has_unfinished_requests)
    assert_idle(llm.engine)


def test_a_hundred_tasks_of_which_a_third_are_cancelled(llm: AsyncLLM) -> None:
    async def texts() -> None:
        whole = {text: (await llm.generate(text, PARAMS))[0].token_ids for text in TEXTS}
        rng = random.Random(0)
        tasks = [asyncio.ensure_future(llm.generate(TEXTS[i % len(TEXTS)], PARAMS)) for i in range(100)]
        cancelled = rng.sample(range(100), 33)
        for i in cancelled:
            await asyncio.sleep(rng.random() * 0.02)
            tasks[i].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for i, result in enumerate(results):
            if isinstance(result, BaseException):
                assert i in cancelled
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert result[0].token_ids == whole[TEXTS[i % len(TEXTS)]]
        assert sum(isinstance(result, BaseException) for result in results) > 10

    run(llm, texts)


def test_streams_side_by_side_and_left_early(llm: AsyncLLM) -> None:
    async def consume(text: str, leave_after: int | None) -> str:
        pieces = []
        async for delta in llm.stream(text, LONG):
            pieces.append(delta.text)
            if leave_after is not None and len(pieces) >= leave_after:
                break
        return "".join(pieces)

    async def streams() -> None:
        whole = (await llm.generate("class A", LONG))[0].text
        texts = await asyncio.gather(*[consume("class A", (None, 3)[i % 2]) for i in range(20)])
        assert texts[::2] == [whole] * 10
        assert all(whole.startswith(text) and text != whole for text in texts[1::2])

    run(llm, streams)


def test_chat_and_errors(llm: AsyncLLM) -> None:
    async def talk() -> None:
        answer = (await llm.chat([{"role": "user", "content": "Sort a list."}], PARAMS))[0]
        assert len(answer.token_ids) == PARAMS.max_tokens
        assert await llm.generate([]) == []
        with pytest.raises(RequestError, match="empty"):
            await llm.generate("")
        with pytest.raises(RequestError, match="a prompt has no 'text'"):
            await anext(llm.stream({"text": "x"}))

    run(llm, talk)


def test_the_loop_goes_on_while_tokens_are_made(llm: AsyncLLM) -> None:
    async def count() -> None:
        generation = asyncio.ensure_future(llm.generate(list(TEXTS), LONG))
        rounds = 0
        while not generation.done():
            await asyncio.sleep(0)
            rounds += 1
        assert rounds > 50

    run(llm, count)


def test_loops_that_have_ended_are_forgotten(llm: AsyncLLM) -> None:
    async def ask() -> None:
        await llm.generate("x", SamplingParams(max_tokens=2))

    for _ in range(3):
        run(llm, ask)
    assert len(llm._local.thread._wakers) <= 1


def test_closing_ends_what_runs() -> None:
    async def close() -> None:
        async with AsyncLLM(dtype="float32", device="cpu", context_length=128) as llm:
            stream = llm.stream("x", LONG)
            await anext(stream)
            await llm.close()
            reasons = [delta.finish_reason async for delta in stream]
            assert reasons[-1] == "abort"
            with pytest.raises(EngineStoppedError, match="closed"):
                await llm.generate("x")

    asyncio.run(close())
