"""Options and commands of other programs, and their names here.

`correct` is called for a command line that is not valid. It replaces each habitual word by this project's word, and
returns a line with the right command if the replaced command line is valid.
"""

import argparse
import os
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flexengine.errors import alike, meant

Known = Mapping[str, argparse.Action]  # actions of a parser by option


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Return the words after each name of a table. An indented line continues the one before."""
    lines = (line.split(": ", 1) for line in re.split(r"\n(?=\S)", text.strip()))
    return {name: tuple(words.split()) for name, words in lines}


# Options of other programs that have another name here; the value stays.
RENAMED = _table("""
--max-tokens: --max-new-tokens --max-length --n-predict --predict -n --gen-len --output-len --output-tokens
    --max-output-tokens --max-completion-tokens --max-gen-toks
--temperature: --temp -t
--min-tokens: --min-new-tokens
--bad-word: --bad-words
--chat-template-kwargs: --chat-template-args --default-chat-template-kwargs
--top-k: --topk
--top-p: --topp
--repetition-penalty: --repeat-penalty
--n: --num-samples --num-return-sequences --best-of --n-samples
--stop: --stop-sequences --stop-sequence --stop-strings --reverse-prompt --until
--seed: --random-seed --rng-seed
--logprobs: --top-logprobs --log-probs
--input: --input-file --input-path --prompts --prompt-file --dataset --file -f
--output: --output-file --output-path --out --save-path --results
--model: --model-path --model-name --model-id --model-name-or-path --pretrained --checkpoint
--limit: --num-prompts --max-samples --limit-samples --num-rows --num-samples-limit
--prompt-column: --column --text-column --prompt-field --prompt-key --input-column
--prompt-tokens: --prompt-len --input-len --input-tokens
--offload-dir: --offload-folder --swap-dir --disk-dir --nvme-path
--host-mem: --cpu-mem --ram
--device-mem: --gpu-mem --vram --max-memory
--hardware: --machine --hw
--weights: --quantization --quantize --weight-format --bits -q
--cache: --kv-cache-dtype --cache-type-k --cache-type-v -ctk -ctv --kv-cache-type
--dtype: --torch-dtype --precision
""")
# Options without a value, by what they are here.
_SWITCHES = _table("""
--weights int4: --load-in-4bit --compress-weight
--weights int8: --load-in-8bit
--cache int4: --compress-cache
--device cpu: --cpu --use-cpu --cpu-only
--device cuda: --gpu --cuda --use-gpu
--temperature 1: --do-sample
--temperature 0: --greedy
--restart: --overwrite --force --no-resume
--no-thinking: --disable-thinking --no-think --nothink --no-enable-thinking
--chat: --apply-chat-template --conversation -cnv
--quiet: --silent --disable-tqdm --no-progress
--verbose: --debug
""")
FLAGS = {other: tuple(ours.split()) for ours, others in _SWITCHES.items() for other in others}
# Options that have no counterpart: the number of their values, and the reason.
_PLANNED = "the planner chooses block and placement (--policy FILE.json sets them)"
_NO_COUNTERPART = (
    ("--batch-size -b --max-num-seqs --gpu-batch-size --num-gpu-batches --ubatch-size", 1, _PLANNED),
    ("--n-gpu-layers --gpu-layers -ngl --device-map --cpu-offload-gb --swap-space", 1, _PLANNED),
    ("--percent", 6, _PLANNED),
    ("--gpu-memory-utilization", 1, "the free device memory is used (--device-mem SIZE limits it)"),
    ("--max-model-len --ctx-size -c --max-seq-len --context-length", 1, "the context length is the model's"),
    ("--tensor-parallel-size -tp --pipeline-parallel-size -pp --num-gpus", 1, "one device computes"),
    ("--tokenizer", 1, "the tokenizer is the model's"),
    ("--num-beams", 1, "there is no beam search"),
    ("--resume --continue --resume-from", 0, "the same command continues the job"),
    ("--chat-template", 1, "the chat template is the model's (--chat runs prompts through it)"),
)
DROPPED = {option: (values, why) for options, values, why in _NO_COUNTERPART for option in options.split()}
# Values of other programs, by what they are here. "" stands for leaving the option out.
_INT8, _INT4, _EXACT = _table("""
int8: 8bit 8-bit int8 q8_0 q8 fp8 fp8_e4m3 fp8_e5m2 w8a8 w8a16 bitsandbytes
int4: 4bit 4-bit int4 q4_0 q4_k_m q4_k q4 nf4 fp4 awq gptq w4a16 mxfp4
exact: none fp16 bf16 16
""").values()
_VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "--weights": {"int8": (*_INT8, "8"), "int4": (*_INT4, "4"), "int3": ("3",), "int2": ("2",), "": _EXACT},
    "--cache": {"int8": _INT8, "int4": _INT4, "bf16": ("bfloat16", "fp16", "f16"), "": ("auto",)},
    "--dtype": {"float16": ("fp16", "half", "f16"), "bfloat16": ("bf16",), "float32": ("fp32", "float", "f32")},
    "--device": {"cuda": ("gpu", "cuda:0")},
}
VALUES = {
    option: {other: ours for ours, others in values.items() for other in others} for option, values in _VALUES.items()
}
# Names of other programs' commands.
COMMANDS = _table("""
run: generate run-batch batch infer inference complete chat
plan: estimate explain policy dry-run
measure: bench benchmark profile
quality: eval evaluate perplexity
doctor: check info env collect-env version
verify: checksum sha256sum
cache: scan-cache clean clear
completion: completions install-completion
""")
SCORE = ("score", "loglikelihood", "logprobs")  # commands whose work `run --score` does
_EVERYWHERE = ("--help", "--version", "--quiet", "--verbose")  # the first two also without a command
_NAMES = {other: name for name, others in RENAMED.items() for other in others}
_PROMPT = ("--prompt", "-p")  # a prompt on the command line
_FORMATS = {(name,) for name in ("bf16", *_INT8, *_INT4, "int3")}
_LISTS = ("--weights", "--compute", "--cache", "--sparse-attention", "--sparsify")  # of quality: values with commas


class Argument(NamedTuple):
    """An option with its values, or a positional, whose option is ""."""

    option: str
    values: tuple[str, ...]


class CommandLine:
    """A command line in this project's words. known: the parser's actions by option."""

    def __init__(self, words: Sequence[str], known: Known) -> None:
        self.arguments: list[Argument] = []  # options and positionals
        self.reasons: list[str] = []  # one text per replaced habit
        self.before = ""  # command whose output is the input; "" if there is none
        for option, name, values in _arguments(words, known):
            if name in known or not name:
                self._add(option, name, values)
            elif name in FLAGS:
                ours, *ours_values = FLAGS[name]
                self.arguments.append(Argument(ours, tuple(ours_values)))
                self.reasons.append(f"{option} is called {' '.join(FLAGS[name])} here")
            elif name in DROPPED:
                self.reasons.append(f"leave {option} out, {DROPPED[name][1]}")
            elif name in _PROMPT and values:
                self.before = f"echo {shlex.quote(values[0])} | "
                self.arguments += [Argument("", ("-",)), Argument("--input-format", ("txt",))]
                self.reasons.append("prompts come from a file or a pipe")
            else:
                self._add(option, _NAMES.get(name, name), values)

    def words(self) -> list[str]:
        """Return the words after the name of the command."""
        return [word for option, values in self.arguments for word in (*filter(None, (option,)), *values)]

    def of(self, *options: str) -> list[Argument]:
        """Return the arguments of these options; "" for positionals."""
        return [argument for argument in self.arguments if argument.option in options]

    def _add(self, option: str, name: str, values: tuple[str, ...]) -> None:
        """Add an option by its name here, with its value in this project's words."""
        if name == "--top-k" and values and 0 < (_as_float(values[0]) or 0) < 1:
            name = "--sparse-attention"
        if name != option:
            self.reasons.append(f"{option} is called {name} here")
        value = values[0] if values else ""
        right = VALUES.get(name, {}).get(value.lower(), value)
        if right != value:
            self.reasons.append(f"{value} is called {right} here" if right else f"{value} is the default")
        if right or not value:
            self.arguments.append(Argument(name, (right,) if values else ()))


