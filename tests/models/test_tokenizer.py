"""Tokens to text: for any tokens, the streamed text is the decoded text."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specmamba.checkpoints.checkpoint import read_eos_token_ids
from specmamba.config import DEMO_MODEL
from specmamba.errors import CheckpointError, RequestError
from specmamba.models.text.tokenizer import Detokenizer, Tokenizer
from specmamba.models.text.tokenizer_backend import longest_token

END_OF_TEXT, IM_START = 0, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content + '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary of words and, for all other characters, ``<0xE4>`` tokens."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁é", "\ufffd"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    folder = tmp_path_factory.mktemp("byte_fallback")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Tokenizer(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo's tokenizer, to change."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL / name, tmp_path / name)
    return tmp_path


def without_bytes(detokenizer: Detokenizer) -> Detokenizer:
    """As of a vocabulary that is not byte-level."""
    detokenizer._utf8 = None
    return detokenizer


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True, by_window: bool = False) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    if by_window:
        without_bytes(detokenizer)
    text = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
    at_once = Detokenizer(tokenizer, skip_special_tokens)
    if by_window:
        without_bytes(at_once)
    half = len(ids) // 2
    assert at_once.push_all(ids[:half]) + at_once.push_all(ids[half:]) + at_once.flush() == text
    return text


def single_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte; the byte-level alphabet is where the demo's vocabulary begins."""
    vocab = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    letters = sorted((token for token in vocab if len(token) == 1), key=ord)
    own = [ord(token) for token in letters if ord(token) < 256]
    of_byte = {
        **dict(zip(own, letters, strict=False)),
        **dict(zip(sorted(set(range(256)) - set(own)), letters[len(own) :], strict=True)),
    }
    return [vocab[of_byte[byte]] for byte in data]


class TestDetokenizer:
    @settings(max_examples=200, deadline=None)
    @given(ids=st.lists(st.integers(0, 4100), max_size=40), skip=st.booleans())
    def test_any_tokens(self, demo: Tokenizer, ids: list[int], skip: bool) -> None:
        assert streamed(demo, ids, skip) == demo.decode(ids, skip)
        assert streamed(demo, ids, skip, by_window=True) == demo.decode(ids, skip)

    @settings(max_examples=200, deadline=None)
    @given(data=st.binary(max_size=40))
    def test_any_bytes(self, demo: Tokenizer, data: bytes) -> None:
        ids = single_bytes(demo, data)
        assert streamed(demo, ids) == demo.decode(ids) == data.decode("utf8", "replace")
        assert streamed(demo, ids, by_window=True) == demo.decode(ids)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(max_size=30), rng=st.randoms(use_true_random=False))
    def test_any_text_with_damage(self, demo: Tokenizer, text: str, rng: Any) -> None:
        data = bytes(byte for byte in text.encode() if rng.random() < 0.9)
        ids = single_bytes(demo, data)
        assert streamed(demo, ids) == data.decode("utf8", "replace")

    @settings(max_examples=300, deadline=None)
    @given(ids=st.lists(st.one_of(st.integers(0, 265), st.integers(257, 261), st.sampled_from([0xE5, 0xBE, 0xA1]))))
    def test_byte_fallback_vocabulary(self, byte_fallback: Tokenizer, ids: list[int]) -> None:
        assert streamed(byte_fallback, ids) == byte_fallback.decode(ids)

    def test_split_character_is_held_back(self, demo: Tokenizer) -> None:
        detokenizer = Detokenizer(demo)
        pieces = [detokenizer.push(i) for i in single_bytes(demo, "a😀é".encode())]
        assert pieces == ["a", "", "", "", "😀", "", "é"]
        assert detokenizer.flush() == ""

    def test_flush_shows_an_incomplete_character(self, demo: Tokenizer) -> None:
        detokenizer = Detokenizer(demo)
        assert [detokenizer.push(i) for i in single_bytes(demo, "a😀".encode()[:-1])] == ["a", "", "", ""]
        assert detokenizer.flush() == "\ufffd"
        assert detokenizer.flush() == ""

    def test_invalid_text_is_not_held_back(self, demo: Tokenizer) -> None:
        ids = single_bytes(demo, b"\xff" * 500)
        detokenizer = Detokenizer(demo)
        assert [detokenizer.push(i) for i in ids] == ["\ufffd"] * 500
        detokenizer = without_bytes(Detokenizer(demo))
        pieces = [detokenizer.push(i) for i in ids]
        assert "".join(pieces) == "\ufffd" * 499
        assert max(map(len, pieces)) == 1
        assert len(detokenizer._window) <= 2 * Detokenizer.CONTEXT

    def test_special_tokens(self, demo: Tokenizer) -> None:
        ids = [IM_START, *demo.encode("x = 1"), END_OF_TEXT]
        assert streamed(demo, ids) == "x = 1"
        assert streamed(demo, ids, skip_special_tokens=False) == "<|im_start|>x = 1<|endoftext|>"

    def test_special_token_within_a_character(self, demo: Tokenizer) -> None:
        first, second = single_bytes(demo, "é".encode())
        assert streamed(demo, [first, END_OF_TEXT, second]) == demo.decode([first, END_OF_TEXT, second]) == "é"


