"""The configuration, declared once.

These classes are the command line, the environment, the TOML file and the keyword arguments of ``LLM``.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from specmamba.errors import ConfigError
from specmamba.flags.other_names import own_value
from specmamba.sampling_params import LogitSettings, Temperature

DEMO_MODEL = Path(__file__).parent / "demo"

Algorithm = Literal["auto", "none", "mtp", "eagle", "eagle3", "draft-model", "ngram"]
MAX_DRAFT_TOKENS = 64
_STORED_FORMATS = ("awq", "gptq", "compressed-tensors", "gguf", "modelopt", "mxfp4", "nvfp4", "bitsandbytes")
FORM_FLAG = "--speculative-draft-model-quantization"


def is_of_service(value: str) -> bool:
    """Whether a variable's value is the address of a service, as Kubernetes sets ``NAME_PORT`` for one named so."""
    return re.fullmatch(r"(tcp|udp|sctp)://\S+:[0-9]+", value) is not None


class _OwnVariables(EnvSettingsSource):
    """The environment, without what Kubernetes writes under the name of a port of ours."""

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        return {name: value for name, value in values.items() if name != "port" or not is_of_service(str(value))}

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError:
            variable = f"{self.env_prefix}{field_name}".upper()
            raise ConfigError(f'{variable}: a list is written as JSON, like ["a", "b"] (got {value!r:.200})') from None


class CommandLine(BaseSettings):
    """A program's settings: from flags or keyword arguments, and from the environment if ``reads_environment``."""

    reads_environment: ClassVar[bool] = False
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, _OwnVariables(settings_cls)) if cls.reads_environment else (init_settings,)


def split_list(value: object) -> object:
    """Read a list of texts of the environment or of a file, where it is one text: ``a,b``, or JSON.

    Raises:
        ValueError: it begins like JSON and is none, or is empty; the message shows nothing of it, it may be a key.
    """
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("["):
        return value.split(",")
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        items = None
    if not items or not all(isinstance(item, str) for item in items):
        raise ValueError('what begins with [ is a list of texts in JSON, like ["a", "b"], and this is none')
    return items


