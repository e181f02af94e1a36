"""Flags, environment and file: names, precedence, and what is refused with which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, SecretStr

from specmamba import LLM, SamplingParams
from specmamba.bench.adaptive import AdaptiveBenchConfig
from specmamba.bench.host_time import HostTimeConfig
from specmamba.bench.prefix.engines import PrefixBenchConfig
from specmamba.bench.swing import SwingConfig
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.chat_config import ChatConfig
from specmamba.config import DEMO_MODEL, GPU_DEFAULTS, CommandLine, EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.command_line import describe_validation_error, parse_command_line, read_flags
from specmamba.flags.flag_parser import GROUPS, grouped
from specmamba.generate_config import GenerateConfig
from specmamba.measure.acceptance.options import AcceptanceBenchConfig
from specmamba.server_config import ServerConfig
from specmamba.tune.options import TreeTunerConfig

ROOT = Path(__file__).parents[2]

# DESIGN section 10, as far as it is built
ENGINE_FLAGS = {
    "--model": "x",
    "--dtype": "float32",
    "--device": "cpu",
    "--mem-fraction-static": "0.25",
    "--max-mamba-cache-size": "3",
    "--max-running-requests": "4",
    "--max-total-tokens": "1000",
    "--context-length": "128",
    "--chunked-prefill-size": "64",
    "--page-size": "16",
    "--seed": "7",
    "--speculative-algorithm": "mtp",
    "--speculative-num-steps": "2",
    "--speculative-num-draft-tokens": "3",
}
SERVER_FLAGS = {"--host": "0.0.0.0", "--port": "8000", "--api-key": "secret", "--served-model-name": "name"}
GENERATE_FLAGS = {"--prompt": "text", "--max-tokens": "12", "--temperature": "0.8"}


pytestmark = pytest.mark.usefixtures("no_settings_from_outside")


def serve(*arguments: str) -> ServerConfig:
    return parse_command_line(ServerConfig, "specmamba serve", list(arguments))


def generate(*arguments: str) -> GenerateConfig:
    return parse_command_line(GenerateConfig, "specmamba generate", list(arguments))


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        serve(*arguments)
    return str(error.value)


class TestFlags:
    @pytest.mark.parametrize(("flag", "value"), (ENGINE_FLAGS | SERVER_FLAGS).items())
    def test_serve(self, flag: str, value: str) -> None:
        for arguments in ([flag, value], [f"{flag}={value}"]):
            set_to = getattr(serve(*arguments), flag[2:].replace("-", "_"))
            if isinstance(set_to, tuple):
                (set_to,) = set_to
            assert (set_to.get_secret_value() if isinstance(set_to, SecretStr) else str(set_to)) == value

    @pytest.mark.parametrize(("flag", "value"), (ENGINE_FLAGS | GENERATE_FLAGS).items())
    def test_generate(self, flag: str, value: str) -> None:
        set_to = getattr(generate(flag, value), flag[2:].replace("-", "_"))
        if isinstance(set_to, tuple):
            (set_to,) = set_to
        assert str(set_to) == value

    def test_all_at_once(self) -> None:
        arguments = [word for pair in (ENGINE_FLAGS | SERVER_FLAGS).items() for word in pair]
        config = serve(*arguments)
        assert config.num_draft_steps == 2
        assert config.model_name == "name"

    def test_defaults(self) -> None:
        config = serve()
        assert (config.host, config.port, config.seed, config.page_size) == ("127.0.0.1", 30000, 0, 1)
        assert config.model_path == str(DEMO_MODEL)
        assert config.model_name == "specmamba-demo"
        assert (config.speculative_algorithm, config.num_draft_steps) == ("auto", 3)
        assert serve("--model", "a/b").model_name == "a/b"

    def test_only_kebab_case_and_only_whole_names(self, capsys: pytest.CaptureFixture[str]) -> None:
        for flag in ("--page_size", "--page-siz", "--pagesize"):
            with pytest.raises(SystemExit) as ended:
                serve(flag, "4")
            assert ended.value.code == 2
            assert flag in capsys.readouterr().err

    def test_flags_of_the_other_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            serve("--prompt", "x")
        with pytest.raises(SystemExit):
            generate("--port", "1")
        assert "--port" in capsys.readouterr().err

    def test_stop_may_be_given_again(self) -> None:
        assert generate("--stop", "a", "--stop", "b c", "--stop=-d").stop == ["a", "b c", "-d"]

    @pytest.mark.parametrize(
        "stop", ["b,c", ",", " ", "\n", "[", '"', "{", "}", "'x'", "[1", '["x", "y"]', "null", "1"]
    )
    def test_a_stop_string_is_taken_as_it_is(self, stop: str) -> None:
        """Stop strings of code are brackets, quotes and commas: nothing in them is syntax of the command line."""
        assert generate("--stop", stop).stop == [stop]

    def test_switches(self) -> None:
        assert [generate(*flags).ignore_eos for flags in ([], ["--ignore-eos"], ["--no-ignore-eos"])] == [0, 1, 0]

    @pytest.mark.parametrize("prompt", ["--config", "-x", "", "a=b", "{}", "null", "0"])
    def test_a_prompt_is_taken_as_it_is(self, prompt: str) -> None:
        assert generate(f"--prompt={prompt}").prompt == (prompt,)

    def test_several_prompts_are_for_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = ["--prompt", "a", "--prompt=b, c"]
        assert generate("--json", *arguments).prompt == ("a", "b, c")
        with pytest.raises(ConfigError, match="--prompt: given 2 times; add --json"):
            generate(*arguments)
        monkeypatch.setenv("SPECMAMBA_PROMPT", '["x", 1')
        assert generate().prompt == ('["x", 1',)

    @pytest.mark.parametrize("flag", [*ENGINE_FLAGS, *SERVER_FLAGS, "--config"])
    def test_help_lists_every_flag(self, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            serve("--help")
        assert ended.value.code == 0
        assert flag in capsys.readouterr().out

    def test_the_key_is_not_shown(self) -> None:
        config = serve("--api-key", "hunter2")
        assert "hunter2" not in repr(config) + str(config) + str(config.model_dump())

    def test_frozen(self) -> None:
        with pytest.raises(ValueError, match="frozen"):
            serve().port = 1


class TestAliases:
    @pytest.mark.parametrize("name", ["NEXTN", "nextn", "NextN", "mtp", "MTP"])
    def test_nextn_is_mtp(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert serve("--speculative-algorithm", name).speculative_algorithm == "mtp"
        assert EngineConfig(speculative_algorithm=name).speculative_algorithm == "mtp"  # type: ignore[arg-type]
        monkeypatch.setenv("SPECMAMBA_SPECULATIVE_ALGORITHM", name)
        assert serve().speculative_algorithm == "mtp"

    @pytest.mark.parametrize("name", ["medusa", ""])
    def test_what_is_not_built_is_refused(self, name: str) -> None:
        message = refusal("--speculative-algorithm", name)
        assert message.startswith("--speculative-algorithm: ")
        assert "'auto', 'none', 'mtp', 'eagle', 'eagle3', 'dflash', 'draft-model', 'ngram' or 'suffix'" in message

    @pytest.mark.parametrize("name", ["eagle", "EAGLE3", "draft-model"])
    def test_drafts_that_are_not_in_the_checkpoint_need_a_path(self, name: str) -> None:
        message = refusal("--speculative-algorithm", name)
        assert message == f"--speculative-algorithm: {name.lower()} needs --speculative-draft-model-path"

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--speculative-algorithm", "none"], "none has no use for it"),
            (["--speculative-algorithm", "ngram"], "ngram has no use for it"),
        ],
    )
    def test_a_path_that_is_not_used(self, flags: list[str], words: str) -> None:
        assert words in refusal("--speculative-draft-model-path", "heads", *flags)

    @pytest.mark.parametrize("flag", ["--model", "--speculative-draft-model-path"])
    def test_a_path_that_is_empty(self, flag: str) -> None:
        assert refusal(flag, "").startswith(f"{flag}: ")

    def test_the_form_of_a_draft_goes_with_a_tree(self) -> None:
        flags = ["--speculative-tree", "tree.json", "--speculative-draft-model-quantization", "int8"]
        assert serve(*flags).drafting_flags == ["--speculative-tree", "--speculative-draft-model-quantization"]

    @pytest.mark.parametrize("rule", ["auto", "target"])
    def test_a_rule_that_no_drafter_is_needed_for(self, rule: str) -> None:
        assert serve().speculative_accept == "auto"
        assert serve("--speculative-accept", rule, "--speculative-algorithm", "none").drafting_flags == []

    def test_rejection_counts_as_a_drafting_flag(self) -> None:
        assert serve("--speculative-accept", "rejection").drafting_flags == ["--speculative-accept"]
        assert "need a drafter" in refusal("--speculative-accept", "rejection", "--speculative-algorithm", "none")

    def test_a_revision_of_nothing(self) -> None:
        assert "needs --speculative-draft-model-path" in refusal("--speculative-draft-model-revision", "main")

    @pytest.mark.parametrize("algorithm", ["none", "ngram"])
    def test_a_form_of_nothing(self, algorithm: str) -> None:
        message = refusal("--speculative-draft-model-quantization", "int8", "--speculative-algorithm", algorithm)
        assert "has no matrices" in message


class TestPrefixCacheFlags:
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--disable-radix-cache", "--mamba-radix-cache-strategy", "extra_buffer"], "--mamba-radix-cache-strategy"),
            (["--disable-radix-cache", "--cache-eviction", "flops"], "--cache-eviction"),
            (["--disable-radix-cache", "--schedule-policy", "lpm"], "--schedule-policy lpm needs the prefix cache"),
            (["--mamba-track-interval", "64"], "needs --mamba-radix-cache-strategy extra_buffer"),
            (["--schedule-max-overtakes", "4"], "needs --schedule-policy lpm"),
            (["--disable-radix-cache", "--hicache-size", "1"], "--hicache-size: this needs the prefix cache"),
            (["--hicache-storage-size", "4", "--hicache-size", "1"], "--hicache-storage-size: this needs"),
            (["--hicache-write-policy", "write_back"], "this needs --hicache-storage-dir"),
            (["--hicache-state-dtype", "float16"], "a place below the pools"),
            (["--hicache-state-dtype", "float16", "--hicache-ratio", "0"], "a place below the pools"),
            (["--hicache-ratio", "1", "--hicache-size", "1"], "drop one of them"),
            (
                ["--hicache-size", "1", "--hicache-state-dtype", "float16", "--mamba-ssm-dtype", "bfloat16"],
                "the state pool has bfloat16",
            ),
        ],
    )
    def test_a_flag_that_would_do_nothing_is_refused(self, flags: list[str], words: str) -> None:
        assert words in refusal(*flags)

    def test_together_they_are_fine(self) -> None:
        strategy = ["--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64"]
        assert serve(*strategy).mamba_track_interval == 64
        assert serve("--schedule-policy", "lpm", "--schedule-max-overtakes", "4").schedule_max_overtakes == 4
        assert serve("--hicache-ratio", "0", "--hicache-size", "8").hicache_size == 8


class TestPrecedence:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        file = tmp_path / "settings.toml"
        file.write_text('page_size = 2\nseed = 2\nhost = "toml"\nspeculative_algorithm = "NEXTN"\n')
        return file

    def test_command_line_over_environment_over_file_over_defaults(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPECMAMBA_PAGE_SIZE", "3")
        monkeypatch.setenv("SPECMAMBA_SEED", "3")
        for config_flag in (["--config", str(file)], [f"--config={file}"]):
            config = serve("--seed", "4", *config_flag)
            assert (config.seed, config.page_size, config.host, config.port) == (4, 3, "toml", 30000)
            assert config.speculative_algorithm == "mtp"

    def test_a_flag_with_its_default_value_still_wins(self, file: Path) -> None:
        assert serve("--page-size", "1", "--config", str(file)).page_size == 1

    def test_environment_of_the_python_interface(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECMAMBA_PAGE_SIZE", "3")
        assert EngineConfig().page_size == 3
        assert EngineConfig(page_size=5).page_size == 5

    def test_foreign_variables_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("PAGE_SIZE", "PORT", "SPECMAMBA_CONTEXT", "SPECMAMBA_PORT"):
            monkeypatch.setenv(name, "5")
        assert EngineConfig().page_size == 1  # SPECMAMBA_PORT is the server's: the engine does not stumble over it

    def test_one_file_for_both_commands(self, tmp_path: Path) -> None:
        """Values are typed as TOML types them."""
        file = tmp_path / "settings.toml"
        file.write_text('context_length = 64\nmem_fraction_static = 0.125\nmodel = "m"\n')
        for config in (serve("--config", str(file)), generate("--config", str(file))):
            assert (config.context_length, config.mem_fraction_static, config.model) == (64, 0.125, "m")

    def test_lists_in_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "settings.toml"
        file.write_text('stop = ["a", "b"]\nignore_eos = true\n')
        config = generate("--config", str(file))
        assert (config.stop, config.ignore_eos) == (["a", "b"], True)

    def test_the_flags_own_spelling_in_a_file(self, tmp_path: Path) -> None:
        """A flag copied into a file as page-size is understood, or the error has the right name."""
        file = tmp_path / "settings.toml"
        file.write_text("page-size = 8\n")
        outcome = attempt(lambda: str(serve("--config", str(file)).page_size))
        assert outcome == "8" or "page_size" in outcome


def attempt(action: Callable[[], str]) -> str:
    """What an action returns, or the words it is refused with."""
    try:
        return action()
    except ConfigError as error:
        return str(error)


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        assert refusal("--config", str(tmp_path / "none.toml")) == f"--config: there is no file {tmp_path}/none.toml"
        assert "there is no file" in refusal("--config", str(tmp_path))

    @pytest.mark.parametrize("content", [b"page_size = ", b"[", b"\xff\xfe", b"page_size: 3\n"])
    def test_not_toml(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "x.toml"
        file.write_bytes(content)
        assert f"--config: {file} is not valid TOML" in refusal("--config", str(file))

    def test_a_key_that_is_no_setting(self, tmp_path: Path) -> None:
        file = tmp_path / "x.toml"
        file.write_text("pagesize = 3\n")
        assert "pagesize" in refusal("--config", str(file))

    def test_a_value_that_is_not_valid(self, tmp_path: Path) -> None:
        file = tmp_path / "x.toml"
        file.write_text('page_size = "large"\n')
        message = refusal("--config", str(file))
        assert message.startswith("--page-size: ")
        assert "'large'" in message

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("max-num-seqs = 0", 2),
            ("speculative_config = {num_speculative_tokens = 0}", 2),
            ("[speculative_config]\nnum_speculative_tokens = 0", 2),
            ("speculative-config.num_speculative_tokens = 0", 2),
            ('"max\\u005fnum\\u005fseqs" = 0', None),
        ],
    )
    def test_a_value_under_another_name(self, tmp_path: Path, text: str, line: int | None) -> None:
        file = tmp_path / "x.toml"
        file.write_text(f"seed = 1\n{text}\n")
        where = f"({file})" if line is None else f"({file}, line {line})"
        assert refusal("--config", str(file)).endswith(where)

    def test_no_name_given(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises((SystemExit, ConfigError)) as error:
            serve("--config")
        assert "--config" in capsys.readouterr().err + str(error.value)


class TestRefused:
    @pytest.mark.parametrize(
        ("flag", "value"),
        [
            ("--port", "65536"),
            ("--port", "-1"),
            ("--port", "http"),
            ("--page-size", "0"),
            ("--page-size", "1.5"),
            ("--max-running-requests", "0"),
            ("--max-total-tokens", "0"),
            ("--context-length", "1"),
            ("--chunked-prefill-size", "0"),
            ("--mem-fraction-static", "0"),
            ("--mem-fraction-static", "1"),
            ("--mem-fraction-static", "nan"),
            ("--seed", "-1"),
            ("--seed", str(2**63)),
            ("--dtype", "int8"),
            ("--device", "tpu"),
            ("--speculative-num-steps", "0"),
            ("--speculative-num-steps", "64"),
            ("--speculative-num-draft-tokens", "1"),
            ("--api-key", ""),
            ("--served-model-name", ""),
            ("--max-queued-requests", "0"),
            ("--log-level", "loud"),
            ("--num-threads", "0"),
        ],
    )
    def test_a_value_out_of_range_names_the_flag_and_the_value(self, flag: str, value: str) -> None:
        message = refusal(flag, value)
        assert message.startswith(f"{flag}: ")
        assert value in message or value == "" or "*" in message
        assert "\n" not in message

    def test_several_mistakes_are_several_lines(self) -> None:
        lines = refusal("--port", "x", "--page-size", "0").splitlines()
        assert sorted(line.split(":")[0] for line in lines) == ["--page-size", "--port"]

    @pytest.mark.parametrize("flag", ["--speculative-num-steps", "--speculative-num-draft-tokens"])
    def test_steps_without_a_drafter(self, flag: str) -> None:
        message = refusal("--speculative-algorithm", "none", flag, "4")
        assert "need a drafter: drop them, or choose --speculative-algorithm mtp" in message
        serve(flag, "4")
        serve("--speculative-algorithm", "mtp", flag, "4")

    @pytest.mark.parametrize(("steps", "nodes"), [(3, 3), (3, 5), (1, 3), (63, 63)])
    def test_steps_and_nodes_that_disagree(self, steps: int, nodes: int) -> None:
        both = ["--speculative-num-steps", str(steps), "--speculative-num-draft-tokens"]
        message = refusal(*both, str(nodes))
        assert f"set --speculative-num-draft-tokens {steps + 1} or leave it out" in message
        assert serve(*both, str(steps + 1)).num_draft_steps == steps  # what it says works
        assert serve(*both[:2]).num_draft_steps == steps

    def test_nodes_alone(self) -> None:
        assert serve("--speculative-num-draft-tokens", "2").num_draft_steps == 1
        assert serve("--speculative-num-draft-tokens", "64").num_draft_steps == 63

    def test_the_environment_is_named_like_the_flag(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECMAMBA_PORT", "many")
        assert refusal().startswith("--port: ")

    def test_a_list_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECMAMBA_STOP", '["a", "b"]')
        assert generate().stop == ["a", "b"]
        monkeypatch.setenv("SPECMAMBA_STOP", "END")
        assert attempt(lambda: str(generate().stop)) == (
            """SPECMAMBA_STOP: a list is written as JSON, like ["a", "b"] (got 'END')"""
        )


class TestSources:
    """An error says where a value comes from, if that is not the command line."""

    def test_a_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECMAMBA_PAGE_SIZE", "0")
        assert refusal().endswith("(got '0') (from the environment: SPECMAMBA_PAGE_SIZE)")
        assert "environment" not in refusal("--page-size", "-1")

    def test_a_line_of_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "x.toml"
        file.write_text('# settings\nport = 8000\n"page-size" = 0\n')
        assert refusal("--config", str(file)).endswith(f"(got 0) ({file}, line 3)")
        file.write_text("port = 8000\n\npage_szie = 3\n")
        expected = f"--page-szie: there is no such flag; did you mean --page-size? ({file}, line 3)"
        assert refusal("--config", str(file)) == expected

    def test_a_variable_that_is_nearly_a_flag(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECMAMBA_PROT", "3")
        expected = "SPECMAMBA_PROT: there is no such variable of the environment; did you mean SPECMAMBA_PORT?"
        assert refusal() == expected

    def test_a_variable_that_is_nearly_a_flag_of_another_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``generate`` has --prompt, from which "prot" is two slips away."""
        monkeypatch.setenv("SPECMAMBA_PROT", "3")
        with pytest.raises(ConfigError, match=r"did you mean SPECMAMBA_PORT\?$"):
            generate()

    def test_a_variable_of_another_command(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SPECMAMBA_CONCURRENCY", "1,4")
        assert serve().port == 30000
        expected = "specmamba serve: SPECMAMBA_CONCURRENCY has no effect: this command has no such flag\n"
        assert capsys.readouterr().err == expected

    def test_what_ci_and_tests_set_is_known(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A variable that ``.ci/run`` sets for the tests must not add a line to every command's messages."""
        variables = set(re.findall(r"SPECMAMBA_[A-Z0-9_]*", (ROOT / ".ci" / "run").read_text()))
        assert variables
        for name in variables:
            monkeypatch.setenv(name, "some-folder")
        serve()
        assert capsys.readouterr().err == ""

    def test_what_kubernetes_says_of_a_service(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"):
            monkeypatch.setenv(f"SPECMAMBA_{name}", "10.0.0.1")
        assert serve().port == 30000
        assert not capsys.readouterr().err

    def test_variables_of_other_commands_and_of_kernels_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("SPECMAMBA_PROMPT", "SPECMAMBA_NATIVE", "SPECMAMBA_TEST_FULL"):
            monkeypatch.setenv(name, "1")
        assert serve().port == 30000


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--prot", "3"], "there is no flag --prot; did you mean --port?"),
            (["--prot=3"], "there is no flag --prot; did you mean --port?"),
            (["--xyz"], "there is no flag --xyz"),
            (["--max-model-length", "9"], "there is no flag --max-model-length; did you mean --max-model-len?"),
            (["--tensor-parallel=2"], "there is no flag --tensor-parallel; did you mean --tensor-parallel-size?"),
            (["8000"], "8000: this stands behind no flag"),
            (["a/b"], "a/b: this stands behind no flag; a model is given as --model a/b"),
            ([""], "an empty text: this stands behind no flag"),
            (["--port"], "argument --port: expected one argument"),
        ],
    )
    def test_a_mistake_is_two_lines(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            serve(*arguments)
        usage = 'usage: specmamba serve [OPTIONS]; "specmamba serve --help" lists them\n'
        assert capsys.readouterr().err == f"{usage}specmamba serve: error: {message}\n"

    def test_help_is_grouped_with_kinds_and_defaults(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            generate("--help")
        text = capsys.readouterr().out
        titles = re.findall(r"^(\w.*):$", text, re.MULTILINE)
        assert titles[:3] == ["of this command", "model", "requests"]
        assert {"memory", "speculation"} <= set(titles)
        assert "--max-tokens N " in text
        assert "(default: 128)" in text
        assert "--seed N " in text
        assert "--speculative-tree FILE" in text
        assert max(map(len, text.splitlines())) <= 110
        for word in ("PydanticUndefined", "(default: None)", "``", "null"):
            assert word not in text

    def test_every_flag_is_in_one_group(self) -> None:
        fields = {**ServerConfig.model_fields, **GenerateConfig.model_fields}
        names = [name for group in grouped(fields).values() for name in group]
        assert sorted(names) == sorted(fields)
        assert set(GROUPS) <= set(fields)


class TestPython:
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"page_size": 0}, "^page_size: "),
            ({"pagesize": 1}, "^pagesize: there is no such keyword; did you mean page_size"),
            ({"speculative_algorithm": "eagle"}, "^speculative_algorithm: eagle needs speculative_draft_model_path$"),
            ({"speculative_algorithm": "none", "speculative_num_steps": 2}, "need a drafter"),
            ({"speculative_num_steps": 2, "speculative_num_draft_tokens": 2}, "set speculative_num_draft_tokens 3"),
            ({"port": 1}, "^port: there is no such keyword$"),
            ({"max_model_length": 64}, r"^max_model_length: there is no such keyword; did you mean max_model_len\?$"),
            ({"max_tokens": 64}, "^max_tokens: there is no such keyword; it is one of SamplingParams"),
            ({"temperature": 0.5}, "^temperature: there is no such keyword; it is one of SamplingParams"),
            ({"max_new_tokens": 64}, "^max_new_tokens: there is no such keyword; it is one of SamplingParams"),
        ],
    )
    def test_flags_are_checked_before_anything_is_loaded(self, flags: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            LLM(model="/nowhere/at/all", **flags)

    def test_what_the_engine_refuses_speaks_of_keywords_too(self) -> None:
        with pytest.raises(ConfigError, match="max_total_tokens") as error:
            LLM(dtype="float32", device="cpu", max_total_tokens=1)
        assert "--" not in str(error.value)
        assert "--max-total-tokens" in str(error.value.in_flags)  # for tools of the command line

    def test_a_typo_in_sampling_parameters(self) -> None:
        with pytest.raises(ValueError, match=r"there is no 'max_token'; did you mean max_tokens\?"):
            SamplingParams(max_token=3)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="there is no 'xyz' "):
            SamplingParams.model_validate({"xyz": 3})

    def test_a_message_without_a_flag(self) -> None:
        with pytest.raises(ValueError) as error:
            EngineConfig(speculative_algorithm="none", speculative_num_steps=1)
        message = describe_validation_error(error.value)  # type: ignore[arg-type]
        assert message.startswith("--speculative-num-steps need")
        assert "Value error" not in message


