"""Names and values that vLLM and SGLang have for settings: what they are here, or why they are refused.

The keywords of ``LLM``, the command line and its files read this one table; ``docs/coming_from.md`` shows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specmamba.errors import ConfigError
from specmamba.flags.near_names import did_you_mean


@dataclass(frozen=True, slots=True)
class Renamed:
    """The same setting under another name."""

    field: str
    remark: str = ""  # where its meaning differs
    is_switch: bool = False
    is_inverted: bool = False  # a switch that says the opposite
    unset: tuple[str, ...] = ()  # values that leave ours as it is


@dataclass(frozen=True, slots=True)
class Fixed:
    """A setting that has one meaning here: values that ask for it change nothing, others are refused."""

    allowed: tuple[object, ...]
    reason: str  # in the words of the command line
    is_switch: bool = False


_WHOLE_LAYERS = "there is one pipeline here: --tp-size divides every layer"
_REPLICAS = "copies of a model behind one port are a setting of specmamba serve, dp_size"
_OWN_TOKENIZER = "the tokenizer is the one in the model's folder: put its files there, or give --skip-tokenizer-init"
_NO_SWAP = (
    "nothing is moved between memories here: choose smaller weights (--quantization) or pools (--max-total-tokens)"
)

OTHER_NAMES: Mapping[str, Renamed | Fixed] = {
    "model_path": Renamed("model"),
    "max_model_len": Renamed("context_length"),
    "max_num_seqs": Renamed("max_running_requests"),
    "max_num_batched_tokens": Renamed("chunked_prefill_size", "it bounds the prompt tokens of a step"),
    "gpu_memory_utilization": Renamed("mem_fraction_static", "it is a share of the memory that is free"),
    "block_size": Renamed("page_size", "a prefix is reused at any length, whatever its value"),
    "enable_prefix_caching": Renamed("disable_radix_cache", is_switch=True, is_inverted=True),
    "enforce_eager": Renamed("disable_cuda_graph", is_switch=True),
    "mamba_ssm_cache_dtype": Renamed("mamba_ssm_dtype", unset=("auto",)),
    "random_seed": Renamed("seed"),
    "enable_deterministic_inference": Renamed("deterministic", is_switch=True),
    "tensor_parallel_size": Renamed("tp_size"),
    "tp": Renamed("tp_size"),
    "expert_parallel_size": Renamed("ep_size"),
    "ep": Renamed("ep_size"),
    "pipeline_parallel_size": Fixed((1,), _WHOLE_LAYERS),
    "pp_size": Fixed((1,), _WHOLE_LAYERS),
    "data_parallel_size": Fixed((1,), _REPLICAS),
    "trust_remote_code": Fixed(
        (False,), "no code of a checkpoint is run here; specmamba info says which architectures there are", True
    ),
    "tokenizer": Fixed((), _OWN_TOKENIZER),
    "tokenizer_path": Fixed((), _OWN_TOKENIZER),
    "tokenizer_mode": Fixed(("auto",), "a tokenizer is always the fast one, made from tokenizer.json"),
    "load_format": Fixed(("auto", "safetensors", "gguf"), "safetensors and GGUF are read, as the files are"),
    "swap_space": Fixed((0,), _NO_SWAP),
    "cpu_offload_gb": Fixed((0,), _NO_SWAP),
    "enable_chunked_prefill": Fixed((True,), "prompts run in chunks of --chunked-prefill-size, always", True),
    "enable_auto_tool_choice": Fixed((True,), "calls of tools are read as --tool-call-parser says, or not: none", True),
    "enable_lora": Fixed((False,), "there are no adapters here: merge it into the weights", True),
}
SPECULATIVE = "speculative_config"  # vLLM's, in one mapping or as JSON
SPECULATIVE_FIELDS = {
    "num_speculative_tokens": "speculative_num_steps",
    "model": "speculative_draft_model_path",
    "revision": "speculative_draft_model_revision",
    "prompt_lookup_min": "speculative_ngram_min_match_window_size",
    "prompt_lookup_max": "speculative_ngram_max_match_window_size",
    "suffix_decoding_max_tree_depth": "speculative_suffix_max_match",
    "suffix_decoding_max_spec_factor": "speculative_suffix_factor",
    "suffix_decoding_min_token_prob": "speculative_suffix_min_probability",
}
METHODS = {
    **{name: name for name in ("ngram", "suffix", "eagle", "eagle3", "dflash", "mtp")},
    "draft_model": "draft-model",
    "dspark": "dflash",
}

# of settings that have the same name
OTHER_VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3", "fp8_per_token_head": "fp8_e4m3", "int8_per_token_head": "int8"},
    "speculative_algorithm": {"nextn": "mtp", "standalone": "draft-model", "dspark": "dflash"},
}
OTHER_PARAMS = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}  # of SamplingParams, SGLang's
# Of requests over HTTP; they are refused, and the refusal names the field here.
OTHER_FIELDS = {
    "grammar": "ebnf",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "return_token_ids": "return_tokens",
    "enable_thinking": "chat_template_kwargs",
}


def own_value(field: str) -> Callable[[object], object]:
    """A function that reads a value of a field of the configuration, in whatever case it is written."""

    def read(value: object) -> object:
        name = value.lower() if isinstance(value, str) else value
        return OTHER_VALUES[field].get(name, name) if isinstance(name, str) else name

    return read


def translated(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings by the names that they have here, and a note for each that had another one.

    None stands for a default: it is left out, and beside another name of the same setting it is no second value.

    Raises:
        ConfigError: a value asks for what is not there, or two names for one setting are given. The message has the
            words of the command line.
    """
    fields: dict[str, Any] = {}
    notes = []
    for name, value in given.items():
        if name != SPECULATIVE and name not in OTHER_NAMES:
            _add(fields, {name: value}, name)
        elif value is not None:
            added, note = _parts_of_draft(value) if name == SPECULATIVE else _translated_one(name, value)
            clash = next((field for field in added if given.get(field) is not None), None)
            if clash is not None:
                raise ConfigError(f"{flag_of(name)} and {flag_of(clash)} are one setting: give one of them")
            _add(fields, added, name)
            notes += [note] if note else []
    return fields, notes


