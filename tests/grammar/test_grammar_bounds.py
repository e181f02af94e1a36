"""Limits of what grammars may cost: slow ones are refused before they run, or their requests end while they run."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from specmamba.config import DEMO_MODEL
from specmamba.errors import GrammarError, RequestError
from specmamba.grammar import CompiledGrammar, GrammarMatcher, checks
from specmamba.grammar.checks import _grows, check_by_trial
from specmamba.grammar.compiler import token_bytes
from specmamba.grammar.matcher import FREE_SECONDS, MAX_SECONDS, SLOW_SECONDS, Effort, scale_of
from specmamba.grammar.worker import compile_grammar
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.sampling_params import GrammarSpec
from tests.grammar_schemas import accepts, allowed_tokens, compile_here

xgrammar = pytest.importorskip("xgrammar")

VOCAB, EOS = 4096, 0


@pytest.fixture(scope="module")
def vocab() -> list[bytes]:
    return token_bytes(Tokenizer(DEMO_MODEL), VOCAB)


@pytest.fixture(scope="module")
def compiler(vocab: list[bytes]) -> Any:
    info = xgrammar.TokenizerInfo(vocab, vocab_size=VOCAB, stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


WRONG = [
    ("root ::= root", "never comes to an end"),
    ('root ::= "a" other\nother ::= "b" other | other "c"', "never comes to an end"),
    ('root ::= x\nx ::= x x x x x | [^"] | ""', "'x' can begin with itself"),
    ('root ::= a\na ::= b? b? "x"\nb ::= "y"? a', "can begin with itself"),
    ("root ::= [^a]{0,100000}", "repeated 100000 times"),
    ('root ::= ("a" | "b"){5000}', "repeated 5000 times"),
    ("root ::= [^\\x00-\\U0010ffff]", "no token of this model"),
]


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_unusable_grammars_are_refused(compiler: Any, text: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        compile_grammar(compiler, GrammarSpec(kind="ebnf", text=text))
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("text", ['root ::= x\nx ::= [^"] x x x x x | ""', "root ::= " + "[^a]{0,1000} " * 20])
def test_growing_cost_per_token_is_refused(compiler: Any, text: str) -> None:
    with pytest.raises(RequestError, match="too complex") as caught:
        compile_grammar(compiler, GrammarSpec(kind="ebnf", text=text))
    assert isinstance(caught.value.__cause__, TimeoutError)


HONEST = [
    ("json_object", ""),
    ("json_schema", '{"type": "string", "maxLength": 4096}'),
    ("json_schema", '{"properties": {"e": {"type": "string", "format": "email"}}, "additionalProperties": true}'),
    ("regex", r"((a*)*b)?( [a-z]{1,12}){0,8}"),
    ("regex", "(.|\n)*"),
    ("ebnf", 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9]+ | "(" sum ")"'),
    ("ebnf", 'root ::= "x" root | "y"'),
]


@pytest.mark.parametrize(("kind", "text"), HONEST)
def test_usual_grammars_pass(compiler: Any, kind: Any, text: str) -> None:
    assert compile_grammar(compiler, GrammarSpec(kind=kind, text=text)).tokenizer_info.vocab_size == VOCAB


@pytest.mark.parametrize("text", ["[^a]{0,200}", '(x[^"]|.){150,300}'])
def test_masks_of_long_repetitions_keep_to_the_class(vocab: list[bytes], text: str) -> None:
    grammar = compile_here("regex", text, vocab, EOS)
    for seed in range(4):
        matcher, rng = xgrammar.GrammarMatcher(grammar.compiled), random.Random(seed)
        bits = np.zeros((1, VOCAB // 32), np.int32)
        for _ in range(8):
            matcher.fill_next_token_bitmask(bits)
            assert matcher.accept_token(rng.choice([token for token in allowed_tokens(bits[0], VOCAB) if token != EOS]))


def test_growing_cost_is_detected() -> None:
    assert _grows([0.001 * (1 + step / 10) for step in range(200)], slow=0.03)
    assert not _grows([0.02] * 200, slow=0.03)
    assert not _grows([1e-6 * (1 + step) for step in range(200)], slow=0.03)
    assert not _grows([0.001, 0.02] * 4, slow=0.03)  # too short to tell


@pytest.mark.parametrize(("slow", "is_refused"), [([0.04], False), ([0.04, 0.04], True), ([0.2], True)])
def test_a_second_slow_step_is_refused(monkeypatch: pytest.MonkeyPatch, slow: list[float], is_refused: bool) -> None:
    """One alone can be the machine's, unless it is far too slow."""
    costs = iter([0.001] * 8 + slow)
    monkeypatch.setattr(checks, "_steps", lambda *_: [next(costs, 0.001) for _ in range(10)])
    with pytest.raises(RequestError, match="too complex") if is_refused else nullcontext():
        check_by_trial(None, VOCAB)


