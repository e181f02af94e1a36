"""The live page in a browser, before the demo model: it streams, colours, draws, and can be used with keys alone.

SPECMAMBA_PAGE_PICTURES=docs/images makes the pictures of the documentation anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.sampling_params import SamplingParams
from specmamba.server.page import feed as live_feed
from tests.fake_engine import Served, serving, wait_until
from tests.server.test_events import SIZING, WatchedEngine, first, listening

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
EXECUTABLE = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
if EXECUTABLE is None:
    pytest.skip("there is no Chromium: install chromium-headless-shell", allow_module_level=True)

FEATURES = ("gpu", "quic", "background-networking", "component-update", "sync")
ARGUMENTS = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in FEATURES)]
PROMPT = "import os\n\ndef read_file(path):\n    "
SPECULATIVE, PLAIN = '[data-run="speculative"]', '[data-run="plain"]'
SETTINGS = EngineConfig(
    dtype="float32",
    num_threads=1,
    max_running_requests=4,
    max_total_tokens=4096,
    context_length=1024,
    speculative_num_steps=3,
    speculative_eagle_topk=3,
    speculative_num_draft_tokens=8,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch, serving(Engine(SETTINGS)) as served:
        patch.setattr(live_feed, "INTERVAL_S", 0.1)
        patch.setattr(live_feed, "TREE_INTERVAL_S", 0.2)
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=ARGUMENTS)
        yield browser
        browser.close()


class Watch:
    """What a page must not do."""

    def __init__(self, page: Page, url: str) -> None:
        self.wrongs: list[str] = []
        self._url = url
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.wrongs.append(f"exception: {error}"))
        page.on("request", self._note_request)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.wrongs.append(f"console: {message.text}")

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith(f"{self._url}/"):
            self.wrongs.append(f"outside: {request.url}")


@pytest.fixture
def page(server: Served, browser: Browser) -> Iterator[Page]:
    """The page, live, on an empty cache."""
    server.http.post("/flush_cache").raise_for_status()
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        watch = Watch(page, server.url)
        page.goto(server.url)
        page.wait_for_selector(".pill.live")
        yield page
        assert watch.wrongs == []
    wait_until(lambda: not server.engine.has_unfinished_requests)


def run(page: Page, max_tokens: int = 64, name: str = PLAIN) -> None:
    page.fill("#max_tokens", str(max_tokens))
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(f'{name}[data-state="done"]', timeout=60_000)


def sent_to(page: Page, address: str) -> list[Any]:
    """The bodies of the page's requests to an address, from now on."""
    bodies: list[Any] = []

    def note(request: Request) -> None:
        if request.url.endswith(address):
            bodies.append(request.post_data_json)

    page.on("request", note)
    return bodies


def tokens(page: Page, name: str) -> list[dict[str, Any]]:
    script = "all => all.map(t => ({depth: Number(t.dataset.depth), fill: getComputedStyle(t).backgroundColor}))"
    return page.eval_on_selector_all(f"{name} .text .tok", script)


def points(page: Page, chart: str) -> int:
    return int(page.get_attribute(f'[data-chart="{chart}"]', "data-points") or 0)


def sums_of_pixels(page: Page) -> list[int]:
    """Of the charts: how many pixels have something on them."""
    script = """all => all.map(c => c.getContext("2d").getImageData(0, 0, c.width, c.height).data
        .reduce((sum, value, index) => sum + (index % 4 === 3 && value > 0), 0))"""
    return page.eval_on_selector_all(".chart canvas", script)


def picture(page: Page, folder: Path, name: str) -> None:
    kept = os.environ.get("SPECMAMBA_PAGE_PICTURES")
    page.screenshot(path=Path(kept or folder) / f"{name}.png", full_page=True)


