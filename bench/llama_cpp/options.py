"""The flags of ``specmamba bench llama-cpp``, and the ways of decoding that they ask for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from specmamba.config import MAX_DRAFT_TOKENS, EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.command_line import describe_validation_error
from specmamba.measure.acceptance.options import AXES
from specmamba.measure.report import Count, JsonOption, NoRadixCache, split_numbers
from specmamba.measure.weight_forms import FORM_FIELDS, form_flags, gguf_flags

Format = Literal["bf16", "int8"]
GGUF_TYPES: dict[Format, str] = {"bf16": "BF16", "int8": "Q8_0"}
SAME_FILE = "gguf"  # in a pair: this runtime is given llama.cpp's file
PLAIN, TUNED, ADAPTIVE = "plain", "tuned tree", "adaptive"
# Flags of the engine that this command sets itself, and what to use instead.
_BOTH_DRAFT_WITH_MTP = "both sides draft with the checkpoint's MTP head"
DECIDED_HERE = {
    **dict.fromkeys(FORM_FIELDS, "use --formats or --pairs"),
    "device": "both sides run on the CPU",
    "speculative_algorithm": "use --drafts and --trees",
    "speculative_num_steps": "use --drafts",
    "speculative_eagle_topk": "use --trees",
    "speculative_num_draft_tokens": "use --trees",
    "speculative_draft_model_path": _BOTH_DRAFT_WITH_MTP,
    "speculative_draft_model_revision": _BOTH_DRAFT_WITH_MTP,
    "speculative_ngram_min_match_window_size": _BOTH_DRAFT_WITH_MTP,
    "speculative_ngram_max_match_window_size": _BOTH_DRAFT_WITH_MTP,
    "speculative_ngram_corpus": _BOTH_DRAFT_WITH_MTP,
    "max_running_requests": "use --batch",
    "context_length": "it follows from --max-tokens, --ttft and the prompts",
    "max_total_tokens": "it follows from --batch and the context",
    "max_mamba_cache_size": "it follows from --batch",
}


_FIXED = {"speculative_algorithm": "mtp", "speculative_adaptive": "off"}


def _list(value: object) -> object:
    return tuple(value.split(",")) if isinstance(value, str) else value


class LlamaCppBenchConfig(JsonOption):
    """Decoding and time to first token beside llama.cpp, in turns on one machine."""

    disable_radix_cache: NoRadixCache = True
    llama_cpp: Annotated[Path | None, Field(description="build folder of llama.cpp; has bin/llama-server")] = None
    llama_cpp_source: Annotated[
        Path | None, Field(description="its sources, with convert_hf_to_gguf.py; none: what the build was made from")
    ] = None
    gguf_folder: Annotated[
        Path | None, Field(description="keep converted models here for the next run; none: a temporary folder")
    ] = None
    formats: Annotated[
        tuple[Format, ...],
        BeforeValidator(_list),
        Field(min_length=1, description="bf16 against BF16, int8 against Q8_0"),
    ] = ("bf16", "int8")
    pairs: list[str] = Field(
        [],
        description="in place of --formats: form:TYPE ..., a form of specmamba's weights (gguf: the same file) "
        "and llama.cpp's type, such as int4:Q4_K_M int4-g128:Q4_K_M gguf:Q4_K_M; may be given again",
    )
    temperatures: Annotated[
        tuple[Annotated[float, Field(ge=0, le=2)], ...],
        BeforeValidator(split_numbers),
        Field(min_length=1, description="sampling temperatures; 0 is greedy"),
    ] = (0.0, 0.8)
    batch: Annotated[
        tuple[Annotated[int, Field(ge=1, le=256)], ...],
        BeforeValidator(split_numbers),
        Field(min_length=1, description="requests at a time, and slots of llama.cpp"),
    ] = (1,)
    drafts: Annotated[
        tuple[Annotated[int, Field(ge=0, le=16)], ...],
        BeforeValidator(split_numbers),
        Field(min_length=1, description="drafted tokens of both sides, chains of the MTP head; 0: plain decoding"),
    ] = (0, 1, 2, 3)
    trees: Annotated[
        str, Field(description="draft trees of specmamba: steps,topk,nodes ..., such as 4,4,8; empty: none")
    ] = "2,2,4 4,4,8"
    rounds: Annotated[Count, Field(description="rounds; medians over them are reported, with ranges")] = 5
    num_prompts: Annotated[Count, Field(description="prompts in a round, at the least a batch")] = 4
    prompts: Annotated[Path | None, Field(description="prompts of this file (JSON lines, or ShareGPT)")] = None
    max_tokens: Annotated[int, Field(ge=2, description="new tokens of every request")] = 128
    ttft: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...],
        BeforeValidator(split_numbers),
        Field(description="also measure the time to the first token of prompts of these lengths, such as 512,2048"),
    ] = ()
    engine_threads: Annotated[
        int | None,
        Field(ge=0, le=1024, description="threads of specmamba, if not those of llama.cpp; 0: its own choice"),
    ] = None
    startup_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds that an engine or a server may take to load")
    ] = 600.0
    answer_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds that it may take to answer a batch")
    ] = 1800.0

    @property
    def llama_threads(self) -> int:
        """``--num-threads``, or the cores that this process may use."""
        return self.num_threads or len(os.sched_getaffinity(0))

    @property
    def own_threads(self) -> int | None:
        """Threads of specmamba; None: it chooses."""
        return self.llama_threads if self.engine_threads is None else self.engine_threads or None


@dataclass(frozen=True, slots=True)
class Pair:
    """Weights that are compared: the form of this runtime's, and llama.cpp's type of a GGUF file."""

    form: str  # SAME_FILE: that file
    gguf_type: str

    def __str__(self) -> str:
        return f"{self.form}:{self.gguf_type}"

    def flags(self, file: Path) -> dict[str, Any]:
        """Flags of this runtime's engine; ``file``: of llama.cpp. Raises ConfigError: the form cannot be run."""
        return gguf_flags(file) if self.form == SAME_FILE else form_flags(self.form, "--pairs")


