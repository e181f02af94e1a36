"""Replicas in processes of their own: texts are those of one engine, also when replicas are killed or stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from specmamba.cache.prefix.inspection import WHOLE, View
from specmamba.config import EngineConfig
from specmamba.core import OutputDelta, Owner
from specmamba.engine.base_engine import BaseEngine
from specmamba.engine.engine import Engine
from specmamba.engine.engine_sample import EngineSample
from specmamba.errors import ConfigError, QueueFullError, ReplicaStateError, RequestError
from specmamba.grammar import GrammarCompiler
from specmamba.replicas import replica_launch, replica_links, replica_process, replica_tasks
from specmamba.replicas.course import MAX_MOVES
from specmamba.replicas.replica_tasks import check_count, tasks_of
from specmamba.replicas.replicated_engine import LOST_TOO_OFTEN, ReplicatedEngine
from specmamba.sampling_params import GrammarSpec, SamplingParams
from specmamba.server_config import ServerConfig
from tests.fake_engine import serving, streamed, wait_until

pytestmark = pytest.mark.usefixtures("forked_processes")

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_running_requests": 4,
    "max_total_tokens": 8192,
    "context_length": 1024,
}
PROMPTS = [f"def task_{i}(values):\n    # sorts the values and returns them\n    " for i in range(4)]


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(EngineConfig(**FLAGS))


@pytest.fixture(scope="module")
def replicated() -> Iterator[ReplicatedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):  # before a replica is started again
            patch.setattr(replica_process, name, 0.1)
        patch.setattr(replica_launch, "SEND_TIMEOUT_S", 2)
        engine = ReplicatedEngine(ServerConfig(dp_size=2, **FLAGS))
        yield engine
        pids = [replica.pid for replica in engine._links.ready.values()]
        engine.close()
    assert not any(is_alive(pid) for pid in pids)


@pytest.fixture
def both(replicated: ReplicatedEngine) -> ReplicatedEngine:
    """Both replicas, ready, without requests and cached prefixes."""
    wait_for_all(replicated)
    for name in list(replicated._courses):  # of a test that failed
        replicated.abort(name)
    replicated.flush_cache()
    return replicated


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_all(engine: ReplicatedEngine) -> None:
    def are_ready() -> bool:
        engine._links.receive(0.01)
        engine._links.take_arrivals()
        return len(engine._links.ready) == 2

    wait_until(are_ready, timeout_s=120)


def add(engine: BaseEngine, number: int, prompt: str | None = None, owner: Owner | None = None, **params: Any) -> None:
    tokens = engine.tokenizer.encode(PROMPTS[number] if prompt is None else prompt)
    given = SamplingParams(**{"max_tokens": 48, "temperature": 0.0, "ignore_eos": True, **params})
    engine.add_request(str(number), tokens, given, owner=owner or Owner())


def finish(engine: BaseEngine, after: Any = None) -> dict[str, list[OutputDelta]]:
    """Step until all requests have ended; ``after`` is called with the deltas so far, until it returns True."""
    deltas: dict[str, list[OutputDelta]] = {}
    while engine.has_unfinished_requests:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        if after is not None and after(deltas):
            after = None
    assert after is None
    return deltas


def outputs(deltas: dict[str, list[OutputDelta]]) -> dict[str, tuple[tuple[int, ...], str, str | None]]:
    return {
        name: (
            tuple(token for delta in found for token in delta.token_ids),
            "".join(delta.text for delta in found),
            found[-1].finish_reason,
        )
        for name, found in sorted(deltas.items())
    }


def pid_of(engine: ReplicatedEngine, request: str) -> int:
    replica = engine._courses[request].replica
    assert replica is not None
    return engine._links.ready[replica].pid


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 5, "logprobs": 2, "frequency_penalty": 0.3}])
def test_texts_are_those_of_one_engine(plain: Engine, both: ReplicatedEngine, params: dict[str, Any]) -> None:
    for engine in (plain, both):
        for number in range(4):
            add(engine, number, **params)
    assert {course.replica for course in both._courses.values()} == {0, 1}
    expected, found = finish(plain), finish(both)
    assert outputs(found) == outputs(expected)
    for name, deltas in found.items():
        scores = [p for delta in deltas for p in delta.logprobs]
        right = [p for delta in expected[name] for p in delta.logprobs]
        assert [p.logprob for p in scores] == pytest.approx([p.logprob for p in right], abs=1e-4)
        assert len(scores) == (48 if params else 0)
        assert deltas[-1].spec.num_verify_steps > 0


def test_a_text_goes_where_its_beginning_is(both: ReplicatedEngine) -> None:
    long = " a sentence that is long enough to be worth going back to." * 12
    first = {}
    for number in (0, 1):  # side by side, so on two replicas
        add(both, number, prompt=f"{number}{long}")
        first[number] = both._courses[str(number)].replica
    finish(both)
    assert set(first.values()) == {0, 1}
    for number in (1, 0):
        add(both, number, prompt=f"{number}{long} And more")
        assert both._courses[str(number)].replica == first[number]
    cached = {name: deltas[-1].num_cached_tokens for name, deltas in finish(both).items()}
    assert min(cached.values()) > 100
    add(both, 2, prompt=f"0{long} And more", owner=Owner(tenant="another"))
    assert finish(both)["2"][-1].num_cached_tokens == 0


def test_a_hot_prefix_does_not_starve_the_other_replica(plain: Engine, both: ReplicatedEngine) -> None:
    """All want the replica with the prefix: it gets as many as it runs at a time, then the other one gets as many."""
    hot = "a prompt of a system that all requests have in front, and that one replica has computed. " * 6
    add(both, 0, prompt=hot)
    first = both._courses["0"].replica
    assert first is not None
    finish(both)
    chosen = []
    for number in range(12):
        add(both, number, prompt=f"{hot}{number}", max_tokens=96)
        chosen.append(both._courses[str(number)].replica)
    assert chosen[:2] == [first, first]  # not in turn
    assert chosen[:8].count(first) == chosen[:8].count(1 - first) == FLAGS["max_running_requests"]
    assert min(chosen.count(0), chosen.count(1)) >= 5  # of those that wait
    found = finish(both)
    for number in range(12):
        add(plain, number, prompt=f"{hot}{number}", max_tokens=96)
    assert outputs(found) == outputs(finish(plain))
    cached = {number: found[str(number)][-1].num_cached_tokens for number in range(12)}
    assert min(cached[number] for number in range(12) if chosen[number] == first) > 60


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 7, "logprobs": 1, "prompt_logprobs": 1}])
def test_a_killed_replica_changes_no_text(plain: Engine, both: ReplicatedEngine, params: dict[str, Any]) -> None:
    for engine in (plain, both):
        for number in range(4):
            add(engine, number, max_tokens=200, **params)

    def kill(deltas: dict[str, list[OutputDelta]]) -> bool:
        if "0" not in deltas:
            return False
        os.kill(pid_of(both, "0"), signal.SIGKILL)
        return True

    found, expected = finish(both, kill), finish(plain)
    assert outputs(found) == outputs(expected)
    for deltas in found.values():
        told = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
        assert len(told) == (1 if params else 0)
        assert len([p for delta in deltas for p in delta.logprobs]) == (200 if params else 0)


def test_a_client_gets_every_token_once(plain: Engine, both: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams over HTTP, of which some move when their replica is killed."""
    for number in range(4):
        add(plain, number, max_tokens=200, temperature=0.8 if number % 2 else 0.0, seed=7)
    expected = [(text, list(tokens)) for tokens, text, _ in outputs(finish(plain)).values()]
    monkeypatch.setattr(both, "close", lambda: None)  # the other tests use it too
    killed = both._links.ready[0]
    with serving(both, dp_size=2) as served, ThreadPoolExecutor(4) as clients:
        running = []
        for number in range(4):
            sampled = {"temperature": 0.8, "seed": 7} if number % 2 else {"temperature": 0.0}
            body = {"prompt": PROMPTS[number], "max_tokens": 200, "ignore_eos": True, **sampled}
            kill = None if number else partial(os.kill, killed.pid, signal.SIGKILL)
            running.append(clients.submit(streamed, served.http, body, kill))
        assert [future.result() for future in running] == expected
        started = f'replica_starts_total{{replica="0"}} {killed.generation + 1}.0'
        wait_until(lambda: started in served.http.get("/metrics").text, timeout_s=60)


