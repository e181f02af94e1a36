"""Write llama_tokens.json: texts, and the tokens that llama.cpp makes of them with a GGUF file of Qwen3.5's kind.

    python -m tests.checkpoints.data.make_llama_tokens LLAMA_TOKENIZE

Run once with the llama-tokenize of llama-cpp-python 0.3.36's llama.cpp; tests read the file, and need none. The
vocabulary is learned from the texts below, split as Qwen3.5 splits, so that words of many scripts are tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from ast import literal_eval
from itertools import product
from pathlib import Path
from typing import Any
from unicodedata import normalize

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from tests.gguf_files import write_gguf
from tests.tiny import FULL, LINEAR, WHOLE_BLOCKS, write_tiny_checkpoint

FILE = Path(__file__).parent / "llama_tokens.json"
NUM_MERGES = 900
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>")
USER_DEFINED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LANGUAGES = (
    "The quick brown fox doesn't jump; it's we've they'll I'd you're I'm THEY'RE HE'S over 13 lazy dogs.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, während Übermut siegt.",
    "Dès Noël, où un zéphyr haï me vêt de glaçons würmiens, je dîne d'exquis rôtis de bœuf à l'aÿ.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío; añoraba a su querido cachorro.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Щука плывёт под мостом.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Καλημέρα κόσμε!",
    "नमस्ते दुनिया, यह एक छोटा सा वाक्य है। क्षत्रिय ज्ञानी थे।",
    "สวัสดีชาวโลก น้ำใจไมตรี ผู้ใหญ่ลี",
    "مرحبا بالعالم، السَّلَامُ عَلَيْكُمْ ورحمة الله",
    "שָׁלוֹם עוֹלָם, מה שלומך היום?",
    "안녕하세요 세계, 오늘 날씨가 좋습니다.",
    "こんにちは世界。今日はとても良い天気ですね。ガギグゲゴ",
    "你好，世界！今天天气很好，我们去公园吧。",
    "Tiếng Việt có nhiều dấu thanh: ắ ằ ẳ ẵ ặ ế ề ể ễ ệ.",
    "emoji: 😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 and ∑∫√∞≠ → ⇒ €£¥ ½ ² Ⅷ ①",
)
CODE = (
    "def f(x: int = 3) -> int:\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    '#include <stdio.h>\r\nint main(void) {\r\n\tprintf("%d\\n", 0x1F);\r\n\treturn 0;\r\n}\r\n',
    "SELECT * FROM t WHERE a >= 10.5 AND b != 'it''s' -- comment\n",
    "https://example.com/a/b?c=d&e=%20f#g user@example.com C:\\dir\\file.txt",
    '{"key": [1, 2.5e-10, null, true], "k\\u00e9y": {}}',
)
EDGES = (
    "",
    *(
        " ",
        "  ",
        "   a",
        "a   ",
        "\t",
        "\t\t x",
        " \n",
        "\n \n",
        "\n\n\n",
        "\r\n\r\n",
        "a\r\nb\r\n",
        "a\rb",
        "x  \n  y",
    ),
    *(
        "\u00a0",
        "a\u00a0b",
        "\u2003x",
        "\u3000x\u3000",
        "\u200b",
        "\ufeffx",
        "\x00",
        "a\x00b",
        "\x07\x1b[0m",
        "\x85",
        "a\u2028b",
    ),
    *("0", "12", "1234567890", "3.14159", "-1e-9", "１２３", "٣٤٥", "½¾", "x1y2", "0x1F"),
    *("don't", "DON'T", "it's'", "'s", "'S x", "'ll'd", "we'Ve", "o'clock", "l'été", "’s", "I'ſ"),
    *(
        "é",
        "e\u0301",
        "Å",
        "A\u030a",
        "\u212b",
        "ﬁ",
        "q\u0323\u0307",
        "q\u0307\u0323",
        "각",
        "\u1100\u1161\u11a8",
        "\u0301",
        " \u0301a",
    ),
    *(
        "क\u094d\u0937",
        "น\u0e49\u0e33",
        "ש\u05c1\u05b8",
        "\u0f71\u0f72",
        "x\u20dd",
        "1\u0301",
        "!\u0301",
        "が",
        "か\u3099",
    ),
    *("!!!", "...", "?!?!\n\n", "a-b--c---d", "(x)[y]{z}", "$100 & 50%", "`code`", "***", "\\n", "a/b\\c", "_x__y_"),
    *(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "<think>\n\n</think>\n\nyes",
        "a<think>b",
        " <think> ",
    ),
    *(
        "<|im_start|",
        "<|endoftext|><|endoftext|>",
        "<tool_call>\n{}\n</tool_call>",
        "<|fim_prefix|>x",
        "<thin",
        "<|IM_END|>",
    ),
    *("😀", "😀😀", "👍🏽!", "🇩🇪🇫🇷", "a😀b", "\ufe0f", "\u200d", "𝔘𝔫𝔦", "𠜎𠜱", "\U0010ffff", "\ue000", "\ufffd"),
    *("Ǆ ǅ ǆ", "ſs", "İi", "ẞß", "ªº", "ʰˀ", "Ⅷⅷ", "ⓐ", "_", "٪", "ـ", "᠋", "؀12"),
)


def all_texts() -> list[str]:
    """Every text once, and behind what may stand before it; what is not composed (NFC) also composed."""
    texts = [*LANGUAGES, *CODE, *EDGES, "\n".join(LANGUAGES), " ".join(CODE)]
    texts += [f"{first}{second}" for first, second in product(("x", " ", "\n"), EDGES)]
    return list(dict.fromkeys([*texts, *(normalize("NFC", text) for text in texts)]))


def learned() -> list[tuple[str, str]]:
    """Merges of a byte-level vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer: Any = trainers.BpeTrainer(
        vocab_size=256 + NUM_MERGES, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*LANGUAGES, *CODE] * 4, trainer)
    return [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]


