"""A prefill server's engine and a decode server's, each on its thread, that hand prompts over on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specmamba.core import Handoff, OutputDelta, SpecStats
from specmamba.engine.channels import EngineRequest
from specmamba.engine.engine import Engine
from specmamba.engine.thread import EngineThread
from specmamba.sampling_params import SamplingParams
from specmamba.server.handoff_setup import open_transport, start_handoffs
from specmamba.server_config import ServerConfig
from specmamba.transfer.handoff_stats import HandoffStats
from tests.drafts import DRAFTS
from tests.fake_engine import wait_until

KEY = "a key that both sides know".replace(" ", "-")
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "context_length": 512,
    "max_running_requests": 4,
    "max_mamba_cache_size": 16,
    "max_total_tokens": 4096,
    "chunked_prefill_size": 32,
    "speculative_adaptive": "off",
    "disaggregation_bootstrap_port": 0,
    "disaggregation_timeout": 30.0,
}


@dataclass(frozen=True)
class Text:
    """What a request got."""

    tokens: tuple[int, ...]
    spec: SpecStats
    num_cached: int
    reason: str | None


class Answer:
    """A request that runs."""

    def __init__(self) -> None:
        self.deltas: list[OutputDelta] = []
        self._has_ended = threading.Event()

    def take(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self._has_ended.set()

    def wait(self) -> Text:
        assert self._has_ended.wait(120)  # longer than requests wait for prompts
        last = self.deltas[-1]
        tokens = tuple(token for delta in self.deltas for token in delta.token_ids)
        return Text(tokens, last.spec, last.num_cached_tokens, last.finish_reason)


class Side:
    """One engine and its thread."""

    def __init__(self, mode: str, drafts: str = "plain", **flags: Any) -> None:
        key = {} if mode == "null" else {"disaggregation_key": KEY}
        own = FLAGS if mode != "null" else {n: v for n, v in FLAGS.items() if not n.startswith("disaggregation")}
        config = ServerConfig(**{"disaggregation_mode": mode, **key, **own, **DRAFTS[drafts], **flags})
        self.engine = Engine(config)
        self.thread = EngineThread(lambda: self.engine)
        self._numbers = 0
        self.port = 0
        transport = open_transport(config)
        self.thread.start()
        if transport is not None:
            start_handoffs(config, self.thread, transport)
            self.port = transport.address[1] if mode == "prefill" else 0

    def start(self, prompt: Sequence[int], handoff: Handoff | None = None, max_tokens: int = 20, **more: Any) -> Answer:
        answer = Answer()
        self._numbers += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = EngineRequest(f"r{self._numbers}", prompt, params, answer.take, handoff=handoff, **more)
        self.thread.submit([request]).result(120)
        return answer

    def run(self, prompt: Sequence[int], handoff: Handoff | None = None, max_tokens: int = 20, **more: Any) -> Text:
        return self.start(prompt, handoff, max_tokens, **more).wait()

    def prefill(self, prompt: Sequence[int], room: int, **more: Any) -> Text:
        return self.run(prompt, Handoff(room), 0, **more)

    def stats(self) -> HandoffStats:
        stats = self.thread.call(lambda engine: engine.stats()).result(120).handoffs
        assert stats is not None
        return stats

    def failures(self) -> dict[str, int]:
        return {reason: count for reason, count in self.stats().failures.items() if count}

    def check(self) -> None:
        """Nothing but the cache holds memory."""
        wait_until(lambda: self.stats().num_open == 0, 60)

        def look(engine: Engine) -> None:
            stats, table = engine.stats(), engine.pools.table
            assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens, stats.state_used_slots) == (0, 0, 0, 0)
            assert table.num_free_rows == table.num_rows
            assert stats.prefix_cache.num_locked_tokens == 0
            engine.cache_manager.cache.check(table.held_pages())

        self.thread.call(look).result(120)

    def flush(self) -> None:
        self.thread.call(lambda engine: engine.flush_cache()).result(120)

    def close(self) -> None:
        assert self.thread.shutdown(0.0)


@contextmanager
def side(mode: str, drafts: str = "plain", **flags: Any) -> Iterator[Side]:
    own = Side(mode, drafts, **flags)
    try:
        yield own
    finally:
        own.close()


def room_at(prefill: Side, room: int) -> Handoff:
    """What a decode server is told."""
    return Handoff(room, "127.0.0.1", prefill.port)
