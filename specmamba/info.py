"""``specmamba info``: what a model is, what it takes, and what can be done with it. No weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from specmamba.flags.command_line import parse_command_line, readable
from specmamba.measure.command import Page, Row, put_out, section_table
from specmamba.measure.report import Count, JsonOption

PROG = "specmamba info"
Info = Mapping[str, Any]
NAMES = {"gated_delta_net": "gated delta net", "mamba2": "Mamba2", "mixture_of_experts": "mixture of experts"}
NAMES |= {"short_convolution": "short convolution", "mlp": "MLP", "latent_attention": "latent attention"}
NAMES |= {"kimi_delta_attention": "Kimi delta attention", "mamba1": "Mamba1"}
PLAN_TOKENS = (1024, 8192, 32768)


class InfoConfig(JsonOption):
    """What a model is, what it takes under these flags, and what can be done with it. --json -: to standard output."""

    plan: Annotated[
        bool, Field(description="say instead what each of 1, 2, 4, ... ranks takes, and how many requests run on them")
    ] = False
    gpu_memory: Annotated[
        float | None,
        Field(gt=0, le=1 << 20, description="with --plan: GiB of one GPU, which need not be there; none: what is free"),
    ] = None
    plan_tokens: Annotated[
        tuple[Count, ...], Field(min_length=1, description="with --plan: prompt and output tokens of requests")
    ] = PLAN_TOKENS

    @model_validator(mode="after")
    def _plan_flags_go_together(self) -> Self:
        given = [name for name in ("gpu_memory", "plan_tokens") if name in self.model_fields_set]
        if given and not self.plan:
            raise ValueError(f"--{given[0].replace('_', '-')}: this is a flag of --plan: add --plan")
        if self.gpu_memory is not None and self.device == "cpu":
            raise ValueError("--gpu-memory: --device cpu has no GPU: drop one of them")
        return self


def main(arguments: list[str]) -> int:
    """Print a table, or JSON where that goes to standard output. Returns 0. Raises SpecmambaError."""
    config = parse_command_line(InfoConfig, PROG, arguments)
    if config.plan:
        from specmamba.engine.capacity_plan import plan_capacity

        plans = plan_capacity(config, config.gpu_memory, config.plan_tokens)
        return put_out(config, plans, print_plans, can_print_json=True)
    from specmamba.engine.model_report import model_info

    info = model_info(config)
    return put_out(config, info, print_info, can_print_json=True)


def print_info(info: Info) -> None:
    """Print a table in sections, then the memory plan."""
    from rich.console import Console

    table = section_table((_model(info), _stored(info), _memory(info), _drafting(info), _choices(info)))
    console = Console(highlight=False)
    console.print(table, markup=False)
    memory = info["memory"]
    if "problem" in memory:
        console.print(f" With these flags the engine does not start: {memory['problem']}", markup=False)
        return
    free = f"{readable(memory['free_bytes'])} of memory are free on {info['device']}"
    lines = [f" With these flags the engine takes ({free}):", *(f"   {line}" for line in memory["table"])]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _model(info: Info) -> Iterator[Row]:
    tokenizer = info["tokenizer"]
    yield "model", str(info["model"])
    yield "architecture", info["architecture"]
    yield "parameters", _parameters(info)
    yield "layers", _layers(info["layers"])
    yield "hidden size", f"{info['hidden_size']:,}"
    yield "context", f"{info['context_length']:,} tokens"
    if "is_skipped" in tokenizer:
        yield "tokenizer", "not read (--skip-tokenizer-init): prompts and answers are token ids"
        return
    if "problem" in tokenizer:
        yield "tokenizer", f"none: {tokenizer['problem']}"
        return
    template = "with a chat template" if tokenizer["has_chat_template"] else "without a chat template"
    ends = ", ".join(map(str, tokenizer["eos_token_ids"])) or "no token"
    of = f"of {info['vocab_size']:,} that the model has"
    yield "tokenizer", f"{tokenizer['tokens']:,} tokens {of}, {template}; a text ends with {ends}"


def _parameters(info: Info) -> str:
    draft = info["draft"]
    if draft is None or draft["path"] is not None:
        return _count(info["parameters"])
    return f"{_count(info['parameters'])}; with the draft head {_count(info['parameters'] + draft['parameters'])}"


def _memory(info: Info) -> Iterator[Row]:
    sizes, quantization = info["bytes"], info["quantization"]
    form = info["dtype"] if quantization in ("auto", "none") else f"{info['dtype']}, --quantization {quantization}"
    yield "weights", f"{readable(sizes['weights'])} ({form})"
    yield (
        "read per step",
        f"{readable(sizes['weights_per_step'])} of weights, {readable(sizes['state_per_slot'])} of state",
    )
    yield "state", f"{readable(sizes['state_per_slot'])} per slot (recurrent states {info['mamba_ssm_dtype']})"
    yield (
        "record",
        f"{readable(sizes['record_per_token'])} per token; a snapshot {readable(sizes['snapshot_per_node'])}",
    )
    yield "KV", f"{readable(sizes['kv_per_token'])} per token ({info['kv_cache_dtype']})"
    if sizes["draft_per_slot"] or sizes["draft_kv_per_token"]:
        slot, token = readable(sizes["draft_per_slot"]), readable(sizes["draft_kv_per_token"])
        yield "drafting adds", f"{slot} per slot, {token} of KV per token"
    records, snapshots = readable(sizes["records_per_request"]), readable(sizes["snapshots_per_request"])
    yield "running request", f"{records} of records (or {snapshots} of snapshots)"


def _stored(info: Info) -> Iterator[Row]:
    """What the checkpoint stores, by kind of layer."""
    found: dict[str, list[str]] = {}
    for each in info["stored"]:
        runs_as = "" if each["runs_as"] == info["dtype"] else f", runs as {each['runs_as']}"
        found.setdefault(each["layers"], []).append(f"{each['form']} ({readable(each['num_bytes'])}){runs_as}")
    for layers, forms in found.items():
        yield f"stored {layers}", "; ".join(forms)
    if info["ignored"]:
        yield "not used", ", ".join(f"{name} ({number})" for name, number in info["ignored"].items())


def _drafting(info: Info) -> Iterator[Row]:
    draft, chosen = info["draft"], info["drafts_with"]
    if draft is None:
        yield "draft", "none was found: give one with --speculative-draft-model-path, or draft with ngram or suffix"
    else:
        where = "in the checkpoint" if draft["path"] is None else draft["path"]
        size = f"{_count(draft['parameters'])} parameters, {readable(draft['weight_bytes'])}"
        variant = f" ({draft['variant']})" if "variant" in draft else ""
        yield "draft", f"{draft['kind']} {where}{variant}: {_layers(draft['layers'])}; {size}"
    if chosen["algorithm"] == "none":
        yield "these flags draft", "nothing"
    else:
        steps, nodes = chosen["num_steps"], chosen["num_draft_tokens"]
        yield "these flags draft", f"{chosen['algorithm']}, {steps} steps of top {chosen['topk']}, {nodes} nodes"


def _choices(info: Info) -> Iterator[Row]:
    supported = info["supported"]
    for name, shapes in supported["algorithms"].items():
        if shapes:
            yield f"--speculative-algorithm {name}", ", ".join(shapes)
    for name in (
        "dtype",
        "quantization",
        "mamba_ssm_dtype",
        "kv_cache_dtype",
        "speculative_state",
        "speculative_accept",
    ):
        yield f"--{name.replace('_', '-')}", ", ".join(supported[name])


def _layers(layers: Mapping[str, int]) -> str:
    kinds = ", ".join(f"{number} {NAMES.get(kind, kind)}" for kind, number in layers.items() if kind != "blocks")
    return f"{layers['blocks']} blocks: {kinds}" if "blocks" in layers else kinds


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:,.3g} {name} ({number:,})"
    return f"{number:,}"


def print_plans(report: Info) -> None:
    """Print a table with a column for each number of ranks that can run the model, and why the others cannot."""
    page, plans = Page(), report["plans"]
    share, memory = report["mem_fraction_static"], readable(report["memory_bytes"])
    place = "one GPU" if report["device"] == "cuda" else "this machine, which all ranks share"
    page.lines(f"{report['model']}: what one rank takes, with {share:.0%} of the {memory} of {place}")
    if fitting := [plan for plan in plans if "problem" not in plan]:
        page.table(["", *map(_ranks, fitting)], _plan_rows(fitting))
    page.lines(*(f"{_ranks(plan)}: {plan['problem']}" for plan in plans if "problem" in plan))


def _plan_rows(plans: Sequence[Info]) -> Iterator[tuple[str, ...]]:
    """Rows of a name and a cell for each plan."""
    for name, key in (
        ("weights", "weights"),
        ("KV per token", "kv_per_token"),
        ("state per request", "state_per_request"),
        ("speculation per request", "speculation_per_request"),
    ):
        yield name, *(readable(plan[key]) for plan in plans)
    yield "KV pool", *(f"{plan['kv_pool_tokens']:,} tokens" for plan in plans)
    yield "recurrent states", *(f"{plan['state_slots']:,}" for plan in plans)
    yield "total with these pools", *(readable(plan["total"]) for plan in plans)
    for tokens in plans[0]["requests_at_once"]:
        yield f"requests of {tokens:,} tokens at once", *(_number(plan, tokens) for plan in plans)


def _number(plan: Info, tokens: int) -> str:
    number: int | None = plan["requests_at_once"][tokens]
    return "too long" if number is None else f"{number:,}"


def _ranks(plan: Info) -> str:
    return f"{plan['tp_size']} rank{'' if plan['tp_size'] == 1 else 's'}"
