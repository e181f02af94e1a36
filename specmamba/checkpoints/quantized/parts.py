"""Which stored tensors belong to one quantized matrix, by their names. Lists of layers in configs are not asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from specmamba.errors import CheckpointError

# beside or instead of NAME.weight: NAME + key
_BESIDE_WEIGHT = {
    ".weight_packed": "packed",
    ".weight_scale": "scale",
    ".weight_scale_inv": "scale",  # of DeepSeek's and Qwen's FP8; it multiplies, in spite of its name
    ".weight_scale_2": "second_scale",
    ".weight_global_scale": "global_scale",
    ".weight_zero_point": "zeros",
    ".weight_g_idx": "groups",
    ".weight_shape": "shape",
    ".qweight": "qweight",
    ".qzeros": "qzeros",
    ".scales": "scales",
    ".g_idx": "groups",
}
# beside or instead of NAME, which stacks the matrices of experts: NAME + key
_BESIDE_STACK = {"_scale_inv": "scale", "_weight_scale": "scale", "_scale": "scale", "_blocks": "blocks"}
_BESIDE_STACK |= {"_scales": "scale", "_weight_scale_2": "second_scale"}
CODES = ("weight", "packed", "qweight", "blocks")
# of activations and of KV caches: products with weights in codes choose their own
_ACTIVATIONS = {"input_scale", "input_global_scale", "input_zero_point", "output_scale"}
_ACTIVATIONS |= {"q_scale", "k_scale", "v_scale", "kv_scale"}


def is_of_activations(name: str) -> bool:
    """Whether a tensor is a scale of activations, which is stored and not used."""
    last = name.rpartition(".")[2]
    return last in _ACTIVATIONS or last.endswith("_input_scale")


def group_parts(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Find the matrices that are stored in parts.

    Args:
        names: of all tensors.

    Returns:
        By name of the matrix, as it would be stored without quantization: the names of its tensors by role.

    Raises:
        CheckpointError: there are scales, and not what they belong to, or two tensors of the same role.
    """
    known = set(names)
    matrices: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        found = _owner_and_role(name, known)
        if found is not None:
            owner, role = found
            other = matrices[owner].setdefault(role, name)
            if other != name:
                raise CheckpointError(f"{other} and {name} are both the {role} of {owner}")
    for owner, parts in matrices.items():
        if owner in known:
            parts["weight"] = owner
        if not any(role in parts for role in CODES):
            raise CheckpointError(f"{', '.join(sorted(parts.values()))}: what is scaled, {owner}, is missing")
        if not {"scale", "scales"} & set(parts):
            raise CheckpointError(f"{owner}: its scales are missing; there are {', '.join(sorted(parts.values()))}")
        if sum(role in parts for role in CODES) > 1:
            raise CheckpointError(f"{owner} is stored twice: {', '.join(sorted(parts.values()))}")
    return dict(matrices)


def _owner_and_role(name: str, known: set[str]) -> tuple[str, str] | None:
    """The matrix that a tensor is a part of, and its role; None: it is no part."""
    for suffix, role in _BESIDE_WEIGHT.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix)}.weight", role
    for suffix, role in _BESIDE_STACK.items():
        owner = name.removesuffix(suffix)
        if owner != name and (owner in known or f"{owner}_blocks" in known):
            return owner, role
    return None
