"""``specmamba serve``: builds the engine, serves until the end, returns an exit status."""

from __future__ import annotations

import asyncio
import gc
import linecache
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from specmamba.engine.thread import EngineThread
from specmamba.processes.unused_memory import drop_library_pages, return_freed_memory
from specmamba.server.app import create_app
from specmamba.server.handoff_setup import open_transport, start_handoffs
from specmamba.server.http.connections import FLUSH_TIMEOUT_S, ConnectionConfig, ConnectionLimits
from specmamba.server.listener import is_reached_from_outside, listen, url_of
from specmamba.server.observe.line_writer import ProcessOutput
from specmamba.server.observe.logs import configure_logging
from specmamba.server.observe.tracing import check_tracing
from specmamba.server.shutdown_watch import (
    ShutdownWatch,
    UnjoinedExecutor,
    end_at_signals,
    end_now,
    end_soon,
    ignore_signals,
)
from specmamba.server_config import ServerConfig

if TYPE_CHECKING:
    from specmamba.engine.base_engine import BaseEngine

logger = logging.getLogger("specmamba")

# Connections end earlier by themselves; requests that have not ended after this time are cancelled.
_GRACEFUL_TIMEOUT_S = int(FLUSH_TIMEOUT_S) + 2
# A step that takes this much longer than the deadline is abandoned.
_HANG_TIMEOUT_S = 10.0
_HANG_TIMEOUT_AFTER_SECOND_SIGNAL_S = 5.0
_ABANDONED_TIMEOUT_S = 1.0  # for the thread of an engine that was abandoned


def run_server(
    config: ServerConfig, build_engine: Callable[[], BaseEngine], listener: socket.socket | None = None
) -> int:
    """Serve until a signal or a failure of the engine. Returns the exit status: 0 after a signal, 1 after a failure.

    For a process that ends then: it takes over the standard streams, and the process ends in any case soon after the
    return, or after ``--shutdown-timeout``.

    Args:
        config: the flags of ``specmamba serve``.
        build_engine: called in the engine's thread.
        listener: listens on the address of ``config``, and is closed at the end; None: it is made here.

    Raises:
        ConfigError: the address cannot be listened on, or a package that a flag needs is missing.
        SpecmambaError: raised by ``build_engine``.
    """
    with listen(config.host, config.port) if listener is None else listener as opened:
        output = ProcessOutput.taken_over(configure_logging(config))
        check_tracing(config)
        warn_of_exposure(config, url_of(opened), is_reached_from_outside(opened))
        ShutdownWatch(config.shutdown_timeout).start()
        end_at_signals(output.flush)  # until the server installs its handlers; no request runs yet
        status, has_ended = _serve(config, build_engine, opened)
    if not has_ended:
        end_now(status, output.flush)
    end_soon(status, output.flush)
    return status


def warn_of_exposure(config: ServerConfig, url: str, is_reached: bool) -> None:
    """Log who may read keys, and who may use the model without one; ``is_reached``: by other machines."""
    for file in config.exposed_key_files:
        logger.warning("other users of this machine may read the keys in %s: change its mode to 600", file)
    if not config.api_key and is_reached:
        logger.warning(
            "--host %s without --api-key: every machine that reaches %s may use the model; give a key, or leave --host "
            "at 127.0.0.1",
            config.host,
            url,
        )


def _serve(config: ServerConfig, build_engine: Callable[[], BaseEngine], listener: socket.socket) -> tuple[int, bool]:
    """Serve to the end. Returns the exit status, and whether the engine's thread has ended."""
    transport = open_transport(config)  # before what takes long
    engine_thread = EngineThread(build_engine, config.stream_chunk_interval)
    engine_thread.start()
    if transport is not None:
        start_handoffs(config, engine_thread, transport)  # what goes wrong ends the process
    server = ApiServer(create_app(config, engine_thread), config, engine_thread, listener)
    _keep_what_is_loaded()
    server.run(sockets=[listener])
    ignore_signals()  # ``ShutdownWatch`` goes on
    grace_s = _ABANDONED_TIMEOUT_S if server.has_abandoned_engine else _HANG_TIMEOUT_S
    stopped = engine_thread.shutdown(0.0, grace_s)
    if engine_thread.failed is not None or not stopped:
        logger.error("the engine failed" if stopped else "the engine hangs")
        return 1, stopped
    return 0, stopped


def _keep_what_is_loaded() -> None:
    """Take modules, model and pools, which live as long as the process, out of garbage collection.

    Collecting them takes a tenth of a second, in which no request gets a token. What was needed to load them alone goes
    back to the system.
    """
    linecache.clearcache()  # lines of modules that inspected themselves
    gc.collect()
    gc.freeze()
    drop_library_pages()  # the engine's thread waits for requests, so that no library is being loaded
    return_freed_memory()


class ApiServer(uvicorn.Server):
    """A uvicorn server that runs as long as its engine thread: a signal drains the engine, then the server ends.

    While the engine drains, new requests get status 503.
    """

    def __init__(
        self, app: FastAPI, config: ServerConfig, engine_thread: EngineThread, listener: socket.socket
    ) -> None:
        super().__init__(
            ConnectionConfig(
                app,
                ConnectionLimits.of(config),
                lifespan="off",
                log_config=None,
                log_level="debug" if config.log_level == "debug" else "warning",
                loop="asyncio",
                access_log=False,  # its lines would hold query strings; calls have lines of their own
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACEFUL_TIMEOUT_S,
            )
        )
        self._engine_thread = engine_thread
        self._ready_line = f"specmamba: ready at {url_of(listener)} (model: {config.model_name})"
        self._shutdown_timeout = config.shutdown_timeout
        self._num_signals = 0
        self.has_abandoned_engine = False
        engine_thread.on_stop(self._stop)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(UnjoinedExecutor(thread_name_prefix="asyncio"))
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._ready_line, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # This thread may hold locks when a signal arrives, so the work is left to the event loop.
        self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name)

    def _on_signal(self, name: str) -> None:
        """First signal: finish running requests. Second: abort them. Third: do not wait for clients either."""
        self._num_signals += 1
        first = self._num_signals == 1
        deadline_s = self._shutdown_timeout if first else 0.0
        text = f"finishing the running requests, for {deadline_s:g} s at the most" if first else "ending now"
        logger.warning("%s: %s", name, text)
        self.force_exit = self._num_signals > 2
        self._engine_thread.drain(deadline_s)
        # If a step hangs, the end of the engine never calls _stop.
        hang_timeout_s = _HANG_TIMEOUT_S if first else _HANG_TIMEOUT_AFTER_SECOND_SIGNAL_S
        self._loop.call_later(deadline_s + hang_timeout_s, self._abandon_engine)

    def _abandon_engine(self) -> None:
        self.has_abandoned_engine = True
        self._engine_thread.give_up()
        self._stop()

    def _stop(self) -> None:
        self.should_exit = True  # polled by uvicorn ten times a second; any thread may set it
