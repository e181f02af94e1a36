"""Steps that are read after the host has gone on: the same texts, and nothing is left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
import torch

from specmamba import LLM, SamplingParams
from specmamba.cache.pair_writes import PairWrites
from specmamba.core import OutputDelta
from specmamba.cuda_graphs.host_reads import PinnedReads
from specmamba.engine.captured.step_in_flight import StepInFlight
from specmamba.engine.engine import Engine
from specmamba.errors import RequestError
from specmamba.sampling_params import GrammarSpec
from tests.engine.test_engine import (
    CONTEXT,
    VOCABULARY,
    answer,
    assert_consistent,
    assert_idle,
    build,
    random_requests,
    run,
    tokens_of,
)
from tests.tiny import write_tiny_checkpoint
from tests.verify.deferred import deferred, random_delays
from tests.verify.test_captured_steps import (
    BUCKET,
    DIRECT,
    DRAFTS,
    MEMORY,
    answer_all,
    assert_same_answers,
    new_llm,
)

REPLAYED: dict[str, Any] = {"cuda_graph_max_bs": BUCKET}
CASES = ("greedy", 1), ("greedy", 3), ("filtered and penalized", 3), ("both rules", 3), ("biased and listed", 3)
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = [300, 17, 42], [5, 6], [900, 5, 1], [8, 9, 10, 11]


@pytest.mark.fast_cases("chain", "tree")
@pytest.mark.parametrize("drafts", sorted(DRAFTS))
def test_texts_are_those_of_direct_steps(drafts: str) -> None:
    """With every kind of drafts, whatever the device's delays."""
    with new_llm(drafts, **DIRECT) as plain, new_llm(drafts, **REPLAYED) as llm:
        with deferred(llm.engine, random_delays(1)) as replay:
            for case in CASES:
                for _ in range(2):  # the first step of a kind is not deferred
                    assert_same_answers(case, answer_all(llm, *case), answer_all(plain, *case), plain)
            assert (replay.num_deferred > 20) == (drafts not in ("ngram", "draft model"))
        stats = llm.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens, stats.state_used_slots) == (0, 0, 0, 0)
        assert not llm.engine.has_unfinished_requests


def test_texts_of_drafts_whose_size_is_decided_in_steps() -> None:
    flags: dict[str, Any] = {"dtype": "float32", "speculative_num_steps": 3, "speculative_adaptive": "auto", **MEMORY}
    with LLM(**flags, **DIRECT) as plain, LLM(**flags, **REPLAYED) as llm:
        with deferred(llm.engine, random_delays(2)) as replay:
            got = [[output.token_ids for output in each.generate(list(PROMPTS), LONG)] for each in (llm, llm, plain)]
            assert got[0] == got[1] == got[2]
            assert replay.num_deferred > 10
        assert_idle(llm.engine)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_checkpoint(folder, 1, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT))


@pytest.mark.parametrize("mtp", [0, 3])
def test_requests_that_come_and_go(tiny: str, mtp: int) -> None:
    """They are aborted and preempted, and the prefix cache is flushed, while steps are in flight."""
    rng, requests = random.Random(mtp), random_requests(seed=mtp, count=60)
    expected = run(build(tiny, mtp=0, max_queued_requests=60, max_running_requests=16), requests)
    engine = build(
        tiny, mtp, page_size=16, max_total_tokens=160, chunked_prefill_size=16, max_running_requests=4, **REPLAYED
    )
    arriving, aborted = requests[::-1], set[str]()
    deltas: dict[str, list[OutputDelta]] = {name: [] for name, _, _ in requests}
    with deferred(engine, random_delays(mtp, longest=0.002)) as replay:
        while arriving or engine.has_unfinished_requests:
            while arriving and rng.random() < 0.4:
                engine.add_request(*arriving.pop())
            found = engine.step()
            assert len({delta.request_id for delta in found}) == len(found)
            for delta in found:
                assert delta.request_id not in aborted
                deltas[delta.request_id].append(delta)
            if engine._requests and rng.random() < 0.12:
                victim = rng.choice(list(engine._requests))
                engine.abort(victim)
                aborted.add(victim)
            if engine.scheduler.verifying and rng.random() < 0.05:
                engine.preempt(rng.choice(engine.scheduler.verifying))
            if rng.random() < 0.05:
                engine.flush_cache()
            assert_consistent(engine)
        assert replay.num_deferred > 50
    assert_idle(engine)
    assert len(aborted) > 5
    for name, of_request in deltas.items():
        if name in aborted:
            tokens = tokens_of(of_request)
            assert tokens_of(expected[name])[: len(tokens)] == tokens
        else:
            assert answer(of_request) == answer(expected[name])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = build(mtp=3, max_running_requests=4, **REPLAYED)
    with deferred(engine, lambda: 0.002):
        run(engine, [(f"first {i}", list(PROMPTS[i]), LONG) for i in range(4)])
        run(engine, [("alone", [5, 6], LONG)])
        yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[tuple[int, ...]]:
    plain = build(mtp=0, max_running_requests=4)
    found = run(plain, [(str(i), list(prompt), LONG) for i, prompt in enumerate(PROMPTS)])
    return [tokens_of(of_request) for of_request in found.values()]


