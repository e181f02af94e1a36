"""What a checkpoint stores, and what of it a model leaves out, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from specmamba.checkpoints.quantized.parts import CODES

# Of one byte codes and of scales, as safetensors writes their types.
_EXPONENTS = ("U8", "F8_E8M0")
_FIRST = ("model", "backbone", "weight")  # say nothing about a layer


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """Matrices of one kind of layer that are stored in one form, and run in one."""

    layers: str  # their common name: "self_attn"
    form: str  # "BF16", "FP8 in blocks", "Q4_K"
    runs_as: str  # "int8", "4 bits in groups of 32"; "": in the model's dtype
    num_matrices: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredReport:
    """What a model took of a checkpoint, and what it did not."""

    matrices: tuple[StoredMatrices, ...] = ()
    ignored: tuple[tuple[str, int], ...] = ()  # common name and number of tensors


NOTHING_STORED = StoredReport()


def summarize(taken: Iterable[tuple[str, str, str, int]], ignored: Sequence[str]) -> StoredReport:
    """Summarize tensors.

    Args:
        taken: name, form, what it runs as, and bytes of every matrix.
        ignored: names of tensors that the model does not have.
    """
    numbers, sizes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for name, form, runs_as, num_bytes in taken:
        key = layers_of(name), form, runs_as
        numbers[key] += 1
        sizes[key] += num_bytes
    left = Counter(name.rpartition(".")[2] if "scale" in name else ".".join(name.split(".")[:2]) for name in ignored)
    found = (StoredMatrices(*key, number, sizes[key]) for key, number in numbers.items())
    return StoredReport(tuple(found), tuple(left.items()))


def layers_of(name: str) -> str:
    """What the matrices of all layers that are called alike have in common: "self_attn", "mlp.experts", "mtp fc"."""
    words = [word for word in name.split(".") if not word.isdecimal() and word not in _FIRST]
    prefix = ["mtp"] if words[0] == "mtp" else []
    rest = [word for word in words[len(prefix) :] if word != "layers"]
    kind = rest[:2] if rest[1:2] == ["experts"] else rest[:1]
    return " ".join([*prefix, ".".join(kind)])


def form_of(parts: Mapping[str, tuple[str, Sequence[int]]], shape: Sequence[int] = ()) -> str:
    """Name the form of a quantized matrix by the types and shapes of its parts, by role.

    Args:
        parts: type, as safetensors writes it, and shape.
        shape: of the matrix, which tells the bits of codes that are packed in words; (): it is not known.
    """
    role = next(role for role in CODES if role in parts)
    dtype, of_codes = parts[role]
    scale_dtype, scale = parts.get("scale", ("", ()))
    if role == "qweight":
        method = "GPTQ" if parts["scales"][1][-1] == of_codes[-1] else "AWQ"
        return f"{method}{_bits_of_words(of_codes, shape)}"
    if role == "blocks" or (dtype == "U8" and scale_dtype in _EXPONENTS):
        return "MXFP4"
    if dtype == "U8":
        return "NVFP4"
    if role == "packed":
        return f"packed words{_bits_of_words(of_codes, shape)}" + _spread(scale, of_codes)
    if dtype == "F8_E4M3" and scale_dtype in _EXPONENTS:
        return "MXFP8"
    return {"F8_E4M3": "FP8", "I8": "int8"}.get(dtype, dtype) + _spread(scale, of_codes)


def _bits_of_words(words: Sequence[int], shape: Sequence[int]) -> str:
    """Say how many bits a code has; the last words of a row may hold fewer codes."""
    return f" of {32 * prod(words) // prod(shape)} bits" if shape else ""


def _spread(scale: Sequence[int], shape: Sequence[int]) -> str:
    """Which weights share a scale."""
    if all(size == 1 for size in scale):
        return " per tensor"
    if len(scale) < len(shape) or scale[-1] == 1:
        return " per output"
    return " in groups" if list(scale[:-1]) == list(shape[:-1]) else " in blocks"
