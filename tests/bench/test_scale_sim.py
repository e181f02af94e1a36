"""Simulated replicas resume what an engine resumes, and their clocks go by the given speeds."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.errors import ConfigError
from specmamba.sampling_params import SamplingParams
from specmamba.scale_sim.__main__ import main
from specmamba.scale_sim.fleet import Fleet
from specmamba.scale_sim.request_trace import Conversations, TraceRequest, make_conversations, read_trace
from specmamba.scale_sim.simulated_replica import ReplicaModel, Running, SimulatedReplica

MODEL = ReplicaModel(
    kv_tokens=1200,
    states=12,
    max_running=4,
    chunk_size=128,
    spare_states=2,
    prefill_rate=1000.0,
    step_s=0.01,
    step_s_per_request=0.001,
    tokens_per_step=1.0,
)
SIZES = Conversations(
    number=6, turns=4, per_second=1.0, think_s=2.0, system_tokens=150, num_systems=2, turn_tokens=40, output_tokens=20
)


def request(prompt: list[int], output: int = 4, arrival: float | None = 0.0, **given: Any) -> TraceRequest:
    made = np.arange(-output, 0, dtype=np.int64)
    fields = {"delay_s": 0.0, "session": None, **given}
    return TraceRequest(np.array(prompt, dtype=np.int64), made, arrival, **fields)


def run_alone(replica: SimulatedReplica, number: int, asked: TraceRequest) -> Running:
    running = Running(number, asked, replica.now)
    replica.add(running)
    while replica.is_busy:
        replica.step(float("inf"))
        replica.cache.check()
    return running


def turns_in_random_order(seed: int) -> list[TraceRequest]:
    """Conversations whose turns are mixed, in tokens of the demo."""
    requests, draw = make_conversations(SIZES, seed), random.Random(seed)
    later = {each: [r for r in requests if r.session == each] for each in range(SIZES.number)}
    mixed = []
    while later:
        session = draw.choice(sorted(later))
        mixed.append(later[session].pop(0))
        if not later[session]:
            del later[session]
    to_token = {number: 10 + number % 3989 for each in requests for number in (*each.prompt, *each.output)}
    as_tokens = np.vectorize(lambda number: to_token[int(number)], otypes=[np.int64])
    return [replace(each, prompt=as_tokens(each.prompt), output=as_tokens(each.output)) for each in mixed]


@pytest.mark.parametrize(("kv_tokens", "states"), [(1200, 12), (6000, 400)])
def test_resumed_tokens_are_those_of_an_engine(kv_tokens: int, states: int) -> None:
    engine = Engine(
        EngineConfig(
            dtype="float32",
            page_size=1,
            max_total_tokens=kv_tokens,
            max_mamba_cache_size=states,
            max_running_requests=1,
            chunked_prefill_size=MODEL.chunk_size,
            mamba_spare_states=MODEL.spare_states,
            mamba_radix_cache_strategy="no_buffer",
            speculative_algorithm="none",
            context_length=1024,
        )
    )
    replica = SimulatedReplica(replace(MODEL, kv_tokens=kv_tokens, states=states, max_running=1))
    found, expected = [], []
    for number, asked in enumerate(turns_in_random_order(7)):
        output = asked.output.tolist()
        params = SamplingParams(max_tokens=len(output), temperature=0.0, ignore_eos=True)
        engine.add_request(str(number), asked.prompt.tolist(), params, output[:-1])
        while engine.has_unfinished_requests:
            ended = [delta for delta in engine.step() if delta.finish_reason is not None]
            expected += [delta.num_cached_tokens for delta in ended]
        found.append(run_alone(replica, number, asked).num_cached)
    assert found == expected
    assert sum(found) > 1000
    assert (replica.cache.stats.evicted_states > 10) == (states == 12)


def test_clocks() -> None:
    replica = SimulatedReplica(MODEL)
    first = run_alone(replica, 0, request(list(range(301)), output=10))
    assert first.first_token == pytest.approx(0.3 + 0.011)
    assert first.end is not None
    assert first.end == pytest.approx(0.3 + 10 * 0.011)
    again = run_alone(replica, 1, request(list(range(301)), output=10))
    assert again.num_cached == 300
    assert again.first_token == pytest.approx(first.end + 0.011)


def test_drafts_make_fewer_steps() -> None:
    replica = SimulatedReplica(replace(MODEL, tokens_per_step=2.5))
    found = run_alone(replica, 0, request([1], output=10))
    assert found.end == pytest.approx(4 * 0.011)


def test_requests_decode_together_and_wait_for_room() -> None:
    replica = SimulatedReplica(replace(MODEL, max_running=2))
    running = [Running(number, request([number], output=10), 0.0) for number in range(3)]
    for each in running:
        replica.add(each)
    while replica.is_busy:
        replica.step(float("inf"))
    assert [each.end for each in running] == pytest.approx([0.12, 0.12, 0.12 + 0.11])


def test_a_request_that_holds_all_memory_goes_without_its_cached_prefix() -> None:
    replica = SimulatedReplica(replace(MODEL, kv_tokens=200, states=1))
    for number in range(3):
        running = run_alone(replica, number, request(list(range(197)), output=4))
        assert running.end is not None
        assert running.num_cached == 0


@pytest.mark.parametrize("placement", ["prefix", "round_robin"])
def test_sessions_follow_their_answers_on_any_placement(placement: Any) -> None:
    requests = make_conversations(SIZES, 3)
    assert [len(each.prompt) for each in requests] == [len(each.prompt) for each in make_conversations(SIZES, 3)]
    fleet = Fleet(MODEL, 2, placement)
    figures = fleet.run(requests, 1.0, lambda: None)
    assert figures["requests"] == len(requests)
    assert figures["seconds"] > (SIZES.turns - 1) * SIZES.think_s
    assert all(replica.cache.stats.num_locked_tokens == 0 for replica in fleet.replicas)
    assert all(0 <= share <= 1 for share in figures["busy"])
    num_busy = sum(share > 0 for share in figures["busy"])
    assert num_busy == (1 if placement == "prefix" else 2)  # all of it fits one, which has what they begin with


def test_prefixes_are_resumed_more_often_than_in_turn() -> None:
    model = replace(MODEL, kv_tokens=20_000, states=400)
    by_way = {
        way: Fleet(model, 2, way).run(make_conversations(SIZES, 3), 1.0, lambda: None)["resumed"]
        for way in ("prefix", "round_robin")
    }
    assert by_way["prefix"] > 1.2 * by_way["round_robin"]


def write(path: Path, *requests: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, requests)) + "\n")
    return path


LINE = {"timestamp": 500, "input_length": 20, "output_length": 3, "hash_ids": [4, 9]}


def test_a_trace(tmp_path: Path) -> None:
    follow = {"input_length": 21, "output_length": 1, "hash_ids": [4, 8], "session_id": "a", "delay": 250}
    requests = read_trace(write(tmp_path / "t", {**LINE, "session_id": "a"}, follow, LINE), 16, None)
    assert requests[0].prompt.tolist() == [*range(64, 80), *range(144, 148)]
    assert [each.arrival_s for each in requests] == [0.5, None, 0.5]
    assert requests[1].delay_s == 0.25
    outputs = [token for each in requests for token in each.output.tolist()]
    assert len(set(outputs)) == 7
    assert max(outputs) < 0
    assert len(read_trace(tmp_path / "t", 16, 2)) == 2
    figures = Fleet(MODEL, 1, "prefix").run(requests, 1.0, lambda: None)
    assert figures["requests"] == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_length": 0}, "input_length: an integer"),
        ({"input_length": 40}, "2 hash_ids for 40 tokens in blocks of 16"),
        ({"output_length": 1.5}, "output_length: an integer"),
        ({"hash_ids": [4, "x"]}, "hash_ids: integers"),
        ({"hash_ids": [4, -1]}, "hash_ids: integers"),
        ({"timestamp": -1}, "timestamp: milliseconds"),
        ({"timestamp": None}, "timestamp: milliseconds"),
        ({"session_id": [1]}, "session_id"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"line 2: .*{reason}"):
        read_trace(write(tmp_path / "t", LINE, LINE | changes), 16, None)


def test_bad_traces(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1: input_length is missing"):
        read_trace(tmp_path / "t", 16, None)
    (tmp_path / "t").write_text("\n[1]\n")
    with pytest.raises(ConfigError, match="line 2: a request is a JSON object"):
        read_trace(tmp_path / "t", 16, None)
    (tmp_path / "t").write_text("\n")
    with pytest.raises(ConfigError, match="no request"):
        read_trace(tmp_path / "t", 16, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none", 16, None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t", LINE, LINE, {**LINE, "input_length": 32, "output_length": 300})
    flags = ["--trace", str(trace), "--block-size", "16", "--kv-tokens", "100", "--replicas", "1,2"]
    assert main([*flags, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(run["replicas"], run["placement"]) for run in report["runs"]] == [
        (1, "prefix"), (2, "prefix"), (2, "round_robin"),
    ]  # fmt: skip
    assert report["runs"][0]["too_long"] == 1
    assert report["unbounded"]["requests"] == 3
    assert "1 requests are longer than --kv-tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--block-size", "16"], "--block-size: this needs --trace"),
        (["--trace", "t", "--turns", "3"], "--turns: the requests are those of --trace"),
        (["--step-ms", "0", "--step-ms-per-request", "0"], "steps take time"),
        (["--placements", "random"], "--placements"),
        (["--trace", "there-is-none"], "cannot be read"),
    ],
)
def test_bad_flags(flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
