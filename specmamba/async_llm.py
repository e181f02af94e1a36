"""The Python interface under asyncio: ``AsyncLLM`` continues prompts in this process and never blocks the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from specmamba.calls.collector import Collector, numbered
from specmamba.calls.given_prompts import (
    GivenPrompt,
    Message,
    Prompt,
    Prompts,
    conversations,
    read_prompt,
    read_prompts,
)
from specmamba.core import OutputDelta, RequestOutput
from specmamba.engine.engine import Engine
from specmamba.flags.engine_flags import EngineFlags
from specmamba.local_engine import LocalEngine
from specmamba.sampling_params import SamplingParams


class AsyncLLM:
    """A model in this process that continues prompts of any number of tasks, in one batch.

    A task that is cancelled, or leaves a stream, aborts its requests and nothing else. Its methods take and raise what
    those of ``LLM`` do. Several event loops may use it::

        async with AsyncLLM(model="./my-model") as llm:
            async for delta in llm.stream("def main():", SamplingParams(max_tokens=64)):
                print(delta.text, end="")
    """

    def __init__(self, model: str | Path | None = None, **flags: Unpack[EngineFlags]) -> None:
        """Load the model, which blocks: in a running loop call ``await asyncio.to_thread(AsyncLLM, model=...)``."""
        self._local = LocalEngine({"model": model and str(model), **flags}, is_stepped_here=False)

    @property
    def engine(self) -> Engine:
        """The engine behind it, for tools: to be used by one thread, while no call runs."""
        return self._local.engine

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        extra_key: str | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts. Returns one output per prompt, in their order. Raises as ``LLM.generate``."""
        return await self._generate(read_prompts(prompts), sampling_params, extra_key)

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        extra_key: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; arguments, results and errors are those of ``LLM.chat``."""
        prompts = [
            await asyncio.to_thread(self._local.encode_chat, one, tools, chat_template_kwargs)
            for one in conversations(messages)
        ]
        return await self._generate(prompts, sampling_params, extra_key)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, extra_key: str | None = None
    ) -> AsyncIterator[OutputDelta]:
        """Continue one prompt, piece by piece. Leaving the iterator aborts the request.

        Yields:
            The deltas of the output; the last one has a ``finish_reason``. With ``n`` above 1 as ``LLM.stream``.

        Raises:
            RequestError, EngineStoppedError: as ``LLM.stream``.
        """
        deltas: asyncio.Queue[OutputDelta] = asyncio.Queue()
        loop, given = asyncio.get_running_loop(), read_prompt(prompt)
        calls = await asyncio.to_thread(self._local.prepare_stream, given, sampling_params, extra_key)

        def take(delta: OutputDelta) -> None:
            is_edge = delta.finish_reason is not None or delta.num_output_tokens == len(delta.token_ids)
            self._local.thread.call_in_loop(loop, partial(deltas.put_nowait, delta), at_once=is_edge)

        requests = self._local.requests(calls, [numbered(call, take) for call in calls])
        num_open = len(calls)
        try:
            await asyncio.wrap_future(self._local.submit(requests))
            while num_open:
                delta = await deltas.get()
                num_open -= delta.finish_reason is not None
                if delta.finish_reason == "error":
                    self._local.check_failure()
                yield delta
        finally:
            if num_open:
                self._local.abort(requests)

    async def flush_cache(self) -> int:
        """Evict the cached prefixes that no running request uses. Returns the number of evicted tokens."""
        return await asyncio.to_thread(self._local.flush_cache)

    async def close(self) -> None:
        """Abort running requests and end the grammar compiler. The object cannot be used afterwards."""
        await asyncio.to_thread(self._local.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _generate(
        self,
        prompts: Sequence[GivenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        extra_key: str | None,
    ) -> list[RequestOutput]:
        calls = await asyncio.to_thread(self._local.prepare, prompts, sampling_params, extra_key)
        if not calls:
            return []
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        wake = partial(self._local.thread.call_in_loop, loop, ended.set, at_once=True)
        collector = Collector(calls, wake)
        requests = self._local.requests(calls, collector.sinks())
        try:
            await asyncio.wrap_future(self._local.submit(requests))
            await ended.wait()
        finally:
            if not ended.is_set():
                self._local.abort(requests)
        return self._local.checked(collector.outputs())