def start(engine: Engine, count: int) -> None:
    """Let so many requests decode, with a step in flight."""
    for i in range(count):
        engine.add_request(str(i), list(PROMPTS[i]), LONG)
    while len(engine.scheduler.verifying) < count or engine._in_flight is None:
        engine.step()


class TestBetweenTwoSteps:
    def test_an_abort_keeps_what_the_others_have_got(self, engine: Engine, expected: list[tuple[int, ...]]) -> None:
        deltas: dict[str, list[OutputDelta]] = {str(i): [] for i in range(3)}
        for i in range(3):
            engine.add_request(str(i), list(PROMPTS[i]), LONG)
        num_steps = 0
        while engine.has_unfinished_requests:
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
            if (num_steps := num_steps + 1) == 5:
                assert engine._in_flight is not None
                engine.abort("1")
                known = len(deltas["1"])
                assert {delta.request_id for delta in engine._untold} == {"0", "2"}
        assert len(deltas["1"]) == known
        assert [tokens_of(deltas[name]) for name in ("0", "2")] == [expected[0], expected[2]]
        assert_idle(engine)

    def test_what_ends_in_an_abort_of_another_is_still_told(self, engine: Engine) -> None:
        """Its id is in use until then."""
        short = SamplingParams(max_tokens=1, temperature=0.0)
        engine.add_request("short", [5, 6], short)
        engine.add_request("long", [300, 17, 42], LONG)
        while engine._in_flight is None or not engine._in_flight.has("short"):
            assert engine.step() == []
        engine.abort("long")
        assert engine.has_unfinished_requests
        with pytest.raises(RequestError, match="running already"):
            engine.add_request("short", [5, 6], short)
        [delta] = engine.step()
        assert (delta.request_id, delta.finish_reason) == ("short", "length")
        assert_idle(engine)

    def test_nothing_is_told_of_a_request_that_was_aborted_after_it(self, engine: Engine) -> None:
        start(engine, 2)
        engine.abort("0")
        engine.abort("1")
        assert not engine.has_unfinished_requests
        assert engine.step() == []
        assert_idle(engine)

    def test_a_preempted_request_goes_on(self, engine: Engine, expected: list[tuple[int, ...]]) -> None:
        deltas: list[OutputDelta] = []
        engine.add_request("0", list(PROMPTS[0]), LONG)
        while len(tokens_of(deltas)) < 8:
            deltas += engine.step()
        engine.preempt(engine._requests["0"])
        assert engine._in_flight is None
        while engine.has_unfinished_requests:
            deltas += engine.step()
        assert tokens_of(deltas) == expected[0]
        assert_idle(engine)

    def test_a_step_that_is_read_early_is_told_by_the_next_call(
        self, engine: Engine, expected: list[tuple[int, ...]]
    ) -> None:
        """As before what moves memory between two steps."""
        deltas: dict[str, list[OutputDelta]] = {str(i): [] for i in range(3)}
        for i in range(3):
            engine.add_request(str(i), list(PROMPTS[i]), LONG)
        num_early = 0
        while engine.has_unfinished_requests:
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
            num_early += engine._in_flight is not None
            engine.settle()
            assert engine._in_flight is None
        assert num_early > 5
        assert [tokens_of(of_request) for of_request in deltas.values()] == expected[:3]
        assert_idle(engine)

    def test_a_request_that_ends_is_not_preempted(self, engine: Engine) -> None:
        engine.add_request("0", [5, 6], SamplingParams(max_tokens=1, temperature=0.0))
        engine.step()
        request = engine._requests["0"]
        engine.preempt(request)
        assert engine.stats().num_waiting == 0
        assert [delta.finish_reason for delta in engine.step()] == ["length"]
        assert_idle(engine)


