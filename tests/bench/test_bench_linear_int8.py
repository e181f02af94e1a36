"""The benchmark of one linear layer in int8: the two products that it compares with, and its lines."""

from __future__ import annotations

import re

import pytest
import torch

from specmamba.bench import linear
from specmamba.kernels.linear import native_ops, torch_ops

OTHERS: dict[linear.Opponent, type] = {"torch": torch_ops.Int8Weight, "bf16": native_ops.NativeWeight}


@pytest.fixture(autouse=True)
def _native(needs_native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_WEIGHT_BYTES", 3 * 48 * 32)


@pytest.mark.parametrize("against", list(OTHERS))
def test_both_contestants_have_the_same_weights(against: linear.Opponent) -> None:
    torch.manual_seed(0)
    native, other = linear.contestants(48, 32, "int8", against)
    assert len(native) == len(other) == 3
    assert all(isinstance(weight, native_ops.NativeInt8Weight) for weight in native)
    assert all(isinstance(weight, OTHERS[against]) for weight in other)
    x = torch.randn(5, 32).bfloat16()
    for mine, theirs in zip(native, other, strict=True):
        torch.testing.assert_close(mine(x), theirs(x), rtol=2**-6, atol=0.25 if against == "bf16" else 2**-10)
    assert not torch.allclose(native[0](x), native[1](x), atol=1)  # weights of their own


@pytest.mark.parametrize("against", list(OTHERS))
def test_a_line_for_every_number_of_rows(against: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--form", "int8", "--against", against, "--shapes", "48x32", "--rows", "1", "3", "--rounds", "2"]
    assert linear.main(options) == 0
    table = capsys.readouterr().out.split("\n\n")[1]
    title, columns, *_ = table.split("\n")
    assert title == "weight [48, 32] int8"
    assert columns.split()[:5] == ["rows", against, "us", "native", "us"]
    lines = re.findall(r"^ +(\d+) +[\d.]+ +([\d.]+) +[\d.]+ +([\d.]+) ", table, re.MULTILINE)
    assert [rows for rows, _, _ in lines] == ["1", "3"]
    for _, microseconds, bandwidth in lines:  # one byte per weight; both figures have one decimal
        low, high = (48 * 32 / (float(microseconds) + d) / 1e3 for d in (0.05, -0.05))
        assert low - 0.05 <= float(bandwidth) <= high + 0.05


def test_bf16_does_not_run_against_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        linear.main(["--against", "bf16"])
    assert "needs --form int8" in capsys.readouterr().err
