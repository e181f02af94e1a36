"""Web pages of other servers in a browser: none of them reads anything here, starts anything or flushes anything."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.fake_engine import Served, serving
from tests.server.page.test_page import ARGUMENTS, EXECUTABLE, sync_api  # skips this file where there is no browser
from tests.server.test_events import WatchedEngine

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

EVIL = "evil.example"
BODY = '{"prompt": "x", "max_tokens": 1}'

# What a page learns of an address: its status and text, or "refused".
FETCH = """async ([url, options]) => {
    try { const answer = await fetch(url, options); return [answer.type, answer.status, await answer.text()] }
    catch (error) { return "refused" }
}"""
ELEMENT = """([name, url]) => new Promise(resolve => {
    const element = document.createElement(name)
    element.onload = () => resolve("loaded"); element.onerror = () => resolve("refused")
    element.src = url; document.body.append(element)
})"""
EVENTS = """url => new Promise(resolve => {
    const events = new EventSource(url)
    events.onerror = () => { events.close(); resolve("refused") }
    events.addEventListener("hello", event => { events.close(); resolve(event.data) })
})"""
FORM = """([url, type]) => {
    const form = document.createElement("form")
    form.method = "post"; form.action = url; form.enctype = type
    const field = document.createElement("input")
    field.name = '{"prompt": "x", "max_tokens": 1, "user": "'; field.value = '"}'
    form.append(field); document.body.append(form); form.submit()
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    rules = f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=[*ARGUMENTS, rules])
        yield browser
        browser.close()


@pytest.fixture
def served(browser: Browser) -> Iterator[Served]:
    """A server that no page of the test may have touched, and whose own page works before and after."""
    with serving(WatchedEngine()) as server:
        yield server
        assert (server.engine.num_flushed, server.engine.seen_params, server.engine.watching) == (0, [], [])
        check_own_page(browser, server)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context() as context:
        yield context


class _ForeignSite(BaseHTTPRequestHandler):
    """A site of one empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>foreign</title><body>")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def foreign() -> Iterator[str]:
    """The address of a site on another port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _ForeignSite) as site:
        runner = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.02})
        runner.start()
        yield f"http://127.0.0.1:{site.server_port}/"
        site.shutdown()
        runner.join(10)


def check_own_page(browser: Browser, server: Served) -> None:
    """The own page gets events, completes a prompt, and may flush the cache: what foreign pages tried does work."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector(".pill.live")
        assert '"model"' in page.evaluate(EVENTS, "/events")
        posted = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": BODY}
        assert page.evaluate(FETCH, ["/v1/completions", posted])[1] == 200
        assert page.evaluate(FETCH, ["/flush_cache", {"method": "POST"}])[1] == 200
    assert (server.engine.num_flushed, len(server.engine.seen_params)) == (1, 1)


def statuses(served: Served, caplog: pytest.LogCaptureFixture) -> list[int]:
    """Of the calls that have come to the server: a browser does not show what it withholds from a page."""
    served.wait_for_calls()
    return [record.fields["status"] for record in caplog.records if hasattr(record, "fields")]


def test_a_name_that_points_here_is_refused(served: Served, context: BrowserContext) -> None:
    """DNS rebinding: to the browser it is one origin, so only the name in ``Host`` tells the page apart."""
    url = served.url.replace("127.0.0.1", EVIL)
    page = context.new_page()
    opened = page.goto(f"{url}/")
    assert opened is not None
    assert (opened.status, "host_not_allowed" in opened.text()) == (421, True)
    posted = {"method": "POST", "headers": {"Content-Type": "application/json"}, "body": BODY}
    for path, options in (("/v1/completions", posted), ("/flush_cache", {"method": "POST"}), ("/v1/models", {})):
        kind, status, text = page.evaluate(FETCH, [path, options])
        assert (kind, status) == ("basic", 421), path  # the page can read it, so it must hold nothing
        assert "host_not_allowed" in text
    assert page.evaluate(FETCH, ["/events", {}])[1] == 421
    assert page.evaluate(EVENTS, "/events") == "refused"


def test_fetches_of_another_origin_are_refused(
    served: Served, context: BrowserContext, foreign: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    page = context.new_page()
    page.goto(foreign)
    as_json, as_text = ({"Content-Type": kind} for kind in ("application/json", "text/plain"))
    posts: list[dict[str, Any]] = [
        {"method": "POST", "headers": headers, "body": BODY} for headers in (as_json, as_text)
    ]
    for path in ("/v1/completions", "/flush_cache", "/v1/models", "/events", "/metrics", "/"):
        for options in (*posts, {"method": "POST"}, {"method": "GET"}):
            assert page.evaluate(FETCH, [served.url + path, options]) == "refused", path
            blind = page.evaluate(FETCH, [served.url + path, {**options, "mode": "no-cors"}])
            assert blind in ("refused", ["opaque", 0, ""]), path
    seen = statuses(served, caplog)
    assert len(seen) >= 48
    assert set(seen) == {403}


@pytest.mark.parametrize("path", ["/v1/models", "/events", "/metrics", "/page/icon.svg"])
def test_elements_and_events_of_another_origin_are_refused(
    served: Served, context: BrowserContext, foreign: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    page = context.new_page()
    page.goto(foreign)
    for name in ("img", "script"):
        assert page.evaluate(ELEMENT, [name, served.url + path]) == "refused"
    assert page.evaluate(EVENTS, served.url + path) == "refused"
    assert statuses(served, caplog) == [403] * 3


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "multipart/form-data", "text/plain"])
@pytest.mark.parametrize("path", ["/flush_cache", "/v1/completions"])
def test_forms_of_another_origin_are_refused(
    served: Served, context: BrowserContext, foreign: str, path: str, kind: str
) -> None:
    page = context.new_page()
    page.goto(foreign)
    with page.expect_response(served.url + path) as answer:
        page.evaluate(FORM, [served.url + path, kind])
    assert answer.value.status == 403


def test_the_own_page_is_not_shown_in_a_frame(served: Served, context: BrowserContext, foreign: str) -> None:
    page = context.new_page()
    page.goto(foreign)
    assert page.evaluate(ELEMENT, ["iframe", f"{served.url}/"]) == "loaded"  # with the browser's own error page
    assert page.frames[1].url.startswith("chrome-error:")