def test_a_drained_replica_hands_its_requests_on_and_comes_back(plain: Engine, both: ReplicatedEngine) -> None:
    for engine in (plain, both):
        for number in range(4):
            add(engine, number, max_tokens=200, temperature=0.8 if number % 2 else 0.0, seed=number)
    drained: list[int] = []

    def drain(deltas: dict[str, list[OutputDelta]]) -> bool:
        if "0" in deltas and (replica := both._courses["0"].replica) is not None:
            assert both.replicas.drain(replica, 0.0).state in ("ending", "off")
            drained.append(replica)
        return bool(drained)

    assert outputs(finish(both, drain)) == outputs(finish(plain))
    (index,) = drained
    assert list(both._links.ready) == [1 - index]
    add(both, 0, max_tokens=8)
    assert both._courses["0"].replica == 1 - index
    with pytest.raises(ReplicaStateError, match="is ready"):
        both.replicas.drain(1 - index, None)
    assert both.replicas.resume(index).state == "starting"
    finish(both)
    wait_for_all(both)
    assert both.replicas.statuses()[index].state == "ready"


def test_a_drained_replica_finishes_its_requests(both: ReplicatedEngine) -> None:
    for number in range(4):
        add(both, number, max_tokens=64)
    index, pid = both._courses["0"].replica, pid_of(both, "0")
    assert index is not None
    assert both.replicas.drain(index, None).state == "draining"
    add(both, 4, prompt=PROMPTS[0], max_tokens=8)
    assert both._courses["4"].replica == 1 - index
    assert both.replicas.resume(index).state == "ready"  # nothing was ended
    both.replicas.drain(index, 120.0)
    assert all(deltas[-1].finish_reason == "length" for deltas in finish(both).values())
    assert index not in both._links.ready
    wait_until(lambda: not is_alive(pid), timeout_s=60)
    wait_until(lambda: both.replicas.statuses()[index].state == "off")
    assert both.stats().replicas.states["off"] == 1
    both.replicas.resume(index)


