"""``bench.precision``: the chunks that stand for other kernels, and errors no larger than the committed ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from specmamba.bench.precision import __main__ as precision
from specmamba.bench.precision import chunked
from specmamba.bench.precision.forms import in_chunks, in_float64, make_text
from specmamba.errors import ConfigError
from tests.repository import ROOT

RESULTS = {64: ROOT / "bench/results/cpu/2026-11-28-precision.json"}
RESULTS[128] = ROOT / "bench/results/cpu/2026-11-28-precision-128.json"
OURS, BF16 = "ours, 16-bit models", "chunks in bfloat16"
SMALL = 2, 24, 20


@pytest.mark.parametrize("length", [1, 16, 70, 150])
@pytest.mark.parametrize("operator", precision.OPERATORS)
def test_chunks_without_rounding_are_the_recurrence(operator: str, length: int) -> None:
    text = make_text(operator, length, SMALL, seed=length)
    errors = precision.errors_of(in_chunks(chunked.to_fp32)(text), in_float64(text))
    assert max(errors) < 1e-5
    for to_operand, least, most in ((chunked.to_tf32, 1e-5, 2e-3), (chunked.to_bf16, 3e-4, 3e-2)):
        errors = precision.errors_of(in_chunks(to_operand)(text), in_float64(text))
        assert least < max(errors) < most


def test_numbers_of_tf32() -> None:
    """11 significant bits, to the nearest, and of two to the even one."""
    one, step = 1.0, 2.0**-10
    x = torch.tensor([one, one + step, one + 0.49 * step, one + 0.5 * step, one + 1.5 * step, -3.0, 0.0])
    want = [one, one + step, one, one, one + 2 * step, -3.0, 0.0]
    assert chunked.to_tf32(x).tolist() == want


def committed(operator: str, kind: str, tokens: int, head_dim: int) -> dict[str, Any]:
    content = json.loads(RESULTS[head_dim].read_text("utf8"))
    rows = content["rows"]
    assert (content["keys"], content["values"]) == (head_dim, head_dim)
    key = operator, kind, tokens
    errors = [row["errors"] for row in rows if (row["operator"], row["kind"], row["tokens"]) == key]
    assert len(errors) == 1
    found: dict[str, Any] = errors[0]
    return found


@pytest.mark.parametrize("head_dim", RESULTS)
def test_all_rows_are_committed(head_dim: int) -> None:
    """And everywhere our 16-bit modes are at least 16 times as exact as chunks in bfloat16."""
    for operator in precision.OPERATORS:
        lengths = [("tree", n) for n in precision.NODES] + [("chain", 4), ("prompt", precision.PROMPT)]
        for kind, tokens in lengths:
            errors = committed(operator, kind, tokens, head_dim)
            assert 16 * max(errors[OURS]) < max(errors[BF16])
            assert max(errors[BF16]) < 2e-2


@pytest.mark.parametrize(("operator", "kind"), [("gdn", "chain"), ("gdn", "tree"), ("ssd", "tree")])
def test_errors_are_no_larger_than_committed(operator: str, kind: str) -> None:
    """The largest of two texts was committed; sums of float32 numbers may differ between machines."""
    pytest.importorskip("triton")
    errors = precision.row_of(operator, kind, 4, (1, 64, 64), seeds=1)["errors"]
    for name, stated in committed(operator, kind, 4, 64).items():
        rounding = 1.05 if name == OURS else 1.5
        limits = [rounding * error + 2 * torch.finfo(torch.float32).eps for error in stated]
        assert all(own <= limit for own, limit in zip(errors[name], limits, strict=True)), name
    assert max(errors[OURS]) < 0.1 * max(errors[BF16])


def test_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        precision.run(precision.PrecisionConfig())
