"""Ranks as they are started and end: by ``LLM``, by a server, by ``torchrun``; killed, stopped, and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from specmamba import LLM, SamplingParams
from specmamba.config import EngineConfig
from specmamba.engine.mirror.rank_children import RankChildren
from specmamba.errors import ConfigError, EngineFailedError, EngineStoppedError, UnsupportedModelError
from specmamba.flags.engine_flags import EngineFlags
from specmamba.models import qwen, registry
from specmamba.parallel import control, messages
from specmamba.parallel.control import RankLinks
from specmamba.parallel.messages import connect
from specmamba.sampling_params import GrammarSpec
from tests.fake_engine import wait_until
from tests.parallel.jobs import prompts
from tests.server.test_server_process import process
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

ROOT = Path(__file__).parents[2]
PROMPTS = ["def main():", "class Stack:\n    def"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
CONSTRAINED = SamplingParams(max_tokens=24, temperature=0.0, grammar=GrammarSpec(kind="regex", text="[a-c]{4,9}x"))
LOST_S = 30.0
TWO = ["--tp-size", "2", "--port", "0", "--dtype", "float32", "--num-threads", "1"]
ALONE = """
import sys, torch.distributed
from specmamba import LLM, SamplingParams
with LLM(max_total_tokens=256, max_mamba_cache_size=8, context_length=64) as llm:
    llm.generate(["x"], SamplingParams(max_tokens=2))
names = "specmamba.parallel.process_group", "specmamba.parallel.control", "specmamba.cluster.ingress", "ray"
several = [name for name in sys.modules if name in names]
assert not several and not torch.distributed.is_initialized(), several
"""
SOCKETS = f"""
import json, os, signal
from specmamba import LLM, SamplingParams
from specmamba.errors import SpecmambaError
from tests.parallel.test_ranks import children_of
greedy = SamplingParams(max_tokens=24, temperature=0.0)
with LLM(dtype="float32", num_threads=1, speculative_num_steps=3, max_total_tokens=1024, tp_size=2) as llm:
    assert not llm._local.engine.ranks.is_recordable
    print(json.dumps([output.token_ids for output in llm.generate({PROMPTS!r}, greedy)]))
    os.kill(children_of(os.getpid())[0], signal.SIGKILL)
    try:
        llm.generate("x", greedy)
    except SpecmambaError:
        pass
    else:
        raise AssertionError("a rank that is killed is not noticed")
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def children_of(pid: int) -> list[int]:
    """Processes whose parent it is, but for those that render templates."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in found if b"rank_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
def test_one_process_imports_nothing_of_this() -> None:
    done = python("-c", ALONE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hicache_storage_dir": "x"}, "--hicache-storage-dir: prefixes below the pools need one process: drop it"),
        (
            {"cuda_graph_max_bs": 4, "device": "cuda"},
            "--cuda-graph-max-bs: on GPUs steps of several ranks are not capt",
        ),
        (
            {"speculative_adaptive": "auto", "device": "cuda"},
            "--speculative-adaptive auto: on GPUs drafts of several r",
        ),
    ],
)
def test_flags_that_need_one_process(flags: dict[str, Any], message: str, no_settings_from_outside: None) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(tp_size=2, **flags)
    assert EngineConfig(tp_size=2).on_device("cpu").speculative_adaptive == "auto"
    assert EngineConfig(tp_size=2).on_device("cuda").speculative_adaptive == "off"
    assert EngineConfig(tp_size=2).on_device("cpu").largest_captured_batch > 0
    assert EngineConfig(tp_size=2).on_device("cuda").largest_captured_batch == 0


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        ({"rank": 1, "facts": {"checkpoint": "b"}}, "rank 1 is refused: it has another checkpoint than rank 0"),
        ({"rank": 1, "facts": {}}, "rank 1 is refused: it has another checkpoint"),
        ({"rank": 2, "facts": {"checkpoint": "a"}}, "rank 2 is refused: there is no place for it"),
    ],
)
def test_a_rank_that_is_another_is_refused(hello: dict[str, object], message: str) -> None:
    """Both sides say why."""
    name = f"specmamba-test-{os.getpid()}"
    links, answers = RankLinks(name, 2), list[Any]()

    def join() -> None:
        link = connect(name)
        link.send(hello)
        answers.append(link.receive())
        link.close()

    other = threading.Thread(target=join)
    other.start()
    try:
        with pytest.raises(ConfigError, match=message):
            links.join({"checkpoint": "a"}, None)
    finally:
        other.join(60)
        links.close()
    assert message in answers[0]["refused"]


def test_connections_that_bring_no_rank_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that comes after them is taken in. What has no id is not killed: 0 stands for a group of processes."""
    monkeypatch.setattr(control, "HELLO_TIMEOUT_S", 0.2)
    killed = list[int]()
    monkeypatch.setattr(os, "kill", lambda process, _: killed.append(process))
    name = f"specmamba-test-{os.getpid()}"
    links, strangers = RankLinks(name, 9), [connect(name) for _ in range(5)]  # 9: so many can wait
    links.size = 2
    lines = (b"GET / HTTP/1.1\n", b"[1]\n", b'{"rank": "1", "facts": {}}\n', b'{"rank": 1}\n')
    for stranger, line in zip(strangers, lines, strict=False):  # the last one says nothing
        stranger.send_line(line)
    rank = connect(name)
    rank.send({"rank": 1, "facts": {"checkpoint": "a"}})
    try:
        links.join({"checkpoint": "a"}, None)
        assert rank.receive() == {"store": None}
        for stranger in strangers:
            with suppress(ConnectionResetError):  # what it has sent was not read
                assert stranger.receive() is None
        links._processes[2] = 0
        links.kill()
        assert killed == [os.getpid()]
    finally:
        for each in (rank, *strangers):
            each.close()
        links.close()