def test_a_run_streams_with_accepted_tokens_coloured(page: Page, server: Served) -> None:
    page.evaluate(
        """() => { window.counts = new Set(); new MutationObserver(() =>
            window.counts.add(document.querySelectorAll('[data-run="speculative"] .text .tok').length)
        ).observe(document.body, {childList: true, subtree: true}); }"""
    )
    run(page)
    assert page.evaluate("window.counts.size") > 1  # not all at once; a busy machine shows few steps

    body = {"prompt": PROMPT, "max_tokens": 64, "temperature": 0, "return_tokens": True}
    answer = server.complete(**body).json()["choices"][0]
    shown = tokens(page, SPECULATIVE)
    assert [token["depth"] for token in shown] == [token["depth"] for token in answer["tokens"]]
    text = page.eval_on_selector_all(f"{SPECULATIVE} .text .tok", "all => all.map(t => t.textContent).join('')")
    assert text == answer["text"]

    fills = {depth: {t["fill"] for t in shown if t["depth"] == depth} for depth in range(4)}
    assert fills[0] == {"rgba(0, 0, 0, 0)"}
    assert all(len(fills[depth]) == 1 for depth in range(4))
    assert len(set.union(*fills.values())) == 4  # a colour for each depth
    assert {token["depth"] for token in tokens(page, PLAIN)} == {0}
    assert "the same text token for token" in page.inner_text(".verdict")


def test_everything_moves(page: Page) -> None:
    assert "nothing is cached" in page.inner_text("section:has(#radix-title)").lower()
    before = {name: points(page, name) for name in ("Acceptance length", "Acceptance by depth", "Latency")}
    empty = sums_of_pixels(page)
    run(page)
    page.wait_for_function("count => document.querySelectorAll('.radix-row').length >= count", arg=3)
    for name, count in before.items():
        page.wait_for_function(
            "([name, count]) => Number(document.querySelector(`[data-chart='${name}']`).dataset.points) > count",
            arg=[name, count],
        )
    for _ in range(100):  # a chart is drawn some frames after it has its points
        sums = sums_of_pixels(page)
        if all(now != then for now, then in zip(sums, empty, strict=True)):  # labels of axes give way: not always more
            break
        page.wait_for_timeout(100)
    else:
        raise AssertionError(f"a chart shows nothing new: {empty}, then {sums}")
    assert page.locator(".draft .node.yes").count() >= 1
    assert page.locator(".draft .node.bonus").count() == 1
    accepted = page.locator(".draft .node.yes").count() - 1
    assert f"{accepted} of 7 drafted tokens accepted" in page.inner_text("section:has(#draft-title)")
    page.wait_for_selector(".verdict")
    page.wait_for_function(
        "() => document.querySelectorAll('.radix-row.root').length === 2"
    )  # each run has its own prefixes
    assert "hit" not in page.inner_text(".radix")
    beginnings = page.locator(".radix-row:not(.root) .beginning").all_inner_texts()
    assert beginnings.count("import os↵↵def read_file(path):") == 2
    assert "used" in (page.get_attribute('.bar[aria-label^="KV cache"]', "aria-label") or "")
    page.click("text=← Earlier")
    assert "earlier step" in page.inner_text("#draft-title")


def make_tombstone(engine: Engine) -> None:
    """Evict states until a node inside of the tree has lost its own."""
    cache, states = engine.cache_manager.cache, engine.pools.states
    while not cache.stats.num_tombstones:
        assert cache.evict_states(states.num_free + 1)


def test_it_fits_in_light_and_dark(page: Page, server: Served, tmp_path: Path) -> None:
    run(page)
    for name in ("write_file(path, text)", "read_lines(path)", "write_lines(path, lines)"):
        prompt = f"import os\n\ndef {name}:\n    "
        server.complete(prompt=prompt, max_tokens=24, temperature=0).raise_for_status()
    server.thread.call(make_tombstone).result(60)
    page.wait_for_selector('.radix-row[data-kind="tombstone"]')
    page.evaluate("document.activeElement.blur()")
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "dark"), (390, "light")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=cast("Any", scheme), reduced_motion="reduce")
        page.wait_for_timeout(300)  # charts are drawn anew when their box has changed
        assert page.evaluate("document.documentElement.scrollWidth") == width
        edges = page.eval_on_selector_all(
            ".panel > *, .card > *", "all => all.map(e => e.getBoundingClientRect().right)"
        )
        assert max(edges) <= width
        colours = page.evaluate("['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name])")
        background, ink = (sum(map(int, colour[4:-1].split(","))) for colour in colours)
        assert (background < ink) == (scheme == "dark")
        assert page.evaluate("getComputedStyle(document.querySelector('.pill i')).animationName") == "none"
        picture(page, tmp_path, f"page-{width}-{scheme}")


