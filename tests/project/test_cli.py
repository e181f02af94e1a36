"""The command line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import specmamba
from specmamba.cli import SUBCOMMANDS, main
from specmamba.core import OutputDelta
from specmamba.errors import ConfigError
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "specmamba"]
# One thread: two of them wait for each other for ever so long where other processes want the cores too.
GENERATE = [*COMMAND, "generate", "--dtype", "float32", "--context-length", "512", "--num-threads", "1"]
HEAVY = {"torch", "transformers", "fastapi", "uvicorn", "rich", "httpx", "matplotlib", "numpy"}
FIGURES = r"(\d+) tokens, [\d.]+ tokens/s, acceptance length ([\d.]+), finish reason: (\w+)\n"


def run(*arguments: str, text_in: str = "", timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        arguments,
        cwd=ROOT,
        env=environment,
        input=text_in,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize("argument", ["--help", "-h", "help"])
def test_help_is_an_overview(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 0
    text = capsys.readouterr().out
    for word in (
        "serve",
        "generate",
        "chat",
        "info",
        "doctor",
        "bench",
        "train",
        "tune",
        "examples:",
        "--help",
        "SPECMAMBA_",
    ):
        assert word in text
    assert max(map(len, text.splitlines())) <= 110


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specmamba {specmamba.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: specmamba COMMAND"),
        (["genrate"], "did you mean 'generate'?"),
        (["docter"], "did you mean 'doctor'?"),
        (["xyz"], "there are: serve, generate, chat, info, quantize, deploy, cache, doctor, bench, train, tune"),
        (["--verbose"], "no option '--verbose'"),
        (["bench"], "usage: specmamba bench NAME"),
        (
            ["bench", "acceptence"],
            "specmamba bench: error: there is no command 'acceptence'; did you mean 'acceptance'?",
        ),
        (["bench", "xyz"], "there are: acceptance, serving"),
        (["bench", "--json"], "no option '--json'"),
        (["tune"], "usage: specmamba tune NAME"),
        (["tune", "trees"], "did you mean 'tree'?"),
    ],
)
def test_a_wrong_command(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (
            "bench",
            [
                *("acceptance", "serving", "http-overhead", "soak", "prefix", "state-drift", "ops", "llama-cpp"),
                *("scale-sim", "gpu"),
            ],
        ),
        ("tune", ["tree"]),
        ("train", ["draft"]),
    ],
)
def test_help_of_a_command_with_subcommands(command: str, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^  ([\w-]+) +\S", text, re.MULTILINE) == names
    assert max(map(len, text.splitlines())) <= 110


def test_a_server_that_is_refused_leaves_signals_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--page-size", "0"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("command", "name"), [(c, name) for c, names in SUBCOMMANDS.items() for name in names])
def test_a_subcommand_gets_its_arguments(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(SUBCOMMANDS[command][name][0])
    seen: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    module.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert main([command, name, "--json", "x", "--help"]) == 7
    assert seen == [["--json", "x", "--help"]]


def test_an_error_of_a_subcommand_carries_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise ConfigError("out of luck")

    module = types.ModuleType("specmamba.bench.serving.__main__")
    module.main = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serving"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "specmamba bench serving: error: out of luck\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "x"], "--port"),
        (["serve", "--dtype", "float8"], "--dtype"),
        (["generate", "--model", "/nowhere/at/all", "--prompt", "x"], "/nowhere/at/all"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt", "x", "--stop", ""], "--stop"),
        (["generate", "--prompt", "x", "--bogus"], "--bogus"),
    ],
)
def test_invalid_arguments_end_with_one_message_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert f"specmamba {arguments[0]}: error: " in captured.err
    assert captured.out == ""


ALL_HELPS = [
    ["--version"],
    *(
        [*words, "--help"]
        for words in ([], ["serve"], ["generate"], ["chat"], ["info"], ["doctor"], ["bench"], ["train"], ["tune"])
    ),
    *([command, name, "--help"] for command, names in SUBCOMMANDS.items() for name in names),
]


def test_help_loads_nothing_heavy() -> None:
    """One process prints all of them, one after the other; its status names the heavy modules that were loaded."""
    code = (
        "import sys\nfrom specmamba.cli import main\n"
        f"for arguments in {ALL_HELPS!r}:\n"
        "    try: print(main(arguments))\n"
        "    except SystemExit as ended: print(ended.code)\n"
        f"sys.exit(', '.join(sorted({HEAVY!r} & set(sys.modules))) or 0)"
    )
    ended = run(sys.executable, "-c", code)
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^(\d+|None)$", ended.stdout, re.MULTILINE) == ["0"] * len(ALL_HELPS)
    for arguments in (["bench", "acceptance"], ["bench", "serving"], ["tune", "tree"]):
        assert f"usage: specmamba {' '.join(arguments)} " in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "modules"),
    [
        (["--help"], 0, 120),
        (["--version"], 0, 120),
        (["genrate"], 2, 120),
        (["bench", "acceptence"], 2, 120),
        (["serve", "--prot", "1"], 2, 330),
        (["serve", "--port", "x"], 2, 330),
        (["serve", "--page-size", "0"], 2, 330),
        (["generate", "--tempreature", "1"], 2, 330),
    ],
)
def test_a_short_answer_loads_little(arguments: list[str], status: int, modules: int) -> None:
    """A number of modules in place of seconds: pydantic is most of it (PyTorch alone has 1,100)."""
    code = (
        "import sys\nfrom specmamba.cli import main\n"
        f"try: status = main({arguments!r})\n"
        "except SystemExit as ended: status = ended.code\n"
        f"print(status, len(sys.modules), sorted({HEAVY | {'asyncio'}!r} & set(sys.modules)), file=sys.stderr)"
    )
    last = run(sys.executable, "-c", code).stderr.splitlines()[-1]
    found = re.fullmatch(r"(\d) (\d+) \[\]", last)
    assert found, last
    assert int(found[1]) == status
    assert int(found[2]) < modules


def test_generate_writes_text_to_stdout_and_figures_to_stderr() -> None:
    ended = run(*GENERATE, "--prompt", "def main():\n", "--max-tokens", "24")
    assert ended.returncode == 0, ended.stderr
    figures = re.fullmatch(FIGURES, ended.stderr)
    assert figures, ended.stderr
    assert figures[1] == "24"
    assert float(figures[2]) > 1.0  # the demo drafts
    assert figures[3] == "length"
    from_stdin = run(*GENERATE, "--max-tokens", "24", text_in="def main():\n")
    assert from_stdin.stdout == ended.stdout != ""


@pytest.mark.slow
def test_generate_ends_cleanly_on_ctrl_c() -> None:
    arguments = [*GENERATE, "--prompt", "x = 1\n", "--max-tokens", "500", "--ignore-eos"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert re.fullmatch(FIGURES, err), err
    assert "finish reason: interrupted" in err


def test_generate_into_a_pipe_that_closes() -> None:
    command = " ".join([*GENERATE, "--prompt", "x", "--max-tokens", "100", "--ignore-eos"]) + " | head -c 1"
    ended = run("bash", "-c", command)
    assert len(ended.stdout) == 1
    assert re.fullmatch(FIGURES, ended.stderr), ended.stderr


class BrokenEngine:
    """Gives its only request up."""

    class tokenizer:  # noqa: N801
        encode = staticmethod(len)

    has_unfinished_requests = False

    def add_request(self, *request: object) -> None:
        self.has_unfinished_requests = True

    def step(self) -> list[OutputDelta]:
        self.has_unfinished_requests = False
        return [OutputDelta("generate", (1,), "ab", 1, 0, 1, "error", "out of luck")]

    def close(self) -> None: ...


def test_generate_reports_an_error_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specmamba.cli._build_engine", lambda config: BrokenEngine())
    assert main(["generate", "--prompt", "x"]) == 1
    assert capsys.readouterr() == ("ab", "specmamba generate: error: out of luck\n")


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, "a\u241b[2Jb\n"), (False, "a\x1b[2Jb")])
def test_what_a_model_writes_does_not_act_on_a_terminal(
    is_terminal: bool, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specmamba.cli._build_engine", lambda config: FakeEngine(text="a\x1b[2Jb"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert main(["generate", "--prompt", "x"]) == 0
    assert capsys.readouterr().out == expected


def limited(kib: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("bash", "-c", 'ulimit -v "$1" && shift && exec "$@"', "bash", str(kib), *arguments)


@pytest.mark.parametrize("kib", [500_000, 1_000_000])
def test_little_memory_is_said_in_a_sentence(kib: int) -> None:
    ended = limited(kib, *GENERATE, "--prompt", "x", "--max-tokens", "2")
    *_, last = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert last.startswith("specmamba generate: error: ")
    assert "memory" in last.lower()
    assert "Traceback" not in ended.stderr


def test_the_plan_of_memory_knows_the_limit_of_the_process() -> None:
    code = "import torch; from specmamba.cache.memory import free_memory; print(free_memory(torch.device('cpu')))"
    ended = limited(4_000_000, sys.executable, "-c", code)
    assert 0 < int(ended.stdout) < 4_000_000 << 10


@pytest.mark.parametrize("arguments", [["info", "--json", "-"], ["serve", "--help"], ["info"]])
def test_a_reader_that_ends_early(arguments: list[str]) -> None:
    """The pipe is closed before anything is written, so that no buffer of it hides the error."""
    command = " ".join([*COMMAND, *arguments]) + " | true; echo ${PIPESTATUS[0]}"
    ended = run("bash", "-c", command)
    assert ended.stderr == ""
    assert ended.stdout in ("0\n", "1\n")  # tables end with 1
