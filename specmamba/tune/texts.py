"""The texts that trees are tuned on, sampled or given, and the ranks of their tokens in the draft head's list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specmamba import LLM, SamplingParams
from specmamba.errors import ConfigError, RequestError
from specmamba.measure.full_batch import Job
from specmamba.measure.prompts import PromptText, encode_prompt, encode_with_continuation, seed_of
from specmamba.tune.options import TreeTunerConfig
from specmamba.tune.search import Ranks


@dataclass(frozen=True)
class Text:
    """A prompt and the ``max_tokens`` tokens behind it.

    Requests that are timed together run to the same length, beyond an end of text; acceptance is recorded up to it.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    length: int  # tokens up to the end-of-text token, which is included

    @property
    def recorded(self) -> tuple[int, ...]:
        """The tokens on which acceptance is recorded."""
        return self.tokens[: self.length]


def dropped_share(texts: Sequence[Text]) -> float:
    """Share of the tokens behind an end of text."""
    return 1 - sum(text.length for text in texts) / sum(len(text.tokens) for text in texts)


def collect_texts(config: TreeTunerConfig, llm: LLM, sources: Sequence[PromptText]) -> list[Text]:
    """Collect texts of exactly ``max_tokens`` tokens behind the first prompts that can be run.

    Args:
        config: says whether continuations are sampled or given.
        llm: samples them.
        sources: prompts.

    Raises:
        ConfigError: fewer than two prompts can be run.
        RequestError: the model's numbers are not finite.
    """
    pairs = [(prompt, rest) for prompt, rest in _encoded(config, llm, sources) if _fits(config, llm, prompt, rest)]
    pairs = pairs[: config.num_prompts]
    if len(pairs) < 2:
        needed = "a continuation of --max-tokens tokens and " if config.replay else ""
        raise ConfigError(
            f"two prompts are needed at the least, with {needed}room for {config.max_tokens} tokens behind them in a "
            f"context of {llm.engine.context_length}: lower --max-tokens, or give --prompts FILE"
        )
    if config.replay:
        return [Text(prompt, rest[: config.max_tokens], config.max_tokens) for prompt, rest in pairs]
    return _sampled(config, llm, [prompt for prompt, _ in pairs])


def _sampled(config: TreeTunerConfig, llm: LLM, prompts: Sequence[tuple[int, ...]]) -> list[Text]:
    llm.workbench.use_drafts(speculative_algorithm="none")
    params = [sampling_params(config, number) for number in range(len(prompts))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise RequestError(output.error)
    return [_cut(llm, output.prompt_token_ids, output.token_ids) for output in outputs]


def _cut(llm: LLM, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Text:
    ends = llm.engine.model.eos_token_ids
    return Text(prompt, tokens, next((i for i, token in enumerate(tokens, 1) if token in ends), len(tokens)))


def _encoded(
    config: TreeTunerConfig, llm: LLM, sources: Sequence[PromptText]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Encode each prompt, and its continuation if that is replayed."""
    tokenizer, pairs = llm.engine.tokenizer, []
    for source in sources:
        if config.replay:
            prompt, rest = encode_with_continuation(source, tokenizer)
        else:
            prompt, rest = encode_prompt(source, tokenizer), []
        pairs.append((tuple(prompt), tuple(rest)))
    return pairs


def _fits(config: TreeTunerConfig, llm: LLM, prompt: Sequence[int], rest: Sequence[int]) -> bool:
    has_room = bool(prompt) and len(prompt) + config.max_tokens <= llm.engine.context_length
    return has_room and (not config.replay or len(rest) >= config.max_tokens)


def sampling_params(config: TreeTunerConfig, number: int) -> SamplingParams:
    """The parameters of request ``number``; its text continues to ``max_tokens`` behind an end of text."""
    seed = seed_of(config.seed, number)
    return SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, seed=seed, ignore_eos=True)


def record_ranks(llm: LLM, texts: Sequence[Text], num_steps: int, batch_size: int) -> list[Ranks]:
    """Rank of every recorded token of every text in the draft head's list, as arrays [T, num_steps].

    Column i has the ranks of the tokens i + 1 places ahead.

    Args:
        llm: an engine that drafts with a head.
        texts: what to replay.
        num_steps: how far ahead.
        batch_size: texts that run together.
    """
    llm.workbench.use_drafts(speculative_num_steps=num_steps)
    recorder = llm.workbench.record_ranks()
    owners: list[int] = []  # text of each recorded row: a step records its batch in the order of its deltas
    for first in range(0, len(texts), batch_size):
        for i, text in enumerate(texts[first : first + batch_size], start=first):
            params = SamplingParams(max_tokens=text.length, temperature=0.0, ignore_eos=True)
            llm.engine.add_request(str(i), text.prompt, params, text.recorded)
        while llm.engine.has_unfinished_requests:
            deltas = llm.engine.step()
            for delta in deltas:
                if delta.error is not None:
                    raise RequestError(delta.error)
            owners += [int(delta.request_id) for delta in deltas]
    ranks, places = recorder.ranks.numpy(), range(len(owners))
    return [ranks[[place for place in places if owners[place] == i]] for i in range(len(texts))]


def probe_jobs(config: TreeTunerConfig, texts: Sequence[Text], batch_size: int, number: int) -> list[Job]:
    """Requests that replay the middle half of the next texts, so that their lengths are about the mean of a text."""
    start, end = config.max_tokens // 4, config.max_tokens - config.max_tokens // 4
    jobs = []
    for i in range(number * batch_size, (number + 1) * batch_size):
        text = texts[i % len(texts)]
        params = sampling_params(config, 0).model_copy(update={"max_tokens": end - start})
        jobs.append(Job(text.prompt + text.tokens[:start], params, text.tokens[start:end]))
    return jobs


def check_jobs(config: TreeTunerConfig, texts: Sequence[Text], batch_size: int, number: int) -> list[Job]:
    """Requests to check a prediction: the next prompts, sampled with seeds that were not recorded.

    With ``--replay`` and at temperature 0 there is no other text than the recorded one.
    """
    jobs = []
    for i in range(number * batch_size, (number + 1) * batch_size):
        text = texts[i % len(texts)]
        params = sampling_params(config, len(texts) + i)
        jobs.append(Job(text.prompt, params, text.tokens if config.replay else ()))
    return jobs
