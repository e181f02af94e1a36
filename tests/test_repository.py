"""What must hold for every tracked file: it works on another machine, and a clone stays small."""

from __future__ import annotations

import os
import re

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


def foreign_names(text: str) -> list[str]:
    return [match.group() for pattern in (MACHINE_PATH, REGISTRY_HOST) for match in pattern.finditer(text)]


def test_no_machine_path_or_registry_host() -> None:
    found = {}
    for name in tracked_files():
        content = (ROOT / name).read_bytes()
        if DATA.fullmatch(name) or b"\0" in content:
            continue
        if names := foreign_names(content.decode("utf8")):
            found[name] = names
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


def test_no_huge_file() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in tracked_files()}
    assert {name: size for name, size in sizes.items() if size > MAX_BYTES} == {}


def test_links_are_links() -> None:
    """A checkout or an editor that turns one into a folder or a text file breaks the package silently."""
    assert {name: os.readlink(ROOT / name) for name in LINKS} == LINKS
