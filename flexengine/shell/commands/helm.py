"""flexengine helm run|export|import: HELM with this engine, in one environment or in two."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.errors import InvalidInput, shown
from flexengine.job.files import check_not_overwritten, is_stream
from flexengine.job.results import check_output
from flexengine.shell.commands import openers
from flexengine.shell.commands import options as common
from flexengine.shell.commands.interrupts import Interrupts
from flexengine.shell.commands.messages import DONE, SOME_FAILED, foreign_errors, interruptible, say, say_error
from flexengine.shell.commands.parser import GENERAL, Parser, refuse_given

if TYPE_CHECKING:
    from flexengine.apps.helm.requests import Encoding

RUN, EXPORT, IMPORT = "run", "export", "import"
STANDING = "interrupted: finished requests are stored; run the same command again to continue"
_END = """\
run passes all other options to helm-run, such as --run-entries, --suite, --max-eval-instances and --output-path;
helm-run --help lists them. Run entries need no model. export and import are for a HELM in another environment: its
helm-run --dry-run writes the requests, and its metrics are computed with
--runner-class-name flexengine.apps.helm.imported.ImportedRunner (docs/helm.md).
"""
_CHAT_TEMPLATE = {"auto": None, "yes": True, "no": False}
_RUNNER = "flexengine.apps.helm.runner.FlexRunner"
# Options that export or import use.
_USED = {"output", "model", "chat_template", "trust_remote_code", "allow_symlinks", *GENERAL}
# Commands of options that export or import do not have; others belong to flexengine run.
_PLACES = {"name": "flexengine helm run", "model_logprobs": "flexengine helm run or flexengine helm import"}
_FILES = """\
export: folders of a suite, or files named scenario_state.json; import: the output of flexengine run, then the same"""
_MODEL = f"""
{common.MODEL.removeprefix("-m, ")}
--name NAME       run: name of the model in HELM, flexengine/NAME (default: that of the model)
--chat-template   write prompts as a user's message, with the model's chat template (default: %(default)s: if the model
                  has one, as HELM does)
--model-logprobs  run and import: tokens generated at temperature 0 have the model's own log probabilities, for HELM's
                  metrics of calibration (default: 0, as with HELM's own client)
"""


def parser(files: bool = True) -> Parser:
    """Return the argument parser. files: with the positionals that only export and import have."""
    p = Parser("helm", "run|export|import [FILE...]", _END, "All requests of a suite are one batch.")
    actions = "run HELM; export its requests to rows of flexengine run; or import the results"
    p.add_argument("action", nargs="?", choices=(RUN, EXPORT, IMPORT), help=actions)
    if files:
        p.add_argument("files", nargs="*", type=common.named, metavar="FILE", help=_FILES)
    common.add_options(p, "--output ROWS.jsonl  export: file for the rows")
    template = {"chat_template": {"choices": ("auto", "yes", "no")}}
    p.group("model", common.OptionTable(_MODEL, {"chat_template": "auto"}, template))
    p.group("machine", common.MACHINE, about="for run; export and import only read the tokenizer")
    p.group("fewer bits", common.LOSSY, about="for run; results change")
    return p


def run(words: Sequence[str], interrupts: Interrupts) -> int:
    """Run a command line. Return the exit code. Raise FlexError if an option, file, model or request is refused."""
    interrupts.standing = lambda: STANDING
    if words[:1] == [RUN]:
        own, rest = parser().split(words[1:])
        return _run(parser(files=False).parse_args([RUN, *own]), rest, interrupts)
    args = parser().parse_args(words)
    if args.action is None or args.action == RUN:
        raise InvalidInput(f"the first word after flexengine helm must be {RUN}, {EXPORT} or {IMPORT}")
    used = _USED | ({"model_logprobs"} if args.action == IMPORT else set())
    for name in args.changed:
        if name not in used:
            place = _PLACES.get(name, "flexengine run")
            refuse_given(args, [name], f"has no effect with {args.action}; give it to {place}")
    return _export(args) if args.action == EXPORT else _import(args)


def _run(args: argparse.Namespace, words: Sequence[str], interrupts: Interrupts) -> int:
    """Run HELM with the runner of this engine. words: options of helm-run."""
    if args.output is not None:
        raise InvalidInput("--output has no effect with run; HELM's folder is --output-path")
    try:
        import helm.benchmark.run  # noqa: F401
    except ImportError as error:
        remedy = 'pip install "flexengine[helm]", or export its requests from another environment: docs/helm.md'
        raise InvalidInput(f"HELM is needed ({error}); {remedy}") from error
    openers.load_libraries()
    from helm.benchmark.executor import ExecutorError
    from helm.benchmark.run import build_parser, helm_run
    from helm.benchmark.runner import RunnerError
    from helm.common.hierarchical_logger import setup_default_logging

    from flexengine.apps.helm.exchange import engine_of
    from flexengine.apps.helm.plugin import register

    theirs = build_parser()
    theirs.prog = "flexengine helm run"
    options = theirs.parse_args(list(words))
    for option in ("runner_class_name", "models_to_run", "server_url"):
        if given := getattr(options, option):
            fault = f"--{option.replace('_', '-')} is {shown(given)}, which flexengine helm sets itself"
            raise InvalidInput(f"{fault}; leave it out, or call helm-run")
    arguments = deployment_arguments(args)
    engine_of(arguments).on_sweep = lambda _: interrupts.check()
    name = f"flexengine/{_model_name(args, arguments)}"
    register(name, arguments)
    options.runner_class_name, options.models_to_run = _RUNNER, [name]
    setup_default_logging(options.log_config)
    try:
        with foreign_errors("helm", "helm-run"):
            helm_run(options)
    except (RunnerError, ExecutorError) as error:
        say_error(str(error))
        return SOME_FAILED
    return DONE


def deployment_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the deployment that the options describe. Raise InvalidInput if switches are wrong."""
    lossy, names = common.lossy_of(args)
    given = {"model": args.model, **openers.bare_options(args), "model_logprobs": args.model_logprobs, **vars(lossy)}
    given["allow"] = list(names) or None
    set_ones = {name: value for name, value in given.items() if value is not None and value is not False}
    return {**set_ones, "apply_chat_template": _CHAT_TEMPLATE[args.chat_template]}


def _model_name(args: argparse.Namespace, arguments: dict[str, Any]) -> str:
    """Return the model's name in HELM. Raise InvalidInput if HELM could not read it in a run entry."""
    from flexengine.apps.helm.exchange import engine_of

    name = args.name or engine_of(arguments).core.source.name.replace("/", "_")
    if not all(character.isalnum() or character in "._-" for character in name):
        fault = f"the model's name in HELM would be {shown(name)}"
        raise InvalidInput(f"{fault}; it may have letters, digits, dots, dashes and underscores: give --name NAME")
    return str(name)


def _encoding(args: argparse.Namespace) -> "Encoding":
    """Return the encoding of export and import. No weights are read."""
    from flexengine.apps.helm.requests import Encoding

    options = {name: getattr(args, name) for name in ("trust_remote_code", "allow_symlinks")}
    with openers.load_libraries()(args.model, **options) as engine:
        return Encoding(engine.tokenizer, _CHAT_TEMPLATE[args.chat_template], None, args.model_logprobs)


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
    command = f"flexengine run {args.output} --score --logprobs 0 --output RESULTS.jsonl"
    say(f"{count} rows are in {args.output}; run them with: {command}")
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


main = interruptible(run)
