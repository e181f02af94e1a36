"""The prefix cache under random use and failing allocations: no leak, no deadlock, and texts stay the same."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from specmamba.cache.kv_pool import PageAllocator
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.request_table import RequestTable
from specmamba.cache.state_pool import StatePool
from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.engine.request import Request
from specmamba.engine.scheduler import longest_prefix_first
from specmamba.sampling_params import SamplingParams
from specmamba.verify.record_buffers import RecordBuffers
from tests.engine.test_engine import assert_consistent, assert_idle
from tests.tiny import write_tiny_checkpoint

NUM_REQUESTS = 1000 if os.environ.get("SPECMAMBA_TEST_FULL") == "1" else 300  # for each setting
VOCABULARY = 24
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("no_headroom")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_checkpoint(folder, 1, vocab_size=VOCABULARY, max_position_embeddings=96))


def build(tiny: str, **flags: Any) -> Engine:
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "max_running_requests": 6,
        "max_queued_requests": 4000,
        "chunked_prefill_size": 16,
        "speculative_algorithm": "mtp",
        "speculative_num_steps": 2,
    }
    return Engine(EngineConfig(model=tiny, **{**settings, **flags}))


def random_prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    """Prompts that begin like earlier ones, at random lengths, or like nothing before."""
    rng, prompts = random.Random(seed), list[list[int]]()
    for _ in range(count):
        known = rng.choice(prompts[-40:]) if prompts and rng.random() < 0.8 else []
        shared = known[: rng.randint(0, len(known))]
        fresh = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        prompts.append((shared + fresh)[:longest])
    return prompts


def run_to_the_end(engine: Engine) -> tuple[int, ...]:
    """The tokens of all requests, as they come."""
    tokens: list[int] = []
    while engine.has_unfinished_requests:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    return tuple(tokens)


class Texts:
    """Greedy texts without cache and drafts. A text depends on its prompt alone, so each is computed once."""

    def __init__(self, tiny: str) -> None:
        self._engine = build(tiny, speculative_algorithm="none", disable_radix_cache=True, speculative_num_steps=None)
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def compute(self, prompts: list[list[int]], num_tokens: int) -> None:
        missing = {tuple(prompt) for prompt in prompts} - self._known.keys()
        names = {str(i): prompt for i, prompt in enumerate(missing)}
        self._known.update(dict.fromkeys(missing, ()))
        for name, prompt in names.items():
            self._engine.add_request(name, prompt, GREEDY.model_copy(update={"max_tokens": num_tokens}))
        while self._engine.has_unfinished_requests:
            for delta in self._engine.step():
                self._known[names[delta.request_id]] += delta.token_ids

    def of(self, prompt: list[int]) -> tuple[int, ...]:
        return self._known[tuple(prompt)]


@pytest.fixture(scope="module")
def texts(tiny: str) -> Texts:
    return Texts(tiny)


class TestRandomUse:
    @pytest.mark.fast_cases("tracked")
    @pytest.mark.parametrize(
        ("page_size", "flags"),
        [
            (1, {"mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": 3, "cache_eviction": "flops"}),
            (16, {"schedule_policy": "lpm", "schedule_max_overtakes": 4}),
        ],
        ids=["tracked, flops", "pages, longest prefix first"],
    )
    def test_many_requests(self, tiny: str, texts: Texts, page_size: int, flags: dict[str, Any]) -> None:
        """Shared prefixes, two tenants, aborts, preemptions, tiny pools."""
        rng, prompts = random.Random(page_size), random_prompts(page_size, NUM_REQUESTS, 60)
        texts.compute(prompts, GREEDY.max_tokens)
        engine = build(
            tiny,
            page_size=page_size,
            max_total_tokens=136 if page_size == 1 else 208,
            max_mamba_cache_size=12,
            **flags,
        )
        arriving = list(enumerate(prompts))[::-1]
        output: dict[str, tuple[int, ...]] = {str(i): () for i, _ in arriving}
        aborted, finished = set[str](), set[str]()
        for step in range(20_000):
            while arriving and rng.random() < 0.4:
                i, prompt = arriving.pop()
                engine.add_request(str(i), prompt, GREEDY, extra_key=rng.choice([None, None, "tenant"]))
            for delta in engine.step():
                assert delta.request_id not in aborted
                output[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    finished.add(delta.request_id)
            if engine.live.by_id and rng.random() < 0.05:
                victim = rng.choice(list(engine.live.by_id))
                engine.abort(victim)
                aborted.add(victim)
            if step % 5 == 0:
                assert_consistent(engine)
            if not arriving and not engine.has_unfinished_requests:
                break
        stats = engine.stats()
        assert finished | aborted == output.keys()
        assert stats.num_preemptions >= NUM_REQUESTS // 100
        assert len(aborted) > 20
        assert stats.prefix_cache.hit_tokens > NUM_REQUESTS // 30
        assert stats.prefix_cache.evicted_states > 100
        assert_idle(engine)
        for name, tokens in output.items():
            expected = texts.of(prompts[int(name)])
            assert tokens == (expected if name in finished else expected[: len(tokens)])


class TestRefusedMemory:
    """Any one allocation fails, as if another request had taken the memory: the request waits or caches nothing."""

    def refuse(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, which: int) -> Callable[[], int]:
        """Let the which-th call that could succeed fail; returns the count of calls so far."""
        real, calls = getattr(owner, name), [0]

        def allocate(self: object, argument: Any) -> Any:
            calls[0] += bool(argument)
            return None if argument and calls[0] == which else real(self, argument)

        monkeypatch.setattr(owner, name, allocate)
        return lambda: calls[0]

    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize(("owner", "name"), [(PageAllocator, "allocate"), (StatePool, "reserve")])
    @pytest.mark.parametrize("page_size", [1, 16])
    def test_at_every_point(
        self, tiny: str, texts: Texts, owner: type, name: str, page_size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts = random_prompts(9, 8, 40)
        texts.compute(prompts, GREEDY.max_tokens)
        num_calls, which = 1, 1
        while which <= num_calls:
            engine = build(
                tiny,
                page_size=page_size,
                max_total_tokens=320,
                max_mamba_cache_size=8,
                mamba_radix_cache_strategy="extra_buffer",
                mamba_track_interval=4,
            )
            with monkeypatch.context() as patch:
                count = self.refuse(patch, owner, name, which)
                output = self.run(engine, prompts)
                num_calls = count()
            assert [output[str(i)] for i in range(len(prompts))] == [texts.of(prompt) for prompt in prompts]
            assert_idle(engine)
            which += 1 + which // 6  # the first ones all, then fewer
        assert which > 12

    def run(self, engine: Engine, prompts: list[list[int]]) -> dict[str, tuple[int, ...]]:
        output: dict[str, tuple[int, ...]] = {str(i): () for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, GREEDY)
        for _ in range(400):
            for delta in engine.step():
                output[delta.request_id] += delta.token_ids
            assert_consistent(engine)
            if not engine.has_unfinished_requests:
                return output
        raise AssertionError("a request is stuck")


class TestExceptions:
    """An exception while a state changes its owner: after all requests are aborted, no memory is held."""

    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (StatePool, "copy"),
            (StatePool, "fork"),
            (StatePool, "donate"),
            (RecordBuffers, "materialize"),
            (MambaRadixCache, "insert"),
            (RequestTable, "borrow"),
        ],
    )
    def test_one_exception(
        self, tiny: str, texts: Texts, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts = [*random_prompts(3, 5, 30), [1, 2, 3] * 6, [1, 2, 3] * 7, [1, 2, 3] * 8]
        texts.compute(prompts, GREEDY.max_tokens)
        engine = build(tiny, mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=4)
        real, calls = getattr(owner, name), [0]

        def fail_once(self: object, *arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise MemoryError("no more")
            return real(self, *arguments)

        monkeypatch.setattr(owner, name, fail_once)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, GREEDY)
        with pytest.raises(MemoryError):
            run_to_the_end(engine)
        for i in range(len(prompts)):
            engine.abort(str(i))
        assert_idle(engine)
        for prompt in prompts[-2:]:
            engine.add_request("again", prompt, GREEDY)
            assert run_to_the_end(engine) == texts.of(prompt)


class TestPublishedBugs:
    """Bugs that were published for the cache whose design this one follows."""

    def test_a_prompt_shorter_than_a_chunk_hits_on_its_second_run(self, tiny: str) -> None:
        engine = build(tiny, chunked_prefill_size=1000)
        prompt = list(range(20))
        assert [self.cached(engine, prompt) for _ in range(2)] == [0, 19]  # all but the token that must be run

    def test_a_match_one_token_short_of_a_node_still_finds_the_best_state(self, tiny: str) -> None:
        engine = build(tiny, chunked_prefill_size=8)
        prompt = list(range(20))
        self.cached(engine, prompt)  # leaves states at 8, 16, 19 and behind
        assert (
            self.cached(engine, prompt[:19]) == 16
        )  # 18 of its tokens are cached, one short of the node that ends at 19
        assert self.cached(engine, prompt[:19]) == 18  # where the two parted a state was left

    def test_a_state_is_never_stored_at_another_position_than_its_own(self, tiny: str) -> None:
        engine = build(tiny, chunked_prefill_size=7, mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=3)
        for prompt in ([1, 2, 3] * 7, [1, 2, 3] * 5 + [4], list(range(11))):
            self.cached(engine, prompt)
        cache = engine.cache_manager.cache
        cache.check(engine.pools.table.held_pages())  # every stamp against every node
        nodes = [cache.root(None)]
        positions = set()
        for node in nodes:
            nodes += node.children.values()
            if node.state_slot is not None:
                stamp = engine.pools.states.stamp(node.state_slot)
                assert stamp.position == node.end
                positions.add(node.end)
        assert {
            7,
            14,
            10,
            20,
            15,
            11 + 3,
        } <= positions  # ends of chunks and of prompts, where texts part, and tracked ones

    @staticmethod
    def cached(engine: Engine, prompt: list[int]) -> int:
        engine.add_request("a", prompt, GREEDY)
        deltas = []
        while engine.has_unfinished_requests:
            deltas += engine.step()
        return deltas[-1].num_cached_tokens


class TestQueueOrder:
    def request(self, number: int, num_overtakes: int = 0) -> Request:
        request = Request(str(number), number, (1, 2), GREEDY, 0, None)  # type: ignore[arg-type]
        request.num_overtakes = num_overtakes
        return request

    def test_longest_prefix_first_without_starvation(self) -> None:
        requests = [self.request(i) for i in range(5)]
        cached = {"0": 0, "1": 5, "2": 9, "3": 5, "4": 0}
        order = longest_prefix_first(requests, lambda r: cached[r.request_id], 3)
        assert [r.request_id for r in order] == ["2", "1", "3", "0", "4"]
        requests[4].num_overtakes, requests[3].num_admissions = 3, 1
        order = longest_prefix_first(requests, lambda r: cached[r.request_id], 3)
        assert [r.request_id for r in order] == ["3", "4", "2", "1", "0"]

    def test_a_request_is_overtaken_at_most_max_overtakes_times(self, tiny: str) -> None:
        engine = build(
            tiny, max_running_requests=1, schedule_policy="lpm", schedule_max_overtakes=3, speculative_num_steps=1
        )
        shared = [5] * 20
        self.finish(engine, "first", shared)
        engine.add_request("running", [7, 8], GREEDY)
        engine.step()
        engine.add_request("patient", [9, 9], GREEDY)
        for i in range(8):
            engine.add_request(f"quick {i}", [*shared, i], GREEDY)
        order = []
        while engine.has_unfinished_requests:
            order += [delta.request_id for delta in engine.step() if delta.finish_reason is not None]
        assert order.index("patient") == 1 + 3

    def finish(self, engine: Engine, name: str, prompt: list[int]) -> None:
        engine.add_request(name, prompt, GREEDY)
        while engine.has_unfinished_requests:
            engine.step()
