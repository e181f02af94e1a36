"""Imports run down the layers, never up, and never in circles (docs/structures.md lists the packages)."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SPECMAMBA = Path(__file__).parents[2] / "specmamba"

# Lowest first. A package may import every package of a lower layer, itself, and nothing else.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("kernels", "demo"),
    ("cuda_graphs",),
    (
        "sampling_params",
        "core",
        "config",
        "chat_config",
        "generate_config",
        "server_config",
        "flags",
        "errors",
        "trees",
        "processes",
        "version",
    ),
    ("cache", "parallel", "templates"),
    ("checkpoints", "layers", "transfer"),
    ("models",),
    ("verify", "grammar"),
    ("draft",),
    ("engine",),
    ("calls",),
    ("local_engine", "replicas"),
    ("llm", "async_llm"),
    ("__init__",),
    ("server",),
    ("measure",),
    ("tune", "train", "info", "doctor", "quantize", "terminal", "scale_sim", "cluster"),
    ("bench",),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {package: level for level, packages in enumerate(LAYERS) for package in packages}
FOUNDATION = {*LAYERS[LAYER_OF["core"]]} - {"processes"}  # they may import each other
FACES = {"llm", "async_llm", "__init__", "server"}
TOOLS = ("measure", "tune", "train", "bench")  # they use faces, layers, kernels, templates, and each other downwards
# What these two may import from outside specmamba; the other packages are free.
# kernels/draft_sizing and kernels/suffix_automaton work on the host, in numpy's arrays
THIRD_PARTY_OF = {"kernels": {"numpy", "torch", "triton"}, "cuda_graphs": {"torch", "triton"}}


def may_import(package: str, other: str) -> bool:
    if package == other:
        return True
    if package in FOUNDATION and other in FOUNDATION:
        return True
    if package in TOOLS and other not in TOOLS:
        return other in FACES | FOUNDATION | {"kernels", "layers", "templates"}
    return LAYER_OF[other] < LAYER_OF[package]


def python_files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root, followlinks=True):
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def package_of(root: Path, module: str) -> str:
    """The package of a dotted name below ``root``; a name that specmamba itself defines belongs to its ``__init__``."""
    first = module.split(".")[1] if "." in module else "__init__"
    is_package = first in LAYER_OF or (root / first).exists() or (root / f"{first}.py").exists()
    return first if is_package else "__init__"


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


def violations(root: Path) -> list[str]:
    found = []
    for file in python_files(root):
        parts = list(file.relative_to(root).with_suffix("").parts)
        package = parts[0]
        where = f"{root.name}/{file.relative_to(root)}"
        if package not in LAYER_OF:
            found.append(f"{where}: the package {package!r} has no layer: place it in LAYERS of test_layering.py")
            continue
        tree = ast.parse(file.read_text("utf8"), str(file))
        for line, module in imported_modules(tree, [root.name, *parts[:-1]]):
            top = module.split(".")[0]
            if top == root.name:
                other = package_of(root, module)
                if other not in LAYER_OF:
                    found.append(f"{where}:{line}: imports {module}, a package without a layer: place it in LAYERS")
                elif not may_import(package, other):
                    found.append(f"{where}:{line}: {package} must not import {other} ({module})")
            elif package in THIRD_PARTY_OF and top not in THIRD_PARTY_OF[package] | sys.stdlib_module_names:
                found.append(f"{where}:{line}: {package} must not import {top}: {sorted(THIRD_PARTY_OF[package])} only")
    return found


def import_graph(root: Path) -> dict[str, set[str]]:
    """Which modules each module imports, by dotted name.

    Every import counts: one inside a function runs later, and one under TYPE_CHECKING never runs, but a reader of
    either of two such modules has to read both. ``from package import name`` imports the module ``name`` where there is
    one, else ``package/__init__.py``. That Python also runs the ``__init__`` of the packages above does not count.
    """
    modules = {}
    for file in python_files(root):
        parts = [root.name, *file.relative_to(root).with_suffix("").parts]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (file, parts[:-1])
    graph: dict[str, set[str]] = {}
    for name, (file, package) in modules.items():
        graph[name] = set()
        for _, imported in imported_modules(ast.parse(file.read_text("utf8"), str(file)), package):
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target in modules and target != name:
                graph[name].add(target)
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, directly or through others."""
    reached = {name: _reachable(graph, name) for name in graph}
    in_cycles = sorted(name for name in graph if name in reached[name])
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in in_cycles}
    return sorted(sorted(group) for group in groups)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(graph[name])
    return seen


