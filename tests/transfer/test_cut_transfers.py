"""A prefill server that is killed or stopped in the middle of a prompt, over sockets, NIXL and Mooncake alike.

Each is cut at each kind of byte, and between two processes. What the text is, and what may be left behind, does not
depend on what carries the bytes.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specmamba.core import Handoff
from specmamba.engine.engine import Engine
from specmamba.transfer import carrier as carrier_module
from specmamba.transfer.carrier import Windows
from specmamba.transfer.remote_tier import RemoteTier
from specmamba.transfer.tcp_transport import TcpTransport
from tests.fake_engine import wait_until
from tests.transfer.prefill_process import PARTS, SMALL_WINDOW_BYTES, PrefillProcess, prefill_process
from tests.transfer.sides import Side, Text, side
from tests.transfer.test_carriers import library_problem

Tokens = tuple[int, ...]
ROOMS = itertools.count(2**60)
TIMEOUT_S = 30.0  # that a request waits: long enough on a machine that does much else
SHORT_TIMEOUTS_S = (1.5, 5.0, 15.0, 45.0)  # where it waits until then; the next one where the first was over too early
SOON_S = 5.0
MOST_S = 90.0  # that it takes

pytestmark = pytest.mark.slow


@pytest.fixture(params=["mooncake", "nixl", "tcp"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found: str = request.param
    if found != "tcp" and (problem := library_problem(found)) is not None:
        pytest.skip(problem)
    monkeypatch.setattr(carrier_module, "WINDOW_BYTES", SMALL_WINDOW_BYTES)
    return found


@pytest.fixture
def decode(backend: str) -> Iterator[Side]:
    flags: dict[str, Any] = {"disaggregation_transfer_backend": backend, "disaggregation_timeout": TIMEOUT_S}
    with side("decode", "chain", **flags) as own:
        yield own


@pytest.fixture(scope="module")
def expected(texts: list[Tokens]) -> Text:
    with side("null", "chain") as one:
        return one.run(texts[0])


def remote_tier(engine: Engine) -> RemoteTier:
    tiers = engine.cache_manager.tiers
    assert tiers is not None
    (remote,) = [tier for tier in tiers.tiers if isinstance(tier, RemoteTier)]
    return remote


def windows_of(decode: Side) -> Windows | None:
    def find(engine: Engine) -> Windows | None:
        transport = remote_tier(engine)._transport
        assert isinstance(transport, TcpTransport)
        return transport._windows

    return decode.thread.call(find).result(120)


@contextmanager
def waiting_only(decode: Side, timeout_s: float) -> Iterator[None]:
    """Let requests wait for so long."""

    def wait(seconds: float) -> None:
        decode.thread.call(lambda engine: setattr(remote_tier(engine), "_timeout_s", seconds)).result(120)

    wait(timeout_s)
    try:
        yield
    finally:
        wait(TIMEOUT_S)


def hand_over(prefill: PrefillProcess, decode: Side, text: Tokens) -> Text:
    room = next(ROOMS)
    decode.flush()
    prefill.ask("prefill", prompt=text, room=room)
    began = time.monotonic()
    found = decode.run(text, Handoff(room, "127.0.0.1", prefill.port))
    assert time.monotonic() - began < MOST_S
    return found


def check_miss(prefill: PrefillProcess, decode: Side, text: Tokens, expected: Text) -> str:
    """The reason of the only miss of a request, which has the text of one server and leaves nothing behind."""
    before = decode.stats().failures
    found = hand_over(prefill, decode, text)
    assert (found.tokens, found.spec, found.num_cached) == (expected.tokens, expected.spec, 0)
    decode.check()
    after = decode.stats().failures
    (reason,) = [name for name, count in after.items() if count > before[name]]
    assert sum(after.values()) == sum(before.values()) + 1
    return reason


def check_hit(prefill: PrefillProcess, decode: Side, text: Tokens, expected: Text) -> None:
    found = hand_over(prefill, decode, text)
    assert (found.tokens, found.spec, found.num_cached) == (expected.tokens, expected.spec, len(text) - 1)
    decode.check()


def test_killed(decode: Side, backend: str, texts: list[Tokens], expected: Text) -> None:
    for part in PARTS:
        with prefill_process(backend) as prefill:
            prefill.ask("fail", part=part, number=signal.SIGKILL)
            assert check_miss(prefill, decode, texts[0], expected) == "cut", part
            assert prefill.process.wait(60) == -signal.SIGKILL
    with prefill_process(backend) as prefill:  # another one in its place
        check_hit(prefill, decode, texts[0], expected)
    check_windows(decode)


def test_stopped(decode: Side, backend: str, texts: list[Tokens], expected: Text) -> None:
    with prefill_process(backend) as prefill:
        for part in PARTS:
            stop_at(part, prefill, decode, texts[0], expected)
            prefill.signal(signal.SIGCONT)
            assert prefill.ask("check")["num_handoffs"] == 0, part  # nor does it hold anything
        check_hit(prefill, decode, texts[0], expected)
        wait_until(lambda: prefill.ask("check")["num_handoffs"] == 1)
    check_windows(decode)


def stop_at(part: str, prefill: PrefillProcess, decode: Side, text: Tokens, expected: Text) -> None:
    """Let the prefill server stop itself in a part, and the request miss.

    A server that does not get that far in the time of a request is slow too, and is asked again with more.
    """
    for timeout_s in SHORT_TIMEOUTS_S:
        prefill.ask("fail", part=part, number=signal.SIGSTOP)
        with waiting_only(decode, timeout_s):
            began = time.monotonic()
            assert check_miss(prefill, decode, text, expected) == "slow", part
            assert time.monotonic() - began >= timeout_s
        if gets_stopped(prefill):
            return
    pytest.fail(f"{part} was not reached in {timeout_s} s")


def test_aborted(decode: Side, backend: str, texts: list[Tokens], expected: Text) -> None:
    with prefill_process(backend) as prefill:
        prefill.ask("fail", part="kv", number=signal.SIGSTOP)
        room = next(ROOMS)
        prefill.ask("prefill", prompt=texts[0], room=room)
        waits = decode.start(texts[0], Handoff(room, "127.0.0.1", prefill.port))
        wait_until(lambda: is_stopped(prefill), 30)
        assert not waits.deltas
        decode.thread.abort([f"r{decode._numbers}"])
        decode.check()
        prefill.signal(signal.SIGCONT)
        assert prefill.ask("check")["num_handoffs"] == 0
        check_hit(prefill, decode, texts[0], expected)
    check_windows(decode)


def test_expired(decode: Side, backend: str, texts: list[Tokens], expected: Text) -> None:
    with prefill_process(backend, 0.3) as prefill:
        room = next(ROOMS)
        prefill.ask("prefill", prompt=texts[0], room=room)
        assert prefill.ask("check")["failures"] == {"expired": 1}
        found = decode.run(texts[0], Handoff(room, "127.0.0.1", prefill.port))
        assert (found.tokens, found.num_cached) == (expected.tokens, 0)
        assert decode.failures() == {"expired": 1}
        decode.check()


def gets_stopped(prefill: PrefillProcess) -> bool:
    """Whether the process is stopped by now, or soon: it notes only by its next write that the request has ended."""
    deadline = time.monotonic() + SOON_S
    while not is_stopped(prefill) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_stopped(prefill)


def is_stopped(prefill: PrefillProcess) -> bool:
    with open(f"/proc/{prefill.process.pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


def check_windows(decode: Side) -> None:
    """All memory of transfers comes back, once they are quiet."""
    windows = windows_of(decode)
    if windows is not None:
        found = [windows.take(time.monotonic() + 30) for _ in range(carrier_module.NUM_WINDOWS)]
        assert len({window.place for window in found}) == len(found)
