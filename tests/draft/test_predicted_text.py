"""Drafts from a text that the client expects: where they are found, and engines against plain decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmamba import LLM, AsyncLLM
from specmamba.config import DEMO_MODEL, EngineConfig
from specmamba.core import SpecStats
from specmamba.draft import predicted_text
from specmamba.draft.predicted_text import FIRST_DRAFT, PredictedText
from specmamba.engine.engine import Engine
from specmamba.errors import RequestError
from specmamba.grammar import CompiledGrammar, GrammarCompiler
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.sampling_params import GrammarSpec, SamplingParams, SpeculationParams
from tests.engine.test_engine import assert_idle
from tests.fake_engine import wait_until

# ---- the place in the text -------------------------------------------------------------------------------------------


def test_a_draft_is_as_long_as_the_run_that_agrees() -> None:
    text = PredictedText(range(100))
    assert text.drafts([], 10) == [0, 1, 2, 3]
    assert text.drafts([0, 1], 10) == [2, 3, 4, 5, 6, 7]
    assert text.drafts(list(range(8)), 5) == [8, 9, 10, 11, 12]
    assert text.drafts(list(range(97)), 10) == [97, 98, 99]
    assert text.drafts(list(range(100)), 10) == []


def test_the_place_is_found_again_behind_the_longest_match() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 9, 4, 5, 7, 8]
    text = PredictedText(tokens)
    assert text.drafts([1, 2, 30], 10) == []  # lost
    assert text.drafts([1, 2, 30, 4], 10) == []  # one token is no match
    assert text.drafts([1, 2, 30, 4, 5], 10) == [6, 9]  # of equal matches the first behind the lost place
    assert text.drafts([1, 2, 30, 4, 5, 9, 4, 5], 10) == [7, 8]  # three tokens agree there


def test_long_repetitions_are_compared_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places behind the lost one first, then those from the beginning."""
    monkeypatch.setattr(predicted_text, "MAX_CANDIDATES", 4)
    tokens = [5, 5, 1, *[5] * 20, 5, 5, 2, *[5, 5, 3] * 2]
    for answer, found in (([5, 5, 1, 9], [5, 5]), ([*tokens[:25], 9], [2, 5])):
        text = PredictedText(tokens)
        text.drafts(answer, 4)
        assert text.drafts([*answer, 5, 5], 2)[: len(found)] == found


def test_the_place_may_be_before_the_lost_one() -> None:
    text = PredictedText([5, 6, 7, 1, 2])
    assert text.drafts([5, 6, 7, 9], 10) == []
    assert text.drafts([5, 6, 7, 9, 5, 6], 10) == [7, 1]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 9))
def test_drafts_stand_in_the_text_and_few_are_refused(tokens: Sequence[int], answer: Sequence[int], most: int) -> None:
    text, num_agreed, num_refused, num_lost = PredictedText(tokens), 0, 0, 0
    for length in range(len(answer) + 1):
        drafts = text.drafts(answer[:length], most)
        assert len(drafts) <= most
        assert any(tokens[i : i + len(drafts)] == drafts for i in range(len(tokens) + 1))
        agrees = bool(drafts) and drafts[:1] == answer[length : length + 1]
        num_agreed += agrees
        if drafts and not agrees:
            num_refused += len(drafts)
            num_lost += 1
    # each refused draft follows a run of as many tokens that agreed, or a match
    assert num_refused <= FIRST_DRAFT + num_agreed + num_lost * 12


# ---- whole engines ---------------------------------------------------------------------------------------------------

FLAGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "context_length": 256, "max_running_requests": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "chain": {"speculative_algorithm": "mtp", "speculative_adaptive": "off"},
    "tree": {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8, "speculative_adaptive": "off"},
    "sized": {"speculative_algorithm": "mtp", "speculative_adaptive": "auto"},
    "ngram": {"speculative_algorithm": "ngram", "speculative_adaptive": "off"},
    "ngram sized": {"speculative_algorithm": "ngram", "speculative_adaptive": "auto"},
    "snapshots": {"speculative_state": "snapshots", "speculative_adaptive": "off", "disable_cuda_graph": True},
}
PROMPTS = ["class Stack:\n    def __init__(self):\n        ", "import os\n\ndef read_file(path):\n", "def main():\n"]
Job = tuple[Sequence[int], SamplingParams, Sequence[int]]
Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(EngineConfig(**FLAGS, **ENGINES[request.param]))
    yield engine
    engine.close()


