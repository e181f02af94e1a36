"""Drafts from text: matching and tree building against plain Python, then whole engines against plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.config import EngineConfig
from specmamba.core import Batch, DraftTree, RequestOutput
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.ngram import CORPUS_WEIGHT, DEPTH_DECAY, MAX_MATCHES, WEIGHT_PER_TOKEN, NgramDrafter, merge
from specmamba.draft.ngram.matching import NO_TOKEN, CorpusIndex, MatchRule, match_history
from specmamba.draft.text_drafter import read_corpus
from specmamba.errors import ConfigError
from specmamba.sampling_params import SamplingBatch
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("no_headroom")

CPU = torch.device("cpu")
Match = tuple[int, tuple[int, ...]]  # tokens that agree, continuation
Edge = tuple[int, int]  # parent, token


def num_agreeing(text: Sequence[int], end: int, suffix: Sequence[int], limit: int) -> int:
    """Count the last tokens of ``suffix`` that agree with ``text`` up to and including ``end``."""
    count = 0
    while count < limit and count <= end and count < len(suffix) and text[end - count] == suffix[-1 - count]:
        count += 1
    return count


def own_matches(text: Sequence[int], rule: MatchRule) -> list[Match]:
    found = []
    for end in range(len(text) - 1):
        count = num_agreeing(text, end, text, rule.max_window)
        if count >= rule.min_window:
            longer = list(text)  # it goes on as it did after ``end``, for ever
            for step in range(rule.num_steps):
                longer.append(longer[end + 1 + step])
            found.append((count, end, tuple(longer[end + 1 : end + 1 + rule.num_steps])))
    found.sort(key=lambda match: (-match[0], -match[1]))
    return [(count, tokens) for count, _, tokens in found[: rule.max_matches]]


def corpus_matches(corpus: Sequence[int], text: Sequence[int], rule: MatchRule) -> list[Match]:
    """All of them, the longest first."""
    counts = [(num_agreeing(corpus, end, text, rule.max_window), end) for end in range(len(corpus))]
    found = [
        (count, tuple(corpus[end + 1 : end + 1 + rule.num_steps])) for count, end in counts if count >= rule.min_window
    ]
    return sorted(found, key=lambda match: -match[0])


def trie(paths: Sequence[tuple[float, Sequence[int]]], max_children: int, max_drafts: int) -> list[Edge]:
    """Nodes 1, 2, ... of the best tree."""
    support: dict[tuple[int, ...], float] = {}
    first: dict[tuple[int, ...], int] = {}
    for i, (weight, path) in enumerate(paths):
        for depth in range(1, len(path) + 1):
            prefix = tuple(path[:depth])
            support[prefix] = support.get(prefix, 0.0) + weight
            first.setdefault(prefix, i)
    score = {prefix: total * DEPTH_DECAY ** len(prefix) for prefix, total in support.items() if total > 0}
    ranked = sorted(score, key=lambda prefix: (-score[prefix], len(prefix), first[prefix]))
    kept: list[tuple[int, ...]] = []
    for prefix in ranked:
        siblings = sum(other[:-1] == prefix[:-1] and len(other) == len(prefix) for other in kept)
        if siblings < max_children and (len(prefix) == 1 or prefix[:-1] in kept):
            kept.append(prefix)
    kept = kept[:max_drafts]
    return [(kept.index(prefix[:-1]) + 1 if len(prefix) > 1 else 0, prefix[-1]) for prefix in kept]


def padded(texts: Sequence[Sequence[int]], filler: int = 0) -> tuple[Tensor, Tensor]:
    longest = max(map(len, texts))
    rows = [[*text, *[filler] * (longest - len(text))] for text in texts]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor([len(text) for text in texts])


def as_matches(lengths: Tensor, continuations: Tensor) -> list[list[Match]]:
    """The matches of each row; those of length 0 must have no tokens, and end the row."""
    rows = []
    for counts, paths in zip(lengths.tolist(), continuations.tolist(), strict=True):
        tokens = [tuple(token for token in path if token != NO_TOKEN) for path in paths]
        assert counts == sorted(counts, reverse=True)
        for count, path, known in zip(counts, paths, tokens, strict=True):
            assert path == [*known, *[NO_TOKEN] * (len(path) - len(known))]
            assert count or not known
        rows.append([match for match in zip(counts, tokens, strict=True) if match[0]])
    return rows


def edges(tokens: Tensor, parents: Tensor) -> list[list[Edge]]:
    """Nodes of each row; padding must end the row."""
    rows = []
    for row_tokens, row_parents in zip(tokens.tolist(), parents.tolist(), strict=True):
        count = sum(parent >= 0 for parent in row_parents)
        assert row_parents[count:] == [-1] * (len(row_parents) - count)
        rows.append(list(zip(row_parents[:count], row_tokens[:count], strict=True)))
    return rows


texts = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), min_size=1, max_size=40))
rules = st.builds(
    lambda low, more, steps, matches: MatchRule(low, low + more, steps, matches),
    st.integers(1, 3),
    st.integers(0, 12),
    st.integers(1, 6),
    st.integers(1, 16),
)


class TestHistory:
    @given(st.lists(texts, min_size=1, max_size=5), rules)
    def test_same_as_plain_python(self, batch: list[list[int]], rule: MatchRule) -> None:
        for filler in (0, 1):  # what stands behind a text is not read
            found = match_history(*padded(batch, filler), rule)
            assert as_matches(found.lengths, found.continuations) == [own_matches(text, rule) for text in batch]

    def test_a_continuation_repeats_its_period(self) -> None:
        found = match_history(*padded([[7, 7, 7], [1, 2, 1, 2, 1], [1, 2, 3]]), MatchRule(1, 12, 5, 1))
        assert found.lengths.tolist() == [[2], [3], [0]]
        assert found.continuations[:2, 0].tolist() == [[7, 7, 7, 7, 7], [2, 1, 2, 1, 2]]

    def test_texts_of_one_token(self) -> None:
        found = match_history(*padded([[3], [4]]), MatchRule(1, 12, 4, 16))
        assert found.lengths.shape == (2, 0)
        assert found.continuations.shape == (2, 0, 4)

    def test_large_tokens(self) -> None:
        big = 2**31 - 1
        found = match_history(*padded([[big, 5, big - 1, big]]), MatchRule(1, 4, 2, 4))
        assert as_matches(found.lengths, found.continuations) == [[(1, (5, big - 1))]]


class TestCorpus:
    @given(texts, st.lists(texts, min_size=1, max_size=5), rules)
    def test_same_as_plain_python(self, corpus: list[int], batch: list[list[int]], rule: MatchRule) -> None:
        found = CorpusIndex(torch.tensor(corpus), rule.max_window).match(*padded(batch), rule)
        for text, matches in zip(batch, as_matches(found.lengths, found.continuations), strict=True):
            expected = corpus_matches(corpus, text, rule)
            assert [count for count, _ in matches] == [count for count, _ in expected[: rule.max_matches]]
            assert not Counter(matches) - Counter(expected)  # each of them stands in the corpus

    @pytest.mark.parametrize("max_window", [1, 2, 3, 12, 64])
    def test_larger_texts(self, max_window: int) -> None:
        rng = random.Random(max_window)
        corpus = [min(rng.randrange(40), rng.randrange(40)) for _ in range(3000)]
        batch = [[rng.randrange(45) for _ in range(rng.randint(1, 30))] for _ in range(20)]  # some tokens are unknown
        for text in batch[:15]:
            start = rng.randrange(2900)
            text.extend(corpus[start : start + rng.randint(1, 70)])
        rule = MatchRule(1, max_window, 4, 8)
        found = CorpusIndex(torch.tensor(corpus), max_window).match(*padded(batch), rule)
        for text, matches in zip(batch, as_matches(found.lengths, found.continuations), strict=True):
            expected = corpus_matches(corpus, text, rule)
            assert [count for count, _ in matches] == [count for count, _ in expected[:8]]
            assert not Counter(matches) - Counter(expected)

    @pytest.mark.parametrize("max_window", [1, 12, 64])
    def test_size(self, max_window: int) -> None:
        """12 bytes per token and at most 8 for every doubling of the window."""
        tokens = torch.randint(0, 1 << 30, (5000,))
        num_bytes = CorpusIndex(tokens, max_window).num_bytes
        assert num_bytes <= 5000 * (12 + 8 * (max_window - 1).bit_length())

    def test_tokens_that_the_corpus_does_not_have(self) -> None:
        index = CorpusIndex(torch.tensor([3, 0, 4, 1, 5, 2, 5, 5, 5, 5]), 4)
        found = index.match(*padded([[1000, 3], [2, 1000], [1000, 4, 1]]), MatchRule(1, 4, 2, 1))
        assert as_matches(found.lengths, found.continuations) == [[(1, (0, 4))], [], [(2, (5, 2))]]

    def test_shorter_than_the_window(self) -> None:
        index = CorpusIndex(torch.tensor([5, 6]), 64)
        found = index.match(*padded([[5], [6], [1, 5]]), MatchRule(1, 64, 3, 4))
        assert as_matches(found.lengths, found.continuations) == [[(1, (6,))], [(1, ())], [(1, (6,))]]


class TestReadCorpus:
    def test_tokens(self, tmp_path: Path) -> None:
        file = tmp_path / "corpus.txt"
        file.write_bytes("\ufeffaé\r\n".encode())
        assert read_corpus(file, lambda text: [ord(c) for c in text]).tolist() == [97, 233, 13, 10]

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (None, "cannot be read: No such file"),
            (b"ab\xff", "not a UTF-8 text: byte 2"),
            (b"", "has no text in it"),
            (b" \n\t", "has no text in it"),
            ("aé".encode(), "token 233 .* the model has 200 tokens"),
        ],
    )
    def test_what_is_wrong(self, tmp_path: Path, content: bytes | None, problem: str) -> None:
        file = tmp_path / "corpus.txt"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"--speculative-ngram-corpus: .*{problem}"):
            read_corpus(file, lambda text: [ord(c) for c in text], vocab_size=200)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            read_corpus(tmp_path, lambda text: [1])


weights = st.sampled_from([0.0, 1.0, 0.25, 1 / 16, 1 / 64, 4.0**-11])
paths = st.tuples(weights, st.lists(st.integers(0, 2), max_size=5))


class TestMerge:
    @given(
        st.integers(1, 10).flatmap(
            lambda count: st.lists(st.lists(paths, min_size=count, max_size=count), min_size=1, max_size=4)
        ),
        st.integers(1, 5),
        st.integers(1, 12),
    )
    def test_same_as_plain_python(
        self, batch: list[list[tuple[float, list[int]]]], max_children: int, max_drafts: int
    ) -> None:
        continuations = torch.tensor([[path + [NO_TOKEN] * (5 - len(path)) for _, path in row] for row in batch])
        of_paths = torch.tensor([[weight for weight, _ in row] for row in batch], dtype=torch.float64)
        tokens, parents = merge(continuations, of_paths, max_children, max_drafts)
        expected = [trie(row, max_children, max_drafts) for row in batch]
        assert edges(tokens, parents) == expected
        assert tokens.shape[1] == max(map(len, expected))

    def test_rounding_does_not_break_a_tree(self) -> None:
        """Weights far apart, whose sums are not exact: still every parent comes before its children."""
        rng = random.Random(1)
        for _ in range(50):
            continuations = torch.tensor([[[rng.randrange(2) for _ in range(6)] for _ in range(32)] for _ in range(3)])
            of_paths = torch.tensor([[rng.random() * 4.0 ** -rng.randrange(63) for _ in range(32)] for _ in range(3)])
            tokens, parents = merge(continuations, of_paths.double(), 2, 20)
            for row in edges(tokens, parents):
                assert all(parent <= node for node, (parent, _) in enumerate(row))
                assert len(set(row)) == len(row)  # no two siblings have the same token
                expected = {tuple(path[:depth]) for path in continuations.flatten(0, 1).tolist() for depth in range(7)}
                for node in range(1, len(row) + 1):
                    path: list[int] = []
                    while node:
                        node, token = row[node - 1]
                        path.insert(0, token)
                    assert tuple(path) in expected


ROWS, POSITIONS = 6, 200


def ngram_drafter(
    plan: DraftPlan, corpus: Sequence[int] | None = None, windows: tuple[int, int] = (1, 12)
) -> NgramDrafter:
    state = StateShape(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, conv_width=2)
    shape = CacheShape((KVShape(1, 1, 1),), 1, state=state, dtype=torch.float32)
    config = EngineConfig(
        speculative_algorithm="ngram",
        speculative_ngram_min_match_window_size=windows[0],
        speculative_ngram_max_match_window_size=windows[1],
    )
    table = RequestTable(ROWS, POSITIONS, KVPool(shape, 4, 1, CPU), CPU)
    return NgramDrafter(plan, config, table, None if corpus is None else torch.tensor(corpus, dtype=torch.int64))


def ngram_plan(num_steps: int, topk: int, max_nodes: int) -> DraftPlan:
    return DraftPlan("ngram", num_steps, topk, max_nodes, num_lookahead_slots=max_nodes)


def batch_of(texts_of_rows: dict[int, list[int]]) -> Batch:
    """Of requests whose known tokens these are."""
    rows = tuple(sorted(texts_of_rows))
    positions = [len(texts_of_rows[row]) - 1 for row in rows]
    return Batch(
        rows=rows,
        row_index=torch.tensor(rows),
        root_tokens=torch.tensor([texts_of_rows[row][-1] for row in rows]),
        root_positions=torch.tensor(positions),
        max_root_position=max(positions),
        sampling=SamplingBatch.of([SamplingParams()] * len(rows), [0] * len(rows), CPU),
    )


def check_tree(tree: DraftTree, batch: Batch, max_children: int) -> list[list[Edge]]:
    """What holds for every tree; its drafts, row by row."""
    tokens, parents, shape = tree.tokens, tree.shape.parents, tree.shape
    assert torch.equal(tokens[:, 0], batch.root_tokens)
    assert tokens.dtype == parents.dtype == torch.int64
    assert (parents[:, 0] == -1).all()
    assert tree.draft_probs is None
    assert shape.is_chain == torch.equal(parents, torch.arange(-1, tokens.shape[1] - 1).expand_as(parents))
    rows = edges(tokens[:, 1:], parents[:, 1:])
    assert max([0, *(max(Counter(parent for parent, _ in row).values(), default=0) for row in rows)]) <= max_children
    assert shape.max_children <= max_children
    assert tokens.shape[1] == 1 + max(map(len, rows))
    return rows


def weighted(text: list[int], rule: MatchRule) -> list[tuple[float, tuple[int, ...]]]:
    return [(WEIGHT_PER_TOKEN ** (count - rule.max_window), path) for count, path in own_matches(text, rule)]


class TestDrafter:
    @pytest.mark.parametrize(("steps", "topk", "nodes"), [(4, 4, 8), (3, 1, 4), (1, 1, 2), (5, 2, 16), (4, 4, 2)])
    def test_requests_start_and_end(self, steps: int, topk: int, nodes: int) -> None:
        """Rows start, grow by any number of tokens, and are reused; any of them may be in a batch."""
        rng = random.Random(nodes)
        drafter, rule = ngram_drafter(ngram_plan(steps, topk, nodes)), MatchRule(1, 12, steps, MAX_MATCHES)
        known: dict[int, list[int]] = {}
        widths = set()
        for _ in range(60):
            row = rng.randint(1, ROWS)
            if row not in known or len(known[row]) > 60 or rng.random() < 0.1:
                letters = rng.choice([1, 3, 30])
                known[row] = [rng.randrange(letters) for _ in range(rng.randint(1, 20))]
                drafter.begin(row, known[row])
            members = sorted(rng.sample(sorted(known), rng.randint(1, len(known))))
            batch = batch_of({row: known[row] for row in members})
            tree = drafter.propose(batch)
            assert check_tree(tree, batch, topk) == [
                trie(weighted(known[row], rule), topk, nodes - 1) for row in members
            ]
            width = tree.shape.num_nodes
            widths.add(width)
            new = [[rng.randrange(3) for _ in range(rng.randint(1, width))] for _ in members]
            drafter.advance(members, new)
            for row, tokens in zip(members, new, strict=True):
                known[row].extend(tokens)
        assert {1, nodes} <= widths

    def test_nothing_matches(self) -> None:
        drafter = ngram_drafter(ngram_plan(4, 4, 8))
        known = {2: [1, 2, 3], 5: [4]}
        for row, text in known.items():
            drafter.begin(row, text)
        tree = drafter.propose(batch_of(known))
        assert tree.tokens.tolist() == [[3], [4]]
        assert tree.shape.is_chain

    def test_some_rows_match(self) -> None:
        drafter = ngram_drafter(ngram_plan(4, 4, 8))
        known = {1: [9], 3: [1, 2, 1], 4: [5, 6, 5, 7, 5]}
        for row, text in known.items():
            drafter.begin(row, text)
        batch = batch_of(known)
        rows = check_tree(drafter.propose(batch), batch, 4)
        assert rows[0] == []
        assert rows[1] == [(0, 2), (1, 1), (2, 2), (3, 1)]  # goes round
        assert [edge for edge in rows[2] if edge[0] == 0] == [(0, 7), (0, 6)]  # the more recent first

    def test_chains_of_one_length_are_a_chain(self) -> None:
        for topk in (1, 4):
            drafter = ngram_drafter(ngram_plan(4, topk, 5))
            known = {1: [1, 2, 1], 2: [3, 3, 3, 3]}
            for row, text in known.items():
                drafter.begin(row, text)
            tree = drafter.propose(batch_of(known))
            assert tree.shape.is_chain
            assert tree.tokens.tolist() == [[1, 2, 1, 2, 1], [3, 3, 3, 3, 3]]

    def test_windows(self) -> None:
        text = [1, 2, 3, 1, 2, 4, 2]  # the 2 alone has been there twice, nothing longer has
        batch = batch_of({1: text})
        for low, high, expected in [(1, 12, {3, 4}), (1, 1, {3, 4}), (2, 12, set()), (2, 2, set())]:
            drafter = ngram_drafter(ngram_plan(2, 4, 8), windows=(low, high))
            drafter.begin(1, text)
            assert {
                token for parent, token in check_tree(drafter.propose(batch), batch, 4)[0] if parent == 0
            } == expected

    def test_up_to_the_last_position(self) -> None:
        drafter = ngram_drafter(ngram_plan(4, 4, 8))
        text = [1, 2] * 100
        drafter.begin(1, text[: POSITIONS - 9])
        batch = batch_of({1: text[: POSITIONS - 9]})
        assert drafter.propose(batch).shape.num_nodes == 5
        drafter.advance((1,), [text[POSITIONS - 9 :]])
        batch = batch_of({1: text})
        assert check_tree(drafter.propose(batch), batch, 4) == [[(0, 1), (1, 2), (2, 1), (3, 2)]]


class TestDrafterWithCorpus:
    def test_the_corpus_alone(self) -> None:
        drafter = ngram_drafter(ngram_plan(3, 4, 8), corpus=[1, 2, 3, 4, 9, 2, 3, 5])
        drafter.begin(1, [2])
        batch = batch_of({1: [2]})
        [row] = check_tree(drafter.propose(batch), batch, 4)
        assert sorted(row) == [(0, 3), (1, 4), (1, 5), (row.index((1, 4)) + 1, 9)]

    def test_own_text_comes_first(self) -> None:
        """Of matches of the same length the request's own decides, however many the corpus has."""
        drafter = ngram_drafter(ngram_plan(1, 2, 3), corpus=[7, 1] * 50)
        text = [7, 2, 7]
        drafter.begin(1, text)
        batch = batch_of({1: text})
        assert check_tree(drafter.propose(batch), batch, 2) == [[(0, 2), (0, 1)]]

    def test_longer_matches_of_the_corpus_win(self) -> None:
        drafter = ngram_drafter(ngram_plan(1, 2, 3), corpus=[3, 4, 5, 6, 7, 1])
        text = [7, 2, 3, 4, 5, 6, 7]
        drafter.begin(1, text)
        batch = batch_of({1: text})
        assert check_tree(drafter.propose(batch), batch, 2) == [[(0, 1), (0, 2)]]

    @pytest.mark.parametrize("corpus", [[], [1], [1, 1]])
    def test_next_to_nothing(self, corpus: list[int]) -> None:
        drafter = ngram_drafter(ngram_plan(3, 4, 8), corpus=corpus)
        drafter.begin(2, [1])
        batch = batch_of({2: [1]})
        assert check_tree(drafter.propose(batch), batch, 4) == [[(0, 1)] if len(corpus) == 2 else []]

    def test_weights(self) -> None:
        """Both kinds of matches, in one tree."""
        rng = random.Random(0)
        corpus = [rng.randrange(5) for _ in range(12)]  # fewer than are taken of it
        drafter, rule = ngram_drafter(ngram_plan(3, 3, 10), corpus), MatchRule(1, 12, 3, MAX_MATCHES)
        for length in range(1, 30):
            text = [rng.randrange(5) for _ in range(length)]
            drafter.begin(1, text)
            batch = batch_of({1: text})
            [row] = check_tree(drafter.propose(batch), batch, 3)
            voters = weighted(text, rule)
            for count, path in corpus_matches(corpus, text, rule):
                voters.append((WEIGHT_PER_TOKEN ** (count - 12) * CORPUS_WEIGHT, path))
            assert Counter(named_paths(row)) == Counter(named_paths(trie(voters, 3, 9)))


