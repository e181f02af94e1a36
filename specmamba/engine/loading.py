"""Loading of the target and of its draft head or draft model, and the settings of the process for running them."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from specmamba.checkpoints.checkpoint import (
    digest_of_checkpoint,
    read_architecture,
    require_supported,
    resolve_checkpoint,
)
from specmamba.config import FORM_FLAG, WEIGHTLESS, EngineConfig
from specmamba.draft.draft_plan import DraftPlan, plan_drafts
from specmamba.engine.captured.step_memory import walk
from specmamba.errors import CheckpointError, ConfigError, SpecmambaError, UnsupportedModelError
from specmamba.kernels import gpu, linear
from specmamba.kernels.linear import WeightForm
from specmamba.kernels.native.levels import chosen_level
from specmamba.kernels.paged_attention import crossover
from specmamba.layers.attention import Attention
from specmamba.models.base import LoadedModel, LoadOptions, Models
from specmamba.models.draft_heads import is_draft_head, load_draft_head
from specmamba.models.registry import ARCHITECTURES, choose_dtype, load_model
from specmamba.models.text.no_tokenizer import NoTokenizer
from specmamba.models.text.tokenizer import Tokenizer, has_tokenizer
from specmamba.models.text.tokenizer_backend import OR_WITHOUT
from specmamba.parallel.ranks import ONE_RANK, Ranks
from specmamba.verify.exact_bits import require_exact

logger = logging.getLogger("specmamba")

VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")  # files of a tokenizer that have tokens

DRAFT_FLAG = "--speculative-draft-model-path"
Crossovers = dict[crossover.Heads, int | None]  # results of ``crossover.measure``
SMALL_MODEL_BYTES = 64 << 20
SHARED_MODEL_BYTES = 4 << 20
WEIGHT_SAMPLES = 2048  # of 16 KiB, of every file of weights: files of up to 32 MiB are read whole


def resolve_device(name: str) -> torch.device:
    """Return the device that ``--device`` names.

    Raises:
        ConfigError: it does not exist, or the environment names operators for Triton that do not.
    """
    try:
        gpu.choice()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this PyTorch sees no CUDA device; leave --device out to run on the CPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def load_tokenizer(folder: Path, is_skipped: bool = False) -> Tokenizer:
    """Load a checkpoint's tokenizer, or what stands in its place where it is skipped.

    Raises:
        CheckpointError: as ``Tokenizer``; of settings alone it says what lacks.
    """
    if is_skipped:
        return NoTokenizer()
    if has_tokenizer(folder) and not any(file for form in VOCABULARIES for file in folder.glob(form)):
        raise CheckpointError(
            f"{folder} has no tokenizer, only its settings: add the tokenizer.json that belongs to the checkpoint"
            f"{OR_WITHOUT}"
        )
    return Tokenizer(folder)


def require_target(folder: Path) -> None:
    """Check that ``folder`` holds a model of a known family, before its tokenizer is loaded.

    Raises:
        UnsupportedModelError: it holds a draft head, or a model of another architecture.
        CheckpointError: it names no architecture.
    """
    architecture = read_architecture(folder)
    if architecture not in ARCHITECTURES and is_draft_head(folder):
        raise UnsupportedModelError(
            f"--model {folder}: {architecture} is a draft head and no model: give it as {DRAFT_FLAG}, beside the "
            "--model that it was trained for"
        )
    require_supported(folder, architecture, tuple(ARCHITECTURES))


def load_models(
    folder: Path, config: EngineConfig, device: torch.device, only_shapes: bool = False, ranks: Ranks | None = None
) -> Models:
    """Load the target in ``folder`` and the draft that the flags name.

    A draft that does not fit is refused before the target's weights are read. With ``only_shapes`` no weights are read
    (but for the token map of a draft head, and samples of its embedding to compare with the target's): nothing can run,
    and all sizes are known. ``ranks``: that share the models; None: with ``only_shapes`` those of ``--tp-size``, for
    the sizes of the last of them, which has as much as any, else one.

    Raises:
        CheckpointError: a checkpoint is incomplete, damaged or inconsistent, or cannot be had.
        UnsupportedModelError: there is no model for an architecture.
        ConfigError: the draft does not fit the target, or is not what the flags ask for; a model cannot be divided.
    """
    ranks = ranks or (Ranks(config.tp_size - 1, config.tp_size) if only_shapes else ONE_RANK)
    path = config.speculative_draft_model_path
    if path is None:
        return _load(folder, None, config, device, only_shapes, ranks)
    with _naming_the_draft(path):
        draft_folder = _resolve_draft(path, config.speculative_draft_model_revision)
    shapes = _load(folder, draft_folder, config, device, only_shapes=True, ranks=ranks)
    plan_drafts(config, shapes.draft_kind, shapes.target.target.vocab_size, shapes.block_size)
    if shapes.draft is not None:
        _require_same_tokenizer(folder, draft_folder, config.skip_tokenizer_init)
    return shapes if only_shapes else _load(folder, draft_folder, config, device, False, ranks)


def _load(
    folder: Path,
    draft_folder: Path | None,
    config: EngineConfig,
    device: torch.device,
    only_shapes: bool,
    ranks: Ranks,
) -> Models:
    dtype = choose_dtype(folder, config.dtype)
    _require_codes(config, dtype, device)
    options = LoadOptions(
        dtype=dtype,
        device=torch.device("meta") if only_shapes else device,
        want_draft_head=config.speculative_algorithm in ("auto", "mtp") and draft_folder is None,
        form=_form(config.quantization, config.quantization_group_size),
        draft_form=_draft_form(config, dtype, device),
        keeps_codes=config.quantization == "auto" and linear.runs_codes(device, dtype),
        draft_keeps_codes=_draft_keeps_codes(config) and linear.runs_codes(device, dtype),
        layout_device_type=device.type,
        ranks=ranks,
        divides_experts=config.ep_size > 1,
    )
    target = _keeping_states(load_model(folder, options), config, device)
    looks = config.speculative_algorithm not in WEIGHTLESS
    if draft_folder is None:
        return Models(target, None, looks)
    with _naming_the_draft(str(draft_folder)):
        if read_architecture(draft_folder) not in ARCHITECTURES:
            return Models(load_draft_head(draft_folder, target, options, folder), None, looks)
        own = replace(options, form=options.draft_form, keeps_codes=options.draft_keeps_codes, want_draft_head=False)
        draft = load_model(draft_folder, own)
        _check_draft_model(draft, target, config.context_length)
    target = replace(target, cache_shape=target.cache_shape.with_draft_model(draft.cache_shape))
    return Models(target, draft, looks)


@contextmanager
def _naming_the_draft(path: str) -> Iterator[None]:
    """Add the flag and the folder to the message of errors that do not name them."""
    try:
        yield
    except SpecmambaError as error:
        message = str(error)
        if message.startswith("--"):
            raise
        flag = DRAFT_FLAG if path in message else f"{DRAFT_FLAG} {path}"
        raise type(error)(f"{flag}: {message}") from error


def _resolve_draft(path: str, revision: str | None) -> Path:
    try:
        return resolve_checkpoint(path, revision, "--speculative-draft-model-revision")
    except CheckpointError as error:
        head = Path(path).expanduser() / "head"  # where ``specmamba train draft`` puts it
        if not (head / "config.json").is_file():
            raise
        raise CheckpointError(f"{error}; there is a draft head in {head}: give that folder") from None


def _check_draft_model(draft: LoadedModel, target: LoadedModel, context_length: int | None) -> None:
    """Raise ConfigError if a draft model cannot run the target's texts."""
    sizes = draft.target.vocab_size, target.target.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"its vocabulary has {sizes[0]} tokens, the target's {sizes[1]}: a draft model needs the target's tokenizer"
        )
    context = min(context_length or target.context_length, target.context_length)
    if draft.context_length < context:
        raise ConfigError(
            f"the draft model was made for {draft.context_length} tokens, but texts may have {context}: set "
            f"--context-length {draft.context_length} or less"
        )


