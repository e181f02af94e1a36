"""``specmamba chat`` with the bundled demo."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from specmamba.config import DEMO_MODEL
from tests.project.test_cli import COMMAND, run
from tests.terminal.terminals import on_terminal

FLAGS = ["chat", "--dtype", "float32", "--context-length", "4096", "--num-threads", "1", "--temperature", "0"]


@pytest.mark.slow
def test_through_pipes() -> None:
    lines = '"""\nWrite a function that\ncomputes the n-th Fibonacci number.\n"""\n/stats\n/retry\n/stats\n'
    ended = run(*COMMAND, *FLAGS, "--max-tokens", "24", text_in=lines, timeout_s=300)
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.split("last answer: ")[1:3]
    assert first.startswith("24 tokens in ")
    assert "speculation: mtp, always 3 deep, 4 nodes with the root\n" in first
    cached = re.search(r"prompt: (\d+) tokens, (\d+) of them from the prefix cache", second)
    assert cached, second
    assert int(cached[2]) == int(cached[1]) - 1  # all but the last token, which the first step runs
    assert float(re.findall(r"acceptance length ([\d.]+)", second)[0]) > 1
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "[cut off: max_tokens is 24;" in ended.stderr


@pytest.mark.slow
def test_ctrl_c_gives_the_slot_back(tmp_path: Path) -> None:
    """One request fits at a time: the next answer would wait forever for a slot that is lost."""
    model = tmp_path / "endless"
    shutil.copytree(DEMO_MODEL, model)
    (model / "generation_config.json").write_text('{"eos_token_id": 255}')  # a byte that no text has
    flags = [*FLAGS, "--model", str(model), "--max-running-requests", "1", "--max-tokens", "4000"]
    with on_terminal(*flags, environment={"XDG_STATE_HOME": str(tmp_path)}) as terminal:
        terminal.wait_for(r"context 4096 tokens.*\n> ")
        for _ in range(2):
            terminal.type("import os\n")
            terminal.wait_for(r"import os\r\n[^\[]*[a-z]{4}")
            terminal.type("\x03")
            terminal.wait_for(r"\[stopped; .*\n> ")
            terminal.type("/undo\n")
            terminal.wait_for("taken back: import os.*\n> ")
        terminal.type("/set max_tokens 8\n")
        terminal.wait_for("\n> ")
        terminal.type("import os\n")
        terminal.wait_for(r"\[cut off: max_tokens is 8.*\n> ")
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
        assert "Traceback" not in terminal.shown
