"""Ask a demo checkpoint held-out questions, and measure how much its greedy text repeats itself.

    python -m specmamba.bench.demo.exam --model specmamba/demo

Questions are drawn like those of the training, but none of them was trained on (``talks.talk.is_held_out``): the
wording is new, or the numbers and names in it are; what it asks about is not. An answer is right when it is the
expected one: the same calls, names and arguments alike, or the same text. The reasoning in front of it does not count.
Distinct 4-grams: of each greedy text their share among all of it, then the mean over the texts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specmamba.config import DEMO_MODEL, CommandLine
from specmamba.measure.command import run_command

if TYPE_CHECKING:  # --help must not wait for torch
    from specmamba import LLM
    from specmamba.bench.demo.talks.talk import Talk
    from specmamba.core import RequestOutput

PROG = "python -m specmamba.bench.demo.exam"
GRAM = 4  # tokens
ANSWER_TOKENS = 160  # of an answer at the most
MARK = "</think>\n"


class ExamSettings(CommandLine):
    """Ask a demo checkpoint held-out questions; measure how much its greedy text repeats itself."""

    model: Annotated[Path, Field(description="folder of the checkpoint")] = DEMO_MODEL
    questions: Annotated[int, Field(ge=1, description="questions to ask")] = 400
    text_tokens: Annotated[int, Field(ge=GRAM, description="tokens to go on with behind each bundled prompt")] = 128
    seed: Annotated[int, Field(ge=0, description="draws the questions")] = 1
    show: Annotated[int, Field(ge=0, description="wrong answers to print")] = 0
    prompts_file: Annotated[
        Path | None, Field(description="write the questions to this file, as ``bench acceptance --prompts`` reads them")
    ] = None
    json_file: Annotated[Path | None, Field(description="file to write the figures to")] = None


def distinct_share(tokens: Sequence[int]) -> float | None:
    """Share of different n-grams among all of a text; None where it is too short for one."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return len(set(grams)) / len(grams) if grams else None


def is_right(talk: Talk, text: str) -> bool:
    """Whether an answer, without the mark of its end, is the expected one; its reasoning may differ."""
    said = text.partition(MARK)[2] if talk.thinks else text
    message = talk.messages[-1]
    parsed = _parsed(talk, said)
    wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return parsed == (wanted, message["content"])


def _parsed(talk: Talk, said: str) -> tuple[list[tuple[str, Any]], str]:
    """The calls and the content of an answer, as the server reads them."""
    from specmamba.server.tools.choice import MAX_CALLS, new_parser
    from specmamba.server.tools.parsing import whole_answer

    if not talk.tools:
        return [], said
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in talk.tools}
    parser = new_parser("hermes", schemas, MAX_CALLS)
    answer = whole_answer([*parser.push(said), *parser.finish()])
    try:
        return [(call.name, json.loads(call.arguments)) for call in answer.calls], answer.content
    except ValueError:
        return [("", None)], answer.content  # arguments that are no JSON


def examine(settings: ExamSettings, llm: LLM, talks: Sequence[Talk]) -> dict[str, Any]:
    """Ask, and count right answers by kind; measure distinct 4-grams of the answers and behind the bundled prompts."""
    answers = _greedy(llm, [_ids(settings.model, talk.prompt) for talk in talks], ANSWER_TOKENS)
    rights = [is_right(talk, answer.text) for talk, answer in zip(talks, answers, strict=True)]
    _show_wrong([(talk, answers[i].text) for i, talk in enumerate(talks) if not rights[i]][: settings.show])
    rows = map(json.loads, (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines())
    texts = _greedy(llm, [row["prompt"] for row in rows], settings.text_tokens)
    return {
        "questions": len(talks),
        "right_share": sum(rights) / len(talks),
        "right": _by_kind(talks, rights),
        "distinct_4_grams_of_answers": _mean([distinct_share(answer.token_ids) for answer in answers]),
        "distinct_4_grams_of_source": _mean([distinct_share(text.token_ids) for text in texts]),
    }


def _greedy(llm: LLM, prompts: Sequence[str | list[int]], most: int) -> list[RequestOutput]:
    from specmamba import SamplingParams

    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=most), use_tqdm=False)


def _by_kind(talks: Sequence[Talk], rights: Sequence[bool]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {talk.kind: {"right": 0, "asked": 0} for talk in talks}
    for talk, right in zip(talks, rights, strict=True):
        counts[talk.kind]["right"] += right
        counts[talk.kind]["asked"] += 1
    return dict(sorted(counts.items()))


def _show_wrong(wrong: Sequence[tuple[Talk, str]]) -> None:
    for talk, text in wrong:
        print(f"--- {talk.kind}\n{talk.prompt}{text}\n--- expected\n{talk.answer}", flush=True)


def _ids(model: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return ids


def _mean(shares: Sequence[float | None]) -> float:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else 0.0


def write_prompts(file: Path, talks: Sequence[Talk]) -> None:
    """Write each question, rendered, with its expected answer, one JSON object a line."""
    rows = ({"prompt": talk.prompt, "continuation": talk.answer} for talk in talks)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")


def describe(figures: dict[str, Any]) -> str:
    """The figures in words."""
    lines = [f"{figures['right_share']:.3f} of {figures['questions']} held-out questions answered right"]
    lines += [f"  {kind}: {found['right']} of {found['asked']}" for kind, found in figures["right"].items()]
    answers, source = figures["distinct_4_grams_of_answers"], figures["distinct_4_grams_of_source"]
    lines.append(f"distinct 4-grams, greedy: answers {answers:.3f}, source code {source:.3f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    return run_command(PROG, ExamSettings, arguments, _run)


def _run(settings: ExamSettings) -> int:
    from specmamba import LLM
    from specmamba.bench.demo.checkpoint import write_json
    from specmamba.bench.demo.talks.conversations import conversations

    talks = list(itertools.islice(conversations(settings.seed, held_out=True), settings.questions))
    if settings.prompts_file is not None:
        write_prompts(settings.prompts_file, talks)
    with LLM(model=str(settings.model)) as llm:
        figures = examine(settings, llm, talks)
    print(describe(figures))
    if settings.json_file is not None:
        write_json(settings.json_file, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
