"""Steps on padded inputs that stay: the same text as without them, and nothing in them that could not be captured.

Requests that are drawn without filters, and every batch size, are tried with some kinds of drafts;
``SPECMAMBA_TEST_FULL=1`` tries them with all.
"""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba import LLM, SamplingParams
from specmamba.cache.request_table import RequestTable
from specmamba.config import DEMO_MODEL
from specmamba.core import DraftTree, RequestOutput
from specmamba.cuda_graphs import EagerReplay, GraphReplay, NativeReplay, NextPart, StepWatch
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.engine.captured.step_inputs import StepInputs
from specmamba.engine.captured.step_kind import StepKind
from specmamba.errors import ConfigError
from specmamba.sampling_params import GrammarSpec, SpeculationParams
from specmamba.trees import StaticTree, TreeFile
from specmamba.verify.result import StepOutput
from tests.exactness import assert_same_greedy_texts, assert_same_sampled_texts
from tests.tiny import write_tiny_checkpoint

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
BUCKET = 4
MEMORY: dict[str, Any] = {"context_length": 160, "max_total_tokens": 2048, "max_running_requests": BUCKET + 1}
TREE: dict[str, Any] = {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 7}
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {"speculative_algorithm": "none"},
    "chain": {"speculative_num_steps": 3},
    "tree": TREE,
    "drawn tree": TREE | {"speculative_accept": "rejection"},
    "ngram": {"speculative_algorithm": "ngram"},
    "snapshots": TREE | {"speculative_state": "snapshots"},
    "draft model": {"speculative_draft_model_path": str(DEMO_MODEL)},
}
PROMPTS = ["def main():", "import os\n\n", "x = [1, 2", "for i in range(10):\n    print(", "class A:\n    def __init__"]
SETTINGS: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(max_tokens=9 + i, temperature=0.0) for i in range(5)],
    "drawn": [SamplingParams(max_tokens=9 + i, temperature=0.9 * (i != 1), seed=i) for i in range(5)],
    "filtered and penalized": [
        SamplingParams(
            max_tokens=9 + i,
            temperature=0.8,
            seed=i,
            top_k=9 * i,
            top_p=1 - i / 9,
            min_p=0.01 * i,
            frequency_penalty=i / 9,
        )
        for i in range(5)
    ],
    "both rules": [
        SamplingParams(
            max_tokens=9 + i,
            temperature=0.9 * (i != 4),
            seed=i,
            top_k=9 * i,
            speculative=SpeculationParams(accept="target" if i % 2 else "rejection"),
        )
        for i in range(5)
    ],
    "biased and listed": [
        SamplingParams(
            max_tokens=9 + i,
            temperature=0.9 * (i != 1),
            seed=i,
            logprobs=2 if i in (0, 4) else None,
            logit_bias={9: 2.5} if i in (1, 4) else {},
            speculative=SpeculationParams(max_depth=1) if i == 3 else True,
        )
        for i in range(5)
    ],
}


DIRECT: dict[str, Any] = {"disable_cuda_graph": True}


def new_llm(drafts: str, **flags: Any) -> LLM:
    return LLM(**({"dtype": "float32"} | MEMORY | DRAFTS[drafts] | flags))


