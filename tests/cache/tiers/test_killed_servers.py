"""Engines that use one folder and are killed while they write, and engines that use it at the same time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specmamba.cache.tiers.tier_command import main as cache_command
from tests.cache.test_disk_exact import new_llm, run, stats, tiers
from tests.cache.test_prefix_exact import check_pools
from tests.fake_engine import wait_until
from tests.pairwise import IS_FULL
from tests.processes import Lines

pytestmark = pytest.mark.slow
Tokens = tuple[int, ...]
NUM_KILLS = 20 if IS_FULL else 12
LINE_TIMEOUT_S = 240.0  # for all that an engine answers, beside others on a busy machine

# Answers texts over and over, from disk where they are there, and ends with 7 when a text is wrong. It goes on until it
# has found one there: another engine may remove what it writes. Its disk is slow, so that at most moments a file is
# being written. Each engine is a fork of a process that has imported all.
ENGINES = """
import json, os, random, sys, time, traceback
from pathlib import Path
from specmamba.cache.tiers import entry_folder
from tests.cache.test_disk_exact import forget, new_llm, run, stats

folder, texts = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())

def write_slowly(descriptor, piece):
    while len(piece):
        piece = piece[os.write(descriptor, piece[: 1 << 16]) :]
        time.sleep(0.002)

def answer(seed, rounds, size):
    entry_folder._write_whole = write_slowly
    draw = random.Random(seed)
    with new_llm(folder, "chain", num_threads=1, hicache_storage_size=size) as llm:
        print(os.getpid(), flush=True)
        for round in range(10 * rounds):
            if round >= rounds and stats(llm).hits:
                break
            for _ in texts:
                prompt, expected = draw.choice(texts)
                if list(run(llm, tuple(prompt)).token_ids) != expected:
                    return 7
            forget(llm)
        found = stats(llm)
    figures = {"hits": found.hits, "damaged": found.damaged, "misses": found.misses, "lost": found.lost_writes}
    print(json.dumps(figures), flush=True)
    return 0

for line in sys.stdin:
    seed, rounds, size = line.split()
    child = os.fork()
    if not child:
        try:
            os._exit(answer(int(seed), int(rounds), float(size)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Engines:
    """Engines of one folder, one after the other, in a process beside this one."""

    def __init__(self, folder: Path, texts: list[tuple[Tokens, Tokens]]) -> None:
        file = folder.with_name("texts.json")
        file.write_text(json.dumps(texts))
        command = [sys.executable, "-c", ENGINES, str(folder), str(file)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of processes, which ends as one
        )
        self._lines = Lines(self.process.stdout)

    def start(self, seed: int, rounds: int, size: float) -> int:
        """Start an engine; returns its process when it answers."""
        assert self.process.stdin is not None
        print(seed, rounds, size, file=self.process.stdin, flush=True)
        return int(self.line())

    def line(self) -> str:
        """Return what an engine says at its end, then its exit status."""
        return self._lines.next(LINE_TIMEOUT_S)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # it, and an engine that still runs where a test has failed
        self.process.wait()
        self._lines.close()
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture(scope="module")
def texts(prompts: list[Tokens]) -> list[tuple[Tokens, Tokens]]:
    """Prompts, and what follows them without a cache; some begin alike."""
    chosen = [each[:100] for each in prompts if len(each) >= 100][:6]
    chosen += [each[:60] + chosen[0][:30] for each in chosen]
    with new_llm(None, "chain", disable_radix_cache=True) as llm:
        return [(prompt, run(llm, prompt).token_ids) for prompt in chosen]


def names(folder: Path) -> set[str]:
    """The files of a folder, those that are being written included."""
    return {file.name for file in folder.iterdir()}


def wait_for_files(folder: Path, before: set[str], count: int) -> None:
    """Wait until a folder has so many files that it did not have before."""
    wait_until(lambda: len(names(folder) - before) >= count, timeout_s=120)


@pytest.mark.long
def test_engines_that_are_killed_while_they_write(texts: list[tuple[Tokens, Tokens]], tmp_path: Path) -> None:
    """At random moments; each engine finds what those before it have left, and a part of it is removed."""
    folder, draw, num_begun = tmp_path / "prefixes", random.Random(5), 0
    with Engines(folder, texts) as engines:
        for moment in range(NUM_KILLS):
            for file in sorted(folder.glob("*.entry")):
                if draw.random() < 0.4:
                    file.unlink()
            engine, before = engines.start(moment % 3, 1000, 1), names(folder)
            wait_for_files(folder, before, draw.randrange(1, 6))
            time.sleep(draw.random() * 0.05)
            os.kill(engine, signal.SIGKILL)
            assert int(engines.line()) == -signal.SIGKILL  # 7: a text was wrong
            num_begun += len(list(folder.glob(".*.tmp")))
    assert num_begun > 0  # files that were cut off
    with new_llm(folder, "chain") as llm:
        assert list(folder.glob(".*.tmp")) == []
        assert stats(llm).num_entries > 0
        for prompt, expected in texts:
            assert run(llm, prompt).token_ids == expected
        assert tiers(llm).drain()
        found = stats(llm)
        assert found.hits > 0
        assert {reason for reason, count in found.misses.items() if count} <= {"absent"}
        check_pools(llm)
    assert cache_command(["verify", str(folder)]) == 0


def test_engines_that_use_one_folder_at_the_same_time(texts: list[tuple[Tokens, Tokens]], tmp_path: Path) -> None:
    """It is too small for all texts, so each removes what the other one has written, and may be about to read."""
    folder, size = tmp_path / "prefixes", 0.006
    with Engines(folder, texts) as one, Engines(folder, texts) as other:
        for seed, engines in enumerate((one, other)):
            engines.start(seed, 4, size)
        ends = [(engines.line(), int(engines.line())) for engines in (one, other)]
    assert [status for _, status in ends] == [0, 0]
    both = [json.loads(figures) for figures, _ in ends]
    assert sum(found["hits"] for found in both) > 0  # one may lose all that it has written to the other
    for found in both:
        assert found["damaged"] == 0
        assert {reason for reason, count in found["misses"].items() if count} <= {"absent", "vanished"}
        assert not found["lost"]["failed"]
    assert sum(file.stat().st_size for file in folder.glob("*.entry")) <= 2 * size * (1 << 30)
    assert cache_command(["verify", str(folder)]) == 0
