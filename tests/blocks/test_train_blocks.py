"""``specmamba train draft --kind dflash|dspark``: what is trained is what drafts; loss, files, memory, refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd.profiler import profile

from specmamba.core import Batch
from specmamba.draft.blocks import BlockDrafter
from specmamba.errors import ConfigError
from specmamba.train import block_trainer, draft, memory, trainer, windows
from specmamba.train.block_head import BlockHead, BlockShape, MarkovHead, write_block_head
from specmamba.train.head import HeadShape
from tests.bench.test_train_draft import settings, silent, written_text
from tests.engine.test_target_reader import new_llm, read
from tests.families import FAMILIES
from tests.models.test_model_exact import accept_at_random, assert_close, new_engine, random_prompts, run
from tests.tiny import write_tiny_checkpoint

BLOCK = 5


def random_head(shape: HeadShape, scales: list[float], rank: int = 0) -> BlockHead:
    """A head in which every weight has an effect on the logits."""
    sizes = {"num_layers": 2, "block_size": BLOCK, "mask_token_id": 3, "markov_rank": rank}
    head = BlockHead(BlockShape(**vars(shape), **sizes), scales)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            if name != "scales":
                parameter.copy_(1 + 0.3 * random if parameter.dim() == 1 else random * 1.5 / parameter.shape[1] ** 0.5)
    return head


@pytest.mark.parametrize(("family", "rank"), [("granite-hybrid", 0), ("qwen3.5", 0), ("qwen3.5", 7)])
def test_the_training_computes_what_the_engine_drafts(
    family: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    FAMILIES[family].build(folder)
    with new_llm(folder, context_length=256) as llm:
        layers = windows.feature_layers(llm.engine.model.num_layers)
        embedding, output = llm.workbench.target_matrices()
        shape = HeadShape.of(embedding.shape[1], len(embedding), len(layers), num_heads=4, intermediate_size=50)
        head = random_head(shape, [0.25, 4.0, 2.0][: len(layers)], rank)
        write_block_head(tmp_path / "head", head, layers, 256)
        path = {"speculative_algorithm": "auto", "speculative_draft_model_path": str(tmp_path / "head")}
        engine = new_engine(folder, head.shape.num_drafts, **path, speculative_adaptive="off")
        drafter = engine.runner.drafter
        assert isinstance(drafter, BlockDrafter)
        accept_at_random(monkeypatch, torch.Generator().manual_seed(1))
        run_block, said = drafter._run, list[tuple[str, int, Tensor]]()

        def recorded(batch: Batch, num_steps: int) -> Tensor:
            hidden = run_block(batch, num_steps)
            logits = drafter.head.logits(hidden)
            names = {request.held_row: request.request_id for request in engine.scheduler.verifying}
            places = zip(batch.rows, batch.root_positions.tolist(), logits, strict=True)
            said.extend((names[row], root, of_row.clone()) for row, root, of_row in places)
            return hidden

        monkeypatch.setattr(drafter, "_run", recorded)
        texts = run(engine, random_prompts((26, 2, 9), seed=3), (14, 16, 10))
        features = {name: read(llm, [text], layers)[0].features.float() for name, text in texts.items()}
        for name, root, logits in said:
            tokens, of_text = torch.tensor([texts[name]]), features[name]
            known = torch.zeros(1, tokens.shape[1], of_text.shape[1])
            known[0, :root] = of_text[:root]  # nothing is read from the root on
            with torch.no_grad():
                states = head.states(tokens, known, torch.tensor([root]), embedding)
            assert_close(logits, states[0, 0] @ output.T)
        assert len(said) > 10
        if head.markov_head is not None:
            check_links(drafter, head.markov_head, output)
        engine.close()


def check_links(drafter: BlockDrafter, trained: MarkovHead, output: Tensor) -> None:
    """What a token adds to the logits of the next one."""
    links, tokens, marginal = drafter.head.links, torch.tensor([[5, 9, 2]]), torch.randn(1, 1, len(output))
    assert links is not None
    latent, _ = links.latent(tokens, torch.zeros(1, 1, output.shape[1]), torch.zeros(1, 3, 0))
    with torch.no_grad():
        assert_close(links.logits(marginal, latent), marginal + trained.markov_w2(trained.markov_w1(tokens)))


@pytest.mark.parametrize("positions", [1, 7, 1000])
def test_the_loss_and_its_gradient(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed in slices they equal those of autograd on all positions."""
    monkeypatch.setattr(trainer, "SLICE_NUMBERS", 61 * positions)
    torch.manual_seed(0)
    states = torch.randn(2, 4, 3, 12, requires_grad=True)
    hidden, output = torch.randn(2, 4, 3, 12) + states.detach(), torch.randn(61, 12)
    found = block_trainer.block_loss(states, hidden, output)
    target, said = (hidden @ output.T).softmax(-1), states @ output.T
    losses = -(target * said.log_softmax(-1)).sum(-1).mean((0, 1))
    expected = (losses[0] + 0.8 * losses[1] + 0.64 * losses[2]) / 2.44
    expected.backward()
    assert_close(found.loss, expected.detach())
    assert states.grad is not None
    assert_close(found.gradients[0], states.grad)
    agreements = (said.argmax(-1) == target.argmax(-1)).float().mean((0, 1))
    assert_close(found.agreements, agreements)
    assert float(agreements.max()) > 0


