"""Which hosts and origins a server answers: requests that a web page of another server has started are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specmamba.errors import ConfigError
from specmamba.flags.command_line import parse_command_line
from specmamba.server.http.callers import host_name, is_loopback
from specmamba.server.http.guards import CheckHost
from specmamba.server_config import ServerConfig
from tests.fake_engine import Served, serving

EVIL = "http://evil.example"
PATHS = ("/", "/health", "/metrics", "/v1/models", "/cache", "/events", "/server_info", "/openapi.json")


def verdict(host: str, bound: str = "127.0.0.1", allowed: tuple[str, ...] = ()) -> bool:
    async def app(*_: Any) -> None: ...

    return CheckHost(app, bound, allowed)._allows(host)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "specmamba.localhost",
            "127.0.0.1",
            "127.1.2.3:30000",
            "[::1]:1",
        ),
        "[::1]",
    ],
)
def test_loopback_names_are_always_answered(host: str) -> None:
    assert verdict(host)
    assert verdict(host, bound="192.0.2.7")


@pytest.mark.parametrize(
    ("host", "bound", "allowed", "expected"),
    [
        ("evil.example", "127.0.0.1", (), False),
        ("127.0.0.1.evil.example", "127.0.0.1", (), False),
        ("localhost.evil.example", "127.0.0.1", (), False),
        ("evil.example:30000", "0.0.0.0", (), False),
        ("192.0.2.7", "127.0.0.1", (), False),
        ("192.0.2.7:80", "192.0.2.7", (), True),
        ("192.0.2.7:80", "", (), True),
        ("192.0.2.7:80", "0.0.0.0", (), True),  # an address is no name that a page could point here
        ("[2001:db8::7]:80", "::", (), True),
        ("[2001:db8::7]:80", "2001:DB8::7", (), True),
        ("llm.internal:8000", "llm.internal", (), True),
        ("api.example.com", "127.0.0.1", ("api.example.com",), True),
        ("API.example.com:443", "127.0.0.1", ("api.example.com",), True),
        ("a.b.example.com", "127.0.0.1", ("*.example.com",), True),
        ("example.com", "127.0.0.1", ("*.example.com",), False),
        ("evilexample.com", "127.0.0.1", ("*.example.com",), False),
        ("anything at all", "127.0.0.1", ("*",), True),
        ("anything at all", "127.0.0.1", ("api.example.com",), False),
        ("", "127.0.0.1", (), False),
        ("localhost:x", "127.0.0.1", (), False),
        ("user@localhost", "127.0.0.1", (), False),
    ],
)
def test_hosts(host: str, bound: str, allowed: tuple[str, ...], expected: bool) -> None:
    assert verdict(host, bound, allowed) is expected


def test_names_in_host_headers() -> None:
    assert [host_name(host) for host in ("A:1", "[::1]:2", "a b", "[::1", "a:123456")] == ["a", "::1", None, None, None]
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("192.0.2.7")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_a_page_that_points_its_own_name_here_is_refused(served: Served, path: str) -> None:
    """DNS rebinding: Host and Origin are equal, and both are the page's."""
    answer = served.http.get(path, headers={"Host": "evil.example", "Origin": EVIL})
    assert answer.status_code == 421
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-hosts" in answer.json()["error"]["message"]
    for name in ("/flush_cache", "/v1/completions"):
        posted = served.http.post(name, json={"prompt": "x"}, headers={"Host": "evil.example", "Origin": EVIL})
        assert posted.status_code == 421
    assert not served.engine.num_flushed
    assert not served.engine.seen_params


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},  # another port of this machine
    ],
)
def test_pages_of_other_origins_are_refused_everywhere(served: Served, path: str, headers: dict[str, str]) -> None:
    answer = served.http.get(path, headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"


def test_links_and_the_own_page_are_answered(served: Served) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    for headers in (link, own, own | {"Origin": served.url}, {"Sec-Fetch-Site": "none"}, {}):
        assert served.http.get("/", headers=headers).status_code == 200
        assert served.http.get("/v1/models", headers=headers).status_code == 200


def test_a_name_that_is_allowed(no_settings_from_outside: None) -> None:
    config = parse_command_line(
        ServerConfig, "specmamba serve", ["--allowed-hosts", "A.example", "--allowed-hosts=*.b.example"]
    )
    assert config.allowed_hosts == ("a.example", "*.b.example")
    with serving(allowed_hosts=("a.example",)) as served:
        headers = {"Host": "a.example", "Origin": "https://a.example"}
        assert served.http.get("/v1/models", headers=headers).status_code == 200
    for wrong in ("http://a.example", "a.example:80", "a.*", "", "ä.example"):
        with pytest.raises(ConfigError, match=r"--allowed-hosts: a host is written like"):
            parse_command_line(ServerConfig, "specmamba serve", ["--allowed-hosts", wrong])
