"""Access to an engine for tools that measure and tune: change drafts, time steps, read logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from pydantic import ValidationError
from torch import Tensor

from specmamba.cache.memory import free_memory
from specmamba.checkpoints.checkpoint import digest_of_checkpoint, resolve_checkpoint
from specmamba.config import WEIGHTLESS, EngineConfig
from specmamba.draft.draft_plan import DraftPlan, plan_drafts
from specmamba.draft.drafter import Drafter, NoDrafter
from specmamba.draft.heads import MTPDrafter
from specmamba.draft.recorder import RankRecorder
from specmamba.draft.sizing.sizer import DraftSizer
from specmamba.engine.captured.stubbed_steps import StubbedReplay, stubbed
from specmamba.engine.engine import Engine
from specmamba.engine.target_reader import OnStates, read_target
from specmamba.errors import ConfigError, RequestError
from specmamba.flags.command_line import describe_validation_error
from specmamba.models.hybrid import HybridTarget
from specmamba.sampling_params import SamplingParams
from specmamba.verify.probe import StepProbe

# what decides how drafts are made; the state backend is not among them: its buffers stay
DRAFT_FIELDS = {name for name in EngineConfig.model_fields if name.startswith("speculative_")} - {"speculative_state"}
# what was loaded to draft with, which stays too
LOADED_FIELDS = {name for name in DRAFT_FIELDS if name.startswith("speculative_draft_model_")}


class Workbench:
    """Changes how an engine drafts, and exposes what it computes, while no request runs.

    Every method but ``clock`` raises RequestError while requests are running.
    """

    def __init__(self, engine: Engine) -> None:
        """Use an engine. Raises ConfigError where other ranks, which this does not reach, share its model."""
        if engine.ranks.size > 1:
            raise ConfigError(f"--tp-size {engine.ranks.size}: tools change and measure engines of one process")
        self._engine = engine
        self._kept: dict[tuple[str, str], Drafter] = {}  # by flags and plan: drafters whose steps have been captured
        self._sizers: dict[tuple[str, str], DraftSizer | None] = {}  # by the same: what they have learned
        # plain decoding replays the forwards of drafters that sit out, so that both are timed by one record; by the
        # layers that are read for drafts
        self._idle_drafters: dict[tuple[int, ...], NoDrafter] = {}
        if type(engine.runner.drafter) is NoDrafter:
            self._idle_drafters[engine.feature_layers] = engine.runner.drafter
        self._let_sit_out(engine.runner.drafter)

    @property
    def replays_steps(self) -> bool:
        """Whether steps run captured while the clock is off; the phases of a captured step cannot be timed."""
        return self._engine.runner.graph_runner is not None

    @property
    def replayed_seconds(self) -> float:
        """Seconds in replays of native calls since the start; 0 where steps are not replayed by native code."""
        graph_runner = self._engine.runner.graph_runner
        return 0.0 if graph_runner is None else graph_runner.replay.seconds

    @property
    def clock(self) -> StepProbe:
        """Times of steps by phase; set ``is_on`` first."""
        return self._engine.runner.probe

    @contextmanager
    def stubbed_steps(self, is_chained: bool) -> Iterator[StubbedReplay]:
        """Let captured steps do nothing in this context, but for the first one of a kind.

        The host works as beside a GPU. Texts mean nothing then; the prefix cache is flushed behind them.

        Args:
            is_chained: a step may be launched before the one before it was read.

        Raises:
            ConfigError: no step is captured on a CPU.
        """
        engine = self._idle_engine()
        graphs = engine.runner.graph_runner
        if graphs is None or engine.device.type != "cpu":
            raise ConfigError("no step is captured on a CPU: drop --disable-cuda-graph, and give --device cpu")
        try:
            with stubbed(graphs, is_chained) as replay:
                yield replay
        finally:
            engine.flush_cache()

    def use_drafts(self, **flags: object) -> None:
        """Change the way of drafting for all later requests; weights and pools stay.

        Args:
            flags: ``speculative_*`` fields of the configuration, without the state backend; fields that are not given
                get their defaults, except those of the loaded draft, and the size of drafts is fixed unless
                ``speculative_adaptive="auto"`` is given.

        Raises:
            ConfigError: the flags contradict each other, the checkpoint, or what this engine has memory for.
        """
        engine = self._idle_engine()
        if others := flags.keys() - DRAFT_FIELDS:
            raise ConfigError(f"{', '.join(sorted(others))}: only the way of drafting can be changed here")
        wants_draft = flags.get("speculative_algorithm", "auto") not in WEIGHTLESS
        if wants_draft and not engine.models.looked_for_draft:
            raise ConfigError("this engine was started without a draft: start it with auto, or the algorithm itself")
        loaded = {name: getattr(engine.config, name) for name in LOADED_FIELDS}
        if any(flags[name] != loaded[name] for name in flags.keys() & LOADED_FIELDS):
            raise ConfigError("the draft that this engine was started with stays: start another one for another draft")
        defaults = {name: EngineConfig.model_fields[name].default for name in DRAFT_FIELDS}
        defaults |= {"speculative_adaptive": "off", "speculative_costs": engine.config.speculative_costs}
        ours = defaults | (loaded if wants_draft else {}) | {k: v for k, v in flags.items() if k not in loaded}
        try:
            config = EngineConfig(**{**engine.config.model_dump(), **ours}).model_copy(update=loaded)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error)) from None
        plan = plan_drafts(config, engine.models.draft_kind, engine.vocab_size, engine.models.block_size)
        room = engine.memory_plan
        if plan.max_nodes > room.max_nodes or plan.num_lookahead_slots > room.num_lookahead_slots:
            raise ConfigError(
                f"a draft of {plan.max_nodes} nodes ({plan.num_lookahead_slots} slots) does not fit an engine that was "
                f"started for {room.max_nodes} ({room.num_lookahead_slots}): start it with its largest draft"
            )
        drafter = None if plan.algorithm == "none" else self._make_drafter(plan, config)
        engine.config, engine.draft_plan = config, plan
        idle = self._let_sit_out(drafter)
        engine.runner.drafter = idle if drafter is None else drafter
        engine.model.target.read_features(engine.feature_layers)
        graphs = engine.runner.graph_runner
        if graphs is not None:
            graphs.replay.serve(False)  # no request waits: steps are captured now, and not while they are timed
        with torch.inference_mode():
            engine.runner.capture(plan.is_sized)
        key = _key(plan, config)
        if key in self._sizers:
            engine.runner.sizer = self._sizers[key]
        else:
            engine.start_sizing()
            self._sizers[key] = engine.runner.sizer
        if graphs is not None:
            graphs.replay.serve()
        engine.flush_cache()  # cached states have no features for this drafter

    def _let_sit_out(self, drafter: Drafter | None) -> NoDrafter:
        """Let steps that a drafter sits out begin as those of plain decoding, whose drafter is returned."""
        idle = self._idle_drafters.setdefault(self._engine.feature_layers, NoDrafter())
        if drafter is not None and drafter.stand_in is not None:
            drafter.stand_in.like = idle
        return idle

    def use_synthetic_acceptance(self, probability: float | None) -> None:
        """Accept drafts with a given probability, for studies of cost; the text is worthless. None: judge drafts."""
        runner = self._idle_engine().runner
        policy = runner.verifier.policy._replace(synthetic_acceptance=probability)
        runner.verifier = replace(runner.verifier, policy=policy)

    def record_ranks(self) -> RankRecorder:
        """Draft nothing from now on, and record for every forced token how the draft head ranked it.

        Raises:
            ConfigError: the engine has no draft head.
        """
        engine = self._idle_engine()
        drafter = engine.runner.drafter
        if isinstance(drafter, RankRecorder):
            drafter = drafter.mtp
        if not isinstance(drafter, MTPDrafter) or not engine.draft_plan.num_steps:
            raise ConfigError("ranks are recorded of a head that drafts token by token: choose mtp, eagle or eagle3")
        recorder = RankRecorder(drafter, engine.draft_plan.num_steps)
        engine.runner.drafter, engine.runner.sizer = recorder, None
        return recorder

    def logits_along(self, prompt: Sequence[int], tokens: Sequence[int], see: Callable[[Tensor], None]) -> None:
        """Decode plainly along given tokens after a prompt.

        ``see`` gets the logits [V] float32, on the CPU, from which each of these tokens would be chosen.

        Raises:
            RequestError: drafting is on, the tokens are unknown or too many, or the logits are not finite.
        """
        engine = self._idle_engine()
        if engine.draft_plan.max_nodes > 1:
            raise RequestError("logits are looked at in plain decoding: use_drafts(speculative_algorithm='none') first")
        engine.check_tokens(tokens, "tokens")
        if not tokens:
            return
        if len(prompt) + len(tokens) > engine.context_length:
            raise RequestError(
                f"{len(prompt)} + {len(tokens)} tokens are more than the {engine.context_length} that fit"
            )
        params = SamplingParams(max_tokens=len(tokens), temperature=0.0, ignore_eos=True)
        engine.runner.probe.on_logits = lambda logits: see(logits[0, 0].float().cpu())
        try:
            engine.add_request("logits", prompt, params, forced_output_ids=tokens)
            while engine.has_unfinished_requests:
                for delta in engine.step():
                    if delta.error is not None:
                        raise RequestError(delta.error)
        finally:
            engine.runner.probe.on_logits = None
            engine.abort("logits")

    def read_target(self, texts: Sequence[Sequence[int]], layers: tuple[int, ...], see: OnStates) -> None:
        """Run the target over given tokens and pass what it computes to ``see`` (``target_reader.read_target``).

        Raises:
            ConfigError: the engine has a prefix cache.
        """
        engine = self._idle_engine()
        if engine.cache_manager.is_on:
            raise ConfigError("what is cached is not run: start the engine with --disable-radix-cache")
        read_target(engine, texts, layers, see)

    def target_matrices(self) -> tuple[Tensor, Tensor]:
        """Return copies of the target's embedding and output head, both [V, H] float32 on the CPU.

        The embedding is the checkpoint's; the head includes every factor that logits are multiplied by.
        """
        target = self._engine.model.target
        assert isinstance(target, HybridTarget)
        with torch.inference_mode():
            ones = torch.eye(target.hidden_size, device=self._engine.device, dtype=self._engine.model.cache_shape.dtype)
            output = target.logits(ones).t()
            vectors = target.embedding(torch.arange(target.vocab_size, device=self._engine.device))
        # copies made outside of inference mode, so that training can use them
        own = [torch.empty(target.vocab_size, target.hidden_size) for _ in range(2)]
        return own[0].copy_(vectors), own[1].copy_(output)

    @property
    def target_digest(self) -> str:
        """A digest that differs for other targets, and for the same one in another precision."""
        config, model = self._engine.config, self._engine.model
        digest = digest_of_checkpoint(resolve_checkpoint(config.model_path, config.revision))
        kv = "" if config.kv_cache_dtype == "auto" else f" {config.kv_cache_dtype}"
        form = f"{config.quantization} {config.quantization_group_size}"
        return f"{digest} {model.cache_shape.dtype} {form}{kv}"

    @property
    def free_memory(self) -> int:
        """Free bytes of host memory."""
        return free_memory(torch.device("cpu"))

    @contextmanager
    def budget(self, num_bytes: int) -> Iterator[None]:
        """Let engines that start in here take so many bytes for weights and pools, whatever memory is free."""
        kind = type(self._engine)
        before, kind.given_budget = kind.given_budget, num_bytes
        try:
            yield
        finally:
            kind.given_budget = before

    def _make_drafter(self, plan: DraftPlan, config: EngineConfig) -> Drafter:
        """Make a drafter that replaces the engine's; after an error the engine keeps its drafter.

        Where steps are captured, a drafter of the same flags and the same tree files is reused, since captured steps
        belong to one drafter.
        """
        key = _key(plan, config)
        drafter = self._kept.get(key) or self._new_drafter(plan, config)
        if self.replays_steps and drafter.is_capturable:
            self._kept[key] = drafter
        return drafter

    def _new_drafter(self, plan: DraftPlan, config: EngineConfig) -> Drafter:
        engine = self._engine
        if plan.algorithm in WEIGHTLESS:  # no states; making them can fail, so the old one stays until then
            return engine.make_drafter(plan, config)
        engine.runner.drafter = NoDrafter()  # memory may not hold the states of two: free the old one first
        try:
            return engine.make_drafter(plan, config)
        except BaseException:
            engine.runner.drafter = engine.make_drafter(engine.draft_plan, engine.config)
            raise

    def _idle_engine(self) -> Engine:
        if self._engine.has_unfinished_requests:
            raise RequestError("requests are running: let them finish first")
        return self._engine


def _key(plan: DraftPlan, config: EngineConfig) -> tuple[str, str]:
    return config.model_dump_json(include=DRAFT_FIELDS), repr(plan)
