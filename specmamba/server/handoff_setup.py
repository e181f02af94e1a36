"""From the flags of prefill and decode servers to an engine that hands prompts over."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import socket
from collections.abc import Callable
from functools import partial

from specmamba.engine.thread import EngineThread
from specmamba.server.listener import listen
from specmamba.server_config import ServerConfig
from specmamba.transfer.carrier import Carrier
from specmamba.transfer.mooncake_carrier import MooncakeCarrier
from specmamba.transfer.nixl_carrier import NixlCarrier
from specmamba.transfer.tcp_transport import TcpTransport
from specmamba.transfer.transport import TransferPlan

logger = logging.getLogger("specmamba")


def open_transport(config: ServerConfig) -> TcpTransport | None:
    """Take the port of a prefill server, where connections wait until ``start_handoffs``; None: nothing is handed over.

    Raises:
        ConfigError: the address is in use or not allowed, or the library of the transfer is missing.
    """
    if config.disaggregation_mode == "null":
        return None
    listener = None
    if config.disaggregation_mode == "prefill":
        listener = listen(config.host, config.disaggregation_bootstrap_port, "--disaggregation-bootstrap-port")
    try:
        return TcpTransport(_key_of(config), listener, _carrier_of(config))
    except BaseException:
        if listener is not None:
            listener.close()
        raise


def start_handoffs(config: ServerConfig, engine: EngineThread, transport: TcpTransport) -> None:
    """Let a started engine hand prompts over. Raises ConfigError: it has no memory for that."""
    secret = hmac.digest(_key_of(config), b"specmamba texts", hashlib.sha256)
    is_prefill = config.disaggregation_mode == "prefill"
    plan = TransferPlan(is_prefill, transport, secret, config.disaggregation_timeout)
    engine.call(lambda own: own.start_handoffs(plan, lambda function: engine.call(lambda _: function()))).result()
    if is_prefill:
        logger.info("prompts are handed over from %s:%d", *transport.address)
    else:
        logger.info("prompts of prefill servers are waited for up to %g s", config.disaggregation_timeout)


def _carrier_of(config: ServerConfig) -> Callable[[], Carrier] | None:
    """Return what makes that which carries KV and states, in place of the connection."""
    if config.disaggregation_transfer_backend == "nixl":
        return NixlCarrier
    if config.disaggregation_transfer_backend == "mooncake":
        host = socket.gethostname() if config.host in ("0.0.0.0", "::") else config.host
        return partial(MooncakeCarrier, os.environ.get("MOONCAKE_LOCAL_HOSTNAME", host))
    return None


def _key_of(config: ServerConfig) -> bytes:
    assert config.disaggregation_key is not None
    return config.disaggregation_key.get_secret_value().encode()