def test_tiers_below_the_pools(browser: Browser, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(
        update={"hicache_storage_dir": tmp_path / "prefixes", "hicache_write_policy": "write_through"}
    )
    with pytest.MonkeyPatch.context() as patch, serving(Engine(settings)) as served:
        patch.setattr(live_feed, "INTERVAL_S", 0.1)
        patch.setattr(live_feed, "TREE_INTERVAL_S", 0.2)
        with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
            page = context.new_page()
            watch = Watch(page, served.url)
            page.goto(served.url)
            page.wait_for_selector('.tiers [data-tier="disk"]')
            assert "no hits" in page.inner_text(".tiers")
            served.complete(prompt=f"{PROMPT} and a text that is long enough", max_tokens=24, temperature=0)
            page.wait_for_selector(".radix-row.state .facts .tier")
            assert page.inner_text(".radix-row.state .facts .tier") == "disk"
            page.wait_for_function("!document.querySelector('.tiers').textContent.includes(' 0 written')")
            picture(page, tmp_path, "page-tiers")
            assert watch.wrongs == []


CHAT = "Write a function that reads a file.\n\n```python\nimport os\n\ndef read_file(path):\n"


def test_a_chat_with_the_demo(page: Page, server: Served, tmp_path: Path) -> None:
    """Its answers are the same as by the API, token for token."""
    page.click("#tab-chat")
    page.fill("#chat-temperature", "0")
    page.fill("#chat-max_tokens", "64")
    page.check("#chat-colours")
    page.fill("#message", CHAT)
    page.press("#message", "Enter")
    page.wait_for_selector('.message.assistant[data-state="done"]', timeout=60_000)
    body = {"messages": [{"role": "user", "content": CHAT}], "max_tokens": 64, "temperature": 0}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    text = page.eval_on_selector_all(".message .tok", "all => all.map(t => t.textContent).join('')")
    assert text == answer["choices"][0]["message"]["content"]
    figures = page.inner_text(".answer-figures")
    details = answer["usage"]["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert f"{accepted} of {accepted + rejected} drafted tokens accepted" in figures
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "dark"), (390, "light")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=cast("Any", scheme), reduced_motion="reduce")
        page.reload()
        page.wait_for_selector(".pill.live")
        page.wait_for_selector(".message .tok")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        picture(page, tmp_path, f"chat-{width}-{scheme}")


@contextmanager
def sized_page(browser: Browser, width: int = 1280) -> Iterator[tuple[Page, WatchedEngine]]:
    """The page of a server whose drafts follow the load; the engine says what is decided."""
    engine = WatchedEngine()
    engine.sizing = replace(SIZING, num_steps=0, depth=0, gains=(1.0,) * 10, reason="no step yet")
    with serving(engine) as server, browser.new_context(viewport={"width": width, "height": 844}) as context:
        page = context.new_page()
        watch = Watch(page, server.url)
        page.goto(server.url)
        page.wait_for_selector(".sizing")
        yield page, engine
        assert watch.wrongs == []


