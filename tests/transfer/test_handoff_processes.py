"""``specmamba serve`` as a prefill server and as a decode server, whose processes are stopped and killed."""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import free_port
from tests.server.test_server_cache import PROMPT
from tests.server.test_server_process import process
from tests.transfer.sides import KEY

FLAGS = [
    "--dtype",
    "float32",
    "--speculative-adaptive",
    "off",
    "--max-total-tokens",
    "2048",
    "--context-length",
    "512",
    "--port",
    "0",
]


@pytest.mark.slow
def test_texts_are_the_same_whatever_happens_to_the_prefill_server(tmp_path: Path) -> None:
    file, port = tmp_path / "key", free_port()
    file.write_text(KEY)
    file.chmod(0o600)
    shared = ["--disaggregation-key-file", str(file), "--disaggregation-bootstrap-port", str(port)]
    serve = ["-m", "specmamba", "serve", *FLAGS, *shared, "--disaggregation-mode"]
    rooms = itertools.count(1)
    with ExitStack() as stack:
        prefill = stack.enter_context(process(*serve, "prefill"))
        decode = stack.enter_context(process(*serve, "decode", "--disaggregation-timeout", "2"))

        def ask(url: str, salt: str, **fields: Any) -> Any:
            body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "cache_salt": salt, **fields}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["text"], cached

        def hand_over(salt: str, room: int) -> Any:
            return ask(decode.url, salt, bootstrap_room=room, bootstrap_host="127.0.0.1")

        def failures() -> Counter[str]:
            return Counter(httpx.get(f"{decode.url}/server_info").json()["stats"]["handoffs"]["failures"])

        expected, _ = ask(prefill.url, "alone")
        for room in rooms:  # a machine that stands still for the two seconds of a request makes it miss
            ask(prefill.url, f"runs {room}", bootstrap_room=room)
            text, num_cached = hand_over(f"runs {room}", room)
            assert text == expected
            if num_cached > 0:
                break
            assert room < 5
        before = failures()
        prefill.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert hand_over("stopped", next(rooms)) == (expected, 0)
        assert time.monotonic() - began > 2
        prefill.process.kill()
        prefill.process.wait(60)
        assert hand_over("killed", next(rooms)) == (expected, 0)
        assert failures() - before == {"slow": 1, "unreachable": 1}
