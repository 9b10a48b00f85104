"""Command lines of other programs: each is answered by one line with the right command, which is valid."""

import shlex

import pytest

from flexengine.shell.commands import habits
from flexengine.shell.commands import main as front
from flexengine.shell.commands.main import main
from flexengine.shell.commands.plan import parser as plan_parser
from flexengine.shell.commands.quality import parser as quality_parser
from flexengine.shell.commands.run import parser as run_parser

PARSERS = {"run": run_parser, "plan": plan_parser, "quality": quality_parser}
# A command line with options of another program, and the command line at the end of the answer.
WRONG = [
    ("run p.jsonl --max-new-tokens 64", "run p.jsonl --max-tokens 64"),
    ("run p.jsonl --max_new_tokens=64", "run p.jsonl --max-tokens 64"),
    ("run p.jsonl --max_tokens 64", "run p.jsonl --max-tokens 64"),
    ("run p.jsonl --max-length 64", "run p.jsonl --max-tokens 64"),
    ("run p.jsonl -n 64", "run p.jsonl --max-tokens 64"),
    ("run p.jsonl --gen-len 64", "run p.jsonl --max-tokens 64"),
    ("run p.jsonl --temp 0.7", "run p.jsonl --temperature 0.7"),
    ("run p.jsonl --topk 40", "run p.jsonl --top-k 40"),
    ("run p.jsonl --topk 0.1", "run p.jsonl --sparse-attention 0.1"),
    ("run p.jsonl --top_p 0.9", "run p.jsonl --top-p 0.9"),
    ("run p.jsonl --repeat-penalty 1.1", "run p.jsonl --repetition-penalty 1.1"),
    ("run p.jsonl --num-return-sequences 4", "run p.jsonl --n 4"),
    ("run p.jsonl --stop-sequences END", "run p.jsonl --stop END"),
    ("run p.jsonl --do-sample", "run p.jsonl --temperature 1"),
    ("run p.jsonl --greedy", "run p.jsonl --temperature 0"),
    ("run p.jsonl --top-logprobs 5", "run p.jsonl --logprobs 5"),
    ("run p.jsonl --batch-size 32", "run p.jsonl"),
    ("run --batch-size 32 p.jsonl", "run p.jsonl"),
    ("run p.jsonl --max-num-seqs=256", "run p.jsonl"),
    ("run p.jsonl --gpu-batch-size 32 --num-gpu-batches 8", "run p.jsonl"),
    ("run p.jsonl --percent 0 100 0 100 0 100", "run p.jsonl"),
    ("run p.jsonl --gpu-memory-utilization 0.9", "run p.jsonl"),
    ("run p.jsonl -ngl 20", "run p.jsonl"),
    ("run p.jsonl --tensor-parallel-size 1", "run p.jsonl"),
    ("run p.jsonl --max-model-len 4096", "run p.jsonl"),
    ("run p.jsonl --num-beams 4", "run p.jsonl"),
    ("run p.jsonl --quantization int4", "run p.jsonl --weights int4"),
    ("run p.jsonl --quantization awq", "run p.jsonl --weights int4"),
    ("run p.jsonl -q 8bit", "run p.jsonl --weights int8"),
    ("run p.jsonl --load-in-4bit", "run p.jsonl --weights int4"),
    ("run p.jsonl --compress-weight --compress-cache", "run p.jsonl --weights int4 --cache int4"),
    ("run p.jsonl --kv-cache-dtype fp8", "run p.jsonl --cache int8"),
    ("run p.jsonl -ctk q8_0", "run p.jsonl --cache int8"),
    ("run p.jsonl --kv-cache-dtype auto", "run p.jsonl"),
    ("run p.jsonl --dtype fp16", "run p.jsonl --dtype float16"),
    ("run p.jsonl --device gpu", "run p.jsonl --device cuda"),
    ("run p.jsonl --cpu", "run p.jsonl --device cpu"),
    ("run p.jsonl --offload-folder /scratch", "run p.jsonl --offload-dir /scratch"),
    ("run --input-file p.jsonl --output-file out.jsonl", "run --input p.jsonl --output out.jsonl"),
    ("run -f p.jsonl --model-path m", "run --input p.jsonl --model m"),
    ("run org/model-7b p.jsonl", "run --model org/model-7b p.jsonl"),
    ("run model.gguf -i p.jsonl", "run --model model.gguf -i p.jsonl"),
    ("run p.jsonl --num-prompts 10", "run p.jsonl --limit 10"),
    ("run p.jsonl --bits 4", "run p.jsonl --weights int4"),
    ("run p.jsonl --weights 8", "run p.jsonl --weights int8"),
    ("run p.jsonl --gpu 0", "run p.jsonl --device cuda"),
    ("plan opt-30b --prompts 2000", "plan opt-30b --rows 2000"),
    ("plan opt-30b --num-prompts 2000 --input-tokens 300", "plan opt-30b --rows 2000 --prompt-tokens 300"),
    ("plan opt-30b -i p.jsonl --num-prompts 20", "plan opt-30b -i p.jsonl --limit 20"),
    ("run p.csv --column question", "run p.csv --prompt-column question"),
    ("run p.jsonl --resume", "run p.jsonl"),
    ("run p.jsonl --overwrite", "run p.jsonl --restart"),
    ("run p.jsonl --disable-tqdm", "run p.jsonl --quiet"),
    ("run p.csv --apply_chat_template", "run p.csv --chat"),
    ("run p.csv --apply-chat-template --temp 1", "run p.csv --chat --temperature 1"),
    ("run p.txt -cnv", "run p.txt --chat"),
    ("run p.txt --chat --chat-template chatml", "run p.txt --chat"),
    ("run p.jsonl --chat-template=tool.jinja", "run p.jsonl"),
    ("plan m -i p.csv --apply-chat-template", "plan m -i p.csv --chat"),
    ("plan m --input-len 512 --output-len 32 --num-rows 5", None),  # the last one is --limit, which needs --input
    ("plan m --input-len 512 --output-len 32", "plan m --prompt-tokens 512 --max-tokens 32"),
    ("plan m --machine t4.json", "plan m --hardware t4.json"),
    ("quality m --weights int8 int4", "quality m --weights int8,int4"),
    ("quality --weights int8 int4 --cache int8 m", "quality --weights int8,int4 --cache int8 m"),
]  # fmt: skip
PIPED = [
    ("run a.jsonl b.jsonl", "cat a.jsonl b.jsonl | flexengine run -"),
]
COMMANDS = [
    ("-q plan m", "plan -q m"),
    ("p.jsonl --max-tokens 5", "run p.jsonl --max-tokens 5"),
    ("generate p.jsonl", "run p.jsonl"),
    ("run-batch -i p.jsonl -o out.jsonl", "run -i p.jsonl -o out.jsonl"),
    ("estimate m", "plan m"),
    ("bench", "measure"),
    ("perplexity m", "quality m"),
    ("score texts.jsonl -m m", "run --score texts.jsonl -m m"),
    ("--model m p.jsonl", "run --model m p.jsonl"),
    ("ruun p.jsonl -m m", "run p.jsonl -m m"),
    ("lmeval --tasks t", "lm-eval --tasks t"),
    ("hepl", "help"),
    ("--quite plan m", "plan --quiet m"),
    ("p.jsonl --quite", "run p.jsonl --quite"),
    ("--verify p.jsonl", "run --verify p.jsonl"),
    ("serve :1", "serve-attention :1"),
]


