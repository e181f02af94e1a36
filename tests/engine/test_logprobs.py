"""Log probabilities of prompts and outputs, biases, requests without drafts, prompts that are only run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.cache.prefix.inspection import WHOLE
from specmamba.config import DEMO_MODEL
from specmamba.core import TokenLogprob
from specmamba.draft.draft_model import ModelDrafter
from specmamba.errors import PromptTooLongError, RequestError
from specmamba.kernels import sampling as sampling_ops
from specmamba.kernels.sampling import reference

PROMPT = "import os\n\ndef read_file(path):\n    "
OTHER = "class Stack:\n    def __init__(self):\n"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
CLOSE = 2e-4
KINDS: dict[str, dict[str, Any]] = {
    "chain": {"speculative_num_steps": 3},
    "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_state": "snapshots"},
    "ngram": {"speculative_algorithm": "ngram"},
}


@pytest.fixture(scope="module", params=KINDS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(dtype="float32", max_total_tokens=2048, chunked_prefill_size=7, **KINDS[request.param]) as llm:
        yield llm


def logits_of(llm: LLM, tokens: list[int]) -> Tensor:
    """The target's logits after every token but the last, [L - 1, V], led along them step by step."""
    seen: list[Tensor] = []
    llm.engine.runner.probe.on_logits = lambda logits: seen.append(logits[0, 0].clone())
    try:
        params = SamplingParams(max_tokens=len(tokens) - 1, temperature=0.0, ignore_eos=True, speculative=False)
        llm.generate([tokens[:1]], params, replay=[tokens[1:]])
    finally:
        llm.engine.runner.probe.on_logits = None
    return torch.stack(seen)


def assert_agree(found: tuple[TokenLogprob | None, ...], logits: Tensor, tokens: list[int], num_top: int) -> None:
    expected = logits.log_softmax(-1)
    assert len(found) == len(tokens)
    for entry, token, row in zip(found, tokens, expected, strict=True):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=CLOSE)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=CLOSE)
        assert all(value == pytest.approx(row[which].item(), abs=CLOSE) for which, value in entry.top)


@pytest.mark.fast_cases("chain-0.0")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_figures_are_those_of_the_target(llm: LLM, temperature: float) -> None:
    params = SamplingParams(
        max_tokens=24, temperature=temperature, seed=3, top_p=0.9, frequency_penalty=0.5, logprobs=3, prompt_logprobs=2
    )
    out, silent = llm.generate([PROMPT, OTHER], [params, GREEDY])
    assert silent.logprobs == ()
    assert silent.prompt_logprobs is None
    logits = logits_of(llm, [*out.prompt_token_ids, *out.token_ids])
    start = len(out.prompt_token_ids)
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert_agree(out.prompt_logprobs[1:], logits[: start - 1], list(out.prompt_token_ids[1:]), 2)
    assert_agree(out.logprobs, logits[start - 1 :], list(out.token_ids), 3)


