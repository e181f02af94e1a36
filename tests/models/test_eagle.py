"""EAGLE and EAGLE-3 heads from folders of their own: what they compute, that the text stays the target's, and what is
refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM

from specmamba import LLM, SamplingParams
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.core import Batch, DraftTree, RequestOutput
from specmamba.draft.heads.children import ChildPicker
from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.sampling_params import SamplingBatch
from tests.exactness import assert_same_greedy_texts, run_directly
from tests.families import FAMILIES
from tests.heads import STYLES, Head, Reference, Style, save, write_head
from tests.models.test_model_exact import (
    TOLERANCE,
    accept_at_random,
    assert_close,
    new_engine,
    random_prompts,
    record_drafts,
    run,
)
from tests.tiny import LINEAR, write_tiny_checkpoint

NUM_TOKENS = 24
LARGEST: dict[str, Any] = {
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 8,
    "speculative_num_draft_tokens": 32,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"speculative_num_steps": 3},
    "tree 4/4/8": {"speculative_num_steps": 4, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8},
    "tree 5/8/32": LARGEST,
    "file": {},
    "rejection": LARGEST | {"speculative_accept": "rejection", "speculative_num_draft_tokens": 16},
}
TREE = {"trees": [{"parents": [-1, 0, 0, 0, 1, 1, 2, 4, 7], "ranks": [0, 0, 1, 6, 0, 2, 0, 0, 0]}]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has an MTP head too, which is left alone here."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", seed=11)


@pytest.fixture(scope="module")
def heads(target: Path) -> dict[str, Head]:
    return {name: write_head(target.parent / name, target, name, seed) for seed, name in enumerate(STYLES)}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts((8, 1, 33, 2, 17), seed=5)


@pytest.fixture(scope="module")
def plain(target: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with new_plain(target) as llm:
        texts = [llm.generate([prompt], greedy())[0].token_ids for prompt in prompts]
    assert min(len(set(text)) for text in texts) > 2
    return texts


def new_llm(target: Path, head: Head | None = None, **flags: Any) -> LLM:
    path = {} if head is None else {"speculative_draft_model_path": str(head.folder)}
    common = {"dtype": "float32", "device": "cpu", "context_length": 128, "max_total_tokens": 2048}
    return LLM(**{"model": str(target), **common, **path, **flags})


def new_plain(target: Path) -> LLM:
    return new_llm(target, speculative_algorithm="none")


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def kind_of(name: str) -> str:
    return "eagle3" if STYLES[name].is_eagle3 else "eagle"


# ---- what they compute -----------------------------------------------------------------------------------------------


@torch.no_grad()
def target_features(model: Qwen3_5ForCausalLM, text: list[int], style: Style) -> Tensor:
    """The features [T, F] of transformers' model, input of a head."""
    said = model.model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    if not style.is_eagle3 or style.reads is None:
        return said.last_hidden_state[0]
    # the target has 4 layers: (2, 4 // 2, 4 - 3) unless the config says another
    return torch.cat([said.hidden_states[layer][0] for layer in sorted(style.reads)], -1)


def reference_draft(head: Reference, known: list[int], hidden: Tensor, drafted: list[int]) -> Tensor:
    """The head's logits [steps, V] along a draft; hidden [T, W] are the target's, combined. See test_model_exact."""
    tokens, hidden, first = known[1:], hidden[: len(known) - 1], 1
    if len(known) == 1:  # there is no entry for the first token, but here nothing else can be asked
        tokens, hidden, first = known, torch.zeros(1, hidden.shape[1]), 0
    logits = []
    for token in drafted:
        out = head(tokens, hidden, first)[-1]
        logits.append(head.logits(out))
        if first == 0:
            tokens, hidden, first = [], hidden[:0], 1
        tokens, hidden = [*tokens, token], torch.cat([hidden.double(), out[None]])
    return torch.stack(logits)


