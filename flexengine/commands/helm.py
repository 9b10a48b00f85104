"""flexengine helm run|export|import: HELM with this engine, in one environment or in two."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.commands.exit_codes import DONE, SOME_FAILED, raised_in, run_interruptible
from flexengine.commands.messages import say, say_error
from flexengine.commands.open_engine import load_libraries
from flexengine.commands.options import MODEL, add_lossy, add_machine, allowed, lossy_of, named
from flexengine.commands.parser import Parser
from flexengine.config import shown
from flexengine.errors import InvalidInput
from flexengine.job.overwrite import check_not_overwritten
from flexengine.job.results import check_output
from flexengine.job.streams import is_stream

if TYPE_CHECKING:
    from flexengine.apps.helm.requests import Encoding
    from flexengine.job.interrupt import Interrupts

RUN, EXPORT, IMPORT = "run", "export", "import"
STANDING = "interrupted: finished requests are stored; run the same command again to continue"
_END = """\
run passes all other options to helm-run, such as --run-entries, --suite, --max-eval-instances and --output-path;
helm-run --help lists them. Run entries need no model. export and import are for a HELM in another environment: its
helm-run --dry-run writes the requests, and its metrics are computed with
--runner-class-name flexengine.apps.helm.imported.ImportedRunner (docs/helm.md).
"""
_RUNNER = "flexengine.apps.helm.runner.FlexRunner"
# Commands of the options that export or import do not have; others belong to flexengine run.
_PLACES = {"name": "flexengine helm run", "model_logprobs": "flexengine helm run or flexengine helm import"}


def parser(files: bool = True) -> Parser:
    """Return the argument parser.

    Args:
        files: False without the positionals that only export and import have.
    """
    p = Parser(
        "helm", "Run scenarios of HELM. All requests of a suite are one batch.", _END, "run|export|import [FILE...]"
    )
    p.add_argument("action", nargs="?", choices=(RUN, EXPORT, IMPORT),
                   help="run HELM; export its requests to rows of flexengine run; or import the results")  # fmt: skip
    if files:
        p.add_argument("files", nargs="*", type=named, metavar="FILE",
                       help="export: folders of a suite, or files named scenario_state.json; import: the output of"
                            " flexengine run, then the same")  # fmt: skip
    p.add_argument("--output", type=named, metavar="ROWS.jsonl", help="export: file for the rows")
    model = p.add_argument_group("model")
    model.add_argument("--model", **MODEL)
    model.add_argument("--name", type=named, metavar="NAME",
                       help="run: name of the model in HELM, flexengine/NAME (default: that of the model)")  # fmt: skip
    model.add_argument("--chat-template", choices=("auto", "yes", "no"), default="auto",
                       help="write prompts as a user's message, with the model's chat template (default: %(default)s:"
                            " if the model has one, as HELM does)")  # fmt: skip
    model.add_argument("--model-logprobs", action="store_true",
                       help="run and import: tokens generated at temperature 0 have the model's own log probabilities,"
                            " for HELM's metrics of calibration (default: 0, as with HELM's own client)")  # fmt: skip
    add_machine(p.add_argument_group("machine", "for run; export and import only read the tokenizer"))
    add_lossy(p.add_argument_group("fewer bits", "for run; results change"))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0 done, 1 done with failed runs or requests, 2 refused, 3 failed
    while running, 130 or 143 interrupted by SIGINT or SIGTERM."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_interruptible(lambda interrupts: run(words, interrupts), STANDING)


def run(words: Sequence[str], interrupts: "Interrupts") -> int:
    """Run a command line. Return the exit code. Raise FlexError if an option, file, model or request is refused."""
    if words[:1] == [RUN]:
        own, rest = split(words)
        return _run(parser(files=False).parse_args(own), rest, interrupts)
    args = parser().parse_args(words)
    if args.action is None or args.action == RUN:
        raise InvalidInput(f"the first word after flexengine helm must be {RUN}, {EXPORT} or {IMPORT}")
    _check_unused(args)
    return _export(args) if args.action == EXPORT else _import(args)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of this command, and those for helm-run."""
    options = {name: action for action in parser()._actions for name in action.option_strings}
    own, rest, left = [words[0]], [], list(words[1:])
    while left:
        word = left.pop(0)
        action = options.get(word.partition("=")[0] if word.startswith("--") else word)
        if action is None:
            rest.append(word)
            continue
        own.append(word)
        if action.nargs != 0 and "=" not in word and left:
            own.append(left.pop(0))
    return own, rest


def _check_unused(args: argparse.Namespace) -> None:
    """Raise InvalidInput if an option has no effect without run."""
    plain = parser().parse_args([args.action])
    used = ("action", "files", "output", "model", "chat_template", "trust_remote_code", "allow_symlinks", "quiet",
            "verbose", "config", *(("model_logprobs",) if args.action == IMPORT else ()))  # fmt: skip
    for name, value in vars(args).items():
        if name not in used and value != getattr(plain, name):
            option = name.replace("_", "-")
            raise InvalidInput(
                f"--{option} has no effect with {args.action}; give it to {_PLACES.get(name, 'flexengine run')}"
            )