def correct(command: str, known: Known, words: Sequence[str], accepts: Callable[[list[str]], bool]) -> str | None:
    """Return a line that says what is called otherwise here, with the right command; None if the words hold no habit,
    or if replacing the habits does not give a valid command line.

    Args:
        known: actions of the command's parser by option.
        accepts: return whether words are a valid command line.
    """
    line = CommandLine(words, known)
    for repair in _REPAIRS.get(command, ()):
        repair(line)
    if not line.reasons or not accepts(line.words()):
        return None
    return f"{'; '.join(line.reasons)}: {line.before}{command_text(command, line.words())}"


def correct_command(word: str, words: Sequence[str], known: Sequence[str]) -> str | None:
    """Return a line with the right command for a first word that is no command; None if there is none."""
    for name, others in COMMANDS.items():
        if word in others and name in known:
            return f"{word} is called {name} here: {command_text(name, words)}"
    if word in SCORE:
        return f"texts are scored by run --score: {command_text('run', ['--score', *words])}"
    if word.startswith("-") and (own := alike(f"--{word.lstrip('-')}", _EVERYWHERE, 0.8)) and own != [word]:
        remedy = correct_command(own[0], words, known) if own[0] in _EVERYWHERE[2:] else f"flexengine {own[0]}"
        return f"there is no option {word}; did you mean {own[0]}? {remedy}"
    place = next((n for n, other in enumerate(words) if other in known), None) if word.startswith("-") else None
    if place is not None:
        return f"the command comes first: {command_text(words[place], [word, *words[:place], *words[place + 1 :]])}"
    if word.startswith("-") or os.path.exists(word) or Path(word).suffix in (".jsonl", ".csv", ".txt", ".parquet"):
        return f"the command comes first: {command_text('run', [word, *words])}"
    near = meant(word, (*known, "help"))
    return f"there is no command {word}; the nearest is {near}: {command_text(near, words)}" if near else None


