"""The process that compiles: ``python -m specmamba.grammar.worker BYTES``, with BYTES of memory for the work.

A grammar that crashes it or takes too much memory does not harm its parent.
Input: a line with the vocabulary, serialized by xgrammar, then a line with a ``GrammarSpec`` for every grammar.
Output: a line ``{}`` when ready, then for every grammar ``{"size": n}`` and n bytes of the compiled grammar, or
``{"error": reason, "is_slow": whether the reason is the time that its masks would take}``.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from specmamba.errors import RequestError
from specmamba.grammar.checks import RuleGraph, check_by_trial
from specmamba.grammar.expressions import Expression
from specmamba.grammar.json_schema import object_rules, schema_rules
from specmamba.grammar.reasoning_rules import reasoning_rules
from specmamba.processes.child_main import ParentPipe, limit_memory
from specmamba.sampling_params import GrammarSpec

MAX_THREADS = 8
_NICENESS = 10
_TOO_LARGE = "the grammar needs too much memory: make it smaller"
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


def compile_grammar(compiler: Any, spec: GrammarSpec) -> Any:
    """Compile a specification and check it by its rules and by trial.

    Raises:
        RequestError: as ``rules_of``; no text matches it, or its masks would take too long (caused by TimeoutError).
        RuntimeError, ValueError, TypeError, MemoryError, RecursionError: xgrammar cannot compile it.
    """
    import xgrammar

    grammar = xgrammar.Grammar.from_ebnf(rules_of(spec.kind, spec.text))
    graph = RuleGraph(grammar)
    graph.check()
    if spec.kind == "ebnf":
        graph.check_left_recursion(spec.text)
    if spec.reasoning != "none":
        reasoning = xgrammar.Grammar.from_ebnf(reasoning_rules(is_open=spec.reasoning == "open"))
        grammar = xgrammar.Grammar.concat(reasoning, grammar)
    compiled = compiler.compile_grammar(grammar)
    check_by_trial(compiled, compiled.tokenizer_info.vocab_size)
    return compiled


def main() -> None:
    """Answer requests until the input ends."""
    parent = ParentPipe()
    import xgrammar

    tokenizer_info = xgrammar.TokenizerInfo.deserialize_json(parent.read().decode())
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=threads, cache_enabled=False)
    limit_memory(int(sys.argv[1]))
    os.nice(_NICENESS)
    parent.send({})
    while True:
        _answer(parent, compiler, GrammarSpec.model_validate_json(parent.read()))


def _answer(parent: ParentPipe, compiler: Any, spec: GrammarSpec) -> None:
    compiled, reason, is_slow = b"", None, False
    try:
        compiled = compile_grammar(compiler, spec).serialize_json().encode()
    except RequestError as error:
        reason, is_slow = str(error), isinstance(error.__cause__, TimeoutError)
    except MemoryError:
        reason = _TOO_LARGE
    except RecursionError:
        reason = "the grammar nests too deep"
    except (RuntimeError, ValueError, TypeError) as error:  # native code raises several types of exceptions
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = _TOO_LARGE if "bad_alloc" in lines[0] else _SOURCE_PLACE.sub("", lines[0])[:500]
    parent.send({} if reason is None else {"error": reason, "is_slow": is_slow}, compiled)


if __name__ == "__main__":
    main()
