"""How tokens are chosen: the settings of one request, and of a batch as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from specmamba.flags.near_names import did_you_mean
from specmamba.flags.other_names import OTHER_PARAMS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bounds of sampling settings: the same in Python, over HTTP and on the command line.
Temperature = Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False, description="0: greedy")]
TopP = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False, description="mass of the likeliest tokens to keep")]
TopK = Annotated[int, Field(ge=-1, le=2**31, description="keep the k likeliest tokens; 0 or -1 keeps all")]
MinP = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False, description="relative to the likeliest token")]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
# bounded below too: a logit divided by a tiny number overflows
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False, description="1 changes nothing")]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
MAX_STOP_STRINGS, MAX_STOP_IDS = 16, 256
MAX_LOGPROBS, MAX_BIASES, MAX_GRAMMAR_CHARACTERS = 20, 1024, 65_536
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
NumChoices = Annotated[int, Field(ge=1, le=1024)]
LogitBias = Annotated[
    dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]],
    Field(max_length=MAX_BIASES, description="added to the logits of tokens, by token id"),
]


# The marks around a model's reasoning.
THINK, THINK_END = "<think>", "</think>"
# Whether an output begins with reasoning: the prompt has opened it, the model may open it, or there is none.
ReasoningStart = Literal["open", "optional", "none"]


class GrammarSpec(BaseModel):
    """The grammar that every output of a request must match; end-of-text is allowed where the match is complete."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["json_object", "json_schema", "regex", "ebnf"]
    text: Annotated[
        str, Field(max_length=MAX_GRAMMAR_CHARACTERS, description="schema, expression or rules; empty for json_object")
    ] = ""
    reasoning: Annotated[
        ReasoningStart, Field(description="free text up to </think> that may, or must, come before what matches")
    ] = "none"


AcceptRule = Literal["target", "rejection"]


class SpeculationParams(BaseModel):
    """How one request is drafted for, where it differs from the server's flags."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accept: Annotated[
        AcceptRule | None, Field(description="rule of acceptance; none: as --speculative-accept says")
    ] = None
    max_depth: Annotated[
        int | None, Field(ge=0, le=63, description="deepest draft below the root; 0: no drafts; none: the server's")
    ] = None


class LogitSettings(BaseModel):
    """Filters and penalties: they change the logits of every token, and are neutral by default."""

    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


class SamplingParams(LogitSettings):
    """How the tokens of one request are chosen and when it ends. Validated, immutable.

    ``temperature`` 0 is greedy. With a ``seed`` and the acceptance rule "target" the text depends, in exact arithmetic,
    on nothing else: not on the batch the request runs in, and not on the drafter, because the random number of a token
    is a function of (seed, position) alone. Under "rejection" it also depends on what was drafted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: Annotated[int, Field(ge=0, description="new tokens at the most; 0: the prompt is only run")] = 16
    temperature: Temperature = 1.0
    seed: Seed | None = None
    n: Annotated[NumChoices, Field(description="continuations of each prompt; the seed of number i is seed + i")] = 1
    # declared as sequences, so that a list type-checks, and kept as tuples
    stop: Annotated[Sequence[StopString], Field(max_length=MAX_STOP_STRINGS), AfterValidator(tuple)] = ()
    stop_token_ids: Annotated[
        Sequence[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_IDS), AfterValidator(tuple)
    ] = ()
    ignore_eos: bool = False
    logit_bias: LogitBias = {}
    logprobs: Annotated[NumLogprobs | None, Field(description="likeliest tokens to list beside each new one")] = None
    prompt_logprobs: Annotated[NumLogprobs | None, Field(description="the same of the prompt's tokens")] = None
    grammar: GrammarSpec | None = None
    prediction: Annotated[
        str | Sequence[int] | None,
        AfterValidator(lambda given: given if given is None or isinstance(given, str) else tuple(given)),
        Field(description="text or token ids that the output is expected to repeat, to draft from"),
    ] = None
    speculative: Annotated[
        bool | SpeculationParams, Field(description="false: decode this request plainly, without drafts")
    ] = True

    @model_validator(mode="before")
    @classmethod
    def _names_are_known(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        named = {OTHER_PARAMS.get(name, name): value for name, value in values.items()}
        if len(named) < len(values):
            raise ValueError(f"two names for one setting are given: {', '.join(map(str, values))}")
        for name in named:
            if name not in cls.model_fields:
                raise ValueError(f"there is no {name!r}{did_you_mean(str(name), cls.model_fields)}")
        return named

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: object) -> object:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    def of_choice(self, index: int) -> SamplingParams:
        """The settings of one continuation of a prompt, by its number from 0 on.

        It takes the seed ``seed + index``, if there is one. Number 0 alone computes log probabilities of the prompt.
        """
        if index == 0:
            return self if self.n == 1 else self.model_copy(update={"n": 1})
        # seeds are signed 64-bit numbers and wrap around
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        return self.model_copy(update={"n": 1, "seed": seed, "prompt_logprobs": None})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def max_depth(self) -> int | None:
        """Depth of its deepest draft; 0: it gets no drafts; None: no bound of its own."""
        if isinstance(self.speculative, SpeculationParams):
            return self.speculative.max_depth
        return None if self.speculative else 0

    @property
    def is_drafted(self) -> bool:
        """Whether it gets drafts."""
        return self.max_depth != 0

    @property
    def accept(self) -> AcceptRule | None:
        """The rule of acceptance that it asks for."""
        return self.speculative.accept if isinstance(self.speculative, SpeculationParams) else None


