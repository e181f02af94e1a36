"""The chat of the live page in a browser: it streams, keeps, changes and exports conversations, with keys alone too."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fake_engine import Served, serving
from tests.server.page.test_page import ARGUMENTS, EXECUTABLE, Watch, sent_to, sync_api  # skips without a browser
from tests.server.test_events import WatchedEngine

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

ANSWER = """# Two *ways*

Use **`sorted`**, or see [the page](https://example.org/a_(b)):

```python
def main(): ...
```

1. one
   - inner
2. two
"""
DONE = '.message.assistant[data-state="done"]'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(WatchedEngine(text=ANSWER, chunk=3, context_length=8000)) as served:
        yield served


@contextmanager
def chatting(browser: Browser, server: Served, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    """The chat of a new visitor. The page must not complain."""
    size: Any = {"width": width, "height": 844}
    theme: Any = scheme
    with browser.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce") as context:
        page = context.new_page()
        watch = Watch(page, server.url)
        page.goto(f"{server.url}/#chat")
        page.wait_for_selector(".pill.live")
        yield page
        assert watch.wrongs == []


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    server.engine.text, server.engine.step_s = ANSWER.encode(), 0.0
    with chatting(browser, server) as page:
        yield page


@pytest.fixture(scope="module")
def still(browser: Browser, server: Served) -> Iterator[Page]:
    """A page whose modules are called directly: it is loaded once for all tests."""
    with chatting(browser, server) as page:
        yield page


def say(page: Page, text: str, state: str = "done") -> None:
    """Send a message and wait for the end of its answer."""
    count = page.locator(".message").count()
    page.fill("#message", text)
    page.press("#message", "Enter")
    page.wait_for_function("count => document.querySelectorAll('.message').length === count", arg=count + 2)
    page.wait_for_selector(f'.message.assistant[data-state="{state}"] >> nth=-1')
    page.wait_for_selector("#chat-send")


def said(page: Page) -> list[str]:
    return page.locator(".asked").all_inner_texts()


def streamed(*deltas: dict[str, Any], error: str | None = None) -> dict[str, Any]:
    """An answer of a server, as ``Route.fulfill`` takes it."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks += [] if error is None else [{"error": {"message": error}}]
    events = [*map(json.dumps, chunks), "[DONE]"]
    return {"body": "".join(f"data: {event}\n\n" for event in events), "content_type": "text/event-stream"}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_a_conversation(browser: Browser, server: Served, tmp_path: Path, width: int, scheme: str) -> None:
    server.engine.text, server.engine.step_s = ANSWER.encode(), 0.0
    with chatting(browser, server, width, scheme) as page:
        bodies = sent_to(page, "/v1/chat/completions")
        for text in ("first\n  question", "second"):
            say(page, text)
        assert [message["content"] for message in bodies[1]["messages"]] == ["first\n  question", ANSWER, "second"]
        assert page.inner_text(f"{DONE} >> nth=0 >> h3") == "Two ways"
        assert page.get_attribute(f"{DONE} a >> nth=0", "href") == "https://example.org/a_(b)"
        figures = page.inner_text(".answer-figures >> nth=-1")
        for figure in (f"{len(ANSWER)} tokens", "tokens/s", "3.00 tokens/step", "drafted tokens accepted", "cached"):
            assert figure in figures
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        for seen in (".answer-figures >> nth=-1", "#message"):  # the newest answer and the field, without scrolling
            box = page.locator(seen).bounding_box()
            assert box is not None
            assert 0 <= box["y"] < box["y"] + box["height"] <= 844
        ink, ground = (
            page.evaluate(f"getComputedStyle(document.querySelector('{place}')).{name}")
            for place, name in ((".prose", "color"), (".chat", "backgroundColor"))
        )
        brightness = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, ground)]
        assert (brightness[0] > brightness[1]) == (scheme == "dark")
        page.screenshot(path=tmp_path / f"chat-{width}-{scheme}.png")


