"""Imports run down the house, never up (docs/structures.md has the plan of it)."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "specmamba"

# Lowest first. A room may import every room of a lower storey, itself, and nothing else.
STOREYS: tuple[tuple[str, ...], ...] = (
    ("kernels", "cuda_graphs", "demo"),
    ("core", "config", "server_config", "command_line", "errors", "trees"),
    ("cache",),
    ("layers",),
    ("models",),
    ("draft", "verify", "grammar"),
    ("engine",),
    ("llm",),
    ("__init__",),
    ("server",),
    ("measure",),
    ("tune", "train", "info", "doctor"),
    ("bench",),
    ("cli",),
    ("__main__",),
)
STOREY_OF = {room: level for level, rooms in enumerate(STOREYS) for room in rooms}
FOUNDATION = {
    "core",
    "config",
    "server_config",
    "command_line",
    "errors",
    "trees",
}  # one storey, and they may know each other
FACES = {"llm", "__init__", "server"}
TOOLS = ("measure", "tune", "train", "bench")  # they use faces and kernels only, and each other downwards
# What these two may import from outside the package; the other rooms are free.
THIRD_PARTY_OF = {"kernels": {"torch", "triton"}, "cuda_graphs": {"torch", "triton"}}


def may_import(room: str, other: str) -> bool:
    if room == other:
        return True
    if room in FOUNDATION and other in FOUNDATION:
        return True
    if room in TOOLS and other not in TOOLS:
        return other in FACES | FOUNDATION | {"kernels"}
    return STOREY_OF[other] < STOREY_OF[room]


def python_files(package: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(package, followlinks=True):
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def room_of(package: Path, module: str) -> str:
    """The room of a dotted name below ``package``; a name the package itself defines belongs to its ``__init__``."""
    first = module.split(".")[1] if "." in module else "__init__"
    is_room = first in STOREY_OF or (package / first).exists() or (package / f"{first}.py").exists()
    return first if is_room else "__init__"


def imported_modules(tree: ast.AST, package_of_module: list[str]) -> Iterator[tuple[int, str]]:
    """Every module or name imported anywhere in the file: inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package_of_module[: len(package_of_module) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str() as name), *_],
            ):
                yield node.lineno, name


def violations(package: Path) -> list[str]:
    found = []
    for file in python_files(package):
        parts = list(file.relative_to(package).with_suffix("").parts)
        room = parts[0]
        where = f"{package.name}/{file.relative_to(package)}"
        if room not in STOREY_OF:
            found.append(f"{where}: the room {room!r} has no storey: place it in STOREYS of tests/test_layering.py")
            continue
        tree = ast.parse(file.read_text("utf8"), str(file))
        for line, module in imported_modules(tree, [package.name, *parts[:-1]]):
            top = module.split(".")[0]
            if top == package.name:
                other = room_of(package, module)
                if other not in STOREY_OF:
                    found.append(f"{where}:{line}: imports {module}, a room without a storey: place it in STOREYS")
                elif not may_import(room, other):
                    found.append(f"{where}:{line}: {room} must not import {other} ({module})")
            elif room in THIRD_PARTY_OF and top not in THIRD_PARTY_OF[room] and top not in sys.stdlib_module_names:
                found.append(f"{where}:{line}: {room} must not import {top}: {sorted(THIRD_PARTY_OF[room])} only")
    return found


def test_no_import_runs_up() -> None:
    assert violations(PACKAGE) == []


def test_the_walk_follows_the_links() -> None:
    rooms = {file.relative_to(PACKAGE).parts[0] for file in python_files(PACKAGE)}
    assert {"kernels", "bench", "core.py", "engine"} <= rooms


def write_house(root: Path, files: dict[str, str]) -> Path:
    package = root / "specmamba"
    for name, source in files.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return package


GOOD_HOUSE = {
    "__init__.py": "from specmamba.llm import LLM\n__version__ = '1'\n",
    "core.py": "from specmamba.errors import E\n",
    "errors.py": "",
    "llm.py": "from .engine import step\n",
    "engine/step.py": "from ..draft.mtp import D\nfrom specmamba.verify import accept\nimport numpy\n",
    "draft/mtp.py": "from specmamba.core import DraftTree\n",
    "kernels/op/__init__.py": "import math, torch, triton\nfrom .reference import r\n",
    "kernels/op/reference.py": "from specmamba.kernels.other import x\n",
    "cli.py": "from specmamba import __version__\ndef f():\n    from specmamba.bench import ops\n",
    "bench/ops.py": "from specmamba import LLM, kernels\nfrom specmamba.config import C\n",
}


def test_the_checker_accepts_a_good_house(tmp_path: Path) -> None:
    assert violations(write_house(tmp_path, GOOD_HOUSE)) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("kernels/op/ops.py", "import specmamba.cache.pool", "kernels must not import cache"),
        ("kernels/op/ops.py", "from specmamba.core import TreeShape", "kernels must not import core"),
        ("kernels/op/ops.py", "import numpy as np", "kernels must not import numpy"),
        ("kernels/op/ops.py", "from ... import engine", "kernels must not import engine"),
        ("kernels/op/ops.py", "from specmamba import __version__", "kernels must not import __init__"),
        ("cuda_graphs/runner.py", "from specmamba.kernels.op import r", "cuda_graphs must not import kernels"),
        ("core.py", "from specmamba.cache import pool", "core must not import cache"),
        ("cache/pool.py", "def f():\n    from specmamba.models import m", "cache must not import models"),
        (
            "cache/pool.py",
            "import importlib\nimportlib.import_module('specmamba.engine')",
            "cache must not import engine",
        ),
        (
            "layers/gdn.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..models import m",
            "layers must not import models",
        ),
        ("draft/mtp.py", "from specmamba.verify.accept import a", "draft must not import verify"),
        ("verify/accept.py", "from ..draft import mtp", "verify must not import draft"),
        ("engine/step.py", "from specmamba import LLM", "engine must not import __init__"),
        ("llm.py", "from specmamba.server import app", "llm must not import server"),
        ("bench/ops.py", "from specmamba.engine import step", "bench must not import engine"),
        ("bench/ops.py", "from specmamba.cli import main", "bench must not import cli"),
        ("tune/tree.py", "from specmamba.bench import ops", "tune must not import bench"),
        ("tune/tree.py", "from specmamba.engine import step", "tune must not import engine"),
        ("doctor/table.py", "from specmamba.bench import ops", "doctor must not import bench"),
        ("utils.py", "", "the room 'utils' has no storey: place it in STOREYS"),
        ("helpers/text.py", "", "the room 'helpers' has no storey: place it in STOREYS"),
    ],
)
def test_the_checker_catches(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    found = violations(write_house(tmp_path, GOOD_HOUSE | {file: source}))
    assert len(found) == 1, found
    assert found[0].startswith(f"specmamba/{file}"), found
    assert complaint in found[0]
