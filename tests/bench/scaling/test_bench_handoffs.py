"""The benchmark of prefill and decode apart: its figures from made-up inputs, and a tiny run with real servers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from specmamba.bench.handoffs import __main__ as handoffs
from specmamba.bench.handoffs.figures import (
    ARRIVALS,
    HELD,
    QUIET,
    Figures,
    handoff_figures,
    stream_medians,
    traffic_figures,
    window,
)
from specmamba.bench.handoffs.options import HandoffsBenchConfig
from specmamba.bench.handoffs.rounds import Played, Prompts
from specmamba.bench.handoffs.servers import APART, ONE, Counted, Way, read_counts, threads_of
from specmamba.bench.handoffs.traffic import Clients, Event, Stream, Traffic, send_traffic
from specmamba.bench.soak.server import ServerProcess
from specmamba.errors import SpecmambaError

METRICS = """# HELP specmamba_handoffs_total Prompts
# TYPE specmamba_handoffs_total counter
specmamba_handoffs_total {handoffs}
specmamba_handoff_bytes_total 1.5e+06
specmamba_handoff_seconds_total 0.25
specmamba_handoff_failures_total{{reason="slow"}} {failed}
specmamba_handoff_failures_total{{reason="cut"}} 0.0
specmamba_open_handoffs 1.0
"""
TINY = ["--context-length", "512", "--max-total-tokens", "2048", "--max-running-requests", "4"]
DESCRIBED = {"model": "folder/tiny", "dtype": "float32", "speculative_algorithm": "mtp"}


def stream(began: float, *events: tuple[float, int]) -> Stream:
    return Stream(began, tuple(Event(*event) for event in events))


def test_streams_count_while_all_of_them_run() -> None:
    early = stream(0.0, (1.0, 1), (2.0, 2), (2.5, 1), (4.5, 3), (9.0, 1))
    late = stream(0.5, (2.0, 1), (2.25, 4), (4.0, 2), (5.0, 1))
    assert window((early, late)) == (2.0, 5.0)
    arrivals = (stream(2.0, (2.5, 1)), stream(3.0, (3.75, 1)), stream(4.0, (5.5, 1)))
    figures = traffic_figures(Traffic((early, late), arrivals))
    # gaps: 0.5 and 2 s of one, 0.25, 1.75 and 1 s of the other; their tokens: 4 and 7
    assert figures["gap_p50_ms"] == 1000
    assert figures["gap_p99_ms"] == pytest.approx(1990)
    assert figures["gap_max_ms"] == 2000
    assert figures["tokens_per_second"] == pytest.approx(11 / 3)
    assert (figures["arrivals"], figures["arrival_first_token_ms"]) == (3, 750)
    quiet = traffic_figures(Traffic((early, late), ()))
    assert quiet.items() == {name: value for name, value in figures.items() if "arrival" not in name}.items()

    with pytest.raises(SpecmambaError, match="raise --stream-tokens"):
        traffic_figures(Traffic((stream(0.0, (1.0, 1), (2.0, 1)), stream(0.0, (3.0, 1), (4.0, 1))), ()))


def test_handoffs_are_counted_from_metrics() -> None:
    counted = read_counts(METRICS.format(handoffs=3.0, failed=2.0))
    assert counted == Counted(3, 1_500_000, 0.25, {"slow": 2})
    before = Counted(1, 500_000, 0.125, {"slow": 2})
    assert counted.since(before) == Counted(2, 1_000_000, 0.125, {})
    with pytest.raises(SpecmambaError, match="counts no handoffs"):
        read_counts("specmamba_handoffs_total 3.0\n")


@dataclass
class CountingServer:
    """Counts one more handoff at every look, up to a last one."""

    last: int
    failed: int = 0
    looks: int = 0

    def text(self, path: str) -> str:
        assert path == "/metrics"
        self.looks += 1
        return METRICS.format(handoffs=min(self.last, self.looks - 1), failed=self.failed)


def test_prompts_that_are_not_handed_over_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(prefill: CountingServer, decode: CountingServer) -> Way:
        return Way(APART, cast(ServerProcess, decode), cast(ServerProcess, prefill), 1)

    way = pair(CountingServer(2), CountingServer(2))
    added = way.handed_over(way.counted(), 2)
    assert [counted.num_handoffs for counted in added] == [2, 2]
    failing = pair(CountingServer(2), decode := CountingServer(1))
    before = failing.counted()
    decode.failed = 1
    with pytest.raises(SpecmambaError, match=r"of 2 prompts .* decode: 1, failed: \{'slow': 1\}"):
        failing.handed_over(before, 2)
    monkeypatch.setattr("specmamba.bench.handoffs.servers._COUNTED_TIMEOUT_S", 0.05)
    with pytest.raises(SpecmambaError, match=r"prefill: 2, failed: \{\}; decode: 1"):
        (late := pair(CountingServer(2), CountingServer(1))).handed_over(late.counted(), 2)


def played() -> Played:
    row = handoff_figures({ONE: 0.5, APART: 0.75, HELD: 0.125}, Counted(1, 900, 0.25, {}), Counted(1, 900, 0.5, {}))
    figures: list[Figures] = [
        {"gap_p50_ms": 4.0, "gap_p99_ms": 8.0, "gap_max_ms": 10.0, "tokens_per_second": 100.0},
        {"gap_p50_ms": 6.0, "gap_p99_ms": 8.0, "gap_max_ms": 10.0, "tokens_per_second": 200.0},
    ]
    slow: list[Figures] = [{**each, "gap_p99_ms": 10 * each["gap_p99_ms"], "arrivals": 3.0} for each in figures]
    cells = {(ONE, QUIET): figures, (ONE, ARRIVALS): slow, (APART, QUIET): figures, (APART, ARRIVALS): figures}
    return Played({64: [row, {**row, "first_token_ms_apart": 1000.0}]}, cells)


def test_the_report_has_medians_and_ratios_of_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    report = handoffs.report_of(HandoffsBenchConfig(), DESCRIBED, {"one_server": 2, "each_of_two": 1}, played())
    assert report["model"] == "tiny"
    (row,) = report["handoffs"]
    assert row["prompt_tokens"] == 64
    assert row["first_token_ms_apart"] == {"median": 875, "range": [750, 1000]}
    assert row["apart_over_one_server"]["median"] == 1.5
    assert (row["bytes_sent"]["median"], row["sending_ms"]["median"], row["taking_over_ms"]["median"]) == (
        900,
        250,
        500,
    )
    streams = report["streaming"]
    assert streams[ONE][ARRIVALS]["gap_p99_ms_over_quiet"]["median"] == 10
    assert streams[ONE][ARRIVALS]["tokens_per_second"] == {"median": 150, "range": [100, 200]}
    assert streams[APART][ARRIVALS]["gap_p99_ms_over_one_server"] == {"median": 0.1, "range": [0.1, 0.1]}
    assert not [name for name in streams[ONE][QUIET] if "_over_" in name]
    handoffs.print_report(report)
    out = capsys.readouterr().out
    assert "875 (750-1000)" in out
    assert "one server, long prompts arrive" in out


def test_ratios_are_of_the_same_round() -> None:
    def rounds(*speeds: float) -> list[dict[str, float]]:
        return [dict.fromkeys(("gap_p50_ms", "gap_p99_ms", "gap_max_ms", "tokens_per_second"), each) for each in speeds]

    found = stream_medians({(ONE, QUIET): rounds(1.0, 4.0, 2.0), (APART, QUIET): rounds(2.0, 4.0, 3.0)})
    assert found[APART][QUIET]["tokens_per_second_over_one_server"] == {"median": 1.5, "range": [1.0, 2.0]}


def test_prompts_differ_and_have_their_length() -> None:
    prompts = Prompts(range(3000))
    texts = [prompts.next(length) for length in (20, 20, 7000, 20)]
    assert [len(text) for text in texts] == [20, 20, 7000, 20]
    assert len({tuple(text[:20]) for text in texts}) == 4


class SlowClients:
    """Answers a prompt [n] with n tokens, one every 10 ms."""

    async def ask(self, prompt: Sequence[int], max_tokens: int, on_first: Callable[[], None] | None = None) -> Stream:
        events = []
        for number in range(prompt[0]):
            await asyncio.sleep(0.01)
            events.append(Event(0.0, 1))
            if number == 0 and on_first is not None:
                on_first()
        return Stream(0.0, tuple(events))


def test_prompts_arrive_while_all_streams_run() -> None:
    sent = []

    async def arrival(number: int) -> Stream:
        sent.append(number)
        return stream(0.0, (1.0, 1))

    async def send(has_arrivals: bool) -> Traffic:
        clients = cast(Clients, SlowClients())
        return await send_traffic(clients, [[20], [60]], 0, arrival if has_arrivals else None, 0.03)

    traffic = asyncio.run(send(True))
    assert [len(each.events) for each in traffic.streams] == [20, 60]
    assert sent == [*range(len(traffic.arrivals))]
    assert 1 <= len(sent) <= 10  # 190 ms; 20 where they go on until the last stream ends
    assert asyncio.run(send(False)).arrivals == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-threads", "1"], "--num-threads 1: two servers share these threads"),
        (["--prompt-tokens", "64,16"], "greater than or equal to 17"),
        (["--tp-size", "2"], "--tp-size: servers that hand prompts over do not have this"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        handoffs.main(flags)
    assert message in capsys.readouterr().err


def test_threads_are_halved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert threads_of(HandoffsBenchConfig(num_threads=5)) == (5, 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        handoffs.main([])
    assert "two servers need a thread each" in capsys.readouterr().err


def test_httpx_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("specmamba.measure.report.find_spec", lambda package: None)
    with pytest.raises(SystemExit, match="2"):
        handoffs.main([])
    assert "needs httpx, which is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_does_not_start_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        handoffs.main(["--num-threads", "2", "--max-total-tokens", "1"])
    assert "the server ended with status" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    file = tmp_path / "report.json"
    sizes = ["--prompt-tokens", "40,80", "--streams", "2", "--stream-tokens", "460", "--stream-prompt-tokens", "20"]
    arrivals = ["--arrival-tokens", "48", "--arrival-interval", "0.1", "--rounds", "1"]
    assert handoffs.main([*TINY, *sizes, *arrivals, "--json", str(file)]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["threads"] == {"one_server": 2, "each_of_two": 1}
    short, long = report["handoffs"]
    assert (short["prompt_tokens"], long["prompt_tokens"]) == (40, 80)
    per_token = (long["bytes_sent"]["median"] - short["bytes_sent"]["median"]) / 40
    assert short["bytes_sent"] == short["bytes_taken_over"]
    assert short["bytes_sent"]["median"] > per_token * 39 > 0  # a state too
    for row in (short, long):
        assert row["sending_ms"]["median"] > 0
        assert 0 < row["taking_over_ms"]["median"] < row["first_token_ms_held"]["median"]
    for way, load in itertools.product((ONE, APART), (QUIET, ARRIVALS)):
        row = report["streaming"][way][load]
        assert 0 < row["gap_p50_ms"]["median"] <= row["gap_p99_ms"]["median"] <= row["gap_max_ms"]["median"]
        assert row["tokens_per_second"]["median"] > 0
        assert ("arrivals" in row) == (load == ARRIVALS)
    assert "apart, long prompts arrive" in capsys.readouterr().out
