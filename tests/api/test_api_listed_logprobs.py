"""Listed log probabilities: how many a call may ask for, and those of a prompt, which its choices share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specmamba.core import OutputDelta
from specmamba.server.api import listed_logprobs
from specmamba.server.api.listed_logprobs import MAX_LISTED, check_listed
from specmamba.server.api.requests import CompletionRequest
from specmamba.server.http.error_answers import ApiError
from tests.fake_engine import FakeEngine, Served, serving

TEXT = "score me"
PROMPTS = ["score me", "and me"]


class LateFirstChoice(FakeEngine):
    """The first choice of every prompt begins after the others have got some tokens."""

    late = frozenset({"0", "3"})  # the first of three choices

    def step(self) -> list[OutputDelta]:
        self.num_steps += 1
        ready = {i: r for i, r in self.running.items() if self.num_steps > 3 or i.rpartition("-")[2] not in self.late}
        return [self._advance(request_id, request) for request_id, request in ready.items()]


def ask(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a completion; those of a stream joined."""
    answer = served.complete(temperature=0.0, echo=True, **fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return list(answer.json()["choices"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [choice for event in events for choice in json.loads(event)["choices"]]
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if (whole := joined.setdefault(chunk["index"], chunk)) is not chunk:
            whole["text"] += chunk["text"]
            whole["finish_reason"] = chunk["finish_reason"]
            for name, values in chunk["logprobs"].items():
                if values is not None:
                    whole["logprobs"][name] += values
    return [joined[index] for index in sorted(joined)]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("engine_class", [FakeEngine, LateFirstChoice])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 9])
def test_a_prompt_is_scored_once_for_all_choices(engine_class: type[FakeEngine], stream: bool, max_tokens: int) -> None:
    """Every choice is what it is when it is asked for alone."""
    fields: dict[str, Any] = {"logprobs": 2, "max_tokens": max_tokens, "stream": stream}
    with serving(FakeEngine()) as served:
        alone = [ask(served, prompt=prompt, **fields)[0] for prompt in PROMPTS]
    with serving(engine_class()) as served:
        choices = ask(served, prompt=PROMPTS, n=3, **fields)
        scored = [params.prompt_logprobs for params in served.engine.seen_params]
    assert scored == [2, None, None] * 2
    assert choices == [alone[index // 3] | {"index": index} for index in range(6)]
    assert all(len(choice["logprobs"]["tokens"]) >= len(PROMPTS[1]) for choice in choices)


@pytest.mark.parametrize("n", [1, 2])
def test_the_best_choices_have_the_prompt_too(n: int) -> None:
    """The likeliest choice is the last one, which has not computed the prompt."""
    with serving(FakeEngine()) as served:
        choices = ask(served, prompt=TEXT, n=n, best_of=4, seed=5, logprobs=0, max_tokens=3)
        scored = [params.prompt_logprobs for params in served.engine.seen_params]
        seeds = [params.seed for params in served.engine.seen_params]
    assert (scored, seeds) == ([0, None, None, None], [5, 6, 7, 8])
    assert len(choices) == n
    for choice in choices:
        prompt = choice["logprobs"]["token_logprobs"][: len(TEXT)]
        assert prompt == [None, *(-4.0 if letter == " " else -0.5 for letter in TEXT[1:])]
    assert choices[0]["logprobs"]["token_logprobs"][-1] == pytest.approx(-0.5 + 0.01 * 8)


def test_a_failure_before_the_prompt_is_scored_ends_the_stream() -> None:
    with serving(LateFirstChoice(fail_at_step=None)) as served:
        served.engine._advance = None  # the first step raises
        answer = served.complete(prompt=TEXT, n=3, echo=True, logprobs=1, stream=True)
    assert "engine_error" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 16, "logprobs": 20, "echo": True, "max_tokens": 1, "prompt": [5] * 2000}, "logprobs"),
        ({"n": 16, "logprobs": 20, "max_tokens": 2000, "prompt": [5]}, "logprobs"),
        ({"best_of": 16, "logprobs": 20, "max_tokens": 2000, "prompt": [5]}, "logprobs"),
        ({"logprobs": 5, "echo": True, "max_tokens": 0, "prompt": [[5] * 2000] * 64}, "logprobs"),
    ],
)
def test_too_many_for_a_completion(fields: dict[str, Any], param: str) -> None:
    with serving(FakeEngine(context_length=4096)) as served:
        answer = served.complete(**fields)
        assert served.engine.seen_params == []
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert f"log probabilities may be listed, but {MAX_LISTED} are the most in a call" in error["message"]


@pytest.mark.parametrize(
    ("fields", "num_prompts", "length", "max_tokens", "per_prompt", "is_allowed"),
    [
        ({"echo": True, "logprobs": 1, "max_tokens": 0}, 64, 2048, 0, 1, True),  # lm-eval
        ({"echo": True, "logprobs": 1, "max_tokens": 0}, 128, 2048, 0, 1, True),
        ({"echo": True, "logprobs": 1, "max_tokens": 0}, 129, 2048, 0, 1, False),
        ({"logprobs": 0}, 1, 1, 10**9, 1, True),  # the context ends first
        ({"logprobs": 20}, 1, 10**9, 10**9, 1024, True),  # the engine refuses this prompt
        ({"n": 4, "best_of": 1024}, 1, 1, 512, 1024, True),
        ({"n": 4, "best_of": 1024}, 1, 1, 513, 1024, False),
        ({"n": 1024}, 1, 1, 10**6, 1024, True),  # no log probabilities
    ],
)
def test_what_is_counted(
    fields: dict[str, Any], num_prompts: int, length: int, max_tokens: int, per_prompt: int, is_allowed: bool
) -> None:
    body = CompletionRequest(prompt="x", **fields)
    prompts = [range(length)] * num_prompts
    if is_allowed:
        check_listed(body, prompts, max_tokens, per_prompt, 4096)
    else:
        with pytest.raises(ApiError) as caught:
            check_listed(body, prompts, max_tokens, per_prompt, 4096)
        assert caught.value.detail.param == ("logprobs" if body.logprobs is not None else "best_of")


def test_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that the client sends is checked; the default is what fits."""
    monkeypatch.setattr(listed_logprobs, "MAX_LISTED", 60)
    user = {"role": "user", "content": "hi"}
    with serving(FakeEngine()) as served:
        answer = served.chat(user, logprobs=True, top_logprobs=2, n=2, max_tokens=11)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
        answer = served.chat(user, logprobs=True, max_tokens=61)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
        for fields in ({"top_logprobs": 2, "n": 2, "max_tokens": 10}, {"top_logprobs": 2, "n": 2}):
            answer = served.chat(user, logprobs=True, **fields)
            assert [len(choice["logprobs"]["content"]) for choice in answer.json()["choices"]] == [10, 10]
        monkeypatch.setattr(listed_logprobs, "MAX_LISTED", 1)
        answer = served.chat(user, logprobs=True, top_logprobs=0)
        assert answer.json()["usage"]["completion_tokens"] == 1
