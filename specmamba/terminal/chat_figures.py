"""What ``/stats`` says of the last answer and of a whole session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specmamba.terminal.chat_session import Answer, ChatSession


def figures(session: ChatSession) -> list[str]:
    """The lines of ``/stats``."""
    lines = list(_of_answers(session.answers))
    source = session.source
    last = session.answers[-1].end if session.answers else None
    if last is not None:
        used = last.num_prompt_tokens + last.num_output_tokens
        of = "" if source.context_length is None else f" of {source.context_length}"
        lines.append(f"context: {used}{of} tokens after the last answer, {session.num_exchanges} exchanges")
    return [*lines, f"speculation: {_switched(session)}{source.drafting()}", f"model: {source.model}"]


def _switched(session: ChatSession) -> str:
    return "" if session.settings.params.speculative else "off by /set speculative; else "


def _of_answers(answers: Sequence[Answer]) -> Iterator[str]:
    ended = [answer for answer in answers if answer.end is not None]
    if not ended:
        yield "no answer yet"
        return
    last = ended[-1]
    first = "" if last.first_at is None else f", the first after {last.first_at - last.began_at:.2f} s"
    yield f"last answer: {_pace([last])}{first}"
    assert last.end is not None
    yield f"  prompt: {last.end.num_prompt_tokens} tokens, {last.end.num_cached_tokens} of them from the prefix cache"
    yield f"  drafts: {_drafts([last])}"
    if len(ended) > 1:
        yield f"all {len(ended)} answers: {_pace(ended)}"
        yield f"  drafts: {_drafts(ended)}"


def _pace(answers: Sequence[Answer]) -> str:
    tokens = sum(answer.end.num_output_tokens for answer in answers if answer.end is not None)
    seconds = sum(answer.seconds for answer in answers)
    return f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"


def _drafts(answers: Sequence[Answer]) -> str:
    ends = [answer.end for answer in answers if answer.end is not None]
    known = [end for end in ends if end.num_drafted is not None and end.num_accepted is not None]
    if not known:
        return "the server does not say"
    drafted, accepted = (sum(getattr(end, name) for end in known) for name in ("num_drafted", "num_accepted"))
    tokens, steps = (sum(getattr(end, name) for end in known) for name in ("num_output_tokens", "num_steps"))
    length = tokens / steps if steps else 0.0
    rules = {end.rule for end in known if end.rule is not None}
    rule = f" (rule: {', '.join(sorted(rules))})" if rules else ""
    return f"{drafted} tokens drafted, {accepted} accepted, acceptance length {length:.2f}{rule}"
