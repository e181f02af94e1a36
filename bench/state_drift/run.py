"""The runs behind ``specmamba bench state-drift``, and what is compared.

One engine at a time replays all texts; what the float32 run says is kept in a file, so that neither two models nor the
logits of a long text need to fit the memory together. With x the float32 run's and y the other's, at every token

    logits error      rms(y - x) / rms(x - mean(x)), rms and mean over the vocabulary
    flipped           argmax(y) != argmax(x): greedy decoding would choose another token here

and at ``NUM_SAMPLES`` evenly spaced tokens, over the checkpoints of all layers as they stand in their slots,

    state error       |Y - X| / |X|, Frobenius norms; of all layers together, and the largest of a single layer

Texts are replayed: a flipped token leads no text away, so every token compares states that have seen the same input.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specmamba import LLM
from specmamba.bench.prefix.texts import read_source
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.measure.report import progress_bar

if TYPE_CHECKING:
    from specmamba.bench.state_drift.__main__ import StateDriftConfig

STATE_DTYPES = ("float32", "bfloat16", "float16")  # the first is what the others are compared with
NUM_SAMPLES = 16  # of states, per text
NUM_PARTS = 4  # of a text, to see whether an error grows


@dataclass
class Drift:
    """What has been compared of one type; an entry per text and token, or per text and sample."""

    logits_error: list[float] = field(default_factory=list)
    flipped: list[bool] = field(default_factory=list)
    state_error: list[float] = field(default_factory=list)
    layer_error: list[float] = field(default_factory=list)
    largest_state: float = 0.0  # element, in absolute value


def measure(config: StateDriftConfig) -> tuple[dict[str, object], list[dict[str, Any]]]:
    """The engine's description, and the figures by type.

    Raises:
        SpecmambaError: the flags do not allow to start, or the model has no recurrent state, or too short a context.
    """
    description: dict[str, object] = {}
    results = []
    with (
        tempfile.TemporaryDirectory(prefix="specmamba-drift-") as folder,
        progress_bar("replaying", len(STATE_DTYPES) * config.texts * config.tokens) as advance,
    ):
        kept: list[Kept] = []
        for name in STATE_DTYPES:
            with LLM(**config.model_dump(include=set(EngineConfig.model_fields)) | {"mamba_ssm_dtype": name}) as llm:
                texts = _texts(config, llm)
                kept = kept or [Kept(Path(folder, str(i)), llm, config.tokens) for i in range(config.texts)]
                drift = Drift()
                for text, reference in zip(texts, kept, strict=True):
                    _replay(llm, text, reference, drift, name == STATE_DTYPES[0], advance)
                description = description or llm.engine.describe()
                results.append(_figures(name, drift, config, llm))
    return description, results


class Kept:
    """What the float32 run said of one text: logits of every token, checkpoints at the sampled ones."""

    def __init__(self, folder: Path, llm: LLM, num_tokens: int) -> None:
        folder.mkdir()
        state = llm.engine.pools.states.recurrent[:, 0].shape
        self.samples = {num_tokens * (i + 1) // NUM_SAMPLES - 1: i for i in range(NUM_SAMPLES)}
        self.logits = _on_disk(folder / "logits", (num_tokens, llm.engine.vocab_size))
        self.states = _on_disk(folder / "states", (NUM_SAMPLES, *state))


def _on_disk(file: Path, shape: Sequence[int]) -> Tensor:
    size = torch.Size(shape)
    return torch.from_file(str(file), shared=True, size=size.numel(), dtype=torch.float32).view(size)


def _texts(config: StateDriftConfig, llm: LLM) -> list[list[int]]:
    """Real text, the same for every engine. Raises ConfigError."""
    if config.tokens >= llm.engine.context_length:
        raise ConfigError(
            f"--tokens {config.tokens}: with the first token that is more than the {llm.engine.context_length} that fit"
        )
    if not llm.engine.pools.states.recurrent.shape[0]:
        raise ConfigError(f"{llm.engine.model.architecture} keeps no recurrent state: nothing can drift")
    source = read_source(config.prompts, llm.engine.tokenizer)
    draw = random.Random(config.seed)
    return [list(source.cut(config.tokens + 1, draw)) for _ in range(config.texts)]


def _replay(
    llm: LLM, text: list[int], kept: Kept, drift: Drift, is_reference: bool, advance: Callable[[], None]
) -> None:
    """Lead plain decoding along a text, and keep or compare what it says."""
    states, scheduler = llm.engine.pools.states.recurrent, llm.engine.scheduler
    position = 0

    def see(logits: Tensor) -> None:
        nonlocal position
        sample = kept.samples.get(position)
        checkpoint = None if sample is None else states[:, scheduler.verifying[0].held_slot].float().cpu()
        if checkpoint is not None:
            drift.largest_state = max(drift.largest_state, float(checkpoint.abs().max()))
        if is_reference:
            kept.logits[position] = logits
            if checkpoint is not None:
                kept.states[sample] = checkpoint
        else:
            _compare_logits(drift, kept.logits[position], logits)
            if checkpoint is not None:
                _compare_states(drift, kept.states[sample], checkpoint)
        position += 1
        advance()

    llm.workbench.logits_along(text[:1], text[1:], see)


def _compare_logits(drift: Drift, expected: Tensor, got: Tensor) -> None:
    spread = (expected - expected.mean()).square().mean().sqrt()
    drift.logits_error.append(float((got - expected).square().mean().sqrt() / spread))
    drift.flipped.append(bool(got.argmax() != expected.argmax()))


def _compare_states(drift: Drift, expected: Tensor, got: Tensor) -> None:
    """[layers, Hv, K, V] each."""
    error, size = (x.square().sum((1, 2, 3)) for x in (got - expected, expected))
    smallest = torch.finfo(torch.float32).tiny  # before the first fold a checkpoint is zero
    drift.state_error.append(float((error.sum() / size.sum().clamp(min=smallest)).sqrt()))
    drift.layer_error.append(float((error / size.clamp(min=smallest)).sqrt().max()))


def _figures(name: str, drift: Drift, config: StateDriftConfig, llm: LLM) -> dict[str, Any]:
    """Of one type, ready for JSON."""
    figures: dict[str, Any] = {
        "state_dtype": name,
        "state_bytes_per_slot": llm.engine.model.cache_shape.state_bytes_per_slot,
        "largest_state_element": drift.largest_state,
    }
    if not drift.logits_error:  # it is what the others are compared with
        return figures
    logits = torch.tensor(drift.logits_error).view(config.texts, config.tokens)
    flipped = torch.tensor(drift.flipped).view(config.texts, config.tokens)
    states, layers = (torch.tensor(x).view(config.texts, NUM_SAMPLES) for x in (drift.state_error, drift.layer_error))
    return figures | {
        "state_error": float(states.mean()),
        "state_error_at_the_end": float(states[:, -1].mean()),
        "state_error_largest_layer": float(layers.max()),
        "state_error_by_part": _by_part(states),
        "logits_error": float(logits.mean()),
        "logits_error_largest": float(logits.max()),
        "logits_error_by_part": _by_part(logits),
        "flipped": int(flipped.sum()),
        "flipped_share": float(flipped.float().mean()),
        "flipped_share_by_part": _by_part(flipped.float()),
    }


def _by_part(x: Tensor) -> list[float]:
    """Means over quarters of the texts, x [texts, tokens]."""
    return [float(part.mean()) for part in x.tensor_split(NUM_PARTS, dim=1)]
