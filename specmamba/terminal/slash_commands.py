"""The commands of a conversation: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specmamba.errors import ConfigError
from specmamba.flags.near_names import did_you_mean
from specmamba.terminal.answer_source import AnswerError
from specmamba.terminal.chat_figures import figures
from specmamba.terminal.chat_session import ChatSession
from specmamba.terminal.chat_settings import NAMES
from specmamba.terminal.screen import Screen

After = Literal["retry", "exit"] | None
Takes = Literal["nothing", "a text", "anything"]


@dataclass(frozen=True)
class _Command:
    usage: str
    help: str
    run: Callable[[str], After]  # gets what stands behind the name
    takes: Takes = "nothing"


class SlashCommands:
    """The commands of one session."""

    def __init__(self, session: ChatSession, screen: Screen) -> None:
        self._session, self._screen = session, screen
        self._commands = {
            "/help": _Command("/help", "this list", self._help),
            "/stats": _Command("/stats", "speed, drafts and cached tokens; what drafts, and why", self._stats),
            "/reset": _Command("/reset", "begin a new conversation", self._reset),
            "/system": _Command(
                "/system TEXT", "set the system message; none removes it; alone: show it", self._system, "anything"
            ),
            "/retry": _Command("/retry", "answer the last message again", lambda _: "retry"),
            "/undo": _Command("/undo", "take the last message and its answer back", self._undo),
            "/set": _Command(
                "/set NAME VALUE", "change a setting, as temperature 0.2; alone: list them", self._set, "anything"
            ),
            "/save": _Command("/save FILE", "write the conversation as JSON", self._save, "a text"),
            "/exit": _Command("/exit", "end, as Ctrl-D does", lambda _: "exit"),
        }

    def run(self, line: str) -> After:
        """Run a line that begins with a slash. Returns what the caller has to do then; None: nothing.

        Raises:
            ConfigError: there is no such command, or it cannot do this.
            AnswerError: there is nothing that it could be about.
        """
        name, *more = line.split(maxsplit=1)
        rest = more[0].strip() if more else ""
        if (command := self._commands.get(name)) is None:
            near = did_you_mean(name, self._commands) or "; /help lists them"
            raise ConfigError(f"there is no command {name}{near} (a message that begins with a slash is written //...)")
        if (command.takes == "nothing" and rest) or (command.takes == "a text" and not rest):
            raise ConfigError(f"it is written {command.usage}")
        return command.run(rest)

    def _help(self, rest: str) -> None:
        width = max(len(command.usage) for command in self._commands.values())
        for command in self._commands.values():
            self._screen.line(f"{command.usage:<{width}}  {command.help}")
        self._screen.line('A message goes on behind a backslash at the end of its line, and from """ to """.')
        self._screen.line("Ctrl-C stops an answer, or clears the line; Ctrl-D ends.")

    def _stats(self, rest: str) -> None:
        for line in figures(self._session):
            self._screen.line(line)

    def _reset(self, rest: str) -> None:
        self._session.reset()
        self._screen.note("a new conversation" + (", with the same system message" if self._session.system else ""))

    def _system(self, rest: str) -> None:
        if not rest:
            none = "there is no system message: /system TEXT sets one"
            self._screen.line(self._session.system or none)
            return
        self._session.system = None if rest == "none" else rest
        self._screen.note(f"the system message is {'removed' if self._session.system is None else 'set'}")

    def _undo(self, rest: str) -> None:
        first, *more = self._session.undo().splitlines() or [""]
        self._screen.note("taken back: " + first[:60] + ("..." if more or len(first) > 60 else ""))

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        settings = self._session.settings
        if not name:
            for known in NAMES:
                self._screen.line(f"{known} {settings.shown(known)}")
            return
        if not value.strip():
            raise ConfigError("it is written /set NAME VALUE; /set alone lists all of them")
        name = settings.set(name, value.strip())
        self._screen.note(f"{name} {settings.shown(name)}")

    def _save(self, rest: str) -> None:
        if not self._session.messages():
            raise AnswerError("there is nothing to save")
        self._session.save(Path(rest))
        self._screen.note(f"saved to {rest}: the body of a request to /v1/chat/completions")