@pytest.mark.parametrize("name", STYLES)
def test_drafts_equal_the_formula(
    name: str, target: Path, heads: dict[str, Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Qwen3_5ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    head = heads[name]
    reference = Reference(head, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
    engine = new_engine(target, 4, speculative_algorithm="auto", speculative_draft_model_path=str(head.folder))
    assert engine.describe()["speculative_algorithm"] == kind_of(name)
    accept_at_random(monkeypatch, torch.Generator().manual_seed(1))
    drafts = record_drafts(engine, monkeypatch)
    prompts, counts = random_prompts((1, 26, 2, 9), seed=3), (14, 9, 12, 10)
    texts = run(engine, prompts, counts)
    depths = {draft.num_tokens for of_request in drafts.values() for draft in of_request}
    assert len(depths) >= 4  # drafts were accepted to any depth
    for request, of_request in drafts.items():
        hidden = reference.combine(target_features(model, texts[request], head.style))
        for draft in of_request:
            expected = reference_draft(reference, draft.known, hidden, draft.tokens)
            is_drafted = expected > -torch.inf
            assert torch.equal(draft.logits > -torch.inf, is_drafted)
            assert is_drafted[0].sum() == (head.style.draft_vocab or len(expected[0]))
            assert_close(draft.logits[is_drafted].double(), expected[is_drafted])
            assert draft.logits.argmax(-1).tolist() == draft.tokens
    engine.close()


def test_entries_behind_a_cached_prefix(target: Path, heads: dict[str, Head], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused features of the last cached token are all that the head needs from the cache."""
    model = Qwen3_5ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for name in ("eagle", "eagle3-narrow"):
        head = heads[name]
        reference = Reference(head, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
        engine = new_engine(target, 3, speculative_algorithm="auto", speculative_draft_model_path=str(head.folder))
        prefix, rest = random_prompts((30, 12), seed=8)
        run(engine, [prefix], [2])
        drafts = record_drafts(engine, monkeypatch)
        texts = run(engine, [prefix + rest], [10])
        assert engine.stats().prefix_cache.hit_tokens >= 29
        hidden = reference.combine(target_features(model, texts["r0"], head.style))
        for draft in drafts["r0"]:
            expected = reference_draft(reference, draft.known, hidden, draft.tokens)
            # PyTorch's products come as near as native ones to this bound, which is for fewer tokens.
            assert float((draft.logits - expected).abs().max()) <= 2 * TOLERANCE * float(expected.abs().max())
        engine.close()


# ---- the text --------------------------------------------------------------------------------------------------------


# what snapshots hold does not depend on the head
@pytest.mark.fast_cases("eagle3-tied-records", "eagle-snapshots")
@pytest.mark.parametrize(
    ("name", "state"), [*((name, "records") for name in STYLES), ("eagle", "snapshots"), ("eagle3", "snapshots")]
)
def test_greedy_text_is_the_plain_text(
    name: str,
    state: str,
    target: Path,
    heads: dict[str, Head],
    prompts: list[list[int]],
    plain: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(TREE))
    with new_llm(target, heads[name], speculative_algorithm=kind_of(name), **LARGEST, speculative_state=state) as llm:
        for way, flags in DRAFTS.items():
            tree = {"speculative_tree": file} if way == "file" else {}
            llm.workbench.use_drafts(**flags, **tree)
            together = llm.generate(prompts, greedy())
            assert_same_greedy_texts(tokens_of(together), plain, prompts, lambda: new_plain(target))
            assert together[0].spec.num_draft_tokens > 0
            again = llm.generate([prompts[2]], greedy())
            assert tokens_of(again) == [plain[2]], f"{way}, behind a cached prefix"
            assert again[0].num_cached_tokens >= 32
        stats = llm.engine.stats()
        assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_with_every_family(family: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    FAMILIES[family].build(folder)
    prompts = random_prompts((7, 1, 20), seed=2)
    with new_llm(folder, speculative_algorithm="none") as llm:
        expected = tokens_of(llm.generate(prompts, greedy(16)))
        num_layers, bare = llm.engine.model.num_layers, llm.engine.model.cache_shape
    read = [0, num_layers // 2, num_layers - 1]
    style = replace(STYLES[kind], config=(("eagle_aux_hidden_state_layer_ids", read),), draft_vocab=None)
    head = write_head(tmp_path / "head", folder, style, seed=4)
    with new_llm(folder, head, **LARGEST) as llm:
        shape = llm.engine.model.cache_shape
        assert shape.num_kv_layers == bare.num_kv_layers + 1
        assert shape.kv[:-1] == bare.kv
        assert (shape.kv[-1].num_heads, shape.kv[-1].head_dim) == (2, 10)
        for _ in range(2):
            assert tokens_of(llm.generate(prompts, greedy(16))) == expected
        llm.workbench.use_drafts(speculative_num_steps=3)
        assert tokens_of(llm.generate(prompts, greedy(16))) == expected


# ---- a head that is right is accepted --------------------------------------------------------------------------------


def make_bigram_target(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """A target whose layers add nothing, so that a token follows from the one before it alone.

    Returns:
        Its embedding [V, H], its output head [V, H], and what follows each token [V].
    """
    write_tiny_checkpoint(folder, seed=3, with_mtp=False, layer_types=[LINEAR, LINEAR, LINEAR, "full_attention"])
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")) or name == "model.norm.weight":
            tensor.zero_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    embedding, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    return embedding, output, (embedding @ output.T).argmax(-1)


JOINT = {"chain": {"speculative_num_steps": 2}, "tree": {"speculative_eagle_topk": 3, "speculative_num_steps": 2}}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shape", JOINT)
def test_by_rejection_three_tokens_have_the_targets_joint_distribution(shape: str, tmp_path: Path) -> None:
    """Of a head that is right often and not always, so that tokens come from acceptance and from the residual alike."""
    embedding, output, follows = make_bigram_target(tmp_path / "model")
    style = Style(STYLES["eagle"].architecture, num_heads=(1, 1), head_dim=36)
    head = perfect_eagle(embedding, output, follows, write_head(tmp_path / "head", tmp_path / "model", style, seed=0))
    noise = 0.05 * torch.randn(head.tensors["fc.weight"].shape, generator=torch.Generator().manual_seed(6))
    save(replace(head, tensors=head.tensors | {"fc.weight": head.tensors["fc.weight"] + noise}))
    num_draws, temperature, first = 2000, 2.0, 5
    room = {"max_running_requests": 250, "max_queued_requests": num_draws, "disable_radix_cache": True}
    flags = {"context_length": 16, "max_total_tokens": 6000, "speculative_accept": "rejection"} | room | JOINT[shape]
    ways = [
        SamplingParams(max_tokens=3, temperature=temperature, top_k=3, seed=seed, ignore_eos=True)
        for seed in range(num_draws)
    ]
    with new_llm(tmp_path / "model", head, **flags) as llm:
        drawn = torch.tensor(tokens_of(llm.generate([[first]] * num_draws, ways)))
        accepted = llm.engine.stats().spec.accept_length
    assert 1.2 < accepted < 2.5
    x = F.rms_norm(embedding.double(), embedding.shape[1:], eps=1e-6)
    top = (x @ output.double().T).topk(3)
    probs = (top.values / temperature).softmax(-1)
    expected = torch.zeros(131, 131, 131, dtype=torch.float64)
    for i, j, k in itertools.product(range(3), repeat=3):
        one = int(top.indices[first, i])
        two = int(top.indices[one, j])
        chance = probs[first, i] * probs[one, j] * probs[two, k]
        expected[one, two, int(top.indices[two, k])] += chance * num_draws
    observed = torch.zeros_like(expected).index_put_(
        tuple(drawn.T), torch.ones(num_draws, dtype=torch.float64), accumulate=True
    )
    assert not observed[expected == 0].any()
    assert (expected > 0).sum() == 27
    assert chi_square_p(observed, expected) > 1e-3


def chi_square_p(observed: Tensor, expected: Tensor) -> float:
    """The p-value of a chi-square test; values expected less than eight times share one bin."""
    is_frequent = expected >= 8
    bins = [torch.cat([x[is_frequent], x[~is_frequent].sum()[None]]) for x in (observed, expected)]
    if bins[1][-1] < 8:
        bins = [x[:-1] for x in bins]
    statistic = ((bins[0] - bins[1]).square() / bins[1]).sum()
    freedom = torch.tensor((len(bins[0]) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def perfect_eagle(embedding: Tensor, output: Tensor, follows: Tensor, head: Head) -> Head:
    """The token's embedding, passed through."""
    width = embedding.shape[1]
    tensors = {name: torch.zeros_like(tensor) for name, tensor in head.tensors.items()}
    tensors["fc.weight"][:, :width] = torch.eye(width)
    return replace(head, tensors=tensors)


def perfect_eagle3(embedding: Tensor, output: Tensor, follows: Tensor, head: Head) -> Head:
    """Attention of each entry to itself replaces its hidden state by the token's embedding."""
    width = embedding.shape[1]
    tensors = {name: torch.zeros_like(tensor) for name, tensor in head.tensors.items()}
    one, none = torch.eye(width), torch.zeros(width, width)
    for part in "qk":
        tensors[f"layers.0.self_attn.{part}_proj.weight"] = torch.cat([4 * one, none], 1)
    tensors["layers.0.self_attn.v_proj.weight"] = torch.cat([one, -one], 1)
    tensors["layers.0.self_attn.o_proj.weight"] = one
    for name in ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(width)
    ids = follows.unique()
    tensors["lm_head.weight"] = output[ids]
    config = {**head.config, "draft_vocab_size": len(ids), "rope_theta": 1e9}
    return replace(head, tensors=tensors, target_ids=ids, config=config)


@pytest.mark.parametrize(("kind", "perfect"), [("eagle", perfect_eagle), ("eagle3", perfect_eagle3)])
@pytest.mark.parametrize("topk", [1, 3])
def test_a_perfect_head_is_accepted_to_full_depth(
    kind: str, perfect: Callable[..., Head], topk: int, tmp_path: Path
) -> None:
    parts = make_bigram_target(tmp_path / "model")
    style = Style(STYLES[kind].architecture, num_heads=(1, 1), head_dim=36, has_output=kind == "eagle3")
    head = perfect(*parts, write_head(tmp_path / "head", tmp_path / "model", style, seed=0))
    save(head)
    # the whole tree, so that no path is left out because the head is not sure of it
    nodes = {1: 4, 3: 22}[topk]
    flags = {"speculative_num_steps": 3, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes}
    with new_llm(tmp_path / "model", head, **flags) as llm:
        outputs = llm.generate([[5], [17, 3, 99], [40, 41]], greedy(24))
    follows = parts[2].tolist()
    for output, last in zip(outputs, (5, 99, 41), strict=True):
        expected = [follows[last]]
        while len(expected) < 24:
            expected.append(follows[expected[-1]])
        assert list(output.token_ids) == expected
        assert output.spec.accepted_histogram[3] == output.spec.num_verify_steps == 6


# ---- tokens that are never drafted -----------------------------------------------------------------------------------


def test_tokens_outside_the_draft_vocabulary_come_last() -> None:
    logits = torch.full((2, 1, 7), -torch.inf)
    logits[:, :, 4], logits[:, :, 2] = 1.0, 0.5
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)]
    for draws, chosen in ((False, params[:1] * 2), (True, params)):
        sampling = SamplingBatch.of(chosen, [1, 2], logits.device, ["target", "rejection"])
        positions = torch.tensor([3, 5])
        batch = Batch((0, 1), torch.arange(2), torch.tensor([1, 1]), positions, 5, sampling)
        children = ChildPicker(draws).pick(logits, 4, batch, 0)
        assert (children.probs is not None) == draws
        assert children.tokens[0, 0, :2].tolist() == [4, 2]
        assert {*children.tokens[1, 0, :2].tolist()} == {2, 4}
        assert float(children.place_logp[:, :, :2].min()) > -2
        assert float(children.place_logp[:, :, 2:].max()) < -9000
        # siblings have different tokens; what was not drawn is no node
        assert draws or all(len(set(tokens)) == 4 for tokens in children.tokens[:, 0].tolist())


def test_trees_of_more_children_than_there_are_drafts(
    target: Path, heads: dict[str, Head], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = heads["eagle3-nested"]
    assert head.target_ids is not None
    drafted: set[int] = set()
    with new_llm(target, head, **LARGEST) as llm:
        run_directly(monkeypatch)
        drafter = llm.engine.runner.drafter
        propose = drafter.propose

        def spy(batch: Batch) -> DraftTree:
            tree = propose(batch)
            drafted.update(tree.tokens[tree.shape.parents >= 0].tolist())
            return tree

        monkeypatch.setattr(drafter, "propose", spy)
        llm.generate(prompts, greedy(6))
    assert drafted == {*head.target_ids.tolist()}


# ---- rejection, precision, tools -------------------------------------------------------------------------------------


def test_tokens_outside_the_draft_vocabulary_are_sampled(target: Path, heads: dict[str, Head], tmp_path: Path) -> None:
    """A head that drafts 5 of 131 tokens, under the rule that needs its distribution: the target's first token."""
    logits: list[Tensor] = []
    prompt, num_draws = random_prompts((6,), seed=1)[0], 400
    room = {"max_running_requests": 100, "max_queued_requests": num_draws, "max_total_tokens": 20000}
    drafts = DRAFTS["tree 4/4/8"] | {"speculative_accept": "rejection"}
    with new_llm(target, heads["eagle3-nested"], **drafts, **room) as llm:
        params = [SamplingParams(max_tokens=2, temperature=1.0, seed=s, ignore_eos=True) for s in range(num_draws)]
        outputs = llm.generate([prompt] * num_draws, params)
        llm.workbench.use_drafts(speculative_algorithm="none")
        llm.workbench.logits_along(prompt, [1], logits.append)
    expected = logits[0].double().softmax(-1) * num_draws
    observed = torch.bincount(torch.tensor([output.token_ids[0] for output in outputs]), minlength=131).double()
    assert chi_square_p(observed, expected) > 1e-3
    drafted = heads["eagle3-nested"].target_ids
    assert drafted is not None
    assert 0 < observed[drafted].sum() < num_draws
    assert math.isclose(float(observed.sum()), num_draws)


@pytest.mark.parametrize("name", ["eagle", "eagle3-narrow"])
def test_the_form_of_the_heads_matrices(
    name: str, target: Path, heads: dict[str, Head], prompts: list[list[int]], plain: list[tuple[int, ...]]
) -> None:
    """The text is the target's, however its draft is rounded; the target itself is not rounded."""
    sizes = {}
    for form in ("none", "int8"):
        flags = {"speculative_draft_model_quantization": form}
        with new_llm(target, heads[name], speculative_num_steps=3, **flags) as llm:
            texts = tokens_of(llm.generate(prompts, greedy()))
            assert_same_greedy_texts(texts, plain, prompts, lambda: new_plain(target))
            sizes[form] = llm.engine.model.weight_bytes
    matrices = [tensor for key, tensor in heads[name].tensors.items() if tensor.dim() == 2 and "embed" not in key]
    # a byte for four, and a scale for each row
    assert sizes["none"] - sizes["int8"] == sum(3 * tensor.numel() - 4 * len(tensor) for tensor in matrices)


def test_parameters_and_bytes(target: Path, heads: dict[str, Head]) -> None:
    with new_llm(target, speculative_algorithm="none") as llm:
        bare = llm.engine.model
    with new_llm(target, heads["eagle3"]) as llm:
        model = llm.engine.model
    count = sum(tensor.numel() for tensor in heads["eagle3"].tensors.values())
    assert model.num_parameters - bare.num_parameters == count
    ids = heads["eagle3"].target_ids
    assert ids is not None
    assert model.weight_bytes - bare.weight_bytes == 4 * count + ids.nbytes
    assert model.cache_shape.draft_features == 36


def test_an_embedding_equal_to_the_targets_is_kept_once(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", target, "eagle", seed=1)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    with new_llm(target, head) as llm:
        without = llm.engine.model.weight_bytes
    save(replace(head, tensors=head.tensors | {"embed_tokens.weight": embedding}))
    with new_llm(target, head) as llm:
        assert llm.engine.model.weight_bytes == without


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_plain_decoding_replays_the_steps_of_a_head_that_sits_out(
    target: Path, heads: dict[str, Head], kind: str
) -> None:
    """Where it reads the target as plain decoding does: steps that leave the states of some layers are other ones."""
    with new_llm(target, heads[kind], **LARGEST) as llm:
        bench, runner = llm.workbench, cast(Any, llm.engine).runner
        bench.use_drafts(speculative_algorithm="none")
        of_plain = runner.drafter
        bench.use_drafts(speculative_num_steps=2, speculative_adaptive="auto")
        assert (runner.drafter.stand_in.like is of_plain) == (kind == "eagle")
        bench.use_drafts(speculative_algorithm="none")
        assert runner.drafter is of_plain


def test_the_workbench(target: Path, heads: dict[str, Head], prompts: list[list[int]]) -> None:
    path = str(heads["eagle"].folder)
    with new_llm(target, heads["eagle"], **LARGEST) as llm:
        bench, engine = llm.workbench, cast(Any, llm.engine)
        assert engine.describe()["speculative_draft_model_path"] == path
        bench.use_drafts(speculative_algorithm="none")
        assert engine.draft_plan.algorithm == "none"
        bench.use_drafts(speculative_algorithm="eagle", speculative_num_steps=2)
        assert engine.draft_plan.algorithm == "eagle"
        bench.use_drafts(speculative_algorithm="ngram")
        bench.use_drafts(speculative_draft_model_path=path, speculative_num_steps=3)
        assert engine.draft_plan.algorithm == "eagle"
        with pytest.raises(ConfigError, match="start another one for another draft"):
            bench.use_drafts(speculative_draft_model_path=str(heads["eagle3"].folder))
        with pytest.raises(ConfigError, match="holds a draft of the kind eagle: choose eagle or auto"):
            bench.use_drafts(speculative_algorithm="mtp")
        bench.use_drafts(speculative_num_steps=3)
        recorder = bench.record_ranks()
        replay = random_prompts((12,), seed=4)
        llm.generate(prompts[:1], greedy(12), replay=replay)
        assert recorder.ranks.shape == (12, 3)
        assert int(recorder.ranks[:, 0].min()) >= 0


def test_a_target_whose_head_is_not_used_reads_no_features(
    target: Path, heads: dict[str, Head], prompts: list[list[int]], plain: list[tuple[int, ...]]
) -> None:
    with new_llm(target, heads["eagle3"], disable_radix_cache=True, **LARGEST) as llm:
        widths: list[int] = []
        body: Any = llm.engine.model.target
        forward = body.forward

        def watch(*arguments: Any) -> Any:
            said = forward(*arguments)
            widths.append(said.features.shape[-1])
            return said

        body.forward = watch
        for algorithm, width in (("auto", 3 * 36), ("none", 36), ("eagle3", 3 * 36), ("ngram", 36)):
            llm.workbench.use_drafts(speculative_algorithm=algorithm)
            widths.clear()
            assert tokens_of(llm.generate(prompts[:1], greedy())) == plain[:1]
            assert {*widths} == {width}
            llm.workbench.read_target(prompts[2:3], (1,), lambda index, states: None)
            assert llm.engine.feature_layers == ((1, 2, 2) if width > 36 else ())
            assert body._feature_layers == llm.engine.feature_layers


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(target: Path, head: Head, kind: type[Exception], sentence: str, **flags: Any) -> None:
    with pytest.raises(kind, match=sentence):
        new_llm(target, head, **flags)


def test_heads_of_other_targets(target: Path, tmp_path: Path) -> None:
    others = {
        "vocabulary": write_tiny_checkpoint(tmp_path / "vocabulary", seed=0, vocab_size=97),
        "width": write_tiny_checkpoint(tmp_path / "width", seed=0, hidden_size=30),
    }
    for style in ("eagle", "eagle3"):
        head = write_head(tmp_path / "a", others["vocabulary"], replace(STYLES[style], draft_vocab=None), seed=0)
        refused(target, head, ConfigError, "the head's vocabulary has 97 tokens, the target's 131")
        head = write_head(tmp_path / "b", others["width"], replace(STYLES[style], has_embedding=True), seed=0)
        numbers = "reads 90 numbers per token, but 3 layers .* give 108" if style == "eagle3" else "is 30, .* 36"
        refused(target, head, ConfigError, numbers)
    narrow = write_head(tmp_path / "c", others["width"], "eagle3-narrow", seed=0)
    refused(target, narrow, ConfigError, "hidden size is 30, the target's 36")


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (
            {"speculators_model_type": "peagle"},
            UnsupportedModelError,
            "'peagle' is not supported: only eagle3, dflash, ",
        ),
        ({"speculators_model_type": None}, CheckpointError, "lacks"),
        (
            {"model_type": "gpt_oss"},
            UnsupportedModelError,
            "the model_type 'gpt_oss' is not supported: only llama, qwen3",
        ),
        ({"fc_norm": True}, UnsupportedModelError, "fc_norm is not supported in draft heads"),
        ({"norm_output": True}, UnsupportedModelError, "norm_output is not supported in draft heads"),
        ({"hidden_size": None}, CheckpointError, r"asks for \[4096, 108\]"),
    ],
    ids=["kind", "no-kind", "layers", "norms-by-layer", "normed-output", "the-class's-size"],
)
def test_heads_of_speculators_that_are_refused(
    changes: dict[str, Any], kind: type[Exception], words: str, target: Path, tmp_path: Path
) -> None:
    head = write_head(tmp_path, target, "eagle3-speculators", seed=0)
    save(head, **changes)
    if changes.keys() == {"speculators_model_type"} and changes["speculators_model_type"] is None:
        config = json.loads((tmp_path / "config.json").read_text("utf8"))
        (tmp_path / "config.json").write_text(json.dumps(config | {"transformer_layer_config": None}), "utf8")
    refused(target, head, kind, words)


def test_layers_that_the_target_does_not_have(target: Path, tmp_path: Path) -> None:
    style = replace(STYLES["eagle3"], config=(("eagle_aux_hidden_state_layer_ids", [1, 2, 9]),))
    head = write_head(tmp_path, target, style, seed=0)
    words = f"speculative_draft_model_path {tmp_path}: the head reads in front of layer 9, the target has layers 0 to 3"
    refused(target, head, UnsupportedModelError, words)
    save(head, eagle_aux_hidden_state_layer_ids=[-1, 2, 4])
    refused(target, head, UnsupportedModelError, "in front of layers -1, 4, the target has layers 0 to 3")
    save(head, eagle_aux_hidden_state_layer_ids=["1", 2, 3])
    refused(target, head, CheckpointError, "should be a list of numbers of layers")
    save(head, eagle_aux_hidden_state_layer_ids=None, eagle_config=7)
    refused(target, head, CheckpointError, "eagle_config should be an object, but is a int")


def test_invalid_token_maps(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target, "eagle3", seed=0)
    ids = head.target_ids
    assert ids is not None
    too_high, too_low, twice = ids.clone(), ids.clone(), ids.clone()
    too_high[-1], too_low[0], twice[1] = 131, -1, ids[0]
    save(replace(head, target_ids=too_high))
    refused(target, head, ConfigError, "maps a draft token to token 131, but the target's vocabulary has 131")
    save(replace(head, target_ids=too_low))
    refused(target, head, ConfigError, "to token -1, but the target's vocabulary has 131")
    save(replace(head, target_ids=twice))
    refused(target, head, CheckpointError, "maps 70 draft tokens to 69 tokens")
    save(replace(head, target_ids=ids[:-1]))
    refused(target, head, CheckpointError, r"d2t is \[69\] of type I64 in .* should be \[70\] of integers")
    save(replace(head, target_ids=None))
    refused(target, head, CheckpointError, "drafts 70 of 131 tokens, but has no tensor d2t")
    save(replace(head, tensors={k: v for k, v in head.tensors.items() if k != "lm_head.weight"}))
    refused(target, head, CheckpointError, "drafts 70 of 131 tokens, but has no lm_head.weight")


def test_damaged_folders(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target, "eagle", seed=0)
    file = tmp_path / "model.safetensors"
    norm = "layers.0.post_attention_layernorm.weight"
    save(replace(head, tensors={name: tensor for name, tensor in head.tensors.items() if name != norm}))
    refused(target, head, CheckpointError, f"lacks the tensor {norm}")
    save(replace(head, tensors=head.tensors | {"layers.0.input_layernorm.weight": torch.ones(36)}))
    refused(target, head, CheckpointError, "tensors that the model in its config.json does not have: .*input_layernorm")
    save(head, intermediate_size=50)
    refused(target, head, CheckpointError, "has the shape .* asks for")
    save(head, hidden_size=None)
    refused(target, head, CheckpointError, "lacks hidden_size: it is not the config of a draft head")
    save(head, hidden_size="wide")
    refused(target, head, CheckpointError, "is not a config that transformers accepts")
    save(head, hidden_act="gelu")
    refused(target, head, UnsupportedModelError, "only silu is")
    save(head, rope_scaling={"type": "dynamic", "factor": 2.0})
    refused(target, head, UnsupportedModelError, "rope type 'dynamic' is not supported for draft heads")
    save(head)
    file.write_bytes(file.read_bytes()[:-40])
    refused(target, head, CheckpointError, "truncated or not a safetensors file")
    file.rename(tmp_path / "pytorch_model.bin")
    refused(target, head, CheckpointError, "pytorch_model.bin is refused, since loading a pickle runs code from it")


def test_a_head_is_refused_before_the_target_is_read(
    target: Path, tmp_path: Path, heads: dict[str, Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: TensorReader, name: str, part: object = None) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(TensorReader, "_read", refuse)
    test_heads_of_other_targets(target, tmp_path / "others")
    test_layers_that_the_target_does_not_have(target, tmp_path / "layers")
    test_folders_without_a_head(target, heads, tmp_path / "none")
    with pytest.raises(AssertionError, match="was read"):
        new_llm(target, heads["eagle"])


def test_a_head_in_the_targets_place(heads: dict[str, Head]) -> None:
    for name in ("eagle", "eagle-all", "eagle3-last"):
        with pytest.raises(UnsupportedModelError) as error:
            LLM(model=str(heads[name].folder), device="cpu")
        words = f"model {heads[name].folder}: {heads[name].style.architecture} is a draft head and no model: give it as"
        assert str(error.value).startswith(f"{words} speculative_draft_model_path")


def test_missing_folders(target: Path, tmp_path: Path, heads: dict[str, Head]) -> None:
    flag = "speculative_draft_model_path"
    path: dict[str, Any] = {"speculative_draft_model_path": str(tmp_path)}
    with pytest.raises(CheckpointError, match=f"^{flag}: {tmp_path} has neither model.safetensors nor"):
        new_llm(target, **path)
    with pytest.raises(CheckpointError, match=f"^{flag}: 'no/such/thing' is neither a folder nor a hub id"):
        new_llm(target, speculative_draft_model_path="no/such/thing")
    save(replace(heads["eagle"], folder=tmp_path / "head"))
    with pytest.raises(CheckpointError, match=f"there is a draft head in {tmp_path / 'head'}: give that folder"):
        new_llm(target, **path)
    with pytest.raises(ConfigError, match=r"^speculative_draft_model_revision names a version on the hub, but"):
        new_llm(target, heads["eagle"], speculative_draft_model_revision="main")


def test_frequencies_that_old_programs_stored(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target, "eagle-all", seed=1)
    stored = {f"layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    save(replace(head, tensors=head.tensors | stored))
    with new_llm(target, head) as llm:
        assert llm.engine.draft_plan.algorithm == "eagle"


def test_folders_without_a_head(target: Path, heads: dict[str, Head], tmp_path: Path) -> None:
    head = write_head(tmp_path, target, "eagle", seed=0)
    save(replace(head, tensors={name: tensor for name, tensor in head.tensors.items() if name != "fc.weight"}))
    refused(
        target, head, UnsupportedModelError, "neither a model that specmamba has, nor an EAGLE, EAGLE-3 or DFlash head"
    )
    refused(target, heads["eagle3"], ConfigError, "holds a draft of the kind eagle3", speculative_algorithm="eagle")
    refused(target, heads["eagle"], ConfigError, "holds a draft of the kind eagle:", speculative_algorithm="mtp")


def test_prefixes_of_tensor_names(target: Path, tmp_path: Path, heads: dict[str, Head]) -> None:
    """``model.midlayer.`` is in use too."""
    style = replace(STYLES["eagle3"], prefix="model.")
    head = replace(heads["eagle3"], folder=tmp_path, style=style)
    save(head)
    with TensorReader(tmp_path) as reader:
        assert "model.midlayer.hidden_norm.weight" in reader.names()
    with new_llm(target, head) as llm:
        assert llm.engine.draft_plan.algorithm == "eagle3"