def test_why_drafts_have_their_size(browser: Browser) -> None:
    with sized_page(browser) as (page, engine):
        assert page.inner_text(".sizing .reason") == "no step yet"
        assert page.inner_text("#sizing-title").strip() == "Size of drafts"
        assert "No draft has been judged yet" in page.inner_text(".sizing")
        figures = page.locator(".sizing .figures dd")
        assert figures.all_inner_texts() == ["–", "–", "–", "–", "0.031"]

        engine.sizing = SIZING
        page.wait_for_selector(".gains")
        assert page.inner_text("#sizing-title").split("\n") == ["Size of drafts", "on, depth 2"]
        assert page.inner_text(".sizing .reason") == SIZING.reason
        rows = [row.split() for row in page.locator(".gains tbody tr").all_inner_texts()]
        # depth 3 is no option, and there are no chains of depth 4
        assert [" ".join(row) for row in rows] == ["1 +21 % +18 %", "2 now +38 % +40 %", "4 -14 % –"]
        assert page.inner_text(".gains [aria-current] th") == "2 now"
        middle = "e => [e.parentElement, e].map(box => box.getBoundingClientRect()).map(b => (b.left + b.right) / 2)"
        for place, is_right in ((".gain", True), (".loss", False)):
            track, bar = page.locator(f".gains {place} i").first.evaluate(middle)
            assert (bar > track) is is_right

        engine.sizing = None
        page.wait_for_selector(".sizing", state="detached")


