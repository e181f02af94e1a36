"""An engine that follows a script: it answers with fixed text, at a chosen pace, and fails at a chosen step."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import torch

from specmamba.cache.prefix.inspection import CacheStats, Counters
from specmamba.cache.split import SplitStats
from specmamba.cache.tiers.tier_stats import TierStats
from specmamba.core import ANYONE, ChainStats, FinishReason, OutputDelta, Owner, SizingStats, SpecStats, TokenLogprob
from specmamba.draft.draft_plan import DraftPlan
from specmamba.engine.engine import Engine
from specmamba.engine.replica_control import ReplicaControl, ReplicaStats
from specmamba.engine.scheduler import TenantStats
from specmamba.engine.thread import EngineThread
from specmamba.errors import PromptTooLongError, QueueFullError, RequestError
from specmamba.grammar import CompiledGrammar
from specmamba.models.text.infill import Infill
from specmamba.sampling_params import SamplingParams
from specmamba.server.app import create_app
from specmamba.server.handoff_setup import open_transport, start_handoffs
from specmamba.server.listener import listen, url_of
from specmamba.server.serve import ApiServer
from specmamba.server_config import ServerConfig
from specmamba.templates.rendering import Conversation, RenderedChat, render
from specmamba.transfer.handoff_stats import HandoffStats

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TEXT = "def main() -> None:\n    print('héllo → 世界 🙂')\n    return None\n"


class FakeTokenizer:
    """One token per UTF-8 byte; 0 is special and written ``<0>``, 1 is no token."""

    is_byte_level = False
    has_text = True

    def require_text(self, what: str, param: str) -> None: ...

    infill: Infill | None = None

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return [*([0] if add_special_tokens and text.startswith("<bos>") else []), *text.encode()]
        except UnicodeEncodeError:
            raise RequestError("the text is not valid Unicode", param="prompt") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = (token for token in token_ids if not self.is_silent(token, skip_special_tokens))
        return b"".join(self.token_bytes(token) or b"" for token in shown).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        return b"<0>" if token_id == 0 else None if token_id == 1 else bytes([token_id])

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        return token_id == 1 or (skip_special_tokens and token_id == 0)

    def is_byte(self, token_id: int) -> bool:
        return False

    def token_ids(self) -> dict[str, int]:
        return {}

    def chat_template(self, with_tools: bool = False) -> str | None:
        return "" if self.has_chat_template else None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode_chat(render(self.conversation(messages)))

    def conversation(self, messages: Sequence[Mapping[str, Any]], *_: object) -> Conversation:
        return Conversation(CHAT_TEMPLATE, messages=messages)

    def encode_chat(self, rendered: RenderedChat) -> list[int]:
        return self.encode(rendered.text, add_special_tokens=False)

    def most_characters(self, num_tokens: int) -> int | None:
        return num_tokens


CACHE_STATS = CacheStats(
    num_nodes=5,
    num_tombstones=1,
    num_tokens=70,
    num_states=4,
    num_locked_tokens=0,
    query_tokens=200,
    hit_tokens=150,
    misses={"never_stored": 2, "evicted": 1, "page_grid": 0, "salt": 3},
    inserted_tokens=110,
    evicted_tokens=40,
    evicted_states=6,
    duplicate_states=7,
)


@dataclass(frozen=True)
class FakeStats:
    num_running: int
    num_waiting: int
    kv_used_tokens: int = 0
    kv_cached_tokens: int = 70
    kv_total_tokens: int = 1000
    state_used_slots: int = 0
    state_cached_slots: int = 3
    state_total_slots: int = 4
    num_preemptions: int = 0
    spec: SpecStats = field(default_factory=SpecStats)
    sizing: SizingStats | None = None  # None: drafts of a fixed size
    prefix_cache: CacheStats = CACHE_STATS
    split: SplitStats | None = None  # None: pools of fixed sizes
    host: TierStats | None = None  # None: no prefixes in host memory,
    disk: TierStats | None = None  # or on disk,
    store: TierStats | None = None  # or in a store
    chain: ChainStats | None = None  # None: steps are read where they are launched
    handoffs: HandoffStats | None = None
    replicas: ReplicaStats | None = None


@dataclass
class _Running:
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    held: bytes = b""
    spec: SpecStats = field(default_factory=SpecStats)


def fake_logprob(token: int, seed: int | None, num_top: int) -> TokenLogprob:
    """Of any token: the likelier the higher the seed. Spaces are not among the likeliest, others are the first."""
    chosen = -4.0 if token == ord(" ") else -0.5 + 0.01 * (seed or 0)
    others = [((token + 1 + i) % 256, -1.0 - i) for i in range(num_top)]
    top = others if token == ord(" ") else [(token, chosen), *others]
    return TokenLogprob(token, chosen, tuple(top[:num_top]))


class FakeEngine:
    """Gives every request the bytes of ``text``, ``chunk`` of them a step, as drafts that are all accepted but one."""

    vocab_size = 256
    eos_token_ids = (0,)
    device = torch.device("cpu")
    draft_plan = DraftPlan("mtp", num_steps=1, topk=1, max_nodes=2, num_lookahead_slots=2)
    replicas: ReplicaControl | None = None
    renders_in_process = True  # its chat template needs no limits, and a process of its own takes time

    def __init__(
        self,
        config: ServerConfig | None = None,
        text: str = TEXT,
        step_s: float = 0.0,
        chunk: int = 2,
        fail_at_step: int | None = None,
        context_length: int = 64 + len(TEXT.encode()),
        has_chat_template: bool = True,
        gate: str = "",
    ) -> None:
        self.config = config or ServerConfig()
        self.tokenizer = FakeTokenizer(has_chat_template)
        self.context_length = context_length
        self.text, self.step_s, self.chunk, self.fail_at_step = text.encode(), step_s, chunk, fail_at_step
        self.gate = gate  # a file: no step gives anything before it is there
        self.running: dict[str, _Running] = {}
        self.num_steps = self.num_closed = self.num_added = 0
        self.aborted: list[str] = []
        self.seen_params: list[SamplingParams] = []
        self.seen_extra_keys: list[str | None] = []
        self.seen_owners: list[Owner] = []
        self.seen_predictions: list[tuple[int, ...]] = []
        self.seen_prompts: list[tuple[int, ...]] = []
        self.num_flushed = 0
        self.spec = SpecStats()

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.config.max_queued_requests

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    sample, cache_report, cache_text = Engine.sample, Engine.cache_report, Engine.cache_text

    def check_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, forced_output_ids: Sequence[int] = ()
    ) -> None:
        if not prompt_token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if max(prompt_token_ids) >= self.vocab_size:
            raise RequestError(f"token id {max(prompt_token_ids)} is out of range", param="prompt")
        if len(prompt_token_ids) >= self.context_length:
            raise PromptTooLongError(len(prompt_token_ids), self.context_length - 1)

    def encode_prediction(self, params: SamplingParams) -> Sequence[int]:
        given = params.prediction or ()
        return self.tokenizer.encode(given) if isinstance(given, str) else given

    def check_prediction(self, predicted_ids: Sequence[int], params: SamplingParams) -> None:
        """Any prediction can be drafted from."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        forced_output_ids: Sequence[int] = (),
        extra_key: str | None = None,
        grammar: CompiledGrammar | None = None,
        owner: Owner = ANYONE,
        predicted_ids: Sequence[int] = (),
    ) -> None:
        self.check_request(prompt_token_ids, params)
        if len(self.running) >= self.config.max_queued_requests:
            raise QueueFullError(len(self.running))
        self.seen_params.append(params)
        self.seen_extra_keys.append(extra_key)
        self.seen_owners.append(owner)
        self.seen_predictions.append(tuple(predicted_ids))
        self.seen_prompts.append(tuple(prompt_token_ids))
        self.running[request_id] = _Running(list(prompt_token_ids), params)
        self.num_added += 1

    def idle(self) -> float | None:
        return None

    def when_lost(self, callback: Callable[[Exception], None]) -> None:
        """Nothing is lost."""

    def wake(self) -> None:
        """Nothing waits for other processes."""

    def when_due(self, callback: Callable[[], None]) -> None:
        """Nothing is ever due."""

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None):
            self.aborted.append(request_id)

    def step(self) -> list[OutputDelta]:
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("scripted failure\nwith a second line")
        time.sleep(self.step_s)
        if self.gate and not os.path.exists(self.gate):
            return []
        return [self._advance(request_id, request) for request_id, request in list(self.running.items())]

    def _advance(self, request_id: str, request: _Running) -> OutputDelta:
        params, done = request.params, len(request.tokens)
        limit = min(params.max_tokens, self.context_length - len(request.prompt))
        new = list(self.text[done : min(done + self.chunk, limit)])
        request.tokens += new
        request.spec = request.spec.after_step(self.chunk, max(len(new) - 1, 0))
        self.spec = self.spec.after_step(self.chunk, max(len(new) - 1, 0))
        reason: FinishReason | None = None
        if len(request.tokens) >= limit:
            reason = "length"
        elif len(request.tokens) == len(self.text):
            reason = "stop"
        text, request.held = _whole_characters(request.held + bytes(new), final=reason is not None)
        if reason is not None:
            del self.running[request_id]
        delta = OutputDelta(
            request_id, tuple(new), text, len(request.prompt), 3, len(request.tokens), reason, None, request.spec
        )
        drafted = (*range(1, len(new)), 0)[: len(new)]
        return replace(delta, depths=drafted, **_logprobs(request, new, is_first=done == 0))

    def stats(self) -> Any:
        return FakeStats(num_running=len(self.running), num_waiting=0, spec=self.spec)

    def stats_of(self, tenant: str | None) -> TenantStats:
        return TenantStats(len(self.running), 0, self.spec, Counters().of_requests())

    def flush_cache(self) -> int:
        self.num_flushed += 1
        return CACHE_STATS.num_tokens

    def describe(self) -> dict[str, object]:
        return {"model": "fake", "dtype": "float32"}

    def close(self) -> None:
        self.num_closed += 1
        self.running.clear()