def _run(args: argparse.Namespace, words: Sequence[str], interrupts: "Interrupts") -> int:
    """Run HELM with the runner of this engine. words: options of helm-run."""
    if args.output is not None:
        raise InvalidInput("--output has no effect with run; HELM's folder is --output-path")
    _check_library()
    load_libraries()
    from helm.benchmark.executor import ExecutorError
    from helm.benchmark.run import build_parser, helm_run
    from helm.benchmark.runner import RunnerError
    from helm.common.hierarchical_logger import setup_default_logging

    from flexengine.apps.helm.engines import engine_of
    from flexengine.apps.helm.plugin import register

    theirs = build_parser()
    theirs.prog = "flexengine helm run"
    options = theirs.parse_args(list(words))
    for option in ("runner_class_name", "models_to_run", "server_url"):
        if given := getattr(options, option):
            raise InvalidInput(
                f"--{option.replace('_', '-')} is {shown(given)}, which flexengine helm sets itself;"
                " leave it out, or call helm-run"
            )
    arguments = deployment_arguments(args)
    engine_of(arguments).on_sweep = lambda _: interrupts.check()
    name = f"flexengine/{_model_name(args, arguments)}"
    register(name, arguments)
    options.runner_class_name, options.models_to_run = _RUNNER, [name]
    setup_default_logging(options.log_config)
    try:
        helm_run(options)
    except (RunnerError, ExecutorError) as error:
        say_error(str(error))
        return SOME_FAILED
    except ValueError as error:
        if not raised_in("helm", error):
            raise
        raise InvalidInput(f"helm-run: {error}") from error
    return DONE


def deployment_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the deployment that the options describe. Raise InvalidInput if switches are wrong."""
    lossy = lossy_of(args)
    names = ("model", "device", "dtype", "device_mem", "host_mem", "offload_dir", "trust_remote_code", "allow_symlinks")
    given = {name: getattr(args, name) for name in names}
    given |= {name: value for name, value in vars(lossy).items() if value is not None}
    given |= {"allow": list(allowed(args, lossy, None)) or None, "model_logprobs": args.model_logprobs or None,
              "apply_chat_template": _chat_template(args)}  # fmt: skip
    return {name: value for name, value in given.items() if value not in (None, False) or name == "apply_chat_template"}


def _chat_template(args: argparse.Namespace) -> bool | None:
    return {"auto": None, "yes": True, "no": False}[args.chat_template]


def _model_name(args: argparse.Namespace, arguments: dict[str, Any]) -> str:
    """Return the model's name in HELM. Raise InvalidInput if HELM could not read it in a run entry."""
    from flexengine.apps.helm.engines import engine_of

    name = args.name or engine_of(arguments).core.source.name.replace("/", "_")
    if not all(character.isalnum() or character in "._-" for character in name):
        raise InvalidInput(
            f"the model's name in HELM would be {shown(name)}; it may have letters, digits, dots,"
            " dashes and underscores: give --name NAME"
        )
    return str(name)


def _check_library() -> None:
    """Raise InvalidInput if HELM is not installed."""
    try:
        import helm.benchmark.run  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            f'HELM is needed ({error}); pip install "flexengine[helm]", or export its requests from'
            " another environment: docs/helm.md"
        ) from error


def _encoding(args: argparse.Namespace) -> "Encoding":
    """Return the encoding of export and import. No weights are read."""
    from flexengine.apps.helm.requests import Encoding

    options = {name: getattr(args, name) for name in ("trust_remote_code", "allow_symlinks")}
    with load_libraries()(args.model, **options) as engine:
        return Encoding.of(engine.tokenizer, _chat_template(args), None, args.model_logprobs)


def _export(args: argparse.Namespace) -> int:
    from flexengine.apps.helm.exchange import export, read_states

    if not args.files or args.output is None:
        raise InvalidInput("write flexengine helm export FOLDER --output ROWS.jsonl, with the folder of a suite")
    check_output(args.output)
    if args.output == "-" or is_stream(args.output):
        raise InvalidInput(f"--output is {args.output}; it must be a file, which flexengine run reads several times")
    states = read_states(args.files)
    check_not_overwritten({str(path): path for path in states}, {"--output": args.output})
    count = export(states, _encoding(args), Path(args.output))
    say(
        f"{count} rows are in {args.output}; run them with: flexengine run {args.output} --score --logprobs 0 --output"
        " RESULTS.jsonl"
    )
    return DONE


def _import(args: argparse.Namespace) -> int:
    from flexengine.apps.helm.exchange import complete, read_states

    if len(args.files) < 2:
        raise InvalidInput("write flexengine helm import RESULTS.jsonl FOLDER, with the folder of a suite")
    if args.output is not None:
        raise InvalidInput("--output has no effect with import, which completes the files of the suite; leave it out")
    results, *names = args.files
    states = read_states(names)
    done, failed = complete(states, Path(results), _encoding(args))
    say(f"{done} requests in {len(states)} files have results, {failed} of them an error")
    return SOME_FAILED if failed else DONE
