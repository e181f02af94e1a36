"""The files of the live page over HTTP: they refer to each other only, and no other file is served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import specmamba.server
from specmamba.server.page.routes import load_files
from tests.fake_engine import Served, serving

FOLDER = Path(specmamba.server.__file__).parent / "page_files"
SOURCES = sorted(path for path in FOLDER.rglob("*") if path.suffix in {".html", ".js", ".css", ".svg"})
OWN = [path for path in SOURCES if "vendor" not in path.parts]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(api_key="secret") as served:  # the page asks for the key, so it comes without one
        yield served


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_file_is_served(server: Served, path: Path) -> None:
    answer = server.http.get(f"/page/{path.relative_to(FOLDER).as_posix()}")
    assert answer.status_code == 200
    assert answer.content == path.read_bytes()
    assert answer.headers["x-content-type-options"] == "nosniff"
    wanted = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}[path.suffix]
    assert answer.headers["content-type"].startswith(wanted)


def test_the_index(server: Served) -> None:
    answer = server.http.get("/")
    assert answer.content == (FOLDER / "index.html").read_bytes()
    policy = dict(part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert server.http.head("/").headers["content-length"] == answer.headers["content-length"]


def test_a_cached_file_is_not_sent_again(server: Served) -> None:
    first = server.http.get("/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = server.http.get("/page/app.js", headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert server.http.get("/page/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/../page.py",
        "/page/%2e%2e/page.py",
        "/page/..%2fpage.py",
        "/page/vendor/../../page.py",
        "/page//etc/passwd",
        "/page/vendor",
        "/page/",
        "/page/vendor/README.md",
        "/page/app.js%00.html",
    ],
)
def test_no_other_file_is_served(server: Served, path: str) -> None:
    answer = server.http.get(path)
    assert answer.status_code == (401 if answer.url.path == "/page.py" else 404)
    assert b"import" not in answer.content


def test_nothing_is_inline_or_from_elsewhere() -> None:
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for path in OWN:
        addresses = re.findall(r"https?://[^\s\"'`)]+", path.read_text())
        assert [address for address in addresses if address != "http://www.w3.org/2000/svg"] == [], path


def test_referenced_files_exist() -> None:
    files = load_files()
    for path in OWN:
        text = path.read_text()
        imported = [(path.parent / name).resolve() for name in re.findall(r'from "(\.{1,2}/[^"]+)"', text)]
        named = [FOLDER / name for name in re.findall(r'(?:src|href)="page/([^"]+)"', text)]
        assert [name for name in imported + named if name.relative_to(FOLDER).as_posix() not in files] == [], path


def test_text_becomes_markup_nowhere() -> None:
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|parseFromString|createContextualFragment|eval\("
    for path in OWN:
        assert not re.search(makers, path.read_text()), path
        assert "setHTML" not in path.read_text(), path


def test_the_libraries_carry_their_licences() -> None:
    notes = (FOLDER / "vendor/README.md").read_text()
    for path in (FOLDER / "vendor").iterdir():
        assert path.name == "README.md" or f"`{path.name}`" in notes, path
    for name in re.findall(r"LICENSE-\w+\.txt", notes):
        assert "opyright" in (FOLDER / "vendor" / name).read_text()
