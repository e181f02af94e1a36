"""What Ray Serve says of an application: whether it is ready, what is wrong with it, and where it is reached."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specmamba.errors import first_line
from specmamba.server.listener import http_url

logger = logging.getLogger("specmamba")

_WRONG = ("DEPLOY_FAILED", "UNHEALTHY")
_SERVES = "HEALTHY"  # of a proxy


@dataclass(frozen=True, slots=True)
class Condition:
    """An application now; "failed": for good, "unwell": Ray may mend it."""

    kind: Literal["ready", "starting", "unwell", "failed"]
    message: str = ""  # Ray's, of what is wrong


def condition_of(found: Any) -> Condition:
    """The condition of an application, of which ``found`` is Ray's overview; None: there is none."""
    if found is None:
        return Condition("failed", "was deleted")
    match _word(found.status):
        case "RUNNING":
            return Condition("ready")
        case "DEPLOY_FAILED":
            return Condition("failed", f"has failed: {_said_of(found)}")
        case "UNHEALTHY":
            return Condition("unwell", f"is unhealthy: {_said_of(found)}")
        case "DELETING":
            return Condition("failed", "is being deleted")
    wrong = any(_word(part.status) in _WRONG for part in found.deployments.values())
    return Condition("unwell", f"does not start: {_said_of(found)}") if wrong else Condition("starting")


def _word(status: Any) -> str:
    """A status of Ray without the name of its class."""
    return str(getattr(status, "value", status)).rpartition(".")[2]


def _said_of(found: Any) -> str:
    """Ray's message of an application, and those of its deployments that are not well, which have the reason."""
    parts = [
        f"{name}: {part.message}"
        for name, part in found.deployments.items()
        if part.message and _word(part.status) in _WRONG
    ]
    return "\n".join(filter(None, [found.message, *parts])) or _word(found.status)


class ApplicationWatch:
    """Looks at an application now and then, tells what is wrong, and decides when it is given up."""

    def __init__(self, serve: Any, name: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin, before the application is deployed: one of the same name that is there now is not meant.

        Args:
            serve: ``ray.serve``.
            name: of the application.
            timeout_s: how long it may not be ready, from now on or from when it was ready last.
            clock: seconds.
        """
        self._serve, self._name, self._timeout_s, self._clock = serve, name, timeout_s, clock
        self._ready_at, self._condition = clock(), Condition("starting")
        self._before = self._deployed_at(self._found())
        self._is_there = False  # the one that is meant

    @property
    def had_forerunner(self) -> bool:
        """Whether there was one of this name before."""
        return self._before is not None

    def _found(self) -> Any:
        return self._serve.status().applications.get(self._name)

    @staticmethod
    def _deployed_at(found: Any) -> float | None:
        return None if found is None else found.last_deployed_time_s

    def condition(self) -> Condition:
        """The condition of the application now; it starts until Ray has taken it in."""
        try:
            found = self._found()
        except Exception as error:  # noqa: BLE001 -- of a cluster that is gone, Ray raises many
            return Condition("failed", f"cannot be seen any more: {first_line(error)}")
        self._is_there |= self._deployed_at(found) not in (None, self._before)
        return condition_of(found) if self._is_there else Condition("starting")

    def look(self) -> str | None:
        """Look, and log what has changed. Returns why it is given up, which is not logged; None: it is not."""
        before, self._condition = self._condition, self.condition()
        now, kind, message = self._clock(), self._condition.kind, self._condition.message
        if kind == "failed":
            return message
        if kind == "ready":
            self._ready_at = now
            if before.kind == "unwell":
                logger.warning("%s is ready again", self._name)
            return None
        if now - self._ready_at > self._timeout_s:
            return f"was not ready for {self._timeout_s:g} s (--timeout)" + (f", and {message}" if message else "")
        if kind == "unwell" and self._condition != before:
            logger.warning("%s %s", self._name, message)
        return None


def addresses_of(details: Mapping[str, Any]) -> list[str]:
    """Where the proxies of Ray Serve take HTTP.

    Args:
        details: as Ray's ``GET /api/serve/applications`` gives them: ``http_options`` and ``proxies``.

    Returns:
        URLs; several where proxies listen on all addresses of several machines, none where there are no proxies.
    """
    options, proxies = details.get("http_options") or {}, (details.get("proxies") or {}).values()
    host, port = options.get("host"), options.get("port")
    if not host or port is None or not proxies:
        return []
    hosts = [host]
    if _is_everywhere(host):
        serving = [proxy for proxy in proxies if _word(proxy.get("status")) == _SERVES] or list(proxies)
        hosts = sorted({str(proxy["node_ip"]) for proxy in serving if proxy.get("node_ip")}) or hosts
    return [http_url(each, port) for each in hosts]


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False
