"""What servers and threads ask of an engine, whether it computes here or in other processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence

from specmamba.cache.prefix.inspection import View
from specmamba.config import EngineConfig
from specmamba.core import ANYONE, Handoff, OutputDelta, Owner
from specmamba.engine.engine_sample import EngineSample
from specmamba.engine.replica_control import ReplicaControl
from specmamba.engine.scheduler import EngineStats, TenantStats
from specmamba.errors import PromptTooLongError, RequestError
from specmamba.grammar import CompiledGrammar
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.sampling_params import SamplingParams


class BaseEngine(ABC):
    """One model and its requests. Not thread-safe: all calls come from one thread, unless a method says otherwise."""

    config: EngineConfig
    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    replicas: ReplicaControl | None = None  # of an engine whose requests run in other processes

    @property
    @abstractmethod
    def draft_algorithm(self) -> str:
        """What drafts: the name of ``--speculative-algorithm``, or "none"."""

    @abstractmethod
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

    @abstractmethod
    def hand_over(self, request_id: str, handoff: Handoff) -> None:
        """Name the room of a request that was just added."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Remove a request and free its memory; unknown and finished ids are ignored."""

    @abstractmethod
    def step(self) -> list[OutputDelta]:
        """Go on with the requests; returns a delta for every one that got tokens or ended."""

    @property
    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has more to return."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether the queue takes another request."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Numbers of queues and pools now, and of speculation since the start."""

    @abstractmethod
    def stats_of(self, tenant: str | None) -> TenantStats:
        """Numbers of one tenant's requests now, and since the start."""

    @abstractmethod
    def sample(self, views: Collection[View], max_nodes: int) -> EngineSample:
        """Figures and drafts for some views, and at most ``max_nodes`` cached prefixes of each; 0: none.

        Cheap: a few sums, and a walk over so many nodes.
        """

    @abstractmethod
    def cache_report(self, view: View) -> dict[str, object]:
        """Settings of the prefix cache and the figures that a view may see, ready for JSON."""

    @abstractmethod
    def cache_text(self, view: View) -> str:
        """The tree of the prefix cache as text, as far as a view may see it."""

    @abstractmethod
    def watch_drafts(self, views: Sequence[View]) -> None:
        """Keep the first draft of every step that each view shows; it costs a read of the device per step and view."""

    @abstractmethod
    def flush_cache(self) -> int:
        """Drop every cached prefix that no running request uses, and shared texts to draft from.

        Returns:
            The number of cached tokens dropped.
        """

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Return configuration, model, drafts, memory and buckets, ready for JSON (``/server_info``)."""

    @abstractmethod
    def close(self) -> None:
        """Drop all requests, and give back what the engine holds."""

    # ---- for engines that wait for other processes; others keep these defaults --------------------------------------

    def idle(self) -> float | None:
        """Do what is due where no request runs.

        Returns:
            Seconds after which this is to be called again, if no request comes; None: there is nothing to do.
        """
        return None

    def when_due(self, callback: Callable[[], None]) -> None:  # noqa: B027 -- most have nothing to do
        """Call a function, from another thread, when ``idle`` is to be called earlier than it has said."""

    def wake(self) -> None:  # noqa: B027 -- most have nothing to do
        """End early, from any thread, a wait of ``step`` for other processes: a function waits for the step's end."""

    def when_lost(self, callback: Callable[[Exception], None]) -> None:  # noqa: B027 -- most have nothing to do
        """Call a function when a process is lost without which nothing can be computed."""

    # ---- checks of requests; any thread may call them ----------------------------------------------------------------

    def check_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, forced_output_ids: Sequence[int] = ()
    ) -> None:
        """Raise what ``add_request`` would raise about these arguments alone."""
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
        """The token ids of ``params.prediction``. Raises RequestError: it is no text."""
        given = params.prediction
        if given is None or not isinstance(given, str):
            return given or ()
        try:
            return self.tokenizer.encode(given, add_special_tokens=False)
        except RequestError as error:
            raise RequestError(str(error), "prediction") from None

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
