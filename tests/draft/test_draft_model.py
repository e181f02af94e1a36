"""Drafting with a separate model: greedy text is the target's, and what is drafted is what the draft model says.

The text alone cannot tell a draft model whose states went astray from a bad one. So there are two sharper drafts: the
target itself, of which every draft must be accepted at every step, and the target with noise on its weights, which is
right often and not always, and whose every draft is compared with a cache-free evaluation by transformers.
"""

from __future__ import annotations

import itertools
import json
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specmamba import LLM, SamplingParams
from specmamba.cache.memory import plan_memory
from specmamba.cache.prefix.state_places import is_tracked
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.cache.state_pool import StateOwnershipError, StatePool
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.config import EngineConfig
from specmamba.core import Batch, DraftTree, OutputDelta, RequestOutput
from specmamba.draft.draft_model import DraftStates, ModelDrafter
from specmamba.draft.drafter import chain_shape
from specmamba.engine.workbench import Workbench
from specmamba.errors import ConfigError, EngineFailedError, RequestError
from specmamba.kernels import causal_conv1d, gated_delta_rule
from specmamba.trees import StaticTree, TreeFile
from specmamba.verify.record_buffers import RecordBuffers
from tests.cache.test_prefix_exact import check_pools
from tests.exactness import assert_same_greedy_texts
from tests.families import FAMILIES, mamba2
from tests.noise import add_noise
from tests.tiny import FULL, LINEAR, write_tiny_checkpoint

CPU = torch.device("cpu")
STEPS = 3
TRACK_INTERVAL = 5
Tokens = tuple[int, ...]
PROMPTS: tuple[Tokens, ...] = ((5, 6, 7, 8), (9,), tuple(range(20, 61)), (1, 2), (3, 4) * 17)


