"""Suffix decoding: trees of rows that come and go, texts that are shared and those that are not, whole engines."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specmamba import LLM, SamplingParams
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.config import EngineConfig
from specmamba.core import DraftTextStats, RequestOutput
from specmamba.draft import suffix
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import SharedText
from specmamba.draft.suffix import SuffixDrafter
from specmamba.draft.suffix.shared_texts import MOST_TOKENS, OWN_BYTES, SharedTexts
from specmamba.errors import ConfigError
from specmamba.flags.other_names import translated
from specmamba.kernels import suffix_automaton
from specmamba.kernels.suffix_automaton import ROOT, DraftRule, Node, Tokens
from tests.draft.test_ngram import batch_of, check_tree
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("no_headroom")

CPU = torch.device("cpu")
ROWS, POSITIONS = 6, 400


def array(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def suffix_drafter(
    steps: int,
    topk: int,
    nodes: int,
    corpus: Sequence[int] | None = None,
    positions: int = POSITIONS,
    **flags: Any,
) -> SuffixDrafter:
    state = StateShape(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, conv_width=2)
    shape = CacheShape((KVShape(1, 1, 1),), 1, state=state, dtype=torch.float32)
    table = RequestTable(ROWS, positions, KVPool(shape, 4, 1, CPU), CPU)
    plan = DraftPlan("suffix", steps, topk, nodes, num_lookahead_slots=nodes)
    config = EngineConfig(speculative_algorithm="suffix", **flags)
    return SuffixDrafter(plan, config, table, None if corpus is None else torch.tensor(corpus))


def drafts(texts: Sequence[Sequence[int]], text: Sequence[int], rule: DraftRule) -> list[Node]:
    """Of automata that have one text each."""
    automata = [suffix_automaton.new_automaton(rule.max_match) for _ in texts]
    for automaton, known in zip(automata, texts, strict=True):
        automaton.extend(ROOT, array(known))
    return suffix_automaton.draft(automata, array(text), rule)


class TestDrafter:
    @pytest.mark.parametrize(("steps", "topk", "nodes"), [(4, 4, 8), (3, 1, 4), (5, 2, 16)])
    def test_requests_start_and_end(self, steps: int, topk: int, nodes: int) -> None:
        """Rows start, grow by any number of tokens, and are reused: trees and candidates of fresh automata."""
        rng = random.Random(nodes)
        drafter = suffix_drafter(steps, topk, nodes, speculative_suffix_min_probability=0.01)
        rule = DraftRule(nodes - 1, topk, steps, nodes, min_probability=0.01)
        levels = DraftRule(steps * topk, topk, steps, topk)
        known: dict[int, list[int]] = {}
        for _ in range(60):
            row = rng.randint(1, ROWS)
            if row not in known or len(known[row]) > 60 or rng.random() < 0.1:
                letters = rng.choice([1, 3, 30])
                known[row] = [rng.randrange(letters) for _ in range(rng.randint(1, 20))]
                drafter.begin(row, known[row])
            members = sorted(rng.sample(sorted(known), rng.randint(1, len(known))))
            batch = batch_of({row: known[row] for row in members})
            expected = [drafts([known[row]], known[row], rule) for row in members]
            assert check_tree(drafter.propose(batch), batch, topk) == [
                [(node.parent, node.token) for node in nodes] for nodes in expected
            ]
            offer = drafter.offer(batch, steps)
            for i, row in enumerate(members):
                found = dict[int, tuple[tuple[int, ...], float]]()
                for place in np.flatnonzero(np.isfinite(offer.logp[i].numpy())).tolist():
                    parent = int(offer.parents[i, place])
                    assert offer.depths[place] == (offer.depths[parent - 1] + 1 if parent else 1)
                    path = (
                        (*found[parent][0], int(offer.tokens[i, place])) if parent else (int(offer.tokens[i, place]),)
                    )
                    found[place + 1] = path, float(offer.logp[i, place].exp())
                paths: list[tuple[int, ...]] = [()]
                for node in (wanted := drafts([known[row]], known[row], levels)):
                    paths.append((*paths[node.parent], node.token))
                shares = [node.probability for node in wanted]
                assert dict(found.values()) == pytest.approx(dict(zip(paths[1:], shares, strict=True)), rel=1e-5)
            new = [[rng.randrange(3) for _ in range(rng.randint(1, nodes))] for _ in members]
            drafter.advance(members, new)
            for row, tokens in zip(members, new, strict=True):
                known[row].extend(tokens)

    def test_texts_are_shared_within_a_key_alone(self) -> None:
        drafter = suffix_drafter(3, 4, 4)
        text = [5, 6, 7, 8]
        for row, key in ((1, "a"), (2, "a"), (3, "b")):
            drafter.share(row, SharedText(key))
            drafter.begin(row, text if row == 1 else [5, 6])
        drafter.begin(4, [5, 6])  # of no key
        batch = batch_of({row: [5, 6] for row in (2, 3, 4)})
        assert check_tree(drafter.propose(batch), batch, 4) == [[(0, 7), (1, 8)], [], []]
        drafter.end(1)
        drafter.share(1, SharedText("b"))
        drafter.begin(1, [1])  # the text of the row's former request stays known under its own key
        assert check_tree(drafter.propose(batch), batch, 4) == [[(0, 7), (1, 8)], [], []]
        drafter.forget_texts()
        assert check_tree(drafter.propose(batch), batch, 4) == [[], [], []]

    def test_the_memory_of_a_text_goes_when_its_request_ends(self) -> None:
        drafter = suffix_drafter(3, 4, 4)
        first = SharedText("a")
        drafter.share(1, first)
        drafter.begin(1, [5, 6, 7])
        drafter.propose(batch_of({1: [5, 6, 7]}))
        assert drafter.text_stats.own_bytes > 0
        drafter.advance((1,), [[8, 9]])
        drafter.end(1)
        drafter.end(1)  # nothing more to free
        assert drafter.text_stats.own_bytes == 0 < drafter.text_stats.shared_bytes
        assert drafter._shared is not None
        (automaton,) = drafter._shared.of("a")
        kept = weakref.ref(automaton)
        del automaton
        drafter.share(2, SharedText("a"))
        drafter.begin(2, [5])
        batch = batch_of({2: [5]})
        assert check_tree(drafter.propose(batch), batch, 4) == [[(0, 6), (1, 7), (2, 8)]]  # its last tokens too
        drafter.forget_texts()
        assert kept() is None
        assert first.num_tokens == 5

    def test_the_text_of_a_preempted_request_counts_once(self) -> None:
        drafter, text = suffix_drafter(1, 4, 4), SharedText("a")
        for known in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]):
            drafter.share(1, text)
            drafter.begin(1, known[:-1])
            drafter.advance((1,), [known[-1:]])
            drafter.end(1)
        drafter.share(2, SharedText("a"))
        drafter.begin(2, [1])
        offer = drafter.offer(batch_of({2: [1]}), 1)
        doubt = float(DraftRule(1, 1, 1, 1).doubts[1])
        assert float(offer.logp[0, 0].exp()) == pytest.approx(1.5 / (1.5 + doubt))

    def test_a_long_prompt_is_added_step_by_step(self) -> None:
        text = [*range(3 * MOST_TOKENS), 5000]
        drafter, shared = suffix_drafter(2, 4, 4, positions=len(text)), SharedText("a")
        drafter.share(1, shared)
        drafter.begin(1, text)
        batch = batch_of({1: text})
        for number in range(1, 5):
            edges = check_tree(drafter.propose(batch), batch, 4)
            assert edges == ([[(0, 5001), (1, 5002)]] if number > 1 else [[]])
            assert drafter._texts[1].num_added == shared.num_tokens == min(number * MOST_TOKENS, len(text))
        assert not drafter._grown

    def test_a_long_text_that_ends_early_shares_its_last_tokens(self) -> None:
        text, shared = list(range(MOST_TOKENS + 100)), SharedText("a")
        drafter = suffix_drafter(1, 4, 4, positions=len(text))
        drafter.share(1, shared)
        drafter.begin(1, text)
        drafter.end(1)
        assert shared.num_tokens == len(text)
        for token, expected in ((0, []), (text[-2], [(0, text[-1])])):
            drafter.share(2, SharedText("a"))
            drafter.begin(2, [token])
            batch = batch_of({2: [token]})
            assert check_tree(drafter.propose(batch), batch, 4) == [expected]
            drafter.end(2)

    @pytest.mark.parametrize("flag", ["disable_radix_cache", "speculative_suffix_shared_mib"])
    def test_nothing_is_shared_where_flags_say_so(self, flag: str) -> None:
        drafter = suffix_drafter(3, 4, 4, None, **{flag: flag == "disable_radix_cache"})
        for row, text in ((1, [5, 6, 7, 8]), (2, [5, 6])):
            drafter.share(row, SharedText("a"))
            drafter.begin(row, text)
        batch = batch_of({2: [5, 6]})
        assert check_tree(drafter.propose(batch), batch, 4) == [[]]

    def test_candidates_behind_the_longest_context_have_a_probability(self) -> None:
        common = list(range(10, 33))
        text = [2, *common, 9, *[3, *common, 8] * 10, 3, *common, 9, 3, *common, 8, 3, *common]
        drafter = suffix_drafter(2, 4, 8, speculative_suffix_max_match=24)
        drafter.begin(1, text)
        offer = drafter.offer(batch_of({1: text}), 2)  # shorter contexts have no part in it
        shares = dict(zip(offer.tokens[0, :2].tolist(), offer.logp[0, :2].exp().tolist(), strict=True))
        assert shares == pytest.approx({8: 11.5 / 12.6, 9: 1 / 12.6}, abs=0.01)

    def test_the_corpus(self) -> None:
        drafter = suffix_drafter(2, 4, 8, corpus=[1, 2, 3, 4, 9, 2, 3, 5])
        drafter.begin(1, [2])
        batch = batch_of({1: [2]})
        assert check_tree(drafter.propose(batch), batch, 4) == [[(0, 3), (1, 5), (1, 4)]]

    def test_a_corpus_that_is_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suffix, "MAX_TOKENS", 3)
        with pytest.raises(ConfigError, match=r"suffix-corpus: big\.txt has 4 tokens, and 3 can be counted"):
            suffix_drafter(2, 4, 8, [1, 2, 3, 4], speculative_suffix_corpus="big.txt")
        suffix_drafter(2, 4, 8, [1, 2, 3])


class TestSharedTexts:
    def test_memory_is_bounded_and_the_oldest_texts_go(self) -> None:
        rng, most = random.Random(3), 400_000
        shared = SharedTexts(most, 16)
        texts = {key: [rng.randrange(50) for _ in range(3000)] for key in ("old", "new", "newest")}
        parts = {key: SharedText(key) for key in texts}
        for key, text in texts.items():
            for end in range(500, 3001, 500):
                shared.extend(parts[key], array(text[:end]))
                assert shared.num_bytes <= most
                counted = [a.num_bytes + OWN_BYTES for one in texts for a in shared.of(one)]
                assert shared.num_bytes == sum(counted)
        assert shared.num_dropped
        rule = DraftRule(1, 1, 1, 1, max_match=16)
        for key, is_known in (("old", False), ("newest", True)):
            nodes = suffix_automaton.draft(shared.of(key), array(texts[key][2000:2990]), rule)
            assert (bool(nodes) and nodes[0].token == texts[key][2990]) == is_known

    def test_a_text_goes_on_after_its_beginning_was_dropped(self) -> None:
        shared, part = SharedTexts(60_000, 8), SharedText("a")
        rng = random.Random(5)
        text = [rng.randrange(100) for _ in range(2 * MOST_TOKENS)]
        shared.extend(part, array(text[:500]))
        shared.forget()
        assert (shared.num_bytes, shared.of("a")) == (0, [])
        shared.extend(part, array(text[:510]))
        (automaton,) = shared.of("a")
        rule = DraftRule(9, 1, 9, 9, max_match=8)
        nodes = suffix_automaton.draft([automaton], array(text[:500]), rule)
        assert [node.token for node in nodes] == text[500:509]
        while part.num_tokens < len(text):
            shared.extend(part, array(text))  # more than all of the memory
            assert shared.num_bytes <= 60_000


VOCABULARY = 48
FLAGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "speculative_algorithm": "suffix", "num_threads": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_checkpoint(folder, 1, vocab_size=VOCABULARY, max_position_embeddings=128))


@pytest.mark.parametrize("adaptive", ["off", "auto"])
def test_the_text_is_that_of_plain_decoding(tiny: str, adaptive: str) -> None:
    """Alone and preempted, cold and from the prefix cache, greedy and sampled."""
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 2, 8, 8, 21, 40)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0, "presence_penalty": 1},
    ]
    params = [SamplingParams(max_tokens=40 - i, seed=i, ignore_eos=True, **kinds[i % 3]) for i in range(6)]
    rounds: dict[str, list[list[RequestOutput]]] = {}
    for algorithm in ("none", "suffix"):
        settings = FLAGS | {"model": tiny, "speculative_algorithm": algorithm, "speculative_adaptive": adaptive}
        with LLM(**settings, max_total_tokens=120) as llm:
            rounds[algorithm] = [llm.generate(prompts, params) for _ in range(2)]
            assert llm.engine.stats().num_preemptions
    for plain, outputs in zip(rounds["none"], rounds["suffix"], strict=True):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    if adaptive == "off":
        first, again = ([output.spec.accept_length for output in outputs] for outputs in rounds["suffix"])
        assert sum(again) > 1.5 * sum(first)  # of texts that are known


def test_salts_never_share_texts() -> None:
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=1, ignore_eos=True)
    with LLM(**FLAGS, speculative_adaptive="off", context_length=256) as llm:

        def spec(key: str | None) -> tuple[int, int]:
            (output,) = llm.generate(["class Stack:\n    def __init__(self):\n"], params, extra_key=key)
            return output.spec.num_accepted_tokens, output.spec.num_draft_tokens

        alone = spec("mine")
        assert spec("mine")[0] > alone[0]
        assert spec("yours") == alone
        assert spec(None) == alone
        stats = llm.engine.stats().draft_texts
        assert stats is not None
        assert stats.shared_bytes > 0 == stats.own_bytes == stats.corpus_bytes == stats.num_dropped
        llm.flush_cache()
        assert llm.engine.stats().draft_texts == DraftTextStats(0, 0, 0, 0)
        assert spec("mine") == alone


def test_a_corpus_that_cannot_be_read(tmp_path: Path) -> None:
    for content, problem in ((None, "cannot be read"), (b"ab\xff", "not a UTF-8 text"), (b" \n", "has no text in it")):
        if content is not None:
            (tmp_path / "corpus.txt").write_bytes(content)
        with pytest.raises(ConfigError, match=f"speculative_suffix_corpus: .*{problem}"):
            LLM(**FLAGS, speculative_suffix_corpus=tmp_path / "corpus.txt")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"suffix_factor": 2.0}, "suffix-factor needs --speculative-algorithm suffix"),
        ({"algorithm": "suffix", "ngram_corpus": "c"}, "ngram-corpus needs --speculative-algorithm ngram"),
        ({"algorithm": "suffix", "tree": "t.json"}, "suffix makes its own drafts"),
        ({"algorithm": "suffix", "draft_model_path": "x"}, "suffix has no use for it"),
        ({"algorithm": "suffix", "suffix_max_match": 1}, "greater than or equal to 2"),
        ({"algorithm": "suffix", "suffix_shared_mib": 8}, "suffix-shared-mib: .* drop it, or --disable-radix-cache"),
    ],
)
def test_flags_that_do_not_fit(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        EngineConfig(
            disable_radix_cache="suffix_shared_mib" in flags,
            **{f"speculative_{name}": value for name, value in flags.items()},
        )


def test_names_of_vllm() -> None:
    config = {"method": "suffix", "suffix_decoding_max_spec_factor": 1.5, "suffix_decoding_max_tree_depth": 24}
    fields, _ = translated({"speculative_config": config | {"suffix_decoding_min_token_prob": 0.1}})
    assert EngineConfig(**fields).suffix_rules == (24, 1.5, 0.1, 64)
