"""Windows of tokens with the target's hidden states: the training data of a draft head.

With ``--own-outputs`` the target generates the tokens behind pieces of text: the kind of text that the head will have
to draft. They are saved beside the run, so that a run that was stopped does not have to generate them again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.errors import ConfigError, RequestError
from specmamba.flags.command_line import errors_of_out
from specmamba.measure.prompts import seed_of
from specmamba.measure.report import progress_bar
from specmamba.train.options import TrainDraftConfig
from specmamba.train.texts import Texts, Tokens

STATE_TYPE = torch.bfloat16
PROMPT_SHARE = 4  # 1 / PROMPT_SHARE of a window is the prompt of an output
FILE = "own_outputs.jsonl"


@dataclass(frozen=True)
class Windows:
    """W windows of S + 1 tokens each, in host memory: those to train on, or the held-out ones."""

    tokens: Tensor  # [W, S + 1] int64
    features: Tensor  # [W, S + 1, F] bfloat16, the target's residual stream in front of the layers that are read
    hidden: Tensor  # [W, S + 1, H] bfloat16, the target's after its final norm

    @classmethod
    def empty(cls, count: int, length: int, feature_size: int, hidden_size: int) -> Windows:
        features = torch.empty(count, length, feature_size, dtype=STATE_TYPE)
        hidden = torch.empty(count, length, hidden_size, dtype=STATE_TYPE)
        return cls(torch.empty(count, length, dtype=torch.int64), features, hidden)

    def __len__(self) -> int:
        return len(self.tokens)


def bytes_of(count: int, length: int, feature_size: int, hidden_size: int) -> int:
    """Bytes of memory that windows take."""
    return count * length * (torch.int64.itemsize + STATE_TYPE.itemsize * (feature_size + hidden_size))


def cut(texts: Sequence[Sequence[int]], length: int, seed: int) -> list[Tokens]:
    """Concatenate texts, cut them into pieces of one length, and shuffle these; the rest is left out."""
    stream = [token for text in texts for token in text]
    pieces = [tuple(stream[i : i + length]) for i in range(0, len(stream) - length + 1, length)]
    random.Random(seed).shuffle(pieces)
    return pieces


def read_windows(llm: LLM, pieces: Sequence[Tokens], layers: tuple[int, ...]) -> Windows:
    """Run pieces of one length through the target; the last token of each is never run.

    Raises:
        RequestError: a token is not in its vocabulary, or its numbers are not finite.
    """
    hidden_size = llm.engine.model.target.hidden_size
    windows = Windows.empty(len(pieces), len(pieces[0]) - 1, len(layers) * hidden_size, hidden_size)
    with progress_bar("reading the target", len(pieces)) as advance:

        def see(index: int, states: Any) -> None:
            windows.tokens[index] = torch.tensor(pieces[index][:-1])
            windows.features[index] = states.features
            windows.hidden[index] = states.hidden
            advance()

        llm.workbench.read_target(pieces, layers, see)
    return windows


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """Choose an early, a middle and a late layer in front of which the head reads (arXiv 2503.01840, section 3.1)."""
    if num_layers < 4:
        return tuple(range(min(1, num_layers - 1), num_layers))
    return min(2, num_layers // 4), num_layers // 2, num_layers - min(3, num_layers // 4)


def feature_scales(windows: Windows, num_layers: int) -> list[float]:
    """The root mean square of each layer's features, rounded to a power of two."""
    sample = windows.features[:64].float().unflatten(-1, (num_layers, -1))
    exponents = sample.square().mean((0, 1, 3)).sqrt().clamp_min(1e-6).log2().round()
    return [2.0**exponent for exponent in exponents.tolist()]


def frequent_tokens(texts: Sequence[Sequence[int]], count: int, vocab_size: int) -> Tensor:
    """The ``count`` most frequent tokens [count] int64, ascending; among equals the lower ones."""
    return _counts(texts, vocab_size).argsort(descending=True, stable=True)[:count].sort().values


