"""The benchmark of one linear layer: both sides compute the same product, and every number of rows has a line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch

from specmamba.bench import linear
from specmamba.kernels.linear import native_ops


@pytest.fixture
def _native(needs_native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_WEIGHT_BYTES", 3 * 2 * 48 * 32)


@pytest.mark.usefixtures("_native")
def test_both_contestants_compute_the_same() -> None:
    torch.manual_seed(0)
    native, other = linear.contestants(48, 32)
    assert len(native) == len(other) == 3
    assert all(isinstance(weight, native_ops.NativeWeight) for weight in native)
    assert not any(isinstance(weight, native_ops.NativeWeight) for weight in other)
    for m in (1, 5):
        x = torch.randn(m, 32).bfloat16()
        for mine, theirs in zip(native, other, strict=True):
            torch.testing.assert_close(mine(x), theirs(x), rtol=2**-7, atol=2**-10)
    assert not torch.equal(native[0](x), native[1](x))  # weights of their own


@pytest.mark.usefixtures("_native")
def test_a_line_for_every_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--shapes", "48x32", "32x48", "--rows", "1", "3", "7", "--rounds", "2"]) == 0
    header, *tables = capsys.readouterr().out.split("\n\n")
    assert f"threads: {torch.get_num_threads()}; specmamba " in header
    assert f"torch {version('torch')}" in header
    assert [table.partition("\n")[0] for table in tables] == ["weight [48, 32] bf16", "weight [32, 48] bf16"]
    for table in tables:
        assert re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ +[\d.]+ ", table, re.MULTILINE) == ["1", "3", "7"]


@pytest.mark.usefixtures("_native")
def test_the_ratio_is_taken_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In some rounds the machine is slow for both; the ratio of the medians would be 2, not 3."""
    seconds = iter([9.0, 9.0, 3.0, 1.0, 30.0, 10.0, 4.0, 2.0])
    monkeypatch.setattr(linear, "_seconds", lambda products, x: next(seconds))
    (found,) = linear.measure(48, 32, [1], 3)
    assert found == linear.Measurement(1, 4.0, 2.0, 3.0)


def test_without_native_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(native_ops, "code", lambda: None)
    assert linear.main(["--rows", "1"]) == 1
    assert "there is no native code to compare with: it loads" in capsys.readouterr().err


def test_the_reason_is_in_the_message() -> None:
    code = "import sys; from specmamba.bench.linear import main; sys.exit(main(['--rows', '1']))"
    environment = os.environ | {"SPECMAMBA_NATIVE": "0"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "SPECMAMBA_NATIVE" in ended.stderr


@pytest.mark.usefixtures("_native")
def test_a_line_is_printed_before_the_next_number_of_rows_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def seconds(products: object, x: object) -> float:
        seen.append(capsys.readouterr().out.count("\n"))
        return 1.0

    monkeypatch.setattr(linear, "_seconds", seconds)
    assert linear.main(["--shapes", "48x32", "--rows", "1", "2", "--rounds", "1"]) == 0
    assert seen[0] == 4  # the header, and the head of the table
    assert 1 in seen[1:]


@pytest.mark.usefixtures("_native")
def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(linear, "_seconds", interrupt)
    assert linear.main(["--shapes", "48x32", "--rows", "1"]) == 130
    assert capsys.readouterr().err == ""
