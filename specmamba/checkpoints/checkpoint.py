"""The folder and the config of a checkpoint. Safetensors and GGUF only, and no code from a checkpoint is run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmamba.checkpoints.config_bounds import require_bounded_config, require_bounded_json, require_bounded_numbers
from specmamba.checkpoints.files import GGUF_FILE, is_bare, read_json, require_bounded_folder, require_safetensors
from specmamba.checkpoints.gguf.gguf_folder import folder_of
from specmamba.checkpoints.gguf.header import is_gguf
from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# Models with layers of those that run, and what they have besides, for which there is no code.
LACKING = {
    "Glm5NextForConditionalGeneration": "sparse attention over keys that an indexer chooses, mixed residual streams "
    "(hyper-connections), and clamped inputs of SwiGLU",
    "KimiK3ForConditionalGeneration": "attention over the outputs of earlier layers in place of their sum (attention "
    "residuals), experts of another width than the layers', and SiTU activations",
}
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # of a file of weights, for its digest


def resolve_checkpoint(
    model: str, revision: str | None, revision_flag: str = "--revision", needs_weights: bool = True
) -> Path:
    """Find the folder of a checkpoint: ``model`` itself, a download from the hub, or one made for a GGUF file.

    Args:
        model: a folder, a GGUF file or a hub id.
        revision: branch, tag or commit on the hub.
        revision_flag: the name of the flag, for messages.
        needs_weights: False: a folder with nothing but a config.json will do.

    Raises:
        ConfigError: a revision is given for a local folder.
        CheckpointError: ``model`` is neither a folder nor a hub id, the hub or the repository cannot be reached, or
            there are no safetensors in it, or a file is too large, or a GGUF file is damaged.
        UnsupportedModelError: a GGUF file is of a kind that is not supported.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{revision_flag} names a version on the hub, but {folder} is a local folder: leave it out"
            )
    elif folder.exists():
        folder = _folder_of_file(folder)
    elif folder.suffix == ".gguf":
        raise CheckpointError(f"there is no file {folder}")
    else:
        folder = _download(model, revision)
    if needs_weights or not is_bare(folder):
        require_safetensors(folder)
    require_bounded_folder(folder)
    return folder


def _folder_of_file(file: Path) -> Path:
    """The folder that stands for a GGUF file. Raises CheckpointError for other files."""
    if not is_gguf(file):
        raise CheckpointError(f"{file} is neither a GGUF file nor a checkpoint's folder (with its config.json)")
    return folder_of(file)


def read_architecture(folder: Path) -> str:
    """Read the name of a checkpoint's architecture. Raises CheckpointError where config.json has none."""
    file = folder / "config.json"
    config = read_json(file)
    require_bounded_json(file, config)
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise CheckpointError(f'{file} names no model: it needs "architectures": ["..."]')
    return names[0]


def require_supported(folder: Path, architecture: str, supported: Sequence[str]) -> None:
    """Raise UnsupportedModelError unless an architecture is one of ``supported``.

    The message lists those that are, and says of some that share their layers what is missing.
    """
    if architecture not in supported:
        lacking = f", of which {LACKING[architecture]} are missing" if architecture in LACKING else ""
        raise UnsupportedModelError(
            f"{folder} is a {architecture} model{lacking}; specmamba has models for: {', '.join(sorted(supported))}"
        )


def read_config(folder: Path, supported: Sequence[str]) -> tuple[PretrainedConfig, str]:
    """Read the config of a checkpoint, and the name of its architecture, which is one of ``supported``.

    Raises:
        UnsupportedModelError: as ``require_supported``.
        CheckpointError: config.json is missing, damaged, names no architecture, or has invalid values.
    """
    architecture = read_architecture(folder)
    require_supported(folder, architecture, supported)
    file = folder / "config.json"
    raw = read_json(file)
    _require_model_type(file, architecture, raw)
    require_bounded_numbers(file, raw)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Config classes validate the contents of the file and raise exceptions of any type.
    except Exception as error:
        raise CheckpointError(f"{file} is not a config that transformers accepts: {error}") from error
    if hasattr(config, "text_config") and "text_config" not in config.sub_configs:
        raise CheckpointError(f"{file}: a {config.model_type} model is text alone, so it can have no text_config")
    require_bounded_config(file, text_config(config))
    return config, architecture


def _require_model_type(file: Path, architecture: str, raw: dict[str, Any]) -> None:
    """Raise CheckpointError where the config is that of another architecture: it would lack fields, or have others."""
    from transformers.models.auto import modeling_auto as known

    text, images = known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    expected = {kind for kind, name in (*text.items(), *images.items()) if name == architecture}
    if expected and raw.get("model_type") not in expected:
        found = f"model_type is {raw.get('model_type')!r}"
        raise CheckpointError(f"{file}: {found}, but should be {' or '.join(sorted(expected))} for a {architecture}")


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the language model: the nested one in a multimodal config, else all of it."""
    nested: PretrainedConfig | None = getattr(config, "text_config", None)
    return config if nested is None else nested


def read_eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Read the tokens that end a text from generation_config.json, else from config.json; () if neither has any.

    Raises:
        CheckpointError: generation_config.json is damaged, or a value is not a token id or a list of them.
    """
    file = folder / "generation_config.json"
    value = read_json(file).get("eos_token_id") if file.exists() else None
    if value is None:
        file = folder / "config.json"
        value = getattr(config, "eos_token_id", None)
    if value is None:
        value = getattr(text_config(config), "eos_token_id", None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"{file}: eos_token_id is {value!r}, but should be a token id or a list of token ids")
    return tuple(ids)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        # Subfolders hold other formats or other models, not this checkpoint.
        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_PATTERNS, ignore_patterns=["*/*"]))
    except HFValidationError:
        raise CheckpointError(f"{model!r} is neither a folder nor a hub id like 'owner/name'") from None
    except RevisionNotFoundError:
        raise CheckpointError(f"the hub repository {model} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"there is no folder {model}, and no hub repository of that name that you may read "
            "(private or gated: log in with `hf auth login`)"
        ) from None
    # The HTTP library of the hub client raises its own errors, and is not always the same library.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise CheckpointError(
            f"there is no folder {model}, and the hub cannot be asked for a repository of that name: {reason}"
        ) from error


def digest_of_checkpoint(folder: Path, samples: int = SAMPLES) -> str:
    """Hash a checkpoint's config and samples of its weights, as reading all weights of a large model takes too long.

    Args:
        folder: of the checkpoint.
        samples: of every file, of ``SAMPLE_BYTES`` each. With more than usual, files that are not larger than these
            together are read whole.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob(GGUF_FILE))):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            if samples > SAMPLES and size <= samples * SAMPLE_BYTES:
                digest.update(stream.read())
                continue
            for i in range(samples):
                stream.seek(max(0, size - SAMPLE_BYTES) * i // (samples - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
