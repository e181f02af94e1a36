"""What a form of weights costs in quality: the loss on held-out text, and its difference to another form.

    python -m specmamba.bench.quality [--model DIR] [--forms fp32 bf16 int8 int4-g32 int4-g128 fp8] [--gguf FILE ...]
                                      [--text files|prompts] [--window 512] [--windows 64] [--decode] [--json FILE]

An engine with the weights in each form reads the same windows of text, one engine after the other, and its own log
probabilities count: of a prompt's tokens, or with ``--decode`` of output that is given, one token of each request a
step. So a figure is of the kernels that serve; steps with many rows and with few may run different ones. A window
starts from nothing, and all its tokens but the first count.

    weights       bytes that the engine keeps
    loss          nats per token, the mean over all tokens; perplexity is its exponential
    difference    to the first form, of the same tokens; +- its standard error, windows taken as independent

``files``, the default, are the files of Python's library that the bundled demo was not trained on; which ones there are
depends on the version of Python. ``prompts`` is what ``bench acceptance --replay`` reads, the bundled prompts with what
follows them: the same everywhere, but few, and cut from the same places. ``--prompts FILE`` reads others. Of more text
than ``--windows`` needs, evenly spaced windows are taken.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from specmamba.config import EngineConfig
from specmamba.errors import ConfigError, SpecmambaError
from specmamba.measure.command import Report, put_out, repeated_flags, run_command, versions_text
from specmamba.measure.prompts import TextTokenizer, bundled_texts, model_name, read_texts
from specmamba.measure.report import Count, JsonOption, NoRadixCache, machine, progress_bar, versions
from specmamba.measure.weight_forms import FORM_FIELDS, form_flags, gguf_flags

if TYPE_CHECKING:  # --help must not wait for torch
    from specmamba import LLM, RequestOutput

PROG = "python -m specmamba.bench.quality"
MB = 1e6
COLUMNS = ("form", "weights, MB", "loss, nats/token", "perplexity", "difference", "perplexity, %")


class QualityConfig(JsonOption):
    """Loss on held-out text with weights in several forms."""

    speculative_algorithm: Annotated[
        Literal["none"], Field(description="the text is given, so there is nothing to draft")
    ] = "none"
    disable_radix_cache: NoRadixCache = True
    forms: list[str] = Field(
        ["fp32", "bf16", "int8"],
        description="forms of weights, such as bf16 int8 int4-g128; the others are compared with the first; "
        "may be given again",
    )
    gguf: list[Path] = Field([], description="also these GGUF files of the same model; may be given again")
    text: Annotated[
        Literal["files", "prompts"],
        Field(description="files: held-out ones of Python's library; prompts: bundled ones, with what follows them"),
    ] = "files"
    prompts: Annotated[Path | None, Field(description="take the text from this file of prompts instead")] = None
    window: Annotated[int, Field(ge=2, description="tokens of a window at the most")] = 512
    windows: Annotated[Count, Field(description="windows at the most")] = 64
    decode: Annotated[bool, Field(description="score steps of decoding, in place of those that read a prompt")] = False

    @model_validator(mode="after")
    def _forms_set_their_flags(self) -> QualityConfig:
        if given := [name for name in FORM_FIELDS if name in self.model_fields_set]:
            raise ValueError(f"--{given[0].replace('_', '-')}: --forms sets it; drop it")
        return self


@dataclass(frozen=True)
class Scores:
    """What an engine made of the text."""

    description: dict[str, Any]
    losses: list[list[float]]  # nats, by window and token

    @property
    def loss(self) -> float:
        return statistics.fmean(loss for window in self.losses for loss in window)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; returns the exit status: 0, or 130 after Ctrl-C."""
    given = repeated_flags(sys.argv[1:] if arguments is None else arguments, ("--forms", "--gguf"))
    return run_command(PROG, QualityConfig, given, lambda config: put_out(config, run(config), print_report))


def run(config: QualityConfig) -> Report:
    """Score the text in all forms; the report as a JSON object.

    Raises:
        SpecmambaError: a form or a file cannot be run, or there is no text.
    """
    engines = _engines(config)
    texts, source = _texts(config)
    windows: list[list[int]] = []
    scores: dict[str, Scores] = {}
    with progress_bar("forms", len(engines)) as advance:
        for name, flags in engines.items():
            windows, scores[name] = _score_form(config, flags, texts, windows)
            advance()
    first = next(iter(scores.values()))
    return {
        "model": model_name(first.description),
        "parameters": first.description["parameters"],
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        "text": source,
        "windows": len(windows),
        "tokens": sum(map(len, first.losses)),
        "steps": "decode" if config.decode else "prefill",
        "results": [_figures(name, one, first) for name, one in scores.items()],
    }


def _engines(config: QualityConfig) -> dict[str, dict[str, Any]]:
    """Flags of the engines by name of the form. Raises ConfigError."""
    forms = {name: form_flags(name, "--forms") for given in config.forms for name in given.split(",")}
    for file in config.gguf:
        if not file.is_file():
            raise ConfigError(f"--gguf: there is no file {file}")
        if file.name in forms:
            raise ConfigError(f"--gguf: {file.name} is given twice: rows of the table are named after their files")
        forms[file.name] = gguf_flags(file)
    common = config.model_dump(include=set(EngineConfig.model_fields) - set(FORM_FIELDS))
    return {name: common | flags for name, flags in forms.items()}


