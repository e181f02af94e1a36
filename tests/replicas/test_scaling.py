"""Replicas that follow the load: started under it, ended after it, and no request fails or has another text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.errors import ConfigError
from specmamba.flags.command_line import parse_command_line
from specmamba.replicas.replicated_engine import ReplicatedEngine
from specmamba.server_config import ServerConfig
from tests.fake_engine import Served, serving, wait_until
from tests.replicas.test_replicated_engine import FLAGS, PROMPTS, add, finish, outputs

EXACT = {**FLAGS, "deterministic": True}  # batches of many sizes run here, and rounding must not change a sampled text
SCALING: dict[str, Any] = {
    "dp_max_size": 3,
    "dp_target_tokens": 60,
    "dp_grow_delay": 0.5,
    "dp_shrink_delay": 1.5,
}


def states_of(served: Served) -> dict[str, int]:
    found: dict[str, int] = served.http.get("/server_info").json()["stats"]["replicas"]["states"]
    return found


@pytest.mark.slow
def test_from_one_to_three_and_back_without_a_failed_request() -> None:
    plain = Engine(EngineConfig(**EXACT))
    for number in range(4):
        add(plain, number, max_tokens=96, temperature=0.8 if number % 2 else 0.0, seed=number)
    found = outputs(finish(plain))
    expected = [found[str(number)][1] for number in range(4)]
    config = ServerConfig(**EXACT, **SCALING)
    with serving(ReplicatedEngine(config), **SCALING) as served, ThreadPoolExecutor(8) as clients:
        assert states_of(served)["ready"] == 1
        has_grown = False

        def ask(number: int) -> int:
            """Ask again and again until there are three replicas, and then some more. Returns the number of calls."""
            sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
            body = {"prompt": PROMPTS[number], "max_tokens": 96, "ignore_eos": True, **sampled}
            for count in range(1, 1000):
                is_last = has_grown
                answer = served.http.post("/v1/completions", json=body, timeout=120).raise_for_status().json()
                assert answer["choices"][0]["text"] == expected[number]
                if is_last:
                    return count
            raise AssertionError("there are never three")

        running = [clients.submit(ask, number % 4) for number in range(8)]
        wait_until(lambda: states_of(served)["ready"] == 3, timeout_s=120)
        has_grown = True
        counts = [future.result() for future in running]
        assert min(counts) >= 1
        wait_until(lambda: states_of(served)["ready"] == 1, timeout_s=60)  # no call makes it look
        wait_until(lambda: states_of(served)["off"] == 2, timeout_s=60)
        metrics = served.http.get("/metrics").text
        assert 'specmamba_replica_scalings_total{direction="up"} 2.0' in metrics
        assert 'specmamba_replica_scalings_total{direction="down"} 2.0' in metrics
        assert 'specmamba_requests_total{finish_reason="error"} 0.0' in metrics


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dp-min-size", "2"], "--dp-min-size: this needs --dp-max-size"),
        (["--dp-target-tokens", "7", "--dp-grow-delay", "1"], "--dp-target-tokens, --dp-grow-delay: this needs"),
        (["--dp-min-size", "3", "--dp-max-size", "2"], "--dp-min-size 3: this is more than --dp-max-size 2"),
        (["--dp-size", "3", "--dp-max-size", "2"], "--dp-size 3: the start is from --dp-min-size to --dp-max-size"),
        (["--dp-size", "1", "--dp-min-size", "2", "--dp-max-size", "2"], "--dp-size 1: the start is from"),
        (
            ["--dp-max-size", "2", "--disaggregation-mode", "decode", "--disaggregation-key", "k" * 16],
            "drop it, or --dp-max-size 2",
        ),
    ],
)
def test_numbers_that_do_not_fit(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_command_line(ServerConfig, "specmamba serve", flags)


@pytest.mark.parametrize(
    ("flags", "first", "most"),
    [
        ({}, 1, 1),
        ({"dp_size": 2}, 2, 2),
        ({"dp_max_size": 3}, 1, 3),
        ({"dp_min_size": 2, "dp_max_size": 3}, 2, 3),
        ({"dp_size": 3, "dp_min_size": 2, "dp_max_size": 4}, 3, 4),
    ],
)
def test_how_many_there_are_at_first_and_at_the_most(flags: dict[str, Any], first: int, most: int) -> None:
    config = ServerConfig(**flags)
    assert (config.first_replicas, config.most_replicas) == (first, most)
