"""The engine: loads a model, takes requests, and moves all of them forward one step at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specmamba.cache.memory import free_memory, plan_memory
from specmamba.cache.prefix.inspection import CacheStats
from specmamba.config import EngineConfig
from specmamba.core import DraftView, FinishReason, OutputDelta, SpecStats
from specmamba.draft import build_drafter
from specmamba.draft.draft_plan import DraftPlan, plan_drafts
from specmamba.draft.drafter import Drafter
from specmamba.engine.cache_manager import build_cache_manager
from specmamba.engine.graph_runner import build_graph_runner
from specmamba.engine.loading import keep_freed_memory, load_models, require_target, resolve_device
from specmamba.engine.model_report import describe_engine
from specmamba.engine.request import PrefillRun, Request
from specmamba.engine.runner import Runner
from specmamba.engine.scheduler import Scheduler, SchedulerLimits
from specmamba.engine.text import TextStream
from specmamba.errors import GrammarError, PromptTooLongError, RequestError
from specmamba.grammar import CompiledGrammar, GrammarMatcher
from specmamba.models.checkpoint import resolve_checkpoint
from specmamba.models.tokenizer import Detokenizer, Tokenizer
from specmamba.sampling_params import SamplingParams
from specmamba.verify.acceptance import AcceptPolicy
from specmamba.verify.pools import Pools
from specmamba.verify.result import StepResult

logger = logging.getLogger("specmamba")

SMALL_MODEL_BYTES = 64 << 20
MAX_VIEWS = 64  # drafts that are kept for the live page
NOT_FINITE = "the model's numbers are not finite for this request: try --dtype bfloat16 or float32"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of queues, pools and speculation. ``spec`` sums over all steps since the start."""

    num_running: int
    num_waiting: int
    kv_used_tokens: int  # that requests need
    kv_cached_tokens: int  # that the prefix cache alone holds
    kv_total_tokens: int
    state_used_slots: int  # that requests need
    state_cached_slots: int  # that the prefix cache alone holds
    state_total_slots: int
    num_preemptions: int
    spec: SpecStats
    prefix_cache: CacheStats