def tokenizer_of(merges: list[tuple[str, str]]) -> dict[str, Any]:
    """What write_gguf reads of a tokenizer.json: single bytes, what is merged of them, and added tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys(a + b for a, b in merges)]
    added = [{"content": token, "special": token in CONTROL} for token in (*CONTROL, *USER_DEFINED)]
    for number, token in enumerate(added, len(pieces)):
        token["id"] = number
    vocab = {piece: number for number, piece in enumerate(pieces)}
    return {"model": {"vocab": vocab, "merges": [list(merge) for merge in merges]}, "added_tokens": added}


def gguf_of(merges: list[tuple[str, str]], folder: Path) -> Path:
    """Write a GGUF file with this vocabulary; its weights are few."""
    tokenizer = tokenizer_of(merges)
    sizes = WHOLE_BLOCKS | {"vocab_size": len(tokenizer["model"]["vocab"]) + 20, "layer_types": [LINEAR, FULL]}
    write_tiny_checkpoint(folder / "tiny", 0, with_mtp=False, **sizes)
    (folder / "tiny" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return write_gguf(folder / "tiny", folder / "tokens.gguf")


def main() -> None:
    """Argument: the program."""
    merges, found = learned(), []
    with tempfile.TemporaryDirectory() as temporary:
        file, given = gguf_of(merges, Path(temporary)), Path(temporary) / "text"
        for text in all_texts():
            given.write_bytes(text.encode())
            command = [sys.argv[1], "-m", str(file), "-f", str(given), "--ids", "--no-escape", "--log-disable"]
            ids = literal_eval(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            found.append({"text": text, "ids": ids})
    FILE.write_text(json.dumps({"merges": [" ".join(merge) for merge in merges], "texts": found}) + "\n")
    print(f"{len(found)} texts, {len(merges)} merges, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
