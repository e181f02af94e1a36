"""An extend of one recurrent layer for tests: states and windows in slots of which the others hold NaN."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.state_records import ExtendOperands, RowSet
from tests.kernels.recurrent.layer_case import NUM_SLOTS, TOLERANCE, LayerCase, copied, values


class RunCase:
    """Inputs and weights of a layer's case with as many nodes as the longest run has tokens, and its own states."""

    def __init__(self, layer: LayerCase, lengths: list[int], state_dtype: torch.dtype = torch.float32) -> None:
        """The layer's case has one tree per entry of ``lengths``. Inputs of padding are NaN."""
        conv, dtype, batch = layer.weights.conv, layer.inputs.mixed.dtype, len(lengths)
        self.operators: ModuleType = layer.operators
        self.mix, self.exact, self.inputs, self.weights = layer.mix, layer.exact, layer.inputs, layer.weights
        for x in values(self.inputs):
            x[torch.arange(x.shape[1]) >= torch.tensor(lengths)[:, None]] = torch.nan
        slots = torch.randperm(NUM_SLOTS)[:batch]
        self.state = ExtendOperands(
            torch.full((NUM_SLOTS, *layer.buffers.states.shape[1:]), torch.nan, dtype=state_dtype),
            torch.full((NUM_SLOTS, conv.shape[1] - 1, conv.shape[0]), torch.nan, dtype=dtype),
            RowSet.of(slots.tolist(), conv.device),
            torch.tensor(lengths),
        )
        for x in (self.state.states, self.state.windows):
            x[slots] = torch.randn(batch, *x.shape[1:]).to(x.dtype)

    def run(self, form: str = "native") -> tuple[Tensor, ExtendOperands]:
        """Outputs, and the states afterwards; the case stays as it is."""
        state = copied_state(self.state)
        if form == "torch":
            return self.mix(self.inputs, self.weights, state), state
        assert self.operators.can_extend(state, self.inputs, self.weights)
        return self.operators.extend(self.inputs, self.weights, state), state

    def check(self, form: str) -> None:
        """Outputs, states and windows are those of the reference in float64, and other slots are as they were."""
        out, after = self.run(form)
        reference = import_module(f"{self.operators.__name__}.reference")
        wanted = copied_state(self.state, torch.float64)
        want = reference.extend(self.exact(self.inputs), copied(self.weights, torch.float64), wanted)
        assert out.dtype is self.inputs.gate.dtype
        for b, length in enumerate(self.state.lengths.tolist()):
            torch.testing.assert_close(out[b, :length].double(), want[b, :length], **TOLERANCE[out.dtype])
        of_states = TOLERANCE[after.states.dtype]
        torch.testing.assert_close(after.states.double(), wanted.states, equal_nan=True, **of_states)
        assert torch.equal(after.windows.double().nan_to_num(9.0), wanted.windows.nan_to_num(9.0))

    def part(self, rows: slice, tokens: slice, lengths: list[int]) -> RunCase:
        """The case of some rows and tokens alone, on the same states."""
        part = RunCase.__new__(RunCase)
        part.__dict__.update(self.__dict__)
        part.inputs = type(self.inputs)(*(x[rows, tokens] for x in values(self.inputs)))
        slots = RowSet.of(self.state.slots.rows[rows], self.state.lengths.device)
        part.state = replace(self.state, slots=slots, lengths=torch.tensor(lengths))
        return part


def copied_state(state: ExtendOperands, dtype: torch.dtype | None = None) -> ExtendOperands:
    """With pools of its own."""
    pools: dict[str, Any] = {name: getattr(state, name) for name in ("states", "windows")}
    return replace(state, **{name: x.to(dtype or x.dtype, copy=True) for name, x in pools.items()})


def check_a_row_alone(case: RunCase) -> None:
    """A row gives, bit for bit, alone and without padding what it gives in its batch; padding has outputs of 0."""
    together, left = case.run()
    for b, length in enumerate(case.state.lengths.tolist()):
        assert (together[b, length:] == 0).all()
        row, slot = slice(b, b + 1), case.state.slots.rows[b]
        alone, left_alone = case.part(row, slice(0, length), [length]).run()
        assert torch.equal(alone[0], together[b, :length])
        assert torch.equal(left_alone.states[slot], left.states[slot])
        assert torch.equal(left_alone.windows[slot], left.windows[slot])


def check_two_parts(case: RunCase, at: int, length: int) -> None:
    """A run of ``length`` tokens in two extends gives what it gives in one, within rounding."""
    whole, left = case.run()
    first, middle = case.part(slice(0, 1), slice(0, at), [at]).run()
    second = case.part(slice(0, 1), slice(at, length), [length - at])
    second.state = replace(second.state, states=middle.states, windows=middle.windows)
    out, last = second.run()
    torch.testing.assert_close(torch.cat([first, out], 1), whole[:, :length], **TOLERANCE[whole.dtype])
    torch.testing.assert_close(last.states, left.states, equal_nan=True, **TOLERANCE[torch.float32])
    assert torch.equal(last.windows.nan_to_num(9.0), left.windows.nan_to_num(9.0))
