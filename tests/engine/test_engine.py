"""The engine from outside: seeds, penalties, ends, order, preemption, aborts; the same text however it is computed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.cache.prefix.node import slots_between
from specmamba.cache.state_pool import Stamp
from specmamba.config import EngineConfig
from specmamba.core import Batch, DraftTree, OutputDelta, SpecStats, TreeShape, Verdict
from specmamba.draft.drafter import Drafter, chain_shape, tree_shape
from specmamba.engine.engine import Engine
from specmamba.engine.request import Request
from specmamba.errors import PromptTooLongError, QueueFullError, RequestError
from specmamba.sampling_params import AcceptRule, SpeculationParams
from specmamba.verify import step as step_module
from specmamba.verify.acceptance import accept
from tests.kernels.trees import path_to, random_parents
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("no_headroom")

VOCABULARY = 48
CONTEXT = 128  # of the tiny model
NewRequest = tuple[str, Sequence[int], SamplingParams]
Answer = tuple[tuple[int, ...], str, str | None]  # tokens, text, finish reason
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
FULL = SamplingParams(max_tokens=40, temperature=0.0, presence_penalty=0.5, ignore_eos=True)  # does not loop
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model, whose MTP head is nearly always wrong: where drafts are to be accepted, see ``Oracle``."""
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_checkpoint(folder, 1, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT))


def build(model: str | None = None, mtp: int = 3, **flags: Any) -> Engine:
    """An engine with ``mtp`` draft steps (0: plain decoding); the demo where no model is given."""
    speculation: dict[str, Any] = {"speculative_algorithm": "mtp", "speculative_num_steps": mtp}
    limits = {"context_length": 256} if model is None and "max_total_tokens" not in flags else {}
    settings: dict[str, Any] = limits | {"dtype": "float32", "device": "cpu", "max_running_requests": 8} | flags
    if "speculative_algorithm" not in flags:
        settings |= speculation if mtp else {"speculative_algorithm": "none"}
    return Engine(EngineConfig(model=model, **settings))


def change(params: SamplingParams, **updates: Any) -> SamplingParams:
    return SamplingParams(**(params.model_dump() | updates))


def ask(params: SamplingParams, rule: AcceptRule) -> SamplingParams:
    """The same settings, and a rule of acceptance."""
    return change(params, speculative=SpeculationParams(accept=rule))


def run(engine: Engine, requests: Iterable[NewRequest] = (), max_steps: int = 5000) -> dict[str, list[OutputDelta]]:
    """Run to the end; afterwards nothing may be held."""
    deltas: dict[str, list[OutputDelta]] = {}
    for request in requests:
        engine.add_request(*request)
        deltas[request[0]] = []
    for _ in range(max_steps):
        if not engine.has_unfinished_requests:
            break
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    assert_idle(engine)
    return deltas


def assert_idle(engine: Engine) -> None:
    """Every pool is as it was at the start, once the prefix cache is flushed."""
    pools = engine.pools
    assert not engine.has_unfinished_requests
    engine.cache_manager.cache.check(pools.table.held_pages())
    engine.flush_cache()
    stats = engine.stats()
    assert (stats.kv_cached_tokens, stats.state_cached_slots) == (0, 0)
    assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens, stats.state_used_slots) == (0, 0, 0, 0)
    assert pools.kv.allocator.num_free == pools.kv.allocator.num_pages
    assert pools.table.num_free_rows == pools.table.num_rows
    assert pools.states.num_free == pools.states.num_slots
    assert not engine.live.by_id
    assert not pools.state_buffers._leases
    records: Any = pools.state_buffers
    assert not any(records._num_pending)
    assert not pools.counts._rows
    assert not pools.table.kv_slots.any()


def assert_consistent(engine: Engine) -> None:
    """In the middle of everything: each request holds exactly its own, and the stamps say so."""
    pools, scheduler = engine.pools, engine.scheduler
    running = [*scheduler.extending, *scheduler.verifying]
    assert len(running) + len(scheduler.waiting) == len(engine.live.by_id)
    running += engine.cycle.chain.ended  # told, but part of the step in flight
    assert len({r.row for r in running}) == len({r.slot for r in running}) == len(running)
    assert pools.table.num_free_rows == pools.table.num_rows - len(running)
    cache = engine.cache_manager.cache
    cache.check(pools.table.held_pages())
    steps = [
        engine.cycle.known_tokens.unread,
        None if engine.cycle.in_flight is None else engine.cycle.in_flight.extend,
    ]
    num_copies = sum(state is not None for extend in steps if extend is not None for state in extend.states)
    assert pools.states.num_free == pools.states.num_slots - len(running) - cache.stats.num_states - num_copies
    assert all(r.node is not None and r.node.end <= r.num_run and r.node.kv_locks > 0 for r in running)
    assert all(r.node is None for r in scheduler.waiting)
    for request in running:  # what is borrowed is what the tree has
        node, row = request.node, request.held_row
        assert node is not None
        root = cache.root(request.extra_key)
        assert pools.table.slots_of_positions(row, 0, node.end).tolist() == slots_between(root, node).tolist()
    for request in scheduler.extending:
        assert pools.states.stamp(request.held_slot) == Stamp(request.request_id, request.num_run, is_written=True)
    for request in scheduler.verifying:
        assert pools.states.stamp(request.held_slot).owner == request.request_id
        assert pools.state_buffers.position(request.held_row) == request.root_position
    assert all(r.row is None and r.slot is None and r.num_run == 0 for r in scheduler.waiting)


