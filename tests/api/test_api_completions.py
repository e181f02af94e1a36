"""Completions in full, over a scripted engine: choices, echo, log-probabilities, tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from specmamba.config import DEMO_MODEL
from specmamba.models.text.infill import Infill
from tests.fake_engine import FakeEngine, Served, fake_logprob, serving, wait_until
from tests.server.test_server import events, refused

EURO = "a €!"  # its middle takes three tokens, none of which is text by itself
USER = {"role": "user", "content": "x"}
WHOLE_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        FakeEngine(text=EURO, chunk=2), max_choices=5, max_running_requests=1, max_queued_requests=11
    ) as served:
        yield served
        wait_until(lambda: not served.engine.has_unfinished_requests)


def streamed(served: Served, **body: object) -> list[dict[str, Any]]:
    """The choices as their chunks spell them, in order of their index."""
    whole: dict[int, dict[str, Any]] = {}
    for event in events(served.complete(stream=True, **body)):
        for piece in event["choices"]:
            known = whole.setdefault(piece["index"], piece)
            if known is not piece:
                _append(known, piece)
    return [whole[index] for index in sorted(whole)]


def _append(known: dict[str, Any], piece: dict[str, Any]) -> None:
    known["text"] += piece["text"]
    known["finish_reason"] = piece["finish_reason"]
    if known.get("tokens") is not None:
        known["tokens"] += piece["tokens"]
    for name, values in (piece["logprobs"] or {}).items():
        if values is not None:
            known["logprobs"][name] += values


# ---- choices ---------------------------------------------------------------------------------------------------------


def test_choices_of_several_prompts(served: Served) -> None:
    before = len(served.engine.seen_params)
    answer = served.complete(prompt=["a", "bb", "ccc"], n=3, seed=2**63 - 2, max_tokens=9).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(9))
    assert {choice["text"] for choice in answer["choices"]} == {EURO}
    seeds = [params.seed for params in served.engine.seen_params[before:]]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)] * 3  # seeds are signed 64-bit numbers and wrap around
    assert answer["usage"]["prompt_tokens"] == 6  # a prompt counts once
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 9}
    assert answer["usage"]["completion_tokens"] == 9 * len(EURO.encode())


def test_without_a_seed_every_choice_draws_its_own(served: Served) -> None:
    served.complete(prompt="a", n=2)
    assert [params.seed for params in served.engine.seen_params[-2:]] == [None, None]


def test_streamed_choices_have_the_usage_of_whole_ones(served: Served) -> None:
    body: dict[str, Any] = {"prompt": ["a", "bb"], "n": 2}
    whole = served.complete(**body).json()
    last = events(served.complete(**body, stream=True, **WHOLE_USAGE))[-1]
    assert last["usage"] == whole["usage"]
    assert streamed(served, **body) == whole["choices"]


def test_the_usage_so_far_in_every_chunk(served: Served) -> None:
    body: dict[str, Any] = {"prompt": "abc", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    counts = [event["usage"]["completion_tokens"] for event in events(served.complete(**body))]
    assert counts == sorted(counts)
    assert counts[-1] == len(EURO.encode())


def test_best_of_gives_the_likeliest(served: Served) -> None:
    answer = served.complete(prompt=["a", "b"], n=2, best_of=4, seed=5, logprobs=0, max_tokens=1).json()
    # the fake engine's tokens are the likelier the higher the seed: 8 and 7 of 5, 6, 7, 8
    found = [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]]
    expected = [fake_logprob(ord("a"), seed, 0).logprob for seed in (8, 7)]
    assert found == expected * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 8  # what was generated, given or not
    assert answer["usage"]["prompt_tokens"] == 2


def test_best_of_does_not_show_its_log_probabilities(served: Served) -> None:
    answer = served.complete(prompt="a", best_of=2).json()
    assert served.engine.seen_params[-1].logprobs == 0
    assert answer["choices"][0]["logprobs"] is None
    served.complete(prompt="a", best_of=1, stream=True)  # best_of=1 has no effect
    assert served.engine.seen_params[-1].logprobs is None


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"n": 6}, "n", "--max-choices"),
        ({"best_of": 6}, "best_of", "--max-choices"),
        ({"prompt": ["a"] * 3, "n": 5}, "n", "at most 12"),
        ({"prompt": ["a"] * 13}, "prompt", "at most 12"),
        ({"n": 0}, "n", "greater than"),
        ({"n": True}, "n", "integer"),
        ({"n": 3, "best_of": 2}, "best_of", "less than n"),
        ({"best_of": 2, "stream": True}, "best_of", "streamed"),
        ({"logprobs": 21}, "logprobs", "less than"),
        ({"logprobs": -1}, "logprobs", "greater than"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "greater than"),
        ({"logit_bias": {"256": 1}}, "logit_bias", "no token 256"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
        ({"logit_bias": {"01": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"9" * 100: 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]", "less than"),
        ({"logit_bias": {"1": "5"}}, "logit_bias[1]", "number"),
        ({"logit_bias": {"1": None}}, "logit_bias[1]", "number"),
        ({"logit_bias": [1]}, "logit_bias", "JSON object"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
        ({"stop_token_ids": [256]}, "stop_token_ids", "no token 256"),
        ({"return_tokens": 1}, "return_tokens", "boolean"),
        ({"speculative": "no"}, "speculative", "boolean"),
        ({"speculative": 1}, "speculative", "boolean"),
        ({"speculative": []}, "speculative", "object"),
        ({"speculative": {"accept": "auto"}}, "speculative.accept", "'target' or 'rejection'"),
        ({"speculative": {"accept": True}}, "speculative.accept", "'target' or 'rejection'"),
        ({"speculative": {"max_depth": -1}}, "speculative.max_depth", "greater than or equal to 0"),
        ({"speculative": {"max_depth": 64}}, "speculative.max_depth", "less than or equal to 63"),
        ({"speculative": {"max_depth": "3"}}, "speculative.max_depth", "integer"),
        ({"speculative": {"max_depth": True}}, "speculative.max_depth", "integer"),
        ({"speculative": {"rule": "target"}}, "speculative.rule", "no such field"),
        ({"speculative": {"accept": "target", "é": {}}}, "speculative.é", "no such field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_fields_are_refused_by_name(served: Served, body: dict[str, Any], param: str, words: str) -> None:
    assert words in refused(served.complete(**{"prompt": "x", **body}), 400, param)


def test_infinities_are_refused(served: Served) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"prompt": "x", "logit_bias": {{"1": {number}}}}}'
        response = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        refused(response, 400, "logit_bias[1]")


def test_biases_and_plain_decoding_reach_the_engine(served: Served) -> None:
    served.complete(prompt="x", logit_bias={"7": -100, "0": 2.5}, speculative=False)
    params = served.engine.seen_params[-1]
    assert params.logit_bias == {7: -100.0, 0: 2.5}
    assert params.speculative is False
    assert not params.is_drafted


@pytest.mark.parametrize("names_that_json_allows", ["\ud800", "a" * 100_000])
def test_an_unknown_field_of_any_name_is_refused(served: Served, names_that_json_allows: str) -> None:
    """Also inside of an object, also if no error can contain its whole name."""
    body = json.dumps({"prompt": "x", "speculative": {names_that_json_allows: 1}})
    response = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("speculative")
    assert len(response.content) < 5000


@pytest.mark.parametrize(
    ("field", "accept", "max_depth"),
    [
        ({"accept": "target"}, "target", None),
        ({"accept": "rejection"}, "rejection", None),
        ({"accept": "target", "max_depth": 2}, "target", 2),
        ({"max_depth": 63}, None, 63),
        ({"max_depth": 0}, None, 0),
        ({"accept": None, "max_depth": None}, None, None),
        ({}, None, None),
        (True, None, None),
        (None, None, None),
        (False, None, 0),
    ],
    ids=str,
)
def test_how_a_request_is_drafted_for_reaches_the_engine(
    served: Served, field: object, accept: str | None, max_depth: int | None
) -> None:
    """From completions and from chat."""
    for response in (served.complete(prompt="x", speculative=field), served.chat(USER, speculative=field)):
        assert response.status_code == 200
        params = served.engine.seen_params[-1]
        assert (params.accept, params.max_depth) == (accept, max_depth)
        assert params.is_drafted == (max_depth != 0)


# ---- echo and log-probabilities --------------------------------------------------------------------------------------


def test_echo(served: Served) -> None:
    assert [c["text"] for c in served.complete(prompt=["é", "b"], echo=True, n=2).json()["choices"]] == [
        *["é" + EURO] * 2,
        *["b" + EURO] * 2,
    ]
    tokens = [0, *"é".encode(), 0]
    assert served.complete(prompt=tokens, echo=True).json()["choices"][0]["text"] == "<0>é<0>" + EURO
    texts = [event["choices"][0]["text"] for event in events(served.complete(prompt="bbb", echo=True, stream=True))]
    assert texts[0].startswith("bbb")
    assert "".join(texts) == "bbb" + EURO


def test_logprobs(served: Served) -> None:
    logprobs = served.complete(prompt="x", logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", " ", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "!"]
    assert logprobs["token_logprobs"] == [-0.5, -4.0, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 2, 3]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.0}
    assert logprobs["top_logprobs"][1] == {"!": -1.0, '"': -2.0, " ": -4.0}  # the chosen one is always there
    assert logprobs["top_logprobs"][2] == {r"bytes:\xe2": -0.5, r"bytes:\xe3": -1.0}


def test_no_likeliest_tokens_unless_asked_for(served: Served) -> None:
    logprobs = served.complete(prompt="x", logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert len(logprobs["token_logprobs"]) == len(EURO.encode())
    assert served.complete(prompt="x").json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("prompt", ["hé ", list("hé ".encode())], ids=["text", "tokens"])
def test_a_prompt_is_scored(served: Served, prompt: object) -> None:
    choice = served.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    assert choice["text"] == "hé "
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", r"bytes:\xc3", r"bytes:\xa9", " "]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -4.0]
    assert logprobs["top_logprobs"] == [None, {r"bytes:\xc3": -0.5}, {r"bytes:\xa9": -0.5}, {"!": -1.0, " ": -4.0}]
    assert logprobs["text_offset"] == [0, 1, 1, 2]


def test_added_special_tokens_have_no_length_in_the_text(served: Served) -> None:
    choice = served.complete(prompt="<bos>", echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "<bos>a"
    assert choice["logprobs"]["tokens"] == ["<0>", *"<bos>", "a"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("echo", "max_tokens"), [(True, 16), (False, 16), (True, 0)])
def test_streamed_pieces_join_to_the_whole_answer(served: Served, echo: bool, max_tokens: int) -> None:
    body: dict[str, Any] = {"prompt": ["é", "b "], "n": 2, "logprobs": 1, "echo": echo, "return_tokens": True}
    body |= {"max_tokens": max_tokens}
    assert streamed(served, **body) == served.complete(**body).json()["choices"]


def test_tokens_of_an_answer(served: Served) -> None:
    choice = served.complete(prompt="x", return_tokens=True).json()["choices"][0]
    assert [token["id"] for token in choice["tokens"]] == list(EURO.encode())
    assert [token["text"] for token in choice["tokens"]] == ["a", " ", "", "", "€", "!"]
    assert [token["depth"] for token in choice["tokens"]] == [1, 0] * 3
    assert "tokens" not in served.complete(prompt="x").json()["choices"][0]


def test_a_token_that_ends_the_answer_has_no_text(served: Served) -> None:
    choice = served.complete(prompt="x", return_tokens=True, stop_token_ids=[ord("!")]).json()["choices"][0]
    assert [token["text"] for token in choice["tokens"]][-2:] == ["€", ""]


def test_an_incomplete_character_at_the_end() -> None:
    with serving(FakeEngine(text=EURO)) as served:
        body: dict[str, Any] = {"prompt": "x", "return_tokens": True, "logprobs": 0, "max_tokens": 4}
        choice = served.complete(**body).json()["choices"][0]
    assert choice["text"] == "a \ufffd"
    assert [token["text"] for token in choice["tokens"]] == ["a", " ", "", "\ufffd"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2]


# ---- the real engine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    from specmamba.config import EngineConfig
    from specmamba.engine.engine import Engine

    engine = Engine(EngineConfig(dtype="float32", max_running_requests=4, max_total_tokens=2048, context_length=256))
    with serving(engine) as served:
        yield served
        wait_until(lambda: not engine.has_unfinished_requests)


@pytest.fixture(scope="module")
def direct() -> Qwen3_5ForCausalLM:
    return Qwen3_5ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.mark.parametrize("max_tokens", [0, 1, 8])
def test_likelihoods_are_those_of_a_direct_computation(
    demo: Served, direct: Qwen3_5ForCausalLM, max_tokens: int
) -> None:
    prompts = [
        demo.engine.tokenizer.encode(text) for text in ("import os\n\ndef read(path):\n    return", "x = 'é 世'")
    ]
    body: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    choices = demo.complete(prompt=prompts, return_tokens=True, **body).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        tokens = [*prompt, *(token["id"] for token in choice["tokens"])]
        assert len(tokens) == len(prompt) + max_tokens
        with torch.no_grad():
            expected = direct(torch.tensor([tokens])).logits[0].log_softmax(-1)
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        wanted = [expected[i, token].item() for i, token in enumerate(tokens[1:])]
        assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-3)
        best = [max(top.values()) for top in found["top_logprobs"][1:]]
        assert best == pytest.approx(expected[:-1].max(-1).values.tolist(), abs=1e-3)
        cut = [*found["text_offset"][1:], len(choice["text"])]
        pieces = [choice["text"][a:b] for a, b in zip(found["text_offset"], cut, strict=True)]
        assert "".join(pieces) == choice["text"]
        named = zip(pieces, found["tokens"], strict=True)
        assert all(piece == name for piece, name in named if not name.startswith("bytes:") and "\ufffd" not in piece)


def test_choices_differ_and_repeat(demo: Served) -> None:
    body: dict[str, Any] = {"prompt": "def main():\n", "max_tokens": 12, "temperature": 1.0, "seed": 3}
    texts = [choice["text"] for choice in demo.complete(**body, n=3).json()["choices"]]
    assert len(set(texts)) > 1
    assert texts == [demo.complete(**body | {"seed": 3 + i}).json()["choices"][0]["text"] for i in range(3)]


def test_a_request_may_choose_its_rule_of_acceptance(demo: Served) -> None:
    """The text under target is the plain one; under rejection it is another, as likely, and the same again."""
    body: dict[str, Any] = {"prompt": "def main():\n", "max_tokens": 24, "seed": 3, "ignore_eos": True}

    def text(speculative: object) -> str:
        answer = demo.complete(**body, speculative=speculative)
        return str(answer.json()["choices"][0]["text"])

    plain, under_rejection = text(False), text({"accept": "rejection"})
    assert text(None) == text(True) == text({"accept": "target"}) == text({}) == plain  # it brings a seed
    assert under_rejection == text({"accept": "rejection"}) != plain


@pytest.mark.parametrize("stream", [True, False])
def test_rejection_is_refused_by_a_server_that_decides_all_requests_under_target(stream: bool) -> None:
    from specmamba.config import EngineConfig
    from specmamba.engine.engine import Engine

    sizes: dict[str, Any] = {"max_running_requests": 2, "max_total_tokens": 512, "context_length": 256}
    with serving(Engine(EngineConfig(dtype="float32", speculative_accept="target", **sizes))) as server:
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 2, "stream": stream}
        message = refused(server.complete(**body, speculative={"accept": "rejection"}), 400, "speculative")
        assert "--speculative-accept" in message
        assert server.complete(**body, speculative={"accept": "target"}).status_code == 200


def test_pieces_of_the_demo_are_its_text(demo: Served) -> None:
    body: dict[str, Any] = {"prompt": "def main():\n", "max_tokens": 40, "temperature": 0.8, "seed": 1}
    choice = demo.complete(**body, return_tokens=True).json()["choices"][0]
    assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
    assert max(token["depth"] for token in choice["tokens"]) > 0
    plain = demo.complete(**body, return_tokens=True, speculative=False).json()["choices"][0]
    assert {token["depth"] for token in plain["tokens"]} == {0}
    assert plain["text"] == choice["text"]


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_cut_off_by_a_stop_string_have_the_last_offset(demo: Served, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "def main():\n", "max_tokens": 40, "temperature": 0}
    text = demo.complete(**body).json()["choices"][0]["text"]
    body |= {"stop": text[5:14], "return_tokens": True, "logprobs": 0, "echo": True}
    choice = streamed(demo, **body)[0] if stream else demo.complete(**body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == body["prompt"] + text[:5]
    assert "".join(token["text"] for token in choice["tokens"]).startswith(text[:14])
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[-1] == len(choice["text"])
    assert stream or offsets == sorted(offsets)  # a chunk cannot know that a later one cuts its text off


# ---- predicted outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [("abc", b"abc"), ([{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}], b"abc"), ("", b"")],
)
def test_a_prediction_reaches_the_engine(served: Served, content: Any, text: bytes) -> None:
    prediction = {"type": "content", "content": content}
    assert served.complete(prompt="x", n=2, prediction=prediction).status_code == 200
    assert served.chat(USER, prediction=prediction).status_code == 200
    assert served.engine.seen_predictions[-3:] == [tuple(text)] * 3


@pytest.mark.parametrize(
    ("prediction", "param", "code"),
    [
        ({}, "prediction.type", "missing"),
        ({"type": "content"}, "prediction.content", "missing"),
        ({"type": "file", "content": "x"}, "prediction.type", "literal_error"),
        ({"type": "content", "content": 1}, "prediction.content", "content_type"),
        ({"type": "content", "content": "x" * 100_000}, "prediction", "context_length_exceeded"),
    ],
)
def test_predictions_that_are_refused(served: Served, prediction: Any, param: str, code: str | None) -> None:
    refused(served.complete(prompt="x", prediction=prediction), 400, param, code)
    refused(served.chat(USER, prediction=prediction), 400, param, code)


# ---- a gap in a text -------------------------------------------------------------------------------------------------

GAP = Infill("<P>", "<S>", "<M>", (7, 9))


def test_the_answer_fills_the_gap_before_the_suffix(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "infill", GAP)
    assert served.complete(prompt=["a", "b"], suffix="z", stop_token_ids=[3, 7]).status_code == 200
    assert served.engine.seen_prompts[-2:] == [tuple(b"<P>a<S>z<M>"), tuple(b"<P>b<S>z<M>")]
    assert served.engine.seen_params[-1].stop_token_ids == (3, 7, 9)
    assert served.complete(prompt="a", suffix="z", ignore_eos=True).status_code == 200
    assert served.engine.seen_params[-1].stop_token_ids == ()
    assert served.complete(prompt="a", suffix="").status_code == 200
    assert served.engine.seen_prompts[-1] == tuple(b"a")


def test_suffixes_that_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(served.complete(prompt="a", suffix="z"), 400, "suffix", "not_supported")
    monkeypatch.setattr(served.engine.tokenizer, "infill", GAP)
    assert "not token ids" in refused(served.complete(prompt=[1, 2], suffix="z"), 400, "suffix")
    assert "echo" in refused(served.complete(prompt="a", suffix="z", echo=True), 400, "suffix", "suffix")
    refused(served.complete(prompt="a", suffix="z" * 100_000), 400, "prompt", "context_length_exceeded")
