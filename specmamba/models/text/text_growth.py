"""How much longer a tokenizer can make a text, computed from its settings and bounded before it is used.

A ``tokenizer.json`` lists steps that rewrite text: normalizers and pre-tokenizers before the text is split into tokens,
post-processors behind, decoders on the way back. Each step has a factor, the most characters that it makes of one; the
factors of steps in a row are multiplied. The factor is an estimate from above:

- ``Replace``: the characters of its content, divided by those of the text that it looks for; for a regular expression
  one more than its content has, since it may match between two characters.
- ``Prepend``: a text is cut at added tokens, and each part gets the prefix; part and token have a character each.
- ``Precompiled``: the longest replacement. The map is checked here, since a wrong one ends in a panic.
- ``Metaspace``, ``ByteLevel`` with a prefix, ``BertNormalizer``: characters that are put around others.
- The Unicode normal forms, lower case, and the first ``ByteLevel`` count as 1. They make rare characters longer (one
  becomes 18 at the most), and do not so when they are applied again. Contents are measured after them.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmamba.errors import CheckpointError

Step = Mapping[str, Any]

MAX_GROWTH = 256.0  # T5's tokenizer, one of the largest: 18 (its map) * 2 (a regular expression) * 2 (Metaspace)
MAX_DECODED_GROWTH = 16.0
MAX_STEPS, MAX_ADDED_TOKENS = 64, 1024
_KEY_BYTES = 5  # longer sequences of characters are not looked up in a map
_SAME = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents")
_SPLITS = ("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "Split", "UnicodeScripts")
_SPACES = ("Whitespace", "WhitespaceSplit")
_DECODERS = ("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Strip")


def growth(tokenizer: Mapping[str, Any]) -> float:
    """The most characters that a tokenizer makes of one character of a text before the text is split into tokens.

    Args:
        tokenizer: the JSON object of a ``tokenizer.json``; parts that are missing or null do nothing.

    Raises:
        CheckpointError: the factor is above ``MAX_GROWTH``, texts get more than ``MAX_ADDED_TOKENS`` special tokens or
            are repeated, decoded text grows by more than ``MAX_DECODED_GROWTH``, or a step is damaged or unknown.
    """
    try:
        before = [*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer"))]
        factor = _product(before, _growth_of)
        num_byte_levels = sum(step["type"] == "ByteLevel" for step in before)
        factor *= float(4 ** max(0, num_byte_levels - 1))  # a character has four bytes at the most
        _require_bounded(factor, MAX_GROWTH, "normalizer and pre_tokenizer")
        decoded = _product(_steps(tokenizer.get("decoder")), _growth_of_decoder)
        _require_bounded(decoded, MAX_DECODED_GROWTH, "decoder")
        _require_few_added(_steps(tokenizer.get("post_processor")))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"it has a damaged step: {error!r}") from error
    return factor


def _steps(part: Any) -> list[Step]:
    """The steps of a part in order, without the sequences around them."""
    found: list[Step] = []
    waiting = [] if part is None else [part]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            names = ("normalizers", "pretokenizers", "decoders", "processors")
            waiting.extend(reversed(next(step[name] for name in names if name in step)))
        else:
            found.append(step)
    if len(found) > MAX_STEPS:
        raise CheckpointError(f"it has {len(found)} steps in a row, {MAX_STEPS} are the most")
    return found


def _product(steps: Sequence[Step], growth_of: Callable[[Step], float]) -> float:
    factor = 1.0
    for step in steps:
        factor *= max(1.0, growth_of(step))
    return factor


def _require_bounded(factor: float, most: float, part: str) -> None:
    if not factor <= most:
        raise CheckpointError(f"its {part} may make a text {factor:.3g} times as long, {most:g} times is the most")


def _growth_of(step: Step) -> float:
    match step["type"]:
        case "Replace":
            return _replace_growth(step)
        case "Prepend":
            return 1 + _size(step["prepend"]) / 2
        case "Precompiled":
            return charsmap_growth(base64.b64decode(step["precompiled_charsmap"]))
        case "Metaspace":
            return 1.0 if step.get("prepend_scheme") == "never" else 2.0
        case "ByteLevel":
            return 2.0 if step.get("add_prefix_space") else 1.0
        case "BertNormalizer":
            return 3.0  # a space on both sides of a character
        case kind if kind in _SAME or kind in _SPLITS or kind in _SPACES:
            return 1.0
        case kind:
            raise CheckpointError(f"it has a step of the type {kind!r}, whose effect on the length is not known")


def _growth_of_decoder(step: Step) -> float:
    match step["type"]:
        case "Replace":
            return _replace_growth(step)
        case "WordPiece":
            return 2.0  # a space before a token
        case kind if kind in _DECODERS:
            return 1.0
        case kind:
            raise CheckpointError(f"it has a decoder of the type {kind!r}, whose effect on the length is not known")


def _replace_growth(step: Step) -> float:
    content = _size(step["content"])
    pattern: str | None = step["pattern"].get("String")
    return content / len(pattern) if pattern else content + 1.0


def _size(text: str) -> int:
    """The characters of a text after the Unicode normalization that makes it longest."""
    return max(len(text), len(unicodedata.normalize("NFKD", text)))


def _require_few_added(processors: Sequence[Step]) -> None:
    """Raise CheckpointError where processors repeat a text, or put many special tokens around it."""
    num_added = 0
    for step in processors:
        if step["type"] != "TemplateProcessing":
            continue  # the others add two tokens at the most
        ids = {name: token["ids"] for name, token in step["special_tokens"].items()}
        pieces = step["single"]
        if sum("Sequence" in piece for piece in pieces) > 1:
            raise CheckpointError("its post_processor repeats a text")
        num_added += sum(len(ids[piece["SpecialToken"]["id"]]) for piece in pieces if "SpecialToken" in piece)
    if num_added > MAX_ADDED_TOKENS:
        raise CheckpointError(f"its post_processor adds {num_added} tokens to a text, {MAX_ADDED_TOKENS} are the most")


def charsmap_growth(data: bytes) -> float:
    """The most characters that a map of characters (SentencePiece's ``precompiled_charsmap``) makes of one.

    The map is a double array, a trie over the bytes of the keys, and behind it the replacements, each with a 0 at its
    end. Its length comes first, 4 bytes.

    Raises:
        CheckpointError: an entry is outside of the map, or a replacement is not UTF-8.
    """
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or not 4 <= size <= len(data) - 4:
        raise CheckpointError("its precompiled_charsmap is damaged: the length is wrong")
    units, texts = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64), data[4 + size :]
    codes = np.frombuffer(texts + b"\0", np.uint8)
    ends, before = np.flatnonzero(codes == 0), np.cumsum((codes & 0xC0) != 0x80)
    largest, nodes = 1.0, _offsets(units[:1])
    for depth in range(1, _KEY_BYTES + 1):
        leaves, nodes = _next_nodes(units, nodes)
        starts = _entries(units, leaves) & 0x7FFFFFFF
        _require_texts(texts, starts)
        if len(starts):
            lengths = before[ends[np.searchsorted(ends, starts)]] - before[starts]
            largest = max(largest, float(lengths.max()) / -(-depth // 4))  # a character has four bytes at the most
    return largest


def _next_nodes(units: NDArray[np.int64], nodes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The nodes that one more byte leads to: those at which a key ends, and all."""
    leaves, all_nodes = [nodes[:0]], [nodes[:0]]
    for byte in range(1, 256):
        children = nodes ^ byte
        found = _entries(units, children)
        is_child = (found & 0x800000FF) == byte
        reached = children[is_child] ^ _offsets(found[is_child])
        leaves.append(reached[(found[is_child] >> 8) & 1 == 1])
        all_nodes.append(reached)
    return np.unique(np.concatenate(leaves)), np.unique(np.concatenate(all_nodes))


def _offsets(units: NDArray[np.int64]) -> NDArray[np.int64]:
    return (units >> 10) << ((units & (1 << 9)) >> 6)


def _entries(units: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(places) and int(places.max()) >= len(units):
        raise CheckpointError("its precompiled_charsmap is damaged: an entry is outside of it")
    return units[places]


def _require_texts(texts: bytes, starts: NDArray[np.int64]) -> None:
    if len(starts) and int(starts.max()) > len(texts):
        raise CheckpointError("its precompiled_charsmap is damaged: a replacement is outside of it")
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise CheckpointError("its precompiled_charsmap is damaged: the replacements are not UTF-8") from None
    if any(texts[start] & 0xC0 == 0x80 for start in starts.tolist() if start < len(texts)):
        raise CheckpointError("its precompiled_charsmap is damaged: a replacement begins within a character")
