"""The benchmark of ranks that share a model: its figures from made-up inputs, and a tiny run with real ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specmamba.bench.llama_cpp.engine_process import EngineProcess
from specmamba.bench.ranks import __main__ as ranks_bench
from specmamba.bench.ranks.figures import exchange_figures, rows_of, sent_bytes
from specmamba.bench.ranks.worker import KINDS, Exchanged, Exchanges
from specmamba.kernels.exchange import Count
from specmamba.measure.prompts import PromptText

pytestmark = pytest.mark.usefixtures("forked_processes")

HIDDEN, VOCABULARY, LAYERS = 256, 4096, 8  # of the demo
TINY = ["--context-length", "128", "--max-total-tokens", "512", "--max-running-requests", "2"]
FACTS = {"dtype": "float32", "native": {"level": None}}


def decoded(tokens: int, steps: int, seconds: float, **exchanges: tuple[int, int, float]) -> dict[str, Any]:
    found = {
        kind: {"calls": calls, "nbytes": nbytes, "seconds": each} for kind, (calls, nbytes, each) in exchanges.items()
    }
    return {"tokens": tokens, "steps": steps, "seconds": seconds, "exchanges": found, "is_over_memory": False}


@pytest.mark.parametrize(
    ("kind", "num_ranks", "expected"),
    [
        ("all_gather", 2, 600),
        ("all_gather", 4, 1800),
        ("all_reduce", 2, 600),
        ("all_reduce", 3, 800),
        ("all_reduce", 4, 900),
        ("broadcast", 2, 600),
        ("broadcast", 4, 1200),
        ("broadcast", 5, 1800),
    ],
)
def test_bytes_that_rank_0_sends(kind: str, num_ranks: int, expected: float) -> None:
    assert sent_bytes(kind, 600, num_ranks) == pytest.approx(expected)
    assert sent_bytes(kind, 600, num_ranks, is_over_memory=True) == 600


def test_exchanges_of_a_run() -> None:
    run = decoded(20, 10, 2.0, all_reduce=(160, 6000, 0.5), all_gather=(10, 400, 0.25), broadcast=(30, 100, 0.25))
    figures = exchange_figures(run, 3)
    assert figures["sent_bytes_per_token"] == pytest.approx((8000 + 800 + 200) / 20)
    assert (figures["all_reduce_share"], figures["exchange_share"]) == (0.25, 0.5)
    assert (figures["all_reduce_per_step"], figures["broadcast_per_step"]) == (16, 3)
    assert (figures["all_reduce_ms_per_step"], figures["all_gather_bytes_per_token"]) == (50, 40)


def test_ratios_are_to_the_first_way_of_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    exchanges = dict.fromkeys(KINDS, (1, 600, 0.5))
    played = {
        (1, "a"): [decoded(8, 8, 1.0), decoded(8, 8, 2.0), decoded(8, 8, 4.0)],
        (1, "b"): [decoded(8, 8, 1.0, **exchanges), decoded(8, 8, 1.0, **exchanges), decoded(8, 8, 8.0, **exchanges)],
        (4, "a"): [decoded(32, 8, 1.0)] * 3,
    }
    one, shared, four = rows_of(played, 2)
    assert (one["batch"], one["way"], four["batch"]) == (1, "a", 4)
    assert one["tokens_per_second"] == {"median": 4, "range": [2, 8]}
    assert one["step_ms"]["median"] == 250
    assert shared["over_first"] == {"median": 1, "range": [0.5, 2]}
    assert four["over_first"]["range"] == [1, 1]
    assert shared["sent_bytes_per_token"]["median"] == 225
    assert "sent_bytes_per_token" not in one
    config = ranks_bench.RanksBenchConfig()
    ranks_bench.print_report(ranks_bench.report_of(config, {"a": FACTS}, played))
    out = capsys.readouterr().out
    assert "1 (0.5-2)" in out
    assert "50% (6-50)" in out  # in sums


class FakeRanks:
    """Sums with itself."""

    size = 2

    def counts(self) -> None:
        """Nothing goes over shared memory."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * 2

    def all_gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        return torch.cat([x] * len(widths), -1)

    def broadcast(self, x: Tensor) -> Tensor:
        return x