def test_figures_of_sizes_are_those_of_the_newest_steps(browser: Browser) -> None:
    first_look = replace(SIZING, num_steps=110, num_requests=220, num_nodes=720, predicted_seconds=2.1)
    second = replace(
        SIZING,
        num_steps=150,
        num_plain_steps=45,
        num_probes=7,
        num_requests=300,
        num_nodes=950,
        predicted_seconds=3.0,
        measured_seconds=3.25,
        depth=0,
        reason="off: drafts are predicted to gain +1 % at the best, depth 1, with 2 requests",
    )
    # at 3.5 s the window of two seconds begins at 1 s and ends idle: the figures stay those that it had at 2 s
    looks = [(0, SIZING), (1, first_look), (2, second), (3.5, second)]
    with serving(WatchedEngine()) as server, browser.new_context() as context:
        with listening(server) as events:
            stats = first(events, "stats")
        told = [stats | {"time": time, "sizing": asdict(sizing)} for time, sizing in looks]
        body = "".join(f"event: stats\ndata: {json.dumps(event)}\n\n" for event in told)
        page = context.new_page()
        page.route("**/events", lambda route: route.abort())
        page.route("**/events", lambda route: route.fulfill(body=body, content_type="text/event-stream"), times=1)
        page.goto(server.url)
        page.wait_for_function("() => document.querySelector('#sizing-title')?.innerText.endsWith('off')")
        wanted = ["2.5", "50 %", "6 %", "75 %", "0.031"]
        assert page.locator(".sizing .figures dd").all_inner_texts() == wanted
        assert page.inner_text(".sizing .reason") == second.reason


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sizes_fit_in_light_and_dark(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    with sized_page(browser, width) as (page, engine):
        engine.sizing = SIZING
        page.emulate_media(color_scheme=cast("Any", scheme), reduced_motion="reduce")
        page.wait_for_selector(".gains")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        script = (
            "all => all.map(e => e.getBoundingClientRect().right - e.closest('.halves').getBoundingClientRect().right)"
        )
        assert max(page.eval_on_selector_all(".halves, .halves *", script)) <= 0.5
        page.locator(".sizing").screenshot(path=tmp_path / f"sizing-{width}-{scheme}.png")


def test_a_chosen_theme_stays(page: Page) -> None:
    button = page.locator("header .theme")
    for theme in ("light", "dark"):
        button.click()
        assert page.evaluate("document.documentElement.dataset.theme") == theme
    page.reload()
    page.wait_for_selector(".pill.live")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    button.click()
    assert page.evaluate("document.documentElement.dataset.theme ?? null") is None


def test_with_keys_alone(page: Page) -> None:
    run(page, max_tokens=16)
    page.focus("header .theme")
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        if page.evaluate("document.activeElement === document.body"):
            break
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", seen
        assert page.evaluate(
            "(e => e.labels?.length || e.ariaLabel || e.textContent.trim())(document.activeElement)"
        ), seen
    assert page.evaluate("document.activeElement === document.body"), seen  # nothing holds the focus
    order = [name for name in seen if name in ("prompt", "max_tokens", "temperature", "seed", "compare", "run")]
    assert order == ["prompt", "max_tokens", "temperature", "seed", "compare", "run"]
    page.focus(f"{SPECULATIVE} .text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    assert "token 16, id" in page.inner_text(f"{SPECULATIVE} .tip")


def test_runs_that_are_compared_share_a_drawn_seed_and_no_prefix(page: Page) -> None:
    bodies = sent_to(page, "/v1/completions")
    page.fill("#temperature", "1")
    page.fill("#seed", "")
    texts = []
    for _ in range(2):
        run(page, max_tokens=48)
        verdict = page.locator(".verdict")
        verdict.wait_for()
        # A draw may fall between two borders of the cumulative probabilities that differ in their last bits: at this
        # temperature, one text in a hundred parts. Texts of the same logits are compared at temperature 0.
        assert re.search("the same text token for token|texts part at token", verdict.inner_text())
        speculative, plain = bodies[-2:]
        assert speculative["seed"] == plain["seed"]
        assert f"Seed {plain['seed']} for both" in verdict.inner_text()
        texts.append(page.inner_text(f"{PLAIN} .text"))
    assert len({body["cache_salt"] for body in bodies}) == 4
    assert texts[0] != texts[1]  # a seed for each comparison


def chunks_of(tokens: list[tuple[int, str]]) -> str:
    """A streamed answer that has these tokens."""
    pieces = [{"id": token, "text": text, "depth": 0} for token, text in tokens]
    chunk = {"choices": [{"index": 0, "text": "", "finish_reason": "stop", "tokens": pieces}]}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("dtype", "temperature", "scores", "says"),
    [
        ("bfloat16", "0", [-0.7, -0.9], "token 2: a near tie of “b” (49.7 %) and “c” (40.7 %), which rounding decides"),
        ("float32", "0", [-0.7, -0.9], "not a near tie"),
        ("bfloat16", "0", [-0.1, -3.0], "not a near tie"),
        ("bfloat16", "1", [-0.1, -3.0], "at “b” (90.5 %) and “c” (5.0 %): rounding moves a random choice"),
    ],
)
def test_near_ties_are_told_apart(
    browser: Browser, dtype: str, temperature: str, scores: list[float], says: str
) -> None:
    """Two texts part at their second token; plain decoding gives its two candidates these log probabilities."""
    engine = WatchedEngine()
    engine.describe = lambda: {"model": "fake", "dtype": dtype}  # type: ignore[method-assign]
    asked: list[Any] = []

    def answer(route: Route) -> None:
        body: Any = route.request.post_data_json
        if body.get("echo"):
            asked.append(body)
            choices = [{"logprobs": {"token_logprobs": [None, -1.0, score]}} for score in scores]
            route.fulfill(json={"choices": choices})
        else:
            second = (67, "c") if body.get("speculative") is False else (66, "b")
            route.fulfill(body=chunks_of([(65, "a"), second, (68, "d")]), content_type="text/event-stream")

    with serving(engine) as server, browser.new_context() as context:
        page = context.new_page()
        page.route("**/v1/completions", answer)
        page.goto(server.url)
        page.wait_for_selector(".pill.live")
        page.fill("#temperature", temperature)
        page.fill("#prompt", "xy")
        page.click("#run")
        page.wait_for_function("() => document.querySelector('.verdict')?.textContent.includes('%')")
        assert says in page.inner_text(".verdict")
        assert asked[0]["prompt"] == [[*b"xy", 65, 66], [*b"xy", 65, 67]]


def test_candidates_are_scored_by_the_server(page: Page, server: Served) -> None:
    """The log probabilities with which a parting is judged are those that the server lists for the same tokens."""
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "return_tokens": True, "logprobs": 1}
    answer = server.complete(**body).json()["choices"][0]
    script = """async ([prompt, tokens]) => {
        const { scoreParting } = await import("/page/comparison.js");
        const run = (last) => ({ prompt, tokens: [...tokens.slice(0, 2), last] });
        return await scoreParting(run(tokens[2]), run({ id: tokens[2].id + 1 }));
    }"""
    scores = page.evaluate(script, [PROMPT, answer["tokens"]])
    assert scores[0] == pytest.approx(answer["logprobs"]["token_logprobs"][2], abs=1e-4)
    assert scores[1] < scores[0]


