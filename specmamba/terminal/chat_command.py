"""``specmamba chat``: a conversation in the terminal, or through pipes."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence

from specmamba.chat_config import ChatConfig
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError, RequestError
from specmamba.flags.command_line import parse_command_line
from specmamba.terminal.answer_source import AnswerError, AnswerSource, SourceGoneError
from specmamba.terminal.chat_session import Answer, ChatSession
from specmamba.terminal.chat_settings import ChatSettings
from specmamba.terminal.line_input import LineEditor, PipeReader, history_file, is_interactive, read_message
from specmamba.terminal.screen import Screen
from specmamba.terminal.slash_commands import SlashCommands

PROG = "specmamba chat"


def main(arguments: list[str]) -> int:
    """Hold a conversation.

    Returns:
        0; 1 where a message of a pipe got no answer, or no more answers can come.

    Raises:
        SpecmambaError: the flags, the model or the server do not allow to begin.
        KeyboardInterrupt: Ctrl-C outside of a terminal.
    """
    config = parse_command_line(ChatConfig, PROG, arguments)
    _check_flags(config, arguments)
    settings = ChatSettings.of(config)
    is_terminal = is_interactive()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show becomes a question mark
    screen = Screen(sys.stdout, sys.stderr, is_terminal)
    if is_terminal and config.url is None:
        screen.note(f"loading {config.model or 'the bundled demo'}")
    source = _source(config)
    try:
        session = ChatSession(source, settings, config.system or None)
        if is_terminal:
            return _on_terminal(session, screen, config)
        pipe = PipeReader(sys.stdin)
        return _Talk(session, screen, lambda: read_message(pipe.read_line)).run()
    finally:
        source.close()


def _check_flags(config: ChatConfig, arguments: Sequence[str]) -> None:
    """Raise ConfigError for flags of the command line without effect; the environment and files serve others too."""
    given = {argument.partition("=")[0].removeprefix("--") for argument in arguments if argument.startswith("--")}
    of_engine = {name.replace("_", "-") for name in EngineConfig.model_fields} - {"model"}
    engine_flags = sorted(f"--{name}" for name in given if name.removeprefix("no-") in of_engine)
    if config.url is not None and engine_flags:
        hint = " (/set seed N seeds answers)" if engine_flags == ["--seed"] else ""
        raise ConfigError(f"{', '.join(engine_flags)}: the server of --url has its own; drop it{hint}")
    if config.url is None and "api-key" in given:
        raise ConfigError("--api-key: only servers ask for keys; add --url, or drop it")
    if config.url is None and config.skip_tokenizer_init:
        raise ConfigError("--skip-tokenizer-init: this command reads and writes texts: drop it")


def _source(config: ChatConfig) -> AnswerSource:
    if config.url is not None:
        from specmamba.terminal.remote_source import RemoteSource

        return RemoteSource(config)
    from specmamba.terminal.local_source import LocalSource

    return LocalSource(config)


def _on_terminal(session: ChatSession, screen: Screen, config: ChatConfig) -> int:
    """Talk with a person, who may edit lines and call earlier ones up again."""
    editor = LineEditor(history_file() if config.history else None)
    source = session.source
    context = "" if source.context_length is None else f", context {source.context_length} tokens"
    where = "" if config.url is None else f" at {config.url}"
    screen.note(f"{source.model}{where}{context}; /help lists commands, Ctrl-D ends")

    def read() -> str:
        message = read_message(editor.read_line)
        editor.remember(message)
        return message

    try:
        return _Talk(session, screen, read, is_terminal=True).run()
    finally:
        if problem := editor.save():
            screen.error(problem)


class _Talk:
    """Reads messages and shows their answers, until the end."""

    def __init__(
        self, session: ChatSession, screen: Screen, read: Callable[[], str], is_terminal: bool = False
    ) -> None:
        self._session, self._screen, self._read, self._is_terminal = session, screen, read, is_terminal
        self._commands = SlashCommands(session, screen)
        self._status = 0
        self._goes_on = True

    def run(self) -> int:
        """Returns the exit status."""
        while self._goes_on:
            try:
                self._turn()
            except KeyboardInterrupt:  # at the prompt, or a second one while an answer was being stopped
                if not self._is_terminal:
                    raise
                self._screen.line("")
        return self._status

    def _turn(self) -> None:
        try:
            message = self._read()
            if message.startswith("//"):
                self._answer(lambda: self._session.ask(message[1:], self._screen.show))
            elif message.startswith("/"):
                self._command(message)
            elif message.strip():
                self._answer(lambda: self._session.ask(message, self._screen.show))
        except EOFError:
            if self._is_terminal:
                self._screen.line("")
            self._goes_on = False
        except (AnswerError, ConfigError, RequestError) as error:
            self._screen.error(str(error))
            self._goes_on = not isinstance(error, SourceGoneError)
            self._status = self._status if self._is_terminal and self._goes_on else 1

    def _command(self, message: str) -> None:
        after = self._commands.run(message)
        if after == "exit":
            self._goes_on = False
        elif after == "retry":
            self._answer(lambda: self._session.retry(self._screen.show))

    def _answer(self, ask: Callable[[], Answer]) -> None:
        session, screen = self._session, self._screen
        screen.begin()
        try:
            answer = ask()
        except KeyboardInterrupt:
            screen.end()
            if not self._is_terminal:
                raise
            screen.note("stopped; /retry answers again, /undo takes the message back")
            return
        except AnswerError:
            screen.end()
            raise
        screen.end(answer.text if session.settings.markdown else None)
        if reason := session.cut_off(answer):
            screen.note(reason)
