"""Command line options that several commands share, each written once, and what they stand for."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from flexengine import shipped
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.source import FORMATS
from flexengine.lossy import ALLOW, BUNDLED, CACHE, COMPUTE, FLASH, MIXED, QUALITY, WEIGHTS, Lossy, choices
from flexengine.policy import Policy

AUTO = "auto"  # --policy: the planner chooses
DTYPES = ("auto", "float32", "bfloat16", "float16")
SAMPLING = {f.name: f.default for f in fields(SamplingParams)}  # names and defaults of the sampling options
Group = argparse._ArgumentGroup


def named(text: str) -> str:
    """Return the text. Raise ArgumentTypeError if it is empty or has a null character."""
    if not text or "\0" in text:
        fault = "has a null character" if text else "is empty"
        raise argparse.ArgumentTypeError(f"the name {fault}; give a name or leave the option out")
    return text


def file_name(text: str) -> str:
    """Return the name of a file to write. Raise ArgumentTypeError if it is empty, or is "-"."""
    if text == "-":
        raise argparse.ArgumentTypeError("- stands for a stream, but this option takes a file; name one")
    return named(text)


INPUT: dict[str, Any] = dict(
    metavar="FILE", type=named,
    help=".jsonl with prompt, messages or prompt_token_ids, or OpenAI batch lines; .txt, .csv, .tsv, .parquet or"
         " .arrow; text may be compressed (.gz, .zst); - is standard input",
)  # fmt: skip
MODEL: dict[str, Any] = dict(
    metavar="MODEL", type=named, help="directory, .gguf file or hub id (default: the demo model)"
)
POLICY: dict[str, Any] = dict(
    metavar="FILE.json", type=named, default=AUTO,
    help="block shape and placement: a file, or a shipped policy (default: auto, the policy with the shortest predicted"
         " time)",
)  # fmt: skip


def add_rows(group: Group) -> None:
    """Add the options that say which rows of the input are read, and how."""
    group.add_argument("--input-format", choices=FORMATS,
                       help="format of the input (default: by its suffix; jsonl for a stream without one)")  # fmt: skip
    group.add_argument("--prompt-column", type=named, metavar="NAME", help="column or field that holds the prompt")
    group.add_argument("--chat", action="store_true",
                       help="run each prompt as a user's message, through the model's chat template")  # fmt: skip
    group.add_argument("--score", action="store_true",
                       help="score rows with context and continuation, context and choices, or text: log probabilities"
                            " of what is given (docs/scoring.md)")  # fmt: skip
    group.add_argument("--no-prefix-sharing", dest="prefix_sharing", action="store_false",
                       help="compute a prefix that several prompts have in common once for each of them")  # fmt: skip
    group.add_argument("--limit", type=int, metavar="N", help="only the first N rows")


def add_lengths(group: Group) -> None:
    """Add the sampling options that decide the size of a job."""
    _add(group, "max-tokens", int, "most tokens per prompt", "N")
    _add(group, "n", int, "samples per prompt", "N")


def add_sampling(group: Group) -> None:
    """Add all sampling options."""
    add_lengths(group)
    _add(group, "temperature", float, "0 is greedy")
    _add(group, "seed", int, "seed of all sampling noise", "N")
    _add(group, "top-k", int, "sample from the K likeliest tokens; 0: from all", "K")
    _add(group, "top-p", float, "sample from the fewest likeliest tokens whose probability reaches X")
    _add(group, "min-p", float, "drop tokens less likely than X times the likeliest")
    _add(group, "repetition-penalty", float, "divide the logits of tokens in prompt and text by X")
    _add(group, "presence-penalty", float, "subtract X from the logits of tokens in the text")
    _add(group, "frequency-penalty", float, "subtract X once for every time a token is in the text")
    _add(group, "logprobs", int, "log probability of each token, and of the K likeliest", "K")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="text that ends a row, taken literally; may be repeated")  # fmt: skip
    group.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID", dest="stop_token_ids",
                       help="token that ends a row; may be repeated")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence token")


def _add(group: Group, name: str, kind: Callable[[str], object], text: str, metavar: str = "X") -> None:
    default = SAMPLING[name.replace("-", "_")]
    group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)")


def add_machine(group: Group) -> None:
    """Add the options of the machine, and those of dtype and remote code."""
    group.add_argument("--trust-remote-code", action="store_true",
                       help="run Python code that comes with the checkpoint")  # fmt: skip
    group.add_argument("--allow-symlinks", action="store_true",
                       help="read files of the model's directory that are links to files outside of it")  # fmt: skip
    group.add_argument("--dtype", default="auto", choices=DTYPES,
                       help=f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]} (default: %(default)s: float32 on a CPU, the"
                            " checkpoint's own on a GPU)", metavar="DTYPE")  # fmt: skip
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "sim"),
                       help="device that computes (default: %(default)s)")  # fmt: skip
    group.add_argument("--device-mem", metavar="SIZE", help="device memory to use, e.g. 800M or 16GiB (cpu: RAM)")
    group.add_argument("--host-mem", metavar="SIZE", help="host memory to use beside a GPU")
    group.add_argument("--offload-dir", type=named, metavar="DIR", action="append",
                       help="where KV cache and activations spill to disk; give it once more for each further disk,"
                            " which may also hold a copy of some weights")  # fmt: skip


def add_workers(group: Group) -> None:
    """Add the options of attention workers."""
    group.add_argument("--attention-workers", type=_workers, default=0, metavar="N|HOST:PORT,...",
                       help="start N processes that hold KV cache and compute attention over it, or use those that"
                            " flexengine serve-attention runs at these addresses, if the plan is faster with"
                            " them (docs/attention-workers.md)")  # fmt: skip
    group.add_argument("--worker-mem", metavar="SIZE", help="memory for KV cache of each worker that is started")


def _workers(text: str) -> int | list[str]:
    """Return a number of attention workers, or their addresses."""
    return int(text) if text.lstrip("-").isdecimal() else text.split(",")


def add_lossy(group: Group) -> None:
    """Add the lossy switches, and the options that let the planner choose them."""
    group.add_argument("--weights", choices=(*WEIGHTS, MIXED),
                       help="store matrices in this format; mixed chooses a format for every layer, by"
                            " --budget")  # fmt: skip
    add_bits(group)
    group.add_argument("--compute", choices=COMPUTE,
                       help="multiply matrices in this format; int8 stores weights in int8, too, unless --weights"
                            " is given")  # fmt: skip
    group.add_argument("--cache", choices=tuple(CACHE), help="store keys and values in this format")
    group.add_argument("--sparse-attention", type=float, metavar="SHARE",
                       help="when decoding, read only this share of the past values, e.g. 0.1")  # fmt: skip
    group.add_argument("--sparsify", type=float, metavar="SHARE",
                       help="set this share of the activations of SiLU or GELU to 0, those of the smallest magnitude,"
                            " e.g. 0.7, by thresholds that the exact model finds on a text, once per model"
                            " (docs/flash.md)")  # fmt: skip
    add_calibration(group)
    group.add_argument("--flash", choices=FLASH,
                       help="of a model with ReLU, or with --sparsify, read only the neurons that become active:"
                            " those that predictors of flexengine flash train name, or an oracle, which is exact"
                            " (docs/flash.md); of a mixture of experts, oracle keeps the experts used last in memory,"
                            " and is exact")  # fmt: skip
    group.add_argument("--quality", choices=tuple(QUALITY), default="exact",
                       help="let the planner choose among 8-bit formats (near), or also 4-bit formats (small)"
                            " (default: %(default)s)")  # fmt: skip
    group.add_argument("--allow", metavar="NAME,...",
                       help=f"let the planner choose from these: {', '.join(ALLOW)}")  # fmt: skip


def add_bits(group: Group) -> None:
    """Add the options of formats that differ between layers."""
    group.add_argument("--budget", metavar="SIZE",
                       help="with --weights mixed: most bytes of all weights, e.g. 6G")  # fmt: skip
    group.add_argument("--layer-bits", type=file_name, metavar="FILE.json",
                       help="store the matrices of every layer in the format that this file of quality --save-bits"
                            " names")  # fmt: skip


def add_calibration(group: Group) -> None:
    """Add the options of calibration."""
    group.add_argument("--calibrate", action="store_true",
                       help="first run the exact model over a text, once per model, to measure which errors of encoded"
                            " weights matter")  # fmt: skip
    group.add_argument("--calibration-text", type=named, metavar="FILE",
                       help="calibrate, and find the thresholds of --sparsify, on this UTF-8 text instead of the"
                            " bundled one")  # fmt: skip


def calibration_of(args: argparse.Namespace) -> str | None:
    """Return the calibration text: a file name, BUNDLED, or None."""
    text: str | None = args.calibration_text
    return text if text is not None else BUNDLED if args.calibrate else None


def policy_file(args: argparse.Namespace) -> str | None:
    """Return the file that --policy names; None if the planner chooses."""
    return None if args.policy == AUTO else shipped.find("policies", args.policy)


def policy_of(args: argparse.Namespace) -> Policy | None:
    """Return the policy of --policy, a file or a shipped name; None if the planner chooses. Raise InvalidInput if it is
    neither, or if the file holds no policy."""
    return None if args.policy == AUTO else Policy.load(shipped.find_file("policies", args.policy))


def lossy_of(args: argparse.Namespace) -> Lossy:
    """Return the lossy switches in the arguments. Raise InvalidInput if a value is not allowed."""
    if args.weights is not None and args.layer_bits is not None:
        raise InvalidInput(f"--weights {args.weights} and --layer-bits {args.layer_bits} are both given; leave one out")
    weights = args.weights if args.layer_bits is None else bits_file(args.layer_bits)
    cache, share = args.cache, args.sparse_attention
    calibrate = calibration_of(args)
    return Lossy(weights, args.compute, cache, share, calibrate, args.budget, args.flash, args.sparsify)


def bits_file(name: str) -> str:
    """Return the name of a file of bits. Raise InvalidInput if it does not end in .json."""
    if not name.endswith(".json"):
        raise InvalidInput(f"--layer-bits is {name}; it must be the name of a .json file")
    return name


def allowed(args: argparse.Namespace, lossy: Lossy, policy: Policy | None) -> tuple[str, ...]:
    """Return the names that the planner may choose from. Raise InvalidInput if a name is unknown, or if lossy switches
    or a policy are given, too."""
    names = (*QUALITY[args.quality], *(args.allow.split(",") if args.allow is not None else ()))
    choices(names)
    if names and (lossy or policy is not None):
        other = "a policy" if policy is not None else f"{lossy}"
        raise InvalidInput(f"--quality and --allow let the planner choose, but {other} is given; leave out one of them")
    return names