def rarest_token(texts: Sequence[Sequence[int]], vocab_size: int) -> int:
    """The token that stands in the texts least often; among equals the highest one."""
    return vocab_size - 1 - int(_counts(texts, vocab_size).flip(0).argmin())


def _counts(texts: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """How often each token stands in the texts, [V] int64."""
    return torch.bincount(torch.tensor([token for text in texts for token in text]), minlength=vocab_size)


def own_outputs(config: TrainDraftConfig, llm: LLM, texts: Texts, target: str) -> Texts:
    """Replace the tokens to train on by windows that the target generates.

    Args:
        config: the flags.
        llm: the target, without drafts.
        texts: the prompts are cut from these.
        target: its digest.

    Raises:
        ConfigError: there are outputs of other settings in ``--out``, or it cannot be written.
        RequestError: the target's numbers are not finite.
    """
    prompts = _prompts(config, texts)
    with errors_of_out(config.out):
        written = _Written(config.out / FILE, _identity(config, texts, target))
    params = SamplingParams(temperature=config.temperature, ignore_eos=True)
    group = config.max_running_requests
    with progress_bar("writing", len(prompts)) as advance:
        for _ in written.outputs[: len(prompts)]:
            advance()
        for start in range(len(written.outputs), len(prompts), group):
            numbers = range(start, min(start + group, len(prompts)))
            lengths = [config.window_length - len(prompts[i]) for i in numbers]
            each = [
                params.model_copy(update={"max_tokens": length, "seed": seed_of(config.seed, i)})
                for i, length in zip(numbers, lengths, strict=True)
            ]
            outputs = llm.generate([prompts[i] for i in numbers], each, use_tqdm=False)
            if error := next((output.error for output in outputs if output.error is not None), None):
                raise RequestError(f"--own-outputs: {error}")
            with errors_of_out(config.out):
                written.add([(*output.prompt_token_ids, *output.token_ids) for output in outputs])
            for _ in numbers:
                advance()
    return replace(texts, train=tuple(written.outputs[: len(prompts)]))


def num_windows(config: TrainDraftConfig, texts: Texts) -> int:
    """Number of windows that there will be to train on."""
    if config.own_outputs:
        return len(_prompts(config, texts))
    return sum(map(len, texts.train)) // config.window_length


def _prompts(config: TrainDraftConfig, texts: Texts) -> list[Tokens]:
    """Cut the prompts that ``--own-outputs`` needs; none is repeated at temperature 0, as its outputs are equal."""
    length = config.window_length // PROMPT_SHARE
    pieces = cut(texts.train, length, config.seed)
    wanted = -(-config.own_outputs // (config.window_length - length))
    repeated = pieces if config.temperature == 0 else pieces * (wanted // len(pieces) + 1)
    return repeated[:wanted]


def _identity(config: TrainDraftConfig, texts: Texts, target: str) -> str:
    settings = [texts.digest, target, config.seq, config.temperature, config.seed]
    return hashlib.sha256(repr(settings).encode()).hexdigest()


class _Written:
    """Outputs on disk, one per line, behind a line that identifies target, text and settings."""

    def __init__(self, file: Path, identity: str) -> None:
        self._file, self._identity, self.outputs = file, identity, list[Tokens]()
        if not file.exists():  # the file is not created before there is an output
            return
        first, *lines = file.read_text("utf8", "replace").splitlines(keepends=True) or [""]
        if first.strip() != json.dumps(identity):
            raise ConfigError(
                f"{file} has outputs of another target, text or setting: delete it, or train into another --out"
            )
        complete = [
            line for line in lines if line.endswith("]\n")
        ]  # a run that was killed may leave an incomplete line
        try:
            self.outputs = [tuple(map(int, json.loads(line))) for line in complete]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} is damaged ({error}): delete it") from None
        if len(complete) < len(lines):
            file.write_text("".join([first, *complete]), "utf8")

    def add(self, outputs: list[Tokens]) -> None:
        self.outputs += outputs
        with self._file.open("a", encoding="utf8") as stream:
            if not stream.tell():
                stream.write(json.dumps(self._identity) + "\n")
            stream.writelines(json.dumps(output) + "\n" for output in outputs)
