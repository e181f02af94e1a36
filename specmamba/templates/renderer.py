"""The parent's side of the process that renders chat templates: limits, and one rendering after the other."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields

from specmamba.errors import EngineStoppedError, RequestError, TemplateLimitError
from specmamba.processes.child_process import ChildProcess, NoAnswerError
from specmamba.templates.rendering import Conversation, RenderedChat

logger = logging.getLogger(__name__)

TIMEOUT_S, MEMORY_BYTES = 10.0, 512 << 20
_FIELDS = [each.name for each in fields(Conversation)]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    make: Callable[[], Conversation]
    future: Future[RenderedChat] = field(default_factory=Future)


class TemplateRenderer:
    """Renders conversations in a separate process, with limits on time, memory and the size of the text.

    A template that exceeds a limit, or crashes, ends that process only. Safe to use from any thread.
    """

    def __init__(self, most_characters: int) -> None:
        """``most_characters``: of a text, besides as many as were sent for it."""
        self._most_characters = most_characters
        # The process has no memory for a text of more bytes than the last number.
        self._child = ChildProcess("specmamba.templates.template_worker", MEMORY_BYTES, MEMORY_BYTES)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the field below, and the order of jobs and the end
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="chat-templates", daemon=True)
        self._thread.start()

    @property
    def worker_pid(self) -> int | None:
        """The id of the process, or None before it was started."""
        return self._child.pid

    def render(self, make: Callable[[], Conversation]) -> Future[RenderedChat]:
        """Render the conversation that ``make`` gives; it is called on another thread.

        When the future is cancelled, the rendering is given up.

        The future raises:
            RequestError: the template refuses the messages or variables, or its process died.
            TemplateLimitError: a limit was exceeded.
            EngineStoppedError: the renderer was closed.
            OSError: the process cannot be started.
        """
        job = _Job(make)
        job.future.add_done_callback(self._stop_cancelled)
        with self._lock:
            if self._is_closed:
                job.future.set_exception(_stopped())
            else:
                self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """Stop rendering. All pending futures raise EngineStoppedError."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)
        self._child.close()
        self._thread.join()

    def _stop_cancelled(self, future: Future[RenderedChat]) -> None:
        if future.cancelled():
            self._child.abandon()

    def _run(self) -> None:
        with suppress(OSError):  # the first rendering tries again
            self._child.start()
        while (job := self._jobs.get()) is not None:
            self._finish(job)
        self._child.reap()

    def _finish(self, job: _Job) -> None:
        outcome: RenderedChat | Exception
        try:
            outcome = self._rendered(job)
        except Exception as error:  # noqa: BLE001 -- an unexpected error must end this job only, not the thread
            outcome = _stopped() if self._is_closed else error
        if not job.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)

    def _rendered(self, job: _Job) -> RenderedChat:
        conversation = job.make()
        try:
            content = json.dumps({name: getattr(conversation, name) for name in _FIELDS})
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the messages cannot be handed to the chat template: {error}", "messages") from None
        most = self._most_characters + len(content)
        line = f'{{"conversation": {content}, "most_characters": {most}}}\n'.encode()
        try:
            header, text = self._child.ask(line, TIMEOUT_S, lambda: not job.future.cancelled())
        except NoAnswerError as error:
            if error.reason == "ended" and not (self._is_closed or job.future.cancelled()):
                logger.warning("the process that renders chat templates ended unexpectedly")
            raise _failure(error.reason) from None
        if header.get("is_limit"):
            raise TemplateLimitError(str(header["error"]))
        if "error" in header:
            raise RequestError(str(header["error"]), header["param"])
        return RenderedChat(text.decode("utf8", "surrogatepass"), conversation.mark)


def _failure(reason: str) -> RequestError:
    if reason == "late":
        return TemplateLimitError(f"takes more than {TIMEOUT_S:g} s")
    if reason == "too_large":
        return TemplateLimitError("writes too many characters")
    return RequestError("the model's chat template ended the process that renders it", "messages")


def _stopped() -> EngineStoppedError:
    return EngineStoppedError("no more conversations are rendered: the server is stopping")
