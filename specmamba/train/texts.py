"""The text that a draft head is trained on, and the held-out text of its report.

Of twenty documents one is held out. If there are fewer than twenty, the last twentieth of each is held out. The
default corpus has its own split (``specmamba/train/corpus.py``), with which the bundled demo was trained too.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specmamba.errors import ConfigError, RequestError
from specmamba.measure.prompts import PromptText, TextTokenizer, encode_with_continuation, read_texts
from specmamba.train.corpus import default_roots, read_corpus
from specmamba.train.options import TrainDraftConfig

HELD_OUT_EVERY = 20
REPORT_TOKENS = 96  # length of a held-out piece
SHARES = 50  # a document gives at most 1 / SHARES of the tokens, unless all documents together are too few
SLAB = 1 << 20  # characters that are encoded at once: a huge file is not encoded as a whole
PROMPTS = ".jsonl"

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Texts:
    """Tokens of documents."""

    train: tuple[Tokens, ...]
    held_out: tuple[Tokens, ...]  # pieces of ``REPORT_TOKENS``

    @property
    def digest(self) -> str:
        """A hash of the tokens to train on."""
        return hashlib.sha256(repr(self.train).encode()).hexdigest()


@dataclass(frozen=True)
class Documents:
    """Documents to train on and held-out ones; no text is in both."""

    train: tuple[PromptText, ...]
    held_out: tuple[PromptText, ...]


def encode_texts(config: TrainDraftConfig, documents: Documents, tokenizer: TextTokenizer) -> Texts:
    """Encode ``--num-tokens`` tokens to train on, and ``--report-prompts`` held-out pieces.

    Raises:
        ConfigError: a document cannot be encoded, or there is too little text.
    """
    train, held_out = list(documents.train), list(documents.held_out)
    draw = random.Random(config.seed)
    draw.shuffle(train)
    draw.shuffle(held_out)
    try:
        chosen, pieces = _take(config, train, tokenizer), _pieces(config, held_out, tokenizer)
    except RequestError as error:
        raise ConfigError(f"--text: {error}") from None
    num_tokens = sum(map(len, chosen))
    if num_tokens < config.window_length:
        raise ConfigError(
            f"--text: there are {num_tokens} tokens to train on, fewer than a sequence of {config.window_length}: give "
            "more text, or lower --seq"
        )
    if not pieces:
        raise ConfigError(
            f"--text: nothing of {REPORT_TOKENS} tokens can be held out for the report: give more text (of twenty "
            "documents one is held out; of fewer the last twentieth of each)"
        )
    return Texts(tuple(chosen), tuple(pieces))


def check_vocabulary(texts: Texts, tokenizer_size: int, vocab_size: int) -> None:
    """Raise ConfigError when there are tokens that the model does not have."""
    highest = max(max(tokens) for tokens in (*texts.train, *texts.held_out))
    if highest >= vocab_size:
        raise ConfigError(
            f"--model: its tokenizer has {tokenizer_size:,} tokens and the model {vocab_size:,}: it cannot read this "
            f"text, which has token {highest:,}. Give the model the tokenizer that it was trained with"
        )


def read_documents(config: TrainDraftConfig) -> Documents:
    """Read the documents that the flags name.

    Raises:
        ConfigError: a file cannot be read.
    """
    if not config.text:
        try:
            corpus = read_corpus(default_roots())
        except OSError as error:
            raise ConfigError(
                f"the Python source that is installed here cannot be read: {error}: give text with --text"
            ) from None
        train, held_out = ([PromptText(document.text) for document in part] for part in (corpus.train, corpus.held_out))
        return Documents(tuple(train), tuple(held_out))
    return _split(list(dict.fromkeys(_documents(config))), config.seed)


def _split(documents: list[PromptText], seed: int) -> Documents:
    random.Random(seed).shuffle(documents)
    if len(documents) >= HELD_OUT_EVERY:
        held_out = documents[::HELD_OUT_EVERY]
        del documents[::HELD_OUT_EVERY]
        return Documents(tuple(documents), tuple(held_out))
    cuts = [(document, len(document.text) - len(document.text) // HELD_OUT_EVERY) for document in documents]
    train = [document if document.is_chat else PromptText(document.text[:cut]) for document, cut in cuts]
    return Documents(tuple(train), tuple(PromptText(doc.text[cut:]) for doc, cut in cuts if not doc.is_chat))


def _documents(config: TrainDraftConfig) -> Iterator[PromptText]:
    """Yield the text of every file; from files of prompts, each prompt with its continuation."""
    for name in config.text:
        for file in _files(Path(name), config.pattern):
            if file.suffix != PROMPTS:
                yield PromptText(_read(file))
                continue
            try:
                prompts = read_texts(file)
            except ConfigError as error:
                raise ConfigError(str(error).replace("--prompts", "--text", 1)) from None
            yield from (p if p.is_chat else PromptText(p.text + (p.continuation or "")) for p in prompts)


def _files(path: Path, pattern: str) -> list[Path]:
    try:
        if not path.exists():
            raise ConfigError(f"--text: there is no file or folder {path}")
        if not path.is_dir():
            return [path]
        next(path.iterdir(), None)  # raises; rglob skips folders that cannot be read
        files = sorted(file for file in path.rglob(pattern) if file.is_file())
    except OSError as error:
        raise ConfigError(f"--text: {path} cannot be read: {error.strerror}") from None
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"--pattern {pattern!r}: {error}") from None
    if not files:
        raise ConfigError(f"--text: {path} has no file that matches --pattern {pattern!r}")
    return files


def _read(file: Path) -> str:
    try:
        return file.read_text("utf8")
    except UnicodeDecodeError:
        raise ConfigError(f"--text: {file} cannot be read: it is not UTF-8") from None
    except OSError as error:
        raise ConfigError(f"--text: {file} cannot be read: {error.strerror}") from None


def _take(config: TrainDraftConfig, documents: Sequence[PromptText], tokenizer: TextTokenizer) -> list[Tokens]:
    """Take ``--num-tokens`` tokens: first a share of every document, so that no large one fills all, then the rest."""
    chosen, room = list[Tokens](), config.num_tokens
    share = max(room // SHARES, 4 * config.window_length)
    for start, stop in ((0, share), (share, share + room)):
        for document in documents:
            stream = itertools.chain.from_iterable(_encode(document, tokenizer))
            chosen.append(tuple(itertools.islice(stream, start, min(stop, start + room))))
            room -= len(chosen[-1])
            if not room:
                return [tokens for tokens in chosen if tokens]
    return [tokens for tokens in chosen if tokens]


def _encode(document: PromptText, tokenizer: TextTokenizer) -> Iterator[Sequence[int]]:
    if document.is_chat:
        prompt, continuation = encode_with_continuation(document, tokenizer)
        yield [*prompt, *continuation]
        return
    for start in range(0, len(document.text), SLAB):
        yield tokenizer.encode(document.text[start : start + SLAB])


def _pieces(config: TrainDraftConfig, documents: Sequence[PromptText], tokenizer: TextTokenizer) -> list[Tokens]:
    """Draw a random piece of every document, then a second one, and so on, until there are enough."""
    by_document, draw = [], random.Random(config.seed)
    for document in documents[: 4 * config.report_prompts]:
        tokens = next(_encode(document, tokenizer), [])
        starts = range(0, len(tokens) - REPORT_TOKENS + 1, REPORT_TOKENS)
        by_document.append([tuple(tokens[start : start + REPORT_TOKENS]) for start in starts])
        draw.shuffle(by_document[-1])
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_document))
    return [piece for piece in in_turn if piece is not None][: config.report_prompts]