def text_of(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: Sequence[OutputDelta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def answer(deltas: Sequence[OutputDelta]) -> Answer:
    """What must not depend on how it was computed."""
    return tokens_of(deltas), text_of(deltas), deltas[-1].finish_reason


def answers(deltas: dict[str, list[OutputDelta]]) -> dict[str, Answer]:
    return {name: answer(of_request) for name, of_request in deltas.items()}


class Oracle(Drafter):
    """Knows the texts, and errs at random: chains or trees that are accepted to any depth."""

    def __init__(self, engine: Engine, texts: Mapping[str, Sequence[int]], max_nodes: int, trees: bool) -> None:
        self.max_nodes = max_nodes
        self._engine, self._texts, self._trees = engine, texts, trees
        self._rng = random.Random(max_nodes)
        engine.runner.drafter = self

    def propose(self, batch: Batch) -> DraftTree:
        requests = {request.held_row: request for request in self._engine.scheduler.verifying}
        shapes = ("bushy", "binary", "star", "padded") if self._trees else ("chain",)
        parents = [random_parents(self._rng.choice(shapes), self.max_nodes, self._rng) for _ in batch.rows]
        tokens = [self._tokens(requests[row], tree) for row, tree in zip(batch.rows, parents, strict=True)]
        return DraftTree(torch.tensor(tokens), self._shape(torch.tensor(parents)))

    def _shape(self, parents: Tensor) -> TreeShape:
        if not self._trees:
            return chain_shape(*parents.shape, parents.device)
        return tree_shape(parents, parents.shape[1])

    def _tokens(self, request: Request, parents: list[int]) -> list[int]:
        tokens = [request.root_token]
        text = self._texts[request.request_id]
        for node in range(1, len(parents)):
            at = len(request.output) + len(path_to(parents, node)) - 2
            knows = at < len(text) and self._rng.random() < 0.75
            tokens.append(text[at] if knows else self._rng.randrange(VOCABULARY))
        return tokens


def mixed_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Any combination of settings."""
    penalised = rng.random() < 0.4
    return SamplingParams(
        max_tokens=rng.randint(1, max_tokens),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.3]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        top_k=rng.choice([0, 0, 20, 1]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.7, -0.5]) if penalised else 0.0,
        frequency_penalty=rng.choice([0.0, 0.4]) if penalised else 0.0,
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]) if penalised else 1.0,
        seed=rng.randrange(2**31),
        stop=tuple(rng.sample(["a", "1", "#", "%", "0", "'", "("], rng.choice([0, 0, 1, 2]))),
        stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 1]))),
        ignore_eos=rng.random() < 0.5,
    )


def random_requests(seed: int, count: int, max_prompt: int = 30, max_tokens: int = 30) -> list[NewRequest]:
    rng = random.Random(seed)
    return [
        (
            f"r{i}",
            [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 4, rng.randint(1, max_prompt)]))],
            mixed_params(rng, max_tokens),
        )
        for i in range(count)
    ]


PROMPT = [300, 17, 42, 1999, 8]  # tokens of the demo
COMPANY = [(f"other-{i}", [900 + i, 5, i], change(SAMPLED, seed=i, temperature=0.3 * i)) for i in range(5)]


@pytest.fixture(scope="module")
def alone() -> Answer:
    return answer(run(build(mtp=0), [("a", PROMPT, SAMPLED)])["a"])


class TestSeeds:
    @pytest.mark.fast_cases(2)
    @pytest.mark.parametrize("mtp", [0, 1, 3, 5])
    def test_alone_and_in_company(self, mtp: int, alone: Answer) -> None:
        engine = build(mtp=mtp)
        assert answer(run(engine, [("a", PROMPT, SAMPLED)])["a"]) == alone
        in_company = run(engine, [*COMPANY[:3], ("a", PROMPT, SAMPLED), *COMPANY[3:], ("b", PROMPT, SAMPLED)])
        assert answer(in_company["a"]) == answer(in_company["b"]) == alone
        if mtp:
            assert in_company["a"][-1].spec.num_accepted_tokens > 0

    @pytest.mark.parametrize("mtp", [0, 3])
    def test_with_preemption(self, mtp: int, alone: Answer) -> None:
        engine = build(mtp=mtp, max_total_tokens=60)
        deltas = run(engine, [*COMPANY[:3], ("a", PROMPT, SAMPLED)])
        assert engine.stats().num_preemptions > 0
        assert answer(deltas["a"]) == alone

    def test_arriving_late(self, alone: Answer) -> None:
        engine = build()
        for request in COMPANY:
            engine.add_request(*request)
        for _ in range(5):
            engine.step()
        assert answer(run(engine, [("a", PROMPT, SAMPLED)])["a"]) == alone

    def test_other_seeds_give_other_texts(self, tiny: str) -> None:
        seeds = [0, 1, 2, -1, 2**63 - 1, -(2**63), 1 << 32]
        deltas = run(build(tiny), [(str(seed), [5], change(SAMPLED, seed=seed)) for seed in seeds])
        assert len({tokens_of(of_request) for of_request in deltas.values()}) == len(seeds)

    def test_unseeded_requests_follow_the_engine(self, tiny: str) -> None:
        unseeded = change(SAMPLED, seed=None)
        requests = [(str(i), [5], unseeded) for i in range(4)]
        flags: dict[str, Any] = {"speculative_accept": "target"}
        first = answers(run(build(tiny, seed=1, **flags), requests))
        assert len(set(first.values())) == 4  # not the same text four times
        assert answers(run(build(tiny, seed=1, mtp=0), requests)) == first
        assert not set(first.values()) & set(answers(run(build(tiny, seed=2, **flags), requests)).values())
        with_seeded_between = [(f"{i}{k}", [5], unseeded if k else GREEDY) for i in range(2) for k in (0, 1)]
        assert answers(run(build(tiny, seed=1, **flags), with_seeded_between))["01"] == first["1"]

    def test_unseeded_requests_follow_the_engine_and_their_drafts_unless_target_is_asked_for(self, tiny: str) -> None:
        unseeded = change(SAMPLED, seed=None)
        requests = [(str(i), [5], unseeded) for i in range(4)]
        first = answers(run(build(tiny, seed=1), requests))
        assert answers(run(build(tiny, seed=1), requests)) == first
        plain = answers(run(build(tiny, seed=1, mtp=0), requests))
        assert not set(first.values()) & set(plain.values())  # decided under rejection, by other random numbers
        asking = [(name, prompt, ask(params, "target")) for name, prompt, params in requests]
        assert answers(run(build(tiny, seed=1), asking)) == plain

    @pytest.mark.fast_cases(2)
    @pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
    @pytest.mark.parametrize("page_size", [1, 4])
    def test_whatever_is_drafted(self, tiny: str, trees: bool, page_size: int) -> None:
        """A drafter can only cost time: chains and trees that are right to any depth leave the text as it is."""
        requests = random_requests(seed=3, count=16)
        plain = run(build(tiny, mtp=0), requests)
        full = run(build(tiny, mtp=0), [(n, p, change(s, stop=(), stop_token_ids=())) for n, p, s in requests])
        engine = build(tiny, mtp=6, page_size=page_size, max_total_tokens=100)
        Oracle(engine, {name: tokens_of(deltas) for name, deltas in full.items()}, 7, trees)
        assert answers(run(engine, requests)) == answers(plain)
        spec = engine.stats().spec
        assert spec.accept_length > 1.5
        assert all(count > 0 for count in spec.accepted_histogram[:4])
        assert engine.stats().num_preemptions > 0


PENALTIES: list[dict[str, float]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.3},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
]


class TestPenalties:
    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_drafts_do_not_change_the_text(self, temperature: float) -> None:
        """Alone and side by side with requests that have other penalties or none."""
        params = [change(SAMPLED, temperature=temperature, max_tokens=32, **p) for p in [{}, *PENALTIES]]
        requests = [(str(i), PROMPT, p) for i, p in enumerate(params)]
        plain = answers(run(build(mtp=0), requests))
        assert all(plain[str(i)] != plain["0"] for i in range(1, len(requests)))  # each of them does something
        engine = build(mtp=3)
        assert answers(run(engine, requests)) == plain
        assert engine.stats().spec.accept_length > 1.3
        for request in requests[1:4]:
            assert answers(run(engine, [request])) == {request[0]: plain[request[0]]}

    @pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
    def test_every_token_is_chosen_with_its_own_history(
        self, tiny: str, trees: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The penalised argmax of the raw logits, counted anew for every token, several tokens per step."""
        checked: list[Any] = []

        def checking(
            tree: DraftTree, logits: Tensor, batch: Batch, history: tuple[Tensor, Tensor] | None, *policy: Any
        ) -> Verdict:
            verdict = accept(tree, logits, batch, history, *policy)
            requests = sorted(engine.scheduler.verifying, key=lambda request: request.held_row)
            for b, request in enumerate(requests):
                output = list(request.output)
                for step in range(int(verdict.num_accepted[b]) + 1):
                    raw = logits[b, verdict.path[b, step]]
                    expected = penalised(raw, request.params, request.prompt, output).argmax()
                    assert verdict.path_tokens[b, step] == expected
                    output.append(int(expected))
                checked.append(len(output) - len(request.output))
            return verdict

        greedy = change(GREEDY, max_tokens=30)
        requests = [(str(i), [i, 3, i], change(greedy, **p)) for i, p in enumerate([*PENALTIES, {}, *PENALTIES])]
        texts = {name: tokens_of(deltas) for name, deltas in run(build(tiny, mtp=0), requests).items()}
        engine = build(tiny, mtp=4, max_total_tokens=150)  # with preemption: counts start over
        Oracle(engine, texts, 5, trees)
        monkeypatch.setattr(step_module, "accept", checking)
        assert {name: tokens_of(deltas) for name, deltas in run(engine, requests).items()} == texts
        assert max(checked) > 2
        assert engine.stats().num_preemptions > 0

    def test_a_row_used_by_others_before(self, tiny: str) -> None:
        engine = build(tiny, max_running_requests=1)
        penalised_request = ("p", [1, 2], change(GREEDY, **PENALTIES[4]))
        first = answers(run(engine, [penalised_request]))
        run(engine, [("other", [5, 6], change(GREEDY, **PENALTIES[3])), ("plain", [5, 6], GREEDY)])
        assert answers(run(engine, [penalised_request])) == first
        assert answers(run(engine, [("n", [1, 2], GREEDY)])) == answers(run(build(tiny), [("n", [1, 2], GREEDY)]))


def penalised(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    result = logits.clone()
    for token in {*prompt, *output}:
        strength = params.repetition_penalty
        result[token] = result[token] / strength if result[token] > 0 else result[token] * strength
    for token in set(output):
        result[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return result


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """The demo without drafts and with some; used by test after test."""
    return [build(mtp=mtp, max_running_requests=16) for mtp in (0, 3, 5)]


@pytest.fixture(scope="module")
def full(engines: list[Engine]) -> tuple[tuple[int, ...], str]:
    """What the engines say when nothing stops them."""
    tokens, text, reason = answer(run(engines[0], [("a", PROMPT, change(FULL, stop=()))])["a"])
    assert (len(tokens), reason) == (40, "length")
    return tokens, text


class TestEnds:
    @pytest.mark.slow
    def test_stop_strings_anywhere(self, engines: list[Engine], full: tuple[tuple[int, ...], str]) -> None:
        """Pieces of the text of any length at any place: inside of tokens, across tokens, across steps."""
        tokens, text = full
        rng = random.Random(0)
        stops = []
        for _ in range(48):
            start = rng.randrange(len(text))
            pieces = [text[start : start + rng.choice([1, 2, 3, 5, 9])]]
            if rng.random() < 0.3:  # several, and some that never come or come later
                pieces += [rng.choice(["never", text[-4:], text[start : start + 1] + "~"])]
            stops.append(tuple(pieces))
        requests = [(str(i), PROMPT, change(FULL, stop=s)) for i, s in enumerate(stops)]
        for engine in engines:
            found = answers(run(engine, requests))
            for i, stop in enumerate(stops):
                count, cut = self.naive(engine, tokens, stop)
                assert found[str(i)] == (tokens[:count], cut, "stop")

    @staticmethod
    def naive(engine: Engine, tokens: Sequence[int], stops: Sequence[str]) -> tuple[int, str]:
        for count in range(1, len(tokens) + 1):
            text = engine.tokenizer.decode(tokens[:count])
            found = [text.find(stop) for stop in stops if stop in text]
            if found:
                return count, text[: min(found)]
        raise AssertionError("no stop string in the text")

    def test_a_stop_string_at_the_very_end(self, engines: list[Engine], full: tuple[tuple[int, ...], str]) -> None:
        tokens, text = full
        for engine in engines:
            first_end = next(
                n for n in range(1, 41) if text.find(text[-6:]) + 6 <= len(engine.tokenizer.decode(tokens[:n]))
            )
            params = change(FULL, max_tokens=first_end, stop=text[-6:])
            expected = (tokens[:first_end], text[: text.find(text[-6:])], "stop")
            assert answer(run(engine, [("a", PROMPT, params)])["a"]) == expected

    def test_half_a_stop_string_at_the_end_is_text(
        self, engines: list[Engine], full: tuple[tuple[int, ...], str]
    ) -> None:
        tokens, text = full
        for engine in engines:
            params = change(FULL, stop=(text[-5:] + "~", text[-1:] + "~~"))
            assert answer(run(engine, [("a", PROMPT, params)])["a"]) == (tokens, text, "length")

    def test_stop_ids(self, engines: list[Engine], full: tuple[tuple[int, ...], str]) -> None:
        tokens, _ = full
        for engine in engines:
            for token in sorted(set(tokens), key=tokens.index)[::3]:
                count = tokens.index(token) + 1
                params = change(FULL, stop_token_ids=(token, 4095))
                expected = (tokens[:count], engine.tokenizer.decode(tokens[: count - 1]), "stop")
                assert answer(run(engine, [("a", PROMPT, params)])["a"]) == expected

    @pytest.mark.fast_cases(3)
    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 11, 40])
    def test_never_more_than_max_tokens(
        self, engines: list[Engine], full: tuple[tuple[int, ...], str], max_tokens: int
    ) -> None:
        tokens, _ = full
        for engine in engines:
            deltas = run(engine, [("a", PROMPT, change(FULL, max_tokens=max_tokens))])["a"]
            expected = tokens[:max_tokens]
            assert answer(deltas) == (expected, engine.tokenizer.decode(expected), "length")
            assert deltas[-1].num_output_tokens == max_tokens

    @pytest.mark.parametrize("mtp", [0, 3])
    def test_end_of_text(self, tiny: str, mtp: int) -> None:
        engine = build(tiny, mtp=mtp)
        params = [change(SAMPLED, seed=seed, temperature=1.3, max_tokens=40) for seed in range(16)]
        going_on = run(engine, [(str(i), [5], p) for i, p in enumerate(params)])
        ending = run(engine, [(str(i), [5], change(p, ignore_eos=False)) for i, p in enumerate(params)])
        num_ended = 0
        for name, deltas in going_on.items():
            tokens = tokens_of(deltas)
            assert deltas[-1].finish_reason == "length"
            if 0 not in tokens:  # the end-of-text token
                assert answer(ending[name]) == answer(deltas)
                continue
            num_ended += 1
            count = tokens.index(0) + 1
            assert answer(ending[name]) == (tokens[:count], engine.tokenizer.decode(tokens[: count - 1]), "stop")
        assert num_ended > 2

    @pytest.mark.fast_cases(3)
    @pytest.mark.parametrize("mtp", [0, 1, 5])
    @pytest.mark.parametrize(("page_size", "chunk"), [(1, 512), (16, 7), (7, 128)])
    def test_the_context_ends(self, tiny: str, mtp: int, page_size: int, chunk: int) -> None:
        """Up to the last position, with the longest prompts there are, one per length."""
        engine = build(tiny, mtp=mtp, page_size=page_size, chunked_prefill_size=chunk)
        assert engine.context_length == CONTEXT
        endless = change(GREEDY, max_tokens=10_000)
        lengths = [CONTEXT - n for n in (1, 2, 3, 7)] + [1]
        deltas = run(engine, [(str(n), [n % VOCABULARY] * n, endless) for n in lengths])
        for n in lengths:
            assert deltas[str(n)][-1].finish_reason == "length"
            assert len(tokens_of(deltas[str(n)])) == CONTEXT - n

    @pytest.mark.parametrize("mtp", [0, 3])
    def test_short_chunk_ends_beside_long_chunk_begins(self, tiny: str, mtp: int) -> None:
        """The padded chunk reaches beyond the context: the last 2 tokens of one prompt beside 32 of another."""
        requests = [("long", [5] * 67, GREEDY), ("short", [6] * 33, GREEDY)]
        expected = answers(run(build(tiny, mtp=mtp, context_length=70), requests[:1]))
        expected |= answers(run(build(tiny, mtp=mtp, context_length=70), requests[1:]))
        engine = build(tiny, mtp=mtp, context_length=70, chunked_prefill_size=64)
        assert answers(run(engine, requests)) == expected

    def test_deltas_make_the_whole(self, engines: list[Engine], full: tuple[tuple[int, ...], str]) -> None:
        for engine in engines:
            prompts = [PROMPT, PROMPT[:1], PROMPT * 9]
            everything = run(engine, [(str(i), p, change(GREEDY, max_tokens=30)) for i, p in enumerate(prompts)])
            for i, prompt in enumerate(prompts):
                deltas = everything[str(i)]
                assert engine.tokenizer.decode(tokens_of(deltas)) == text_of(deltas)
                assert all(delta.token_ids for delta in deltas)
                assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
                num_tokens = 0
                for delta in deltas:
                    num_tokens += len(delta.token_ids)
                    assert delta.num_output_tokens == num_tokens
                    assert (delta.num_prompt_tokens, delta.num_cached_tokens) == (len(prompt), 0)
                    assert delta.error is None

    @pytest.mark.fast_cases(2)
    @pytest.mark.parametrize("mtp", [0, 1, 3, 5])
    def test_speculation_figures(self, mtp: int) -> None:
        engine = build(mtp=mtp)
        deltas = run(engine, [*COMPANY, ("a", PROMPT, SAMPLED)])
        for of_request in deltas.values():
            for num_steps, delta in enumerate(of_request, 1):
                spec = delta.spec
                assert spec.num_verify_steps == num_steps == sum(spec.accepted_histogram)
                assert spec.num_draft_tokens == mtp * num_steps
                accepted = sum(depth * count for depth, count in enumerate(spec.accepted_histogram))
                assert spec.num_accepted_tokens == accepted <= spec.num_draft_tokens
                assert spec.accept_length == 1 + accepted / num_steps
                assert len(spec.accepted_histogram) == mtp + 1
            # before the last step every accepted draft and every bonus token is output
            before = of_request[-2]
            assert before.num_output_tokens == before.spec.num_verify_steps + before.spec.num_accepted_tokens
            assert len(tokens_of(of_request)) <= spec.num_verify_steps + spec.num_accepted_tokens
        specs = [of_request[-1].spec for of_request in deltas.values()]
        total = engine.stats().spec
        assert total.num_verify_steps == sum(spec.num_verify_steps for spec in specs)
        assert total.num_draft_tokens == sum(spec.num_draft_tokens for spec in specs)
        assert total.accepted_histogram == tuple(map(sum, zip(*(s.accepted_histogram for s in specs), strict=True)))
        assert SpecStats().accept_length == 0.0


class TestAborts:
    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("penalty", [0.0, 0.5])
    @pytest.mark.parametrize("page_size", [1, 16])
    def test_at_any_moment(self, tiny: str, page_size: int, penalty: float) -> None:
        """While it waits, while it extends, while it verifies: everything is free again, and the others do not mind."""
        params = change(GREEDY, max_tokens=10, presence_penalty=penalty)
        others = [("x", [1, 2, 3], params), ("y", [4], params)]
        expected = answers(run(build(tiny), others))
        victim = ("victim", list(range(40)), params)
        seen = set()
        for num_steps in range(14):
            engine = build(tiny, page_size=page_size, chunked_prefill_size=8, max_running_requests=3)
            for request in (others[0], victim, others[1], ("queued", [9], params)):
                engine.add_request(*request)
            deltas: list[OutputDelta] = []
            for _ in range(num_steps):
                deltas += engine.step()
            states = {"waiting": engine.scheduler.waiting, "extending": engine.scheduler.extending}
            states |= {"verifying": engine.scheduler.verifying}
            seen |= {state for state, queue in states.items() if any(r.request_id == "victim" for r in queue)}
            engine.abort("victim")
            engine.abort("queued")
            assert_consistent(engine)
            deltas += [delta for of_request in run(engine).values() for delta in of_request]
            for name, whole in expected.items():
                assert answer([delta for delta in deltas if delta.request_id == name]) == whole
        assert seen == {"waiting", "extending", "verifying"}

    def test_of_an_unknown_request(self, tiny: str) -> None:
        engine = build(tiny)
        engine.abort("unknown")
        engine.add_request("a", [1], GREEDY)
        engine.abort("a")
        engine.abort("a")
        assert_idle(engine)
        assert engine.step() == []

    def test_the_id_is_free_at_once(self, tiny: str) -> None:
        engine = build(tiny)
        engine.add_request("a", [1, 2], GREEDY)
        engine.step()
        engine.abort("a")
        expected = answers(run(build(tiny), [("a", [3], GREEDY)]))
        assert answers(run(engine, [("a", [3], GREEDY)])) == expected
        assert answers(run(engine, [("a", [3], GREEDY)])) == expected  # and again after a normal end

    def test_of_a_preempted_request(self, tiny: str) -> None:
        engine = build(tiny, max_total_tokens=40)
        for name in "abc":
            engine.add_request(name, [5, 6], GREEDY)
        while not engine.scheduler.num_preemptions:
            engine.step()
        assert [request.request_id for request in engine.scheduler.waiting] == ["c"]
        engine.abort("c")
        assert set(run(engine)) == {"a", "b"}

    def test_close_drops_everything(self, tiny: str) -> None:
        engine = build(tiny, max_running_requests=2, chunked_prefill_size=4)
        for i, length in enumerate([1, 30, 5]):
            engine.add_request(str(i), [7] * length, GREEDY)
        engine.step()
        engine.close()
        assert_idle(engine)


class TestRefusals:
    def test_an_id_in_use(self, tiny: str) -> None:
        engine = build(tiny)
        engine.add_request("a", [1], GREEDY)
        with pytest.raises(RequestError, match="a request with the id 'a' is running already"):
            engine.add_request("a", [2], GREEDY)
        engine.step()
        with pytest.raises(RequestError, match="'a'"):
            engine.add_request("a", [2], GREEDY)
        engine.close()

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "the prompt is empty"),
            ([1, VOCABULARY], f"token id {VOCABULARY} is not in the vocabulary of {VOCABULARY} tokens"),
            ([-1], "token id -1 is not"),
        ],
    )
    def test_a_prompt_that_cannot_be_run(self, tiny: str, prompt: list[int], message: str) -> None:
        engine = build(tiny)
        with pytest.raises(RequestError, match=message) as error:
            engine.add_request("a", prompt, GREEDY)
        assert error.value.param == "prompt"
        assert_idle(engine)

    @pytest.mark.parametrize(
        ("flags", "longest"), [({}, 127), ({"context_length": 20}, 19), ({"max_total_tokens": 50}, 45)]
    )
    def test_a_prompt_that_is_too_long_gets_both_numbers(self, tiny: str, flags: dict[str, int], longest: int) -> None:
        engine = build(tiny, mtp=3, **flags)
        with pytest.raises(PromptTooLongError, match=f"has {longest + 1} tokens, but at most {longest} fit") as error:
            engine.add_request("a", [1] * (longest + 1), GREEDY)
        assert (error.value.num_prompt_tokens, error.value.max_prompt_tokens) == (longest + 1, longest)
        assert_idle(engine)
        assert len(tokens_of(run(engine, [("a", [1] * longest, GREEDY)])["a"])) == 1  # what it says works

    def test_a_full_queue(self, tiny: str) -> None:
        engine = build(tiny, max_queued_requests=2, max_running_requests=1)
        for name in "abc":  # one of them has a free row to go to
            engine.add_request(name, [1], GREEDY)
        with pytest.raises(QueueFullError, match="3 requests are waiting already") as error:
            engine.add_request("d", [1], GREEDY)
        assert error.value.num_waiting == 3
        engine.step()  # one of them runs now
        with pytest.raises(QueueFullError, match="2 requests are waiting already"):
            engine.add_request("d", [1], GREEDY)
        assert set(run(engine)) == {"a", "b", "c"}

    @pytest.mark.parametrize("params", [SAMPLED, change(SAMPLED, seed=None), GREEDY], ids=["seed", "no seed", "greedy"])
    def test_rejection_where_all_requests_are_decided_under_target(self, tiny: str, params: SamplingParams) -> None:
        engine = build(tiny, speculative_accept="target")
        words = "this server decides all requests under target .--speculative-accept."
        with pytest.raises(RequestError, match=words) as error:
            engine.add_request("a", [1], ask(params, "rejection"))
        assert error.value.param == "speculative"
        assert_idle(engine)
        deltas = run(engine, [("a", [1], ask(params, "target"))])  # the id is free, and what it may ask for works
        assert len(tokens_of(deltas["a"])) == params.max_tokens