class TestTokenizer:
    @settings(max_examples=100, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"])))
    def test_round_trip(self, demo: Tokenizer, text: str) -> None:
        assert demo.decode(demo.encode(text), skip_special_tokens=False) == text

    def test_encodes_as_transformers_does(self, demo: Tokenizer) -> None:
        for text in ("def main():\n    return 1\n", "", "<|im_start|>héllo 😀"):
            assert demo.encode(text) == demo._loaded.encode(text)
        assert demo.vocab_size == 4096

    def test_tokenizer_that_truncates_and_pads(self, folder: Path) -> None:
        raw = json.loads((folder / "tokenizer.json").read_text())
        raw["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
        raw["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}
        raw["padding"] |= {"pad_to_multiple_of": None, "pad_token": "<|endoftext|>"}
        (folder / "tokenizer.json").write_text(json.dumps(raw))
        tokenizer = Tokenizer(folder)
        assert tokenizer.decode(tokenizer.encode("a = b + c * d"), skip_special_tokens=False) == "a = b + c * d"

    def test_long_texts_are_encoded_as_short_ones(self, demo: Tokenizer) -> None:
        text = "def f(é) -> None:\n    return 12  # 🙂 <|endoftext|>\n" * 500
        backend = Backend.from_file(str(DEMO_MODEL / "tokenizer.json"))
        for special in (True, False):
            ids = demo.encode(text, add_special_tokens=special)
            assert ids == backend.encode(text, add_special_tokens=special).ids
            assert len(ids) > 4096
        assert demo.decode(ids, skip_special_tokens=False) == text
        assert demo.decode(ids) == text.replace("<|endoftext|>", "")

    def test_no_text_is_longer_than_its_bound(self, demo: Tokenizer, byte_fallback: Tokenizer) -> None:
        longest = max(demo.token_ids(), key=len)
        assert demo.most_characters(3) == 3 * len(longest)
        assert byte_fallback.most_characters(2) == 2 * len("<0xE4>")

    def test_tokenizers_that_leave_characters_out_have_no_bound(self) -> None:
        backend = Backend.from_file(str(DEMO_MODEL / "tokenizer.json"))
        assert longest_token(backend) == max(map(len, backend.get_vocab()))
        longest = longest_token(backend) or 0
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "bc")])
        assert longest_token(backend) == 4 * longest
        for normalizer in (normalizers.Replace("ab", "c"), normalizers.Strip(), normalizers.NFKC()):
            backend.normalizer = normalizer
            assert longest_token(backend) is None
        backend.normalizer = normalizers.NFC()
        kept = backend.pre_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), kept])
        assert longest_token(backend) is None
        backend.pre_tokenizer = kept
        backend.add_tokens([AddedToken("<gap>", rstrip=True)])
        assert longest_token(backend) is None
        assert longest_token(Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))) is None

    def test_half_a_surrogate_pair(self, demo: Tokenizer) -> None:
        with pytest.raises(RequestError, match="not valid Unicode at character 2") as caught:
            demo.encode("ab\ud800")
        assert caught.value.param == "prompt"

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="has no tokenizer"):
            Tokenizer(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"model": {"type": "None"}}'])
    def test_damaged(self, folder: Path, text: str) -> None:
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"cannot be loaded|JSON"):
            Tokenizer(folder)

    def test_code_of_the_checkpoint_never_runs(self, folder: Path) -> None:
        raw = json.loads((folder / "tokenizer_config.json").read_text())
        raw |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(raw))
        (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Evil: ...\n")
        with contextlib.suppress(CheckpointError):  # refused, or loaded without that code
            Tokenizer(folder)
        assert not (folder / "ran").exists()


class TestChatTemplate:
    def test_demo_marks_the_messages(self) -> None:
        tokenizer = Tokenizer(DEMO_MODEL)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        ids = tokenizer.apply_chat_template(messages)
        assert tokenizer.decode(ids, skip_special_tokens=False) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>\n"
        )
        assert ids.count(IM_START) == 3

    @pytest.fixture
    def chat(self, folder: Path) -> Tokenizer:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        return Tokenizer(folder)

    def test_conversation(self, chat: Tokenizer) -> None:
        assert chat.has_chat_template
        ids = chat.apply_chat_template([{"role": "user", "content": "hi"}])
        assert ids[0] == IM_START
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert chat.decode(ids, skip_special_tokens=False) == text

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            ({"role": "tool", "content": "x"}, "no tools here"),
            ({"role": "user", "content": 3}, "refuses"),
            ({"role": "user"}, "refuses"),
            ({"role": "user", "content": "\ud800"}, "not valid Unicode"),
        ],
    )
    def test_messages_that_the_template_refuses(self, chat: Tokenizer, message: dict[str, Any], reason: str) -> None:
        with pytest.raises(RequestError, match=reason) as caught:
            chat.apply_chat_template([message])
        assert caught.value.param == "messages"

    def test_template_that_is_no_template(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_text("{% for %}")
        with pytest.raises(RequestError, match="refuses"):
            Tokenizer(folder).apply_chat_template([{"role": "user", "content": "hi"}])

    def test_template_stays_in_its_sandbox(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
        with pytest.raises(RequestError, match="refuses"):
            Tokenizer(folder).apply_chat_template([{"role": "user", "content": "hi"}])

    def test_no_template(self, folder: Path) -> None:
        tokenizer = Tokenizer(folder)
        assert not tokenizer.has_chat_template
        with pytest.raises(RequestError, match="no chat template") as caught:
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        assert caught.value.param == "messages"


class TestEndOfText:
    def test_demo(self) -> None:
        assert read_eos_token_ids(DEMO_MODEL, SimpleNamespace(eos_token_id=9)) == (0, 2)

    @pytest.mark.parametrize(
        ("generation", "config", "wanted"),
        [
            ('{"eos_token_id": [3, 4]}', 9, (3, 4)),
            ('{"eos_token_id": null}', 9, (9,)),
            ("{}", [1, 2], (1, 2)),
            (None, 0, (0,)),
            (None, None, ()),
        ],
    )
    def test_fallback(self, tmp_path: Path, generation: str | None, config: object, wanted: tuple[int, ...]) -> None:
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(generation)
        assert read_eos_token_ids(tmp_path, SimpleNamespace(eos_token_id=config)) == wanted

    def test_nested(self, tmp_path: Path) -> None:
        config: Any = SimpleNamespace(text_config=SimpleNamespace(eos_token_id=7))
        assert read_eos_token_ids(tmp_path, config) == (7,)

    @pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}'])
    def test_damaged(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            read_eos_token_ids(tmp_path, SimpleNamespace(eos_token_id=1))


# ---- gaps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "marks",
    [("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")],
)
def test_prompts_with_a_gap(tmp_path: Path, marks: tuple[str, str, str]) -> None:
    assert Tokenizer(DEMO_MODEL).infill is None
    backend = Backend.from_file(str(DEMO_MODEL / "tokenizer.json"))
    backend.add_special_tokens([*marks, "<|fim_pad|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = [backend.token_to_id(mark) for mark in marks]
    assert tokenizer.infill is not None
    assert set(tokenizer.infill.end_ids) == {
        *ids,
        backend.token_to_id("<|fim_pad|>"),
        backend.token_to_id("<|endoftext|>"),
    }
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in ("def f(x):\n", "\n    return y\n")]
    found = tokenizer.encode(tokenizer.infill.prompt("def f(x):\n", "\n    return y\n"))
    assert found == [ids[0], *plain[0], ids[1], *plain[1], ids[2]]
