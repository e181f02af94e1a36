"""``SPECMAMBA_TRITON``: which operators run in Triton, and what else changes with them."""

from __future__ import annotations

import re

import pytest
import torch

from specmamba.engine.captured.captured_steps import _replay
from specmamba.engine.loading import resolve_device
from specmamba.errors import ConfigError
from specmamba.kernels import gpu, linear, rowwise
from specmamba.kernels.dispatch import operator_of, operators
from specmamba.kernels.gpu import switch

CUDA = torch.device("cuda")
ALL = switch.operators()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The setting that a test is parametrized with, on a machine whose Triton works."""
    given = switch.parse(request.param)
    monkeypatch.setattr(gpu, "choice", lambda: given)
    monkeypatch.setattr(gpu, "_is_on", lambda: bool(given.operators))


def with_setting(value: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("chosen", [value], indirect=True)


def test_every_operator_with_a_triton_form_has_a_switch() -> None:
    with_triton = {name.partition(".")[0] for name, made in operators().items() if "triton" in made.forms}
    assert set(ALL) == with_triton
    assert {*gpu.FOLDING, *gpu.MULTIPLYING_CODES} < set(ALL)


@pytest.mark.parametrize(
    ("setting", "operators", "is_interpreted"),
    [
        ("", set(ALL), False),
        ("1", set(ALL), False),
        ("0", set(), False),
        ("interpret", set(ALL), True),
        ("moe, linear", {"moe", "linear"}, False),
        ("interpret,tree", {"tree"}, True),
        ("-moe,-ssd", set(ALL) - {"moe", "ssd"}, False),
        ("interpret,-tree", set(ALL) - {"tree"}, True),
        ("always", set(ALL), False),
        ("always,interpret,moe", {"moe"}, True),
        ("-moe,always", set(ALL) - {"moe"}, False),
    ],
)
def test_what_a_setting_means(setting: str, operators: set[str], is_interpreted: bool) -> None:
    choice = switch.parse(setting)
    assert choice == switch.Choice(frozenset(operators), is_interpreted, "always" in setting)
    assert set(choice.off) == set(ALL) - operators


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("moe,rope", "no operator 'rope' in Triton; there are 0, interpret, always, causal_conv1d, .*, tree, and"),
        ("-rope", "there is no operator 'rope'"),
        ("interpret,0", "there is no operator '0'"),
        ("always,0", "there is no operator '0'"),
        ("0,moe", "there is no operator '0'"),
        ("-moe,linear", "not both"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(setting: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed() -> switch.Choice:
        return switch.parse(setting)

    monkeypatch.setattr(gpu, "choice", parsed)
    with pytest.raises(ConfigError, match=f"SPECMAMBA_TRITON={re.escape(setting)}: .*{message}"):
        resolve_device("cpu")


@with_setting("-rowwise")
def test_the_other_forms_run_instead(chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "can_launch", lambda *_: True)
    x, bias = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 1, 2, 2)
    assert operator_of(rowwise.silu_mul).choose(x) == "torch"
    assert operators()["ssd.advance"].is_on("triton")
    assert gpu.can_launch_any(("rowwise", "ssd"), bias)
    assert not gpu.can_launch_any(("rowwise",), bias)


@pytest.mark.parametrize(
    ("chosen", "folds", "multiplies"),
    [
        ("", True, True),
        ("0", False, False),
        *((f"-{name}", name not in gpu.FOLDING, name not in gpu.MULTIPLYING_CODES) for name in ALL),
    ],
    indirect=["chosen"],
)
def test_what_depends_on_an_operator_goes_with_it(chosen: None, folds: bool, multiplies: bool) -> None:
    assert gpu.folds_in_verify(CUDA) == folds
    assert gpu.multiplies_codes(CUDA) == multiplies == linear.runs_codes(CUDA, torch.float16)


@with_setting("-sampling,-tree")
def test_steps_are_not_captured_without_all_operators(chosen: None) -> None:
    with pytest.raises(ConfigError, match=r"leave SPECMAMBA_TRITON alone \(it turns off sampling, tree\), or give"):
        _replay(CUDA, pads=False, num_threads=1, is_recordable=True, planned_bytes=0)
