"""The engine: it loads a model, accepts requests, and advances all of them one step at a time."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from specmamba.cache.memory import free_memory, plan_memory
from specmamba.cache.memory.elastic import elastic_chunk
from specmamba.cache.prefix.inspection import View
from specmamba.cache.tiers.pool_transfer import PoolTransfer
from specmamba.cache.tiers.tier_setup import build_tiers, new_transfer, require_storage
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.config import EngineConfig
from specmamba.core import ANYONE, DraftView, Handoff, OutputDelta, Owner
from specmamba.draft import build_drafter
from specmamba.draft.draft_plan import DraftPlan, plan_drafts
from specmamba.draft.drafter import Drafter
from specmamba.draft.predicted_text import PredictedText
from specmamba.draft.sizing.rank_sizers import build_sizer
from specmamba.engine.base_engine import BaseEngine
from specmamba.engine.cache_manager import build_cache_manager
from specmamba.engine.captured.captured_steps import build_graph_runner
from specmamba.engine.captured.step_memory import graph_token_bytes
from specmamba.engine.cost_measurement import UNKNOWN, bounds_of, step_costs
from specmamba.engine.engine_sample import EngineSample, cache_report, cache_text
from specmamba.engine.handoffs import DecodeSide, Handoffs, PrefillSide
from specmamba.engine.loading import (
    identity_of,
    keep_freed_memory,
    load_models,
    load_tokenizer,
    process_threads,
    require_target,
    resolve_device,
    set_threads,
)
from specmamba.engine.model_report import describe_engine
from specmamba.engine.request import Request, TextStream, seed_of_request
from specmamba.engine.runner import Runner
from specmamba.engine.scheduler import EngineStats, Scheduler, SchedulerLimits, TenantStats
from specmamba.engine.stepping.acceptance_watch import AcceptanceWatch
from specmamba.engine.stepping.constraints import Constraints
from specmamba.engine.stepping.live_requests import LiveRequests
from specmamba.engine.stepping.step_cycle import GrammarTurns, StepCycle
from specmamba.engine.stepping.step_news import Reporter
from specmamba.errors import ConfigError, NotEnoughMemoryError, RequestError
from specmamba.grammar import CompiledGrammar
from specmamba.kernels.draft_sizing import TreeArrays
from specmamba.models.text.tokenizer import Detokenizer
from specmamba.parallel.ranks import ONE_RANK, Ranks
from specmamba.processes.unused_memory import return_freed_memory
from specmamba.sampling_params import SamplingParams
from specmamba.transfer.leases import Between
from specmamba.transfer.transport import TransferPlan
from specmamba.verify.acceptance import AcceptPolicy, accept_rule
from specmamba.verify.pools import Pools
from specmamba.verify.record_buffers import RecordBuffers

logger = logging.getLogger("specmamba")

MAX_VIEWS = 64  # drafts that are kept for the live page


class Engine(BaseEngine):
    """One model and its requests. Not thread-safe: all calls come from one thread.

    Raises:
        SpecmambaError: the configuration, the checkpoint or the memory does not allow to start.
    """

    given_budget: ClassVar[int | None] = None  # bytes for weights and pools; None: a share of the memory that is free

    def __init__(self, config: EngineConfig, ranks: Ranks = ONE_RANK) -> None:
        """Load the model; ``ranks``: that share it, each with an engine that gets the same calls."""
        self.ranks = ranks
        try:
            self._load(config)
        except Exception as error:
            if (shortage := NotEnoughMemoryError.found_in(error)) is not None:
                raise shortage from error
            raise

    def _load(self, config: EngineConfig) -> None:
        self.device = resolve_device(config.device)
        given = config
        self.config = config = config.on_device(self.device.type)
        self.folder = folder = resolve_checkpoint(config.model_path, config.revision)
        budget = self._memory_budget(config)
        require_target(folder)
        require_storage(config)  # before what takes long
        self.tokenizer = load_tokenizer(folder, config.skip_tokenizer_init)
        with torch.inference_mode():
            self.models = load_models(folder, config, self.device, ranks=self.ranks)
            self.model = self.models.target
            self.vocab_size = self.model.target.vocab_size
            self.eos_token_ids = self.model.eos_token_ids
            self.draft_plan = plan_drafts(config, self.models.draft_kind, self.vocab_size, self.models.block_size)
            weight_bytes = -self.ranks.smallest(-self.models.weight_bytes)
            self.memory_plan = plan_memory(
                config,
                self.model.cache_shape,
                self.model.context_length,
                self.vocab_size,
                self.draft_plan.max_nodes,
                self.draft_plan.num_lookahead_slots,
                budget,
                weight_bytes,
                elastic_chunk=elastic_chunk(config, self.model.cache_shape, self.device),
                graph_token_bytes=graph_token_bytes(config, self.models, self.device),
            )
            self.ranks.agree("the memory that they plan", repr(self.memory_plan))
        # outside of inference mode: an abort, which runs outside of a step, writes these tensors
        self.pools = Pools(self.model.cache_shape, self.vocab_size, self.memory_plan, self.device)
        drafter = self.make_drafter(self.draft_plan, config)
        self.constraints = Constraints(self.vocab_size)
        self.runner = Runner(
            self.model.target, self.pools, drafter, self.device, AcceptPolicy(), self.constraints, self.ranks
        )
        self.cache_manager = build_cache_manager(config, self.model, self.pools)
        self.scheduler = Scheduler(self.cache_manager, SchedulerLimits.of(config, self.draft_plan.num_lookahead_slots))
        self.context_length = self.memory_plan.context_length
        self._num_added = 0
        self._order = itertools.count()  # of arrival: never used twice, since settings on the device are kept by it
        self._views: deque[DraftView] = deque(maxlen=MAX_VIEWS)
        self._reporter = Reporter(AcceptanceWatch(self.draft_plan.algorithm))
        parts = self.runner, self.scheduler, self.cache_manager
        self.live = LiveRequests(*parts, self.constraints, self.pools)
        self.cycle = StepCycle(*parts, self.pools, self.live, self.make_turns(), self._reporter)
        self.num_threads = set_threads(config, self.device, weight_bytes)  # of captured steps on a CPU
        return_freed_memory()  # what loading has used
        if self.device.type == "cpu":
            keep_freed_memory()
        self.runner.graph_runner = build_graph_runner(
            config, self.pools, self.memory_plan, self.device, self.num_threads, self.ranks
        )
        with torch.inference_mode():
            graph_lines = self.runner.capture(self.draft_plan.is_sized)
        graph_lines += self.start_sizing()
        if self.runner.graph_runner is not None:
            self.runner.graph_runner.replay.serve()
        # last, so that nothing of what was measured is written
        self.cache_manager.tiers = tiers = build_tiers(
            config,
            self.memory_plan,
            self.cache_manager.cache,
            self.pools.kv,
            self.pools.states,
            self._identity,
        )
        graph_lines += [] if tiers is None else tiers.describe_lines()
        graph_lines += [] if self.ranks.size == 1 else [f"{self.ranks.size} ranks share the model: sizes are of one"]
        for line in (*config.describe_defaults(given), *self.memory_plan.describe_lines(), *graph_lines):
            logger.info(line)

    def _identity(self) -> dict[str, str]:
        return identity_of(self.config, self.folder, self.models, self.draft_plan)

    def start_handoffs(self, plan: TransferPlan, between: Between) -> None:
        """Leave prompts of requests with a room for decode servers, or get them from prefill servers, from now on.

        Args:
            plan: which of the two, and how.
            between: calls a function on this engine's thread, between two steps.

        Raises:
            ConfigError: there is too little memory.
        """
        manager = self.cache_manager
        if plan.is_prefill:
            transfer = self._new_transfer() if manager.tiers is None else manager.tiers.transfer
            self.live.handoffs = PrefillSide(plan, between, manager, transfer)
        else:
            self.live.handoffs = DecodeSide(plan, manager, self._new_transfer)

    @property
    def handoffs(self) -> Handoffs | None:
        """What ``start_handoffs`` has made; None: it was not called."""
        return self.live.handoffs

    def make_turns(self) -> GrammarTurns:
        """Make what says in each step which requests take part in it, and which wait for their grammars."""
        return self.constraints

    def _new_transfer(self) -> PoolTransfer:
        return new_transfer(self.config, self.pools.kv, self.pools.states, self._identity())

    def _memory_budget(self, config: EngineConfig) -> int:
        """Bytes for weights and pools, the same on all ranks: the smallest that one of them has."""
        if self.given_budget is not None:
            return self.given_budget
        num_sharing = self.ranks.size if self.device.type == "cpu" else 1  # of the same memory
        return self.ranks.smallest(int(free_memory(self.device) * config.mem_fraction_static) // num_sharing)

    def start_sizing(self) -> list[str]:
        """Let a sizer decide the size of drafts, if that is the plan; returns lines of the start-up report.

        Of several ranks the first one times steps, which the others make as it tells them.

        Raises:
            ConfigError: as ``step_costs``; or there are several ranks on GPUs.
        """
        self.runner.sizer = None
        if not self.draft_plan.is_sized:
            return []
        graphs, plan = self.runner.graph_runner, self.memory_plan
        own = TreeArrays.empty(plan.num_rows, plan.max_nodes)
        trees = own if graphs is None else graphs.inputs.trees.arrays
        if self.ranks.size > 1 and self.device.type == "cuda":
            raise ConfigError("--speculative-adaptive auto: on GPUs drafts of several ranks have fixed sizes: drop it")
        sizer = build_sizer(self.ranks, bounds_of(self.draft_plan), trees, UNKNOWN, self.runner.totals)
        self.runner.sizer = sizer
        if not self.ranks.is_first:
            return []
        sizer.times.costs, line = step_costs(self)
        return [line]

    @property
    def num_added(self) -> int:
        """Requests so far; each gets the next number, from which its seed is made."""
        return self._num_added

    def forget(self, num_added: int) -> None:
        """Drop what requests after the first ``num_added`` left behind, as if they had never been."""
        self._num_added = num_added
        self._reporter.forget()
        self.scheduler.num_preemptions = 0
        self.flush_cache()
        self.cache_manager.cache.forget_figures()
        self.pools.give_back()

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        forced_output_ids: Sequence[int] = (),
        extra_key: str | None = None,
        grammar: CompiledGrammar | None = None,
        owner: Owner = ANYONE,
        predicted_ids: Sequence[int] = (),
    ) -> None:
        """As ``BaseEngine.add_request``."""
        self.check_request(prompt_token_ids, params, forced_output_ids)
        predicted_ids = predicted_ids or self.encode_prediction(params)
        self.check_prediction(predicted_ids, params)
        if request_id in self.live.by_id or any(delta.request_id == request_id for delta in self.cycle.untold):
            raise RequestError(f"a request with the id {request_id!r} is running already", "request_id")
        prompt = tuple(prompt_token_ids)
        max_output = min(params.max_tokens, self.context_length - len(prompt))
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.model.eos_token_ids)}
        text = TextStream(Detokenizer(self.tokenizer), params.stop, stop_ids, max_output)
        seed = params.seed if params.seed is not None else seed_of_request(self.config.seed, self._num_added)
        forced = tuple(forced_output_ids)
        rule = accept_rule(self.config.speculative_accept, params, self.draft_plan.draws_drafts)
        request = Request(request_id, next(self._order), prompt, params, seed, text, rule, forced, extra_key, owner)
        if predicted_ids:
            request.predicted, request.rule = PredictedText(predicted_ids), "target"
        request.follower = self.constraints.follower(params, grammar, owner.name)
        self.live.add(request)
        self._num_added += 1

    def hand_over(self, request_id: str, handoff: Handoff) -> None:
        """Name the room of a request that was just added; without ``start_handoffs`` it is like any other."""
        request = self.live.by_id[request_id]
        request.handoff = handoff
        if self.handoffs is not None:
            self.handoffs.expect(request)

    @property
    def draft_algorithm(self) -> str:
        """As ``BaseEngine.draft_algorithm``."""
        return self.draft_plan.algorithm

    def abort(self, request_id: str) -> None:
        """As ``BaseEngine.abort``."""
        self.cycle.abort(request_id)

    def step(self) -> list[OutputDelta]:
        """Run at most one chunk of known tokens, then one verify of every request that is ready for it.

        Returns:
            A delta for every request that got tokens or ended.
        """
        return self.cycle.step()

    def settle(self) -> None:
        """Read the step in flight, if there is one; as ``StepCycle.settle``."""
        self.cycle.settle()

    def preempt(self, request: Request) -> None:
        """Free all memory of a running request; its state goes to the prefix cache, and it waits again."""
        self.cycle.preempt(request)

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_work or self.cycle.has_more

    @property
    def has_room(self) -> bool:
        """As ``BaseEngine.has_room``."""
        return self.scheduler.has_room

    def stats(self) -> EngineStats:
        """As ``BaseEngine.stats``."""
        sizer, drafter = self.runner.sizer, self.runner.drafter
        stats = self.scheduler.stats(self.pools, self._reporter.spec)
        return replace(
            stats,
            sizing=None if sizer is None else sizer.stats(),
            draft_texts=drafter.text_stats,
            chain=self.cycle.chain.stats if self.runner.is_deferred else None,
            handoffs=None if self.handoffs is None else self.handoffs.stats(),
        )

    def stats_of(self, tenant: str | None) -> TenantStats:
        """As ``BaseEngine.stats_of``."""
        return self.scheduler.stats_of(tenant, self._reporter.spec_of(tenant))

    def sample(self, views: Collection[View], max_nodes: int) -> EngineSample:
        """As ``BaseEngine.sample``."""
        records = self.pools.state_buffers
        num_pending, num_records = 0, 0
        if isinstance(records, RecordBuffers):
            num_pending, num_records = records.num_pending, records.num_records
        return EngineSample(
            self.stats(),
            {view: self.stats_of(view.tenant) for view in views if not view.is_whole},
            tuple(draft for draft in self.last_drafts() if len(draft.tokens) > 1),
            num_pending,
            num_records,
            {view: self.cache_manager.outline(max_nodes, view) for view in views} if max_nodes else {},
        )

    def cache_report(self, view: View) -> dict[str, object]:
        """As ``BaseEngine.cache_report``."""
        return cache_report(self.config, self.cache_manager, view)

    def cache_text(self, view: View) -> str:
        """As ``BaseEngine.cache_text``."""
        return cache_text(self.cache_manager, view)

    def watch_drafts(self, views: Sequence[View]) -> None:
        """As ``BaseEngine.watch_drafts``."""
        self._views.clear()
        self.runner.watched = tuple(views)
        self.runner.on_draft = self._views.append if views else None

    def last_drafts(self) -> tuple[DraftView, ...]:
        """Return the kept drafts since the last call, at most the newest ``MAX_VIEWS``, and drop them."""
        views = tuple(self._views)
        self._views.clear()
        return views

    def flush_cache(self) -> int:
        """As ``BaseEngine.flush_cache``."""
        self.runner.drafter.forget_texts()
        return self.cache_manager.flush()

    def make_drafter(self, plan: DraftPlan, config: EngineConfig) -> Drafter:
        """Make a drafter on this engine's pools. Raises ConfigError when a corpus cannot be read."""
        return build_drafter(plan, config, self.models, self.pools.kv, self.pools.table, self.tokenizer.encode)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose states the draft head reads; empty: it reads the last hidden state, or there is none."""
        drafts_with_head = self.draft_plan.algorithm == self.model.draft_algorithm
        return getattr(self.model.draft_head, "target_layers", ()) if drafts_with_head else ()

    def describe(self) -> dict[str, object]:
        """Return configuration, model, drafts, memory and buckets, ready for JSON (``/server_info``)."""
        graph_runner = self.runner.graph_runner
        return describe_engine(
            self.config,
            self.folder,
            self.models,
            self.draft_plan,
            self.memory_plan,
            self.device,
            () if graph_runner is None else graph_runner.buckets,
        )

    def close(self) -> None:
        """Drop all requests, and restore the number of threads that was set before this engine."""
        self.cycle.close()
        self.constraints.close()
        if self.handoffs is not None:
            self.handoffs.close()
        self.cache_manager.close()
        if self.runner.graph_runner is not None:
            self.runner.graph_runner.replay.close()
        torch.set_num_threads(process_threads())