def names_of(field: str) -> list[str]:
    """All names under which a field may be given, its own first."""
    others = [name for name, known in OTHER_NAMES.items() if isinstance(known, Renamed) and known.field == field]
    in_mapping = field == "speculative_algorithm" or field in SPECULATIVE_FIELDS.values()
    return [field, *others, *([SPECULATIVE] if in_mapping else [])]


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def near_flag(flag: str, flags: Iterable[str]) -> str:
    """A half sentence that names the nearest of ``flags``; of engines those of others too, which are understood."""
    own = list(flags)
    others = map(flag_of, (*OTHER_NAMES, SPECULATIVE)) if flag_of("context_length") in own else ()
    return did_you_mean(flag, own) or did_you_mean(flag, others)


def _add(fields: dict[str, Any], added: Mapping[str, Any], name: str) -> None:
    given = {field for field, value in fields.items() if value is not None}
    if twice := given & {field for field, value in added.items() if value is not None}:
        raise ConfigError(f"{flag_of(name)}: {flag_of(min(twice))} is given by another name too: give one of them")
    fields.update({field: value for field, value in added.items() if field not in given})


def _translated_one(name: str, value: object) -> tuple[dict[str, Any], str]:
    known = OTHER_NAMES[name]
    if isinstance(known, Fixed):
        if any(_is_same(value, one) for one in known.allowed):
            return {}, ""
        raise ConfigError(f"{flag_of(name)}: {known.reason} (got {value!r})")
    if any(_is_same(value, one) for one in known.unset):
        return {}, f"{flag_of(name)} {value} sets nothing here: {flag_of(known.field)} says what it is"
    if known.is_inverted:
        if not isinstance(value, bool):
            raise ConfigError(f"{flag_of(name)}: it is true or false (got {value!r})")
        value = not value
    inverted = "the opposite of " if known.is_inverted else ""
    remark = f": {known.remark}" if known.remark else ""
    return {known.field: value}, f"{flag_of(name)} is {inverted}{flag_of(known.field)} here{remark}"


def _is_same(value: object, allowed: object) -> bool:
    """Whether a value is the allowed one, also as the command line writes it."""
    if isinstance(allowed, str | bool):
        return str(value).lower() == str(allowed).lower()
    try:
        return not isinstance(value, bool) and float(str(value)) == allowed
    except ValueError:
        return False


def mapping_of_draft(value: object) -> Mapping[str, Any]:
    """vLLM's speculative configuration, from JSON or as it is. Raises ConfigError: this is no mapping."""
    flag = flag_of(SPECULATIVE)
    try:
        config = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{flag}: this is not valid JSON: {error} (got {value!r:.200})") from None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{flag}: this is a mapping of settings (got {value!r:.200})")
    return {str(key): part for key, part in config.items()}


def _parts_of_draft(value: object) -> tuple[dict[str, Any], str]:
    """The settings that a mapping of vLLM stands for."""
    flag = flag_of(SPECULATIVE)
    asked = {key: part for key, part in mapping_of_draft(value).items() if part is not None}
    method = asked.pop("method", None)
    if not _is_same(asked.pop("draft_tensor_parallel_size", 1), 1):
        raise ConfigError(f"{flag}: draft_tensor_parallel_size: drafts are divided as the model is: leave it out")
    if unknown := [key for key in asked if key not in SPECULATIVE_FIELDS]:
        known = ", ".join(["method", *SPECULATIVE_FIELDS])
        raise ConfigError(f"{flag}: there is no {unknown[0]!r} here: it may have {known}")
    if wrong := [key for key, part in asked.items() if isinstance(part, bool | list | tuple | Mapping)]:
        raise ConfigError(f"{flag}: {wrong[0]}: this is a text or a number (got {asked[wrong[0]]!r:.200})")
    fields: dict[str, Any] = {SPECULATIVE_FIELDS[key]: part for key, part in asked.items()}
    if method is not None:
        fields["speculative_algorithm"] = _algorithm(method, flag)
    return fields, f"{flag} is {', '.join(map(flag_of, fields))} here" if fields else ""


def _algorithm(method: object, flag: str) -> str:
    """Our name for a method of vLLM, in whatever case; those of heads in checkpoints end with mtp."""
    name = str(method).lower()
    if name not in METHODS and not name.endswith("_mtp"):
        raise ConfigError(f"{flag}: there is no method {method!r} here: choose one of {', '.join(METHODS)}")
    return METHODS.get(name, "mtp")
