"""The command line: dispatch to the commands, and ``specmamba generate``. Only commands import heavy modules."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import select
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from specmamba.errors import ConfigError, NotEnoughMemoryError, RequestError, SpecmambaError

if TYPE_CHECKING:
    from specmamba.config import EngineConfig
    from specmamba.core import OutputDelta
    from specmamba.engine.base_engine import BaseEngine
    from specmamba.engine.engine import Engine
    from specmamba.generate_config import GenerateConfig
    from specmamba.sampling_params import SamplingParams
    from specmamba.server_config import ServerConfig

_REQUEST_ID = "generate"

HELP = """\
usage: specmamba COMMAND [OPTIONS]

Serve hybrid language models (attention mixed with recurrent layers) with speculative decoding.

commands:
  serve       an OpenAI-compatible HTTP server, on 127.0.0.1:30000
  generate    continue one prompt, streamed to the terminal, or several as JSON
  chat        a conversation in the terminal, with a model in this process or a running server
  info        what a model is, what it takes, and what can be done with it
  quantize    round a checkpoint's matrices to 4 or 8 bits
  deploy      replicas on a Ray cluster, as a file declares them
  cache       prefixes on disk: list them, remove some, verify them
  doctor      whether this installation works: packages, device, kernels, and a self-test
  bench       measure: acceptance of drafts, a server under load, the prefix cache, operators, a GPU
  tune        choose by measurement: draft trees
  train       a draft head for a model that has none

options:
  -h, --help  this text; "specmamba COMMAND --help" lists the options of a command
  --version   the version

Without --model all commands run the bundled demo, a small model trained on Python source.
Every option can also come from the environment (SPECMAMBA_PORT=8000) or from a file (--config FILE.toml).

examples:
  specmamba serve
  specmamba serve --model ./my-model --port 8000 --speculative-num-steps 4
  specmamba serve --model ./my-model --speculative-algorithm none
  specmamba generate --prompt "def main():" --max-tokens 64
  specmamba generate --temperature 0.8 --seed 7 < prompt.txt
  specmamba generate --json --prompt "def main():" --prompt "class A" > answers.jsonl
  specmamba chat --model ./my-model --temperature 0.6
  specmamba chat --url http://127.0.0.1:30000
  specmamba info --model ./my-model --quantization int8
  specmamba quantize --model ./my-model --format int4 --out ./my-model-int4
  specmamba deploy ./deployment.yaml --check
  specmamba cache ls ./prefixes
  specmamba doctor
  specmamba bench acceptance --speculative-num-steps 3
  specmamba bench serving --concurrency 1,4 --plot load.png
  specmamba bench prefix --workloads chat,agent
  specmamba tune tree --help
  specmamba train draft --model ./my-model --out ./my-head --minutes 30