class Engine:
    """One model and its requests. Not thread-safe: all calls come from one thread.

    Raises:
        SpecmambaError: the configuration, the checkpoint or the memory does not allow to start.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        self.folder = folder = resolve_checkpoint(config.model_path, config.revision)
        budget = int(free_memory(self.device) * config.mem_fraction_static)
        require_target(folder)
        self.tokenizer = Tokenizer(folder)
        with torch.inference_mode():
            self.models = load_models(folder, config, self.device)
            self.model = self.models.target
            self.vocab_size = self.model.target.vocab_size
            self.eos_token_ids = self.model.eos_token_ids
            self.draft_plan = plan_drafts(config, self.models.draft_kind, self.vocab_size)
            weight_bytes = self.models.weight_bytes
            self.memory_plan = plan_memory(
                config,
                self.model.cache_shape,
                self.model.context_length,
                self.vocab_size,
                self.draft_plan.max_nodes,
                self.draft_plan.num_lookahead_slots,
                budget,
                weight_bytes,
            )
        # outside of inference mode: what is freed by an abort is written from outside of a step
        self.pools = Pools(self.model.cache_shape, self.vocab_size, self.memory_plan, self.device)
        drafter = self.make_drafter(self.draft_plan, config)
        self.runner = Runner(
            self.model.target, self.pools, drafter, self.device, AcceptPolicy(config.speculative_accept)
        )
        self.cache_manager = build_cache_manager(config, self.model, self.pools)
        self.scheduler = Scheduler(self.cache_manager, self._limits())
        self.context_length = self.memory_plan.context_length
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._views: deque[DraftView] = deque(maxlen=MAX_VIEWS)
        self._spec = SpecStats()
        self._threads_before = torch.get_num_threads()
        _set_threads(config, self.device, weight_bytes)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.runner.graph_runner = build_graph_runner(config, self.pools, self.memory_plan, self.device)
        with torch.inference_mode():
            graph_lines = self.runner.capture()
        for line in (*self.memory_plan.describe_lines(), *graph_lines):
            logger.info(line)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        forced_output_ids: Sequence[int] = (),
        extra_key: str | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: of the caller's choice.
            prompt_token_ids: the prompt.
            params: how tokens are chosen, and when the request ends.
            forced_output_ids: output tokens that are given instead of chosen, as far as they go.
            extra_key: cached prefixes are shared among requests of the same key only.
            grammar: ``params.grammar``, compiled.

        Raises:
            RequestError: the prompt is empty or has an unknown token, or the id is in use.
            PromptTooLongError: no output token fits behind the prompt.
            QueueFullError: too many requests are waiting.
        """
        self.check_prompt(prompt_token_ids, params.max_tokens)
        self.check_tokens(forced_output_ids, "replay")
        self.check_tokens(params.logit_bias, "logit_bias")
        if request_id in self._requests:
            raise RequestError(f"a request with the id {request_id!r} is running already", "request_id")
        prompt = tuple(prompt_token_ids)
        max_output = min(params.max_tokens, self.context_length - len(prompt))
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.model.eos_token_ids)}
        text = TextStream(Detokenizer(self.tokenizer), params.stop, stop_ids, max_output)
        number = self._num_added
        seed = params.seed if params.seed is not None else _seed_of_request(self.config.seed, number)
        matcher = self._matcher(params, grammar)
        forced = tuple(forced_output_ids)
        request = Request(request_id, number, prompt, params, seed, text, forced, extra_key, matcher=matcher)
        self.scheduler.add(request)
        self._requests[request_id] = request
        self._num_added += 1

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
        """Drop a request and free all it holds; unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.release(request)

    @torch.inference_mode()
    def step(self) -> list[OutputDelta]:
        """Run at most one chunk of known tokens, then one verify of every request that is ready for it."""
        self._make_room()  # before new requests take what running ones need
        deltas: list[OutputDelta] = []
        for request in self.scheduler.admit():
            self.runner.admit(request)
            if not request.num_to_extend:
                deltas += self._start([request])
        runs = self.scheduler.next_runs()
        deltas += self._extend(runs) if runs else []
        batch = sorted(self.scheduler.verifying, key=lambda request: request.held_row)
        results = self.runner.step(batch) if batch else []
        advanced = [self._advance(request, result) for request, result in zip(batch, results, strict=True)]
        self._end([request for request, delta in zip(batch, advanced, strict=True) if delta.finish_reason is not None])
        deltas += advanced
        return deltas

    def _make_room(self) -> None:
        """Preempt the youngest requests until the others have KV for their next trees."""
        while (request := self.scheduler.make_room()) is not None:
            self.preempt(request)

    def preempt(self, request: Request) -> None:
        """Take all memory back from a running request; its state goes to the prefix cache, and it waits again."""
        self._leave([request])
        self.scheduler.preempt(request)

    def _extend(self, runs: list[PrefillRun]) -> list[OutputDelta]:
        """Run known tokens; returns the last deltas of requests that fail in it."""
        is_finite = self.runner.extend(runs)
        ready = self.scheduler.finish_runs(runs)
        for run, finite in zip(runs, is_finite, strict=True):
            if finite and self.cache_manager.is_on:
                self.cache_manager.leave_chunk(run.request, self._features(run.request, run.request.num_run))
        failed = [self._fail(run.request) for run, finite in zip(runs, is_finite, strict=True) if not finite]
        return failed + self._start([request for request in ready if request.row is not None])

    def _start(self, requests: Iterable[Request]) -> list[OutputDelta]:
        """Start verifying requests whose known tokens have been run; returns the last deltas of those that end here."""
        deltas = []
        for request in requests:
            if request.is_only_run:
                deltas.append(_delta(request, (), "", "length"))
                self.abort(request.request_id)
            else:
                self.runner.start_verifying(request)
        return deltas

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_work

    def stats(self) -> EngineStats:
        """Queues, pools and speculation, now."""
        pools, scheduler = self.pools, self.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            kv_used_tokens=pools.kv.num_used_tokens,
            kv_cached_tokens=pools.kv.num_cached_tokens,
            kv_total_tokens=pools.kv.num_tokens,
            state_used_slots=pools.states.num_slots - self.cache_manager.num_available_states,
            state_cached_slots=self.cache_manager.cache.num_evictable_states,
            state_total_slots=pools.states.num_slots,
            num_preemptions=scheduler.num_preemptions,
            spec=self._spec,
            prefix_cache=self.cache_manager.cache.stats,
        )

    def watch_drafts(self, on: bool) -> None:
        """Keep the first draft of every step from now on, or stop it: one read of the device more in each."""
        self._views.clear()
        self.runner.on_draft = self._views.append if on else None

    def last_drafts(self) -> tuple[DraftView, ...]:
        """The drafts of the steps since this was last asked, the newest of them."""
        views = tuple(self._views)
        self._views.clear()
        return views

    def flush_cache(self) -> int:
        """Forget every cached prefix that no running request stands on; the number of tokens that were forgotten."""
        return self.cache_manager.cache.reset()

    def make_drafter(self, plan: DraftPlan, config: EngineConfig) -> Drafter:
        """A drafter on this engine's pools. Raises ConfigError when an n-gram corpus cannot be read."""
        return build_drafter(plan, config, self.models, self.pools.kv, self.pools.table, self.tokenizer.encode)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers that what drafts now reads; none where it reads the last hidden state, or nothing."""
        drafts_with_head = self.draft_plan.algorithm == self.model.draft_algorithm
        return getattr(self.model.draft_head, "target_layers", ()) if drafts_with_head else ()

    def _matcher(self, params: SamplingParams, grammar: CompiledGrammar | None) -> GrammarMatcher | None:
        if params.grammar is None:
            return None
        if params.ignore_eos:
            raise RequestError(
                "a grammar ends with the end-of-text token: drop ignore_eos, or the grammar", "ignore_eos"
            )
        if grammar is None or grammar.spec != params.grammar:
            raise RequestError("the grammar of this request has not been compiled", "grammar")
        return GrammarMatcher(grammar, self.vocab_size)

    def _limits(self) -> SchedulerLimits:
        config = self.config
        return SchedulerLimits(
            num_lookahead_slots=self.draft_plan.num_lookahead_slots,
            chunk_size=config.chunked_prefill_size,
            max_waiting=config.max_queued_requests,
            policy=config.schedule_policy,
            max_overtakes=config.schedule_max_overtakes,
        )

    def describe(self) -> dict[str, object]:
        """What runs here, for people and for ``/server_info``."""
        replays = self.runner.graph_runner
        return describe_engine(
            self.config,
            self.folder,
            self.models,
            self.draft_plan,
            self.memory_plan,
            self.device,
            () if replays is None else replays.buckets,
        )

    def close(self) -> None:
        """Drop all requests; the number of threads is again what it was before this engine."""
        for request_id in list(self._requests):
            self.abort(request_id)
        torch.set_num_threads(self._threads_before)

    def _advance(self, request: Request, result: StepResult) -> OutputDelta:
        """Give a request its new tokens; the delta says whether they end it."""
        if not result.is_finite or result.error is not None:
            code = request.matcher.error_code if request.matcher is not None and result.error else None
            return self._fail(request, result.error or NOT_FINITE, code)
        is_first = not request.output
        count, text, reason = request.text.push(result.tokens)
        if request.matcher is not None and reason is None:
            try:
                request.matcher.advance(result.tokens)
            except GrammarError as error:  # tokens that were given instead of chosen, or it takes too long
                return self._fail(request, str(error), error.code)
        request.spec = request.spec.after_step(result.num_drafted, count - 1)
        self._spec = self._spec.after_step(result.num_drafted, count - 1)
        tokens = result.tokens[:count]
        request.output.extend(tokens)
        previous, request.num_run = request.num_run, request.root_position
        self.pools.counts.add(request.held_row, tokens)
        for position in self.cache_manager.tracked_positions(request, previous):
            self.cache_manager.leave_at(request, position, self._features(request, position))
        depths = (*range(1, len(result.tokens)), 0)
        figures: dict[str, Any] = {"depths": depths[:count], "logprobs": result.logprobs[:count]}
        return _delta(request, tokens, text, reason, is_first=is_first, **figures)

    def _end(self, requests: list[Request]) -> None:
        """End requests: their states and KV go to the prefix cache, everything else is given back."""
        self._leave([request for request in requests if request.row is not None])  # failed ones hold no row any more
        for request in requests:
            self.abort(request.request_id)

    def _leave(self, requests: Sequence[Request]) -> None:
        """Leave the last states of requests that end or are preempted in the prefix cache."""
        leaving = self.cache_manager.leaving(requests)
        self.runner.finish([request for request in leaving if request.is_verifying])
        for request in leaving:
            self.cache_manager.leave_last(request, self._features(request, request.num_run))

    def _features(self, request: Request, position: int) -> torch.Tensor | None:
        """What the drafter needs to go on behind a position of a request."""
        return self.runner.drafter.features(request.held_row, position)

    def _fail(self, request: Request, error: str = NOT_FINITE, code: str | None = None) -> OutputDelta:
        """End a request that cannot go on; the others continue."""
        self.abort(request.request_id)
        return _delta(request, (), "", "error", error, error_code=code)


def _delta(
    request: Request,
    tokens: tuple[int, ...],
    text: str,
    reason: FinishReason | None,
    error: str | None = None,
    is_first: bool = True,
    **more: Any,
) -> OutputDelta:
    wants_prompt = is_first and request.params.prompt_logprobs is not None and error is None
    return OutputDelta(
        request_id=request.request_id,
        token_ids=tokens,
        text=text,
        num_prompt_tokens=len(request.prompt),
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=len(request.output),
        finish_reason=reason,
        error=error,
        spec=request.spec,
        prompt_logprobs=tuple(request.prompt_logprobs) if wants_prompt else None,
        **more,
    )


def _set_threads(config: EngineConfig, device: torch.device, weight_bytes: int) -> None:
    """Choose how many threads an operator runs on.

    A model that the caches hold is bound by the number of its operators, not by their size. A second thread then gains
    little, and as operators wait for their slowest thread, it loses a lot when a server or a client wants its core.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif device.type == "cpu" and weight_bytes <= SMALL_MODEL_BYTES:
        torch.set_num_threads(1)


def _seed_of_request(engine_seed: int, number: int) -> int:
    """A seed for the number-th request, far from its neighbours'."""
    return (engine_seed * 0x5851F42D4C957F2D + number * 0x9E3779B97F4A7C15) % (1 << 63)
