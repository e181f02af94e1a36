"""The layer over packed weights: its bias and its form."""

from __future__ import annotations

import pytest
import torch

from specmamba.kernels import linear
from specmamba.kernels.linear import WeightForm
from specmamba.layers.primitives import Linear

FORMS: list[WeightForm] = ["plain", "int8"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_a_bias_is_added_after_rounding(form: WeightForm, dtype: torch.dtype) -> None:
    weight, x, bias = torch.randn(5, 8).to(dtype), torch.randn(2, 3, 8).to(dtype), torch.randn(5).to(dtype)
    kept = bias.clone()
    product = linear.pack(weight, form)(x)
    assert torch.equal(Linear(weight, form=form)(x), product)
    layer = Linear(weight, bias, form)
    assert torch.equal(layer(x), product + bias)
    assert torch.equal(layer(x), product + bias)  # nothing of the first call is left in the second
    assert torch.equal(bias, kept)


def test_forms_differ() -> None:
    """By the rounding of weights: less than half a 127th of the largest weight for each input."""
    weight, x = torch.randn(40, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    plain, int8 = Linear(weight)(x).double(), Linear(weight, form="int8")(x).double()
    bound = x.double().abs().sum(-1, keepdim=True) * weight.double().abs().amax(-1) / 254
    assert not torch.equal(plain, int8)
    assert ((plain - int8).abs() <= bound + plain.abs() * 2**-7).all()


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_whether_a_weight_is_copied_is_known_without_its_device(device: str) -> None:
    assert not linear.copies(torch.device(device, 7), torch.bfloat16)
    assert linear.copies(torch.device(device, 7), torch.bfloat16, "int8")


@pytest.mark.usefixtures("needs_native")
def test_a_weight_on_the_cpu_is_copied() -> None:
    cpu = torch.device("cpu")
    assert [linear.copies(cpu, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [
        True,
        True,
        False,
    ]