def told(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that the command prints. It must be refused."""
    try:
        code = main(shlex.split(line))
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err.strip()


@pytest.mark.parametrize(("wrong", "right"), [pair for pair in WRONG if pair[1]])
def test_wrong_option(wrong: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The right command stands at the end of the line, and its parser accepts it."""
    assert told(wrong, capsys).endswith(f": flexengine {right}")
    command, *words = shlex.split(right)
    PARSERS[command]().parse_args(words)


@pytest.mark.parametrize(("wrong", "right"), PIPED)
def test_several_inputs(wrong: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(wrong, capsys) == f"flexengine: a job has one input: {right}"


@pytest.mark.parametrize("wrong", ["--hepl", "-hepl", "--hlep", "--HELP", "--verison", "-version", "--quite"])
def test_an_option_of_no_command_that_is_misspelt(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = next(each for each in ("--help", "--version", "--quiet") if each[2] == wrong.lower().strip("-")[0])
    remedy = "the command comes first: flexengine run --quiet" if option == "--quiet" else f"flexengine {option}"
    assert told(wrong, capsys) == f"flexengine: there is no option {wrong}; did you mean {option}? {remedy}"


@pytest.mark.parametrize(("wrong", "right"), COMMANDS)
def test_wrong_command(wrong: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(wrong, capsys).endswith(f": flexengine {right}")


def test_there_are_forty() -> None:
    assert len(WRONG) + len(PIPED) + len(COMMANDS) > 40


def test_no_habit_is_an_option_of_ours() -> None:
    """A name in the tables that is also an option of every parser would never be replaced."""
    known = set.intersection(*({o for a in make()._actions for o in a.option_strings} for make in PARSERS.values()))
    assert not known & {*habits._NAMES, *habits.FLAGS, *habits.DROPPED} - {"-q"}


def test_each_replacement_is_known() -> None:
    """Each right name is an option of a command."""
    known = {o for make in PARSERS.values() for a in make()._actions for o in a.option_strings}
    assert "--score" in known
    assert set(habits.RENAMED) | {name for name, *_ in habits.FLAGS.values()} <= known
    assert set(habits.COMMANDS) <= set(front.COMMANDS)


@pytest.mark.parametrize("line", ["run p.jsonl --max-tokns 64 --batch-size 3", "run p.jsonl x.csv y.csv --temp 1"])
def test_a_line_with_another_fault_is_not_called_right(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The replaced command line would be refused, too, so the message is about the other fault."""
    assert "is called" not in told(line, capsys)


def test_a_model_as_the_only_argument(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert told("run model.gguf", capsys) == (
        "flexengine: model.gguf is a model, which is given by --model; write flexengine run INPUT --model model.gguf"
    )
