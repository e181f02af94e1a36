"""A stranger's walk: every command and snippet of README.md and docs/ is run as it stands, or read by its parser.

What needs a model that is not here, a GPU, or time is read only, and what is others' is left out. ``test_docs.py``
checks what text alone tells: links, files, targets of make, variables.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specmamba.cli import COMMANDS, main
from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.errors import ConfigError
from specmamba.flags import command_line
from specmamba.flags.flag_parser import FlagParser
from tests.fake_engine import Served, serving, wait_until
from tests.project.test_docs import FENCE, PAGES, blocks, text_of
from tests.repository import ROOT

pytestmark = pytest.mark.slow

OF_USERS = [page for page in PAGES if page == "README.md" or page.startswith("docs/")]
ADDRESS = "http://127.0.0.1:30000"
FRAGMENTS = "docs/adding_a_model.md"  # pieces of functions of the model that it explains
# Programs of others in commands: to be had elsewhere, or to change the machine.
OTHERS = {"pip", "python3", "docker", "sudo", "guidellm", "vllm", "lm_eval", ".venv/bin/pip"}
# Commands of ours that need what is named here. They are read.
READ_ONLY = {
    "serve": "does not end; tests/server/test_server_process.py runs it",
    "deploy": "starts Ray; tests/cluster/test_deploy_command.py runs it",
    "doctor": "takes long; tests/project/test_doctor.py runs it",
    "bench": "takes long; tests/bench runs them",
    "tune": "takes long",
    "train": "takes long",
}


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def program(self) -> str:
        words = self.words
        if words[:2] == ["python", "-m"] and len(words) > 2:
            return "python -m"
        return words[0].removeprefix(".venv/bin/")

    @property
    def is_run(self) -> bool:
        """Whether it can run here: ours, with the demo, and it ends soon."""
        words = self.words
        if self.program == "curl":
            return True
        if "|" in words:
            return "specmamba" in words
        needs = "--model" in words or "--config" in words or "--url" in words
        return self.program == "specmamba" and not needs and words[1] not in READ_ONLY


def commands() -> Iterator[Command]:
    """Those of blocks without a language or of a shell, one for each line; a line may be continued."""
    for page in OF_USERS:
        for language, code in blocks(page):
            if language not in ("", "bash", "sh", "console"):
                continue
            for line in code.replace("\\\n", " ").splitlines():
                first = line.split(maxsplit=1)[0] if line.strip() and not line.startswith(" ") else ""
                known = {"specmamba", "curl", "make", "python", "printf", *OTHERS}
                if first.removeprefix(".venv/bin/") in known or first in OTHERS:
                    yield Command(page, line)


ALL = list(commands())
RUN = [command for command in ALL if command.is_run]
READ = [command for command in ALL if command.program in ("specmamba", "python -m")]


def name_of(command: Command) -> str:
    return f"{Path(command.page).stem}: {command.text[:60]}"


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    """What ``make serve`` serves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        importlib.import_module("langchain_openai")  # it parses sources, which CPython 3.11 cannot in two threads
    engine = Engine(EngineConfig(max_running_requests=4, max_total_tokens=8192))
    with serving(engine) as served:
        yield served
        wait_until(lambda: not engine.has_unfinished_requests)


def test_the_walk_sees_the_commands() -> None:
    programs = {command.program for command in ALL}
    assert {"specmamba", "curl", "make", "python -m"} <= programs
    assert {"README.md", "docs/quickstart.md", "docs/speculation.md"} <= {command.page for command in ALL}
    assert {command.words[1] for command in READ if command.program == "specmamba"} >= {"serve", "generate", "chat"}


# Commands that are read


class _ArgumentsReadError(Exception):
    """Arguments were accepted."""


@pytest.fixture
def reading_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end where their arguments have been read and checked."""
    read_flags, parse_args = command_line.read_flags, argparse.ArgumentParser.parse_args

    def read_settings(*args: Any, **given: Any) -> Any:
        read_flags(*args, **given)
        raise _ArgumentsReadError

    def read_arguments(self: argparse.ArgumentParser, *args: Any, **given: Any) -> Any:
        found = parse_args(self, *args, **given)
        if not isinstance(self, FlagParser):  # whose settings are checked behind it
            raise _ArgumentsReadError
        return found

    for module in ("specmamba.flags.command_line", "specmamba.measure.command", "specmamba.quantize"):
        monkeypatch.setattr(f"{module}.read_flags", read_settings)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_arguments)


def read(command: Command) -> None:
    """Let the command's own parser read its arguments. Raises what the parser raises."""
    words = [word for word in command.words if word != "|"]
    if command.program == "specmamba":
        assert words[1] in COMMANDS
        with pytest.raises(_ArgumentsReadError):
            COMMANDS[words[1]](words[2:])
        return
    module = words[2]
    assert importlib.util.find_spec(module) is not None, module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *words[3:]])
        with pytest.raises(_ArgumentsReadError):
            run_module(module, words[3:])


