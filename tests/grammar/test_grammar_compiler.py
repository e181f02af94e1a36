"""Compiling in a separate process: the cache, refusals, and what happens after time limits, crashes and closing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from specmamba.config import DEMO_MODEL
from specmamba.errors import EngineStoppedError, GrammarQueueFullError, RequestError
from specmamba.grammar import CompiledGrammar, GrammarCompiler
from specmamba.grammar.compilations import GrammarCache
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.sampling_params import GrammarSpec
from tests.grammar_schemas import accepts

xgrammar = pytest.importorskip("xgrammar")

SCHEMA = '{"properties": {"a": {"type": "integer"}}, "required": ["a"]}'
BOMB = "|".join("".join(f"[^{chr(97 + i * j % 26)}]*" for j in range(20)) for i in range(400))  # takes long to compile


def spec_of(kind: Any, text: str = "") -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, 4096, (0,), timeout_s=60.0, cache_bytes=64 << 20)
    yield compiler
    compiler.close()


def compile_now(compiler: GrammarCompiler, kind: Any, text: str = "") -> CompiledGrammar:
    return compiler.compile(spec_of(kind, text)).result(timeout=120)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for_death_of(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.02)


def test_every_kind_is_compiled_and_kept(compiler: GrammarCompiler) -> None:
    assert accepts(compile_now(compiler, "json_object"), '{"a": [1]}')
    assert accepts(compile_now(compiler, "json_schema", SCHEMA), '{"a": 12}')
    assert accepts(compile_now(compiler, "regex", "a+b"), "aab")
    assert accepts(compile_now(compiler, "ebnf", 'root ::= "x" root | "y"'), "xxy")
    assert compile_now(compiler, "regex", "a+b") is compile_now(compiler, "regex", "a+b")


def test_simultaneous_requests_share_one_compilation(compiler: GrammarCompiler) -> None:
    asked = [compiler.compile(spec_of("regex", "shared{7}")) for _ in range(100)]
    asked[3].cancel()
    assert len({id(future.result(timeout=120)) for future in asked if not future.cancelled()}) == 1


WRONG = {
    "regex": ("(a", "unterminated"),
    "ebnf": ("root ::= nothing", "not defined"),
    "json_schema": ('{"uniqueItems": true}', "'uniqueItems' is not supported"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_specifications_are_refused_by_the_same_process(compiler: GrammarCompiler, kind: str) -> None:
    compile_now(compiler, "regex", "a")
    pid = compiler.worker_pid
    text, reason = WRONG[kind]
    for _ in range(2):
        with pytest.raises(RequestError, match=reason) as caught:
            compile_now(compiler, kind, text)
        assert ".cc" not in str(caught.value)
    assert compiler.worker_pid == pid


HARMLESS_OR_REFUSED = [
    ("ebnf", 'root ::= root "a" | "b"'),
    ("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ("ebnf", "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"\nroot ::= r0'),
    ("ebnf", 'root ::= "\x00"'),
    ("regex", "(" * 3000 + ")" * 3000),
    ("regex", "((a*)*)*b"),
    ("json_schema", "[" * 65_000),
    ("json_schema", '{"anyOf": [{"$ref": "#"}, {"type": "null"}]}'),
]


@pytest.mark.parametrize(("kind", "text"), HARMLESS_OR_REFUSED)
def test_odd_specifications_leave_the_compiler_working(compiler: GrammarCompiler, kind: str, text: str) -> None:
    error = compiler.compile(spec_of(kind, text)).exception(timeout=120)
    assert error is None or (isinstance(error, RequestError) and str(error))
    assert accepts(compile_now(compiler, "regex", "fine"), "fine")


def test_after_a_time_limit_the_next_grammar_compiles(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_now(compiler, "regex", "a")
    pid = compiler.worker_pid
    assert pid is not None
    with monkeypatch.context() as patch:
        patch.setattr(compiler._worker, "_timeout_s", 0.05)
        for _ in range(2):  # the second one is known to be a bomb
            with pytest.raises(RequestError, match=r"more than 0\.05 s") as caught:
                compile_now(compiler, "regex", BOMB)
            assert isinstance(caught.value.__cause__, TimeoutError)
    assert not Path(f"/proc/{pid}").exists()
    assert accepts(compile_now(compiler, "regex", "after"), "after")


def test_dead_process_memory_limit_and_close(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer, 4096, (0,), timeout_s=60.0, cache_bytes=1 << 20)
    compile_now(compiler, "regex", "a")
    dead = compiler.worker_pid
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)  # its first thread is a zombie before the last one has ended
    assert compiler._worker is not None
    monkeypatch.setattr(compiler._worker._child, "_memory_bytes", 48 << 20)
    assert accepts(compile_now(compiler, "regex", "replaced"), "replaced")
    assert compiler.worker_pid != dead
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}, "maxItems": 2} for i in range(400)}
    schema = {"$defs": {**chain, "d400": {"type": "null"}}, "$ref": "#/$defs/d0"}
    with pytest.raises(RequestError, match="too much memory"):
        compile_now(compiler, "json_schema", json.dumps(schema))
    compile_now(compiler, "regex", "b")
    pid = compiler.worker_pid
    assert pid is not None
    running, waiting = compiler.compile(spec_of("regex", BOMB)), compiler.compile(spec_of("regex", "c"))
    compiler.close()
    for future in (running, waiting, compiler.compile(spec_of("regex", "d"))):
        with pytest.raises(EngineStoppedError):
            future.result(timeout=60)
    assert not Path(f"/proc/{pid}").exists()  # not as a zombie either
    assert compiler.worker_pid is None


PARENT = """
import os, signal, sys
from specmamba.sampling_params import GrammarSpec
from specmamba.grammar.worker_process import WorkerProcess
worker = WorkerProcess(sys.stdin.buffer.read(), 60.0)
worker.compile(GrammarSpec(kind="regex", text="a"))
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_process_ends_with_its_parent() -> None:
    info = xgrammar.TokenizerInfo([b"a", b"<end>"], vocab_size=2, stop_token_ids=[1])
    done = subprocess.run(
        [sys.executable, "-c", PARENT],
        input=info.serialize_json().encode() + b"\n",
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for_death_of(int(done.stdout))


def test_a_full_queue_refuses(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.grammar.compiler.MAX_WAITING", 2)
    monkeypatch.setattr(GrammarCompiler, "_run", lambda self: None)
    compiler = GrammarCompiler(tokenizer, 4096, (0,), timeout_s=60.0, cache_bytes=1 << 20)
    asked = [compiler.compile(spec_of("regex", text)) for text in ("a", "b", "c", "a")]
    assert [future.done() for future in asked] == [False, False, True, False]
    with pytest.raises(GrammarQueueFullError, match="2 grammars are waiting"):
        asked[2].result()


def test_a_model_without_end_token_is_refused(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 4096, (), timeout_s=60.0, cache_bytes=1 << 20)
    with pytest.raises(RequestError, match="no end-of-text token"):
        compiler.compile(spec_of("json_object")).result(timeout=60)


def test_without_xgrammar_it_says_what_to_install(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.grammar.compiler.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'specmamba\[grammar\]'"):
        GrammarCompiler(tokenizer, 4096, (0,), timeout_s=60.0, cache_bytes=1 << 20)


def test_the_cache_drops_what_was_used_least_recently() -> None:
    cache = GrammarCache(250)
    first, second, third = (CompiledGrammar(spec_of("regex", text), None, 99) for text in "abc")
    cache.add(first.spec, first)
    cache.add(second.spec, second)
    assert cache.get(first.spec) is first
    cache.add(third.spec, third)
    assert [cache.get(one.spec) for one in (first, second, third)] == [first, None, third]
    assert cache.num_bytes == 200
    large = CompiledGrammar(spec_of("regex", "large"), None, 300)
    cache.add(large.spec, large)
    assert cache.get(large.spec) is None
    assert cache.num_bytes == 0


def test_refusals_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, spec = GrammarCache(100), spec_of("regex", "(")
    slow = RequestError("slow")
    slow.__cause__ = TimeoutError()
    cache.add(spec, slow)
    assert cache.get(spec) is slow
    monkeypatch.setattr("specmamba.grammar.compilations.time.monotonic", lambda: time.time() + 10**6)
    assert cache.get(spec) is None
    cache.add(spec, RequestError("wrong"))
    assert str(cache.get(spec)) == "wrong"


def test_a_refusal_takes_the_place_of_a_grammar() -> None:
    cache, grammar = GrammarCache(250), CompiledGrammar(spec_of("regex", "a"), None, 99)
    cache.add(grammar.spec, grammar)
    slow = RequestError("slow")
    slow.__cause__ = TimeoutError()
    cache.refuse(grammar.spec, slow)
    assert cache.get(grammar.spec) is slow
    assert cache.num_bytes == 0
    cache.add(grammar.spec, grammar)  # by a compilation that was running meanwhile
    assert cache.get(grammar.spec) is slow


def test_a_grammar_that_was_too_slow_is_refused_for_a_while(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = compile_now(compiler, "regex", "slow{3}").spec
    compiler.refuse(spec)
    refusal = compiler.compile(spec)
    assert refusal.done()  # nothing is compiled
    with pytest.raises(RequestError, match="too complex") as caught:
        refusal.result()
    assert isinstance(caught.value.__cause__, TimeoutError)
    monkeypatch.setattr("specmamba.grammar.compilations.time.monotonic", lambda: time.time() + 10**6)
    assert accepts(compile_now(compiler, "regex", "slow{3}"), "slowww")


def test_a_cancelled_future_has_no_effect(compiler: GrammarCompiler) -> None:
    futures: list[Future[CompiledGrammar]] = [compiler.compile(spec_of("regex", f"x{i}")) for i in range(5)]
    assert [future.cancel() for future in futures[1:]] == [True] * 4
    assert accepts(compile_now(compiler, "regex", "x9"), "x9")
