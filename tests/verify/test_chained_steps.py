"""Steps that are launched before the one before them was read: the same texts, and nothing is left behind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba import SamplingParams
from specmamba.core import ChainStats, OutputDelta
from specmamba.cuda_graphs import Columns, EagerReplay, HostRead, NextPart, StepWatch
from specmamba.engine.captured.step_in_flight import StepInFlight
from specmamba.engine.engine import Engine
from specmamba.engine.request import KNOWN_STOPS, Request
from specmamba.verify.result import StepOutput, StepResult
from tests.draft.test_chained_mtp import write_demo
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
from tests.models.test_model_exact import new_engine
from tests.verify.deferred import DeferredReplay, deferred, random_delays
from tests.verify.test_captured_steps import answer_all, assert_same_answers, new_llm

SIZE = 7
CHAINED: dict[str, Any] = {"cuda_graph_max_bs": SIZE, "max_running_requests": SIZE}
DIRECT: dict[str, Any] = {"disable_cuda_graph": True, "max_running_requests": SIZE}
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"mtp": 3},
    "plain": {"mtp": 0},
    "tree": {"mtp": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
}
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = [[300, 17, 42], [5, 6], [900, 5, 1], [8, 9, 10, 11], [40, 41], [7], [100, 200, 300, 400]]


def requests_of(found: dict[str, list[OutputDelta]] | None = None) -> list[tuple[str, list[int], SamplingParams]]:
    """Seven requests of different lengths, sampled and greedy; four end at tokens or strings of what was found."""
    params = [change(LONG, max_tokens=25 + 4 * i, temperature=0.7 * (i % 3 == 2), seed=i) for i in range(SIZE)]
    params[5] = change(params[5], logprobs=2)
    if found is not None:
        for i in (0, 2):  # somewhere in the middle, mostly inside of an accepted path
            params[i] = change(params[i], stop_token_ids=(tokens_of(found[str(i)])[10 + i],))
        params[1] = change(params[1], stop_token_ids=unknown(tokens_of(found["1"])))
        params[3] = change(params[3], stop=(text_of(found["3"])[12:15],))
    return [(str(i), list(PROMPTS[i]), params[i]) for i in range(SIZE)]


def unknown(text: tuple[int, ...]) -> tuple[int, ...]:
    """So many stop tokens that captured steps do not know the one that is found in the text, the last one here."""
    others = [token for token in range(max(text)) if token not in text][:KNOWN_STOPS]
    return (*others, next(token for token in text[1:] if token > others[-1]))


def start(engine: Engine, count: int, params: SamplingParams = LONG) -> None:
    """Let so many requests decode, with a step in flight."""
    for i in range(count):
        engine.add_request(str(i), list(PROMPTS[i]), params)
    while len(engine.scheduler.verifying) < count or engine.cycle.in_flight is None:
        engine.step()


def end(engine: Engine) -> dict[str, list[OutputDelta]]:
    deltas: dict[str, list[OutputDelta]] = {}
    while engine.has_unfinished_requests:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def chain_of(engine: Engine) -> ChainStats:
    stats = engine.stats().chain
    assert stats is not None
    return stats


@pytest.fixture(scope="module")
def direct() -> Iterator[Callable[[str], Engine]]:
    """Engines by drafts, whose steps run and are read at once."""
    engines: dict[str, Engine] = {}

    def of(drafts: str) -> Engine:
        if drafts not in engines:
            engines[drafts] = build(**DRAFTS[drafts], **DIRECT)
        return engines[drafts]

    yield of
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    engine = build(mtp=0, **CHAINED)
    with deferred(engine, random_delays(3, longest=0.002)):
        run(engine, requests_of())
        yield engine
    engine.close()


def write_trees(folder: Path) -> Path:
    """A file of two trees: eight nodes for one and two requests, two for more."""
    small = {"parents": [-1, 0], "ranks": [0, 0]}
    large = {"parents": [-1, 0, 1, 2, 3, 4, 5, 0], "ranks": [0, 0, 0, 0, 0, 0, 0, 1], "max_batch_size": 2}
    (folder / "trees.json").write_text(json.dumps({"format": "specmamba-tree/1", "trees": [large, small]}))
    return folder / "trees.json"


def test_a_batch_that_gets_larger_trees_is_read_first(tmp_path: Path) -> None:
    """A step decides for trees of its own size whether the next one folds."""
    flags: dict[str, Any] = {"speculative_tree": str(write_trees(tmp_path)), "speculative_algorithm": "mtp"}
    flags["max_running_requests"] = 4
    chained, direct = build(**flags, cuda_graph_max_bs=4), build(**flags, disable_cuda_graph=True)
    with deferred(chained, random_delays(1, longest=0.001)) as replay:
        for cut in (20, 26, 32, 35, 41):
            lengths = (70, 70, cut)
            requests = [(str(i), list(PROMPTS[i]), change(LONG, max_tokens=n)) for i, n in enumerate(lengths)]
            texts = []
            for engine in (chained, direct):  # which has the trees of its own number of requests, not of a bucket's
                texts.append({name: tokens_of(deltas) for name, deltas in run(engine, requests).items()})
                engine.flush_cache()
            assert texts[0] == texts[1]
        assert replay.num_chained > 100
    for engine in (chained, direct):
        engine.close()


def test_a_request_that_waits_for_anothers_prompt_is_admitted_when_that_was_run() -> None:
    engine = build(mtp=0, cuda_graph_max_bs=4, max_running_requests=4, chunked_prefill_size=128)
    prompt, firsts = [7 * i % 900 + 5 for i in range(200)], dict[str, int]()
    with deferred(engine, random_delays(1, longest=0.001)):
        run(engine, [("before", [1, 2, 3], LONG)])
        for name in "ab":
            engine.add_request(name, prompt, change(LONG, max_tokens=60))
        number = 0
        while engine.has_unfinished_requests:
            number += 1
            for delta in engine.step():
                firsts.setdefault(delta.request_id, number)
        assert chain_of(engine).num_chained > 0
    engine.close()
    assert firsts["b"] < firsts["a"] + 10


def test_a_stop_string_with_a_head_of_several_modules_and_one_step(tmp_path: Path) -> None:
    """States before tokens of all modules are kept where one is used; such a head leads no chain."""
    write_demo(tmp_path / "demo", 3)
    flags = {"max_running_requests": 4, "speculative_adaptive": "off"}
    chained, direct = (
        new_engine(tmp_path / "demo", 1, **flags, **one)
        for one in ({"cuda_graph_max_bs": 4}, {"disable_cuda_graph": True})
    )
    text = text_of(run(direct, [("0", list(PROMPTS[0]), LONG)])["0"])
    requests = [("0", list(PROMPTS[0]), change(LONG, stop=(text[12:15],))), ("1", list(PROMPTS[1]), LONG)]
    with deferred(chained, random_delays(1, longest=0.001)):
        for _ in range(2):
            both(chained, direct, requests)
    for engine in (chained, direct):
        engine.close()


class TestTexts:
    @pytest.mark.parametrize("drafts", sorted(DRAFTS))
    def test_are_those_of_direct_steps(self, drafts: str, direct: Callable[[str], Engine]) -> None:
        """Batches of 7 and of 1, whatever the device's delays; conversations go on from what is cached."""
        expected, engine = direct(drafts), build(**DRAFTS[drafts], **CHAINED)
        found = run(expected, requests_of())
        requests = requests_of(found)
        with deferred(engine, random_delays(7, longest=0.003)) as replay:
            for _ in range(2):  # the first step of a kind is not chained
                got = both(engine, expected, requests)
            num_chained = replay.num_chained
            assert num_chained > 20
            assert [got[name][2] for name in "012345"] == ["stop"] * 4 + ["length"] * 2
            again = [(name, [*PROMPTS[int(name)], *got[name][0], 5], change(LONG, max_tokens=9)) for name in got]
            for request in (*requests, *again):
                both(engine, expected, [request])
            assert replay.num_chained > num_chained + 50
        assert chain_of_idle(engine).num_discarded >= 3  # of texts that end where steps do not see it
        engine.close()

    def test_requests_that_are_aborted_take_nothing_from_others(
        self, plain: Engine, direct: Callable[[str], Engine]
    ) -> None:
        """In the middle of a chain, with more requests than the batch has room for."""
        rng, requests = random.Random(5), [(f"{i}", list(PROMPTS[i % SIZE]), LONG) for i in range(2 * SIZE)]
        requests = [(name, prompt, change(LONG, max_tokens=20 + 3 * i)) for i, (name, prompt, _) in enumerate(requests)]
        expected, before = answers(run(direct("plain"), requests)), chain_of(plain).num_chained
        for request in requests:
            plain.add_request(*request)
        deltas: dict[str, list[OutputDelta]] = {name: [] for name, _, _ in requests}
        aborted = set[str]()
        while plain.has_unfinished_requests:
            for delta in plain.step():
                assert delta.request_id not in aborted
                deltas[delta.request_id].append(delta)
            if plain.live.by_id and rng.random() < 0.08:
                aborted.add(victim := rng.choice(list(plain.live.by_id)))
                plain.abort(victim)
            assert_consistent(plain)
        assert_idle(plain)
        assert aborted
        assert chain_of(plain).num_chained > before + 20
        for name in deltas.keys() - aborted:
            assert answer(deltas[name]) == expected[name]

    def test_ends_and_failures_leave_nothing_of_the_step_behind(
        self, plain: Engine, direct: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One request's numbers are not finite: it has a row in the step that is in flight then."""
        expected = answers(run(direct("plain"), requests_of()))
        finish, discarded = plain.runner.finish, chain_of(plain).num_discarded

        def spoilt(step: StepInFlight, behind: Any = None, ended: Any = ()) -> list[StepResult]:
            results = finish(step, behind, ended)
            return [
                result._replace(is_finite=request.request_id != "3" or len(request.output) < 8)
                for request, result in zip(step.requests, results, strict=True)
            ]

        monkeypatch.setattr(plain.runner, "finish", spoilt)
        got = run(plain, requests_of())
        assert (got["3"][-1].finish_reason, len(tokens_of(got["3"]))) == ("error", 8)
        assert chain_of(plain).num_discarded > discarded
        for name in got.keys() - {"3"}:
            assert answer(got[name]) == expected[name]

    def test_log_probabilities_and_cached_text_end_where_the_text_does(self, plain: Engine) -> None:
        [text] = [tokens_of(of_request) for of_request in run(plain, [("a", [5, 6], LONG)]).values()]
        for is_known in (True, False, False):  # log probabilities are another kind of step: the first is not chained
            plain.flush_cache()
            stops = unknown(text)[-1:] if is_known else unknown(text)
            discarded = chain_of(plain).num_discarded
            plain.add_request("a", [5, 6], change(LONG, stop_token_ids=stops, logprobs=0))
            deltas = end(plain)["a"]
        count = text.index(stops[-1]) + 1
        assert chain_of(plain).num_discarded == discarded + 1
        assert tokens_of(deltas) == text[:count]
        assert [p.token_id for delta in deltas for p in delta.logprobs] == list(text[:count])
        assert plain.stats().kv_used_tokens == 0
        assert plain.stats().kv_cached_tokens == 2 + count - 1  # the last one was never run
        assert_idle(plain)


def both(engine: Engine, expected: Engine, requests: list[Any]) -> dict[str, Any]:
    """Texts, numbers of accepted drafts, and what was cached for each request, which are the same."""
    found = []
    for each in (engine, expected):
        for request in requests:
            each.add_request(*request)
        deltas = end(each)
        listed = {name: [p.token_id for delta in of for p in delta.logprobs] for name, of in deltas.items()}
        figures = {name: (of[-1].num_cached_tokens, of[-1].spec) for name, of in deltas.items()}
        found.append({name: (*answer(of), figures[name], listed[name]) for name, of in deltas.items()})
    assert found[0] == found[1]
    return found[0]


def chain_of_idle(engine: Engine) -> ChainStats:
    """Figures of an engine whose steps are not deferred any more, and at rest."""
    assert_idle(engine)
    return engine.cycle.chain.stats


class Watched(DeferredReplay):
    """Watches every step on its thread."""

    def __init__(self, delay: Callable[[], float]) -> None:
        super().__init__(delay)
        self.watches: list[StepWatch] = []

    @torch.inference_mode()
    def _work(self, step: Callable[[], Any], result: Any) -> None:
        with StepWatch() as watch:
            super()._work(step, result)
        self.watches.append(watch)


@pytest.mark.parametrize("drafts", ["chain", "plain"])
def test_nothing_is_read_between_two_launches(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the host, from one launch to the next, nor by the steps; nor does the host give steps any number."""
    engine = build(**DRAFTS[drafts], **CHAINED)
    monkeypatch.setattr("tests.verify.deferred.DeferredReplay", Watched)
    with deferred(engine, lambda: 0.001) as replay:
        assert isinstance(replay, Watched)
        run(engine, [(str(i), list(PROMPTS[i]), LONG) for i in range(2)])
        start(engine, 2)
        assert engine.cache_manager.grow_ahead(engine.scheduler.verifying, 60, 0)  # for all steps that are watched
        engine.pools.table.upload()
        launch, watches = engine.runner.launch_behind, list[StepWatch]()

        def watched(*args: Any) -> Any:
            with StepWatch() as watch:
                found = launch(*args)
            watches.append(watch)
            return found

        monkeypatch.setattr(engine.runner, "launch_behind", watched)
        replay.watches.clear()
        num_chained = replay.num_chained
        for _ in range(6):
            first = engine.cycle.in_flight
            assert engine.cycle._launch_behind([])
            assert first is engine.cycle.in_flight, "the first one was read"
            engine.cycle._tell(engine.cycle._receive())
        assert replay.num_chained == num_chained + 6 == num_chained + len(watches)
        assert not [read for watch in watches for read in (*watch.trace.host_reads, *watch.trace.host_writes)]
        assert not [name for watch in watches for name in watch.trace.operators], "the host gives nothing to the device"
        steps = replay.watches[:5]
        assert not [read for watch in steps for read in (*watch.trace.host_reads, *watch.trace.host_writes)]
        assert all(watch.trace.operators == steps[0].trace.operators for watch in steps)
        end(engine)
    engine.close()


class TestSteps:
    def test_are_chained_but_for_the_first_ones(self, plain: Engine) -> None:
        before, params = chain_of(plain), change(LONG, max_tokens=30)
        plain.flush_cache()
        run(plain, [("a", [5], params)])  # a prompt of one token: nothing is extended
        after = chain_of(plain)
        assert after.num_steps - before.num_steps == 30
        assert after.num_chained - before.num_chained == 29
        assert after.num_discarded == before.num_discarded

    @pytest.mark.parametrize("name", ["forced", "penalties"])
    def test_of_which_the_host_has_a_part_are_read_first(self, plain: Engine, name: str) -> None:
        params = change(LONG, presence_penalty=0.5) if name == "penalties" else LONG
        for _ in range(2):
            before = chain_of(plain)
            plain.add_request("a", [5, 6], params, (1, 2, 3) if name == "forced" else ())
            end(plain)
        after = chain_of(plain)
        assert after.num_chained == before.num_chained
        assert after.num_for_host - before.num_for_host >= 38

    def test_wait_for_a_request_that_comes(self, plain: Engine, direct: Callable[[str], Engine]) -> None:
        expected = answers(run(direct("plain"), [(str(i), list(PROMPTS[i]), LONG) for i in range(2)]))
        plain.add_request("0", list(PROMPTS[0]), LONG)
        deltas: dict[str, list[OutputDelta]] = {"0": [], "1": []}
        before, num_steps = chain_of(plain), 0
        while plain.has_unfinished_requests:
            for delta in plain.step():
                deltas[delta.request_id].append(delta)
            if (num_steps := num_steps + 1) == 12:
                plain.add_request("1", list(PROMPTS[1]), LONG)
        assert answers(deltas) == expected
        assert chain_of(plain).num_for_requests > before.num_for_requests
        assert chain_of(plain).num_chained > before.num_chained + 20

    @pytest.mark.usefixtures("no_headroom")
    def test_wait_where_memory_must_be_made_free(self) -> None:
        """Nothing is evicted or moved under a step in flight where pools are elastic."""
        engine = build(mtp=0, max_running_requests=2, cuda_graph_max_bs=2, max_total_tokens=80, page_size=8)
        expected = build(mtp=0, **DIRECT, max_total_tokens=400)
        requests = [(str(i), list(PROMPTS[i]), change(LONG, max_tokens=44)) for i in range(4)]
        with deferred(engine, random_delays(11, longest=0.001)):
            run(engine, requests)
            assert answers(run(engine, requests)) == answers(run(expected, requests))
            assert engine.stats().num_preemptions > 0
            assert chain_of(engine).num_for_memory > 0
            assert chain_of(engine).num_chained > 20
        for each in (engine, expected):
            each.close()

    def test_wait_for_states_that_are_left(self, direct: Callable[[str], Engine]) -> None:
        """Where one is due inside of the step in flight."""
        flags: dict[str, Any] = {"mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": 8}
        engine = build(mtp=3, **CHAINED, **flags)
        expected = answers(run(direct("chain"), requests_of()))
        with deferred(engine, random_delays(12, longest=0.001)):
            for _ in range(2):
                assert answers(run(engine, requests_of())) == expected
            assert chain_of(engine).num_for_memory > 5
            assert chain_of(engine).num_chained > 5
            engine.add_request("a", list(PROMPTS[0]), LONG)
            end(engine)
            tokens = expected["0"][0]
            assert (
                engine.cache_manager.cache.peek(torch.tensor([*PROMPTS[0], *tokens[:16]]).numpy(), None, None)[0] > 10
            )
        engine.close()

    def test_close_frees_what_requests_hold_that_have_ended(self) -> None:
        engine = build(mtp=0, **CHAINED)
        with deferred(engine, lambda: 0.002):
            [text] = [tokens_of(of) for of in run(engine, [("a", [5, 6], LONG)]).values()]
            run(engine, [("a", [5, 6], LONG), ("b", [7], LONG)])
            engine.add_request("a", [5, 6], change(LONG, stop_token_ids=unknown(text)))
            engine.add_request("b", [7], LONG)
            while engine.has_unfinished_requests and not engine.cycle.chain.ended:
                engine.step()
            assert engine.stats().state_used_slots == 2
            engine.close()
        assert engine.stats().state_used_slots == 0
        assert engine.pools.table.num_free_rows == engine.pools.table.num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", ["chain", "drawn tree", "plain", "tree"])
def test_texts_on_a_gpu(drafts: str) -> None:
    """Captured steps that follow one another on the device, against steps that run operator by operator."""
    with (
        new_llm(drafts, device="cuda", disable_cuda_graph=True) as expected,
        new_llm(drafts, device="cuda", speculative_adaptive="off") as llm,
    ):
        for case in (("greedy", 1), ("greedy", 4), ("both rules", 4)):
            for _ in range(2):
                assert_same_answers(case, answer_all(llm, *case), answer_all(expected, *case), expected)
        assert chain_of(llm.engine).num_chained > 5
        assert_idle(llm.engine)


class Clock:
    """A clock of the host, which a device of its own works beside."""

    def __init__(self) -> None:
        self.now = self.device_is_free = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, seconds: float) -> float:
        self.device_is_free = max(self.now, self.device_is_free) + seconds
        return self.device_is_free


class TimedRead:
    """A read that is there at a time of the clock."""

    def __init__(self, clock: Clock, end: float, numbers: list[list[Any]]) -> None:
        self._clock, self._end, self._numbers = clock, end, numbers

    def wait(self) -> list[list[Any]]:
        self._clock.now = max(self._clock.now, self._end)
        return self._numbers


class Timed(EagerReplay[StepOutput]):
    """Runs steps at once; they take time on a clock."""

    is_deferred = True

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(has_fixed_shapes=True)
        self._clock, self._seconds, self._end = clock, seconds, 0.0
        self._known: set[Hashable] = set()

    def run(
        self,
        key: Hashable,
        function: Callable[[], Any],
        clear: Callable[[], object],
        fill: Callable[[], object] | None,
        then: NextPart | None = None,
    ) -> StepOutput:
        self._known.add((key, None if then is None else then.key))
        self._end = self._clock.launch(self._seconds)
        return super().run(key, function, clear, fill, then)

    def may_follow(self, key: Hashable, then: NextPart) -> bool:
        return (key, then.key) in self._known

    def read(self, tensors: Any) -> HostRead:
        return TimedRead(self._clock, self._end, [tensor.tolist() for tensor in tensors])


@pytest.mark.parametrize(("drafts", "presence"), [("chain", 0.0), ("plain", 0.0), ("plain", 0.5)])
def test_a_step_takes_as_long_as_the_longer_of_host_and_device(
    drafts: str, presence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that counts: the host works as long as the device, before a launch, after a read, and for clients.

    With penalties the host must read before it launches, and only what clients do is hidden.
    """
    device, parts = 1.0, (0.3, 0.4, 0.3)
    engine, clock = build(**DRAFTS[drafts], **CHAINED), Clock()
    graphs, runner = engine.runner.graph_runner, engine.runner
    assert graphs is not None
    before, inputs = graphs.replay, graphs.inputs
    graphs.replay = Timed(clock, device)
    graphs.inputs = type(inputs)(SIZE, inputs.forced_output_ids.shape[1], torch.device("cpu"), is_mirrored=True)
    run(engine, [(str(i), list(PROMPTS[i]), change(LONG, presence_penalty=presence)) for i in range(2)])

    def costs(function: Callable[..., Any], seconds: float, is_before: bool) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            clock.work(seconds * is_before)
            found = function(*args)
            clock.work(seconds * (not is_before))
            return found

        return timed

    monkeypatch.setattr(runner, "launch", costs(runner.launch, parts[0], True))
    monkeypatch.setattr(runner, "launch_behind", costs(runner.launch_behind, parts[0] * (not presence), True))
    monkeypatch.setattr(runner, "finish", costs(runner.finish, parts[1], False))
    start(engine, 2, change(LONG, presence_penalty=presence))
    began, num_steps = clock.now, 0
    while len(engine.scheduler.verifying) == 2:
        engine.step()
        clock.work(parts[2])
        num_steps += 1
    took = (clock.now - began) / num_steps
    assert num_steps > 8
    if presence:
        assert took > 1.5 * max(device, sum(parts))
    else:
        assert took <= 1.15 * max(device, sum(parts))
    end(engine)
    graphs.replay, graphs.inputs = before, inputs
    engine.close()


class TestColumns:
    def columns(self, queue: list[Callable[[], object]]) -> Columns:
        padding = {"a": 0, "b": 7, "c": 1}
        return Columns(padding, 4, torch.int64, torch.device("cpu"), is_mirrored=True, queue=queue.append)

    def do(self, queue: list[Callable[[], object]]) -> None:
        while queue:
            queue.pop(0)()

    def test_two_writes_may_be_on_their_way(self) -> None:
        queue: list[Callable[[], object]] = []
        columns = self.columns(queue)
        self.do(queue)
        for number in (3, 4):
            columns.write({"a": [number] * 4})
        for number in (3, 4):
            queue.pop(0)()
            assert columns.read("a", 4).tolist() == [number] * 4

    def test_rows_move_and_advance_on_the_device(self) -> None:
        queue: list[Callable[[], object]] = []
        columns = self.columns(queue)
        columns.write({"a": [1, 2, 3, 4], "b": [5, 6, 8, 9], "c": [2, 3, 4, 5]})
        self.do(queue)
        others = self.columns(queue)
        others.write({"a": [0, 0, 6], "c": [1, 1, 9]})
        self.do(queue)
        columns.keep(torch.tensor([1, 3, -1, -1]), others)
        assert [columns.read(name, 4).tolist() for name in "abc"] == [[2, 4, 6, 0], [6, 9, 7, 7], [3, 5, 9, 1]]
        more = {"b": columns.read("b", 3) + 1, "c": columns.read("c", 3) > 4}
        columns.put(more, columns.read("a", 3) > 0)
        assert [columns.read(name, 4).tolist() for name in "abc"] == [[2, 4, 6, 0], [7, 10, 8, 7], [0, 1, 1, 1]]


def test_replaced_requests_are_others() -> None:
    """Requests are keys of what ends: two with the same id are not the same."""
    first = Request("a", 0, (1,), LONG, 0, text=None)  # type: ignore[arg-type]
    second = Request("a", 1, (1,), LONG, 0, text=None)  # type: ignore[arg-type]
    assert len({first, second}) == 2
    assert replace(ChainStats(1, 0, 0, 0, 0, 0), num_chained=1).num_chained == 1
