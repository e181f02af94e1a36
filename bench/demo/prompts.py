"""Cut prompts from the held-out files, which the demo was not trained on.

    python -m specmamba.bench.demo.prompts --out prompts.jsonl

One JSON object a line: ``source`` (file in the standard library, or "handwritten"), ``prompt``, and with
``--with-continuation`` the text that follows. The bundled prompts were made in the same way, not by this
program: cuts differ. ``--complete`` finds prompts in the files that they were cut from and adds what follows, which is
how the bundled ones got their continuations:

    python -m specmamba.bench.demo.prompts --complete specmamba/demo/prompts.jsonl --out specmamba/demo/prompts.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from specmamba.config import CommandLine
from specmamba.errors import ConfigError
from specmamba.measure.command import run_command
from specmamba.train.corpus import Document, read_corpus, roots_for

PROG = "python -m specmamba.bench.demo.prompts"
HANDWRITTEN = (
    "import os\n\ndef read_file(path):\n    ",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "class Stack:\n    def __init__(self):\n        ",
    "for i in range(10):\n    ",
)
SKIPPED = ("encodings/", "ctypes/")  # character tables and type aliases, which are not typical text
_TRIES = 1000  # per prompt


class PromptSettings(CommandLine):
    """Cut prompts from the held-out files of the demo's corpus."""

    out: Annotated[Path | None, Field(description="file to write; none: standard output")] = None
    count: Annotated[int, Field(ge=0, description="prompts to cut, besides the handwritten ones")] = 24
    min_characters: Annotated[int, Field(ge=1, description="length of a cut at the least")] = 64
    max_characters: Annotated[int, Field(ge=1, description="length of a cut at the most")] = 800
    with_continuation: Annotated[bool, Field(description="add the text that follows each cut")] = False
    complete: Annotated[
        Path | None, Field(description="cut nothing: add the text that follows to the prompts of this file")
    ] = None
    continuation_characters: Annotated[int, Field(ge=1, description="length of that text")] = 1024
    seed: Annotated[int, Field(ge=0, description="seeds the cuts")] = 0
    corpus: Annotated[
        tuple[Path, ...], Field(description="folder to hold out from, instead of the standard library")
    ] = ()

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> PromptSettings:
        if self.min_characters > self.max_characters:
            raise ValueError(f"--min-characters {self.min_characters} is above --max-characters {self.max_characters}")
        return self


def cut_prompts(settings: PromptSettings, documents: Sequence[Document]) -> Iterator[dict[str, str]]:
    """Yield the handwritten prompts, then ``count`` different cuts, drawn by the seed."""
    yield from ({"source": "handwritten", "prompt": prompt} for prompt in HANDWRITTEN)
    draw = random.Random(settings.seed)
    rest = settings.continuation_characters if settings.with_continuation else 0
    sources = [d for d in documents if not d.name.startswith(SKIPPED) and len(d.text) > settings.max_characters + rest]
    if settings.count and not sources:
        raise ConfigError("no held-out file is long enough: lower --max-characters or --continuation-characters")
    seen: set[str] = set()
    for _ in range(settings.count):
        source, prompt, end = _new_cut(settings, sources, draw, rest, seen)
        seen.add(prompt)
        row = {"source": source.name, "prompt": prompt}
        yield row | {"continuation": source.text[end : end + rest]} if rest else row


def _new_cut(
    settings: PromptSettings, sources: Sequence[Document], draw: random.Random, rest: int, seen: set[str]
) -> tuple[Document, str, int]:
    """Draw whole lines of one file with ``rest`` characters behind them; return the file, the lines, and their end."""
    for _ in range(_TRIES):
        source = draw.choice(sources)
        start = source.text.find("\n", draw.randrange(len(source.text))) + 1
        length = draw.randint(settings.min_characters, settings.max_characters)
        end = source.text.rfind("\n", start, start + length) + 1
        prompt = source.text[start:end]
        fits = settings.min_characters <= len(prompt) and end + rest <= len(source.text)
        if start > 0 and fits and prompt.strip() and prompt not in seen:
            return source, prompt, end
    raise ConfigError("the held-out files have no more cuts of these lengths: lower --count or --min-characters")


def complete_prompts(file: Path, length: int, documents: Sequence[Document]) -> Iterator[dict[str, str]]:
    """Yield the prompts of a file with the ``length`` characters that follow each; handwritten ones unchanged.

    Raises:
        ConfigError: the file cannot be read, or a prompt is not in its source exactly once.
    """
    texts = {document.name: document.text for document in documents}
    for number, line in enumerate(_lines_of(file), 1):
        where = f"--complete: {file}, line {number}"
        row = _row_of(line, where)
        if row["source"] == "handwritten":
            yield row
            continue
        source, prompt = texts.get(row["source"], ""), row["prompt"]
        if source.count(prompt) != 1:
            count = "not there" if prompt not in source else "there more than once"
            raise ConfigError(f"{where}: the prompt is {count} in the held-out file {row['source']} of this corpus")
        end = source.index(prompt) + len(prompt)
        yield row | {"continuation": source[end : end + length]}


def _lines_of(file: Path) -> list[str]:
    try:
        return file.read_text("utf8").removesuffix("\n").split("\n")  # splitlines() would break strings at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--complete: {file} cannot be read: {error}") from None


def _row_of(line: str, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("source", "prompt")):
        raise ConfigError(f'{where}: not of the form {{"source": "...", "prompt": "..."}}')
    return row


def main(arguments: list[str] | None = None) -> int:
    """Write the prompts file, or print it; return the exit status."""
    return run_command(PROG, PromptSettings, arguments, _run)


def _run(settings: PromptSettings) -> int:
    held_out = read_corpus(roots_for(settings.corpus, [])).held_out
    if settings.complete is None:
        rows = cut_prompts(settings, held_out)
    else:
        rows = complete_prompts(settings.complete, settings.continuation_characters, held_out)
    put_rows(rows, settings.out)
    return 0


def put_rows(rows: Iterable[Mapping[str, Any]], out: Path | None) -> None:
    """Write one JSON object a line to a file, or print them."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, "utf8")


if __name__ == "__main__":
    raise SystemExit(main())