def test_a_rank_that_ends_at_once_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not read its task, which is longer than a pipe holds."""
    program = tmp_path / "python"
    pid = tmp_path / "pid"
    program.write_text(f"#!/bin/sh\n[ -e {pid} ] && exit 3\necho $$ > {pid}\ncat > /dev/null\nexec sleep 60")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConfigError, match="--tp-size 4: the process of rank 2 has ended with status 3 before it was"):
        RankChildren(EngineConfig(tp_size=4), "x" * (1 << 20))
    assert is_gone(int(pid.read_text()))


def test_sizes_are_refused_before_ranks_start() -> None:
    with pytest.raises(ConfigError, match=r"tp_size 3: the model has 4 .* which cannot be divided among 3 ranks"):
        LLM(tp_size=3)


def test_families_that_are_not_divided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DIVIDED", registry.DIVIDED - {qwen.load})
    with pytest.raises(UnsupportedModelError, match="tp_size 2: Qwen3_5ForCausalLM cannot be divided among ranks"):
        LLM(tp_size=2)


def test_two_ranks_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, a grammar and an aborted stream as with one process; then a rank is killed while no request runs."""
    small = EngineFlags(dtype="float32", num_threads=1, speculative_num_steps=3, max_total_tokens=2048)
    with LLM(**small) as alone:
        expected = alone.generate(PROMPTS, [GREEDY, CONSTRAINED])
    with LLM(**small | EngineFlags(tp_size=2)) as llm:
        (child,) = children_of(os.getpid())
        stream: Any = llm.stream(PROMPTS[0], SamplingParams(max_tokens=500, ignore_eos=True))
        next(stream)
        stream.close()
        with monkeypatch.context() as patch:  # grammars, which only rank 0 has, keep no rank from captured verifies
            patch.setattr(llm._local.engine.runner.verifier.__class__, "step", None)
            outputs = llm.generate(PROMPTS, [GREEDY, CONSTRAINED])
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        assert [output.spec for output in outputs] == [output.spec for output in expected]
        with monkeypatch.context() as patch:
            patch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
            (refused,) = llm.generate(PROMPTS[0], GREEDY)
        assert "a message between ranks has" in str(refused.error)
        assert llm.flush_cache() > 0
        with pytest.raises(ConfigError, match="tools change and measure engines of one process"):
            _ = llm.workbench
        assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected[0].token_ids
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: llm._local.thread.failed is not None, LOST_S)
        assert "rank 1" in str(llm._local.thread.failed)
        with pytest.raises((EngineFailedError, EngineStoppedError)):
            llm.generate(PROMPTS[0], GREEDY)
    assert is_gone(child)