def test_a_request_with_a_grammar_lets_the_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request gets one delta of a call, also where steps begin and cease to be read by the next one."""
    grammar = GrammarSpec(kind="regex", text="[a-z ]{6}")
    params = [LONG, SamplingParams(max_tokens=12, temperature=0.0, grammar=grammar), LONG]
    names: list[list[str]] = []
    with new_llm("chain", **DIRECT) as plain, new_llm("chain", **REPLAYED) as llm:
        step, prompts = llm.engine.step, list(PROMPTS[:3])

        def recorded() -> list[OutputDelta]:
            deltas = step()
            names.append([delta.request_id for delta in deltas])
            return deltas

        monkeypatch.setattr(llm.engine, "step", recorded)
        with deferred(llm.engine, random_delays(3)) as replay:
            texts = [[output.token_ids for output in each.generate(prompts, params)] for each in (llm, llm, plain)]
            assert texts[0] == texts[1] == texts[2]
            assert replay.num_deferred > 5
        assert all(len(set(of_step)) == len(of_step) for of_step in names)
        assert [] in names  # a launch alone
        assert_idle(llm.engine)


def test_close_waits_for_the_step_in_flight() -> None:
    engine = build(mtp=0, max_running_requests=2, cuda_graph_max_bs=2)
    with deferred(engine, lambda: 0.05) as replay:
        run(engine, [("a", [5, 6], LONG)])
        engine.add_request("b", [5, 6], LONG)
        while engine._in_flight is None:
            engine.step()
        engine.close()
        assert replay._newest.done()
        assert engine.stats().num_running == 0


def test_an_error_of_the_device_is_raised_by_the_call_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(mtp=0, max_running_requests=2, cuda_graph_max_bs=2)
    with deferred(engine, lambda: 0.0) as replay:
        run(engine, [("a", [5, 6], LONG)])
        monkeypatch.setattr(replay, "_delay", lambda: 1 / 0)
        engine.add_request("b", [5, 6], LONG)
        while engine._in_flight is None:
            engine.step()
        with pytest.raises(ZeroDivisionError):
            engine.step()
        engine.close()
        assert engine.stats().num_running == 0


def test_an_error_of_a_launch_is_raised_behind_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(mtp=0, max_running_requests=2, cuda_graph_max_bs=2)
    with deferred(engine, lambda: 0.002):
        run(engine, [("a", [5, 6], LONG)])
        engine.add_request("b", [5, 6], LONG)
        while engine._in_flight is None:
            engine.step()
        for name in ("launch", "launch_behind"):
            monkeypatch.setattr(engine.runner, name, lambda *_: 1 / 0)
        [delta] = engine.step()
        assert delta.request_id == "b"
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                engine.step()
        engine.close()
        assert engine.stats().num_running == 0


def test_text_that_cannot_be_decoded_ends_its_request_alone(
    engine: Engine, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next step is in flight then."""
    deltas: dict[str, list[OutputDelta]] = {"0": [], "1": []}
    for name in deltas:
        engine.add_request(name, list(PROMPTS[int(name)]), LONG)

    def fail(*_: object) -> str:
        raise RequestError("no such token")

    num_steps = 0
    while engine.has_unfinished_requests:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        if (num_steps := num_steps + 1) == 4:
            monkeypatch.setattr(engine._requests["0"].text, "decode", fail, raising=False)
    assert (deltas["0"][-1].finish_reason, deltas["0"][-1].error) == ("error", "no such token")
    assert tokens_of(deltas["1"]) == expected[1]
    assert_idle(engine)


def test_what_clients_do_takes_no_time_from_the_device() -> None:
    """With as much work behind every step as the device has in it, a step takes as long as the longer of the two."""
    work, pauses = 0.03, [0.0]
    engine = build(mtp=0, max_running_requests=2, cuda_graph_max_bs=2)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with deferred(engine, lambda: pauses[-1]):
        run(engine, [("a", [5, 6], params)])
        for attempt in range(4):  # where something else takes the cores, some steps wait for those
            typical = list[float]()
            for pause in (0.0, work):
                pauses.append(pause)
                engine.add_request(f"b{attempt}", [5, 6], params)
                engine.step()
                took = list[float]()
                while engine.has_unfinished_requests:
                    began = time.perf_counter()
                    engine.step()
                    time.sleep(work)
                    took.append(time.perf_counter() - began)
                typical.append(median(took))  # a pause of the machine is in one step
            assert work <= typical[1]
            if typical[1] < typical[0] + 0.7 * work:
                break
    assert typical[1] < typical[0] + 0.7 * work
    engine.close()


def test_writes_take_turns_in_two_pieces_of_memory() -> None:
    writes = PairWrites(torch.device("cpu"))
    sent = []
    for count in (3, 200, 5, 2):
        writes.begin(count)[:] = count
        sent.append(writes.send())
        assert all(bool((x == x.shape[1]).all()) for x in sent[-2:])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_launch_on_a_gpu_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the table of KV slots to the read that it begins."""
    with new_llm("tree", device="cuda", speculative_adaptive="off") as llm:
        expected, runner, num_launches = answer_all(llm, "greedy", 3), llm.engine.runner, dict[str, int]()

        def strict(name: str) -> Callable[..., StepInFlight | None]:
            launch = getattr(runner, name)

            def launched(*args: Any) -> StepInFlight | None:
                num_launches[name] = num_launches.get(name, 0) + 1
                torch.cuda.set_sync_debug_mode("error")
                try:
                    found: StepInFlight | None = launch(*args)
                    return found
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            return launched

        for name in ("launch", "launch_behind"):
            monkeypatch.setattr(runner, name, strict(name))
        assert answer_all(llm, "greedy", 3) == expected
        assert num_launches["launch"] > 0 < num_launches["launch_behind"]


@pytest.mark.gpu
def test_a_pinned_read_is_of_its_own_step() -> None:
    """Also where the next one has begun before it is waited for."""
    reads, x = PinnedReads(), torch.zeros(3, 2, dtype=torch.int64, device="cuda")
    y = torch.zeros(5, device="cuda")
    before = reads.begin([x, y])
    for i in range(1, 6):
        x.fill_(i)
        y.fill_(i / 2)
        now = reads.begin([x, y])
        assert before.wait() == [[[i - 1] * 2] * 3, [(i - 1) / 2] * 5]
        before = now