@dataclass(frozen=True)
class Checkpoints:
    """Folders by name."""

    root: Path

    def path(self, name: str) -> str:
        return str(self.root / name)

    def oracle(self, name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.path(name), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("checkpoints")
    write_tiny_checkpoint(root / "target", 1)
    small = {"hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
    small |= {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 6}
    write_tiny_checkpoint(root / "other", 2, with_mtp=False, layer_types=[FULL, LINEAR, FULL], **small)
    add_noise(root / "target", root / "noisy", 0.03)
    mamba2.build(root / "mamba2")
    return Checkpoints(root)


class Plain:
    """Texts without drafts, each computed once."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._models: dict[str, LLM] = {}

    def after(self, prompt: Tokens, num_tokens: int, target: str = "target") -> Tokens:
        if target not in self._models:
            flags: dict[str, Any] = {"speculative_algorithm": "none", "disable_radix_cache": True}
            path = self._checkpoints.path(target)
            self._models[target] = LLM(model=path, dtype="float32", device="cpu", context_length=256, **flags)
        return self._models[target].generate(prompt, greedy(num_tokens))[0].token_ids

    def check(self, outputs: Sequence[RequestOutput], target: str = "target") -> None:
        got, prompts = [output.token_ids for output in outputs], [output.prompt_token_ids for output in outputs]
        expected = [self.after(prompt, len(text), target) for prompt, text in zip(prompts, got, strict=True)]
        assert_same_greedy_texts(got, expected, prompts, lambda: nullcontext(self._models[target]))


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> Plain:
    return Plain(checkpoints)


def new_llm(checkpoints: Checkpoints, draft: str, target: str = "target", **flags: Any) -> LLM:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "max_running_requests": 5,
        "speculative_algorithm": "draft-model",
        "speculative_draft_model_path": checkpoints.path(draft),
        "speculative_num_steps": STEPS,
    }
    return LLM(model=checkpoints.path(target), **settings | flags)


def tracking(interval: int = TRACK_INTERVAL) -> dict[str, Any]:
    return {"mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": interval}


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def all_accepted(output: RequestOutput, num_drafts: int = STEPS) -> bool:
    """Check that every step but the last, which may be cut, has accepted all its drafts."""
    histogram = output.spec.accepted_histogram
    return output.spec.num_verify_steps <= histogram[num_drafts] + (len(output.token_ids) % (num_drafts + 1) > 0)


@dataclass(frozen=True)
class Draft:
    """The drafts after a text; ``probs`` [N, V] are the distributions that they were drawn from."""

    text: Tokens
    tokens: Tokens
    probs: Tensor | None
    parents: Tokens  # -1: padding


@dataclass(frozen=True)
class Recorder:
    """Records every draft of an engine."""

    drafts: list[Draft]

    @classmethod
    def of(cls, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Recorder:
        recorder, drafter = cls([]), llm.engine.runner.drafter
        assert isinstance(drafter, ModelDrafter)
        propose = drafter.propose

        def record(batch: Batch) -> DraftTree:
            tree = propose(batch)
            texts = {r.held_row: r.known_tokens(0, r.num_tokens) for r in llm.engine.scheduler.verifying}
            for i, row in enumerate(batch.rows):
                probs = None if tree.draft_probs is None else tree.draft_probs[i].clone()
                tokens, parents = tree.tokens[i, 1:].tolist(), tree.shape.parents[i, 1:].tolist()
                recorder.drafts.append(Draft(tuple(texts[row]), tuple(tokens), probs, tuple(parents)))
            return tree

        monkeypatch.setattr(drafter, "propose", record)
        return recorder

    @torch.inference_mode()
    def check(self, oracle: Any, temperature: float = 0.0) -> None:
        """Compare every draft with one forward of the model over the text and the drafts before it, without a cache."""
        assert self.drafts
        for draft in self.drafts:
            logits = oracle(torch.tensor([draft.text + draft.tokens])).logits[0, len(draft.text) - 1 : -1]
            if temperature:
                assert draft.probs is not None
                expected = (logits / temperature).softmax(-1)
                torch.testing.assert_close(draft.probs[: len(draft.tokens)], expected, atol=1e-4, rtol=1e-3)
                assert (expected.gather(1, torch.tensor(draft.tokens)[:, None]) > 0).all()
            else:
                assert draft.probs is None
                assert tuple(logits.argmax(-1).tolist()) == draft.tokens

    @torch.inference_mode()
    def check_trees(self, oracle: Any) -> None:
        """Compare the children of every node with the model's likeliest tokens after its path, without a cache."""
        assert self.drafts
        for draft in self.drafts:
            paths, children = dict[int, Tokens]({0: ()}), dict[int, list[int]]()
            for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
                if parent >= 0:
                    paths[node] = (*paths[parent], token)
                    children.setdefault(parent, []).append(token)
            for node, tokens in children.items():
                logits = oracle(torch.tensor([draft.text + paths[node]])).logits[0, -1]
                assert sorted(tokens) == sorted(logits.topk(len(tokens)).indices.tolist())


@pytest.fixture(scope="module")
def noisy(checkpoints: Checkpoints) -> Any:
    return checkpoints.oracle("noisy")


DRAFTS = ["other", "noisy", "target", "mamba2"]


class TestGreedyText:
    @pytest.mark.fast_cases("chunks-noisy", "chunks-mamba2")
    @pytest.mark.parametrize("draft", DRAFTS)
    @pytest.mark.parametrize(
        "flags", [{}, {"speculative_num_steps": 1, "page_size": 16, "chunked_prefill_size": 16}], ids=["", "chunks"]
    )
    def test_alone_and_in_a_batch(
        self, draft: str, flags: dict[str, Any], checkpoints: Checkpoints, plain: Plain
    ) -> None:
        with new_llm(checkpoints, draft, disable_radix_cache=True, **flags) as llm:
            together = llm.generate(PROMPTS, greedy(33))
            alone = [llm.generate(prompt, greedy(33))[0] for prompt in PROMPTS[1:3]]
            plain.check([*together, *alone])
            check_pools(llm)
            if draft == "target":
                assert all(all_accepted(out, llm.engine.draft_plan.num_steps) for out in (*together, *alone))

    @pytest.mark.parametrize("draft", ["target", "mamba2"])
    def test_a_target_without_attention(self, draft: str, checkpoints: Checkpoints, plain: Plain) -> None:
        with new_llm(checkpoints, draft, "mamba2", **tracking()) as llm:
            for _ in range(2):
                outputs = llm.generate(PROMPTS, greedy(24))
                plain.check(outputs, "mamba2")
                assert draft == "target" or all(map(all_accepted, outputs))
                check_pools(llm)

    @pytest.mark.fast_cases(3)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_follows_itself(self, family: str, tmp_path: Path) -> None:
        FAMILIES[family].build(tmp_path / family)
        checkpoints = Checkpoints(tmp_path)
        with new_llm(checkpoints, family, family, max_mamba_cache_size=256, **tracking()) as llm:
            for num_cached in (0, len(PROMPTS[2]) - 1):
                outputs = llm.generate(PROMPTS, greedy(24))
                assert outputs[2].num_cached_tokens == num_cached
                assert all(map(all_accepted, outputs))
                Plain(checkpoints).check(outputs, family)

    @pytest.mark.fast_cases("noisy")
    @pytest.mark.parametrize("draft", ["noisy", "target"])
    def test_with_snapshots_of_the_target(self, draft: str, checkpoints: Checkpoints, plain: Plain) -> None:
        with (
            new_llm(checkpoints, draft, speculative_state="snapshots", **tracking()) as llm,
            new_llm(checkpoints, draft, **tracking()) as records,
        ):
            for _ in range(2):
                outputs = llm.generate(PROMPTS, greedy(24))
                plain.check(outputs)
                assert [out.spec for out in outputs] == [out.spec for out in records.generate(PROMPTS, greedy(24))]
            check_pools(llm)

    @pytest.mark.parametrize(
        "flags",
        [
            {"dtype": "bfloat16"},
            {"dtype": "float16"},
            {"mamba_ssm_dtype": "bfloat16"},
            {"speculative_draft_model_quantization": "int8"},
        ],
        ids=lambda flags: "-".join(flags.values()),
    )
    def test_rounded_the_target_accepts_itself_often(self, flags: dict[str, Any], checkpoints: Checkpoints) -> None:
        """Not always, because running one token or four at a time rounds differently."""
        with new_llm(checkpoints, "target", **flags) as llm:
            for _ in range(2):  # the second time from the prefix cache
                for out in llm.generate(PROMPTS, greedy(40)):
                    assert out.spec.accept_length > 2.5

    def test_up_to_the_end_of_the_context_and_beyond(self, checkpoints: Checkpoints, plain: Plain) -> None:
        """The text is cut at the end of the context, the accepted path of the last step is not."""
        with new_llm(checkpoints, "target", context_length=64) as llm:
            for num_tokens in range(1, 6):
                plain.check(llm.generate((5,) * (64 - num_tokens), greedy(num_tokens)))
                check_pools(llm)


class TestDrafts:
    """What is drafted, against transformers."""

    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 8, "page_size": 4}], ids=["", "chunks"])
    def test_drafts_of_a_batch_and_of_its_prefixes(
        self, flags: dict[str, Any], checkpoints: Checkpoints, noisy: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with new_llm(checkpoints, "noisy", **tracking(), **flags) as llm:
            recorder = Recorder.of(llm, monkeypatch)
            outputs = llm.generate(PROMPTS, greedy(30))
            histories = [out.prompt_token_ids + out.token_ids for out in outputs]
            outputs += llm.generate([histories[0] + (11, 12), (*histories[2][:-9], 13)], greedy(12))
            assert min(out.num_cached_tokens for out in outputs[-2:]) > 20
            plain.check(outputs)
            recorder.check(noisy)
            histogram = llm.engine.stats().spec.accepted_histogram
            assert all(count > 3 for count in histogram)  # it is right, wrong, and everything between
            check_pools(llm)

    def test_drafts_of_other_models(self, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
        for draft in ("other", "mamba2"):
            with new_llm(checkpoints, draft) as llm:
                recorder = Recorder.of(llm, monkeypatch)
                llm.generate(PROMPTS, greedy(12))
                recorder.check(checkpoints.oracle(draft))

    def test_drafts_when_rows_come_and_go(
        self, checkpoints: Checkpoints, noisy: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rows of a batch stop being consecutive, and are used again."""
        with new_llm(checkpoints, "noisy", disable_radix_cache=True, chunked_prefill_size=16) as llm:
            recorder, engine = Recorder.of(llm, monkeypatch), llm.engine
            for i, prompt in enumerate(PROMPTS):
                engine.add_request(str(i), prompt, greedy(30))
            deltas = [delta for _ in range(6) for delta in engine.step()]
            engine.abort("1")
            deltas += [delta for _ in range(3) for delta in engine.step()]
            engine.add_request("new", PROMPTS[2][3:], greedy(20))
            engine.abort("3")
            deltas += list(run(llm))
            for i, prompt in enumerate(PROMPTS):
                assert tokens_of(deltas, str(i)) == plain.after(prompt, 30)[: len(tokens_of(deltas, str(i)))]
            assert tokens_of(deltas, "new") == plain.after(PROMPTS[2][3:], 20)
            recorder.check(noisy)
            check_pools(llm)

    def test_drafts_of_requests_that_are_preempted(
        self, checkpoints: Checkpoints, noisy: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with new_llm(checkpoints, "noisy", chunked_prefill_size=8) as llm:
            recorder, engine = Recorder.of(llm, monkeypatch), llm.engine
            for i, prompt in enumerate(PROMPTS[:3]):
                engine.add_request(str(i), prompt, greedy(30))
            deltas = run_preempting(llm)
            assert engine.stats().num_preemptions >= 5
            for i, prompt in enumerate(PROMPTS[:3]):
                assert tokens_of(deltas, str(i)) == plain.after(prompt, 30)
            recorder.check(noisy)
            check_pools(llm)

    def test_drafts_of_a_replayed_text(
        self, checkpoints: Checkpoints, noisy: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replay = tuple(torch.randint(131, (25,), generator=torch.Generator().manual_seed(3)).tolist())
        with new_llm(checkpoints, "noisy") as llm:
            recorder = Recorder.of(llm, monkeypatch)
            llm.engine.add_request("a", PROMPTS[0], greedy(len(replay)), replay)
            assert tokens_of(list(run(llm)), "a") == replay
            recorder.check(noisy)


TREE: dict[str, Any] = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8}
WHOLE_TREE: dict[str, Any] = {
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 7,
}


class TestTrees:
    """Dynamic trees: the text is the target's, and what is drafted is what the draft model says."""

    @pytest.mark.fast_cases("noisy")
    @pytest.mark.parametrize("draft", DRAFTS)
    def test_the_text_and_the_trees(
        self, draft: str, checkpoints: Checkpoints, plain: Plain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a batch, from the prefix cache, and alone; rows have different numbers of pending tokens."""
        with new_llm(checkpoints, draft, **tracking(), **TREE) as llm:
            recorder = Recorder.of(llm, monkeypatch)
            outputs = llm.generate(PROMPTS, greedy(14))
            histories = [out.prompt_token_ids + out.token_ids for out in outputs]
            outputs += llm.generate([histories[0] + (11, 12), (*histories[2][:-3], 13)], greedy(8))
            assert min(out.num_cached_tokens for out in outputs[-2:]) > 10
            plain.check(outputs)
            recorder.check_trees(checkpoints.oracle(draft))
            assert any(len(set(found.parents)) < len(found.parents) for found in recorder.drafts)  # siblings
            check_pools(llm)

    @pytest.mark.parametrize("target", ["target", "mamba2"])
    def test_the_target_follows_itself(self, target: str, checkpoints: Checkpoints, plain: Plain) -> None:
        """Chosen, and drawn for acceptance by rejection: a first child is always accepted."""
        drawn = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
        with new_llm(checkpoints, target, target, **WHOLE_TREE, **tracking()) as llm:
            for _ in range(2):
                outputs = llm.generate(PROMPTS, greedy(24))
                plain.check(outputs, target)
                assert all(all_accepted(output, 2) for output in outputs)
            assert all(all_accepted(output, 2) for output in llm.generate(PROMPTS, drawn))
            check_pools(llm)

    def test_requests_that_are_preempted(
        self, checkpoints: Checkpoints, noisy: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with new_llm(checkpoints, "noisy", chunked_prefill_size=8, **TREE) as llm:
            recorder, engine = Recorder.of(llm, monkeypatch), llm.engine
            for i, prompt in enumerate(PROMPTS[:3]):
                engine.add_request(str(i), prompt, greedy(16))
            deltas = run_preempting(llm)
            assert engine.stats().num_preemptions >= 3
            for i, prompt in enumerate(PROMPTS[:3]):
                assert tokens_of(deltas, str(i)) == plain.after(prompt, 16)
            recorder.check_trees(noisy)
            check_pools(llm)


def run_preempting(llm: LLM) -> list[OutputDelta]:
    """Preempt a request after two steps of three."""
    engine, deltas = llm.engine, list[OutputDelta]()
    for step in itertools.count():
        deltas += engine.step()
        if not engine.has_unfinished_requests:
            break
        running = [*engine.scheduler.extending, *engine.scheduler.verifying]
        if running and step % 3 < 2:
            with torch.inference_mode():
                engine.preempt(running[step % len(running)])
    return deltas


def run(llm: LLM) -> Iterator[OutputDelta]:
    while llm.engine.has_unfinished_requests:
        yield from llm.engine.step()


def tokens_of(deltas: Sequence[OutputDelta], request_id: str) -> Tokens:
    return tuple(token for delta in deltas if delta.request_id == request_id for token in delta.token_ids)


class TestPrefixCache:
    """The prefix cache holds the draft model's states too."""

    def test_every_position_that_is_tracked(self, checkpoints: Checkpoints, plain: Plain) -> None:
        """Steps have four tokens, so that some of these positions come after a draft that was not run yet."""
        prompt, num_tokens = PROMPTS[0], 44
        with new_llm(checkpoints, "target", max_mamba_cache_size=800, **tracking(1)) as llm:
            first = llm.generate(prompt, greedy(num_tokens))[0]
            assert all_accepted(first)
            history = prompt + first.token_ids
            for position in range(len(prompt) + 1, len(history) - 1):
                if not is_tracked(position - len(prompt)):
                    continue
                again = llm.generate((*history[:position], 77), greedy(9))[0]
                assert again.num_cached_tokens == position
                assert all_accepted(again)
                plain.check([again])
            check_pools(llm)

    @pytest.mark.fast_cases(3)
    @pytest.mark.parametrize("draft", ["noisy", "target"])
    @pytest.mark.parametrize("num_tokens", [9, 10, 11, 12])
    def test_continuing_a_finished_request(
        self, draft: str, num_tokens: int, checkpoints: Checkpoints, plain: Plain
    ) -> None:
        """It may end at any draft of a step; the next request drafts as if the whole text had been run at once."""
        with new_llm(checkpoints, draft) as llm, new_llm(checkpoints, draft, disable_radix_cache=True) as cold:
            outputs = llm.generate(PROMPTS[:3], greedy(num_tokens))
            for out in outputs:
                text = out.prompt_token_ids + out.token_ids + (70, 71)
                hit, without = llm.generate(text, greedy(25))[0], cold.generate(text, greedy(25))[0]
                assert hit.num_cached_tokens == len(text) - 3
                assert hit.spec == without.spec
                plain.check([hit])
            check_pools(llm)

    def test_requests_that_end_together_catch_up_together(
        self, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with new_llm(checkpoints, "target") as llm:
            drafter, runs = llm.engine.runner.drafter, list[Tokens]()
            assert isinstance(drafter, ModelDrafter)
            real = drafter._run

            def count(rows: Sequence[int], *args: Any) -> Tensor:
                runs.append(tuple(rows))
                return real(rows, *args)

            monkeypatch.setattr(drafter, "_run", count)
            llm.generate([(i, 7, 8) for i in range(1, 6)], greedy(8))
            assert runs == [(1, 2, 3, 4, 5)] * (2 * STEPS + 1)  # two drafts, and the last draft of the second

    def test_evicted_prefixes_are_computed_again(self, checkpoints: Checkpoints, plain: Plain) -> None:
        flags: dict[str, Any] = {"context_length": 80, "max_total_tokens": 120, "max_mamba_cache_size": 5}
        with new_llm(checkpoints, "target", max_running_requests=2, **flags) as llm:
            for _ in range(2):
                outputs = llm.generate(PROMPTS, greedy(24))
                plain.check(outputs)
                assert all(map(all_accepted, outputs))
            assert llm.engine.stats().prefix_cache.evicted_tokens > 0
            check_pools(llm)

    def test_aborts_leave_nothing_behind(self, checkpoints: Checkpoints, plain: Plain) -> None:
        with new_llm(checkpoints, "target", chunked_prefill_size=8) as llm:
            for num_steps in (1, 2, 5, 8):
                for i, prompt in enumerate(PROMPTS):
                    llm.engine.add_request(str(i), prompt, greedy(30))
                for _ in range(num_steps):
                    llm.engine.step()
                for i in range(len(PROMPTS)):
                    llm.engine.abort(str(i))
                check_pools(llm)
            outputs = llm.generate(PROMPTS, greedy(20))
            plain.check(outputs)
            assert all(map(all_accepted, outputs))


class TestSampling:
    def test_a_seed_decides_whatever_drafts(self, checkpoints: Checkpoints) -> None:
        params = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
        texts = []
        for draft in ("other", "noisy"):
            with new_llm(checkpoints, draft) as llm:
                texts.append([out.token_ids for out in llm.generate(PROMPTS, params)])
        assert texts[0] == texts[1]

    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("temperature", [0.5, 1.0])
    def test_drafts_are_drawn_from_the_models_distribution(
        self, temperature: float, checkpoints: Checkpoints, noisy: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
        with new_llm(checkpoints, "noisy", speculative_accept="rejection") as llm:
            recorder = Recorder.of(llm, monkeypatch)
            for _ in range(2):
                outputs = llm.generate(PROMPTS, params)
            recorder.check(noisy, temperature)
            assert 1.2 < llm.engine.stats().spec.accept_length < STEPS + 1
            assert all(out.spec.num_accepted_tokens for out in outputs)

    def test_by_rejection_the_target_accepts_all_of_its_own_draws(self, checkpoints: Checkpoints) -> None:
        params = [
            SamplingParams(max_tokens=24, temperature=t, top_k=k, seed=i, ignore_eos=True)
            for i, (t, k) in enumerate([(0.3, 0), (0.7, 20), (1.0, 0), (1.5, 5), (0.0, 0)])
        ]
        with new_llm(checkpoints, "target", speculative_accept="rejection") as llm:
            for _ in range(2):
                assert all(map(all_accepted, llm.generate(PROMPTS, params)))


class TestSettings:
    def test_a_draft_of_another_vocabulary_is_refused(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        write_tiny_checkpoint(tmp_path / "words", 2, with_mtp=False, vocab_size=140)
        flags = {"speculative_draft_model_path": str(tmp_path / "words")}
        with pytest.raises(ConfigError, match="its vocabulary has 140 tokens, the target's 131"):
            new_llm(checkpoints, "other", **flags)

    def test_a_wrong_draft_is_refused_before_anything_is_read(
        self, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_: TensorReader, name: str) -> None:
            raise AssertionError(f"{name} was read")

        monkeypatch.setattr(TensorReader, "_read", refuse)
        self.test_a_draft_of_another_vocabulary_is_refused(checkpoints, tmp_path)
        self.test_static_trees_are_refused(checkpoints, tmp_path)
        self.test_a_draft_of_another_tokenizer_is_refused(checkpoints, tmp_path)
        with pytest.raises(ConfigError, match="holds a draft of the kind draft-model: choose draft-model or auto"):
            new_llm(checkpoints, "other", speculative_algorithm="eagle3")
        write_tiny_checkpoint(tmp_path / "short", 2, with_mtp=False, max_position_embeddings=64)
        with pytest.raises(ConfigError, match=r"^speculative_draft_model_path .*/short: the draft model was made for"):
            new_llm(checkpoints, "other", speculative_draft_model_path=str(tmp_path / "short"))

    def test_a_draft_of_another_tokenizer_is_refused(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        folder = tmp_path / "tokens"
        shutil.copytree(checkpoints.path("other"), folder)
        file = folder / "tokenizer.json"
        tokenizer = json.loads(file.read_text("utf8"))
        vocab = tokenizer["model"]["vocab"]
        ours = {number: token for token, number in vocab.items()}
        vocab[ours[300]], vocab[ours[301]] = 301, 300
        file.write_text(json.dumps(tokenizer), "utf8")
        with pytest.raises(ConfigError) as refused:
            new_llm(checkpoints, "other", speculative_draft_model_path=str(folder))
        words = (
            f"2 tokens have other numbers than in the target's tokenizer, the first is {min(ours[300], ours[301])!r}: "
        )
        assert f"speculative_draft_model_path {folder}: {words}" in str(refused.value)

    def test_a_draft_without_a_tokenizer_is_taken(
        self, checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = tmp_path / "bare"
        shutil.copytree(checkpoints.path("target"), folder)
        for file in folder.glob("tokenizer*"):
            file.unlink()
        with new_llm(checkpoints, "target", speculative_draft_model_path=str(folder)) as llm:
            assert all_accepted(llm.generate(PROMPTS[0], greedy(12))[0])
        assert f"{folder} has no tokenizer: it is taken to be the target's" in caplog.text

    def test_static_trees_are_refused(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        """Also if only the checkpoint tells that it is a draft model."""
        tree = tmp_path / "tree.json"
        tree.write_text(TreeFile(trees=(StaticTree(parents=(-1, 0, 0), ranks=(0, 0, 1)),)).model_dump_json(), "utf8")
        flags: dict[str, Any] = {"speculative_num_steps": None, "speculative_tree": tree}
        with pytest.raises(ConfigError, match="drafts chains and dynamic trees: drop speculative_tree"):
            new_llm(checkpoints, "other", speculative_algorithm="auto", **flags)

    def test_a_draft_of_a_shorter_context_needs_a_limit(
        self, checkpoints: Checkpoints, plain: Plain, tmp_path: Path
    ) -> None:
        write_tiny_checkpoint(tmp_path / "short", 2, with_mtp=False, max_position_embeddings=64)
        flags = {"speculative_draft_model_path": str(tmp_path / "short")}
        with pytest.raises(ConfigError, match="made for 64 tokens, but texts may have 100: set context_length 64"):
            new_llm(checkpoints, "other", context_length=100, **flags)
        with pytest.raises(ConfigError, match="made for 64 tokens, but texts may have 512"):
            new_llm(checkpoints, "other", context_length=None, **flags)
        with new_llm(checkpoints, "other", context_length=64, **flags) as llm:
            plain.check(llm.generate(PROMPTS[0], greedy(60)))

    def test_what_an_engine_says_of_its_draft(self, checkpoints: Checkpoints) -> None:
        with new_llm(checkpoints, "mamba2", speculative_algorithm="auto") as llm:
            said = llm.engine.describe()
            assert said["speculative_algorithm"] == "draft-model"
            assert said["draft_model"] == checkpoints.path("mamba2")
            assert said["draft_architecture"] == "Mamba2ForCausalLM"
            oracle = checkpoints.oracle("mamba2")
            assert said["draft_parameters"] == sum(p.numel() for p in oracle.parameters())
        with LLM(model=checkpoints.path("target"), speculative_algorithm="none", context_length=64) as llm:
            assert llm.engine.describe()["draft_model"] is None

    def test_drafts_are_changed_between_requests(self, checkpoints: Checkpoints, plain: Plain) -> None:
        with new_llm(checkpoints, "target") as llm:
            bench, outputs = Workbench(llm.engine), llm.generate(PROMPTS, greedy(20))
            draft = checkpoints.path("target")
            bench.use_drafts(speculative_algorithm="none")
            outputs += llm.generate(PROMPTS, greedy(20))
            bench.use_drafts(speculative_draft_model_path=draft, speculative_num_steps=2)
            shorter = llm.generate(PROMPTS, greedy(18))
            plain.check([*outputs, *shorter])
            assert all(all_accepted(out, 2) for out in shorter)

    def test_the_old_drafter_goes_before_the_new_one_comes(
        self, checkpoints: Checkpoints, plain: Plain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with new_llm(checkpoints, "target") as llm:
            bench, engine = Workbench(llm.engine), llm.engine
            old, make, made = weakref.ref(engine.runner.drafter), engine.make_drafter, list[bool]()

            def watch(*arguments: Any) -> Any:
                made.append(old() is None)
                if len(made) == 2:
                    raise MemoryError
                return make(*arguments)

            monkeypatch.setattr(engine, "make_drafter", watch)
            bench.use_drafts(speculative_num_steps=2)
            with pytest.raises(MemoryError):
                bench.use_drafts(speculative_num_steps=1)
            assert made == [True] * 3  # the last one is what it had
            monkeypatch.undo()
            before = engine.runner.drafter
            with pytest.raises(ConfigError, match="started for"):
                bench.use_drafts(speculative_num_steps=3, speculative_eagle_topk=4, speculative_num_draft_tokens=8)
            missing = {"speculative_ngram_corpus": Path("/nowhere/at/all"), "speculative_num_draft_tokens": 3}
            with pytest.raises(ConfigError, match="cannot be read"):
                bench.use_drafts(speculative_algorithm="ngram", **missing)
            assert engine.runner.drafter is before
            outputs = llm.generate(PROMPTS, greedy(18))
            plain.check(outputs)
            assert all(all_accepted(out, 2) for out in outputs)


SHAPE = CacheShape(
    kv=(KVShape(2, 2, 3),),
    num_state_layers=2,
    state=StateShape(num_key_heads=1, num_value_heads=2, key_dim=3, value_dim=5, conv_width=4),
    dtype=torch.float32,
)
DRAFT = CacheShape(
    kv=(KVShape(1, 1, 4), KVShape(1, 2, 2)),
    num_state_layers=3,
    state=StateShape(num_key_heads=2, num_value_heads=2, key_dim=2, value_dim=3, conv_width=3),
    dtype=torch.float32,
)


class TestMemory:
    def test_bytes_of_a_draft_model(self) -> None:
        flags: dict[str, Any] = {"max_running_requests": 3, "max_total_tokens": 200, "speculative_accept": "target"}
        flags["disable_cuda_graph"] = True
        shape, config = SHAPE.with_draft_model(DRAFT), EngineConfig(**flags)
        with_draft, without = (plan_memory(config, s, 100, 50, 4, 4, 1 << 30) for s in (shape, SHAPE))
        states = DraftStates(DRAFT, 3, 4, CPU)
        floats = [*vars(states._pool).values(), *vars(states._records).values()]
        held = sum(x.nbytes for x in floats if isinstance(x, Tensor))
        assert with_draft.draft_bytes == held + 4 * 2 * 8  # two tokens of every row
        pool = StatePool(shape, with_draft.num_state_slots, CPU)
        assert pool.features.shape[2] == states.values(1, 0).numel()
        assert with_draft.state_bytes == sum(x.nbytes for x in (pool.recurrent, pool.conv, pool.features))
        assert with_draft.kv_bytes - without.kv_bytes == 201 * 2 * (4 + 4) * 4
        assert with_draft.spec_bytes == without.spec_bytes
        assert with_draft.table_bytes == without.table_bytes
        more = plan_memory(config, shape, 100, 50, 17, 17, 1 << 30)
        of_both = 2 * (SHAPE.record_bytes_per_token + DRAFT.record_bytes_per_token)
        assert more.record_bytes_per_draft_token == of_both
        drawn = plan_memory(config.model_copy(update={"speculative_accept": "auto"}), shape, 100, 50, 17, 17, 1 << 30)
        assert drawn.record_bytes_per_draft_token == of_both + 6 * 4 * 50  # distributions
        parts = with_draft.kv_bytes + with_draft.state_bytes + with_draft.spec_bytes + with_draft.table_bytes
        assert with_draft.total_bytes == parts + with_draft.draft_bytes

    def test_it_is_in_the_table_and_in_the_advice(self) -> None:
        shape, config = SHAPE.with_draft_model(DRAFT), EngineConfig(max_running_requests=500)
        lines = plan_memory(config, shape, 100, 50, 4, 4, 1 << 30).describe_lines()
        assert [line for line in lines if line.startswith("draft model") and "for 500 rows" in line]
        assert not any(
            "draft model" in line for line in plan_memory(config, SHAPE, 100, 50, 4, 4, 1 << 30).describe_lines()
        )
        with pytest.raises(ConfigError, match=r"\d+ for the draft model's states, \d+ for their tables"):
            plan_memory(config, shape, 100, 50, 4, 4, 100)


class Records:
    """Spec buffers of rows 1 and 2, to which random records are added."""

    def __init__(self) -> None:
        self.pool = StatePool(DRAFT, 4, CPU)
        self.buffers = RecordBuffers(DRAFT, self.pool, 2, 4, CPU)
        for row in (1, 2):
            slot = self.pool.allocate(f"row {row}")
            assert slot == row
            self.buffers.begin(row, row, f"row {row}", 0)
        self.target = self.pool.allocate("target")

    def add(self, *rows: int) -> None:
        """A record of random numbers for each row."""
        s, size = DRAFT.state, len(rows)
        plan = self.buffers.plan(rows, chain_shape(size, 1, CPU))
        for layer in range(DRAFT.num_state_layers):
            operands = self.buffers.operands(layer, plan)
            causal_conv1d.advance(torch.randn(size, 1, s.conv_channels), torch.rand(s.conv_channels, 3), None, operands)
            q, k = torch.randn(2, size, 1, s.num_key_heads, s.key_dim)
            v = torch.randn(size, 1, s.num_value_heads, s.value_dim)
            g, beta = -torch.rand(size, 1, s.num_value_heads), torch.rand(size, 1, s.num_value_heads)
            gated_delta_rule.advance(q, k, v, g, beta, operands)
        self.buffers.commit(
            plan, torch.zeros(size, 1, dtype=torch.int64), torch.zeros(size, dtype=torch.int64), [0] * size
        )

    def state(self, row: int, position: int) -> tuple[Tensor, Tensor]:
        assert self.target is not None
        self.buffers.materialize(row, position, self.target)
        return self.pool.recurrent[:, self.target].clone(), self.pool.conv[:, self.target].clone()


class TestRollingBack:
    def test_records_after_a_rollback_continue_from_there(self) -> None:
        records, straight = Records(), Records()
        for made in (records, straight):
            torch.manual_seed(1)
            for _ in range(5):
                made.add(1, 2)
        for _ in range(4):
            records.add(1)
        before = records.state(2, 5)
        records.buffers.roll_back(1, 5)
        assert records.buffers.positions(1) == range(6)
        for made in (records, straight):
            torch.manual_seed(2)
            made.add(1)
            made.add(1)
        for ours, other in zip(records.state(1, 7), straight.state(1, 7), strict=True):
            torch.testing.assert_close(ours, other, atol=0, rtol=0)
        for now, was in zip(records.state(2, 5), before, strict=True):
            torch.testing.assert_close(now, was, atol=0, rtol=0)

    def test_a_rollback_before_the_checkpoint_or_past_the_state_is_refused(self) -> None:
        records = Records()
        for _ in range(10):
            records.add(1)
        records.buffers.reserve([1, 2], 6)
        assert records.buffers.positions(1) == range(11)
        records.buffers.reserve([1, 2], 7)  # sixteen records fit
        assert records.buffers.positions(1) == range(10, 11)
        assert records.buffers.positions(2) == range(1)
        records.add(1)
        for position in (9, 12):
            with pytest.raises(ValueError, match=f"row 1 has no state at position {position}: only 10 to 11"):
                records.buffers.roll_back(1, position)
        records.buffers.roll_back(1, 10)
        assert records.buffers.position(1) == 10

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_state_is_carried_to_another_row_unchanged(self, dtype: torch.dtype) -> None:
        states = DraftStates(replace(DRAFT, dtype=dtype), 2, 4, CPU)
        states._pool.recurrent.normal_()
        states._pool.conv.normal_()
        states.load(2, states.values(1, 0), 7)
        for x in (states._pool.recurrent, states._pool.conv):
            assert torch.equal(x[:, 1], x[:, 2])
        assert torch.equal(states.values(2, 7), states.values(1, 0))
        states.begin(2)
        assert not states.values(2, 0).any()


class TestOwnership:
    """A state at another position than the text is an error, and not just a bad draft."""

    def test_a_chunk_that_is_left_out(self, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
        for left_out in range(3):
            with new_llm(checkpoints, "other", chunked_prefill_size=16) as llm:
                drafter = llm.engine.runner.drafter
                extend, chunks = drafter.extend, itertools.count()

                def skip(
                    *chunk: Any, extend: Any = extend, chunks: Iterator[int] = chunks, left_out: int = left_out
                ) -> None:
                    if next(chunks) != left_out:
                        extend(*chunk)

                monkeypatch.setattr(drafter, "extend", skip)
                place = min(40, 16 * left_out + 16)
                with pytest.raises(EngineFailedError, match=f"StateOwnershipError: .*draft of row 1' at {place}, but"):
                    llm.generate(PROMPTS[2], greedy(4))

    def test_a_cached_state_that_is_not_loaded(self, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
        with new_llm(checkpoints, "other") as llm:
            llm.generate(PROMPTS[0], greedy(4))
            monkeypatch.setattr(DraftStates, "load", lambda *_: None)
            with pytest.raises(EngineFailedError, match=r"StateOwnershipError: .*at 3, but holds"):
                llm.generate(PROMPTS[0], greedy(4))
        with new_llm(checkpoints, "other") as llm:
            llm.generate(PROMPTS[0], greedy(4))
            with pytest.raises(EngineFailedError, match=r"StateOwnershipError: .*at 3, but holds"):
                llm.generate(PROMPTS[0] + PROMPTS[0], greedy(4))

    def test_a_state_that_is_asked_for_elsewhere(self) -> None:
        states = DraftStates(DRAFT, 2, 4, CPU)
        states.load(1, states.values(1, 0), 5)
        for ask in (lambda: states.values(1, 4), lambda: states.start(1, 6)):
            with pytest.raises(StateOwnershipError, match="but holds"):
                ask()
        states.start(1, 5)
        with pytest.raises(ValueError, match="no state at position 4"):
            states.values(1, 4)


def test_a_draft_that_overflows_is_not_cached(checkpoints: Checkpoints, plain: Plain) -> None:
    with new_llm(checkpoints, "mamba2", **tracking()) as llm:
        drafter = llm.engine.runner.drafter
        assert isinstance(drafter, ModelDrafter)
        llm.engine.add_request("a", PROMPTS[0], greedy(20))
        deltas = llm.engine.step()
        drafter._states._pool.recurrent[:, 1] = torch.inf
        deltas += run(llm)
        text = tokens_of(deltas, "a")
        assert not drafter._states._pool.recurrent[:, 1].isfinite().any()
        assert llm.engine.pools.states.features.isfinite().all()
        again = llm.generate((*PROMPTS[0], *text, 70), greedy(9))[0]
        assert again.num_cached_tokens > len(PROMPTS[0])
        assert drafter._states._pool.recurrent[:, 1].isfinite().all()
        assert text == plain.after(PROMPTS[0], 20)
        plain.check([again])


def test_a_prediction_is_refused(checkpoints: Checkpoints) -> None:
    with new_llm(checkpoints, "noisy") as llm:
        params = SamplingParams(max_tokens=4, prediction=[1, 2])
        with pytest.raises(RequestError, match="drafts with a model of its own") as refused:
            llm.generate(PROMPTS[0], params)
        assert refused.value.param == "prediction"
