"""How far a text drifts when recurrent states, or keys and values, are kept in fewer bits.

    specmamba bench state-drift [--of states|stored-states|kv-cache] [--tokens 4000] [--texts 3]
                                [--json FILE] [any engine flag]

This is the cost of ``--mamba-ssm-dtype``, with ``--of stored-states`` of ``--hicache-state-dtype``, and with
``--of kv-cache`` of ``--kv-cache-dtype``.

The same real text is replayed with each type by plain decoding: with records a state is rounded once for every full
list of pending records, with ``--speculative-state snapshots`` after every token, keys and values when they are stored,
and stored states every ``RESUME_INTERVAL`` tokens, as if the text went on from a tier below the pools there.
Weights and activations are float32 unless ``--dtype`` says otherwise, so that nothing else is rounded. With x of the
first type's run and y of the other, at every token:

    logits error      rms(y - x) / rms(x - mean(x)), rms and mean over the vocabulary
    flipped           argmax(y) != argmax(x): greedy decoding would choose another token here

and at ``NUM_SAMPLES`` evenly spaced tokens, over the checkpoints of all layers as they stand in their slots:

    state error       |Y - X| / |X|, Frobenius norms; of all layers together, and the largest of a single layer

Because texts are replayed, a flipped token does not change the text: at every token the compared states have seen the
same input. One engine at a time replays all texts, and the logits and states of the first run are kept in files,
because neither two models nor the logits of a long text need to fit the memory together.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.report import JsonOption, NoRadixCache, machine, progress_bar, versions

if TYPE_CHECKING:  # --help must not wait for torch
    from torch import Tensor

    from specmamba import LLM

PROG = "specmamba bench state-drift"
# What is kept in fewer bits: its flag, and the types that are compared with the first.
TYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "states": ("mamba_ssm_dtype", ("float32", "bfloat16", "float16")),
    "stored-states": ("hicache_state_dtype", ("float32", "bfloat16", "float16")),
    "kv-cache": ("kv_cache_dtype", ("auto", "int8", "fp8_e4m3")),
}
NUM_SAMPLES = 16  # of states, per text
RESUME_INTERVAL = 250  # tokens
NUM_PARTS = 4  # of a text, to see whether an error grows


class StateDriftConfig(JsonOption):
    """How far states, or keys and values, in fewer bits lead a text away from those in float32."""

    of: Annotated[
        Literal["states", "stored-states", "kv-cache"],
        Field(description="what is kept in fewer bits: recurrent states, those in host memory and on disk, or KV"),
    ] = "states"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    speculative_algorithm: Annotated[
        Literal["none"], Field(description="text is replayed by plain decoding, so that all types round alike")
    ] = "none"
    disable_radix_cache: NoRadixCache = True
    tokens: Annotated[int, Field(ge=16, description="tokens of a text that are replayed")] = 4000
    texts: Annotated[int, Field(ge=1, description="texts; each starts from an empty state")] = 3
    prompts: Annotated[
        Path | None,
        Field(description="take the text from the prompts of this file; none: bundled ones and held-out Python files"),
    ] = None

    @model_validator(mode="after")
    def _all_types_are_run(self) -> StateDriftConfig:
        flag = self.varied[0]
        if flag in self.model_fields_set:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name}: this measures all of its types, one after the other; drop it")
        return self

    @property
    def varied(self) -> tuple[str, tuple[str, ...]]:
        """The flag that is varied, as a field, and its types."""
        return TYPES[self.of]


@dataclass
class Drift:
    """Errors of one type of states: an entry per text and token, or per text and sample."""

    logits_error: list[float] = field(default_factory=list)
    flipped: list[bool] = field(default_factory=list)
    state_error: list[float] = field(default_factory=list)
    layer_error: list[float] = field(default_factory=list)
    largest_state: float = 0.0  # element, in absolute value


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(
        PROG, StateDriftConfig, arguments, lambda config: put_out(config, measure_and_report(config), print_report)
    )


def measure_and_report(config: StateDriftConfig) -> dict[str, Any]:
    """Measure all types; the report as a JSON object.

    Raises:
        SpecmambaError: the flags do not allow to start, or the model has no recurrent state or too short a context.
    """
    description, results = _measure(config)
    return {
        "model": Path(str(description["model"])).name,
        "architecture": description["architecture"],
        "parameters": description["parameters"],
        "dtype": description["dtype"],
        "device": description["device"],
        "speculative_state": description["speculative_state"],
        "of": config.of,
        "machine": machine(),
        "versions": versions(),
        "seed": config.seed,
        "texts": config.texts,
        "tokens_per_text": config.tokens,
        "results": results,
    }


def _measure(config: StateDriftConfig) -> tuple[dict[str, object], list[dict[str, Any]]]:
    """The engine's description, and the figures by type."""
    from specmamba import LLM

    description: dict[str, object] = {}
    results = []
    flag, types = config.varied
    with (
        tempfile.TemporaryDirectory(prefix="specmamba-drift-") as folder,
        progress_bar("replaying", len(types) * config.texts * config.tokens) as advance,
    ):
        kept: list[Kept] = []
        for name in types:
            varied = {} if config.of == "stored-states" else {flag: name}
            stored = name if config.of == "stored-states" else "float32"
            with LLM(**config.model_dump(include=set(EngineConfig.model_fields)) | varied) as llm:
                texts = _texts(config, llm)
                kept = kept or [Kept(Path(folder, str(i)), llm, config.tokens) for i in range(config.texts)]
                drift = Drift()
                for text, reference in zip(texts, kept, strict=True):
                    _replay(llm, text, reference, drift, name == types[0], stored, advance)
                description = description or llm.engine.describe()
                results.append(_figures(name, drift, config, llm))
    return description, results