def test_exchanges_are_counted_and_unchanged() -> None:
    ranks = FakeRanks()
    exchanges = Exchanges(ranks)
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(ranks.all_reduce(x), x * 2)
    before = exchanges.snapshot()
    assert ranks.all_reduce(x.to(torch.bfloat16)).dtype == torch.bfloat16
    assert ranks.all_gather(x, (3, 4)).shape == (2, 6)
    assert ranks.broadcast(x) is x
    after = exchanges.snapshot()
    assert {kind: (each.calls, each.nbytes) for kind, each in before.items()} == {
        "all_reduce": (1, 24),
        "all_gather": (0, 0),
        "broadcast": (0, 0),
    }
    added = {kind: after[kind].since(before[kind]) for kind in KINDS}
    assert {kind: (each.calls, each.nbytes) for kind, each in added.items()} == {
        "all_reduce": (1, 12),
        "all_gather": (1, 32),  # padded to the widest part
        "broadcast": (1, 24),
    }
    assert all(each.seconds > 0 for each in added.values())
    assert Exchanged(3, 4, 1.0).since(Exchanged(1, 1, 0.5)) == Exchanged(2, 3, 0.5)


class FakeMemory:
    """Counts of its own, and no methods to replace."""

    def __init__(self) -> None:
        self.found = {kind: Count(2, 8, 0.5) for kind in (*KINDS, "message")}

    def counts(self) -> dict[str, Count]:
        return self.found


def test_exchanges_over_memory_count_themselves() -> None:
    ranks = FakeMemory()
    exchanges = Exchanges(ranks)
    assert exchanges.is_over_memory
    before = exchanges.snapshot()
    ranks.found = {**ranks.found, "broadcast": Count(5, 20, 0.75)}
    added = exchanges.snapshot()["broadcast"].since(before["broadcast"])
    assert added == Exchanged(3, 12, 0.25)
    assert list(before) == list(KINDS)


class FakeEngine:
    """Notes who is asked."""

    def __init__(self, name: str, asked: list[tuple[str, int]]) -> None:
        self.name, self.asked = name, asked

    def encode(self, texts: Sequence[PromptText]) -> tuple[list[list[int]], list[list[int]]]:
        return [[1, 2, 3], [4, 5]], []

    def ask(self, name: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        prompts = arguments["prompts"]
        assert (name, arguments["max_tokens"]) == ("decode", 9)
        assert prompts == [[1, 2, 3, 4], [5, 1, 2, 3]][: len(prompts)]
        self.asked.append((self.name, len(prompts)))
        return decoded(8 * len(prompts), 8, float(len(self.asked)))


def test_ways_take_turns_and_the_first_round_does_not_count() -> None:
    config = ranks_bench.RanksBenchConfig(batch_sizes=(1, 2), prompt_tokens=4, max_tokens=9, rounds=2)
    asked = list[tuple[str, int]]()
    engines = {name: cast(EngineProcess, FakeEngine(name, asked)) for name in "abc"}
    played = ranks_bench.play(config, engines)
    assert "".join(name for name, _ in asked) == "abcabc" + "bcabca" + "cabcab"
    assert [size for _, size in asked] == [1, 1, 1, 2, 2, 2] * 3
    assert [each["seconds"] for each in played[1, "a"]] == [9, 14]
    assert [each["tokens"] for each in played[2, "b"]] == [16, 16]


def test_ways_have_as_many_threads_in_all() -> None:
    config = ranks_bench.RanksBenchConfig(tp_size=2, num_threads=3)
    assert ranks_bench.ways_of(config) == {
        "1 process, 3 threads": {"tp_size": 1, "num_threads": 3},
        "1 process, 6 threads": {"tp_size": 1, "num_threads": 6},
        "2 ranks, 3 threads each": {"tp_size": 2, "num_threads": 3},
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-sizes", "1,8", "--max-running-requests", "4"], "--batch-sizes 8: only 4 requests run together"),
        (["--device", "cuda"], "--device"),
        (["--tp-size", "1"], "greater than or equal to 2"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ranks_bench.main(flags)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_cannot_be_divided_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ranks_bench.main([*TINY, "--batch-sizes", "1", "--tp-size", "3"])
    assert "cannot be divided among 3 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    sizes = ["--batch-sizes", "1,2", "--prompt-tokens", "8", "--max-tokens", "6", "--rounds", "1"]
    assert ranks_bench.main([*TINY, *sizes, "--dtype", "bfloat16", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert [(row["batch"], row["way"]) for row in report["rows"]] == [
        (batch, way) for batch in (1, 2) for way in ranks_bench.ways_of(ranks_bench.RanksBenchConfig())
    ]
    assert all(row["tokens_per_second"]["median"] > 0 for row in report["rows"])
    for row in (report["rows"][2], report["rows"][5]):
        assert row["all_reduce_per_step"]["median"] == 2 * LAYERS
        assert row["all_reduce_bytes_per_token"]["median"] == 2 * LAYERS * HIDDEN * 2  # as by gloo with two ranks
        assert row["all_gather_bytes_per_token"]["median"] == VOCABULARY * 2 / 2
        assert 0 < row["all_reduce_share"]["median"] < row["exchange_share"]["median"] < 1
    assert "2 ranks, 1 thread each" in capsys.readouterr().out
