"""KV and states of handoffs by Mooncake's transfer engine, which reads the other server's memory."""

from __future__ import annotations

from importlib import import_module

from specmamba.cache.tiers.entry import Bytes
from specmamba.errors import ConfigError
from specmamba.transfer.carrier import CarrierName
from specmamba.transfer.peer_link import LinkError


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

    def register(self, memory: Bytes) -> None:
        """As ``Carrier.register``."""
        if code := self._engine.register_memory(memory.ctypes.data, memory.nbytes):
            raise ConfigError(f"--disaggregation-transfer-backend mooncake: no memory can be registered (code {code})")

    @property
    def address(self) -> str:
        """As ``Carrier.address``: host and port of the engine."""
        return self._address

    def read(self, address: str, remote: int, local: int, nbytes: int, deadline: float) -> None:
        """As ``Carrier.read``; the library itself gives a transfer up after half a minute (MC_TRANSFER_TIMEOUT)."""
        if self._engine.transfer_sync_read(address, local, remote, nbytes):
            raise LinkError("cut")

    def close(self) -> None:
        """As ``Carrier.close``: the engine ends with the process, since others may still read."""
