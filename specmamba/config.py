"""The configuration of the engine, declared once.

These classes are the command line, the environment, the TOML file and the keyword arguments of ``LLM``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from specmamba.flags.model_flags import GPU_DEFAULTS as GPU_DEFAULTS
from specmamba.flags.model_flags import ModelFlags
from specmamba.flags.other_names import own_value
from specmamba.flags.settings import CommandLine as CommandLine  # tools without an engine find it here

DEMO_MODEL = Path(__file__).parent / "demo"

Algorithm = Literal["auto", "none", "mtp", "eagle", "eagle3", "dflash", "draft-model", "ngram", "suffix"]
TEXT_ALGORITHMS = ("ngram", "suffix")  # they draft from texts
WEIGHTLESS = ("none", *TEXT_ALGORITHMS)
MAX_DRAFT_TOKENS = 64
DEFAULT_LARGEST = 64  # requests of the largest captured step without --cuda-graph-max-bs
FORM_FLAG = "--speculative-draft-model-quantization"


class SuffixRules(NamedTuple):
    """How suffix drafts are made: the flags ``--speculative-suffix-*``."""

    max_match: int = 64
    factor: float = 6.0
    min_probability: float = 0.01
    shared_mib: int = 64


class EngineConfig(ModelFlags):
    """The flags of the engine: model, memory, prefix cache, scheduling, drafting."""

    speculative_algorithm: Annotated[
        Algorithm,
        BeforeValidator(own_value("speculative_algorithm")),
        Field(
            description="how to draft; auto: with what --speculative-draft-model-path holds, else mtp if the "
            "checkpoint has an MTP head; NEXTN: mtp; ngram, suffix: from text"
        ),
    ] = "auto"
    speculative_draft_model_path: Annotated[
        str | None,
        Field(
            min_length=1, description="folder or hub id of a draft: an EAGLE, EAGLE-3 or DFlash head, or a small model"
        ),
    ] = None
    speculative_draft_model_revision: Annotated[
        str | None, Field(description="branch, tag or commit, when --speculative-draft-model-path is a hub id")
    ] = None
    speculative_draft_model_quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8"],
        Field(
            description="of the draft's matrices; auto: as the target's where these are quantized, else int8 where "
            "that is faster (bfloat16 on a CPU)"
        ),
    ] = "auto"
    speculative_num_steps: Annotated[
        int | None, Field(ge=1, le=63, description="depth of the draft below the root; none: 3 (ngram: 4, suffix: 8)")
    ] = None
    speculative_eagle_topk: Annotated[
        int | None,
        Field(
            ge=1,
            le=64,
            description="children per node of a draft tree; none: 1, a chain (ngram, suffix: 4)",
        ),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None,
        Field(ge=2, le=MAX_DRAFT_TOKENS, description="nodes of a draft, the root counted; none: from steps and topk"),
    ] = None
    speculative_tree: Annotated[
        Path | None, Field(description="draft trees from this file (see specmamba tune tree), by batch size")
    ] = None
    speculative_state: Annotated[
        Literal["records", "snapshots"],
        Field(description="what a verify keeps per node: small records, or whole states (for comparison)"),
    ] = "records"
    speculative_adaptive: Annotated[
        Literal["auto", "off"],
        Field(
            description="auto: drafts as large as pays, by measured costs and acceptance, or none; steps, topk and "
            "draft tokens are bounds. off: always the shape of the flags; so are trees of a file, and drafts on a GPU "
            "unless auto is given"
        ),
    ] = "auto"
    speculative_costs: Annotated[
        Path | None, Field(description="file of measured times of steps: read if it exists, else measured and written")
    ] = None
    speculative_accept: Annotated[
        Literal["auto", "target", "rejection"],
        Field(
            description="follow the target's own sample, or accept drawn drafts by their probabilities; auto: target "
            "for requests that bring a seed, rejection for others"
        ),
    ] = "auto"
    speculative_ngram_min_match_window_size: Annotated[
        int | None, Field(ge=1, le=64, description="ngram: tokens that must match at least; none: 1")
    ] = None
    speculative_ngram_max_match_window_size: Annotated[
        int | None, Field(ge=1, le=64, description="ngram: tokens that are compared at the most; none: 12")
    ] = None
    speculative_ngram_corpus: Annotated[
        Path | None, Field(description="ngram: a text file to draft from, besides the request's own text")
    ] = None

    speculative_suffix_max_match: Annotated[
        int | None, Field(ge=2, le=512, description="suffix: tokens of the longest known end of a text; none: 64")
    ] = None
    speculative_suffix_factor: Annotated[
        float | None,
        Field(gt=0, le=64, description="suffix: depth of a draft for each token of that end; none: 6"),
    ] = None
    speculative_suffix_min_probability: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="suffix: of a node, from the root on, by counts; none: 0.01 (adaptive sizes decide themselves)",
        ),
    ] = None
    speculative_suffix_shared_mib: Annotated[
        int | None,
        Field(
            ge=0,
            le=1 << 20,
            description="suffix: MiB for texts of other requests that may share cached prefixes; 0: their own texts "
            "only; none: 64",
        ),
    ] = None
    speculative_suffix_corpus: Annotated[
        Path | None, Field(description="suffix: a text file to draft from, besides the requests' texts")
    ] = None

    @model_validator(mode="after")
    def _drafting_flags_fit(self) -> Self:
        problem = _quantization_problem(self) or _speculation_problem(self) or _exactness_problem(self)
        if problem is not None:
            raise ValueError(problem)
        return self

    def on_device(self, device_type: str) -> Self:
        """As ``ModelFlags.on_device``; and exact texts are decided under the rule that never looks at drafts."""
        config = super().on_device(device_type)
        is_open = config.deterministic and config.speculative_accept == "auto"
        return config.model_copy(update={"speculative_accept": "target"}) if is_open else config

    @property
    def drafting_flags(self) -> list[str]:
        """The given flags that have no meaning without a drafter."""
        given = {
            "--speculative-num-steps": self.speculative_num_steps,
            "--speculative-eagle-topk": self.speculative_eagle_topk,
            "--speculative-num-draft-tokens": self.speculative_num_draft_tokens,
            "--speculative-tree": self.speculative_tree,
            "--speculative-accept": "given" if self.speculative_accept == "rejection" else None,
            FORM_FLAG: None if self.speculative_draft_model_quantization == "auto" else "given",
        }
        return [flag for flag, value in given.items() if value is not None]

    def describe_defaults(self, given: EngineConfig) -> list[str]:
        """Say which flags have defaults of the device, in the start-up report; ``given``: before ``on_device``."""
        changed = [name for name in GPU_DEFAULTS if getattr(self, name) != getattr(given, name)]
        flags = [f"--{name.replace('_', '-')} {getattr(self, name)}" for name in changed]
        where = "on a GPU" if self.tp_size == 1 else "with several ranks"
        return [f"{where}, where nothing else is given: {', '.join(flags)}"] if flags else []

    @property
    def largest_captured_batch(self) -> int:
        """Requests of the largest step that is captured; 0: none is."""
        if self.disable_cuda_graph:
            return 0
        return min(self.cuda_graph_max_bs or DEFAULT_LARGEST, self.max_running_requests)

    @property
    def is_adaptive(self) -> bool:
        """Whether the size of drafts is decided in each step."""
        return self.speculative_adaptive == "auto" and self.speculative_tree is None

    @property
    def has_shape(self) -> bool:
        """Whether flags give the shape of drafts, or its bounds."""
        shape = self.speculative_num_steps, self.speculative_eagle_topk, self.speculative_num_draft_tokens
        return self.speculative_tree is not None or any(value is not None for value in shape)

    @property
    def num_draft_steps(self) -> int:
        """Depth of the drafts below the root, for a drafter that drafts and no tree file."""
        if self.speculative_num_steps is not None:
            return self.speculative_num_steps
        if self.speculative_num_draft_tokens is not None and self.draft_topk == 1:
            return self.speculative_num_draft_tokens - 1
        return {"ngram": 4, "suffix": 8}.get(self.speculative_algorithm, 3)

    @property
    def draft_topk(self) -> int:
        """Largest number of children of a node; 1 is a chain."""
        if self.speculative_eagle_topk is not None:
            return self.speculative_eagle_topk
        return 4 if self.speculative_algorithm in TEXT_ALGORITHMS else 1

    @property
    def num_draft_nodes(self) -> int:
        """Nodes of a draft, the root counted, for a drafter that drafts and no tree file."""
        if self.speculative_num_draft_tokens is not None:
            return self.speculative_num_draft_tokens
        steps, topk = self.num_draft_steps, self.draft_topk
        return steps + 1 if topk == 1 else min(max(topk + 1, 2 * steps), largest_tree(steps, topk), MAX_DRAFT_TOKENS)

    @property
    def ngram_windows(self) -> tuple[int, int]:
        """The fewest tokens that must match for an n-gram draft, and the most that are compared."""
        fewest, most = self.speculative_ngram_min_match_window_size, self.speculative_ngram_max_match_window_size
        return fewest or 1, most or max(12, fewest or 1)

    @property
    def suffix_rules(self) -> SuffixRules:
        """How suffix drafts are made."""
        given = {name: getattr(self, f"speculative_suffix_{name}") for name in SuffixRules._fields}
        return SuffixRules(**{name: value for name, value in given.items() if value is not None})

    @property
    def draft_corpus(self) -> Path | None:
        """The text file that drafts come from."""
        return self.speculative_ngram_corpus or self.speculative_suffix_corpus

    @property
    def model_path(self) -> str:
        return self.model if self.model is not None else str(DEMO_MODEL)


def largest_tree(num_steps: int, topk: int) -> int:
    """Return the nodes of the largest tree, with ``topk`` children of ``topk`` nodes per step, the root counted."""
    return 1 + topk + (num_steps - 1) * topk * topk


def _quantization_problem(config: EngineConfig) -> str | None:
    """Return what is wrong with the flags of weights' forms, or None."""
    has_groups = "int4" in (config.quantization, config.speculative_draft_model_quantization)
    if config.quantization_group_size != 32 and not has_groups:
        return "--quantization-group-size: only int4 has groups; drop it, or choose --quantization int4"
    return None


