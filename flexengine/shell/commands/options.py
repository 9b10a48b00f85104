"""Options that several commands share, each written once, and what they stand for.

Options are described as --help shows them, one paragraph each:

-o, --output OUTPUT  file for results; lines that are indented
    continue the description
--stop TEXT ...      the dots after the value's name: may be repeated
--json               an option without a value is a switch
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

from flexengine import shipped
from flexengine.errors import InvalidInput, json_fault, shown
from flexengine.job.files import check_model_kept, check_not_overwritten
from flexengine.job.inputs import FORMATS
from flexengine.lossy import ALLOWED, BUNDLED, CACHE, COMPUTE, FLASH, MIXED, QUALITY, WEIGHTS, Lossy, choices
from flexengine.policy import Policy

AUTO = "auto"  # --policy: the planner chooses
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "sim")


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


def json_object(text: str) -> object:
    """Return a JSON object. Raise ArgumentTypeError if the text is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not JSON: {json_fault(error)}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no JSON object")
    return value


# Types by the name of the value. Values of other names, such as SIZE, are text.
TYPES: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("N", "K", "ID"), int),
    **dict.fromkeys(("X", "SHARE", "SECONDS"), float),
    "JSON": json_object,
    **dict.fromkeys(("FILE", "DIR", "NAME", "MODEL", "ADDRESS", "OUT.jsonl", "ROWS.jsonl"), named),
    **dict.fromkeys(("FILE.json", "FILE.html", "FILE.lp", "FILE.png", "OUTPUT"), file_name),
}


class OptionTable(NamedTuple):
    """Options as a text, with what the text does not say, by attribute."""

    text: str  # as at the top of this file
    defaults: Mapping[str, object] = {}  # such as those of a dataclass; None for the other options
    more: Mapping[str, Mapping[str, Any]] = {}  # further arguments of `add_argument`


def add_options(group: argparse._ActionsContainer, table: OptionTable | str) -> None:
    """Add options to a parser or a group."""
    text, defaults, more = OptionTable(table) if isinstance(table, str) else table
    for paragraph in re.split(r"\n(?=\S)", dedent(text).strip()):
        words, about = re.split(r"\s{2,}", paragraph, maxsplit=1)
        names = [word.rstrip(",") for word in words.split() if word.startswith("-")]
        values = [word for word in words.split() if not word.startswith("-")]
        attribute = names[-1].lstrip("-").replace("-", "_")
        given: dict[str, Any] = {"help": " ".join(about.split())}
        others = more.get(attribute, {})
        if values or "choices" in others:
            given["default"] = defaults.get(attribute)
        else:
            given["action"] = "store_true"
        if values:
            given |= {"metavar": values[0], "type": TYPES.get(values[0], str)}
        if values[1:] == ["..."]:
            given["action"] = "append"
        group.add_argument(*names, **{**given, **others})


def _secret_file(path: str) -> str:
    """Return the path, of which `take_file` takes the secret. Raise ArgumentTypeError if it holds none."""
    from flexengine.guests.wire.secret import take_file  # imported here, as --help does without

    try:
        take_file(named(path))
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def _workers(text: str) -> int | list[str]:
    """Return a number of attention workers, or their devices or addresses."""
    return int(text) if text.lstrip("-").isdecimal() else text.split(",")


# Tables of several commands.

