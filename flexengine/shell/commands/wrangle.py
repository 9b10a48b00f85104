"""flexengine wrangle TASK TABLE: match, impute, detect, align or transform the rows of a table."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.apps.wrangle.spec import DEFAULT_SHOTS, MAX_TOKENS, PICKS, SIMILARITIES, TASKS, Spec, make_spec
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.plan.formatting import count
from flexengine.shell.commands import openers
from flexengine.shell.commands import options as common
from flexengine.shell.commands.interrupts import Interrupts
from flexengine.shell.commands.messages import DONE, SOME_FAILED, interruptible, say, summary_line
from flexengine.shell.commands.parser import Parser

if TYPE_CHECKING:
    from flexengine.apps.wrangle.plan import WranglePlan

_OPTIONS = [f.name for f in fields(Spec) if f.name not in ("task", "tables")]
_DEFAULTS = {f.name: f.default for f in fields(Spec)}
_ANSWER_TOKENS = [(task, str(number)) for task, number in MAX_TOKENS.items()]
_END = """\
match takes a table of pairs, whose columns begin with left_ and right_, or two tables; schema takes a table of pairs of
descriptions (left, right) or two tables; the others take one table. The output is the table with columns for
prediction, confidence (the answer's probability, as its share if the possible answers are known) and failure. Rows and
results of the job stay beside the output, in OUTPUT.rows.jsonl, OUTPUT.results.jsonl and its journal; after an
interruption the same command, without --restart, continues.
"""
_COLUMNS = """
--column NAME ...  impute, transform: the column; detect: a column whose cells are checked, may be repeated (default:
                   whole rows)
--show NAME ...    column that prompts show; may be repeated (default: all; match: all common columns)
--label NAME       column of true answers, which adds metrics and examples; detect --column X: the labels of X are in
                   the column X_NAME
--group NAME       transform: column with the name of the transformation, in the table and the examples
--delimiter CHAR   character between the cells of .csv and .tsv, e.g. ';', also in the output
--limit N          only the first N rows of each table
"""
_ANSWERS = f"""
--instruction TEXT  text at the beginning of each prompt
--noun TEXT         match: name of an entity in prompts (default: {_DEFAULTS["noun"]})
--error TEXT        detect: the error to search for, such as 'a spelling error' (default: {_DEFAULTS["error"]})
--alone             detect: show the checked cell without its row
--missing TEXT      text of an empty cell (default: {_DEFAULTS["missing"]})
--choice TEXT ...   impute: an allowed answer, to be repeated; the most likely one is chosen
--closed            impute: the allowed answers are the column's values
--generate          match, detect, schema: generate the answer instead of comparing the probabilities of Yes and No
--max-tokens N      most tokens of a generated answer (default: {", ".join(map(" ".join, _ANSWER_TOKENS))})
--evaluate          impute: predict the cells that are filled, too, and compare
--test N            predict only N rows with known answers, drawn at random; the others are examples
"""
_SHOTS = f"""
--examples FILE  table of examples, with the columns of the table and the answers; transform: with columns input and
                 output (default: rows of the table with known answers)
--shots K        examples in each prompt (default: {DEFAULT_SHOTS}, or as many as there are; of labelled rows of the
                 table at most half)
--pick           the first rows of --examples, random, random with each answer equally often, or the most similar ones
                 of each row (default: given with --examples, else random)
--seed N         seed of random choices (default: {_DEFAULTS["seed"]})
"""
_PAIRS = f"""
--top K       compare each row, or each column, of the first table with the K most similar ones of the second (default:
              match 5, schema all)
--similarity  cosine of TF-IDF over sequences of three characters, or over words (default: {_DEFAULTS["similarity"]})
--values N    schema: values of a column that its description shows (default: {_DEFAULTS["values"]})
"""
_OUTPUT = """
-o, --output OUTPUT  file for the table with predictions, in the format of the table or .jsonl
--metrics FILE.json  write the summary to this file as JSON
--json               print the summary as JSON instead of text
--restart            delete the results of earlier runs, and start over
--retry-errors       run rows again that ended with an error
"""
STANDING = "interrupted: the same command continues"
RESTARTED = "interrupted: the same command without --restart continues; with --restart it starts over"


def parser() -> Parser:
    p = Parser("wrangle", f"{'|'.join(TASKS)} TABLE [TABLE]", _END)
    p.add_argument("task", nargs="?", choices=TASKS, help="the task")
    formats = ".csv, .tsv, .parquet, .arrow or .feather; .csv and .tsv may be compressed (.gz, .zst)"
    p.add_argument("tables", nargs="*", type=common.named, metavar="FILE", help=formats)
    p.group("columns", _COLUMNS)
    p.group("questions and answers", _ANSWERS)
    shots = common.OptionTable(_SHOTS, more={"pick": {"choices": PICKS}})
    p.group("examples", shots, about="rows with answers that stand before each question")
    p.group("two tables", common.OptionTable(_PAIRS, more={"similarity": {"choices": SIMILARITIES}}))
    p.group("output", _OUTPUT)
    p.group("model and machine", common.MODEL, common.VERIFY, common.POLICY, common.MACHINE)
    p.group("lossy", common.LOSSY, about="as for run")
    return p


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the task and return the exit code. Raise FlexError if an option, a table or the model is refused, before
    weights are read."""
    from flexengine.apps.wrangle.plan import make_plan
    from flexengine.apps.wrangle.run import check, finish

    interrupts.standing = lambda: STANDING
    spec = make_spec(args.task, tuple(args.tables), {name: getattr(args, name) for name in _OPTIONS})
    _check_files(args, spec)
    args.policy, args.trace = common.policy_of(args), None
    args.lossy, args.allow = common.lossy_of(args, args.policy)
    plan = make_plan(spec)
    if args.metrics and not plan.labelled:
        fault = f"--metrics {args.metrics} needs labels, and no predicted row has one"
        raise InvalidInput(f"{fault}; give --label COLUMN or, to impute, --evaluate")
    check(plan, args.output, args.restart)
    _run_job(args, plan, interrupts)
    summary, failure = finish(plan, args.output)
    if args.metrics:
        common.write(args.metrics, json.dumps(summary))
    if failure is not None:
        say(f"the first that failed: {failure}")
    print(json.dumps(summary) if args.json else "\n".join(_lines(plan, summary)))
    return SOME_FAILED if summary["failed"] else DONE


def _run_job(args: argparse.Namespace, plan: "WranglePlan", interrupts: Interrupts) -> None:
    from flexengine.apps.wrangle.run import job_of, prepare

    with openers.open_engine(args, lambda _: interrupts.check()) as engine:
        if args.restart:
            interrupts.standing = lambda: RESTARTED
        prepare(plan, args.output, args.restart, args.retry_errors)
        table = plan.asked.table
        job = job_of(args.output)
        questions = count(len(plan.questions), "question", "questions")
        told = f"{questions} on {count(len(table.records), 'row', 'rows')} of {table.name}"
        say(f"{told}; all prompts are in {job.rows.name}")
        again = {"restart": args.restart, "retry_errors": args.retry_errors}
        params = SamplingParams(logprobs=None if plan.choices else 0)  # the log probability of each token
        done = engine.run_job(job.rows, job.results, params, score=True, row_options=True, **again)
    if done.sweeps:
        say(summary_line(done.to_json()))


def _lines(plan: "WranglePlan", summary: dict[str, Any]) -> list[str]:
    """Return the summary as lines of text."""
    from flexengine.apps.wrangle.run import described

    answers = ", ".join(f"{n} {answer}" for answer, n in summary["answers"].items())
    failed = f", {summary['failed']} failed" if summary["failed"] else ""
    number = count(summary["predicted"], "answer", "answers")
    lines = [f"{number}{f' ({answers})' if answers else ''}{failed}: {summary['output']}"]
    if summary["empty"] and not plan.labelled:
        remedy = "more examples (--shots), or allowed answers (impute: --choice, --closed), prevent this"
        lines.append(f"{count(summary['empty'], 'answer is', 'answers are')} empty; {remedy}")
    if summary["cut"] and not plan.spec.yes_no:
        cut = count(summary["cut"], "answer", "answers")
        lines.append(f"{cut} reached the most tokens; --max-tokens sets it")
    return lines + (described(summary["metrics"]) if summary["metrics"] else [])


def _check_files(args: argparse.Namespace, spec: Spec) -> None:
    """Raise InvalidInput if there is no output, or a file that is written is also read, or cannot be written."""
    from flexengine.apps.wrangle.run import work_files

    if args.output is None:
        path = Path(spec.tables[0])
        suffix = "csv" if path.suffix in (".gz", ".zst") else path.suffix[1:]
        example = f"{path.name.partition('.')[0]}-{spec.task}.{suffix}"
        raise InvalidInput(f"no output is given; name a file for the table with predictions, as in --output {example}")
    read = {f"table {name}": name for name in spec.tables} | {"--examples": spec.examples}
    beside = {name: str(path) for name, path in work_files(args.output).items()}
    common.check_written(args, {"--output": args.output, "--metrics": args.metrics, **beside}, read)


main = interruptible(lambda words, interrupts: run(parser().parse_args(words), interrupts))
