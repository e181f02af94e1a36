"""What the target itself writes behind pieces of text: the very text that a head will have to draft.

It is kept beside the run, so that a run that was stopped does not have to write it again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from specmamba import LLM, SamplingParams
from specmamba.errors import ConfigError, RequestError
from specmamba.measure.prompts import seed_of
from specmamba.measure.report import progress_bar
from specmamba.train.folder import writing
from specmamba.train.settings import TrainDraftConfig
from specmamba.train.texts import Texts, Tokens
from specmamba.train.windows import cut

PROMPT_SHARE = 4  # of a window: what an output starts from
FILE = "own_outputs.jsonl"


def own_outputs(config: TrainDraftConfig, llm: LLM, texts: Texts, target: str) -> Texts:
    """The same texts with windows that the target wrote in place of those to train on.

    Args:
        config: the flags.
        llm: the target, plain.
        texts: what its prompts are cut from.
        target: its digest.

    Raises:
        ConfigError: there are outputs of other settings in ``--out``, or it cannot be written.
        RequestError: the target's numbers are not finite.
    """
    prompts = _prompts(config, texts)
    with writing(config.out):
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
            outputs = llm.generate([prompts[i] for i in numbers], each)
            if error := next((output.error for output in outputs if output.error is not None), None):
                raise RequestError(f"--own-outputs: {error}")
            with writing(config.out):
                written.add([(*output.prompt_token_ids, *output.token_ids) for output in outputs])
            for _ in numbers:
                advance()
    return replace(texts, train=tuple(written.outputs[: len(prompts)]))


def num_windows(config: TrainDraftConfig, texts: Texts) -> int:
    """As many as there will be to train on."""
    if config.own_outputs:
        return len(_prompts(config, texts))
    return sum(map(len, texts.train)) // config.window_length


def _prompts(config: TrainDraftConfig, texts: Texts) -> list[Tokens]:
    """As many as ``--own-outputs`` asks for; greedy outputs of one prompt are all the same, so none is repeated."""
    length = config.window_length // PROMPT_SHARE
    pieces = cut(texts.train, length, config.seed)
    wanted = -(-config.own_outputs // (config.window_length - length))
    repeated = pieces if config.temperature == 0 else pieces * (wanted // len(pieces) + 1)
    return repeated[:wanted]


def _identity(config: TrainDraftConfig, texts: Texts, target: str) -> str:
    settings = [texts.digest, target, config.seq, config.temperature, config.seed]
    return hashlib.sha256(repr(settings).encode()).hexdigest()


class _Written:
    """Outputs on disk, a line each, behind a line that says what they are outputs of."""

    def __init__(self, file: Path, identity: str) -> None:
        self._file, self._identity, self.outputs = file, identity, list[Tokens]()
        if not file.exists():  # nor is it made before there is something to keep
            return
        first, *lines = file.read_text("utf8", "replace").splitlines(keepends=True) or [""]
        if first.strip() != json.dumps(identity):
            raise ConfigError(
                f"{file} has outputs of another target, text or setting: delete it, or train into another --out"
            )
        complete = [line for line in lines if line.endswith("]\n")]  # a run that was killed may leave half a line
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
