"""The training of a draft head: the loss of its drafts against the target's distribution, and the optimizer steps.

The logits of a whole step have a number for every position and every token of the vocabulary: gigabytes with 150,000
tokens, and autograd would keep several such tensors. The gradient of the cross entropy by the logits has a closed form:
softmax times the target's mass minus the target's distribution. So logits are computed in slices, and each slice is
reduced to the gradients of states and weights at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from specmamba.errors import SpecmambaError
from specmamba.flags.command_line import errors_of_out
from specmamba.measure.acceptance.figures import full_report
from specmamba.measure.acceptance.options import AcceptanceBenchConfig, largest_flags, variants_of
from specmamba.measure.acceptance.run import measure, select_tasks, start_engine
from specmamba.measure.acceptance.tables import print_report
from specmamba.measure.prompts import read_texts
from specmamba.train.block_head import BlockHead
from specmamba.train.head import Eagle3Head, write_head
from specmamba.train.loop import RunState, TrainingLoop
from specmamba.train.options import TrainDraftConfig
from specmamba.train.texts import REPORT_TOKENS, Tokens
from specmamba.train.windows import Windows

STEP_WEIGHT = 0.8  # weight of a draft's loss relative to that of the draft before it (EAGLE's training programs)
SLICE_NUMBERS = 1 << 24  # numbers in a slice of logits
TENSORS_AT_ONCE = 3  # tensors of that size in memory at the same time
# not all matrices at once, which on a GPU takes the memory of a second head
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0, "foreach": False}
# Adam's best rate falls with the width of what it trains (arXiv 2203.03466): one that suits 256 channels suits all.
LARGEST_LR, WIDTH_TIMES_LR = 3e-3, 0.77
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class DraftLoss:
    """The loss of S drafts in a row."""

    loss: Tensor  # [] float32, their weighted mean, in nats
    agreements: Tensor  # [S] float32, the share of entries whose likeliest token is the target's
    gradients: list[Tensor]  # S tensors [B, L, H]: of the loss with respect to the states


def slice_length(vocab_size: int) -> int:
    """Number of positions in one slice of logits."""
    return max(1, SLICE_NUMBERS // vocab_size)


@torch.no_grad()
def draft_loss(
    states: Sequence[Tensor], hidden: Tensor, weight: Tensor, output: Tensor, ids: Tensor | None
) -> DraftLoss:
    """Compute the cross entropy of drafts against the target's distribution, its gradients, and the agreement.

    The target's probability of tokens that are never drafted is left out; the rest is the weight of a position.

    Args:
        states: S tensors [B, L, H] of ``Eagle3Head.states``; the first s entries of step s (from 0) do not count.
        hidden: [B, L, H] float32, the target's at the positions of the entries.
        weight: [D, H], the head's output matrix; its gradient is set.
        output: [V, H], the target's.
        ids: [D] int64, the tokens that are drafted; None: all.
    """
    batch, length, _ = hidden.shape
    num_steps, rows = len(states), hidden.flatten(0, 1)
    position = torch.arange(length, device=hidden.device).repeat(batch)
    importance = torch.tensor([STEP_WEIGHT**step for step in range(num_steps)], device=hidden.device)
    importance = importance / importance.sum()
    weight.grad = torch.zeros_like(weight)
    gradients = [torch.empty_like(x) for x in states]
    losses, agreements = (torch.zeros(num_steps, device=hidden.device) for _ in range(2))
    for start in range(0, len(rows), slice_length(len(output))):
        part = slice(start, start + slice_length(len(output)))
        target, likeliest = of_target(rows[part], output, ids)
        for step, x in enumerate(states):
            counted = (position[part] >= step) / (batch * (length - step))
            entropy, drafted, gradient = of_draft(x.flatten(0, 1)[part], weight, target)
            agrees = (drafted if ids is None else ids[drafted]) == likeliest
            losses[step] += entropy @ counted
            agreements[step] += agrees.float() @ counted
            gradient *= (counted * importance[step])[:, None]
            torch.mm(gradient, weight, out=gradients[step].view(len(rows), -1)[part])
            weight.grad.addmm_(gradient.T, x.flatten(0, 1)[part])
            del gradient
        del target
    return DraftLoss(losses @ importance, agreements, gradients)


def of_target(hidden: Tensor, output: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The target's probabilities of the drafted tokens [n, D], and its likeliest tokens [n]."""
    target = F.linear(hidden, output).softmax(-1)
    return target if ids is None else target[:, ids], target.argmax(-1)


