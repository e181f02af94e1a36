"""Flags, tree file and checkpoint decide what is drafted; impossible combinations are refused with advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM
from specmamba.config import EngineConfig
from specmamba.draft.draft_plan import plan_drafts
from specmamba.errors import ConfigError, RequestError
from specmamba.models.base import DraftKind
from specmamba.trees import StaticTree, TreeFile, read_tree_file
from tests.tiny import write_tiny_checkpoint


def flags(**values: Any) -> dict[str, Any]:
    return {f"speculative_{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (3, 1, 4, 4)),
        ({"num_steps": 5}, (5, 1, 6, 6)),
        ({"num_draft_tokens": 3}, (2, 1, 3, 3)),
        ({"num_steps": 4, "eagle_topk": 4, "num_draft_tokens": 8}, (4, 4, 8, 13)),  # three steps run four nodes each
        ({"num_steps": 5, "eagle_topk": 8, "num_draft_tokens": 64}, (5, 8, 64, 64)),
        ({"num_steps": 4, "eagle_topk": 2}, (4, 2, 8, 8)),
        ({"num_steps": 1, "eagle_topk": 4}, (1, 4, 5, 5)),
        ({"eagle_topk": 3}, (3, 3, 6, 7)),
    ],
)
def test_the_shape_that_flags_ask_for(given: dict[str, int], expected: tuple[int, int, int, int]) -> None:
    plan = plan_drafts(EngineConfig(**flags(**given)), "mtp", 4096)
    assert (plan.num_steps, plan.topk, plan.max_nodes, plan.num_lookahead_slots) == expected
    assert (plan.algorithm, plan.draws_drafts, plan.trees) == ("mtp", True, None)


def test_ngram_drafts_trees_without_a_head() -> None:
    plan = plan_drafts(EngineConfig(**flags(algorithm="ngram")), None, 4096)
    assert plan.algorithm == "ngram"
    assert (plan.num_steps, plan.topk, plan.max_nodes, plan.num_lookahead_slots) == (4, 4, 8, 8)
    rejecting = EngineConfig(**flags(algorithm="ngram", accept="rejection"))
    assert not plan_drafts(rejecting, None, 4096).draws_drafts  # what stands in a text is not drawn


@pytest.mark.parametrize(
    ("accept", "draws"),
    [({}, True), ({"accept": "auto"}, True), ({"accept": "rejection"}, True), ({"accept": "target"}, False)],
)
def test_drafts_can_be_drawn_unless_all_requests_are_decided_under_target(
    accept: dict[str, str], draws: bool, tmp_path: Path
) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"trees": [GOOD]}))
    shapes: list[dict[str, Any]] = [{}, {"num_steps": 2}, {"eagle_topk": 3}, {"tree": file}]
    heads: tuple[DraftKind, ...] = "mtp", "eagle", "eagle3"
    for head in heads:
        for shape in shapes:
            assert plan_drafts(EngineConfig(**flags(**shape, **accept)), head, 4096).draws_drafts == draws
    assert plan_drafts(EngineConfig(**flags(**accept)), "draft-model", 4096).draws_drafts == draws
    assert not plan_drafts(EngineConfig(**flags(algorithm="ngram", **accept)), "mtp", 4096).draws_drafts


def test_nothing_is_drawn_where_nothing_is_drafted() -> None:
    assert not plan_drafts(EngineConfig(**flags(algorithm="none")), "mtp", 4096).draws_drafts
    assert not plan_drafts(EngineConfig(), None, 4096).draws_drafts


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 8},
            "set speculative_num_draft_tokens 4 or leave it out",
        ),
        ({"num_steps": 2, "eagle_topk": 3, "num_draft_tokens": 14}, "give 13 nodes with the root, not 14: lower"),
        ({"num_steps": 1, "eagle_topk": 2, "num_draft_tokens": 4}, "give 3 nodes with the root, not 4"),
        ({"eagle_topk": 0}, "speculative_eagle_topk: .*greater than or equal to 1"),
        ({"eagle_topk": 65}, "speculative_eagle_topk: .*less than or equal to 64"),
        ({"num_draft_tokens": 65}, "speculative_num_draft_tokens: "),
        ({"algorithm": "none", "eagle_topk": 2}, "speculative_eagle_topk need a drafter"),
        ({"algorithm": "none", "accept": "rejection"}, "speculative_accept need a drafter"),
        (
            {"tree": "t.json", "num_steps": 3},
            "speculative_tree decides the whole shape: drop speculative_num_steps",
        ),
        ({"tree": "t.json", "algorithm": "ngram"}, "ngram makes its own drafts"),
        ({"ngram_corpus": "c.txt"}, "speculative_ngram_corpus needs speculative_algorithm ngram"),
        ({"ngram_max_match_window_size": 5}, "max_match_window_size needs speculative_algorithm ngram"),
        (
            {"algorithm": "ngram", "ngram_min_match_window_size": 5, "ngram_max_match_window_size": 4},
            "is above speculative_ngram_max_match_window_size",
        ),
        ({"state": "copies"}, "speculative_state: "),
        ({"accept": "always"}, "speculative_accept: "),
    ],
)
def test_flags_that_contradict_each_other(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(model="/nowhere/at/all", **flags(**given))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"algorithm": "mtp"}, "this checkpoint has no MTP head.*choose auto, ngram, suffix or none"),
        ({"eagle_topk": 2, "num_steps": 2}, "speculative_num_steps, speculative_eagle_topk: this needs a drafter"),
        ({"accept": "rejection"}, "speculative_accept: this needs a drafter"),
        ({"draft_model_quantization": "int8"}, "speculative_draft_model_quantization: this needs a drafter"),
        ({"tree": "t.json"}, "speculative_tree: this needs a drafter"),
    ],
)
def test_a_checkpoint_without_a_head(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", seed=0, with_mtp=False)
    with pytest.raises(ConfigError, match=sentence):
        LLM(model=str(folder), device="cpu", **flags(**given))


def test_more_children_than_tokens() -> None:
    with pytest.raises(ConfigError, match="--speculative-eagle-topk 20 is more than the 10 tokens there are"):
        plan_drafts(EngineConfig(**flags(num_steps=1, eagle_topk=20)), "mtp", 10)


GOOD: dict[str, Any] = {"parents": [-1, 0, 0, 1], "ranks": [0, 0, 1, 0]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"trees": [GOOD | {"parents": [-1, 2, 1, 1]}]},
            "trees.0: the parent of node 1 is 2: a later node, or there is a cycle",
        ),
        ({"trees": [GOOD | {"parents": [-1, 0, 2, 1]}]}, "the parent of node 2 is 2: itself; list every parent before"),
        ({"trees": [GOOD | {"parents": [-1, 0, 3, 0]}]}, "the parent of node 2 is 3: a later node"),
        ({"trees": [GOOD | {"parents": [0, 0, 0, 1]}]}, "node 0 is the root: its parent must be -1"),
        ({"trees": [GOOD | {"parents": [-1, 0, -1, 1]}]}, "node 2 has parent -1: only node 0 is a root"),
        ({"trees": [GOOD | {"ranks": [0, 0, 0, 0]}]}, "nodes 1 and 2 are both child 0 of node 0"),
        ({"trees": [GOOD | {"ranks": [0, 0, 1]}]}, "4 parents, but 3 ranks"),
        ({"trees": [GOOD | {"ranks": [0, 0, 64, 0]}]}, "trees.0.ranks.2: "),
        ({"trees": [GOOD | {"ranks": [0, 0, -1, 0]}]}, "trees.0.ranks.2: "),
        (
            {"trees": [{"parents": [-1, *range(64)], "ranks": [0] * 65}]},
            "65 nodes are too many: at most 64, root included",
        ),
        ({"trees": [{"parents": [], "ranks": []}]}, "node 0 is the root"),
        ({"trees": []}, "trees: "),
        ({"trees": [GOOD, GOOD]}, "only the last tree may be without max_batch_size"),
        (
            {"trees": [GOOD | {"max_batch_size": 4}, GOOD | {"max_batch_size": 4}]},
            r"must rise from tree to tree, not \[4, 4\]",
        ),
        ({"trees": [GOOD], "format": "something/2"}, "format: "),
        ({"trees": [GOOD | {"colour": 1}]}, "trees.0.colour: "),
        ([GOOD], "Input should be an object"),
        ("not JSON", "Invalid JSON"),
    ],
)
def test_a_tree_file_that_is_not_valid(content: object, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=sentence) as refused:
        LLM(device="cpu", speculative_tree=file)
    assert str(refused.value).startswith(f"speculative_tree: {file}: ")


def test_a_missing_tree_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_tree_file(tmp_path / "none.json")


def test_the_tree_of_a_batch() -> None:
    trees = [StaticTree(**GOOD, max_batch_size=size) for size in (1, 4)] + [StaticTree(parents=(-1,), ranks=(0,))]
    file = TreeFile(trees=tuple(trees))
    assert [file.for_batch(size) for size in (1, 2, 4, 5, 100)] == [trees[0], trees[1], trees[1], trees[2], trees[2]]
    assert file.max_nodes == 4
    assert TreeFile(trees=tuple(trees[:2])).for_batch(100) is trees[1]
    assert trees[0].depths == (0, 1, 1, 2)


def test_a_plan_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(
        json.dumps({"trees": [GOOD | {"max_batch_size": 2}, {"parents": [-1, 0, 1, 2], "ranks": [0, 3, 0, 0]}]})
    )
    plan = plan_drafts(EngineConfig(**flags(tree=file)), "mtp", 4096)
    assert (plan.num_steps, plan.topk, plan.max_nodes, plan.num_lookahead_slots) == (3, 4, 4, 4)


def test_drafting_again_after_steps_of_the_root_alone(tmp_path: Path) -> None:
    """A file may draft nothing at some batch sizes; the head runs its pending tokens when it drafts again."""
    from specmamba import SamplingParams

    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"trees": [GOOD | {"max_batch_size": 1}, {"parents": [-1], "ranks": [0]}]}))
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (90, 30)]
    with LLM(dtype="float32", device="cpu", max_total_tokens=1024, speculative_tree=file) as llm:
        outputs = llm.generate(["def main():\n", "import os\n"], params)
        alone = llm.generate("def main():\n", params[0])[0]
        llm.workbench.use_drafts(speculative_algorithm="none")
        plain = llm.generate(["def main():\n", "import os\n"], params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert alone.token_ids == plain[0].token_ids
    assert outputs[1].spec.num_draft_tokens == 0
    assert outputs[0].spec.num_draft_tokens > 0
    # 29 steps without drafts, then as good drafts as if there had been some all along
    late = outputs[0].spec.num_accepted_tokens / (outputs[0].spec.num_verify_steps - 29)
    assert late == pytest.approx(alone.spec.accept_length - 1, abs=0.6)


def test_a_late_newcomer_meets_pending_tokens_at_the_end_of_the_context(tmp_path: Path) -> None:
    """Rows have different numbers of pending tokens; padding must not go past the end of the table."""
    from specmamba import SamplingParams

    file = tmp_path / "tree.json"
    chain = {"max_batch_size": 1, "parents": [-1, 0, 1, 2], "ranks": [0, 0, 0, 0]}
    file.write_text(json.dumps({"trees": [chain, {"parents": [-1], "ranks": [0]}]}))
    with LLM(device="cpu", context_length=64, max_total_tokens=1024, speculative_tree=file) as llm:
        engine = llm.engine
        engine.add_request("early", [5, 6], SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
        engine.add_request("beside", [7, 8], SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
        for _ in range(12):
            engine.step()
        engine.add_request("late", list(range(1, 63)), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        reasons = [d.finish_reason for _ in range(80) for d in engine.step() if d.finish_reason]
    assert reasons == ["length"] * 3


class TestWorkbench:
    def test_only_drafting_can_be_changed(self) -> None:
        with LLM(device="cpu", max_total_tokens=512, speculative_num_steps=3) as llm:
            bench, before = llm.workbench, llm.engine.config
            with pytest.raises(ConfigError, match="speculative_state: only the way of drafting"):
                bench.use_drafts(speculative_state="snapshots")
            with pytest.raises(ConfigError, match="does not fit an engine that was started for 4"):
                bench.use_drafts(speculative_num_steps=4)
            with pytest.raises(ConfigError, match="cannot be read"):
                bench.use_drafts(speculative_algorithm="ngram", speculative_num_draft_tokens=4,
                                 speculative_ngram_corpus=Path("/nowhere/at/all"))  # fmt: skip
            assert llm.engine.config is before
            assert llm.engine.draft_plan.algorithm == "mtp"
            recorder = bench.record_ranks()
            assert bench.record_ranks().mtp is recorder.mtp

    def test_environment_variables_are_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECMAMBA_SPECULATIVE_NUM_STEPS", "2")
        with LLM(device="cpu", max_total_tokens=512) as llm:
            assert llm.engine.draft_plan.num_steps == 2
            llm.workbench.use_drafts(speculative_algorithm="none")
            assert llm.engine.draft_plan.max_nodes == 1

    def test_plain_on_an_engine_whose_draft_is_rounded(self) -> None:
        with LLM(device="cpu", max_total_tokens=512, speculative_draft_model_quantization="int8") as llm:
            for algorithm, nodes in (("none", None), ("ngram", 4), ("auto", 4)):
                llm.workbench.use_drafts(speculative_algorithm=algorithm, speculative_num_draft_tokens=nodes)
                assert llm.engine.config.speculative_draft_model_quantization == "int8"
            assert llm.engine.draft_plan.algorithm == "mtp"

    def test_ranks_need_a_head(self) -> None:
        with LLM(device="cpu", max_total_tokens=512, speculative_algorithm="ngram") as llm:
            with pytest.raises(ConfigError, match="choose mtp, eagle or eagle3"):
                llm.workbench.record_ranks()

    def test_a_head_that_was_not_loaded(self) -> None:
        with (
            LLM(device="cpu", max_total_tokens=512, speculative_algorithm="none") as llm,
            pytest.raises(ConfigError, match="started without a draft"),
        ):
            llm.workbench.use_drafts(speculative_algorithm="mtp")

    def test_logits_along_what_does_not_fit(self) -> None:
        with LLM(device="cpu", max_total_tokens=512, context_length=16, speculative_algorithm="none") as llm:
            seen: list[object] = []
            llm.workbench.logits_along([1, 2], [], seen.append)
            assert seen == []
            with pytest.raises(RequestError, match="10 \\+ 7 tokens are more than the 16 that fit"):
                llm.workbench.logits_along([1] * 10, [2] * 7, seen.append)
            with pytest.raises(RequestError, match="token id 9999 is not in the vocabulary"):
                llm.workbench.logits_along([1], [9999], seen.append)
            llm.workbench.logits_along([1, 2], [3, 4], seen.append)
            assert len(seen) == 2
