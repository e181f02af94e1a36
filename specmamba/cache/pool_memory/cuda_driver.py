"""The calls of the CUDA driver that map memory into reserved addresses, by ctypes; the result of each is checked.

NVIDIA's driver API, "Virtual Memory Management": a range of addresses is reserved, memory is created in chunks that
have no address, and a chunk is mapped into a range, made accessible, and unmapped again. Structures and numbers are
those of its cuda.h (``CUmemAllocationProp_v1``, ``CUmemAccessDesc_v1``).
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from functools import cache
from typing import ClassVar, cast

import torch

logger = logging.getLogger("specmamba")

LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_ON_DEVICE, _PINNED, _READ_AND_WRITE, _SMALLEST = 1, 1, 3, 0


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class _Location(Structure):
    _fields_: ClassVar = [("type", c_int), ("id", c_int)]


class _AllocationFlags(Structure):
    _fields_: ClassVar = [
        ("compression", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class _Properties(Structure):
    _fields_: ClassVar = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_data", c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(Structure):
    _fields_: ClassVar = [("location", _Location), ("flags", c_int)]


_CALLS: dict[str, list[type]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(_Properties), c_int],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemCreate": [POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64],
    "cuMemRelease": [c_uint64],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(_Access), c_size_t],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}


class CudaDriver:
    """Memory of one device: addresses, chunks of ``granularity`` bytes, and which chunk is where."""

    def __init__(self, library: ctypes.CDLL, ordinal: int = 0) -> None:
        """Use a device.

        Args:
            library: the driver's.
            ordinal: number of the device among those that the process sees, as PyTorch counts.

        Raises:
            DriverError: the driver is too old, or the device cannot do this.
        """
        try:
            self._functions = {name: getattr(library, name) for name in _CALLS}
        except AttributeError as error:
            raise DriverError(f"the driver is too old: {error}") from error
        for name, types in _CALLS.items():
            self._functions[name].argtypes, self._functions[name].restype = types, c_int
        device, is_able, granularity = c_int(), c_int(), c_size_t()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(device), ordinal)
        self._call("cuDeviceGetAttribute", byref(is_able), _HAS_VIRTUAL_MEMORY, device)
        if not is_able.value:
            raise DriverError("the device cannot map memory into reserved addresses")
        self._location = _Location(_ON_DEVICE, device.value)
        self._properties = _Properties(_PINNED, 0, self._location)
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), _SMALLEST)
        self.granularity = granularity.value

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses, which have no memory; returns the first. ``num_bytes`` is a multiple of a chunk."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        """Free all addresses of a range, into which nothing is mapped."""
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self) -> int:
        """Create a chunk of memory, which has no address; returns its handle."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), self.granularity, byref(self._properties), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """Give a chunk back to the device, once it is mapped nowhere."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, handle: int) -> None:
        """Map a chunk; before anything touches it, ``allow``."""
        self._call("cuMemMap", address, self.granularity, 0, handle, 0)

    def allow(self, address: int, num_bytes: int) -> None:
        """Let the device read and write a run of mapped chunks."""
        self._call("cuMemSetAccess", address, num_bytes, byref(_Access(self._location, _READ_AND_WRITE)), 1)

    def unmap(self, address: int) -> None:
        """Unmap the chunk at an address; from then on, what touches it ends the process's work on the device."""
        self._call("cuMemUnmap", address, self.granularity)

    def try_out(self) -> None:
        """Map a chunk and unmap it again. Raises DriverError: that is impossible here."""
        address = self.reserve(self.granularity)
        try:
            handle = self.create()
            try:
                self.map(address, handle)
                self.allow(address, self.granularity)
                self.unmap(address)
            finally:
                self.release(handle)
        finally:
            self.free(address, self.granularity)

    def _call(self, name: str, *arguments: object) -> None:
        result: int = self._functions[name](*arguments)
        if result:
            text = c_char_p()
            self._functions["cuGetErrorName"](result, byref(text))
            known = (text.value or b"unknown").decode()
            what = ": out of memory" if result == _OUT_OF_MEMORY else ""
            raise DriverError(f"{name} failed with {known} ({result}){what}")


def driver_of(device: torch.device) -> CudaDriver | None:
    """Return what maps memory on a device; None: that is impossible on it, and was said in a warning."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    ordinal = cast("int | None", device.index)
    return _driver(torch.cuda.current_device() if ordinal is None else ordinal)


@cache
def _driver(ordinal: int) -> CudaDriver | None:
    try:
        driver = CudaDriver(ctypes.CDLL(LIBRARY), ordinal)
        driver.try_out()
    except (OSError, DriverError) as error:
        logger.warning(
            "KV and states keep their sizes, as memory of the GPU cannot go from one to the other: %s", error
        )
        return None
    return driver
