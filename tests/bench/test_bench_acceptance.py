"""The acceptance benchmark: its figures follow their definitions, and a wrong text is reported."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba import LLM
from specmamba.bench import acceptance
from specmamba.bench.acceptance import join_lists
from specmamba.bench.demo import prompts as demo_prompts
from specmamba.cache.kv_pool import KVPool
from specmamba.config import DEMO_MODEL
from specmamba.core import Batch, DraftTree, RequestOutput, SpecStats, Verdict
from specmamba.draft.heads import MTPDrafter
from specmamba.errors import ConfigError
from specmamba.flags.command_line import parse_command_line
from specmamba.kernels.sampling import sample, uniform
from specmamba.measure.acceptance.figures import full_report
from specmamba.measure.acceptance.judge import (
    EXACT_BOUND,
    Judge,
    first_difference,
    greedy_shift,
    rounding_bound,
    sampled_shift,
)
from specmamba.measure.acceptance.options import AcceptanceBenchConfig, largest_flags, variants_of
from specmamba.measure.acceptance.run import Result, Sample, Task, measure, run_batch, select_tasks, start_engine
from specmamba.measure.prompts import (
    PromptText,
    bundled_texts,
    encode_prompt,
    encode_with_continuation,
    read_texts,
)
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.verify.acceptance import accept
from tests.exactness import run_directly
from tests.tiny import write_tiny_checkpoint

ALGORITHM = {"speculative_algorithm": "mtp"}
EXACT = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
SMALL = ["--rounds", "2", "--num-prompts", "2", "--max-tokens", "12", "--context-length", "256"]
FIELDS = {  # DESIGN, section 10
    *("model", "dtype", "device", "versions", "algorithm", "num_steps", "topk", "num_draft_tokens", "num_prompts"),
    *("output_tokens", "temperature", "replay", "distinct_4gram_ratio", "accept_length", "acceptance_per_position"),
    *("accept_length_histogram", "lossless", "plain_tokens_per_second", "speculative_tokens_per_second", "speedup"),
    *("draft_ms", "verify_ms", "commit_ms", "break_even_accept_length"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo's vocabulary, so that texts can be encoded."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0, vocab_size=4096)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


def run(tmp_path: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    """The JSON report of a small, exact run of the demo."""
    file = tmp_path / "report.json"
    assert acceptance.main([*EXACT, *SMALL, *flags, "--json", str(file)]) == status
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def config_of(*flags: str) -> AcceptanceBenchConfig:
    return parse_command_line(AcceptanceBenchConfig, "bench", join_lists([*EXACT, *SMALL, *flags]))


def shapes(*flags: str) -> list[tuple[int, int, int]]:
    return [(v.num_steps, v.topk, v.num_draft_tokens) for v in variants_of(config_of(*flags))[0]]


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that a call is refused with."""
    with pytest.raises(SystemExit) as ended:
        acceptance.main([*EXACT, *flags])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


# --- a whole run


def test_one_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(tmp_path, "--speculative-num-steps", "2")
    assert set(report) >= FIELDS | {"machine", "rounds", "speedup_range", "threads", "state", "accept"}
    assert report["prefix_cache"] is False
    assert (report["num_steps"], report["topk"], report["num_draft_tokens"]) == (2, 1, 3)
    assert (report["model"], report["dtype"], report["algorithm"]) == ("specmamba-demo", "float32", "mtp")
    assert report["accept"] == "auto"  # its requests bring seeds, so that both runs choose the same tokens
    assert report["temperature"] > 0
    assert report["lossless"] == {"identical": 2, "near_tie": 0, "diverged": 0}
    assert report["output_tokens"] == 2 * 2 * 12
    histogram = report["accept_length_histogram"]
    assert len(histogram) == 3
    steps = sum(histogram)
    assert sum((d + 1) * count for d, count in enumerate(histogram)) == 48  # one token of its own a step
    assert report["accept_length"] == pytest.approx(48 / steps, abs=1e-3)
    assert report["acceptance_per_position"] == [
        pytest.approx(share / steps, abs=1e-3) for share in (histogram[1] + histogram[2], histogram[2])
    ]
    low, high = report["speedup_range"]
    assert 0 < low <= report["speedup"] <= high
    step = report["draft_ms"] + report["verify_ms"] + report["commit_ms"]
    assert report["break_even_accept_length"] == pytest.approx(step / report["plain_step_ms"], rel=1e-3)
    out = capsys.readouterr().out
    assert "(2, 1, 3)" in out
    assert "2 same" in out
    assert "whole" in out
    assert "exactly  2" in out


