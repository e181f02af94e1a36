"""The prefix benchmark: oracle, workloads, figures, costs, and flags."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmamba import LLM
from specmamba.bench.prefix import __main__ as prefix
from specmamba.bench.prefix import run as prefix_run
from specmamba.bench.prefix.costs import prefill_work, tree_lengths, tree_work
from specmamba.bench.prefix.decoding import decode_steps, stopwatch
from specmamba.bench.prefix.disk import HOST_RATIO, host_flags
from specmamba.bench.prefix.engines import SHARING, PrefixBenchConfig, demand_of, pool_flags, rehearse, sizes_of
from specmamba.bench.prefix.figures import workload_figures
from specmamba.bench.prefix.run import Answer, Play
from specmamba.bench.prefix.splits import measure_swing
from specmamba.bench.prefix.texts import SPREAD, Oracle, TextSource, oracle_hits, read_source
from specmamba.bench.prefix.workloads import Ask, Tokens, make_workload
from specmamba.cache.tiers.store import object_store
from specmamba.config import DEMO_MODEL
from specmamba.errors import ConfigError
from specmamba.flags.command_line import parse_command_line
from specmamba.models.text.tokenizer import Tokenizer
from tests.cache.store.memory_store import StoreMemory, library_on
from tests.tiny import write_tiny_checkpoint

EXACT = ["--device", "cpu", "--num-threads", "1", "--chunked-prefill-size", "32"]
SIZES = [
    *("--output-tokens", "4", "--turn-tokens", "8", "--shared-tokens", "40", "--num-users", "6", "--num-chats", "3"),
    *("--num-turns", "3", "--num-documents", "1", "--document-tokens", "60", "--num-questions", "4"),
    *("--thought-depth", "2", "--thought-width", "3", "--num-agents", "2", "--agent-steps", "3", "--tool-tokens", "10"),
    *("--pressure-requests", "24", "--ttft-tokens", "100", "--ttft-shared-tokens", "90", "--rounds", "2"),
    *("--cost-tokens", "2048", "--cost-requests", "3"),
]
FIGURES = {
    *("workload", "cache_eviction", "requests", "prompt_tokens", "hit_rate", "oracle_hit_rate", "ratio_to_oracle"),
    *(
        "by_kind",
        "largest_wave",
        "distinct_tokens",
        "ttft_ms",
        "ttft_ratio",
        "different_texts",
        "miss_reasons",
        "evicted_tokens",
        "evicted_states",
    ),
    *("num_nodes", "num_tombstones", "num_states", "kv_pool_tokens", "state_slots", "preemptions", "lost_most"),
}


def config_of(*flags: str) -> PrefixBenchConfig:
    return parse_command_line(PrefixBenchConfig, "bench", [*EXACT, *SIZES, *flags])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo's vocabulary, so that texts can be encoded."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0, vocab_size=4096)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that is long enough for small workloads, and faster to read than the default text."""
    rows = (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines()[4:]
    file = tmp_path_factory.mktemp("text") / "prompts.jsonl"
    file.write_text("\n".join(rows) + "\n", "utf8")
    return file


@pytest.fixture(scope="module")
def source(text_file: Path) -> TextSource:
    return read_source(text_file, Tokenizer(DEMO_MODEL))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    flags: dict[str, Any] = {"max_running_requests": 3, "max_total_tokens": 2048, "max_mamba_cache_size": 80}
    with LLM(model=str(tiny), dtype="float32", num_threads=1, chunked_prefill_size=32, **flags) as llm:
        yield llm


def run(tmp_path: Path, model: Path, text: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    file = tmp_path / "report.json"
    given = [*EXACT, *SIZES, "--model", str(model), "--prompts", str(text), *flags, "--json", str(file)]
    assert prefix.main(given) == status
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- the oracle


@pytest.mark.parametrize("seed", range(5))
def test_the_oracle_agrees_with_a_full_search(seed: int) -> None:
    draw = random.Random(seed)
    texts = [tuple(draw.randrange(3) - 1 for _ in range(draw.randrange(12))) for _ in range(60)]
    oracle = Oracle()
    for i, text in enumerate(texts):
        assert oracle.longest(text) == max((common(text, other) for other in texts[:i]), default=0)
        oracle.add(text)
        assert oracle.num_tokens == len({t[:n] for t in texts[: i + 1] for n in range(1, len(t) + 1)})


def test_oracle_hits_count_outputs_and_leave_one_token_to_run() -> None:
    requests = [
        ((1, 2, 3), (4, 5)),
        ((1, 2, 3, 4, 5, 6), (7,)),
        ((1, 2, 3), (9,)),
        ((2, 1), (1,)),
        ((1, 2, 3, 9, 1), ()),
    ]
    assert oracle_hits(requests) == [0, 5, 2, 0, 4]


# --- texts


def test_pieces_are_of_the_text(source: TextSource) -> None:
    draw = random.Random(0)
    longest = max(source.documents, key=len)
    for length in (1, 7, 50):
        piece = source.cut(length, draw)
        assert len(piece) == length
        assert any(piece == document[i : i + length] for document in source.documents for i in range(len(document)))
    assert len(source.cut(3 * len(longest), draw)) == 3 * len(longest)
    lengths = [len(source.vary(40, draw)) for _ in range(300)]
    assert 40 / SPREAD <= min(lengths) < 15
    assert 120 < max(lengths) <= 40 * SPREAD


def test_the_default_text_is_longer_than_the_bundled_prompts(source: TextSource) -> None:
    assert read_source(None, Tokenizer(DEMO_MODEL)).num_tokens > 2 * source.num_tokens


# --- workloads


def asked(config: PrefixBenchConfig, source: TextSource, name: str) -> list[list[Ask]]:
    """All waves of a workload; each output is derived from the length of its prompt."""
    waves = make_workload(name, source, sizes_of(config), config.seed).waves(config.concurrency, random.Random(1))
    found = [next(waves)]
    while True:
        try:
            outputs: list[Tokens] = [(-1 - len(ask.prompt),) * 4 for ask in found[-1]]
            found.append(waves.send(outputs))
        except StopIteration:
            return found


@pytest.mark.parametrize("name", SHARING)
def test_workloads_depend_on_the_seed_only(source: TextSource, name: str) -> None:
    assert asked(config_of(), source, name) == asked(config_of(), source, name)
    assert asked(config_of(), source, name) != asked(config_of("--seed", "1"), source, name)


def test_users_share_a_system_prompt(source: TextSource) -> None:
    waves = asked(config_of(), source, "shared")
    prompts = [ask.prompt for wave in waves for ask in wave]
    assert [len(wave) for wave in waves] == [4, 2]
    assert all(prompt[:40] == prompts[0][:40] and len(prompt) > 40 for prompt in prompts)
    assert len(set(prompts)) == 6


def test_a_turn_repeats_the_history_and_the_output(source: TextSource) -> None:
    prompts = [ask.prompt for wave in asked(config_of(), source, "chat") for ask in wave]
    assert len(prompts) == 9
    ends = [p for p in prompts if not any(q != p and q[: len(p)] == p for q in prompts)]
    assert len(ends) == 3  # conversations
    for end in ends:
        turns = sorted((p for p in prompts if end[: len(p)] == p), key=len)
        assert len(turns) == 3
        for turn, following in pairwise(turns):
            assert following[len(turn) : len(turn) + 4] == (-1 - len(turn),) * 4
            assert len(following) > len(turn) + 4


def test_questions_and_thoughts_branch(source: TextSource) -> None:
    asks = [ask for wave in asked(config_of(), source, "branch") for ask in wave]
    questions = [ask.prompt for ask in asks if ask.kind == "question"]
    thoughts = [ask.prompt for ask in asks if ask.kind == "thought"]
    assert len(questions) == 4
    assert len({prompt[:60] for prompt in questions}) == 1
    # one problem of 40 tokens, cues of 2, outputs of 4: three thoughts, then three on each of two of these
    assert sorted(map(len, thoughts)) == [42] * 3 + [48] * 6
    assert len({prompt[:40] for prompt in thoughts}) == 1
    parents = {prompt[:46] for prompt in thoughts if len(prompt) == 48}
    assert len(parents) == 2
    assert all(any(parent[:42] == first for first in thoughts[:3]) for parent in parents)


def test_agents_share_instructions_and_grow(source: TextSource) -> None:
    prompts = [ask.prompt for wave in asked(config_of(), source, "agent") for ask in wave]
    assert len(prompts) == 6
    assert len({prompt[:40] for prompt in prompts}) == 1
    assert len({len(prompt) for prompt in prompts}) > 3


def test_pressure_has_all_kinds_with_different_weights(source: TextSource) -> None:
    config = config_of("--pressure-requests", "120")
    asks = [ask for wave in asked(config, source, "pressure") for ask in wave]
    assert {ask.kind for ask in asks} == {"user", "turn", "question", "thought", "tool"}
    assert 120 <= len(asks) < 120 + 10
    weights = make_workload("pressure", source, sizes_of(config), config.seed).weights
    assert sorted(weights, reverse=True) == [1 / rank for rank in range(1, len(weights) + 1)]


def test_the_demand_covers_whatever_the_model_answers(source: TextSource) -> None:
    config = config_of()
    demand = demand_of(config, "chat", source, 512)
    workload = make_workload("chat", source, sizes_of(config), config.seed)
    texts = [text for wave in rehearse(workload, 4, 4, random.Random(0)) for text in wave]
    assert demand.num_requests == len(texts) == 9
    assert demand.longest == max(map(len, texts))
    assert demand.largest_wave == 3  # no more conversations than that
    assert demand.distinct_tokens == len({text[:n] for text in texts for n in range(1, len(text) + 1)})
    flags = pool_flags(config, [demand])
    assert flags["max_total_tokens"] >= demand.distinct_tokens + config.concurrency * demand.longest
    assert pool_flags(config, [demand], 0.5)["max_total_tokens"] < flags["max_total_tokens"]
    assert pool_flags(config_of("--max-total-tokens", "999", "--workloads", "chat"), [demand]).keys() == {
        "max_mamba_cache_size"
    }
    with pytest.raises(ConfigError, match=rf"has {demand.longest} tokens .* context of 20"):
        demand_of(config, "chat", source, 20)


def test_the_largest_wave_must_run_together(source: TextSource) -> None:
    largest = max(map(len, asked(config_of(), source, "branch")))
    assert demand_of(config_of(), "branch", source, 512).largest_wave == largest > 4
    demand_of(config_of("--max-running-requests", str(largest)), "branch", source, 512)
    with pytest.raises(ConfigError, match=f"branch has {largest} requests that come together"):
        demand_of(config_of("--max-running-requests", str(largest - 1)), "branch", source, 512)


# --- figures


def test_figures_of_a_workload_by_hand(source: TextSource) -> None:
    warm = [
        Answer("user", (1, 2, 3, 4), (5,), 0, 0.010),
        Answer("turn", (1, 2, 3, 4, 5, 6), (7,), 3, 0.002),
        Answer("user", (1, 2, 9, 9), (5,), 2, 0.004),
    ]
    cold = [Answer(a.kind, a.prompt, (a.output[0] + (a.kind == "turn"),), 0, 0.008) for a in warm]
    demand = demand_of(config_of(), "chat", source, 512)
    figures = workload_figures(Play("chat", "lru", demand, warm, cold, {}, {}))
    assert (figures["prompt_tokens"], figures["output_tokens"], figures["different_texts"]) == (14, 3, 1)
    assert figures["hit_rate"] == round(5 / 14, 5)
    assert figures["distinct_tokens"] == 4 + 1 + 2 + 3  # 5 follows 4 in two of the texts
    assert figures["oracle_hit_rate"] == round(7 / 14, 5)
    assert figures["ratio_to_oracle"] == round(5 / 7, 4)
    assert figures["by_kind"]["turn"]["ratio_to_oracle"] == 3 / 5
    assert figures["ttft_ms"]["with_cache"]["p50"] == 4.0
    assert figures["ttft_ratio"] == 0.5
    assert figures["lost_most"] == [
        {"request": 1, "kind": "turn", "prompt_tokens": 6, "hit_tokens": 3, "oracle_tokens": 5}
    ]


@pytest.mark.slow
def test_report_of_workloads(tmp_path: Path, tiny: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "report.png"
    report = run(tmp_path, tiny, text_file, "--workloads", ",".join(SHARING), "--plot", str(picture))
    assert picture.stat().st_size > 1000
    assert report["dtype"] == "float32"
    assert report["different_texts"] == 0
    assert report["prompts"] == text_file.name
    assert report["ttft"] is report["disk"] is report["writing"] is report["costs"] is None
    names = [(each["workload"], each["cache_eviction"]) for each in report["workloads"]]
    assert names == [*((name, "lru") for name in SHARING[:-1]), ("pressure", "lru"), ("pressure", "flops")]
    for figures in report["workloads"]:
        check_figures(figures)
    assert report["workloads"][-1]["requests"] == report["workloads"][-2]["requests"] >= 24
    text = capsys.readouterr().out
    assert "pressure flops" in text
    assert "waves of at least 4" in text
    assert "roomy memory" in text
    assert "DIFFER" not in text


def check_figures(figures: dict[str, Any]) -> None:
    assert set(figures) >= FIGURES
    assert 0 < figures["hit_rate"] <= figures["oracle_hit_rate"] < 1
    assert figures["hit_tokens"] == round(figures["hit_rate"] * figures["prompt_tokens"])
    assert 0 <= figures["num_tombstones"] == figures["num_nodes"] - figures["num_states"]
    if figures["workload"] != "pressure":
        assert figures["evicted_tokens"] == figures["evicted_states"] == 0
        assert figures["miss_reasons"]["evicted"] == 0


def test_engine_flags_are_passed_on(tmp_path: Path, tiny: Path, text_file: Path) -> None:
    flags = ["--speculative-algorithm", "none", "--page-size", "4", "--cache-eviction", "flops"]
    flags += ["--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "2", "--schedule-policy", "lpm"]
    report = run(tmp_path, tiny, text_file, "--workloads", "chat,branch", *flags)
    assert (report["algorithm"], report["num_draft_tokens"], report["page_size"]) == ("none", 1, 4)
    assert (report["strategy"], report["track_interval"], report["schedule_policy"]) == ("extra_buffer", 2, "lpm")
    assert [each["cache_eviction"] for each in report["workloads"]] == ["flops", "flops"]
    for figures in report["workloads"]:
        check_figures(figures)
    assert report["different_texts"] == 0


@pytest.mark.slow
def test_report_of_times_and_costs(
    tmp_path: Path, tiny: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(tmp_path, tiny, text_file, "--workloads", "costs,disk,ttft,writing", "--cost-tokens", "3000")
    assert report["workloads"] == []
    ttft, tree, engine, decode = report["ttft"], *(report["costs"][name] for name in ("tree", "engine", "decode"))
    assert ttft["ttft_shared_cached_tokens"] == 90
    assert ttft["ttft_second_user_cached_tokens"] < 90
    assert ttft["ttft_shared_ratio_range"][0] <= ttft["ttft_shared_ratio"] <= ttft["ttft_shared_ratio_range"][1]
    disk = report["disk"]
    assert disk["cached_tokens"] == 96  # the last three tokens are not worth a state
    assert (disk["lost_writes"], disk["different_texts"]) == (0, 0)
    assert disk["written_bytes_per_token"] > 0
    for kind in ("writing", "memory", "host", "disk", "disk_dropped", "restart"):
        assert 0 < disk[f"{kind}_ratio_range"][0] <= disk[f"{kind}_ratio"] <= disk[f"{kind}_ratio_range"][1]
    writing = report["writing"]
    assert writing["written_bytes"] > 10 * writing["prompt_tokens"]
    assert writing["lost_writes"] == 0
    for name in ("p50_ratio", "p99_ratio"):
        assert 0 < writing[name]["range"][0] <= writing[name]["median"]
    assert tree["tokens"] == [1024, 2048, 3000]
    assert tree["last_doubling"] is None
    assert all(len(tree[name]) == 3 for name in ("insert_ms", "match_ms", "share_of_prefill"))
    total = tree["insert_ms"][1] + tree["match_ms"][1]
    assert tree["share_of_prefill"][1] == pytest.approx(total / (2.048 * engine["prefill_us_per_token"]), rel=0.02)
    assert engine["tokens"] == 511
    assert 0 < engine["share"] < 1
    assert [decode[name]["track_interval"] for name in ("no_buffer", "extra_buffer")] == [None, 80]
    assert decode["no_buffer"]["leave_ms_per_state"] is None
    assert decode["extra_buffer"]["leave_ms_per_state"] > 0
    assert decode["no_buffer"]["states_left"] == 0 < decode["extra_buffer"]["states_left"]
    for each in decode.values():
        assert each["steps"] > 10
        assert 0 < each["bookkeeping_share"] < 1
        assert each["bookkeeping_share"] == pytest.approx(sum(each["shares"].values()), abs=1e-4)
    text = capsys.readouterr().out
    assert all(
        words in text
        for words in ("from the third user on", "to match", "chunk ends", "decoding, no_buffer", "every 80")
    )


def test_pressure_evicts(tmp_path: Path, tiny: Path, text_file: Path) -> None:
    flags = ["--workloads", "pressure", "--max-mamba-cache-size", "5", "--max-running-requests", "9"]
    report = run(tmp_path, tiny, text_file, *flags)
    for figures in report["workloads"]:
        assert figures["state_slots"] == 5
        assert figures["evicted_states"] > 0
        assert figures["miss_reasons"]["evicted"] > 0
        assert figures["hit_rate"] < figures["oracle_hit_rate"]


def test_a_wrong_text_fails(
    tmp_path: Path, tiny: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = prefix_run.run_wave

    def spoiled(llm: LLM, asks: Sequence[Ask], output_tokens: int) -> list[Answer]:
        answers = honest(llm, asks, output_tokens)
        if llm.engine.config.disable_radix_cache or len(asks) < 4:
            return answers
        first = answers[0]
        return [Answer(first.kind, first.prompt, (*first.output[:-1], 0), first.num_cached_tokens, 0.1), *answers[1:]]

    monkeypatch.setattr(prefix_run, "run_wave", spoiled)
    report = run(tmp_path, tiny, text_file, "--workloads", "shared", status=1)
    assert report["different_texts"] == report["workloads"][0]["different_texts"] == 1
    assert "DIFFERENT TEXTS: 1, with the cache and without: an error" in capsys.readouterr().out


# --- costs


def test_tree_work_leaves_nothing(llm: LLM) -> None:
    tokens = np.arange(1, 1001, dtype=np.int64)
    assert all(seconds > 0 for seconds in tree_work(llm, tokens, 32))
    stats = llm.engine.stats()
    assert stats.kv_cached_tokens == stats.kv_used_tokens == stats.state_cached_slots == stats.state_used_slots == 0
    llm.engine.cache_manager.cache.check({})
    with pytest.raises(ConfigError, match="does not hold a prompt of 5000 tokens"):
        tree_work(llm, np.ones(5000, dtype=np.int64), 32)


def test_tree_lengths() -> None:
    assert tree_lengths(1024) == [1024]
    assert tree_lengths(1025) == [1024, 1025]
    assert tree_lengths(4096) == [1024, 2048, 4096]
    assert tree_lengths(5000) == [1024, 2048, 4096, 5000]


def test_prefill_work_finds_nothing_and_leaves_states(llm: LLM, source: TextSource) -> None:
    prompt = source.cut(100, random.Random(0))
    for _ in range(2):
        work = prefill_work(llm, prompt)
        assert work.keys() == {"acquire", "leave_chunk", "prefill"}
        assert 0 < work["acquire"] + work["leave_chunk"] < work["prefill"]
    stats = llm.engine.stats().prefix_cache
    assert stats.num_states >= 4  # chunks of 32
    llm.flush_cache()


def test_time_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Worker:
        def outer(self) -> int:
            self.work(1.0)
            answer = self.inner() + self.inner()
            self.work(2.0)
            return answer

        def inner(self) -> int:
            self.work(16.0)
            return 1

        def work(self, seconds: float) -> None:
            nonlocal now
            now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    worker = Worker()
    with stopwatch() as (seconds, watch):
        watch(worker, "outer", "a")
        watch(worker, "inner", "b")
        assert worker.outer() == 2
    assert seconds == {"a": 3.0, "b": 32.0}  # what the inner ones took is not in the outer one's time
    assert not vars(worker)


def test_decode_steps_are_those_in_which_all_requests_decode(llm: LLM, source: TextSource) -> None:
    draw = random.Random(0)
    steps = decode_steps(llm, [source.cut(20, draw) for _ in range(3)])
    assert len(steps) > 10
    for step in steps:
        assert step["states"] == 0  # no_buffer leaves none on the way
        assert 0 < step["scheduler"] + step["leave"] + step["advance"] < step["step"]
    assert not vars(llm.engine.scheduler).get("admit")


def test_a_given_size_of_host_memory_stays() -> None:
    assert host_flags(PrefixBenchConfig()) == {"hicache_ratio": HOST_RATIO}
    assert host_flags(PrefixBenchConfig(hicache_ratio=0.5)) == host_flags(PrefixBenchConfig(hicache_size=1)) == {}


# --- bad input


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--workloads", "shared,chats"],
            "none of shared, chat, branch, agent, pressure, ttft, disk, writing, costs",
        ),
        (["--workloads", ""], "'' is none of"),
        (["--disable-radix-cache"], "drop it"),
        (["--concurrency", "17"], "raise --max-running-requests"),
        (["--ttft-shared-tokens", "100"], "needs one of its own"),
        (["--hicache-ratio", "0"], "leave disk out of --workloads"),
        (["--pressure-share", "0"], "--pressure-share"),
        (["--num-users", "0"], "--num-users"),
        (["--cost-tokens", "100"], "--cost-tokens"),
        (["--plot", "x.png", "--workloads", "ttft,costs"], "--plot: the picture is of workloads"),
        (["--max-total-tokens", "9999"], "--max-total-tokens: costs sizes its pools itself"),
        (["--workloads", "costs", "--max-mamba-cache-size", "99"], "--max-mamba-cache-size: costs sizes its pools"),
        (["--cost-requests", "9", "--max-running-requests", "8"], "--cost-requests 9: only 8 requests run together"),
        (["--workloads", "costs", "--cost-tokens", "1" + "0" * 12], "--cost-tokens 1000000000000: costs runs with"),
        (["--workloads", "branch", "--max-running-requests", "4"], "requests that come together; raise it"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["--workloads", "chat", "--num-turns", "99"], "do not fit the context of 512"),
        (["--workloads", "ttft", "--ttft-tokens", "512"], "no output fits behind it in a context of 512"),
    ],
)
def test_bad_flags(tiny: Path, capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit) as ended:
        prefix.main([*EXACT, *SIZES, "--model", str(tiny), *flags])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.out == ""


def test_a_text_of_a_few_words_is_refused(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def main():"}\n')
    with pytest.raises(SystemExit):
        prefix.main([*EXACT, *SIZES, "--model", str(tiny), "--prompts", str(file)])
    assert "are too few" in capsys.readouterr().err


def test_a_store_is_measured_in_place_of_a_disk(
    tmp_path: Path, tiny: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each engine has a key of its own; the one that measures a restart has that of the engine before it."""
    memory, key = StoreMemory(), tmp_path / "key"
    key.write_text("a key that all servers have")
    library = library_on(memory)
    monkeypatch.setattr(object_store, "import_module", lambda name: library)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        extra = {"master_server_address": f"127.0.0.1:{listener.getsockname()[1]}", "local_buffer_size": "32mb"}
        flags = ["--hicache-storage-backend", "mooncake", "--hicache-storage-key-file", str(key), "--rounds", "1"]
        flags += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
        found = [run(tmp_path, tiny, text_file, "--workloads", "disk", *flags)["disk"] for _ in range(2)]
    for disk in found:
        assert (disk["place"], disk["different_texts"], disk["lost_writes"]) == ("store", 0, 0)
        assert disk["cached_tokens"] == 96  # the restarted engine's too
        assert disk["written_bytes_per_token"] > 0  # nothing of another run was found, though its prompts are the same
        assert {name.removesuffix("_ratio") for name in disk if name.endswith("_ratio")} == {
            *("writing", "memory", "host", "store", "restart", "evict")
        }
    assert "from the store, after a restart" in capsys.readouterr().out


def test_swing_compares_splits_of_one_memory(
    tmp_path: Path, tiny: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--workloads", "swing", "--swing-tokens", "1200", "--swing-chats", "3", "--swing-documents", "2"]
    flags += ["--swing-document-tokens", "70", "--max-running-requests", "4", "--swing-rounds", "2"]
    swing = run(tmp_path, tiny, text_file, *flags)["swing"]
    assert swing["different_texts"] == 0
    assert [*swing["splits"]] == ["0.1", "0.3", "0.9", "2.7", "elastic"]
    slots = [figures["short"]["state_slots"] for name, figures in swing["splits"].items() if name != "elastic"]
    assert slots == sorted(slots)
    for half in ("short", "long"):
        fixed = [figures[half] for name, figures in swing["splits"].items() if name != "elastic"]
        assert swing[half]["best_fixed_hit_tokens"] == max(each["hit_tokens"] for each in fixed)
        assert {each["prompt_tokens"] for each in fixed} == {swing["splits"]["elastic"][half]["prompt_tokens"]}
        speed = swing[half]["speed_over_best"]
        assert 0 < speed["range"][0] <= speed["median"] <= speed["range"][1]
    assert "swing: the line between elastic pools moved" in capsys.readouterr().out


def test_swing_needs_documents_that_fit(tmp_path: Path, tiny: Path, text_file: Path) -> None:
    config = config_of("--model", str(tiny), "--swing-tokens", "400", "--max-running-requests", "4")
    with pytest.raises(ConfigError, match="--swing-document-tokens 1200: on one of the splits texts have"):
        measure_swing(config, read_source(text_file, Tokenizer(DEMO_MODEL)))