def answers(engine: Engine, jobs: Sequence[Job], **more: Any) -> tuple[Answers, list[SpecStats]]:
    engine.flush_cache()
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(jobs))}
    spec = {}
    for i, (prompt, params, predicted) in enumerate(jobs):
        engine.add_request(str(i), prompt, params, predicted_ids=predicted, **more)
    while engine.has_unfinished_requests:
        for delta in engine.step():
            assert delta.error is None
            tokens[delta.request_id] += delta.token_ids
            spec[delta.request_id] = delta.spec
    assert engine.stats().kv_used_tokens == 0
    return [tuple(found) for found in tokens.values()], [spec[name] for name in tokens]


def plainly(engine: Engine, params: SamplingParams) -> tuple[list[list[int]], Answers]:
    prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    plain = params.model_copy(update={"speculative": False})
    return prompts, answers(engine, [(prompt, plain, ()) for prompt in prompts])[0]


@pytest.mark.fast_cases("tree-0.0", "sized-0.8")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(engine: Engine, temperature: float) -> None:
    params = SamplingParams(max_tokens=64, temperature=temperature, seed=5, ignore_eos=True)
    prompts, plain = plainly(engine, params)
    edited = [(*text[:20], *text[25:40], 7, 8, 9, *text[40:]) for text in plain]
    mixed = [plain[0], (), plain[1]]  # right, none, and of another answer
    for predicted in (plain, edited, mixed):
        jobs = [(prompt, params, text) for prompt, text in zip(prompts, predicted, strict=True)]
        found, spec = answers(engine, jobs)
        assert found == plain
        most = engine.draft_plan.max_nodes - 1
        if predicted is not mixed:
            assert all(figures.num_verify_steps < 64 / most + 10 for figures in spec)
        if predicted is plain:
            assert all(figures.num_draft_tokens - figures.num_accepted_tokens <= 1 for figures in spec)


POINT = GrammarSpec(kind="regex", text=r"\{\"x\": [0-9]{1,3}, \"y\": [0-9]{1,3}, \"name\": \"[a-z]{3,9}\"\}")


@pytest.fixture(scope="module")
def grammar() -> CompiledGrammar:
    """Compiled once, for the tokenizer that all engines here have."""
    pytest.importorskip("xgrammar")
    tokenizer = Tokenizer(DEMO_MODEL)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0], 30.0, 1 << 24)
    try:
        return compiler.compile(POINT).result()
    finally:
        compiler.close()


@pytest.mark.slow  # it waits for the grammar compiler's process
def test_prediction_beside_grammars(engine: Engine, grammar: CompiledGrammar) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=2, grammar=POINT)
    prompt = engine.tokenizer.encode("a point: ")
    plain = params.model_copy(update={"speculative": False})
    (text,), _ = answers(engine, [(prompt, plain, ())], grammar=grammar)
    wrong = engine.tokenizer.encode('{"x": 12, "y": [], "name": null}', add_special_tokens=False)
    for predicted in (text, wrong):
        found, (figures, _) = answers(engine, [(prompt, params, predicted), (prompt, params, ())], grammar=grammar)
        assert found == [text, text]
        assert predicted is wrong or figures.num_accepted_tokens > len(text) / 2


@pytest.mark.fast_cases("sized]")
def test_a_request_without_a_seed_is_decided_under_target(engine: Engine) -> None:
    prompt = engine.tokenizer.encode(PROMPTS[0])
    params = SamplingParams(max_tokens=8, temperature=0.8)
    engine.add_request("a", prompt, params, predicted_ids=prompt)
    engine.add_request("b", prompt, params)
    rules: dict[str, str] = {}
    while engine.has_unfinished_requests:
        rules.update((delta.request_id, delta.rule) for delta in engine.step())
    assert rules["a"] == "target"


@pytest.mark.fast_cases("sized]")
def test_a_depth_bounds_predicted_drafts_too(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, speculative=SpeculationParams(max_depth=2))
    prompts, plain = plainly(engine, params)
    found, (spec,) = answers(engine, [(prompts[0], params, plain[0])])
    assert found == plain[:1]
    assert spec.num_verify_steps == 10
    assert len(spec.accepted_histogram) == 3


