"""Requests with slow grammars in an engine: they sit out steps, the others get tokens in every step."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from specmamba.core import OutputDelta
from specmamba.engine.engine import Engine
from specmamba.engine.request import Request
from specmamba.engine.stepping.constraints import ROOT_SECONDS, Constraints
from specmamba.grammar import CompiledGrammar, GrammarMatcher
from specmamba.grammar.compiler import token_bytes
from specmamba.grammar.worker import compile_grammar
from specmamba.sampling_params import GrammarSpec
from tests.grammar_schemas import compile_here

xgrammar = pytest.importorskip("xgrammar")

VOCAB, EOS, LONG = 4096, 0, 30.0
FLAGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "context_length": 256, "max_running_requests": 6}
TREE: dict[str, Any] = {"speculative_eagle_topk": 3, "speculative_num_steps": 4, "speculative_num_draft_tokens": 12}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"speculative_algorithm": "none"},
    "chain": {"speculative_algorithm": "mtp", "speculative_num_steps": 4},
    "tree": {"speculative_algorithm": "mtp", **TREE},
    "ngram": {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 12},
    "rejection": {"speculative_algorithm": "mtp", "speculative_accept": "rejection", **TREE},
}
PLAIN = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
NESTED = "[^a]{0,200} " * 100  # each character makes all masks after it slower


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(speculative_algorithm="mtp", **TREE, **FLAGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def vocab(llm: LLM) -> list[bytes]:
    return token_bytes(llm.engine.tokenizer, VOCAB)


def constrained(text: str, seed: int = 0, **more: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": seed} | more
    return SamplingParams(grammar=GrammarSpec(kind="regex", text=text), **settings)


class Gated:
    """Holds the masks of one grammar, from the second token on, until ``open`` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grammar: CompiledGrammar) -> None:
        self._gate, self.has_begun = threading.Event(), threading.Event()
        self._held: set[int] = set()
        init, advance = GrammarMatcher.__init__, GrammarMatcher.advance

        def gated_init(matcher: GrammarMatcher, given: CompiledGrammar, vocab_size: int) -> None:
            init(matcher, given, vocab_size)
            if given is grammar:
                self._held.add(id(matcher))

        def gated_advance(matcher: GrammarMatcher, tokens: Sequence[int]) -> None:
            if tokens and id(matcher) in self._held:
                self.has_begun.set()
                assert self._gate.wait(LONG)
            advance(matcher, tokens)

        monkeypatch.setattr(GrammarMatcher, "__init__", gated_init)
        monkeypatch.setattr(GrammarMatcher, "advance", gated_advance)

    def open(self) -> None:
        self._gate.set()


Hold = Callable[[CompiledGrammar], Gated]


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    made: list[Gated] = []

    def make(grammar: CompiledGrammar) -> Gated:
        made.append(Gated(monkeypatch, grammar))
        return made[-1]

    yield make
    for gated in made:
        gated.open()


def add(engine: Engine, name: str, params: SamplingParams, grammar: CompiledGrammar | None = None) -> Request:
    engine.add_request(name, [5, 6, 7], params, grammar=grammar)
    return engine.live.by_id[name]


def owned(request: Request, owner: str) -> None:
    assert request.follower is not None
    request.follower.owner = owner


def step_until(engine: Engine, condition: Callable[[], object], max_steps: int = 5000) -> list[OutputDelta]:
    deltas: list[OutputDelta] = []
    for _ in range(max_steps):
        if condition():
            return deltas
        deltas += engine.step()
    raise AssertionError("the condition was not met in time")


def finish(engine: Engine) -> list[OutputDelta]:
    deltas = step_until(engine, lambda: not engine.has_unfinished_requests)
    assert engine.stats().kv_used_tokens == 0
    return deltas


def text_of(deltas: Sequence[OutputDelta], name: str) -> str:
    return "".join(delta.text for delta in deltas if delta.request_id == name)


def test_a_slow_request_sits_out_and_the_others_go_on(llm: LLM, vocab: list[bytes], hold: Hold) -> None:
    engine, grammar = llm.engine, compile_here("regex", "[ab]{30}", vocab, EOS)
    llm.workbench.use_drafts(**DRAFTS["chain"])
    slow, quick = constrained("[ab]{30}"), constrained("[cd]{30}", seed=3)
    add(engine, "slow", slow, grammar)
    expected = text_of(finish(engine), "slow")

    gated = hold(grammar)
    owned(add(engine, "slow", slow, grammar), "a")
    owned(add(engine, "quick", quick, compile_here("regex", "[cd]{30}", vocab, EOS)), "b")
    add(engine, "plain", PLAIN)
    deltas = step_until(engine, gated.has_begun.is_set)
    for _ in range(10):
        news = engine.step()
        names = {delta.request_id for delta in news}
        assert "plain" in names
        assert "slow" not in names
        deltas += news
    deltas += step_until(engine, lambda: "quick" not in engine.live.by_id)
    assert len(text_of(deltas, "quick")) == 30
    gated.open()
    deltas += finish(engine)
    assert text_of(deltas, "slow") == expected
    assert {delta.finish_reason for delta in deltas} == {None, "stop", "length"}


