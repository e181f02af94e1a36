"""Who calls: an API key, the operator's key, or an address; and what each caller may see."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from specmamba.cache.prefix.inspection import WHOLE, View
from specmamba.core import Owner
from specmamba.server.http.error_answers import ApiError
from specmamba.server_config import ServerConfig

_CALLER = "specmamba.caller"  # the key of the ASGI scope
# Probes and scrapers rarely send a key, and get load figures only. The page's files hold nothing about the model; the
# page asks its user for a key.
_OPEN_PATHS = frozenset({"/", "/docs", "/health", "/metrics", "/ping", "/ready"})
_OPEN_PREFIX = "/page/"
_FORWARDED = (b"forwarded", b"via", b"x-real-ip")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_NETWORK_BITS_V6 = 64
_MOST_NAMES = 64  # whose parsing is remembered: a client that sends one request after the other has the same ones


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a call."""

    name: str  # its key or its address: limits and turns in the queue are per name
    tenant: str | None = None  # cached prefixes and live answers stay within a tenant; None: all callers are one
    has_key: bool = False
    is_operator: bool = False  # may see and change what belongs to all callers

    @property
    def owner(self) -> Owner:
        """The owner of its requests in the engine."""
        return Owner(self.name, self.tenant)


def caller_of(scope: Scope) -> Caller:
    """The client of a call; its address where no key was checked."""
    caller: Caller | None = scope.get(_CALLER)
    return _by_address(scope) if caller is None else caller


def view_of(scope: Scope) -> View:
    """What the caller may see of prefixes and answers: all for the operator, else those of its own tenant.

    Raises:
        ApiError: 403; the caller has neither an API key nor the operator's.
    """
    caller = caller_of(scope)
    if caller.is_operator:
        return WHOLE
    if not caller.has_key:
        raise _for_operator()
    return View(caller.tenant)


def check_operator(scope: Scope) -> None:
    """Raise ApiError 403 unless the operator calls."""
    if not caller_of(scope).is_operator:
        raise _for_operator()


class IdentifyCaller:
    """ASGI middleware: finds out who calls, by ``Authorization: Bearer KEY``, ``x-api-key: KEY`` or by address.

    Where there are API keys, a call without one of them, or the operator's, gets status 401. Without API keys and
    without a key of the operator, the operator of a server on loopback is every caller who reaches it by a loopback
    name, unless a proxy says that it forwards the call.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self._callers = _callers_by_digest(config)
        self._needs_key = bool(config.api_key)
        self._all_operate = not config.api_key and config.admin_key is None and is_loopback(config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        caller = self._by_key(scope)
        if caller is None and self._needs_key and not _is_open(scope["path"]):
            await _refusal().response()(scope, receive, send)
            return
        scope[_CALLER] = caller or _by_address(scope, self._all_operate and _is_direct(scope))
        await self.app(scope, receive, send)

    def _by_key(self, scope: Scope) -> Caller | None:
        """The caller whose key a request carries, or None. Takes the same time for every wrong key."""
        # Compared as bytes: a header need not be ASCII.
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        scheme, _, key = _only(headers, b"authorization").partition(b" ")
        bearer = self._owner_of(key.strip())
        other = self._owner_of(_only(headers, b"x-api-key"))  # as Anthropic's clients send it
        return bearer if bearer is not None and scheme.lower() == b"bearer" else other

    def _owner_of(self, key: bytes) -> Caller | None:
        digest = _digest(key)
        matches = [caller for known, caller in self._callers.items() if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None


def _only(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The value of a header that is sent once; empty where it is not."""
    values = [value.strip() for other, value in headers if other == name]
    return values[0] if len(values) == 1 else b""


def host_name(host: str) -> str | None:
    """The name or address in a ``Host`` header, in lower case, without port and brackets; None: it is none."""
    found = _HOST.fullmatch(host.strip())
    return None if found is None else found.group(1).strip("[]").lower().removesuffix(".")


@lru_cache(_MOST_NAMES)
def is_loopback(host: str) -> bool:
    """Whether a host name or address is one of this machine's loopback interface."""
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _callers_by_digest(config: ServerConfig) -> Mapping[bytes, Caller]:
    keys = [key.get_secret_value().encode() for key in config.api_key]
    is_shared = config.prefix_cache_scope == "shared"
    callers = {
        _digest(key): Caller(f"key {index}", None if is_shared else _tenant(key), has_key=True)
        for index, key in enumerate(keys)
    }
    if config.admin_key is not None:
        key = config.admin_key.get_secret_value().encode()
        tenant = None if is_shared or not keys else _tenant(key)
        callers[_digest(key)] = Caller("operator", tenant, has_key=True, is_operator=True)
    return callers


def _by_address(scope: Scope, is_operator: bool = False) -> Caller:
    client = scope.get("client")
    return Caller(f"address {network_of(client[0])}" if client else "unknown", is_operator=is_operator)


def _is_direct(scope: Scope) -> bool:
    """Whether a request names this machine by a loopback name, and no proxy says that it forwards it."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    hosts = [value.decode("latin1") for name, value in headers if name == b"host"]
    names = [host_name(host) for host in hosts]
    is_local = len(names) == 1 and names[0] is not None and is_loopback(names[0])
    return is_local and not any(name in _FORWARDED or name.startswith(b"x-forwarded-") for name, _ in headers)


@lru_cache(_MOST_NAMES)
def network_of(address: str) -> str:
    """The addresses that one client is likely to have: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return str(ipaddress.ip_network((parsed.packed, _NETWORK_BITS_V6), strict=False))
        parsed = parsed.ipv4_mapped
    return str(parsed)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # equal lengths: compare_digest reveals the length


def _tenant(key: bytes) -> str:
    """A name that stays the same when keys are added or reordered, and does not reveal the key."""
    return hashlib.sha256(b"specmamba tenant\0" + key).hexdigest()[:32]


def _refusal() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong: send the header 'Authorization: Bearer KEY' (or 'x-api-key: KEY')",
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _for_operator() -> ApiError:
    text = (
        "this is for the operator: send the key of --admin-key. "
        "(Without --admin-key it is open only on a loopback address without API keys.)"
    )
    return ApiError(403, text, kind="permission_error", code="operator_only")