INPUT = """\
-i, --input FILE  .jsonl with prompt, messages or prompt_token_ids, or OpenAI batch lines; .txt, .csv, .tsv, .parquet or
    .arrow; text may be compressed (.gz, .zst); - is standard input
"""
MODEL = "-m, --model MODEL  directory, .gguf file or hub id (default: the demo model)"
VERIFY = "--verify  first compare all files of the model with their checksums"
POLICY = OptionTable(
    """\
--policy FILE.json  block shape and placement: a file, or a shipped policy (default: auto, the policy with the shortest
    predicted time)
""",
    {"policy": AUTO},
)
BITS = """
--budget SIZE           with --weights mixed: most bytes of all weights, e.g. 6G
--layer-bits FILE.json  store the matrices of every layer in the format that this file of quality --save-bits names
"""
CALIBRATION = """
--calibrate              first run the exact model over a text, once per model, to measure which errors of encoded
                         weights matter
--calibration-text FILE  calibrate, and find the thresholds of --sparsify, on this UTF-8 text instead of the bundled one
"""
ROWS = OptionTable(
    """
--input-format        format of the input (default: by its suffix; for a stream without one
    jsonl, with --delimiter csv)
--delimiter CHAR      character between the cells of .csv and .tsv, e.g. ';'
--prompt-column NAME  column or field that holds the prompt
--template TEXT       prompt of each row, with columns in braces, e.g. 'Good or bad? {review}'; {{ and }} are braces
--row-options         let columns of a table that are named like sampling parameters, such as temperature, set them for
                      their row, as fields of JSON lines do; else they are data
--chat                run each prompt as a user's message, through the model's chat template
--score               score rows with context and continuation, context and choices, or text: log probabilities of what
                      is given (docs/scoring.md)
--no-prefix-sharing   compute a prefix that several prompts have in common once for each of them
--limit N             only the first N rows
""",
    more={
        "input_format": {"choices": FORMATS},
        "no_prefix_sharing": {"dest": "prefix_sharing", "action": "store_false"},
    },
)
MACHINE = OptionTable(
    f"""
--trust-remote-code    run Python code that comes with the checkpoint
--allow-symlinks       read files of the model's directory that are links to files outside of it
--dtype DTYPE          {", ".join(DTYPES[:-1])} or {DTYPES[-1]} (default: %(default)s: float32 on a CPU, the
                       checkpoint's own on a GPU)
--device               device that computes (default: %(default)s)
--device-mem SIZE      device memory to use, e.g. 800M or 16GiB (cpu: RAM)
--host-mem SIZE        host memory to use beside a GPU
--offload-dir DIR ...  where KV cache and activations spill to disk; give it once more for each further disk, which may
                       also hold a copy of some weights
""",
    {"dtype": "auto", "device": "auto"},
    {"dtype": {"choices": DTYPES}, "device": {"choices": DEVICES}},
)
WORKERS = OptionTable(
    """
--attention-workers N|DEVICE,...|HOST:PORT,...  start N processes that hold KV cache and compute attention over it, or
    one on each of these devices (cuda:1, ...), or use those that flexengine serve-attention runs at these addresses, if
    the plan is faster with them (docs/attention-workers.md)
--worker-mem SIZE  memory for KV cache of each worker that is started, of its device
--engines N        let N processes of this machine, each with all weights, compute in turn while the workers attend: on
                   a GPU each, if there are GPUs (default: %(default)s)
""",
    {"engines": 1},
    {"attention_workers": {"type": _workers, "default": 0}, "engines": {"type": int}},
)
SECRET = OptionTable(
    """
--secret-file FILE  file with the secret that processes on several machines share, instead of FLEXENGINE_SECRET_FILE
""",
    more={"secret_file": {"type": _secret_file}},
)
LOSSY = OptionTable(
    f"""
--weights  store matrices in this format; mixed chooses a format for every layer, by --budget
{BITS}
--compute                 multiply matrices in this format; int8 stores weights in int8, too, unless --weights is given
--cache                   store keys and values in this format
--sparse-attention SHARE  when decoding, read only this share of the past values, e.g. 0.1
--sparsify SHARE          set this share of the activations of SiLU or GELU to 0, those of the smallest magnitude, e.g.
                          0.7, by thresholds that the exact model finds on a text, once per model (docs/flash.md)
{CALIBRATION}
--flash           of a model with ReLU, or with --sparsify, read only the neurons that become active: those that
                  predictors of flexengine flash train name, or an oracle, which is exact (docs/flash.md); of a mixture
                  of experts, oracle keeps the experts used last in memory, and is exact
--quality         let the planner choose among 8-bit formats (near), or also 4-bit formats (small) (default:
                  %(default)s)
--allow NAME,...  let the planner choose from these: {", ".join(ALLOWED)}
""",
    {"quality": "exact"},
    {
        "weights": {"choices": (*WEIGHTS, MIXED)},
        "compute": {"choices": COMPUTE},
        "cache": {"choices": tuple(CACHE)},
        "flash": {"choices": FLASH},
        "quality": {"choices": tuple(QUALITY)},
    },
)


