"""What must hold for the tracked files: they work on other machines, a clone stays small, the code is easy to read."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from tests.repository import ROOT, tracked_files

LINKS = {f"specmamba/{name}": f"../{name}" for name in ("kernels", "cuda_graphs", "bench")}
MAX_BYTES = 25_000_000

# Built so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.~$*})-])/(?:" + "|".join(["work", "root", "tmp", "opt", "home", "Users"]) + r")/\w")
REGISTRY_HOST = re.compile(
    r"\b(?:" + "|".join(["pypi", "pythonhosted", "npmjs", "debian", "download\\.pytorch"]) + r")\.(?:org|com)\b"
)
# Vocabulary and prompts are other people's source code, and may mention any path.
DATA = re.compile(r"specmamba/demo/[\w.]+\.(?:jsonl?|safetensors)")
VENDORED = "specmamba/server/page_files/vendor/"

# A subject that a sentence should name instead: which component, which caller, which request?
VAGUE_WORD = re.compile(r"\b(?:" + "|".join(["no", "some"]) + r")body\b|\bwho" + r"ever\b", re.IGNORECASE)

MAX_PYTHON_FILES = 703  # outside tests
MAX_FILES_IN_FOLDER = 20  # Python files
# One file name for one job. These names say which part of its folder a file is, and the folder says of what.
PART_NAMES = {
    "__init__",
    "__main__",
    "reference",  # of an operator: its specification,
    "torch_ops",  # its implementations,
    "native_ops",
    "triton_ops",
    "triton_kernels",
    "operands",  # what they take,
    "tiles",  # and the tile sizes of its Triton kernels
}
# So it is in the folders of commands, where options, figures, tables and texts are those of the command.
COMMANDS = ("bench/", "kernels/aot/", "specmamba/measure/acceptance/", "specmamba/train/", "specmamba/tune/")


def foreign_names(text: str) -> list[str]:
    return [match.group() for pattern in (MACHINE_PATH, REGISTRY_HOST) for match in pattern.finditer(text)]


def test_no_machine_path_or_registry_host() -> None:
    found = {name: names for name, text in text_files() if (names := foreign_names(text))}
    assert found == {}


@pytest.mark.parametrize(
    "text",
    ["see /{}/x.py".format("work"), 'open("/{}/a")'.format("tmp"), "index = https://{}.org/simple".format("pypi")],
)
def test_the_search_finds(text: str) -> None:
    assert foreign_names(text)


@pytest.mark.parametrize("text", ["a/work/b", "../work/b", "$HOME/work/b", "GET /worker", "PyPI's kernels"])
def test_the_search_spares(text: str) -> None:
    assert not foreign_names(text)


def text_files() -> Iterator[tuple[str, str]]:
    """Name and content of the tracked files that are text and no data."""
    for name in tracked_files():
        content = (ROOT / name).read_bytes()
        if not (DATA.fullmatch(name) or b"\0" in content):
            yield name, content.decode("utf8")


def python_files() -> list[PurePosixPath]:
    """Tracked Python files outside tests."""
    return [PurePosixPath(name) for name in tracked_files() if name.endswith(".py") and not name.startswith("tests/")]


def public_docstrings(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Line and docstring of every public class, function and method."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not re.match(
            "_(?!_)", node.name
        ):
            if docstring := ast.get_docstring(node):
                yield node.lineno, docstring
            if isinstance(node, ast.ClassDef):
                yield from public_docstrings(node)


def test_sentences_name_their_subjects() -> None:
    assert [
        f"{name}:{number}: {line.strip()}"
        for name, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if not name.startswith(VENDORED) and VAGUE_WORD.search(line)
    ] == []


def test_docstrings_say_it_themselves() -> None:
    assert [
        f"{file}:{line}"
        for file in python_files()
        for line, docstring in public_docstrings(ast.parse((ROOT / file).read_text("utf8")))
        if re.match(r"See\b", docstring)
    ] == []


def test_files_are_few() -> None:
    assert len(python_files()) <= MAX_PYTHON_FILES


def test_folders_are_small() -> None:
    sizes = Counter(str(PurePosixPath(name).parent) for name in tracked_files() if name.endswith(".py"))
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES_IN_FOLDER} == {}


def test_file_names_are_used_once() -> None:
    files = defaultdict(list)
    for file in python_files():
        if file.stem not in PART_NAMES and not str(file).startswith(COMMANDS):
            files[file.stem].append(str(file))
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_no_huge_file() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in tracked_files()}
    assert {name: size for name, size in sizes.items() if size > MAX_BYTES} == {}


def test_links_are_links() -> None:
    """A checkout or an editor that turns one into a folder or a text file breaks the package silently."""
    assert {name: os.readlink(ROOT / name) for name in LINKS} == LINKS