def named_paths(row: list[Edge]) -> list[tuple[int, ...]]:
    """Each node by the tokens from the root to it."""
    found: list[tuple[int, ...]] = [()]
    for parent, token in row:
        found.append((*found[parent], token))
    return found


VOCABULARY = 48  # of the tiny model
TREE = {"speculative_num_steps": 4, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
PAIR = {"speculative_num_steps": 4, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 2}
LARGE = {"speculative_num_steps": 7, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 24}
PAGES, PREEMPTED = {"page_size": 16}, {"max_total_tokens": 120}
SHAPES_AND_LIMITS = {
    "4/4/8 pages": (TREE, PAGES),
    "4/4/8 preempted": (TREE, PREEMPTED),
    "3/1/4 preempted": (CHAIN, PREEMPTED),
    "4/4/2 pages": (PAIR, PAGES),
    "7/3/24 pages": (LARGE, PAGES),
    "7/3/24 preempted": (LARGE, PREEMPTED),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_checkpoint(folder, 1, vocab_size=VOCABULARY, max_position_embeddings=128))


def generate(prompts: Sequence[str | list[int]], params: Sequence[SamplingParams], **flags: Any) -> list[RequestOutput]:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_running_requests": 8} | flags
    with LLM(**settings) as llm:
        outputs = llm.generate(prompts, params)
        assert (llm.engine.stats().num_preemptions > 0) == ("max_total_tokens" in flags)
    return outputs


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[tuple[int, ...], str, str]]:
    return [(output.token_ids, output.text, output.finish_reason) for output in outputs]


