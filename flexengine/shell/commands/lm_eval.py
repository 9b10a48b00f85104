"""flexengine lm-eval --model MODEL --tasks TASK ...: lm-evaluation-harness with this engine."""

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from flexengine.errors import InvalidInput, check_library
from flexengine.shell.commands.messages import DONE, foreign_errors, program
from flexengine.shell.commands.openers import load_libraries
from flexengine.shell.commands.options import MODEL, add_options
from flexengine.shell.commands.parser import Parser

_PROGRAM = "lm-eval"
_PARTS = ("run", "ls", "validate")  # sub-commands of lm-eval
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# Help of lm-eval's own options whose meaning or default is another one here.
_HELP = {
    "model": "directory, .gguf file or hub id (default: the demo model)",
    "model_args": "options of the engine by their Python names, such as device_mem=8G weights=int4",
    **dict.fromkeys(("batch_size", "max_batch_size"), "not used: the plan chooses the sizes of batches"),
    "device": "device that computes: auto, cpu or cuda (default: auto)",
}
_END = """\
All other options are those of lm-eval run, such as --num_fewshot, --limit, --include_path, --apply_chat_template,
--use_cache, --output_path and --log_samples; flexengine lm-eval run --help lists them, and flexengine lm-eval ls tasks
the tasks. --model_args takes the options of the engine by their Python names, such as device_mem=8G weights=int4
(docs/lm-eval.md). A --config file whose name does not end in .toml is lm-eval's own.
The log level of lm-eval is --verbosity LEVEL, as -v is --verbose.
"""


def parser() -> Parser:
    """Return the parser of the options that are not lm-eval's."""
    p = Parser(_PROGRAM, "--tasks TASK...", _END, "All requests of a type are one batch.")
    add_options(p, MODEL.replace("-m,", "-m, -M,"))
    return p


def run(words: Sequence[str]) -> int:
    """Run lm-eval on a command line. Return the exit code. Raise FlexError if an option or the model is refused."""
    helped = words[:1] and words[0] in _PARTS and not {"-h", "--help"}.isdisjoint(words)
    args, rest = (argparse.Namespace(model=None), list(words)) if helped else split(words)
    check_library("lm_eval", "lm-evaluation-harness is needed", "lm-eval")
    if not rest:
        raise InvalidInput("no task is given; write flexengine lm-eval --model MODEL --tasks TASK")
    load_libraries()
    _run_harness(args.model, rest)
    return DONE


def split(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options that are this command's own, and the words for lm-eval. Exit with code 2 if one of the former
    is wrong; raise InvalidInput if -v has a value."""
    for option, value in pairwise(words):
        if option == "-v" and value.upper() in _LEVELS:
            remedy = f"write --verbosity {value} for lm-eval's log level"
            raise InvalidInput(f"-v is --verbose here, which takes no value; {remedy}")
    made = parser()
    apart = (word.split("=", 1) if word.startswith("--config=") else [word] for word in words)
    own, rest = made.split([part for parts in apart for part in parts])
    at = own.index("--config") if "--config" in own else len(own)
    if own[at + 1 :] and not own[at + 1].endswith(".toml"):
        rest += own[at : at + 2]
        del own[at : at + 2]
    return made.parse_args(own), rest


def _run_harness(model: str | None, words: Sequence[str]) -> None:
    """Run lm-eval with the model `flexengine`. model: None is that of lm-eval's --config file, or the demo model."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    import flexengine.apps.lm_eval.model  # noqa: F401  registers the model

    setup_logging()
    harness = HarnessCLI()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with foreign_errors("lm_eval", "lm-eval"):
            args = _parsed(harness, words)
            if getattr(args, "command", None) == "run":
                _make_folders(args, _fill(args, model))
            elif model is not None:
                raise InvalidInput(f"--model is {model!r}, but {_PROGRAM} {args.command} uses no model; leave it out")
            harness.execute(args)
    except ValueError as error:
        if "Sample larger than population" not in str(error):  # of Python's random
            raise
        fault = "a task has fewer documents than examples are to be drawn; lower --num_fewshot"
        raise InvalidInput(f"lm-eval: {fault}") from error


def _parsed(harness: Any, words: Sequence[str]) -> argparse.Namespace:
    for action in harness._subparsers.choices["run"]._actions:
        action.help = _HELP.get(action.dest, action.help)
    before = sys.argv
    sys.argv = [_PROGRAM, *words]
    try:
        options: argparse.Namespace = harness.parse_args()
        return options
    finally:
        sys.argv = before


def _fill(args: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """Set what lm-eval's options say about the model. They replace a --config file's, except single model_args. Return
    the file's options.

    The defaults of the harness are cuda:0 and batches of one request. Here they are auto: the engine chooses.
    """
    from lm_eval.api.registry import model_registry
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import simple_parse_args_string

    try:
        file: dict[str, Any] = EvaluatorConfig.load_yaml_config(args.config) if args.config else {}
    except OSError as error:
        raise InvalidInput(f"lm-eval: {error}") from error
    named = file.get("model_args") or {}
    given = (simple_parse_args_string(named) if isinstance(named, str) else named) | (args.model_args or {})
    chosen = model if model is not None else file.get("model")
    if chosen is not None and chosen in model_registry and not Path(chosen).exists():
        remedy = f"here this engine computes, and --model names the model: --model {given.get('pretrained', 'MODEL')}"
        raise InvalidInput(f"--model is {chosen!r}, which names another engine of lm-eval; {remedy}")
    if chosen is not None and (other := given.get("model", given.get("pretrained"))) not in (None, chosen):
        raise InvalidInput(f"--model is {chosen!r}, but model_args names {other!r}; leave one out")
    args.model = "flexengine"
    args.model_args = given if chosen is None or "pretrained" in given else {**given, "model": chosen}
    if args.device is None:
        args.device = file.get("device", "auto")
    if getattr(args, "batch_size", None) is None:
        args.batch_size = file.get("batch_size", "auto")
    return file


def _make_folders(args: argparse.Namespace, file: dict[str, Any]) -> None:
    """Make the folders of --output_path and --use_cache before anything is computed: lm-eval only logs that results
    cannot be written. file: options of a --config file."""
    for option in ("output_path", "use_cache"):
        if (given := getattr(args, option, None) or file.get(option)) is None:
            continue
        path = Path(str(given))
        folder = path if option == "output_path" and path.suffix != ".json" else path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fault = "" if os.access(folder, os.W_OK) else "is not writable"
        except OSError as error:
            fault = f"cannot be made: {error.strerror}"
        if fault:
            raise InvalidInput(f"--{option} is {path}, but {folder} {fault}; name another place")


main = program(run)
