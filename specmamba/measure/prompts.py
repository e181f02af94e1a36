"""Prompts for measuring: the bundled ones, JSON lines, or chat datasets in ShareGPT form.

An entry is one of

    {"prompt": "...", "continuation": "..."}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}

one per line, or all of them in one JSON list. ``continuation``, the text that follows in the source, is
optional. In a conversation the first human turn is the prompt, and the answer to it, if there is one, the continuation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field

from specmamba.config import DEMO_MODEL, EngineConfig
from specmamba.errors import ConfigError
from specmamba.measure.report import NoRadixCache, ReportOptions
from specmamba.sampling_params import Temperature

PLAIN = "plain"
PLAIN_FLAGS: dict[str, Any] = {"speculative_algorithm": "none"}
LOOPING = 0.5  # share of distinct 4-grams below which acceptance says little
WITHOUT_SHAPE = set(EngineConfig.model_fields) - {
    *("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
    *("speculative_tree", "speculative_algorithm"),
}

HUMAN, MODEL = ("human", "user"), ("gpt", "assistant", "chatgpt")
_FORMS = '{"prompt": "..."} or {"conversations": [{"from": "human", "value": "..."}, ...]}'


@dataclass(frozen=True, slots=True)
class PromptText:
    """One prompt, and the text that follows it if that is known."""

    text: str
    continuation: str | None = None
    is_chat: bool = False  # a user's message: it goes through the chat template


class TextOptions(ReportOptions):
    """The engine's flags, the files of a report, and the texts to run."""

    needs_text = True
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
    """Read the prompts to run. Raises ConfigError: the file has no prompts, or none that can be replayed."""
    texts = bundled_texts() if config.prompts is None else read_texts(config.prompts)
    if config.replay and not any(text.continuation for text in texts):
        where = "the bundled prompts" if config.prompts is None else str(config.prompts)
        raise ConfigError(f'--replay: {where}: no prompt has a "continuation" to replay')
    return texts