def calibration_of(args: argparse.Namespace) -> str | None:
    """Return the calibration text: a file name, BUNDLED, or None."""
    text: str | None = args.calibration_text
    return text if text is not None else BUNDLED if args.calibrate else None


def policy_of(args: argparse.Namespace) -> Policy | None:
    """Return the policy of --policy, a file or a shipped name; None if the planner chooses. Raise InvalidInput if it is
    neither, or if the file holds no policy."""
    return None if args.policy == AUTO else Policy.load(shipped.find_file("policies", args.policy))


def lossy_of(args: argparse.Namespace, policy: Policy | None = None) -> tuple[Lossy, tuple[str, ...]]:
    """Return the lossy switches in the arguments, and the names that the planner may choose from. Raise InvalidInput if
    a value is not allowed or a name unknown, or if the planner may choose, but switches or a policy are given."""
    bits = bits_file(args)
    if args.weights is not None and bits is not None:
        raise InvalidInput(f"--weights {args.weights} and --layer-bits {bits} are both given; leave one out")
    switches = ("compute", "cache", "sparse_attention", "budget", "flash", "sparsify")
    given = {name: getattr(args, name) for name in switches}
    lossy = Lossy(args.weights if bits is None else bits, calibrate=calibration_of(args), **given)
    names = (*QUALITY[args.quality], *(map(str.strip, args.allow.split(",")) if args.allow is not None else ()))
    choices(names)
    if names and (lossy or policy is not None):
        other = "a policy" if policy is not None else f"{lossy}"
        raise InvalidInput(f"--quality and --allow let the planner choose, but {other} is given; leave out one of them")
    return lossy, names


def bits_file(args: argparse.Namespace) -> str | None:
    """Return the file of --layer-bits; None if none is given. Raise InvalidInput if it does not end in .json."""
    name: str | None = args.layer_bits
    if name is not None and not name.endswith(".json"):
        raise InvalidInput(f"--layer-bits is {name}; it must be the name of a .json file")
    return name


# Files.


def files_read(args: argparse.Namespace) -> dict[str, str | None]:
    """Return the files that options of several commands name, by option; None for those that are not given."""
    names = ("config", "calibration_text", "layer_bits")
    policy = getattr(args, "policy", AUTO)
    given = {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names}
    return given | {"--policy": None if policy == AUTO else shipped.find("policies", policy)}


def check_written(
    args: argparse.Namespace, written: Mapping[str, str | None], read: Mapping[str, str | None] = {}
) -> None:
    """Raise InvalidInput if a file cannot be written, is read, too, is written by two options, or is of the model.

    Args:
        written: file names by option; None if the option is not given.
        read: files that are read beside those of `files_read`.
    """
    check_not_overwritten({**read, **files_read(args)}, written)
    check_model_kept(args.model, written)
    for option, name in written.items():
        if name is None:
            continue
        path = Path(name)
        if path.is_dir():
            raise InvalidInput(f"{option} {name} cannot be written: it is a directory; name a file in it")
        if not (parent := path.absolute().parent).is_dir():
            raise InvalidInput(f"{option} {name} cannot be written: there is no directory {parent}; make it first")


def write(path: str, text: str) -> None:
    """Write a text and a newline. Raise OSError, which says so, if the file cannot be written."""
    with writing(path):
        Path(path).write_text(text + "\n", encoding="utf-8")


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Name the file in an OSError of the block, which writes it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"the file cannot be written: {error.strerror}", path) from error
