"""What a user gets from a built distribution, and what the checkout must not do to other packages."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.repository import ROOT, built_wheel, copy_tracked, tracked_files

pytestmark = pytest.mark.slow

OPERATORS = sorted(file.parent.name for file in (ROOT / "kernels").glob("*/reference.py"))
LINKED = ("kernels/", "cuda_graphs/", "bench/")
DEMO = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def run_python(code: str, *arguments: str, cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist that is built from the tracked files, so both are complete."""
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def installed_name(tracked: str) -> str:
    return f"specmamba/{tracked}" if tracked.startswith(LINKED) else tracked


def test_the_wheel_is_as_large_as_the_readme_says(wheel: Path) -> None:
    assert "the 17 MB of a plain wheel, 15 of which are the demo's weights" in (ROOT / "README.md").read_text("utf8")
    weights = zipfile.ZipFile(wheel).getinfo("specmamba/demo/model.safetensors").compress_size
    assert round(wheel.stat().st_size / 1e6) == 17
    assert round(weights / 1e6) == 15


def test_the_description_has_no_link_that_leads_nowhere(wheel: Path) -> None:
    """There is no checkout around it where an index of packages shows it."""
    files = zipfile.ZipFile(wheel)
    (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(files.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    shown, readme = metadata.get_payload(decode=True).decode("utf8"), (ROOT / "README.md").read_text("utf8")
    links = re.findall(r"\]\((.*?)\)", re.sub(r"```.*?```", "", shown, flags=re.DOTALL))
    assert [link for link in links if not link.startswith("https://")] == []
    assert re.findall(r"^#.*", shown, re.MULTILINE) == re.findall(r"^#.*", readme, re.MULTILINE)
    assert re.findall(r"```.*?```", shown, re.DOTALL) == re.findall(r"```.*?```", readme, re.DOTALL)
    assert "see which: a playground" in shown
    assert "![" not in shown


def other_python(version: str) -> str:
    """An interpreter of this version: on the path, or one of pyenv's. Skips where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [*sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}"))), shutil.which(f"python{version}")]
    for python in filter(None, found):  # pyenv's name on the path may stand for no interpreter
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"there is no Python {version} here")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_other_pythons_read_every_file(version: str) -> None:
    """Without a warning, such as newer ones have of escapes; and the command line answers, which needs no package."""
    python = other_python(version)
    code = "for name in input().split(chr(0)): compile(open(name, encoding='utf8').read(), name, 'exec')"
    names = "\0".join(name for name in tracked_files() if name.endswith(".py"))
    for arguments in (["-c", code], ["-S", "-m", "specmamba", "--help"]):
        command = [python, "-B", "-W", "error", *arguments]
        ended = subprocess.run(command, input=names, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
    assert "specmamba serve" in ended.stdout


def test_the_wheel_has_every_module(wheel_names: set[str]) -> None:
    modules = {
        name
        for name in map(installed_name, tracked_files())
        if name.startswith("specmamba/") and name.endswith(".py") and not name.startswith("specmamba/bench/results/")
    }
    assert {name for name in wheel_names if name.endswith(".py")} == modules


def test_the_wheel_installs_one_top_level_package(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {re.sub(r"-[\d.]+\.", "-VERSION.", top) for top in tops} == {"specmamba", "specmamba-VERSION.dist-info"}


def test_there_are_operators() -> None:
    assert {"gated_delta_rule", "causal_conv1d", "paged_attention", "tree"} <= set(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_wheel_has_the_whole_operator(wheel_names: set[str], operator: str) -> None:
    files = "__init__.py", "reference.py", "README.md"
    needed = {f"specmamba/kernels/{operator}/{name}" for name in files}
    assert needed - wheel_names == set()


def test_the_wheel_has_the_native_sources(wheel_names: set[str]) -> None:
    sources = {name for name in map(installed_name, tracked_files()) if name.endswith((".cpp", ".h"))}
    packaged = {name for name in sources if name.startswith("specmamba/")}
    assert {name for name in wheel_names if name.endswith((".cpp", ".h"))} == packaged != set()


def test_the_wheel_has_the_tables_of_compiled_kernels(wheel_names: set[str]) -> None:
    tables = {installed_name(name) for name in tracked_files() if name.startswith("kernels/aot/tables/")}
    assert {name for name in wheel_names if "/aot/tables/" in name} == tables != set()


@pytest.mark.parametrize("name", ["py.typed", *(f"demo/{name}" for name in [*DEMO, "prompts.jsonl", "MODEL_CARD.md"])])
def test_the_wheel_has_the_data(wheel: Path, wheel_names: set[str], name: str) -> None:
    assert f"specmamba/{name}" in wheel_names
    assert zipfile.ZipFile(wheel).read(f"specmamba/{name}") == (ROOT / "specmamba" / name).read_bytes()


def test_the_wheel_carries_the_licence(wheel_names: set[str]) -> None:
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in wheel_names)


def test_an_operator_imports_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    unpacked, elsewhere = tmp_path / "unpacked", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(unpacked)
    elsewhere.mkdir()
    imported = run_python(
        "import specmamba.kernels.gated_delta_rule as op; print(op.__file__)", cwd=elsewhere, path=unpacked
    )
    assert Path(imported) == unpacked / "specmamba/kernels/gated_delta_rule/__init__.py"


# With the repository root as the working directory, `kernels` on sys.path could be our folder.


def test_our_folder_is_no_regular_package_named_kernels() -> None:
    assert not (ROOT / "kernels/__init__.py").exists()
    origin = run_python(
        "import importlib.util as u; spec = u.find_spec('kernels'); print(spec.origin if spec else None)", cwd=ROOT
    )
    assert not Path(origin).is_relative_to(ROOT / "kernels")


def test_a_real_package_named_kernels_wins(tmp_path: Path) -> None:
    """Even from a later place on sys.path, which is where an installed one is."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("whose = 'theirs'\n")
    assert run_python("import kernels; print(kernels.whose)", cwd=ROOT, path=tmp_path) == "theirs"


def test_transformers_sees_the_same_kernels_package_as_anywhere_else(tmp_path: Path) -> None:
    ask = "from transformers.utils.import_utils import is_kernels_available as f; print(f())"
    assert run_python(ask, cwd=ROOT) == run_python(ask, cwd=tmp_path)


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"]], ids=lambda command: " ".join(command) or "top")
def test_help_imports_nothing_heavy(command: list[str], tmp_path: Path) -> None:
    """So that it answers in under half a second."""
    code = """
import sys
from specmamba.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "fastapi", "uvicorn", "matplotlib"}
print("\\nheavy:", sorted(heavy & set(sys.modules)))
"""
    output = run_python(code, *command, "--help", cwd=tmp_path, path=ROOT)
    assert "usage" in output.lower(), output
    assert output.endswith("heavy: []"), output.splitlines()[-1]


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [
        *project["dependencies"],
        *(line for name in ("gpu", "bench", "grammar", "otel", "scale", "mooncake", "nixl") for line in extras[name]),
    ]
    declared = {re.split(r"[<>=!~\[; ]", line)[0].lower().replace("_", "-") for line in requirements}
    declared.add("pydantic-core")  # pydantic itself requires exactly one version of it
    distributions = packages_distributions()
    undeclared = {}
    for name in tracked_files():
        if not (name.endswith(".py") and installed_name(name).startswith("specmamba/")):
            continue
        imported = set()
        for node in ast.walk(ast.parse((ROOT / name).read_text("utf8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
        for top in imported - sys.stdlib_module_names - {"specmamba"}:
            owners = {owner.lower().replace("_", "-") for owner in distributions.get(top, [top])}
            if not owners & declared:
                undeclared[f"{name}: {top}"] = sorted(owners)
    assert undeclared == {}


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    """With an import hook instead, mypy and editors do not find the package."""
    source, built = tmp_path / "source", tmp_path / "built"
    copy_tracked(source)
    built.mkdir()
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    run_python(build, str(built), cwd=source)
    (wheel,) = built.glob("*.whl")
    files = zipfile.ZipFile(wheel)
    (name,) = [name for name in files.namelist() if "dist-info" not in name]
    assert name.endswith(".pth")
    assert files.read(name).decode().strip() == str(source)