def test_no_import_runs_up() -> None:
    assert violations(SPECMAMBA) == []


def test_no_modules_import_each_other() -> None:
    assert cycles(import_graph(SPECMAMBA)) == []


def test_the_walk_follows_the_links() -> None:
    packages = {file.relative_to(SPECMAMBA).parts[0] for file in python_files(SPECMAMBA)}
    assert {"kernels", "bench", "core.py", "engine"} <= packages


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    root = folder / "specmamba"
    for name, source in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return root


GOOD_TREE = {
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


def test_the_checker_accepts_a_good_tree(tmp_path: Path) -> None:
    assert violations(write_tree(tmp_path, GOOD_TREE)) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("kernels/op/ops.py", "import specmamba.cache.pool", "kernels must not import cache"),
        ("kernels/op/ops.py", "from specmamba.core import TreeShape", "kernels must not import core"),
        ("kernels/op/ops.py", "import scipy", "kernels must not import scipy"),
        ("kernels/op/ops.py", "from ... import engine", "kernels must not import engine"),
        ("kernels/op/ops.py", "from specmamba import __version__", "kernels must not import __init__"),
        ("kernels/op/torch_ops.py", "from specmamba.cuda_graphs import r", "kernels must not import cuda_graphs"),
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
        ("draft/mtp.py", "from specmamba.engine import step", "draft must not import engine"),
        ("verify/accept.py", "from ..draft import mtp", "verify must not import draft"),
        ("engine/step.py", "from specmamba import LLM", "engine must not import __init__"),
        ("llm.py", "from specmamba.server import app", "llm must not import server"),
        ("bench/ops.py", "from specmamba.engine import step", "bench must not import engine"),
        ("bench/ops.py", "from specmamba.cli import main", "bench must not import cli"),
        ("tune/tree.py", "from specmamba.bench import ops", "tune must not import bench"),
        ("tune/tree.py", "from specmamba.engine import step", "tune must not import engine"),
        ("doctor/table.py", "from specmamba.bench import ops", "doctor must not import bench"),
        ("utils.py", "", "the package 'utils' has no layer: place it in LAYERS"),
        ("helpers/text.py", "", "the package 'helpers' has no layer: place it in LAYERS"),
    ],
)
def test_the_checker_catches(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    found = violations(write_tree(tmp_path, GOOD_TREE | {file: source}))
    assert len(found) == 1, found
    assert found[0].startswith(f"specmamba/{file}"), found
    assert complaint in found[0]


def test_a_good_tree_has_no_cycles(tmp_path: Path) -> None:
    assert cycles(import_graph(write_tree(tmp_path, GOOD_TREE))) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"engine/step.py": "from .runner import R", "engine/runner.py": "def f():\n    from .step import S"},
            ["specmamba.engine.runner", "specmamba.engine.step"],
        ),
        (
            {
                "engine/step.py": "from . import runner",
                "engine/runner.py": "from .. import llm",
                "llm.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .engine.step import S",
            },
            ["specmamba.engine.runner", "specmamba.engine.step", "specmamba.llm"],
        ),
        (
            {"kernels/op/__init__.py": "from .torch_ops import f", "kernels/op/torch_ops.py": "from . import SCALE"},
            ["specmamba.kernels.op", "specmamba.kernels.op.torch_ops"],
        ),
    ],
)
def test_cycles_are_found(tmp_path: Path, files: dict[str, str], expected: list[str]) -> None:
    assert cycles(import_graph(write_tree(tmp_path, GOOD_TREE | files))) == [expected]