"""

# name: (module with a main(arguments) -> exit status, what it does)
SUBCOMMANDS = {
    "bench": {
        "acceptance": (
            "specmamba.bench.acceptance",
            "acceptance length and speed-up, text compared with the plain run",
        ),
        "serving": ("specmamba.bench.serving.__main__", "throughput and latency of a server, over levels of load"),
        "http-overhead": ("specmamba.bench.http_overhead.__main__", "tokens/s through HTTP over those of LLM.generate"),
        "soak": (
            "specmamba.bench.soak.__main__",
            "good clients beside bad ones: all is given back, and good ones do not feel it",
        ),
        "prefix": (
            "specmamba.bench.prefix.__main__",
            "what the prefix cache spares, against an oracle, and what it costs",
        ),
        "state-drift": ("specmamba.bench.state_drift", "how far texts drift with recurrent states or KV in fewer bits"),
        "ops": ("specmamba.bench.ops.__main__", "operators against PyTorch, other packages and the machine's roofline"),
        "llama-cpp": ("specmamba.bench.llama_cpp.__main__", "decoding and first tokens beside llama.cpp, in turns"),
        "scale-sim": ("specmamba.scale_sim.__main__", "replicas and hit rates of a trace, simulated"),
        "gpu": ("specmamba.bench.gpu.__main__", "all that is to be measured on a machine with a GPU, in ten minutes"),
    },
    "train": {
        "draft": ("specmamba.train.draft", "an EAGLE-3 or DFlash head for --speculative-draft-model-path"),
    },
    "tune": {
        "tree": (
            "specmamba.tune.tree",
            "the fastest draft tree per batch size, as a file for --speculative-tree",
        ),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments without the program's name; by default those of the process.

    Returns:
        The exit status: 0, 1 for a failure, 2 for invalid arguments, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        return _print_version()
    if command not in COMMANDS:
        return _refuse("specmamba", HELP, command, COMMANDS)
    try:
        status = COMMANDS[command](arguments[1:])
        sys.stdout.flush()
        return status
    except SpecmambaError as error:
        return _end_with(f"specmamba {command}", error)
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells report it
    except BrokenPipeError:
        if not _has_lost_reader():
            raise
        _drop_output()
        return 0
    except Exception as error:
        if (shortage := NotEnoughMemoryError.found_in(error)) is None:
            raise
        return _end_with(f"specmamba {command}", shortage)


def _serve(arguments: list[str]) -> int:
    from specmamba.server.shutdown_watch import ending_at_signals

    with ending_at_signals():
        from specmamba.flags.command_line import parse_command_line
        from specmamba.server.listener import listen
        from specmamba.server_config import ServerConfig

        config = parse_command_line(ServerConfig, "specmamba serve", arguments)
        if config.replicas is not None:
            from specmamba.cluster.deploy_command import serve_replicas

            return serve_replicas(config)
        if (status := _other_rank(config)) is not None:
            return status
        listener = listen(config.host, config.port)  # before what takes seconds to import
        from specmamba.server.serve import run_server

        return run_server(config, lambda: _build_server_engine(config), listener)


def _build_server_engine(config: ServerConfig) -> BaseEngine:
    if config.most_replicas == 1:
        return _build_engine(config)
    from specmamba.replicas.replicated_engine import ReplicatedEngine

    return ReplicatedEngine(config)


def _build_engine(config: EngineConfig) -> Engine:
    from specmamba.engine.mirror.start import build_engine

    return build_engine(config)


def _other_rank(config: EngineConfig) -> int | None:
    """Be a rank other than 0, where torchrun has started this process as one. Returns its exit status; None: it is 0.

    Raises:
        ConfigError: torchrun has started another number of ranks than ``--tp-size`` says.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    from specmamba.engine.mirror.start import launched_rank, run_other_rank

    rank = launched_rank(config)
    return run_other_rank(config, rank) if rank else None


def _generate_command(arguments: list[str]) -> int:
    from specmamba.flags.command_line import parse_command_line
    from specmamba.generate_config import GenerateConfig

    config = parse_command_line(GenerateConfig, "specmamba generate", arguments)
    if (status := _other_rank(config)) is not None:
        return status
    if not config.json:
        return _generate(config)
    from specmamba.terminal.json_answers import generate_json

    return generate_json(lambda: _build_engine(config), lambda: _prompts(config), lambda: _sampling_params(config))


def _chat(arguments: list[str]) -> int:
    from specmamba.terminal.chat_command import main as run

    return run(arguments)


def _info(arguments: list[str]) -> int:
    from specmamba.info import main as run

    return run(arguments)


def _quantize(arguments: list[str]) -> int:
    from specmamba.quantize import main as run

    return run(arguments)


def _deploy(arguments: list[str]) -> int:
    from specmamba.cluster.deploy_command import main as run

    return run(arguments)


def _cache(arguments: list[str]) -> int:
    from specmamba.cache.tiers.tier_command import main as run

    return run(arguments)


def _doctor(arguments: list[str]) -> int:
    from specmamba.doctor import main as run

    return run(arguments)


def _generate(config: GenerateConfig) -> int:
    """Continue one prompt. Returns the exit status: 0, 1 when the engine fails, 130 after Ctrl-C.

    Raises:
        SpecmambaError: the model cannot be loaded, or the prompt is refused.
    """
    params = _sampling_params(config)
    (prompt,) = _prompts(config)
    engine = _build_engine(config)
    status = _stream(engine, prompt, params)
    if status == 0:  # after Ctrl-C in the middle of a step the engine cannot be closed
        engine.close()
    return status


def _sampling_params(config: GenerateConfig) -> SamplingParams:
    """The sampling parameters of the flags.

    Raises:
        ConfigError: a value is not valid; the message names the flag.
    """
    from pydantic import ValidationError

    from specmamba.flags.command_line import describe_validation_error
    from specmamba.sampling_params import SamplingParams

    try:
        # --seed seeds the engine, and through it the request
        return SamplingParams(**config.model_dump(include=set(SamplingParams.model_fields) - {"seed"}))
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error)) from None


