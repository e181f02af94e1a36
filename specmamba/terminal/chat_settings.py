"""What ``/set`` changes in a conversation: how answers are chosen, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ValidationError

from specmamba.chat_config import ChatConfig
from specmamba.errors import ConfigError
from specmamba.flags.command_line import describe_validation_error
from specmamba.flags.near_names import did_you_mean
from specmamba.sampling_params import LogitSettings, SamplingParams

_FROM_FLAGS = ("max_tokens", "temperature", "stop", *LogitSettings.model_fields)
SAMPLING = (*_FROM_FLAGS, "seed", "speculative")
SWITCHES = {"on": True, "true": True, "off": False, "false": False}
NAMES = (*SAMPLING, "markdown")


@dataclass
class ChatSettings:
    """The settings now."""

    initial: SamplingParams
    markdown: bool = True
    params: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        self.params = self.initial

    @classmethod
    def of(cls, config: ChatConfig) -> ChatSettings:
        """Those of the flags. Raises ConfigError for a value that is not valid."""
        # --seed seeds the engine, and through it every answer
        given = config.model_dump(include=set(_FROM_FLAGS))
        return cls(_checked(given), config.markdown)

    def set(self, name: str, value: str) -> str:
        """Change one setting; "none" takes it back to what it was at the start. Returns its name.

        Raises:
            ConfigError: there is no such setting, or the value is not valid.
        """
        name = name.replace("-", "_")
        if name not in NAMES:
            near = did_you_mean(name, NAMES)
            raise ConfigError(f"there is no setting {name!r}{near or '; there are ' + ', '.join(NAMES)}")
        if name == "markdown":
            self.markdown = _switch(name, value)
            return name
        new: object = _switch(name, value) if name == "speculative" and value.lower() != "none" else value
        if value.lower() == "none":
            new = getattr(self.initial, name)
        self.params = _checked({**self.params.model_dump(include=set(SAMPLING)), name: new})
        return name

    def shown(self, name: str) -> str:
        """A value as ``set`` takes it."""
        value = self.markdown if name == "markdown" else getattr(self.params, name)
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return " ".join(map(repr, value)) or "none"
        return "none" if value is None else str(value)


def _checked(values: dict[str, object]) -> SamplingParams:
    try:
        return SamplingParams.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error).removeprefix("--")) from None


def _switch(name: str, value: str) -> bool:
    if value.lower() not in SWITCHES:
        raise ConfigError(f"{name}: on or off, not {value!r}")
    return SWITCHES[value.lower()]
