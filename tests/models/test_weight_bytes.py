"""``weight_bytes`` is the size of the tensors of a loaded model, also when only their shapes are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.linear import native_ops as linear_ops
from specmamba.kernels.linear.torch_ops import OneDNNWeight
from specmamba.kernels.moe import native_ops as moe_ops
from specmamba.layers.primitives import Rotary
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.draft_heads import load_draft_head
from specmamba.models.registry import load_model
from tests.families import FAMILIES
from tests.heads import write_head
from tests.pairwise import pairwise

PANEL = 32
PACKED = (
    linear_ops.NativeWeight,
    linear_ops.NativeInt8Weight,
    moe_ops.NativeExperts,
    moe_ops.NativeInt8Experts,
    moe_ops.NativeRouter,
    OneDNNWeight,
)
TIED = {
    "bailing-hybrid": "unbounded",
    "bamba": "biased-tied",
    "falcon-h1": "norm-after-gate",
    "falcon-mamba": "biased-tied",
    "granite-hybrid": "no-experts",
    "jamba": "biased-tied",
    "kimi-linear": "latent-queries",
    "lfm2": "biased-tied",
    "lfm2-moe": "tied",
    "lfm3": "biased-tied",
    "mamba1": "biased-tied",
    "mamba2": "biased-tied",
    "nemotron-h": "tied",
    "olmo-hybrid": "biased-tied",
    "qwen3.5": "tied",
    "qwen3.5-moe": "tied",
    "qwen3-next": "unnormalised-tied",
}
CASES = [(family, variant) for family in FAMILIES for variant in ("default", TIED[family])]
FORMS = [("plain", "plain"), ("int8", "int8"), ("plain", "int8"), ("int8", "plain")]  # of the target, of its head


def options(device: str, dtype: torch.dtype, forms: tuple[Any, Any]) -> LoadOptions:
    return LoadOptions(dtype, torch.device(device), want_draft_head=True, form=forms[0], draft_form=forms[1])


def parts(thing: object, seen: set[int]) -> Iterator[object]:
    """Every object that a model refers to, once; without the contents of packed weights and rotary embeddings."""
    if id(thing) in seen or isinstance(thing, (str, type, torch.dtype, Rotary)):
        return
    seen.add(id(thing))
    yield thing
    if isinstance(thing, (Tensor, *PACKED)):
        return
    if isinstance(thing, dict):
        children = list(thing.values())
    elif isinstance(thing, (list, tuple)):
        children = list(thing)
    else:
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        children = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
        children.append(getattr(thing, "__self__", None))  # of a bound method
    for child in children:
        yield from parts(child, seen)


def without_padding(packed: Any) -> int:
    """Of a packed weight; what it holds beside that is padding of panels."""
    if isinstance(packed, OneDNNWeight):
        return packed.nbytes  # what it holds has no address
    tensors = [value for value in vars(packed).values() if isinstance(value, Tensor)]
    held, largest = sum(t.nbytes for t in tensors), max(tensors, key=lambda t: t.nbytes)
    *experts, n, k = getattr(packed, "_size", None) or (packed._n, packed._k)
    exact = n * k * largest.element_size() if isinstance(packed, moe_ops.NativeRouter) else packed.nbytes
    count = experts[0] if experts else 1
    panels = count * -(-n // PANEL) * PANEL * (k + k % 2) * largest.element_size()
    assert exact <= held <= panels + 4 * count * n
    return int(exact)


def held_bytes(model: LoadedModel) -> int:
    storages, total = {}, 0
    for part in parts((model.target, model.draft_head), set()):
        if isinstance(part, PACKED):
            total += without_padding(part)
        elif isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return total + sum(storages.values())


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, variant = request.param
    folder = tmp_path_factory.mktemp(family)
    FAMILIES[family].build(folder, variant)
    return folder


@pytest.mark.fast_cases(40)
@pytest.mark.parametrize("forms", FORMS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models(folder: Path, dtype: torch.dtype, forms: tuple[str, str]) -> None:
    model = load_model(folder, options("cpu", dtype, forms))
    assert model.weight_bytes == held_bytes(model)
    assert model.weight_bytes == load_model(folder, options("meta", dtype, forms)).weight_bytes


@pairwise(
    pytest.mark.parametrize("forms", FORMS, ids="-".join),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
    pytest.mark.parametrize("style", ["eagle-all", "eagle3", "eagle3-narrow", "eagle3-tied"]),
)
def test_separate_draft_heads(style: str, dtype: torch.dtype, forms: tuple[str, str], tmp_path: Path) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    FAMILIES["qwen3.5"].build(target, "tied")
    write_head(head, target, style, seed=1)
    models = []
    for device in ("cpu", "meta"):
        chosen = replace(options(device, dtype, forms), want_draft_head=False)
        models.append(load_draft_head(head, load_model(target, chosen), chosen, target))
    assert models[0].weight_bytes == models[1].weight_bytes == held_bytes(models[0])
