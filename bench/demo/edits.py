"""Make prompts whose answers repeat most of what they were given: edits of a file, and an agent's calls of tools.

    python -m specmamba.bench.demo.edits --kind edit --out edits.jsonl
    python -m specmamba.bench.demo.edits --kind agent --out agent.jsonl

They are made from the held-out files, which the demo was not trained on, one JSON object a line: ``source``, ``prompt``
and ``continuation``, the true answer, for ``--replay``. An *edit* renames an identifier of some lines, drops a line and
adds one of another place of the file; the answer is all the lines. An *agent* has read lines of a file, searched for an
identifier and changed it in one place; the answer is a call that changes the next place, and the diff of both changes.
"""

from __future__ import annotations

import difflib
import json
import keyword
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from specmamba.bench.demo.prompts import put_rows
from specmamba.config import CommandLine
from specmamba.errors import ConfigError
from specmamba.measure.command import run_command
from specmamba.train.corpus import Document, read_corpus, roots_for

PROG = "python -m specmamba.bench.demo.edits"
FEWEST_USES = 4  # of a renamed identifier
WORD = re.compile(r"\b[A-Za-z_]\w{2,}\b")
SUFFIXES = ("_value", "_name", "_item", "2")
_TRIES = 1000  # per prompt


class EditSettings(CommandLine):
    """Make prompts of edits, or of an agent, from the held-out files of the demo's corpus."""

    out: Annotated[Path | None, Field(description="file to write; none: standard output")] = None
    kind: Annotated[Literal["edit", "agent"], Field(description="what is made")] = "edit"
    count: Annotated[int, Field(ge=1, description="prompts to make")] = 16
    lines: Annotated[int, Field(ge=12, description="lines of a file that a prompt shows")] = 32
    seed: Annotated[int, Field(ge=0, description="seeds the choice")] = 0
    corpus: Annotated[
        tuple[Path, ...], Field(description="folder to hold out from, instead of the standard library")
    ] = ()


class Cut(NamedTuple):
    """Lines of a file, and an identifier in them that gets another name."""

    source: Document
    first: int  # number of the first line, from 1
    lines: list[str]
    old: str
    new: str

    def renamed(self, line: str) -> str:
        """The line with the other name."""
        return re.sub(rf"\b{self.old}\b", self.new, line)

    def others(self) -> list[str]:
        """Lines of the file that are not among those of the cut."""
        return [line for line in self.source.text.splitlines() if line.strip() and line not in self.lines]


def make_prompts(settings: EditSettings, documents: Sequence[Document]) -> Iterator[dict[str, str]]:
    """Yield ``count`` prompts, drawn by the seed.

    Raises:
        ConfigError: the files have not enough lines that use an identifier often.
    """
    draw = random.Random(settings.seed)
    make = edit_of if settings.kind == "edit" else agent_of
    for _ in range(settings.count):
        cut = new_cut(settings.lines, documents, draw)
        prompt, continuation = make(cut, draw)
        yield {"source": cut.source.name, "prompt": prompt, "continuation": continuation}


def new_cut(count: int, documents: Sequence[Document], draw: random.Random) -> Cut:
    """Draw ``count`` lines of a file, of twice as many or more, in which an identifier is used often enough."""
    long_enough = [document for document in documents if document.text.count("\n") >= 2 * count]
    for _ in range(_TRIES if long_enough else 0):
        source = draw.choice(long_enough)
        whole = source.text.splitlines()
        start = draw.randrange(len(whole) - count)
        lines = whole[start : start + count]
        uses = Counter(word for line in lines for word in set(WORD.findall(line)) if not keyword.iskeyword(word))
        often = sorted(word for word, number in uses.items() if number >= FEWEST_USES)
        if often and all(len(line) <= 100 for line in lines):
            old = draw.choice(often)
            cut = Cut(source, start + 1, lines, old, old + draw.choice(SUFFIXES))
            if cut.others():  # a file may repeat its lines
                return cut
    raise ConfigError("the held-out files have no more lines that use an identifier often: lower --lines")


def edit_of(cut: Cut, draw: random.Random) -> tuple[str, str]:
    """The lines with a wish to change them, and the changed lines."""
    edited = [cut.renamed(line) for line in cut.lines]
    del edited[draw.randrange(1, len(edited))]
    edited.insert(draw.randrange(1, len(edited)), draw.choice(cut.others()))
    shown = "\n".join(cut.lines)
    prompt = f"# {cut.source.name}\n{shown}\n\n# The same lines, where {cut.old} is called {cut.new}:\n"
    return prompt, "\n".join(edited) + "\n"


def agent_of(cut: Cut, draw: random.Random) -> tuple[str, str]:
    """What an agent has done and read so far, and what it does and says then."""
    name, last = cut.source.name, cut.first + len(cut.lines) - 1
    places = [i for i, line in enumerate(cut.lines) if cut.renamed(line) != line]
    one, other = sorted(draw.sample(places, 2))
    found = "\n".join(f"{cut.first + i}:{cut.lines[i]}" for i in places)
    shown = "\n".join(cut.lines)
    prompt = (
        f"$ sed -n '{cut.first},{last}p' {name}\n{shown}\n\n$ grep -n -w {cut.old} {name}\n{found}\n\n"
        f"{_change(cut, one)}{_answer(name)}"
    )
    edited = [cut.renamed(line) if i in (one, other) else line for i, line in enumerate(cut.lines)]
    diff = difflib.unified_diff(cut.lines, edited, f"a/{name}", f"b/{name}", lineterm="")
    return prompt, f"{_change(cut, other)}{_answer(name)}$ git diff\n" + "\n".join(diff) + "\n"


def _change(cut: Cut, place: int) -> str:
    """A call of a tool that gives a line, between its neighbours, the other name."""
    around = slice(max(0, place - 2), place + 3)
    before, after = cut.lines[around], [*cut.lines[around]]
    after[place - around.start] = cut.renamed(cut.lines[place])
    call = {"path": cut.source.name, "old": "\n".join(before), "new": "\n".join(after)}
    return f"replace {json.dumps(call)}\n"


def _answer(name: str) -> str:
    return f"The file {name} has been changed: 1 replacement.\n\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the prompts file, or print it; return the exit status."""
    return run_command(PROG, EditSettings, arguments, _run)


def _run(settings: EditSettings) -> int:
    rows = make_prompts(settings, read_corpus(roots_for(settings.corpus, [])).held_out)
    put_rows(rows, settings.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
