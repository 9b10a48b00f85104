"""Options and commands of other programs, and their names here.

`correct` is called for a command line that is not valid. It replaces each habitual word by this project's word, and
returns a line with the right command if the replaced command line is valid.
"""

import argparse
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

# Options of other programs that have another name here; the value stays.
RENAMED = {
    "--max-tokens": ("--max-new-tokens", "--max-length", "--n-predict", "--predict", "-n", "--gen-len", "--output-len",
                     "--output-tokens", "--max-output-tokens", "--max-completion-tokens", "--max-gen-toks"),
    "--temperature": ("--temp", "-t"),
    "--top-k": ("--topk",),
    "--top-p": ("--topp",),
    "--repetition-penalty": ("--repeat-penalty",),
    "--n": ("--num-samples", "--num-return-sequences", "--best-of", "--n-samples"),
    "--stop": ("--stop-sequences", "--stop-sequence", "--stop-strings", "--reverse-prompt", "--until"),
    "--seed": ("--random-seed", "--rng-seed"),
    "--logprobs": ("--top-logprobs", "--log-probs"),
    "--input": ("--input-file", "--input-path", "--prompts", "--prompt-file", "--dataset", "--file", "-f"),
    "--output": ("--output-file", "--output-path", "--out", "--save-path", "--results"),
    "--model": ("--model-path", "--model-name", "--model-id", "--model-name-or-path", "--pretrained", "--checkpoint"),
    "--limit": ("--num-prompts", "--max-samples", "--limit-samples", "--num-rows", "--num-samples-limit"),
    "--prompt-column": ("--column", "--text-column", "--prompt-field", "--prompt-key", "--input-column"),
    "--prompt-tokens": ("--prompt-len", "--input-len", "--input-tokens"),
    "--offload-dir": ("--offload-folder", "--swap-dir", "--disk-dir", "--nvme-path"),
    "--host-mem": ("--cpu-mem", "--ram"),
    "--device-mem": ("--gpu-mem", "--vram", "--max-memory"),
    "--hardware": ("--machine", "--hw"),
    "--weights": ("--quantization", "--quantize", "--weight-format", "--bits", "-q"),
    "--cache": ("--kv-cache-dtype", "--cache-type-k", "--cache-type-v", "-ctk", "-ctv", "--kv-cache-type"),
    "--dtype": ("--torch-dtype", "--precision"),
}  # fmt: skip
# Options without a value, and what they are here.
FLAGS = {
    "--load-in-4bit": ("--weights", "int4"), "--load-in-8bit": ("--weights", "int8"),
    "--compress-weight": ("--weights", "int4"), "--compress-cache": ("--cache", "int4"),
    "--cpu": ("--device", "cpu"), "--use-cpu": ("--device", "cpu"), "--cpu-only": ("--device", "cpu"),
    "--gpu": ("--device", "cuda"), "--cuda": ("--device", "cuda"), "--use-gpu": ("--device", "cuda"),
    "--do-sample": ("--temperature", "1"), "--greedy": ("--temperature", "0"),
    "--overwrite": ("--restart",), "--force": ("--restart",), "--no-resume": ("--restart",),
    "--apply-chat-template": ("--chat",), "--conversation": ("--chat",), "-cnv": ("--chat",),
    "--silent": ("--quiet",), "--disable-tqdm": ("--quiet",), "--no-progress": ("--quiet",), "--debug": ("--verbose",),
}  # fmt: skip
# Options that have no counterpart: the number of their values, and the reason.
_PLANNED = "the planner chooses block and placement (--policy FILE.json sets them)"
DROPPED = {
    **dict.fromkeys(("--batch-size", "-b", "--max-num-seqs", "--gpu-batch-size", "--num-gpu-batches", "--ubatch-size"),
                    (1, _PLANNED)),
    **dict.fromkeys(("--n-gpu-layers", "--gpu-layers", "-ngl", "--device-map", "--cpu-offload-gb", "--swap-space"),
                    (1, _PLANNED)),
    "--percent": (6, _PLANNED),
    "--gpu-memory-utilization": (1, "the free device memory is used (--device-mem SIZE limits it)"),
    **dict.fromkeys(("--max-model-len", "--ctx-size", "-c", "--max-seq-len", "--context-length"),
                    (1, "the context length is the model's")),
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--num-gpus"),
                    (1, "one device computes")),
    "--tokenizer": (1, "the tokenizer is the model's"),
    "--num-beams": (1, "there is no beam search"),
    **dict.fromkeys(("--resume", "--continue", "--resume-from"), (0, "the same command continues the job")),
    "--chat-template": (1, "the chat template is the model's (--chat runs prompts through it)"),
}  # fmt: skip
_INT8 = ("8bit", "8-bit", "int8", "q8_0", "q8", "fp8", "fp8_e4m3", "fp8_e5m2", "w8a8", "w8a16", "bitsandbytes")
_INT4 = ("4bit", "4-bit", "int4", "q4_0", "q4_k_m", "q4_k", "q4", "nf4", "fp4", "awq", "gptq", "w4a16", "mxfp4")
# Values of other programs, by option. "" stands for leaving the option out.
VALUES: dict[str, dict[str, str]] = {
    "--weights": dict.fromkeys(_INT8, "int8") | dict.fromkeys(_INT4, "int4")
    | {"none": "", "fp16": "", "bf16": "", "16": "", "8": "int8", "4": "int4", "3": "int3", "2": "int2"},
    "--cache": dict.fromkeys(_INT8, "int8") | dict.fromkeys(_INT4, "int4")
    | {"bfloat16": "bf16", "fp16": "bf16", "f16": "bf16", "auto": ""},
    "--dtype": {"fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32",
                "float": "float32", "f32": "float32"},
    "--device": {"gpu": "cuda", "cuda:0": "cuda"},
}  # fmt: skip
# Names of other programs' commands.
COMMANDS = {
    "run": ("generate", "run-batch", "batch", "infer", "inference", "complete", "chat"),
    "plan": ("estimate", "explain", "policy", "dry-run"),
    "measure": ("bench", "benchmark", "profile"),
    "quality": ("eval", "evaluate", "perplexity"),
    "doctor": ("check", "info", "env", "collect-env", "version"),
    "verify": ("checksum", "sha256sum"),
    "cache": ("scan-cache", "clean", "clear"),
    "completion": ("completions", "install-completion"),
}
SCORE = ("score", "loglikelihood", "logprobs")  # commands whose work `run --score` does
_NAMES = {other: name for name, others in RENAMED.items() for other in others}
_PROMPT = ("--prompt", "-p")  # a prompt on the command line
_LISTS = ("--weights", "--compute", "--cache", "--sparse-attention", "--sparsify")  # of quality: values with commas