def pairs_of(config: LlamaCppBenchConfig) -> list[Pair]:
    """The weights to compare.

    Raises:
        ConfigError: a pair is none, or its form cannot be run.
    """
    if not config.pairs:
        return [Pair(form, GGUF_TYPES[form]) for form in dict.fromkeys(config.formats)]
    if "formats" in config.model_fields_set:
        raise ConfigError("--formats and --pairs both say what to compare: drop one")
    items = [item for given in config.pairs for item in re.split("[, ]+", given)]
    return [_pair(item) for item in dict.fromkeys(items)]


def _pair(item: str) -> Pair:
    found = re.fullmatch(r"([a-z0-9-]+):([A-Z][A-Z0-9_]*)", item)
    if found is None:
        raise ConfigError(f"--pairs: {item!r} is not form:TYPE, such as int8:Q8_0 or gguf:Q4_K_M")
    pair = Pair(*found.groups())
    pair.flags(Path())
    return pair


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of decoding. ``num_drafts``: of a chain, 0 for plain decoding; None: llama.cpp has no such way."""

    name: str
    num_drafts: int | None
    flags: dict[str, Any]  # of the engine


def modes_of(config: LlamaCppBenchConfig) -> list[Mode]:
    """The ways of decoding of this runtime; those with ``num_drafts`` are the ones of llama.cpp too.

    Raises:
        ConfigError: a tree is impossible, or a flag is given that this command sets.
    """
    given = [name for name in DECIDED_HERE if name in config.model_fields_set]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise ConfigError(f"{flag}: this command sets it; {DECIDED_HERE[given[0]]}")
    modes = [_chain(count) for count in dict.fromkeys(config.drafts)]
    modes += [_tree(item) for item in dict.fromkeys(config.trees.split())]
    if len(modes) > 1 or any(mode.num_drafts for mode in modes):
        modes.append(Mode(ADAPTIVE, None, {"speculative_algorithm": "mtp", "speculative_adaptive": "auto"}))
    if config.speculative_tree is not None:
        flags = {"speculative_algorithm": "mtp", "speculative_tree": str(config.speculative_tree)}
        modes.append(Mode(TUNED, None, flags))
    longest = max(mode.flags.get("speculative_num_steps", 0) for mode in modes) + 1
    if config.max_tokens <= longest:
        raise ConfigError(
            f"--max-tokens {config.max_tokens}: a step of these drafts may decide {longest}: nothing is left to time"
        )
    return modes


def _chain(count: int) -> Mode:
    if count == 0:
        return Mode(PLAIN, 0, {"speculative_algorithm": "none"})
    return Mode(f"MTP {count}", count, {**_FIXED, "speculative_num_steps": count})


def _tree(item: str) -> Mode:
    sizes = item.split(",")
    if len(sizes) != len(AXES) or not all(size.isdecimal() for size in sizes):
        raise ConfigError(f"--trees: {item!r} is not steps,topk,nodes, such as 4,4,8")
    flags: dict[str, Any] = {**_FIXED, **dict(zip(AXES.values(), map(int, sizes), strict=True))}
    try:
        EngineConfig(**flags)
    except ValidationError as error:
        raise ConfigError(f"--trees {item}: {describe_validation_error(error)}") from None
    return Mode(f"tree {item}", None, flags)


def engine_flags(
    config: LlamaCppBenchConfig, weights: dict[str, Any], mode: Mode, batch: int, context: int
) -> dict[str, Any]:
    """The keywords of ``LLM`` for one engine, ready for JSON.

    Args:
        config: the flags of this command.
        weights: flags of their form.
        mode: the way of decoding.
        batch: requests at a time.
        context: tokens of one request, prompt and output, at the most.
    """
    fields = {name for name in EngineConfig.model_fields if name not in DECIDED_HERE}
    kept = {name for name in fields if not name.startswith("speculative_")}
    if mode.num_drafts != 0:
        kept |= {"speculative_accept", "speculative_state", "speculative_draft_model_quantization"}
    return {
        **config.model_dump(mode="json", include=kept),
        **weights,
        **mode.flags,
        "device": "cpu",
        "num_threads": config.own_threads,
        "max_running_requests": batch,
        "context_length": context,
        "max_total_tokens": batch * (context + MAX_DRAFT_TOKENS),
        "max_mamba_cache_size": batch,
    }