class Penalties(NamedTuple):
    """Penalty strengths, all [B] float32; neutral (0, 0, 1) for rows without penalties."""

    presence: Tensor
    frequency: Tensor
    repetition: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """Logit biases: ``values`` [K] float32 are added to the logits of ``tokens`` [K] in ``rows`` [K], both int64."""

    rows: Tensor
    tokens: Tensor
    values: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Biases:
        """Collect the biases of a batch's requests, at least one of which has some."""
        import torch

        found = [(row, *item) for row, p in enumerate(params) for item in p.logit_bias.items()]
        rows, tokens, values = zip(*found, strict=True)
        return cls(
            torch.tensor(rows, device=device),
            torch.tensor(tokens, device=device),
            torch.tensor(values, dtype=torch.float32, device=device),
        )

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of its tensors."""
        return self.rows, self.tokens, self.values


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling settings of a batch, all [B]; None if no row uses the setting, so that its work is skipped."""

    temperature: Tensor | None  # float32; None: all greedy
    top_k: Tensor | None  # int64
    top_p: Tensor | None  # float32
    min_p: Tensor | None  # float32
    seeds: Tensor  # int64
    penalties: Penalties | None
    biases: Biases | None = None
    rejects: Tensor | None = None  # bool, rows decided under ``rejection``; None: no row
    all_reject: bool = False  # no row with a temperature is decided under ``target``

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        device: torch.device,
        rules: Sequence[AcceptRule] | None = None,
    ) -> SamplingBatch:
        """Collect the settings of a batch's requests; ``rules`` of acceptance, None: all are ``target``."""
        import torch

        def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

        sampled = [p for p in params if not p.is_greedy]
        rejects = [rule == "rejection" and not p.is_greedy for rule, p in zip(rules or (), params, strict=False)]
        penalties = None
        if any(p.has_penalties for p in params):
            penalties = Penalties(column("presence_penalty"), column("frequency_penalty"), column("repetition_penalty"))
        return cls(
            temperature=column("temperature") if sampled else None,
            top_k=column("top_k", torch.int64) if any(p.top_k > 0 for p in sampled) else None,
            top_p=column("top_p") if any(p.top_p < 1 for p in sampled) else None,
            min_p=column("min_p") if any(p.min_p > 0 for p in sampled) else None,
            seeds=torch.tensor(seeds, dtype=torch.int64, device=device),
            penalties=penalties,
            biases=Biases.of(params, device) if any(p.logit_bias for p in params) else None,
            rejects=torch.tensor(rejects, device=device) if any(rejects) else None,
            all_reject=sum(rejects) == len(sampled),
        )