def test_a_drained_replica_that_is_lost_stays_away(plain: Engine, both: ReplicatedEngine) -> None:
    for engine in (plain, both):
        for number in range(2):
            add(engine, number, max_tokens=96)
    index = both._courses["0"].replica
    assert index is not None

    def kill(deltas: dict[str, list[OutputDelta]]) -> bool:
        if "0" in deltas:
            both.replicas.drain(index, None)
            os.kill(pid_of(both, "0"), signal.SIGKILL)
        return "0" in deltas

    assert outputs(finish(both, kill)) == outputs(finish(plain))
    wait_until(lambda: both.replicas.statuses()[index].state == "off")
    both.replicas.resume(index)


def test_requests_wait_where_no_replica_has_room(both: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both, "_most", 1)
    for number in range(2):
        add(both, number, max_tokens=16)
    with pytest.raises(QueueFullError):
        add(both, 2)
    monkeypatch.setattr(ReplicatedEngine, "has_room", True)
    add(both, 2, max_tokens=16)
    assert sorted(str(course.replica) for course in both._courses.values()) == ["0", "1", "None"]
    assert both.stats().num_waiting >= 1
    assert len(finish(both)) == 3


@pytest.mark.slow
def test_requests_wait_where_all_replicas_are_lost(plain: Engine, both: ReplicatedEngine) -> None:
    for engine in (plain, both):
        add(engine, 0, max_tokens=96)

    def kill(deltas: dict[str, list[OutputDelta]]) -> bool:
        if deltas:
            for replica in list(both._links.ready.values()):
                os.kill(replica.pid, signal.SIGKILL)
        return bool(deltas)

    found = finish(both, kill)
    assert outputs(found) == outputs(finish(plain))
    assert both.stats().num_running == 0


@pytest.mark.slow
def test_a_replica_that_stands_still_is_given_up(
    plain: Engine, both: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_links, "MAX_SILENCE_S", 2.0)
    for engine in (plain, both):
        add(engine, 0, max_tokens=96)

    def stop(deltas: dict[str, list[OutputDelta]]) -> bool:
        if deltas:
            os.kill(pid_of(both, "0"), signal.SIGSTOP)
        return bool(deltas)

    found = finish(both, stop)
    assert outputs(found) == outputs(finish(plain))


