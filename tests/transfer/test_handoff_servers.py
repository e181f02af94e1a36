"""Two servers behind something that does what SGLang's router does: it sends each request to both, with a room."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.engine.handoffs import PrefillSide
from specmamba.server_config import ServerConfig
from tests.fake_engine import FakeEngine, Served, serving, wait_until
from tests.server.test_server_cache import PROMPT
from tests.transfer.sides import KEY

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_running_requests": 4,
    "max_total_tokens": 2048,
    "context_length": 512,
    "speculative_adaptive": "off",
}
ROOMS = count(2**62)
PROMPTS = [PROMPT, PROMPT[::-1], "def area(radius):\n    return 3.14 * radius ** 2\n\n\ndef volume("]


@dataclass(frozen=True)
class Pair:
    """A prefill server and a decode server."""

    prefill: Served
    decode: Served
    port: int

    def send(self, path: str, num_rooms: int | None = None, **body: Any) -> tuple[httpx.Response, httpx.Response]:
        """The answers of both; ``num_rooms``: as many rooms as a router gives to a batch."""
        host, room = "127.0.0.1", next(ROOMS)
        fields: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": self.port, "bootstrap_room": room}
        if num_rooms is not None:
            fields = {name: [value] * num_rooms for name, value in fields.items()}
            fields["bootstrap_room"] = [next(ROOMS) for _ in range(num_rooms)]
        whole = {"temperature": 0, "max_tokens": 12, **body, **fields}
        whole = {name: value for name, value in whole.items() if value is not None}
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(each.http.post, path, json=whole) for each in (self.decode, self.prefill)]
            decoded, prefilled = (answer.result(60) for answer in answers)
        assert prefilled.status_code == 200, prefilled.text
        return prefilled, decoded


def handoffs(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = served.http.get("/server_info").json()["stats"]["handoffs"]
    return found


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    sides = {"disaggregation_key": KEY, "disaggregation_bootstrap_port": 0}
    engines = [Engine(EngineConfig(**FLAGS)) for _ in range(2)]
    with (
        serving(engines[0], disaggregation_mode="prefill", **sides) as prefill,
        serving(engines[1], disaggregation_mode="decode", **sides) as decode,
    ):
        assert isinstance(engines[0].handoffs, PrefillSide)
        yield Pair(prefill, decode, engines[0].handoffs._transport.address[1])  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def one() -> Iterator[Served]:
    with serving(Engine(EngineConfig(**FLAGS))) as served:
        yield served


def texts_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_a_completion_is_that_of_one_server(pair: Pair, one: Served) -> None:
    expected = one.http.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "max_tokens": 12}).json()
    prefilled, decoded = pair.send("/v1/completions", prompt=PROMPT)
    assert texts_of(prefilled) == [""]
    assert prefilled.json()["usage"]["completion_tokens"] == 0
    assert decoded.json()["choices"] == expected["choices"]
    num_tokens = expected["usage"]["prompt_tokens"]
    assert decoded.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == num_tokens - 1
    wait_until(lambda: handoffs(pair.prefill)["num_handoffs"])
    own, theirs = handoffs(pair.decode), handoffs(pair.prefill)
    assert (own["num_handoffs"], theirs["num_handoffs"]) == (1, 1)
    assert own["num_bytes"] == theirs["num_bytes"] > 0
    assert not any((*own["failures"].values(), *theirs["failures"].values()))


def test_batches_have_a_room_for_each_prompt_or_choice(pair: Pair, one: Served) -> None:
    before = handoffs(pair.decode)["num_handoffs"]
    body = {"prompt": PROMPTS[1:], "temperature": 0, "max_tokens": 12}
    _, decoded = pair.send("/v1/completions", num_rooms=2, prompt=PROMPTS[1:])
    assert texts_of(decoded) == texts_of(one.http.post("/v1/completions", json=body))
    assert handoffs(pair.decode)["num_handoffs"] == before + 2
    for num_rooms in (1, 2):
        pair.decode.http.post("/flush_cache").raise_for_status()
        _, decoded = pair.send("/v1/completions", num_rooms=num_rooms, prompt=PROMPT, n=2, seed=3, temperature=0.8)
        body = {"prompt": PROMPT, "temperature": 0.8, "max_tokens": 12, "n": 2, "seed": 3}
        assert texts_of(decoded) == texts_of(one.http.post("/v1/completions", json=body))
    wait_until(lambda: handoffs(pair.prefill)["num_open"] == 0)
    assert handoffs(pair.decode)["num_handoffs"] == before + 4


def test_streamed_chats(pair: Pair, one: Served) -> None:
    messages = [{"role": "user", "content": "Write a function that adds two numbers, and say how it works."}]
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 12}
    expected = one.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    _, decoded = pair.send("/v1/chat/completions", **body, stream=True)
    events = [line.removeprefix("data: ") for line in decoded.text.splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == expected
    assert text


SAID = "Write a function that multiplies two numbers, and say how it works."
TRANSLATED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "/v1/responses": ({"input": SAID, "max_output_tokens": 12}, "output", "response.output_text.delta", "delta"),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": SAID}], "max_tokens": 12},
        "content",
        "content_block_delta",
        "delta",
    ),
}


def text_of_blocks(blocks: list[dict[str, Any]]) -> str:
    """Of an answer's ``output`` or ``content``."""
    return "".join(block.get("text") or text_of_blocks(block.get("content") or []) for block in blocks)


