"""Layers with records in native code: the checks and calls that every kind of layer between its projections shares."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import marshalled, require
from specmamba.kernels.state_records.native_ops import (
    BuffersStruct,
    Heads,
    RunsStruct,
    TreesStruct,
    can_extend,
    check_places,
    check_tokens,
    extend_states,
    marshal_buffers,
    marshal_trees,
)
from specmamba.kernels.state_records.operands import Buffers, ExtendOperands, Trees


class _HasMixed(Protocol):
    @property
    def mixed(self) -> Tensor: ...


class _HasConv(Protocol):
    @property
    def conv(self) -> Tensor: ...


# Activations of a layer, of which ``mixed`` [B, N, C] are those of its convolution; and weights, with ``conv`` [C, W].
InputsT = TypeVar("InputsT", bound=_HasMixed)
WeightsT = TypeVar("WeightsT", bound=_HasConv)


@dataclass(frozen=True)
class NativeLayer(Generic[InputsT, WeightsT]):
    """One kind of layer: ``<name>_tree_verify`` and ``<name>_extend`` of the library at ``source``."""

    name: str
    source: Path  # a native.cpp
    inputs_struct: type[ctypes.Structure]
    weights_struct: type[ctypes.Structure]
    # activations, and kept inputs of earlier tokens, are on the CPU and share a dtype that native code reads
    are_alike: Callable[[InputsT, Tensor], bool]
    marshal_inputs: Callable[
        [InputsT], tuple[Any, Tensor, tuple[Tensor, ...]]
    ]  # structure, outputs, tensors it points to
    marshal_weights: Callable[[WeightsT], Any]  # None where native code cannot read them
    heads: Callable[[WeightsT], Heads]
    check_inputs: Callable[[InputsT, WeightsT], None]  # raises ValueError unless they fit

    @cached_property
    def code(self) -> ctypes.CDLL | None:
        """The loaded native library; None where there is none."""
        given = [POINTER(self.inputs_struct), POINTER(self.weights_struct)]
        verify = [*given, POINTER(BuffersStruct), POINTER(TreesStruct), c_int, c_int]
        extend = [*given, POINTER(RunsStruct), c_int, c_int]
        functions = {f"{self.name}_tree_verify": verify, f"{self.name}_extend": extend}
        return library.load_functions(self.source, functions)

    def can_take(self, inputs: InputsT, weights: WeightsT, buffers: Buffers) -> bool:
        """Whether native code computes on these: activations float32 or bfloat16 on the CPU, rows contiguous."""
        return (
            self.are_alike(inputs, buffers.conv_inputs)
            and marshalled(weights, self.marshal_weights) is not None
            and marshalled(buffers, marshal_buffers) is not None
            and self.code is not None
        )

    def can_take_runs(self, inputs: InputsT, weights: WeightsT, state: ExtendOperands) -> bool:
        """Whether native code extends these: activations and windows in one dtype, float32 or bfloat16, on the CPU."""
        return (
            self.are_alike(inputs, state.windows)
            and can_extend(state, inputs.mixed.dtype)
            and marshalled(weights, self.marshal_weights) is not None
            and self.code is not None
        )

    def tree_verify(self, inputs: InputsT, weights: WeightsT, buffers: Buffers, trees: Trees) -> Tensor:
        """Compute the outputs of all nodes of draft trees; write their inputs and records, never the states.

        One native call per layer. The operator's ``reference.tree_verify`` is the specification.

        Args:
            inputs: of N nodes per tree [B, N, ...], or packed [1, T, ...] (``Trees``), float32 or bfloat16 on the CPU.
            weights: of the layer, float32.
            buffers: of the layer; node i writes record node_offset + i and that entry of conv_inputs behind the window.
            trees: of this verify. Indices are not checked.

        Returns:
            The outputs in the inputs' dtype, [B, N, ...], or packed [1, T, ...] with zeros behind the last node.

        Raises:
            ValueError: ``can_take`` is false for these operands, or shapes do not fit.
        """
        native = library.required(self.code)
        buffers_struct = marshalled(buffers, marshal_buffers)
        require(buffers_struct is not None, "buffers have a dtype, device or layout that native code does not take")
        weights_struct = self._checked(inputs, weights, buffers.conv_inputs)
        check_tokens(inputs.mixed.shape[:2], trees)
        check_places(weights, weights.conv, self.heads(weights), buffers, trees)
        inputs_struct, out, _kept = self.marshal_inputs(inputs)
        run = getattr(native, f"{self.name}_tree_verify")
        is_bfloat16, places = inputs.mixed.dtype is torch.bfloat16, marshalled(trees, marshal_trees)
        run(inputs_struct, weights_struct, buffers_struct, places, is_bfloat16, torch.get_num_threads())
        return out

    def extend(self, inputs: InputsT, weights: WeightsT, state: ExtendOperands) -> Tensor:
        """Compute the outputs of known tokens; advance the states and windows behind which they stand.

        One native call per layer. The operator's ``reference.extend`` is the specification.

        Args:
            inputs: of L tokens per row, float32 or bfloat16 on the CPU.
            weights: of the layer, float32.
            state: states of any float dtype, windows in the inputs' dtype. Slots and lengths are not checked.

        Returns:
            The outputs in the inputs' dtype, [B, L, ...]; 0 on padding.

        Raises:
            ValueError: ``can_take_runs`` is false for these operands, or shapes do not fit.
        """
        native = library.required(self.code)
        require(can_extend(state, inputs.mixed.dtype), "windows need the inputs' dtype, and whole rows on the CPU")
        weights_struct = self._checked(inputs, weights, state.windows)
        inputs_struct, out, _kept = self.marshal_inputs(inputs)
        extend, is_bfloat16 = getattr(native, f"{self.name}_extend"), inputs.mixed.dtype is torch.bfloat16

        def run(runs: Any) -> None:
            extend(inputs_struct, weights_struct, runs, is_bfloat16, torch.get_num_threads())

        extend_states(run, state, weights.conv, self.heads(weights), *inputs.mixed.shape[:2])
        return out

    def _checked(self, inputs: InputsT, weights: WeightsT, kept: Tensor) -> Any:
        """The native structure of the weights, which the inputs fit; ``kept`` are inputs of earlier tokens."""
        weights_struct = marshalled(weights, self.marshal_weights)
        is_alike = self.are_alike(inputs, kept)
        require(is_alike, "inputs, new and kept, need one dtype, float32 or bfloat16, on the CPU")
        require(weights_struct is not None, "weights have a dtype, device or layout that native code does not take")
        is_fitting = inputs.mixed.shape[2] == weights.conv.shape[0]
        require(is_fitting, "the inputs have other channels than the convolution")
        self.check_inputs(inputs, weights)
        return weights_struct