def run_module(module: str, arguments: list[str]) -> None:
    if module == "specmamba.kernels.aot":  # its __main__ turns Triton's interpreter off, in this process too
        importlib.import_module(f"{module}.command").main(arguments)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.mark.usefixtures("reading_only", "no_settings_from_outside")
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # runpy, of what was imported before
@pytest.mark.parametrize("command", READ, ids=name_of)
def test_a_command_is_read_by_its_parser(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specmamba.toml").write_text("port = 8000\n")
    (tmp_path / "my-texts").mkdir()
    monkeypatch.chdir(tmp_path)
    read(command)


@pytest.mark.usefixtures("reading_only", "no_settings_from_outside")
@pytest.mark.parametrize(
    "text",
    [
        "specmamba serve --prt 8000",
        "specmamba serve --page-size 0",
        "specmamba bench acceptance --configs 1,1 --round 4",
        "specmamba bench nothing",
        "python -m specmamba.kernels.aot --targets sm_90",
    ],
)
def test_the_walk_would_notice(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that is wrong is no longer accepted."""
    with pytest.raises((SystemExit, ConfigError, pytest.fail.Exception)):
        read(Command("docs/index.md", text))


# Commands that are run


@pytest.fixture(scope="module")
def on_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH with a ``specmamba`` that is this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "specmamba"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m specmamba "$@"\n')
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@needs_curl
@pytest.mark.parametrize("command", [c for c in RUN if c.program == "curl"], ids=name_of)
def test_a_request_with_curl_is_answered(command: Command, demo: Served) -> None:
    out = shell(command, demo).removeprefix("\n")
    if "-sN" in command.words:
        assert out.rstrip().endswith("data: [DONE]")
        assert '"error"' not in out
        return
    answer = json.loads(out)
    if "/cache/" in command.text:  # this server has no folder
        assert answer["error"]["code"] == "no_stored_prefixes"
        return
    if "/replicas" in command.text:  # nor replicas
        assert answer["error"]["code"] == "no_replicas"
        return
    assert answer["choices"][0]["text"]
    if '"regex"' in command.text:
        assert re.fullmatch(r'\{"x": [0-9]{1,3}, "y": [0-9]{1,3}\}', answer["choices"][0]["text"])


def shell(command: Command, demo: Served | None, path: str | None = None) -> str:
    text = command.text if demo is None else command.text.replace(ADDRESS, demo.url)
    environment = os.environ | {"PYTHONPATH": str(ROOT), **({} if path is None else {"PATH": path})}
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("command", [c for c in RUN if c.program == "printf"], ids=name_of)
def test_a_pipe_runs(command: Command, on_path: str) -> None:
    assert "acceptance length" in shell(command, None, on_path)


@pytest.mark.parametrize("command", [c for c in RUN if c.program == "specmamba"], ids=name_of)
def test_a_command_runs(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.words[1:]) == 0
    out = capsys.readouterr().out
    assert out
    if "--json" in command.words:
        assert all(json.loads(line)["text"] for line in out.splitlines())


INLINE = [
    (page, span)
    for page in OF_USERS
    for span in re.findall(r"`(specmamba generate [^`\n]+)`", FENCE.sub("", text_of(page)))
]


@pytest.mark.parametrize(("page", "span"), INLINE)
def test_a_command_inside_of_a_sentence_runs(page: str, span: str, capsys: pytest.CaptureFixture[str]) -> None:
    test_a_command_runs(Command(page, span), capsys)


@needs_curl
def test_the_readmes_answer_has_the_form_of_answers(demo: Served) -> None:
    """The JSON block behind the first request of README.md."""
    (shown,) = (json.loads(code) for language, code in blocks("README.md") if language == "json")
    first = next(command for command in RUN if command.page == "README.md" and command.program == "curl")
    answer = json.loads(shell(first, demo))
    assert form(shown) == form(answer)
    assert shown["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert shown["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def form(value: object) -> object:
    """The names in a JSON value, and the types of what stands there."""
    if isinstance(value, dict):
        return {name: form(one) for name, one in value.items()}
    return [form(one) for one in value] if isinstance(value, list) else type(value)


# Snippets of Python

SNIPPETS = [
    (page, code) for page in OF_USERS if page != FRAGMENTS for language, code in blocks(page) if language == "python"
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("page", "code"), SNIPPETS, ids=lambda value: Path(value).stem if "\n" not in value else "")
def test_a_snippet_runs(page: str, code: str, request: pytest.FixtureRequest) -> None:
    source = textwrap.dedent(code)
    if ADDRESS in source:
        source = source.replace(ADDRESS, request.getfixturevalue("demo").url)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, page, "exec"), {"__name__": "__main__"})
    gc.collect()  # what it has left open is noticed here, not in another test
    assert out.getvalue().strip()


def test_the_walk_sees_the_snippets() -> None:
    for name in ("with LLM(", "AsyncLLM", " OpenAI(", "AsyncOpenAI", "ChatOpenAI", "GrammarSpec"):
        assert any(name in code for _, code in SNIPPETS), name
