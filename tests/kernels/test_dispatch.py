"""The dispatcher: what is declared of every operator, and which form a call takes."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import Form, Operator, operator, operator_of, operators

OPERATORS = operators()


def parameters_of(function: object) -> list[str]:
    assert callable(function)
    return list(inspect.signature(function).parameters)


def test_every_operator_is_listed() -> None:
    assert {"rowwise.rms_norm", "sampling.sample", "tree.accepted_path", "linear.pack"} <= set(OPERATORS)
    assert OPERATORS["tree.accepted_path"].forms == ("triton", "native", "torch", "reference")
    assert OPERATORS["tree.depth"].forms == ("triton", "torch", "reference")


@pytest.mark.parametrize("name", OPERATORS)
def test_every_form_has_the_name_and_the_parameters_of_the_entry(name: str) -> None:
    declared = OPERATORS[name]
    for form in declared.forms:
        if form != "triton" or gpu.has_triton():
            assert parameters_of(declared.load(form)) == parameters_of(declared.function)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_entry_says_what_it_takes_and_returns(name: str) -> None:
    declared = OPERATORS[name]
    entry = getattr(import_module(declared.package), declared.function.__name__)
    assert operator_of(entry) is declared
    assert inspect.signature(entry) == inspect.signature(declared.function)
    text = inspect.getdoc(entry) or ""
    assert "Args:" in text
    assert "Returns:" in text or inspect.signature(entry).return_annotation in (None, "None")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """The operator of this module; its native form doubles."""
    native = ModuleType("native_ops")
    native.__dict__["raised"] = lambda x, by: 2 * x
    monkeypatch.setitem(sys.modules, f"{__name__}.native_ops", native)
    monkeypatch.setitem(sys.modules, f"{__name__}.reference", ModuleType("reference"))
    return operator_of(raised)


@operator(native=lambda x, _: bool((x > 0).all()))
def raised(x: Tensor, by: int = 1) -> Tensor:
    """x + by."""
    return x + by


def test_a_call_takes_the_first_form_whose_condition_holds(example: Operator) -> None:
    positive = torch.full((1,), 5.0)
    assert example.choose(positive) == "native"
    assert example.choose(-positive) == "torch"
    assert raised(positive).item() == 10
    assert raised(-positive, 7).item() == 2


def test_arguments_may_be_given_by_name_and_left_out(example: Operator) -> None:
    negative = torch.full((1,), -1.0)
    assert raised(negative).item() == 0
    assert raised(x=negative, by=4).item() == raised(negative, by=4).item() == 3
    for args, kwargs in (((), {}), ((negative, 1, 2), {}), ((negative,), {"more": 1})):
        with pytest.raises(TypeError):
            raised(*args, **kwargs)


def test_a_form_that_does_not_exist_is_refused(example: Operator) -> None:
    assert example.forms == ("native", "torch")
    missing: Form = "triton"
    with pytest.raises(ValueError, match="raised has no form 'triton', only native, torch"):
        example.load(missing)


@pytest.mark.parametrize(
    ("device", "hip", "capability", "expected"),
    [
        ("cuda", None, 9, {"maxnreg": 168}),
        ("cuda", None, 8, {}),
        ("cuda", "7.0", 9, {}),
        ("cpu", None, 9, {}),
    ],
)
def test_limits_of_registers(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, capability: int, expected: dict[str, int]
) -> None:
    """Only NVIDIA's assembler is told one, from a generation of GPUs on."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(gpu, "_capability", lambda _: capability)
    assert gpu.register_options(gpu.Registers(168, since=9), torch.device(device)) == expected
    assert gpu.register_options(None, torch.device(device)) == {}


def test_a_limit_of_its_own_for_the_newest_generation() -> None:
    limit = gpu.Registers(168, since=9, most_of_10=160)
    assert [limit.options(capability) for capability in (8, 9, 10, 12)] == [
        {},
        {"maxnreg": 168},
        {"maxnreg": 160},
        {"maxnreg": 160},
    ]
