"""Every error a user can meet. Each message says what was wrong and what to change."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for those of libraries that have pages; its type if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class SpecmambaError(Exception):
    """Base of all errors that specmamba raises on purpose."""

    # the message in the words of the command line, for its tools, where the error itself has the words of Python
    in_flags: str | None = None


class ConfigError(SpecmambaError):
    """A flag, an environment variable or a combination of them that cannot work."""


class CheckpointError(SpecmambaError):
    """A checkpoint that is missing, incomplete, damaged, or not what its config says."""


class UnsupportedModelError(CheckpointError):
    """An architecture (or a variant of one) that specmamba has no model for."""


class NotEnoughMemoryError(SpecmambaError):
    """The system refused memory that a model or a library needs."""

    # how the system, Python, PyTorch and safetensors say it
    SIGNS = ("allocate memory", "out of memory", "can't start new thread", "map segment", "unable to mmap")

    @classmethod
    def found_in(cls, error: BaseException) -> NotEnoughMemoryError | None:
        """What an error of another package means, if it means this; None: it is another one."""
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        kinds = RuntimeError, ImportError, OSError
        if not isinstance(error, MemoryError) and not (
            isinstance(error, kinds) and any(sign in str(error) for sign in cls.SIGNS)
        ):
            return None
        return cls(
            f"the memory does not suffice ({first:.200}): free some, raise a limit of this process (ulimit -v), or "
            "choose smaller weights (--quantization) and pools (--max-total-tokens, --max-running-requests)"
        )


class RequestError(SpecmambaError):
    """A request that can never be served as it stands.

    ``param`` names the offending field, in the vocabulary of the HTTP interface.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TemplateLimitError(RequestError):
    """The chat template exceeds a limit for these messages. ``reason`` names it: "takes more than 10 s"."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the model's chat template {reason} for these messages: send fewer or shorter ones, or have the template "
            "checked",
            param="messages",
        )
        self.reason = reason


class PromptTooLongError(RequestError):
    """The prompt does not fit the context. Carries both numbers."""

    def __init__(self, num_prompt_tokens: int, max_prompt_tokens: int) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens, but at most {max_prompt_tokens} fit: "
            "shorten it, or serve with a larger --context-length / --max-total-tokens",
            param="prompt",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens


class QueueFullError(SpecmambaError):
    """The waiting queue is at its bound; the caller should retry later."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already: try again later (--max-queued-requests)")
        self.num_waiting = num_waiting


class EngineStoppedError(SpecmambaError):
    """The engine is draining or has failed and takes no more requests."""


class EngineFailedError(EngineStoppedError):
    """The engine failed while this request was on its way to it."""


class RankLostError(SpecmambaError):
    """A process that has a part of the model has ended, or has stopped: nothing can be computed without it."""


class ReplicaStateError(SpecmambaError):
    """A replica that cannot be taken out of service, or that there is not."""


class ReplicaLostError(SpecmambaError):
    """No replica of the model is left, and none can be started."""


class GrammarError(SpecmambaError):
    """A text cannot go on within its grammar.

    ``code`` says why, in the vocabulary of the HTTP interface: "grammar_dead_end" (no token may follow, or a given one
    may not), "grammar_too_complex" (finding out takes too long), "grammar_failed".
    """

    def __init__(self, message: str, code: str = "grammar_dead_end") -> None:
        super().__init__(message)
        self.code = code


class GrammarQueueFullError(QueueFullError):
    """Too many grammars wait to be compiled; the caller should retry later."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(num_waiting)
        self.args = (f"{num_waiting} grammars are waiting to be compiled already: try again later",)