def test_with_keys_alone(page: Page) -> None:
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")  # from the last to the first
    assert page.evaluate("document.activeElement.id") == "tab-playground"
    assert page.is_visible("#panel-playground")
    assert page.is_hidden("#panel-chat")
    page.keyboard.press("End")
    assert page.get_attribute("#tab-chat", "aria-selected") == "true"
    assert page.get_attribute("#tab-playground", "tabindex") == "-1"
    for role, name in (("tab", "Chat"), ("tabpanel", "Chat"), ("log", "Conversation"), ("textbox", "Message")):
        assert page.get_by_role(role, name=name, exact=True).is_visible()  # type: ignore[arg-type]

    page.focus("#message")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(DONE)
    assert said(page) == ["one\ntwo"]
    assert page.evaluate("document.activeElement.id") == "message"

    page.focus("#tab-chat")
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        seen.append(page.evaluate("(e => e.id || e.ariaLabel || e.textContent.trim())(document.activeElement)"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", seen
        named = "(e => e.labels?.length || e.ariaLabel || e.textContent.trim())(document.activeElement)"
        assert page.evaluate(named), seen
    order = ["chat-select", "chat-system", "chat-temperature", "chat-seed", "Conversation", "Edit the message"]
    places = [seen.index(name) for name in [*order, "Copy code", "Copy the answer", "Regenerate", "message"]]
    assert places == sorted(places), seen


def test_a_reload_keeps_chats_and_settings(page: Page) -> None:
    page.fill("#chat-system", "be brief")
    page.fill("#chat-temperature", "0.5")
    page.fill("#chat-top_p", "0.9")
    page.fill("#chat-seed", "4")
    page.uncheck("#chat-speculative")
    bodies = sent_to(page, "/v1/chat/completions")
    say(page, "kept")
    expected = {"temperature": 0.5, "top_p": 0.9, "seed": 4, "max_tokens": 512, "speculative": False}
    assert bodies[0].items() >= expected.items()
    assert bodies[0]["messages"][0] == {"role": "system", "content": "be brief"}
    figures = page.inner_text(".answer-figures")
    page.click("#chat-new")
    page.wait_for_selector(".log .empty")
    say(page, "another")
    assert bodies[1]["messages"][0]["content"] == "be brief"
    assert said(page) == ["another"]

    page.reload()
    page.wait_for_selector(".pill.live")
    assert said(page) == ["another"]
    assert page.input_value("#chat-temperature") == "0.5"
    assert not page.is_checked("#chat-speculative")
    page.select_option("#chat-select", label="kept")
    assert said(page) == ["kept"]
    assert page.inner_text(".answer-figures") == figures
    assert page.inner_text(f"{DONE} h3") == "Two ways"

    page.on("dialog", lambda dialog: dialog.accept())
    page.click("text=Delete")
    assert said(page) == ["another"]
    page.reload()
    page.wait_for_selector(".pill.live")
    assert page.locator("#chat-select option").all_inner_texts() == ["another"]


def test_stop_then_regenerate(page: Page, server: Served) -> None:
    server.engine.step_s = 0.05
    page.fill("#message", "long")
    page.press("#message", "Enter")
    page.wait_for_selector(".message.assistant .prose h3")
    assert page.get_attribute(".message.assistant", "aria-busy") == "true"
    page.click("#chat-stop")
    page.wait_for_selector('.message.assistant[data-state="cancelled"]')
    assert "Stopped." in page.inner_text(".message.assistant")
    part = page.inner_text(".message.assistant .prose")
    server.engine.step_s = 0.0
    page.click("text=Regenerate")
    page.wait_for_selector(DONE)
    assert len(page.inner_text(".message.assistant .prose")) > len(part)
    assert page.locator(".message").count() == 2


def test_what_was_streamed_survives_a_reload(page: Page, server: Served) -> None:
    server.engine.step_s = 0.05
    page.fill("#message", "long")
    page.press("#message", "Enter")
    page.wait_for_selector(".message.assistant .prose h3")
    page.reload()
    page.wait_for_selector('.message.assistant[data-state="cancelled"] h3')
    assert said(page) == ["long"]


def test_an_edit_replaces_what_follows(page: Page) -> None:
    bodies = sent_to(page, "/v1/chat/completions")
    for text in ("one", "two"):
        say(page, text)
    page.click("text=Edit >> nth=0")
    assert page.evaluate("document.activeElement.ariaLabel") == "Edit the message"
    page.keyboard.press("Escape")
    assert said(page) == ["one", "two"]
    page.click("text=Edit >> nth=0")
    page.keyboard.press("End")
    page.keyboard.type(" more")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.message').length === 2")
    page.wait_for_selector(DONE)
    assert said(page) == ["one more"]
    assert [message["content"] for message in bodies[-1]["messages"]] == ["one more"]


def test_copies_and_exports(page: Page, server: Served) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.fill("#chat-system", "be brief")
    say(page, "hello")
    for button, text in (("Copy the answer", ANSWER), ("Copy code", "def main(): ..."), ("Copy the message", "hello")):
        page.get_by_role("button", name=button, exact=True).click()
        page.wait_for_function("text => navigator.clipboard.readText().then(copied => copied === text)", arg=text)

    files = {}
    for name in ("JSON", "Markdown"):
        with page.expect_download() as saved:
            page.click(f"text=Export {name}")
        files[saved.value.suggested_filename.rpartition(".")[2]] = Path(saved.value.path()).read_text()
    exported = json.loads(files["json"])
    assert [message["role"] for message in exported["messages"]] == ["system", "user", "assistant"]
    answer = exported["messages"][2]
    assert (answer["content"], answer["figures"]["tokens"]) == (ANSWER, len(ANSWER))
    assert answer["usage"]["completion_tokens"] == len(ANSWER)
    assert exported["model"] == "specmamba-demo"
    assert files["md"].startswith(
        "# hello\n\n## System\n\nbe brief\n\n## User\n\nhello\n\n## Assistant\n\n# Two *ways*"
    )


def test_tokens_are_coloured_on_request(page: Page) -> None:
    say(page, "colours")
    assert page.locator(".message .tok").count() == 0
    page.check("#chat-colours")
    page.wait_for_selector(".message .tok")
    depths = page.eval_on_selector_all(".message .tok", "all => all.map(t => Number(t.dataset.depth))")
    assert len(depths) == len(ANSWER)
    assert set(depths) == {0, 1, 2}
    assert page.locator(".chat-main .legend li").count() == 3
    page.reload()  # colours are kept, and the depths of tokens too
    page.wait_for_selector(".message .tok")
    kept = page.eval_on_selector_all(".message .tok", "all => all.map(t => Number(t.dataset.depth))")
    assert kept == depths


def test_an_error_is_shown_once_and_can_be_retried(browser: Browser, server: Served) -> None:
    server.engine.text = ANSWER.encode()
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{server.url}/#chat")
        page.fill("#chat-temperature", "-1")
        say(page, "too cold", state="failed")
        message = server.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "temperature": -1.0}
        ).json()["error"]["message"]
        assert page.get_by_text(message).count() == 1
        page.fill("#chat-temperature", "")
        page.click("text=Retry")
        page.wait_for_selector(DONE)
        assert page.locator(".error").count() == 0
        assert said(page) == ["too cold"]


