"""Train a draft head for a target that has none, or a better one.

    specmamba train draft --model PATH --out DIR [--kind eagle3|dflash|dspark] [--text FILE_OR_FOLDER ...]
                          [--own-outputs N] [--minutes 10] [--steps-deep 3] [--draft-vocab-size N] [any engine flag]

The target reads the text once, and its hidden states are kept in memory. The head learns to predict the target's
tokens, several of them ahead on its own states. A report on held-out text ends the run: acceptance length, speed-up,
and whether the text equals the plain run's. The last line printed is the command that serves the target with its head.
DIR gets

- ``head/``: for ``--speculative-draft-model-path``; the layout of its kind, which other runtimes read too;
- ``report.json`` and ``held_out.jsonl``, the prompts of the report;
- ``resume/`` and ``own_outputs.jsonl``: from these the same command resumes a run that was stopped (Ctrl-C, SIGTERM,
  power).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.command_line import errors_of_out
from specmamba.measure.command import run_command
from specmamba.measure.report import machine, versions
from specmamba.train.options import TrainDraftConfig, prepared_out

if TYPE_CHECKING:  # importing torch takes seconds: --help must not wait for it
    import torch
    from rich.console import Console

    from specmamba import LLM
    from specmamba.train.loop import StepCallback
    from specmamba.train.texts import Documents, Texts
    from specmamba.train.trainer import DraftTrainer, TrainingData

PROG = "specmamba train draft"
PROMPTS = "held_out.jsonl"


@dataclass(frozen=True)
class Target:
    """What is kept of the target when its engine is closed."""

    texts: Texts
    prompts: str  # of the report, one per line
    data: TrainingData
    layers: tuple[int, ...]  # layers in front of which the head reads
    context_length: int
    device: torch.device


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status.

    0: finished; 1: stopped before the end (resumable) or a text that diverged; 2: an error; 130: Ctrl-C before or after
    the training itself.
    """
    return run_command(PROG, TrainDraftConfig, arguments, _run, "the same command goes on from what is in --out")


def _run(config: TrainDraftConfig) -> int:
    from rich.console import Console

    with _threads(config.num_threads):
        return train(config, Console())


def train(config: TrainDraftConfig, console: Console, on_step: StepCallback | None = None) -> int:
    """Train into ``config.out``, resuming a run found there, and report. Returns the exit status of ``main``."""
    from specmamba.train.loop import stopping_on_signals
    from specmamba.train.texts import read_documents

    with prepared_out(config.out):
        target = read_the_target(config, read_documents(config), console)
        trainer = new_trainer(config, target, console)
    with errors_of_out(config.out):
        (config.out / PROMPTS).write_text(target.prompts, "utf8")
    with stopping_on_signals(trainer):
        finished = trainer.run(console, on_step)
    console.print(trainer.describe(), highlight=False, soft_wrap=True)
    if not finished:
        console.print("stopped: the same command resumes", highlight=False, soft_wrap=True)
        return 1
    with errors_of_out(config.out):
        trainer.write(config.out / "head", target.layers, target.context_length)
    outcome = outcome_of(config, trainer)
    del trainer, target  # the engine of the report needs their memory
    status = report(config, outcome, console)
    console.print(serve_command(config), highlight=False, soft_wrap=True)
    return status


def read_the_target(config: TrainDraftConfig, documents: Documents, console: Console) -> Target:
    """Collect everything to learn from. The target's engine is closed afterwards, with its weights and pools."""
    from specmamba import LLM
    from specmamba.train import windows
    from specmamba.train.memory import check_memory
    from specmamba.train.trainer import TrainingData, prompts_of

    with LLM(**config.engine_flags, speculative_algorithm="none") as llm:
        digest = llm.workbench.target_digest
        texts = _texts(config, documents, llm)
        check_memory(config, llm, windows.num_windows(config, texts), console)
        prompts = prompts_of(texts.held_out, llm.engine.tokenizer)
        texts = windows.own_outputs(config, llm, texts, digest) if config.own_outputs else texts
        layers = windows.feature_layers(llm.engine.model.num_layers)
        if config.drafts_blocks and 0 in layers:
            raise ConfigError(
                f"--kind {config.kind}: the head reads behind layers that others follow; the target has one layer"
            )
        pieces = windows.cut(texts.train, config.window_length, config.seed)
        ends = [piece[: llm.engine.context_length - 1] for piece in texts.held_out]
        read, held_out = (windows.read_windows(llm, of, layers) for of in (pieces, ends))
        matrices, identity = llm.workbench.target_matrices(), {"texts": texts.digest, "target": digest}
        data = TrainingData(read, held_out, *matrices, identity)
        return Target(texts, prompts, data, layers, llm.engine.context_length, llm.engine.device)