@pytest.mark.slow
def test_several_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    report = run(tmp_path, "--configs", "1,1", "2,2,4", "--batch-size", "2", "--plot", str(picture))
    assert set(report) == {"configurations"}
    for figures, shape in zip(report["configurations"], [(1, 1, 2), (2, 2, 4)], strict=True):
        assert set(figures) >= FIELDS
        assert (figures["num_steps"], figures["topk"], figures["num_draft_tokens"]) == shape
        assert figures["lossless"] == {"identical": 2, "near_tie": 0, "diverged": 0}
        assert figures["batch_size"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "plain" in out
    assert "(1, 1, 2)" in out
    assert "(2, 2, 4)" in out


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature", "0", "--speculative-accept", "rejection"],
        ["--speculative-accept", "target"],
        ["--speculative-state", "snapshots"],
        ["--speculative-algorithm", "ngram", "--configs", "3,1", "2,2,4"],
    ],
)
def test_other_ways_to_draft_are_compared_too(tmp_path: Path, flags: list[str]) -> None:
    report = run(tmp_path, "--rounds", "1", *flags)
    for figures in report.get("configurations", [report]):
        assert figures["lossless"] == {"identical": 2, "near_tie": 0, "diverged": 0}


def test_a_tree_file(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"trees": [{"parents": [-1, 0, 0, 1], "ranks": [0, 0, 2, 1]}]}))
    report = run(tmp_path, "--rounds", "1", "--speculative-tree", str(file))
    assert (report["num_steps"], report["topk"], report["num_draft_tokens"]) == (2, 3, 4)
    assert report["tree"] == "tree.json"
    assert report["lossless"]["identical"] == 2