def _require_same_tokenizer(folder: Path, draft_folder: Path, is_skipped: bool) -> None:
    """Raise ConfigError if a token has another id in the draft model; one without a tokenizer is accepted."""
    if is_skipped or not has_tokenizer(draft_folder):
        why = "its tokenizer is not read" if is_skipped else "has no tokenizer"
        logger.warning("%s %s %s: it is taken to be the target's", DRAFT_FLAG, draft_folder, why)
        return
    if not has_tokenizer(folder):  # such a target cannot be served, but ``specmamba info`` can describe it
        return
    with _naming_the_draft(str(draft_folder)):
        theirs = Tokenizer(draft_folder).token_ids()
    ours = Tokenizer(folder).token_ids()
    others = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if not others:
        return
    first = min(
        others, key=lambda token: (min(i for i in (ours.get(token), theirs.get(token)) if i is not None), token)
    )
    raise ConfigError(
        f"{DRAFT_FLAG} {draft_folder}: {len(others)} tokens have other numbers than in the target's tokenizer, the "
        f"first is {first!r}: {theirs.get(first, 'none')} there, {ours.get(first, 'none')} in the target's: a draft "
        "model needs the same tokenizer"
    )


def _keeping_states(loaded: LoadedModel, config: EngineConfig, device: torch.device) -> LoadedModel:
    """Set the types of recurrent states and of stored keys and values, and whether the device folds in the verify."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.mamba_ssm_dtype]
    kv_dtype = {"auto": None, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[config.kv_cache_dtype]
    if config.deterministic:
        require_exact(loaded, device)
    shape = replace(
        loaded.cache_shape,
        state_dtype=dtype,
        kv_dtype=kv_dtype,
        folds_in_verify=gpu.folds_in_verify(device),
        is_exact=config.deterministic,
    )
    return replace(loaded, cache_shape=shape)


def _require_codes(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError where flags ask for codes that nothing multiplies by."""
    if config.quantization == "fp8-dynamic" and not linear.runs_scaled(device, dtype):
        raise ConfigError(
            "--quantization fp8-dynamic needs bfloat16 on a GPU of compute capability 8.9 or higher, where PyTorch "
            "multiplies FP8 by FP8: choose fp8, which rounds weights alone"
        )
    flags = {"--quantization": config.quantization, FORM_FLAG: config.speculative_draft_model_quantization}
    for flag, chosen in flags.items():
        if chosen in ("int4", "fp8") and not linear.runs_codes(device, dtype):
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{flag} {chosen} needs native code on a CPU and bfloat16 or float32, or Triton on a GPU"
                f"{_without()}; this is {kind} on {device.type}"
                f"{'' if device.type != 'cpu' else ' (specmamba doctor says whether there is native code)'}: "
                "choose int8 or none"
            )