@pytest.mark.parametrize(
    ("given", "device", "is_adaptive"),
    [({}, "cpu", True), ({}, "cuda", False), ({"speculative_adaptive": "auto"}, "cuda", True)]
    + [({"speculative_adaptive": "off"}, device, False) for device in ("cpu", "cuda")],
)
def test_sizes_of_drafts_follow_the_load_on_a_cpu_and_where_asked_for(
    given: dict[str, Any], device: str, is_adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECMAMBA_SPECULATIVE_ADAPTIVE", raising=False)
    assert EngineConfig(**given).on_device(device).is_adaptive == is_adaptive


def test_a_gpu_has_defaults_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a CPU stay; what is given holds everywhere, also where it is the default of the CPU."""
    monkeypatch.delenv("SPECMAMBA_SPECULATIVE_ADAPTIVE", raising=False)
    config = EngineConfig()
    assert config.on_device("cpu") == config
    assert (config.max_running_requests, config.chunked_prefill_size, config.mem_fraction_static) == (16, 512, 0.5)
    on_gpu = config.on_device("cuda")
    assert {name: getattr(on_gpu, name) for name in GPU_DEFAULTS} == dict(GPU_DEFAULTS)
    assert on_gpu.on_device("cuda") == on_gpu
    given = EngineConfig(max_running_requests=16, chunked_prefill_size=100)
    there = given.on_device("cuda")
    assert (there.max_running_requests, there.chunked_prefill_size, there.mem_fraction_static) == (16, 100, 0.85)
    assert there.describe_defaults(given) == [
        (
            "on a GPU, where nothing else is given: --speculative-adaptive off, --mamba-spare-states 0, "
            "--mem-fraction-static 0.85"
        )
    ]
    assert config.describe_defaults(config) == []


def test_captured_batches_are_bounded_by_the_default_of_the_device() -> None:
    assert EngineConfig(device="cuda", cuda_graph_max_bs=64).cuda_graph_max_bs == 64
    for flags in ({"device": "cpu"}, {"device": "cuda", "max_running_requests": 16}):
        with pytest.raises(ValueError, match="only 16 requests run together"):
            EngineConfig(cuda_graph_max_bs=17, **flags)
    with pytest.raises(ValueError, match="only 64 requests run together"):
        EngineConfig(device="cuda", cuda_graph_max_bs=65)


class OnGpuError(Exception):
    """The engine went on with the flags of a GPU."""


def test_the_engine_takes_the_defaults_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that only says that it is a GPU."""
    import torch

    from specmamba.engine import engine as module

    seen: list[float] = []

    def free_memory(device: torch.device) -> int:
        assert device.type == "cuda"
        return 1000

    def stop(self: EngineConfig) -> None:
        seen.extend((self.max_running_requests, self.chunked_prefill_size, self.mem_fraction_static))
        raise OnGpuError

    monkeypatch.setattr(module, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(module, "free_memory", free_memory)
    monkeypatch.setattr(EngineConfig, "model_path", property(stop))
    with pytest.raises(OnGpuError):
        module.Engine(EngineConfig())
    assert seen == [64, 8192, 0.85]


def test_shapes_of_a_cache_in_bytes() -> None:
    """The figures that ``--help`` readers plan with: state and records in float32, windows and KV in the dtype."""
    import torch

    state = StateShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=16, conv_width=4)
    shape = CacheShape((KVShape(3, 2, 10),), 5, state, torch.bfloat16)
    assert state.conv_channels == 2 * 2 * 8 + 4 * 16
    assert shape.kv_bytes_per_token == 2 * 3 * 2 * 10 * 2
    assert shape.state_bytes_per_slot == 5 * (4 * 4 * 8 * 16 + 3 * state.conv_channels * 2)
    assert shape.record_bytes_per_token == 5 * (4 * (2 * 8 + 4 * 17) + state.conv_channels * 2)


def own_checks(config_class: type[CommandLine], kind: str) -> set[str]:
    """The names of the functions that a class itself adds to check its values."""
    return {name for name in getattr(config_class.__pydantic_decorators__, kind) if name in vars(config_class)}


@pytest.mark.parametrize("kind", ["model_validators", "field_validators"])
def test_no_check_of_a_command_takes_the_place_of_another(kind: str) -> None:
    """Functions of the same name do, so that the flags of the engine would go unchecked."""
    classes = [ServerConfig, GenerateConfig, ChatConfig, AcceptanceBenchConfig, PrefixBenchConfig, TreeTunerConfig]
    for config_class in classes:
        owners = [base for base in config_class.__mro__ if issubclass(base, CommandLine)]
        names = [name for owner in owners for name in own_checks(owner, kind)]
        assert len(names) == len(set(names)), config_class


@pytest.mark.parametrize("config_class", [AcceptanceBenchConfig, PrefixBenchConfig])
def test_commands_with_checks_of_their_own_check_the_flags_of_the_engine(config_class: type[EngineConfig]) -> None:
    flags = ["--speculative-algorithm", "ngram", "--speculative-draft-model-path", "x"]
    with pytest.raises(ConfigError, match="ngram has no use for it"):
        parse_command_line(config_class, "bench", flags)


class Sizes(BaseModel):
    width: int = 1
    depth: int = 2


class Nested(CommandLine):
    sizes: Sizes = Sizes()
    folders: list[Path] = Field([])
    limit: int | None = 3
    name: str = "x"
    numbers: tuple[int, ...] = ()
    shares: tuple[Annotated[float, Field(ge=0)], ...] = (1.0,)


@pytest.mark.parametrize("flags", [["1,16,1"], ["[1,16,1]"], ["1", "16,1"]])
def test_commas_part_numbers(flags: list[str]) -> None:
    read = read_flags(Nested, "test", [part for flag in flags for part in ("--numbers", flag)])
    assert read.numbers == (1, 16, 1)
    assert read_flags(Nested, "test", ["--shares", "0,0.5"]).shares == (0.0, 0.5)
    with pytest.raises(ConfigError, match=r"--numbers: .*integer"):
        read_flags(Nested, "test", ["--numbers", "1,x"])


@pytest.mark.parametrize(
    ("config_class", "flags"),
    [
        (SwingConfig, ["--clients", "1,16,1"]),
        (AdaptiveBenchConfig, ["--batches", "1,4", "--temperatures", "0,0.8", "--synthetic-acceptance", "0.1,0.5"]),
        (HostTimeConfig, ["--batches", "1,8"]),
    ],
)
def test_lists_of_numbers_as_the_docs_write_them(config_class: type[CommandLine], flags: list[str]) -> None:
    read = read_flags(config_class, "test", flags)
    for flag, text in zip(flags[::2], flags[1::2], strict=True):
        assert [float(each) for each in text.split(",")] == [*getattr(read, flag[2:].replace("-", "_"))]


def test_the_default_of_other_runtimes_written_out() -> None:
    assert parse_command_line(ServerConfig, "serve", ["--quantization", "None"]).quantization == "auto"


def test_flags_of_parts_lists_and_none() -> None:
    flags = ["--sizes.depth", "5", "--folders", "a,b", "--folders", "c", "--limit", "None", "--name", "None"]
    read = read_flags(Nested, "test", flags)
    assert read.sizes == Sizes(depth=5)
    assert read.folders == [Path("a,b"), Path("c")]  # no value is cut
    assert (read.limit, read.name) == (None, "None")
    over = read_flags(Nested, "test", ["--name", "1"], name="2", limit=4)
    assert (over.name, over.limit, over.folders) == ("1", 4, [])
    with pytest.raises(ConfigError, match=r"--sizes: .*integer"):
        read_flags(Nested, "test", ["--sizes.depth", "deep"])