def _texts(config: TrainDraftConfig, documents: Documents, llm: LLM) -> Texts:
    from specmamba.train.texts import check_vocabulary, encode_texts

    vocab_size, context = llm.engine.vocab_size, llm.engine.context_length
    if config.window_length >= context:
        raise ConfigError(f"--seq {config.seq}: the target takes {context} tokens, so at most {context - 3} fit")
    if (config.draft_vocab_size or 1) > vocab_size:
        raise ConfigError(f"--draft-vocab-size {config.draft_vocab_size}: the target has {vocab_size} tokens")
    texts = encode_texts(config, documents, llm.engine.tokenizer)
    check_vocabulary(texts, llm.engine.tokenizer.vocab_size, vocab_size)
    return texts


def new_trainer(config: TrainDraftConfig, target: Target, console: Console) -> DraftTrainer:
    """Make the trainer of a new head, or of the head of a run that was stopped."""
    import torch

    from specmamba.train.block_head import BlockHead
    from specmamba.train.block_trainer import BlockTrainer
    from specmamba.train.head import Eagle3Head
    from specmamba.train.memory import block_shape_of, shape_of
    from specmamba.train.trainer import DraftTrainer
    from specmamba.train.windows import feature_scales, frequent_tokens, rarest_token

    data, num_layers, texts = target.data, len(target.layers), target.texts.train
    vocab_size, hidden_size = data.output.shape
    drafted = config.draft_vocab_size
    shape, scales = shape_of(config, hidden_size, vocab_size, num_layers), feature_scales(data.windows, num_layers)
    torch.manual_seed(config.seed)
    trainer: DraftTrainer
    if config.drafts_blocks:
        block = block_shape_of(config, shape, rarest_token(texts, vocab_size))
        trainer = BlockTrainer(config, data, BlockHead(block, scales), target.device)
    else:
        ids = None if drafted is None else frequent_tokens(texts, drafted, vocab_size)
        trainer = DraftTrainer(config, data, Eagle3Head(shape, data.output, scales, ids), target.device)
    head = trainer.head
    step = trainer.progress.step
    console.print(
        f"the head has {head.num_parameters:,} parameters and reads the target in front of its "
        f"layers {', '.join(map(str, target.layers))}; {'resuming after' if step else 'starting at'} step {step}",
        highlight=False,
        soft_wrap=True,
    )
    return trainer


def outcome_of(config: TrainDraftConfig, trainer: DraftTrainer) -> dict[str, Any]:
    """The figures of the training for ``report.json``."""
    return {
        "recipe": config.recipe() | {"own_outputs": config.own_outputs},
        "head": vars(trainer.head.shape),
        "parameters": trainer.head.num_parameters,
        "steps": trainer.progress.step,
        "seconds": round(trainer.progress.elapsed, 1),
        **trainer.figures,
    }


def report(config: TrainDraftConfig, outcome: dict[str, Any], console: Console) -> int:
    """Measure the head and write ``report.json``; status 1 when a text diverged."""
    from specmamba.train.trainer import measure_head

    figures = measure_head(config, config.out / "head", config.out / PROMPTS, console)
    found = outcome | {"machine": machine(), "versions": versions()} | figures
    with errors_of_out(config.out):
        (config.out / "report.json").write_text(json.dumps(found, indent=2) + "\n", "utf8")
    return 1 if any(figures[name]["lossless"]["diverged"] for name in ("sampled", "greedy")) else 0


def serve_command(config: TrainDraftConfig) -> str:
    """The command that serves the target with its new head, drafting as deep as was trained."""
    served = EngineConfig(model=config.model, revision=config.revision)
    command = ["specmamba", "serve"]
    command += ["--model", config.model] if config.model else []
    command += ["--revision", config.revision] if config.revision else []
    command += ["--speculative-draft-model-path", str(config.out / "head")]
    if config.steps_deep != served.num_draft_steps:
        command += ["--speculative-num-steps", str(config.steps_deep)]
    return shlex.join(command)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Set the number of threads for the training too; an engine restores the number before it when it ends."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    raise SystemExit(main())
