"""The engine: it loads a model, accepts requests, and advances all of them one step at a time."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
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
from specmamba.cuda_graphs import HostRead
from specmamba.draft import build_drafter
from specmamba.draft.draft_plan import DraftPlan, plan_drafts
from specmamba.draft.drafter import Drafter
from specmamba.draft.predicted_text import PredictedText
from specmamba.draft.sizing.rank_sizers import build_sizer
from specmamba.engine.cache_manager import build_cache_manager
from specmamba.engine.captured.captured_steps import build_graph_runner
from specmamba.engine.captured.step_chain import Arrivals, StepChain
from specmamba.engine.captured.step_in_flight import ExtendInFlight, StepInFlight
from specmamba.engine.captured.step_memory import graph_token_bytes
from specmamba.engine.constraints import Constraints
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
from specmamba.engine.replica_control import ReplicaControl
from specmamba.engine.request import ChunkState, PrefillRun, Request, TextStream, seed_of_request
from specmamba.engine.runner import Runner
from specmamba.engine.scheduler import EngineStats, Scheduler, SchedulerLimits, TenantStats
from specmamba.engine.telling.acceptance_watch import AcceptanceWatch
from specmamba.engine.telling.step_news import News, Reporter, StepNews, has_ended
from specmamba.errors import ConfigError, NotEnoughMemoryError, PromptTooLongError, RequestError
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
from specmamba.verify.result import StepResult

logger = logging.getLogger("specmamba")

MAX_VIEWS = 64  # drafts that are kept for the live page
DISPLACED = "the queue is full, and other clients have fewer requests in it: try again later"
NOT_FINITE = "the model's numbers are not finite for this request: try --dtype bfloat16 or float32"


class Engine:
    """One model and its requests. Not thread-safe: all calls come from one thread.

    Raises:
        SpecmambaError: the configuration, the checkpoint or the memory does not allow to start.
    """

    given_budget: ClassVar[int | None] = None  # bytes for weights and pools; None: a share of the memory that is free
    replicas: ReplicaControl | None = None  # of an engine whose requests run in other processes

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
        self._requests: dict[str, Request] = {}
        self.handoffs: Handoffs | None = None  # of ``start_handoffs``
        self._num_added = 0
        self._order = itertools.count()  # of arrival: never used twice, since settings on the device are kept by it
        self._views: deque[DraftView] = deque(maxlen=MAX_VIEWS)
        self._in_flight: StepInFlight | None = None  # launched, and not read yet
        self._chain = StepChain(self.runner, self.scheduler)
        self._unread: ExtendInFlight | None = None  # known tokens that run in front of a verify that is to be launched
        self._dropped: HostRead | None = None  # of the newest step that was not read, as nothing of it was wanted
        self._finished = 0.0  # time at which the newest step was read
        self._untold: list[OutputDelta] = []  # of a step that was read between two calls of ``step``
        self._error: Exception | None = None  # of a launch behind such a step: nothing goes on
        self._reporter = Reporter(AcceptanceWatch(self.draft_plan.algorithm))
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
            self.handoffs = PrefillSide(plan, between, manager, transfer)
        else:
            self.handoffs = DecodeSide(plan, manager, self._new_transfer)

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
        """Queue a request.

        Where the queue is full, a request of a client with more waiting ones may leave it: it gets an error delta.

        Args:
            request_id: chosen by the caller; unique among running requests.
            prompt_token_ids: the prompt.
            params: how tokens are chosen, and when the request ends.
            forced_output_ids: output tokens that are given instead of chosen, as far as they go.
            extra_key: cached prefixes are shared only between requests of the same key and tenant.
            grammar: ``params.grammar``, compiled.
            owner: the client.
            predicted_ids: tokens that the output is expected to repeat, to draft from; ``params.prediction``, encoded.

        Raises:
            RequestError: the prompt is empty or has an unknown token, the id is in use, or this engine cannot draft
                from a given text.
            PromptTooLongError: no output token fits behind the prompt.
            QueueFullError: too many requests are waiting.
        """
        self.check_request(prompt_token_ids, params, forced_output_ids)
        predicted_ids = predicted_ids or self.encode_prediction(params)
        self.check_prediction(predicted_ids, params)
        if request_id in self._requests or any(delta.request_id == request_id for delta in self._untold):
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
        self.scheduler.add(request)
        self._requests[request_id] = request
        self._num_added += 1

    def hand_over(self, request_id: str, handoff: Handoff) -> None:
        """Name the room of a request that was just added; without ``start_handoffs`` it is like any other."""
        request = self._requests[request_id]
        request.handoff = handoff
        if self.handoffs is not None:
            self.handoffs.expect(request)

    def check_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, forced_output_ids: Sequence[int] = ()
    ) -> None:
        """Raise what ``add_request`` would raise about these arguments alone; any thread may call this."""
        self.check_prompt(prompt_token_ids, params.max_tokens)
        if params.stop:
            self.tokenizer.require_text("a stop string", "stop")
        if params.grammar is not None:
            self.tokenizer.require_text("structured output", "grammar")
        self.check_tokens(forced_output_ids, "replay")
        self.check_tokens(params.logit_bias, "logit_bias")
        if params.accept == "rejection" and self.config.speculative_accept == "target":
            raise RequestError("this server decides all requests under target (--speculative-accept)", "speculative")

    def encode_prediction(self, params: SamplingParams) -> Sequence[int]:
        """The token ids of ``params.prediction``; any thread may call this. Raises RequestError: it is no text."""
        given = params.prediction
        if given is None or not isinstance(given, str):
            return given or ()
        try:
            return self.tokenizer.encode(given, add_special_tokens=False)
        except RequestError as error:
            raise RequestError(str(error), "prediction") from None

    @property
    def draft_algorithm(self) -> str:
        """What drafts: the name of ``--speculative-algorithm``, or "none"."""
        return self.draft_plan.algorithm

    def check_prediction(self, predicted_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise RequestError if this engine, or this request, cannot draft from a given text."""
        if not predicted_ids:
            return
        algorithm = self.draft_algorithm
        if algorithm in ("none", "draft-model"):
            what = "drafts nothing" if algorithm == "none" else "drafts with a model of its own"
            raise RequestError(
                f"this server {what}, and has no room for drafts from a given text: leave the prediction out, or serve "
                "with --speculative-algorithm ngram or a draft head",
                "prediction",
            )
        if not params.is_drafted or params.accept == "rejection":
            wish = "no drafts" if not params.is_drafted else "drafts accepted under rejection"
            raise RequestError(
                f"a prediction is drafted and accepted under target, and speculative asks for {wish}: drop one",
                "prediction",
            )
        if len(predicted_ids) > self.context_length:
            raise RequestError(
                f"the prediction has {len(predicted_ids)} tokens, and texts have {self.context_length} at the most",
                "prediction",
            )
        self.check_tokens(predicted_ids, "prediction")

    def check_prompt(self, prompt_token_ids: Sequence[int], max_tokens: int = 1) -> None:
        """Raise what ``add_request`` would raise about this prompt: RequestError or PromptTooLongError."""
        if not prompt_token_ids:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        longest = self.context_length - min(max_tokens, 1)
        if len(prompt_token_ids) > longest:
            raise PromptTooLongError(len(prompt_token_ids), longest)
        self.check_tokens(prompt_token_ids, "prompt")

    def check_tokens(self, token_ids: Iterable[int], param: str) -> None:
        """Raise RequestError for a token that is not in the vocabulary."""
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"token id {token} is not in the vocabulary of {self.vocab_size} tokens", param)

    def abort(self, request_id: str) -> None:
        """Remove a request and free its memory; unknown and finished ids are ignored."""
        self._settle_for(request_id)
        self._untold = [delta for delta in self._untold if delta.request_id != request_id]
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.runner.dismiss(request)
            self.scheduler.release(request)
            if request.follower is not None:
                request.follower.close()
            if self.handoffs is not None:
                self.handoffs.was_dropped(request)

    @torch.inference_mode()
    def step(self) -> list[OutputDelta]:
        """Run at most one chunk of known tokens, then one verify of every request that is ready for it.

        A request whose grammar is still finding out which tokens may follow sits out this verify. Where the device
        works by itself (``Runner.overlaps``), a verify is launched here and read by the next call, so that what the one
        before has decided is told while it runs; and where the host has nothing to do between the two (``StepChain``),
        it is launched before that one is read.

        Returns:
            A delta for every request that got tokens or ended.
        """
        if self._error is not None:
            raise self._error
        arrived: list[OutputDelta] = []
        if self._launch_behind(arrived):
            return arrived + self._tell(self._receive())
        deltas, self._untold = self._untold + arrived, []
        news, is_read_here = self._receive(), False
        if is_behind := bool(deltas or news):
            self._observe_rest(news)
        try:
            is_read_here = self._go_on(deltas, is_behind)
        except Exception as error:
            if not is_behind:
                raise
            self._error = error  # raised by the next call, behind what is known already
        if is_read_here:
            news = self._receive()
        deltas += self._tell(news)
        if is_read_here:
            self._observe_rest(news)
        return deltas

    def _go_on(self, deltas: list[OutputDelta], is_behind: bool) -> bool:
        """Choose what runs now, run a chunk, and launch a verify.

        Args:
            deltas: gets the last deltas of requests that end here.
            is_behind: there is something to tell: a verify that is to be read at once is left to the next call, so that
                a request gets one delta at a time.

        Returns:
            Whether a verify was launched that is to be read at once.
        """
        deltas += self._read_extend()
        self._make_room()  # before new requests take memory that running ones need
        deltas += [self._fail(request, DISPLACED, "queue_full") for request in self.scheduler.take_surplus()]
        deltas += self._admit()
        if (yielding := self.scheduler.must_yield()) is not None:  # one a step: each costs a copy of a state
            self.preempt(yielding)
            deltas += self._admit()
        if not self.scheduler.num_running:
            if self.scheduler.waiting and self.handoffs is not None and self.handoffs.make_room():
                deltas += self._admit()
            self.cache_manager.wait_for_tiers()
        runs = self.scheduler.next_runs()
        deltas += self._extend(runs) if runs else []
        overlaps = self.runner.overlaps(self.scheduler.verifying)
        if overlaps or not is_behind:
            deltas += self._launch(is_idle=not runs)
        return not (overlaps or is_behind)

    def _launch(self, is_idle: bool) -> list[OutputDelta]:
        """Launch a verify of the requests that are ready; returns the last deltas of those whose grammars fail."""
        ready = self._ready(is_idle)
        failed = [request for request in ready if request.grammar_error is not None]
        deltas = [self._fail(request) for request in failed]
        batch = sorted([r for r in ready if r not in failed] if failed else ready, key=attrgetter("row"))
        self._in_flight = self.runner.launch(batch) if batch else None
        self._told_errors(batch)
        return deltas

    def _launch_behind(self, deltas: list[OutputDelta]) -> bool:
        """Launch a verify behind the one in flight, before that is read; False: that must be read first.

        ``deltas`` gets the last deltas of requests that end here.
        """
        if self._in_flight is None or self.handoffs is not None:
            return False
        try:
            is_behind = self._chain.launch_behind(self._in_flight, lambda: self._arrive(deltas))
        except Exception as error:  # noqa: BLE001 -- raised by the next call, behind what is known then
            self._error = error
            return True
        if is_behind:
            self._unread = None  # it is read with that verify
        return is_behind

    def _arrive(self, deltas: list[OutputDelta]) -> Arrivals | None:
        """Admit requests and run a chunk behind the verify in flight, all of which the device does in order.

        Args:
            deltas: gets the last deltas of requests that end here.

        Returns:
            None, where a request is to be preempted first.
        """
        before = frozenset(self.scheduler.verifying)
        deltas += [self._fail(request, DISPLACED, "queue_full") for request in self.scheduler.take_surplus()]
        deltas += self._admit()
        if self.scheduler.must_yield() is not None:
            return None
        if runs := self.scheduler.next_runs():
            is_finite, ready = self.runner.extend(runs), self.scheduler.finish_runs(runs)
            for run in runs:
                run.request.unread_runs.append(run)
            self._unread = ExtendInFlight(runs, is_finite, [self._copy_chunk(run.request) for run in runs])
            deltas += self._start(ready)
        return Arrivals([r for r in self.scheduler.verifying if r not in before], self._unread)

    def _read_extend(self) -> list[OutputDelta]:
        """Read what ``_arrive`` has run without a verify behind it; returns the last deltas of requests that fail."""
        extend, self._unread = self._unread, None
        if extend is None:
            return []
        return [self._fail(request) for request in self._note_runs(extend, extend.is_finite.tolist())]

    def _copy_chunk(self, request: Request) -> ChunkState | None:
        """A copy of the state at the end of the newest chunk of a request; None: there is no slot for it."""
        if not self.cache_manager.make_slot():
            return None
        return self.cache_manager.copy_chunk(request, self._features(request, request.num_run))

    def _note_runs(self, extend: ExtendInFlight, is_finite: Sequence[bool]) -> list[Request]:
        """Leave states in the prefix cache where known tokens were run; returns the requests that cannot go on."""
        failed = []
        for run, state, finite in zip(extend.runs, extend.states, is_finite, strict=True):
            request = run.request
            is_here = self._requests.get(request.request_id) is request  # it may have ended since
            if is_here:
                request.unread_runs.remove(run)
            if state is not None and is_here and finite:
                self.cache_manager.insert_chunk(request, state)
            elif state is not None:
                self.cache_manager.drop_chunk(state)
            if is_here and not finite:
                failed.append(request)
        self.scheduler.note_prefixes()
        return failed

    def _receive(self) -> list[News]:
        """Wait for the oldest step in flight, if there is one, and do what the next one needs; returns the news.

        Requests that it ends are freed here, or, where they take part in the step behind it, when that is read.
        """
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        gone, out = self._chain.gone, self._chain.gone.union(self._chain.ended)
        results = self.runner.finish(step, gone, self._chain.ended)
        self._finished = time.perf_counter()
        behind, ended = self._chain.take()
        self._free(ended)
        failed = [] if step.extend is None else self._note_runs(step.extend, step.read.wait()[-1])
        going_on = [(r, result) for r, result in zip(step.requests, results, strict=True) if r not in out]
        if behind is not None:
            self._chain.gone = frozenset(r for r, result in going_on if r.text.ends_on_device(result.tokens))
        news = [self._failure(r) if r in failed else self._advance(r, result) for r, result in going_on]
        if self.pools.counts.is_used:
            told = [each for each in news if isinstance(each, StepNews)]
            self.pools.counts.add([each.request.held_row for each in told], [each.tokens for each in told])
        leaving = {
            r: isinstance(each, StepNews) for (r, _), each in zip(going_on, news, strict=True) if has_ended(each)
        }
        for request in failed:
            if request not in leaving:  # it still extends, or joins the step behind
                leaving[request] = False
                news.append(self._failure(request))
        self._part_with(leaving, behind)
        return news

    def _part_with(self, leaving: Mapping[Request, bool], behind: StepInFlight | None) -> None:
        """End requests, and go on with the step behind, if there is one: those that it has rows of are held until then.

        ``leaving``: whether each leaves what it has computed in the prefix cache.
        """
        live = frozenset[Request]() if behind is None else frozenset(behind.requests) - self._chain.gone
        held = [request for request in leaving if request in live]
        if leaving:
            self._end({r: leaves for r, leaves in leaving.items() if r not in held})
        if behind is None:
            return
        for request in held:
            self._requests.pop(request.request_id)
            self._chain.hold(request, leaving[request])
        self.runner.expect(behind, self._chain.gone)
        if self._chain.is_wanted(behind):
            self._in_flight = behind
        else:
            self._drop(behind)

    def _drop(self, step: StepInFlight) -> None:
        """Leave a step in flight to the device, and free what the last of its requests hold: all have ended before it.

        It is not read. What uses their memory next is done behind it.
        """
        self._dropped, ended = step.read, self._chain.take_ended()
        self.runner.forgo(ended)
        self._free(ended)

    def _free(self, ended: Mapping[Request, bool]) -> None:
        """Free what requests hold that ended one step ago; a state that the step in between has folded away is lost."""
        for request in self.cache_manager.leaving([request for request, leaves in ended.items() if leaves]):
            row, position = request.held_row, request.num_run
            if position in self.pools.state_buffers.positions(row):
                self.cache_manager.leave_last(request, self.runner.drafter.kept_features(row, position))
        for request in ended:
            self.runner.dismiss(request)
            self.scheduler.release(request)

    def _tell(self, news: Sequence[News]) -> list[OutputDelta]:
        """Make deltas of what a step has brought."""
        deltas, undecoded = self._reporter.deltas(news)
        return deltas + [self._fail(request, reason) for request, reason in undecoded]

    def _observe_rest(self, news: Sequence[News]) -> None:
        """Let the sizer know how long the host has worked on a step since it was read."""
        sizer = self.runner.sizer
        if sizer is not None and sizer.times_rest and news:
            sizer.observe_rest(time.perf_counter() - self._finished)

    def settle(self) -> None:
        """Read the step in flight, if there is one; the next call of ``step`` tells about it.

        What makes room between two steps calls this before: states that a step is folding cannot move.
        """
        if self._in_flight is not None:
            with torch.inference_mode():
                self._untold += self._tell(self._receive())

    def _settle_for(self, request_id: str) -> None:
        """Read the step in flight, if a request is part of it."""
        if self._in_flight is not None and self._in_flight.has(request_id):
            self.settle()

    def _ready(self, is_idle: bool) -> list[Request]:
        """The requests that can be verified now, and those whose grammars have failed; as ``Constraints.ready``."""
        return self.constraints.ready(self.scheduler.verifying, is_idle)

    def _told_errors(self, batch: Sequence[Request]) -> None:
        """Let ranks agree which requests of a step cannot go on within their grammars; one rank has nothing to tell."""

    def _admit(self) -> list[OutputDelta]:
        """Admit waiting requests; returns the last deltas of those that end here."""
        deltas = []
        for request in self.scheduler.admit():
            self.runner.admit(request)
            if self.handoffs is not None:
                self.handoffs.was_admitted(request)
            if request.follower is not None:
                request.follower.start()
            if not request.num_to_extend:
                deltas += self._start([request])
        return deltas

    def _make_room(self) -> None:
        """Preempt the youngest requests until the others have KV for their next trees."""
        while (request := self.scheduler.make_room()) is not None:
            self.preempt(request)

    def preempt(self, request: Request) -> None:
        """Free all memory of a running request; its state goes to the prefix cache, and it waits again."""
        self._settle_for(request.request_id)
        if request.row is None:
            return  # it has ended
        self._leave([request])
        self.runner.dismiss(request)
        self.scheduler.preempt(request)

    def _extend(self, runs: list[PrefillRun]) -> list[OutputDelta]:
        """Run known tokens; returns the last deltas of requests that fail in it."""
        is_finite: list[bool] = self.runner.extend(runs).tolist()
        ready = self.scheduler.finish_runs(runs)
        for run, finite in zip(runs, is_finite, strict=True):
            if finite and self.cache_manager.make_slot():
                self.cache_manager.leave_chunk(run.request, self._features(run.request, run.request.num_run))
        failed = [self._fail(run.request) for run, finite in zip(runs, is_finite, strict=True) if not finite]
        return failed + self._start([request for request in ready if request.row is not None])

    def _start(self, requests: Iterable[Request]) -> list[OutputDelta]:
        """Start verifying requests whose known tokens have been run; returns the last deltas of those that end here."""
        deltas = []
        for request in requests:
            if request.is_only_run:
                if self.handoffs is not None and request.handoff is not None:
                    self._leave([request])  # the state that it has may be the only one
                    self.handoffs.leave(request)
                deltas.append(request.delta((), "", "length"))
                self.abort(request.request_id)
            else:
                self.runner.start_verifying(request)
        return deltas

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_work or bool(self._untold) or self._in_flight is not None

    @property
    def has_room(self) -> bool:
        """Whether the queue takes another request."""
        return self.scheduler.has_room

    def stats(self) -> EngineStats:
        """Numbers of queues and pools now, and of speculation since the start."""
        sizer, drafter = self.runner.sizer, self.runner.drafter
        stats = self.scheduler.stats(self.pools, self._reporter.spec)
        return replace(
            stats,
            sizing=None if sizer is None else sizer.stats(),
            draft_texts=drafter.text_stats,
            chain=self._chain.stats if self.runner.is_deferred else None,
            handoffs=None if self.handoffs is None else self.handoffs.stats(),
        )

    def stats_of(self, tenant: str | None) -> TenantStats:
        """Numbers of one tenant's requests now, and since the start."""
        return self.scheduler.stats_of(tenant, self._reporter.spec_of(tenant))

    def sample(self, views: Collection[View], max_nodes: int) -> EngineSample:
        """Figures and drafts for some views, and at most ``max_nodes`` cached prefixes of each; 0: none.

        Cheap: a few sums, and a walk over so many nodes.
        """
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
        """Settings of the prefix cache and the figures that a view may see, ready for JSON."""
        return cache_report(self.config, self.cache_manager, view)

    def cache_text(self, view: View) -> str:
        """The tree of the prefix cache as text, as far as a view may see it."""
        return cache_text(self.cache_manager, view)

    def watch_drafts(self, views: Sequence[View]) -> None:
        """Keep the first draft of every step that each view shows; it costs a read of the device per step and view."""
        self._views.clear()
        self.runner.watched = tuple(views)
        self.runner.on_draft = self._views.append if views else None

    def last_drafts(self) -> tuple[DraftView, ...]:
        """Return the kept drafts since the last call, at most the newest ``MAX_VIEWS``, and drop them."""
        views = tuple(self._views)
        self._views.clear()
        return views

    def flush_cache(self) -> int:
        """Drop every cached prefix that no running request uses, and shared texts to draft from.

        Returns:
            The number of cached tokens dropped.
        """
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

    def idle(self) -> float | None:
        """Do what is due where no request runs.

        Returns:
            Seconds after which this is to be called again, if no request comes; None: there is nothing to do.
        """
        return None

    def when_due(self, callback: Callable[[], None]) -> None:
        """Call a function, from another thread, when ``idle`` is to be called earlier than it has said."""

    def wake(self) -> None:
        """End early, from any thread, a wait of ``step`` for other processes: a function waits for the step's end."""

    def when_lost(self, callback: Callable[[Exception], None]) -> None:
        """Call a function when a process is lost without which nothing can be computed; this engine needs none."""

    def close(self) -> None:
        """Drop all requests, and restore the number of threads that was set before this engine."""
        step, self._in_flight, self._untold = self._in_flight, None, []
        behind, ended = self._chain.take()
        for extend in (self._unread, *(launched.extend for launched in (step, behind) if launched is not None)):
            for state in () if extend is None else filter(None, extend.states):
                self.cache_manager.drop_chunk(state)
        self._unread = None
        with suppress(Exception):  # of a device that has failed: all else is closed nevertheless
            reads = [launched.read for launched in (step, behind) if launched is not None]
            for read in filter(None, (self._dropped, *reads)):
                read.wait()  # the memory of its requests is freed
        for request in ended:
            self.runner.dismiss(request)
            self.scheduler.release(request)
        for request_id in list(self._requests):
            self.abort(request_id)
        self.constraints.close()
        if self.handoffs is not None:
            self.handoffs.close()
        self.cache_manager.close()
        if self.runner.graph_runner is not None:
            self.runner.graph_runner.replay.close()
        torch.set_num_threads(process_threads())

    def _advance(self, request: Request, result: StepResult) -> News:
        """Append the new tokens of a step to a request; the news say whether they end it."""
        if not result.is_finite or request.grammar_error is not None:
            return self._failure(request)
        is_first = not request.output
        try:
            count, text, reason = request.text.decide(result.tokens)
        except RequestError as error:  # the tokenizer fails
            return self._failure(request, str(error))
        if request.follower is not None and reason is None:
            request.follower.advance(result.tokens)
        request.output.extend(result.tokens[:count])
        previous, request.num_run = request.num_run, request.root_position
        for position in self.cache_manager.tracked_positions(request, previous):
            if self.cache_manager.make_slot():
                self.cache_manager.leave_at(request, position, self._features(request, position))
        return StepNews(request, result, count, text, reason, is_first)

    def _end(self, requests: Mapping[Request, bool]) -> None:
        """End requests: states and KV of those that leave them go to the prefix cache, all other memory is freed."""
        self._leave([request for request, leaves in requests.items() if leaves])
        for request in requests:
            self.abort(request.request_id)

    def _leave(self, requests: Sequence[Request]) -> None:
        """Leave the last states of requests that end or are preempted in the prefix cache."""
        leaving = self.cache_manager.leaving(requests)
        self.runner.complete([request for request in leaving if request.is_verifying])
        for request in leaving:
            self.cache_manager.leave_last(request, self._features(request, request.num_run))

    def _features(self, request: Request, position: int) -> torch.Tensor | None:
        """Features from which the drafter can resume after a position of a request; None: it needs none."""
        return self.runner.drafter.features(request.held_row, position)

    def _fail(self, request: Request, message: str = NOT_FINITE, code: str | None = None) -> OutputDelta:
        """End a request that cannot continue; the others continue. An error of its grammar precedes ``message``."""
        delta = self._failure(request, message, code)
        self.abort(request.request_id)
        return delta

    def _failure(self, request: Request, message: str = NOT_FINITE, code: str | None = None) -> OutputDelta:
        """The last delta of a request that cannot continue."""
        if request.grammar_error is not None:
            message, code = str(request.grammar_error), request.grammar_error.code
        if code == "grammar_too_complex":
            self.constraints.distrust(request.params.grammar, self._requests.values())
        return request.delta((), "", "error", message, error_code=code)
