"""What a decode server logs of prefill servers that do not work."""

from __future__ import annotations

import pytest

from specmamba.transfer import failure_log
from specmamba.transfer.failure_log import MOST_TOLD, FailureLog
from specmamba.transfer.wanted import Source


def test_a_fault_of_the_setup_is_told_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FailureLog()
    for room in (1, 2, 3):
        log.tell(Source("127.0.0.1", 1, room), "unreachable")
    log.tell(Source("10.0.0.1", 8998, 7), "refused")
    log.tell(Source("10.0.0.1", 8998, 7), "slow")  # of one request
    assert [record.getMessage() for record in caplog.records] == [
        "the prefill server at 127.0.0.1:1 is not reached: its prompts are computed here",
        "the prefill server at 10.0.0.1:8998 has another key (--disaggregation-key): its prompts are computed here",
    ]
    for port in range(2, 100):  # a client may name any port
        log.tell(Source("127.0.0.1", port, 7), "unreachable")
    assert len(caplog.records) == MOST_TOLD
    monkeypatch.setattr(failure_log, "TELL_AGAIN_S", 0.0)
    log.tell(Source("127.0.0.1", 99, 7), "unreachable")
    assert "127.0.0.1:99" in caplog.text
