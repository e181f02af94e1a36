"""docs/adding_a_model.md agrees with the code: its files exist, and so do the names and the lines it shows."""

from __future__ import annotations

import re

import pytest

from specmamba.models.weights import Weights
from tests.repository import ROOT

TEXT = (ROOT / "docs" / "adding_a_model.md").read_text("utf8")
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
PATH = re.compile(r"(?:specmamba|tests)/[\w/]+\.py")
# what belongs to a config, an engine or Python, and not to the files that the text names
FOREIGN = {"context.state", "rope_parameters"}


def spans() -> list[str]:
    """The texts in backticks."""
    return re.findall(r"`([^`]+)`", PROSE)


def paths() -> set[str]:
    return {path for span in spans() for path in PATH.findall(span)}


def shown_lines() -> list[tuple[str, str]]:
    """Lines of code blocks, with the file that the last "From ..." before them names."""
    *parts, _ = re.split(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    shown, file = [], ""
    for before, code in zip(parts[::2], parts[1::2], strict=True):
        if named := re.findall(r"From\s+`([^`]+)`", before):
            file = named[-1]
        shown += [(file, line) for line in code.splitlines() if line.strip()]
    return shown


def names() -> set[str]:
    """Identifiers, dotted or called."""
    found = (re.fullmatch(r"([A-Za-z_][\w.]*)(?:\(.*\))?", span) for span in spans())
    return {match.group(1) for match in found if match} - FOREIGN


def test_files_are_there() -> None:
    assert len(paths()) > 20
    assert {path for path in paths() if not (ROOT / path).is_file()} == set()


@pytest.mark.parametrize(("file", "line"), shown_lines())
def test_shown_lines_are_in_the_code(file: str, line: str) -> None:
    assert line in (ROOT / file).read_text("utf8").splitlines()


def test_names_are_in_the_code() -> None:
    code = "\n".join((ROOT / path).read_text("utf8") for path in paths())
    own = {name.removeprefix("weights.") for name in names() if name.startswith("weights.")}
    others = {name.rpartition(".")[2] for name in names()} - own
    assert len(own) >= 8
    assert len(others) > 40
    assert {name for name in own if not hasattr(Weights, name)} == set()
    assert {name for name in others if not re.search(rf"\b{name}\b", code)} == set()