def test_a_tree_file_is_named_after_its_tree_for_full_batches(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    trees = [
        {"parents": [-1, 0, 1, 2], "ranks": [0, 0, 0, 0], "max_batch_size": 1},
        {"parents": [-1, 0, 0], "ranks": [0, 0, 1]},
    ]
    file.write_text(json.dumps({"trees": trees}))
    flags = "--speculative-tree", str(file)
    assert shapes(*flags) == [(3, 1, 4)]
    assert shapes(*flags, "--batch-size", "2") == [(1, 2, 3)]
    report = run(tmp_path, "--rounds", "1", "--num-prompts", "5", "--batch-size", "2", *flags)
    histogram = report["accept_length_histogram"]
    assert len(histogram) > 2  # the last prompt runs alone, with the deeper tree
    assert sum((accepted + 1) * count for accepted, count in enumerate(histogram)) == 60


def output(num_tokens: int, histogram: tuple[int, ...]) -> RequestOutput:
    accepted = sum(i * count for i, count in enumerate(histogram))
    spec = SpecStats(num_verify_steps=sum(histogram), num_accepted_tokens=accepted, accepted_histogram=histogram)
    return RequestOutput(
        prompt_token_ids=(1,),
        token_ids=tuple(range(num_tokens)),
        text="",
        finish_reason="length",
        num_cached_tokens=0,
        spec=spec,
    )


def test_speeds_are_of_full_batches_and_count_rare_steps() -> None:
    plain = [[Sample((output(6, (6,)), output(6, (6,))), ((0.0, 0.010, 0.0),) * 6, 1.0)]]
    slow_step = (0.004, 0.020, 0.012)  # one that folds
    drafts = [[Sample((output(6, (0, 3)), output(6, (2, 2))), ((0.004, 0.014, 0.002), slow_step), 0.5)]]
    config = config_of("--batch-size", "2", "--configs", "1,1")
    (variant,), _ = variants_of(config)
    result = Result((variant,), {"plain": plain, variant.name: drafts}, None, 1)
    report = full_report(config, {"model": "/some/where/tiny", "dtype": "", "device": "", **ALGORITHM}, [], result, [])
    (figures,) = report["configurations"]
    assert figures["model"] == "tiny"
    assert figures["accept_length"] == pytest.approx(12 / 7, abs=1e-4)
    assert [figures[name] for name in ("draft_ms", "verify_ms", "commit_ms")] == [4.0, 17.0, 7.0]
    assert figures["plain_tokens_per_second"] == 200.0
    assert figures["speculative_tokens_per_second"] == pytest.approx(2 * 12 / 7 / 0.028, abs=0.01)
    assert figures["speedup"] == pytest.approx(12 / 7 / 2.8, abs=1e-3)
    assert figures["break_even_accept_length"] == 2.8
    assert figures["end_to_end_speedup"] == 2.0


def test_only_steps_of_full_batches_are_timed(tiny: Path) -> None:
    config = config_of("--batch-size", "2", "--num-prompts", "3", "--ignore-eos", "--configs", "1,1")
    texts = [PromptText("a"), PromptText("b"), PromptText("c")]
    with LLM(model=str(tiny), num_threads=1, context_length=64, max_running_requests=2) as llm:
        tasks, _ = select_tasks(config, llm, texts)
        params = tasks[1].params.model_copy(update={"max_tokens": 5})
        llm.workbench.clock.is_on = True
        batch = [tasks[0], dataclasses.replace(tasks[1], params=params)]
        assert len(run_batch(config, llm, None, batch).steps) == 5
        assert llm.workbench.clock.rows == [2] * 5 + [1] * 7
        assert run_batch(config, llm, None, tasks[2:]).steps == ()
        with pytest.raises(ConfigError, match="--batch-size 3: there are only 2 prompts to run, which never fill"):
            select_tasks(config.model_copy(update={"batch_size": 3}), llm, texts[:2])
    with LLM(model=str(tiny), num_threads=1, context_length=64, max_running_requests=1) as llm:
        with pytest.raises(ConfigError, match="--batch-size 2: no step had so many requests"):
            measure(config, llm, tasks[:2], [])


def test_a_wrong_text_is_a_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts are compared so that every bug which changes the output shows."""

    def wrong(tree: DraftTree, logits: Tensor, batch: Batch, *args: Any, **settings: Any) -> Verdict:
        verdict = accept(tree, logits, batch, *args, **settings)
        if tree.shape.num_nodes == 1:
            return verdict  # plain
        bonus = logits[:, 0].argmin(-1)
        tokens = verdict.path_tokens.scatter(1, verdict.num_accepted[:, None], bonus[:, None])
        return dataclasses.replace(verdict, bonus=bonus, path_tokens=tokens)

    run_directly(monkeypatch)
    monkeypatch.setattr("specmamba.verify.step.accept", wrong)
    report = run(tmp_path, "--rounds", "1", status=1)
    assert report["lossless"] == {"identical": 0, "near_tie": 0, "diverged": 2}
    first = report["differences"][0]
    assert first["kind"] == "diverged"
    assert first["shift"] > first["bound"] == EXACT_BOUND
    out = capsys.readouterr().out
    assert "DIVERGED" in out
    assert f"prompt 1, token {first['position']}: plain has token {first['plain_token']}" in out


@pytest.mark.slow
def test_texts_in_16_bits_differ_by_near_ties_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dtype", "bfloat16", "--rounds", "1", "--num-prompts", "4", "--max-tokens", "24"]
    report = run(tmp_path, *flags)
    counts = report["lossless"]
    assert counts["identical"] + counts["near_tie"] == 4
    assert len(report["differences"]) == counts["near_tie"]
    assert all(tie["shift"] <= tie["bound"] < 1 for tie in report["differences"])
    assert ("near ties: logits that are off by" in capsys.readouterr().out) == bool(counts["near_tie"])


def test_sampled_texts_under_rejection_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(tmp_path, "--rounds", "1", "--speculative-accept", "rejection")
    assert report["lossless"] is None
    assert report["accept"] == "rejection"
    assert "not the same tokens" in capsys.readouterr().out


def test_text_that_loops_is_warned_about(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(tiny), "--rounds", "1"]
    assert run(tmp_path, *flags)["distinct_4gram_ratio"] == 1.0
    assert "loops" not in capsys.readouterr().out

    def always_seven(tree: DraftTree, logits: Tensor, *args: Any, **settings: Any) -> Verdict:
        logits[..., 7] = 1e4
        return accept(tree, logits, *args, **settings)

    run_directly(monkeypatch)
    monkeypatch.setattr("specmamba.verify.step.accept", always_seven)
    report = run(tmp_path, *flags, "--ignore-eos")
    assert report["distinct_4gram_ratio"] == pytest.approx(1 / 9, abs=1e-3)
    assert report["lossless"]["identical"] == 2
    assert "warning: text loops (0.11 distinct 4-grams), acceptance is flattered" in capsys.readouterr().out


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("probability", "accept_length"), [("0", 1), ("1", 4)])
def test_synthetic_acceptance(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], probability: str, accept_length: int
) -> None:
    flags = ["--model", str(tiny), "--synthetic-acceptance", probability, "--ignore-eos"]
    report = run(tmp_path, *flags, "--plot", str(tmp_path / "p.svg"))
    assert report["accept_length"] == accept_length
    assert report["acceptance_per_position"] == [float(probability)] * 3
    assert report["synthetic_acceptance"] == float(probability)
    assert report["lossless"] is None
    out = capsys.readouterr().out
    assert out.startswith(f"synthetic acceptance {probability}")
    assert "(synthetic)" in out
    assert "loops" not in out
    assert "<!-- acceptance length (synthetic) -->" in (tmp_path / "p.svg").read_text()


# --- replay


@pytest.mark.parametrize(("flags", "is_on"), [([], False), (["--no-disable-radix-cache"], True)])
def test_no_run_uses_prefixes_of_another_run(tiny: Path, flags: list[str], is_on: bool) -> None:
    config = config_of("--model", str(tiny), *flags)
    (variant,), _ = variants_of(config)
    with start_engine(config, largest_flags([variant])) as llm:
        tasks, _ = select_tasks(config, llm, bundled_texts()[1:2])
        samples = [run_batch(config, llm, variant, tasks) for _ in range(2)]
        llm.workbench.use_drafts(**variant.flags)
        again = llm.generate(tasks[0].prompt, tasks[0].params), llm.generate(tasks[0].prompt, tasks[0].params)
    assert [sample.outputs[0].num_cached_tokens for sample in samples] == [0, 0]
    assert (again[1][0].num_cached_tokens > 0) == is_on


def test_replay_counts_the_drafts_that_the_text_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with a direct count: every proposed chain against the text at its position."""
    drafted: list[tuple[int, list[int]]] = []
    propose = MTPDrafter.propose

    def recorded(self: MTPDrafter, batch: Batch) -> DraftTree:
        tree = propose(self, batch)
        drafted.append((int(batch.root_positions[0]), tree.tokens[0, 1:].tolist()))
        return tree

    config = config_of("--replay", "--max-tokens", "40", "--num-prompts", "1")
    variants, _ = variants_of(config)
    # a replay is not recorded
    direct: dict[str, Any] = {"num_threads": 1, "context_length": 256, "disable_cuda_graph": True}
    with LLM(dtype="float32", **direct, **variants[0].flags) as llm:
        (task,), _ = select_tasks(config, llm, bundled_texts())
        monkeypatch.setattr(MTPDrafter, "propose", recorded)
        llm.workbench.clock.is_on = True
        sample = run_batch(config, llm, variants[0], [task])
    (output,) = sample.outputs
    assert output.token_ids == task.replay
    assert len(task.replay) == 40
    text, counts = [*task.prompt, *task.replay], [0] * 4
    position = len(task.prompt) - 1
    for at, tokens in drafted:
        assert at == position
        agreed = first_difference(tokens, text[at + 1 : at + 4])
        accepted = min(3 if agreed is None else agreed, len(text) - at - 2)
        counts[accepted] += 1
        position += accepted + 1
    assert position == len(text) - 1
    assert list(output.spec.accepted_histogram) == counts
    assert len(sample.steps) == len(drafted) == sum(counts)


def test_replay_leaves_out_prompts_without_a_continuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "import os\n"}, {"prompt": "def f(x):\n", "continuation": "    return x + 1\n\n\ndef g(x):\n"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run(tmp_path, "--rounds", "1", "--replay", "--prompts", str(file), "--temperature", "0.5")
    assert report["replay"] is True
    assert report["num_prompts"] == 1
    assert report["temperature"] is report["lossless"] is None
    out = capsys.readouterr().out
    assert "skipped 1 prompts that have no continuation to replay (number 1)" in out
    assert "--temperature 0.5 has no effect" in out


def test_the_bundled_prompts_have_continuations(tokenizer: Tokenizer) -> None:
    texts = bundled_texts()
    assert len(texts) == 23  # one of the 24 occurs twice
    for text in texts:
        assert text.continuation is not None
        assert len(text.continuation) == 1024
        prompt, replay = encode_with_continuation(text, tokenizer)
        assert tokenizer.decode([*prompt, *replay]) == text.text + text.continuation
        assert len(prompt) >= len(tokenizer.encode(text.text)) - 2
        assert len(replay) > 128


def test_prompts_are_completed_from_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the program that made the bundled continuations, on the same files."""
    rows = [json.loads(line) for line in (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines()]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, name in enumerate(["sched.py", "uu.py", "shutil.py", "doctest.py"]):
        mine = [row for row in rows if row["source"] == name]
        text = "\n".join(f"# {n} {row['prompt']}{row['continuation']}" for n, row in enumerate(mine[:1]))
        (corpus / name).write_text(text + f"# {i}\n" * 50, "utf8")
    (corpus / "other.py").write_text("x = 1\n" * 100)
    wanted = [rows[0], *(next(row for row in rows if row["source"] == name) for name in ("sched.py", "shutil.py"))]
    bare, out = tmp_path / "bare.jsonl", tmp_path / "out.jsonl"
    bare.write_text("".join(json.dumps({"source": r["source"], "prompt": r["prompt"]}) + "\n" for r in wanted))
    assert demo_prompts.main(["--complete", str(bare), "--corpus", str(corpus), "--out", str(out)]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == wanted
    bare.write_text('{"source": "sched.py", "prompt": "not in there"}\n')
    with pytest.raises(SystemExit):
        demo_prompts.main(["--complete", str(bare), "--corpus", str(corpus)])
    assert "line 1: the prompt is not there in the held-out file sched.py" in capsys.readouterr().err


# --- is a difference rounding?


def test_first_difference_of_texts() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None


def test_greedy_shift() -> None:
    logits = torch.tensor([1.0, 5.0, 4.5, -2.0])
    assert greedy_shift(logits, 1) == 0
    assert greedy_shift(logits, 2) == 0.25
    assert greedy_shift(logits, 3) == 3.5


def test_the_bound_follows_the_type_and_the_size_of_logits() -> None:
    logits = torch.tensor([-20.0, 10.0, -math.inf])
    assert rounding_bound(logits, torch.bfloat16) == 2 * 2**-7 * 20
    assert rounding_bound(logits, torch.float16) == 2 * 2**-10 * 20
    assert rounding_bound(logits, torch.float32) == EXACT_BOUND


def test_sampled_shift_is_the_least_that_changes_the_token() -> None:
    """With a slightly larger error the sampler takes the other token, with a slightly smaller one it never does."""
    torch.manual_seed(1)
    logits, temperature = torch.randn(50) * 3, 0.7
    own = torch.tensor([temperature])

    def drawn(shifted: Tensor, u: float) -> int:
        args = shifted[None, None], own, None, None, None
        return int(sample(*args, torch.tensor([[u]])))

    for u in (0.03, 0.4, 0.77, 0.95):
        token = drawn(logits, u)
        assert sampled_shift(logits, temperature, u, token) == 0
        for other in (token - 1, token + 1):
            shift = sampled_shift(logits, temperature, u, other)
            assert shift > 0
            # moves F past u: the logits of all ids on one side up, all others down, or the reverse
            down = torch.arange(50) < token if other < token else torch.arange(50) <= token
            sign = torch.where(down, 1.0, -1.0) if other < token else torch.where(down, -1.0, 1.0)
            beyond, short = logits + sign * (shift + 1e-4), logits + sign * (shift - 1e-4)
            assert (drawn(beyond, u) <= other) if other < token else (drawn(beyond, u) >= other)
            assert drawn(short, u) == token


def test_sampled_shift_at_the_ends() -> None:
    logits = torch.tensor([0.0, 0.0, -2000.0, 0.0])
    assert sampled_shift(logits, 1.0, 0.0, 0) == 0
    assert sampled_shift(logits, 1.0, 1 - 2**-24, 3) == 0
    assert sampled_shift(logits, 1.0, 0.999, 0) > 3
    assert sampled_shift(logits, 1.0, 1 / 3, 1) == 0  # on the boundary: the sampler's own rounding decides
    assert sampled_shift(logits, 1.0, 1 / 3, 0) == 0
    assert sampled_shift(logits, 1.0, 0.5, 2) == pytest.approx(math.log(2) / 2, abs=1e-4)  # up to 2/3, where 2 would be


class FixedLogits:
    """A walk that shows the same logits at every position, and records its arguments."""

    def __init__(self, *logits: list[float]) -> None:
        self.logits = [torch.tensor(row) for row in logits]
        self.walked: list[tuple[list[int], list[int]]] = []

    def __call__(self, prompt: Sequence[int], tokens: Sequence[int], see: Callable[[Tensor], None]) -> None:
        self.walked.append((list(prompt), list(tokens)))
        for i in range(len(tokens)):
            see(self.logits[min(i, len(self.logits) - 1)])


def test_the_judge_in_greedy_text() -> None:
    walk = FixedLogits([16.0, 15.9, 14.0])
    judge = Judge(walk, torch.bfloat16, 0.0)
    assert judge.compare(3, [9, 9], 0, [1, 0, 2], [1, 0, 2]) is None
    assert walk.walked == []
    near = judge.compare(3, [9, 9], 0, [1, 0, 2], [1, 1, 0])
    assert near is not None
    assert (near.kind, near.prompt, near.first_position, near.position) == ("near_tie", 3, 1, 1)
    assert walk.walked == [([9, 9, 1], [1, 0])]
    far = judge.compare(3, [9, 9], 0, [1, 0, 0], [1, 2, 0])
    assert far is not None
    assert (far.kind, far.plain_token, far.speculative_token, far.shift, far.bound) == ("diverged", 0, 2, 1.0, 0.25)
    cut = judge.compare(3, [9, 9], 0, [1, 0, 2], [1, 0])
    assert cut is not None
    assert (cut.kind, cut.position, cut.plain_token, cut.speculative_token) == ("diverged", 2, 2, None)
    exact = Judge(walk, torch.float32, 0.0).compare(0, [9], 0, [0], [1])
    assert exact is not None
    assert (exact.kind, exact.bound) == ("diverged", EXACT_BOUND)


def test_the_judge_checks_both_tokens_at_the_first_difference() -> None:
    """A wrong plain run is a bug, too."""
    difference = Judge(FixedLogits([16.0, 0.0]), torch.bfloat16, 0.0).compare(0, [9], 0, [1], [0])
    assert difference is not None
    assert (difference.kind, difference.shift) == ("diverged", 8.0)


def test_the_judge_continues_behind_a_near_tie() -> None:
    """Later tokens are judged by the logits of plain decoding along the speculative text."""
    walk = FixedLogits([8.0, 7.95, 0.0], [0.0, 8.0, 0.0], [0.0, 0.0, 8.0])
    judge = Judge(walk, torch.bfloat16, 0.0)
    fine = judge.compare(0, [9], 0, [0, 0, 0, 0], [1, 1, 2])
    assert fine is not None
    assert (fine.kind, fine.position) == ("near_tie", 0)
    wrong = judge.compare(0, [9], 0, [0, 0, 0, 0], [1, 1, 0])
    assert wrong is not None
    assert (wrong.kind, wrong.first_position, wrong.position) == ("diverged", 0, 2)
    assert (wrong.plain_token, wrong.speculative_token, wrong.shift) == (2, 0, 4.0)


def test_the_judge_in_sampled_text() -> None:
    """The random number follows from (seed, position); the next token is a near tie only if its interval is near."""
    prompt, plain = [5, 6, 7], [0, 0]
    u = uniform(torch.tensor([42]), torch.tensor([4])).item()  # the second output token stands at position 4

    def judge(distance: float) -> Judge:
        cut = u + distance  # ids 0 and 1 meet here
        return Judge(FixedLogits([math.log(cut), math.log(1 - cut), -50.0]), torch.float32, 1.0)

    near = judge(1e-4).compare(0, prompt, 42, plain, [0, 1])
    far = judge(5e-2).compare(0, prompt, 42, plain, [0, 1])
    wrong_token = judge(1e-4).compare(0, prompt, 42, plain, [0, 2])
    wrong_seed = judge(1e-4).compare(0, prompt, 43, plain, [0, 1])
    assert [d and d.kind for d in (near, far, wrong_token, wrong_seed)] == ["near_tie", *["diverged"] * 3]


def test_a_walk_shows_the_logits_of_each_token(tiny: Path) -> None:
    with LLM(model=str(tiny), num_threads=1, context_length=64, speculative_algorithm="none") as llm:
        prompt, tokens = [3, 1, 4, 1, 5], [9, 2, 6]
        seen: list[Tensor] = []
        llm.workbench.logits_along(prompt, tokens, seen.append)
        expected: list[Tensor] = []
        for i, token in enumerate(tokens):
            llm.workbench.logits_along([*prompt, *tokens[:i]], [token], expected.append)
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_state_that_is_sometimes_wrong_is_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 nearly all texts differ. Here keys and values of accepted nodes are not moved to their positions."""
    flags = ["--dtype", "bfloat16", "--rounds", "1", "--num-prompts", "4", "--max-tokens", "48", "--configs", "3,4,8"]
    run_directly(monkeypatch)
    monkeypatch.setattr(KVPool, "move", lambda pool, source, target: None)
    assert run(tmp_path, *flags, status=1)["lossless"]["diverged"] >= 1


# --- which drafts


def test_sweeps() -> None:
    assert shapes("--sweep", "steps=1,3", "topk=1,2", "nodes=3,4") == [
        *[(1, 1, 2), (1, 2, 3)],  # (1, 2, 4) has no such tree
        *[(3, 1, 4), (3, 2, 3), (3, 2, 4)],
    ]
    assert shapes("--sweep=steps=1,2", "topk=1", "--rounds", "1") == [(1, 1, 2), (2, 1, 3)]
    assert shapes("--sweep", "topk=1,2", "--speculative-num-steps", "2") == [(2, 1, 3), (2, 2, 4)]
    _, notes = variants_of(config_of("--sweep", "steps=1", "topk=2", "nodes=3,4"))
    assert len(notes) == 1
    assert notes[0].startswith("skipped steps=1 topk=2 nodes=4: ")


def test_lists() -> None:
    assert shapes("--configs", "1,1", "4,4,8", "1,1", "5,8,16") == [(1, 1, 2), (4, 4, 8), (5, 8, 16)]
    assert shapes("--configs=2,1", "3,1") == [(2, 1, 3), (3, 1, 4)]
    assert shapes() == [(3, 1, 4)]
    assert shapes("--speculative-eagle-topk", "2") == [(3, 2, 6)]


@pytest.mark.parametrize("configs", [["7,1", "2,8,9"], ["3,2,11", "5,8,16", "12,1"], ["1,1"]])
def test_the_engine_has_room_for_all_variants(tiny: Path, configs: list[str]) -> None:
    variants, _ = variants_of(config_of("--configs", *configs))
    with LLM(model=str(tiny), num_threads=1, context_length=64, **largest_flags(variants)) as llm:
        for variant in variants:
            llm.workbench.use_drafts(**variant.flags)  # raises if it does not fit
            assert llm.engine.describe()["speculative_num_draft_tokens"] == variant.num_draft_tokens


def test_flags_of_the_environment_do_not_reach_the_plain_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECMAMBA_SPECULATIVE_NUM_STEPS", "2")
    assert run(tmp_path, "--model", str(tiny), "--rounds", "1")["num_draft_tokens"] == 3


# --- prompts


def test_chat_datasets(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "What is 2 + 2?"},
        {"from": "gpt", "value": "4"},
        {"from": "human", "value": "Why?"},
    ]
    talks: list[dict[str, Any]] = [
        {"id": "a", "conversations": turns},
        {"conversations": [{"from": "gpt", "value": "Hello"}]},
        {"conversations": []},
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "user", "value": "?"}]},
    ]
    wanted = [PromptText("What is 2 + 2?", "4", is_chat=True), PromptText("Hi", None, is_chat=True)]
    whole, lines = tmp_path / "whole.json", tmp_path / "lines.jsonl"
    whole.write_text(json.dumps(talks, indent=1))
    lines.write_text("\n\n".join(map(json.dumps, talks)) + "\n")
    assert read_texts(whole) == read_texts(lines) == wanted
    chat = tokenizer.encode("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think></think>\n")
    assert encode_prompt(wanted[0], tokenizer) == chat
    assert encode_with_continuation(wanted[0], tokenizer) == (chat, tokenizer.encode("4"))


