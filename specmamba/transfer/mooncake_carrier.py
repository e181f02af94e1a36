"""KV and states of handoffs by Mooncake's transfer engine, which reads the other server's memory."""

from __future__ import annotations

import threading
import time
from importlib import import_module

from specmamba.cache.tiers.entry import Bytes
from specmamba.errors import ConfigError
from specmamba.transfer.carrier import CarrierName
from specmamba.transfer.peer_link import LinkError

POLL_S = 0.0002
_RUNS, _DONE, _LATE = 0, 1, -2  # what the library says of a transfer; anything else: it has failed
_NO_TRANSFER = (0, -1, 2**64 - 1)  # in place of the number of one


class MooncakeCarrier:
    """``Carrier`` by Mooncake's transfer engine, whose servers find each other without another service."""

    name: CarrierName = "mooncake"

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        """Start an engine.

        Args:
            host: by which the other servers reach this machine.
            protocol, device: of the library.

        Raises:
            ConfigError: the library is missing, or does not work.
        """
        flag = "--disaggregation-transfer-backend mooncake"
        try:
            self._engine = import_module("mooncake.engine").TransferEngine()
        except ImportError as error:  # the package, or a library of the system that it needs
            raise ConfigError(
                f"{flag}: its library cannot be loaded ({error}): pip install 'specmamba[mooncake]', and the system's "
                "packages libibverbs1 and librdmacm1"
            ) from None
        if code := self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise ConfigError(f"{flag}: the transfer engine does not start (code {code}; its own lines say more)")
        self._address = f"{host}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()  # guards the field below
        self._late: dict[int, int] = {}  # transfers that were given up, by where they write

    def register(self, memory: Bytes) -> None:
        """As ``Carrier.register``."""
        if code := self._engine.register_memory(memory.ctypes.data, memory.nbytes):
            raise ConfigError(f"--disaggregation-transfer-backend mooncake: no memory can be registered (code {code})")

    @property
    def address(self) -> str:
        """As ``Carrier.address``: host and port of the engine."""
        return self._address

    def read(self, address: str, remote: int, local: int, nbytes: int, deadline: float) -> None:
        """As ``Carrier.read``. Not the library's own read: it keeps a core busy, and knows no deadline."""
        transfer = self._engine.batch_transfer_async_read(address, [local], [remote], [nbytes])
        if transfer in _NO_TRANSFER:
            raise LinkError("cut")
        while (state := self._engine.transfer_check_status(transfer)) in (_RUNS, _LATE):
            if time.monotonic() > deadline:
                with self._lock:
                    self._late[local] = transfer
                raise LinkError("slow")
            time.sleep(POLL_S)
        if state != _DONE:
            raise LinkError("cut")

    def is_quiet(self, local: int) -> bool:
        """As ``Carrier.is_quiet``."""
        with self._lock:
            transfer = self._late.get(local)
            if transfer is not None and self._engine.transfer_check_status(transfer) in (_RUNS, _LATE):
                return False
            self._late.pop(local, None)  # the library has freed it
        return True

    def close(self) -> None:
        """As ``Carrier.close``: the engine ends with the process, since others may still read."""
