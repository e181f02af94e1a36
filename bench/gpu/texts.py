"""Whether the GPU writes the texts of the CPU: in float32 token for token, in bfloat16 but for near ties.

All on the demo, greedily. A difference in float32 is judged too (the two add up in different orders), but the aim is
that there is none. In bfloat16 what is compared is decoding with drafts and without, both on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specmamba import LLM, SamplingParams
from specmamba.bench.gpu.plan import CHAIN, PLAIN, TREE, Shape
from specmamba.errors import RequestError
from specmamba.measure.acceptance.judge import Judge
from specmamba.measure.prompts import PLAIN_FLAGS, bundled_texts, encode_prompt

Texts = list[tuple[int, ...]]
CONTEXT = 1024


def compare_texts(device: str, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Counts by way of drafting: {"float32": {"plain": {"identical", "near_tie", "diverged"}, ...}, "bfloat16": ...}.

    Raises:
        RequestError: the model's numbers are not finite.
    """
    found: dict[str, Any] = {"num_prompts": num_prompts, "max_tokens": max_tokens}
    texts = {shape: _generate(device, "float32", shape, num_prompts, max_tokens) for shape in (PLAIN, CHAIN, TREE)}
    found["float32"] = _judged("cpu", "float32", texts, num_prompts, max_tokens)
    texts = {shape: _generate(device, "bfloat16", shape, num_prompts, max_tokens) for shape in (CHAIN, TREE)}
    found["bfloat16"] = _judged(device, "bfloat16", texts, num_prompts, max_tokens)
    return found


def _engine(device: str, dtype: str, shape: Shape) -> LLM:
    flags: dict[str, Any] = {"num_threads": 1} if device == "cpu" else {}
    return LLM(device=device, dtype=dtype, context_length=CONTEXT, disable_radix_cache=True, **shape.flags, **flags)


def _prompts(llm: LLM, count: int, max_tokens: int) -> list[list[int]]:
    room = CONTEXT - max_tokens - 1
    return [encode_prompt(text, llm.engine.tokenizer)[-room:] for text in bundled_texts()[:count]]


def _generate(device: str, dtype: str, shape: Shape, count: int, max_tokens: int) -> Texts:
    with _engine(device, dtype, shape) as llm:
        return _texts(llm, _prompts(llm, count, max_tokens), max_tokens)


def _texts(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> Texts:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(list(prompts), params)
    for output in outputs:
        if output.finish_reason == "error":
            raise RequestError(output.error or "the model's numbers are not finite")
    return [output.token_ids for output in outputs]


def _judged(device: str, dtype: str, texts: dict[Shape, Texts], count: int, max_tokens: int) -> dict[str, Any]:
    """Every way's texts against those of plain decoding on ``device``, which also judges differences."""
    with _engine(device, dtype, PLAIN) as llm:
        prompts = _prompts(llm, count, max_tokens)
        plain = _texts(llm, prompts, max_tokens)
        llm.workbench.use_drafts(**PLAIN_FLAGS)
        judge = Judge(llm.workbench.logits_along, getattr(torch, dtype), 0.0)
        return {shape.name: _count(judge, prompts, plain, found) for shape, found in texts.items()}


def _count(judge: Judge, prompts: Sequence[list[int]], plain: Texts, found: Texts) -> dict[str, int]:
    counts = {"identical": 0, "near_tie": 0, "diverged": 0}
    for number, (prompt, expected, got) in enumerate(zip(prompts, plain, found, strict=True)):
        difference = judge.compare(number, prompt, 0, expected, got)
        counts["identical" if difference is None else difference.kind] += 1
    return counts
