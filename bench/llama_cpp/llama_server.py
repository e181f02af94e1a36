"""A ``llama-server`` that is started for a benchmark, and the requests to it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specmamba.bench.llama_cpp.build import Build, clean_environment
from specmamba.bench.llama_cpp.figures import Answer, Batch
from specmamba.bench.llama_cpp.options import LlamaCppBenchConfig
from specmamba.bench.serving.server import StartedServer
from specmamba.errors import SpecmambaError

READY = "listening on "
# No prompt cache, neither in memory nor as copies of recurrent states while a prompt is read; no page, no downloads.
SERVER_FLAGS = (
    *("--host", "127.0.0.1", "--port", "0"),
    *("--cache-ram", "0", "--ctx-checkpoints", "0"),
    *("--no-ui", "--no-slots", "--offline"),
)
# Both sides draw from the same distribution: the temperature alone changes it.
SAMPLING = {"samplers": ["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# A process that starts another one and is killed leaves it behind, unless that one asks for a signal.
DIES_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class LlamaServer:
    """A ``llama-server`` on a free port of this machine, as ``started_llama_server`` yields it."""

    process: StartedServer
    url: str
    timeout_s: float  # of one answer

    def run(self, batch: Batch) -> list[Answer]:
        """Send all requests of a batch at once and wait for the answers.

        Raises:
            SpecmambaError: the server ended, refused a request, or wrote another number of tokens.
        """
        bodies = [_body(batch, i) for i in range(len(batch.prompts))]
        pool = ThreadPoolExecutor(len(bodies))
        try:
            return [answer_of(answer, batch.max_tokens) for answer in pool.map(self._post, bodies)]
        finally:
            pool.shutdown(wait=False)  # after Ctrl-C the server is ended, not waited for

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=self.timeout_s)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.process.check(grace_s=1.0)
            raise SpecmambaError(f"llama-server gave no answer: {error!r}") from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise SpecmambaError(f"llama-server answered {response.status}: {text[:300].decode(errors='replace')}")
        return dict(json.loads(text))


def _body(batch: Batch, i: int) -> dict[str, Any]:
    return {
        "prompt": list(batch.prompts[i]),
        "n_predict": batch.max_tokens,
        "temperature": batch.temperature,
        "seed": batch.seeds[i] % (1 << 31),
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
        **SAMPLING,
    }


def answer_of(answer: dict[str, Any], max_tokens: int) -> Answer:
    """Read tokens and times of a completion of ``llama-server``.

    Its ``prompt_ms`` ends, and its ``predicted_ms`` begins, when the first token has been sampled.

    Raises:
        SpecmambaError: a field is missing, or there are fewer or more than ``max_tokens`` tokens.
    """
    try:
        timings, tokens = answer["timings"], tuple(map(int, answer["tokens"]))
        count = int(timings["predicted_n"])
        first_s, decode_s = float(timings["prompt_ms"]) / 1e3, float(timings["predicted_ms"]) / 1e3
        accepted = int(timings.get("draft_n_accepted", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise SpecmambaError(f"llama-server answered in another form than expected: {error!r}") from None
    if count != max_tokens or len(tokens) != max_tokens:
        wrong = count if count != max_tokens else len(tokens)
        raise SpecmambaError(f"llama-server wrote {wrong} tokens, but {max_tokens} were asked for")
    return Answer(tokens, first_s, count - 1, decode_s, accepted)


@contextmanager
def started_llama_server(
    config: LlamaCppBenchConfig, build: Build, model: Path, num_drafts: int, batch: int, context: int
) -> Iterator[LlamaServer]:
    """Start a server; it ends with the context.

    Args:
        config: threads and times.
        build: has the program.
        model: GGUF file.
        num_drafts: tokens that the model's MTP block drafts; 0: plain decoding.
        batch: slots.
        context: tokens of a slot.

    Raises:
        SpecmambaError: it did not start; the message has the last line of its log.
    """
    drafts = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(num_drafts)) if num_drafts else ()
    threads = str(config.llama_threads)
    sizes = ("-c", str(batch * context), "-np", str(batch), "-t", threads, "-tb", threads)
    command = [sys.executable, "-c", DIES_WITH_PARENT, str(build.server), "-m", str(model)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, *SERVER_FLAGS, *sizes, *drafts],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=clean_environment(),
            start_new_session=True,  # Ctrl-C reaches the benchmark only, which then ends the server
        )
        server = StartedServer(process, log, READY)
        try:
            url = server.wait_until_ready(config.startup_timeout)
            yield LlamaServer(server, url, config.answer_timeout)
        finally:
            server.end()