def answer_all(llm: LLM, settings: str, size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens, and how many drafts were accepted, of a batch."""
    outputs: list[RequestOutput] = llm.generate(PROMPTS[:size], SETTINGS[settings][:size])
    return [(output.token_ids, output.spec.accepted_histogram) for output in outputs]


def assert_same_answers(case: tuple[str, int], got: list[Any], expected: list[Any], plain: LLM) -> None:
    """Equal but for near ties; ``plain`` is the LLM that the expected ones are from."""
    settings, size = case
    if settings != "greedy":
        assert_same_sampled_texts(got, expected, lambda: answer_all(plain, *case))
    elif got != expected:
        texts, expected_texts = [[tokens for tokens, _ in answers] for answers in (got, expected)]
        assert texts != expected_texts, "the same texts with other numbers of accepted drafts"
        assert_same_greedy_texts(texts, expected_texts, PROMPTS[:size], lambda: new_llm("plain"))


class Watched(EagerReplay[StepOutput]):
    """Watches every step with the shapes that a captured one has; ``stays``: memory that every one must find again."""

    def __init__(self, stays: dict[str, torch.Tensor]) -> None:
        super().__init__(has_fixed_shapes=True)
        self.traces: dict[Hashable, list[Any]] = defaultdict(list)
        self._stays = stays

    def run(
        self,
        key: Hashable,
        function: Callable[[], Any],
        clear: Callable[[], object],
        fill: Callable[[], object] | None,
        then: NextPart | None = None,
    ) -> StepOutput:
        parts: list[tuple[Hashable, Callable[..., Any]]] = [(key, function)]
        parts += [] if then is None else [((key, then.key), then.function)]
        if any(name not in self.traces for name, _ in parts):  # as before a capture
            clear()
            self._run(parts)
        assert fill is not None, "steps that are not deferred are not chained"
        fill()
        outcome: StepOutput = self._run(parts, self.traces)
        return outcome

    def _run(
        self, parts: list[tuple[Hashable, Callable[..., Any]]], traces: dict[Hashable, list[Any]] | None = None
    ) -> Any:
        given: tuple[Any, ...] = ()
        for name, function in parts:
            with StepWatch(self._stays) as watch:
                given = (function(*given),)
            if traces is not None:
                traces[name].append(watch.trace)
        return given[0]


def memory_that_stays(llm: LLM) -> dict[str, torch.Tensor]:
    """All of the pools, tables and inputs."""
    pools, graphs = llm.engine.pools, llm.engine.runner.graph_runner
    assert graphs is not None
    inputs = graphs.inputs
    found = {"table": pools.table.kv_slots}
    found |= {f"{name}[{i}]": x for name, side in (("k", pools.kv.k), ("v", pools.kv.v)) for i, x in enumerate(side)}
    owners: dict[str, object] = {"states": pools.states, "state_buffers": pools.state_buffers, "trees": inputs.trees}
    owners |= {
        "rows": inputs.rows,
        "settings": inputs.settings,
        "floats": inputs.floats,
    }
    for owner_name, owner in owners.items():
        tensors = {key: value for key, value in vars(owner).items() if isinstance(value, torch.Tensor)}
        assert tensors, owner_name
        found |= {f"{owner_name}.{key}": value for key, value in tensors.items()}
    return found


@pytest.fixture
def in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code runs behind PyTorch's back; here nothing does."""
    folder = Path(str(importlib.import_module("specmamba.kernels").__path__[0]))
    for file in sorted(folder.glob("*/native_ops.py")):
        module = importlib.import_module(f"specmamba.kernels.{file.parent.name}.native_ops")
        for name in ("code", "_code"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: None)


class TestText:
    @pytest.mark.fast_cases("drawn tree")
    @pytest.mark.parametrize("drafts", DRAFTS)
    def test_is_the_same_for_every_batch_size(self, drafts: str) -> None:
        """In buckets that are full, padded and too small; with bounds of the batch, and with the shapes of a captured
        step: keys up to the longest context, a head told of a whole tree."""
        sizes = range(1, BUCKET + 2) if IS_FULL or drafts in ("plain", "tree") else (1, 3, BUCKET + 1)
        asked = [("greedy", size) for size in sizes]
        if IS_FULL or drafts in ("plain", "tree", "drawn tree"):
            asked += [("drawn", 3)]
        asked += [("filtered and penalized", 3), ("biased and listed", 1), ("biased and listed", 3)]
        with new_llm(drafts, **DIRECT) as plain, new_llm(drafts, cuda_graph_max_bs=BUCKET) as replayed:
            graphs = replayed.engine.runner.graph_runner
            assert graphs is not None
            assert graphs.buckets == (1, 2, BUCKET)
            expected = {case: answer_all(plain, *case) for case in asked}
            for case in asked:
                assert_same_answers(case, answer_all(replayed, *case), expected[case], plain)
            graphs.replay = EagerReplay(has_fixed_shapes=True)
            some = ("greedy", 1), ("filtered and penalized", 3), ("both rules", 3), ("biased and listed", 3)
            for case in [case for case in asked if IS_FULL or case in some]:
                assert_same_answers(case, answer_all(replayed, *case), expected[case], plain)

    def test_is_the_same_where_captures_fail(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A step that a GPU cannot capture runs operator by operator from then on, and the log says so once a kind."""
        tried: list[Hashable] = []

        def fail(self: GraphReplay[Any], key: Hashable, function: Callable[[], Any]) -> None:
            tried.append(key)
            function()  # as a warm-up
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(GraphReplay, "_capture", fail)
        with new_llm("chain", **DIRECT) as plain, new_llm("chain", cuda_graph_max_bs=BUCKET) as replayed:
            graphs = replayed.engine.runner.graph_runner
            assert graphs is not None
            graphs.replay = GraphReplay(torch.device("cuda"), 1 << 40)
            case = "greedy", 3
            assert_same_answers(case, answer_all(replayed, *case), answer_all(plain, *case), plain)
        said = [record.getMessage() for record in caplog.records if "could not be captured" in record.getMessage()]
        assert len(said) == len(tried) == len(set(tried)) > 0
        assert said[0].endswith("operator by operator: CUDA error: operation not permitted when stream is capturing")
        assert graphs.replay.num_unreplayed == len(tried)

    @pytest.mark.usefixtures("needs_native")
    def test_is_the_same_on_two_threads(self) -> None:
        """For a second engine of the process too."""
        with new_llm("tree", **DIRECT) as plain, new_llm("tree", num_threads=2) as replayed:
            assert (plain.engine.num_threads, replayed.engine.num_threads) == (1, 2)
            for case in (("greedy", 3), ("filtered and penalized", 3)):
                assert_same_answers(case, answer_all(replayed, *case), answer_all(plain, *case), plain)

    @pytest.mark.fast_cases("tree")
    @pytest.mark.usefixtures("no_headroom")
    @pytest.mark.parametrize("drafts", ["plain", "chain", "tree"])
    def test_is_the_same_when_memory_is_short(self, drafts: str) -> None:
        tight: dict[str, Any] = {"max_total_tokens": 112, "context_length": 96, "page_size": 16}
        with new_llm(drafts, **tight, **DIRECT) as plain, new_llm(drafts, cuda_graph_max_bs=5, **tight) as replayed:
            params = SamplingParams(max_tokens=40, temperature=0.0)
            texts = [[o.token_ids for o in llm.generate(PROMPTS, params)] for llm in (replayed, plain)]
            assert_same_greedy_texts(texts[0], texts[1], PROMPTS, lambda: new_llm("plain"))
            assert replayed.engine.stats().num_preemptions > 0

    def test_a_tree_file_goes_by_the_size_of_the_bucket(self, tmp_path: Path) -> None:
        """Trees of several sizes, one of them a root alone, so that the head is told of several steps at once."""
        sizes = ((1, (-1, 0, 0, 1)), (2, (-1,)), (4, (-1, 0, 1)))
        trees = tuple(
            StaticTree(
                max_batch_size=size, parents=parents, ranks=tuple(parents[:i].count(p) for i, p in enumerate(parents))
            )
            for size, parents in sizes
        )
        file = tmp_path / "trees.json"
        file.write_text(TreeFile(trees=trees).model_dump_json(exclude_none=True))
        with (
            new_llm("plain", **DIRECT) as plain,
            LLM(dtype="float32", speculative_tree=file, cuda_graph_max_bs=BUCKET, **MEMORY) as replayed,
        ):
            for size in range(1, BUCKET + 2):
                got = [text for text, _ in answer_all(replayed, "greedy", size)]
                expected = [text for text, _ in answer_all(plain, "greedy", size)]
                assert_same_greedy_texts(got, expected, PROMPTS[:size], lambda: new_llm("plain"))

    def test_of_requests_that_come_and_go(self) -> None:
        """Rows leave holes, so that no batch is a run of rows, and buckets change from step to step."""
        params = [SamplingParams(max_tokens=3 + 9 * (i % 3), temperature=0.0) for i in range(12)]
        prompts = [PROMPTS[i % 5] + " " * (i // 5) for i in range(12)]
        with new_llm("tree", **DIRECT) as plain, new_llm("tree", cuda_graph_max_bs=BUCKET) as replayed:
            texts = [[o.token_ids for o in llm.generate(prompts, params)] for llm in (replayed, plain)]
        assert_same_greedy_texts(texts[0], texts[1], prompts, lambda: new_llm("plain"))


def test_nodes_and_rows_that_a_tree_lacks_are_padding() -> None:
    """Also where a larger tree stood before."""
    cpu = torch.device("cpu")
    inputs = StepInputs(4, 6, cpu)
    inputs.trees.write(DraftTree(torch.ones(4, 6, dtype=torch.int64), chain_shape(4, 6, cpu)))
    inputs.trees.write(DraftTree(torch.tensor([[7, 8, 9]] * 2), tree_shape(torch.tensor([[-1, 0, 0]] * 2), 2)))
    assert inputs.trees.parents.tolist() == [[-1, 0, 0, -1, -1, -1]] * 2 + [[-1] * 6] * 2
    assert inputs.trees.tokens.tolist() == [[7, 8, 9, 0, 0, 0]] * 2 + [[0] * 6] * 2


class TestWhatIsReplayed:
    def counted(self, llm: LLM) -> list[StepKind]:
        kinds: list[StepKind] = []

        class Counting(EagerReplay[StepOutput]):
            def run(self, *given: Any) -> StepOutput:
                kinds.append(given[-1].key[0])
                return super().run(*given)

        assert llm.engine.runner.graph_runner is not None
        llm.engine.runner.graph_runner.replay = Counting()
        return kinds

    def test_every_step_up_to_the_largest_bucket(self) -> None:
        with new_llm("chain", cuda_graph_max_bs=BUCKET) as llm:
            kinds = self.counted(llm)
            outputs = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=20, temperature=0.0))
            steps = max(output.spec.num_verify_steps for output in outputs)
            assert len(kinds) >= steps
            assert {kind.batch_size for kind in kinds} <= {1, 2, BUCKET}
            assert kinds[0].batch_size == BUCKET
            llm.generate(PROMPTS, SamplingParams(max_tokens=1, temperature=0.0))  # one step of five
            assert len(kinds) < steps + 8

    def test_not_what_is_watched(self) -> None:
        with new_llm("chain", cuda_graph_max_bs=BUCKET) as llm:
            kinds, runner = self.counted(llm), llm.engine.runner
            params = SamplingParams(max_tokens=6, temperature=0.0)
            runner.probe.is_on = True
            llm.generate(PROMPTS[:2], params)
            runner.probe.is_on, runner.target.is_watched = False, True
            llm.generate(PROMPTS[:2], params)
            assert not kinds

    def test_given_tokens_too(self) -> None:
        given = [[262, 285, 16, 17, 18, 19, 20, 21], [5, 6, 7, 8], []]
        params = SamplingParams(max_tokens=8, temperature=0.0)
        with new_llm("tree", **DIRECT) as plain, new_llm("tree", cuda_graph_max_bs=BUCKET) as llm:
            kinds = self.counted(llm)
            outputs = llm.generate(PROMPTS[:3], params, replay=given)
            assert any(kind.is_forced for kind in kinds)
            assert [list(o.token_ids[: len(text)]) for o, text in zip(outputs, given, strict=True)] == given
            assert [o.token_ids for o in outputs] == [
                o.token_ids for o in plain.generate(PROMPTS[:3], params, replay=given)
            ]

    def test_a_drafter_that_was_used_before_is_used_again(self) -> None:
        """Graphs are of a drafter: benchmarks that go to and fro must not capture them anew each time."""
        with new_llm("tree", cuda_graph_max_bs=BUCKET) as llm:
            bench, runner, drafters = llm.workbench, llm.engine.runner, []
            for flags in (TREE, {"speculative_algorithm": "none"}, TREE, {"speculative_num_steps": 2}):
                bench.use_drafts(**flags)
                drafters.append(runner.drafter)
            assert drafters[0] is drafters[2]
            assert len({id(drafter) for drafter in drafters}) == 3

    def test_ranks_are_recorded_of_steps_on_given_roots(self) -> None:
        """They are those of direct steps: the recorder runs the head before and after a step, which has no drafts."""
        found = []
        with new_llm("chain", **DIRECT) as plain, new_llm("chain", cuda_graph_max_bs=BUCKET) as llm:
            kinds = self.counted(llm)
            for each in (plain, llm):
                recorder = each.workbench.record_ranks()
                params = SamplingParams(max_tokens=5, temperature=0.0)
                each.generate(PROMPTS[:2], params, replay=[[5, 6, 7, 8, 9], []])
                found.append(recorder.ranks.tolist())
        assert found[0] == found[1]
        assert len(found[0]) == 10
        assert {len(ranks) for ranks in found[0]} == {3}
        assert {kind.num_nodes for kind in kinds} == {1}

    def test_the_table_is_told_before_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A graph reads the device's copy of the table, and nothing in it asks for news."""
        with new_llm("tree", **DIRECT) as plain, new_llm("tree", cuda_graph_max_bs=BUCKET) as llm:
            table = llm.engine.pools.table
            table._is_mirrored, table._on_device = True, table._on_device.clone()

            class Deaf(EagerReplay[StepOutput]):
                def run(self, *arguments: Any) -> StepOutput:
                    with monkeypatch.context() as patch:
                        patch.setattr(RequestTable, "kv_slots", property(lambda self: self._on_device))
                        return super().run(*arguments)

            assert llm.engine.runner.graph_runner is not None
            llm.engine.runner.graph_runner.replay = Deaf(has_fixed_shapes=True)
            assert_same_answers(("greedy", 3), answer_all(llm, "greedy", 3), answer_all(plain, "greedy", 3), plain)

    def test_a_cpu_without_native_code_pads_only_where_buckets_are_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(NativeReplay, "is_available", staticmethod(lambda: False))
        with new_llm("chain") as llm:
            assert llm.engine.runner.graph_runner is None
            assert llm.engine.runner.capture(is_sized=False) == []
        with new_llm("chain", cuda_graph_max_bs=3) as llm:
            assert llm.engine.runner.capture(is_sized=False) == [
                "steps are padded to batches of 1, 2, 3 and run operator by operator"
            ]

    @pytest.mark.usefixtures("needs_native")
    def test_a_cpu_with_native_code_captures_unless_told_otherwise(self) -> None:
        with new_llm("chain", disable_cuda_graph=True) as llm:
            assert llm.engine.runner.graph_runner is None
        with new_llm("chain") as llm:
            assert llm.engine.runner.capture(is_sized=False) == [
                "steps are captured for batches of 1, 2, 4, 5, each when it is first needed"
            ]

    @pytest.mark.parametrize(
        ("flags", "complaint"),
        [
            ({"cuda_graph_max_bs": 6}, "only 5 requests run together"),
            ({"cuda_graph_max_bs": 2, "disable_cuda_graph": True}, "drop one of them"),
        ],
    )
    def test_flags_that_contradict_each_other(self, flags: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            new_llm("chain", **flags)


class TestNothingThatCannotBeCaptured:
    @pytest.mark.fast_cases("drawn tree", "ngram", "draft model")
    @pytest.mark.usefixtures("in_pytorch")
    @pytest.mark.parametrize("drafts", DRAFTS)
    def test_every_step_of_a_kind_is_the_same_program(self, drafts: str) -> None:
        """The same operators on the same memory, whatever was drafted, accepted, folded or moved; and no step asks the
        device for a number, or brings it one."""
        with new_llm(drafts, cuda_graph_max_bs=2, max_running_requests=2) as llm:
            assert llm.engine.runner.graph_runner is not None
            watched = Watched(memory_that_stays(llm))
            llm.engine.runner.graph_runner.replay = watched
            for settings in SETTINGS:
                is_tried = {
                    "drawn": drafts not in ("chain", "ngram"),
                    "both rules": drafts in ("tree", "drawn tree", "ngram"),
                }
                if IS_FULL or is_tried.get(settings, True):
                    answer_all(llm, settings, 2)
            assert sum(map(len, watched.traces.values())) > 10
            for traces in watched.traces.values():
                assert all(trace.operators == traces[0].operators for trace in traces)
                assert not any(trace.host_reads or trace.host_writes for trace in traces)

    @pytest.mark.usefixtures("in_pytorch")
    def test_of_other_families(self, tmp_path: Path) -> None:
        folder = write_tiny_checkpoint(tmp_path / "model", seed=2)
        with new_llm("tree", model=str(folder), cuda_graph_max_bs=2, max_running_requests=2) as llm:
            assert llm.engine.runner.graph_runner is not None
            watched = Watched(memory_that_stays(llm))
            llm.engine.runner.graph_runner.replay = watched
            params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
            llm.generate([[5, 6, 7], [8, 9]], params)
            for traces in watched.traces.values():
                assert all(trace == traces[0] for trace in traces)


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.mark.parametrize("drafts", DRAFTS)
    def test_text_is_that_of_steps_that_are_not_captured(self, drafts: str) -> None:
        eager = {"device": "cuda", "disable_cuda_graph": True}
        with new_llm(drafts, **eager) as plain, new_llm(drafts, device="cuda") as captured:
            cases = (1, "greedy"), (3, "drawn"), (3, "both rules"), (BUCKET, "filtered and penalized"), (5, "greedy")
            for size, settings in cases:
                assert answer_all(captured, settings, size) == answer_all(plain, settings, size)

    @pytest.mark.parametrize("drafts", DRAFTS)
    def test_greedy_text_is_that_of_the_cpu(self, drafts: str) -> None:
        with new_llm(drafts, device="cpu") as plain, new_llm(drafts, device="cuda") as captured:
            for size in (1, 5):
                texts = [[text for text, _ in answer_all(llm, "greedy", size)] for llm in (captured, plain)]
                assert_same_greedy_texts(texts[0], texts[1], PROMPTS[:size], lambda: new_llm("plain"))

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
    def test_a_replay_neither_waits_nor_allocates(self) -> None:
        with new_llm("tree", device="cuda") as llm:
            answer_all(llm, "greedy", 3)
            graphs = llm.engine.runner.graph_runner
            assert graphs is not None
            inner = graphs.replay
            grown: list[int] = []

            class Strict(EagerReplay[StepOutput]):
                has_fixed_shapes = True

                def run(self, *given: Any) -> StepOutput:
                    before = torch.cuda.memory_stats()["allocation.all.allocated"]
                    torch.cuda.set_sync_debug_mode("error")
                    try:
                        outcome: StepOutput = inner.run(*given)
                    finally:
                        torch.cuda.set_sync_debug_mode("default")
                    grown.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
                    return outcome

            graphs.replay = Strict(True)
            answer_all(llm, "greedy", 3)
            assert grown
            assert not any(grown)

    def test_capture_is_told(self) -> None:
        with new_llm("chain", device="cuda") as llm:
            [line] = llm.engine.runner.capture(is_sized=False)
            assert "graphs in" in line


GRAMMAR = GrammarSpec(kind="regex", text="[a-z ]{30}")
LONG: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
COMPANY: dict[str, dict[str, Any]] = {  # beside the request with a grammar
    "plain": {},
    "biased": {"logit_bias": {9: 2.5, 40: -3.0}},
    "listed": {"logprobs": 2},
    "penalized": {"frequency_penalty": 0.3},
    "filtered": {"top_k": 20, "top_p": 0.9},
}
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"speculative_num_steps": 3},
    "drawn tree": TREE | {"speculative_accept": "rejection"},
    "ngram": {"speculative_algorithm": "ngram"},
    "sized": {"speculative_num_steps": 3, "speculative_adaptive": "auto"},
}


class Counted(NativeReplay[StepOutput]):
    """Counts the parts of steps that are replayed, and those that are not."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_parts = 0

    def _run(self, *given: Any) -> tuple[Any, bool]:
        self.num_parts += 1
        return super()._run(*given)


@pytest.mark.usefixtures("needs_native")
@pytest.mark.fast_cases("chain")
@pytest.mark.parametrize("way", WAYS)
def test_a_request_with_a_grammar_leaves_the_steps_of_seven_others_captured(way: str) -> None:
    """Forward and decision of every step are replayed, and the texts are those of direct steps."""
    kinds = [*COMPANY, "plain", "plain"]
    temperature = 0.0 if way in ("ngram", "sized") else 0.8
    params = [SamplingParams(temperature=temperature, seed=i, **LONG | COMPANY[name]) for i, name in enumerate(kinds)]
    # under "target" its text does not depend on the masks that are made in time
    rule = SpeculationParams(accept="target")
    params.insert(3, SamplingParams(max_tokens=30, temperature=temperature, seed=9, grammar=GRAMMAR, speculative=rule))
    prompts = [PROMPTS[i % 5] + " " * (i // 5) for i in range(8)]
    flags: dict[str, Any] = {"dtype": "float32", **MEMORY, "max_running_requests": 8, "num_threads": 1, **WAYS[way]}

    def texts(llm: LLM) -> list[tuple[int, ...]]:
        return [output.token_ids for output in llm.generate(prompts, params)]

    with LLM(**flags) as llm, LLM(disable_cuda_graph=True, **flags) as direct:
        graphs = llm.engine.runner.graph_runner
        assert graphs is not None
        graphs.replay.close()
        graphs.replay = replay = Counted()
        expected = texts(direct)
        for _ in range(3):
            before = replay.num_parts, replay.num_unreplayed, llm.engine.stats().spec.num_verify_steps
            got = texts(llm)
            if temperature:
                assert_same_sampled_texts(got, expected, lambda: texts(direct))
            else:
                assert_same_greedy_texts(got, expected, prompts, lambda: new_llm("plain"))
        parts, unreplayed, rows = (
            now - then
            for now, then in zip(
                (replay.num_parts, replay.num_unreplayed, llm.engine.stats().spec.num_verify_steps), before, strict=True
            )
        )
        assert parts >= 2 * rows / 8 > 10
        kept = graphs.inputs._logits
        assert kept is not None
        assert kept.nbytes == llm.engine.memory_plan.graph_bytes  # as planned
        # how many nodes a grammar leaves in time, and which sizes are tried, is not the same in every run
        assert unreplayed <= parts / (2 if way == "sized" else 4)