class CommandParser(Protocol):
    """The part of a parser that `correct` uses."""

    command: str
    _actions: list[argparse.Action]

    def accepts(self, words: Sequence[str]) -> bool:
        """Return whether the words are a valid command line."""


@dataclass(frozen=True)
class Item:
    """An option with its values, or a positional.

    Attributes:
        option: name of the option; "" for a positional.
        values: values of the option, or the positional.
    """

    option: str
    values: tuple[str, ...]


@dataclass
class Line:
    """The command line in this project's words.

    Attributes:
        items: options and positionals.
        reasons: one text per replaced habit.
        before: command whose output is the input; "" if there is none.
    """

    items: list[Item]
    reasons: list[str]
    before: str = ""

    def words(self) -> list[str]:
        """Return the words after the name of the command."""
        return [word for item in self.items for word in (*filter(None, (item.option,)), *item.values)]


def correct(parser: CommandParser, words: Sequence[str]) -> str | None:
    """Return a line that says what is called otherwise here, with the right command; None if the words hold no habit,
    or if replacing the habits does not give a valid command line."""
    known = {name: action for action in parser._actions for name in action.option_strings}
    line = Line([], [])
    for item in _items(words, known):
        _translate(item, known, line)
    if parser.command == "quality":
        _join_lists(line)
    if parser.command == "plan":
        _count_rows(line)
    if parser.command == "run":
        _name_model(line, known)
        _pipe_inputs(line)
    if not line.reasons or not parser.accepts(line.words()):
        return None
    return f"{'; '.join(line.reasons)}: {line.before}{command_text(parser.command, line.words())}"


def correct_command(word: str, words: Sequence[str], known: Sequence[str]) -> str | None:
    """Return a line with the right command for a first word that is no command; None if there is none.

    Args:
        word: the first word of the command line.
        words: the words after it.
        known: names of all commands.
    """
    for name, others in COMMANDS.items():
        if word in others and name in known:
            return f"{word} is called {name} here: {command_text(name, words)}"
    if word in SCORE:
        return f"texts are scored by run --score: {command_text('run', ['--score', *words])}"
    if word.startswith("-") or Path(word).exists() or Path(word).suffix in (".jsonl", ".csv", ".txt", ".parquet"):
        return f"the command comes first: {command_text('run', [word, *words])}"
    return None


def command_text(command: str, words: Sequence[str]) -> str:
    """Return the text of a command line."""
    return shlex.join(["flexengine", command, *words])


def _items(words: Sequence[str], known: Mapping[str, argparse.Action]) -> Iterator[Item]:
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("-") or word == "-" or _as_float(word) is not None:
            yield Item("", (word,))
            continue
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if equals:
            yield Item(name, (value,))
            continue
        if name == "-q" and "--weights" in known and rest and rest[0].lower() in VALUES["--weights"]:
            name = "--quantization"
        count = min(_num_values(name, known), len(rest))
        if name in ("--gpu", "--cuda") and rest and rest[0].isdecimal():  # the number of a GPU
            rest.popleft()
        yield Item(name, tuple(rest.popleft() for _ in range(count)))