def test_an_answer_is_seen_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("scrollTo(0, 0)")
    run(page, max_tokens=32)
    page.wait_for_selector(".verdict")
    within = "e => { const box = e.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight }"
    for shown in (f"{SPECULATIVE} .text", ".verdict"):
        page.wait_for_function(f"selector => ({within})(document.querySelector(selector))", arg=shown)


def test_prompt_and_settings_stay(page: Page) -> None:
    for name, value in (("prompt", "class Kept:"), ("max_tokens", "7"), ("temperature", "0.5"), ("seed", "11")):
        page.fill(f"#{name}", value)
    page.uncheck("#compare")
    page.reload()
    page.wait_for_selector(".pill.live")
    names = ("prompt", "max_tokens", "temperature", "seed")
    assert [page.input_value(f"#{name}") for name in names] == ["class Kept:", "7", "0.5", "11"]
    assert not page.is_checked("#compare")
    page.evaluate('localStorage.setItem(\'specmamba-playground\', \'{"prompt": 3, "compare": "x", "seed": "5"}\')')
    page.reload()
    page.wait_for_selector(".pill.live")
    assert page.input_value("#prompt").startswith("import os")  # what is broken is left out
    assert page.input_value("#seed") == "5"
    assert page.is_checked("#compare")


def test_a_run_can_be_cancelled(page: Page, server: Served) -> None:
    page.fill("#max_tokens", "1000")
    page.click("#run")
    page.wait_for_selector(f'{SPECULATIVE}[data-state="running"] .tok')
    page.click("#cancel")
    page.wait_for_selector(f'{SPECULATIVE}[data-state="cancelled"]')
    page.wait_for_selector(f'{PLAIN}[data-state="cancelled"]')
    wait_until(lambda: not server.engine.has_unfinished_requests)
    assert page.is_enabled("#run")


def test_errors_of_the_api_are_shown(server: Served, browser: Browser) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        page.fill("#prompt", "")
        page.click("#run")
        page.wait_for_selector(f'{SPECULATIVE}[data-state="failed"]')
        answer = server.complete(prompt="").json()
        assert page.locator(".error").all_inner_texts() == [answer["error"]["message"]]
        assert page.get_attribute(PLAIN, "data-state") == "skipped"


def test_it_comes_back_by_itself(server: Served, browser: Browser) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.route("**/events", lambda route: route.abort())
        page.goto(server.url)
        page.wait_for_selector(".pill.lost")
        assert "does not answer" in page.inner_text(".notice")
        page.unroute("**/events")
        page.wait_for_selector(".pill.live")
        assert page.locator(".notice").count() == 0


def test_the_key_is_asked_for(browser: Browser) -> None:
    with serving(WatchedEngine(), api_key="secret") as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        for key, state in (("wrong", ".pill.key"), ("secret", ".pill.live")):
            page.fill("#key", key)
            page.press("#key", "Enter")
            page.wait_for_selector(state)
        page.reload()
        page.wait_for_selector(".pill.live")
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_records_in_the_speculation_buffers_are_counted(server: Served) -> None:
    def check(engine: Engine) -> None:
        engine.add_request("counted", engine.tokenizer.encode(PROMPT), SamplingParams(max_tokens=32, temperature=0.0))
        records: Any = engine.pools.state_buffers
        for _ in range(3):
            engine.step()
            pending = sum(len(records.positions(row)) - 1 for row in records._leases)
            assert records.num_pending == pending
        assert 0 < pending <= records.num_records == 4 * records.capacity
        engine.abort("counted")
        assert records.num_pending == 0

    server.thread.call(check).result(30)