@pytest.mark.parametrize("positions", [5, 1000])
def test_the_loss_of_linked_blocks_and_its_gradients(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "SLICE_NUMBERS", 61 * positions)
    torch.manual_seed(0)
    states, latents = torch.randn(2, 4, 3, 12, requires_grad=True), torch.randn(2, 4, 3, 5, requires_grad=True)
    hidden, output = torch.randn(2, 4, 3, 12) + states.detach(), torch.randn(61, 12)
    links = torch.nn.Parameter(torch.randn(61, 5))
    found, of_links = block_trainer.block_loss(states, hidden, output, latents, links), links.grad
    assert of_links is not None
    links.grad = None
    target, said = (hidden @ output.T).softmax(-1), states @ output.T + latents @ links.T
    losses = -(target * said.log_softmax(-1)).sum(-1).mean((0, 1))
    expected = (losses[0] + 0.8 * losses[1] + 0.64 * losses[2]) / 2.44
    expected.backward()
    assert_close(found.loss, expected.detach())
    for gradient, part in zip([*found.gradients, of_links], (states, latents, links), strict=True):
        assert part.grad is not None
        assert_close(gradient, part.grad)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_run(kind: str, tmp_path: Path) -> None:
    target = write_tiny_checkpoint(tmp_path / "model", seed=5, vocab_size=4096)
    text, values = tmp_path / "text", list[list[float]]()
    text.mkdir()
    for i in range(24):
        (text / f"{i}.py").write_text(written_text(i), "utf8")
    config = settings(tmp_path / "out", model=str(target), text=[str(text)], kind=kind, num_layers=1)
    assert draft.train(config, silent(), lambda _, of_step: values.append(of_step)) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf8"))
    for way in ("sampled", "greedy"):
        assert report[way]["lossless"] == {"identical": 2, "near_tie": 0, "diverged": 0}
    assert all(report[way]["algorithm"] == "dflash" for way in ("sampled", "greedy", "replayed"))
    assert all(report[way]["num_steps"] == 2 for way in ("sampled", "greedy", "replayed"))
    assert values[-1][0] < values[0][0]
    stored = json.loads((tmp_path / "out" / "head" / "config.json").read_text("utf8"))
    reads = {"mask_token_id": 4095, "target_layer_ids": [0, 1, 2]}
    if kind == "dflash":
        assert (stored["block_size"], stored["num_hidden_layers"], stored["dflash_config"]) == (3, 1, reads)
    else:
        assert (stored["block_size"], stored["markov_rank"], stored["architectures"]) == (2, 64, ["Qwen3DSparkModel"])
        assert {name: stored[name] for name in reads} == reads
    tensors = load_file(tmp_path / "out" / "head" / "model.safetensors")
    assert "scales" not in tensors
    assert sum(tensor.numel() for tensor in tensors.values()) == report["parameters"]


def test_the_rarest_token() -> None:
    assert windows.rarest_token([[5, 5, 2, 9], [9, 9, 1]], 12) == 11
    assert windows.rarest_token([[0, 1, 2, 3], [3, 1, 2]], 4) == 0


def peak_bytes(loop: trainer.DraftTrainer) -> int:
    with profile(use_cpu=True, profile_memory=True) as events:
        loop.step()
    assert events.kineto_results is not None
    found = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    ordered = sorted(found, key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in ordered))


