"""The Python interface: ``LLM`` continues prompts in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, Unpack

from specmamba.calls.collector import Call, Collector, numbered
from specmamba.calls.given_prompts import Message, Prompt, Prompts, conversations, read_prompt, read_prompts
from specmamba.calls.progress import UseTqdm, wait_for
from specmamba.core import OutputDelta, RequestOutput
from specmamba.engine.engine import Engine
from specmamba.engine.workbench import Workbench
from specmamba.flags.engine_flags import EngineFlags
from specmamba.local_engine import LocalEngine
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.sampling_params import SamplingParams


class LLM:
    """A model in this process that continues prompts.

    Any number of threads may call it: their prompts run in one batch. Under asyncio use ``AsyncLLM``. Close it, or use
    it as a context manager::

        with LLM("./my-model", speculative_algorithm="mtp") as llm:
            outputs = llm.generate(["def main():", "class A"], SamplingParams(max_tokens=64))
    """

    def __init__(self, model: str | Path | None = None, **flags: Unpack[EngineFlags]) -> None:
        """Load the model and allocate its memory.

        Args:
            model: a folder, a hub id or a GGUF file; None: the bundled demo, or what the environment names.
            flags: the other fields of ``EngineConfig``, which are the flags of the command line
                (``--speculative-num-steps 4`` is ``speculative_num_steps=4``).

        Raises:
            ConfigError: a flag is unknown or has an invalid value.
            SpecmambaError: the checkpoint cannot be loaded, or the memory does not suffice; the message says why.
        """
        self._local = LocalEngine({"model": model and str(model), **flags}, is_stepped_here=True)

    @property
    def engine(self) -> Engine:
        """The engine behind it, for tools: to be used by one thread, while no call runs."""
        return self._local.engine

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer: ``encode``, ``decode``, ``apply_chat_template``. Any thread may use it."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        replay: Sequence[Sequence[int]] | None = None,
        extra_key: str | None = None,
        use_tqdm: UseTqdm = None,
    ) -> list[RequestOutput]:
        """Continue prompts, batched continuously.

        Args:
            prompts: one prompt or several; a prompt is a text, a list of token ids, or a mapping that has one of them
                as ``prompt`` or ``prompt_token_ids``, and perhaps a ``cache_salt``.
            sampling_params: for all prompts, or a sequence with one for each; by default ``SamplingParams()``.
            replay: for each prompt, token ids that are used as output instead of chosen tokens, as far as they go. The
                speculation figures then say how drafts are accepted on this text.
            extra_key: cached prefixes are shared among prompts of the same key (and the same salt) only.
            use_tqdm: show a progress bar on standard error; a class or function makes another one than tqdm. None: one
                where that is a terminal.

        Returns:
            One output per prompt, in the order of the prompts; its ``outputs`` are the ``n`` continuations.

        Raises:
            RequestError: a prompt is none, or empty, too long, or has a token that is not in the vocabulary; the
                numbers of prompts and of sampling parameters (or replays) differ; or a grammar cannot be used. No
                prompt is run then.
            EngineStoppedError: it is closed, or the engine has failed.
        """
        calls = self._local.prepare(read_prompts(prompts), sampling_params, extra_key, replay)
        return self._generate(calls, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        extra_key: str | None = None,
        use_tqdm: UseTqdm = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the checkpoint's chat template.

        Args:
            messages: the turns of a conversation, oldest first (``{"role": "user", "content": "..."}``), or a list of
                such conversations.
            sampling_params: as in ``generate``.
            tools: definitions in OpenAI's form, for the template.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
            extra_key: as in ``generate``.
            use_tqdm: as in ``generate``.

        Returns:
            One output per conversation; calls of tools are in its text, as the model writes them.

        Raises:
            RequestError: as ``generate``; or there is no chat template, or it refuses the messages.
            EngineStoppedError: it is closed, or the engine has failed.
        """
        prompts = [self._local.encode_chat(one, tools, chat_template_kwargs) for one in conversations(messages)]
        return self._generate(self._local.prepare(prompts, sampling_params, extra_key), use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, extra_key: str | None = None
    ) -> Iterator[OutputDelta]:
        """Continue one prompt, piece by piece.

        Args:
            prompt: as in ``generate``.
            sampling_params: by default ``SamplingParams()``.
            extra_key: as in ``generate``.

        Yields:
            The deltas of the output; the last one has a ``finish_reason``. With ``n`` above 1 those of all
            continuations, as they come: ``index`` is the continuation's number, and each has a last one. Closing the
            iterator early aborts what still runs.

        Raises:
            RequestError: the prompt is empty, too long, or has a token that is not in the vocabulary, or the grammar
                or the prediction cannot be used.
            EngineStoppedError: it is closed, or the engine has failed.
        """
        deltas: SimpleQueue[OutputDelta] = SimpleQueue()
        calls = self._local.prepare_stream(read_prompt(prompt), sampling_params, extra_key)
        requests = self._local.requests(calls, [numbered(call, deltas.put) for call in calls])
        num_open = len(calls)
        try:
            self._local.submit(requests).result()
            while num_open:
                delta = deltas.get()
                num_open -= delta.finish_reason is not None
                if delta.finish_reason == "error":
                    self._local.check_failure()
                yield delta
        finally:
            if num_open:
                self._local.abort(requests, wait=True)

    def flush_cache(self) -> int:
        """Evict the cached prefixes that no running request uses. Returns the number of evicted tokens."""
        return self._local.flush_cache()

    @cached_property
    def workbench(self) -> Workbench:
        """Access for tools that measure and tune: other drafters, ranks of drafts, step times, logits."""
        return Workbench(self.engine)

    def close(self) -> None:
        """Abort running requests and end the grammar compiler. The object cannot be used afterwards.

        PyTorch's number of threads, which is a setting of each thread, is restored in the thread that made the object
        if that one calls this.
        """
        self._local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _generate(self, calls: Sequence[Call], use_tqdm: UseTqdm) -> list[RequestOutput]:
        if not calls:
            return []
        ended = threading.Event()
        collector = Collector(calls, ended.set)
        requests = self._local.requests(calls, collector.sinks())
        try:
            self._local.submit(requests).result()
            wait_for(ended, collector, use_tqdm)
        finally:
            if not ended.is_set():
                self._local.abort(requests, wait=True)
        return self._local.checked(collector.outputs())