def command_text(command: str, words: Sequence[str]) -> str:
    """Return the text of a command line."""
    return shlex.join(["flexengine", command, *words])


def _arguments(words: Sequence[str], known: Known) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each option as it is given, with dashes instead of underscores, and its values; "" for positionals."""
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("-") or word == "-" or _as_float(word) is not None:
            yield "", "", (word,)
            continue
        option, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if option == "-q" and "--weights" in known and rest and rest[0].lower() in VALUES["--weights"]:
            option = "--quantization"
        unknown = option not in known and option.startswith("--")
        name = "--" + option[2:].replace("_", "-") if unknown else option
        if name in known:
            count = 0 if known[name].nargs == 0 else 1
        elif name in DROPPED:
            count = DROPPED[name][0]
        else:
            count = int(name in _NAMES or name in _PROMPT)
        if option in ("--gpu", "--cuda") and not equals and rest and rest[0].isdecimal():  # the number of a GPU
            rest.popleft()
        values = (value,) if equals else tuple(rest.popleft() for _ in range(min(count, len(rest))))
        yield option, name, values


def _count_rows(line: CommandLine) -> None:
    """Give the number of rows of a job without an input as --rows."""
    inputs = line.of("-i", "--input")
    numbers = [argument for argument in inputs if argument.option == "--input" and argument.values[0].isdecimal()]
    counts = line.of("--limit") + numbers
    if counts and inputs == numbers:
        option, values = counts[0]
        line.arguments[line.arguments.index(counts[0])] = Argument("--rows", values)
        line.reasons = [reason.replace(f" {option} ", " --rows ") for reason in line.reasons]


def _join_lists(line: CommandLine) -> None:
    """Join values that follow an option of a list: --weights int8 int4 becomes --weights int8,int4."""
    arguments: list[Argument] = []
    for option, values in line.arguments:
        last = arguments[-1] if arguments else Argument("", ())
        numbers = last.option.startswith("--spars")
        joined = _as_float(values[0]) is not None if not option and numbers else values in _FORMATS
        if not option and last.option in _LISTS and joined:
            arguments[-1] = Argument(last.option, (f"{last.values[0]},{values[0]}",))
            line.reasons = ["several values are joined by commas"]
        else:
            arguments.append(Argument(option, values))
    line.arguments = arguments


def _name_model(line: CommandLine) -> None:
    """Give a model that is a positional, a directory, a GGUF file or a hub id, as --model."""
    models = []
    for argument in line.of(""):
        text, path = argument.values[0], Path(argument.values[0])
        hub = text.count("/") == 1 and not os.path.exists(path) and not path.suffix[1:].isalpha()
        if os.path.isdir(path) or path.suffix == ".gguf" or hub:
            models.append(argument)
    if models and not line.of("-m", "--model") and len(line.of("", "-i", "--input")) == 2:
        line.arguments[line.arguments.index(models[0])] = Argument("--model", models[0].values)
        line.reasons.append("the model is given by --model")


def _pipe_inputs(line: CommandLine) -> None:
    """Join several inputs of lines by a pipe."""
    names = [argument.values[0] for argument in line.of("")]
    formats = {Path(name).suffix for name in names}
    if len(names) < 2 or len(formats) != 1 or not formats <= {".jsonl", ".ndjson", ".txt"}:
        return
    line.before = f"{shlex.join(['cat', *names])} | "
    text = [Argument("--input-format", ("txt",))] if formats == {".txt"} else []
    line.arguments = [Argument("", ("-",)), *(argument for argument in line.arguments if argument.option), *text]
    line.reasons.append("a job has one input")


_REPAIRS = {"quality": (_join_lists,), "plan": (_count_rows,), "run": (_name_model, _pipe_inputs)}  # by command


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