def of_draft(
    states: Tensor, weight: Tensor, target: Tensor, added: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The cross entropy [n], the likeliest drafts [n], and the gradient of the former by the logits [n, D].

    ``added`` [n, D] is a part of the logits beside the product of ``states`` [n, H] and ``weight`` [D, H].
    """
    logits = F.linear(states, weight) if added is None else added.addmm_(states, weight.T)
    said = logits.log_softmax(-1)
    del logits, added
    entropy = -(target * said).sum(-1)
    likeliest = said.argmax(-1)
    return entropy, likeliest, said.exp_().mul_(target.sum(-1, keepdim=True)).sub_(target)


def likeliest_of(states: Tensor, weight: Tensor, latents: Tensor | None = None, links: Tensor | None = None) -> Tensor:
    """The likeliest drafts [n] of states [n, H], whose logits may have a part of latents [n, R] and links [D, R]."""
    found = []
    for start in range(0, len(states), slice_length(len(weight))):
        part = slice(start, start + slice_length(len(weight)))
        logits = F.linear(states[part], weight)
        if latents is not None and links is not None:
            logits.addmm_(latents[part], links.T)
        found.append(logits.argmax(-1))
    return torch.cat(found)


@dataclass(frozen=True)
class TrainingData:
    """The data that a head is trained on. Matrices are the target's, [V, H] float32."""

    windows: Windows
    held_out: Windows  # of the report's texts, for the curve
    embedding: Tensor
    output: Tensor
    identity: dict[str, str]  # digests of texts and target, which must be the same when a run is resumed


class DraftTrainer(TrainingLoop):
    """One run, from a random start or from the state saved under ``config.out``.

    Raises:
        CheckpointError: that state is damaged.
        ConfigError: it belongs to a run with other settings, another text or another target.
    """

    smoothing = 0.95
    seconds_between_lines = 30.0

    head: Eagle3Head | BlockHead

    def __init__(
        self, config: TrainDraftConfig, data: TrainingData, head: Eagle3Head | BlockHead, device: torch.device
    ) -> None:
        self.head, self._config, self._windows, self._device = head.to(device).train(), config, data.windows, device
        self._held_out = data.held_out
        self._embedding, self._output = data.embedding.to(device), data.output.to(device)
        self._target_ids = None if head.target_ids is None else head.target_ids.to(device)
        peak_lr = config.lr or min(LARGEST_LR, WIDTH_TIMES_LR / head.shape.hidden_size)
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=peak_lr, **ADAM)
        self._order = torch.Generator().manual_seed(config.seed)
        identity = {**config.recipe(), "head": asdict(head.shape), **data.identity}
        state = RunState(config.out / "resume", identity, head, self._optimizer, self._order)
        super().__init__(config, peak_lr, state)

    @property
    def figures(self) -> dict[str, Any]:
        """Moving averages: the loss in nats, and the acceptance of each draft in a row; and the held-out curve.

        Acceptance is the share of drafts that are the target's likeliest token, on text as it stands.
        """
        loss, *agreement = self.progress.smoothed or [math.nan]
        return {"loss": loss, "agreement": agreement, "curve": self.progress.curve}

    def describe(self) -> str:
        """Name the step and the moving averages."""
        loss, *agreement = self.progress.smoothed or [math.nan]
        shares = " ".join(f"{share:.2f}" for share in agreement)
        curve = self.progress.curve
        held_out = f"  held out {curve[-1]['accept_length']:.2f}" if curve else ""
        return f"step {self.progress.step}  loss {loss:.3f}  agreement {shares}{held_out}"

    def save(self) -> None:
        """Write the state that a later run goes on from, with a point of the held-out curve.

        Raises:
            ConfigError: the folder cannot be written.
        """
        step, curve = self.progress.step, self.progress.curve
        if not (curve and curve[-1]["step"] == step):
            length = self.held_out_accept_length()
            curve.append({"step": step, "seconds": round(self.progress.elapsed, 1), "accept_length": round(length, 4)})
        with errors_of_out(self._config.out):
            super().save()

    def write(self, folder: Path, layers: tuple[int, ...], max_positions: int) -> None:
        """Write the head; arguments as for ``write_head``."""
        assert isinstance(self.head, Eagle3Head)
        write_head(folder, self.head, layers, max_positions)

    @torch.no_grad()
    def held_out_accept_length(self) -> float:
        """Tokens per verify of greedy chains along the held-out texts, the mean over all roots: 1 without a hit.

        Drafts behind a hit are made of the text's own tokens in training too, so this is what a replay would accept.
        """
        hits = [self._hits(torch.tensor([i])).cumprod(-1).sum(-1) for i in range(len(self._held_out))]
        return 1.0 + float(torch.cat(hits).float().mean())

    def update(self) -> list[float]:
        """Do one optimizer step; return its loss and agreements."""
        chosen = torch.randint(len(self._windows), (self._config.batch,), generator=self._order)
        self._optimizer.zero_grad(set_to_none=True)
        states, drafts = self._run_head(chosen)
        values: list[float] = torch.cat([drafts.loss[None], drafts.agreements]).tolist()
        if not math.isfinite(values[0]):
            raise SpecmambaError(
                f"the loss at step {self.progress.step + 1} is {values[0]}: train with a lower --lr into another --out"
            )
        torch.autograd.backward(states, drafts.gradients)
        del states, drafts
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        return values

    def _hits(self, chosen: Tensor) -> Tensor:
        """Which drafts of chains behind every root are the text's tokens, in the chosen held-out window: [A, S]."""
        assert isinstance(self.head, Eagle3Head)
        tokens, features, _ = self._windows_on_device(chosen, self._held_out)
        num_steps, weight = self._config.steps_deep, self.head.lm_head.weight
        embeddings = F.embedding(tokens[:, 1:], self._embedding)
        states = self.head.states(embeddings, features[:, :-1].float(), num_steps)
        num_roots = tokens.shape[1] - 1 - num_steps
        hits = []
        for step, of_step in enumerate(states):  # the entry after the root's, and so on, predicts the token behind it
            part = slice(step, step + num_roots)
            drafted = likeliest_of(of_step[0, part], weight)
            drafted = drafted if self._target_ids is None else self._target_ids[drafted]
            hits.append(drafted == tokens[0, step + 2 : step + 2 + num_roots])
        return torch.stack(hits, 1)

    def _windows_on_device(self, chosen: Tensor, windows: Windows | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, features and hidden states of the chosen windows, those to train on unless others are given."""
        windows = windows or self._windows
        of_all = windows.tokens, windows.features, windows.hidden
        tokens, features, hidden = (x[chosen].to(self._device) for x in of_all)
        return tokens, features, hidden

    def _run_head(self, chosen: Tensor) -> tuple[Sequence[Tensor], DraftLoss]:
        """Run the head on the chosen windows, and judge its drafts."""
        assert isinstance(self.head, Eagle3Head)
        tokens, features, hidden = self._windows_on_device(chosen)
        embeddings = F.embedding(tokens[:, 1:], self._embedding)
        states = self.head.states(embeddings, features[:, :-1].float(), self._config.steps_deep)
        weight = self.head.lm_head.weight
        return states, draft_loss(states, hidden[:, 1:].float(), weight, self._output, self._target_ids)


PROMPT_TOKENS = REPORT_TOKENS // 3
WAYS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "replayed": {"replay": True},
}
HALF_CHARACTER = "\ufffd"  # decoded where a piece of text is cut within a character


def prompts_of(pieces: Sequence[Tokens], tokenizer: Any) -> str:
    """Make a file of prompts, as ``specmamba bench acceptance`` reads it, from held-out pieces."""
    rows = []
    for tokens in pieces:
        prompt, rest = (tokenizer.decode(part) for part in (tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:]))
        row = {"prompt": prompt.rstrip(HALF_CHARACTER), "continuation": rest.lstrip(HALF_CHARACTER)}
        rows += [json.dumps(row)] if all(row.values()) else []
    return "\n".join(rows) + "\n"


def measure_head(config: TrainDraftConfig, head: Path, prompts: Path, console: Console) -> dict[str, Any]:
    """Measure the figures of ``bench acceptance``, by way of choosing tokens, and print them.

    Raises:
        SpecmambaError: the head cannot be run, or none of the prompts can.
    """
    flags = config.engine_flags | {
        "speculative_algorithm": "dflash" if config.drafts_blocks else config.kind,
        "speculative_draft_model_path": str(head),
        "speculative_num_steps": config.steps_deep,
    }
    bench = AcceptanceBenchConfig(
        **flags,
        prompts=prompts,
        num_prompts=config.report_prompts,
        max_tokens=REPORT_TOKENS - PROMPT_TOKENS,
        batch_size=1,
        rounds=1,
    )
    texts, (variants, _) = read_texts(prompts), variants_of(bench)
    found = {}
    with start_engine(bench, largest_flags(variants)) as llm:
        description = llm.engine.describe()
        for name, way in WAYS.items():
            this = bench.model_copy(update=way)
            tasks, notes = select_tasks(this, llm, texts)
            figures = full_report(this, description, tasks, measure(this, llm, tasks, variants), notes)
            console.print(f"{name}:", highlight=False)
            print_report(figures)
            found[name] = figures["configurations"][0]
    return found
