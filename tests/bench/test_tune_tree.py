"""Tuning of draft trees: the search against brute force, the walk against the engine, the fits, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from specmamba import LLM, SamplingParams
from specmamba.errors import ConfigError
from specmamba.measure.full_batch import Job, Stretch, accept_length, run_full_batch
from specmamba.measure.prompts import PromptText
from specmamba.trees import StaticTree, TreeFile, read_tree_file
from specmamba.tune import texts as tree_texts
from specmamba.tune import tree as tune_tree
from specmamba.tune.costs import (
    BatchCost,
    KindCost,
    Sample,
    StepCost,
    fit,
    is_chain,
    level_widths,
    monotone,
    probe_trees,
    round_factors,
    tree_of_paths,
)
from specmamba.tune.options import TreeTunerConfig
from specmamba.tune.search import (
    ROOT,
    Acceptance,
    Candidate,
    Ranks,
    accepted_depths,
    best_trees,
    candidates,
    choose,
    tree_file,
    walk,
)
from specmamba.tune.tables import plot_report, print_report
from specmamba.tune.texts import Text, check_jobs, probe_jobs, record_ranks, sampling_params
from tests.tiny import write_tiny_checkpoint

Paths = frozenset[tuple[int, ...]]
SMALL = ["--device", "cpu", "--num-threads", "1", "--context-length", "512", "--max-running-requests", "2"]


def paths_of(tree: StaticTree) -> Paths:
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        paths.append((*paths[parent], rank))
    return frozenset(paths[1:])


@cache
def all_trees(num_nodes: int, max_depth: int, num_ranks: int) -> frozenset[Paths]:
    """Every tree with this number of nodes, the root counted, made node by node."""
    if num_nodes == 1:
        return frozenset([frozenset()])
    grown = set()
    for tree in all_trees(num_nodes - 1, max_depth, num_ranks):
        for path in [(), *tree]:
            places = [(*path, rank) for rank in range(num_ranks)] if len(path) < max_depth else []
            grown |= {tree | {place} for place in places if place not in tree}
    return frozenset(grown)


def expected_accepted(tree: Paths, odds: np.ndarray[Any, Any]) -> float:
    return sum(float(np.prod([odds[depth, rank] for depth, rank in enumerate(path)])) for path in tree)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(("depth", "num_ranks"), [(1, 3), (2, 2), (3, 3), (3, 1)])
def test_the_dynamic_program_finds_what_brute_force_finds(depth: int, num_ranks: int, is_sorted: bool) -> None:
    random = np.random.default_rng(depth * 10 + num_ranks)
    for _ in range(3):
        odds = random.dirichlet([0.7] * (num_ranks + 1), depth)[:, :num_ranks]
        odds = -np.sort(-odds, 1) if is_sorted else odds
        found = best_trees(odds, 6)
        for nodes in range(1, 7):
            trees = all_trees(nodes, depth, num_ranks)
            assert (nodes in found) == bool(trees)
            if trees:
                assert found[nodes].num_nodes == nodes
                assert paths_of(found[nodes]) in trees
                best = max(expected_accepted(tree, odds) for tree in trees)
                assert expected_accepted(paths_of(found[nodes]), odds) == pytest.approx(best, abs=1e-12)


def test_the_dynamic_program_at_its_limits() -> None:
    assert best_trees(np.zeros((2, 2)), 7)[7].num_nodes == 7  # all trees that exist, though none has any value
    assert set(best_trees(np.full((2, 2), 0.5), 64)) == set(range(1, 8))
    deep = best_trees(np.full((16, 64), 1 / 64), 64)
    assert max(max(tree.ranks) for tree in deep.values()) <= 63
    assert deep[64].num_nodes == 64


def accepted_one_by_one(tree: Paths, ranks: list[int]) -> int:
    depth = 0
    while depth < len(ranks) and tuple(ranks[: depth + 1]) in tree:
        depth += 1
    return depth


def test_accepted_depths_are_those_of_a_search_node_by_node() -> None:
    random = np.random.default_rng(3)
    ranks = random.integers(-1, 4, (200, 4))
    for tree in [tree_of_paths(sorted(paths)) for paths in sorted(all_trees(5, 3, 3), key=sorted)[::9]]:
        wanted = [accepted_one_by_one(paths_of(tree), row) for row in ranks.tolist()]
        assert accepted_depths(tree, ranks).tolist() == wanted
    assert accepted_depths(ROOT, ranks).tolist() == [0] * 200


def test_acceptance_counts_what_was_recorded() -> None:
    acceptance = Acceptance.of([np.array([[0, 1], [2, -1]]), np.array([[0, -1]])], 2)
    assert acceptance.counts.tolist() == [[2, 0], [0, 1]]
    assert acceptance.num_samples.tolist() == [3, 1]
    assert acceptance.odds.tolist() == [[2 / 3, 0], [0, 1]]


TREES = [
    StaticTree(parents=(-1, 0, 1, 2), ranks=(0, 0, 0, 0)),
    StaticTree(parents=(-1, 0, 0, 0, 1, 1, 2, 4), ranks=(0, 0, 1, 2, 0, 1, 0, 0)),
    StaticTree(parents=(-1, 0, 1), ranks=(0, 2, 1)),
    ROOT,
]


@pytest.fixture(scope="module", params=["demo", "tiny"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = None
    if request.param == "tiny":
        model = str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=5))
    flags: dict[str, Any] = {"speculative_algorithm": "mtp", "speculative_num_steps": 7, "context_length": 256}
    with LLM(model=model, dtype="float32", device="cpu", num_threads=1, max_running_requests=2, **flags) as llm:
        yield llm


@pytest.mark.slow
def test_a_walk_along_recorded_ranks_equals_the_engines_steps(llm: LLM, tmp_path: Path) -> None:
    prompts = [[5, 90, 17, 33], [101, 7], [64, 64, 3, 99, 12, 8, 8]]
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=11, ignore_eos=True)
    llm.workbench.use_drafts(speculative_algorithm="none")
    texts = [Text(output.prompt_token_ids, output.token_ids, 20) for output in llm.generate(prompts, params)]
    ranks = record_ranks(llm, texts, 4, batch_size=2)
    assert [rows.shape for rows in ranks] == [(20, 4)] * 3
    for rows in ranks:  # a token has one place in the text, from wherever one looks ahead
        assert (rows >= 0).sum(0).tolist() == [20, 19, 18, 17]
        assert (rows[:-3] >= 0).all()
    file = tmp_path / "tree.json"
    for tree in TREES:
        file.write_text(TreeFile(trees=(tree,)).model_dump_json())
        llm.workbench.use_drafts(speculative_algorithm="mtp", speculative_tree=file)
        outputs = llm.generate([t.prompt for t in texts], params, replay=[t.tokens for t in texts])
        for rows, output in zip(ranks, outputs, strict=True):
            walked = walk(tree, [rows])
            assert output.spec.num_verify_steps == walked.num_steps
            assert output.spec.num_accepted_tokens == walked.num_accepted
            measured = output.spec.accepted_histogram
            assert measured[: len(walked.histogram)] == walked.histogram
            assert not any(measured[len(walked.histogram) :])
        together = walk(tree, ranks)
        steps = sum(output.spec.num_verify_steps for output in outputs)
        assert together.accept_length == pytest.approx(60 / steps)
        assert together == walk(tree, ranks[:1]) + walk(tree, ranks[1:])


def test_requests_of_probes_and_checks() -> None:
    texts = [Text((1, 2), tuple(range(10, 30)), 20), Text((3,), tuple(range(40, 60)), 20)]
    for replay in (False, True):
        config = TreeTunerConfig(max_tokens=20, replay=replay, seed=7)
        probes = probe_jobs(config, texts, 3, 1)  # the second round: requests 3, 4 and 5
        assert [job.prompt[0] for job in probes] == [3, 1, 3]
        assert probes[1] == Job((1, 2, *range(10, 15)), probes[0].params, tuple(range(15, 25)))
        assert probes[0].params.max_tokens == 10
        checks = check_jobs(config, texts, 3, 1)
        assert [job.prompt for job in checks] == [(3,), (1, 2), (3,)]
        assert [job.replay for job in checks] == [text.tokens if replay else () for text in (*texts[1:], *texts)]
        assert {job.params.max_tokens for job in checks} == {20}
        recorded = {sampling_params(config, number).seed for number in range(len(texts))}
        assert len({job.params.seed for job in checks} | recorded) == 5


def test_a_full_batch_is_timed_without_prompts_and_stragglers(llm: LLM) -> None:
    llm.workbench.use_drafts(speculative_algorithm="none")
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    short = params.model_copy(update={"max_tokens": 6})
    stretch = run_full_batch(llm, [Job((5, 9), params), Job((7,), short)], clock=True)
    assert (stretch.batch_size, stretch.num_steps, stretch.num_tokens) == (2, 5, 10)
    assert stretch.tokens == (5, 5)
    assert accept_length([stretch]) == 1.0
    assert 0 < stretch.verify_ms < stretch.step_ms
    assert stretch.seconds > 0
    assert not llm.engine.has_unfinished_requests
    one = params.model_copy(update={"max_tokens": 1})
    with pytest.raises(ConfigError, match="--max-tokens is too small"):
        run_full_batch(llm, [Job((5, 9), params), Job((7,), one)])
    assert not llm.engine.has_unfinished_requests


def test_requests_have_the_same_weight_in_the_accept_length() -> None:
    """As in a walk: one text of 40 tokens takes 10 steps with 4 tokens each, another one 40 steps."""
    both = Stretch(batch_size=2, num_steps=20, tokens=(80, 20), seconds=0.5, draft_ms=0.0, verify_ms=0.0)
    assert accept_length([both]) == pytest.approx(80 / 50)
    alone = [dataclasses.replace(both, batch_size=1, tokens=(tokens,)) for tokens in both.tokens]
    assert accept_length(alone) == accept_length([both])
    assert (both.num_tokens, both.step_ms) == (100, 25.0)


@pytest.mark.fast_cases("tiny")
def test_sampled_texts_are_recorded_up_to_their_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TreeTunerConfig(max_tokens=16, num_prompts=2, max_nodes=4)
    prompts = [PromptText("def f"), PromptText("class A")]
    monkeypatch.setattr(tree_texts, "encode_prompt", lambda source, _: [5, 9, len(source.text)])
    whole = tree_texts.collect_texts(config, llm, prompts)
    model = dataclasses.replace(llm.engine.model, eos_token_ids=(whole[0].tokens[3],))
    monkeypatch.setattr(llm.engine, "model", model)
    cut = tree_texts.collect_texts(config, llm, prompts)
    assert [text.tokens for text in cut] == [text.tokens for text in whole]
    assert cut[0].length == whole[0].tokens.index(whole[0].tokens[3]) + 1
    assert cut[0].recorded == whole[0].tokens[: cut[0].length]
    assert tree_texts.dropped_share(cut) == 1 - (cut[0].length + cut[1].length) / 32
    assert [len(rows) for rows in record_ranks(llm, cut, 2, batch_size=2)] == [text.length for text in cut]


def test_probes_are_of_every_size_and_shape() -> None:
    for max_nodes, max_depth in itertools.product((2, 3, 4, 7, 16, 33, 64), (1, 2, 5, 16)):
        trees = probe_trees(max_nodes, min(max_depth, max_nodes - 1))
        assert trees[0] == ROOT
        assert len(set(trees)) == len(trees)
        assert max(tree.num_nodes for tree in trees) == max_nodes
        assert max(max(tree.depths) for tree in trees) == min(max_depth, max_nodes - 1)
        assert all(not is_chain(tree) for tree in trees if tree.num_nodes > max_depth + 1)
        assert any(not is_chain(tree) for tree in trees) == (max_nodes > 2)
        if max_depth > 1:  # as many nodes with children below the root as there can be
            widest = max((max(level_widths(tree), default=0) for tree in trees), default=0)
            assert widest == max((max_nodes - 1) // 2, int(max_nodes > 2))


def invented_costs(tree: StaticTree) -> tuple[float, float, float]:
    """Draft, verify and overhead of an invented machine, neither linear nor concave."""
    draft = 1.5 if is_chain(tree) else 1.9
    draft += sum({1: 0.8, 2: 0.9, 3: 1.5}.get(width, 0.5 * width) for width in level_widths(tree))
    nodes = tree.num_nodes
    verify = 4.0 + (0.1 * nodes if nodes < 7 else 0.4 * nodes) + (0 if is_chain(tree) else 0.3)
    return (0.1 if nodes == 1 else draft), verify, 0.2 if is_chain(tree) else 0.5


def invented_samples(max_nodes: int, max_depth: int) -> list[Sample]:
    samples = []
    for tree in probe_trees(max_nodes, max_depth):
        draft, verify, overhead = invented_costs(tree)
        samples.append(Sample(tree, draft, verify, draft + verify + overhead))
    return samples


@pytest.mark.parametrize(("max_nodes", "max_depth"), [(2, 1), (3, 2), (5, 1), (16, 5), (12, 2)])
def test_costs_that_follow_the_model_are_found_again(max_nodes: int, max_depth: int) -> None:
    cost = fit(invented_samples(max_nodes, max_depth))
    for sample in invented_samples(max_nodes, max_depth):
        assert cost.step(sample.tree).total == pytest.approx(sample.step)
        assert cost.step(sample.tree).draft == pytest.approx(sample.draft)
    if max_nodes == 16:  # sizes that were not measured
        tree = StaticTree(parents=(-1, 0, 0, 0, 1, 1, 2, 4), ranks=(0, 0, 1, 2, 0, 1, 0, 0))
        assert level_widths(tree) == (2, 1)
        assert cost.step(tree).total == pytest.approx(sum(invented_costs(tree)))


def test_a_monotone_curve_pools_falling_values() -> None:
    assert monotone({3: [5.0], 1: [1.0, 3.0], 2: [6.0], 4: [9.0]}) == ((1, 2.0), (2, 5.5), (3, 5.5), (4, 9.0))
    assert monotone({1: [3.0], 2: [2.0], 3: [1.0]}) == ((1, 2.0), (2, 2.0), (3, 2.0))
    assert monotone({1: [4.0, 4.0, 4.0], 2: [0.0]}) == ((1, 3.0), (2, 3.0))


def test_slow_rounds_are_found_out() -> None:
    costs, slowness = np.array([1.0, 2.0, 5.0, 9.0, 3.0]), np.array([1.0, 3.0, 0.5])
    times = slowness[:, None] * costs
    times[1, 2] *= 10  # a single slow step does not count
    assert round_factors(times) == pytest.approx(slowness)


def made_up_ranks(num_texts: int, seed: int) -> list[Ranks]:
    random = np.random.default_rng(seed)
    ranks = random.choice(4, (num_texts, 60, 3), p=[0.6, 0.2, 0.1, 0.1])
    return list(ranks)


def test_candidates_are_judged_on_text_they_were_not_searched_on() -> None:
    texts = made_up_ranks(2, seed=1)
    options = candidates(texts, max_nodes=5, max_depth=3, max_rank=3)
    assert options[0] == Candidate(ROOT, 1.0, 1.0)
    sizes = [option.tree.num_nodes for option in options]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 5
    assert any(is_chain(option.tree) for option in options if option.tree.num_nodes == 4)
    by_tree = {option.tree: option for option in options}
    assert len(by_tree) == len(options)
    halves = [best_trees(Acceptance.of([text], 3).odds[:3, :3], 5)[5] for text in texts]
    whole = best_trees(Acceptance.of(texts, 3).odds, 5)[5]
    expected = walk(halves[0], texts[1:]) + walk(halves[1], texts[:1])
    assert by_tree[whole].accept_length == expected.accept_length
    assert by_tree[whole].accept_length_seen == walk(whole, texts).accept_length


def flat_cost(verify: float, level: float) -> BatchCost:
    kind = KindCost(((1, verify), (16, verify)), 1.0, 0.0)
    return BatchCost(StepCost(0.0, 4.0, 0.0), kind, kind, ((1, level), (8, level)))


def test_the_choice_follows_the_costs() -> None:
    options = candidates(made_up_ranks(4, seed=2), max_nodes=8, max_depth=3, max_rank=3)
    free = choose(2, options, flat_cost(verify=4.0, level=0.0))
    assert free.candidate.accept_length == max(option.accept_length for option in options)
    shallow = choose(2, options, flat_cost(verify=4.0, level=50.0))
    assert max(shallow.tree.depths) == 1
    none = choose(2, options, flat_cost(verify=40.0, level=0.0))
    assert none.tree == ROOT
    assert none.speedup == 1.0
    assert none.tokens_per_second == 2 / 4.0 * 1e3
    assert free.tokens_per_second == max(free.speeds.values())
    rate = free.candidate.accept_length / 5.0
    assert free.speedup == pytest.approx(rate * 4.0)
    assert free.tokens_per_second == pytest.approx(2 * rate * 1e3)


def test_of_equals_the_smallest_tree_is_chosen() -> None:
    chain = StaticTree(parents=(-1, 0), ranks=(0, 0))
    options = [Candidate(ROOT, 1.0, 1.0), Candidate(chain, 1.25, 1.25)]
    assert choose(1, options, flat_cost(verify=4.0, level=0.0)).tree == ROOT  # 1.25 tokens in 5 ms, 1 in 4 ms


def test_the_file_switches_by_batch_size(tmp_path: Path) -> None:
    options = candidates(made_up_ranks(4, seed=3), max_nodes=6, max_depth=3, max_rank=3)
    costs = {1: flat_cost(4.0, 0.0), 2: flat_cost(4.0, 0.0), 4: flat_cost(4.0, 50.0), 8: flat_cost(40.0, 0.0)}
    choices = [choose(size, options, cost) for size, cost in costs.items()]
    file = tree_file(choices, "from a test")
    assert [tree.max_batch_size for tree in file.trees] == [2, 4, None]
    path = tmp_path / "trees.json"
    path.write_text(file.model_dump_json(exclude_none=True))
    again = read_tree_file(path)
    assert again == file
    for choice in choices:
        assert paths_of(again.for_batch(choice.batch_size)) == paths_of(choice.tree)
    assert again.for_batch(100).num_nodes == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report_file, picture = tmp_path / "tree.json", tmp_path / "report.json", tmp_path / "picture.png"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n{"prompt": "class A:\\n    "}\n')
    sizes = ["--batch-sizes", "2,1", "--max-nodes", "5", "--max-depth", "2", "--max-rank", "3", "--rounds", "1"]
    texts = ["--num-prompts", "2", "--max-tokens", "16", "--dtype", "float32"]
    files = ["--prompts", str(prompts), "--out", str(out), "--json", str(report_file), "--plot", str(picture)]
    assert tune_tree.main([*SMALL, *sizes, *texts, *files]) == 0
    file, report = read_tree_file(out), json.loads(report_file.read_text())
    assert file.max_nodes <= 5
    assert "specmamba-demo, float32 on cpu" in file.note
    assert "seed 0, records, page size" in file.note
    assert (report["seed"], report["speculative_state"], report["page_size"] > 0) == (0, "records", True)
    assert (report["tree_file"], report["prompts"]) == ("tree.json", "prompts.jsonl")
    assert report["prefix_cache"] is False
    assert report["check_text"] == "text that was not recorded"
    assert np.array(report["acceptance"]["probability"]).shape == (2, 3)
    assert report["acceptance"]["num_samples"] == [32, 30]
    assert [result["batch_size"] for result in report["results"]] == [1, 2]
    for result in report["results"]:
        tree = StaticTree(parents=result["parents"], ranks=result["ranks"])
        assert paths_of(file.for_batch(result["batch_size"])) == paths_of(tree)
        predicted, measured = result["predicted"], result["measured"]
        parts = predicted["draft_ms"] + predicted["verify_ms"] + predicted["overhead_ms"]
        assert predicted["step_ms"] == pytest.approx(parts)
        speed = result["batch_size"] * predicted["accept_length"] / parts * 1e3
        assert predicted["tokens_per_second"] == pytest.approx(speed)
        assert measured["wall_tokens_per_second"] > 0
        speed = result["batch_size"] * measured["accept_length"] / measured["step_ms"] * 1e3
        assert measured["tokens_per_second"] == pytest.approx(speed)
        off = 100 * (predicted["tokens_per_second"] / measured["tokens_per_second"] - 1)
        assert result["deviation_percent"] == pytest.approx(off)
        assert result["contestants"]["plain"]["accept_length"] == result["contestants"]["plain"]["speedup"] == 1.0
        assert set(result["contestants"]) == {"plain"}
    printed = capsys.readouterr()
    assert "predicted -> measured" in printed.out
    assert "draft of a chain" in printed.out
    assert report["sizing"] is None
    assert list(report["costs"]["2"]["chain_draft_ms"]) == ["0", "1", "2"]
    assert "measured in turns" not in printed.out
    assert "batch size 2" in printed.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    report["results"][0]["machine_drift"] = 1.5
    report["costs"]["2"]["cost_model"]["median_error_percent"] = 30.0
    report["distinct_4gram_ratio"] = 0.2
    report["results"][1]["contestants"]["dynamic 3,1,4"] = report["results"][1]["measured"] | {"speedup": 1e3}
    print_report(report)
    remarks = capsys.readouterr().out
    assert "warning: batch size 1: a plain step took 1.5x as long" in remarks
    assert "warning: batch size 2: the costs do not fit together, by 30 %" in remarks
    assert "warning: text loops (0.20 distinct 4-grams)" in remarks
    assert "batch size 2: dynamic 3,1,4 was" in remarks
    with pytest.raises(ConfigError, match="--plot"):
        plot_report(tmp_path / "no" / "folder.png", report)
    with LLM(dtype="float32", speculative_tree=out, context_length=128, max_running_requests=2, num_threads=1) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        assert [len(output.token_ids) for output in llm.generate(["def f", "class A"], params)] == [8, 8]


@pytest.mark.slow
def test_replayed_texts_and_dynamic_drafts_beside_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [
        PromptText(
            "def area(width, height):\n", "    return width * height\n\n\ndef side(area):\n    return area**0.5\n"
        ),
        PromptText("too short:", "\n"),
        PromptText("class Stack:\n", "    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"),
    ]
    monkeypatch.setattr("specmamba.measure.prompts.bundled_texts", lambda: sources)
    monkeypatch.chdir(tmp_path)
    flags = ["--replay", "--max-tokens", "16", "--batch-sizes", "1", "--max-nodes", "3", "--rounds", "1"]
    assert tune_tree.main([*SMALL, *flags, "--compare", "--dtype", "float32", "--json", "report.json"]) == 0
    report = json.loads(Path("report.json").read_text())
    assert (report["num_prompts"], report["temperature"]) == (2, None)
    assert (report["check_text"], report["dropped_share"]) == ("the recorded text", 0.0)
    assert Path("tree.json").exists()
    (result,) = report["results"]
    shapes = "1,1,2", "2,1,3", "3,1,4", "4,4,8", "5,8,16"
    assert set(result["contestants"]) == {"plain", *(f"dynamic {shape}" for shape in shapes)}
    printed = capsys.readouterr().out
    assert "replayed text" in printed
    assert all(f"dynamic {shape}" in printed for shape in shapes)
    monkeypatch.setattr("specmamba.measure.prompts.bundled_texts", lambda: sources[1:])
    with pytest.raises(SystemExit) as ended:
        tune_tree.main([*SMALL, *flags])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--speculative-accept", "rejection"], "the target rule only"),
        (["--speculative-algorithm", "ngram"], "only the trees of a draft head"),
        (["--speculative-algorithm", "none"], "only the trees of a draft head"),
        (["--speculative-num-steps", "4"], "drop --speculative-num-steps"),
        (["--speculative-tree", "tree.json"], "drop --speculative-tree"),
        (["--speculative-adaptive", "auto"], "--speculative-costs FILE measures what it starts from"),
        (["--speculative-costs", "."], "--speculative-costs: . cannot be read: Is a directory"),
        (["--batch-sizes", "1,32"], "raise --max-running-requests"),
        (["--batch-sizes", "0"], "--batch-sizes"),
        (["--batch-sizes", "1,two"], "--batch-sizes"),
        (["--max-nodes", "1"], "--max-nodes"),
        (["--max-nodes", "65"], "--max-nodes"),
        (["--num-prompts", "1"], "--num-prompts"),
        (["--out", "no/such/folder/tree.json"], "there is no folder no/such/folder"),
        (["--out", "."], "this is a folder"),
        (["--out", "x" * 300], "--out: " + "x" * 300 + " cannot be written: File name too long"),
        (["--json", "x" * 300], "cannot be written: File name too long"),
        (["--json", "no/such/folder/report.json"], "there is no folder no/such/folder"),
        (["--plot", "picture.txt"], "--plot"),
        (["--prompts", "no-such-file.jsonl"], "no-such-file.jsonl cannot be read"),
        (
            ["--max-total-tokens", "300", "--batch-sizes", "2", "--max-running-requests", "2"],
            "raise --max-total-tokens",
        ),
        (["--max-mamba-cache-size", "1", "--batch-sizes", "2"], "raise --max-mamba-cache-size"),
        (["--max-tokens", "200", "--context-length", "150"], "lower --max-tokens"),
    ],
)
def test_refused_flags(
    flags: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        tune_tree.main(["--device", "cpu", "--max-tokens", "16", "--num-prompts", "2", *flags])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "tree.json").exists()


def test_a_folder_that_cannot_be_written_to_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    for flag in ("json", "plot", "out"):
        with pytest.raises(ValidationError, match="cannot be written: no permission"):
            TreeTunerConfig.model_validate({flag: tmp_path / "new.png"})
    assert asked.count((tmp_path, os.W_OK)) == 3


def test_a_checkpoint_without_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_checkpoint(tmp_path, seed=1, with_mtp=False)
    with pytest.raises(SystemExit) as ended:
        tune_tree.main(["--model", str(model), "--device", "cpu"])
    assert ended.value.code == 2
    assert "no MTP head (no mtp.* tensors), so it has no trees to tune" in capsys.readouterr().err