@pytest.mark.slow
def test_ranks_without_native_code_exchange_over_sockets() -> None:
    """The texts are those of native code, and a rank that is killed is noticed."""
    small = EngineFlags(dtype="float32", num_threads=1, speculative_num_steps=3, max_total_tokens=1024)
    with LLM(**small) as alone:
        expected = alone.generate(PROMPTS, GREEDY)
    done = python("-c", SOCKETS, SPECMAMBA_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[*output.token_ids] for output in expected]


@pytest.mark.slow
def test_three_ranks_draft_from_texts(tmp_path: Path) -> None:
    """They find each other however late the last one is; a text that comes again is drafted, and accepted as often."""
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3}
    heads |= {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    folder = write_tiny_checkpoint(tmp_path / "tiny", 0, **heads)
    flags: dict[str, Any] = {"model": str(folder), "dtype": "float32", "num_threads": 1, "context_length": 128}
    flags |= {"max_total_tokens": 512, "max_mamba_cache_size": 16, "skip_tokenizer_init": True}
    flags |= {"speculative_algorithm": "suffix", "speculative_adaptive": "off"}
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    found = []
    for size in (1, 3):
        with LLM(**flags | {"tp_size": size}) as llm:
            found.append([(o.token_ids, o.spec) for _ in range(2) for o in llm.generate(prompts(60, (12, 9)), greedy)])
    assert found[0] == found[1]
    assert all(spec.num_accepted_tokens > 8 for _, spec in found[1][2:])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_ends_when_a_rank_is_lost(number: signal.Signals) -> None:
    """Every stream gets an error soon, within ten seconds on a machine that has time, and the exit status is 1."""
    with process("-m", "specmamba", "serve", *TWO) as server:
        (child,) = children_of(server.process.pid)
        all_run = threading.Barrier(4)
        with ThreadPoolExecutor(3) as clients:
            running = [clients.submit(last_event, server.url, text, all_run.wait) for text in "xyz"]
            all_run.wait(120)
            os.kill(child, number)
            began = time.monotonic()
            ends = [future.result(120) for future in running]
        assert all(ended - began < LOST_S for _, ended in ends)
        assert all("rank 1" in event["error"]["message"] for event, _ in ends)
        status, errors = server.end()
        assert time.monotonic() - began < 2 * LOST_S
    assert status == 1, errors
    assert is_gone(child)


def last_event(url: str, prompt: str, on_first: Callable[[float], object]) -> tuple[dict[str, Any], float]:
    """The last event of a long stream, and when it ended; ``on_first`` is called behind the first one."""
    body = {"prompt": prompt, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    last = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                if not last:
                    on_first(120)
                last = line
    return json.loads(last.removeprefix("data: ")), time.monotonic()


@pytest.mark.slow
def test_a_server_ends_its_ranks() -> None:
    with process("-m", "specmamba", "serve", *TWO) as server:
        (child,) = children_of(server.process.pid)
        assert httpx.get(f"{server.url}/server_info").json()["tp_size"] == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0
    wait_until(lambda: is_gone(child), LOST_S)


@pytest.mark.slow
def test_ranks_that_torchrun_starts() -> None:
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29617", "-m", "specmamba"]
    flags = ["generate", "--prompt", PROMPTS[0], "--temperature", "0", "--max-tokens", "16", "--dtype", "float32"]
    alone = python("-m", "specmamba", *flags)
    shared = python(*run, *flags, "--tp-size", "2")
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout == alone.stdout
    other = python(*run, *flags, "--tp-size", "4")
    assert other.returncode == 1
    assert "--tp-size 4: torchrun has started 2 processes" in other.stderr
