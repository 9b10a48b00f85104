"""The argument parser: --config, options with a twin, -q and -v, and messages of one line."""

import argparse
import contextlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from flexengine import __version__, shipped
from flexengine.shell.commands import messages
from flexengine.shell.commands.completion import SHELLS, script
from flexengine.shell.commands.interrupts import Interrupts
from flexengine.shell.commands.main import COMMANDS, main, module_of
from flexengine.shell.commands.messages import displayed
from flexengine.shell.commands.plan import parser as plan_parser
from flexengine.shell.commands.run import parser as run_parser


@pytest.fixture(autouse=True)
def _verbosity() -> object:
    yield
    messages.set_verbosity(messages.NORMAL)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        run_parser().parse_args(words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


class TestConfig:
    def parse(self, tmp_path: Path, text: str, *words: str) -> argparse.Namespace:
        path = tmp_path / "job.toml"
        path.write_text(text)
        return run_parser().parse_args([*words, "--config", str(path)])

    def test_values_of_all_kinds(self, tmp_path: Path) -> None:
        args = self.parse(tmp_path, """
            input = "p.jsonl"
            model = "m"
            max-tokens = 7
            top_p = 0.5
            ignore-eos = true
            json = false
            stop = ["a b", "=", "-x"]
            stop-token-id = 3
            weights = "int4"
        """)  # fmt: skip
        assert (args.input, args.model, args.max_tokens, args.top_p) == ("p.jsonl", "m", 7, 0.5)
        assert (args.ignore_eos, args.json, args.weights) == (True, False, "int4")
        assert (args.stop, args.stop_token_ids) == (["a b", "=", "-x"], [3])

    def test_the_command_line_wins(self, tmp_path: Path) -> None:
        """Also if it gives the default value, and for options that may be repeated."""
        text = 'input = "p.jsonl"\nmax-tokens = 7\ntemperature = 1.5\nstop = ["a", "b"]\n'
        args = self.parse(tmp_path, text, "other.jsonl", "--temperature", "0", "--stop", "c")
        assert (args.input, args.max_tokens, args.temperature, args.stop) == ("other.jsonl", 7, 0.0, ["c"])

    def test_other_options_keep_their_defaults(self, tmp_path: Path) -> None:
        plain, args = run_parser().parse_args(["p.jsonl"]), self.parse(tmp_path, "seed = 3\n", "p.jsonl")
        same = {"config": None, "seed": plain.seed, "words": plain.words, "changed": plain.changed}
        assert vars(args) | same == vars(plain)

    @pytest.mark.parametrize(("text", "message"), [
        ("max-tokns = 3", "there is no option max-tokns; did you mean max-tokens?"),
        ('max-tokens = "x"', "--max-tokens is 'x'; it must be a whole number"),
        ("max-tokens = [1, 2]", "max-tokens is a list; it must be one value"),
        ("max-tokens = true", "max-tokens is True; it must be text or a number"),
        ("ignore-eos = 1", "ignore-eos is 1; it must be true or false"),
        ('weights = "int5"', "--weights is 'int5'; choose from"),
        ("config = 'b.toml'", "there is no option config"),
        ("stop_token_ids = [3]", "there is no option stop_token_ids; did you mean stop-token-id?"),
        ('input_option = "p.jsonl"', "there is no option input_option"),
        ("quiet = true\nverbose = true", "quiet and verbose are both true; leave one out"),
        ("max-tokens = 3\nmax_tokens = 2", "max-tokens and max_tokens are one option; leave one out"),
        ("seed = " + "1" * 5000, "is no TOML file: Exceeds the limit"),
        ("seed = " + "[" * 5000 + "]" * 5000, "is no TOML file: "),
        ('model = "a\\u0000b"', "-m: the name has a null character"),
        ("help = true", "there is no option help"),
        ("[run]\nseed = 1", "there is no option run"),
        ("max-tokens 3", "is no TOML file"),
    ])  # fmt: skip
    def test_what_is_wrong_names_the_file(
        self, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            self.parse(tmp_path, text, "p.jsonl")
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"{tmp_path / 'job.toml'}: {message}" in err

    @pytest.mark.parametrize(("text", "words", "level"), [
        ("quiet = true", ["-v"], messages.VERBOSE), ("verbose = true", ["-q"], messages.QUIET),
        ("quiet = true", [], messages.QUIET), ("verbose = true", [], messages.VERBOSE),
    ])  # fmt: skip
    def test_verbosity(self, tmp_path: Path, text: str, words: list[str], level: int) -> None:
        self.parse(tmp_path, text, "p.jsonl", *words)
        assert messages.verbosity() == level

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_reads_a_file(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "some.toml").write_text("quiet = true\n")
        words = {"completion": ["bash"], "convert": ["out"]}.get(name, [])
        parser = module_of(name).parser()
        assert parser.parse_args([*words, "--config", str(tmp_path / "some.toml")]).quiet

    def test_a_byte_order_mark(self, tmp_path: Path) -> None:
        assert self.parse(tmp_path, "\ufeffseed = 3", "p.jsonl").seed == 3

    def test_missing_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "none.toml: cannot be read: No such file" in refused(capsys, "p.jsonl", "--config", "none.toml")

    def test_every_option_can_be_in_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file with each option of `run`, set to another value than its default."""
        monkeypatch.setenv("FLEXENGINE_SECRET_FILE", "")  # --secret-file sets it
        lines, secret = list[str](), tmp_path / "secret"
        secret.write_text("x" * 40)
        secret.chmod(0o600)
        for action in run_parser()._actions:
            name = max(action.option_strings, key=len, default="").removeprefix("--")
            if not name or name in ("help", "version", "config", "verbose"):
                continue
            value = (
                "true" if action.nargs == 0 else "3" if action.type in (int, float) or name == "stages"
                else f'"{list(action.choices)[-1]}"' if action.choices
                else """'{"7": 1}'""" if action.metavar == "JSON" else f'"{secret}"' if name == "secret-file" else '"x"'
            )  # fmt: skip
            lines.append(f"{name} = {value}")
        args, plain = self.parse(tmp_path, "\n".join(lines)), run_parser().parse_args([])
        assert len(lines) > 35
        assert [n for n in vars(plain) if getattr(args, n) == getattr(plain, n)] == ["verbose"]


class TestTypedEscapes:
    TOLD = "two characters that stay as they are; for a line break or tab write $'...\\n...' in the shell"

    @pytest.mark.parametrize(("words", "options"), [
        (["--template", r"{a}\nLabel:"], ["--template"]), (["--stop", "x", "--stop", r"\n"], ["--stop"]),
        (["--bad-word", r"\n", "--template", r"{a}\n"], ["--template", "--bad-word"]), (["--output", r"a\n"], []),
        (["--template", "{a}\nLabel:"], []), (["--template", "{a}\n\\nabla"], []), (["--stop", "a"], []), ([], []),
        (["--delimiter", r"\t"], []), (["--template", r"{a} \times \frac{{1}}{{2}}"], []),
        (["--template", r"C:\new: {a}"], []),
    ])  # fmt: skip
    def test_of_run(self, words: list[str], options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        args = run_parser().parse_args(words)
        lines = capsys.readouterr().err.splitlines()
        assert [line.split()[1] for line in lines] == options
        assert all(self.TOLD in line for line in lines)
        assert all(getattr(args, name[2:].replace("-", "_").replace("word", "words")) for name in options)
        run_parser().parse_args([*words, "-q"])
        assert capsys.readouterr().err == ""

    def test_of_wrangle_and_in_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        module_of("wrangle").parser().parse_args(["impute", "--choice", r"a\tb", "--choice", "c"])
        assert r"--choice has \t, two characters" in capsys.readouterr().err
        (tmp_path / "job.toml").write_text("template = '{a}\\n'\nstop = \"\\n\"")
        args = run_parser().parse_args(["--config", str(tmp_path / "job.toml")])
        assert (args.template, args.stop) == (r"{a}\n", ["\n"])
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "--template has" in err
        assert err.endswith("in a file of --config, put the text between double quotes\n")


class TestTwins:
    @pytest.mark.parametrize("words", [["m"], ["-m", "m"], ["--model", "m"], ["--model=m"]])
    def test_positional_or_option(self, words: list[str]) -> None:
        assert plan_parser().parse_args(words).model == "m"

    def test_both(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "a.jsonl and --input b.jsonl are both given" in refused(capsys, "a.jsonl", "-i", "b.jsonl")

    def test_the_end_of_options(self) -> None:
        """A file after -- may begin with a dash; standard input stays."""
        assert run_parser().parse_args(["-m", "m", "--", "-x.jsonl"]).input == "./-x.jsonl"
        assert run_parser().parse_args(["-m", "m", "--", "x.jsonl"]).input == "x.jsonl"
        assert run_parser().parse_args(["--", "-"]).input == "-"

    @pytest.mark.parametrize("option", ["--trace", "--report"])
    def test_a_dash_is_no_file_to_write(self, option: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert "- stands for a stream, but this option takes a file" in refused(capsys, "p.jsonl", option, "-")

    def test_no_option_takes_the_input(self) -> None:
        """Every option takes one value or none, so a positional may stand anywhere."""
        for action in run_parser()._actions + plan_parser()._actions:
            if action.option_strings:
                assert action.nargs in (None, 0)
        assert run_parser().parse_args(["--calibrate", "p.jsonl"]).input == "p.jsonl"


class TestMessages:
    @pytest.mark.parametrize(("words", "message"), [
        (["p.jsonl", "--max-tokens", "x"], "--max-tokens is 'x'; it must be a whole number"),
        (["p.jsonl", "--top-p", "x"], "--top-p is 'x'; it must be a number"),
        (["p.jsonl", "--weights", "int5"], "--weights is 'int5'; choose from"),
        (["p.jsonl", "-o"], "-o needs a value"),
        (["p.jsonl", "--json=yes"], "--json takes no value, but 'yes' is given"),
        (["p.jsonl", "--model", ""], "-m: the name is empty"),
        (["p.jsonl", "--restrat"], "there is no option --restrat; did you mean --restart?"),
        (["p.jsonl", "--max"], "there is no option --max; did you mean --max-tokens?"),
        (["p.jsonl", "-q", "-v"], "-q and -v are both given"),
    ])  # fmt: skip
    def test_one_line(self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert message in refused(capsys, *words)

    def test_quiet_and_verbose(self, capsys: pytest.CaptureFixture[str]) -> None:
        printed = {}
        for words in ([], ["-q"], ["-v"]):
            run_parser().parse_args(["p.jsonl", *words])
            messages.say("news")
            messages.detail("more")
            messages.say_error("wrong")
            printed[" ".join(words)] = capsys.readouterr().err.split()[1::2]
        assert printed == {"": ["news", "wrong"], "-q": ["wrong"], "-v": ["news", "more", "wrong"]}

    def test_without_standard_error(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:  # fmt: skip
        """print(file=None) prints to stdout, which is for results."""
        monkeypatch.setattr(sys, "stderr", None)
        messages.say("news")
        messages.say_error("wrong")
        assert capsys.readouterr().out == ""

    def test_characters_that_control_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        for shown in (contextlib.nullcontext(), displayed()):
            with shown:
                messages.say("results are in a\x1b[2J\nb")
            assert capsys.readouterr().err == "flexengine: results are in a\\x1b[2J\\nb\n"

    @pytest.mark.parametrize("words", [["completion", "bash"], ["cache"]])
    def test_verbose_everywhere(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        """Commands that compute nothing print with -v at least their time."""
        line = re.compile(r"^flexengine: the command took \d+\.\d+ s$", re.MULTILINE)
        code = main(words)
        assert not line.search(capsys.readouterr().err)
        assert main([*words, "-v"]) == code
        assert line.search(capsys.readouterr().err)


class TestFront:
    def test_help_names_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in COMMANDS)

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"flexengine {__version__}\n"

    def test_no_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        assert "usage: flexengine COMMAND" in capsys.readouterr().err

    def test_unknown_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["frob"]) == 2
        assert capsys.readouterr().err.startswith("flexengine: 'frob' is no command; choose from run, plan,")

    @pytest.mark.parametrize("name", COMMANDS)
    def test_help_of_each_command(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        for words in ([name, "--help"], ["help", name]):
            with pytest.raises(SystemExit) as stop:
                main(words)
            assert stop.value.code == 0
            out = capsys.readouterr().out
            assert out.startswith(f"usage: flexengine {name} ")
            assert out.splitlines()[0].endswith(" [options]")
            assert all(option in out for option in ("--quiet", "--verbose", "--config", "--version"))

    @pytest.mark.parametrize("shell", SHELLS)
    def test_completion(self, shell: str) -> None:
        text = script(shell)
        assert all(name in text for name in COMMANDS)
        assert "--max-tokens" in text
        assert "--sparse-attention" in text
        assert all(name in text for name in (*shipped.names("hardware"), *shipped.names("models")))

    @pytest.mark.parametrize(("words", "found"), [
        (["flexengine", "pl"], ["plan"]), (["flexengine", "run", "--max-t"], ["--max-tokens"]),
        (["flexengine", "run", "--weights", "int"], ["int8", "int4", "int3", "int2"]),
        (["flexengine", "cache", "cl"], ["clear"]), (["flexengine", "plan", "opt-6"], ["opt-6.7b", "opt-66b"]),
        (["flexengine", "plan", "--hardware", "t4"], ["t4-16gb_208gb_ssd"]),
        (["flexengine", "run", "--policy", "opt-30b-"], ["opt-30b-4bit"]), (["flexengine", "run", "-m", "opt-6"], []),
    ])  # fmt: skip
    def test_completion_in_bash(self, words: list[str], found: list[str], tmp_path: Path) -> None:
        """The script, read by bash, completes the last word."""
        (tmp_path / "s").write_text(script("bash"))
        line = f"""
            source {tmp_path / "s"}
            COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
            $(complete -p flexengine | sed 's/.*-F \\([^ ]*\\).*/\\1/')
            echo "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        assert done.stdout.split() == found

    @pytest.mark.skipif(which("fish") is None, reason="no fish here: apt-get install fish")
    def test_completion_in_fish(self, tmp_path: Path) -> None:
        (tmp_path / "s").write_text(script("fish"))
        (tmp_path / "prompts.jsonl").touch()
        expected = {
            "pl": ["plan"], "run --max-t": ["--max-tokens"], "plan opt-6": ["opt-6.7b", "opt-66b"],
            "plan --hardware t4": ["t4-16gb_208gb_ssd"], "plan --cluster llm-pq-11": ["llm-pq-11"],
            "run --policy opt-30b-": ["opt-30b-4bit"], "run pro": ["prompts.jsonl"], "completion f": ["fish"],
        }  # fmt: skip
        lines = "\n".join(f"complete -C 'flexengine {words}' | cut -f1 | tr '\\n' ' '; echo" for words in expected)
        done = subprocess.run(["fish", "-N", "-c", f"source s\n{lines}"], cwd=tmp_path, capture_output=True, text=True,
                              check=True, env=os.environ | {"HOME": str(tmp_path)})  # fmt: skip
        assert [line.split() for line in done.stdout.splitlines()] == list(expected.values())

    @pytest.mark.parametrize(("module", "words", "usage"), [
        ("flexengine", ["plan"], "flexengine plan [MODEL]"), ("flexengine.run", [], "flexengine run INPUT"),
        ("flexengine.plan", [], "flexengine plan [MODEL]"),
        ("flexengine.plan", ["measure"], "flexengine measure [MODEL]"),
    ])  # fmt: skip
    def test_python_m(
        self, module: str, words: list[str], usage: str, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.setattr(Interrupts, "until_exit", False)  # restored after it is set
        monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        assert capsys.readouterr().out.startswith(f"usage: {usage} [options]")