def mixed_params(max_tokens: int, count: int) -> list[SamplingParams]:
    """Greedy requests and sampled ones, with penalties and without, in turns."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0.0, "presence_penalty": 0.5},
    ]
    kinds.append({"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.3})
    return [SamplingParams(max_tokens=max_tokens - i, seed=i, ignore_eos=True, **kinds[i % 4]) for i in range(count)]


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


PROMPTS = random_prompts([1, 2, 8, 8, 21, 40, 5])
PARAMS = mixed_params(40, 7)


@pytest.fixture(scope="module")
def plain(tiny: str) -> list[RequestOutput]:
    return generate(PROMPTS, PARAMS, model=tiny, speculative_algorithm="none")


class TestTinyModel:
    """Random weights: greedy text falls into loops that n-grams foresee, sampled text does not."""

    @pytest.mark.fast_cases(3)
    @pytest.mark.parametrize(("shape", "limits"), SHAPES_AND_LIMITS.values(), ids=SHAPES_AND_LIMITS)
    def test_text_is_the_same(
        self, tiny: str, plain: list[RequestOutput], shape: dict[str, int], limits: dict[str, int]
    ) -> None:
        outputs = generate(PROMPTS, PARAMS, model=tiny, speculative_algorithm="ngram", **shape, **limits)
        assert answers(outputs) == answers(plain)
        num_drafts = shape.get("speculative_num_draft_tokens", 4) - 1
        fewest = min(shape["speculative_num_steps"], num_drafts)  # of a row that has any
        specs = [output.spec for output in outputs]
        assert any(spec.num_accepted_tokens for spec in specs)
        assert any(spec.num_draft_tokens < spec.num_verify_steps * fewest for spec in specs)  # some steps had no guess
        assert all(spec.num_draft_tokens <= spec.num_verify_steps * num_drafts for spec in specs)

    def test_up_to_the_end_of_the_context(self, tiny: str) -> None:
        prompts = [[1, 2] * 30, [7]]
        params = [SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)] * 2
        plain = generate(prompts, params, model=tiny, speculative_algorithm="none")
        outputs = generate(prompts, params, model=tiny, speculative_algorithm="ngram", **LARGE)
        assert answers(outputs) == answers(plain)
        assert [len(output.prompt_token_ids) + len(output.token_ids) for output in outputs] == [128, 128]


REPETITIVE = [
    "a = 1\nb = 2\nc = 3\na = 1\nb = 2\nc = 3\na = 1\nb = 2\n",
    "    def get_name(self):\n        return self.name\n\n    def get_size(self):\n        return self.size\n\n    def",
]
GREEDY, SAMPLED = (
    SamplingParams(max_tokens=48, temperature=temperature, seed=3, ignore_eos=True) for temperature in (0.0, 0.8)
)
DEMO: dict[str, Any] = {"context_length": 256}


class TestDemo:
    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("shape", [{}, CHAIN], ids=["tree", "chain"])
    def test_repetitive_text_is_foreseen(self, shape: dict[str, int]) -> None:
        prompts, params = [*REPETITIVE, *REPETITIVE], [GREEDY, GREEDY, SAMPLED, SAMPLED]
        plain = generate(prompts, params, speculative_algorithm="none", **DEMO)
        outputs = generate(prompts, params, speculative_algorithm="ngram", **DEMO, **shape)
        assert answers(outputs) == answers(plain)
        assert all(output.spec.accept_length > 1.5 for output in outputs[:2])
        assert all(output.spec.accept_length > 1.0 for output in outputs)

    @pytest.mark.slow
    def test_a_corpus_foresees_more(self, tmp_path: Path) -> None:
        """The corpus contains the text that the model will generate."""
        prompts = ["class Stack:\n    def __init__(self):\n", "import os\n\ndef read_file(path):\n"]
        params = [SAMPLED] * 2
        plain = generate(prompts, params, speculative_algorithm="none", **DEMO)
        file = tmp_path / "corpus.txt"
        file.write_text("\n".join(prompt + output.text for prompt, output in zip(prompts, plain, strict=True)), "utf8")
        without = generate(prompts, params, speculative_algorithm="ngram", **DEMO)
        outputs = generate(prompts, params, speculative_algorithm="ngram", speculative_ngram_corpus=file, **DEMO)
        assert answers(outputs) == answers(without) == answers(plain)
        for output, other in zip(outputs, without, strict=True):
            assert output.spec.accept_length > 2.5 > other.spec.accept_length

    def test_a_corpus_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"speculative_ngram_corpus: .* cannot be read"):
            LLM(speculative_algorithm="ngram", speculative_ngram_corpus=tmp_path / "none.txt")