class ChatTokenizer:
    """Characters as tokens, a begin-of-text token on plain texts, and a chat template with markers."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        (message,) = messages
        assert message["role"] == "user"
        return [1, 2, *map(ord, message["content"]), 3]


def test_a_continuation_behind_a_chat_template() -> None:
    text = PromptText("ab", "cd", is_chat=True)
    assert encode_with_continuation(text, ChatTokenizer()) == ([1, 2, 97, 98, 3], [99, 100])
    plain = dataclasses.replace(text, is_chat=False)
    assert encode_with_continuation(plain, ChatTokenizer()) == ([1, 97, 98], [99, 100])
    assert encode_prompt(text, ChatTokenizer()) == [1, 2, 97, 98, 3]


def test_a_token_across_the_border_belongs_to_the_continuation(tokenizer: Tokenizer) -> None:
    text = PromptText("import o", "s\nimport sys\n")
    prompt, replay = encode_with_continuation(text, tokenizer)
    assert [*prompt, *replay] == tokenizer.encode("import os\nimport sys\n")
    assert prompt == tokenizer.encode("import os\n")[: len(prompt)]
    assert tokenizer.decode(prompt) == "import"


def test_prompts_that_do_not_fit_are_left_out(tiny: Path) -> None:
    config = config_of("--context-length", "8", "--speculative-num-steps", "1")
    texts = [PromptText("x" * 100), PromptText("a b"), PromptText("x = " * 30), PromptText("c"), PromptText("d")]
    with LLM(model=str(tiny), num_threads=1, context_length=8) as llm:
        tasks, notes = select_tasks(config, llm, texts)
        assert [task.number for task in tasks] == [1, 3]
        assert notes == ["skipped 2 prompts that do not fit the context of 8 tokens (number 1, 3)"]
        with pytest.raises(ConfigError, match="no prompt can be run: skipped 2 prompts that do not fit"):
            select_tasks(config, llm, [texts[0], texts[2]])


def test_seeds_depend_on_prompt_and_flag(tiny: Path) -> None:
    def seeds(*flags: str) -> list[int]:
        tasks: list[Task] = select_tasks(config_of(*flags), llm, [PromptText("a"), PromptText("b")])[0]
        return [task.seed for task in tasks]

    with LLM(model=str(tiny), num_threads=1, context_length=64) as llm:
        assert seeds() == seeds()
        assert len({*seeds(), *seeds("--seed", "1")}) == 4
        assert all(0 <= seed < 2**63 for seed in seeds("--seed", str(2**63 - 1)))


# --- bad input


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read"),
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"prompt": "a"}\n{"prompt": }\n', "line 2: not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2: not of the form"),
        ('{"prompt": ""}\n', 'line 1: "prompt" is not a text'),
        ('{"prompt": "a", "continuation": 3}\n', 'line 1: "continuation" is not a text'),
        ('{"prompt": "\\ud800"}\n', "line 1"),
        ('[{"conversations": []}]', "no conversation with a human turn"),
        ('[{"conversations": [{"from": "human", "value": "a"}]}, 7]', "entry 2: not of the form"),
        ('{"conversations": [{"from": "human"}]}', "line 1"),
        ('{"conversations": [{"from": "human", "value": 7}]}', "line 1"),
        ("[1, 2", "not JSON"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    if text is not None:
        file.write_text(text)
    line = refused(capsys, "--prompts", str(file))
    assert str(file) in line
    assert complaint in line


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--speculative-algorithm", "none"], "nothing to compare"),
        (["--configs", "1,1", "--sweep", "steps=1"], "drop one"),
        (["--configs"], "there is none"),
        (["--configs", "1,1", "2"], "'2' is not steps,topk"),
        (["--configs", "1,4,9"], "--configs 1,4,9: 1 steps of top 4 give 5 nodes"),
        (["--configs", "3,1", "--speculative-num-steps", "3"], "drop --speculative-num-steps"),
        (["--sweep"], "there is no axis"),
        (["--sweep", "depth=3"], "'depth=3' is not one of"),
        (["--sweep", "steps=1,x"], "no list of numbers"),
        (["--sweep", "steps=1", "steps=2"], "steps is given twice"),
        (["--sweep", "steps=1", "topk=2", "nodes=9"], "no combination is possible"),
        (["--sweep", "steps=1", "--speculative-num-steps", "3"], "drop --speculative-num-steps"),
        (["--batch-size", "17"], "raise --max-running-requests"),
        (["--replay", "--synthetic-acceptance", "0.5"], "drop one"),
        (["--synthetic-acceptance", "1.5"], "--synthetic-acceptance"),
        (["--adaptive", "--speculative-tree", "tree.json"], "no size is decided with --speculative-tree"),
        (["--adaptive", "--synthetic-acceptance", "0.5"], "drop one"),
        (["--speculative-adaptive", "auto"], "give --adaptive instead"),
        (["--adaptive", "--speculative-algorithm", "none"], "nothing to compare"),
        (["--rounds", "0"], "--rounds"),
        (["--speculative-tree", "/nowhere/tree.json"], "cannot be read"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str) -> None:
    assert complaint in refused(capsys, *flags)


def test_replay_needs_continuations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n')
    assert 'no prompt has a "continuation"' in refused(capsys, "--prompts", str(file), "--replay")


@pytest.mark.parametrize("algorithm", ["auto", "mtp"])
def test_a_checkpoint_without_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str) -> None:
    bare = write_tiny_checkpoint(tmp_path / "bare", seed=0, vocab_size=4096, with_mtp=False)
    line = refused(capsys, "--model", str(bare), "--speculative-algorithm", algorithm)
    assert line.endswith(
        "this checkpoint has no MTP head: give a draft with --speculative-draft-model-path, or choose "
        "--speculative-algorithm suffix"
    )
