"""A request that moves: deltas of the next replica begin where those of the lost one ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specmamba.core import OutputDelta, SpecStats, TokenLogprob
from specmamba.engine.channels import SentRequest
from specmamba.replicas.course import MAX_MOVES, Course
from specmamba.replicas.wire import dump_deltas, load_deltas
from specmamba.sampling_params import GrammarSpec, SamplingParams

TOKENS, TEXT = (11, 12, 13, 14, 15, 16), "abcdef"  # one character each


def request(**changes: object) -> SentRequest:
    return replace(SentRequest("r", (1, 2, 3), SamplingParams(max_tokens=6)), **changes)  # type: ignore[arg-type]


def deltas(*counts: int, held_back: int = 0) -> list[OutputDelta]:
    """An answer in steps of so many tokens; text comes ``held_back`` characters late."""
    found: list[OutputDelta] = []
    end = told = 0
    for count in counts:
        start, end = end, end + count
        upto = len(TEXT) if end == len(TOKENS) else max(0, end - held_back)
        tokens = TOKENS[start:end]
        found.append(
            OutputDelta(
                "r",
                tokens,
                TEXT[told:upto],
                3,
                2,
                end,
                finish_reason="length" if end == len(TOKENS) else None,
                spec=SpecStats(num_verify_steps=len(found) + 1),
                depths=tuple(range(count)),
                logprobs=tuple(TokenLogprob(token, -token / 10) for token in tokens),
                prompt_logprobs=(None, TokenLogprob(2, -1.0)) if start == 0 else None,
            )
        )
        told = upto
    return found


@pytest.mark.parametrize("held_back", [0, 2])
@pytest.mark.parametrize("lost_after", [0, 1, 2, 3])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1, 1), (3, 3), (2, 2, 2), (4, 2)])
def test_a_client_gets_each_token_and_character_once(steps: tuple[int, ...], lost_after: int, held_back: int) -> None:
    course = Course(request())
    course.placed(0, 0)
    got = [course.take(delta) for delta in deltas(2, 1, 1, 2, held_back=held_back)[:lost_after]]
    assert course.moved()
    assert course.rest().forced_output_ids == [token for delta in got if delta for token in delta.token_ids]
    course.placed(1, 0)
    got += [course.take(delta) for delta in deltas(*steps, held_back=held_back)]
    told = [delta for delta in got if delta is not None]
    assert tuple(token for delta in told for token in delta.token_ids) == TOKENS
    assert "".join(delta.text for delta in told) == TEXT
    assert tuple(p.token_id for delta in told for p in delta.logprobs) == TOKENS
    assert all(len(delta.depths) == len(delta.token_ids) for delta in told)
    assert [delta.prompt_logprobs is not None for delta in told] == [True] + [False] * (len(told) - 1)
    assert [delta.finish_reason for delta in told] == [None] * (len(told) - 1) + ["length"]


def test_given_tokens_stay_given() -> None:
    course = Course(request(forced_output_ids=TOKENS[:4]))
    course.take(deltas(2, 4)[0])
    course.moved()
    assert course.rest().forced_output_ids == TOKENS[:4]


def test_a_request_does_not_end_all_replicas() -> None:
    course = Course(request())
    assert [course.moved() for _ in range(MAX_MOVES + 1)] == [True] * MAX_MOVES + [False]
    last = course.last_delta("error", "lost")
    assert (last.finish_reason, last.error, last.num_prompt_tokens) == ("error", "lost", 3)


def test_the_wire_changes_nothing() -> None:
    sent = request(extra_key="s", forced_output_ids=(4, 5), predicted_ids=(6,), grammar="{}")
    sent = replace(
        sent,
        params=SamplingParams(
            temperature=0.7, seed=3, stop=("x", "y"), logit_bias={5: 1.5}, grammar=GrammarSpec(kind="regex", text="a+")
        ),
    )
    back = SentRequest.of(sent.message())
    assert back == replace(sent, prompt_token_ids=[1, 2, 3], forced_output_ids=[4, 5], predicted_ids=[6])
    given = deltas(2, 4)
    assert load_deltas(dump_deltas(given)) == given
