"""The rules of a model's reasoning, which has any form and ends with ``</think>``."""

from __future__ import annotations

from specmamba.grammar.ebnf import literal
from specmamba.sampling_params import THINK, THINK_END

MAX_SPACE = 4  # characters of white space behind each mark


def reasoning_rules(*, is_open: bool) -> str:
    """The grammar of reasoning up to its end, and of the white space behind it.

    The end is found as Knuth, Morris and Pratt do: the mark begins with "<" and has no other, so that after a text that
    is no beginning of the mark everything starts again behind the next "<".

    Args:
        is_open: the prompt has opened the reasoning, so that it must be ended. False: it may be opened by ``<think>``,
            or be left out.
    """
    first, rest = THINK_END[0], THINK_END[1:]
    begun = [rest[:length] for length in range(len(rest))]
    again = " | ".join(literal(text) for text in begun)
    failed = " | ".join(f"{literal(text)} [^{first}{rest[len(text)]}]" for text in begun)
    opening = "" if is_open else f"{literal(THINK)} "
    whole = f"{opening}until {literal(rest)} space"
    return "\n".join(
        (
            f"root ::= {whole}" if is_open else f'root ::= "" | {whole}',
            f"until ::= [^{first}]* {literal(first)} more*",
            f"more ::= ({again}) {literal(first)} | ({failed}) [^{first}]* {literal(first)}",
            f"space ::= [ \\n]{{0,{MAX_SPACE}}}",
        )
    )
