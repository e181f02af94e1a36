"""Tokenizers that make texts much longer are refused, and errors of their library end one request only."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specmamba.config import DEMO_MODEL
from specmamba.core import OutputDelta
from specmamba.errors import CheckpointError, RequestError
from specmamba.llm import LLM
from specmamba.models.text.text_growth import charsmap_growth, growth
from specmamba.models.text.tokenizer import MAX_GROWN, Tokenizer
from specmamba.sampling_params import SamplingParams
from tests.fake_engine import FakeEngine, serving

STEP = dict[str, Any]
SLOW_EXPRESSION = "(a+)+$"  # gives up on a long run of letters that does not end the text


def replace(content: str, **pattern: str) -> STEP:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(name: str, *steps: STEP) -> STEP:
    return {"type": "Sequence", name: list(steps)}


def normalizers(*steps: STEP) -> STEP:
    return sequence("normalizers", *steps)


def metaspace(scheme: str) -> STEP:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}


def byte_level(add_prefix_space: bool = False) -> STEP:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}


def template(num_copies: int, num_ids: int = 1) -> STEP:
    special = {"id": "<s>", "ids": [0] * num_ids, "tokens": ["<s>"] * num_ids}
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * num_copies
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [first, *pieces], "pair": [], "special_tokens": {"<s>": special}}


def charsmap(key: bytes, value: bytes, start: int = 0) -> bytes:
    """A map of one key. Node i + 1 follows node i: its block of 256 units is the one behind."""
    units = [0] * 256 * (len(key) + 2)
    units[0] = 256 << 10
    for i, byte in enumerate(key):
        here, there = 256 * (i + 1) ^ byte, 256 * (i + 2)
        units[here] = (here ^ there) << 10 | (i == len(key) - 1) << 8 | byte
    units[256 * (len(key) + 1)] = 1 << 31 | start
    trie = b"".join(unit.to_bytes(4, "little") for unit in units)
    return len(trie).to_bytes(4, "little") + trie + value + b"\0"


def precompiled(data: bytes) -> STEP:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def write(folder: Path, **changes: Any) -> Path:
    """The demo's tokenizer with other parts."""
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL / name, folder / name)
    described = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(described | changes))
    return folder


@pytest.fixture
def fails_on_words(tmp_path: Path) -> Tokenizer:
    split = {"type": "Split", "pattern": {"Regex": SLOW_EXPRESSION}, "behavior": "Isolated", "invert": False}
    return Tokenizer(write(tmp_path, pre_tokenizer=sequence("pretokenizers", split, byte_level())))


A, NFKC_LIKE = "a", charsmap("ﷺ".encode(), "صلى الله عليه وسلم".encode())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"normalizer": replace("b" * 10_000, String=A)}, "may make a text 1e.04 times as long, 256 times is the most"),
        ({"normalizer": normalizers(*[replace("aaaa", String=A)] * 5)}, "1.02e.03 times as long"),
        ({"normalizer": normalizers(*[normalizers(replace("aaaa", String=A))] * 5)}, "1.02e.03 times as long"),
        ({"normalizer": replace("b" * 300, Regex="x*")}, "301 times as long"),
        ({"normalizer": replace("b" * 300, String="")}, "301 times as long"),
        ({"normalizer": normalizers(*[replace("ﷺ", String=" "), {"type": "NFKD"}] * 2)}, "324 times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 600}}, "301 times as long"),
        ({"normalizer": normalizers(*[{"type": "BertNormalizer"}] * 6)}, "729 times as long"),
        ({"normalizer": precompiled(charsmap(b"a", b"b" * 300))}, "300 times as long"),
        ({"normalizer": normalizers(*[precompiled(NFKC_LIKE)] * 2)}, "324 times as long"),
        ({"pre_tokenizer": sequence("pretokenizers", *[byte_level()] * 6)}, "1.02e.03 times as long"),
        ({"pre_tokenizer": sequence("pretokenizers", *[metaspace("always")] * 9)}, "512 times as long"),
        ({"normalizer": normalizers(*[{"type": "NFC"}] * 65)}, "65 steps in a row"),
        ({"decoder": replace("b" * 20, String=A)}, "its decoder may make a text 20 times as long, 16 times is the"),
        ({"post_processor": template(2)}, "repeats a text"),
        ({"post_processor": template(1, 5000)}, "adds 5000 tokens to a text, 1024 are the most"),
        ({"normalizer": {"type": "Unheard"}}, "'Unheard', whose effect on the length is not known"),
        ({"decoder": {"type": "Unheard"}}, "'Unheard', whose effect on the length is not known"),
        ({"normalizer": 5}, "damaged step"),
        ({"normalizer": {"type": "Replace"}}, "damaged step: KeyError"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "x"}}, "damaged step"),
        ({"normalizer": replace("x", Regex="(")}, "cannot be loaded: Oniguruma"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=rf"the tokenizer of {tmp_path}.*{sentence}"):
        Tokenizer(write(tmp_path, **changes))


def test_a_token_that_is_too_long(tmp_path: Path) -> None:
    token = {"id": 3, "content": "x" * 9000, "single_word": False, "lstrip": False, "rstrip": False}
    described = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    added = [*described["added_tokens"], token | {"normalized": False, "special": True}]
    with pytest.raises(CheckpointError, match="has a token of 9000 characters; 8192 are the most"):
        Tokenizer(write(tmp_path, added_tokens=added))