def _num_values(option: str, known: Mapping[str, argparse.Action]) -> int:
    plain = _plain(option, known)
    if plain in known:
        return 0 if known[plain].nargs == 0 else 1
    if plain in DROPPED:
        return DROPPED[plain][0]
    return int(plain in _NAMES or plain in _PROMPT)


def _plain(option: str, known: Mapping[str, argparse.Action]) -> str:
    """Return the option with dashes instead of underscores."""
    return option if option in known or not option.startswith("--") else "--" + option[2:].replace("_", "-")


def _translate(item: Item, known: Mapping[str, argparse.Action], line: Line) -> None:
    """Add an item to the line, in this project's words."""
    name = _plain(item.option, known)
    if name in known or not name:
        pass
    elif name in FLAGS:
        line.items.append(Item(FLAGS[name][0], FLAGS[name][1:]))
        line.reasons.append(f"{item.option} is called {' '.join(FLAGS[name])} here")
        return
    elif name in DROPPED:
        line.reasons.append(f"leave {item.option} out, {DROPPED[name][1]}")
        return
    elif name in _PROMPT and item.values:
        line.before = f"echo {shlex.quote(item.values[0])} | "
        line.items += [Item("", ("-",)), Item("--input-format", ("txt",))]
        line.reasons.append("prompts come from a file or a pipe")
        return
    else:
        name = _NAMES.get(name, name)
    if name == "--top-k" and item.values and 0 < (_as_float(item.values[0]) or 0) < 1:
        name = "--sparse-attention"
    if name != item.option:
        line.reasons.append(f"{item.option} is called {name} here")
    _translate_value(name, item, line)


def _translate_value(name: str, item: Item, line: Line) -> None:
    value = item.values[0] if item.values else ""
    right = VALUES.get(name, {}).get(value.lower(), value)
    if right != value:
        line.reasons.append(f"{value} is called {right} here" if right else f"{value} is the default")
    if right or not value:
        line.items.append(Item(name, (right,) if item.values else ()))


def _count_rows(line: Line) -> None:
    """Give the number of rows of a job without an input as --rows."""
    counts = [item for item in line.items if item.option == "--limit"]
    counts += [item for item in line.items if item.option == "--input" and item.values[0].isdecimal()]
    others = [item for item in line.items if item.option in ("-i", "--input") and item not in counts]
    if counts and not others:
        line.items[line.items.index(counts[0])] = Item("--rows", counts[0].values)
        line.reasons[:] = [reason.replace(f" {counts[0].option} ", " --rows ") for reason in line.reasons]


def _join_lists(line: Line) -> None:
    """Join values that follow an option of a list: --weights int8 int4 becomes --weights int8,int4."""
    items: list[Item] = []
    for item in line.items:
        if not item.option and items and items[-1].option in _LISTS and _is_value(items[-1].option, item.values[0]):
            items[-1] = replace(items[-1], values=(f"{items[-1].values[0]},{item.values[0]}",))
            line.reasons[:] = ["several values are joined by commas"]
        else:
            items.append(item)
    line.items = items


def _is_value(option: str, text: str) -> bool:
    return _as_float(text) is not None if option.startswith("--spars") else text in ("bf16", *_INT8, *_INT4, "int3")


def _name_model(line: Line, known: Mapping[str, argparse.Action]) -> None:
    """Give a model that is a positional as --model."""
    if any(item.option in ("-m", "--model") for item in line.items):
        return
    positional = [item for item in line.items if not item.option]
    others = [item for item in line.items if item.option in ("-i", "--input")]
    if len(positional) + len(others) == 2 and (model := next((x for x in positional if is_model(x.values[0])), None)):
        line.items[line.items.index(model)] = Item("--model", model.values)
        line.reasons.append("the model is given by --model")


def _pipe_inputs(line: Line) -> None:
    """Join several inputs of lines by a pipe."""
    positional = [item for item in line.items if not item.option]
    names = [item.values[0] for item in positional]
    formats = {Path(name).suffix for name in names}
    if len(names) < 2 or len(formats) != 1 or not formats <= {".jsonl", ".ndjson", ".txt"}:
        return
    line.before = f"{shlex.join(['cat', *names])} | "
    line.items = [item for item in line.items if item.option]
    line.items.insert(0, Item("", ("-",)))
    if formats == {".txt"}:
        line.items.append(Item("--input-format", ("txt",)))
    line.reasons.append("a job has one input")


def is_model(text: str) -> bool:
    """Return whether a positional of `run` names a model: a directory, a GGUF file, or a hub id."""
    path = Path(text)
    hub = text.count("/") == 1 and not path.exists() and not path.suffix[1:].isalpha()
    return path.is_dir() or path.suffix == ".gguf" or hub


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