def test_a_step_with_nothing_to_do_waits(llm: LLM, vocab: list[bytes], hold: Hold) -> None:
    engine, grammar = llm.engine, compile_here("regex", "[ab]{9}", vocab, EOS)
    gated = hold(grammar)
    add(engine, "slow", constrained("[ab]{9}"), grammar)
    step_until(engine, gated.has_begun.is_set)
    began = time.monotonic()
    for _ in range(4):
        assert engine.step() == []
    assert time.monotonic() - began >= 4 * ROOT_SECONDS * 0.9
    gated.open()
    assert len(text_of(finish(engine), "slow")) <= 9


def test_requests_may_end_or_be_preempted_while_their_masks_are_made(llm: LLM, vocab: list[bytes], hold: Hold) -> None:
    engine, grammar, params = llm.engine, compile_here("regex", "[ab]{20}", vocab, EOS), constrained("[ab]{20}")
    add(engine, "alone", params, grammar)
    expected = text_of(finish(engine), "alone")

    gated = hold(grammar)
    add(engine, "gone", params, grammar)
    preempted = add(engine, "preempted", params, grammar)
    deltas = step_until(engine, lambda: gated.has_begun.is_set() and preempted.output)
    engine.abort("gone")
    engine.preempt(preempted)
    assert preempted.row is None
    for _ in range(3):
        assert engine.step() == []
    gated.open()
    deltas += finish(engine)
    assert engine.stats().num_preemptions > 0
    assert text_of(deltas, "preempted") == expected


def test_a_job_that_does_not_end_fails_its_request(
    llm: LLM, vocab: list[bytes], hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specmamba.grammar.follower.MAX_JOB_SECONDS", 0.05)
    engine, grammar, params = llm.engine, compile_here("regex", "[ab]{9}", vocab, EOS), constrained("[ab]{9}")
    gated = hold(grammar)
    add(engine, "slow", params, grammar)
    step_until(engine, gated.has_begun.is_set)
    same = add(engine, "same", params, grammar)  # its caller has a slow job, so it waits
    assert same.follower is not None
    other = add(engine, "other", constrained("c"), compile_here("regex", "c", vocab, EOS))
    assert other.follower is not None
    last = step_until(engine, lambda: "slow" not in engine.live.by_id)[-1]
    assert (last.request_id, last.finish_reason, last.error_code) == ("slow", "error", "grammar_too_complex")
    assert same.follower._matcher._effort.is_distrusted
    assert not other.follower._matcher._effort.is_distrusted
    gated.open()
    assert {delta.finish_reason for delta in finish(engine)} == {None, "stop"}


@pytest.mark.fast_cases("tree")
@pytest.mark.parametrize("drafts", DRAFTS)
def test_sitting_out_changes_no_text(
    llm: LLM, vocab: list[bytes], drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.workbench.use_drafts(**DRAFTS[drafts])
    texts = ['"[^"]{5,40}"', "[a-z ]{40}", "(def|x = \\d)( [a-z]+){5,9}\\."]
    grammars = {text: compile_here("regex", text, vocab, EOS) for text in texts}

    def run() -> list[tuple[str, ...]]:
        for seed, text in enumerate(texts):
            add(llm.engine, text, constrained(text, seed, temperature=0.9 * (seed != 1)), grammars[text])
        add(llm.engine, "plain", PLAIN.model_copy(update={"max_tokens": 30}))
        deltas = finish(llm.engine)
        llm.flush_cache()
        assert {delta.error for delta in deltas} == {None}
        return [(name, text_of(deltas, name)) for name in (*texts, "plain")]

    for name in ("ROOT_SECONDS", "TREE_SECONDS", "MAX_TREE_SECONDS"):  # which drafts are made must not depend on time
        monkeypatch.setattr(f"specmamba.engine.stepping.constraints.{name}", 5.0)
    monkeypatch.setattr("specmamba.grammar.follower.WAIT_SHARE", 1e9)
    expected, ready, rng = run(), Constraints.ready, random.Random(1)

    def sometimes(self: Constraints, requests: Sequence[Request], is_idle: bool) -> list[Request]:
        found = ready(self, requests, is_idle)
        return [request for request in found if request.follower is None or rng.random() < 0.6]

    monkeypatch.setattr(Constraints, "ready", sometimes)
    assert run() == expected


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["none", "tree", "rejection"])
def test_a_bomb_that_passes_the_trial_ends_and_others_go_on(llm: LLM, vocab: list[bytes], drafts: str) -> None:
    llm.workbench.use_drafts(**DRAFTS[drafts])
    engine, text = llm.engine, f'root ::= [^q]* | "qqq" {NESTED}'
    info = xgrammar.TokenizerInfo(vocab, vocab_size=VOCAB, stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    compiled = compile_grammar(compiler, GrammarSpec(kind="ebnf", text=text))
    grammar = CompiledGrammar(GrammarSpec(kind="ebnf", text=text), compiled)
    params = SamplingParams(max_tokens=60, seed=0, grammar=grammar.spec, logit_bias={vocab.index(b"q"): 100.0})
    names = {f"bomb {index}" for index in range(2)}
    for name in names:
        add(engine, name, params, grammar)
    add(engine, "plain", PLAIN)
    deltas: list[OutputDelta] = []
    while names & engine.live.by_id.keys():
        if "plain" not in engine.live.by_id:
            add(engine, "plain", PLAIN)
        news = engine.step()
        assert "plain" in {delta.request_id for delta in news}
        deltas += news
    engine.abort("plain")
    ends = [(delta.request_id, delta.error_code) for delta in deltas if delta.finish_reason == "error"]
    assert sorted(ends) == sorted((name, "grammar_too_complex") for name in names)