def test_a_cached_prompt_has_the_same_figures(llm: LLM) -> None:
    params = GREEDY.model_copy(update={"prompt_logprobs": 1, "max_tokens": 2})
    first, second = (llm.generate([PROMPT], params)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert first.prompt_logprobs == second.prompt_logprobs
    plain = llm.generate([PROMPT], GREEDY)[0]  # what scoring leaves is of use to others
    assert plain.num_cached_tokens == len(plain.prompt_token_ids) - 1


def test_prompts_that_are_run_together(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    prompts = [[9] * 3, [8] * 7, list(range(20, 31))]
    together = llm.generate(prompts, params)
    for prompt, out in zip(prompts, together, strict=True):
        assert out.prompt_logprobs is not None
        assert_agree(out.prompt_logprobs[1:], logits_of(llm, prompt), prompt[1:], 1)


def test_asking_changes_no_text(llm: LLM) -> None:
    silent = llm.generate([PROMPT, OTHER], GREEDY)
    asked = llm.generate([PROMPT, OTHER], GREEDY.model_copy(update={"logprobs": 0, "prompt_logprobs": 0}))
    assert [out.token_ids for out in silent] == [out.token_ids for out in asked]


@pytest.mark.fast_cases(1)
def test_without_drafts_the_text_is_the_same(llm: LLM) -> None:
    plainly = GREEDY.model_copy(update={"speculative": False})
    expected = llm.generate([PROMPT, OTHER], GREEDY)
    alone = [llm.generate([prompt], plainly)[0] for prompt in (PROMPT, OTHER)]
    mixed = llm.generate([PROMPT, OTHER], [plainly, GREEDY])
    for out in (*alone, mixed[0]):
        assert out.spec.num_draft_tokens == 0
    assert [out.token_ids for out in expected] == [out.token_ids for out in alone] == [out.token_ids for out in mixed]
    # a head that was told nothing for many steps catches up when drafts are wanted again
    long = SamplingParams(max_tokens=40, temperature=0.0, speculative=False, ignore_eos=True)
    assert llm.generate([PROMPT], long)[0].token_ids[:24] == expected[0].token_ids[:24]


def test_depths_tell_drafts_from_the_targets_own_tokens(llm: LLM) -> None:
    num_accepted = num_steps = 0
    for delta in llm.stream(PROMPT, GREEDY):
        assert len(delta.depths) == len(delta.token_ids)
        assert delta.depths == (*range(1, len(delta.depths)), 0) or delta.finish_reason is not None
        num_accepted, num_steps = delta.spec.num_accepted_tokens, delta.spec.num_verify_steps
    assert num_accepted + num_steps == 24


def test_drafts_can_be_looked_at(llm: LLM) -> None:
    llm.engine.watch_drafts((WHOLE,))
    out = llm.generate([PROMPT], GREEDY)[0]
    views = llm.engine.last_drafts()
    llm.engine.watch_drafts(())
    assert len(views) == out.spec.num_verify_steps
    assert llm.engine.last_drafts() == ()
    tokens = [token for view in views for token in (*(view.tokens[node] for node in view.path[1:]), view.bonus)]
    assert tuple(tokens[:24]) == out.token_ids
    for view in views:
        assert all(parent < node for node, parent in enumerate(view.parents))
        assert all(view.parents[b] == a for a, b in zip(view.path, view.path[1:], strict=False))


@pytest.mark.fast_cases(1)
def test_biases(llm: LLM) -> None:
    forced = SamplingParams(max_tokens=4, temperature=0.0, logit_bias={77: 100.0}, ignore_eos=True)
    free, biased = llm.generate([PROMPT, PROMPT], [GREEDY, forced])
    assert biased.token_ids == (77,) * 4
    assert free.token_ids == llm.generate([PROMPT], GREEDY)[0].token_ids
    banned = dict.fromkeys(set(free.token_ids), -100.0)
    out = llm.generate([PROMPT], GREEDY.model_copy(update={"logit_bias": banned, "logprobs": 0}))[0]
    assert not set(out.token_ids) & set(free.token_ids)
    with pytest.raises(RequestError, match="token id 4096"):
        llm.generate([PROMPT], SamplingParams(logit_bias={4096: 1.0}))


def test_a_prompt_that_is_only_run(llm: LLM) -> None:
    length = llm.engine.context_length
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for prompt in ([5], [5, 6], [7] * 40):
        out = llm.generate([prompt], params)[0]
        assert (out.text, out.finish_reason) == ("", "length")
        assert out.prompt_logprobs is not None
        assert len(out.prompt_logprobs) == len(prompt)
    with pytest.raises(PromptTooLongError):
        llm.generate([[5] * (length + 1)], params)
    stats = llm.engine.stats()
    assert (stats.num_running, stats.kv_used_tokens, stats.state_used_slots) == (0, 0, 0)


@pytest.mark.usefixtures("no_headroom")
def test_a_preempted_request_keeps_its_figures() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(dtype="float32", max_total_tokens=96, max_running_requests=3) as llm:
        outs = llm.generate([PROMPT, OTHER, "def f(x):\n"], params)
        assert llm.engine.stats().num_preemptions > 0
        for out in outs:
            tokens = [*out.prompt_token_ids, *out.token_ids]
            logits = logits_of(llm, tokens)
            assert out.prompt_logprobs is not None
            assert_agree((*out.prompt_logprobs[1:], *out.logprobs), logits, tokens[1:], 0)


@pytest.mark.parametrize("seed", range(3))
def test_operators_agree_with_their_references(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, 70, generator=generator) * 4
    rows, tokens, values = torch.tensor([0, 0, 2]), torch.tensor([5, 69, 31]), torch.tensor([0.0625, -100.0, 3.0])
    for x in (logits, (logits * 5).bfloat16()):
        biased = sampling_ops.add_bias(x, rows, tokens, values)
        assert torch.equal(biased, reference.add_bias(x, rows, tokens, values))
        assert biased[0, 0, 5] == x[0, 0, 5].float() + 0.0625
    bits = torch.randint(-(2**31), 2**31 - 1, (3, 4, 3), generator=generator).to(torch.int32)
    assert torch.equal(sampling_ops.allow_tokens(logits, bits), reference.allow_tokens(logits, bits))
    which = torch.randint(0, 70, (3, 4), generator=generator)
    for found, expected in zip(
        sampling_ops.token_logprobs(logits, which, 5),
        reference.token_logprobs(logits, which, 5),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_a_prompt_whose_second_pass_ends_its_chunks_elsewhere_is_scored_whole() -> None:
    prompt = [i * 37 % 3000 + 10 for i in range(100)]
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(dtype="float32", speculative_algorithm="none", max_total_tokens=512, chunked_prefill_size=16) as llm:
        engine = llm.engine
        engine.add_request("scored", prompt, scored)
        for _ in range(3):
            engine.step()
        with torch.inference_mode():
            engine.preempt(next(iter(engine.scheduler.extending)))
        engine.flush_cache()
        engine.add_request("follower", [*prompt[:24], *[7] * 40], GREEDY)  # wants a chunk to end where the two part
        deltas = []
        while engine.has_unfinished_requests:
            deltas += engine.step()
        found = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)
        assert_agree(found[1:], logits_of(llm, prompt), prompt[1:], 0)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_figures_that_are_not_finite_are_no_answer(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    with LLM(dtype="float32", speculative_algorithm="none", max_total_tokens=256) as llm:
        logits = llm.engine.model.target.logits
        is_seven = torch.arange(4096) == 7
        monkeypatch.setattr(
            llm.engine.model.target, "logits", lambda hidden: logits(hidden).masked_fill(is_seven, torch.inf)
        )
        out = llm.generate([PROMPT], SamplingParams(max_tokens=max_tokens, prompt_logprobs=1))[0]
        assert (out.finish_reason, out.prompt_logprobs) == ("error", None)
        monkeypatch.undo()
        assert llm.generate([PROMPT], GREEDY)[0].finish_reason != "error"


def test_a_draft_model_that_is_not_asked_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    plainly = GREEDY.model_copy(update={"speculative": False})
    own: dict[str, Any] = {"speculative_algorithm": "draft-model", "speculative_draft_model_path": str(DEMO_MODEL)}
    with LLM(dtype="float32", max_total_tokens=512, **own) as llm:
        first = llm.generate([PROMPT, OTHER], [plainly, GREEDY])
        assert first[0].spec.num_draft_tokens == 0
        runs: list[int] = []
        drafter = llm.engine.runner.drafter
        assert isinstance(drafter, ModelDrafter)
        forward = drafter._model.forward

        def counted(*given: Any) -> Any:
            runs.append(0)
            return forward(*given)

        monkeypatch.setattr(drafter._model, "forward", counted)
        alone = llm.generate([PROMPT], plainly)[0]
        assert alone.token_ids == first[0].token_ids
        assert len(runs) <= 24 + 2  # the roots, one by one, and the prompt; no drafts
        again = llm.generate([PROMPT + alone.text], GREEDY)[0]
        assert again.spec.accept_length > 2  # it drafts for itself: nearly all is accepted
