"""What the benchmarks that run texts with and without drafts share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specmamba.bench.prompts import PromptText, bundled_texts, read_texts
from specmamba.bench.report import NoRadixCache, ReportOptions
from specmamba.config import EngineConfig
from specmamba.core import Temperature
from specmamba.errors import ConfigError

PLAIN = "plain"
PLAIN_FLAGS: dict[str, Any] = {"speculative_algorithm": "none"}
LOOPING = 0.5  # share of distinct 4-grams below which acceptance says little
WITHOUT_SHAPE = set(EngineConfig.model_fields) - {
    *("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
    *("speculative_tree", "speculative_algorithm"),
}


class TextOptions(ReportOptions):
    """The engine's flags, where a report goes, and which texts are run."""

    disable_radix_cache: NoRadixCache = True
    prompts: Annotated[
        Path | None,
        Field(description='JSON lines {"prompt": ..., "continuation": ...}, or ShareGPT conversations; none: bundled'),
    ] = None
    temperature: Temperature = 0.8
    replay: Annotated[
        bool, Field(description="take the output from the prompts' continuations: acceptance on real text")
    ] = False


def texts_of(config: TextOptions) -> list[PromptText]:
    """The prompts to run. Raises ConfigError: the file is no file of prompts, or none of them can be replayed."""
    texts = bundled_texts() if config.prompts is None else read_texts(config.prompts)
    if config.replay and not any(text.continuation for text in texts):
        where = "the bundled prompts" if config.prompts is None else str(config.prompts)
        raise ConfigError(f'--replay: {where}: no prompt has a "continuation" to replay')
    return texts


def seed_of(seed: int, number: int) -> int:
    """The seed of the number-th request of a run with ``--seed``."""
    return (seed * 1_000_003 + number) % (1 << 63)


def sampling_name(temperature: float | None) -> str:
    """How tokens were chosen; None: they were given."""
    return "replayed text" if temperature is None else f"temperature {temperature:g}"


def looping_warning(share: float, is_replay: bool) -> list[str]:
    """A line where text repeats itself; ``share`` is that of distinct 4-grams."""
    if share >= LOOPING:
        return []
    advice = "" if is_replay else ": raise --temperature, or measure on real text with --replay"
    return [f"warning: text loops ({share:.2f} distinct 4-grams), acceptance is flattered{advice}"]


def model_name(description: dict[str, object]) -> str:
    """The model of ``Engine.describe()``, without the folders that it lies in."""
    return Path(str(description["model"])).name