@pytest.mark.parametrize("path", sorted(TRANSLATED))
def test_other_kinds_of_chats_have_rooms_too(pair: Pair, one: Served, path: str) -> None:
    body, field, kind, delta = TRANSLATED[path]
    body = {**body, "temperature": 0}
    expected = text_of_blocks(one.http.post(path, json=body).raise_for_status().json()[field])
    assert expected
    before = handoffs(pair.decode)["num_handoffs"]
    pair.decode.http.post("/flush_cache").raise_for_status()
    prefilled, decoded = pair.send(path, **{"max_tokens": None, **body})
    assert text_of_blocks(prefilled.json()[field]) == ""
    assert text_of_blocks(decoded.raise_for_status().json()[field]) == expected
    assert handoffs(pair.decode)["num_handoffs"] == before + 1
    pair.decode.http.post("/flush_cache").raise_for_status()
    _, decoded = pair.send(path, **{"max_tokens": None, **body}, stream=True)
    events = [json.loads(line[6:]) for line in decoded.text.splitlines() if line.startswith("data: {")]
    deltas = [event[delta] for event in events if event["type"] == kind]
    assert "".join(each if isinstance(each, str) else each["text"] for each in deltas) == expected
    assert handoffs(pair.decode)["num_handoffs"] == before + 2
    refused = pair.decode.http.post(path, json={**body, "bootstrap_room": 1, "bootstrap_host": "10.0.0.7"})
    assert refused.status_code == 400
    assert "bootstrap_host: '10.0.0.7' is no prefill server" in refused.text


