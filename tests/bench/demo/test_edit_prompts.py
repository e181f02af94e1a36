"""Prompts of edits and of an agent: the answer is what the prompt asks for, and it repeats most of the prompt."""

from __future__ import annotations

import json
import random

import pytest

from specmamba.bench.demo.edits import EditSettings, agent_of, edit_of, make_prompts, new_cut
from specmamba.errors import ConfigError
from specmamba.train.corpus import Document

LINES = [
    f"    v_{i} = read_{i % 6}({'source' if i % 3 == 0 else 'x'}, {i})" for i in range(40)
]  # one word is used often
DOCUMENTS = [Document("lib", "a.py", "\n".join(LINES) + "\n"), Document("lib", "short.py", "x = 1\n")]


@pytest.mark.parametrize("kind", ["edit", "agent"])
def test_prompts_are_drawn_by_the_seed(kind: str) -> None:
    def rows(seed: int) -> list[dict[str, str]]:
        settings = EditSettings.model_validate({"kind": kind, "count": 5, "lines": 12, "seed": seed})
        return list(make_prompts(settings, DOCUMENTS))

    assert rows(1) == rows(1) != rows(2)
    for row in rows(1):
        assert row.keys() == {"source", "prompt", "continuation"}
        repeated = [line for line in row["continuation"].splitlines() if line[1:] in row["prompt"]]
        assert len(repeated) > len(row["continuation"].splitlines()) / 3


def test_an_edit_renames_drops_and_adds() -> None:
    cut = new_cut(12, DOCUMENTS, random.Random(3))
    prompt, answer = edit_of(cut, random.Random(3))
    assert "\n".join(cut.lines) in prompt
    assert f"where {cut.old} is called {cut.new}:" in prompt
    edited, renamed = answer.splitlines(), [cut.renamed(line) for line in cut.lines]
    assert len(edited) == 12
    (added,) = set(edited) - set(renamed)
    assert added in LINES
    assert added not in cut.lines
    assert len(set(renamed) - set(edited)) == 1


def test_an_agent_changes_what_it_has_read() -> None:
    cut = new_cut(12, DOCUMENTS, random.Random(4))
    prompt, answer = agent_of(cut, random.Random(4))
    call = json.loads(answer.splitlines()[0].removeprefix("replace "))
    assert call["old"] in "\n".join(cut.lines)
    changed = [line for line in call["new"].splitlines() if line not in cut.lines]
    assert [cut.renamed(line) for line in call["old"].splitlines() if cut.renamed(line) in changed] == changed
    assert len(changed) == 1
    added = [line for line in answer.splitlines() if line.startswith("+ ")]
    assert len(added) == 2  # the change in the prompt and that of the answer
    assert f"grep -n -w {cut.old} a.py" in prompt


def test_files_that_do_not_do() -> None:
    repeated = Document("lib", "c.py", "total = 1\n" * 100)  # no line could be added
    for documents in ([], DOCUMENTS[1:], [Document("lib", "b.py", "x\n" * 100)], [repeated]):
        with pytest.raises(ConfigError, match="no more lines that use an identifier often"):
            new_cut(12, documents, random.Random(0))
