"""What tools that measure and tune need of an engine and requests do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import ValidationError
from torch import Tensor

from specmamba.command_line import describe_validation_error
from specmamba.config import EngineConfig
from specmamba.core import SamplingParams
from specmamba.draft.mtp import MTPDrafter
from specmamba.draft.plan import plan_drafts
from specmamba.draft.recorder import RankRecorder
from specmamba.engine.clock import StepClock
from specmamba.engine.engine import Engine
from specmamba.errors import ConfigError, RequestError

# what decides how drafts are made; the state backend is not among them: its buffers stay
DRAFT_FIELDS = {name for name in EngineConfig.model_fields if name.startswith("speculative_")} - {"speculative_state"}


class Workbench:
    """Changes how an engine drafts and looks at what it computes, between requests.

    Every method but ``clock`` raises RequestError while requests are running.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def clock(self) -> StepClock:
        """The times of steps by phase; turn it on first."""
        return self._engine.runner.clock

    def use_drafts(self, **flags: object) -> None:
        """Draft in another way from here on; weights and pools stay.

        Args:
            flags: ``speculative_*`` fields of the configuration, without the state backend; what is not given is at its
                default.

        Raises:
            ConfigError: the flags contradict each other, the checkpoint, or what this engine has memory for.
        """
        engine = self._idle_engine()
        if others := flags.keys() - DRAFT_FIELDS:
            raise ConfigError(f"{', '.join(sorted(others))}: only the way of drafting can be changed here")
        wants_head = flags.get("speculative_algorithm", "auto") in ("auto", "mtp")
        if wants_head and not engine.loads_head:
            raise ConfigError("this engine was started without the MTP head: start it with auto or mtp")
        defaults = {name: EngineConfig.model_fields[name].default for name in DRAFT_FIELDS}
        try:
            config = EngineConfig(**{**engine.config.model_dump(), **defaults, **flags})
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error)) from None
        plan = plan_drafts(config, engine.model.draft_head is not None, engine.vocab_size)
        room = engine.memory_plan
        if plan.max_nodes > room.max_nodes or plan.num_slots > room.num_slots:
            raise ConfigError(
                f"a draft of {plan.max_nodes} nodes ({plan.num_slots} slots) does not fit an engine that was started "
                f"for {room.max_nodes} ({room.num_slots}): start it with its largest draft"
            )
        engine.runner.drafter = engine.make_drafter(plan, config)
        engine.config, engine.draft_plan, engine.runner.rule = config, plan, config.speculative_accept
        engine.flush_cache()  # what was left there has nothing for this drafter to go on from

    def use_synthetic_acceptance(self, probability: float | None) -> None:
        """Accept drafts by the toss of a coin, for studies of cost. The text means nothing then. None: honest again."""
        self._idle_engine().runner.synthetic_acceptance = probability

    def record_ranks(self) -> RankRecorder:
        """Draft nothing from here on, and note for every replayed token how the MTP head ranked it.

        Raises:
            ConfigError: nothing is drafted by an MTP head here.
        """
        engine = self._idle_engine()
        drafter = engine.runner.drafter
        if isinstance(drafter, RankRecorder):
            drafter = drafter.mtp
        if not isinstance(drafter, MTPDrafter) or not engine.draft_plan.num_steps:
            raise ConfigError("ranks are recorded from an MTP head: choose --speculative-algorithm mtp")
        recorder = RankRecorder(drafter, engine.draft_plan.num_steps)
        engine.runner.drafter = recorder
        return recorder

    def logits_along(self, prompt: Sequence[int], tokens: Sequence[int], see: Callable[[Tensor], None]) -> None:
        """Lead plain decoding along given tokens behind a prompt; ``see`` gets the logits [V] float32, on the CPU, that
        each of them would be chosen from.

        Raises:
            RequestError: no plain decoding is set, the tokens are none that fit, or the model's numbers are not finite.
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
        engine.runner.on_logits = lambda logits: see(logits[0, 0].float().cpu())
        try:
            engine.add_request("logits", prompt, params, replay=tokens)
            while engine.has_unfinished_requests:
                for delta in engine.step():
                    if delta.error is not None:
                        raise RequestError(delta.error)
        finally:
            engine.runner.on_logits = None
            engine.abort("logits")

    def _idle_engine(self) -> Engine:
        if self._engine.has_unfinished_requests:
            raise RequestError("requests are running: let them finish first")
        return self._engine
