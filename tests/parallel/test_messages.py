"""Messages between ranks, and what rank 0 notices of the others' ends behind a backlog."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba.errors import ConfigError, RankLostError
from specmamba.parallel import control, messages, process_group
from specmamba.parallel.control import RankLinks
from specmamba.parallel.messages import Messages, connect
from specmamba.parallel.process_group import ProcessRanks
from tests.fake_engine import wait_until

BACKLOG = 2000


def test_all_that_has_arrived_is_read_at_once() -> None:
    ours, theirs = socket.socketpair()
    link = Messages(ours)
    with ours, theirs:
        assert list(link.arrived()) == []
        theirs.sendall(b'{"a": 1}\n{"b": 2}\n{"c"')
        assert list(link.arrived()) == [{"a": 1}, {"b": 2}]
        theirs.sendall(b": 3}\n[4]\n")
        found = link.arrived()
        assert next(found) == {"c": 3}
        with pytest.raises(ValueError, match="a dictionary"):
            next(found)
        theirs.close()
        with pytest.raises(EOFError):
            list(link.arrived())
        assert link.receive() is None


def test_the_end_is_told_after_the_last_message_and_no_message_is_left_behind() -> None:
    ours, theirs = socket.socketpair()
    link, sent = Messages(ours), [{"number": number, "text": "x" * 900} for number in range(100)]
    with ours:
        with theirs:
            theirs.sendall(b"".join(map(messages.encoded, sent)))
        assert list(link.arrived()) == sent  # more than is read at once
        with pytest.raises(EOFError):
            list(link.arrived())


def test_what_the_other_side_would_refuse_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(ValueError, match="has 111 bytes, and 100 is the most"):
            Messages(ours).send({"text": "x" * 98})
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


@pytest.mark.parametrize("last", [{"failed": "no memory"}, None])
def test_the_end_of_a_rank_is_seen_behind_its_beats(
    last: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one look, although it has sent more beats than there are looks in a quarter of an hour."""
    monkeypatch.setattr(control, "BEAT_S", 0.05)
    monkeypatch.setattr(RankLinks, "kill", lambda _: None)  # the rank is this process
    name, seen, losses = f"specmamba-test-{os.getpid()}", threading.Event(), list[RankLostError]()
    links = RankLinks(name, 2)

    def end(error: RankLostError) -> None:
        losses.append(error)
        seen.set()

    def be_a_rank() -> None:
        link = connect(name)
        link.send({"rank": 1, "facts": {}})
        link.receive()
        link.send_line(b'{"beat": 1}\n' * BACKLOG)
        if last is not None:
            link.send(last)
        link.close()

    other = threading.Thread(target=be_a_rank)
    other.start()
    try:
        links.when_lost(end)
        links.join({}, None)
        assert seen.wait(60)
    finally:
        other.join(60)
        links.close()
    assert ("no memory" if last else "it has ended") in str(losses[0])


def test_a_rank_that_does_not_come_ends_the_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time for joining, not after that of exchanges; another group can be made then."""
    monkeypatch.setattr(process_group, "JOIN_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(ConfigError, match="--tp-size 2: rank 0 cannot reach the others: "):
        ProcessRanks(0, 2, torch.device("cpu"), str(tmp_path / "store"))
    ProcessRanks(0, 1, torch.device("cpu"), str(tmp_path / "other")).close()


def test_a_rank_that_reads_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped: neither by what it is sent, nor at the end. All that follows its loss is done."""
    monkeypatch.setattr(control, "SEND_TIMEOUT_S", 1)
    monkeypatch.setattr(control, "BEAT_S", 0.05)
    monkeypatch.setattr(RankLinks, "kill", lambda _: None)  # the rank is this process
    name, losses = f"specmamba-test-{os.getpid()}", list[RankLostError]()
    links = RankLinks(name, 2)

    def fail(_: RankLostError) -> None:
        raise RuntimeError("the library says no")

    links.when_lost(fail)
    links.when_lost(losses.append)
    rank = connect(name)
    rank.send({"rank": 1, "facts": {}})
    links.join({}, None)
    began = time.monotonic()
    with pytest.raises(RankLostError):
        links.send({"do": "x" * 10_000_000})
    rank.close()
    wait_until(lambda: bool(losses))
    links.close()
    assert time.monotonic() - began < 200  # it would never end