def _texts(config: QualityConfig) -> tuple[list[str], str]:
    """The texts and what they are. Raises ConfigError: there are none."""
    from specmamba.train.corpus import default_roots, read_corpus

    if config.prompts is None and config.text == "files":
        documents = read_corpus(default_roots()[:1]).held_out
        return [document.text for document in documents], f"{len(documents)} held-out files of Python's library"
    found = bundled_texts() if config.prompts is None else read_texts(config.prompts)
    name = "bundled prompts" if config.prompts is None else f"texts of {config.prompts.name}"
    return [text.text + (text.continuation or "") for text in found], f"{len(found)} {name}"


def windows_of(texts: Sequence[str], tokenizer: TextTokenizer, length: int, count: int) -> list[list[int]]:
    """Cut each text into windows of tokens, and take at most ``count`` of them, evenly spaced.

    A window of a single token has nothing to score, and is left out.
    """
    tokens = map(tokenizer.encode, texts)
    found = [ids[start : start + length] for ids in tokens for start in range(0, len(ids), length)]
    found = [window for window in found if len(window) > 1]
    kept = min(count, len(found))
    return [found[i * len(found) // kept] for i in range(kept)]


def _score_form(
    config: QualityConfig, flags: dict[str, Any], texts: Sequence[str], windows: list[list[int]]
) -> tuple[list[list[int]], Scores]:
    """Load an engine and score the windows; the first one cuts them."""
    from specmamba import LLM

    with LLM(**flags) as llm:
        windows = windows or windows_of(texts, llm.engine.tokenizer, config.window, config.windows)
        if not windows:
            raise ConfigError("the text has no two tokens that follow each other")
        outputs = list(_outputs(llm, windows, config.decode))
        return windows, Scores(llm.engine.describe(), [losses_of(output, config.decode) for output in outputs])


def _outputs(llm: LLM, windows: Sequence[Sequence[int]], is_decode: bool) -> Iterator[RequestOutput]:
    """Let the engine read the windows, in batches: the log probabilities of all would take much memory."""
    from specmamba import SamplingParams

    size = llm.engine.config.max_running_requests
    for start in range(0, len(windows), size):
        batch = windows[start : start + size]
        if is_decode:
            params = [SamplingParams(max_tokens=len(w) - 1, logprobs=0, ignore_eos=True) for w in batch]
            yield from llm.generate([w[:1] for w in batch], params, replay=[w[1:] for w in batch], use_tqdm=False)
        else:
            yield from llm.generate(list(batch), SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)


def losses_of(output: RequestOutput, is_decode: bool) -> list[float]:
    """Nats of all tokens of a window but the first. Raises SpecmambaError: the engine failed on it."""
    if output.error is not None:
        raise SpecmambaError(f"a window could not be scored: {output.error}")
    scored = output.logprobs if is_decode else (output.prompt_logprobs or ())[1:]
    return [-one.logprob for one in scored if one is not None]


def _figures(name: str, scores: Scores, first: Scores) -> dict[str, Any]:
    """A row of the report: the figures of a form, compared with the first one."""
    return {
        "form": name,
        "dtype": scores.description["dtype"],
        "weight_bytes": scores.description["weight_bytes"],
        "loss": scores.loss,
        "perplexity": math.exp(scores.loss),
        "difference": scores.loss - first.loss,
        "difference_error": difference_error(scores.losses, first.losses),
    }


def difference_error(losses: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Standard error of the difference of two mean losses, of the same windows; NaN for a single window.

    Tokens of a window are not independent, so windows are the sample; longer ones weigh more.
    """
    differences = [(sum(mine) - sum(other), len(mine)) for mine, other in zip(losses, others, strict=True)]
    count, total = len(differences), sum(length for _, length in differences)
    mean = sum(difference for difference, _ in differences) / total
    squares = sum((difference - length * mean) ** 2 for difference, length in differences)
    return math.sqrt(squares * count / (count - 1)) / total if count > 1 else math.nan


def print_report(report: Report) -> None:
    """Print a table in Markdown, with a row for each form."""
    steps = "steps of decoding" if report["steps"] == "decode" else "steps that read a prompt"
    print(f"{report['model']}, {report['parameters']:,} parameters; {report['machine']}; {versions_text(report)}")
    print(f"{report['text']}: {report['windows']} windows, {report['tokens']:,} tokens; {steps}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}")
    for row in report["results"]:
        print(f"| {' | '.join(_cells(row, report['results'][0]['form']))} |")


def _cells(row: Report, first: str) -> list[str]:
    cells = [row["form"], f"{row['weight_bytes'] / MB:,.1f}", f"{row['loss']:.4f}", f"{row['perplexity']:.3f}"]
    if row["form"] == first:
        return [*cells, "", ""]
    error, percent = row["difference_error"], 100 * math.expm1(row["difference"])
    return [*cells, f"{row['difference']:+.4f} ± {error:.4f}", f"{percent:+.2f}"]


if __name__ == "__main__":
    sys.exit(main())