def test_two_slow_masks_end_a_request() -> None:
    effort = Effort(4096)
    for seconds in (SLOW_SECONDS * 2, 0.001, SLOW_SECONDS):
        effort.add(seconds)
    with pytest.raises(GrammarError) as caught:
        effort.add(SLOW_SECONDS * 1.01)
    assert caught.value.code == "grammar_too_complex"


def test_one_slow_mask_ends_a_request_whose_grammar_was_too_slow_elsewhere() -> None:
    effort = Effort(4096)
    effort.is_distrusted = True
    effort.add(SLOW_SECONDS * 0.99)
    with pytest.raises(GrammarError, match="too complex"):
        effort.add(SLOW_SECONDS * 1.01)


def test_many_masks_end_a_request_only_where_each_takes_long() -> None:
    effort = Effort(151_936)
    free = FREE_SECONDS * scale_of(151_936)
    for _ in range(10_000):
        effort.add(free * 0.99)
    steps = int(MAX_SECONDS / 0.05)
    for _ in range(steps - 1):
        effort.add(free + 0.05)
    with pytest.raises(GrammarError, match="too complex"):
        effort.add(free + 0.11)


def test_a_matcher_counts_its_masks_and_its_tokens(vocab: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, a = compile_here("regex", "a*", vocab, EOS), vocab.index(b"a")
    now = iter(np.arange(1, 10_000, 0.5))
    masked, taken = GrammarMatcher(grammar, VOCAB), GrammarMatcher(grammar, VOCAB)
    monkeypatch.setattr("specmamba.grammar.matcher.time.thread_time", lambda: next(now))
    masked.mask([a], [-1])
    with pytest.raises(GrammarError, match="too complex") as caught:
        masked.mask([a, a], [-1, 0], 0.01)
    assert caught.value.code == "grammar_too_complex"
    taken.advance([a])
    with pytest.raises(GrammarError, match="too complex"):
        taken.advance([a])


def with_reasoning(compiler: Any, reasoning: Any) -> CompiledGrammar:
    spec = GrammarSpec(kind="regex", text="[ab]+", reasoning=reasoning)
    return CompiledGrammar(spec, compile_grammar(compiler, spec))


@pytest.mark.parametrize(
    ("text", "is_open", "is_optional"),
    [
        ("ab", False, True), ("x</think>ab", True, False), ("</think>\n\nab", True, False), ("</think>", False, False),
        ("<think>x</think>ab", True, True), ("<think>\n</think>\n\nab", True, True), ("<think>x", False, False),
        ("a < b </thi </<</</think</think>b", True, False), ("é\n🙂</think>xb", False, False),
        ("x</think>y</think>ab", False, False), ("</think>\n\n\n\n\nab", False, False),
    ],
)  # fmt: skip
def test_a_grammar_begins_behind_the_reasoning(compiler: Any, text: str, is_open: bool, is_optional: bool) -> None:
    assert accepts(with_reasoning(compiler, "open"), text) is is_open
    assert accepts(with_reasoning(compiler, "optional"), text) is is_optional


def test_long_reasoning_costs_little(compiler: Any) -> None:
    matcher = GrammarMatcher(with_reasoning(compiler, "open"), VOCAB)
    tokenizer = Tokenizer(DEMO_MODEL)
    matcher.advance(tokenizer.encode("if a < b: return '</thin'\n" * 1000))
    mask = matcher.mask([0], [-1])
    assert matcher.seconds_per_node < FREE_SECONDS
    assert EOS not in allowed_tokens(mask.bits[0], VOCAB)
    matcher.advance(tokenizer.encode("</think>ab"))
    assert EOS in allowed_tokens(matcher.mask([0], [-1]).bits[0], VOCAB)