def _without() -> str:
    """The part of a message that names operators for codes that the environment turns off."""
    off = ", ".join(name for name in gpu.MULTIPLYING_CODES if not gpu.is_chosen(name))
    return f" ({gpu.SWITCH} turns off {off})" if off else ""


def _form(quantization: str, group: int) -> WeightForm:
    """Return the form of matrices that are not stored quantized."""
    forms: dict[str, WeightForm] = {"int8": "int8", "fp8": "fp8", "fp8-dynamic": "fp8-dynamic"}
    of_groups: dict[int, WeightForm] = {32: "int4-g32", 64: "int4-g64", 128: "int4-g128"}
    return of_groups[group] if quantization == "int4" else forms.get(quantization, "plain")


def _draft_form(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> WeightForm:
    """Return the form of the draft's weights: int8 by default where it is faster, as drafts cannot change the text."""
    chosen, group = config.speculative_draft_model_quantization, config.quantization_group_size
    if chosen != "auto":
        return _form(chosen, group)
    of_target = _form(config.quantization, group)
    return "int8" if of_target == "plain" and linear.has_fast_int8(device, dtype) else of_target


def _draft_keeps_codes(config: EngineConfig) -> bool:
    """Whether a draft's matrices stay as they are stored, where that is quantized."""
    chosen = config.speculative_draft_model_quantization
    return chosen == "auto" and config.quantization == "auto"


def time_attention(models: Models, config: EngineConfig, device: torch.device) -> Crossovers:
    """Find for the heads of all layers from which length on runs of a prefill gather their keys.

    Returns:
        Empty where there is no choice: on a CPU, or with codes for keys and values.
    """
    if not crossover.can_measure(device) or config.kv_cache_dtype != "auto":
        return {}
    from specmamba.kernels.paged_attention.triton_ops import attend_in_kernels  # Triton is there

    found, most = Crossovers(), min(config.chunked_prefill_size, models.target.context_length)
    for model in filter(None, (models.target, models.draft)):
        for layer in _attention_layers((model.target, model.draft_head), set()):
            heads = crossover.heads_of(layer.form, model.cache_shape.dtype, device)
            if heads is not None and heads not in found:
                found[heads] = crossover.measure(heads, most, attend_in_kernels)
    torch.cuda.empty_cache()  # what was timed is as large as the activations of a prefill
    return found


def _attention_layers(part: object, seen: set[int]) -> Iterator[Attention]:
    """Layers of a part of a model, but for objects whose id is in ``seen``, which the others are added to."""
    found = walk(part, seen, lambda each: isinstance(each, Attention))
    return (each for each in found if isinstance(each, Attention))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_TRIM_BYTES = 256 << 20
_MMAP_BYTES = 32 << 20  # the largest value that glibc accepts


def keep_freed_memory() -> bool:
    """Make glibc keep memory that operators free, for the whole process. Returns whether the settings were changed.

    The results of a step's operators are freed and allocated again in every step. By default glibc returns part of them
    to the system each time, and more of it in threads other than the first: with 32 requests of the demo in an engine
    thread this cost 500 page faults per step, 6 % of its time. Nothing is changed if glibc's own environment variables
    are set, or with other C libraries.
    """
    if platform.libc_ver()[0] != "glibc" or _is_set_by_user():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    return any(name in os.environ for name in names) or "glibc.malloc." in tunables


@cache
def process_threads() -> int:
    """Return the threads of PyTorch before an engine of this process chose any; called first by ``set_threads``."""
    return torch.get_num_threads()


def set_threads(config: EngineConfig, device: torch.device, weight_bytes: int) -> int:
    """Choose how many threads run operators, in this process; returns the number for replays of captured steps.

    A model that the caches hold is bound by the number of its operators, not by their size. In a step that runs
    operator by operator a second thread then gains little, and as operators wait for their slowest thread, it loses a
    lot when a server or a client wants its core. The threads of a replay hand over in less than a microsecond: two
    gain from ``SHARED_MODEL_BYTES`` on; more were not measured.
    """
    most = max(1, process_threads() // (config.tp_size if device.type == "cpu" else 1))  # ranks share the cores
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
        return config.num_threads
    if device.type == "cpu" and weight_bytes <= SMALL_MODEL_BYTES:
        torch.set_num_threads(1)
        return min(most, 2) if weight_bytes >= SHARED_MODEL_BYTES else 1
    torch.set_num_threads(most)  # an open engine of a small model may have lowered it
    return most


def identity_of(config: EngineConfig, folder: Path, models: Models, drafts: DraftPlan) -> dict[str, str]:
    """Return what decides the numbers in KV, states and features beside their shapes and types."""
    target = models.target
    own = {
        "architecture": target.architecture,
        "kv": str(target.cache_shape.stored_kv_dtype).removeprefix("torch."),
        "dtype": str(target.cache_shape.dtype).removeprefix("torch."),
        "weights": digest_of_checkpoint(folder, WEIGHT_SAMPLES),
        "quantization": f"{config.quantization} {config.quantization_group_size}",
    }
    if config.deterministic:
        own["arithmetic"] = f"exact, {chosen_level().name}"
    if drafts.algorithm in WEIGHTLESS:
        return own
    path = config.speculative_draft_model_path
    of_draft = {
        "draft": drafts.algorithm,
        "draft_quantization": config.speculative_draft_model_quantization,
        "draft_modules": str(min(getattr(target.draft_head, "num_modules", 1), drafts.num_steps)),
    }
    if path is not None:
        draft_folder = resolve_checkpoint(path, config.speculative_draft_model_revision)
        of_draft["draft_weights"] = digest_of_checkpoint(draft_folder, WEIGHT_SAMPLES)
    return own | of_draft
