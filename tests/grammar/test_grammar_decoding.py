"""Constrained decoding on the demo: the text is the same for every kind of draft, and valid when it ends by itself.

``SPECMAMBA_TEST_FULL=1`` runs all 50 schemas, CI a part of them.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any, get_args

import pytest

from specmamba import LLM, RequestOutput, SamplingParams
from specmamba.errors import RequestError
from specmamba.sampling_params import AcceptRule, GrammarSpec, SpeculationParams
from tests.grammar_schemas import check_valid, random_schema

pytest.importorskip("xgrammar")

IS_FULL = bool(os.environ.get("SPECMAMBA_TEST_FULL"))
SCHEMAS = [random_schema(seed) for seed in range(50 if IS_FULL else 9)]
FLAGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "context_length": 512, "max_running_requests": 12}
MOST_NODES: dict[str, Any] = {
    "speculative_eagle_topk": 3,
    "speculative_num_steps": 4,
    "speculative_num_draft_tokens": 12,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"speculative_algorithm": "mtp", "speculative_num_steps": 4},
    "tree": {"speculative_algorithm": "mtp", **MOST_NODES},
    "ngram": {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 12},
}
PROMPTS = ["An example as JSON: ", "def parse(text: str) -> dict:\n    return ", '{"name": "a"}\n{"name": "b"}\n']


def constrained(kind: Any, text: str = "", **more: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 160, "temperature": 0.0, **more}
    return SamplingParams(grammar=GrammarSpec(kind=kind, text=text), **settings)


def of_schema(schema: Any, **more: Any) -> SamplingParams:
    return constrained("json_schema", json.dumps(schema), **more)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(speculative_algorithm="mtp", **MOST_NODES, **FLAGS) as llm:
        yield llm


def essence(outputs: Sequence[RequestOutput]) -> list[tuple[tuple[int, ...], str, str, str | None]]:
    return [(output.token_ids, output.text, output.finish_reason, output.error) for output in outputs]


def run(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams], **drafts: Any) -> list[RequestOutput]:
    llm.workbench.use_drafts(**drafts)
    llm.flush_cache()
    outputs = llm.generate(prompts, params)
    assert llm.engine.stats().kv_used_tokens == 0
    return outputs


def mixed(temperature: float) -> tuple[list[str], list[SamplingParams]]:
    """Every schema, with a free request behind every third one; in one batch as far as there is room."""
    params: list[SamplingParams] = []
    for index, schema in enumerate(SCHEMAS):
        params.append(of_schema(schema, temperature=temperature, seed=index))
        if index % 3 == 2:
            params.append(SamplingParams(max_tokens=24, temperature=temperature, seed=index))
    return [PROMPTS[index % len(PROMPTS)] for index in range(len(params))], params


@pytest.fixture(scope="module", params=[0.0, 0.8])
def plain(llm: LLM, request: pytest.FixtureRequest) -> tuple[list[str], list[SamplingParams], list[RequestOutput]]:
    prompts, params = mixed(request.param)
    return prompts, params, run(llm, prompts, params, speculative_algorithm="none")


Plain = tuple[list[str], list[SamplingParams], list[RequestOutput]]


@pytest.mark.fast_cases("0.8")
def test_texts_that_end_are_valid(plain: Plain) -> None:
    _, params, outputs = plain
    texts = [
        (output, json.loads(own.grammar.text))
        for own, output in zip(params, outputs, strict=True)
        if own.grammar is not None
    ]
    ended = [(output.text, schema) for output, schema in texts if output.finish_reason == "stop"]
    assert all(output.finish_reason in ("stop", "length") for output, _ in texts)
    assert len(ended) >= 0.8 * len(texts)
    for text, schema in ended:
        check_valid(text, schema)


@pytest.mark.fast_cases("0.0-tree")
@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafts_change_nothing(llm: LLM, plain: Plain, drafts: str) -> None:
    prompts, params, outputs = plain
    drafted = run(llm, prompts, params, **DRAFTS[drafts])
    assert essence(drafted) == essence(outputs)
    assert sum(output.spec.num_accepted_tokens for output in drafted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("state", ["records", "snapshots"] if IS_FULL else ["snapshots"])
def test_short_of_memory_and_from_the_cache(llm: LLM, state: str, no_headroom: None) -> None:
    """Preempted requests keep their place in their grammars, and so do those that find their prompts cached."""
    prompts, params = mixed(0.8)
    prompts, params = prompts[:6], [own.model_copy(update={"max_tokens": 60}) for own in params[:6]]
    flags = FLAGS | {"max_total_tokens": 130, "context_length": 100, "speculative_state": state}
    plain = run(llm, prompts, params, speculative_algorithm="none")
    with LLM(**flags, **DRAFTS["tree"]) as small:
        small._local._grammars.extend(llm._local._grammars)  # one process is enough
        first = small.generate(prompts, params)
        again = small.generate(prompts, params)
        small._local._grammars.clear()
        assert small.engine.stats().num_preemptions > 0
        assert any(output.num_cached_tokens for output in again)
    assert essence(first) == essence(again) == essence(plain)


OTHERS: list[tuple[SamplingParams, str]] = [
    (constrained("regex", r"[a-z]{4,8}-\d{3}", temperature=1.0, seed=1), r"[a-z]{4,8}-\d{3}"),
    (constrained("ebnf", 'root ::= ("ab" | "c"){3,9} "."', temperature=1.0, seed=2), r"(ab|c){3,9}\."),
    (constrained("regex", "[ab]{9}", logit_bias={67: 50.0}, presence_penalty=1.5), "[ab]{9}"),
    (constrained("regex", "[a-z ]{30}", repetition_penalty=1.3, temperature=0.9, seed=5), "[a-z ]{30}"),
    (constrained("regex", "(yes|no) (yes|no)", logprobs=2), "(yes|no) (yes|no)"),
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_with_penalties_biases_and_log_probabilities(llm: LLM, drafts: str) -> None:
    prompts, params = [PROMPTS[0]] * len(OTHERS), [own for own, _ in OTHERS]
    outputs = run(llm, prompts, params, speculative_algorithm="none")
    for output, (_, pattern) in zip(outputs, OTHERS, strict=True):
        assert output.finish_reason == "stop"
        assert re.fullmatch(pattern, output.text), output.text
    assert essence(run(llm, prompts, params, **DRAFTS[drafts])) == essence(outputs)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_stop_strings_end_a_text_within_its_grammar(llm: LLM, drafts: str) -> None:
    params = constrained("regex", "a{3}b{20}", stop="bb")
    for flags in ({"speculative_algorithm": "none"}, DRAFTS[drafts]):
        output = run(llm, ["x"], [params], **flags)[0]
        assert (output.text, output.finish_reason) == ("aaa", "stop")


def test_acceptance_by_rejection_keeps_to_the_grammar_and_its_distribution(llm: LLM) -> None:
    """Two of three letters are allowed: each is as frequent as without drafts, and there are no others."""
    count = 1500 if IS_FULL else 150
    params = [constrained("regex", "[abc][abc]", temperature=1.2, seed=seed) for seed in range(count)]
    plain = Counter(output.text for output in run(llm, ["x"] * count, params, speculative_algorithm="none"))
    flags = DRAFTS["tree"] | {"speculative_accept": "rejection"}
    drafted = Counter(output.text for output in run(llm, ["x"] * count, params, **flags))
    texts = {a + b for a in "abc" for b in "abc"}
    assert set(drafted) <= texts
    assert sum(abs(plain[text] - drafted[text]) for text in texts) / (2 * count) < 0.15


def test_acceptance_by_rejection_writes_valid_texts(llm: LLM) -> None:
    flags = DRAFTS["tree"] | {"speculative_accept": "rejection"}
    params = [of_schema(schema, temperature=1.0, seed=seed) for seed, schema in enumerate(SCHEMAS)]
    for schema, output in zip(SCHEMAS, run(llm, PROMPTS[:1] * len(params), params, **flags), strict=True):
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            check_valid(output.text, schema)


def test_constrained_requests_of_both_rules_run_in_one_batch(llm: LLM) -> None:
    """Those under target write their plain texts, the others valid ones; a free request of each rule is among them."""
    params = [
        of_schema(schema, temperature=0.9, seed=seed, speculative=SpeculationParams(accept=rule))
        for seed, (schema, rule) in enumerate(zip(SCHEMAS, cycle(get_args(AcceptRule))))
    ]
    for seed, rule in enumerate(get_args(AcceptRule)):
        params.append(SamplingParams(max_tokens=24, seed=seed, speculative=SpeculationParams(accept=rule)))
    prompts = PROMPTS[:1] * len(params)
    plain = run(llm, prompts, params, speculative_algorithm="none")
    drafted = run(llm, prompts, params, **DRAFTS["tree"])
    under_target = [place for place, own in enumerate(params) if own.accept == "target"]
    under_rejection = [place for place, own in enumerate(params) if own.accept == "rejection"]
    assert essence([drafted[place] for place in under_target]) == essence([plain[place] for place in under_target])
    for place in under_rejection:
        output, grammar = drafted[place], params[place].grammar
        if grammar is not None and output.finish_reason == "stop":
            check_valid(output.text, json.loads(grammar.text))
    others = essence([drafted[place] for place in under_rejection])
    assert others != essence([plain[place] for place in under_rejection])  # under rejection other numbers decide
    assert sum(drafted[place].spec.num_accepted_tokens for place in under_rejection) > 0


def test_a_dead_end_fails_that_request_and_no_other(llm: LLM) -> None:
    dead = constrained("ebnf", 'root ::= "a" [^\\x00-\\U0010ffff]')
    free = SamplingParams(max_tokens=8, temperature=0.0)
    alone = run(llm, ["x"], [free], **DRAFTS["chain"])
    outputs = run(llm, ["x", "x"], [dead, free], **DRAFTS["chain"])
    assert outputs[0].finish_reason == "error"
    assert "the grammar allows no token" in (outputs[0].error or "")
    assert essence(outputs[1:]) == essence(alone)


def test_a_text_streams(llm: LLM) -> None:
    pieces = [delta.text for delta in llm.stream("x", constrained("regex", "(abc ){6}"))]
    assert "".join(pieces) == "abc " * 6
    assert len(pieces) > 1


def test_unusable_grammars_are_refused_before_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="'uniqueItems' is not supported"):
        llm.generate(["x", "x"], [SamplingParams(), of_schema({"uniqueItems": True})])
    with pytest.raises(RequestError, match="ignore_eos"):
        llm.generate("x", constrained("regex", "a", ignore_eos=True))
    monkeypatch.setattr(llm._local, "_grammars", [])
    monkeypatch.setattr("specmamba.grammar.compiler.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="pip install 'specmamba"):
        llm.generate("x", constrained("regex", "a"))
    assert not llm.engine.has_unfinished_requests