RULES: list[tuple[str, SamplingParams, str, str, str]] = [  # under auto, target, rejection; "": refused
    ("seed", SAMPLED, "target", "target", "rejection"),
    ("no seed", change(SAMPLED, seed=None), "rejection", "target", "rejection"),
    ("greedy", change(GREEDY, seed=None), "target", "target", "target"),
    ("seed, asks", ask(SAMPLED, "rejection"), "rejection", "", "rejection"),
    ("no seed, asks", ask(change(SAMPLED, seed=None), "target"), "target", "target", "target"),
]


class TestRules:
    @pytest.mark.parametrize(("setting", "column"), [("auto", 0), ("target", 1), ("rejection", 2)])
    def test_each_request_has_the_rule_of_the_flag_of_its_seed_and_of_what_it_asks(
        self, tiny: str, setting: str, column: int
    ) -> None:
        engine = build(tiny, speculative_accept=setting)
        expected = {name: rules[column] for name, _, *rules in RULES if rules[column]}
        for name, params, *_ in RULES:
            if name in expected:
                engine.add_request(name, [1, 2], params)
        assert {name: request.rule for name, request in engine.live.by_id.items()} == expected
        engine.close()

    def test_a_drafter_that_cannot_draw_leaves_requests_without_a_seed_under_target(self, tiny: str) -> None:
        unseeded = change(SAMPLED, seed=None)
        for flags in ({"mtp": 0}, {"speculative_algorithm": "ngram"}):
            engine = build(tiny, seed=1, **flags)
            engine.add_request("a", [1, 2], unseeded)
            assert [request.rule for request in engine.live.by_id.values()] == ["target"]
            engine.close()

    def test_without_drafts_both_rules_give_the_same_text(self, tiny: str) -> None:
        plain = build(tiny, mtp=0)
        texts = {
            tokens_of(run(plain, [("a", [1, 2], params)])["a"])
            for params in (SAMPLED, ask(SAMPLED, "target"), ask(SAMPLED, "rejection"))
        }
        assert len(texts) == 1

    @pytest.mark.parametrize("flags", [{}, {"max_total_tokens": 100}], ids=["roomy", "with preemption"])
    def test_seeded_texts_beside_requests_of_the_other_rule_are_the_plain_texts(
        self, tiny: str, flags: dict[str, Any]
    ) -> None:
        """Of all kinds of settings; the others come without a seed, or ask for rejection."""
        requests = random_requests(seed=5, count=16)
        plain = answers(run(build(tiny, mtp=0), requests))
        others: list[NewRequest] = []
        for i, (name, prompt, params) in enumerate(random_requests(seed=6, count=16)):
            sampled = change(params, temperature=params.temperature or 0.5)
            params = ask(sampled, "rejection") if i % 2 else change(sampled, seed=None)
            others.append((f"other-{name}", prompt, params))
        engine = build(tiny, mtp=3, **flags)
        mixed = [request for pair in zip(requests, others, strict=True) for request in pair]
        found = answers(run(engine, mixed))
        assert {name: found[name] for name, _, _ in requests} == plain
        assert (engine.stats().num_preemptions > 0) == bool(flags)
        if not flags:  # the rules of the others were their own: these are other texts than the target's
            under_target = [(name, prompt, ask(params, "target")) for name, prompt, params in others]
            seeded = {name for name, _, params in under_target if params.seed is not None}
            alone = answers(run(build(tiny, mtp=0), under_target))
            assert sum(found[name] != alone[name] for name in seeded) > len(seeded) // 2