@pytest.mark.parametrize(
    ("vocab_size", "changes"),
    [
        (2000, {"seq": 128}),
        (300, {"seq": 128, "num_heads": 8}),
        (30_000, {"seq": 32}),
        (2000, {"seq": 128, "kind": "dspark"}),
        (30_000, {"seq": 32, "kind": "dspark", "markov_rank": 16}),
    ],
)
def test_a_step_takes_the_memory_that_is_predicted(
    vocab_size: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SLICE_NUMBERS", 1 << 16)
    config = settings(tmp_path, **{"kind": "dflash"} | changes)
    some = windows.Windows.empty(3, config.seq + 1, 3 * 64, 64)
    some.tokens.random_(vocab_size, generator=torch.Generator().manual_seed(0))
    some.features.fill_(1.0)
    some.hidden.fill_(1.0)
    shape = memory.shape_of(config, 64, vocab_size, 3)
    head = BlockHead(memory.block_shape_of(config, shape, 0), [1.0] * 3)
    matrix = torch.randn(vocab_size, 64, generator=torch.Generator().manual_seed(0))
    data = trainer.TrainingData(some, some, matrix, matrix, {})
    loop = block_trainer.BlockTrainer(config, data, head, torch.device("cpu"))
    loop.step()  # allocates Adam's moments
    head.zero_grad(set_to_none=True)
    needs = memory.needs_of(config, shape, 3)
    assert needs.head == 4 * 4 * head.num_parameters
    counted = needs.step + needs.head // 4
    assert 0.5 * counted < peak_bytes(loop) <= counted + 1024


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_held_out_curve(kind: str, tmp_path: Path) -> None:
    """The same as drafting behind every root by itself, without a state of the target behind it."""
    config, few = settings(tmp_path, kind=kind, steps_deep=3, markov_rank=4 if kind == "dspark" else 64), 5
    some = windows.Windows.empty(2, 20, 2 * 16, 16)
    generator = torch.Generator().manual_seed(0)
    some.tokens.random_(few, generator=generator)
    some.features.normal_(generator=generator)
    matrix = torch.randn(few, 16, generator=generator)
    shape = HeadShape.of(16, few, 2, None, num_heads=2, intermediate_size=30)
    torch.manual_seed(1)
    head = BlockHead(memory.block_shape_of(config, shape, 1), [1.0, 1.0])
    data = trainer.TrainingData(some, some, matrix, matrix, {})
    loop = block_trainer.BlockTrainer(config, data, head, torch.device("cpu"))
    lengths = []
    for tokens, features in zip(some.tokens, some.features.float(), strict=True):
        for root in range(1, 20 - 3):
            known = features.clone()
            known[root:] = 0
            with torch.no_grad():
                said = head.states(tokens[None], known[None], torch.tensor([root]), matrix)[0, 0] @ matrix.T
                if head.markov_head is not None:
                    said += head.markov_head.markov_w2(head.markov_head.markov_w1(tokens[root : root + 3]))
            hits = (said.argmax(-1) == tokens[root + 1 : root + 4]).tolist()
            lengths.append(1 + (hits.index(False) if False in hits else 3))
    assert len(set(lengths)) >= 3
    assert loop.held_out_accept_length() == pytest.approx(sum(lengths) / len(lengths))


def test_flags_that_contradict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="--draft-vocab-size: a dflash head drafts by the target's own"):
        settings(tmp_path, kind="dflash", draft_vocab_size=9)
    with pytest.raises(ValidationError, match="--markov-rank 8: only dspark heads have such matrices"):
        settings(tmp_path, kind="dflash", markov_rank=8)
    with pytest.raises(ValidationError, match="--num-layers 3: an eagle3 head has one layer"):
        settings(tmp_path, num_layers=3)
    one = write_tiny_checkpoint(tmp_path / "one", seed=0, vocab_size=4096, layer_types=["full_attention"])
    (tmp_path / "text.py").write_text(written_text(1, 3000), "utf8")
    config = settings(tmp_path / "out", model=str(one), text=[str(tmp_path / "text.py")], kind="dflash")
    with pytest.raises(ConfigError, match="the head reads behind layers that others follow; the target has one layer"):
        draft.train(config, silent())