class WaitingEngine(FakeEngine):
    """Waits for its client after the first step."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.may_go_on = threading.Event()

    def step(self) -> list[OutputDelta]:
        if self.num_steps:
            self.may_go_on.wait(60)
        return super().step()


@contextmanager
def slow_steps(engine: Any, step_s: float = 0.02) -> Iterator[None]:
    """Let every step of a real engine last longer: requests can be looked at while they run."""
    step = engine.step

    def slow_step() -> list[OutputDelta]:
        time.sleep(step_s)
        deltas: list[OutputDelta] = step()
        return deltas

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", slow_step)
        yield


def _logprobs(request: _Running, new: list[int], is_first: bool) -> dict[str, Any]:
    params = request.params
    found: dict[str, Any] = {}
    if (num := params.logprobs) is not None:
        found["logprobs"] = tuple(fake_logprob(token, params.seed, num) for token in new)
    if (num := params.prompt_logprobs) is not None and is_first:
        rest = (fake_logprob(token, None, num) for token in request.prompt[1:])
        found["prompt_logprobs"] = (None, *rest)
    return found


def _whole_characters(data: bytes, final: bool) -> tuple[str, bytes]:
    for cut in range(len(data), -1, -1):
        try:
            text = data[:cut].decode()
        except UnicodeDecodeError:
            continue
        return (text + "\ufffd" * (cut < len(data)), b"") if final else (text, data[cut:])
    return "", data


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for a condition. The time only ends a hang: it is no bound that anything has to keep."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


def streamed(
    http: httpx.Client, body: Mapping[str, Any], on_text: Callable[[], object] | None = None
) -> tuple[str, list[int]]:
    """The text and the tokens of a streamed completion; ``on_text`` is called once, when the first has come."""
    text, tokens, count = "", list[int](), 0
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_tokens": True}
    with http.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["text"]
                tokens += [piece["id"] for piece in choice["tokens"] or ()]
            count = event["usage"]["completion_tokens"] if event.get("usage") else count
            if text and on_text is not None:
                on_text()
                on_text = None
    assert count == len(tokens)
    return text, tokens


@dataclass
class Served:
    """A server on loopback, in this process."""

    url: str
    engine: Any
    thread: EngineThread
    server: ApiServer
    http: httpx.Client

    def wait_for_calls(self) -> None:
        """Wait until every call has ended and is logged: a client sees the end of an answer a little earlier."""
        wait_until(lambda: not self.server.server_state.tasks)

    def complete(self, **body: object) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def chat(self, *messages: object, **body: object) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": messages, **body})


class RendererInProcess:
    """``TemplateRenderer`` without a process of its own and without limits."""

    def __init__(self, most_characters: int) -> None: ...

    def render(self, make: Callable[[], Conversation]) -> Future[RenderedChat]:
        future: Future[RenderedChat] = Future()
        try:
            future.set_result(render(make()))
        except RequestError as error:
            future.set_exception(error)
        return future

    def close(self) -> None: ...


@contextmanager
def serving(engine: Any = None, **settings: Any) -> Iterator[Served]:
    """Serve an engine (a fake one by default) on a free port until the block ends."""
    # A chunk for every step; "x" is the host of requests that tests write out.
    config = ServerConfig(port=0, **{"stream_chunk_interval": 0.0, "allowed_hosts": ("x",), **settings})
    if engine is None:
        engine = FakeEngine()
    if isinstance(engine, FakeEngine):
        engine.config = config
    engine_thread = EngineThread(lambda: engine, config.stream_chunk_interval)
    engine_thread.start()
    if (transport := open_transport(config)) is not None:
        start_handoffs(config, engine_thread, transport)
    listener = listen(config.host, config.port)
    with pytest.MonkeyPatch.context() as patch:
        if getattr(engine, "renders_in_process", False):
            patch.setattr("specmamba.server.api.templates.TemplateRenderer", RendererInProcess)
        app = create_app(config, engine_thread)
    server = ApiServer(app, config, engine_thread, listener)
    runner = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    runner.start()
    try:
        wait_until(lambda: server.started)
        with httpx.Client(base_url=url_of(listener), timeout=120) as http:
            yield Served(url_of(listener), engine, engine_thread, server, http)
    finally:
        assert engine_thread.shutdown(0.0)
        runner.join(60)
        listener.close()
        assert not runner.is_alive()