class TestOrder:
    def test_first_come_first_served(self, tiny: str) -> None:
        engine = build(tiny, max_running_requests=2)
        deltas = run_with_steps(engine, [(str(i), [i], change(GREEDY, max_tokens=6)) for i in range(9)])
        first = {name: steps[0] for name, steps in deltas.items()}
        assert sorted(first, key=lambda name: (first[name], name)) == sorted(first)
        assert engine.stats().num_preemptions == 0

    def test_a_large_request_is_not_overtaken(self, tiny: str) -> None:
        """There is no memory for it yet; the small ones behind it wait, or it might wait for ever."""
        engine = build(tiny, max_total_tokens=130, mtp=0)
        requests = [("runs", [1] * 60, GREEDY), ("large", [2] * 100, GREEDY)]
        requests += [(f"small{i}", [3], change(GREEDY, max_tokens=2)) for i in range(4)]
        deltas = run_with_steps(engine, requests)
        assert deltas["large"][0] > deltas["runs"][-1]
        assert all(deltas[f"small{i}"][0] >= deltas["large"][0] for i in range(4))

    def test_a_long_prompt_does_not_stop_the_others(self, tiny: str) -> None:
        engine = build(tiny, chunked_prefill_size=8, mtp=0)
        engine.add_request("runs", [1], change(GREEDY, max_tokens=60))
        engine.step()
        engine.add_request("long", [2] * 100, GREEDY)
        for _ in range(12):  # 99 tokens in chunks of 8
            assert [delta.request_id for delta in engine.step()] == ["runs"]
            assert [request.request_id for request in engine.scheduler.extending] == ["long"]
        assert sorted(delta.request_id for delta in engine.step()) == ["long", "runs"]
        engine.close()

    def test_a_long_prompt_is_not_starved(self, tiny: str) -> None:
        """Short prompts arrive all the time, and never push the long one back."""
        engine = build(tiny, chunked_prefill_size=8, mtp=0)
        engine.add_request("long", [2] * 100, GREEDY)
        for step in range(13):
            engine.add_request(f"short{step}", [3] * 6, change(GREEDY, max_tokens=2))
            answered = {delta.request_id for delta in engine.step()}
        assert "long" in answered
        engine.close()

    def test_short_prompts_share_a_chunk(self, tiny: str) -> None:
        engine = build(tiny, chunked_prefill_size=32)
        for i in range(8):
            engine.add_request(str(i), [i] * 5, GREEDY)
        assert len(engine.step()) == 8
        engine.close()

    def test_a_padded_chunk_stays_within_its_size(self, tiny: str) -> None:
        engine = build(tiny, chunked_prefill_size=32)
        for i, length in enumerate((13, 13, 13, 40, 6)):
            engine.add_request(str(i), [i] * length, GREEDY)
        sizes = []
        engine.scheduler.admit()
        while runs := engine.scheduler.next_runs():
            sizes.append(len(runs) * max(run.length for run in runs))
            engine.scheduler.finish_runs(runs)
        assert max(sizes) <= 32
        assert len(sizes) < 5
        engine.close()

    @pytest.mark.fast_cases(2)
    @pytest.mark.parametrize("chunk", [1, 3, 7, 64])
    def test_chunks_do_not_change_the_text(self, tiny: str, chunk: int) -> None:
        requests = random_requests(seed=5, count=12, max_prompt=60)
        whole = answers(run(build(tiny), requests))
        assert answers(run(build(tiny, chunked_prefill_size=chunk), requests)) == whole

    def test_fewer_states_than_rows(self, tiny: str) -> None:
        engine = build(tiny, max_mamba_cache_size=1, max_running_requests=4)
        requests = random_requests(seed=6, count=5)
        for request in requests:
            engine.add_request(*request)
        engine.step()
        assert engine.stats().num_running <= 1
        for name, *_ in requests:
            engine.abort(name)
        assert answers(run(engine, requests)) == answers(run(build(tiny), requests))


