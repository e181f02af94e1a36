"""The benchmark of HTTP: its client, its figures, and a run with the demo."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from specmamba.bench.http_overhead import __main__ as http_overhead
from specmamba.bench.http_overhead.__main__ import print_report, summary
from specmamba.bench.http_overhead.client import Connection, ask_all, num_tokens, request_bytes
from specmamba.errors import SpecmambaError
from tests.fake_engine import TEXT, FakeEngine, serving

pytestmark = pytest.mark.usefixtures("forked_processes")

NUM_TOKENS = len(TEXT.encode())


def ask(url: str, *bodies: dict[str, Any], clients: int = 1) -> list[bytes]:
    parts = urlsplit(url)
    requests = [request_bytes(parts.netloc, body) for body in bodies]
    shares = [requests[client::clients] for client in range(clients)]
    return asyncio.run(ask_all((str(parts.hostname), int(parts.port or 0)), shares))


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def test_answers_are_counted_whole_and_streamed() -> None:
    with serving() as served:
        for fields in ({}, STREAM):
            bodies = [{"prompt": "x", "max_tokens": count, **fields} for count in (1, 5, 200)]
            assert list(map(num_tokens, ask(served.url, *bodies))) == [1, 5, NUM_TOKENS]
            assert sorted(map(num_tokens, ask(served.url, *bodies, clients=3))) == [1, 5, NUM_TOKENS]


def test_an_error_answer_is_an_error() -> None:
    with serving() as served:
        (answer,) = ask(served.url, {"prompt": "x", "max_tokens": "many"})
        with pytest.raises(SpecmambaError, match=r"HTTP/1\.1 400 .*max_tokens"):
            num_tokens(answer)
    with serving(FakeEngine(fail_at_step=2)) as served:
        (answer,) = ask(served.url, {"prompt": "x", "max_tokens": 50, **STREAM})
        with pytest.raises(SpecmambaError, match=r"broke off.*scripted failure"):
            num_tokens(answer)


def test_a_server_that_closes_the_connection() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            await ask_all(server.sockets[0].getsockname(), [[request_bytes("x", {})]])

    with pytest.raises(SpecmambaError, match="hung up"):
        asyncio.run(run())


async def _fed(pieces: list[bytes]) -> bytes:
    connection = Connection()
    connection.connection_made(_Sink())
    answer = asyncio.ensure_future(connection.ask(b""))
    await asyncio.sleep(0)
    for piece in pieces:
        assert not answer.done()
        connection.data_received(piece)
    assert connection.first_at <= connection.last_at
    return await answer


class _Sink(asyncio.WriteTransport):
    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def test_an_answer_in_any_pieces() -> None:
    event = 'data: {"usage": {"completion_tokens": 7}}\n\n'
    chunks = "".join(f"{len(data):x}\r\n{data}\r\n" for data in (event[:9], event[9:], "data: [DONE]\n\n"))
    for whole in (
        f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n",
        'HTTP/1.1 200 OK\r\nContent-Length: 35\r\n\r\n{"usage": {"completion_tokens": 7}}',
    ):
        data = whole.encode()
        for size in (1, 3, 50, len(data)):
            pieces = [data[at : at + size] for at in range(0, len(data), size)]
            assert num_tokens(asyncio.run(_fed(pieces))) == 7


def test_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [
        {"generate": 100.0, "whole": 90.0, "streamed": 50.0},
        {"generate": 200.0, "whole": 190.0, "streamed": 120.0},
        {"generate": 50.0, "whole": 60.0, "streamed": 45.0},
    ]
    row = summary("mtp", 8, rounds)
    assert row["generate"] == {"tokens_per_s": 100.0, "ratio": 1.0, "ratio_range": [1.0, 1.0]}
    assert row["whole"] == {"tokens_per_s": 90.0, "ratio": 0.95, "ratio_range": [0.9, 1.2]}
    assert row["streamed"] == {"tokens_per_s": 50.0, "ratio": 0.6, "ratio_range": [0.5, 0.9]}
    report = {"model": "m", "dtype": "float32", "max_tokens": 4, "temperature": 0.0, "rounds": 3, "results": [row]}
    assert http_overhead.lowest_ratio(report) == 0.6
    print_report(report)
    assert "50 (0.60; 0.50 to 0.90)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    flags = ["--rounds", "1", "--concurrency", "1,2", "--num-requests", "2", "--max-tokens", "2", "--json"]
    flags += [
        str(file),
        "--dtype",
        "float32",
        "--speculative-algorithm",
        "none",
        "--max-running-requests",
        "2",
        "--max-total-tokens",
        "1024",
    ]
    assert http_overhead.main([*flags, "--at-least", "100"]) == 1
    report = json.loads(file.read_text("utf8"))
    assert [(row["drafts"], row["concurrency"]) for row in report["results"]] == [("none", 1), ("none", 2)]
    assert all(row[way]["tokens_per_s"] > 0 for row in report["results"] for way in ("generate", "whole", "streamed"))
    assert "specmamba-demo, float32" in capsys.readouterr().out
