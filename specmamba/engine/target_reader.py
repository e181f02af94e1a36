"""Reading the target's hidden states and draft-head features of given texts, to train draft heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.core import PrefillChunk
from specmamba.draft.drafter import NoDrafter
from specmamba.engine.engine import Engine
from specmamba.errors import RequestError
from specmamba.layers.context import ForwardContext
from specmamba.models.base import Target, TargetOutput
from specmamba.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The target's outputs for the first T tokens of a text."""

    hidden: Tensor  # [T, H], after the final norm
    features: Tensor  # [T, F]


OnStates = Callable[[int, TargetStates], None]


class _Recorder(NoDrafter):
    """Replaces both the target, whose last output it keeps, and the drafter, which sees what each row has run."""

    def __init__(self, target: Target, texts: Sequence[tuple[int, ...]], on_states: OnStates) -> None:
        self.vocab_size, self.hidden_size = target.vocab_size, target.hidden_size
        self.embed, self.logits, self.read_features = target.embed, target.logits, target.read_features
        self._target, self._on_states = target, on_states
        self.is_watched = True
        self._last: TargetOutput | None = None
        self._missing: dict[tuple[int, ...], list[int]] = {}  # indices by text; equal texts have equal states
        for index in reversed(range(len(texts))):
            self._missing.setdefault(texts[index], []).append(index)
        self._texts: dict[int, tuple[int, ...]] = {}  # by row
        self._parts: dict[int, list[TargetOutput]] = {}

    def forward(self, tokens: Tensor, context: ForwardContext) -> TargetOutput:
        self._last = self._target.forward(tokens, context)
        return self._last

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self._texts[row], self._parts[row] = tuple(tokens), []

    def extend(self, chunk: PrefillChunk, features: Tensor) -> None:
        assert self._last is not None
        lengths = chunk.lengths.tolist()
        for i, (row, length) in enumerate(zip(chunk.rows, lengths, strict=True)):
            parts, text = self._parts[row], self._texts[row]
            parts.append(TargetOutput(*(x[i, :length].clone() for x in self._last)))
            if sum(len(part.hidden) for part in parts) == len(text) - 1 and self._missing[text]:
                states = TargetStates(*(torch.cat(x) for x in zip(*parts, strict=True)))
                self._on_states(self._missing[text].pop(), states)


def read_target(engine: Engine, texts: Sequence[Sequence[int]], layers: tuple[int, ...], on_states: OnStates) -> None:
    """Run texts through the target of an idle engine without a prefix cache; the engine is restored afterwards.

    Args:
        engine: the engine.
        texts: token ids; all but the last token of each text are run.
        layers: ``features`` are the residual streams before these layers; empty: the hidden states.
        on_states: called with the index of each text and its states, in the order in which texts finish.

    Raises:
        RequestError: before anything is run: a text has fewer than two tokens, does not fit, or has a token that is not
            in the vocabulary; or later: the target's outputs are not finite.
        UnsupportedModelError: the target has no such layers.
    """
    for text in texts:
        engine.check_prompt(text)
        if len(text) < 2:
            raise RequestError("a text needs two tokens: the last one is not run")
    runner, target = engine.runner, engine.model.target
    drafter, recorder = runner.drafter, _Recorder(target, list(map(tuple, texts)), on_states)
    target.read_features(layers)
    runner.drafter, runner.target = recorder, recorder
    try:
        _run(engine, texts)
    finally:
        runner.drafter, runner.target = drafter, target
        target.read_features(engine.feature_layers)


def _run(engine: Engine, texts: Sequence[Sequence[int]]) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    names = [f"read-{i}" for i in range(len(texts))]
    waiting = list(zip(names, texts, strict=True))[::-1]
    try:
        while waiting or engine.has_unfinished_requests:
            while waiting and len(engine.scheduler.waiting) < engine.config.max_queued_requests:
                engine.add_request(*waiting.pop(), params)
            for delta in engine.step():
                if delta.error is not None:
                    raise RequestError(f"text {names.index(delta.request_id) + 1}: {delta.error}")
    finally:
        for name in names:
            engine.abort(name)