def run_with_steps(engine: Engine, requests: Iterable[NewRequest]) -> dict[str, list[int]]:
    """The numbers of the steps in which each request got tokens."""
    for request in requests:
        engine.add_request(*request)
    deltas: dict[str, list[int]] = {}
    for step in range(1000):
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(step)
    assert_idle(engine)
    return deltas


class TestPreemption:
    @pytest.mark.fast_cases(2)
    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("mtp", [0, 3])
    def test_the_youngest_gives_way_and_goes_on_as_if_nothing_had_happened(
        self, tiny: str, mtp: int, page_size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        requests = random_requests(seed=8, count=10, max_prompt=20, max_tokens=40)
        requests = [(n, p, change(s, stop=(), stop_token_ids=(), ignore_eos=True)) for n, p, s in requests]
        expected = answers(run(build(tiny, mtp=mtp, page_size=page_size), requests))
        engine = build(tiny, mtp=mtp, page_size=page_size, max_total_tokens=96)
        scheduler = engine.scheduler
        victims = []
        preempt = scheduler.preempt

        def watch(request: Request) -> None:
            running = [*scheduler.extending, *scheduler.verifying]
            assert request.sequence_number == max(r.sequence_number for r in running)
            victims.append(request.request_id)
            preempt(request)
            assert request.row is None
            assert request.slot is None

        monkeypatch.setattr(scheduler, "preempt", watch)
        assert answers(run(engine, requests)) == expected
        assert len(victims) == engine.stats().num_preemptions >= 3
        assert "r0" not in victims  # the oldest always goes on

    def test_in_the_middle_of_a_long_prompt(self, tiny: str) -> None:
        requests = [("old", [1], change(GREEDY, max_tokens=60)), ("new", [2] * 50, change(GREEDY, max_tokens=15))]
        engine = build(tiny, max_total_tokens=72, chunked_prefill_size=2)
        states = set()
        for request in requests:
            engine.add_request(*request)
        deltas: dict[str, list[OutputDelta]] = {"old": [], "new": []}
        while engine.has_unfinished_requests:
            was_extending = bool(engine.scheduler.extending)
            before = engine.stats().num_preemptions
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
            if engine.stats().num_preemptions > before:
                states.add(was_extending)
            assert_consistent(engine)
        assert True in states
        assert answers(deltas) == answers(run(build(tiny), requests))

    def test_who_was_preempted_comes_back_first(self, tiny: str) -> None:
        engine = build(tiny, max_total_tokens=50, mtp=0)
        for i in range(6):
            engine.add_request(str(i), [i] * 8, GREEDY)
        while engine.has_unfinished_requests:
            engine.step()
            order = [request.sequence_number for request in engine.scheduler.waiting]
            assert order == sorted(order)
        assert engine.stats().num_preemptions > 0


class TestRandomUse:
    @pytest.mark.fast_cases("pages of 16-oracle")
    @pytest.mark.parametrize("is_oracle", [False, True], ids=["mtp", "oracle"])
    @pytest.mark.parametrize(("page_size", "total"), [(1, 90), (16, 160)], ids=["pages of 1", "pages of 16"])
    def test_300_requests_with_aborts(self, tiny: str, page_size: int, total: int, is_oracle: bool) -> None:
        """Whatever happens, every pool is whole afterwards, nothing is stuck, and texts are those of plain decoding."""
        rng = random.Random(page_size)
        requests = random_requests(seed=page_size, count=300)
        expected = run(build(tiny, mtp=0, max_queued_requests=300, max_running_requests=32), requests)
        full = {name: tokens_of(deltas) for name, deltas in expected.items()}
        engine = build(
            tiny, page_size=page_size, max_total_tokens=total, chunked_prefill_size=16, max_running_requests=6
        )
        if is_oracle:
            Oracle(engine, full, 4, trees=page_size == 16)
        arriving, aborted = requests[::-1], set[str]()
        deltas: dict[str, list[OutputDelta]] = {name: [] for name, _, _ in requests}
        for _ in range(6000):
            while arriving and rng.random() < 0.4:
                engine.add_request(*arriving.pop())
            for delta in engine.step():
                assert delta.request_id not in aborted
                deltas[delta.request_id].append(delta)
            if engine.live.by_id and rng.random() < 0.12:
                victim = rng.choice(list(engine.live.by_id))
                engine.abort(victim)
                aborted.add(victim)
            assert_consistent(engine)
            if not arriving and not engine.has_unfinished_requests:
                break
        assert_idle(engine)
        assert not arriving
        assert engine.stats().num_preemptions >= 5
        assert len(aborted) > 30
        for name, of_request in deltas.items():
            if name in aborted:
                assert full[name][: len(tokens_of(of_request))] == tokens_of(of_request)
                assert all(delta.finish_reason is None for delta in of_request)
            else:
                assert answer(of_request) == answer(expected[name])


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        disable_radix_cache=True,
        dtype="float32",
        device="cpu",
        context_length=128,
        max_running_requests=4,
        max_queued_requests=3,
    )


