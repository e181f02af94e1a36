"""The process that compiles: ``python -m specmamba.grammar.worker BYTES``, with BYTES of memory for the work.

A grammar that crashes it or takes too much memory does not harm its parent.
Input: a line with the vocabulary, serialized by xgrammar, then a line ``{"kind": ..., "text": ...}`` for every grammar.
Output: a line ``{}`` when ready, then for every grammar ``{"size": n}`` and n bytes of the compiled grammar, or
``{"error": reason, "is_slow": whether the reason is the time that its masks would take}``.
It ends when its input ends, also during a compilation, and when its parent's thread ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import re
import resource
import signal
import sys
import threading
from typing import Any, BinaryIO

from specmamba.errors import RequestError
from specmamba.grammar.checks import RuleGraph, check_by_trial
from specmamba.grammar.expressions import Expression
from specmamba.grammar.json_schema import object_rules, schema_rules

MAX_THREADS = 8
_NICENESS = 10
_TOO_LARGE = "the grammar needs too much memory: make it smaller"
_PR_SET_PDEATHSIG = 1
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")


def rules_of(kind: str, text: str) -> str:
    """Translate a specification to rules.

    Raises:
        RequestError: it is wrong, or uses something that is not supported.
    """
    match kind:
        case "json_object":
            return object_rules()
        case "json_schema":
            return schema_rules(text)
        case "regex":
            return f"root ::= {Expression(text).whole()}"
    return text


def compile_grammar(compiler: Any, kind: str, text: str) -> Any:
    """Compile a specification and check it by its rules and by trial.

    Raises:
        RequestError: as ``rules_of``; no text matches it, or its masks would take too long (caused by TimeoutError).
        RuntimeError, ValueError, TypeError, MemoryError, RecursionError: xgrammar cannot compile it.
    """
    import xgrammar

    grammar = xgrammar.Grammar.from_ebnf(rules_of(kind, text))
    graph = RuleGraph(grammar)
    graph.check()
    if kind == "ebnf":
        graph.check_left_recursion(text)
    compiled = compiler.compile_grammar(grammar)
    check_by_trial(compiled, compiled.tokenizer_info.vocab_size)
    return compiled


def main() -> None:
    """Answer requests until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the answers
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, lines), daemon=True).start()
    import xgrammar

    tokenizer_info = xgrammar.TokenizerInfo.deserialize_json(lines.get().decode())
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=threads, cache_enabled=False)
    _limit_memory(int(sys.argv[1]))
    os.nice(_NICENESS)
    _send(output, {})
    while True:
        request = json.loads(lines.get())
        _answer(output, compiler, request["kind"], request["text"])


def _answer(output: BinaryIO, compiler: Any, kind: str, text: str) -> None:
    compiled, reason, is_slow = b"", None, False
    try:
        compiled = compile_grammar(compiler, kind, text).serialize_json().encode()
    except RequestError as error:
        reason, is_slow = str(error), isinstance(error.__cause__, TimeoutError)
    except MemoryError:
        reason = _TOO_LARGE
    except RecursionError:
        reason = "the grammar nests too deep"
    except (RuntimeError, ValueError, TypeError) as error:  # native code raises several types of exceptions
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = _TOO_LARGE if "bad_alloc" in lines[0] else _SOURCE_PLACE.sub("", lines[0])[:500]
    _send(output, {"size": len(compiled)} if reason is None else {"error": reason, "is_slow": is_slow}, compiled)


def _send(output: BinaryIO, header: dict[str, Any], payload: bytes = b"") -> None:
    output.write(json.dumps(header).encode() + b"\n" + payload)
    output.flush()


def _read(source: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    for line in source:
        lines.put(line)
    os._exit(0)  # at once: the result of a running compilation could not be read any more


def _limit_memory(more: int) -> None:
    """Limit the memory of this process to ``more`` bytes beyond its present use."""
    with open("/proc/self/status", encoding="ascii") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, used + more))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