@pytest.mark.slow
def test_a_stopped_replica_does_not_stop_the_server(
    plain: Engine, both: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is not read fails after a time, and its request goes elsewhere."""
    monkeypatch.setattr(replica_links, "MAX_SILENCE_S", 60.0)
    for number in (0, 1):
        add(both, number, max_tokens=32)
    stopped = both._courses["0"].replica
    assert stopped is not None
    os.kill(pid_of(both, "0"), signal.SIGSTOP)
    began = time.monotonic()
    while stopped in both._links.ready:
        both._links.tell(stopped, {"do": "abort", "request_ids": ["x" * 100_000]})
        assert time.monotonic() - began < 3 * replica_launch.SEND_TIMEOUT_S
    found = finish(both)
    for number in (0, 1):
        add(plain, number, max_tokens=32)
    assert outputs(found) == outputs(finish(plain))


@pytest.mark.slow
def test_a_request_that_ends_its_replicas_gets_an_error(both: ReplicatedEngine) -> None:
    add(both, 0, max_tokens=900)
    deltas: list[OutputDelta] = []
    killed = set()
    while both.has_unfinished_requests:
        deltas += both.step()
        if "0" in both._courses and both._courses["0"].replica is not None:
            killed.add(pid_of(both, "0"))
            with suppress(ProcessLookupError):  # it was killed, and the end of its link has not been read yet
                os.kill(pid_of(both, "0"), signal.SIGKILL)
    assert len(killed) == MAX_MOVES + 1
    assert (deltas[-1].finish_reason, deltas[-1].error) == ("error", LOST_TOO_OFTEN)


def test_grammars_reach_the_replicas(plain: Engine, both: ReplicatedEngine) -> None:
    spec = GrammarSpec(kind="regex", text="[a-f]{8}-[0-9]{4}")
    compiler = GrammarCompiler(plain.tokenizer, plain.vocab_size, plain.eos_token_ids, 30.0, 1 << 24)
    try:
        grammar = compiler.compile(spec).result(60)
    finally:
        compiler.close()
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1, grammar=spec)
    for engine in (plain, both):
        engine.add_request("0", engine.tokenizer.encode(PROMPTS[0]), params, grammar=grammar)
    expected, found = outputs(finish(plain)), outputs(finish(both))
    assert found == expected
    assert len(found["0"][1]) == 13


def test_what_only_a_replica_refuses_ends_one_request(both: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="not in the vocabulary"):
        both.add_request("0", [both.vocab_size], SamplingParams())
    monkeypatch.setattr(both, "check_request", lambda *_: None)
    both.add_request("0", [both.vocab_size], SamplingParams())
    (delta,) = finish(both)["0"]
    assert (delta.finish_reason, delta.error_code) == ("error", "invalid_request")
    assert "not in the vocabulary" in (delta.error or "")


def test_an_abort_frees_the_replica(both: ReplicatedEngine) -> None:
    add(both, 0, max_tokens=900)
    while not both.step():
        pass
    both.abort("0")
    assert not both.has_unfinished_requests

    def is_free() -> bool:
        return both.stats().num_running == 0

    wait_until(is_free)


def test_figures_are_those_of_all(both: ReplicatedEngine) -> None:
    view = View("tenant")
    before = both.stats().spec.num_verify_steps
    both.watch_drafts([WHOLE, view])
    for number in range(4):
        add(both, number, owner=Owner("name", "tenant"))
    deltas = finish(both)
    steps = sum(found[-1].spec.num_verify_steps for found in deltas.values())
    wait_until(lambda: both.stats().spec.num_verify_steps >= before + steps)
    assert both.stats().kv_total_tokens == 2 * 8192
    assert both.stats_of("tenant").spec.num_verify_steps >= steps
    report = both.cache_report(WHOLE)
    assert report["num_states"] == both.stats().prefix_cache.num_states > 0
    assert 0.0 <= both.cache_report(view)["hit_rate"] <= 1.0  # type: ignore[operator]
    assert both.cache_text(WHOLE).count("replica ") == 2
    samples: list[EngineSample] = []

    def has_drafts() -> bool:  # of the answers to earlier calls
        samples.append(both.sample([WHOLE, view], 50))
        return bool(samples[-1].drafts)

    wait_until(has_drafts)
    sample = samples[-1]
    assert sample.tenants[view].spec.num_verify_steps >= steps
    assert sum(node.has_state for node in sample.outlines[WHOLE].nodes) == report["num_states"]
    both.watch_drafts([])


def test_the_server_over_replicas(both: ReplicatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both, "close", lambda: None)  # the other tests use it too
    with serving(both, dp_size=2) as served:
        body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
        first = served.http.post("/v1/completions", json=body).raise_for_status().json()
        again = served.http.post("/v1/completions", json=body).raise_for_status().json()
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        info = served.http.get("/server_info").json()
        assert (info["dp_size"], info["engine"]["dp_size"]) == (2, 2)
        assert served.http.get("/cache").json()["num_states"] > 0
        assert "replica 1" in served.http.get("/cache?format=text").text
        assert "specmamba_kv_total_tokens" in served.http.get("/metrics").text
        assert served.http.post("/flush_cache").json()["flushed_tokens"] > 0
        replicas = served.http.get("/replicas").json()["replicas"]
        assert [(each["id"], each["state"], each["held"]) for each in replicas] == [
            (0, "ready", False),
            (1, "ready", False),
        ]
        drained = served.http.post("/replicas/1/drain?timeout=5").raise_for_status().json()
        assert (drained["id"], drained["held"]) == (1, True)
        for call in ("0/drain", "2/drain", "2/resume"):
            refused = served.http.post(f"/replicas/{call}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "replica_state")
        assert served.http.post("/replicas/1/drain?timeout=-1").status_code == 400
        assert served.http.post("/replicas/one/drain").status_code == 400
        assert served.http.post("/replicas/1/resume").json()["held"] is False
        assert 'specmamba_replicas{state="ready"} 1.0' in served.http.get("/metrics").text
        refused = served.http.post("/cache/save")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "several_replicas")
        with served.http.stream("GET", "/events") as events:
            assert "event: stats" in next(line for line in events.iter_lines() if line.startswith("event: stats"))


@pytest.mark.parametrize("flags", [{"model": "/nowhere"}, {"speculative_draft_model_path": "/nowhere"}])
def test_a_start_that_fails_says_why_and_leaves_nothing(flags: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="nowhere"):
        ReplicatedEngine(ServerConfig(**{"dp_size": 2, **FLAGS, **flags}))


def test_replicas_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that were not given stay so: their defaults depend on the device and on the number of ranks."""
    monkeypatch.delenv("SPECMAMBA_SPECULATIVE_ADAPTIVE", raising=False)
    config = ServerConfig(dp_size=4, tp_size=2, seed=7, port=1, device="cpu")
    tasks = tasks_of(config, b"secret")
    expected = {"tp_size": 2, "device": "cpu", "mem_fraction_static": config.mem_fraction_static / 4}
    assert [task.flags for task in tasks] == [expected | {"seed": 7 + index} for index in range(4)]
    for task in tasks:
        EngineConfig(**task.flags)
        assert int(task.environment["OMP_NUM_THREADS"]) >= 1


@pytest.mark.slow
def test_a_replica_that_was_not_taken_in_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has become ready where no request runs: the server has not looked since."""
    monkeypatch.setattr(replica_process, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(replica_process, "END_TIMEOUT_S", 60.0)
    engine = ReplicatedEngine(ServerConfig(dp_size=2, **FLAGS))
    os.kill(engine._links.ready[1].pid, signal.SIGKILL)
    wait_until(lambda: not engine._fleet.arrivals.empty(), timeout_s=120)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_replicas_of_two_ranks(plain: Engine) -> None:
    engine = ReplicatedEngine(ServerConfig(dp_size=2, tp_size=2, **FLAGS))
    try:
        for each in (engine, plain):
            for number in range(2):
                add(each, number, max_tokens=24)
        assert {course.replica for course in engine._courses.values()} == {0, 1}
        assert outputs(finish(engine)) == outputs(finish(plain))
    finally:
        engine.close()


def test_a_replica_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check_count(2, 4, 8)
    check_count(64, 1, None)
    with pytest.raises(ConfigError, match="--dp-size 3: each replica needs 4 of the GPUs, and there are 8 in all"):
        check_count(3, 4, 8)
    monkeypatch.setattr(replica_tasks, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--dp-max-size 3: each replica needs 1 of the GPUs, and there are 2 in all"):
        tasks_of(ServerConfig(dp_max_size=3), b"secret")