class TestLLM:
    SHORT = SamplingParams(max_tokens=6, temperature=0.0)

    def test_one_text_or_a_list(self, llm: LLM) -> None:
        one = llm.generate("def f(", self.SHORT)
        assert len(one) == 1
        assert llm.generate(["def f("], self.SHORT) == one
        assert one[0].prompt_token_ids == tuple(llm.engine.tokenizer.encode("def f("))
        assert llm.engine.tokenizer.decode(one[0].token_ids) == one[0].text
        assert (one[0].finish_reason, one[0].num_cached_tokens, len(one[0].token_ids)) == ("length", 0, 6)
        assert one[0].spec.num_verify_steps >= 2

    def test_token_ids(self, llm: LLM) -> None:
        ids = llm.engine.tokenizer.encode("def f(")
        expected = llm.generate("def f(", self.SHORT)
        for prompts in (ids, [ids], tuple(ids), [tuple(ids)], (ids,)):
            assert llm.generate(prompts, self.SHORT) == expected
        kinds: list[Any] = [ids, "def f(", tuple(ids)]
        mixed = llm.generate(kinds, self.SHORT)
        assert mixed == expected * 3

    def test_numpy_token_ids(self, llm: LLM) -> None:
        """What a data set or a tokenizer gives: they count as integers, and come back as plain ones."""
        ids = llm.engine.tokenizer.encode("def f(")
        expected = llm.generate(ids, self.SHORT)
        array = np.array(ids)
        forms: list[Any] = [[array], [list(array)], list(array), array]
        for prompts in forms:
            outputs = llm.generate(prompts, self.SHORT)
            assert outputs == expected
            assert all(type(token) is int for token in outputs[0].prompt_token_ids)

    def test_nothing_to_do(self, llm: LLM) -> None:
        assert llm.generate([]) == []
        assert llm.generate([], []) == []

    @pytest.mark.parametrize("prompts", ["", [""], [[]], ["x", ""], [[5], []]])
    def test_an_empty_prompt(self, llm: LLM, prompts: Any) -> None:
        with pytest.raises(RequestError, match="empty"):
            llm.generate(prompts, self.SHORT)
        assert_idle(llm.engine)

    @pytest.mark.parametrize("prompts", [["a", 5], [5, "a"], [[1.5]], [1.5], [True, False], 5, None, [None]])
    def test_what_is_no_prompt(self, llm: LLM, prompts: Any) -> None:
        """Refused, with nothing dropped and nothing run."""
        with pytest.raises((RequestError, TypeError)):
            llm.generate(prompts, self.SHORT)
        assert_idle(llm.engine)

    def test_more_prompts_than_may_wait(self, llm: LLM) -> None:
        prompts = [[i + 5] for i in range(20)]
        outputs = llm.generate(prompts, self.SHORT)
        assert [list(output.prompt_token_ids) for output in outputs] == prompts
        assert outputs[7] == llm.generate([prompts[7]], self.SHORT)[0]

    def test_each_prompt_its_own_params(self, llm: LLM) -> None:
        params = [change(self.SHORT, max_tokens=n) for n in (1, 5, 3)]
        outputs = llm.generate(["a", "b", "a"], params)
        assert [len(output.token_ids) for output in outputs] == [1, 5, 3]
        assert outputs[2].token_ids[:1] == outputs[0].token_ids
        for wrong in (params[:2], [*params, params[0]], []):
            with pytest.raises(RequestError, match=f"{len(wrong)} sampling parameters were given for 3 prompts"):
                llm.generate(["a", "b", "a"], wrong)

    def test_default_params(self, llm: LLM) -> None:
        assert len(llm.generate("a")[0].token_ids) <= SamplingParams().max_tokens

    def test_one_bad_prompt_and_nothing_runs(self, llm: LLM) -> None:
        before = llm.engine.stats().spec
        prompts: list[Any] = ["ok", [1] * 128]
        with pytest.raises(PromptTooLongError, match="128"):
            llm.generate(prompts, self.SHORT)
        assert llm.engine.stats().spec == before
        assert_idle(llm.engine)

    def test_stream(self, llm: LLM) -> None:
        deltas = list(llm.stream("def f(", self.SHORT))
        whole = llm.generate("def f(", self.SHORT)[0]
        assert (tokens_of(deltas), text_of(deltas)) == (whole.token_ids, whole.text)
        assert deltas[-1].spec == whole.spec

    def test_a_stream_left_early(self, llm: LLM) -> None:
        for _ in llm.stream("def f(", change(self.SHORT, max_tokens=100)):
            break
        assert_idle(llm.engine)
        stream = iter(llm.stream([5, 6], self.SHORT))
        next(stream)
        del stream
        assert_idle(llm.engine)

    def test_a_stream_that_fails(self, llm: LLM) -> None:
        with pytest.raises(RequestError):
            next(llm.stream("", self.SHORT))
        assert_idle(llm.engine)

    def test_generate_in_the_middle_of_a_stream(self, llm: LLM) -> None:
        expected, other = llm.generate(["def f(", "class A"], self.SHORT)
        stream = llm.stream("def f(", self.SHORT)
        deltas = [next(stream)]
        assert llm.generate("class A", self.SHORT) == [other]
        deltas += stream
        assert tokens_of(deltas) == expected.token_ids
        assert_idle(llm.engine)

    def test_two_streams_side_by_side(self, llm: LLM) -> None:
        whole = llm.generate(["def f(", "class A"], self.SHORT)
        streams = [llm.stream(text, self.SHORT) for text in ("def f(", "class A")]
        deltas: list[list[OutputDelta]] = [[], []]
        for _ in range(10):
            for stream, own in zip(streams, deltas, strict=True):
                own += [delta for delta in [next(stream, None)] if delta is not None]
        assert [tokens_of(own) for own in deltas] == [output.token_ids for output in whole]
        assert all(len({delta.request_id for delta in own}) == 1 for own in deltas)
        assert_idle(llm.engine)

    def test_context_manager(self, tiny: str) -> None:
        with LLM(model=tiny, dtype="float32", device="cpu") as llm:
            stream = llm.stream([1, 2], GREEDY)
            next(stream)
        assert_idle(llm.engine)

    def test_an_error_passes_through(self, tiny: str) -> None:
        with pytest.raises(KeyError, match="mine"), LLM(model=tiny, dtype="float32", device="cpu"):
            raise KeyError("mine")