def test_the_python_interface_drafts_from_it() -> None:
    """As a text and as token ids, in calls and in streams; the text is the one without it."""
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(**FLAGS, **ENGINES["ngram"]) as llm:
        plain = llm.generate("def main():", greedy.model_copy(update={"speculative": False}))[0]
        given = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, prediction=plain.text)
        ids = given.model_copy(update={"prediction": plain.token_ids})
        outputs = llm.generate(["def main():", "def main():"], [given, ids])
        assert [output.token_ids for output in outputs] == [plain.token_ids] * 2
        tokenizer = llm.get_tokenizer()
        assert llm.engine.encode_prediction(given) == tokenizer.encode(plain.text, add_special_tokens=False)
        assert outputs[1].spec.accept_length > 3  # it agrees from beginning to end
        last = list(llm.stream("def main():", ids))[-1]
        assert last.spec.num_accepted_tokens == outputs[1].spec.num_accepted_tokens
        with pytest.raises(RequestError, match="not in the vocabulary") as refused:
            llm.generate("x", SamplingParams(prediction=[llm.engine.vocab_size]))
        assert refused.value.param == "prediction"
        with pytest.raises(RequestError, match="speculative asks for no drafts"):
            llm.generate("x", SamplingParams(prediction="y", speculative=False))


MESSAGES = [{"role": "user", "content": "import os\n"}]


def test_a_conversation_in_python_drafts_from_it() -> None:
    plainly_said = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, speculative=False)
    with LLM(**FLAGS, **ENGINES["ngram"]) as llm:
        plain = llm.chat(MESSAGES, plainly_said)[0]
        given = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, prediction=plain.text)
        answers_of_two = llm.chat([MESSAGES, MESSAGES], [given, given.model_copy(update={"n": 2})])
    for answer in answers_of_two:
        assert [one.token_ids for one in answer.outputs] == [plain.token_ids] * len(answer.outputs)
        assert answer.spec.accept_length > 3


def test_tasks_draft_from_texts_of_their_own() -> None:
    """Each of many, some of which are cancelled, has its own text; what was predicted of the others is not drafted."""
    prompts = ("def main():", "class A", "import os\n", "for i in")

    async def ask() -> None:
        async with AsyncLLM(**FLAGS, **ENGINES["ngram"]) as llm:
            greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            plain = await llm.generate(prompts, greedy.model_copy(update={"speculative": False}))
            params = [greedy.model_copy(update={"prediction": output.token_ids}) for output in plain]
            tasks = [asyncio.ensure_future(llm.generate(*one)) for one in zip(prompts * 3, params * 3, strict=True)]
            await asyncio.sleep(0.01)
            for task in tasks[-4:]:
                task.cancel()
            for (output,), expected in zip(await asyncio.gather(*tasks[:-4]), [*plain, *plain], strict=True):
                assert output.token_ids == expected.token_ids
                assert output.spec.accept_length > 3
            last = [delta async for delta in llm.stream(prompts[0], params[0])][-1]
            assert last.spec.accept_length > 3
            said = await llm.chat(MESSAGES, greedy.model_copy(update={"speculative": False}))
            (answer,) = await llm.chat(MESSAGES, greedy.model_copy(update={"prediction": said[0].text}))
            assert answer.token_ids == said[0].token_ids
            assert answer.spec.accept_length > 3
            with pytest.raises(RequestError, match="not in the vocabulary"):
                await anext(llm.stream("x", SamplingParams(prediction=[llm.engine.vocab_size])))
            await llm.flush_cache()  # behind all aborts
            wait_until(lambda: not llm.engine.has_unfinished_requests)
            assert_idle(llm.engine)

    asyncio.run(ask())


def test_parameters_alone_are_enough_for_an_engine() -> None:
    engine = Engine(EngineConfig(**FLAGS, speculative_algorithm="none"))
    with pytest.raises(RequestError, match="this server drafts nothing"):
        engine.add_request("x", [1, 2], SamplingParams(prediction="y"))
    engine.close()


def test_what_is_refused() -> None:
    engine = Engine(EngineConfig(**FLAGS, speculative_algorithm="ngram"))
    params = SamplingParams(max_tokens=4)
    plain = params.model_copy(update={"speculative": False})
    rejecting = params.model_copy(update={"speculative": SpeculationParams(accept="rejection")})
    for tokens, own, message in (
        ([1] * 257, params, "the prediction has 257 tokens, and texts have 256 at the most"),
        ([engine.vocab_size], params, "is not in the vocabulary"),
        ([1], plain, "speculative asks for no drafts"),
        ([1], rejecting, "speculative asks for drafts accepted under rejection"),
    ):
        with pytest.raises(RequestError, match=message) as refused:
            engine.add_request("x", [1, 2], own, predicted_ids=tokens)
        assert refused.value.param == "prediction"
    assert not engine.has_unfinished_requests
    engine.close()
    engine = Engine(EngineConfig(**FLAGS, speculative_algorithm="none"))
    with pytest.raises(RequestError, match="this server drafts nothing"):
        engine.add_request("x", [1, 2], params, predicted_ids=[1])
    engine.close()