def _exactness_problem(config: EngineConfig) -> str | None:
    """Return what has no exact form beside ``--deterministic``, likewise."""
    if not config.deterministic:
        return None
    given = {
        f"--tp-size {config.tp_size}": config.tp_size > 1,
        "--device cuda": config.device == "cuda",
        "--dtype float16": config.dtype == "float16",
        f"--mamba-ssm-dtype {config.mamba_ssm_dtype}": config.mamba_ssm_dtype != "float32",
        f"--hicache-state-dtype {config.hicache_state_dtype}": config.hicache_state_dtype != "float32",
        "--speculative-state snapshots": config.speculative_state == "snapshots",
        "--speculative-accept rejection": config.speculative_accept == "rejection",
    }
    refused = [flag for flag, is_given in given.items() if is_given]
    return f"{', '.join(refused)}: bits would depend on it, so drop it, or --deterministic" if refused else None


def _speculation_problem(config: EngineConfig) -> str | None:
    """Return what is wrong with the drafting flags, likewise."""
    if problem := _draft_model_problem(config):
        return problem
    given = config.drafting_flags
    if config.speculative_algorithm == "none" and given:
        return f"{' and '.join(given)} need a drafter: drop them, or choose --speculative-algorithm mtp"
    for algorithm in TEXT_ALGORITHMS:
        if orphans := _flags_of(config, algorithm) if config.speculative_algorithm != algorithm else []:
            return f"{', '.join(orphans)} needs --speculative-algorithm {algorithm}"
    if config.draft_corpus is not None and config.skip_tokenizer_init:
        flag = f"--speculative-{config.speculative_algorithm}-corpus"
        return f"{flag}: a text needs the tokenizer: drop it, or --skip-tokenizer-init"
    if config.disable_radix_cache and config.speculative_suffix_shared_mib:
        return "--speculative-suffix-shared-mib: texts are shared as prefixes are: drop it, or --disable-radix-cache"
    if config.ngram_windows[0] > config.ngram_windows[1]:
        return "--speculative-ngram-min-match-window-size is above --speculative-ngram-max-match-window-size"
    if config.speculative_tree is not None:
        if config.speculative_algorithm in (*TEXT_ALGORITHMS, "draft-model", "dflash"):
            return f"--speculative-tree: {config.speculative_algorithm} makes its own drafts; drop it, or choose mtp"
        shapeless = "--speculative-tree", "--speculative-accept", FORM_FLAG
        rest = ", ".join(flag for flag in given if flag not in shapeless)
        return f"--speculative-tree decides the whole shape: drop {rest}" if rest else None
    steps, topk, nodes = config.num_draft_steps, config.draft_topk, config.num_draft_nodes
    if topk == 1 and nodes != steps + 1:
        return (
            f"a chain of {steps} steps has {steps + 1} nodes with its root, not {nodes}: set "
            f"--speculative-num-draft-tokens {steps + 1} or leave it out, or give --speculative-eagle-topk for a tree"
        )
    if nodes > largest_tree(steps, topk) and config.speculative_algorithm not in TEXT_ALGORITHMS:
        return (
            f"{steps} steps of top {topk} give {largest_tree(steps, topk)} nodes with the root, not {nodes}: lower "
            "--speculative-num-draft-tokens, or raise --speculative-num-steps or --speculative-eagle-topk"
        )
    return None


def _flags_of(config: EngineConfig, algorithm: str) -> list[str]:
    """The given flags that have no meaning but for drafts by this algorithm."""
    prefix = f"speculative_{algorithm}_"
    names = [name for name in EngineConfig.model_fields if name.startswith(prefix)]
    return [f"--{name.replace('_', '-')}" for name in names if getattr(config, name) is not None]


def _draft_model_problem(config: EngineConfig) -> str | None:
    """Return what is wrong with the flags of a separate draft model, likewise."""
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path
    if algorithm in ("eagle", "eagle3", "dflash", "draft-model") and path is None:
        return f"--speculative-algorithm: {algorithm} needs --speculative-draft-model-path"
    if algorithm in WEIGHTLESS and path is not None:
        return f"--speculative-draft-model-path: {algorithm} has no use for it; drop it, or choose auto"
    if config.speculative_draft_model_revision is not None and path is None:
        return "--speculative-draft-model-revision needs --speculative-draft-model-path"
    if algorithm in WEIGHTLESS and config.speculative_draft_model_quantization != "auto":
        return f"{FORM_FLAG}: {algorithm} has no matrices; drop it"
    return None