def test_an_error_in_the_middle_keeps_what_came(page: Page) -> None:
    answers = [streamed({"content": "half"}, error="the engine has failed"), streamed({"content": "whole"})]
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answers.pop(0)))
    say(page, "break", state="failed")
    assert page.inner_text(".message.assistant .prose") == "half"
    assert page.get_by_text("the engine has failed").count() == 1
    page.click("text=Retry")
    page.wait_for_selector(DONE)
    assert page.inner_text(".message.assistant .prose") == "whole"


def test_reasoning_is_folded(page: Page) -> None:
    deltas = [
        {"role": "assistant"},
        {"reasoning_content": "let me "},
        {"reasoning_content": "think"},
        {"content": "42"},
    ]
    bodies: list[Any] = []

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(**streamed(*deltas))

    page.route("**/v1/chat/completions", answer)
    say(page, "why?")
    details = page.locator(".reasoning")
    assert details.locator("summary").inner_text() == "Reasoning 3 words"
    assert not details.evaluate("element => element.open")
    details.locator("summary").press("Enter")
    assert details.locator(".prose").inner_text() == "let me think"
    assert page.inner_text(".message.assistant > .prose") == "42"
    page.reload()
    page.wait_for_selector(".reasoning")
    say(page, "and?")
    assert [message["content"] for message in bodies[1]["messages"]] == ["why?", "42", "and?"]