@pytest.mark.parametrize(
    ("name", "parts", "factor"),
    [
        ("GPT-2", {"pre_tokenizer": byte_level(), "decoder": byte_level()}, 1),
        ("RoBERTa", {"pre_tokenizer": byte_level(add_prefix_space=True)}, 2),
        ("Qwen", {"normalizer": {"type": "NFC"}, "pre_tokenizer": sequence("pretokenizers", byte_level())}, 1),
        ("Llama 2", {"normalizer": normalizers({"type": "Prepend", "prepend": "▁"}, replace("▁", String=" "))}, 1.5),
        ("Gemma", {"normalizer": replace("▁", String=" "), "decoder": replace(" ", String="▁")}, 1),
        ("CLIP", {"normalizer": normalizers({"type": "NFC"}, replace(" ", Regex=r"\s+"), {"type": "Lowercase"})}, 2),
        ("BERT", {"normalizer": {"type": "BertNormalizer"}, "pre_tokenizer": {"type": "BertPreTokenizer"}}, 3),
        (
            "T5",
            {
                "normalizer": normalizers(precompiled(NFKC_LIKE), replace("▁", Regex=" {2,}")),
                "pre_tokenizer": metaspace("always"),
                "post_processor": template(1),
            },
            72,
        ),
    ],
)
def test_the_settings_of_published_tokenizers(name: str, parts: dict[str, Any], factor: float) -> None:
    assert growth(parts) == factor, name


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "the length is wrong"),
        (bytes(range(1, 200)), "the length is wrong"),
        ((8).to_bytes(4, "little") + b"\xff" * 8, "an entry is outside of it"),
        (charsmap(b"a", b"b", start=9), "a replacement is outside of it"),
        (charsmap(b"a", "é".encode(), start=1), "a replacement begins within a character"),
        (charsmap(b"a", b"\xff"), "not UTF-8"),
    ],
)
def test_damaged_maps_of_characters(data: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=f"its precompiled_charsmap is damaged: .*{sentence}"):
        charsmap_growth(data)


@pytest.mark.parametrize(
    ("key", "value", "factor"), [("a", "bcd", 3), ("ab", "xyz", 3), ("éa", "", 1), ("ﷺ", "éàü", 3)]
)
def test_maps_of_characters(key: str, value: str, factor: float) -> None:
    """The map means here what it means in the library."""
    from tokenizers.normalizers import Precompiled

    data = charsmap(key.encode(), value.encode())
    assert charsmap_growth(data) == factor
    assert Precompiled(data).normalize_str(key) == (value if len(key) == 1 else key)


def test_a_text_that_would_grow_too_long(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, normalizer=replace("b" * 200, String=A)))
    assert tokenizer.decode(tokenizer.encode("aca")) == "b" * 200 + "c" + "b" * 200
    most = MAX_GROWN // 200
    with pytest.raises(RequestError, match=f"the text has {most + 1} characters; this tokenizer takes {most} at the"):
        tokenizer.encode("c" * (most + 1))


@pytest.mark.parametrize("length", [50, 5000])
def test_a_panic_is_an_error_of_the_request(fails_on_words: Tokenizer, length: int) -> None:
    with pytest.raises(RequestError, match=r"cannot encode this text: .*retry-limit") as caught:
        fails_on_words.encode("a" * length + "!")
    assert caught.value.param == "prompt"
    assert fails_on_words.decode(fails_on_words.encode("still here")) == "still here"


def test_a_panic_over_http(fails_on_words: Tokenizer) -> None:
    engine = FakeEngine()
    engine.tokenizer = fails_on_words  # type: ignore[assignment]
    with serving(engine) as served:
        for _ in range(2):
            answer = served.http.post("/tokenize", json={"prompt": "a" * 50 + "!"})
            assert answer.status_code == 400
            assert "the tokenizer cannot encode this text" in answer.json()["error"]["message"]
        answer = served.complete(prompt="a" * 50 + "!")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert served.http.post("/tokenize", json={"prompt": "b"}).status_code == 200


@pytest.mark.parametrize("length", [1, 5000])
def test_a_panic_of_the_decoder(tmp_path: Path, length: int) -> None:
    strip = {"type": "Strip", "content": A, "start": 5, "stop": 5}
    tokenizer = Tokenizer(write(tmp_path, decoder=strip))
    token = tokenizer.token_ids()[A]
    with pytest.raises(RequestError, match="the tokenizer cannot decode these tokens"):
        tokenizer.decode([token] * length)


def test_other_exceptions_pass(monkeypatch: pytest.MonkeyPatch, fails_on_words: Tokenizer) -> None:
    class Stopping:
        def encode(self, text: str, **options: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(fails_on_words, "_backend", Stopping())
    with pytest.raises(KeyboardInterrupt):
        fails_on_words.encode("b")


def test_one_request_that_cannot_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on, and so do the other requests of the same step."""

    def fail(token_ids: Sequence[int]) -> str:
        raise RequestError("a panic")

    last: dict[str, OutputDelta] = {}
    with LLM(model=str(DEMO_MODEL), device="cpu", context_length=64, num_threads=1) as llm:
        for name, length in (("good", 8), ("bad", 5)):
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            llm.engine.add_request(name, [67] * length, params)
        monkeypatch.setattr(llm.engine.live.by_id["bad"].text._detokenizer, "push_all", fail)
        while llm.engine.has_unfinished_requests:
            last |= {delta.request_id: delta for delta in llm.engine.step()}
    assert (last["good"].finish_reason, last["good"].num_output_tokens) == ("length", 4)
    assert (last["bad"].finish_reason, last["bad"].error) == ("error", "a panic")
