"""The library behind a tokenizer: how one is loaded from a checkpoint, checked and called, and what its tokens are.

Its files are not trusted: they may ask for texts that fill the memory. Its errors have types of many kinds. Of its
tokens this module knows the bytes, and the length of the longest text that one can stand for, which bounds the text of
a number of tokens: a longer text need not be encoded to be refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from specmamba.checkpoints.files import MAX_TEXT_BYTES, read_json
from specmamba.errors import CheckpointError, SpecmambaError, first_line
from specmamba.models.text.text_growth import growth

T = TypeVar("T")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
OR_WITHOUT = ", or leave it out and send token ids (--skip-tokenizer-init)"
MAX_TOKEN_LENGTH = 8192  # characters; the longest in published vocabularies have hundreds


_MOST_KNOWN = 1 << 18  # tokens whose bytes are kept: 60 bytes each; lists of log probabilities name the same ones often
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Canonical composition (NFC) writes up to four code points as one.
_MOST_COMPOSED = 4
_SAME_LENGTH = frozenset({"ByteLevel", "NFC", "Prepend"})
_DROP_NOTHING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


class BackendError(Exception):
    """An error of the tokenizers library, whatever its type. The message is one line."""


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint folder has a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a checkpoint (``transformers.PreTrainedTokenizerFast``).

    Raises:
        CheckpointError: the folder has no tokenizer, or one that cannot be loaded without running code from the folder,
            that makes texts much longer, or that has a token of more than ``MAX_TOKEN_LENGTH`` characters.
    """
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} has no tokenizer: add its tokenizer.json and tokenizer_config.json{OR_WITHOUT}"
        )
    try:
        return guarded(_load, folder)
    except BackendError as error:
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be loaded: {error}: add the tokenizer.json of the checkpoint{OR_WITHOUT}"
        ) from error


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (file := folder / "tokenizer.json").is_file():
        _require_bounded_growth(file, read_json(file, MAX_TEXT_BYTES))  # before added tokens are normalized
    loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise CheckpointError(f"the tokenizer of {folder} has no tokenizer.json and none can be made from its files")
    backend = loaded.backend_tokenizer
    _require_bounded_growth(folder, parts(backend))  # some classes have steps that are in no file
    if not backend.get_vocab().keys() - {token.content for token in backend.get_added_tokens_decoder().values()}:
        raise CheckpointError(
            f"the tokenizer of {folder} has no tokens: add the tokenizer.json of the checkpoint{OR_WITHOUT}"
        )
    if (length := max(map(len, backend.get_vocab()), default=0)) > MAX_TOKEN_LENGTH:
        raise CheckpointError(
            f"the tokenizer of {folder} has a token of {length} characters; {MAX_TOKEN_LENGTH} are the most"
        )
    return loaded


def _require_bounded_growth(path: Path, described: Mapping[str, Any]) -> None:
    try:
        growth(described)
    except CheckpointError as error:
        raise CheckpointError(f"the tokenizer of {path} is refused: {error}") from error


def parts(backend: Any) -> dict[str, Any]:
    """The parts of a backend (``tokenizers.Tokenizer``) that rewrite texts, as in a ``tokenizer.json``."""
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    found = {name: getattr(backend, name) for name in names}
    return {name: None if part is None else json.loads(part.__getstate__()) for name, part in found.items()}


def guarded(function: Callable[..., T], *args: object, **options: object) -> T:
    """Call a function of the library. Raises BackendError in place of its errors, and specmamba's own as they are."""
    try:
        return function(*args, **options)
    except SpecmambaError:
        raise
    # The parsers of its files raise exceptions of any type, bare Exception included.
    except Exception as error:
        raise BackendError(first_line(error)) from error
    # A panic in Rust is a BaseException, of a type that cannot be imported.
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise BackendError(first_line(error)) from error


def byte_of_character() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes of each token of a backend (``tokenizers.Tokenizer``) inside a text.

    They follow from the decoder of the backend: of byte-level vocabularies, and of those that write a space as "▁" and
    unknown characters as ``<0xE4>``. Added tokens stand for their own text. Safe to share between threads.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added: dict[int, str] = {i: str(token.content) for i, token in backend.get_added_tokens_decoder().items()}
        steps = _decoder_steps(backend)
        self._byte_of = byte_of_character() if any(step["type"] == "ByteLevel" for step in steps) else None
        is_ascii = all(content.isascii() for content in self._added.values())
        # a text is the bytes of its tokens, one after the other, read as UTF-8
        self.are_text = len(steps) == 1 and self._byte_of is not None and is_ascii
        self._replacements = [pair for step in steps if (pair := _replacement(step)) is not None]
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes | None:
        """The bytes of a token; None where the vocabulary has no such token."""
        known = self._known.get(token_id)
        if known is not None:
            return known
        found = self._made(token_id)
        if found is not None and len(self._known) < _MOST_KNOWN:
            self._known[token_id] = found
        return found

    def _made(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_of is not None:
            return _joined(self._byte_of, token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _joined(byte_of: dict[str, int], token: str) -> bytes:
    """The bytes of a byte-level token; a character that stands for no byte is itself, as in the decoder."""
    return b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode() for c in token)


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    match step:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return old, new
        case {"type": "Metaspace", "replacement": old}:
            return old, " "
        case {"type": "WordPiece", "prefix": old}:
            return old, ""
    return None


def longest_token(backend: Any) -> int | None:
    """The most characters of a text that one token of a backend (``tokenizers.Tokenizer``) can stand for.

    None where there is no bound: the tokenizer drops characters, or has one token for any unknown word.
    """
    normalizers = _steps(backend.normalizer, "normalizers")
    splits = _steps(backend.pre_tokenizer, "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splits))
    vocab: dict[str, int] = backend.get_vocab()
    if not _knows_all_bytes(backend, vocab, is_byte_level) or not all(map(_keeps_length, normalizers)):
        return None
    if any(step["type"] not in _DROP_NOTHING or step.get("behavior") == "Removed" for step in splits):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    composed = _MOST_COMPOSED if any(step["type"] == "NFC" for step in normalizers) else 1
    return composed * max(map(len, vocab))


def _knows_all_bytes(backend: Any, vocab: dict[str, int], is_byte_level: bool) -> bool:
    if is_byte_level:
        return byte_of_character().keys() <= vocab.keys()
    return bool(getattr(backend.model, "byte_fallback", False)) and all(f"<0x{i:02X}>" in vocab for i in range(256))


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        return old is not None and len(normalizer["content"]) >= len(old)
    return normalizer["type"] in _SAME_LENGTH


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    return [] if part is None else _flat(json.loads(part.__getstate__()), name)


def _flat(step: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for inner in step[name] for one in _flat(inner, name)] if step["type"] == "Sequence" else [step]