def test_a_prefill_server_leaves_forms_to_the_other(pair: Pair) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "bootstrap_room": next(ROOMS), "regex": "("}
    assert texts_of(pair.prefill.http.post("/v1/completions", json=body)) == [""]
    body = {**body, "regex": None, "bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port}
    pair.decode.http.post("/v1/completions", json=body).raise_for_status()  # it has the prompt, and says so
    wait_until(lambda: handoffs(pair.prefill)["num_open"] == 0)


def test_figures(pair: Pair) -> None:
    pair.send("/v1/completions", prompt=PROMPTS[0] + "figures")
    wait_until(lambda: handoffs(pair.prefill)["num_handoffs"] == handoffs(pair.decode)["num_handoffs"])
    for served, mode in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        assert served.http.get("/server_info").json()["disaggregation_mode"] == mode
        lines = served.http.get("/metrics").text.splitlines()
        figures = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
        assert figures["specmamba_handoffs_total"] >= 1
        assert figures["specmamba_handoff_bytes_total"] > 0
        assert figures["specmamba_handoff_seconds_total"] > 0
        assert figures['specmamba_handoff_failures_total{reason="expired"}'] == 0
        assert figures["specmamba_open_handoffs"] == 0


def test_a_decode_server_has_nothing_of_its_own_below_its_pools(pair: Pair) -> None:
    answer = pair.decode.http.post("/cache/load", json={"prompt": PROMPT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_stored_prefixes")


def test_servers_answer_requests_without_rooms_themselves(pair: Pair, one: Served) -> None:
    body = {"prompt": PROMPTS[2], "temperature": 0, "max_tokens": 12}
    expected = texts_of(one.http.post("/v1/completions", json=body))
    assert [texts_of(each.http.post("/v1/completions", json=body)) for each in (pair.prefill, pair.decode)] == [
        expected
    ] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bootstrap_room": 1}, "bootstrap_host"),
        ({"bootstrap_host": "127.0.0.1"}, "bootstrap_host"),
        ({"bootstrap_port": 8998}, "bootstrap_port"),
        ({"bootstrap_room": 1, "bootstrap_host": "10.0.0.7"}, "bootstrap_host"),
        ({"bootstrap_room": 1, "bootstrap_host": "local host"}, "bootstrap_host"),
        ({"bootstrap_room": 1, "bootstrap_host": ["127.0.0.1", "::1"]}, "bootstrap_host"),
        ({"bootstrap_room": [1, 2, 3], "bootstrap_host": "127.0.0.1"}, "bootstrap_room"),
        ({"bootstrap_room": -1, "bootstrap_host": "127.0.0.1"}, "bootstrap_room"),
        ({"bootstrap_room": "1", "bootstrap_host": "127.0.0.1"}, "bootstrap_room"),
        ({"bootstrap_room": 1, "bootstrap_host": "127.0.0.1", "bootstrap_port": 0}, "bootstrap_port"),
        ({"bootstrap_room": 1, "bootstrap_host": "127.0.0.1", "bootstrap_port": [1, 2]}, "bootstrap_port"),
    ],
)
def test_rooms_that_cannot_be_are_refused(pair: Pair, fields: dict[str, Any], param: str) -> None:
    answer = pair.decode.http.post("/v1/completions", json={"prompt": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_other_servers_have_no_rooms() -> None:
    with serving(FakeEngine()) as served:
        answer = served.http.post("/v1/completions", json={"prompt": "a", "bootstrap_room": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bootstrap_room")
        assert "--disaggregation-mode" in answer.json()["error"]["message"]


def test_hosts_that_are_named_may_be_asked() -> None:
    flags = {"disaggregation_mode": "decode", "disaggregation_key": KEY}
    engine = Engine(EngineConfig(**FLAGS))
    with serving(engine, **flags, disaggregation_prefill_hosts="*.invalid,10.0.0.7") as served:
        body = {"prompt": PROMPT, "max_tokens": 2, "bootstrap_room": 1, "bootstrap_host": "a.invalid"}
        assert served.http.post("/v1/completions", json=body).status_code == 200
        assert handoffs(served)["failures"]["unreachable"] == 1
        answer = served.http.post("/v1/completions", json={**body, "bootstrap_host": "10.0.0.8"})
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"disaggregation_mode": "prefill"}, "--disaggregation-key-file"),
        ({"disaggregation_mode": "decode", "disaggregation_key": "short"}, "16 characters"),
        ({"disaggregation_mode": "decode", "disaggregation_key": KEY, "tp_size": 2}, "--tp-size 2"),
        ({"disaggregation_mode": "decode", "disaggregation_key": KEY, "dp_size": 2}, "--dp-size 2"),
        ({"disaggregation_mode": "prefill", "disaggregation_key": KEY, "disable_radix_cache": True}, "prefix cache"),
        ({"disaggregation_transfer_backend": "mori"}, "mori is not supported"),
        ({"disaggregation_transfer_backend": "nixl"}, "--disaggregation-mode prefill or decode"),
        ({"disaggregation_timeout": 3.0}, "--disaggregation-mode"),
        (
            {"disaggregation_mode": "prefill", "disaggregation_key": KEY, "disaggregation_prefill_hosts": "a"},
            "for decode servers",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(**flags)


def test_the_key_may_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o644)
    config = ServerConfig(disaggregation_mode="decode", disaggregation_key_file=file)
    assert config.disaggregation_key is not None
    assert config.disaggregation_key.get_secret_value() == KEY
    assert config.exposed_key_files == [file]
    assert KEY not in repr(config)
    with pytest.raises(ValueError, match="give one of them"):
        ServerConfig(disaggregation_mode="decode", disaggregation_key_file=file, disaggregation_key=SecretStr(KEY))
