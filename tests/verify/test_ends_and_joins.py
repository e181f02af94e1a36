"""Requests that end and join beside a step in flight: the host waits for neither, and texts are what they were."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba import SamplingParams
from specmamba.config import DEMO_MODEL
from specmamba.core import OutputDelta
from specmamba.cuda_graphs import StepWatch
from specmamba.engine.engine import Engine
from specmamba.engine.request import PrefillRun
from tests.blocks import write_block_head
from tests.engine.test_engine import (
    answer,
    answers,
    assert_consistent,
    assert_idle,
    build,
    change,
    run,
    text_of,
    tokens_of,
)
from tests.heads import STYLES, write_head
from tests.verify.deferred import DeferredRead, deferred, random_delays
from tests.verify.test_chained_steps import LONG, PROMPTS, Clock, Timed, chain_of, end, start, unknown

SIZE = 4
CHAINED: dict[str, Any] = {"cuda_graph_max_bs": SIZE, "max_running_requests": SIZE, "elastic_pools": "off"}
DIRECT: dict[str, Any] = CHAINED | {"disable_cuda_graph": True, "cuda_graph_max_bs": None}
TREE = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
FLAGS: dict[str, dict[str, Any]] = {
    "block": {"speculative_num_steps": 3, "speculative_adaptive": "off"},
    "chain": {"mtp": 3},
    "eagle": {"speculative_num_steps": 3},
    "plain": {"mtp": 0},
    "tree": {"mtp": 3} | TREE,
}
KINDS = sorted(FLAGS)


@pytest.fixture(scope="module")
def flags_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Flags of each kind of drafts; heads other than MTP are random."""
    folder = tmp_path_factory.mktemp("heads")

    def of(kind: str) -> dict[str, Any]:
        flags, head = dict(FLAGS[kind]), folder / kind
        if kind in ("block", "eagle") and not head.exists():
            if kind == "block":
                write_block_head(head, Path(DEMO_MODEL), seed=3)
            else:
                write_head(head, Path(DEMO_MODEL), STYLES["eagle"], seed=3)
        if head.exists():
            algorithm = "dflash" if kind == "block" else kind
            flags |= {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head)}
        return flags

    return of


def ends_of(text: Sequence[tuple[int, ...]], strings: Sequence[str]) -> list[SamplingParams]:
    """Four ends: a known stop token, a stop string, the length, and later than these three."""
    return [
        change(LONG, stop_token_ids=(text[0][9],)),
        change(LONG, stop=(strings[1][14:17],)),
        change(LONG, max_tokens=20),
        change(LONG, max_tokens=60),
    ]


@pytest.mark.fast_cases("chain")
@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_of_which_one_ends_a_request_read_nothing(
    kind: str, flags_of: Callable[[str], dict[str, Any]]
) -> None:
    """Neither does the host give the device a number that it waits for, in all that it does from step to step."""
    engine = build(**flags_of(kind), **CHAINED)
    with deferred(engine, random_delays(1, longest=0.002)) as replay:
        named = [(str(i), list(PROMPTS[i]), change(LONG, max_tokens=60)) for i in range(SIZE)]
        found = run(engine, named)
        texts, strings = [tokens_of(found[name]) for name in found], [text_of(found[name]) for name in found]
        params = ends_of(texts, strings)
        for count in range(1, SIZE + 1):  # all buckets have been captured
            run(engine, named[:count])
        engine.flush_cache()
        for (name, prompt, _), own in zip(named, params, strict=True):
            engine.add_request(name, prompt, own)
        while len(engine.scheduler.verifying) < SIZE or engine.cycle.in_flight is None:
            engine.step()
        num_chained, num_steps, watches, ended = replay.num_chained, 0, list[StepWatch](), set[str]()
        while len(engine.scheduler.verifying) > 1 or engine.cycle.chain.ended:
            with StepWatch() as watch:
                deltas = engine.step()
            watches.append(watch)
            num_steps += 1
            ended |= {delta.request_id for delta in deltas if delta.finish_reason is not None}
        assert ended == {"0", "1", "2"}
        assert replay.num_chained == num_chained + num_steps
        assert not [read for watch in watches for read in (*watch.trace.host_reads, *watch.trace.host_writes)]
        last = tokens_of(end(engine)["3"])
        assert last
        assert last == texts[3][-len(last) :]
    engine.close()


