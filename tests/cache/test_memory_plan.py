"""The memory plan: pools that fit, shares that follow the flags, and errors whose advice works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.memory import MemoryPlan, free_memory, plan_memory
from specmamba.cache.memory.demand import GRAPH_BYTES
from specmamba.cache.request_table import RequestTable, TokenCounts
from specmamba.cache.shapes import (
    MISSED_TOKENS,
    CacheShape,
    KVShape,
    StateShape,
    missed_room,
    pending_token_capacity,
)
from specmamba.cache.state_pool import StatePool
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.config import EngineConfig
from specmamba.engine.captured.step_memory import COPIES, KEPT, STREAMS, graph_token_bytes
from specmamba.engine.loading import load_models
from specmamba.errors import ConfigError
from specmamba.flags.command_line import aligned, readable
from specmamba.models.base import LoadOptions
from specmamba.models.registry import load_model
from specmamba.verify.record_buffers import RecordBuffers
from specmamba.verify.snapshot_buffers import SnapshotBuffers
from tests.pairwise import pairwise
from tests.tiny import write_tiny_checkpoint

CPU = torch.device("cpu")
VOCAB, CONTEXT = 100, 100
SHAPE = CacheShape(
    kv=(KVShape(2, 2, 3),),
    num_state_layers=2,
    state=StateShape(num_key_heads=2, num_value_heads=4, key_dim=5, value_dim=3, conv_width=4),
    dtype=torch.float32,
    draft_features=7,
)
PLENTY = 1 << 30
ANY_STATES: dict[str, Any] = {"chunked_prefill_size": 1}  # a state after every token may be stored


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EngineConfig.model_fields:
        monkeypatch.delenv(f"SPECMAMBA_{name.upper()}", raising=False)


def plan(
    budget: int = PLENTY,
    max_nodes: int = 4,
    shape: CacheShape = SHAPE,
    weight_bytes: int = 0,
    graph_token_bytes: int = 0,
    **flags: Any,
) -> MemoryPlan:
    """A plan without room for distributions, tokens that a draft head missed, captured steps, unless flags say so."""
    made: dict[str, Any] = {"speculative_accept": "target", "speculative_adaptive": "off", "disable_cuda_graph": True}
    config = EngineConfig(**(made | flags))
    sizes = CONTEXT, VOCAB, max_nodes, max_nodes, budget, weight_bytes
    return plan_memory(config, shape, *sizes, graph_token_bytes=graph_token_bytes)


def arrays_of(thing: object) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    for name in getattr(thing, "__dict__", {}):
        value = vars(thing)[name]
        if isinstance(value, Tensor | np.ndarray):
            yield value
        elif name == "_groups":  # of a KV pool; its layers are views of these
            yield from value


def num_bytes(thing: object) -> int:
    return sum(array.nbytes for array in arrays_of(thing))


class TestBytes:
    @pytest.mark.parametrize("page_size", [1, 4])
    @pytest.mark.parametrize("total_tokens", [None, 60], ids=["full contexts", "fewer"])
    @pytest.mark.parametrize("accept", ["target", "rejection", "auto"])
    def test_planned_bytes_are_those_of_the_pools(self, accept: str, page_size: int, total_tokens: int | None) -> None:
        """And of the distributions of every node of a step, where some request may be decided under rejection."""
        flags: dict[str, Any] = {"page_size": page_size, "max_total_tokens": total_tokens, "speculative_accept": accept}
        made = plan(max_running_requests=3, disable_radix_cache=True, speculative_adaptive="auto", **flags)
        kv = KVPool(SHAPE, made.num_pages, page_size, CPU)
        states = StatePool(SHAPE, made.num_state_slots, CPU)
        table = RequestTable(made.num_rows, made.context_length + made.num_lookahead_slots, kv, CPU)
        counts = TokenCounts(made.num_rows, VOCAB, CPU)
        counts.begin(1, [1], [2])
        assert made.kv_bytes == num_bytes(kv)
        assert made.state_bytes == num_bytes(states)
        # tokens and features of the MTP drafter
        pending_tokens = 4 * (pending_token_capacity(4) + missed_room(4) + MISSED_TOKENS) * (8 + 4 * 7)
        per_request = table.kv_slots.nbytes + pending_tokens + sum(x.nbytes for x in counts._tensors or ())
        distributions = 0 if accept == "target" else 3 * 4 * 6 * 4 * VOCAB  # rows, nodes, distributions per node
        assert made.table_bytes == pytest.approx(per_request + num_bytes(kv.allocator) + distributions, abs=8)

    @pytest.mark.parametrize("max_nodes", [1, 4, 16])
    @pytest.mark.parametrize(("kind", "buffers"), [("records", RecordBuffers), ("snapshots", SnapshotBuffers)])
    def test_bytes_of_the_speculation_state_and_of_one_more_draft_token(
        self, max_nodes: int, kind: Any, buffers: Any
    ) -> None:
        shape = replace(SHAPE, draft_features=0)
        made = plan(max_nodes=max_nodes, max_running_requests=3, shape=shape, speculative_state=kind)
        states = StatePool(shape, made.num_state_slots, CPU)
        now, more = (
            sum(x.nbytes for x in arrays_of(buffers(shape, states, 3, n, CPU)) if x.dtype is torch.float32)
            for n in (max_nodes, max_nodes + 1)
        )
        assert made.spec_bytes == now == 4 * made.spec_bytes_per_request
        assert made.draft_token_bytes == more - now == 4 * made.draft_token_bytes_per_request

    def test_bytes_of_a_draft_token_besides_its_state(self) -> None:
        """Distributions of a draft that is drawn, and a longer list of tokens and features for the head."""
        plain = plan(max_nodes=16)
        for accept in ("rejection", "auto"):
            rejecting = plan(max_nodes=16, speculative_accept=accept)
            assert rejecting.draft_token_bytes_per_request - plain.draft_token_bytes_per_request == 6 * 4 * VOCAB
        records = 2 * SHAPE.record_bytes_per_token
        entry = 8 + 4 * 7
        assert plain.draft_token_bytes_per_request == records + 4 * entry
        assert plan(max_nodes=4).draft_token_bytes_per_request == 2 * entry  # the list of records has room for eight

    def test_the_text_of_an_ngram_drafter(self) -> None:
        """Four bytes per position and row."""
        plain, ngram = (plan(max_running_requests=3, speculative_algorithm=name) for name in ("auto", "ngram"))
        assert ngram.table_bytes - plain.table_bytes == 4 * 4 * (CONTEXT + 4)

    def test_bytes_of_the_prefix_tree(self) -> None:
        """Their ids and slots, and the pages of nodes."""
        flags: dict[str, Any] = {"max_total_tokens": 500, "max_running_requests": 2}
        extra = plan(**flags).table_bytes - plan(disable_radix_cache=True, **flags).table_bytes
        assert extra == 24 * 501

    def test_the_weights_count(self) -> None:
        made = plan(200_000, weight_bytes=80_000, max_running_requests=2)
        assert made.weight_bytes == 80_000
        assert made.total_bytes <= 200_000 == made.budget_bytes
        without = plan(120_000, max_running_requests=2)
        assert (without.num_pages, without.num_state_slots) == (made.num_pages, made.num_state_slots)

    def test_the_draft_heads_kv_counts(self, tmp_path: Path) -> None:
        folder = write_tiny_checkpoint(tmp_path, 3)
        shapes = [
            load_model(folder, LoadOptions(torch.float32, CPU, with_head)).cache_shape for with_head in (False, True)
        ]
        without, with_head = (plan(shape=shape, max_total_tokens=300) for shape in shapes)
        per_layer = without.kv_bytes // shapes[0].num_kv_layers
        assert with_head.kv_bytes == without.kv_bytes + per_layer
        assert num_bytes(KVPool(shapes[1], with_head.num_pages, 1, CPU)) == with_head.kv_bytes
        scarce = [plan(without.total_bytes, shape=shape) for shape in shapes]
        assert scarce[1].num_kv_tokens < scarce[0].num_kv_tokens

    def test_free_memory_of_this_machine(self) -> None:
        assert free_memory(CPU) > 1 << 20


class TestPlenty:
    """More memory than can be of use."""

    @pairwise(
        pytest.mark.parametrize("page_size", [1, 7, 16]),
        pytest.mark.parametrize("max_nodes", [1, 4]),
        pytest.mark.parametrize(("rows", "contexts"), [(1, 5), (3, 7), (6, 12)]),
    )
    def test_kv_of_running_requests_and_as_much_to_cache(
        self, page_size: int, max_nodes: int, rows: int, contexts: int
    ) -> None:
        made = plan(max_nodes=max_nodes, page_size=page_size, max_running_requests=rows)
        assert made.num_pages == contexts * -(-(CONTEXT + max_nodes) // page_size)
        assert (made.num_rows, made.context_length) == (rows, CONTEXT)

    def test_states_follow_the_ratio(self) -> None:
        made = plan(max_running_requests=3, mamba_full_memory_ratio=2.0, **ANY_STATES)
        assert made.state_bytes == pytest.approx(2.0 * made.kv_bytes, abs=2 * SHAPE.state_bytes_per_slot)
        assert made.num_cached_states == made.num_state_slots - 3

    def test_there_are_a_few_states_for_every_request(self) -> None:
        assert plan(max_running_requests=3, mamba_full_memory_ratio=1e-3).num_state_slots == 3 * 5

    @pytest.mark.parametrize(
        ("flags", "distance"),
        [
            ({}, 64),
            ({"chunked_prefill_size": 16}, 16),
            ({"mamba_track_interval": 8, "mamba_radix_cache_strategy": "extra_buffer"}, 8),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("ratio", [1e3, 1e308])
    def test_there_are_never_more_states_than_can_be_stored(
        self, flags: dict[str, Any], distance: int, ratio: float
    ) -> None:
        made = plan(max_running_requests=3, mamba_full_memory_ratio=ratio, **flags)
        assert made.num_state_slots == 3 * 5 + made.num_kv_tokens // distance

    def test_without_a_cache_every_request_gets_one_context_and_one_state(self) -> None:
        made = plan(max_running_requests=3, page_size=7, disable_radix_cache=True, mamba_full_memory_ratio=50)
        assert (made.num_pages, made.num_state_slots, made.num_cached_states) == (3 * 15, 3, 0)

    def test_a_size_that_is_given(self) -> None:
        made = plan(max_running_requests=4, max_mamba_cache_size=2)
        assert (made.num_rows, made.num_state_slots, made.num_running_requests, made.num_cached_states) == (4, 2, 2, 0)
        assert made.num_pages == plan(max_running_requests=4).num_pages
        made = plan(max_running_requests=4, max_total_tokens=9000, **ANY_STATES)
        assert made.num_kv_tokens == 9000
        assert made.state_bytes == pytest.approx(0.9 * made.kv_bytes, abs=2 * SHAPE.state_bytes_per_slot)
        assert plan(max_running_requests=4, max_total_tokens=50).num_state_slots == 4 * 5

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_any_admitted_request_fits_alone(self, page_size: int) -> None:
        made = plan(max_total_tokens=50, page_size=page_size)
        assert made.context_length + made.max_nodes <= made.num_kv_tokens <= 50

    def test_a_small_model_takes_little(self) -> None:
        """The size of the bundled demo, on a machine with 24 GiB."""
        shape = CacheShape((KVShape(3, 2, 64),), 6, StateShape(4, 4, 64, 64, 4), torch.bfloat16, 256)
        made = plan_memory(EngineConfig(), shape, 4096, 4096, 4, 4, 12 << 30, 18 << 20)
        distributions = 16 * 4 * 6 * 4 * 4096
        assert made.total_bytes < (402 << 20) + distributions


class TestScarcity:
    """Less memory than can be of use."""

    @pytest.mark.parametrize("ratio", [0.5, 0.9, 3.0])
    def test_the_ratio_divides_the_whole_budget(self, ratio: float) -> None:
        made = plan(200_000, max_running_requests=6, mamba_full_memory_ratio=ratio, **ANY_STATES)
        assert made.num_state_slots > 6
        assert made.num_pages < plan(max_running_requests=6).num_pages
        slot = SHAPE.state_bytes_per_slot
        assert made.state_bytes == pytest.approx(ratio * made.kv_bytes, abs=2 * slot)
        assert 200_000 - made.total_bytes < 2 * slot + 200

    def test_running_requests_get_their_states_first_and_one_can_be_cached(self) -> None:
        made = plan(90_000, max_running_requests=6, mamba_full_memory_ratio=0.01)
        assert made.num_state_slots == 6 + 1
        assert 90_000 - made.total_bytes < 500  # the rest is KV

    def test_a_context_that_is_asked_for_comes_before_cached_states(self) -> None:
        flags: dict[str, Any] = {"max_running_requests": 2, "mamba_full_memory_ratio": 20.0} | ANY_STATES
        assert plan(60_000, **flags).context_length < CONTEXT
        made = plan(60_000, context_length=CONTEXT, **flags)
        assert made.context_length == CONTEXT
        assert made.num_pages == CONTEXT + 4
        assert 60_000 - made.total_bytes < SHAPE.state_bytes_per_slot

    @pytest.mark.parametrize("given", [{"max_total_tokens": 600}, {"max_mamba_cache_size": 30}], ids=str)
    def test_a_size_that_is_given_leaves_the_rest_to_the_other(self, given: dict[str, Any]) -> None:
        made = plan(150_000, max_running_requests=4, mamba_full_memory_ratio=5.0, **ANY_STATES, **given)
        assert (made.num_kv_tokens == 600) if "max_total_tokens" in given else (made.num_state_slots == 30)
        assert 150_000 - made.total_bytes < SHAPE.state_bytes_per_slot

    def test_more_memory_never_means_less_kv(self) -> None:
        tokens = [plan(budget, max_running_requests=2).num_kv_tokens for budget in range(40_000, 200_000, 3_000)]
        assert tokens == sorted(tokens)
        assert len(set(tokens)) > 20


REMEDY = re.compile(
    r"lower --(?P<flag>[a-z-]+) to (?P<low>\d+)|set at least (?P<least>\d+)|(?P<records>choose --speculative-state "
    r"records)|raise --mem-fraction-static to (?P<fraction>[\d.]+)"
)
HOPELESS = "free some memory or use a smaller model"

Case = dict[str, Any]


def follow(case: Case, remedy: str) -> Case:
    """A case with one change that a message asks for."""
    found = REMEDY.fullmatch(remedy)
    assert found, f"what is this advice? {remedy!r}"
    if found["flag"]:
        field = found["flag"].replace("-", "_")
        assert int(found["low"]) < case[field], remedy
        return case | {field: int(found["low"])}
    if found["least"]:
        return case | {"max_total_tokens": int(found["least"])}
    if found["records"]:
        assert case["speculative_state"] == "snapshots"
        return case | {"speculative_state": "records"}
    fraction = float(found["fraction"])
    assert fraction > 0.5
    return case | {"mem_fraction_static": fraction, "budget": int(case["budget"] / 0.5 * fraction)}


def alternatives(case: Case, message: str) -> list[tuple[str, Case]]:
    """Every change that a message offers, and the case after it."""
    first, _, then = message.partition(". Then ")
    if then:
        case = follow(case, first.rpartition(": ")[2])
    advice = message.rpartition(": ")[2]
    if advice == HOPELESS:
        return []
    followed = []
    for alternative in advice.split(" or "):
        changed = case
        for remedy in alternative.split(" and "):
            changed = follow(changed, remedy)
        followed.append((alternative, changed))
    return followed


CASES = st.fixed_dictionaries(
    {
        "budget": st.integers(-10, 300_000),
        "weight_bytes": st.sampled_from([0, 20_000]),
        "max_nodes": st.sampled_from([1, 3, 16]),
        "max_running_requests": st.integers(1, 20),
        "max_total_tokens": st.none() | st.integers(1, 3000),
        "max_mamba_cache_size": st.none() | st.integers(1, 60),
        "context_length": st.none() | st.integers(2, CONTEXT),
        "page_size": st.sampled_from([1, 5, 16]),
        "mamba_full_memory_ratio": st.sampled_from([0.01, 0.9, 30.0]),
        "disable_radix_cache": st.booleans(),
        "chunked_prefill_size": st.sampled_from([4, 512]),
        "speculative_state": st.sampled_from(["records", "snapshots"]),
        "speculative_accept": st.sampled_from(["target", "rejection", "auto"]),
    }
)
SMALL: Case = {
    "budget": 100_000,
    "weight_bytes": 0,
    "max_nodes": 3,
    "max_running_requests": 2,
    "max_total_tokens": None,
    "max_mamba_cache_size": None,
    "context_length": None,
    "page_size": 1,
    "mamba_full_memory_ratio": 0.9,
    "disable_radix_cache": False,
    "chunked_prefill_size": 512,
    "speculative_state": "records",
    "speculative_accept": "target",
}


def check_plan(made: MemoryPlan, case: Case) -> None:
    rows, tokens, states = (case[k] for k in ("max_running_requests", "max_total_tokens", "max_mamba_cache_size"))
    assert made.total_bytes <= case["budget"]
    assert made.num_rows == rows
    assert 2 <= made.context_length <= made.num_kv_tokens - made.num_lookahead_slots
    assert made.context_length == case["context_length"] or case["context_length"] is None
    assert made.num_state_slots == states if states else made.num_state_slots >= rows
    assert tokens is None or made.num_pages == tokens // case["page_size"]
    if case["disable_radix_cache"]:
        assert states or made.num_state_slots == rows
        assert tokens or made.num_kv_tokens <= rows * (CONTEXT + made.num_lookahead_slots + case["page_size"])


class TestProperties:
    @settings(max_examples=250)
    @given(CASES)
    @example(SMALL | {"budget": 20_000, "max_running_requests": 20})
    @example(SMALL | {"max_total_tokens": 1})
    @example(SMALL | {"max_total_tokens": 50, "context_length": 100})
    @example(SMALL | {"max_total_tokens": 50, "context_length": 100, "budget": 0})
    @example(SMALL | {"speculative_state": "snapshots", "max_nodes": 16, "budget": 30_000})
    def test_a_plan_fits_and_an_error_has_advice_that_works(self, case: Case) -> None:
        try:
            check_plan(plan(**case), case)
        except ConfigError as error:
            message = str(error)
        else:
            return
        assert alternatives(case, message) or HOPELESS in message
        for alternative, changed in alternatives(case, message):
            try:
                check_plan(plan(**changed), changed)
            except ConfigError as error:
                pytest.fail(f"{alternative!r} of {message!r} does not help: {error}")

    @settings(max_examples=150)
    @given(CASES)
    def test_one_setting_alone_is_lowered_no_further_than_it_must(self, case: Case) -> None:
        try:
            plan(**case)
        except ConfigError as error:
            message = str(error)
        else:
            return
        if ". Then " in message:
            return
        for alternative, changed in alternatives(case, message):
            fields = [field for field in case if changed[field] != case[field]]
            if len(fields) != 1 or not alternative.startswith("lower"):
                continue
            step = case["page_size"] if fields[0] == "max_total_tokens" else 1
            if changed[fields[0]] + step < case[fields[0]]:
                with pytest.raises(ConfigError):
                    plan(**(changed | {fields[0]: changed[fields[0]] + step}))


class TestErrors:
    def test_context_beyond_the_model(self) -> None:
        with pytest.raises(ConfigError, match="--context-length 101 is more than the 100 tokens"):
            plan(context_length=101)
        assert plan(context_length=100).context_length == 100
        assert plan(context_length=2).context_length == 2

    @pytest.mark.parametrize("max_nodes", [1, 4, 64])
    @pytest.mark.parametrize("page_size", [1, 5, 16])
    def test_too_few_tokens_names_the_smallest_number_that_works(self, max_nodes: int, page_size: int) -> None:
        with pytest.raises(
            ConfigError, match=r"--max-total-tokens 1 is too small to run any request: set at least"
        ) as e:
            plan(max_nodes=max_nodes, page_size=page_size, max_total_tokens=1)
        named = int(str(e.value).split()[-1])
        made = plan(max_nodes=max_nodes, page_size=page_size, max_total_tokens=named)
        assert made.context_length >= 2  # one prompt token, one output token
        with pytest.raises(ConfigError):
            plan(max_nodes=max_nodes, page_size=page_size, max_total_tokens=named - 1)

    def test_a_context_that_the_kv_pool_cannot_hold(self) -> None:
        with pytest.raises(ConfigError) as e:
            plan(max_total_tokens=70, context_length=80, page_size=8)
        assert str(e.value) == (
            "--max-total-tokens 70 is too small for --context-length 80 and one draft: set at least 88 or lower "
            "--context-length to 60"
        )

    def test_the_message_names_all_parts(self) -> None:
        with pytest.raises(ConfigError) as e:
            plan(3 << 20, weight_bytes=2 << 20, max_total_tokens=20_000, max_running_requests=9)
        assert re.fullmatch(
            r"weights and the smallest pools need \d+ MiB \(2 for the weights, 2 for 20000 tokens of KV, 1 for 9 "
            r"recurrent states, 1 for the speculation of 9 requests, 1 for their tables\), but --mem-fraction-static "
            r"0\.5 allows 3 MiB: lower --max-total-tokens to \d+ or raise --mem-fraction-static to 0\.\d+",
            str(e.value),
        ), str(e.value)

    def test_several_changes_where_one_is_not_enough(self) -> None:
        with pytest.raises(ConfigError, match="lower --max-total-tokens to 6 and lower --max-running-requests to") as e:
            plan(30_000, max_total_tokens=2000)
        assert " or lower" not in str(e.value)

    def test_weights_alone_are_too_much(self) -> None:
        with pytest.raises(ConfigError, match=HOPELESS):
            plan(1 << 20, weight_bytes=64 << 20)


class TestStartUpLines:
    SHAPE = CacheShape((KVShape(1, 1, 2),), 18, StateShape(16, 16, 128, 128, 4), torch.bfloat16)

    def lines(self, **flags: Any) -> list[str]:
        return plan(1 << 34, 16, self.SHAPE, 3 << 30, **({"speculative_accept": "auto"} | flags)).describe_lines()

    def test_records(self) -> None:
        assert self.lines() == [
            "weights                3.0 GiB",
            "KV pool               29.0 KiB  3,712 tokens of 8 B, running and cached",
            "recurrent states       1.5 GiB  18.6 MiB each: 16 to run, 64 to cache",
            (
                "speculation            279 MiB  records for trees of up to 16 nodes: 16.4 MiB per running request "
                "(snapshots would take 298 MiB)"
            ),
            "request tables         769 KiB  16 rows, and the lists of pages",
            "total                  4.7 GiB  of 16.0 GiB that --mem-fraction-static allows",
            "running requests            16  at once; KV for 32 of the full 100 tokens",
            "one more draft token  16.8 MiB  1.0 MiB per running request (snapshots would take 18.6 MiB)",
        ]

    def test_captured_steps(self) -> None:
        """They are in the total, and in what one more draft token takes; several ranks of a CPU capture as many."""
        plain, captured = (plan(1 << 34, 16, max_running_requests=8, disable_cuda_graph=off) for off in (True, False))
        assert plan(1 << 34, 16, max_running_requests=8, disable_cuda_graph=False, tp_size=2) == captured
        held = next(line for line in captured.describe_lines() if line.startswith("captured steps"))
        assert re.split("  +", held)[1:] == [
            "50.0 KiB", "logits between forward and decision, of up to 8 requests"
        ]  # fmt: skip
        assert captured.total_bytes - plain.total_bytes == captured.graph_bytes == 4 * VOCAB * 16 * 8
        assert captured.draft_token_bytes_per_request - plain.draft_token_bytes_per_request == 4 * VOCAB
        assert not any(line.startswith("captured steps") for line in plain.describe_lines())

    def test_graphs_of_a_gpu(self) -> None:
        """What they keep of activations is taken from the pools; a request takes that of its nodes, and logits."""
        flags: dict[str, Any] = {"max_running_requests": 8, "disable_cuda_graph": False}
        plain, planned = (plan(1 << 34, 16, graph_token_bytes=size, **flags) for size in (0, 1 << 20))
        assert plain.graph_pool_bytes == 0
        assert planned.graph_pool_bytes == GRAPH_BYTES + 8 * 16 * ((1 << 20) + 4 * VOCAB)
        assert planned.total_bytes - plain.total_bytes == planned.graph_pool_bytes
        per_draft_token = planned.draft_token_bytes_per_request - plain.draft_token_bytes_per_request
        assert per_draft_token == (1 << 20) + 4 * VOCAB
        rows = [re.split("  +", line) for line in planned.describe_lines()]
        assert ["graphs", "192 MiB", "what they keep of activations, estimated"] in rows
        off = plan(1 << 34, 16, graph_token_bytes=1 << 20, max_running_requests=8, disable_cuda_graph=True)
        assert off.graph_pool_bytes == 0

    def test_graphs_leave_less_to_pools(self) -> None:
        flags: dict[str, Any] = {"max_running_requests": 2, "disable_cuda_graph": False, "graph_token_bytes": 1000}
        plenty = plan(PLENTY, 2, **flags)
        little = plan(plenty.total_bytes - 4096, 2, **flags)
        assert little.graph_pool_bytes == plenty.graph_pool_bytes > GRAPH_BYTES
        assert little.total_bytes <= little.budget_bytes
        assert little.kv_bytes + little.state_bytes < plenty.kv_bytes + plenty.state_bytes
        with pytest.raises(ConfigError, match="65 for captured steps"):
            plan(GRAPH_BYTES, 2, **flags)

    def test_snapshots(self) -> None:
        speculation, draft_token = (self.lines(speculative_state="snapshots")[i] for i in (3, 7))
        assert speculation.endswith(
            "snapshots for trees of up to 16 nodes: 298 MiB per running request (records would take 16.4 MiB)"
        )
        assert draft_token.endswith("18.6 MiB per running request (records would take 1.0 MiB)")

    def test_no_cache_and_no_draft(self) -> None:
        lines = plan(max_nodes=1, max_running_requests=2, disable_radix_cache=True).describe_lines()
        assert lines[1].endswith("202 tokens of 96 B")
        assert lines[2].endswith("each: 2 to run")
        assert "records for plain decoding: " in lines[3]

    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 KiB"),
            (102_399, "100.0 KiB"),
            (1 << 20, "1.0 MiB"),
            (300 << 20, "300 MiB"),
            (7 << 50, "7168 TiB"),
        ],
    )
    def test_sizes(self, size: int, text: str) -> None:
        assert readable(size) == text

    def test_columns(self) -> None:
        assert aligned([("a", "10 B", "x"), ("long", "1 B", "")]) == ["a     10 B  x", "long   1 B"]


def test_a_token_takes_what_the_widest_layer_makes() -> None:
    """Of the demo that is one with a gated delta net: counted from its config."""
    flags: dict[str, Any] = {"max_running_requests": 2, "dtype": "bfloat16", "speculative_algorithm": "none"}
    config = EngineConfig(**flags)
    folder = resolve_checkpoint(config.model_path, config.revision)
    models = load_models(folder, config, CPU, only_shapes=True)
    c = json.loads((folder / "config.json").read_text("utf8"))
    heads, hidden = c["linear_num_value_heads"], c["hidden_size"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = heads * c["linear_value_head_dim"]
    made = 2 * keys + 2 * values + 2 * heads + hidden + 2 * c["intermediate_size"] + hidden
    in_float32 = 2 * keys + 2 * values + 2 * heads
    expected = 2 * (COPIES * made + (STREAMS + KEPT) * hidden) + 4 * in_float32
    assert graph_token_bytes(config, models, torch.device("cuda")) == expected
    assert graph_token_bytes(config, models, CPU) == 0
    assert graph_token_bytes(EngineConfig(**flags, disable_cuda_graph=True), models, torch.device("cuda")) == 0
