"""The program of a replica: an engine that does what the server tells it, over a connection that it inherits."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from specmamba.config import EngineConfig
from specmamba.engine.channels import SentRequest
from specmamba.engine.mirror.start import build_engine
from specmamba.errors import QueueFullError, RequestError, SpecmambaError
from specmamba.grammar import CompiledGrammar
from specmamba.grammar.compiler import deserialized, vocabulary_of
from specmamba.parallel.messages import Messages
from specmamba.replicas.prefix_publisher import PrefixPublisher, identity_of
from specmamba.replicas.wire import dump_deltas, dump_sample, dump_stats, dump_tenant_stats, load_view

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine

logger = logging.getLogger("specmamba")

BEAT_S = 0.5
PUBLISH_S = 0.25  # between two publications of figures, and of prefixes, while requests run


class ReplicaProgram:
    """Runs an engine for the server until the connection ends."""

    def __init__(self, engine: Engine, link: Messages, secret: bytes) -> None:
        """``secret``: the key of the hashes of cached prefixes."""
        self._engine, self._link = engine, link
        self._prefixes = PrefixPublisher(engine, secret)
        self._inbox = Inbox(link, self._prefixes.learn)
        self._published = 0.0
        self._vocabulary: Any = None  # of grammars

    def run(self) -> None:
        """Do what arrives, and step while there are requests."""
        try:
            while True:
                is_idle = not self._engine.has_unfinished_requests
                self._publish(at_once=is_idle)
                for message in self._inbox.take(waits=is_idle):
                    if message["do"] == "close":
                        return
                    self._do(message)
                if self._engine.has_unfinished_requests:
                    self._step()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the server has ended

    def _step(self) -> None:
        deltas = self._engine.step()
        if any(delta.finish_reason is not None for delta in deltas):
            # Before the end of a text is told: what follows it goes where its state is.
            self._publish(at_once=True)
        if deltas:
            self._link.send({"deltas": dump_deltas(deltas)})

    def _do(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "add":
                self._add(SentRequest.of(message))
            case "abort":
                for request_id in message["request_ids"]:
                    self._engine.abort(request_id)
            case "watch":
                self._engine.watch_drafts([load_view(view) for view in message["views"]])
            case "ask":
                self._link.send({"answer": message["number"], "value": self._answer(message)})
            case other:
                raise ValueError(f"the server asks for {other!r}, which no replica does")

    def _add(self, request: SentRequest) -> None:
        try:
            request.add_to(self._engine, self._grammar(request))
        except RequestError as error:
            self._refuse(request, str(error), "invalid_request")
        except QueueFullError as error:
            self._refuse(request, str(error), "queue_full")

    def _refuse(self, request: SentRequest, message: str, code: str) -> None:
        self._link.send({"refused": request.request_id, "message": message, "code": code})

    def _grammar(self, request: SentRequest) -> CompiledGrammar | None:
        if request.grammar is None or request.params.grammar is None:
            return None
        engine = self._engine
        if self._vocabulary is None:
            self._vocabulary = vocabulary_of(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)
        compiled = deserialized(request.grammar, self._vocabulary)
        return CompiledGrammar(request.params.grammar, compiled, len(request.grammar))

    def _answer(self, message: Mapping[str, Any]) -> Any:
        engine = self._engine
        match message["question"]:
            case "flush":
                return engine.flush_cache()
            case "report":
                return engine.cache_report(load_view(message["view"]))
            case "text":
                return engine.cache_text(load_view(message["view"]))
            case "tenant":
                return dump_tenant_stats(engine.stats_of(message["tenant"]))
            case "sample":
                views = [load_view(view) for view in message["views"]]
                return dump_sample(engine.sample(views, message["max_nodes"]))
            case other:
                raise ValueError(f"the server asks for {other!r}, which no replica knows")

    def _publish(self, at_once: bool) -> None:
        """Tell figures and cached prefixes, now and then while requests run, and before waiting for the next."""
        now = time.monotonic()
        if not at_once and now < self._published + PUBLISH_S:
            return
        self._published = now
        stats = dump_stats(self._engine.stats())
        self._link.send({"stats": stats, **self._prefixes.changes()})
        while at_once and self._prefixes.has_more:
            self._link.send({"stats": stats, **self._prefixes.changes()})


class Inbox:
    """Messages of the server, read on a thread of its own: the server must not wait where a step is long."""

    def __init__(self, link: Messages, learn: Callable[[Sequence[str]], None]) -> None:
        """``link``: with the server; nothing else reads from it. ``learn``: as ``PrefixPublisher.learn``."""
        self._link, self._learn = link, learn
        self._messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()  # None: the server has ended
        threading.Thread(target=self._read, name="replica-inbox", daemon=True).start()

    def take(self, waits: bool) -> Iterator[dict[str, Any]]:
        """What has arrived; with ``waits``, at least one message. Raises EOFError: the server has ended."""
        with suppress(Empty):
            while True:
                message = self._messages.get(block=waits)
                waits = False
                if message is None:
                    raise EOFError
                yield message

    def _read(self) -> None:
        with suppress(OSError, ValueError):
            while (message := self._link.receive()) is not None:
                if message["do"] == "learn":
                    self._learn(message["keys"])  # before the request for which the keys matter is read
                else:
                    self._messages.put(message)
        self._messages.put(None)


class LinkHandler(logging.Handler):
    """Lets the server write what is logged, in its own format."""

    def __init__(self, link: Messages) -> None:
        """``link``: with the server."""
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line; where the server has ended, it is lost."""
        with suppress(OSError):
            self._link.send({"log": self.format(record), "level": record.levelno})


def main() -> int:
    """Run until the server ends. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server finishes its requests, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.stdin.buffer.read())
    return run_replica(given, Messages(socket.socket(fileno=given["connection"])))


def run_replica(given: Mapping[str, Any], link: Messages) -> int:
    """Load the model and serve it over a connection until that ends. Returns the exit status.

    ``given``: index, flags, secret and log level, as ``replica_launch.given_to``. For a process that does nothing
    else: its log goes over the connection.
    """
    logger.addHandler(LinkHandler(link))
    logger.setLevel(logging.ERROR if given["index"] else given["log_level"])  # the first one reports
    logger.propagate = False
    try:
        engine = build_engine(EngineConfig(**given["flags"]))
    except SpecmambaError as error:
        link.send({"failed": str(error)})
        return 1
    threading.Thread(target=_beat, args=(link,), name="replica-beat", daemon=True).start()
    link.send({"ready": _constants(engine)})
    try:
        ReplicaProgram(engine, link, bytes.fromhex(given["secret"])).run()
    finally:
        engine.close()
    return 0


def _constants(engine: Engine) -> dict[str, Any]:
    return {
        "context_length": engine.context_length,
        "vocab_size": engine.vocab_size,
        "eos_token_ids": list(engine.eos_token_ids),
        "description": engine.describe(),
        "tiers": identity_of(engine),
    }


def _beat(link: Messages) -> None:
    """Give signs of life while a long step runs."""
    try:
        while True:
            time.sleep(BEAT_S)
            link.send({"beat": True})
    except OSError:
        return  # the server has ended


if __name__ == "__main__":
    raise SystemExit(main())