def _stream(engine: Engine, prompt: str, params: SamplingParams) -> int:
    """Print the continuation of a prompt, then one line of figures. Raises RequestError as ``Engine.add_request``."""
    from specmamba.terminal.safe_text import safe

    began = time.perf_counter()
    engine.add_request(_REQUEST_ID, engine.tokenizer.encode(prompt), params)
    last, status = None, 0
    shown = safe if sys.stdout.isatty() else str  # a pipe gets what the model writes, as it is
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show becomes a question mark
    try:
        while engine.has_unfinished_requests:
            for last in engine.step():
                sys.stdout.write(shown(last.text))
                sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        _drop_output()
    if sys.stdout.isatty():
        print(flush=True)
    if last is not None and last.finish_reason == "error":
        print(f"specmamba generate: error: {last.error}", file=sys.stderr)
        return 1
    _print_figures(last, time.perf_counter() - began)
    return status


def _has_lost_reader() -> bool:
    """Whether the reader of standard output, such as ``| head``, has ended."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _drop_output() -> None:
    """Let what is still to be written to standard output go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_figures(last: OutputDelta | None, elapsed_s: float) -> None:
    from rich.console import Console
    from rich.text import Text

    num_tokens = 0 if last is None else last.num_output_tokens
    length = 0.0 if last is None else last.spec.accept_length
    reason = "interrupted" if last is None or last.finish_reason is None else last.finish_reason
    line = Text.assemble(
        (f"{num_tokens} tokens", "bold"),
        f", {num_tokens / elapsed_s:.1f} tokens/s, acceptance length {length:.2f}, finish reason: {reason}",
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def _prompts(config: GenerateConfig) -> tuple[str, ...]:
    """The prompts of the flags, or the one on standard input.

    Raises:
        RequestError: a prompt is empty, or standard input is no text.
    """
    prompts = config.prompt or (_read_prompt(),)
    if not all(prompts):
        raise RequestError("the prompt is empty: give --prompt TEXT, or text on standard input", param="prompt")
    return prompts


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("specmamba generate: type the prompt, then Ctrl-D", file=sys.stderr)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        from specmamba.terminal.line_input import no_text

        raise RequestError(no_text(error), param="prompt") from None


def _run_subcommand(command: str, arguments: list[str]) -> int:
    """Run ``specmamba COMMAND NAME [OPTIONS]``. Returns its exit status."""
    subcommands = SUBCOMMANDS[command]
    name = arguments[0] if arguments else ""
    help_text = _subcommand_help(command, subcommands)
    if name in ("-h", "--help", "help"):
        print(help_text, end="")
        return 0
    if name not in subcommands:
        return _refuse(f"specmamba {command}", help_text, name, subcommands)
    run: Callable[[list[str]], int] = importlib.import_module(subcommands[name][0]).main
    try:
        return run(arguments[1:])
    except SpecmambaError as error:
        return _end_with(f"specmamba {command} {name}", error)


def _subcommand_help(command: str, subcommands: Mapping[str, tuple[str, str]]) -> str:
    lines = [f"  {name:<15}{what}" for name, (_, what) in subcommands.items()]
    usage = f"usage: specmamba {command} NAME [OPTIONS]"
    options = f'"specmamba {command} NAME --help" lists the options.'
    return "\n".join([usage, "", "names:", *lines, "", options, ""])


def _print_version() -> int:
    from specmamba import __version__

    print(f"specmamba {__version__}")
    return 0


def _refuse(prog: str, help_text: str, command: str, commands: Collection[str]) -> int:
    if not command:
        print(help_text, end="", file=sys.stderr)
        return 2
    close = difflib.get_close_matches(command, commands, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(commands)}"
    kind = "option" if command.startswith("-") else "command"
    print(f"{prog}: error: there is no {kind} {command!r}; {hint}", file=sys.stderr)
    return 2


def _end_with(prog: str, error: SpecmambaError) -> NoReturn:
    from specmamba.flags.command_line import exit_with_error

    exit_with_error(prog, error)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "generate": _generate_command,
    "chat": _chat,
    "info": _info,
    "quantize": _quantize,
    "deploy": _deploy,
    "cache": _cache,
    "doctor": _doctor,
    **{command: partial(_run_subcommand, command) for command in SUBCOMMANDS},
}