class Kept:
    """The first type's run of one text, in files: logits of every token, checkpoints at the sampled tokens."""

    def __init__(self, folder: Path, llm: LLM, num_tokens: int) -> None:
        folder.mkdir()
        state = llm.engine.pools.states.recurrent[:, 0].shape
        self.samples = {num_tokens * (i + 1) // NUM_SAMPLES - 1: i for i in range(NUM_SAMPLES)}
        self.logits = _on_disk(folder / "logits", (num_tokens, llm.engine.vocab_size))
        self.states = _on_disk(folder / "states", (NUM_SAMPLES, *state))


def _on_disk(file: Path, shape: Sequence[int]) -> Tensor:
    import torch

    size = torch.Size(shape)
    return torch.from_file(str(file), shared=True, size=size.numel(), dtype=torch.float32).view(size)


def _texts(config: StateDriftConfig, llm: LLM) -> list[list[int]]:
    """Cut real text, the same for every engine. Raises ConfigError."""
    from specmamba.bench.prefix.texts import read_source

    if config.tokens >= llm.engine.context_length:
        raise ConfigError(
            f"--tokens {config.tokens}: with the first token that is more than the {llm.engine.context_length} that fit"
        )
    if not llm.engine.pools.states.recurrent.shape[0]:
        raise ConfigError(f"{llm.engine.model.architecture} keeps no recurrent state: nothing can drift")
    if config.of == "kv-cache" and not llm.engine.pools.kv.k:
        raise ConfigError(f"{llm.engine.model.architecture} keeps no keys and values: nothing can drift")
    source = read_source(config.prompts, llm.engine.tokenizer)
    draw = random.Random(config.seed)
    return [list(source.cut(config.tokens + 1, draw)) for _ in range(config.texts)]


def _replay(
    llm: LLM, text: list[int], kept: Kept, drift: Drift, is_reference: bool, stored: str, advance: Callable[[], None]
) -> None:
    """Replay a text by plain decoding; keep the reference's logits and states, or compare with them.

    Every ``RESUME_INTERVAL`` tokens the checkpoint is rounded to the type ``stored``.
    """
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
        if position % RESUME_INTERVAL == 0:
            _round(states[:, scheduler.verifying[0].held_slot], stored)
        advance()

    llm.workbench.logits_along(text[:1], text[1:], see)


def _round(state: Tensor, name: str) -> None:
    """Round a checkpoint in its place, as tiers below the pools store it."""
    import torch

    dtype = getattr(torch, name)
    largest = torch.finfo(dtype).max
    state.copy_(state.clamp(-largest, largest).to(dtype))


def _compare_logits(drift: Drift, expected: Tensor, got: Tensor) -> None:
    """Note the error of logits [V]."""
    spread = (expected - expected.mean()).square().mean().sqrt()
    drift.logits_error.append(float((got - expected).square().mean().sqrt() / spread))
    drift.flipped.append(bool(got.argmax() != expected.argmax()))


def _compare_states(drift: Drift, expected: Tensor, got: Tensor) -> None:
    """Note the error of checkpoints [layers, Hv, K, V]."""
    import torch

    error, size = (x.square().sum((1, 2, 3)) for x in (got - expected, expected))
    smallest = torch.finfo(torch.float32).tiny  # before the first fold a checkpoint is zero
    drift.state_error.append(float((error.sum() / size.sum().clamp(min=smallest)).sqrt()))
    drift.layer_error.append(float((error / size.clamp(min=smallest)).sqrt().max()))


def _figures(name: str, drift: Drift, config: StateDriftConfig, llm: LLM) -> dict[str, Any]:
    """The figures of one type as a JSON object; the reference has no errors."""
    import torch

    shape = llm.engine.model.cache_shape
    figures: dict[str, Any] = {"kv_dtype": name, "kv_bytes_per_token": shape.kv_bytes_per_token}
    if config.of != "kv-cache":
        shape = replace(shape, state_dtype=getattr(torch, name))  # stored, or in the pool
        figures = {"state_dtype": name, "state_bytes_per_slot": shape.state_bytes_per_slot}
    figures["largest_state_element"] = drift.largest_state
    if not drift.logits_error:
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
    """Means over the quarters of the texts, x [texts, tokens]."""
    return [float(part.mean()) for part in x.tensor_split(NUM_PARTS, dim=1)]


def print_report(report: Report) -> None:
    """Print a table with a row per type of states."""
    page, total = Page(), report["texts"] * report["tokens_per_text"]
    of_states = report["of"] != "kv-cache"
    page.lines(
        f"{report['model']}, {report['dtype']} on {report['device']}, {report['speculative_state']}: {report['texts']} "
        f"texts of {report['tokens_per_text']:,} tokens, compared with "
        f"{'states in float32' if of_states else 'keys and values in the type of the model'}"
    )
    page.table(
        (
            *(("states", "KiB\nper slot") if of_states else ("KV", "bytes\nper token")),
            *("largest\nelement", "state\nerror", "at the\nend", "worst\nlayer"),
            *("logits error\nby quarter", "other choice\nby quarter, %", f"of {total:,}"),
        ),
        [_row(figures) for figures in report["results"]],
    )


def _row(figures: Report) -> list[str]:
    if "kv_dtype" in figures:
        row = [figures["kv_dtype"], f"{figures['kv_bytes_per_token']:,}"]
    else:
        row = [figures["state_dtype"], f"{figures['state_bytes_per_slot'] / 1024:,.0f}"]
    row.append(f"{figures['largest_state_element']:.3g}")
    if "state_error" not in figures:
        return row
    errors = ("state_error", "state_error_at_the_end", "state_error_largest_layer")
    return [
        *row,
        *(f"{figures[name]:.1e}" for name in errors),
        " ".join(f"{value:.1e}" for value in figures["logits_error_by_part"]),
        " ".join(f"{100 * value:.2f}" for value in figures["flipped_share_by_part"]),
        str(figures["flipped"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
