"""KV and states of handoffs by NIXL, whose UCX backend reads the other server's memory."""

from __future__ import annotations

import base64
import binascii
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from specmamba.cache.tiers.entry import Bytes
from specmamba.errors import ConfigError
from specmamba.transfer.carrier import CarrierName
from specmamba.transfer.peer_link import LinkError

logger = logging.getLogger("specmamba")

BACKEND = "UCX"
POLL_S = 0.0002


class NixlCarrier:
    """``Carrier`` by NIXL. Its own notifications and descriptions of memory, which are pickled, are not used."""

    name: CarrierName = "nixl"

    def __init__(self) -> None:
        """Start an agent. Raises ConfigError: the library is missing, or does not work."""
        flag = "--disaggregation-transfer-backend nixl"
        try:
            api = import_module("nixl._api")
        except ImportError as error:
            raise ConfigError(
                f"{flag}: its library cannot be loaded ({error}): pip install 'specmamba[nixl]', or choose tcp"
            ) from None
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to standard output
        mode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        try:
            with _errors():
                self._agent = api.nixl_agent(
                    f"specmamba-{secrets.token_hex(16)}", api.nixl_agent_config(backends=[BACKEND], sync_mode=mode)
                )
        except LinkError:
            raise ConfigError(f"{flag}: its agent does not start (its own lines say more): choose tcp") from None
        if BACKEND not in self._agent.backends:
            raise ConfigError(f"{flag}: it has no {BACKEND} backend here: choose tcp")
        self._address = ""
        self._lock = threading.Lock()  # guards the two fields below
        self._agents: dict[str, str] = {}  # names of others' agents by their addresses
        self._late: dict[int, Any] = {}  # transfers that were given up, by where they write

    def register(self, memory: Bytes) -> None:
        """As ``Carrier.register``."""
        try:
            with _errors():
                self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        except LinkError:
            raise ConfigError("--disaggregation-transfer-backend nixl: no memory can be registered") from None
        self._address = base64.b64encode(self._agent.get_agent_metadata()).decode()

    @property
    def address(self) -> str:
        """As ``Carrier.address``: what the library calls an agent's metadata."""
        return self._address

    def read(self, address: str, remote: int, local: int, nbytes: int, deadline: float) -> None:
        """As ``Carrier.read``."""
        agent = ""
        try:
            with _errors():
                agent = self._agent_at(address)
                descriptions = [self._agent.get_xfer_descs([(place, nbytes, 0)], "DRAM") for place in (local, remote)]
                transfer = self._agent.initialize_xfer("READ", *descriptions, agent)
                self._wait(transfer, self._agent.transfer(transfer), local, deadline)
        except LinkError as error:
            if error.reason == "cut":
                self._forget(address, agent)
            raise

    def close(self) -> None:
        """As ``Carrier.close``: the agent ends with the process, since others may still read."""

    def _agent_at(self, address: str) -> str:
        with self._lock:
            if (known := self._agents.get(address)) is not None:
                return known
            try:
                metadata = base64.b64decode(address, validate=True)
            except binascii.Error:
                raise LinkError("damaged") from None
            name = self._agent.add_remote_agent(metadata)
            self._agents[address] = found = name.decode() if isinstance(name, bytes) else str(name)
            return found

    def _forget(self, address: str, agent: str) -> None:
        """Connect anew the next time, unless another thread has done so since."""
        with self._lock:
            is_present = self._agents.get(address) == agent
            if is_present:
                del self._agents[address]
        if is_present:
            with suppress(LinkError), _errors():  # it is gone
                self._agent.remove_remote_agent(agent)

    def _wait(self, transfer: Any, state: str, local: int, deadline: float) -> None:
        while state == "PROC":
            if time.monotonic() > deadline:
                with self._lock:
                    self._late[local] = transfer
                raise LinkError("slow")
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(transfer)
        self._agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise LinkError("cut")

    def is_quiet(self, local: int) -> bool:
        """As ``Carrier.is_quiet``."""
        with self._lock:
            transfer = self._late.get(local)
            if transfer is not None and self._runs(transfer):
                return False
            self._late.pop(local, None)
        if transfer is not None:
            with suppress(LinkError), _errors():
                self._agent.release_xfer_handle(transfer)
        return True

    def _runs(self, transfer: Any) -> bool:
        with suppress(LinkError), _errors():
            return bool(self._agent.check_xfer_state(transfer) == "PROC")
        return False


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the library's errors, which have no base of their own, into LinkError "cut"."""
    try:
        yield
    except LinkError:
        raise
    except Exception as error:  # noqa: BLE001
        logger.warning("a handoff by NIXL has failed: %s", error)
        raise LinkError("cut") from None
