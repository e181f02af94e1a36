"""Masks of draft trees against a matcher that is moved from node to node, on the demo's vocabulary."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specmamba.config import DEMO_MODEL
from specmamba.errors import GrammarError
from specmamba.grammar import GrammarMatcher
from specmamba.grammar.compilations import CompiledGrammar
from specmamba.grammar.compiler import token_bytes
from specmamba.models.text.tokenizer import Tokenizer
from tests.grammar_schemas import allowed_tokens, compile_here

xgrammar = pytest.importorskip("xgrammar")

EOS, VOCAB = 0, 4096 + 40  # the model has rows for tokens that the tokenizer has not


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def vocab(tokenizer: Tokenizer) -> list[bytes]:
    return token_bytes(tokenizer, VOCAB)


@pytest.fixture(scope="module")
def grammars(vocab: list[bytes]) -> list[CompiledGrammar]:
    schema = (
        '{"properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "array", "items": {"enum": [1, 22]}}}}'
    )
    kinds = [
        ("json_schema", schema),
        ("json_object", ""),
        ("regex", "(ab|a|bc){0,9}"),
        ("ebnf", 'root ::= "x" root | "y"'),
    ]
    return [compile_here(kind, text, vocab, EOS) for kind, text in kinds]


def test_the_vocabulary_spells_texts(tokenizer: Tokenizer, vocab: list[bytes]) -> None:
    text = 'def f(x):\n    return {"größe": "→ 🙂"}\t'
    assert b"".join(vocab[token] for token in tokenizer.encode(text)) == text.encode()
    assert [index for index, word in enumerate(vocab) if not word] == [0, 1, 2, *range(4096, VOCAB)]


def step_by_step(grammar: CompiledGrammar, output: Sequence[int]) -> list[int] | None:
    """The tokens that may follow an output; None where the grammar refuses it, or it has ended."""
    matcher = xgrammar.GrammarMatcher(grammar.compiled)
    if not all(matcher.accept_token(token) for token in output) or matcher.is_terminated():
        return None
    bits = np.zeros((1, -(-VOCAB // 32)), np.int32)
    matcher.fill_next_token_bitmask(bits)
    return allowed_tokens(bits[0], VOCAB)


def random_tree(grammar: CompiledGrammar, output: list[int], rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens and parents; about half of the nodes are allowed, some end the text."""
    tokens, parents = [rng.randrange(3, 4096)], [-1]
    while len(tokens) < 14:
        parent = rng.randrange(len(tokens))
        following = step_by_step(grammar, output + path_of(tokens, parents, parent)) or []
        siblings = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        choices = [token for token in rng.choices([EOS, rng.randrange(4096), *following], k=3) if token not in siblings]
        if choices:
            tokens.append(choices[0])
            parents.append(parent)
    return tokens, parents


def path_of(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


@pytest.mark.parametrize("seed", range(12))
def test_masks_are_those_of_stepping_from_node_to_node(grammars: list[CompiledGrammar], seed: int) -> None:
    rng = random.Random(seed)
    grammar = grammars[seed % len(grammars)]
    matcher, output = GrammarMatcher(grammar, VOCAB), list[int]()
    for _ in range(6):
        tokens, parents = random_tree(grammar, output, rng)
        mask = matcher.mask(tokens, parents)
        for node in range(len(tokens)):
            path = path_of(tokens, parents, node)
            expected = step_by_step(grammar, output + path)
            ends = bool(path) and path[-1] == EOS and EOS in (step_by_step(grammar, output + path[:-1]) or [])
            assert mask.is_allowed[node] == (expected is not None or ends)
            if expected is not None:
                assert allowed_tokens(mask.bits[node], VOCAB) == expected
            else:
                assert (mask.bits[node] == -1).all()
        following = [token for token in step_by_step(grammar, output) or [] if token != EOS]
        if not following:
            break
        output.append(rng.choice(following))
        matcher.advance(output[-1:])


def test_a_drafted_end_of_text_has_nothing_below_it(grammars: list[CompiledGrammar], vocab: list[bytes]) -> None:
    matcher, a = GrammarMatcher(grammars[2], VOCAB), vocab.index(b"a")
    mask = matcher.mask([a, EOS, a, a, EOS], [-1, 0, 1, 0, 3])
    assert mask.is_allowed.tolist() == [True, True, False, True, True]
    matcher.advance([a, EOS, a])
    assert matcher.is_finished
    with pytest.raises(GrammarError, match="allows no token"):
        matcher.mask([EOS], [-1])


def test_nodes_without_a_parent_are_not_allowed(grammars: list[CompiledGrammar], vocab: list[bytes]) -> None:
    a = vocab.index(b"a")
    assert GrammarMatcher(grammars[2], VOCAB).mask([a, a, a], [-1, -1, 0]).is_allowed.tolist() == [True, False, True]


def test_tokens_that_do_not_exist_are_refused(grammars: list[CompiledGrammar]) -> None:
    matcher = GrammarMatcher(grammars[1], VOCAB)
    assert matcher.mask([5, 4100, 1], [-1, 0, 0]).is_allowed.tolist() == [True, False, False]
    with pytest.raises(GrammarError, match="token 4100"):
        matcher.advance([4100])


def test_a_refused_token_leaves_the_matcher_before_it(grammars: list[CompiledGrammar], vocab: list[bytes]) -> None:
    matcher, a, x = GrammarMatcher(grammars[2], VOCAB), vocab.index(b"a"), vocab.index(b"x")
    before = matcher.mask([a], [-1]).bits
    with pytest.raises(GrammarError, match=f"token {x}"):
        matcher.advance([x])
    assert (matcher.mask([a], [-1]).bits == before).all()


def test_a_dead_end_raises(vocab: list[bytes]) -> None:
    grammar = compile_here("ebnf", "root ::= [^\\x00-\\U0010ffff]", vocab, EOS)
    with pytest.raises(GrammarError, match="allows no token"):
        GrammarMatcher(grammar, VOCAB).mask([5], [-1])


def test_without_time_only_the_root_gets_a_mask(
    grammars: list[CompiledGrammar], vocab: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = vocab.index(b"a")
    tree = ([a] * 5, [-1, 0, 1, 2, 3])
    matcher = GrammarMatcher(grammars[2], VOCAB)
    full = matcher.mask(*tree, 60.0)
    assert full.is_allowed.all()
    cut = matcher.mask(*tree, 1e-9)
    assert (cut.bits[0] == full.bits[0]).all()
    assert not cut.is_allowed[2:].any()
    assert (matcher.mask(*tree).bits == full.bits).all()  # asked for everything, and left where it was


class _Failing:
    """A handle whose traversal fails after one token."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def traverse_draft_tree(self, *arguments: Any) -> bool:
        self._handle.accept_token(int(arguments[2][1]), False)
        raise RuntimeError("broken")


def test_a_failure_leaves_the_matcher_where_it_was(grammars: list[CompiledGrammar], vocab: list[bytes]) -> None:
    matcher, a, b = GrammarMatcher(grammars[2], VOCAB), vocab.index(b"a"), vocab.index(b"b")
    matcher.advance([a])
    before = matcher.mask([a], [-1]).bits
    handle, matcher._handle = matcher._handle, _Failing(matcher._handle)
    with pytest.raises(GrammarError, match="broken"):
        matcher.mask([a, b], [-1, 0])
    matcher._handle = handle
    assert (matcher.mask([a], [-1]).bits == before).all()