def _number(value: Any) -> Any:
    """Read a number of the command line or the environment, which choices of numbers do not do themselves."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _form_name(value: object) -> object:
    """Read a form of weights; formats of checkpoints, which other runtimes ask to be told, are none."""
    if isinstance(value, str) and value.lower().startswith(_STORED_FORMATS):
        raise ValueError("what a checkpoint stores is read from its files: leave this out")
    return "auto" if value is None else value


class EngineConfig(CommandLine):
    """The flags of the engine: model, memory, prefix cache, scheduling, drafting."""

    reads_environment = True
    needs_text: ClassVar[bool] = False  # the command reads or writes texts
    model_config = SettingsConfigDict(env_prefix="SPECMAMBA_", protected_namespaces=())

    model: Annotated[
        str | None,
        Field(min_length=1, description="folder or hub id of a checkpoint, or a GGUF file; none: the bundled demo"),
    ] = None
    revision: Annotated[str | None, Field(description="branch, tag or commit, when --model is a hub id")] = None
    skip_tokenizer_init: Annotated[
        bool, Field(description="read no tokenizer: prompts and answers are token ids, and texts are refused")
    ] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(own_value("dtype")),
        Field(description="type of weights and activations; auto: the checkpoint's own"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8", "fp8-dynamic"],
        BeforeValidator(_form_name),
        Field(
            description="auto: matrices stay in the codes that the checkpoint stores, where products have them; none: "
            "dequantized to --dtype; others: rounded when they are loaded, to 8-bit integers with a scale per output, "
            "4-bit ones with a scale per group of inputs, or FP8; fp8-dynamic (GPU): inputs to FP8 too, at every step"
        ),
    ] = "auto"
    quantization_group_size: Annotated[
        Literal[32, 64, 128],
        BeforeValidator(_number),
        Field(description="inputs that share a scale with --quantization int4"),
    ] = 32
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: cuda where there is one")] = "auto"
    num_threads: Annotated[
        int | None,
        Field(ge=1, le=1024, description="CPU threads; none: all cores, or one where a second gains nothing"),
    ] = None
    seed: Annotated[int, Field(ge=0, lt=2**63, description="seeds the requests that bring no seed of their own")] = 0

    context_length: Annotated[
        int | None, Field(ge=2, description="prompt and output tokens of one request at the most; none: the model's")
    ] = None
    max_running_requests: Annotated[int, Field(ge=1, le=4096, description="requests in a batch at the most")] = 16
    max_queued_requests: Annotated[int, Field(ge=1, description="requests waiting at the most; more get a 429")] = 256
    chunked_prefill_size: Annotated[int, Field(ge=1, description="prompt tokens run in one step at the most")] = 512

    mem_fraction_static: Annotated[
        float, Field(gt=0, lt=1, description="share of the free memory that weights and pools may take")
    ] = 0.5
    max_total_tokens: Annotated[int | None, Field(ge=1, description="size of the KV pool in tokens; none: derived")] = (
        None
    )
    max_mamba_cache_size: Annotated[
        int | None, Field(ge=1, description="recurrent states in the state pool, running and cached; none: derived")
    ] = None
    mamba_full_memory_ratio: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="bytes of recurrent states for every byte of KV")
    ] = 0.9
    mamba_ssm_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Field(description="type of recurrent states in the state pool; what is computed from them stays float32"),
    ] = "float32"
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8_e4m3"],
        BeforeValidator(own_value("kv_cache_dtype")),
        Field(description="type of stored keys and values, with a scale per token and head; auto: the model's dtype"),
    ] = "auto"
    page_size: Annotated[int, Field(ge=1, le=1024, description="tokens in a page of the KV pool")] = 1

    disable_cuda_graph: Annotated[bool, Field(description="run every step operator by operator, captured by none")] = (
        False
    )
    cuda_graph_max_bs: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="largest batch whose steps are padded to a bucket and captured; none: 64, or all that can run; "
            "a CPU without native kernels captures nothing, and runs what is given on the same buffers and padding",
        ),
    ] = None

    disable_radix_cache: Annotated[bool, Field(description="share no prefixes between requests")] = False
    mamba_radix_cache_strategy: Annotated[
        Literal["no_buffer", "extra_buffer"],
        Field(description="leave states at the ends of chunks and requests, or also while tokens are generated"),
    ] = "no_buffer"
    mamba_track_interval: Annotated[
        int, Field(ge=1, description="extra_buffer: generated tokens between two states that are left")
    ] = 256
    cache_eviction: Annotated[
        Literal["lru", "flops"],
        Field(description="what leaves the prefix cache first: what is oldest, or also what is cheap to compute again"),
    ] = "lru"
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"],
        Field(description="who runs next: first come, first served, or the longest cached prefix first"),
    ] = "fcfs"
    schedule_max_overtakes: Annotated[
        int, Field(ge=0, description="lpm: a request that so many younger ones have overtaken is next")
    ] = 32

    speculative_algorithm: Annotated[
        Algorithm,
        BeforeValidator(own_value("speculative_algorithm")),
        Field(
            description="how to draft; auto: with what --speculative-draft-model-path holds, else mtp if the "
            "checkpoint has an MTP head; NEXTN: mtp; ngram: from text"
        ),
    ] = "auto"
    speculative_draft_model_path: Annotated[
        str | None,
        Field(min_length=1, description="folder or hub id of a draft: an EAGLE or EAGLE-3 head, or a small model"),
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
        int | None, Field(ge=1, le=63, description="depth of the draft below the root; none: 3 (ngram: 4)")
    ] = None
    speculative_eagle_topk: Annotated[
        int | None,
        Field(
            ge=1,
            le=64,
            description="children per node of a draft tree; none: 1, a chain (ngram: 4)",
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

    @model_validator(mode="after")
    def _texts_need_a_tokenizer(self) -> Self:
        if self.needs_text and self.skip_tokenizer_init:
            raise ValueError("--skip-tokenizer-init: this command reads and writes texts: drop it")
        return self

    @model_validator(mode="after")
    def _flags_go_together(self) -> EngineConfig:
        problem = (
            _quantization_problem(self)
            or _speculation_problem(self)
            or _prefix_cache_problem(self)
            or _graph_problem(self)
        )
        if problem is not None:
            raise ValueError(problem)
        return self

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

    def on_device(self, device_type: str) -> Self:
        """Return the flags for a device. On a GPU sizes of drafts are fixed by default: not measured there yet."""
        is_given = "speculative_adaptive" in self.model_fields_set
        return self if device_type != "cuda" or is_given else self.model_copy(update={"speculative_adaptive": "off"})

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
        return 4 if self.speculative_algorithm == "ngram" else 3

    @property
    def draft_topk(self) -> int:
        """Largest number of children of a node; 1 is a chain."""
        if self.speculative_eagle_topk is not None:
            return self.speculative_eagle_topk
        return 4 if self.speculative_algorithm == "ngram" else 1

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


def _prefix_cache_problem(config: EngineConfig) -> str | None:
    """Return what is wrong with the prefix cache flags, as a sentence that says what to change; None: nothing."""
    fields = type(config).model_fields

    def is_given(*names: str) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(config, name) != fields[name].default]

    of_cache = ("mamba_radix_cache_strategy", "mamba_track_interval", "cache_eviction")
    if config.disable_radix_cache and (given := is_given(*of_cache)):
        return f"{', '.join(given)}: this needs the prefix cache: drop it, or --disable-radix-cache"
    if config.disable_radix_cache and config.schedule_policy == "lpm":
        return "--schedule-policy lpm needs the prefix cache: choose fcfs, or drop --disable-radix-cache"
    if config.mamba_radix_cache_strategy == "no_buffer" and is_given("mamba_track_interval"):
        return "--mamba-track-interval needs --mamba-radix-cache-strategy extra_buffer"
    if config.schedule_policy == "fcfs" and is_given("schedule_max_overtakes"):
        return "--schedule-max-overtakes needs --schedule-policy lpm"
    return None


def _graph_problem(config: EngineConfig) -> str | None:
    """Return what is wrong with the flags of captured steps, likewise."""
    largest = config.cuda_graph_max_bs
    if largest is not None and config.disable_cuda_graph:
        return "--cuda-graph-max-bs: nothing is captured with --disable-cuda-graph: drop one of them"
    if largest is not None and largest > config.max_running_requests:
        return (
            f"--cuda-graph-max-bs {largest}: only {config.max_running_requests} requests run together; lower it, or "
            "raise --max-running-requests"
        )
    return None


def _speculation_problem(config: EngineConfig) -> str | None:
    """Return what is wrong with the drafting flags, likewise."""
    if problem := _draft_model_problem(config):
        return problem
    given = config.drafting_flags
    if config.speculative_algorithm == "none" and given:
        return f"{' and '.join(given)} need a drafter: drop them, or choose --speculative-algorithm mtp"
    ngram = {
        "--speculative-ngram-corpus": config.speculative_ngram_corpus,
        "--speculative-ngram-min-match-window-size": config.speculative_ngram_min_match_window_size,
        "--speculative-ngram-max-match-window-size": config.speculative_ngram_max_match_window_size,
    }
    orphans = [flag for flag, value in ngram.items() if value is not None]
    if config.speculative_algorithm != "ngram" and orphans:
        return f"{', '.join(orphans)} needs --speculative-algorithm ngram"
    if config.speculative_ngram_corpus is not None and config.skip_tokenizer_init:
        return "--speculative-ngram-corpus: a text needs the tokenizer: drop it, or --skip-tokenizer-init"
    if config.ngram_windows[0] > config.ngram_windows[1]:
        return "--speculative-ngram-min-match-window-size is above --speculative-ngram-max-match-window-size"
    if config.speculative_tree is not None:
        if config.speculative_algorithm in ("ngram", "draft-model"):
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
    if nodes > largest_tree(steps, topk) and config.speculative_algorithm != "ngram":
        return (
            f"{steps} steps of top {topk} give {largest_tree(steps, topk)} nodes with the root, not {nodes}: lower "
            "--speculative-num-draft-tokens, or raise --speculative-num-steps or --speculative-eagle-topk"
        )
    return None


def _draft_model_problem(config: EngineConfig) -> str | None:
    """Return what is wrong with the flags of a separate draft model, likewise."""
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path
    if algorithm in ("eagle", "eagle3", "draft-model") and path is None:
        return f"--speculative-algorithm: {algorithm} needs --speculative-draft-model-path"
    if algorithm in ("none", "ngram") and path is not None:
        return f"--speculative-draft-model-path: {algorithm} has no use for it; drop it, or choose auto"
    if config.speculative_draft_model_revision is not None and path is None:
        return "--speculative-draft-model-revision needs --speculative-draft-model-path"
    if algorithm in ("none", "ngram") and config.speculative_draft_model_quantization != "auto":
        return f"{FORM_FLAG}: {algorithm} has no matrices; drop it"
    if algorithm == "draft-model" and config.draft_topk > 1:
        return "--speculative-algorithm: draft-model drafts chains: drop --speculative-eagle-topk"
    return None


def _one_text(value: object) -> object:
    """Read a prompt of the environment, of a file or of Python, where it is one text."""
    return (value,) if isinstance(value, str) else value


_AsJson = Annotated[
    bool, Field(description="no stream: one JSON object for each prompt on standard output, a line each")
]

with warnings.catch_warnings():
    # The flag is called "json", and so is a deprecated method of pydantic, which nothing here calls.
    warnings.filterwarnings("ignore", 'Field name "json"', UserWarning)

    class GenerateConfig(LogitSettings, EngineConfig):
        """``specmamba generate``: one prompt, streamed to the terminal; with --json any number, as JSON."""

        needs_text = True

        prompt: Annotated[
            tuple[str, ...],
            NoDecode,
            BeforeValidator(_one_text),
            Field(description="the prompt; none: standard input; with --json it may be given again"),
        ] = ()
        max_tokens: Annotated[int, Field(ge=1, description="new tokens at the most")] = 128
        temperature: Temperature = 0.0
        stop: Annotated[list[str], Field(description="a string that ends the text; may be given again")] = []
        ignore_eos: Annotated[bool, Field(description="go on after the end-of-text token")] = False
        json: _AsJson = False  # type: ignore[assignment]

        @model_validator(mode="after")
        def _one_prompt_is_streamed(self) -> Self:
            if len(self.prompt) > 1 and not self.json:
                raise ValueError(f"--prompt: given {len(self.prompt)} times; add --json, or give it once")
            return self