class TextTokenizer(Protocol):
    """The methods of a tokenizer that are used here; ``LLM.engine.tokenizer`` has them."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]: ...


def bundled_texts() -> list[PromptText]:
    """The bundled prompts, cut from held-out files, each with its continuation, without repetitions."""
    rows = map(json.loads, (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines())
    texts = [PromptText(row["prompt"], row.get("continuation")) for row in rows if row["source"] != "handwritten"]
    return list(dict.fromkeys(texts))


def read_texts(path: Path) -> list[PromptText]:
    """Read the prompts of a file, in order. Conversations without a human turn are left out.

    Raises:
        ConfigError: the file cannot be read, an entry has another form, or there is no prompt at all; the message has
            the line, or in a JSON list the number of the entry.
    """
    found = [_text_of(entry, where) for entry, where in _entries(path)]
    texts = [text for text in found if text is not None]
    if not texts:
        what = "is empty" if not found else "has no conversation with a human turn"
        raise ConfigError(f"--prompts: {path} {what}")
    return texts


def encode_prompt(text: PromptText, tokenizer: TextTokenizer) -> list[int]:
    """Encode a prompt; a chat message goes through the chat template if the checkpoint has one.

    Raises:
        RequestError: the text is not valid Unicode, or the template refuses it.
    """
    if text.is_chat and tokenizer.has_chat_template:
        return tokenizer.apply_chat_template([{"role": "user", "content": text.text}])
    return tokenizer.encode(text.text)


def encode_with_continuation(text: PromptText, tokenizer: TextTokenizer) -> tuple[list[int], list[int]]:
    """Encode a prompt and its continuation.

    Plain text is encoded in one piece and split where the prompt's own tokens end, so that the model sees the tokens
    that it would see in a longer text: a token that spans the border belongs to the continuation. After a chat template
    the continuation is encoded on its own, behind the template's marker.

    Raises:
        RequestError: the text is not valid Unicode, or the template refuses it.
    """
    prompt, continuation = encode_prompt(text, tokenizer), text.continuation or ""
    if text.is_chat and tokenizer.has_chat_template:
        added = _length_of_common_start(tokenizer.encode(continuation), tokenizer.encode(""))  # a begin-of-text token
        return prompt, tokenizer.encode(continuation)[added:]
    whole = tokenizer.encode(text.text + continuation)
    split = max(1, _length_of_common_start(prompt, whole))
    return whole[:split], whole[split:]


def continued_prompts(tokenizer: TextTokenizer, count: int, number: int) -> list[tuple[list[int], list[int]]]:
    """Tokens of bundled prompts and of what follows them in their source, ``count`` of them; others each round."""
    texts = [text for text in bundled_texts() if text.continuation]
    return [encode_with_continuation(texts[(i + number) % len(texts)], tokenizer) for i in range(count)]


def _length_of_common_start(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _entries(path: Path) -> Iterator[tuple[object, str]]:
    """Yield every entry of a file and its place, for messages."""
    text = _read(path)
    if text.lstrip().startswith("["):
        entries = _parse(text, f"--prompts: {path}")
        yield from ((entry, f"--prompts: {path}, entry {i}") for i, entry in enumerate(entries, 1))
        return
    for i, line in enumerate(text.split("\n"), 1):  # splitlines() would break strings at U+2028
        if line.strip():
            where = f"--prompts: {path}, line {i}"
            yield _parse(line, where), where


def _read(path: Path) -> str:
    try:
        return path.read_text("utf8")
    except OSError as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts: {path} cannot be read: it is not UTF-8") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None


def _text_of(entry: object, where: str) -> PromptText | None:
    """Convert an entry; None for a conversation without a human turn."""
    if isinstance(entry, dict) and "conversations" in entry:
        return _first_exchange(entry["conversations"], where)
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise ConfigError(f"{where}: not of the form {_FORMS}")
    continuation = entry.get("continuation")
    return PromptText(
        _checked(entry["prompt"], "prompt", where),
        None if continuation is None else _checked(continuation, "continuation", where),
    )


def _first_exchange(turns: object, where: str) -> PromptText | None:
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and {"from", "value"} <= set(turn) for turn in turns
    ):
        raise ConfigError(f'{where}: "conversations" is not a list of {{"from": "human", "value": "..."}}')
    at = next((i for i, turn in enumerate(turns) if turn["from"] in HUMAN and turn["value"]), None)
    if at is None:
        return None
    prompt = _checked(turns[at]["value"], "value", where)
    answer = turns[at + 1] if at + 1 < len(turns) else {"from": None}
    is_answered = answer["from"] in MODEL and answer["value"]
    return PromptText(prompt, _checked(answer["value"], "value", where) if is_answered else None, is_chat=True)


def _checked(text: object, name: str, where: str) -> str:
    if not isinstance(text, str) or not text:
        raise ConfigError(f'{where}: "{name}" is not a text, or an empty one')
    if text != text.encode("utf8", "replace").decode("utf8"):
        raise ConfigError(f'{where}: "{name}" has half of a surrogate pair, which is no character')
    return text


def seed_of(seed: int, number: int) -> int:
    """The seed of request ``number`` in a run with ``--seed``."""
    return (seed * 1_000_003 + number) % (1 << 63)


def sampling_name(temperature: float | None) -> str:
    """Name the way tokens were chosen, for reports; None: they were given (``--replay``)."""
    return "replayed text" if temperature is None else f"temperature {temperature:g}"


def looping_warning(share: float, is_replay: bool) -> list[str]:
    """A warning if text repeats itself; ``share``: of distinct 4-grams."""
    if share >= LOOPING:
        return []
    advice = "" if is_replay else ": raise --temperature, or measure on real text with --replay"
    return [f"warning: text loops ({share:.2f} distinct 4-grams), acceptance is flattered{advice}"]


def model_name(description: dict[str, object]) -> str:
    """The name of the model in ``Engine.describe()``, without its folder."""
    return Path(str(description["model"])).name