def test_the_key_is_asked_for_and_kept_out_of_chats(browser: Browser) -> None:
    with serving(WatchedEngine(text="ok"), api_key="secret") as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{server.url}/#chat")
        page.wait_for_selector(".pill.key")
        say(page, "hello", state="failed")
        assert page.locator(".error [role=alert]").all_inner_texts() == ["The server asks for its API key."]
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector(".pill.live")
        page.click("text=Retry")
        page.wait_for_selector(DONE)
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_the_oldest_chats_make_room(still: Page) -> None:
    script = """async ([count, size]) => {
        const { newChat, saveChat, loadChats } = await import("/page/chat/chats.js");
        localStorage.clear();
        let chats = [];
        for (let index = 0; index < count; index += 1) {
            const chat = { ...newChat(), changed: index };
            chat.messages.push({ role: "user", content: `${index} `.padEnd(size, "x") });
            chats.push(chat);
            const { removed, isSaved } = saveChat(chat, chats);
            if (!isSaved) return "no room";
            chats = chats.filter((other) => !removed.includes(other));
        }
        return loadChats().map(({ messages }) => Number(messages[0].content.split(" ")[0]));
    }"""
    assert still.evaluate(script, [40, 10]) == [*range(39, 9, -1)]
    assert still.evaluate(script, [8, 900_000]) == [7, 6, 5]
    assert still.evaluate(script, [1, 9_000_000]) == "no room"
    still.evaluate("localStorage.clear()")


def test_a_chat_that_is_too_large_takes_no_room_of_others(still: Page) -> None:
    script = """async (size) => {
        const { newChat, saveChat, loadChats } = await import("/page/chat/chats.js");
        localStorage.clear();
        const chats = [0, 1, 2].map((changed) => ({ ...newChat(), changed }));
        for (const chat of chats) {
            chat.messages.push({ role: "user", content: chat.changed === 2 ? "x".repeat(size) : "small" });
            var saved = saveChat(chat, chats);
        }
        return [saved.isSaved, saved.removed.length, loadChats().length];
    }"""
    assert still.evaluate(script, 3_100_000) == [False, 0, 2]
    still.evaluate("localStorage.clear()")


def test_broken_storage_is_left_out(page: Page) -> None:
    page.evaluate(
        """() => {
            const role = "assistant";
            const wrong = [null, 3, { role: "system", content: "x" }, { role: "user" }, { role, content: 1 }];
            const right = { role, content: "right", tokens: [[1, "a", 2], ["x"], null], usage: "x", state: 7 };
            localStorage.setItem("specmamba-chat-a", "{");
            localStorage.setItem("specmamba-chat-b", '{"messages": {}}');
            localStorage.setItem("specmamba-chat-c", JSON.stringify({ messages: [...wrong, right] }));
            localStorage.setItem("specmamba-chat", '{"temperature": 3, "seed": "9", "speculative": "no"}');
        }"""
    )
    page.reload()
    page.wait_for_selector(".pill.live")
    assert page.locator(".message").all_inner_texts()[0].startswith("right")
    assert page.input_value("#chat-seed") == "9"
    assert page.is_checked("#chat-speculative")


# ---- Markdown --------------------------------------------------------------------------------------------------------

SHOW = """async (texts) => {
    const { html, render } = await import("/page/ui.js");
    const { Prose } = await import("/page/chat/prose.js");
    return texts.map((text) => {
        const box = document.createElement("div");
        render(html`<${Prose} text=${text} />`, box);
        const all = [...box.querySelectorAll("*")].filter((e) => !e.closest(".code-head"));
        const named = (e) => Object.fromEntries([...e.attributes].map((a) => [a.name, a.value]));
        const elements = all.map((e) => [e.localName, named(e)]);
        return { markup: box.firstChild.innerHTML, text: box.textContent, elements };
    });
}"""
ELEMENTS = {"div", "p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "pre", "code", "strong", "em", "s", "a", "hr"} | {
    "blockquote",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
}
ATTRIBUTES = {"class", "href", "title", "target", "rel", "start", "tabindex", "role", "aria-label"}
LINK = '<a href="{0}" title="{0}" target="_blank" rel="noopener noreferrer nofollow">{1}</a>'


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
        ("# one\n###### six ##", "<h3>one</h3><h6>six</h6>"),
        ("#no heading", "<p>#no heading</p>"),
        ("**b** *i* _j_ ~~s~~ `c`", "<p><strong>b</strong> <em>i</em> <em>j</em> <s>s</s> <code>c</code></p>"),
        ("***both*** **b *i***", "<p><strong><em>both</em></strong> <strong>b <em>i</em></strong></p>"),
        ("__init__ snake_case_name 2 * 3 * 4", "<p>__init__ snake_case_name 2 * 3 * 4</p>"),
        ("``a`b`` \\*x\\* `", "<p><code>a`b</code> *x* `</p>"),
        ("- a\n  - b\n- c", "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ul>"),
        ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        (
            "see https://a.example/x(y).",
            "<p>see " + LINK.format("https://a.example/x(y)", "https://a.example/x(y)") + ".</p>",
        ),
        (
            "[**a**](http://a.example/ 't')",
            "<p>[<strong>a</strong>](" + LINK.format("http://a.example/", "http://a.example/") + " 't')</p>",
        ),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("[a](//a.example) [b](data:text/html,x)", "<p>[a](//a.example) [b](data:text/html,x)</p>"),
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
        ("![a](https://a.example/i.png)", "<p>" + LINK.format("https://a.example/i.png", "a") + "</p>"),
    ],
)
def test_markdown(still: Page, text: str, markup: str) -> None:
    assert still.evaluate(SHOW, [text])[0]["markup"] == markup