@pytest.mark.parametrize("algorithm", ["ngram", "suffix"])
def test_the_end_of_a_request_with_drafts_from_texts_does_nothing_on_the_device(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such drafts are the host's, so no step is launched before the one in front of it was read."""
    engine = build(speculative_algorithm=algorithm, **CHAINED)
    complete, watches = engine.runner.complete, list[StepWatch]()

    def watched(*args: Any) -> None:
        with StepWatch() as watch:
            complete(*args)
        watches.append(watch)

    monkeypatch.setattr(engine.runner, "complete", watched)
    with deferred(engine, random_delays(1, longest=0.001)) as replay:
        for _ in range(2):
            engine.add_request("a", list(PROMPTS[0]), LONG)
            engine.add_request("b", list(PROMPTS[1]), change(LONG, max_tokens=5))
            end(engine)
        assert len(watches) >= 4
        assert not [op for watch in watches for op in (*watch.trace.operators, *watch.trace.host_reads)]
        assert replay.num_chained == 0
    engine.close()


@contextmanager
def counted_joins(engine: Engine) -> Iterator[list[str]]:
    """The names of requests that join behind a step in flight."""
    launch, joined = engine.runner.launch_behind, list[str]()

    def counted(step: Any, places: Any, joining: Sequence[Any] = (), extend: Any = None) -> Any:
        found = launch(step, places, joining, extend)
        if found is not None:
            joined.extend(request.request_id for request in joining)
        return found

    engine.runner.launch_behind = counted  # type: ignore[method-assign]
    try:
        yield joined
    finally:
        engine.runner.launch_behind = launch  # type: ignore[method-assign]


def arrivals_of(seed: int, count: int) -> list[tuple[str, list[int], SamplingParams]]:
    """Requests with prompts of several chunks, many of which begin alike; greedy and sampled."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 900) for _ in range(60)]
    requests = []
    for i in range(count):
        prompt = shared[: rng.choice((0, 20, 45, 60))] + [rng.randrange(5, 900) for _ in range(rng.choice((1, 3, 30)))]
        params = change(LONG, max_tokens=rng.randrange(1, 30), temperature=0.8 * (i % 3 == 0), seed=i)
        requests.append((str(i), prompt, params))
    return requests


def serve(
    engine: Engine, requests: Sequence[tuple[str, list[int], SamplingParams]], rng: random.Random, disturbs: bool
) -> tuple[dict[str, list[OutputDelta]], set[str]]:
    """Let requests come one by one; with ``disturbs`` some are aborted or preempted, and the cache is flushed."""
    arriving, aborted = list(requests)[::-1], set[str]()
    deltas: dict[str, list[OutputDelta]] = {name: [] for name, _, _ in requests}
    while arriving or engine.has_unfinished_requests:
        while arriving and rng.random() < 0.25:
            engine.add_request(*arriving.pop())
        found = engine.step()
        assert len({delta.request_id for delta in found}) == len(found)
        for delta in found:
            assert delta.request_id not in aborted
            deltas[delta.request_id].append(delta)
        if disturbs and engine.live.by_id and rng.random() < 0.05:
            aborted.add(victim := rng.choice(list(engine.live.by_id)))
            engine.abort(victim)
        if disturbs and engine.scheduler.num_running and rng.random() < 0.05:
            engine.preempt(rng.choice((*engine.scheduler.extending, *engine.scheduler.verifying)))
        if disturbs and rng.random() < 0.03:
            engine.flush_cache()
        assert_consistent(engine)
    assert_idle(engine)
    return deltas, aborted


@pytest.mark.fast_cases("chain-True")
@pytest.mark.parametrize("disturbs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_requests_that_join(kind: str, disturbs: bool, flags_of: Callable[[str], dict[str, Any]]) -> None:
    """Behind steps in flight, with adversarial delays: those of direct steps, with and without a cached prefix."""
    requests = arrivals_of(seed=len(kind), count=24)
    more: dict[str, Any] = {"chunked_prefill_size": 32, "page_size": 8, "max_queued_requests": 24}
    direct = build(**flags_of(kind), **DIRECT, **more)
    expected = answers(run(direct, requests))
    direct.close()
    engine = build(**flags_of(kind), **CHAINED, **more)
    with deferred(engine, random_delays(9, longest=0.002)) as replay, counted_joins(engine) as joined:
        for seed in range(2):
            deltas, aborted = serve(engine, requests, random.Random(seed), disturbs)
            for name in deltas.keys() - aborted:
                assert answer(deltas[name]) == expected[name]
            for name in aborted:
                tokens = tokens_of(deltas[name])
                assert expected[name][0][: len(tokens)] == tokens
        assert len(joined) > 10
        assert replay.num_chained > 50
    engine.close()


PROMPT = [7 * i % 900 + 5 for i in range(100)]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    """Steps in flight of every bucket, and chunks of 32 tokens."""
    engine = build(mtp=0, **CHAINED, chunked_prefill_size=32)
    with deferred(engine, random_delays(3, longest=0.002)):
        for count in range(1, SIZE + 1):
            run(engine, [(str(i), list(PROMPTS[i]), LONG) for i in range(count)])
        yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected() -> Iterator[Engine]:
    engine = build(mtp=0, **DIRECT)
    yield engine
    engine.close()


@pytest.mark.fast_cases("chain")
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_joins_is_not_waited_for(kind: str, flags_of: Callable[[str], dict[str, Any]]) -> None:
    """With a prompt of several chunks, one that is cached, and one token: the host reads nothing, and gives no number
    that it waits for."""
    engine = build(**flags_of(kind), **CHAINED, chunked_prefill_size=32)
    texts: dict[str, tuple[int, ...]] = {}
    with deferred(engine, random_delays(5, longest=0.002)) as replay, counted_joins(engine) as joined:
        named = [("0", PROMPTS[0]), ("1", PROMPT), ("2", [*PROMPT, 9]), ("3", [11])]
        for count in range(1, SIZE + 1):
            found = run(engine, [(name, list(prompt), change(LONG, max_tokens=90)) for name, prompt in named[:count]])
        texts = {name: tokens_of(of) for name, of in found.items()}
        engine.add_request("0", list(PROMPTS[0]), change(LONG, max_tokens=90))
        while engine.cycle.in_flight is None:
            engine.step()
        num_chained, num_steps, watches = replay.num_chained, 0, list[StepWatch]()
        deltas: dict[str, list[OutputDelta]] = {name: [] for name, _ in named}
        for name, prompt in named[1:]:
            engine.add_request(name, list(prompt), change(LONG, max_tokens=90))
            while name not in joined:
                with StepWatch() as watch:
                    found_now = engine.step()
                for delta in found_now:
                    deltas[delta.request_id].append(delta)
                watches.append(watch)
                num_steps += 1
                assert num_steps < 200
        assert replay.num_chained == num_chained + num_steps
        assert not [read for watch in watches for read in (*watch.trace.host_reads, *watch.trace.host_writes)]
        for name, of_request in end(engine).items():
            deltas[name] += of_request
        assert all(tokens_of(deltas[name]) == texts[name][-len(tokens_of(deltas[name])) :] for name in texts)
        assert all(tokens_of(deltas[name]) == texts[name] for name in "123")
        assert deltas["2"][0].num_cached_tokens > 64
    engine.close()


class TestRunsThatAreNotFinite:
    """It is known when the step behind such a run is read."""

    @pytest.mark.parametrize("number", [0, 1, 3])
    def test_fail_their_request_alone(
        self, plain: Engine, expected: Engine, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A first chunk, one behind which another is run, and the last, behind which the request has joined."""
        texts = answers(run(expected, [("0", list(PROMPTS[0]), LONG), ("2", list(PROMPTS[2]), LONG)]))
        plain.flush_cache()
        extend, num_runs = plain.runner.extend, 0

        def spoilt(runs: Sequence[PrefillRun]) -> torch.Tensor:
            nonlocal num_runs
            is_finite = extend(runs)
            if "bad" in [run.request.request_id for run in runs]:
                num_runs += 1
                if num_runs == number + 1:
                    return is_finite & torch.tensor([run.request.request_id != "bad" for run in runs])
            return is_finite

        monkeypatch.setattr(plain.runner, "extend", spoilt)
        start(plain, 1)
        deltas: dict[str, list[OutputDelta]] = {"0": [], "bad": [], "2": []}
        plain.add_request("bad", PROMPT, LONG)
        plain.add_request("2", list(PROMPTS[2]), LONG)
        while plain.has_unfinished_requests:
            for delta in plain.step():
                deltas[delta.request_id].append(delta)
            assert_consistent(plain)
        assert num_runs > number
        assert [(delta.finish_reason, delta.token_ids) for delta in deltas["bad"]] == [("error", ())]
        assert answer(deltas["2"]) == texts["2"]
        assert tokens_of(deltas["0"]) == texts["0"][0][-len(tokens_of(deltas["0"])) :]
        tokens = torch.tensor(PROMPT).numpy()
        assert plain.cache_manager.cache.peek(tokens, None, None)[0] == 32 * number
        assert_idle(plain)

    def test_are_forgotten_where_their_request_is_aborted(self, plain: Engine) -> None:
        start(plain, 1)
        plain.add_request("a", PROMPT, LONG)
        plain.step()
        assert plain.cycle.in_flight is not None
        assert plain.cycle.in_flight.extend is not None
        plain.abort("a")
        assert_consistent(plain)
        end(plain)
        assert_idle(plain)


def test_a_request_waits_until_it_is_known_that_the_prompt_it_shares_was_run(plain: Engine) -> None:
    start(plain, 1, change(LONG, max_tokens=100))
    for name in "ab":
        plain.add_request(name, [*PROMPT, 1], change(LONG, max_tokens=80))
    cached: dict[str, int] = {}
    firsts: dict[str, int] = {}
    for number in itertools.count():
        if not plain.has_unfinished_requests:
            break
        for delta in plain.step():
            firsts.setdefault(delta.request_id, number)
            cached[delta.request_id] = delta.num_cached_tokens
    assert (cached["a"], cached["b"]) == (0, len(PROMPT))
    assert firsts["b"] <= firsts["a"] + 6  # not when "a" has ended
    assert_idle(plain)


def test_a_request_waits_for_a_prompt_whose_last_run_is_in_flight(plain: Engine) -> None:
    """It comes when the request with that prompt generates already, and nothing of the last run was read."""
    prompt = [*PROMPT, *range(5, 25)]
    start(plain, 1, change(LONG, max_tokens=100))
    plain.add_request("a", [*prompt, 1], change(LONG, max_tokens=80))
    request = plain.live.by_id["a"]
    while request not in plain.scheduler.verifying:
        plain.step()
    assert [(run.start, run.length) for run in request.unread_runs] == [(96, 24)]
    plain.add_request("b", [*prompt, 2], change(LONG, max_tokens=20))
    plain.add_request("c", [*prompt[:-1], 3, 4], change(LONG, max_tokens=20))  # no state comes where it parts
    found = end(plain)
    assert {name: found[name][0].num_cached_tokens for name in "bc"} == {"b": 120, "c": 96}
    assert_idle(plain)


class TestAStepOfWhichNothingIsWanted:
    @pytest.mark.parametrize("is_known", [False, True])
    def test_is_neither_read_nor_counted(
        self, plain: Engine, expected: Engine, is_known: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lone request ends at a stop token that steps know, or that they do not; the next one does not wait."""
        text, other = (tokens_of(run(expected, [("a", prompt, LONG)])["a"]) for prompt in ([5, 6], PROMPT))
        stops = unknown(text)[-1:] if is_known else unknown(text)
        wait, waited = DeferredRead.wait, list[DeferredRead]()

        def noted(read: DeferredRead) -> list[list[Any]]:
            waited.append(read)
            return wait(read)

        monkeypatch.setattr(DeferredRead, "wait", noted)
        dropped: DeferredRead | None = None
        for _ in range(2):
            plain.flush_cache()
            before = chain_of(plain)
            waited.clear()
            plain.add_request("a", [5, 6], change(LONG, stop_token_ids=stops))
            found = end(plain)["a"]
            after = chain_of(plain)
            assert tokens_of(found) == text[: text.index(stops[-1]) + 1]
            assert after.num_steps - before.num_steps == len(waited) == len(tokens_of(found))
            assert after.num_discarded - before.num_discarded == (not is_known)
            assert isinstance(plain.cycle._dropped, DeferredRead)
            assert plain.cycle._dropped not in (*waited, dropped)
            dropped = plain.cycle._dropped
            assert plain.cycle.in_flight is None
            assert plain.stats().state_used_slots == 0
            assert plain.stats().kv_cached_tokens == 2 + len(tokens_of(found)) - 1
            assert tokens_of(run(plain, [("b", PROMPT, LONG)])["b"]) == other
        assert_idle(plain)

    def test_is_read_where_a_prompt_was_run_in_front_of_it(self, plain: Engine, expected: Engine) -> None:
        """Whether that was finite is to be known, and its state to be cached."""
        text, other = (tokens_of(run(expected, [("a", prompt, LONG)])["a"]) for prompt in ([5, 6], PROMPT))
        stop = unknown(text)[-1]
        plain.add_request("a", [5, 6], change(LONG, stop_token_ids=(stop,)))
        found: list[OutputDelta] = []
        while text.index(stop) - len(tokens_of(found)) > 0:
            found += plain.step()
        plain.add_request("b", PROMPT, LONG)  # its first chunk is run in front of the step behind the last one of "a"
        found += plain.step()
        assert found[-1].finish_reason == "stop"
        assert plain.cycle.in_flight is not None
        assert plain.cycle.in_flight.extend is not None
        assert_consistent(plain)
        assert tokens_of(end(plain)["b"]) == other
        assert plain.cache_manager.cache.peek(torch.tensor(PROMPT[:40]).numpy(), None, None)[0] > 0
        assert_idle(plain)


class Waits(list[str]):
    """What the host has read of the device, or written to it: each time its clock goes on to where that is free."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self.is_on = clock, True

    def append(self, name: str) -> None:
        if self.is_on:
            super().append(name)
            self._clock.now = max(self._clock.now, self._clock.device_is_free)


class Device(Timed):
    """What its steps do by themselves is no wait of the host."""

    def __init__(self, clock: Clock, seconds: float, waits: Waits) -> None:
        super().__init__(clock, seconds)
        self._waits = waits

    def run(self, *args: Any, **named: Any) -> Any:
        self._waits.is_on = False
        try:
            return super().run(*args, **named)
        finally:
            self._waits.is_on = True

    def read(self, tensors: Any) -> Any:
        self._waits.is_on = False
        try:
            return super().read(tensors)
        finally:
            self._waits.is_on = True


@pytest.mark.fast_cases("block")
@pytest.mark.parametrize("kind", KINDS)
def test_ends_and_joins_take_no_time_of_host_or_device(
    kind: str, flags_of: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that counts, and on which each number that the host reads or writes waits for the device: while three
    of four requests end, and another one comes, all takes as long as the longer of host and device."""
    device, parts, clock = 1.0, (0.3, 0.4, 0.3), Clock()
    engine = build(**flags_of(kind), **CHAINED, chunked_prefill_size=32)
    graphs, runner, waits = engine.runner.graph_runner, engine.runner, Waits(clock)
    assert graphs is not None
    replay, inputs = graphs.replay, graphs.inputs
    graphs.replay = Device(clock, device, waits)
    graphs.inputs = type(inputs)(SIZE, inputs.forced_output_ids.shape[1], torch.device("cpu"), is_mirrored=True)
    named = [(str(i), list(PROMPTS[i]), change(LONG, max_tokens=80)) for i in range(SIZE)]
    for count in range(1, SIZE + 1):
        found = run(engine, named[:count])
    params = ends_of([tokens_of(of) for of in found.values()], [text_of(of) for of in found.values()])
    engine.flush_cache()
    num_launches = num_runs = 0

    def launched(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            nonlocal num_launches
            clock.work(parts[0])
            num_launches += 1
            return function(*args)

        return timed

    def extended(runs: Any, extend: Callable[..., Any] = runner.extend) -> Any:
        nonlocal num_runs
        clock.launch(device)
        num_runs += 1
        return extend(runs)

    def finished(*args: Any, finish: Callable[..., Any] = runner.finish) -> Any:
        results = finish(*args)
        clock.work(parts[1])
        return results

    for name in ("launch", "launch_behind"):
        monkeypatch.setattr(runner, name, launched(getattr(runner, name)))
    monkeypatch.setattr(runner, "extend", extended)
    monkeypatch.setattr(runner, "finish", finished)
    for (name, prompt, _), own in zip(named, params, strict=True):
        engine.add_request(name, prompt, own)
    while len(engine.scheduler.verifying) < SIZE or engine.cycle.in_flight is None:
        engine.step()
    began, num_launches, num_runs, num_steps, ended = clock.now, 0, 0, 0, set[str]()
    with StepWatch() as watch:
        watch.trace.host_reads = watch.trace.host_writes = waits
        while len(ended) < 3 or num_runs < 4:
            ended |= {delta.request_id for delta in engine.step() if delta.finish_reason is not None}
            if len(ended) == 1 and "4" not in engine.live.by_id:
                engine.add_request("4", PROMPT, change(LONG, max_tokens=80))
            clock.work(parts[2])
            num_steps += 1
    assert waits == []
    num_in_flight = 1  # at the beginning
    assert (clock.now - began) <= 1.15 * device * (num_in_flight + num_launches + num_runs)
    assert num_launches >= num_steps > 8
    end(engine)
    graphs.replay, graphs.inputs = replay, inputs
    engine.close()