def test_code_is_shown_as_it_is(still: Page) -> None:
    code = "<b>&amp;</b>\n\n  **x** `y`\n~~~\n# z"
    for text in (f"```html\n{code}\n```\nend", f"```html\n{code}"):  # complete, and while it is streamed
        shown = still.evaluate(SHOW, [text])[0]
        assert [name for name, _ in shown["elements"]][:3] == ["div", "div", "pre"]
        assert code in shown["text"]


def test_answers_contain_no_markup_of_their_own(still: Page) -> None:
    """Random pieces of Markdown and HTML: only known elements and attributes come of them, and links to the web."""
    pieces = [
        *(
            "<script>alert(1)</script>",
            "<img src=x onerror=alert(1)>",
            "<a href='javascript:alert(1)'>",
            "<svg/onload=1>",
        ),
        *(
            "[x](javascript:alert`1`)",
            "[x](  javascript:1)",
            "[x](JaVaScRiPt:1)",
            "[x](java\tscript:1)",
            "<javascript:1>",
        ),
        *("[x](data:text/html;base64,PHN2Zz4=)", "[x](vbscript:1)", "[x](file:///etc/passwd)", "[x](blob:http://a/b)"),
        *("https://a.example/", '<https://a.example/?q=">', "](", "[", ")", "![", "http:", "\x00", "\u202e", "\ud800"),
        *(
            "**",
            "*",
            "_",
            "~~",
            "`",
            "```",
            "~~~",
            "# ",
            "> ",
            "- ",
            "1. ",
            "|",
            "|-|-|",
            "\n",
            "\n\n",
            "    ",
            "\t",
            "\\",
        ),
        *(
            "a",
            "b c",
            "&lt;",
            "&#106;avascript:",
            "{{x}}",
            "${x}",
            "__proto__",
            "constructor",
            '" onclick="alert(1)',
            "'",
        ),
    ]
    draw = random.Random(21)
    texts = ["".join(draw.choices(pieces, k=draw.randint(1, 60))) for _ in range(1500)]
    still.evaluate("() => { window.alert = () => { window.wasRun = true } }")
    for text, shown in zip(texts, still.evaluate(SHOW, texts), strict=True):
        for name, attributes in shown["elements"]:
            assert name in ELEMENTS, text
            assert attributes.keys() <= ATTRIBUTES, text
            if "href" in attributes:
                assert attributes["href"].startswith(("http://", "https://")), text
    assert still.evaluate("window.wasRun ?? null") is None


def test_hostile_answers_take_no_time(still: Page) -> None:
    patterns = [
        "*a ",
        "**a",
        "_a ",
        "`",
        "`a``b",
        "[",
        "![",
        "[a](b(",
        "[a](http://x",
        "<https:",
        "- ",
        "> ",
        "> - ",
        "http://",
    ]
    texts = [
        pattern * (60_000 // len(pattern))
        for pattern in [*patterns, "|a", "***a", "- a\n", "1. a\n\n", "# ", "\\", "~~a"]
    ]
    script = """async (texts) => {
        const { parseMarkdown } = await import("/page/chat/markdown.js");
        const timed = (start) => performance.now() - start;
        return texts.map((text) => { const start = performance.now(); parseMarkdown(text); return timed(start) });
    }"""
    times = still.evaluate(script, texts)
    assert max(times) < 2000, dict(zip(texts, times, strict=True))
